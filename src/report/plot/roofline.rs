//! The roofline picture: one panel per chip on one sheet, axes and numbers shared, and a table of the numbers
//! below.
//!
//! x is operations per HBM byte, y is operations per second, where operations are matrix FLOPs, vector
//! operations and transcendentals together. A roof counts its own kind alone: a marker far under the matrix
//! roof and close to the VPU roof is a stage that the vector unit holds back.

use std::path::Path;

use plotters::backend::DrawingBackend;
use plotters::style::RGBColor;

use super::canvas::{self, Anchor, Canvas, Picture, Place, PlotError, Type, text_width};
use super::place::{self, Area, FIRM, Placer, SOFT};
use super::theme::{Palette, Theme};
use crate::report::format::{self, TimeUnit, three_digits};
use crate::report::result::{Bound, ChipResult, PlanResult, Roof, RunResult, StageResult};

/// What to draw.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Plans whose stages are marked; all of them where none is named.
    pub plans: Vec<String>,
    /// Colours.
    pub theme: Theme,
}

/// The sheet of all chips as SVG.
///
/// # Errors
/// Where the drawing library fails.
pub fn svg(result: &RunResult, options: &Options) -> Result<String, PlotError> {
    canvas::svg(&Sheet::new(result, options), Place::File)
}

/// Writes the sheet of all chips as PNG of twice the size.
///
/// # Errors
/// Where the drawing library or the file system fails.
pub fn png(result: &RunResult, options: &Options, path: &Path) -> Result<(), PlotError> {
    canvas::png(&Sheet::new(result, options), path)
}

/// The panel of each chip alone, as SVG for a page, which arranges them and lists the numbers itself.
pub(crate) fn page_panels(result: &RunResult, options: &Options) -> Result<Vec<String>, PlotError> {
    let sheet = Sheet::new(result, options);
    result
        .chips
        .iter()
        .map(|chip| canvas::svg(&Panel { sheet: &sheet, chip }, Place::Page))
        .collect()
}

/// The key of the panels alone, as SVG for a page.
pub(crate) fn page_key(result: &RunResult, options: &Options, width: f64) -> Result<String, PlotError> {
    let sheet = Sheet::new(result, options);
    canvas::svg(&Key { sheet: &sheet, width }, Place::Page)
}

/// Width of a key for wide screens.
pub(crate) const KEY_WIDE: f64 = 1180.0;
/// Width of a key for narrow screens.
pub(crate) const KEY_NARROW: f64 = 350.0;

/// The numbered rows; the first has number 1.
pub(crate) fn numbers(result: &RunResult, options: &Options) -> Vec<Entry> {
    Sheet::new(result, options).entries
}

const TITLE: Type = Type::bold(16.0);
const PANEL_TITLE: Type = Type::bold(13.0);
const BODY: Type = Type::regular(11.5);
const BODY_BOLD: Type = Type::bold(11.5);
const TICK: Type = Type::regular(10.5);
const LABEL: Type = Type::regular(10.0);
const NUMBER: Type = Type::bold(10.5);

const MARGIN: f64 = 24.0;
const GUTTER: f64 = 24.0;
const PANEL_HEIGHT: f64 = 330.0;
/// Height of a panel that has the sheet for itself, so that a decade is about as high as it is wide.
const LONE_PANEL_HEIGHT: f64 = 460.0;
const ROW: f64 = 17.0;
/// Chips side by side in the table below; more go into a further table.
const CHIPS_PER_TABLE: usize = 5;
/// Where, in the columns of a chip, the times end and the bounds start.
const TABLE_TIME: f64 = 64.0;
const TABLE_BOUND: f64 = 74.0;

/// A numbered row of the table: the same plan and stage on every chip.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    plan: String,
    plan_index: usize,
    stage: String,
    /// Which one of the rows of that stage, where a plan has several.
    occurrence: usize,
    title: String,
}

impl Entry {
    fn row<'a>(&self, chip: &'a ChipResult) -> Option<&'a StageResult> {
        let plan = chip.plans.iter().find(|plan| plan.name == self.plan)?;
        plan.stages
            .iter()
            .filter(|row| row.stage == self.stage)
            .nth(self.occurrence)
    }

    /// Whether this is row `index` of a plan.
    pub(crate) fn is(&self, plan: &PlanResult, index: usize) -> bool {
        self.plan == plan.name
            && plan.stages.get(index).is_some_and(|row| row.stage == self.stage)
            && occurrence(plan, index) == self.occurrence
    }
}

/// How many rows before row `index` have the same stage.
fn occurrence(plan: &PlanResult, index: usize) -> usize {
    let stage = plan.stages.get(index).map(|row| &row.stage);
    plan.stages
        .iter()
        .take(index)
        .filter(|row| Some(&row.stage) == stage)
        .count()
}

/// Powers of ten at the ends of both axes.
#[derive(Clone, Copy)]
struct Axes {
    x: (i32, i32),
    y: (i32, i32),
}

struct Sheet<'a> {
    result: &'a RunResult,
    palette: &'static Palette,
    plans: Vec<String>,
    entries: Vec<Entry>,
    axes: Axes,
}

/// A text that was given a place: where its baseline starts or ends, and its colour.
type Name = (String, (f64, f64), Anchor, RGBColor);

/// Where a stage stands: operations per HBM byte and tera-operations per second. None where it has no time or
/// no traffic.
fn position(row: &StageResult) -> Option<(f64, f64)> {
    let operations = row.flops as f64 + row.vector_ops as f64 + row.transcendentals as f64;
    let (intensity, tera) = (operations / row.hbm_bytes as f64, operations / row.time_us * 1e-6);
    let drawable = |value: f64| value.is_finite() && value > 0.0;
    (drawable(intensity) && drawable(tera)).then_some((intensity, tera))
}

