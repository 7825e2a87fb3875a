//! The page docs/validation.md: how wrong predictions are, and on what that rests.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::calibration::blocks;
use crate::calibration::data::Data;
use crate::calibration::decode::DecodeScore;
use crate::calibration::delta_log;
use crate::calibration::never_fitted::{self, Origin};
use crate::calibration::speedup::{LayerTime, Line};
use crate::calibration::validate::{Score, Split, quantile};
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
    /// Errors of decode steps.
    pub decode: &'a [DecodeScore],
    /// The fit to all rows.
    pub calibration: &'a Calibration,
    /// Compiler estimates against predictions.
    pub compiler: &'a [Ratio],
    /// KDA against SLA-R4 on generations that were left out.
    pub speedup: &'a [Line],
    /// Blocks that won an autotuning against those that the model would choose.
    pub blocks: &'a [blocks::Group],
    /// Rows that no fit sees, and how many of them cannot be timed.
    pub never_fitted: &'a (Vec<never_fitted::Row>, usize),
    /// Measured decode steps with a log of updates, which no fit sees either.
    pub delta_log: &'a [delta_log::Row],
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
    decode(&mut out, page.decode);
    speedup(&mut out, page.speedup);
    never_fitted(&mut out, page.never_fitted);
    delta_log(&mut out, page.delta_log);
    blocks(&mut out, page.blocks);
    coefficients(&mut out, page.calibration);
    cross_check(&mut out, page.compiler);
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
    out.push_str(
        "\n![Predicted against measured, each device left out](images/validation.svg)\n\n\
![Errors by family and device, the device left out](images/validation-by-device.svg)\n\n\
![Errors by family and device, shapes left out](images/validation-by-shape.svg)\n\n",
    );
    mechanisms(out, page.scores);
}

/// Linear attention with each mechanism left out.
fn mechanisms(out: &mut String, scores: &[Score]) {
    let left_out: Vec<&Score> = scores
        .iter()
        .filter(|score| score.split == Split::LeaveMechanismOut && score.device != "all")
        .collect();
    if left_out.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "A mechanism that no fit had seen (each mechanism of linear attention left out in turn, all its sizes at once):\n\n\
| family | device | rows | median / p90 % | bias % | ratio % | winners % |\n|---|---|---:|---:|---:|---:|---:|"
    );
    for score in left_out {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {:.1} / {:.0} | {:+.1} | {} | {} |",
            score.family,
            score.device,
            score.n,
            score.median_abs_pct,
            score.p90_abs_pct,
            score.bias_pct,
            number(score.ratio_median_pct, 1),
            number(score.winner_pct, 1),
        );
    }
    out.push('\n');
}

/// Decode steps by operation.
fn decode(out: &mut String, scores: &[DecodeScore]) {
    if scores.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "## Decode steps\n\nRows of one decoded token per sequence, among the rows above: median / ninetieth percentile of the absolute error in percent. `shape`: predicted by a fit without the shape (a fifth of the shapes left out at a time); \
`mechanism`: by a fit without any row of the mechanism, which the fused kernel has none of; bias is that of `shape`, positive where predictions are too slow.\n\n\
| op | device | rows | sequences | shape | bias % | mechanism | in sample | roofline |\n|---|---|---:|---:|---:|---:|---:|---:|---:|"
    );
    for score in scores {
        let cell = |split| {
            score.errors.get(&split).map_or_else(
                || "–".to_owned(),
                |e| format!("{:.1} / {:.0}", e.median_abs_pct, e.p90_abs_pct),
            )
        };
        let by_shape = score.errors.get(&Split::ByShape);
        let rows = score.errors.values().map(|e| e.n).max().unwrap_or(0);
        let (least, most) = score.sequences;
        let _ = writeln!(
            out,
            "| {} | {} | {rows} | {least} to {most} | {} | {} | {} | {} | {} |",
            score.op,
            score.device,
            cell(Split::ByShape),
            by_shape.map_or_else(|| "–".to_owned(), |e| format!("{:+.1}", e.bias_pct)),
            cell(Split::LeaveMechanismOut),
            cell(Split::InSample),
            cell(Split::Roofline),
        );
    }
    out.push('\n');
}

