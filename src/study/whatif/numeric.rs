//! The numbers of a sweep: every layer of it executed on seeded inputs, beside the times.

use rayon::prelude::*;
use serde::Serialize;

use super::chips::reason;
use super::evaluate::Sweep;
use super::space::digits;
use crate::config::{Assignment, ConfigError};
use crate::layer::{DecayGate, Layer, Pass};
use crate::mechanisms::EXPONENT_LIMIT;
use crate::study::check::{CheckError, Extent, examine, overflows};
use crate::workload::{self, Workload};

/// Most layers that are executed.
const MOST_LAYERS: u64 = 256;
/// How exactly the bound of the gate that overflows is found, as a factor.
const BOUND_STEP: f64 = 1.05;
/// How far beyond the limit of the Gram an overflow is looked for, in doublings.
const DOUBLINGS: u32 = 6;

/// What the execution of one layer of a sweep found. Tokens, heads and seed are those that the workload declares for its numeric check.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerNumerics {
    /// The varied fields of the workload, as `--set` takes them.
    pub set: Vec<String>,
    /// What was found.
    #[serde(flatten)]
    pub found: Option<Numerics>,
    /// Why nothing was, where the values do not fit each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Errors against the token recurrence in f64, and when the Gram overflows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Numerics {
    /// Tokens executed.
    pub tokens: u64,
    /// Key heads executed.
    pub heads: u64,
    /// Seed of the inputs.
    pub seed: u64,
    /// Largest error of the core output over its largest value; null where a value is not finite.
    pub output_rel_error: Option<f64>,
    /// RMS error of the core output over its RMS value; null where a value is not finite.
    pub output_rms_error: Option<f64>,
    /// Largest error of the final state over its largest value, where there is one.
    pub state_rel_error: Option<f64>,
    /// Strongest decay among the inputs, in nats per token.
    pub strongest_decay: f64,
    /// Decay in nats per token from which an operand of the Gram overflows where every token decays alike: ln of the largest finite f32 over the rows on one side of
    /// the pivot. None where the Gram cannot overflow.
    pub decay_limit: Option<f64>,
    /// Weakest bound of the gate, in nats per token, with which the execution met a value that is not finite, to 5 %; found by executing the layer with other
    /// bounds. None where the gate has no bound, and where nothing overflowed up to 64 times the limit.
    pub overflowing_bound: Option<f64>,
}

impl Sweep {
    /// Executes every layer of the sweep, in the order of the points; hardware fields change nothing here.
    ///
    /// # Errors
    /// Where there are too many layers.
    pub fn numerics(&self) -> Result<Vec<LayerNumerics>, ConfigError> {
        let axes = self.grid().space.workload_axes();
        let layers = axes
            .iter()
            .fold(1_u64, |n, axis| n.saturating_mul(axis.values().len() as u64));
        if layers > MOST_LAYERS {
            return Err(ConfigError::argument(format!(
                "{layers} layers to execute; expected at most {MOST_LAYERS} with `--numerics`"
            )));
        }
        let executed = (0..layers).into_par_iter().map(|layer| {
            let digits = digits(axes, layer);
            let changes: Vec<Assignment> = axes
                .iter()
                .zip(digits)
                .flat_map(|(axis, i)| axis.changes()[i].iter().cloned())
                .collect();
            let found = self.executed().with(&changes);
            let found = found
                .and_then(|document| workload::from_document(&document))
                .map_err(|error| reason(&error).to_string())
                .and_then(|workload| numerics(&workload).map_err(|error| error.to_string()));
            let (found, reason) = match found {
                Ok(found) => (Some(found), None),
                Err(reason) => (None, Some(reason)),
            };
            LayerNumerics {
                set: changes.iter().map(|change| change.text().to_owned()).collect(),
                found,
                reason,
            }
        });
        Ok(executed.collect())
    }
}

/// Executes the sample of a workload, then the same with other bounds of its gate.
fn numerics(workload: &Workload) -> Result<Numerics, CheckError> {
    let examined = examine(workload, Extent::Sample)?;
    let result = examined.result;
    let decay_limit = examined.rows.map(|rows| EXPONENT_LIMIT / rows as f64);
    let layer = workload.numeric_layer();
    let bounded = layer.decay_gate == DecayGate::Bounded && layer.pass == Pass::Forward;
    let overflowing_bound = match decay_limit {
        Some(limit) if bounded => weakest_overflow(&layer, workload.numeric.seed, limit)?,
        _ => None,
    };
    let finite = |error: f64| error.is_finite().then_some(error);
    Ok(Numerics {
        tokens: result.tokens,
        heads: result.heads,
        seed: result.seed,
        output_rel_error: finite(result.output_rel_error),
        output_rms_error: finite(result.output_rms_error),
        state_rel_error: result.state_rel_error.and_then(finite),
        strongest_decay: examined.strongest_decay,
        decay_limit,
        overflowing_bound,
    })
}

/// The weakest bound of the gate that overflows, from `limit` on: below it no inputs do.
fn weakest_overflow(layer: &Layer, seed: u64, limit: f64) -> Result<Option<f64>, CheckError> {
    let at = |bound: f64| {
        let layer = Layer {
            decay_bound: -bound,
            ..layer.clone()
        };
        overflows(&layer, seed)
    };
    let (mut low, mut high) = (limit, limit);
    let mut doubled = 0;
    while !at(high)? {
        if doubled == DOUBLINGS {
            return Ok(None);
        }
        (low, high) = (high, 2.0 * high);
        doubled += 1;
    }
    while high > low * BOUND_STEP {
        let middle = (low * high).sqrt();
        if at(middle)? {
            high = middle;
        } else {
            low = middle;
        }
    }
    Ok(Some(high))
}
