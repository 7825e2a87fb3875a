//! Whitening of write keys by the covariance of the keys of past chunks: the solvers.
//!
//! The SLA paper names a second-order variant with these solvers, their operation classes and whether they stay positive definite, and
//! prints no formula. Everything in this file is our reading of it. A solver gets the normalised covariance `Cn [.., n, n]` and the keys of a
//! chunk and gives write keys: `k P` with `P` near `Cn^-1/2` (Newton-Schulz, Polar), or `k Cn^-1` (Cholesky, conjugate gradients).
//!
//! | solver | products of `n x n` | remark |
//! |---|---|---|
//! | `newton_schulz5` | 12 | coupled iteration, five steps |
//! | `polar2`, `polar2_plus` | 3 | two steps; without and with scaling |
//! | `cholesky16` | panels, `2/3 n^3` FLOPs dense | 16-row factors and substitutions on the vector unit |
//! | `cg30` | 30 products of the keys | rows that divide by their own dot products on the vector unit |

use super::conjugate_gradient;
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Mask, Precision, ReduceFunction, Value};
use crate::layer::WhiteningSolver;

/// What is added to the diagonal of the normalised covariance: it bounds the whitening of directions that no key has used.
pub const RIDGE: f64 = 1e-3;
/// Rows of a panel of the Cholesky factor.
const PANEL: usize = 16;
/// Steps of conjugate gradients.
const CG_STEPS: usize = 30;

/// `covariance / s + RIDGE I` with `s` the largest absolute row sum, which no eigenvalue exceeds; `s = 1` where `scaled` is false. `[.., n, n]`, f32.
pub fn normalised(b: &mut Builder, covariance: Value, scaled: bool) -> Value {
    let rank = b.shape(covariance).rank();
    let n = b.shape(covariance).from_end(0);
    let identity = b.identity("I", n, Dtype::F32);
    let ridge = b.scale("ridge", identity, RIDGE);
    let scaled = if scaled {
        let magnitude = b.map("|C|", Function::Abs, covariance);
        let rows = b.sum_minor("row_sums", magnitude);
        let largest = b.reduce("s", ReduceFunction::Maximum, rows, rank - 2);
        let inverse = b.map("1/s", Function::Reciprocal, largest);
        b.multiply("C/s", covariance, inverse)
    } else {
        covariance
    };
    b.add("Cn", scaled, ridge)
}

/// `Z` near `a^-1/2` after `steps` steps of the coupled Newton-Schulz iteration for a symmetric `a [.., n, n]` with spectrum in `(0, 3)`:
/// `T = (3 I - Z Y) / 2`, `Y <- Y T`, `Z <- T Z` from `Y = a`, `Z = I`.
///
/// The first step needs no product for `Z`, the last none for `Y`: `3 steps - 3` products, for at least two steps. An eigenvalue above 3
/// makes `T` negative there, and the iterate indefinite.
pub fn append_newton_schulz(b: &mut Builder, a: Value, steps: usize, precision: Precision) -> Value {
    let n = b.shape(a).from_end(0);
    let identity = b.identity("I", n, Dtype::F32);
    let offset = b.scale("3/2 I", identity, 1.5);
    let factor = |b: &mut Builder, zy: Value| {
        let half = b.scale("-ZY/2", zy, -0.5);
        b.add("T", half, offset)
    };
    if steps == 0 {
        return identity;
    }
    let mut z = factor(b, a);
    let mut y = a;
    let mut t = z;
    for _ in 2..=steps {
        y = b.matmul("Y T", y, t, precision);
        let zy = b.matmul("Z Y", z, y, precision);
        t = factor(b, zy);
        z = b.matmul("T Z", t, z, precision);
    }
    z
}

/// The matrix `P` of a solver that forms one, from the covariance; `None` for the others.
pub fn append_polar(
    b: &mut Builder,
    solver: WhiteningSolver,
    precision: Precision,
    covariance: Value,
) -> Option<Value> {
    let (scaled, steps) = match solver {
        WhiteningSolver::NewtonSchulz5 => (true, 5),
        WhiteningSolver::Polar2 => (false, 2),
        WhiteningSolver::Polar2Plus => (true, 2),
        WhiteningSolver::None | WhiteningSolver::Cholesky16 | WhiteningSolver::Cg30 => return None,
    };
    let cn = normalised(b, covariance, scaled);
    Some(append_newton_schulz(b, cn, steps, precision))
}

