//! Rows of a sweep as Parquet: the columns of the CSV, numbers as numbers, empty cells as nulls.

use std::io::Write;
use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;

use super::rows::Columns;
use crate::config::Value;
use crate::study::whatif::{Axis, Row, Timing};

/// Rows of a row group.
const GROUP: usize = 1 << 16;

/// A column of a row group.
enum Data {
    Whole(Vec<Option<i64>>),
    Number(Vec<Option<f64>>),
    Text(Vec<Option<String>>),
}

/// What a varied field holds.
fn physical(axis: &Axis) -> Physical {
    let all = |kind: fn(&Value) -> bool| (0..axis.values().len()).all(|i| axis.value(i).is_some_and(kind));
    if all(|value| matches!(value, Value::Int(_))) {
        Physical::INT64
    } else if all(|value| matches!(value, Value::Int(_) | Value::Float(_))) {
        Physical::DOUBLE
    } else {
        Physical::BYTE_ARRAY
    }
}

/// Writes rows in groups.
pub struct Writer<'a, W: Write + Send> {
    columns: &'a Columns<'a>,
    file: Result<SerializedFileWriter<W>, ParquetError>,
    rows: Vec<Row>,
}

impl<'a, W: Write + Send> Writer<'a, W> {
    /// A file without rows. What goes wrong is said by [`Writer::close`].
    pub fn new(out: W, columns: &'a Columns<'a>) -> Self {
        let file = schema(columns).and_then(|schema| {
            let properties = Arc::new(WriterProperties::builder().build());
            SerializedFileWriter::new(out, Arc::new(schema), properties)
        });
        Writer {
            columns,
            file,
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn add(&mut self, row: Row) {
        self.rows.push(row);
        if self.rows.len() >= GROUP {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let rows = std::mem::take(&mut self.rows);
        if let Ok(file) = &mut self.file
            && let Err(error) = group(file, self.columns, &rows)
        {
            self.file = Err(error);
        }
    }

    /// Ends the file.
    ///
    /// # Errors
    /// The first thing that went wrong.
    pub fn close(mut self) -> Result<(), ParquetError> {
        if !self.rows.is_empty() {
            self.flush();
        }
        self.file?.close().map(drop)
    }
}

fn schema(columns: &Columns<'_>) -> Result<Type, ParquetError> {
    let axes = columns.grid().space.axes();
    let fields = columns.names().into_iter().enumerate().map(|(at, name)| {
        let behind = at.checked_sub(1 + axes.len());
        let kind = match (at, behind) {
            (0, _) | (_, Some(9..=11)) => Physical::INT64,
            (_, None) => physical(&axes[at - 1]),
            (_, Some(2..=4 | 6..=8)) => Physical::DOUBLE,
            _ => Physical::BYTE_ARRAY,
        };
        let text = (kind == Physical::BYTE_ARRAY).then_some(LogicalType::String);
        Type::primitive_type_builder(name, kind)
            .with_repetition(Repetition::OPTIONAL)
            .with_logical_type(text)
            .build()
            .map(Arc::new)
    });
    Type::group_type_builder("row")
        .with_fields(fields.collect::<Result<_, _>>()?)
        .build()
}

fn group<W: Write + Send>(
    file: &mut SerializedFileWriter<W>,
    columns: &Columns<'_>,
    rows: &[Row],
) -> Result<(), ParquetError> {
    let grid = columns.grid();
    let digits: Vec<Vec<usize>> = rows.iter().map(|row| grid.space.digits(row.point)).collect();
    let number = |of: fn(&Timing) -> Option<f64>| {
        Data::Number(
            rows.iter()
                .map(|row| row.outcome.as_ref().ok().and_then(of))
                .collect(),
        )
    };
    let count = |of: fn(&Timing) -> u64| {
        let value = |row: &Row| i64::try_from(of(row.outcome.as_ref().ok()?)).ok();
        Data::Whole(rows.iter().map(value).collect())
    };
    let text = |of: &dyn Fn(&Row) -> Option<String>| Data::Text(rows.iter().map(of).collect());
    let mut data = vec![Data::Whole(
        rows.iter().map(|row| i64::try_from(row.point).ok()).collect(),
    )];
    for (at, axis) in grid.space.axes().iter().enumerate() {
        let values = digits.iter().map(|digits| digits[at]);
        data.push(match physical(axis) {
            Physical::INT64 => Data::Whole(
                values
                    .map(|i| match axis.value(i) {
                        Some(Value::Int(value)) => Some(*value),
                        _ => None,
                    })
                    .collect(),
            ),
            Physical::DOUBLE => Data::Number(values.map(|i| axis.number(i)).collect()),
            _ => Data::Text(values.map(|i| Some(axis.values()[i].clone())).collect()),
        });
    }
    data.extend([
        text(&|row| Some(grid.chips[row.chip].clone())),
        text(&|row| Some(grid.plans[row.plan].clone())),
        number(|t| Some(t.time_us)),
        number(|t| t.interval_us.map(|(low, _)| low)),
        number(|t| t.interval_us.map(|(_, high)| high)),
        text(&|row| row.outcome.as_ref().ok().map(|t| t.bound.to_string())),
        number(|t| Some(t.mxu_us)),
        number(|t| Some(t.vpu_us)),
        number(|t| Some(t.hbm_us)),
        count(|t| t.hbm_bytes),
        count(|t| t.state_bytes),
        count(|t| t.flops),
        text(&|row| row.outcome.as_ref().err().map(ToString::to_string)),
    ]);
    let mut group = file.next_row_group()?;
    for column in data {
        let Some(mut writer) = group.next_column()? else {
            return Err(ParquetError::General("fewer columns than data".to_owned()));
        };
        match column {
            Data::Whole(values) => {
                let (values, levels) = present(values);
                writer
                    .typed::<Int64Type>()
                    .write_batch(&values, Some(&levels), None)?;
            }
            Data::Number(values) => {
                let (values, levels) = present(values);
                writer
                    .typed::<DoubleType>()
                    .write_batch(&values, Some(&levels), None)?;
            }
            Data::Text(values) => {
                let (values, levels) = present(values);
                let values: Vec<ByteArray> = values.iter().map(|text| text.as_str().into()).collect();
                writer
                    .typed::<ByteArrayType>()
                    .write_batch(&values, Some(&levels), None)?;
            }
        }
        writer.close()?;
    }
    group.close().map(drop)
}

/// The values that are there, and for every row whether it has one.
fn present<T>(values: Vec<Option<T>>) -> (Vec<T>, Vec<i16>) {
    let levels = values.iter().map(|value| i16::from(value.is_some())).collect();
    (values.into_iter().flatten().collect(), levels)
}
