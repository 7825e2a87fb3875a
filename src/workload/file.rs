//! A workload file as it is written, and its checks.

use std::borrow::Cow;
use std::collections::BTreeSet;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value as Json};

use super::{DefaultValue, Numeric, Published, PublishedRow, Workload};
use crate::config::{ConfigError, Document, Key, Node, Value, listed, suggestion};
use crate::dtype::Dtype;
use crate::graph::Precision;
use crate::hardware;
use crate::kernels::{Plan, Program};
use crate::layer::{
    Attention, DecayGate, DeltaLog, FeatureMap, Forgetting, GramVariant, InitialState, InverseVariant, Layer,
    Merge, OutputGate, Pass, PivotRow, ReadConvention, Readout, Solve, StateFormat, StateProducts,
    WhiteningSolver,
};
use crate::mechanisms::{
    self, Granularity, Mechanism, SUBSTITUTION_BLOCK, fields, gram_variants, tree_gram_variants,
};
use crate::tree::{MOST_NODES, Tree, TreeError};

/// A positive whole number up to [`LARGEST_EXTENT`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size(pub(crate) usize);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Positive;
        impl Visitor<'_> for Positive {
            type Value = Size;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "a whole number from 1 to {LARGEST_EXTENT}")
            }
            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Size, E> {
                match usize::try_from(value) {
                    Ok(size) if (1..=LARGEST_EXTENT).contains(&size) => Ok(Size(size)),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(value), &self)),
                }
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Size, E> {
                match u64::try_from(value) {
                    Ok(value) => self.visit_u64(value),
                    Err(_) => Err(E::invalid_value(de::Unexpected::Signed(value), &self)),
                }
            }
        }
        deserializer.deserialize_any(Positive)
    }
}

impl JsonSchema for Size {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        Cow::Borrowed("Size")
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "integer", "minimum": 1, "maximum": LARGEST_EXTENT })
    }
}

/// A tree as it is written.
#[derive(Debug, Clone)]
enum TreeFile {
    /// `BRANCHINGxDEPTH`.
    Regular(usize, usize),
    /// Parents.
    Parents(Vec<i64>),
}

impl<'de> Deserialize<'de> for TreeFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl<'de> Visitor<'de> for Form {
            type Value = TreeFile;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(
                    f,
                    "branching and depth such as `2x4`, or a list of parents such as `[-1, 0, 0]`"
                )
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<TreeFile, E> {
                let numbers = text.split_once('x').and_then(|(branching, depth)| {
                    Some((branching.trim().parse().ok()?, depth.trim().parse().ok()?))
                });
                let (branching, depth) =
                    numbers.ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))?;
                Ok(TreeFile::Regular(branching, depth))
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut list: A) -> Result<TreeFile, A::Error> {
                let mut parents = Vec::new();
                while let Some(parent) = list.next_element()? {
                    parents.push(parent);
                }
                Ok(TreeFile::Parents(parents))
            }
        }
        deserializer.deserialize_any(Form)
    }
}

impl JsonSchema for TreeFile {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        Cow::Borrowed("Tree")
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [
                { "type": "string", "pattern": "^[1-9][0-9]*x[1-9][0-9]*$" },
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MOST_NODES,
                    "items": { "type": "integer", "minimum": -1 },
                },
            ],
        })
    }
}

/// A workload of tpusim: one layer, how it is fused, the chips it runs on.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = by_pass)]
struct WorkloadFile {
    /// Name of the report folder: letters, digits, `-`, `_` and `.`.
    #[schemars(regex(pattern = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$"))]
    name: String,
    /// The layer.
    layer: LayerFile,
    /// Fusion plans to time.
    #[schemars(schema_with = "plan_names")]
    plans: Vec<String>,
    /// What is computed.
    pass: Pass,
    /// Chips to time it on: shipped names, or paths of hardware files relative to this one.
    #[schemars(schema_with = "chip_names")]
    hardware: Vec<String>,
    /// Workload to compare with: a file beside this one, or a shipped name.
    baseline: Option<String>,
    /// What a program of a kernel with a carried state works on.
    program: Option<ProgramFile>,
    /// The part of the layer that the numeric check executes.
    numeric: NumericFile,
    /// Published times to compare with.
    published: Option<PublishedFile>,
    #[serde(default)]
    /// What in this file is inferred rather than published.
    inferred: Vec<String>,
}

/// A layer. Fields that a mechanism reads and the file leaves out take the usual value, which is listed in the report.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = by_mechanism)]
struct LayerFile {
    /// Mechanism of the layer.
    mechanism: &'static Mechanism,
    /// Sequences; 1 beside `sequences`.
    batch: Size,
    /// Tokens of a sequence; with `sequences` their sum, which may be left out. 1 or left out in a decode step.
    tokens: Option<Size>,
    /// Lengths of sequences packed one after the other, in tokens.
    #[schemars(length(min = 1))]
    sequences: Option<Vec<Size>>,
    /// Rows that packed sequences are padded to: a multiple of the chunk that holds the whole chunks of all of them.
    padded_rows: Option<Size>,
    /// Tokens before the decoded one, of mechanisms to which positions matter.
    context: Option<Size>,
    /// Speculated tokens of a verification: `4x3` is one token of which every one has 4 children until 3 stand on every path; a list has the parent of
    /// every token, counted from 0, and -1 for those that follow the sequence.
    tree: Option<TreeFile>,
    /// Last token of the accepted path of the tree, counted from 0; the first one of those on the longest paths where left out.
    accepted: Option<usize>,
    /// Width of the residual stream, in channels.
    model_width: Size,
    /// Key heads; also query heads but in softmax attention.
    key_heads: Size,
    /// Value heads: a multiple of `key_heads`.
    value_heads: Option<Size>,
    /// Query heads of softmax attention: a multiple of `key_heads`.
    query_heads: Option<Size>,
    /// Channels of a key of one head.
    key_dim: Size,
    /// Channels of a value of one value head.
    value_dim: Size,
    /// Tokens of a chunk; a power of two for inverses by matrix products.
    chunk: Option<Size>,
    /// Decays of a key head, each for a tile of channels: a divisor of `key_dim`.
    decay_tiles: Option<Size>,
    /// Format of activations in device memory and of matrix operands.
    #[serde(default)]
    #[schemars(schema_with = "activation_formats")]
    activations: Option<Dtype>,
    /// Format of the state between chunks.
    state: Option<StateFormat>,
    /// Decomposition into bf16 passes of products with an f32 state.
    state_precision: Option<Precision>,
    /// How the Gram matrices of a chunk are built.
    gram: Option<GramVariant>,
    /// Row that decays of the factored Grams are taken relative to.
    pivot: Option<PivotRow>,
    /// How the triangular matrix of a chunk is inverted.
    inverse: Option<InverseVariant>,
    /// Decomposition into bf16 passes of the products of the inverse.
    inverse_precision: Option<Precision>,
    /// Terms of the series, with `inverse: neumann`.
    neumann_steps: Option<Size>,
    /// What the inverse of a chunk is applied to.
    solve: Option<Solve>,
    /// State that the delta rule predicts from.
    read: Option<ReadConvention>,
    /// Formula of the log decay.
    decay_gate: Option<DecayGate>,
    /// Lower bound of the log decay of `decay_gate: bounded`, in nats per token: below zero.
    #[schemars(extend("exclusiveMaximum" = 0))]
    decay_bound: Option<f64>,
    /// Step sizes up to 2 instead of 1, which allows negative eigenvalues of the transition.
    negative_eigenvalues: Option<bool>,
    /// Taps of the causal convolution.
    conv_width: Option<Size>,
    /// Gate of the output.
    output_gate: Option<OutputGate>,
    /// Rank of a low-rank output gate.
    gate_rank: Option<Size>,
    /// Rank of the projection of decays and step sizes.
    decay_rank: Option<Size>,
    /// Rank of the data-dependent token-shift mixes.
    mix_rank: Option<Size>,
    /// Feature map of queries and keys.
    feature_map: Option<FeatureMap>,
    /// Whether outputs are divided by the product of the query with the sum of the keys.
    normaliser: Option<bool>,
    /// State that the first chunk starts from.
    initial_state: Option<InitialState>,
    /// Writes per token; the chunk has that many rows per token.
    householder_steps: Option<Size>,
    /// Where a decode step reads its output from.
    readout: Option<Readout>,
    /// Unit of the products with the state of a decode step.
    state_products: Option<StateProducts>,
    /// Decode steps from merge to merge of a log of updates beside the state; without it every step writes the state.
    log_interval: Option<Size>,
    /// Format of the keys of the log.
    #[serde(default)]
    #[schemars(schema_with = "log_formats")]
    log_keys: Option<Dtype>,
    /// Format of the updates of the log.
    #[serde(default)]
    #[schemars(schema_with = "log_formats")]
    log_updates: Option<Dtype>,
    /// Whether the last step of an interval merges, or a launch of its own after it.
    log_merge: Option<Merge>,
    /// Query rows of a block of attention.
    block_q: Option<Size>,
    /// Key rows of a block of attention.
    block_kv: Option<Size>,
    /// Whether queries see earlier keys only.
    causal: Option<bool>,
    /// Keys that a query sees, itself included.
    window: Option<Size>,
    /// Factor of the scores; one over the root of the channels of a key where left out.
    #[schemars(extend("exclusiveMinimum" = 0))]
    scale: Option<f64>,
    /// Share of the channels that positions rotate, from 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    rotary: Option<f64>,
    /// Base of the frequencies of the rotation.
    #[schemars(extend("exclusiveMinimum" = 1))]
    rotary_base: Option<f64>,
    /// Scores scaled with the logarithm of the number of keys.
    ssmax: Option<bool>,
    /// RMS norm of queries and keys.
    qk_norm: Option<bool>,
    /// Channels of the latent that keys and values come from.
    latent_rank: Option<Size>,
    /// Channels of a key that carry its position and bypass the latent.
    decoupled_dim: Option<Size>,
    /// Channels of the latent that queries come from; projected in one step where left out.
    query_rank: Option<Size>,
    /// How the covariance forgets.
    forgetting: Option<Forgetting>,
    /// Steps of conjugate gradients.
    cg_steps: Option<Size>,
    /// Solver of the whitened write keys.
    whitening: Option<WhiteningSolver>,
    /// Chunks between two refreshes of the whitening.
    whitening_refresh: Option<Size>,
    /// Decomposition into bf16 passes of the products of the solver.
    whitening_precision: Option<Precision>,
}

