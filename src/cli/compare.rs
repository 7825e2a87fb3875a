//! `tpusim compare`.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;

use super::run::chips_of;
use super::{Global, Outcome, split_overrides};
use crate::config::suggestion;
use crate::report::result::RunResult;
use crate::report::table::Format;
use crate::report::{comparison, json};
use crate::study::compare::{Compared, compare};
use crate::study::{self, RunRequest, StackRun};
use crate::workload;

/// Arguments of `tpusim compare`.
#[derive(Debug, Args)]
pub(super) struct CompareArgs {
    /// Workload or stack (file or shipped name), `result.json` of a run, or its report folder
    #[arg(value_name = "A")]
    a: String,
    /// What to compare it with; a speedup is the time of A over that of B
    #[arg(value_name = "B")]
    b: String,
    /// Chips of both sides instead of those of the workloads; of a result, those to compare
    #[arg(long, value_delimiter = ',')]
    hw: Vec<String>,
    /// Chips of A
    #[arg(long, value_delimiter = ',', conflicts_with = "hw")]
    hw_a: Vec<String>,
    /// Chips of B
    #[arg(long, value_delimiter = ',', conflicts_with = "hw")]
    hw_b: Vec<String>,
    /// Change a field of both workloads (`layer.chunk=128`) or of every chip (`hw.hbm.bandwidth='1 TB/s'`)
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    set: Vec<String>,
    /// Change a field of A alone, after those of both
    #[arg(long = "set-a", value_name = "FIELD=VALUE")]
    set_a: Vec<String>,
    /// Change a field of B alone, after those of both
    #[arg(long = "set-b", value_name = "FIELD=VALUE")]
    set_b: Vec<String>,
}

/// What an argument names, timed.
enum Timed {
    Layer(Box<RunResult>),
    Stack(StackRun),
}

impl<'r> From<&'r Timed> for Compared<'r> {
    fn from(timed: &'r Timed) -> Self {
        match timed {
            Timed::Layer(run) => Compared::Layer(run),
            Timed::Stack(stack) => Compared::Stack(stack),
        }
    }
}

pub(super) fn execute(out: &mut impl Write, args: &CompareArgs, global: &Global) -> anyhow::Result<Outcome> {
    let side = |letter: char, source: &str, hw: &[String], set: &[String]| -> anyhow::Result<Timed> {
        let hw = [&args.hw, hw].concat();
        let set = [&args.set, set].concat();
        match result_file(source)? {
            Some(_) if !set.is_empty() => bail!(
                "{letter} is the result of a run, which `--set {}` cannot change; name its workload instead, or change the other side alone with `--set-a` or `--set-b`",
                set[0]
            ),
            Some(file) => Ok(Timed::Layer(Box::new(result(&file, &hw)?))),
            None => run(source, &hw, &set),
        }
    };
    let a = side('A', &args.a, &args.hw_a, &args.set_a)?;
    let b = side('B', &args.b, &args.hw_b, &args.set_b)?;
    let comparison_of = compare(&a, &b, (&args.a, &args.b))?;
    match global.format {
        Format::Table => comparison::write_text(out, &comparison_of)?,
        Format::Json => super::json(out, &comparison_of)?,
        Format::Csv => comparison::write_csv(out, &comparison_of)?,
    }
    Ok(Outcome::Done)
}

/// The file of a result that an argument names, where it names no workload.
fn result_file(source: &str) -> anyhow::Result<Option<PathBuf>> {
    let path = Path::new(source);
    if path.is_dir() {
        let file = path.join("result.json");
        if !file.is_file() {
            bail!(
                "`{source}` is a folder without `result.json`; expected a workload, a result or a report folder"
            );
        }
        return Ok(Some(file));
    }
    let is_json = path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
    Ok(is_json.then(|| path.to_owned()))
}

/// The result in a file, of the chips in `hw` where there are any.
fn result(file: &Path, hw: &[String]) -> anyhow::Result<RunResult> {
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
    let mut result = json::from_str(&text).with_context(|| name.clone())?;
    if !hw.is_empty() {
        let shown: Vec<String> = result.chips.iter().map(|chip| chip.name.clone()).collect();
        for wanted in hw {
            if !shown.contains(wanted) {
                bail!(
                    "{name}: `{wanted}` is not among the chips of the run; {}",
                    suggestion(wanted, &shown, "it has")
                );
            }
        }
        result.chips.retain(|chip| hw.contains(&chip.name));
    }
    Ok(result)
}

/// A workload or a stack, run without numeric checks.
fn run(source: &str, hw: &[String], set: &[String]) -> anyhow::Result<Timed> {
    let (hardware_set, workload_set) = split_overrides(set)?;
    if let Some(stack) = workload::load_stack(source, &workload_set)? {
        let chips = chips_of(hw, &hardware_set, source, &stack.0.hardware, &stack.1)?;
        return Ok(Timed::Stack(study::run_layers(&stack, &chips, set.to_vec())?));
    }
    let mut loaded = workload::load(source, &workload_set)?;
    // Published times are no part of a comparison of two predictions.
    loaded.0.published = None;
    let chips = chips_of(hw, &hardware_set, source, &loaded.0.hardware, &loaded.1)?;
    Ok(Timed::Layer(Box::new(study::run(RunRequest {
        workload: &loaded,
        baseline: None,
        chips: &chips,
        overrides: set.to_vec(),
        numeric: None,
    })?)))
}
