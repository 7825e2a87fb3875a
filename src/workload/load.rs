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
    (
        "linear_attention",
        include_str!("../../workloads/linear_attention.yaml"),
    ),
    ("retnet", include_str!("../../workloads/retnet.yaml")),
    ("gla", include_str!("../../workloads/gla.yaml")),
    ("mamba2", include_str!("../../workloads/mamba2.yaml")),
    ("rwkv6", include_str!("../../workloads/rwkv6.yaml")),
    ("rwkv7", include_str!("../../workloads/rwkv7.yaml")),
    ("mesanet", include_str!("../../workloads/mesanet.yaml")),
    (
        "mesanet_ungated",
        include_str!("../../workloads/mesanet_ungated.yaml"),
    ),
    ("spd_sla_w", include_str!("../../workloads/spd_sla_w.yaml")),
    ("sla_r4_chip", include_str!("../../workloads/sla_r4_chip.yaml")),
    ("kda_chip", include_str!("../../workloads/kda_chip.yaml")),
    ("sla_r1", include_str!("../../workloads/sla_r1.yaml")),
    ("sla_r8", include_str!("../../workloads/sla_r8.yaml")),
    ("kda_softplus", include_str!("../../workloads/kda_softplus.yaml")),
    ("gdn_grouped", include_str!("../../workloads/gdn_grouped.yaml")),
    ("deltanet", include_str!("../../workloads/deltanet.yaml")),
    ("deltaproduct", include_str!("../../workloads/deltaproduct.yaml")),
    ("gdn2", include_str!("../../workloads/gdn2.yaml")),
    ("q_delta", include_str!("../../workloads/q_delta.yaml")),
    ("kaczmarz", include_str!("../../workloads/kaczmarz.yaml")),
    ("comba", include_str!("../../workloads/comba.yaml")),
    (
        "preconditioned_delta",
        include_str!("../../workloads/preconditioned_delta.yaml"),
    ),
    ("kda_packed", include_str!("../../workloads/kda_packed.yaml")),
    ("kda_decode", include_str!("../../workloads/kda_decode.yaml")),
    ("gdn_decode", include_str!("../../workloads/gdn_decode.yaml")),
    (
        "sla_r4_decode",
        include_str!("../../workloads/sla_r4_decode.yaml"),
    ),
    ("softmax_gqa", include_str!("../../workloads/softmax_gqa.yaml")),
    (
        "softmax_window",
        include_str!("../../workloads/softmax_window.yaml"),
    ),
    ("mla", include_str!("../../workloads/mla.yaml")),
    (
        "retnet_decode",
        include_str!("../../workloads/retnet_decode.yaml"),
    ),
    ("rwkv6_decode", include_str!("../../workloads/rwkv6_decode.yaml")),
    ("rwkv7_decode", include_str!("../../workloads/rwkv7_decode.yaml")),
    (
        "deltaproduct_decode",
        include_str!("../../workloads/deltaproduct_decode.yaml"),
    ),
    (
        "preconditioned_delta_decode",
        include_str!("../../workloads/preconditioned_delta_decode.yaml"),
    ),
    (
        "mesanet_decode",
        include_str!("../../workloads/mesanet_decode.yaml"),
    ),
    (
        "softmax_gqa_decode",
        include_str!("../../workloads/softmax_gqa_decode.yaml"),
    ),
    ("mla_decode", include_str!("../../workloads/mla_decode.yaml")),
    (
        "linear_attention_decode",
        include_str!("../../workloads/linear_attention_decode.yaml"),
    ),
    (
        "mamba2_decode",
        include_str!("../../workloads/mamba2_decode.yaml"),
    ),
    (
        "deltanet_decode",
        include_str!("../../workloads/deltanet_decode.yaml"),
    ),
    ("gdn2_decode", include_str!("../../workloads/gdn2_decode.yaml")),
    ("gla_decode", include_str!("../../workloads/gla_decode.yaml")),
    ("comba_decode", include_str!("../../workloads/comba_decode.yaml")),
    (
        "kaczmarz_decode",
        include_str!("../../workloads/kaczmarz_decode.yaml"),
    ),
    (
        "q_delta_decode",
        include_str!("../../workloads/q_delta_decode.yaml"),
    ),
    (
        "sla_r1_decode",
        include_str!("../../workloads/sla_r1_decode.yaml"),
    ),
    (
        "sla_r2_decode",
        include_str!("../../workloads/sla_r2_decode.yaml"),
    ),
    (
        "sla_r8_decode",
        include_str!("../../workloads/sla_r8_decode.yaml"),
    ),
    (
        "gdn_grouped_decode",
        include_str!("../../workloads/gdn_grouped_decode.yaml"),
    ),
    (
        "spd_sla_w_decode",
        include_str!("../../workloads/spd_sla_w_decode.yaml"),
    ),
    ("gdn_verify", include_str!("../../workloads/gdn_verify.yaml")),
    ("kda_verify", include_str!("../../workloads/kda_verify.yaml")),
    (
        "sla_r4_verify",
        include_str!("../../workloads/sla_r4_verify.yaml"),
    ),
    ("gdn_deltalog", include_str!("../../workloads/gdn_deltalog.yaml")),
    ("kda_deltalog", include_str!("../../workloads/kda_deltalog.yaml")),
    (
        "rwkv6_deltalog",
        include_str!("../../workloads/rwkv6_deltalog.yaml"),
    ),
    ("gla_deltalog", include_str!("../../workloads/gla_deltalog.yaml")),
    (
        "retnet_deltalog",
        include_str!("../../workloads/retnet_deltalog.yaml"),
    ),
    (
        "linear_attention_deltalog",
        include_str!("../../workloads/linear_attention_deltalog.yaml"),
    ),
];

