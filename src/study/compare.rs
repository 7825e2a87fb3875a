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

use std::collections::{BTreeMap, BTreeSet};

use crate::report::comparison::{
    ChipPair, Comparison, Difference, Part, PlanPair, RowPair, RowSide, SCHEMA, Side, Speedup,
    SpeedupEvidence, both,
};
use crate::report::result::{ChipResult, PlanResult, RunResult, StageResult};

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

/// Compares `a` with `b`; `sources` say where they come from.
///
/// Chips and plans are paired by name. Where no name is on both sides and each has exactly one, those are paired.
///
/// # Errors
/// Where nothing can be paired.
pub fn compare(a: &RunResult, b: &RunResult, sources: (&str, &str)) -> Result<Comparison, CompareError> {
    let version = a.provenance.version == b.provenance.version;
    let calibration = a.provenance.calibration_digest == b.provenance.calibration_digest;
    let (paired, unpaired_chips) = pair(&a.chips, &b.chips, |chip| &chip.name);
    if paired.is_empty() {
        return Err(CompareError::NoChip {
            a: names(&a.chips, |chip| &chip.name),
            b: names(&b.chips, |chip| &chip.name),
        });
    }
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
                .map(|(of_a, of_b)| plan_pair(of_a, of_b, common))
                .collect(),
            unpaired_plans,
        });
    }
    let differences = differences(a, b, &paired);
    let digests = |result: &RunResult| {
        let from = &result.provenance;
        (from.workload_digest.clone(), from.hardware_digest.clone())
    };
    let mut comparison = Comparison {
        schema: SCHEMA.to_owned(),
        cautions: cautions(a, b),
        headline: String::new(),
        identical: version
            && calibration
            && differences.is_empty()
            && digests(a) == digests(b)
            && unpaired_chips.is_empty(),
        a: side(a, sources.0),
        b: side(b, sources.1),
        differences,
        chips,
        unpaired_chips,
        warnings: warnings(a, b),
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

fn side(result: &RunResult, source: &str) -> Side {
    let from = &result.provenance;
    Side {
        source: source.to_owned(),
        name: result.name.clone(),
        layer: result.layer.clone(),
        version: from.version.clone(),
        workload_digest: from.workload_digest.clone(),
        hardware_digest: from.hardware_digest.clone(),
        calibration_digest: from.calibration_digest.clone(),
        overrides: from.overrides.clone(),
    }
}

fn cautions(a: &RunResult, b: &RunResult) -> Vec<String> {
    let mut cautions = Vec::new();
    let (of_a, of_b) = (&a.provenance, &b.provenance);
    let models =
        "the speedups compare two models as well as two designs, and no error cancels; run both again";
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
    for (letter, result) in [("A", a), ("B", b)] {
        if result.inputs.is_none() {
            cautions.push(format!(
                "{letter} is of a version that does not record its inputs, so that they cannot be compared field by field; run it again"
            ));
        }
        let unknown = |row: &StageResult| row.low_us.is_some() && row.family.is_none();
        let mut rows = result
            .chips
            .iter()
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
fn warnings(a: &RunResult, b: &RunResult) -> Vec<String> {
    let of_a = a.warnings.iter().map(|warning| {
        let letter = if b.warnings.contains(warning) {
            "A and B"
        } else {
            "A"
        };
        format!("{letter}: {warning}")
    });
    let of_b = b
        .warnings
        .iter()
        .filter(|warning| !a.warnings.contains(warning))
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

fn differences(a: &RunResult, b: &RunResult, chips: &[(&ChipResult, &ChipResult)]) -> Vec<Difference> {
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
    let (Some(a), Some(b)) = (&a.inputs, &b.inputs) else {
        return out;
    };
    if of_a.calibration_digest != of_b.calibration_digest {
        out.extend(fields(Part::Calibration, "", &a.calibration, &b.calibration));
    }
    out.extend(fields(Part::Workload, "", &a.workload, &b.workload));
    for (of_a, of_b) in chips {
        let find = |inputs: &'_ crate::report::result::Inputs, name: &str| {
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

fn plan_pair(a: &PlanResult, b: &PlanResult, common: bool) -> PlanPair {
    let row_side = |row: &StageResult| RowSide {
        time_us: row.time_us,
        bound: row.bound,
        next_bound: row.next_bound,
    };
    let alone_in_b = |row: &StageResult| RowPair {
        stage: row.stage.clone(),
        title: row.title.clone(),
        a: None,
        b: Some(row_side(row)),
        speedup: None,
    };
    let mut rows = Vec::new();
    let mut matches = Vec::new();
    let mut written = vec![false; b.stages.len()];
    for of_a in &a.stages {
        let found = b
            .stages
            .iter()
            .enumerate()
            .position(|(i, of_b)| !written[i] && of_b.stage == of_a.stage);
        let of_b = found.map(|at| {
            // Rows of B that no row of A is paired with stand before the row they come before.
            for (i, of_b) in b.stages.iter().enumerate().take(at) {
                if !written[i] && !a.stages.iter().any(|of_a| of_a.stage == of_b.stage) {
                    written[i] = true;
                    rows.push(alone_in_b(of_b));
                }
            }
            written[at] = true;
            &b.stages[at]
        });
        matches.extend(of_b.map(|of_b| (of_a, of_b)));
        rows.push(RowPair {
            stage: of_a.stage.clone(),
            title: of_a.title.clone(),
            a: Some(row_side(of_a)),
            b: of_b.map(row_side),
            speedup: of_b.map(|of_b| speedup(&[of_a], &[of_b], &[(of_a, of_b)], common)),
        });
    }
    for (of_b, written) in b.stages.iter().zip(&written) {
        if !written {
            rows.push(alone_in_b(of_b));
        }
    }
    let (of_a, of_b): (Vec<&StageResult>, Vec<&StageResult>) =
        (a.stages.iter().collect(), b.stages.iter().collect());
    PlanPair {
        a: a.name.clone(),
        b: b.name.clone(),
        a_us: a.total_us,
        b_us: b.total_us,
        speedup: speedup(&of_a, &of_b, &matches, common),
        rows,
    }
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
fn speedup(
    a: &[&StageResult],
    b: &[&StageResult],
    matches: &[(&StageResult, &StageResult)],
    common: bool,
) -> Speedup {
    let total = |rows: &[&StageResult]| rows.iter().map(|row| row.time_us).sum::<f64>();
    let (of_a, of_b) = (total(a), total(b));
    let ratio = of_a / of_b;
    let recorded = a.iter().chain(b).all(|row| row.family.is_some());
    let common = common && recorded;
    let found = if common {
        together(a, b, (of_a, of_b), matches)
    } else {
        apart(a, b, (of_a, of_b))
    };
    let all_same = common
        && a.len() == matches.len()
        && b.len() == matches.len()
        && matches.iter().all(|(a, b)| same_kernel(a, b));
    let families = |rows: &[&StageResult]| -> BTreeSet<Option<String>> {
        rows.iter().map(|row| row.family.clone()).collect()
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
    a: &[&StageResult],
    b: &[&StageResult],
    (of_a, of_b): (f64, f64),
    matches: &[(&StageResult, &StageResult)],
) -> Option<(f64, f64)> {
    let mut families: BTreeMap<&str, Family> = BTreeMap::new();
    for (rows, total, first) in [(a, of_a, true), (b, of_b, false)] {
        for row in rows {
            let family = families.entry(row.family.as_deref()?).or_default();
            family.error = family.error.max(row.speedup_error_ratio?);
            let share = if first { &mut family.a } else { &mut family.b };
            share.predicted += row.time_us / total;
            share.low += row.low_us? / total;
            share.high += row.high_us? / total;
        }
    }
    for (row, other) in matches {
        if same_kernel(row, other) {
            let family = families.entry(row.family.as_deref()?).or_default();
            family.same += (row.time_us / of_a).min(other.time_us / of_b);
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
fn apart(a: &[&StageResult], b: &[&StageResult], (of_a, of_b): (f64, f64)) -> Option<(f64, f64)> {
    let spread = |rows: &[&StageResult], total: f64| {
        let low: f64 = rows.iter().map(|row| row.low_us).sum::<Option<f64>>()?;
        let high: f64 = rows.iter().map(|row| row.high_us).sum::<Option<f64>>()?;
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
    let changes: Vec<&str> = plan
        .rows
        .iter()
        .filter(|row| row.bound_changes())
        .map(|row| row.stage.as_str())
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
