//! Compact schedules: what a compiled program asks of its core and of the transfers, without its text.
//!
//! Executing a dump shows the same sequence of issued cycles, transfers and waits whatever the memory and the
//! clock are: a schedule is static. That sequence, with its repetitions folded, is a few kilobytes where the
//! dump is megabytes, and it is all that the time of a program depends on. Constants are fitted to it, and
//! accuracy is shown on it, without the dumps.
//!
//! The sequence is text, its words separated by blanks:
//!
//! | word | meaning |
//! |---|---|
//! | `c120` | 120 cycles of the core: bundles and empty cycles of the schedule |
//! | `h3:4096:128` | a transfer with device memory starts: 4096 bytes, it sets flag 3 by 128 |
//! | `l3:4096:128` | the same within the chip |
//! | `w3:128`, `w3` | wait until flag 3 was set by 128; by the oldest transfer, where the amount is unknown |
//! | `H2:4096`, `W2` | an asynchronous copy of the program starts, number 2; wait for all of it |
//! | `b2`, `e2:4096` | work on the `SparseCore` starts, number 2; wait for its end, its transfers being 4096 bytes |
//! | `s0.5` | transfers from here on run at half of one core's even share of the memory |
//! | `k4` | a run of kernel 4 of the list, the first being 0, ends: its flags are forgotten, the next kernel is launched |
//! | `9( .. )` | the words nine times |
//! | `9{ .. }` | the words once, and eight times the time that they took |
//! | `[ .. \| .. ]` | sides of a branch of which the longest counts |
//!
//! Flags are numbers of the kernel that they appear in; amounts and bytes are those of one core.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::chip::{Generation, Machine};
use super::delays::Alignment;
use super::error::DumpError;
use super::execute::Run;
use super::program::{self, Step, StepKind};
use super::queues::Queues;
use super::report::{Spills, Sums, passes};
use super::source::{Dump, Kernel};
use super::value::Value;

/// Word of the `schema` field.
pub const SCHEMA: &str = "tpusim.schedule/1";
/// What times that come from a schedule are, as opposed to measured ones.
pub const LABEL: &str = "compiled, simulated from the compiler's schedule";
/// Longest run of words that is looked for as a repetition.
const LONGEST_PERIOD: usize = 512;
/// Passes that fold repetitions of repetitions.
const MOST_PASSES: usize = 6;
/// Deepest nesting that is read.
const DEEPEST: usize = 64;

/// The schedule of a program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// Name of the dump: its folder or archive without the ending.
    pub name: String,
    /// Name of the compiled module.
    pub program: String,
    /// [`LABEL`]; none in files that were written without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The command that compiled it, where the dump says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Digest of the sources of the program, where the dump says it: whether they have changed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_digest: Option<String>,
    /// Options that the program was made with, by name, where the dump says them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, serde_json::Value>,
    /// Chip it was compiled for.
    pub chip: String,
    /// Cores that work on the program together.
    pub cores: u32,
    /// Version of the compiler, where it is recorded.
    pub libtpu: Option<String>,
    /// Version of JAX, where it is recorded.
    pub jax: Option<String>,
    /// Family of kernels, where the dump says it.
    pub family: Option<String>,
    /// Measured time, in microseconds, where the dump says it.
    pub measured_us: Option<f64>,
    /// Where the measured time comes from.
    pub source: Option<String>,
    /// The same call as a case of `tpusim predict`, where the dump says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub case: Option<Case>,
    /// Why constants are not to be fitted to it, where that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<String>,
    /// Sum of the compiler's own estimates, in cycles.
    pub compiler_estimate_cycles: f64,
    /// Branches that could not be decided.
    pub unknown_branches: u64,
    /// Kernels in the order in which they first run.
    pub kernels: Vec<ScheduledKernel>,
    /// Everything in order, see the module.
    pub events: String,
}

/// A call as a case of `tpusim predict`: columns of measurement files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Operation.
    pub op: String,
    /// Parameters, `name=value` joined by `;`.
    pub params: String,
    /// Format of the operands.
    pub dtype: String,
}