/// What a program of a kernel with a carried state works on.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ProgramFile {
    /// Key heads: a divisor of those of the layer.
    heads: Size,
    /// Tokens, rounded down to whole chunks, at least one.
    tokens: Size,
}

/// What the numeric check executes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct NumericFile {
    /// Tokens; steps of a decode. A verification executes its whole tree and has no such key.
    tokens: Option<Size>,
    /// Key heads.
    key_heads: Size,
    /// Seed of the inputs.
    seed: u64,
}

/// Unit of published times.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
enum TimeUnit {
    /// Microseconds.
    #[serde(rename = "us")]
    Microseconds,
    /// Milliseconds.
    #[serde(rename = "ms")]
    Milliseconds,
}

/// Times that somebody published.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PublishedFile {
    /// Where the times are printed.
    source: String,
    /// Chip they hold for.
    chip: String,
    /// Unit of the times.
    unit: TimeUnit,
    /// Times of the rows of the unfused plan.
    #[schemars(schema_with = "row_times")]
    #[serde(default)]
    unfused: Option<std::collections::BTreeMap<String, f64>>,
    /// Times of the rows of the fused plan.
    #[schemars(schema_with = "row_times")]
    #[serde(default)]
    fused: Option<std::collections::BTreeMap<String, f64>>,
}

/// Largest extent of a dimension; products of extents stay within 64-bit counts below it.
const LARGEST_EXTENT: usize = 1 << 28;
/// Most writes per token: beyond any published model, and small enough that the chunk stays a chunk.
const MOST_HOUSEHOLDER_STEPS: usize = 64;
/// Largest chunk: some variants append operations for every block of 16 rows or pair of them.
const LARGEST_CHUNK: usize = 4096;
/// Most chunks of a program: its schedule holds the operations of each.
const LARGEST_PROGRAM: usize = 256;
/// Longest interval of a log: every step of it is a graph of its own.
const LONGEST_INTERVAL: usize = 256;
/// Largest count of multiply-adds of a layer: far above any machine, and a sum of many such counts stays below 2^64.
const LARGEST_LAYER: f64 = (1_u64 << 56) as f64;

/// Formats that activations can have.
const ACTIVATIONS: [Dtype; 5] = [
    Dtype::Bf16,
    Dtype::F16,
    Dtype::F32,
    Dtype::Fp8E4m3,
    Dtype::Fp8E5m2,
];

fn log_formats(_: &mut SchemaGenerator) -> Schema {
    let names = DeltaLog::FORMATS.map(|dtype| Json::from(dtype.name()));
    json_schema!({ "enum": names.into_iter().chain([Json::Null]).collect::<Vec<_>>() })
}

fn activation_formats(_: &mut SchemaGenerator) -> Schema {
    let names = ACTIVATIONS.map(|dtype| Json::from(dtype.name()));
    json_schema!({ "enum": names.into_iter().chain([Json::Null]).collect::<Vec<_>>() })
}

/// Schema of a list of plans.
pub(super) fn plan_names(_: &mut SchemaGenerator) -> Schema {
    let mut names = Plan::NAMES.to_vec();
    names.push(Plan::SPLIT);
    json_schema!({ "type": "array", "minItems": 1, "items": { "enum": names } })
}

/// Schema of a list of chips: any text, shipped names first.
pub(crate) fn chip_names(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "minItems": 1,
        "items": { "anyOf": [{ "enum": hardware::shipped() }, { "type": "string" }] },
    })
}

fn row_times(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["object", "null"],
        "additionalProperties": { "type": "number", "exclusiveMinimum": 0 },
    })
}

/// `{ "if": a field is one of these, "then": these must not be there and those must }`.
fn condition<'a>(
    field: &str,
    values: &[&str],
    forbidden: impl Iterator<Item = &'a str>,
    required: &[&str],
) -> Json {
    let forbidden: Map<String, Json> = forbidden
        .map(|name| (name.to_owned(), Json::Bool(false)))
        .collect();
    serde_json::json!({
        "if": { "properties": { field: { "enum": values } }, "required": [field] },
        "then": { "properties": forbidden, "required": required },
    })
}

/// Which fields each mechanism reads, and those that have no usual value.
fn by_mechanism(schema: &mut Schema) {
    let optional: BTreeSet<&str> = optional_fields().collect();
    let rules: Vec<Json> = mechanisms::ALL
        .iter()
        .map(|mechanism| {
            let unread = optional.iter().copied().filter(|field| !mechanism.uses(field));
            let needed: Vec<&str> = [
                "query_heads",
                "value_heads",
                "decay_tiles",
                "latent_rank",
                "decoupled_dim",
            ]
            .into_iter()
            .filter(|field| mechanism.uses(field))
            .collect();
            condition("mechanism", &[mechanism.name], unread, &needed)
        })
        .chain([condition(
            "inverse",
            &["neumann"],
            std::iter::empty(),
            &["neumann_steps"],
        )])
        .collect();
    schema.insert("allOf".to_owned(), Json::Array(rules));
    let of_log = fields::DELTA_LOG.iter().filter(|field| **field != "log_interval");
    let needs: Map<String, Json> = of_log
        .map(|field| ((*field).to_owned(), serde_json::json!(["log_interval"])))
        .collect();
    schema.insert("dependentRequired".to_owned(), Json::Object(needs));
}

