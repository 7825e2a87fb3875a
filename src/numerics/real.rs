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

    /// `e^x`, within two units in the last place (one, but for a few arguments).
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

    /// Against the f64 exponential of the system: bit patterns of both signs from zero over subnormals to infinity and NaN, and the neighbours
    /// of every edge.
    #[test]
    fn f32_exponential_is_within_two_units_in_the_last_place() {
        let largest = f64::from(f32::MAX) + 2_f64.powi(103);
        let edges = [
            0.0_f32, 1.0, 87.336_54, 88.376_26, 88.722_83, 89.0, 103.278_93, 103.972_08, 104.0, 150.0,
        ];
        let near = edges.into_iter().flat_map(|x| {
            let bits = x.to_bits();
            bits.saturating_sub(300)..bits + 300
        });
        let range = (0..f32::NAN.to_bits() + 5000).step_by(1999);
        // Where the result is neither 0, 1 nor infinite.
        let middle = (1e-8_f32.to_bits()..110.0_f32.to_bits()).step_by(211);
        for bits in near.chain(range).chain(middle) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let (got, exact) = (exp_f32(x), f64::from(x).exp());
                if x.is_nan() {
                    assert!(got.is_nan(), "{bits:#x}");
                } else if exact >= largest {
                    assert_eq!(got.to_bits(), f32::INFINITY.to_bits(), "{x:e}");
                } else {
                    let below = (exact as f32).min(f32::MAX);
                    let unit = f64::from(below) - f64::from(below.next_down().max(0.0));
                    let unit = unit.max(f64::from(f32::from_bits(1)));
                    let error = (f64::from(got) - exact).abs() / unit;
                    assert!(error < 2.0, "{x:e}: {error} units");
                }
            }
        }
        for (x, expected) in [
            (0.0, 1.0),
            (-0.0, 1.0),
            (f32::NEG_INFINITY, 0.0),
            (f32::INFINITY, f32::INFINITY),
        ] {
            assert_eq!(exp_f32(x).to_bits(), f32::to_bits(expected), "{x}");
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
