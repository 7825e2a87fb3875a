//! A workload file as it is written, and its checks.

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer};

use super::{Numeric, Published, PublishedRow, Workload};
use crate::config::{ConfigError, Document, listed, suggestion};
use crate::dtype::Dtype;
use crate::graph::Precision;
use crate::hardware;
use crate::kernels::{Plan, Program};
use crate::layer::{
    DecayGate, GramVariant, InitialState, InverseVariant, Layer, OutputGate, PivotRow, ReadConvention,
    StateFormat,
};
use crate::mechanisms::{Granularity, Mechanism, fields, gram_variants};

/// A positive whole number up to [`LARGEST_EXTENT`].
#[derive(Debug, Clone, Copy)]
struct Size(usize);

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

/// What the layer computes: only the forward pass is built so far.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Pass {
    Forward,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkloadFile {
    name: String,
    layer: LayerFile,
    plans: Vec<String>,
    #[serde(rename = "pass")]
    _pass: Pass,
    hardware: Vec<String>,
    baseline: Option<String>,
    program: Option<ProgramFile>,
    numeric: NumericFile,
    published: Option<PublishedFile>,
    #[serde(default)]
    inferred: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerFile {
    mechanism: &'static Mechanism,
    batch: Size,
    tokens: Size,
    model_width: Size,
    key_heads: Size,
    value_heads: Size,
    key_dim: Size,
    value_dim: Size,
    chunk: Size,
    decay_tiles: Option<Size>,
    activations: Option<Dtype>,
    state: Option<StateFormat>,
    state_precision: Option<Precision>,
    gram: Option<GramVariant>,
    pivot: Option<PivotRow>,
    inverse: Option<InverseVariant>,
    inverse_precision: Option<Precision>,
    neumann_steps: Option<Size>,
    read: Option<ReadConvention>,
    decay_gate: Option<DecayGate>,
    decay_bound: Option<f64>,
    negative_eigenvalues: Option<bool>,
    conv_width: Option<Size>,
    output_gate: Option<OutputGate>,
    gate_rank: Option<Size>,
    initial_state: Option<InitialState>,
}

/// What a program of a kernel with a carried state works on.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProgramFile {
    heads: Size,
    /// Rounded down to whole chunks, at least one.
    tokens: Size,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NumericFile {
    tokens: Size,
    key_heads: Size,
    seed: u64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
enum TimeUnit {
    #[serde(rename = "us")]
    Microseconds,
    #[serde(rename = "ms")]
    Milliseconds,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PublishedFile {
    source: String,
    chip: String,
    unit: TimeUnit,
    unfused: Option<std::collections::BTreeMap<String, f64>>,
    fused: Option<std::collections::BTreeMap<String, f64>>,
}

/// Largest extent of a dimension; products of extents stay within 64-bit counts below it.
const LARGEST_EXTENT: usize = 1 << 28;
/// Largest chunk: some variants append operations for every block of 16 rows or pair of them.
const LARGEST_CHUNK: usize = 4096;
/// Most chunks of a program: its schedule holds the operations of each.
const LARGEST_PROGRAM: usize = 256;
/// Largest count of multiply-adds of a layer: far above any machine, and a sum of many such counts stays below 2^64.
const LARGEST_LAYER: f64 = (1_u64 << 56) as f64;

/// Reads and checks a workload.
///
/// # Errors
/// Everything that does not fit, each at its place.
pub(super) fn resolve(document: &Document) -> Result<Workload, ConfigError> {
    let file: WorkloadFile = document.deserialize()?;
    let mut errors = Vec::new();
    let mut defaults = Vec::new();
    let layer = layer(&file.layer, document, &mut defaults, &mut errors);
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
    let program = match &file.program {
        Some(ProgramFile { heads, tokens }) => {
            let chunk = file.layer.chunk.0;
            if file.layer.key_heads.0 % heads.0 != 0 {
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
        }
        None => {
            defaults.push("program: one head and one chunk (default)".to_owned());
            Program { heads: 1, chunks: 1 }
        }
    };
    let mut plans = Vec::new();
    for (i, name) in file.plans.iter().enumerate() {
        match Plan::named(name, program) {
            Some(_) if file.plans[..i].contains(name) => {
                complain(&format!("plans.{i}"), format!("plan `{name}` stands twice"));
            }
            Some(plan) => plans.push(plan),
            None => {
                let tail = suggestion(name, &Plan::NAMES, "plans");
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
    if file.numeric.tokens.0 > file.layer.tokens.0 {
        complain(
            "numeric.tokens",
            format!(
                "expected at most the {} tokens of the layer, found `{}`",
                file.layer.tokens.0, file.numeric.tokens.0
            ),
        );
    }
    let published = file
        .published
        .as_ref()
        .map(|p| published(p, &file.hardware, document, &mut errors));
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
            tokens: file.numeric.tokens.0,
            key_heads: file.numeric.key_heads.0,
            seed: file.numeric.seed,
        },
        published,
        inferred: file.inferred,
        defaults,
    })
}

/// The program does not matter for the names of a plan's rows.
const ONE: Program = Program { heads: 1, chunks: 1 };

fn published(
    file: &PublishedFile,
    chips: &[String],
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
        let labels: Vec<String> = Plan::named(name, ONE).map_or_else(Vec::new, |plan| {
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

fn layer(
    file: &LayerFile,
    document: &Document,
    defaults: &mut Vec<String>,
    errors: &mut Vec<ConfigError>,
) -> Option<Layer> {
    let before = errors.len();
    let mut complain = |field: &str, message: String| {
        errors.push(document.error_at(&format!("layer.{field}"), message));
    };
    let sizes = [
        file.batch,
        file.tokens,
        file.model_width,
        file.key_heads,
        file.value_heads,
        file.key_dim,
        file.value_dim,
        file.chunk,
    ];
    let [
        batch,
        tokens,
        model_width,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        chunk,
    ] = sizes.map(|Size(size)| size);
    if chunk > LARGEST_CHUNK {
        complain(
            "chunk",
            format!("expected at most {LARGEST_CHUNK} tokens, found `{chunk}`"),
        );
        return None;
    }
    if value_heads % key_heads != 0 {
        complain(
            "value_heads",
            format!(
                "expected a multiple of the {key_heads} key heads, found `{value_heads}`; {}",
                neighbours(value_heads, key_heads)
            ),
        );
    }
    let mechanism = file.mechanism;
    for field in optional_fields() {
        if !mechanism.uses(field) && document.node(&format!("layer.{field}")).is_some() {
            let message = format!("`{}` does not read `{field}`; remove the key", mechanism.name);
            errors.push(document.error_at_key(&format!("layer.{field}"), message));
        }
    }
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
        list: defaults,
    };
    let usual = mechanism.defaults;
    let activations = defaults.or(file.activations, "activations", Dtype::Bf16);
    let state = defaults.or(file.state, "state", StateFormat::F32);
    let state_precision = defaults.or(file.state_precision, "state_precision", Precision::Default);
    let pivot = defaults.or(file.pivot, "pivot", PivotRow::Middle);
    let inverse = defaults.or(file.inverse, "inverse", usual.inverse);
    let inverse_precision = defaults.or(file.inverse_precision, "inverse_precision", Precision::High);
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
    let initial_state = defaults.or(file.initial_state, "initial_state", InitialState::Zero);
    let sizes = Extents {
        sequences: batch,
        tokens: tokens.div_ceil(chunk) * chunk,
        model_width,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        chunk,
        conv_width,
        gate_rank,
    };
    let work = sizes.multiply_adds();
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
    if matches!(activations, Dtype::F64 | Dtype::Int8) {
        complain(
            "activations",
            format!(
                "`{activations}` is no format for activations; one of `bf16`, `f16`, `f32`, `fp8_e4m3`, `fp8_e5m2`"
            ),
        );
    }

    let mut layer = Layer {
        mechanism,
        batch,
        tokens,
        model_width,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        chunk,
        decay_tiles,
        activations,
        state,
        state_precision,
        gram: GramVariant::Broadcast,
        pivot,
        inverse,
        inverse_precision,
        neumann_steps,
        read,
        decay_gate,
        decay_bound,
        negative_eigenvalues,
        conv_width,
        output_gate,
        gate_rank,
        initial_state,
    };
    let variants = gram_variants((mechanism.granularity)(&layer));
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
    let doubles = matches!(
        inverse,
        InverseVariant::Product
            | InverseVariant::Newton
            | InverseVariant::TwoLevel
            | InverseVariant::BlockDoubling
    );
    if doubles && !chunk.is_power_of_two() {
        complain(
            "chunk",
            format!(
                "`inverse: {}` doubles its blocks; expected a power of two, found `{chunk}`",
                inverse.name()
            ),
        );
    }
    (errors.len() == before).then_some(layer)
}

/// Extents of a layer, for an estimate before anything is built. Tokens are padded to whole chunks.
struct Extents {
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

impl Extents {
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
        fields::GRAM,
        fields::DECAY,
        fields::TILES,
        fields::DELTA,
    ]
    .into_iter()
    .flatten()
    .copied()
}

/// Collects the fields a file leaves out.
struct Defaults<'a> {
    mechanism: &'static Mechanism,
    list: &'a mut Vec<String>,
}

impl Defaults<'_> {
    /// The written value, or the usual one, which is listed if the mechanism reads the field.
    fn or<T: serde::Serialize>(&mut self, written: Option<T>, field: &str, usual: T) -> T {
        written.unwrap_or_else(|| {
            if self.mechanism.uses(field) {
                let value = serde_json::to_string(&usual).unwrap_or_default();
                self.list
                    .push(format!("layer.{field}: {} (default)", value.trim_matches('"')));
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
