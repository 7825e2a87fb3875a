//! One token per sequence: the recurrence as it stands, with the state read from and written to HBM.
//!
//! ```text
//! S~ = D S;  u = y - r S~ (delta rule; undecayed reads predict from S) or u = y;  S' = D S + x^T u
//! o = q S' (readout after the update) = q S~ + (q . x) u (before it)
//! ```
//!
//! With several writes per token the state decays before the first and is read after the last. A diagonal plus low-rank transition adds `a^T (b S)` to
//! the update and `(q . a) (b S)` to the readout before it.
//!
//! Both readouts compute the same value. The second needs nothing of the update, so it shares one pass over the state with the prediction. The
//! output is read from the state as computed, before it is rounded to its storage format. Stages: state read, prediction and
//! update are op6, the readout after the update and the sum of the readout before it op7a.

use super::delta_log;
use super::gated_outer::normaliser_inverse;
use super::gram::expand;
use super::state::{decode_state, encode_state};
use super::{Core, Recurrence};
use crate::dtype::Dtype;
use crate::graph::{Builder, Init, Precision, ReduceFunction, Role, Stage, Value};
use crate::layer::{Layer, ReadConvention, Readout, StateFormat, StateProducts};

/// Names of the stored state, as inputs and as outputs: the state or its FP8 codes, then the scales of the codes.
pub(super) const STATE: [&str; 2] = ["state", "state_scale"];

/// One token in core layout, `N = 1` and `C = n` writes, of any family with a decayed state and outer-product updates.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenInputs {
    /// Queries `[B, Hk, 1, 1, 1, dk]`, scaled.
    pub(super) query: Value,
    /// Write keys `[B, Hk, 1, 1, n, dk]`.
    pub(super) write_key: Value,
    /// Read keys without the step size, where the write is corrected by a prediction (delta rule).
    pub(super) read_key: Option<Value>,
    /// Values without the step size `[B, Hk, R, 1, n, width]`.
    pub(super) value: Value,
    /// Step sizes `[B, Hk, R, 1, n, 1]`, f32; 1 where absent.
    pub(super) step: Option<Value>,
    /// Decay of the state before the first write.
    pub(super) decay: TokenDecay,
    /// The state a prediction is read from.
    pub(super) read: ReadConvention,
    /// Diagonal plus low rank: `a` and `b` `[B, Hk, 1, 1, 1, dk]` of the transition `D S + a^T (b S)`.
    pub(super) low_rank: Option<[Value; 2]>,
    /// What the output holds beside `q S'`.
    pub(super) beside: Beside,
}

/// Decay of the state in a decode step.
#[derive(Debug, Clone, Copy)]
pub(super) enum TokenDecay {
    /// None.
    None,
    /// Log decays `[B, Hk, R, 1, n, g]`, f32; those of later writes are zero and not read.
    Log(Value),
    /// Constant decays `[1, Hk, R, 1, 1, 1]`, f32, as factors of the state.
    Factor(Value),
}

impl TokenDecay {
    /// Log decays, where the decay is given by them.
    pub(super) fn log(self) -> Option<Value> {
        match self {
            TokenDecay::Log(decay) => Some(decay),
            TokenDecay::None | TokenDecay::Factor(_) => None,
        }
    }
}

/// What the output of a decode step holds beside the state readout.
#[derive(Debug, Clone, Copy)]
pub(super) enum Beside {
    /// Nothing: `o = q S'`.
    Nothing,
    /// `o = q S' + weight . input`; weight `[1, Hk, R, 1, 1, 1]`, input as the values.
    Skip(Value, Value),
    /// Linear attention: `o = q S' / (q . z + eps)`, `z [B, Hk, 1, 1, 1, dk]` with the key of the token in it, f32.
    Normaliser(Value),
    /// RWKV6: `o = q S + (q . u . x) v`, read before decay and update; `u [1, Hk, 1, 1, 1, dk]`.
    Bonus(Value),
}

