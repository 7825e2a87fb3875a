//! Time of a kernel on a chip.
//!
//! One file per unit says how long an operation occupies it ([`matrix`], [`vector`]) or how fast bytes stream ([`memory`]), behind the interface of
//! [`mod@unit`]. [`program`] puts the operations of a grid step on the lanes of a core, [`pipeline`] runs the programs of a core with their DMA, and
//! [`kernel`] says how a kernel is cut into programs and what binds it. [`check`] proves a schedule legal without knowing how it was made. docs/model.md
//! holds the equations. What no datasheet says are the coefficients of [`crate::coefficients`].

pub mod check;
pub mod kernel;
pub mod matrix;
pub mod memory;
pub mod pipeline;
pub mod program;
pub mod unit;
pub mod vector;

pub use kernel::{KernelFigures, KernelTime, Prepared, Remark, Timer, time_kernel};
