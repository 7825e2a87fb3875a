//! Scalar functions with broadcasting, casts and masks.

use ndarray::ArrayD;

use super::pool::Pool;
use super::real::{Real, Tensor};
use super::sweep::{Finish, Outcome, Tally, elements, elements_mut, sweep, visit};
use crate::graph::work::PerDtype;
use crate::graph::{Function, Mask, Visibility, Work};

/// What one evaluation of the expression written beside it takes on a vector unit.
#[derive(Clone, Copy)]
struct Cost {
    vector: u64,
    transcendental: u64,
}

/// A vector operation.
const VECTOR: Cost = Cost {
    vector: 1,
    transcendental: 0,
};
/// A transcendental operation.
const TRANSCENDENTAL: Cost = Cost {
    vector: 0,
    transcendental: 1,
};

impl Cost {
    fn work(self, finish: Finish, evaluations: u64) -> Work {
        Work {
            vector_ops: PerDtype::of(finish.dtype, self.vector * evaluations),
            transcendentals: self.transcendental * evaluations,
            ..Work::default()
        }
    }
}

/// A function of one operand, element by element.
pub(super) fn map<R: Real>(
    pool: &mut Pool<R>,
    function: Function,
    a: Tensor<R>,
    finish: Finish,
) -> Option<Outcome<R>> {
    let (zero, one) = (R::zero(), R::one());
    let constant = |c: f64| R::from_f64(c);
    Some(match function {
        Function::Abs => unary(pool, a, finish, VECTOR, R::abs),
        Function::AddConstant(c) => {
            let c = constant(c);
            unary(pool, a, finish, VECTOR, move |x| x + c)
        }
        Function::MultiplyConstant(c) => {
            let c = constant(c);
            unary(pool, a, finish, VECTOR, move |x| x * c)
        }
        Function::MaximumConstant(c) => {
            let c = constant(c);
            unary(pool, a, finish, VECTOR, move |x| maximum(x, c))
        }
        Function::MinimumConstant(c) => {
            let c = constant(c);
            unary(pool, a, finish, VECTOR, move |x| minimum(x, c))
        }
        Function::Exp => unary(pool, a, finish, TRANSCENDENTAL, R::exponential),
        Function::Log => unary(pool, a, finish, TRANSCENDENTAL, R::ln),
        Function::Reciprocal => unary(pool, a, finish, TRANSCENDENTAL, R::recip),
        Function::ReciprocalSqrt => unary(pool, a, finish, TRANSCENDENTAL, |x| x.sqrt().recip()),
        Function::Tanh => unary(pool, a, finish, TRANSCENDENTAL, R::tanh),
        // Negation and add; exponential and reciprocal.
        Function::Sigmoid => unary(
            pool,
            a,
            finish,
            Cost {
                vector: 2,
                transcendental: 2,
            },
            sigmoid,
        ),
        // One multiply more.
        Function::Silu => unary(
            pool,
            a,
            finish,
            Cost {
                vector: 3,
                transcendental: 2,
            },
            |x| x * sigmoid(x),
        ),
        // Absolute value (with its sign in the exponential), add, maximum, add; exponential and logarithm.
        Function::Softplus => unary(
            pool,
            a,
            finish,
            Cost {
                vector: 4,
                transcendental: 2,
            },
            move |x| maximum(x, zero) + (-x.abs()).exponential().ln_1p(),
        ),
        Function::NonZeroOr1 => unary(pool, a, finish, VECTOR, move |x| if x == zero { one } else { x }),
        Function::Add | Function::Subtract | Function::Multiply | Function::Maximum | Function::Minimum => {
            return None;
        }
    })
}

/// A function of two operands with broadcasting to `dims`.
pub(super) fn zip<R: Real>(
    pool: &mut Pool<R>,
    function: Function,
    a: Tensor<R>,
    b: Tensor<R>,
    dims: &[usize],
    finish: Finish,
) -> Option<Outcome<R>> {
    Some(match function {
        Function::Add => binary(pool, a, b, dims, finish, |x, y| x + y),
        Function::Subtract => binary(pool, a, b, dims, finish, |x, y| x - y),
        Function::Multiply => binary(pool, a, b, dims, finish, |x, y| x * y),
        Function::Maximum => binary(pool, a, b, dims, finish, maximum),
        Function::Minimum => binary(pool, a, b, dims, finish, minimum),
        _ => return None,
    })
}

