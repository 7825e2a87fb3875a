//! The points that no other point beats in everything asked for.

use super::evaluate::{Row, Timing};
use super::space::Space;
use crate::config::{ConfigError, suggestion};

/// A quantity of a row that is better the smaller it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Objective {
    name: String,
    of: Quantity,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quantity {
    Time,
    Low,
    High,
    Mxu,
    Vpu,
    Hbm,
    HbmBytes,
    StateBytes,
    Flops,
    /// Which of the axes.
    Field(usize),
}

/// Quantities by the names of their columns.
const COLUMNS: [(&str, Quantity); 10] = [
    ("time_us", Quantity::Time),
    ("latency", Quantity::Time),
    ("low_us", Quantity::Low),
    ("high_us", Quantity::High),
    ("mxu_us", Quantity::Mxu),
    ("vpu_us", Quantity::Vpu),
    ("hbm_us", Quantity::Hbm),
    ("hbm_bytes", Quantity::HbmBytes),
    ("state_bytes", Quantity::StateBytes),
    ("flops", Quantity::Flops),
];

impl Objective {
    /// The quantity of that name: a column (`latency` is another word for `time_us`), or a varied field whose values are bare numbers.
    ///
    /// # Errors
    /// For another name, and for a field whose values are not numbers.
    pub fn parse(name: &str, space: &Space) -> Result<Self, ConfigError> {
        let objective = |of| Objective {
            name: name.to_owned(),
            of,
        };
        if let Some((_, of)) = COLUMNS.iter().find(|(column, _)| *column == name) {
            return Ok(objective(*of));
        }
        let axes = space.axes();
        let field = axes
            .iter()
            .position(|axis| axis.field() == name || axis.field().strip_prefix("layer.") == Some(name));
        match field {
            Some(at) if (0..axes[at].values().len()).all(|i| axes[at].number(i).is_some()) => {
                Ok(objective(Quantity::Field(at)))
            }
            Some(_) => Err(ConfigError::argument(format!(
                "--pareto {name}: the values of the field are not bare numbers, which have no smallest"
            ))),
            None => {
                let mut names: Vec<&str> = COLUMNS.iter().map(|(column, _)| *column).collect();
                names.extend(axes.iter().map(super::Axis::field));
                let tail = suggestion(name, &names, "quantities");
                Err(ConfigError::argument(format!(
                    "--pareto {name}: unknown quantity; {tail}"
                )))
            }
        }
    }

    /// Its name, as it was written.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its value in a row.
    fn value(&self, row: &Row, timing: &Timing, space: &Space) -> Option<f64> {
        Some(match self.of {
            Quantity::Time => timing.time_us,
            Quantity::Low => timing.interval_us?.0,
            Quantity::High => timing.interval_us?.1,
            Quantity::Mxu => timing.mxu_us,
            Quantity::Vpu => timing.vpu_us,
            Quantity::Hbm => timing.hbm_us,
            Quantity::HbmBytes => timing.hbm_bytes as f64,
            Quantity::StateBytes => timing.state_bytes as f64,
            Quantity::Flops => timing.flops as f64,
            Quantity::Field(axis) => space.axes()[axis].number(space.digits(row.point)[axis])?,
        })
    }
}

/// The non-dominated rows of every chip among those seen so far.
///
/// A row dominates another one of the same chip if it is no worse in any objective and better in one. Equal rows stand side by side.
#[derive(Debug, Default)]
pub struct Front {
    objectives: Vec<Objective>,
    /// By chip, with the values of the objectives.
    rows: Vec<Vec<(Vec<f64>, Row)>>,
}

impl Front {
    /// An empty front.
    #[must_use]
    pub fn new(objectives: Vec<Objective>) -> Self {
        Front {
            objectives,
            rows: Vec::new(),
        }
    }

    /// Looks at a row. Rows without a time, or without a value of an objective, never belong to the front.
    pub fn add(&mut self, row: &Row, space: &Space) {
        let Ok(timing) = &row.outcome else { return };
        let values: Option<Vec<f64>> = self
            .objectives
            .iter()
            .map(|objective| objective.value(row, timing, space))
            .collect();
        let Some(values) = values.filter(|values| !values.is_empty()) else {
            return;
        };
        if self.rows.len() <= row.chip {
            self.rows.resize_with(row.chip + 1, Vec::new);
        }
        let front = &mut self.rows[row.chip];
        if front.iter().any(|(other, _)| dominates(other, &values)) {
            return;
        }
        front.retain(|(other, _)| !dominates(&values, other));
        front.push((values, row.clone()));
    }

    /// The rows, by point, chip and plan.
    #[must_use]
    pub fn rows(&self) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self.rows.iter().flatten().map(|(_, row)| row).collect();
        rows.sort_by_key(|row| (row.point, row.chip, row.plan));
        rows
    }
}

/// No worse anywhere and better somewhere.
fn dominates(one: &[f64], other: &[f64]) -> bool {
    let pairs = || one.iter().zip(other);
    pairs().all(|(a, b)| a <= b) && pairs().any(|(a, b)| a < b)
}
