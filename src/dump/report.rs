//! What an analysis says, as plain data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::chip::Machine;
use super::code::{Block, Object, Space};
use super::constants::{self, Constant};
use super::delays::Alignment;
use super::execute::{BlockRun, Run};
use super::hlo::arrays;
use super::program::{self, Step, StepKind};
use super::source::{Dump, Kernel};
use crate::hardware::ScheduleConstants;

/// Word of the `schema` field of results.
pub const SCHEMA: &str = "tpusim.dump/1";
/// Hot blocks that are listed.
const MOST_BLOCKS_LISTED: usize = 12;
/// Blocks below this share of the time are not listed.
const SMALLEST_BLOCK_SHARE: f64 = 0.01;
/// Arrays below this size, in bytes, are not compared with what was moved: they may stay on the chip.
const SMALLEST_ARRAY: f64 = 4096.0;
/// A slot this full is what binds.
const SATURATED: f64 = 0.75;

/// How long a compiled program takes, and why.
#[derive(Debug, Clone, Serialize)]
pub struct Analysis {
    /// Always [`SCHEMA`].
    pub schema: &'static str,
    /// Path of the dump.
    pub dump: String,
    /// Name of the program.
    pub program: String,
    /// Chip that it was compiled for.
    pub chip: &'static str,
    /// Cores that work on it together.
    pub cores: u32,
    /// Clock that its cycles are of: the one that the chip sustains, in GHz.
    pub clock_ghz: f64,
    /// Compiler, where it is recorded.
    pub libtpu: Option<String>,
    /// Predicted time, in microseconds.
    pub time_us: f64,
    /// Lower end of the 80 % interval, in microseconds.
    pub low_us: f64,
    /// Upper end of the 80 % interval, in microseconds.
    pub high_us: f64,
    /// What binds it, in words.
    pub binds: String,
    /// Where the time goes.
    pub parts: Parts,
    /// Bytes between device memory and all cores.
    pub hbm_bytes: f64,
    /// Share of the time in which the device memory is busy.
    pub hbm_busy: f64,
    /// The compiler's own estimates, summed over the instructions that have one, in microseconds.
    pub compiler_estimate_us: f64,
    /// Kernels in the order in which they first run.
    pub kernels: Vec<KernelTime>,
    /// Instructions that are no kernels and take time: waits for copies, work off the core.
    pub others: Vec<OtherTime>,
    /// Slots over all kernels.
    pub slots: Vec<SlotUse>,
    /// Register spills over all kernels.
    pub spills: Spills,
    /// Blocks that take most of the time, longest first.
    pub blocks: Vec<HotBlock>,
    /// What could not be decided, with its share of the time.
    pub undecided: Vec<Undecided>,
    /// Self-checks.
    pub checks: Checks,
    /// What was assumed of the chip.
    pub constants: Vec<Constant>,
    /// What is odd about the dump.
    pub warnings: Vec<String>,
}

/// Where time goes, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Parts {
    /// Bundles that are issued.
    pub issue_us: f64,
    /// Empty cycles of the schedule: latencies that nothing hides.
    pub empty_us: f64,
    /// Waits for transfers.
    pub wait_us: f64,
    /// Launches.
    pub launch_us: f64,
    /// Instructions that are no kernels.
    pub other_us: f64,
}

/// A kernel.
#[derive(Debug, Clone, Serialize)]
pub struct KernelTime {
    /// Name of its instruction.
    pub name: String,
    /// Operation of its instruction.
    pub opcode: String,
    /// Kernel whose listing stands for it, where equal ones were dumped once.
    pub listing: String,
    /// How often it runs.
    pub count: f64,
    /// Time over all runs, in microseconds.
    pub time_us: f64,
    /// Share of the time of the program.
    pub share: f64,
    /// Bundles that one run issues.
    pub issue_cycles: u64,
    /// Empty cycles of one run.
    pub empty_cycles: u64,
    /// Cycles in which one run waits for transfers.
    pub wait_cycles: f64,
    /// Bytes between device memory and all cores, for one run.
    pub hbm_bytes: f64,
    /// Sizes of its arrays in device memory, without padding, in bytes.
    pub array_bytes: f64,
    /// Transfers of one core in one run.
    pub transfers: u64,
    /// How often its longest block runs: the trip count of the loop around it.
    pub trips: u64,
    /// Slots of its bundles.
    pub slots: Vec<SlotUse>,
    /// Register spills of one run.
    pub spills: Spills,
    /// The compiler's estimate for one run, in cycles.
    pub compiler_estimate_cycles: Option<i64>,
    /// How its empty cycles were recovered.
    pub alignment: Alignment,
}

