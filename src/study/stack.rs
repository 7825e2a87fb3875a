//! `run` on a stack: every kind of layer timed once, times and memory summed over its layers.

use super::run::{Chips, RunError, RunRequest, interval_words, run};
use crate::config::Document;
use crate::report::result::{NumericResult, Provenance, RunResult};
use crate::report::stack::{KindResult, KindTime, SCHEMA, StackChip, StackPlan, StackResult, mib};
use crate::workload::{Stack, StackLayer};

/// What a run of a stack is asked for.
#[derive(Debug)]
pub struct StackRequest<'a> {
    /// The stack and its file.
    pub stack: &'a (Stack, Document),
    /// Chips, in the order of the report.
    pub chips: &'a Chips,
    /// Overrides as the user wrote them.
    pub overrides: Vec<String>,
    /// The numeric check of every kind, where it was run.
    pub numeric: Vec<Option<NumericResult>>,
}

/// One layer of a kind, timed.
#[derive(Debug, Clone)]
pub struct LayerRun {
    /// What the kind is called.
    pub name: String,
    /// Layers of it.
    pub count: u64,
    /// The run of one of them.
    pub run: RunResult,
}

/// A stack with the run of a layer of every kind, which a comparison takes apart.
#[derive(Debug, Clone)]
pub struct StackRun {
    /// Name of the stack.
    pub name: String,
    /// Digest of the stack and of the workloads of its layers, overrides included.
    pub workload_digest: String,
    /// Overrides as the user wrote them.
    pub overrides: Vec<String>,
    /// Kinds, in the order of the file.
    pub layers: Vec<LayerRun>,
}

/// Runs a layer of every kind of a stack, without numeric checks.
///
/// # Errors
/// As [`run`], for the first kind that fails.
pub fn run_layers(
    stack: &(Stack, Document),
    chips: &Chips,
    overrides: Vec<String>,
) -> Result<StackRun, RunError> {
    let layer = |layer: &StackLayer| {
        Ok(LayerRun {
            name: layer.name.clone(),
            count: layer.count as u64,
            run: run(RunRequest {
                workload: &layer.workload,
                baseline: None,
                chips,
                overrides: Vec::new(),
                numeric: None,
            })?,
        })
    };
    Ok(StackRun {
        name: stack.0.name.clone(),
        workload_digest: digest(stack),
        overrides,
        layers: stack
            .0
            .layers
            .iter()
            .map(layer)
            .collect::<Result<_, RunError>>()?,
    })
}

/// Digest of a stack and of the workloads of its layers.
fn digest((stack, document): &(Stack, Document)) -> String {
    let of_layers = stack.layers.iter().map(|layer| layer.workload.1.digest());
    let of_stack: Vec<String> = std::iter::once(document.digest()).chain(of_layers).collect();
    of_stack.join("+")
}

/// Runs a stack.
///
/// # Errors
/// As [`run`], for the first kind that fails.
pub fn run_stack(request: StackRequest<'_>) -> Result<StackResult, RunError> {
    let stack = &request.stack.0;
    let StackRun {
        workload_digest,
        layers,
        ..
    } = run_layers(request.stack, request.chips, Vec::new())?;
    let runs: Vec<RunResult> = layers.into_iter().map(|layer| layer.run).collect();
    let mut numeric = request.numeric.into_iter();
    let kinds: Vec<KindResult> = stack
        .layers
        .iter()
        .map(|layer| kind(layer, numeric.next().flatten()))
        .collect();
    let chips: Vec<StackChip> = (0..request.chips.len())
        .filter_map(|c| chip(stack, &runs, c))
        .collect();
    let mut warnings = Vec::new();
    let mut inferred = stack.inferred.clone();
    for (layer, run) in stack.layers.iter().zip(&runs) {
        warnings.extend(
            run.warnings
                .iter()
                .map(|warning| format!("{}: {warning}", layer.name)),
        );
        inferred.extend(
            run.provenance
                .inferred
                .iter()
                .map(|item| format!("{}: {item}", layer.name)),
        );
    }
    let digests: Vec<String> = request.chips.iter().map(|(_, d)| d.digest()).collect();
    let mut result = StackResult {
        schema: SCHEMA.to_owned(),
        name: stack.name.clone(),
        headline: String::new(),
        layers: kinds.iter().map(|kind| kind.count).sum(),
        state_bytes: kinds
            .iter()
            .map(|kind| kind.count * (kind.state_bytes + kind.convolution_state_bytes))
            .sum(),
        cache_bytes: kinds.iter().map(|kind| kind.count * kind.cache_bytes).sum(),
        kinds,
        chips,
        warnings,
        provenance: Provenance {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hardware_digest: digests.join("+"),
            workload_digest,
            calibration_digest: crate::hardware::shipped_calibration().digest(),
            overrides: request.overrides,
            inferred,
        },
    };
    result.headline = headline(&result);
    Ok(result)
}

