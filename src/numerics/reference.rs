//! Token-by-token recurrences of the three families of linear attention, in f64, one head at a time.
//!
//! They are written from the recurrences of the papers and share nothing with the graphs, which compute the same in chunks. `T` is the number of
//! tokens, `dk` the key width, `dv` the value width; the state is `[dk, dv]`, vectors are rows, decays are logarithms.

pub mod mesa;

use ndarray::{Array2, ArrayRef1, ArrayRef2, Axis, Slice};
use rayon::prelude::*;

/// Columns of the state that one task carries: its part of a 256-row state fits a second-level cache.
const COLUMNS: usize = 64;

/// Outputs and final state of a head.
#[derive(Debug, Clone)]
pub struct Recurrence {
    /// `[T, dv]`.
    pub outputs: Array2<f64>,
    /// `[dk, dv]`, after the last token.
    pub state: Array2<f64>,
}

/// Operands whose shapes do not belong together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is {found:?}, the other operands ask for {expected:?}")]
pub struct ShapeError {
    /// Which operand.
    pub name: &'static str,
    /// Its shape.
    pub found: Vec<usize>,
    /// The shape it should have.
    pub expected: Vec<usize>,
}

/// Which state the delta rule predicts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// The decayed state `D_t S_{t-1}`: Gated `DeltaNet` (arXiv 2412.06464), Kimi Delta Attention (2510.26692).
    Decayed,
    /// The state of the token before, `S_{t-1}`: Comba, RWKV7.
    Undecayed,
}

fn check(name: &'static str, found: &[usize], expected: &[usize]) -> Result<(), ShapeError> {
    if found == expected {
        return Ok(());
    }
    Err(ShapeError {
        name,
        found: found.to_vec(),
        expected: expected.to_vec(),
    })
}

/// Gated outer products (linear attention, `RetNet`, GLA, Mamba-2): `S_t = e^{l_t} S_{t-1} + k_t^T v_t`, `o_t = q_t S_t`. With a `bonus` `u [dk]`
/// the output is that of RWKV6, `o_t = q_t (S_{t-1} + Diag(u) k_t^T v_t)`.
///
/// Shapes: `q`, `k`, `l` are `[T, dk]`, `v` is `[T, dv]`, `state` is `[dk, dv]`.
///
/// # Errors
/// If the shapes do not belong together.
pub fn gated_outer_product(
    q: &ArrayRef2<f64>,
    k: &ArrayRef2<f64>,
    v: &ArrayRef2<f64>,
    l: &ArrayRef2<f64>,
    bonus: Option<&ArrayRef1<f64>>,
    state: &ArrayRef2<f64>,
) -> Result<Recurrence, ShapeError> {
    let ((tokens, dk), dv) = (q.dim(), v.ncols());
    check("k", k.shape(), &[tokens, dk])?;
    check("v", v.shape(), &[tokens, dv])?;
    check("l", l.shape(), &[tokens, dk])?;
    check("state", state.shape(), &[dk, dv])?;
    if let Some(bonus) = bonus {
        check("bonus", bonus.shape(), &[dk])?;
    }
    let decay = l.mapv(f64::exp);
    Ok(by_columns(v, state, |t, value, state, output| {
        for (c, row) in state.chunks_exact_mut(value.len()).enumerate() {
            let (alpha, key, query) = (decay[[t, c]], k[[t, c]], q[[t, c]]);
            if let Some(bonus) = bonus {
                let own = bonus[c] * key;
                for ((s, &y), o) in row.iter_mut().zip(value).zip(&mut *output) {
                    *o += query * (*s + own * y);
                    *s = alpha * *s + key * y;
                }
            } else {
                for ((s, &y), o) in row.iter_mut().zip(value).zip(&mut *output) {
                    *s = alpha * *s + key * y;
                    *o += query * *s;
                }
            }
        }
    }))
}

