//! `tpusim hlo`: an HLO text on a chip, by the fast model.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use serde::Deserialize;

use super::{Global, Outcome};
use crate::dump::hlo::Module;
use crate::hardware;
use crate::hlo;
use crate::report::table::{Cell, Column, Format, Table};
use crate::study::hlo::{HloResult, XlaCost, time};

/// Rows of the table for people; `--format json|csv` has all.
const MOST_ROWS: usize = 15;

/// Arguments of `tpusim hlo`.
#[derive(Debug, Args)]
pub(super) struct HloArgs {
    /// HLO text, optimised (`compiled.as_text()`) or not (`lowered.compiler_ir("hlo").as_hlo_text()`)
    #[arg(value_name = "MODULE.txt")]
    module: PathBuf,
    /// Chips: names or paths, separated by commas
    #[arg(long, value_delimiter = ',', required = true)]
    hw: Vec<String>,
    /// File with what XLA's cost analysis says, as JSON: `xla_flops` and `xla_bytes`, such as meta.json of `tools/tpu/dump.py`
    #[arg(long, value_name = "FILE")]
    cost: Option<PathBuf>,
}

/// What a file of XLA's counts holds; other keys are not looked at.
#[derive(Debug, Deserialize)]
struct CostFile {
    xla_flops: Option<f64>,
    xla_bytes: Option<f64>,
}

pub(super) fn execute(out: &mut impl Write, args: &HloArgs, global: &Global) -> anyhow::Result<Outcome> {
    let file = args.module.display().to_string();
    let stream = File::open(&args.module).with_context(|| format!("cannot read {file}"))?;
    let module = Module::read(&file, BufReader::new(stream))?;
    let xla = match &args.cost {
        None => None,
        Some(path) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
            let found: CostFile = serde_json::from_str(&text).with_context(|| name.clone())?;
            if found.xla_flops.is_none() && found.xla_bytes.is_none() {
                bail!("{name}: expected `xla_flops` or `xla_bytes`, found neither");
            }
            Some(XlaCost {
                flops: found.xla_flops,
                bytes: found.xla_bytes,
            })
        }
    };
    let program = hlo::program(&module);
    let mut results = Vec::new();
    for name in &args.hw {
        let (chip, _) = hardware::load(name)?;
        let calibration = hardware::shipped_calibration();
        results.push(time((&file, &module.name), &program, &chip, calibration, xla)?);
    }
    match global.format {
        Format::Json => match results.as_slice() {
            [only] => super::json(out, only)?,
            several => super::json(out, &several)?,
        },
        Format::Csv => table(&results, usize::MAX).write_csv(out)?,
        Format::Table => {
            for (index, result) in results.iter().enumerate() {
                if index > 0 {
                    writeln!(out)?;
                }
                write_text(out, result)?;
            }
        }
    }
    Ok(Outcome::Done)
}

fn write_text(out: &mut impl Write, result: &HloResult) -> anyhow::Result<()> {
    let interval = result.low_us.zip(result.high_us).map_or_else(
        || "no interval".to_owned(),
        |(low, high)| format!("80 % interval {low:.2} to {high:.2} us"),
    );
    let mut bounds: Vec<(&_, &f64)> = result.by_bound_us.iter().collect();
    bounds.sort_by(|a, b| b.1.total_cmp(a.1));
    let bounds: Vec<String> = bounds
        .iter()
        .map(|(bound, us)| {
            format!(
                "{bound} {:.0} %",
                100.0 * **us / result.time_us.max(f64::MIN_POSITIVE)
            )
        })
        .collect();
    writeln!(
        out,
        "{} on {}, {:.2} GHz: {:.2} us ({interval}); time by bound: {}",
        result.module,
        result.chip,
        result.clock_ghz,
        result.time_us,
        bounds.join(", ")
    )?;
    let mut counts = Table::new([
        Column::text("counted", "counted"),
        Column::number("products (GFLOP)", "matrix_flops"),
        Column::number("vector (Gop)", "vector_ops"),
        Column::number("transcendental (Gop)", "transcendentals"),
        Column::number("flops as XLA counts (G)", "flops"),
        Column::number("bytes (MB)", "bytes"),
    ]);
    for (name, of) in [
        ("as often as it runs", &result.executed),
        ("bodies of loops once", &result.once),
    ] {
        counts.row([
            Cell::from(name),
            Cell::scaled(of.matrix_flops, 1e-9, 4),
            Cell::scaled(of.vector_ops, 1e-9, 4),
            Cell::scaled(of.transcendentals, 1e-9, 4),
            Cell::scaled(of.flops(), 1e-9, 4),
            Cell::scaled(of.bytes, 1e-6, 3),
        ]);
    }
    if let Some(xla) = result.xla {
        let cell = |value: Option<f64>, factor, digits| {
            value.map_or_else(Cell::none, |value| Cell::scaled(value, factor, digits))
        };
        counts.row([
            Cell::from("XLA's cost analysis"),
            Cell::none(),
            Cell::none(),
            Cell::none(),
            cell(xla.flops, 1e-9, 4),
            cell(xla.bytes, 1e-6, 3),
        ]);
    }
    counts.write_text(&mut *out)?;
    writeln!(out, "\nkernels, longest first")?;
    let mut longest = result.clone();
    longest.kernels.sort_by(|a, b| b.time_us.total_cmp(&a.time_us));
    table(std::slice::from_ref(&longest), MOST_ROWS).write_text(&mut *out)?;
    if let Some(rest) = longest.kernels.get(MOST_ROWS..).filter(|rest| !rest.is_empty()) {
        let time: f64 = rest.iter().map(|row| row.time_us).sum();
        writeln!(out, "and {} more, {time:.2} us together", rest.len())?;
    }
    for warning in &result.warnings {
        writeln!(out, "warning: {warning}")?;
    }
    Ok(())
}

fn table(results: &[HloResult], most: usize) -> Table {
    let mut printed = Table::new([
        Column::text("chip", "chip"),
        Column::text("kernel", "kernel"),
        Column::text("operation", "opcode"),
        Column::number("runs", "runs_count"),
        Column::number("time (us)", "time_us"),
        Column::number("share (%)", "share_fraction"),
        Column::text("bound", "bound"),
        Column::number("products (MFLOP)", "matrix_flops"),
        Column::number("vector (Mop)", "vector_ops"),
        Column::number("transcendental (Mop)", "transcendentals"),
        Column::number("bytes (MB)", "bytes"),
        Column::text("counted", "counted"),
    ]);
    for result in results {
        for row in result.kernels.iter().take(most) {
            printed.row([
                Cell::from(&result.chip),
                Cell::from(&row.name),
                Cell::from(&row.opcode),
                Cell::number(row.count, 0),
                Cell::number(row.time_us, 2),
                Cell::scaled(row.share, 100.0, 1),
                Cell::from(row.bound.name()),
                Cell::scaled(row.counts.matrix_flops, 1e-6, 3),
                Cell::scaled(row.counts.vector_ops, 1e-6, 3),
                Cell::scaled(row.counts.transcendentals, 1e-6, 3),
                Cell::scaled(row.counts.bytes, 1e-6, 3),
                Cell::from(if row.opaque { "bytes alone" } else { "all" }),
            ]);
        }
    }
    printed
}
