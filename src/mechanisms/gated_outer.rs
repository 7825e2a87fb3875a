//! Chunk form of gated outer products: stages op3 (cumulative decay) to op7a, without a solve.
//!
//! Per token `S <- D S + k^T v`, `o = q S`, `D = diag(e^l)`. With a bonus (RWKV6) the read comes first: `o = q (S + Diag(u) k^T v)`. Per chunk:
//!
//! ```text
//! P  = tril0[ sum_c q_ic k_jc e^(G_ic - G_jc) ]                                     without bonus
//! P  = tril-1[ sum_c q_ic k_jc e^(Gx_ic - G_jc) ] + Diag( sum_c q_ic u_c k_ic )     with bonus
//! O  = (Q . e^G) S0 + P V         S' = diag(e^G_C) S0 + (K . e^(G_C - G))^T V
//! ```
//!
//! with `Gx = G - l` in place of `G` in `O` under a bonus. Per token and value head `2C (dk/R + dv) + 4 dk dv` matrix FLOPs, `R` value heads
//! sharing a Gram where the decay is one number per token; `2C (dk + dv) + 4 dk dv` where each key head has one value head.
//! What a chunk adds to the state does not depend on the state, so the scan only decays and adds.

use std::sync::Arc;

use super::decode::{self, Beside, TokenDecay, TokenInputs};
use super::gram::{self, Columns, Operands, Rows};
use super::state::{decode_state, encode_state, initial_carry, state_operand};
use super::{Core, GatedOuterInputs, OuterDecay, Readout, Recurrence};
use crate::dtype::Dtype;
use crate::graph::{
    Builder, Function, Init, Mask, Precision, ReduceFunction, Role, RowRun, Stage, Table, Value,
};
use crate::layer::{Layer, Pass, ReadConvention};

/// What is added to `q . z` before the division (flash-linear-attention).
pub const NORMALISER_EPSILON: f64 = 1e-10;

/// Appends stages op3 (cumulative sum) to op7a and declares the outputs `o` and `state`.
///
/// `channels` is the value of the graph that brings in value columns; `largest_decay` the largest `|l|` the gate allows.
pub(super) fn append(
    b: &mut Builder,
    layer: &Layer,
    inputs: GatedOuterInputs,
    channels: Value,
    largest_decay: f64,
) -> Core {
    if layer.pass == Pass::Decode {
        return decode_token(b, layer, inputs);
    }
    let act = layer.activations;
    let decays = decays(b, layer, inputs);

    b.stage(Stage::Gram);
    let p = weights(b, layer, inputs, &decays);
    let p = b.cast("P_operand", p, act);

    b.stage(Stage::StateScan);
    let x = weighted(b, layer, "K . e^(G_C - G)", inputs.key, decays.tail);
    let updates = b.matmul_at("K^T V", x, inputs.value, Precision::Default);
    let added = b.dims(updates);
    let state = [layer.states(), added[1], added[2], added[4], added[5]];
    let (initial, initial_state) = initial_carry(b, layer, state);
    let mut scanned = vec![updates];
    scanned.extend(decays.chunk);
    let (carries, entries) = b.segmented_scan(
        "S",
        3,
        &layer.first_chunks(),
        &initial,
        &scanned,
        &[],
        |body, carry, slice, _| {
            let s = decode_state(body, layer.state, carry);
            let s = body.cast("S_f32", s, Dtype::F32);
            let decayed = match slice.get(1) {
                Some(&decay) => body.multiply("D S", s, decay),
                None => s,
            };
            let next = body.add("S'", decayed, slice[0]);
            (encode_state(body, layer.state, next), carry.to_vec())
        },
    );
    let final_state = decode_state(b, layer.state, &carries);
    let final_state = b.cast("S_final", final_state, Dtype::F32);

    b.stage(Stage::Output);
    let entry = decode_state(b, layer.state, &entries);
    let operand = state_operand(b, layer, entry, &entries);
    let q = weighted(b, layer, "Q . e^G", inputs.query, decays.head);
    let inter = b.matmul("Q S0", q, operand, layer.state_precision);
    let intra = b.matmul("P V", p, inputs.value, Precision::Default);
    let o = b.add("O", inter, intra);
    let o = readout(b, layer, inputs, o, p);
    let o = b.cast("O_rounded", o, act);
    b.output("o", o);
    b.output("state", final_state);

    let log_decay = match inputs.decay {
        OuterDecay::Given(log_decay) => Some(log_decay),
        OuterDecay::None | OuterDecay::Retention => None,
    };
    Core {
        recurrence: Recurrence::GatedOuterProduct(inputs),
        value: channels,
        log_decay,
        initial_state,
        output: o,
        final_state: Some(final_state),
        gram_exponent: log_decay.and_then(|_| gram::exponent(layer, largest_decay)),
    }
}

