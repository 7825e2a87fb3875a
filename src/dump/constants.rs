//! The few numbers that a schedule does not say, with their uncertainty and source.
//!
//! They were fitted to 42 programs on TPU v5p, v6e and v7x, compiled by libtpu 0.0.50.1 and measured with other
//! versions, by the mean absolute logarithm of predicted over measured time, each row counting no more than
//! 25 %. Fits that leave out one family of kernels or one device give the standard errors.

use serde::Serialize;

use super::chip::Generation;

/// A constant of the method.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Constant {
    /// Name in reports.
    pub name: &'static str,
    /// Value.
    pub value: f64,
    /// Spread of the fits that leave out a family or a device.
    pub standard_error: f64,
    /// Unit.
    pub unit: &'static str,
    /// Where it comes from.
    pub source: &'static str,
}

/// Share of the published device memory bandwidth that transfers of kernels reach.
pub const HBM_ACHIEVABLE: Constant = Constant {
    name: "hbm_achievable",
    value: 0.85,
    standard_error: 0.02,
    unit: "share of the published bandwidth",
    source: "fitted, shared by all chips; fits without one family give 0.85 to 0.875",
};

/// Time from the end of a transfer's turn at the memory until a wait for it ends.
pub const TRANSFER_LATENCY_US: Constant = Constant {
    name: "transfer_latency_us",
    value: 0.8,
    standard_error: 0.1,
    unit: "us",
    source: "fitted, shared by all chips; told by kernels of short grid steps, fits without one device give 0.7 to 0.9",
};

/// Time between two kernels of a program.
pub const LAUNCH_US: Constant = Constant {
    name: "launch_us",
    value: 0.1,
    standard_error: 0.1,
    unit: "us",
    source: "fitted, shared by all chips; programs of five kernels like 0, one of 37 kernels likes 0.3",
};

/// Share of the published clock of TPU v7x at which its schedules take the time that is measured.
pub const SUSTAINED_CLOCK_V7X: Constant = Constant {
    name: "sustained_clock",
    value: 0.921,
    standard_error: 0.02,
    unit: "share of the published clock",
    source: "fitted to TPU v7x: 1.75 GHz; a lower clock cannot be told from a constant share of stalls",
};

/// The clock share of chips whose schedules take the time that their published clock says.
pub const SUSTAINED_CLOCK: Constant = Constant {
    name: "sustained_clock",
    value: 1.0,
    standard_error: 0.02,
    unit: "share of the published clock",
    source: "compute-bound kernels on TPU v5p and v6e take what the published clock says",
};

/// Measured over predicted time, 10 % and 90 % quantile over the 42 programs, each predicted by constants
/// that were fitted without its family.
pub const INTERVAL: (f64, f64) = (0.91, 1.08);

/// Chips whose schedules were compared with measured times of kernels that stream from device memory.
pub const VALIDATED: [Generation; 3] = [Generation::V5p, Generation::V6e, Generation::V7x];

/// The constants of a chip.
#[must_use]
pub fn of(generation: Generation) -> [Constant; 4] {
    let clock = match generation {
        Generation::V7x => SUSTAINED_CLOCK_V7X,
        _ => SUSTAINED_CLOCK,
    };
    [HBM_ACHIEVABLE, TRANSFER_LATENCY_US, LAUNCH_US, clock]
}
