//! `tpusim whatif`.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, anyhow, bail};
use clap::{Args, Subcommand};
use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::run::chip_names;
use super::{Global, Outcome, split_overrides};
use crate::config::{ConfigError, Document};
use crate::hardware;
use crate::report::plot::Theme;
use crate::report::result::Provenance;
use crate::report::table::Format;
use crate::report::whatif::folder::{self, Existing, Folder, FolderError, Manifest};
use crate::report::whatif::numeric as numeric_report;
use crate::report::whatif::picture::PictureData;
use crate::report::whatif::rows::Columns;
use crate::report::whatif::sensitivity as sensitivity_report;
use crate::report::whatif::summary::Summary;
use crate::study::whatif::{
    Axis, Front, Grid, LayerNumerics, Objective, Row, Shard, Study, Sweep, SweepRequest, sensitivity,
};
use crate::workload::{self, Workload};

/// Arguments of `tpusim whatif`.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true
)]
pub(super) struct WhatifArgs {
    #[command(subcommand)]
    command: Option<WhatifCommand>,
    /// Path of a workload or a study, or the name of a shipped one
    #[arg(required = true)]
    workload: Option<String>,
    /// Values of a field, listed or as a range: `chunk=64,128`, `hw.vector_unit.slots.alu=1..8:*2`
    #[arg(long = "vary", value_name = "FIELD=VALUES")]
    vary: Vec<String>,
    /// Chips instead of those of the workload, separated by commas
    #[arg(long, value_delimiter = ',')]
    hw: Vec<String>,
    /// Change a field in all points
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    set: Vec<String>,
    /// Mark rows that none beats in all of these: `latency,state_bytes`
    #[arg(long, value_delimiter = ',', value_name = "QUANTITIES")]
    pareto: Vec<String>,
    /// Draw the time over the first field as `FILE.svg` and `FILE.png`
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Keep the rows in this folder, as CSV and JSON lines
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only part I of N, from 0; `whatif merge DIR` joins the parts
    #[arg(long, value_name = "I/N", requires = "out")]
    shard: Option<Shard>,
    /// Go on behind the rows that the folder holds
    #[arg(long, requires = "out")]
    resume: bool,
    /// Begin again where the folder holds rows
    #[arg(long, requires = "out", conflicts_with = "resume")]
    force: bool,
    /// Execute every layer of the sweep as well: errors, and the decay that overflows
    #[arg(long, conflicts_with = "out")]
    numerics: bool,
    /// How strongly the time depends on each quantity, instead of a sweep
    #[arg(long, conflicts_with_all = ["vary", "pareto", "out", "numerics"])]
    sensitivity: bool,
}

#[derive(Debug, Subcommand)]
enum WhatifCommand {
    /// Join the parts of a sharded sweep, once all are there
    Merge {
        /// Folder of the sweep
        dir: PathBuf,
    },
}

pub(super) fn execute(out: &mut impl Write, args: &WhatifArgs, global: &Global) -> anyhow::Result<Outcome> {
    if let Some(WhatifCommand::Merge { dir }) = &args.command {
        return merge(out, dir, global);
    }
    let name = args.workload.as_deref().unwrap_or_default();
    let document = workload::read_document(name)?;
    let study = Study::read(name, &document)?;
    let name = study.as_ref().map_or(name, |study| study.workload.as_str());
    if workload::read_document(name)?.node("stack").is_some() {
        bail!("`{name}` is a stack of layers; `whatif` takes the workload of one of them");
    }
    // What the command line says comes after what the study says.
    let of_study = |list: fn(&Study) -> &Vec<String>| study.as_ref().map(list).cloned().unwrap_or_default();
    let set = [of_study(|study| &study.set), args.set.clone()].concat();
    let (hardware_set, workload_set) = split_overrides(&set)?;
    let loaded = workload::load(name, &workload_set)?;
    let hw = if args.hw.is_empty() {
        of_study(|study| &study.hardware)
    } else {
        args.hw.clone()
    };
    let names = chip_names(&hw, name, &loaded.0.hardware, &loaded.1)?;
    let chips = names
        .into_iter()
        .map(|name| {
            let (_, document) = hardware::load_with(&name, &hardware_set)?;
            Ok((name, document))
        })
        .collect::<Result<Vec<_>, ConfigError>>()?;
    if args.vary.is_empty() && study.is_none() && !args.sensitivity {
        bail!("nothing varies; add `--vary FIELD=VALUES`, such as `--vary chunk=64,128`, or `--sensitivity`");
    }
    let mut axes = study.as_ref().map_or_else(Vec::new, |study| study.axes.clone());
    for text in &args.vary {
        axes.push(Axis::parse(text)?);
    }
    let sweep = Sweep::new(SweepRequest {
        workload: &loaded,
        chips: &chips,
        axes,
    })?;
    if args.sensitivity {
        let found = sensitivity(&sweep).map_err(|reason| anyhow!("{reason}"))?;
        match global.format {
            Format::Table => sensitivity_report::write_text(out, &sweep.grid().name, &found)?,
            Format::Json => sensitivity_report::write_json(out, &found)?,
            Format::Csv => sensitivity_report::write_csv(out, &found)?,
        }
        return Ok(Outcome::Done);
    }
    let numerics =
        args.numerics || (args.out.is_none() && study.as_ref().is_some_and(|study| study.numerics));
    if numerics && global.format == Format::Csv && args.numerics {
        bail!("rows and numerics are no one table; use `--format json` or `--format table`");
    }
    let numerics = (numerics && global.format != Format::Csv)
        .then(|| sweep.numerics())
        .transpose()?;
    if let Some(study) = &study {
        study.check_plans(&document, &sweep.grid().plans)?;
    }
    let pareto = if args.pareto.is_empty() {
        of_study(|study| &study.pareto)
    } else {
        args.pareto.clone()
    };
    let manifest = Manifest::new(sweep.grid(), &pareto, provenance(&loaded, &chips, &set));
    run(
        out,
        args,
        global,
        &sweep,
        &manifest,
        (study.as_ref(), numerics.as_deref()),
    )
}

