//! The result of a run of a stack of layers, and its formats: text, CSV and JSON (schema `tpusim.stack/1`, docs/formats.md).

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::result::{Bound, NumericResult, Provenance};
use super::table::{Cell, Column, Table};

/// Name and version of the JSON schema.
pub const SCHEMA: &str = "tpusim.stack/1";

/// Layers of one kind: what they keep of the tokens before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KindResult {
    /// Name of the kind.
    pub name: String,
    /// The layer in one line.
    pub layer: String,
    /// Layers of this kind.
    pub count: u64,
    /// Bytes of the recurrent state of one layer, all sequences; it does not depend on the tokens.
    pub state_bytes: u64,
    /// Bytes of the rows the convolution of one layer keeps, all sequences.
    pub convolution_state_bytes: u64,
    /// Bytes a token of one sequence adds to the cache of one layer.
    pub cache_bytes_per_token: u64,
    /// Bytes of the cache of one layer, all sequences, after all tokens.
    pub cache_bytes: u64,
    /// The numeric check, where it was run.
    pub numeric: Option<NumericResult>,
}

/// Time of the layers of one kind in one plan on one chip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KindTime {
    /// Name of the kind.
    pub name: String,
    /// Layers.
    pub count: u64,
    /// Time of one layer.
    pub time_us: f64,
    /// Time of all of them.
    pub total_us: f64,
    /// Lower end of the 80 % interval of it; absent where nothing comparable was measured.
    pub low_us: Option<f64>,
    /// Upper end.
    pub high_us: Option<f64>,
    /// Their share of the time of the stack.
    pub share: f64,
    /// The longest row of one layer.
    pub longest_stage: String,
    /// Its share of the time of the layer.
    pub longest_share: f64,
    /// What binds it.
    pub bound: Bound,
    /// Matrix FLOPs of one layer.
    pub flops: u64,
    /// HBM bytes of one layer.
    pub hbm_bytes: u64,
}

/// One fusion plan on one chip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StackPlan {
    /// Name of the plan.
    pub name: String,
    /// Time of the stack.
    pub total_us: f64,
    /// Lower end of its 80 % interval; absent where nothing comparable was measured. Errors of the kinds go together, as far as is known.
    pub low_us: Option<f64>,
    /// Upper end.
    pub high_us: Option<f64>,
    /// Kinds, in the order of the file.
    pub kinds: Vec<KindTime>,
}

/// All plans on one chip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StackChip {
    /// Name of the hardware file.
    pub name: String,
    /// What a person calls it.
    pub title: String,
    /// Cores of the device that was timed.
    pub cores: u32,
    /// What the device is.
    pub device: String,
    /// Clock of the run.
    pub clock_ghz: f64,
    /// Plans, in the order of the stack.
    pub plans: Vec<StackPlan>,
    /// What the time rests on.
    pub coverage: String,
}

/// The result of `tpusim run` on a stack.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StackResult {
    /// [`SCHEMA`].
    pub schema: String,
    /// Name of the stack.
    pub name: String,
    /// The answer in one line.
    pub headline: String,
    /// Layers of all kinds.
    pub layers: u64,
    /// Bytes of all recurrent states and convolution rows, all sequences.
    pub state_bytes: u64,
    /// Bytes of all caches after all tokens, all sequences.
    pub cache_bytes: u64,
    /// Kinds, in the order of the file.
    pub kinds: Vec<KindResult>,
    /// Chips, in the order asked for.
    pub chips: Vec<StackChip>,
    /// Warnings, each ending in advice.
    pub warnings: Vec<String>,
    /// Where it comes from.
    pub provenance: Provenance,
}

/// Mebibytes.
#[must_use]
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn interval(low_us: Option<f64>, high_us: Option<f64>) -> String {
    low_us.zip(high_us).map_or_else(
        || "none".to_owned(),
        |(low, high)| format!("{low:.0} to {high:.0}"),
    )
}

fn times(result: &StackResult, chip: &StackChip) -> Table {
    let mut table = Table::new([
        Column::text("plan", "plan"),
        Column::text("layers", "layers"),
        Column::number("count", "count"),
        Column::number("one (us)", "time_us"),
        Column::number("all (us)", "total_us"),
        Column::text("80 % interval (us)", "interval_us"),
        Column::number("share (%)", "share"),
        Column::text("longest row", "longest_stage"),
        Column::number("of layer (%)", "longest_share"),
        Column::text("bound", "bound"),
    ]);
    for plan in &chip.plans {
        for kind in &plan.kinds {
            table.row([
                Cell::from(&plan.name),
                Cell::from(&kind.name),
                Cell::from(kind.count),
                Cell::number(kind.time_us, 1),
                Cell::number(kind.total_us, 1),
                Cell::from(interval(kind.low_us, kind.high_us)),
                Cell::number(100.0 * kind.share, 1),
                Cell::from(&kind.longest_stage),
                Cell::number(100.0 * kind.longest_share, 0),
                Cell::from(kind.bound),
            ]);
        }
        table.row([
            Cell::from(&plan.name),
            Cell::from("stack"),
            Cell::from(result.layers),
            Cell::none(),
            Cell::number(plan.total_us, 1),
            Cell::from(interval(plan.low_us, plan.high_us)),
            Cell::number(100.0, 1),
            Cell::from(""),
            Cell::none(),
            Cell::from(""),
        ]);
    }
    table
}

