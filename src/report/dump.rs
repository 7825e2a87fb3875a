//! What an analysis of a compiler dump says, for people.

use std::fmt::Write;

use super::table::{Cell, Column, Table};
use crate::dump::ProgramTime;
use crate::dump::report::{Analysis, HotBlock, KernelTime, SlotUse, Spills};

/// Rows of the tables of kernels and blocks that are shown; `--format json` has all.
const MOST_ROWS: usize = 12;

/// Columns of the tables of kernels.
fn columns() -> [Column; 9] {
    [
        Column::text("kernel", "kernel"),
        Column::number("runs", "runs_count"),
        Column::number("time (us)", "time_us"),
        Column::number("share (%)", "share_fraction"),
        Column::number("issue (cycles)", "issue_cycles"),
        Column::number("empty (cycles)", "empty_cycles"),
        Column::number("waits (cycles)", "wait_cycles"),
        Column::number("HBM (MB)", "hbm_bytes"),
        Column::number("trips", "trips_count"),
    ]
}

fn cells(kernel: &KernelTime) -> [Cell; 9] {
    [
        Cell::from(&kernel.name),
        Cell::number(kernel.count, 0),
        Cell::number(kernel.time_us, 2),
        Cell::scaled(kernel.share, 100.0, 1),
        Cell::from(kernel.issue_cycles),
        Cell::from(kernel.empty_cycles),
        Cell::number(kernel.wait_cycles, 0),
        Cell::scaled(kernel.hbm_bytes, 1e-6, 3),
        Cell::from(kernel.trips),
    ]
}

/// The kernels of an analysis, one a row, in the order in which they first run.
#[must_use]
pub fn kernel_table(analysis: &Analysis) -> Table {
    let mut table = Table::new(columns());
    for kernel in &analysis.kernels {
        table.row(cells(kernel));
    }
    table
}

/// The kernels of several analyses, for files of data.
#[must_use]
pub fn csv_table(analyses: &[&Analysis]) -> Table {
    let first = [
        Column::text("dump", "dump"),
        Column::text("chip", "chip"),
        Column::number("clock (GHz)", "clock_ghz"),
    ];
    let mut table = Table::new(first.into_iter().chain(columns()));
    for analysis in analyses {
        for kernel in &analysis.kernels {
            let first = [
                Cell::from(&analysis.dump),
                Cell::from(analysis.chip),
                Cell::number(analysis.clock_ghz, 3),
            ];
            table.row(first.into_iter().chain(cells(kernel)));
        }
    }
    table
}

