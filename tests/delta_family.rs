//! The delta-rule family: every mechanism against the recurrence of its paper, against its neighbours, and against its closed form of work.
//!
//! The recurrences are written here one token at a time from gates and keys of the graph, not from the inputs of the generic rule, so that a wrong
//! read or write key shows. 200 tokens leave a partial last chunk; the state starts from a given one.

use std::collections::BTreeMap;

use ndarray::{Array1, Array2, Axis, Slice};
use tpusim::graph::work::{graph_work, stage_work};
use tpusim::graph::{Graph, NodeId, Stage, Value};
use tpusim::layer::Layer;
use tpusim::mechanisms::{LayerGraph, build};
use tpusim::numerics::{Arithmetic, Tensor, execute, relative_error, seeded_inputs, to_f32};
use tpusim::study::{Extent, check};
use tpusim::workload::{self, Workload};

/// Far above f64 rounding of a few hundred tokens, far below any error of the formulas.
const EXACT: f64 = 1e-10;

const FAMILY: [&str; 7] = [
    "deltanet",
    "deltaproduct",
    "gdn2",
    "q_delta",
    "kaczmarz",
    "comba",
    "preconditioned_delta",
];

fn load(name: &str, overrides: &[&str]) -> Workload {
    let mut all = vec![
        "layer.model_width=96",
        "layer.initial_state=given",
        "numeric.tokens=200",
    ];
    all.extend(overrides);
    workload::load(name, &all)
        .unwrap_or_else(|e| panic!("{name} {overrides:?}: {}", e.render()))
        .0
}

fn assert_exact(name: &str, overrides: &[&str]) {
    let result = check(&load(name, overrides), Extent::Sample).expect("runs");
    let error = result.exact_rel_error;
    assert!(error <= EXACT, "{name} {overrides:?}: {error:e}");
}

/// A layer executed in f64.
struct Run {
    layer: Layer,
    built: LayerGraph,
    values: BTreeMap<Value, Tensor<f64>>,
}

/// The last node called `name`.
fn named(graph: &Graph, name: &str) -> Value {
    let (node, _) = graph
        .nodes()
        .filter(|(_, node)| node.name == name)
        .last()
        .unwrap_or_else(|| panic!("no node `{name}`"));
    Value { node, port: 0 }
}

impl Run {
    fn new(name: &str, overrides: &[&str], keep: &[&str]) -> Self {
        Self::with(load(name, overrides).numeric_layer(), keep, |_, inputs| inputs)
    }

    /// After `change` has had its way with the seeded inputs.
    fn with(
        layer: Layer,
        keep: &[&str],
        change: impl FnOnce(&Graph, BTreeMap<NodeId, Tensor<f64>>) -> BTreeMap<NodeId, Tensor<f64>>,
    ) -> Self {
        let built = build(&layer).expect("builds");
        let inputs = change(&built.graph, seeded_inputs(&built.graph, 7));
        let mut values: Vec<Value> = keep.iter().map(|name| named(&built.graph, name)).collect();
        values.extend([built.core.output, built.core.final_state.expect("a state")]);
        values.extend(built.core.initial_state);
        let run = execute(&built.graph, &inputs, &values, Arithmetic::Exact).expect("runs");
        Run {
            layer,
            built,
            values: run.values,
        }
    }

    /// Rows of a head, all chunks together; leading extents of 1 are shared.
    fn head(&self, value: Value, at: [usize; 2]) -> Array2<f64> {
        let mut part = self.values[&value].view();
        for index in [0, at[0], at[1]] {
            let index = if part.shape()[0] == 1 { 0 } else { index };
            part = part.index_axis_move(Axis(0), index);
        }
        let columns = part.shape()[part.ndim() - 1];
        let rows = part.len() / columns;
        let flat = part.to_owned().into_shape_with_order((rows, columns));
        flat.expect("a matrix")
    }

    fn rows(&self, name: &str, at: [usize; 2]) -> Array2<f64> {
        self.head(named(&self.built.graph, name), at)
    }

