//! Programs as XLA writes them: what an HLO module computes and moves. The text is read by [`crate::dump::hlo`].

pub mod cost;

pub use cost::{HloKernel, HloProgram, program};
