//! The page docs/validation.md: how wrong predictions are, and on what that rests.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::calibration::data::Data;
use crate::calibration::validate::{Score, Split};
use crate::coefficients::Coefficient;
use crate::hardware::Calibration;
use crate::study::cross_check::{EXPLANATIONS, Ratio, far_off};

/// What the page is made of.
#[derive(Debug, Clone)]
pub struct Page<'a> {
    /// Measured rows.
    pub data: &'a Data,
    /// Errors.
    pub scores: &'a [Score],
    /// The fit to all rows.
    pub calibration: &'a Calibration,
    /// Compiler estimates against predictions.
    pub ratios: &'a [Ratio],
}

/// The line that a test compares with the code, the data and the calibration of the day.
#[must_use]
pub fn stamp(data_digest: &str, calibration: &Calibration) -> String {
    format!(
        "version {}, data {data_digest}, calibration {}",
        env!("CARGO_PKG_VERSION"),
        calibration.digest()
    )
}

fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.decimals$}"))
}

/// Median and ninetieth percentile of a split.
fn errors(splits: &BTreeMap<Split, &Score>, split: Split) -> String {
    splits.get(&split).map_or_else(
        || "–".to_owned(),
        |s| format!("{:.1} / {:.0}", s.median_abs_pct, s.p90_abs_pct),
    )
}

/// The page in Markdown.
#[must_use]
pub fn markdown(page: &Page<'_>) -> String {
    let mut out = String::from("# Validation\n\n");
    let _ = writeln!(
        out,
        "Made by `tpusim validate --page docs/validation.md`, not by hand. {}.\n",
        stamp(&page.data.digest, page.calibration)
    );
    rows(&mut out, page);
    families(&mut out, page);
    devices(&mut out, page);
    coefficients(&mut out, page.calibration);
    cross_check(&mut out, page.ratios);
    out
}

fn rows(out: &mut String, page: &Page<'_>) {
    let _ = writeln!(
        out,
        "## Rows\n\n{} measured rows are used, {} left out:\n",
        page.data.used.len(),
        page.data.rejected.len()
    );
    for rejected in &page.data.rejected {
        let _ = writeln!(out, "- {}:{}: {}", rejected.file, rejected.line, rejected.reason);
    }
    let _ = writeln!(
        out,
        "\nA fit looks at no more than 120 rows of a family on a device, spread evenly, each group weighing as 60 rows at most; all rows are scored. Launch structure (what a wrapper copies, which intermediate is written, \
how many cores a kernel uses) was written down while looking at rows of all devices. Leaving a device out therefore tests the coefficients, not that structure, and flatters. `roofline` is a roofline of the same launches: matrix \
work at the peak or transfers at the published bandwidth, nothing else.\n"
    );
}