/// A kernel of a schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduledKernel {
    /// Name of its instruction.
    pub name: String,
    /// How often it runs.
    pub count: f64,
    /// Bundles that one run issues.
    pub issue_cycles: u64,
    /// Empty cycles of one run.
    pub empty_cycles: u64,
    /// Bytes between device memory and all cores in one run.
    pub hbm_bytes: f64,
    /// Cores that work on it: the first alone where the compiler did not divide it. None in files that were
    /// written without it, as are the fields below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores_used: Option<u32>,
    /// Bytes of vector memory that it takes on each of them, where the compiler says them: windows of its blocks,
    /// twice where they are buffered, and scratch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmem_bytes: Option<u64>,
    /// Whether its empty cycles were recovered row by row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alignment: Option<Alignment>,
    /// Slots of one run, in the order of the compiler's table; none where that table is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<SlotCount>,
    /// Register spills of one run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spills: Option<Spills>,
    /// The block in which most of its cycles go, waits left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hottest_block: Option<HottestBlock>,
}

/// Slots of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotCount {
    /// Name as the compiler writes it.
    pub name: String,
    /// How many a bundle has.
    pub per_bundle: u32,
    /// Slots that are used in one run of the kernel. Matrix and cross-lane units count empty cycles in which they
    /// are still busy.
    pub used: f64,
}

/// The block of a kernel that takes most of its cycles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HottestBlock {
    /// Bundles of one pass.
    pub bundles: u64,
    /// Empty cycles of one pass.
    pub empty_cycles: u64,
    /// Passes in one run of the kernel.
    pub trips: u64,
}

/// Writes down what happens to the queues of a program.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    words: Vec<u32>,
    texts: Vec<String>,
    known: HashMap<String, u32>,
    /// Cycles of the core that are written down.
    written: f64,
    /// Cycles that passed otherwise: waits, launches, iterations that were not run.
    passed: f64,
    flags: HashMap<Value, usize>,
    share: Option<f64>,
    kernels: HashMap<String, usize>,
}

/// A place in a recording.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    words: usize,
    share: Option<f64>,
}

impl Recorder {
    fn intern(&mut self, text: String) -> u32 {
        if let Some(&word) = self.known.get(&text) {
            return word;
        }
        let word = self.texts.len() as u32;
        self.texts.push(text.clone());
        self.known.insert(text, word);
        word
    }

    fn push(&mut self, text: String) {
        let word = self.intern(text);
        self.words.push(word);
    }

    /// The core has worked up to cycle `now`.
    pub(super) fn advance(&mut self, now: f64) {
        let cycles = (now - self.passed - self.written).round();
        if cycles >= 1.0 {
            self.push(format!("c{cycles}"));
            self.written += cycles;
        }
    }

    /// It is cycle `now`, and no cycle of the core has passed since the last call.
    pub(super) fn resume(&mut self, now: f64) {
        self.passed = now - self.written;
    }

    fn flag(&mut self, flag: Value) -> usize {
        let next = self.flags.len();
        *self.flags.entry(flag).or_insert(next)
    }

    pub(super) fn transfer(&mut self, now: f64, kind: char, flag: Value, bytes: f64, amount: f64) {
        self.advance(now);
        let flag = self.flag(flag);
        self.push(format!("{kind}{flag}:{bytes}:{amount}"));
    }

    pub(super) fn wait(&mut self, now: f64, end: f64, flag: Value, amount: Option<f64>) {
        self.advance(now);
        let flag = self.flag(flag);
        self.push(match amount {
            // Less than nothing is waited for as nothing.
            Some(amount) => format!("w{flag}:{}", amount.max(0.0)),
            None => format!("w{flag}"),
        });
        self.resume(end);
    }

    /// A word of the program between the kernels.
    pub(super) fn program(&mut self, now: f64, text: String, end: f64) {
        self.advance(now);
        self.push(text);
        self.resume(end);
    }

    pub(super) fn set_share(&mut self, share: f64) {
        if self.share != Some(share) {
            self.share = Some(share);
            self.push(format!("s{share}"));
        }
    }

