//! What a log of updates costs and gains: by step, by interval, by number of states, with split replay.

use serde::Serialize;

use super::kernels::{Part, Replay, Step, Traffic, kernels, steps, with_interval, written};
use crate::config::{ConfigError, Document};
use crate::graph::BuildError;
use crate::hardware::{self, Chip};
use crate::kernels::Kernel;
use crate::layer::{DeltaLog, Layer, Merge};
use crate::report::result::Bound;
use crate::study::run::{self, Chips, check_formats};
use crate::timing::time_kernel;
use crate::workload::Workload;

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct DeltaLogRequest<'a> {
    /// A workload whose layer decodes with a log, and its file.
    pub workload: &'a (Workload, Document),
    /// Chips, in the order of the tables.
    pub chips: &'a Chips,
    /// Intervals of the sweep, in tokens.
    pub intervals: &'a [usize],
    /// Numbers of sequences of the sweep.
    pub batches: &'a [usize],
    /// Programs per state of split replay.
    pub splits: &'a [u64],
}

/// Why there are no tables.
#[derive(Debug, thiserror::Error)]
pub enum DeltaLogError {
    /// The workload, or a format the chip lacks.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A graph that does not type-check: a fault of the mechanism.
    #[error("cannot build the graph: {0}")]
    Build(#[from] BuildError),
}

/// The tables of one workload. Times are of the core of a layer, gates to output; all sequences stand at the same place of the interval.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeltaLogTables {
    /// `tpusim.decode/1`.
    pub schema: &'static str,
    /// Name of the workload.
    pub name: String,
    /// The layer in one line.
    pub layer: String,
    /// Mechanism.
    pub mechanism: String,
    /// Sequences of the tables by step.
    pub batch: usize,
    /// States of a sequence: value heads, or packed key heads.
    pub states_per_sequence: usize,
    /// Bytes of one stored state.
    pub state_bytes: u64,
    /// The log of the workload.
    pub log: DeltaLog,
    /// One entry for each chip.
    pub chips: Vec<ChipTables>,
}

/// The tables of a chip.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChipTables {
    /// Chip.
    pub chip: String,
    /// Cores of the device.
    pub cores: u32,
    /// The eager step.
    pub eager: AppendTime,
    /// Steps that append, by entries before them.
    pub appends: Vec<AppendTime>,
    /// Steps that write the base with their own update in it, by entries before them.
    pub append_merges: Vec<AppendTime>,
    /// Merges in a launch of their own, by entries.
    pub merges: Vec<AppendTime>,
    /// An average step of the workload's log against the eager one.
    pub amortised: Amortised,
    /// Average steps by sequences and interval.
    pub intervals: Vec<IntervalTime>,
    /// Average steps with the log replayed in one kernel and in two, by interval.
    pub splits: Vec<SplitTime>,
}

/// One kind of step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AppendTime {
    /// Entries in the log before the step.
    pub length: usize,
    /// Microseconds.
    pub time_us: f64,
    /// What binds most of it.
    pub bound: Bound,
    /// Bytes in device memory.
    pub traffic: StepTraffic,
}

/// Bytes of a step with their sums.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepTraffic {
    /// Read.
    pub read: Part,
    /// Written.
    pub written: Part,
}

impl From<Traffic> for StepTraffic {
    fn from(traffic: Traffic) -> Self {
        StepTraffic {
            read: traffic.read,
            written: traffic.written,
        }
    }
}

impl StepTraffic {
    /// Both directions, in bytes.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.read.total() + self.written.total()
    }
}

/// An average step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Amortised {
    /// Microseconds.
    pub time_us: f64,
    /// Lower end of the 80 % interval, where residuals of comparable kernels exist.
    pub low_us: Option<f64>,
    /// Upper end.
    pub high_us: Option<f64>,
    /// Eager over average time.
    pub speedup: f64,
    /// Bytes.
    pub traffic: StepTraffic,
    /// Eager over average bytes of base and log, both directions: what bytes allow.
    pub state_traffic_gain: f64,
    /// The same of what is written.
    pub state_write_gain: f64,
    /// Eager over average bytes, operands and output included.
    pub traffic_gain: f64,
}

