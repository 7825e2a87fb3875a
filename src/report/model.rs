//! The result of a run of a model, and its formats: text, CSV and JSON (schema `tpusim.model/1`, docs/formats.md).

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::result::{Bound, Provenance};
use super::stack::write_ending;
use super::table::{Cell, Column, Table};

/// Name and version of the JSON schema.
pub const SCHEMA: &str = "tpusim.model/1";

/// Blocks of one kind: what they hold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlockResult {
    /// Name of the kind.
    pub name: String,
    /// The mixer of a decode step in one line.
    pub mixer: String,
    /// What follows it, in one line.
    pub feed_forward: String,
    /// Blocks of this kind.
    pub count: u64,
    /// Parameters of one block, its norms among them.
    pub parameters: u64,
    /// Those of them that a token uses.
    pub active_parameters: u64,
    /// Bytes of the recurrent state of one block, one sequence.
    pub state_bytes: u64,
    /// Bytes of the rows the convolution of one block keeps, one sequence.
    pub convolution_state_bytes: u64,
    /// Bytes a token of one sequence adds to the cache of one block.
    pub cache_bytes_per_token: u64,
}

/// What lies in device memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoryResult {
    /// Weights, all experts among them.
    pub weight_bytes: u64,
    /// Recurrent states of all sequences.
    pub state_bytes: u64,
    /// Rows of the convolutions of all sequences.
    pub convolution_state_bytes: u64,
    /// Keys and values, or latents, of all sequences.
    pub cache_bytes: u64,
    /// Activations: the residual stream, and the most that one launch reads and writes beside weights, states and caches.
    pub activation_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
    /// Memory of the device.
    pub capacity_bytes: u64,
    /// Whether it fits.
    pub fits: bool,
    /// Largest batch that fits at these tokens, activations growing with the batch; 0 where not even one sequence does.
    pub largest_batch: u64,
}

/// One launch of a part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LaunchResult {
    /// Stage or span of stages.
    pub stage: String,
    /// What it does.
    pub title: String,
    /// Launches in one pass: 1, or the share of the decode steps of an interval that have it.
    pub times: f64,
    /// Time of one.
    pub time_us: f64,
    /// What binds it.
    pub bound: Bound,
    /// Bytes it moves between HBM and the chip.
    pub hbm_bytes: u64,
}

/// Launches of one part of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartResult {
    /// Kind of block; `model` for embedding and head.
    pub block: String,
    /// `embedding`, `norms`, `mixer`, `feed-forward`, `head`.
    pub part: String,
    /// How often it runs.
    pub count: u64,
    /// Time of one.
    pub time_us: f64,
    /// Time of all of them.
    pub total_us: f64,
    /// Lower end of the 80 % interval of that; absent where nothing comparable was measured.
    pub low_us: Option<f64>,
    /// Upper end.
    pub high_us: Option<f64>,
    /// Share of the time of the model.
    pub share: f64,
    /// Label of its longest launch.
    pub longest: String,
    /// What binds that.
    pub bound: Bound,
    /// Launches of one, in order of execution.
    pub launches: Vec<LaunchResult>,
    /// Matrix FLOPs of one, those of padded row tiles of experts among them.
    pub flops: u64,
    /// HBM bytes of one.
    pub hbm_bytes: u64,
}

/// A published time beside the predicted one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PublishedTime {
    /// What was run.
    pub method: String,
    /// Published time per output token.
    pub published_us: f64,
    /// `100 (predicted / published - 1)` where the plan of this run stands for the method.
    pub error_percent: Option<f64>,
}

