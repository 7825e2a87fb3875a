//! Kernels compiled for every TPU generation: the time of their schedules against the fast model, which has seen no row of the generation.
//!
//! No TPU ran. The reference is the schedule that the TPU compiler wrote, timed as [`crate::dump`] times one; the prediction is that of the same call as a case of
//! `tpusim predict`, with coefficients fitted to measured rows of other generations.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;
use serde::Serialize;

use super::fit::with_setting;
use super::parameters::Setting;
use super::validate::quantile;
use crate::dtype::Dtype;
use crate::dump::schedule::{Case, Schedule, read_lines};
use crate::dump::{Machine, ProgramTime, program_time};
use crate::hardware::{self, Chip, ScheduleConstants};
use crate::measurements;
use crate::study::{dump, predict};

/// Shipped schedules of kernels, one a line; made by tools/tpu/kernels/sweep.py.
const KERNELS: &str = include_str!("../../measurements/compiled/kernels.jsonl");
/// Name of that file.
pub const KERNELS_NAME: &str = "measurements/compiled/kernels.jsonl";

/// Sizes of the layer of the Systolic Linear Attention paper as read (32 value heads of 128, 8192 tokens): mechanism, and the parameters of its case.
const LAYERS: [(&str, &[(&str, &str)]); 2] = [
    (
        "kda_pallas",
        &[
            ("T", "8192"),
            ("H", "32"),
            ("Hv", "32"),
            ("K", "128"),
            ("V", "128"),
        ],
    ),
    (
        "sla_pallas",
        &[
            ("T", "8192"),
            ("H", "8"),
            ("Hv", "32"),
            ("K", "256"),
            ("V", "128"),
            ("tiles", "4"),
        ],
    ),
];
/// The public kernel of KDA: gates and norm inside, a case of its own.
const PUBLIC: &str = "kda_chunk_safe";
/// Parameters of an exact kernel in one launch with its usual Gram.
const EXACT: [(&str, &str); 2] = [("passes", "3"), ("launches", "1")];
/// Inverses that are exact and stable.
const EXACT_INVERSES: [&str; 2] = ["block_doubling", "packed_doubling"];

/// A compiled program beside its prediction.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Time of the schedule, units, memory.
    #[serde(flatten)]
    pub time: ProgramTime,
    /// The same call as a case of `tpusim predict`; none for programs of which the fast model knows nothing.
    pub case: Option<Case>,
    /// Time by the fast model with every row of the chip's generation left out, in microseconds.
    pub predicted_us: Option<f64>,
    /// Error of that prediction against the schedule, in percent.
    pub error_pct: Option<f64>,
    /// Time by the fast model with the calibration in use, in microseconds.
    pub seen_us: Option<f64>,
    /// What binds the fast model.
    pub predicted_bound: Option<String>,
    #[serde(skip)]
    params: BTreeMap<String, String>,
}

impl Row {
    /// Operation of its case.
    #[must_use]
    pub fn op(&self) -> &str {
        self.case.as_ref().map_or("", |case| case.op.as_str())
    }

    /// A parameter of its case.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.params.get(name).map(String::as_str)
    }

    fn has(&self, wanted: &[(&str, &str)]) -> bool {
        wanted
            .iter()
            .all(|(name, value)| self.parameter(name) == Some(value))
    }

    /// Whether it computes what the mechanism says, in one launch.
    fn is_exact(&self) -> bool {
        self.has(&EXACT)
            && self
                .parameter("inverse")
                .is_some_and(|inverse| EXACT_INVERSES.contains(&inverse))
            && self.parameter("gram") != Some("tile_masks")
    }

    /// Whether it is of the layer of the paper.
    fn is_of_the_layer(&self) -> bool {
        LAYERS
            .iter()
            .any(|(op, sizes)| self.op() == *op && self.has(sizes))
    }
}

/// Options of a program, as tools/tpu/kernels names them.
struct Options<'a>(&'a Schedule);

impl Options<'_> {
    fn number(&self, name: &str) -> Option<u64> {
        self.0.options.get(name)?.as_u64()
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.0.options.get(name)?.as_str()
    }

    fn is_set(&self, name: &str) -> bool {
        self.0.options.get(name).and_then(serde_json::Value::as_bool) == Some(true)
    }
}

