//! Workloads: which layer runs, how it is fused, on which chips, and what it is compared with.

mod file;
mod load;
mod stack;
#[cfg(test)]
mod tests;

pub use file::check_schema;
pub(crate) use file::{MixerExtents, Size, chip_names, mixer, mixer_schema};
pub(crate) use load::without_defaults;
pub use load::{
    beside, from_document, load, load_baseline, read_document, shipped, shipped_stacks, shipped_studies,
    shipped_text,
};
pub use stack::{Stack, StackLayer, load_stack};

use crate::kernels::Plan;
use crate::layer::{Layer, Pass};

/// The part of the layer that the numeric check executes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numeric {
    /// Tokens of one sequence; of the first sequences together where they are packed; steps of a decode.
    pub tokens: usize,
    /// Key heads.
    pub key_heads: usize,
    /// Seed of all inputs.
    pub seed: u64,
}

/// A published time of one row of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedRow {
    /// Plan.
    pub plan: String,
    /// Row, for instance `op2-7a`.
    pub stage: String,
    /// Time, in microseconds.
    pub time_us: f64,
}

/// Published times to compare with.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// Where they are printed.
    pub source: String,
    /// Chip they hold for.
    pub chip: String,
    /// Rows.
    pub rows: Vec<PublishedRow>,
}

/// A field that a file leaves out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefaultValue {
    /// Dotted path of the field.
    pub field: String,
    /// The value taken.
    pub value: String,
}

impl std::fmt::Display for DefaultValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} (default)", self.field, self.value)
    }
}

/// A checked workload.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Name of the report folder.
    pub name: String,
    /// The layer.
    pub layer: Layer,
    /// Fusion plans.
    pub plans: Vec<Plan>,
    /// Chips, by name or path.
    pub hardware: Vec<String>,
    /// Workload to compare with, by name or path relative to this file.
    pub baseline: Option<String>,
    /// The numeric check.
    pub numeric: Numeric,
    /// Published times.
    pub published: Option<Published>,
    /// What the file itself marks as inferred.
    pub inferred: Vec<String>,
    /// Fields the file leaves out, with the value taken.
    pub defaults: Vec<DefaultValue>,
}

impl Workload {
    /// The layer of the numeric check: fewer tokens and heads, everything else as it is. The sharing of key heads stays.
    #[must_use]
    pub fn numeric_layer(&self) -> Layer {
        let sharing = self.layer.sharing();
        let mut left = self.numeric.tokens;
        let mut sequences = self.layer.sequences.clone();
        sequences.retain_mut(|length| {
            *length = (*length).min(left);
            left -= *length;
            *length > 0
        });
        let tokens = match self.layer.pass {
            Pass::Forward => self.numeric.tokens,
            Pass::Decode => 1,
            // Who skips a token of a tree skips all that follow it.
            Pass::Verify => self.layer.tokens,
        };
        Layer {
            batch: 1,
            tokens,
            sequences,
            padded_rows: None,
            key_heads: self.numeric.key_heads,
            value_heads: self.numeric.key_heads * sharing,
            ..self.layer.clone()
        }
    }
}

/// JSON schema of workload files, from the structs that read them.
#[must_use]
pub fn schema(generator: schemars::SchemaGenerator) -> schemars::Schema {
    file::schema(generator)
}

/// JSON schema of stacks, from the structs that read them.
#[must_use]
pub fn stack_schema(generator: schemars::SchemaGenerator) -> schemars::Schema {
    stack::schema(generator)
}
