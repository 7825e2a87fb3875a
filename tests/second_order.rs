//! `MesaNet` and SPD-SLA-W: against their recurrences, against the closed forms of their work, and the facts about their solvers.

use std::collections::BTreeMap;

use ndarray::{Array2, ArrayD, Axis, Ix2, IxDyn};
use tpusim::dtype::Dtype;
use tpusim::graph::work::{graph_work, stage_work};
use tpusim::graph::{Builder, Graph, Init, Op, Precision, Role, Stage, Value};
use tpusim::hardware;
use tpusim::kernels::{Plan, Program, lower};
use tpusim::layer::{Layer, WhiteningSolver};
use tpusim::mechanisms::{
    LayerGraph, Recurrence, append_newton_schulz, append_polar, append_whitened, build,
};
use tpusim::numerics::reference::{Read, delta_rule, mesa};
use tpusim::numerics::spectrum::{extreme_eigenvalues, geometric, with_eigenvalues};
use tpusim::numerics::{Arithmetic, Execution, Tensor, execute, seeded_inputs, to_f32};
use tpusim::study::whitening::whitening;
use tpusim::study::{Extent, WhiteningRequest, check};
use tpusim::workload;

const STAGES_OF_THE_CORE: [Stage; 7] = [
    Stage::Whitening,
    Stage::Gates,
    Stage::Gram,
    Stage::Inverse,
    Stage::WyFactors,
    Stage::StateScan,
    Stage::Output,
];

fn exact_error(name: &str, fields: &[&str]) -> f64 {
    let mut all = vec!["layer.model_width=96".to_owned()];
    all.extend(fields.iter().map(|&f| f.to_owned()));
    let (workload, _) =
        workload::load(name, &all).unwrap_or_else(|e| panic!("{name} {fields:?}: {}", e.render()));
    check(&workload, Extent::Sample)
        .unwrap_or_else(|e| panic!("{name} {fields:?}: {e}"))
        .exact_rel_error
}

fn layer(name: &str, fields: &[&str]) -> Layer {
    workload::load(name, fields).expect("shipped workload").0.layer
}

fn built(name: &str, fields: &[&str]) -> LayerGraph {
    build(&layer(name, fields)).expect("builds")
}

#[test]
fn thirty_steps_solve_well_conditioned_systems() {
    // A memory of a few tokens, or few tokens, keeps the largest eigenvalue within a few times the regularisation.
    for (forgetting, tokens) in [("aggressive", 200), ("gated", 72), ("none", 24)] {
        for (key_heads, value_heads) in [(2, 2), (2, 4)] {
            let error = exact_error(
                "mesanet",
                &[
                    "layer.key_dim=32",
                    "layer.value_dim=40",
                    &format!("layer.key_heads={key_heads}"),
                    &format!("layer.value_heads={value_heads}"),
                    &format!("layer.forgetting={forgetting}"),
                    &format!("numeric.tokens={tokens}"),
                    "numeric.key_heads=2",
                ],
            );
            assert!(error <= 1e-8, "{forgetting} {key_heads} {value_heads}: {error:e}");
        }
    }
}

#[test]
fn as_many_steps_as_channels_solve_any_system() {
    for forgetting in ["none", "gated", "aggressive"] {
        let error = exact_error(
            "mesanet",
            &[
                "layer.key_dim=32",
                "layer.cg_steps=64",
                &format!("layer.forgetting={forgetting}"),
                "numeric.tokens=200",
            ],
        );
        assert!(error <= 1e-10, "{forgetting}: {error:e}");
    }
}

