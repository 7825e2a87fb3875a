//! Seeded values for the inputs of a graph.

use std::collections::BTreeMap;

use ndarray::{ArrayD, IxDyn};
use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;

use super::real::Tensor;
use super::round::round_to;
use super::sweep::{elements, elements_mut};
use crate::graph::{Graph, Init, NodeId, Op, Table, TensorType};

/// Elements drawn by one task; even, because normals come in pairs.
const BLOCK: usize = 1 << 14;

/// Values for every input of `graph`, drawn as the input's [`Init`] says and rounded to its format, so that an exact and a declared
/// execution see the same; tables, which are no draw, are given in full.
///
/// Every input draws from a `ChaCha8` stream of its own (the stream number is its position among the inputs): values change
/// neither with the number of threads nor when an input is added behind it.
#[must_use]
pub fn seeded_inputs(graph: &Graph, seed: u64) -> BTreeMap<NodeId, Tensor<f64>> {
    let inputs = graph.inputs().enumerate();
    inputs
        .filter_map(|(stream, (id, node))| match node.op {
            Op::Input {
                init: Init::Table(table),
                ..
            } => Some((id, tabulate(&node.results[0], table))),
            Op::Input { init, .. } => Some((id, draw(&node.results[0], init, seed, stream as u64))),
            _ => None,
        })
        .collect()
}

/// The same values in f32: exact for every format but f64.
#[must_use]
pub fn to_f32(inputs: &BTreeMap<NodeId, Tensor<f64>>) -> BTreeMap<NodeId, Tensor<f32>> {
    inputs.iter().map(|(&id, tensor)| (id, narrow(tensor))).collect()
}

fn narrow(tensor: &Tensor<f64>) -> Tensor<f32> {
    if !tensor.is_standard_layout() {
        return tensor.mapv(|x| x as f32).into_shared();
    }
    let mut out = ArrayD::<f32>::zeros(tensor.raw_dim());
    let blocks = elements_mut(&mut out)
        .par_chunks_mut(BLOCK)
        .zip(elements(tensor).par_chunks(BLOCK));
    blocks.for_each(|(narrow, wide)| narrow.iter_mut().zip(wide).for_each(|(n, &w)| *n = w as f32));
    out.into_shared()
}

/// The values of a table in full: the rounding to its format is an error of the declared execution, not of the inputs.
#[must_use]
pub fn tabulate(ty: &TensorType, table: Table) -> Tensor<f64> {
    let dims = ty.shape.dims();
    let mut out = ArrayD::<f64>::zeros(IxDyn(dims));
    elements_mut(&mut out)
        .par_chunks_mut(BLOCK)
        .enumerate()
        .for_each(|(i, block)| {
            let mut index = vec![0; dims.len()];
            for (j, x) in block.iter_mut().enumerate() {
                let mut rest = i * BLOCK + j;
                for (slot, &extent) in index.iter_mut().zip(dims).rev() {
                    *slot = rest % extent;
                    rest /= extent;
                }
                *x = table.value(&index, dims);
            }
        });
    out.into_shared()
}

fn draw(ty: &TensorType, init: Init, seed: u64, stream: u64) -> Tensor<f64> {
    let mut out = ArrayD::<f64>::zeros(IxDyn(ty.shape.dims()));
    elements_mut(&mut out)
        .par_chunks_mut(BLOCK)
        .enumerate()
        .for_each(|(i, block)| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(stream);
            // Every element takes one 64-bit draw, two words of the stream.
            rng.set_word_pos((i * BLOCK * 2) as u128);
            fill(block, init, &mut rng);
            for x in block {
                *x = round_to(ty.dtype, *x);
            }
        });
    out.into_shared()
}

fn fill(block: &mut [f64], init: Init, rng: &mut ChaCha8Rng) {
    let mut between = |low: f64, high: f64| low + (high - low) * unit(rng);
    match init {
        // A table is no draw; it is made by its formula.
        Init::Zeros | Init::Table(_) => {}
        Init::Ones => block.fill(1.0),
        Init::Normal { std } => normals(block, std, rng),
        Init::Uniform { low, high } => block.iter_mut().for_each(|x| *x = between(low, high)),
        Init::LogUniform { low, high } => block.iter_mut().for_each(|x| *x = between(low, high).ln()),
        Init::TimeStepBias { low, high } => block.iter_mut().for_each(|x| {
            let step = between(low.ln(), high.ln()).exp();
            // Inverse of softplus: ln(e^step - 1), written so that small steps keep their digits.
            *x = step + (-(-step).exp_m1()).ln();
        }),
    }
}

