//! `tpusim predict`.

use std::io::Write;

use clap::Args;
use serde_json::{Map, Value, json};

use super::{Global, Outcome};
use crate::measurements::{self, Row, Table};
use crate::report::table::{Cell, Column, Format, Table as Printed};
use crate::study::predict::{Prediction, predict};

/// Arguments of `tpusim predict`.
#[derive(Debug, Args)]
pub(super) struct PredictArgs {
    /// File of cases: columns `device,op,params,dtype`, and `cores,timing,latency_us,source` where known
    csv: String,
}

type Known<'a> = Vec<(&'a Row, Prediction)>;
type Unknown<'a> = Vec<(&'a Row, String)>;

pub(super) fn execute(out: &mut impl Write, args: &PredictArgs, global: &Global) -> anyhow::Result<Outcome> {
    let table = measurements::read(&args.csv)?;
    let (mut known, mut unknown): (Known<'_>, Unknown<'_>) = (Vec::new(), Vec::new());
    for (row, result) in table.rows.iter().zip(predict(&table)) {
        match result {
            Ok(prediction) => known.push((row, prediction)),
            Err(reason) => unknown.push((row, reason)),
        }
    }
    match global.format {
        Format::Table => text(out, &table, &known, &unknown)?,
        Format::Csv => csv(out, &table, &known, &unknown)?,
        Format::Json => json(out, &table, &known, &unknown)?,
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

fn text(out: &mut impl Write, table: &Table, known: &Known<'_>, unknown: &Unknown<'_>) -> anyhow::Result<()> {
    let mut printed = Printed::new([
        Column::text("device", "device"),
        Column::number("cores", "cores_count"),
        Column::text("op", "op"),
        Column::text("params", "params"),
        Column::text("dtype", "dtype"),
        Column::number("measured (us)", "latency_us"),
        Column::number("predicted (us)", "predicted_us"),
        Column::number("error (%)", "error_percent"),
        Column::text("bound", "bound"),
    ]);
    for (row, prediction) in known {
        let error = row.latency_us.map(|measured| 100.0 * (prediction.predicted_us / measured - 1.0));
        printed.row([
            Cell::from(&row.device),
            row.cores.map_or_else(Cell::none, Cell::from),
            Cell::from(&row.op),
            Cell::from(&row.params),
            Cell::from(&row.dtype),
            Cell::optional(row.latency_us, 2),
            Cell::number(prediction.predicted_us, 2),
            Cell::optional(error, 1),
            Cell::from(prediction.bound),
        ]);
    }
    printed.write_text(out)?;
    if !unknown.is_empty() {
        writeln!(out, "\nnot timed:")?;
    }
    for (row, reason) in unknown {
        writeln!(out, "{}:{}: {} {}: {reason}", table.name, row.line, row.device, row.op)?;
    }
    Ok(())
}

/// Columns added to those of the file. The interval is empty until a calibration exists.
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
                String::new(),
                String::new(),
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
            object.insert("low_us".to_owned(), Value::Null);
            object.insert("high_us".to_owned(), Value::Null);
            object.insert("bound".to_owned(), json!(prediction.bound));
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
    serde_json::to_writer_pretty(&mut *out, &json!({ "rows": rows, "not_timed": not_timed }))?;
    writeln!(out)?;
    Ok(())
}
