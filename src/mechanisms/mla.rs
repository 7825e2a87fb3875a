//! Multi-head latent attention (arXiv 2405.04434). Prefill makes keys and values from the latent for every head. A decode step keeps the latent and
//! absorbs the projections that would do so: with keys `c W_k` and values `c W_v` of a head, `q (c W_k)^T = (q W_k^T) c^T` and `p (c W_v) = (p c) W_v`, so
//! that all heads attend to the one cache of latents `c`, `latent_rank + decoupled_dim` channels wide.
//!
//! Of the `key_dim` channels of a key, `decoupled_dim` come straight from the input and are the same in all heads; the others, and the values, come
//! from a latent of `latent_rank` channels with an RMS norm. The decoupled channels are rotated where `rotary` is 1; Kimi Linear keeps them
//! but does not rotate (`mla_use_nope`). Per token the cache holds the latent and the decoupled channels. Queries are projected in one
//! step, as in Kimi Linear (`q_lora_rank: null`), or from a latent of `query_rank` channels of their own, as in DeepSeek-V3.

use super::flash::{self, Cached, RotaryTables};
use super::layer::{output_gate, project, weight};
use super::softmax::{NO_DEFAULTS, input};
use super::{Core, Granularity, Mechanism, SoftmaxInputs, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Precision, Stage, Value};
use crate::layer::{Layer, Pass};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "mla",
    title: "multi-head latent attention",
    source: "arXiv 2405.04434",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[
        fields::ATTENTION,
        fields::LATENT_ATTENTION,
        fields::PACKED,
        fields::CONTEXT,
    ],
    defaults: NO_DEFAULTS,
    append,
};

fn append(b: &mut Builder, layer: &Layer) -> Core {
    let heads = layer.key_heads;
    let (dk, dv) = (layer.key_dim, layer.value_dim);
    let (rank, shared) = (layer.attention.latent_rank, layer.attention.decoupled_dim);
    let own = dk - shared;
    let per_head = |b: &mut Builder, name: &str, x: Value, heads: usize, channels: usize| {
        b.reshape(name, x, [layer.batch, layer.tokens, heads, channels])
    };
    b.stage(Stage::Projections);
    let x = input(b, layer);
    let query = match layer.attention.query_rank {
        0 => project(b, layer, x, "q", heads * dk),
        rank => {
            let latent = project(b, layer, x, "q_latent", rank);
            let latent = flash::rms_norm(b, "q_latent", latent);
            let latent = b.cast("q_latent_rounded", latent, layer.activations);
            let up = weight(b, layer, "W_q", rank, heads * dk);
            b.matmul("q", latent, up, Precision::Default)
        }
    };
    let query = b.cast("q_projected", query, layer.activations);
    let query = per_head(b, "q_heads", query, heads, dk);
    let compressed = project(b, layer, x, "latent", rank + shared);
    let gate = output_gate(b, layer, x);
    let latent = b.slice("latent_channels", compressed, 2, 0, rank);
    let latent = flash::rms_norm(b, "latent", latent);
    let latent = b.cast("latent_rounded", latent, layer.activations);
    let w_up = weight(b, layer, "W_kv", rank, heads * (own + dv));
    let decoupled = b.slice("k_decoupled", compressed, 2, rank, shared);
    let decoupled = b.cast("k_decoupled_rounded", decoupled, layer.activations);
    let decoupled = per_head(b, "k_decoupled_head", decoupled, 1, shared);
    let (core, values) = match layer.pass {
        Pass::Forward | Pass::Verify => {
            let kv = b.matmul("kv", latent, w_up, Precision::Default);
            let kv = b.cast("kv_rounded", kv, layer.activations);
            let kv = per_head(b, "kv_heads", kv, heads, own + dv);
            b.stage(Stage::Convolution);
            let query = b.cast("q_f32", query, Dtype::F32);
            let (query, decoupled) = rotate(b, layer, query, decoupled);
            let query = flash::scale_query(b, layer, query);
            // A copy per head, which is what writing the keys takes.
            let dims = [layer.batch, layer.tokens, heads, shared];
            let zero = b.fill("zero", dims, layer.activations, 0.0);
            let copies = b.add("k_decoupled_copies", zero, decoupled);
            let key = b.slice("k_own", kv, 3, 0, own);
            let key = b.concatenate("k", &[copies, key], 3);
            let value = b.slice("v", kv, 3, own, dv);
            let by_key = layer.key_blocks();
            let query = flash::blocks(b, layer, "Q", query, [heads, 1, dk]);
            let key = flash::blocks(b, &by_key, "K", key, [heads, 1, dk]);
            let value = flash::blocks(b, &by_key, "V", value, [heads, 1, dv]);
            let core = flash::append(b, layer, SoftmaxInputs { query, key, value });
            (core, core.output)
        }
        Pass::Decode => {
            let latent = per_head(b, "latent_head", latent, 1, rank);
            append_token(b, layer, [query, latent, decoupled], w_up)
        }
    };
    flash::output(b, layer, values, gate);
    core
}