/// A point of the sweep.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IntervalTime {
    /// Sequences.
    pub batch: usize,
    /// States of all sequences.
    pub states: usize,
    /// Bytes of all states.
    pub state_bytes: u64,
    /// Tokens from merge to merge.
    pub interval: usize,
    /// Time of the eager step, in microseconds.
    pub eager_us: f64,
    /// Time of an average step, in microseconds.
    pub time_us: f64,
    /// Eager over average time.
    pub speedup: f64,
    /// Whether no other interval of the sweep is faster at this number of sequences.
    pub best: bool,
}

/// A log replayed in one kernel and in two.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SplitTime {
    /// Sequences.
    pub batch: usize,
    /// Tokens from merge to merge.
    pub interval: usize,
    /// Programs per state of the second kernel.
    pub programs: u64,
    /// Time of an average step in one kernel, in microseconds.
    pub whole_us: f64,
    /// Time of an average step in two, in microseconds.
    pub split_us: f64,
}

/// A layer and its log on a chip.
#[derive(Clone, Copy)]
struct Timed<'a> {
    layer: &'a Layer,
    log: DeltaLog,
    chip: &'a Chip,
}

impl Timed<'_> {
    fn kernels(&self, step: Step, replay: Replay) -> Result<Vec<Kernel>, BuildError> {
        kernels(self.layer, self.log, step, replay, self.chip.architecture)
    }

    fn time_us(&self, step: Step, replay: Replay) -> Result<f64, BuildError> {
        let kernels = self.kernels(step, replay)?;
        Ok(kernels.iter().map(|k| time_kernel(k, self.chip).total_us).sum())
    }

    fn traffic(&self, step: Step, kernels: &[Kernel]) -> Result<Traffic, BuildError> {
        Ok(Traffic::of(kernels, written(self.layer, self.log, step)?))
    }

    fn step(&self, step: Step, length: usize) -> Result<AppendTime, BuildError> {
        let kernels = self.kernels(step, Replay::Whole)?;
        let times: Vec<_> = kernels.iter().map(|k| time_kernel(k, self.chip)).collect();
        let longest = times.iter().max_by(|a, b| a.total_us.total_cmp(&b.total_us));
        Ok(AppendTime {
            length,
            time_us: times.iter().map(|time| time.total_us).sum(),
            bound: longest.map_or(Bound::Launch, |time| time.bound),
            traffic: self.traffic(step, &kernels)?.into(),
        })
    }

    /// Average of the steps of an interval.
    fn average_us(&self, replay: Replay) -> Result<f64, BuildError> {
        let mut sum = 0.0;
        for step in steps(self.log) {
            sum += self.time_us(step, replay)?;
        }
        Ok(sum / self.log.interval.max(1) as f64)
    }

    fn amortised(&self, eager: &AppendTime) -> Result<Amortised, BuildError> {
        let calibration = hardware::shipped_calibration();
        let share = 1.0 / self.log.interval.max(1) as f64;
        let mut traffic = Traffic::default();
        let (mut time_us, mut ends) = (0.0, Some([0.0; 2]));
        for step in steps(self.log) {
            let kernels = self.kernels(step, Replay::Whole)?;
            traffic.add(&self.traffic(step, &kernels)?, share);
            for kernel in &kernels {
                let us = time_kernel(kernel, self.chip).total_us;
                time_us += share * us;
                let interval = run::interval(kernel, self.layer, self.chip, us, calibration);
                ends = ends.zip(interval).map(|([low, high], interval)| {
                    [low + share * interval.low_us, high + share * interval.high_us]
                });
            }
        }
        let of_state = |part: &Part| part.base_bytes + part.log_bytes;
        let both = |read: &Part, written: &Part| of_state(read) + of_state(written);
        Ok(Amortised {
            time_us,
            low_us: ends.map(|ends| ends[0]),
            high_us: ends.map(|ends| ends[1]),
            speedup: eager.time_us / time_us,
            traffic: traffic.into(),
            state_traffic_gain: both(&eager.traffic.read, &eager.traffic.written)
                / both(&traffic.read, &traffic.written),
            state_write_gain: of_state(&eager.traffic.written) / of_state(&traffic.written),
            traffic_gain: eager.traffic.total() / traffic.total(),
        })
    }

    /// Average steps of every interval at the layer's number of sequences.
    fn sweep(
        &self,
        intervals: &[usize],
        states_per_sequence: usize,
    ) -> Result<Vec<IntervalTime>, BuildError> {
        let eager_us = self.time_us(Step::Eager, Replay::Whole)?;
        let most = intervals.iter().copied().max().unwrap_or(1);
        // Append steps of a short interval are the first of a long one.
        let mut appends = Vec::new();
        for length in 0..most {
            appends.push(self.time_us(Step::Append(length), Replay::Whole)?);
        }
        let mut rows = Vec::new();
        for &interval in intervals {
            let (appended, last) = match self.log.merge {
                Merge::Fused => (interval - 1, Step::AppendMerge(interval - 1)),
                Merge::Separate => (interval, Step::Merge(interval)),
            };
            let sum: f64 = appends.iter().take(appended).sum();
            let time_us = (sum + self.time_us(last, Replay::Whole)?) / interval as f64;
            let states = self.layer.batch * states_per_sequence;
            rows.push(IntervalTime {
                batch: self.layer.batch,
                states,
                state_bytes: self.layer.batch as u64 * self.layer.state_bytes(),
                interval,
                eager_us,
                time_us,
                speedup: eager_us / time_us,
                best: false,
            });
        }
        if let Some(best) = rows.iter_mut().min_by(|a, b| a.time_us.total_cmp(&b.time_us)) {
            best.best = true;
        }
        Ok(rows)
    }
}

