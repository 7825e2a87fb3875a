//! Formats of the stored state of a decode step: what they save, and how their rounding grows over thousands of tokens.
//!
//! Every token reads the state, changes it and stores it rounded. The error of the state follows the state: with `E <- (I - beta x^T r) D E + delta` it shrinks
//! with the decay and along every key that is written again, and `delta` is the rounding of the token. A head that forgets fast keeps the rounding of a
//! few tokens, one that remembers thousands of tokens collects theirs. Bits are therefore worth most where memory is long; a mix gives one format to the half
//! of the heads with the longer memory and another to the rest.
//!
//! Errors come from the graph of the decode step, executed token after token in its formats, against the token recurrence in f64 on the same queries, keys, values and
//! gates. Activations are f32 there, so that nothing but the stored state is rounded to less.

use std::collections::BTreeMap;

use ndarray::{ArrayD, Axis};
use rayon::prelude::*;

use super::check::{CheckError, tensor};
use super::decode::{run_steps, seeded_tokens};
use super::recurrence;
use super::run::{Chips, RunError, plan_times};
use crate::config::ConfigError;
use crate::dtype::Dtype;
use crate::graph::{Op, Role, Stage};
use crate::hardware;
use crate::kernels::Plan;
use crate::layer::{Layer, Pass, StateFormat};
use crate::mechanisms::{self, LayerGraph};
use crate::numerics::{Arithmetic, Execution, Tensor, seeded_inputs, to_f32};
use crate::report::result::PlanResult;
use crate::report::state_formats::{FormatRow, FormatTime, HeadRow, SCHEMA, StateFormatTable};
use crate::workload::{self, Workload};

/// What to compare.
#[derive(Debug, Clone, Copy)]
pub struct StateFormatRequest<'a> {
    /// A decode workload: a path, or the name of a shipped one.
    pub workload: &'a str,
    /// Changes of its fields, as `--set` takes them.
    pub overrides: &'a [String],
    /// Chips.
    pub chips: &'a Chips,
    /// Fusion plan of the times.
    pub plan: &'a str,
    /// Tokens to decode.
    pub tokens: usize,
    /// Key heads to execute.
    pub heads: usize,
    /// Seed of weights and tokens.
    pub seed: u64,
}

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub enum StateFormatError {
    /// A workload that does not load.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A layer that does not run.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A graph that does not execute: a fault of the mechanism.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// A workload, plan or size that there is no such table of.
    #[error("{0}")]
    Refused(String),
}

/// Formats, the most exact first.
const FORMATS: [StateFormat; 3] = [StateFormat::F32, StateFormat::Bf16, StateFormat::RowFp8];
/// Width of the residual stream of the layer that is executed: the state does not see it.
const WIDTH: usize = 128;
/// Tokens of the first span; each following one ends at four times as many.
const FIRST_SPAN: usize = 16;

/// The table.
///
/// # Errors
/// Where the workload is no decode step with a stored state of several formats, and as [`super::run()`] and [`super::check()`].
pub fn state_formats(request: &StateFormatRequest<'_>) -> Result<StateFormatTable, StateFormatError> {
    let (workload, document) = workload::load(request.workload, request.overrides)?;
    refuse(&workload, request)?;
    for (chip, _) in request.chips {
        super::run::check_formats(&workload.layer, chip, &document)?;
    }
    let plan = workload.plans.iter().find(|plan| plan.name == request.plan);
    let plan = plan.ok_or_else(|| {
        let names: Vec<&str> = workload.plans.iter().map(|plan| plan.name.as_str()).collect();
        StateFormatError::Refused(format!(
            "the workload has no plan `{}`; it has {}",
            request.plan,
            names.join(", ")
        ))
    })?;

    let measured = measure(&workload.layer, request)?;
    let spans = measured.spans.clone();
    let halves = |format: StateFormat| (format, format);
    let mut mixes: Vec<(StateFormat, StateFormat)> = FORMATS.into_iter().map(halves).collect();
    let mixed = measured.memory.is_some() && workload.layer.key_heads >= 2;
    if mixed {
        for (i, &fine) in FORMATS.iter().enumerate() {
            for &coarse in &FORMATS[i + 1..] {
                mixes.extend([(fine, coarse), (coarse, fine)]);
            }
        }
    }
    let mut rows = Vec::new();
    for (long, short) in mixes {
        rows.push(row(&workload, plan, request, &measured, [long, short])?);
    }
    let mut notes = vec![
        format!(
            "errors: {} tokens from an empty state, {} key heads of {}x{}, executed in f32 with the stored state rounded to its format after every token; against the token recurrence in f64",
            request.tokens, request.heads, workload.layer.key_dim, workload.layer.value_dim
        ),
        "times: the whole layer; two formats are two launches of the step, one for each half of the heads"
            .to_owned(),
    ];
    if mixed {
        notes.push(
            "bits by memory length are our reading of what the title of STEPQuant says, that errors matter depending on when and where; its formulas are not known to us. Each mix is followed by its control, \
             the same formats the other way round"
                .to_owned(),
        );
    } else {
        notes.push("no mixes: the mechanism has no decay that tells long memories from short ones, or a single key head".to_owned());
    }
    Ok(StateFormatTable {
        schema: SCHEMA.to_owned(),
        layer: workload.layer.describe(),
        plan: plan.name.clone(),
        tokens: request.tokens as u64,
        heads: request.heads as u64,
        seed: request.seed,
        spans: spans.iter().map(|&end| end as u64).collect(),
        rows,
        head_errors: measured.by_head(),
        activation_error: measured.activation_error,
        notes,
    })
}

