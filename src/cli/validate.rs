//! `tpusim validate`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::json;

use super::fit::{self, refuse_to_replace, write_file};
use super::{Global, Outcome, print};
use crate::calibration::data::Observation;
use crate::calibration::validate::{self, Score, Split};
use crate::calibration::{blocks, decode, delta_log, never_fitted, speedup};
use crate::hardware;
use crate::report::plot::Theme;
use crate::report::plot::errors::{self, ErrorMark};
use crate::report::plot::scatter::{self, Point};
use crate::report::table::{Cell, Column, Format, Table};
use crate::report::validation::{self, Page};
use crate::study::cross_check;
use crate::study::predict::ChipFiles;

/// What a fit does not see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LeaveOut {
    /// One device at a time
    Device,
    /// One family of kernels at a time
    Family,
    /// A fifth of the shapes at a time
    Shape,
    /// One mechanism of linear attention at a time
    Mechanism,
}

/// A table besides that of the errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wanted {
    /// KDA against SLA-R4 on every TPU generation, each predicted without any row of that generation
    Speedup,
    /// Rows that no fit sees: tables of papers, reported latencies, operations measured after their model was written
    NeverFitted,
    /// Measured decode steps with a log of updates, which are in no fit, by mechanism and kind of step
    Deltalog,
    /// Blocks that won an autotuning against those that the model would choose
    Blocks,
}

/// Arguments of `tpusim validate`.
#[derive(Debug, Args)]
pub(super) struct ValidateArgs {
    /// Files of measured cases to score the shipped calibration on, without fitting; without any, the shipped measurements are fitted and left out in turn
    csv: Vec<String>,
    /// A hardware file whose chip the device column of the files names, besides the shipped ones; may be repeated
    #[arg(long, value_name = "FILE", requires = "csv")]
    chip: Vec<String>,
    /// What to leave out; all of them where absent
    #[arg(long, value_enum, value_delimiter = ',')]
    leave_out: Vec<LeaveOut>,
    /// Print another table instead of the errors
    #[arg(long, value_enum, conflicts_with_all = ["csv", "leave_out", "families", "page", "plot"])]
    table: Option<Wanted>,
    /// Only these families, by name or by a part of it
    #[arg(long, value_delimiter = ',')]
    families: Vec<String>,
    /// Write the page docs/validation.md is, with its picture in a folder `images` beside it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["csv", "leave_out", "families"])]
    page: Option<PathBuf>,
    /// Write predicted against measured times as FILE.svg and FILE.png
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Replace the page or the picture
    #[arg(long)]
    force: bool,
}

pub(super) fn execute(out: &mut impl Write, args: &ValidateArgs, global: &Global) -> anyhow::Result<Outcome> {
    match args.table {
        Some(Wanted::Speedup) => return speedup_table(out, global),
        Some(Wanted::NeverFitted) => return never_fitted_table(out, global),
        Some(Wanted::Blocks) => return blocks_table(out, global),
        Some(Wanted::Deltalog) => return delta_log_table(out, global),
        None => {}
    }
    refuse_to_replace(&wanted_files(args), args.force)?;
    let files = ChipFiles::new(&args.chip)?;
    let data = fit::read(&args.csv, args.csv.is_empty(), &args.families, &files)?;
    let mut lines = Vec::new();
    let mut without_device = BTreeMap::new();
    let (scores, residuals) = if args.csv.is_empty() {
        let wanted = |what: LeaveOut| args.leave_out.is_empty() || args.leave_out.contains(&what);
        let splits: Vec<Split> = [
            (true, Split::InSample),
            (wanted(LeaveOut::Shape), Split::ByShape),
            (wanted(LeaveOut::Device), Split::LeaveDeviceOut),
            (wanted(LeaveOut::Family), Split::LeaveFamilyOut),
            (wanted(LeaveOut::Mechanism), Split::LeaveMechanismOut),
            (true, Split::Roofline),
        ]
        .into_iter()
        .filter(|(wanted, _)| *wanted)
        .map(|(_, split)| split)
        .collect();
        let validation = validate::validate(&data, &splits);
        if args.page.is_some() {
            lines = speedup::table(&data, &validation)?;
            without_device = validation.without_device;
        }
        (
            validate::scores(&data.used, &validation.residuals),
            validation.residuals,
        )
    } else {
        let residuals = BTreeMap::from([
            (Split::InSample, validate::unfitted(&data.used, &files)),
            (Split::Roofline, validate::roofline(&data.used)),
        ]);
        (validate::scores(&data.used, &residuals), residuals)
    };
    let (title, points) = points(&data.used, &residuals);
    if let Some(path) = &args.plot {
        write_file(
            &path.with_extension("svg"),
            scatter::svg(title, &points, Theme::Light)?,
        )?;
        scatter::png(title, &points, Theme::Light, &path.with_extension("png"))?;
    }
    if let Some(path) = &args.page {
        let page = validation::markdown(&Page {
            data: &data,
            scores: &scores,
            decode: &decode::scores(&data.used, &residuals),
            calibration: hardware::shipped_calibration(),
            compiler: &cross_check::cross_check()?,
            speedup: &lines,
            blocks: &blocks::groups(&blocks::choices()?),
            never_fitted: &never_fitted::rows(hardware::shipped_calibration())?,
            delta_log: &delta_log::rows(hardware::shipped_calibration(), &without_device)?,
        });
        let picture = picture_of(path);
        let images = picture.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(images).with_context(|| format!("cannot create {}", images.display()))?;
        write_file(&picture, scatter::svg(title, &points, Theme::Light)?)?;
        for (split, name, title) in ERROR_PICTURES {
            let marks = error_marks(&scores, split);
            write_file(
                &images.join(format!("{name}.svg")),
                errors::svg(title, &marks, Theme::Light)?,
            )?;
        }
        write_file(path, page)?;
    }
    print(out, global.format, &table(&scores), &json!({ "rows": scores }))?;
    fit::rejected(&data, global);
    Ok(Outcome::Done)
}

