//! `tpusim run` on a stack of layers.

use std::io::Write;

use anyhow::bail;

use super::run::{RunArgs, extent, load_chips, numeric};
use super::{Global, Outcome};
use crate::config::Document;
use crate::report::stack;
use crate::report::table::Format;
use crate::study::{StackRequest, run_stack};
use crate::workload::Stack;

pub(super) fn execute(
    out: &mut impl Write,
    loaded: &(Stack, Document),
    args: &RunArgs,
    global: &Global,
) -> anyhow::Result<Outcome> {
    if args.out.is_some() {
        bail!("a stack has no report folder; print it with `--format json` or `--format csv`");
    }
    let chips = load_chips(args, &loaded.0.hardware, &loaded.1)?;
    let mut checks = Vec::new();
    for layer in &loaded.0.layers {
        checks.push(match extent(args) {
            Some(extent) => numeric(extent, global, &layer.workload.0)?,
            None => None,
        });
    }
    let result = run_stack(StackRequest {
        stack: loaded,
        chips: &chips,
        overrides: args.set.clone(),
        numeric: checks,
    })?;
    match global.format {
        Format::Table => stack::write_text(&mut *out, &result)?,
        Format::Json => stack::write_json(&mut *out, &result)?,
        Format::Csv => stack::write_csv(&mut *out, &result)?,
    }
    let failed = |kind: &stack::KindResult| kind.numeric.as_ref().is_some_and(|n| n.non_finite.is_some());
    Ok(if result.kinds.iter().any(failed) {
        Outcome::CheckFailed
    } else {
        Outcome::Done
    })
}