/// Roofs of one rate share one line.
struct Line {
    name: String,
    tera: f64,
    color: RGBColor,
}

fn lines(chip: &ChipResult, palette: &Palette) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    let drawable = |roof: &&Roof| roof.per_second.is_finite() && roof.per_second > 0.0;
    for roof in chip.roofs.matrix.iter().filter(drawable) {
        let tera = roof.per_second * 1e-12;
        let format = roof.name.strip_prefix("mxu ").unwrap_or(&roof.name);
        match lines.last_mut() {
            Some(last) if (last.tera / tera - 1.0).abs() < 0.01 => {
                last.name.push('/');
                last.name.push_str(format);
            }
            _ => lines.push(Line {
                name: roof.name.replacen("mxu", "MXU", 1),
                tera,
                color: palette.mxu,
            }),
        }
    }
    let others = [
        (&chip.roofs.vector, palette.vpu),
        (&chip.roofs.transcendental, palette.transcendental),
    ];
    for (roof, color) in others.into_iter().filter(|(roof, _)| drawable(roof)) {
        let name = if roof.name == "vpu" {
            "VPU".to_owned()
        } else {
            roof.name.clone()
        };
        lines.push(Line {
            name,
            tera: roof.per_second * 1e-12,
            color,
        });
    }
    lines
}

fn decades(values: &[f64], default: (i32, i32)) -> (i32, i32) {
    let logs = values
        .iter()
        .filter(|value| value.is_finite() && **value > 0.0)
        .map(|value| value.log10());
    let (low, high) = logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), log| {
        (low.min(log), high.max(log))
    });
    if low > high {
        return default;
    }
    // A value at the very edge would put its marker on the frame.
    let (low, high) = ((low - 0.1).floor() as i32, (high + 0.1).ceil() as i32);
    (low.max(high - 12), high)
}

impl<'a> Sheet<'a> {
    fn new(result: &'a RunResult, options: &Options) -> Self {
        let palette = options.theme.palette();
        let mut plans: Vec<String> = Vec::new();
        let mut entries: Vec<Entry> = Vec::new();
        for plan in result.chips.iter().flat_map(|chip| &chip.plans) {
            if !options.plans.is_empty() && !options.plans.contains(&plan.name) {
                continue;
            }
            let plan_index = plans
                .iter()
                .position(|name| *name == plan.name)
                .unwrap_or_else(|| {
                    plans.push(plan.name.clone());
                    plans.len() - 1
                });
            for (index, row) in plan.stages.iter().enumerate() {
                if !entries.iter().any(|entry| entry.is(plan, index)) {
                    entries.push(Entry {
                        plan: plan.name.clone(),
                        plan_index,
                        stage: row.stage.clone(),
                        occurrence: occurrence(plan, index),
                        title: row.title.clone(),
                    });
                }
            }
        }
        // Rows of one plan stand together even where the chips differ in theirs.
        entries.sort_by_key(|entry| entry.plan_index);
        let mut sheet = Self {
            result,
            palette,
            plans,
            entries,
            axes: Axes {
                x: (-1, 4),
                y: (-1, 4),
            },
        };
        let (mut xs, mut ys) = (Vec::new(), Vec::new());
        for chip in &result.chips {
            for line in lines(chip, palette) {
                xs.push(line.tera * 1e12 / chip.roofs.hbm_achievable);
                xs.push(line.tera * 1e12 / chip.roofs.hbm_datasheet);
                // Room for the name of a roof between its ridge and the right end.
                xs.push(8.0 * line.tera * 1e12 / chip.roofs.hbm_achievable);
                ys.push(line.tera);
            }
            for (x, y) in sheet.points(chip).filter_map(|(_, row)| position(row)) {
                xs.push(x);
                ys.push(y);
            }
        }
        sheet.axes = Axes {
            x: decades(&xs, (-1, 4)),
            y: decades(&ys, (-1, 4)),
        };
        sheet
    }

