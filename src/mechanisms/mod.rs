//! Mechanisms as op graphs.
//!
//! A mechanism appends the stages of its layer to a [`crate::graph::Builder`] in the notation of docs/model.md. What all mechanisms share
//! (projections, convolution, output norm) is in [`layer`]; the chunk form of the delta rule is in [`delta_rule`], with its
//! variants in [`gram`] and [`inverse`]. A mechanism's own file says which keys, values, decays and step sizes it feeds in.
//!
//! Layout inside the core: `[batch, key head, value head of the key head, chunk, row, channel]`. A quantity that value heads share
//! has extent 1 in the third dimension; SLA packs the values of a key head side by side into one wide channel
//! dimension, so its third dimension is 1 everywhere.

mod delta_rule;
mod gates;
mod gdn;
mod gram;
mod inverse;
mod kda;
mod layer;
mod sla;

pub use inverse::append_inverse;

use crate::graph::{BuildError, Builder, Graph, Stage, Value};
use crate::workload::{GramVariant, Layer, MechanismName};

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

/// Values of the graph from which the token recurrence can be run: what the numeric check compares against.
/// All in core layout, padded rows included.
#[derive(Debug, Clone, Copy)]
pub struct RecurrenceInputs {
    /// Queries `[B, Hk, 1, N, C, dk]`, scaled.
    pub query: Value,
    /// Write keys `[B, Hk, 1, N, C, dk]`.
    pub write_key: Value,
    /// Read keys without the step size `[B, Hk, 1, N, C, dk]`.
    pub read_key: Value,
    /// Step sizes `[B, Hk, R, N, C, 1]`.
    pub step: Value,
    /// Values without the step size `[B, Hk, R, N, C, width]`.
    pub value: Value,
    /// Log decays `[B, Hk, R, N, C, g]` with `g` 1, the number of tiles, or `dk`.
    pub log_decay: Value,
    /// Initial state `[B, Hk, R, dk, width]`, where the layer starts from a given one.
    pub initial_state: Option<Value>,
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
    /// Where the recurrence starts from.
    pub recurrence: RecurrenceInputs,
    /// Core output before the output norm, `[B, Hk, R, N, C, width]`.
    pub core_output: Value,
    /// Final state `[B, Hk, R, dk, width]`.
    pub final_state: Value,
    /// Exponent of the Gram operands, where the variant has such a limit.
    pub gram_exponent: Option<GramExponent>,
}

/// Decay granularity of a layer.
#[must_use]
pub fn granularity(layer: &Layer) -> Granularity {
    match layer.mechanism {
        MechanismName::Gdn => Granularity::Scalar,
        MechanismName::Kda => Granularity::Channel,
        MechanismName::Sla => match layer.decay_tiles {
            1 => Granularity::Scalar,
            tiles if tiles == layer.key_dim => Granularity::Channel,
            tiles => Granularity::Tiles(tiles),
        },
    }
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
    let parts = match layer.mechanism {
        MechanismName::Gdn => gdn::append(&mut b, layer),
        MechanismName::Kda => kda::append(&mut b, layer),
        MechanismName::Sla => sla::append(&mut b, layer),
    };
    Ok(LayerGraph {
        graph: b.finish()?,
        recurrence: parts.recurrence,
        core_output: parts.core_output,
        final_state: parts.final_state,
        gram_exponent: parts.gram_exponent,
    })
}

/// What a mechanism hands back besides the nodes it appended.
struct Appended {
    recurrence: RecurrenceInputs,
    core_output: Value,
    final_state: Value,
    gram_exponent: Option<GramExponent>,
}
