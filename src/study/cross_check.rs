//! A second opinion: the cycles that the TPU compiler itself estimates for small programs, against the timing model's. Never a fit target.

use std::collections::BTreeMap;

use super::predict;
use crate::measurements::{self, MeasurementError, Table};

const ESTIMATES: &str = include_str!("../../measurements/compiler_estimates.csv");

/// Predicted over estimated cycles of an operation on a generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Ratio {
    /// Operation.
    pub op: String,
    /// Generation.
    pub device: String,
    /// Programs compared.
    pub n: usize,
    /// Median ratio.
    pub median: f64,
    /// Smallest and largest ratio.
    pub spread: (f64, f64),
}

/// Why an operation's median is off by more than a factor of two on some generation.
pub const EXPLANATIONS: &[(&str, &str)] = &[
    (
        "bmm",
        "The estimate pays for two fusions, the second a copy of a 64-wide result into whole lanes, and for 16-bit operands as if they were of 32 bits; here small products of a batch share a program and only padded bytes move.",
    ),
    (
        "col_sum",
        "The estimate charges a sum 2.3 times the cycles of a copy of the same matrix, which moves twice the bytes; large exponentials in f32 get the very same number, so it is a property of the emitter's cost table. Here a sum streams its operand once.",
    ),
    (
        "row_sum",
        "As column sums: the estimate is the same number for both, which no data movement explains.",
    ),
    (
        "conv4_silu",
        "The estimate materialises the shifted rows; here one pass reads and writes, with three cross-lane shifts.",
    ),
    (
        "cumsum_rows",
        "Five fusions; their bytes are three round trips, which is what is timed here. The rest of the estimate is reduce-window steps, which it does not overlap with the streams.",
    ),
    (
        "exp",
        "The estimate counts cycles for 16-bit elements as for 32-bit ones, and charges a large f32 exponential 2.3 times the cycles of a logarithm of the same matrix, the number that it also has for sums; small f32 rows agree within a third.",
    ),
    (
        "gelu",
        "The estimate takes the same cycles for bf16 rows as for f32 rows of the same shape, so that the bf16 rows, which move half the bytes, are off by two.",
    ),
    (
        "rms_norm",
        "The estimate writes an f32 copy of bf16 rows and reads it back (14 bytes an element). Measured norms of v5p, v6e and v7x fit passes over the bf16 rows, without the copy.",
    ),
    (
        "softmax",
        "Four fusions with an f32 intermediate, 16 bytes an element; here three passes over bf16 rows, 8 bytes.",
    ),
    (
        "reciprocal",
        "The estimate counts cycles for 16-bit elements as for 32-bit ones, so the bf16 rows are off by two; the f32 row agrees within 6 %.",
    ),
    (
        "rsqrt",
        "Only bf16 rows: as for reciprocals, the estimate does not see that they are half as wide.",
    ),
    ("softplus", "A single bf16 row: see reciprocals."),
    (
        "transpose",
        "The estimate takes about 20 cycles a register where the cross-lane unit would stream a 128 x 128 block through; here transposes are bound by device memory.",
    ),
    (
        "tri_solve",
        "The estimate runs the rows of a batch on the lanes of one register; here at most 16 systems interleave, each waiting for its own chain.",
    ),
    (
        "matmul",
        "Small shapes: the estimate has no launch and no latency of transfers, which are most of the time here.",
    ),
    (
        "fma32",
        "bf16 rows: thirty-two chained multiply-adds are bound by the vector unit in both, but the estimate adds the streams to them.",
    ),
];

/// Compares the shipped estimates with the timing model, by operation and generation.
///
/// # Errors
/// Where the shipped file is malformed.
pub fn cross_check() -> Result<Vec<Ratio>, MeasurementError> {
    let table: Table = measurements::parse("measurements/compiler_estimates.csv", ESTIMATES.as_bytes())?;
    let cycles_at = table.headers.iter().position(|header| header == "cycles");
    let chips = predict::chips(&table.rows, &predict::ChipFiles::default());
    let mut ratios: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
    for row in &table.rows {
        let cycles = cycles_at
            .and_then(|at| row.cells.get(at))
            .and_then(|cell| cell.parse::<f64>().ok())
            .filter(|cycles| *cycles > 0.0);
        let (Some(cycles), Some(Ok(chip))) = (cycles, chips.get(&(row.device.clone(), row.cores))) else {
            continue;
        };
        if let Ok(prediction) = predict::case(row, chip) {
            let predicted = prediction.predicted_us * 1e-6 * chip.clock().get();
            ratios
                .entry((row.op.clone(), row.device.clone()))
                .or_default()
                .push(predicted / cycles);
        }
    }
    Ok(ratios
        .into_iter()
        .map(|((op, device), mut ratios)| {
            ratios.sort_by(f64::total_cmp);
            let middle = ratios.len() / 2;
            let median = if ratios.len().is_multiple_of(2) {
                f64::midpoint(ratios[middle - 1], ratios[middle])
            } else {
                ratios[middle]
            };
            Ratio {
                op,
                device,
                n: ratios.len(),
                median,
                spread: (ratios[0], ratios[ratios.len() - 1]),
            }
        })
        .collect())
}

/// Whether a median is off by more than a factor of two.
#[must_use]
pub fn far_off(ratio: &Ratio) -> bool {
    !(0.5..=2.0).contains(&ratio.median)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation that is far off on some generation is explained, and the bulk agrees.
    #[test]
    fn what_is_far_off_is_explained() -> Result<(), MeasurementError> {
        let ratios = cross_check()?;
        assert!(ratios.len() > 100, "{}", ratios.len());
        for ratio in ratios.iter().filter(|ratio| far_off(ratio)) {
            assert!(
                EXPLANATIONS.iter().any(|(op, _)| *op == ratio.op),
                "{} on {}: {}",
                ratio.op,
                ratio.device,
                ratio.median
            );
        }
        for op in ["matmul", "copy", "exp8", "sigmoid"] {
            let medians: Vec<f64> = ratios.iter().filter(|r| r.op == op).map(|r| r.median).collect();
            assert_eq!(medians.len(), 5, "{op}");
            assert!(
                medians.iter().all(|m| (0.5..2.0).contains(m)),
                "{op}: {medians:?}"
            );
        }
        Ok(())
    }
}
