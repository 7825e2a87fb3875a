//! The few numbers that a schedule does not say, with their uncertainty and source.
//!
//! They come from the calibration in use, whose section `schedules` is fitted by
//! [`crate::calibration::schedules`]: to programs on TPU v5p, v6e and v7x, of which some were measured with
//! another compiler than the one whose schedule is at hand.

use serde::Serialize;

use super::chip::Generation;
use crate::hardware::{ScheduleConstant, ScheduleConstants};

/// A constant of the method.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Constant {
    /// Name in reports.
    pub name: &'static str,
    /// Value.
    pub value: f64,
    /// Standard error, from fits that leave out one family of kernels at a time; none where nothing was fitted.
    pub standard_error: Option<f64>,
    /// Unit.
    pub unit: String,
    /// What it means and where it comes from.
    pub source: String,
}

/// The constants of a chip.
#[must_use]
pub fn of(constants: &ScheduleConstants, generation: Generation) -> [Constant; 4] {
    let fitted = |name, constant: &ScheduleConstant, chips: &str| Constant {
        name,
        value: constant.value,
        standard_error: Some(constant.standard_error),
        unit: constant.unit.clone(),
        source: format!(
            "{}; fitted to {} programs{chips}, data {}",
            constant.meaning, constant.rows, constants.data_digest
        ),
    };
    let chip = generation.chip();
    let clock = match constants.sustained_clock.get(chip) {
        Some(clock) => fitted("sustained_clock", clock, &format!(" on {chip}")),
        None => Constant {
            name: "sustained_clock",
            value: 1.0,
            standard_error: None,
            unit: "share of the published clock".to_owned(),
            source: format!("the published clock: no program on {chip} was fitted to"),
        },
    };
    [
        fitted("hbm_achievable", &constants.hbm_achievable, ""),
        fitted("transfer_latency_us", &constants.transfer_latency_us, ""),
        fitted("launch_us", &constants.launch_us, ""),
        clock,
    ]
}
