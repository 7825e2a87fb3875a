//! Matrix unit: cycles of a product.

use crate::dtype::Dtype;
use crate::graph::work::PerDtype;
use crate::hardware::Chip;

/// Share of the array's depth that a pass takes at least: loading a new stationary tile is hidden behind the stream only when enough rows stream.
/// Source: weight-load floor of measured ragged matrix products, 0.15 to 0.35 of the side in cycles per pass.
pub const WEIGHT_LOAD_FLOOR: f64 = 0.25;

/// Cycles one core's matrix units are occupied by one product `[m, k] x [k, n]`.
///
/// Model: `ceil(k / rows) ceil(n / columns)` stationary tiles, each streamed by `m` rows at `rows_per_cycle`, but never shorter than the load of
/// the next tile. On arrays wider than 128 a tile of at most 128 rows or columns takes half a pass: the compiler's schedules
/// fit `m ceil(k/128) ceil(n/256) / 4` per array on the 256-wide generations. The arrays of a core share the tiles evenly.
///
/// A format without a native rate runs as `passes` bf16 passes.
#[must_use]
pub fn product_cycles(chip: &Chip, m: u64, k: u64, n: u64, dtype: Dtype, passes: u32) -> f64 {
    let unit = &chip.matrix_unit;
    let (rate, passes) = match chip.rows_per_cycle(dtype) {
        Some(rate) => (rate, 1),
        // Every shipped chip has a bf16 rate; a chip without one streams a row per cycle.
        None => (chip.rows_per_cycle(Dtype::Bf16).unwrap_or(1.0), passes),
    };
    let side = f64::from(unit.rows.max(unit.columns));
    let half_tiles = if unit.rows > 128 {
        let halves = f64::from(unit.rows) / 128.0;
        (k as f64 / 128.0).ceil() / halves
    } else {
        (k as f64 / f64::from(unit.rows)).ceil()
    };
    let tiles = half_tiles * (n as f64 / f64::from(unit.columns)).ceil();
    let stream = m as f64 / rate;
    tiles * stream.max(WEIGHT_LOAD_FLOOR * side / rate) * f64::from(passes) / f64::from(unit.count)
}

/// Cycles from the start of a product to its result in a register, when nothing else is in the array.
#[must_use]
pub fn result_latency_cycles(chip: &Chip) -> f64 {
    chip.latency.matrix_result
}

/// Cycles one core's matrix units would need for `flops` if every tile were full; formats without a native rate run as one bf16 pass.
#[must_use]
pub fn ideal_cycles(chip: &Chip, flops: &PerDtype) -> f64 {
    let unit = &chip.matrix_unit;
    let per_row = f64::from(unit.count) * f64::from(unit.rows) * f64::from(unit.columns) * 2.0;
    let rate = |dtype| {
        chip.rows_per_cycle(dtype)
            .or_else(|| chip.rows_per_cycle(Dtype::Bf16))
            .unwrap_or(1.0)
    };
    // An empty sum of floats is minus zero.
    0.0 + flops
        .iter()
        .map(|(dtype, count)| count as f64 / (per_row * rate(dtype)))
        .sum::<f64>()
}
