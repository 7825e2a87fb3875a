//! `tpusim validate`.

use std::collections::BTreeMap;
use std::io::Write;

use clap::{Args, ValueEnum};
use serde_json::json;

use super::{Global, Outcome, fit};
use crate::calibration::validate::{self, Score, Split};
use crate::report::table::{Cell, Column, Format, Table};

/// What a fit does not see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LeaveOut {
    /// One device at a time
    Device,
    /// One family of kernels at a time
    Family,
    /// A fifth of the shapes at a time
    Shape,
}

/// Arguments of `tpusim validate`.
#[derive(Debug, Args)]
pub(super) struct ValidateArgs {
    /// Files of measured cases to score the shipped calibration on, without fitting; without any, the shipped measurements are fitted and left out in turn
    csv: Vec<String>,
    /// What to leave out; all three where absent
    #[arg(long, value_enum, value_delimiter = ',')]
    leave_out: Vec<LeaveOut>,
    /// Only these families, by name or by a part of it
    #[arg(long, value_delimiter = ',')]
    families: Vec<String>,
}

pub(super) fn execute(out: &mut impl Write, args: &ValidateArgs, global: &Global) -> anyhow::Result<Outcome> {
    let data = fit::read(&args.csv, args.csv.is_empty(), &args.families)?;
    let scores = if args.csv.is_empty() {
        let wanted = |what: LeaveOut| args.leave_out.is_empty() || args.leave_out.contains(&what);
        let splits: Vec<Split> = [
            (true, Split::InSample),
            (wanted(LeaveOut::Shape), Split::ByShape),
            (wanted(LeaveOut::Device), Split::LeaveDeviceOut),
            (wanted(LeaveOut::Family), Split::LeaveFamilyOut),
            (true, Split::Roofline),
        ]
        .into_iter()
        .filter(|(wanted, _)| *wanted)
        .map(|(_, split)| split)
        .collect();
        let validation = validate::validate(&data, &splits);
        validate::scores(&data.used, &validation.residuals)
    } else {
        let residuals = BTreeMap::from([
            (Split::InSample, validate::unfitted(&data.used)),
            (Split::Roofline, validate::roofline(&data.used)),
        ]);
        validate::scores(&data.used, &residuals)
    };
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