fn memory(result: &StackResult) -> Table {
    let mut table = Table::new([
        Column::text("layers", "layers"),
        Column::number("count", "count"),
        Column::number("state of one (MiB)", "state"),
        Column::number("convolution of one (MiB)", "convolution"),
        Column::number("cache of one (MiB)", "cache"),
        Column::number("per token of one (B)", "per_token"),
        Column::number("state of all (MiB)", "states"),
        Column::number("cache of all (MiB)", "caches"),
    ]);
    for kind in &result.kinds {
        table.row([
            Cell::from(&kind.name),
            Cell::from(kind.count),
            Cell::number(mib(kind.state_bytes), 3),
            Cell::number(mib(kind.convolution_state_bytes), 3),
            Cell::number(mib(kind.cache_bytes), 3),
            Cell::from(kind.cache_bytes_per_token),
            Cell::number(
                mib((kind.state_bytes + kind.convolution_state_bytes) * kind.count),
                3,
            ),
            Cell::number(mib(kind.cache_bytes * kind.count), 3),
        ]);
    }
    table
}

/// Writes the tables for a terminal.
///
/// # Errors
/// Where the writer fails.
pub fn write_text(mut out: impl Write, result: &StackResult) -> io::Result<()> {
    writeln!(out, "{}", result.headline)?;
    for kind in &result.kinds {
        writeln!(out, "{} x {}: {}", kind.count, kind.name, kind.layer)?;
    }
    for chip in &result.chips {
        writeln!(
            out,
            "\n{}: {}, {}, {} core{} at {} GHz",
            chip.name,
            chip.title,
            chip.device,
            chip.cores,
            if chip.cores == 1 { "" } else { "s" },
            chip.clock_ghz
        )?;
        times(result, chip).write_text(&mut out)?;
        writeln!(out, "rests on: {}", chip.coverage)?;
    }
    writeln!(out, "\nmemory of the tokens before")?;
    memory(result).write_text(&mut out)?;
    if result.kinds.iter().any(|kind| kind.numeric.is_some()) {
        writeln!(out, "\nnumeric check of one layer against f64")?;
        let mut table = Table::new([
            Column::text("layers", "layers"),
            Column::number("tokens", "tokens"),
            Column::number("output error, RMS (%)", "output"),
            Column::number("state error, RMS (%)", "state"),
            Column::text("first value not finite", "finite"),
        ]);
        for kind in &result.kinds {
            if let Some(numeric) = &kind.numeric {
                table.row([
                    Cell::from(&kind.name),
                    Cell::from(numeric.tokens),
                    Cell::number(100.0 * numeric.output_rms_error, 2),
                    Cell::optional(numeric.state_rms_error.map(|error| 100.0 * error), 2),
                    Cell::from(numeric.non_finite.as_deref().unwrap_or("none")),
                ]);
            }
        }
        table.write_text(&mut out)?;
    }
    let words = ["inferred, not published", "stack"];
    write_ending(&mut out, &result.warnings, &result.provenance, words)
}

/// Last lines of a text: warnings, what was not published, and what made it; `words` call what was not published, and the file.
pub(super) fn write_ending(
    out: &mut impl Write,
    warnings: &[String],
    provenance: &Provenance,
    [assumed, file]: [&str; 2],
) -> io::Result<()> {
    for warning in warnings {
        writeln!(out, "warning: {warning}")?;
    }
    writeln!(out)?;
    for item in &provenance.inferred {
        writeln!(out, "{assumed}: {item}")?;
    }
    writeln!(
        out,
        "made by: tpusim {}; hardware {}; {file} {}",
        provenance.version, provenance.hardware_digest, provenance.workload_digest
    )
}

/// Writes one row per chip, plan and kind; every number has its unit in the header.
///
/// # Errors
/// Where the writer fails.
pub fn write_csv(mut out: impl Write, result: &StackResult) -> io::Result<()> {
    let mut table = Table::new(
        [
            "chip",
            "device",
            "plan",
            "layers",
            "count",
            "time_us",
            "total_us",
            "low_us",
            "high_us",
            "share_fraction",
            "longest_stage",
            "bound",
            "flops_count",
            "hbm_bytes",
            "state_bytes",
            "convolution_state_bytes",
            "cache_bytes_per_token",
            "cache_bytes",
            "stack_total_us",
            "stack_low_us",
            "stack_high_us",
        ]
        .map(|name| Column::text(name, name)),
    );
    for chip in &result.chips {
        for plan in &chip.plans {
            for (time, kind) in plan.kinds.iter().zip(&result.kinds) {
                table.row([
                    Cell::from(&chip.name),
                    Cell::from(&chip.device),
                    Cell::from(&plan.name),
                    Cell::from(&time.name),
                    Cell::from(time.count),
                    Cell::number(time.time_us, 3),
                    Cell::number(time.total_us, 3),
                    Cell::optional(time.low_us, 3),
                    Cell::optional(time.high_us, 3),
                    Cell::number(time.share, 3),
                    Cell::from(&time.longest_stage),
                    Cell::from(time.bound),
                    Cell::from(time.flops),
                    Cell::from(time.hbm_bytes),
                    Cell::from(kind.state_bytes),
                    Cell::from(kind.convolution_state_bytes),
                    Cell::from(kind.cache_bytes_per_token),
                    Cell::from(kind.cache_bytes),
                    Cell::number(plan.total_us, 3),
                    Cell::optional(plan.low_us, 3),
                    Cell::optional(plan.high_us, 3),
                ]);
            }
        }
    }
    table.write_csv(&mut out)
}

/// Writes the result as pretty JSON with a newline at the end.
///
/// # Errors
/// Where the writer fails.
pub fn write_json(mut out: impl Write, result: &StackResult) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut out, result)?;
    writeln!(out)
}