    /// Kernel `name` ends at cycle `now` and the next one can start at `end`.
    pub(super) fn end_kernel(&mut self, name: &str, now: f64, end: f64) {
        let next = self.kernels.len();
        let number = *self.kernels.entry(name.to_owned()).or_insert(next);
        self.program(now, format!("k{number}"), end);
        self.flags.clear();
    }

    /// Starts a part that is put into brackets later.
    pub(super) fn mark(&mut self, now: f64) -> Mark {
        self.advance(now);
        // What is in brackets says its share itself.
        let mark = Mark {
            words: self.words.len(),
            share: self.share.take(),
        };
        self.resume(now);
        mark
    }

    /// Takes out the words since a mark.
    pub(super) fn part(&mut self, mark: Mark, now: f64) -> String {
        self.advance(now);
        let words = self.words.split_off(mark.words);
        self.share = mark.share;
        self.folded(words)
    }

    /// What was taken out is put back as one word, after which it is cycle `now`.
    pub(super) fn put(&mut self, text: String, now: f64) {
        self.push(text);
        // A part may leave another share behind.
        self.share = None;
        self.resume(now);
    }

    /// The whole as text.
    pub(super) fn finish(&mut self, now: f64) -> String {
        self.advance(now);
        let words = std::mem::take(&mut self.words);
        self.folded(words)
    }

    fn folded(&mut self, mut words: Vec<u32>) -> String {
        for _ in 0..MOST_PASSES {
            let length = words.len();
            words = self.fold(&words);
            if words.len() == length {
                break;
            }
        }
        let mut out = String::new();
        for word in words {
            if !out.is_empty() {
                out.push(' ');
            }
            out.push_str(&self.texts[word as usize]);
        }
        out
    }

    /// Replaces the longest repetitions that start at each word.
    fn fold(&mut self, words: &[u32]) -> Vec<u32> {
        let mut out = Vec::new();
        let mut at = 0;
        while at < words.len() {
            let rest = &words[at..];
            let mut best = (0, 0, 0);
            for period in 1..=LONGEST_PERIOD.min(rest.len() / 2) {
                if rest[0] != rest[period] {
                    continue;
                }
                let mut times = 1;
                while rest.len() >= (times + 1) * period
                    && rest[..period] == rest[times * period..(times + 1) * period]
                {
                    times += 1;
                }
                let saved = period * (times - 1);
                if saved > best.0 {
                    best = (saved, period, times);
                }
            }
            let (saved, period, times) = best;
            if saved < 2 {
                out.push(words[at]);
                at += 1;
                continue;
            }
            let mut text = format!("{times}(");
            for &word in &rest[..period] {
                // Writing to a string does not fail.
                let _ = write!(text, " {}", self.texts[word as usize]);
            }
            text.push_str(" )");
            out.push(self.intern(text));
            at += times * period;
        }
        out
    }
}

/// One event of a schedule.
#[derive(Debug, Clone, PartialEq)]
enum Event {
    Cycles(f64),
    Memory { flag: Value, bytes: f64, amount: f64 },
    Local { flag: Value, bytes: f64, amount: f64 },
    Wait { flag: Value, amount: Option<f64> },
    Copy { number: usize, bytes: f64 },
    CopyDone(usize),
    SparseStart(usize),
    SparseEnd { number: usize, bytes: f64 },
    Share(f64),
    EndOfKernel(usize),
    Repeat { times: u64, body: Vec<Event> },
    Extend { times: u64, body: Vec<Event> },
    Longest(Vec<Vec<Event>>),
}

/// A schedule that can be timed.
#[derive(Debug, Clone, PartialEq)]
pub struct Timed {
    events: Vec<Event>,
    generation: Generation,
    cores: u32,
}

