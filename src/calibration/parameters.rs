//! What is free in a fit.

use std::collections::{BTreeMap, BTreeSet};

use super::data::Observation;
use crate::coefficients::{Coefficient, Coefficients, Scope};
use crate::hardware::{Calibration, ChipQuantity, Kind};

/// A free parameter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Parameter {
    /// A coefficient that all chips share.
    Shared(Coefficient),
    /// A quantity of one chip.
    Chip(String, ChipQuantity),
}

impl Parameter {
    /// Name in tables.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Parameter::Shared(coefficient) => coefficient.definition().name.to_owned(),
            Parameter::Chip(chip, quantity) => format!("{chip} {}", quantity.name()),
        }
    }
}

/// A value for every free parameter; others keep what the files say.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Setting {
    /// Coefficients.
    pub coefficients: Coefficients,
    /// Quantities of chips.
    pub chips: BTreeMap<(String, ChipQuantity), f64>,
}

impl Setting {
    /// The values of a calibration.
    #[must_use]
    pub fn of(calibration: &Calibration) -> Self {
        let mut setting = Setting::default();
        for (name, fitted) in &calibration.coefficients {
            if let Some(coefficient) = Coefficient::named(name) {
                setting.coefficients.set(coefficient, fitted.value);
            }
        }
        for (chip, quantities) in &calibration.chips {
            for (quantity, fitted) in quantities {
                setting.chips.insert((chip.clone(), *quantity), fitted.value);
            }
        }
        setting
    }

    /// Sets one.
    pub fn set(&mut self, parameter: &Parameter, value: f64) {
        match parameter {
            Parameter::Shared(coefficient) => self.coefficients.set(*coefficient, value),
            Parameter::Chip(chip, quantity) => {
                self.chips.insert((chip.clone(), *quantity), value);
            }
        }
    }
}

/// What is free for some observations: every coefficient, the launch of every chip, the sustained clock of chips with several clock states, the achievable bandwidth of TPUs and of GPUs on which nobody measured it, the host's
/// share of chips that were timed by the wall clock.
#[must_use]
pub fn free(observations: &[Observation]) -> Vec<Parameter> {
    let mut chips: BTreeSet<(String, ChipQuantity)> = BTreeSet::new();
    let mut scopes: BTreeSet<bool> = BTreeSet::new();
    for o in observations {
        scopes.insert(o.tpu());
        chips.insert((o.row.device.clone(), ChipQuantity::LaunchUs));
        if o.chip.clock_states.len() > 1 {
            chips.insert((o.row.device.clone(), ChipQuantity::SustainedClock));
        }
        // Long transfers of one direction, which somebody measured on some TPU, are not what kernels reach.
        if o.tpu() || o.chip.hbm.achievable_provenance.kind != Kind::Measured {
            chips.insert((o.row.device.clone(), ChipQuantity::HbmAchievable));
        }
        if o.row.timing == "wall" {
            chips.insert((o.row.device.clone(), ChipQuantity::DispatchUs));
        }
    }
    let shared = Coefficient::ALL
        .iter()
        .copied()
        .filter(|c| match c.definition().scope {
            Scope::Tpu => scopes.contains(&true),
            Scope::Gpu => scopes.contains(&false),
            Scope::Kernel => true,
        });
    shared
        .map(Parameter::Shared)
        .chain(
            chips
                .into_iter()
                .map(|(chip, quantity)| Parameter::Chip(chip, quantity)),
        )
        .collect()
}
