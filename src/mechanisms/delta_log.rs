//! One token per sequence with a log of updates beside the state (`DeltaLog`, 2026), so that most steps do not write the state.
//!
//! The state is a base `B` and entries `(x_j, u_j, Lam_j)`, `Lam_j` the log decay from the last merge through entry `j`:
//!
//! ```text
//! S = e^Lam_L B + sum_j (e^(Lam_L - Lam_j) x_j)^T u_j
//! ```
//!
//! A row `r` reads the state at a log decay `c` without forming it; exponents are differences of cumulative decays and never positive:
//!
//! ```text
//! replay(r, c) = (r . e^c) B + sum_j ((r . e^(c - Lam_j)) x_j) u_j
//! u = beta (y - replay(r, Lam_L + l))       delta rule; undecayed reads at Lam_L
//! o = replay(q, Lam_L + l) + (q . x) u      with a bonus: replay(q, Lam_L) + (q . bonus . x) u
//! ```
//!
//! Read key and query share one pass over the base. A step appends `(x, u, Lam_L + l)`, or, the last of an interval, writes `S` with its own update in
//! it as the next base. Coefficients of the log are stage op4 (they are a row of the chunk Gram matrix), base and updates op6, the output op7a.

use super::decode::{
    Beside, Key, STATE, TokenDecay, TokenInputs, beside_state, products, row, state_dims, stored_state,
};
use super::gram::expand;
use super::state::{decode_state, encode_state};
use super::{Core, Recurrence};
use crate::dtype::Dtype;
use crate::graph::{
    BuildError, Builder, Graph, Init, Op, Precision, ReduceFunction, Role, Stage, Table, Value,
};
use crate::layer::{DeltaLog, Layer, ReadConvention, StateFormat, StateProducts};

/// Names of the log as inputs, and of an entry as outputs: keys `[B, Hk, 1, slots, dk]`, updates `[B, Hk, R, slots, width]` and cumulative log decays
/// `[B, Hk, R or 1, slots, g]`, these where the decay is not constant.
pub const LOG: [&str; 3] = ["log_keys", "log_updates", "log_decays"];

/// Dimension of the slots.
const SLOT: usize = 3;

