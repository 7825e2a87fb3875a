//! A hardware file as it is written, before any check.
//!
//! Every block carries `kind` and `source` for its numbers, a `note` where sources disagree, and `except` for
//! fields that come from elsewhere:
//!
//! ```yaml
//! matrix_unit:
//!   count: 2
//!   rows: 256
//!   columns: 256
//!   rows_per_cycle: { bf16: 2 }
//!   kind: published
//!   source: the vendor's documentation
//!   except:
//!     rows_per_cycle: { kind: derived, source: published peak over cores x arrays x clock }
//! ```

use std::collections::BTreeMap;

use serde::Deserialize;

use super::chip::{Architecture, Kind, Provenance};
use crate::config::{ConfigError, Document, suggestion};
use crate::dtype::Dtype;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Hertz, Seconds};

/// A whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ChipFile {
    pub(super) title: String,
    pub(super) architecture: Architecture,
    pub(super) cores: CoresFile,
    pub(super) clock: ClockFile,
    pub(super) matrix_unit: MatrixUnitFile,
    pub(super) vector_unit: VectorUnitFile,
    pub(super) latency: LatencyFile,
    pub(super) on_chip: MemoryFile,
    #[serde(default)]
    pub(super) cache: Option<MemoryFile>,
    pub(super) hbm: HbmFile,
    #[serde(default)]
    pub(super) interconnect: Option<InterconnectFile>,
    pub(super) launch: LaunchFile,
    #[serde(default)]
    pub(super) published: Vec<FigureFile>,
    #[serde(default)]
    pub(super) unknown: Vec<String>,
}

/// Source of one field.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SourceFile {
    kind: Kind,
    source: String,
    #[serde(default)]
    note: String,
}

/// Clock states by name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ClockFile {
    pub(super) default: String,
    pub(super) states: BTreeMap<String, ClockStateFile>,
}

/// Slots of the vector unit.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SlotsFile {
    pub(super) alu: f64,
    pub(super) transcendental: f64,
    pub(super) cross_lane: f64,
    pub(super) load: f64,
    pub(super) store: f64,
}

/// A block of numbers with their source. serde's `flatten` would spoil the messages about unknown keys, so
/// the four fields are written into each struct.
macro_rules! block {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty),* $(,)? } $(also $($extra:literal),*)?) => {
        $(#[$doc])*
        #[derive(Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(super) struct $name {
            $(pub(super) $field: $kind,)*
            kind: Kind,
            source: String,
            #[serde(default)]
            note: String,
            #[serde(default)]
            except: BTreeMap<String, SourceFile>,
        }

        impl $name {
            const FIELDS: &[&str] = &[$(stringify!($field),)* $($($extra,)*)?];

            /// Source of the block at `path`; a field set on the command line names the override.
            ///
            /// # Errors
            /// Where `except` names a field that the block does not have, or a source is empty.
            pub(super) fn provenance(
                &self,
                document: &Document,
                path: &str,
            ) -> Result<Provenance, ConfigError> {
                provenance(
                    document,
                    path,
                    Self::FIELDS,
                    (self.kind, &self.source, &self.note),
                    &self.except,
                )
            }
        }
    };
}

block! {
    /// Core counts.
    CoresFile { per_chip: u32, per_device: u32 }
}

block! {
    /// One clock state.
    ClockStateFile { frequency: Hertz }
}

block! {
    /// Matrix units of one core. `asynchronous` left out is what all TPUs are, and GPUs before the H100 are not.
    MatrixUnitFile { count: u32, rows: u32, columns: u32, rows_per_cycle: BTreeMap<Dtype, f64>, asynchronous: Option<bool> }
}

block! {
    /// Vector unit of one core.
    VectorUnitFile { lanes: u32, sublanes: u32, registers: u32, slots: SlotsFile, flops_per_alu_op: f64 }
    also "slots.alu", "slots.transcendental", "slots.cross_lane", "slots.load", "slots.store"
}

block! {
    /// Latencies of the units, in cycles.
    LatencyFile {
        matrix_result_cycles: f64,
        vector_cycles: f64,
        transcendental_cycles: f64,
        cross_lane_cycles: f64,
    }
}

block! {
    /// On-chip memory or a cache.
    MemoryFile { capacity: Bytes }
}

block! {
    /// Device memory.
    HbmFile { capacity: Bytes, bandwidth: BytesPerSecond, achievable: f64 }
}

block! {
    /// Links to other chips.
    InterconnectFile { bidirectional: BytesPerSecond }
}

block! {
    /// Cost of starting a kernel.
    LaunchFile { time: Seconds }
}

block! {
    /// A published figure to compare with.
    FigureFile { quantity: String, value: FlopsPerSecond, clock: String }
}

fn provenance(
    document: &Document,
    path: &str,
    fields: &[&str],
    (kind, source, note): (Kind, &str, &str),
    except: &BTreeMap<String, SourceFile>,
) -> Result<Provenance, ConfigError> {
    if source.trim().is_empty() {
        return Err(document.error_at(
            &format!("{path}.source"),
            "expected where the numbers come from, found nothing",
        ));
    }
    let mut block = Provenance {
        kind,
        source: source.to_owned(),
        note: note.to_owned(),
        except: BTreeMap::new(),
    };
    for (field, entry) in except {
        if !fields.contains(&field.as_str()) {
            let message = format!(
                "unknown field `{field}`; {}",
                suggestion(field, fields, "the block has")
            );
            return Err(document.error_at_key(&format!("{path}.except.{field}"), message));
        }
        let own = Provenance {
            kind: entry.kind,
            source: entry.source.clone(),
            note: entry.note.clone(),
            except: BTreeMap::new(),
        };
        block.except.insert(field.clone(), own);
    }
    let group = |field: &str| {
        let mut others = fields.iter().filter_map(|other| other.strip_prefix(field));
        others.any(|rest| rest.starts_with('.'))
    };
    // The fields of a group answer for themselves.
    for field in fields.iter().filter(|field| !group(field)) {
        // What a person tries out is nobody's published figure, whatever the file says about the rest.
        if let Some(text) = document.overridden(&format!("{path}.{field}")) {
            let own = Provenance {
                kind: Kind::Assumed,
                source: text.to_owned(),
                note: String::new(),
                except: BTreeMap::new(),
            };
            block.except.insert((*field).to_owned(), own);
        }
    }
    Ok(block)
}
