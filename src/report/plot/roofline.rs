//! The roofline picture: one panel per chip on one sheet, axes and numbers shared, and a table of the numbers
//! below.
//!
//! x is operations per HBM byte, y is operations per second, where operations are matrix FLOPs, vector
//! operations and transcendentals together. A roof counts its own kind alone: a marker far under the matrix
//! roof and close to the VPU roof is a stage that the vector unit holds back.

use std::path::Path;

use plotters::backend::DrawingBackend;
use plotters::style::RGBColor;

use super::canvas::{self, Anchor, Canvas, Hit, Picture, Place, PlotError, Type, text_width};
use super::place::{self, Area, Candidate, FIRM, Placer, SOFT, SOLID};
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
    /// Leaves out title and layer, for a figure with a caption.
    pub untitled: bool,
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
    pub(crate) plan: String,
    plan_index: usize,
    pub(crate) stage: String,
    /// Which one of the rows of that stage, where a plan has several.
    occurrence: usize,
    pub(crate) title: String,
}

impl Entry {
    /// The row on a chip, where it has it.
    pub(crate) fn row<'a>(&self, chip: &'a ChipResult) -> Option<&'a StageResult> {
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
    untitled: bool,
    plans: Vec<String>,
    entries: Vec<Entry>,
    axes: Axes,
}

/// A text that was given a place: where its baseline starts, and its colour.
type Name = (String, (f64, f64), RGBColor);

/// Where a stage stands: operations per HBM byte and tera-operations per second. None where it has no time or
/// no traffic.
fn position(row: &StageResult) -> Option<(f64, f64)> {
    let operations = row.flops as f64 + row.vector_ops as f64 + row.transcendentals as f64;
    let (intensity, tera) = (operations / row.hbm_bytes as f64, operations / row.time_us * 1e-6);
    let drawable = |value: f64| value.is_finite() && value > 0.0;
    (drawable(intensity) && drawable(tera)).then_some((intensity, tera))
}

/// A horizontal roof; formats of one rate share one.
struct Line {
    name: String,
    /// Datasheet rate at the clock of the run, in tera-operations per second.
    datasheet: f64,
    /// What of it a program reaches.
    tera: f64,
    color: RGBColor,
}

impl Line {
    /// Name, achievable and datasheet rate.
    fn label(&self) -> String {
        format!("{} {}", self.name, of(self.tera, self.datasheet))
    }
}

/// What of a rate is achievable, in words.
fn of(achievable: f64, datasheet: f64) -> String {
    format!("{} of {}", three_digits(achievable), three_digits(datasheet))
}

/// A slanted roof.
struct Slope {
    /// Name, achievable and datasheet bandwidth.
    label: [String; 3],
    /// Datasheet bandwidth, in tera-bytes per second.
    datasheet: f64,
    /// What of it a program reaches.
    tera: f64,
    color: RGBColor,
}

/// HBM, then on-chip memory.
fn slopes(chip: &ChipResult, palette: &Palette) -> Vec<Slope> {
    let roofs = &chip.roofs;
    let (hbm, on_chip) = (roofs.hbm_datasheet, roofs.on_chip.per_second);
    let slope = |name: &str, achievable: f64, datasheet: f64, (unit, scale): (&str, f64), color| Slope {
        label: [
            name.to_owned(),
            format!("{} of", three_digits(achievable * scale)),
            format!("{} {unit}", three_digits(datasheet * scale)),
        ],
        datasheet: datasheet * 1e-12,
        tera: achievable * 1e-12,
        color,
    };
    vec![
        slope("HBM", roofs.hbm_achievable, hbm, ("GB/s", 1e-9), palette.hbm),
        slope(
            &roofs.on_chip.name,
            roofs.issue_efficiency * on_chip,
            on_chip,
            ("TB/s", 1e-12),
            palette.vmem,
        ),
    ]
}

