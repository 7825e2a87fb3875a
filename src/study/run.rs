//! `run`: one workload, all its plans, on several chips.

use std::collections::BTreeMap;

use super::interval::lower_plans;
use super::predict;
use crate::config::{ConfigError, Document};
use crate::dtype::Dtype;
use crate::graph::{BuildError, Role, Stage, Value};
use crate::hardware::{
    self, Architecture, Calibration, Chip, Evidence, Interval, Kind, Provenance as HardwareSource,
};
use crate::kernels::{Kernel, Lowerer, Plan, Transfer};
use crate::layer::{Layer, Pass};
use crate::mechanisms::{self, LayerGraph};
use crate::report::result::{
    Bound, ChipResult, HardwareInputs, Inputs, NumberSource, NumericResult, PlanResult, Provenance,
    PublishedComparison, PublishedRow, Roof, Roofs, RunResult, SCHEMA, StageResult, TokenBytes, TokenResult,
};
use crate::timing::{KernelTime, Remark, time_kernel};
use crate::units::FlopsPerSecond;
use crate::workload::Workload;

/// Chips with the files they came from.
pub type Chips = Vec<(Chip, Document)>;

/// What a run is asked for.
#[derive(Debug)]
pub struct RunRequest<'a> {
    /// The workload and its file.
    pub workload: &'a (Workload, Document),
    /// The workload to compare with, and its file.
    pub baseline: Option<&'a (Workload, Document)>,
    /// Chips, in the order of the report.
    pub chips: &'a Chips,
    /// Overrides as the user wrote them.
    pub overrides: Vec<String>,
    /// The numeric check, where it was run.
    pub numeric: Option<NumericResult>,
}

/// Why a run has no result.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The workload does not fit a chip.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The mechanism asked for an operation its operands do not allow: a fault of the mechanism, not of the input.
    #[error("cannot build the graph of `{name}`: {source}")]
    Build {
        /// Workload.
        name: String,
        /// The operation.
        source: BuildError,
    },
    /// A rate above its roof or a time below zero: a fault of the model.
    #[error("invariant violated on `{chip}`, plan `{plan}`, row `{stage}`: {what}")]
    Invariant {
        /// Chip.
        chip: String,
        /// Plan.
        plan: String,
        /// Row.
        stage: String,
        /// What is wrong.
        what: String,
    },
}

/// Runs a workload.
///
/// # Errors
/// A [`RunError`]: a dtype the chip lacks, or a violated invariant. Nothing is returned then.
pub fn run(request: RunRequest<'_>) -> Result<RunResult, RunError> {
    let (workload, document) = request.workload;
    let mut warnings = Vec::new();
    for (checked, document) in std::iter::once(request.workload).chain(request.baseline) {
        for (chip, _) in request.chips {
            check_formats(&checked.layer, chip, document)?;
        }
    }
    let lowered = lower_all(workload)?;
    let baseline = match request.baseline {
        Some((base, _)) => Some((base, lower_all(base)?)),
        None => None,
    };
    let mut chips = Vec::new();
    for (chip, _) in request.chips {
        let mut plans = Vec::new();
        for lowered in &lowered {
            let reference = baseline.as_ref().and_then(|(_, plans)| {
                plans
                    .iter()
                    .find(|candidate| candidate.plan.name == lowered.plan.name)
                    .map(|reference| reference.on(chip))
            });
            plans.push(time_plan(
                workload,
                &lowered.plan,
                lowered.on(chip),
                reference,
                Measure {
                    chip,
                    intervals: hardware::shipped_calibration(),
                },
                &mut warnings,
            )?);
        }
        chips.push(chip_result(chip, plans));
    }
    let published = compare(workload, &chips);
    if let (Some(published), None) = (&workload.published, &published) {
        warnings.push(format!(
            "the published values hold for `{}`, which is not in this run; add it with `--hw {}`",
            published.chip, published.chip
        ));
    }
    warnings.extend(padding_warning(&workload.layer));
    let digests: Vec<String> = request.chips.iter().map(|(_, d)| d.digest()).collect();
    let mut inferred = workload.inferred.clone();
    inferred.extend(workload.defaults.iter().map(ToString::to_string));
    warnings.extend(numeric_warnings(request.numeric.as_ref()));
    let mut result = RunResult {
        schema: SCHEMA.to_owned(),
        name: workload.name.clone(),
        headline: String::new(),
        layer: workload.layer.describe(),
        baseline: baseline.as_ref().map(|(base, _)| base.name.clone()),
        chips,
        numeric: request.numeric,
        published,
        warnings,
        provenance: Provenance {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hardware_digest: digests.join("+"),
            workload_digest: document.digest(),
            calibration_digest: hardware::shipped_calibration().digest(),
            overrides: request.overrides,
            inferred,
        },
        inputs: Some(inputs(workload, document, request.chips)),
        sensitivity: Vec::new(),
    };
    result.headline = headline(workload, &result);
    if let Some(node) = result
        .numeric
        .as_ref()
        .and_then(|numeric| numeric.non_finite.as_ref())
    {
        result.headline = format!(
            "NOT USABLE as it stands, {node} is not finite (remedy below): {}",
            result.headline
        );
    }
    Ok(result)
}

