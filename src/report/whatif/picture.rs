//! The picture of a sweep, from its rows.

use crate::report::plot::sweep::{Line, Panel, Series, Sheet, Steps};
use crate::study::whatif::{Axis, Grid, Row};

/// Most values of the field along the picture.
const MOST_VALUES: usize = 2000;

/// Collects the times that the picture shows: those over the field that varies slowest, the best over all others.
pub struct PictureData<'a> {
    grid: &'a Grid,
    /// By plan, chip and value.
    times: Vec<Vec<Vec<Option<f64>>>>,
}

impl<'a> PictureData<'a> {
    /// Nothing yet, or why there is no picture.
    ///
    /// # Errors
    /// Where no field varies, or with more values than a picture can tell apart.
    pub fn new(grid: &'a Grid) -> Result<Self, String> {
        let values = grid.space.axes().first().map_or(0, |axis| axis.values().len());
        if !(1..=MOST_VALUES).contains(&values) {
            return Err(format!(
                "no picture of {values} values; expected 1 to {MOST_VALUES} of the first field"
            ));
        }
        Ok(PictureData {
            times: vec![vec![vec![None; values]; grid.chips.len()]; grid.plans.len()],
            grid,
        })
    }

    /// Takes a row.
    pub fn add(&mut self, row: &Row) {
        let Ok(timing) = &row.outcome else { return };
        let digits = self.grid.space.digits(row.point);
        let Some(&value) = digits.first() else { return };
        let best = &mut self.times[row.plan][row.chip][value];
        *best = Some(best.map_or(timing.time_us, |us| us.min(timing.time_us)));
    }

    /// The picture. `step_plans` are the plans of the steps, in a sweep of steps.
    #[must_use]
    pub fn sheet(self, title: &str, step_plans: &[String]) -> Sheet {
        let axes = self.grid.space.axes();
        let values = axes.first().map_or_else(Vec::new, |axis| axis.values().to_vec());
        let chips = || self.grid.chips.iter().enumerate();
        if axes.first().is_some_and(Axis::is_steps) {
            let plan = |step: usize| {
                let name = step_plans.get(step);
                self.grid.plans.iter().position(|plan| Some(plan) == name)
            };
            return Sheet::Steps(Steps {
                title: title.to_owned(),
                chips: chips()
                    .map(|(chip, name)| Line {
                        chip: name.clone(),
                        times_us: (0..values.len())
                            .map(|step| self.times[plan(step)?][chip][step])
                            .collect(),
                    })
                    .collect(),
                names: values,
            });
        }
        let others: Vec<&str> = axes.iter().skip(1).map(Axis::field).collect();
        let field = axes.first().map_or("", Axis::field);
        let field = if others.is_empty() {
            field.to_owned()
        } else {
            format!("{field}, each with the best of {}", others.join(", "))
        };
        Sheet::Series(Series {
            title: title.to_owned(),
            field,
            values,
            panels: self
                .grid
                .plans
                .iter()
                .enumerate()
                .map(|(plan, name)| Panel {
                    plan: name.clone(),
                    lines: chips()
                        .map(|(chip, name)| Line {
                            chip: name.clone(),
                            times_us: self.times[plan][chip].clone(),
                        })
                        .collect(),
                })
                .collect(),
        })
    }
}
