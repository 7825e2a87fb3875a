//! A compiled program as a result: the same tables, pictures, pages and comparisons as those of a workload.
//!
//! Kernels of the schedule are the rows. What a row takes of each unit are slots that its bundles fill, so that
//! operations are counted as they are issued, padding of tiles included; the useful part of a tile is not in a
//! schedule.

use crate::config::{ConfigError, digest};
use crate::dtype::Dtype;
use crate::dump::report::{KernelTime, SlotUse};
use crate::dump::{Analysis, Generation, Machine, Schedule};
use crate::hardware::{self, Chip, Evidence, Kind, ScheduleConstants};
use crate::report::result::{
    Bound, ChipResult, Inputs, NumberSource, PlanResult, Provenance, RunResult, SCHEMA, StageResult,
};

/// Name of the only plan of such a result.
pub const PLAN: &str = "compiled";
/// Family of its rows: errors of schedules on one chip are off together.
const FAMILY: &str = "compiled schedules";
/// Kernels below this share of the time are one row together.
const SMALLEST_SHARE: f64 = 0.01;

/// Units, the slots that keep them busy, and the bound they are.
const UNITS: [(&str, Bound); 6] = [
    ("MXU", Bound::Mxu),
    ("VALU", Bound::Vpu),
    ("EUP", Bound::Transcendental),
    ("XLU", Bound::CrossLane),
    ("VLOAD", Bound::Vmem),
    ("VSTORE", Bound::Vmem),
];

/// The machine of a generation, from the shipped hardware file as published: the constants of the method
/// take the place of calibrated ones.
///
/// # Errors
/// A shipped hardware file that cannot be read.
pub fn machine(constants: &ScheduleConstants, generation: Generation) -> Result<Machine, ConfigError> {
    let chip = hardware::load_uncalibrated(generation.chip())?;
    let cores = chip.cores_per_device;
    let bandwidth = chip.hbm_bandwidth_per_device().get() / f64::from(cores.max(1));
    Ok(Machine::of(
        constants,
        generation,
        chip.clock().get(),
        bandwidth,
        cores,
    ))
}

/// The result of an analysis. `chip` is the chip as published, `machine` what the analysis took of it.
#[must_use]
pub fn result(
    analysis: &Analysis,
    schedule: &Schedule,
    chip: &Chip,
    machine: &Machine,
    constants: &ScheduleConstants,
) -> RunResult {
    let mut chip = chip.clone();
    chip.sustained_clock = machine.clock_hz / chip.clock().get();
    chip.hbm.achievable = machine.hbm_achievable;
    let rows = Rows {
        chip: &chip,
        machine,
        constants,
    };
    let mut stages = Vec::new();
    let mut small = Vec::new();
    for kernel in &analysis.kernels {
        let row = rows.kernel(kernel);
        if kernel.share < SMALLEST_SHARE {
            small.push(row);
        } else {
            stages.push(row);
        }
    }
    stages.extend(joined(small));
    stages.extend(rows.between(analysis));
    let plan = PlanResult {
        name: PLAN.to_owned(),
        total_us: analysis.time_us,
        low_us: Some(analysis.low_us),
        high_us: Some(analysis.high_us),
        speedup_over_baseline: None,
        baseline_us: None,
        published_us: None,
        token: None,
        stages,
    };
    let mut of_chip = super::run::chip_result(&chip, vec![plan]);
    describe(&mut of_chip, analysis, constants);
    let text = serde_json::to_string(schedule).unwrap_or_default();
    let mut workload: Vec<String> = [
        ("chip", Some(analysis.chip.to_owned())),
        ("jax", schedule.jax.clone()),
        ("kernels", Some(schedule.kernels.len().to_string())),
        ("libtpu", analysis.libtpu.clone()),
        ("program", Some(analysis.program.clone())),
    ]
    .into_iter()
    .filter_map(|(field, value)| Some(format!("{field}={}", value?)))
    .collect();
    workload.push(format!("schedule={}", digest(schedule.events.as_bytes())));
    let mut warnings = analysis.warnings.clone();
    warnings.push("operations are counted as they are issued, padding of tiles included".to_owned());
    warnings.extend(analysis.undecided.iter().map(|undecided| {
        format!(
            "{} ({:.1} % of the time): {}",
            undecided.name,
            100.0 * undecided.share,
            undecided.what
        )
    }));
    RunResult {
        schema: SCHEMA.to_owned(),
        name: schedule.name.clone(),
        headline: format!(
            "{} on {}: {:.2} us (80 % interval {:.2} to {:.2} us), bound by {}",
            analysis.program,
            analysis.chip,
            analysis.time_us,
            analysis.low_us,
            analysis.high_us,
            analysis.binds
        ),
        layer: format!(
            "compiled program, {} kernels, {:.3} MB of HBM traffic",
            analysis.kernels.len(),
            analysis.hbm_bytes / 1e6
        ),
        baseline: None,
        chips: vec![of_chip],
        numeric: None,
        published: None,
        warnings,
        provenance: Provenance {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hardware_digest: "none".to_owned(),
            workload_digest: digest(text.as_bytes()),
            calibration_digest: constants.data_digest.clone(),
            overrides: Vec::new(),
            inferred: Vec::new(),
        },
        inputs: Some(Inputs {
            workload,
            hardware: Vec::new(),
            calibration: analysis
                .constants
                .iter()
                .map(|constant| format!("{}={}", constant.name, constant.value))
                .collect(),
        }),
        sensitivity: Vec::new(),
    }
}

