//! Constants of [`crate::dump`], fitted to programs whose schedule and whose measured time are known.
//!
//! A schedule says what a program asks of its core and of the device memory; how fast that memory answers and
//! how fast the clock runs under load it does not say. The few constants that do are the same for all chips but
//! for the clock. They minimise the mean of |ln(predicted / measured)|, of which each program counts no more than
//! ln 1.25: some were measured with another compiler than the one whose schedule is at hand.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::validate::quantile;
use crate::config::digest;
use crate::dump::Machine;
use crate::dump::schedule::{Schedule, Timed, read_lines};
use crate::hardware::{self, ScheduleConstant, ScheduleConstants};

/// Shipped schedules, one a line.
const SCHEDULES: &str = include_str!("../../measurements/compiled/schedules.jsonl");
/// Name of that file.
const SCHEDULES_NAME: &str = "measurements/compiled/schedules.jsonl";
/// What an earlier program in Python made of the same dumps.
const PROTOTYPE: &str = include_str!("../../measurements/compiled/prototype.csv");

/// Error beyond which a program counts no more, as a factor.
const FACTOR_THAT_COUNTS: f64 = 1.25;
/// Values of one constant that are tried at a time.
const VALUES_TRIED: u32 = 12;
/// How often the span of those values is narrowed.
const NARROWINGS: u32 = 3;
/// Rounds over all constants.
const ROUNDS: usize = 4;

/// A program that can be timed, with what it took.
#[derive(Debug, Clone)]
pub struct Program {
    /// Its schedule.
    pub schedule: Schedule,
    timed: Timed,
    /// Family of kernels.
    pub family: String,
    /// Measured time, in microseconds.
    pub measured_us: f64,
    /// Why it is predicted only and not fitted to.
    pub check: Option<String>,
    /// Published clock of its chip, in Hz.
    clock_hz: f64,
    /// Published device memory bandwidth of one core's share, in bytes/s.
    hbm_bytes_per_s: f64,
}

/// Values of the constants.
#[derive(Debug, Clone, PartialEq)]
struct Values {
    /// Achievable bandwidth, latency, launch.
    shared: [f64; 3],
    /// Clock share by chip.
    clocks: BTreeMap<String, f64>,
}

/// Ranges and starting values of the shared constants and of the clock share: name, unit, meaning, lowest,
/// highest, prior.
const SHARED: [(&str, &str, &str, f64, f64, f64); 3] = [
    (
        "hbm_achievable",
        "share of the published bandwidth",
        "rate that transfers of kernels reach at the device memory",
        0.6,
        1.0,
        1.0,
    ),
    (
        "transfer_latency_us",
        "us",
        "time from the end of a transfer's turn at the memory until a wait for it ends; short grid steps tell it",
        0.0,
        2.0,
        0.5,
    ),
    (
        "launch_us",
        "us",
        "time between two kernels of a program",
        0.0,
        1.0,
        0.0,
    ),
];
const CLOCK: (&str, &str, f64, f64, f64) = (
    "share of the published clock",
    "clock at which schedules take the time that is measured; it cannot be told from a constant share of stalls",
    0.8,
    1.0,
    1.0,
);

impl Program {
    /// Takes a schedule with its measured time; `place` says where it comes from.
    ///
    /// # Errors
    /// A schedule without measured time or family, or one that cannot be read.
    pub fn new(schedule: Schedule, place: &str) -> anyhow::Result<Self> {
        let timed = schedule.timed(place)?;
        let chip = hardware::load_uncalibrated(timed.generation().chip())?;
        let measured_us = schedule
            .measured_us
            .filter(|us| *us > 0.0 && us.is_finite())
            .with_context(|| {
                format!(
                    "{place}: {}: expected `measured_us`, the measured time in microseconds (meta.json of a dump may hold it)",
                    schedule.name
                )
            })?;
        let family = schedule.family.clone().with_context(|| {
            format!(
                "{place}: {}: expected `family`, the family of kernels (meta.json of a dump may hold it)",
                schedule.name
            )
        })?;
        Ok(Self {
            family,
            measured_us,
            check: schedule.check.clone(),
            clock_hz: chip.clock().get(),
            hbm_bytes_per_s: chip.hbm_bandwidth_per_device().get() / f64::from(chip.cores_per_device.max(1)),
            timed,
            schedule,
        })
    }

