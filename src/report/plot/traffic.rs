//! Bytes of decode steps by what they belong to, read and written: stacked bars.

use std::path::Path;

use plotters::backend::DrawingBackend;

use super::bars::{stage_color, tick_step};
use super::canvas::{self, Anchor, Canvas, Picture, Place, PlotError, Type, text_width};
use super::theme::{Palette, Theme};
use crate::report::format::three_digits;

/// One step.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Name of the step.
    pub name: String,
    /// Bytes, one number for each of the parts of the sheet.
    pub bytes: Vec<f64>,
}

/// Bytes of some steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Sheet {
    /// What is shown.
    pub title: String,
    /// Names of the parts, from the left to the right of a bar.
    pub parts: Vec<String>,
    /// One for each step.
    pub bars: Vec<Bar>,
}

impl Sheet {
    /// The picture as SVG.
    ///
    /// # Errors
    /// Where the drawing library fails.
    pub fn svg(&self, theme: Theme) -> Result<String, PlotError> {
        canvas::svg(&Bars::new(self, theme), Place::File)
    }

    /// Writes the picture as PNG of twice the size.
    ///
    /// # Errors
    /// Where the drawing library or the file system fails.
    pub fn png(&self, theme: Theme, path: &Path) -> Result<(), PlotError> {
        canvas::png(&Bars::new(self, theme), path)
    }
}

const MARGIN: f64 = 14.0;
const TOP: f64 = 66.0;
const BAR: f64 = 16.0;
const STEP: f64 = 22.0;
const WIDTH: f64 = 560.0;
const AXIS: f64 = 46.0;
/// Room for the number behind a bar.
const NUMBER: f64 = 60.0;
const HEAD: Type = Type::bold(12.5);
const BODY: Type = Type::regular(11.5);
const SMALL: Type = Type::regular(10.5);
const MEGABYTE: f64 = 1e6;

struct Bars<'a> {
    sheet: &'a Sheet,
    palette: &'static Palette,
    labels: f64,
    longest: f64,
}

impl<'a> Bars<'a> {
    fn new(sheet: &'a Sheet, theme: Theme) -> Self {
        let labels = sheet.bars.iter().map(|bar| text_width(&bar.name, BODY));
        let totals = sheet.bars.iter().map(|bar| bar.bytes.iter().sum::<f64>());
        Bars {
            sheet,
            palette: theme.palette(),
            labels: labels.fold(0.0, f64::max) + 10.0,
            longest: totals.fold(1.0, f64::max),
        }
    }

    fn x(&self, bytes: f64) -> f64 {
        MARGIN + self.labels + WIDTH * bytes / self.longest
    }
}

impl Picture for Bars<'_> {
    fn size(&self) -> (f64, f64) {
        let legend: f64 = self
            .sheet
            .parts
            .iter()
            .map(|part| 34.0 + text_width(part, BODY))
            .sum();
        let width = (2.0 * MARGIN + self.labels + WIDTH + NUMBER)
            .max(2.0 * MARGIN + legend)
            .max(2.0 * MARGIN + text_width(&self.sheet.title, HEAD));
        (width, TOP + self.sheet.bars.len() as f64 * STEP + AXIS)
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "{}: megabytes of each step by {}",
            self.sheet.title,
            self.sheet.parts.join(", ")
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        canvas.text(
            &self.sheet.title,
            (MARGIN, 22.0),
            HEAD,
            Anchor::Start,
            palette.ink,
        )?;
        let mut x = MARGIN;
        for (part, name) in self.sheet.parts.iter().enumerate() {
            canvas.block((x, 35.0), (x + 12.0, 47.0), stage_color(part))?;
            canvas.text(name, (x + 17.0, 46.0), BODY, Anchor::Start, palette.ink)?;
            x += 34.0 + text_width(name, BODY);
        }
        let bottom = TOP + self.sheet.bars.len() as f64 * STEP;
        let step = tick_step(self.longest / MEGABYTE / 6.0);
        let mut tick = 0.0;
        while tick * MEGABYTE <= self.longest {
            let x = self.x(tick * MEGABYTE);
            canvas.line(&[(x, TOP), (x, bottom)], palette.grid, 0.5)?;
            canvas.text(
                &three_digits(tick),
                (x, bottom + 16.0),
                SMALL,
                Anchor::Middle,
                palette.quiet,
            )?;
            tick += step;
        }
        let middle = (self.x(self.longest / 2.0), bottom + 34.0);
        canvas.text(
            "bytes in device memory (MB)",
            middle,
            BODY,
            Anchor::Middle,
            palette.ink,
        )?;
        for (row, bar) in self.sheet.bars.iter().enumerate() {
            let y = TOP + row as f64 * STEP;
            let label = (MARGIN + self.labels - 8.0, y + 14.0);
            canvas.text(&bar.name, label, BODY, Anchor::End, palette.ink)?;
            let mut from = 0.0;
            for (part, bytes) in bar.bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0.0) {
                let (left, right) = (self.x(from), self.x(from + bytes));
                canvas.block((left, y + 3.0), (right, y + 3.0 + BAR), stage_color(part))?;
                from += bytes;
            }
            let total = format!("{:.1}", from / MEGABYTE);
            canvas.text(
                &total,
                (self.x(from) + 5.0, y + 14.0),
                SMALL,
                Anchor::Start,
                palette.ink,
            )?;
        }
        Ok(())
    }
}
