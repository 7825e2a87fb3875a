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
//! `H` belongs to the key head, so value heads that share one share its solve; their values lie side by side.

use super::conjugate_gradient;
use super::layer::{convolution, core_layout, output, project, projections};
use super::{Core, Defaults, Granularity, Mechanism, MesaInputs, Recurrence, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Mask, Precision, Role, Stage, Value};
use crate::layer::{DecayGate, Forgetting, InverseVariant, Layer, OutputGate};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "mesanet",
    title: "MesaNet",
    source: "arXiv 2506.05233",
    packed: true,
    granularity: |_| Granularity::Scalar,
    fields: &[fields::MESA],
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
    let (c, dk, heads) = (layer.chunk, layer.key_dim, layer.key_heads);
    let precision = layer.state_precision;
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
    let cumulative = log_decay.map(|l| b.cumulative_sum("G", l, 4));

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
    let key = b.cast("K_f32", qkv.key, Dtype::F32);
    let value = b.cast("V_f32", qkv.value, Dtype::F32);
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
    let (h_final, h) = state_scan(b, layer, "H", write, key, chunk_decay);
    let (z_final, z) = state_scan(b, layer, "Z", write, value, chunk_decay);

    b.stage(Stage::Output);
    let query = b.cast("Q_f32", qkv.query, Dtype::F32);
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

    output(b, layer, o, projected.output_gate, Function::Sigmoid);
    Core {
        recurrence: Recurrence::Mesa(MesaInputs {
            query: qkv.query,
            key: qkv.key,
            value: qkv.value,
            step,
            log_decay,
            lambda,
        }),
        value: qkv.value,
        log_decay,
        initial_state: None,
        output: o,
        final_state: Some(state),
        gram_exponent: None,
    }
}

/// `S <- e^G_C S + write^T columns` over chunks, from zero. Returns the final state and the entry states of all chunks.
///
/// Keys and values have a scan each, so that the solves, which need `H` alone, do not count as work on value columns.
fn state_scan(
    b: &mut Builder,
    layer: &Layer,
    name: &str,
    write: Value,
    columns: Value,
    chunk_decay: Option<Value>,
) -> (Value, Value) {
    let width = b.shape(columns).from_end(0);
    let zero = b.fill(
        &format!("{name}_0"),
        [layer.batch, layer.key_heads, 1, layer.key_dim, width],
        Dtype::F32,
        0.0,
    );
    let mut scanned = vec![write, columns];
    scanned.extend(chunk_decay);
    let (carries, stacks) = b.scan(name, 3, &[zero], &scanned, &[], |b, carry, slice, _| {
        let update = b.matmul_at("X^T Y", slice[0], slice[1], layer.state_precision);
        let kept = match slice.get(2) {
            Some(&decay) => b.multiply("e^G_C S", carry[0], decay),
            None => carry[0],
        };
        (vec![b.add("S'", kept, update)], vec![carry[0]])
    });
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
