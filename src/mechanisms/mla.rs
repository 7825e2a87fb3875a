//! Multi-head latent attention (arXiv 2405.04434), in the form of prefill: keys and values are made from the latent for every head.
//!
//! Of the `key_dim` channels of a key, `decoupled_dim` come straight from the input and are the same in all heads; the others, and the values, come
//! from a latent of `latent_rank` channels with an RMS norm. The decoupled channels are rotated where `rotary` is 1; Kimi Linear keeps them
//! but does not rotate (`mla_use_nope`). Per token the cache holds the latent and the decoupled channels. Queries are projected in one
//! step, as in Kimi Linear (`q_lora_rank: null`).

use super::flash::{self, RotaryTables};
use super::layer::{output_gate, project, weight};
use super::softmax::{NO_DEFAULTS, input};
use super::{Core, Granularity, Mechanism, SoftmaxInputs, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Precision, Stage, Value};
use crate::layer::Layer;

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "mla",
    title: "multi-head latent attention",
    source: "arXiv 2405.04434",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[fields::ATTENTION, fields::LATENT_ATTENTION],
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
    let query = project(b, layer, x, "q", heads * dk);
    let query = b.cast("q_projected", query, layer.activations);
    let query = per_head(b, "q_heads", query, heads, dk);
    let compressed = project(b, layer, x, "latent", rank + shared);
    let gate = output_gate(b, layer, x);
    let latent = b.slice("latent_channels", compressed, 2, 0, rank);
    let latent = flash::rms_norm(b, "latent", latent);
    let latent = b.cast("latent_rounded", latent, layer.activations);
    let w_up = weight(b, layer, "W_kv", rank, heads * (own + dv));
    let kv = b.matmul("kv", latent, w_up, Precision::Default);
    let kv = b.cast("kv_rounded", kv, layer.activations);
    let kv = per_head(b, "kv_heads", kv, heads, own + dv);
    let decoupled = b.slice("k_decoupled", compressed, 2, rank, shared);
    let decoupled = b.cast("k_decoupled_rounded", decoupled, layer.activations);
    let decoupled = per_head(b, "k_decoupled_head", decoupled, 1, shared);

    b.stage(Stage::Convolution);
    let query = b.cast("q_f32", query, Dtype::F32);
    let mut decoupled = b.cast("k_decoupled_f32", decoupled, Dtype::F32);
    // The decoupled channels stand first, so that the rotation takes the first channels of a head here too.
    let query = match RotaryTables::new(b, layer, layer.rotary_channels(shared)) {
        Some(tables) => {
            decoupled = tables.rotate(b, "k_decoupled", decoupled);
            tables.rotate(b, "q", query)
        }
        None => query,
    };
    let query = flash::scale_query(b, layer, query);
    // A copy per head, which is what writing the keys takes.
    let decoupled = b.cast("k_decoupled_turned", decoupled, layer.activations);
    let dims = [layer.batch, layer.tokens, heads, shared];
    let zero = b.fill("zero", dims, layer.activations, 0.0);
    let copies = b.add("k_decoupled_copies", zero, decoupled);
    let key = b.slice("k_own", kv, 3, 0, own);
    let key = b.concatenate("k", &[copies, key], 3);
    let value = b.slice("v", kv, 3, own, dv);
    let (block_q, block_kv) = (layer.attention.block_q, layer.attention.block_kv);
    let query = flash::blocks(b, layer, "Q", query, [heads, 1, dk], block_q);
    let key = flash::blocks(b, layer, "K", key, [heads, 1, dk], block_kv);
    let value = flash::blocks(b, layer, "V", value, [heads, 1, dv], block_kv);
    let core = flash::append(b, layer, SoftmaxInputs { query, key, value });
    flash::output(b, layer, core.output, gate);
    core
}
