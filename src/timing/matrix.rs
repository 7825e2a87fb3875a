//! Matrix unit: weight-stationary arrays.
//!
//! A product `[m, k] x [k, n]` is cut into stationary tiles of at most `rows x columns`; each tile is streamed by the `m` rows. Three costs stand apart:
//! the stream, the load of the stationary tile (hidden behind the stream of the tile before, or exposed), and fill and drain of the array.

use super::unit::{Instance, Occupancy, Unit};
use crate::coefficients::Coefficient;
use crate::dtype::Dtype;
use crate::graph::work::PerDtype;
use crate::hardware::{Architecture, Chip};
use crate::kernels::OpKind;

/// Rows of a tensor-core instruction below which its columns are not fed any faster, as a share of the side of the array: of 16, at least 4.
const GPU_STREAM_FLOOR: f64 = 0.25;
/// Depth that the wide arrays take in halves of. Source: schedules of the TPU compiler, `m ceil(k/128) ceil(n/256) / 4` cycles per array.
const HALF_PASS_DEPTH: f64 = 128.0;

/// Whether the load of a stationary tile waits for the stream before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLoad {
    /// Loaded while the tile before streams; a floor of the side of the array remains.
    Hidden,
    /// Loaded after the tile before has drained.
    Exposed,
}

/// The matrix unit of a core.
pub struct MatrixUnit;

/// Stationary tiles of a product, a tile of at most half the depth of a wide array counted as half.
#[must_use]
pub fn tiles(chip: &Chip, k: u64, n: u64) -> f64 {
    let unit = &chip.matrix_unit;
    let depth = f64::from(unit.rows);
    let deep = if depth > HALF_PASS_DEPTH {
        (k as f64 / HALF_PASS_DEPTH).ceil() * HALF_PASS_DEPTH / depth
    } else {
        (k as f64 / depth).ceil()
    };
    deep * (n as f64 / f64::from(unit.columns)).ceil()
}

/// Rows streamed per cycle for a format, and the passes it takes: formats without a native rate run as `passes` bf16 passes.
fn rate(chip: &Chip, dtype: Dtype, passes: u32) -> (f64, f64) {
    match chip.rows_per_cycle(dtype) {
        Some(rate) => (rate, 1.0),
        // Every shipped chip has a bf16 rate; a chip without one streams a row per cycle.
        None => (chip.rows_per_cycle(Dtype::Bf16).unwrap_or(1.0), f64::from(passes)),
    }
}

/// Passes over an array that a product takes: those asked for where its format has no native rate, else one.
#[must_use]
pub fn passes(chip: &Chip, dtype: Dtype, passes: u32) -> f64 {
    rate(chip, dtype, passes).1
}

/// Cycles of one array for the whole product, weight loads hidden.
#[must_use]
pub fn stream_cycles(chip: &Chip, m: u64, k: u64, n: u64, dtype: Dtype, passes: u32) -> f64 {
    let (rate, passes) = rate(chip, dtype, passes);
    let side = f64::from(chip.matrix_unit.rows.max(chip.matrix_unit.columns));
    let floor = match chip.architecture {
        Architecture::Tpu => chip.coefficient(Coefficient::WeightLoadFloor),
        Architecture::Gpu => GPU_STREAM_FLOOR,
    };
    tiles(chip, k, n) * (m as f64).max(floor * side) / rate * passes
}

/// Cycles of one `side x side` array, one row per cycle, for a whole product, fill and drain included: the textbook count.
///
/// Exposed: each of the `ceil(k/side) ceil(n/side)` tiles takes `side` cycles to load, `m + side - 1` until its last row has entered the last
/// column and `side - 1` to drain, `m + 3 side - 2` in all, and the last cycle of the product is shared with the next.
/// Hidden: the load overlaps the stream before; only the first is exposed, and fill and drain are paid once.
#[must_use]
pub fn textbook_cycles(side: u64, m: u64, k: u64, n: u64, load: WeightLoad) -> u64 {
    let tiles = k.div_ceil(side) * n.div_ceil(side);
    match load {
        WeightLoad::Exposed => (tiles * (m + 3 * side - 2)).saturating_sub(1),
        WeightLoad::Hidden => (tiles * m.max(side) + 3 * side - 2).saturating_sub(1),
    }
}

impl Unit for MatrixUnit {
    fn occupy(&self, chip: &Chip, instance: &Instance<'_>, occupancy: &mut Occupancy) {
        let &Instance {
            op,
            value_columns,
            value_parts,
            ..
        } = instance;
        let OpKind::Product {
            m,
            k,
            n,
            dtype,
            passes,
        } = *op
        else {
            return;
        };
        let columns = if value_columns { n.div_ceil(value_parts) } else { n };
        occupancy.matrix += stream_cycles(chip, m, k, columns, dtype, passes);
        // Passes of a decomposed product and its row blocks are products of their own, whose results the vector unit adds: they can go to different arrays.
        let row_blocks = (m as f64 / f64::from(chip.matrix_unit.rows)).ceil();
        occupancy.matrix_tiles = occupancy
            .matrix_tiles
            .max(tiles(chip, k, columns).ceil() * row_blocks * self::passes(chip, dtype, passes));
        occupancy.latency += chip.latency.matrix_result;
    }
}

/// Cycles one core's matrix units would need for `flops` if every tile were full; formats without a native rate run as one bf16 pass.
#[must_use]
pub fn ideal_cycles(chip: &Chip, flops: &PerDtype) -> f64 {
    let unit = &chip.matrix_unit;
    let per_row = f64::from(unit.count) * f64::from(unit.rows) * f64::from(unit.columns) * 2.0;
    // An empty sum of floats is minus zero.
    0.0 + flops
        .iter()
        .map(|(dtype, count)| count as f64 / (per_row * rate(chip, dtype, 1).0))
        .sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SCALE-Sim's published counts for one weight-stationary array with exposed loads.
    #[test]
    fn textbook_counts_of_square_products() {
        assert_eq!(
            textbook_cycles(128, 1024, 1024, 1024, WeightLoad::Exposed),
            89_983
        );
        assert_eq!(
            textbook_cycles(256, 1024, 1024, 1024, WeightLoad::Exposed),
            28_639
        );
        assert_eq!(
            textbook_cycles(256, 2048, 2048, 2048, WeightLoad::Exposed),
            180_095
        );
        // By hand: 64 tiles of 1024 rows, the first load of 128, and 127 + 127 to fill and drain, the last cycle shared: 65,536 + 381.
        assert_eq!(textbook_cycles(128, 1024, 1024, 1024, WeightLoad::Hidden), 65_917);
    }
}
