//! Conjugate gradients for many right-hand sides at once, one system per row: a loop of a fixed number of steps.

use crate::graph::{Builder, Function, Value};

/// Smallest divisor: its reciprocal is far from overflow in f32, and a squared residual below it is of no account.
const DIVISOR_FLOOR: f64 = 1e-30;

/// Approximate solutions `X [.., C, dk]` of `X A = rhs`, row by row, after `steps` steps from zero.
///
/// `operator` appends `P A` for search directions `P [.., C, dk]`; it sees the loop's copies of `invariants`. Per step and row, with
/// `w = p A`: `a = d / (p . w)`, `x += a p`, `r -= a w`, `d' = r . r`, `p = r + (d' / d) p`. Divisors are held above
/// [`DIVISOR_FLOOR`], because rows that are solved, or that only pad a chunk, would divide zero by zero. (Published kernels add 1e-5 to
/// the divisors instead, which ends the iteration at residuals of about the square root of that.)
pub(super) fn append(
    b: &mut Builder,
    rhs: Value,
    steps: usize,
    invariants: &[Value],
    operator: impl FnOnce(&mut Builder, Value, &[Value]) -> Value,
) -> Value {
    let zero = b.fill("X_0", b.dims(rhs), b.ty(rhs).dtype, 0.0);
    let squared = b.multiply("R_squared", rhs, rhs);
    let d = b.sum_minor("d", squared);
    let quotient = |b: &mut Builder, name: &str, a: Value, divisor: Value| {
        let divisor = b.map(
            &format!("{name}_floor"),
            Function::MaximumConstant(DIVISOR_FLOOR),
            divisor,
        );
        let inverse = b.map(&format!("{name}_inverse"), Function::Reciprocal, divisor);
        b.multiply(name, a, inverse)
    };
    let solved = b.repeat(
        "CG",
        steps,
        &[zero, rhs, rhs, d],
        invariants,
        |b, carry, invariants| {
            let [x, r, p, d] = [carry[0], carry[1], carry[2], carry[3]];
            let w = operator(b, p, invariants);
            let pw = b.multiply("P . W", p, w);
            let curvature = b.sum_minor("p.w", pw);
            let a = quotient(b, "a", d, curvature);
            let step = b.multiply("a P", p, a);
            let x = b.add("X", x, step);
            let step = b.multiply("a W", w, a);
            let r = b.subtract("R", r, step);
            let squared = b.multiply("R_squared", r, r);
            let next = b.sum_minor("d'", squared);
            let ratio = quotient(b, "d'/d", next, d);
            let kept = b.multiply("(d'/d) P", p, ratio);
            let p = b.add("P", r, kept);
            vec![x, r, p, next]
        },
    );
    solved[0]
}
