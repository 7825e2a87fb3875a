//! `tpusim fit`.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;

use super::{Global, Outcome};
use crate::calibration::data::{self, Data};
use crate::calibration::validate::{self, Split};
use crate::hardware::Calibration;
use crate::measurements;
use crate::report::table::{Cell, Column, Format, Table};

/// Arguments of `tpusim fit`.
#[derive(Debug, Args)]
pub(super) struct FitArgs {
    /// Files of measured cases to fit to, besides or instead of the shipped ones
    csv: Vec<String>,
    /// Only these families, by name or by a part of it, for instance `attention`
    #[arg(long, value_delimiter = ',')]
    families: Vec<String>,
    /// Leave the shipped measurements out
    #[arg(long)]
    only_given: bool,
    /// File to write the calibration to; printed as a table where absent
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace the file
    #[arg(long)]
    force: bool,
}

pub(super) fn execute(out: &mut impl Write, args: &FitArgs, global: &Global) -> anyhow::Result<Outcome> {
    refuse_to_replace(args.out.iter(), args.force)?;
    let data = read(&args.csv, !args.only_given, &args.families)?;
    if data.used.is_empty() {
        bail!("no row is left to fit; {} were left out", data.rejected.len());
    }
    let validation = validate::validate(&data, &[Split::ByShape, Split::LeaveDeviceOut]);
    let mut calibration = validation.fit.calibration(&data);
    calibration.residuals = validate::interval_residuals(&data.used, &validation.residuals);
    match global.format {
        Format::Json => {
            serde_json::to_writer_pretty(&mut *out, &calibration)?;
            writeln!(out)?;
        }
        Format::Table => table(&calibration).write_text(out)?,
        Format::Csv => table(&calibration).write_csv(out)?,
    }
    rejected(&data, global);
    if let Some(path) = &args.out {
        let mut text = serde_json::to_string_pretty(&calibration)?;
        text.push('\n');
        write_file(path, text)?;
    }
    Ok(Outcome::Done)
}

/// The rows of the files, screened.
pub(super) fn read(csv: &[String], shipped: bool, families: &[String]) -> anyhow::Result<Data> {
    let mut tables = if shipped { data::shipped()? } else { Vec::new() };
    for path in csv {
        tables.push(measurements::read(path)?);
    }
    let mut data = data::screen(&tables);
    if !families.is_empty() {
        data.used
            .retain(|o| families.iter().any(|family| o.family.contains(family.as_str())));
    }
    Ok(data)
}

/// Says how many rows were left out and why, by reason.
pub(super) fn rejected(data: &Data, global: &Global) {
    let mut reasons: std::collections::BTreeMap<String, usize> = std::collections::BTreeMap::new();
    for rejected in &data.rejected {
        let kind = rejected
            .reason
            .split([':', ' '])
            .take(3)
            .collect::<Vec<_>>()
            .join(" ");
        *reasons.entry(kind).or_default() += 1;
    }
    let text: Vec<String> = reasons
        .iter()
        .map(|(reason, count)| format!("{count} ({reason} ..)"))
        .collect();
    global.say(&format!(
        "{} rows used, {} left out: {}",
        data.used.len(),
        data.rejected.len(),
        text.join(", ")
    ));
}

/// Refuses files that exist, unless they may be replaced.
pub(super) fn refuse_to_replace<'a>(
    paths: impl IntoIterator<Item = &'a PathBuf>,
    force: bool,
) -> anyhow::Result<()> {
    match paths.into_iter().find(|path| !force && path.exists()) {
        Some(path) => bail!("{} exists; `--force` replaces it", path.display()),
        None => Ok(()),
    }
}

pub(super) fn write_file(path: &Path, text: String) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn table(calibration: &Calibration) -> Table {
    let mut table = Table::new([
        Column::text("parameter", "parameter"),
        Column::number("value", "value"),
        Column::number("standard error", "standard_error"),
        Column::number("prior", "prior"),
        Column::text("unit", "unit"),
        Column::number("rows", "rows_count"),
        Column::text("remarks", "remarks"),
    ]);
    for (name, fitted) in calibration.parameters() {
        table.row([
            Cell::from(name),
            Cell::number(fitted.value, 4),
            Cell::optional(fitted.standard_error, 4),
            Cell::number(fitted.prior, 4),
            Cell::from(&fitted.unit),
            Cell::from(fitted.rows),
            Cell::from(&fitted.warning),
        ]);
    }
    table
}
