//! A model of a public `config.json`, as Hugging Face hosts them.
//!
//! The configuration becomes the text of a model file, which is read like any other. Keys that a family needs and a file lacks are errors at their place; values that the library
//! of the family sets where a file leaves them out are taken from there and listed as assumed.

use serde_json::{Map, Value as Json, json};

use super::{Model, from_document};
use crate::config::{ConfigError, Document, Node, Value, suggestion};

/// A family of configurations.
struct Family {
    /// Values of `model_type`.
    types: &'static [&'static str],
    /// Mixer and feed-forward network of every layer.
    layers: fn(&Config<'_>) -> Result<Vec<Layer>, ConfigError>,
}

const KNOWN: &[Family] = &[
    Family {
        types: &[
            "qwen3_next",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5",
            "qwen3_5_text",
        ],
        layers: qwen_hybrid,
    },
    Family {
        types: &["kimi_linear"],
        layers: kimi_linear,
    },
    Family {
        types: &["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"],
        layers: transformer,
    },
    Family {
        types: &["deepseek_v2", "deepseek_v3"],
        layers: deepseek,
    },
    Family {
        types: &["mamba2"],
        layers: mamba2,
    },
];

/// Values of `model_type` that can be read.
#[must_use]
pub fn families() -> Vec<&'static str> {
    KNOWN
        .iter()
        .flat_map(|family| family.types.iter().copied())
        .collect()
}

/// One layer, in the words of a model file.
#[derive(Debug, Clone, PartialEq)]
struct Layer {
    name: String,
    mixer: Json,
    feed_forward: Option<Json>,
}

/// A configuration with the place of the part that describes the language model.
struct Config<'a> {
    document: &'a Document,
    /// `text_config.` where the file has several parts, else nothing.
    prefix: &'static str,
    /// `model_type`.
    kind: String,
    /// Values taken where the file has none.
    assumed: std::cell::RefCell<Vec<String>>,
}

impl Config<'_> {
    fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The value of a key, where it is there and not null.
    fn value(&self, key: &str) -> Option<&Value> {
        let node = self.document.node(&self.path(key))?;
        (node.value != Value::Null).then_some(&node.value)
    }

    fn wrong(&self, key: &str, expected: &str) -> ConfigError {
        let found = self
            .document
            .node(&self.path(key))
            .map_or_else(|| "nothing".to_owned(), |node| node.value.describe());
        self.document
            .error_at(&self.path(key), format!("expected {expected}, found {found}"))
    }

    fn missing(&self, key: &str) -> ConfigError {
        let (inside, key) = key.rsplit_once('.').unwrap_or(("", key));
        let parent = self.path(inside);
        let parent = parent.trim_end_matches('.');
        let message = format!("missing key `{key}`; `model_type: {}` needs it", self.kind);
        self.document.error_at(parent, message)
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Int(n)) => usize::try_from(*n)
                .map(Some)
                .map_err(|_| self.wrong(key, "a whole number that is not negative")),
            Some(_) => Err(self.wrong(key, "a whole number")),
        }
    }

    fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A size, or the value that the library takes where the file has none.
    fn size_or(&self, key: &str, usual: usize) -> Result<usize, ConfigError> {
        Ok(self.optional_size(key)?.unwrap_or_else(|| {
            self.note(format!(
                "{key}: {usual}, as the library of `{}` sets it",
                self.kind
            ));
            usual
        }))
    }

    fn number_or(&self, key: &str, usual: f64) -> Result<f64, ConfigError> {
        match self.value(key) {
            None => {
                self.note(format!(
                    "{key}: {usual}, as the library of `{}` sets it",
                    self.kind
                ));
                Ok(usual)
            }
            Some(Value::Int(n)) => Ok(*n as f64),
            Some(Value::Float(x)) => Ok(*x),
            Some(_) => Err(self.wrong(key, "a number")),
        }
    }

    fn flag_or(&self, key: &str, usual: bool) -> Result<bool, ConfigError> {
        match self.value(key) {
            None => Ok(usual),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.wrong(key, "`true` or `false`")),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&str>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "text")),
        }
    }

    fn list(&self, key: &str) -> Result<Option<&[Node]>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Seq(items)) => Ok(Some(items)),
            Some(_) => Err(self.wrong(key, "a list")),
        }
    }

    /// A list of layer numbers.
    fn numbers(&self, key: &str) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(items) = self.list(key)? else {
            return Ok(None);
        };
        let number = |(i, node): (usize, &Node)| {
            match node.value {
                Value::Int(n) => usize::try_from(n).ok(),
                _ => None,
            }
            .ok_or_else(|| self.wrong(&format!("{key}.{i}"), "the number of a layer"))
        };
        items
            .iter()
            .enumerate()
            .map(number)
            .collect::<Result<_, _>>()
            .map(Some)
    }

    fn note(&self, text: String) {
        let mut assumed = self.assumed.borrow_mut();
        if !assumed.contains(&text) {
            assumed.push(text);
        }
    }

    /// Rotary base and share of rotated channels, at the top or in `rope_parameters`.
    fn rotary(&self, usual_share: f64) -> Result<(f64, f64), ConfigError> {
        let first = |keys: [&'static str; 2]| keys.into_iter().find(|key| self.value(key).is_some());
        let base = match first(["rope_theta", "rope_parameters.rope_theta"]) {
            Some(key) => self.number_or(key, 1e4)?,
            None => self.number_or("rope_theta", 1e4)?,
        };
        let share = match first(["partial_rotary_factor", "rope_parameters.partial_rotary_factor"]) {
            Some(key) => self.number_or(key, usual_share)?,
            None => usual_share,
        };
        Ok((base, share))
    }

    /// The dense network of a layer.
    fn dense(&self) -> Result<Json, ConfigError> {
        Ok(json!({ "hidden": self.size("intermediate_size")? }))
    }
}

