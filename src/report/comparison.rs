//! Two results beside each other, and the formats of that: text, CSV and JSON (schema `tpusim.comparison/1`, docs/formats.md).

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::result::Bound;
use super::table::{Cell, Column, Table};

/// Name and version of the JSON schema.
pub const SCHEMA: &str = "tpusim.comparison/1";

/// One of the two things that are compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// What was asked for: a workload or a result.
    pub source: String,
    /// Name of the workload.
    pub name: String,
    /// The layer in one line.
    pub layer: String,
    /// Version of tpusim that predicted it.
    pub version: String,
    /// Digest of the workload, overrides included.
    pub workload_digest: String,
    /// Digest of the hardware descriptions.
    pub hardware_digest: String,
    /// Digest of the calibration.
    pub calibration_digest: String,
    /// Overrides of the run.
    pub overrides: Vec<String>,
}

/// What a difference is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Version of tpusim.
    Version,
    /// A fitted value.
    Calibration,
    /// A field of the workload.
    Workload,
    /// A field of a chip.
    Hardware,
}

impl Part {
    /// The word of tables and data.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Part::Version => "version",
            Part::Calibration => "calibration",
            Part::Workload => "workload",
            Part::Hardware => "hardware",
        }
    }
}

/// A field that is not the same on both sides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// What it is a field of.
    pub part: Part,
    /// Field; of a chip with its name in front.
    pub field: String,
    /// Value of A; absent where A has no such field.
    pub a: Option<String>,
    /// Value of B.
    pub b: Option<String>,
}

/// What the interval of a speedup rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpeedupEvidence {
    /// Both sides run the very same kernels, whose errors are the same whatever they are.
    SameKernels,
    /// Errors of ratios of such kernels on one chip, out of fold: what is off for both sides cancels.
    Ratios,
    /// Errors of either side, taken as independent: another chip, another family of kernels, another calibration.
    Independent,
}

impl SpeedupEvidence {
    /// The word of data files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            SpeedupEvidence::SameKernels => "same_kernels",
            SpeedupEvidence::Ratios => "ratios",
            SpeedupEvidence::Independent => "independent",
        }
    }
}

/// The time of A over that of B: above 1, B is faster.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Speedup {
    /// Predicted ratio.
    pub ratio: f64,
    /// Lower end of its 80 % interval; absent where nothing comparable was measured.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
    /// What the interval rests on.
    pub interval_from: Option<SpeedupEvidence>,
}

/// A row of one side.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RowSide {
    /// Predicted time.
    pub time_us: f64,
    /// What binds it.
    pub bound: Bound,
    /// What would bind it next.
    pub next_bound: Bound,
}

/// A row of either or both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RowPair {
    /// Kind of layers, where a side is a stack; the times are those of all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<String>,
    /// Stage or span of stages.
    pub stage: String,
    /// What happens in it; in A, where both have it.
    pub title: String,
    /// A; absent where only B has the row.
    pub a: Option<RowSide>,
    /// B.
    pub b: Option<RowSide>,
    /// A over B, where both have the row.
    pub speedup: Option<Speedup>,
}

impl RowPair {
    /// `op6`, or `KDA: op6` where a side is a stack.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.layers {
            Some(layers) => format!("{layers}: {}", self.stage),
            None => self.stage.clone(),
        }
    }

    /// Whether another unit binds B than A.
    #[must_use]
    pub fn bound_changes(&self) -> bool {
        self.a.zip(self.b).is_some_and(|(a, b)| a.bound != b.bound)
    }

    /// `hbm`, or `latency -> mxu` where the bound changes.
    fn bounds(&self) -> String {
        match (self.a, self.b) {
            (Some(a), Some(b)) if a.bound != b.bound => format!("{} -> {}", a.bound, b.bound),
            (Some(row), _) | (None, Some(row)) => row.bound.to_string(),
            (None, None) => String::new(),
        }
    }
}

/// Layers of one kind of one side.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LayerSide {
    /// Layers.
    pub count: u64,
    /// Predicted time of all of them.
    pub time_us: f64,
}

/// Layers of one kind of either or both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerPair {
    /// Name of the kind, or both names.
    pub name: String,
    /// A; absent where only B has such layers.
    pub a: Option<LayerSide>,
    /// B.
    pub b: Option<LayerSide>,
    /// All of A over all of B, where both have such layers.
    pub speedup: Option<Speedup>,
}

/// A plan of both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanPair {
    /// Plan of A.
    pub a: String,
    /// Plan of B.
    pub b: String,
    /// Total of A.
    pub a_us: f64,
    /// Total of B.
    pub b_us: f64,
    /// Total of A over that of B.
    pub speedup: Speedup,
    /// Kinds of layers, in the order of A, then those of B alone; none where each side is one layer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerPair>,
    /// Rows, in the order of A; those of B alone before the row they precede.
    pub rows: Vec<RowPair>,
}

impl PlanPair {
    /// `fused`, or `unfused | fused` where the sides have different ones.
    fn name(&self) -> String {
        both(&self.a, &self.b)
    }
}

