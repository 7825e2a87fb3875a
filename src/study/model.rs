//! `run` on a model: every kind of block timed once for every size, times and memory summed over its blocks.
//!
//! Mixers, norms, dense networks, routers and the head are lowered from their graphs like the stages of a layer. The products of the chosen experts take the grouped
//! products of the kernel library, with the extents of the graph: those kernels were measured. Where a TPU runs them, rows are first copied into the order of the experts.

use super::interval::lower_plans;
use super::predict;
use super::run::{
    Chips, PeakRates, RunError, check_formats_at, chip_result, family, interval_words, lower_for,
};
use crate::config::{ConfigError, Document};
use crate::graph::{BuildError, Graph, Role, Stage};
use crate::hardware::{self, Architecture, Chip};
use crate::kernels::library::{self, CaseError, Formats, Params};
use crate::kernels::{Group, Kernel, Lowerer, Plan, Program};
use crate::layer::{Layer, Pass};
use crate::mechanisms::{self, Granularity};
use crate::model::graphs::{self, BlockFormats, Routing, weights};
use crate::model::{Block, DecodePoint, Experts, FeedForward, Model, PrefillPoint};
use crate::report::model::{
    BlockResult, LaunchResult, MemoryResult, ModelChip, ModelResult, PartResult, PointResult, PublishedTime,
    SCHEMA, gib,
};
use crate::report::result::Provenance;
use crate::timing::time_kernel;

/// What a run of a model is asked for.
#[derive(Debug)]
pub struct ModelRequest<'a> {
    /// The model and its file.
    pub model: &'a (Model, Document),
    /// Chips, in the order of the report.
    pub chips: &'a Chips,
    /// Overrides as the user wrote them.
    pub overrides: Vec<String>,
}

/// Why a run of a model has no result.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// As for one layer.
    #[error(transparent)]
    Run(#[from] RunError),
    /// An extent that no graph has.
    #[error("cannot build the graph of `{part}`: {source}")]
    Build {
        /// Part of the model.
        part: String,
        /// The operation.
        source: BuildError,
    },
    /// Counts beyond what can be added up, or a kernel that the chip does not have.
    #[error("cannot build the kernels of `{part}`: {source}")]
    Kernels {
        /// Part of the model.
        part: String,
        /// Why.
        source: CaseError,
    },
}

impl From<ConfigError> for ModelError {
    fn from(error: ConfigError) -> Self {
        ModelError::Run(RunError::Config(error))
    }
}

/// Launches of a part, with the family of measured kernels each counts as one of.
#[derive(Debug, Default)]
struct Launches {
    kernels: Vec<(Kernel, String)>,
    /// Rows of the expert products that are no padding, and all of them.
    expert_rows: Option<[f64; 2]>,
}

impl Launches {
    fn extend(&mut self, kernels: Vec<Kernel>, family: &str) {
        self.kernels
            .extend(kernels.into_iter().map(|kernel| (kernel, family.to_owned())));
    }

    /// Most bytes that one launch reads and writes beside what stays in device memory: weights, states, caches and logs.
    fn activation_bytes(&self) -> u64 {
        let of_kernel = |kernel: &Kernel| {
            kernel
                .reads
                .iter()
                .chain(&kernel.writes)
                .filter(|transfer| transfer.role == Role::Activation)
                .map(|transfer| transfer.bytes)
                .sum::<u64>()
        };
        self.kernels
            .iter()
            .map(|(kernel, _)| of_kernel(kernel))
            .max()
            .unwrap_or(0)
    }
}

/// The stages of a block of a model as a plan: one launch for each.
fn plan_of(stages: &[(Stage, Stage)]) -> Plan {
    Plan {
        name: "block".to_owned(),
        groups: stages
            .iter()
            .map(|&(first, last)| Group::of(first, last, None))
            .collect(),
    }
}

/// Kernels of some stages of a block. A TPU runs what XLA fuses of them; a GPU runs every stage as a kernel.
fn lowered(graph: &Graph, chip: &Chip, stages: &[Stage]) -> Vec<Kernel> {
    let Some((_, last)) = graph.outputs().last() else {
        return Vec::new();
    };
    let lowerer = Lowerer::new(graph, *last, 0.0);
    let spans: Vec<(Stage, Stage)> = match (chip.architecture, stages) {
        (Architecture::Tpu, [first, .., last]) => vec![(*first, *last)],
        _ => stages.iter().map(|&stage| (stage, stage)).collect(),
    };
    lower_for(chip.architecture, &lowerer, &plan_of(&spans))
}