/// Which fields each pass reads, and those that a forward pass needs.
fn by_pass(schema: &mut Schema) {
    let optional: BTreeSet<&str> = optional_fields().collect();
    let rules: Vec<Json> = [Pass::Forward, Pass::Decode, Pass::Verify]
        .into_iter()
        .map(|pass| {
            let forbidden: Map<String, Json> = optional
                .iter()
                .filter(|field| unread(pass, field))
                .map(|field| ((*field).to_owned(), Json::Bool(false)))
                .collect();
            let mut layer = serde_json::json!({ "properties": forbidden });
            if pass == Pass::Forward {
                let chunked: Vec<&str> = mechanisms::ALL
                    .iter()
                    .filter(|mechanism| mechanism.uses("chunk"))
                    .map(|mechanism| mechanism.name)
                    .collect();
                layer["anyOf"] =
                    serde_json::json!([{ "required": ["tokens"] }, { "required": ["sequences"] }]);
                layer["allOf"] = Json::Array(vec![condition(
                    "mechanism",
                    &chunked,
                    std::iter::empty(),
                    &["chunk"],
                )]);
            }
            let numeric = if pass == Pass::Verify {
                layer["required"] = serde_json::json!(["tree"]);
                serde_json::json!({ "properties": { "tokens": false } })
            } else {
                serde_json::json!({ "required": ["tokens"] })
            };
            serde_json::json!({
                "if": { "properties": { "pass": { "const": pass.name() } }, "required": ["pass"] },
                "then": { "properties": { "layer": layer, "numeric": numeric } },
            })
        })
        .collect();
    schema.insert("allOf".to_owned(), Json::Array(rules));
}

/// JSON schema of a workload file, from the structs that read it.
pub(super) fn schema(generator: SchemaGenerator) -> Schema {
    generator.into_root_schema_for::<WorkloadFile>()
}

/// Whether a document has the keys of a workload, each with a value of the right kind; what the values mean together is not looked at.
///
/// # Errors
/// At the first key or value that does not fit.
pub fn check_schema(document: &Document) -> Result<(), ConfigError> {
    document.deserialize::<WorkloadFile>().map(drop)
}

/// Reads and checks a workload.
///
/// # Errors
/// Everything that does not fit, each at its place.
pub(super) fn resolve(document: &Document) -> Result<Workload, ConfigError> {
    let mut defaults = Vec::new();
    let workload = resolve_with(document, Some(&mut defaults))?;
    Ok(Workload { defaults, ..workload })
}

/// As [`resolve`]; `defaults` takes the fields that the file leaves out, where somebody asks for them.
pub(super) fn resolve_with(
    document: &Document,
    mut defaults: Option<&mut Vec<DefaultValue>>,
) -> Result<Workload, ConfigError> {
    let file: WorkloadFile = document.deserialize()?;
    let mut errors = Vec::new();
    let layer = layer(
        &file.layer,
        file.pass,
        document,
        defaults.as_deref_mut(),
        &mut errors,
    );
    let mut complain = |path: &str, message: String| errors.push(document.error_at(path, message));
    if file.name.is_empty()
        || !file
            .name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        || file.name.starts_with('.')
    {
        complain(
            "name",
            format!(
                "`{}` cannot name a report folder; use letters, digits, `-`, `_` and `.`",
                file.name
            ),
        );
    }
    if file.plans.is_empty() {
        complain(
            "plans",
            format!("expected at least one of {}, found none", listed(&Plan::NAMES)),
        );
    }
    let program = if let Some(ProgramFile { heads, tokens }) = &file.program {
        let chunk = file.layer.chunk.map_or(1, |c| c.0);
        if !file.layer.key_heads.0.is_multiple_of(heads.0) {
            let all = file.layer.key_heads.0;
            complain(
                "program.heads",
                format!("expected a divisor of the {all} key heads, found `{}`", heads.0),
            );
        }
        if tokens.0 / chunk > LARGEST_PROGRAM {
            let most = LARGEST_PROGRAM * chunk;
            complain(
                "program.tokens",
                format!(
                    "expected at most {most} tokens, {LARGEST_PROGRAM} chunks, found `{}`",
                    tokens.0
                ),
            );
        }
        Program {
            heads: heads.0 as u64,
            chunks: (tokens.0 / chunk).max(1) as u64,
        }
    } else {
        if let Some(defaults) = defaults
            && file.pass == Pass::Forward
            && file.layer.mechanism.uses("chunk")
        {
            defaults.push(DefaultValue {
                field: "program".to_owned(),
                value: "one head and one chunk".to_owned(),
            });
        }
        Program { heads: 1, chunks: 1 }
    };
    let mut plans = Vec::new();
    for (i, name) in file.plans.iter().enumerate() {
        match plan_named(file.pass, name, program) {
            Some(_) if name == Plan::SPLIT && file.layer.log_interval.is_none() => {
                let message = format!(
                    "plan `{name}` replays a log; write `log_interval`, for instance `layer: {{ log_interval: 8 }}`, or use another plan"
                );
                complain(&format!("plans.{i}"), message);
            }
            Some(_) if file.plans[..i].contains(name) => {
                complain(&format!("plans.{i}"), format!("plan `{name}` stands twice"));
            }
            Some(plan) => plans.push(plan),
            None => {
                let tail = match file.pass {
                    Pass::Forward => suggestion(name, &Plan::NAMES, "plans"),
                    Pass::Decode => suggestion(name, &Plan::DECODE_NAMES, "plans of a decode step"),
                    Pass::Verify => suggestion(name, &Plan::VERIFY_NAMES, "plans of a verification"),
                };
                complain(&format!("plans.{i}"), format!("unknown plan `{name}`; {tail}"));
            }
        }
    }
    if file.hardware.is_empty() {
        complain(
            "hardware",
            "expected at least one chip, found none; `tpusim hw list` shows them".to_owned(),
        );
    }
    if file.numeric.key_heads.0 > file.layer.key_heads.0 {
        complain(
            "numeric.key_heads",
            format!(
                "expected at most the {} key heads of the layer, found `{}`",
                file.layer.key_heads.0, file.numeric.key_heads.0
            ),
        );
    }
    let whole = layer.as_ref().map_or(1, |layer| layer.tokens);
    let numeric_tokens = match (file.pass, file.numeric.tokens) {
        // A decode step has one token; its check runs as many steps as it is asked for.
        (Pass::Forward, Some(Size(tokens))) if layer.is_some() && tokens > whole => {
            complain(
                "numeric.tokens",
                format!("expected at most the {whole} tokens of the layer, found `{tokens}`"),
            );
            whole
        }
        (Pass::Forward | Pass::Decode, Some(Size(tokens))) => tokens,
        (Pass::Forward | Pass::Decode, None) => {
            errors.push(document.error_at("numeric", "missing key `tokens`"));
            whole
        }
        (Pass::Verify, None) => whole,
        (Pass::Verify, Some(_)) => {
            let message = "`pass: verify` executes its whole tree; remove the key".to_owned();
            errors.push(document.error_at_key("numeric.tokens", message));
            whole
        }
    };
    if let (Pass::Decode | Pass::Verify, Some(_)) = (file.pass, &file.program) {
        let pass = file.pass.name();
        let message = format!("`pass: {pass}` carries no state from chunk to chunk; remove the key");
        errors.push(document.error_at_key("program", message));
    }
    let published = file
        .published
        .as_ref()
        .map(|p| published(p, (file.pass, &file.hardware), document, &mut errors));
    let Some(layer) = layer else {
        return Err(ConfigError::collect(errors)
            .err()
            .unwrap_or_else(|| document.error_at("layer", "does not fit")));
    };
    ConfigError::collect(errors)?;
    Ok(Workload {
        name: file.name,
        layer,
        plans,
        hardware: file.hardware,
        baseline: file.baseline,
        numeric: Numeric {
            tokens: numeric_tokens,
            key_heads: file.numeric.key_heads.0,
            seed: file.numeric.seed,
        },
        published,
        inferred: file.inferred,
        defaults: Vec::new(),
    })
}

