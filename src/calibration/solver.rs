//! Robust least squares with bounds.
//!
//! Minimises `sum_i w_i rho(r_i(x)) + sum_j ((x_j - p_j) / (s_j q_j))^2` over `low <= x <= high`, with the soft absolute value
//! `rho(r) = 2 c^2 (sqrt(1 + (r/c)^2) - 1)`: quadratic near zero, linear for outliers beyond `c`. Gauss-Newton with a damped, bounded step; derivatives
//! by finite differences of the rows a parameter touches.

/// Residual beyond which a row counts by its absolute value: 10 %.
const SOFT: f64 = 0.1;
/// Step of a finite difference, as a share of the scale of a parameter. The model has corners; a step well inside one side of them is enough.
const DIFFERENCE: f64 = 0.02;
/// Most Gauss-Newton steps.
const MOST_STEPS: usize = 25;
/// Relative decrease of the objective below which a fit has converged.
const CONVERGED: f64 = 1e-5;
/// Sweeps of the bounded step.
const SWEEPS: usize = 2000;

/// A parameter of a fit.
#[derive(Debug, Clone, PartialEq)]
pub struct Free {
    /// Value it is pulled towards.
    pub prior: f64,
    /// Typical size, by which it is scaled.
    pub scale: f64,
    /// Standard deviation of the pull, in units of `scale`.
    pub looseness: f64,
    /// Smallest value.
    pub low: f64,
    /// Largest value.
    pub high: f64,
    /// Rows whose residual depends on it.
    pub rows: Vec<usize>,
}

/// Result of a fit.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// Values.
    pub values: Vec<f64>,
    /// Residuals at the solution.
    pub residuals: Vec<f64>,
    /// Standard errors from the curvature of the data alone; none where the data say nothing.
    pub standard_errors: Vec<Option<f64>>,
    /// Correlations of the estimates from the data alone, `[parameter][parameter]`.
    pub correlations: Vec<Vec<f64>>,
    /// Gauss-Newton steps taken.
    pub steps: usize,
}

/// The minimum of `d H d / 2 + g d` over `low <= d <= high`, for a symmetric positive definite `H`: coordinate descent.
#[must_use]
pub fn bounded_step(hessian: &[Vec<f64>], gradient: &[f64], low: &[f64], high: &[f64]) -> Vec<f64> {
    let n = gradient.len();
    let mut step: Vec<f64> = (0..n).map(|j| 0.0_f64.clamp(low[j], high[j])).collect();
    for _ in 0..SWEEPS {
        let mut moved = 0.0_f64;
        for j in 0..n {
            let slope = gradient[j] + (0..n).map(|k| hessian[j][k] * step[k]).sum::<f64>();
            if hessian[j][j] <= 0.0 {
                continue;
            }
            let next = (step[j] - slope / hessian[j][j]).clamp(low[j], high[j]);
            moved = moved.max((next - step[j]).abs());
            step[j] = next;
        }
        if moved < 1e-12 {
            break;
        }
    }
    step
}

fn objective(residuals: &[f64], weights: &[f64], free: &[Free], values: &[f64]) -> f64 {
    let data: f64 = residuals
        .iter()
        .zip(weights)
        .map(|(r, w)| w * 2.0 * SOFT * SOFT * ((1.0 + (r / SOFT).powi(2)).sqrt() - 1.0))
        .sum();
    let pull: f64 = free
        .iter()
        .zip(values)
        .map(|(f, x)| ((x - f.prior) / (f.scale * f.looseness)).powi(2) * PULL)
        .sum();
    data + pull
}

/// Weight of the pull towards the priors: that of one row that is off by 3 % at one standard deviation.
const PULL: f64 = 1e-3;

