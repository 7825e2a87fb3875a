//! `tpusim state-formats`: formats of the stored state of a decode step side by side.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;

use super::{Global, Outcome, split_overrides};
use crate::config::ConfigError;
use crate::hardware;
use crate::report::plot::{Theme, state_formats as picture};
use crate::report::state_formats::{FormatRow, StateFormatTable};
use crate::report::table::{Cell, Column, Format, Table};
use crate::study::Chips;
use crate::study::state_formats::{StateFormatError, StateFormatRequest, state_formats};

/// Arguments of `tpusim state-formats`.
#[derive(Debug, Args)]
pub(super) struct StateFormatsArgs {
    /// A decode workload: a path, or the name of a shipped one
    #[arg(default_value = "gdn_decode")]
    workload: String,
    /// Chips: names or paths, separated by commas
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "tpu-v6e,tpu-v7x,h100-sxm,h200-sxm,rtx-4090"
    )]
    hw: Vec<String>,
    /// Fusion plan whose time is reported
    #[arg(long, default_value = "fused")]
    plan: String,
    /// Tokens to decode
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    /// Key heads to execute
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Seed of weights and tokens
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Write the picture as `FILE.svg` and `FILE.png`
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Change a field of the workload (`layer.batch=8`) or of every chip (`hw.hbm.bandwidth='1 TB/s'`)
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    set: Vec<String>,
}

pub(super) fn execute(
    out: &mut impl Write,
    args: &StateFormatsArgs,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let (hardware_set, workload_set) = split_overrides(&args.set)?;
    let chips = args
        .hw
        .iter()
        .map(|name| hardware::load_with(name, &hardware_set))
        .collect::<Result<Chips, ConfigError>>()?;
    let overrides: Vec<String> = workload_set.into_iter().cloned().collect();
    let table = state_formats(&StateFormatRequest {
        workload: &args.workload,
        overrides: &overrides,
        chips: &chips,
        plan: &args.plan,
        tokens: args.tokens,
        heads: args.heads,
        seed: args.seed,
    })
    .map_err(|error| match error {
        // The command line shows where in a file a value stands.
        StateFormatError::Config(config) => anyhow::Error::from(config),
        StateFormatError::Refused(text) => anyhow::Error::from(ConfigError::argument(text)),
        StateFormatError::Run(run) => anyhow::Error::from(run),
        other @ StateFormatError::Check(_) => anyhow::Error::from(other),
    })?;
    if let Some(path) = &args.plot {
        let svg = picture::svg(&table, Theme::Light)?;
        super::write_pictures(path, &svg, |png| picture::png(&table, Theme::Light, png))?;
        global.say(&format!("picture: {}", path.with_extension("svg").display()));
    }
    match global.format {
        Format::Json => super::json(out, &table)?,
        Format::Csv => rows(&table).write_csv(out)?,
        Format::Table => {
            writeln!(out, "{}\n", table.layer)?;
            errors(&table).write_text(&mut *out)?;
            writeln!(out, "\nstep of the whole layer, {} plan", table.plan)?;
            times(&table).write_text(&mut *out)?;
            if !table.head_errors.is_empty() {
                writeln!(
                    out,
                    "\nheads by memory, errors of the last {} tokens",
                    last_span(&table)
                )?;
                heads(&table).write_text(&mut *out)?;
            }
            writeln!(
                out,
                "\nactivations of the workload beside an f32 state: {:.1e}",
                table.activation_error
            )?;
            for note in &table.notes {
                writeln!(out, "note: {note}")?;
            }
        }
    }
    Ok(Outcome::Done)
}

/// Tokens of the last span.
fn last_span(table: &StateFormatTable) -> u64 {
    match table.spans.as_slice() {
        [.., before, last] => last - before,
        [only] => *only,
        [] => 0,
    }
}

/// The chips, in order.
fn chips(table: &StateFormatTable) -> Vec<&str> {
    let times = table
        .rows
        .first()
        .map(|row| row.times.as_slice())
        .unwrap_or_default();
    times.iter().map(|time| time.chip.as_str()).collect()
}

/// Names of the formats of a row.
fn name_columns() -> Vec<Column> {
    vec![
        Column::text("long memory", "long_memory"),
        Column::text("short memory", "short_memory"),
    ]
}

fn name_cells(row: &FormatRow) -> Vec<Cell> {
    vec![Cell::from(row.long_memory), Cell::from(row.short_memory)]
}

fn error_columns(table: &StateFormatTable) -> Vec<Column> {
    let mut columns = vec![
        Column::number("state (kB)", "state_bytes"),
        Column::number("moved per token (kB)", "token_state_bytes"),
    ];
    columns.extend(
        table
            .spans
            .iter()
            .map(|end| Column::number(format!("error to {end}"), format!("error_to_{end}_ratio"))),
    );
    columns
}

fn error_cells(row: &FormatRow) -> Vec<Cell> {
    let mut cells = vec![
        Cell::scaled(row.state_bytes as f64, 1e-3, 1),
        Cell::scaled(row.token_state_bytes, 1e-3, 1),
    ];
    cells.extend(row.errors.iter().map(|&error| Cell::scientific(Some(error))));
    cells
}

fn time_columns(table: &StateFormatTable) -> Vec<Column> {
    chips(table)
        .iter()
        .flat_map(|chip| {
            [
                Column::number(format!("{chip} (us)"), format!("{chip}_us")),
                Column::number("low (us)", format!("{chip}_low_us")),
                Column::number("high (us)", format!("{chip}_high_us")),
                Column::text("bound", format!("{chip}_bound")),
            ]
        })
        .collect()
}

fn time_cells(row: &FormatRow) -> Vec<Cell> {
    row.times
        .iter()
        .flat_map(|time| {
            [
                Cell::number(time.step_us, 1),
                Cell::optional(time.low_us, 1),
                Cell::optional(time.high_us, 1),
                Cell::from(time.bound),
            ]
        })
        .collect()
}

/// Bytes and errors of every row.
fn errors(table: &StateFormatTable) -> Table {
    let mut filled = Table::new([name_columns(), error_columns(table)].concat());
    for row in &table.rows {
        filled.row([name_cells(row), error_cells(row)].concat());
    }
    filled
}

/// Times of every row.
fn times(table: &StateFormatTable) -> Table {
    let mut filled = Table::new([name_columns(), time_columns(table)].concat());
    for row in &table.rows {
        filled.row([name_cells(row), time_cells(row)].concat());
    }
    filled
}

/// Everything of every row.
fn rows(table: &StateFormatTable) -> Table {
    let mut filled = Table::new([name_columns(), error_columns(table), time_columns(table)].concat());
    for row in &table.rows {
        filled.row([name_cells(row), error_cells(row), time_cells(row)].concat());
    }
    filled
}

/// Errors of every head.
fn heads(table: &StateFormatTable) -> Table {
    let mut filled = Table::new([
        Column::number("head", "head_count"),
        Column::number("memory (tokens)", "memory_tokens_count"),
        Column::number("f32", "f32_ratio"),
        Column::number("bf16", "bf16_ratio"),
        Column::number("row_fp8", "row_fp8_ratio"),
    ]);
    for row in &table.head_errors {
        filled.row([
            Cell::from(row.head),
            Cell::number(row.memory_tokens, 1),
            Cell::scientific(Some(row.f32)),
            Cell::scientific(Some(row.bf16)),
            Cell::scientific(Some(row.row_fp8)),
        ]);
    }
    filled
}