/// Per token and key head: `30 (2 dk^2 + 4 C dk)` for the solve, `2 dk^2 + 2 dk P` for the states, `2 dk P + 2 C (dk + P)` for the output.
#[test]
fn matrix_flops_of_mesanet_follow_the_closed_form() {
    for (name, fields, steps) in [
        ("mesanet", vec![], 30),
        ("mesanet_ungated", vec!["program.tokens=32", "layer.chunk=32"], 30),
        (
            "mesanet",
            vec!["layer.value_heads=64", "layer.cg_steps=7", "layer.key_dim=256"],
            7,
        ),
    ] {
        let layer = layer(name, &fields);
        let (c, dk, p) = (layer.chunk, layer.key_dim, layer.sharing() * layer.value_dim);
        let per_token = steps * (2 * dk * dk + 4 * c * dk) + 2 * dk * dk + 4 * dk * p + 2 * c * (dk + p);
        let graph = build(&layer).expect("builds").graph;
        let work = stage_work(&graph);
        let core: u64 = work
            .iter()
            .filter(|(s, _)| STAGES_OF_THE_CORE.contains(s))
            .map(|(_, w)| w.matrix_flops.total())
            .sum();
        assert_eq!(
            core,
            (per_token * layer.key_heads * layer.tokens) as u64,
            "{name}"
        );
    }
    // The size published: 16 heads of 128 at chunk 64.
    let per_head = 30 * (2 * 128 * 128 + 4 * 64 * 128) + 2 * 128 * 128 + 4 * 128 * 128 + 2 * 64 * 256;
    assert_eq!(per_head, 2_097_152);
}

/// Per step, head and chunk: 14 `C dk` and a `C^2` of vector operations, four per row beside them, two reciprocals per row.
#[test]
fn a_step_of_conjugate_gradients_has_its_vector_work() {
    let work = |steps: u64| {
        let layer = layer("mesanet", &[&format!("layer.cg_steps={steps}")]);
        let heads = (layer.key_heads * layer.chunks()) as u64;
        let (_, output) = stage_work(&build(&layer).expect("builds").graph)[Stage::Output as usize];
        (output.vector_ops.total() / heads, output.transcendentals / heads)
    };
    let (two, three) = (work(2), work(3));
    let (c, dk) = (64, 128);
    assert_eq!(three.0 - two.0, 14 * c * dk + c * c + 4 * c);
    assert_eq!(three.1 - two.1, 2 * c);
}

#[test]
fn every_whitening_agrees_with_the_recurrence() {
    for solver in WhiteningSolver::ALL {
        for refresh in [1, 3] {
            let error = exact_error(
                "spd_sla_w",
                &[
                    "layer.key_dim=64",
                    "layer.initial_state=given",
                    &format!("layer.whitening={}", solver.name()),
                    &format!("layer.whitening_refresh={refresh}"),
                    "numeric.tokens=300",
                ],
            );
            assert!(error <= 1e-10, "{} {refresh}: {error:e}", solver.name());
        }
    }
}

/// `f(matrix)` of a symmetric positive definite matrix by dense means of its own: `-1` by solves, the Newton-Schulz iterates as they are defined.
fn dense(solver: WhiteningSolver, covariance: &Array2<f64>) -> Array2<f64> {
    let n = covariance.nrows();
    let identity = Array2::<f64>::eye(n);
    let largest_row = covariance
        .rows()
        .into_iter()
        .map(|r| r.iter().map(|x| x.abs()).sum::<f64>())
        .fold(0.0, f64::max);
    let scale = if solver == WhiteningSolver::Polar2 {
        1.0
    } else {
        largest_row
    };
    let cn = covariance / scale + &identity * 1e-3;
    let steps = match solver {
        WhiteningSolver::None => return identity,
        WhiteningSolver::Cholesky16 | WhiteningSolver::Cg30 => {
            let mut inverse = identity.clone();
            for (i, mut row) in inverse.rows_mut().into_iter().enumerate() {
                let x = mesa::solve(cn.clone(), &identity.row(i).to_vec());
                row.iter_mut().zip(x).for_each(|(r, x)| *r = x);
            }
            return inverse;
        }
        WhiteningSolver::NewtonSchulz5 => 5,
        WhiteningSolver::Polar2 | WhiteningSolver::Polar2Plus => 2,
    };
    let (mut y, mut z) = (cn, identity.clone());
    for _ in 0..steps {
        let t = (&identity * 3.0 - z.dot(&y)) * 0.5;
        y = y.dot(&t);
        z = t.dot(&z);
    }
    z
}