/// Keys of a workload that no time depends on.
const UNTIMED: [&str; 6] = ["name", "hardware", "baseline", "numeric", "published", "inferred"];
/// Keys of a hardware file, in any block, that no time depends on.
const UNTIMED_HARDWARE: [&str; 7] = [
    "title",
    "kind",
    "source",
    "note",
    "except",
    "published",
    "unknown",
];

/// What the times of a run follow from.
fn inputs(workload: &Workload, document: &Document, chips: &Chips) -> Inputs {
    let lines = |fields: BTreeMap<String, String>| {
        fields
            .into_iter()
            .map(|(field, value)| format!("{field}={value}"))
            .collect()
    };
    let mut of_workload: BTreeMap<String, String> = document
        .fields(|path| UNTIMED.contains(&path))
        .into_iter()
        .collect();
    for default in &workload.defaults {
        of_workload.insert(default.field.clone(), default.value.clone());
    }
    let of_chip = |document: &Document| -> BTreeMap<String, String> {
        let untimed =
            |path: &str| UNTIMED_HARDWARE.contains(&path.rsplit_once('.').map_or(path, |(_, key)| key));
        document.fields(untimed).into_iter().collect()
    };
    let calibration = hardware::shipped_calibration();
    let mut fitted: BTreeMap<String, String> = calibration
        .coefficients
        .iter()
        .map(|(name, fitted)| (name.clone(), fitted.value.to_string()))
        .collect();
    for (chip, _) in chips {
        for (quantity, value) in calibration.chips.get(&chip.name).into_iter().flatten() {
            fitted.insert(
                format!("{} {}", chip.name, quantity.name()),
                value.value.to_string(),
            );
        }
    }
    Inputs {
        workload: lines(of_workload),
        hardware: chips
            .iter()
            .map(|(chip, document)| HardwareInputs {
                chip: chip.name.clone(),
                fields: lines(of_chip(document)),
            })
            .collect(),
        calibration: lines(fitted),
    }
}

/// The kernels of a plan.
#[derive(Debug, Clone)]
pub(super) struct LoweredPlan {
    /// The plan.
    pub(super) plan: Plan,
    /// As a TPU runs it.
    tpu: Vec<Kernel>,
    /// As a GPU runs it.
    gpu: Vec<Kernel>,
}

impl LoweredPlan {
    /// The kernels on a chip, in order of execution; those of a row of the stage table have its label and stand together.
    pub(super) fn on(&self, chip: &Chip) -> &[Kernel] {
        match chip.architecture {
            Architecture::Tpu => &self.tpu,
            Architecture::Gpu => &self.gpu,
        }
    }
}

/// Kernels of every plan of a workload, for all architectures.
pub(super) fn lower_all(workload: &Workload) -> Result<Vec<LoweredPlan>, RunError> {
    let architectures = [Architecture::Tpu, Architecture::Gpu];
    let kernels =
        lower_plans(&workload.layer, &architectures, &workload.plans).map_err(|source| RunError::Build {
            name: workload.name.clone(),
            source,
        })?;
    let mut by_architecture = kernels.into_iter();
    let mut next = || by_architecture.next().unwrap_or_default();
    let (tpu, gpu) = (next(), next());
    let lowered = workload.plans.iter().zip(tpu.into_iter().zip(gpu));
    Ok(lowered
        .map(|(plan, (tpu, gpu))| LoweredPlan {
            plan: plan.clone(),
            tpu,
            gpu,
        })
        .collect())
}

