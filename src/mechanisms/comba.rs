//! Comba (arXiv 2506.02475): `S = D S + k^T beta (v - p S)`, `o = (q - d p) S`, with `p = sigmoid(c) k` and learned `c`, `d` per key head.
//!
//! The prediction is read from the state before the decay, and the output takes back part of what the feedback read. Here `p` and the correction are taken
//! of the unit key and the scaled query; flash-linear-attention corrects before it normalises, so the size of `d` is our reading.
//! Matrix FLOPs of the core as for Gated `DeltaNet`, per token and head `6 C dk + 4 C dv + 6 dk dv + 4 (log2 C - 1) C^2`; `p` and the query take `3 dk` vector operations.

use super::delta_rule;
use super::gates::{self, GateInit};
use super::layer::{convolution, core_layout, output, project, projections};
use super::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Role};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate, ReadConvention};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "comba",
    title: "Comba",
    source: "arXiv 2506.02475",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[
        fields::COMMON,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::VERIFY,
        fields::GRAM,
        fields::DECAY,
        fields::DELTA_ONE_READ,
    ],
    defaults: Defaults {
        inverse: InverseVariant::Blocked16,
        decay_gate: DecayGate::Softplus,
        decay_bound: -5.0,
        negative_eigenvalues: false,
        output_gate: OutputGate::Full,
    },
    append,
};

fn append(b: &mut Builder, layer: &Layer) -> Core {
    let projected = projections(b, layer);
    let decay_raw = project(b, layer, projected.x, "decay", layer.value_heads);
    let step_raw = project(b, layer, projected.x, "step", layer.value_heads);

    let qkv = convolution(b, layer, projected.qkv, false);
    let log_decay = gates::log_decay(b, layer, decay_raw, layer.value_heads, 1, GateInit::TIME_STEP);
    let step = gates::step_size(b, layer, step_raw);
    let (heads, sharing) = (layer.key_heads, layer.sharing());
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, sharing, 1);
    let step = core_layout(b, layer, "beta_core", step, heads, sharing, 1);

    // Both start at 1 in flash-linear-attention.
    let per_head = [heads, 1, 1, 1, 1];
    let feedback = b.input("feedback", per_head, Dtype::F32, Role::Weight, Init::Ones);
    let correction = b.input("correction", per_head, Dtype::F32, Role::Weight, Init::Ones);
    let feedback = b.map("feedback_sigmoid", Function::Sigmoid, feedback);
    let key = b.cast("K_f32", qkv.key, Dtype::F32);
    let p = b.multiply("p", key, feedback);
    let corrected = b.multiply("d p", p, correction);
    let query = b.cast("Q_f32", qkv.query, Dtype::F32);
    let query = b.subtract("Q - d p", query, corrected);
    let inputs = DeltaRuleInputs {
        query: b.cast("Q_corrected", query, layer.activations),
        read_key: p,
        step: Some(step),
        log_decay: Some(log_decay),
        read: ReadConvention::Undecayed,
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, layer, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Sigmoid);
    core
}
