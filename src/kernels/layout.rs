//! Layout of tensors in tiles of registers.

use crate::hardware::Chip;

/// Elements a tensor occupies in tiles of `sublanes x lanes`: the fewest over all choices of two dimensions for the tile, because the compiler
/// chooses the layout. A vector is stored densely, `lanes` elements to a row.
///
/// Source: padding to `(8, 128)` tiles as the minimum over dimension pairs took the 90th percentile error of measured elementwise kernels from
/// 40 % to 6 %.
#[must_use]
pub fn tiled_elements(chip: &Chip, dims: &[usize]) -> f64 {
    let (lanes, sublanes) = (
        chip.vector_unit.lanes as usize,
        chip.vector_unit.sublanes as usize,
    );
    let padded = |rows: usize, columns: usize| {
        rows.div_ceil(sublanes) as f64 * sublanes as f64 * columns.div_ceil(lanes) as f64 * lanes as f64
    };
    if let [length] = dims {
        return padded(length.div_ceil(lanes), lanes);
    }
    let total: f64 = dims.iter().map(|&d| d as f64).product();
    let mut fewest = f64::INFINITY;
    for (i, &columns) in dims.iter().enumerate() {
        for (j, &rows) in dims.iter().enumerate() {
            if i != j {
                let others = total / (rows as f64 * columns as f64);
                fewest = fewest.min(others * padded(rows, columns));
            }
        }
    }
    if fewest.is_finite() { fewest } else { padded(1, 1) }
}