/// A chip of both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChipPair {
    /// Chip of A.
    pub a: String,
    /// Chip of B.
    pub b: String,
    /// What was timed in A.
    pub a_device: String,
    /// What was timed in B.
    pub b_device: String,
    /// Plans of both.
    pub plans: Vec<PlanPair>,
    /// Plans of one side alone: `A` or `B`, and the plan.
    pub unpaired_plans: Vec<String>,
}

/// Two results beside each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// [`SCHEMA`].
    pub schema: String,
    /// What to know before any number is read: different versions, different calibrations, inputs that are not recorded.
    pub cautions: Vec<String>,
    /// The answer in one line.
    pub headline: String,
    /// Whether version, calibration, workload and hardware are the same.
    pub identical: bool,
    /// The one side.
    pub a: Side,
    /// The other.
    pub b: Side,
    /// Fields that are not the same.
    pub differences: Vec<Difference>,
    /// Chips of both sides.
    pub chips: Vec<ChipPair>,
    /// Chips of one side alone: `A` or `B`, and the chip.
    pub unpaired_chips: Vec<String>,
    /// Warnings of the runs, with the side they are of in front.
    pub warnings: Vec<String>,
}

/// A name, or both where they differ.
pub(crate) fn both(a: &str, b: &str) -> String {
    if a == b {
        a.to_owned()
    } else {
        format!("{a} | {b}")
    }
}

/// `1.70 to 2.40`, or `none`.
fn interval(speedup: Speedup) -> String {
    speedup.low.zip(speedup.high).map_or_else(
        || "none".to_owned(),
        |(low, high)| format!("{low:.2} to {high:.2}"),
    )
}

fn times(chip: &ChipPair) -> Table {
    let mut table = Table::new([
        Column::text("stage", "stage"),
        Column::text("title", "title"),
        Column::number("A (us)", "a_us"),
        Column::number("B (us)", "b_us"),
        Column::number("speedup", "speedup_ratio"),
        Column::text("80 % interval", "interval"),
        Column::text("bound, A -> B", "bound"),
    ]);
    let empty = || Cell::from("");
    for plan in &chip.plans {
        table.row([
            Cell::from(plan.name()),
            empty(),
            empty(),
            empty(),
            empty(),
            empty(),
            empty(),
        ]);
        for row in plan.rows.iter().filter(|row| row.layers.is_none()) {
            time_row(&mut table, "  ", row);
        }
        for layers in &plan.layers {
            let count = |side: Option<LayerSide>| side.map_or(0, |side| side.count).to_string();
            let counts = both(&count(layers.a), &count(layers.b));
            table.row([
                Cell::from(format!("  {} x {}", counts, layers.name)),
                empty(),
                Cell::optional(layers.a.map(|a| a.time_us), 1),
                Cell::optional(layers.b.map(|b| b.time_us), 1),
                Cell::optional(layers.speedup.map(|s| s.ratio), 2),
                Cell::from(layers.speedup.map_or_else(String::new, interval)),
                empty(),
            ]);
            let own = |row: &&RowPair| row.layers.as_ref() == Some(&layers.name);
            for row in plan.rows.iter().filter(own) {
                time_row(&mut table, "    ", row);
            }
        }
        table.row([
            Cell::from("  total"),
            empty(),
            Cell::number(plan.a_us, 1),
            Cell::number(plan.b_us, 1),
            Cell::number(plan.speedup.ratio, 2),
            Cell::from(interval(plan.speedup)),
            empty(),
        ]);
    }
    table
}

fn time_row(table: &mut Table, indent: &str, row: &RowPair) {
    let only = match (row.a, row.b) {
        (Some(_), None) => "only in A",
        (None, Some(_)) => "only in B",
        _ => "",
    };
    table.row([
        Cell::from(format!("{indent}{}", row.stage)),
        Cell::from(&row.title),
        Cell::optional(row.a.map(|a| a.time_us), 1),
        Cell::optional(row.b.map(|b| b.time_us), 1),
        Cell::optional(row.speedup.map(|s| s.ratio), 2),
        Cell::from(row.speedup.map_or_else(|| only.to_owned(), interval)),
        Cell::from(row.bounds()),
    ]);
}

fn differences(comparison: &Comparison) -> Table {
    let mut table = Table::new([
        Column::text("of", "part"),
        Column::text("field", "field"),
        Column::text("A", "a"),
        Column::text("B", "b"),
    ]);
    for difference in &comparison.differences {
        let value = |value: &Option<String>| {
            value
                .as_ref()
                .map_or_else(Cell::none, |value| Cell::from(value.as_str()))
        };
        table.row([
            Cell::from(difference.part.name()),
            Cell::from(&difference.field),
            value(&difference.a),
            value(&difference.b),
        ]);
    }
    table
}

