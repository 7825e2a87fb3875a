//! `tpusim predict`.

use std::io::Write;

use anyhow::{anyhow, bail};
use clap::Args;
use serde_json::{Map, Value, json};

use super::{Global, Outcome};
use crate::hardware;
use crate::measurements::{self, Row, Table};
use crate::report::explain;
use crate::report::table::{Cell, Column, Format, Table as Printed};
use crate::study::predict::{self, ChipFiles, Prediction};
use crate::timing::time_kernel;

/// Arguments of `tpusim predict`.
#[derive(Debug, Args)]
pub(super) struct PredictArgs {
    /// File of cases: columns `device,op,params,dtype`, and `cores,timing,latency_us,source` where known
    csv: String,
    /// Print the launches of every case instead of its total (the JSON always has them)
    #[arg(long)]
    launches: bool,
    /// Take the case on this line of the file apart, launch by launch, from counts to the result
    #[arg(long, value_name = "LINE", conflicts_with = "launches")]
    explain: Option<u64>,
    /// A hardware file whose chip the device column names, besides the shipped ones; may be repeated
    #[arg(long, value_name = "FILE")]
    chip: Vec<String>,
}

type Known<'a> = Vec<(&'a Row, Prediction)>;
type Unknown<'a> = Vec<(&'a Row, String)>;

pub(super) fn execute(out: &mut impl Write, args: &PredictArgs, global: &Global) -> anyhow::Result<Outcome> {
    let table = measurements::read(&args.csv)?;
    let files = ChipFiles::new(&args.chip)?;
    if let Some(line) = args.explain {
        return explain(out, &table, &files, line);
    }
    let (mut known, mut unknown): (Known<'_>, Unknown<'_>) = (Vec::new(), Vec::new());
    for (row, result) in
        table
            .rows
            .iter()
            .zip(predict::predict(&table, &files, hardware::shipped_calibration()))
    {
        match result {
            Ok(prediction) => known.push((row, prediction)),
            Err(reason) => unknown.push((row, reason)),
        }
    }
    match global.format {
        Format::Json => json(out, &table, &known, &unknown)?,
        Format::Table if args.launches => launches(&known).write_text(out)?,
        Format::Csv if args.launches => launches(&known).write_csv(out)?,
        Format::Table => text(out, &table, &known, &unknown)?,
        Format::Csv => csv(out, &table, &known, &unknown)?,
    }
    if unknown.is_empty() {
        return Ok(Outcome::Done);
    }
    global.say(&format!(
        "{} of {} rows could not be timed; they stand at the end",
        unknown.len(),
        table.rows.len()
    ));
    Ok(Outcome::CheckFailed)
}

/// The case on a line, launch by launch.
fn explain(out: &mut impl Write, table: &Table, files: &ChipFiles, line: u64) -> anyhow::Result<Outcome> {
    let Some(row) = table.rows.iter().find(|row| row.line == line) else {
        bail!("{} has no case on line {line}", table.name);
    };
    let chips = predict::chips([row], files);
    let chip = chips
        .into_values()
        .next()
        .unwrap_or_else(|| Err("no chip".to_owned()));
    let located = |reason: String| anyhow!("{}:{line}: {reason}", table.name);
    let chip = chip.map_err(located)?;
    let (launches, chip) = predict::launches(row, &chip).map_err(|error| located(error.to_string()))?;
    for (i, launch) in launches.iter().enumerate() {
        if i > 0 {
            writeln!(out)?;
        }
        if launch.times > 1 {
            writeln!(out, "{} times:", launch.times)?;
        }
        if launch.kernel.share < 1.0 {
            writeln!(out, "in {:.4} of the steps:", launch.kernel.share)?;
        }
        let time = time_kernel(&launch.kernel, &chip);
        out.write_all(explain::render(&launch.kernel, &time, &chip)?.as_bytes())?;
    }
    Ok(Outcome::Done)
}

/// One line per launch.
fn launches(known: &Known<'_>) -> Printed {
    let mut printed = Printed::new([
        Column::number("line", "line_count"),
        Column::text("device", "device"),
        Column::text("op", "op"),
        Column::text("launch", "launch"),
        Column::text("title", "title"),
        Column::number("times", "times_count"),
        Column::number("share", "share_ratio"),
        Column::number("time of one (us)", "time_us"),
        Column::number("HBM (MB)", "hbm_megabytes"),
        Column::text("bound", "bound"),
    ]);
    for (row, prediction) in known {
        for launch in &prediction.launches {
            printed.row([
                Cell::from(row.line),
                Cell::from(&row.device),
                Cell::from(&row.op),
                Cell::from(&launch.label),
                Cell::from(&launch.title),
                Cell::from(launch.times),
                Cell::from(launch.share),
                Cell::number(launch.us, 2),
                Cell::number(launch.hbm_bytes as f64 / 1e6, 3),
                Cell::from(launch.bound),
            ]);
        }
    }
    printed
}

