//! Rows that no fit ever sees: tables of papers, latencies that pull requests report, and operations that were measured after their model was written.

use serde::Serialize;

use crate::hardware::Calibration;
use crate::measurements::{self, MeasurementError, Table};
use crate::study::predict::{self, ChipFiles};

/// A group of such rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Printed in a paper.
    Published,
    /// Printed in a pull request or an issue.
    Reported,
    /// Measured after the model of the operation was written, and never looked at while the model changed.
    Unseen,
}

impl Origin {
    /// The word of tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Origin::Published => "published",
            Origin::Reported => "reported",
            Origin::Unseen => "unseen",
        }
    }
}

const FILES: [(Origin, &str, &str); 3] = [
    (
        Origin::Published,
        "measurements/published.csv",
        include_str!("../../measurements/published.csv"),
    ),
    (
        Origin::Reported,
        "measurements/reported.csv",
        include_str!("../../measurements/reported.csv"),
    ),
    (
        Origin::Unseen,
        "measurements/examples/h200-sxm-unseen.csv",
        include_str!("../../measurements/examples/h200-sxm-unseen.csv"),
    ),
];

/// A predicted row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Where it comes from.
    pub origin: Origin,
    /// Device.
    pub device: String,
    /// Operation.
    pub op: String,
    /// Parameters.
    pub params: String,
    /// Reference time, in microseconds.
    pub reference_us: f64,
    /// Predicted time, in microseconds.
    pub predicted_us: f64,
    /// The 80 % interval, in microseconds.
    pub interval_us: Option<(f64, f64)>,
    /// Error, in percent.
    pub error_pct: f64,
}

/// All rows that can be timed, in the order of the files, and how many cannot.
///
/// # Errors
/// Where a shipped file is malformed.
pub fn rows(calibration: &Calibration) -> Result<(Vec<Row>, usize), MeasurementError> {
    let mut known = Vec::new();
    let mut unknown = 0;
    for (origin, name, text) in FILES {
        let table: Table = measurements::parse(name, text.as_bytes())?;
        let predictions = predict::predict(&table, &ChipFiles::default(), calibration);
        for (row, prediction) in table.rows.iter().zip(predictions) {
            let (Ok(prediction), Some(reference_us)) = (prediction, row.latency_us) else {
                unknown += 1;
                continue;
            };
            known.push(Row {
                origin,
                device: row.device.clone(),
                op: row.op.clone(),
                params: row.params.clone(),
                reference_us,
                predicted_us: prediction.predicted_us,
                interval_us: prediction
                    .interval
                    .map(|interval| (interval.low_us, interval.high_us)),
                error_pct: 100.0 * (prediction.predicted_us / reference_us - 1.0),
            });
        }
    }
    Ok((known, unknown))
}

/// A ratio of two published times beside that of their predictions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RatioOfTimes {
    /// What over what.
    pub name: &'static str,
    /// As published.
    pub published: f64,
    /// As predicted.
    pub predicted: f64,
    /// Error, in percent.
    pub error_pct: f64,
}

/// Numerator and denominator of the published ratios: how a row is found, and what the ratio is called.
const RATIOS: [(&str, [&str; 2], [&str; 2]); 5] = [
    (
        "fused layer, KDA over SLA-R4",
        ["kda_layer_stage", "plan=fused"],
        ["sla_r4_layer_stage", "plan=fused"],
    ),
    (
        "unfused layer, KDA over SLA-R4",
        ["kda_layer_stage", "plan=unfused"],
        ["sla_r4_layer_stage", "plan=unfused"],
    ),
    (
        "core, Tokamax KDA over SLA-R4",
        ["kda_core", "impl=tokamax"],
        ["sla_r4_core", ""],
    ),
    (
        "core, MaxText KDA over SLA-R4",
        ["kda_core", "impl=maxtext"],
        ["sla_r4_core", ""],
    ),
    (
        "core, Tokamax KDA over SLA-R2",
        ["kda_core", "impl=tokamax"],
        ["sla_r2_core", ""],
    ),
];

/// The speedups that the Systolic Linear Attention paper prints, from the rows of [`rows`]: stages are summed.
#[must_use]
pub fn ratios(rows: &[Row]) -> Vec<RatioOfTimes> {
    let sum = |[op, part]: [&str; 2]| {
        let of = rows
            .iter()
            .filter(|row| row.origin == Origin::Published && row.op == op)
            .filter(|row| part.is_empty() || row.params.split(';').any(|p| p == part));
        of.fold((0.0, 0.0), |(published, predicted), row| {
            (published + row.reference_us, predicted + row.predicted_us)
        })
    };
    RATIOS
        .iter()
        .filter_map(|&(name, above, below)| {
            let ((a, predicted_a), (b, predicted_b)) = (sum(above), sum(below));
            (a > 0.0 && b > 0.0).then(|| {
                let (published, predicted) = (a / b, predicted_a / predicted_b);
                RatioOfTimes {
                    name,
                    published,
                    predicted,
                    error_pct: 100.0 * (predicted / published - 1.0),
                }
            })
        })
        .collect()
}
