//! How strongly the time depends on every quantity of the chip and of the workload.
//!
//! The elasticity `d ln t / d ln x` is the relative change of the time over the relative change of a quantity: 1 where the time grows in proportion, -1 where a
//! quantity twice as large halves it, 0 where it does not matter. It is a central difference. A continuous quantity takes a step of 1 % to either side; a whole number is doubled
//! and halved, because sizes in between are often none that the layer or the chip allows. Where one side is not allowed, the other side alone gives the difference; the step says so.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::chips::Reason;
use super::evaluate::{Built, Sweep};
use crate::config::Value;
use crate::hardware::{Chip, Field, FieldKind};

/// Step of continuous quantities to either side, as a factor.
const STEP: f64 = 1.01;
/// Below this an elasticity is the rounding of two logarithms.
const ROUNDING: f64 = 1e-9;
/// Largest count of matrix arrays, as in hardware files.
const LARGEST_ARRAY_COUNT: f64 = 64.0;

/// How the time depends on one quantity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Elasticity {
    /// The field, as `--set` takes it.
    pub field: String,
    /// Its value; in the SI unit where it has one.
    pub value: f64,
    /// The step that was taken: `x1.01` and `x2` to either side, with `up` or `down` where only that side is allowed.
    pub step: String,
    /// Of the time of the plan.
    pub total: f64,
    /// Of the time of every stage; none for a stage that the change does away with.
    pub stages: Vec<Option<f64>>,
}

/// The elasticities of a plan on a chip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanSensitivity {
    /// Chip.
    pub chip: String,
    /// Plan.
    pub plan: String,
    /// Time of the plan, in microseconds.
    pub time_us: f64,
    /// Stages of the plan.
    pub stages: Vec<String>,
    /// Times of the stages, in microseconds.
    pub stage_us: Vec<f64>,
    /// Every quantity that has an elasticity, the largest first.
    pub elasticities: Vec<Elasticity>,
}

/// One side of a difference.
struct Side {
    value: f64,
    /// By stage.
    times: Vec<(String, f64)>,
}

/// Elasticities of every plan of a sweep on every chip, in that order, around the workload and the chips as their files have them.
///
/// # Errors
/// Where the workload cannot be timed on a chip as it is.
pub fn sensitivity(sweep: &Sweep) -> Result<Vec<PlanSensitivity>, Reason> {
    let base = sweep.build_with(&[])?;
    let sizes: Vec<(String, u64, [Option<Built>; 2])> = sweep
        .sizes()
        .into_par_iter()
        .map(|(field, value)| {
            let built = |value: u64| sweep.build_with(&[format!("{field}={value}")]).ok();
            let down = value.is_multiple_of(2).then(|| built(value / 2)).flatten();
            let sides = [down, value.checked_mul(2).and_then(built)];
            (field, value, sides)
        })
        .collect();
    let mut found = Vec::new();
    for chip in sweep.base_chips() {
        for (plan, name) in sweep.grid().plans.iter().enumerate() {
            let (stages, stage_us): (Vec<String>, Vec<f64>) = base.stages(plan, chip)?.into_iter().unzip();
            let mut elasticities = Vec::new();
            for field in Field::of(chip) {
                elasticities.extend(of_field(field, chip, &base, plan, &stages));
            }
            for (field, value, [down, up]) in &sizes {
                let side = |built: &Option<Built>, factor: f64| {
                    let built = built.as_ref()?;
                    Some(Side {
                        value: *value as f64 * factor,
                        times: built.stages(plan, chip).ok()?,
                    })
                };
                let at = Side {
                    value: *value as f64,
                    times: stages.iter().cloned().zip(stage_us.iter().copied()).collect(),
                };
                let sides = [side(down, 0.5), side(up, 2.0)];
                elasticities.extend(difference(field.clone(), "x2", at, sides, &stages));
            }
            elasticities.sort_by(|a, b| {
                b.total
                    .abs()
                    .total_cmp(&a.total.abs())
                    .then(a.field.cmp(&b.field))
            });
            found.push(PlanSensitivity {
                chip: chip.name.clone(),
                plan: name.clone(),
                time_us: stage_us.iter().sum(),
                stages,
                stage_us,
                elasticities,
            });
        }
    }
    Ok(found)
}

impl Sweep {
    /// Fields of the layer and the program that are written as whole numbers above zero.
    fn sizes(&self) -> Vec<(String, u64)> {
        let mut sizes = Vec::new();
        for block in ["layer", "program"] {
            let Some(Value::Map(entries)) = self.document().node(block).map(|node| &node.value) else {
                continue;
            };
            for (key, node) in entries {
                if let Value::Int(value) = node.value
                    && let Ok(value @ 1..) = u64::try_from(value)
                {
                    sizes.push((format!("{block}.{}", key.name), value));
                }
            }
        }
        sizes
    }
}

fn of_field(field: Field, chip: &Chip, base: &Built, plan: usize, stages: &[String]) -> Option<Elasticity> {
    let value = field.get(chip);
    let side = |value: f64| {
        let mut changed = chip.clone();
        field.set(&mut changed, value);
        Some(Side {
            value,
            times: base.stages(plan, &changed).ok()?,
        })
    };
    let most = match field {
        Field::CoresPerDevice => f64::from(chip.cores_per_chip),
        Field::MatrixCount => LARGEST_ARRAY_COUNT,
        _ if field.kind() == FieldKind::Share => 1.0,
        _ => f64::INFINITY,
    };
    let (step, down, up) = match field.kind() {
        FieldKind::Whole => ("x2", value / 2.0, value * 2.0),
        FieldKind::Continuous | FieldKind::Share => ("x1.01", value / STEP, value * STEP),
    };
    let whole = field.kind() != FieldKind::Whole || down.fract() == 0.0;
    let sides = [
        (whole && down > 0.0).then(|| side(down)).flatten(),
        (up <= most).then(|| side(up)).flatten(),
    ];
    difference(
        format!("hw.{}", field.path(chip)),
        step,
        side(value)?,
        sides,
        stages,
    )
}

/// The difference over two sides, or over one side and the middle.
fn difference(
    field: String,
    step: &str,
    at: Side,
    [down, up]: [Option<Side>; 2],
    stages: &[String],
) -> Option<Elasticity> {
    let value = at.value;
    let (low, high, step) = match (down, up) {
        (Some(down), Some(up)) => (down, up, step.to_owned()),
        (None, Some(up)) => (at, up, format!("{step} up")),
        (Some(down), None) => (down, at, format!("{step} down")),
        (None, None) => return None,
    };
    let distance = high.value.ln() - low.value.ln();
    let slope = |low: f64, high: f64| {
        let slope = (high.ln() - low.ln()) / distance;
        if slope.abs() < ROUNDING { 0.0 } else { slope }
    };
    let of_stage = |stage: &String| {
        let time = |side: &Side| {
            side.times
                .iter()
                .find(|(label, _)| label == stage)
                .map(|(_, us)| *us)
        };
        Some(slope(time(&low)?, time(&high)?))
    };
    let total = |side: &Side| side.times.iter().map(|(_, us)| us).sum::<f64>();
    let total = slope(total(&low), total(&high));
    total.is_finite().then(|| Elasticity {
        field,
        value,
        step,
        total,
        stages: stages.iter().map(of_stage).collect(),
    })
}