/// Name of the sum of keys, as an output and as an input of a decode step.
pub(super) const NORMALISER: &str = "normaliser";

/// One token per sequence. The sum of keys of the normaliser is a second state.
fn decode_token(b: &mut Builder, layer: &Layer, inputs: GatedOuterInputs) -> Core {
    let decay = match inputs.decay {
        OuterDecay::None => TokenDecay::None,
        OuterDecay::Given(log_decay) => TokenDecay::Log(log_decay),
        OuterDecay::Retention => {
            b.stage(Stage::Gates);
            let dims = [1, layer.key_heads, layer.sharing(), 1, 1, 1];
            // With a log the state is as old as its last merge.
            let tokens = 1 + layer.log.map_or(0, |log| log.position);
            let table = Table::RetentionChunk {
                tokens,
                chunk: tokens,
            };
            TokenDecay::Factor(b.input("gamma", dims, Dtype::F32, Role::Weight, Init::Table(table)))
        }
    };
    let beside = match (inputs.bonus, inputs.readout) {
        (Some(bonus), _) => Beside::Bonus(bonus),
        (None, Readout::Skip { weight, input }) => Beside::Skip(weight, input),
        (None, Readout::Normalised { initial: Some(sum) }) => {
            b.stage(Stage::StateScan);
            let key = b.cast("K_f32", inputs.key, Dtype::F32);
            let next = b.add("z'", sum, key);
            b.output(NORMALISER, next);
            Beside::Normaliser(next)
        }
        // A decode step has a given state.
        (None, Readout::Plain | Readout::Normalised { initial: None }) => Beside::Nothing,
    };
    let token = TokenInputs {
        query: inputs.query,
        write_key: inputs.key,
        read_key: None,
        value: inputs.value,
        step: None,
        decay,
        read: ReadConvention::Decayed,
        low_rank: None,
        beside,
    };
    decode::append(b, layer, token, Recurrence::GatedOuterProduct(inputs))
}

/// Decays of a chunk, in the forms the stages need; absent where the state does not decay.
#[derive(Default)]
struct Decays {
    /// Cumulative log decays of columns and rows: `G`, and `G` or `Gx`.
    cumulative: Option<(Value, Value)>,
    /// `e^(G_i - G_j)` for `j <= i`, 0 elsewhere, where it is a table.
    mask: Option<Value>,
    /// `e^G`, or `e^Gx` under a bonus.
    head: Option<Value>,
    /// `e^(G_C - G)`.
    tail: Option<Value>,
    /// `e^G_C` as a column over the rows of the state.
    chunk: Option<Value>,
}

fn decays(b: &mut Builder, layer: &Layer, inputs: GatedOuterInputs) -> Decays {
    match inputs.decay {
        OuterDecay::None => Decays::default(),
        OuterDecay::Retention => retention(b, layer),
        OuterDecay::Given(log_decay) => {
            b.stage(Stage::Gates);
            let g = b.cumulative_sum("G", log_decay, 4);
            let read = match inputs.bonus {
                Some(_) => b.subtract("Gx", g, log_decay),
                None => g,
            };
            b.stage(Stage::StateScan);
            let last = b.slice("G_C", g, 4, layer.chunk - 1, 1);
            let tail = b.subtract("G_C - G", last, g);
            let tail = b.exp("e^(G_C - G)", tail);
            let chunk = b.exp("e^G_C", last);
            let chunk = b.transpose_minor("e^G_C_rows", chunk);
            b.stage(Stage::Output);
            let head = b.exp("e^G", read);
            Decays {
                cumulative: Some((g, read)),
                mask: None,
                head: Some(head),
                tail: Some(tail),
                chunk: Some(chunk),
            }
        }
    }
}