/// Writes the tables for a terminal.
///
/// # Errors
/// Where the writer fails.
pub fn write_text(mut out: impl Write, comparison: &Comparison) -> io::Result<()> {
    for caution in &comparison.cautions {
        writeln!(out, "caution: {caution}")?;
    }
    writeln!(out, "{}", comparison.headline)?;
    for (letter, side) in [("A", &comparison.a), ("B", &comparison.b)] {
        writeln!(out, "{letter}: {} ({}): {}", side.name, side.source, side.layer)?;
        for item in &side.overrides {
            writeln!(out, "{letter}: override {item}")?;
        }
    }
    writeln!(out)?;
    if comparison.identical {
        writeln!(out, "inputs are identical")?;
    } else if comparison.differences.is_empty() {
        writeln!(out, "inputs differ in nothing that a time depends on")?;
    } else {
        writeln!(out, "inputs that differ")?;
        differences(comparison).write_text(&mut out)?;
    }
    for chip in &comparison.chips {
        writeln!(
            out,
            "\n{}: {}",
            both(&chip.a, &chip.b),
            both(&chip.a_device, &chip.b_device)
        )?;
        times(chip).write_text(&mut out)?;
        if !chip.unpaired_plans.is_empty() {
            writeln!(out, "plans of one side alone: {}", chip.unpaired_plans.join(", "))?;
        }
    }
    if !comparison.unpaired_chips.is_empty() {
        writeln!(
            out,
            "\nchips of one side alone: {}",
            comparison.unpaired_chips.join(", ")
        )?;
    }
    for warning in &comparison.warnings {
        writeln!(out, "warning: {warning}")?;
    }
    writeln!(
        out,
        "\nspeedup: time of A over time of B, above 1 where B is faster; its interval is that of errors of ratios, in which what is off on both sides cancels"
    )?;
    for (letter, side) in [("A", &comparison.a), ("B", &comparison.b)] {
        writeln!(
            out,
            "{letter} made by: tpusim {}; hardware {}; workload {}; calibration {}",
            side.version, side.hardware_digest, side.workload_digest, side.calibration_digest
        )?;
    }
    Ok(())
}

/// Writes one row per pair of chips, pair of plans, kind of layers and stage, totals as a stage of their own; every number has its unit in the header.
///
/// # Errors
/// Where the writer fails.
pub fn write_csv(mut out: impl Write, comparison: &Comparison) -> io::Result<()> {
    let mut table = Table::new(
        [
            "a_chip",
            "b_chip",
            "a_plan",
            "b_plan",
            "layers",
            "stage",
            "title",
            "a_us",
            "b_us",
            "speedup_ratio",
            "speedup_low_ratio",
            "speedup_high_ratio",
            "interval_from",
            "a_bound",
            "b_bound",
            "a_next_bound",
            "b_next_bound",
        ]
        .map(|name| Column::text(name, name)),
    );
    let bound = |bound: Option<Bound>| Cell::from(bound.map_or("", Bound::name));
    for chip in &comparison.chips {
        for plan in &chip.plans {
            let start = || {
                [&chip.a, &chip.b, &plan.a, &plan.b]
                    .map(|name| Cell::from(name.as_str()))
                    .into_iter()
            };
            let speedup = |speedup: Option<Speedup>| {
                [
                    Cell::optional(speedup.map(|s| s.ratio), 3),
                    Cell::optional(speedup.and_then(|s| s.low), 3),
                    Cell::optional(speedup.and_then(|s| s.high), 3),
                    Cell::from(
                        speedup
                            .and_then(|s| s.interval_from)
                            .map_or("", SpeedupEvidence::name),
                    ),
                ]
            };
            for row in &plan.rows {
                table.row(
                    start()
                        .chain([
                            Cell::from(row.layers.as_deref().unwrap_or("")),
                            Cell::from(&row.stage),
                            Cell::from(&row.title),
                            Cell::optional(row.a.map(|a| a.time_us), 3),
                            Cell::optional(row.b.map(|b| b.time_us), 3),
                        ])
                        .chain(speedup(row.speedup))
                        .chain([
                            bound(row.a.map(|a| a.bound)),
                            bound(row.b.map(|b| b.bound)),
                            bound(row.a.map(|a| a.next_bound)),
                            bound(row.b.map(|b| b.next_bound)),
                        ]),
                );
            }
            for layers in &plan.layers {
                table.row(
                    start()
                        .chain([
                            Cell::from(&layers.name),
                            Cell::from("total"),
                            Cell::from(""),
                            Cell::optional(layers.a.map(|a| a.time_us), 3),
                            Cell::optional(layers.b.map(|b| b.time_us), 3),
                        ])
                        .chain(speedup(layers.speedup))
                        .chain([bound(None), bound(None), bound(None), bound(None)]),
                );
            }
            table.row(
                start()
                    .chain([
                        Cell::from(""),
                        Cell::from("total"),
                        Cell::from(""),
                        Cell::number(plan.a_us, 3),
                        Cell::number(plan.b_us, 3),
                    ])
                    .chain(speedup(Some(plan.speedup)))
                    .chain([bound(None), bound(None), bound(None), bound(None)]),
            );
        }
    }
    table.write_csv(&mut out)
}
