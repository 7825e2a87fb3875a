//! Chunk form of the gated delta rule: stages op3 (cumulative decay) to op7a.
//!
//! Per token, with write key `x`, read key `r` (step size folded in), value `y` (likewise), query `q`, log decay `l`, `D = diag(e^l)`:
//!
//! ```text
//! S~ = D S (decayed reads) or S (undecayed);  u = y - r S~;  S <- D S + x^T u;  o = q S
//! ```
//!
//! Per chunk, with the Gram matrices `A`, `P` of `gram` and `T = (I + A)^-1`:
//!
//! ```text
//! U0 = T Y            W = T (R . e^Gr)        U = U0 - W S0        or, with `solve: remainder`, U = T (Y - (R . e^Gr) S0)
//! S' = diag(e^G_C) S0 + (X . e^(G_C - G))^T U         O = (Q . e^G) S0 + P U
//! ```

use super::decode::{self, Beside, TokenDecay, TokenInputs};
use super::gram::{self, Decays, GramOperands, Pivoted, expand};
use super::layer::Qkv;
use super::state::{decode_state, encode_state, initial_carry, state_operand};
use super::{Core, DeltaRuleInputs, GramExponent, Recurrence, append_inverse, tree};
use crate::dtype::Dtype;
use crate::graph::{Builder, Precision, Stage, Value};
use crate::layer::{DecayGate, Layer, Pass, ReadConvention, Solve};

impl DeltaRuleInputs {
    /// Write and read key are the key, the value is the value, the read convention is the layer's; neither step size nor decay. A mechanism changes
    /// what it does differently.
    #[must_use]
    pub fn plain(layer: &Layer, qkv: &Qkv) -> Self {
        DeltaRuleInputs {
            query: qkv.query,
            write_key: qkv.key,
            read_key: qkv.key,
            value: qkv.value,
            step: None,
            log_decay: None,
            read: layer.read,
        }
    }
}

