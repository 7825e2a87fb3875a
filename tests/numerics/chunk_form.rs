//! The chunk form of the delta rule, executed as a graph, against the token-by-token recurrence: two ways to build the Gram matrices, two ways to
//! invert, a partial last chunk and a state to start from.

use ndarray::{Array2, Ix2};
use tpusim::dtype::Dtype;
use tpusim::graph::{Builder, Function, Graph, Init, Mask, Precision, Role, Stage, Value, work};
use tpusim::numerics::reference::{Read, Recurrence, delta_rule};
use tpusim::numerics::{Arithmetic, Real, Tensor, memory_estimate, relative_error};

use super::{output, run};

const TOKENS: usize = 200;
const CHUNK: usize = 64;
const CHUNKS: usize = 4;
const PRECISION: Precision = Precision::Highest;

/// Inputs of the graph, in the order they are declared.
struct Layer {
    q: Array2<f64>,
    k: Array2<f64>,
    v: Array2<f64>,
    beta: Array2<f64>,
    /// Log decay, one column per decay tile.
    l: Array2<f64>,
    state: Array2<f64>,
}

impl Layer {
    fn new(dk: usize, dv: usize, tiles: usize, strongest: f64, largest_step: f64) -> Self {
        let mut x = 0x2545_f491_4f6c_dd1d_u64;
        let mut noise = |rows: usize, columns: usize| {
            Array2::from_shape_fn((rows, columns), |_| {
                x = x
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (x >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
            })
        };
        let unit = |mut m: Array2<f64>, length: f64| {
            m.rows_mut().into_iter().for_each(|mut row| {
                let norm = row.dot(&row).sqrt();
                row *= length / norm;
            });
            m
        };
        Layer {
            q: unit(noise(TOKENS, dk), (dk as f64).powf(-0.5)),
            k: unit(noise(TOKENS, dk), 1.0),
            v: noise(TOKENS, dv),
            beta: noise(TOKENS, 1).mapv(|x| largest_step * x.abs()),
            l: noise(TOKENS, tiles).mapv(|x| -strongest * x.abs()),
            state: noise(dk, dv),
        }
    }

    fn tensors<R: Real>(&self) -> Vec<Tensor<R>> {
        [&self.q, &self.k, &self.v, &self.beta, &self.l, &self.state]
            .into_iter()
            .map(|m| m.mapv(R::from_f64).into_dyn().into_shared())
            .collect()
    }

    fn recurrence(&self) -> Recurrence {
        let lanes = self.k.ncols() / self.l.ncols();
        let l = Array2::from_shape_fn(self.k.dim(), |(t, c)| self.l[[t, c / lanes]]);
        let (r, y) = (&self.beta * &self.k, &self.beta * &self.v);
        delta_rule(&self.q, &self.k, &r, &y, &l, &self.state, Read::Decayed).unwrap()
    }
}

/// How the two Gram matrices and the inverse are computed.
#[derive(Clone, Copy)]
enum Form {
    /// `(R K^T) * exp(G_i - G_j)`, forward substitution: a scalar decay.
    Masked,
    /// Decays folded into the operands around the middle row, one stacked product, block doubling.
    Folded,
}

fn chunk_form(layer: &Layer, form: Form) -> Graph {
    let (dk, dv, tiles) = (layer.k.ncols(), layer.v.ncols(), layer.l.ncols());
    let mut builder = Builder::new(Stage::Gates);
    let b = &mut builder;
    let mut chunked = |name: &str, width: usize| {
        let whole = b.input(name, [TOKENS, width], Dtype::F32, Role::Activation, Init::Zeros);
        let padded = b.pad(name, whole, 0, CHUNK * CHUNKS);
        b.reshape(name, padded, [CHUNKS, CHUNK, width])
    };
    let (q, k, v) = (chunked("q", dk), chunked("k", dk), chunked("v", dv));
    let (beta, l) = (chunked("beta", 1), chunked("l", tiles));
    let state = b.input("S0", [dk, dv], Dtype::F32, Role::State, Init::Zeros);

    let decay = b.cumulative_sum("G", l, 1);
    let last = b.slice("G_C", decay, 1, CHUNK - 1, 1);
    let r = b.multiply("R", beta, k);
    let y = b.multiply("Y", beta, v);
    let lanes = |b: &mut Builder, name: &str, exponent: Value| {
        let e = b.exp(name, exponent);
        b.repeat_minor(name, e, dk / tiles)
    };

    b.stage(Stage::Gram);
    let (a, p) = match form {
        Form::Masked => {
            let columns = b.transpose_minor("G^T", decay);
            let exponent = b.subtract("G_i - G_j", decay, columns);
            let exponent = b.select("causal", Mask::Lower, exponent, f64::NEG_INFINITY);
            let weights = b.exp("M", exponent);
            let a = b.matmul_bt("R K^T", r, k, PRECISION);
            let a = b.multiply("A", a, weights);
            let p = b.matmul_bt("Q K^T", q, k, PRECISION);
            (a, b.multiply("P", p, weights))
        }
        Form::Folded => {
            let pivot = b.slice("pivot", decay, 1, CHUNK / 2, 1);
            let up = b.subtract("G - pivot", decay, pivot);
            let down = b.subtract("pivot - G", pivot, decay);
            let (rows, columns) = (lanes(b, "rows", up), lanes(b, "columns", down));
            let (qh, rh, kh) = (
                b.multiply("Qh", q, rows),
                b.multiply("Rh", r, rows),
                b.multiply("Kh", k, columns),
            );
            let both = b.concatenate("QR", &[qh, rh], 1);
            let gram = b.matmul_bt("gram", both, kh, PRECISION);
            (
                b.slice("A", gram, 1, CHUNK, CHUNK),
                b.slice("P", gram, 1, 0, CHUNK),
            )
        }
    };
    let a = b.select("tril A", Mask::StrictlyLower, a, 0.0);
    let p = b.select("tril P", Mask::Lower, p, 0.0);

    b.stage(Stage::WyFactors);
    let whole = lanes(b, "e^G", decay);
    let read = b.multiply("R e^G", r, whole);
    let sides = b.concatenate("Y|R", &[y, read], 2);
    let solved = match form {
        Form::Masked => b.forward_substitution("U0|W", a, sides),
        Form::Folded => {
            b.stage(Stage::Inverse);
            let mut inverse = b.identity("I", CHUNK, Dtype::F32);
            let mut half = 1;
            while half < CHUNK {
                let corner = b.select("F", Mask::BlockCorner { half }, a, 0.0);
                let step = if half == 1 {
                    corner
                } else {
                    let left = b.matmul("X F", inverse, corner, PRECISION);
                    b.matmul("X F X", left, inverse, PRECISION)
                };
                inverse = b.subtract("X", inverse, step);
                half *= 2;
            }
            b.stage(Stage::WyFactors);
            b.matmul("U0|W", inverse, sides, PRECISION)
        }
    };
    let u0 = b.slice("U0", solved, 2, 0, dv);
    let w = b.slice("W", solved, 2, dv, dk);

    b.stage(Stage::StateScan);
    let rest = b.subtract("G_C - G", last, decay);
    let rest = lanes(b, "e^(G_C - G)", rest);
    let write = b.multiply("K e^(G_C - G)", k, rest);
    let query = b.multiply("Q e^G", q, whole);
    let tail = lanes(b, "e^G_C", last);
    let tail = b.transpose_minor("e^G_C", tail);
    let (states, outputs) = b.scan(
        "chunks",
        0,
        &[state],
        &[w, u0, query, write, p, tail],
        &[],
        |b, s, x, _| {
            let read = b.matmul("W S", x[0], s[0], PRECISION);
            let u = b.subtract("U", x[1], read);
            let inter = b.matmul("Q S", x[2], s[0], PRECISION);
            let intra = b.matmul("P U", x[4], u, PRECISION);
            let o = b.zip("O", Function::Add, inter, intra);
            let update = b.matmul_at("K^T U", x[3], u, PRECISION);
            let decayed = b.multiply("D S", s[0], x[5]);
            (vec![b.add("S", decayed, update)], vec![o])
        },
    );
    let o = b.reshape("O", outputs[0], [CHUNK * CHUNKS, dv]);
    let o = b.slice("O", o, 0, 0, TOKENS);
    b.output("O", o);
    b.output("S", states[0]);
    builder.finish().unwrap()
}

fn error<R: Real>(found: &Tensor<R>, expected: &Array2<f64>) -> f64 {
    relative_error(&found.clone().into_dimensionality::<Ix2>().unwrap(), expected)
        .unwrap()
        .max
}

fn agrees(layer: &Layer, form: Form) {
    let graph = chunk_form(layer, form);
    let expected = layer.recurrence();

    let exact = run(&graph, &layer.tensors::<f64>(), Arithmetic::Exact);
    assert!(error(output(&graph, &exact, "O"), &expected.outputs) < 1e-10);
    assert!(error(output(&graph, &exact, "S"), &expected.state) < 1e-10);
    assert_eq!(exact.non_finite, None);

    let single = run(&graph, &layer.tensors::<f32>(), Arithmetic::Declared);
    let (o, s) = (
        error(output(&graph, &single, "O"), &expected.outputs),
        error(output(&graph, &single, "S"), &expected.state),
    );
    assert!(o < 1e-4 && s < 1e-4, "{o:e} {s:e}");
    assert!(o > 1e-9, "f32 that agrees to {o:e} was not computed in f32");

    assert_eq!(exact.work, work::stage_work(&graph));
    assert_eq!(single.work, work::stage_work(&graph));
    // At least its inputs and outputs are in memory at some moment.
    let ends: u64 = graph
        .inputs()
        .map(|(_, node)| node.results[0].shape.elements())
        .sum();
    assert!(memory_estimate(&graph, 8) > 8 * ends);
}

#[test]
fn scalar_decay_with_masked_gram_and_forward_substitution() {
    agrees(&Layer::new(16, 24, 1, 0.4, 1.0), Form::Masked);
}

#[test]
fn tile_decays_with_folded_gram_and_block_doubling() {
    for tiles in [1, 4, 32] {
        agrees(&Layer::new(32, 48, tiles, 1.3, 2.0), Form::Folded);
    }
}

/// The folded Gram overflows f32 once half a chunk decays by more than `e^88`: the failing node is named, and f64 does not mind.
#[test]
fn a_decay_beyond_the_bound_of_the_folded_gram_is_reported_with_its_node() {
    let mut layer = Layer::new(32, 8, 4, 1.3, 1.0);
    layer.l.fill(-3.2);
    let graph = chunk_form(&layer, Form::Folded);
    let single = run(&graph, &layer.tensors::<f32>(), Arithmetic::Declared);
    let failure = single.non_finite.unwrap();
    assert_eq!(
        (failure.node.as_str(), failure.stage, failure.scan),
        ("rows", Stage::Gram, None)
    );
    let exact = run(&graph, &layer.tensors::<f64>(), Arithmetic::Exact);
    assert_eq!(exact.non_finite, None);
    let expected = layer.recurrence();
    assert!(error(output(&graph, &exact, "O"), &expected.outputs) < 1e-10);
    // Within the bound, entries far above the diagonal overflow and are discarded: no failure.
    layer.l.fill(-2.0);
    let single = run(&graph, &layer.tensors::<f32>(), Arithmetic::Declared);
    assert_eq!(single.non_finite, None);
    assert!(error(output(&graph, &single, "O"), &layer.recurrence().outputs) < 1e-4);
}

/// What happens inside a scan is reported with the name of the inner node and of the scan.
#[test]
fn a_failure_inside_a_scan_is_named() {
    let mut builder = Builder::new(Stage::StateScan);
    let s = builder.input("S", [2, 2], Dtype::F32, Role::State, Init::Ones);
    let x = builder.input("x", [5, 2, 2], Dtype::F32, Role::Activation, Init::Ones);
    let (carries, _) = builder.scan("chunks", 0, &[s], &[x], &[], |b, s, x, _| {
        let grown = b.scale("grown", s[0], 1e20);
        (vec![b.multiply("S", grown, x[0])], vec![])
    });
    builder.output("S", carries[0]);
    let graph = builder.finish().unwrap();
    let ones = |dims: &[usize]| Tensor::<f32>::from_elem(dims, 1.0);
    let found = run(&graph, &[ones(&[2, 2]), ones(&[5, 2, 2])], Arithmetic::Declared);
    assert_eq!(
        found.non_finite.unwrap().to_string(),
        "`grown` (op6) in scan `chunks`"
    );
    assert_eq!(found.work, work::stage_work(&graph));
}