/// Fields of a layer that a model says once for all its blocks.
const OF_THE_MODEL: [&str; 8] = [
    "batch",
    "tokens",
    "sequences",
    "padded_rows",
    "context",
    "model_width",
    "activations",
    "initial_state",
];

/// Schema of the mixer of a block of a model: a layer without what the model says for all of them.
pub(crate) fn mixer_schema(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = LayerFile::json_schema(generator);
    if let Some(properties) = schema.get_mut("properties").and_then(Json::as_object_mut) {
        properties.retain(|name, _| !OF_THE_MODEL.contains(&name.as_str()));
    }
    if let Some(required) = schema.get_mut("required").and_then(Json::as_array_mut) {
        required.retain(|name| name.as_str().is_none_or(|name| !OF_THE_MODEL.contains(&name)));
    }
    schema
}

/// What a model says for the mixers of all its blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MixerExtents {
    /// What is computed.
    pub(crate) pass: Pass,
    /// Sequences.
    pub(crate) batch: usize,
    /// Tokens of a sequence; those before the decoded one in a decode step.
    pub(crate) tokens: usize,
    /// Width of the residual stream.
    pub(crate) width: usize,
    /// Format of the activations.
    pub(crate) activations: Dtype,
}

/// The layer that the block `path` of a model has as its mixer, in one pass, and the fields that the block leaves out. A block lists the fields of both passes; each
/// reads its own.
///
/// # Errors
/// At every field of the block that does not fit.
pub(crate) fn mixer(
    document: &Document,
    path: &str,
    extents: MixerExtents,
) -> Result<(Layer, Vec<DefaultValue>), ConfigError> {
    let Some(node) = document.node(path) else {
        return Err(document.error_at(path, "missing"));
    };
    let Value::Map(entries) = &node.value else {
        return Err(document.error_at(path, "expected a map with the fields of a layer"));
    };
    for (key, _) in entries {
        if OF_THE_MODEL.contains(&key.name.as_str()) {
            let message = format!("`{}` is said once for the whole model; remove the key", key.name);
            return Err(document.error_at_key(&format!("{path}.{}", key.name), message));
        }
    }
    let location = document.locate(path);
    let entry = |name: &str, value: Value| {
        let key = Key {
            name: name.to_owned(),
            location: location.clone(),
        };
        let node = Node {
            value,
            location: location.clone(),
        };
        (key, node)
    };
    let size = |n: usize| Value::Int(i64::try_from(n).unwrap_or(i64::MAX));
    let text = |text: &str| Value::String(text.to_owned());
    let list = |name: &str| {
        Value::Seq(vec![Node {
            value: text(name),
            location: location.clone(),
        }])
    };
    let pass = extents.pass;
    let dropped = |name: &str| unread(pass, name) || (pass == Pass::Decode && name == "chunk");
    let mut layer: Vec<(Key, Node)> = entries
        .iter()
        .filter(|(key, _)| !dropped(&key.name))
        .cloned()
        .collect();
    // A name that no layer has is refused where the layer is read; the mechanism decides whether positions matter.
    let positions = entries
        .iter()
        .find_map(|(key, node)| match &node.value {
            Value::String(name) if key.name == "mechanism" => Mechanism::named(name),
            _ => None,
        })
        .is_some_and(|mechanism| mechanism.uses("context"));
    layer.push(entry("batch", size(extents.batch)));
    layer.push(entry("model_width", size(extents.width)));
    layer.push(entry("activations", text(extents.activations.name())));
    let pass_name = match pass {
        Pass::Forward => {
            layer.push(entry("tokens", size(extents.tokens)));
            "forward"
        }
        Pass::Decode => {
            if positions {
                layer.push(entry("context", size(extents.tokens)));
            }
            "decode"
        }
        // A tree is a field of the layer as written.
        Pass::Verify => "verify",
    };
    let numeric = ["tokens", "key_heads", "seed"].map(|name| entry(name, size(1)));
    let root = Value::Map(vec![
        entry("name", text("mixer")),
        entry("layer", Value::Map(layer)),
        entry("plans", list("unfused")),
        entry("pass", text(pass_name)),
        entry("hardware", list("tpu-v7x")),
        entry("numeric", Value::Map(numeric.into_iter().collect())),
    ]);
    let workload = resolve(&document.with_root(Node {
        value: root,
        location,
    }))?;
    let own = |default: &DefaultValue| default.field.starts_with("layer.");
    let defaults = workload.defaults.into_iter().filter(own);
    Ok((workload.layer, defaults.collect()))
}

/// The program does not matter for the names of a plan's rows.
const ONE: Program = Program { heads: 1, chunks: 1 };

/// The plan called `name` of a pass.
fn plan_named(pass: Pass, name: &str, program: Program) -> Option<Plan> {
    match pass {
        Pass::Forward => Plan::named(name, program),
        Pass::Decode => Plan::decode(name),
        Pass::Verify => Plan::verify(name),
    }
}

fn published(
    file: &PublishedFile,
    (pass, chips): (Pass, &[String]),
    document: &Document,
    errors: &mut Vec<ConfigError>,
) -> Published {
    let mut known: Vec<&str> = chips.iter().map(|chip| hardware::name_of(chip)).collect();
    known.extend(hardware::shipped());
    if !known.contains(&file.chip.as_str()) {
        let tail = suggestion(&file.chip, &hardware::shipped(), "shipped");
        let message = format!("unknown hardware `{}`; {tail}", file.chip);
        errors.push(document.error_at("published.chip", message));
    }
    let factor = match file.unit {
        TimeUnit::Microseconds => 1.0,
        TimeUnit::Milliseconds => 1e3,
    };
    let mut rows = Vec::new();
    for (name, stages) in [("unfused", &file.unfused), ("fused", &file.fused)] {
        let Some(stages) = stages else { continue };
        let labels: Vec<String> = plan_named(pass, name, ONE).map_or_else(Vec::new, |plan| {
            plan.groups.iter().map(crate::kernels::Group::label).collect()
        });
        for (stage, &value) in stages {
            let path = format!("published.{name}.{stage}");
            if !labels.contains(stage) {
                let tail = suggestion(stage, &labels, "rows of this plan");
                errors.push(document.error_at_key(&path, format!("unknown row `{stage}`; {tail}")));
            } else if !(value > 0.0 && value.is_finite()) {
                errors.push(document.error_at(&path, format!("expected a time above zero, found `{value}`")));
            }
            rows.push(PublishedRow {
                plan: name.to_owned(),
                stage: stage.clone(),
                time_us: value * factor,
            });
        }
    }
    Published {
        source: file.source.clone(),
        chip: file.chip.clone(),
        rows,
    }
}

/// Tokens and chunk of a layer, the sequences packed into it checked.
struct Extents {
    tokens: usize,
    chunk: usize,
    sequences: Vec<usize>,
    padded_rows: Option<usize>,
    tree: Option<Tree>,
}