/// The tables of a workload.
///
/// # Errors
/// A layer without a log, an interval or a number of sequences of none, and a format that a chip lacks.
pub fn tables(request: DeltaLogRequest<'_>) -> Result<DeltaLogTables, DeltaLogError> {
    let (workload, document) = request.workload;
    let layer = &workload.layer;
    let Some(log) = layer.log else {
        let message = format!(
            "`{}` decodes without a log; write `log_interval`, for instance `log_interval: 8`, or use a shipped workload such as `gdn_deltalog`",
            workload.name
        );
        return Err(document.error_at("layer", message).into());
    };
    let states_per_sequence = if layer.mechanism.packed {
        layer.key_heads
    } else {
        layer.value_heads
    };
    let mut chips = Vec::new();
    for (chip, _) in request.chips {
        check_formats(layer, chip, document)?;
        let timed = Timed { layer, log, chip };
        let eager = timed.step(Step::Eager, 0)?;
        let (mut appends, mut append_merges, mut merges) = (Vec::new(), Vec::new(), Vec::new());
        for length in 0..log.interval {
            appends.push(timed.step(Step::Append(length), length)?);
            append_merges.push(timed.step(Step::AppendMerge(length), length)?);
            merges.push(timed.step(Step::Merge(length + 1), length + 1)?);
        }
        let mut intervals = Vec::new();
        for &batch in request.batches {
            let layer = Layer {
                batch,
                ..layer.clone()
            };
            let timed = Timed {
                layer: &layer,
                ..timed
            };
            intervals.extend(timed.sweep(request.intervals, states_per_sequence)?);
        }
        let mut splits = Vec::new();
        for &interval in request.intervals.iter().filter(|interval| **interval > 1) {
            let (layer, log) = with_interval(layer, log, interval);
            let timed = Timed {
                layer: &layer,
                log,
                chip,
            };
            let whole_us = timed.average_us(Replay::Whole)?;
            for &programs in request.splits {
                splits.push(SplitTime {
                    batch: layer.batch,
                    interval,
                    programs,
                    whole_us,
                    split_us: timed.average_us(Replay::Split(programs))?,
                });
            }
        }
        chips.push(ChipTables {
            chip: chip.name.clone(),
            cores: chip.cores_per_device,
            amortised: timed.amortised(&eager)?,
            eager,
            appends,
            append_merges,
            merges,
            intervals,
            splits,
        });
    }
    Ok(DeltaLogTables {
        schema: "tpusim.decode/1",
        name: workload.name.clone(),
        layer: layer.describe(),
        mechanism: layer.mechanism.name.to_owned(),
        batch: layer.batch,
        states_per_sequence,
        state_bytes: layer.state_bytes() / states_per_sequence.max(1) as u64,
        log,
        chips,
    })
}
