//! `tpusim run` on a model.

use std::io::Write;

use anyhow::bail;

use super::run::{RunArgs, load_chips};
use super::{Global, Outcome};
use crate::config::Document;
use crate::model::Model;
use crate::report::model;
use crate::report::table::Format;
use crate::study::{ModelRequest, run_model};

pub(super) fn execute(
    out: &mut impl Write,
    loaded: &(Model, Document),
    args: &RunArgs,
    global: &Global,
) -> anyhow::Result<Outcome> {
    if args.out.is_some() || args.trace || args.check {
        bail!(
            "a model has no report folder, trace or check; print it with `--format json` or `--format csv`, and run its layers as workloads"
        );
    }
    let chips = load_chips(args, &loaded.0.hardware, &loaded.1)?;
    let result = run_model(ModelRequest {
        model: loaded,
        chips: &chips,
        overrides: args.set.clone(),
    })?;
    match global.format {
        Format::Table => model::write_text(&mut *out, &result)?,
        Format::Json => model::write_json(&mut *out, &result)?,
        Format::Csv => model::write_csv(&mut *out, &result)?,
    }
    Ok(Outcome::Done)
}