/// Powers of the constant decays: tables, so no exponential is left to the kernel. The last chunk decays by its own rows only.
fn retention(b: &mut Builder, layer: &Layer) -> Decays {
    let (heads, shared, c, n) = (layer.key_heads, layer.sharing(), layer.chunk, layer.chunks());
    if !layer.sequences.is_empty() {
        return packed_retention(b, layer);
    }
    let mut table = |name: &str, chunks: usize, rows: usize, columns: usize, table: Table| {
        let dims = [1, heads, shared, chunks, rows, columns];
        Some(b.input(name, dims, Dtype::F32, Role::Weight, Init::Table(table)))
    };
    let tokens = layer.tokens;
    // All chunks are alike but a shorter last one; the scan takes one decay per chunk in any case.
    let (alike, length) = if tokens.is_multiple_of(c) {
        (1, c)
    } else {
        (n, tokens)
    };
    Decays {
        cumulative: None,
        mask: table("gamma^(i-j)", 1, c, c, Table::RetentionMask),
        head: table("gamma^i", 1, c, 1, Table::RetentionHead),
        tail: table(
            "gamma^(C-j)",
            alike,
            c,
            1,
            Table::RetentionTail { tokens: length },
        ),
        chunk: table("gamma^C", n, 1, 1, Table::RetentionChunk { tokens, chunk: c }),
    }
}

/// Powers of the constant decays where every sequence ends with a chunk of its own length: rows of tables over the tokens of a chunk.
fn packed_retention(b: &mut Builder, layer: &Layer) -> Decays {
    let (heads, shared, c) = (layer.key_heads, layer.sharing(), layer.chunk);
    let runs: Arc<[RowRun]> = layer
        .tokens_of_chunks()
        .into_iter()
        .map(|tokens| RowRun {
            from: Some(tokens),
            rows: 1,
        })
        .collect();
    let table = |b: &mut Builder, name: &str, [entries, rows, columns]: [usize; 3], table: Table| {
        let dims = [1, heads, shared, entries, rows, columns];
        b.input(name, dims, Dtype::F32, Role::Weight, Init::Table(table))
    };
    let tail = table(b, "gamma^(n-j)", [c + 1, c, 1], Table::RetentionTailByTokens);
    let chunk = table(b, "gamma^n", [c + 1, 1, 1], Table::RetentionChunkByTokens);
    Decays {
        cumulative: None,
        mask: Some(table(b, "gamma^(i-j)", [1, c, c], Table::RetentionMask)),
        head: Some(table(b, "gamma^i", [1, c, 1], Table::RetentionHead)),
        tail: Some(b.gather_rows("gamma^(C-j)", tail, 3, &runs)),
        chunk: Some(b.gather_rows("gamma^C", chunk, 3, &runs)),
    }
}

/// `P [B, Hk, R, N, C, C]` in f32.
fn weights(b: &mut Builder, layer: &Layer, inputs: GatedOuterInputs, decays: &Decays) -> Value {
    let (query, key) = (inputs.query, inputs.key);
    if let Some((columns, rows)) = decays.cumulative {
        let operands = Operands {
            rows: &[Rows {
                name: "Q",
                operand: query,
                cumulative: rows,
            }],
            columns: &[Columns {
                name: "K",
                operand: key,
            }],
            cumulative: columns,
            bound: None,
        };
        let p = gram::all(b, layer.gram, layer.pivot, layer.activations, operands)[0];
        return match inputs.bonus {
            None => b.select("P", Mask::Lower, p, 0.0),
            Some(bonus) => {
                let past = b.select("P_past", Mask::StrictlyLower, p, 0.0);
                let own = own_weight(b, layer, inputs, bonus);
                b.add("P", past, own)
            }
        };
    }
    let raw = b.matmul_bt("Q K^T", query, key, Precision::Default);
    match decays.mask {
        Some(mask) => b.multiply("P", raw, mask),
        None => b.select("P", Mask::Lower, raw, 0.0),
    }
}