    /// Number (from 0) and row of every stage that a chip has.
    fn points<'s>(&'s self, chip: &'s ChipResult) -> impl Iterator<Item = (usize, &'s StageResult)> {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(number, entry)| Some((number, entry.row(chip)?)))
    }

    fn columns(&self) -> usize {
        match self.result.chips.len() {
            0 | 1 => 1,
            2 | 4 => 2,
            _ => 3,
        }
    }

    fn rows(&self) -> usize {
        self.result.chips.len().div_ceil(self.columns())
    }

    fn width(&self) -> f64 {
        match self.columns() {
            1 => 680.0,
            2 => 880.0,
            _ => 1240.0,
        }
    }

    fn panel_height(&self) -> f64 {
        if self.columns() == 1 {
            LONE_PANEL_HEIGHT
        } else {
            PANEL_HEIGHT
        }
    }

    fn panel_width(&self) -> f64 {
        let columns = self.columns() as f64;
        (self.width() - 2.0 * MARGIN - GUTTER * (columns - 1.0)) / columns
    }

    fn head(&self) -> Vec<String> {
        canvas::wrap(&self.result.layer, self.width() - 2.0 * MARGIN, BODY)
    }

    fn head_height(&self) -> f64 {
        MARGIN + 18.0 + ROW * self.head().len() as f64 + 10.0
    }

    fn key_height(&self, width: f64) -> f64 {
        self.key(width).last().map_or(0.0, |item| item.at.1 + ROW)
    }

    fn table_top(&self) -> f64 {
        let key = self.key_height(self.width() - 2.0 * MARGIN);
        self.head_height() + key + 12.0 + self.rows() as f64 * (self.panel_height() + 14.0)
    }

    fn tables(&self) -> usize {
        if self.entries.is_empty() {
            0
        } else {
            self.result.chips.len().div_ceil(CHIPS_PER_TABLE)
        }
    }

    fn table_height(&self) -> f64 {
        ROW * (self.entries.len() as f64 + 2.0) + 22.0
    }

    /// The items of the key, from left to right and top to bottom.
    fn key(&self, width: f64) -> Vec<KeyItem> {
        let palette = self.palette;
        let mut items = vec![
            (
                Sign::Line(palette.hbm),
                "HBM, achievable bandwidth".to_owned(),
                palette.ink,
            ),
            (
                Sign::Dashes(palette.hbm),
                "HBM, datasheet".to_owned(),
                palette.ink,
            ),
            (
                Sign::Line(palette.mxu),
                "matrix units (FLOP/s)".to_owned(),
                palette.ink,
            ),
            (
                Sign::Line(palette.vpu),
                "VPU (vector operations/s)".to_owned(),
                palette.ink,
            ),
            (
                Sign::Line(palette.transcendental),
                "transcendentals/s".to_owned(),
                palette.ink,
            ),
            (
                Sign::Ridge(palette.ink),
                "ridge, in operations per byte".to_owned(),
                palette.ink,
            ),
        ];
        for (index, plan) in self.plans.iter().enumerate() {
            items.push((
                Sign::Marker(Marker::of(index, self.plans.len())),
                plan.clone(),
                palette.ink,
            ));
        }
        let rows = self
            .result
            .chips
            .iter()
            .flat_map(|chip| self.points(chip).map(|(_, row)| row.bound));
        let mut bounds: Vec<Bound> = rows.collect();
        bounds.sort_unstable();
        bounds.dedup();
        let mut first = true;
        for bound in bounds {
            let sign = if first {
                Sign::Words("marker colour, bound by:")
            } else {
                Sign::None
            };
            first = false;
            items.push((sign, bound.name().to_owned(), palette.bound(bound)));
        }
        let (mut x, mut y) = (0.0, ROW - 4.0);
        let mut placed = Vec::new();
        for (sign, text, color) in items {
            let lead = sign.width();
            let kind = if color == palette.ink { BODY } else { BODY_BOLD };
            let wide = lead + text_width(&text, kind);
            if x > 0.0 && x + wide > width {
                x = 0.0;
                y += ROW;
            }
            placed.push(KeyItem {
                sign,
                text,
                kind,
                color,
                at: (x, y),
            });
            x += wide + if kind == BODY { 18.0 } else { 12.0 };
        }
        placed
    }

    fn draw_key<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        at: (f64, f64),
        width: f64,
    ) -> Result<(), PlotError> {
        for item in self.key(width) {
            let (x, y) = (at.0 + item.at.0, at.1 + item.at.1);
            let middle = y - 4.0;
            match item.sign {
                Sign::Line(color) => canvas.line(&[(x, middle), (x + 22.0, middle)], color, 1.5)?,
                Sign::Dashes(color) => canvas.dashed((x, middle), (x + 22.0, middle), color, 1.5)?,
                Sign::Ridge(color) => ridge_sign(canvas, (x + 5.0, middle), color)?,
                Sign::Marker(marker) => marker.draw(canvas, (x + 6.0, middle), self.palette.ink)?,
                Sign::Words(words) => canvas.text(words, (x, y), BODY, Anchor::Start, self.palette.ink)?,
                Sign::None => {}
            }
            canvas.text(
                &item.text,
                (x + item.sign.width(), y),
                item.kind,
                Anchor::Start,
                item.color,
            )?;
        }
        Ok(())
    }

    fn draw_table<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        chips: &[ChipResult],
        top: f64,
    ) -> Result<(), PlotError> {
        let palette = self.palette;
        let right = self.width() - MARGIN;
        let bounds = self
            .result
            .chips
            .iter()
            .flat_map(|chip| self.points(chip).map(|(_, row)| bound_text(row)));
        let table_chip = TABLE_BOUND
            + bounds
                .map(|text| text_width(&text, BODY))
                .fold(text_width("bound", BODY), f64::max)
            + 6.0;
        let first_chip = right - table_chip * chips.len() as f64;
        let widest = |name: &dyn Fn(&Entry) -> &str| {
            self.entries
                .iter()
                .map(|entry| text_width(name(entry), BODY))
                .fold(34.0, f64::max)
        };
        let plan_x = MARGIN + 26.0;
        let stage_x = plan_x + widest(&|entry| entry.plan.as_str()) + 14.0;
        let title_x = stage_x + widest(&|entry| entry.stage.as_str()) + 14.0;
        let mut y = top + ROW;
        for (index, chip) in chips.iter().enumerate() {
            let x = first_chip + table_chip * index as f64 + TABLE_BOUND - 5.0;
            canvas.text(
                &fitted(&chip.name, table_chip - 20.0, BODY_BOLD),
                (x, y),
                BODY_BOLD,
                Anchor::Middle,
                palette.ink,
            )?;
        }
        y += ROW;
        canvas.text("#", (MARGIN + 12.0, y), BODY, Anchor::End, palette.quiet)?;
        for (text, x) in [("plan", plan_x), ("stage", stage_x), ("title", title_x)] {
            canvas.text(text, (x, y), BODY, Anchor::Start, palette.quiet)?;
        }
        for (index, chip) in chips.iter().enumerate() {
            let x = first_chip + table_chip * index as f64;
            let unit = TimeUnit::for_chip(chip);
            canvas.text(
                &format!("time ({})", unit.symbol()),
                (x + TABLE_TIME, y),
                BODY,
                Anchor::End,
                palette.quiet,
            )?;
            canvas.text("bound", (x + TABLE_BOUND, y), BODY, Anchor::Start, palette.quiet)?;
        }
        canvas.line(&[(MARGIN, y + 5.0), (right, y + 5.0)], palette.axis, 0.5)?;
        let mut plan = self.entries.first().map_or(0, |entry| entry.plan_index);
        for (number, entry) in self.entries.iter().enumerate() {
            if entry.plan_index != plan {
                canvas.line(&[(MARGIN, y + 5.0), (right, y + 5.0)], palette.grid, 0.5)?;
                plan = entry.plan_index;
            }
            y += ROW;
            canvas.text(
                &(number + 1).to_string(),
                (MARGIN + 12.0, y),
                NUMBER,
                Anchor::End,
                palette.ink,
            )?;
            canvas.text(&entry.plan, (plan_x, y), BODY, Anchor::Start, palette.ink)?;
            canvas.text(&entry.stage, (stage_x, y), BODY, Anchor::Start, palette.ink)?;
            let title = fitted(&entry.title, first_chip - title_x - 4.0, BODY);
            canvas.text(&title, (title_x, y), BODY, Anchor::Start, palette.quiet)?;
            for (index, chip) in chips.iter().enumerate() {
                let x = first_chip + table_chip * index as f64;
                let Some(row) = entry.row(chip) else {
                    canvas.text("–", (x + TABLE_TIME, y), BODY, Anchor::End, palette.quiet)?;
                    continue;
                };
                let time = TimeUnit::for_chip(chip).format(row.time_us);
                canvas.text(&time, (x + TABLE_TIME, y), BODY, Anchor::End, palette.ink)?;
                let bound = bound_text(row);
                canvas.text(
                    &bound,
                    (x + TABLE_BOUND, y),
                    BODY,
                    Anchor::Start,
                    palette.bound(row.bound),
                )?;
            }
        }
        Ok(())
    }

    fn draw_panel<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        chip: &ChipResult,
        (left, top): (f64, f64),
        (width, height): (f64, f64),
    ) -> Result<(), PlotError> {
        let palette = self.palette;
        let title = format!("{}, {}, {}", chip.name, format::cores(chip), format::clock(chip));
        let title = fitted(&title, width - 56.0, PANEL_TITLE);
        canvas.text(
            &title,
            (left + 52.0, top + 12.0),
            PANEL_TITLE,
            Anchor::Start,
            palette.ink,
        )?;
        // Room on the right for half of the last tick label.
        let plot = Area {
            left: left + 52.0,
            top: top + 22.0,
            right: left + width - 12.0,
            bottom: top + height - 40.0,
        };
        let view = View {
            plot,
            axes: self.axes,
        };
        view.draw_grid(canvas, palette)?;

        let mut placer = Placer::new(Area {
            left: plot.left + 3.0,
            top: plot.top + 2.0,
            right: plot.right - 3.0,
            bottom: plot.bottom - 2.0,
        });
        let points: Vec<_> = self
            .points(chip)
            .filter_map(|(number, row)| Some((number, row, view.at(position(row)?))))
            .collect();
        for (_, _, at) in &points {
            placer.take(Area::around(*at, 11.0, 11.0), FIRM);
        }
        let labels = self.draw_roofs(canvas, chip, &view, &mut placer)?;
        self.draw_numbers(canvas, &points, &mut placer)?;
        for (text, at, anchor, color) in labels {
            canvas.text(&text, at, LABEL, anchor, color)?;
        }
        canvas.line(
            &[
                (plot.left, plot.top),
                (plot.left, plot.bottom),
                (plot.right, plot.bottom),
                (plot.right, plot.top),
                (plot.left, plot.top),
            ],
            palette.axis,
            1.0,
        )?;
        Ok(())
    }

    /// Draws the roofs and finds places for their names, which are drawn last so that nothing covers them.
    fn draw_roofs<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        chip: &ChipResult,
        view: &View,
        placer: &mut Placer,
    ) -> Result<Vec<Name>, PlotError> {
        let palette = self.palette;
        let plot = view.plot;
        let roofs = lines(chip, palette);
        let highest = roofs.iter().map(|line| line.tera).fold(0.0, f64::max);
        let mut names = Vec::new();
        let mut ridges = Vec::new();
        let (achievable, datasheet) = (
            chip.roofs.hbm_achievable * 1e-12,
            chip.roofs.hbm_datasheet * 1e-12,
        );
        for (bandwidth, solid) in [(datasheet, false), (achievable, true)] {
            let Some((from, to)) = view.slope(bandwidth, highest) else {
                continue;
            };
            if solid {
                canvas.line(&[from, to], palette.hbm, 1.5)?;
            } else {
                canvas.dashed(from, to, palette.hbm, 1.0)?;
            }
            placer.take_line(from, to, SOFT);
        }
        for line in &roofs {
            let (ridge_x, y) = view.at((line.tera / achievable, line.tera));
            let start = ridge_x.clamp(plot.left, plot.right);
            canvas.line(&[(start, y), (plot.right, y)], line.color, 1.5)?;
            placer.take_line((start, y), (plot.right, y), SOFT);
            if ridge_x > plot.left && ridge_x < plot.right {
                ridge_sign(canvas, (ridge_x, y), line.color)?;
                placer.take(Area::around((ridge_x, y), 6.0, 6.0), FIRM);
                ridges.push((three_digits(line.tera / achievable), (ridge_x, y), line.color));
            }
        }
        // Names at the right end of their line, above it or below; a ridge left of its point, where no stage
        // can be.
        for line in &roofs {
            let mut text = format!("{} {}", line.name, three_digits(line.tera));
            let (ridge_x, y) = view.at((line.tera / achievable, line.tera));
            // The colour says MXU too, so that word goes first where the room is short.
            if text_width(&text, LABEL) > plot.right - ridge_x - 8.0 {
                text = text.strip_prefix("MXU ").map_or(text.clone(), str::to_owned);
            }
            let width = text_width(&text, LABEL);
            let furthest = (plot.right - ridge_x.max(plot.left) - width).max(8.0);
            let candidates = (0..12).flat_map(|step| {
                let right = plot.right - 5.0 - furthest * f64::from(step) / 12.0;
                let area = |middle: f64| Area {
                    left: right - width,
                    top: middle - 5.0,
                    right,
                    bottom: middle + 5.0,
                };
                [
                    (area(y - 8.5), f64::from(step)),
                    (area(y + 8.5), f64::from(step) + 10.0),
                ]
            });
            if let Some(area) = placer.place(candidates.collect::<Vec<_>>()) {
                names.push((text, (area.right, area.bottom - 1.5), Anchor::End, line.color));
            }
        }
        for (text, (x, y), color) in ridges {
            let width = text_width(&text, LABEL);
            let left_of = [(-8.0, 0.0), (-6.0, -8.0), (-8.0, -14.0), (-8.0, -22.0)]
                .map(|(dx, dy): (f64, f64)| (x + dx, y + dy, dy.abs()));
            // Where the frame is too near, under the roof to the right.
            let right_of = [(x + 6.0 + width, y + 9.0, 30.0)];
            let candidates = left_of
                .into_iter()
                .chain(right_of)
                .map(|(right, middle, against)| {
                    let area = Area {
                        left: right - width,
                        top: middle - 5.0,
                        right,
                        bottom: middle + 5.0,
                    };
                    (area, against)
                });
            if let Some(area) = placer.place(candidates) {
                names.push((text, (area.right, area.bottom - 1.5), Anchor::End, color));
            }
        }
        // The bandwidths above their slope, as far down as they fit.
        let rates = [
            format!("HBM {} GB/s", three_digits(chip.roofs.hbm_achievable * 1e-9)),
            format!("datasheet {} GB/s", three_digits(chip.roofs.hbm_datasheet * 1e-9)),
        ];
        let width = rates
            .iter()
            .map(|text| text_width(text, LABEL))
            .fold(0.0, f64::max);
        let (x, height) = (plot.left + 7.0, 25.0);
        let candidates: Vec<_> = (0_u32..500)
            .map(|step| plot.bottom - 8.0 - 4.0 * f64::from(step))
            .take_while(|bottom| bottom - height > plot.top)
            .filter(|bottom| {
                // The dashed line is the upper one; its height at the right end of the text is the limit.
                view.slope(datasheet.max(achievable), highest)
                    .is_none_or(|(from, to)| {
                        let run = ((x + width + 8.0 - from.0) / (to.0 - from.0)).clamp(0.0, 1.0);
                        *bottom < from.1 + (to.1 - from.1) * run
                    })
            })
            .enumerate()
            .map(|(order, bottom)| {
                (
                    Area {
                        left: x,
                        top: bottom - height,
                        right: x + width,
                        bottom,
                    },
                    order as f64,
                )
            })
            .collect();
        if let Some(area) = placer.place(candidates) {
            let [achievable, datasheet] = rates;
            names.push((achievable, (x, area.top + 9.0), Anchor::Start, palette.hbm));
            names.push((datasheet, (x, area.top + 21.0), Anchor::Start, palette.hbm));
        }
        Ok(names)
    }

    /// Draws the markers and, beside each, its number; a number that stands apart is tied to its marker by a
    /// line.
    fn draw_numbers<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        points: &[(usize, &StageResult, (f64, f64))],
        placer: &mut Placer,
    ) -> Result<(), PlotError> {
        let anchors: Vec<_> = points.iter().map(|(_, _, at)| *at).collect();
        let sizes: Vec<_> = points
            .iter()
            .map(|(number, ..)| (text_width(&(number + 1).to_string(), NUMBER) + 2.0, 10.0))
            .collect();
        let places = place::beside(placer, &anchors, &sizes);
        for ((_, _, (x, y)), area) in points.iter().zip(&places) {
            let (to_x, to_y) = area.center();
            let (across, down) = (to_x - x, to_y - y);
            let length = across.hypot(down);
            if length > 15.0 {
                let at = |from_start: f64| (x + across * from_start / length, y + down * from_start / length);
                canvas.line(&[at(6.0), at(length - 7.0)], self.palette.quiet, 0.5)?;
            }
        }
        // Rings first, so that a disc inside a ring stays visible where two plans share a kernel.
        let mut order: Vec<_> = points.iter().collect();
        order.sort_by_key(|(number, ..)| self.marker(*number).filled);
        for (number, row, at) in order {
            self.marker(*number)
                .draw(canvas, *at, self.palette.bound(row.bound))?;
        }
        for ((number, _, _), area) in points.iter().zip(&places) {
            let (x, _) = area.center();
            canvas.text(
                &(number + 1).to_string(),
                (x, area.bottom - 1.2),
                NUMBER,
                Anchor::Middle,
                self.palette.ink,
            )?;
        }
        Ok(())
    }

    fn marker(&self, number: usize) -> Marker {
        Marker::of(
            self.entries.get(number).map_or(0, |entry| entry.plan_index),
            self.plans.len(),
        )
    }
}

