//! The command line: one file per command, each a thin shell over the library.

mod compare;
mod completions;
mod decode;
mod dump;
mod explain;
mod fit;
mod hlo;
pub mod hw;
mod init;
mod kernels;
mod list;
mod model;
mod predict;
mod probe;
mod roofline;
mod run;
mod schema;
mod stack;
mod state_formats;
mod validate;
mod whatif;
mod whitening;

use std::fs;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use serde::Serialize;

pub use hw::Outcome;

use crate::config::ConfigError;
use crate::hardware::{self, Calibration};
use crate::report::table::{Format, Table};

/// When to colour the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum ColorChoice {
    /// When a person watches and `NO_COLOR` is not set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Options of every command.
#[derive(Debug, Args)]
struct Global {
    /// How results are printed: table, json, csv
    #[arg(long, global = true, value_enum, default_value_t, hide_possible_values = true)]
    format: Format,
    /// When to colour the output: auto, always, never
    #[arg(long, global = true, value_enum, default_value_t, hide_possible_values = true)]
    color: ColorChoice,
    /// No messages on stderr but errors
    #[arg(long, short, global = true)]
    quiet: bool,
    /// Calibration that `tpusim fit` wrote, instead of the shipped one
    #[arg(long, global = true, value_name = "FILE")]
    calibration: Option<PathBuf>,
}

impl Global {
    /// Whether stdout gets colours.
    fn colours(&self) -> bool {
        match self.color {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => {
                std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
            }
        }
    }

    /// A line on stderr, unless quiet. A closed stderr is nobody's loss.
    fn say(&self, line: &str) {
        if !self.quiet {
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    }
}

/// Blocks of a hardware file that no workload has: an override of them lacks its `hw.`.
const HARDWARE_BLOCKS: [&str; 10] = [
    "cores",
    "clock",
    "matrix_unit",
    "vector_unit",
    "latency",
    "on_chip",
    "cache",
    "hbm",
    "interconnect",
    "launch",
];

/// Overrides of the chips, which start with `hw.`, and those of the workload.
fn split_overrides(set: &[String]) -> Result<(Vec<&String>, Vec<&String>), ConfigError> {
    let (hardware, workload): (Vec<&String>, Vec<&String>) =
        set.iter().partition(|assignment| assignment.starts_with("hw."));
    for assignment in &workload {
        let block = assignment.split(['.', '=']).next().unwrap_or_default();
        if HARDWARE_BLOCKS.contains(&block) {
            return Err(ConfigError::argument(format!(
                "--set {assignment}: `{block}` belongs to the hardware; write `--set hw.{assignment}`"
            )));
        }
    }
    Ok((hardware, workload))
}

/// Cycle-approximate simulator for linear-attention layers on TPUs and GPUs.
#[derive(Debug, Parser)]
#[command(name = "tpusim", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Time a workload or a model on its chips, check its numerics, write a report
    Run(run::RunArgs),
    /// Time a workload over many values of its fields and of its chips
    Whatif(whatif::WhatifArgs),
    /// Draw the roofline of a workload on its chips, for a paper
    Roofline(roofline::RooflineArgs),
    /// Decoding with a log of updates beside the state: steps, merges, intervals, bytes
    Decode(decode::DecodeArgs),
    /// Numeric probes: what the state of a mechanism remembers, overwrites and rounds
    Probe(probe::ProbeArgs),
    /// Two workloads or results side by side: speedups with intervals, bounds, inputs
    Compare(compare::CompareArgs),
    /// Take one number of a run apart
    Explain(explain::ExplainArgs),
    /// Time a compiled program from the TPU compiler's own schedule
    Dump(dump::DumpArgs),
    /// KDA and SLA kernels compiled for every TPU generation, beside the fast model
    Kernels(kernels::KernelsArgs),
    /// Time an HLO text by the fast model, with its FLOPs and bytes
    Hlo(hlo::HloArgs),
    /// Time every case of a CSV file
    Predict(predict::PredictArgs),
    /// Fit the coefficients of the timing model to measured times
    Fit(fit::FitArgs),
    /// Predicted against measured times, in sample and out of it
    Validate(validate::ValidateArgs),
    /// Accelerators: list, show, check, init
    #[command(subcommand)]
    Hw(HwCommand),
    /// Shipped workloads and models, and studies for `whatif`
    List,
    /// Second-order solvers side by side: work, definiteness, error, time of the layer
    Whitening(whitening::WhiteningArgs),
    /// Formats of the stored state of a decode step: bytes, time, growth of errors
    StateFormats(state_formats::StateFormatsArgs),
    /// JSON schema of a kind of YAML file, for editors that complete and check
    Schema(schema::SchemaArgs),
    /// Write a commented workload to start from
    Init(init::InitArgs),
    /// Completion script of a shell
    Completions(completions::CompletionsArgs),
    /// Page of the manual, for `man -l -`
    Man(completions::ManArgs),
}

