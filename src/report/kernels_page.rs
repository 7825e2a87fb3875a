//! The page docs/kernels.md: SLA and KDA as TPU kernels on every generation, compiled and predicted.

use std::fmt::Write as _;

use super::kernels as tables;
use crate::calibration::kernels::{Change, Group, Line, Published, Row};
use crate::dump::schedule::LABEL;

/// Pictures of the page, names without extension.
pub const PICTURES: [&str; 4] = ["times", "slots", "choices-sla", "choices-kda"];

/// What the page shows.
#[derive(Debug, Clone, Copy)]
pub struct Page<'a> {
    /// KDA against SLA-R4.
    pub lines: &'a [Line],
    /// The paper's figures.
    pub published: &'a [Published],
    /// Errors of the fast model.
    pub groups: &'a [Group],
    /// What single choices cost.
    pub changes: &'a [Change],
    /// Pairs of kernels, and the median absolute error of their speedup in percent.
    pub speedup_error: Option<(usize, f64)>,
    /// Programs that were compiled.
    pub programs: usize,
}

/// The programs of the table with what they are called in the picture of slots: chip by chip, KDA before SLA-R4, each once.
#[must_use]
pub fn kernels_of_the_table<'a>(rows: &'a [Row], lines: &[Line]) -> Vec<(String, &'a Row)> {
    let mut found: Vec<(String, &Row)> = Vec::new();
    for line in lines {
        for (mechanism, side) in [("KDA", &line.kda), ("SLA-R4", &line.sla_r4)] {
            let row = rows
                .iter()
                .find(|row| row.time.chip == line.chip && row.time.name == side.program);
            if let Some(row) = row
                && !found
                    .iter()
                    .any(|(_, known)| known.time.name == row.time.name && known.time.chip == row.time.chip)
            {
                found.push((format!("{}, {mechanism}: {}", line.chip, line.kernels), row));
            }
        }
    }
    found
}

/// The page in Markdown.
#[must_use]
pub fn markdown(page: &Page<'_>) -> String {
    let mut out = format!(
        "# SLA and KDA as TPU kernels\n\nMade by `tpusim kernels --page docs/kernels.md`, not by hand. Every time of a kernel on this page is {LABEL}: \
         no TPU ran. The kernels are those of [tools/tpu/kernels](../tools/tpu/kernels/README.md), the schedules of {} programs stand in \
         [measurements/compiled](../measurements/compiled/README.md).\n\n",
        page.programs
    );
    let mut block = |title: &str, table: &dyn std::fmt::Display| {
        // Writing to a string does not fail.
        let _ = writeln!(out, "## {title}\n\n```\n{table}```\n");
    };
    block(
        "KDA against SLA-R4, every generation left out",
        &tables::lines(page.lines),
    );
    block(
        "The paper's figures on TPU v7x",
        &tables::published(page.published),
    );
    block("Errors of the fast model", &tables::groups(page.groups));
    block("What single choices cost", &tables::changes(page.changes));
    out
}
