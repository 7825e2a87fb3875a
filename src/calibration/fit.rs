//! A fit: free parameters against the logarithms of measured over predicted times.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::data::{Data, Observation};
use super::parameters::{Parameter, Setting, free};
use super::solver::{self, Free, Solution};
use crate::coefficients::Definition;
use crate::hardware::{Architecture, Calibration, Chip, ChipQuantity, Fitted, SCHEMA, mean_of_architecture};
use crate::study::predict;

/// Rows of a family on a device beyond which more rows add no weight: a sweep of thousands must not decide what all kernels share.
const FULL_WEIGHT_ROWS: f64 = 60.0;
/// Families that are scored but not fitted: what their implementations launch is not known well enough for their times to say anything about a chip.
const NOT_FITTED: [&str; 4] = [
    "grouped product, dense",
    "grouped product, dense, GPU",
    "recurrent loop",
    "recurrent loop, GPU",
];
/// Most rows of a family on a device that a fit looks at; all of them are scored.
const MOST_ROWS: usize = 120;
/// Residual of a row that cannot be timed with a setting.
const NOT_TIMED: f64 = 3.0;
/// By how much the achievable share of bandwidth or clock of a chip may wander before the pull of the prior is felt.
const SHARE_LOOSENESS: f64 = 0.03;
/// Correlation beyond which two parameters are called collinear.
const COLLINEAR: f64 = 0.98;

/// What a fit found.
#[derive(Debug, Clone)]
pub struct Fit {
    /// Free parameters.
    pub parameters: Vec<Parameter>,
    /// How each was bounded and pulled.
    pub free: Vec<Free>,
    /// Values, errors, correlations.
    pub solution: Solution,
    /// The values as a setting.
    pub setting: Setting,
}

/// Which rows each parameter touches, found by moving it: shared by all fits on subsets of the same observations.
#[derive(Debug, Clone)]
pub struct Touches {
    parameters: Vec<Parameter>,
    rows: Vec<Vec<usize>>,
    /// What is not free.
    fixed: Setting,
    /// By what factor quantities of chips may wander further than usual.
    looseness: f64,
}

/// Observations with the chips of a setting.
struct Timed<'a> {
    observations: &'a [Observation],
    chips: BTreeMap<(String, u32), Chip>,
}

impl<'a> Timed<'a> {
    fn new(observations: &'a [Observation], setting: &Setting) -> Self {
        let mut chips = BTreeMap::new();
        for o in observations {
            let key = (o.row.device.clone(), o.chip.cores_per_device);
            chips.entry(key).or_insert_with(|| with_setting(&o.chip, setting));
        }
        Timed { observations, chips }
    }

    /// Logarithm of predicted over measured time.
    fn residual(&self, index: usize) -> f64 {
        let o = &self.observations[index];
        let chip = self
            .chips
            .get(&(o.row.device.clone(), o.chip.cores_per_device))
            .unwrap_or(&o.chip);
        predict::case(&o.row, chip).map_or(NOT_TIMED, |p| (p.predicted_us / o.measured_us).ln())
    }

    fn residuals(&self, rows: &[usize]) -> Vec<f64> {
        rows.par_iter().map(|&row| self.residual(row)).collect()
    }
}

/// A chip with the values of a setting. A launch that the setting lacks is the mean of those of the other chips of the architecture: what one
/// would assume for a chip that nobody has measured.
#[must_use]
pub fn with_setting(chip: &Chip, setting: &Setting) -> Chip {
    let mut chip = chip.clone();
    chip.coefficients = setting.coefficients.clone();
    for quantity in ChipQuantity::ALL {
        let own = setting.chips.get(&(chip.name.clone(), quantity)).copied();
        let value = own.or_else(|| {
            // Bandwidth, clock and host are a chip's own; what its file says of them stands.
            if quantity != ChipQuantity::LaunchUs {
                return None;
            }
            mean_of_architecture(
                chip.architecture,
                setting
                    .chips
                    .iter()
                    .filter(|((_, q), _)| *q == quantity)
                    .map(|((name, _), value)| (name.as_str(), *value)),
            )
        });
        if let Some(value) = value {
            quantity.set(&mut chip, value);
        }
    }
    chip
}

/// Residuals of all observations with a setting: logarithm of predicted over measured time.
#[must_use]
pub fn residuals(observations: &[Observation], setting: &Setting) -> Vec<f64> {
    let rows: Vec<usize> = (0..observations.len()).collect();
    Timed::new(observations, setting).residuals(&rows)
}