/// Appends stages op4 to op7a of the step that `log` says and declares the outputs `o` and those of the entry or of the state.
pub(super) fn append(
    b: &mut Builder,
    layer: &Layer,
    log: DeltaLog,
    inputs: TokenInputs,
    recurrence: Recurrence,
) -> Core {
    b.stage(Stage::StateScan);
    let dims = state_dims(b, layer, &inputs);
    let stored = stored_state(b, layer, &dims);
    let vectors = layer.state_products == StateProducts::Vector;
    let bonus = match inputs.beside {
        Beside::Bonus(bonus) => Some(bonus),
        Beside::Nothing | Beside::Skip(..) | Beside::Normaliser(_) => None,
    };

    // Rows of the token are made where they are used: coefficients and replay may be different launches.
    b.stage(Stage::Gram);
    let of_token = inputs.decay.log().map(|decay| log_decay_row(b, decay));
    let mut key = b.dims(inputs.write_key);
    key.remove(3);
    let extents = Extents {
        key,
        state: dims,
        decay: of_token.map(|l| b.dims(l)),
    };
    let slots = declare(b, &extents, log);
    let entries = Entries::first(b, slots, log.position);
    let decays = match (inputs.decay, of_token) {
        (TokenDecay::Log(_), Some(l)) => {
            let before = entries.last_decay(b);
            Decays::Given {
                entries: entries.decays,
                before,
                now: match before {
                    Some(before) => b.add("Lam", before, l),
                    None => l,
                },
            }
        }
        (TokenDecay::Factor(factor), _) => {
            let base = row(b, "gamma^L", factor);
            Decays::constant(b, layer, base, log.position, log.position + 1)
        }
        (TokenDecay::Log(_) | TokenDecay::None, _) => Decays::None,
    };
    let read_at = match inputs.read {
        ReadConvention::Decayed => At::Now,
        ReadConvention::Undecayed => At::Before,
    };
    // With a bonus the output is read before decay and update.
    let query_at = if bonus.is_some() { At::Before } else { At::Now };
    let read_weights = inputs
        .read_key
        .and_then(|read| entries.coefficients(b, layer, "r", read, &decays, read_at));
    let query_weights = entries.coefficients(b, layer, "q", inputs.query, &decays, query_at);
    if !log.merges() {
        let entry = row(b, "x", inputs.write_key);
        let entry = b.cast("x_entry", entry, log.keys);
        b.output(LOG[0], entry);
        if let Decays::Given { now, .. } = decays {
            b.output(LOG[2], now);
        }
    }

    b.stage(Stage::StateScan);
    let given = decode_state(b, layer.state, &stored);
    let base = b.cast("B_f32", given, Dtype::F32);
    let key = row(b, "x", inputs.write_key);
    let query = row(b, "q", inputs.query);
    let read = inputs.read_key.map(|read| {
        if read == inputs.write_key {
            key
        } else {
            row(b, "r", read)
        }
    });
    let mut rows = Vec::new();
    for (name, row, at) in read
        .map(|read| ("r", read, read_at))
        .into_iter()
        .chain([("q", query, query_at)])
    {
        let decayed = match decays.of_base(b, layer, at) {
            Some(factor) => b.multiply(&format!("{name} . e^Lam"), row, factor),
            None => row,
        };
        rows.push(Key::of_row(b, name, decayed, vectors));
    }
    // Rows of different extents (some shared by value heads, some not) do not stack.
    let alike = rows.iter().all(|key| b.dims(key.row) == b.dims(rows[0].row));
    let from_base: Vec<Value> = if alike {
        products(b, layer, "r B, q B", &rows, base)
    } else {
        rows.iter()
            .flat_map(|&key| products(b, layer, "r B", &[key], base))
            .collect()
    };
    let mut from_base = from_base.into_iter();
    let mut replayed = |b: &mut Builder, name: &str, weights: Option<Value>| {
        let from_base = from_base.next()?;
        Some(match entries.updates_times(b, name, weights) {
            Some(logged) => b.add(&format!("{name} S"), from_base, logged),
            None => from_base,
        })
    };
    let prediction = match read {
        Some(_) => replayed(b, "r", read_weights),
        None => None,
    };
    let output_read = replayed(b, "q", query_weights);
    let value = row(b, "v", inputs.value);
    let error = match prediction {
        Some(prediction) => b.subtract("v - r S", value, prediction),
        None => value,
    };
    let u = match inputs.step {
        Some(step) => {
            let step = row(b, "beta", step);
            b.multiply("u", error, step)
        }
        None => error,
    };
    let final_state = if log.merges() {
        let merged = entries.merged_into(b, layer, base, &decays);
        let column = Key::of_row(b, "x", key, true).column;
        let update = b.multiply("x^T u", column, u);
        let next = b.add("S'", merged, update);
        let encoded = encode_state(b, layer.state, next);
        for (name, &part) in STATE.iter().zip(&encoded) {
            b.output(name, part);
        }
        encoded[0]
    } else {
        let entry = b.cast("u_entry", u, log.updates);
        b.output(LOG[1], entry);
        // A view that stands for the state of base and log, which no step forms.
        let rows = dims_of_rows(b, stored[0]);
        b.reshape("S_logical", stored[0], rows)
    };

    b.stage(Stage::Output);
    let weighed = match bonus {
        Some(bonus) => {
            let bonus = row(b, "bonus", bonus);
            b.multiply("q . u", query, bonus)
        }
        None => query,
    };
    let product = b.multiply("q . x terms", weighed, key);
    let weight = b.sum_minor("q . x", product);
    let own = b.multiply("(q . x) u", u, weight);
    let o = match output_read {
        Some(read) => b.add("O", read, own),
        None => own,
    };
    let o = beside_state(b, layer, o, inputs.beside, query);

    Core {
        recurrence,
        value: inputs.value,
        log_decay: inputs.decay.log(),
        initial_state: Some(given),
        output: o,
        final_state: Some(final_state),
        gram_exponent: None,
    }
}

/// The graph of a launch that writes base and log as the next base.
#[derive(Debug, Clone)]
pub struct MergeGraph {
    /// Inputs are those of the state and of the log, outputs those of the state.
    pub graph: Graph,
    /// Logged updates: what is computed from them has value columns.
    pub value: Value,
    /// The base: likewise.
    pub base: Value,
}