/// Measures parts of a model on one chip.
struct Bench<'a> {
    chip: &'a Chip,
    formats: BlockFormats,
    peaks: PeakRates,
}

impl Bench<'_> {
    fn family(&self, op: &str) -> String {
        predict::family(op, self.chip.architecture)
    }

    fn of_graph(
        &self,
        part: &str,
        graph: Result<Graph, BuildError>,
        stages: &[Stage],
        op: &str,
    ) -> Result<Launches, ModelError> {
        let graph = graph.map_err(|source| ModelError::Build {
            part: part.to_owned(),
            source,
        })?;
        let mut launches = Launches::default();
        launches.extend(lowered(&graph, self.chip, stages), &self.family(op));
        Ok(launches)
    }

    fn mixer(&self, block: &Block, layer: &Layer) -> Result<Launches, ModelError> {
        let tpu = self.chip.architecture == Architecture::Tpu;
        let choice = match layer.pass {
            // A block of a model has no trees of tokens.
            Pass::Forward | Pass::Verify => &block.plan,
            Pass::Decode => &block.decode_plan,
        };
        let name = if tpu { &choice.tpu } else { &choice.gpu };
        // A program of a GPU works on one head and one chunk.
        let program = if tpu {
            block.program
        } else {
            Program { heads: 1, chunks: 1 }
        };
        let plan = match layer.pass {
            Pass::Forward => Plan::named(name, program),
            Pass::Decode => Plan::decode(name),
            Pass::Verify => Plan::verify(name),
        };
        let build = |source| ModelError::Build {
            part: block.name.clone(),
            source,
        };
        // The reader has checked the names of plans.
        let plans: Vec<Plan> = plan.into_iter().collect();
        let lowered = lower_plans(layer, &[self.chip.architecture], &plans).map_err(build)?;
        let kernels = lowered.into_iter().flatten().flatten().map(|kernel| {
            let family = family(&kernel, layer, self.chip);
            (kernel, family)
        });
        Ok(Launches {
            kernels: kernels.collect(),
            expert_rows: None,
        })
    }

    fn norm(&self, rows: usize, width: usize, branch: bool) -> Result<Launches, ModelError> {
        let graph = graphs::block_norm(rows, width, self.formats, branch);
        self.of_graph("norm", graph, &[Stage::BlockNorm], "rms_norm")
    }

    fn dense(&self, extents: [usize; 3], shared: Option<bool>) -> Result<Launches, ModelError> {
        let graph = graphs::feed_forward(extents, self.formats, shared);
        let stages = [
            Stage::FeedForwardUp,
            Stage::FeedForwardGate,
            Stage::FeedForwardDown,
        ];
        self.of_graph("feed-forward network", graph, &stages, "matmul")
    }

    fn feed_forward(&self, network: &FeedForward, [rows, width]: [usize; 2]) -> Result<Launches, ModelError> {
        match network {
            FeedForward::None => Ok(Launches::default()),
            FeedForward::Dense(hidden) => self.dense([rows, width, *hidden], None),
            FeedForward::Experts(experts) => self.experts(experts, [rows, width]),
        }
    }

    fn experts(&self, experts: &Experts, [rows, width]: [usize; 2]) -> Result<Launches, ModelError> {
        let part = "experts";
        let wrong = |source| ModelError::Kernels {
            part: part.to_owned(),
            source,
        };
        let choices = rows * experts.active;
        let groups = touched_groups(experts, rows);
        let routing = Routing::even(rows, experts.active, groups);
        let graph = graphs::mixture(experts, [rows, width], self.formats, &routing).map_err(|source| {
            ModelError::Build {
                part: part.to_owned(),
                source,
            }
        })?;
        let mut launches = Launches::default();
        launches.extend(
            lowered(&graph, self.chip, &[Stage::Router]),
            &self.family("matmul"),
        );
        let activations = self.formats.activations;
        let tpu = self.chip.architecture == Architecture::Tpu;
        if tpu {
            // The kernels of a GPU fetch the rows of an expert themselves.
            let bytes = (choices * width) as f64 * activations.bytes() as f64;
            let copy =
                library::stream("dispatch", "rows by expert", [bytes, bytes], activations).map_err(wrong)?;
            launches.extend(vec![copy], &self.family("copy"));
        }
        let (mut real, mut done) = (0.0, 0.0);
        for (stage, k, n) in [
            (Stage::ExpertsUp, width, 2 * experts.hidden),
            (Stage::ExpertsDown, experts.hidden, width),
        ] {
            if stage == Stage::ExpertsDown {
                let gate = lowered(&graph, self.chip, &[Stage::ExpertsGate]);
                launches.extend(gate, &self.family("silu"));
            }
            let grouped = self
                .grouped(stage, [choices, k, n, experts.count])
                .map_err(wrong)?;
            let useful = 2.0 * choices as f64 * k as f64 * n as f64;
            real += useful;
            done += grouped
                .iter()
                .map(|kernel| kernel.work.matrix_flops.total() as f64)
                .sum::<f64>()
                .max(useful);
            launches.extend(grouped, &self.family("ragged_dot"));
        }
        launches.expert_rows = Some([real, done]);
        launches.extend(lowered(&graph, self.chip, &[Stage::Combine]), &self.family("add"));
        if let Some(hidden) = experts.shared_hidden {
            let shared = self.dense([rows, width, hidden], Some(experts.shared_gate))?;
            launches.kernels.extend(shared.kernels);
        }
        Ok(launches)
    }

    /// The grouped product `[m, k] x [groups, k, n]` of rows that choose groups at random, as measured kernels run it: a tile of its own choice on a TPU, on a GPU row
    /// blocks of as many rows as an expert has on average.
    fn grouped(&self, stage: Stage, [m, k, n, groups]: [usize; 4]) -> Result<Vec<Kernel>, CaseError> {
        let tpu = self.chip.architecture == Architecture::Tpu;
        let sizes = format!("m={m};k={k};n={n};groups={groups}");
        let (op, params) = if tpu {
            ("ragged_dot_v2", sizes)
        } else {
            let rows = m
                .div_ceil(groups.max(1))
                .next_power_of_two()
                .clamp(GPU_ROWS[0], GPU_ROWS[1]);
            (
                "ragged_dot",
                format!("{sizes};block_m={rows};block_n={GPU_COLUMNS};block_k={GPU_DEPTH}"),
            )
        };
        let formats = Formats {
            a: self.formats.activations,
            b: self.formats.weights,
            highest: false,
            tf32: false,
        };
        let launches = library::launches(op, &Params::parse(&params)?, formats, self.chip)?;
        Ok(launches
            .into_iter()
            .map(|launch| Kernel {
                label: stage.name().to_owned(),
                ..launch.kernel
            })
            .collect())
    }

    fn time(&self, place: [&str; 2], count: usize, launches: &Launches) -> Result<PartResult, ModelError> {
        let [block, part] = place;
        let mut result = PartResult {
            block: block.to_owned(),
            part: part.to_owned(),
            count: count as u64,
            time_us: 0.0,
            total_us: 0.0,
            low_us: Some(0.0),
            high_us: Some(0.0),
            share: 0.0,
            longest: String::new(),
            bound: crate::report::result::Bound::Launch,
            launches: Vec::with_capacity(launches.kernels.len()),
            flops: 0,
            hbm_bytes: 0,
        };
        let mut longest_us = 0.0;
        for (kernel, family) in &launches.kernels {
            let time = time_kernel(kernel, self.chip);
            let invariant = |what: String| RunError::Invariant {
                chip: self.chip.name.clone(),
                plan: format!("{block} {part}"),
                stage: kernel.label.clone(),
                what,
            };
            self.peaks
                .check(kernel, time.total_us, time.hbm_bytes)
                .map_err(invariant)?;
            let interval = hardware::shipped_calibration().interval(family, self.chip, time.total_us);
            // A launch that only some steps of an interval have counts with its share of them.
            let share = kernel.share;
            let of_pass = |count: u64| (share * count as f64).round() as u64;
            let add = |sum: Option<f64>, us: Option<f64>| Some(sum? + share * us?);
            result.low_us = add(result.low_us, interval.map(|interval| interval.low_us));
            result.high_us = add(result.high_us, interval.map(|interval| interval.high_us));
            result.time_us += share * time.total_us;
            result.flops += of_pass(kernel.work.matrix_flops.total());
            result.hbm_bytes += of_pass(time.hbm_bytes);
            result.launches.push(LaunchResult {
                stage: kernel.label.clone(),
                title: kernel.title.clone(),
                times: share,
                time_us: time.total_us,
                bound: time.bound,
                hbm_bytes: time.hbm_bytes,
            });
            if share * time.total_us > longest_us {
                longest_us = share * time.total_us;
                result.longest.clone_from(&kernel.label);
                result.bound = time.bound;
            }
        }
        let count = count as f64;
        result.total_us = count * result.time_us;
        result.low_us = result.low_us.map(|us| count * us);
        result.high_us = result.high_us.map(|us| count * us);
        Ok(result)
    }
}

