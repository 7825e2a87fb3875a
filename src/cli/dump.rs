//! `tpusim dump`: how long a compiled program takes, read off the compiler's own schedule.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use serde::Serialize;

use super::{Global, Outcome};
use crate::config::suggestion;
use crate::dump::report::{HotBlock, not_compared};
use crate::dump::schedule::read_lines;
use crate::dump::{Analysis, Dump, Generation, Machine, analyse, program_time, schedule};
use crate::hardware::{self, ScheduleConstants};
use crate::report::dump::{csv_table, program_csv, program_table, render};
use crate::report::folder::{self, Extra};
use crate::report::result::RunResult;
use crate::report::table::Format;
use crate::report::trace;
use crate::study;

/// Arguments of `tpusim dump`.
#[derive(Debug, Args)]
pub(super) struct DumpArgs {
    /// Folder or `.tar.xz` archive with `hlo.txt` and the compiler's bundle texts, several are done in turn; or files of compact schedules, of which the programs are listed, one a row
    #[arg(required = true, value_name = "DIR|FILE.tar.xz|FILE.jsonl")]
    dumps: Vec<PathBuf>,
    /// Chip it was compiled for, where `meta.json` does not say it, for instance `tpu-v6e`
    #[arg(long)]
    hw: Option<String>,
    /// Run-time scalars, instead of the dump's own `scalars.json`
    #[arg(long, value_name = "FILE")]
    scalars: Option<PathBuf>,
    /// Show the bundles of this kernel's hot blocks
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Write the compact schedules, one a line, which `tpusim fit --dumps` takes
    #[arg(long, value_name = "FILE")]
    schedules: Option<PathBuf>,
    /// Replace that file
    #[arg(long)]
    force: bool,
    /// Write a report folder as `tpusim run` does: page, roofline, table, result, and trace.json for Perfetto
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// A bundle of a hot block.
#[derive(Debug, Serialize)]
struct BundleText {
    /// Number of the bundle.
    bundle: usize,
    /// Empty cycles behind it.
    empty_cycles: u32,
    /// Slots that it uses, in the order of the analysis; empty without a table.
    slots: Vec<u16>,
    /// Statements, as the compiler writes them.
    text: String,
}

/// A hot block with its bundles.
#[derive(Debug, Serialize)]
struct BlockText {
    #[serde(flatten)]
    block: HotBlock,
    bundles: Vec<BundleText>,
}

/// An analysis, and the bundles that were asked for.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    analysis: Analysis,
    #[serde(skip_serializing_if = "Option::is_none")]
    listing: Option<Vec<BlockText>>,
}

pub(super) fn execute(out: &mut impl Write, args: &DumpArgs, global: &Global) -> anyhow::Result<Outcome> {
    let generation = generation(args.hw.as_deref())?;
    super::fit::refuse_to_replace(&args.schedules, args.force)?;
    if let Some(out) = &args.out {
        if args.dumps.len() > 1 {
            bail!(
                "--out writes the report of one dump; {} were given",
                args.dumps.len()
            );
        }
        folder::check_target(out)?;
    }
    let constants = constants()?;
    if args.dumps.iter().any(|path| is_schedules(path)) {
        return programs(out, args, global, constants);
    }
    let mut shown = Vec::new();
    let mut schedules = String::new();
    for path in &args.dumps {
        let dump = Dump::read(path, args.scalars.as_deref(), generation)?;
        let machine = study::dump::machine(constants, dump.generation)?;
        let analysis = analyse(&dump, &machine, constants);
        if args.schedules.is_some() {
            schedules.push_str(&serde_json::to_string(&schedule(&dump, machine.cores))?);
            schedules.push('\n');
        }
        // The text has them at its end.
        for warning in analysis
            .warnings
            .iter()
            .filter(|_| global.format != Format::Table)
        {
            global.say(&format!("warning: {}: {warning}", analysis.dump));
        }
        let listing = match &args.kernel {
            Some(name) => Some(listing(&dump, &analysis, name)?),
            None => None,
        };
        if let Some(target) = &args.out {
            write_report(target, &dump, &analysis, &machine, constants)?;
            global.say(&format!("report: {}", target.join("index.html").display()));
        }
        shown.push(Shown { analysis, listing });
    }
    if let Some(path) = &args.schedules {
        super::fit::write_file(path, schedules)?;
    }
    match global.format {
        Format::Json => match shown.as_slice() {
            [only] => super::json(out, only)?,
            several => super::json(out, &several)?,
        },
        Format::Csv => {
            let analyses: Vec<&Analysis> = shown.iter().map(|one| &one.analysis).collect();
            csv_table(&analyses).write_csv(out)?;
        }
        Format::Table => {
            for (index, one) in shown.iter().enumerate() {
                if index > 0 {
                    writeln!(out)?;
                }
                out.write_all(render(&one.analysis).as_bytes())?;
                for block in one.listing.iter().flatten() {
                    write_block(out, block)?;
                }
            }
        }
    }
    Ok(Outcome::Done)
}

