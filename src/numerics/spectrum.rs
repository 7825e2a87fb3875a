//! Symmetric matrices with a given spectrum, and the ends of the spectrum of a given matrix. In f64, for checks and studies.

use ndarray::{Array1, Array2, ArrayView1, Axis};
use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};

/// A symmetric matrix with the given eigenvalues in a random basis.
#[must_use]
pub fn with_eigenvalues(eigenvalues: &[f64], seed: u64) -> Array2<f64> {
    let basis = orthogonal(eigenvalues.len(), seed);
    let scaled = &basis * &ArrayView1::from(eigenvalues);
    scaled.dot(&basis.t())
}

/// `n` values in geometric progression from `low` to `high`.
#[must_use]
pub fn geometric(low: f64, high: f64, n: usize) -> Vec<f64> {
    let steps = n.saturating_sub(1).max(1) as f64;
    (0..n)
        .map(|i| low * (high / low).powf(i as f64 / steps))
        .collect()
}

/// A random orthogonal matrix: rows of uniform numbers made orthonormal by the modified Gram-Schmidt process, twice.
fn orthogonal(n: usize, seed: u64) -> Array2<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut q = Array2::from_shape_fn((n, n), |_| {
        (rng.next_u64() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    });
    for i in 0..n {
        for _ in 0..2 {
            let (done, mut rest) = q.view_mut().split_at(Axis(0), i);
            let mut row = rest.row_mut(0);
            for other in done.rows() {
                let overlap = row.dot(&other);
                row.scaled_add(-overlap, &other);
            }
            let length = row.dot(&row).sqrt();
            row /= length;
        }
    }
    q
}

/// Smallest and largest eigenvalue of a symmetric matrix (the mean of the matrix and its transpose is taken); NaN where an element is not finite.
///
/// Householder's reduction to tridiagonal form, then bisection by the signs of the Sturm sequence (Golub and Van Loan, "Matrix Computations", 8.3 and 8.4).
#[must_use]
pub fn extreme_eigenvalues(matrix: &Array2<f64>) -> (f64, f64) {
    if matrix.is_empty() || !matrix.is_square() || matrix.iter().any(|x| !x.is_finite()) {
        return (f64::NAN, f64::NAN);
    }
    let symmetric = (matrix + &matrix.t()) * 0.5;
    let (diagonal, off) = tridiagonal(symmetric);
    let n = diagonal.len();
    (bisect(&diagonal, &off, 1), bisect(&diagonal, &off, n))
}

/// Diagonal and off-diagonal of a tridiagonal matrix with the same eigenvalues.
fn tridiagonal(mut a: Array2<f64>) -> (Vec<f64>, Vec<f64>) {
    let n = a.nrows();
    let mut off = Vec::with_capacity(n);
    for k in 0..n.saturating_sub(1) {
        let mut v: Vec<f64> = (k + 1..n).map(|i| a[[i, k]]).collect();
        let length = v.iter().map(|x| x * x).sum::<f64>().sqrt();
        let alpha = if v[0] > 0.0 { -length } else { length };
        off.push(alpha);
        v[0] -= alpha;
        let squared: f64 = v.iter().map(|x| x * x).sum();
        if squared <= 0.0 {
            continue;
        }
        let scale = 2.0 / squared;
        let (_, rows) = a.view_mut().split_at(Axis(0), k + 1);
        let (_, mut rest) = rows.split_at(Axis(1), k + 1);
        let v = Array1::from(v);
        let p = rest.dot(&v) * scale;
        let w = &p - &(&v * (0.5 * scale * p.dot(&v)));
        for (i, mut row) in rest.rows_mut().into_iter().enumerate() {
            row.scaled_add(-v[i], &w);
            row.scaled_add(-w[i], &v);
        }
    }
    ((0..n).map(|i| a[[i, i]]).collect(), off)
}

/// The `rank`-th smallest eigenvalue, counted from 1.
fn bisect(diagonal: &[f64], off: &[f64], rank: usize) -> f64 {
    let radius = |i: usize| {
        let before = if i > 0 { off[i - 1].abs() } else { 0.0 };
        before + off.get(i).map_or(0.0, |x| x.abs())
    };
    let ends = diagonal
        .iter()
        .enumerate()
        .map(|(i, d)| (d - radius(i), d + radius(i)));
    let (mut low, mut high) = ends.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), (a, b)| {
        (low.min(a), high.max(b))
    });
    let below = |x: f64| {
        let mut count = 0;
        let mut pivot = 1.0_f64;
        for (i, d) in diagonal.iter().enumerate() {
            let coupling = if i > 0 { off[i - 1] * off[i - 1] } else { 0.0 };
            pivot = d - x - coupling / pivot;
            if pivot.abs() < f64::MIN_POSITIVE {
                pivot = -f64::MIN_POSITIVE;
            }
            count += usize::from(pivot < 0.0);
        }
        count
    };
    // Every halving gains a bit; the interval ends where no number lies between its ends.
    loop {
        let middle = f64::midpoint(low, high);
        if middle <= low || middle >= high || !middle.is_finite() {
            return middle;
        }
        if below(middle) >= rank {
            high = middle;
        } else {
            low = middle;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The second difference matrix of order `n` has eigenvalues `2 - 2 cos(pi j / (n + 1))`.
    #[test]
    fn second_differences() {
        let n = 20;
        let a = Array2::from_shape_fn((n, n), |(i, j)| match i.abs_diff(j) {
            0 => 2.0,
            1 => -1.0,
            _ => 0.0,
        });
        let exact = |j: f64| 2.0 - 2.0 * (std::f64::consts::PI * j / (n + 1) as f64).cos();
        let (low, high) = extreme_eigenvalues(&a);
        assert!((low - exact(1.0)).abs() < 1e-14, "{low}");
        assert!((high - exact(n as f64)).abs() < 1e-14, "{high}");
    }

    #[test]
    fn a_matrix_has_the_eigenvalues_it_was_made_with() {
        for (low, high) in [(1e-3, 8.0), (-2.0, -1.0), (0.5, 0.5)] {
            let values = geometric(low, high, 48);
            let (a, b) = extreme_eigenvalues(&with_eigenvalues(&values, 3));
            assert!((a - low).abs() < 1e-13 && (b - high).abs() < 1e-13, "{a} {b}");
        }
        assert!(
            extreme_eigenvalues(&Array2::from_elem((2, 2), f64::NAN))
                .0
                .is_nan()
        );
    }
}
