//! Compiled kernels: their times beside predictions, the slots they use, and what single choices cost.

use plotters::backend::DrawingBackend;
use plotters::style::RGBColor;

use super::bars::tick_step;
use super::canvas::{self, Anchor, Canvas, Picture, Place, PlotError, Type, text_width};
use super::theme::{Palette, Theme, ink_on, series_color};
use crate::calibration::kernels::{Change, Line, Row, Side};

const HEAD: Type = Type::bold(12.5);
const BODY: Type = Type::regular(11.5);
const SMALL: Type = Type::regular(10.5);

const MARGIN: f64 = 14.0;
const TOP: f64 = 62.0;

/// Times of KDA and SLA-R4 kernels as SVG: a bar for the schedule, a ring for the fast model, the speedup beside them.
///
/// # Errors
/// Where the drawing library fails.
pub fn times(lines: &[Line], theme: Theme) -> Result<String, PlotError> {
    canvas::svg(&Times::new(lines, theme), Place::File)
}

/// Shares of the slots that kernels use as SVG: `rows` are programs with what they are called.
///
/// # Errors
/// Where the drawing library fails.
pub fn slots(rows: &[(String, &Row)], theme: Theme) -> Result<String, PlotError> {
    canvas::svg(&Slots::new(rows, theme), Place::File)
}

/// Factors of single choices as SVG: a disc for the schedule, a ring for the fast model.
///
/// # Errors
/// Where the drawing library fails.
pub fn changes(title: &str, changes: &[Change], theme: Theme) -> Result<String, PlotError> {
    canvas::svg(&Changes::new(title, changes, theme), Place::File)
}

/// Title of a picture and a line below it.
fn heading<B: DrawingBackend>(
    canvas: &Canvas<B>,
    palette: &Palette,
    title: &str,
    note: &str,
) -> Result<(), PlotError> {
    canvas.text(title, (MARGIN, 22.0), HEAD, Anchor::Start, palette.ink)?;
    canvas.text(note, (MARGIN, 42.0), SMALL, Anchor::Start, palette.quiet)
}

struct Times<'a> {
    lines: &'a [Line],
    palette: &'static Palette,
    left: f64,
    longest_ms: f64,
}

impl<'a> Times<'a> {
    const WIDTH: f64 = 430.0;
    const RIGHT: f64 = 120.0;
    const BAR: f64 = 11.0;
    const STEP: f64 = 40.0;
    const CHIP: f64 = 24.0;
    const BOTTOM: f64 = 70.0;

    fn new(lines: &'a [Line], theme: Theme) -> Self {
        let longest = |side: &Side| side.schedule_us.max(side.predicted_us.unwrap_or(0.0)) * 1e-3;
        Times {
            lines,
            palette: theme.palette(),
            left: MARGIN
                + lines
                    .iter()
                    .map(|line| text_width(line.kernels, BODY))
                    .fold(0.0, f64::max)
                + 12.0,
            longest_ms: lines
                .iter()
                .flat_map(|line| [longest(&line.kda), longest(&line.sla_r4)])
                .fold(0.0, f64::max),
        }
    }

    /// Height of a line, with the name of its chip where it is the first.
    fn height_of(&self, at: usize) -> f64 {
        if at == 0 || self.lines[at - 1].chip != self.lines[at].chip {
            Self::STEP + Self::CHIP
        } else {
            Self::STEP
        }
    }

    fn height(&self) -> f64 {
        (0..self.lines.len()).map(|at| self.height_of(at)).sum()
    }

    fn x(&self, ms: f64) -> f64 {
        self.left + Self::WIDTH * ms / self.longest_ms.max(f64::MIN_POSITIVE)
    }
}