    /// Compares outputs and final state with `token(t, S)`, which updates the state and returns the output of token `t`, head by head.
    fn assert_recurrence<F>(&self, recurrence: impl Fn([usize; 2]) -> F)
    where
        F: FnMut(usize, &mut Array2<f64>) -> Array1<f64>,
    {
        for key_head in 0..self.layer.key_heads {
            for value_head in 0..self.layer.sharing() {
                let at = [key_head, value_head];
                let mut token = recurrence(at);
                let mut state = self.head(self.built.core.initial_state.expect("a given state"), at);
                let outputs = self.head(self.built.core.output, at);
                let mut expected = Array2::zeros((self.layer.tokens, outputs.ncols()));
                for t in 0..self.layer.tokens {
                    let output = token(t, &mut state);
                    expected.row_mut(t).assign(&output);
                }
                let outputs = outputs.slice_axis(Axis(0), Slice::from(0..self.layer.tokens));
                let error = relative_error(&outputs, &expected).expect("same shape");
                assert!(error.within(EXACT), "output of head {at:?}: {error:?}");
                let error = relative_error(
                    &self.head(self.built.core.final_state.expect("a state"), at),
                    &state,
                );
                let error = error.expect("same shape");
                assert!(error.within(EXACT), "state of head {at:?}: {error:?}");
            }
        }
    }
}

fn outer(a: &Array1<f64>, b: &Array1<f64>) -> Array2<f64> {
    let (a, b) = (a.view().insert_axis(Axis(1)), b.view().insert_axis(Axis(0)));
    a.dot(&b)
}

fn row(matrix: &Array2<f64>, t: usize) -> Array1<f64> {
    matrix.row(t).to_owned()
}

/// `diag(e^l)` with `l` one number or one per channel.
fn decay(l: &Array2<f64>, t: usize, dk: usize) -> Array2<f64> {
    Array2::from_diag(&Array1::from_shape_fn(dk, |c| l[[t, c.min(l.ncols() - 1)]].exp()))
}

#[test]
fn every_mechanism_agrees_in_both_read_conventions() {
    for name in [
        "deltaproduct",
        "gdn2",
        "q_delta",
        "kaczmarz",
        "preconditioned_delta",
    ] {
        for read in ["decayed", "undecayed"] {
            assert_exact(name, &[&format!("layer.read={read}")]);
        }
    }
    assert_exact("deltanet", &[]);
    assert_exact("comba", &[]);
    for name in ["deltanet", "comba"] {
        let error = workload::load(name, &["layer.read=decayed"]).expect_err("has one read convention");
        assert!(
            error.render().contains("does not read `read`"),
            "{}",
            error.render()
        );
    }
}

#[test]
fn every_gram_variant_agrees() {
    let bounded = ["layer.decay_gate=bounded", "layer.decay_bound=-1.3"];
    for gram in ["pivot", "pivot_causal", "folded", "broadcast", "halving"] {
        assert_exact("gdn2", &[bounded[0], bounded[1], &format!("layer.gram={gram}")]);
    }
    for name in [
        "deltaproduct",
        "q_delta",
        "kaczmarz",
        "comba",
        "preconditioned_delta",
    ] {
        assert_exact(name, &[bounded[0], bounded[1], "layer.gram=folded"]);
    }
    assert_exact(
        "deltaproduct",
        &[
            bounded[0],
            bounded[1],
            "layer.gram=folded",
            "layer.pivot=first",
            "layer.read=undecayed",
        ],
    );
}

#[test]
fn exact_inverses_and_sizes_agree() {
    for name in FAMILY {
        for inverse in ["row_substitution", "newton", "block_doubling"] {
            assert_exact(name, &[&format!("layer.inverse={inverse}"), "layer.chunk=16"]);
        }
        assert_exact(name, &["layer.inverse=packed_doubling", "layer.chunk=32"]);
        assert_exact(name, &["layer.solve=remainder"]);
        assert_exact(
            name,
            &[
                "layer.key_heads=16",
                "layer.key_dim=48",
                "layer.value_dim=40",
                "numeric.key_heads=2",
            ],
        );
    }
}

