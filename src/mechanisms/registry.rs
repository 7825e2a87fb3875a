//! What a mechanism says of itself.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{ALL, Core, Granularity};
use crate::graph::Builder;
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

/// Groups of optional fields of a layer that mechanisms read.
pub mod fields {
    /// Formats, projections, convolution, state: read by every mechanism with a recurrent state.
    pub const COMMON: &[&str] = &[
        "activations",
        "state",
        "state_precision",
        "conv_width",
        "output_gate",
        "gate_rank",
        "initial_state",
        "value_heads",
        "chunk",
    ];
    /// [`COMMON`] without the convolution and the output gate: of mechanisms that have none or whose gate is fixed.
    pub const STATE: &[&str] = &[
        "activations",
        "state",
        "state_precision",
        "initial_state",
        "value_heads",
        "chunk",
    ];
    /// Output gate of mechanisms without convolution.
    pub const OUTPUT_GATE: &[&str] = &["output_gate", "gate_rank"];
    /// Linear attention: feature map and normaliser.
    pub const FEATURES: &[&str] = &["feature_map", "normaliser"];
    /// Rank of the projection of the decay.
    pub const DECAY_RANK: &[&str] = &["decay_rank"];
    /// Rank of the data-dependent token-shift mixes.
    pub const MIX_RANK: &[&str] = &["mix_rank"];
    /// Chunk inverse without the rest of the delta rule.
    pub const INVERSE: &[&str] = &["inverse", "inverse_precision", "neumann_steps"];
    /// Sequences of different lengths packed one after the other.
    pub const PACKED: &[&str] = &["sequences", "padded_rows"];
    /// One token per sequence; a mechanism that reads these builds its graph for [`crate::layer::Pass::Decode`] too.
    pub const DECODE: &[&str] = &["readout", "state_products"];
    /// A log of updates beside the state of a decode step: of mechanisms with one outer-product update per token.
    pub const DELTA_LOG: &[&str] = &["log_interval", "log_keys", "log_updates", "log_merge"];
    /// Tokens before the decoded one: of mechanisms to which positions matter. They too build their graph for [`crate::layer::Pass::Decode`].
    pub const CONTEXT: &[&str] = &["context"];
    /// A tree of speculated tokens; a mechanism that reads these builds its graph for [`crate::layer::Pass::Verify`] too.
    pub const VERIFY: &[&str] = &["tree", "accepted"];
    /// Fields of the chunk form, without meaning for a decode step.
    pub const CHUNK_FORM: &[&str] = &[
        "gram",
        "pivot",
        "inverse",
        "inverse_precision",
        "neumann_steps",
        "solve",
        "sequences",
        "padded_rows",
        "block_q",
        "causal",
        "whitening_refresh",
        "whitening_precision",
    ];
    /// Softmax attention of every kind.
    pub const ATTENTION: &[&str] = &[
        "activations",
        "output_gate",
        "gate_rank",
        "block_q",
        "block_kv",
        "causal",
        "window",
        "scale",
        "rotary",
        "rotary_base",
        "ssmax",
    ];
    /// Attention whose query heads share key heads.
    pub const GROUPED_ATTENTION: &[&str] = &["query_heads", "qk_norm"];
    /// Attention whose keys and values come from a latent.
    pub const LATENT_ATTENTION: &[&str] = &["latent_rank", "decoupled_dim", "query_rank"];
    /// Chunk Gram matrices.
    pub const GRAM: &[&str] = &["gram", "pivot"];
    /// Data-dependent decay.
    pub const DECAY: &[&str] = &["decay_gate", "decay_bound"];
    /// Decay per tile of key channels.
    pub const TILES: &[&str] = &["decay_tiles"];
    /// Delta rule: chunk inverse, read convention, step size.
    pub const DELTA: &[&str] = &[
        "inverse",
        "inverse_precision",
        "neumann_steps",
        "solve",
        "read",
        "negative_eigenvalues",
    ];
    /// Delta rule whose read convention is part of the mechanism, or makes no difference.
    pub const DELTA_ONE_READ: &[&str] = &[
        "inverse",
        "inverse_precision",
        "neumann_steps",
        "solve",
        "negative_eigenvalues",
    ];
    /// Several writes per token.
    pub const HOUSEHOLDER: &[&str] = &["householder_steps"];
    /// `MesaNet`, which keeps its state in f32.
    pub const MESA: &[&str] = &[
        "activations",
        "state_precision",
        "conv_width",
        "output_gate",
        "gate_rank",
        "initial_state",
        "value_heads",
        "chunk",
        "forgetting",
        "cg_steps",
    ];
    /// Whitened write keys.
    pub const WHITENING: &[&str] = &["whitening", "whitening_refresh", "whitening_precision"];
}

/// Usual values of the optional fields that differ between mechanisms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Defaults {
    /// Inverse variant.
    pub inverse: InverseVariant,
    /// Formula of the decay.
    pub decay_gate: DecayGate,
    /// Bound of the bounded gate, in nats per token.
    pub decay_bound: f64,
    /// Step sizes up to 2.
    pub negative_eigenvalues: bool,
    /// Output gate.
    pub output_gate: OutputGate,
}

/// A mechanism.
pub struct Mechanism {
    /// Name in workload files.
    pub name: &'static str,
    /// What it is, in a few words.
    pub title: &'static str,
    /// Where it is published.
    pub source: &'static str,
    /// Whether the values of a key head lie side by side in one wide state.
    pub packed: bool,
    /// How finely its decay is resolved.
    pub granularity: fn(&Layer) -> Granularity,
    /// Groups of optional fields it reads; others are refused.
    pub fields: &'static [&'static [&'static str]],
    /// Usual values.
    pub defaults: Defaults,
    /// Appends all stages of the layer.
    pub append: fn(&mut Builder, &Layer) -> Core,
}

impl Mechanism {
    /// Whether it reads an optional field of the layer.
    #[must_use]
    pub fn uses(&self, field: &str) -> bool {
        self.fields.iter().any(|group| group.contains(&field))
    }

    /// Whether it has a decode step.
    #[must_use]
    pub fn decodes(&self) -> bool {
        let steps = [fields::DECODE, fields::CONTEXT];
        steps.into_iter().flatten().any(|field| self.uses(field))
    }

    /// Whether it verifies trees of speculated tokens.
    #[must_use]
    pub fn verifies(&self) -> bool {
        fields::VERIFY.iter().any(|field| self.uses(field))
    }

    /// The mechanism called `name`.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Mechanism> {
        ALL.iter().copied().find(|mechanism| mechanism.name == name)
    }
}

impl std::fmt::Debug for Mechanism {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Mechanism {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Serialize for Mechanism {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

/// The names, each with what it is.
impl JsonSchema for Mechanism {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        Cow::Borrowed("Mechanism")
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let names = ALL
            .iter()
            .map(|mechanism| serde_json::json!({ "const": mechanism.name, "description": mechanism.title }));
        json_schema!({ "oneOf": names.collect::<Vec<_>>() })
    }
}

impl<'de> Deserialize<'de> for &'static Mechanism {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = &'static Mechanism;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("the name of a mechanism, such as `kda`")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Self::Value, E> {
                Mechanism::named(name).ok_or_else(|| {
                    let names: Vec<&str> = ALL.iter().map(|m| m.name).collect();
                    let tail = crate::config::suggestion(name, &names, "mechanisms");
                    E::custom(format!("unknown mechanism `{name}`; {tail}"))
                })
            }
        }
        deserializer.deserialize_str(Name)
    }
}
