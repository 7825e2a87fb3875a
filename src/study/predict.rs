//! `predict`: the time of every case of a table.

use std::borrow::Cow;
use std::collections::BTreeMap;

use rayon::prelude::*;

use super::calls;
use crate::config::{ConfigError, suggestion};
use crate::dump::schedule::Case;
use crate::hardware::{self, Architecture, Calibration, Chip, Interval};
use crate::kernels::library::{CaseError, Formats, Launch, Params};
use crate::measurements::{Row, Table};
use crate::report::result::Bound;
use crate::timing::{matrix, time_kernel};

/// The predicted time of a case.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// All launches of the call, in microseconds; with the host's share where the case says that it was timed by the wall clock.
    pub predicted_us: f64,
    /// The 80 % interval of it, where residuals of comparable cases exist.
    pub interval: Option<Interval>,
    /// What binds most of that time.
    pub bound: Bound,
    /// What a roofline of the same launches says: matrix work at the peak or transfers at the published bandwidth, whichever takes longer, in microseconds.
    pub roofline_us: f64,
    /// Family of the operation.
    pub family: String,
    /// The launches, in order.
    pub launches: Vec<TimedLaunch>,
}

/// A launch of a call with its time.
#[derive(Debug, Clone, PartialEq)]
pub struct TimedLaunch {
    /// Stage, operation or part of it.
    pub label: String,
    /// What it does.
    pub title: String,
    /// Identical launches, one after the other.
    pub times: u64,
    /// Share of the calls that launch it; 1 but for steps of an interval of a log.
    pub share: f64,
    /// Time of one, in microseconds.
    pub us: f64,
    /// What binds it.
    pub bound: Bound,
    /// Bytes one moves to and from device memory.
    pub hbm_bytes: u64,
}

/// Chips by device and cores.
pub type Chips = BTreeMap<(String, Option<u32>), Result<Chip, String>>;

/// What a device column may name besides the shipped chips: hardware files, each under the name of the file.
#[derive(Debug, Clone, Default)]
pub struct ChipFiles {
    paths: BTreeMap<String, String>,
}

impl ChipFiles {
    /// Shipped names or paths of hardware files, all of them checked with the calibration in use.
    ///
    /// # Errors
    /// A file that does not load or whose text is not the one it was calibrated with, and two files of the same name.
    pub fn new<S: AsRef<str>>(names_or_paths: &[S]) -> Result<Self, ConfigError> {
        Self::checked(names_or_paths, |path| hardware::load(path).map(|_| ()))
    }

    /// As [`ChipFiles::new`], for files that are to be calibrated: what was fitted to them before does not matter.
    ///
    /// # Errors
    /// A file that does not load, and two files of the same name.
    pub fn uncalibrated<S: AsRef<str>>(names_or_paths: &[S]) -> Result<Self, ConfigError> {
        Self::checked(names_or_paths, |path| {
            hardware::load_uncalibrated(path).map(|_| ())
        })
    }

    fn checked<S: AsRef<str>>(
        names_or_paths: &[S],
        check: impl Fn(&str) -> Result<(), ConfigError>,
    ) -> Result<Self, ConfigError> {
        let mut paths: BTreeMap<String, String> = BTreeMap::new();
        for path in names_or_paths.iter().map(AsRef::as_ref) {
            check(path)?;
            let name = hardware::name_of(path);
            if let Some(other) = paths.insert(name.to_owned(), path.to_owned()) {
                return Err(ConfigError::argument(format!(
                    "`{other}` and `{path}` are both called `{name}`"
                )));
            }
        }
        Ok(ChipFiles { paths })
    }

    /// The shipped name or the path that a device leads to.
    fn find<'a>(&'a self, device: &'a str) -> Result<&'a str, String> {
        if let Some(path) = self.paths.get(device) {
            return Ok(path);
        }
        let mut known = hardware::shipped();
        if known.contains(&device) {
            return Ok(device);
        }
        known.extend(self.paths.keys().map(String::as_str));
        let tail = suggestion(device, &known, "known");
        Err(format!("unknown device `{device}`; {tail}"))
    }
}

