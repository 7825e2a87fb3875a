//! Measured decode steps with a log of updates against their predictions. The rows are in no fit.

use std::collections::BTreeMap;

use serde::Serialize;

use super::fit::with_setting;
use super::parameters::Setting;
use super::validate::quantile;
use crate::hardware::{self, Calibration};
use crate::measurements::{self, MeasurementError};
use crate::study::predict::{self, ChipFiles};

/// The file of the rows, made with tools/gpu/deltalog.
const FILE: (&str, &str) = (
    "measurements/h200_deltalog.csv",
    include_str!("../../measurements/h200_deltalog.csv"),
);

/// A measured row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Device.
    pub device: String,
    /// Mechanism.
    pub mechanism: String,
    /// Kind of step: `eager`, `deltalog` (an average step), `deltalog_append`, `deltalog_append_merge`, `deltalog_merge`.
    pub step: String,
    /// Parameters.
    pub params: String,
    /// Measured time, in microseconds.
    pub measured_us: f64,
    /// Predicted with the calibration in use, in microseconds.
    pub predicted_us: f64,
    /// Predicted by a fit without any row of the device, in microseconds.
    pub unseen_us: Option<f64>,
}

impl Row {
    /// The value of a parameter.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<&str> {
        let mut parts = self.params.split(';').filter_map(|part| part.split_once('='));
        parts.find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    /// Predicted over measured time, as an error in percent.
    #[must_use]
    pub fn error_pct(&self) -> f64 {
        100.0 * (self.predicted_us / self.measured_us - 1.0)
    }
}

/// All rows that can be timed, in the order of the file. `without_device` has fits that left a device out, by device.
///
/// # Errors
/// Where the shipped file is malformed.
pub fn rows(
    calibration: &Calibration,
    without_device: &BTreeMap<String, Setting>,
) -> Result<Vec<Row>, MeasurementError> {
    let table = measurements::parse(FILE.0, FILE.1.as_bytes())?;
    let predictions = predict::predict(&table, &ChipFiles::default(), calibration);
    let unseen = predict::chips_by(&table.rows, &ChipFiles::default(), hardware::load_uncalibrated);
    let rows = table
        .rows
        .iter()
        .zip(predictions)
        .filter_map(|(row, prediction)| {
            let (mechanism, step) = row.op.split_once("_decode_")?;
            let setting = without_device.get(&row.device);
            let chip = unseen.get(&(row.device.clone(), row.cores));
            let unseen_us = setting.zip(chip).and_then(|(setting, chip)| {
                let chip = with_setting(chip.as_ref().ok()?, setting);
                Some(predict::case(row, &chip).ok()?.predicted_us)
            });
            Some(Row {
                device: row.device.clone(),
                mechanism: mechanism.to_owned(),
                step: step.to_owned(),
                params: row.params.clone(),
                measured_us: row.latency_us?,
                predicted_us: prediction.ok()?.predicted_us,
                unseen_us,
            })
        });
    Ok(rows.collect())
}

/// Errors of some rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    /// Mechanism, or `all`.
    pub mechanism: String,
    /// Kind of step, `split` where the log is replayed in two kernels.
    pub step: String,
    /// Rows.
    pub n: usize,
    /// Median absolute error, in percent.
    pub median_abs_pct: f64,
    /// Absolute error that a tenth of the rows exceed, in percent.
    pub p90_abs_pct: f64,
    /// Median error, in percent: positive where predictions are too slow.
    pub bias_pct: f64,
    /// The same of a fit without any row of the device, in percent: median and that which a tenth exceed.
    pub unseen_abs_pct: Option<(f64, f64)>,
    /// Median absolute error of the speedup over the eager step of the same size, in percent.
    pub speedup_abs_pct: Option<f64>,
}

/// Errors by mechanism and kind of step, those of all mechanisms last.
#[must_use]
pub fn scores(rows: &[Row]) -> Vec<Score> {
    let mut groups: BTreeMap<(String, String), Vec<&Row>> = BTreeMap::new();
    for row in rows {
        let step = if row.parameter("split").is_some() {
            "split".to_owned()
        } else {
            row.step.clone()
        };
        for mechanism in [row.mechanism.as_str(), "all"] {
            let group = groups.entry((mechanism.to_owned(), step.clone())).or_default();
            group.push(row);
        }
    }
    let mut scores: Vec<Score> = groups
        .into_iter()
        .map(|((mechanism, step), of)| score(mechanism, step, &of, rows))
        .collect();
    scores.sort_by_key(|score| score.mechanism == "all");
    scores
}

fn score(mechanism: String, step: String, of: &[&Row], rows: &[Row]) -> Score {
    let percent = |predicted: f64, measured: f64| 100.0 * (predicted / measured - 1.0);
    let errors: Vec<f64> = of.iter().map(|row| row.error_pct()).collect();
    let sizes = |errors: &[f64]| errors.iter().map(|error| error.abs()).collect::<Vec<f64>>();
    let unseen: Vec<f64> = of
        .iter()
        .filter_map(|row| Some(percent(row.unseen_us?, row.measured_us)))
        .collect();
    let speedups: Vec<f64> = of
        .iter()
        .filter(|row| row.step == "deltalog")
        .filter_map(|row| {
            let eager = eager_of(row, rows)?;
            let predicted = eager.predicted_us / row.predicted_us;
            Some(percent(predicted, eager.measured_us / row.measured_us).abs())
        })
        .collect();
    Score {
        mechanism,
        step,
        n: of.len(),
        median_abs_pct: quantile(&sizes(&errors), 0.5),
        p90_abs_pct: quantile(&sizes(&errors), 0.9),
        bias_pct: quantile(&errors, 0.5),
        unseen_abs_pct: (!unseen.is_empty()).then(|| {
            let sizes = sizes(&unseen);
            (quantile(&sizes, 0.5), quantile(&sizes, 0.9))
        }),
        speedup_abs_pct: (!speedups.is_empty()).then(|| quantile(&speedups, 0.5)),
    }
}

/// The eager step of the same mechanism and size.
#[must_use]
pub fn eager_of<'a>(row: &Row, rows: &'a [Row]) -> Option<&'a Row> {
    let same = |other: &Row| {
        ["B", "H", "K", "V"]
            .iter()
            .all(|name| other.parameter(name) == row.parameter(name))
    };
    rows.iter()
        .find(|other| other.step == "eager" && other.mechanism == row.mechanism && same(other))
}