/// Slots that the table of programs shows.
const SLOTS_SHOWN: [&str; 6] = ["MXU", "VALU", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL"];
/// Slots that the file of programs has: name, and start of its column.
const SLOTS_WRITTEN: [(&str, &str); 10] = [
    ("MXU", "mxu"),
    ("XLU", "xlu"),
    ("VALU", "valu"),
    ("VPOP", "vpop"),
    ("EUP", "eup"),
    ("VLOAD", "vload"),
    ("VLOAD:FILL", "vload_fill"),
    ("VSTORE", "vstore"),
    ("VSTORE:SPILL", "vstore_spill"),
    ("SALU", "salu"),
];

/// Programs of which the schedules are at hand, one a row, for people.
#[must_use]
pub fn program_table(programs: &[ProgramTime]) -> Table {
    let first = [
        Column::text("program", "program"),
        Column::text("chip", "chip"),
        Column::text("cores", "cores"),
        Column::number("time (us)", "time_us"),
        Column::number("low (us)", "low_us"),
        Column::number("high (us)", "high_us"),
        Column::number("issue (us)", "issue_us"),
        Column::number("empty (us)", "empty_us"),
        Column::number("waits (us)", "wait_us"),
        Column::number("HBM (MB)", "hbm_mb"),
        Column::number("VMEM (MB)", "vmem_mb"),
    ];
    let slots = SLOTS_SHOWN.map(|name| Column::number(format!("{name} (%)"), name));
    let bound = Column::text("bound by", "bound");
    let mut table = Table::new(first.into_iter().chain(slots).chain([bound]));
    for one in programs {
        let first = [
            Cell::from(&one.name),
            Cell::from(one.chip),
            Cell::from(match one.cores_used {
                Some(used) => format!("{used} of {}", one.cores),
                None => one.cores.to_string(),
            }),
            Cell::number(one.time_us, 2),
            Cell::number(one.low_us, 2),
            Cell::number(one.high_us, 2),
            Cell::number(one.issue_us, 2),
            Cell::number(one.empty_us, 2),
            Cell::number(one.wait_us, 2),
            Cell::scaled(one.hbm_bytes, 1e-6, 3),
            Cell::optional(one.vmem_bytes.map(|bytes| bytes as f64 * 1e-6), 3),
        ];
        let slots =
            SLOTS_SHOWN.map(|name| Cell::optional(one.slot_share(name).map(|share| 100.0 * share), 0));
        table.row(first.into_iter().chain(slots).chain([Cell::from(&one.binds)]));
    }
    table
}

/// Programs of which the schedules are at hand, one a row, for files of data.
#[must_use]
pub fn program_csv(programs: &[ProgramTime]) -> Table {
    let first = [
        Column::text("program", "program"),
        Column::text("family", "family"),
        Column::text("chip", "chip"),
        Column::number("cores", "cores_count"),
        Column::number("cores used", "cores_used_count"),
        Column::number("clock (GHz)", "clock_ghz"),
        Column::number("time (us)", "time_us"),
        Column::number("low (us)", "low_us"),
        Column::number("high (us)", "high_us"),
        Column::number("measured (us)", "measured_us"),
        Column::number("issue (us)", "issue_us"),
        Column::number("empty (us)", "empty_us"),
        Column::number("waits (us)", "wait_us"),
        Column::number("launches (us)", "launch_us"),
        Column::number("HBM (bytes)", "hbm_bytes"),
        Column::number("HBM busy", "hbm_busy_fraction"),
        Column::number("VMEM (bytes)", "vmem_bytes"),
    ];
    let slots = SLOTS_WRITTEN.map(|(name, key)| Column::number(name, format!("{key}_fraction")));
    let last = [
        Column::number("spill stores", "spill_stores_count"),
        Column::number("spill loads", "spill_loads_count"),
        Column::number("spill, alone (cycles)", "spill_alone_cycles"),
        Column::number("spill, slots (cycles)", "spill_slots_cycles"),
        Column::number("unknown branches", "unknown_branches_count"),
        Column::text("bound by", "bound"),
        Column::text("label", "label"),
    ];
    let mut table = Table::new(first.into_iter().chain(slots).chain(last));
    for one in programs {
        let text = |value: &Option<String>| value.as_ref().map_or_else(Cell::none, Cell::from);
        let first = [
            Cell::from(&one.name),
            text(&one.family),
            Cell::from(one.chip),
            Cell::from(one.cores),
            one.cores_used.map_or_else(Cell::none, Cell::from),
            Cell::number(one.clock_ghz, 3),
            Cell::number(one.time_us, 2),
            Cell::number(one.low_us, 2),
            Cell::number(one.high_us, 2),
            Cell::optional(one.measured_us, 2),
            Cell::number(one.issue_us, 2),
            Cell::number(one.empty_us, 2),
            Cell::number(one.wait_us, 2),
            Cell::number(one.launch_us, 2),
            Cell::number(one.hbm_bytes, 0),
            Cell::number(one.hbm_busy, 3),
            one.vmem_bytes.map_or_else(Cell::none, Cell::from),
        ];
        let slots = SLOTS_WRITTEN.map(|(name, _)| Cell::optional(one.slot_share(name), 3));
        let of_spills = |take: fn(&Spills) -> f64| Cell::optional(one.spills.as_ref().map(take), 0);
        let last = [
            of_spills(|spills| spills.stores),
            of_spills(|spills| spills.loads),
            of_spills(|spills| spills.cycles_alone),
            of_spills(|spills| spills.cycles_of_slots),
            Cell::from(one.unknown_branches),
            Cell::from(&one.binds),
            text(&one.label),
        ];
        table.row(first.into_iter().chain(slots).chain(last));
    }
    table
}

/// The whole analysis as text.
#[must_use]
pub fn render(analysis: &Analysis) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write_all(&mut out, analysis);
    out
}

fn write_all(out: &mut String, analysis: &Analysis) -> std::fmt::Result {
    let version = analysis.libtpu.as_deref().unwrap_or("of unknown version");
    writeln!(
        out,
        "{} on {} ({} at {:.3} GHz), libtpu {version}",
        analysis.program,
        analysis.chip,
        if analysis.cores == 1 {
            "1 core".to_owned()
        } else {
            format!("{} cores", analysis.cores)
        },
        analysis.clock_ghz
    )?;
    writeln!(
        out,
        "{:.2} us (80 % interval {:.2} to {:.2} us), bound by {}",
        analysis.time_us, analysis.low_us, analysis.high_us, analysis.binds
    )?;
    let parts = analysis.parts;
    writeln!(
        out,
        "issue {:.2} us, empty cycles {:.2} us, waits for transfers {:.2} us, launches {:.2} us, off the core {:.2} us",
        parts.issue_us, parts.empty_us, parts.wait_us, parts.launch_us, parts.other_us
    )?;
    writeln!(
        out,
        "HBM {:.3} MB, busy {:.0} % of the time; the compiler's own estimates add up to {:.2} us",
        analysis.hbm_bytes / 1e6,
        100.0 * analysis.hbm_busy,
        analysis.compiler_estimate_us
    )?;
    let mut longest = analysis.clone();
    longest.kernels.sort_by(|a, b| b.time_us.total_cmp(&a.time_us));
    let left_out = longest.kernels.split_off(MOST_ROWS.min(longest.kernels.len()));
    write!(out, "\nkernels, longest first\n{}", kernel_table(&longest))?;
    if !left_out.is_empty() {
        let time: f64 = left_out.iter().map(|kernel| kernel.time_us).sum();
        writeln!(out, "and {} more, {time:.2} us together", left_out.len())?;
    }
    others(out, analysis)?;
    writeln!(out, "\nslots: {}", slots(&analysis.slots))?;
    let spills = analysis.spills;
    if spills.stores + spills.loads > 0.0 {
        writeln!(
            out,
            "spills: {:.0} stores and {:.0} loads of registers, between {:.0} cycles (bundles that hold nothing else) and {:.0} (slots they need)",
            spills.stores, spills.loads, spills.cycles_alone, spills.cycles_of_slots
        )?;
    } else {
        writeln!(out, "spills: none")?;
    }
    if !analysis.blocks.is_empty() {
        write!(out, "\nhot blocks\n{}", block_table(&analysis.blocks))?;
    }
    undecided(out, analysis)?;
    checks(out, analysis)
}