#[derive(Debug, Subcommand)]
enum HwCommand {
    /// Shipped accelerators with the rates of one device
    List,
    /// Everything about one accelerator, with sources
    Show {
        /// Shipped name, or path of a hardware file
        name: String,
        /// Clock state, where the chip has several
        #[arg(long)]
        clock: Option<String>,
        /// Change a field, for instance `--set hbm.bandwidth='1 TB/s'`
        #[arg(long = "set", value_name = "FIELD=VALUE")]
        set: Vec<String>,
    },
    /// Derived peaks against published ones
    Check {
        /// Shipped name, or path of a hardware file; all shipped ones where absent
        file: Option<String>,
    },
    /// Write a commented hardware file to start from
    Init {
        /// File to write; never overwritten
        file: String,
    },
}

/// Writes a picture as `path` with the extensions `svg` and `png`, its folder made where it is missing.
fn write_pictures<E>(path: &Path, svg: &str, png: impl FnOnce(&Path) -> Result<(), E>) -> anyhow::Result<()>
where
    Result<(), E>: anyhow::Context<(), E>,
{
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        fs::create_dir_all(parent).with_context(|| format!("cannot create `{}`", parent.display()))?;
    }
    let as_svg = path.with_extension("svg");
    fs::write(&as_svg, svg).with_context(|| format!("cannot write `{}`", as_svg.display()))?;
    let as_png = path.with_extension("png");
    png(&as_png).with_context(|| format!("cannot write `{}`", as_png.display()))
}

/// A value as JSON, with a newline at the end.
fn json(out: &mut impl Write, value: &impl Serialize) -> anyhow::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)?;
    Ok(())
}

/// A table, or the value it shows, in the format asked for.
fn print(out: &mut impl Write, format: Format, table: &Table, value: &impl Serialize) -> anyhow::Result<()> {
    match format {
        Format::Json => json(out, value)?,
        Format::Table => table.write_text(out)?,
        Format::Csv => table.write_csv(out)?,
    }
    Ok(())
}

impl Cli {
    /// Runs the command.
    ///
    /// # Errors
    /// Bad input or usage, or output that cannot be written.
    pub fn execute(&self) -> anyhow::Result<Outcome> {
        if let Some(path) = &self.global.calibration {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
            let in_time = hardware::take_calibration(Calibration::parse(&name, &text)?);
            anyhow::ensure!(in_time, "a calibration is already in use");
        }
        let mut out = std::io::stdout().lock();
        let format = self.global.format;
        match &self.command {
            Command::Run(args) => run::execute(&mut out, args, &self.global),
            Command::Whatif(args) => whatif::execute(&mut out, args, &self.global),
            Command::Roofline(args) => roofline::execute(&mut out, args, &self.global),
            Command::Decode(args) => decode::execute(&mut out, args, &self.global),
            Command::Probe(args) => probe::execute(&mut out, args, &self.global),
            Command::Compare(args) => compare::execute(&mut out, args, &self.global),
            Command::Explain(args) => explain::execute(&mut out, args),
            Command::Fit(args) => fit::execute(&mut out, args, &self.global),
            Command::Validate(args) => validate::execute(&mut out, args, &self.global),
            Command::Dump(args) => dump::execute(&mut out, args, &self.global),
            Command::Kernels(args) => kernels::execute(&mut out, args, &self.global),
            Command::Hlo(args) => hlo::execute(&mut out, args, &self.global),
            Command::Predict(args) => predict::execute(&mut out, args, &self.global),
            Command::Hw(HwCommand::List) => hw::list(&mut out, format),
            Command::Hw(HwCommand::Show { name, clock, set }) => {
                hw::show(&mut out, name, set, clock.as_deref(), format)
            }
            Command::Hw(HwCommand::Check { file }) => hw::check(&mut out, file.as_deref(), format),
            Command::Hw(HwCommand::Init { file }) => hw::init(&mut out, file),
            Command::Whitening(args) => whitening::execute(&mut out, args, &self.global),
            Command::StateFormats(args) => state_formats::execute(&mut out, args, &self.global),
            Command::Schema(args) => schema::execute(&mut out, args, &self.global),
            Command::List => list::execute(&mut out, format),
            Command::Init(args) => init::execute(&mut out, args),
            Command::Completions(args) => completions::completions(&mut out, args, Cli::command()),
            Command::Man(args) => completions::man(&mut out, args, Cli::command()),
        }
    }
}