/// The rows of the only head of a core-layout tensor.
fn rows(execution: &Execution<f64>, value: Value, tokens: usize) -> Array2<f64> {
    let tensor: &Tensor<f64> = &execution.values[&value];
    let columns = tensor.len() / tokens;
    let flat = tensor
        .to_owned()
        .into_shape_with_order((tokens, columns))
        .expect("one head");
    flat.into_dimensionality::<Ix2>().expect("a matrix")
}

#[test]
fn write_keys_and_outputs_follow_from_past_chunks_alone() {
    for (solver, refresh, tolerance) in [
        (WhiteningSolver::None, 1, 1e-12),
        (WhiteningSolver::Polar2Plus, 1, 1e-12),
        (WhiteningSolver::Polar2Plus, 2, 1e-12),
        (WhiteningSolver::NewtonSchulz5, 1, 1e-12),
        (WhiteningSolver::Polar2, 1, 1e-12),
        (WhiteningSolver::Cholesky16, 3, 1e-10),
    ] {
        let layer = layer(
            "spd_sla_w",
            &[
                "layer.model_width=96",
                "layer.key_heads=1",
                "layer.value_heads=2",
                "layer.key_dim=40",
                "layer.value_dim=24",
                "layer.tokens=256",
                "numeric.tokens=256",
                &format!("layer.whitening={}", solver.name()),
                &format!("layer.whitening_refresh={refresh}"),
            ],
        );
        let LayerGraph { graph, core } = build(&layer).expect("builds");
        let Recurrence::DeltaRule(inputs) = core.recurrence else {
            panic!("SPD-SLA-W is a delta rule")
        };
        let unclamped = graph
            .nodes()
            .find(|(_, n)| n.name == "beta_core")
            .expect("a step size")
            .0;
        let unclamped = Value {
            node: unclamped,
            port: 0,
        };
        let mut keep = core.recurrence.values();
        keep.extend([core.output, unclamped]);
        let run = execute(&graph, &seeded_inputs(&graph, 3), &keep, Arithmetic::Exact).expect("runs");
        let t = layer.tokens;
        let keys = rows(&run, inputs.read_key, t);
        let (mut covariance, mut p) = (Array2::<f64>::eye(40), Array2::eye(40));
        let mut x = Array2::zeros(keys.raw_dim());
        for (chunk, start) in (0..t).step_by(layer.chunk).enumerate() {
            let part = ndarray::Slice::from(start..start + layer.chunk);
            let k = keys.slice_axis(Axis(0), part);
            if chunk % refresh == 0 {
                p = dense(solver, &covariance);
            }
            x.slice_axis_mut(Axis(0), part).assign(&k.dot(&p));
            covariance = covariance * 0.9 + k.t().dot(&k);
        }
        let relative = |a: &Array2<f64>, b: &Array2<f64>| {
            let largest = b.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
            (a - b).iter().fold(0.0_f64, |m, v| m.max(v.abs())) / largest
        };
        let error = relative(&rows(&run, inputs.write_key, t), &x);
        assert!(error <= tolerance, "{} {refresh} keys: {error:e}", solver.name());

        let beta = Array2::from_shape_fn((t, 1), |(i, _)| {
            let overlap = x.row(i).dot(&keys.row(i)).max(1e-6);
            rows(&run, unclamped, t)[[i, 0]].min((2.0 - 1.0 / 128.0) / overlap)
        });
        let lanes = 40 / layer.decay_tiles;
        let tiles = rows(&run, inputs.log_decay.expect("decays"), t);
        let decay = Array2::from_shape_fn((t, 40), |(i, c)| tiles[[i, c / lanes]]);
        let exact = delta_rule(
            &rows(&run, inputs.query, t),
            &x,
            &(&keys * &beta),
            &(rows(&run, inputs.value, t) * &beta),
            &decay,
            &Array2::zeros((40, 48)),
            Read::Decayed,
        )
        .expect("shapes fit");
        let error = relative(&rows(&run, core.output, t), &exact.outputs);
        assert!(error <= 1e-10, "{} {refresh} outputs: {error:e}", solver.name());
    }
}