/// Where the rows come from.
fn provenance(
    (workload, document): &(Workload, Document),
    chips: &[(String, Document)],
    set: &[String],
) -> Provenance {
    let digests: Vec<String> = chips.iter().map(|(_, document)| document.digest()).collect();
    let mut inferred = workload.inferred.clone();
    inferred.extend(workload.defaults.iter().map(ToString::to_string));
    Provenance {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        hardware_digest: digests.join("+"),
        workload_digest: document.digest(),
        calibration_digest: hardware::shipped_calibration().digest(),
        overrides: set.to_vec(),
        inferred,
    }
}

fn objectives(names: &[String], grid: &Grid) -> Result<Vec<Objective>, ConfigError> {
    names
        .iter()
        .map(|name| Objective::parse(name, &grid.space))
        .collect()
}

fn run(
    out: &mut impl Write,
    args: &WhatifArgs,
    global: &Global,
    sweep: &Sweep,
    manifest: &Manifest,
    (study, numerics): (Option<&Study>, Option<&[LayerNumerics]>),
) -> anyhow::Result<Outcome> {
    let grid = sweep.grid();
    let columns = Columns::new(grid);
    let front = Front::new(objectives(manifest.pareto(), grid)?);
    let mut picture = match &args.plot {
        Some(_) => Some(PictureData::new(grid).map_err(|why| anyhow!("--plot: {why}"))?),
        None => None,
    };
    let shard = args.shard.unwrap_or(Shard::WHOLE);
    let range = grid.space.shard(shard);
    let points = range.end - range.start;
    let with_front = !manifest.pareto().is_empty();
    let mut summary = Summary::new(grid, points * grid.rows_per_point(), front, with_front);
    let mut printer = Printer::new(global.format, with_front);
    let folder = match &args.out {
        Some(dir) => {
            let existing = match (args.resume, args.force) {
                (true, _) => Existing::Resume,
                (_, true) => Existing::Replace,
                _ => Existing::Refuse,
            };
            Some(Folder::open(dir, (manifest, &columns), shard, existing)?)
        }
        None => None,
    };
    printer.begin(out, &columns)?;
    let mut done = folder.as_ref().map_or(0, Folder::done);
    if let Some(folder) = folder.as_ref().filter(|_| done > 0) {
        let mut there = Vec::new();
        folder.replay(&columns, |row| {
            summary.add(&row);
            if let Some(picture) = &mut picture {
                picture.add(&row);
            }
            if printer.prints() {
                there.push(row);
            }
        })?;
        printer.rows(out, &columns, &there)?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))
        .context("cannot listen for an interruption")?;
    let progress = progress(points, done, global);
    sweep.run(range.start + done..range.end, |rows| -> anyhow::Result<_> {
        if let Some(folder) = &folder {
            folder.append(&columns, rows)?;
        }
        for row in rows {
            summary.add(row);
            if let Some(picture) = &mut picture {
                picture.add(row);
            }
        }
        printer.rows(out, &columns, rows)?;
        done += rows.len() as u64 / grid.rows_per_point().max(1);
        progress.set_position(done);
        Ok(if stop.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        })
    })?;
    progress.finish_and_clear();
    let whole = done == points;
    if let Some(dir) = args.out.as_deref().filter(|_| whole && shard == Shard::WHOLE) {
        folder::finish(dir, &columns, with_front.then(|| summary.front()).as_deref())?;
    }
    if let (Format::Table, Some(study)) = (global.format, study) {
        writeln!(out, "{}\n", study.title)?;
    }
    printer.end(out, &columns, &summary)?;
    if let Some(numerics) = numerics {
        if global.format == Format::Table {
            writeln!(out)?;
            numeric_report::write_text(out, numerics)?;
        } else {
            numeric_report::write_json(out, numerics)?;
        }
    }
    if let (Format::Table, Some(study)) = (global.format, study) {
        writeln!(out, "\n{}", study.reading)?;
    }
    if let (Some(path), Some(picture), true) = (&args.plot, picture, whole) {
        let title = study.map_or(&grid.name, |study| &study.title);
        let step_plans = study.map_or(&[][..], |study| &study.step_plans);
        let sheet = picture.sheet(title, step_plans);
        super::write_pictures(path, &sheet.svg(Theme::Light)?, |png| {
            sheet.png(Theme::Light, png)
        })?;
        global.say(&format!(
            "picture: {}, {}",
            path.with_extension("svg").display(),
            path.with_extension("png").display()
        ));
    }
    if !whole {
        let advice = match (&args.out, args.shard) {
            (None, _) => "with `--out DIR` it could go on from there",
            (_, Some(_)) => "the same command goes on from there",
            (_, None) => "the same command with `--resume` goes on from there",
        };
        global.say(&format!(
            "stopped after {done} of {points} points, whose rows are whole; {advice}"
        ));
        return Ok(Outcome::CheckFailed);
    }
    if let Some(dir) = &args.out {
        global.say(&format!("rows: {}", dir.display()));
    }
    Ok(if summary.invalid() > 0 {
        Outcome::CheckFailed
    } else {
        Outcome::Done
    })
}