/// The delta rule with separate write and read keys (`DeltaNet`, arXiv 2406.06484, and its gated descendants):
/// `u_t = y_t - r_t S~`, `S_t = e^{l_t} S_{t-1} + x_t^T u_t`, `o_t = q_t S_t`, where `S~` is the state `read` names.
///
/// Step sizes are folded in by the caller: `r = beta k` and `y = beta v` for the plain rule. Shapes: `q`, write key `x`, read key `r` and `l` are
/// `[T, dk]`, `y` is `[T, dv]`, `state` is `[dk, dv]`.
///
/// # Errors
/// If the shapes do not belong together.
pub fn delta_rule(
    q: &ArrayRef2<f64>,
    x: &ArrayRef2<f64>,
    r: &ArrayRef2<f64>,
    y: &ArrayRef2<f64>,
    l: &ArrayRef2<f64>,
    state: &ArrayRef2<f64>,
    read: Read,
) -> Result<Recurrence, ShapeError> {
    let ((tokens, dk), dv) = (q.dim(), y.ncols());
    for (name, operand) in [("x", x), ("r", r), ("l", l)] {
        check(name, operand.shape(), &[tokens, dk])?;
    }
    check("y", y.shape(), &[tokens, dv])?;
    check("state", state.shape(), &[dk, dv])?;
    let decay = l.mapv(f64::exp);
    Ok(by_columns(y, state, |t, value, state, output| {
        let width = value.len();
        let mut error = [0.0; COLUMNS];
        let error = &mut error[..width];
        error.copy_from_slice(value);
        for (c, row) in state.chunks_exact_mut(width).enumerate() {
            let alpha = decay[[t, c]];
            let key = match read {
                Read::Decayed => alpha * r[[t, c]],
                Read::Undecayed => r[[t, c]],
            };
            for (s, e) in row.iter_mut().zip(&mut *error) {
                *e -= key * *s;
                *s *= alpha;
            }
        }
        for (c, row) in state.chunks_exact_mut(width).enumerate() {
            let (write, query) = (x[[t, c]], q[[t, c]]);
            for ((s, &e), o) in row.iter_mut().zip(&*error).zip(&mut *output) {
                *s += write * e;
                *o += query * *s;
            }
        }
    }))
}

/// Operands of [`diagonal_plus_low_rank`], each `[T, dk]` but `v`, which is `[T, dv]`.
#[derive(Debug, Clone, Copy)]
pub struct DiagonalPlusLowRank<'a> {
    /// Queries.
    pub q: &'a ArrayRef2<f64>,
    /// Keys.
    pub k: &'a ArrayRef2<f64>,
    /// Values.
    pub v: &'a ArrayRef2<f64>,
    /// Column of the rank-one transition.
    pub a: &'a ArrayRef2<f64>,
    /// Row of the rank-one transition.
    pub b: &'a ArrayRef2<f64>,
    /// Log decays.
    pub l: &'a ArrayRef2<f64>,
}

/// Diagonal plus low rank (RWKV7, arXiv 2503.14456): `S_t = e^{l_t} S_{t-1} + a_t^T (b_t S_{t-1}) + k_t^T v_t`, `o_t = q_t S_t`.
///
/// # Errors
/// If the shapes do not belong together.
pub fn diagonal_plus_low_rank(
    operands: &DiagonalPlusLowRank,
    state: &ArrayRef2<f64>,
) -> Result<Recurrence, ShapeError> {
    let &DiagonalPlusLowRank { q, k, v, a, b, l } = operands;
    let ((tokens, dk), dv) = (q.dim(), v.ncols());
    for (name, operand) in [("k", k), ("a", a), ("b", b), ("l", l)] {
        check(name, operand.shape(), &[tokens, dk])?;
    }
    check("v", v.shape(), &[tokens, dv])?;
    check("state", state.shape(), &[dk, dv])?;
    let decay = l.mapv(f64::exp);
    Ok(by_columns(v, state, |t, value, state, output| {
        let width = value.len();
        let mut read = [0.0; COLUMNS];
        let read = &mut read[..width];
        for (c, row) in state.chunks_exact(width).enumerate() {
            let key = b[[t, c]];
            row.iter().zip(&mut *read).for_each(|(s, e)| *e += key * s);
        }
        for (c, row) in state.chunks_exact_mut(width).enumerate() {
            let (alpha, write, key, query) = (decay[[t, c]], a[[t, c]], k[[t, c]], q[[t, c]]);
            for (((s, &e), &y), o) in row.iter_mut().zip(&*read).zip(value).zip(&mut *output) {
                *s = alpha * *s + write * e + key * y;
                *o += query * *s;
            }
        }
    }))
}

/// What a query of [`softmax_attention`] may look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionMask {
    /// Nothing behind its own position.
    pub causal: bool,
    /// Nothing `window` or more positions back.
    pub window: Option<usize>,
    /// Nothing from this position on.
    pub keys: usize,
    /// Position of the first query among the keys.
    pub first: usize,
}

