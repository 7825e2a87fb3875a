//! Single operations against values that `NumPy` and `ml_dtypes` computed.

use std::collections::BTreeMap;

use serde::Deserialize;
use tpusim::dtype::Dtype;
use tpusim::graph::{Builder, Function, Graph, Init, Mask, Precision, ReduceFunction, Role, Stage, Value};
use tpusim::numerics::{Arithmetic, ExecuteError, execute, round_to};

use super::{output, run, tensor};

type Numbers = Vec<f64>;

#[derive(Deserialize)]
struct Golden {
    rounding: Rounding,
    #[serde(flatten)]
    operations: BTreeMap<String, BTreeMap<String, Numbers>>,
}

#[derive(Deserialize)]
struct Rounding {
    x: Numbers,
    bf16: Vec<serde_json::Value>,
    f16: Vec<serde_json::Value>,
    fp8_e4m3: Vec<serde_json::Value>,
    fp8_e5m2: Vec<serde_json::Value>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../fixtures/numpy.json")).unwrap()
}

fn operation(name: &str) -> BTreeMap<String, Numbers> {
    golden().operations.remove(name).unwrap()
}

/// NaN is `null` in the fixture, infinities are strings. All numbers are f32; the parser may miss the last bit of an f64.
fn number(value: &serde_json::Value) -> f32 {
    match value.as_str() {
        Some("inf") => f32::INFINITY,
        Some("-inf") => f32::NEG_INFINITY,
        _ => value.as_f64().map_or(f32::NAN, |x| x as f32),
    }
}

fn graph(build: impl FnOnce(&mut Builder)) -> Graph {
    let mut builder = Builder::new(Stage::Gates);
    build(&mut builder);
    builder.finish().unwrap()
}

fn input(b: &mut Builder, dims: &[usize], dtype: Dtype) -> Value {
    b.input("x", dims, dtype, Role::Activation, Init::Zeros)
}

fn assert_close(found: impl IntoIterator<Item = f64>, expected: &[f64], tolerance: f64) {
    let found: Numbers = found.into_iter().collect();
    assert_eq!(found.len(), expected.len());
    for (f, e) in found.iter().zip(expected) {
        assert!(
            (f - e).abs() <= tolerance * e.abs().max(1.0),
            "{f} is not {e}\n{found:?}\n{expected:?}"
        );
    }
}

#[test]
fn rounding_agrees_with_ml_dtypes() {
    let r = golden().rounding;
    for (dtype, column) in [
        (Dtype::Bf16, r.bf16),
        (Dtype::F16, r.f16),
        (Dtype::Fp8E4m3, r.fp8_e4m3),
        (Dtype::Fp8E5m2, r.fp8_e5m2),
    ] {
        for (&x, expected) in r.x.iter().zip(&column) {
            let (found, expected) = (round_to(dtype, f64::from(x as f32)), f64::from(number(expected)));
            assert!(
                found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
                "{dtype} {x:e}"
            );
        }
    }
}

#[test]
fn a_cast_rounds_in_declared_and_not_in_exact_arithmetic() {
    let r = golden().rounding;
    let graph = graph(|b| {
        let x = input(b, &[r.x.len()], Dtype::F32);
        let y = b.cast("y", x, Dtype::Fp8E5m2);
        b.output("y", y);
    });
    let declared = run(&graph, &[tensor::<f32>(&[r.x.len()], &r.x)], Arithmetic::Declared);
    for (found, expected) in output(&graph, &declared, "y").iter().zip(&r.fp8_e5m2) {
        assert_eq!(found.to_bits(), number(expected).to_bits());
    }
    assert_eq!(declared.non_finite.map(|n| n.node).as_deref(), Some("y"));
    let exact = run(&graph, &[tensor::<f64>(&[r.x.len()], &r.x)], Arithmetic::Exact);
    assert_eq!(
        output(&graph, &exact, "y").iter().copied().collect::<Vec<_>>(),
        r.x
    );
}

#[test]
fn forward_substitution_solves() {
    let g = operation("forward_substitution");
    let graph = graph(|b| {
        let l = input(b, &[2, 6, 6], Dtype::F64);
        let rhs = input(b, &[2, 6, 3], Dtype::F64);
        let x = b.forward_substitution("X", l, rhs);
        b.output("x", x);
    });
    let found = run(
        &graph,
        &[tensor(&[2, 6, 6], &g["l"]), tensor(&[2, 6, 3], &g["b"])],
        Arithmetic::Exact,
    );
    assert_close(output(&graph, &found, "x").iter().copied(), &g["x"], 1e-11);
}

