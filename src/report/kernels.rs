//! Tables of compiled kernels beside the fast model.

use super::table::{Cell, Column, Table};
use crate::calibration::kernels::{Change, Group, Line, Published, Row, Side};

/// The leave-one-out table: KDA and SLA-R4 on every chip, from the schedules and by the fast model.
#[must_use]
pub fn lines(lines: &[Line]) -> Table {
    let mut table = Table::new([
        Column::text("chip", "chip"),
        Column::number("cores", "cores_used_count"),
        Column::text("array", "array"),
        Column::number("MXU:VPU", "mxu_to_vpu_ratio"),
        Column::text("kernels", "kernels"),
        Column::number("KDA (ms)", "kda_ms"),
        Column::number("predicted (ms)", "kda_predicted_ms"),
        Column::number("error (%)", "kda_error_percent"),
        Column::number("SLA-R4 (ms)", "sla_r4_ms"),
        Column::number("predicted (ms)", "sla_r4_predicted_ms"),
        Column::number("error (%)", "sla_r4_error_percent"),
        Column::number("speedup", "speedup_ratio"),
        Column::number("predicted", "predicted_speedup_ratio"),
        Column::number("error (%)", "speedup_error_percent"),
    ]);
    for line in lines {
        let side = |side: &Side| {
            [
                Cell::scaled(side.schedule_us, 1e-3, 3),
                Cell::optional(side.predicted_us.map(|us| us * 1e-3), 3),
                Cell::optional(side.error_pct, 1),
            ]
        };
        let (rows, columns) = line.array;
        let first = [
            Cell::from(&line.chip),
            line.cores_used.map_or_else(Cell::none, Cell::from),
            Cell::from(format!("{rows}x{columns}")),
            Cell::optional(line.mxu_to_vpu, 1),
            Cell::from(line.kernels),
        ];
        let last = [
            Cell::number(line.speedup, 2),
            Cell::optional(line.predicted_speedup, 2),
            Cell::optional(line.speedup_error_pct, 1),
        ];
        table.row(
            first
                .into_iter()
                .chain(side(&line.kda))
                .chain(side(&line.sla_r4))
                .chain(last),
        );
    }
    table
}

/// The paper's figures beside compiled kernels.
#[must_use]
pub fn published(lines: &[Published]) -> Table {
    let mut table = Table::new([
        Column::text("Systolic Linear Attention paper, TPU v7x", "what"),
        Column::text("unit", "unit"),
        Column::number("published", "published"),
        Column::number("one head", "simple"),
        Column::number("best blocks", "best"),
    ]);
    for line in lines {
        // Times in milliseconds, as the paper has them.
        let (factor, unit) = if line.unit == "us" {
            (1e-3, "ms")
        } else {
            (1.0, "ratio")
        };
        table.row([
            Cell::from(line.what),
            Cell::from(unit),
            Cell::number(line.published * factor, 3),
            Cell::optional(line.simple.map(|value| value * factor), 3),
            Cell::optional(line.best.map(|value| value * factor), 3),
        ]);
    }
    table
}

/// Errors of the fast model against schedules.
#[must_use]
pub fn groups(groups: &[Group]) -> Table {
    let mut table = Table::new([
        Column::text("left out", "chip"),
        Column::text("kernels", "op"),
        Column::number("programs", "programs_count"),
        Column::number("median (%)", "median_abs_percent"),
        Column::number("p90 (%)", "p90_abs_percent"),
        Column::number("bias (%)", "bias_percent"),
    ]);
    for group in groups {
        table.row([
            Cell::from(&group.chip),
            Cell::from(&group.op),
            Cell::from(group.programs),
            Cell::number(group.median_abs_pct, 1),
            Cell::number(group.p90_abs_pct, 1),
            Cell::number(group.bias_pct, 1),
        ]);
    }
    table
}

/// What single choices cost.
#[must_use]
pub fn changes(changes: &[Change]) -> Table {
    let mut table = Table::new([
        Column::text("kernels", "op"),
        Column::text("choice", "choice"),
        Column::text("value", "value"),
        Column::text("instead of", "from"),
        Column::text("chip", "chip"),
        Column::number("schedule (us)", "schedule_us"),
        Column::number("factor", "factor_ratio"),
        Column::number("predicted", "predicted_factor_ratio"),
    ]);
    for change in changes {
        table.row([
            Cell::from(&change.op),
            Cell::from(change.choice),
            Cell::from(&change.value),
            Cell::from(&change.from),
            Cell::from(&change.chip),
            Cell::number(change.schedule_us, 1),
            Cell::number(change.factor, 2),
            Cell::optional(change.predicted_factor, 2),
        ]);
    }
    table
}

/// Every program with its prediction.
#[must_use]
pub fn programs(rows: &[Row]) -> Table {
    let mut table = Table::new([
        Column::text("program", "program"),
        Column::text("chip", "chip"),
        Column::number("cores", "cores_used_count"),
        Column::text("op", "op"),
        Column::text("params", "params"),
        Column::number("schedule (us)", "schedule_us"),
        Column::number("predicted (us)", "predicted_us"),
        Column::number("error (%)", "error_percent"),
        Column::text("bound", "bound"),
        Column::text("predicted bound", "predicted_bound"),
    ]);
    for row in rows {
        let text = |text: Option<&String>| text.map_or_else(Cell::none, Cell::from);
        table.row([
            Cell::from(&row.time.name),
            Cell::from(row.time.chip),
            row.time.cores_used.map_or_else(Cell::none, Cell::from),
            text(row.case.as_ref().map(|case| &case.op)),
            text(row.case.as_ref().map(|case| &case.params)),
            Cell::number(row.time.time_us, 2),
            Cell::optional(row.predicted_us, 2),
            Cell::optional(row.error_pct, 1),
            Cell::from(&row.time.binds),
            text(row.predicted_bound.as_ref()),
        ]);
    }
    table
}

/// What single choices cost, chip by chip: the factor of the schedule, in brackets that of the fast model.
#[must_use]
pub fn changes_by_chip(changes: &[Change]) -> Table {
    let mut chips: Vec<&str> = changes.iter().map(|change| change.chip.as_str()).collect();
    chips.sort_unstable();
    chips.dedup();
    let first = [Column::text("choice", "choice"), Column::text("value", "value")];
    let of_chips = chips.iter().map(|chip| Column::number(*chip, *chip));
    let mut table = Table::new(first.into_iter().chain(of_chips));
    let mut rows: Vec<(&str, &str)> = Vec::new();
    for change in changes {
        let row = (change.choice, change.value.as_str());
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    for (choice, value) in rows {
        let cells = chips.iter().map(|chip| {
            let change = changes
                .iter()
                .find(|change| change.chip == *chip && change.choice == choice && change.value == value);
            change.map_or_else(Cell::none, |change| match change.predicted_factor {
                Some(predicted) => Cell::from(format!("{:.2} ({predicted:.2})", change.factor)),
                None => Cell::from(format!("{:.2}", change.factor)),
            })
        });
        table.row([Cell::from(choice), Cell::from(value)].into_iter().chain(cells));
    }
    table
}