/// Fits. `evaluate(values, rows)` gives the residuals of the rows asked for, in their order; `all` rows are `0..weights.len()`.
pub fn fit(
    free: &[Free],
    start: &[f64],
    weights: &[f64],
    evaluate: impl Fn(&[f64], &[usize]) -> Vec<f64>,
) -> Solution {
    let n = free.len();
    let all: Vec<usize> = (0..weights.len()).collect();
    let mut x: Vec<f64> = start
        .iter()
        .zip(free)
        .map(|(value, f)| value.clamp(f.low, f.high))
        .collect();
    let mut residuals = evaluate(&x, &all);
    let mut best = objective(&residuals, weights, free, &x);
    let mut damping = 1e-3;
    let mut steps = 0;
    let mut data_hessian = vec![vec![0.0; n]; n];
    while steps < MOST_STEPS {
        steps += 1;
        // Derivatives with respect to the scaled parameters, sparse: by row.
        let mut columns: Vec<Vec<f64>> = Vec::with_capacity(n);
        for (j, f) in free.iter().enumerate() {
            let mut moved = x.clone();
            let size = DIFFERENCE * f.scale;
            moved[j] = if x[j] + size <= f.high {
                x[j] + size
            } else {
                x[j] - size
            };
            let difference = (moved[j] - x[j]) / f.scale;
            let there = evaluate(&moved, &f.rows);
            columns.push(
                f.rows
                    .iter()
                    .zip(there)
                    .map(|(&row, value)| (value - residuals[row]) / difference)
                    .collect(),
            );
        }
        let robust: Vec<f64> = residuals
            .iter()
            .zip(weights)
            .map(|(r, w)| w / (1.0 + (r / SOFT).powi(2)).sqrt())
            .collect();
        let mut dense = vec![0.0; weights.len()];
        data_hessian = vec![vec![0.0; n]; n];
        let mut gradient = vec![0.0; n];
        for j in 0..n {
            for (&row, d) in free[j].rows.iter().zip(&columns[j]) {
                dense[row] = robust[row] * d;
                gradient[j] += dense[row] * residuals[row];
            }
            for k in j..n {
                let sum: f64 = free[k]
                    .rows
                    .iter()
                    .zip(&columns[k])
                    .map(|(&row, d)| dense[row] * d)
                    .sum();
                data_hessian[j][k] = sum;
                data_hessian[k][j] = sum;
            }
            for &row in &free[j].rows {
                dense[row] = 0.0;
            }
        }
        let mut hessian = data_hessian.clone();
        for (j, f) in free.iter().enumerate() {
            let pull = PULL / f.looseness.powi(2);
            hessian[j][j] += pull;
            gradient[j] += pull * (x[j] - f.prior) / f.scale;
        }
        let low: Vec<f64> = free.iter().zip(&x).map(|(f, x)| (f.low - x) / f.scale).collect();
        let high: Vec<f64> = free.iter().zip(&x).map(|(f, x)| (f.high - x) / f.scale).collect();
        let mut improved = false;
        for _ in 0..8 {
            let mut damped = hessian.clone();
            for (j, row) in damped.iter_mut().enumerate() {
                row[j] += damping * (row[j] + 1e-9);
            }
            let step = bounded_step(&damped, &gradient, &low, &high);
            let next: Vec<f64> = (0..n)
                .map(|j| (x[j] + step[j] * free[j].scale).clamp(free[j].low, free[j].high))
                .collect();
            let there = evaluate(&next, &all);
            let value = objective(&there, weights, free, &next);
            if value < best {
                improved = value < best * (1.0 - CONVERGED);
                x = next;
                residuals = there;
                best = value;
                damping = (damping / 3.0).max(1e-6);
                break;
            }
            damping *= 5.0;
        }
        if !improved {
            break;
        }
    }
    let (standard_errors, correlations) = spread(free, &data_hessian, &residuals, weights);
    Solution {
        values: x,
        residuals,
        standard_errors,
        correlations,
        steps,
    }
}