#[test]
fn shipped_layers_agree() {
    for name in ["sla_r1", "sla_r8", "kda_softplus", "gdn_grouped"] {
        assert_exact(name, &[]);
    }
    let sharing = |name: &str| load(name, &[]).layer.sharing();
    assert_eq!(["sla_r1", "sla_r8", "gdn_grouped"].map(sharing), [1, 8, 2]);
}

/// `S = S + beta k^T (v - k S)`.
#[test]
fn deltanet_is_its_recurrence() {
    let run = Run::new("deltanet", &[], &["Q", "K", "V", "beta_core"]);
    run.assert_recurrence(|at| {
        let [q, k, v, beta] = ["Q", "K", "V", "beta_core"].map(|name| run.rows(name, at));
        move |t, s| {
            let (k, beta) = (row(&k, t), beta[[t, 0]]);
            let error = row(&v, t) - k.dot(s);
            *s += &(beta * outer(&k, &error));
            row(&q, t).dot(s)
        }
    });
}

/// Per token: decay once, then `n` writes with key, value and step size of their own, then the read.
#[test]
fn deltaproduct_is_its_recurrence() {
    for (steps, chunk) in [(1, 64), (2, 32), (3, 32)] {
        let steps_field = format!("layer.householder_steps={steps}");
        let chunk_field = format!("layer.chunk={chunk}");
        let names = ["Q", "K", "V", "l_core", "beta_core"];
        let run = Run::new(
            "deltaproduct",
            &[&steps_field, &chunk_field, "numeric.key_heads=2"],
            &names,
        );
        run.assert_recurrence(|at| {
            let [q, k, v, l, beta] = names.map(|name| run.rows(name, at));
            move |t, s| {
                *s *= l[[t, 0]].exp();
                for j in steps * t..steps * (t + 1) {
                    let k = row(&k, j);
                    let householder = Array2::eye(k.len()) - beta[[j, 0]] * outer(&k, &k);
                    *s = householder.dot(s) + beta[[j, 0]] * outer(&k, &row(&v, j));
                }
                row(&q, t).dot(s)
            }
        });
    }
}

/// `S = (I - k^T (b . k)) D S + k^T (w . v)`.
#[test]
fn gdn2_is_its_recurrence() {
    let names = ["Q", "K", "V", "l_core", "b_core", "w_core"];
    for eigenvalues in ["false", "true"] {
        let field = format!("layer.negative_eigenvalues={eigenvalues}");
        let run = Run::new("gdn2", &[&field], &names);
        run.assert_recurrence(|at| {
            let [q, k, v, l, b, w] = names.map(|name| run.rows(name, at));
            move |t, s| {
                let (k, b) = (row(&k, t), row(&b, t));
                let erase = Array2::eye(k.len()) - outer(&k, &(b * &k));
                let written = outer(&k, &(row(&w, t) * row(&v, t)));
                *s = erase.dot(&decay(&l, t, k.len())).dot(s) + written;
                row(&q, t).dot(s)
            }
        });
    }
}

/// The same inputs by name; what only one of the graphs has keeps its seeded values.
fn transplant(
    from: &Graph,
    to: &Graph,
    mut inputs: BTreeMap<NodeId, Tensor<f64>>,
) -> BTreeMap<NodeId, Tensor<f64>> {
    let seeded = seeded_inputs(from, 7);
    for (id, node) in from.inputs() {
        if let Some((target, _)) = to.inputs().find(|(_, other)| other.name == node.name) {
            inputs.insert(target, seeded[&id].clone());
        }
    }
    inputs
}

#[test]
fn gdn2_with_equal_gates_is_kda() {
    let kda = Run::new("kda_softplus", &["layer.gram=pivot_causal"], &[]);
    let layer = load("gdn2", &[]).numeric_layer();
    let gdn2 = Run::with(layer, &[], |graph, inputs| {
        let mut inputs = transplant(&kda.built.graph, graph, inputs);
        // One key head: every channel of both gates takes the projection of the step size.
        let step = seeded_inputs(&kda.built.graph, 7)[&named(&kda.built.graph, "W_step").node].clone();
        for gate in ["W_erase", "W_write"] {
            let node = named(graph, gate).node;
            let wide = step
                .broadcast(inputs[&node].shape())
                .expect("one column")
                .to_owned();
            inputs.insert(node, wide.into_shared());
        }
        inputs
    });
    assert_same(&gdn2, &kda);
}