/// Layers of alternating linear and full attention (Qwen3-Next, Qwen3.5, Qwen3.6).
fn qwen_hybrid(config: &Config<'_>) -> Result<Vec<Layer>, ConfigError> {
    let depth = config.size("num_hidden_layers")?;
    let linear: Vec<bool> = if let Some(types) = config.list("layer_types")? {
        let kind = |(i, node): (usize, &Node)| match &node.value {
            Value::String(name) if name == "linear_attention" => Ok(true),
            Value::String(name) if name == "full_attention" => Ok(false),
            _ => Err(config.wrong(
                &format!("layer_types.{i}"),
                "`linear_attention` or `full_attention`",
            )),
        };
        types.iter().enumerate().map(kind).collect::<Result<_, _>>()?
    } else {
        let interval = config.size_or("full_attention_interval", 4)?.max(1);
        (0..depth).map(|i| (i + 1) % interval != 0).collect()
    };
    if linear.len() != depth {
        return Err(config.wrong("layer_types", &format!("a name for each of the {depth} layers")));
    }
    let gdn = json!({
        "mechanism": "gdn",
        "key_heads": config.size("linear_num_key_heads")?,
        "value_heads": config.size("linear_num_value_heads")?,
        "key_dim": config.size("linear_key_head_dim")?,
        "value_dim": config.size("linear_value_head_dim")?,
        "conv_width": config.size("linear_conv_kernel_dim")?,
        "chunk": 64,
        "state": "f32",
        "output_gate": "full",
    });
    let (base, share) = config.rotary(0.25)?;
    let gate = config.flag_or("attn_output_gate", true)?;
    let head = config.size("head_dim")?;
    let full = json!({
        "mechanism": "softmax",
        "query_heads": config.size("num_attention_heads")?,
        "key_heads": config.size("num_key_value_heads")?,
        "key_dim": head,
        "value_dim": head,
        "rotary": share,
        "rotary_base": base,
        "qk_norm": true,
        "output_gate": if gate { "full" } else { "none" },
    });
    let experts = match config.optional_size("num_experts")?.unwrap_or(0) {
        0 => None,
        count => Some(json!({
            "experts": count,
            "active": config.size("num_experts_per_tok")?,
            "hidden": config.size("moe_intermediate_size")?,
            "shared_hidden": config.size("shared_expert_intermediate_size")?,
            "shared_gate": true,
            "scores": "softmax",
            "normalised": config.flag_or("norm_topk_prob", true)?,
        })),
    };
    let step = config.optional_size("decoder_sparse_step")?.unwrap_or(1).max(1);
    let dense_only = config.numbers("mlp_only_layers")?.unwrap_or_default();
    (0..depth)
        .map(|i| {
            let (name, mixer) = if linear[i] {
                ("GDN", &gdn)
            } else {
                ("gated attention", &full)
            };
            let feed_forward = match &experts {
                Some(experts) if (i + 1) % step == 0 && !dense_only.contains(&i) => experts.clone(),
                _ => config.dense()?,
            };
            Ok(layer(name, mixer.clone(), Some(feed_forward)))
        })
        .collect()
}

fn layer(name: &str, mixer: Json, feed_forward: Option<Json>) -> Layer {
    Layer {
        name: name.to_owned(),
        mixer,
        feed_forward,
    }
}

