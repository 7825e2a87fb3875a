//! RWKV7, Goose (arXiv 2503.14456): `S = D S + a^T (b S) + k^T v`, `o = r S`, with `b = kappa` (unit length), `a = -(kappa . eta)`.
//!
//! `eta` in (0, 1) is a step size per key channel, and `l = -e^(-1/2) sigmoid(w)` lies in (-0.61, 0): a chunk of 64 rows decays by at most 39
//! nats. Every projection sees a fixed mix of a token with the one before it. Key: `k (1 + (eta - 1) . k_a)`. Output: group norm, plus what the token
//! reads of itself, `(sum r k u) v`, times a low-rank gate. The value residual from the first layer is left out: it is absent in that layer
//! and elementwise in the others.

use super::layer::{chunked, core_layout, input, low_rank, project, unit_length};
use super::rwkv::{channel_weight, gate_heads, output, token_shift};
use super::{Core, Defaults, DiagonalLowRankInputs, Granularity, Mechanism, diagonal_low_rank, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Stage, Value};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

/// Largest decay of a token, in nats.
const LARGEST_DECAY: f64 = 0.606_530_659_712_633_4;

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "rwkv7",
    title: "RWKV7, Goose",
    source: "arXiv 2503.14456",
    packed: false,
    granularity: |_| Granularity::Channel,
    fields: &[
        fields::STATE,
        fields::PACKED,
        fields::DECODE,
        &["gate_rank"],
        fields::GRAM,
        fields::INVERSE,
        fields::DECAY_RANK,
    ],
    defaults: Defaults {
        inverse: InverseVariant::Blocked16,
        decay_gate: DecayGate::Bounded,
        decay_bound: -LARGEST_DECAY,
        negative_eigenvalues: false,
        output_gate: OutputGate::LowRank,
    },
    append,
};

fn append(b: &mut Builder, layer: &Layer) -> Core {
    let (heads, dk) = (layer.key_heads, layer.key_dim);
    let (keys, values) = (heads * dk, layer.value_heads * layer.value_dim);
    b.stage(Stage::Projections);
    let x = input(b, layer);
    let shifted = token_shift(b, layer, x);
    let [r, w, k, v, a, g] = ["r", "w", "k", "v", "a", "g"].map(|name| shifted.mix(b, layer, name));
    let mut rounded = |x: Value, name: &str, width: usize| {
        let projected = project(b, layer, x, name, width);
        b.cast(&format!("{name}_rounded"), projected, layer.activations)
    };
    let query = rounded(r, "r", keys);
    let key = rounded(k, "k", keys);
    let value = rounded(v, "v", values);
    let decay = low_rank(b, layer, w, "w", (layer.decay_rank, Some(Function::Tanh)), keys);
    let eta = low_rank(b, layer, a, "eta", (layer.decay_rank, None), keys);
    let gate = low_rank(
        b,
        layer,
        g,
        "gate",
        (layer.gate_rank, Some(Function::Sigmoid)),
        values,
    );
    let gate = b.cast("gate_rounded", gate, layer.activations);

    b.stage(Stage::Convolution);
    let per_head = [layer.batch, layer.tokens, heads, dk];
    let biased = |b: &mut Builder, name: &str, raw: Value, init: Init| {
        let raw = b.reshape(&format!("{name}_heads"), raw, per_head);
        let bias = channel_weight(b, layer, &format!("{name}_0"), init);
        let shifted = b.add(&format!("{name}_biased"), raw, bias);
        b.map(&format!("{name}_sigmoid"), Function::Sigmoid, shifted)
    };
    let eta = biased(b, "eta", eta, Init::Zeros);
    let key = b.cast("k_f32", key, Dtype::F32);
    let key = b.reshape("k_heads", key, per_head);
    let removed = channel_weight(b, layer, "k_kappa", Init::Uniform { low: 0.5, high: 1.0 });
    let removed = b.multiply("k . k_kappa", key, removed);
    let kappa = unit_length(b, layer, "kappa", removed);
    let write = b.multiply("kappa . eta", kappa, eta);
    let write = b.scale("a", write, -1.0);
    let share = channel_weight(b, layer, "k_a", Init::Uniform { low: 0.5, high: 1.0 });
    let less = b.map("eta - 1", Function::AddConstant(-1.0), eta);
    let less = b.multiply("(eta - 1) . k_a", less, share);
    let factor = b.map("1 + (eta - 1) . k_a", Function::AddConstant(1.0), less);
    let key = b.multiply("k_replaced", key, factor);
    let key = b.cast("k_replaced_rounded", key, layer.activations);
    let qkv = chunked(b, layer, [query, key, value], false);
    let core = |b: &mut Builder, name: &str, value: Value| {
        let rounded = b.cast(&format!("{name}_rounded"), value, layer.activations);
        core_layout(b, layer, name, rounded, heads, 1, dk)
    };
    let (write, read) = (core(b, "A", write), core(b, "B", kappa));

    b.stage(Stage::Gates);
    let decay = biased(
        b,
        "w",
        decay,
        Init::Uniform {
            low: -6.0,
            high: -1.0,
        },
    );
    let log_decay = b.scale("l", decay, -LARGEST_DECAY);
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, 1, dk);

    let inputs = DiagonalLowRankInputs {
        query: qkv.query,
        key: qkv.key,
        value: qkv.value,
        write,
        read,
        log_decay,
    };
    let core = diagonal_low_rank::append(b, layer, inputs, LARGEST_DECAY);
    b.stage(Stage::OutputNorm);
    let own = own_values(b, layer, [query, key, value]);
    let gate = gate_heads(b, layer, gate);
    output(b, layer, core.output, Some(own), Some(gate));
    core
}

/// `(sum_c r_c k_c u_c) v` per value head: `[B, T, Hv, dv]`, f32.
fn own_values(b: &mut Builder, layer: &Layer, [query, key, value]: [Value; 3]) -> Value {
    let (batch, tokens, heads) = (layer.batch, layer.tokens, layer.key_heads);
    let mut wide = |name: &str, x: Value, dims: Vec<usize>| {
        let x = b.reshape(&format!("{name}_own"), x, dims);
        b.cast(&format!("{name}_own_f32"), x, Dtype::F32)
    };
    let q = wide("r", query, vec![batch, tokens, heads, layer.key_dim]);
    let k = wide("k", key, vec![batch, tokens, heads, layer.key_dim]);
    let by_key_head = vec![batch, tokens, heads, layer.sharing() * layer.value_dim];
    let v = wide("v", value, by_key_head);
    let u = channel_weight(b, layer, "r_k", Init::Normal { std: 0.1 });
    let rk = b.multiply("r k", q, k);
    let rk = b.multiply("r k u", rk, u);
    let sum = b.sum_minor("r k u_sum", rk);
    let own = b.multiply("(r k u) v", v, sum);
    b.reshape(
        "own_heads",
        own,
        [batch, tokens, layer.value_heads, layer.value_dim],
    )
}