/// Rounding to the format of `finish`: one vector operation per element. Where nothing is rounded the result shares the storage of `a`.
pub(super) fn cast<R: Real>(pool: &mut Pool<R>, a: Tensor<R>, finish: Finish) -> Outcome<R> {
    if finish.round {
        return unary(pool, a, finish, VECTOR, |x| x);
    }
    let tally = visit(elements(&a), |block| Tally {
        count: block.len() as u64,
        non_finite: finish.fails(block),
    });
    Outcome {
        value: a,
        work: VECTOR.work(finish, tally.count),
        non_finite: tally.non_finite,
    }
}

#[inline]
fn sigmoid<R: Real>(x: R) -> R {
    (R::one() + (-x).exponential()).recip()
}

/// The larger one; NaN if one is NaN, unlike `f64::max`.
#[inline]
pub(super) fn maximum<R: Real>(a: R, b: R) -> R {
    if a > b || a.is_nan() { a } else { b }
}

/// The smaller one; NaN if one is NaN.
#[inline]
fn minimum<R: Real>(a: R, b: R) -> R {
    if a < b || a.is_nan() { a } else { b }
}

/// The storage of `tensor` if nobody else reads it, to write the result over it.
pub(super) fn reuse<R: Real>(tensor: Tensor<R>) -> Result<ArrayD<R>, Tensor<R>> {
    match tensor.try_into_owned_nocopy() {
        Ok(array) if array.is_standard_layout() => Ok(array),
        Ok(array) => Err(array.into_shared()),
        Err(shared) => Err(shared),
    }
}

/// Storage for a result of the shape of `a`: its own where nobody else reads it, else other, with `a` to be copied from.
pub(super) fn over<R: Real>(pool: &mut Pool<R>, a: Tensor<R>) -> (ArrayD<R>, Option<Tensor<R>>) {
    match reuse(a) {
        Ok(array) => (array, None),
        Err(a) => (pool.scratch(a.shape()), Some(a)),
    }
}

fn unary<R: Real>(
    pool: &mut Pool<R>,
    a: Tensor<R>,
    finish: Finish,
    cost: Cost,
    f: impl Fn(R) -> R + Sync,
) -> Outcome<R> {
    let (mut out, source) = over(pool, a);
    let source = source.as_ref().map(elements);
    let tally = sweep(elements_mut(&mut out), 1, |offset, block| {
        if let Some(source) = source {
            let source = &source[offset..offset + block.len()];
            block.iter_mut().zip(source).for_each(|(y, &x)| *y = f(x));
        } else {
            for x in &mut *block {
                *x = f(*x);
            }
        }
        Tally {
            count: block.len() as u64,
            non_finite: finish.apply(block),
        }
    });
    Outcome {
        value: out.into_shared(),
        work: cost.work(finish, tally.count),
        non_finite: tally.non_finite,
    }
}

fn binary<R: Real>(
    pool: &mut Pool<R>,
    a: Tensor<R>,
    b: Tensor<R>,
    dims: &[usize],
    finish: Finish,
    f: impl Fn(R, R) -> R + Sync,
) -> Outcome<R> {
    let own = |t: Tensor<R>| if t.shape() == dims { reuse(t) } else { Err(t) };
    let (outcome, spent) = match own(a) {
        Ok(out) => (combine(out, None, &b, finish, f), b),
        Err(a) => match own(b) {
            Ok(out) => (combine(out, None, &a, finish, |x, y| f(y, x)), a),
            Err(b) => {
                let outcome = combine(pool.scratch(dims), Some(&a), &b, finish, f);
                pool.give(a);
                (outcome, b)
            }
        },
    };
    pool.give(spent);
    outcome
}