fn lines(chip: &ChipResult, palette: &Palette) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    let achieved = chip.roofs.issue_efficiency;
    let drawable = |roof: &&Roof| roof.per_second.is_finite() && roof.per_second > 0.0;
    for roof in chip.roofs.matrix.iter().filter(drawable) {
        let tera = roof.per_second * 1e-12;
        // One of the fp8 formats stands for the other, which has the same rate.
        let name = roof.name.replacen("mxu", "MXU", 1).replace("fp8_e4m3", "fp8");
        let format = name.strip_prefix("MXU ").unwrap_or(&name);
        match lines.last_mut() {
            Some(last) if (last.datasheet / tera - 1.0).abs() < 0.01 => {
                last.name.push('/');
                last.name.push_str(format);
            }
            _ => lines.push(Line {
                name,
                datasheet: tera,
                tera: tera * achieved,
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
            datasheet: roof.per_second * 1e-12,
            tera: roof.per_second * 1e-12 * achieved,
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
            untitled: options.untitled,
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
                ys.push(line.datasheet);
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
        if self.untitled {
            return MARGIN / 2.0;
        }
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
            (Sign::Line(palette.ink), "achievable".to_owned(), palette.ink),
            (
                Sign::Dashes(palette.ink),
                "datasheet, at the clock of the run".to_owned(),
                palette.ink,
            ),
            (Sign::Line(palette.hbm), "HBM".to_owned(), palette.ink),
            (
                Sign::Line(palette.vmem),
                "on-chip memory (per byte loaded from it)".to_owned(),
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

    fn draw_head<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
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

    /// The plot inside a panel; room on the right for half of the last tick label.
    fn view(&self, (left, top): (f64, f64), (width, height): (f64, f64)) -> View {
        View {
            plot: Area {
                left: left + 52.0,
                top: top + 22.0,
                right: left + width - 12.0,
                bottom: top + height - 40.0,
            },
            axes: self.axes,
        }
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
        let view = self.view((left, top), (width, height));
        let plot = view.plot;
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
        for (text, at, color) in labels {
            canvas.text(&text, at, LABEL, Anchor::Start, color)?;
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
        let (roofs, slopes) = (lines(chip, palette), slopes(chip, palette));
        let highest = |of: fn(&Line) -> f64| roofs.iter().map(of).fold(0.0, f64::max);
        let (highest, highest_datasheet) = (highest(|line| line.tera), highest(|line| line.datasheet));
        let mut names = Vec::new();
        let mut ridges = Vec::new();
        let achievable = chip.roofs.hbm_achievable * 1e-12;
        for slope in &slopes {
            if let Some((from, to)) = view.slope(slope.datasheet, highest_datasheet) {
                canvas.dashed(from, to, slope.color, 0.5)?;
                placer.take_line(from, to, SOFT);
            }
            if let Some((from, to)) = view.slope(slope.tera, highest) {
                canvas.line(&[from, to], slope.color, 1.5)?;
                placer.take_line(from, to, SOLID);
            }
        }
        // Whatever it is made of, a rate needs operands: a roof begins where the fastest memory ends.
        let begin = |rate: f64, of: fn(&Slope) -> f64| {
            let fastest = slopes
                .iter()
                .map(of)
                .filter(|rate| rate.is_finite())
                .fold(0.0, f64::max);
            let (x, y) = view.at((rate / fastest, rate));
            (x.clamp(plot.left, plot.right), y)
        };
        for line in &roofs {
            let (start, y) = begin(line.datasheet, |slope| slope.datasheet);
            canvas.dashed((start, y), (plot.right, y), line.color, 0.5)?;
            placer.take_line((start, y), (plot.right, y), SOFT);
            let (start, y) = begin(line.tera, |slope| slope.tera);
            canvas.line(&[(start, y), (plot.right, y)], line.color, 1.5)?;
            placer.take_line((start, y), (plot.right, y), SOLID);
            for slope in &slopes {
                let (ridge_x, y) = view.at((line.tera / slope.tera, line.tera));
                if ridge_x > plot.left + 4.0 && ridge_x < plot.right - 4.0 {
                    ridge_sign(canvas, (ridge_x, y), line.color)?;
                    placer.take(Area::around((ridge_x, y), 6.0, 6.0), FIRM);
                    ridges.push((three_digits(line.tera / slope.tera), (ridge_x, y), line.color));
                }
            }
        }
        let mut labels: Vec<Label> = roofs
            .iter()
            .map(|line| label_of_roof(line, view, achievable))
            .collect();
        labels.extend(ridges.into_iter().map(label_of_ridge));
        for slope in &slopes {
            if let Some((from, to)) = view.slope(slope.tera, highest) {
                labels.push(label_of_slope(slope, (from, to)));
            }
        }
        let candidates: Vec<_> = labels.iter().map(|label| label.candidates.clone()).collect();
        for (label, chosen) in labels.into_iter().zip(placer.settle(&candidates)) {
            let variant = chosen.and_then(|chosen| label.variants.get(chosen.variant));
            if let (Some(chosen), Some(lines)) = (chosen, variant) {
                for (row, text) in lines.iter().enumerate() {
                    let baseline = chosen.area.top + TEXT_ROW * row as f64 + 7.7;
                    names.push((text.clone(), (chosen.area.left, baseline), label.color));
                }
            }
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
        // Rows that stand on one another, as those that two plans share, have one label.
        let mut labels: Vec<(String, (f64, f64))> = Vec::new();
        for (number, _, (x, y)) in points {
            let number = (number + 1).to_string();
            match labels
                .iter_mut()
                .find(|(_, at)| (at.0 - x).hypot(at.1 - y) < SAME_PLACE)
            {
                Some((text, _)) => {
                    text.push_str(", ");
                    text.push_str(&number);
                }
                None => labels.push((number, (*x, *y))),
            }
        }
        let anchors: Vec<_> = labels.iter().map(|(_, at)| *at).collect();
        let sizes: Vec<_> = labels
            .iter()
            .map(|(text, _)| (text_width(text, NUMBER) + 2.0, 10.0))
            .collect();
        let places = place::beside(placer, &anchors, &sizes);
        for ((x, y), area) in anchors.iter().zip(&places) {
            let (to_x, to_y) = area.center();
            let (across, down) = (to_x - x, to_y - y);
            let length = across.hypot(down);
            // The leader ends where the text begins.
            let end = area.along((*x, *y)) - 1.5;
            if end > 10.0 {
                let at = |from_start: f64| (x + across * from_start / length, y + down * from_start / length);
                canvas.line(&[at(6.0), at(end)], self.palette.quiet, 0.5)?;
            }
        }
        // Rings first, so that a disc inside a ring stays visible where two plans share a kernel.
        let mut order: Vec<_> = points.iter().collect();
        order.sort_by_key(|(number, ..)| self.marker(*number).filled);
        for (number, row, at) in order {
            self.marker(*number)
                .draw(canvas, *at, self.palette.bound(row.bound))?;
        }
        for ((text, _), area) in labels.iter().zip(&places) {
            let (x, _) = area.center();
            canvas.text(
                text,
                (x, area.bottom - 2.3),
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

/// Distance under which two markers stand on one another.
const SAME_PLACE: f64 = 2.5;

/// Directions from a ridge in which its value is put, in order of preference.
const RIDGE_PLACES: [(f64, f64); 11] = [
    (-1.0, 0.0),
    (-1.0, -0.7),
    (-0.5, -1.0),
    (0.0, -1.0),
    (1.0, 0.7),
    (-1.0, 0.7),
    (0.5, -1.0),
    (0.0, 1.0),
    (0.5, 1.0),
    (-0.5, 1.0),
    (1.0, -0.7),
];

/// Height of a line of a label.
const TEXT_ROW: f64 = 11.0;

/// A text of a panel that looks for its place.
struct Label {
    /// Ways to write it, each a few lines.
    variants: Vec<Vec<String>>,
    candidates: Vec<Candidate>,
    color: RGBColor,
}

/// Ways to write a label with their widths and heights.
fn measured(variants: Vec<Vec<String>>) -> impl Iterator<Item = (usize, f64, f64)> {
    variants.into_iter().enumerate().map(|(variant, lines)| {
        let widths = lines.iter().map(|line| text_width(line, LABEL));
        let width = widths.fold(0.0, f64::max);
        (variant, width, TEXT_ROW * lines.len() as f64 - 1.0)
    })
}

/// The name of a horizontal roof, at its right end: over the dashed line above it, or under it.
fn label_of_roof(line: &Line, view: &View, achievable: f64) -> Label {
    let plot = view.plot;
    let (ridge_x, y) = view.at((line.tera / achievable, line.tera));
    let (_, over) = view.at((line.tera / achievable, line.datasheet));
    let full = line.label();
    // The colour says MXU too, so that word goes where the room is short.
    let short = full.strip_prefix("MXU ").map(|short| vec![short.to_owned()]);
    let variants: Vec<Vec<String>> = std::iter::once(vec![full.clone()]).chain(short).collect();
    let mut candidates = Vec::new();
    for (variant, width, height) in measured(variants.clone()) {
        let furthest = (plot.right - ridge_x.max(plot.left) - width).max(8.0);
        for step in (0..12).map(f64::from) {
            let right = plot.right - 4.0 - furthest * step / 12.0;
            for (middle, against) in [
                (over.min(y) - 7.5, 0.0),
                (y + 8.5, 8.0),
                (over.min(y) - 15.0, 24.0),
                (y + 16.0, 28.0),
                (y + 24.0, 44.0),
                (over.min(y) - 23.0, 48.0),
                (y + 33.0, 60.0),
            ] {
                candidates.push(Candidate {
                    area: Area::around((right - width / 2.0, middle), width, height),
                    against: against + step + 6.0 * variant as f64,
                    variant,
                });
            }
        }
    }
    Label {
        variants,
        candidates,
        color: line.color,
    }
}

/// The value of a ridge around its point.
fn label_of_ridge((text, (x, y), color): (String, (f64, f64), RGBColor)) -> Label {
    let width = text_width(&text, LABEL);
    let candidates = RIDGE_PLACES
        .iter()
        .enumerate()
        .flat_map(|(order, &(across, down))| {
            [7.0, 10.0, 14.0, 19.0, 25.0].map(|distance: f64| {
                let center = (
                    x + across * (distance + width / 2.0 - 1.0),
                    y + down * (distance + 1.0),
                );
                Candidate {
                    area: Area::around(center, width, TEXT_ROW - 1.0),
                    against: order as f64 + 2.0 * (distance - 7.0),
                    variant: 0,
                }
            })
        })
        .collect();
    Label {
        variants: vec![vec![text]],
        candidates,
        color,
    }
}

/// The name of a slanted roof beside its line, in as many lines of text as the room asks for.
fn label_of_slope(slope: &Slope, (from, to): ((f64, f64), (f64, f64))) -> Label {
    const STEPS: u32 = 120;
    let [name, achievable, datasheet] = &slope.label;
    let words = name.split(' ').chain([achievable.as_str(), datasheet.as_str()]);
    let variants = vec![
        vec![format!("{name} {achievable} {datasheet}")],
        vec![name.clone(), format!("{achievable} {datasheet}")],
        slope.label.to_vec(),
        words.map(str::to_owned).collect(),
    ];
    let mut candidates = Vec::new();
    for (variant, width, height) in measured(variants.clone()) {
        for step in 1..STEPS {
            let along = f64::from(step) / f64::from(STEPS);
            let (x, y) = (from.0 + (to.0 - from.0) * along, from.1 + (to.1 - from.1) * along);
            let against = 0.1 * f64::from(step) + 6.0 * variant as f64;
            // Over the line, on the side of the dashed one, or under it.
            for (left, top, side) in [(x - 9.0 - width, y - height, 0.0), (x + 5.0, y, 4.0)] {
                candidates.push(Candidate {
                    area: Area {
                        left,
                        top,
                        right: left + width,
                        bottom: top + height,
                    },
                    against: against + side,
                    variant,
                });
            }
        }
    }
    Label {
        variants,
        candidates,
        color: slope.color,
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
        if !self.untitled {
            self.draw_head(canvas)?;
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

    fn hits(&self) -> Vec<Hit> {
        let view = self.sheet.view((4.0, 3.0), (392.0, PANEL_HEIGHT));
        let mut hits: Vec<Hit> = Vec::new();
        for (number, row) in self.sheet.points(self.chip) {
            let Some((x, y)) = position(row) else { continue };
            let entry = self.sheet.entries.get(number).map(|entry| entry.plan.as_str());
            let Some(plan) = self
                .chip
                .plans
                .iter()
                .find(|plan| Some(plan.name.as_str()) == entry)
            else {
                continue;
            };
            let text = format!(
                "{}. {}\n{} operations per HBM byte, {} tera-operations per second",
                number + 1,
                format::stage_words(self.chip, plan, row),
                three_digits(x),
                three_digits(y)
            );
            let hit = Hit::around(view.at((x, y)), 7.0, text);
            // Of two that stand on one another only the upper could be pointed at, so it says both.
            let near = |other: &Hit| {
                let (a, b) = (other.corners.0, hit.corners.0);
                (a.0 - b.0).hypot(a.1 - b.1) < SAME_PLACE
            };
            match hits.iter_mut().find(|other| near(other)) {
                Some(other) => other.text = format!("{}\n\n{}", other.text, hit.text),
                None => hits.push(hit),
            }
        }
        hits
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

    /// Rectangle of the ink of every text, from its baseline down to what a `p` hangs and up to a capital, in units of the view box.
    fn text_areas(svg: &str) -> Vec<(String, Area)> {
        const BASELINE: f64 = 0.76;
        const CAPITAL: f64 = 0.73;
        const DESCENT: f64 = 0.2;
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
                let (top, bottom) = (em * (BASELINE - CAPITAL), em * (BASELINE + DESCENT));
                let area = if tag.contains("rotate(270") {
                    Area {
                        left: x + top,
                        right: x + bottom,
                        top: y - start - width,
                        bottom: y - start,
                    }
                } else {
                    Area {
                        left: x + start,
                        right: x + start + width,
                        top: y + top,
                        bottom: y + bottom,
                    }
                };
                (content, area)
            })
            .collect()
    }

    /// Rectangle of every marker and ridge, in units of the view box.
    fn marks(svg: &str) -> Vec<Area> {
        let circles = svg.split("<circle").skip(1).map(|tag| {
            let radius = number(tag, "r");
            Area::around((number(tag, "cx"), number(tag, "cy")), 1.4 * radius, 1.4 * radius)
        });
        let ridges = svg.split("<polygon").skip(1).filter_map(|tag| {
            let points: Vec<(f64, f64)> = attribute(tag, "points")?
                .split_whitespace()
                .filter_map(|point| {
                    let (x, y) = point.split_once(',')?;
                    Some((x.parse().ok()?, y.parse().ok()?))
                })
                .collect();
            let [(left, y), (x, _), ..] = points[..] else {
                return None;
            };
            // A square inside the diamond.
            Some(Area::around((x, y), x - left, x - left))
        });
        circles.chain(ridges).collect()
    }

    /// Texts that leave a picture, and pairs of a text with a text or a mark that it covers.
    fn faults(picture: &str) -> Vec<String> {
        let view = attribute(picture, "viewBox").unwrap_or_default();
        let size: Vec<f64> = view.split(' ').filter_map(|part| part.parse().ok()).collect();
        let canvas = Area {
            left: 0.0,
            top: 0.0,
            right: size[2],
            bottom: size[3],
        };
        let (areas, marks) = (text_areas(picture), marks(picture));
        let mut faults = Vec::new();
        for (index, (text, area)) in areas.iter().enumerate() {
            let inside = area.overlap(&canvas) >= area.width() * area.height() - 1e-6;
            if !inside {
                faults.push(format!("`{text}` leaves the picture: {area:?}"));
            }
            for (other, place) in areas.iter().skip(index + 1) {
                if area.overlap(place) > 0.0 {
                    faults.push(format!(
                        "`{text}` and `{other}` cover each other: {area:?} {place:?}"
                    ));
                }
            }
            for mark in &marks {
                if area.overlap(mark) > 0.0 {
                    faults.push(format!("`{text}` and a mark cover each other: {area:?} {mark:?}"));
                }
            }
        }
        faults
    }

    /// Every picture that a run leads to: the sheet, and the panels and keys of the page.
    fn pictures(result: &RunResult) -> Result<Vec<String>, PlotError> {
        let options = Options::default();
        let mut pictures = page_panels(result, &options)?;
        for width in [KEY_NARROW, KEY_WIDE] {
            pictures.push(page_key(result, &options, width)?);
        }
        pictures.push(svg(result, &options)?);
        Ok(pictures)
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
            for picture in pictures(&result)? {
                assert!(texts(&picture).len() > 8);
                assert_eq!(faults(&picture), [] as [&str; 0]);
            }
        }
        Ok(())
    }

    /// The same for every shipped workload: on its own chips, on one alone, and on all of them.
    #[test]
    fn no_text_of_a_shipped_workload_covers_another() -> Result<(), Box<dyn std::error::Error>> {
        use rayon::prelude::*;
        let every: Vec<String> = crate::hardware::shipped()
            .into_iter()
            .map(str::to_owned)
            .collect();
        let faults_of = |(index, name): (usize, &str)| -> Result<Vec<String>, String> {
            let workload = crate::workload::load(name, &[] as &[&str]).map_err(|error| error.to_string())?;
            // On another chip alone for each, so that all have their turn.
            let alone = vec![every[index % every.len()].clone()];
            let mut found = Vec::new();
            for chips in [workload.0.hardware.clone(), alone, every.clone()] {
                let loaded = chips
                    .iter()
                    .map(|chip| crate::hardware::load(chip))
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(|error| error.to_string())?;
                let result = crate::study::run(crate::study::RunRequest {
                    workload: &workload,
                    baseline: None,
                    chips: &loaded,
                    overrides: Vec::new(),
                    numeric: None,
                })
                .map_err(|error| error.to_string())?;
                let drawn = if chips.len() > workload.0.hardware.len() {
                    svg(&result, &Options::default()).map(|sheet| vec![sheet])
                } else {
                    pictures(&result)
                };
                let drawn = drawn.map_err(|error| error.to_string())?;
                let faults = drawn.iter().flat_map(|picture| faults(picture));
                found.extend(faults.map(|fault| format!("{name} on {}: {fault}", chips.join(", "))));
            }
            Ok(found)
        };
        let found: Vec<String> = crate::workload::shipped()
            .into_par_iter()
            .enumerate()
            .map(faults_of)
            .collect::<Result<Vec<_>, _>>()?
            .concat();
        assert_eq!(found, [] as [&str; 0]);
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