/// Builds the graph of a layer, once for whatever `lower` makes of it.
pub(super) fn lower_with<T>(layer: &Layer, lower: impl FnOnce(&Lowerer<'_>) -> T) -> Result<T, BuildError> {
    let LayerGraph { graph, core } = mechanisms::build(layer)?;
    let padding = 1.0 - layer.tokens as f64 / layer.padded_tokens() as f64;
    let mut lowerer = Lowerer::new(&graph, core.value, padding);
    if layer.pass == Pass::Decode {
        let updates = graph.inputs().find(|(_, node)| node.name == mechanisms::LOG[1]);
        let updates = updates.map(|(node, _)| Value { node, port: 0 });
        for value in core.initial_state.into_iter().chain(updates) {
            lowerer = lowerer.with_value_columns_of(value);
        }
    }
    Ok(lower(&lowerer))
}

/// Kernels of a plan as an architecture runs it. What stands around the core is compiled on a TPU; on a GPU every row is a kernel, because norms and short
/// convolutions are kernels of libraries there.
pub(super) fn lower_for(architecture: Architecture, lowerer: &Lowerer<'_>, plan: &Plan) -> Vec<Kernel> {
    match architecture {
        Architecture::Tpu => lowerer.lower_compiled(plan),
        Architecture::Gpu => lowerer.lower(plan),
    }
}

/// Whether a chip multiplies in the formats of a layer: f32 products are decomposed into bf16 passes, every other format
/// needs a rate of its own.
///
/// # Errors
/// At the format of the activations, with the formats the chip has.
pub fn check_formats(layer: &Layer, chip: &Chip, document: &Document) -> Result<(), ConfigError> {
    check_formats_at("layer.activations", layer, chip, document)
}

/// As [`check_formats`], for a file that holds the format of the activations at `path`.
pub(super) fn check_formats_at(
    path: &str,
    layer: &Layer,
    chip: &Chip,
    document: &Document,
) -> Result<(), ConfigError> {
    let native = |dtype| chip.rows_per_cycle(dtype).is_some();
    // State and inverse of every layer are products in f32.
    let decomposes = native(Dtype::Bf16) || native(Dtype::F32);
    if decomposes && (layer.activations == Dtype::F32 || native(layer.activations)) {
        return Ok(());
    }
    let lacking = if decomposes {
        layer.activations
    } else {
        Dtype::Bf16
    };
    let has: Vec<String> = chip
        .matrix_unit
        .rows_per_cycle
        .keys()
        .map(|d| format!("`{d}`"))
        .collect();
    Err(document.error_at(
        path,
        format!(
            "`{}` has no matrix rate for `{lacking}`; it has {}",
            chip.name,
            has.join(", ")
        ),
    ))
}

/// What a plan is timed with.
#[derive(Debug, Clone, Copy)]
struct Measure<'a> {
    chip: &'a Chip,
    /// Residuals that make the intervals.
    intervals: &'a Calibration,
}

/// Every plan of a workload on a chip as it stands, without a baseline; `intervals` gives the residuals that make the intervals.
///
/// # Errors
/// As [`run`].
pub fn plan_times(
    workload: &Workload,
    chip: &Chip,
    intervals: &Calibration,
) -> Result<Vec<PlanResult>, RunError> {
    let measure = Measure { chip, intervals };
    lower_all(workload)?
        .iter()
        .map(|lowered| {
            let kernels = lowered.on(chip);
            time_plan(workload, &lowered.plan, kernels, None, measure, &mut Vec::new())
        })
        .collect()
}

fn time_plan(
    workload: &Workload,
    plan: &Plan,
    kernels: &[Kernel],
    baseline: Option<&[Kernel]>,
    Measure { chip, intervals }: Measure<'_>,
    warnings: &mut Vec<String>,
) -> Result<PlanResult, RunError> {
    let published = workload.published.as_ref().filter(|p| p.chip == chip.name);
    let peaks = PeakRates::of(chip);
    let mut stages: Vec<StageResult> = Vec::new();
    for kernel in kernels {
        let time = time_kernel(kernel, chip);
        let invariant = |what: String| RunError::Invariant {
            chip: chip.name.clone(),
            plan: plan.name.clone(),
            stage: kernel.label.clone(),
            what,
        };
        peaks
            .check(kernel, time.total_us, time.hbm_bytes)
            .map_err(invariant)?;
        for remark in &time.remarks {
            warnings.push(warning(remark, chip, plan, kernel));
        }
        let published_us = published.and_then(|p| {
            p.rows
                .iter()
                .find(|row| row.plan == plan.name && row.stage == kernel.label)
                .map(|row| row.time_us)
        });
        let interval = interval(kernel, &workload.layer, chip, time.total_us, intervals);
        let next = StageResult {
            low_us: interval.map(|interval| kernel.share * interval.low_us),
            high_us: interval.map(|interval| kernel.share * interval.high_us),
            interval_from: interval.map(|interval| interval.evidence),
            family: Some(family(kernel, &workload.layer, chip)),
            speedup_error_ratio: interval.map(|interval| interval.speedup_error_ratio),
            ..stage_result(kernel, &time, published_us)
        };
        match stages.last_mut() {
            Some(row) if row.stage == next.stage => *row = joined(row, &next),
            _ => stages.push(next),
        }
    }
    let total_us: f64 = stages.iter().map(|s| s.time_us).sum();
    let of_pass = |kernel: &Kernel| kernel.share * time_kernel(kernel, chip).total_us;
    let baseline_us = baseline.map(|kernels| kernels.iter().map(of_pass).sum::<f64>());
    let published_us = stages
        .iter()
        .map(|s| s.published_us)
        .sum::<Option<f64>>()
        .filter(|_| published.is_some());
    Ok(PlanResult {
        name: plan.name.clone(),
        total_us,
        // Errors of the stages go together, as far as is known.
        low_us: stages.iter().map(|s| s.low_us).sum(),
        high_us: stages.iter().map(|s| s.high_us).sum(),
        speedup_over_baseline: baseline_us.map(|base| base / total_us),
        baseline_us,
        published_us,
        token: token(&workload.layer, kernels, total_us),
        stages,
    })
}

