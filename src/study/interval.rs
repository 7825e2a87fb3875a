//! The kernels of a layer, of all steps of an interval where it decodes with a log.

use super::run::{lower_for, lower_with};
use crate::graph::BuildError;
use crate::hardware::Architecture;
use crate::kernels::{Kernel, Lowerer, Plan};
use crate::layer::{DeltaLog, Layer, Merge};
use crate::mechanisms;

/// Name of the row of a merge that is a launch of its own.
pub const MERGE: &str = "merge";

/// Kernels of every plan as each architecture runs them: outer by architecture, inner by plan.
///
/// With a log they are those of an average step: every kernel that steps of an interval launch once, with its share of the steps.
///
/// # Errors
/// Where a graph cannot be built.
pub(super) fn lower_plans(
    layer: &Layer,
    architectures: &[Architecture],
    plans: &[Plan],
) -> Result<Vec<Vec<Vec<Kernel>>>, BuildError> {
    let Some(log) = layer.log else {
        return lower_step(layer, architectures, plans);
    };
    let mut steps = Vec::new();
    for position in 0..log.interval {
        steps.push(lower_step(&at(layer, log, position), architectures, plans)?);
    }
    let merge = match log.merge {
        Merge::Fused => None,
        Merge::Separate => Some(lower_merge(layer, log.interval, architectures, plans)?),
    };
    Ok((0..architectures.len())
        .map(|a| {
            (0..plans.len())
                .map(|p| {
                    let of_steps = steps.iter().map(|step| step[a][p].as_slice());
                    let of_merge = merge.as_ref().map(|merge| merge[a][p].as_slice());
                    average(of_steps.chain(of_merge), log.interval)
                })
                .collect()
        })
        .collect())
}

/// The layer at a step of an interval.
pub(super) fn at(layer: &Layer, log: DeltaLog, position: usize) -> Layer {
    Layer {
        log: Some(log.at(position)),
        ..layer.clone()
    }
}

/// Kernels of one step, or of a layer without a log.
pub(super) fn lower_step(
    layer: &Layer,
    architectures: &[Architecture],
    plans: &[Plan],
) -> Result<Vec<Vec<Vec<Kernel>>>, BuildError> {
    lower_with(layer, |lowerer| every(lowerer, architectures, plans))
}

/// Kernels of a merge of `entries` entries that is a launch of its own; none where there is nothing to merge.
pub(super) fn lower_merge(
    layer: &Layer,
    entries: usize,
    architectures: &[Architecture],
    plans: &[Plan],
) -> Result<Vec<Vec<Vec<Kernel>>>, BuildError> {
    let Some(merge) = mechanisms::build_merge(layer, entries)? else {
        return Ok(vec![vec![Vec::new(); plans.len()]; architectures.len()]);
    };
    let lowerer = Lowerer::new(&merge.graph, merge.value, 0.0).with_value_columns_of(merge.base);
    let mut kernels = every(&lowerer, architectures, plans);
    for kernel in kernels.iter_mut().flatten().flatten() {
        MERGE.clone_into(&mut kernel.label);
        "log into the base".clone_into(&mut kernel.title);
    }
    Ok(kernels)
}

fn every(lowerer: &Lowerer<'_>, architectures: &[Architecture], plans: &[Plan]) -> Vec<Vec<Vec<Kernel>>> {
    architectures
        .iter()
        .map(|&architecture| {
            plans
                .iter()
                .map(|plan| lower_for(architecture, lowerer, plan))
                .collect()
        })
        .collect()
}

/// The kernels of some steps as those of an average one of `interval` steps: rows stay together, a kernel that several steps launch stands once.
fn average<'a>(steps: impl Iterator<Item = &'a [Kernel]>, interval: usize) -> Vec<Kernel> {
    let mut rows: Vec<(String, Vec<(Kernel, usize)>)> = Vec::new();
    for kernel in steps.flatten() {
        let at = rows
            .iter()
            .position(|(label, _)| *label == kernel.label)
            .unwrap_or_else(|| {
                rows.push((kernel.label.clone(), Vec::new()));
                rows.len() - 1
            });
        let row = &mut rows[at].1;
        match row.iter_mut().find(|(known, _)| known == kernel) {
            Some((_, launches)) => *launches += 1,
            None => row.push((kernel.clone(), 1)),
        }
    }
    rows.into_iter()
        .flat_map(|(_, row)| row)
        .map(|(kernel, launches)| Kernel {
            share: launches as f64 / interval.max(1) as f64,
            ..kernel
        })
        .collect()
}
