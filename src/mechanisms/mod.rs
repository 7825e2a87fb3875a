//! Mechanisms as op graphs.
//!
//! A mechanism is one file: a [`Mechanism`] that names it, says which fields of the layer it reads and what their usual values are, and a
//! function that appends its stages to a [`crate::graph::Builder`] in the notation of docs/model.md. What all mechanisms share
//! (projections, convolution, output norm) is in [`layer`]; the chunk form of the delta rule is in [`delta_rule`], with its
//! variants in [`gram`] and [`inverse`].
//!
//! Layout inside the core: `[batch, key head, value head of the key head, chunk, row, channel]`. A quantity that value heads share
//! has extent 1 in the third dimension; a packed mechanism puts the values of a key head side by side into one wide channel
//! dimension, so its third dimension is 1 everywhere.

mod conjugate_gradient;
mod delta_rule;
mod gates;
mod gdn;
mod gram;
mod inverse;
mod kda;
mod layer;
mod mesanet;
mod registry;
mod sla;
mod spd_sla_w;
mod whitening;

pub use inverse::append_inverse;
pub use mesanet::{MesaOperator, append_mesa_solve};
pub use registry::{Defaults, Mechanism, fields};
pub use whitening::{RIDGE, append_newton_schulz, append_polar, append_whitened, normalised};

use crate::graph::{BuildError, Builder, Graph, Stage, Value};
use crate::layer::{GramVariant, Layer};

/// Every mechanism, in the order they are listed to people.
pub const ALL: &[&Mechanism] = &[
    &gdn::MECHANISM,
    &kda::MECHANISM,
    &sla::MECHANISM,
    &spd_sla_w::MECHANISM,
    &mesanet::MECHANISM,
];

/// How finely the decay is resolved along the key channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// One decay for the whole key.
    Scalar,
    /// One decay per tile of channels.
    Tiles(usize),
    /// One decay per channel.
    Channel,
}

/// Values of the graph from which the token recurrence of the mechanism's family can be run: what the numeric check compares against.
/// All in core layout, padded rows included.
#[derive(Debug, Clone, Copy)]
pub enum Recurrence {
    /// `u = beta (v - r S~)`, `S = D S + x^T u`, `o = q S`.
    DeltaRule(DeltaRuleInputs),
    /// `H = e^g H + beta k^T k`, `Z = e^g Z + beta k^T v`, `o = q (H + Lam)^-1 Z`; the final state is `[H | Z]`.
    Mesa(MesaInputs),
}

impl Recurrence {
    /// The values an execution has to keep for the recurrence to be run.
    #[must_use]
    pub fn values(&self) -> Vec<Value> {
        match self {
            Recurrence::DeltaRule(i) => vec![i.query, i.write_key, i.read_key, i.value, i.step, i.log_decay],
            Recurrence::Mesa(i) => {
                let mut values = vec![i.query, i.key, i.value, i.step, i.lambda];
                values.extend(i.log_decay);
                values
            }
        }
    }
}

/// Inputs of `MesaNet`.
#[derive(Debug, Clone, Copy)]
pub struct MesaInputs {
    /// Queries `[B, Hk, 1, N, C, dk]`.
    pub query: Value,
    /// Keys `[B, Hk, 1, N, C, dk]`.
    pub key: Value,
    /// Values of all value heads of a key head `[B, Hk, 1, N, C, R dv]`.
    pub value: Value,
    /// Step sizes `[B, Hk, 1, N, C, 1]`, f32.
    pub step: Value,
    /// Log decays `[B, Hk, 1, N, C, 1]`, f32; absent where nothing is forgotten.
    pub log_decay: Option<Value>,
    /// Regularisation per channel `[1, Hk, 1, 1, 1, dk]`, f32.
    pub lambda: Value,
}

/// Inputs of the delta rule.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuleInputs {
    /// Queries `[B, Hk, 1, N, C, dk]`, scaled.
    pub query: Value,
    /// Write keys `[B, Hk, 1, N, C, dk]`.
    pub write_key: Value,
    /// Read keys without the step size `[B, Hk, 1, N, C, dk]`.
    pub read_key: Value,
    /// Values without the step size `[B, Hk, R, N, C, width]`.
    pub value: Value,
    /// Step sizes `[B, Hk, R, N, C, 1]`, f32.
    pub step: Value,
    /// Log decays `[B, Hk, R, N, C, g]`, f32, with `g` 1, the number of tiles, or `dk`.
    pub log_decay: Value,
}

/// The exponent that operands of a factored Gram reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GramExponent {
    /// Rows on either side of the pivot over which decay accumulates.
    pub rows: usize,
    /// Largest `|log decay|` of a token the gate allows, in nats; infinite for an unbounded gate.
    pub largest_decay: f64,
}

/// ln of the largest finite f32 (and, to two digits, of bf16): an operand beyond `exp` of this overflows.
pub const EXPONENT_LIMIT: f64 = 88.722_839_111_673;

impl GramExponent {
    /// Largest exponent, in nats.
    #[must_use]
    pub fn worst(&self) -> f64 {
        self.rows as f64 * self.largest_decay
    }
}

/// A layer as a graph, with the places the other modules need to find.
#[derive(Debug, Clone)]
pub struct LayerGraph {
    /// The graph; named outputs `y` (layer output), `o` (core output) and `state` (final state).
    pub graph: Graph,
    /// What was appended where.
    pub core: Core,
}

/// The core of a layer: everything between the gates and the output norm.
#[derive(Debug, Clone, Copy)]
pub struct Core {
    /// Where the recurrence starts from.
    pub recurrence: Recurrence,
    /// Values that enter the core: what is computed from them has value columns.
    pub value: Value,
    /// Log decays that enter the core, for their range; absent where the decay is constant.
    pub log_decay: Option<Value>,
    /// Initial state `[B, Hk, R, dk, width]`, where the layer starts from a given one.
    pub initial_state: Option<Value>,
    /// Core output before the output norm, `[B, Hk, R, N, C, width]`.
    pub output: Value,
    /// Final state `[B, Hk, R, dk, width]`.
    pub final_state: Value,
    /// Exponent of the Gram operands, where the variant has such a limit.
    pub gram_exponent: Option<GramExponent>,
}

/// Gram variants that have a meaning for a decay granularity, the usual one first.
#[must_use]
pub fn gram_variants(granularity: Granularity) -> &'static [GramVariant] {
    match granularity {
        Granularity::Scalar => &[GramVariant::ScalarMask, GramVariant::Folded],
        Granularity::Tiles(_) => &[
            GramVariant::Folded,
            GramVariant::TileMasks,
            GramVariant::Pivot,
            GramVariant::PivotCausal,
            GramVariant::Broadcast,
        ],
        Granularity::Channel => &[
            GramVariant::Pivot,
            GramVariant::PivotCausal,
            GramVariant::Folded,
            GramVariant::Broadcast,
        ],
    }
}

/// Builds the graph of a layer, op 1 to op 7c.
///
/// # Errors
/// A [`BuildError`] where the sizes of the layer do not fit each other; a validated workload has none.
pub fn build(layer: &Layer) -> Result<LayerGraph, BuildError> {
    let mut b = Builder::new(Stage::Projections);
    let core = (layer.mechanism.append)(&mut b, layer);
    Ok(LayerGraph {
        graph: b.finish()?,
        core,
    })
}
