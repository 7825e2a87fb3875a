//! Preconditioned `DeltaNet` (arXiv 2604.21100): Gated `DeltaNet` that writes along `m . k`, with a diagonal preconditioner `m` from how often every key
//! channel was used: `a_t = e^g a_{t-1} + b k^2`, `m = 1.5^(-z / (1 + |z|))`, `z = ln(a + 1e-6) - c`, so that `m` lies in `(1/1.5, 1.5)`.
//!
//! `g`, `b` and `c` belong to the key head. Inside a chunk `a` is a masked product on `k^2` plus the decayed row of the chunk before, which a loop
//! over chunks carries. Matrix FLOPs of the core per token and head, with an inverse of `2 (log2 C - 1)` products:
//! `6 C dk + 4 C dv + 6 dk dv + 4 (log2 C - 1) C^2`, and `2 C dk` per key head for the accumulator.

use super::delta_rule;
use super::gates::{self, GateInit};
use super::gram;
use super::layer::{Qkv, convolution, core_layout, output, project, projections};
use super::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Precision, Role, Value};
use crate::layer::{DecayGate, InitialState, InverseVariant, Layer, OutputGate, Pass};

/// The preconditioner lies between `1 / SQUASH` and `SQUASH`.
const SQUASH: f64 = 1.5;
/// Keeps the logarithm of an unused channel finite.
const ACCUMULATOR_EPSILON: f64 = 1e-6;
/// What the learned centre `c` starts from.
const CENTRE: f64 = -0.2;

/// Name of the accumulator, as an output and as an input of a decode step.
const ACCUMULATOR: &str = "accumulator";

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "preconditioned_delta",
    title: "Preconditioned DeltaNet",
    source: "arXiv 2604.21100",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[
        fields::COMMON,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::GRAM,
        fields::DECAY,
        fields::DELTA,
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
    let (heads, sharing) = (layer.key_heads, layer.sharing());
    let projected = projections(b, layer);
    let decay_raw = project(b, layer, projected.x, "decay", layer.value_heads);
    let step_raw = project(b, layer, projected.x, "step", layer.value_heads);
    let forget_raw = project(b, layer, projected.x, "forget", heads);
    let weight_raw = project(b, layer, projected.x, "weight", heads);

    let qkv = convolution(b, layer, projected.qkv, false);
    let log_decay = gates::log_decay(b, layer, decay_raw, layer.value_heads, 1, GateInit::TIME_STEP);
    let step = gates::step_size(b, layer, step_raw);
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, sharing, 1);
    let step = core_layout(b, layer, "beta_core", step, heads, sharing, 1);
    let forget = gates::named_log_decay(b, layer, "forget", forget_raw, [heads, 1], GateInit::TIME_STEP);
    let forget = core_layout(b, layer, "g_core", forget, heads, 1, 1);
    let weight = b.map("b", Function::Sigmoid, weight_raw);
    let weight = core_layout(b, layer, "b_core", weight, heads, 1, 1);

    let accumulator = match layer.pass {
        Pass::Forward | Pass::Verify => accumulate(b, layer, &qkv, forget, weight),
        Pass::Decode => accumulate_token(b, layer, &qkv, forget, weight),
    };
    let m = precondition(b, layer, accumulator);
    let key = b.cast("K_f32", qkv.key, Dtype::F32);
    let write_key = b.multiply("m . K", key, m);
    let inputs = DeltaRuleInputs {
        write_key: b.cast("X", write_key, layer.activations),
        step: Some(step),
        log_decay: Some(log_decay),
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, layer, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Silu);
    core
}