#[test]
fn deltaproduct_with_one_write_is_gdn() {
    let gdn = Run::new("gdn", &[], &[]);
    let fields = [
        "layer.householder_steps=1",
        "layer.chunk=64",
        "layer.negative_eigenvalues=false",
    ];
    let product = Run::with(
        load("deltaproduct", &fields).numeric_layer(),
        &[],
        |graph, inputs| transplant(&gdn.built.graph, graph, inputs),
    );
    assert_same(&product, &gdn);
}

fn assert_same(a: &Run, b: &Run) {
    for (a_value, b_value) in [
        (a.built.core.output, b.built.core.output),
        (
            a.built.core.final_state.expect("a state"),
            b.built.core.final_state.expect("a state"),
        ),
    ] {
        let error = relative_error(&a.values[&a_value], &b.values[&b_value]).expect("same shape");
        assert!(error.within(EXACT), "{error:?}");
    }
}

/// `r = beta (k + lambda q^)` with the query at unit length, written along `k`.
#[test]
fn q_delta_is_its_recurrence_and_not_with_the_gram_the_other_way_round() {
    let names = ["Q", "K", "V", "l_core", "beta_core", "lambda_core"];
    let run = Run::new("q_delta", &[], &names);
    let at = [0, 0];
    let [q, k, v, l, beta, lambda] = names.map(|name| run.rows(name, at));
    let unit = (k.ncols() as f64).sqrt() * &q;
    run.assert_recurrence(|_| {
        let (q, k, v, l, beta, lambda, unit) = (&q, &k, &v, &l, &beta, &lambda, &unit);
        move |t, s| {
            *s *= l[[t, 0]].exp();
            let key = row(k, t);
            let read = &key + &(lambda[[t, 0]] * row(unit, t));
            let error = beta[[t, 0]] * (row(v, t) - read.dot(s));
            *s += &outer(&key, &error);
            row(q, t).dot(s)
        }
    });

    // First chunk from the given state, A_ij = step_i read_i . write_j e^(G_i - G_j), with the gated query on either side.
    let c = run.layer.chunk;
    let first = |m: &Array2<f64>| m.slice_axis(Axis(0), Slice::from(0..c)).to_owned();
    let [q, k, v, l, beta, lambda, unit] = [&q, &k, &v, &l, &beta, &lambda, &unit].map(first);
    let mixed = &k + &(&lambda * &unit);
    let mut g = l.clone();
    g.accumulate_axis_inplace(Axis(0), |&before, now| *now += before);
    let s0 = run.head(run.built.core.initial_state.expect("a given state"), at);
    let outputs = |read: &Array2<f64>, write: &Array2<f64>| {
        let mask = |i: usize, j: usize| (g[[i, 0]] - g[[j, 0]]).exp();
        let a = read.dot(&write.t());
        let p = q.dot(&k.t());
        let carried = (&mixed * &g.mapv(f64::exp)).dot(&s0);
        let mut u = Array2::<f64>::zeros(v.dim());
        let mut o = (&q * &g.mapv(f64::exp)).dot(&s0);
        for i in 0..c {
            let mut error = row(&v, i) - row(&carried, i);
            for j in 0..i {
                error.scaled_add(-a[[i, j]] * mask(i, j), &u.row(j));
            }
            u.row_mut(i).assign(&(beta[[i, 0]] * error));
            for j in 0..=i {
                let weight = p[[i, j]] * mask(i, j);
                let written = u.row(j).to_owned();
                o.row_mut(i).scaled_add(weight, &written);
            }
        }
        o
    };
    let graph = first(&run.head(run.built.core.output, at));
    let right = relative_error(&outputs(&mixed, &k), &graph).expect("same shape");
    assert!(right.within(EXACT), "{right:?}");
    let wrong = relative_error(&outputs(&k, &mixed), &graph).expect("same shape");
    // 4e-2 on random keys and values of another size (NumPy); the order is what counts.
    assert!((1e-2..2e-1).contains(&wrong.max), "{wrong:?}");
}