#[test]
fn causal_convolution_agrees() {
    let g = operation("causal_convolution");
    let graph = graph(|b| {
        let x = input(b, &[2, 7, 3], Dtype::F64);
        let taps = input(b, &[4, 3], Dtype::F64);
        let y = b.causal_convolution("y", x, taps);
        b.output("y", y);
    });
    let found = run(
        &graph,
        &[tensor(&[2, 7, 3], &g["x"]), tensor(&[4, 3], &g["taps"])],
        Arithmetic::Exact,
    );
    assert_close(output(&graph, &found, "y").iter().copied(), &g["y"], 1e-14);
}

#[test]
fn cumulative_sums_and_reductions_agree_along_every_axis() {
    let (g, reduced) = (operation("cumulative_sum"), operation("reduce"));
    let graph = graph(|b| {
        let x = input(b, &[3, 4, 5], Dtype::F64);
        for axis in 0..3 {
            let y = b.cumulative_sum("G", x, axis);
            b.output(&format!("axis{axis}"), y);
            let y = b.reduce("sum", ReduceFunction::Sum, x, axis);
            b.output(&format!("sum{axis}"), y);
            let y = b.reduce("max", ReduceFunction::Maximum, x, axis);
            b.output(&format!("max{axis}"), y);
        }
    });
    let found = run(&graph, &[tensor(&[3, 4, 5], &g["x"])], Arithmetic::Exact);
    for name in ["axis0", "axis1", "axis2"] {
        assert_close(output(&graph, &found, name).iter().copied(), &g[name], 1e-14);
    }
    for name in ["sum0", "sum1", "sum2", "max1", "max2"] {
        assert_close(
            output(&graph, &found, name).iter().copied(),
            &reduced[name],
            1e-14,
        );
    }
    // NaN is not hidden by a maximum.
    let mut x = g["x"].clone();
    x[0] = f64::NAN;
    let found = run(&graph, &[tensor::<f64>(&[3, 4, 5], &x)], Arithmetic::Exact);
    assert!(output(&graph, &found, "max0")[[0, 0, 0]].is_nan());
}

#[test]
fn scalar_functions_agree() {
    let g = operation("functions");
    let functions = [
        ("sigmoid", Function::Sigmoid),
        ("silu", Function::Silu),
        ("softplus", Function::Softplus),
        ("tanh", Function::Tanh),
        ("exp", Function::Exp),
    ];
    let graph = graph(|b| {
        let x = input(b, &[7], Dtype::F64);
        for (name, function) in functions {
            let y = b.map(name, function, x);
            b.output(name, y);
        }
    });
    let found = run(&graph, &[tensor(&[7], &g["x"])], Arithmetic::Exact);
    for (name, _) in functions {
        assert_close(output(&graph, &found, name).iter().copied(), &g[name], 1e-15);
    }
}

#[test]
fn matrix_products_broadcast_and_transpose() {
    let g = operation("matmul");
    let graph = graph(|b| {
        let a = input(b, &[2, 1, 4, 3], Dtype::F64);
        let m = input(b, &[5, 3, 6], Dtype::F64);
        let c = b.matmul("c", a, m, Precision::Highest);
        b.output("c", c);
        let at = b.transpose_minor("at", a);
        let mt = b.transpose("mt", m, [0, 2, 1]);
        let back = b.transpose_minor("b", mt);
        let c = b.matmul_at("ctt", at, back, Precision::Highest);
        b.output("ctt", c);
        let ones = b.fill("ones", [5, 4, 2], Dtype::F64, 1.0);
        let c = b.matmul_at("ct", a, ones, Precision::Highest);
        b.output("ct", c);
        let c = b.matmul_bt("cb", a, mt, Precision::Highest);
        b.output("cb", c);
    });
    let found = run(
        &graph,
        &[tensor(&[2, 1, 4, 3], &g["a"]), tensor(&[5, 3, 6], &g["b"])],
        Arithmetic::Exact,
    );
    for (name, expected) in [("c", "c"), ("ctt", "c"), ("cb", "c"), ("ct", "ct")] {
        assert_close(output(&graph, &found, name).iter().copied(), &g[expected], 1e-13);
    }
}

