//! `tpusim schema`.

use std::io::Write;

use clap::Args;

use super::{Global, Outcome, json};
use crate::report::table::{Cell, Column, Format, Table};
use crate::schema::Kind;

/// Arguments of `tpusim schema`.
#[derive(Debug, Args)]
pub(super) struct SchemaArgs {
    /// Kind of file; all of them are listed where absent
    kind: Option<Kind>,
}

pub(super) fn execute(out: &mut impl Write, args: &SchemaArgs, global: &Global) -> anyhow::Result<Outcome> {
    match (args.kind, global.format) {
        (Some(kind), _) => json(out, &kind.schema())?,
        (None, format) => {
            let mut table = Table::new([Column::text("kind", "kind"), Column::text("file", "file")]);
            for kind in Kind::ALL {
                table.row([Cell::from(kind), Cell::from(kind.file_name())]);
            }
            match format {
                Format::Json => json(out, &Kind::ALL.map(Kind::name))?,
                Format::Csv => table.write_csv(out)?,
                Format::Table => table.write_text(out)?,
            }
        }
    }
    Ok(Outcome::Done)
}