/// A prefill or a decode step of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PointResult {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each prompt, or tokens before the decoded one.
    pub tokens: u64,
    /// Plans of the mixers, each once.
    pub plan: String,
    /// Time to the first token of all prompts, or per output token.
    pub time_us: f64,
    /// Lower end of its 80 % interval; absent where nothing comparable was measured. Errors of the parts go together, as far as is known.
    pub low_us: Option<f64>,
    /// Upper end.
    pub high_us: Option<f64>,
    /// Tokens read or written a second by the device.
    pub tokens_per_second: f64,
    /// The same of a whole chip whose devices all do so.
    pub tokens_per_second_chip: f64,
    /// Experts of a layer that some token chooses, in expectation under uniform choices; absent without experts.
    pub touched_experts: Option<f64>,
    /// Share of the rows of the expert products that only fill tiles; absent without experts.
    pub expert_padding: Option<f64>,
    /// Device memory.
    pub memory: MemoryResult,
    /// Parts in order of execution.
    pub parts: Vec<PartResult>,
    /// Published times of this size on this chip.
    pub published: Vec<PublishedTime>,
}

/// All points on one chip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelChip {
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
    /// Prefills.
    pub prefill: Vec<PointResult>,
    /// Decode steps.
    pub decode: Vec<PointResult>,
}

/// The result of `tpusim run` on a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelResult {
    /// [`SCHEMA`].
    pub schema: String,
    /// Name of the model.
    pub name: String,
    /// The answer in one line.
    pub headline: String,
    /// Where the sizes come from.
    pub source: String,
    /// Format of the activations.
    pub activations: String,
    /// Format of the weight matrices.
    pub weights: String,
    /// Parameters of the whole model.
    pub parameters: u64,
    /// Parameters that a token uses, embedding and head among them.
    pub active_parameters: u64,
    /// Kinds of blocks, in the order of the file.
    pub blocks: Vec<BlockResult>,
    /// Chips, in the order asked for.
    pub chips: Vec<ModelChip>,
    /// Where the published times are printed.
    pub published_source: Option<String>,
    /// Warnings, each ending in advice.
    pub warnings: Vec<String>,
    /// Where it comes from.
    pub provenance: Provenance,
}

/// `2.0 B`, `3.9 G`: a count in thousands of millions.
fn billions(count: u64) -> f64 {
    count as f64 / 1e9
}

/// Gibibytes.
#[must_use]
pub fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn interval(low_us: Option<f64>, high_us: Option<f64>) -> String {
    low_us.zip(high_us).map_or_else(
        || "none".to_owned(),
        |(low, high)| format!("{:.2} to {:.2}", low / 1e3, high / 1e3),
    )
}

fn blocks(result: &ModelResult) -> Table {
    let mut table = Table::new([
        Column::text("block", "block"),
        Column::number("count", "count"),
        Column::number("parameters (10^6)", "parameters"),
        Column::number("used by a token (10^6)", "active"),
        Column::number("state (MiB)", "state"),
        Column::number("convolution (KiB)", "convolution"),
        Column::number("cache (B/token)", "cache"),
    ]);
    for block in &result.blocks {
        table.row([
            Cell::from(&block.name),
            Cell::from(block.count),
            Cell::number(block.parameters as f64 / 1e6, 3),
            Cell::number(block.active_parameters as f64 / 1e6, 3),
            Cell::number(block.state_bytes as f64 / f64::from(1 << 20), 3),
            Cell::number(block.convolution_state_bytes as f64 / 1024.0, 1),
            Cell::from(block.cache_bytes_per_token),
        ]);
    }
    table
}

fn points(points: &[PointResult], tokens: &str) -> Table {
    let mut table = Table::new([
        Column::number("batch", "batch"),
        Column::number(tokens, "tokens"),
        Column::text("plan", "plan"),
        Column::number("time (ms)", "time_us"),
        Column::text("80 % interval (ms)", "interval"),
        Column::number("tokens/s of the device", "device"),
        Column::number("of the chip", "chip"),
        Column::number("experts touched", "touched"),
        Column::number("rows padded (%)", "padding"),
    ]);
    for point in points {
        table.row([
            Cell::from(point.batch),
            Cell::from(point.tokens),
            Cell::from(&point.plan),
            Cell::number(point.time_us / 1e3, 3),
            Cell::from(interval(point.low_us, point.high_us)),
            Cell::number(point.tokens_per_second, 0),
            Cell::number(point.tokens_per_second_chip, 0),
            Cell::optional(point.touched_experts, 1),
            Cell::optional(point.expert_padding.map(|share| 100.0 * share), 1),
        ]);
    }
    table
}

