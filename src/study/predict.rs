//! `predict`: the time of every case of a table.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::calls;
use crate::config::suggestion;
use crate::hardware::{self, Chip};
use crate::kernels::library::{Formats, Launch, Params};
use crate::measurements::{Row, Table};
use crate::report::result::Bound;
use crate::timing::time_kernel;

/// The predicted time of a case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// All launches of the call, in microseconds.
    pub predicted_us: f64,
    /// What binds most of that time.
    pub bound: Bound,
}

/// Times every row of a table, in its order; a row that cannot be timed says why.
#[must_use]
pub fn predict(table: &Table) -> Vec<Result<Prediction, String>> {
    // Every chip of the table once.
    let mut chips: BTreeMap<(&str, Option<u32>), Result<Chip, String>> = BTreeMap::new();
    for row in &table.rows {
        chips
            .entry((&row.device, row.cores))
            .or_insert_with(|| chip(&row.device, row.cores));
    }
    table
        .rows
        .par_iter()
        .map(|row| match chips.get(&(row.device.as_str(), row.cores)) {
            Some(Ok(chip)) => case(row, chip),
            Some(Err(reason)) => Err(reason.clone()),
            None => Err(format!("unknown device `{}`", row.device)),
        })
        .collect()
}

fn chip(device: &str, cores: Option<u32>) -> Result<Chip, String> {
    if !hardware::shipped().contains(&device) {
        let tail = suggestion(device, &hardware::shipped(), "shipped");
        return Err(format!("unknown device `{device}`; {tail}"));
    }
    let (chip, _) = hardware::load(device).map_err(|error| error.to_string())?;
    match cores {
        Some(cores) => chip.with_cores(cores).map_err(|error| error.to_string()),
        None => Ok(chip),
    }
}

fn case(row: &Row, chip: &Chip) -> Result<Prediction, String> {
    let build = || -> Result<Vec<Launch>, crate::kernels::library::CaseError> {
        let params = Params::parse(&row.params)?;
        let formats = Formats::parse(&row.dtype)?;
        calls::launches(&row.op, &params, formats, chip)
    };
    time(&build().map_err(|error| error.to_string())?, chip)
}

/// Time of the launches of a call, one after the other.
///
/// # Errors
/// Where there are none, or the time is not finite.
pub fn time(launches: &[Launch], chip: &Chip) -> Result<Prediction, String> {
    let mut by_bound: BTreeMap<Bound, f64> = BTreeMap::new();
    for launch in launches {
        let time = time_kernel(&launch.kernel, chip);
        *by_bound.entry(time.bound).or_default() += time.total_us * launch.times as f64;
    }
    let predicted_us: f64 = by_bound.values().sum();
    let bound = by_bound.iter().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(a.0)));
    match bound {
        Some((&bound, _)) if predicted_us.is_finite() && predicted_us > 0.0 => Ok(Prediction { predicted_us, bound }),
        _ => Err("the call has no kernels".to_owned()),
    }
}