/// Normals by the method of Box and Muller (1958), two from two uniforms.
fn normals(block: &mut [f64], std: f64, rng: &mut ChaCha8Rng) {
    for pair in block.chunks_mut(2) {
        let radius = std * (-2.0 * (1.0 - unit(rng)).ln()).sqrt();
        let (sine, cosine) = (std::f64::consts::TAU * unit(rng)).sin_cos();
        pair.iter_mut()
            .zip([radius * cosine, radius * sine])
            .for_each(|(x, normal)| *x = normal);
    }
}

/// Uniform in `[0, 1)`, the 53 high bits of one draw.
fn unit(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::graph::{Builder, Role, Stage};

    fn graph(inits: &[(Dtype, Init)], n: usize) -> Graph {
        let mut builder = Builder::new(Stage::Projections);
        for (dtype, init) in inits {
            builder.input("x", [n], *dtype, Role::Activation, *init);
        }
        builder.finish().unwrap()
    }

    fn values(graph: &Graph, seed: u64) -> Vec<Vec<f64>> {
        seeded_inputs(graph, seed)
            .values()
            .map(|t| t.iter().copied().collect())
            .collect()
    }

    #[test]
    fn moments_of_a_normal_and_a_uniform() {
        let n = 100_000;
        let drawn = values(
            &graph(
                &[
                    (Dtype::F32, Init::Normal { std: 2.0 }),
                    (Dtype::F32, Init::Uniform { low: 1.0, high: 3.0 }),
                ],
                n,
            ),
            7,
        );
        let mean = |v: &[f64]| v.iter().sum::<f64>() / n as f64;
        let moment = |v: &[f64], p: i32, m: f64| v.iter().map(|x| (x - m).powi(p)).sum::<f64>() / n as f64;
        // Four standard errors: 2/sqrt(n) of the mean; var sqrt(2/n) of the variance; kurtosis of a normal is 3 var^2.
        assert!(mean(&drawn[0]).abs() < 0.026);
        assert!((moment(&drawn[0], 2, 0.0) - 4.0).abs() < 0.072);
        assert!((moment(&drawn[0], 4, 0.0) / 48.0 - 1.0).abs() < 0.05);
        assert!((mean(&drawn[1]) - 2.0).abs() < 0.008);
        assert!((moment(&drawn[1], 2, 2.0) - 1.0 / 3.0).abs() < 0.004);
        assert!(drawn[1].iter().all(|x| (1.0..=3.0).contains(x)));
    }

    #[test]
    fn gate_parameters_invert_to_their_ranges() {
        let drawn = values(
            &graph(
                &[
                    (Dtype::F64, Init::LogUniform { low: 1.0, high: 16.0 }),
                    (
                        Dtype::F64,
                        Init::TimeStepBias {
                            low: 1e-3,
                            high: 1e-1,
                        },
                    ),
                ],
                5000,
            ),
            3,
        );
        assert!(
            drawn[0]
                .iter()
                .all(|x| (1.0 - 1e-12..=16.0 + 1e-12).contains(&x.exp()))
        );
        let steps: Vec<f64> = drawn[1].iter().map(|x| x.exp().ln_1p()).collect();
        assert!(steps.iter().all(|dt| (1e-3 - 1e-12..=1e-1 + 1e-12).contains(dt)));
        // Log-uniform: half of the steps lie below the geometric mean.
        let below = steps.iter().filter(|dt| **dt < 1e-2).count();
        assert!((2300..2700).contains(&below), "{below}");
    }

    #[test]
    fn streams_are_independent_of_each_other_and_of_threads() {
        let normal = Init::Normal { std: 1.0 };
        let one = values(&graph(&[(Dtype::F64, normal)], 50_001), 11);
        let two = values(&graph(&[(Dtype::F64, normal), (Dtype::F64, normal)], 50_001), 11);
        assert_eq!(one[0], two[0]);
        assert_ne!(two[0], two[1]);
        assert_ne!(one, values(&graph(&[(Dtype::F64, normal)], 50_001), 12));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(
            one,
            pool.install(|| values(&graph(&[(Dtype::F64, normal)], 50_001), 11))
        );
        // A longer input starts with the same values: the blocks of a stream follow one another without a gap.
        let longer = values(&graph(&[(Dtype::F64, normal)], 60_000), 11);
        assert_eq!(one[0][..50_000], longer[0][..50_000]);
    }

    #[test]
    fn values_are_rounded_to_the_format_of_the_input() {
        let drawn = seeded_inputs(&graph(&[(Dtype::Bf16, Init::Normal { std: 1.0 })], 1000), 1);
        let narrow = to_f32(&drawn);
        for (wide, narrow) in drawn.values().zip(narrow.values()) {
            for (w, n) in wide.iter().zip(narrow) {
                assert!((*w - f64::from(*n)).abs() < f64::MIN_POSITIVE && n.to_bits().trailing_zeros() >= 16);
            }
        }
    }
}
