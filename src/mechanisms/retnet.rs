//! `RetNet` (arXiv 2307.08621): `S = gamma S + k^T v` with a constant `gamma = 1 - 2^(-5 - h)` per value head; rotary queries and keys.
//!
//! All powers of `gamma` that a chunk needs are tables, so the core takes no exponential. Output: RMS norm per head and a swish gate.

use super::gated_outer;
use super::layer::{by_position, chunked, output, projections, split};
use super::{Core, Defaults, GatedOuterInputs, Granularity, Mechanism, OuterDecay, Readout, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Role, Stage, Table, Value};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

/// Base of the rotary wavelengths.
const ROTARY_BASE: f64 = 1e4;

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "retnet",
    title: "RetNet, multi-scale retention",
    source: "arXiv 2307.08621",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[
        fields::STATE,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::CONTEXT,
        fields::OUTPUT_GATE,
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

    b.stage(Stage::Convolution);
    let [query, key, value] = split(b, layer, projected.qkv);
    let angles = angles(b, layer);
    let query = rotate(b, layer, "q", query, angles);
    let query = b.scale("q_scaled", query, (layer.key_dim as f64).sqrt().recip());
    let key = rotate(b, layer, "k", key, angles);
    let qkv = chunked(b, layer, [query, key, value], false);

    let inputs = GatedOuterInputs {
        query: qkv.query,
        key: qkv.key,
        value: qkv.value,
        decay: OuterDecay::Retention,
        bonus: None,
        readout: Readout::Plain,
    };
    let core = gated_outer::append(b, layer, inputs, qkv.value, 0.0);
    output(b, layer, core.output, projected.output_gate, Function::Silu);
    core
}

/// Cosines and sines `[T, 1, dk/2]`, shared by queries, keys and heads; positions count from the start of a sequence, that of a decoded token
/// is the context before it.
fn angles(b: &mut Builder, layer: &Layer) -> [Value; 2] {
    let dims = [layer.positions(), 1, layer.key_dim / 2];
    let (base, first) = (ROTARY_BASE, layer.context);
    [
        ("cos", Table::RotaryCosine { base, first }),
        ("sin", Table::RotarySine { base, first }),
    ]
    .map(|(name, table)| {
        let table = b.input(name, dims, Dtype::F32, Role::Weight, Init::Table(table));
        by_position(b, layer, &format!("{name}_by_token"), table)
    })
}

/// Pairs `(x_c, x_(c + dk/2))` rotated by their angles; an odd channel is left alone.
fn rotate(b: &mut Builder, layer: &Layer, name: &str, x: Value, [cos, sin]: [Value; 2]) -> Value {
    let (heads, dk) = (layer.key_heads, layer.key_dim);
    let half = dk / 2;
    let x = b.cast(&format!("{name}_f32"), x, Dtype::F32);
    let x = b.reshape(
        &format!("{name}_heads"),
        x,
        [layer.batch, layer.tokens, heads, dk],
    );
    if half == 0 {
        return x;
    }
    let low = b.slice(&format!("{name}_low"), x, 3, 0, half);
    let high = b.slice(&format!("{name}_high"), x, 3, half, half);
    let mut turn = |part: Value, other: Value, function: Function| {
        let straight = b.multiply(&format!("{name} cos"), part, cos);
        let across = b.multiply(&format!("{name} sin"), other, sin);
        b.zip(&format!("{name}_turned"), function, straight, across)
    };
    let mut parts = vec![
        turn(low, high, Function::Subtract),
        turn(high, low, Function::Add),
    ];
    if dk > 2 * half {
        parts.push(b.slice(&format!("{name}_odd"), x, 3, 2 * half, 1));
    }
    b.concatenate(&format!("{name}_rotary"), &parts, 3)
}
