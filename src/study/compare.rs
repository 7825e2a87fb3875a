//! Two results beside each other, stage by stage, with intervals of their ratios.
//!
//! Errors of a prediction have a part that belongs to the chip and to the family of kernels: a bandwidth that is a tenth too high makes every kernel of the
//! family a tenth too fast, and the ratio of two of them is right all the same. The interval of a ratio is therefore no quotient of two intervals. It is made
//! of errors of ratios: of pairs of measured rows of one family on one device, predicted out of fold ([`StageResult::speedup_error_ratio`]).
//!
//! The logarithm of a speedup is off, to first order, by the errors of the rows weighed with their shares of their totals. Errors of one family on a side go
//! together; with shares `p` in A and `q` in B, the family adds
//!
//! ```text
//! (min(p, q) - s) ln e  +  |p - q| w
//! ```
//!
//! to the half-width: `e` is the factor that ratios of the family are off by, `w` the half-width of the interval of one time, for what one side has more of,
//! and `s` the share of rows that are the very same kernel on both sides, whose error is the same whatever it is. Different families are independent, so their
//! parts add in squares. The interval of a time need not be centred on it; its centre shifts that of the ratio by `(p - q)` times as much.
//!
//! On different chips, or with different versions or calibrations, nothing cancels: the half-widths of the two totals add in squares.
//!
//! A stack is compared kind by kind of its layers, and each kind row by row. The layers of a kind are one kernel run many times, so a row counts with all of
//! them, and its errors go together.

use std::collections::{BTreeMap, BTreeSet};

use super::stack::StackRun;
use crate::report::comparison::{
    ChipPair, Comparison, Difference, LayerPair, LayerSide, Part, PlanPair, RowPair, RowSide, SCHEMA, Side,
    Speedup, SpeedupEvidence, both,
};
use crate::report::result::{ChipResult, Inputs, PlanResult, RunResult, StageResult};

/// Why two results cannot be compared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// No chip of one side is paired with one of the other.
    #[error(
        "no chip is on both sides: A has {a}, B has {b}; choose with `--hw`, or one for each side with `--hw-a` and `--hw-b`"
    )]
    NoChip {
        /// Chips of A.
        a: String,
        /// Chips of B.
        b: String,
    },
    /// No plan of one side is paired with one of the other.
    #[error(
        "no plan is on both sides: A has {a}, B has {b}; choose one for each side, for instance with `--set-a 'plans=[fused]'`"
    )]
    NoPlan {
        /// Plans of A.
        a: String,
        /// Plans of B.
        b: String,
    },
}

/// What is compared.
#[derive(Debug, Clone, Copy)]
pub enum Compared<'r> {
    /// One layer.
    Layer(&'r RunResult),
    /// The layers of a stack.
    Stack(&'r StackRun),
}

impl<'r> From<&'r RunResult> for Compared<'r> {
    fn from(run: &'r RunResult) -> Self {
        Compared::Layer(run)
    }
}

impl<'r> From<&'r StackRun> for Compared<'r> {
    fn from(stack: &'r StackRun) -> Self {
        Compared::Stack(stack)
    }
}

/// Layers of one kind on one side.
#[derive(Debug, Clone, Copy)]
struct Layers<'r> {
    name: &'r str,
    count: u64,
    run: &'r RunResult,
}

impl<'r> Layers<'r> {
    /// One of the layers in a plan on a chip.
    fn plan(&self, chip: &str, plan: &str) -> Option<&'r PlanResult> {
        let chip = self.run.chips.iter().find(|of| of.name == chip)?;
        chip.plans.iter().find(|of| of.name == plan)
    }
}

/// A side with its kinds of layers, each timed on the same chips in the same plans.
#[derive(Debug)]
struct Taken<'r> {
    name: &'r str,
    kinds: Vec<Layers<'r>>,
    workload_digest: String,
    overrides: &'r [String],
    stack: bool,
}

impl<'r> Taken<'r> {
    fn of(side: Compared<'r>) -> Self {
        match side {
            Compared::Layer(run) => Taken {
                name: &run.name,
                kinds: vec![Layers {
                    name: &run.name,
                    count: 1,
                    run,
                }],
                workload_digest: run.provenance.workload_digest.clone(),
                overrides: &run.provenance.overrides,
                stack: false,
            },
            Compared::Stack(stack) => Taken {
                name: &stack.name,
                kinds: stack
                    .layers
                    .iter()
                    .map(|layer| Layers {
                        name: &layer.name,
                        count: layer.count,
                        run: &layer.run,
                    })
                    .collect(),
                workload_digest: stack.workload_digest.clone(),
                overrides: &stack.overrides,
                stack: true,
            },
        }
    }