/// Appends stages op3 (decay) to op7a of a decode step and declares the outputs `o`, `state` and `state_scale`.
pub(super) fn append(b: &mut Builder, layer: &Layer, inputs: TokenInputs, recurrence: Recurrence) -> Core {
    if let Some(log) = layer.log {
        return delta_log::append(b, layer, log, inputs, recurrence);
    }
    b.stage(Stage::Gates);
    let decay = match inputs.decay {
        TokenDecay::None => None,
        TokenDecay::Log(l) => {
            let first = b.slice("l_first", l, 4, 0, 1);
            let decay = b.exp("e^l", first);
            let decay = expand(b, "e^l", decay, layer.key_dim);
            Some(column(b, "e^l_rows", decay))
        }
        TokenDecay::Factor(factor) => Some(column(b, "e^l_rows", factor)),
    };

    b.stage(Stage::StateScan);
    let dims = state_dims(b, layer, &inputs);
    let stored = stored_state(b, layer, &dims);
    let given = decode_state(b, layer.state, &stored);
    let state = b.cast("S_f32", given, Dtype::F32);
    let decayed = match decay {
        Some(decay) => b.multiply("D S", state, decay),
        None => state,
    };
    let vectors = layer.state_products == StateProducts::Vector;
    let query = Key::new(b, "q", inputs.query, vectors);
    let bonus = match inputs.beside {
        Beside::Bonus(bonus) => Some(bonus),
        Beside::Nothing | Beside::Skip(..) | Beside::Normaliser(_) => None,
    };
    let early = layer.readout == Readout::BeforeUpdate || bonus.is_some();
    let (mut before, mut decayed) = (state, decayed);
    let writes = b.dims(inputs.write_key)[4];
    for i in 1..writes {
        let earlier = Write::new(b, inputs, i - 1, vectors);
        let written = earlier.append(b, layer, [before, decayed], None);
        (before, decayed) = (written.next, written.next);
    }
    let last = Write::new(b, inputs, writes.saturating_sub(1), vectors);
    // With a bonus the output is read before the decay too.
    let early_state = if bonus.is_some() { before } else { decayed };
    let early = early.then_some((query, early_state));
    let mut written = last.append(b, layer, [before, decayed], early);
    let low_rank = inputs.low_rank.map(|[a, r]| {
        let (a, r) = (Key::new(b, "a", a, true), Key::new(b, "b", r, vectors));
        let read = products(b, layer, "b S", &[r], before)[0];
        let update = b.multiply("a^T b S", a.column, read);
        written.next = b.add("S' + a^T b S", written.next, update);
        (a, read)
    });
    let encoded = encode_state(b, layer.state, written.next);
    for (name, &part) in STATE.iter().zip(&encoded) {
        b.output(name, part);
    }

    b.stage(Stage::Output);
    let o = match written.early_read {
        Some(early) => {
            let weighed = match bonus {
                Some(bonus) => {
                    let bonus = row(b, "bonus", bonus);
                    b.multiply("q . u", query.row, bonus)
                }
                None => query.row,
            };
            let product = b.multiply("q . x terms", weighed, last.key.row);
            let weight = b.sum_minor("q . x", product);
            let own = b.multiply("(q . x) u", written.u, weight);
            let o = b.add("O", early, own);
            match low_rank {
                Some((a, read)) => {
                    let product = b.multiply("q . a terms", query.row, a.row);
                    let weight = b.sum_minor("q . a", product);
                    let moved = b.multiply("(q . a) b S", read, weight);
                    b.add("O + (q . a) b S", o, moved)
                }
                None => o,
            }
        }
        None => products(b, layer, "q S'", &[query], written.next)[0],
    };
    let o = beside_state(b, layer, o, inputs.beside, query.row);

    Core {
        recurrence,
        value: inputs.value,
        log_decay: inputs.decay.log(),
        initial_state: Some(given),
        output: o,
        final_state: Some(encoded[0]),
        gram_exponent: None,
    }
}

