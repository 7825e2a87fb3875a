//! `tpusim probe`: numeric probes of the mechanisms.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use super::{Global, Outcome};
use crate::report::plot::{Theme, probe as picture};
use crate::report::table::{Cell, Column, Format, Table};
use crate::study::probe::probe;

/// Arguments of `tpusim probe`.
#[derive(Debug, Args)]
pub(super) struct ProbeArgs {
    /// Seed of keys, values and bits
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Write the picture as `FILE.svg` and `FILE.png`
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub(super) fn execute(out: &mut impl Write, args: &ProbeArgs, global: &Global) -> anyhow::Result<Outcome> {
    let table = probe(args.seed);
    if let Some(stem) = &args.plot {
        let svg = picture::svg(&table, Theme::Light)?;
        let path = stem.with_extension("svg");
        std::fs::write(&path, svg).with_context(|| format!("cannot write `{}`", path.display()))?;
        picture::png(&table, Theme::Light, &stem.with_extension("png"))?;
        global.say(&format!("picture: {}", path.display()));
    }
    if global.format == Format::Json {
        super::json(out, &table)?;
        return Ok(Outcome::Done);
    }
    let columns = || {
        Table::new([
            Column::text("probe", "probe"),
            Column::text("mechanism", "mechanism"),
            Column::text("condition", "condition"),
            Column::text("state", "state"),
            Column::text("measure", "measure"),
            Column::number("value", "value"),
        ])
    };
    let fill = |rows: &mut Table, name: &str| {
        for row in table.rows.iter().filter(|row| row.probe == name) {
            rows.row([
                Cell::from(row.probe),
                Cell::from(row.mechanism),
                Cell::from(row.condition.clone()),
                Cell::from(row.state),
                Cell::from(row.measure),
                Cell::from(format!("{:.2e}", row.value)),
            ]);
        }
    };
    if global.format == Format::Csv {
        let mut all = columns();
        table.texts.iter().for_each(|text| fill(&mut all, text.probe));
        all.write_csv(out)?;
        return Ok(Outcome::Done);
    }
    writeln!(out, "numeric probes of the state, seed {}", table.seed)?;
    for text in &table.texts {
        writeln!(
            out,
            "\n{}: {}\nexpected: {}",
            text.probe, text.question, text.expected
        )?;
        let mut rows = columns();
        fill(&mut rows, text.probe);
        rows.write_text(&mut *out)?;
    }
    Ok(Outcome::Done)
}
