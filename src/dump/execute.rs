//! Runs the scalar program of a kernel against the queues of transfers.
//!
//! Every bundle takes a cycle and every empty cycle behind it one more; what is executed are the instructions
//! that decide how often each block runs, which transfers start, and how long waits last. Nothing is matched
//! by pattern: trip counts come out because the loop is run.

use std::collections::BTreeMap;

use super::code::{Code, Condition, Instruction, NO_REGISTER, Object, Operation, Source, Space};
use super::delays::Delays;
use super::queues::Queues;
use super::value::{self, Value};

/// Blocks that are executed before a program counts as endless. The longest measured kernel takes less than 3 million.
const MOST_BLOCKS: u64 = 10_000_000;
/// Words of scalar memory that are kept of one object.
const MOST_WORDS: i64 = 1 << 18;
/// Bytes of a word of scalar memory.
const WORD_BYTES: f64 = 4.0;

/// What one block of a kernel did.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct BlockRun {
    /// How often it ran.
    pub(super) runs: u64,
    /// Cycles it waited for transfers, over all runs.
    pub(super) stall_cycles: f64,
}

/// What running a kernel showed.
#[derive(Debug, Clone, Default)]
pub(super) struct Run {
    /// Cycles from its first bundle to its last.
    pub(super) cycles: f64,
    /// Bundles that were issued.
    pub(super) bundles: u64,
    /// Empty cycles of the schedule.
    pub(super) empty_cycles: u64,
    /// Cycles in which it waited for transfers.
    pub(super) stall_cycles: f64,
    pub(super) blocks: Vec<BlockRun>,
    /// Bytes to and from device memory.
    pub(super) hbm_bytes: f64,
    /// Of them, those of each object of the kernel.
    pub(super) bytes_of: BTreeMap<u32, f64>,
    pub(super) transfers: u64,
    /// Branches that could not be decided and fell through, by what they depend on.
    pub(super) unknown_branches: BTreeMap<u32, u64>,
    /// Transfers whose size is unknown and that count as empty, by what it depends on.
    pub(super) unknown_sizes: BTreeMap<u32, u64>,
    /// Waits for a flag that no transfer had set.
    pub(super) idle_waits: u64,
    /// Whether the limit of blocks ended it.
    pub(super) cut: bool,
}

/// Data of the operands that are known, by number.
pub(super) type Operands = BTreeMap<usize, Vec<i64>>;

struct Memory {
    words: Vec<Value>,
    /// What a word is that was never written.
    otherwise: Value,
}

impl Memory {
    fn load(&self, offset: i64) -> Value {
        usize::try_from(offset)
            .ok()
            .and_then(|at| self.words.get(at))
            .copied()
            .unwrap_or(self.otherwise)
    }

    fn store(&mut self, offset: i64, value: Value) {
        if !(0..MOST_WORDS).contains(&offset) {
            return;
        }
        let at = offset as usize;
        if at >= self.words.len() {
            self.words.resize(at + 1, self.otherwise);
        }
        self.words[at] = value;
    }
}

/// Everything that a program changes while it runs.
struct State<'a> {
    code: &'a Code,
    registers: Vec<Value>,
    machine: Vec<Value>,
    memory: Vec<Memory>,
    granule: f64,
    run: Run,
    /// Origin of what was never written.
    unwritten: Value,
}