/// Whether a path is that of compact schedules.
fn is_schedules(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "jsonl")
}

/// Lists the programs of files of compact schedules.
fn programs(
    out: &mut impl Write,
    args: &DumpArgs,
    global: &Global,
    constants: &ScheduleConstants,
) -> anyhow::Result<Outcome> {
    if let Some(dump) = args.dumps.iter().find(|path| !is_schedules(path)) {
        bail!(
            "`{}` is a dump, the others are files of compact schedules; expected all of one kind",
            dump.display()
        );
    }
    let given = [
        ("--hw", args.hw.is_some()),
        ("--scalars", args.scalars.is_some()),
        ("--kernel", args.kernel.is_some()),
        ("--schedules", args.schedules.is_some()),
        ("--out", args.out.is_some()),
    ];
    if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
        bail!(
            "{option} needs a dump: `{}` has schedules alone, without the compiler's texts",
            args.dumps[0].display()
        );
    }
    let mut timed = Vec::new();
    for path in &args.dumps {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
        for schedule in read_lines(&name, &text)? {
            let generation = schedule.timed(&name)?.generation();
            // Of which cores a schedule is, it says itself.
            let machine = Machine {
                cores: schedule.cores.max(1),
                ..study::dump::machine(constants, generation)?
            };
            timed.push(program_time(&schedule, &name, &machine, constants)?);
        }
    }
    let chips: BTreeSet<&str> = timed.iter().map(|one| one.chip).collect();
    for warning in chips.iter().filter_map(|chip| not_compared(chip, constants)) {
        global.say(&format!("warning: {warning}"));
    }
    match global.format {
        Format::Json => match timed.as_slice() {
            [only] => super::json(out, only)?,
            several => super::json(out, &several)?,
        },
        Format::Csv => program_csv(&timed).write_csv(out)?,
        Format::Table => program_table(&timed).write_text(out)?,
    }
    Ok(Outcome::Done)
}

/// The generation that `--hw` names.
fn generation(name: Option<&str>) -> anyhow::Result<Option<Generation>> {
    let Some(name) = name else {
        return Ok(None);
    };
    let found = Generation::named(name).with_context(|| {
        let known: Vec<&str> = Generation::ALL
            .iter()
            .map(|generation| generation.chip())
            .collect();
        format!(
            "--hw {name}: no TPU that bundles are known of; {}",
            suggestion(name, &known, "chips")
        )
    })?;
    Ok(Some(found))
}

/// Whether a path is that of a dump: a folder with HLO text or listings in it, or an archive.
pub(super) fn is_dump(path: &Path) -> bool {
    let name = path.to_string_lossy();
    if path.is_file() {
        return name.ends_with(".tar.xz") || name.ends_with(".tar");
    }
    let Ok(entries) = std::fs::read_dir(path) else {
        return false;
    };
    entries.filter_map(Result::ok).any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name == "hlo.txt" || name.ends_with("-final_bundles.txt")
    })
}