impl Picture for Times<'_> {
    fn size(&self) -> (f64, f64) {
        (
            self.left + Self::WIDTH + Self::RIGHT,
            TOP + self.height() + Self::BOTTOM,
        )
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "Times of compiled KDA and SLA-R4 kernels beside predictions, {} comparisons",
            self.lines.len()
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        heading(
            canvas,
            palette,
            "KDA and SLA-R4 on every generation",
            "compiled, simulated from the compiler's schedule; no TPU ran",
        )?;
        let bottom = TOP + self.height();
        let step = tick_step(self.longest_ms / 6.0);
        let mut tick = 0.0;
        while tick <= self.longest_ms {
            let x = self.x(tick);
            canvas.line(&[(x, TOP), (x, bottom)], palette.grid, 0.5)?;
            let text = format!("{}", (tick * 1e6).round() / 1e6);
            canvas.text(&text, (x, bottom + 16.0), SMALL, Anchor::Middle, palette.quiet)?;
            tick += step;
        }
        let mut y = TOP;
        for (at, line) in self.lines.iter().enumerate() {
            if self.height_of(at) > Self::STEP {
                let cores = match line.cores_used {
                    Some(1) | None => "one core".to_owned(),
                    Some(cores) => format!("{cores} cores"),
                };
                let text = format!("{}, {cores}", line.chip);
                canvas.text(&text, (MARGIN, y + 17.0), HEAD, Anchor::Start, palette.ink)?;
                y += Self::CHIP;
            }
            let middle = y + Self::STEP / 2.0;
            canvas.text(
                line.kernels,
                (self.left - 8.0, middle + 4.0),
                BODY,
                Anchor::End,
                palette.ink,
            )?;
            for (side, from, color) in [
                (&line.kda, middle - Self::BAR - 1.0, series_color(0)),
                (&line.sla_r4, middle + 1.0, series_color(1)),
            ] {
                let end = self.x(side.schedule_us * 1e-3);
                canvas.block((self.left, from), (end, from + Self::BAR), color)?;
                if let Some(us) = side.predicted_us {
                    let center = (self.x(us * 1e-3), from + Self::BAR / 2.0);
                    canvas.disc(center, 4.0, palette.paper)?;
                    canvas.ring(center, 3.4, palette.ink, 1.4)?;
                }
            }
            let text = match line.predicted_speedup {
                Some(predicted) => format!("{:.2} x ({predicted:.2})", line.speedup),
                None => format!("{:.2} x", line.speedup),
            };
            let x = self.left + Self::WIDTH + 14.0;
            canvas.text(&text, (x, middle + 4.0), BODY, Anchor::Start, palette.ink)?;
            y += Self::STEP;
        }
        canvas.line(&[(self.left, TOP), (self.left, bottom)], palette.axis, 1.0)?;
        let middle = self.left + Self::WIDTH / 2.0;
        canvas.text(
            "time (ms)",
            (middle, bottom + 34.0),
            BODY,
            Anchor::Middle,
            palette.ink,
        )?;
        let mut x = MARGIN;
        let key = bottom + 56.0;
        for (name, color) in [("KDA", series_color(0)), ("SLA-R4", series_color(1))] {
            canvas.block((x, key - 9.0), (x + 12.0, key + 1.0), color)?;
            canvas.text(name, (x + 17.0, key), BODY, Anchor::Start, palette.ink)?;
            x += 17.0 + text_width(name, BODY) + 20.0;
        }
        canvas.ring((x + 5.0, key - 4.0), 3.4, palette.ink, 1.4)?;
        canvas.text(
            "fast model, every row of that generation left out; speedup, in brackets that of the fast model",
            (x + 15.0, key),
            BODY,
            Anchor::Start,
            palette.ink,
        )
    }
}

/// Slots of the picture: name in the compiler's tables, title.
const UNITS: [(&str, &str); 9] = [
    ("MXU", "MXU"),
    ("VALU", "VALU"),
    ("EUP", "EUP"),
    ("XLU", "XLU"),
    ("VPOP", "VPOP"),
    ("VLOAD", "load"),
    ("VLOAD:FILL", "of it fills"),
    ("VSTORE", "store"),
    ("VSTORE:SPILL", "of it spills"),
];

struct Slots<'a> {
    rows: &'a [(String, &'a Row)],
    palette: &'static Palette,
    left: f64,
}

impl<'a> Slots<'a> {
    const CELL: (f64, f64) = (66.0, 22.0);

