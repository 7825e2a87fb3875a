//! The program between the kernels: instructions of the HLO in order, with asynchronous copies, loops, and
//! several cores.

use std::collections::BTreeMap;

use super::chip::Machine;
use super::execute::{self, Operands, Run};
use super::hlo::{Computation, Instruction, Module, arrays};
use super::queues::Queues;
use super::schedule::Recorder;
use super::source::{Dump, Kernel};

/// Deepest nesting of computations that is followed.
const DEEPEST: usize = 64;
/// Iterations of a loop that are run; the others take as long as the last of them.
const ITERATIONS_RUN: u64 = 2;

/// What happened to one instruction of the program.
#[derive(Debug, Clone)]
pub(super) struct Step {
    /// Name of the instruction.
    pub(super) name: String,
    pub(super) opcode: String,
    /// How often it ran.
    pub(super) count: f64,
    /// Time over all runs, in cycles.
    pub(super) cycles: f64,
    pub(super) kind: StepKind,
    /// The compiler's estimate for one run, in cycles.
    pub(super) estimate: Option<i64>,
    /// Bytes of vector memory, where the compiler says them.
    pub(super) vmem_bytes: Option<u64>,
}

#[derive(Debug, Clone)]
pub(super) enum StepKind {
    /// A kernel of the dump: the name of its listing, what one run showed, and what unknown values stand for.
    /// Of several cores that share the work, the first is run; its share of the traffic and the number of cores
    /// come last.
    Kernel {
        listing: String,
        run: Box<Run>,
        origins: Vec<String>,
        core_share: f64,
        cores: u32,
    },
    /// A wait for an asynchronous copy.
    Copy,
    /// Work of the `SparseCore`, charged by its bytes.
    SparseCore { bytes: f64 },
    /// An instruction that should have a listing and has none.
    Missing,
    /// A collective operation, which is not timed.
    Collective { bytes: f64 },
    /// A loop whose trip count is unknown; it counts once.
    Loop,
    /// A branch of which the longest side is taken.
    Conditional,
}

/// The whole program.
#[derive(Debug)]
pub(super) struct Executed {
    pub(super) cycles: f64,
    pub(super) steps: Vec<Step>,
    pub(super) hbm_bytes: f64,
    pub(super) hbm_busy: f64,
    /// Its schedule as text; empty where it was not asked for.
    pub(super) events: String,
}

/// Runs a program.
pub(super) fn execute(dump: &Dump, machine: &Machine) -> Executed {
    run(dump, machine, None)
}

/// Runs a program and writes its schedule down.
pub(super) fn record(dump: &Dump, machine: &Machine) -> Executed {
    run(dump, machine, Some(Recorder::default()))
}

fn run(dump: &Dump, machine: &Machine, recorder: Option<Recorder>) -> Executed {
    let mut program = Program {
        dump,
        machine,
        queues: Queues::new(machine),
        hbm_bytes: 0.0,
        hbm_busy: 0.0,
        now: 0.0,
        steps: Vec::new(),
        places: BTreeMap::new(),
        shares: BTreeMap::new(),
        copies: BTreeMap::new(),
        started: BTreeMap::new(),
        granule: granule(dump),
    };
    program.queues.recorder = recorder;
    if let Some(entry) = dump.module.computations.get(dump.module.entry) {
        program.computation(entry, 1.0, 0);
    }
    let now = program.now;
    let recorder = program.queues.recorder.as_mut();
    let events = recorder.map_or_else(String::new, |recorder| recorder.finish(now));
    Executed {
        events,
        cycles: now,
        steps: program.steps,
        hbm_bytes: program.hbm_bytes,
        hbm_busy: program.hbm_busy,
    }
}

/// Bytes of a granule: what most kernels give away.
fn granule(dump: &Dump) -> f64 {
    let mut seen: BTreeMap<u64, usize> = BTreeMap::new();
    for bytes in dump.kernels.values().filter_map(|kernel| kernel.code.granule) {
        *seen.entry(bytes.to_bits()).or_default() += 1;
    }
    seen.iter()
        .max_by_key(|entry| *entry.1)
        .map_or(dump.generation.granule_bytes(), |(bits, _)| f64::from_bits(*bits))
}