impl Schedule {
    /// Checks a schedule and takes its events apart. `place` says where it comes from.
    ///
    /// # Errors
    /// Another schema, an unknown chip, or events that cannot be read.
    pub fn timed(&self, place: &str) -> Result<Timed, DumpError> {
        let wrong = |message: String| DumpError::incomplete(place, format!("{}: {message}", self.name));
        if self.schema != SCHEMA {
            return Err(wrong(format!(
                "expected schema `{SCHEMA}`, found `{}`",
                self.schema
            )));
        }
        let generation = Generation::named(&self.chip)
            .ok_or_else(|| wrong(format!("the chip `{}` is no TPU that is known", self.chip)))?;
        let mut words = self.events.split_ascii_whitespace();
        let events = events(&mut words, None, 0).map_err(wrong)?.0;
        Ok(Timed {
            events,
            generation,
            cores: self.cores.max(1),
        })
    }

    /// Cycles of bundles that are issued, over all kernels.
    #[must_use]
    pub fn issue_cycles(&self) -> f64 {
        let cycles = self.kernels.iter().map(|k| k.issue_cycles as f64 * k.count);
        cycles.sum()
    }

    /// Cycles of the schedule, empty ones included.
    #[must_use]
    pub fn schedule_cycles(&self) -> f64 {
        self.kernels.iter().map(ScheduledKernel::all_cycles).sum()
    }

    /// Time of a roofline in seconds: of every kernel the longer of its schedule at `clock_hz` and of its bytes
    /// at `hbm_bytes_per_s`, the memory of all its cores.
    #[must_use]
    pub fn roofline(&self, clock_hz: f64, hbm_bytes_per_s: f64) -> f64 {
        let kernels = self.kernels.iter();
        kernels
            .map(|k| (k.all_cycles() / clock_hz).max(k.hbm_bytes * k.count / hbm_bytes_per_s))
            .sum()
    }
}

impl ScheduledKernel {
    /// Cycles of all its runs, waits left out.
    pub(super) fn all_cycles(&self) -> f64 {
        (self.issue_cycles + self.empty_cycles) as f64 * self.count
    }
}

/// The schedule of a dump on a device of `cores` cores.
#[must_use]
pub fn schedule(dump: &Dump, cores: u32) -> Schedule {
    // Any machine has the same schedule.
    let machine = Machine {
        generation: dump.generation,
        clock_hz: 1e9,
        hbm_bytes_per_s: 1e12,
        hbm_achievable: 1.0,
        transfer_latency_s: 1e-6,
        launch_s: 0.0,
        cores: cores.max(1),
    };
    let executed = program::record(dump, &machine);
    let mut found = Schedule {
        schema: SCHEMA.to_owned(),
        name: dump_name(&dump.path),
        program: dump.module.name.clone(),
        label: Some(LABEL.to_owned()),
        command: dump.meta.command.clone(),
        source_digest: dump.meta.source_digest.clone(),
        options: dump.meta.options.clone(),
        chip: dump.generation.chip().to_owned(),
        cores: machine.cores,
        libtpu: dump.meta.libtpu.clone(),
        jax: dump.meta.jax.clone(),
        family: dump.meta.family.clone(),
        measured_us: dump.meta.measured_us,
        source: dump.meta.source.clone(),
        case: dump.meta.case.clone(),
        check: dump.meta.check.clone(),
        compiler_estimate_cycles: 0.0,
        unknown_branches: 0,
        kernels: Vec::new(),
        events: executed.events,
    };
    for step in &executed.steps {
        found.compiler_estimate_cycles += step.estimate.unwrap_or(0).max(0) as f64 * step.count;
        let StepKind::Kernel {
            listing,
            run,
            core_share,
            cores,
            ..
        } = &step.kind
        else {
            continue;
        };
        if let Some(kernel) = dump.kernels.get(listing) {
            found.unknown_branches += run.unknown_branches.values().sum::<u64>();
            let hbm_bytes = run.hbm_bytes / core_share;
            found
                .kernels
                .push(scheduled_kernel(step, kernel, run, hbm_bytes, *cores));
        }
    }
    found
}