/// Families on all devices: the splits side by side.
fn families(out: &mut String, page: &Page<'_>) {
    let _ = writeln!(
        out,
        "## Errors by family\n\nMedian / ninetieth percentile of the absolute error in percent. `device`: every device left out in turn; `shape`: a fifth of the shapes; `family`: the whole family, so that its own coefficients keep \
their starting values. Ratio, winners and the 80 % interval are those of `device` where there are several, else of `shape`.\n\n\
| family | rows | device | shape | family | in sample | roofline | bias % | rank | ratio % | winners % | interval % |\n\
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    );
    let mut by_family: BTreeMap<&str, BTreeMap<Split, &Score>> = BTreeMap::new();
    for score in page.scores.iter().filter(|score| score.device == "all") {
        by_family
            .entry(&score.family)
            .or_default()
            .insert(score.split, score);
    }
    for (family, splits) in &by_family {
        let cell = |split| errors(splits, split);
        let several = page
            .scores
            .iter()
            .filter(|s| s.family == *family && s.split == Split::LeaveDeviceOut && s.device != "all")
            .count()
            > 1
            || family.starts_with("all");
        let judged = splits
            .get(if several {
                &Split::LeaveDeviceOut
            } else {
                &Split::ByShape
            })
            .or_else(|| splits.get(&Split::InSample));
        let Some(judged) = judged else { continue };
        let _ = writeln!(
            out,
            "| {family} | {} | {} | {} | {} | {} | {} | {:+.1} | {} | {} | {} | {} |",
            judged.n,
            if several {
                cell(Split::LeaveDeviceOut)
            } else {
                "one device".to_owned()
            },
            cell(Split::ByShape),
            cell(Split::LeaveFamilyOut),
            cell(Split::InSample),
            cell(Split::Roofline),
            judged.bias_pct,
            number(judged.spearman, 3),
            number(judged.ratio_median_pct, 1),
            number(judged.winner_pct, 1),
            number(judged.coverage80_pct, 0),
        );
    }
    out.push_str("\n![Predicted against measured, each device left out](images/validation.svg)\n\n");
}

/// Every family on every device.
fn devices(out: &mut String, page: &Page<'_>) {
    let _ = writeln!(
        out,
        "## Errors by device\n\n| family | device | rows | left out | bias % | by shape | in sample |\n|---|---|---:|---:|---:|---:|---:|"
    );
    let mut groups: BTreeMap<(&str, &str), BTreeMap<Split, &Score>> = BTreeMap::new();
    for score in page.scores.iter().filter(|score| score.device != "all") {
        groups
            .entry((&score.family, &score.device))
            .or_default()
            .insert(score.split, score);
    }
    for ((family, device), splits) in &groups {
        let cell = |split| errors(splits, split);
        let n = splits.values().map(|s| s.n).max().unwrap_or(0);
        let bias = splits.get(&Split::LeaveDeviceOut).map(|s| s.bias_pct);
        let _ = writeln!(
            out,
            "| {family} | {device} | {n} | {} | {} | {} | {} |",
            cell(Split::LeaveDeviceOut),
            bias.map_or_else(|| "–".to_owned(), |bias| format!("{bias:+.1}")),
            cell(Split::ByShape),
            cell(Split::InSample),
        );
    }
    out.push('\n');
}

fn coefficients(out: &mut String, calibration: &Calibration) {
    let _ = writeln!(
        out,
        "## Coefficients\n\nFitted to {} rows. A value at a bound, at zero or collinear with another is not to be read on its own.\n\n\
| coefficient | value | ± | start | unit | rows | remarks |\n|---|---:|---:|---:|---|---:|---|",
        calibration.rows
    );
    let digits = |value: f64| format!("{value:.3}");
    for (name, fitted) in calibration.parameters() {
        let _ = writeln!(
            out,
            "| {name} | {} | {} | {} | {} | {} | {} |",
            digits(fitted.value),
            number(fitted.standard_error, 3),
            digits(fitted.prior),
            fitted.unit,
            fitted.rows,
            fitted.warning
        );
    }
    let _ = writeln!(out, "\nWhat they are:\n");
    for &coefficient in Coefficient::ALL {
        let definition = coefficient.definition();
        let _ = writeln!(
            out,
            "- `{}` ({}): {}",
            definition.name,
            definition.scope.name(),
            definition.meaning
        );
    }
    out.push('\n');
}

fn cross_check(out: &mut String, ratios: &[Ratio]) {
    let mut devices: Vec<&str> = ratios.iter().map(|r| r.device.as_str()).collect();
    devices.sort_unstable();
    devices.dedup();
    let _ = writeln!(
        out,
        "## Compiler estimates\n\nCycles predicted here over cycles that the TPU compiler itself estimates for small programs (libtpu 0.0.50.1): median, smallest and largest. A second opinion, in no fit: the estimate has no launch and no latency of \
transfers, and treats 16-bit elements as 32-bit ones.\n\n| op | {} |\n|---|{}",
        devices.join(" | "),
        "---:|".repeat(devices.len())
    );
    let mut ops: Vec<&str> = ratios.iter().map(|r| r.op.as_str()).collect();
    ops.sort_unstable();
    ops.dedup();
    for op in ops {
        let cells: Vec<String> = devices
            .iter()
            .map(|device| {
                ratios
                    .iter()
                    .find(|r| r.op == op && r.device == *device)
                    .map_or_else(String::new, |r| {
                        let text = format!("{:.2} ({:.2}–{:.2})", r.median, r.spread.0, r.spread.1);
                        if far_off(r) { format!("**{text}**") } else { text }
                    })
            })
            .collect();
        let _ = writeln!(out, "| {op} | {} |", cells.join(" | "));
    }
    let _ = writeln!(out, "\nMedians off by more than a factor of two are bold. Why:\n");
    for (op, why) in EXPLANATIONS {
        if ratios.iter().any(|r| r.op == *op && far_off(r)) {
            let _ = writeln!(out, "- `{op}`: {why}");
        }
    }
}