/// Fewest and most rows of a block of a grouped product of a GPU. Source: the usual settings of the fused kernels for mixtures of experts in serving.
const GPU_ROWS: [usize; 2] = [16, 128];
/// Columns of such a block.
const GPU_COLUMNS: usize = 128;
/// Depth of a step of such a block.
const GPU_DEPTH: usize = 64;

/// Experts with rows, as a whole number: the expectation, rounded, and no more than there are choices.
fn touched_groups(experts: &Experts, rows: usize) -> usize {
    let touched = experts.touched(rows as f64).round() as usize;
    touched.clamp(1, experts.count).min(rows * experts.active).max(1)
}

/// Parameters of a block, those of all experts and those that a token uses, with their bytes.
struct Held {
    parameters: u64,
    active: u64,
    bytes: u64,
}

fn held(block: &Block, model: &Model) -> Result<Held, ModelError> {
    let built = |part: &str, graph: Result<Graph, BuildError>| {
        let graph = graph.map_err(|source| ModelError::Build {
            part: part.to_owned(),
            source,
        })?;
        Ok::<_, ModelError>(weights(&graph))
    };
    let (width, formats) = (model.width, model.formats);
    let one_token = block.decode_layer(DecodePoint { batch: 1, context: 1 });
    let mixer = mechanisms::build(&one_token).map(|layer| layer.graph);
    let (mut parameters, mut bytes) = built(&block.name, mixer)?;
    let norms = if block.feed_forward == FeedForward::None {
        1
    } else {
        2
    };
    let (elements, of_norm) = built("norm", graphs::block_norm(1, width, formats, false))?;
    parameters += norms * elements;
    bytes += norms * of_norm;
    let mut active = parameters;
    match &block.feed_forward {
        FeedForward::None => {}
        FeedForward::Dense(hidden) => {
            let (elements, of_network) = built(
                "network",
                graphs::feed_forward([1, width, *hidden], formats, None),
            )?;
            parameters += elements;
            active += elements;
            bytes += of_network;
        }
        FeedForward::Experts(experts) => {
            // A token has as many experts as it chooses; the others are as large.
            let routing = Routing::even(1, experts.active, experts.active);
            let (elements, of_active) =
                built("experts", graphs::mixture(experts, [1, width], formats, &routing))?;
            let one = 3 * (width * experts.hidden) as u64;
            let others = (experts.count - experts.active) as u64 * one;
            active += elements;
            parameters += elements + others;
            bytes += of_active + others * formats.weights.bytes();
            if let Some(hidden) = experts.shared_hidden {
                let shared = graphs::feed_forward([1, width, hidden], formats, Some(experts.shared_gate));
                let (elements, of_shared) = built("shared expert", shared)?;
                active += elements;
                parameters += elements;
                bytes += of_shared;
            }
        }
    }
    Ok(Held {
        parameters,
        active,
        bytes,
    })
}

