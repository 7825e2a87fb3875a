//! The solvers of second-order linear attention: time of the layer on each chip, definiteness and error beside it.

use std::path::Path;

use plotters::backend::DrawingBackend;

use super::axis::ticks;
use super::canvas::{self, Anchor, Canvas, Picture, Place, PlotError, Type, text_width};
use super::marks;
use super::theme::{Palette, Theme};
use crate::report::whitening::{WhiteningRow, WhiteningTable};

/// The picture as SVG.
///
/// # Errors
/// Where the drawing library fails.
pub fn svg(table: &WhiteningTable, theme: Theme) -> Result<String, PlotError> {
    canvas::svg(&Dots::new(table, theme), Place::File)
}

/// Writes the picture as PNG of twice the size.
///
/// # Errors
/// Where the drawing library or the file system fails.
pub fn png(table: &WhiteningTable, theme: Theme, path: &Path) -> Result<(), PlotError> {
    canvas::png(&Dots::new(table, theme), path)
}

const WIDTH: f64 = 900.0;
const MARGIN: f64 = 14.0;
const ROW: f64 = 34.0;
const HEAD_HEIGHT: f64 = 64.0;
const AXIS: f64 = 48.0;
/// Right edges of the columns of numbers, counted from the right margin.
const COLUMNS: [(&str, f64); 4] = [
    ("definite", 246.0),
    ("min. eig.", 172.0),
    ("error f32", 86.0),
    ("error bf16", 0.0),
];
/// Room of all columns.
const NUMBERS: f64 = 334.0;

const HEAD: Type = Type::bold(12.5);
const BODY: Type = Type::regular(11.5);
const SMALL: Type = Type::regular(10.5);

struct Dots<'a> {
    table: &'a WhiteningTable,
    palette: &'static Palette,
    chips: Vec<&'a str>,
    left: f64,
    /// Ends of the time axis, in microseconds.
    range: (f64, f64),
}

impl<'a> Dots<'a> {
    fn new(table: &'a WhiteningTable, theme: Theme) -> Self {
        let mut chips: Vec<&str> = Vec::new();
        let times = || table.rows.iter().flat_map(|row| &row.times);
        for time in times() {
            if !chips.contains(&time.chip.as_str()) {
                chips.push(&time.chip);
            }
        }
        let usable = || {
            times()
                .map(|t| t.total_us)
                .filter(|us| us.is_finite() && *us > 0.0)
        };
        let low = usable().fold(f64::INFINITY, f64::min);
        let high = usable().fold(0.0, f64::max);
        let range = if low <= high {
            (low / 1.25, high * 1.25)
        } else {
            (1.0, 10.0)
        };
        let labels = table.rows.iter().flat_map(|row| {
            [
                text_width(&row.title, Type::bold(BODY.em)),
                text_width(&row.operations, SMALL),
            ]
        });
        Self {
            table,
            palette: theme.palette(),
            chips,
            left: MARGIN + labels.fold(0.0, f64::max) + 14.0,
            range,
        }
    }

    fn right() -> f64 {
        WIDTH - MARGIN - NUMBERS
    }

    fn x(&self, us: f64) -> f64 {
        let (low, high) = self.range;
        self.left + (Self::right() - self.left) * (us / low).ln() / (high / low).ln()
    }

    fn numbers<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        row: &WhiteningRow,
        y: f64,
    ) -> Result<(), PlotError> {
        let palette = self.palette;
        let (word, color) = match row.definite {
            Some(true) => ("SPD", palette.vpu),
            Some(false) => ("indefinite", palette.mxu),
            None => ("–", palette.quiet),
        };
        let smallest = [row.smallest_eigenvalue, row.smallest_eigenvalue_wide]
            .into_iter()
            .flatten()
            .reduce(f64::min);
        let cells = [
            word.to_owned(),
            short(smallest),
            short(row.residual_f32),
            short(row.residual_bf16),
        ];
        for ((text, (_, from_right)), column) in cells.iter().zip(COLUMNS).zip(0..) {
            let ink = if column == 0 { color } else { palette.ink };
            let kind = if column == 0 { Type::bold(BODY.em) } else { BODY };
            canvas.text(
                text,
                (WIDTH - MARGIN - from_right, y + 4.0),
                kind,
                Anchor::End,
                ink,
            )?;
        }
        Ok(())
    }
}

