//! `tpusim roofline`: the roofline picture alone, as a figure.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};

use super::{Global, Outcome, split_overrides};
use crate::config::suggestion;
use crate::report::plot::Theme;
use crate::report::plot::roofline::{self, Options};
use crate::report::table::Format;
use crate::report::{csv, json};
use crate::study::{self, RunRequest};
use crate::workload;

/// Paper of the picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Paper {
    /// Dark ink on white
    #[default]
    Light,
    /// Light ink on near-black
    Dark,
}

/// Arguments of `tpusim roofline`.
#[derive(Debug, Args)]
pub(super) struct RooflineArgs {
    /// Path of a workload file, or the name of a shipped one (`tpusim list`)
    workload: String,
    /// Chips instead of those of the workload, side by side on one sheet: names or paths, separated by commas
    #[arg(long, value_delimiter = ',')]
    hw: Vec<String>,
    /// Plans whose stages are marked, separated by commas; all of the workload where absent
    #[arg(long, value_delimiter = ',', value_name = "PLAN")]
    plan: Vec<String>,
    /// Colours
    #[arg(long, value_enum, default_value_t)]
    theme: Paper,
    /// Leave out title and layer, for a figure with a caption
    #[arg(long)]
    untitled: bool,
    /// Write `FILE.svg` and `FILE.png`; `<name>-roofline` where absent
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Change a field of the workload (`layer.chunk=128`) or of every chip (`hw.matrix_unit.rows=128`)
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    set: Vec<String>,
}

pub(super) fn execute(out: &mut impl Write, args: &RooflineArgs, global: &Global) -> anyhow::Result<Outcome> {
    let (hardware_set, workload_set) = split_overrides(&args.set)?;
    if workload::load_stack(&args.workload, &workload_set)?.is_some() {
        bail!(
            "`{}` is a stack of layers; a roofline is that of one layer, such as a workload its `stack` names",
            args.workload
        );
    }
    let loaded = workload::load(&args.workload, &workload_set)?;
    let plans: Vec<&str> = loaded.0.plans.iter().map(|plan| plan.name.as_str()).collect();
    if let Some(unknown) = args.plan.iter().find(|name| !plans.contains(&name.as_str())) {
        bail!(
            "`{}` has no plan `{unknown}`; {}",
            args.workload,
            suggestion(unknown, &plans, "it has")
        );
    }
    let chips = super::run::chips_of(
        &args.hw,
        &hardware_set,
        &args.workload,
        &loaded.0.hardware,
        &loaded.1,
    )?;
    let result = study::run(RunRequest {
        workload: &loaded,
        baseline: None,
        chips: &chips,
        overrides: args.set.clone(),
        numeric: None,
    })?;
    let options = Options {
        plans: args.plan.clone(),
        theme: match args.theme {
            Paper::Light => Theme::Light,
            Paper::Dark => Theme::Dark,
        },
        untitled: args.untitled,
    };
    let stem = args
        .out
        .clone()
        .unwrap_or_else(|| PathBuf::from(format!("{}-roofline", result.name)));
    // A name may have dots of its own, as chips do, so the ending is added and replaces nothing.
    let file = |ending: &str| {
        let mut name = stem.clone().into_os_string();
        name.push(ending);
        PathBuf::from(name)
    };
    let (svg, png) = (file(".svg"), file(".png"));
    if let Some(parent) = stem.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).with_context(|| format!("cannot create `{}`", parent.display()))?;
    }
    fs::write(&svg, roofline::svg(&result, &options)?)
        .with_context(|| format!("cannot write `{}`", svg.display()))?;
    roofline::png(&result, &options, &png).with_context(|| format!("cannot write `{}`", png.display()))?;
    match global.format {
        Format::Table => writeln!(out, "{}", result.headline)?,
        Format::Json => json::write(&mut *out, &result)?,
        Format::Csv => csv::write(&mut *out, &result)?,
    }
    global.say(&format!("picture: {}, {}", svg.display(), png.display()));
    Ok(Outcome::Done)
}