/// The bound of a row in the table, and whether the row has no marker.
fn bound_text(row: &StageResult) -> String {
    if position(row).is_some() {
        row.bound.name().to_owned()
    } else {
        format!("{} (not drawn)", row.bound)
    }
}

/// A text cut so that it fits, with a sign that it was.
fn fitted(text: &str, width: f64, kind: Type) -> String {
    if text_width(text, kind) <= width {
        return text.to_owned();
    }
    let mut short: String = text.to_owned();
    while !short.is_empty() && text_width(&format!("{short}…"), kind) > width {
        short.pop();
    }
    format!("{}…", short.trim_end())
}

fn ridge_sign<B: DrawingBackend>(
    canvas: &Canvas<B>,
    (x, y): (f64, f64),
    color: RGBColor,
) -> Result<(), PlotError> {
    canvas.polygon(&[(x - 3.5, y), (x, y - 3.5), (x + 3.5, y), (x, y + 3.5)], color)
}

/// Shape of the markers of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Marker {
    filled: bool,
    square: bool,
}

impl Marker {
    /// First plan hollow, second filled, and so on with squares; a plan that is alone is filled.
    const fn of(plan: usize, plans: usize) -> Self {
        Self {
            filled: plans == 1 || plan % 2 == 1,
            square: plan / 2 % 2 == 1,
        }
    }

