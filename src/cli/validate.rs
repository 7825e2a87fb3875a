//! `tpusim validate`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::json;

use super::fit::{self, refuse_to_replace, write_file};
use super::{Global, Outcome};
use crate::calibration::data::Observation;
use crate::calibration::validate::{self, Score, Split};
use crate::hardware;
use crate::report::plot::Theme;
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
    refuse_to_replace(&wanted_files(args), args.force)?;
    let files = ChipFiles::new(&args.chip)?;
    files.check_calibration()?;
    let data = fit::read(&args.csv, args.csv.is_empty(), &args.families, &files)?;
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
            calibration: hardware::shipped_calibration(),
            ratios: &cross_check::cross_check()?,
        });
        let picture = picture_of(path);
        let images = picture.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(images).with_context(|| format!("cannot create {}", images.display()))?;
        write_file(&picture, scatter::svg(title, &points, Theme::Light)?)?;
        write_file(path, page)?;
    }
    match global.format {
        Format::Json => {
            serde_json::to_writer_pretty(&mut *out, &json!({ "rows": scores }))?;
            writeln!(out)?;
        }
        Format::Table => table(&scores).write_text(out)?,
        Format::Csv => table(&scores).write_csv(out)?,
    }
    fit::rejected(&data, global);
    Ok(Outcome::Done)
}

/// Files that the arguments ask for.
fn wanted_files(args: &ValidateArgs) -> Vec<PathBuf> {
    let pictures = args
        .plot
        .iter()
        .flat_map(|path| [path.with_extension("svg"), path.with_extension("png")]);
    let page = args.page.iter().flat_map(|path| [path.clone(), picture_of(path)]);
    page.chain(pictures).collect()
}

/// The picture that a page shows.
fn picture_of(page: &Path) -> PathBuf {
    page.with_file_name("images").join("validation.svg")
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
