//! The result of a run, as data: what every table, picture and file of a report is drawn from.
//!
//! Serialised as JSON this is schema `tpusim.result/1` (docs/formats.md). Times are microseconds, counts are absolute, rates
//! are per second; every cycle count stands beside its clock.

use serde::{Deserialize, Serialize};

use crate::hardware::{Evidence, Kind};
use crate::study::whatif::PlanSensitivity;

/// Name and version of the JSON schema.
pub const SCHEMA: &str = "tpusim.result/1";

/// What binds a kernel: the resource whose removal would shorten it first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// Matrix unit throughput.
    Mxu,
    /// Vector ALU slots.
    Vpu,
    /// Transcendental slots.
    Transcendental,
    /// Slots that move data between lanes.
    CrossLane,
    /// HBM bandwidth.
    Hbm,
    /// On-chip loads and stores.
    Vmem,
    /// A chain of dependent operations.
    Latency,
    /// Launch and grid-step overhead.
    Launch,
    /// Links between chips.
    Interconnect,
}

impl Bound {
    /// All of them, in order.
    pub const ALL: [Bound; 9] = [
        Bound::Mxu,
        Bound::Vpu,
        Bound::Transcendental,
        Bound::CrossLane,
        Bound::Hbm,
        Bound::Vmem,
        Bound::Latency,
        Bound::Launch,
        Bound::Interconnect,
    ];

    /// The bound of that word.
    #[must_use]
    pub fn named(name: &str) -> Option<Bound> {
        Bound::ALL.into_iter().find(|bound| bound.name() == name)
    }

    /// The fixed word of the outputs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Mxu => "mxu",
            Bound::Vpu => "vpu",
            Bound::Transcendental => "transcendental",
            Bound::CrossLane => "cross-lane",
            Bound::Hbm => "hbm",
            Bound::Vmem => "vmem",
            Bound::Latency => "latency",
            Bound::Launch => "launch",
            Bound::Interconnect => "interconnect",
        }
    }
}

impl StageResult {
    /// The numbers that the time of this stage is as good as: those that set its bound.
    pub fn rests_on<'a>(&self, sources: &'a [NumberSource]) -> impl Iterator<Item = &'a NumberSource> {
        let bound = self.bound;
        sources.iter().filter(move |source| source.sets.contains(&bound))
    }
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// One row of the stage table: one kernel of a plan, which may span several stages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageResult {
    /// Stage or span of stages, for instance `op2-7a`.
    pub stage: String,
    /// What happens in it, in a few words.
    pub title: String,
    /// Predicted time.
    pub time_us: f64,
    /// Lower end of the 80 % interval; absent where nothing comparable was measured.
    pub low_us: Option<f64>,
    /// Upper end of the 80 % interval; absent where nothing comparable was measured.
    pub high_us: Option<f64>,
    /// The measured rows that make the interval.
    pub interval_from: Option<Evidence>,
    /// Family of measured kernels that it counts as one of; rows of one family on one chip are off together. Absent in results of earlier versions.
    pub family: Option<String>,
    /// Factor, above 1, that the ratio of this time to that of another row of the family on the chip is off by at most, in 80 % of such pairs; absent where
    /// nothing comparable was measured.
    pub speedup_error_ratio: Option<f64>,
    /// What binds it.
    pub bound: Bound,
    /// What would bind it next, were the first bound removed.
    pub next_bound: Bound,
    /// Time the matrix units are occupied, padding included.
    pub mxu_us: f64,
    /// Time the busiest vector slot class is occupied, padding included.
    pub vpu_us: f64,
    /// Time the transcendental slots are occupied.
    pub transcendental_us: f64,
    /// Time the cross-lane slots are occupied.
    pub cross_lane_us: f64,
    /// Time the load and store slots of on-chip memory are occupied.
    pub vmem_us: f64,
    /// Time the HBM traffic takes at the achievable bandwidth.
    pub hbm_us: f64,
    /// Time of the longest dependence chain.
    pub latency_us: f64,
    /// Launch and grid-step overhead.
    pub launch_us: f64,
    /// Matrix FLOPs, padding excluded.
    pub flops: u64,
    /// Vector operations, padding excluded.
    pub vector_ops: u64,
    /// Transcendental operations, padding excluded.
    pub transcendentals: u64,
    /// Bytes moved between HBM and the chip, both directions.
    pub hbm_bytes: u64,
    /// Share of `time_us` in which the matrix units are occupied.
    pub mxu_busy: f64,
    /// Share of `time_us` in which the busiest vector slot class is occupied.
    pub vpu_busy: f64,
    /// Share of `time_us` in which HBM is occupied, at the achievable bandwidth.
    pub hbm_busy: f64,
    /// Useful part of the matrix tiles that are occupied: FLOPs done over FLOPs the occupied arrays could do.
    pub mxu_lane: f64,
    /// Matrix FLOP/s reached over the datasheet peak of the operand format.
    pub mxu_achieved: f64,
    /// Tokens (or rows) that are only padding, as a share of those processed.
    pub padding: f64,
    /// VMEM (shared memory) working set of one grid step, in bytes.
    pub vmem_bytes: u64,
    /// Parallel grid steps.
    pub grid_parallel: u64,
    /// Sequential grid steps of each parallel one.
    pub grid_sequential: u64,
    /// Published or measured value for this row, where the workload names one.
    pub published_us: Option<f64>,
}