    /// Name of its chip.
    #[must_use]
    pub fn device(&self) -> &'static str {
        self.timed.generation().chip()
    }

    fn micros(&self, values: &Values) -> f64 {
        let clock = values.clocks.get(self.device()).copied().unwrap_or(CLOCK.4);
        let [achievable, latency_us, launch_us] = values.shared;
        let machine = Machine {
            generation: self.timed.generation(),
            clock_hz: self.clock_hz * clock,
            hbm_bytes_per_s: self.hbm_bytes_per_s,
            hbm_achievable: achievable,
            transfer_latency_s: latency_us * 1e-6,
            launch_s: launch_us * 1e-6,
            cores: self.timed.cores(),
        };
        self.timed.cycles(&machine) / machine.clock_hz * 1e6
    }

    /// Logarithm of predicted over measured time.
    fn error(&self, values: &Values) -> f64 {
        (self.micros(values) / self.measured_us).ln()
    }
}

/// The shipped programs.
///
/// # Errors
/// A shipped file that cannot be read.
pub fn shipped() -> anyhow::Result<Vec<Program>> {
    programs(SCHEDULES_NAME, SCHEDULES)
}

/// Programs of a text with one schedule a line; `name` is the path that errors show.
///
/// # Errors
/// A line that is no schedule, or one without measured time or family.
pub fn programs(name: &str, text: &str) -> anyhow::Result<Vec<Program>> {
    read_lines(name, text)?
        .into_iter()
        .map(|schedule| Program::new(schedule, name))
        .collect()
}

/// Values that suit some programs best.
fn best(programs: &[&Program]) -> Values {
    let devices: BTreeSet<&str> = programs.iter().map(|program| program.device()).collect();
    let mut values = Values {
        shared: SHARED.map(|(.., prior)| prior),
        clocks: devices
            .iter()
            .map(|device| ((*device).to_owned(), CLOCK.4))
            .collect(),
    };
    if programs.is_empty() {
        return values;
    }
    for _ in 0..ROUNDS {
        let before = values.clone();
        for (at, &(.., low, high, _)) in SHARED.iter().enumerate() {
            values.shared[at] = along(programs, (low, high), values.shared[at], |value| {
                let mut tried = values.clone();
                tried.shared[at] = value;
                tried
            });
        }
        for device in &devices {
            let own: Vec<&Program> = programs
                .iter()
                .copied()
                .filter(|program| program.device() == *device)
                .collect();
            let clock = along(&own, (CLOCK.2, CLOCK.3), values.clocks[*device], |value| {
                let mut tried = values.clone();
                tried.clocks.insert((*device).to_owned(), value);
                tried
            });
            values.clocks.insert((*device).to_owned(), clock);
        }
        if values == before {
            break;
        }
    }
    values
}

/// The best value of one constant between two ends, the others held; the one at hand where none is better.
fn along(
    programs: &[&Program],
    (low, high): (f64, f64),
    at_hand: f64,
    with: impl Fn(f64) -> Values + Sync,
) -> f64 {
    let loss = |value: f64| -> f64 {
        let values = with(value);
        let most = FACTOR_THAT_COUNTS.ln();
        let errors: Vec<f64> = programs
            .par_iter()
            .map(|program| program.error(&values).abs().min(most))
            .collect();
        errors.iter().sum()
    };
    let mut found = (loss(at_hand), at_hand);
    let (mut from, mut to) = (low, high);
    for _ in 0..=NARROWINGS {
        let step = (to - from) / f64::from(VALUES_TRIED);
        for index in 0..=VALUES_TRIED {
            // Four digits are more than the rows tell.
            let value = ((from + step * f64::from(index)) * 1e4).round() / 1e4;
            let tried = loss(value);
            if tried < found.0 - 1e-12 {
                found = (tried, value);
            }
        }
        from = (found.1 - step).max(low);
        to = (found.1 + step).min(high);
    }
    found.1
}

