//! The real numerics of a layer: its graph executed on arrays, and what it is compared with.
//!
//! [`execute()`] runs a [`Graph`](crate::graph::Graph) in f64 without rounding, or in f32 with every rounding the graph declares, and counts
//! what it executed. [`seeded_inputs`] makes the same inputs for both, [`mod@reference`] holds the token-by-token recurrences the
//! graphs must agree with, and [`RelativeError`] says how well they do.

mod compare;
mod elementwise;
mod execute;
mod inputs;
mod layout;
mod matmul;
mod plan;
mod pool;
mod real;
mod reduce;
pub mod reference;
pub mod round;
mod sequential;
pub mod spectrum;
mod sweep;

pub use compare::{RelativeError, relative_error};
pub use execute::{Arithmetic, ExecuteError, ExecutedWork, Execution, execute};
pub use inputs::{seeded_inputs, tabulate, to_f32};
pub use plan::{NonFinite, memory_estimate};
pub use real::{Real, Tensor};
pub use round::round_to;