/// The shipped stacks of layers.
const SHIPPED_STACKS: &[(&str, &str)] = &[
    ("hybrid_0L1A", include_str!("../../workloads/hybrid_0L1A.yaml")),
    ("hybrid_4L1A", include_str!("../../workloads/hybrid_4L1A.yaml")),
    (
        "hybrid_4L1A_kda",
        include_str!("../../workloads/hybrid_4L1A_kda.yaml"),
    ),
    ("hybrid_7L1A", include_str!("../../workloads/hybrid_7L1A.yaml")),
    (
        "hybrid_7L1A_kda",
        include_str!("../../workloads/hybrid_7L1A_kda.yaml"),
    ),
    ("hybrid_15L1A", include_str!("../../workloads/hybrid_15L1A.yaml")),
    (
        "hybrid_15L1A_kda",
        include_str!("../../workloads/hybrid_15L1A_kda.yaml"),
    ),
];

/// The shipped studies, in the folder `studies`.
const SHIPPED_STUDIES: &[(&str, &str)] = &[
    (
        "decay_tiles",
        include_str!("../../workloads/studies/decay_tiles.yaml"),
    ),
    (
        "head_sharing",
        include_str!("../../workloads/studies/head_sharing.yaml"),
    ),
    ("chunk", include_str!("../../workloads/studies/chunk.yaml")),
    (
        "state_format",
        include_str!("../../workloads/studies/state_format.yaml"),
    ),
    (
        "gram_and_inverse",
        include_str!("../../workloads/studies/gram_and_inverse.yaml"),
    ),
    ("fusion", include_str!("../../workloads/studies/fusion.yaml")),
    (
        "matrix_side",
        include_str!("../../workloads/studies/matrix_side.yaml"),
    ),
    (
        "matrix_to_vector",
        include_str!("../../workloads/studies/matrix_to_vector.yaml"),
    ),
    (
        "hbm_bandwidth",
        include_str!("../../workloads/studies/hbm_bandwidth.yaml"),
    ),
    (
        "kda_to_sla",
        include_str!("../../workloads/studies/kda_to_sla.yaml"),
    ),
    ("readout", include_str!("../../workloads/studies/readout.yaml")),
    (
        "tree_size",
        include_str!("../../workloads/studies/tree_size.yaml"),
    ),
];

/// Names of the shipped studies.
#[must_use]
pub fn shipped_studies() -> Vec<&'static str> {
    SHIPPED_STUDIES.iter().map(|(name, _)| *name).collect()
}

/// Names of the shipped stacks.
#[must_use]
pub fn shipped_stacks() -> Vec<&'static str> {
    SHIPPED_STACKS.iter().map(|(name, _)| *name).collect()
}