/// An instruction that is no kernel.
#[derive(Debug, Clone, Serialize)]
pub struct OtherTime {
    /// Name.
    pub name: String,
    /// Operation.
    pub opcode: String,
    /// What it is taken for.
    pub kind: &'static str,
    /// How often it runs.
    pub count: f64,
    /// Time over all runs, in microseconds.
    pub time_us: f64,
}

/// One kind of slot.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SlotUse {
    /// Name as the compiler writes it.
    pub name: String,
    /// Slots used, over all runs.
    pub used: f64,
    /// Share of the slots there are in issued and empty cycles.
    pub share: f64,
}

/// Registers that had to be stored and loaded again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spills {
    /// Stores of spilled registers.
    pub stores: f64,
    /// Loads of spilled registers.
    pub loads: f64,
    /// Cycles of bundles that hold nothing else: what spilling costs at least.
    pub cycles_alone: f64,
    /// Cycles that the load or store slots need for them: what spilling costs at most.
    pub cycles_of_slots: f64,
}

/// A run of bundles in which much of the time goes.
#[derive(Debug, Clone, Serialize)]
pub struct HotBlock {
    /// Kernel.
    pub kernel: String,
    /// First bundle.
    pub first: usize,
    /// Last bundle.
    pub last: usize,
    /// Loops around it.
    pub depth: usize,
    /// How often it runs in one run of the kernel.
    pub runs: u64,
    /// Time over all runs, waits included, in microseconds.
    pub time_us: f64,
    /// Share of the time of the program.
    pub share: f64,
    /// Empty cycles of one pass.
    pub empty_cycles: u64,
    /// Share of its time that waits for transfers.
    pub wait_share: f64,
    /// Slots of its bundles.
    pub slots: Vec<SlotUse>,
}

/// Something that could not be decided.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Undecided {
    /// Kernel or instruction.
    pub name: String,
    /// What, and what was assumed.
    pub what: String,
    /// Share of the time it concerns.
    pub share: f64,
}

/// Self-checks of an analysis.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Checks {
    /// Kernels whose recovered transfers cover the arrays in device memory that they read and write.
    pub arrays_covered: usize,
    /// Kernels that move less than their arrays hold, which is right only where they do not touch all.
    pub arrays_not_covered: Vec<String>,
    /// Branches that fell through undecided.
    pub unknown_branches: u64,
    /// Transfers of unknown size.
    pub unknown_sizes: u64,
    /// Waits for a flag that no transfer had set.
    pub idle_waits: u64,
    /// Kernels whose empty cycles were recovered row by row.
    pub aligned: usize,
    /// Kernels whose tables fit only in part, or are missing.
    pub not_aligned: Vec<String>,
    /// Scalar operations that are not understood, with how often they occur.
    pub not_understood: BTreeMap<String, usize>,
}