/// Write keys `[.., rows, n]` from keys of that shape and a covariance `[.., n, n]` in f32; f32, or the keys themselves without whitening.
pub fn append_whitened(
    b: &mut Builder,
    solver: WhiteningSolver,
    precision: Precision,
    covariance: Value,
    keys: Value,
) -> Value {
    if let Some(p) = append_polar(b, solver, precision, covariance) {
        return b.matmul("K P", keys, p, precision);
    }
    if solver == WhiteningSolver::None {
        return keys;
    }
    let keys = b.cast("K_f32", keys, Dtype::F32);
    let cn = normalised(b, covariance, true);
    if solver == WhiteningSolver::Cholesky16 {
        return cholesky_solve(b, precision, cn, keys);
    }
    conjugate_gradient::append(b, keys, CG_STEPS, &[cn], |b, p, inner| {
        b.matmul("P Cn", p, inner[0], precision)
    })
}

/// A panel of the factor: `L_ii = (I + l) diag(1 / inverse)` and `below^T = L_>i,i`.
struct Panel {
    /// Strictly lower part that counts, `[.., s, s]`.
    unit: Value,
    /// Reciprocal pivots `[.., s, 1]`.
    inverse: Value,
    /// `L_>i,i^T`, `[.., s, m]`, where rows are left.
    below: Option<Value>,
}

/// Rows and columns `from..` of a square matrix, or a part of them.
fn part(b: &mut Builder, a: Value, rows: (usize, usize), columns: (usize, usize)) -> Value {
    let rank = b.shape(a).rank();
    let strip = b.slice("rows", a, rank - 2, rows.0, rows.1);
    b.slice("part", strip, rank - 1, columns.0, columns.1)
}

/// `k a^-1` for the rows of `keys [.., rows, n]` by the right-looking Cholesky factor of `a [.., n, n]` in panels of 16 and two triangular solves.
///
/// Factors and substitutions of a panel run on the vector unit, updates of what is left on the matrix unit, both triangles.
fn cholesky_solve(b: &mut Builder, precision: Precision, a: Value, keys: Value) -> Value {
    let n = b.shape(a).from_end(0);
    let mut panels = Vec::new();
    let mut rest = a;
    let mut left = n;
    while left > 0 {
        let size = PANEL.min(left);
        left -= size;
        let corner = part(b, rest, (0, size), (0, size));
        let factor = b.cholesky("L_ii", corner);
        let pivots = b.select("diag_L", Mask::BlockDiagonal { block: 1 }, factor, 0.0);
        let pivots = b.sum_minor("pivots", pivots);
        let inverse = b.map("1/pivots", Function::Reciprocal, pivots);
        let columns = b.transpose_minor("1/pivots_columns", inverse);
        let unit = b.multiply("L_ii_unit", factor, columns);
        let mut panel = Panel {
            unit,
            inverse,
            below: None,
        };
        if left > 0 {
            let right = part(b, rest, (0, size), (size, left));
            let below = panel_solve(b, &panel, right);
            let update = b.matmul_at("L L^T", below, below, precision);
            let corner = part(b, rest, (size, left), (size, left));
            rest = b.subtract("A'", corner, update);
            panel.below = Some(below);
        }
        panels.push(panel);
    }

    let mut rhs = b.transpose_minor("K^T", keys);
    let rank = b.shape(rhs).rank();
    let mut forward = Vec::new();
    for panel in &panels {
        let size = b.shape(panel.unit).from_end(0);
        let own = b.slice("rhs_i", rhs, rank - 2, 0, size);
        let y = panel_solve(b, panel, own);
        if let Some(below) = panel.below {
            let left = b.shape(rhs).from_end(1) - size;
            let update = b.matmul_at("L y", below, y, precision);
            let rest = b.slice("rhs_>i", rhs, rank - 2, size, left);
            rhs = b.subtract("rhs'", rest, update);
        }
        forward.push(y);
    }
    let mut solved: Option<Value> = None;
    for (panel, y) in panels.iter().zip(forward).rev() {
        let y = match (panel.below, solved) {
            (Some(below), Some(later)) => {
                let update = b.matmul("L^T x", below, later, precision);
                b.subtract("y'", y, update)
            }
            _ => y,
        };
        let y = b.multiply("y/pivots", y, panel.inverse);
        let x = b.backward_substitution("x_i", panel.unit, y);
        solved = Some(match solved {
            Some(later) => b.concatenate("x_>=i", &[x, later], rank - 2),
            None => x,
        });
    }
    b.transpose_minor("X", solved.unwrap_or(rhs))
}

/// `L_ii^-1 rhs`.
fn panel_solve(b: &mut Builder, panel: &Panel, rhs: Value) -> Value {
    let y = b.forward_substitution("L_unit^-1 rhs", panel.unit, rhs);
    b.multiply("L^-1 rhs", y, panel.inverse)
}