/// What one run of a kernel showed.
fn scheduled_kernel(
    step: &Step,
    kernel: &Kernel,
    run: &Run,
    hbm_bytes: f64,
    cores_used: u32,
) -> ScheduledKernel {
    let mut sums = Sums::default();
    let mut hottest: Option<(f64, HottestBlock)> = None;
    for pass in passes(kernel, run) {
        let cycles = pass.cycles() * pass.ran.runs as f64;
        sums.add(
            kernel,
            pass.block.bundles.clone(),
            pass.cycles(),
            pass.ran.runs as f64,
        );
        if hottest.is_none_or(|(most, _)| cycles > most) {
            let block = HottestBlock {
                bundles: pass.block.bundles.len() as u64,
                empty_cycles: pass.empty_cycles,
                trips: pass.ran.runs,
            };
            hottest = Some((cycles, block));
        }
    }
    let counts = sums.capacity.iter().zip(&sums.used);
    let slots = sums.names.iter().zip(counts);
    ScheduledKernel {
        name: step.name.clone(),
        count: step.count,
        issue_cycles: run.bundles,
        empty_cycles: run.empty_cycles,
        hbm_bytes,
        cores_used: Some(cores_used),
        vmem_bytes: step.vmem_bytes,
        alignment: Some(kernel.delays.alignment),
        slots: slots
            .map(|(name, (&per_bundle, &used))| SlotCount {
                name: name.clone(),
                per_bundle,
                used,
            })
            .collect(),
        spills: kernel.slots.is_some().then_some(sums.spills),
        hottest_block: hottest.map(|(_, block)| block),
    }
}

/// Name of a dump: the last part of its path without the endings of an archive.
fn dump_name(path: &str) -> String {
    let name = path.trim_end_matches('/');
    let name = name.rsplit('/').next().unwrap_or(name);
    let name = name.strip_suffix(".xz").unwrap_or(name);
    name.strip_suffix(".tar").unwrap_or(name).to_owned()
}

/// Reads schedules, one a line. `name` is the path that errors show.
///
/// # Errors
/// A line that is none.
pub fn read_lines(name: &str, text: &str) -> Result<Vec<Schedule>, DumpError> {
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| {
            serde_json::from_str(line).map_err(|error| {
                let message = error.to_string();
                let message = message.split(" at line ").next().unwrap_or_default();
                DumpError::syntax(name, number + 1, error.column().max(1), message)
            })
        })
        .collect()
}

/// Where a list of events ends, besides at the end of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Text,
    Closed,
    NextSide,
}

/// Events up to a closing bracket.
fn events<'a>(
    words: &mut impl Iterator<Item = &'a str>,
    close: Option<&str>,
    depth: usize,
) -> Result<(Vec<Event>, End), String> {
    if depth > DEEPEST {
        return Err(format!("expected brackets at most {DEEPEST} deep"));
    }
    let mut found = Vec::new();
    loop {
        let Some(word) = words.next() else {
            return match close {
                None => Ok((found, End::Text)),
                Some(close) => Err(format!("expected `{close}`, found the end of the events")),
            };
        };
        if Some(word) == close {
            return Ok((found, End::Closed));
        }
        let event = if word == "|" && close == Some("]") {
            return Ok((found, End::NextSide));
        } else if word == "[" {
            let mut sides = Vec::new();
            loop {
                let (side, end) = events(words, Some("]"), depth + 1)?;
                sides.push(side);
                if end == End::Closed {
                    break;
                }
            }
            Event::Longest(sides)
        } else if let Some(times) = word.strip_suffix('(') {
            let times = number(word, times)? as u64;
            let body = events(words, Some(")"), depth + 1)?.0;
            Event::Repeat { times, body }
        } else if let Some(times) = word.strip_suffix('{') {
            let times = number(word, times)? as u64;
            let body = events(words, Some("}"), depth + 1)?.0;
            Event::Extend { times, body }
        } else {
            single(word)?
        };
        found.push(event);
    }
}

fn number(word: &str, text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err(format!("expected a number in `{word}`, found `{text}`")),
    }
}