/// The tree of a verification.
fn tree(file: &LayerFile, document: &Document, errors: &mut Vec<ConfigError>) -> Option<Tree> {
    let Some(written) = &file.tree else {
        errors.push(document.error_at(
            "layer",
            "missing key `tree`; `pass: verify` needs it, for instance `tree: 2x4`",
        ));
        return None;
    };
    let tree = match written {
        TreeFile::Regular(branching, depth) => Tree::regular(*branching, *depth),
        TreeFile::Parents(parents) => Tree::of_list(parents),
    };
    let accepting = |tree: Tree| match file.accepted {
        Some(node) => tree.accepting(node),
        None => Ok(tree),
    };
    match tree.and_then(accepting) {
        Ok(tree) => Some(tree),
        Err(error) => {
            let field = match error {
                TreeError::Accepted { .. } => "layer.accepted",
                _ => "layer.tree",
            };
            errors.push(document.error_at(field, error.to_string()));
            None
        }
    }
}

fn extents(
    file: &LayerFile,
    pass: Pass,
    document: &Document,
    errors: &mut Vec<ConfigError>,
) -> Option<Extents> {
    let sequences: Vec<usize> = file.sequences.iter().flatten().map(|s| s.0).collect();
    if pass == Pass::Decode {
        for (field, size) in [("tokens", file.tokens), ("chunk", file.chunk)] {
            if let Some(Size(size)) = size.filter(|s| s.0 != 1) {
                let message = format!(
                    "`pass: decode` has one token per sequence; expected `1` or no key, found `{size}`"
                );
                errors.push(document.error_at(&format!("layer.{field}"), message));
            }
        }
        return Some(Extents {
            tokens: 1,
            chunk: 1,
            sequences: Vec::new(),
            padded_rows: None,
            tree: None,
        });
    }
    if pass == Pass::Verify {
        for (field, size) in [("tokens", file.tokens), ("chunk", file.chunk)] {
            if size.is_some() {
                let message = "the tree is one chunk of its tokens; remove the key".to_owned();
                errors.push(document.error_at_key(&format!("layer.{field}"), message));
            }
        }
        // A mechanism that has no such pass is told so further on.
        let tree = if file.mechanism.verifies() {
            tree(file, document, errors)?
        } else {
            Tree::regular(1, 1).ok()?
        };
        return Some(Extents {
            tokens: tree.nodes(),
            chunk: tree.nodes(),
            sequences: Vec::new(),
            padded_rows: None,
            tree: Some(tree),
        });
    }
    let before = errors.len();
    let mut complain = |field: &str, message: String| {
        errors.push(document.error_at(&format!("layer.{field}"), message));
    };
    // Lengths are bounded one by one, so that their sum cannot overflow.
    if let Some(i) = sequences.iter().position(|&n| n > LARGEST_EXTENT) {
        let found = sequences[i];
        complain(
            &format!("sequences.{i}"),
            format!("expected at most {LARGEST_EXTENT}, found `{found}`"),
        );
        return None;
    }
    let sum = sequences.iter().fold(0_usize, |sum, &n| sum.saturating_add(n));
    if file.sequences.is_some() {
        if sequences.is_empty() {
            complain(
                "sequences",
                "expected the length of at least one sequence, found none; remove the key or write `[8192]`"
                    .to_owned(),
            );
        }
        if file.batch.0 != 1 {
            complain(
                "batch",
                format!(
                    "packed sequences are one entry of the batch; expected `1` beside `sequences`, found `{}`",
                    file.batch.0
                ),
            );
        }
    }
    let tokens = match file.tokens {
        Some(Size(tokens)) => {
            if !sequences.is_empty() && tokens != sum {
                let count = sequences.len();
                complain(
                    "tokens",
                    format!(
                        "expected the sum {sum} of the {count} sequences, found `{tokens}`; remove the key or change a length"
                    ),
                );
            }
            tokens
        }
        None if sequences.is_empty() => {
            errors.push(document.error_at("layer", "missing key `tokens`"));
            return None;
        }
        None => sum,
    };
    // Attention has no chunk; its query block takes the place.
    let step = if file.mechanism.uses("chunk") {
        file.chunk
    } else {
        file.block_q.or(Some(Size(Attention::default().block_q)))
    };
    let Some(Size(chunk)) = step else {
        errors.push(document.error_at("layer", "missing key `chunk`"));
        return None;
    };
    let mut complain = |field: &str, message: String| {
        errors.push(document.error_at(&format!("layer.{field}"), message));
    };
    let padded_rows = file.padded_rows.map(|s| s.0);
    if let Some(rows) = padded_rows {
        let needed = sequences.iter().fold(0_usize, |sum, n| {
            sum.saturating_add(n.div_ceil(chunk).saturating_mul(chunk))
        });
        if sequences.is_empty() {
            complain(
                "padded_rows",
                "rows are padded per packed sequence; remove the key or list `sequences`".to_owned(),
            );
        } else if rows > LARGEST_EXTENT || rows % chunk != 0 || rows < needed {
            complain(
                "padded_rows",
                format!(
                    "expected a multiple of chunk {chunk} from {needed} to {LARGEST_EXTENT}, found `{rows}`"
                ),
            );
        }
    }
    (errors.len() == before).then_some(Extents {
        tokens,
        chunk,
        sequences,
        padded_rows,
        tree: None,
    })
}