/// Bytes that cross HBM for one token, by what they are: those of a step over its tokens, so that what all sequences share is divided among them.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct TokenBytes {
    /// Trained weights and parameters.
    pub weights: f64,
    /// Recurrent state, convolution rows among it.
    pub state: f64,
    /// Keys and values, or latents, of earlier tokens.
    pub cache: f64,
    /// Updates that wait beside the state for the next merge.
    pub log: f64,
    /// Everything else: the input and output of the layer and what one kernel hands to the next.
    pub activations: f64,
}

impl TokenBytes {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.weights + self.state + self.cache + self.log + self.activations
    }

    /// The parts with their words, in order.
    #[must_use]
    pub const fn parts(&self) -> [(&'static str, f64); 5] {
        [
            ("weights", self.weights),
            ("state", self.state),
            ("cache", self.cache),
            ("log", self.log),
            ("activations", self.activations),
        ]
    }
}

/// What one token of a decode step takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TokenResult {
    /// Tokens of a step: one of every sequence.
    pub tokens: u64,
    /// Time of the step over its tokens, in microseconds.
    pub time_us: f64,
    /// Bytes read from HBM.
    pub read_bytes: TokenBytes,
    /// Bytes written to HBM.
    pub written_bytes: TokenBytes,
}

/// One fusion plan on one chip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanResult {
    /// `unfused`, `fused` or another plan of the workload.
    pub name: String,
    /// Sum over the rows.
    pub total_us: f64,
    /// Lower end of the 80 % interval; absent where nothing comparable was measured.
    pub low_us: Option<f64>,
    /// Upper end of the 80 % interval; absent where nothing comparable was measured.
    pub high_us: Option<f64>,
    /// Time of the same plan of the baseline over this one.
    pub speedup_over_baseline: Option<f64>,
    /// Time of the same plan of the baseline.
    pub baseline_us: Option<f64>,
    /// Sum of the published rows of this plan, where every row has one.
    pub published_us: Option<f64>,
    /// One token of a decode step; absent in other passes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<TokenResult>,
    /// Rows, in order of execution.
    pub stages: Vec<StageResult>,
}

/// A horizontal or slanted roof of the roofline picture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Roof {
    /// `mxu bf16`, `vpu`, `transcendental`, `VMEM`, ...
    pub name: String,
    /// Operations (on-chip memory: bytes) per second of one device at the clock of the run.
    pub per_second: f64,
}

/// Where one number behind the times of a chip comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumberSource {
    /// What it is, in words: `clock`, `matrix rate`, `achievable HBM bandwidth`, ...
    pub number: String,
    /// How far it can be trusted.
    pub kind: Kind,
    /// The document, file or computation it was taken from.
    pub source: String,
    /// The bounds it sets the time of: a stage so bound is as good as this number.
    pub sets: Vec<Bound>,
}

/// Roofs of one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Roofs {
    /// Datasheet HBM bandwidth of the device, bytes per second.
    pub hbm_datasheet: f64,
    /// Achievable HBM bandwidth of the device, bytes per second.
    pub hbm_achievable: f64,
    /// Bytes per second that the cores of the device load from VMEM or shared memory, at the clock of the run.
    pub on_chip: Roof,
    /// Matrix roofs by operand format (FLOP/s) at the clock of the run, fastest first.
    pub matrix: Vec<Roof>,
    /// Vector ALU roof (operations per second).
    pub vector: Roof,
    /// Transcendental roof (operations per second).
    pub transcendental: Roof,
    /// Share of the rates above, those of HBM apart, that a program reaches when nothing else holds it: what the issue
    /// of instructions and the throttling of the clock leave, in `(0, 1]`.
    pub issue_efficiency: f64,
}

/// All plans on one chip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChipResult {
    /// Name of the hardware file.
    pub name: String,
    /// What a person calls it.
    pub title: String,
    /// Cores of the device that was timed.
    pub cores: u32,
    /// What the device is, for instance `one of the 2 cores of a chip`.
    pub device: String,
    /// Clock of the run.
    pub clock_ghz: f64,
    /// Clock state of the run.
    pub clock_state: String,
    /// Roofs of the device.
    pub roofs: Roofs,
    /// Plans, in the order of the workload.
    pub plans: Vec<PlanResult>,
    /// What the time rests on, for instance `no coefficient fitted; 2 assumed hardware numbers (..)`.
    pub coverage: String,
    /// Where the numbers behind the times come from.
    pub sources: Vec<NumberSource>,
}

