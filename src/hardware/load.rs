//! Finding a chip: by the name of a shipped file, or by a path.

use std::path::Path;

use super::chip::Chip;
use super::resolve::resolve;
use crate::config::{ConfigError, Document, suggestion};

/// The shipped files, in the order they are listed to people.
const SHIPPED: &[(&str, &str)] = &[
    ("tpu-v4", include_str!("../../hw/tpu-v4.yaml")),
    ("tpu-v5e", include_str!("../../hw/tpu-v5e.yaml")),
    ("tpu-v5p", include_str!("../../hw/tpu-v5p.yaml")),
    ("tpu-v6e", include_str!("../../hw/tpu-v6e.yaml")),
    ("tpu-v7x", include_str!("../../hw/tpu-v7x.yaml")),
    ("tpu-8i", include_str!("../../hw/tpu-8i.yaml")),
    ("tpu-8t", include_str!("../../hw/tpu-8t.yaml")),
    ("a100-sxm", include_str!("../../hw/a100-sxm.yaml")),
    ("h100-sxm", include_str!("../../hw/h100-sxm.yaml")),
    ("h200-sxm", include_str!("../../hw/h200-sxm.yaml")),
    ("h200-nvl", include_str!("../../hw/h200-nvl.yaml")),
    ("b200", include_str!("../../hw/b200.yaml")),
    ("rtx-4090", include_str!("../../hw/rtx-4090.yaml")),
];

/// A commented file to start from; it loads as it is.
pub const TEMPLATE: &str = include_str!("template.yaml");

/// Names of the shipped chips.
#[must_use]
pub fn shipped() -> Vec<&'static str> {
    SHIPPED.iter().map(|(name, _)| *name).collect()
}

/// Whether an argument names a file rather than something shipped: it has a `/` or ends in `.yaml` or `.yml`.
#[must_use]
pub fn is_path(argument: &str) -> bool {
    let extension = Path::new(argument)
        .extension()
        .and_then(|extension| extension.to_str());
    argument.contains(['/', '\\']) || matches!(extension, Some("yaml" | "yml"))
}

/// Name of the chip that a shipped name or a path leads to: the file without folder and extension.
#[must_use]
pub fn name_of(name_or_path: &str) -> &str {
    // `tpu-v5e` has no extension, but a name such as `b200.5` would lose its end.
    if !is_path(name_or_path) {
        return name_or_path;
    }
    let stem = Path::new(name_or_path).file_stem();
    stem.and_then(|stem| stem.to_str()).unwrap_or(name_or_path)
}

/// Parses a shipped file or a file by path, without checking its values.
///
/// # Errors
/// For a name that is not shipped, with the nearest one and all of them; for a file that cannot be read or
/// is not YAML.
pub fn read(name_or_path: &str) -> Result<Document, ConfigError> {
    if is_path(name_or_path) {
        return Document::read(name_or_path);
    }
    if let Some((name, text)) = SHIPPED.iter().find(|(name, _)| *name == name_or_path) {
        return Document::parse(&format!("hw/{name}.yaml"), text);
    }
    let tail = suggestion(name_or_path, &shipped(), "shipped");
    let message = format!("unknown hardware `{name_or_path}`; {tail}; a path to a file ends in `.yaml`");
    Err(ConfigError::argument(message))
}

/// The chip called `name_or_path` with the shipped calibration, and its file for messages and digests.
///
/// # Errors
/// As [`read`], and for every value of the file that does not fit.
pub fn load(name_or_path: &str) -> Result<(Chip, Document), ConfigError> {
    load_with::<&str>(name_or_path, &[])
}

/// As [`load`], without the fitted values of the shipped calibration: what the file alone says.
///
/// # Errors
/// As [`load`].
pub fn load_uncalibrated(name_or_path: &str) -> Result<Chip, ConfigError> {
    resolve(name_of(name_or_path), &read(name_or_path)?)
}

/// As [`load`], after changing fields: `hbm.bandwidth=1 TB/s`, also written `hw.hbm.bandwidth=1 TB/s`.
///
/// # Errors
/// As [`load`], and for an override that is malformed or names a field that does not exist.
pub fn load_with<S: AsRef<str>>(
    name_or_path: &str,
    overrides: &[S],
) -> Result<(Chip, Document), ConfigError> {
    let mut document = read(name_or_path)?;
    for text in overrides {
        let text = text.as_ref();
        let assignment = text.strip_prefix("hw.").unwrap_or(text);
        document.set_as(assignment, &format!("--set {text}"))?;
    }
    let chip = from_document(name_or_path, &document)?;
    Ok((chip, document))
}

/// The chip that a document describes, with the calibration in use; `name_or_path` is what the document was read from. Fitted values give way to
/// those that an override of the document sets.
///
/// # Errors
/// As [`load_with`].
pub fn from_document(name_or_path: &str, document: &Document) -> Result<Chip, ConfigError> {
    let (name, calibration) = (name_of(name_or_path), super::shipped_calibration());
    let digest = || Document::parse(document.name(), document.text()).map(|file| file.digest());
    let holds = calibration
        .holds_for(name, is_path(name_or_path), || digest().unwrap_or_default())
        .map_err(|problem| document.error_at("", problem))?;
    let mut chip = resolve(name, document)?;
    let set = |field: &str| document.overrides().iter().any(|text| text.starts_with(field));
    calibration.apply(&mut chip, holds, set);
    Ok(chip)
}

/// Whether a document has the keys of a hardware file, each with a value of the right kind; what the values mean is not looked at.
///
/// # Errors
/// At the first key or value that does not fit.
pub fn check_schema(document: &Document) -> Result<(), ConfigError> {
    document.deserialize::<super::file::ChipFile>().map(drop)
}
