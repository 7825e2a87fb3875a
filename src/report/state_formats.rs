//! Data of `tpusim state-formats`, described in `docs/formats.md`.

use serde::Serialize;

use super::result::Bound;

/// Version of the data.
pub const SCHEMA: &str = "tpusim.state-formats/1";

/// Formats of the stored state of a decode step side by side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StateFormatTable {
    /// [`SCHEMA`].
    pub schema: String,
    /// The layer in one line.
    pub layer: String,
    /// Fusion plan of the times.
    pub plan: String,
    /// Tokens decoded one after the other, from an empty state.
    pub tokens: u64,
    /// Key heads executed.
    pub heads: u64,
    /// Seed of weights and tokens.
    pub seed: u64,
    /// Last tokens of the spans over which errors are taken; a span begins behind the one before.
    pub spans: Vec<u64>,
    /// One row per format or mix of two.
    pub rows: Vec<FormatRow>,
    /// One row per head, that with the shortest memory first.
    pub head_errors: Vec<HeadRow>,
    /// RMS error of the output over all tokens where the state is f32 and the activations have the format of the workload: what rounding everything else costs.
    pub activation_error: f64,
    /// What the reader should know.
    pub notes: Vec<String>,
}

/// A format of the stored state, or two of them by head.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FormatRow {
    /// Format of the half of the heads with the longer memory.
    pub long_memory: &'static str,
    /// Format of the other half.
    pub short_memory: &'static str,
    /// Stored state of a layer and sequence, in bytes.
    pub state_bytes: u64,
    /// State that crosses HBM for a token, both ways, convolution rows among it, in bytes; of a TPU.
    pub token_state_bytes: f64,
    /// RMS error of the core output over its RMS value, against the token recurrence in f64, in every span.
    pub errors: Vec<f64>,
    /// Time of a step on each chip.
    pub times: Vec<FormatTime>,
}

/// Time of a step of the whole layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FormatTime {
    /// Chip.
    pub chip: String,
    /// Time, in microseconds.
    pub step_us: f64,
    /// Lower end of the 80 % interval, in microseconds; absent where nothing comparable was measured.
    pub low_us: Option<f64>,
    /// Upper end of the 80 % interval, in microseconds; absent where nothing comparable was measured.
    pub high_us: Option<f64>,
    /// What binds the longest launch.
    pub bound: Bound,
}

/// Errors of one head in the last span.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HeadRow {
    /// Key head.
    pub head: u64,
    /// Tokens until the state has decayed by a factor of e: median over the channels of one over the mean decay.
    pub memory_tokens: f64,
    /// RMS error over RMS value with the state of all heads in f32.
    pub f32: f64,
    /// The same in bf16.
    pub bf16: f64,
    /// The same in FP8 with a scale per row.
    pub row_fp8: f64,
}
