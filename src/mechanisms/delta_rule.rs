//! Chunk form of the gated delta rule: stages op3 (cumulative decay) to op7a.
//!
//! Per token, with write key `x`, read key `r` (step size folded in), value `y` (likewise), query `q`, log decay `l`, `D = diag(e^l)`:
//!
//! ```text
//! S~ = D S (decayed reads) or S (undecayed);  u = y - r S~;  S <- D S + x^T u;  o = q S
//! ```
//!
//! Per chunk, with the Gram matrices `A`, `P` of [`super::gram`] and `T = (I + A)^-1`:
//!
//! ```text
//! U0 = T Y            W = T (R . e^Gr)        U = U0 - W S0
//! S' = diag(e^G_C) S0 + (X . e^(G_C - G))^T U         O = (Q . e^G) S0 + P U
//! ```

use super::gram::{self, GramOperands, expand};
use super::{Core, DeltaRuleInputs, GramExponent, Recurrence, append_inverse};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Precision, ReduceFunction, Role, Stage, Value};
use crate::layer::{DecayGate, GramVariant, InitialState, Layer, PivotRow, ReadConvention, StateFormat};

/// Largest finite value of FP8 E4M3.
const FP8_E4M3_MAX: f64 = 448.0;

/// Appends stages op3 (cumulative sum) to op7a and declares the outputs `o` and `state`.
pub(super) fn append(b: &mut Builder, layer: &Layer, inputs: DeltaRuleInputs) -> Core {
    let dk = layer.key_dim;
    let c = layer.chunk;
    let act = layer.activations;

    b.stage(Stage::Gates);
    let cumulative = b.cumulative_sum("G", inputs.log_decay, 4);
    let read_cumulative = match layer.read {
        ReadConvention::Decayed => cumulative,
        ReadConvention::Undecayed => b.subtract("Gx", cumulative, inputs.log_decay),
    };

    b.stage(Stage::Gram);
    let operands = GramOperands {
        query: inputs.query,
        read: inputs.read_key,
        write: inputs.write_key,
        step: inputs.step,
        cumulative,
        read_cumulative,
    };
    let (a, p) = gram::append(b, layer.gram, layer.pivot, act, operands);
    let p = b.cast("P_operand", p, act);

    b.stage(Stage::Inverse);
    let t = append_inverse(b, layer.inverse, layer.inverse_precision, layer.neumann_steps, a);

    b.stage(Stage::WyFactors);
    let t = b.cast("T_operand", t, act);
    let value = b.cast("V_f32", inputs.value, Dtype::F32);
    let y = b.multiply("Y", value, inputs.step);
    let y = b.cast("Y_operand", y, act);
    let decay = b.exp("e^Gr", read_cumulative);
    let decay = expand(b, "e^Gr", decay, dk);
    let read = b.cast("R_f32", inputs.read_key, Dtype::F32);
    let stepped = b.multiply("R", read, inputs.step);
    let r = b.multiply("R . e^Gr", stepped, decay);
    let r = b.cast("R_operand", r, act);
    let u0 = b.matmul("U0", t, y, Precision::Default);
    let u0 = b.cast("U0_rounded", u0, act);
    let w = b.matmul("W", t, r, Precision::Default);
    let w = b.cast("W_rounded", w, act);

    b.stage(Stage::StateScan);
    let last = b.slice("G_C", cumulative, 4, c - 1, 1);
    let tail = b.subtract("G_C - G", last, cumulative);
    let tail = b.exp("e^(G_C - G)", tail);
    let tail = expand(b, "e^(G_C - G)", tail, dk);
    let x = b.cast("X_f32", inputs.write_key, Dtype::F32);
    let x = b.multiply("X . e^(G_C - G)", x, tail);
    let x = b.cast("X_operand", x, act);
    let chunk_decay = b.exp("e^G_C", last);
    let chunk_decay = expand(b, "e^G_C", chunk_decay, dk);
    // One decay per key row of the state: a column vector.
    let chunk_decay = b.transpose_minor("e^G_C_rows", chunk_decay);
    let (initial, initial_state) = initial_carry(b, layer, inputs);
    let (carries, stacks) = b.scan(
        "S",
        3,
        &initial,
        &[u0, w, x, chunk_decay],
        &[],
        |body, carry, slice, _| {
            let [u0, w, x, decay] = [slice[0], slice[1], slice[2], slice[3]];
            let s = decode_state(body, layer.state, carry);
            let operand = state_operand(body, layer, s, carry);
            let ws = body.matmul("W S", w, operand, layer.state_precision);
            let u0 = body.cast("U0_f32", u0, Dtype::F32);
            let u = body.subtract("U", u0, ws);
            let u = body.cast("U_rounded", u, act);
            let s = body.cast("S_f32", s, Dtype::F32);
            let decayed = body.multiply("D S", s, decay);
            let update = body.matmul_at("X^T U", x, u, Precision::Default);
            let next = body.add("S'", decayed, update);
            let next = encode_state(body, layer.state, next);
            let mut stacks = vec![u];
            stacks.extend(carry);
            (next, stacks)
        },
    );
    let final_state = decode_state(b, layer.state, &carries);
    let final_state = b.cast("S_final", final_state, Dtype::F32);

    b.stage(Stage::Output);
    let entry = decode_state(b, layer.state, &stacks[1..]);
    let operand = state_operand(b, layer, entry, &stacks[1..]);
    let head = b.exp("e^G", cumulative);
    let head = expand(b, "e^G", head, dk);
    let q = b.cast("Q_f32", inputs.query, Dtype::F32);
    let q = b.multiply("Q . e^G", q, head);
    let q = b.cast("Q_operand", q, act);
    let inter = b.matmul("Q S0", q, operand, layer.state_precision);
    let intra = b.matmul("P U", p, stacks[0], Precision::Default);
    let o = b.add("O", inter, intra);
    let o = b.cast("O_rounded", o, act);
    b.output("o", o);
    b.output("state", final_state);

    Core {
        recurrence: Recurrence::DeltaRule(inputs),
        value: inputs.value,
        log_decay: Some(inputs.log_decay),
        initial_state,
        output: o,
        final_state: Some(final_state),
        gram_exponent: gram_exponent(layer),
    }
}

