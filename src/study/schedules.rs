//! The schedules behind a run: every kernel of every plan on every chip, with its program and pipeline.

use super::run::{RunError, lower_all};
use crate::hardware::Chip;
use crate::kernels::Kernel;
use crate::timing::{KernelTime, time_kernel};
use crate::workload::Workload;

/// A kernel with its time.
#[derive(Debug, Clone)]
pub struct ScheduledKernel {
    /// What it moves and computes.
    pub kernel: Kernel,
    /// How long it takes.
    pub time: KernelTime,
}

/// The kernels of a plan on a chip, in order of execution.
#[derive(Debug, Clone)]
pub struct ScheduledPlan {
    /// Chip.
    pub chip: Chip,
    /// Plan.
    pub plan: String,
    /// Kernels.
    pub kernels: Vec<ScheduledKernel>,
}

/// Schedules every plan of a workload on every chip.
///
/// # Errors
/// Where the graph cannot be built.
pub fn schedules(workload: &Workload, chips: &[Chip]) -> Result<Vec<ScheduledPlan>, RunError> {
    let lowered = lower_all(workload)?;
    Ok(chips
        .iter()
        .flat_map(|chip| {
            lowered.iter().map(|lowered| ScheduledPlan {
                chip: chip.clone(),
                plan: lowered.plan.name.clone(),
                kernels: lowered
                    .on(chip)
                    .iter()
                    .map(|kernel| ScheduledKernel {
                        kernel: kernel.clone(),
                        time: time_kernel(kernel, chip),
                    })
                    .collect(),
            })
        })
        .collect())
}