    fn draw<B: DrawingBackend>(
        self,
        canvas: &Canvas<B>,
        at: (f64, f64),
        color: RGBColor,
    ) -> Result<(), PlotError> {
        let (x, y) = at;
        match (self.square, self.filled) {
            (false, true) => canvas.disc(at, 3.0, color),
            (false, false) => canvas.ring(at, 5.0, color, 1.5),
            (true, true) => canvas.block((x - 3.0, y - 3.0), (x + 3.0, y + 3.0), color),
            (true, false) => {
                let corners = [(-5.0, -5.0), (5.0, -5.0), (5.0, 5.0), (-5.0, 5.0), (-5.0, -5.0)];
                canvas.line(&corners.map(|(dx, dy)| (x + dx, y + dy)), color, 1.5)
            }
        }
    }
}

enum Sign {
    Line(RGBColor),
    Dashes(RGBColor),
    Ridge(RGBColor),
    Marker(Marker),
    Words(&'static str),
    None,
}

impl Sign {
    fn width(&self) -> f64 {
        match self {
            Sign::Line(_) | Sign::Dashes(_) => 28.0,
            Sign::Ridge(_) => 15.0,
            Sign::Marker(_) => 17.0,
            Sign::Words(words) => text_width(words, BODY) + 7.0,
            Sign::None => 0.0,
        }
    }
}

struct KeyItem {
    sign: Sign,
    text: String,
    kind: Type,
    color: RGBColor,
    at: (f64, f64),
}

/// From values to places in a panel.
#[derive(Clone, Copy)]
struct View {
    plot: Area,
    axes: Axes,
}

impl View {
    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let along = |value: f64, (low, high): (i32, i32)| {
            ((value.max(1e-300).log10() - f64::from(low)) / f64::from(high - low)).clamp(-1.0, 2.0)
        };
        (
            self.plot.left + self.plot.width() * along(x, self.axes.x),
            self.plot.bottom - self.plot.height() * along(y, self.axes.y),
        )
    }

