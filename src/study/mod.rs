//! Answering a question with the parts of the other modules: a run of a workload on chips, with its numeric check.

pub mod calls;
pub mod check;
pub mod compare;
pub mod cross_check;
pub mod decode;
pub mod delta_log;
pub mod dump;
pub mod hlo;
pub mod interval;
pub mod model;
mod pallas;
pub mod predict;
pub mod probe;
mod recurrence;
pub mod run;
pub mod schedules;
pub mod stack;
pub mod state_formats;
pub mod whatif;
pub mod whitening;

pub use check::{CheckError, Estimate, Extent, check, checked_layer, estimate};
pub use model::{ModelError, ModelRequest, run_model};
pub use run::{Chips, RunError, RunRequest, run};
pub use stack::{LayerRun, StackRequest, StackRun, run_layers, run_stack};
pub use whitening::{WhiteningError, WhiteningRequest};
