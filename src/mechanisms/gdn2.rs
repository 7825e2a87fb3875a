//! Gated `DeltaNet` 2 (arXiv 2605.22791): `S = (I - k^T (b . k)) D S + k^T (w . v)` with an erase gate `b` per key channel, a write gate `w` per value
//! channel and a decay per key channel. With `b = w = beta` it is Kimi Delta Attention.
//!
//! The gates take the place of the step size: read key `r = b . k`, value `y = w . v`. Matrix FLOPs of the core per token and head, with an inverse of
//! `2 (log2 C - 1)` products: `6 C dk + 4 C dv + 6 dk dv + 4 (log2 C - 1) C^2`; two full projections of `Hk dk` and `Hv dv` channels come on top.

use super::delta_rule;
use super::gates::{self, GateInit};
use super::layer::{convolution, core_layout, output, project, project_low_rank, projections};
use super::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "gdn2",
    title: "Gated DeltaNet 2",
    source: "arXiv 2605.22791",
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
        decay_gate: DecayGate::Softplus,
        decay_bound: -5.0,
        negative_eigenvalues: false,
        output_gate: OutputGate::LowRank,
    },
    append,
};

fn append(b: &mut Builder, layer: &Layer) -> Core {
    let (heads, sharing) = (layer.key_heads, layer.sharing());
    let (keys, values) = (heads * layer.key_dim, layer.value_heads * layer.value_dim);
    let projected = projections(b, layer);
    let decay_raw = project_low_rank(b, layer, projected.x, "decay", keys);
    let erase_raw = project(b, layer, projected.x, "erase", keys);
    let write_raw = project(b, layer, projected.x, "write", values);

    let qkv = convolution(b, layer, projected.qkv, false);
    let log_decay = gates::log_decay(b, layer, decay_raw, heads, layer.key_dim, GateInit::TIME_STEP);
    // Negative eigenvalues double the erase gate alone.
    let erase = gates::step_size(b, layer, erase_raw);
    let write = b.map("w", Function::Sigmoid, write_raw);
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, 1, layer.key_dim);
    let erase = core_layout(b, layer, "b_core", erase, heads, 1, layer.key_dim);
    let write = core_layout(b, layer, "w_core", write, heads, sharing, layer.value_dim);
    let key = b.cast("K_f32", qkv.key, Dtype::F32);
    let value = b.cast("V_f32", qkv.value, Dtype::F32);

    let inputs = DeltaRuleInputs {
        read_key: b.multiply("b . K", erase, key),
        value: b.multiply("w . V", write, value),
        log_decay: Some(log_decay),
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, layer, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Sigmoid);
    core
}
