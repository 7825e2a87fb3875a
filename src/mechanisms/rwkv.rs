//! What RWKV6 and RWKV7 share: the token shift in place of a convolution, and the group norm of the output.

use super::layer::{output_projection, token_layout};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Role, RowRun, Stage, Value};
use crate::layer::{Layer, Pass};

/// Epsilon of the group norm, `8^2 1e-5` (the published code).
const GROUP_NORM_EPSILON: f64 = 64e-5;

/// Name of the token before, as an input and as an output of a decode step.
const SHIFT_STATE: &str = "shift_state";

/// A layer's input and how far every token is from the one before it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shifted {
    /// `x_t [B, T, d]`, f32.
    pub(super) x: Value,
    /// `x_(t-1) - x_t`, f32, with `x_(-1) = 0` at the start of every sequence. The shift is an address: rows are read one token earlier.
    pub(super) difference: Value,
}

/// The token shift of `x [B, T, d]`.
pub(super) fn token_shift(b: &mut Builder, layer: &Layer, x: Value) -> Shifted {
    let token = x;
    let x = b.cast("x_f32", token, Dtype::F32);
    let previous = match layer.pass {
        Pass::Forward | Pass::Verify => {
            let runs = layer.packed_sequences().into_iter().flat_map(|sequence| {
                let start = RowRun { from: None, rows: 1 };
                let earlier = RowRun {
                    from: Some(sequence.token),
                    rows: sequence.tokens - 1,
                };
                [start, earlier]
            });
            b.gather_rows("x_previous", x, 1, &runs.filter(|run| run.rows > 0).collect())
        }
        Pass::Decode => {
            let dims = [layer.batch, 1, layer.model_width];
            let init = Init::Normal { std: 1.0 };
            let previous = b.input(SHIFT_STATE, dims, layer.activations, Role::State, init);
            b.output(SHIFT_STATE, token);
            b.cast("x_previous_f32", previous, Dtype::F32)
        }
    };
    let difference = b.subtract("x_previous - x", previous, x);
    Shifted { x, difference }
}

impl Shifted {
    /// `x + (x_previous - x) . mu` with a learned `mu [d]`, as a matrix operand.
    pub(super) fn mix(self, b: &mut Builder, layer: &Layer, name: &str) -> Value {
        let mu = mix_weight(b, layer, name);
        self.mix_by(b, layer, name, mu)
    }

    /// `x + (x_previous - x) . weight`, as a matrix operand.
    pub(super) fn mix_by(self, b: &mut Builder, layer: &Layer, name: &str, weight: Value) -> Value {
        let step = b.multiply(&format!("x_{name}_step"), self.difference, weight);
        let mixed = b.add(&format!("x_{name}"), self.x, step);
        b.cast(&format!("x_{name}_rounded"), mixed, layer.activations)
    }
}

/// The learned part of a mix, `mu [d]`.
pub(super) fn mix_weight(b: &mut Builder, layer: &Layer, name: &str) -> Value {
    let init = Init::Uniform { low: 0.0, high: 1.0 };
    b.input(
        &format!("mu_{name}"),
        [layer.model_width],
        Dtype::F32,
        Role::Weight,
        init,
    )
}

/// Learned values of every channel of every key head, `[Hk, dk]`.
pub(super) fn channel_weight(b: &mut Builder, layer: &Layer, name: &str, init: Init) -> Value {
    let dims = [layer.key_heads, layer.key_dim];
    b.input(name, dims, Dtype::F32, Role::Weight, init)
}

/// Stages op7b and op7c: `(group_norm(o) + extra) . gate` with a group per value head, output projection. `extra` and `gate` are
/// `[B, T, Hv, dv]`, f32, each where the layer has one.
pub(super) fn output(
    b: &mut Builder,
    layer: &Layer,
    core_output: Value,
    extra: Option<Value>,
    gate: Option<Value>,
) {
    b.stage(Stage::OutputNorm);
    let o = token_layout(b, layer, core_output);
    let o = b.cast("o_f32", o, Dtype::F32);
    let mut out = group_norm(b, layer, o);
    if let Some(extra) = extra {
        out = b.add("o_extra", out, extra);
    }
    if let Some(gate) = gate {
        out = b.multiply("o_gated", out, gate);
    }
    output_projection(b, layer, out);
}

fn group_norm(b: &mut Builder, layer: &Layer, o: Value) -> Value {
    let width = (layer.value_dim as f64).recip();
    let sum = b.sum_minor("o_sum", o);
    let mean = b.scale("o_mean", sum, width);
    let centred = b.subtract("o_centred", o, mean);
    let squared = b.multiply("o_squared", centred, centred);
    let sum = b.sum_minor("o_variance_sum", squared);
    let variance = b.scale("o_variance", sum, width);
    let variance = b.map(
        "o_variance_eps",
        Function::AddConstant(GROUP_NORM_EPSILON),
        variance,
    );
    let inverse = b.map("o_inverse_deviation", Function::ReciprocalSqrt, variance);
    let normalised = b.multiply("o_normalised", centred, inverse);
    let parameters = [layer.value_heads, layer.value_dim];
    let weight = b.input("norm_weight", parameters, Dtype::F32, Role::Weight, Init::Ones);
    let bias = b.input("norm_bias", parameters, Dtype::F32, Role::Weight, Init::Zeros);
    let weighted = b.multiply("o_weighted", normalised, weight);
    b.add("o_biased", weighted, bias)
}

/// A projected gate `[B, T, Hv dv]` per value head, f32.
pub(super) fn gate_heads(b: &mut Builder, layer: &Layer, gate: Value) -> Value {
    let dims = [layer.batch, layer.tokens, layer.value_heads, layer.value_dim];
    let gate = b.reshape("output_gate_heads", gate, dims);
    b.cast("output_gate_f32", gate, Dtype::F32)
}