/// Latent attention of a configuration with the keys of `DeepSeek`.
fn latent(config: &Config<'_>, rotary: f64, base: f64) -> Result<Json, ConfigError> {
    let (own, shared) = (config.size("qk_nope_head_dim")?, config.size("qk_rope_head_dim")?);
    let mut mixer = json!({
        "mechanism": "mla",
        "key_heads": config.size("num_attention_heads")?,
        "key_dim": own + shared,
        "value_dim": config.size("v_head_dim")?,
        "latent_rank": config.size("kv_lora_rank")?,
        "decoupled_dim": shared,
        "rotary": rotary,
        "rotary_base": base,
        "output_gate": "none",
    });
    if let Some(rank) = config.optional_size("q_lora_rank")? {
        mixer["query_rank"] = json!(rank);
    }
    Ok(mixer)
}

/// Experts of a configuration with the keys of `DeepSeek`; `count` and `active` go by other names in Kimi Linear.
fn deepseek_experts(config: &Config<'_>, [count, active, shared]: [&str; 3]) -> Result<Json, ConfigError> {
    let hidden = config.size("moe_intermediate_size")?;
    let mut experts = json!({
        "experts": config.size(count)?,
        "active": config.size(active)?,
        "hidden": hidden,
        "scale": config.number_or("routed_scaling_factor", 1.0)?,
    });
    let shared = config.optional_size(shared)?.unwrap_or(0);
    if shared > 0 {
        experts["shared_hidden"] = json!(shared * hidden);
    }
    Ok(experts)
}

/// Dense networks of the first layers, experts in the others.
fn first_dense(config: &Config<'_>, experts: &Json, i: usize) -> Result<Json, ConfigError> {
    let first = config.optional_size("first_k_dense_replace")?.unwrap_or(0);
    let every = config.optional_size("moe_layer_freq")?.unwrap_or(1).max(1);
    if i >= first && i.is_multiple_of(every) {
        Ok(experts.clone())
    } else {
        config.dense()
    }
}

/// Kimi Delta Attention with latent attention.
fn kimi_linear(config: &Config<'_>) -> Result<Vec<Layer>, ConfigError> {
    let depth = config.size("num_hidden_layers")?;
    let heads = config.size("linear_attn_config.num_heads")?;
    let head = config.size("linear_attn_config.head_dim")?;
    let key = "linear_attn_config.kda_layers";
    // They count from one.
    let linear = config.numbers(key)?.ok_or_else(|| config.missing(key))?;
    let kda = json!({
        "mechanism": "kda",
        "key_heads": heads,
        "value_heads": heads,
        "key_dim": head,
        "value_dim": head,
        "conv_width": config.size("linear_attn_config.short_conv_kernel_size")?,
        "chunk": 64,
        "state": "f32",
        "gram": "pivot_causal",
        "decay_gate": "softplus",
        "output_gate": "low_rank",
        "gate_rank": head,
    });
    let rotated = !config.flag_or("mla_use_nope", false)?;
    let base = config.number_or("rope_theta", 1e4)?;
    let full = latent(config, f64::from(u8::from(rotated)), base)?;
    let mut experts = deepseek_experts(
        config,
        ["num_experts", "num_experts_per_token", "num_shared_experts"],
    )?;
    experts["scores"] = match config.text("moe_router_activation_func")?.unwrap_or("sigmoid") {
        scores @ ("sigmoid" | "softmax") => json!(scores),
        _ => return Err(config.wrong("moe_router_activation_func", "`sigmoid` or `softmax`")),
    };
    experts["bias"] = json!(true);
    experts["normalised"] = json!(config.flag_or("moe_renormalize", true)?);
    (0..depth)
        .map(|i| {
            let (name, mixer) = if linear.contains(&(i + 1)) {
                ("KDA", &kda)
            } else {
                ("MLA", &full)
            };
            let feed_forward = first_dense(config, &experts, i)?;
            Ok(layer(name, mixer.clone(), Some(feed_forward)))
        })
        .collect()
}

/// Latent attention with experts.
fn deepseek(config: &Config<'_>) -> Result<Vec<Layer>, ConfigError> {
    let depth = config.size("num_hidden_layers")?;
    let (base, _) = config.rotary(1.0)?;
    let full = latent(config, 1.0, base)?;
    let mut experts = deepseek_experts(
        config,
        ["n_routed_experts", "num_experts_per_tok", "n_shared_experts"],
    )?;
    let third = config.kind == "deepseek_v3";
    experts["scores"] = json!(if third { "sigmoid" } else { "softmax" });
    experts["bias"] = json!(third);
    experts["normalised"] = json!(config.flag_or("norm_topk_prob", third)?);
    (0..depth)
        .map(|i| {
            Ok(layer(
                "MLA",
                full.clone(),
                Some(first_dense(config, &experts, i)?),
            ))
        })
        .collect()
}