fn single(word: &str) -> Result<Event, String> {
    let unknown = || format!("expected an event, found `{word}`");
    let kind = word.chars().next().filter(char::is_ascii).ok_or_else(unknown)?;
    let parts = word[1..].split(':').filter(|part| !part.is_empty());
    let parts = parts
        .map(|part| number(word, part))
        .collect::<Result<Vec<f64>, String>>()?;
    Ok(match (kind, parts.as_slice()) {
        ('c', &[cycles]) => Event::Cycles(cycles),
        ('h', &[flag, bytes, amount]) => Event::Memory {
            flag: flag as Value,
            bytes,
            amount,
        },
        ('l', &[flag, bytes, amount]) => Event::Local {
            flag: flag as Value,
            bytes,
            amount,
        },
        ('w', &[flag]) => Event::Wait {
            flag: flag as Value,
            amount: None,
        },
        ('w', &[flag, amount]) => Event::Wait {
            flag: flag as Value,
            amount: Some(amount),
        },
        ('H', &[number, bytes]) => Event::Copy {
            number: number as usize,
            bytes,
        },
        ('W', &[number]) => Event::CopyDone(number as usize),
        ('b', &[number]) => Event::SparseStart(number as usize),
        ('e', &[number, bytes]) => Event::SparseEnd {
            number: number as usize,
            bytes,
        },
        ('s', &[share]) if share > 0.0 => Event::Share(share),
        ('k', &[number]) => Event::EndOfKernel(number as usize),
        _ => return Err(unknown()),
    })
}

impl Timed {
    /// Generation whose schedule it is.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Cores that work on the program together.
    #[must_use]
    pub fn cores(&self) -> u32 {
        self.cores
    }

    /// Time on a machine, in cycles of its clock.
    #[must_use]
    pub fn cycles(&self, machine: &Machine) -> f64 {
        let mut replay = Replay {
            queues: Queues::new(machine),
            machine,
            now: 0.0,
            started: HashMap::new(),
            timeline: None,
        };
        replay.all(&self.events);
        replay.now
    }

    /// What happens when on a machine, in cycles of its clock; of every run of a kernel the start in full, of
    /// what repeats a few times.
    #[must_use]
    pub fn timeline(&self, machine: &Machine) -> Timeline {
        let mut replay = Replay {
            queues: Queues::new(machine),
            machine,
            now: 0.0,
            started: HashMap::new(),
            timeline: Some(Timeline::default()),
        };
        replay.all(&self.events);
        let mut timeline = replay.timeline.unwrap_or_default();
        timeline.cycles = replay.now;
        timeline
    }
}

struct Replay<'a> {
    queues: Queues,
    machine: &'a Machine,
    now: f64,
    /// When work on the `SparseCore` started.
    started: HashMap<usize, f64>,
    timeline: Option<Timeline>,
}

