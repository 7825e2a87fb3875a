//! Operations with a dependence along rows: causal convolution and forward substitution.

use super::elementwise::over;
use super::matmul::{Matrices, batch_of};
use super::real::{Real, Tensor};
use super::sweep::{Finish, Outcome, Tally, blocks, elements, elements_mut, sweep, zeros};
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
    x: &Tensor<R>,
    taps: &Tensor<R>,
    history: Option<&Tensor<R>>,
    starts: &[usize],
    finish: Finish,
) -> Outcome<R> {
    let rank = x.ndim();
    let (tokens, channels) = (x.shape()[rank - 2], x.shape()[rank - 1]);
    let width = taps.shape()[0];
    let (rows, taps) = (elements(x), elements(taps));
    let history = history.map(elements);
    let zero_row = vec![R::zero(); channels];
    let mut out = zeros(x.shape());
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
            for j in 0..width {
                let back = width - 1 - j;
                let source = if start + back <= token {
                    &rows[(row - back) * channels..][..channels]
                } else if let Some(history) = history {
                    &history[(batch * (width - 1) + token + width - 1 - back) * channels..][..channels]
                } else {
                    &zero_row
                };
                let tap = &taps[j * channels..][..channels];
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
    Outcome {
        value: out.into_shared(),
        work: vector_work(finish, tally.count),
        non_finite: tally.non_finite,
    }
}

/// `X = (I + L)^-1 B`, `X[r] = B[r] - sum_{i < r} L[r, i] X[i]`; leading dimensions broadcast to those of `dims`.
pub(super) fn forward_substitution<R: Real>(
    l: &Tensor<R>,
    b: Tensor<R>,
    dims: &[usize],
    finish: Finish,
) -> Outcome<R> {
    let (n, width) = (dims[dims.len() - 2], dims[dims.len() - 1]);
    let systems = Matrices::new(l.view(), batch_of(dims));
    let (mut out, source) = if b.shape() == dims {
        over(b)
    } else {
        (zeros(dims), Some(b))
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
        for r in 1..n {
            let (solved, rest) = x.split_at_mut(r * width);
            let row = &mut rest[..width];
            for (i, known) in solved.chunks_exact(width.max(1)).enumerate() {
                let factor = l[[r, i]];
                row.iter_mut().zip(known).for_each(|(x, &k)| *x -= factor * k);
                count += 2 * width as u64;
            }
        }
        Tally {
            count,
            non_finite: finish.apply(x),
        }
    });
    Outcome {
        value: out.into_shared(),
        work: vector_work(finish, tally.count),
        non_finite: tally.non_finite,
    }
}