/// `beta = eta / (|k|^2 + 1e-6)` on keys of any length.
#[test]
fn kaczmarz_is_its_recurrence_in_both_read_conventions() {
    let names = ["Q", "K", "V", "l_core", "eta_core"];
    for decayed in [true, false] {
        let field = format!("layer.read={}", if decayed { "decayed" } else { "undecayed" });
        let run = Run::new("kaczmarz", &[&field], &names);
        let lengths: Vec<f64> = run
            .rows("K", [0, 0])
            .rows()
            .into_iter()
            .map(|k| k.dot(&k))
            .collect();
        assert!(
            lengths[..200].iter().any(|x| (x - 1.0).abs() > 0.1),
            "keys are free"
        );
        run.assert_recurrence(|at| {
            let [q, k, v, l, eta] = names.map(|name| run.rows(name, at));
            move |t, s| {
                let k = row(&k, t);
                let beta = eta[[t, 0]] / (k.dot(&k) + 1e-6);
                let decayed_state = &*s * l[[t, 0]].exp();
                let prediction = k.dot(if decayed { &decayed_state } else { &*s });
                *s = decayed_state + beta * outer(&k, &(row(&v, t) - prediction));
                row(&q, t).dot(s)
            }
        });
    }
}

/// With unit keys Kaczmarz is Gated `DeltaNet` with `beta = eta / (1 + eps)`. Tokens are unit vectors that the key projection passes on, so that keys are
/// unit vectors too.
#[test]
fn kaczmarz_with_unit_keys_is_gdn() {
    let layer = Layer {
        key_dim: 16,
        ..load("kaczmarz", &[]).numeric_layer()
    };
    let (tokens, d, dk) = (layer.tokens, layer.model_width, layer.key_dim);
    // silu(z) = 1.
    let z = (0..60).fold(1.0_f64, |z, _| 1.0 + (-z).exp());
    let names = ["Q", "K", "V", "l_core", "eta_core"];
    let run = Run::with(layer, &names, |graph, mut inputs| {
        let mut x = inputs[&named(graph, "x").node].to_owned();
        for t in 0..tokens {
            for c in 0..dk {
                x[[0, t, c]] = if c == (5 * t + t / 7) % dk { 1.0 } else { 0.0 };
            }
        }
        let mut weight = inputs[&named(graph, "W_qkv").node].to_owned();
        for i in 0..d {
            for c in 0..dk {
                weight[[i, dk + c]] = if i == c { z } else { 0.0 };
            }
        }
        let mut taps = inputs[&named(graph, "conv_taps").node].to_owned();
        for c in dk..2 * dk {
            for tap in 0..4 {
                taps[[tap, c]] = if tap == 3 { 1.0 } else { 0.0 };
            }
        }
        for (name, tensor) in [("x", x), ("W_qkv", weight), ("conv_taps", taps)] {
            inputs.insert(named(graph, name).node, tensor.into_shared());
        }
        inputs
    });
    run.assert_recurrence(|at| {
        let [q, k, v, l, eta] = names.map(|name| run.rows(name, at));
        move |t, s| {
            let (k, beta) = (row(&k, t), eta[[t, 0]] / (1.0 + 1e-6));
            assert!((k.dot(&k) - 1.0).abs() < 1e-12, "a unit key");
            *s *= l[[t, 0]].exp();
            let error = row(&v, t) - k.dot(s);
            *s += &(beta * outer(&k, &error));
            row(&q, t).dot(s)
        }
    });
}

