//! The core of a decode step (gates to output) as the kernels a chip launches.

use serde::Serialize;

use crate::graph::{BuildError, Stage};
use crate::hardware::{Architecture, Chip};
use crate::kernels::{Kernel, Plan};
use crate::layer::{DeltaLog, Layer, Merge};
use crate::mechanisms::LOG;
use crate::study::interval::{MERGE, at, lower_merge, lower_step};

/// Value columns of a program of a GPU kernel, of a step without entries to replay and of one with some. Source: the widths that the Triton kernels of
/// `tools/gpu/deltalog` are fastest with in most measured steps of 64 and more sequences (`measurements/h200_deltalog.json`).
const VALUE_TILES: [u64; 2] = [64, 32];

/// How the log is replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Replay {
    /// In one kernel, whose programs each compute the coefficients of the log.
    Whole,
    /// Coefficients in a kernel of their own, then this many programs per state.
    Split(u64),
}

impl Replay {
    fn plan(self) -> Option<Plan> {
        Plan::decode(match self {
            Replay::Whole => "fused",
            Replay::Split(_) => Plan::SPLIT,
        })
    }
}

/// What is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// A step without a log.
    Eager,
    /// A step after this many entries that appends one.
    Append(usize),
    /// A step after this many entries that writes the base with its own update in it.
    AppendMerge(usize),
    /// This many entries written into the base, without a token.
    Merge(usize),
}

impl Step {
    /// Entries that are replayed.
    const fn entries(self) -> usize {
        match self {
            Step::Eager => 0,
            Step::Append(entries) | Step::AppendMerge(entries) | Step::Merge(entries) => entries,
        }
    }

    /// The layer whose graph has this step; lengths beyond the interval of the layer's log lengthen it.
    fn layer(self, layer: &Layer, log: DeltaLog) -> Layer {
        let log = match self {
            Step::Eager => None,
            Step::Append(entries) => Some(DeltaLog {
                interval: log.interval.max(entries + 2),
                merge: Merge::Fused,
                position: entries,
                ..log
            }),
            Step::AppendMerge(entries) => Some(DeltaLog {
                interval: entries + 1,
                merge: Merge::Fused,
                position: entries,
                ..log
            }),
            Step::Merge(entries) => Some(DeltaLog {
                interval: entries.max(1),
                merge: Merge::Separate,
                position: 0,
                ..log
            }),
        };
        Layer { log, ..layer.clone() }
    }
}

/// The plan of the core: what lies between the gates and the output.
fn core(replay: Replay) -> Option<Plan> {
    let mut plan = replay.plan()?;
    plan.groups
        .retain(|group| group.last >= Stage::Gates && group.last <= Stage::Output);
    for group in &mut plan.groups {
        group.first = group.first.max(Stage::Gates);
    }
    Some(plan)
}

/// Kernels of one step of the core on an architecture.
///
/// # Errors
/// Where the graph cannot be built.
pub(super) fn kernels(
    layer: &Layer,
    log: DeltaLog,
    step: Step,
    replay: Replay,
    architecture: Architecture,
) -> Result<Vec<Kernel>, BuildError> {
    let Some(plan) = core(replay) else {
        return Ok(Vec::new());
    };
    let plans = [plan];
    let layer = step.layer(layer, log);
    let lowered = match step {
        Step::Merge(entries) => lower_merge(&layer, entries, &[architecture], &plans)?,
        Step::Eager | Step::Append(_) | Step::AppendMerge(_) => lower_step(&layer, &[architecture], &plans)?,
    };
    let mut kernels: Vec<Kernel> = lowered.into_iter().flatten().flatten().collect();
    for kernel in &mut kernels {
        cut(kernel, &layer, step, replay, architecture);
    }
    Ok(kernels)
}

/// Cuts a kernel into programs: on a GPU a program works on some value columns of one state, on a TPU on whole states but in split replay; a kernel of coefficients
/// works on whole states.
fn cut(kernel: &mut Kernel, layer: &Layer, step: Step, replay: Replay, architecture: Architecture) {
    let gpu = architecture == Architecture::Gpu;
    if gpu {
        kernel.units_per_program = Some(1);
    }
    let columns = layer.value_dim as u64;
    let holds_state = kernel.label == MERGE || kernel.ops.iter().any(|op| op.stage == Stage::StateScan);
    if !holds_state {
        return;
    }
    let tile = match replay {
        Replay::Whole if gpu => VALUE_TILES[usize::from(step.entries() > 0)].min(columns),
        Replay::Whole => return,
        Replay::Split(programs) => columns.div_ceil(programs.max(1)),
    };
    kernel.implementation.value_tile = Some(tile);
    if !gpu {
        return;
    }
    kernel.implementation.tile_columns = Some(tile);
    // What is not cut by value columns is fetched by every program; the level-2 cache serves the repeats.
    let by_column = |name: &str| name == STATE || name == LOG[1] || name == VALUES;
    let shared: u64 = kernel
        .reads
        .iter()
        .filter(|transfer| !by_column(&transfer.name))
        .map(|transfer| transfer.bytes)
        .sum();
    kernel.implementation.cache_bytes = shared as f64 * (columns.div_ceil(tile) - 1) as f64;
}

