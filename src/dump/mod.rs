//! Reading the TPU compiler's own schedule: how long a compiled JAX or Pallas program takes, without a TPU.
//!
//! The TPU compiler runs ahead of time on any machine and can write its final bundles as text. A schedule is
//! static, so that most of the time of a kernel can be counted instead of estimated: which bundles run how
//! often follows from executing the scalar instructions among them; cycles that the schedule leaves empty are
//! recovered from the compiler's tables of slots; what remains are transfers, which a queue at the device
//! memory plays against the compute. Four constants are not in the schedule, see [`constants`].
//!
//! [`source::Dump::read`] reads a folder or an archive, [`report::analyse`] says how long and why.

mod bundles;
pub mod chip;
mod code;
pub mod constants;
pub mod delays;
pub mod error;
mod execute;
pub mod hlo;
mod lines;
mod program;
pub mod program_time;
mod queues;
pub mod report;
pub mod schedule;
pub mod source;
mod statement;
pub mod utilization;
mod value;

pub use chip::{Generation, Machine};
pub use error::DumpError;
pub use program_time::{ProgramTime, program_time};
pub use report::{Analysis, analyse};
pub use schedule::{Schedule, schedule};
pub use source::Dump;