    /// The part of a bandwidth roof (tera-bytes per second) inside the panel, up to the highest roof.
    fn slope(&self, bandwidth: f64, highest: f64) -> Option<((f64, f64), (f64, f64))> {
        let ten = |power: i32| 10_f64.powi(power);
        let left = ten(self.axes.x.0).max(ten(self.axes.y.0) / bandwidth);
        let right = ten(self.axes.x.1).min(highest.min(ten(self.axes.y.1)) / bandwidth);
        let drawable = bandwidth.is_finite() && bandwidth > 0.0 && left < right;
        drawable.then(|| {
            (
                self.at((left, left * bandwidth)),
                self.at((right, right * bandwidth)),
            )
        })
    }

    fn draw_grid<B: DrawingBackend>(&self, canvas: &Canvas<B>, palette: &Palette) -> Result<(), PlotError> {
        let plot = self.plot;
        let ten = |power: i32| 10_f64.powi(power);
        for power in self.axes.x.0..=self.axes.x.1 {
            let (x, _) = self.at((ten(power), 1.0));
            canvas.line(&[(x, plot.top), (x, plot.bottom)], palette.grid, 0.5)?;
            canvas.line(&[(x, plot.bottom), (x, plot.bottom + 5.0)], palette.axis, 1.0)?;
            canvas.text(
                &power_of_ten(power),
                (x, plot.bottom + 16.0),
                TICK,
                Anchor::Middle,
                palette.quiet,
            )?;
            for part in 2..10 {
                let (x, _) = self.at((f64::from(part) * ten(power), 1.0));
                if power < self.axes.x.1 {
                    canvas.line(&[(x, plot.bottom), (x, plot.bottom + 2.5)], palette.axis, 0.5)?;
                }
            }
        }
        for power in self.axes.y.0..=self.axes.y.1 {
            let (_, y) = self.at((1.0, ten(power)));
            canvas.line(&[(plot.left, y), (plot.right, y)], palette.grid, 0.5)?;
            canvas.line(&[(plot.left - 5.0, y), (plot.left, y)], palette.axis, 1.0)?;
            canvas.text(
                &power_of_ten(power),
                (plot.left - 8.0, y + 3.6),
                TICK,
                Anchor::End,
                palette.quiet,
            )?;
            for part in 2..10 {
                let (_, y) = self.at((1.0, f64::from(part) * ten(power)));
                if power < self.axes.y.1 {
                    canvas.line(&[(plot.left - 2.5, y), (plot.left, y)], palette.axis, 0.5)?;
                }
            }
        }
        let (middle_x, middle_y) = plot.center();
        let x_title = "(FLOPs + vector ops + transcendentals) per HBM byte";
        canvas.text(
            x_title,
            (middle_x, plot.bottom + 32.0),
            TICK,
            Anchor::Middle,
            palette.ink,
        )?;
        let y_title = "tera-operations per second (TFLOP/s)";
        canvas.upward_text(
            y_title,
            (plot.left - 38.0, middle_y),
            TICK,
            Anchor::Middle,
            palette.ink,
        )
    }
}