/// Softmax attention with grouped queries, dense or with experts.
fn transformer(config: &Config<'_>) -> Result<Vec<Layer>, ConfigError> {
    let depth = config.size("num_hidden_layers")?;
    let heads = config.size("num_attention_heads")?;
    let keys = config.optional_size("num_key_value_heads")?.unwrap_or(heads);
    let width = config.size("hidden_size")?;
    let head = config.optional_size("head_dim")?.unwrap_or(width / heads.max(1));
    let (base, share) = config.rotary(1.0)?;
    let mut mixer = json!({
        "mechanism": "softmax",
        "query_heads": heads,
        "key_heads": keys,
        "key_dim": head,
        "value_dim": head,
        "rotary": share,
        "rotary_base": base,
        "qk_norm": config.kind.starts_with("qwen3"),
        "output_gate": "none",
    });
    if config.kind == "qwen2" {
        config.note("biases of the projections are left out".to_owned());
    }
    // Qwen writes a window that it does not use.
    let windowed = config.flag_or("use_sliding_window", !config.kind.starts_with("qwen"))?;
    if let (true, Some(window)) = (windowed, config.optional_size("sliding_window")?) {
        mixer["window"] = json!(window);
    }
    let experts = match config.kind.as_str() {
        "qwen3_moe" => Some(json!({
            "experts": config.size("num_experts")?,
            "active": config.size("num_experts_per_tok")?,
            "hidden": config.size("moe_intermediate_size")?,
            "scores": "softmax",
            "normalised": config.flag_or("norm_topk_prob", false)?,
        })),
        "mixtral" => Some(json!({
            "experts": config.size("num_local_experts")?,
            "active": config.size("num_experts_per_tok")?,
            "hidden": config.size("intermediate_size")?,
            "scores": "softmax",
        })),
        _ => None,
    };
    let step = config.optional_size("decoder_sparse_step")?.unwrap_or(1).max(1);
    let dense_only = config.numbers("mlp_only_layers")?.unwrap_or_default();
    (0..depth)
        .map(|i| {
            let feed_forward = match &experts {
                Some(experts) if (i + 1) % step == 0 && !dense_only.contains(&i) => experts.clone(),
                _ => config.dense()?,
            };
            Ok(layer("attention", mixer.clone(), Some(feed_forward)))
        })
        .collect()
}

/// Mamba-2 alone.
fn mamba2(config: &Config<'_>) -> Result<Vec<Layer>, ConfigError> {
    let depth = config.size("num_hidden_layers")?;
    let mixer = json!({
        "mechanism": "mamba2",
        "key_heads": config.size("n_groups")?,
        "value_heads": config.size("num_heads")?,
        "key_dim": config.size("state_size")?,
        "value_dim": config.size("head_dim")?,
        "conv_width": config.size("conv_kernel")?,
        "chunk": config.size_or("chunk_size", 256)?,
        "state": "f32",
        "output_gate": "full",
    });
    Ok(vec![layer("Mamba-2", mixer, None); depth])
}

/// Format of the weights, as the file says.
fn formats(config: &Config<'_>) -> Result<(&'static str, &'static str), ConfigError> {
    let name = match (config.text("dtype")?, config.text("torch_dtype")?) {
        (Some(name), _) | (None, Some(name)) => name,
        _ => {
            config.note("formats: bf16, the file names none".to_owned());
            "bfloat16"
        }
    };
    let activations = match name {
        "bfloat16" => "bf16",
        "float16" => "f16",
        "float32" => "f32",
        _ => {
            let key = if config.value("dtype").is_some() {
                "dtype"
            } else {
                "torch_dtype"
            };
            return Err(config.wrong(key, "`bfloat16`, `float16` or `float32`"));
        }
    };
    let weights = match config.text("quantization_config.quant_method")? {
        Some("fp8") => "fp8_e4m3",
        Some(other) => {
            config.note(format!(
                "weights in {activations}: `quantization_config` of the method `{other}` is not read; `--set model.weights=fp8_e4m3` sets another format"
            ));
            activations
        }
        None => activations,
    };
    Ok((activations, weights))
}

