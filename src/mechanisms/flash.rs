//! Softmax attention over blocks of keys with an online softmax, and what layers around it share: rotation, block layout, output.
//!
//! Per query block, with running maximum `m`, sum `l` and accumulator `a`, for every key block it sees:
//!
//! ```text
//! S = Q K^T      m' = max(m, rowmax S)      c = e^(m - m')      P = e^(S - m')
//! l <- l c + rowsum P      a <- a c + P V      m <- m'      and at the end O = a / l
//! ```
//!
//! The order of the key blocks does not matter, so one loop runs over the pairs of blocks that are visible as a whole, without a mask, and a
//! second one over those that are visible in part. Pairs without a visible element are in neither. The scale of the scores is folded into
//! the queries. Source: arXiv 2205.14135, with the running rescale of arXiv 2307.08691.

use super::layer::{by_position, core_layout, token_layout, weight};
use super::{CachedSoftmaxInputs, Core, Recurrence, SoftmaxInputs};
use crate::dtype::Dtype;
use crate::graph::{
    BlockPairs, Builder, Function, Init, PairKind, Precision, ReduceFunction, Role, Stage, Table, Value,
    Visibility,
};
use crate::layer::Layer;

/// Start of the running maximum: finite, because the difference of two infinities is not a number.
const LOWEST_MAXIMUM: f64 = -1e30;
/// Score of a key that a query does not see: so far below the lowest maximum that its exponential is zero in any row.
const UNSEEN_SCORE: f64 = -2e30;

/// Appends stage `attention` and declares the output `o`; inputs as in [`SoftmaxInputs`].
pub(super) fn append(b: &mut Builder, layer: &Layer, inputs: SoftmaxInputs) -> Core {
    let o = attend(b, layer, inputs, layer.visibility());
    b.output("o", o);
    core(Recurrence::Softmax(inputs), inputs.value, o)
}

fn core(recurrence: Recurrence, value: Value, output: Value) -> Core {
    Core {
        recurrence,
        value,
        log_decay: None,
        initial_state: None,
        output,
        final_state: None,
        gram_exponent: None,
    }
}

/// `O [B, Hk, R, N, block_q, dv]` in the format of the activations.
fn attend(b: &mut Builder, layer: &Layer, inputs: SoftmaxInputs, visibility: Visibility) -> Value {
    b.stage(Stage::Attention);
    let (query, value) = (b.dims(inputs.query), b.dims(inputs.value));
    let rows = |channels: usize| -> Vec<usize> { query[..5].iter().copied().chain([channels]).collect() };
    let mut carries = vec![
        b.fill("m_0", rows(1), Dtype::F32, LOWEST_MAXIMUM),
        b.fill("l_0", rows(1), Dtype::F32, 0.0),
        b.fill("a_0", rows(value[5]), Dtype::F32, 0.0),
    ];
    for (kind, name) in [
        (PairKind::Whole, "whole blocks"),
        (PairKind::Partial, "masked blocks"),
    ] {
        let pairs = BlockPairs {
            rows: query[3],
            columns: value[3],
            block_q: query[4],
            block_kv: value[4],
            visibility,
            kind,
            sequences: layer.sequences.as_slice().into(),
        };
        if pairs.count() == 0 {
            continue;
        }
        let operands = (&[inputs.query][..], &[inputs.key, inputs.value][..]);
        carries = b.pair_scan(
            name,
            3,
            pairs,
            &carries,
            operands,
            |body, carry, row, column, origin| {
                let mut scores = body.matmul_bt("S", row[0], column[0], Precision::Default);
                if kind == PairKind::Partial {
                    scores = body.select_visible("S_seen", visibility, scores, origin, UNSEEN_SCORE);
                }
                let minor = body.shape(scores).rank() - 1;
                let largest = body.reduce("rowmax S", ReduceFunction::Maximum, scores, minor);
                let maximum = body.zip("m'", Function::Maximum, carry[0], largest);
                let rescale = body.subtract("m - m'", carry[0], maximum);
                let rescale = body.exp("c", rescale);
                let shifted = body.subtract("S - m'", scores, maximum);
                let p = body.exp("P", shifted);
                let sum = body.sum_minor("rowsum P", p);
                let kept = body.multiply("l c", carry[1], rescale);
                let sum = body.add("l'", kept, sum);
                let p = body.cast("P_operand", p, layer.activations);
                let product = body.matmul("P V", p, column[1], Precision::Default);
                let kept = body.multiply("a c", carry[2], rescale);
                let accumulated = body.add("a'", kept, product);
                vec![maximum, sum, accumulated]
            },
        );
    }
    // Rows that pad the last block of queries may see no key.
    let sum = b.map("l_nonzero", Function::NonZeroOr1, carries[1]);
    let inverse = b.map("1 / l", Function::Reciprocal, sum);
    let o = b.multiply("O", carries[2], inverse);
    b.cast("O_rounded", o, layer.activations)
}