/// Queries and decoupled keys with the decoupled channels rotated, where they are. Those of a query stand first, so that the rotation takes the first channels
/// of a head here too.
fn rotate(b: &mut Builder, layer: &Layer, query: Value, decoupled: Value) -> (Value, Value) {
    let channels = layer.rotary_channels(layer.attention.decoupled_dim);
    let mut decoupled = b.cast("k_decoupled_f32", decoupled, Dtype::F32);
    let query = match RotaryTables::new(b, layer, channels) {
        Some(tables) => {
            decoupled = tables.rotate(b, "k_decoupled", decoupled);
            tables.rotate(b, "q", query)
        }
        None => query,
    };
    (query, b.cast("k_decoupled_turned", decoupled, layer.activations))
}

/// The core of a decode step with absorbed projections, and its output brought to values per head `[B, Hk, 1, 1, 1, dv]`.
fn append_token(
    b: &mut Builder,
    layer: &Layer,
    [query, latent, decoupled]: [Value; 3],
    w_up: Value,
) -> (Core, Value) {
    let (batch, heads, dv) = (layer.batch, layer.key_heads, layer.value_dim);
    let (rank, shared) = (layer.attention.latent_rank, layer.attention.decoupled_dim);
    let own = layer.key_dim - shared;
    let up = b.reshape("W_kv_heads", w_up, [rank, heads, own + dv]);
    let up = b.transpose("W_kv_by_head", up, [1, 0, 2]);
    let w_key = b.slice("W_k", up, 2, 0, own);
    let w_value = b.slice("W_v", up, 2, own, dv);
    let query_own = b.slice("q_own", query, 3, shared, own);
    let query_own = b.reshape("q_own_rows", query_own, [batch, heads, own]);
    let query_own = b.transpose("q_own_by_head", query_own, [1, 0, 2]);
    let absorbed = b.matmul_bt("q_absorbed", query_own, w_key, Precision::Default);
    let absorbed = b.cast("q_absorbed_rounded", absorbed, layer.activations);
    let absorbed = b.transpose("q_absorbed_rows", absorbed, [1, 0, 2]);
    let absorbed = b.reshape("q_absorbed_heads", absorbed, [batch, 1, heads, rank]);

    b.stage(Stage::Convolution);
    let query = b.slice("q_decoupled", query, 3, 0, shared);
    let query = b.concatenate("q_latent", &[query, absorbed], 3);
    let query = b.cast("q_f32", query, Dtype::F32);
    let (query, decoupled) = rotate(b, layer, query, decoupled);
    let query = flash::scale_query(b, layer, query);
    let row = b.concatenate("latent_row", &[decoupled, latent], 3);
    let key = flash::cached(b, layer, "latent_cache", row);
    let values = |b: &mut Builder, name: &str, x: Value| {
        let minor = b.shape(x).rank() - 1;
        b.slice(name, x, minor, shared, rank)
    };
    let value = Cached {
        earlier: key.earlier.map(|rows| values(b, "latent_earlier", rows)),
        own: values(b, "latent_own", key.own),
        blocks: values(b, "latent_blocks", key.blocks),
    };
    let core = flash::append_token(b, layer, query, key, value);

    b.stage(Stage::OutputNorm);
    let o = b.reshape("o_latent", core.output, [batch, heads, rank]);
    let o = b.transpose("o_latent_by_head", o, [1, 0, 2]);
    let o = b.matmul("o_heads", o, w_value, Precision::Default);
    let o = b.cast("o_heads_rounded", o, layer.activations);
    let o = b.transpose("o_rows", o, [1, 0, 2]);
    let o = b.reshape("o_values", o, [batch, heads, 1, 1, 1, dv]);
    (core, o)
}
