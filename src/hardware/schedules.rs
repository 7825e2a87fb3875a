//! The numbers that a compiled schedule does not say, as a fit found them: a section of the calibration.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleConstant {
    /// Value, in `unit`.
    pub value: f64,
    /// Unit.
    pub unit: String,
    /// What it stands for.
    pub meaning: String,
    /// Standard error, in `unit`, from fits that leave out one family of kernels at a time.
    pub standard_error: f64,
    /// Smallest value allowed.
    pub low: f64,
    /// Largest value allowed.
    pub high: f64,
    /// Value where nothing is fitted.
    pub prior: f64,
    /// Programs whose time depends on it.
    pub rows: usize,
}

/// All of them, and how far predictions are off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleConstants {
    /// Digest of the schedules and measured times that they were fitted to.
    pub data_digest: String,
    /// Programs used.
    pub rows: usize,
    /// Share of the published device memory bandwidth that transfers of kernels reach.
    pub hbm_achievable: ScheduleConstant,
    /// Time from the end of a transfer's turn at the memory until a wait for it ends, in microseconds.
    pub transfer_latency_us: ScheduleConstant,
    /// Time between two kernels of a program, in microseconds.
    pub launch_us: ScheduleConstant,
    /// Share of the published clock at which schedules of a chip take the time that is measured, by chip. A
    /// chip that is not here gave no program.
    pub sustained_clock: BTreeMap<String, ScheduleConstant>,
    /// Measured over predicted time below which a tenth of the programs lie, each predicted without its family.
    pub low: f64,
    /// The same above which a tenth of them lie.
    pub high: f64,
    /// Factor, above 1, that the predicted ratio of two programs of one family on one chip is off by at most in
    /// 80 % of the pairs, each predicted without its family.
    pub speedup_error_ratio: f64,
}

impl ScheduleConstants {
    /// All constants with their names; those of a chip have its name in front.
    #[must_use]
    pub fn parameters(&self) -> Vec<(String, &ScheduleConstant)> {
        let shared = [
            ("hbm_achievable", &self.hbm_achievable),
            ("transfer_latency_us", &self.transfer_latency_us),
            ("launch_us", &self.launch_us),
        ];
        let shared = shared.map(|(name, constant)| (name.to_owned(), constant));
        let clocks = self
            .sustained_clock
            .iter()
            .map(|(chip, constant)| (format!("{chip} sustained_clock"), constant));
        shared.into_iter().chain(clocks).collect()
    }
}
