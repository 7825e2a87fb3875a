//! Device memory: bandwidth of a stream.

use crate::hardware::{Architecture, Chip};

/// Share of the multiprocessors that saturates device memory: measured copies level off there.
const SATURATING_SHARE: f64 = 0.25;

/// Bytes per core cycle that one of `cores_used` working cores can draw from device memory.
///
/// Model: achievable bandwidth of the device. A TPU core has memory ports of its own, so cores that idle leave their share unused; any multiprocessor of a
/// GPU reaches every port, but a quarter of them is needed to keep all ports busy.
#[must_use]
pub fn bytes_per_cycle(chip: &Chip, cores_used: u64) -> f64 {
    let cores = f64::from(chip.cores_per_device);
    let per_core = match chip.architecture {
        Architecture::Tpu => 1.0 / cores,
        Architecture::Gpu => 1.0 / (cores_used as f64).max(SATURATING_SHARE * cores),
    };
    chip.achievable_hbm_bandwidth_per_device().get() * per_core / chip.clock().get()
}