    /// Kinds are timed with one version and calibration, on the same chips.
    fn first(&self) -> Option<&'r RunResult> {
        self.kinds.first().map(|kind| kind.run)
    }

    fn chips(&self) -> &'r [ChipResult] {
        self.first().map_or(&[], |run| &run.chips)
    }

    /// Time of all layers in a plan, in microseconds.
    fn total_us(&self, chip: &str, plan: &str) -> f64 {
        let of_kind = |kind: &Layers<'_>| kind.plan(chip, plan).map(|of| kind.count as f64 * of.total_us);
        self.kinds.iter().filter_map(of_kind).sum()
    }

    /// What it is, in one line.
    fn describe(&self) -> String {
        let kinds = self.kinds.iter().map(|kind| {
            if self.stack {
                format!("{} x {}: {}", kind.count, kind.name, kind.run.layer)
            } else {
                kind.run.layer.clone()
            }
        });
        kinds.collect::<Vec<_>>().join("; ")
    }

    fn warnings(&self) -> Vec<String> {
        let of_kind = |kind: &Layers<'_>| -> Vec<String> {
            let prefix = if self.stack {
                format!("{}: ", kind.name)
            } else {
                String::new()
            };
            let warnings = kind.run.warnings.iter();
            warnings.map(|warning| format!("{prefix}{warning}")).collect()
        };
        self.kinds.iter().flat_map(of_kind).collect()
    }
}

/// Layers of one kind beside each other.
#[derive(Debug)]
struct KindPair<'r> {
    /// Name of the kind; none where each side is one layer.
    label: Option<String>,
    a: Option<Layers<'r>>,
    b: Option<Layers<'r>>,
}

/// Kinds of layers of both sides, in the order of A, then those of B alone. Names pair them; those left are paired in order where there are as many on
/// either side.
fn pair_kinds<'r>(a: &Taken<'r>, b: &Taken<'r>) -> Vec<KindPair<'r>> {
    let mut of_a: Vec<(Layers<'r>, Option<usize>)> = Vec::new();
    let mut free: Vec<usize> = (0..b.kinds.len()).collect();
    for kind in &a.kinds {
        let found = free.iter().position(|&at| b.kinds[at].name == kind.name);
        of_a.push((*kind, found.map(|found| free.remove(found))));
    }
    if of_a.iter().filter(|(_, found)| found.is_none()).count() == free.len() {
        let left = of_a.iter_mut().filter(|(_, found)| found.is_none());
        for ((_, found), at) in left.zip(free.drain(..)) {
            *found = Some(at);
        }
    }
    let labelled = a.stack || b.stack;
    let pair = |a: Option<Layers<'r>>, b: Option<Layers<'r>>| KindPair {
        label: labelled.then(|| {
            let names = [a, b].map(|kind| kind.map(|kind| kind.name));
            both(
                names[0].or(names[1]).unwrap_or(""),
                names[1].or(names[0]).unwrap_or(""),
            )
        }),
        a,
        b,
    };
    let paired = of_a
        .into_iter()
        .map(|(kind, found)| pair(Some(kind), found.map(|at| b.kinds[at])));
    let alone = free.iter().map(|&at| pair(None, Some(b.kinds[at])));
    paired.chain(alone).collect()
}

/// Compares `a` with `b`; `sources` say where they come from.
///
/// Chips and plans are paired by name. Where no name is on both sides and each has exactly one, those are paired. Kinds of layers of a stack are paired by
/// name, those that are left in order where there are as many on either side; a workload of one layer is a stack of one.
///
/// # Errors
/// Where nothing can be paired.
pub fn compare<'r>(
    a: impl Into<Compared<'r>>,
    b: impl Into<Compared<'r>>,
    sources: (&str, &str),
) -> Result<Comparison, CompareError> {
    let (a, b) = (Taken::of(a.into()), Taken::of(b.into()));
    let (paired, unpaired_chips) = pair(a.chips(), b.chips(), |chip| &chip.name);
    let (Some(first_a), Some(first_b), false) = (a.first(), b.first(), paired.is_empty()) else {
        return Err(CompareError::NoChip {
            a: names(a.chips(), |chip| &chip.name),
            b: names(b.chips(), |chip| &chip.name),
        });
    };
    let (of_a, of_b) = (&first_a.provenance, &first_b.provenance);
    let version = of_a.version == of_b.version;
    let calibration = of_a.calibration_digest == of_b.calibration_digest;
    let kinds = pair_kinds(&a, &b);
    let mut chips = Vec::new();
    for (of_a, of_b) in &paired {
        // What is off for a chip is off on both sides only where the same model predicts the same chip.
        let common = version && calibration && of_a.name == of_b.name;
        let (plans, unpaired_plans) = pair(&of_a.plans, &of_b.plans, |plan| &plan.name);
        if plans.is_empty() {
            return Err(CompareError::NoPlan {
                a: names(&of_a.plans, |plan| &plan.name),
                b: names(&of_b.plans, |plan| &plan.name),
            });
        }
        chips.push(ChipPair {
            a: of_a.name.clone(),
            b: of_b.name.clone(),
            a_device: of_a.device.clone(),
            b_device: of_b.device.clone(),
            plans: plans
                .into_iter()
                .map(|(plan_a, plan_b)| {
                    let totals = (
                        a.total_us(&of_a.name, &plan_a.name),
                        b.total_us(&of_b.name, &plan_b.name),
                    );
                    plan_pair(&kinds, (of_a, plan_a), (of_b, plan_b), totals, common)
                })
                .collect(),
            unpaired_plans,
        });
    }
    let differences = differences((first_a, first_b), &kinds, &paired);
    let mut comparison = Comparison {
        schema: SCHEMA.to_owned(),
        cautions: cautions(&a, &b),
        headline: String::new(),
        identical: version
            && calibration
            && differences.is_empty()
            && a.workload_digest == b.workload_digest
            && of_a.hardware_digest == of_b.hardware_digest
            && unpaired_chips.is_empty(),
        a: side(&a, first_a, sources.0),
        b: side(&b, first_b, sources.1),
        differences,
        chips,
        unpaired_chips,
        warnings: warnings(&a.warnings(), &b.warnings()),
    };
    comparison.headline = headline(&comparison);
    Ok(comparison)
}

