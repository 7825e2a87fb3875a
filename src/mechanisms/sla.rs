//! Systolic Linear Attention: the delta rule with wide keys, `decay_tiles` decays per key head, and the values of `R` value heads packed
//! side by side on their shared key head.
//!
//! Decay and step size belong to the key head. That is what makes one chunk inverse valid for all `R` value heads: the inverse depends on keys, decays
//! and step sizes only. The grouping of decays into tiles lets the Gram be one product with the decays folded into its
//! operands, as long as `C/2` tokens of decay stay below the overflow limit. Reconstruction: docs/model.md says which parts are published.

use super::delta_rule;
use super::gates::{self, GateInit};
use super::layer::{convolution, core_layout, output, project, projections};
use super::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, fields};
use crate::graph::{Builder, Function, Value};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "sla",
    title: "Systolic Linear Attention",
    source: "Systolic Linear Attention paper, 2026",
    packed: true,
    granularity,
    fields: &[
        fields::COMMON,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::VERIFY,
        fields::GRAM,
        fields::DECAY,
        fields::TILES,
        fields::DELTA,
    ],
    defaults: Defaults {
        inverse: InverseVariant::BlockDoubling,
        decay_gate: DecayGate::Bounded,
        decay_bound: -1.3,
        negative_eigenvalues: true,
        output_gate: OutputGate::LowRank,
    },
    append,
};

pub(super) fn granularity(layer: &Layer) -> Granularity {
    match layer.decay_tiles {
        1 => Granularity::Scalar,
        tiles if tiles == layer.key_dim => Granularity::Channel,
        tiles => Granularity::Tiles(tiles),
    }
}

fn append(b: &mut Builder, layer: &Layer) -> Core {
    append_with(b, layer, |_, _, key, step| (key, step))
}

/// The layer with write keys and step sizes that `write` makes of the keys `[B, Hk, 1, N, C, dk]` and step sizes `[B, Hk, 1, N, C, 1]`.
pub(super) fn append_with(
    b: &mut Builder,
    layer: &Layer,
    write: fn(&mut Builder, &Layer, Value, Value) -> (Value, Value),
) -> Core {
    let projected = projections(b, layer);
    let tiles = layer.decay_tiles;
    let decay_raw = project(b, layer, projected.x, "decay", layer.key_heads * tiles);
    let step_raw = project(b, layer, projected.x, "step", layer.key_heads);

    let qkv = convolution(b, layer, projected.qkv, true);
    let log_decay = gates::log_decay(b, layer, decay_raw, layer.key_heads, tiles, GateInit::SIGMOID);
    let step = gates::step_size(b, layer, step_raw);
    let log_decay = core_layout(b, layer, "l_core", log_decay, layer.key_heads, 1, tiles);
    let step = core_layout(b, layer, "beta_core", step, layer.key_heads, 1, 1);

    let (write_key, step) = write(b, layer, qkv.key, step);
    let inputs = DeltaRuleInputs {
        write_key,
        step: Some(step),
        log_decay: Some(log_decay),
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, layer, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Sigmoid);
    core
}