/// Bytes of the log that a decode step keeps beside its states, one sequence; 0 without one.
fn log_bytes(layer: &Layer) -> u64 {
    let decays = match (layer.mechanism.granularity)(layer) {
        Granularity::None => 0,
        Granularity::Scalar => 1,
        Granularity::Tiles(tiles) => tiles,
        Granularity::Channel => layer.key_dim,
    };
    layer.log.map_or(0, |log| {
        let entry = log.entry_bytes(layer.key_dim as u64, layer.value_dim as u64, decays as u64);
        (layer.value_heads * log.slots()) as u64 * entry
    })
}

fn describe(network: &FeedForward) -> String {
    match network {
        FeedForward::None => "no feed-forward network".to_owned(),
        FeedForward::Dense(hidden) => format!("gated network of {hidden} channels"),
        FeedForward::Experts(experts) => {
            let shared = match experts.shared_hidden {
                Some(hidden) => format!(" and a shared one of {hidden}"),
                None => String::new(),
            };
            format!(
                "{} of {} experts of {} channels{shared}",
                experts.active, experts.count, experts.hidden
            )
        }
    }
}

/// A prefill or a decode step.
#[derive(Debug, Clone, Copy)]
enum Point {
    Prefill(PrefillPoint),
    Decode(DecodePoint),
}

