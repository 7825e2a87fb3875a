//! A model file as it is written, and its checks.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, IntoDeserializer, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value as Json;

use super::graphs::BlockFormats;
use super::{
    Block, DecodePoint, Experts, FeedForward, Model, PlanChoice, PrefillPoint, PublishedModel,
    PublishedPoint, Scores, WEIGHTS,
};
use crate::config::{ConfigError, Document, listed, suggestion};
use crate::dtype::Dtype;
use crate::hardware;
use crate::kernels::{Plan, Program};
use crate::layer::{Layer, Pass};
use crate::mechanisms::Granularity;
use crate::workload::{DefaultValue, MixerExtents, Size, mixer};

/// A model of tpusim: blocks of layers between an embedding and a head, and the sizes it is run at.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ModelFile {
    /// Name of the model.
    name: String,
    /// Where the sizes come from, such as the address of a `config.json`.
    source: String,
    /// What holds for all blocks.
    model: SizesFile,
    /// Kinds of blocks, in order.
    #[schemars(length(min = 1))]
    blocks: Vec<BlockFile>,
    /// Prompts that are read at once.
    prefill: PrefillFile,
    /// Steps that give every sequence one more token.
    decode: DecodeFile,
    /// Chips to time it on: shipped names, or paths of hardware files relative to this one.
    #[schemars(schema_with = "crate::workload::chip_names")]
    hardware: Vec<String>,
    /// Published times of decode steps.
    published: Option<PublishedFile>,
    #[serde(default)]
    /// What in this file is assumed rather than published.
    assumed: Vec<String>,
}

/// What holds for all blocks of a model.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SizesFile {
    /// Width of the residual stream, in channels.
    width: Size,
    /// Words of the vocabulary.
    vocabulary: Size,
    /// Whether the head uses the matrix of the embedding.
    tied_embeddings: bool,
    /// Format of activations in device memory and of matrix operands.
    #[schemars(schema_with = "formats")]
    activations: Dtype,
    /// Format of the weight matrices in device memory; products run in the wider one of both formats.
    #[schemars(schema_with = "formats")]
    weights: Dtype,
}

/// Blocks of one kind.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BlockFile {
    /// What they are called in the outputs.
    name: String,
    /// Blocks of this kind.
    count: Size,
    /// Mixer: the fields of the layer of a workload, of both passes, without those that the model says.
    #[schemars(schema_with = "crate::workload::mixer_schema")]
    #[allow(dead_code, reason = "read as a layer, with what the model says")]
    mixer: serde::de::IgnoredAny,
    /// What follows the mixer; nothing where left out.
    feed_forward: Option<FeedForwardFile>,
    /// Fusion plans of the mixer in a prefill; the usual ones of the mechanism where left out.
    plan: Option<PlanFile>,
    /// Fusion plans of the mixer in a decode step; `fused` where left out.
    decode_plan: Option<PlanFile>,
}

/// Fusion plans of a mixer.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PlanFile {
    /// On a TPU.
    #[schemars(schema_with = "plan_name")]
    tpu: String,
    /// On a GPU.
    #[schemars(schema_with = "plan_name")]
    gpu: String,
}

/// A gated feed-forward network, or a mixture of them.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct FeedForwardFile {
    /// Hidden channels, of one expert where there are `experts`.
    hidden: Size,
    /// Experts to choose from; a dense network where left out.
    experts: Option<Size>,
    /// Experts that a token goes to.
    active: Option<Size>,
    /// Hidden channels of the expert that every token goes to.
    shared_hidden: Option<Size>,
    /// Whether the result of the shared expert has a gate; `false` where left out.
    shared_gate: Option<bool>,
    /// How the router makes scores of logits.
    scores: Option<Scores>,
    /// Whether a bias is added to the scores for the choice; `false` where left out.
    bias: Option<bool>,
    /// Whether the scores of the chosen experts are divided by their sum; `true` where left out.
    normalised: Option<bool>,
    /// Factor of the result; 1 where left out.
    #[schemars(extend("exclusiveMinimum" = 0))]
    scale: Option<f64>,
}

/// One size or several.
#[derive(Debug, Clone)]
struct Several(Vec<Size>);

