//! Executed work equals accounted work, on random graphs and on graphs of one operation, whatever the number of threads.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tpusim::dtype::Dtype;
use tpusim::graph::{
    Builder, Function, Graph, Init, Mask, Op, Precision, ReduceFunction, Role, Shape, Stage, Value, work,
};
use tpusim::numerics::{Arithmetic, Execution, Real, execute, memory_estimate, seeded_inputs, to_f32};

const FORMATS: [Dtype; 5] = [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::Fp8E4m3, Dtype::Int8];
const UNARY: [Function; 8] = [
    Function::Abs,
    Function::AddConstant(0.25),
    Function::MinimumConstant(1.0),
    Function::Exp,
    Function::Tanh,
    Function::Sigmoid,
    Function::Silu,
    Function::Softplus,
];
const BINARY: [Function; 4] = [
    Function::Add,
    Function::Subtract,
    Function::Multiply,
    Function::Maximum,
];
const MASKS: [Mask; 6] = [
    Mask::Lower,
    Mask::BlockCorner { half: 2 },
    Mask::LowerPairs,
    Mask::ColumnsBelow { end: 3 },
    Mask::EvenBlocks { block: 2 },
    Mask::EarlierHalf { half: 1 },
];
const PRECISIONS: [Precision; 3] = [Precision::Default, Precision::High, Precision::Highest];

/// Appends the operation that `[kind, a, b, detail]` stand for, where the operands allow it.
fn append(builder: &mut Builder, values: &mut Vec<Value>, [kind, a, b, detail]: [u8; 4]) {
    let pick = |i: u8| values[usize::from(i) % values.len()];
    let choose = |n: usize| usize::from(detail) % n.max(1);
    let (a, b) = (pick(a), pick(b));
    let dims = builder.dims(a);
    let rank = dims.len();
    builder.stage(Stage::ALL[usize::from(kind) % Stage::ALL.len()]);
    let leading = |shape: &Shape| Shape::new(&shape.dims()[..shape.rank().saturating_sub(2)]);
    let (sa, sb) = (builder.shape(a).clone(), builder.shape(b).clone());
    let batches = leading(&sa).broadcast(&leading(&sb)).is_some() && sa.rank() > 1 && sb.rank() > 1;
    let new = match kind % 16 {
        0 | 1 => builder.map("f", UNARY[choose(UNARY.len())], a),
        2 | 3 if sa.broadcast(&sb).is_some() => builder.zip("f2", BINARY[choose(BINARY.len())], a, b),
        4 if batches && sa.from_end(0) == sb.from_end(1) => builder.matmul("ab", a, b, PRECISIONS[choose(3)]),
        5 if batches && sa.from_end(0) == sb.from_end(0) => {
            builder.matmul_bt("abt", a, b, PRECISIONS[choose(3)])
        }
        6 if batches && sa.from_end(1) == sb.from_end(1) => {
            builder.matmul_at("atb", a, b, PRECISIONS[choose(3)])
        }
        7 => builder.reduce("r", ReduceFunction::Sum, a, choose(rank)),
        8 => builder.cumulative_sum("c", a, choose(rank)),
        9 => builder.cast("cast", a, FORMATS[choose(FORMATS.len())]),
        10 => builder.select("s", MASKS[choose(MASKS.len())], a, 0.0),
        11 if rank > 2 && sa == sb && builder.ty(a) == builder.ty(b) => {
            builder.choose("chosen", MASKS[choose(MASKS.len())], a, b)
        }
        11 if rank > 1 => builder.transpose_minor("t", a),
        12 if dims[choose(rank)] > 1 => {
            let axis = choose(rank);
            let part = builder.slice("part", a, axis, 1, dims[axis] - 1);
            builder.pad("pad", part, axis, dims[axis])
        }
        13 if sa.elements() < 4000 => builder.repeat_minor("lanes", a, 1 + choose(3)),
        14 if batches && sa.from_end(0) == sa.from_end(1) && sa.from_end(0) == sb.from_end(1) => {
            let lower = builder.select("L", Mask::StrictlyLower, a, 0.0);
            builder.forward_substitution("x", lower, b)
        }
        15 if rank > 1 && dims[choose(rank)] > 1 => {
            let axis = choose(rank);
            let start = builder.slice("start", a, axis, 0, 1);
            let shape: Vec<usize> = dims
                .iter()
                .enumerate()
                .filter(|(i, _)| *i != axis)
                .map(|(_, d)| *d)
                .collect();
            let carry = builder.reshape("carry", start, shape);
            let (carries, stacks) = builder.scan("loop", axis, &[carry], &[a], &[carry], |b, c, x, v| {
                let sum = b.add("sum", c[0], x[0]);
                let e = b.map("tanh", Function::Tanh, sum);
                (vec![b.multiply("next", e, v[0])], vec![sum])
            });
            values.push(carries[0]);
            stacks[0]
        }
        _ => return,
    };
    values.push(new);
}

fn build(code: &[[u8; 4]]) -> Graph {
    let mut builder = Builder::new(Stage::Projections);
    let normal = Init::Normal { std: 0.5 };
    let mut values: Vec<Value> = [
        (vec![2, 3, 4, 6], Dtype::Bf16),
        (vec![3, 1, 6], Dtype::F32),
        (vec![3, 6, 6], Dtype::F32),
        (vec![4, 1], Dtype::F32),
        (vec![6, 5], Dtype::Fp8E4m3),
    ]
    .into_iter()
    .map(|(dims, dtype)| builder.input("x", dims, dtype, Role::Activation, normal))
    .collect();
    for &step in code {
        append(&mut builder, &mut values, step);
    }
    for (i, &value) in values.iter().enumerate().rev().take(3) {
        builder.output(&format!("y{i}"), value);
    }
    builder.finish().unwrap()
}