/// Two digits.
fn short(value: Option<f64>) -> String {
    match value {
        None => "–".to_owned(),
        Some(x) if (0.1..1000.0).contains(&x.abs()) => format!("{x:.2}"),
        Some(x) => format!("{x:.1e}"),
    }
}

impl Picture for Dots<'_> {
    fn size(&self) -> (f64, f64) {
        (WIDTH, HEAD_HEIGHT + ROW * self.table.rows.len() as f64 + AXIS)
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "Forward time of the layer with each of {} solvers, {} plan, with definiteness and error of the solver",
            self.table.rows.len(),
            self.table.plan
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        let bottom = HEAD_HEIGHT + ROW * self.table.rows.len() as f64;
        let title = format!(
            "Second-order solvers: forward time of one layer, {} plan, key width {}, chunk {}",
            self.table.plan, self.table.key_dim, self.table.chunk
        );
        canvas.text(&title, (MARGIN, 22.0), HEAD, Anchor::Start, palette.ink)?;
        let mut x = MARGIN + 5.0;
        for (index, chip) in self.chips.iter().enumerate() {
            marks::sign(canvas, index, (x, 42.0))?;
            canvas.text(chip, (x + 10.0, 46.0), BODY, Anchor::Start, palette.ink)?;
            x += 30.0 + text_width(chip, BODY);
        }
        for (name, from_right) in COLUMNS {
            canvas.text(
                name,
                (WIDTH - MARGIN - from_right, 46.0),
                SMALL,
                Anchor::End,
                palette.quiet,
            )?;
        }
        for us in ticks(self.range.0, self.range.1) {
            let x = self.x(us);
            canvas.line(&[(x, HEAD_HEIGHT), (x, bottom)], palette.grid, 0.5)?;
            canvas.line(&[(x, bottom), (x, bottom + 4.0)], palette.axis, 1.0)?;
            let text = if us < 1000.0 {
                format!("{us} µs")
            } else {
                format!("{} ms", us / 1000.0)
            };
            canvas.text(&text, (x, bottom + 17.0), SMALL, Anchor::Middle, palette.quiet)?;
        }
        canvas.line(&[(self.left, bottom), (Self::right(), bottom)], palette.axis, 1.0)?;
        let middle = f64::midpoint(self.left, Self::right());
        canvas.text(
            "time of the layer (logarithmic)",
            (middle, bottom + 36.0),
            BODY,
            Anchor::Middle,
            palette.ink,
        )?;
        for (number, row) in self.table.rows.iter().enumerate() {
            let y = HEAD_HEIGHT + ROW * (number as f64 + 0.5);
            let name = Type::bold(BODY.em);
            canvas.text(&row.title, (MARGIN, y - 1.0), name, Anchor::Start, palette.ink)?;
            canvas.text(
                &row.operations,
                (MARGIN, y + 12.0),
                SMALL,
                Anchor::Start,
                palette.quiet,
            )?;
            canvas.line(&[(self.left, y), (Self::right(), y)], palette.grid, 0.5)?;
            // The first chip is on top where signs meet.
            for time in row
                .times
                .iter()
                .rev()
                .filter(|t| t.total_us.is_finite() && t.total_us > 0.0)
            {
                let index = self.chips.iter().position(|chip| *chip == time.chip).unwrap_or(0);
                marks::sign(canvas, index, (self.x(time.total_us), y))?;
            }
            self.numbers(canvas, row, y)?;
        }
        Ok(())
    }
}
