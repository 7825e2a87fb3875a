//! `MesaNet` (arXiv 2506.05233): at every token the ridge regression of all values on all keys so far, read by the query.
//!
//! ```text
//! H_t = e^{g_t} H_{t-1} + beta_t k_t^T k_t      Z_t = e^{g_t} Z_{t-1} + beta_t k_t^T v_t      o_t = q_t (H_t + Lam)^-1 Z_t
//! ```
//!
//! Per chunk, all rows at once, with the entry states `H0`, `Z0`, the inclusive cumulative log decay `G` and `M_ij = e^(G_i - G_j) beta_j`
//! for `j <= i`, rows of `P H_t` are
//!
//! ```text
//! (P . e^G) H0 + ((P K^T) . M) K
//! ```
//!
//! so that the systems of a chunk are solved together by conjugate gradients, and `O` is the same expression of the solution with `Z0` and `V`.
//! The states need keys and values only, so the scan over chunks carries them alone and the solves of all chunks are independent (as in
//! flash-linear-attention). Everything from the gates on is f32: the iteration does not converge with operands rounded to bf16.
//!
//! A decode step updates both states and solves for one row with `H` itself as the operator, from zero. (Published kernels start from the query divided by
//! the diagonal.)
//!
//! `H` belongs to the key head, so value heads that share one share its solve; their values lie side by side.

use super::conjugate_gradient;
use super::decode::{self, Key};
use super::layer::{convolution, core_layout, output, project, projections};
use super::{Core, Defaults, Granularity, Mechanism, MesaInputs, Recurrence, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Mask, Precision, Role, Stage, Table, Value};
use crate::layer::{
    DecayGate, Forgetting, InitialState, InverseVariant, Layer, OutputGate, Pass, StateProducts,
};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "mesanet",
    title: "MesaNet",
    source: "arXiv 2506.05233",
    packed: true,
    granularity: |_| Granularity::Scalar,
    fields: &[fields::MESA, fields::PACKED, &["state_products"]],
    defaults: Defaults {
        inverse: InverseVariant::RowSubstitution,
        decay_gate: DecayGate::Softplus,
        decay_bound: f64::NEG_INFINITY,
        negative_eigenvalues: false,
        output_gate: OutputGate::None,
    },
    append,
};

/// Least regularisation of a channel (flash-linear-attention).
const LAMBDA_FLOOR: f64 = 0.25;

/// What the rows of a chunk are multiplied with: `P -> (P . head_decay) entry + ((P K^T) . mask) K + lambda . P`. Leading dimensions
/// are those of the core layout, or any that broadcast.
#[derive(Debug, Clone, Copy)]
pub struct MesaOperator {
    /// Keys of the chunk `[.., C, dk]`, f32.
    pub key: Value,
    /// `e^(G_i - G_j) beta_j` for `j <= i`, else 0, `[.., C, C]`, f32.
    pub mask: Value,
    /// `e^G` `[.., C, 1]`, f32; absent where nothing is forgotten.
    pub head_decay: Option<Value>,
    /// Entry state `H0` `[.., dk, dk]`, f32.
    pub entry: Value,
    /// Regularisation `[.., 1, dk]`, f32.
    pub lambda: Value,
    /// Decomposition of the products.
    pub precision: Precision,
}

/// `(P . e^G) entry + ((P K^T) . M) columns` for rows `P [.., C, dk]`.
fn masked_product(b: &mut Builder, rows: Value, op: &MesaOperator, entry: Value, columns: Value) -> Value {
    let decayed = match op.head_decay {
        Some(decay) => b.multiply("P . e^G", rows, decay),
        None => rows,
    };
    let past = b.matmul("(P . e^G) S0", decayed, entry, op.precision);
    let scores = b.matmul_bt("P K^T", rows, op.key, op.precision);
    let scores = b.multiply("(P K^T) . M", scores, op.mask);
    let present = b.matmul("((P K^T) . M) B", scores, columns, op.precision);
    b.add("P H", past, present)
}

