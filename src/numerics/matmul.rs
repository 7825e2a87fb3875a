//! Batched matrix products with f32 (or f64) accumulation, and the bf16 decompositions of f32 operands.

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayView3, ArrayViewD, ArrayViewMut2, Axis, Ix2, Ix3, IxDyn, Slice};

use super::pool::Pool;
use super::real::{Real, Tensor};
use super::sweep::{Finish, Outcome, Tally, blocks, copy, elements_mut, sweep};
use crate::dtype::Dtype;
use crate::graph::work::PerDtype;
use crate::graph::{Precision, Work, matmul_dtype};

/// Rows of the result that one task computes at least, to pay for packing the second operand again.
const ROWS: usize = 256;

/// Tasks that the rows of a tall product are cut into at most, whatever the number of threads.
const STRIPS: usize = 16;

/// Multiply-adds below which a product is not worth a second thread.
const SERIAL: usize = 1 << 17;

/// How the operands are stored and multiplied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    /// Formats of the operands.
    pub(super) dtypes: (Dtype, Dtype),
    /// Which operands are stored with their last two dimensions swapped.
    pub(super) transposed: (bool, bool),
    /// Passes of f32 operands; `None` multiplies in the machine format.
    pub(super) precision: Option<Precision>,
}

/// The batched product of `a` and `b`, of shape `dims`.
///
/// Decomposed products count as the one product they stand for.
pub(super) fn matmul<R: Real>(
    pool: &mut Pool<R>,
    product: Product,
    a: Tensor<R>,
    b: Tensor<R>,
    dims: &[usize],
    finish: Finish,
) -> Outcome<R> {
    let format = matmul_dtype(product.dtypes.0, product.dtypes.1);
    let passes = product
        .precision
        .filter(|_| format == Dtype::F32)
        .map(|p| match p {
            Precision::Default => 1,
            Precision::High => 2,
            Precision::Highest => 3,
        });
    let mut operand = |t: Tensor<R>, dtype: Dtype, swapped: bool| -> Vec<Tensor<R>> {
        let mut parts = match passes {
            Some(n) if dtype == Dtype::F32 => pieces(pool, t, n),
            _ => vec![t],
        };
        if swapped {
            for part in &mut parts {
                let rank = part.ndim();
                part.swap_axes(rank - 2, rank - 1);
            }
        }
        parts
    };
    let mut left = operand(a, product.dtypes.0, product.transposed.0);
    let mut right = operand(b, product.dtypes.1, product.transposed.1);
    let (mut m, n) = (dims[dims.len() - 2], dims[dims.len() - 1]);
    let k = left[0].shape()[left[0].ndim() - 1];
    let mut batch = batch_of(dims);

    // One weight matrix for all batches: their rows are the rows of one tall product.
    let all_rows = dims[..dims.len() - 1].iter().product();
    if right[0].len() == k * n
        && left
            .iter()
            .all(|t| t.is_standard_layout() && t.len() == all_rows * k)
    {
        (m, batch) = (all_rows, &[]);
        let tall = |t: Tensor<R>| t.into_shape_with_order(IxDyn(&[m, k])).expect("same elements");
        left = left.into_iter().map(tall).collect();
        for part in &mut right {
            while part.ndim() > 2 {
                *part = part.clone().index_axis_move(Axis(0), 0);
            }
        }
    }
    let a: Vec<Matrices<R>> = left.iter().map(|t| Matrices::new(t.view(), batch)).collect();
    let b: Vec<Matrices<R>> = right.iter().map(|t| Matrices::new(t.view(), batch)).collect();
    let terms = terms(a.len(), b.len(), passes.unwrap_or(1));

    let mut out = pool.scratch(dims);
    let parallel = out.len() * k > SERIAL;
    let strip = ROWS.max(m.div_ceil(STRIPS));
    let tally = blocks(elements_mut(&mut out), m * n, parallel, |i, matrix| {
        let a: Vec<ArrayView2<R>> = a.iter().map(|t| t.get(i)).collect();
        let b: Vec<ArrayView2<R>> = b.iter().map(|t| t.get(i)).collect();
        blocks(matrix, strip * n, parallel && m > strip, |j, rows| {
            let height = rows.len() / n;
            let first = j * strip;
            let mut c = ArrayViewMut2::from_shape((height, n), &mut *rows).expect("whole rows");
            for (term, &(p, q)) in terms.iter().enumerate() {
                let part = a[p].slice_axis(Axis(0), Slice::from(first..first + height));
                let keep = if term == 0 { R::zero() } else { R::one() };
                general_mat_mul(R::one(), &part, &b[q], keep, &mut c);
            }
            Tally {
                count: 2 * (height * n * k) as u64,
                non_finite: finish.apply(rows),
            }
        })
    });
    for spent in left.into_iter().chain(right) {
        pool.give(spent);
    }
    let work = Work {
        matrix_flops: PerDtype::of(format, tally.count),
        ..Work::default()
    };
    Outcome {
        value: out.into_shared(),
        work,
        non_finite: tally.non_finite,
    }
}

/// The leading dimensions of a batch of matrices.
pub(super) fn batch_of(dims: &[usize]) -> &[usize] {
    &dims[..dims.len() - 2]
}

