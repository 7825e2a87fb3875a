//! `tpusim decode`: what a log of updates beside the state gains.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;

use super::fit::{refuse_to_replace, write_file};
use super::{Global, Outcome, json, split_overrides};
use crate::calibration::delta_log;
use crate::config::Document;
use crate::hardware;
use crate::kernels::Plan;
use crate::layer::Layer;
use crate::report::delta_log as report;
use crate::report::delta_log_page as page;
use crate::report::plot::Theme;
use crate::report::plot::roofline::{self, Options};
use crate::report::result::RunResult;
use crate::report::table::Format;
use crate::study::delta_log::{DeltaLogError, DeltaLogRequest, DeltaLogTables, tables};
use crate::study::{self, Chips, RunRequest};
use crate::workload::{self, Workload};

/// Arguments of `tpusim decode`.
#[derive(Debug, Args)]
pub(super) struct DecodeArgs {
    /// A workload that decodes with a log: a path, or the name of a shipped one
    #[arg(default_value = "gdn_deltalog")]
    workload: String,
    /// Chips instead of those of the workload: names or paths, separated by commas
    #[arg(long, value_delimiter = ',')]
    hw: Vec<String>,
    /// Intervals of the sweep, in tokens from merge to merge
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16", value_parser = clap::value_parser!(u16).range(1..=256))]
    intervals: Vec<u16>,
    /// Numbers of sequences of the sweep
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64,128,512", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    batches: Vec<u32>,
    /// Programs per state of split replay
    #[arg(long, value_delimiter = ',', default_value = "4,8", value_parser = clap::value_parser!(u16).range(1..=1024))]
    split: Vec<u16>,
    /// Write tables (`decode.csv`, `decode.json`) and pictures (SVG) into a folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Write the page docs/deltalog.md is, of shipped workloads, with its pictures in a folder `images/deltalog` beside it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["out", "set", "hw"])]
    page: Option<PathBuf>,
    /// Replace files that exist
    #[arg(long)]
    force: bool,
    /// Change a field of the workload (`layer.log_interval=4`) or of every chip (`hw.hbm.bandwidth='4 TB/s'`)
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    set: Vec<String>,
}

pub(super) fn execute(out: &mut impl Write, args: &DecodeArgs, global: &Global) -> anyhow::Result<Outcome> {
    if let Some(path) = &args.page {
        write_page(path, args)?;
        global.say(&format!("page: {}", path.display()));
        return Ok(Outcome::Done);
    }
    let (loaded, chips, found) = tables_of(&args.workload, &args.set, args)?;
    match global.format {
        Format::Json => json(out, &found)?,
        Format::Csv => report::rows(&found).write_csv(out)?,
        Format::Table => text(out, &found)?,
    }
    if let Some(folder) = &args.out {
        let mut files = data(&found)?;
        files.extend(pictures(&found, &loaded, &chips, &args.set)?);
        write(folder, files, args.force)?;
        global.say(&format!("tables and pictures: {}", folder.display()));
    }
    Ok(Outcome::Done)
}

/// A workload with its file.
type Loaded = (Workload, Document);

/// The tables of a workload with what they are made from.
fn tables_of(
    name: &str,
    set: &[String],
    args: &DecodeArgs,
) -> anyhow::Result<(Loaded, Chips, DeltaLogTables)> {
    let (hardware_set, workload_set) = split_overrides(set)?;
    let loaded = workload::load(name, &workload_set)?;
    let chips = super::run::chips_of(&args.hw, &hardware_set, name, &loaded.0.hardware, &loaded.1)?;
    let ascending = |values: &[u32]| {
        let mut values: Vec<usize> = values.iter().map(|&value| value as usize).collect();
        values.sort_unstable();
        values.dedup();
        values
    };
    let wide = |values: &[u16]| values.iter().map(|&value| u32::from(value)).collect::<Vec<u32>>();
    let found = tables(DeltaLogRequest {
        workload: &loaded,
        chips: &chips,
        intervals: &ascending(&wide(&args.intervals)),
        batches: &ascending(&args.batches),
        splits: &ascending(&wide(&args.split))
            .into_iter()
            .map(|programs| programs as u64)
            .collect::<Vec<u64>>(),
    })
    .map_err(|error| match error {
        // The command line shows where in a file a value stands.
        DeltaLogError::Config(config) => anyhow::Error::from(config),
        other @ DeltaLogError::Build(_) => anyhow::Error::from(other),
    })?;
    Ok((loaded, chips, found))
}

