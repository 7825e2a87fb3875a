//! Predicted against measured times, on logarithmic axes, one colour and sign per device.

use std::path::Path;

use plotters::backend::DrawingBackend;

use super::canvas::{self, Anchor, Canvas, Picture, Place, PlotError, Type, text_width};
use super::theme::{Palette, Theme, series_color};

/// A case: its device, measured and predicted time.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Device.
    pub device: String,
    /// Measured time, in microseconds.
    pub measured_us: f64,
    /// Predicted time, in microseconds.
    pub predicted_us: f64,
}

/// The picture as SVG; `title` says what was predicted without which rows.
///
/// # Errors
/// Where the drawing library fails.
pub fn svg(title: &str, points: &[Point], theme: Theme) -> Result<String, PlotError> {
    canvas::svg(&Scatter::new(title, points, theme), Place::File)
}

/// Writes the picture as PNG of twice the size.
///
/// # Errors
/// Where the drawing library or the file system fails.
pub fn png(title: &str, points: &[Point], theme: Theme, path: &Path) -> Result<(), PlotError> {
    canvas::png(&Scatter::new(title, points, theme), path)
}

const SIDE: f64 = 460.0;
const LEFT: f64 = 76.0;
const TOP: f64 = 66.0;
const RIGHT: f64 = 150.0;
const BOTTOM: f64 = 58.0;
/// Half width of the band around the diagonal.
const BAND: f64 = 0.2;

const HEAD: Type = Type::bold(12.5);
const BODY: Type = Type::regular(11.5);
const SMALL: Type = Type::regular(10.5);

struct Scatter<'a> {
    title: &'a str,
    points: Vec<&'a Point>,
    devices: Vec<&'a str>,
    palette: &'static Palette,
    /// Ends of both axes, in microseconds: powers of ten.
    range: (i32, i32),
}

impl<'a> Scatter<'a> {
    fn new(title: &'a str, points: &'a [Point], theme: Theme) -> Self {
        let usable = |us: f64| us.is_finite() && us > 0.0;
        let points: Vec<&Point> = points
            .iter()
            .filter(|p| usable(p.measured_us) && usable(p.predicted_us))
            .collect();
        let mut devices: Vec<&str> = points.iter().map(|p| p.device.as_str()).collect();
        devices.sort_unstable();
        devices.dedup();
        let both = || points.iter().flat_map(|p| [p.measured_us, p.predicted_us]);
        let low = both().fold(f64::INFINITY, f64::min);
        let high = both().fold(0.0, f64::max);
        let range = if low <= high {
            let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
            (first, last.max(first + 1))
        } else {
            (0, 1)
        };
        Scatter {
            title,
            points,
            devices,
            palette: theme.palette(),
            range,
        }
    }

    fn along(&self, us: f64) -> f64 {
        let (low, high) = self.range;
        (us.log10() - f64::from(low)) / f64::from(high - low)
    }

    fn x(&self, us: f64) -> f64 {
        LEFT + SIDE * self.along(us)
    }

    fn y(&self, us: f64) -> f64 {
        TOP + SIDE * (1.0 - self.along(us))
    }

    /// The line `predicted = factor * measured` inside the axes.
    fn ratio<B: DrawingBackend>(&self, canvas: &Canvas<B>, factor: f64, width: f64) -> Result<(), PlotError> {
        let (low, high) = (10_f64.powi(self.range.0), 10_f64.powi(self.range.1));
        let from = low.max(low / factor);
        let to = high.min(high / factor);
        let line = [
            (self.x(from), self.y(from * factor)),
            (self.x(to), self.y(to * factor)),
        ];
        canvas.line(&line, self.palette.axis, width)
    }
}

/// A power of ten of microseconds in the unit a person would take.
fn tick(power: i32) -> String {
    match power {
        ..3 => format!("{} µs", 10_f64.powi(power)),
        3..6 => format!("{} ms", 10_f64.powi(power - 3)),
        _ => format!("{} s", 10_f64.powi(power - 6)),
    }
}

impl Picture for Scatter<'_> {
    fn size(&self) -> (f64, f64) {
        (LEFT + SIDE + RIGHT, TOP + SIDE + BOTTOM)
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "{}: predicted against measured time of {} cases, with the diagonal and a band of 20 % around it",
            self.title,
            self.points.len()
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        canvas.text(self.title, (14.0, 22.0), HEAD, Anchor::Start, palette.ink)?;
        let subtitle = format!("{} cases; diagonal and ±{:.0} %", self.points.len(), 100.0 * BAND);
        canvas.text(&subtitle, (14.0, 42.0), SMALL, Anchor::Start, palette.quiet)?;
        let (right, bottom) = (LEFT + SIDE, TOP + SIDE);
        for power in self.range.0..=self.range.1 {
            let us = 10_f64.powi(power);
            let (x, y) = (self.x(us), self.y(us));
            canvas.line(&[(x, TOP), (x, bottom)], palette.grid, 0.5)?;
            canvas.line(&[(LEFT, y), (right, y)], palette.grid, 0.5)?;
            let text = tick(power);
            canvas.text(&text, (x, bottom + 17.0), SMALL, Anchor::Middle, palette.quiet)?;
            canvas.text(&text, (LEFT - 8.0, y + 4.0), SMALL, Anchor::End, palette.quiet)?;
        }
        canvas.line(&[(LEFT, TOP), (LEFT, bottom), (right, bottom)], palette.axis, 1.0)?;
        canvas.text(
            "measured time",
            (f64::midpoint(LEFT, right), bottom + 42.0),
            BODY,
            Anchor::Middle,
            palette.ink,
        )?;
        canvas.upward_text(
            "predicted time",
            (16.0, f64::midpoint(TOP, bottom)),
            BODY,
            Anchor::Middle,
            palette.ink,
        )?;
        for point in &self.points {
            let index = self
                .devices
                .iter()
                .position(|device| *device == point.device)
                .unwrap_or(0);
            let center = (self.x(point.measured_us), self.y(point.predicted_us));
            canvas.disc(center, 1.6, series_color(index))?;
        }
        self.ratio(canvas, 1.0, 1.2)?;
        self.ratio(canvas, 1.0 + BAND, 0.6)?;
        self.ratio(canvas, 1.0 - BAND, 0.6)?;
        for (index, device) in self.devices.iter().enumerate() {
            let y = TOP + 12.0 + 20.0 * index as f64;
            canvas.disc((right + 22.0, y - 4.0), 4.5, series_color(index))?;
            canvas.text(device, (right + 34.0, y), BODY, Anchor::Start, palette.ink)?;
            debug_assert!(text_width(device, BODY) < RIGHT);
        }
        Ok(())
    }
}