/// Analyses a dump on a machine, with the constants and the interval of a calibration.
#[must_use]
pub fn analyse(dump: &Dump, machine: &Machine, constants: &ScheduleConstants) -> Analysis {
    let executed = program::execute(dump, machine);
    let us = |cycles: f64| cycles / machine.clock_hz * 1e6;
    let total = executed.cycles.max(f64::MIN_POSITIVE);
    let mut builder = Builder {
        total,
        clock_mhz: machine.clock_hz / 1e6,
        kernels: Vec::new(),
        others: Vec::new(),
        blocks: Vec::new(),
        undecided: Vec::new(),
        checks: Checks::default(),
        sums: Sums::default(),
        parts: Parts::default(),
        estimate: 0.0,
    };
    for step in &executed.steps {
        builder.step(dump, step);
    }
    builder.parts.launch_us = builder.kernels.iter().map(|k| k.count).sum::<f64>() * machine.launch_s * 1e6;
    builder
        .blocks
        .sort_by(|a, b| b.time_us.total_cmp(&a.time_us).then(a.first.cmp(&b.first)));
    builder.blocks.retain(|block| block.share >= SMALLEST_BLOCK_SHARE);
    builder.blocks.truncate(MOST_BLOCKS_LISTED);
    builder.undecided.sort_by(|a, b| b.share.total_cmp(&a.share));
    let slots = builder.sums.slots();
    let mut warnings = dump.warnings.clone();
    warnings.extend(not_compared(dump.generation.chip(), constants));
    let time_us = us(executed.cycles);
    Analysis {
        schema: SCHEMA,
        dump: dump.path.clone(),
        program: dump.module.name.clone(),
        chip: dump.generation.chip(),
        cores: machine.cores,
        clock_ghz: machine.clock_hz / 1e9,
        libtpu: dump.meta.libtpu.clone(),
        time_us,
        low_us: time_us * constants.low,
        high_us: time_us * constants.high,
        binds: binds(&builder.parts, &slots, (executed.hbm_busy / total).min(1.0)),
        parts: builder.parts,
        hbm_bytes: executed.hbm_bytes,
        hbm_busy: (executed.hbm_busy / total).min(1.0),
        compiler_estimate_us: us(builder.estimate),
        kernels: builder.kernels,
        others: builder.others,
        slots,
        spills: builder.sums.spills,
        blocks: builder.blocks,
        undecided: builder.undecided,
        checks: builder.checks,
        constants: constants::of(constants, dump.generation).to_vec(),
        warnings,
    }
}

/// What to say of a chip whose schedules were never compared with measured times.
#[must_use]
pub fn not_compared(chip: &str, constants: &ScheduleConstants) -> Option<String> {
    (!constants.sustained_clock.contains_key(chip)).then(|| {
        format!(
            "no schedules of {chip} have been compared with times of kernels that stream; the interval is that of other chips"
        )
    })
}

/// What binds, by where the time goes.
pub(super) fn binds(parts: &Parts, slots: &[SlotUse], hbm_busy: f64) -> String {
    let Parts {
        issue_us,
        empty_us,
        wait_us,
        other_us,
        ..
    } = *parts;
    let sum = (issue_us + empty_us + wait_us + other_us).max(f64::MIN_POSITIVE);
    let share = |part: f64| 100.0 * part / sum;
    if wait_us > issue_us + empty_us && wait_us > other_us {
        let waits = share(wait_us);
        // Waits that are longer than the memory is busy are waits for its latency.
        return if waits > 100.0 * hbm_busy {
            format!(
                "latency of transfers: {waits:.0} % of the time waits for them, the device memory is busy {:.0} %",
                100.0 * hbm_busy
            )
        } else {
            format!("transfers: {waits:.0} % of the time waits for them")
        };
    }
    if other_us > issue_us + empty_us {
        return format!("work off the core: {:.0} % of the time", share(other_us));
    }
    if hbm_busy >= SATURATED {
        return format!(
            "device memory: busy {:.0} % of the time, {:.0} % wait for transfers",
            100.0 * hbm_busy,
            share(wait_us)
        );
    }
    // Fills and spills are part of the loads and stores.
    let own = slots.iter().filter(|slot| !slot.name.contains(':'));
    match own.max_by(|a, b| a.share.total_cmp(&b.share)) {
        Some(slot) if slot.share >= SATURATED => {
            format!("{}: {:.0} % of its slots", slot.name, 100.0 * slot.share)
        }
        // Empty cycles in which no unit is busy either.
        _ if empty_us > issue_us => {
            format!(
                "latency: {:.0} % of the time are empty cycles of the schedule",
                share(empty_us)
            )
        }
        Some(slot) => format!(
            "issue, no slot saturated: the fullest is {} at {:.0} %",
            slot.name,
            100.0 * slot.share
        ),
        None => "issue".to_owned(),
    }
}

/// Slots summed over blocks.
#[derive(Debug, Clone, Default)]
pub(super) struct Sums {
    pub(super) names: Vec<String>,
    /// Slots of a bundle, by kind.
    pub(super) capacity: Vec<u32>,
    /// Slots that are used, by kind.
    pub(super) used: Vec<f64>,
    cycles: f64,
    pub(super) spills: Spills,
}

/// A block of a kernel that ran.
pub(super) struct Pass<'a> {
    pub(super) block: &'a Block,
    pub(super) ran: BlockRun,
    /// Empty cycles of one pass.
    pub(super) empty_cycles: u64,
}

