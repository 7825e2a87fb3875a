//! Kaczmarz linear attention (arXiv 2605.08587): Gated `DeltaNet` with the step of Kaczmarz' method, `beta = eta / (|k|^2 + eps)`, on keys that are not
//! normalised. With unit keys it is Gated `DeltaNet` with `beta = eta / (1 + eps)`.
//!
//! Matrix FLOPs of the core as for Gated `DeltaNet`, per token and head `6 C dk + 4 C dv + 6 dk dv + 4 (log2 C - 1) C^2`; the norm moves from the convolution to
//! the step size, `2 dk` vector operations and a reciprocal.

use super::delta_rule;
use super::gates::{self, GateInit};
use super::layer::{convolution_of_free_keys, core_layout, output, project, projections};
use super::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

/// Keeps the step of a key of length zero finite; the value is our reading.
const STEP_EPSILON: f64 = 1e-6;

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "kaczmarz",
    title: "Kaczmarz linear attention",
    source: "arXiv 2605.08587",
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
        fields::DELTA,
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

    let qkv = convolution_of_free_keys(b, layer, projected.qkv, false);
    let log_decay = gates::log_decay(b, layer, decay_raw, layer.value_heads, 1, GateInit::TIME_STEP);
    let eta = gates::step_size(b, layer, step_raw);
    let (heads, sharing) = (layer.key_heads, layer.sharing());
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, sharing, 1);
    let eta = core_layout(b, layer, "eta_core", eta, heads, sharing, 1);

    let key = b.cast("K_f32", qkv.key, Dtype::F32);
    let squared = b.multiply("K_squared", key, key);
    let length = b.sum_minor("|k|^2", squared);
    let length = b.map("|k|^2 + eps", Function::AddConstant(STEP_EPSILON), length);
    let inverse = b.map("1 / (|k|^2 + eps)", Function::Reciprocal, length);
    let inputs = DeltaRuleInputs {
        step: Some(b.multiply("beta_core", eta, inverse)),
        log_decay: Some(log_decay),
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, layer, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Silu);
    core
}
