//! `tpusim list`: the shipped workloads.

use std::io::Write;

use serde::Serialize;

use super::Outcome;
use crate::report::table::{Cell, Column, Format, Table};
use crate::workload;

#[derive(Serialize)]
struct Entry {
    name: &'static str,
    layer: String,
    plans: Vec<String>,
    chips: Vec<String>,
}

pub(super) fn execute(out: &mut impl Write, format: Format) -> anyhow::Result<Outcome> {
    let mut entries = Vec::new();
    for name in workload::shipped() {
        let (loaded, _) = workload::load::<&str>(name, &[])?;
        entries.push(Entry {
            name,
            layer: loaded.layer.describe(),
            plans: loaded.plans.iter().map(|plan| plan.name.clone()).collect(),
            chips: loaded.hardware,
        });
    }
    for name in workload::shipped_stacks() {
        let Some((stack, _)) = workload::load_stack::<&str>(name, &[])? else {
            continue;
        };
        let kinds: Vec<String> = stack
            .layers
            .iter()
            .map(|layer| format!("{} x {}", layer.count, layer.name))
            .collect();
        entries.push(Entry {
            name,
            layer: format!("stack of {}", kinds.join(", ")),
            plans: stack.plans,
            chips: stack.hardware,
        });
    }
    if format == Format::Json {
        super::json(out, &entries)?;
        return Ok(Outcome::Done);
    }
    let mut table = Table::new([
        Column::text("name", "name"),
        Column::text("plans", "plans"),
        Column::text("layer", "layer"),
    ]);
    for entry in entries {
        table.row([
            Cell::from(entry.name),
            Cell::from(entry.plans.join(", ")),
            Cell::from(entry.layer),
        ]);
    }
    match format {
        Format::Csv => table.write_csv(out)?,
        _ => table.write_text(out)?,
    }
    Ok(Outcome::Done)
}