fn memory(points: &[PointResult], tokens: &str) -> Table {
    let mut table = Table::new([
        Column::number("batch", "batch"),
        Column::number(tokens, "tokens"),
        Column::number("weights (GiB)", "weights"),
        Column::number("states (GiB)", "states"),
        Column::number("caches (GiB)", "caches"),
        Column::number("activations (GiB)", "activations"),
        Column::number("of (GiB)", "capacity"),
        Column::text("", "fits"),
        Column::number("largest batch", "largest"),
    ]);
    for point in points {
        let memory = &point.memory;
        table.row([
            Cell::from(point.batch),
            Cell::from(point.tokens),
            Cell::number(gib(memory.weight_bytes), 2),
            Cell::number(gib(memory.state_bytes + memory.convolution_state_bytes), 2),
            Cell::number(gib(memory.cache_bytes), 2),
            Cell::number(gib(memory.activation_bytes), 2),
            Cell::number(gib(memory.capacity_bytes), 2),
            Cell::from(if memory.fits { "fits" } else { "out of memory" }),
            Cell::from(memory.largest_batch),
        ]);
    }
    table
}

fn parts(points: &[PointResult], tokens: &str) -> Table {
    let mut table = Table::new([
        Column::number("batch", "batch"),
        Column::number(tokens, "tokens"),
        Column::text("block", "block"),
        Column::text("part", "part"),
        Column::number("count", "count"),
        Column::number("one (us)", "time_us"),
        Column::number("all (us)", "total_us"),
        Column::number("share (%)", "share"),
        Column::number("launches", "launches"),
        Column::text("longest launch", "longest"),
        Column::text("bound", "bound"),
    ]);
    for point in points {
        for part in &point.parts {
            table.row([
                Cell::from(point.batch),
                Cell::from(point.tokens),
                Cell::from(&part.block),
                Cell::from(&part.part),
                Cell::from(part.count),
                Cell::number(part.time_us, 1),
                Cell::number(part.total_us, 1),
                Cell::number(100.0 * part.share, 1),
                Cell::from(part.launches.len()),
                Cell::from(&part.longest),
                Cell::from(part.bound),
            ]);
        }
    }
    table
}

fn published(result: &ModelResult, chip: &ModelChip) -> Option<Table> {
    let mut table = Table::new([
        Column::number("batch", "batch"),
        Column::text("method", "method"),
        Column::number("published (ms)", "published_us"),
        Column::number("predicted (ms)", "predicted_us"),
        Column::number("error (%)", "error"),
    ]);
    result.published_source.as_ref()?;
    for point in &chip.decode {
        for row in &point.published {
            table.row([
                Cell::from(point.batch),
                Cell::from(&row.method),
                Cell::number(row.published_us / 1e3, 2),
                Cell::optional(row.error_percent.map(|_| point.time_us / 1e3), 2),
                row.error_percent
                    .map_or_else(Cell::none, |error| Cell::from(format!("{error:+.1}"))),
            ]);
        }
    }
    (!table.is_empty()).then_some(table)
}

