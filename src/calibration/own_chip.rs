//! Calibrating one chip from a dozen rows: what all chips share stays as it was fitted, and only what belongs to the chip moves.

use std::collections::{BTreeMap, BTreeSet};

use super::data::Data;
use super::fit::{self, Fit};
use super::parameters::{Parameter, Setting};
use super::validate::{self, Split};
use crate::hardware::{Calibration, Chip, ChipQuantity, OwnChip};

/// By what factor launch, clock and bandwidth may wander further than in a fit of all chips: there is nothing else that moves, and a new file often only assumes them.
const LOOSENESS: f64 = 4.0;

/// A calibrated chip.
#[derive(Debug, Clone)]
pub struct ChipFit {
    /// The fit to all rows.
    pub fit: Fit,
    /// Logarithms of predicted over measured times with what the hardware file and the shared coefficients say.
    pub before: Vec<f64>,
    /// The same after the fit, which saw these rows.
    pub after: Vec<f64>,
    /// The same with a fifth of the shapes left out in turn; none where there are too few shapes to leave one out.
    pub out_of_fold: Vec<Option<f64>>,
    /// The calibration that was started from, with the values of the chip.
    pub calibration: Calibration,
}

/// Fits launch, clock and bandwidth of a chip, and the host's share where rows were timed by the wall clock. `data` holds rows of that chip alone, and
/// `hardware_digest` is the digest of its file.
#[must_use]
pub fn calibrate(data: &Data, chip: &Chip, hardware_digest: &str, start: &Calibration) -> ChipFit {
    let observations = &data.used;
    let wall = observations.iter().any(|o| o.row.timing == "wall");
    let parameters: Vec<Parameter> = ChipQuantity::ALL
        .into_iter()
        .filter(|quantity| *quantity != ChipQuantity::DispatchUs || wall)
        .map(|quantity| Parameter::Chip(chip.name.clone(), quantity))
        .collect();
    let mut fixed = Setting::of(start);
    // What was fitted of a chip of the same name is the question, not part of the answer.
    fixed.chips.retain(|(name, _), _| *name != chip.name);
    let before = fit::residuals(observations, &fixed);
    let touches = fit::touches_of(observations, parameters, fixed, LOOSENESS);
    let whole = fit::fit(observations, &touches, &vec![true; observations.len()], None);
    let after = fit::residuals(observations, &whole.setting);
    let out_of_fold = validate::leave_out(observations, &touches, &whole, |o| {
        Some(validate::fold_of(&o.shape).to_string())
    })
    .residuals;

    let fitted = whole.calibration(data);
    let mut calibration = start.clone();
    if let Some(quantities) = fitted.chips.get(&chip.name) {
        calibration.chips.insert(chip.name.clone(), quantities.clone());
    }
    calibration.own_chips.insert(
        chip.name.clone(),
        OwnChip {
            hardware_digest: hardware_digest.to_owned(),
            data_digest: data.digest.clone(),
            rows: observations.len(),
        },
    );
    let by_split = BTreeMap::from([(Split::ByShape, out_of_fold.clone())]);
    let own = validate::interval_residuals(observations, &by_split);
    let replaced: BTreeSet<(&str, &str)> = own
        .iter()
        .map(|r| (r.family.as_str(), r.device.as_str()))
        .collect();
    calibration
        .residuals
        .retain(|r| !replaced.contains(&(r.family.as_str(), r.device.as_str())));
    calibration.residuals.extend(own);
    calibration
        .residuals
        .sort_by(|a, b| (&a.family, &a.device).cmp(&(&b.family, &b.device)));
    ChipFit {
        fit: whole,
        before,
        after,
        out_of_fold,
        calibration,
    }
}