fn names<T>(items: &[T], name: impl Fn(&T) -> &String) -> String {
    if items.is_empty() {
        return "none".to_owned();
    }
    crate::config::listed(items.iter().map(name))
}

/// Items of both sides, in the order of A, and the names of those of one side alone.
fn pair<'r, T>(a: &'r [T], b: &'r [T], name: impl Fn(&T) -> &String) -> (Vec<(&'r T, &'r T)>, Vec<String>) {
    let same: Vec<(&T, &T)> = a
        .iter()
        .filter_map(|of_a| Some((of_a, b.iter().find(|of_b| name(of_b) == name(of_a))?)))
        .collect();
    if let ([], [of_a], [of_b]) = (same.as_slice(), a, b) {
        return (vec![(of_a, of_b)], Vec::new());
    }
    let alone = |letter: &str, own: &[T], other: &[T]| -> Vec<String> {
        own.iter()
            .filter(|item| !other.iter().any(|of| name(of) == name(item)))
            .map(|item| format!("{letter} {}", name(item)))
            .collect()
    };
    let unpaired = [alone("A", a, b), alone("B", b, a)].concat();
    (same, unpaired)
}

fn side(taken: &Taken<'_>, first: &RunResult, source: &str) -> Side {
    let from = &first.provenance;
    Side {
        source: source.to_owned(),
        name: taken.name.to_owned(),
        layer: taken.describe(),
        version: from.version.clone(),
        workload_digest: taken.workload_digest.clone(),
        hardware_digest: from.hardware_digest.clone(),
        calibration_digest: from.calibration_digest.clone(),
        overrides: taken.overrides.to_vec(),
    }
}

fn cautions(a: &Taken<'_>, b: &Taken<'_>) -> Vec<String> {
    let mut cautions = Vec::new();
    let models =
        "the speedups compare two models as well as two designs, and no error cancels; run both again";
    if let (Some(of_a), Some(of_b)) = (a.first(), b.first()) {
        let (of_a, of_b) = (&of_a.provenance, &of_b.provenance);
        if of_a.version != of_b.version {
            cautions.push(format!(
                "A is of tpusim {}, B of tpusim {}: {models}",
                of_a.version, of_b.version
            ));
        }
        if of_a.calibration_digest != of_b.calibration_digest {
            cautions.push(format!(
                "A has calibration {}, B has calibration {}: {models} with one calibration",
                of_a.calibration_digest, of_b.calibration_digest
            ));
        }
    }
    for (letter, side) in [("A", a), ("B", b)] {
        if side.kinds.iter().any(|kind| kind.run.inputs.is_none()) {
            cautions.push(format!(
                "{letter} is of a version that does not record its inputs, so that they cannot be compared field by field; run it again"
            ));
        }
        let unknown = |row: &StageResult| row.low_us.is_some() && row.family.is_none();
        let mut rows = side
            .kinds
            .iter()
            .flat_map(|kind| &kind.run.chips)
            .flat_map(|chip| &chip.plans)
            .flat_map(|plan| &plan.stages);
        if rows.any(unknown) {
            cautions.push(format!(
                "{letter} is of a version that does not record families of kernels, so that no error cancels and intervals are wide; run it again"
            ));
        }
    }
    cautions
}

/// Warnings of either side; one that both have stands once.
fn warnings(a: &[String], b: &[String]) -> Vec<String> {
    let of_a = a.iter().map(|warning| {
        let letter = if b.contains(warning) { "A and B" } else { "A" };
        format!("{letter}: {warning}")
    });
    let of_b = b
        .iter()
        .filter(|warning| !a.contains(warning))
        .map(|warning| format!("B: {warning}"));
    of_a.chain(of_b).collect()
}