/// Writes the tables for a terminal.
///
/// # Errors
/// Where the writer fails.
pub fn write_text(mut out: impl Write, result: &ModelResult) -> io::Result<()> {
    writeln!(out, "{}", result.headline)?;
    writeln!(
        out,
        "{:.2} x 10^9 parameters, {:.2} x 10^9 used by a token; weights {}, activations {}",
        billions(result.parameters),
        billions(result.active_parameters),
        result.weights,
        result.activations
    )?;
    writeln!(out, "sizes: {}\n", result.source)?;
    blocks(result).write_text(&mut out)?;
    for block in &result.blocks {
        writeln!(out, "{}: {}; {}", block.name, block.mixer, block.feed_forward)?;
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
        for (title, list, tokens) in [
            ("prefill, time to the first token", &chip.prefill, "tokens"),
            ("decode, time per output token", &chip.decode, "context"),
        ] {
            writeln!(out, "{title}")?;
            points(list, tokens).write_text(&mut out)?;
            writeln!(out, "\nmemory of the device")?;
            memory(list, tokens).write_text(&mut out)?;
            writeln!(out, "\nparts")?;
            parts(list, tokens).write_text(&mut out)?;
            writeln!(out)?;
        }
        if let (Some(table), Some(source)) = (published(result, chip), &result.published_source) {
            writeln!(out, "against published values on {}: {source}", chip.name)?;
            table.write_text(&mut out)?;
        }
    }
    write_ending(
        &mut out,
        &result.warnings,
        &result.provenance,
        ["assumed", "model"],
    )
}

/// Writes one row per chip, point and part; every number has its unit in the header.
///
/// # Errors
/// Where the writer fails.
pub fn write_csv(mut out: impl Write, result: &ModelResult) -> io::Result<()> {
    let mut table = Table::new(
        [
            "chip",
            "device",
            "pass",
            "batch_count",
            "tokens_count",
            "plan",
            "block",
            "part",
            "count",
            "time_us",
            "total_us",
            "low_us",
            "high_us",
            "share_fraction",
            "longest",
            "bound",
            "launches_count",
            "flops_count",
            "hbm_bytes",
            "point_us",
            "point_low_us",
            "point_high_us",
            "tokens_per_second",
            "tokens_per_second_chip",
            "touched_experts_count",
            "expert_padding_fraction",
            "weight_bytes",
            "state_bytes",
            "convolution_state_bytes",
            "cache_bytes",
            "activation_bytes",
            "capacity_bytes",
            "largest_batch_count",
        ]
        .map(|name| Column::text(name, name)),
    );
    for chip in &result.chips {
        for (pass, list) in [("prefill", &chip.prefill), ("decode", &chip.decode)] {
            for point in list {
                for part in &point.parts {
                    table.row([
                        Cell::from(&chip.name),
                        Cell::from(&chip.device),
                        Cell::from(pass),
                        Cell::from(point.batch),
                        Cell::from(point.tokens),
                        Cell::from(&point.plan),
                        Cell::from(&part.block),
                        Cell::from(&part.part),
                        Cell::from(part.count),
                        Cell::number(part.time_us, 3),
                        Cell::number(part.total_us, 3),
                        Cell::optional(part.low_us, 3),
                        Cell::optional(part.high_us, 3),
                        Cell::number(part.share, 3),
                        Cell::from(&part.longest),
                        Cell::from(part.bound),
                        Cell::from(part.launches.len()),
                        Cell::from(part.flops),
                        Cell::from(part.hbm_bytes),
                        Cell::number(point.time_us, 3),
                        Cell::optional(point.low_us, 3),
                        Cell::optional(point.high_us, 3),
                        Cell::number(point.tokens_per_second, 3),
                        Cell::number(point.tokens_per_second_chip, 3),
                        Cell::optional(point.touched_experts, 3),
                        Cell::optional(point.expert_padding, 3),
                        Cell::from(point.memory.weight_bytes),
                        Cell::from(point.memory.state_bytes),
                        Cell::from(point.memory.convolution_state_bytes),
                        Cell::from(point.memory.cache_bytes),
                        Cell::from(point.memory.activation_bytes),
                        Cell::from(point.memory.capacity_bytes),
                        Cell::from(point.memory.largest_batch),
                    ]);
                }
            }
        }
    }
    table.write_csv(&mut out)
}

/// Writes the result as pretty JSON with a newline at the end.
///
/// # Errors
/// Where the writer fails.
pub fn write_json(mut out: impl Write, result: &ModelResult) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut out, result)?;
    writeln!(out)
}
