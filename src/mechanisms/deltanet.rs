//! `DeltaNet` (arXiv 2406.06484): `S = S + k^T beta (v - k S)`, the delta rule without decay.
//!
//! Both Gram matrices are masked products and the core has no exponential. Matrix FLOPs of the core per token and head, with an inverse of
//! `2 (log2 C - 1)` products: `6 C dk + 4 C dv + 6 dk dv + 4 (log2 C - 1) C^2`, as with decay.

use super::delta_rule;
use super::gates;
use super::layer::{convolution, core_layout, output, project, projections};
use super::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, fields};
use crate::graph::{Builder, Function};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "deltanet",
    title: "DeltaNet",
    source: "arXiv 2406.06484",
    packed: false,
    granularity: |_| Granularity::None,
    fields: &[
        fields::COMMON,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::VERIFY,
        fields::DELTA_ONE_READ,
    ],
    defaults: Defaults {
        inverse: InverseVariant::Blocked16,
        decay_gate: DecayGate::Softplus,
        decay_bound: -5.0,
        negative_eigenvalues: false,
        output_gate: OutputGate::None,
    },
    append,
};

fn append(b: &mut Builder, layer: &Layer) -> Core {
    let projected = projections(b, layer);
    let step_raw = project(b, layer, projected.x, "step", layer.value_heads);

    let qkv = convolution(b, layer, projected.qkv, false);
    let step = gates::step_size(b, layer, step_raw);
    let step = core_layout(b, layer, "beta_core", step, layer.key_heads, layer.sharing(), 1);

    let inputs = DeltaRuleInputs {
        step: Some(step),
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, layer, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Silu);
    core
}
