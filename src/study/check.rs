//! The numeric check: the layer's graph executed on seeded inputs, against the token recurrence in f64.

use ndarray::ArrayD;

use super::decode::{run_steps, seeded_tokens};
use super::recurrence;
use crate::graph::work::graph_work;
use crate::graph::{BuildError, Value};
use crate::layer::{Layer, Pass};
use crate::mechanisms::{self, EXPONENT_LIMIT, LayerGraph};
use crate::numerics::{
    Arithmetic, ExecuteError, Execution, Real, RelativeError, Tensor, execute, memory_estimate,
    relative_error, seeded_inputs, to_f32,
};
use crate::report::result::NumericResult;
use crate::workload::Workload;

/// How much of the layer is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// The tokens and heads the workload declares.
    Sample,
    /// All of it.
    Full,
}

/// What an execution will take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Memory, in bytes: both executions and the inputs.
    pub bytes: u64,
    /// Matrix FLOPs of the execution in f64 and the one in the workload's formats.
    pub flops: f64,
}

/// Why a check has no result.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The graph could not be built.
    #[error("cannot build the graph: {0}")]
    Build(#[from] BuildError),
    /// The graph could not be executed.
    #[error("cannot execute the graph: {0}")]
    Execute(#[from] ExecuteError),
    /// A result does not have the shape the recurrence needs: a fault of the mechanism.
    #[error("`{what}` has no place in the recurrence: {problem}")]
    Shape {
        /// Value.
        what: &'static str,
        /// What does not fit.
        problem: String,
    },
}

/// The layer a check executes.
#[must_use]
pub fn checked_layer(workload: &Workload, extent: Extent) -> Layer {
    match extent {
        Extent::Sample => workload.numeric_layer(),
        Extent::Full => workload.layer.clone(),
    }
}

/// Memory and arithmetic of a check, before it runs.
///
/// # Errors
/// Where the graph cannot be built.
pub fn estimate(workload: &Workload, extent: Extent) -> Result<Estimate, CheckError> {
    let layer = checked_layer(workload, extent);
    let built = mechanisms::build(&layer)?;
    let inputs: u64 = built
        .graph
        .inputs()
        .map(|(_, node)| node.results[0].shape.elements())
        .sum();
    // The runs follow each other; the f64 one is the larger.
    let bytes = memory_estimate(&built.graph, 8) + 8 * inputs;
    let runs = match layer.pass {
        Pass::Forward | Pass::Verify => 2.0,
        Pass::Decode => 2.0 * workload.numeric.tokens as f64,
    };
    let flops = runs * graph_work(&built.graph).matrix_flops.total() as f64;
    Ok(Estimate { bytes, flops })
}

/// Executes the graph twice, in f64 and in the workload's formats, and compares both with the recurrence.
///
/// The recurrence starts from the queries, keys, values, decays and step sizes of the f64 execution, so that the reported error holds every rounding
/// from the first projection on.
///
/// # Errors
/// A [`CheckError`]; values that are not finite are no error but part of the result.
pub fn check(workload: &Workload, extent: Extent) -> Result<NumericResult, CheckError> {
    examine(workload, extent).map(|examined| examined.result)
}

/// A check with what it met on the way.
#[derive(Debug, Clone)]
pub(super) struct Examined {
    /// The check.
    pub(super) result: NumericResult,
    /// Strongest decay of a token among the inputs executed, in nats; 0 without decay.
    pub(super) strongest_decay: f64,
    /// Rows on one side of the pivot over which decay accumulates in an operand of the Gram, where that could overflow.
    pub(super) rows: Option<usize>,
}

/// Whether the layer that a check executes meets a value that is not finite, in the formats of the workload.
///
/// # Errors
/// As [`check`].
pub(super) fn overflows(layer: &Layer, seed: u64) -> Result<bool, CheckError> {
    let LayerGraph { graph, core } = mechanisms::build(layer)?;
    let inputs = to_f32(&seeded_inputs(&graph, seed));
    let execution = execute(&graph, &inputs, &[core.output], Arithmetic::Declared)?;
    Ok(execution.non_finite.is_some())
}

/// [`check`], with what it met on the way.
///
/// # Errors
/// As [`check`].
pub(super) fn examine(workload: &Workload, extent: Extent) -> Result<Examined, CheckError> {
    let layer = checked_layer(workload, extent);
    let built = mechanisms::build(&layer)?;
    let LayerGraph { graph, core } = &built;
    let inputs = seeded_inputs(graph, workload.numeric.seed);

    let mut keep = core.recurrence.values();
    keep.push(core.output);
    keep.extend(core.final_state);
    keep.extend(core.log_decay);
    keep.extend(core.initial_state);
    // A state in FP8 is stored as codes and scales.
    let scale = graph.output("state_scale").filter(|_| layer.pass == Pass::Verify);
    keep.extend(scale);
    let tokens = match layer.pass {
        Pass::Forward | Pass::Verify => None,
        Pass::Decode => Some(seeded_tokens(
            &layer,
            workload.numeric.tokens,
            workload.numeric.seed,
        )?),
    };
    let exact = match &tokens {
        None => {
            let execution = execute(graph, &inputs, &keep, Arithmetic::Exact)?;
            scaled(execution, core.final_state, scale)?
        }
        Some(tokens) => run_steps(&layer, &built, &inputs, tokens, &keep, Arithmetic::Exact)?,
    };
    let (reference_output, reference_state) = recurrence::by_token(&built, &layer, &exact)?;
    let largest_decay = core
        .log_decay
        .and_then(|value| exact.values.get(&value))
        .map_or(0.0, |l| l.iter().fold(0.0_f64, |m, &x| m.max(-x)));
    let fault = |what| CheckError::Shape {
        what,
        problem: "differs from the reference".to_owned(),
    };
    let exact_output = relative_error(tensor(&exact, core.output, "core output")?, &reference_output)
        .ok_or_else(|| fault("core output"))?;
    let exact_state = state_error(&exact, core.final_state, reference_state.as_ref())?;
    drop(exact);

    let inputs = to_f32(&inputs);
    let keep: Vec<Value> = core
        .final_state
        .into_iter()
        .chain([core.output])
        .chain(scale)
        .collect();
    let declared = match &tokens {
        None => {
            let execution = execute(graph, &inputs, &keep, Arithmetic::Declared)?;
            scaled(execution, core.final_state, scale)?
        }
        Some(tokens) => {
            let tokens = tokens.mapv(|x| x as f32).into_shared();
            run_steps(&layer, &built, &inputs, &tokens, &keep, Arithmetic::Declared)?
        }
    };
    let output = relative_error(tensor(&declared, core.output, "core output")?, &reference_output)
        .ok_or_else(|| fault("core output"))?;
    let state = state_error(&declared, core.final_state, reference_state.as_ref())?;

    let (overflow, exponent) = match core.gram_exponent {
        Some(exponent) => {
            let worst = exponent.worst();
            let here = exponent.rows as f64 * largest_decay;
            let limit = if worst < EXPONENT_LIMIT {
                format!(
                    "the gate allows {worst:.1}, a margin of {:.1}",
                    EXPONENT_LIMIT - worst
                )
            } else if worst.is_finite() {
                format!(
                    "but the gate allows {worst:.1}, beyond the limit by {:.1}",
                    worst - EXPONENT_LIMIT
                )
            } else {
                "but the gate has no lower bound, so the limit can be exceeded".to_owned()
            };
            let sentence = format!(
                "operands of the {} Gram reach exp of {} rows of decay on one side of the pivot; these inputs reach at most {here:.1} of {EXPONENT_LIMIT:.1} nats, {limit}",
                layer.gram.name(),
                exponent.rows
            );
            (sentence, Some(if worst.is_finite() { worst } else { here }))
        }
        None if layer.is_attention() => (
            "the running maximum is subtracted before the exponential, which cannot overflow".to_owned(),
            None,
        ),
        None if layer.pass == Pass::Decode => (
            "a decode step builds no Gram; every exponent is a log decay and at most 0".to_owned(),
            None,
        ),
        None if !layer.mechanism.uses("gram") => (
            "the decay is constant or absent: no exponential is formed and none can overflow".to_owned(),
            None,
        ),
        None => (
            format!(
                "the {} Gram forms differences before the exponential and cannot overflow",
                layer.gram.name()
            ),
            None,
        ),
    };
    let result = NumericResult {
        output_rel_error: finite_or_infinite(output.max),
        state_rel_error: state.map(|state| finite_or_infinite(state.max)),
        output_rms_error: finite_or_infinite(output.rms),
        state_rms_error: state.map(|state| finite_or_infinite(state.rms)),
        exact_rel_error: exact_output.max.max(exact_state.map_or(0.0, |state| state.max)),
        tokens: tokens.map_or(layer.tokens, |tokens| tokens.shape()[1]) as u64,
        heads: layer.key_heads as u64,
        seed: workload.numeric.seed,
        sampled: layer != workload.layer,
        non_finite: declared.non_finite.map(|node| node.to_string()),
        overflow,
        overflow_exponent: exponent,
        overflow_limit: exponent.map(|_| EXPONENT_LIMIT),
    };
    Ok(Examined {
        result,
        strongest_decay: largest_decay,
        rows: core.gram_exponent.map(|exponent| exponent.rows),
    })
}

/// An execution whose final state is multiplied by the scales it is stored with.
fn scaled<R: Real>(
    mut execution: Execution<R>,
    state: Option<Value>,
    scale: Option<Value>,
) -> Result<Execution<R>, CheckError> {
    if let (Some(state), Some(scale)) = (state, scale) {
        let codes = tensor(&execution, state, "final state")?;
        let whole = (codes * tensor(&execution, scale, "state scale")?).into_shared();
        execution.values.insert(state, whole);
    }
    Ok(execution)
}

/// Error of the final state, where the mechanism has one.
fn state_error<R: Real>(
    execution: &Execution<R>,
    state: Option<Value>,
    reference: Option<&ArrayD<f64>>,
) -> Result<Option<RelativeError>, CheckError> {
    let (Some(state), Some(reference)) = (state, reference) else {
        return Ok(None);
    };
    let error = relative_error(tensor(execution, state, "final state")?, reference);
    error.map(Some).ok_or_else(|| CheckError::Shape {
        what: "final state",
        problem: "differs from the reference".to_owned(),
    })
}

/// An error that overflowed or has no value is beyond every bound.
fn finite_or_infinite(error: f64) -> f64 {
    if error.is_finite() { error } else { f64::INFINITY }
}

pub(super) fn tensor<'a, R>(
    execution: &'a Execution<R>,
    value: Value,
    what: &'static str,
) -> Result<&'a Tensor<R>, CheckError> {
    execution.values.get(&value).ok_or(CheckError::Shape {
        what,
        problem: "was not kept".to_owned(),
    })
}
