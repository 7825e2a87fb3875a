//! Answering a question with the parts of the other modules: a run of a workload on chips, with its numeric check.

pub mod run;

pub use run::{Chips, RunError, RunRequest, run};
