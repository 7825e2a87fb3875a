//! A delta rule whose writes are scaled: `S = D S + s k^T beta (v - k D S)`, with a learned `s` per key head.
//!
//! Write key `s k`, read key `beta k`, value `beta v`. Matrix FLOPs as for Gated `DeltaNet`: the scale is vector work.

use tpusim::dtype::Dtype;
use tpusim::graph::{Builder, Function, Init, Role};
use tpusim::layer::{DecayGate, InverseVariant, Layer, OutputGate};
use tpusim::mechanisms::gates::{GateInit, log_decay, step_size};
use tpusim::mechanisms::layer::{convolution, core_layout, output, project, projections};
use tpusim::mechanisms::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, delta_rule, fields};

pub(crate) const MECHANISM: Mechanism = Mechanism {
    name: "scaled_delta",
    title: "Scaled delta rule",
    source: "docs/add-a-mechanism.md",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[fields::COMMON, fields::GRAM, fields::DECAY, fields::DELTA],
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
    let (heads, sharing) = (layer.key_heads, layer.sharing());
    let projected = projections(b, layer);
    let decay_raw = project(b, layer, projected.x, "decay", layer.value_heads);
    let step_raw = project(b, layer, projected.x, "step", layer.value_heads);

    let qkv = convolution(b, layer, projected.qkv, false);
    let decay = log_decay(b, layer, decay_raw, layer.value_heads, 1, GateInit::TIME_STEP);
    let decay = core_layout(b, layer, "l_core", decay, heads, sharing, 1);
    let step = step_size(b, layer, step_raw);
    let step = core_layout(b, layer, "beta_core", step, heads, sharing, 1);

    // One number per key head, against keys [B, Hk, 1, N, C, dk].
    let around_one = Init::Uniform { low: 0.5, high: 1.5 };
    let scale = b.input("scale", [heads, 1, 1, 1, 1], Dtype::F32, Role::Weight, around_one);
    let key = b.cast("K_f32", qkv.key, Dtype::F32);
    let write_key = b.multiply("s K", key, scale);
    let inputs = DeltaRuleInputs {
        write_key: b.cast("X", write_key, layer.activations),
        step: Some(step),
        log_decay: Some(decay),
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, layer, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Silu);
    core
}