/// A power of ten as a tick label.
fn power_of_ten(power: i32) -> String {
    const RAISED: [char; 10] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'];
    match power {
        0..=3 => 10_u32.pow(power.unsigned_abs()).to_string(),
        -2..=-1 => format!("{}", 10_f64.powi(power)),
        _ => {
            let digits = power.unsigned_abs().to_string();
            let raised = digits
                .chars()
                .filter_map(|digit| RAISED.get(digit.to_digit(10)? as usize));
            format!(
                "10{}{}",
                if power < 0 { "⁻" } else { "" },
                raised.collect::<String>()
            )
        }
    }
}

impl Picture for Sheet<'_> {
    fn size(&self) -> (f64, f64) {
        (
            self.width(),
            self.table_top() + self.tables() as f64 * self.table_height() + 8.0,
        )
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "Roofline of {}: operations per second over operations per HBM byte, one panel per chip",
            self.result.name
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        let title = fitted(
            &format!("Roofline: {}", self.result.name),
            self.width() - 2.0 * MARGIN,
            TITLE,
        );
        let mut y = MARGIN + 12.0;
        canvas.text(&title, (MARGIN, y), TITLE, Anchor::Start, palette.ink)?;
        y += 5.0;
        for line in self.head() {
            y += ROW;
            canvas.text(&line, (MARGIN, y), BODY, Anchor::Start, palette.quiet)?;
        }
        self.draw_key(canvas, (MARGIN, self.head_height()), self.width() - 2.0 * MARGIN)?;
        let top = self.head_height() + self.key_height(self.width() - 2.0 * MARGIN) + 12.0;
        for (index, chip) in self.result.chips.iter().enumerate() {
            let (row, column) = (index / self.columns(), index % self.columns());
            let at = (
                MARGIN + column as f64 * (self.panel_width() + GUTTER),
                top + row as f64 * (self.panel_height() + 14.0),
            );
            self.draw_panel(canvas, chip, at, (self.panel_width(), self.panel_height()))?;
        }
        if self.entries.is_empty() {
            return Ok(());
        }
        for (index, chips) in self.result.chips.chunks(CHIPS_PER_TABLE).enumerate() {
            self.draw_table(
                canvas,
                chips,
                self.table_top() + index as f64 * self.table_height(),
            )?;
        }
        Ok(())
    }
}

/// One panel alone.
struct Panel<'a> {
    sheet: &'a Sheet<'a>,
    chip: &'a ChipResult,
}

impl Picture for Panel<'_> {
    fn size(&self) -> (f64, f64) {
        (400.0, PANEL_HEIGHT + 6.0)
    }

    fn palette(&self) -> &Palette {
        self.sheet.palette
    }

    fn label(&self) -> String {
        format!(
            "Roofline on {}; the numbers are listed in the table below",
            self.chip.title
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        self.sheet
            .draw_panel(canvas, self.chip, (4.0, 3.0), (392.0, PANEL_HEIGHT))
    }
}

/// The key alone.
struct Key<'a> {
    sheet: &'a Sheet<'a>,
    width: f64,
}

