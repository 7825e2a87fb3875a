//! Operations that only move elements.

use ndarray::{Axis, IxDyn, Slice};

use super::pool::Pool;
use super::real::{Real, Tensor};
use super::sweep::{Finish, Outcome, Tally, around, copy, elements, elements_mut, standard, sweep};
use crate::graph::{RowRun, Work};

/// The same elements in row-major order under another shape; free where the operand is row-major already.
pub(super) fn reshape<R: Real>(pool: &mut Pool<R>, a: Tensor<R>, dims: &[usize]) -> Outcome<R> {
    let reshaped = standard(pool, a)
        .into_shape_with_order(IxDyn(dims))
        .expect("the builder compared the elements");
    Outcome::moved(reshaped)
}

/// Dimensions in another order, as a view. Elements change lanes where the minor dimension moves.
pub(super) fn transpose<R: Real>(a: Tensor<R>, permutation: &[usize]) -> Outcome<R> {
    let minor_moves = permutation
        .last()
        .is_some_and(|&old| old + 1 != permutation.len());
    let value = a.permuted_axes(IxDyn(permutation));
    let cross_lane = if minor_moves { value.len() as u64 } else { 0 };
    Outcome {
        value,
        work: Work {
            cross_lane,
            ..Work::default()
        },
        non_finite: false,
    }
}

/// `length` elements of dimension `axis` from `start` on, copied so that the rest can be freed.
pub(super) fn slice<R: Real>(
    pool: &mut Pool<R>,
    mut a: Tensor<R>,
    axis: usize,
    start: usize,
    length: usize,
    finish: Finish,
) -> Outcome<R> {
    a.slice_axis_inplace(Axis(axis), Slice::from(start..start + length));
    let mut out = copy(pool, &a);
    pool.give(a);
    let tally = sweep(elements_mut(&mut out), 1, |_, block| Tally {
        count: 0,
        non_finite: finish.apply(block),
    });
    Outcome {
        value: out.into_shared(),
        work: Work::default(),
        non_finite: tally.non_finite,
    }
}

/// Operands one after the other along `axis`.
pub(super) fn concatenate<R: Real>(
    pool: &mut Pool<R>,
    parts: Vec<Tensor<R>>,
    axis: usize,
    dims: &[usize],
) -> Outcome<R> {
    let (_, extent, inner) = around(dims, axis);
    let mut out = pool.scratch(dims);
    let rows: Vec<(usize, &[R])> = parts
        .iter()
        .map(|p| (p.shape()[axis] * inner, elements(p)))
        .collect();
    sweep(elements_mut(&mut out), extent * inner, |offset, block| {
        let first = offset / (extent * inner);
        for (i, mut row) in block.chunks_exact_mut(extent * inner).enumerate() {
            for (length, part) in &rows {
                let (run, rest) = row.split_at_mut(*length);
                run.copy_from_slice(&part[(first + i) * length..][..*length]);
                row = rest;
            }
        }
        Tally::default()
    });
    for part in parts {
        pool.give(part);
    }
    Outcome::moved(out.into_shared())
}

/// Zeros after the end of `axis`, up to its extent in `dims`.
pub(super) fn pad<R: Real>(pool: &mut Pool<R>, a: Tensor<R>, axis: usize, dims: &[usize]) -> Outcome<R> {
    let (_, extent, inner) = around(dims, axis);
    let length = a.shape()[axis] * inner;
    let x = elements(&a);
    let mut out = pool.scratch(dims);
    sweep(elements_mut(&mut out), extent * inner, |offset, block| {
        let first = offset / (extent * inner);
        for (i, row) in block.chunks_exact_mut(extent * inner).enumerate() {
            let (kept, added) = row.split_at_mut(length);
            added.fill(R::zero());
            kept.copy_from_slice(&x[(first + i) * length..][..length]);
        }
        Tally::default()
    });
    pool.give(a);
    Outcome::moved(out.into_shared())
}

/// Runs of rows of `axis` one after the other, zeros where a run has no source.
pub(super) fn gather_rows<R: Real>(
    pool: &mut Pool<R>,
    a: Tensor<R>,
    axis: usize,
    runs: &[RowRun],
    dims: &[usize],
) -> Outcome<R> {
    let (_, extent, inner) = around(dims, axis);
    let rows = a.shape()[axis];
    let x = elements(&a);
    let mut out = pool.scratch(dims);
    sweep(elements_mut(&mut out), extent * inner, |offset, block| {
        let first = offset / (extent * inner).max(1);
        for (i, mut rest) in block.chunks_exact_mut((extent * inner).max(1)).enumerate() {
            let source = &x[(first + i) * rows * inner..][..rows * inner];
            for run in runs {
                let (part, tail) = rest.split_at_mut(run.rows * inner);
                match run.from {
                    Some(from) => part.copy_from_slice(&source[from * inner..][..run.rows * inner]),
                    None => part.fill(R::zero()),
                }
                rest = tail;
            }
        }
        Tally::default()
    });
    pool.give(a);
    Outcome::moved(out.into_shared())
}

/// Every element of the minor dimension repeated `times` times in place.
pub(super) fn repeat_minor<R: Real>(
    pool: &mut Pool<R>,
    a: Tensor<R>,
    times: usize,
    dims: &[usize],
    finish: Finish,
) -> Outcome<R> {
    let x = elements(&a);
    let mut out = pool.scratch(dims);
    let tally = sweep(elements_mut(&mut out), times, |offset, block| {
        let lanes = block.chunks_exact_mut(times.max(1));
        lanes
            .zip(&x[offset / times.max(1)..])
            .for_each(|(lane, &x)| lane.fill(x));
        Tally {
            count: block.len() as u64,
            non_finite: finish.apply(block),
        }
    });
    let work = Work {
        cross_lane: tally.count,
        ..Work::default()
    };
    pool.give(a);
    Outcome {
        value: out.into_shared(),
        work,
        non_finite: tally.non_finite,
    }
}
