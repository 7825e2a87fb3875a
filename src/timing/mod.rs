//! Time of a kernel on a chip.
//!
//! One file per unit says how many cycles an operation occupies it ([`matrix`], [`vector`]) or how long bytes take ([`memory`]); [`kernel`] puts
//! them together: throughput of every unit, the dependence chain inside a grid step, DMA against compute, launch and grid-step overhead. docs/model.md
//! holds the equations. No coefficient is fitted here; every constant says where it comes from.

pub mod kernel;
pub mod matrix;
pub mod memory;
pub mod vector;

pub use kernel::{KernelTime, Remark, time_kernel};

/// Exponent of the soft maximum of matrix-unit and vector-unit time inside a kernel: 1 is a plain sum, infinity perfect overlap.
/// Source: pooled over measured Pallas kernels on three TPU generations, 2 to 2.7.
pub const COMPUTE_OVERLAP: f64 = 2.0;
/// Exponent of the soft maximum of compute and DMA time. Source: as [`COMPUTE_OVERLAP`], 3.
pub const DMA_OVERLAP: f64 = 3.0;
/// Cycles of scalar work and DMA issue per grid step. Source: 27 cycles per grid step in measured flash attention kernels.
pub const GRID_STEP_CYCLES: f64 = 27.0;

/// `(a^p + b^p)^(1/p)`: the larger of two times with a soft corner.
#[must_use]
pub fn soft_maximum(a: f64, b: f64, p: f64) -> f64 {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    if high <= 0.0 {
        0.0
    } else {
        high * (1.0 + (low / high).powf(p)).powf(p.recip())
    }
}