/// One token of a decode step or of a tree; none of a forward pass.
fn token(layer: &Layer, kernels: &[Kernel], step_us: f64) -> Option<TokenResult> {
    if layer.pass == Pass::Forward {
        return None;
    }
    let tokens = (layer.batch * layer.tokens) as u64;
    let share = |transfers: fn(&Kernel) -> &[Transfer]| {
        let of = |role: Role| -> f64 {
            let of_kernel = |kernel| -> u64 {
                let all = transfers(kernel).iter();
                all.filter(|t| t.role == role).map(|t| t.bytes).sum()
            };
            let bytes: f64 = kernels
                .iter()
                .map(|kernel| kernel.share * of_kernel(kernel) as f64)
                .sum();
            bytes / tokens as f64
        };
        TokenBytes {
            weights: of(Role::Weight),
            state: of(Role::State),
            cache: of(Role::Cache),
            log: of(Role::Log),
            activations: of(Role::Activation),
        }
    };
    Some(TokenResult {
        tokens,
        time_us: step_us / tokens as f64,
        read_bytes: share(|kernel| &kernel.reads),
        written_bytes: share(|kernel| &kernel.writes),
    })
}

/// The 80 % interval of the time of a launch of a layer.
#[must_use]
pub fn interval(
    kernel: &Kernel,
    layer: &Layer,
    chip: &Chip,
    time_us: f64,
    calibration: &Calibration,
) -> Option<Interval> {
    calibration.interval(&family(kernel, layer, chip), chip, time_us)
}

/// Family of measured kernels that a launch of a layer is closest to: its residuals make the interval.
pub(super) fn family(kernel: &Kernel, layer: &Layer, chip: &Chip) -> String {
    predict::family(operation(kernel, layer), chip.architecture)
}

/// The measured operation that a kernel of a layer counts as.
pub(super) fn operation(kernel: &Kernel, layer: &Layer) -> &'static str {
    let mut stages = kernel.ops.iter().map(|op| op.stage);
    let dense = |stage: Stage| {
        matches!(
            stage,
            Stage::Projections | Stage::OutputNorm | Stage::OutputProjection
        )
    };
    if stages.clone().any(|stage| stage == Stage::Attention) {
        "flash_attention"
    } else if !kernel.ops.is_empty() && stages.all(dense) {
        "matmul"
    } else if layer.pass == Pass::Decode {
        "gdn_decode"
    } else {
        "gdn_chunk"
    }
}

/// The rates that no kernel of a chip exceeds.
#[derive(Debug, Clone, Copy)]
pub(super) struct PeakRates {
    /// Matrix FLOP/s of each format, where it has a rate.
    matrix: [Option<f64>; Dtype::ALL.len()],
    /// The largest of them.
    fastest: f64,
    vector: f64,
    transcendental: f64,
    hbm: f64,
}

impl PeakRates {
    pub(super) fn of(chip: &Chip) -> Self {
        let peak = |dtype: Dtype| chip.matrix_flops_per_second(dtype).map(FlopsPerSecond::get);
        let own = chip
            .matrix_unit
            .rows_per_cycle
            .keys()
            .filter_map(|&dtype| peak(dtype));
        PeakRates {
            matrix: Dtype::ALL.map(peak),
            fastest: own.fold(0.0, f64::max),
            vector: chip.vector_ops_per_second().get(),
            transcendental: chip.transcendentals_per_second().get(),
            hbm: chip.hbm_bandwidth_per_device().get(),
        }
    }