/// `out = f(x, y)` with `x` in `out` already, or to be loaded from `x`.
fn combine<R: Real>(
    mut out: ArrayD<R>,
    x: Option<&Tensor<R>>,
    y: &Tensor<R>,
    finish: Finish,
    f: impl Fn(R, R) -> R + Sync,
) -> Outcome<R> {
    let x = x.map(|x| (Broadcast::new(x.shape(), out.shape()), elements(x)));
    let (y_plan, y) = (Broadcast::new(y.shape(), out.shape()), elements(y));
    let tally = sweep(elements_mut(&mut out), 1, |offset, block| {
        if let Some((plan, x)) = &x {
            plan.runs(offset, block, |run, at, constant| {
                if constant {
                    run.fill(x[at]);
                } else {
                    run.copy_from_slice(&x[at..at + run.len()]);
                }
            });
        }
        y_plan.runs(offset, block, |run, at, constant| {
            if constant {
                let y = y[at];
                for x in run {
                    *x = f(*x, y);
                }
            } else {
                run.iter_mut().zip(&y[at..]).for_each(|(x, &y)| *x = f(*x, y));
            }
        });
        Tally {
            count: block.len() as u64,
            non_finite: finish.apply(block),
        }
    });
    Outcome {
        value: out.into_shared(),
        work: VECTOR.work(finish, tally.count),
        non_finite: tally.non_finite,
    }
}

/// How the elements of a row-major operand spread over a result: extents from the minor dimension on, neighbours of one kind merged.
struct Broadcast {
    /// `(extent, stride in the operand)`, minor first; a stride of 0 repeats.
    dims: Vec<(usize, usize)>,
}

impl Broadcast {
    fn new(operand: &[usize], result: &[usize]) -> Self {
        let mut dims: Vec<(usize, usize)> = Vec::with_capacity(result.len());
        let mut stride = 1;
        for (i, &extent) in result.iter().rev().enumerate() {
            let own = if i < operand.len() {
                operand[operand.len() - 1 - i]
            } else {
                1
            };
            if extent == 1 {
                continue;
            }
            let step = if own == 1 { 0 } else { stride };
            match dims.last_mut() {
                Some(last) if (last.1 == 0) == (step == 0) => last.0 *= extent,
                _ => dims.push((extent, step)),
            }
            stride *= own;
        }
        if dims.is_empty() {
            dims.push((1, 0));
        }
        Broadcast { dims }
    }

    /// Calls `f(run, position in the operand, constant)` on consecutive runs of `block`, which starts at element `offset` of the
    /// result. A constant run has one operand element, another has as many as it is long.
    fn runs<R>(&self, offset: usize, block: &mut [R], mut f: impl FnMut(&mut [R], usize, bool)) {
        let (inner, step) = self.dims[0];
        let outer = &self.dims[1..];
        let mut index = vec![0; outer.len()];
        let mut rest = offset / inner;
        for (slot, &(extent, _)) in index.iter_mut().zip(outer) {
            *slot = rest % extent;
            rest /= extent;
        }
        let mut base: usize = index.iter().zip(outer).map(|(i, (_, stride))| i * stride).sum();
        let mut column = offset % inner;
        let mut block = block;
        while !block.is_empty() {
            let length = (inner - column).min(block.len());
            let (run, tail) = block.split_at_mut(length);
            f(run, base + column * step, step == 0);
            block = tail;
            column = 0;
            for (slot, &(extent, stride)) in index.iter_mut().zip(outer) {
                *slot += 1;
                base += stride;
                if *slot < extent {
                    break;
                }
                base -= stride * extent;
                *slot = 0;
            }
        }
    }
}

/// What a mask keeps of the matrices of a tensor, repeated from its start: one matrix, or as many as the third dimension from the end has.
/// `None` for a mask of blocks of no rows.
fn pattern(mask: Mask, shape: &[usize]) -> Option<Vec<bool>> {
    if mask.is_empty() {
        return None;
    }
    let from_end = |i: usize| shape.len().checked_sub(i + 1).map_or(1, |axis| shape[axis]);
    let (rows, columns) = (from_end(1), from_end(0));
    let thirds = if mask.by_block() { from_end(2) } else { 1 };
    let positions = (0..thirds).flat_map(|third| {
        (0..rows).flat_map(move |row| (0..columns).map(move |column| (third, row, column)))
    });
    Some(
        positions
            .map(|(third, row, column)| mask.keeps(third, row, column))
            .collect(),
    )
}