fn everything<R: Real>(
    graph: &Graph,
    inputs: &BTreeMap<tpusim::graph::NodeId, tpusim::numerics::Tensor<R>>,
    arithmetic: Arithmetic,
) -> Execution<R> {
    let keep: Vec<Value> = graph.outputs().iter().map(|(_, value)| *value).collect();
    execute(graph, inputs, &keep, arithmetic).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn executed_work_is_accounted_work(code in prop::collection::vec(any::<[u8; 4]>(), 1..40)) {
        let graph = build(&code);
        let wide = seeded_inputs(&graph, 5);
        let exact = everything(&graph, &wide, Arithmetic::Exact);
        prop_assert_eq!(exact.work, work::stage_work(&graph));
        let declared = everything(&graph, &to_f32(&wide), Arithmetic::Declared);
        prop_assert_eq!(declared.work, work::stage_work(&graph));
        for (_, value) in graph.outputs() {
            let ty = graph.ty(*value);
            prop_assert_eq!(declared.values[value].shape(), ty.shape.dims());
            // Declared results are values of their format.
            for &x in &declared.values[value] {
                let rounded = tpusim::numerics::round_to(ty.dtype, f64::from(x));
                prop_assert!(rounded.to_bits() == f64::from(x).to_bits() || x.is_nan(), "{} {}", ty, x);
            }
        }
        prop_assert!(memory_estimate(&graph, 4) >= 4 * (144 + 18 + 108 + 4 + 30));
    }
}

/// Large enough that every kernel runs in parallel, and with shapes that do not divide into blocks.
#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut builder = Builder::new(Stage::Gram);
    let b = &mut builder;
    let normal = Init::Normal { std: 0.3 };
    let x = b.input("x", [3, 7, 65, 70], Dtype::F32, Role::Activation, normal);
    let w = b.input("w", [70, 65], Dtype::F32, Role::Weight, normal);
    let taps = b.input("taps", [4, 70], Dtype::F32, Role::Weight, normal);
    let y = b.causal_convolution("conv", x, taps);
    let y = b.map("silu", Function::Silu, y);
    let g = b.cumulative_sum("G", y, 2);
    let row = b.sum_minor("sum", g);
    let column = b.reduce("max", ReduceFunction::Maximum, g, 2);
    let outer = b.multiply("outer", row, column);
    let square = b.matmul("product", outer, w, Precision::High);
    let lower = b.select("L", Mask::StrictlyLower, square, 0.0);
    let small = b.scale("small", lower, 1e-3);
    let turned = b.transpose("turned", small, [1, 0, 3, 2]);
    let back = b.transpose("back", turned, [1, 0, 3, 2]);
    let solved = b.forward_substitution("solved", back, g);
    let tall = b.reshape("tall", solved, [3 * 7 * 65, 70]);
    let tall = b.matmul("tall product", tall, w, Precision::Default);
    let narrow = b.cast("narrow", tall, Dtype::Fp8E5m2);
    b.output("y", narrow);
    let graph = builder.finish().unwrap();
    let inputs = to_f32(&seeded_inputs(&graph, 1));
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| everything(&graph, &inputs, Arithmetic::Declared))
    };
    let (one, four) = (on(1), on(4));
    assert_eq!(one.work, work::stage_work(&graph));
    assert_eq!(four.work, one.work);
    let bits = |e: &Execution<f32>| -> Vec<u32> {
        e.values
            .values()
            .flat_map(|t| t.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            .collect()
    };
    assert!(bits(&one) == bits(&four));
    assert_eq!(one.non_finite, None);
}

/// Loops without trips and tensors without elements are executed, not refused.
#[test]
fn empty_dimensions_are_harmless() {
    let mut builder = Builder::new(Stage::Gram);
    let x = builder.input("x", [0, 4, 4], Dtype::F32, Role::Activation, Init::Ones);
    let s = builder.input("s", [4, 4], Dtype::F32, Role::State, Init::Ones);
    let (carries, stacks) = builder.scan("loop", 0, &[s], &[x], &[], |b, c, x, _| {
        let y = b.matmul("y", c[0], x[0], Precision::High);
        (vec![y], vec![y])
    });
    builder.output("carry", carries[0]);
    builder.output("stack", stacks[0]);
    let none = builder.matmul("none", x, s, Precision::High);
    let none = builder.sum_minor("sum", none);
    let none = builder.cumulative_sum("c", none, 1);
    let none = builder.select("select", Mask::LowerPairs, none, 0.0);
    let total = builder.reduce("total", ReduceFunction::Sum, none, 0);
    builder.output("total", total);
    let graph = builder.finish().unwrap();
    assert!(graph.nodes().any(|(_, node)| matches!(node.op, Op::Scan(_))));
    let found = everything(&graph, &to_f32(&seeded_inputs(&graph, 1)), Arithmetic::Declared);
    let shape = |name: &str| found.values[&graph.output(name).unwrap()].shape().to_vec();
    assert_eq!(shape("stack"), [0, 4, 4]);
    assert_eq!(
        found.values[&graph.output("carry").unwrap()].sum().to_bits(),
        16.0_f32.to_bits()
    );
    assert_eq!(
        found.values[&graph.output("total").unwrap()].sum().to_bits(),
        0.0_f32.to_bits()
    );
}
