//! `stages.csv`: one row per chip, plan and stage; every number has its unit in the header.

use std::io::Write;

use super::result::{ChipResult, PlanResult, RunResult, StageResult};
use crate::hardware::Evidence;

/// What a cell holds.
enum Cell {
    Text(String),
    Number(f64),
    Count(u64),
    Maybe(Option<f64>),
}

impl Cell {
    fn text(self) -> String {
        match self {
            Cell::Text(text) => text,
            // The shortest text that reads back as the same number.
            Cell::Number(number) | Cell::Maybe(Some(number)) => number.to_string(),
            Cell::Count(count) => count.to_string(),
            Cell::Maybe(None) => String::new(),
        }
    }
}

type Take = fn(&ChipResult, &PlanResult, &StageResult) -> Cell;

/// Header and content of every column.
const COLUMNS: [(&str, Take); 52] = [
    ("chip", |chip, _, _| Cell::Text(chip.name.clone())),
    ("device", |chip, _, _| Cell::Text(chip.device.clone())),
    ("cores_count", |chip, _, _| Cell::Count(u64::from(chip.cores))),
    ("clock_ghz", |chip, _, _| Cell::Number(chip.clock_ghz)),
    ("clock_state", |chip, _, _| Cell::Text(chip.clock_state.clone())),
    ("plan", |_, plan, _| Cell::Text(plan.name.clone())),
    ("stage", |_, _, row| Cell::Text(row.stage.clone())),
    ("title", |_, _, row| Cell::Text(row.title.clone())),
    ("time_us", |_, _, row| Cell::Number(row.time_us)),
    ("low_us", |_, _, row| Cell::Maybe(row.low_us)),
    ("high_us", |_, _, row| Cell::Maybe(row.high_us)),
    ("interval_from", |_, _, row| {
        Cell::Text(row.interval_from.map_or("", Evidence::name).to_owned())
    }),
    ("family", |_, _, row| {
        Cell::Text(row.family.clone().unwrap_or_default())
    }),
    ("speedup_error_ratio", |_, _, row| {
        Cell::Maybe(row.speedup_error_ratio)
    }),
    ("bound", |_, _, row| Cell::Text(row.bound.to_string())),
    ("next_bound", |_, _, row| Cell::Text(row.next_bound.to_string())),
    ("mxu_us", |_, _, row| Cell::Number(row.mxu_us)),
    ("vpu_us", |_, _, row| Cell::Number(row.vpu_us)),
    ("transcendental_us", |_, _, row| {
        Cell::Number(row.transcendental_us)
    }),
    ("cross_lane_us", |_, _, row| Cell::Number(row.cross_lane_us)),
    ("vmem_us", |_, _, row| Cell::Number(row.vmem_us)),
    ("hbm_us", |_, _, row| Cell::Number(row.hbm_us)),
    ("latency_us", |_, _, row| Cell::Number(row.latency_us)),
    ("launch_us", |_, _, row| Cell::Number(row.launch_us)),
    ("flops_count", |_, _, row| Cell::Count(row.flops)),
    ("vector_ops_count", |_, _, row| Cell::Count(row.vector_ops)),
    ("transcendentals_count", |_, _, row| {
        Cell::Count(row.transcendentals)
    }),
    ("hbm_bytes", |_, _, row| Cell::Count(row.hbm_bytes)),
    ("mxu_busy_fraction", |_, _, row| Cell::Number(row.mxu_busy)),
    ("vpu_busy_fraction", |_, _, row| Cell::Number(row.vpu_busy)),
    ("hbm_busy_fraction", |_, _, row| Cell::Number(row.hbm_busy)),
    ("mxu_lane_fraction", |_, _, row| Cell::Number(row.mxu_lane)),
    ("mxu_achieved_fraction", |_, _, row| {
        Cell::Number(row.mxu_achieved)
    }),
    ("padding_fraction", |_, _, row| Cell::Number(row.padding)),
    ("vmem_bytes", |_, _, row| Cell::Count(row.vmem_bytes)),
    ("grid_parallel_count", |_, _, row| Cell::Count(row.grid_parallel)),
    ("grid_sequential_count", |_, _, row| {
        Cell::Count(row.grid_sequential)
    }),
    ("published_us", |_, _, row| Cell::Maybe(row.published_us)),
    ("plan_total_us", |_, plan, _| Cell::Number(plan.total_us)),
    ("plan_baseline_us", |_, plan, _| Cell::Maybe(plan.baseline_us)),
    ("plan_speedup_ratio", |_, plan, _| {
        Cell::Maybe(plan.speedup_over_baseline)
    }),
    ("token_us", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.time_us))
    }),
    ("token_read_weights_bytes", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.read_bytes.weights))
    }),
    ("token_read_state_bytes", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.read_bytes.state))
    }),
    ("token_read_cache_bytes", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.read_bytes.cache))
    }),
    ("token_read_log_bytes", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.read_bytes.log))
    }),
    ("token_read_activations_bytes", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.read_bytes.activations))
    }),
    ("token_written_weights_bytes", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.written_bytes.weights))
    }),
    ("token_written_state_bytes", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.written_bytes.state))
    }),
    ("token_written_cache_bytes", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.written_bytes.cache))
    }),
    ("token_written_log_bytes", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.written_bytes.log))
    }),
    ("token_written_activations_bytes", |_, plan, _| {
        Cell::Maybe(plan.token.map(|token| token.written_bytes.activations))
    }),
];