impl<'de> Deserialize<'de> for Several {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany;
        impl<'de> Visitor<'de> for OneOrMany {
            type Value = Several;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a whole number of at least 1, or a list of such numbers")
            }
            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Several, E> {
                Size::deserialize(value.into_deserializer()).map(|size| Several(vec![size]))
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Several, E> {
                Size::deserialize(value.into_deserializer()).map(|size| Several(vec![size]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Several, A::Error> {
                let mut sizes = Vec::new();
                while let Some(size) = access.next_element()? {
                    sizes.push(size);
                }
                Ok(Several(sizes))
            }
        }
        deserializer.deserialize_any(OneOrMany)
    }
}

impl JsonSchema for Several {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        Cow::Borrowed("Several")
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let one = Size::json_schema(generator);
        json_schema!({ "anyOf": [{ "type": "array", "minItems": 1, "items": one }, one] })
    }
}

impl Several {
    fn list(&self) -> Vec<usize> {
        self.0.iter().map(|size| size.0).collect()
    }
}

/// Prompts that are read at once; every combination of lists is a point.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PrefillFile {
    /// Sequences, one number or a list.
    batch: Several,
    /// Tokens of each, one number or a list.
    tokens: Several,
}

/// Steps that give every sequence one more token; every combination of lists is a point.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DecodeFile {
    /// Sequences, one number or a list.
    batch: Several,
    /// Tokens before the decoded one, one number or a list.
    context: Several,
}

/// Times of decode steps that somebody published.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PublishedFile {
    /// Where the times are printed.
    source: String,
    /// Chip they hold for.
    chip: String,
    /// Times per output token.
    #[schemars(length(min = 1))]
    decode: Vec<PublishedRowFile>,
}

/// A published time per output token.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PublishedRowFile {
    /// Sequences.
    batch: Size,
    /// What was run.
    method: String,
    /// Plan of the decode steps that stands for it; none where left out.
    plan: Option<String>,
    /// `log_interval` of the mixers that stand for it; a dense state where left out.
    log_interval: Option<Size>,
    /// Time per output token, in milliseconds.
    #[schemars(extend("exclusiveMinimum" = 0))]
    time_ms: f64,
}

fn formats(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "enum": WEIGHTS.map(|dtype| Json::from(dtype.name())) })
}

fn plan_name(_: &mut SchemaGenerator) -> Schema {
    let mut names = Plan::NAMES.to_vec();
    names.push(Plan::SPLIT);
    json_schema!({ "enum": names })
}

/// JSON schema of a model, from the structs that read it.
pub(super) fn schema(generator: SchemaGenerator) -> Schema {
    generator.into_root_schema_for::<ModelFile>()
}

/// Whether the structs read a file, before any value is checked.
#[cfg(test)]
pub(super) fn well_formed(document: &Document) -> Result<(), ConfigError> {
    document.deserialize::<ModelFile>().map(|_| ())
}

/// Most blocks of a kind, and most points of a list: beyond any model, and products with 64-bit counts stay in range.
const MOST_BLOCKS: usize = 100_000;
/// Most points of prefills or decode steps.
const MOST_POINTS: usize = 1_000;
/// Tokens of a program of a kernel that carries a state, where that kernel is one of a TPU: those of the shipped workloads.
const PROGRAM_TOKENS: usize = 512;

/// The plans that a mechanism usually runs in: convolution to output in one kernel on a TPU, the kernels of flash-linear-attention on a GPU.
fn usual_plan(layer: &Layer) -> PlanChoice {
    let gpu = if layer.is_attention() {
        "fused"
    } else {
        match (
            (layer.mechanism.granularity)(layer),
            layer.mechanism.uses("inverse"),
        ) {
            (Granularity::Channel, _) => "fla_intra",
            (_, true) => "fla",
            (_, false) => "fla_output",
        }
    };
    PlanChoice {
        tpu: "fused".to_owned(),
        gpu: gpu.to_owned(),
    }
}