impl Pass<'_> {
    /// Cycles of one pass, without waits.
    pub(super) fn cycles(&self) -> f64 {
        self.block.bundles.len() as f64 + self.empty_cycles as f64
    }
}

/// The blocks of a kernel that ran, in the order of the listing.
pub(super) fn passes<'a>(kernel: &'a Kernel, run: &'a Run) -> impl Iterator<Item = Pass<'a>> {
    let mut empty_before = vec![0_u64];
    for bundle in 0..kernel.code.bundles {
        let delay = u64::from(kernel.delays.after.get(bundle).copied().unwrap_or(0));
        empty_before.push(empty_before[bundle] + delay);
    }
    let blocks = kernel.code.blocks.iter().zip(&run.blocks);
    blocks
        .filter(|(_, ran)| ran.runs > 0)
        .map(move |(block, ran)| Pass {
            block,
            ran: *ran,
            empty_cycles: empty_before[block.bundles.end] - empty_before[block.bundles.start],
        })
}

impl Sums {
    /// Adds `times` passes of a run of bundles that takes `cycles`.
    pub(super) fn add(&mut self, kernel: &Kernel, bundles: std::ops::Range<usize>, cycles: f64, times: f64) {
        self.cycles += cycles * times;
        let Some(table) = &kernel.slots else { return };
        if self.names.is_empty() {
            self.names.clone_from(&table.names);
            self.capacity.clone_from(&table.capacity);
            self.used = vec![0.0; table.names.len()];
        }
        if self.names != table.names {
            return;
        }
        let column = |name: &str| table.names.iter().position(|known| known == name);
        let (fill, spill) = (column("VLOAD:FILL"), column("VSTORE:SPILL"));
        let (load, store) = (column("VLOAD"), column("VSTORE"));
        let own = table.own_columns();
        let units: Vec<usize> = (0..own.len()).filter(|&column| !own[column]).collect();
        for bundle in bundles {
            let row = table.row(bundle);
            for (used, &cell) in self.used.iter_mut().zip(row) {
                *used += f64::from(cell) * times;
            }
            for (place, &unit) in units.iter().enumerate() {
                let extra = kernel
                    .delays
                    .busy
                    .get(bundle * units.len() + place)
                    .copied()
                    .unwrap_or(0);
                self.used[unit] += extra as f64 * times;
            }
            let at = |column: Option<usize>| column.and_then(|column| row.get(column)).copied().unwrap_or(0);
            let (loads, stores) = (at(fill), at(spill));
            if loads + stores == 0 {
                continue;
            }
            self.spills.loads += f64::from(loads) * times;
            self.spills.stores += f64::from(stores) * times;
            let rest: u32 = row
                .iter()
                .enumerate()
                .filter(|(index, _)| ![fill, spill].contains(&Some(*index)))
                .filter(|(index, _)| !matches!(table.names[*index].as_str(), "MXU" | "XLU"))
                .map(|(index, &cell)| match Some(index) {
                    index if index == load => u32::from(cell.saturating_sub(loads)),
                    index if index == store => u32::from(cell.saturating_sub(stores)),
                    _ => u32::from(cell),
                })
                .sum();
            if rest == 0 {
                self.spills.cycles_alone += times;
            }
        }
        let needed = |count: f64, column: Option<usize>| {
            let slots = column
                .and_then(|column| self.capacity.get(column))
                .copied()
                .unwrap_or(1)
                .max(1);
            count / f64::from(slots)
        };
        self.spills.cycles_of_slots = needed(self.spills.loads, load).max(needed(self.spills.stores, store));
    }

    fn slots(&self) -> Vec<SlotUse> {
        let cycles = self.cycles.max(1.0);
        self.names
            .iter()
            .zip(&self.capacity)
            .zip(&self.used)
            .map(|((name, &capacity), &used)| SlotUse {
                name: name.clone(),
                used,
                share: used / cycles / f64::from(capacity.max(1)),
            })
            .collect()
    }
}

struct Builder {
    total: f64,
    clock_mhz: f64,
    kernels: Vec<KernelTime>,
    others: Vec<OtherTime>,
    blocks: Vec<HotBlock>,
    undecided: Vec<Undecided>,
    checks: Checks,
    sums: Sums,
    parts: Parts,
    estimate: f64,
}

