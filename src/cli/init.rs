//! `tpusim init`: a commented workload to start from.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context as _, bail};
use clap::Args;

use super::Outcome;
use crate::schema::Kind;

/// Arguments of `tpusim init`.
#[derive(Debug, Args)]
pub(super) struct InitArgs {
    /// File to write; never overwritten
    file: String,
}

/// The file that is written. It is a workload of its own, checked by a test.
pub(super) const TEMPLATE: &str = include_str!("template.yaml");

/// How an editor gets to know the keys of a file that names its schema beside it.
pub(super) fn schema_hint(kind: Kind) -> String {
    let file = kind.file_name();
    format!("editors complete and check it once `tpusim schema {kind} > {file}` stands beside it")
}

pub(super) fn execute(out: &mut impl Write, args: &InitArgs) -> anyhow::Result<Outcome> {
    let path = Path::new(&args.file);
    if !path
        .extension()
        .is_some_and(|extension| extension == "yaml" || extension == "yml")
    {
        bail!(
            "`{}` does not end in `.yaml`; write `{}.yaml`",
            args.file,
            args.file
        );
    }
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(mut file) => file
            .write_all(TEMPLATE.as_bytes())
            .with_context(|| format!("cannot write `{}`", args.file))?,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            bail!(
                "`{}` exists and is not overwritten; choose another name",
                args.file
            );
        }
        Err(error) => return Err(error).with_context(|| format!("cannot create `{}`", args.file)),
    }
    writeln!(out, "wrote {}; try `tpusim run {}`", args.file, args.file)?;
    writeln!(out, "{}", schema_hint(Kind::Workload))?;
    Ok(Outcome::Done)
}
