//! Finding a workload: by the name of a shipped file, or by a path.

use std::path::{Path, PathBuf};

use super::file::resolve;
use super::{Workload, file};
use crate::config::{ConfigError, Document, suggestion};
use crate::hardware::is_path;

/// The shipped files.
const SHIPPED: &[(&str, &str)] = &[
    ("sla_r4", include_str!("../../workloads/sla_r4.yaml")),
    ("sla_r2", include_str!("../../workloads/sla_r2.yaml")),
    ("kda", include_str!("../../workloads/kda.yaml")),
    ("gdn", include_str!("../../workloads/gdn.yaml")),
    ("sla_r4_chip", include_str!("../../workloads/sla_r4_chip.yaml")),
    ("kda_chip", include_str!("../../workloads/kda_chip.yaml")),
];

/// Names of the shipped workloads.
#[must_use]
pub fn shipped() -> Vec<&'static str> {
    SHIPPED.iter().map(|(name, _)| *name).collect()
}

/// Text of a shipped workload.
#[must_use]
pub fn shipped_text(name: &str) -> Option<&'static str> {
    SHIPPED
        .iter()
        .find(|(candidate, _)| *candidate == name)
        .map(|(_, text)| *text)
}

fn read(name_or_path: &str) -> Result<Document, ConfigError> {
    if is_path(name_or_path) {
        // A shipped name written as the path it has in the project works from any folder, unless a file is there.
        let stem = Path::new(name_or_path)
            .strip_prefix("workloads")
            .ok()
            .and_then(|p| p.to_str());
        if let (false, Some(text)) = (
            Path::new(name_or_path).exists(),
            stem.and_then(|s| s.strip_suffix(".yaml")).and_then(shipped_text),
        ) {
            return Document::parse(name_or_path, text);
        }
        return Document::read(name_or_path);
    }
    match shipped_text(name_or_path) {
        Some(text) => Document::parse(&format!("workloads/{name_or_path}.yaml"), text),
        None => {
            let tail = suggestion(name_or_path, &shipped(), "shipped");
            let message =
                format!("unknown workload `{name_or_path}`; {tail}; a path to a file ends in `.yaml`");
            Err(ConfigError::argument(message))
        }
    }
}

/// The workload called `name_or_path` after changing fields (`layer.chunk=128`).
///
/// # Errors
/// For an unknown name, an unreadable file, an override that leads nowhere, and every value that does not fit.
pub fn load<S: AsRef<str>>(name_or_path: &str, overrides: &[S]) -> Result<(Workload, Document), ConfigError> {
    let mut document = read(name_or_path)?;
    for assignment in overrides {
        document.set(assignment.as_ref())?;
    }
    let workload = resolve(&document)?;
    Ok((workload, document))
}

/// The baseline of a workload that was loaded from `of`: a path relative to that file, or a shipped name.
///
/// # Errors
/// As [`load`]; a baseline that cannot be found points at the key that names it.
pub fn load_baseline(name: &str, of: &str, document: &Document) -> Result<(Workload, Document), ConfigError> {
    let beside: Option<PathBuf> = is_path(of)
        .then(|| Path::new(of).parent().map(|p| p.join(name)))
        .flatten();
    let target = match beside {
        Some(path) if path.exists() => path.to_string_lossy().into_owned(),
        // The shipped file of that name stands in where the folder has none: a copied workload keeps its baseline.
        _ if is_path(name) && !Path::new(name).exists() => {
            let stem = Path::new(name)
                .file_stem()
                .and_then(|s| s.to_str())
                .unwrap_or(name);
            if shipped_text(stem).is_none() {
                let message = format!(
                    "cannot find the baseline `{name}`; expected a file beside this one or a shipped name"
                );
                return Err(document.error_at("baseline", message));
            }
            stem.to_owned()
        }
        _ if !is_path(name) && shipped_text(name).is_none() => {
            let tail = suggestion(name, &shipped(), "shipped");
            return Err(document.error_at("baseline", format!("unknown workload `{name}`; {tail}")));
        }
        _ => name.to_owned(),
    };
    let document = read(&target)?;
    Ok((file::resolve(&document)?, document))
}
