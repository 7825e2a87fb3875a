//! The page docs/deltalog.md: decoding with a log of updates, predicted, measured and as published.

use std::fmt::Write as _;

use super::table::Table;
use crate::calibration::delta_log::{Row, eager_of, scores};
use crate::dtype::Dtype;
use crate::layer::DeltaLog;
use crate::report::delta_log::{by_interval, by_split, by_step, gains};
use crate::study::delta_log::DeltaLogTables;

/// Shipped workloads of the page, the first of them with all its tables and pictures.
pub const WORKLOADS: [&str; 3] = ["gdn_deltalog", "kda_deltalog", "rwkv6_deltalog"];
/// Sequences of the page: those that the paper studies kernels with.
pub const SEQUENCES: usize = 128;
/// Chip of the tables by step, the one the rows were measured on.
pub const CHIP: &str = "h200-sxm";
/// Pictures of the first workload on the page, names without extension.
pub const PICTURES: [&str; 6] = ["traffic", "steps", "intervals", "states", "split", "roofline"];

/// What the `DeltaLog` paper states at most, over all its operators and devices: speed of the recurrent kernel, and bytes of state written.
const PUBLISHED: [f64; 2] = [1.86, 7.83];

/// The page in Markdown.
#[must_use]
pub fn markdown(tables: &[DeltaLogTables], measured: &[Row]) -> String {
    let mut out = String::from(
        "# Decoding with a log of updates (DeltaLog)\n\nMade by `tpusim decode --page docs/deltalog.md`, not by hand. Its pictures are in `images/deltalog`.\n\n\
         A recurrent decode step reads and writes its whole state for every token. DeltaLog (2026) keeps a dense base and a log of at most `M` rank-one updates \
         beside it: most steps read both and append an entry, and the base is written once in `M` tokens. The mathematics stands in [model.md](model.md), the keys of \
         a workload are `log_interval`, `log_keys`, `log_updates` and `log_merge` (`workloads/gdn_deltalog.yaml`). One graph is executed and timed: with any interval the steps \
         give the outputs and states of the eager ones to 1e-10 in f64 (test).\n\n",
    );
    published(&mut out, tables, measured);
    if let Some(first) = tables.first() {
        chips(&mut out, first);
        by_steps(&mut out, first);
        sweeps(&mut out, first);
    }
    errors(&mut out, measured);
    out
}

/// A log as measured rows write its formats.
fn formats(log: DeltaLog) -> String {
    let name = |dtype: Dtype| dtype.name();
    if log.keys == log.updates {
        name(log.keys).to_owned()
    } else {
        format!("{}x{}", name(log.keys), name(log.updates))
    }
}

/// The measured average step of a log at a number of sequences.
fn measured_of<'a>(measured: &'a [Row], tables: &DeltaLogTables) -> Option<&'a Row> {
    let (log, batch) = (formats(tables.log), tables.batch.to_string());
    let (heads, interval) = (
        tables.states_per_sequence.to_string(),
        tables.log.interval.to_string(),
    );
    let wanted = [
        ("B", batch.as_str()),
        ("H", heads.as_str()),
        ("log", log.as_str()),
        ("M", interval.as_str()),
    ];
    measured.iter().find(|row| {
        row.mechanism == tables.mechanism
            && row.step == "deltalog"
            && row.parameter("split").is_none()
            && row.parameter("merge").is_none()
            && wanted
                .iter()
                .all(|(name, value)| row.parameter(name) == Some(value))
    })
}