/// Executes a graph of one matrix input `a` in f64.
fn of_matrix(a: &Array2<f64>, append: impl FnOnce(&mut Builder, Value) -> Value) -> (Array2<f64>, Graph) {
    let mut b = Builder::new(Stage::Whitening);
    let n = a.nrows();
    let input = b.input("a", [n, n], Dtype::F32, Role::Activation, Init::Zeros);
    let result = append(&mut b, input);
    b.output("result", result);
    let graph = b.finish().expect("builds");
    let given: ArrayD<f64> = a.clone().into_dyn();
    let inputs = BTreeMap::from([(input.node, given.into_shared())]);
    let run = execute(&graph, &inputs, &[result], Arithmetic::Exact).expect("runs");
    let value = run.values[&result]
        .to_owned()
        .into_dimensionality()
        .expect("a matrix");
    (value, graph)
}

fn products(graph: &Graph) -> usize {
    graph
        .nodes()
        .filter(|(_, node)| matches!(node.op, Op::MatMul { .. }))
        .count()
}

#[test]
fn newton_schulz_takes_its_products_and_converges() {
    let precision = Precision::Highest;
    let iterate = |a: &Array2<f64>, steps: usize| {
        let (z, graph) = of_matrix(a, |b, a| append_newton_schulz(b, a, steps, precision));
        (z, products(&graph))
    };
    // Golden values: the scalar iteration on the same spectra, in double precision.
    let safe = with_eigenvalues(&geometric(1e-3, 1.0, 64), 1);
    for (steps, count, largest) in [(2, 3, 2.247_564_186_937_563), (5, 12, 7.480_551_633_964_893)] {
        let (z, used) = iterate(&safe, steps);
        let (low, high) = extreme_eigenvalues(&z);
        assert_eq!(used, count);
        assert!(
            (low - 1.0).abs() < 1e-12 && (high - largest).abs() < 1e-12,
            "{low} {high}"
        );
    }
    let wide = with_eigenvalues(&geometric(1e-3, 8.0, 64), 1);
    let (low, high) = extreme_eigenvalues(&iterate(&wide, 2).0);
    assert!((low + 0.499_246_297_001_146_2).abs() < 1e-12, "{low}");
    assert!((high - 58.75).abs() < 1e-11, "{high}");
    let (low, _) = extreme_eigenvalues(&iterate(&wide, 5).0);
    assert!((low / -3.886_580_959_406e55 - 1.0).abs() < 1e-9, "{low:e}");

    let linear: Vec<f64> = (0..64).map(|i| 0.3 + 0.7 * f64::from(i) / 63.0).collect();
    let close = with_eigenvalues(&linear, 1);
    let (z, used) = iterate(&close, 8);
    assert_eq!(used, 21);
    let residual = (z.dot(&close).dot(&z) - Array2::<f64>::eye(64))
        .iter()
        .fold(0.0_f64, |m, x| m.max(x.abs()));
    // 2e-15 is printed for another basis.
    assert!(residual < 4e-15, "{residual:e}");
}

#[test]
fn only_the_scaled_iterations_stay_positive_definite() {
    let wide = with_eigenvalues(&geometric(1e-3, 8.0, 64), 1);
    for (solver, definite) in [
        (WhiteningSolver::Polar2, false),
        (WhiteningSolver::Polar2Plus, true),
        (WhiteningSolver::NewtonSchulz5, true),
    ] {
        let (p, _) = of_matrix(&wide, |b, a| {
            append_polar(b, solver, Precision::Highest, a).expect("forms a matrix")
        });
        assert_eq!(extreme_eigenvalues(&p).0 > 0.0, definite, "{}", solver.name());
    }
    for solver in [WhiteningSolver::Cholesky16, WhiteningSolver::Cg30] {
        let (p, _) = of_matrix(&wide, |b, a| {
            let keys = b.identity("keys", 64, Dtype::F32);
            append_whitened(b, solver, Precision::Highest, a, keys)
        });
        assert!(extreme_eigenvalues(&p).0 > 0.0, "{}", solver.name());
    }
}

