//! Device memory: time of a stream.

use crate::hardware::Chip;
use crate::units::Seconds;

/// Seconds to move `bytes` between device memory and the cores that take part.
///
/// Model: achievable bandwidth of the device, of which `cores_used` cores can draw at most their share on a chip whose cores have memory ports of
/// their own (TPU); any core of a GPU reaches every port, but a few cannot keep all of them busy.
#[must_use]
pub fn stream_time(chip: &Chip, bytes: f64, cores_used: f64) -> Seconds {
    let cores = f64::from(chip.cores_per_device);
    // A quarter of the SMs saturates the memory of the data-centre parts (measured copies level off there).
    let share = match chip.architecture {
        crate::hardware::Architecture::Tpu => cores_used / cores,
        crate::hardware::Architecture::Gpu => (4.0 * cores_used / cores).min(1.0),
    };
    Seconds(bytes / (chip.achievable_hbm_bandwidth_per_device().get() * share))
}