/// Reads and checks a model.
///
/// # Errors
/// Everything that does not fit, each at its place.
pub fn from_document(document: &Document) -> Result<Model, ConfigError> {
    let file: ModelFile = document.deserialize()?;
    let mut errors = Vec::new();
    let mut defaults = Vec::new();
    for (field, dtype) in [
        ("activations", file.model.activations),
        ("weights", file.model.weights),
    ] {
        if !WEIGHTS.contains(&dtype) {
            let message = format!(
                "`{dtype}` is no format of a model; one of {}",
                listed(WEIGHTS.map(Dtype::name))
            );
            errors.push(document.error_at(&format!("model.{field}"), message));
        }
    }
    if file.blocks.is_empty() {
        errors.push(document.error_at("blocks", "expected at least one kind of block, found none"));
    }
    if file.hardware.is_empty() {
        let message = "expected at least one chip, found none; `tpusim hw list` shows them";
        errors.push(document.error_at("hardware", message));
    }
    let mut lists = |field: &str, several: &Several| {
        let list = several.list();
        if list.is_empty() || list.len() > MOST_POINTS {
            let message = format!("expected from 1 to {MOST_POINTS} numbers, found {}", list.len());
            errors.push(document.error_at(field, message));
        }
        list
    };
    let (batches, tokens) = (
        lists("prefill.batch", &file.prefill.batch),
        lists("prefill.tokens", &file.prefill.tokens),
    );
    let (sequences, contexts) = (
        lists("decode.batch", &file.decode.batch),
        lists("decode.context", &file.decode.context),
    );
    ConfigError::collect(std::mem::take(&mut errors))?;
    let prefill: Vec<PrefillPoint> = batches
        .iter()
        .flat_map(|&batch| tokens.iter().map(move |&tokens| PrefillPoint { batch, tokens }))
        .collect();
    let decode: Vec<DecodePoint> = sequences
        .iter()
        .flat_map(|&batch| {
            contexts
                .iter()
                .map(move |&context| DecodePoint { batch, context })
        })
        .collect();
    // The largest sizes of both lists are those that can be too large.
    let largest = |list: &[usize]| list.iter().copied().max().unwrap_or(1);
    let largest_prefill = (largest(&batches), largest(&tokens));
    let largest_decode = (largest(&sequences), largest(&contexts));
    let mut blocks = Vec::new();
    for (i, block) in file.blocks.iter().enumerate() {
        match read_block(
            &file,
            block,
            i,
            document,
            (largest_prefill, largest_decode),
            &mut defaults,
        ) {
            Ok(block) => blocks.push(block),
            Err(error) => errors.push(error),
        }
    }
    let published = file
        .published
        .as_ref()
        .map(|p| published(p, &file, document, &mut errors));
    ConfigError::collect(errors)?;
    Ok(Model {
        name: file.name,
        source: file.source,
        width: file.model.width.0,
        vocabulary: file.model.vocabulary.0,
        tied_embeddings: file.model.tied_embeddings,
        formats: BlockFormats {
            activations: file.model.activations,
            weights: file.model.weights,
        },
        blocks,
        prefill,
        decode,
        hardware: file.hardware,
        published,
        assumed: file.assumed,
        defaults,
    })
}

fn read_block(
    file: &ModelFile,
    block: &BlockFile,
    i: usize,
    document: &Document,
    (prefill, decode): ((usize, usize), (usize, usize)),
    defaults: &mut Vec<DefaultValue>,
) -> Result<Block, ConfigError> {
    let at = |field: &str| format!("blocks.{i}.{field}");
    if block.count.0 > MOST_BLOCKS {
        let message = format!("expected at most {MOST_BLOCKS} blocks, found `{}`", block.count.0);
        return Err(document.error_at(&at("count"), message));
    }
    let path = at("mixer");
    let in_pass = |pass: Pass, (batch, tokens): (usize, usize)| {
        let extents = MixerExtents {
            pass,
            batch,
            tokens,
            width: file.model.width.0,
            activations: file.model.activations,
        };
        let (layer, defaults) = mixer(document, &path, extents)?;
        let layer = Layer {
            weights: file.model.weights,
            ..layer
        };
        Ok::<_, ConfigError>((layer, defaults))
    };
    let (prefill_mixer, of_prefill) = in_pass(Pass::Forward, prefill)?;
    let (decode_mixer, of_decode) = in_pass(Pass::Decode, decode)?;
    let mut take = |field: String, value: String| {
        let default = DefaultValue { field, value };
        if !defaults.contains(&default) {
            defaults.push(default);
        }
    };
    for default in of_prefill.into_iter().chain(of_decode) {
        let field = default.field.trim_start_matches("layer.");
        take(format!("{}.mixer.{field}", block.name), default.value);
    }
    let plan = if let Some(plan) = &block.plan {
        plan.choice(document, &at("plan"), Pass::Forward)?
    } else {
        let plan = usual_plan(&prefill_mixer);
        take(
            format!("{}.plan", block.name),
            format!("{} on a TPU, {} on a GPU", plan.tpu, plan.gpu),
        );
        plan
    };
    let decode_plan = if let Some(plan) = &block.decode_plan {
        plan.choice(document, &at("decode_plan"), Pass::Decode)?
    } else {
        take(format!("{}.decode_plan", block.name), "fused".to_owned());
        PlanChoice {
            tpu: "fused".to_owned(),
            gpu: "fused".to_owned(),
        }
    };
    let feed_forward = match &block.feed_forward {
        None => FeedForward::None,
        Some(written) => feed_forward(written, &at("feed_forward"), document)?,
    };
    Ok(Block {
        name: block.name.clone(),
        count: block.count.0,
        plan,
        decode_plan,
        program: Program {
            heads: 1,
            chunks: (PROGRAM_TOKENS / prefill_mixer.chunk.max(1)).max(1) as u64,
        },
        path,
        feed_forward,
        mixer: prefill_mixer,
        decode_mixer,
    })
}