fn refuse(workload: &Workload, request: &StateFormatRequest<'_>) -> Result<(), StateFormatError> {
    let layer = &workload.layer;
    let refused = |text: String| Err(StateFormatError::Refused(text));
    if layer.pass != Pass::Decode || !layer.mechanism.uses("state") {
        return refused(format!(
            "`{}` is no decode step of a mechanism whose state has several formats; for instance `gdn_decode`, `kda_decode` or `sla_r4_decode`",
            request.workload
        ));
    }
    if request.tokens == 0 {
        return refused("--tokens: expected at least 1".to_owned());
    }
    if request.heads == 0 || request.heads > layer.key_heads {
        return refused(format!(
            "--heads: expected 1 to the {} key heads of the layer, found `{}`",
            layer.key_heads, request.heads
        ));
    }
    Ok(())
}

/// Squares of a head, by span.
#[derive(Debug, Clone, Default)]
struct HeadSquares {
    /// Of the reference.
    size: Vec<f64>,
    /// Of the difference, by format.
    error: BTreeMap<&'static str, Vec<f64>>,
}

/// What the executions found.
struct Measured {
    spans: Vec<usize>,
    heads: Vec<HeadSquares>,
    /// Memory of every head in tokens, where anything decays.
    memory: Option<Vec<f64>>,
    activation_error: f64,
}

impl Measured {
    /// Whether each head belongs to the half with the longer memory.
    fn long(&self) -> Vec<bool> {
        let Some(memory) = &self.memory else {
            return vec![true; self.heads.len()];
        };
        let mut order: Vec<usize> = (0..memory.len()).collect();
        order.sort_by(|&a, &b| memory[b].total_cmp(&memory[a]).then(a.cmp(&b)));
        let mut long = vec![false; memory.len()];
        order
            .iter()
            .take(memory.len().div_ceil(2))
            .for_each(|&head| long[head] = true);
        long
    }

    /// RMS error over RMS value in every span, with a format for the heads of long memory and one for the others.
    fn errors(&self, [long, short]: [StateFormat; 2]) -> Vec<f64> {
        let is_long = self.long();
        (0..self.spans.len())
            .map(|span| {
                let (mut error, mut size) = (0.0, 0.0);
                for (head, &is_long) in self.heads.iter().zip(&is_long) {
                    let format = if is_long { long } else { short };
                    error += head.error[format.name()][span];
                    size += head.size[span];
                }
                (error / size).sqrt()
            })
            .collect()
    }

    /// Heads by memory.
    fn by_head(&self) -> Vec<HeadRow> {
        let Some(memory) = &self.memory else {
            return Vec::new();
        };
        let last = self.spans.len().saturating_sub(1);
        let mut rows: Vec<HeadRow> = self
            .heads
            .iter()
            .zip(memory)
            .enumerate()
            .map(|(head, (squares, &memory_tokens))| {
                let of =
                    |format: StateFormat| (squares.error[format.name()][last] / squares.size[last]).sqrt();
                HeadRow {
                    head: head as u64,
                    memory_tokens,
                    f32: of(StateFormat::F32),
                    bf16: of(StateFormat::Bf16),
                    row_fp8: of(StateFormat::RowFp8),
                }
            })
            .collect();
        rows.sort_by(|a, b| {
            a.memory_tokens
                .total_cmp(&b.memory_tokens)
                .then(a.head.cmp(&b.head))
        });
        rows
    }
}

