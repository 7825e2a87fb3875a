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
}