impl Builder {
    fn us(&self, cycles: f64) -> f64 {
        cycles / self.clock_mhz
    }

    fn step(&mut self, dump: &Dump, step: &Step) {
        let estimate = step.estimate.filter(|cycles| *cycles > 0).unwrap_or(0);
        self.estimate += estimate as f64 * step.count;
        let share = step.cycles / self.total;
        let mut other = |kind: &'static str| {
            let time_us = step.cycles / self.clock_mhz;
            self.others.push(OtherTime {
                name: step.name.clone(),
                opcode: step.opcode.clone(),
                kind,
                count: step.count,
                time_us,
            });
            time_us
        };
        let (kind, what) = match &step.kind {
            StepKind::Kernel {
                listing,
                run,
                origins,
                core_share,
                ..
            } => {
                if let Some(kernel) = dump.kernels.get(listing) {
                    self.kernel(step, listing, kernel, run, origins, *core_share);
                }
                return;
            }
            StepKind::Copy => {
                self.parts.wait_us += other("wait for a copy");
                return;
            }
            StepKind::SparseCore { bytes } => (
                "SparseCore",
                format!(
                    "work of another core, without a listing: charged {:.3} MB at the rate of the device memory",
                    bytes / 1e6
                ),
            ),
            StepKind::Missing => (
                "no listing",
                "no listing of this kernel in the dump: it counts nothing".to_owned(),
            ),
            StepKind::Collective { bytes } => (
                "collective",
                format!(
                    "collective operation of {:.3} MB: the links between chips are not timed, it counts nothing",
                    bytes / 1e6
                ),
            ),
            StepKind::Loop => (
                "loop",
                "loop whose trip count is not in the HLO: it counts once".to_owned(),
            ),
            StepKind::Conditional => (
                "conditional",
                "which side runs is known only at run time: the longest is taken".to_owned(),
            ),
        };
        let time = other(kind);
        if matches!(step.kind, StepKind::SparseCore { .. }) {
            self.parts.other_us += time;
        }
        self.undecided.push(Undecided {
            name: step.name.clone(),
            what,
            share,
        });
    }

    fn kernel(
        &mut self,
        step: &Step,
        listing: &str,
        kernel: &Kernel,
        run: &Run,
        origins: &[String],
        core_share: f64,
    ) {
        let share = step.cycles / self.total;
        let mut sums = Sums::default();
        let mut trips = (0.0, 0);
        for one in passes(kernel, run) {
            let (block, ran, pass) = (one.block, one.ran, one.cycles());
            let runs = ran.runs as f64;
            sums.add(kernel, block.bundles.clone(), pass, runs);
            self.sums
                .add(kernel, block.bundles.clone(), pass, runs * step.count);
            let cycles = pass * runs + ran.stall_cycles;
            if cycles > trips.0 {
                trips = (cycles, ran.runs);
            }
            let block_share = cycles * step.count / self.total;
            if block_share >= SMALLEST_BLOCK_SHARE {
                let mut own = Sums::default();
                own.add(kernel, block.bundles.clone(), pass, 1.0);
                self.blocks.push(HotBlock {
                    kernel: step.name.clone(),
                    first: block.bundles.start,
                    last: block.bundles.end - 1,
                    depth: block.depth,
                    runs: ran.runs,
                    time_us: self.us(cycles * step.count),
                    share: block_share,
                    empty_cycles: one.empty_cycles,
                    wait_share: ran.stall_cycles / cycles.max(1.0),
                    slots: own.slots(),
                });
            }
        }
        self.parts.issue_us += self.us(run.bundles as f64 * step.count);
        self.parts.empty_us += self.us(run.empty_cycles as f64 * step.count);
        self.parts.wait_us += self.us(run.stall_cycles * step.count);
        let array_bytes = self.arrays(step, kernel, run, core_share);
        self.decided(step, kernel, run, origins, share);
        self.kernels.push(KernelTime {
            name: step.name.clone(),
            opcode: step.opcode.clone(),
            listing: listing.to_owned(),
            count: step.count,
            time_us: self.us(step.cycles),
            share,
            issue_cycles: run.bundles,
            empty_cycles: run.empty_cycles,
            wait_cycles: run.stall_cycles,
            hbm_bytes: run.hbm_bytes / core_share,
            array_bytes,
            transfers: run.transfers,
            trips: trips.1,
            slots: sums.slots(),
            spills: sums.spills,
            compiler_estimate_cycles: step.estimate,
            alignment: kernel.delays.alignment,
        });
    }

    /// Compares what was moved with the arrays of the kernel; returns the size of those in device memory.
    fn arrays(&mut self, step: &Step, kernel: &Kernel, run: &Run, core_share: f64) -> f64 {
        let mut size = 0.0;
        let mut short = Vec::new();
        for declared in kernel
            .code
            .declared
            .iter()
            .filter(|declared| declared.space == Space::Hbm)
        {
            let bytes: f64 = arrays(&declared.shape).iter().map(super::hlo::Array::bytes).sum();
            size += bytes;
            let moved = run.bytes_of.get(&declared.object).copied().unwrap_or(0.0) / core_share;
            // Shares of cores are rounded to whole tiles.
            if bytes >= SMALLEST_ARRAY
                && moved < 0.98 * bytes
                && let Some(Object::Operand { input, index, .. }) =
                    kernel.code.objects.get(declared.object as usize)
            {
                let kind = if *input { "operand" } else { "result" };
                short.push(format!(
                    "{:.3} of {:.3} MB of {kind} {index}",
                    moved / 1e6,
                    bytes / 1e6
                ));
            }
        }
        if short.is_empty() {
            self.checks.arrays_covered += 1;
        } else {
            self.checks
                .arrays_not_covered
                .push(format!("{}: {}", step.name, short.join(", ")));
        }
        size
    }

    /// Notes what of a kernel could not be decided.
    fn decided(&mut self, step: &Step, kernel: &Kernel, run: &Run, origins: &[String], share: f64) {
        let unknown = [
            (
                &run.unknown_branches,
                "branches that fell through",
                &mut self.checks.unknown_branches,
            ),
            (
                &run.unknown_sizes,
                "transfers whose size is unknown and that count nothing",
                &mut self.checks.unknown_sizes,
            ),
        ];
        for (found, what, counter) in unknown {
            for (&origin, &count) in found {
                *counter += count;
                let origin = origins
                    .get(origin as usize)
                    .map_or("an unknown value", String::as_str);
                let operand = origin
                    .strip_prefix("operand ")
                    .and_then(|number| number.parse::<usize>().ok());
                let shape = operand.and_then(|number| {
                    kernel.code.declared.iter().find_map(|declared| {
                        match &kernel.code.objects[declared.object as usize] {
                            Object::Operand {
                                input: true, index, ..
                            } if *index == number => Some(declared.shape.as_str()),
                            _ => None,
                        }
                    })
                });
                let what = match (operand, shape) {
                    (Some(number), Some(shape)) => format!(
                        "{count} {what}: they depend on the data of operand {number}, {shape}; give it in scalars.json as {{\"{}\": {{\"{number}\": [...]}}}}",
                        step.name
                    ),
                    _ => format!("{count} {what}: they depend on {origin}"),
                };
                self.undecided.push(Undecided {
                    name: step.name.clone(),
                    what,
                    share,
                });
            }
        }
        self.checks.idle_waits += run.idle_waits;
        for (operation, count) in &kernel.code.not_understood {
            *self.checks.not_understood.entry(operation.clone()).or_default() += count;
        }
        if kernel.delays.alignment == Alignment::Exact {
            self.checks.aligned += 1;
        } else {
            let rows = match kernel.delays.alignment {
                Alignment::Missing => "no tables of slots, empty cycles are not counted".to_owned(),
                _ => format!(
                    "{} of {} rows without a partner",
                    kernel.delays.unmatched, kernel.code.bundles
                ),
            };
            self.checks.not_aligned.push(format!("{}: {rows}", step.name));
            if kernel.delays.alignment == Alignment::Missing {
                self.undecided.push(Undecided {
                    name: step.name.clone(),
                    what: "the tables of slots are missing: empty cycles count nothing".to_owned(),
                    share,
                });
            }
        }
        if run.cut {
            self.undecided.push(Undecided {
                name: step.name.clone(),
                what: "did not end: cut after 10 million blocks".to_owned(),
                share,
            });
        }
    }
}
