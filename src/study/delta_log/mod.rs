//! Decoding with a log of updates beside the state (`DeltaLog`) against decoding without one: the kernels of the core, their times and their traffic.

mod kernels;
mod tables;

pub use kernels::{Part, Replay, Step, Traffic};
pub(super) use kernels::{launches_of_interval, launches_of_step};
pub use tables::{
    Amortised, AppendTime, ChipTables, DeltaLogError, DeltaLogRequest, DeltaLogTables, IntervalTime,
    SplitTime, StepTraffic, tables,
};