    /// No rate above its roof, no negative time.
    pub(super) fn check(&self, kernel: &Kernel, total_us: f64, hbm_bytes: u64) -> Result<(), String> {
        let seconds = total_us * 1e-6;
        if !(total_us.is_finite() && total_us > 0.0) {
            return Err(format!("time is {total_us} us"));
        }
        let roof = |name: &str, done: f64, peak: f64| {
            // One part in a thousand million covers the rounding of sums.
            if done > peak * seconds * (1.0 + 1e-9) {
                Err(format!(
                    "{name}: {done:.4e} in {total_us:.4} us is above the roof of {peak:.4e} per second"
                ))
            } else {
                Ok(())
            }
        };
        let work = &kernel.work;
        roof("matrix FLOPs", work.matrix_flops.total() as f64, self.fastest)?;
        for (dtype, flops) in work.matrix_flops.iter() {
            if let Some(peak) = self.matrix[dtype as usize] {
                roof(dtype.name(), flops as f64, peak)?;
            }
        }
        roof("vector operations", work.vector_ops.total() as f64, self.vector)?;
        roof(
            "transcendentals",
            work.transcendentals as f64,
            self.transcendental,
        )?;
        roof("HBM bytes", hbm_bytes as f64, self.hbm)
    }
}

fn stage_result(kernel: &Kernel, time: &KernelTime, published_us: Option<f64>) -> StageResult {
    let share = |part: f64| (part / time.total_us).min(1.0);
    // Of a kernel that only some steps launch, what an average step has.
    let us = |us: f64| kernel.share * us;
    let count = |count: u64| (kernel.share * count as f64).round() as u64;
    StageResult {
        stage: kernel.label.clone(),
        title: kernel.title.clone(),
        time_us: us(time.total_us),
        low_us: None,
        high_us: None,
        interval_from: None,
        family: None,
        speedup_error_ratio: None,
        bound: time.bound,
        next_bound: time.next_bound,
        mxu_us: us(time.mxu_us),
        vpu_us: us(time.vpu_us),
        transcendental_us: us(time.transcendental_us),
        cross_lane_us: us(time.cross_lane_us),
        vmem_us: us(time.vmem_us),
        hbm_us: us(time.hbm_us),
        latency_us: us(time.latency_us),
        launch_us: us(time.launch_us),
        flops: count(kernel.work.matrix_flops.total()),
        vector_ops: count(kernel.work.vector_ops.total()),
        transcendentals: count(kernel.work.transcendentals),
        hbm_bytes: count(time.hbm_bytes),
        mxu_busy: share(time.mxu_us),
        vpu_busy: share(time.vpu_us),
        hbm_busy: share(time.hbm_us),
        mxu_lane: time.mxu_lane,
        mxu_achieved: time.mxu_achieved,
        padding: kernel.padding,
        vmem_bytes: time.working_set,
        grid_parallel: time.grid_parallel,
        grid_sequential: kernel.grid.sequential,
        published_us,
    }
}

/// A row of two kernels, one after the other. What cannot be added up is that of the longer one.
fn joined(first: &StageResult, second: &StageResult) -> StageResult {
    let longer = if second.time_us > first.time_us {
        second
    } else {
        first
    };
    let time_us = first.time_us + second.time_us;
    let sum = |of: fn(&StageResult) -> f64| of(first) + of(second);
    let share = |of: fn(&StageResult) -> f64| (sum(of) / time_us).min(1.0);
    let both = |a: Option<f64>, b: Option<f64>| Some(a? + b?);
    let mxu_us = sum(|row| row.mxu_us);
    StageResult {
        stage: first.stage.clone(),
        title: first.title.clone(),
        time_us,
        low_us: both(first.low_us, second.low_us),
        high_us: both(first.high_us, second.high_us),
        // The weaker of both.
        interval_from: first
            .interval_from
            .zip(second.interval_from)
            .map(|(a, b)| a.max(b)),
        family: longer.family.clone(),
        speedup_error_ratio: first
            .speedup_error_ratio
            .zip(second.speedup_error_ratio)
            .map(|(a, b)| a.max(b)),
        bound: longer.bound,
        next_bound: longer.next_bound,
        mxu_us,
        vpu_us: sum(|row| row.vpu_us),
        transcendental_us: sum(|row| row.transcendental_us),
        cross_lane_us: sum(|row| row.cross_lane_us),
        vmem_us: sum(|row| row.vmem_us),
        hbm_us: sum(|row| row.hbm_us),
        latency_us: sum(|row| row.latency_us),
        launch_us: sum(|row| row.launch_us),
        flops: first.flops + second.flops,
        vector_ops: first.vector_ops + second.vector_ops,
        transcendentals: first.transcendentals + second.transcendentals,
        hbm_bytes: first.hbm_bytes + second.hbm_bytes,
        mxu_busy: share(|row| row.mxu_us),
        vpu_busy: share(|row| row.vpu_us),
        hbm_busy: share(|row| row.hbm_us),
        mxu_lane: if mxu_us > 0.0 {
            sum(|row| row.mxu_lane * row.mxu_us) / mxu_us
        } else {
            0.0
        },
        mxu_achieved: sum(|row| row.mxu_achieved * row.time_us) / time_us,
        padding: first.padding.max(second.padding),
        vmem_bytes: first.vmem_bytes.max(second.vmem_bytes),
        grid_parallel: longer.grid_parallel,
        grid_sequential: longer.grid_sequential,
        published_us: first.published_us,
    }
}

