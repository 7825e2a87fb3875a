//! How far two results are apart.

use ndarray::{ArrayBase, Data, Dimension};
use serde::Serialize;

use super::real::Real;

/// Distance of a result from a reference, relative to the reference as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RelativeError {
    /// `max |a - b| / max |b|`.
    pub max: f64,
    /// `sqrt(sum (a - b)^2 / sum b^2)`.
    pub rms: f64,
    /// Places where either is NaN or infinite. If there is one, both errors are infinite.
    pub non_finite: u64,
}

impl RelativeError {
    /// Whether everything is finite and the largest error is at most `tolerance`.
    #[must_use]
    pub fn within(self, tolerance: f64) -> bool {
        self.non_finite == 0 && self.max <= tolerance
    }
}

/// The error of `result` against `reference`, element by element in logical order; `None` if their shapes differ.
///
/// Against a reference of zeros, the error is 0 if the result is zero too and infinite otherwise.
pub fn relative_error<A, B, S, T, D>(
    result: &ArrayBase<S, D>,
    reference: &ArrayBase<T, D>,
) -> Option<RelativeError>
where
    A: Real,
    B: Real,
    S: Data<Elem = A>,
    T: Data<Elem = B>,
    D: Dimension,
{
    if result.shape() != reference.shape() {
        return None;
    }
    let mut non_finite = 0;
    let (mut largest, mut largest_error, mut energy, mut error_energy) = (0.0_f64, 0.0_f64, 0.0, 0.0);
    for (&a, &b) in result.iter().zip(reference) {
        let (a, b) = (a.to_f64(), b.to_f64());
        let error = a - b;
        if a.is_finite() && b.is_finite() {
            largest = largest.max(b.abs());
            largest_error = largest_error.max(error.abs());
            energy += b * b;
            error_energy += error * error;
        } else {
            non_finite += 1;
        }
    }
    let ratio = |part: f64, whole: f64| {
        if non_finite > 0 || (whole == 0.0 && part > 0.0) {
            f64::INFINITY
        } else if part == 0.0 {
            0.0
        } else {
            part / whole
        }
    };
    Some(RelativeError {
        max: ratio(largest_error, largest),
        rms: ratio(error_energy, energy).sqrt(),
        non_finite,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn errors_are_relative_to_the_whole_reference() {
        let error = relative_error(&array![3.0_f32, 4.5], &array![3.0_f64, 4.0]).unwrap();
        assert!(
            (error.max - 0.125).abs() < 1e-15 && (error.rms - 0.1).abs() < 1e-15,
            "{error:?}"
        );
        assert!(error.within(0.125) && !error.within(0.1));
    }

    #[test]
    fn a_nan_is_never_a_small_error() {
        let error = relative_error(&array![1.0, f64::NAN], &array![1.0, 2.0]).unwrap();
        assert_eq!(error.non_finite, 1);
        assert!(error.max.is_infinite() && error.rms.is_infinite() && !error.within(1e300));
    }

    #[test]
    fn zeros_and_shapes() {
        let zero = array![0.0, 0.0];
        assert!(relative_error(&zero, &zero).unwrap().within(0.0));
        assert!(
            relative_error(&array![0.0, 1.0], &zero)
                .unwrap()
                .max
                .is_infinite()
        );
        assert!(relative_error(&array![0.0], &zero).is_none());
    }
}