impl Replay<'_> {
    fn all(&mut self, events: &[Event]) {
        for event in events {
            self.one(event);
        }
    }

    fn one(&mut self, event: &Event) {
        match event {
            Event::Cycles(cycles) => {
                self.draw(Activity::Core, self.now, self.now + cycles, 0.0);
                self.now += cycles;
            }
            Event::Memory { flag, bytes, amount } => {
                let start = self.queues.busy_until().max(self.now);
                self.queues.with_hbm(self.now, *flag, *bytes, *amount);
                self.draw(Activity::Memory, start, self.queues.busy_until(), *bytes);
            }
            Event::Local { flag, bytes, amount } => self.queues.local(self.now, *flag, *bytes, *amount),
            Event::Wait { flag, amount } => {
                let end = self.queues.wait(self.now, *flag, *amount);
                self.draw(Activity::Wait, self.now, end, 0.0);
                self.now = end;
            }
            Event::Copy { number, bytes } => {
                let start = self.queues.busy_until().max(self.now);
                self.queues.copy(self.now, *number, *bytes);
                self.draw(Activity::Memory, start, self.queues.busy_until(), *bytes);
            }
            Event::CopyDone(number) => {
                let end = self.queues.copy_done(self.now, *number);
                self.draw(Activity::Wait, self.now, end, 0.0);
                self.now = end;
            }
            Event::SparseStart(number) => {
                self.started.insert(*number, self.now);
            }
            Event::SparseEnd { number, bytes } => {
                let start = self.started.get(number).copied().unwrap_or(self.now);
                let end = self.now.max(start + bytes / self.machine.bytes_per_cycle());
                self.draw(Activity::SparseCore, start, end, *bytes);
                self.now = end;
            }
            Event::Share(share) => self.queues.set_share(*share),
            Event::EndOfKernel(number) => {
                self.queues.end_kernel();
                if let Some(timeline) = &mut self.timeline {
                    timeline.end_kernel(*number, self.now);
                }
                self.now += self.machine.launch_s * self.machine.clock_hz;
            }
            Event::Repeat { times, body } => self.repeat(*times, body),
            Event::Extend { times, body } => {
                let start = self.now;
                self.all(body);
                let end = self.now;
                self.now += (end - start) * times.saturating_sub(1) as f64;
                self.draw(Activity::Repeated(times.saturating_sub(1)), end, self.now, 0.0);
            }
            Event::Longest(sides) => {
                let start = self.now;
                let mut longest = 0.0_f64;
                for side in sides {
                    self.now = start;
                    self.all(side);
                    longest = longest.max(self.now - start);
                }
                self.now = start + longest;
            }
        }
    }

    fn draw(&mut self, activity: Activity, start: f64, end: f64, bytes: f64) {
        if let Some(timeline) = &mut self.timeline {
            timeline.draw(activity, start, end, bytes);
        }
    }

    /// Repeats events. Once a pass leaves everything as it found it, all further ones take as long.
    fn repeat(&mut self, times: u64, body: &[Event]) {
        let mut before = None;
        for done in 0..times {
            let start = self.now;
            self.all(body);
            let left = times - 1 - done;
            if left < 2 {
                continue;
            }
            let state = self.queues.state(self.now);
            if before.as_ref() == Some(&state) {
                let span = (self.now - start) * left as f64;
                self.draw(Activity::Repeated(left), self.now, self.now + span, 0.0);
                self.now += span;
                self.queues.shift(span);
                return;
            }
            before = Some(state);
        }
    }
}

/// What a part of a timeline shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// The core works off its schedule.
    Core,
    /// The core waits for a transfer.
    Wait,
    /// The device memory serves a transfer.
    Memory,
    /// The `SparseCore` works.
    SparseCore,
    /// What came before is repeated so many times, which is not drawn.
    Repeated(u64),
}

/// A part of a timeline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// What happens.
    pub activity: Activity,
    /// Start, in cycles.
    pub start: f64,
    /// End, in cycles.
    pub end: f64,
    /// Bytes of a transfer, of one core.
    pub bytes: f64,
}

/// One run of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelSpan {
    /// Number of the kernel in its schedule.
    pub kernel: usize,
    /// Start, in cycles.
    pub start: f64,
    /// End, in cycles.
    pub end: f64,
}

/// What happens when.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Timeline {
    /// Length of the whole, in cycles.
    pub cycles: f64,
    /// Runs of kernels; those of iterations that only count are left out.
    pub kernels: Vec<KernelSpan>,
    /// What happens within them.
    pub spans: Vec<Span>,
    /// Spans of the kernel that runs.
    of_kernel: usize,
    /// When the kernel that runs started.
    start: Option<f64>,
    /// Spans that were not drawn.
    left_out: u64,
}

/// Spans of one run of a kernel that are drawn.
const MOST_SPANS: usize = 2000;

impl Timeline {
    fn draw(&mut self, activity: Activity, start: f64, end: f64, bytes: f64) {
        if matches!(activity, Activity::Core) {
            self.start.get_or_insert(start);
        }
        if end <= start {
            return;
        }
        if self.of_kernel >= MOST_SPANS {
            self.left_out += 1;
            return;
        }
        self.of_kernel += 1;
        self.spans.push(Span {
            activity,
            start,
            end,
            bytes,
        });
    }

    fn end_kernel(&mut self, kernel: usize, now: f64) {
        let start = self.start.take().unwrap_or(now);
        self.kernels.push(KernelSpan {
            kernel,
            start,
            end: now,
        });
        self.of_kernel = 0;
    }

    /// Spans that were left out because a run of a kernel has too many.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }
}