fn warning(remark: &Remark, chip: &Chip, plan: &Plan, kernel: &Kernel) -> String {
    let place = format!("{} {} {}", chip.name, plan.name, kernel.label);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    match *remark {
        Remark::ValueColumnsSplit {
            parts,
            needed,
            capacity,
        } => format!(
            "{place}: a working set of {:.2} MiB does not fit the {:.2} MiB on chip, so the value columns are split over {parts} programs that each build \
             the Gram and inverse again; use the unfused plan or a smaller state",
            mib(needed),
            mib(capacity)
        ),
        Remark::DoesNotFit { needed, capacity } => format!(
            "{place}: a working set of {:.2} MiB does not fit the {:.2} MiB on chip however it is split; the time is a lower bound, use the unfused plan or a smaller chunk",
            mib(needed),
            mib(capacity)
        ),
        Remark::CoresIdle { used, cores } => format!(
            "{place}: only {used} of {cores} cores have a head to work on; use a larger batch, or a plan whose kernels run over chunks as well"
        ),
    }
}

pub(super) fn chip_result(chip: &Chip, plans: Vec<PlanResult>) -> ChipResult {
    let mut matrix: Vec<Roof> = chip
        .matrix_unit
        .rows_per_cycle
        .keys()
        .filter_map(|&dtype| {
            chip.matrix_flops_per_second(dtype).map(|rate| Roof {
                name: format!("mxu {dtype}"),
                per_second: rate.get(),
            })
        })
        .collect();
    matrix.sort_by(|a, b| b.per_second.total_cmp(&a.per_second));
    let cores = match (chip.architecture, chip.cores_per_chip) {
        (Architecture::Tpu, 1) => "core",
        (Architecture::Tpu, _) => "cores",
        (Architecture::Gpu, 1) => "multiprocessor",
        (Architecture::Gpu, _) => "multiprocessors",
    };
    let device = if chip.cores_per_device == chip.cores_per_chip {
        format!("the whole chip, {} {cores}", chip.cores_per_chip)
    } else {
        format!(
            "{} of the {} {cores} of a chip",
            chip.cores_per_device, chip.cores_per_chip
        )
    };
    ChipResult {
        name: chip.name.clone(),
        title: chip.title.clone(),
        cores: chip.cores_per_device,
        device,
        clock_ghz: chip.clock().get() / 1e9,
        clock_state: chip.clock.name.clone(),
        roofs: Roofs {
            hbm_datasheet: chip.hbm_bandwidth_per_device().get(),
            hbm_achievable: chip.achievable_hbm_bandwidth_per_device().get(),
            matrix,
            vector: Roof {
                name: "vpu".to_owned(),
                per_second: chip.vector_ops_per_second().get(),
            },
            transcendental: Roof {
                name: "transcendental".to_owned(),
                per_second: chip.transcendentals_per_second().get(),
            },
            on_chip: Roof {
                name: match chip.architecture {
                    Architecture::Tpu => "VMEM",
                    Architecture::Gpu => "shared memory",
                }
                .to_owned(),
                per_second: chip.on_chip_bandwidth_per_device().get(),
            },
            issue_efficiency: chip.issue_efficiency(true),
        },
        coverage: coverage(chip, &plans),
        sources: sources(chip),
        plans,
    }
}

