//! `tpusim kernels`: compiled kernels of KDA and SLA on every TPU generation.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use serde_json::json;

use super::fit::{self, refuse_to_replace, write_file};
use super::{Global, Outcome, json as print_json};
use crate::calibration::kernels::{self, Change, Group, Line, Published, Row};
use crate::calibration::validate::{self, Split};
use crate::dump::schedule::LABEL;
use crate::report::kernels as report;
use crate::report::kernels_page as page;
use crate::report::plot::Theme;
use crate::report::plot::kernels as plot;
use crate::report::table::{Format, Table};
use crate::study::predict::ChipFiles;

/// Arguments of `tpusim kernels`.
#[derive(Debug, Args)]
pub(super) struct KernelsArgs {
    /// Print every compiled program with its prediction instead of the comparison
    #[arg(long, conflicts_with = "choices")]
    programs: bool,
    /// Print what single choices of a kernel (head sharing, tiles, inverse, fusion, state) cost on every chip
    #[arg(long)]
    choices: bool,
    /// Write the page docs/kernels.md is, with its pictures in a folder `images/kernels` beside it
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
    /// Replace files that exist
    #[arg(long, requires = "page")]
    force: bool,
}

pub(super) fn execute(out: &mut impl Write, args: &KernelsArgs, global: &Global) -> anyhow::Result<Outcome> {
    if let Some(path) = &args.page {
        let images = images(path);
        let pictures = page::PICTURES.map(|name| images.join(format!("{name}.svg")));
        refuse_to_replace(std::iter::once(path).chain(&pictures), args.force)?;
    }
    let data = fit::read(&[], true, &[], &ChipFiles::default())?;
    let validation = validate::validate(&data, &[Split::LeaveDeviceOut]);
    let rows = kernels::rows(&validation.without_device)?;
    let found = Found {
        lines: kernels::lines(&rows)?,
        published: kernels::published(&rows)?,
        groups: kernels::groups(&rows),
        changes: kernels::changes(&rows),
        speedup_errors: kernels::speedup_errors(&rows),
        rows,
    };
    if let Some(path) = &args.page {
        write_page(path, &found)?;
        global.say(&format!("page: {}", path.display()));
        return Ok(Outcome::Done);
    }
    let table = if args.programs {
        report::programs(&found.rows)
    } else if args.choices {
        report::changes(&found.changes)
    } else {
        report::lines(&found.lines)
    };
    match global.format {
        Format::Json => print_json(out, &found.json())?,
        Format::Csv => table.write_csv(out)?,
        Format::Table => text(out, &found, &table, args)?,
    }
    Ok(Outcome::Done)
}

/// Everything that is found.
struct Found {
    rows: Vec<Row>,
    lines: Vec<Line>,
    published: Vec<Published>,
    groups: Vec<Group>,
    changes: Vec<Change>,
    speedup_errors: Vec<f64>,
}

impl Found {
    fn json(&self) -> serde_json::Value {
        json!({
            "label": LABEL,
            "lines": self.lines,
            "published": self.published,
            "groups": self.groups,
            "speedups": {
                "pairs": self.speedup_errors.len(),
                "median_abs_pct": (!self.speedup_errors.is_empty()).then(|| median_of(&self.speedup_errors)),
            },
            "changes": self.changes,
            "programs": self.rows,
        })
    }
}

/// Median of the absolute values.
fn median_of(errors: &[f64]) -> f64 {
    let sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
    validate::quantile(&sizes, 0.5)
}

fn text(out: &mut impl Write, found: &Found, table: &Table, args: &KernelsArgs) -> anyhow::Result<()> {
    writeln!(
        out,
        "Times are {LABEL}; no TPU ran. Predictions are the fast model's with every measured row of that generation left out.\n"
    )?;
    table.write_text(out)?;
    if args.programs || args.choices {
        return Ok(());
    }
    writeln!(out)?;
    report::published(&found.published).write_text(out)?;
    writeln!(out)?;
    report::groups(&found.groups).write_text(out)?;
    if !found.speedup_errors.is_empty() {
        writeln!(
            out,
            "\nspeedup of SLA-R4 over KDA with equal chunks and programs: {} pairs, median error {:.1} %",
            found.speedup_errors.len(),
            median_of(&found.speedup_errors)
        )?;
    }
    Ok(())
}

/// The folder of the pictures of a page.
fn images(page: &Path) -> PathBuf {
    page.with_file_name("images").join("kernels")
}

fn write_page(path: &Path, found: &Found) -> anyhow::Result<()> {
    let folder = images(path);
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let of = |op: &str| -> Vec<Change> {
        let of = found.changes.iter().filter(|change| change.op == op);
        of.cloned().collect()
    };
    let drawn = [
        plot::times(&found.lines, Theme::Light)?,
        plot::slots(
            &page::kernels_of_the_table(&found.rows, &found.lines),
            Theme::Light,
        )?,
        plot::changes(
            "What single choices of an SLA kernel cost",
            &of("sla_pallas"),
            Theme::Light,
        )?,
        plot::changes(
            "What single choices of a KDA kernel cost",
            &of("kda_pallas"),
            Theme::Light,
        )?,
    ];
    for (name, svg) in page::PICTURES.iter().zip(drawn) {
        write_file(&folder.join(format!("{name}.svg")), svg)?;
    }
    write_file(
        path,
        page::markdown(&page::Page {
            lines: &found.lines,
            published: &found.published,
            groups: &found.groups,
            changes: &found.changes,
            speedup_error: (!found.speedup_errors.is_empty())
                .then(|| (found.speedup_errors.len(), median_of(&found.speedup_errors))),
            programs: found.rows.len(),
        }),
    )
}