/// The leave-one-out table.
fn speedup(out: &mut String, lines: &[Line]) {
    let _ = writeln!(
        out,
        "## KDA against SLA-R4 on generations that were left out\n\n\
One layer of each (`workloads/kda.yaml`, `workloads/sla_r4.yaml`) on one device, predicted with every row of that device left out of the fit (`tpusim validate --table speedup`). Times in ms, with the 80 % interval from errors on the \
other devices. References are published, at sizes that are inferred; nobody has published the others.\n\n\
| device | plan | array | MXU:VPU | KDA reference | KDA predicted | error % | SLA-R4 reference | SLA-R4 predicted | error % | speedup reference | predicted | error % |\n\
|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    );
    let predicted = |time: &LayerTime| {
        let ms = |us: f64| format!("{:.3}", us / 1e3);
        let interval = time.low_us.zip(time.high_us);
        let interval = interval.map_or_else(String::new, |(low, high)| {
            format!(" ({} to {})", ms(low), ms(high))
        });
        format!("{}{interval}", ms(time.predicted_us))
    };
    let reference = |time: &LayerTime| {
        time.reference
            .as_ref()
            .map_or_else(|| "none".to_owned(), |r| format!("{:.3} {}", r.us / 1e3, r.kind))
    };
    let error = |error: Option<f64>| error.map_or_else(|| "–".to_owned(), |error| format!("{error:+.1}"));
    for line in lines {
        let (rows, columns) = line.array;
        let _ = writeln!(
            out,
            "| {} | {} | {rows}x{columns} | {} | {} | {} | {} | {} | {} | {} | {} | {:.2} | {} |",
            line.device,
            line.plan,
            number(line.mxu_to_vpu, 0),
            reference(&line.kda),
            predicted(&line.kda),
            error(line.kda.error_pct),
            reference(&line.sla_r4),
            predicted(&line.sla_r4),
            error(line.sla_r4.error_pct),
            line.reference_speedup
                .map_or_else(|| "none".to_owned(), |speedup| format!("{speedup:.2}")),
            line.speedup,
            error(line.speedup_error_pct),
        );
    }
    out.push('\n');
}

/// Autotuning: the measured winner against the choice of the model.
fn blocks(out: &mut String, groups: &[blocks::Group]) {
    let _ = writeln!(
        out,
        "## Blocks\n\nRows of grouped products and of flash attention hold the blocks that won an autotuning on their chip. Here the model times every block of the same search (`tpusim validate --table blocks`) and chooses its own best. `same`: nothing is \
predicted to be faster than the measured winner. `within 10 %`: the winner is predicted to take at most a tenth longer than the choice of the model, so that following the model would cost little. `by chance`: candidates of which \
that holds, which is what a choice by lot would reach. The fit saw the times of the winners, never those of other blocks. Numbers of stages and warps, layouts and orders of the grid, which the search also varies, are not \
told apart.\n\n\
| op | device | rows | candidates | same % | within 10 % | by chance % | median ratio | 90th percentile |\n|---|---|---:|---:|---:|---:|---:|---:|---:|"
    );
    for group in groups {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {:.0} | {:.0} | {:.0} | {:.0} | {:.2} | {:.2} |",
            group.op,
            group.device,
            group.rows,
            group.candidates,
            group.agree_pct,
            group.close_pct,
            group.chance_pct,
            group.median_ratio,
            group.p90_ratio
        );
    }
    out.push('\n');
}