/// Solutions `X [.., C, dk]` of `X A = query`, `A` the operator of each row, after `steps` steps of conjugate gradients.
pub fn append_mesa_solve(b: &mut Builder, query: Value, operator: MesaOperator, steps: usize) -> Value {
    let mut invariants = vec![operator.key, operator.mask, operator.entry, operator.lambda];
    invariants.extend(operator.head_decay);
    conjugate_gradient::append(b, query, steps, &invariants, |b, p, inner| {
        let operator = MesaOperator {
            key: inner[0],
            mask: inner[1],
            entry: inner[2],
            lambda: inner[3],
            head_decay: inner.get(4).copied(),
            precision: operator.precision,
        };
        let ph = masked_product(b, p, &operator, operator.entry, operator.key);
        let ridge = b.multiply("Lam . P", p, operator.lambda);
        b.add("W", ph, ridge)
    })
}

/// Log decays `[B, Hk, 1, N, C, 1]`: `ln sigmoid(x + b)`.
fn log_decay(b: &mut Builder, layer: &Layer, x: Value) -> Option<Value> {
    let bias = match layer.forgetting {
        Forgetting::None => return None,
        Forgetting::Gated => Init::Uniform { low: 2.0, high: 4.0 },
        Forgetting::Aggressive => Init::Uniform { low: -1.0, high: 1.0 },
    };
    b.stage(Stage::Projections);
    let raw = project(b, layer, x, "decay", layer.key_heads);
    b.stage(Stage::Gates);
    let bias = b.input("decay_bias", [layer.key_heads], Dtype::F32, Role::Weight, bias);
    let shifted = b.add("decay_shifted", raw, bias);
    // ln sigmoid(x) = -softplus(-x)
    let negated = b.scale("decay_negated", shifted, -1.0);
    let softplus = b.map("decay_softplus", Function::Softplus, negated);
    let decay = b.scale("l", softplus, -1.0);
    Some(core_layout(b, layer, "l_core", decay, layer.key_heads, 1, 1))
}

fn append(b: &mut Builder, layer: &Layer) -> Core {
    let (dk, heads) = (layer.key_dim, layer.key_heads);
    let projected = projections(b, layer);
    let step = project(b, layer, projected.x, "step", heads);
    let log_decay = log_decay(b, layer, projected.x);
    let qkv = convolution(b, layer, projected.qkv, true);

    b.stage(Stage::Gates);
    let step = b.map("beta", Function::Sigmoid, step);
    let step = core_layout(b, layer, "beta_core", step, heads, 1, 1);
    let lambda = b.input(
        "lambda",
        [1, heads, 1, 1, 1, dk],
        Dtype::F32,
        Role::Weight,
        Init::Normal { std: 1.0 },
    );
    let lambda = b.map("lambda_softplus", Function::Softplus, lambda);
    let lambda = b.map("Lam", Function::AddConstant(LAMBDA_FLOOR), lambda);
    let inputs = MesaInputs {
        query: qkv.query,
        key: qkv.key,
        value: qkv.value,
        step,
        log_decay,
        lambda,
    };
    let core = match layer.pass {
        Pass::Forward | Pass::Verify => append_chunks(b, layer, inputs),
        Pass::Decode => append_token(b, layer, inputs),
    };
    output(b, layer, core.output, projected.output_gate, Function::Sigmoid);
    core
}

