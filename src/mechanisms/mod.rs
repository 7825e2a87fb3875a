//! Mechanisms as op graphs.
//!
//! A mechanism is one file: a [`Mechanism`] that names it, says which fields of the layer it reads and what their usual values are, and a
//! function that appends its stages to a [`crate::graph::Builder`] in the notation of docs/model.md. What all mechanisms share
//! (projections, convolution, output norm) is in [`layer`]; the chunk forms of the three families are in `gated_outer` (no solve),
//! [`delta_rule`] and `diagonal_low_rank`, with their variants in `gram` and `inverse` and the carried state in `state`.
//!
//! All of these are public, so that a mechanism can live in another crate: docs/add-a-mechanism.md builds one.
//!
//! Layout inside the core: `[batch, key head, value head of the key head, chunk, row, channel]`. A quantity that value heads share
//! has extent 1 in the third dimension; a packed mechanism puts the values of a key head side by side into one wide channel
//! dimension, so its third dimension is 1 everywhere.

mod comba;
mod conjugate_gradient;
mod decode;
mod delta_log;
pub mod delta_rule;
mod deltanet;
mod deltaproduct;
mod diagonal_low_rank;
mod flash;
mod gated_outer;
pub mod gates;
mod gdn;
mod gdn2;
mod gla;
mod gram;
mod inverse;
mod kaczmarz;
mod kda;
pub mod layer;
mod linear_attention;
mod mamba2;
mod mesanet;
mod mla;
mod preconditioned_delta;
mod q_delta;
mod registry;
mod retnet;
mod rwkv;
mod rwkv6;
mod rwkv7;
mod sla;
mod softmax;
mod spd_sla_w;
mod state;
mod tree;
mod whitening;

pub use delta_log::{LOG, MergeGraph, build_merge};
pub use gated_outer::NORMALISER_EPSILON;
pub(crate) use inverse::SUBSTITUTION_BLOCK;
pub use inverse::append_inverse;
pub use mesanet::{MesaOperator, append_mesa_solve};
pub use registry::{Defaults, Mechanism, fields};
pub use tree::gram_variants as tree_gram_variants;
pub use whitening::{RIDGE, append_newton_schulz, append_polar, append_whitened, normalised};

use crate::graph::{BuildError, Builder, Graph, Stage, Value};
use crate::layer::{GramVariant, Layer, ReadConvention};

/// Every mechanism, in the order they are listed to people.
pub const ALL: &[&Mechanism] = &[
    &gdn::MECHANISM,
    &kda::MECHANISM,
    &sla::MECHANISM,
    &deltanet::MECHANISM,
    &deltaproduct::MECHANISM,
    &gdn2::MECHANISM,
    &q_delta::MECHANISM,
    &kaczmarz::MECHANISM,
    &comba::MECHANISM,
    &preconditioned_delta::MECHANISM,
    &linear_attention::MECHANISM,
    &retnet::MECHANISM,
    &gla::MECHANISM,
    &mamba2::MECHANISM,
    &rwkv6::MECHANISM,
    &rwkv7::MECHANISM,
    &softmax::MECHANISM,
    &mla::MECHANISM,
    &spd_sla_w::MECHANISM,
    &mesanet::MECHANISM,
];

/// How finely the decay is resolved along the key channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// No decay.
    None,
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
    /// `u = beta (v - r S~)`, `S = D S + x^T u`, `o = q S`; with several keys per query, `o` after the last of them.
    DeltaRule(DeltaRuleInputs),
    /// `S = D S + k^T v`, `o = q S`.
    GatedOuterProduct(GatedOuterInputs),
    /// `S = D S + a^T (b S) + k^T v`, `o = q S`.
    DiagonalPlusLowRank(DiagonalLowRankInputs),
    /// `o_i = sum_j softmax_j(q_i k_j) v_j` over the keys the query sees.
    Softmax(SoftmaxInputs),
    /// The same for decoded tokens, whose keys are the cached ones and those of the tokens decoded so far.
    CachedSoftmax(CachedSoftmaxInputs),
    /// `H = e^g H + beta k^T k`, `Z = e^g Z + beta k^T v`, `o = q (H + Lam)^-1 Z`; the final state is `[H | Z]`.
    Mesa(MesaInputs),
}