    fn new(rows: &'a [(String, &'a Row)], theme: Theme) -> Self {
        let widest = rows
            .iter()
            .map(|(name, _)| text_width(name, BODY))
            .fold(0.0, f64::max);
        Slots {
            rows,
            palette: theme.palette(),
            left: MARGIN + widest + 12.0,
        }
    }

    /// A colour between paper and that of the unit.
    fn shade(&self, share: f64, color: RGBColor) -> RGBColor {
        let paper = self.palette.paper;
        let mix = |paper: u8, ink: u8| {
            let value = f64::from(paper) + (f64::from(ink) - f64::from(paper)) * share.clamp(0.0, 1.0);
            value.round() as u8
        };
        RGBColor(
            mix(paper.0, color.0),
            mix(paper.1, color.1),
            mix(paper.2, color.2),
        )
    }
}

impl Picture for Slots<'_> {
    fn size(&self) -> (f64, f64) {
        let columns = UNITS.len() as f64 + 1.0;
        (
            self.left + columns * Self::CELL.0 + MARGIN,
            TOP + 24.0 + self.rows.len() as f64 * Self::CELL.1 + MARGIN,
        )
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!("Shares of slots that {} compiled kernels use", self.rows.len())
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        heading(
            canvas,
            palette,
            "Slots in use, share of all cycles (%)",
            "compiled, simulated from the compiler's schedule; empty: cycles in which nothing is issued, waits left out",
        )?;
        let (width, height) = Self::CELL;
        let titles = UNITS.iter().map(|(_, title)| *title).chain(["empty"]);
        for (column, title) in titles.enumerate() {
            let x = self.left + (column as f64 + 0.5) * width;
            canvas.text(title, (x, TOP + 14.0), SMALL, Anchor::Middle, palette.quiet)?;
        }
        for (at, (name, row)) in self.rows.iter().enumerate() {
            let y = TOP + 24.0 + at as f64 * height;
            canvas.text(name, (self.left - 8.0, y + 15.0), BODY, Anchor::End, palette.ink)?;
            let time = &row.time;
            let empty = time.empty_us / (time.issue_us + time.empty_us).max(f64::MIN_POSITIVE);
            let shares = UNITS.iter().map(|(slot, _)| time.slot_share(slot));
            for (column, share) in shares.chain([Some(empty)]).enumerate() {
                let x = self.left + column as f64 * width;
                let color = match column {
                    0 => palette.mxu,
                    1 | 3 | 4 => palette.vpu,
                    2 => palette.transcendental,
                    5..=8 => palette.vmem,
                    _ => palette.chain,
                };
                let shade = self.shade(share.unwrap_or(0.0), color);
                canvas.block((x + 1.0, y + 1.0), (x + width - 1.0, y + height - 1.0), shade)?;
                let text = share.map_or_else(|| "-".to_owned(), |share| format!("{:.0}", 100.0 * share));
                let center = (x + width / 2.0, y + 15.0);
                canvas.text(&text, center, SMALL, Anchor::Middle, ink_on(shade))?;
            }
        }
        Ok(())
    }
}

struct Changes<'a> {
    title: &'a str,
    /// Choice with its value, and the factors on the chips.
    rows: Vec<(String, Vec<&'a Change>)>,
    chips: Vec<&'a str>,
    palette: &'static Palette,
    left: f64,
    /// Ends of the axis.
    range: (f64, f64),
}

impl<'a> Changes<'a> {
    const WIDTH: f64 = 400.0;
    const RIGHT: f64 = 110.0;
    const BOTTOM: f64 = 54.0;
    const STEP: f64 = 9.0;
    const GAP: f64 = 10.0;

