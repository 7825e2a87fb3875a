//! Speed of the executor: matrix products beside the plain ndarray product of the same machine, and elementwise functions in bytes.

use std::collections::BTreeMap;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use ndarray::Array2;
use tpusim::dtype::Dtype;
use tpusim::graph::{Builder, Function, Graph, Init, Mask, NodeId, Precision, Role, Stage, Value};
use tpusim::numerics::reference::{Read, delta_rule};
use tpusim::numerics::{Arithmetic, Tensor, execute, seeded_inputs, to_f32};

fn main() {
    divan::main();
}

/// One operation on normal inputs of the given shapes.
fn one(shapes: &[&[usize]], dtype: Dtype, op: impl FnOnce(&mut Builder, &[Value]) -> Value) -> Graph {
    let mut builder = Builder::new(Stage::Gram);
    let inputs: Vec<Value> = shapes
        .iter()
        .map(|&shape| builder.input("x", shape, dtype, Role::Activation, Init::Normal { std: 0.1 }))
        .collect();
    let y = op(&mut builder, &inputs);
    builder.output("y", y);
    builder.finish().expect("the shapes fit")
}

fn inputs(graph: &Graph) -> BTreeMap<NodeId, Tensor<f32>> {
    to_f32(&seeded_inputs(graph, 1))
}

fn time(bencher: Bencher, graph: &Graph) {
    let inputs = inputs(graph);
    bencher.bench_local(|| execute(graph, &inputs, &[], Arithmetic::Declared));
}

const BATCH: usize = 512;

/// Items are FLOPs. `ndarray` is one product after the other on one thread, into storage that exists.
#[divan::bench(args = [(64, 64, 128), (64, 128, 64), (128, 128, 64), (256, 512, 64)])]
fn ndarray_product(bencher: Bencher, (m, n, k): (usize, usize, usize)) {
    let (a, b) = (Array2::<f32>::ones((m, k)), Array2::<f32>::ones((k, n)));
    let mut c = Array2::<f32>::zeros((m, n));
    bencher
        .counter(ItemsCount::new(BATCH * 2 * m * n * k))
        .bench_local(|| {
            for _ in 0..BATCH {
                ndarray::linalg::general_mat_mul(1.0, &a, &b, 0.0, &mut c);
            }
        });
}

#[divan::bench(args = [(64, 64, 128), (64, 128, 64), (128, 128, 64), (256, 512, 64)])]
fn batched_product(bencher: Bencher, (m, n, k): (usize, usize, usize)) {
    let graph = one(&[&[BATCH, m, k], &[BATCH, k, n]], Dtype::Bf16, |b, x| {
        b.matmul("y", x[0], x[1], Precision::Default)
    });
    time(bencher.counter(ItemsCount::new(BATCH * 2 * m * n * k)), &graph);
}

/// Items are FLOPs of the one product the three stand for.
#[divan::bench]
fn three_pass_product(bencher: Bencher) {
    let graph = one(&[&[BATCH, 64, 64], &[BATCH, 64, 64]], Dtype::F32, |b, x| {
        b.matmul("y", x[0], x[1], Precision::High)
    });
    time(bencher.counter(ItemsCount::new(BATCH * 2 * 64 * 64 * 64)), &graph);
}

#[divan::bench]
fn projection(bencher: Bencher) {
    let graph = one(&[&[2048, 1024], &[1024, 1024]], Dtype::Bf16, |b, x| {
        b.matmul("y", x[0], x[1], Precision::Default)
    });
    time(
        bencher.counter(ItemsCount::new(2 * 2048 * 1024 * 1024_usize)),
        &graph,
    );
}

const ELEMENTS: usize = 1 << 23;

fn elementwise(bencher: Bencher, operands: usize, graph: &Graph) {
    time(
        bencher.counter(BytesCount::new((operands + 1) * ELEMENTS * 4)),
        graph,
    );
}

#[divan::bench]
fn exp(bencher: Bencher) {
    elementwise(
        bencher,
        1,
        &one(&[&[ELEMENTS / 8192, 64, 128]], Dtype::F32, |b, x| {
            b.exp("y", x[0])
        }),
    );
}

#[divan::bench]
fn silu_bf16(bencher: Bencher) {
    let graph = one(&[&[ELEMENTS / 8192, 64, 128]], Dtype::Bf16, |b, x| {
        b.map("y", Function::Silu, x[0])
    });
    elementwise(bencher, 1, &graph);
}

#[divan::bench]
fn multiply_by_a_row(bencher: Bencher) {
    let shapes: [&[usize]; 2] = [&[ELEMENTS / 8192, 64, 128], &[ELEMENTS / 8192, 1, 128]];
    elementwise(
        bencher,
        1,
        &one(&shapes, Dtype::F32, |b, x| b.multiply("y", x[0], x[1])),
    );
}

#[divan::bench]
fn select(bencher: Bencher) {
    let graph = one(&[&[ELEMENTS / 4096, 64, 64]], Dtype::F32, |b, x| {
        b.select("y", Mask::Lower, x[0], f64::NEG_INFINITY)
    });
    elementwise(bencher, 1, &graph);
}

#[divan::bench]
fn cumulative_sum(bencher: Bencher) {
    let graph = one(&[&[ELEMENTS / 8192, 64, 128]], Dtype::F32, |b, x| {
        b.cumulative_sum("y", x[0], 1)
    });
    elementwise(bencher, 1, &graph);
}

#[divan::bench]
fn heads_to_front(bencher: Bencher) {
    let graph = one(&[&[ELEMENTS / 4096, 32, 128]], Dtype::F32, |b, x| {
        let y = b.transpose("t", x[0], [1, 0, 2]);
        b.reshape("y", y, [ELEMENTS])
    });
    elementwise(bencher, 1, &graph);
}

/// One head of 8192 tokens, `dk` 256 and `dv` 512, token by token in f64.
#[divan::bench(sample_count = 3, sample_size = 1)]
fn delta_rule_recurrence(bencher: Bencher) {
    let (tokens, dk, dv) = (8192, 256, 512);
    let keys = Array2::from_shape_fn((tokens, dk), |(t, c)| {
        ((t * 31 + c * 17) % 97) as f64 / 97.0 / 16.0
    });
    let values = Array2::from_shape_fn((tokens, dv), |(t, c)| ((t * 13 + c * 7) % 89) as f64 / 89.0);
    let (l, state) = (Array2::from_elem((tokens, dk), -0.1), Array2::zeros((dk, dv)));
    bencher.bench_local(|| delta_rule(&keys, &keys, &keys, &values, &l, &state, Read::Decayed));
}
