//! Finding a model: by the name of a shipped file, by a path, or by the configuration of a published one.

use std::path::Path;

use super::{Model, from_config, from_document};
use crate::config::{ConfigError, Document};
use crate::hardware::is_path;

/// The shipped models.
const SHIPPED: &[(&str, &str)] = &[
    (
        "qwen3_next_80b_a3b",
        include_str!("../../models/qwen3_next_80b_a3b.yaml"),
    ),
    (
        "qwen3_6_35b_a3b",
        include_str!("../../models/qwen3_6_35b_a3b.yaml"),
    ),
    (
        "kimi_linear_48b_a3b",
        include_str!("../../models/kimi_linear_48b_a3b.yaml"),
    ),
    ("sla_0L1A", include_str!("../../models/sla_0L1A.yaml")),
    ("sla_4L1A_kda", include_str!("../../models/sla_4L1A_kda.yaml")),
    ("sla_4L1A_r2", include_str!("../../models/sla_4L1A_r2.yaml")),
    ("sla_4L1A_r4", include_str!("../../models/sla_4L1A_r4.yaml")),
    ("sla_7L1A_r4", include_str!("../../models/sla_7L1A_r4.yaml")),
    ("sla_15L1A_kda", include_str!("../../models/sla_15L1A_kda.yaml")),
    ("sla_15L1A_r4", include_str!("../../models/sla_15L1A_r4.yaml")),
];

/// Names of the shipped models.
#[must_use]
pub fn shipped() -> Vec<&'static str> {
    SHIPPED.iter().map(|(name, _)| *name).collect()
}

/// Text of a shipped model.
#[must_use]
pub fn shipped_text(name: &str) -> Option<&'static str> {
    SHIPPED
        .iter()
        .find(|(candidate, _)| *candidate == name)
        .map(|(_, text)| *text)
}

/// The file called `name_or_path` where it is one of a model, without any check of its values; `None` for the file of a workload or a stack, and for names that are
/// not those of a model.
fn read(name_or_path: &str) -> Result<Option<Document>, ConfigError> {
    let in_project = Path::new(name_or_path)
        .strip_prefix("models")
        .ok()
        .and_then(|path| path.to_str())
        .and_then(|path| path.strip_suffix(".yaml"));
    let name = match in_project {
        // A shipped name written as the path it has in the project works from any folder, unless a file is there.
        Some(stem) if !Path::new(name_or_path).exists() => stem,
        _ => name_or_path,
    };
    if let Some(text) = shipped_text(name) {
        return Document::parse(&format!("models/{name}.yaml"), text).map(Some);
    }
    if !is_path(name_or_path) || !Path::new(name_or_path).is_file() {
        return Ok(None);
    }
    let document = Document::read(name_or_path)?;
    Ok(document.node("blocks").is_some().then_some(document))
}

/// The model called `name_or_path` after changing fields (`decode.batch=128`), or `None` where there is no model of that name and the file is not one.
///
/// # Errors
/// For an unreadable file, an override that leads nowhere, and every value that does not fit.
pub fn load<S: AsRef<str>>(
    name_or_path: &str,
    overrides: &[S],
) -> Result<Option<(Model, Document)>, ConfigError> {
    let Some(mut document) = read(name_or_path)? else {
        return Ok(None);
    };
    for assignment in overrides {
        document.set(assignment.as_ref())?;
    }
    let model = from_document(&document)?;
    Ok(Some((model, document)))
}

/// The model of the `config.json` at `path`, with the model file that it stands for, after changing fields of that.
///
/// # Errors
/// As [`from_config`], and for an unreadable file.
pub fn load_huggingface<S: AsRef<str>>(
    path: &str,
    overrides: &[S],
) -> Result<(Model, Document), ConfigError> {
    from_config(&Document::read(path)?, overrides)
}
