//! Rounding to the number formats of the chips: to nearest, ties to even, subnormals included.

use crate::dtype::Dtype;

/// What a finite value becomes that rounds beyond the largest finite value of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overflow {
    /// An infinity, as in the IEEE formats.
    Infinity,
    /// NaN, as in OCP E4M3, which has no infinity; infinities become NaN too.
    Nan,
}

/// A binary floating-point format with subnormals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FloatFormat {
    /// Bits of the significand after the point.
    pub mantissa_bits: i32,
    /// Exponent of the smallest normal number.
    pub min_exponent: i32,
    /// Largest finite value.
    pub max: f64,
    /// What happens beyond it.
    pub overflow: Overflow,
}

impl FloatFormat {
    /// IEEE binary32.
    pub const F32: FloatFormat = FloatFormat {
        mantissa_bits: 23,
        min_exponent: -126,
        max: f32::MAX as f64,
        overflow: Overflow::Infinity,
    };
    /// bfloat16; the largest value is `(2 - 2^-7) 2^127`.
    pub const BF16: FloatFormat = FloatFormat {
        mantissa_bits: 7,
        min_exponent: -126,
        max: 3.389_531_389_251_535_5e38,
        overflow: Overflow::Infinity,
    };
    /// IEEE binary16.
    pub const F16: FloatFormat = FloatFormat {
        mantissa_bits: 10,
        min_exponent: -14,
        max: 65504.0,
        overflow: Overflow::Infinity,
    };
    /// OCP FP8 E4M3 ("OCP 8-bit Floating Point Specification", 1.0): the all-ones code is NaN, there is no infinity.
    pub const E4M3: FloatFormat = FloatFormat {
        mantissa_bits: 3,
        min_exponent: -6,
        max: 448.0,
        overflow: Overflow::Nan,
    };
    /// OCP FP8 E5M2 (same specification): IEEE-like.
    pub const E5M2: FloatFormat = FloatFormat {
        mantissa_bits: 2,
        min_exponent: -14,
        max: 57344.0,
        overflow: Overflow::Infinity,
    };

    /// The format behind a dtype; `None` for the integer format and for f64, which nothing is rounded to.
    #[must_use]
    pub const fn of(dtype: Dtype) -> Option<FloatFormat> {
        match dtype {
            Dtype::F64 | Dtype::Int8 => None,
            Dtype::F32 => Some(FloatFormat::F32),
            Dtype::Bf16 => Some(FloatFormat::BF16),
            Dtype::F16 => Some(FloatFormat::F16),
            Dtype::Fp8E4m3 => Some(FloatFormat::E4M3),
            Dtype::Fp8E5m2 => Some(FloatFormat::E5M2),
        }
    }

    /// `x` rounded to the nearest value of the format, ties to the even significand.
    #[inline]
    #[must_use]
    pub fn round(self, x: f64) -> f64 {
        // floor(log2 |x|) from the exponent field; f64 subnormals and zero read as far below every format's smallest normal.
        let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
        let quantum_exponent = exponent.max(self.min_exponent) - self.mantissa_bits;
        // Adding 1.5 * 2^52 quanta leaves no bit below one quantum, and the hardware add rounds to nearest even. The clamp only
        // touches infinities and NaN, which pass through.
        let shifter = 1.5 * power_of_two((quantum_exponent + 52).min(1023));
        let rounded = ((x + shifter) - shifter).copysign(x);
        if rounded.abs() <= self.max {
            rounded
        } else if x.is_nan() || self.overflow == Overflow::Nan {
            f64::NAN
        } else {
            f64::INFINITY.copysign(x)
        }
    }
}

/// `2^exponent` for exponents of normal f64 numbers.
#[inline]
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// `x` rounded to the format of `dtype`, to nearest even; f64 is left alone. Integers saturate, and NaN becomes 0 as in a
/// float-to-integer conversion.
#[must_use]
pub fn round_to(dtype: Dtype, x: f64) -> f64 {
    match dtype {
        Dtype::F64 => x,
        Dtype::F32 => f64::from(x as f32),
        Dtype::Int8 => round_int8(x),
        Dtype::Bf16 => FloatFormat::BF16.round(x),
        Dtype::F16 => FloatFormat::F16.round(x),
        Dtype::Fp8E4m3 => FloatFormat::E4M3.round(x),
        Dtype::Fp8E5m2 => FloatFormat::E5M2.round(x),
    }
}

