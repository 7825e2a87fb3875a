//! Elasticities as a table, CSV and JSON.

use std::io::{self, Write};

use serde::Serialize;

use crate::report::table::{Cell, Column, Table};
use crate::study::whatif::{Elasticity, PlanSensitivity};

/// Quantities that the table for people shows of each plan.
const SHOWN: usize = 8;
/// Elasticities below this are not worth a line.
const SMALL: f64 = 0.005;

#[derive(Serialize)]
struct Line<'a> {
    chip: &'a str,
    plan: &'a str,
    stage: &'a str,
    stage_us: f64,
    field: &'a str,
    value: f64,
    step: &'a str,
    elasticity: Option<f64>,
}

/// One line for the plan as a whole (`stage` is `total`) and one for every stage, for every quantity.
fn lines(found: &[PlanSensitivity]) -> Vec<Line<'_>> {
    let mut lines = Vec::new();
    for plan in found {
        for of in &plan.elasticities {
            let line = |stage, stage_us, elasticity| Line {
                chip: &plan.chip,
                plan: &plan.plan,
                stage,
                stage_us,
                field: &of.field,
                value: of.value,
                step: &of.step,
                elasticity,
            };
            lines.push(line("total", plan.time_us, Some(of.total)));
            let stages = plan.stages.iter().zip(&plan.stage_us).zip(&of.stages);
            lines.extend(stages.map(|((stage, us), slope)| line(stage.as_str(), *us, *slope)));
        }
    }
    lines
}

/// All elasticities as JSON lines.
///
/// # Errors
/// What `out` reports.
pub fn write_json(out: &mut impl Write, found: &[PlanSensitivity]) -> io::Result<()> {
    for line in lines(found) {
        serde_json::to_writer(&mut *out, &line)?;
        writeln!(out)?;
    }
    Ok(())
}

/// All elasticities as CSV.
///
/// # Errors
/// What `out` reports.
pub fn write_csv(out: &mut impl Write, found: &[PlanSensitivity]) -> io::Result<()> {
    let mut table = Table::new([
        Column::text("chip", "chip"),
        Column::text("plan", "plan"),
        Column::text("stage", "stage"),
        Column::number("stage", "stage_us"),
        Column::text("field", "field"),
        Column::number("value", "value"),
        Column::text("step", "step"),
        Column::number("elasticity", "elasticity"),
    ]);
    for line in lines(found) {
        table.row([
            Cell::from(line.chip),
            Cell::from(line.plan),
            Cell::from(line.stage),
            Cell::number(line.stage_us, 1),
            Cell::from(line.field),
            Cell::number(line.value, 1),
            Cell::from(line.step),
            Cell::optional(line.elasticity, 3),
        ]);
    }
    table.write_csv(out)
}

/// For people: the quantities that move the time of each plan most, with those of its stages beside it.
///
/// # Errors
/// What `out` reports.
pub fn write_text(out: &mut impl Write, name: &str, found: &[PlanSensitivity]) -> io::Result<()> {
    writeln!(
        out,
        "{name}: change of the time in % where a quantity grows by 1 %, all others as they are"
    )?;
    for plan in found {
        writeln!(out, "\n{} {}: {:.0} us", plan.chip, plan.plan, plan.time_us)?;
        let mut columns = vec![
            Column::text("quantity", "field"),
            Column::text("step", "step"),
            Column::number("total", "total"),
        ];
        columns.extend(plan.stages.iter().map(|stage| Column::number(stage, stage)));
        let mut table = Table::new(columns);
        let shown: Vec<&Elasticity> = plan
            .elasticities
            .iter()
            .filter(|of| of.total.abs() >= SMALL)
            .take(SHOWN)
            .collect();
        for of in shown {
            let mut cells = vec![
                Cell::from(&of.field),
                Cell::from(&of.step),
                Cell::from(format!("{:+.2}", of.total)),
            ];
            cells.extend(of.stages.iter().map(|slope| match slope {
                Some(slope) if slope.abs() >= SMALL => Cell::from(format!("{slope:+.2}")),
                _ => Cell::none(),
            }));
            table.row(cells);
        }
        table.write_text(out)?;
    }
    Ok(())
}