/// What the times rest on, in place of what a workload rests on.
fn describe(chip: &mut ChipResult, analysis: &Analysis, constants: &ScheduleConstants) {
    // The schedule says what is issued; no efficiency stands between it and the roofs.
    chip.roofs.issue_efficiency = 1.0;
    chip.coverage = format!(
        "the compiler's schedule; {} constants fitted to {} programs",
        analysis.constants.len(),
        constants.rows
    );
    let every = [
        Bound::Mxu,
        Bound::Vpu,
        Bound::Transcendental,
        Bound::CrossLane,
        Bound::Vmem,
        Bound::Latency,
    ];
    chip.sources = analysis
        .constants
        .iter()
        .map(|constant| NumberSource {
            number: format!("{} = {} {}", constant.name, constant.value, constant.unit),
            kind: if constant.standard_error.is_some() {
                Kind::Fitted
            } else {
                Kind::Published
            },
            source: constant.source.clone(),
            sets: match constant.name {
                "sustained_clock" => every.to_vec(),
                "launch_us" => vec![Bound::Launch],
                _ => vec![Bound::Hbm],
            },
        })
        .collect();
}

/// Makes rows.
struct Rows<'a> {
    chip: &'a Chip,
    machine: &'a Machine,
    constants: &'a ScheduleConstants,
}

impl Rows<'_> {
    fn kernel(&self, kernel: &KernelTime) -> StageResult {
        let us = |cycles: f64| cycles * kernel.count / self.machine.clock_hz * 1e6;
        let schedule_us = us((kernel.issue_cycles + kernel.empty_cycles) as f64);
        let share = |name: &str| slot(&kernel.slots, name);
        let of = |bound: Bound| -> f64 {
            let shares = UNITS
                .iter()
                .filter(|(_, of)| *of == bound)
                .map(|(name, _)| share(name));
            shares.fold(0.0, f64::max) * schedule_us
        };
        let bandwidth =
            self.machine.hbm_bytes_per_s * self.machine.hbm_achievable * f64::from(self.machine.cores);
        // What the device could do in that time, times the share of slots in use.
        let seconds = schedule_us * 1e-6 * self.chip.sustained_clock;
        let matrix = self
            .chip
            .matrix_flops_per_second(Dtype::Bf16)
            .map_or(0.0, crate::units::FlopsPerSecond::get);
        let vector = self.chip.vector_ops_per_second().get();
        let transcendental = self.chip.transcendentals_per_second().get();
        let hbm_bytes = kernel.hbm_bytes * kernel.count;
        let mut row = StageResult {
            stage: base_name(&kernel.name).to_owned(),
            title: if kernel.count > 1.0 {
                format!("{}, {} runs", kernel.opcode, kernel.count)
            } else {
                kernel.opcode.clone()
            },
            mxu_us: of(Bound::Mxu),
            vpu_us: of(Bound::Vpu),
            transcendental_us: of(Bound::Transcendental),
            cross_lane_us: of(Bound::CrossLane),
            vmem_us: of(Bound::Vmem),
            hbm_us: hbm_bytes / bandwidth * 1e6,
            latency_us: us(kernel.empty_cycles as f64),
            launch_us: self.machine.launch_s * 1e6 * kernel.count,
            flops: (share("MXU") * seconds * matrix).round() as u64,
            vector_ops: (share("VALU") * seconds * vector).round() as u64,
            transcendentals: (share("EUP") * seconds * transcendental).round() as u64,
            hbm_bytes: hbm_bytes.round() as u64,
            grid_sequential: kernel.trips,
            ..self.empty(kernel.time_us)
        };
        let (bound, next_bound) = bounds(&row, us(kernel.wait_cycles), schedule_us);
        row.bound = bound;
        row.next_bound = next_bound;
        let whole = row.time_us.max(f64::MIN_POSITIVE);
        row.mxu_busy = row.mxu_us / whole;
        row.vpu_busy = row.vpu_us / whole;
        row.hbm_busy = (row.hbm_us / whole).min(1.0);
        row.mxu_achieved = row.mxu_busy;
        row
    }

    /// Instructions that are no kernels, as one row.
    fn between(&self, analysis: &Analysis) -> Option<StageResult> {
        let time_us: f64 = analysis.others.iter().map(|other| other.time_us).sum();
        (time_us > 0.0).then(|| StageResult {
            stage: "between kernels".to_owned(),
            title: "copies, SparseCore, collectives".to_owned(),
            bound: Bound::Hbm,
            next_bound: Bound::Latency,
            hbm_us: time_us,
            hbm_busy: 1.0,
            ..self.empty(time_us)
        })
    }

    fn empty(&self, time_us: f64) -> StageResult {
        StageResult {
            stage: String::new(),
            title: String::new(),
            time_us,
            low_us: Some(time_us * self.constants.low),
            high_us: Some(time_us * self.constants.high),
            interval_from: Some(Evidence::OtherKernels),
            family: Some(FAMILY.to_owned()),
            speedup_error_ratio: Some(self.constants.speedup_error_ratio),
            bound: Bound::Latency,
            next_bound: Bound::Latency,
            mxu_us: 0.0,
            vpu_us: 0.0,
            transcendental_us: 0.0,
            cross_lane_us: 0.0,
            vmem_us: 0.0,
            hbm_us: 0.0,
            latency_us: 0.0,
            launch_us: 0.0,
            flops: 0,
            vector_ops: 0,
            transcendentals: 0,
            hbm_bytes: 0,
            mxu_busy: 0.0,
            vpu_busy: 0.0,
            hbm_busy: 0.0,
            mxu_lane: 1.0,
            mxu_achieved: 0.0,
            padding: 0.0,
            vmem_bytes: 0,
            grid_parallel: 1,
            grid_sequential: 1,
            published_us: None,
        }
    }
}

