//! The recurrence of `MesaNet` (arXiv 2506.05233), token by token with a dense solve.

use ndarray::{Array2, ArrayRef2, Axis, Slice};

use super::{Recurrence, ShapeError, check};

/// `H_t = e^{g_t} H_{t-1} + beta_t k_t^T k_t`, `Z_t = e^{g_t} Z_{t-1} + beta_t k_t^T v_t`, `o_t = q_t (H_t + Diag(lambda))^-1 Z_t`, from
/// `state`. A state is `[H | Z]`, `[dk, dk + dv]`.
///
/// Shapes: `q`, `k` are `[T, dk]`, `v` is `[T, dv]`, `beta` and `g` are `[T, 1]`, `lambda` is `[1, dk]`. A system that is not positive definite
/// gives NaN.
///
/// # Errors
/// If the shapes do not belong together.
pub fn mesa(
    q: &ArrayRef2<f64>,
    k: &ArrayRef2<f64>,
    v: &ArrayRef2<f64>,
    beta: &ArrayRef2<f64>,
    g: &ArrayRef2<f64>,
    lambda: &ArrayRef2<f64>,
    state: &ArrayRef2<f64>,
) -> Result<Recurrence, ShapeError> {
    let ((tokens, dk), dv) = (q.dim(), v.ncols());
    check("k", k.shape(), &[tokens, dk])?;
    check("v", v.shape(), &[tokens, dv])?;
    check("beta", beta.shape(), &[tokens, 1])?;
    check("g", g.shape(), &[tokens, 1])?;
    check("lambda", lambda.shape(), &[1, dk])?;
    check("state", state.shape(), &[dk, dk + dv])?;
    let mut state = state.to_owned();
    let mut outputs = Array2::zeros((tokens, dv));
    for t in 0..tokens {
        let (decay, step) = (g[[t, 0]].exp(), beta[[t, 0]]);
        for c in 0..dk {
            let key = step * k[[t, c]];
            let written = k.row(t).into_iter().chain(v.row(t));
            state
                .row_mut(c)
                .iter_mut()
                .zip(written)
                .for_each(|(s, &x)| *s = decay * *s + key * x);
        }
        let mut system = state.slice_axis(Axis(1), Slice::from(..dk)).to_owned();
        for c in 0..dk {
            system[[c, c]] += lambda[[0, c]];
        }
        let solution = solve(system, &q.row(t).to_vec());
        for (c, x) in solution.into_iter().enumerate() {
            outputs
                .row_mut(t)
                .iter_mut()
                .zip(state.row(c).iter().skip(dk))
                .for_each(|(o, &z)| *o += x * z);
        }
    }
    Ok(Recurrence { outputs, state })
}

/// Solves `a x = b` for a symmetric positive definite `a` by its Cholesky factor; NaN where `a` is not.
#[must_use]
pub fn solve(mut a: Array2<f64>, b: &[f64]) -> Vec<f64> {
    let n = b.len();
    for j in 0..n {
        let mut below = a.slice_axis_mut(Axis(0), Slice::from(j..));
        let known: f64 = below.row(0).iter().take(j).map(|x| x * x).sum();
        let root = (below[[0, j]] - known).sqrt();
        below[[0, j]] = root;
        let row: Vec<f64> = below.row(0).iter().take(j).copied().collect();
        for mut other in below.rows_mut().into_iter().skip(1) {
            let dot: f64 = other.iter().zip(&row).map(|(x, y)| x * y).sum();
            other[j] = (other[j] - dot) / root;
        }
    }
    let mut x = b.to_vec();
    for i in 0..n {
        let dot: f64 = a.row(i).iter().zip(&x).take(i).map(|(l, y)| l * y).sum();
        x[i] = (x[i] - dot) / a[[i, i]];
    }
    for i in (0..n).rev() {
        let dot: f64 = (i + 1..n).map(|r| a[[r, i]] * x[r]).sum();
        x[i] = (x[i] - dot) / a[[i, i]];
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    /// A system solved by hand: `[[4, 2], [2, 3]] x = [2, 5]` has the solution `[-1/2, 2]`.
    #[test]
    fn a_small_system() {
        let x = solve(array![[4.0, 2.0], [2.0, 3.0]], &[2.0, 5.0]);
        assert!((x[0] + 0.5).abs() < 1e-15 && (x[1] - 2.0).abs() < 1e-15, "{x:?}");
        assert!(solve(array![[1.0, 2.0], [2.0, 1.0]], &[1.0, 1.0])[0].is_nan());
    }

    /// One key: `o = q k beta |k|^-2.. v` collapses to ridge regression on one sample, `beta k.q / (lambda + beta |k|^2) v`.
    #[test]
    fn one_token_is_ridge_regression() -> Result<(), ShapeError> {
        let (q, k, v) = (array![[0.6, 0.8]], array![[0.8, 0.6]], array![[3.0, -1.0, 2.0]]);
        let (step, decay, ridge) = (array![[0.5]], array![[-1.0]], array![[0.25, 0.25]]);
        let got = mesa(&q, &k, &v, &step, &decay, &ridge, &Array2::zeros((2, 5)))?;
        let weight = 0.5 * 0.96 / (0.25 + 0.5);
        for (o, v) in got.outputs.iter().zip(&v) {
            assert!((o - weight * v).abs() < 1e-15);
        }
        Ok(())
    }
}