/// Appends stages op3 (cumulative sum) to op7a and declares the outputs `o` and `state`.
///
/// `layer.chunk` is the number of keys of a chunk; the queries may be fewer ([`Layer::micro_steps`]).
pub fn append(b: &mut Builder, layer: &Layer, inputs: DeltaRuleInputs) -> Core {
    if layer.pass == Pass::Decode {
        let token = TokenInputs {
            query: inputs.query,
            write_key: inputs.write_key,
            read_key: Some(inputs.read_key),
            value: inputs.value,
            step: inputs.step,
            decay: inputs.log_decay.map_or(TokenDecay::None, TokenDecay::Log),
            read: inputs.read,
            low_rank: None,
            beside: Beside::Nothing,
        };
        return decode::append(b, layer, token, Recurrence::DeltaRule(inputs));
    }
    if let Some(tree) = &layer.tree {
        return tree::append(b, layer, tree, inputs);
    }
    let c = layer.chunk;
    let act = layer.activations;

    b.stage(Stage::Gates);
    let decays = inputs.log_decay.map(|log_decay| cumulate(b, inputs, log_decay));
    let cumulative = decays.map(|d| d.cumulative);

    b.stage(Stage::Gram);
    let operands = GramOperands {
        query: inputs.query,
        read: inputs.read_key,
        write: inputs.write_key,
        step: inputs.step,
        decays,
    };
    let (a, p, pivoted) = gram::append(b, layer.gram, layer.pivot, act, operands);
    let p = b.cast("P_operand", p, act);

    b.stage(Stage::Inverse);
    let t = append_inverse(b, layer.inverse, layer.inverse_precision, layer.neumann_steps, a);

    b.stage(Stage::WyFactors);
    let factors = Factors::append(b, layer, &inputs, (decays, pivoted), t);

    b.stage(Stage::StateScan);
    let last = cumulative.map(|g| b.slice("G_C", g, 4, c - 1, 1));
    let x = if let Some(pivoted) = pivoted {
        gram::beyond_pivot(b, "X . e^(G_C - G)", pivoted.write, pivoted.to_end)
    } else {
        let tail = cumulative
            .zip(last)
            .map(|(g, last)| b.subtract("G_C - G", last, g));
        decayed(b, "X", inputs.write_key, "e^(G_C - G)", tail)
    };
    let x = b.cast("X_operand", x, act);
    let mut slices = factors.values();
    slices.push(x);
    slices.extend(last.map(|last| {
        let decay = b.exp("e^G_C", last);
        let decay = expand(b, "e^G_C", decay, layer.key_dim);
        // One decay per key row of the state: a column vector.
        b.transpose_minor("e^G_C_rows", decay)
    }));
    let value = b.dims(inputs.value);
    let shared = inputs.log_decay.map_or(1, |decay| b.dims(decay)[2]);
    let state = [
        layer.states(),
        value[1],
        value[2].max(shared),
        layer.key_dim,
        value[5],
    ];
    let (initial, initial_state) = initial_carry(b, layer, state);
    let (carries, stacks) = b.segmented_scan(
        "S",
        3,
        &layer.first_chunks(),
        &initial,
        &slices,
        &[],
        |body, carry, slice, _| {
            let (factors, rest) = factors.sliced(slice);
            let s = decode_state(body, layer.state, carry);
            let operand = state_operand(body, layer, s, carry);
            let u = factors.update(body, layer, operand);
            let s = body.cast("S_f32", s, Dtype::F32);
            let s = match rest.get(1) {
                Some(&decay) => body.multiply("D S", s, decay),
                None => s,
            };
            let update = body.matmul_at("X^T U", rest[0], u, Precision::Default);
            let next = body.add("S'", s, update);
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
    let q = match pivoted {
        Some(pivoted) => gram::beyond_pivot(b, "Q . e^G", pivoted.query, pivoted.from_start),
        None => decayed(b, "Q", inputs.query, "e^G", decays.map(|d| d.query_cumulative)),
    };
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
        log_decay: inputs.log_decay,
        initial_state,
        output: o,
        final_state: Some(final_state),
        gram_exponent: decays.and_then(|_| gram_exponent(layer)),
    }
}

/// What the state is met with to give the update `U [B, Hk, R, N, C, width]`, operands rounded to the format of the activations.
#[derive(Debug, Clone, Copy)]
pub(super) enum Factors {
    /// `U = U0 - W S`.
    Wy {
        /// `U0 = T Y`.
        update: Value,
        /// `W = T (R . e^Gr)`.
        read: Value,
    },
    /// `U = T (Y - (R . e^Gr) S)`. The step size, which `Y` and `R` share, stands on the columns of `T`: `C x C` numbers instead of
    /// `C x dk` and `C x width`.
    Remainder {
        /// `T`, with the step size.
        inverse: Value,
        /// `Y` without the step size.
        value: Value,
        /// `R . e^Gr` without the step size.
        read: Value,
    },
}

impl Factors {
    /// Appends what does not depend on the state.
    pub(super) fn append(
        b: &mut Builder,
        layer: &Layer,
        inputs: &DeltaRuleInputs,
        (decays, pivoted): (Option<Decays>, Option<Pivoted>),
        t: Value,
    ) -> Self {
        let act = layer.activations;
        let read = |b: &mut Builder, step: Option<Value>| {
            let r = if let Some(pivoted) = pivoted {
                let r = gram::beyond_pivot(b, "R . e^Gr", pivoted.read, pivoted.from_start);
                stepped(b, "R", r, step)
            } else {
                let r = stepped(b, "R", inputs.read_key, step);
                decayed(b, "R", r, "e^Gr", decays.map(|d| d.read_cumulative))
            };
            b.cast("R_operand", r, act)
        };
        if layer.solve == Solve::Remainder {
            let t = match inputs.step {
                Some(step) => {
                    let columns = b.transpose_minor("beta_columns", step);
                    b.multiply("T beta", t, columns)
                }
                None => t,
            };
            let inverse = b.cast("T_operand", t, act);
            let read = read(b, None);
            return Factors::Remainder {
                inverse,
                value: inputs.value,
                read,
            };
        }
        let t = b.cast("T_operand", t, act);
        let y = stepped(b, "Y", inputs.value, inputs.step);
        let y = b.cast("Y_operand", y, act);
        let r = read(b, inputs.step);
        let u0 = b.matmul("U0", t, y, Precision::Default);
        let update = b.cast("U0_rounded", u0, act);
        let w = b.matmul("W", t, r, Precision::Default);
        let read = b.cast("W_rounded", w, act);
        Factors::Wy { update, read }
    }

    /// The values, for a loop over chunks.
    fn values(self) -> Vec<Value> {
        match self {
            Factors::Wy { update, read } => vec![update, read],
            Factors::Remainder { inverse, value, read } => vec![inverse, value, read],
        }
    }

    /// The factors of one chunk, from what such a loop hands to its body, and what follows them there.
    fn sliced(self, slice: &[Value]) -> (Self, &[Value]) {
        match self {
            Factors::Wy { .. } => {
                let [update, read] = [slice[0], slice[1]];
                (Factors::Wy { update, read }, &slice[2..])
            }
            Factors::Remainder { .. } => {
                let [inverse, value, read] = [slice[0], slice[1], slice[2]];
                let factors = Factors::Remainder { inverse, value, read };
                (factors, &slice[3..])
            }
        }
    }

    /// `U`, rounded, from the state as an operand.
    pub(super) fn update(self, b: &mut Builder, layer: &Layer, state: Value) -> Value {
        let u = match self {
            Factors::Wy { update, read } => {
                let ws = b.matmul("W S", read, state, layer.state_precision);
                let u0 = b.cast("U0_f32", update, Dtype::F32);
                b.subtract("U", u0, ws)
            }
            Factors::Remainder { inverse, value, read } => {
                let rs = b.matmul("R S", read, state, layer.state_precision);
                let y = b.cast("Y_f32", value, Dtype::F32);
                let rest = b.subtract("Y - R S", y, rs);
                let rest = b.cast("Y - R S_operand", rest, layer.activations);
                b.matmul("U", inverse, rest, Precision::Default)
            }
        };
        b.cast("U_rounded", u, layer.activations)
    }
}

/// `G`, `Gr` and `G` at the queries, which stand at the last of the keys they share a token with.
fn cumulate(b: &mut Builder, inputs: DeltaRuleInputs, log_decay: Value) -> Decays {
    let cumulative = b.cumulative_sum("G", log_decay, 4);
    let read_cumulative = match inputs.read {
        ReadConvention::Decayed => cumulative,
        ReadConvention::Undecayed => b.subtract("Gx", cumulative, log_decay),
    };
    let queries = b.dims(inputs.query)[4];
    let mut dims = b.dims(cumulative);
    let per_query = dims[4] / queries.max(1);
    let query_cumulative = if per_query == 1 {
        cumulative
    } else {
        dims.splice(4..5, [queries, per_query]);
        let by_query = b.reshape("G_by_query", cumulative, dims.clone());
        let last = b.slice("G_last", by_query, 5, per_query - 1, 1);
        dims.remove(5);
        b.reshape("G_query", last, dims)
    };
    Decays {
        cumulative,
        read_cumulative,
        query_cumulative,
    }
}

/// `value` times the step size, in f32; as it is where it has the step size in it.
fn stepped(b: &mut Builder, name: &str, value: Value, step: Option<Value>) -> Value {
    let Some(step) = step else { return value };
    let value = b.cast(&format!("{name}_f32"), value, Dtype::F32);
    b.multiply(name, value, step)
}

/// `value . e^exponent` in f32, `factor` being the name of the exponential; as it is where nothing decays.
pub(super) fn decayed(
    b: &mut Builder,
    name: &str,
    value: Value,
    factor: &str,
    exponent: Option<Value>,
) -> Value {
    let Some(exponent) = exponent else { return value };
    let channels = b.shape(value).from_end(0);
    let decay = b.exp(factor, exponent);
    let decay = expand(b, factor, decay, channels);
    let value = b.cast(&format!("{name}_f32"), value, Dtype::F32);
    b.multiply(&format!("{name} . {factor}"), value, decay)
}

/// Exponent of the Gram operands at the decay the gate allows.
fn gram_exponent(layer: &Layer) -> Option<GramExponent> {
    let largest_decay = match layer.decay_gate {
        DecayGate::Bounded => -layer.decay_bound,
        DecayGate::Softplus => f64::INFINITY,
    };
    gram::exponent(layer, largest_decay)
}
