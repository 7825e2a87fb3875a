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

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde_json::Value;

use super::chip::{Architecture, Kind, Provenance};
use crate::config::{ConfigError, Document, suggestion};
use crate::dtype::Dtype;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Hertz, Seconds};

/// Largest count of matrix arrays in a core: a schedule has a lane for each.
pub(super) const LARGEST_ARRAY_COUNT: u32 = 64;

/// An accelerator for tpusim. Quantities are written with their unit (819 GB/s, 16 GiB, 1.05 GHz); every block says where its numbers come from.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ChipFile {
    /// What a person calls the chip.
    pub(super) title: String,
    /// Long instruction words and systolic arrays, or many threads and tensor cores.
    pub(super) architecture: Architecture,
    /// Core counts.
    pub(super) cores: CoresFile,
    /// Clock states.
    pub(super) clock: ClockFile,
    /// Matrix units of one core.
    pub(super) matrix_unit: MatrixUnitFile,
    /// Vector unit of one core.
    pub(super) vector_unit: VectorUnitFile,
    /// Latencies of the units, in cycles.
    pub(super) latency: LatencyFile,
    /// Memory of one core that kernels manage themselves: VMEM, shared memory.
    pub(super) on_chip: OnChipFile,
    #[serde(default)]
    /// Last-level cache of the chip.
    pub(super) cache: Option<MemoryFile>,
    /// Device memory of the whole chip.
    pub(super) hbm: HbmFile,
    #[serde(default)]
    /// Links to other chips.
    pub(super) interconnect: Option<InterconnectFile>,
    /// Cost of starting a kernel.
    pub(super) launch: LaunchFile,
    #[serde(default)]
    /// Peaks of the whole chip that somebody printed, for `tpusim hw check`.
    pub(super) published: Vec<FigureFile>,
    #[serde(default)]
    /// What nobody has published.
    pub(super) unknown: Vec<String>,
}

/// Source of one field.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SourceFile {
    /// How far the number can be trusted.
    kind: Kind,
    /// Where it comes from.
    source: String,
    #[serde(default)]
    /// Sources that disagree, and why this one was taken.
    note: String,
}

/// Clock states by name.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ClockFile {
    /// State used unless another is asked for.
    pub(super) default: String,
    /// Clock states by name.
    #[schemars(extend("minProperties" = 1))]
    pub(super) states: BTreeMap<String, ClockStateFile>,
}

/// Slots of the vector unit.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SlotsFile {
    /// Arithmetic.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub(super) alu: f64,
    /// Exponentials, logarithms, roots, reciprocals.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub(super) transcendental: f64,
    /// Moves between lanes.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub(super) cross_lane: f64,
    /// Loads.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub(super) load: f64,
    /// Stores.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub(super) store: f64,
}

