//! `tpusim fit`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;

use super::{Global, Outcome, print};
use crate::calibration::data::{self, Data};
use crate::calibration::own_chip::{self, ChipFit};
use crate::calibration::schedules::{self, Program};
use crate::calibration::validate::{self, Split};
use crate::dump::{Dump, schedule};
use crate::hardware::{self, Calibration, ScheduleConstants};
use crate::measurements::{self, Table};
use crate::report::table::{Cell, Column, Format, Table as Printed};
use crate::study::predict::ChipFiles;

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
    /// Calibrate this chip alone, from rows of its own: a hardware file (its name without folder and `.yaml` is the device of the rows) or a shipped name
    #[arg(long, value_name = "FILE", conflicts_with_all = ["families", "only_given"], requires = "csv")]
    chip: Option<String>,
    /// Fit the constants of `tpusim dump` instead, to the shipped schedules and to these dumps or files of schedules; a dump says `measured_us` and `family` in its meta.json
    #[arg(long, value_name = "DUMP", num_args = 0.., conflicts_with_all = ["csv", "families", "chip"])]
    dumps: Option<Vec<PathBuf>>,
    /// File to write the calibration to; printed as a table where absent
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace the file
    #[arg(long)]
    force: bool,
}

pub(super) fn execute(out: &mut impl Write, args: &FitArgs, global: &Global) -> anyhow::Result<Outcome> {
    refuse_to_replace(args.out.iter(), args.force)?;
    if let Some(dumps) = &args.dumps {
        return schedules(out, args, dumps, global);
    }
    if let Some(chip) = &args.chip {
        return own_chip(out, args, chip, global);
    }
    let data = read(&args.csv, !args.only_given, &args.families, &ChipFiles::default())?;
    if data.used.is_empty() {
        bail!("no row is left to fit; {} were left out", data.rejected.len());
    }
    let validation = validate::validate(&data, &[Split::ByShape, Split::LeaveDeviceOut]);
    let mut calibration = validation.fit.calibration(&data);
    calibration.residuals = validate::interval_residuals(&data.used, &validation.residuals);
    calibration
        .schedules
        .clone_from(&hardware::shipped_calibration().schedules);
    print(out, global.format, &table(&calibration), &calibration)?;
    rejected(&data, global);
    if let Some(path) = &args.out {
        write_calibration(path, &calibration)?;
    }
    Ok(Outcome::Done)
}

/// Fits what compiled schedules do not say.
fn schedules(
    out: &mut impl Write,
    args: &FitArgs,
    dumps: &[PathBuf],
    global: &Global,
) -> anyhow::Result<Outcome> {
    let mut programs = if args.only_given {
        Vec::new()
    } else {
        schedules::shipped()?
    };
    for path in dumps {
        let name = path.display().to_string();
        if path.extension().is_some_and(|ending| ending == "jsonl") {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
            programs.extend(schedules::programs(&name, &text)?);
        } else {
            let dump = Dump::read(path, None, None)?;
            let cores = hardware::load_uncalibrated(dump.generation.chip())?.cores_per_device;
            programs.push(Program::new(schedule(&dump, cores), &name)?);
        }
    }
    let fitted = schedules::fit(&programs)?.constants;
    print(out, global.format, &constants(&fitted), &fitted)?;
    if global.format == Format::Table {
        writeln!(
            out,
            "
{} programs; measured over predicted time, each without its family, 80 % interval {} to {}",
            fitted.rows, fitted.low, fitted.high
        )?;
    }
    if let Some(path) = &args.out {
        let calibration = Calibration {
            schedules: Some(fitted),
            ..hardware::shipped_calibration().clone()
        };
        write_calibration(path, &calibration)?;
    }
    Ok(Outcome::Done)
}

/// The constants of schedules.
fn constants(fitted: &ScheduleConstants) -> Printed {
    let mut table = Printed::new([
        Column::text("constant", "constant"),
        Column::number("value", "value"),
        Column::number("standard error", "standard_error"),
        Column::number("low", "low"),
        Column::number("high", "high"),
        Column::text("unit", "unit"),
        Column::number("programs", "programs_count"),
        Column::text("meaning", "meaning"),
    ]);
    for (name, constant) in fitted.parameters() {
        table.row([
            Cell::from(name),
            Cell::number(constant.value, 4),
            Cell::number(constant.standard_error, 4),
            Cell::number(constant.low, 1),
            Cell::number(constant.high, 1),
            Cell::from(&constant.unit),
            Cell::from(constant.rows),
            Cell::from(&constant.meaning),
        ]);
    }
    table
}