/// The case of `tpusim predict` that a kernel of tools/tpu/kernels is; none for others, and for kernels that leave out what the mechanism asks for.
fn case_of(schedule: &Schedule) -> Option<Case> {
    if schedule.case.is_some() {
        return schedule.case.clone();
    }
    let options = Options(schedule);
    let tokens = options.number("tokens")?;
    let (op, params) = match schedule.family.as_deref()? {
        "SLA" => {
            let inverse = options.text("inverse")?;
            let keys = options.number("key_heads")?;
            if inverse == "none" {
                return None;
            }
            let params = format!(
                "B=1;T={tokens};H={keys};Hv={};K={};V={};tiles={};chunk={};heads={};chunks={};gram={};inverse={inverse};passes={};steps={};solve={};state={};front={};launches={}",
                keys * options.number("values_per_key")?,
                options.number("key_dim")?,
                options.number("value_dim")?,
                options.number("decay_tiles")?,
                options.number("chunk")?,
                options.number("heads_per_program")?,
                options.number("chunks_per_program")?,
                match options.text("gram")? {
                    "per_tile_mask" => "tile_masks",
                    folded => folded,
                },
                options.number("inverse_passes")?,
                options.number("neumann_steps").unwrap_or(4),
                if options.is_set("form_w") {
                    "wy"
                } else {
                    "remainder"
                },
                options.text("state_format")?,
                if options.is_set("front") {
                    "convolution"
                } else {
                    "none"
                },
                if options.is_set("stages") { 3 } else { 1 },
            );
            ("sla_pallas", params)
        }
        "KDA" => {
            let heads = options.number("heads")?;
            let params = format!(
                "B=1;T={tokens};H={heads};Hv={heads};K=128;V=128;chunk={};heads={};chunks={};gram=halving;inverse=packed_doubling;passes={};solve=wy;state={};front={};launches={}",
                options.number("chunk")?,
                options.number("heads_per_program")?,
                options.number("chunks_per_program")?,
                options.number("inverse_passes")?,
                options.text("state_format")?,
                if options.is_set("convolution") {
                    "convolution"
                } else if options.is_set("gated") {
                    "gates"
                } else {
                    "none"
                },
                options.number("kernels")?,
            );
            ("kda_pallas", params)
        }
        "Tokamax KDA" if options.is_set("gated") => {
            let heads = options.number("heads")?;
            (PUBLIC, format!("B=1;T={tokens};H={heads};K=128;V=128"))
        }
        _ => return None,
    };
    Some(Case {
        op: op.to_owned(),
        params,
        dtype: Dtype::Bf16.name().to_owned(),
    })
}

