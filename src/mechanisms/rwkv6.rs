//! RWKV6, Finch (arXiv 2404.05892): `o = q (S + Diag(u) k^T v)`, then `S = D S + k^T v`, with `l = -exp(w)` per key channel.
//!
//! The read comes before the update; a learned bonus `u` stands in for the token itself. Queries are called receptance and not scaled. In place
//! of a convolution every projection sees its own mix of a token with the one before it, and the mix depends on the token through a low rank.
//! The decay has no lower bound. Output: group norm and a swish gate.

use super::gated_outer;
use super::layer::{chunked, core_layout, input, low_rank, output_gate, project, weight};
use super::rwkv::{Shifted, channel_weight, gate_heads, mix_weight, output, token_shift};
use super::{Core, Defaults, GatedOuterInputs, Granularity, Mechanism, OuterDecay, Readout, fields};
use crate::graph::{Builder, Function, Init, Precision, Stage, Value};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "rwkv6",
    title: "RWKV6, Finch",
    source: "arXiv 2404.05892",
    packed: false,
    granularity: |_| Granularity::Channel,
    fields: &[
        fields::STATE,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::OUTPUT_GATE,
        fields::GRAM,
        fields::DECAY_RANK,
        fields::MIX_RANK,
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
    let (heads, dk) = (layer.key_heads, layer.key_dim);
    b.stage(Stage::Projections);
    let x = input(b, layer);
    let shifted = token_shift(b, layer, x);
    let [w, k, v, r, g] = data_dependent_mixes(b, layer, shifted);
    let mut rounded = |x: Value, name: &str, width: usize| {
        let projected = project(b, layer, x, name, width);
        b.cast(&format!("{name}_rounded"), projected, layer.activations)
    };
    let query = rounded(r, "r", heads * dk);
    let key = rounded(k, "k", heads * dk);
    let value = rounded(v, "v", layer.value_heads * layer.value_dim);
    let decay = low_rank(
        b,
        layer,
        w,
        "w",
        (layer.decay_rank, Some(Function::Tanh)),
        heads * dk,
    );
    let gate = output_gate(b, layer, g);

    b.stage(Stage::Convolution);
    let qkv = chunked(b, layer, [query, key, value], false);
    b.stage(Stage::Gates);
    let dims = [layer.batch, layer.tokens, heads, dk];
    let decay = b.reshape("w_heads", decay, dims);
    // The published code spreads the biases over [-6, -1], from slow to fast channels.
    let bias = channel_weight(
        b,
        layer,
        "w_0",
        Init::Uniform {
            low: -6.0,
            high: -1.0,
        },
    );
    let decay = b.add("w", decay, bias);
    let decay = b.exp("e^w", decay);
    let log_decay = b.scale("l", decay, -1.0);
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, 1, dk);

    let bonus = channel_weight(b, layer, "u", Init::Normal { std: 0.5 });
    let bonus = b.reshape("u_core", bonus, [1, heads, 1, 1, 1, dk]);
    let inputs = GatedOuterInputs {
        query: qkv.query,
        key: qkv.key,
        value: qkv.value,
        decay: OuterDecay::Given(log_decay),
        bonus: Some(bonus),
        readout: Readout::Plain,
    };
    let core = gated_outer::append(b, layer, inputs, qkv.value, f64::INFINITY);
    b.stage(Stage::OutputNorm);
    let gate = gate.map(|gate| {
        let gate = gate_heads(b, layer, gate);
        b.map("output_gate_activated", Function::Silu, gate)
    });
    output(b, layer, core.output, None, gate);
    core
}

/// Inputs of the projections of decay, key, value, receptance and gate:
/// `x + (x_previous - x) . (mu_i + tanh(x_m W_i) V_i)` with `x_m` a first, fixed mix.
fn data_dependent_mixes(b: &mut Builder, layer: &Layer, shifted: Shifted) -> [Value; 5] {
    const MIXES: [&str; 5] = ["w", "k", "v", "r", "g"];
    let rank = layer.mix_rank;
    let first = shifted.mix(b, layer, "m");
    let down = weight(b, layer, "W_mix", layer.model_width, MIXES.len() * rank);
    let hidden = b.matmul("mix_hidden", first, down, Precision::Default);
    let hidden = b.map("mix_tanh", Function::Tanh, hidden);
    let hidden = b.cast("mix_rounded", hidden, layer.activations);
    let mut start = 0;
    MIXES.map(|name| {
        let part = b.slice(&format!("mix_{name}_hidden"), hidden, 2, start, rank);
        start += rank;
        let up = weight(b, layer, &format!("V_mix_{name}"), rank, layer.model_width);
        let dynamic = b.matmul(&format!("mix_{name}"), part, up, Precision::Default);
        let mu = mix_weight(b, layer, name);
        let mix = b.add(&format!("mu_{name} + mix"), dynamic, mu);
        shifted.mix_by(b, layer, name, mix)
    })
}