/// Fields of both sides that differ: `field=value` lines by field.
fn fields<'r>(part: Part, prefix: &str, a: &'r [String], b: &'r [String]) -> Vec<Difference> {
    let by_field = |lines: &'r [String]| -> BTreeMap<&'r str, &'r str> {
        lines.iter().filter_map(|line| line.split_once('=')).collect()
    };
    let (a, b) = (by_field(a), by_field(b));
    let all: BTreeSet<&str> = a.keys().chain(b.keys()).copied().collect();
    all.into_iter()
        .filter(|field| a.get(field) != b.get(field))
        .map(|field| Difference {
            part,
            field: format!("{prefix}{field}"),
            a: a.get(field).map(|value| (*value).to_owned()),
            b: b.get(field).map(|value| (*value).to_owned()),
        })
        .collect()
}

fn differences(
    (a, b): (&RunResult, &RunResult),
    kinds: &[KindPair<'_>],
    chips: &[(&ChipResult, &ChipResult)],
) -> Vec<Difference> {
    let (of_a, of_b) = (&a.provenance, &b.provenance);
    let mut out = Vec::new();
    let whole = |part, field: &str, a: &str, b: &str| Difference {
        part,
        field: field.to_owned(),
        a: Some(a.to_owned()),
        b: Some(b.to_owned()),
    };
    if of_a.version != of_b.version {
        out.push(whole(Part::Version, "tpusim", &of_a.version, &of_b.version));
    }
    if of_a.calibration_digest != of_b.calibration_digest {
        out.push(whole(
            Part::Calibration,
            "digest",
            &of_a.calibration_digest,
            &of_b.calibration_digest,
        ));
    }
    if let (Some(a), Some(b)) = (&a.inputs, &b.inputs)
        && of_a.calibration_digest != of_b.calibration_digest
    {
        out.extend(fields(Part::Calibration, "", &a.calibration, &b.calibration));
    }
    for KindPair { label, a, b } in kinds {
        let prefix = label
            .as_ref()
            .map_or_else(String::new, |label| format!("{label}: "));
        let counts = [a, b].map(|kind| kind.as_ref().map(|kind| kind.count));
        if counts[0] != counts[1] {
            let [a, b] = counts.map(|count| count.map(|count| count.to_string()));
            out.push(Difference {
                part: Part::Workload,
                field: format!("{prefix}layers"),
                a,
                b,
            });
        }
        if let (Some(a), Some(b)) = (a, b)
            && let (Some(a), Some(b)) = (&a.run.inputs, &b.run.inputs)
        {
            out.extend(fields(Part::Workload, &prefix, &a.workload, &b.workload));
        }
    }
    let (Some(a), Some(b)) = (&a.inputs, &b.inputs) else {
        return out;
    };
    for (of_a, of_b) in chips {
        let find = |inputs: &'_ Inputs, name: &str| {
            inputs
                .hardware
                .iter()
                .find(|of| of.chip == name)
                .map(|of| of.fields.clone())
                .unwrap_or_default()
        };
        // One pair needs no name.
        let prefix = match chips {
            [_] => String::new(),
            _ => format!("{}: ", both(&of_a.name, &of_b.name)),
        };
        let (a, b) = (find(a, &of_a.name), find(b, &of_b.name));
        out.extend(fields(Part::Hardware, &prefix, &a, &b));
    }
    out
}

/// Whether two rows are the very same kernel: every number of them is the same.
fn same_kernel(a: &StageResult, b: &StageResult) -> bool {
    let bare = |row: &StageResult| StageResult {
        stage: String::new(),
        title: String::new(),
        published_us: None,
        ..row.clone()
    };
    bare(a) == bare(b)
}

/// A row of the stage table of a layer, and the layers that have it.
#[derive(Debug, Clone, Copy)]
struct Row<'r> {
    of: &'r StageResult,
    layers: u64,
}

