//! `tpusim run`.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use clap::{Args, ValueEnum};

use super::{Global, Outcome, split_overrides};
use crate::config::{ConfigError, Document, nearest, suggestion};
use crate::hardware::{self, Chip};
use crate::model;
use crate::report::folder::Extra;
use crate::report::table::Format;
use crate::report::{csv, folder, json, text, trace};
use crate::study::RunError;
use crate::study::schedules::schedules;
use crate::study::whatif::{Sweep, SweepRequest, sensitivity};
use crate::study::{self, Chips, Extent, RunRequest};
use crate::timing::check::check_kernel;
use crate::workload::{self, Workload};

/// How much of the numerics is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum NumericMode {
    /// The tokens and heads that the workload declares
    #[default]
    Sample,
    /// The whole layer
    Full,
    /// Nothing: timing only
    Off,
}

/// Arguments of `tpusim run`.
#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// Path of a file of a workload, a stack or a model, or the name of a shipped one (`tpusim list`)
    #[arg(required_unless_present = "hf")]
    workload: Option<String>,
    /// `config.json` of a published model, as Hugging Face hosts it, instead of a file of this program
    #[arg(long, value_name = "CONFIG", conflicts_with = "workload")]
    hf: Option<PathBuf>,
    /// Chips instead of those of the workload: names or paths, separated by commas
    #[arg(long, value_delimiter = ',')]
    hw: Vec<String>,
    /// Folder of the report; `reports/<name>` where absent
    #[arg(long)]
    pub(super) out: Option<PathBuf>,
    /// Write the schedules as `trace.json` into the report, for Perfetto
    #[arg(long)]
    pub(super) trace: bool,
    /// Prove every schedule legal with the independent checker; exit code 1 if one is not
    #[arg(long)]
    pub(super) check: bool,
    /// Execute the declared sample, the full layer, or nothing
    #[arg(long, value_enum, default_value_t)]
    numeric: NumericMode,
    /// Change a field of the workload (`layer.chunk=128`) or of every chip (`hw.matrix_unit.rows=128`)
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    pub(super) set: Vec<String>,
}

impl RunArgs {
    /// The file or shipped name that is run.
    fn source(&self) -> String {
        let config = || self.hf.as_ref().map(|path| path.to_string_lossy().into_owned());
        self.workload.clone().or_else(config).unwrap_or_default()
    }
}

pub(super) fn execute(out: &mut impl Write, args: &RunArgs, global: &Global) -> anyhow::Result<Outcome> {
    let (_, workload_set) = split_overrides(&args.set)?;
    if let Some(config) = &args.hf {
        let loaded = model::load_huggingface(&config.to_string_lossy(), &workload_set)?;
        return super::model::execute(out, &loaded, args, global);
    }
    let source = args.source();
    if let Some(loaded) = model::load(&source, &workload_set)? {
        return super::model::execute(out, &loaded, args, global);
    }
    refuse_misspelt_model(&source)?;
    if let Some(stack) = workload::load_stack(&source, &workload_set)? {
        return super::stack::execute(out, &stack, args, global);
    }
    let loaded = workload::load(&source, &workload_set)?;
    let baseline = match &loaded.0.baseline {
        Some(name) => Some(workload::load_baseline(name, &source, &loaded.1)?),
        None => None,
    };
    let chips = load_chips(args, &loaded.0.hardware, &loaded.1)?;
    let target = report_folder(args, global, &loaded.0);
    if args.trace && target.is_none() {
        bail!("`--trace` writes into the report, and `--format json|csv` writes none; add `--out DIR`");
    }
    if let Some(target) = &target {
        // Refuse before the work is done, not after.
        folder::check_target(target)?;
    }
    let numeric = match extent(args) {
        Some(extent) => numeric(extent, global, &loaded.0)?,
        None => None,
    };
    let mut result = study::run(RunRequest {
        workload: &loaded,
        baseline: baseline.as_ref(),
        chips: &chips,
        overrides: args.set.clone(),
        numeric,
    })?;
    if target.is_some() || matches!(global.format, Format::Json) {
        let names = chip_names(&args.hw, &source, &loaded.0.hardware, &loaded.1)?;
        let documents = chips.iter().map(|(_, document)| document.clone());
        let named: Vec<(String, Document)> = names.into_iter().zip(documents).collect();
        let sweep = Sweep::new(SweepRequest {
            workload: &loaded,
            chips: &named,
            axes: Vec::new(),
        })?;
        result.sensitivity = sensitivity(&sweep).map_err(|reason| anyhow!("{reason}"))?;
    }
    let trace = trace(args, &loaded.0, &chips)?;
    if let Some(target) = &target {
        let extras: Vec<Extra> = trace
            .iter()
            .map(|text| Extra {
                name: "trace.json",
                bytes: text.as_bytes(),
            })
            .collect();
        // Before the table: a reader that closes its end early, such as `head`, still gets the report.
        folder::write_report_with(target, &result, &extras)
            .with_context(|| format!("cannot write the report `{}`", target.display()))?;
    }
    match global.format {
        Format::Table => {
            let style = if global.colours() {
                text::Style::ansi()
            } else {
                text::Style::plain()
            };
            text::write(&mut *out, &result, &style)?;
        }
        Format::Json => json::write(&mut *out, &result)?,
        Format::Csv => csv::write(&mut *out, &result)?,
    }
    if let Some(target) = &target {
        global.say(&format!("report: {}", target.join("index.html").display()));
    }
    let failed = result.numeric.as_ref().is_some_and(|n| n.non_finite.is_some());
    Ok(if failed {
        Outcome::CheckFailed
    } else {
        Outcome::Done
    })
}