#[test]
fn work_per_head_and_chunk_of_the_solvers() {
    let work = |solver: WhiteningSolver| {
        let n = 256;
        let mut b = Builder::new(Stage::Whitening);
        let c = b.input("C", [n, n], Dtype::F32, Role::Activation, Init::Zeros);
        let k = b.input("K", [64, n], Dtype::Bf16, Role::Activation, Init::Zeros);
        let x = append_whitened(&mut b, solver, Precision::High, c, k);
        b.output("x", x);
        graph_work(&b.finish().expect("builds")).matrix_flops.total()
    };
    let keys = 2 * 64 * 256 * 256;
    let cube: u64 = 2 * 256 * 256 * 256;
    assert_eq!(work(WhiteningSolver::Polar2), 3 * cube + keys);
    assert_eq!(work(WhiteningSolver::Polar2Plus), 3 * cube + keys);
    assert_eq!(work(WhiteningSolver::NewtonSchulz5), 12 * cube + keys);
    // 101 and 403 MFLOP are printed.
    assert_eq!((3 * cube + 500_000) / 1_000_000, 101);
    assert_eq!((12 * cube + 500_000) / 1_000_000, 403);
    assert_eq!(work(WhiteningSolver::Cg30), 30 * keys);
    // Panels: 2 16 m^2 for m rows left; solves: 4 16 m C.
    let left = || (0..16).map(|i| 16 * i);
    let factor: u64 = left().map(|m| 32 * m * m).sum();
    let solves: u64 = left().map(|m| 64 * m * 64).sum();
    assert_eq!(work(WhiteningSolver::Cholesky16), factor + solves);
    // Two thirds of n^3 dense, and 2 C n^2, both less the panels themselves.
    assert!((factor as f64 / (2.0 / 3.0 * 256_f64.powi(3)) - 1.0).abs() < 0.1);
    assert!((solves as f64 / keys as f64 - 1.0).abs() < 0.07);
}

#[test]
fn refreshing_less_often_divides_the_work_of_the_solver() {
    let flops = |refresh: usize| {
        let graph = built("spd_sla_w", &[&format!("layer.whitening_refresh={refresh}")]).graph;
        stage_work(&graph)[Stage::Whitening as usize]
            .1
            .matrix_flops
            .total()
    };
    let (heads, chunks, cube) = (8, 128, 2 * 256_u64.pow(3));
    let gram_and_keys = 4 * 64 * 256 * 256 * heads * chunks;
    assert_eq!(flops(1), gram_and_keys + 3 * cube * heads * chunks);
    assert_eq!(flops(4), gram_and_keys + 3 * cube * heads * chunks / 4);
    // A block of three chunks more than there are: its padding rows are multiplied too.
    let padded = 2 * 64 * 256 * 256 * heads * (chunks + 129);
    assert_eq!(flops(3), padded + 3 * cube * heads * 43);
}

#[test]
fn executed_work_is_accounted_work() {
    let mut cases = vec![
        ("mesanet", "layer.forgetting=gated"),
        ("mesanet", "layer.forgetting=none"),
    ];
    let names: Vec<String> = WhiteningSolver::ALL
        .iter()
        .map(|s| format!("layer.whitening={}", s.name()))
        .collect();
    cases.extend(names.iter().map(|name| ("spd_sla_w", name.as_str())));
    for (name, field) in cases {
        let graph = built(
            name,
            &[
                field,
                "layer.tokens=200",
                "numeric.tokens=200",
                "layer.key_heads=2",
                "layer.value_heads=4",
                "layer.key_dim=36",
                "layer.value_dim=16",
                "layer.model_width=48",
                "program.heads=1",
                "numeric.key_heads=1",
            ],
        )
        .graph;
        let inputs = seeded_inputs(&graph, 2);
        let exact = execute(&graph, &inputs, &[], Arithmetic::Exact).expect("runs");
        assert_eq!(exact.work, stage_work(&graph), "{name} {field}");
        let declared = execute(&graph, &to_f32(&inputs), &[], Arithmetic::Declared).expect("runs");
        assert_eq!(declared.work, stage_work(&graph), "{name} {field}");
        assert_eq!(declared.non_finite, None, "{name} {field}");
    }
}

