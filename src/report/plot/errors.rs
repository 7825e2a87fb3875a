//! Errors of families of kernels on devices: a mark at the median, a line up to the error that a tenth of the rows exceed.

use std::path::Path;

use plotters::backend::DrawingBackend;

use super::canvas::{self, Anchor, Canvas, Picture, Place, PlotError, Type, text_width};
use super::theme::{Palette, Theme, series_color};

/// Errors of a family on a device, in percent.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorMark {
    /// Family.
    pub family: String,
    /// Device.
    pub device: String,
    /// Median absolute error.
    pub median: f64,
    /// Absolute error that a tenth of the rows exceed.
    pub p90: f64,
}

/// The picture as SVG; `title` says which rows the fits had not seen.
///
/// # Errors
/// Where the drawing library fails.
pub fn svg(title: &str, marks: &[ErrorMark], theme: Theme) -> Result<String, PlotError> {
    canvas::svg(&Errors::new(title, marks, theme), Place::File)
}

/// Writes the picture as PNG of twice the size.
///
/// # Errors
/// Where the drawing library or the file system fails.
pub fn png(title: &str, marks: &[ErrorMark], theme: Theme, path: &Path) -> Result<(), PlotError> {
    canvas::png(&Errors::new(title, marks, theme), path)
}

const WIDTH: f64 = 440.0;
const TOP: f64 = 66.0;
const RIGHT: f64 = 140.0;
const BOTTOM: f64 = 52.0;
/// Distance of two devices of a family.
const STEP: f64 = 11.0;
/// Additional distance of two families.
const GAP: f64 = 9.0;
/// Ends of the axis, in percent; errors outside stand at the end.
const RANGE: (f64, f64) = (1.0, 200.0);
const TICKS: [f64; 8] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0];

const HEAD: Type = Type::bold(12.5);
const BODY: Type = Type::regular(11.5);
const SMALL: Type = Type::regular(10.5);

struct Errors<'a> {
    title: &'a str,
    /// Families in the order of their names, each with its marks.
    families: Vec<(&'a str, Vec<&'a ErrorMark>)>,
    devices: Vec<&'a str>,
    palette: &'static Palette,
    left: f64,
}

impl<'a> Errors<'a> {
    fn new(title: &'a str, marks: &'a [ErrorMark], theme: Theme) -> Self {
        let mut devices: Vec<&str> = marks.iter().map(|m| m.device.as_str()).collect();
        devices.sort_unstable();
        devices.dedup();
        let mut families: Vec<(&str, Vec<&ErrorMark>)> = Vec::new();
        for mark in marks {
            match families.iter_mut().find(|(family, _)| *family == mark.family) {
                Some((_, of)) => of.push(mark),
                None => families.push((&mark.family, vec![mark])),
            }
        }
        families.sort_by_key(|(family, _)| *family);
        let widest = families
            .iter()
            .map(|(family, _)| text_width(family, BODY))
            .fold(0.0, f64::max);
        Errors {
            title,
            families,
            devices,
            palette: theme.palette(),
            left: widest + 26.0,
        }
    }

    fn height(&self) -> f64 {
        let rows: usize = self.families.iter().map(|(_, marks)| marks.len()).sum();
        STEP * rows as f64 + GAP * self.families.len() as f64
    }

    fn x(&self, percent: f64) -> f64 {
        let (low, high) = RANGE;
        let share = (percent.clamp(low, high) / low).ln() / (high / low).ln();
        self.left + WIDTH * share
    }
}

impl Picture for Errors<'_> {
    fn size(&self) -> (f64, f64) {
        let key = TOP + 20.0 * self.devices.len() as f64;
        (self.left + WIDTH + RIGHT, (TOP + self.height()).max(key) + BOTTOM)
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "{}: median and ninetieth percentile of the absolute error of {} families of kernels on {} devices",
            self.title,
            self.families.len(),
            self.devices.len()
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        canvas.text(self.title, (14.0, 22.0), HEAD, Anchor::Start, palette.ink)?;
        canvas.text(
            "mark: median; line: up to the error that a tenth of the rows exceed",
            (14.0, 42.0),
            SMALL,
            Anchor::Start,
            palette.quiet,
        )?;
        let (right, bottom) = (self.left + WIDTH, TOP + self.height());
        for tick in TICKS {
            let x = self.x(tick);
            canvas.line(&[(x, TOP), (x, bottom)], palette.grid, 0.5)?;
            let text = format!("{tick} %");
            canvas.text(&text, (x, bottom + 17.0), SMALL, Anchor::Middle, palette.quiet)?;
        }
        let mut y = TOP;
        for (family, marks) in &self.families {
            canvas.line(&[(self.left, y), (right, y)], palette.grid, 0.5)?;
            let height = STEP * marks.len() as f64 + GAP;
            let middle = y + height / 2.0 + 4.0;
            canvas.text(family, (self.left - 10.0, middle), BODY, Anchor::End, palette.ink)?;
            for (i, mark) in marks.iter().enumerate() {
                let at = y + GAP / 2.0 + STEP * (i as f64 + 0.5);
                let index = self.devices.iter().position(|device| *device == mark.device);
                let color = series_color(index.unwrap_or(0));
                canvas.line(&[(self.x(mark.median), at), (self.x(mark.p90), at)], color, 1.2)?;
                canvas.disc((self.x(mark.median), at), 3.4, color)?;
            }
            y += height;
        }
        canvas.line(
            &[(self.left, TOP), (self.left, bottom), (right, bottom)],
            palette.axis,
            1.0,
        )?;
        canvas.text(
            "absolute error of the predicted time",
            (f64::midpoint(self.left, right), bottom + 38.0),
            BODY,
            Anchor::Middle,
            palette.ink,
        )?;
        for (index, device) in self.devices.iter().enumerate() {
            let y = TOP + 12.0 + 20.0 * index as f64;
            canvas.disc((right + 22.0, y - 4.0), 4.5, series_color(index))?;
            canvas.text(device, (right + 34.0, y), BODY, Anchor::Start, palette.ink)?;
        }
        Ok(())
    }
}