/// Rows over which decay accumulates on one side of the pivot, for the Gram variants that factor the exponential.
fn gram_exponent(layer: &Layer) -> Option<GramExponent> {
    let block = match layer.gram {
        GramVariant::Folded => layer.chunk,
        GramVariant::Pivot => gram::PIVOT_BLOCK.min(layer.chunk),
        GramVariant::ScalarMask
        | GramVariant::Broadcast
        | GramVariant::PivotCausal
        | GramVariant::TileMasks => return None,
    };
    let rows = match layer.pivot {
        PivotRow::Middle => block / 2,
        PivotRow::First => block - 1,
    };
    let largest_decay = match layer.decay_gate {
        DecayGate::Bounded => -layer.decay_bound,
        DecayGate::Softplus => f64::INFINITY,
    };
    Some(GramExponent { rows, largest_decay })
}

fn initial_carry(b: &mut Builder, layer: &Layer, inputs: DeltaRuleInputs) -> (Vec<Value>, Option<Value>) {
    let value = b.dims(inputs.value);
    let decay = b.dims(inputs.log_decay);
    let dims = vec![
        value[0],
        value[1],
        value[2].max(decay[2]),
        layer.key_dim,
        value[5],
    ];
    match layer.initial_state {
        InitialState::Given => {
            let state = b.input("S_0", dims, Dtype::F32, Role::State, Init::Normal { std: 1.0 });
            (encode_state(b, layer.state, state), Some(state))
        }
        InitialState::Zero => {
            let zero = |b: &mut Builder, dims: &[usize], dtype| b.fill("S_0", dims.to_vec(), dtype, 0.0);
            let carry = match layer.state {
                StateFormat::F32 => vec![zero(b, &dims, Dtype::F32)],
                StateFormat::Bf16 => vec![zero(b, &dims, Dtype::Bf16)],
                StateFormat::RowFp8 => {
                    let codes = zero(b, &dims, Dtype::Fp8E4m3);
                    let mut scale_dims = dims.clone();
                    scale_dims[4] = 1;
                    vec![codes, zero(b, &scale_dims, Dtype::F32)]
                }
            };
            (carry, None)
        }
    }
}

/// The carried tensors of a state `[.., dk, width]` in f32: itself, rounded, or FP8 codes with a scale per row.
fn encode_state(b: &mut Builder, format: StateFormat, state: Value) -> Vec<Value> {
    match format {
        StateFormat::F32 => vec![state],
        StateFormat::Bf16 => vec![b.cast("S_bf16", state, Dtype::Bf16)],
        StateFormat::RowFp8 => {
            let minor = b.shape(state).rank() - 1;
            let magnitude = b.map("|S|", Function::Abs, state);
            let largest = b.reduce("row_max", ReduceFunction::Maximum, magnitude, minor);
            let scale = b.scale("row_scale", largest, FP8_E4M3_MAX.recip());
            let divisor = b.map("row_scale_nonzero", Function::NonZeroOr1, scale);
            let inverse = b.map("row_scale_inverse", Function::Reciprocal, divisor);
            let scaled = b.multiply("S_scaled", state, inverse);
            // The reciprocal may round up, so the largest element of a row can exceed the format's maximum by one ulp.
            let clipped = b.map("S_clipped", Function::MinimumConstant(FP8_E4M3_MAX), scaled);
            let clipped = b.map(
                "S_clipped_below",
                Function::MaximumConstant(-FP8_E4M3_MAX),
                clipped,
            );
            vec![b.cast("S_codes", clipped, Dtype::Fp8E4m3), scale]
        }
    }
}

/// The state behind carried tensors: as it is, or codes times row scales in f32.
fn decode_state(b: &mut Builder, format: StateFormat, carry: &[Value]) -> Value {
    match format {
        StateFormat::F32 | StateFormat::Bf16 => carry[0],
        StateFormat::RowFp8 => {
            let codes = b.cast("S_codes_f32", carry[0], Dtype::F32);
            b.multiply("S_decoded", codes, carry[1])
        }
    }
}

/// The state as a matrix operand: f32 states stay f32 and take `state_precision` passes, others are bf16.
fn state_operand(b: &mut Builder, layer: &Layer, state: Value, carry: &[Value]) -> Value {
    match layer.state {
        StateFormat::F32 => state,
        StateFormat::Bf16 => carry[0],
        StateFormat::RowFp8 => b.cast("S_operand", state, layer.activations),
    }
}
