//! The numeric probes: recall errors of every mechanism under every condition, states in f32, bf16 and FP8 with a scale per row side by side.

use std::path::Path;

use plotters::backend::DrawingBackend;
use plotters::style::RGBColor;

use super::canvas::{self, Anchor, Canvas, Picture, Place, PlotError, Type, text_width};
use super::theme::{Palette, Theme};
use crate::report::probe::{ProbeRow, ProbeTable};

/// The picture as SVG.
///
/// # Errors
/// Where the drawing library fails.
pub fn svg(table: &ProbeTable, theme: Theme) -> Result<String, PlotError> {
    canvas::svg(&Dots::new(table, theme), Place::File)
}

/// Writes the picture as PNG of twice the size.
///
/// # Errors
/// Where the drawing library or the file system fails.
pub fn png(table: &ProbeTable, theme: Theme, path: &Path) -> Result<(), PlotError> {
    canvas::png(&Dots::new(table, theme), path)
}

const WIDTH: f64 = 900.0;
const MARGIN: f64 = 14.0;
const ROW: f64 = 17.0;
const GAP: f64 = 26.0;
const TOP: f64 = 64.0;
/// Decades of the axis; smaller errors stand on its left end.
const DECADES: (i32, i32) = (-8, 1);

const HEAD: Type = Type::bold(12.5);
const BODY: Type = Type::regular(11.0);
const SMALL: Type = Type::regular(10.0);

/// Formats of the state in the order of the legend.
const STATES: [&str; 3] = ["f32", "bf16", "row_fp8"];

fn state_color(palette: &Palette, state: &str) -> RGBColor {
    match state {
        "f32" => palette.hbm,
        "row_fp8" => palette.vpu,
        _ => palette.mxu,
    }
}

/// One line of the picture: a mechanism under a condition.
struct Line<'a> {
    probe: &'a str,
    condition: &'a str,
    mechanism: &'a str,
    values: Vec<(&'a str, f64)>,
    y: f64,
}

struct Dots<'a> {
    table: &'a ProbeTable,
    palette: &'static Palette,
    lines: Vec<Line<'a>>,
    left: f64,
    bottom: f64,
}

impl<'a> Dots<'a> {
    fn new(table: &'a ProbeTable, theme: Theme) -> Self {
        let mut lines: Vec<Line<'a>> = Vec::new();
        let mut y = TOP;
        let errors = |row: &&'a ProbeRow| row.measure.ends_with("error") && row.probe != "inverses";
        for row in table.rows.iter().filter(errors) {
            let new_group = lines
                .last()
                .is_none_or(|l| l.probe != row.probe || l.condition != row.condition);
            if new_group {
                y += GAP;
            }
            match lines.last_mut() {
                Some(last) if !new_group && last.mechanism == row.mechanism => {
                    last.values.push((row.state, row.value));
                }
                _ => {
                    y += ROW;
                    let values = vec![(row.state, row.value)];
                    lines.push(Line {
                        probe: row.probe,
                        condition: &row.condition,
                        mechanism: row.mechanism,
                        values,
                        y,
                    });
                }
            }
        }
        let widest = lines
            .iter()
            .map(|l| text_width(l.mechanism, BODY))
            .fold(0.0, f64::max);
        Dots {
            table,
            palette: theme.palette(),
            lines,
            left: MARGIN + widest + 16.0,
            bottom: y + 14.0,
        }
    }

    fn x(&self, value: f64) -> f64 {
        let (low, high) = (f64::from(DECADES.0), f64::from(DECADES.1));
        let at = value.max(1e-300).log10().clamp(low, high);
        self.left + (WIDTH - MARGIN - self.left) * (at - low) / (high - low)
    }
}

impl Picture for Dots<'_> {
    fn size(&self) -> (f64, f64) {
        (WIDTH, self.bottom + 48.0)
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "Recall errors of {} mechanisms and conditions, states in f32, bf16 and row_fp8",
            self.lines.len()
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        let title = format!("Numeric probes of the state, seed {}", self.table.seed);
        canvas.text(&title, (MARGIN, 22.0), HEAD, Anchor::Start, palette.ink)?;
        for (i, (name, color)) in STATES
            .map(|state| (format!("{state} state"), state_color(palette, state)))
            .into_iter()
            .enumerate()
        {
            let x = MARGIN + 5.0 + 90.0 * i as f64;
            canvas.disc((x, 42.0), 4.0, color)?;
            canvas.text(&name, (x + 9.0, 46.0), BODY, Anchor::Start, palette.ink)?;
        }
        for decade in DECADES.0..=DECADES.1 {
            let x = self.x(10_f64.powi(decade));
            canvas.line(&[(x, TOP), (x, self.bottom)], palette.grid, 0.5)?;
            let text = if decade == DECADES.0 {
                format!("≤ 1e{decade}")
            } else {
                format!("1e{decade}")
            };
            let anchor = if decade == DECADES.1 {
                Anchor::End
            } else {
                Anchor::Middle
            };
            canvas.text(&text, (x, self.bottom + 16.0), SMALL, anchor, palette.quiet)?;
        }
        let middle = f64::midpoint(self.left, WIDTH - MARGIN);
        canvas.text(
            "relative error of what is recalled, or of the state (logarithmic)",
            (middle, self.bottom + 36.0),
            BODY,
            Anchor::Middle,
            palette.ink,
        )?;
        let mut group = ("", "");
        for line in &self.lines {
            if group != (line.probe, line.condition) {
                group = (line.probe, line.condition);
                let text = format!("{}: {}", line.probe.replace('_', " "), line.condition);
                canvas.text(
                    &text,
                    (MARGIN, line.y - ROW + 1.0),
                    Type::bold(11.0),
                    Anchor::Start,
                    palette.ink,
                )?;
            }
            canvas.text(
                line.mechanism,
                (self.left - 10.0, line.y + 4.0),
                BODY,
                Anchor::End,
                palette.ink,
            )?;
            let xs: Vec<f64> = line.values.iter().map(|(_, value)| self.x(*value)).collect();
            if let (Some(&first), Some(&last)) = (xs.first(), xs.last()) {
                canvas.line(&[(first, line.y), (last, line.y)], palette.axis, 1.0)?;
            }
            for ((state, _), x) in line.values.iter().zip(xs).rev() {
                let color = state_color(palette, state);
                canvas.disc((x, line.y), 4.0, color)?;
            }
        }
        Ok(())
    }
}