impl Point {
    fn batch(self) -> usize {
        match self {
            Point::Prefill(point) => point.batch,
            Point::Decode(point) => point.batch,
        }
    }

    /// Tokens that pass through the blocks.
    fn rows(self) -> usize {
        match self {
            Point::Prefill(point) => point.batch * point.tokens,
            Point::Decode(point) => point.batch,
        }
    }

    /// Tokens of a sequence afterwards.
    fn seen(self) -> usize {
        match self {
            Point::Prefill(point) => point.tokens,
            Point::Decode(point) => point.context + 1,
        }
    }

    fn layer(self, block: &Block) -> Layer {
        match self {
            Point::Prefill(point) => block.prefill_layer(point),
            Point::Decode(point) => block.decode_layer(point),
        }
    }
}

fn timed(
    model: &Model,
    bench: &Bench<'_>,
    point: Point,
    weight_bytes: u64,
) -> Result<PointResult, ModelError> {
    let (rows, width, batch) = (point.rows(), model.width, point.batch());
    let activations = model.formats.activations;
    let stream_bytes = (rows * width) as f64 * activations.bytes() as f64;
    let wrong = |source| ModelError::Kernels {
        part: "embedding".to_owned(),
        source,
    };
    let mut parts = Vec::new();
    let mut most_bytes = 0;
    let mut expert_rows: Option<[f64; 2]> = None;
    let mut part = |place: [&str; 2], count: usize, launches: &Launches| {
        most_bytes = launches.activation_bytes().max(most_bytes);
        if let Some([real, done]) = launches.expert_rows {
            let [all_real, all_done] = expert_rows.unwrap_or_default();
            expert_rows = Some([all_real + count as f64 * real, all_done + count as f64 * done]);
        }
        if launches.kernels.is_empty() {
            return Ok(());
        }
        parts.push(bench.time(place, count, launches)?);
        Ok::<(), ModelError>(())
    };
    let gather = library::stream(
        "embedding",
        "rows of the embedding",
        [stream_bytes, stream_bytes],
        activations,
    )
    .map_err(wrong)?;
    let mut embedding = bench.norm(rows, width, false)?;
    embedding.kernels.insert(0, (gather, bench.family("copy")));
    part(["model", "embedding"], 1, &embedding)?;
    let norm = bench.norm(rows, width, true)?;
    for block in &model.blocks {
        let layer = point.layer(block);
        let branches = if block.feed_forward == FeedForward::None {
            1
        } else {
            2
        };
        part([&block.name, "norms"], branches * block.count, &norm)?;
        part([&block.name, "mixer"], block.count, &bench.mixer(block, &layer)?)?;
        let network = bench.feed_forward(&block.feed_forward, [rows, width])?;
        part([&block.name, "feed-forward"], block.count, &network)?;
    }
    let head = graphs::head([batch, width, model.vocabulary], model.formats);
    let head = bench.of_graph("head", head, &[Stage::Head], "matmul")?;
    part(["model", "head"], 1, &head)?;

    let time_us: f64 = parts.iter().map(|part| part.total_us).sum();
    for part in &mut parts {
        part.share = part.total_us / time_us;
    }
    let sequences = batch as u64;
    let sum = |of: &dyn Fn(&Layer) -> u64| -> u64 {
        let of_block = |block: &Block| block.count as u64 * of(&point.layer(block));
        model.blocks.iter().map(of_block).sum()
    };
    let states = sum(&|layer| layer.state_bytes() + log_bytes(layer));
    let convolutions = sum(&Layer::convolution_state_bytes);
    let caches = sum(&|layer| layer.cache_bytes(point.seen()));
    let activation_bytes = most_bytes + stream_bytes as u64;
    let per_sequence = states + convolutions + caches + activation_bytes.div_ceil(sequences);
    let capacity = bench.chip.hbm_capacity_per_device().get() as u64;
    let total = weight_bytes + sequences * (states + convolutions + caches) + activation_bytes;
    let tokens = match point {
        Point::Prefill(_) => rows,
        Point::Decode(_) => batch,
    };
    let tokens_per_second = tokens as f64 / (time_us * 1e-6);
    let touched = model.blocks.iter().find_map(|block| match &block.feed_forward {
        FeedForward::Experts(experts) => Some(experts.touched(rows as f64)),
        _ => None,
    });
    let plan = plans(model, bench.chip, point);
    Ok(PointResult {
        batch: sequences,
        tokens: match point {
            Point::Prefill(point) => point.tokens,
            Point::Decode(point) => point.context,
        } as u64,
        published: published(model, bench.chip, point, (&plan, time_us)),
        plan,
        time_us,
        low_us: parts.iter().map(|part| part.low_us).sum(),
        high_us: parts.iter().map(|part| part.high_us).sum(),
        tokens_per_second,
        tokens_per_second_chip: tokens_per_second / bench.chip.device_share(),
        touched_experts: touched,
        expert_padding: expert_rows.map(|[real, done]| 1.0 - real / done),
        memory: MemoryResult {
            weight_bytes,
            state_bytes: sequences * states,
            convolution_state_bytes: sequences * convolutions,
            cache_bytes: sequences * caches,
            activation_bytes,
            total_bytes: total,
            capacity_bytes: capacity,
            fits: total <= capacity,
            largest_batch: capacity.saturating_sub(weight_bytes) / per_sequence.max(1),
        },
        parts,
    })
}

