//! What the numeric probes found, as data.

use serde::Serialize;

/// One number of a probe: a mechanism under a condition.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProbeRow {
    /// Probe: `write_once`, `overwrite`, `keys`, `modulus`, `tiles`.
    pub probe: &'static str,
    /// Mechanism.
    pub mechanism: &'static str,
    /// Condition, for instance `64 keys` or `rotated`.
    pub condition: String,
    /// Format the state is rounded to after every token.
    pub state: &'static str,
    /// What is measured: `recall error`, `share right`, `spread`.
    pub measure: &'static str,
    /// The number; a ratio, or nats for `spread`.
    pub value: f64,
}

/// What a probe asks and what is to be expected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProbeText {
    /// Name.
    pub probe: &'static str,
    /// What is done and measured.
    pub question: &'static str,
    /// What theory says, and why.
    pub expected: &'static str,
}

/// All probes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProbeTable {
    /// Seed of keys, values and bits.
    pub seed: u64,
    /// Texts, in order.
    pub texts: Vec<ProbeText>,
    /// Numbers, in order.
    pub rows: Vec<ProbeRow>,
}