/// Names of the shipped workloads.
#[must_use]
pub fn shipped() -> Vec<&'static str> {
    SHIPPED.iter().map(|(name, _)| *name).collect()
}

/// Text of a shipped workload, stack or study.
#[must_use]
pub fn shipped_text(name: &str) -> Option<&'static str> {
    SHIPPED
        .iter()
        .chain(SHIPPED_STACKS)
        .chain(SHIPPED_STUDIES)
        .find(|(candidate, _)| *candidate == name)
        .map(|(_, text)| *text)
}

pub(super) fn read(name_or_path: &str) -> Result<Document, ConfigError> {
    if is_path(name_or_path) {
        // A shipped name written as the path it has in the project works from any folder, unless a file is there.
        let stem = Path::new(name_or_path)
            .strip_prefix("workloads")
            .ok()
            .and_then(|p| p.to_str())
            .map(|name| name.strip_prefix("studies/").unwrap_or(name));
        if let (false, Some(text)) = (
            Path::new(name_or_path).exists(),
            stem.and_then(|s| s.strip_suffix(".yaml")).and_then(shipped_text),
        ) {
            return Document::parse(name_or_path, text);
        }
        return Document::read(name_or_path);
    }
    if let Some(text) = shipped_text(name_or_path) {
        let folder = if shipped_studies().contains(&name_or_path) {
            "workloads/studies"
        } else {
            "workloads"
        };
        Document::parse(&format!("{folder}/{name_or_path}.yaml"), text)
    } else {
        let names = [shipped(), shipped_stacks(), shipped_studies()].concat();
        let tail = suggestion(name_or_path, &names, "shipped");
        let message = format!("unknown workload `{name_or_path}`; {tail}; a path to a file ends in `.yaml`");
        Err(ConfigError::argument(message))
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

/// The file called `name_or_path`, of a workload or of a stack, without any check of its values.
///
/// # Errors
/// For an unknown name and an unreadable file.
pub fn read_document(name_or_path: &str) -> Result<Document, ConfigError> {
    read(name_or_path)
}

/// The workload that a document describes.
///
/// # Errors
/// For every value that does not fit.
pub fn from_document(document: &Document) -> Result<Workload, ConfigError> {
    resolve(document)
}

/// As [`from_document`], without the list of the fields that the document leaves out.
///
/// # Errors
/// As [`from_document`].
pub(crate) fn without_defaults(document: &Document) -> Result<Workload, ConfigError> {
    file::resolve_with(document, None)
}

/// The baseline of a workload that was loaded from `of`: a path relative to that file, or a shipped name.
///
/// # Errors
/// As [`load`]; a baseline that cannot be found points at the key that names it.
pub fn load_baseline(name: &str, of: &str, document: &Document) -> Result<(Workload, Document), ConfigError> {
    let Some(target) = beside(name, of) else {
        let message = if is_path(name) {
            format!("cannot find the baseline `{name}`; expected a file beside this one or a shipped name")
        } else {
            format!(
                "unknown workload `{name}`; {}",
                suggestion(name, &shipped(), "shipped")
            )
        };
        return Err(document.error_at("baseline", message));
    };
    let document = read(&target)?;
    Ok((file::resolve(&document)?, document))
}

/// What `name` means in the file `of`: a path relative to that file, a path, or a shipped name; `None` for a path to nothing.
///
/// The shipped file of that name stands in where the folder has none: a copied workload keeps its baseline.
#[must_use]
pub fn beside(name: &str, of: &str) -> Option<String> {
    let beside: Option<PathBuf> = is_path(of)
        .then(|| Path::new(of).parent().map(|p| p.join(name)))
        .flatten();
    match beside {
        Some(path) if path.exists() => Some(path.to_string_lossy().into_owned()),
        _ if is_path(name) && !Path::new(name).exists() => {
            let stem = Path::new(name)
                .file_stem()
                .and_then(|s| s.to_str())
                .unwrap_or(name);
            shipped_text(stem).is_some().then(|| stem.to_owned())
        }
        _ if !is_path(name) && shipped_text(name).is_none() => None,
        _ => Some(name.to_owned()),
    }
}
