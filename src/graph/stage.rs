//! The stages of a layer.

use serde::{Deserialize, Serialize};

/// A stage of a linear-attention layer, in the numbering of the field's stage tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Stage {
    /// Projections of queries, keys, values and gates.
    #[serde(rename = "op1")]
    Projections,
    /// Short causal convolution, activation and query/key normalisation.
    #[serde(rename = "op2")]
    Convolution,
    /// Whitening of the write keys by the covariance of past chunks.
    #[serde(rename = "opw")]
    Whitening,
    /// Decay and step-size gates and their cumulative sum inside the chunk.
    #[serde(rename = "op3")]
    Gates,
    /// The two chunk Gram matrices.
    #[serde(rename = "op4")]
    Gram,
    /// Inverse of the unit lower-triangular chunk matrix.
    #[serde(rename = "op5a")]
    Inverse,
    /// WY factors: the inverse applied to values and keys.
    #[serde(rename = "op5b")]
    WyFactors,
    /// Scan of the state over chunks.
    #[serde(rename = "op6")]
    StateScan,
    /// Intra-chunk output and state readout.
    #[serde(rename = "op7a")]
    Output,
    /// Softmax attention over blocks of keys.
    #[serde(rename = "attention")]
    Attention,
    /// Output norm and gate.
    #[serde(rename = "op7b")]
    OutputNorm,
    /// Output projection.
    #[serde(rename = "op7c")]
    OutputProjection,
    /// State moved on along the accepted path of a tree of speculated tokens.
    #[serde(rename = "commit")]
    Commit,
}

impl Stage {
    /// Every stage, in order of execution.
    pub const ALL: [Stage; 13] = [
        Stage::Projections,
        Stage::Convolution,
        Stage::Whitening,
        Stage::Gates,
        Stage::Gram,
        Stage::Inverse,
        Stage::WyFactors,
        Stage::StateScan,
        Stage::Output,
        Stage::Attention,
        Stage::OutputNorm,
        Stage::OutputProjection,
        Stage::Commit,
    ];

    /// The name used in tables and files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Projections => "op1",
            Stage::Convolution => "op2",
            Stage::Whitening => "opw",
            Stage::Gates => "op3",
            Stage::Gram => "op4",
            Stage::Inverse => "op5a",
            Stage::WyFactors => "op5b",
            Stage::StateScan => "op6",
            Stage::Output => "op7a",
            Stage::Attention => "attention",
            Stage::OutputNorm => "op7b",
            Stage::OutputProjection => "op7c",
            Stage::Commit => "commit",
        }
    }

    /// What happens in it, in a few words.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Stage::Projections => "QKV and gate projections",
            Stage::Convolution => "causal convolution and QK norm",
            Stage::Whitening => "write-key whitening",
            Stage::Gates => "gates and cumulative decay",
            Stage::Gram => "chunk Gram matrices",
            Stage::Inverse => "chunk inverse",
            Stage::WyFactors => "WY factors",
            Stage::StateScan => "chunk state scan",
            Stage::Output => "intra-chunk output and state readout",
            Stage::Attention => "softmax attention",
            Stage::OutputNorm => "output norm and gate",
            Stage::OutputProjection => "output projection",
            Stage::Commit => "state commit of the accepted path",
        }
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