/// Plans of the mixers on a chip, each once, in the order of the blocks.
fn plans(model: &Model, chip: &Chip, point: Point) -> String {
    let mut names: Vec<&str> = Vec::new();
    for block in &model.blocks {
        let choice = match point {
            Point::Prefill(_) => &block.plan,
            Point::Decode(_) => &block.decode_plan,
        };
        let name = match chip.architecture {
            Architecture::Tpu => choice.tpu.as_str(),
            Architecture::Gpu => choice.gpu.as_str(),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(", ")
}

fn published(model: &Model, chip: &Chip, point: Point, (plan, time_us): (&str, f64)) -> Vec<PublishedTime> {
    let (Some(published), Point::Decode(point)) = (&model.published, point) else {
        return Vec::new();
    };
    if published.chip != chip.name {
        return Vec::new();
    }
    let mixers = model.blocks.iter().map(|block| &block.decode_mixer);
    let log = mixers
        .filter_map(|layer| layer.log)
        .map(|log| log.interval)
        .next();
    let of_batch = published.points.iter().filter(|row| row.batch == point.batch);
    of_batch
        .map(|row| PublishedTime {
            method: row.method.clone(),
            published_us: row.time_us,
            error_percent: (row.plan.as_deref() == Some(plan) && row.log_interval == log)
                .then(|| 100.0 * (time_us / row.time_us - 1.0)),
        })
        .collect()
}

/// Runs a model.
///
/// # Errors
/// A format the chip lacks, a violated invariant, or extents that no kernel has.
pub fn run_model(request: ModelRequest<'_>) -> Result<ModelResult, ModelError> {
    let (model, document) = request.model;
    for (chip, _) in request.chips {
        for block in &model.blocks {
            check_formats_at("model.activations", &block.mixer, chip, document)?;
        }
    }
    let of_blocks = model
        .blocks
        .iter()
        .map(|block| held(block, model))
        .collect::<Result<Vec<Held>, ModelError>>()?;
    let one = DecodePoint { batch: 1, context: 1 };
    let blocks: Vec<BlockResult> = model
        .blocks
        .iter()
        .zip(&of_blocks)
        .map(|(block, held)| {
            let layer = block.decode_layer(one);
            BlockResult {
                name: block.name.clone(),
                mixer: block.decode_mixer.describe(),
                feed_forward: describe(&block.feed_forward),
                count: block.count as u64,
                parameters: held.parameters,
                active_parameters: held.active,
                state_bytes: layer.state_bytes() + log_bytes(&layer),
                convolution_state_bytes: layer.convolution_state_bytes(),
                cache_bytes_per_token: layer.cache_bytes_per_token(),
            }
        })
        .collect();
    let sum = |of: fn(&Held) -> u64| -> u64 {
        let of_block = |(block, held): (&Block, &Held)| block.count as u64 * of(held);
        model.blocks.iter().zip(&of_blocks).map(of_block).sum()
    };
    let matrices = if model.tied_embeddings { 1 } else { 2 };
    let ends = matrices * model.embedding_elements() + model.width as u64;
    // The matrix of a head has the format of the other weights; an embedding alone that of the activations, because its rows are only copied.
    let embedding = if model.tied_embeddings {
        0
    } else {
        model.embedding_elements() * model.formats.activations.bytes()
    };
    let end_bytes =
        embedding + model.embedding_elements() * model.formats.weights.bytes() + 4 * model.width as u64;
    let weight_bytes = sum(|held| held.bytes) + end_bytes;
    let mut chips = Vec::new();
    let mut warnings = Vec::new();
    for (chip, _) in request.chips {
        let bench = Bench {
            chip,
            formats: model.formats,
            peaks: PeakRates::of(chip),
        };
        let prefill = model
            .prefill
            .iter()
            .map(|&point| timed(model, &bench, Point::Prefill(point), weight_bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let decode = model
            .decode
            .iter()
            .map(|&point| timed(model, &bench, Point::Decode(point), weight_bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let capacity = chip.hbm_capacity_per_device().get();
        if weight_bytes as f64 > capacity {
            warnings.push(format!(
                "{}: the weights take {:.1} GiB of {:.1} GiB; times are those of a device with enough memory: use narrower weights (`--set model.weights=fp8_e4m3`) or a larger chip",
                chip.name,
                gib(weight_bytes),
                capacity / f64::from(1 << 30)
            ));
        }
        let described = chip_result(chip, Vec::new());
        chips.push(ModelChip {
            name: described.name,
            title: described.title,
            cores: described.cores,
            device: described.device,
            clock_ghz: described.clock_ghz,
            prefill,
            decode,
        });
    }
    let digests: Vec<String> = request.chips.iter().map(|(_, d)| d.digest()).collect();
    let mut inferred = model.assumed.clone();
    inferred.extend(model.defaults.iter().map(ToString::to_string));
    let mut result = ModelResult {
        schema: SCHEMA.to_owned(),
        name: model.name.clone(),
        headline: String::new(),
        source: model.source.clone(),
        activations: model.formats.activations.name().to_owned(),
        weights: model.formats.weights.name().to_owned(),
        parameters: sum(|held| held.parameters) + ends,
        active_parameters: sum(|held| held.active) + ends,
        blocks,
        chips,
        published_source: model.published.as_ref().map(|published| published.source.clone()),
        warnings,
        provenance: Provenance {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hardware_digest: digests.join("+"),
            workload_digest: document.digest(),
            calibration_digest: hardware::shipped_calibration().digest(),
            overrides: request.overrides,
            inferred,
        },
    };
    result.headline = headline(&result);
    Ok(result)
}

/// The answer in one line: first prefill and first decode step on the first chip.
fn headline(result: &ModelResult) -> String {
    let Some(chip) = result.chips.first() else {
        return String::new();
    };
    let described = |point: &PointResult, what: &str| {
        let longest = point
            .parts
            .iter()
            .max_by(|a, b| a.total_us.total_cmp(&b.total_us));
        let longest = longest.map_or_else(String::new, |part| {
            format!(
                ", {} of {} take {:.0} %",
                part.part,
                part.block,
                100.0 * part.share
            )
        });
        let memory = if point.memory.fits {
            String::new()
        } else {
            format!(
                ", OUT OF MEMORY by {:.1} GiB, the largest batch that fits is {}",
                gib(point.memory.total_bytes - point.memory.capacity_bytes),
                point.memory.largest_batch
            )
        };
        format!(
            "{what} {:.3} ms{}{longest}{memory}",
            point.time_us / 1e3,
            interval_words(point.low_us, point.high_us)
        )
    };
    let mut parts = Vec::new();
    if let Some(point) = chip.prefill.first() {
        parts.push(described(
            point,
            &format!("first token of {} x {} after", point.batch, point.tokens),
        ));
    }
    if let Some(point) = chip.decode.first() {
        parts.push(described(
            point,
            &format!(
                "decode of {} after {} tokens {:.0} tokens/s,",
                point.batch, point.tokens, point.tokens_per_second
            ),
        ));
    }
    format!(
        "{} on {} ({}, {:.2} GHz): {}",
        result.name,
        chip.name,
        chip.device,
        chip.clock_ghz,
        parts.join("; ")
    )
}