fn layer(
    file: &LayerFile,
    pass: Pass,
    document: &Document,
    defaults: Option<&mut Vec<DefaultValue>>,
    errors: &mut Vec<ConfigError>,
) -> Option<Layer> {
    let before = errors.len();
    let Extents {
        tokens,
        chunk,
        sequences,
        padded_rows,
        tree,
    } = extents(file, pass, document, errors)?;
    let mechanism = file.mechanism;
    // Heads beside the key heads and tokens of a step carry different names in attention.
    let heads_field = match (mechanism.uses("query_heads"), mechanism.uses("value_heads")) {
        (true, _) => ("query_heads", file.query_heads),
        (_, true) => ("value_heads", file.value_heads),
        _ => ("key_heads", Some(file.key_heads)),
    };
    let step_field = if mechanism.uses("chunk") {
        "chunk"
    } else {
        "block_q"
    };
    let Some(heads) = heads_field.1 else {
        let message = format!(
            "missing key `{}`; `{}` needs it, for instance `{}: {}`",
            heads_field.0, mechanism.name, heads_field.0, file.key_heads.0
        );
        errors.push(document.error_at("layer", message));
        return None;
    };
    let mut complain = |field: &str, message: String| {
        errors.push(document.error_at(&format!("layer.{field}"), message));
    };
    let sizes = [
        ("batch", file.batch),
        ("tokens", Size(tokens)),
        ("model_width", file.model_width),
        ("key_heads", file.key_heads),
        (heads_field.0, heads),
        ("key_dim", file.key_dim),
        ("value_dim", file.value_dim),
        (step_field, Size(chunk)),
    ];
    let [
        batch,
        _,
        model_width,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        _,
    ] = sizes.map(|(_, s)| s.0);
    if chunk > LARGEST_CHUNK && mechanism.uses("chunk") {
        complain(
            "chunk",
            format!("expected at most {LARGEST_CHUNK} tokens, found `{chunk}`"),
        );
        return None;
    }
    if value_heads % key_heads != 0 {
        complain(
            heads_field.0,
            format!(
                "expected a multiple of the {key_heads} key heads, found `{value_heads}`; {}",
                neighbours(value_heads, key_heads)
            ),
        );
    }
    let written: &[(Key, Node)] = match document.node("layer").map(|node| &node.value) {
        Some(Value::Map(entries)) => entries,
        _ => &[],
    };
    for field in optional_fields() {
        if !written.iter().any(|(key, _)| key.name == field) {
            continue;
        }
        let (used, unread) = (mechanism.uses(field), unread(pass, field));
        if used && !unread {
            continue;
        }
        if used {
            let pass = pass.name();
            let message = format!("`pass: {pass}` does not read `{field}`; remove the key");
            errors.push(document.error_at_key(&format!("layer.{field}"), message));
        } else {
            let message = format!("`{}` does not read `{field}`; remove the key", mechanism.name);
            errors.push(document.error_at_key(&format!("layer.{field}"), message));
        }
    }
    if pass == Pass::Decode && !mechanism.decodes() {
        let message = format!("`{}` has no decode step; use `pass: forward`", mechanism.name);
        errors.push(document.error_at("pass", message));
        return None;
    }
    if pass == Pass::Verify && !mechanism.verifies() {
        let message = format!(
            "`{}` does not verify trees of tokens; its decode step is `pass: decode`",
            mechanism.name
        );
        errors.push(document.error_at("pass", message));
        return None;
    }
    let mut complain = |field: &str, message: String| {
        errors.push(document.error_at(&format!("layer.{field}"), message));
    };
    let context = match (pass == Pass::Decode && mechanism.uses("context"), file.context) {
        (true, Some(Size(context))) => {
            if context > LARGEST_EXTENT {
                complain("context", format!("expected at most {LARGEST_EXTENT}"));
                return None;
            }
            context
        }
        (true, None) => {
            let message = format!(
                "missing key `context`; a decode step of `{}` needs the tokens before it, for instance `context: 8192`",
                mechanism.name
            );
            errors.push(document.error_at("layer", message));
            return None;
        }
        (false, _) => 0,
    };
    let mut complain = |field: &str, message: String| {
        errors.push(document.error_at(&format!("layer.{field}"), message));
    };
    let decay_tiles = match (mechanism.uses("decay_tiles"), file.decay_tiles) {
        (true, Some(Size(tiles))) => {
            if key_dim % tiles != 0 {
                let divisors: Vec<String> = (1..=key_dim.min(256))
                    .filter(|d| key_dim % d == 0)
                    .map(|d| d.to_string())
                    .collect();
                complain(
                    "decay_tiles",
                    format!(
                        "expected a divisor of key_dim {key_dim}, found `{tiles}`; one of {}",
                        divisors.join(", ")
                    ),
                );
                return None;
            }
            tiles
        }
        (true, None) => {
            let message = format!(
                "missing key `decay_tiles`; {} needs it, for instance `decay_tiles: 4`",
                mechanism.name
            );
            errors.push(document.error_at("layer", message));
            return None;
        }
        (false, _) => 1,
    };
    // A default is a choice of ours, so it is listed in every output.
    let mut defaults = Defaults {
        mechanism,
        pass,
        list: defaults,
    };
    let usual = mechanism.defaults;
    let activations = defaults.or(file.activations, "activations", Dtype::Bf16);
    let state = defaults.or(file.state, "state", StateFormat::F32);
    // Conjugate gradients do not converge with operands rounded to bf16.
    let state_precision = if mechanism.uses("cg_steps") {
        Precision::Highest
    } else {
        Precision::Default
    };
    let state_precision = defaults.or(file.state_precision, "state_precision", state_precision);
    let pivot = defaults.or(file.pivot, "pivot", PivotRow::Middle);
    let inverse = defaults.or(file.inverse, "inverse", usual.inverse);
    let inverse_precision = defaults.or(file.inverse_precision, "inverse_precision", Precision::High);
    let solve = defaults.or(file.solve, "solve", Solve::Wy);
    let read = defaults.or(file.read, "read", ReadConvention::Decayed);
    let decay_gate = defaults.or(file.decay_gate, "decay_gate", usual.decay_gate);
    let bounded = decay_gate == DecayGate::Bounded;
    let decay_bound = match (file.decay_bound, bounded) {
        (Some(bound), true) => bound,
        (None, true) => defaults.or(None, "decay_bound", usual.decay_bound),
        (Some(_), false) => {
            complain(
                "decay_bound",
                "the softplus gate has no bound; remove the key or use `decay_gate: bounded`".to_owned(),
            );
            f64::NEG_INFINITY
        }
        (None, false) => f64::NEG_INFINITY,
    };
    if bounded && !(decay_bound < 0.0 && decay_bound.is_finite()) {
        complain(
            "decay_bound",
            format!("expected nats per token below zero, such as `-1.3`, found `{decay_bound}`"),
        );
    }
    let negative_eigenvalues = defaults.or(
        file.negative_eigenvalues,
        "negative_eigenvalues",
        usual.negative_eigenvalues,
    );
    let conv_width = defaults.or(file.conv_width.map(|s| s.0), "conv_width", 4);
    let output_gate = defaults.or(file.output_gate, "output_gate", usual.output_gate);
    let gate_rank = defaults.or(file.gate_rank.map(|s| s.0), "gate_rank", value_dim);
    let decay_rank = defaults.or(file.decay_rank.map(|s| s.0), "decay_rank", 64);
    let mix_rank = defaults.or(file.mix_rank.map(|s| s.0), "mix_rank", 32);
    let feature_map = defaults.or(file.feature_map, "feature_map", FeatureMap::Elu1);
    let normaliser = defaults.or(file.normaliser, "normaliser", false);
    if normaliser && feature_map == FeatureMap::Identity {
        complain(
            "normaliser",
            "`feature_map: identity` gives sums of any sign, which cannot normalise; use `elu1` or `relu`, or `normaliser: false`"
                .to_owned(),
        );
    }
    let householder_steps = if mechanism.uses("householder_steps") {
        defaults.or(file.householder_steps.map(|s| s.0), "householder_steps", 2)
    } else {
        1
    };
    if householder_steps > MOST_HOUSEHOLDER_STEPS {
        complain(
            "householder_steps",
            format!("expected at most {MOST_HOUSEHOLDER_STEPS}, found `{householder_steps}`"),
        );
        return None;
    }
    let initial_state = match (pass, file.initial_state) {
        (Pass::Forward, written) => defaults.or(written, "initial_state", InitialState::Zero),
        (Pass::Decode | Pass::Verify, None | Some(InitialState::Given)) => InitialState::Given,
        (Pass::Decode | Pass::Verify, Some(InitialState::Zero)) => {
            complain(
                "initial_state",
                "a decode step reads the state of the token before; remove the key or use `given`".to_owned(),
            );
            InitialState::Given
        }
    };
    let log = delta_log(file, document, &mut defaults, errors).ok()?;
    let readout = match (log, file.readout) {
        (None, written) => defaults.or(written, "readout", Readout::AfterUpdate),
        (Some(_), Some(Readout::AfterUpdate)) => {
            let message = "base and log are read once per step, by read key and query together; remove the key or use `before_update`";
            errors.push(document.error_at("layer.readout", message));
            return None;
        }
        (Some(_), _) => Readout::BeforeUpdate,
    };
    let mut complain = |field: &str, message: String| {
        errors.push(document.error_at(&format!("layer.{field}"), message));
    };
    let state_products = defaults.or(file.state_products, "state_products", StateProducts::Vector);
    let forgetting = defaults.or(file.forgetting, "forgetting", Forgetting::Gated);
    let cg_steps = defaults.or(file.cg_steps.map(|s| s.0), "cg_steps", 30);
    let whitening = defaults.or(file.whitening, "whitening", WhiteningSolver::Polar2Plus);
    let whitening_refresh = defaults.or(file.whitening_refresh.map(|s| s.0), "whitening_refresh", 1);
    let whitening_precision = defaults.or(file.whitening_precision, "whitening_precision", Precision::High);
    let sizes = Sizes {
        sequences: batch,
        tokens: tokens.div_ceil(chunk) * chunk,
        model_width,
        key_heads,
        value_heads,
        key_dim,
        value_dim: value_dim * householder_steps,
        chunk,
        conv_width,
        gate_rank,
    };
    // Attention meets every key, chunk forms the keys of a chunk.
    let scores = if mechanism.uses("chunk") {
        0.0
    } else {
        // Absorbed queries of latent attention meet latents.
        let channels = (key_dim + value_dim).max(2 * file.latent_rank.map_or(0, |rank| rank.0));
        let seen = (tokens + context) as f64;
        (batch * value_heads) as f64 * tokens as f64 * seen * channels as f64
    };
    let work = sizes.multiply_adds() + scores;
    if work > LARGEST_LAYER {
        errors.push(document.error_at(
            "layer",
            format!(
                "about {work:.0e} multiply-adds, expected at most {LARGEST_LAYER:.0e}; use fewer tokens, heads or channels"
            ),
        ));
        return None;
    }
    let neumann_steps = match (inverse, file.neumann_steps) {
        (InverseVariant::Neumann, Some(Size(steps))) if steps > chunk => {
            complain(
                "neumann_steps",
                format!("the series ends after `chunk` terms; expected at most {chunk}, found `{steps}`"),
            );
            return None;
        }
        (InverseVariant::Neumann, Some(Size(steps))) => steps,
        (InverseVariant::Neumann, None) => {
            errors.push(document.error_at(
                "layer",
                "missing key `neumann_steps`; `inverse: neumann` needs it, for instance `neumann_steps: 4`",
            ));
            return None;
        }
        (_, Some(_)) => {
            complain(
                "neumann_steps",
                format!(
                    "`inverse: {}` is exact and has no steps; remove the key or use `inverse: neumann`",
                    inverse.name()
                ),
            );
            0
        }
        (_, None) => 0,
    };
    if !ACTIVATIONS.contains(&activations) {
        complain(
            "activations",
            format!(
                "`{activations}` is no format for activations; one of {}",
                listed(ACTIVATIONS.map(Dtype::name))
            ),
        );
    }

    let attention = if mechanism.uses("block_kv") {
        attention(file, document, &mut defaults, errors)?
    } else {
        Attention::default()
    };
    let mut layer = Layer {
        mechanism,
        batch,
        tokens,
        sequences,
        padded_rows,
        context,
        tree,
        model_width,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        chunk,
        decay_tiles,
        activations,
        weights: activations,
        state,
        state_precision,
        gram: GramVariant::Broadcast,
        pivot,
        inverse,
        inverse_precision,
        neumann_steps,
        solve,
        read,
        decay_gate,
        decay_bound,
        negative_eigenvalues,
        conv_width,
        output_gate,
        gate_rank,
        decay_rank,
        mix_rank,
        feature_map,
        normaliser,
        initial_state,
        householder_steps,
        pass,
        readout,
        state_products,
        log,
        attention,
        forgetting,
        cg_steps,
        whitening,
        whitening_refresh,
        whitening_precision,
    };
    let granularity = (mechanism.granularity)(&layer);
    let variants = match pass {
        Pass::Verify => tree_gram_variants(granularity),
        Pass::Forward | Pass::Decode => gram_variants(granularity),
    };
    layer.gram = defaults.or(file.gram, "gram", variants[0]);
    let mut complain = |field: &str, message: String| {
        errors.push(document.error_at(&format!("layer.{field}"), message));
    };
    if !variants.contains(&layer.gram) {
        let names: Vec<&str> = variants.iter().map(|v| v.name()).collect();
        complain(
            "gram",
            format!(
                "`{}` has no meaning for the decay of `{}` with {} per key head; one of {}",
                layer.gram.name(),
                mechanism.name,
                match (mechanism.granularity)(&layer) {
                    Granularity::None => "none".to_owned(),
                    Granularity::Scalar => "one decay".to_owned(),
                    Granularity::Tiles(tiles) => format!("{tiles} decays"),
                    Granularity::Channel => "a decay per channel".to_owned(),
                },
                listed(names)
            ),
        );
    }
    let by_blocks = matches!(layer.gram, GramVariant::Pivot | GramVariant::PivotCausal);
    if by_blocks && chunk > 16 && chunk % 16 != 0 {
        complain(
            "chunk",
            format!(
                "`gram: {}` works on blocks of 16 rows; expected a multiple of 16, found `{chunk}`",
                layer.gram.name()
            ),
        );
    }
    if layer.gram == GramVariant::Halving && chunk > 16 && !chunk.is_power_of_two() {
        complain(
            "chunk",
            format!(
                "`gram: halving` halves a chunk down to blocks of 16 rows; expected a power of two, found `{chunk}`"
            ),
        );
    }
    let doubles = pass != Pass::Decode
        && matches!(
            inverse,
            InverseVariant::Product
                | InverseVariant::Newton
                | InverseVariant::TwoLevel
                | InverseVariant::BlockDoubling
                | InverseVariant::PackedDoubling
        );
    let rows = layer.micro_steps().chunk;
    let expected = if inverse == InverseVariant::PackedDoubling && rows < 2 * SUBSTITUTION_BLOCK {
        Some(format!(
            "doubles blocks of {SUBSTITUTION_BLOCK} rows; expected a power of two from {} on",
            2 * SUBSTITUTION_BLOCK
        ))
    } else {
        (!rows.is_power_of_two()).then(|| "doubles its blocks; expected a power of two".to_owned())
    };
    if let Some(expected) = expected.filter(|_| doubles) {
        let found = if layer.tree.is_some() {
            format!("a tree of `{chunk}` tokens; use `inverse: blocked16` or `row_substitution`")
        } else if householder_steps == 1 {
            format!("`{chunk}`")
        } else {
            format!("`{chunk}` times {householder_steps} writes per token")
        };
        complain(
            "chunk",
            format!("`inverse: {}` {expected}, found {found}", inverse.name()),
        );
    }
    (errors.len() == before).then_some(layer)
}