/// A run of all tokens in the formats of the layer.
struct Run {
    built: LayerGraph,
    layer: Layer,
    execution: Execution<f32>,
}

fn execute(layer: Layer, request: &StateFormatRequest<'_>) -> Result<Run, StateFormatError> {
    let built = mechanisms::build(&layer).map_err(CheckError::from)?;
    let mut inputs = to_f32(&seeded_inputs(&built.graph, request.seed));
    // A sequence starts with an empty state and nothing before its first token.
    for (id, node) in built.graph.inputs() {
        if let (
            Op::Input {
                role: Role::State, ..
            },
            Some(tensor),
        ) = (&node.op, inputs.get_mut(&id))
        {
            *tensor = ArrayD::zeros(node.results[0].shape.dims()).into_shared();
        }
    }
    let tokens = seeded_tokens(&layer, request.tokens, request.seed)?;
    let tokens = tokens.mapv(|x| x as f32).into_shared();
    let mut keep = built.core.recurrence.values();
    keep.push(built.core.output);
    keep.extend(built.core.initial_state);
    let execution = run_steps(&layer, &built, &inputs, &tokens, &keep, Arithmetic::Declared)?;
    Ok(Run {
        built,
        layer,
        execution,
    })
}

/// Runs every format, and the format of the activations beside f32.
fn measure(whole: &Layer, request: &StateFormatRequest<'_>) -> Result<Measured, StateFormatError> {
    let layer = Layer {
        batch: 1,
        model_width: whole.model_width.min(WIDTH),
        key_heads: request.heads,
        value_heads: request.heads * whole.sharing(),
        activations: Dtype::F32,
        context: 0,
        ..whole.clone()
    };
    let with = |state: StateFormat, activations: Dtype| Layer {
        activations,
        state,
        ..layer.clone()
    };
    let mut layers: Vec<Layer> = FORMATS
        .into_iter()
        .map(|format| with(format, Dtype::F32))
        .collect();
    layers.push(with(StateFormat::F32, whole.activations));
    let runs = layers
        .into_par_iter()
        .map(|layer| execute(layer, request))
        .collect::<Result<Vec<Run>, StateFormatError>>()?;

    let exact = &runs[0];
    let wide = Execution {
        values: exact
            .execution
            .values
            .iter()
            .map(|(&value, tensor)| (value, widened(tensor)))
            .collect(),
        work: exact.execution.work,
        non_finite: None,
    };
    let (reference, _) = recurrence::by_token(&exact.built, &exact.layer, &wide)?;
    let mut spans = Vec::new();
    let mut end = FIRST_SPAN;
    while end < request.tokens {
        spans.push(end);
        end *= 4;
    }
    spans.push(request.tokens);

    let mut heads = vec![HeadSquares::default(); request.heads];
    let none = ArrayD::zeros(reference.raw_dim());
    for (head, size) in heads.iter_mut().zip(squares(&reference, &none, &spans)) {
        head.size = size;
    }
    for (format, run) in FORMATS.into_iter().zip(&runs) {
        let output = widened(tensor(&run.execution, run.built.core.output, "core output")?);
        for (head, error) in heads
            .iter_mut()
            .zip(squares(&reference, &output.to_owned(), &spans))
        {
            head.error.insert(format.name(), error);
        }
    }
    let rounded = &runs[FORMATS.len()];
    let output = widened(tensor(
        &rounded.execution,
        rounded.built.core.output,
        "core output",
    )?);
    let sum = |of: &[Vec<f64>]| of.iter().flatten().sum::<f64>();
    let error = squares(&reference, &output.to_owned(), &spans);
    let size: f64 = heads.iter().flat_map(|head| &head.size).sum();
    Ok(Measured {
        spans,
        heads,
        memory: memory(exact, request.heads)?,
        activation_error: (sum(&error) / size).sqrt(),
    })
}

fn widened(tensor: &Tensor<f32>) -> Tensor<f64> {
    tensor.mapv(f64::from).into_shared()
}

