//! Linear attention (arXiv 2006.16236): `S = S + phi(k)^T v`, `o = phi(q) S`, without decay.
//!
//! `phi` is `elu + 1`, `relu` or the identity. With `normaliser`, outputs are divided by `phi(q) . z`, `z = z + phi(k)`. Nothing forgets, so the
//! state grows with the sequence. No convolution, no output gate (flash-linear-attention's layer).

use super::gated_outer;
use super::layer::{chunked, output, projections, split};
use super::{Core, Defaults, GatedOuterInputs, Granularity, Mechanism, OuterDecay, Readout, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Role, Stage, Value};
use crate::layer::{DecayGate, FeatureMap, InitialState, InverseVariant, Layer, OutputGate, Pass};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "linear_attention",
    title: "linear attention",
    source: "arXiv 2006.16236",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[
        fields::STATE,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::OUTPUT_GATE,
        fields::FEATURES,
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

    b.stage(Stage::Convolution);
    let qkv = b.cast("qkv_f32", projected.qkv, Dtype::F32);
    let [query, key, value] = split(b, layer, qkv);
    let query = feature_map(b, layer, "q", query);
    let query = b.scale("q_scaled", query, (layer.key_dim as f64).sqrt().recip());
    let key = feature_map(b, layer, "k", key);
    let qkv = chunked(b, layer, [query, key, value], false);

    let readout = if layer.normaliser {
        let initial = (layer.initial_state == InitialState::Given).then(|| {
            let dims = [layer.states(), layer.key_heads, 1, 1, 1, layer.key_dim];
            // A sum of features is positive.
            let init = Init::Uniform { low: 0.5, high: 1.5 };
            let name = match layer.pass {
                Pass::Forward | Pass::Verify => "z_0",
                Pass::Decode => gated_outer::NORMALISER,
            };
            b.input(name, dims, Dtype::F32, Role::State, init)
        });
        Readout::Normalised { initial }
    } else {
        Readout::Plain
    };
    let inputs = GatedOuterInputs {
        query: qkv.query,
        key: qkv.key,
        value: qkv.value,
        decay: OuterDecay::None,
        bonus: None,
        readout,
    };
    let core = gated_outer::append(b, layer, inputs, qkv.value, 0.0);
    output(b, layer, core.output, projected.output_gate, Function::Silu);
    core
}

fn feature_map(b: &mut Builder, layer: &Layer, name: &str, x: Value) -> Value {
    match layer.feature_map {
        FeatureMap::Identity => x,
        FeatureMap::Relu => b.map(&format!("{name}_relu"), Function::MaximumConstant(0.0), x),
        FeatureMap::Elu1 => {
            // elu(x) + 1 = max(x, 0) + exp(min(x, 0)).
            let above = b.map(&format!("{name}_above"), Function::MaximumConstant(0.0), x);
            let below = b.map(&format!("{name}_below"), Function::MinimumConstant(0.0), x);
            let below = b.exp(&format!("{name}_exp"), below);
            b.add(&format!("{name}_elu1"), above, below)
        }
    }
}