/// `S = D S + beta k^T (v - p S)`, `o = (q - d p) S` with `p = sigmoid(c) k` and `c = d = 1`.
#[test]
fn comba_is_its_recurrence() {
    let names = ["Q", "K", "V", "l_core", "beta_core"];
    let run = Run::new("comba", &["layer.key_heads=16"], &names);
    run.assert_recurrence(|at| {
        let [q, k, v, l, beta] = names.map(|name| run.rows(name, at));
        let gate = 1.0 / (1.0 + (-1.0_f64).exp());
        move |t, s| {
            let k = row(&k, t);
            let p = gate * &k;
            let error = beta[[t, 0]] * (row(&v, t) - p.dot(s));
            *s = l[[t, 0]].exp() * &*s + outer(&k, &error);
            (row(&q, t) - p).dot(s)
        }
    });
}

/// `a = e^g a + b k^2`, `m = 1.5^(-z / (1 + |z|))` with `z = ln(a + 1e-6) + 0.2`, written along `m . k`.
#[test]
fn preconditioned_delta_is_its_recurrence() {
    let names = ["Q", "K", "V", "l_core", "beta_core", "g_core", "b_core", "a_0"];
    for fields in [
        &["layer.chunk=64", "numeric.key_heads=2"],
        &["layer.chunk=16", "layer.key_heads=16"],
    ] {
        let run = Run::new("preconditioned_delta", fields, &names);
        run.assert_recurrence(|at| {
            let [q, k, v, l, beta, g, b, a_0] = names.map(|name| run.rows(name, at));
            let mut a = row(&a_0, 0);
            move |t, s| {
                let k = row(&k, t);
                a = g[[t, 0]].exp() * &a + b[[t, 0]] * &k * &k;
                let m = a.mapv(|a| {
                    // The learned centre is stored in f32.
                    let z = (a + 1e-6).ln() - f64::from(-0.2_f32);
                    1.5_f64.powf(-z / (1.0 + z.abs()))
                });
                *s *= l[[t, 0]].exp();
                let error = beta[[t, 0]] * (row(&v, t) - k.dot(s));
                *s += &outer(&(m * k), &error);
                row(&q, t).dot(s)
            }
        });
    }
}

#[test]
fn the_accumulator_of_the_last_token_leaves_the_layer() {
    let layer = load("preconditioned_delta", &[]).numeric_layer();
    let built = build(&layer).expect("builds");
    let names = ["K", "g_core", "b_core", "a_0"];
    let end = built.graph.output("accumulator").expect("an output");
    let mut keep: Vec<Value> = names.map(|name| named(&built.graph, name)).to_vec();
    keep.push(end);
    let values = execute(
        &built.graph,
        &seeded_inputs(&built.graph, 7),
        &keep,
        Arithmetic::Exact,
    )
    .expect("runs")
    .values;
    let run = Run { layer, built, values };
    let [k, g, b, a_0] = names.map(|name| run.rows(name, [0, 0]));
    let mut a = row(&a_0, 0);
    for t in 0..run.layer.tokens {
        a = g[[t, 0]].exp() * &a + b[[t, 0]] * &row(&k, t) * &row(&k, t);
    }
    let got = row(&run.head(end, [0, 0]), 0);
    assert!(relative_error(&got, &a).expect("same shape").within(EXACT));
}

/// Matrix FLOPs of the core per token and value head, with as many key heads.
fn closed_form(layer: &Layer) -> u64 {
    let (n, dk, dv) = (layer.householder_steps, layer.key_dim, layer.value_dim);
    let c = n * layer.chunk;
    let inverse = 4 * n * (c.ilog2() as usize - 1) * c * c;
    let gram = 2 * (n + 1) * c * dk;
    let factors = 2 * n * c * (dk + dv);
    let output = 2 * c * dv;
    let state = (4 * n + 2) * dk * dv;
    let accumulator = if layer.mechanism.name == "preconditioned_delta" {
        2 * c * dk
    } else {
        0
    };
    (inverse + gram + factors + output + state + accumulator) as u64
}

fn core_flops(graph: &Graph) -> u64 {
    let core = Stage::Gates..=Stage::Output;
    stage_work(graph)
        .iter()
        .filter(|(stage, _)| core.contains(stage))
        .map(|(_, work)| work.matrix_flops.total())
        .sum()
}