/// Files that the arguments ask for.
fn wanted_files(args: &ValidateArgs) -> Vec<PathBuf> {
    let pictures = args
        .plot
        .iter()
        .flat_map(|path| [path.with_extension("svg"), path.with_extension("png")]);
    let page = args.page.iter().flat_map(|path| {
        let picture = picture_of(path);
        let beside = ERROR_PICTURES.map(|(_, name, _)| picture.with_file_name(format!("{name}.svg")));
        [path.clone(), picture].into_iter().chain(beside)
    });
    page.chain(pictures).collect()
}

/// The picture that a page shows.
fn picture_of(page: &Path) -> PathBuf {
    page.with_file_name("images").join("validation.svg")
}

/// Pictures of errors by family and device: which split, the name of the file, the title.
const ERROR_PICTURES: [(Split, &str, &str); 2] = [
    (
        Split::LeaveDeviceOut,
        "validation-by-device",
        "Errors on a device that no fit had seen",
    ),
    (
        Split::ByShape,
        "validation-by-shape",
        "Errors on shapes that no fit had seen",
    ),
];

/// Marks of such a picture.
fn error_marks(scores: &[Score], split: Split) -> Vec<ErrorMark> {
    scores
        .iter()
        .filter(|score| score.split == split && score.device != "all")
        .map(|score| ErrorMark {
            family: score.family.clone(),
            device: score.device.clone(),
            median: score.median_abs_pct,
            p90: score.p90_abs_pct,
        })
        .collect()
}

/// KDA against SLA-R4 with each generation left out.
fn speedup_table(out: &mut impl Write, global: &Global) -> anyhow::Result<Outcome> {
    let data = fit::read(&[], true, &[], &ChipFiles::default())?;
    let validation = validate::validate(&data, &[Split::LeaveDeviceOut]);
    let lines = speedup::table(&data, &validation)?;
    let mut printed = Table::new([
        Column::text("device", "device"),
        Column::number("cores", "cores_count"),
        Column::text("plan", "plan"),
        Column::text("array", "array"),
        Column::number("MXU:VPU", "mxu_to_vpu_ratio"),
        Column::text("layer", "layer"),
        Column::number("reference (us)", "reference_us"),
        Column::text("kind", "reference_kind"),
        Column::number("predicted (us)", "predicted_us"),
        Column::number("low (us)", "low_us"),
        Column::number("high (us)", "high_us"),
        Column::number("error (%)", "error_percent"),
    ]);
    for line in &lines {
        let (rows, columns) = line.array;
        let mut row = |layer: &str,
                       reference: Option<f64>,
                       kind: &str,
                       predicted: Cell,
                       interval: [Option<f64>; 2],
                       error| {
            printed.row([
                Cell::from(&line.device),
                Cell::from(line.cores),
                Cell::from(&line.plan),
                Cell::from(format!("{rows}x{columns}")),
                Cell::optional(line.mxu_to_vpu, 1),
                Cell::from(layer),
                Cell::optional(reference, 3),
                Cell::from(kind),
                predicted,
                Cell::optional(interval[0], 0),
                Cell::optional(interval[1], 0),
                Cell::optional(error, 1),
            ]);
        };
        for (layer, time) in [("kda", &line.kda), ("sla_r4", &line.sla_r4)] {
            let reference = time.reference.as_ref();
            row(
                layer,
                reference.map(|reference| reference.us),
                reference.map_or("no reference", |reference| reference.kind),
                Cell::number(time.predicted_us, 0),
                [time.low_us, time.high_us],
                time.error_pct,
            );
        }
        let published = line
            .kda
            .reference
            .as_ref()
            .map_or("no reference", |reference| reference.kind);
        row(
            "speedup (x)",
            line.reference_speedup,
            published,
            Cell::number(line.speedup, 3),
            [None, None],
            line.speedup_error_pct,
        );
    }
    print(out, global.format, &printed, &json!({ "lines": lines }))?;
    Ok(Outcome::Done)
}

