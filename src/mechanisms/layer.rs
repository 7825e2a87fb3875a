//! What every linear-attention layer shares: projections, causal convolution with query/key norm, output norm and projection.

use super::tree::runs;
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Precision, Role, RowRun, Stage, Value};
use crate::layer::{Layer, OutputGate, Pass};
use crate::tree::Tree;

/// Epsilon of the query/key L2 norm (flash-linear-attention and Tokamax use 1e-6).
const L2_EPSILON: f64 = 1e-6;
/// Name of the convolution state, as an input and as an output of a decode step.
pub(super) const CONV_STATE: &str = "conv_state";
/// Epsilon of the output RMS norm (flash-linear-attention default).
const RMS_EPSILON: f64 = 1e-5;

/// Projects `x [B, T, d]` to `width` channels in f32: `[B, T, width]`.
pub fn project(b: &mut Builder, layer: &Layer, x: Value, name: &str, width: usize) -> Value {
    let weight = weight(b, layer, &format!("W_{name}"), layer.model_width, width);
    b.matmul(name, x, weight, Precision::Default)
}

/// Projects `x` through `gate_rank` channels to `width`: `[B, T, width]` in f32.
pub(super) fn project_low_rank(b: &mut Builder, layer: &Layer, x: Value, name: &str, width: usize) -> Value {
    low_rank(b, layer, x, name, (layer.gate_rank, None), width)
}

/// Projects `x` through `rank` channels, which pass `activation`, to `width`: `[B, T, width]` in f32.
pub(super) fn low_rank(
    b: &mut Builder,
    layer: &Layer,
    x: Value,
    name: &str,
    (rank, activation): (usize, Option<Function>),
    width: usize,
) -> Value {
    let down = weight(b, layer, &format!("W_{name}_down"), layer.model_width, rank);
    let up = weight(b, layer, &format!("W_{name}_up"), rank, width);
    let mut hidden = b.matmul(&format!("{name}_hidden"), x, down, Precision::Default);
    if let Some(activation) = activation {
        hidden = b.map(&format!("{name}_hidden_activated"), activation, hidden);
    }
    let hidden = b.cast(&format!("{name}_hidden_rounded"), hidden, layer.activations);
    b.matmul(name, hidden, up, Precision::Default)
}

/// A weight matrix `[rows, columns]` that keeps the variance of what it multiplies.
pub(super) fn weight(b: &mut Builder, layer: &Layer, name: &str, rows: usize, columns: usize) -> Value {
    let std = (rows as f64).sqrt().recip();
    b.input(
        name,
        [rows, columns],
        layer.weights,
        Role::Weight,
        Init::Normal { std },
    )
}

/// Outputs of [`projections`].
pub struct Projected {
    /// The layer's input `[B, T, d]`.
    pub x: Value,
    /// Queries, keys and values before the convolution `[B, T, E]`.
    pub qkv: Value,
    /// Output gate before its activation `[B, T, Hv dv]`, where the layer has one.
    pub output_gate: Option<Value>,
}

/// Stage op1 without the mechanism's own gates.
pub fn projections(b: &mut Builder, layer: &Layer) -> Projected {
    b.stage(Stage::Projections);
    let x = input(b, layer);
    let qkv = project(b, layer, x, "qkv", layer.qkv_width());
    let qkv = b.cast("qkv_rounded", qkv, layer.activations);
    let output_gate = output_gate(b, layer, x);
    Projected { x, qkv, output_gate }
}

/// The layer's input `[B, T, d]`.
pub(super) fn input(b: &mut Builder, layer: &Layer) -> Value {
    b.input(
        "x",
        [layer.batch, layer.tokens, layer.model_width],
        layer.activations,
        Role::Activation,
        Init::Normal { std: 1.0 },
    )
}

/// Output gate before its activation `[B, T, Hv dv]`, where the layer has one.
pub(super) fn output_gate(b: &mut Builder, layer: &Layer, x: Value) -> Option<Value> {
    let width = layer.value_heads * layer.value_dim;
    let gate = match layer.output_gate {
        OutputGate::None => return None,
        OutputGate::Full => project(b, layer, x, "output_gate", width),
        OutputGate::LowRank => project_low_rank(b, layer, x, "output_gate", width),
    };
    Some(b.cast("output_gate_rounded", gate, layer.activations))
}

