//! A sweep: the time over the values of a field, one line for each chip; or step by step from one design to another.

use std::path::Path;

use plotters::backend::DrawingBackend;

use super::axis::ticks;
use super::canvas::{self, Anchor, Canvas, Picture, Place, PlotError, Type, text_width, wrap};
use super::marks;
use super::theme::{Palette, Theme, series_color};

/// Times of one chip in one plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// Chip.
    pub chip: String,
    /// Time at every value, in microseconds; none where it cannot be timed.
    pub times_us: Vec<Option<f64>>,
}

/// The lines of one plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// Plan.
    pub plan: String,
    /// One for each chip.
    pub lines: Vec<Line>,
}

/// Times over the values of a field.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// What is asked.
    pub title: String,
    /// The field.
    pub field: String,
    /// Its values.
    pub values: Vec<String>,
    /// One for each plan.
    pub panels: Vec<Panel>,
}

/// The way from one design to another on every chip.
#[derive(Debug, Clone, PartialEq)]
pub struct Steps {
    /// What is asked.
    pub title: String,
    /// What each step changes; the first is where the way begins.
    pub names: Vec<String>,
    /// Times after each step, of every chip.
    pub chips: Vec<Line>,
}

/// What a sweep looks like.
#[derive(Debug, Clone, PartialEq)]
pub enum Sheet {
    /// Lines over a field.
    Series(Series),
    /// A waterfall of steps.
    Steps(Steps),
}

impl Sheet {
    /// The picture as SVG.
    ///
    /// # Errors
    /// Where the drawing library fails.
    pub fn svg(&self, theme: Theme) -> Result<String, PlotError> {
        match self {
            Sheet::Series(series) => canvas::svg(&Lines::new(series, theme), Place::File),
            Sheet::Steps(steps) => canvas::svg(&Waterfall::new(steps, theme), Place::File),
        }
    }

    /// Writes the picture as PNG of twice the size.
    ///
    /// # Errors
    /// Where the drawing library or the file system fails.
    pub fn png(&self, theme: Theme, path: &Path) -> Result<(), PlotError> {
        match self {
            Sheet::Series(series) => canvas::png(&Lines::new(series, theme), path),
            Sheet::Steps(steps) => canvas::png(&Waterfall::new(steps, theme), path),
        }
    }
}

const MARGIN: f64 = 14.0;
const HEAD: Type = Type::bold(12.5);
const BODY: Type = Type::regular(11.5);
const SMALL: Type = Type::regular(10.5);

/// Height of title and legend.
const TOP: f64 = 88.0;
const PLOT_WIDTH: f64 = 320.0;
const PLOT_HEIGHT: f64 = 260.0;
/// Room for the numbers left of a panel.
const AXIS: f64 = 62.0;
const BOTTOM: f64 = 60.0;
/// Height of a line of values under a panel, and most of them.
const VALUE_LINE: f64 = 14.0;
const MOST_VALUE_LINES: usize = 3;

struct Lines<'a> {
    series: &'a Series,
    palette: &'static Palette,
    /// Ends of the time axis of all panels, in microseconds.
    range: (f64, f64),
}

impl<'a> Lines<'a> {
    fn new(series: &'a Series, theme: Theme) -> Self {
        let times = || {
            let lines = series.panels.iter().flat_map(|panel| &panel.lines);
            lines.flat_map(|line| line.times_us.iter().flatten().copied())
        };
        let low = times().fold(f64::INFINITY, f64::min);
        let high = times().fold(0.0, f64::max);
        Lines {
            series,
            palette: theme.palette(),
            range: if low > 0.0 && low <= high {
                (low / 1.3, high * 1.3)
            } else {
                (1.0, 10.0)
            },
        }
    }

    fn left(panel: usize) -> f64 {
        MARGIN + AXIS + panel as f64 * (PLOT_WIDTH + AXIS)
    }

    fn x(&self, panel: usize, value: usize) -> f64 {
        let step = PLOT_WIDTH / self.series.values.len().max(1) as f64;
        Self::left(panel) + (value as f64 + 0.5) * step
    }

    fn y(&self, us: f64) -> f64 {
        let (low, high) = self.range;
        TOP + PLOT_HEIGHT * (1.0 - (us / low).ln() / (high / low).ln())
    }