fn others(out: &mut String, analysis: &Analysis) -> std::fmt::Result {
    let shown: Vec<_> = analysis
        .others
        .iter()
        .filter(|other| other.time_us >= 0.01)
        .collect();
    if shown.is_empty() {
        return Ok(());
    }
    let mut table = Table::new([
        Column::text("instruction", "instruction"),
        Column::text("kind", "kind"),
        Column::number("runs", "runs"),
        Column::number("time (us)", "time_us"),
    ]);
    for other in shown {
        table.row([
            Cell::from(&other.name),
            Cell::from(other.kind),
            Cell::number(other.count, 0),
            Cell::number(other.time_us, 2),
        ]);
    }
    write!(out, "\nbetween kernels\n{table}")
}

/// Slots as shares, those in use.
fn slots(slots: &[SlotUse]) -> String {
    let used: Vec<String> = slots
        .iter()
        .filter(|slot| slot.used > 0.0)
        .map(|slot| format!("{} {:.0} %", slot.name, 100.0 * slot.share))
        .collect();
    if used.is_empty() {
        "-".to_owned()
    } else {
        used.join(", ")
    }
}

fn block_table(blocks: &[HotBlock]) -> Table {
    let mut table = Table::new([
        Column::text("kernel", "kernel"),
        Column::text("bundles", "bundles"),
        Column::number("loops", "loops"),
        Column::number("runs", "runs"),
        Column::number("share (%)", "share"),
        Column::number("empty (cycles)", "empty_cycles"),
        Column::number("waits (%)", "wait_share"),
        Column::text("slots", "slots"),
    ]);
    for block in blocks.iter().take(MOST_ROWS) {
        let fullest: Vec<SlotUse> = block
            .slots
            .iter()
            .filter(|slot| slot.share >= 0.1)
            .cloned()
            .collect();
        table.row([
            Cell::from(&block.kernel),
            Cell::from(format!("{:#x}-{:#x}", block.first, block.last)),
            Cell::from(block.depth),
            Cell::from(block.runs),
            Cell::scaled(block.share, 100.0, 1),
            Cell::from(block.empty_cycles),
            Cell::scaled(block.wait_share, 100.0, 0),
            Cell::from(slots(&fullest)),
        ]);
    }
    table
}

fn undecided(out: &mut String, analysis: &Analysis) -> std::fmt::Result {
    if analysis.undecided.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nundecided")?;
    for undecided in &analysis.undecided {
        writeln!(
            out,
            "{} ({:.1} % of the time): {}",
            undecided.name,
            100.0 * undecided.share,
            undecided.what
        )?;
    }
    Ok(())
}

fn checks(out: &mut String, analysis: &Analysis) -> std::fmt::Result {
    let checks = &analysis.checks;
    let kernels = analysis.kernels.len();
    writeln!(out, "\nchecks")?;
    writeln!(
        out,
        "transfers cover the arrays of {} of {kernels} kernels",
        checks.arrays_covered
    )?;
    for line in &checks.arrays_not_covered {
        writeln!(out, "  not all moved: {line}")?;
    }
    writeln!(
        out,
        "empty cycles recovered row by row in {} of {kernels} kernels",
        checks.aligned
    )?;
    for line in &checks.not_aligned {
        writeln!(out, "  not aligned: {line}")?;
    }
    writeln!(
        out,
        "unknown branches {}, transfers of unknown size {}, waits for nothing {}",
        checks.unknown_branches, checks.unknown_sizes, checks.idle_waits
    )?;
    for (operation, count) in &checks.not_understood {
        writeln!(out, "  not understood: `{operation}`, {count} times")?;
    }
    for constant in &analysis.constants {
        writeln!(
            out,
            "constant {} = {}{} {} ({})",
            constant.name,
            constant.value,
            constant
                .standard_error
                .map_or_else(String::new, |error| format!(" ± {error}")),
            constant.unit,
            constant.source
        )?;
    }
    for warning in &analysis.warnings {
        writeln!(out, "warning: {warning}")?;
    }
    Ok(())
}