/// Squares of the difference of two core outputs `[B, Hk, R, N, 1, width]`, summed over each span of tokens, by key head.
fn squares(a: &ArrayD<f64>, b: &ArrayD<f64>, spans: &[usize]) -> Vec<Vec<f64>> {
    let by_head = a.axis_iter(Axis(1)).zip(b.axis_iter(Axis(1)));
    by_head
        .map(|(a, b)| {
            let mut start = 0;
            spans
                .iter()
                .map(|&end| {
                    let rows = ndarray::Slice::from(start..end);
                    start = end;
                    let (a, b) = (a.slice_axis(Axis(2), rows), b.slice_axis(Axis(2), rows));
                    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum()
                })
                .collect()
        })
        .collect()
}

/// Memory of every key head, from the decays that the run met.
fn memory(run: &Run, heads: usize) -> Result<Option<Vec<f64>>, StateFormatError> {
    let Some(decay) = run.built.core.log_decay else {
        return Ok(None);
    };
    let decay = tensor(&run.execution, decay, "log decay")?;
    let of = |head: usize| {
        // `[B, R, N, 1, g]` of the head: one mean decay per value head and channel.
        let own = decay.index_axis(Axis(1), head.min(decay.shape()[1] - 1));
        let mut memories: Vec<f64> = own
            .lanes(Axis(2))
            .into_iter()
            .map(|lane| {
                let mean = lane.iter().map(|&l| -f64::from(l)).sum::<f64>() / lane.len().max(1) as f64;
                mean.recip()
            })
            .collect();
        memories.sort_by(f64::total_cmp);
        memories[memories.len() / 2]
    };
    Ok(Some((0..heads).map(of).collect()))
}

/// Labels of the launches around the core, which are the same for every format.
fn around(plan: &Plan) -> Vec<String> {
    let outer = [Stage::Projections, Stage::OutputNorm, Stage::OutputProjection];
    let groups = plan
        .groups
        .iter()
        .filter(|group| outer.iter().any(|&stage| group.holds(stage)));
    // A launch of one of its stages only is called by that.
    groups
        .map(crate::kernels::Group::label)
        .chain(outer.map(|stage| stage.name().to_owned()))
        .collect()
}

fn row(
    workload: &Workload,
    plan: &Plan,
    request: &StateFormatRequest<'_>,
    measured: &Measured,
    formats: [StateFormat; 2],
) -> Result<FormatRow, StateFormatError> {
    let layer = &workload.layer;
    let uniform = formats[0] == formats[1];
    let long = if uniform {
        layer.key_heads
    } else {
        layer.key_heads.div_ceil(2)
    };
    // The layer with some of its heads in one format.
    let part = |heads: usize, state: StateFormat| Workload {
        layer: Layer {
            key_heads: heads,
            value_heads: heads * layer.sharing(),
            state,
            ..layer.clone()
        },
        plans: vec![plan.clone()],
        ..workload.clone()
    };
    let mut parts = vec![part(long, formats[0])];
    if !uniform {
        parts.push(part(layer.key_heads - long, formats[1]));
    }
    let whole = part(layer.key_heads, formats[0]);
    let around = around(plan);
    let mut times = Vec::new();
    let mut token_state_bytes = 0.0;
    for (at, (chip, _)) in request.chips.iter().enumerate() {
        let plan_of = |workload: &Workload| -> Result<PlanResult, StateFormatError> {
            let plans = plan_times(workload, chip, hardware::shipped_calibration())?;
            plans
                .into_iter()
                .next()
                .ok_or_else(|| StateFormatError::Refused("the workload has no plan".to_owned()))
        };
        let whole = plan_of(&whole)?;
        let mut stages: Vec<_> = whole
            .stages
            .into_iter()
            .filter(|s| around.contains(&s.stage))
            .collect();
        for part in &parts {
            let plan = plan_of(part)?;
            if let (0, Some(token)) = (at, plan.token) {
                token_state_bytes += token.read_bytes.state + token.written_bytes.state;
            }
            stages.extend(plan.stages.into_iter().filter(|s| !around.contains(&s.stage)));
        }
        let Some(longest) = stages.iter().max_by(|a, b| a.time_us.total_cmp(&b.time_us)) else {
            continue;
        };
        times.push(FormatTime {
            chip: chip.name.clone(),
            step_us: stages.iter().map(|s| s.time_us).sum(),
            low_us: stages.iter().map(|s| s.low_us).sum(),
            high_us: stages.iter().map(|s| s.high_us).sum(),
            bound: longest.bound,
        });
    }
    Ok(FormatRow {
        long_memory: formats[0].name(),
        short_memory: formats[1].name(),
        state_bytes: parts.iter().map(|part| part.layer.state_bytes()).sum(),
        token_state_bytes,
        errors: measured.errors(formats),
        times,
    })
}