/// Something that was complained about.
struct Refused;

/// The log of a decode step, where it has one.
fn delta_log(
    file: &LayerFile,
    document: &Document,
    defaults: &mut Defaults<'_>,
    errors: &mut Vec<ConfigError>,
) -> Result<Option<DeltaLog>, Refused> {
    let before = errors.len();
    let Some(Size(interval)) = file.log_interval else {
        for (field, written) in [
            ("log_keys", file.log_keys.is_some()),
            ("log_updates", file.log_updates.is_some()),
            ("log_merge", file.log_merge.is_some()),
        ] {
            if written {
                let message = format!(
                    "`{field}` belongs to a log; write `log_interval`, for instance `log_interval: 8`, or remove the key"
                );
                errors.push(document.error_at_key(&format!("layer.{field}"), message));
            }
        }
        return if errors.len() == before {
            Ok(None)
        } else {
            Err(Refused)
        };
    };
    if interval > LONGEST_INTERVAL {
        let message = format!("expected at most {LONGEST_INTERVAL} steps, found `{interval}`");
        errors.push(document.error_at("layer.log_interval", message));
    }
    for (field, written) in [("log_keys", file.log_keys), ("log_updates", file.log_updates)] {
        if let Some(dtype) = written.filter(|dtype| !DeltaLog::FORMATS.contains(dtype)) {
            let message = format!(
                "`{dtype}` is no format for a log; one of {}",
                listed(DeltaLog::FORMATS.map(Dtype::name))
            );
            errors.push(document.error_at(&format!("layer.{field}"), message));
        }
    }
    let log = DeltaLog {
        interval,
        keys: defaults.or(file.log_keys, "log_keys", Dtype::Bf16),
        updates: defaults.or(file.log_updates, "log_updates", Dtype::F32),
        merge: defaults.or(file.log_merge, "log_merge", Merge::Fused),
        position: 0,
    };
    if errors.len() == before {
        Ok(Some(log))
    } else {
        Err(Refused)
    }
}

