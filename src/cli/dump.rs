//! `tpusim dump`: how long a compiled program takes, read off the compiler's own schedule.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use serde::Serialize;

use super::{Global, Outcome};
use crate::config::suggestion;
use crate::dump::report::HotBlock;
use crate::dump::{Analysis, Dump, Generation, Machine, analyse};
use crate::hardware;
use crate::report::dump::{kernel_table, render};
use crate::report::table::Format;

/// Arguments of `tpusim dump`.
#[derive(Debug, Args)]
pub(super) struct DumpArgs {
    /// Folder or `.tar.xz` archive with `hlo.txt` and the compiler's bundle texts; several are done in turn
    #[arg(required = true, value_name = "DIR|FILE.tar.xz")]
    dumps: Vec<PathBuf>,
    /// Chip it was compiled for, where `meta.json` does not say it, for instance `tpu-v6e`
    #[arg(long)]
    hw: Option<String>,
    /// Run-time scalars, instead of the dump's own `scalars.json`
    #[arg(long, value_name = "FILE")]
    scalars: Option<PathBuf>,
    /// Show the bundles of this kernel's hot blocks
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
}

/// A bundle of a hot block.
#[derive(Debug, Serialize)]
struct BundleText {
    /// Number of the bundle.
    bundle: usize,
    /// Empty cycles behind it.
    empty_cycles: u32,
    /// Slots that it uses, in the order of the analysis; empty without a table.
    slots: Vec<u16>,
    /// Statements, as the compiler writes them.
    text: String,
}

/// A hot block with its bundles.
#[derive(Debug, Serialize)]
struct BlockText {
    #[serde(flatten)]
    block: HotBlock,
    bundles: Vec<BundleText>,
}

/// An analysis, and the bundles that were asked for.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    analysis: Analysis,
    #[serde(skip_serializing_if = "Option::is_none")]
    listing: Option<Vec<BlockText>>,
}

pub(super) fn execute(out: &mut impl Write, args: &DumpArgs, global: &Global) -> anyhow::Result<Outcome> {
    let generation = match &args.hw {
        None => None,
        Some(name) => Some(Generation::named(name).with_context(|| {
            let known: Vec<&str> = Generation::ALL
                .iter()
                .map(|generation| generation.chip())
                .collect();
            format!(
                "--hw {name}: no TPU that bundles are known of; {}",
                suggestion(name, &known, "chips")
            )
        })?),
    };
    let mut shown = Vec::new();
    for path in &args.dumps {
        let dump = Dump::read(path, args.scalars.as_deref(), generation)?;
        let analysis = analyse(&dump, &machine(dump.generation)?);
        // The text has them at its end.
        for warning in analysis
            .warnings
            .iter()
            .filter(|_| global.format != Format::Table)
        {
            global.say(&format!("warning: {}: {warning}", analysis.dump));
        }
        let listing = match &args.kernel {
            Some(name) => Some(listing(&dump, &analysis, name)?),
            None => None,
        };
        shown.push(Shown { analysis, listing });
    }
    match global.format {
        Format::Json => match shown.as_slice() {
            [only] => super::json(out, only)?,
            several => super::json(out, &several)?,
        },
        Format::Csv => {
            for one in &shown {
                kernel_table(&one.analysis).write_csv(out)?;
            }
        }
        Format::Table => {
            for (index, one) in shown.iter().enumerate() {
                if index > 0 {
                    writeln!(out)?;
                }
                out.write_all(render(&one.analysis).as_bytes())?;
                for block in one.listing.iter().flatten() {
                    write_block(out, block)?;
                }
            }
        }
    }
    Ok(Outcome::Done)
}

/// The machine of a generation, from the shipped hardware file as published: the constants of the method
/// take the place of calibrated ones.
fn machine(generation: Generation) -> anyhow::Result<Machine> {
    let chip = hardware::load_uncalibrated(generation.chip())?;
    let cores = chip.cores_per_device;
    let bandwidth = chip.hbm_bandwidth_per_device().get() / f64::from(cores.max(1));
    Ok(Machine::of(generation, chip.clock().get(), bandwidth, cores))
}

/// The bundles of a kernel's hot blocks.
fn listing(dump: &Dump, analysis: &Analysis, name: &str) -> anyhow::Result<Vec<BlockText>> {
    let Some(kernel) = analysis.kernels.iter().find(|kernel| kernel.name == name) else {
        let names: Vec<&str> = analysis
            .kernels
            .iter()
            .map(|kernel| kernel.name.as_str())
            .collect();
        bail!(
            "unknown kernel `{name}`; {}",
            suggestion(name, &names, "kernels of this dump")
        );
    };
    let mut found = Vec::new();
    for block in analysis.blocks.iter().filter(|block| block.kernel == name) {
        let texts = dump.bundles(&kernel.listing, block.first..block.last + 1)?;
        let bundles = texts
            .into_iter()
            .map(|(bundle, text)| BundleText {
                bundle,
                empty_cycles: dump.empty_cycles(&kernel.listing, bundle),
                slots: dump.slots(&kernel.listing, bundle).to_vec(),
                text: text.split_ascii_whitespace().collect::<Vec<_>>().join(" "),
            })
            .collect();
        found.push(BlockText {
            block: block.clone(),
            bundles,
        });
    }
    Ok(found)
}

fn write_block(out: &mut impl Write, shown: &BlockText) -> std::io::Result<()> {
    let block = &shown.block;
    writeln!(
        out,
        "\n{}: bundles {:#x} to {:#x}, {} runs, {:.1} % of the time",
        block.kernel,
        block.first,
        block.last,
        block.runs,
        100.0 * block.share
    )?;
    let names: Vec<&str> = block.slots.iter().map(|slot| slot.name.as_str()).collect();
    writeln!(
        out,
        "address, empty cycles behind it, slots ({}), statements",
        names.join(" ")
    )?;
    for bundle in &shown.bundles {
        let slots: Vec<String> = bundle.slots.iter().map(u16::to_string).collect();
        writeln!(
            out,
            "{:#6x} {:>4} {} {{ {}",
            bundle.bundle,
            if bundle.empty_cycles > 0 {
                format!("+{}", bundle.empty_cycles)
            } else {
                String::new()
            },
            slots.join(" "),
            bundle.text
        )?;
    }
    Ok(())
}