/// A merge of the first `entries` entries of the log of a layer; none where the layer has no log or the log no such entries.
///
/// # Errors
/// A [`BuildError`] where the sizes of the layer do not fit each other.
pub fn build_merge(layer: &Layer, entries: usize) -> Result<Option<MergeGraph>, BuildError> {
    let Some(log) = layer.log.filter(|log| (1..=log.slots()).contains(&entries)) else {
        return Ok(None);
    };
    let step = super::build(&Layer {
        log: Some(log.at(0)),
        ..layer.clone()
    })?;
    let mut b = Builder::new(Stage::StateScan);
    let mut named = |name: &str| {
        let (_, node) = step.graph.inputs().find(|(_, node)| node.name == name)?;
        let Op::Input { role, init } = node.op else {
            return None;
        };
        let ty = &node.results[0];
        Some(b.input(name, ty.shape.dims(), ty.dtype, role, init))
    };
    let stored: Vec<Value> = STATE.iter().filter_map(|name| named(name)).collect();
    let [keys, updates, decays] = LOG.map(&mut named);
    let (Some(keys), Some(updates), false) = (keys, updates, stored.is_empty()) else {
        return Ok(None);
    };
    let entries_of_log = Entries::first(
        &mut b,
        Slots {
            keys: Some(keys),
            updates: Some(updates),
            decays,
        },
        entries,
    );
    let constant = step.graph.inputs().any(|(_, node)| {
        matches!(
            node.op,
            Op::Input {
                init: Init::Table(Table::RetentionTail { .. }),
                ..
            }
        )
    });
    let decays = match entries_of_log.last_decay(&mut b) {
        Some(now) => Decays::Given {
            entries: entries_of_log.decays,
            before: None,
            now,
        },
        None if constant => {
            let table = Table::RetentionChunk {
                tokens: entries,
                chunk: entries,
            };
            let base = constant_table(&mut b, layer, "gamma^L", 1, table);
            Decays::constant(&mut b, layer, base, entries, entries)
        }
        None => Decays::None,
    };
    let given = decode_state(&mut b, layer.state, &stored);
    let base = b.cast("B_f32", given, Dtype::F32);
    let merged = entries_of_log.merged_into(&mut b, layer, base, &decays);
    let encoded = encode_state(&mut b, layer.state, merged);
    for (name, &part) in STATE.iter().zip(&encoded) {
        b.output(name, part);
    }
    Ok(Some(MergeGraph {
        graph: b.finish()?,
        value: updates,
        base: given,
    }))
}

/// Extents of rows of a token and of the state, without slots.
struct Extents {
    /// `[B, Hk, 1, 1, dk]`.
    key: Vec<usize>,
    /// `[B, Hk, R, dk, width]`.
    state: Vec<usize>,
    /// `[B, Hk, R or 1, 1, g]`.
    decay: Option<Vec<usize>>,
}

/// The log as it lies in HBM; nothing where it has no slots.
#[derive(Debug, Clone, Copy)]
struct Slots {
    keys: Option<Value>,
    updates: Option<Value>,
    decays: Option<Value>,
}

/// Declares the inputs of the log, the same for every step of an interval.
fn declare(b: &mut Builder, extents: &Extents, log: DeltaLog) -> Slots {
    let slots = log.slots();
    if slots == 0 {
        return Slots {
            keys: None,
            updates: None,
            decays: None,
        };
    }
    let mut input = |name: &str, dims: &[usize], dtype: Dtype, init: Init| {
        let mut dims = dims.to_vec();
        dims[SLOT] = slots;
        b.input(name, dims, dtype, Role::Log, init)
    };
    let normal = Init::Normal { std: 1.0 };
    let mut updates = extents.state.clone();
    updates[SLOT] = 1;
    Slots {
        keys: Some(input(LOG[0], &extents.key, log.keys, normal)),
        updates: Some(input(LOG[1], &updates, log.updates, normal)),
        // Slots are written before they are read.
        decays: extents
            .decay
            .as_ref()
            .map(|dims| input(LOG[2], dims, Dtype::F32, Init::Zeros)),
    }
}

/// When the state is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// After the decay of the token.
    Now,
    /// Before it.
    Before,
}

