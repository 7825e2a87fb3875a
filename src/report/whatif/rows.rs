//! Rows of a sweep as text: CSV and JSON lines.

use std::io::{self, Write};

use rayon::prelude::*;

use crate::config::Value;
use crate::report::result::Bound;
use crate::study::whatif::{Axis, Grid, Row, Timing};

/// Columns before the varied fields.
const FIRST: [&str; 1] = ["point"];
/// Columns behind the varied fields. In JSON the last but one is `flops`.
const REST: [&str; 13] = [
    "chip",
    "plan",
    "time_us",
    "low_us",
    "high_us",
    "bound",
    "mxu_us",
    "vpu_us",
    "hbm_us",
    "hbm_bytes",
    "state_bytes",
    "flops_count",
    "error",
];
/// Rows that one thread formats at a time.
const PIECE: usize = 512;

/// The columns of the rows of one sweep.
pub struct Columns<'a> {
    grid: &'a Grid,
    /// Values of every varied field as CSV cells, each with its comma.
    csv: Vec<Vec<String>>,
    /// Values of every varied field as JSON members, each with its comma.
    json: Vec<Vec<String>>,
    chips: Vec<[String; 2]>,
    plans: Vec<[String; 2]>,
}

/// A CSV cell, quoted where it has to be.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