/// Runs a kernel on core `core` from cycle `start` on. `origins` receives what unknown values stand for.
pub(super) fn run(
    code: &Code,
    delays: &Delays,
    operands: &Operands,
    core: u32,
    granule: f64,
    start: f64,
    queues: &mut Queues,
) -> (Run, Vec<String>) {
    let mut origins = code.origins.clone();
    let mut memory = Vec::new();
    for object in &code.objects {
        let (words, text) = match object {
            Object::Operand {
                input: true, index, ..
            } => {
                let known = operands.get(index).map(Vec::as_slice).unwrap_or_default();
                (
                    known.iter().map(|&word| word & 0xffff_ffff).collect(),
                    format!("operand {index}"),
                )
            }
            Object::Operand { index, .. } => (Vec::new(), format!("result {index}")),
            Object::Allocation(name) if name == "core id" => (vec![Value::from(core)], name.clone()),
            Object::Allocation(_) => (Vec::new(), "scalar memory that was never written".to_owned()),
        };
        let origin = origins
            .iter()
            .position(|known| *known == text)
            .unwrap_or_else(|| {
                origins.push(text);
                origins.len() - 1
            });
        memory.push(Memory {
            words,
            otherwise: value::unknown(origin as u32),
        });
    }
    let unwritten = value::unknown(0);
    let mut state = State {
        code,
        registers: vec![unwritten; code.registers],
        machine: vec![unwritten; code.machine_registers],
        memory,
        granule,
        run: Run {
            blocks: vec![BlockRun::default(); code.blocks.len()],
            ..Run::default()
        },
        unwritten,
    };
    // Empty cycles up to each bundle.
    let mut empty_before = Vec::with_capacity(code.bundles + 1);
    let mut total = 0_u64;
    for bundle in 0..=code.bundles {
        empty_before.push(total);
        total += u64::from(delays.after.get(bundle).copied().unwrap_or(0));
    }
    let (bytes, transfers, idle) = (queues.hbm_bytes, queues.transfers, queues.idle_waits);
    let mut now = start;
    let mut at = 0;
    let mut executed = 0_u64;
    while let Some(block) = code.blocks.get(at) {
        executed += 1;
        if executed > MOST_BLOCKS {
            state.run.cut = true;
            break;
        }
        let first = block.bundles.start;
        let empty = empty_before[block.bundles.end] - empty_before[first];
        let mut stalled = 0.0;
        let mut branch = None;
        for instruction in code.of(block) {
            let bundle = instruction.bundle as usize;
            let offset = (bundle - first) as f64 + (empty_before[bundle] - empty_before[first]) as f64;
            match instruction.operation {
                Operation::Wait if state.holds(instruction) != Some(false) => {
                    let cycle = now + offset + stalled;
                    stalled += state.wait(instruction, cycle, queues);
                }
                Operation::Idle if state.holds(instruction) != Some(false) => {
                    let operand = state.operand(instruction, 0);
                    if value::origin(operand).is_none() {
                        stalled += operand.clamp(0, 1 << 20) as f64;
                    }
                }
                Operation::Transfer { from, to } if state.holds(instruction) != Some(false) => {
                    let cycle = now + offset + stalled;
                    state.transfer(instruction, (from, to), cycle, queues);
                }
                Operation::Branch { bundle } => match state.holds(instruction) {
                    Some(true) if branch.is_none() => branch = Some(bundle),
                    Some(_) => {}
                    None => {
                        let register = instruction.condition.map_or(0, |condition| condition.register);
                        let origin = value::origin(state.registers[register as usize]).unwrap_or(0);
                        *state.run.unknown_branches.entry(origin).or_default() += 1;
                    }
                },
                Operation::Wait | Operation::Idle | Operation::Transfer { .. } => {}
                _ => state.step(instruction),
            }
        }
        let length = (block.bundles.len() as u64 + empty) as f64;
        now += length + stalled;
        state.run.bundles += block.bundles.len() as u64;
        state.run.empty_cycles += empty;
        state.run.stall_cycles += stalled;
        let counted = &mut state.run.blocks[at];
        counted.runs += 1;
        counted.stall_cycles += stalled;
        at = match branch.and_then(|bundle| code.block_at(bundle as usize)) {
            Some(target) => target,
            None => at + 1,
        };
    }
    let mut run = state.run;
    run.cycles = now - start;
    run.hbm_bytes = queues.hbm_bytes - bytes;
    run.transfers = queues.transfers - transfers;
    run.idle_waits = queues.idle_waits - idle;
    (run, origins)
}

