//! Formats of the stored state: errors over the tokens decoded, and over the memory of the heads.

use std::path::Path;

use plotters::backend::DrawingBackend;

use super::axis::ticks;
use super::canvas::{self, Anchor, Canvas, Picture, Place, PlotError, Type};
use super::marks;
use super::theme::{Palette, Theme, series_color};
use crate::report::state_formats::{FormatRow, HeadRow, StateFormatTable};

/// The picture as SVG.
///
/// # Errors
/// Where the drawing library fails.
pub fn svg(table: &StateFormatTable, theme: Theme) -> Result<String, PlotError> {
    canvas::svg(&Panels::new(table, theme), Place::File)
}

/// Writes the picture as PNG of twice the size.
///
/// # Errors
/// Where the drawing library or the file system fails.
pub fn png(table: &StateFormatTable, theme: Theme, path: &Path) -> Result<(), PlotError> {
    canvas::png(&Panels::new(table, theme), path)
}

const PANEL: f64 = 330.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 66.0;
const GAP: f64 = 84.0;
const TOP: f64 = 52.0;
const LEGEND: f64 = 18.0;

const HEAD: Type = Type::bold(12.5);
const BODY: Type = Type::regular(11.5);
const SMALL: Type = Type::regular(10.5);

/// A logarithmic axis over `low` to `high`, drawn from `from` to `to`.
#[derive(Clone, Copy)]
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// With a little room around the numbers above zero among `values`; one decade where there are none.
    fn around(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let usable: Vec<f64> = values.filter(|v| v.is_finite() && *v > 0.0).collect();
        let (low, high) = (
            usable.iter().copied().fold(f64::INFINITY, f64::min),
            usable.iter().copied().fold(0.0, f64::max),
        );
        let (low, high) = if low <= high {
            (low / 1.5, high * 1.5)
        } else {
            (1.0, 10.0)
        };
        Axis { low, high, from, to }
    }

    fn at(self, value: f64) -> f64 {
        let share = (value.clamp(self.low, self.high) / self.low).ln() / (self.high / self.low).ln();
        self.from + (self.to - self.from) * share
    }

    /// Powers of ten where there are many decades.
    fn ticks(self) -> Vec<f64> {
        let all = ticks(self.low, self.high);
        if all.len() <= 8 {
            return all;
        }
        all.into_iter()
            .filter(|tick| (tick.log10() - tick.log10().round()).abs() < 1e-9)
            .collect()
    }
}

struct Panels<'a> {
    table: &'a StateFormatTable,
    palette: &'static Palette,
    tokens: Axis,
    memory: Axis,
    error: Axis,
}

impl<'a> Panels<'a> {
    fn new(table: &'a StateFormatTable, theme: Theme) -> Self {
        let heads = || table.head_errors.iter();
        let errors = table
            .rows
            .iter()
            .flat_map(|row| row.errors.iter().copied())
            .chain(heads().flat_map(|head| [head.f32, head.bf16, head.row_fp8]))
            .chain([table.activation_error]);
        let second = LEFT + PANEL + GAP;
        Panels {
            table,
            palette: theme.palette(),
            tokens: Axis::around(table.spans.iter().map(|&end| end as f64), LEFT, LEFT + PANEL),
            memory: Axis::around(heads().map(|head| head.memory_tokens), second, second + PANEL),
            error: Axis::around(errors, TOP + HEIGHT, TOP),
        }
    }

    fn frame<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        x: Axis,
        title: &str,
        unit: &str,
    ) -> Result<(), PlotError> {
        let (palette, y) = (self.palette, self.error);
        canvas.text(title, (x.from, TOP - 12.0), HEAD, Anchor::Start, palette.ink)?;
        for tick in y.ticks() {
            let at = y.at(tick);
            canvas.line(&[(x.from, at), (x.to, at)], palette.grid, 0.5)?;
            canvas.text(
                &format!("{tick:.0e}"),
                (x.from - 7.0, at + 4.0),
                SMALL,
                Anchor::End,
                palette.quiet,
            )?;
        }
        for tick in x.ticks() {
            let at = x.at(tick);
            canvas.line(&[(at, y.from), (at, y.to)], palette.grid, 0.5)?;
            canvas.text(
                &tick.to_string(),
                (at, y.from + 17.0),
                SMALL,
                Anchor::Middle,
                palette.quiet,
            )?;
        }
        canvas.line(
            &[(x.from, y.to), (x.from, y.from), (x.to, y.from)],
            palette.axis,
            1.0,
        )?;
        let middle = f64::midpoint(x.from, x.to);
        canvas.text(unit, (middle, y.from + 36.0), BODY, Anchor::Middle, palette.ink)
    }
}

/// What a legend calls a row.
fn words(row: &FormatRow) -> String {
    if row.long_memory == row.short_memory {
        row.long_memory.to_owned()
    } else {
        format!(
            "{} in heads of long memory, {} in the others",
            row.long_memory, row.short_memory
        )
    }
}

impl Picture for Panels<'_> {
    fn size(&self) -> (f64, f64) {
        let legend = LEGEND * self.table.rows.len() as f64;
        (
            LEFT + 2.0 * PANEL + GAP + 24.0,
            TOP + HEIGHT + 56.0 + legend + 8.0,
        )
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "Error of the output of a decode step with {} formats of the stored state, over {} tokens and over the memory of {} heads",
            self.table.rows.len(),
            self.table.tokens,
            self.table.head_errors.len()
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        self.frame(
            canvas,
            self.tokens,
            "RMS error of the output, relative",
            "tokens decoded",
        )?;
        if !self.table.head_errors.is_empty() {
            self.frame(
                canvas,
                self.memory,
                "head by head, last tokens",
                "memory of the head (tokens)",
            )?;
        }
        let (x, floor) = (self.tokens, self.error.at(self.table.activation_error));
        canvas.dashed((x.from, floor), (x.to, floor), palette.quiet, 1.2)?;
        canvas.text(
            "rounding the activations",
            (x.to, floor + 14.0),
            SMALL,
            Anchor::End,
            palette.quiet,
        )?;
        let bottom = TOP + HEIGHT + 62.0;
        for (index, row) in self.table.rows.iter().enumerate() {
            let points: Vec<(f64, f64)> = self
                .table
                .spans
                .iter()
                .zip(&row.errors)
                .map(|(&end, &error)| (self.tokens.at(end as f64), self.error.at(error)))
                .collect();
            canvas.line(&points, series_color(index), 1.2)?;
            for &point in &points {
                marks::sign(canvas, index, point)?;
            }
            let of: Option<fn(&HeadRow) -> f64> = match (row.long_memory, row.short_memory) {
                ("f32", "f32") => Some(|head| head.f32),
                ("bf16", "bf16") => Some(|head| head.bf16),
                ("row_fp8", "row_fp8") => Some(|head| head.row_fp8),
                _ => None,
            };
            for (head, error) in self
                .table
                .head_errors
                .iter()
                .filter_map(|head| Some((head, of?(head))))
            {
                marks::sign(
                    canvas,
                    index,
                    (self.memory.at(head.memory_tokens), self.error.at(error)),
                )?;
            }
            let y = bottom + LEGEND * index as f64;
            marks::sign(canvas, index, (LEFT + 6.0, y - 4.0))?;
            canvas.text(&words(row), (LEFT + 20.0, y), BODY, Anchor::Start, palette.ink)?;
        }
        Ok(())
    }
}