fn text(out: &mut impl Write, table: &Table, known: &Known<'_>, unknown: &Unknown<'_>) -> anyhow::Result<()> {
    let mut printed = Printed::new([
        Column::text("device", "device"),
        Column::number("cores", "cores_count"),
        Column::text("op", "op"),
        Column::text("params", "params"),
        Column::text("dtype", "dtype"),
        Column::number("measured (us)", "latency_us"),
        Column::number("predicted (us)", "predicted_us"),
        Column::number("low (us)", "low_us"),
        Column::number("high (us)", "high_us"),
        Column::number("error (%)", "error_percent"),
        Column::text("bound", "bound"),
    ]);
    for (row, prediction) in known {
        let error = row
            .latency_us
            .map(|measured| 100.0 * (prediction.predicted_us / measured - 1.0));
        printed.row([
            Cell::from(&row.device),
            row.cores.map_or_else(Cell::none, Cell::from),
            Cell::from(&row.op),
            Cell::from(&row.params),
            Cell::from(&row.dtype),
            Cell::optional(row.latency_us, 2),
            Cell::number(prediction.predicted_us, 2),
            Cell::optional(prediction.interval.map(|interval| interval.low_us), 2),
            Cell::optional(prediction.interval.map(|interval| interval.high_us), 2),
            Cell::optional(error, 1),
            Cell::from(prediction.bound),
        ]);
    }
    printed.write_text(out)?;
    if !unknown.is_empty() {
        writeln!(out, "\nnot timed:")?;
    }
    for (row, reason) in unknown {
        writeln!(
            out,
            "{}:{}: {} {}: {reason}",
            table.name, row.line, row.device, row.op
        )?;
    }
    Ok(())
}

/// Columns added to those of the file. The interval is empty where no residuals of comparable cases exist.
const ADDED: [&str; 5] = ["predicted_us", "low_us", "high_us", "bound", "reason"];

fn csv(out: &mut impl Write, table: &Table, known: &Known<'_>, unknown: &Unknown<'_>) -> anyhow::Result<()> {
    // A column of the file that is called like an added one is what an earlier prediction left.
    let kept: Vec<usize> = (0..table.headers.len())
        .filter(|&i| !ADDED.contains(&table.headers[i].as_str()))
        .collect();
    let mut writer = csv::Writer::from_writer(out);
    writer.write_record(kept.iter().map(|&i| table.headers[i].as_str()).chain(ADDED))?;
    let mut write = |row: &Row, added: [String; 5]| {
        let cells = kept.iter().map(|&i| row.cells[i].clone());
        writer.write_record(cells.chain(added))
    };
    for (row, prediction) in known {
        write(
            row,
            [
                prediction.predicted_us.to_string(),
                prediction
                    .interval
                    .map_or_else(String::new, |interval| interval.low_us.to_string()),
                prediction
                    .interval
                    .map_or_else(String::new, |interval| interval.high_us.to_string()),
                prediction.bound.to_string(),
                String::new(),
            ],
        )?;
    }
    for (row, reason) in unknown {
        let mut added = [const { String::new() }; 5];
        added[4].clone_from(reason);
        write(row, added)?;
    }
    writer.flush()?;
    Ok(())
}

fn json(out: &mut impl Write, table: &Table, known: &Known<'_>, unknown: &Unknown<'_>) -> anyhow::Result<()> {
    let object = |row: &Row| {
        let mut object = Map::new();
        object.insert("line".to_owned(), json!(row.line));
        for (header, cell) in table.headers.iter().zip(&row.cells) {
            object.insert(header.clone(), json!(cell));
        }
        object.insert("cores".to_owned(), json!(row.cores));
        object.insert("latency_us".to_owned(), json!(row.latency_us));
        object
    };
    let rows: Vec<Value> = known
        .iter()
        .map(|(row, prediction)| {
            let mut object = object(row);
            object.insert("predicted_us".to_owned(), json!(prediction.predicted_us));
            object.insert(
                "low_us".to_owned(),
                json!(prediction.interval.map(|interval| interval.low_us)),
            );
            object.insert(
                "high_us".to_owned(),
                json!(prediction.interval.map(|interval| interval.high_us)),
            );
            object.insert("bound".to_owned(), json!(prediction.bound));
            let launches: Vec<Value> = prediction
                .launches
                .iter()
                .map(|launch| {
                    json!({
                        "label": launch.label,
                        "title": launch.title,
                        "times": launch.times,
                        "share": launch.share,
                        "time_us": launch.us,
                        "hbm_bytes": launch.hbm_bytes,
                        "bound": launch.bound,
                    })
                })
                .collect();
            object.insert("launches".to_owned(), Value::Array(launches));
            Value::Object(object)
        })
        .collect();
    let not_timed: Vec<Value> = unknown
        .iter()
        .map(|(row, reason)| {
            let mut object = object(row);
            object.insert("reason".to_owned(), json!(reason));
            Value::Object(object)
        })
        .collect();
    super::json(out, &json!({ "rows": rows, "not_timed": not_timed }))
}
