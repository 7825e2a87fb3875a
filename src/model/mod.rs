//! Models: blocks of layers one after the other, each a mixer with its feed-forward network, between an embedding and a head.
//!
//! A mixer is a layer as workloads describe it. What stands around it are op graphs of their own ([`graphs`]). `file` reads models, `huggingface` makes one of a
//! public `config.json`.

mod file;
pub mod graphs;
mod huggingface;
mod load;
#[cfg(test)]
mod tests;

pub use file::from_document;
pub use huggingface::{families, from_config};
pub use load::{load, load_huggingface, shipped, shipped_text};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::kernels::Program;
use crate::layer::Layer;
use crate::workload::DefaultValue;
use graphs::BlockFormats;

/// How a router makes scores of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of every logit.
    Sigmoid,
}

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// Experts to choose from.
    pub count: usize,
    /// Experts that a token goes to.
    pub active: usize,
    /// Hidden channels of one expert.
    pub hidden: usize,
    /// Hidden channels of the expert that every token goes to, where there is one; several side by side are one.
    pub shared_hidden: Option<usize>,
    /// Whether the result of the shared expert is multiplied by `sigmoid(x w)`.
    pub shared_gate: bool,
    /// Scores of the router.
    pub scores: Scores,
    /// Whether a trained bias is added to the scores for the choice.
    pub bias: bool,
    /// Whether the scores of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// Factor of the result.
    pub scale: f64,
}

impl Experts {
    /// Experts that `tokens` tokens touch, in expectation, where each chooses `active` different ones of `count` at random and uniformly:
    /// `count (1 - (1 - active / count)^tokens)`.
    #[must_use]
    pub fn touched(&self, tokens: f64) -> f64 {
        let count = self.count as f64;
        let missed = (1.0 - self.active as f64 / count).max(0.0);
        count * (1.0 - missed.powf(tokens))
    }
}

/// What follows a mixer.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    /// Nothing: the mixer is the whole block.
    None,
    /// A gated network with that many hidden channels.
    Dense(usize),
    /// A mixture of experts.
    Experts(Experts),
}

/// Fusion plan of a mixer on either architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanChoice {
    /// On a TPU.
    pub tpu: String,
    /// On a GPU.
    pub gpu: String,
}

/// Blocks of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    /// What the kind is called in the outputs.
    pub name: String,
    /// Blocks of it.
    pub count: usize,
    /// Fusion plans of the mixer in a prefill.
    pub plan: PlanChoice,
    /// Fusion plans of the mixer in a decode step.
    pub decode_plan: PlanChoice,
    /// What a program of a launch with a state works on.
    pub program: Program,
    /// Path of the mixer in the file, for messages.
    path: String,
    /// What follows the mixer.
    pub feed_forward: FeedForward,
    /// The layer of the mixer at the first point of the prefill; extents change from point to point.
    pub mixer: Layer,
    /// The layer of a decode step.
    pub decode_mixer: Layer,
}

/// Prompts of one size, read at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillPoint {
    /// Sequences.
    pub batch: usize,
    /// Tokens of each.
    pub tokens: usize,
}

/// Sequences that each get one more token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodePoint {
    /// Sequences.
    pub batch: usize,
    /// Tokens before the decoded one.
    pub context: usize,
}

/// A time that somebody measured for a whole model.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedPoint {
    /// Sequences.
    pub batch: usize,
    /// What was run, for instance `dense baseline`.
    pub method: String,
    /// Plan of the decode steps it is compared with; `None` for a method that no plan here stands for.
    pub plan: Option<String>,
    /// Interval of the log of its decode steps; `None` for a dense state.
    pub log_interval: Option<usize>,
    /// Time per output token, in microseconds.
    pub time_us: f64,
}

/// Published times of decode steps.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedModel {
    /// Where they are printed.
    pub source: String,
    /// Chip they hold for.
    pub chip: String,
    /// Points.
    pub points: Vec<PublishedPoint>,
}

/// A checked model.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Name.
    pub name: String,
    /// Where its sizes come from.
    pub source: String,
    /// Width of the residual stream.
    pub width: usize,
    /// Words of the vocabulary, padding included.
    pub vocabulary: usize,
    /// Whether the head uses the matrix of the embedding.
    pub tied_embeddings: bool,
    /// Formats of activations and weights.
    pub formats: BlockFormats,
    /// Kinds of blocks, in the order of the file.
    pub blocks: Vec<Block>,
    /// Sizes of prefills.
    pub prefill: Vec<PrefillPoint>,
    /// Sizes of decode steps.
    pub decode: Vec<DecodePoint>,
    /// Chips, by name or path.
    pub hardware: Vec<String>,
    /// Published times.
    pub published: Option<PublishedModel>,
    /// What the file itself marks as assumed.
    pub assumed: Vec<String>,
    /// Fields the file leaves out, with the value taken.
    pub defaults: Vec<DefaultValue>,
}

impl Block {
    /// The layer of the mixer in a prefill.
    #[must_use]
    pub fn prefill_layer(&self, point: PrefillPoint) -> Layer {
        Layer {
            batch: point.batch,
            tokens: point.tokens,
            ..self.mixer.clone()
        }
    }

    /// The layer of the mixer in a decode step.
    #[must_use]
    pub fn decode_layer(&self, point: DecodePoint) -> Layer {
        let positions = self.decode_mixer.mechanism.uses("context");
        Layer {
            batch: point.batch,
            context: if positions { point.context } else { 0 },
            ..self.decode_mixer.clone()
        }
    }

    /// Path of the mixer in the file.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl Model {
    /// Blocks of all kinds.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.blocks.iter().map(|block| block.count).sum()
    }

    /// Elements of the matrix of the embedding.
    #[must_use]
    pub fn embedding_elements(&self) -> u64 {
        self.vocabulary as u64 * self.width as u64
    }
}

/// JSON schema of models, from the structs that read them.
#[must_use]
pub fn schema(generator: schemars::SchemaGenerator) -> schemars::Schema {
    file::schema(generator)
}

/// Formats that weights can have.
const WEIGHTS: [Dtype; 5] = [
    Dtype::Bf16,
    Dtype::F16,
    Dtype::F32,
    Dtype::Fp8E4m3,
    Dtype::Fp8E5m2,
];
