//! Aligned tables for terminals, and the same rows as CSV or JSON.
//!
//! ```text
//! name     clock (GHz)  HBM (GB/s)
//! tpu-v4          1.05        1200
//! tpu-v5e         1.50         819
//! ```
//!
//! Text stands left, numbers right; the unit is in the header. Nothing is coloured here.

use std::fmt;
use std::io::{self, Write};

/// How a command prints its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Format {
    /// An aligned table for people.
    #[default]
    Table,
    /// One JSON value.
    Json,
    /// Comma-separated values with a header line.
    Csv,
}

/// On which side the cells of a column stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Align {
    Left,
    Right,
}

/// A column: its header and where its cells stand.
#[derive(Debug, Clone)]
pub struct Column {
    title: String,
    key: String,
    align: Align,
}

impl Column {
    /// A column of text. `key` is its name in CSV.
    #[must_use]
    pub fn text(title: impl Into<String>, key: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            key: key.into(),
            align: Align::Left,
        }
    }

    /// A column of numbers. The title carries the unit, and so should `key`, its name in CSV.
    #[must_use]
    pub fn number(title: impl Into<String>, key: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            key: key.into(),
            align: Align::Right,
        }
    }
}

/// One cell: what a person reads, and what a program reads where that has more digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell {
    shown: String,
    exact: String,
}

impl Cell {
    /// A number shown with `decimals` digits after the point; CSV gets all of them. Numbers that are not
    /// finite are shown as `-` and left empty in CSV.
    #[must_use]
    pub fn number(value: f64, decimals: usize) -> Self {
        if value.is_finite() {
            let mut shown = format!("{value:.decimals$}");
            // `-0.00` reads as if something were there.
            if shown.starts_with('-') && shown.chars().all(|c| matches!(c, '-' | '0' | '.')) {
                shown.remove(0);
            }
            let exact = value.to_string();
            Self { shown, exact }
        } else {
            Self::none()
        }
    }

    /// A number that may not exist.
    #[must_use]
    pub fn optional(value: Option<f64>, decimals: usize) -> Self {
        value.map_or_else(Self::none, |value| Self::number(value, decimals))
    }

    /// A number that people see times `factor`, with `decimals` digits after the point; CSV gets it unscaled.
    #[must_use]
    pub fn scaled(value: f64, factor: f64, decimals: usize) -> Self {
        let shown = Self::number(value * factor, decimals).shown;
        let exact = Self::number(value, decimals).exact;
        Self { shown, exact }
    }

    /// A number that may not exist and spans powers of ten, shown with two digits.
    #[must_use]
    pub fn scientific(value: Option<f64>) -> Self {
        match value.filter(|x| x.is_finite()) {
            Some(x) => Self {
                shown: format!("{x:.1e}"),
                exact: x.to_string(),
            },
            None => Self::none(),
        }
    }

    /// No value: `-` for people, empty in CSV.
    #[must_use]
    pub fn none() -> Self {
        Self {
            shown: "-".to_owned(),
            exact: String::new(),
        }
    }
}

/// Text is shown as it is, line breaks as blanks.
impl<T: fmt::Display> From<T> for Cell {
    fn from(value: T) -> Self {
        let exact = value.to_string();
        let shown = exact
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        Self { shown, exact }
    }
}

/// Rows under headers.
#[derive(Debug, Clone)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Self {
        Self {
            columns: columns.into_iter().collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row. Missing cells are shown as `-`; cells without a column are dropped.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) -> &mut Self {
        let mut row: Vec<Cell> = cells.into_iter().take(self.columns.len()).collect();
        row.resize_with(self.columns.len(), Cell::none);
        self.rows.push(row);
        self
    }

    /// Whether no row has been added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Writes the aligned table; lines carry no trailing blanks.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_text(&self, out: &mut impl Write) -> io::Result<()> {
        write!(out, "{self}")
    }

    /// Writes a header line and one line per row. Numbers carry all their digits.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_csv(&self, out: &mut impl Write) -> io::Result<()> {
        let mut writer = csv::Writer::from_writer(out);
        writer
            .write_record(self.columns.iter().map(|column| column.key.as_str()))
            .map_err(io::Error::from)?;
        for row in &self.rows {
            writer
                .write_record(row.iter().map(|cell| cell.exact.as_str()))
                .map_err(io::Error::from)?;
        }
        writer.flush()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = |text: &str| text.chars().count();
        let widths: Vec<usize> = self
            .columns
            .iter()
            .enumerate()
            .map(|(index, column)| {
                let cells = self.rows.iter().filter_map(|row| row.get(index));
                cells
                    .map(|cell| length(&cell.shown))
                    .max()
                    .unwrap_or(0)
                    .max(length(&column.title))
            })
            .collect();
        let headers: Vec<&str> = self.columns.iter().map(|column| column.title.as_str()).collect();
        let rows = self
            .rows
            .iter()
            .map(|row| row.iter().map(|cell| cell.shown.as_str()).collect::<Vec<_>>());
        for row in std::iter::once(headers).chain(rows) {
            let mut line = String::new();
            for ((text, column), width) in row.iter().zip(&self.columns).zip(&widths) {
                if !line.is_empty() {
                    line.push_str("  ");
                }
                let padding = " ".repeat(width.saturating_sub(length(text)));
                match column.align {
                    Align::Left => line.extend([text, padding.as_str()]),
                    Align::Right => line.extend([padding.as_str(), text]),
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let mut table = Table::new([
            Column::text("name", "name"),
            Column::number("clock (GHz)", "clock_ghz"),
        ]);
        table.row([Cell::from("tpu-v4"), Cell::number(1.05, 2)]);
        table.row([Cell::from("a, \"b\""), Cell::optional(None, 2)]);
        table.row([Cell::from("short")]);
        table
    }

    #[test]
    fn text_stands_left_and_numbers_right() {
        assert_eq!(
            sample().to_string(),
            "name    clock (GHz)\n\
             tpu-v4         1.05\n\
             a, \"b\"            -\n\
             short             -\n"
        );
    }

    #[test]
    fn csv_has_all_digits_and_quotes() {
        let mut out = Vec::new();
        let mut table = sample();
        table.row([Cell::from("x"), Cell::number(1.0 / 3.0, 2)]);
        assert_eq!(Cell::number(-0.001, 2).shown, "0.00");
        assert!(table.write_csv(&mut out).is_ok());
        assert_eq!(
            String::from_utf8_lossy(&out),
            "name,clock_ghz\ntpu-v4,1.05\n\"a, \"\"b\"\"\",\nshort,\nx,0.3333333333333333\n"
        );
    }
}