/// Files of a folder, whose names are given with their texts.
fn write(folder: &Path, files: Vec<(String, String)>, force: bool) -> anyhow::Result<()> {
    let paths: Vec<PathBuf> = files.iter().map(|(name, _)| folder.join(name)).collect();
    refuse_to_replace(&paths, force)?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (path, (_, text)) in paths.iter().zip(files) {
        write_file(path, text)?;
    }
    Ok(())
}

fn write_page(path: &Path, args: &DecodeArgs) -> anyhow::Result<()> {
    refuse_to_replace([&path.to_path_buf()], args.force)?;
    let set = [format!("layer.batch={}", page::SEQUENCES)];
    let mut all = Vec::new();
    let mut drawn = Vec::new();
    for name in page::WORKLOADS {
        let (loaded, chips, found) = tables_of(name, &set, args)?;
        if all.is_empty() {
            drawn = pictures(&found, &loaded, &chips, &set)?;
            drawn.retain(|(name, _)| {
                page::PICTURES
                    .iter()
                    .any(|picture| *name == format!("{picture}.svg"))
            });
        }
        all.push(found);
    }
    let measured = delta_log::rows(hardware::shipped_calibration(), &BTreeMap::new())?;
    let images = path.with_file_name("images").join("deltalog");
    write(&images, drawn, args.force)?;
    write_file(path, page::markdown(&all, &measured))
}

/// The tables as files: name and text.
fn data(found: &DeltaLogTables) -> anyhow::Result<Vec<(String, String)>> {
    let (mut rows, mut value) = (Vec::new(), Vec::new());
    report::rows(found).write_csv(&mut rows)?;
    json(&mut value, found)?;
    Ok(vec![
        ("decode.csv".to_owned(), String::from_utf8(rows)?),
        ("decode.json".to_owned(), String::from_utf8(value)?),
    ])
}

/// The pictures as files: name and text.
fn pictures(
    found: &DeltaLogTables,
    loaded: &Loaded,
    chips: &Chips,
    set: &[String],
) -> anyhow::Result<Vec<(String, String)>> {
    let drawn = report::pictures(found)?.into_iter();
    let mut files: Vec<(String, String)> = drawn.map(|(name, svg)| (format!("{name}.svg"), svg)).collect();
    let result = beside_eager(loaded, chips, set)?;
    let options = Options {
        plans: Vec::new(),
        theme: Theme::Light,
        untitled: false,
    };
    files.push(("roofline.svg".to_owned(), roofline::svg(&result, &options)?));
    Ok(files)
}

/// A run of the fused plan without a log beside that with it, as two plans of one result.
fn beside_eager(loaded: &Loaded, chips: &Chips, set: &[String]) -> anyhow::Result<RunResult> {
    let (workload, document) = loaded;
    let mut fused = workload.clone();
    fused.plans = Plan::decode("fused").into_iter().collect();
    fused.published = None;
    let eager = Workload {
        layer: Layer {
            log: None,
            ..fused.layer.clone()
        },
        ..fused.clone()
    };
    let run = |workload: Workload| {
        study::run(RunRequest {
            workload: &(workload, document.clone()),
            baseline: None,
            chips,
            overrides: set.to_vec(),
            numeric: None,
        })
    };
    let (mut result, eager) = (run(fused)?, run(eager)?);
    for (chip, eager) in result.chips.iter_mut().zip(eager.chips) {
        for plan in &mut chip.plans {
            "log".clone_into(&mut plan.name);
        }
        for mut plan in eager.plans {
            "eager".clone_into(&mut plan.name);
            chip.plans.insert(0, plan);
        }
    }
    Ok(result)
}

fn text(out: &mut impl Write, found: &DeltaLogTables) -> anyhow::Result<()> {
    writeln!(out, "{}: {}", found.name, found.layer)?;
    writeln!(
        out,
        "the core of a layer, gates to output; {} states of {:.1} kB a sequence; all sequences at the same place of an interval\n",
        found.states_per_sequence,
        found.state_bytes as f64 / 1e3
    )?;
    writeln!(
        out,
        "an average step against the eager one, {} sequences",
        found.batch
    )?;
    report::gains(found).write_text(out)?;
    for chip in &found.chips {
        writeln!(
            out,
            "\n{}: steps by entries of the log, {} sequences",
            chip.chip, found.batch
        )?;
        report::by_step(found, chip).write_text(out)?;
    }
    writeln!(
        out,
        "\nspeed of an average step against the eager one, by interval"
    )?;
    report::by_interval(found).write_text(out)?;
    writeln!(
        out,
        "\nsplit replay: coefficients of the log in a kernel of their own, {} sequences",
        found.batch
    )?;
    report::by_split(found).write_text(out)?;
    Ok(())
}
