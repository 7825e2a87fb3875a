//! Reductions and cumulative sums. Both accumulate in the machine format and round their results once.

use super::elementwise::{maximum, over};
use super::pool::Pool;
use super::real::{Real, Tensor};
use super::sweep::{Finish, Outcome, Tally, around, blocks, elements, elements_mut, sweep};
use crate::graph::work::PerDtype;
use crate::graph::{ReduceFunction, Work};

/// Input elements of one block of a reduction.
const BLOCK: usize = 1 << 14;

/// Sum or maximum along `axis`, which is kept with extent 1.
pub(super) fn reduce<R: Real>(
    pool: &mut Pool<R>,
    function: ReduceFunction,
    axis: usize,
    a: Tensor<R>,
    finish: Finish,
) -> Outcome<R> {
    match function {
        ReduceFunction::Sum => fold(pool, axis, a, finish, R::zero(), |x, y| x + y),
        ReduceFunction::Maximum => fold(pool, axis, a, finish, R::neg_infinity(), maximum),
    }
}

fn fold<R: Real>(
    pool: &mut Pool<R>,
    axis: usize,
    a: Tensor<R>,
    finish: Finish,
    start: R,
    f: impl Fn(R, R) -> R + Sync,
) -> Outcome<R> {
    let (_, extent, inner) = around(a.shape(), axis);
    let mut dims = a.shape().to_vec();
    dims[axis] = 1;
    let x = elements(&a);
    let mut out = pool.scratch(&dims);
    let length = (BLOCK / extent.max(1)).max(1);
    let tally = blocks(elements_mut(&mut out), length, x.len() > BLOCK, |i, block| {
        let mut count = 0;
        if inner == 1 {
            for (row, result) in block.iter_mut().enumerate() {
                let lane = &x[(i * length + row) * extent..][..extent];
                *result = fold_lane(lane, start, &f);
                count += lane.len() as u64;
            }
        } else {
            let (mut at, mut rest) = (i * length, &mut *block);
            while !rest.is_empty() {
                let (outer, column) = (at / inner, at % inner);
                let width = (inner - column).min(rest.len());
                let (run, tail) = rest.split_at_mut(width);
                run.fill(start);
                for row in 0..extent {
                    let source = &x[(outer * extent + row) * inner + column..][..width];
                    run.iter_mut().zip(source).for_each(|(r, &x)| *r = f(*r, x));
                    count += width as u64;
                }
                at += width;
                rest = tail;
            }
        }
        Tally {
            count,
            non_finite: finish.apply(block),
        }
    });
    let lanes = if axis + 1 == a.ndim() { tally.count } else { 0 };
    let work = Work {
        vector_ops: PerDtype::of(finish.dtype, tally.count),
        cross_lane: lanes,
        ..Work::default()
    };
    pool.give(a);
    Outcome {
        value: out.into_shared(),
        work,
        non_finite: tally.non_finite,
    }
}

/// Eight interleaved partial results, joined pairwise: fast, and closer to the tree a lane reduction is than a running sum.
fn fold_lane<R: Real>(lane: &[R], start: R, f: impl Fn(R, R) -> R) -> R {
    let mut partial = [start; 8];
    let whole = lane.chunks_exact(8);
    let rest = whole.remainder();
    for eight in whole {
        partial.iter_mut().zip(eight).for_each(|(p, &x)| *p = f(*p, x));
    }
    partial.iter_mut().zip(rest).for_each(|(p, &x)| *p = f(*p, x));
    let [a, b, c, d, e, g, h, i] = partial;
    f(f(f(a, b), f(c, d)), f(f(e, g), f(h, i)))
}

/// Inclusive cumulative sum along `axis`, first to last.
pub(super) fn cumulative_sum<R: Real>(
    pool: &mut Pool<R>,
    axis: usize,
    a: Tensor<R>,
    finish: Finish,
) -> Outcome<R> {
    let (_, extent, inner) = around(a.shape(), axis);
    let (mut out, source) = over(pool, a);
    let tally = sweep(elements_mut(&mut out), extent * inner, |offset, block| {
        if let Some(source) = &source {
            block.copy_from_slice(&elements(source)[offset..offset + block.len()]);
        }
        let mut count = 0;
        for column in block.chunks_exact_mut(extent * inner) {
            for row in 1..extent {
                let (before, after) = column.split_at_mut(row * inner);
                let previous = &before[(row - 1) * inner..];
                after.iter_mut().zip(previous).for_each(|(x, &p)| *x += p);
                count += previous.len() as u64;
            }
        }
        Tally {
            count,
            non_finite: finish.apply(block),
        }
    });
    let work = Work {
        vector_ops: PerDtype::of(finish.dtype, tally.count),
        ..Work::default()
    };
    Outcome {
        value: out.into_shared(),
        work,
        non_finite: tally.non_finite,
    }
}