    /// Lines that the values are written in, so that none touches the next, and every how many one is written.
    fn lines_and_stride(&self) -> (usize, usize) {
        let needed = self.needed_lines();
        if needed <= MOST_VALUE_LINES {
            (needed, 1)
        } else {
            (1, needed)
        }
    }

    /// Lines it would take to write every value.
    fn needed_lines(&self) -> usize {
        let widest = self.series.values.iter().map(|value| text_width(value, SMALL));
        let room = PLOT_WIDTH / self.series.values.len().max(1) as f64;
        ((widest.fold(0.0, f64::max) + 8.0) / room).ceil().max(1.0) as usize
    }

    fn panel<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        index: usize,
        panel: &Panel,
    ) -> Result<(), PlotError> {
        let palette = self.palette;
        let (left, right, bottom) = (
            Self::left(index),
            Self::left(index) + PLOT_WIDTH,
            TOP + PLOT_HEIGHT,
        );
        canvas.text(
            &panel.plan,
            (left, TOP - 8.0),
            Type::bold(11.5),
            Anchor::Start,
            palette.ink,
        )?;
        for us in ticks(self.range.0, self.range.1) {
            let y = self.y(us);
            canvas.line(&[(left, y), (right, y)], palette.grid, 0.5)?;
            let text = if us < 1000.0 {
                format!("{us} µs")
            } else {
                format!("{} ms", us / 1000.0)
            };
            canvas.text(&text, (left - 6.0, y + 4.0), SMALL, Anchor::End, palette.quiet)?;
        }
        let (lines, stride) = self.lines_and_stride();
        for (value, text) in self.series.values.iter().enumerate().step_by(stride) {
            let x = self.x(index, value);
            let down = (value / stride % lines) as f64 * VALUE_LINE;
            canvas.line(&[(x, bottom), (x, bottom + 4.0 + down)], palette.axis, 1.0)?;
            canvas.text(
                text,
                (x, bottom + 18.0 + down),
                SMALL,
                Anchor::Middle,
                palette.quiet,
            )?;
        }
        canvas.line(&[(left, TOP), (left, bottom), (right, bottom)], palette.axis, 1.0)?;
        let middle = (
            f64::midpoint(left, right),
            bottom + 42.0 + (lines - 1) as f64 * VALUE_LINE,
        );
        canvas.text(&self.series.field, middle, BODY, Anchor::Middle, palette.ink)?;
        for (chip, line) in panel.lines.iter().enumerate() {
            let points: Vec<Option<(f64, f64)>> = line
                .times_us
                .iter()
                .enumerate()
                .map(|(value, us)| us.map(|us| (self.x(index, value), self.y(us))))
                .collect();
            for pair in points.windows(2) {
                if let [Some(from), Some(to)] = *pair {
                    canvas.line(&[from, to], series_color(chip), 1.4)?;
                }
            }
            // Many signs would hide the line they stand on.
            let every = points.len().div_ceil(24).max(1);
            for point in points.iter().flatten().step_by(every) {
                marks::sign(canvas, chip, *point)?;
            }
        }
        Ok(())
    }
}

/// Signs and names of chips in one line.
fn legend<'c, B: DrawingBackend>(
    canvas: &Canvas<B>,
    chips: impl Iterator<Item = &'c str>,
    y: f64,
    palette: &Palette,
) -> Result<(), PlotError> {
    let mut x = MARGIN + 5.0;
    for (index, chip) in chips.enumerate() {
        marks::sign(canvas, index, (x, y - 4.0))?;
        canvas.text(chip, (x + 10.0, y), BODY, Anchor::Start, palette.ink)?;
        x += 30.0 + text_width(chip, BODY);
    }
    Ok(())
}

impl Picture for Lines<'_> {
    fn size(&self) -> (f64, f64) {
        let panels = self.series.panels.len().max(1) as f64;
        let width = 2.0 * MARGIN + panels * (PLOT_WIDTH + AXIS);
        let title = 2.0 * MARGIN + text_width(&self.series.title, HEAD);
        let values = (self.lines_and_stride().0 - 1) as f64 * VALUE_LINE;
        (width.max(title), TOP + PLOT_HEIGHT + BOTTOM + values)
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        let plans: Vec<&str> = self
            .series
            .panels
            .iter()
            .map(|panel| panel.plan.as_str())
            .collect();
        format!(
            "{}: time over {} in the plans {}, one line for each chip",
            self.series.title,
            self.series.field,
            plans.join(", ")
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        canvas.text(
            &self.series.title,
            (MARGIN, 22.0),
            HEAD,
            Anchor::Start,
            self.palette.ink,
        )?;
        let chips = self.series.panels.first();
        let chips = chips.into_iter().flat_map(|panel| &panel.lines);
        legend(canvas, chips.map(|line| line.chip.as_str()), 48.0, self.palette)?;
        for (index, panel) in self.series.panels.iter().enumerate() {
            self.panel(canvas, index, panel)?;
        }
        Ok(())
    }
}