/// A dump as a result, for comparisons.
pub(super) fn result(path: &Path) -> anyhow::Result<RunResult> {
    let constants = constants()?;
    let dump = Dump::read(path, None, None)?;
    let machine = study::dump::machine(constants, dump.generation)?;
    let analysis = analyse(&dump, &machine, constants);
    let chip = hardware::load_uncalibrated(dump.generation.chip())?;
    let schedule = schedule(&dump, machine.cores);
    Ok(study::dump::result(
        &analysis, &schedule, &chip, &machine, constants,
    ))
}

/// Writes the report of a dump.
fn write_report(
    target: &Path,
    dump: &Dump,
    analysis: &Analysis,
    machine: &Machine,
    constants: &ScheduleConstants,
) -> anyhow::Result<()> {
    let chip = hardware::load_uncalibrated(dump.generation.chip())?;
    let schedule = schedule(dump, machine.cores);
    let result = study::dump::result(analysis, &schedule, &chip, machine, constants);
    let timeline = schedule.timed(&dump.path)?.timeline(machine);
    let kernels: Vec<&str> = schedule
        .kernels
        .iter()
        .map(|kernel| kernel.name.as_str())
        .collect();
    let title = format!("{} on {}", schedule.name, schedule.chip);
    let trace = trace::of_timeline(&title, &kernels, &timeline, machine.clock_hz);
    let extra = Extra {
        name: "trace.json",
        bytes: trace.as_bytes(),
    };
    folder::write_report_with(target, &result, &[extra])
        .with_context(|| format!("cannot write the report `{}`", target.display()))?;
    Ok(())
}

/// The constants of the calibration in use.
pub(super) fn constants() -> anyhow::Result<&'static ScheduleConstants> {
    hardware::shipped_calibration()
        .schedules
        .as_ref()
        .context("the calibration in use says nothing of compiled schedules; `tpusim fit --dumps --out FILE` adds that")
}

/// The bundles of a kernel's hot blocks.
fn listing(dump: &Dump, analysis: &Analysis, name: &str) -> anyhow::Result<Vec<BlockText>> {
    let Some(kernel) = analysis.kernels.iter().find(|kernel| kernel.name == name) else {
        let names: Vec<&str> = analysis
            .kernels
            .iter()
            .map(|kernel| kernel.name.as_str())
            .collect();
        bail!(
            "unknown kernel `{name}`; {}",
            suggestion(name, &names, "kernels of this dump")
        );
    };
    let mut found = Vec::new();
    for block in analysis.blocks.iter().filter(|block| block.kernel == name) {
        let texts = dump.bundles(&kernel.listing, block.first..block.last + 1)?;
        let bundles = texts
            .into_iter()
            .map(|(bundle, text)| BundleText {
                bundle,
                empty_cycles: dump.empty_cycles(&kernel.listing, bundle),
                slots: dump.slots(&kernel.listing, bundle).to_vec(),
                text: text.split_ascii_whitespace().collect::<Vec<_>>().join(" "),
            })
            .collect();
        found.push(BlockText {
            block: block.clone(),
            bundles,
        });
    }
    Ok(found)
}

fn write_block(out: &mut impl Write, shown: &BlockText) -> std::io::Result<()> {
    let block = &shown.block;
    writeln!(
        out,
        "\n{}: bundles {:#x} to {:#x}, {} runs, {:.1} % of the time",
        block.kernel,
        block.first,
        block.last,
        block.runs,
        100.0 * block.share
    )?;
    let names: Vec<&str> = block.slots.iter().map(|slot| slot.name.as_str()).collect();
    writeln!(
        out,
        "address, empty cycles behind it, slots ({}), statements",
        names.join(" ")
    )?;
    for bundle in &shown.bundles {
        let slots: Vec<String> = bundle.slots.iter().map(u16::to_string).collect();
        writeln!(
            out,
            "{:#6x} {:>4} {} {{ {}",
            bundle.bundle,
            if bundle.empty_cycles > 0 {
                format!("+{}", bundle.empty_cycles)
            } else {
                String::new()
            },
            slots.join(" "),
            bundle.text
        )?;
    }
    Ok(())
}