/// Elements of `a` where the mask keeps, of `b` elsewhere. A mask of blocks of no rows gives `None`.
pub(super) fn choose<R: Real>(
    pool: &mut Pool<R>,
    mask: Mask,
    a: Tensor<R>,
    b: Tensor<R>,
    finish: Finish,
) -> Option<Outcome<R>> {
    let pattern = pattern(mask, a.shape())?;
    let (mut out, source) = over(pool, a);
    let others = elements(&b);
    let tally = sweep(elements_mut(&mut out), 1, |offset, block| {
        if let Some(source) = &source {
            block.copy_from_slice(&elements(source)[offset..offset + block.len()]);
        }
        let mut at = offset % pattern.len();
        for (x, &other) in block.iter_mut().zip(&others[offset..]) {
            if !pattern[at] {
                *x = other;
            }
            at = if at + 1 == pattern.len() { 0 } else { at + 1 };
        }
        Tally {
            count: block.len() as u64,
            non_finite: finish.apply(block),
        }
    });
    pool.give(b);
    Some(Outcome {
        value: out.into_shared(),
        work: VECTOR.work(finish, tally.count),
        non_finite: tally.non_finite,
    })
}

/// Keeps what the mask keeps and fills the rest. A mask of blocks of no rows keeps nothing sensible and gives `None`.
pub(super) fn select<R: Real>(
    pool: &mut Pool<R>,
    mask: Mask,
    fill: f64,
    a: Tensor<R>,
    finish: Finish,
) -> Option<Outcome<R>> {
    let pattern = pattern(mask, a.shape())?;
    let fill = R::from_f64(fill);
    let (mut out, source) = over(pool, a);
    let tally = sweep(elements_mut(&mut out), 1, |offset, block| {
        if let Some(source) = &source {
            block.copy_from_slice(&elements(source)[offset..offset + block.len()]);
        }
        let mut at = offset % pattern.len();
        let mut rest = &mut *block;
        while !rest.is_empty() {
            let length = (pattern.len() - at).min(rest.len());
            let (run, tail) = rest.split_at_mut(length);
            run.iter_mut()
                .zip(&pattern[at..])
                .for_each(|(x, &keep)| *x = if keep { *x } else { fill });
            rest = tail;
            at = 0;
        }
        Tally {
            count: block.len() as u64,
            non_finite: finish.apply(block),
        }
    });
    Some(Outcome {
        value: out.into_shared(),
        work: VECTOR.work(finish, tally.count),
        non_finite: tally.non_finite,
    })
}

/// Keeps the scores of the keys that a query sees and fills the rest; `origin` is the position of the first query and the first key.
pub(super) fn select_visible<R: Real>(
    pool: &mut Pool<R>,
    visibility: Visibility,
    fill: f64,
    a: Tensor<R>,
    origin: Tensor<R>,
    finish: Finish,
) -> Outcome<R> {
    let rank = a.ndim();
    let (rows, columns) = (a.shape()[rank - 2], a.shape()[rank - 1]);
    let at = |i: usize| elements(&origin)[i].to_f64() as usize;
    let (first_row, first_column) = (at(0), at(1));
    let fill = R::from_f64(fill);
    let (mut out, source) = over(pool, a);
    let tally = sweep(elements_mut(&mut out), columns, |offset, block| {
        if let Some(source) = &source {
            block.copy_from_slice(&elements(source)[offset..offset + block.len()]);
        }
        let mut count = 0;
        for (i, row) in block.chunks_exact_mut(columns.max(1)).enumerate() {
            let query = first_row + (offset / columns.max(1) + i) % rows;
            for (j, x) in row.iter_mut().enumerate() {
                if !visibility.sees(query, first_column + j) {
                    *x = fill;
                }
            }
            count += row.len() as u64 * visibility.conditions();
        }
        Tally {
            count,
            non_finite: finish.apply(block),
        }
    });
    pool.give(origin);
    Outcome {
        value: out.into_shared(),
        work: VECTOR.work(finish, tally.count),
        non_finite: tally.non_finite,
    }
}