fn merge(out: &mut impl Write, dir: &Path, global: &Global) -> anyhow::Result<Outcome> {
    let manifest = Manifest::read(dir)?;
    let grid = manifest.grid()?;
    let columns = Columns::new(&grid);
    let with_front = !manifest.pareto().is_empty();
    let front = Front::new(objectives(manifest.pareto(), &grid)?);
    let rows = grid.space.points() * grid.rows_per_point();
    let mut summary = Summary::new(&grid, rows, front, with_front);
    let mut printer = Printer::new(global.format, with_front);
    let mut all = Vec::new();
    let merged = folder::merge(dir, &columns, |row| {
        summary.add(&row);
        if printer.prints() {
            all.push(row);
        }
    });
    match merged {
        Err(incomplete @ FolderError::Incomplete { .. }) => {
            let _ = writeln!(std::io::stderr(), "error: {incomplete}");
            return Ok(Outcome::CheckFailed);
        }
        other => other?,
    }
    folder::finish(dir, &columns, with_front.then(|| summary.front()).as_deref())?;
    printer.begin(out, &columns)?;
    printer.rows(out, &columns, &all)?;
    printer.end(out, &columns, &summary)?;
    global.say(&format!("rows: {}", dir.display()));
    Ok(if summary.invalid() > 0 {
        Outcome::CheckFailed
    } else {
        Outcome::Done
    })
}

/// A bar with rate and remaining time, where a person watches.
fn progress(points: u64, done: u64, global: &Global) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() && !global.quiet {
        ProgressDrawTarget::stderr_with_hz(5)
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(points), target).with_position(done);
    let form = "{bar:30} {human_pos} of {human_len} points, {rate} points/s, {eta} left";
    match ProgressStyle::with_template(form) {
        Ok(style) => bar.with_style(style.with_key(
            "rate",
            |state: &ProgressState, out: &mut dyn fmt::Write| {
                // Whatever cannot be written is only progress.
                let _ = write!(out, "{}", HumanCount(state.per_sec() as u64));
            },
        )),
        Err(_) => bar,
    }
}

/// Prints rows as they come; where rows are marked, after the last one.
struct Printer {
    format: Format,
    marked: bool,
    held: Vec<Row>,
}

impl Printer {
    fn new(format: Format, marked: bool) -> Self {
        Printer {
            format,
            marked,
            held: Vec::new(),
        }
    }

    /// Whether rows are printed at all.
    fn prints(&self) -> bool {
        self.format != Format::Table
    }

    fn begin(&self, out: &mut impl Write, columns: &Columns<'_>) -> anyhow::Result<()> {
        if self.format == Format::Csv {
            let header = columns.header();
            let mark = if self.marked { ",pareto" } else { "" };
            writeln!(out, "{}{mark}", header.trim_end())?;
        }
        Ok(())
    }

    fn rows(&mut self, out: &mut impl Write, columns: &Columns<'_>, rows: &[Row]) -> anyhow::Result<()> {
        if !self.prints() {
            return Ok(());
        }
        if self.marked {
            self.held.extend_from_slice(rows);
            return Ok(());
        }
        self.write(out, columns, rows, None)
    }

    fn write(
        &self,
        out: &mut impl Write,
        columns: &Columns<'_>,
        rows: &[Row],
        marks: Option<&[bool]>,
    ) -> anyhow::Result<()> {
        out.write_all(&match self.format {
            Format::Json => columns.json(rows, marks),
            _ => columns.csv(rows, marks),
        })?;
        Ok(())
    }

    fn end(
        &mut self,
        out: &mut impl Write,
        columns: &Columns<'_>,
        summary: &Summary<'_>,
    ) -> anyhow::Result<()> {
        if !self.prints() {
            summary.write(out)?;
        } else if self.marked {
            let rows = std::mem::take(&mut self.held);
            self.write(out, columns, &rows, Some(&summary.marks(&rows)))?;
        }
        Ok(())
    }
}