/// The choices of softmax attention.
fn attention(
    file: &LayerFile,
    document: &Document,
    defaults: &mut Defaults<'_>,
    errors: &mut Vec<ConfigError>,
) -> Option<Attention> {
    let before = errors.len();
    let mut complain = |field: &str, message: String| {
        errors.push(document.error_at(&format!("layer.{field}"), message));
    };
    let usual = Attention::default();
    let size = |written: Option<Size>| written.map(|s| s.0);
    let latent = defaults.mechanism.uses("latent_rank");
    let attention = Attention {
        block_q: defaults.or(size(file.block_q), "block_q", usual.block_q),
        block_kv: defaults.or(size(file.block_kv), "block_kv", usual.block_kv),
        causal: defaults.or(file.causal, "causal", usual.causal),
        window: size(file.window),
        scale: file.scale,
        rotary: defaults.or(file.rotary, "rotary", usual.rotary),
        rotary_base: defaults.or(file.rotary_base, "rotary_base", usual.rotary_base),
        ssmax: defaults.or(file.ssmax, "ssmax", usual.ssmax),
        qk_norm: defaults.or(file.qk_norm, "qk_norm", usual.qk_norm),
        latent_rank: size(file.latent_rank).unwrap_or(0),
        decoupled_dim: size(file.decoupled_dim).unwrap_or(0),
        query_rank: size(file.query_rank).unwrap_or(0),
    };
    for (field, block) in [("block_q", attention.block_q), ("block_kv", attention.block_kv)] {
        if block > LARGEST_EXTENT {
            complain(
                field,
                format!("expected at most {LARGEST_EXTENT}, found `{block}`"),
            );
        }
    }
    if attention.window.is_some() && !attention.causal {
        complain(
            "window",
            "a window looks back from the query; expected `causal: true`, found `false`".to_owned(),
        );
    }
    if attention.window.is_some_and(|window| window > LARGEST_EXTENT) {
        complain("window", format!("expected at most {LARGEST_EXTENT}"));
    }
    if attention.ssmax && !attention.causal {
        complain(
            "ssmax",
            "counts the keys up to the query; expected `causal: true`, found `false`".to_owned(),
        );
    }
    if attention
        .scale
        .is_some_and(|scale| !(scale > 0.0 && scale.is_finite()))
    {
        complain("scale", "expected a factor above zero".to_owned());
    }
    if !(attention.rotary_base > 1.0 && attention.rotary_base.is_finite()) {
        complain(
            "rotary_base",
            "expected a number above 1, such as `10000`".to_owned(),
        );
    }
    let key_dim = file.key_dim.0;
    if latent {
        for (field, value) in [
            ("latent_rank", attention.latent_rank),
            ("decoupled_dim", attention.decoupled_dim),
        ] {
            if value == 0 {
                let message = format!("missing key `{field}`; `mla` needs it, for instance `{field}: 64`");
                errors.push(document.error_at("layer", message));
            }
        }
        if attention.decoupled_dim >= key_dim {
            let message = format!(
                "expected less than the {key_dim} channels of a key, found `{}`",
                attention.decoupled_dim
            );
            errors.push(document.error_at("layer.decoupled_dim", message));
        }
        for (field, rank) in [
            ("latent_rank", attention.latent_rank),
            ("query_rank", attention.query_rank),
        ] {
            if rank > LARGEST_EXTENT {
                let message = format!("expected at most {LARGEST_EXTENT}");
                errors.push(document.error_at(&format!("layer.{field}"), message));
            }
        }
    }
    let channels = if latent { attention.decoupled_dim } else { key_dim };
    let rotated = attention.rotary * channels as f64;
    let even = (rotated / 2.0).fract().abs() < 1e-9;
    if !((0.0..=1.0).contains(&attention.rotary) && even) {
        let message = format!(
            "expected a share from 0 to 1 that leaves an even number of the {channels} channels, such as `1`, `0.5` or `0`, found `{}`",
            attention.rotary
        );
        errors.push(document.error_at("layer.rotary", message));
    }
    (errors.len() == before).then_some(attention)
}

/// Extents of a layer, for an estimate before anything is built. Tokens are padded to whole chunks.
struct Sizes {
    sequences: usize,
    tokens: usize,
    model_width: usize,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    chunk: usize,
    conv_width: usize,
    gate_rank: usize,
}

impl Sizes {
    /// Multiply-adds of the costliest variants, with the largest tensors among them. In floats, which do not overflow.
    fn multiply_adds(&self) -> f64 {
        let [tokens, d, dk, c, rank] = [
            self.tokens,
            self.model_width,
            self.key_dim,
            self.chunk,
            self.gate_rank,
        ]
        .map(|n| n as f64);
        let keys = self.key_heads as f64 * dk;
        let values = self.value_heads as f64 * self.value_dim as f64;
        let heads = self.value_heads as f64;
        let per_token = (2.0 * keys + values) * (d.max(self.conv_width as f64) + c + dk)
            + rank * (d + keys + values)
            // Decay differences of every pair of rows and channel; products of `c x c`.
            + heads * c * (dk + 2.0 * c * c.log2().max(1.0));
        // Weights and states, should there be fewer tokens than channels.
        let held = (d + rank) * (2.0 * keys + values + rank) + values * dk;
        self.sequences as f64 * (tokens * per_token + held)
    }
}

/// Every optional field of a layer that only some mechanisms read.
fn optional_fields() -> impl Iterator<Item = &'static str> {
    [
        fields::COMMON,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::CONTEXT,
        fields::VERIFY,
        fields::GRAM,
        fields::DECAY,
        fields::TILES,
        fields::DELTA,
        fields::HOUSEHOLDER,
        fields::FEATURES,
        fields::DECAY_RANK,
        fields::MIX_RANK,
        fields::ATTENTION,
        fields::GROUPED_ATTENTION,
        fields::LATENT_ATTENTION,
        fields::MESA,
        fields::WHITENING,
    ]
    .into_iter()
    .flatten()
    .copied()
}

/// Whether a pass has no use for a field.
fn unread(pass: Pass, field: &str) -> bool {
    match pass {
        Pass::Forward => [fields::DECODE, fields::DELTA_LOG, fields::CONTEXT, fields::VERIFY]
            .iter()
            .any(|group| group.contains(&field)),
        Pass::Decode => fields::CHUNK_FORM.contains(&field) || fields::VERIFY.contains(&field),
        // The chunk form without packed sequences.
        Pass::Verify => [fields::DECODE, fields::DELTA_LOG, fields::CONTEXT, fields::PACKED]
            .iter()
            .any(|group| group.contains(&field)),
    }
}

/// Collects the fields a file leaves out.
struct Defaults<'a> {
    mechanism: &'static Mechanism,
    pass: Pass,
    list: Option<&'a mut Vec<DefaultValue>>,
}

impl Defaults<'_> {
    /// The written value, or the usual one, which is listed if the mechanism reads the field.
    fn or<T: serde::Serialize>(&mut self, written: Option<T>, field: &str, usual: T) -> T {
        written.unwrap_or_else(|| {
            if let Some(list) = &mut self.list
                && self.mechanism.uses(field)
                && !unread(self.pass, field)
            {
                let value = serde_json::to_string(&usual).unwrap_or_default();
                list.push(DefaultValue {
                    field: format!("layer.{field}"),
                    value: value.trim_matches('"').to_owned(),
                });
            }
            usual
        })
    }
}

/// The multiples of `of` on either side of `value`.
fn neighbours(value: usize, of: usize) -> String {
    let below = value / of * of;
    if below == 0 {
        format!("the nearest is {of}")
    } else {
        format!("the nearest are {below} and {}", below + of)
    }
}