/// What a fit found, and what fits without a family or a device predict.
#[derive(Debug, Clone)]
pub struct ScheduleFit {
    /// For the calibration.
    pub constants: ScheduleConstants,
    /// One row a program.
    pub rows: Vec<Row>,
}

/// Predictions of one program.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Name of its dump.
    pub program: String,
    /// Family of kernels.
    pub family: String,
    /// Chip.
    pub device: String,
    /// Measured time, in microseconds.
    pub measured_us: f64,
    /// Bundles that are issued, at the published clock, in microseconds.
    pub bundles_us: f64,
    /// The schedule with its empty cycles, at the published clock, in microseconds.
    pub schedule_us: f64,
    /// Of every kernel the longer of its schedule and of its bytes at the published bandwidth, in microseconds.
    pub roofline_us: f64,
    /// With transfers queued, constants fitted to all programs that are fitted to, in microseconds.
    pub in_sample_us: f64,
    /// The same, fitted without the family, in microseconds.
    pub without_family_us: f64,
    /// The same, fitted without the device, whose clock is then the published one, in microseconds.
    pub without_device_us: f64,
    /// The compiler's own estimates, in microseconds at the published clock; none where it gives none.
    pub compiler_us: Option<f64>,
    /// The fast model, which knows sizes and blocks and no schedule, in microseconds: fitted to measured rows of the
    /// same kernels; none where the program is not one of its cases.
    pub fast_us: Option<f64>,
    /// What the prototype said with nothing fitted, in microseconds.
    pub prototype_nominal_us: Option<f64>,
    /// What the prototype said with three constants for all chips, in microseconds.
    pub prototype_us: Option<f64>,
    /// Why it was not fitted to; absent where it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<String>,
}

/// A line of `measurements/compiled/prototype.csv`.
#[derive(Debug, Deserialize)]
struct Prototype {
    program: String,
    nominal_us: f64,
    fitted_us: f64,
}

