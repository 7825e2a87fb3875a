//! Measured cases: CSV files with one case per row.
//!
//! Columns `device,op,params,dtype` must be there; `cores`, `timing`, `latency_us` and `source` may be, and others are kept as they stand. `device` is a
//! chip, `params` are `name=value` pairs joined by `;`, `cores` are those behind the one device that was timed.

use std::path::Path;

/// One case.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Line of the file it starts on.
    pub line: u64,
    /// Chip.
    pub device: String,
    /// Cores of the device, where the row says.
    pub cores: Option<u32>,
    /// Operation.
    pub op: String,
    /// Parameters as written.
    pub params: String,
    /// Formats as written.
    pub dtype: String,
    /// How it was timed, as written; empty where the file does not say.
    pub timing: String,
    /// Measured time, in microseconds.
    pub latency_us: Option<f64>,
    /// Where the row comes from; empty where the file does not say.
    pub source: String,
    /// Every cell as written, in the order of the headers.
    pub cells: Vec<String>,
}

/// A file of cases.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// Name of the file, for messages.
    pub name: String,
    /// Headers.
    pub headers: Vec<String>,
    /// Rows.
    pub rows: Vec<Row>,
}

/// What is wrong with a file, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeasurementError {
    /// The file as a whole.
    #[error("{name}: {problem}")]
    File {
        /// File.
        name: String,
        /// Problem.
        problem: String,
    },
    /// One line.
    #[error("{name}:{line}: {problem}")]
    Line {
        /// File.
        name: String,
        /// Line, from 1.
        line: u64,
        /// Problem.
        problem: String,
    },
}

const REQUIRED: [&str; 4] = ["device", "op", "params", "dtype"];

/// Reads a file.
///
/// # Errors
/// Where it cannot be read, lacks a column, has a row of another length, or a number that is none.
pub fn read(path: impl AsRef<Path>) -> Result<Table, MeasurementError> {
    let path = path.as_ref();
    let name = path.display().to_string();
    match std::fs::read(path) {
        Ok(bytes) => parse(&name, &bytes),
        Err(error) => Err(MeasurementError::File {
            name,
            problem: match error.kind() {
                std::io::ErrorKind::NotFound => "no such file".to_owned(),
                std::io::ErrorKind::IsADirectory => "a folder, not a file".to_owned(),
                _ => format!("cannot be read: {error}"),
            },
        }),
    }
}

/// Reads a text; `name` stands for the file in messages.
///
/// # Errors
/// As [`read`].
pub fn parse(name: &str, bytes: &[u8]) -> Result<Table, MeasurementError> {
    let whole = |problem: String| MeasurementError::File {
        name: name.to_owned(),
        problem,
    };
    let at = |line: u64, problem: String| MeasurementError::Line {
        name: name.to_owned(),
        line,
        problem,
    };
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(bytes);
    let problem_of = |error: &csv::Error| match error.kind() {
        csv::ErrorKind::UnequalLengths {
            expected_len, len, ..
        } => {
            format!("expected {expected_len} cells, found {len}; quote a cell that holds a comma")
        }
        csv::ErrorKind::Utf8 { .. } => "not UTF-8 text".to_owned(),
        _ => error.to_string(),
    };
    let headers: Vec<String> = match reader.headers() {
        Ok(headers) => headers.iter().map(str::to_owned).collect(),
        Err(error) => return Err(at(1, problem_of(&error))),
    };
    let column = |wanted: &str| headers.iter().position(|header| header == wanted);
    if let Some(twice) = (0..headers.len()).find(|&i| headers[..i].contains(&headers[i])) {
        return Err(at(1, format!("column `{}` stands twice", headers[twice])));
    }
    let missing: Vec<&str> = REQUIRED
        .into_iter()
        .filter(|name| column(name).is_none())
        .collect();
    if !missing.is_empty() {
        return Err(whole(format!(
            "missing column {}; a file of cases has `device,op,params,dtype` and may have `cores,timing,latency_us,source`",
            crate::config::listed(missing)
        )));
    }
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = match record {
            Ok(record) => record,
            Err(error) => {
                let line = error.position().map_or(0, csv::Position::line);
                return Err(at(line, problem_of(&error)));
            }
        };
        let line = record.position().map_or(0, csv::Position::line);
        let cell = |wanted: &str| column(wanted).and_then(|i| record.get(i)).unwrap_or_default();
        let wrong = |field: &str, expected: &str| {
            at(
                line,
                format!("`{field}`: expected {expected}, found `{}`", cell(field)),
            )
        };
        let cores = match cell("cores") {
            "" => None,
            text => match text.parse::<u32>() {
                Ok(cores) if cores > 0 => Some(cores),
                _ => return Err(wrong("cores", "a whole number of at least 1 or nothing")),
            },
        };
        let latency_us = match cell("latency_us") {
            "" => None,
            text => match text.parse::<f64>() {
                Ok(latency) if latency > 0.0 && latency.is_finite() => Some(latency),
                _ => return Err(wrong("latency_us", "microseconds above zero or nothing")),
            },
        };
        rows.push(Row {
            line,
            device: cell("device").to_owned(),
            cores,
            op: cell("op").to_owned(),
            params: cell("params").to_owned(),
            dtype: cell("dtype").to_owned(),
            timing: cell("timing").to_owned(),
            latency_us,
            source: cell("source").to_owned(),
            cells: record.iter().map(str::to_owned).collect(),
        });
    }
    Ok(Table {
        name: name.to_owned(),
        headers,
        rows,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_latencies_is_a_list_of_cases() -> Result<(), MeasurementError> {
        let table = parse(
            "x.csv",
            b"device,op,params,dtype\ntpu-v4,matmul,m=8;k=8;n=8,bf16\n",
        )?;
        assert_eq!(table.rows.len(), 1);
        assert_eq!(table.rows[0].line, 2);
        assert_eq!((table.rows[0].cores, table.rows[0].latency_us), (None, None));
        Ok(())
    }

    #[test]
    fn problems_are_located() {
        let message =
            |text: &str| parse("x.csv", text.as_bytes()).map_or_else(|e| e.to_string(), |_| String::new());
        assert!(message("device,op,params\n").starts_with("x.csv: missing column `dtype`"));
        let header = "device,cores,op,params,dtype,latency_us\n";
        for (row, start) in [
            ("tpu-v4,two,add,n=8,f32,1.0", "x.csv:2: `cores`"),
            ("tpu-v4,0,add,n=8,f32,1.0", "x.csv:2: `cores`"),
            ("tpu-v4,2,add,n=8,f32,fast", "x.csv:2: `latency_us`"),
            ("tpu-v4,2,add,n=8,f32,-1", "x.csv:2: `latency_us`"),
            ("tpu-v4,2,add,n=8,f32,inf", "x.csv:2: `latency_us`"),
            ("tpu-v4,2,add,n=8", "x.csv:2: expected 6 cells, found 4"),
        ] {
            let found = message(&format!("{header}{row}\n"));
            assert!(found.starts_with(start), "{row}: {found}");
        }
        assert!(message("").contains("missing column"));
    }
}
