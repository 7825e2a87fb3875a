//! Chunk form of diagonal plus low rank: stages op3 (cumulative decay) to op7a.
//!
//! Per token `S <- D S + a^T (b S) + k^T v`, `o = q S`; the transition reads the state before its decay. With `Gx = G - l`, per chunk:
//!
//! ```text
//! Aab = tril-1[ sum_c b_ic a_jc e^(Gx_ic - G_jc) ]        Abk likewise with k
//! Pqk = tril0 [ sum_c q_ic k_jc e^(G_ic - G_jc) ]         Pqa likewise with a
//! E   = (I - Aab)^-1 ( (B . e^Gx) S0 + Abk V )
//! O   = (Q . e^G) S0 + Pqk V + Pqa E
//! S'  = diag(e^G_C) S0 + (K . e^(G_C - G))^T V + (A . e^(G_C - G))^T E
//! ```
//!
//! `8C dk + 8C dv + 8 dk dv` matrix FLOPs per token and head beside the inverse. The inverse is applied to the right-hand side inside the scan, as
//! above; applying it to `B . e^Gx` and `Abk V` beforehand, as kernels of the delta rule do, shortens the chain of a chunk by a product and
//! costs `2C dk` more. The four Gram matrices share their exponentials: with pivots `dk (2 + C/16)` per token and head, where four
//! Grams built in two pairs would take `2 dk (1 + C/16)`; the tails `e^Gx`, `e^G` and `e^(G_C - G)` take `3 dk`.

use super::decode::{self, Beside, TokenDecay, TokenInputs};
use super::gram::{self, Columns, Operands, Rows, expand, weighted};
use super::state::{decode_state, encode_state, initial_carry, state_operand};
use super::{Core, DiagonalLowRankInputs, Recurrence, append_inverse};
use crate::dtype::Dtype;
use crate::graph::{Builder, Mask, Precision, Stage, Value};
use crate::layer::{Layer, Pass, ReadConvention};