/// Brings `[B, T, heads, shared, channels]` (any grouping of the trailing extents) into blocks `[B, heads, shared, N, block, channels]`
/// in the format of the activations, the last block of every sequence padded with zeros. Blocks are the chunks of `layer`.
pub(super) fn blocks(
    b: &mut Builder,
    layer: &Layer,
    name: &str,
    tokens_first: Value,
    [heads, shared, channels]: [usize; 3],
) -> Value {
    let rounded = b.cast(&format!("{name}_rounded"), tokens_first, layer.activations);
    core_layout(b, layer, name, rounded, heads, shared, channels)
}

/// Keys or values of the tokens that a decoded token sees.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cached {
    /// Those of earlier tokens, read from HBM `[B, heads, 1, rows, channels]`; absent where a window leaves none.
    pub(super) earlier: Option<Value>,
    /// That of the token itself `[B, heads, 1, 1, 1, channels]`.
    pub(super) own: Value,
    /// Both in blocks `[B, heads, 1, M, block, channels]`, the last one padded with zeros.
    pub(super) blocks: Value,
}

/// A cache called `name` and the row `own [B, 1, heads, channels]` that the token appends to it.
pub(super) fn cached(b: &mut Builder, layer: &Layer, name: &str, own: Value) -> Cached {
    let (rows, block) = (layer.cached_tokens(), layer.attention.block_kv);
    let own = b.cast(&format!("{name}_own_rounded"), own, layer.activations);
    let dims = b.dims(own);
    let (heads, channels) = (dims[2], dims[3]);
    let leading = |rest: &[usize]| -> Vec<usize> { [&[layer.batch, heads, 1], rest].concat() };
    let row = b.reshape(&format!("{name}_row"), own, leading(&[1, channels]));
    b.output(name, row);
    let earlier = (rows > 0).then(|| {
        let dims = leading(&[rows, channels]);
        let init = Init::Normal { std: 1.0 };
        b.input(name, dims, layer.activations, Role::Cache, init)
    });
    let seen: Vec<Value> = earlier.into_iter().chain([row]).collect();
    let seen = b.concatenate(&format!("{name}_seen"), &seen, 3);
    let count = (rows + 1).div_ceil(block);
    let padded = b.pad(&format!("{name}_padded"), seen, 3, count * block);
    let blocks = leading(&[count, block, channels]);
    Cached {
        earlier,
        own: b.reshape(&format!("{name}_own"), row, leading(&[1, 1, channels])),
        blocks: b.reshape(&format!("{name}_blocks"), padded, blocks),
    }
}

/// Appends stage `attention` of a decode step and declares the output `o`: queries `[B, 1, Hk R, dk]`, the `R` of a key head being the rows of one block,
/// so that a cache is read once.
pub(super) fn append_token(b: &mut Builder, layer: &Layer, query: Value, key: Cached, value: Cached) -> Core {
    let query = b.cast("Q_rounded", query, layer.activations);
    let (queries, keys, values) = (b.dims(query), b.dims(key.own), b.dims(value.own));
    let (heads, shared) = (keys[1], queries[2] / keys[1].max(1));
    let per_head = |rows: [usize; 3], channels: usize| -> Vec<usize> {
        [&[layer.batch, heads][..], &rows, &[channels]].concat()
    };
    let stacked = b.reshape("Q", query, per_head([1, 1, shared], keys[5]));
    let everything = Visibility {
        causal: false,
        window: None,
        keys: Some(layer.cached_tokens() + 1),
    };
    let inputs = SoftmaxInputs {
        query: stacked,
        key: key.blocks,
        value: value.blocks,
    };
    let o = attend(b, layer, inputs, everything);
    let o = b.reshape("O_core", o, per_head([shared, 1, 1], values[5]));
    b.output("o", o);
    let token = CachedSoftmaxInputs {
        query: b.reshape("Q_core", query, per_head([shared, 1, 1], keys[5])),
        earlier: key.earlier.zip(value.earlier),
        key: key.own,
        value: value.own,
    };
    core(Recurrence::CachedSoftmax(token), value.blocks, o)
}

/// Cosine and sine of the rotary angles, `[T, 1, n]` each, in f32: tables that are read.
#[derive(Debug, Clone, Copy)]
pub(super) struct RotaryTables {
    cosine: Value,
    sine: Value,
    /// Pairs of channels that are rotated.
    pairs: usize,
}

impl RotaryTables {
    /// Tables for the first `channels` channels of a head; `None` for 0.
    pub(super) fn new(b: &mut Builder, layer: &Layer, channels: usize) -> Option<Self> {
        let (pairs, base, first) = (channels / 2, layer.attention.rotary_base, layer.context);
        let mut table = |name: &str, table| {
            let dims = [layer.positions(), 1, pairs];
            let table = b.input(name, dims, Dtype::F32, Role::Weight, Init::Table(table));
            by_position(b, layer, &format!("{name}_by_token"), table)
        };
        (pairs > 0).then(|| RotaryTables {
            cosine: table("rotary_cosine", Table::RotaryCosine { base, first }),
            sine: table("rotary_sine", Table::RotarySine { base, first }),
            pairs,
        })
    }