/// Where the numbers that set each bound come from.
fn sources(chip: &Chip) -> Vec<NumberSource> {
    const CYCLES: [Bound; 6] = [
        Bound::Mxu,
        Bound::Vpu,
        Bound::Transcendental,
        Bound::CrossLane,
        Bound::Vmem,
        Bound::Latency,
    ];
    let (matrix, vector) = (&chip.matrix_unit.provenance, &chip.vector_unit.provenance);
    let latency = &chip.latency.provenance;
    let described: [(&str, &HardwareSource, &[Bound]); 14] = [
        ("clock", &chip.clock.provenance, &CYCLES),
        ("matrix arrays", matrix.of("count"), &[Bound::Mxu]),
        ("matrix rate", matrix.of("rows_per_cycle"), &[Bound::Mxu]),
        ("ALU slots", vector.of("slots.alu"), &[Bound::Vpu]),
        (
            "transcendental slots",
            vector.of("slots.transcendental"),
            &[Bound::Transcendental],
        ),
        (
            "cross-lane slots",
            vector.of("slots.cross_lane"),
            &[Bound::CrossLane],
        ),
        ("load and store slots", vector.of("slots.load"), &[Bound::Vmem]),
        (
            "latency of a matrix product",
            latency.of("matrix_result_cycles"),
            &[Bound::Latency],
        ),
        (
            "latency of a vector operation",
            latency.of("vector_cycles"),
            &[Bound::Latency],
        ),
        ("on-chip capacity", &chip.on_chip.provenance, &[]),
        ("HBM bandwidth", &chip.hbm.provenance, &[Bound::Hbm]),
        (
            "achievable HBM bandwidth",
            &chip.hbm.achievable_provenance,
            &[Bound::Hbm],
        ),
        ("launch time", &chip.launch_provenance, &[Bound::Launch]),
        ("core count", &chip.cores_provenance, &[]),
    ];
    let calibration = hardware::shipped_calibration();
    let fitted = |number: &str, sets: &[Bound]| NumberSource {
        number: number.to_owned(),
        kind: Kind::Fitted,
        source: format!("{} measured rows of this and other chips", calibration.rows),
        sets: sets.to_vec(),
    };
    described
        .into_iter()
        .map(|(number, provenance, sets)| NumberSource {
            number: number.to_owned(),
            kind: provenance.kind,
            source: provenance.source.clone(),
            sets: sets.to_vec(),
        })
        .chain([
            fitted("issue efficiency", &CYCLES),
            fitted("grid step", &[Bound::Launch]),
        ])
        .collect()
}

/// What the times rest on.
fn coverage(chip: &Chip, plans: &[PlanResult]) -> String {
    let blocks = [
        ("clock", chip.clock.provenance.kind),
        ("matrix unit", chip.matrix_unit.provenance.kind),
        ("vector unit", chip.vector_unit.provenance.kind),
        ("latencies", chip.latency.provenance.kind),
        ("on-chip memory", chip.on_chip.provenance.kind),
        ("HBM", chip.hbm.provenance.kind),
        ("achievable bandwidth", chip.hbm.achievable_provenance.kind),
        ("launch", chip.launch_provenance.kind),
    ];
    let of = |kind: Kind| {
        let names: Vec<&str> = blocks
            .iter()
            .filter(|(_, k)| *k == kind)
            .map(|(name, _)| *name)
            .collect();
        names.join(", ")
    };
    let mut parts = vec![format!(
        "coefficients fitted to {} measured rows",
        hardware::shipped_calibration().rows
    )];
    let mut by_evidence: BTreeMap<Option<Evidence>, Vec<&str>> = BTreeMap::new();
    for stage in plans.iter().flat_map(|plan| &plan.stages) {
        let of = by_evidence.entry(stage.interval_from).or_default();
        if !of.contains(&stage.stage.as_str()) {
            of.push(&stage.stage);
        }
    }
    parts.extend(by_evidence.iter().map(|(evidence, stages)| match evidence {
        Some(evidence) => format!("interval of {} from {}", stages.join(", "), evidence.words()),
        None => format!(
            "no interval of {}, nothing comparable was measured",
            stages.join(", ")
        ),
    }));
    for (kind, word) in [
        (Kind::Fitted, "fitted"),
        (Kind::Measured, "measured"),
        (Kind::Published, "published"),
        (Kind::Derived, "derived"),
        (Kind::Assumed, "assumed"),
    ] {
        let names = of(kind);
        if !names.is_empty() {
            parts.push(format!("{word}: {names}"));
        }
    }
    parts.join("; ")
}

fn compare(workload: &Workload, chips: &[ChipResult]) -> Option<PublishedComparison> {
    let published = workload.published.as_ref()?;
    let chip = chips.iter().find(|chip| chip.name == published.chip)?;
    let row = |plan: &str, stage: &str, published_us: f64, predicted_us: f64| PublishedRow {
        plan: plan.to_owned(),
        stage: stage.to_owned(),
        published_us,
        predicted_us,
        error_percent: 100.0 * (predicted_us / published_us - 1.0),
    };
    let mut rows = Vec::new();
    for plan in &chip.plans {
        for stage in &plan.stages {
            if let Some(published_us) = stage.published_us {
                rows.push(row(&plan.name, &stage.stage, published_us, stage.time_us));
            }
        }
        if let Some(published_us) = plan.published_us {
            rows.push(row(&plan.name, "total", published_us, plan.total_us));
        }
    }
    (!rows.is_empty()).then(|| PublishedComparison {
        source: published.source.clone(),
        chip: chip.name.clone(),
        rows,
    })
}