/// `x` rounded to bf16, on the bits of the f32.
#[inline]
#[must_use]
pub fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    // Half of the last kept place, less one where that place is even: ties go to even, and a carry runs on into the exponent.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    if x.is_nan() {
        f32::NAN
    } else {
        f32::from_bits(rounded)
    }
}

#[inline]
fn round_int8(x: f64) -> f64 {
    const SHIFTER: f64 = 1.5 * (1_u64 << 52) as f64;
    let clamped = if x.is_nan() { 0.0 } else { x.clamp(-128.0, 127.0) };
    (clamped + SHIFTER) - SHIFTER
}

/// Rounds every element of a slice of f32 to `dtype`; f64 and f32 leave it alone.
pub fn round_slice_f32(dtype: Dtype, values: &mut [f32]) {
    match dtype {
        Dtype::F64 | Dtype::F32 => {}
        Dtype::Bf16 => {
            for x in values {
                *x = round_bf16(*x);
            }
        }
        Dtype::F16 => round_each(values, |x| FloatFormat::F16.round(x)),
        Dtype::Fp8E4m3 => round_each(values, |x| FloatFormat::E4M3.round(x)),
        Dtype::Fp8E5m2 => round_each(values, |x| FloatFormat::E5M2.round(x)),
        Dtype::Int8 => round_each(values, round_int8),
    }
}