/// Every chip of a table once, calibrated.
pub fn chips<'a>(rows: impl IntoIterator<Item = &'a Row>, files: &ChipFiles) -> Chips {
    chips_by(rows, files, |name| Ok(hardware::load(name)?.0))
}

/// As [`chips`], with another way to load a shipped chip or a file.
pub fn chips_by<'a>(
    rows: impl IntoIterator<Item = &'a Row>,
    files: &ChipFiles,
    load: impl Fn(&str) -> Result<Chip, ConfigError>,
) -> Chips {
    let mut chips = Chips::new();
    for row in rows {
        chips.entry((row.device.clone(), row.cores)).or_insert_with(|| {
            files
                .find(&row.device)
                .and_then(|path| chip(path, row.cores, &load))
        });
    }
    chips
}

/// Times every row of a table, in its order; a row that cannot be timed says why. `calibration` gives the intervals.
#[must_use]
pub fn predict(
    table: &Table,
    files: &ChipFiles,
    calibration: &Calibration,
) -> Vec<Result<Prediction, String>> {
    let chips = chips(&table.rows, files);
    table
        .rows
        .par_iter()
        .map(|row| match chips.get(&(row.device.clone(), row.cores)) {
            Some(Ok(chip)) => case(row, chip).map(|prediction| {
                let interval = calibration.interval(&prediction.family, chip, prediction.predicted_us);
                Prediction {
                    interval,
                    ..prediction
                }
            }),
            Some(Err(reason)) => Err(reason.clone()),
            None => Err(format!("unknown device `{}`", row.device)),
        })
        .collect()
}

fn chip(
    device: &str,
    cores: Option<u32>,
    load: impl Fn(&str) -> Result<Chip, ConfigError>,
) -> Result<Chip, String> {
    let chip = load(device).map_err(|error| error.to_string())?;
    match cores {
        Some(cores) => chip.with_cores(cores).map_err(|error| error.to_string()),
        None => Ok(chip),
    }
}

/// Times one case on a chip.
///
/// # Errors
/// Why it cannot be timed.
pub fn case(row: &Row, chip: &Chip) -> Result<Prediction, String> {
    time(row, chip).map_err(|error| error.to_string())
}

/// The call of a compiled program as a row without a measured time, on `cores` cores of a device, or on all of them.
#[must_use]
pub fn row_of(case: &Case, device: &str, cores: Option<u32>) -> Row {
    Row {
        line: 1,
        device: device.to_owned(),
        cores,
        op: case.op.clone(),
        params: case.params.clone(),
        dtype: case.dtype.clone(),
        timing: "device".to_owned(),
        latency_us: None,
        source: String::new(),
        cells: Vec::new(),
    }
}

/// The launches of a case with the chip in the clock state it asks for.
///
/// # Errors
/// Why it cannot be timed.
pub fn launches<'a>(row: &Row, chip: &'a Chip) -> Result<(Vec<Launch>, Cow<'a, Chip>), CaseError> {
    let mut params = Params::parse(&row.params)?;
    let chip = match params.take("clock") {
        None => Cow::Borrowed(chip),
        Some(state) => Cow::Owned(
            chip.with_clock(&state)
                .map_err(|error| CaseError::Unsupported(error.to_string()))?,
        ),
    };
    let formats = Formats::parse(&row.dtype)?;
    Ok((calls::launches(&row.op, &params, formats, &chip)?, chip))
}

fn time(row: &Row, chip: &Chip) -> Result<Prediction, CaseError> {
    let (launches, chip) = launches(row, chip)?;
    let (launches, chip) = (launches.as_slice(), chip.as_ref());
    let mut by_bound: BTreeMap<Bound, f64> = BTreeMap::new();
    let mut timed = Vec::with_capacity(launches.len());
    for launch in launches {
        let time = time_kernel(&launch.kernel, chip);
        *by_bound.entry(time.bound).or_default() += time.total_us * launch.times as f64 * launch.kernel.share;
        timed.push(TimedLaunch {
            label: launch.kernel.label.clone(),
            title: launch.kernel.title.clone(),
            times: launch.times,
            share: launch.kernel.share,
            us: time.total_us,
            bound: time.bound,
            hbm_bytes: time.hbm_bytes,
        });
    }
    let host_us = if row.timing == "wall" {
        chip.dispatch.micros()
    } else {
        0.0
    };
    let predicted_us = by_bound.values().sum::<f64>() + host_us;
    let bound = by_bound
        .iter()
        .max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(a.0)));
    match bound {
        Some((&bound, _)) if predicted_us.is_finite() && predicted_us > 0.0 => Ok(Prediction {
            predicted_us,
            interval: None,
            bound,
            roofline_us: roofline_us(launches, chip),
            family: family(&row.op, chip.architecture),
            launches: timed,
        }),
        _ => Err(CaseError::Unsupported("the call has no kernels".to_owned())),
    }
}

