//! The two machine formats the graph can be executed in.

use ndarray::{ArcArray, IxDyn, NdFloat};

use super::round::{round_slice_f32, round_to};
use crate::dtype::Dtype;

/// A tensor of the execution. Its storage is shared between clones, so that a reshape or a slice of a scan costs nothing.
pub type Tensor<R> = ArcArray<R, IxDyn>;

/// f32 or f64.
pub trait Real: NdFloat {
    /// From f64, rounded to nearest even.
    fn from_f64(x: f64) -> Self;

    /// To f64, exactly.
    fn to_f64(self) -> f64;

    /// Rounds every element to `dtype`. Formats at least as wide as `Self` leave it alone.
    fn round_slice(dtype: Dtype, values: &mut [Self]);

    /// Whether [`Real::round_slice`] can change a value.
    fn rounds(dtype: Dtype) -> bool;

    /// Whether no element is NaN or infinite.
    fn all_finite(values: &[Self]) -> bool;

    /// `e^x`, within one unit in the last place.
    #[must_use]
    fn exponential(self) -> Self;
}

/// `e^x` in f32 by argument reduction and a Taylor polynomial, in operations that vectorise; the same bits on every machine.
#[inline]
fn exp_f32(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it rounds to an integer that stands in the low bits.
    const SHIFTER: f32 = 12_582_912.0;
    /// ln 2 in two parts; products of the first with integers up to 2^9 are exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Below -104 the result is 0, above 89 it is infinite; NaN fails both comparisons and stays.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + SHIFTER;
    let n = shifted - SHIFTER;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    // |r| <= ln(2)/2: the first term left out, r^8/8!, is below 6e-9.
    let tail = 1.0 / 720.0 + r * (1.0 / 5040.0);
    let tail = 1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * tail));
    let p = 1.0 + (r + r * r * (0.5 + r * tail));
    // 2^n in two factors, each a normal number: n runs from -150 to 128.
    let whole = shifted.to_bits().wrapping_sub(SHIFTER.to_bits()).cast_signed();
    let half = whole >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127).cast_unsigned()) << 23);
    p * power(half) * power(whole.wrapping_sub(half))
}

impl Real for f32 {
    fn from_f64(x: f64) -> Self {
        x as f32
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    fn round_slice(dtype: Dtype, values: &mut [Self]) {
        round_slice_f32(dtype, values);
    }

    fn rounds(dtype: Dtype) -> bool {
        !matches!(dtype, Dtype::F64 | Dtype::F32)
    }

    fn all_finite(values: &[Self]) -> bool {
        const EXPONENT: u32 = 0x7f80_0000;
        values
            .iter()
            .fold(0, |bad, x| bad | u32::from(x.to_bits() & EXPONENT == EXPONENT))
            == 0
    }

    #[inline]
    fn exponential(self) -> Self {
        exp_f32(self)
    }
}

impl Real for f64 {
    fn from_f64(x: f64) -> Self {
        x
    }

    fn to_f64(self) -> f64 {
        self
    }

    fn round_slice(dtype: Dtype, values: &mut [Self]) {
        if Self::rounds(dtype) {
            for x in values {
                *x = round_to(dtype, *x);
            }
        }
    }

    fn rounds(dtype: Dtype) -> bool {
        dtype != Dtype::F64
    }

    fn all_finite(values: &[Self]) -> bool {
        const EXPONENT: u64 = 0x7ff << 52;
        values
            .iter()
            .fold(0, |bad, x| bad | u64::from(x.to_bits() & EXPONENT == EXPONENT))
            == 0
    }

    #[inline]
    fn exponential(self) -> Self {
        self.exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the f64 exponential of the system, over the whole range and at its edges.
    #[test]
    fn f32_exponential_is_within_one_unit_in_the_last_place() {
        let mut worst = 0.0_f64;
        for i in 0..2_000_000 {
            let x = -87.3 + 176.0 * (i as f32 / 2_000_000.0);
            let exact = f64::from(x).exp();
            if exact < f64::from(f32::MAX) {
                let unit = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
                worst = worst.max((f64::from(exp_f32(x)) - exact).abs() / unit);
            }
        }
        assert!(worst < 1.0, "{worst}");
        for (x, expected) in [
            (0.0, 1.0),
            (f32::NEG_INFINITY, 0.0),
            (f32::INFINITY, f32::INFINITY),
            (-200.0, 0.0),
        ] {
            assert_eq!(exp_f32(x).to_bits(), f32::to_bits(expected), "{x}");
        }
        assert_eq!(exp_f32(88.73).to_bits(), f32::INFINITY.to_bits());
        assert!(exp_f32(88.72).is_finite() && exp_f32(f32::NAN).is_nan());
        // Subnormal results: absolute error below one quantum.
        for x in [-88.0_f32, -95.5, -100.0, -103.2] {
            assert!(
                (f64::from(exp_f32(x)) - f64::from(x).exp()).abs() <= 1.5e-45,
                "{x}"
            );
        }
    }

    #[test]
    fn every_kind_of_non_finite_element_is_seen_at_every_place() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for place in 0..37 {
                let mut values = [f64::MAX; 37];
                assert!(f64::all_finite(&values));
                values[place] = bad;
                assert!(!f64::all_finite(&values));
                let mut narrow = [f32::MIN; 37];
                narrow[place] = bad as f32;
                assert!(!f32::all_finite(&narrow) && f32::all_finite(&narrow[..place]));
            }
        }
    }
}