fn round_each(values: &mut [f32], round: impl Fn(f64) -> f64) {
    for x in values {
        *x = round(f64::from(*x)) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use microfloat::{f8e4m3fn, f8e5m2};
    use proptest::prelude::*;

    /// All finite non-negative values of an 8-bit format, ascending, decoded by the oracle.
    fn ladder(decode: impl Fn(u8) -> f32) -> Vec<f64> {
        (0..=0x7f_u8)
            .map(decode)
            .filter(|x| x.is_finite())
            .map(f64::from)
            .collect()
    }

    fn same(a: f64, b: f64) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    #[test]
    fn every_fp8_code_is_a_fixed_point() {
        for code in 0..=255_u8 {
            let e4m3 = f64::from(f8e4m3fn::from_bits(code).to_f32());
            assert!(
                same(round_to(Dtype::Fp8E4m3, e4m3), e4m3),
                "e4m3 {code:#x} {e4m3}"
            );
            let e5m2 = f64::from(f8e5m2::from_bits(code).to_f32());
            assert!(
                same(round_to(Dtype::Fp8E5m2, e5m2), e5m2),
                "e5m2 {code:#x} {e5m2}"
            );
        }
    }

    #[test]
    fn fp8_ties_go_to_the_even_code_and_neighbours_of_a_tie_to_the_nearer() {
        let formats: [(Dtype, Vec<f64>); 2] = [
            (Dtype::Fp8E4m3, ladder(|code| f8e4m3fn::from_bits(code).to_f32())),
            (Dtype::Fp8E5m2, ladder(|code| f8e5m2::from_bits(code).to_f32())),
        ];
        for (dtype, values) in formats {
            assert!(values.len() > 120);
            for (code, pair) in values.windows(2).enumerate() {
                let (low, high) = (pair[0], pair[1]);
                let tie = f64::midpoint(low, high);
                let even = if code % 2 == 0 { low } else { high };
                for sign in [1.0, -1.0] {
                    assert!(
                        same(round_to(dtype, sign * tie), sign * even),
                        "{dtype} tie {tie}"
                    );
                    assert!(
                        same(round_to(dtype, sign * tie.next_down()), sign * low),
                        "{dtype} below {tie}"
                    );
                    assert!(
                        same(round_to(dtype, sign * tie.next_up()), sign * high),
                        "{dtype} above {tie}"
                    );
                }
            }
        }
    }

    #[test]
    fn overflow_follows_the_ocp_specification() {
        for (x, expected) in [
            (448.0, 448.0),
            (464.0, 448.0),
            (464.1, f64::NAN),
            (1e30, f64::NAN),
        ] {
            assert!(same(round_to(Dtype::Fp8E4m3, x), expected), "e4m3 {x}");
            assert!(same(round_to(Dtype::Fp8E4m3, -x), -expected), "e4m3 -{x}");
        }
        assert!(round_to(Dtype::Fp8E4m3, f64::INFINITY).is_nan());
        for (x, expected) in [
            (61439.9, 57344.0),
            (61440.0, f64::INFINITY),
            (f64::INFINITY, f64::INFINITY),
        ] {
            assert!(same(round_to(Dtype::Fp8E5m2, x), expected), "e5m2 {x}");
            assert!(same(round_to(Dtype::Fp8E5m2, -x), -expected), "e5m2 -{x}");
        }
        for dtype in [
            Dtype::Fp8E4m3,
            Dtype::Fp8E5m2,
            Dtype::F16,
            Dtype::Bf16,
            Dtype::F32,
        ] {
            assert!(round_to(dtype, f64::NAN).is_nan(), "{dtype}");
            assert!(same(round_to(dtype, -0.0), -0.0), "{dtype}");
        }
    }

    #[test]
    fn int8_saturates_and_rounds_half_to_even() {
        for (x, expected) in [
            (0.5, 0.0),
            (1.5, 2.0),
            (-2.5, -2.0),
            (126.6, 127.0),
            (127.5, 127.0),
            (-1e9, -128.0),
            (f64::NAN, 0.0),
        ] {
            assert!((round_to(Dtype::Int8, x) - expected).abs() < f64::EPSILON, "{x}");
        }
    }

    /// Every bf16 and f16 code, the tie to its upper neighbour and the values around the tie, against `half`.
    #[test]
    fn sixteen_bit_formats_agree_with_half_on_every_code_and_tie() {
        for code in 0..=u16::MAX {
            let exact = f32::from_bits(u32::from(code) << 16);
            for x in [
                exact,
                f32::from_bits(exact.to_bits() | 0x8000),
                f32::from_bits(exact.to_bits() | 0x8001),
            ] {
                let expected = f64::from(bf16::from_f32(x).to_f32());
                assert!(same(f64::from(round_bf16(x)), expected), "bf16 {x:e}");
                assert!(same(round_to(Dtype::Bf16, f64::from(x)), expected), "bf16 {x:e}");
            }
            let (low, high) = (
                f16::from_bits(code).to_f32(),
                f16::from_bits(code.wrapping_add(1)).to_f32(),
            );
            let tie = f32::midpoint(low, high);
            // In f32, where ties are exact: narrowing from f64 in `half` drops the low half of the significand first.
            for x in [low, tie, tie.next_up(), tie.next_down()] {
                assert!(
                    same(round_to(Dtype::F16, f64::from(x)), f16::from_f32(x).to_f64()),
                    "f16 {x:e}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn any_bits_agree_with_the_oracles(bits in any::<u32>(), wide in any::<u64>()) {
            let x = f32::from_bits(bits);
            let mut slice = [x];
            for (dtype, expected) in [
                (Dtype::Bf16, bf16::from_f32(x).to_f32()),
                (Dtype::F16, f16::from_f32(x).to_f32()),
                (Dtype::Fp8E4m3, f8e4m3fn::from_f32(x).to_f32()),
                (Dtype::Fp8E5m2, f8e5m2::from_f32(x).to_f32()),
                (Dtype::F32, x),
            ] {
                prop_assert!(same(round_to(dtype, f64::from(x)), f64::from(expected)), "{} {:e}", dtype, x);
                slice[0] = x;
                round_slice_f32(dtype, &mut slice);
                prop_assert!(same(f64::from(slice[0]), f64::from(expected)), "{} {:e}", dtype, x);
            }
            let x = f64::from_bits(wide);
            prop_assert!(same(FloatFormat::F32.round(x), f64::from(x as f32)), "f32 {:e}", x);
        }

        #[test]
        fn magnitudes_in_reach_of_fp8_agree_with_the_oracles(x in -1000.0_f32..1000.0, shift in -20..0) {
            let x = x * (shift as f32).exp2();
            prop_assert!(same(round_to(Dtype::Fp8E4m3, f64::from(x)), f64::from(f8e4m3fn::from_f32(x).to_f32())));
            prop_assert!(same(round_to(Dtype::Fp8E5m2, f64::from(x)), f64::from(f8e5m2::from_f32(x).to_f32())));
        }
    }
}
