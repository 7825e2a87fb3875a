//! The recurrent state between chunks: where it starts, the format it is carried in, and what a matrix product sees of it.

use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, ReduceFunction, Role, Value};
use crate::layer::{InitialState, Layer, StateFormat};

/// Largest finite value of FP8 E4M3.
const FP8_E4M3_MAX: f64 = 448.0;

/// The carried tensors of the state `[B, Hk, R, dk, width]` before the first chunk, and the given state where there is one.
pub(super) fn initial_carry(b: &mut Builder, layer: &Layer, dims: [usize; 5]) -> (Vec<Value>, Option<Value>) {
    match layer.initial_state {
        InitialState::Given => {
            let state = b.input("S_0", dims, Dtype::F32, Role::State, Init::Normal { std: 1.0 });
            (encode_state(b, layer.state, state), Some(state))
        }
        InitialState::Zero => {
            let zero = |b: &mut Builder, dims: [usize; 5], dtype| b.fill("S_0", dims, dtype, 0.0);
            let carry = match layer.state {
                StateFormat::F32 => vec![zero(b, dims, Dtype::F32)],
                StateFormat::Bf16 => vec![zero(b, dims, Dtype::Bf16)],
                StateFormat::RowFp8 => {
                    let codes = zero(b, dims, Dtype::Fp8E4m3);
                    let [batch, key_heads, shared, rows, _] = dims;
                    vec![codes, zero(b, [batch, key_heads, shared, rows, 1], Dtype::F32)]
                }
            };
            (carry, None)
        }
    }
}

/// The carried tensors of a state `[.., dk, width]` in f32: itself, rounded, or FP8 codes with a scale per row.
pub(super) fn encode_state(b: &mut Builder, format: StateFormat, state: Value) -> Vec<Value> {
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
pub(super) fn decode_state(b: &mut Builder, format: StateFormat, carry: &[Value]) -> Value {
    match format {
        StateFormat::F32 | StateFormat::Bf16 => carry[0],
        StateFormat::RowFp8 => {
            let codes = b.cast("S_codes_f32", carry[0], Dtype::F32);
            b.multiply("S_decoded", codes, carry[1])
        }
    }
}

/// The state as a matrix operand: f32 states stay f32 and take `state_precision` passes, others are bf16.
pub(super) fn state_operand(b: &mut Builder, layer: &Layer, state: Value, carry: &[Value]) -> Value {
    match layer.state {
        StateFormat::F32 => state,
        StateFormat::Bf16 => carry[0],
        StateFormat::RowFp8 => b.cast("S_operand", state, layer.activations),
    }
}
