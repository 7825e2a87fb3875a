//! Gated linear attention (arXiv 2312.06635): `S = D S + k^T v` with one decay per key channel, `l = logsigmoid(low rank(x)) / 16`.
//!
//! No convolution and no norm of queries and keys. The decay has no lower bound, so the Gram takes pivots per 16 rows, or differences.

use super::gated_outer;
use super::layer::{chunked, core_layout, low_rank, output, projections, split};
use super::{Core, Defaults, GatedOuterInputs, Granularity, Mechanism, OuterDecay, Readout, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Role, Stage, Value};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

/// Divisor of the log decay: keeps decays of a fresh layer near 1.
const TEMPERATURE: f64 = 16.0;

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "gla",
    title: "gated linear attention",
    source: "arXiv 2312.06635",
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
    let (heads, dk) = (layer.key_heads, layer.key_dim);
    let decay_raw = low_rank(
        b,
        layer,
        projected.x,
        "decay",
        (layer.decay_rank, None),
        heads * dk,
    );

    b.stage(Stage::Convolution);
    let [query, key, value] = split(b, layer, projected.qkv);
    let query = b.cast("q_f32", query, Dtype::F32);
    let query = b.scale("q_scaled", query, (dk as f64).sqrt().recip());
    let qkv = chunked(b, layer, [query, key, value], false);

    let log_decay = log_decay(b, layer, decay_raw);
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, 1, dk);
    let inputs = GatedOuterInputs {
        query: qkv.query,
        key: qkv.key,
        value: qkv.value,
        decay: OuterDecay::Given(log_decay),
        bonus: None,
        readout: Readout::Plain,
    };
    let core = gated_outer::append(b, layer, inputs, qkv.value, f64::INFINITY);
    output(b, layer, core.output, projected.output_gate, Function::Silu);
    core
}

/// `logsigmoid(raw + bias) / 16`, by `logsigmoid(x) = -softplus(-x)`.
fn log_decay(b: &mut Builder, layer: &Layer, raw: Value) -> Value {
    b.stage(Stage::Gates);
    let width = layer.key_heads * layer.key_dim;
    let bias = b.input("decay_bias", [width], Dtype::F32, Role::Weight, Init::Zeros);
    let shifted = b.add("decay_shifted", raw, bias);
    let negative = b.scale("-decay", shifted, -1.0);
    let softplus = b.map("decay_softplus", Function::Softplus, negative);
    b.scale("l", softplus, -TEMPERATURE.recip())
}
