//! `tpusim explain`: one number taken apart.

use std::io::Write;

use anyhow::bail;
use clap::Args;

use super::{Outcome, split_overrides};
use crate::config::suggestion;
use crate::hardware;
use crate::report::explain;
use crate::study::run::{check_formats, interval};
use crate::study::schedules::{ScheduledKernel, schedules};
use crate::workload;

/// Arguments of `tpusim explain`.
#[derive(Debug, Args)]
pub(super) struct ExplainArgs {
    /// Path of a workload file, or the name of a shipped one
    workload: String,
    /// Row of the stage table, for instance `op6` or `op2-7a`
    stage: String,
    /// Chip: a name or a path
    #[arg(long)]
    hw: String,
    /// Plan, where several have the row
    #[arg(long)]
    plan: Option<String>,
    /// Change a field of the workload (`layer.chunk=128`) or of the chip (`hw.matrix_unit.rows=128`)
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    set: Vec<String>,
}

pub(super) fn execute(out: &mut impl Write, args: &ExplainArgs) -> anyhow::Result<Outcome> {
    let (hardware_set, workload_set) = split_overrides(&args.set)?;
    let (workload, document) = workload::load(&args.workload, &workload_set)?;
    let (chip, _) = hardware::load_with(&args.hw, &hardware_set)?;
    check_formats(&workload.layer, &chip, &document)?;
    let plans = schedules(&workload, std::slice::from_ref(&chip))?;
    if let Some(wanted) = args
        .plan
        .as_deref()
        .filter(|wanted| !plans.iter().any(|p| p.plan == *wanted))
    {
        let names: Vec<&str> = plans.iter().map(|p| p.plan.as_str()).collect();
        bail!(
            "unknown plan `{wanted}`; {}",
            suggestion(wanted, &names, "plans of this workload")
        );
    }
    let in_plan = |plan: &str| args.plan.as_deref().is_none_or(|wanted| wanted == plan);
    let has = |row: &&ScheduledKernel| row.kernel.label == args.stage;
    let plans = plans.iter().filter(|p| in_plan(&p.plan));
    let Some(found) = plans.clone().find(|p| p.kernels.iter().any(|row| has(&row))) else {
        let mut names: Vec<&str> = Vec::new();
        for row in plans.flat_map(|p| &p.kernels) {
            // Plans share rows.
            if !names.contains(&row.kernel.label.as_str()) {
                names.push(&row.kernel.label);
            }
        }
        bail!(
            "unknown stage `{}`; {}",
            args.stage,
            suggestion(&args.stage, &names, "rows of this workload")
        );
    };
    // A row of several kernels is taken apart kernel by kernel.
    for (i, row) in found.kernels.iter().filter(has).enumerate() {
        if i > 0 {
            writeln!(out)?;
        }
        out.write_all(explain::render(&row.kernel, &row.time, &chip)?.as_bytes())?;
        if row.kernel.share < 1.0 {
            writeln!(
                out,
                "   launched in {:.4} of the steps of an interval, each of which takes that share of its time",
                row.kernel.share
            )?;
        }
        let calibration = hardware::shipped_calibration();
        let time_us = row.time.total_us;
        match interval(&row.kernel, &workload.layer, &chip, time_us, calibration) {
            Some(interval) => writeln!(
                out,
                "   80 % interval {:.1} to {:.1} us, from {}",
                interval.low_us,
                interval.high_us,
                interval.evidence.words()
            )?,
            None => writeln!(out, "   no interval: nothing comparable was measured")?,
        }
    }
    Ok(Outcome::Done)
}
