//! Colours and signs that tell the members of a series apart.

use plotters::backend::DrawingBackend;
use plotters::style::RGBColor;

use super::canvas::{Canvas, PlotError};
use super::theme::STAGES;

/// Colour of member `index`.
pub(crate) fn color(index: usize) -> RGBColor {
    // Neighbours in this order differ in lightness as well as in hue.
    let order = [0, 2, 3, 1, 6, 8, 4, 7, 5];
    STAGES
        .get(order[index % order.len()])
        .copied()
        .unwrap_or(RGBColor(120, 120, 130))
}

/// A sign for member `index`: shape and colour, so that either is enough.
pub(crate) fn sign<B: DrawingBackend>(
    canvas: &Canvas<B>,
    index: usize,
    (x, y): (f64, f64),
) -> Result<(), PlotError> {
    let color = color(index);
    match index % 5 {
        0 => canvas.disc((x, y), 4.5, color),
        1 => canvas.block((x - 4.0, y - 4.0), (x + 4.0, y + 4.0), color),
        2 => canvas.polygon(&[(x - 5.0, y + 4.0), (x + 5.0, y + 4.0), (x, y - 5.0)], color),
        3 => canvas.polygon(&[(x - 5.5, y), (x, y - 5.5), (x + 5.5, y), (x, y + 5.5)], color),
        _ => canvas.polygon(&[(x - 5.0, y - 4.0), (x + 5.0, y - 4.0), (x, y + 5.0)], color),
    }
}