/// Calibrates one chip.
fn own_chip(out: &mut impl Write, args: &FitArgs, path: &str, global: &Global) -> anyhow::Result<Outcome> {
    let document = hardware::read(path)?;
    let chip = hardware::load_uncalibrated(path)?;
    let tables = args
        .csv
        .iter()
        .map(measurements::read)
        .collect::<Result<Vec<Table>, _>>()?;
    for table in &tables {
        if let Some(row) = table.rows.iter().find(|row| row.device != chip.name) {
            bail!(
                "{}:{}: expected rows of `{}`, the chip of `{path}`, found the device `{}`",
                table.name,
                row.line,
                chip.name,
                row.device
            );
        }
    }
    let data = data::screen(&tables, &ChipFiles::uncalibrated(&[path])?);
    if data.used.is_empty() {
        let why = data.rejected.first().map_or_else(String::new, |rejected| {
            format!(": {}:{}: {}", rejected.file, rejected.line, rejected.reason)
        });
        bail!(
            "no row is left to fit; {} were left out{why}",
            data.rejected.len()
        );
    }
    let fitted = own_chip::calibrate(&data, &chip, &document.digest(), hardware::shipped_calibration());
    let of_chip = Calibration {
        coefficients: BTreeMap::new(),
        chips: fitted
            .calibration
            .chips
            .iter()
            .filter(|(name, _)| **name == chip.name)
            .map(|(name, quantities)| (name.clone(), quantities.clone()))
            .collect(),
        ..Calibration::empty()
    };
    print(out, global.format, &table(&of_chip), &fitted.calibration)?;
    if global.format == Format::Table {
        writeln!(out)?;
        errors(&data, &fitted).write_text(out)?;
        let unseen: Vec<String> = of_chip
            .parameters()
            .filter(|(_, value)| !value.warning.is_empty())
            .map(|(name, value)| format!("{name} ({})", value.warning))
            .collect();
        let text = if unseen.is_empty() {
            "nothing".to_owned()
        } else {
            unseen.join(", ")
        };
        writeln!(out, "\nnot told or not separated by these rows: {text}")?;
    }
    rejected(&data, global);
    if let Some(path) = &args.out {
        write_calibration(path, &fitted.calibration)?;
    }
    Ok(Outcome::Done)
}

/// Errors by family before and after a calibration, and on what it had not seen.
fn errors(data: &Data, fitted: &ChipFit) -> Printed {
    let mut printed = Printed::new([
        Column::text("family", "family"),
        Column::number("rows", "rows_count"),
        Column::number("before, median |error| (%)", "before_median_abs_pct"),
        Column::number("fitted (%)", "fitted_median_abs_pct"),
        Column::number("shapes left out (%)", "by_shape_median_abs_pct"),
    ]);
    let mut families: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, o) in data.used.iter().enumerate() {
        families.entry(&o.family).or_default().push(i);
        families.entry("all").or_default().push(i);
    }
    let median = |residuals: &[f64]| validate::median_abs_percent(residuals);
    for (family, rows) in families {
        let of = |residuals: &[f64]| rows.iter().map(|&i| residuals[i]).collect::<Vec<f64>>();
        let left_out: Vec<f64> = rows.iter().filter_map(|&i| fitted.out_of_fold[i]).collect();
        printed.row([
            Cell::from(family),
            Cell::from(rows.len()),
            Cell::number(median(&of(&fitted.before)), 1),
            Cell::number(median(&of(&fitted.after)), 1),
            if left_out.is_empty() {
                Cell::none()
            } else {
                Cell::number(median(&left_out), 1)
            },
        ]);
    }
    printed
}

fn write_calibration(path: &Path, calibration: &Calibration) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(calibration)?;
    text.push('\n');
    write_file(path, text)
}

/// The rows of the files, screened.
pub(super) fn read(
    csv: &[String],
    shipped: bool,
    families: &[String],
    files: &ChipFiles,
) -> anyhow::Result<Data> {
    let mut tables = if shipped { data::shipped()? } else { Vec::new() };
    for path in csv {
        tables.push(measurements::read(path)?);
    }
    let mut data = data::screen(&tables, files);
    if !families.is_empty() {
        data.used
            .retain(|o| families.iter().any(|family| o.family.contains(family.as_str())));
    }
    Ok(data)
}

/// Says how many rows were left out and why, by reason.
pub(super) fn rejected(data: &Data, global: &Global) {
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
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

fn table(calibration: &Calibration) -> Printed {
    let mut table = Printed::new([
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
