//! Device memory: bandwidth of a stream.

use crate::coefficients::Coefficient;
use crate::hardware::{Architecture, Chip};
use crate::kernels::{Kernel, Transfer};

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

/// What a kernel moves between device memory and the chip.
#[derive(Debug, Clone, Copy)]
pub struct Moved {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Whether blocks of keys and values are read again for every pair of blocks.
    pub again: bool,
}

/// What the transfers of a kernel cost device memory, in bytes of a long stream: read and written.
///
/// On a GPU a tile that is narrower than the rows of its tensor comes in runs, each of which costs more than its bytes; and writes alone do not
/// reach the rate of streams that read as well, so that what a kernel moves takes at least as long as its writes. Nor is a kernel faster than
/// all it moves passes the last-level cache.
#[must_use]
pub fn streamed_bytes(kernel: &Kernel, chip: &Chip, moved: Moved) -> [f64; 2] {
    if chip.architecture == Architecture::Tpu {
        return [moved.read as f64, moved.written as f64];
    }
    let per_run = chip.coefficient(Coefficient::GpuRunBytes);
    let streamed = |transfers: &[Transfer]| {
        let cost = |t: &Transfer| {
            let run = kernel
                .implementation
                .tile_columns
                .map(|columns| columns.max(1) as f64 * t.dtype.bytes() as f64);
            let bytes = if moved.again { t.streamed_bytes() } else { t.bytes };
            bytes as f64 * (1.0 + run.map_or(0.0, |run| per_run / run))
        };
        transfers.iter().map(cost).sum::<f64>()
    };
    let cache =
        chip.coefficient(Coefficient::GpuCacheRate) * f64::from(chip.cores_per_device) * chip.clock().get();
    let (read, written) = (streamed(&kernel.reads), streamed(&kernel.writes));
    let slowdown = chip.hbm.achievable / chip.coefficient(Coefficient::GpuWriteShare);
    let written = written.max(written * slowdown - read);
    if kernel.implementation.cache_bytes <= 0.0 {
        return [read, written];
    }
    // Whatever comes from device memory passes the cache as well.
    let passed = kernel.implementation.cache_bytes + (moved.read + moved.written) as f64;
    let at_cache_rate = passed * chip.achievable_hbm_bandwidth_per_device().get() / cache;
    [read.max(at_cache_rate - written), written]
}