/// Queries, keys and values in core layout.
pub struct Qkv {
    /// `[B, Hk, 1, N, C, dk]`, unit length times `dk^-1/2`.
    pub query: Value,
    /// `[B, Hk, 1, N, n C, dk]` with `n` writes per token, unit length unless left free.
    pub key: Value,
    /// `[B, Hk, R, N, n C, dv]`, or packed `[B, Hk, 1, N, n C, R dv]`.
    pub value: Value,
}

/// Stage op2: causal convolution, `SiLU`, L2 norm of queries and keys.
pub fn convolution(b: &mut Builder, layer: &Layer, qkv: Value, packed: bool) -> Qkv {
    activated(b, layer, qkv, packed, true)
}

/// [`convolution`] that leaves the keys at the length they have.
pub fn convolution_of_free_keys(b: &mut Builder, layer: &Layer, qkv: Value, packed: bool) -> Qkv {
    activated(b, layer, qkv, packed, false)
}

fn activated(b: &mut Builder, layer: &Layer, qkv: Value, packed: bool, unit_keys: bool) -> Qkv {
    let convolved = convolve(b, layer, qkv);
    let activated = b.map("conv_silu", Function::Silu, convolved);
    let [query, key, value] = split(b, layer, activated);
    let query = unit_length(b, layer, "q", query);
    let query = b.scale("q_scaled", query, (layer.key_dim as f64).sqrt().recip());
    let key = if unit_keys {
        unit_length(b, layer, "k", key)
    } else {
        key
    };
    chunked(b, layer, [query, key, value], packed)
}

/// The causal convolution of stage op2, in f32: `[B, T, E]`.
pub(super) fn convolve(b: &mut Builder, layer: &Layer, qkv: Value) -> Value {
    b.stage(Stage::Convolution);
    let width = layer.qkv_width();
    let taps = b.input(
        "conv_taps",
        [layer.conv_width, width],
        layer.activations,
        Role::Weight,
        Init::Normal {
            std: (layer.conv_width as f64).sqrt().recip(),
        },
    );
    if let Some(tree) = &layer.tree {
        return convolve_tree(b, layer, tree, qkv, taps);
    }
    let history = decode_history(b, layer, qkv);
    let qkv = b.cast("qkv_f32", qkv, Dtype::F32);
    let taps = b.cast("conv_taps_f32", taps, Dtype::F32);
    match history {
        Some(history) => {
            let history = b.cast("conv_state_f32", history, Dtype::F32);
            b.causal_convolution_after("conv", qkv, taps, history)
        }
        None => b.causal_convolution_packed("conv", qkv, taps, &layer.sequence_starts()),
    }
}

/// Channels of queries, keys and values: `[B, T, Hk dk]`, and `[B, T, n Hk dk]` and `[B, T, n Hv dv]` with `n` writes per token.
pub(super) fn split(b: &mut Builder, layer: &Layer, qkv: Value) -> [Value; 3] {
    let (keys, values) = (
        layer.key_heads * layer.key_dim,
        layer.value_heads * layer.value_dim,
    );
    let writes = layer.householder_steps;
    [
        b.slice("q_channels", qkv, 2, 0, keys),
        b.slice("k_channels", qkv, 2, keys, writes * keys),
        b.slice("v_channels", qkv, 2, (1 + writes) * keys, writes * values),
    ]
}

/// Queries, keys and values, rounded and in core layout.
pub(super) fn chunked(b: &mut Builder, layer: &Layer, [query, key, value]: [Value; 3], packed: bool) -> Qkv {
    let heads = layer.key_heads;
    let chunked =
        |b: &mut Builder, layer: &Layer, name: &str, value: Value, shared: usize, channels: usize| {
            let rounded = b.cast(&format!("{name}_rounded"), value, layer.activations);
            core_layout(b, layer, name, rounded, heads, shared, channels)
        };
    let (writes, sharing) = (layer.micro_steps(), layer.sharing());
    let query = chunked(b, layer, "Q", query, 1, layer.key_dim);
    let key = chunked(b, &writes, "K", key, 1, layer.key_dim);
    let value = if packed {
        chunked(b, &writes, "V", value, 1, sharing * layer.value_dim)
    } else {
        chunked(b, &writes, "V", value, sharing, layer.value_dim)
    };
    Qkv { query, key, value }
}