/// A block of numbers with their source. serde's `flatten` would spoil the messages about unknown keys, so
/// the four fields are written into each struct.
macro_rules! block {
    ($(#[$doc:meta])* $name:ident { $($(#[$of_field:meta])* $field:ident: $kind:ty),* $(,)? } $(also $($extra:literal),*)?) => {
        $(#[$doc])*
        #[derive(Debug, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        #[schemars(transform = $name::exceptions)]
        pub(super) struct $name {
            $($(#[$of_field])* pub(super) $field: $kind,)*
            /// How far the numbers of the block can be trusted.
            kind: Kind,
            /// Where they come from.
            #[schemars(regex(pattern = r"\S"))]
            source: String,
            /// Sources that disagree, and why this one was taken.
            #[serde(default)]
            note: String,
            /// Fields of the block that come from elsewhere.
            #[serde(default)]
            except: BTreeMap<String, SourceFile>,
        }

        impl $name {
            const FIELDS: &[&str] = &[$(stringify!($field),)* $($($extra,)*)?];

            /// Only fields of the block can come from elsewhere.
            fn exceptions(schema: &mut Schema) {
                if let Some(except) = schema.pointer_mut("/properties/except").and_then(Value::as_object_mut) {
                    except.insert("propertyNames".to_owned(), serde_json::json!({ "enum": Self::FIELDS }));
                }
            }

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
    CoresFile {
        /// Cores of a chip.
        #[schemars(range(min = 1))]
        per_chip: u32,
        /// Cores of one device as JAX or CUDA shows it; memory bandwidth is shared out accordingly.
        #[schemars(range(min = 1))]
        per_device: u32,
    }
}

block! {
    /// One clock state.
    ClockStateFile {
        /// Clock.
        frequency: Hertz,
    }
}

block! {
    /// Matrix units of one core.
    MatrixUnitFile {
        /// Arrays of a core.
        #[schemars(range(min = 1, max = LARGEST_ARRAY_COUNT))]
        count: u32,
        /// Contraction depth of one pass.
        #[schemars(range(min = 1))]
        rows: u32,
        /// Outputs of one pass.
        #[schemars(range(min = 1))]
        columns: u32,
        /// Rows streamed through an array per cycle, by number format; one that is missing has no native rate.
        #[schemars(schema_with = "rates")]
        rows_per_cycle: BTreeMap<Dtype, f64>,
        /// Whether an array works on while the warps that gave it a product go on. Left out: as all TPUs do, and as GPUs before the H100 do not.
        asynchronous: Option<bool>,
    }
}

block! {
    /// Vector unit of one core.
    VectorUnitFile {
        /// Lanes of a register.
        #[schemars(range(min = 1))]
        lanes: u32,
        /// Sublanes of a register.
        #[schemars(range(min = 1))]
        sublanes: u32,
        /// Registers of lanes x sublanes 32-bit words.
        #[schemars(range(min = 1))]
        registers: u32,
        /// Operations started per cycle, each on one whole register.
        slots: SlotsFile,
        /// FLOPs of an ALU operation: 2 where the datasheet counts a fused multiply-add twice.
        #[schemars(extend("exclusiveMinimum" = 0))]
        flops_per_alu_op: f64,
    }
    also "slots.alu", "slots.transcendental", "slots.cross_lane", "slots.load", "slots.store"
}

block! {
    /// Cycles from the issue of an operation to its result, with nothing else in flight.
    LatencyFile {
        /// A matrix product of at most one tile, from registers to registers.
        #[schemars(extend("exclusiveMinimum" = 0))]
        matrix_result_cycles: f64,
        /// A vector operation.
        #[schemars(extend("exclusiveMinimum" = 0))]
        vector_cycles: f64,
        /// A transcendental operation.
        #[schemars(extend("exclusiveMinimum" = 0))]
        transcendental_cycles: f64,
        /// An operation that moves data between lanes.
        #[schemars(extend("exclusiveMinimum" = 0))]
        cross_lane_cycles: f64,
    }
}

block! {
    /// Memory of one core that kernels manage themselves.
    OnChipFile {
        /// Capacity.
        capacity: Bytes,
        /// What the compiler gives one kernel that does not ask for more; left out where nobody has published it.
        scoped_limit: Option<Bytes>,
    }
}

block! {
    /// A cache.
    MemoryFile {
        /// Capacity.
        capacity: Bytes,
    }
}

block! {
    /// Device memory of the whole chip.
    HbmFile {
        /// Capacity.
        capacity: Bytes,
        /// Bandwidth of the datasheet.
        bandwidth: BytesPerSecond,
        /// Share of the bandwidth that a long stream reaches, above 0 and at most 1.
        #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1))]
        achievable: f64,
    }
}

block! {
    /// Links to other chips.
    InterconnectFile {
        /// Sum over the links, both directions.
        bidirectional: BytesPerSecond,
    }
}

block! {
    /// Cost of starting a kernel.
    LaunchFile {
        /// From the start of a kernel to its first instruction and back.
        time: Seconds,
    }
}

block! {
    /// A published figure to compare with.
    FigureFile {
        /// `matrix.` and a number format, or `vector.f32`.
        #[schemars(schema_with = "quantities")]
        quantity: String,
        /// Peak of the whole chip.
        value: FlopsPerSecond,
        /// Clock state it holds for.
        clock: String,
    }
}

fn rates(_: &mut SchemaGenerator) -> Schema {
    let rate = |dtype: Dtype| {
        let rate = serde_json::json!({ "type": "number", "exclusiveMinimum": 0 });
        (dtype.name().to_owned(), rate)
    };
    let rates: serde_json::Map<String, Value> = Dtype::ALL.into_iter().map(rate).collect();
    json_schema!({ "type": "object", "minProperties": 1, "properties": rates, "additionalProperties": false })
}

/// Schema of the quantities that [`super::resolve`] knows.
fn quantities(_: &mut SchemaGenerator) -> Schema {
    let matrix = Dtype::ALL.map(|dtype| format!("matrix.{dtype}"));
    let all: Vec<String> = matrix.into_iter().chain(["vector.f32".to_owned()]).collect();
    json_schema!({ "enum": all })
}

/// JSON schema of a hardware file, from the structs that read it.
pub(super) fn schema(generator: SchemaGenerator) -> Schema {
    generator.into_root_schema_for::<ChipFile>()
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
