//! Gated `DeltaNet` (arXiv 2412.06464): `S = D S + k^T beta (v - k D S)` with one decay and one step size per value head.
//!
//! With fewer key heads than value heads (Qwen3-Next) the raw products `k k^T` and `q k^T` are shared by the value heads of a key head; decay masks,
//! inverse and state are per value head.

use super::delta_rule;
use super::gates::{self, GateInit};
use super::layer::{convolution, core_layout, output, project, projections};
use super::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, fields};
use crate::graph::{Builder, Function};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "gdn",
    title: "Gated DeltaNet",
    source: "arXiv 2412.06464",
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

    let qkv = convolution(b, layer, projected.qkv, false);
    let log_decay = gates::log_decay(b, layer, decay_raw, layer.value_heads, 1, GateInit::TIME_STEP);
    let step = gates::step_size(b, layer, step_raw);
    let (heads, sharing) = (layer.key_heads, layer.sharing());
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, sharing, 1);
    let step = core_layout(b, layer, "beta_core", step, heads, sharing, 1);

    let inputs = DeltaRuleInputs {
        step: Some(step),
        log_decay: Some(log_decay),
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, layer, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Silu);
    core
}