/// The causal convolution over a tree of tokens: the rows before a token are those on its path, and before the tree the last ones of the sequence. The output `conv_state` holds those
/// up to the accepted token.
fn convolve_tree(b: &mut Builder, layer: &Layer, tree: &Tree, qkv: Value, taps: Value) -> Value {
    let history = layer.conv_width - 1;
    let window = if history == 0 {
        qkv
    } else {
        let state = conv_state(b, layer);
        b.concatenate("conv_window", &[state, qkv], 1)
    };
    // Row of the window that stands `steps` before a token; no step leads further back than the history.
    let row = |node: usize, steps: usize| match tree.before(node, steps) {
        Ok(node) => history + node,
        Err(before) => history.saturating_sub(before),
    };
    if history > 0 {
        b.stage(Stage::Commit);
        let last = (0..history).rev().map(|steps| Some(row(tree.accepted(), steps)));
        let next = b.gather_rows("conv_state_next", window, 1, &runs(last));
        b.output(CONV_STATE, next);
        b.stage(Stage::Convolution);
    }
    let window = b.cast("conv_window_f32", window, Dtype::F32);
    let taps = b.cast("conv_taps_f32", taps, Dtype::F32);
    let mut sum: Option<Value> = None;
    for tap in 0..layer.conv_width {
        let steps = history - tap;
        let sources = (0..tree.nodes()).map(|node| Some(row(node, steps)));
        let rows = b.gather_rows(&format!("conv_rows_{tap}"), window, 1, &runs(sources));
        let weight = b.slice(&format!("conv_tap_{tap}"), taps, 0, tap, 1);
        let term = b.multiply(&format!("conv_term_{tap}"), rows, weight);
        sum = Some(match sum {
            Some(sum) => b.add(&format!("conv_{tap}"), sum, term),
            None => term,
        });
    }
    sum.unwrap_or(window)
}

/// The input `conv_state [B, width - 1, E]`: the rows before the tokens of a step.
fn conv_state(b: &mut Builder, layer: &Layer) -> Value {
    b.input(
        CONV_STATE,
        [layer.batch, layer.conv_width - 1, layer.qkv_width()],
        layer.activations,
        Role::State,
        Init::Normal { std: 1.0 },
    )
}

/// The rows before a decoded token, `[B, width - 1, E]`: the input `conv_state`, moved on by the token into the output of that name.
fn decode_history(b: &mut Builder, layer: &Layer, qkv: Value) -> Option<Value> {
    let rows = layer.conv_width - 1;
    if layer.pass != Pass::Decode || rows == 0 {
        return None;
    }
    let history = conv_state(b, layer);
    let window = b.concatenate("conv_window", &[history, qkv], 1);
    let next = b.slice("conv_state_next", window, 1, 1, rows);
    b.output(CONV_STATE, next);
    Some(history)
}

/// Keys of every head, divided by their length: `[B, T, heads, dk]` in f32.
pub(super) fn unit_length(b: &mut Builder, layer: &Layer, name: &str, channels: Value) -> Value {
    let heads = b.shape(channels).dims()[2..].iter().product::<usize>() / layer.key_dim;
    let per_head = b.reshape(
        &format!("{name}_heads"),
        channels,
        [layer.batch, layer.tokens, heads, layer.key_dim],
    );
    let squared = b.multiply(&format!("{name}_squared"), per_head, per_head);
    let length = b.sum_minor(&format!("{name}_length2"), squared);
    let length = b.map(
        &format!("{name}_length2_eps"),
        Function::AddConstant(L2_EPSILON),
        length,
    );
    let inverse = b.map(
        &format!("{name}_inverse_length"),
        Function::ReciprocalSqrt,
        length,
    );
    b.multiply(&format!("{name}_unit"), per_head, inverse)
}

/// Brings `[B, T, heads * shared * channels]` (any grouping of the trailing extents) into core layout
/// `[B, heads, shared, N, C, channels]`, the last chunk of every sequence padded with zeros.
pub fn core_layout(
    b: &mut Builder,
    layer: &Layer,
    name: &str,
    tokens_first: Value,
    heads: usize,
    shared: usize,
    channels: usize,
) -> Value {
    let flat = b.reshape(
        &format!("{name}_flat"),
        tokens_first,
        [layer.batch, layer.tokens, heads, shared, channels],
    );
    let padded = if layer.sequences.is_empty() {
        b.pad(&format!("{name}_padded"), flat, 1, layer.padded_tokens())
    } else {
        b.gather_rows(&format!("{name}_padded"), flat, 1, &layer.padding_runs())
    };
    let chunks = b.reshape(
        &format!("{name}_chunks"),
        padded,
        [layer.batch, layer.chunks(), layer.chunk, heads, shared, channels],
    );
    b.transpose(name, chunks, [0, 3, 4, 1, 2, 5])
}

