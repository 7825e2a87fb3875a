//! Ticks of axes.

/// One, two and five of every power of ten from `low` to `high`, for a logarithmic axis.
pub(super) fn ticks(low: f64, high: f64) -> Vec<f64> {
    let first = low.log10().floor().clamp(-12.0, 12.0) as i32;
    let last = high.log10().ceil().clamp(-12.0, 12.0) as i32;
    (first..=last)
        .flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)))
        .filter(|value| (low..=high).contains(value))
        .collect()
}