impl PlanFile {
    fn choice(&self, document: &Document, path: &str, pass: Pass) -> Result<PlanChoice, ConfigError> {
        let one = Program { heads: 1, chunks: 1 };
        for (field, name) in [("tpu", &self.tpu), ("gpu", &self.gpu)] {
            let (known, names) = match pass {
                Pass::Forward => (Plan::named(name, one), &Plan::NAMES[..]),
                Pass::Decode => (Plan::decode(name), &Plan::DECODE_NAMES[..]),
                Pass::Verify => (Plan::verify(name), &Plan::VERIFY_NAMES[..]),
            };
            if known.is_none() {
                let tail = suggestion(name, names, "plans");
                let message = format!("unknown plan `{name}` of this pass; {tail}");
                return Err(document.error_at(&format!("{path}.{field}"), message));
            }
        }
        Ok(PlanChoice {
            tpu: self.tpu.clone(),
            gpu: self.gpu.clone(),
        })
    }
}

fn feed_forward(file: &FeedForwardFile, path: &str, document: &Document) -> Result<FeedForward, ConfigError> {
    let Some(Size(count)) = file.experts else {
        let of_experts = [
            ("active", file.active.is_some()),
            ("shared_hidden", file.shared_hidden.is_some()),
            ("shared_gate", file.shared_gate.is_some()),
            ("scores", file.scores.is_some()),
            ("bias", file.bias.is_some()),
            ("normalised", file.normalised.is_some()),
            ("scale", file.scale.is_some()),
        ];
        return match of_experts.iter().find(|(_, written)| *written) {
            Some((field, _)) => {
                let message = format!("a network without `experts` does not read `{field}`; remove the key");
                Err(document.error_at_key(&format!("{path}.{field}"), message))
            }
            None => Ok(FeedForward::Dense(file.hidden.0)),
        };
    };
    let missing = |field: &str, example: &str| {
        let message = format!("missing key `{field}`; `experts` needs it, for instance `{field}: {example}`");
        document.error_at(path, message)
    };
    let active = file.active.ok_or_else(|| missing("active", "8"))?.0;
    let scores = file.scores.ok_or_else(|| missing("scores", "softmax"))?;
    if active > count {
        let message = format!("expected at most the {count} experts, found `{active}`");
        return Err(document.error_at(&format!("{path}.active"), message));
    }
    if file.shared_gate.is_some() && file.shared_hidden.is_none() {
        let message = "there is no shared expert; remove the key or add `shared_hidden`";
        return Err(document.error_at_key(&format!("{path}.shared_gate"), message));
    }
    let scale = file.scale.unwrap_or(1.0);
    if !(scale > 0.0 && scale.is_finite()) {
        return Err(document.error_at(&format!("{path}.scale"), "expected a factor above zero"));
    }
    Ok(FeedForward::Experts(Experts {
        count,
        active,
        hidden: file.hidden.0,
        shared_hidden: file.shared_hidden.map(|size| size.0),
        shared_gate: file.shared_gate.unwrap_or(false),
        scores,
        bias: file.bias.unwrap_or(false),
        normalised: file.normalised.unwrap_or(true),
        scale,
    }))
}

fn published(
    published: &PublishedFile,
    file: &ModelFile,
    document: &Document,
    errors: &mut Vec<ConfigError>,
) -> PublishedModel {
    let mut known: Vec<&str> = file.hardware.iter().map(|chip| hardware::name_of(chip)).collect();
    known.extend(hardware::shipped());
    if !known.contains(&published.chip.as_str()) {
        let tail = suggestion(&published.chip, &hardware::shipped(), "shipped");
        let message = format!("unknown hardware `{}`; {tail}", published.chip);
        errors.push(document.error_at("published.chip", message));
    }
    if published.decode.is_empty() {
        errors.push(document.error_at("published.decode", "expected at least one time, found none"));
    }
    let mut points = Vec::new();
    for (i, row) in published.decode.iter().enumerate() {
        if !(row.time_ms > 0.0 && row.time_ms.is_finite()) {
            let message = format!("expected a time above zero, found `{}`", row.time_ms);
            errors.push(document.error_at(&format!("published.decode.{i}.time_ms"), message));
        }
        if let Some(plan) = &row.plan
            && Plan::decode(plan).is_none()
        {
            let tail = suggestion(plan, &Plan::DECODE_NAMES, "plans");
            let message = format!("unknown plan `{plan}` of a decode step; {tail}");
            errors.push(document.error_at(&format!("published.decode.{i}.plan"), message));
        }
        points.push(PublishedPoint {
            batch: row.batch.0,
            method: row.method.clone(),
            plan: row.plan.clone(),
            log_interval: row.log_interval.map(|size| size.0),
            time_us: row.time_ms * 1e3,
        });
    }
    PublishedModel {
        source: published.source.clone(),
        chip: published.chip.clone(),
        points,
    }
}