/// `t` as a sum of `n` tensors of bf16 values, largest first. What is left beyond a piece that is not finite is zero.
fn pieces<R: Real>(pool: &mut Pool<R>, t: Tensor<R>, n: usize) -> Vec<Tensor<R>> {
    // Rounding in memory order keeps a transposed operand transposed; anything else becomes row-major.
    let mut order: Vec<usize> = (0..t.ndim()).collect();
    order.sort_by_key(|&axis| std::cmp::Reverse(t.strides()[axis]));
    let mut inverse = vec![0; order.len()];
    order
        .iter()
        .enumerate()
        .for_each(|(new, &old)| inverse[old] = new);
    let t = t.permuted_axes(order);
    let mut rest = copy(pool, &t);
    pool.give(t);
    let mut pieces = Vec::with_capacity(n);
    for _ in 1..n {
        let mut piece = pool.scratch(rest.shape());
        let source = elements_mut(&mut rest);
        sweep(elements_mut(&mut piece), 1, |offset, block| {
            block.copy_from_slice(&source[offset..offset + block.len()]);
            R::round_slice(Dtype::Bf16, block);
            Tally::default()
        });
        let high = elements_mut(&mut piece);
        sweep(source, 1, |offset, block| {
            block.iter_mut().zip(&high[offset..]).for_each(|(x, &h)| {
                *x = if h.is_finite() { *x - h } else { R::zero() };
            });
            Tally::default()
        });
        pieces.push(piece);
    }
    round_bf16(elements_mut(&mut rest));
    pieces.push(rest);
    pieces
        .into_iter()
        .map(|piece| piece.into_shared().permuted_axes(inverse.clone()))
        .collect()
}

fn round_bf16<R: Real>(values: &mut [R]) {
    sweep(values, 1, |_, block| {
        R::round_slice(Dtype::Bf16, block);
        Tally::default()
    });
}

/// Which pieces are multiplied: those whose product is not below the last kept place, smallest first so that little is lost.
fn terms(a: usize, b: usize, pieces: usize) -> Vec<(usize, usize)> {
    let mut terms: Vec<(usize, usize)> = (0..a)
        .flat_map(|p| (0..b).map(move |q| (p, q)))
        .filter(|(p, q)| p + q < pieces)
        .collect();
    terms.sort_by_key(|&(p, q)| std::cmp::Reverse(p + q));
    terms
}

/// The matrices of one operand, found by their position in the batch of the result.
pub(super) struct Matrices<'a, R> {
    /// Extents of the batch of the result, and what a step along them moves in the matrices of the operand (0 where it repeats).
    steps: Vec<(usize, usize)>,
    source: Source<'a, R>,
}

enum Source<'a, R> {
    /// Leading dimensions merged into one.
    Merged(ArrayView3<'a, R>),
    /// Leading dimensions that do not merge, with their extents.
    Separate(ArrayViewD<'a, R>),
}

impl<'a, R: Real> Matrices<'a, R> {
    /// `operand [.., r, c]` under the leading dimensions `batch`.
    pub(super) fn new(operand: ArrayViewD<'a, R>, batch: &[usize]) -> Self {
        let own = batch_of(operand.shape()).to_vec();
        let mut steps = Vec::with_capacity(batch.len());
        let mut step = 1;
        for (i, &extent) in batch.iter().rev().enumerate() {
            let mine = if i < own.len() { own[own.len() - 1 - i] } else { 1 };
            steps.push((extent, if mine == 1 { 0 } else { step }));
            step *= mine;
        }
        Matrices {
            steps,
            source: merge(operand, &own),
        }
    }

    /// The matrix at position `index` of the batch, counted in row-major order.
    pub(super) fn get(&self, index: usize) -> ArrayView2<'_, R> {
        let (mut rest, mut position) = (index, 0);
        for &(extent, step) in &self.steps {
            position += rest % extent * step;
            rest /= extent;
        }
        match &self.source {
            Source::Merged(matrices) => matrices.index_axis(Axis(0), position),
            Source::Separate(all) => {
                let mut view = all.view();
                for axis in (0..all.ndim() - 2).rev() {
                    let extent = all.shape()[axis];
                    view = view.index_axis_move(Axis(axis), position % extent);
                    position /= extent;
                }
                view.into_dimensionality::<Ix2>()
                    .expect("two dimensions are left")
            }
        }
    }
}

/// Merges the leading dimensions of a view where their strides allow it.
fn merge<'a, R: Real>(mut view: ArrayViewD<'a, R>, own: &[usize]) -> Source<'a, R> {
    if own.is_empty() {
        view.insert_axis_inplace(Axis(0));
    } else {
        for axis in (1..own.len()).rev() {
            if !view.merge_axes(Axis(axis - 1), Axis(axis)) {
                return Source::Separate(view);
            }
            // The merged extent stands at `axis`; a dimension of extent 1 is left at `axis - 1`.
            view = view.index_axis_move(Axis(axis - 1), 0);
        }
    }
    match view.clone().into_dimensionality::<Ix3>() {
        Ok(matrices) => Source::Merged(matrices),
        Err(_) => Source::Separate(view),
    }
}