/// Appends stages op3 (cumulative sum) to op7a and declares the outputs `o` and `state`; `largest_decay` is the largest `|l|` the gate allows.
pub(super) fn append(
    b: &mut Builder,
    layer: &Layer,
    inputs: DiagonalLowRankInputs,
    largest_decay: f64,
) -> Core {
    if layer.pass == Pass::Decode {
        let token = TokenInputs {
            query: inputs.query,
            write_key: inputs.key,
            read_key: None,
            value: inputs.value,
            step: None,
            decay: TokenDecay::Log(inputs.log_decay),
            // The transition reads the state before its decay.
            read: ReadConvention::Undecayed,
            low_rank: Some([inputs.write, inputs.read]),
            beside: Beside::Nothing,
        };
        return decode::append(b, layer, token, Recurrence::DiagonalPlusLowRank(inputs));
    }
    let act = layer.activations;
    let value = inputs.value;

    b.stage(Stage::Gates);
    let g = b.cumulative_sum("G", inputs.log_decay, 4);
    let gx = b.subtract("Gx", g, inputs.log_decay);

    b.stage(Stage::Gram);
    let rows = [("Q", inputs.query, g), ("B", inputs.read, gx)].map(|(name, operand, cumulative)| Rows {
        name,
        operand,
        cumulative,
    });
    let columns = [("K", inputs.key), ("A", inputs.write)].map(|(name, operand)| Columns { name, operand });
    let operands = Operands {
        rows: &rows,
        columns: &columns,
        cumulative: g,
        bound: None,
    };
    let grams = gram::all(b, layer.gram, layer.pivot, act, operands);
    let p_qk = b.select("Pqk", Mask::Lower, grams[0], 0.0);
    let p_qa = b.select("Pqa", Mask::Lower, grams[1], 0.0);
    let a_bk = b.select("Abk", Mask::StrictlyLower, grams[2], 0.0);
    let a_ab = b.select("Aab", Mask::StrictlyLower, grams[3], 0.0);
    let p_qk = b.cast("Pqk_operand", p_qk, act);
    let p_qa = b.cast("Pqa_operand", p_qa, act);
    let a_bk = b.cast("Abk_operand", a_bk, act);
    let minus = b.scale("-Aab", a_ab, -1.0);

    b.stage(Stage::Inverse);
    let t = append_inverse(
        b,
        layer.inverse,
        layer.inverse_precision,
        layer.neumann_steps,
        minus,
    );

    b.stage(Stage::WyFactors);
    let t = b.cast("T_operand", t, act);
    let rhs = b.matmul("Abk V", a_bk, value, Precision::Default);
    let rhs = b.cast("Abk V_rounded", rhs, act);
    let before = b.exp("e^Gx", gx);
    let read = weighted(b, layer, "B . e^Gx", inputs.read, before);

    b.stage(Stage::StateScan);
    let last = b.slice("G_C", g, 4, layer.chunk - 1, 1);
    let tail = b.subtract("G_C - G", last, g);
    let tail = b.exp("e^(G_C - G)", tail);
    let k = weighted(b, layer, "K . e^(G_C - G)", inputs.key, tail);
    let a = weighted(b, layer, "A . e^(G_C - G)", inputs.write, tail);
    let chunk_decay = b.exp("e^G_C", last);
    let chunk_decay = expand(b, "e^G_C", chunk_decay, layer.key_dim);
    let chunk_decay = b.transpose_minor("e^G_C_rows", chunk_decay);
    // What the values add does not depend on the state.
    let updates = b.matmul_at("K^T V", k, value, Precision::Default);
    let added = b.dims(updates);
    let state = [layer.states(), added[1], added[2], added[4], added[5]];
    let (initial, initial_state) = initial_carry(b, layer, state);
    let scanned = [t, rhs, read, a, chunk_decay, updates];
    let step = |body: &mut Builder, carry: &[Value], slice: &[Value], _: &[Value]| {
        let [t, rhs, read, a, decay, update] = [slice[0], slice[1], slice[2], slice[3], slice[4], slice[5]];
        let s = decode_state(body, layer.state, carry);
        let operand = state_operand(body, layer, s, carry);
        let bs = body.matmul("B S", read, operand, layer.state_precision);
        let rhs = body.cast("Abk V_f32", rhs, Dtype::F32);
        let rhs = body.add("B S + Abk V", bs, rhs);
        let rhs = body.cast("rhs_operand", rhs, act);
        let e = body.matmul("E", t, rhs, Precision::Default);
        let e = body.cast("E_rounded", e, act);
        let s = body.cast("S_f32", s, Dtype::F32);
        let decayed = body.multiply("D S", s, decay);
        let kept = body.add("D S + K^T V", decayed, update);
        let written = body.matmul_at("A^T E", a, e, Precision::Default);
        let next = body.add("S'", kept, written);
        let mut stacks = vec![e];
        stacks.extend(carry);
        (encode_state(body, layer.state, next), stacks)
    };
    let (carries, stacks) = b.segmented_scan("S", 3, &layer.first_chunks(), &initial, &scanned, &[], step);
    let final_state = decode_state(b, layer.state, &carries);
    let final_state = b.cast("S_final", final_state, Dtype::F32);

    b.stage(Stage::Output);
    let entry = decode_state(b, layer.state, &stacks[1..]);
    let operand = state_operand(b, layer, entry, &stacks[1..]);
    let head = b.exp("e^G", g);
    let q = weighted(b, layer, "Q . e^G", inputs.query, head);
    let inter = b.matmul("Q S0", q, operand, layer.state_precision);
    let values = b.matmul("Pqk V", p_qk, value, Precision::Default);
    let solved = b.matmul("Pqa E", p_qa, stacks[0], Precision::Default);
    let intra = b.add("Pqk V + Pqa E", values, solved);
    let o = b.add("O", inter, intra);
    let o = b.cast("O_rounded", o, act);
    b.output("o", o);
    b.output("state", final_state);

    Core {
        recurrence: Recurrence::DiagonalPlusLowRank(inputs),
        value,
        log_decay: Some(inputs.log_decay),
        initial_state,
        output: o,
        final_state: Some(final_state),
        gram_exponent: gram::exponent(layer, largest_decay),
    }
}