/// Text of a parameter list, `a=1;b=2`, by name.
fn parameters(text: &str) -> BTreeMap<String, String> {
    text.split(';')
        .filter_map(|part| part.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// The shipped schedules.
///
/// # Errors
/// A shipped file that cannot be read.
pub fn shipped() -> anyhow::Result<Vec<Schedule>> {
    Ok(read_lines(KERNELS_NAME, KERNELS)?)
}

/// The shipped programs, timed and predicted. `without_device` has fits that left a device out, by device; a device that is not among them was in no
/// fit.
///
/// # Errors
/// A shipped file that cannot be read, or a calibration without constants of schedules.
pub fn rows(without_device: &BTreeMap<String, Setting>) -> anyhow::Result<Vec<Row>> {
    let constants = hardware::shipped_calibration()
        .schedules
        .as_ref()
        .context("the calibration has no constants of schedules")?;
    let mut known: BTreeMap<&'static str, On> = BTreeMap::new();
    let mut found = Vec::new();
    for schedule in shipped()? {
        let generation = schedule.timed(KERNELS_NAME)?.generation();
        let name = generation.chip();
        if !known.contains_key(name) {
            let plain = hardware::load_uncalibrated(name)?;
            let unseen = without_device
                .get(name)
                .map_or_else(|| plain.clone(), |setting| with_setting(&plain, setting));
            let on = On {
                machine: dump::machine(constants, generation)?,
                unseen,
                seen: hardware::load(name)?.0,
            };
            known.insert(name, on);
        }
        found.push(row(&schedule, &known[name], constants)?);
    }
    Ok(found)
}

/// A generation, as the schedule and as the fast model take it.
struct On {
    machine: Machine,
    /// With every row of the generation left out.
    unseen: Chip,
    /// With the calibration in use.
    seen: Chip,
}

fn row(schedule: &Schedule, on: &On, constants: &ScheduleConstants) -> anyhow::Result<Row> {
    // Of which cores a schedule is, it says itself.
    let machine = Machine {
        cores: schedule.cores.max(1),
        ..on.machine
    };
    let time = program_time(schedule, KERNELS_NAME, &machine, constants)?;
    let case = case_of(schedule);
    let predict = |chip: &Chip| {
        let chip = chip
            .with_cores(time.cores_used.unwrap_or(on.machine.cores))
            .ok()?;
        predict::case(
            &predict::row_of(case.as_ref()?, time.chip, time.cores_used),
            &chip,
        )
        .ok()
    };
    let predicted = predict(&on.unseen);
    let predicted_us = predicted.as_ref().map(|predicted| predicted.predicted_us);
    Ok(Row {
        params: case
            .as_ref()
            .map(|case| parameters(&case.params))
            .unwrap_or_default(),
        error_pct: predicted_us.map(|us| 100.0 * (us / time.time_us - 1.0)),
        predicted_us,
        predicted_bound: predicted.map(|predicted| predicted.bound.name().to_owned()),
        seen_us: predict(&on.seen).map(|predicted| predicted.predicted_us),
        case,
        time,
    })
}

/// Errors of some programs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    /// Chip, or `all`.
    pub chip: String,
    /// Operation, or `all`.
    pub op: String,
    /// Programs.
    pub programs: usize,
    /// Median absolute error of the latency, in percent.
    pub median_abs_pct: f64,
    /// Absolute error that a tenth of the programs exceed, in percent.
    pub p90_abs_pct: f64,
    /// Median error, in percent: positive where predictions are too slow.
    pub bias_pct: f64,
}

/// Errors by chip and operation, by chip, by operation, and of all.
#[must_use]
pub fn groups(rows: &[Row]) -> Vec<Group> {
    let mut errors: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
    for row in rows {
        let Some(error) = row.error_pct else { continue };
        let (chip, op) = (row.time.chip, row.op());
        for key in [(chip, op), (chip, "all"), ("all", op), ("all", "all")] {
            let group = errors.entry((key.0.to_owned(), key.1.to_owned())).or_default();
            group.push(error);
        }
    }
    let last = |name: &str| name == "all";
    let mut groups: Vec<Group> = errors
        .into_iter()
        .map(|((chip, op), errors)| {
            let sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
            Group {
                chip,
                op,
                programs: errors.len(),
                median_abs_pct: quantile(&sizes, 0.5),
                p90_abs_pct: quantile(&sizes, 0.9),
                bias_pct: quantile(&errors, 0.5),
            }
        })
        .collect();
    groups.sort_by_key(|group| (last(&group.chip), last(&group.op)));
    groups
}

/// A kernel of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Side {
    /// Name of the program.
    pub program: String,
    /// Time of its schedule, in microseconds.
    pub schedule_us: f64,
    /// Lower end of the 80 % interval of that time, in microseconds.
    pub low_us: f64,
    /// Upper end.
    pub high_us: f64,
    /// Time by the fast model with the generation left out, in microseconds.
    pub predicted_us: Option<f64>,
    /// Its error, in percent.
    pub error_pct: Option<f64>,
}

impl Side {
    fn of(row: &Row) -> Self {
        Side {
            program: row.time.name.clone(),
            schedule_us: row.time.time_us,
            low_us: row.time.low_us,
            high_us: row.time.high_us,
            predicted_us: row.predicted_us,
            error_pct: row.error_pct,
        }
    }
}

/// KDA against SLA-R4 on one chip: a line of the leave-one-out table of the Systolic Linear Attention paper.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// Chip.
    pub chip: String,
    /// Cores that both kernels work on.
    pub cores_used: Option<u32>,
    /// Rows and columns of a matrix array.
    pub array: (u32, u32),
    /// Peak bf16 matrix FLOP/s over peak f32 vector FLOP/s.
    pub mxu_to_vpu: Option<f64>,
    /// Which kernels are compared.
    pub kernels: &'static str,
    /// KDA.
    pub kda: Side,
    /// SLA with four value heads per key head.
    pub sla_r4: Side,
    /// KDA over SLA-R4, from the schedules.
    pub speedup: f64,
    /// The same of the predictions.
    pub predicted_speedup: Option<f64>,
    /// Error of the predicted speedup, in percent.
    pub speedup_error_pct: Option<f64>,
}

/// Comparisons of the table: name; what KDA and SLA kernels have to have beside the sizes of the layer.
const COMPARISONS: [(&str, Pick, Pick); 4] = [
    ("core, one head a program", Pick::Simple, Pick::Simple),
    ("core, best blocks", Pick::Best("none"), Pick::Best("none")),
    (
        "convolution, norm and gates inside",
        Pick::Best("convolution"),
        Pick::Best("convolution"),
    ),
    (
        "public KDA kernel, best SLA core",
        Pick::Public,
        Pick::Best("none"),
    ),
];