/// Stages op3 (cumulative decay) to op7a of whole sequences.
fn append_chunks(b: &mut Builder, layer: &Layer, inputs: MesaInputs) -> Core {
    let (c, precision) = (layer.chunk, layer.state_precision);
    let MesaInputs { step, lambda, .. } = inputs;
    let cumulative = inputs.log_decay.map(|l| b.cumulative_sum("G", l, 4));

    b.stage(Stage::Gram);
    let step_columns = b.transpose_minor("beta_columns", step);
    let decays = if let Some(g) = cumulative {
        let columns = b.transpose_minor("G_columns", g);
        let difference = b.subtract("G_i - G_j", g, columns);
        let causal = b.select("G_causal", Mask::Lower, difference, f64::NEG_INFINITY);
        b.exp("e^(G_i - G_j)", causal)
    } else {
        let ones = b.fill("ones", [c, c], Dtype::F32, 1.0);
        b.select("causal", Mask::Lower, ones, 0.0)
    };
    let mask = b.multiply("M", decays, step_columns);

    b.stage(Stage::StateScan);
    let key = b.cast("K_f32", inputs.key, Dtype::F32);
    let value = b.cast("V_f32", inputs.value, Dtype::F32);
    let (weights, chunk_decay) = match cumulative {
        Some(g) => {
            let last = b.slice("G_C", g, 4, c - 1, 1);
            let tail = b.subtract("G_C - G", last, g);
            let tail = b.exp("e^(G_C - G)", tail);
            (
                b.multiply("beta e^(G_C - G)", step, tail),
                Some(b.exp("e^G_C", last)),
            )
        }
        None => (step, None),
    };
    let write = b.multiply("K . beta e^(G_C - G)", key, weights);
    let given = match layer.initial_state {
        InitialState::Zero => None,
        InitialState::Given => Some(states(b, layer, ["H_0", "Z_0"])),
    };
    let (h_final, h) = state_scan(b, layer, "H", write, key, chunk_decay, given.map(|[h, _]| h));
    let (z_final, z) = state_scan(b, layer, "Z", write, value, chunk_decay, given.map(|[_, z]| z));

    b.stage(Stage::Output);
    let query = b.cast("Q_f32", inputs.query, Dtype::F32);
    let operator = MesaOperator {
        key,
        mask,
        head_decay: cumulative.map(|g| b.exp("e^G", g)),
        entry: h,
        lambda,
        precision,
    };
    let solved = append_mesa_solve(b, query, operator, layer.cg_steps);
    let o = masked_product(b, solved, &operator, z, value);
    let o = b.cast("O_rounded", o, layer.activations);
    let state = b.concatenate("[H | Z]", &[h_final, z_final], 4);
    b.output("o", o);
    b.output("state", state);

    Core {
        recurrence: Recurrence::Mesa(inputs),
        value: inputs.value,
        log_decay: inputs.log_decay,
        initial_state: given.map(|both| b.concatenate("[H_0 | Z_0]", &both, 4)),
        output: o,
        final_state: Some(state),
        gram_exponent: None,
    }
}

/// Stages op3 to op7a of one token.
fn append_token(b: &mut Builder, layer: &Layer, inputs: MesaInputs) -> Core {
    let decay = inputs.log_decay.map(|l| {
        let decay = b.exp("e^g", l);
        decode::row(b, "e^g", decay)
    });

    b.stage(Stage::StateScan);
    let given = states(b, layer, STATES);
    let key = Key::new(b, "k", inputs.key, true);
    let step = decode::row(b, "beta", inputs.step);
    let write = b.multiply("beta k", key.column, step);
    let value = decode::row(b, "v", inputs.value);
    let mut update = |name: &str, state: Value, row: Value| {
        let kept = match decay {
            Some(decay) => b.multiply(&format!("e^g {name}"), state, decay),
            None => state,
        };
        let added = b.multiply(&format!("{name} update"), write, row);
        let next = b.add(&format!("{name}'"), kept, added);
        b.output(name, next);
        next
    };
    let [h, z] = [
        update(STATES[0], given[0], key.row),
        update(STATES[1], given[1], value),
    ];
    let initial = b.concatenate("[H | Z] given", &given, 4);
    let state = b.concatenate("[H | Z]", &[h, z], 4);
    b.output("state", state);

    b.stage(Stage::Output);
    let query = decode::row(b, "q", inputs.query);
    let lambda = decode::row(b, "Lam", inputs.lambda);
    let column = layer.state_products == StateProducts::Vector;
    let solved = conjugate_gradient::append(b, query, layer.cg_steps, &[h, lambda], |b, p, inner| {
        let p = Key::of_row(b, "P", p, column);
        let ph = decode::products(b, layer, "P H", &[p], inner[0])[0];
        let ridge = b.multiply("Lam . P", p.row, inner[1]);
        b.add("W", ph, ridge)
    });
    let solved = Key::of_row(b, "X", solved, column);
    let o = decode::products(b, layer, "X Z", &[solved], z)[0];
    let o = b.cast("O_rounded", o, layer.activations);
    let mut core_layout = b.dims(o);
    core_layout.insert(3, 1);
    let o = b.reshape("O_core", o, core_layout);
    b.output("o", o);
    Core {
        recurrence: Recurrence::Mesa(inputs),
        value: inputs.value,
        log_decay: inputs.log_decay,
        initial_state: Some(initial),
        output: o,
        final_state: Some(state),
        gram_exponent: None,
    }
}