/// What no fit sees.
fn never_fitted(out: &mut String, (rows, unknown): &(Vec<never_fitted::Row>, usize)) {
    let _ = writeln!(
        out,
        "## Never fitted\n\nTimes that enter no fit, predicted with the calibration in use (`tpusim validate --table never-fitted`). {unknown} more rows of the same files cannot be timed: backward passes, implementations whose \
launches are not described. Published and reported sizes are partly inferred.\n"
    );
    for (origin, title) in [
        (
            Origin::Unseen,
            "Operations measured after their model was written, of which the model has seen nothing: the short convolution of flash-linear-attention and one decoding step of GLA, DeltaNet and Mamba-2 on an H200. This is the error to \
expect of a new operation.",
        ),
        (
            Origin::Published,
            "Stage table and core kernels of the Systolic Linear Attention paper:",
        ),
        (Origin::Reported, "Latencies printed in pull requests and issues:"),
    ] {
        let of: Vec<&never_fitted::Row> = rows.iter().filter(|row| row.origin == origin).collect();
        let mut groups: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for row in &of {
            groups.entry(&row.op).or_default().push(row.error_pct);
        }
        let _ = writeln!(
            out,
            "{title}\n\n| op | rows | median error % | largest % |\n|---|---:|---:|---:|"
        );
        for (op, errors) in groups {
            let sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
            let largest = errors.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs()));
            let _ = writeln!(
                out,
                "| {op} | {} | {:.1} | {:+.1} |",
                errors.len(),
                quantile(&sizes, 0.5),
                largest.unwrap_or_default()
            );
        }
        let _ = writeln!(
            out,
            "\n| device | op | params | reference us | predicted us | 80 % interval | error % |\n|---|---|---|---:|---:|---:|---:|"
        );
        for row in of {
            let interval = row
                .interval_us
                .map_or_else(|| "–".to_owned(), |(low, high)| format!("{low:.1} to {high:.1}"));
            let _ = writeln!(
                out,
                "| {} | {} | {} | {:.1} | {:.1} | {interval} | {:+.1} |",
                row.device, row.op, row.params, row.reference_us, row.predicted_us, row.error_pct
            );
        }
        out.push('\n');
    }
    let _ = writeln!(
        out,
        "Speedups that the paper prints, from the sums of the stages above:\n\n| ratio of times | published | predicted | error % |\n|---|---:|---:|---:|"
    );
    for ratio in never_fitted::ratios(rows) {
        let _ = writeln!(
            out,
            "| {} | {:.2} | {:.2} | {:+.1} |",
            ratio.name, ratio.published, ratio.predicted, ratio.error_pct
        );
    }
    out.push('\n');
}

/// Decode steps with a log of updates.
fn delta_log(out: &mut String, rows: &[delta_log::Row]) {
    let _ = writeln!(
        out,
        "## Decoding with a log of updates\n\nEager and DeltaLog decode steps of GDN, KDA and RWKV6 on an H200 (`measurements/h200_deltalog.csv`, Triton kernels of tools/gpu/deltalog), {} rows that enter no fit (`tpusim validate --table \
deltalog`). Their launches are lowered from the graphs of the mechanisms, with the value tiles of those kernels and no coefficient of their own. `deltalog` is a step averaged over an interval, `split` one whose log is replayed in two kernels. \
Predicted with the calibration in use, and with fits that had seen no row of the H200; no shape of them is in any fit. `speedup` is the median error of the predicted gain over the eager step. [deltalog.md](deltalog.md) sets predictions beside \
the DeltaLog paper.\n\n| mechanism | step | rows | median / p90 % | bias % | H200 left out | speedup % |\n|---|---|---:|---:|---:|---:|---:|",
        rows.len()
    );
    for score in delta_log::scores(rows) {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {:.1} / {:.0} | {:+.1} | {} | {} |",
            score.mechanism,
            score.step,
            score.n,
            score.median_abs_pct,
            score.p90_abs_pct,
            score.bias_pct,
            score.unseen_abs_pct.map_or_else(
                || "–".to_owned(),
                |(median, p90)| format!("{median:.1} / {p90:.0}")
            ),
            number(score.speedup_abs_pct, 1)
        );
    }
    out.push('\n');
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
