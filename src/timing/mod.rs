//! Time of a kernel on a chip.
//!
//! One file per unit says how long an operation occupies it ([`matrix`], [`vector`]) or how fast bytes stream ([`memory`]), behind the interface of
//! [`mod@unit`]. [`program`] puts the operations of a grid step on the lanes of a core, [`pipeline`] runs the programs of a core with their DMA, and
//! [`kernel`] says how a kernel is cut into programs and what binds it. [`check`] proves a schedule legal without knowing how it was made. docs/model.md
//! holds the equations. No coefficient is fitted here; every constant says where it comes from.

pub mod check;
pub mod kernel;
pub mod matrix;
pub mod memory;
pub mod pipeline;
pub mod program;
pub mod unit;
pub mod vector;

pub use kernel::{KernelTime, Remark, time_kernel};

/// Cycles of scalar work and DMA issue per program. Source: 27 cycles per grid step in measured flash attention kernels.
pub const GRID_STEP_CYCLES: f64 = 27.0;
/// Microseconds from the start of a DMA to its first byte. Source: schedules of Pallas kernels, simulated, fit 0.5 to 0.8 us.
pub const DMA_LATENCY_US: f64 = 0.5;