impl Picture for Key<'_> {
    fn size(&self) -> (f64, f64) {
        (self.width + 10.0, self.sheet.key_height(self.width) + 4.0)
    }

    fn palette(&self) -> &Palette {
        self.sheet.palette
    }

    fn label(&self) -> String {
        "Key of the rooflines".to_owned()
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        self.sheet.draw_key(canvas, (5.0, 0.0), self.width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
        tag.split_once(&format!(" {name}=\""))?
            .1
            .split_once('"')
            .map(|(value, _)| value)
    }

    fn number(tag: &str, name: &str) -> f64 {
        attribute(tag, name)
            .and_then(|value| value.parse().ok())
            .unwrap_or(f64::NAN)
    }

    /// Opening tag and content of every text.
    fn texts(svg: &str) -> Vec<(&str, &str)> {
        svg.split("<text")
            .skip(1)
            .filter_map(|rest| rest.split_once('>'))
            .collect()
    }

    /// Rectangle of every text, in units of the view box.
    fn text_areas(svg: &str) -> Vec<(String, Area)> {
        texts(svg)
            .into_iter()
            .map(|(tag, rest)| {
                let content = rest.split("</text>").next().unwrap_or_default().trim();
                let (x, y, em) = (number(tag, "x"), number(tag, "y"), number(tag, "font-size"));
                let bold = attribute(tag, "font-weight").is_some();
                let content = content
                    .replace("&lt;", "<")
                    .replace("&gt;", ">")
                    .replace("&amp;", "&");
                let width = text_width(&content, Type { em, bold });
                let start = match attribute(tag, "text-anchor") {
                    Some("middle") => -width / 2.0,
                    Some("end") => -width,
                    _ => 0.0,
                };
                let area = if tag.contains("rotate(270") {
                    Area {
                        left: x,
                        right: x + em,
                        top: y - start - width,
                        bottom: y - start,
                    }
                } else {
                    Area {
                        left: x + start,
                        right: x + start + width,
                        top: y,
                        bottom: y + 0.95 * em,
                    }
                };
                (content, area)
            })
            .collect()
    }

    fn many_chips() -> RunResult {
        let mut result = fixture::five_chips();
        let more: Vec<_> = result.chips.iter().take(2).cloned().collect();
        result.chips.extend(more);
        result
    }

    #[test]
    fn there_is_one_marker_per_row_and_one_per_plan_in_the_key() -> Result<(), PlotError> {
        for result in [
            fixture::one_chip(),
            fixture::five_chips(),
            fixture::crowded(),
            many_chips(),
        ] {
            let rows: usize = result
                .chips
                .iter()
                .flat_map(|chip| &chip.plans)
                .map(|plan| plan.stages.len())
                .sum();
            let text = svg(&result, &Options::default())?;
            assert_eq!(text.matches("<circle").count(), rows + 2);
            let fused = Options {
                plans: vec!["fused".to_owned()],
                ..Options::default()
            };
            let text = svg(&result, &fused)?;
            assert_eq!(text.matches("<circle").count(), 3 * result.chips.len() + 1);
        }
        Ok(())
    }

    #[test]
    fn no_text_leaves_the_picture_or_covers_another() -> Result<(), PlotError> {
        for result in [
            fixture::one_chip(),
            fixture::five_chips(),
            fixture::crowded(),
            many_chips(),
        ] {
            let mut pictures = page_panels(&result, &Options::default())?;
            pictures.push(page_key(&result, &Options::default(), KEY_NARROW)?);
            pictures.push(svg(&result, &Options::default())?);
            for picture in pictures {
                let view = attribute(&picture, "viewBox").unwrap_or_default();
                let size: Vec<f64> = view.split(' ').filter_map(|part| part.parse().ok()).collect();
                let areas = text_areas(&picture);
                assert!(areas.len() > 8);
                for (index, (text, area)) in areas.iter().enumerate() {
                    assert!(
                        area.left >= 0.0
                            && area.top >= 0.0
                            && area.right <= size[2]
                            && area.bottom <= size[3],
                        "`{text}` leaves the picture: {area:?}"
                    );
                    for (other, place) in areas.iter().skip(index + 1) {
                        // A sign's em box is higher than its ink.
                        assert!(
                            area.overlap(place) < 30.0,
                            "`{text}` and `{other}` cover each other"
                        );
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn two_rows_of_one_stage_are_two_markers() -> Result<(), PlotError> {
        let mut result = fixture::one_chip();
        let mut twin = result.chips[0].plans[0].stages[1].clone();
        twin.time_us *= 3.0;
        result.chips[0].plans[0].stages.push(twin);
        assert_eq!(
            svg(&result, &Options::default())?.matches("<circle").count(),
            10 + 2
        );
        Ok(())
    }

    #[test]
    fn markers_stand_where_the_counters_say() -> Result<(), PlotError> {
        // One row, moved by a factor of ten in traffic and in time, moves by one decade on each axis.
        let mut result = fixture::one_chip();
        result.chips[0].plans.truncate(1);
        result.chips[0].plans[0].stages.truncate(2);
        let stages = &mut result.chips[0].plans[0].stages;
        stages[1] = StageResult {
            stage: "other".to_owned(),
            ..stages[0].clone()
        };
        stages[1].time_us *= 10.0;
        stages[1].hbm_bytes *= 10;
        let sheet = Sheet::new(&result, &Options::default());
        let (wide, high) = (
            f64::from(sheet.axes.x.1 - sheet.axes.x.0),
            f64::from(sheet.axes.y.1 - sheet.axes.y.0),
        );
        let panels = page_panels(&result, &Options::default())?;
        let circles: Vec<_> = panels[0]
            .split("<circle")
            .skip(1)
            .map(|tag| (number(tag, "cx"), number(tag, "cy")))
            .collect();
        // Two units of the view box are one unit of the panel, which keeps 64 beside and 62 under and over
        // the plot.
        let decade = (2.0 * (392.0 - 64.0) / wide, 2.0 * (PANEL_HEIGHT - 62.0) / high);
        assert!(
            (circles[0].0 - circles[1].0 - decade.0).abs() <= 2.0,
            "{circles:?}"
        );
        assert!(
            (circles[1].1 - circles[0].1 - decade.1).abs() <= 2.0,
            "{circles:?}"
        );
        Ok(())
    }

    #[test]
    fn a_row_without_traffic_is_listed_and_not_drawn() -> Result<(), PlotError> {
        let mut result = fixture::one_chip();
        result.chips[0].plans[1].stages[1].hbm_bytes = 0;
        let text = svg(&result, &Options::default())?;
        assert_eq!(text.matches("<circle").count(), 8 + 2);
        assert!(text.contains("vpu (not drawn)"));
        Ok(())
    }

    #[test]
    fn numbers_that_make_no_sense_still_give_a_picture() -> Result<(), PlotError> {
        let mut result = fixture::one_chip();
        let chip = &mut result.chips[0];
        chip.roofs.hbm_achievable = 0.0;
        chip.roofs.hbm_datasheet = f64::NAN;
        chip.roofs.matrix.clear();
        chip.plans[0].stages[0].time_us = f64::INFINITY;
        chip.plans[0].stages[1].time_us = 1e-300;
        assert!(svg(&result, &Options::default())?.ends_with("</svg>\n"));
        result.chips.clear();
        assert!(svg(&result, &Options::default())?.ends_with("</svg>\n"));
        Ok(())
    }

    #[test]
    fn the_dark_theme_has_dark_paper() -> Result<(), PlotError> {
        let dark = svg(
            &fixture::one_chip(),
            &Options {
                theme: Theme::Dark,
                ..Options::default()
            },
        )?;
        assert!(dark.contains("#14181D") && !dark.contains("#FFFFFF"));
        Ok(())
    }

    #[test]
    fn powers_of_ten_are_short() {
        assert_eq!(
            [-3, -1, 0, 3, 4, 12].map(power_of_ten),
            ["10⁻³", "0.1", "1", "1000", "10⁴", "10¹²"]
        );
    }
}