/// Names that the graphs of the mechanisms give the stored state and the values of a token.
const STATE: &str = "state";
const VALUES: &str = "V_rounded";

/// The launches of one step on a chip.
///
/// # Errors
/// Where a graph cannot be built.
pub(in crate::study) fn launches_of_step(
    layer: &Layer,
    log: DeltaLog,
    step: Step,
    replay: Replay,
    chip: &Chip,
) -> Result<Vec<Kernel>, BuildError> {
    kernels(layer, log, step, replay, chip.architecture)
}

/// The launches of an interval of the layer's log, each with its share of the steps.
///
/// # Errors
/// Where a graph cannot be built.
pub(in crate::study) fn launches_of_interval(
    layer: &Layer,
    log: DeltaLog,
    replay: Replay,
    architecture: Architecture,
) -> Result<Vec<Kernel>, BuildError> {
    let mut launches = Vec::new();
    for step in steps(log) {
        launches.extend(kernels(layer, log, step, replay, architecture)?);
    }
    let share = 1.0 / log.interval.max(1) as f64;
    for kernel in &mut launches {
        kernel.share = share;
    }
    Ok(launches)
}

/// The steps of an interval, a merge of its own last.
pub(super) fn steps(log: DeltaLog) -> Vec<Step> {
    let appends = match log.merge {
        Merge::Fused => log.interval.saturating_sub(1),
        Merge::Separate => log.interval,
    };
    let last = match log.merge {
        Merge::Fused => Step::AppendMerge(appends),
        Merge::Separate => Step::Merge(appends),
    };
    (0..appends).map(Step::Append).chain([last]).collect()
}

/// Bytes of a step by what they belong to.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Part {
    /// The base, or the state of an eager step.
    pub base_bytes: f64,
    /// Entries of the log.
    pub log_bytes: f64,
    /// Operands of the token, and its output.
    pub token_bytes: f64,
}

impl Part {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.base_bytes + self.log_bytes + self.token_bytes
    }
}

/// Bytes read from and written to device memory.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Traffic {
    /// Read.
    pub read: Part,
    /// Written.
    pub written: Part,
}

impl Traffic {
    /// Of some kernels of one step, whose graph writes these bytes of base and log.
    pub(super) fn of(kernels: &[Kernel], [base, log]: [u64; 2]) -> Self {
        let mut traffic = Traffic {
            written: Part {
                base_bytes: base as f64,
                log_bytes: log as f64,
                token_bytes: 0.0,
            },
            ..Traffic::default()
        };
        let mut written = 0;
        for kernel in kernels {
            for transfer in &kernel.reads {
                let bytes = transfer.bytes as f64;
                if transfer.name.starts_with(STATE) {
                    traffic.read.base_bytes += bytes;
                } else if LOG.contains(&transfer.name.as_str()) {
                    traffic.read.log_bytes += bytes;
                } else {
                    traffic.read.token_bytes += bytes;
                }
            }
            written += kernel.write_bytes();
        }
        traffic.written.token_bytes = written.saturating_sub(base + log) as f64;
        traffic
    }

    /// Adds a share of another one.
    pub(super) fn add(&mut self, other: &Traffic, share: f64) {
        for (sum, part) in [(&mut self.read, &other.read), (&mut self.written, &other.written)] {
            sum.base_bytes += share * part.base_bytes;
            sum.log_bytes += share * part.log_bytes;
            sum.token_bytes += share * part.token_bytes;
        }
    }

    /// Both directions.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.read.total() + self.written.total()
    }
}

/// Bytes of base and log that the graph of a step writes.
///
/// # Errors
/// Where the graph cannot be built.
pub(super) fn written(layer: &Layer, log: DeltaLog, step: Step) -> Result<[u64; 2], BuildError> {
    let layer = step.layer(layer, log);
    let graph = match step {
        Step::Merge(entries) => match crate::mechanisms::build_merge(&layer, entries)? {
            Some(merge) => merge.graph,
            None => return Ok([0, 0]),
        },
        Step::Eager | Step::Append(_) | Step::AppendMerge(_) => crate::mechanisms::build(&layer)?.graph,
    };
    let bytes = |of: &dyn Fn(&str) -> bool| {
        let outputs = graph.outputs().iter().filter(|(name, _)| of(name));
        outputs.map(|(_, value)| graph.ty(*value).bytes()).sum::<u64>()
    };
    Ok([
        bytes(&|name| name.starts_with(STATE)),
        bytes(&|name| LOG.contains(&name)),
    ])
}

/// The layer at the first step of an interval of `interval` steps.
pub(super) fn with_interval(layer: &Layer, log: DeltaLog, interval: usize) -> (Layer, DeltaLog) {
    let log = DeltaLog { interval, ..log }.at(0);
    (at(layer, log, 0), log)
}
