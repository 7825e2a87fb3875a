//! Kimi Delta Attention (arXiv 2510.26692): the delta rule with one decay per key channel and one step size per head.
//!
//! The decay is projected through a low rank. Because every channel decays on its own, the chunk Gram cannot be one product with a scalar mask: it
//! takes pivots per 16 rows (or exponentials of every pair), which is vector work.

use super::delta_rule;
use super::gates::{self, GateInit};
use super::layer::{convolution, core_layout, output, project, project_low_rank, projections};
use super::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, fields};
use crate::graph::{Builder, Function};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "kda",
    title: "Kimi Delta Attention",
    source: "arXiv 2510.26692",
    packed: false,
    granularity: |_| Granularity::Channel,
    fields: &[
        fields::COMMON,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::VERIFY,
        fields::GRAM,
        fields::DECAY,
        fields::DELTA,
    ],
    defaults: Defaults {
        inverse: InverseVariant::Blocked16,
        decay_gate: DecayGate::Bounded,
        decay_bound: -5.0,
        negative_eigenvalues: false,
        output_gate: OutputGate::LowRank,
    },
    append,
};

fn append(b: &mut Builder, layer: &Layer) -> Core {
    let projected = projections(b, layer);
    let channels = layer.key_heads * layer.key_dim;
    let decay_raw = project_low_rank(b, layer, projected.x, "decay", channels);
    let step_raw = project(b, layer, projected.x, "step", layer.value_heads);

    let qkv = convolution(b, layer, projected.qkv, false);
    let log_decay = gates::log_decay(
        b,
        layer,
        decay_raw,
        layer.key_heads,
        layer.key_dim,
        GateInit::TIME_STEP,
    );
    let step = gates::step_size(b, layer, step_raw);
    let (heads, sharing) = (layer.key_heads, layer.sharing());
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, 1, layer.key_dim);
    let step = core_layout(b, layer, "beta_core", step, heads, sharing, 1);

    let inputs = DeltaRuleInputs {
        step: Some(step),
        log_decay: Some(log_decay),
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, layer, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Sigmoid);
    core
}