/// The output of a token from its readout of the state and what stands beside that, in core layout and the format of the activations: output `o`.
pub(super) fn beside_state(b: &mut Builder, layer: &Layer, o: Value, beside: Beside, query: Value) -> Value {
    let o = match beside {
        Beside::Skip(weight, input) => {
            let (weight, input) = (row(b, "skip_weight", weight), row(b, "skip_input", input));
            let skipped = b.multiply("D x", input, weight);
            b.add("O + D x", o, skipped)
        }
        Beside::Normaliser(sum) => {
            let sum = row(b, "z", sum);
            let product = b.multiply("q . z terms", query, sum);
            let divisor = b.sum_minor("q . z", product);
            let inverse = normaliser_inverse(b, divisor);
            b.multiply("O / q . z", o, inverse)
        }
        Beside::Nothing | Beside::Bonus(_) => o,
    };
    let o = b.cast("O_rounded", o, layer.activations);
    let mut core_layout = b.dims(o);
    core_layout.insert(3, 1);
    let o = b.reshape("O_core", o, core_layout);
    b.output("o", o);
    o
}

/// One write of a token.
#[derive(Debug, Clone, Copy)]
struct Write {
    key: Key,
    /// Where the write is corrected by a prediction.
    read_key: Option<Key>,
    value: Value,
    step: Option<Value>,
    read: ReadConvention,
}

/// What a write leaves.
struct Written {
    /// The state after it.
    next: Value,
    /// What was written along the key `[B, Hk, R, 1, width]`.
    u: Value,
    /// The query times the state of before, where it was asked for.
    early_read: Option<Value>,
}

impl Write {
    /// Write `i` of the token; `vectors` where the vector unit contracts with the state.
    fn new(b: &mut Builder, inputs: TokenInputs, i: usize, vectors: bool) -> Self {
        let part =
            |b: &mut Builder, name: &str, value: Value| b.slice(&format!("{name}_write"), value, 4, i, 1);
        let key = part(b, "x", inputs.write_key);
        let key = Key::new(b, "x", key, true);
        let read_key = inputs.read_key.map(|read| {
            if read == inputs.write_key {
                return key;
            }
            let read = part(b, "r", read);
            Key::new(b, "r", read, vectors)
        });
        let value = part(b, "v", inputs.value);
        let step = inputs.step.map(|step| part(b, "beta", step));
        Write {
            key,
            read_key,
            value,
            step,
            read: inputs.read,
        }
    }

    /// Appends the write to the state `decayed`, `before` being the state before its decay; everything that reads the same one does so in one pass.
    fn append(
        self,
        b: &mut Builder,
        layer: &Layer,
        [before, decayed]: [Value; 2],
        early: Option<(Key, Value)>,
    ) -> Written {
        let predicted = match self.read {
            ReadConvention::Decayed => decayed,
            ReadConvention::Undecayed => before,
        };
        let (prediction, early_read) = match (self.read_key, early) {
            (Some(read), Some((query, state))) if predicted == state => {
                let both = products(b, layer, "r S, q S", &[read, query], state);
                (Some(both[0]), Some(both[1]))
            }
            (read, early) => (
                read.map(|read| products(b, layer, "r S", &[read], predicted)[0]),
                early.map(|(query, state)| products(b, layer, "q S", &[query], state)[0]),
            ),
        };
        let value = row(b, "v", self.value);
        let error = match prediction {
            Some(prediction) => b.subtract("v - r S", value, prediction),
            None => value,
        };
        let u = match self.step {
            Some(step) => {
                let step = row(b, "beta", step);
                b.multiply("u", error, step)
            }
            None => error,
        };
        let update = b.multiply("x^T u", self.key.column, u);
        Written {
            next: b.add("S'", decayed, update),
            u,
            early_read,
        }
    }
}

/// `[B, Hk, R, dk, width]`.
pub(super) fn state_dims(b: &Builder, layer: &Layer, inputs: &TokenInputs) -> Vec<usize> {
    let value = b.dims(inputs.value);
    let decay = match inputs.decay {
        TokenDecay::None => None,
        TokenDecay::Log(value) | TokenDecay::Factor(value) => Some(value),
    };
    let shared = [decay, inputs.step]
        .into_iter()
        .flatten()
        .map(|gate| b.dims(gate)[2]);
    let shared = shared.fold(value[2], usize::max);
    vec![value[0], value[1], shared, layer.key_dim, value[5]]
}