/// JSON has no word for infinity; an error of an overflown result is null there.
mod finite_or_null {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(
        clippy::trivially_copy_pass_by_ref,
        reason = "the signature that serde asks for"
    )]
    pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        value.is_finite().then_some(*value).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
    }
}

/// The numeric check.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NumericResult {
    /// Largest error of the core output over its largest value, against the token recurrence in f64. This and the
    /// three after it are infinite, in JSON null, where a value met on the way is not finite.
    #[serde(with = "finite_or_null")]
    pub output_rel_error: f64,
    /// The same for the final state, where the mechanism has one.
    pub state_rel_error: Option<f64>,
    /// RMS error of the core output over its RMS value.
    #[serde(with = "finite_or_null")]
    pub output_rms_error: f64,
    /// RMS error of the final state over its RMS value, where the mechanism has one.
    pub state_rms_error: Option<f64>,
    /// Largest error of core output and final state when the same graph is executed in f64 without rounding: the chunk form
    /// against the recurrence.
    pub exact_rel_error: f64,
    /// Tokens executed.
    pub tokens: u64,
    /// Key heads executed.
    pub heads: u64,
    /// Seed of the inputs.
    pub seed: u64,
    /// Whether this is a declared sample of a larger layer.
    pub sampled: bool,
    /// First node with a value that is not finite, where there is one.
    pub non_finite: Option<String>,
    /// Sentence about the overflow condition of the Gram in use and the margin of this workload.
    pub overflow: String,
    /// Exponent reached by the Gram operands and its limit, in nats, where the Gram has such a limit.
    pub overflow_exponent: Option<f64>,
    /// Limit for `overflow_exponent`: ln of the largest finite f32.
    pub overflow_limit: Option<f64>,
}

/// A value the workload compares with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PublishedComparison {
    /// Where the values come from.
    pub source: String,
    /// Chip they hold for.
    pub chip: String,
    /// `plan`, `row`, published and predicted time and signed error, in percent of the published value.
    pub rows: Vec<PublishedRow>,
}

/// One published value beside its prediction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PublishedRow {
    /// Plan.
    pub plan: String,
    /// Stage or `total`.
    pub stage: String,
    /// Published time.
    pub published_us: f64,
    /// Predicted time.
    pub predicted_us: f64,
    /// `100 (predicted / published - 1)`.
    pub error_percent: f64,
}

/// Where a result comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Version of tpusim.
    pub version: String,
    /// Digest of the hardware descriptions, in the order of the chips.
    pub hardware_digest: String,
    /// Digest of the workload, overrides included.
    pub workload_digest: String,
    /// Digest of the calibration; `none` where no coefficient was fitted.
    pub calibration_digest: String,
    /// Overrides given on the command line.
    pub overrides: Vec<String>,
    /// Things the workload file itself marks as inferred.
    pub inferred: Vec<String>,
}

/// Fields of a hardware file that its times follow from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardwareInputs {
    /// Name of the hardware file.
    pub chip: String,
    /// `field=value`, sorted by field; sources and notes left out.
    pub fields: Vec<String>,
}

/// What the times of a run follow from, field by field, so that two results can be compared without the files they came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// `field=value` of the workload, overrides and values of fields left out among them, sorted by field.
    pub workload: Vec<String>,
    /// The chips, in the order of the run.
    pub hardware: Vec<HardwareInputs>,
    /// `name=value` of the fitted coefficients and of the fitted quantities of the chips of the run, sorted by name.
    pub calibration: Vec<String>,
}

/// The result of `tpusim run`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// [`SCHEMA`].
    pub schema: String,
    /// Name of the workload.
    pub name: String,
    /// The answer in one line.
    pub headline: String,
    /// What the layer is, in one line: mechanism and sizes.
    pub layer: String,
    /// Name of the baseline workload, where there is one.
    pub baseline: Option<String>,
    /// Chips, in the order asked for.
    pub chips: Vec<ChipResult>,
    /// The numeric check, where it was run.
    pub numeric: Option<NumericResult>,
    /// Published values beside predictions.
    pub published: Option<PublishedComparison>,
    /// Warnings, each ending in advice.
    pub warnings: Vec<String>,
    /// Where it comes from.
    pub provenance: Provenance,
    /// What it follows from, field by field; absent in results of earlier versions.
    pub inputs: Option<Inputs>,
    /// How the time of every plan depends on every quantity; empty where neither a report nor JSON is written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sensitivity: Vec<PlanSensitivity>,
}