/// Standard errors and correlations from the curvature of the data, at the scatter of the residuals.
fn spread(
    free: &[Free],
    hessian: &[Vec<f64>],
    residuals: &[f64],
    weights: &[f64],
) -> (Vec<Option<f64>>, Vec<Vec<f64>>) {
    let n = free.len();
    let scatter = {
        let mut sizes: Vec<f64> = residuals.iter().map(|r| r.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        // Median absolute residual, as the standard deviation of a normal distribution.
        1.4826 * sizes.get(sizes.len() / 2).copied().unwrap_or(0.0)
    };
    let mean_weight = weights.iter().sum::<f64>() / weights.len().max(1) as f64;
    // A trace of curvature keeps parameters that the data do not see apart from the others.
    let trace = 1e-6;
    let mut matrix = hessian.to_vec();
    for (j, row) in matrix.iter_mut().enumerate() {
        row[j] += trace;
    }
    let inverse = inverse(&matrix);
    let errors = (0..n)
        .map(|j| {
            let seen = hessian[j][j] > 100.0 * trace;
            seen.then(|| (inverse[j][j] * mean_weight).max(0.0).sqrt() * scatter * free[j].scale)
        })
        .collect();
    let correlations = (0..n)
        .map(|j| {
            (0..n)
                .map(|k| {
                    let size = (inverse[j][j] * inverse[k][k]).sqrt();
                    if size > 0.0 { inverse[j][k] / size } else { 0.0 }
                })
                .collect()
        })
        .collect();
    (errors, correlations)
}

/// Inverse of a symmetric positive definite matrix, by Gauss-Jordan elimination without pivoting, which such a matrix does not need.
fn inverse(matrix: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let n = matrix.len();
    let mut left = matrix.to_vec();
    let mut right: Vec<Vec<f64>> = (0..n)
        .map(|i| (0..n).map(|j| f64::from(u8::from(i == j))).collect())
        .collect();
    for i in 0..n {
        let pivot = left[i][i];
        for j in 0..n {
            left[i][j] /= pivot;
            right[i][j] /= pivot;
        }
        for k in (0..n).filter(|&k| k != i) {
            let factor = left[k][i];
            for j in 0..n {
                left[k][j] -= factor * left[i][j];
                right[k][j] -= factor * right[i][j];
            }
        }
    }
    right
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A positive definite matrix `A^T A + I/10`, a gradient and bounds around zero.
    fn problem() -> impl Strategy<Value = (Vec<Vec<f64>>, Vec<f64>, Vec<f64>, Vec<f64>)> {
        let n = 5_usize;
        let numbers = |count| proptest::collection::vec(-2.0..2.0_f64, count);
        (numbers(n * n), numbers(n), numbers(n), numbers(n)).prop_map(move |(a, g, low, high)| {
            let hessian = (0..n)
                .map(|i| {
                    (0..n)
                        .map(|j| {
                            (0..n).map(|k| a[k * n + i] * a[k * n + j]).sum::<f64>()
                                + f64::from(u8::from(i == j)) * 0.1
                        })
                        .collect()
                })
                .collect();
            (
                hessian,
                g,
                low.iter().map(|l| -l.abs()).collect(),
                high.iter().map(|h| h.abs()).collect(),
            )
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, rng_seed: proptest::test_runner::RngSeed::Fixed(11), ..ProptestConfig::default() })]

        /// Optimality of a bounded quadratic: the slope vanishes inside, and points outwards at a bound.
        #[test]
        fn bounded_steps_are_optimal((hessian, gradient, low, high) in problem()) {
            let step = bounded_step(&hessian, &gradient, &low, &high);
            for j in 0..step.len() {
                let slope = gradient[j] + (0..step.len()).map(|k| hessian[j][k] * step[k]).sum::<f64>();
                prop_assert!(step[j] >= low[j] && step[j] <= high[j]);
                if step[j] > low[j] + 1e-9 && step[j] < high[j] - 1e-9 {
                    prop_assert!(slope.abs() < 1e-6, "slope {slope} inside");
                } else if step[j] <= low[j] + 1e-9 {
                    prop_assert!(slope > -1e-6, "slope {slope} at the lower bound");
                } else {
                    prop_assert!(slope < 1e-6, "slope {slope} at the upper bound");
                }
            }
        }
    }

    /// A line with one wild outlier: the soft absolute value keeps it from pulling.
    #[test]
    fn a_line_is_found_beside_an_outlier() {
        let points: Vec<(f64, f64)> = (0..20)
            .map(|i| (f64::from(i) / 10.0, 3.0 * f64::from(i) / 10.0 + 0.5))
            .collect();
        let rows: Vec<usize> = (0..points.len()).collect();
        let free = |prior| Free {
            prior,
            scale: 1.0,
            looseness: 100.0,
            low: 0.0,
            high: 10.0,
            rows: rows.clone(),
        };
        let solution = fit(
            &[free(1.0), free(1.0)],
            &[1.0, 1.0],
            &vec![1.0; points.len()],
            |x, rows| {
                rows.iter()
                    .map(|&i| x[0] * points[i].0 + x[1] - points[i].1 - if i == 7 { 50.0 } else { 0.0 })
                    .collect()
            },
        );
        assert!((solution.values[0] - 3.0).abs() < 0.05, "{:?}", solution.values);
        assert!((solution.values[1] - 0.5).abs() < 0.05, "{:?}", solution.values);
    }

    #[test]
    fn a_bound_holds() {
        let rows: Vec<usize> = (0..5).collect();
        let free = Free {
            prior: 1.0,
            scale: 1.0,
            looseness: 100.0,
            low: 0.5,
            high: 2.0,
            rows,
        };
        let solution = fit(&[free], &[1.0], &[1.0; 5], |x, rows| {
            rows.iter().map(|_| x[0] + 1.0).collect()
        });
        assert!((solution.values[0] - 0.5).abs() < 1e-12);
    }
}