fn describe(parameter: &Parameter, observations: &[Observation], chip_looseness: f64) -> Free {
    match parameter {
        Parameter::Shared(coefficient) => {
            let Definition { prior, low, high, .. } = coefficient.definition();
            Free {
                prior,
                scale: if prior > 0.0 { prior } else { high / 4.0 },
                looseness: 1.0,
                low,
                high,
                rows: Vec::new(),
            }
        }
        Parameter::Chip(name, quantity) => {
            let chip = observations
                .iter()
                .find(|o| o.row.device == *name)
                .map(|o| &o.chip);
            let (low, mut high) = quantity.range(chip.map_or(Architecture::Tpu, |chip| chip.architecture));
            let prior = chip.map_or(low, |chip| quantity.of(chip));
            if let (ChipQuantity::SustainedClock, Some(chip)) = (quantity, chip) {
                // No clock is above that of the fastest state.
                let fastest = chip.clock_states.iter().map(|state| state.frequency.get());
                high = fastest.fold(high, |high, clock| high.max(clock / chip.clock.frequency.get()));
            }
            let (scale, looseness) = match quantity {
                ChipQuantity::LaunchUs => (1.0, 2.0),
                ChipQuantity::HbmAchievable | ChipQuantity::SustainedClock => (1.0, SHARE_LOOSENESS),
                ChipQuantity::DispatchUs => (100.0, 10.0),
            };
            Free {
                prior,
                scale,
                looseness: looseness * chip_looseness,
                low,
                high,
                rows: Vec::new(),
            }
        }
    }
}

/// Finds the rows that each free parameter touches, everything being free.
#[must_use]
pub fn touches(observations: &[Observation]) -> Touches {
    touches_of(observations, free(observations), Setting::default(), 1.0)
}

/// Finds the rows that some parameters touch, the others being fixed. Quantities of chips may wander `looseness` times as far from what the files of the chips
/// say as in a fit of all chips together.
#[must_use]
pub fn touches_of(
    observations: &[Observation],
    parameters: Vec<Parameter>,
    fixed: Setting,
    looseness: f64,
) -> Touches {
    let rows: Vec<usize> = (0..observations.len()).collect();
    let base = residuals(observations, &fixed);
    let touched = parameters
        .iter()
        .map(|parameter| match parameter {
            Parameter::Chip(chip, quantity) => rows
                .iter()
                .copied()
                .filter(|&i| {
                    let row = &observations[i].row;
                    row.device == *chip && (*quantity != ChipQuantity::DispatchUs || row.timing == "wall")
                })
                .collect(),
            Parameter::Shared(coefficient) => {
                let Definition { prior, low, high, .. } = coefficient.definition();
                let mut setting = fixed.clone();
                setting.set(
                    parameter,
                    if prior < f64::midpoint(low, high) {
                        high
                    } else {
                        low
                    },
                );
                let moved = Timed::new(observations, &setting).residuals(&rows);
                rows.iter()
                    .copied()
                    .filter(|&i| (moved[i] - base[i]).abs() > 1e-9)
                    .collect()
            }
        })
        .collect();
    Touches {
        parameters,
        rows: touched,
        fixed,
        looseness,
    }
}