/// Predictions of rows that no fit sees.
fn never_fitted_table(out: &mut impl Write, global: &Global) -> anyhow::Result<Outcome> {
    let (rows, unknown) = never_fitted::rows(hardware::shipped_calibration())?;
    let mut printed = Table::new([
        Column::text("origin", "origin"),
        Column::text("device", "device"),
        Column::text("op", "op"),
        Column::text("params", "params"),
        Column::number("reference (us)", "reference_us"),
        Column::number("predicted (us)", "predicted_us"),
        Column::number("low (us)", "low_us"),
        Column::number("high (us)", "high_us"),
        Column::number("error (%)", "error_percent"),
    ]);
    for row in &rows {
        printed.row([
            Cell::from(row.origin.name()),
            Cell::from(&row.device),
            Cell::from(&row.op),
            Cell::from(&row.params),
            Cell::number(row.reference_us, 2),
            Cell::number(row.predicted_us, 2),
            Cell::optional(row.interval_us.map(|(low, _)| low), 2),
            Cell::optional(row.interval_us.map(|(_, high)| high), 2),
            Cell::number(row.error_pct, 1),
        ]);
    }
    let ratios = never_fitted::ratios(&rows);
    print(
        out,
        global.format,
        &printed,
        &json!({ "rows": rows, "ratios": ratios }),
    )?;
    if global.format == Format::Table {
        writeln!(out)?;
        let mut printed = Table::new([
            Column::text("ratio of times", "ratio"),
            Column::number("published", "published_ratio"),
            Column::number("predicted", "predicted_ratio"),
            Column::number("error (%)", "error_percent"),
        ]);
        for ratio in &ratios {
            printed.row([
                Cell::from(ratio.name),
                Cell::number(ratio.published, 2),
                Cell::number(ratio.predicted, 2),
                Cell::number(ratio.error_pct, 1),
            ]);
        }
        printed.write_text(out)?;
    }
    global.say(&format!(
        "{unknown} more rows cannot be timed; `tpusim predict` says why"
    ));
    Ok(Outcome::Done)
}

/// Predictions of measured decode steps with a log: the table for people by mechanism and step, JSON and CSV row by row.
fn delta_log_table(out: &mut impl Write, global: &Global) -> anyhow::Result<Outcome> {
    let rows = delta_log::rows(hardware::shipped_calibration(), &BTreeMap::new())?;
    let scores = delta_log::scores(&rows);
    if global.format == Format::Table {
        let mut printed = Table::new([
            Column::text("mechanism", "mechanism"),
            Column::text("step", "step"),
            Column::number("n", "rows"),
            Column::number("median abs (%)", "median_abs_pct"),
            Column::number("p90 abs (%)", "p90_abs_pct"),
            Column::number("bias (%)", "bias_pct"),
            Column::number("speedup (%)", "speedup_abs_pct"),
        ]);
        for score in &scores {
            printed.row([
                Cell::from(&score.mechanism),
                Cell::from(&score.step),
                Cell::from(score.n),
                Cell::number(score.median_abs_pct, 1),
                Cell::number(score.p90_abs_pct, 1),
                Cell::number(score.bias_pct, 1),
                Cell::optional(score.speedup_abs_pct, 1),
            ]);
        }
        printed.write_text(out)?;
        return Ok(Outcome::Done);
    }
    let mut printed = Table::new([
        Column::text("device", "device"),
        Column::text("mechanism", "mechanism"),
        Column::text("step", "step"),
        Column::text("params", "params"),
        Column::number("measured (us)", "measured_us"),
        Column::number("predicted (us)", "predicted_us"),
        Column::number("error (%)", "error_percent"),
    ]);
    for row in &rows {
        printed.row([
            Cell::from(&row.device),
            Cell::from(&row.mechanism),
            Cell::from(&row.step),
            Cell::from(&row.params),
            Cell::number(row.measured_us, 3),
            Cell::number(row.predicted_us, 3),
            Cell::number(row.error_pct(), 2),
        ]);
    }
    print(
        out,
        global.format,
        &printed,
        &json!({ "groups": scores, "rows": rows }),
    )?;
    Ok(Outcome::Done)
}