/// Share of the slots of a kind that are in use.
fn slot(slots: &[SlotUse], name: &str) -> f64 {
    slots
        .iter()
        .find(|slot| slot.name == name)
        .map_or(0.0, |slot| slot.share)
}

/// Name of a kernel without the number that the compiler makes it unique with.
fn base_name(name: &str) -> &str {
    match name.rsplit_once('.') {
        Some((base, number)) if !base.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) => base,
        _ => name,
    }
}

/// What binds a row, and what would next: waits for transfers, the unit that is busy longest, or cycles in which
/// nothing is issued.
fn bounds(row: &StageResult, wait_us: f64, schedule_us: f64) -> (Bound, Bound) {
    let mut parts = [
        (Bound::Hbm, row.hbm_us),
        (Bound::Mxu, row.mxu_us),
        (Bound::Vpu, row.vpu_us),
        (Bound::Transcendental, row.transcendental_us),
        (Bound::CrossLane, row.cross_lane_us),
        (Bound::Vmem, row.vmem_us),
        (Bound::Latency, row.latency_us),
    ];
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    // Waits that are longer than the memory is busy are waits for its latency.
    let transfers = if row.hbm_us >= wait_us {
        Bound::Hbm
    } else {
        Bound::Latency
    };
    if wait_us > schedule_us {
        let next = parts.iter().find(|(bound, _)| *bound != transfers);
        (transfers, next.map_or(Bound::Vpu, |part| part.0))
    } else {
        (parts[0].0, parts[1].0)
    }
}

/// Rows as one.
fn joined(rows: Vec<StageResult>) -> Option<StageResult> {
    let count = rows.len();
    let mut rows = rows.into_iter();
    let mut first = rows.next()?;
    if count == 1 {
        return Some(first);
    }
    let mut longest = first.time_us;
    for row in rows {
        if row.time_us > longest {
            longest = row.time_us;
            (first.bound, first.next_bound) = (row.bound, row.next_bound);
        }
        first.time_us += row.time_us;
        first.mxu_us += row.mxu_us;
        first.vpu_us += row.vpu_us;
        first.transcendental_us += row.transcendental_us;
        first.cross_lane_us += row.cross_lane_us;
        first.vmem_us += row.vmem_us;
        first.hbm_us += row.hbm_us;
        first.latency_us += row.latency_us;
        first.launch_us += row.launch_us;
        first.flops += row.flops;
        first.vector_ops += row.vector_ops;
        first.transcendentals += row.transcendentals;
        first.hbm_bytes += row.hbm_bytes;
        first.low_us = first.low_us.zip(row.low_us).map(|(a, b)| a + b);
        first.high_us = first.high_us.zip(row.high_us).map(|(a, b)| a + b);
    }
    let whole = first.time_us.max(f64::MIN_POSITIVE);
    first.mxu_busy = first.mxu_us / whole;
    first.vpu_busy = first.vpu_us / whole;
    first.hbm_busy = (first.hbm_us / whole).min(1.0);
    first.mxu_achieved = first.mxu_busy;
    first.grid_sequential = 1;
    "small kernels".clone_into(&mut first.stage);
    first.title = format!("{count} kernels of less than 1 % each");
    Some(first)
}