    fn new(title: &'a str, changes: &'a [Change], theme: Theme) -> Self {
        let mut chips: Vec<&str> = changes.iter().map(|change| change.chip.as_str()).collect();
        chips.sort_unstable();
        chips.dedup();
        let mut rows: Vec<(String, Vec<&Change>)> = Vec::new();
        for change in changes {
            let name = format!("{}: {}", change.choice, change.value);
            match rows.iter_mut().find(|(known, _)| *known == name) {
                Some((_, of)) => of.push(change),
                None => rows.push((name, vec![change])),
            }
        }
        let widest = rows
            .iter()
            .map(|(name, _)| text_width(name, BODY))
            .fold(0.0, f64::max);
        let factors = changes
            .iter()
            .flat_map(|change| [Some(change.factor), change.predicted_factor])
            .flatten();
        let (low, high) = factors.fold((1.0_f64, 1.0_f64), |(low, high), factor| {
            (low.min(factor), high.max(factor))
        });
        Changes {
            title,
            rows,
            chips,
            palette: theme.palette(),
            left: MARGIN + widest + 12.0,
            range: (low / 1.05, high * 1.05),
        }
    }

    fn height_of(of: &[&Change]) -> f64 {
        Self::STEP * of.len() as f64 + Self::GAP
    }

    fn height(&self) -> f64 {
        self.rows.iter().map(|(_, of)| Self::height_of(of)).sum()
    }

    fn x(&self, factor: f64) -> f64 {
        let (low, high) = self.range;
        self.left + Self::WIDTH * (factor / low).ln() / (high / low).ln()
    }
}

impl Picture for Changes<'_> {
    fn size(&self) -> (f64, f64) {
        let key = TOP + 20.0 * self.chips.len() as f64;
        (
            self.left + Self::WIDTH + Self::RIGHT,
            (TOP + self.height()).max(key) + Self::BOTTOM,
        )
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "{}: {} choices on {} chips",
            self.title,
            self.rows.len(),
            self.chips.len()
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        heading(
            canvas,
            palette,
            self.title,
            "disc: schedule of the compiler; ring: fast model, that generation left out",
        )?;
        let (right, bottom) = (self.left + Self::WIDTH, TOP + self.height());
        for tick in [0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 4.0, 6.0, 8.0] {
            if tick < self.range.0 || tick > self.range.1 {
                continue;
            }
            let x = self.x(tick);
            let color = if (tick - 1.0).abs() < 1e-9 {
                palette.axis
            } else {
                palette.grid
            };
            canvas.line(&[(x, TOP), (x, bottom)], color, 0.7)?;
            let text = format!("{tick}");
            canvas.text(&text, (x, bottom + 16.0), SMALL, Anchor::Middle, palette.quiet)?;
        }
        let mut y = TOP;
        for (name, of) in &self.rows {
            let height = Self::height_of(of);
            canvas.line(&[(self.left, y), (right, y)], palette.grid, 0.5)?;
            canvas.text(
                name,
                (self.left - 8.0, y + height / 2.0 + 4.0),
                BODY,
                Anchor::End,
                palette.ink,
            )?;
            for (i, change) in of.iter().enumerate() {
                let at = y + Self::GAP / 2.0 + Self::STEP * (i as f64 + 0.5);
                let index = self.chips.iter().position(|chip| *chip == change.chip);
                let color = series_color(index.unwrap_or(0));
                if let Some(predicted) = change.predicted_factor {
                    let ends = [(self.x(change.factor), at), (self.x(predicted), at)];
                    canvas.line(&ends, color, 0.8)?;
                    canvas.ring((self.x(predicted), at), 3.0, color, 1.2)?;
                }
                canvas.disc((self.x(change.factor), at), 3.2, color)?;
            }
            y += height;
        }
        canvas.line(&[(self.left, bottom), (right, bottom)], palette.axis, 1.0)?;
        canvas.text(
            "time over that of the kernel it is compared with",
            (f64::midpoint(self.left, right), bottom + 36.0),
            BODY,
            Anchor::Middle,
            palette.ink,
        )?;
        for (index, chip) in self.chips.iter().enumerate() {
            let y = TOP + 12.0 + 20.0 * index as f64;
            canvas.disc((right + 16.0, y - 4.0), 4.5, series_color(index))?;
            canvas.text(chip, (right + 27.0, y), BODY, Anchor::Start, palette.ink)?;
        }
        Ok(())
    }
}
