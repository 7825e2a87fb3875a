//! `tpusim list`: the shipped workloads, stacks, models and studies.

use std::io::Write;

use serde::Serialize;

use super::Outcome;
use crate::report::table::{Cell, Column, Format, Table};
use crate::study::whatif::Study;
use crate::{model, workload};

/// What a shipped file describes, and so which command takes it.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum EntryKind {
    Layer,
    Stack,
    Model,
    Study,
}

impl EntryKind {
    fn name(self) -> &'static str {
        match self {
            EntryKind::Layer => "layer",
            EntryKind::Stack => "stack",
            EntryKind::Model => "model",
            EntryKind::Study => "study",
        }
    }
}

#[derive(Serialize)]
struct Entry {
    name: &'static str,
    kind: EntryKind,
    /// The layer, or the layers of a stack or a model; of a study, those of its workload.
    layer: String,
    plans: Vec<String>,
    chips: Vec<String>,
    /// What a study asks.
    #[serde(skip_serializing_if = "Option::is_none")]
    question: Option<String>,
}

pub(super) fn execute(out: &mut impl Write, format: Format) -> anyhow::Result<Outcome> {
    let mut entries = Vec::new();
    for name in workload::shipped() {
        let (loaded, _) = workload::load::<&str>(name, &[])?;
        entries.push(Entry {
            name,
            kind: EntryKind::Layer,
            layer: loaded.layer.describe(),
            plans: loaded.plans.iter().map(|plan| plan.name.clone()).collect(),
            chips: loaded.hardware,
            question: None,
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
            kind: EntryKind::Stack,
            layer: format!("stack of {}", kinds.join(", ")),
            plans: stack.plans,
            chips: stack.hardware,
            question: None,
        });
    }
    for name in model::shipped() {
        let Some((loaded, _)) = model::load::<&str>(name, &[])? else {
            continue;
        };
        let kinds: Vec<String> = loaded
            .blocks
            .iter()
            .map(|block| format!("{} x {}", block.count, block.name))
            .collect();
        let mut plans: Vec<String> = Vec::new();
        for block in &loaded.blocks {
            for plan in [&block.plan.tpu, &block.plan.gpu] {
                if !plans.contains(plan) {
                    plans.push(plan.clone());
                }
            }
        }
        entries.push(Entry {
            name,
            kind: EntryKind::Model,
            layer: format!("model of {}", kinds.join(", ")),
            plans,
            chips: loaded.hardware,
            question: None,
        });
    }
    for name in workload::shipped_studies() {
        let Some(study) = Study::read(name, &workload::read_document(name)?)? else {
            continue;
        };
        let of_workload: Vec<&String> = study.set.iter().filter(|set| !set.starts_with("hw.")).collect();
        let (loaded, _) = workload::load(&study.workload, &of_workload)?;
        entries.push(Entry {
            name,
            kind: EntryKind::Study,
            layer: loaded.layer.describe(),
            plans: loaded.plans.iter().map(|plan| plan.name.clone()).collect(),
            chips: if study.hardware.is_empty() {
                loaded.hardware
            } else {
                study.hardware
            },
            question: Some(study.title),
        });
    }
    if format == Format::Json {
        super::json(out, &entries)?;
        return Ok(Outcome::Done);
    }
    let mut table = Table::new([
        Column::text("name", "name"),
        Column::text("kind", "kind"),
        Column::text("plans", "plans"),
        Column::text("layer, or what a study asks", "layer"),
    ]);
    for entry in entries {
        table.row([
            Cell::from(entry.name),
            Cell::from(entry.kind.name()),
            Cell::from(entry.plans.join(", ")),
            Cell::from(entry.question.unwrap_or(entry.layer)),
        ]);
    }
    match format {
        Format::Csv => table.write_csv(out)?,
        _ => table.write_text(out)?,
    }
    Ok(Outcome::Done)
}
