//! Softmax attention with grouped queries (arXiv 2305.13245): query head `h` reads key head `h / R`, `R` query heads to a key head.
//!
//! Optional, in this order: RMS norm per head of queries and keys (`qk_norm`), rotation of the first `rotary` share of their channels (0 is
//! `NoPE`), scores times `s ln n` (`ssmax`), causal mask, sliding window, output gate.

use super::flash::{self, RotaryTables};
use super::layer::{output_gate, project};
use super::{Core, Defaults, Granularity, Mechanism, SoftmaxInputs, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Init, Role, Stage, Value};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate, Pass};

/// What attention has no use for.
pub(super) const NO_DEFAULTS: Defaults = Defaults {
    inverse: InverseVariant::RowSubstitution,
    decay_gate: DecayGate::Softplus,
    decay_bound: -5.0,
    negative_eigenvalues: false,
    output_gate: OutputGate::None,
};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "softmax",
    title: "softmax attention with grouped queries",
    source: "arXiv 1706.03762, 2305.13245",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[
        fields::ATTENTION,
        fields::GROUPED_ATTENTION,
        fields::PACKED,
        fields::CONTEXT,
    ],
    defaults: NO_DEFAULTS,
    append,
};

fn append(b: &mut Builder, layer: &Layer) -> Core {
    let (queries, keys) = (layer.value_heads, layer.key_heads);
    let (dk, dv) = (layer.key_dim, layer.value_dim);
    b.stage(Stage::Projections);
    let x = input(b, layer);
    let qkv = project(b, layer, x, "qkv", queries * dk + keys * (dk + dv));
    let gate = output_gate(b, layer, x);
    // Without norm and rotation only the scale is left, which belongs to the launch of the projection.
    let turned = layer.rotary_channels(dk);
    let prepared = layer.attention.qk_norm || turned > 0;
    let qkv = if prepared {
        let rounded = b.cast("qkv_rounded", qkv, layer.activations);
        b.stage(Stage::Convolution);
        rounded
    } else {
        qkv
    };
    let part = |b: &mut Builder, name: &str, start: usize, heads: usize, channels: usize| {
        let part = b.slice(&format!("{name}_channels"), qkv, 2, start, heads * channels);
        b.reshape(
            &format!("{name}_heads"),
            part,
            [layer.batch, layer.tokens, heads, channels],
        )
    };
    let query = part(b, "q", 0, queries, dk);
    let key = part(b, "k", queries * dk, keys, dk);
    let value = part(b, "v", (queries + keys) * dk, keys, dv);
    let tables = RotaryTables::new(b, layer, turned);
    let prepare = |b: &mut Builder, name: &str, x: Value| {
        let mut x = b.cast(&format!("{name}_f32"), x, Dtype::F32);
        if layer.attention.qk_norm {
            x = flash::rms_norm(b, name, x);
        }
        match tables {
            Some(tables) => tables.rotate(b, name, x),
            None => x,
        }
    };
    let query = prepare(b, "q", query);
    let key = if prepared { prepare(b, "k", key) } else { key };
    let query = flash::scale_query(b, layer, query);
    let core = match layer.pass {
        Pass::Forward | Pass::Verify => {
            let by_key = layer.key_blocks();
            let query = flash::blocks(b, layer, "Q", query, [keys, layer.sharing(), dk]);
            let key = flash::blocks(b, &by_key, "K", key, [keys, 1, dk]);
            let value = flash::blocks(b, &by_key, "V", value, [keys, 1, dv]);
            flash::append(b, layer, SoftmaxInputs { query, key, value })
        }
        Pass::Decode => {
            let key = flash::cached(b, layer, "k_cache", key);
            let value = flash::cached(b, layer, "v_cache", value);
            flash::append_token(b, layer, query, key, value)
        }
    };
    flash::output(b, layer, core.output, gate);
    core
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