const ROW: f64 = 34.0;
const COLUMN: f64 = 150.0;
const LABELS: f64 = 190.0;
/// Height of title and names of chips.
const STEPS_TOP: f64 = 62.0;

struct Waterfall<'a> {
    steps: &'a Steps,
    palette: &'static Palette,
}

impl<'a> Waterfall<'a> {
    fn new(steps: &'a Steps, theme: Theme) -> Self {
        Waterfall {
            steps,
            palette: theme.palette(),
        }
    }

    /// Each chip has a scale of its own: the longest of its times fills the column.
    fn column<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        index: usize,
        chip: &Line,
    ) -> Result<(), PlotError> {
        let palette = self.palette;
        let left = MARGIN + LABELS + index as f64 * (COLUMN + MARGIN);
        canvas.text(
            &chip.chip,
            (left, STEPS_TOP - 10.0),
            Type::bold(11.5),
            Anchor::Start,
            palette.ink,
        )?;
        let longest = chip.times_us.iter().flatten().copied().fold(0.0, f64::max);
        // The number stands behind the longest bar.
        let x = |us: f64| left + (COLUMN - 52.0) * us / longest;
        let mut before: Option<f64> = None;
        let last = self.steps.names.len().saturating_sub(1);
        for (row, time) in chip.times_us.iter().enumerate() {
            let y = STEPS_TOP + row as f64 * ROW;
            let Some(us) = *time else {
                canvas.text("not timed", (left, y + 18.0), SMALL, Anchor::Start, palette.quiet)?;
                continue;
            };
            let (from, to, color) = match before {
                Some(before) if row < last => {
                    let color = if us <= before { palette.vpu } else { palette.mxu };
                    (before.min(us), before.max(us), color)
                }
                _ => (0.0, us, palette.chain),
            };
            // A change too small to see is a line.
            let (from, to) = (x(from), x(to).max(x(from) + 1.0));
            canvas.block((from, y + 5.0), (to, y + ROW - 9.0), color)?;
            let end = x(before.unwrap_or(us).max(us));
            canvas.text(
                &format!("{:.2} ms", us / 1000.0),
                (end + 4.0, y + 18.0),
                SMALL,
                Anchor::Start,
                palette.ink,
            )?;
            before = Some(us);
        }
        let bottom = STEPS_TOP + self.steps.names.len() as f64 * ROW;
        canvas.line(&[(left, STEPS_TOP), (left, bottom)], palette.axis, 1.0)
    }
}

impl Picture for Waterfall<'_> {
    fn size(&self) -> (f64, f64) {
        let width = MARGIN + LABELS + self.steps.chips.len() as f64 * (COLUMN + MARGIN);
        let height = STEPS_TOP + self.steps.names.len() as f64 * ROW + MARGIN;
        (
            width.max(2.0 * MARGIN + text_width(&self.steps.title, HEAD)),
            height,
        )
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "{}: time after each of the steps {}, one column for each chip",
            self.steps.title,
            self.steps.names.join(", ")
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        canvas.text(
            &self.steps.title,
            (MARGIN, 22.0),
            HEAD,
            Anchor::Start,
            palette.ink,
        )?;
        for (row, name) in self.steps.names.iter().enumerate() {
            let y = STEPS_TOP + row as f64 * ROW;
            let lines = wrap(name, LABELS - 12.0, BODY);
            let first = y + 18.0 - 6.5 * (lines.len().saturating_sub(1)) as f64;
            for (i, line) in lines.iter().enumerate() {
                let at = (MARGIN, first + 13.0 * i as f64);
                canvas.text(line, at, BODY, Anchor::Start, palette.ink)?;
            }
        }
        for (index, chip) in self.steps.chips.iter().enumerate() {
            self.column(canvas, index, chip)?;
        }
        Ok(())
    }
}
