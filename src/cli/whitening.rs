//! `tpusim whitening`: the solvers of second-order linear attention side by side.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;

use super::{Global, Outcome};
use crate::config::ConfigError;
use crate::hardware;
use crate::report::plot::{Theme, whitening as picture};
use crate::report::table::{Cell, Column, Format, Table};
use crate::report::whitening::WhiteningTable;
use crate::study::whitening::whitening;
use crate::study::{Chips, WhiteningRequest};

/// Arguments of `tpusim whitening`.
#[derive(Debug, Args)]
pub(super) struct WhiteningArgs {
    /// An SPD-SLA-W workload: a path, or the name of a shipped one
    #[arg(default_value = "spd_sla_w")]
    workload: String,
    /// Chips: names or paths, separated by commas
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "tpu-v4,tpu-v5p,tpu-v6e,tpu-v7x,h100-sxm"
    )]
    hw: Vec<String>,
    /// Fusion plan whose time is reported
    #[arg(long, default_value = "fused")]
    plan: String,
    /// Write the picture as `FILE.svg` and `FILE.png`
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Change a field of the workload (`layer.chunk=128`) or of every chip (`hw.matrix_unit.rows=128`)
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    set: Vec<String>,
}

pub(super) fn execute(
    out: &mut impl Write,
    args: &WhiteningArgs,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let (hardware_set, workload_set): (Vec<String>, Vec<String>) = args
        .set
        .iter()
        .cloned()
        .partition(|assignment| assignment.starts_with("hw."));
    let chips = args
        .hw
        .iter()
        .map(|name| hardware::load_with(name, &hardware_set))
        .collect::<Result<Chips, ConfigError>>()?;
    let table = whitening(&WhiteningRequest {
        workload: &args.workload,
        overrides: &workload_set,
        chips: &chips,
        plan: &args.plan,
    })
    .map_err(|error| match error {
        // The command line shows where in a file a value stands.
        crate::study::WhiteningError::Config(config) => anyhow::Error::from(config),
        crate::study::WhiteningError::Run(run) => anyhow::Error::from(run),
        other => anyhow::Error::from(other),
    })?;
    match global.format {
        Format::Json => super::json(out, &table)?,
        Format::Csv => rows(&table).write_csv(out)?,
        Format::Table => {
            writeln!(out, "{}\n", table.layer)?;
            rows(&table).write_text(out)?;
            writeln!(out)?;
            for note in &table.notes {
                writeln!(out, "note: {note}")?;
            }
        }
    }
    if let Some(path) = &args.plot {
        let svg = picture::svg(&table, Theme::Light)?;
        super::write_pictures(path, &svg, |png| picture::png(&table, Theme::Light, png))?;
        global.say(&format!(
            "picture: {}, {}",
            path.with_extension("svg").display(),
            path.with_extension("png").display()
        ));
    }
    Ok(Outcome::Done)
}

fn rows(table: &WhiteningTable) -> Table {
    let mut columns = vec![
        Column::text("solver", "solver"),
        Column::text("operations", "operations"),
        Column::text("target", "target"),
        Column::number("products", "products_count"),
        Column::number("work (MFLOP)", "solver_flops_count"),
        Column::number("vector (Mop)", "solver_vector_ops_count"),
        Column::text("definite", "definite"),
        Column::number("min eig, to 1", "smallest_eigenvalue"),
        Column::number("min eig, to 8", "smallest_eigenvalue_wide"),
        Column::number("error f64", "residual_f64"),
        Column::number("error f32", "residual_f32"),
        Column::number("error bf16", "residual_bf16"),
    ];
    let chips: Vec<&str> = table.rows.first().map_or_else(Vec::new, |row| {
        row.times.iter().map(|t| t.chip.as_str()).collect()
    });
    for chip in &chips {
        columns.push(Column::number(format!("{chip} (ms)"), format!("{chip}_us")));
        columns.push(Column::number("low (ms)", format!("{chip}_low_us")));
        columns.push(Column::number("high (ms)", format!("{chip}_high_us")));
        columns.push(Column::text("bound", format!("{chip}_bound")));
    }
    let mut rows = Table::new(columns);
    for row in &table.rows {
        let mut cells = vec![
            Cell::from(&row.title),
            Cell::from(&row.operations),
            Cell::from(&row.target),
            Cell::from(row.products),
            Cell::scaled(row.solver_flops as f64, 1e-6, 1),
            Cell::scaled(row.solver_vector_ops as f64, 1e-6, 2),
            match row.definite {
                Some(true) => Cell::from("SPD"),
                Some(false) => Cell::from("indefinite"),
                None => Cell::none(),
            },
            Cell::scientific(row.smallest_eigenvalue),
            Cell::scientific(row.smallest_eigenvalue_wide),
            Cell::scientific(row.residual_f64),
            Cell::scientific(row.residual_f32),
            Cell::scientific(row.residual_bf16),
        ];
        for time in &row.times {
            cells.push(Cell::scaled(time.total_us, 1e-3, 3));
            for end in [time.low_us, time.high_us] {
                cells.push(end.map_or_else(Cell::none, |us| Cell::scaled(us, 1e-3, 3)));
            }
            cells.push(Cell::from(time.bound));
        }
        rows.row(cells);
    }
    rows
}