impl<'r> Row<'r> {
    /// Rows of all layers of a kind in a plan on a chip.
    fn all(kind: Option<Layers<'r>>, chip: &str, plan: &str) -> Vec<Row<'r>> {
        let Some((kind, plan)) = kind.and_then(|kind| Some((kind, kind.plan(chip, plan)?))) else {
            return Vec::new();
        };
        let layers = kind.count;
        plan.stages.iter().map(|of| Row { of, layers }).collect()
    }

    fn time_us(&self) -> f64 {
        self.layers as f64 * self.of.time_us
    }

    fn low_us(&self) -> Option<f64> {
        self.of.low_us.map(|us| self.layers as f64 * us)
    }

    fn high_us(&self) -> Option<f64> {
        self.of.high_us.map(|us| self.layers as f64 * us)
    }

    fn side(&self) -> RowSide {
        RowSide {
            time_us: self.time_us(),
            bound: self.of.bound,
            next_bound: self.of.next_bound,
        }
    }
}

fn plan_pair(
    kinds: &[KindPair<'_>],
    (chip_a, a): (&ChipResult, &PlanResult),
    (chip_b, b): (&ChipResult, &PlanResult),
    (a_us, b_us): (f64, f64),
    common: bool,
) -> PlanPair {
    let (mut rows, mut layers) = (Vec::new(), Vec::new());
    let (mut all_a, mut all_b, mut all_matches) = (Vec::new(), Vec::new(), Vec::new());
    for kind in kinds {
        let of_a = Row::all(kind.a, &chip_a.name, &a.name);
        let of_b = Row::all(kind.b, &chip_b.name, &b.name);
        let matches = pair_rows(kind.label.as_deref(), &of_a, &of_b, common, &mut rows);
        if let Some(name) = &kind.label {
            let side = |kind: Option<Layers<'_>>, rows: &[Row<'_>]| {
                kind.map(|kind| LayerSide {
                    count: kind.count,
                    time_us: rows.iter().map(Row::time_us).sum(),
                })
            };
            let whole = kind.a.is_some() && kind.b.is_some();
            layers.push(LayerPair {
                name: name.clone(),
                a: side(kind.a, &of_a),
                b: side(kind.b, &of_b),
                speedup: whole.then(|| speedup(&of_a, &of_b, &matches, common)),
            });
        }
        all_a.extend(of_a);
        all_b.extend(of_b);
        all_matches.extend(matches);
    }
    PlanPair {
        a: a.name.clone(),
        b: b.name.clone(),
        a_us,
        b_us,
        speedup: speedup(&all_a, &all_b, &all_matches, common),
        layers,
        rows,
    }
}

/// Appends the rows of a kind of layers to `rows`; returns those that stand beside each other.
fn pair_rows<'r>(
    layers: Option<&str>,
    a: &[Row<'r>],
    b: &[Row<'r>],
    common: bool,
    rows: &mut Vec<RowPair>,
) -> Vec<(Row<'r>, Row<'r>)> {
    let layers = || layers.map(str::to_owned);
    let alone_in_b = |row: &Row<'_>| RowPair {
        layers: layers(),
        stage: row.of.stage.clone(),
        title: row.of.title.clone(),
        a: None,
        b: Some(row.side()),
        speedup: None,
    };
    let mut matches = Vec::new();
    let mut written = vec![false; b.len()];
    for of_a in a {
        let found = b
            .iter()
            .enumerate()
            .position(|(i, of_b)| !written[i] && of_b.of.stage == of_a.of.stage);
        let of_b = found.map(|at| {
            // Rows of B that no row of A is paired with stand before the row they come before.
            for (i, of_b) in b.iter().enumerate().take(at) {
                if !written[i] && !a.iter().any(|of_a| of_a.of.stage == of_b.of.stage) {
                    written[i] = true;
                    rows.push(alone_in_b(of_b));
                }
            }
            written[at] = true;
            b[at]
        });
        matches.extend(of_b.map(|of_b| (*of_a, of_b)));
        rows.push(RowPair {
            layers: layers(),
            stage: of_a.of.stage.clone(),
            title: of_a.of.title.clone(),
            a: Some(of_a.side()),
            b: of_b.map(|of_b| of_b.side()),
            speedup: of_b.map(|of_b| speedup(&[*of_a], &[of_b], &[(*of_a, of_b)], common)),
        });
    }
    for (of_b, written) in b.iter().zip(&written) {
        if !written {
            rows.push(alone_in_b(of_b));
        }
    }
    matches
}

/// Rows of one family on one side.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    /// Part of the total.
    predicted: f64,
    /// The same at the lower ends of the intervals.
    low: f64,
    /// The same at the upper ends.
    high: f64,
}

impl Share {
    /// Centre and half-width of the interval of the logarithm of measured over predicted time.
    fn spread(self) -> (f64, f64) {
        let (low, high) = (
            (self.low / self.predicted).ln(),
            (self.high / self.predicted).ln(),
        );
        (f64::midpoint(low, high), (high - low) / 2.0)
    }
}

/// Rows of a family on both sides.
#[derive(Debug, Clone, Copy, Default)]
struct Family {
    a: Share,
    b: Share,
    /// Factor that ratios are off by.
    error: f64,
    /// Share of rows that are the same kernel on both sides.
    same: f64,
}

