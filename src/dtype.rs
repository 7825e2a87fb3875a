//! Number formats of tensors, and what they cost in bytes and matrix-unit passes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A number format as the chips and the workloads name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Dtype {
    /// IEEE binary64; only the reference recurrence and exact checks use it.
    #[serde(rename = "f64")]
    F64,
    /// IEEE binary32.
    #[serde(rename = "f32")]
    F32,
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    #[serde(rename = "bf16")]
    Bf16,
    /// IEEE binary16; matrix units run it at the bf16 rate.
    #[serde(rename = "f16")]
    F16,
    /// OCP FP8 E4M3 (finite range, maximum 448, overflow is NaN).
    #[serde(rename = "fp8_e4m3")]
    Fp8E4m3,
    /// OCP FP8 E5M2 (IEEE-like, maximum 57344, overflow is infinity).
    #[serde(rename = "fp8_e5m2")]
    Fp8E5m2,
    /// Signed 8-bit integer.
    #[serde(rename = "int8")]
    Int8,
}

impl Dtype {
    /// Every format, in the order of the enum.
    pub const ALL: [Dtype; 7] = [
        Dtype::F64,
        Dtype::F32,
        Dtype::Bf16,
        Dtype::F16,
        Dtype::Fp8E4m3,
        Dtype::Fp8E5m2,
        Dtype::Int8,
    ];

    /// Storage of one element, in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::Fp8E4m3 | Dtype::Fp8E5m2 | Dtype::Int8 => 1,
        }
    }

    /// The name used in YAML, CSV and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F64 => "f64",
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::Fp8E4m3 => "fp8_e4m3",
            Dtype::Fp8E5m2 => "fp8_e5m2",
            Dtype::Int8 => "int8",
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