/// Names of the states, as inputs and as outputs of a decode step.
const STATES: [&str; 2] = ["H", "Z"];

/// Given states `H [B, Hk, 1, dk, dk]` and `Z [B, Hk, 1, dk, P]`, f32, `B` counting packed sequences. Seeded ones are the covariance of correlated
/// channels, since `H` is never indefinite, and normal values.
fn states(b: &mut Builder, layer: &Layer, names: [&str; 2]) -> [Value; 2] {
    let covariance = Init::Table(Table::Autoregression { ratio: 0.5 });
    let mut state = |name: &str, width: usize, init: Init| {
        let dims = [layer.states(), layer.key_heads, 1, layer.key_dim, width];
        b.input(name, dims, Dtype::F32, Role::State, init)
    };
    [
        state(names[0], layer.key_dim, covariance),
        state(
            names[1],
            layer.sharing() * layer.value_dim,
            Init::Normal { std: 1.0 },
        ),
    ]
}

/// `S <- e^G_C S + write^T columns` over chunks, from the given state or zero. Returns the final state and the entry states of all chunks.
///
/// Keys and values have a scan each, so that the solves, which need `H` alone, do not count as work on value columns.
fn state_scan(
    b: &mut Builder,
    layer: &Layer,
    name: &str,
    write: Value,
    columns: Value,
    chunk_decay: Option<Value>,
    given: Option<Value>,
) -> (Value, Value) {
    let width = b.shape(columns).from_end(0);
    let dims = [layer.states(), layer.key_heads, 1, layer.key_dim, width];
    let initial = given.unwrap_or_else(|| b.fill(&format!("{name}_0"), dims, Dtype::F32, 0.0));
    let mut scanned = vec![write, columns];
    scanned.extend(chunk_decay);
    let step = |b: &mut Builder, carry: &[Value], slice: &[Value], _: &[Value]| {
        let update = b.matmul_at("X^T Y", slice[0], slice[1], layer.state_precision);
        let kept = match slice.get(2) {
            Some(&decay) => b.multiply("e^G_C S", carry[0], decay),
            None => carry[0],
        };
        (vec![b.add("S'", kept, update)], vec![carry[0]])
    };
    let (carries, stacks) = b.segmented_scan(name, 3, &layer.first_chunks(), &[initial], &scanned, &[], step);
    (carries[0], stacks[0])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ndarray::{Array2, ArrayD, IxDyn};

    use super::*;
    use crate::numerics::{Arithmetic, execute, seeded_inputs};

    /// Rows `P` times the matrix `H_t` of their token, against `H_t` built token by token.
    #[test]
    fn the_chunk_operator_is_the_matrix_of_each_token() -> Result<(), Box<dyn std::error::Error>> {
        let (c, dk) = (64, 32);
        for gated in [true, false] {
            let mut b = Builder::new(Stage::Output);
            let normal = Init::Normal { std: 0.3 };
            let input = |b: &mut Builder, name: &str, dims: [usize; 2], init: Init| {
                b.input(name, dims, Dtype::F64, Role::Activation, init)
            };
            let p = input(&mut b, "P", [c, dk], normal);
            let k = input(&mut b, "K", [c, dk], normal);
            let h0 = input(&mut b, "H0", [dk, dk], normal);
            let g = input(&mut b, "g", [c, 1], Init::Uniform { low: -0.3, high: 0.0 });
            let beta = input(&mut b, "beta", [c, 1], Init::Uniform { low: 0.0, high: 1.0 });
            let lambda = b.fill("Lam", [1, dk], Dtype::F64, 0.0);
            let cumulative = b.cumulative_sum("G", g, 0);
            let columns = b.transpose_minor("G_columns", cumulative);
            let difference = b.subtract("D", cumulative, columns);
            let causal = b.select("causal", Mask::Lower, difference, f64::NEG_INFINITY);
            let decays = if gated {
                b.exp("M", causal)
            } else {
                let ones = b.fill("ones", [c, c], Dtype::F64, 1.0);
                b.select("M", Mask::Lower, ones, 0.0)
            };
            let steps = b.transpose_minor("beta_columns", beta);
            let operator = MesaOperator {
                key: k,
                mask: b.multiply("M beta", decays, steps),
                head_decay: gated.then(|| b.exp("e^G", cumulative)),
                entry: h0,
                lambda,
                precision: Precision::Highest,
            };
            let ph = masked_product(&mut b, p, &operator, h0, k);
            b.output("PH", ph);
            let graph = b.finish()?;
            let inputs = seeded_inputs(&graph, 5);
            let run = execute(&graph, &inputs, &[ph], Arithmetic::Exact)?;
            let flat = |value: Value| -> Result<Array2<f64>, ndarray::ShapeError> {
                inputs[&value.node].to_owned().into_dimensionality()
            };
            let (p, k, mut h, g, beta) = (flat(p)?, flat(k)?, flat(h0)?, flat(g)?, flat(beta)?);
            let mut error = 0.0_f64;
            for t in 0..c {
                let key = k.row(t);
                let decay = if gated { g[[t, 0]].exp() } else { 1.0 };
                h = Array2::from_shape_fn((dk, dk), |(i, j)| {
                    decay * h[[i, j]] + beta[[t, 0]] * key[i] * key[j]
                });
                let exact = p.row(t).dot(&h);
                let got = run.values[&ph].view();
                for (i, x) in exact.iter().enumerate() {
                    error = error.max((got[[t, i]] - x).abs());
                }
            }
            assert!(error < 1e-12, "gated {gated}: {error:e}");
        }
        Ok(())
    }

    /// In exact arithmetic conjugate gradients end after as many steps as the matrix has distinct eigenvalues.
    #[test]
    fn three_eigenvalues_take_three_steps() -> Result<(), Box<dyn std::error::Error>> {
        let n = 6;
        let mut b = Builder::new(Stage::Output);
        let a = b.input("A", [n, n], Dtype::F64, Role::Activation, Init::Zeros);
        let rhs = b.input(
            "rhs",
            [2, n],
            Dtype::F64,
            Role::Activation,
            Init::Normal { std: 1.0 },
        );
        let x = conjugate_gradient::append(&mut b, rhs, 3, &[a], |b, p, inner| {
            b.matmul("P A", p, inner[0], Precision::Highest)
        });
        b.output("x", x);
        let graph = b.finish()?;
        let mut inputs: BTreeMap<_, _> = seeded_inputs(&graph, 1);
        let diagonal = [1.0, 2.0, 5.0, 1.0, 2.0, 5.0];
        let matrix = ArrayD::from_shape_fn(
            IxDyn(&[n, n]),
            |i| if i[0] == i[1] { diagonal[i[0]] } else { 0.0 },
        );
        inputs.insert(a.node, matrix.into_shared());
        let run = execute(&graph, &inputs, &[x], Arithmetic::Exact)?;
        for row in 0..2 {
            for (i, d) in diagonal.iter().enumerate() {
                let error = run.values[&x][[row, i]] * d - inputs[&rhs.node][[row, i]];
                assert!(error.abs() < 1e-13, "{error:e}");
            }
        }
        Ok(())
    }
}