fn kind(of: &StackLayer, numeric: Option<NumericResult>) -> KindResult {
    let layer = &of.workload.0.layer;
    let sequences = layer.batch as u64;
    KindResult {
        name: of.name.clone(),
        layer: layer.describe(),
        count: of.count as u64,
        state_bytes: sequences * layer.state_bytes(),
        convolution_state_bytes: sequences * layer.convolution_state_bytes(),
        cache_bytes_per_token: layer.cache_bytes_per_token(),
        cache_bytes: sequences * layer.cache_bytes(layer.tokens),
        numeric,
    }
}

fn chip(stack: &Stack, runs: &[RunResult], index: usize) -> Option<StackChip> {
    let first = runs.first()?.chips.get(index)?;
    let plans = stack.plans.iter().map(|name| {
        let mut kinds: Vec<KindTime> = stack
            .layers
            .iter()
            .zip(runs)
            .filter_map(|(layer, run)| {
                let plan = run
                    .chips
                    .get(index)?
                    .plans
                    .iter()
                    .find(|plan| plan.name == *name)?;
                let longest = plan
                    .stages
                    .iter()
                    .max_by(|a, b| a.time_us.total_cmp(&b.time_us))?;
                Some(KindTime {
                    name: layer.name.clone(),
                    count: layer.count as u64,
                    time_us: plan.total_us,
                    total_us: plan.total_us * layer.count as f64,
                    low_us: plan.low_us.map(|us| us * layer.count as f64),
                    high_us: plan.high_us.map(|us| us * layer.count as f64),
                    share: 0.0,
                    longest_stage: longest.stage.clone(),
                    longest_share: longest.time_us / plan.total_us,
                    bound: longest.bound,
                    flops: plan.stages.iter().map(|stage| stage.flops).sum(),
                    hbm_bytes: plan.stages.iter().map(|stage| stage.hbm_bytes).sum(),
                })
            })
            .collect();
        let total_us: f64 = kinds.iter().map(|kind| kind.total_us).sum();
        for kind in &mut kinds {
            kind.share = kind.total_us / total_us;
        }
        StackPlan {
            name: name.clone(),
            total_us,
            low_us: kinds.iter().map(|kind| kind.low_us).sum(),
            high_us: kinds.iter().map(|kind| kind.high_us).sum(),
            kinds,
        }
    });
    Some(StackChip {
        name: first.name.clone(),
        title: first.title.clone(),
        cores: first.cores,
        device: first.device.clone(),
        clock_ghz: first.clock_ghz,
        plans: plans.collect(),
        coverage: first.coverage.clone(),
    })
}

/// The answer in one line: the fastest plan on the chip where it is fastest.
fn headline(result: &StackResult) -> String {
    let best = result
        .chips
        .iter()
        .flat_map(|chip| chip.plans.iter().map(move |plan| (chip, plan)))
        .min_by(|(_, a), (_, b)| a.total_us.total_cmp(&b.total_us));
    let Some((chip, plan)) = best else {
        return String::new();
    };
    let Some(longest) = plan.kinds.iter().max_by(|a, b| a.total_us.total_cmp(&b.total_us)) else {
        return String::new();
    };
    format!(
        "{} on {} ({}, {:.2} GHz): {:.3} ms{} {} for {} layer{}; {} x {} take {:.0} %; state {:.2} MiB, cache {:.2} MiB",
        result.name,
        chip.name,
        chip.device,
        chip.clock_ghz,
        plan.total_us / 1e3,
        interval_words(plan.low_us, plan.high_us),
        plan.name,
        result.layers,
        if result.layers == 1 { "" } else { "s" },
        longest.count,
        longest.name,
        100.0 * longest.share,
        mib(result.state_bytes),
        mib(result.cache_bytes),
    )
}