/// Measured winners against the choices of the model: the table for people by operation and device, JSON and CSV row by row.
fn blocks_table(out: &mut impl Write, global: &Global) -> anyhow::Result<Outcome> {
    let choices = blocks::choices()?;
    let groups = blocks::groups(&choices);
    if global.format == Format::Table {
        let mut printed = Table::new([
            Column::text("op", "op"),
            Column::text("device", "device"),
            Column::number("n", "rows"),
            Column::number("same choice (%)", "agree_pct"),
            Column::number("winner within 10 % (%)", "close_pct"),
            Column::number("by chance (%)", "chance_pct"),
            Column::number("median ratio", "median_ratio"),
            Column::number("p90 ratio", "p90_ratio"),
            Column::number("candidates", "candidates_count"),
        ]);
        for group in &groups {
            printed.row([
                Cell::from(&group.op),
                Cell::from(&group.device),
                Cell::from(group.rows),
                Cell::number(group.agree_pct, 0),
                Cell::number(group.close_pct, 0),
                Cell::number(group.chance_pct, 0),
                Cell::number(group.median_ratio, 2),
                Cell::number(group.p90_ratio, 2),
                Cell::number(group.candidates, 0),
            ]);
        }
        printed.write_text(out)?;
        return Ok(Outcome::Done);
    }
    let mut printed = Table::new([
        Column::text("op", "op"),
        Column::text("device", "device"),
        Column::text("params", "params"),
        Column::number("measured (us)", "measured_us"),
        Column::number("winner (us)", "winner_us"),
        Column::text("best", "best"),
        Column::number("best (us)", "best_us"),
        Column::number("candidates", "candidates_count"),
        Column::number("close candidates (%)", "close_candidates_pct"),
    ]);
    for choice in &choices {
        printed.row([
            Cell::from(&choice.op),
            Cell::from(&choice.device),
            Cell::from(&choice.params),
            Cell::number(choice.measured_us, 2),
            Cell::number(choice.winner_us, 2),
            Cell::from(&choice.best),
            Cell::number(choice.best_us, 2),
            Cell::from(choice.candidates),
            Cell::number(choice.close_candidates_pct, 1),
        ]);
    }
    print(
        out,
        global.format,
        &printed,
        &json!({ "groups": groups, "rows": choices }),
    )?;
    Ok(Outcome::Done)
}

/// Points of the picture: out of fold where something was left out, and what the title says of it.
fn points(
    observations: &[Observation],
    residuals: &BTreeMap<Split, Vec<Option<f64>>>,
) -> (&'static str, Vec<Point>) {
    let (title, split) = if residuals.contains_key(&Split::LeaveDeviceOut) {
        (
            "Predicted against measured time, each device left out in turn",
            Split::LeaveDeviceOut,
        )
    } else if residuals.contains_key(&Split::ByShape) {
        (
            "Predicted against measured time, a fifth of the shapes left out",
            Split::ByShape,
        )
    } else {
        (
            "Predicted against measured time, shipped calibration",
            Split::InSample,
        )
    };
    let of_split = residuals.get(&split).into_iter().flatten();
    let points = observations
        .iter()
        .zip(of_split)
        .filter_map(|(o, residual)| {
            residual.map(|residual| Point {
                device: o.row.device.clone(),
                measured_us: o.measured_us,
                predicted_us: o.measured_us * residual.exp(),
            })
        })
        .collect();
    (title, points)
}

fn table(scores: &[Score]) -> Table {
    let mut table = Table::new([
        Column::text("family", "family"),
        Column::text("device", "device"),
        Column::text("split", "split"),
        Column::number("n", "n"),
        Column::number("median |error| (%)", "median_abs_pct"),
        Column::number("p90 |error| (%)", "p90_abs_pct"),
        Column::number("bias (%)", "bias_pct"),
        Column::number("rank correlation", "spearman"),
        Column::number("ratio error (%)", "ratio_median_pct"),
        Column::number("winner right (%)", "winner_pct"),
        Column::number("80 % interval holds (%)", "coverage80_pct"),
    ]);
    for score in scores {
        table.row([
            Cell::from(&score.family),
            Cell::from(&score.device),
            Cell::from(score.split.name()),
            Cell::from(score.n),
            Cell::number(score.median_abs_pct, 1),
            Cell::number(score.p90_abs_pct, 1),
            Cell::number(score.bias_pct, 1),
            Cell::optional(score.spearman, 3),
            Cell::optional(score.ratio_median_pct, 1),
            Cell::optional(score.winner_pct, 1),
            Cell::optional(score.coverage80_pct, 0),
        ]);
    }
    table
}