/// Time of the matrix work of one launch at the peak of all cores, in seconds.
fn matrix_seconds(launch: &Launch, chip: &Chip) -> f64 {
    let cores = f64::from(chip.cores_per_device);
    matrix::ideal_cycles(chip, &launch.kernel.work.matrix_flops) / cores / chip.clock().get()
}

/// What a roofline of the launches says, in microseconds: all cores, published bandwidth, nothing but matrix work and transfers.
fn roofline_us(launches: &[Launch], chip: &Chip) -> f64 {
    launches
        .iter()
        .map(|launch| {
            let matrix = matrix_seconds(launch, chip);
            let memory = launch.kernel.hbm_bytes() as f64 / chip.hbm_bandwidth_per_device().get();
            1e6 * matrix.max(memory) * launch.times as f64 * launch.kernel.share
        })
        .sum()
}

/// Time of the matrix work of a case at the peak of the fastest clock state, in microseconds: no measured time can be below it.
///
/// # Errors
/// Why the case has no kernels.
pub fn matrix_roof_us(row: &Row, chip: &Chip) -> Result<f64, String> {
    let fastest = chip
        .clock_states
        .iter()
        .max_by(|a, b| a.frequency.get().total_cmp(&b.frequency.get()))
        .and_then(|state| chip.with_clock(&state.name).ok());
    let chip = fastest.as_ref().unwrap_or(chip);
    let build = || -> Result<f64, CaseError> {
        let mut params = Params::parse(&row.params)?;
        params.take("clock");
        let launches = calls::launches(&row.op, &params, Formats::parse(&row.dtype)?, chip)?;
        Ok(launches
            .iter()
            .map(|launch| 1e6 * matrix_seconds(launch, chip) * launch.times as f64 * launch.kernel.share)
            .sum())
    };
    build().map_err(|error| error.to_string())
}

/// Family of an operation on an architecture: what shares an implementation, and so a calibration.
#[must_use]
pub fn family(op: &str, architecture: Architecture) -> String {
    let name = match op {
        "matmul" | "bmm" => "matmul",
        "flash_attention"
        | "splash_attention"
        | "flash_attention_triton"
        | "attention_cudnn"
        | "sdpa_causal"
        | "sdpa_causal_bwd" => "flash attention",
        "attention_xla" => "materialised attention",
        "chunked_attention" => "chunked attention",
        "ragged_dot" | "ragged_dot_v2" | "ragged_dot_triton" => "grouped product",
        "ragged_dot_xla" => "grouped product, dense",
        "gated_linear_unit" => "gated linear unit",
        "linear_cross_entropy" => "cross entropy",
        "linear_cross_entropy_xla" => "cross entropy, blocks",
        "layer_norm" | "rms_norm" | "softmax" | "normalization" => "normalization",
        "gdn_fused" => "fused GDN",
        "gdn_recurrent_xla" => "recurrent loop",
        _ if op.ends_with("_decode_eager") => "eager decode",
        _ if op.contains("_decode_deltalog") => "decode with a log",
        _ if op.ends_with("_decode") => "linear attention decode",
        _ if op.contains("_chunk") || op.ends_with("_core") || op.ends_with("_layer_stage") => {
            "linear attention"
        }
        _ => "elementwise",
    };
    match architecture {
        Architecture::Tpu => name.to_owned(),
        Architecture::Gpu => format!("{name}, GPU"),
    }
}
