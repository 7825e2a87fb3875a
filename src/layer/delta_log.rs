//! Decoding with a log of updates beside the state (`DeltaLog`, 2026).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;

/// Where the log goes into the base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Merge {
    /// In the last step of an interval, which has the base on chip anyway: it writes the base and appends nothing.
    Fused,
    /// In a launch of its own after an interval of appending steps, which reads the base once more.
    Separate,
}

impl Merge {
    /// The name used in YAML.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Merge::Fused => "fused",
            Merge::Separate => "separate",
        }
    }
}

/// The state of a decode step as a dense base and a log of updates: with entries `(k_j, u_j, Lam_j)`, `Lam_j` the log decay since the last merge,
///
/// ```text
/// S = e^Lam_L B + sum_j (e^(Lam_L - Lam_j) k_j)^T u_j
/// ```
///
/// Most steps append an entry, and the base is written once in `interval` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DeltaLog {
    /// Steps from merge to merge, at least 1.
    pub interval: usize,
    /// Format of logged keys.
    pub keys: Dtype,
    /// Format of logged updates.
    pub updates: Dtype,
    /// Where the log goes into the base.
    pub merge: Merge,
    /// Which step of the interval a graph is, below `interval`: the entries of the log before it.
    pub position: usize,
}

impl DeltaLog {
    /// Formats of keys and updates.
    pub const FORMATS: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

    /// Entries there is room for. A step that merges appends nothing.
    #[must_use]
    pub const fn slots(&self) -> usize {
        match self.merge {
            Merge::Fused => self.interval.saturating_sub(1),
            Merge::Separate => self.interval,
        }
    }

    /// Whether the step at this position writes the base.
    #[must_use]
    pub const fn merges(&self) -> bool {
        matches!(self.merge, Merge::Fused) && self.position + 1 >= self.interval
    }

    /// Another step of the interval.
    #[must_use]
    pub const fn at(self, position: usize) -> Self {
        DeltaLog { position, ..self }
    }

    /// Bytes of an entry of one state of `key_dim x value_dim` with `decays` cumulative decays in f32.
    #[must_use]
    pub const fn entry_bytes(&self, key_dim: u64, value_dim: u64, decays: u64) -> u64 {
        key_dim * self.keys.bytes() + value_dim * self.updates.bytes() + decays * Dtype::F32.bytes()
    }
}