/// A JSON text.
fn json_text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl<'a> Columns<'a> {
    /// The columns of a sweep.
    #[must_use]
    pub fn new(grid: &'a Grid) -> Self {
        let axes = grid.space.axes();
        let json = axes.iter().map(|axis| {
            let values = axis.values().iter().enumerate();
            values
                .map(|(i, written)| {
                    let value = match axis.value(i) {
                        Some(Value::Int(value)) => value.to_string(),
                        Some(Value::Float(value)) if value.is_finite() => {
                            serde_json::Value::from(*value).to_string()
                        }
                        Some(Value::Bool(value)) => value.to_string(),
                        _ => json_text(written),
                    };
                    format!("{}:{value},", json_text(axis.field()))
                })
                .collect()
        });
        let csv = axes.iter().map(|axis| {
            let cell = |value: &String| format!("{},", quoted(value));
            axis.values().iter().map(cell).collect()
        });
        let both = |name: &str| [quoted(name), json_text(name)];
        Columns {
            csv: csv.collect(),
            json: json.collect(),
            chips: grid.chips.iter().map(|chip| both(chip)).collect(),
            plans: grid.plans.iter().map(|plan| both(plan)).collect(),
            grid,
        }
    }

    /// The rows there are.
    #[must_use]
    pub fn grid(&self) -> &'a Grid {
        self.grid
    }

    /// Names of the columns.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        let fields = self.grid.space.axes().iter().map(Axis::field);
        FIRST.into_iter().chain(fields).chain(REST).collect()
    }

    /// The header line of the CSV, with its line break.
    #[must_use]
    pub fn header(&self) -> String {
        let names: Vec<String> = self.names().into_iter().map(quoted).collect();
        format!("{}\n", names.join(","))
    }

    /// The rows as lines of CSV, without header. With `marks`, one for each row, a further column says whether the row is marked.
    #[must_use]
    pub fn csv(&self, rows: &[Row], marks: Option<&[bool]>) -> Vec<u8> {
        in_pieces(rows, marks, |row, mark, out| self.csv_row(row, mark, out))
    }

    /// The rows as lines of JSON. With `marks`, one for each row, a member `pareto` says whether the row is marked.
    #[must_use]
    pub fn json(&self, rows: &[Row], marks: Option<&[bool]>) -> Vec<u8> {
        in_pieces(rows, marks, |row, mark, out| self.json_row(row, mark, out))
    }

    fn csv_row(&self, row: &Row, mark: Option<bool>, out: &mut Vec<u8>) -> io::Result<()> {
        write!(out, "{},", row.point)?;
        let digits = self.grid.space.digits(row.point);
        for (values, digit) in self.csv.iter().zip(digits) {
            out.extend_from_slice(values[digit].as_bytes());
        }
        write!(out, "{},{},", self.chips[row.chip][0], self.plans[row.plan][0])?;
        match &row.outcome {
            Ok(t) => {
                write!(out, "{},", t.time_us)?;
                match t.interval_us {
                    Some((low, high)) => write!(out, "{low},{high},")?,
                    None => out.extend_from_slice(b",,"),
                }
                write!(
                    out,
                    "{},{},{},{},{},{},{},",
                    t.bound, t.mxu_us, t.vpu_us, t.hbm_us, t.hbm_bytes, t.state_bytes, t.flops
                )?;
            }
            Err(reason) => write!(out, ",,,,,,,,,,{}", quoted(reason))?,
        }
        if let Some(mark) = mark {
            write!(out, ",{mark}")?;
        }
        out.push(b'\n');
        Ok(())
    }

    fn json_row(&self, row: &Row, mark: Option<bool>, out: &mut Vec<u8>) -> io::Result<()> {
        write!(out, "{{\"point\":{},", row.point)?;
        let digits = self.grid.space.digits(row.point);
        for (values, digit) in self.json.iter().zip(digits) {
            out.extend_from_slice(values[digit].as_bytes());
        }
        write!(
            out,
            "\"chip\":{},\"plan\":{},",
            self.chips[row.chip][1], self.plans[row.plan][1]
        )?;
        match &row.outcome {
            Ok(t) => {
                write!(out, "\"time_us\":{},", t.time_us)?;
                match t.interval_us {
                    Some((low, high)) => write!(out, "\"low_us\":{low},\"high_us\":{high},")?,
                    None => write!(out, "\"low_us\":null,\"high_us\":null,")?,
                }
                write!(
                    out,
                    "\"bound\":\"{}\",\"mxu_us\":{},\"vpu_us\":{},\"hbm_us\":{},\"hbm_bytes\":{},\"state_bytes\":{},\"flops\":{},\"error\":null",
                    t.bound, t.mxu_us, t.vpu_us, t.hbm_us, t.hbm_bytes, t.state_bytes, t.flops
                )?;
            }
            Err(reason) => {
                for name in &REST[2..11] {
                    write!(out, "\"{name}\":null,")?;
                }
                write!(out, "\"flops\":null,\"error\":{}", json_text(reason))?;
            }
        }
        if let Some(mark) = mark {
            write!(out, ",\"pareto\":{mark}")?;
        }
        out.extend_from_slice(b"}\n");
        Ok(())
    }

    /// The row that a record of the CSV holds.
    ///
    /// # Errors
    /// What is wrong with the record.
    pub fn read(&self, record: &csv::StringRecord) -> Result<Row, String> {
        let fields = self.csv.len();
        let cell = |at: usize| record.get(at).unwrap_or_default();
        if record.len() != FIRST.len() + fields + REST.len() {
            return Err(format!("{} cells", record.len()));
        }
        let (position, rest) = (cell(0), |at: usize| cell(FIRST.len() + fields + at));
        let number = |at: usize| -> Result<f64, String> {
            let text = rest(at);
            text.parse()
                .map_err(|_| format!("`{text}` in column `{}`", REST[at]))
        };
        let count = |at: usize| -> Result<u64, String> {
            let text = rest(at);
            text.parse()
                .map_err(|_| format!("`{text}` in column `{}`", REST[at]))
        };
        let named = |name: &str, names: &[String], column: &str| {
            let position = names.iter().position(|known| *known == name);
            position.ok_or_else(|| format!("`{name}` in column `{column}`"))
        };
        let outcome = if rest(12).is_empty() {
            let interval_us = match rest(3) {
                "" => None,
                _ => Some((number(3)?, number(4)?)),
            };
            Ok(Timing {
                time_us: number(2)?,
                interval_us,
                bound: Bound::named(rest(5)).ok_or_else(|| format!("`{}` in column `bound`", rest(5)))?,
                mxu_us: number(6)?,
                vpu_us: number(7)?,
                hbm_us: number(8)?,
                hbm_bytes: count(9)?,
                state_bytes: count(10)?,
                flops: count(11)?,
            })
        } else {
            Err(rest(12).into())
        };
        Ok(Row {
            point: position
                .parse()
                .map_err(|_| format!("`{position}` in column `point`"))?,
            chip: named(rest(0), &self.grid.chips, "chip")?,
            plan: named(rest(1), &self.grid.plans, "plan")?,
            outcome,
        })
    }
}

/// Formats rows in pieces side by side, and joins them in order.
fn in_pieces(
    rows: &[Row],
    marks: Option<&[bool]>,
    write: impl Fn(&Row, Option<bool>, &mut Vec<u8>) -> io::Result<()> + Sync,
) -> Vec<u8> {
    let pieces: Vec<Vec<u8>> = rows
        .par_chunks(PIECE)
        .enumerate()
        .map(|(piece, rows)| {
            let mut out = Vec::with_capacity(256 * rows.len());
            for (i, row) in rows.iter().enumerate() {
                let mark = marks.and_then(|marks| marks.get(piece * PIECE + i).copied());
                // Writing into memory cannot fail.
                let _ = write(row, mark, &mut out);
            }
            out
        })
        .collect();
    pieces.concat()
}
