//! Speed of the executor: whole layers and their cores beside the plain matrix product of the same machine, single operations beside each other.
//!
//! Items are FLOPs, so that `item/s` is FLOP/s.

use std::collections::BTreeMap;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use ndarray::Array2;
use ndarray::linalg::general_mat_mul;
use rayon::prelude::*;
use tpusim::dtype::Dtype;
use tpusim::graph::work::graph_work;
use tpusim::graph::{Builder, Function, Graph, Init, Mask, NodeId, Precision, Role, Stage, Value};
use tpusim::layer::{Layer, ReadConvention};
use tpusim::mechanisms::{self, DeltaRuleInputs, Granularity};
use tpusim::numerics::reference::{Read, delta_rule};
use tpusim::numerics::{Arithmetic, Tensor, execute, seeded_inputs, to_f32};
use tpusim::workload;

fn main() {
    divan::main();
}

/// The matrix product of the machine: one of 1024 x 1024 x 1024 per thread of the pool, side by side, in f32.
#[divan::bench]
fn plain_product(bencher: Bencher) {
    const N: usize = 1024;
    let threads = rayon::current_num_threads();
    let (a, b) = (Array2::<f32>::ones((N, N)), Array2::<f32>::ones((N, N)));
    let mut results = vec![Array2::<f32>::zeros((N, N)); threads];
    bencher
        .counter(ItemsCount::new(threads * 2 * N * N * N))
        .bench_local(|| {
            results
                .par_iter_mut()
                .for_each(|c| general_mat_mul(1.0, &a, &b, 0.0, c));
        });
}

/// `exact` is f32 throughout; `declared` rounds to the formats of the workload and multiplies in its passes.
#[divan::bench(args = ["kda", "sla_r4"], consts = [true, false], sample_count = 5, sample_size = 1)]
fn layer<const EXACT: bool>(bencher: Bencher, name: &str) {
    let layer = shipped(name);
    let built = mechanisms::build(&layer).expect("a graph");
    time_matrix(bencher, &built.graph, EXACT);
}

/// From queries, keys, values, log decays and step sizes to outputs: cumulative decay, Gram matrices, inverse, state, all heads.
#[divan::bench(args = ["kda", "sla_r4"], consts = [true, false], sample_count = 5, sample_size = 1)]
fn core<const EXACT: bool>(bencher: Bencher, name: &str) {
    let layer = shipped(name);
    let chunks = layer.tokens / layer.chunk;
    let packed = layer.mechanism.packed;
    let groups = match (layer.mechanism.granularity)(&layer) {
        Granularity::None | Granularity::Scalar => 1,
        Granularity::Tiles(tiles) => tiles,
        Granularity::Channel => layer.key_dim,
    };
    let width = if packed {
        layer.sharing() * layer.value_dim
    } else {
        layer.value_dim
    };
    let mut b = Builder::new(Stage::Gates);
    let mut input = |name: &str, channels: usize, dtype: Dtype, init: Init| {
        let shape = [layer.batch, layer.key_heads, 1, chunks, layer.chunk, channels];
        b.input(name, shape, dtype, Role::Activation, init)
    };
    let std = (layer.key_dim as f64).sqrt().recip();
    let query = input("q", layer.key_dim, layer.activations, Init::Normal { std });
    let key = input("k", layer.key_dim, layer.activations, Init::Normal { std });
    let value = input("v", width, layer.activations, Init::Normal { std: 1.0 });
    let decay = Init::Uniform { low: -1.0, high: 0.0 };
    let log_decay = input("l", groups, Dtype::F32, decay);
    let step = input("beta", 1, Dtype::F32, Init::Uniform { low: 0.0, high: 1.0 });
    let inputs = DeltaRuleInputs {
        query,
        write_key: key,
        read_key: key,
        value,
        step: Some(step),
        log_decay: Some(log_decay),
        read: ReadConvention::Decayed,
    };
    mechanisms::delta_rule::append(&mut b, &layer, inputs);
    time_matrix(bencher, &b.finish().expect("the shapes fit"), EXACT);
}

fn shipped(name: &str) -> Layer {
    let (workload, _) = workload::load::<&str>(name, &[]).expect("a shipped workload");
    workload.layer
}

fn time_matrix(bencher: Bencher, graph: &Graph, exact: bool) {
    let arithmetic = if exact {
        Arithmetic::Exact
    } else {
        Arithmetic::Declared
    };
    let inputs = inputs(graph);
    let keep: Vec<Value> = graph.outputs().iter().map(|(_, value)| *value).collect();
    bencher
        .counter(ItemsCount::new(graph_work(graph).matrix_flops.total()))
        .bench_local(|| execute(graph, &inputs, &keep, arithmetic).expect("a graph that executes"));
}

/// Times an operation stands in a graph: what an execution does once, such as checking its inputs, is paid once in so many.
const REPEATS: usize = 8;

/// One operation, several times, on normal inputs of the given shapes.
fn one(shapes: &[&[usize]], dtype: Dtype, op: impl Fn(&mut Builder, &[Value]) -> Value) -> Graph {
    let mut builder = Builder::new(Stage::Gram);
    let inputs: Vec<Value> = shapes
        .iter()
        .map(|&shape| builder.input("x", shape, dtype, Role::Activation, Init::Normal { std: 0.1 }))
        .collect();
    for _ in 0..REPEATS {
        op(&mut builder, &inputs);
    }
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
                general_mat_mul(1.0, &a, &b, 0.0, &mut c);
            }
        });
}

#[divan::bench(args = [(64, 64, 128), (64, 128, 64), (128, 128, 64), (256, 512, 64)])]
fn batched_product(bencher: Bencher, (m, n, k): (usize, usize, usize)) {
    let graph = one(&[&[BATCH, m, k], &[BATCH, k, n]], Dtype::Bf16, |b, x| {
        b.matmul("y", x[0], x[1], Precision::Default)
    });
    time(
        bencher.counter(ItemsCount::new(REPEATS * BATCH * 2 * m * n * k)),
        &graph,
    );
}

/// Items are FLOPs of the one product the three stand for.
#[divan::bench]
fn three_pass_product(bencher: Bencher) {
    let graph = one(&[&[BATCH, 64, 64], &[BATCH, 64, 64]], Dtype::F32, |b, x| {
        b.matmul("y", x[0], x[1], Precision::High)
    });
    time(
        bencher.counter(ItemsCount::new(REPEATS * BATCH * 2 * 64 * 64 * 64)),
        &graph,
    );
}

#[divan::bench]
fn projection(bencher: Bencher) {
    let graph = one(&[&[2048, 1024], &[1024, 1024]], Dtype::Bf16, |b, x| {
        b.matmul("y", x[0], x[1], Precision::Default)
    });
    time(
        bencher.counter(ItemsCount::new(REPEATS * 2 * 2048 * 1024 * 1024)),
        &graph,
    );
}

const ELEMENTS: usize = 1 << 23;

fn elementwise(bencher: Bencher, operands: usize, graph: &Graph) {
    time(
        bencher.counter(BytesCount::new(REPEATS * (operands + 1) * ELEMENTS * 4)),
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