/// Softmax attention (arXiv 1706.03762), row by row with all scores of a row at once: `o_i = sum_j w_ij v_j / sum_j w_ij`, `w_ij = e^(q_i k_j - max)`. A
/// query without keys gives zeros. The scale belongs to `q`.
///
/// Shapes: `q` is `[T, dk]`, `k` is `[S, dk]`, `v` is `[S, dv]`; the result is `[T, dv]`.
///
/// # Errors
/// If the shapes do not belong together.
pub fn softmax_attention(
    q: &ArrayRef2<f64>,
    k: &ArrayRef2<f64>,
    v: &ArrayRef2<f64>,
    mask: AttentionMask,
) -> Result<Array2<f64>, ShapeError> {
    let ((tokens, dk), keys) = (q.dim(), k.nrows());
    check("k", k.shape(), &[keys, dk])?;
    check("v", v.shape(), &[keys, v.ncols()])?;
    let mut outputs = Array2::zeros((tokens, v.ncols()));
    for i in 0..tokens {
        let at = mask.first + i;
        let end = if mask.causal { at + 1 } else { keys }.min(keys).min(mask.keys);
        let start = mask.window.map_or(0, |window| (at + 1).saturating_sub(window));
        let scores: Vec<f64> = (start..end).map(|j| q.row(i).dot(&k.row(j))).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (j, weight) in (start..end).zip(weights) {
            outputs.row_mut(i).scaled_add(weight / total, &v.row(j));
        }
    }
    Ok(outputs)
}

