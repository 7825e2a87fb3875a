//! The chunk inverse alone: exact variants against substitution, truncated series against printed errors, and what correlated keys do in f32.

use ndarray::{Array2, ArrayD, Ix2};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use tpusim::dtype::Dtype;
use tpusim::graph::{Builder, Init, Precision, Role, Stage};
use tpusim::layer::InverseVariant;
use tpusim::mechanisms::append_inverse;
use tpusim::numerics::{Arithmetic, execute};

const EXACT_VARIANTS: [InverseVariant; 7] = [
    InverseVariant::RowSubstitution,
    InverseVariant::Blocked16,
    InverseVariant::Product,
    InverseVariant::Newton,
    InverseVariant::TwoLevel,
    InverseVariant::BlockDoubling,
    InverseVariant::PackedDoubling,
];

/// `(I + L)^-1` by the graph of a variant, in f64 without rounding or in f32 with the formats of the graph.
fn inverse(
    variant: InverseVariant,
    precision: Precision,
    steps: usize,
    l: &Array2<f64>,
    exact: bool,
) -> Array2<f64> {
    let n = l.nrows();
    let mut b = Builder::new(Stage::Inverse);
    let input = b.input("L", [n, n], Dtype::F32, Role::Activation, Init::Zeros);
    let t = append_inverse(&mut b, variant, precision, steps, input);
    b.output("T", t);
    let graph = b.finish().expect("builds");
    let matrix = |values: ArrayD<f64>| values.into_dimensionality::<Ix2>().expect("a matrix");
    if exact {
        let inputs = [(input.node, l.clone().into_dyn().into_shared())].into();
        let run = execute(&graph, &inputs, &[t], Arithmetic::Exact).expect("runs");
        matrix(run.values[&t].to_owned())
    } else {
        let inputs = [(input.node, l.mapv(|x| x as f32).into_dyn().into_shared())].into();
        let run = execute(&graph, &inputs, &[t], Arithmetic::Declared).expect("runs");
        matrix(run.values[&t].mapv(f64::from))
    }
}

/// The textbook recursion `X_i = e_i - L_i X`, written apart from the graph.
fn substitution(l: &Array2<f64>) -> Array2<f64> {
    let n = l.nrows();
    let mut x = Array2::eye(n);
    for i in 0..n {
        for j in 0..i {
            let sum: f64 = (j..i).map(|k| l[[i, k]] * x[[k, j]]).sum();
            x[[i, j]] = -sum;
        }
    }
    x
}

fn error(a: &Array2<f64>, b: &Array2<f64>) -> f64 {
    let largest = b.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    let apart = (a - b).iter().fold(
        0.0_f64,
        |m, x| if x.is_nan() { f64::INFINITY } else { m.max(x.abs()) },
    );
    apart / largest
}

/// `beta_i k_i.k_j` below the diagonal for unit keys around a common direction; `spread` large means random keys.
fn keys_gram(
    n: usize,
    dk: usize,
    spread: f64,
    beta: impl Fn(&mut ChaCha8Rng) -> f64,
    seed: u64,
) -> Array2<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut normal = || {
        let (u, v): (f64, f64) = (rng.random::<f64>().max(1e-300), rng.random());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    };
    let mut base: Vec<f64> = (0..dk).map(|_| normal()).collect();
    let length = base.iter().map(|x| x * x).sum::<f64>().sqrt();
    for x in &mut base {
        *x /= length;
    }
    let keys: Vec<Vec<f64>> = (0..n)
        .map(|_| {
            let key: Vec<f64> = base.iter().map(|b| b + spread * normal()).collect();
            let length = key.iter().map(|x| x * x).sum::<f64>().sqrt();
            key.into_iter().map(|x| x / length).collect()
        })
        .collect();
    let mut rng = ChaCha8Rng::seed_from_u64(seed + 1);
    let betas: Vec<f64> = (0..n).map(|_| beta(&mut rng)).collect();
    Array2::from_shape_fn((n, n), |(i, j)| {
        if j < i {
            betas[i] * keys[i].iter().zip(&keys[j]).map(|(a, b)| a * b).sum::<f64>()
        } else {
            0.0
        }
    })
}

fn two_sigmoids(rng: &mut ChaCha8Rng) -> f64 {
    2.0 / (1.0 + (-(rng.random::<f64>() * 4.0 - 2.0)).exp())
}

#[test]
fn exact_variants_agree_with_substitution_in_f64() {
    for n in [16, 64, 128] {
        let l = keys_gram(n, 128, 1e3, two_sigmoids, 11);
        let reference = substitution(&l);
        for variant in EXACT_VARIANTS {
            let e = error(&inverse(variant, Precision::Highest, 0, &l, true), &reference);
            assert!(e < 1e-12, "{variant:?} n={n}: {e:e}");
        }
    }
}

#[test]
fn truncated_series_err_as_printed_for_random_keys() {
    // Random unit keys of 128, beta in (0, 2), C = 64, K = 1, 2, 4, 8: 2.2e-1, 1.5e-1, 1.9e-2, 1.3e-4. Another draw moves them by a factor
    // of a few.
    let l = keys_gram(64, 128, 1e3, two_sigmoids, 5);
    let reference = substitution(&l);
    for (steps, printed) in [(1, 2.2e-1), (2, 1.5e-1), (4, 1.9e-2), (8, 1.3e-4)] {
        let e = error(
            &inverse(InverseVariant::Neumann, Precision::Highest, steps, &l, true),
            &reference,
        );
        assert!(
            e < 5.0 * printed && e > printed / 5.0,
            "K={steps}: {e:e} against {printed:e}"
        );
    }
}

#[test]
fn correlated_keys_break_products_and_spare_block_doubling() {
    // Pairwise cosine about 0.85, beta 1.9, C = 64, three bf16 passes: product 4e19, block doubling 1e-4.
    let l = keys_gram(64, 128, 0.04, |_| 1.9, 3);
    let reference = substitution(&l);
    let f32_error = |variant| error(&inverse(variant, Precision::High, 0, &l, false), &reference);
    assert!(f32_error(InverseVariant::Product) > 1e3);
    assert!(f32_error(InverseVariant::Newton) > 1e3);
    assert!(f32_error(InverseVariant::BlockDoubling) < 1e-3);
    assert!(f32_error(InverseVariant::PackedDoubling) < 1e-3);
    assert!(f32_error(InverseVariant::Blocked16) < 1e-3);
    assert!(f32_error(InverseVariant::RowSubstitution) < 1e-3);
}
