//! Measured rows that a fit can trust.

use std::collections::BTreeMap;

use rayon::prelude::*;

use crate::hardware::{self, Architecture, Chip};
use crate::measurements::{self, Row, Table};
use crate::study::predict::{self, ChipFiles};

/// Share by which a row may be faster than its roof: the clock is known to a few percent.
const ROOF_TOLERANCE: f64 = 1.03;
/// Ratio of two rows of the same case, beyond which neither is trusted.
const TWINS_DISAGREE: f64 = 1.5;
/// Whole microseconds below which rounding alone is off by more than a tenth.
const ROUNDED_BELOW_US: f64 = 5.0;

/// A measured row that can be timed.
#[derive(Debug, Clone)]
pub struct Observation {
    /// The row.
    pub row: Row,
    /// File it comes from.
    pub file: String,
    /// Chip it was measured on, without fitted values.
    pub chip: Chip,
    /// Measured time, in microseconds.
    pub measured_us: f64,
    /// Family of the operation.
    pub family: String,
    /// What a roofline of the launches says, in microseconds.
    pub roofline_us: f64,
    /// What tells its shape apart: operation and sizes, on whatever device.
    pub shape: String,
}

/// A row left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// File.
    pub file: String,
    /// Line.
    pub line: u64,
    /// Why.
    pub reason: String,
}

/// Rows of a fit and rows left out.
#[derive(Debug, Clone, Default)]
pub struct Data {
    /// Rows used, in the order of the files.
    pub used: Vec<Observation>,
    /// Rows left out.
    pub rejected: Vec<Rejected>,
    /// Digest of all rows.
    pub digest: String,
}

macro_rules! embedded {
    ($($name:literal),+ $(,)?) => {
        /// The shipped files of measured cases: name and text.
        const SHIPPED: &[(&str, &str)] = &[
            $((concat!("measurements/", $name, ".csv"), include_str!(concat!("../../measurements/", $name, ".csv")))),+
        ];
    };
}

embedded!(
    "attention_cudnn",
    "attention_xla",
    "chunked_attention",
    "elementwise_v4",
    "flash_attention",
    "flash_attention_triton",
    "gated_linear_unit",
    "gdn_fused",
    "gdn_recurrent",
    "h200",
    "h200_chains",
    "linear_cross_entropy",
    "matmul_v4",
    "matmul_v6e_v7x",
    "normalization",
    "ragged_dot",
);

/// The shipped tables of measured cases.
///
/// # Errors
/// Where a shipped file is malformed.
pub fn shipped() -> Result<Vec<Table>, measurements::MeasurementError> {
    SHIPPED
        .iter()
        .map(|(name, text)| measurements::parse(name, text.as_bytes()))
        .collect()
}

/// Parameters that tell how a case was launched or scored, not what it computes.
const NOT_SHAPE: [&str; 3] = ["residuals", "reduction", "clock"];

/// Operation and sizes of a row, without what does not change them and without the device.
#[must_use]
pub fn shape_of(row: &Row) -> String {
    let mut parts: Vec<&str> = row
        .params
        .split(';')
        .filter(|part| {
            let name = part.split('=').next().unwrap_or_default();
            // Blocks and tiles are chosen per device.
            !NOT_SHAPE.contains(&name) && !name.contains("block") && !name.contains("tile")
        })
        .collect();
    parts.sort_unstable();
    format!("{} {}", row.op, parts.join(";"))
}

/// Screens the rows of some tables, whose devices are shipped chips or those of `files`.
#[must_use]
pub fn screen(tables: &[Table], files: &ChipFiles) -> Data {
    let mut data = Data::default();
    let mut text = String::new();
    let rows: Vec<(&str, &Row)> = tables
        .iter()
        .flat_map(|table| table.rows.iter().map(|row| (table.name.as_str(), row)))
        .collect();
    let mut twins: BTreeMap<[String; 5], (f64, f64)> = BTreeMap::new();
    let key = |row: &Row| {
        [
            row.device.clone(),
            shape_of(row),
            row.dtype.clone(),
            row.timing.clone(),
            row.params.contains("residuals=1").to_string(),
        ]
    };
    for (_, row) in &rows {
        text.push_str(&row.cells.join("\u{1f}"));
        text.push('\n');
        if let Some(us) = row.latency_us {
            let seen = twins.entry(key(row)).or_insert((us, us));
            *seen = (seen.0.min(us), seen.1.max(us));
        }
    }
    data.digest = crate::config::digest(text.as_bytes());
    let chips = predict::chips_by(
        rows.iter().map(|(_, row)| *row),
        files,
        hardware::load_uncalibrated,
    );
    let judged: Vec<Result<Observation, String>> = rows
        .par_iter()
        .map(|&(file, row)| {
            let chip = chips
                .get(&(row.device.clone(), row.cores))
                .cloned()
                .unwrap_or_else(|| Err("unknown device".to_owned()))?;
            let measured_us = row.latency_us.ok_or_else(|| "no measured time".to_owned())?;
            let prediction = predict::case(row, &chip)?;
            let roof = predict::matrix_roof_us(row, &chip)?;
            if measured_us * ROOF_TOLERANCE < roof {
                return Err(format!("faster than its matrix roof of {roof:.1} us"));
            }
            if let Some(&(low, high)) = twins.get(&key(row))
                && high > TWINS_DISAGREE * low
            {
                return Err(format!("twins disagree: {low} and {high} us"));
            }
            if measured_us < ROUNDED_BELOW_US && measured_us.fract() == 0.0 {
                return Err("rounded to whole microseconds, of which there are few".to_owned());
            }
            Ok(Observation {
                row: row.clone(),
                file: file.to_owned(),
                chip,
                measured_us,
                family: prediction.family,
                roofline_us: prediction.roofline_us,
                shape: shape_of(row),
            })
        })
        .collect();
    for ((file, row), result) in rows.iter().zip(judged) {
        match result {
            Ok(observation) => data.used.push(observation),
            Err(reason) => data.rejected.push(Rejected {
                file: (*file).to_owned(),
                line: row.line,
                reason,
            }),
        }
    }
    data
}

impl Observation {
    /// Whether it was measured on a TPU.
    #[must_use]
    pub fn tpu(&self) -> bool {
        self.chip.architecture == Architecture::Tpu
    }
}
