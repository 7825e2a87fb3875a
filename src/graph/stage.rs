//! The stages of a layer.

use serde::{Deserialize, Serialize};

/// A stage of a linear-attention layer, in the numbering of the field's stage tables, or of what stands around the layers of a model.
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
    /// Residual addition and RMS norm between the parts of a block of a model.
    #[serde(rename = "norm")]
    BlockNorm,
    /// Scores of the experts and the choice of the best.
    #[serde(rename = "router")]
    Router,
    /// First products of the chosen experts, gate and value side by side.
    #[serde(rename = "experts-up")]
    ExpertsUp,
    /// Activation and gate of the experts.
    #[serde(rename = "experts-gate")]
    ExpertsGate,
    /// Second products of the chosen experts.
    #[serde(rename = "experts-down")]
    ExpertsDown,
    /// Weighted sum of what the experts of a token return.
    #[serde(rename = "combine")]
    Combine,
    /// First product of a gated feed-forward network.
    #[serde(rename = "mlp-up")]
    FeedForwardUp,
    /// Activation and gate of a feed-forward network.
    #[serde(rename = "mlp-gate")]
    FeedForwardGate,
    /// Second product of a feed-forward network.
    #[serde(rename = "mlp-down")]
    FeedForwardDown,
    /// Scores of the vocabulary.
    #[serde(rename = "head")]
    Head,
}

impl Stage {
    /// Every stage, in order of execution.
    pub const ALL: [Stage; 23] = [
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
        Stage::BlockNorm,
        Stage::Router,
        Stage::ExpertsUp,
        Stage::ExpertsGate,
        Stage::ExpertsDown,
        Stage::Combine,
        Stage::FeedForwardUp,
        Stage::FeedForwardGate,
        Stage::FeedForwardDown,
        Stage::Head,
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
            Stage::BlockNorm => "norm",
            Stage::Router => "router",
            Stage::ExpertsUp => "experts-up",
            Stage::ExpertsGate => "experts-gate",
            Stage::ExpertsDown => "experts-down",
            Stage::Combine => "combine",
            Stage::FeedForwardUp => "mlp-up",
            Stage::FeedForwardGate => "mlp-gate",
            Stage::FeedForwardDown => "mlp-down",
            Stage::Head => "head",
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
            Stage::BlockNorm => "residual and norm",
            Stage::Router => "router",
            Stage::ExpertsUp => "first products of the experts",
            Stage::ExpertsGate => "activation and gate of the experts",
            Stage::ExpertsDown => "second products of the experts",
            Stage::Combine => "weighted sum over experts",
            Stage::FeedForwardUp => "first product of the feed-forward network",
            Stage::FeedForwardGate => "activation and gate",
            Stage::FeedForwardDown => "second product of the feed-forward network",
            Stage::Head => "scores of the vocabulary",
        }
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