/// A table of constant decays `[1, Hk, R, rows, 1]`.
fn constant_table(b: &mut Builder, layer: &Layer, name: &str, rows: usize, table: Table) -> Value {
    let (heads, shared) = (layer.key_heads, layer.sharing());
    let dims = [1, heads, shared, 1, rows, 1];
    let value = b.input(name, dims, Dtype::F32, Role::Weight, Init::Table(table));
    b.reshape(&format!("{name}_rows"), value, [1, heads, shared, rows, 1])
}

/// Decays from the entries of the log, and from the base, to the token.
enum Decays {
    /// Nothing decays.
    None,
    /// Log decays since the last merge, `[B, Hk, R or 1, .., g]`.
    Given {
        /// Through every entry.
        entries: Option<Value>,
        /// Through the last entry; none where there is no entry.
        before: Option<Value>,
        /// Through the token.
        now: Value,
    },
    /// Constant decays as factors, tables; read after the decay of the token (`RetNet`).
    Constant {
        /// `gamma^(L - j)`, `[1, Hk, R, L, 1]`; none where there is no entry.
        entries: Option<Value>,
        /// `gamma` to the tokens since the last merge, `[1, Hk, R, 1, 1]`.
        base: Value,
    },
}

impl Decays {
    /// Powers of constant decays from each of `entries` entries to the last of `tokens` tokens; `base [1, Hk, R, 1, 1]` is the power of all of them.
    fn constant(b: &mut Builder, layer: &Layer, base: Value, entries: usize, tokens: usize) -> Self {
        let table = Table::RetentionTail { tokens };
        let powers = constant_table(b, layer, "gamma^(L-j)", tokens, table);
        Decays::Constant {
            entries: (entries > 0).then(|| b.slice("gamma^(L-j)_logged", powers, SLOT, 0, entries)),
            base,
        }
    }

    /// Log decay since the last merge.
    fn through(&self, at: At) -> Option<Value> {
        match (self, at) {
            (Decays::Given { now, .. }, At::Now) => Some(*now),
            (Decays::Given { before, .. }, At::Before) => *before,
            (Decays::None | Decays::Constant { .. }, _) => None,
        }
    }

    /// Factors of the base's key channels `[B, Hk, R or 1, 1, 1 or dk]`; none where they are 1.
    fn of_base(&self, b: &mut Builder, layer: &Layer, at: At) -> Option<Value> {
        if let Decays::Constant { base, .. } = self {
            return Some(*base);
        }
        let through = self.through(at)?;
        let factor = b.exp("e^Lam", through);
        Some(expand(b, "e^Lam", factor, layer.key_dim))
    }

    /// Factors of the entries' key channels `[B, Hk, R or 1, L, 1 or dk]`; none where they are 1 or there is no entry.
    fn of_entries(&self, b: &mut Builder, layer: &Layer, at: At) -> Option<Value> {
        match self {
            Decays::None => None,
            Decays::Constant { entries, .. } => *entries,
            Decays::Given { entries, .. } => {
                let difference = b.subtract("Lam - Lam_j", self.through(at)?, (*entries)?);
                let factor = b.exp("e^(Lam - Lam_j)", difference);
                Some(expand(b, "e^(Lam - Lam_j)", factor, layer.key_dim))
            }
        }
    }
}

/// The filled slots of a log.
#[derive(Debug, Clone, Copy)]
struct Entries {
    /// `[B, Hk, 1, L, dk]`.
    keys: Option<Value>,
    /// `[B, Hk, R, L, width]`.
    updates: Option<Value>,
    /// `[B, Hk, R or 1, L, g]`.
    decays: Option<Value>,
    count: usize,
}

impl Entries {
    /// The first `count` entries.
    fn first(b: &mut Builder, slots: Slots, count: usize) -> Self {
        let mut filled = |name: &str, slots: Option<Value>| {
            slots
                .filter(|_| count > 0)
                .map(|slots| b.slice(&format!("{name}_filled"), slots, SLOT, 0, count))
        };
        Entries {
            keys: filled(LOG[0], slots.keys),
            updates: filled(LOG[1], slots.updates),
            decays: filled(LOG[2], slots.decays),
            count,
        }
    }

