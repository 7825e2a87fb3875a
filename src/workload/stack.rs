//! A stack: layers of several kinds, one after the other, each a workload of its own.
//!
//! `rL:1A` hybrids are `r` linear layers to one of full attention. Layers of a kind are alike, so a stack is a list of kinds with counts.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;

use super::Workload;
use super::file::{Size, resolve};
use super::load::{beside, read};
use crate::config::{ConfigError, Document, Value, listed};
use crate::kernels::Plan;

/// Layers of one kind.
#[derive(Debug)]
pub struct StackLayer {
    /// What the kind is called in the outputs.
    pub name: String,
    /// Layers of it.
    pub count: usize,
    /// One of them, with its file.
    pub workload: (Workload, Document),
}

/// Layers of several kinds.
#[derive(Debug)]
pub struct Stack {
    /// Name of the stack.
    pub name: String,
    /// Kinds, in the order of the file.
    pub layers: Vec<StackLayer>,
    /// Names of the fusion plans, which every kind runs.
    pub plans: Vec<String>,
    /// Chips, by name or path.
    pub hardware: Vec<String>,
    /// What the file itself marks as inferred.
    pub inferred: Vec<String>,
}

/// A stack of layers for tpusim: kinds of layers with counts, each a workload of its own.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StackFile {
    /// Name of the stack.
    name: String,
    /// Kinds of layers, in order.
    #[schemars(length(min = 1))]
    stack: Vec<EntryFile>,
    /// Tokens of every layer, instead of those of the workloads.
    tokens: Option<Size>,
    /// Sequences of every layer, instead of those of the workloads.
    batch: Option<Size>,
    /// Fusion plans to time, of every layer.
    #[schemars(schema_with = "super::file::plan_names")]
    plans: Vec<String>,
    /// Chips to time it on: shipped names, or paths of hardware files relative to this one.
    #[schemars(schema_with = "super::file::chip_names")]
    hardware: Vec<String>,
    #[serde(default)]
    /// What in this file is inferred rather than published.
    inferred: Vec<String>,
}

/// Layers of one kind.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct EntryFile {
    /// Workload of one layer: a file beside this one, or a shipped name.
    workload: String,
    /// Layers of this kind.
    count: Size,
    /// What they are called in the outputs; the name of the workload where left out.
    name: Option<String>,
    #[serde(default)]
    /// Changes of the workload, `FIELD=VALUE`.
    set: Vec<String>,
}

/// JSON schema of a stack, from the structs that read it.
pub(super) fn schema(generator: SchemaGenerator) -> Schema {
    generator.into_root_schema_for::<StackFile>()
}

/// Whether the structs read a file, before any value is checked.
#[cfg(test)]
pub(super) fn well_formed(document: &Document) -> Result<(), ConfigError> {
    document.deserialize::<StackFile>().map(|_| ())
}

/// Most layers of a kind: beyond any model, and products with 64-bit counts stay in range.
const MOST_LAYERS: usize = 100_000;

/// The stack called `name_or_path` after changing fields (`tokens=32768`), or `None` where that file is a workload of one layer.
///
/// # Errors
/// For an unknown name, an unreadable file, an override that leads nowhere, and every value that does not fit, in the stack or in a
/// workload it names.
pub fn load_stack<S: AsRef<str>>(
    name_or_path: &str,
    overrides: &[S],
) -> Result<Option<(Stack, Document)>, ConfigError> {
    let mut document = read(name_or_path)?;
    if document.node("stack").is_none() {
        return Ok(None);
    }
    for assignment in overrides {
        document.set(assignment.as_ref())?;
    }
    let file: StackFile = document.deserialize()?;
    let mut errors = Vec::new();
    if file.stack.is_empty() {
        errors.push(document.error_at("stack", "expected at least one kind of layer, found none"));
    }
    if file.plans.is_empty() {
        let message = format!("expected at least one of {}, found none", listed(&Plan::NAMES));
        errors.push(document.error_at("plans", message));
    }
    if file.hardware.is_empty() {
        let message = "expected at least one chip, found none; `tpusim hw list` shows them";
        errors.push(document.error_at("hardware", message));
    }
    let mut layers = Vec::new();
    for (i, entry) in file.stack.iter().enumerate() {
        if entry.count.0 > MOST_LAYERS {
            let message = format!("expected at most {MOST_LAYERS} layers, found `{}`", entry.count.0);
            errors.push(document.error_at(&format!("stack.{i}.count"), message));
        }
        match layer(&file, entry, name_or_path, &document, i) {
            Ok(layer) => layers.push(layer),
            Err(error) => errors.push(error),
        }
    }
    ConfigError::collect(errors)?;
    let stack = Stack {
        name: file.name,
        layers,
        plans: file.plans,
        hardware: file.hardware,
        inferred: file.inferred,
    };
    Ok(Some((stack, document)))
}

fn layer(
    file: &StackFile,
    entry: &EntryFile,
    of: &str,
    document: &Document,
    i: usize,
) -> Result<StackLayer, ConfigError> {
    let Some(target) = beside(&entry.workload, of) else {
        let message = format!(
            "cannot find the workload `{}`; expected a file beside this one or a shipped name",
            entry.workload
        );
        return Err(document.error_at(&format!("stack.{i}.workload"), message));
    };
    let mut of_layer = read(&target)?;
    if of_layer.node("stack").is_some() {
        let message = format!(
            "`{}` is a stack; expected the workload of one layer",
            entry.workload
        );
        return Err(document.error_at(&format!("stack.{i}.workload"), message));
    }
    for (field, size) in [("layer.tokens", file.tokens), ("layer.batch", file.batch)] {
        if let Some(size) = size {
            of_layer.set(&format!("{field}={}", size.0))?;
        }
    }
    // The sample of the numeric check is never longer than the layer.
    let sample = match of_layer.node("numeric.tokens").map(|node| &node.value) {
        Some(Value::Int(sample)) => usize::try_from(*sample).ok(),
        _ => None,
    };
    if let (Some(sample), Some(size)) = (sample, file.tokens)
        && sample > size.0
    {
        of_layer.set(&format!("numeric.tokens={}", size.0))?;
    }
    of_layer.set(&format!("plans=[{}]", file.plans.join(", ")))?;
    for (j, assignment) in entry.set.iter().enumerate() {
        of_layer.set_as(assignment, &format!("stack.{i}.set.{j}: {assignment}"))?;
    }
    let mut workload = resolve(&of_layer)?;
    // Published times hold for the layer as its own file has it.
    workload.published = None;
    Ok(StackLayer {
        name: entry.name.clone().unwrap_or_else(|| workload.name.clone()),
        count: entry.count.0,
        workload: (workload, of_layer),
    })
}