/// Which program of a mechanism a comparison takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pick {
    /// One head and one chunk of 128 a program.
    Simple,
    /// The fastest with this front.
    Best(&'static str),
    /// The public kernel.
    Public,
}

impl Pick {
    fn of<'a>(self, rows: &'a [Row], chip: &str, op: &str) -> Option<&'a Row> {
        let op = if self == Pick::Public { PUBLIC } else { op };
        rows.iter()
            .filter(|row| row.time.chip == chip && row.op() == op)
            .filter(|row| match self {
                Pick::Public => true,
                Pick::Simple => {
                    row.is_of_the_layer()
                        && row.is_exact()
                        && row.has(&[
                            ("heads", "1"),
                            ("chunk", "128"),
                            ("chunks", "1"),
                            ("front", "none"),
                        ])
                }
                Pick::Best(front) => row.is_of_the_layer() && row.is_exact() && row.has(&[("front", front)]),
            })
            .min_by(|a, b| a.time.time_us.total_cmp(&b.time.time_us))
    }
}

/// The table: every comparison on every chip that has both programs.
///
/// # Errors
/// A shipped hardware file that cannot be read.
pub fn lines(rows: &[Row]) -> anyhow::Result<Vec<Line>> {
    let chips: BTreeSet<&str> = rows.iter().map(|row| row.time.chip).collect();
    let mut lines = Vec::new();
    for name in chips {
        let chip = hardware::load_uncalibrated(name)?;
        for (kernels, kda, sla) in COMPARISONS {
            let kda = kda.of(rows, name, LAYERS[0].0);
            let sla = sla.of(rows, name, LAYERS[1].0);
            if let (Some(kda), Some(sla)) = (kda, sla) {
                lines.push(line(&chip, kernels, kda, sla));
            }
        }
    }
    Ok(lines)
}

fn line(chip: &Chip, kernels: &'static str, kda: &Row, sla: &Row) -> Line {
    let (speedup, predicted_speedup) = speedups(kda, sla);
    let vector = chip.vector_flops_per_second().get();
    Line {
        chip: chip.name.clone(),
        cores_used: sla.time.cores_used,
        array: (chip.matrix_unit.rows, chip.matrix_unit.columns),
        mxu_to_vpu: chip
            .matrix_flops_per_second(Dtype::Bf16)
            .map(|matrix| matrix.get() / vector),
        kernels,
        kda: Side::of(kda),
        sla_r4: Side::of(sla),
        speedup,
        predicted_speedup,
        speedup_error_pct: predicted_speedup.map(|predicted| 100.0 * (predicted / speedup - 1.0)),
    }
}

/// KDA over SLA, from the schedules and from the predictions.
fn speedups(kda: &Row, sla: &Row) -> (f64, Option<f64>) {
    let predicted = kda.predicted_us.zip(sla.predicted_us).map(|(kda, sla)| kda / sla);
    (kda.time.time_us / sla.time.time_us, predicted)
}

/// Errors of predicted speedups, in percent: every KDA kernel of the layer against every SLA-R4 kernel with the same chunk, programs, front and launches on the same chip.
#[must_use]
pub fn speedup_errors(rows: &[Row]) -> Vec<f64> {
    const EQUAL: [&str; 5] = ["chunk", "heads", "chunks", "front", "launches"];
    let of = |op: &'static str| {
        rows.iter()
            .filter(move |row| row.op() == op && row.is_of_the_layer() && row.is_exact())
    };
    of(LAYERS[0].0)
        .flat_map(|kda| {
            of(LAYERS[1].0)
                .filter(|sla| {
                    sla.time.chip == kda.time.chip
                        && sla.time.cores_used == kda.time.cores_used
                        && EQUAL
                            .iter()
                            .all(|name| sla.parameter(name) == kda.parameter(name))
                })
                .filter_map(|sla| {
                    let (speedup, predicted) = speedups(kda, sla);
                    Some(100.0 * (predicted? / speedup - 1.0))
                })
        })
        .collect()
}

/// Choices of a kernel, and the parameters in which they show.
const CHOICES: [(&str, &[&str]); 10] = [
    ("key heads", &["H"]),
    ("decay tiles", &["tiles"]),
    ("Gram", &["gram"]),
    ("inverse", &["inverse", "passes", "steps"]),
    ("solve", &["solve"]),
    ("launches", &["launches"]),
    ("before the core", &["front"]),
    ("state", &["state"]),
    ("chunk", &["chunk", "chunks"]),
    ("heads per program", &["heads"]),
];