#[test]
fn a_cholesky_factor_and_both_substitutions() {
    // [[4, 2, 2], [2, 5, 3], [2, 3, 6]] = L L^T with L = [[2, 0, 0], [1, 2, 0], [1, 1, 2]].
    let a = Array2::from_shape_vec((3, 3), vec![4.0, 2.0, 2.0, 2.0, 5.0, 3.0, 2.0, 3.0, 6.0]).expect("3 x 3");
    let (l, graph) = of_matrix(&a, |b, a| b.cholesky("L", a));
    assert_eq!(
        l.into_raw_vec_and_offset().0,
        [2.0, 0.0, 0.0, 1.0, 2.0, 0.0, 1.0, 1.0, 2.0]
    );
    let work = graph_work(&graph);
    // Three pivots; 3 + 2 + 1 scaled entries; trailing triangles of 3 and 1 entries, two operations each.
    assert_eq!((work.transcendentals, work.vector_ops.total()), (3, 14));
    let unit =
        Array2::from_shape_vec((3, 3), vec![9.0, 9.0, 9.0, 2.0, 9.0, 9.0, 3.0, 4.0, 9.0]).expect("3 x 3");
    let side = |b: &mut Builder| b.fill("ones", [3, 1], Dtype::F32, 1.0);
    let solve = |transposed: bool| {
        of_matrix(&unit, |b, l| {
            let ones = side(b);
            if transposed {
                b.backward_substitution("x", l, ones)
            } else {
                b.forward_substitution("x", l, ones)
            }
        })
        .0
    };
    assert_eq!(solve(false).into_raw_vec_and_offset().0, [1.0, -1.0, 2.0]);
    assert_eq!(solve(true).into_raw_vec_and_offset().0, [4.0, -3.0, 1.0]);
    let indefinite = Array2::from_shape_vec((2, 2), vec![1.0, 2.0, 2.0, 1.0]).expect("2 x 2");
    assert!(of_matrix(&indefinite, |b, a| b.cholesky("L", a)).0[[1, 1]].is_nan());
}

#[test]
fn a_repeated_body_has_its_trips_and_no_others() {
    let mut b = Builder::new(Stage::Output);
    let x = b.input("x", [4, 4], Dtype::F32, Role::Activation, Init::Ones);
    let doubled = |b: &mut Builder, trips: usize| {
        b.repeat("twice", trips, &[x], &[x], |b, carry, inner| {
            vec![b.add("sum", carry[0], inner[0])]
        })[0]
    };
    let (none, five) = (doubled(&mut b, 0), doubled(&mut b, 5));
    b.output("none", none);
    b.output("five", five);
    let graph = b.finish().expect("builds");
    assert_eq!(graph_work(&graph).vector_ops.total(), 5 * 16);
    let run = execute(
        &graph,
        &seeded_inputs(&graph, 1),
        &[none, five],
        Arithmetic::Exact,
    )
    .expect("runs");
    let corner = IxDyn(&[0, 0]);
    assert_eq!(
        (
            run.values[&none][&corner] as u32,
            run.values[&five][&corner] as u32
        ),
        (1, 6)
    );
}