/// `Diag( sum_c q_ic u_c k_ic )`: what a token reads of itself.
fn own_weight(b: &mut Builder, layer: &Layer, inputs: GatedOuterInputs, bonus: Value) -> Value {
    let q = b.cast("Q_f32", inputs.query, Dtype::F32);
    let k = b.cast("K_f32", inputs.key, Dtype::F32);
    let own = b.multiply("q u", q, bonus);
    let own = b.multiply("q u k", own, k);
    let own = b.sum_minor("q u k_sum", own);
    let identity = b.identity("I", layer.chunk, Dtype::F32);
    b.multiply("P_own", identity, own)
}

/// `value . factor` as a matrix operand; the value itself where there is no decay.
fn weighted(b: &mut Builder, layer: &Layer, name: &str, value: Value, factor: Option<Value>) -> Value {
    match factor {
        Some(factor) => gram::weighted(b, layer, name, value, factor),
        None => value,
    }
}

fn readout(b: &mut Builder, layer: &Layer, inputs: GatedOuterInputs, o: Value, p: Value) -> Value {
    match inputs.readout {
        Readout::Plain => o,
        Readout::Skip { weight, input } => {
            let x = b.cast("x_skip", input, Dtype::F32);
            let skipped = b.multiply("D x", x, weight);
            b.add("O + D x", o, skipped)
        }
        Readout::Normalised { initial } => {
            // z at the start of every chunk: an exclusive sum over chunks.
            b.stage(Stage::StateScan);
            let k = b.cast("K_f32", inputs.key, Dtype::F32);
            let added = b.reduce("K_sum", ReduceFunction::Sum, k, 4);
            let (before, last) = if layer.sequences.is_empty() {
                sums_of_chunks(b, added, initial)
            } else {
                sums_of_packed_chunks(b, layer, added, initial)
            };
            b.output(NORMALISER, last);
            b.stage(Stage::Output);
            let q = b.cast("Q_f32", inputs.query, Dtype::F32);
            let past = b.multiply("q z", q, before);
            let past = b.sum_minor("q z_sum", past);
            let p = b.cast("P_f32", p, Dtype::F32);
            let own = b.sum_minor("P_sum", p);
            let sum = b.add("q . z", past, own);
            let inverse = normaliser_inverse(b, sum);
            b.multiply("O / q . z", o, inverse)
        }
    }
}

/// `1 / (q . z + eps)`.
pub(super) fn normaliser_inverse(b: &mut Builder, sum: Value) -> Value {
    let sum = b.map("q . z + eps", Function::AddConstant(NORMALISER_EPSILON), sum);
    b.map("1 / q . z", Function::Reciprocal, sum)
}

/// `z` before every chunk and after the last one, from the sum of keys of each chunk.
fn sums_of_chunks(b: &mut Builder, added: Value, initial: Option<Value>) -> (Value, Value) {
    let mut through = b.cumulative_sum("z_through", added, 3);
    if let Some(initial) = initial {
        through = b.add("z", through, initial);
    }
    let before = b.subtract("z_before", through, added);
    let chunks = b.dims(through)[3];
    (before, b.slice("z_final", through, 3, chunks - 1, 1))
}

/// [`sums_of_chunks`] where every sequence starts with a sum of its own.
fn sums_of_packed_chunks(
    b: &mut Builder,
    layer: &Layer,
    added: Value,
    initial: Option<Value>,
) -> (Value, Value) {
    let dims = [layer.states(), layer.key_heads, 1, 1, layer.key_dim];
    let start = match initial {
        Some(initial) => b.reshape("z_0_rows", initial, dims),
        None => b.fill("z_0", dims, Dtype::F32, 0.0),
    };
    let (last, before) = b.segmented_scan(
        "z",
        3,
        &layer.first_chunks(),
        &[start],
        &[added],
        &[],
        |body, carry, slice, _| (vec![body.add("z'", carry[0], slice[0])], vec![carry[0]]),
    );
    let dims = [dims[0], dims[1], 1, 1, 1, dims[4]];
    (before[0], b.reshape("z_final", last[0], dims))
}