/// A kernel that differs in one choice from another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Chip.
    pub chip: String,
    /// Operation.
    pub op: String,
    /// The choice.
    pub choice: &'static str,
    /// Its value, as parameters.
    pub value: String,
    /// Its value in the kernel that it is compared with.
    pub from: String,
    /// Time of the schedule, in microseconds.
    pub schedule_us: f64,
    /// Time over that of the kernel it is compared with.
    pub factor: f64,
    /// The same of the predictions.
    pub predicted_factor: Option<f64>,
}

impl Row {
    /// The only choice in which another kernel differs.
    fn choice_against(&self, other: &Row) -> Option<(&'static str, &'static [&'static str])> {
        let names: BTreeSet<&String> = self.params.keys().chain(other.params.keys()).collect();
        let differ: Vec<&str> = names
            .into_iter()
            .filter(|name| self.params.get(*name) != other.params.get(*name))
            .map(String::as_str)
            .collect();
        CHOICES
            .iter()
            .find(|(_, of)| !differ.is_empty() && differ.iter().all(|name| of.contains(name)))
            .map(|&(choice, of)| (choice, of))
    }

    fn value_of(&self, names: &[&str]) -> String {
        let given = names
            .iter()
            .filter_map(|name| Some(format!("{name}={}", self.parameter(name)?)));
        given.collect::<Vec<String>>().join(" ")
    }

    fn is_comparable(&self, other: &Row) -> bool {
        self.time.chip == other.time.chip && self.op() == other.op() && !self.params.is_empty()
    }
}

/// What single choices of a kernel contribute: on every chip the kernel of an operation with most neighbours, and those.
#[must_use]
pub fn changes(rows: &[Row]) -> Vec<Change> {
    let kinds: BTreeSet<(&str, &str)> = rows
        .iter()
        .filter(|row| row.case.is_some())
        .map(|row| (row.op(), row.time.chip))
        .collect();
    let mut found = Vec::new();
    for (op, chip) in kinds {
        let of: Vec<&Row> = rows
            .iter()
            .filter(|row| row.op() == op && row.time.chip == chip)
            .collect();
        let neighbours = |base: &Row| -> Vec<(&Row, &'static str, &'static [&'static str])> {
            of.iter()
                .filter(|row| row.is_comparable(base))
                .filter_map(|row| {
                    let (choice, names) = row.choice_against(base)?;
                    Some((*row, choice, names))
                })
                .collect()
        };
        // Of equals the first by name.
        let Some(base) = of
            .iter()
            .rev()
            .max_by_key(|row| neighbours(row).len())
            .filter(|row| !neighbours(row).is_empty())
        else {
            continue;
        };
        let of_base = neighbours(base).into_iter().map(|(row, choice, names)| Change {
            chip: chip.to_owned(),
            op: op.to_owned(),
            choice,
            value: row.value_of(names),
            from: base.value_of(names),
            schedule_us: row.time.time_us,
            factor: row.time.time_us / base.time.time_us,
            predicted_factor: row
                .predicted_us
                .zip(base.predicted_us)
                .map(|(one, other)| one / other),
        });
        found.extend(of_base);
    }
    // Two lists of options may come to one kernel.
    found.sort_by(|a, b| {
        let order = |change: &Change| CHOICES.iter().position(|(choice, _)| *choice == change.choice);
        (&a.op, order(a), &a.value, &a.chip).cmp(&(&b.op, order(b), &b.value, &b.chip))
    });
    found.dedup_by(|a, b| (&a.op, a.choice, &a.value, &a.chip) == (&b.op, b.choice, &b.value, &b.chip));
    found
}

/// A time that the Systolic Linear Attention paper prints for TPU v7x, beside compiled kernels.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Published {
    /// What was timed.
    pub what: &'static str,
    /// Microseconds, or a ratio of times.
    pub published: f64,
    /// `us` or `ratio`.
    pub unit: &'static str,
    /// Kernels of one head and one chunk a program: the plain structure.
    pub simple: Option<f64>,
    /// Fastest kernels with one chunk a program.
    pub best: Option<f64>,
}

/// Where the paper's figures stand.
const PUBLISHED: (&str, &str) = (
    "measurements/published.csv",
    include_str!("../../measurements/published.csv"),
);

/// A line of the comparison with the paper: what; operation and parts of the parameters of the published row; operation, and what the compiled kernel has to have
/// beside being exact.
type Wanted = (
    &'static str,
    (&'static str, &'static [&'static str]),
    (&'static str, &'static [(&'static str, &'static str)]),
);

const FORWARD: &[&str] = &["regime=moe", "pass=forward"];
const CORES: [Wanted; 5] = [
    (
        "core, SLA-R4",
        ("sla_r4_core", FORWARD),
        (
            "sla_pallas",
            &[
                ("T", "8192"),
                ("H", "8"),
                ("Hv", "32"),
                ("tiles", "4"),
                ("front", "none"),
                ("chunks", "1"),
            ],
        ),
    ),
    (
        "core, SLA-R2",
        ("sla_r2_core", FORWARD),
        (
            "sla_pallas",
            &[
                ("T", "8192"),
                ("H", "16"),
                ("Hv", "32"),
                ("tiles", "4"),
                ("front", "none"),
                ("chunks", "1"),
            ],
        ),
    ),
    (
        "core, Tokamax KDA",
        ("kda_core", &["regime=moe", "pass=forward", "impl=tokamax"]),
        (PUBLIC, &[("T", "8192"), ("H", "32")]),
    ),
    (
        "ops 2 to 7a, SLA-R4",
        ("sla_r4_layer_stage", &["stage=op2-7a"]),
        (
            "sla_pallas",
            &[
                ("T", "8192"),
                ("H", "8"),
                ("Hv", "32"),
                ("tiles", "4"),
                ("front", "convolution"),
                ("chunks", "1"),
            ],
        ),
    ),
    (
        "ops 2 to 7a, KDA",
        ("kda_layer_stage", &["stage=op2-7a"]),
        (
            "kda_pallas",
            &[("T", "8192"), ("H", "32"), ("front", "convolution")],
        ),
    ),
];
/// Ratios of those lines.
const RATIOS: [(&str, &str, &str); 4] = [
    ("core, SLA-R2 over SLA-R4", "core, SLA-R2", "core, SLA-R4"),
    (
        "core, Tokamax KDA over SLA-R4",
        "core, Tokamax KDA",
        "core, SLA-R4",
    ),
    (
        "core, Tokamax KDA over SLA-R2",
        "core, Tokamax KDA",
        "core, SLA-R2",
    ),
    (
        "ops 2 to 7a, KDA over SLA-R4",
        "ops 2 to 7a, KDA",
        "ops 2 to 7a, SLA-R4",
    ),
];
/// Chip of the paper's tables.
const PAPER_CHIP: &str = "tpu-v7x";

/// The paper's figures beside compiled kernels.
///
/// # Errors
/// A shipped file that is malformed.
pub fn published(rows: &[Row]) -> anyhow::Result<Vec<Published>> {
    let table = measurements::parse(PUBLISHED.0, PUBLISHED.1.as_bytes())?;
    let mut lines = Vec::new();
    for (what, (op, parts), (compiled, wanted)) in CORES {
        let of_paper = table.rows.iter().find(|row| {
            row.op == op
                && parts
                    .iter()
                    .all(|part| row.params.split(';').any(|own| own == *part))
        });
        let Some(published) = of_paper.and_then(|row| row.latency_us) else {
            continue;
        };
        let of = |simple: bool| {
            rows.iter()
                .filter(|row| row.time.chip == PAPER_CHIP && row.op() == compiled && row.has(wanted))
                .filter(|row| compiled == PUBLIC || row.is_exact())
                .filter(|row| {
                    !simple
                        || compiled == PUBLIC
                        || row.has(&[("heads", "1"), ("chunk", "128"), ("chunks", "1")])
                })
                .map(|row| row.time.time_us)
                .min_by(f64::total_cmp)
        };
        lines.push(Published {
            what,
            published,
            unit: "us",
            simple: of(true),
            best: of(false),
        });
    }
    let ratios: Vec<Published> = RATIOS
        .into_iter()
        .filter_map(|(what, above, below)| {
            let find = |name: &str| lines.iter().find(|line| line.what == name);
            let (above, below) = (find(above)?, find(below)?);
            let ratio = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a / b);
            Some(Published {
                what,
                published: above.published / below.published,
                unit: "ratio",
                simple: ratio(above.simple, below.simple),
                best: ratio(above.best, below.best),
            })
        })
        .collect();
    lines.extend(ratios);
    Ok(lines)
}
