//! Operations with a dependence along rows: causal convolution, substitution, Cholesky factor.

use super::elementwise::over;
use super::matmul::{Matrices, batch_of};
use super::pool::Pool;
use super::real::{Real, Tensor};
use super::sweep::{Finish, Outcome, Tally, blocks, elements, elements_mut, sweep};
use crate::graph::Work;
use crate::graph::work::PerDtype;

fn vector_work(finish: Finish, count: u64) -> Work {
    Work {
        vector_ops: PerDtype::of(finish.dtype, count),
        ..Work::default()
    }
}

/// `y[t] = sum_j w[j] x[t - width + 1 + j]`, channel by channel. Rows before a sequence are those of `history` or zero (kernels of the short
/// convolution multiply their zero halo like any row, and so does this one).
pub(super) fn causal_convolution<R: Real>(
    pool: &mut Pool<R>,
    (x, taps, history): (Tensor<R>, Tensor<R>, Option<Tensor<R>>),
    starts: &[usize],
    finish: Finish,
) -> Outcome<R> {
    let rank = x.ndim();
    let (tokens, channels) = (x.shape()[rank - 2], x.shape()[rank - 1]);
    let width = taps.shape()[0];
    let (rows, weights) = (elements(&x), elements(&taps));
    let before = history.as_ref().map(elements);
    let zero_row = vec![R::zero(); channels];
    let mut out = pool.scratch(x.shape());
    let tally = sweep(elements_mut(&mut out), channels, |offset, block| {
        let first = offset / channels.max(1);
        let mut count = 0;
        for (i, y) in block.chunks_exact_mut(channels.max(1)).enumerate() {
            let row = first + i;
            let (batch, token) = (row / tokens, row % tokens);
            let start = match starts.partition_point(|&start| start <= token) {
                0 => 0,
                after => starts[after - 1],
            };
            if width == 0 {
                y.fill(R::zero());
            }
            for j in 0..width {
                let back = width - 1 - j;
                let source = if start + back <= token {
                    &rows[(row - back) * channels..][..channels]
                } else if let Some(before) = before {
                    &before[(batch * (width - 1) + token + width - 1 - back) * channels..][..channels]
                } else {
                    &zero_row
                };
                let tap = &weights[j * channels..][..channels];
                let terms = y.iter_mut().zip(source.iter().zip(tap));
                if j == 0 {
                    terms.for_each(|(y, (&x, &w))| *y = x * w);
                    count += channels as u64;
                } else {
                    terms.for_each(|(y, (&x, &w))| *y += x * w);
                    count += 2 * channels as u64;
                }
            }
        }
        Tally {
            count,
            non_finite: finish.apply(block),
        }
    });
    for spent in [Some(x), Some(taps), history].into_iter().flatten() {
        pool.give(spent);
    }
    Outcome {
        value: out.into_shared(),
        work: vector_work(finish, tally.count),
        non_finite: tally.non_finite,
    }
}

/// `X = (I + L)^-1 B`, `X[r] = B[r] - sum_{i < r} L[r, i] X[i]`, or, with the transpose, `X = (I + L)^-T B`,
/// `X[r] = B[r] - sum_{i > r} L[i, r] X[i]`; leading dimensions broadcast to those of `dims`. Several systems may stand side by side, the columns of
/// each in its part of those of `B`.
pub(super) fn substitution<R: Real>(
    pool: &mut Pool<R>,
    l: Tensor<R>,
    b: Tensor<R>,
    dims: &[usize],
    transposed: bool,
    finish: Finish,
) -> Outcome<R> {
    let (n, width) = (dims[dims.len() - 2], dims[dims.len() - 1]);
    let side_by_side = (l.shape()[l.ndim() - 1] / n.max(1)).max(1);
    let part = (width / side_by_side).max(1);
    let systems = Matrices::new(l.view(), batch_of(dims));
    let (mut out, source) = if b.shape() == dims {
        over(pool, b)
    } else {
        (pool.scratch(dims), Some(b))
    };
    let sides = source.as_ref().map(|b| Matrices::new(b.view(), batch_of(dims)));
    let parallel = out.len() * n > 1 << 16;
    let tally = blocks(elements_mut(&mut out), n * width, parallel, |i, x| {
        if let Some(sides) = &sides {
            for (row, b) in x.chunks_exact_mut(width.max(1)).zip(sides.get(i).rows()) {
                row.iter_mut().zip(b).for_each(|(x, &b)| *x = b);
            }
        }
        let l = systems.get(i);
        let mut count = 0;
        // The coefficient at `row`, `column` of each system.
        let mut eliminate = |x: &mut [R], known: &[R], row: usize, column: usize| {
            let parts = x.chunks_mut(part).zip(known.chunks(part));
            for (system, (x, known)) in parts.enumerate() {
                let factor = l[[row, system * n + column]];
                x.iter_mut().zip(known).for_each(|(x, &k)| *x -= factor * k);
            }
            count += 2 * width as u64;
        };
        for step in 1..n {
            if transposed {
                let r = n - 1 - step;
                let (rest, solved) = x.split_at_mut((r + 1) * width);
                for (i, known) in solved.chunks_exact(width.max(1)).enumerate() {
                    eliminate(&mut rest[r * width..], known, r + 1 + i, r);
                }
            } else {
                let (solved, rest) = x.split_at_mut(step * width);
                for (i, known) in solved.chunks_exact(width.max(1)).enumerate() {
                    eliminate(&mut rest[..width], known, step, i);
                }
            }
        }
        Tally {
            count,
            non_finite: finish.apply(x),
        }
    });
    pool.give(l);
    Outcome {
        value: out.into_shared(),
        work: vector_work(finish, tally.count),
        non_finite: tally.non_finite,
    }
}

/// The lower Cholesky factor of every matrix, right-looking, in place; zeros above the diagonal. A matrix that is not positive
/// definite gives NaN from its first bad pivot on.
pub(super) fn cholesky<R: Real>(pool: &mut Pool<R>, a: Tensor<R>, finish: Finish) -> Outcome<R> {
    let n = a.shape()[a.ndim() - 1];
    let (mut out, source) = over(pool, a);
    let parallel = out.len() * n > 1 << 16;
    let pivots = std::sync::atomic::AtomicU64::new(0);
    let tally = blocks(elements_mut(&mut out), n * n, parallel, |i, m| {
        if let Some(source) = &source {
            m.copy_from_slice(&elements(source)[i * n * n..][..n * n]);
        }
        let (mut count, mut roots) = (0, 0);
        for j in 0..n {
            let inverse = m[j * n + j].sqrt().recip();
            roots += 1;
            for i in j..n {
                m[i * n + j] *= inverse;
                count += 1;
            }
            m[j * n + j + 1..(j + 1) * n].fill(R::zero());
            for i in j + 1..n {
                for k in j + 1..=i {
                    m[i * n + k] -= m[i * n + j] * m[k * n + j];
                    count += 2;
                }
            }
        }
        pivots.fetch_add(roots, std::sync::atomic::Ordering::Relaxed);
        Tally {
            count,
            non_finite: finish.apply(m),
        }
    });
    Outcome {
        value: out.into_shared(),
        work: Work {
            transcendentals: pivots.into_inner(),
            ..vector_work(finish, tally.count)
        },
        non_finite: tally.non_finite,
    }
}