/// Fits the constants.
///
/// # Errors
/// No program to fit to, or a shipped table that cannot be read.
pub fn fit(programs: &[Program]) -> anyhow::Result<ScheduleFit> {
    let used: Vec<&Program> = programs
        .iter()
        .filter(|program| program.check.is_none())
        .collect();
    anyhow::ensure!(
        !used.is_empty(),
        "no program is left to fit the constants of schedules to"
    );
    let names = |of: fn(&Program) -> &str| -> BTreeSet<String> {
        used.iter().map(|program| of(program).to_owned()).collect()
    };
    let families = names(|program| &program.family);
    let devices = names(Program::device);
    let whole = best(&used);
    let without = |keys: &BTreeSet<String>, of: fn(&Program) -> &str| -> BTreeMap<String, Values> {
        keys.iter()
            .map(|key| {
                let rest: Vec<&Program> = used.iter().copied().filter(|p| of(p) != key).collect();
                (key.clone(), best(&rest))
            })
            .collect()
    };
    let by_family = without(&families, |program| &program.family);
    let by_device = without(&devices, Program::device);
    let prototype: BTreeMap<String, Prototype> = csv::Reader::from_reader(PROTOTYPE.as_bytes())
        .deserialize::<Prototype>()
        .map(|row| row.map(|row| (row.program.clone(), row)))
        .collect::<Result<_, _>>()
        .context("measurements/compiled/prototype.csv")?;
    let rows: Vec<Row> = programs
        .par_iter()
        .map(|program| {
            let schedule = &program.schedule;
            let cycles_us = |cycles: f64| cycles / program.clock_hz * 1e6;
            let memory = program.hbm_bytes_per_s * f64::from(program.timed.cores());
            let told = prototype.get(&schedule.name);
            let estimate = schedule.compiler_estimate_cycles;
            Row {
                program: schedule.name.clone(),
                family: program.family.clone(),
                device: program.device().to_owned(),
                measured_us: program.measured_us,
                bundles_us: cycles_us(schedule.issue_cycles()),
                schedule_us: cycles_us(schedule.schedule_cycles()),
                roofline_us: 1e6 * schedule.roofline(program.clock_hz, memory),
                in_sample_us: program.micros(&whole),
                without_family_us: program.micros(by_family.get(&program.family).unwrap_or(&whole)),
                without_device_us: program.micros(by_device.get(program.device()).unwrap_or(&whole)),
                compiler_us: (estimate > 0.0).then(|| cycles_us(estimate)),
                fast_us: fast(program),
                prototype_nominal_us: told.map(|row| row.nominal_us),
                prototype_us: told.map(|row| row.fitted_us),
                check: program.check.clone(),
            }
        })
        .collect();
    let ratios: Vec<f64> = rows
        .iter()
        .filter(|row| row.check.is_none())
        .map(|row| row.measured_us / row.without_family_us)
        .collect();
    let folds: Vec<&Values> = by_family.values().collect();
    let constant = |(unit, meaning): (&str, &str),
                    (low, high, prior): (f64, f64, f64),
                    rows,
                    of: &dyn Fn(&Values) -> f64| {
        ScheduleConstant {
            value: of(&whole),
            unit: unit.to_owned(),
            meaning: meaning.to_owned(),
            standard_error: jackknife(&folds.iter().map(|values| of(values)).collect::<Vec<f64>>()),
            low,
            high,
            prior,
            rows,
        }
    };
    let shared = |at: usize| {
        let (_, unit, meaning, low, high, prior) = SHARED[at];
        constant((unit, meaning), (low, high, prior), used.len(), &|values| {
            values.shared[at]
        })
    };
    let sustained_clock = devices
        .iter()
        .map(|device| {
            let (unit, meaning, low, high, prior) = CLOCK;
            let rows = used.iter().filter(|program| program.device() == device).count();
            let value = constant((unit, meaning), (low, high, prior), rows, &|values| {
                values.clocks.get(device).copied().unwrap_or(prior)
            });
            (device.clone(), value)
        })
        .collect();
    let rounded = |value: f64| (value * 1e4).round() / 1e4;
    Ok(ScheduleFit {
        constants: ScheduleConstants {
            data_digest: data_digest(&used)?,
            rows: used.len(),
            hbm_achievable: shared(0),
            transfer_latency_us: shared(1),
            launch_us: shared(2),
            sustained_clock,
            low: rounded(quantile(&ratios, 0.1)),
            high: rounded(quantile(&ratios, 0.9)),
            speedup_error_ratio: rounded(speedup_error(&rows)),
        },
        rows,
    })
}

/// Factor that ratios of two programs of one family on one chip are off by at most in 80 % of the pairs.
fn speedup_error(rows: &[Row]) -> f64 {
    let mut errors = Vec::new();
    let fitted: Vec<&Row> = rows.iter().filter(|row| row.check.is_none()).collect();
    let error = |row: &Row| (row.without_family_us / row.measured_us).ln();
    for (at, a) in fitted.iter().enumerate() {
        for b in &fitted[..at] {
            if a.family == b.family && a.device == b.device {
                errors.push((error(a) - error(b)).abs());
            }
        }
    }
    if errors.is_empty() {
        return 1.0;
    }
    quantile(&errors, 0.8).exp()
}

/// Time of a program by the fast model.
fn fast(program: &Program) -> Option<f64> {
    let case = program.schedule.case.as_ref()?;
    let chip = hardware::load(program.device()).ok()?.0;
    let row = crate::study::predict::row_of(case, program.device(), None);
    let predicted = crate::study::predict::case(&row, &chip).ok()?;
    Some(predicted.predicted_us)
}

/// Standard error of a value from those that leave out one group at a time.
fn jackknife(values: &[f64]) -> f64 {
    let count = values.len() as f64;
    if values.len() < 2 {
        return 0.0;
    }
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (((count - 1.0) / count * squares).sqrt() * 1e4).round() / 1e4
}