/// `a [B, Hk, 1, N, C, dk]` in f32: `exp(G_i - G_j)` for `j <= i` times `b k^2`, plus `e^G` times the last row of the chunk before.
fn accumulate(b: &mut Builder, layer: &Layer, qkv: &Qkv, forget: Value, weight: Value) -> Value {
    let (act, last_row) = (layer.activations, layer.chunk - 1);
    let cumulative = b.cumulative_sum("Ga", forget, 4);
    let mask = gram::decay_mask(b, "Ma", cumulative, cumulative);
    let mask = b.cast("Ma_operand", mask, act);
    let key = b.cast("K_f32", qkv.key, Dtype::F32);
    let squared = b.multiply("K_squared", key, key);
    let weighted = b.multiply("b K^2", squared, weight);
    let weighted = b.cast("b K^2_operand", weighted, act);
    let within = b.matmul("a_within", mask, weighted, Precision::Default);

    let decay = b.exp("e^Ga", cumulative);
    let chunk_decay = b.slice("e^Ga_C", decay, 4, last_row, 1);
    let chunk_end = b.slice("a_within_C", within, 4, last_row, 1);
    let dims = [layer.states(), layer.key_heads, 1, 1, layer.key_dim];
    let start = match layer.initial_state {
        InitialState::Zero => b.fill("a_0", dims, Dtype::F32, 0.0),
        InitialState::Given => {
            let init = Init::Uniform { low: 0.0, high: 1.0 };
            b.input("a_0", dims, Dtype::F32, Role::State, init)
        }
    };
    let (end, entries) = b.segmented_scan(
        "a_chunk",
        3,
        &layer.first_chunks(),
        &[start],
        &[chunk_decay, chunk_end],
        &[],
        |body, carry, slice, _| {
            let decayed = body.multiply("e^Ga_C a", carry[0], slice[0]);
            let next = body.add("a'", decayed, slice[1]);
            (vec![next], vec![carry[0]])
        },
    );
    b.output(ACCUMULATOR, end[0]);
    let carried = b.multiply("e^Ga a_entry", entries[0], decay);
    b.add("a", within, carried)
}

/// `a [B, Hk, 1, 1, 1, dk]` of a decode step in f32: the row of the token before, decayed, plus `b k^2`.
fn accumulate_token(b: &mut Builder, layer: &Layer, qkv: &Qkv, forget: Value, weight: Value) -> Value {
    let dims = [layer.batch, layer.key_heads, 1, 1, 1, layer.key_dim];
    let init = Init::Uniform { low: 0.0, high: 1.0 };
    let before = b.input(ACCUMULATOR, dims, Dtype::F32, Role::State, init);
    let decay = b.exp("e^g", forget);
    let decayed = b.multiply("e^g a", before, decay);
    let key = b.cast("K_f32", qkv.key, Dtype::F32);
    let squared = b.multiply("K_squared", key, key);
    let weighted = b.multiply("b K^2", squared, weight);
    let next = b.add("a", decayed, weighted);
    b.output(ACCUMULATOR, next);
    next
}

/// `m = exp(-ln(1.5) z / (1 + |z|))`, `z = ln(a + 1e-6) - c`.
fn precondition(b: &mut Builder, layer: &Layer, accumulator: Value) -> Value {
    let per_head = [layer.key_heads, 1, 1, 1, 1];
    let at = Init::Uniform {
        low: CENTRE,
        high: CENTRE,
    };
    let centre = b.input("centre", per_head, Dtype::F32, Role::Weight, at);
    let a = b.map("a + eps", Function::AddConstant(ACCUMULATOR_EPSILON), accumulator);
    let log = b.map("ln a", Function::Log, a);
    let z = b.subtract("z", log, centre);
    let size = b.map("|z|", Function::Abs, z);
    let size = b.map("1 + |z|", Function::AddConstant(1.0), size);
    let inverse = b.map("1 / (1 + |z|)", Function::Reciprocal, size);
    let squashed = b.multiply("z / (1 + |z|)", z, inverse);
    let exponent = b.scale("-ln(1.5) z / (1 + |z|)", squashed, -SQUASH.ln());
    b.exp("m", exponent)
}