#[test]
fn passes_decompose_f32_operands() {
    let g = operation("passes");
    let graph = graph(|b| {
        let a = input(b, &[8, 40], Dtype::F32);
        let m = input(b, &[40, 8], Dtype::F32);
        let narrow = b.cast("narrow", m, Dtype::Bf16);
        for (name, precision) in [
            ("default", Precision::Default),
            ("high", Precision::High),
            ("highest", Precision::Highest),
        ] {
            let c = b.matmul(name, a, m, precision);
            b.output(name, c);
            let c = b.matmul(name, a, narrow, precision);
            b.output(&format!("{name} mixed"), c);
        }
    });
    let inputs = [tensor::<f64>(&[8, 40], &g["a"]), tensor(&[40, 8], &g["b"])];
    // In f64 the pieces and their products are exact, so only the result is rounded, to f32.
    let found = run(&graph, &inputs, Arithmetic::Declared);
    for name in ["default", "high", "highest"] {
        let expected: Numbers = g[name].iter().map(|&x| f64::from(x as f32)).collect();
        assert_close(output(&graph, &found, name).iter().copied(), &expected, 1e-14);
    }
    let single = inputs.map(|t| t.mapv(|x| x as f32).into_shared());
    let found = run(&graph, &single, Arithmetic::Declared);
    let error = |name: &str, to: &str| {
        let pairs = output(&graph, &found, name).iter().zip(&g[to]);
        pairs.fold(0.0_f64, |m, (f, e)| m.max((f64::from(*f) - e).abs()))
    };
    for name in ["default", "high", "highest"] {
        assert!(error(name, name) < 1e-5, "{name} {}", error(name, name));
    }
    // Against the exact product: 8 bits, about 16 bits, all of f32.
    assert!(
        (1e-3..1e-1).contains(&error("default", "exact")),
        "{}",
        error("default", "exact")
    );
    assert!(
        (1e-6..2e-4).contains(&error("high", "exact")),
        "{}",
        error("high", "exact")
    );
    assert!(error("highest", "exact") < 1e-5);
    // A bf16 operand has one piece; the other still needs all of its own.
    assert_eq!(
        output(&graph, &found, "default mixed"),
        output(&graph, &found, "default")
    );
    assert!(error("highest mixed", "exact") > 1e-3);
}

#[test]
fn masks_select_and_do_not_multiply() {
    let graph = graph(|b| {
        let x = input(b, &[2, 3, 3], Dtype::F32);
        let y = b.select("lower", Mask::Lower, x, f64::NEG_INFINITY);
        let y = b.exp("e", y);
        b.output("e", y);
        let y = b.select("strict", Mask::StrictlyLower, x, 0.0);
        b.output("strict", y);
        let y = b.select("pairs", Mask::LowerPairs, x, 7.0);
        b.output("pairs", y);
    });
    // Infinities above the diagonal.
    let matrix = [
        0.0,
        f64::INFINITY,
        f64::INFINITY,
        0.0,
        0.0,
        f64::INFINITY,
        0.0,
        0.0,
        0.0,
    ];
    let x = [matrix, matrix].concat();
    let found = run(&graph, &[tensor::<f32>(&[2, 3, 3], &x)], Arithmetic::Declared);
    let lower = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0];
    assert_close(
        output(&graph, &found, "e").iter().map(|&x| f64::from(x)),
        &[lower, lower].concat(),
        0.0,
    );
    assert!(output(&graph, &found, "strict").iter().all(|&x| x == 0.0));
    // Third dimension 0 keeps row 0, third dimension 1 keeps rows 0 and 1; infinities there stay.
    let pairs: Vec<f32> = output(&graph, &found, "pairs").iter().copied().collect();
    let inf = f32::INFINITY;
    assert_eq!(pairs[..9], [0.0, inf, inf, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0]);
    assert_eq!(pairs[9..], [0.0, inf, inf, 0.0, 0.0, inf, 7.0, 7.0, 7.0]);
    // The input is to blame: one of the masks lets its infinities through.
    assert_eq!(found.non_finite.unwrap().node, "x");
}

#[test]
fn an_overflow_that_a_mask_discards_is_no_failure_and_one_that_stays_is_named() {
    // Products of a falling and a rising vector: only those far above the diagonal pass 3.4e38.
    let build = |masked: bool| {
        graph(|b| {
            let x = input(b, &[4, 1], Dtype::F32);
            let y = input(b, &[4, 1], Dtype::F32);
            let both = b.concatenate("both", &[x, x], 0);
            let gram = b.matmul_bt("gram", both, y, Precision::Highest);
            b.stage(Stage::WyFactors);
            let half = b.slice("half", gram, 0, 0, 4);
            let kept = if masked {
                b.select("A", Mask::StrictlyLower, half, 0.0)
            } else {
                half
            };
            let z = b.scale("z", kept, 2.0);
            b.output("z", z);
        })
    };
    let x = tensor::<f32>(&[4, 1], &[1e20, 1e10, 1.0, 1e-10]);
    let y = tensor::<f32>(&[4, 1], &[1e-10, 1.0, 1e10, 1e20]);
    let found = run(&build(true), &[x.clone(), y.clone()], Arithmetic::Declared);
    assert_eq!(found.non_finite, None);
    let failure = run(&build(false), &[x, y], Arithmetic::Declared)
        .non_finite
        .unwrap();
    assert_eq!((failure.node.as_str(), failure.stage), ("gram", Stage::Gates));
}

