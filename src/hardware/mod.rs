//! Accelerators: the files that describe them, and the checked [`Chip`] the timing model works with.
//!
//! ```
//! use tpusim::dtype::Dtype;
//!
//! let (chip, _) = tpusim::hardware::load("tpu-v5e")?;
//! let peak = chip.matrix_flops_per_second(Dtype::Bf16).map_or(0.0, |rate| rate.get());
//! assert!((peak / 197e12 - 1.0).abs() < 0.01);
//! # Ok::<(), tpusim::config::ConfigError>(())
//! ```

mod calibration;
mod chip;
mod field;
mod file;
mod load;
mod resolve;
mod schedules;
#[cfg(test)]
mod tests;

pub use calibration::{
    Calibration, CalibrationError, ChipQuantity, Evidence, Evidences, Fitted, Interval, OwnChip, Residuals,
    SCHEMA, UNSEEN, mean_of_architecture, shipped as shipped_calibration, take as take_calibration,
};
pub use chip::{
    Architecture, Chip, ClockState, Hbm, Interconnect, Kind, Latency, MatrixUnit, OnChipMemory, Provenance,
    PublishedFigure, VectorSlots, VectorUnit,
};
pub use field::{Field, Kind as FieldKind};
pub use load::{
    TEMPLATE, check_schema, from_document, is_path, load, load_uncalibrated, load_with, name_of, read,
    shipped,
};
pub use schedules::{ScheduleConstant, ScheduleConstants};

/// JSON schema of hardware files, from the structs that read them.
#[must_use]
pub fn schema(generator: schemars::SchemaGenerator) -> schemars::Schema {
    file::schema(generator)
}