/// The ratio of the times of some rows; `matches` are the rows that stand beside each other, and `common` says whether errors of a family go together on both
/// sides.
fn speedup(a: &[Row<'_>], b: &[Row<'_>], matches: &[(Row<'_>, Row<'_>)], common: bool) -> Speedup {
    let total = |rows: &[Row<'_>]| rows.iter().map(Row::time_us).sum::<f64>();
    let (of_a, of_b) = (total(a), total(b));
    let ratio = of_a / of_b;
    let recorded = a.iter().chain(b).all(|row| row.of.family.is_some());
    let common = common && recorded;
    let found = if common {
        together(a, b, (of_a, of_b), matches)
    } else {
        apart(a, b, (of_a, of_b))
    };
    // Kernels in the same proportion: other numbers of layers weigh their errors differently.
    let proportional = matches.first().is_some_and(|(first_a, first_b)| {
        let same = |(a, b): &(Row<'_>, Row<'_>)| a.layers * first_b.layers == b.layers * first_a.layers;
        matches.iter().all(same)
    });
    let all_same = common
        && a.len() == matches.len()
        && b.len() == matches.len()
        && proportional
        && matches.iter().all(|(a, b)| same_kernel(a.of, b.of));
    let families = |rows: &[Row<'_>]| -> BTreeSet<Option<String>> {
        rows.iter().map(|row| row.of.family.clone()).collect()
    };
    let evidence = if all_same {
        SpeedupEvidence::SameKernels
    } else if common && !families(a).is_disjoint(&families(b)) {
        SpeedupEvidence::Ratios
    } else {
        SpeedupEvidence::Independent
    };
    // The same kernel takes the same time, whether or not anything comparable was measured.
    let found = if all_same { Some((0.0, 0.0)) } else { found };
    Speedup {
        ratio,
        low: found.map(|(centre, half)| ratio * (centre - half).exp()),
        high: found.map(|(centre, half)| ratio * (centre + half).exp()),
        interval_from: found.map(|_| evidence),
    }
}

/// Centre and half-width of the logarithm of a ratio whose sides are off together, see the module.
fn together(
    a: &[Row<'_>],
    b: &[Row<'_>],
    (of_a, of_b): (f64, f64),
    matches: &[(Row<'_>, Row<'_>)],
) -> Option<(f64, f64)> {
    let mut families: BTreeMap<&str, Family> = BTreeMap::new();
    for (rows, total, first) in [(a, of_a, true), (b, of_b, false)] {
        for row in rows {
            let family = families.entry(row.of.family.as_deref()?).or_default();
            family.error = family.error.max(row.of.speedup_error_ratio?);
            let share = if first { &mut family.a } else { &mut family.b };
            share.predicted += row.time_us() / total;
            share.low += row.low_us()? / total;
            share.high += row.high_us()? / total;
        }
    }
    for (row, other) in matches {
        if same_kernel(row.of, other.of) {
            let family = families.entry(row.of.family.as_deref()?).or_default();
            family.same += (row.time_us() / of_a).min(other.time_us() / of_b);
        }
    }
    let (mut centre, mut squares) = (0.0, 0.0);
    for family in families.values() {
        let more = family.a.predicted - family.b.predicted;
        let (shift, half) = match more {
            more if more > 0.0 => family.a.spread(),
            more if more < 0.0 => family.b.spread(),
            _ => (0.0, 0.0),
        };
        let paired = (family.a.predicted.min(family.b.predicted) - family.same).max(0.0);
        centre += more * shift;
        squares += (paired * family.error.ln() + more.abs() * half).powi(2);
    }
    Some((centre, squares.sqrt()))
}

/// The same where the sides are off independently; errors of one side go together, as in its own total.
fn apart(a: &[Row<'_>], b: &[Row<'_>], (of_a, of_b): (f64, f64)) -> Option<(f64, f64)> {
    let spread = |rows: &[Row<'_>], total: f64| {
        let low: f64 = rows.iter().map(Row::low_us).sum::<Option<f64>>()?;
        let high: f64 = rows.iter().map(Row::high_us).sum::<Option<f64>>()?;
        let whole = Share {
            predicted: total,
            low,
            high,
        };
        Some(whole.spread())
    };
    let ((centre_a, half_a), (centre_b, half_b)) = (spread(a, of_a)?, spread(b, of_b)?);
    Some((centre_a - centre_b, half_a.hypot(half_b)))
}

/// The answer in one line: the plan that is fastest in B, on the first chip.
fn headline(comparison: &Comparison) -> String {
    let Some(chip) = comparison.chips.first() else {
        return String::new();
    };
    let Some(plan) = chip.plans.iter().min_by(|a, b| a.b_us.total_cmp(&b.b_us)) else {
        return String::new();
    };
    let Speedup { ratio, low, high, .. } = plan.speedup;
    let interval = low.zip(high).map_or_else(
        || "no interval".to_owned(),
        |(low, high)| format!("80 % interval {low:.2} to {high:.2}"),
    );
    let changes: Vec<String> = plan
        .rows
        .iter()
        .filter(|row| row.bound_changes())
        .map(RowPair::name)
        .collect();
    let bounds = if changes.is_empty() {
        "no bound changes".to_owned()
    } else {
        format!("another unit binds {}", changes.join(", "))
    };
    format!(
        "{} against {} on {}, {}: {:.3} ms against {:.3} ms, speedup {ratio:.2} ({interval}); {bounds}",
        comparison.a.name,
        comparison.b.name,
        both(&chip.a, &chip.b),
        both(&plan.a, &plan.b),
        plan.a_us / 1e3,
        plan.b_us / 1e3,
    )
}

#[cfg(test)]
mod tests {
    use approx::assert_relative_eq;

    use super::*;
    use crate::report::fixture;

    /// A row of the family `family` that takes `time_us`; its interval is a tenth to either side, ratios of the family are off by a twentieth.
    fn row(stage: &str, family: &str, time_us: f64) -> StageResult {
        let template = fixture::one_chip().chips[0].plans[0].stages[0].clone();
        StageResult {
            stage: stage.to_owned(),
            family: Some(family.to_owned()),
            time_us,
            low_us: Some(time_us / 1.1),
            high_us: Some(time_us * 1.1),
            speedup_error_ratio: Some(1.05),
            ..template
        }
    }

    /// One plan on one chip.
    fn result(stages: Vec<StageResult>) -> RunResult {
        let mut result = fixture::one_chip();
        let plan = &mut result.chips[0].plans[0];
        plan.total_us = stages.iter().map(|row| row.time_us).sum();
        plan.stages = stages;
        result.chips[0].plans.truncate(1);
        result
    }

    fn total(a: &RunResult, b: &RunResult) -> Result<Speedup, CompareError> {
        Ok(compare(a, b, ("a", "b"))?.chips[0].plans[0].speedup)
    }

    fn assert_interval(speedup: Speedup, ratio: f64, half: f64) {
        assert_relative_eq!(speedup.ratio, ratio, max_relative = 1e-12);
        let ends = speedup.low.zip(speedup.high);
        let (low, high) = ends.unwrap_or((f64::NAN, f64::NAN));
        assert_relative_eq!(low, ratio * (-half).exp(), max_relative = 1e-12);
        assert_relative_eq!(high, ratio * half.exp(), max_relative = 1e-12);
    }

    #[test]
    fn ratios_of_one_family_are_off_as_ratios_are() -> Result<(), CompareError> {
        let a = result(vec![row("x", "f", 30.0), row("y", "f", 10.0)]);
        let b = result(vec![row("x", "f", 12.0), row("y", "f", 8.0)]);
        let speedup = total(&a, &b)?;
        assert_interval(speedup, 2.0, 1.05_f64.ln());
        assert_eq!(speedup.interval_from, Some(SpeedupEvidence::Ratios));
        Ok(())
    }

    #[test]
    fn the_same_kernel_is_off_by_the_same_on_both_sides() -> Result<(), CompareError> {
        // Half of A is x, two thirds of B: half of either total cancels.
        let a = result(vec![row("x", "f", 10.0), row("y", "f", 10.0)]);
        let b = result(vec![row("x", "f", 10.0), row("y", "f", 5.0)]);
        assert_interval(total(&a, &b)?, 4.0 / 3.0, 0.5 * 1.05_f64.ln());
        let rows = &compare(&a, &b, ("a", "b"))?.chips[0].plans[0].rows;
        let x = rows[0].speedup.ok_or(()).unwrap_or(total(&a, &b)?);
        assert_eq!((x.ratio, x.low, x.high), (1.0, Some(1.0), Some(1.0)));
        assert_eq!(x.interval_from, Some(SpeedupEvidence::SameKernels));
        Ok(())
    }

    #[test]
    fn families_are_independent_and_shares_that_differ_do_not_cancel() -> Result<(), CompareError> {
        let a = result(vec![row("x", "f", 10.0), row("y", "g", 10.0)]);
        let b = result(vec![row("x", "f", 10.0), row("y", "g", 5.0)]);
        // f: one half of A and two thirds of B, the same kernel; g: one half and one third.
        let (ratio_error, one) = (1.05_f64.ln(), 1.1_f64.ln());
        let half = (one / 6.0).hypot(ratio_error / 3.0 + one / 6.0);
        assert_interval(total(&a, &b)?, 4.0 / 3.0, half);
        // Of two families nothing is common.
        let (a, b) = (
            result(vec![row("x", "f", 10.0)]),
            result(vec![row("x", "g", 5.0)]),
        );
        let speedup = total(&a, &b)?;
        assert_interval(speedup, 2.0, one * std::f64::consts::SQRT_2);
        assert_eq!(speedup.interval_from, Some(SpeedupEvidence::Independent));
        Ok(())
    }

    #[test]
    fn nothing_cancels_between_chips_versions_and_calibrations() -> Result<(), Box<dyn std::error::Error>> {
        let a = result(vec![row("x", "f", 10.0)]);
        let half = 1.1_f64.ln() * std::f64::consts::SQRT_2;
        let mut other = a.clone();
        "another".clone_into(&mut other.chips[0].name);
        assert_interval(total(&a, &other)?, 1.0, half);
        let comparison = compare(&a, &other, ("a", "b"))?;
        assert!(comparison.cautions.is_empty());
        assert_eq!(
            (comparison.chips[0].a.as_str(), comparison.chips[0].b.as_str()),
            ("tpu-v7x", "another")
        );
        for change in [
            |result: &mut RunResult| "9.9.9".clone_into(&mut result.provenance.version),
            |result: &mut RunResult| "0123".clone_into(&mut result.provenance.calibration_digest),
        ] {
            let mut other = a.clone();
            change(&mut other);
            assert_interval(total(&a, &other)?, 1.0, half);
            let comparison = compare(&a, &other, ("a", "b"))?;
            assert_eq!(comparison.cautions.len(), 1);
            assert!(!comparison.identical && comparison.differences.len() == 1);
            let mut text = Vec::new();
            crate::report::comparison::write_text(&mut text, &comparison)?;
            assert!(String::from_utf8(text)?.starts_with("caution: A "));
        }
        Ok(())
    }

    #[test]
    fn an_interval_that_is_not_centred_shifts_the_ratio() -> Result<(), CompareError> {
        let shifted = |stage: &str, family: &str, time_us: f64| StageResult {
            low_us: Some(time_us),
            high_us: Some(time_us * 1.21),
            ..row(stage, family, time_us)
        };
        // Alone in A, so all of it counts; g is centred.
        let speedup = total(
            &result(vec![shifted("x", "f", 10.0)]),
            &result(vec![row("x", "g", 10.0)]),
        )?;
        let half = 1.1_f64.ln() * std::f64::consts::SQRT_2;
        assert_relative_eq!(
            speedup.low.unwrap_or(f64::NAN),
            1.1 * (-half).exp(),
            max_relative = 1e-12
        );
        assert_relative_eq!(
            speedup.high.unwrap_or(f64::NAN),
            1.1 * half.exp(),
            max_relative = 1e-12
        );
        Ok(())
    }

    #[test]
    fn a_row_without_an_interval_leaves_the_ratio_without_one() -> Result<(), CompareError> {
        let bare = StageResult {
            low_us: None,
            high_us: None,
            speedup_error_ratio: None,
            ..row("x", "f", 10.0)
        };
        let speedup = total(&result(vec![bare.clone()]), &result(vec![row("x", "f", 5.0)]))?;
        assert_eq!(
            (speedup.ratio, speedup.low, speedup.interval_from),
            (2.0, None, None)
        );
        // The same kernel takes the same time whatever is known of it.
        let speedup = total(&result(vec![bare.clone()]), &result(vec![bare]))?;
        assert_eq!((speedup.ratio, speedup.low), (1.0, Some(1.0)));
        Ok(())
    }

    #[test]
    fn rows_of_one_side_stand_where_they_run() -> Result<(), CompareError> {
        let rows = |names: &[&str]| result(names.iter().map(|name| row(name, "f", 10.0)).collect());
        let comparison = compare(
            &rows(&["1", "2", "5"]),
            &rows(&["1", "3", "4", "5", "6"]),
            ("a", "b"),
        )?;
        let found: Vec<(&str, bool, bool)> = comparison.chips[0].plans[0]
            .rows
            .iter()
            .map(|row| (row.stage.as_str(), row.a.is_some(), row.b.is_some()))
            .collect();
        assert_eq!(
            found,
            [
                ("1", true, true),
                ("2", true, false),
                ("3", false, true),
                ("4", false, true),
                ("5", true, true),
                ("6", false, true)
            ]
        );
        Ok(())
    }

    #[test]
    fn results_of_earlier_versions_say_what_they_lack() -> Result<(), CompareError> {
        let new = result(vec![row("x", "f", 10.0)]);
        let mut old = new.clone();
        old.inputs = None;
        old.chips[0].plans[0].stages[0].family = None;
        let comparison = compare(&old, &new, ("a", "b"))?;
        assert_eq!(comparison.cautions.len(), 2);
        assert!(
            comparison
                .cautions
                .iter()
                .all(|caution| caution.starts_with("A is of a version"))
        );
        assert_interval(total(&old, &new)?, 1.0, 1.1_f64.ln() * std::f64::consts::SQRT_2);
        Ok(())
    }

    #[test]
    fn nothing_to_pair_is_an_error() {
        let a = fixture::five_chips();
        let mut b = fixture::five_chips();
        for chip in &mut b.chips {
            chip.name.push('x');
        }
        let error = compare(&a, &b, ("a", "b"))
            .map(|_| ())
            .map_err(|error| error.to_string());
        assert!(error.is_err_and(|text| text.contains("`tpu-v7x`") && text.contains("`tpu-v7xx`")));
    }

    #[test]
    fn every_field_is_documented() -> Result<(), Box<dyn std::error::Error>> {
        let docs = include_str!("../../docs/formats.md");
        let section = docs
            .split("\n## ")
            .find(|part| part.starts_with("`tpusim compare"))
            .ok_or("no section")?;
        let a = result(vec![row("x", "f", 10.0)]);
        let mut b = result(vec![row("x", "f", 5.0)]);
        "9.9.9".clone_into(&mut b.provenance.version);
        let comparison = compare(&a, &b, ("a", "b"))?;
        let mut found = BTreeSet::new();
        crate::report::json::keys(&serde_json::to_value(&comparison)?, &mut found);
        let mut csv = Vec::new();
        crate::report::comparison::write_csv(&mut csv, &comparison)?;
        let header = String::from_utf8(csv)?
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned();
        found.extend(header.split(',').map(str::to_owned));
        let missing: Vec<_> = found
            .iter()
            .filter(|key| !section.contains(&format!("`{key}`")))
            .collect();
        assert!(missing.is_empty(), "docs/formats.md does not mention {missing:?}");
        Ok(())
    }
}