/// The model of a configuration, after changing fields of the model file it stands for (`decode.batch=128`).
///
/// # Errors
/// For a `model_type` of another family, with the nearest that is known; a missing key or a value that does not fit, at its place in the file; and as [`from_document`].
pub fn from_config<S: AsRef<str>>(
    document: &Document,
    overrides: &[S],
) -> Result<(Model, Document), ConfigError> {
    let text_model = document
        .node("text_config")
        .is_some_and(|node| matches!(node.value, Value::Map(_)));
    let prefix = if text_model { "text_config." } else { "" };
    let own = format!("{prefix}model_type");
    let Some(node) = document.node(&own).or_else(|| document.node("model_type")) else {
        let known = crate::config::listed(families());
        let message = format!("missing key `model_type`; expected one of {known}");
        return Err(document.error_at(prefix.trim_end_matches('.'), message));
    };
    let Value::String(kind) = &node.value else {
        let found = node.value.describe();
        let message = format!("expected the name of an architecture, found {found}");
        return Err(document.error_at(&own, message));
    };
    let kind = kind.clone();
    let Some(family) = KNOWN.iter().find(|family| family.types.contains(&kind.as_str())) else {
        let tail = suggestion(&kind, &families(), "known");
        let at = if document.node(&own).is_some() {
            own.as_str()
        } else {
            "model_type"
        };
        return Err(document.error_at(at, format!("unknown architecture `{kind}`; {tail}")));
    };
    let config = Config {
        document,
        prefix,
        kind,
        assumed: std::cell::RefCell::default(),
    };
    let layers = (family.layers)(&config)?;
    let (activations, weights) = formats(&config)?;
    let mut blocks: Vec<(Layer, usize)> = Vec::new();
    for layer in layers {
        match blocks.iter_mut().find(|(known, _)| *known == layer) {
            Some((_, count)) => *count += 1,
            None => blocks.push((layer, 1)),
        }
    }
    let name_twice = |name: &str| blocks.iter().filter(|(layer, _)| layer.name == name).count() > 1;
    let described: Vec<Json> = blocks
        .iter()
        .map(|(layer, count)| {
            let dense = layer
                .feed_forward
                .as_ref()
                .is_some_and(|network| network.get("experts").is_none());
            let name = match (name_twice(&layer.name), dense) {
                (true, true) => format!("{}, dense", layer.name),
                _ => layer.name.clone(),
            };
            let mut block = Map::new();
            block.insert("name".to_owned(), json!(name));
            block.insert("count".to_owned(), json!(count));
            block.insert("mixer".to_owned(), layer.mixer.clone());
            if let Some(feed_forward) = &layer.feed_forward {
                block.insert("feed_forward".to_owned(), feed_forward.clone());
            }
            Json::Object(block)
        })
        .collect();
    if config.optional_size("mtp_num_hidden_layers")?.unwrap_or(0) > 0
        || config.optional_size("num_nextn_predict_layers")?.unwrap_or(0) > 0
    {
        config.note("layers that predict further tokens are left out".to_owned());
    }
    if text_model {
        config.note("the language model alone: encoders of other inputs are left out".to_owned());
    }
    for line in [
        "prefill, decode and hardware: no part of a configuration; `--set prefill.tokens=..`, `--set decode.batch=..` and `--hw` change them",
        "chunk of the linear layers where the file has none: 64, as their public kernels",
    ] {
        config.note(line.to_owned());
    }
    let file = std::path::Path::new(document.name());
    let name = [
        file.parent().and_then(std::path::Path::file_name),
        Some(config.kind.as_ref()),
    ]
    .into_iter()
    .flatten()
    .filter_map(std::ffi::OsStr::to_str)
    .find(|name| !name.is_empty() && !name.starts_with('.'))
    .unwrap_or("model")
    .to_owned();
    // A configuration without a folder of its own is called by its family.
    let model = json!({
        "name": name,
        "source": document.name(),
        "model": {
            "width": config.size("hidden_size")?,
            "vocabulary": config.size("vocab_size")?,
            "tied_embeddings": match document.node("tie_word_embeddings") {
                Some(Node { value: Value::Bool(tied), .. }) => *tied,
                _ => config.flag_or("tie_word_embeddings", false)?,
            },
            "activations": activations,
            "weights": weights,
        },
        "blocks": described,
        "prefill": { "batch": 1, "tokens": 8192 },
        "decode": { "batch": 64, "context": 8192 },
        "hardware": ["tpu-v7x", "h200-sxm"],
        "assumed": config.assumed.into_inner(),
    });
    let text = format!("{model:#}");
    let mut written = Document::parse(&format!("{} as a model", document.name()), &text)?;
    for assignment in overrides {
        written.set(assignment.as_ref())?;
    }
    let model = from_document(&written)?;
    Ok((model, written))
}