impl Recurrence {
    /// The values an execution has to keep for the recurrence to be run.
    #[must_use]
    pub fn values(&self) -> Vec<Value> {
        match self {
            Recurrence::DeltaRule(i) => [i.query, i.write_key, i.read_key, i.value]
                .into_iter()
                .chain(i.step)
                .chain(i.log_decay)
                .collect(),
            Recurrence::GatedOuterProduct(i) => i.values(),
            Recurrence::DiagonalPlusLowRank(i) => vec![i.query, i.key, i.value, i.write, i.read, i.log_decay],
            Recurrence::Softmax(i) => vec![i.query, i.key, i.value],
            Recurrence::CachedSoftmax(i) => {
                let mut values = vec![i.query, i.key, i.value];
                values.extend(i.earlier.iter().flat_map(|&(keys, values)| [keys, values]));
                values
            }
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

/// Inputs of the delta rule. Operands may be f32 or the format of the activations; keys and queries of matrix products are rounded to the latter.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuleInputs {
    /// Queries `[B, Hk, 1, N, Cq, dk]`, scaled, in the format of the activations; `Cq` is `C`, or `C / n` with `n` keys per query.
    pub query: Value,
    /// Write keys `[B, Hk, 1, N, C, dk]`, in the format of the activations.
    pub write_key: Value,
    /// Read keys without the step size `[B, Hk, 1, N, C, dk]`.
    pub read_key: Value,
    /// Values without the step size `[B, Hk, R, N, C, width]`.
    pub value: Value,
    /// Step sizes `[B, Hk, R, N, C, 1]`, f32; absent where read key and value have them in them.
    pub step: Option<Value>,
    /// Log decays `[B, Hk, R, N, C, g]`, f32, with `g` 1, the number of tiles, or `dk`; absent where nothing decays.
    pub log_decay: Option<Value>,
    /// The state the prediction is read from.
    pub read: ReadConvention,
}

/// Inputs of gated outer products.
#[derive(Debug, Clone, Copy)]
pub struct GatedOuterInputs {
    /// Queries `[B, Hk, 1, N, C, dk]`, scaled.
    pub query: Value,
    /// Keys `[B, Hk, 1, N, C, dk]`.
    pub key: Value,
    /// Values `[B, Hk, R, N, C, dv]`.
    pub value: Value,
    /// Decay of the state.
    pub decay: OuterDecay,
    /// RWKV6: `o = q (S + Diag(u) k^T v)`, read before the update; `u [1, Hk, 1, 1, 1, dk]`, f32.
    pub bonus: Option<Value>,
    /// What becomes of `q S`.
    pub readout: Readout,
}

impl GatedOuterInputs {
    fn values(&self) -> Vec<Value> {
        let mut values = vec![self.query, self.key, self.value];
        values.extend(self.bonus);
        if let OuterDecay::Given(log_decay) = self.decay {
            values.push(log_decay);
        }
        match self.readout {
            Readout::Plain => {}
            Readout::Skip { weight, input } => values.extend([weight, input]),
            Readout::Normalised { initial } => values.extend(initial),
        }
        values
    }
}

/// Decay of gated outer products.
#[derive(Debug, Clone, Copy)]
pub enum OuterDecay {
    /// None: `l = 0`.
    None,
    /// Constant, `e^l = 1 - 2^(-5 - h)` of value head `h`: its powers are tables.
    Retention,
    /// Log decays `[B, Hk, R, N, C, g]`, f32, with `g` 1 or `dk`.
    Given(Value),
}

/// What becomes of the state readout.
#[derive(Debug, Clone, Copy)]
pub enum Readout {
    /// `o = q S`.
    Plain,
    /// `o = q S + D x`.
    Skip {
        /// `D [1, Hk, R, 1, 1, 1]`, f32.
        weight: Value,
        /// `x [B, Hk, R, N, C, dv]`.
        input: Value,
    },
    /// `o = q S / (q . z + eps)` with `z = z + k`.
    Normalised {
        /// `z` before the first token `[B, Hk, 1, 1, 1, dk]`, f32; zero where absent.
        initial: Option<Value>,
    },
}

/// Inputs of diagonal plus low rank, in core layout; all `[B, Hk, 1, N, C, dk]` but the value.
#[derive(Debug, Clone, Copy)]
pub struct DiagonalLowRankInputs {
    /// Queries, scaled.
    pub query: Value,
    /// Keys.
    pub key: Value,
    /// Values `[B, Hk, R, N, C, dv]`.
    pub value: Value,
    /// `a`: where the transition writes.
    pub write: Value,
    /// `b`: where the transition reads.
    pub read: Value,
    /// Log decays, f32.
    pub log_decay: Value,
}

/// Inputs of softmax attention, in blocks.
#[derive(Debug, Clone, Copy)]
pub struct SoftmaxInputs {
    /// Queries `[B, Hk, R, N, block_q, dk]`, scaled.
    pub query: Value,
    /// Keys `[B, Hk, 1, M, block_kv, dk]`.
    pub key: Value,
    /// Values `[B, Hk, 1, M, block_kv, dv]`.
    pub value: Value,
}

/// Inputs of softmax attention in a decode step.
#[derive(Debug, Clone, Copy)]
pub struct CachedSoftmaxInputs {
    /// Queries `[B, Hk, R, 1, 1, dk]`, scaled.
    pub query: Value,
    /// Cached keys `[B, Hk, 1, rows, dk]` and values `[B, Hk, 1, rows, dv]`, where the token sees earlier ones.
    pub earlier: Option<(Value, Value)>,
    /// Key of the token `[B, Hk, 1, 1, 1, dk]`.
    pub key: Value,
    /// Value of the token `[B, Hk, 1, 1, 1, dv]`.
    pub value: Value,
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
    /// Initial state `[B, Hk, R, dk, width]`, where the layer starts from a given one; `B` counts sequences where they are packed.
    pub initial_state: Option<Value>,
    /// Core output before the output norm, `[B, Hk, R, N, C, width]`.
    pub output: Value,
    /// Final state `[B, Hk, R, dk, width]`, where the mechanism has one; `B` counts sequences where they are packed. A decode step hands it over as
    /// it is stored: FP8 codes lack their scale here.
    pub final_state: Option<Value>,
    /// Exponent of the Gram operands, where the variant has such a limit.
    pub gram_exponent: Option<GramExponent>,
}

/// Gram variants that have a meaning for a decay granularity, the usual one first.
#[must_use]
pub fn gram_variants(granularity: Granularity) -> &'static [GramVariant] {
    match granularity {
        // Without decay the mask is one of zeros and ones.
        Granularity::None => &[GramVariant::ScalarMask],
        Granularity::Scalar => &[GramVariant::ScalarMask, GramVariant::Folded],
        Granularity::Tiles(_) => &[
            GramVariant::Folded,
            GramVariant::TileMasks,
            GramVariant::Pivot,
            GramVariant::PivotCausal,
            GramVariant::Broadcast,
            GramVariant::Halving,
        ],
        Granularity::Channel => &[
            GramVariant::Pivot,
            GramVariant::PivotCausal,
            GramVariant::Folded,
            GramVariant::Broadcast,
            GramVariant::Halving,
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