impl State<'_> {
    fn value(&self, source: Source) -> Value {
        match source {
            Source::Register(register) => self.registers[register as usize],
            Source::Value(value) => value,
        }
    }

    fn operand(&self, instruction: &Instruction, index: usize) -> Value {
        self.code
            .operands(instruction)
            .get(index)
            .map_or(self.unwritten, |&source| self.value(source))
    }

    /// Whether the condition of an instruction holds; `None` where it is unknown.
    fn holds(&self, instruction: &Instruction) -> Option<bool> {
        let Some(condition) = instruction.condition else {
            return Some(true);
        };
        self.decided(&condition)
    }

    fn decided(&self, condition: &Condition) -> Option<bool> {
        let value = self.registers[condition.register as usize];
        value::origin(value)
            .is_none()
            .then_some((value != 0) != condition.negated)
    }

    fn sum(&self, sources: &[Source]) -> Value {
        sources.iter().fold(0, |sum, &source| {
            value::apply(value::Binary::Add, sum, self.value(source))
        })
    }

    /// An instruction that changes registers or scalar memory.
    fn step(&mut self, instruction: &Instruction) {
        // An undecided instruction is taken to be executed: its result is the likelier one.
        if self.holds(instruction) == Some(false) {
            if let Some(Condition {
                otherwise: Some(source),
                ..
            }) = instruction.condition
            {
                let value = self.value(source);
                self.define(instruction, value);
            }
            return;
        }
        let code = self.code;
        let sources = code.operands(instruction);
        let value = match instruction.operation {
            Operation::Move | Operation::Opaque => self.operand(instruction, 0),
            Operation::Join(register) => self
                .machine
                .get(register as usize)
                .copied()
                .unwrap_or(self.unwritten),
            Operation::Two(binary) => {
                value::apply(binary, self.operand(instruction, 0), self.operand(instruction, 1))
            }
            Operation::Not => match self.operand(instruction, 0) {
                unknown if value::origin(unknown).is_some() => unknown,
                known => Value::from(known == 0),
            },
            Operation::Select => {
                let (condition, yes, no) = (
                    self.operand(instruction, 0),
                    self.operand(instruction, 1),
                    self.operand(instruction, 2),
                );
                match value::origin(condition) {
                    Some(_) if yes == no => yes,
                    Some(_) => condition,
                    None if condition != 0 => yes,
                    None => no,
                }
            }
            Operation::Sum => self.sum(sources),
            Operation::LeadingZeros => match self.operand(instruction, 0) {
                unknown if value::origin(unknown).is_some() => unknown,
                known => Value::from((known as u32).leading_zeros()),
            },
            Operation::Load => {
                let address = self.sum(sources);
                match value::target(address) {
                    Some((object, offset)) => match self.memory.get(object as usize) {
                        Some(memory) => memory.load(offset),
                        None => self.unwritten,
                    },
                    None if value::origin(address).is_some() => address,
                    None => self.unwritten,
                }
            }
            Operation::Store => {
                let stored = self.operand(instruction, 0);
                let address = self.sum(&sources[1.min(sources.len())..]);
                if let Some((object, offset)) = value::target(address)
                    && let Some(memory) = self.memory.get_mut(object as usize)
                {
                    memory.store(offset, stored);
                }
                return;
            }
            Operation::Wait | Operation::Idle | Operation::Transfer { .. } | Operation::Branch { .. } => {
                return;
            }
        };
        self.define(instruction, value);
    }

    fn define(&mut self, instruction: &Instruction, value: Value) {
        if instruction.target != NO_REGISTER {
            self.registers[instruction.target as usize] = value;
        }
        if instruction.machine != NO_REGISTER {
            self.machine[instruction.machine as usize] = value;
        }
    }

    fn wait(&mut self, instruction: &Instruction, cycle: f64, queues: &mut Queues) -> f64 {
        let amount = self.operand(instruction, 1);
        let amount = value::origin(amount).is_none().then_some(amount as f64);
        queues.wait(cycle, self.operand(instruction, 0), amount) - cycle
    }

    fn transfer(
        &mut self,
        instruction: &Instruction,
        (from, to): (Space, Space),
        cycle: f64,
        queues: &mut Queues,
    ) {
        let size = self.operand(instruction, 0);
        let granules = match value::origin(size) {
            Some(origin) => {
                *self.run.unknown_sizes.entry(origin).or_default() += 1;
                0.0
            }
            // No transfer is larger than the memory.
            None => size.clamp(0, 1 << 36) as f64,
        };
        let flag = self.operand(instruction, 1);
        let ends = [self.operand(instruction, 2), self.operand(instruction, 3)].map(value::target);
        let space = |end: Option<(u32, i64)>, written: Space| match (written, end) {
            (Space::Unknown, Some((object, _))) => self.code.spaces[object as usize],
            _ => written,
        };
        let (from, to) = (space(ends[0], from), space(ends[1], to));
        let bytes = granules * self.granule;
        // A transfer of which no end is known is taken for one of the device memory.
        if from == Space::Hbm || to == Space::Hbm || (from == Space::Unknown && to == Space::Unknown) {
            queues.with_hbm(cycle, flag, bytes, granules);
            let outside = if from == Space::Hbm { ends[0] } else { ends[1] };
            if let Some((object, _)) = outside {
                *self.run.bytes_of.entry(object).or_default() += bytes;
            }
        } else {
            queues.local(cycle, flag, bytes, granules);
        }
        if to == Space::Smem
            && let [Some((source, source_offset)), Some((destination, offset))] = ends
        {
            self.copy((source, source_offset), (destination, offset), bytes, from);
        }
    }

    /// Words of an array arrive in scalar memory.
    fn copy(&mut self, (source, from): (u32, i64), (destination, to): (u32, i64), bytes: f64, space: Space) {
        let words = ((bytes / WORD_BYTES) as i64).min(MOST_WORDS);
        // Addresses of device memory count granules.
        let first = match space {
            Space::Hbm => from.saturating_mul((self.granule / WORD_BYTES) as i64),
            _ => from,
        };
        let otherwise = self.memory[source as usize].otherwise;
        for word in 0..words {
            let value = self.memory[source as usize].load(first.saturating_add(word));
            self.memory[destination as usize].store(to.saturating_add(word), value);
        }
        if words == 0 || self.memory[source as usize].words.is_empty() {
            self.memory[destination as usize].otherwise = otherwise;
        }
    }
}
