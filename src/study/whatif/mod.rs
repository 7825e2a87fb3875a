//! `whatif`: a workload at every combination of varied fields, of itself and of its chips.
//!
//! [`axis`] and [`space`] say which points there are, [`mod@file`] reads studies, [`evaluate`] times them, [`numeric`] executes their layers, [`pareto`] finds the best trade-offs, [`mod@sensitivity`] the fields that matter most.
//! The graph of a layer and its kernels are made once for all points that share the fields of the workload; where only the hardware differs, they are timed again.

pub mod axis;
mod chips;
pub mod evaluate;
pub mod file;
pub mod numeric;
pub mod pareto;
pub mod sensitivity;
pub mod space;

pub use axis::Axis;
pub use evaluate::{Row, Sweep, SweepRequest, Timing};
pub use file::Study;
pub use numeric::{LayerNumerics, Numerics};
pub use pareto::{Front, Objective};
pub use sensitivity::{Elasticity, PlanSensitivity, sensitivity};
pub use space::{Grid, Shard, Space};