/// Refuses a name that is neither a file nor shipped and closer to that of a model than to that of a workload.
fn refuse_misspelt_model(name: &str) -> Result<(), ConfigError> {
    if hardware::is_path(name) || workload::shipped_text(name).is_some() {
        return Ok(());
    }
    let layers = [workload::shipped(), workload::shipped_stacks()].concat();
    let all = [layers, model::shipped()].concat();
    match nearest(name, all) {
        Some(close) if model::shipped_text(close).is_some() => {
            let tail = suggestion(name, &model::shipped(), "shipped");
            Err(ConfigError::argument(format!(
                "unknown workload or model `{name}`; {tail}; a path to a file ends in `.yaml`"
            )))
        }
        _ => Ok(()),
    }
}

/// The trace of the run where it is asked for, and the proof that its schedules are legal.
fn trace(args: &RunArgs, workload: &Workload, chips: &Chips) -> anyhow::Result<Option<String>> {
    if !args.trace && !args.check {
        return Ok(None);
    }
    let chips: Vec<Chip> = chips.iter().map(|(chip, _)| chip.clone()).collect();
    let plans = schedules(workload, &chips)?;
    if args.check {
        for plan in &plans {
            for row in &plan.kernels {
                check_kernel(&row.time).map_err(|illegal| RunError::Invariant {
                    chip: plan.chip.name.clone(),
                    plan: plan.plan.clone(),
                    stage: row.kernel.label.clone(),
                    what: illegal.to_string(),
                })?;
            }
        }
    }
    Ok(args.trace.then(|| trace::to_string(&plans)))
}

/// Data formats print to stdout and write a report only where asked.
fn report_folder(args: &RunArgs, global: &Global, workload: &Workload) -> Option<PathBuf> {
    match (&args.out, global.format) {
        (Some(out), _) => Some(out.clone()),
        (None, Format::Table) => Some(PathBuf::from("reports").join(&workload.name)),
        (None, Format::Json | Format::Csv) => None,
    }
}

/// The chips of the command line, or those that `document` names as `hardware`.
pub(super) fn load_chips(
    args: &RunArgs,
    hardware: &[String],
    document: &Document,
) -> Result<Chips, ConfigError> {
    let (set, _) = split_overrides(&args.set)?;
    chips_of(&args.hw, &set, &args.source(), hardware, document)
}

/// The chips called `hw`, or where there are none those that the workload `source` names as `hardware`, with the overrides `set`.
pub(super) fn chips_of(
    hw: &[String],
    set: &[&String],
    source: &str,
    hardware: &[String],
    document: &Document,
) -> Result<Chips, ConfigError> {
    chip_names(hw, source, hardware, document)?
        .iter()
        .map(|name| hardware::load_with(name, set))
        .collect()
}

/// Names and paths of the chips of the command line, `hw`, or where there are none of those that `document`, the file `workload`, names as `hardware`.
pub(super) fn chip_names(
    hw: &[String],
    workload: &str,
    hardware: &[String],
    document: &Document,
) -> Result<Vec<String>, ConfigError> {
    if !hw.is_empty() {
        return Ok(hw.to_vec());
    }
    let find = |(i, name): (usize, &String)| -> Result<String, ConfigError> {
        if hardware::is_path(name) {
            // A file of the user goes where the workload that names it goes.
            let beside = Path::new(workload).with_file_name(name);
            let found = [beside.as_path(), Path::new(name)]
                .into_iter()
                .find(|path| path.exists());
            let Some(path) = found else {
                let message = format!(
                    "cannot find `{name}`; expected a file beside this one or a shipped name, which \
                     `tpusim hw list` shows"
                );
                return Err(document.error_at(&format!("hardware.{i}"), message));
            };
            return Ok(path.to_string_lossy().into_owned());
        }
        if !hardware::shipped().contains(&name.as_str()) {
            let tail = crate::config::suggestion(name, &hardware::shipped(), "shipped");
            return Err(document.error_at(
                &format!("hardware.{i}"),
                format!("unknown hardware `{name}`; {tail}"),
            ));
        }
        Ok(name.clone())
    };
    hardware.iter().enumerate().map(find).collect()
}

/// Rate assumed for the time estimate of a full execution, in FLOP/s: about what two cores reach on small products.
const ASSUMED_FLOPS_PER_SECOND: f64 = 4e10;

/// What the command line asks to be executed.
pub(super) fn extent(args: &RunArgs) -> Option<Extent> {
    match args.numeric {
        NumericMode::Off => None,
        NumericMode::Sample => Some(Extent::Sample),
        NumericMode::Full => Some(Extent::Full),
    }
}

pub(super) fn numeric(
    extent: Extent,
    global: &Global,
    workload: &Workload,
) -> anyhow::Result<Option<crate::report::result::NumericResult>> {
    let estimate = study::estimate(workload, extent)?;
    let gib = estimate.bytes as f64 / f64::from(1 << 30);
    let seconds = estimate.flops / ASSUMED_FLOPS_PER_SECOND;
    if extent == Extent::Full {
        global.say(&format!(
            "numeric check of the whole layer: about {gib:.1} GiB of memory and {seconds:.0} s of matrix products"
        ));
    }
    if let Some(available) = available_memory().filter(|&available| estimate.bytes > available) {
        bail!(
            "the numeric check needs about {gib:.1} GiB of memory, {:.1} GiB are available; use `--numeric sample` with fewer tokens or heads in the workload's `numeric`, or `--numeric off`",
            available as f64 / f64::from(1 << 30)
        );
    }
    Ok(Some(study::check(workload, extent)?))
}

/// Memory that can be had without swapping, in bytes; `None` where the system does not say.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    line.split_whitespace()
        .nth(1)?
        .parse::<u64>()
        .ok()
        .map(|kib| kib * 1024)
}