/// Writes the table.
///
/// # Errors
/// Where the writer fails.
pub fn write(out: impl Write, result: &RunResult) -> Result<(), csv::Error> {
    let mut table = csv::Writer::from_writer(out);
    table.write_record(COLUMNS.iter().map(|(header, _)| header))?;
    for chip in &result.chips {
        for plan in &chip.plans {
            for row in &plan.stages {
                table.write_record(COLUMNS.iter().map(|(_, take)| take(chip, plan, row).text()))?;
            }
        }
    }
    table.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    fn written() -> Result<String, Box<dyn std::error::Error>> {
        let mut bytes = Vec::new();
        write(&mut bytes, &fixture::five_chips())?;
        Ok(String::from_utf8(bytes)?)
    }

    #[test]
    fn every_number_has_its_unit_in_the_header() -> Result<(), Box<dyn std::error::Error>> {
        let text = written()?;
        let mut table = csv::Reader::from_reader(text.as_bytes());
        let headers = table.headers()?.clone();
        for record in table.records() {
            for (header, cell) in headers.iter().zip(record?.iter()) {
                let unit = ["_us", "_ghz", "_bytes", "_fraction", "_count", "_ratio"];
                assert!(
                    cell.parse::<f64>().is_err() || unit.iter().any(|unit| header.ends_with(unit)),
                    "`{header}` holds the number {cell} without a unit"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn there_is_one_row_per_chip_plan_and_stage() -> Result<(), Box<dyn std::error::Error>> {
        let rows: usize = fixture::five_chips()
            .chips
            .iter()
            .flat_map(|chip| &chip.plans)
            .map(|plan| plan.stages.len())
            .sum();
        assert_eq!(written()?.lines().count(), rows + 1);
        Ok(())
    }

    #[test]
    fn every_field_of_a_row_has_a_column_and_every_column_is_documented()
    -> Result<(), Box<dyn std::error::Error>> {
        let docs = include_str!("../../docs/formats.md");
        for (header, _) in &COLUMNS {
            assert!(
                docs.contains(&format!("`{header}`")),
                "docs/formats.md does not mention `{header}`"
            );
        }
        let row = serde_json::to_value(&fixture::five_chips().chips[0].plans[0].stages[0])?;
        for key in row.as_object().into_iter().flat_map(serde_json::Map::keys) {
            assert!(
                COLUMNS.iter().any(|(header, _)| header.starts_with(key.as_str())),
                "no column holds the field `{key}`"
            );
        }
        Ok(())
    }
}