/// Digest of the programs that constants are fitted to, with their measured times.
///
/// # Errors
/// A number that JSON has no word for.
pub fn data_digest(programs: &[&Program]) -> anyhow::Result<String> {
    let mut text = String::new();
    for program in programs {
        text.push_str(&serde_json::to_string(&program.schedule)?);
        text.push('\n');
    }
    Ok(digest(text.as_bytes()))
}

/// Errors of one method on a group of programs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Errors {
    /// Programs that the method says something of.
    pub programs: usize,
    /// Median of the absolute error, in percent of the measured time.
    pub median_abs_pct: f64,
    /// Its ninetieth percentile, in percent.
    pub p90_abs_pct: f64,
}

/// Errors of every method on the programs of a family or a device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    /// `family`, `device`, or `all`.
    pub by: &'static str,
    /// Name of the family or device.
    pub name: String,
    /// Programs.
    pub programs: usize,
    /// By method, in the order of [`METHODS`]; none where the method says nothing of these programs.
    pub methods: BTreeMap<&'static str, Option<Errors>>,
}

/// A method: its key, its title, and what it predicts.
type Method = (&'static str, &'static str, fn(&Row) -> Option<f64>);

/// Every method of a table.
pub const METHODS: [Method; 10] = [
    ("bundles", "bundles / clock", |row| Some(row.bundles_us)),
    ("schedule", "with empty cycles", |row| Some(row.schedule_us)),
    ("roofline", "or HBM at its peak", |row| Some(row.roofline_us)),
    ("in_sample", "in sample", |row| Some(row.in_sample_us)),
    ("without_family", "family left out", |row| {
        Some(row.without_family_us)
    }),
    ("without_device", "device left out", |row| {
        Some(row.without_device_us)
    }),
    ("fast", "fast model, in sample", |row| row.fast_us),
    ("prototype_nominal", "prototype, nothing fitted", |row| {
        row.prototype_nominal_us
    }),
    ("prototype", "prototype, fitted", |row| row.prototype_us),
    ("compiler", "compiler's estimate", |row| row.compiler_us),
];

/// Errors of all methods, by family and by device. Programs that were only checked are groups of their own.
#[must_use]
pub fn groups(rows: &[Row]) -> Vec<Group> {
    let mut found = Vec::new();
    let mut add = |by: &'static str, name: &str, rows: Vec<&Row>| {
        let errors = |of: fn(&Row) -> Option<f64>| {
            let errors: Vec<f64> = rows
                .iter()
                .filter_map(|row| Some((100.0 * (of(row)? / row.measured_us - 1.0)).abs()))
                .collect();
            (!errors.is_empty()).then(|| Errors {
                programs: errors.len(),
                median_abs_pct: quantile(&errors, 0.5),
                p90_abs_pct: quantile(&errors, 0.9),
            })
        };
        found.push(Group {
            by,
            name: name.to_owned(),
            programs: rows.len(),
            methods: METHODS.iter().map(|(key, _, of)| (*key, errors(*of))).collect(),
        });
    };
    let fitted: Vec<&Row> = rows.iter().filter(|row| row.check.is_none()).collect();
    let checked: Vec<&Row> = rows.iter().filter(|row| row.check.is_some()).collect();
    add("all", "all that were fitted to", fitted.clone());
    for (by, of) in [
        ("family", (|row| row.family.as_str()) as fn(&Row) -> &str),
        ("device", |row| row.device.as_str()),
    ] {
        let names: BTreeSet<&str> = fitted.iter().map(|row| of(row)).collect();
        for name in names {
            let own = fitted.iter().copied().filter(|row| of(row) == name).collect();
            add(by, name, own);
        }
    }
    let names: BTreeSet<(&str, &str)> = checked
        .iter()
        .map(|row| (row.device.as_str(), row.family.as_str()))
        .collect();
    for (device, family) in names {
        let own = checked
            .iter()
            .copied()
            .filter(|row| row.device == device && row.family == family)
            .collect();
        add("check", &format!("{family} on {device}, never fitted"), own);
    }
    found
}