fn published(out: &mut String, tables: &[DeltaLogTables], measured: &[Row]) {
    let _ = writeln!(
        out,
        "## Beside the paper\n\nThe paper reports kernels up to {:.2} times as fast and up to {:.2} times less state written, on an RTX 4090 and an H200 NVL. Its operators, formats and intervals, 32 heads of 128 by 128, {SEQUENCES} sequences, on \
one H200 here; measured rows are those of our own Triton kernels (`measurements/h200_deltalog.csv`), which no fit has seen. Times in us.\n\n| operator | log, M | eager predicted | measured | average step predicted | measured | speedup predicted | measured | \
by bytes | state and log: writes less |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        PUBLISHED[0], PUBLISHED[1]
    );
    for of in tables {
        let Some(chip) = of.chips.iter().find(|chip| chip.chip == CHIP) else {
            continue;
        };
        let row = measured_of(measured, of);
        let eager = row.and_then(|row| eager_of(row, measured));
        let time =
            |row: Option<&Row>| row.map_or_else(|| "–".to_owned(), |row| format!("{:.1}", row.measured_us));
        let speedup = row
            .zip(eager)
            .map(|(row, eager)| eager.measured_us / row.measured_us);
        let _ = writeln!(
            out,
            "| {} | {}, {} | {:.1} | {} | {:.1} | {} | {:.2} | {} | {:.2} | {:.2} |",
            of.mechanism,
            formats(of.log),
            of.log.interval,
            chip.eager.time_us,
            time(eager),
            chip.amortised.time_us,
            time(row),
            chip.amortised.speedup,
            speedup.map_or_else(|| "–".to_owned(), |speedup| format!("{speedup:.2}")),
            chip.amortised.traffic_gain,
            chip.amortised.state_write_gain
        );
    }
    let _ = writeln!(
        out,
        "\nWhy neither number of the paper stands in the table:\n\n\
- **{:.2} times as fast** is more than the bytes allow. A step reads the base whatever it writes, so that with `M` going to infinity and entries of no size it would move half the bytes, and with the paper's formats an eager step moves 1.54 to 1.69 times as much. \
What exceeds that needs an eager kernel that is slower than its bytes: against the decode kernels of flash-linear-attention our DeltaLog step gains 1.54 to 2.10 (tools/gpu/deltalog). Which baseline the paper has, and on which of its GPUs 1.86 was seen, is not known.\n\
- **{:.2} times less written** lies between the 7.39 of the formula for GDN, which counts every entry, and the limit of 8 for `M = 8`. Entries that stay in the last-level cache from one step to the next are not written to device memory by then; with the \
output, two bytes per value column, `ncu` counts 7.15. A TPU has no such cache: there the formula holds.\n\
- **Split replay never pays** on the H200, measured or predicted: a second launch and its operands cost more than the coefficients that every program computes for itself.\n",
        PUBLISHED[0], PUBLISHED[1]
    );
}

fn block(out: &mut String, table: &Table) {
    let mut text = Vec::new();
    // Writing to memory does not fail.
    let _ = table.write_text(&mut text);
    let _ = writeln!(out, "```\n{}```\n", String::from_utf8_lossy(&text));
}

fn picture(out: &mut String, alternative: &str, name: &str) {
    let _ = writeln!(out, "![{alternative}](images/deltalog/{name}.svg)\n");
}

fn chips(out: &mut String, first: &DeltaLogTables) {
    let _ = writeln!(
        out,
        "## On every chip\n\nThe core (gates to output) of {}, {} sequences; 80 % intervals are those of the decode kernels that were measured. A gain that stays below the bytes is that of a chip whose device memory does not bind every step: its vector or cross-lane unit spreads query, key and logged entries over the lanes no faster than before.\n",
        first.name, first.batch
    );
    block(out, &gains(first));
    picture(out, "Roofline of the layer with and without a log", "roofline");
}

fn by_steps(out: &mut String, first: &DeltaLogTables) {
    let _ = writeln!(
        out,
        "## By step\n\nEvery step of an interval: what appends, what writes the base with its own update in it, and a merge in a launch of its own. A step after `j` entries reads `j` of them.\n"
    );
    picture(out, "Bytes of every step by what they belong to", "traffic");
    picture(out, "Time of a step over the entries of its log", "steps");
    for chip in first.chips.iter().filter(|chip| chip.chip == CHIP) {
        let _ = writeln!(out, "{CHIP}:\n");
        block(out, &by_step(first, chip));
    }
}

fn sweeps(out: &mut String, first: &DeltaLogTables) {
    let _ = writeln!(
        out,
        "## Intervals and numbers of states\n\nSpeed of an average step against the eager one. What a log gains is bandwidth: where launch and latency are the step, on few sequences, it gains nothing.\n"
    );
    block(out, &by_interval(first));
    picture(out, "Time of an average step over the interval", "intervals");
    picture(out, "Time of a step over the states of all sequences", "states");
    let _ = writeln!(
        out,
        "## Split replay\n\nCoefficients of the log once per state in a kernel of their own, which appends what all value columns share; then programs of some value columns each.\n"
    );
    block(out, &by_split(first));
    picture(
        out,
        "Average steps with the log replayed in one kernel and in two",
        "split",
    );
}

fn errors(out: &mut String, measured: &[Row]) {
    let _ = writeln!(
        out,
        "## Against measured steps\n\nAll {} measured rows with the calibration in use, none of them in its fit; `speedup` is the median error of the gain over the eager step of the same size.\n\n| mechanism | step | rows | median / p90 % | bias % | speedup % |\n|---|---|---:|---:|---:|---:|",
        measured.len()
    );
    for score in scores(measured) {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {:.1} / {:.0} | {:+.1} | {} |",
            score.mechanism,
            score.step,
            score.n,
            score.median_abs_pct,
            score.p90_abs_pct,
            score.bias_pct,
            score
                .speedup_abs_pct
                .map_or_else(|| "–".to_owned(), |error| format!("{error:.1}"))
        );
    }
}