/// Runs `token(t, values, state, outputs)` over all tokens, on a few columns at a time: the columns of the state never meet in any of the
/// recurrences. `state` is `[dk, columns]` in row-major order, `outputs` starts at zero.
fn by_columns(
    values: &ArrayRef2<f64>,
    state: &ArrayRef2<f64>,
    token: impl Fn(usize, &[f64], &mut [f64], &mut [f64]) + Sync,
) -> Recurrence {
    let (tokens, dv) = values.dim();
    let starts: Vec<usize> = (0..dv).step_by(COLUMNS).collect();
    let parts: Vec<(usize, Array2<f64>, Vec<f64>)> = starts
        .into_par_iter()
        .map(|start| {
            let columns = Slice::from(start..(start + COLUMNS).min(dv));
            let mut part: Vec<f64> = state.slice_axis(Axis(1), columns).iter().copied().collect();
            let values = values.slice_axis(Axis(1), columns);
            let mut outputs = Array2::zeros(values.raw_dim());
            let mut value = vec![0.0; values.ncols()];
            for (t, mut output) in outputs.rows_mut().into_iter().enumerate() {
                value
                    .iter_mut()
                    .zip(values.row(t))
                    .for_each(|(to, &from)| *to = from);
                if let Some(output) = output.as_slice_mut() {
                    token(t, &value, &mut part, output);
                }
            }
            (start, outputs, part)
        })
        .collect();
    let mut result = Recurrence {
        outputs: Array2::zeros((tokens, dv)),
        state: state.to_owned(),
    };
    for (start, outputs, part) in parts {
        let columns = Slice::from(start..start + outputs.ncols());
        result.outputs.slice_axis_mut(Axis(1), columns).assign(&outputs);
        result
            .state
            .slice_axis_mut(Axis(1), columns)
            .iter_mut()
            .zip(part)
            .for_each(|(to, from)| *to = from);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array1, array};

    /// Numbers without structure in `[-1, 1)`.
    fn noise(rows: usize, columns: usize, salt: u64) -> Array2<f64> {
        let mut x = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Array2::from_shape_fn((rows, columns), |_| {
            x = x
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((x >> 11) as f64 / (1_u64 << 53) as f64).mul_add(2.0, -1.0)
        })
    }

    fn close(a: &Array2<f64>, b: &Array2<f64>) {
        assert_eq!(a.dim(), b.dim());
        let error = (a - b).iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        assert!(error < 1e-12, "{error:e}");
    }

    /// Without decay or solve the output is `tril(q k^T) v + q S0`.
    #[test]
    fn plain_linear_attention_is_masked_attention_without_softmax() {
        let (t, dk, dv) = (37, 5, 130);
        let (q, k, v, s0) = (
            noise(t, dk, 1),
            noise(t, dk, 2),
            noise(t, dv, 3),
            noise(dk, dv, 4),
        );
        let got = gated_outer_product(&q, &k, &v, &Array2::zeros((t, dk)), None, &s0).unwrap();
        let mut scores = q.dot(&k.t());
        scores
            .indexed_iter_mut()
            .for_each(|((i, j), x)| *x = if j <= i { *x } else { 0.0 });
        close(&got.outputs, &(scores.dot(&v) + q.dot(&s0)));
        close(&got.state, &(k.t().dot(&v) + &s0));
    }

    /// With constant decay, weights are `alpha^(i-j)`: the closed form of retention.
    #[test]
    fn constant_decay_gives_powers_of_it() {
        let (t, dk, dv) = (20, 4, 3);
        let (q, k, v) = (noise(t, dk, 1), noise(t, dk, 2), noise(t, dv, 3));
        let alpha = 0.83_f64;
        let l = Array2::from_elem((t, dk), alpha.ln());
        let zero = Array2::zeros((dk, dv));
        let got = gated_outer_product(&q, &k, &v, &l, None, &zero).unwrap();
        let mut scores = q.dot(&k.t());
        scores
            .indexed_iter_mut()
            .for_each(|((i, j), x)| *x *= if j <= i { alpha.powf((i - j) as f64) } else { 0.0 });
        close(&got.outputs, &scores.dot(&v));
        // The bonus replaces the weight of the token itself and everything older decays once less.
        let bonus = Array1::from_elem(dk, 1.7);
        let got = gated_outer_product(&q, &k, &v, &l, Some(&bonus), &zero).unwrap();
        let mut scores = q.dot(&k.t());
        scores.indexed_iter_mut().for_each(|((i, j), x)| {
            *x *= match i.cmp(&j) {
                std::cmp::Ordering::Less => 0.0,
                std::cmp::Ordering::Equal => 1.7,
                std::cmp::Ordering::Greater => alpha.powf((i - j - 1) as f64),
            };
        });
        close(&got.outputs, &scores.dot(&v));
    }

    /// A unit key written with step size 1 is read back exactly, and a second write replaces the first.
    #[test]
    fn delta_rule_overwrites() {
        let k = array![[0.6, 0.8], [0.6, 0.8], [0.6, 0.8]];
        let v = array![[1.0, 2.0, 3.0], [-4.0, 5.0, 0.5], [7.0, 8.0, 9.0]];
        let none = Array2::zeros((3, 2));
        let got = delta_rule(&k, &k, &k, &v, &none, &Array2::zeros((2, 3)), Read::Decayed).unwrap();
        close(&got.outputs, &v);
    }

    /// Both reads against the matrix form `S_t = (I - x^T r) D S + x^T y` and `S_t = (D - x^T r) S + x^T y`.
    #[test]
    fn delta_rule_is_an_affine_map_of_the_state() {
        let (t, dk, dv) = (9, 6, 70);
        let (q, x, r, y) = (noise(t, dk, 1), noise(t, dk, 2), noise(t, dk, 3), noise(t, dv, 4));
        let (l, s0) = (noise(t, dk, 5).mapv(|x| -x.abs()), noise(dk, dv, 6));
        for read in [Read::Decayed, Read::Undecayed] {
            let got = delta_rule(&q, &x, &r, &y, &l, &s0, read).unwrap();
            let mut state = s0.clone();
            let mut outputs = Array2::zeros((t, dv));
            for i in 0..t {
                let column = |m: &Array2<f64>| m.row(i).to_owned().insert_axis(Axis(1));
                let row = |m: &Array2<f64>| m.row(i).to_owned().insert_axis(Axis(0));
                let decay = Array2::from_diag(&l.row(i).mapv(f64::exp));
                let erase = column(&x).dot(&row(&r));
                let transition = match read {
                    Read::Decayed => &decay - &erase.dot(&decay),
                    Read::Undecayed => &decay - &erase,
                };
                state = transition.dot(&state) + column(&x).dot(&row(&y));
                outputs.row_mut(i).assign(&q.row(i).dot(&state));
            }
            close(&got.outputs, &outputs);
            close(&got.state, &state);
        }
    }

    /// With `a = -x`, `b = r` and `v = y` the transition of family III is the undecayed delta rule's.
    #[test]
    fn diagonal_plus_low_rank_contains_the_delta_rule() {
        let (t, dk, dv) = (12, 5, 66);
        let (q, x, r, y) = (noise(t, dk, 1), noise(t, dk, 2), noise(t, dk, 3), noise(t, dv, 4));
        let (l, s0) = (noise(t, dk, 5).mapv(|x| -x.abs()), noise(dk, dv, 6));
        let delta = delta_rule(&q, &x, &r, &y, &l, &s0, Read::Undecayed).unwrap();
        let minus = -&x;
        let operands = DiagonalPlusLowRank {
            q: &q,
            k: &x,
            v: &y,
            a: &minus,
            b: &r,
            l: &l,
        };
        let got = diagonal_plus_low_rank(&operands, &s0).unwrap();
        close(&got.outputs, &delta.outputs);
        close(&got.state, &delta.state);
    }

    #[test]
    fn wrong_shapes_are_errors() {
        let (a, b) = (Array2::zeros((3, 2)), Array2::zeros((4, 2)));
        let error = gated_outer_product(&a, &b, &a, &a, None, &a).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`k` is [4, 2], the other operands ask for [3, 2]"
        );
    }
}