    /// Rotates `x [B, T, H, channels]`, f32: channel `c` with channel `c + n` (arXiv 2104.09864, in the order of the Llama checkpoints).
    pub(super) fn rotate(&self, b: &mut Builder, name: &str, x: Value) -> Value {
        let n = self.pairs;
        let first = b.slice(&format!("{name}_first"), x, 3, 0, n);
        let second = b.slice(&format!("{name}_second"), x, 3, n, n);
        let mut product =
            |part: &str, x: Value, table: Value| b.multiply(&format!("{name}_{part}"), x, table);
        let (fc, fs) = (
            product("first_cos", first, self.cosine),
            product("first_sin", first, self.sine),
        );
        let (sc, ss) = (
            product("second_cos", second, self.cosine),
            product("second_sin", second, self.sine),
        );
        let mut parts = vec![
            b.subtract(&format!("{name}_turned_first"), fc, ss),
            b.add(&format!("{name}_turned_second"), sc, fs),
        ];
        let channels = b.dims(x)[3];
        if channels > 2 * n {
            parts.push(b.slice(&format!("{name}_unturned"), x, 3, 2 * n, channels - 2 * n));
        }
        b.concatenate(&format!("{name}_turned"), &parts, 3)
    }
}

/// RMS norm of the minor dimension with a weight per channel, in f32; epsilon 1e-6 (Qwen3) unless the layer's output norm says otherwise.
pub(super) fn rms_norm(b: &mut Builder, name: &str, x: Value) -> Value {
    const EPSILON: f64 = 1e-6;
    let channels = b.shape(x).from_end(0);
    let squared = b.multiply(&format!("{name}_squared"), x, x);
    let sum = b.sum_minor(&format!("{name}_sum"), squared);
    let mean = b.scale(&format!("{name}_mean"), sum, (channels as f64).recip());
    let mean = b.map(&format!("{name}_mean_eps"), Function::AddConstant(EPSILON), mean);
    let inverse = b.map(&format!("{name}_inverse_rms"), Function::ReciprocalSqrt, mean);
    let normalised = b.multiply(&format!("{name}_normalised"), x, inverse);
    let weight = b.input(
        &format!("{name}_norm"),
        [channels],
        Dtype::F32,
        Role::Weight,
        Init::Ones,
    );
    b.multiply(&format!("{name}_weighted"), normalised, weight)
}

/// Queries times the scale of the scores and, with `ssmax`, times `s ln n`: `s` per query head, `n` the keys the query sees (arXiv 2501.19399).
pub(super) fn scale_query(b: &mut Builder, layer: &Layer, query: Value) -> Value {
    let attention = &layer.attention;
    let scale = attention.scale.unwrap_or((layer.key_dim as f64).sqrt().recip());
    if !attention.ssmax {
        return b.scale("q_scaled", query, scale);
    }
    // A query sees itself and what stands before it.
    let table = Table::Position {
        first: layer.context + 1,
    };
    let positions = b.input(
        "positions",
        [layer.positions(), 1, 1],
        Dtype::F32,
        Role::Weight,
        Init::Table(table),
    );
    let mut seen = by_position(b, layer, "positions_by_token", positions);
    if let Some(window) = attention.window {
        seen = b.map("n", Function::MinimumConstant(window as f64), seen);
    }
    let log = b.map("ln n", Function::Log, seen);
    // Trained; the spread around the published start of 0.168 only makes heads differ in the check.
    let init = Init::Uniform { low: 0.1, high: 0.3 };
    let s = b.input("ssmax_s", [layer.value_heads, 1], Dtype::F32, Role::Weight, init);
    let s = b.scale("s_scaled", s, scale);
    let factor = b.multiply("s ln n", log, s);
    b.multiply("q_scaled", query, factor)
}

/// Stages op7b and op7c: output gate `sigmoid(g)` where the layer has one, output projection. Returns `y [B, T, d]`.
pub(super) fn output(b: &mut Builder, layer: &Layer, core_output: Value, gate: Option<Value>) -> Value {
    b.stage(Stage::OutputNorm);
    let mut o = token_layout(b, layer, core_output);
    if let Some(gate) = gate {
        let wide = b.cast("o_f32", o, Dtype::F32);
        let dims = b.dims(o);
        let gate = b.reshape("output_gate_heads", gate, dims);
        let gate = b.cast("output_gate_f32", gate, Dtype::F32);
        let gate = b.map("output_gate_activated", Function::Sigmoid, gate);
        let gated = b.multiply("o_gated", wide, gate);
        o = b.cast("o_gated_rounded", gated, layer.activations);
    }
    b.stage(Stage::OutputProjection);
    let width = layer.value_heads * layer.value_dim;
    let flat = b.reshape("o_channels", o, [layer.batch, layer.tokens, width]);
    let w_out = weight(b, layer, "W_out", width, layer.model_width);
    let y = b.matmul("y", flat, w_out, Precision::Default);
    let y = b.cast("y_rounded", y, layer.activations);
    b.output("y", y);
    y
}