/// Fits the observations that `keep` picks; `start` is where the search begins.
#[must_use]
pub fn fit(observations: &[Observation], touches: &Touches, keep: &[bool], start: Option<&Fit>) -> Fit {
    let kept = thinned(observations, keep);
    let place: BTreeMap<usize, usize> = kept.iter().enumerate().map(|(at, &row)| (row, at)).collect();
    let mut group: BTreeMap<(&str, &str), f64> = BTreeMap::new();
    for &i in &kept {
        let o = &observations[i];
        *group.entry((&o.family, &o.row.device)).or_default() += 1.0;
    }
    let weights: Vec<f64> = kept
        .iter()
        .map(|&i| {
            let o = &observations[i];
            let rows = group
                .get(&(o.family.as_str(), o.row.device.as_str()))
                .copied()
                .unwrap_or(1.0);
            (FULL_WEIGHT_ROWS / rows).min(1.0)
        })
        .collect();
    let (mut parameters, mut free): (Vec<Parameter>, Vec<Free>) = (Vec::new(), Vec::new());
    for (parameter, rows) in touches.parameters.iter().zip(&touches.rows) {
        let rows: Vec<usize> = rows.iter().filter_map(|row| place.get(row).copied()).collect();
        if rows.is_empty() {
            continue;
        }
        parameters.push(parameter.clone());
        free.push(Free {
            rows,
            ..describe(parameter, observations, touches.looseness)
        });
    }
    let begin: Vec<f64> = parameters
        .iter()
        .zip(&free)
        .map(|(parameter, f)| {
            start
                .and_then(|fit| {
                    fit.parameters
                        .iter()
                        .position(|p| p == parameter)
                        .map(|at| fit.solution.values[at])
                })
                .unwrap_or(f.prior)
        })
        .collect();
    let setting_of = |values: &[f64]| {
        let mut setting = touches.fixed.clone();
        for (parameter, value) in parameters.iter().zip(values) {
            setting.set(parameter, *value);
        }
        setting
    };
    let solution = solver::fit(&free, &begin, &weights, |values, rows| {
        let timed = Timed::new(observations, &setting_of(values));
        let wanted: Vec<usize> = rows.iter().map(|&row| kept[row]).collect();
        timed.residuals(&wanted)
    });
    let setting = setting_of(&solution.values);
    Fit {
        parameters,
        free,
        solution,
        setting,
    }
}

/// The kept observations; large groups of a family on a device are thinned evenly.
fn thinned(observations: &[Observation], keep: &[bool]) -> Vec<usize> {
    let mut groups: BTreeMap<(&str, &str), Vec<usize>> = BTreeMap::new();
    for (i, o) in observations
        .iter()
        .enumerate()
        .filter(|(i, o)| keep[*i] && !NOT_FITTED.contains(&o.family.as_str()))
    {
        groups.entry((&o.family, &o.row.device)).or_default().push(i);
    }
    let mut kept: Vec<usize> = groups
        .into_values()
        .flat_map(|rows| {
            let stride = rows.len().div_ceil(MOST_ROWS);
            rows.into_iter().step_by(stride.max(1))
        })
        .collect();
    kept.sort_unstable();
    kept
}

impl Fit {
    /// What a table of the fit has to say about a parameter.
    #[must_use]
    pub fn warning(&self, at: usize) -> String {
        let f = &self.free[at];
        let value = self.solution.values[at];
        let mut notes = Vec::new();
        if value <= 0.0 {
            notes.push("zero".to_owned());
        } else if value <= f.low * 1.001 || value >= f.high * 0.999 {
            notes.push("at bound".to_owned());
        }
        match self.solution.standard_errors[at] {
            None => notes.push("the rows do not tell".to_owned()),
            // Half of the estimate or more is what it was pulled towards.
            Some(error) if error > f.looseness * f.scale => {
                notes.push("the rows tell less than the starting value".to_owned());
            }
            Some(_) => {}
        }
        for (other, name) in self.parameters.iter().enumerate() {
            if other != at && self.solution.correlations[at][other].abs() > COLLINEAR {
                notes.push(format!("collinear with {}", name.name()));
            }
        }
        notes.join("; ")
    }

    /// The fit as a calibration, without residuals.
    #[must_use]
    pub fn calibration(&self, data: &Data) -> Calibration {
        let mut calibration = Calibration {
            schema: SCHEMA.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            data_digest: data.digest.clone(),
            rows: self.solution.residuals.len(),
            coefficients: BTreeMap::new(),
            chips: BTreeMap::new(),
            residuals: Vec::new(),
            schedules: None,
            own_chips: BTreeMap::new(),
        };
        for (at, parameter) in self.parameters.iter().enumerate() {
            let f = &self.free[at];
            let fitted = |unit: &str| Fitted {
                value: rounded(self.solution.values[at]),
                unit: unit.to_owned(),
                standard_error: self.solution.standard_errors[at].map(rounded),
                low: f.low,
                high: f.high,
                prior: f.prior,
                rows: f.rows.len(),
                warning: self.warning(at),
            };
            match parameter {
                Parameter::Shared(coefficient) => {
                    let definition = coefficient.definition();
                    calibration
                        .coefficients
                        .insert(definition.name.to_owned(), fitted(definition.unit));
                }
                Parameter::Chip(chip, quantity) => {
                    calibration
                        .chips
                        .entry(chip.clone())
                        .or_default()
                        .insert(*quantity, fitted(quantity.unit()));
                }
            }
        }
        calibration
    }
}

/// Five digits: more than the data know, and the same on every machine.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}