/// Share of padded rows above which a run says so.
const NOTABLE_PADDING: f64 = 0.1;

/// A sentence about rows that only pad sequences to whole chunks or to the allocated rows.
fn padding_warning(layer: &Layer) -> Option<String> {
    let (tokens, rows) = (layer.tokens, layer.padded_tokens());
    let share = 1.0 - tokens as f64 / rows as f64;
    if share <= NOTABLE_PADDING {
        return None;
    }
    let steps = if layer.is_attention() {
        ("block_q", "blocks")
    } else {
        ("chunk", "chunks")
    };
    let whole: usize = match layer.sequences.len() {
        0 => rows,
        _ => layer
            .sequences
            .iter()
            .map(|n| n.next_multiple_of(layer.chunk))
            .sum(),
    };
    let advice = if whole < rows {
        format!(
            "whole {} need {whole} rows, the rest is `padded_rows`; use a smaller {}, or fewer rows",
            steps.1, steps.0
        )
    } else {
        format!("use a smaller {}, or longer sequences", steps.0)
    };
    let sequences = match layer.sequences.len() {
        0 => String::new(),
        n => format!(" of {n} sequences"),
    };
    Some(format!(
        "the core works on {rows} rows for {tokens} tokens{sequences}: {:.1} % are padding at {} {}; {advice}",
        100.0 * share,
        steps.0,
        layer.chunk
    ))
}

/// RMS error of the output, relative, above which a run warns: ten times what bf16 activations cost.
const LARGE_ERROR: f64 = 0.05;

fn numeric_warnings(numeric: Option<&NumericResult>) -> Vec<String> {
    let Some(numeric) = numeric else { return Vec::new() };
    let mut warnings = Vec::new();
    if let (Some(worst), Some(limit)) = (numeric.overflow_exponent, numeric.overflow_limit)
        && worst > limit
        && numeric.non_finite.is_none()
    {
        warnings.push(format!(
                "the gate allows Gram operands of exp({worst:.0}), beyond the largest finite number exp({limit:.1}); these inputs stay below, others need not: \
                 use a smaller chunk, a tighter decay bound, or a Gram of differences (`tile_masks`, `pivot_causal`, `scalar_mask`)"
            ));
    }
    if numeric.non_finite.is_none() && numeric.output_rms_error > LARGE_ERROR {
        warnings.push(format!(
            "the output errs by {:.0} % of its size against the recurrence; use `inverse: block_doubling` with `inverse_precision: high`, or an f32 state",
            100.0 * numeric.output_rms_error
        ));
    }
    if let Some(node) = &numeric.non_finite {
        warnings.push(format!(
            "the numeric check met a value that is not finite in `{node}`: the kernel would return it on the chip; use a Gram without a pivot, a smaller chunk or a tighter decay bound"
        ));
    }
    warnings
}

/// The answer in one line: the fastest plan on the chip the published values hold for, or on the first chip.
fn headline(workload: &Workload, result: &RunResult) -> String {
    let wanted = workload.published.as_ref().map(|p| p.chip.as_str());
    let chip = result
        .chips
        .iter()
        .find(|c| Some(c.name.as_str()) == wanted)
        .or(result.chips.first());
    let Some(chip) = chip else { return String::new() };
    let Some(best) = chip.plans.iter().min_by(|a, b| a.total_us.total_cmp(&b.total_us)) else {
        return String::new();
    };
    let Some(longest) = best.stages.iter().max_by(|a, b| a.time_us.total_cmp(&b.time_us)) else {
        return String::new();
    };
    let speedup = match (best.speedup_over_baseline, &result.baseline) {
        (Some(speedup), Some(name)) => format!(
            ", {speedup:.2}x over {name} ({} against {})",
            best.name, best.name
        ),
        _ => String::new(),
    };
    format!(
        "{} on {} ({}, {:.2} GHz): {:.3} ms {}{}; {} takes {:.0} %, bound by {}, next by {}{speedup}",
        result.name,
        chip.name,
        chip.device,
        chip.clock_ghz,
        best.total_us / 1e3,
        best.name,
        interval_words(best.low_us, best.high_us),
        longest.stage,
        100.0 * longest.time_us / best.total_us,
        longest.bound,
        longest.next_bound,
    )
}

/// ` (80 % interval 1.2 to 2.3 ms)`, or that there is none.
pub(crate) fn interval_words(low_us: Option<f64>, high_us: Option<f64>) -> String {
    match (low_us, high_us) {
        (Some(low), Some(high)) => format!(" (80 % interval {:.3} to {:.3} ms)", low / 1e3, high / 1e3),
        _ => " (no interval)".to_owned(),
    }
}