#[test]
fn matrix_flops_follow_the_closed_form_and_are_linear_in_tokens() {
    for name in FAMILY {
        for inverse in ["block_doubling", "product", "two_level"] {
            let at = |tokens: usize| {
                let mut fields = vec![
                    format!("layer.inverse={inverse}"),
                    format!("layer.tokens={tokens}"),
                ];
                if name == "gdn2" {
                    // Gram matrices of whole chunks, which the shipped workload does not take.
                    fields.push("layer.gram=pivot".to_owned());
                }
                workload::load(name, &fields).expect("loads").0.layer
            };
            let layer = at(8192);
            let graph = build(&layer).expect("builds").graph;
            let heads = (layer.value_heads * layer.tokens) as u64;
            assert_eq!(
                core_flops(&graph),
                closed_form(&layer) * heads,
                "{name} {inverse}"
            );
            let long = build(&at(16 * 8192)).expect("builds").graph;
            assert_eq!(
                graph_work(&long).matrix_flops.total(),
                16 * graph_work(&graph).matrix_flops.total()
            );
            assert_eq!(long.len(), graph.len());
        }
    }
    // One write per token costs what `DeltaNet` costs.
    let (c, dk, dv) = (64, 128, 128);
    let layer = workload::load("deltanet", &["layer.inverse=product"])
        .expect("loads")
        .0
        .layer;
    let expected = 6 * c * dk + 4 * c * dv + 6 * dk * dv + 4 * (6 - 1) * c * c;
    assert_eq!(closed_form(&layer), expected);
    assert_eq!(expected, 262_144);
}

#[test]
fn projections_of_the_gates_have_their_widths() {
    // Channels beside queries, keys and values, which go through one full projection each, at d = 1024, 32 heads of 128, gate rank 128.
    let (d, hidden, heads, channels) = (1024_u64, 128_u64, 32_u64, 4096_u64);
    let low_rank = hidden * (d + channels);
    let table = [
        ("deltanet", 3 * channels * d + heads * d),
        ("deltaproduct", (5 * channels + channels + 3 * heads) * d),
        ("gdn2", (3 + 2) * channels * d + 2 * low_rank),
        ("q_delta", (3 * channels + channels + 3 * heads) * d),
        ("kaczmarz", (3 * channels + channels + 2 * heads) * d),
        ("comba", (3 * channels + channels + 2 * heads) * d),
        ("preconditioned_delta", (3 * channels + channels + 4 * heads) * d),
    ];
    for (name, multiply_adds) in table {
        let layer = workload::load::<&str>(name, &[]).expect("loads").0.layer;
        let graph = build(&layer).expect("builds").graph;
        let flops = stage_work(&graph)[Stage::Projections as usize]
            .1
            .matrix_flops
            .total();
        assert_eq!(flops, 2 * multiply_adds * layer.tokens as u64, "{name}");
    }
}