/// The state as it lies in HBM: one tensor, or FP8 codes and their scale per row.
pub(super) fn stored_state(b: &mut Builder, layer: &Layer, dims: &[usize]) -> Vec<Value> {
    let whole = |b: &mut Builder, dtype, init| b.input(STATE[0], dims, dtype, Role::State, init);
    match layer.state {
        StateFormat::F32 => vec![whole(b, Dtype::F32, Init::Normal { std: 1.0 })],
        StateFormat::Bf16 => vec![whole(b, Dtype::Bf16, Init::Normal { std: 1.0 })],
        StateFormat::RowFp8 => {
            // Codes over their whole range with scales that give elements around 1.
            let init = Init::Uniform {
                low: -448.0,
                high: 448.0,
            };
            let codes = whole(b, Dtype::Fp8E4m3, init);
            let mut rows = dims.to_vec();
            rows[4] = 1;
            let init = Init::Uniform {
                low: 2e-3,
                high: 6e-3,
            };
            vec![codes, b.input(STATE[1], rows, Dtype::F32, Role::State, init)]
        }
    }
}

/// Core layout without the chunk dimension, in f32: `[B, Hk, R, 1, channels]`.
pub(super) fn row(b: &mut Builder, name: &str, value: Value) -> Value {
    let mut dims = b.dims(value);
    dims.remove(3);
    let row = b.reshape(&format!("{name}_row"), value, dims);
    b.cast(&format!("{name}_f32"), row, Dtype::F32)
}

/// One number per row of the state, `[B, Hk, R, dk or 1, 1]`, from core layout.
fn column(b: &mut Builder, name: &str, value: Value) -> Value {
    let row = row(b, name, value);
    column_of_row(b, name, row)
}

fn column_of_row(b: &mut Builder, name: &str, row: Value) -> Value {
    if b.shape(row).from_end(0) == 1 {
        return row;
    }
    b.transpose_minor(name, row)
}

/// A query or key of a token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Key {
    /// `[B, Hk, 1, 1, dk]`, f32.
    pub(super) row: Value,
    /// `[B, Hk, 1, dk, 1]`, f32, where the vector unit needs it; the row elsewhere.
    pub(super) column: Value,
}

impl Key {
    /// From core layout `[B, Hk, 1, 1, 1, dk]`; `column` where it is needed as a column.
    pub(super) fn new(b: &mut Builder, name: &str, value: Value, column: bool) -> Self {
        let row = row(b, name, value);
        Key::of_row(b, name, row, column)
    }

    /// From a row in f32.
    pub(super) fn of_row(b: &mut Builder, name: &str, row: Value, column: bool) -> Self {
        Key {
            row,
            column: if column {
                column_of_row(b, &format!("{name}_rows"), row)
            } else {
                row
            },
        }
    }
}

/// Each of `keys` times `state [.., dk, width]` (f32), `[.., 1, width]`.
pub(super) fn products(b: &mut Builder, layer: &Layer, name: &str, keys: &[Key], state: Value) -> Vec<Value> {
    match layer.state_products {
        StateProducts::Vector => keys
            .iter()
            .map(|key| {
                let terms = b.multiply(&format!("{name} terms"), state, key.column);
                let axis = b.shape(terms).rank() - 2;
                b.reduce(name, ReduceFunction::Sum, terms, axis)
            })
            .collect(),
        StateProducts::Matrix => {
            let rows: Vec<Value> = keys.iter().map(|key| key.row).collect();
            let axis = b.shape(state).rank() - 2;
            let stacked = b.concatenate(&format!("{name} operand"), &rows, axis);
            let (stacked, state, precision) = match layer.state {
                StateFormat::F32 => (stacked, state, layer.state_precision),
                StateFormat::Bf16 | StateFormat::RowFp8 => {
                    let stacked = b.cast(&format!("{name} operand"), stacked, layer.activations);
                    let state = b.cast(&format!("{name} state"), state, layer.activations);
                    (stacked, state, Precision::Default)
                }
            };
            let product = b.matmul(name, stacked, state, precision);
            (0..rows.len())
                .map(|i| b.slice(&format!("{name} {i}"), product, axis, i, 1))
                .collect()
        }
    }
}