#[test]
fn layout_operations_move_elements() {
    let graph = graph(|b| {
        let x = input(b, &[2, 3, 2], Dtype::F32);
        let t = b.transpose("t", x, [1, 0, 2]);
        let flat = b.reshape("flat", t, [12]);
        b.output("flat", flat);
        let part = b.slice("part", x, 1, 1, 2);
        let joined = b.concatenate("joined", &[part, x], 1);
        let longer = b.pad("longer", joined, 1, 6);
        b.output("longer", longer);
        let lanes = b.repeat_minor("lanes", part, 2);
        b.output("lanes", lanes);
        let eye = b.identity("I", 3, Dtype::F32);
        b.output("I", eye);
    });
    let x: Numbers = (0..12).map(f64::from).collect();
    let found = run(&graph, &[tensor::<f32>(&[2, 3, 2], &x)], Arithmetic::Declared);
    let get = |name: &str| {
        output(&graph, &found, name)
            .iter()
            .map(|&x| x as i32)
            .collect::<Vec<_>>()
    };
    assert_eq!(get("flat"), [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
    let rows = [
        [2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 0],
        [8, 9, 10, 11, 6, 7, 8, 9, 10, 11, 0, 0],
    ]
    .concat();
    assert_eq!(get("longer"), rows);
    assert_eq!(get("lanes"), [2, 2, 3, 3, 4, 4, 5, 5, 8, 8, 9, 9, 10, 10, 11, 11]);
    assert_eq!(get("I"), [1, 0, 0, 0, 1, 0, 0, 0, 1]);
}

#[test]
fn broadcasting_covers_every_alternation() {
    let graph = graph(|b| {
        let x = input(b, &[2, 1, 3, 1], Dtype::F64);
        let y = input(b, &[4, 1, 2], Dtype::F64);
        let d = b.subtract("d", x, y);
        b.output("d", d);
        let r = b.subtract("r", y, d);
        b.output("r", r);
    });
    let x: Numbers = (0..6).map(|i| f64::from(i) * 100.0).collect();
    let y: Numbers = (0..8).map(f64::from).collect();
    let found = run(
        &graph,
        &[tensor::<f64>(&[2, 1, 3, 1], &x), tensor(&[4, 1, 2], &y)],
        Arithmetic::Exact,
    );
    let found = output(&graph, &found, "d")
        .indexed_iter()
        .zip(output(&graph, &found, "r"));
    for ((at, found), reversed) in found {
        let (x, y) = (x[at[0] * 3 + at[2]], y[at[1] * 2 + at[3]]);
        assert!((found - (x - y)).abs() < 1e-12 && (reversed - (y - (x - y))).abs() < 1e-12);
    }
}

#[test]
fn wrong_inputs_are_errors() {
    let graph = graph(|b| {
        let x = input(b, &[2, 2], Dtype::F32);
        b.output("x", x);
        let y = b.select("bad", Mask::BlockDiagonal { block: 0 }, x, 0.0);
        b.output("y", y);
    });
    let id = graph.inputs().next().unwrap().0;
    let none = execute::<f32>(&graph, &BTreeMap::new(), &[], Arithmetic::Declared).unwrap_err();
    assert_eq!(none.to_string(), "input `x` [2,2] has no values");
    let wrong = BTreeMap::from([(id, tensor::<f32>(&[4], &[0.0; 4]))]);
    let wrong = execute(&graph, &wrong, &[], Arithmetic::Declared).unwrap_err();
    assert_eq!(wrong.to_string(), "input `x` is [2,2], its values are [4]");
    let right = BTreeMap::from([(id, tensor::<f32>(&[2, 2], &[0.0; 4]))]);
    let mask = execute(&graph, &right, &[], Arithmetic::Declared).unwrap_err();
    assert!(matches!(mask, ExecuteError::Meaningless { .. }), "{mask}");
    let unknown = Value { node: id, port: 3 };
    let unknown = execute(&graph, &right, &[unknown], Arithmetic::Declared).unwrap_err();
    assert_eq!(unknown, ExecuteError::UnknownValue { node: 0, port: 3 });
}