#[test]
fn transcendentals_of_the_core_follow_their_formulas() {
    // Per token and head, gates and step sizes included: step size 2; scalar decay 2 and a rate per head, mask C, three tails of one, e^G_C per chunk.
    let count = |name: &str, gram: &str| {
        let fields = [format!("layer.gram={gram}")];
        let fields = if gram.is_empty() {
            &fields[..0]
        } else {
            &fields[..]
        };
        let layer = workload::load(name, fields).expect("loads").0.layer;
        let graph = build(&layer).expect("builds").graph;
        let core = Stage::Gates..=Stage::Output;
        let counted: u64 = stage_work(&graph)
            .iter()
            .filter(|(stage, _)| core.contains(stage))
            .map(|(_, work)| work.transcendentals)
            .sum();
        (counted, layer.tokens as u64, layer.value_heads as u64)
    };
    let (c, dk, dv) = (64_u64, 128_u64, 128_u64);
    let (counted, tokens, heads) = count("deltanet", "");
    assert_eq!(counted, 2 * tokens * heads);
    let scalar = |tokens: u64, heads: u64| ((c + 3 + 2 + 2) * tokens + tokens / c + 1) * heads;
    let (counted, tokens, heads) = count("q_delta", "scalar_mask");
    assert_eq!(counted, scalar(tokens, heads) + 2 * tokens * heads);
    let (counted, tokens, heads) = count("kaczmarz", "scalar_mask");
    assert_eq!(counted, scalar(tokens, heads) + tokens * heads);
    // The read mask of undecayed reads is a second one; the sigmoid of the feedback is two per head.
    let (counted, tokens, heads) = count("comba", "scalar_mask");
    assert_eq!(counted, scalar(tokens, heads) + c * tokens * heads + 2 * heads);
    // Accumulator: its own decay and weight, a mask, one tail; three per channel for the preconditioner.
    let (counted, tokens, heads) = count("preconditioned_delta", "scalar_mask");
    let own = ((c + 1 + 2 + 2 + 3 * dk) * tokens + 1) * heads;
    assert_eq!(counted, scalar(tokens, heads) + own);
    // As KDA with middle pivots, dk (1 + 4) + 3 dk + 2 dk, and two per channel of both gates.
    let (counted, tokens, heads) = count("gdn2", "pivot");
    let per_token = dk * (1 + 4) + 3 * dk + 2 * dk + 2 * (dk + dv);
    assert_eq!(counted, (per_token * tokens + dk * (tokens / c) + 1) * heads);
}

#[test]
fn executed_work_is_the_accounted_work_of_every_stage() {
    let shipped = ["sla_r1", "sla_r8", "kda_softplus", "gdn_grouped"];
    for name in FAMILY.iter().chain(&shipped) {
        let layer = load(name, &["numeric.tokens=100"]).numeric_layer();
        let graph = build(&layer).expect("builds").graph;
        let inputs = seeded_inputs(&graph, 7);
        let exact = execute(&graph, &inputs, &[], Arithmetic::Exact).expect("runs");
        assert_eq!(exact.work, stage_work(&graph), "{name}");
        let declared = execute(&graph, &to_f32(&inputs), &[], Arithmetic::Declared).expect("runs");
        assert_eq!(declared.work, stage_work(&graph), "{name}");
        assert_eq!(declared.non_finite.map(|n| n.to_string()), None, "{name}");
    }
}

#[test]
fn declared_formats_err_as_their_mantissas_say() {
    for name in FAMILY {
        let rms = |fields: &[&str]| {
            let result = check(&load(name, fields), Extent::Sample).expect("runs");
            assert_eq!(result.non_finite, None, "{name}");
            (result.output_rms_error, result.state_rms_error)
        };
        // bf16 keeps 8 bits, half an ulp is 2^-9 = 2e-3; a few roundings lie between projection and output. Measured 3e-3 to 5e-3.
        let (output, state) = rms(&["layer.activations=bf16"]);
        let state = state.expect("a state");
        assert!((2e-3..1e-2).contains(&output), "{name} {output:e}");
        assert!((2e-3..1e-2).contains(&state), "{name} {state:e}");
        // f32 operands at one bf16 pass are rounded to bf16 inside the product: hardly better, 3e-3 to 5e-3.
        let (f32_output, _) = rms(&["layer.activations=f32", "layer.state_precision=highest"]);
        assert!((2e-3..1e-2).contains(&f32_output), "{name} {f32_output:e}");
    }
}

#[test]
fn deltaproduct_refuses_chunks_that_do_not_double() {
    let fields = ["layer.householder_steps=3", "layer.inverse=newton"];
    let error = workload::load("deltaproduct", &fields).expect_err("96 rows");
    assert!(
        error.render().contains("`32` times 3 writes per token"),
        "{}",
        error.render()
    );
    let error = workload::load("gdn", &["layer.householder_steps=2"]).expect_err("one write");
    assert!(
        error.render().contains("does not read `householder_steps`"),
        "{}",
        error.render()
    );
    let error = workload::load("deltaproduct", &["layer.householder_steps=1000"]).expect_err("too many");
    assert!(error.render().contains("at most 64"), "{}", error.render());
}