#[test]
fn loops_inside_loops_multiply_their_counts_and_chains() {
    let mut b = Builder::new(Stage::StateScan);
    let x = b.input("x", [1, 2, 1, 8, 4, 4], Dtype::F32, Role::Activation, Init::Ones);
    let zero = b.fill("zero", [1, 2, 1, 4, 4], Dtype::F32, 0.0);
    let (carries, stacks) = b.scan("chunks", 3, &[zero], &[x], &[], |b, carry, slice, _| {
        let next = b.add("sum", carry[0], slice[0]);
        let refined = b.repeat("solver", 5, &[next], &[slice[0]], |b, inner, outer| {
            vec![b.matmul("product", inner[0], outer[0], Precision::Highest)]
        });
        (vec![refined[0]], vec![next])
    });
    b.output("state", carries[0]);
    b.output("o", stacks[0]);
    let graph = b.finish().expect("builds");
    let plan = Plan::named("fused", Program { heads: 1, chunks: 1 }).expect("a plan");
    let kernels = lower(&graph, &plan, x, 0.0);
    let kernel = &kernels[0];
    assert_eq!((kernel.grid.parallel, kernel.grid.sequential), (2, 8));
    assert_eq!(kernel.carried_bytes, 4 * 16);
    let op = |name: &str| {
        kernel
            .ops
            .iter()
            .find(|op| op.name == name)
            .expect("an operation")
    };
    assert_eq!((op("sum").count, op("sum").serial), (8, 1));
    // Two heads, eight chunks, five iterations.
    assert_eq!((op("product").count, op("product").serial), (80, 5));
    assert!(op("product").carried);
    assert_eq!(kernel.work.matrix_flops.total(), 80 * 2 * 4 * 4 * 4);
}

#[test]
fn the_solver_table_says_what_the_paper_says() {
    let chips = vec![hardware::load_with::<&str>("tpu-v7x", &[]).expect("shipped")];
    let table = whitening(&WhiteningRequest {
        workload: "spd_sla_w",
        overrides: &["layer.tokens=1024".to_owned()],
        chips: &chips,
        plan: "fused",
    })
    .expect("runs");
    let row = |name: &str| table.rows.iter().find(|row| row.name == name).expect("a row");
    // Definiteness as printed in the paper's table of solvers.
    for (name, definite) in [
        ("none", None),
        ("mesanet", Some(true)),
        ("cholesky16", Some(true)),
        ("newton_schulz5", Some(true)),
        ("polar2", Some(false)),
        ("polar2_plus", Some(true)),
    ] {
        assert_eq!(row(name).definite, definite, "{name}");
    }
    for (name, products, megaflops) in [
        ("polar2", 3, 101),
        ("polar2_plus", 3, 101),
        ("newton_schulz5", 12, 403),
    ] {
        assert_eq!(row(name).products, products);
        assert_eq!((row(name).solver_flops + 500_000) / 1_000_000, megaflops);
    }
    // 30 (2 C dk^2 + 4 C^2 dk)
    assert_eq!(
        row("mesanet").solver_flops,
        30 * (2 * 64 * 256 * 256 + 4 * 64 * 64 * 256)
    );
    let wide = row("polar2").smallest_eigenvalue_wide.expect("finite");
    // The two-step map is smallest, -0.50106, at an eigenvalue of 3.966.
    assert!((-0.501_06..-0.49).contains(&wide), "{wide}");
    // An inverse is reached in f32 and not in bf16.
    let cholesky = row("cholesky16");
    assert!(cholesky.residual_f64.is_some_and(|r| r < 1e-12));
    assert!(cholesky.residual_f32.is_some_and(|r| r < 1e-4));
    assert!(cholesky.residual_bf16.is_some_and(|r| r > 1e-3));
    let mesa = row("mesanet");
    assert!(mesa.residual_f64.is_some_and(|r| r < 1e-12), "{mesa:?}");
    assert!(mesa.residual_f32.is_some_and(|r| r < 1e-4), "{mesa:?}");
    for row in &table.rows {
        assert!(
            row.times.len() == 1 && row.times[0].total_us >= table.rows[0].times[0].total_us,
            "{}",
            row.name
        );
    }
}