    /// Cumulative log decay through the last entry.
    fn last_decay(&self, b: &mut Builder) -> Option<Value> {
        self.decays
            .map(|decays| b.slice("Lam_L", decays, SLOT, self.count.saturating_sub(1), 1))
    }

    /// `(row . e^(c - Lam_j)) x_j` for every entry, `[B, Hk, R, L, 1]`, `row` in core layout; none without entries.
    fn coefficients(
        &self,
        b: &mut Builder,
        layer: &Layer,
        name: &str,
        of_token: Value,
        decays: &Decays,
        at: At,
    ) -> Option<Value> {
        let keys = b.cast("x_j", self.keys?, Dtype::F32);
        let row = row(b, name, of_token);
        let factors = decays.of_entries(b, layer, at);
        let by_channel = factors.filter(|&factors| b.shape(factors).from_end(0) > 1);
        let keys = match by_channel {
            Some(factors) => b.multiply("x_j . e^(Lam - Lam_j)", keys, factors),
            None => keys,
        };
        let terms = b.multiply(&format!("{name} . x_j terms"), keys, row);
        let sums = b.sum_minor(&format!("{name} . x_j"), terms);
        Some(match factors {
            Some(factors) if by_channel.is_none() => {
                b.multiply(&format!("{name} . x_j e^(Lam - Lam_j)"), sums, factors)
            }
            _ => sums,
        })
    }

    /// `sum_j weight_j u_j`, `[B, Hk, R, 1, width]`; none without entries.
    fn updates_times(&self, b: &mut Builder, name: &str, weights: Option<Value>) -> Option<Value> {
        let updates = b.cast("u_j", self.updates?, Dtype::F32);
        let terms = b.multiply(&format!("{name} u_j terms"), updates, weights?);
        Some(b.reduce(&format!("{name} u_j"), ReduceFunction::Sum, terms, SLOT))
    }

    /// `e^Lam B + sum_j (e^(Lam - Lam_j) x_j)^T u_j`, decays through the token where there is one.
    fn merged_into(&self, b: &mut Builder, layer: &Layer, base: Value, decays: &Decays) -> Value {
        let mut merged = match decays.of_base(b, layer, At::Now) {
            Some(factor) => {
                let column = Key::of_row(b, "e^Lam", factor, true).column;
                b.multiply("e^Lam B", base, column)
            }
            None => base,
        };
        let (Some(keys), Some(updates)) = (self.keys, self.updates) else {
            return merged;
        };
        let mut keys = b.cast("x_j", keys, Dtype::F32);
        if let Some(factors) = decays.of_entries(b, layer, At::Now) {
            keys = b.multiply("x_j . e^(Lam - Lam_j)", keys, factors);
        }
        let updates = b.cast("u_j", updates, Dtype::F32);
        match layer.state_products {
            StateProducts::Matrix => {
                let (keys, updates, precision) = match layer.state {
                    StateFormat::F32 => (keys, updates, layer.state_precision),
                    StateFormat::Bf16 | StateFormat::RowFp8 => (
                        b.cast("x_j_operand", keys, layer.activations),
                        b.cast("u_j_operand", updates, layer.activations),
                        Precision::Default,
                    ),
                };
                let added = b.matmul_at("x_j^T u_j", keys, updates, precision);
                b.add("B'", merged, added)
            }
            StateProducts::Vector => {
                let columns = b.transpose_minor("x_j_columns", keys);
                let minor = b.shape(columns).rank() - 1;
                for j in 0..self.count {
                    let key = b.slice("x_j_column", columns, minor, j, 1);
                    let update = b.slice("u_j_row", updates, SLOT, j, 1);
                    let added = b.multiply("x_j^T u_j", key, update);
                    merged = b.add("B + x_j^T u_j", merged, added);
                }
                merged
            }
        }
    }
}

/// Log decays of the token's only write, `[B, Hk, R or 1, 1, g]`.
fn log_decay_row(b: &mut Builder, l: Value) -> Value {
    let first = b.slice("l_first", l, 4, 0, 1);
    row(b, "l", first)
}

/// The stored state with its rows side by side.
fn dims_of_rows(b: &Builder, state: Value) -> Vec<usize> {
    let dims = b.dims(state);
    let (leading, inner) = dims.split_at(3.min(dims.len()));
    let mut rows = leading.to_vec();
    rows.push(inner.iter().product());
    rows
}
