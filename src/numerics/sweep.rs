//! Going over a result in blocks: in parallel where it is large, rounded and checked while the block is in cache.

use ndarray::{ArrayD, ArrayViewMut, Axis};
use rayon::prelude::*;

use super::pool::Pool;
use super::real::{Real, Tensor};
use crate::dtype::Dtype;
use crate::graph::Work;

/// Elements of a block: three f32 operands of one block stay in a first-level cache.
const BLOCK: usize = 1 << 12;

/// Elements below which starting threads costs more than it gains.
const SERIAL: usize = 1 << 15;

/// What a kernel hands back.
pub(super) struct Outcome<R> {
    /// The result.
    pub(super) value: Tensor<R>,
    /// What was executed.
    pub(super) work: Work,
    /// Whether the result holds a NaN or an infinity that nobody asked for.
    pub(super) non_finite: bool,
}

impl<R: Real> Outcome<R> {
    /// A result that took no arithmetic and is not checked.
    pub(super) fn moved(value: Tensor<R>) -> Self {
        Outcome {
            value,
            work: Work::default(),
            non_finite: false,
        }
    }
}

/// What was done to one block.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tally {
    /// Operations executed, in the unit of the kernel.
    pub(super) count: u64,
    /// Whether a result is not finite.
    pub(super) non_finite: bool,
}

impl Tally {
    pub(super) fn merge(self, other: Tally) -> Tally {
        Tally {
            count: self.count + other.count,
            non_finite: self.non_finite || other.non_finite,
        }
    }
}

/// What happens to every block of a result after it was computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Finish {
    /// Format of the result.
    pub(super) dtype: Dtype,
    /// Whether results are rounded to it.
    pub(super) round: bool,
    /// Whether minus infinity counts as a failure: a mask may fill with it, a product never should produce it.
    pub(super) minus_infinity_fails: bool,
}

impl Finish {
    /// Rounds the block and says whether it holds a value that counts as a failure.
    pub(super) fn apply<R: Real>(self, block: &mut [R]) -> bool {
        if self.round {
            R::round_slice(self.dtype, block);
        }
        self.fails(block)
    }

    /// Whether the block holds a value that counts as a failure.
    pub(super) fn fails<R: Real>(self, block: &[R]) -> bool {
        if R::all_finite(block) {
            return false;
        }
        block
            .iter()
            .any(|x| !x.is_finite() && (self.minus_infinity_fails || *x != R::neg_infinity()))
    }
}

/// Calls `f(offset, block)` on blocks of about [`BLOCK`] elements, each a multiple of `unit`. The cut does not depend on the number of
/// threads, and the tallies are sums and ors, so neither does the result.
pub(super) fn sweep<R, F>(out: &mut [R], unit: usize, f: F) -> Tally
where
    R: Real,
    F: Fn(usize, &mut [R]) -> Tally + Sync,
{
    let unit = unit.max(1);
    let length = unit * (BLOCK / unit).max(1);
    let parallel = out.len() > SERIAL;
    blocks(out, length, parallel, |i, block| f(i * length, block))
}

/// Calls `f(index, block)` on consecutive blocks of `length` elements.
pub(super) fn blocks<R, F>(out: &mut [R], length: usize, parallel: bool, f: F) -> Tally
where
    R: Real,
    F: Fn(usize, &mut [R]) -> Tally + Sync,
{
    let length = length.max(1);
    if parallel {
        out.par_chunks_mut(length)
            .enumerate()
            .map(|(i, block)| f(i, block))
            .reduce(Tally::default, Tally::merge)
    } else {
        out.chunks_mut(length)
            .enumerate()
            .map(|(i, block)| f(i, block))
            .fold(Tally::default(), Tally::merge)
    }
}

/// Calls `f` on consecutive blocks of elements that are only read.
pub(super) fn visit<R: Real>(elements: &[R], f: impl Fn(&[R]) -> Tally + Sync + Send) -> Tally {
    elements
        .par_chunks(SERIAL)
        .map(f)
        .reduce(Tally::default, Tally::merge)
}

/// The elements of an array that the caller made in standard layout.
pub(super) fn elements_mut<R: Real>(array: &mut ArrayD<R>) -> &mut [R] {
    array.as_slice_mut().expect("made in standard layout")
}

/// The elements of an operand that the executor brought into standard layout.
pub(super) fn elements<R: Real>(tensor: &Tensor<R>) -> &[R] {
    tensor.as_slice().expect("operands are in standard layout")
}

/// The tensor in row-major order without gaps; copied only where it is not.
pub(super) fn standard<R: Real>(pool: &mut Pool<R>, tensor: Tensor<R>) -> Tensor<R> {
    if tensor.is_standard_layout() {
        return tensor;
    }
    let out = copy(pool, &tensor).into_shared();
    pool.give(tensor);
    out
}

/// A row-major copy, in parallel over the first dimension that has an extent.
pub(super) fn copy<R: Real>(pool: &mut Pool<R>, tensor: &Tensor<R>) -> ArrayD<R> {
    let dims = tensor.shape();
    let mut out = pool.scratch(dims);
    let Some(axis) = dims.iter().position(|&d| d > 1).filter(|_| out.len() > SERIAL) else {
        out.assign(tensor);
        return out;
    };
    let length = out.len() / dims[axis];
    blocks(elements_mut(&mut out), length, true, |i, block| {
        let mut part = tensor.view();
        for _ in 0..axis {
            part = part.index_axis_move(Axis(0), 0);
        }
        let part = part.index_axis_move(Axis(0), i);
        let mut block = ArrayViewMut::from_shape(part.raw_dim(), block).expect("a block is one part");
        block.assign(&part);
        Tally::default()
    });
    out
}

/// Extents before, at and after `axis`.
pub(super) fn around(dims: &[usize], axis: usize) -> (usize, usize, usize) {
    (
        dims[..axis].iter().product(),
        dims[axis],
        dims[axis + 1..].iter().product(),
    )
}
