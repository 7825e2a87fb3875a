//! Signs that tell the members of a series apart.

use plotters::backend::DrawingBackend;

use super::canvas::{Canvas, PlotError};
use super::theme::series_color;

/// A sign for member `index`: shape and colour, so that either is enough.
pub(crate) fn sign<B: DrawingBackend>(
    canvas: &Canvas<B>,
    index: usize,
    (x, y): (f64, f64),
) -> Result<(), PlotError> {
    let color = series_color(index);
    match index % 5 {
        0 => canvas.disc((x, y), 4.5, color),
        1 => canvas.block((x - 4.0, y - 4.0), (x + 4.0, y + 4.0), color),
        2 => canvas.polygon(&[(x - 5.0, y + 4.0), (x + 5.0, y + 4.0), (x, y - 5.0)], color),
        3 => canvas.polygon(&[(x - 5.5, y), (x, y - 5.5), (x + 5.5, y), (x, y + 5.5)], color),
        _ => canvas.polygon(&[(x - 5.0, y - 4.0), (x + 5.0, y - 4.0), (x, y + 5.0)], color),
    }
}