/// Rows of a table `[positions, ..]` by token: every sequence counts its positions from the first row.
pub(super) fn by_position(b: &mut Builder, layer: &Layer, name: &str, table: Value) -> Value {
    if layer.sequences.is_empty() {
        return table;
    }
    let runs = layer.sequences.iter().map(|&rows| RowRun { from: Some(0), rows });
    b.gather_rows(name, table, 0, &runs.collect())
}

/// Brings the core output back to `[B, T, Hv, dv]`.
pub(super) fn token_layout(b: &mut Builder, layer: &Layer, core_output: Value) -> Value {
    let dims = b.dims(core_output);
    let (shared, channels) = (dims[2], dims[5]);
    let tokens_first = b.transpose("o_tokens", core_output, [0, 3, 4, 1, 2, 5]);
    let flat = b.reshape(
        "o_flat",
        tokens_first,
        [
            layer.batch,
            layer.padded_tokens(),
            layer.key_heads * shared * channels,
        ],
    );
    let cut = if layer.sequences.is_empty() {
        b.slice("o_cut", flat, 1, 0, layer.tokens)
    } else {
        b.gather_rows("o_cut", flat, 1, &layer.token_runs())
    };
    b.reshape(
        "o_heads",
        cut,
        [layer.batch, layer.tokens, layer.value_heads, layer.value_dim],
    )
}

/// Stages op7b and op7c: RMS norm per value head, output gate, output projection. Returns `y [B, T, d]`.
pub fn output(
    b: &mut Builder,
    layer: &Layer,
    core_output: Value,
    gate: Option<Value>,
    activation: Function,
) -> Value {
    b.stage(Stage::OutputNorm);
    let o = token_layout(b, layer, core_output);
    let o = b.cast("o_f32", o, Dtype::F32);
    let normalised = rms_norm(b, o);
    let weight = b.input(
        "norm_weight",
        [layer.value_dim],
        Dtype::F32,
        Role::Weight,
        Init::Ones,
    );
    let mut out = b.multiply("o_weighted", normalised, weight);
    if let Some(gate) = gate {
        let gate = b.reshape(
            "output_gate_heads",
            gate,
            [layer.batch, layer.tokens, layer.value_heads, layer.value_dim],
        );
        let gate = b.cast("output_gate_f32", gate, Dtype::F32);
        let gate = b.map("output_gate_activated", activation, gate);
        out = b.multiply("o_gated", out, gate);
    }
    output_projection(b, layer, out)
}

/// `o [.., width]` divided by its root mean square along the minor dimension, f32.
pub(super) fn rms_norm(b: &mut Builder, o: Value) -> Value {
    let width = b.shape(o).from_end(0);
    let squared = b.multiply("o_squared", o, o);
    let sum = b.sum_minor("o_sum", squared);
    let mean = b.scale("o_mean", sum, (width as f64).recip());
    let mean = b.map("o_mean_eps", Function::AddConstant(RMS_EPSILON), mean);
    let inverse = b.map("o_inverse_rms", Function::ReciprocalSqrt, mean);
    b.multiply("o_normalised", o, inverse)
}

/// Stage op7c: the output projection of `out [B, T, Hv, dv]`. Returns `y [B, T, d]`.
pub(super) fn output_projection(b: &mut Builder, layer: &Layer, out: Value) -> Value {
    let out = b.cast("o_gated_rounded", out, layer.activations);
    let width = layer.value_heads * layer.value_dim;
    let flat = b.reshape("o_channels", out, [layer.batch, layer.tokens, width]);
    b.stage(Stage::OutputProjection);
    let w_out = self::weight(b, layer, "W_out", width, layer.model_width);
    let y = b.matmul("y", flat, w_out, Precision::Default);
    let y = b.cast("y_rounded", y, layer.activations);
    b.output("y", y);
    y
}