/// How the cores share a kernel.
#[derive(Debug, Clone, Copy)]
struct Share {
    /// Share of the traffic of all cores that core 0 moves: cores share the memory.
    share: f64,
    /// Cores that work on it.
    cores: u32,
}

struct Program<'a> {
    dump: &'a Dump,
    machine: &'a Machine,
    queues: Queues,
    /// Bytes between device memory and all cores.
    hbm_bytes: f64,
    /// Cycles in which the device memory is busy.
    hbm_busy: f64,
    now: f64,
    steps: Vec<Step>,
    /// Where the step of an instruction is.
    places: BTreeMap<String, usize>,
    /// How the cores share a kernel, by listing.
    shares: BTreeMap<String, Share>,
    /// Numbers of asynchronous copies, by the name of their start.
    copies: BTreeMap<String, usize>,
    /// Numbers of asynchronous calls and when they started, by their name.
    started: BTreeMap<String, (usize, f64)>,
    granule: f64,
}

impl Program<'_> {
    fn computation(&mut self, computation: &Computation, weight: f64, depth: usize) {
        if depth > DEEPEST {
            return;
        }
        for instruction in &computation.instructions {
            self.instruction(computation, instruction, weight, depth);
        }
    }

    fn instruction(
        &mut self,
        computation: &Computation,
        instruction: &Instruction,
        weight: f64,
        depth: usize,
    ) {
        let module: &Module = &self.dump.module;
        let listed = self.dump.kernels.contains_key(&instruction.name);
        match instruction.opcode.as_str() {
            "parameter" | "constant" | "bitcast" | "get-tuple-element" | "tuple" | "partition-id"
            | "replica-id" | "after-all" | "iota" | "opt-barrier"
                if !listed => {}
            "while" => {
                let body = instruction
                    .called
                    .iter()
                    .find_map(|name| module.computation(name));
                let Some(body) = body else { return };
                let trips = module.trips(computation, instruction).unwrap_or_else(|| {
                    self.step(instruction, weight, 0.0, StepKind::Loop);
                    1
                });
                for iteration in 0..trips.min(ITERATIONS_RUN) {
                    let last = iteration + 1 == trips.min(ITERATIONS_RUN);
                    let times = if last { trips - iteration } else { 1 };
                    let start = self.now;
                    let mark = self.queues.recorder.as_mut().map(|r| r.mark(start));
                    self.computation(body, weight * times as f64, depth + 1);
                    let end = self.now;
                    self.now += (end - start) * (times - 1) as f64;
                    if let (Some(recorder), Some(mark)) = (&mut self.queues.recorder, mark) {
                        let part = recorder.part(mark, end);
                        recorder.put(format!("{times}{{ {part} }}"), self.now);
                    }
                }
            }
            "conditional" => {
                // Which side runs is known only at run time: the longest is taken.
                let start = self.now;
                let mut longest = 0.0_f64;
                let sides: Vec<&Computation> = instruction
                    .called
                    .iter()
                    .filter_map(|name| module.computation(name))
                    .collect();
                let mut parts = Vec::new();
                for side in sides {
                    let mark = self.queues.recorder.as_mut().map(|r| r.mark(start));
                    self.computation(side, weight, depth + 1);
                    longest = longest.max(self.now - start);
                    if let (Some(recorder), Some(mark)) = (&mut self.queues.recorder, mark) {
                        parts.push(recorder.part(mark, self.now));
                    }
                    self.now = start;
                }
                self.now = start + longest;
                if let Some(recorder) = &mut self.queues.recorder {
                    recorder.put(format!("[ {} ]", parts.join(" | ")), self.now);
                }
                self.step(instruction, weight, longest * weight, StepKind::Conditional);
            }
            "copy-start" | "slice-start" | "dynamic-slice-start" if !listed => {
                let moved = arrays(&instruction.shape)
                    .first()
                    .map_or(0.0, super::hlo::Array::bytes);
                // The program before has started it, and repeated calls are what is measured.
                let moved = if instruction.prefetched { 0.0 } else { moved };
                let bytes = moved / f64::from(self.machine.cores);
                self.queues.set_share(1.0);
                let next = self.copies.len();
                let number = *self.copies.entry(instruction.name.clone()).or_insert(next);
                self.queues.copy(self.now, number, bytes);
                self.hbm_bytes += moved * weight;
            }
            "copy-done" | "slice-done" | "dynamic-slice-done" if !listed => {
                let number = instruction
                    .operands
                    .first()
                    .and_then(|name| self.copies.get(name))
                    .copied();
                let end = number.map_or(self.now, |number| self.queues.copy_done(self.now, number));
                let waited = end - self.now;
                self.now = end;
                self.step(instruction, weight, waited * weight, StepKind::Copy);
            }
            // What an update hands over is needed before work can start.
            "call-start" | "async-start" | "call-update" | "async-update" if !listed => {
                let next = self.started.len();
                let started = self
                    .started
                    .entry(instruction.name.clone())
                    .or_insert((next, 0.0));
                started.1 = self.now;
                if let Some(recorder) = &mut self.queues.recorder {
                    recorder.program(self.now, format!("b{}", started.0), self.now);
                }
            }
            "call-done" | "async-done" if !listed => {
                let bytes: f64 = 2.0
                    * arrays(&instruction.shape)
                        .iter()
                        .map(super::hlo::Array::bytes)
                        .sum::<f64>();
                let start = instruction
                    .operands
                    .first()
                    .and_then(|name| self.started.get(name))
                    .copied();
                let share = bytes / f64::from(self.machine.cores);
                let (number, start) = start.unwrap_or((usize::MAX, self.now));
                let end = self.now.max(start + share / self.machine.bytes_per_cycle());
                if let Some(recorder) = &mut self.queues.recorder {
                    recorder.program(self.now, format!("e{number}:{share}"), end);
                }
                let waited = end - self.now;
                self.now = end;
                self.step(
                    instruction,
                    weight,
                    waited * weight,
                    StepKind::SparseCore { bytes },
                );
            }
            "all-reduce"
            | "all-gather"
            | "all-to-all"
            | "reduce-scatter"
            | "collective-permute"
            | "all-reduce-start"
            | "all-gather-start"
            | "collective-permute-start"
            | "collective-broadcast"
            | "send"
            | "recv"
                if !listed =>
            {
                let bytes = arrays(&instruction.shape)
                    .iter()
                    .map(super::hlo::Array::bytes)
                    .sum();
                self.step(instruction, weight, 0.0, StepKind::Collective { bytes });
            }
            "call" if !listed && !instruction.sparse_core => {
                if let Some(called) = instruction
                    .called
                    .iter()
                    .find_map(|name| module.computation(name))
                {
                    self.computation(called, weight, depth + 1);
                }
            }
            _ => match self.listing(instruction) {
                Some(listing) => self.kernel(computation, instruction, &listing, weight),
                None if has_listing(instruction) => self.step(instruction, weight, 0.0, StepKind::Missing),
                None => {}
            },
        }
    }

    /// The listing of an instruction: its own, or that of one that computes the same.
    fn listing(&self, instruction: &Instruction) -> Option<String> {
        if self.dump.kernels.contains_key(&instruction.name) {
            return Some(instruction.name.clone());
        }
        // Equal computations are dumped once.
        let same = |other: &&Instruction| {
            other.opcode == instruction.opcode
                && other.estimated_cycles == instruction.estimated_cycles
                && arrays(&other.shape) == arrays(&instruction.shape)
                && self.dump.kernels.contains_key(&other.name)
        };
        let all = self
            .dump
            .module
            .computations
            .iter()
            .flat_map(|computation| &computation.instructions);
        all.filter(same).map(|other| other.name.clone()).next()
    }

    fn kernel(&mut self, computation: &Computation, instruction: &Instruction, listing: &str, weight: f64) {
        let Some(kernel) = self.dump.kernels.get(listing) else {
            return;
        };
        let mut operands: Operands = Operands::new();
        for (index, name) in instruction.operands.iter().enumerate() {
            if let Some(values) = computation.integers(name) {
                operands.insert(index, values);
            }
        }
        operands.extend(self.dump.scalars_of(&instruction.name));
        let Share { share, cores } = self.share(listing, kernel, &operands);
        self.queues.set_share(share * f64::from(self.machine.cores));
        let before = (self.queues.hbm_bytes, self.queues.hbm_busy);
        let (run, origins) = self.run(kernel, &operands, 0);
        self.hbm_bytes += (self.queues.hbm_bytes - before.0) / share * weight;
        self.hbm_busy += (self.queues.hbm_busy - before.1) * weight;
        // The cores part at the start of a kernel and meet at its end.
        let end = self.now + run.cycles;
        let cycles = run.cycles + self.machine.launch_s * self.machine.clock_hz;
        self.now += cycles;
        if let Some(recorder) = &mut self.queues.recorder {
            recorder.end_kernel(&instruction.name, end, self.now);
        }
        let kind = StepKind::Kernel {
            listing: listing.to_owned(),
            run: Box::new(run),
            origins,
            core_share: share,
            cores,
        };
        self.step(instruction, weight, cycles * weight, kind);
    }

    fn run(&mut self, kernel: &Kernel, operands: &Operands, core: u32) -> (Run, Vec<String>) {
        let granule = kernel.code.granule.unwrap_or(self.granule);
        let result = execute::run(
            &kernel.code,
            &kernel.delays,
            operands,
            core,
            granule,
            self.now,
            &mut self.queues,
        );
        self.queues.end_kernel();
        result
    }

    /// How the cores share a kernel: one that never asks which core it runs on is left to the first.
    fn share(&mut self, listing: &str, kernel: &Kernel, operands: &Operands) -> Share {
        if self.machine.cores <= 1 || !kernel.code.asks_for_core {
            return Share { share: 1.0, cores: 1 };
        }
        if let Some(&known) = self.shares.get(listing) {
            return known;
        }
        let granule = kernel.code.granule.unwrap_or(self.granule);
        let bytes: Vec<f64> = (0..self.machine.cores)
            .map(|core| {
                let mut queues = Queues::new(self.machine);
                execute::run(
                    &kernel.code,
                    &kernel.delays,
                    operands,
                    core,
                    granule,
                    0.0,
                    &mut queues,
                );
                queues.hbm_bytes
            })
            .collect();
        let total: f64 = bytes.iter().sum();
        let share = if total > 0.0 {
            Share {
                share: (bytes[0] / total).max(0.01),
                cores: bytes.iter().filter(|&&bytes| bytes > 0.0).count() as u32,
            }
        } else {
            Share {
                share: 1.0 / f64::from(self.machine.cores),
                cores: self.machine.cores,
            }
        };
        self.shares.insert(listing.to_owned(), share);
        share
    }

    /// Notes what an instruction took; several runs of one are one step.
    fn step(&mut self, instruction: &Instruction, count: f64, cycles: f64, kind: StepKind) {
        if let Some(&at) = self.places.get(&instruction.name) {
            let known = &mut self.steps[at];
            known.count += count;
            known.cycles += cycles;
            return;
        }
        self.places.insert(instruction.name.clone(), self.steps.len());
        self.steps.push(Step {
            name: instruction.name.clone(),
            opcode: instruction.opcode.clone(),
            count,
            cycles,
            kind,
            estimate: instruction.estimated_cycles,
            vmem_bytes: instruction.vmem_bytes,
        });
    }
}

/// Whether the compiler makes a kernel of an instruction. Operations on single numbers run on the scalar unit
/// of the program between the kernels.
fn has_listing(instruction: &Instruction) -> bool {
    let arrays = arrays(&instruction.shape);
    let elements: f64 = arrays.iter().map(super::hlo::Array::elements).sum();
    let allocation = matches!(
        instruction.target.as_deref(),
        Some("AllocateBuffer" | "AssumeGatherIndicesInBound" | "Sharding" | "PinToVmem")
    );
    elements > 1.0 && !allocation
}
