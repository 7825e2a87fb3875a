//! The scalar program of a kernel, from its listing.
//!
//! Names become registers, regions become blocks, and every block becomes a list of instructions. Vector work
//! is not kept: a bundle takes a cycle whatever it holds, and what it holds is in the table of slots.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::BufRead;
use std::ops::Range;

use super::bundles::{self, Bundle, Sink};
use super::chip::Generation;
use super::error::DumpError;
use super::statement::{Guard, Statement, Word};
use super::value::{self, Binary, Value};

/// No register.
pub(super) const NO_REGISTER: u32 = u32::MAX;

/// Where an operand comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Register(u32),
    Value(Value),
}

/// A memory, as far as transfers tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    /// Device memory.
    Hbm,
    /// Memory of the vector unit, or another one on the chip.
    OnChip,
    /// Memory of the scalar unit.
    Smem,
    /// The listing does not say.
    Unknown,
}

/// What an instruction does. Operands are those of the instruction, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// First operand.
    Move,
    /// The value that the machine register holds, whichever name wrote it.
    Join(u32),
    Two(Binary),
    Not,
    /// Third operand if the first is false, else the second.
    Select,
    /// Sum of all.
    Sum,
    /// Leading zeros.
    LeadingZeros,
    /// Word of scalar memory at the sum of all.
    Load,
    /// First operand into scalar memory at the sum of the others.
    Store,
    /// Operands: size in granules, flag, source, destination.
    Transfer {
        from: Space,
        to: Space,
    },
    /// Operands: flag, size in granules.
    Wait,
    /// Waits as many cycles as the operand says.
    Idle,
    /// Branches to the block at a bundle.
    Branch {
        bundle: u32,
    },
    /// Nothing that is known: the result is unknown.
    Opaque,
}

/// The condition of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Condition {
    pub(super) register: u32,
    pub(super) negated: bool,
    /// What the instruction defines where the condition does not hold; without it, nothing.
    pub(super) otherwise: Option<Source>,
}

/// One instruction.
#[derive(Debug, Clone, Copy)]
pub(super) struct Instruction {
    pub(super) bundle: u32,
    pub(super) operation: Operation,
    /// What it defines, or [`NO_REGISTER`].
    pub(super) target: u32,
    /// The machine register of the target, or [`NO_REGISTER`].
    pub(super) machine: u32,
    pub(super) condition: Option<Condition>,
    first: u32,
    count: u32,
}

/// A run of bundles that is entered at its first and left at its last.
#[derive(Debug, Clone)]
pub(super) struct Block {
    pub(super) bundles: Range<usize>,
    pub(super) instructions: Range<usize>,
    /// Depth of loops around it, as the listing marks it.
    pub(super) depth: usize,
}

/// What an address points into.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Object {
    /// Operand or result of the kernel: whether it is an input, its number, and its place in a tuple.
    Operand { input: bool, index: usize, part: String },
    /// Memory that the compiler allocated, by name.
    Allocation(String),
}

/// An operand or result of a kernel as its listing declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Declared {
    pub(super) object: u32,
    pub(super) shape: String,
    pub(super) space: Space,
}

/// A kernel's scalar program.
#[derive(Debug, Default)]
pub(super) struct Code {
    pub(super) blocks: Vec<Block>,
    instructions: Vec<Instruction>,
    operands: Vec<Source>,
    /// Number of bundles.
    pub(super) bundles: usize,
    pub(super) registers: usize,
    pub(super) machine_registers: usize,
    pub(super) objects: Vec<Object>,
    /// Memory of each object, where an operation says it.
    pub(super) spaces: Vec<Space>,
    pub(super) declared: Vec<Declared>,
    /// What unknown values stand for, by origin.
    pub(super) origins: Vec<String>,
    /// Bytes a granule of transfers has, where the listing gives it away.
    pub(super) granule: Option<f64>,
    /// First bundle of each block, with the block's number.
    starts: BTreeMap<usize, usize>,
    /// Whether it asks which core it runs on; one that does not runs on one core alone.
    pub(super) asks_for_core: bool,
    /// Operations of the scalar unit that are not understood, with how often they occur.
    pub(super) not_understood: BTreeMap<String, usize>,
}

impl Code {
    /// Instructions of a block.
    pub(super) fn of(&self, block: &Block) -> &[Instruction] {
        &self.instructions[block.instructions.clone()]
    }

    /// Operands of an instruction.
    pub(super) fn operands(&self, instruction: &Instruction) -> &[Source] {
        &self.operands[instruction.first as usize..(instruction.first + instruction.count) as usize]
    }

    /// The block that starts at a bundle.
    pub(super) fn block_at(&self, bundle: usize) -> Option<usize> {
        self.starts.get(&bundle).copied()
    }
}

/// A listing that has been read and waits for what is to be known of its chip.
#[derive(Debug)]
pub(super) struct Listing {
    builder: Builder,
    count: usize,
}

impl Listing {
    /// Reads a listing.
    ///
    /// # Errors
    /// As [`bundles::read`].
    pub(super) fn read(name: &str, stream: impl BufRead) -> Result<Self, DumpError> {
        let mut builder = Builder::default();
        builder.origin("a register that was never written");
        let count = bundles::read(name, stream, &mut builder)?;
        Ok(Self { builder, count })
    }

    /// Builds the program.
    pub(super) fn finish(self, generation: Generation) -> Code {
        self.builder.finish(self.count, generation)
    }
}

/// Facts about a bundle that decide where blocks end.
#[derive(Debug, Clone, Copy, Default)]
struct Shape {
    labelled: bool,
    /// Whether a region starts here.
    starts: bool,
    depth: u8,
    holds: Holds,
}

/// What a bundle holds, as far as the end of a branch depends on it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Holds {
    /// Nothing.
    #[default]
    Nothing,
    /// Nothing but moves that belong to the branch before.
    Moves,
    /// Anything else.
    Work,
}

#[derive(Debug, Default)]
struct Builder {
    code: Code,
    registers: HashMap<Box<str>, u32>,
    machine: HashMap<Box<str>, u32>,
    known_objects: HashMap<Object, u32>,
    shapes: Vec<Shape>,
    /// Region names with the bundle they start at.
    regions: HashMap<u32, u32>,
    /// Branches: bundle and region.
    branches: Vec<(u32, Option<u32>)>,
    granules: BTreeMap<u64, usize>,
    /// Of the bundle being read: statements that are moves of a branch, and of any kind.
    moves: usize,
    copies: usize,
}

impl Builder {
    fn origin(&mut self, text: &str) -> u32 {
        let origins = &mut self.code.origins;
        let found = origins.iter().position(|known| known == text).unwrap_or_else(|| {
            origins.push(text.to_owned());
            origins.len() - 1
        });
        found as u32
    }

    fn object(&mut self, object: Object) -> u32 {
        if let Some(&known) = self.known_objects.get(&object) {
            return known;
        }
        let number = self.code.objects.len() as u32;
        self.code.objects.push(object.clone());
        self.code.spaces.push(Space::Unknown);
        self.known_objects.insert(object, number);
        number
    }

    fn register(&mut self, name: &str) -> u32 {
        if let Some(&known) = self.registers.get(name) {
            return known;
        }
        let number = self.registers.len() as u32;
        self.registers.insert(name.into(), number);
        number
    }

    /// The machine register in a name: `s16` of `%s15878_s16`.
    fn machine(&mut self, name: &str) -> u32 {
        let Some((_, register)) = name.split_once('_') else {
            return NO_REGISTER;
        };
        if let Some(&known) = self.machine.get(register) {
            return known;
        }
        let number = self.machine.len() as u32;
        self.machine.insert(register.into(), number);
        number
    }

    /// An operand that is a value.
    fn source(&mut self, word: Option<Word<'_>>) -> Source {
        match word {
            Some(Word::Name(name)) => Source::Register(self.register(name)),
            Some(Word::Number(number)) => Source::Value(number & 0xffff_ffff),
            Some(Word::Bracket(inside)) => {
                let mut terms = Vec::new();
                self.address(inside, &mut terms);
                let sum = terms.iter().try_fold(0, |sum: Value, term| match term {
                    Source::Value(value) => Some(sum.wrapping_add(*value)),
                    Source::Register(_) => None,
                });
                match (sum, terms.as_slice()) {
                    (Some(sum), _) => Source::Value(sum),
                    (None, [only]) => *only,
                    (None, _) => Source::Value(value::unknown(self.origin("an address in registers"))),
                }
            }
            Some(Word::Place(text)) => match text.parse::<i64>() {
                Ok(number) => Source::Value(number & 0xffff_ffff),
                Err(_) => Source::Value(value::unknown(self.origin("a place in the program"))),
            },
            Some(Word::Other(text)) => {
                let text = format!("the constant `{text}`");
                Source::Value(value::unknown(self.origin(&text)))
            }
            None => Source::Value(value::unknown(self.origin("an operand that is not written"))),
        }
    }

    /// Terms of an address: `smem:[#allocation2 + %s5_s1 + $0x4]` or `#allocation2 + $0x1`.
    fn address(&mut self, text: &str, terms: &mut Vec<Source>) {
        let inside = match text.split_once(":[") {
            Some((_, inside)) => inside.trim_end_matches(']'),
            None => text,
        };
        // The part behind the address tells how vector registers take it.
        for term in inside.split('+') {
            let term = term
                .trim()
                .split(' ')
                .next()
                .unwrap_or_default()
                .trim_end_matches(']');
            let source = if let Some(name) = term.strip_prefix('#') {
                let object = self.object(Object::Allocation(name.to_owned()));
                Source::Value(value::address(object))
            } else if let Some(digits) = term.strip_prefix("$0x") {
                match Value::from_str_radix(digits, 16) {
                    Ok(number) => Source::Value(number),
                    Err(_) => Source::Value(value::unknown(0)),
                }
            } else {
                self.source(Some(super::statement::word(term)))
            };
            terms.push(source);
        }
    }

    fn guard(&mut self, guard: Option<Guard<'_>>) -> Option<Condition> {
        let guard = guard?;
        Some(Condition {
            register: self.register(guard.name),
            negated: guard.negated,
            otherwise: guard.otherwise.map(|word| self.source(Some(word))),
        })
    }

    fn push(&mut self, statement: &Statement<'_>, operation: Operation, operands: &[Source]) {
        let defines = !matches!(
            operation,
            Operation::Store
                | Operation::Wait
                | Operation::Idle
                | Operation::Branch { .. }
                | Operation::Transfer { .. }
        );
        let target = if defines {
            self.register(statement.target)
        } else {
            NO_REGISTER
        };
        let machine = if defines {
            self.machine(statement.target)
        } else {
            NO_REGISTER
        };
        let condition = self.guard(statement.guard);
        let first = self.code.operands.len() as u32;
        self.code.operands.extend_from_slice(operands);
        self.code.instructions.push(Instruction {
            bundle: self.code.bundles as u32,
            operation,
            target,
            machine,
            condition,
            first,
            count: operands.len() as u32,
        });
    }

    fn space_of(&mut self, source: Source, space: Space) {
        if let Source::Value(value) = source
            && let Some((object, _)) = value::target(value)
            && let Some(known) = self.code.spaces.get_mut(object as usize)
        {
            *known = space;
        }
    }

    /// `inlined_call_operand.hbm [shape: bf16[8,4], index: 0, kind: input, shape index: {}]`
    fn operand(&mut self, statement: &Statement<'_>) {
        // `<no memory space>` may stand in between.
        let Some(text) = statement.operands.iter().find_map(|(_, word)| match word {
            Word::Bracket(text) => Some(*text),
            _ => None,
        }) else {
            return self.opaque(statement);
        };
        let field = |name: &str| {
            let at = text.find(name)? + name.len();
            text[at..].split([',', '}']).next().map(str::trim)
        };
        let index = field("index: ").and_then(|word| word.parse().ok());
        let (Some(index), Some(kind)) = (index, field("kind: ")) else {
            return self.opaque(statement);
        };
        let input = kind == "input";
        let shape = text.strip_prefix("shape: ").unwrap_or(text);
        let shape = shape.split(", index:").next().unwrap_or_default().to_owned();
        let part = field("shape index: {").unwrap_or_default().to_owned();
        let object = self.object(Object::Operand { input, index, part });
        let space = match statement.operation.split('.').nth(1) {
            Some("hbm") => Space::Hbm,
            Some("smem") => Space::Smem,
            Some("vmem" | "cmem") => Space::OnChip,
            _ => Space::Unknown,
        };
        self.code.spaces[object as usize] = space;
        self.code.declared.push(Declared { object, shape, space });
        if statement.operation.contains("<no") {
            // The value itself is handed over: the first element of the array.
            self.push(
                statement,
                Operation::Load,
                &[Source::Value(value::address(object))],
            );
        } else {
            self.push(
                statement,
                Operation::Move,
                &[Source::Value(value::address(object))],
            );
        }
    }

    fn opaque(&mut self, statement: &Statement<'_>) {
        let origin = self.origin(&format!("the result of `{}`", statement.operation));
        self.push(
            statement,
            Operation::Opaque,
            &[Source::Value(value::unknown(origin))],
        );
    }

    fn transfer(&mut self, statement: &Statement<'_>, comment: &str) {
        let (from, to) = match statement
            .operation
            .strip_prefix("dma.")
            .and_then(|op| op.split_once("_to_"))
        {
            Some((from, to)) => (space(from), space(to)),
            None => (Space::Unknown, Space::Unknown),
        };
        let granules = statement.keyed("size_in_granules");
        if let Some(Word::Number(number)) = granules
            && let Some(bytes) = window_bytes(comment)
            && number > 0
        {
            *self
                .granules
                .entry((bytes / number as f64).to_bits())
                .or_default() += 1;
        }
        let memory = |kind: Space| match kind {
            Space::Hbm => "hbm",
            Space::Smem => "smem",
            Space::OnChip => "vmem",
            Space::Unknown => "src",
        };
        let source = statement.keyed(memory(from)).or_else(|| statement.keyed("src"));
        let destination = match to {
            Space::Unknown => statement.keyed("dst"),
            _ => statement.keyed(memory(to)).or_else(|| statement.keyed("dst")),
        };
        let operands = [
            self.source(granules),
            self.source(statement.keyed("dst_syncflagno")),
            self.source(source),
            self.source(destination),
        ];
        self.push(statement, Operation::Transfer { from, to }, &operands);
    }

    fn compile(&mut self, statement: &Statement<'_>, comment: &str) {
        let base = statement.base();
        let two = |builder: &mut Self, operation| {
            let operands = [
                builder.source(statement.operand(0)),
                builder.source(statement.operand(1)),
            ];
            builder.push(statement, Operation::Two(operation), &operands);
        };
        match base {
            "dma" if statement.has_suffix("wait") => {
                let operands = [
                    self.source(statement.operand(0)),
                    self.source(statement.operand(1)),
                ];
                if statement.operands.len() >= 2 {
                    self.push(statement, Operation::Wait, &operands);
                }
            }
            "dma" => self.transfer(statement, comment),
            "sbr" => {
                let region = statement.operands.iter().find_map(|(_, word)| match word {
                    Word::Place(place) => place.strip_prefix("region")?.parse().ok(),
                    _ => None,
                });
                self.branches.push((self.code.bundles as u32, region));
                self.push(statement, Operation::Branch { bundle: u32::MAX }, &[]);
            }
            "vdelay" => {
                let operand = self.source(statement.operand(0));
                self.push(statement, Operation::Idle, &[operand]);
            }
            "sst" => {
                let value = self.source(statement.operands.last().map(|(_, word)| *word));
                let mut operands = vec![value];
                if let Some(Word::Bracket(inside)) = statement.operand(0) {
                    self.address(inside, &mut operands);
                }
                self.push(statement, Operation::Store, &operands);
            }
            "sld" => {
                if comment.contains("core id") {
                    // Set by the caller: the core whose share is executed.
                    let object = self.object(Object::Allocation("core id".to_owned()));
                    self.code.asks_for_core = true;
                    self.push(
                        statement,
                        Operation::Load,
                        &[Source::Value(value::address(object))],
                    );
                } else if comment.contains("logical chip id") {
                    self.push(statement, Operation::Move, &[Source::Value(0)]);
                } else {
                    let mut operands = Vec::new();
                    if let Some(Word::Bracket(inside)) = statement.operand(0) {
                        self.address(inside, &mut operands);
                    }
                    self.push(statement, Operation::Load, &operands);
                }
            }
            "sphi" | "pphi" => {
                let machine = self.machine(statement.target);
                self.push(statement, Operation::Join(machine), &[]);
            }
            "smov" | "pmov" | "int_to_ptr" | "ptr_to_int" => {
                let operand = self.source(statement.operand(0));
                self.push(statement, Operation::Move, &[operand]);
            }
            "scalar_lea" => {
                let operands: Vec<Source> = statement
                    .operands
                    .iter()
                    .map(|(_, word)| self.source(Some(*word)))
                    .collect();
                let space = statement
                    .operation
                    .split('.')
                    .nth(1)
                    .map_or(Space::Unknown, space);
                if let Some(first) = operands.first() {
                    self.space_of(*first, space);
                }
                self.push(statement, Operation::Sum, &operands);
            }
            "scalar_select" => {
                let operands: Vec<Source> = (0..3)
                    .map(|index| self.source(statement.operand(index)))
                    .collect();
                self.push(statement, Operation::Select, &operands);
            }
            "pneg" | "pnot" => {
                let operand = self.source(statement.operand(0));
                self.push(statement, Operation::Not, &[operand]);
            }
            "sclz" => {
                let operand = self.source(statement.operand(0));
                self.push(statement, Operation::LeadingZeros, &[operand]);
            }
            "inlined_call_operand" => self.operand(statement),
            "scalar_parameter_address" => {
                let name = match statement.operand(0) {
                    Some(Word::Number(number)) => format!("parameter {number}"),
                    _ => "parameter".to_owned(),
                };
                let object = self.object(Object::Allocation(name));
                self.code.spaces[object as usize] = Space::Hbm;
                self.push(
                    statement,
                    Operation::Move,
                    &[Source::Value(value::address(object))],
                );
            }
            "reloc" => self.push(statement, Operation::Move, &[Source::Value(0)]),
            // The result of a division comes out of a queue.
            "sdivrem" => {
                let remainder = comment.contains("kRem");
                two(
                    self,
                    if remainder {
                        Binary::Remainder
                    } else {
                        Binary::Divide
                    },
                );
            }
            "spop" if statement.has_suffix("drf") => {
                let operand = self.source(statement.operand(0));
                self.push(statement, Operation::Move, &[operand]);
            }
            "scmp" => {
                let signed = statement.has_suffix("s32");
                let operation = match statement.operation.split('.').nth(1) {
                    Some("eq") => Binary::Equal,
                    Some("ne") => Binary::Unequal,
                    Some("lt") => Binary::Less(signed),
                    Some("le") => Binary::LessEqual(signed),
                    Some("gt") => Binary::Greater(signed),
                    Some("ge") => Binary::GreaterEqual(signed),
                    _ => return self.opaque(statement),
                };
                if statement.operation.contains("f32") {
                    return self.opaque(statement);
                }
                two(self, operation);
            }
            _ => match binary(base, statement.has_suffix("u32")) {
                Some(operation) if !statement.has_suffix("f32") => two(self, operation),
                _ => {
                    if !matches!(base, "spop" | "inlined_call" | "vsyncadd" | "vwait") {
                        *self
                            .code
                            .not_understood
                            .entry(statement.operation.to_owned())
                            .or_default() += 1;
                    }
                    if statement.target.starts_with("%s") || statement.target.starts_with("%p") {
                        self.opaque(statement);
                    }
                }
            },
        }
    }

    fn finish(self, count: usize, generation: Generation) -> Code {
        let targets: BTreeMap<u32, Option<u32>> = self
            .branches
            .iter()
            .map(|(bundle, region)| {
                let known = region.and_then(|region| self.regions.get(&region).copied());
                (*bundle, known.or_else(|| self.unnamed_target(*bundle)))
            })
            .collect();
        let mut cuts: BTreeSet<usize> = BTreeSet::from([0]);
        cuts.extend(targets.values().flatten().map(|&bundle| bundle as usize));
        cuts.extend((0..count).filter(|&bundle| self.shapes[bundle].labelled));
        for &bundle in targets.keys() {
            cuts.insert(self.end_of_branch(bundle as usize, generation) + 1);
        }
        cuts.remove(&count);
        let mut code = self.code;
        for instruction in &mut code.instructions {
            if let Operation::Branch { bundle } = &mut instruction.operation {
                *bundle = targets
                    .get(&instruction.bundle)
                    .copied()
                    .flatten()
                    .unwrap_or(u32::MAX);
            }
        }
        // Joins read what the register held before the bundle: they come first.
        code.instructions.sort_by_key(|instruction| {
            (
                instruction.bundle,
                !matches!(instruction.operation, Operation::Join(_)),
            )
        });
        let starts: Vec<usize> = cuts.into_iter().collect();
        for (number, &start) in starts.iter().enumerate() {
            let end = starts.get(number + 1).copied().unwrap_or(count);
            let at = |bundle: usize| {
                code.instructions
                    .partition_point(|i| (i.bundle as usize) < bundle)
            };
            code.blocks.push(Block {
                bundles: start..end,
                instructions: at(start)..at(end),
                depth: usize::from(self.shapes[start].depth),
            });
            code.starts.insert(start, number);
        }
        code.bundles = count;
        code.registers = self.registers.len();
        code.machine_registers = self.machine.len();
        code.granule = self
            .granules
            .iter()
            .max_by_key(|entry| *entry.1)
            .map(|(bits, _)| f64::from_bits(*bits));
        code
    }

    /// Target of a branch to a region that no comment names: the next place that branches join at and that
    /// starts no region. The last bundle of a kernel is one.
    fn unnamed_target(&self, branch: u32) -> Option<u32> {
        let after = self.shapes.iter().enumerate().skip(branch as usize + 1);
        after
            .filter(|(_, shape)| shape.labelled && !shape.starts)
            .map(|(bundle, _)| bundle as u32)
            .next()
    }

    /// The last bundle that runs before a branch takes effect: its delay slots, and moves that belong to it.
    fn end_of_branch(&self, bundle: usize, generation: Generation) -> usize {
        let last = self.shapes.len() - 1;
        let end = (bundle + generation.branch_delay_slots()).min(last);
        let mut moves = end;
        let mut next = end + 1;
        while next <= last
            && next <= end + 3
            && self.shapes[next].holds == Holds::Nothing
            && !self.shapes[next].labelled
        {
            next += 1;
        }
        while next <= last && self.shapes[next].holds == Holds::Moves && !self.shapes[next].labelled {
            moves = next;
            next += 1;
        }
        moves
    }
}

impl Sink for Builder {
    fn statement(&mut self, text: &str, comment: &str) {
        let Some(statement) = Statement::parse(text) else {
            return;
        };
        if matches!(statement.operation, "smov" | "pmov") {
            self.moves += 1;
            self.copies += usize::from(comment.contains("copy for cssa"));
        }
        self.compile(&statement, comment);
    }

    fn bundle(&mut self, bundle: &Bundle<'_>) {
        let number = self.code.bundles as u32;
        let mut rest = bundle.trailing;
        let mut starts = false;
        while let Some(at) = rest.find("region ") {
            let (before, after) = (&rest[..at], &rest[at + 7..]);
            rest = after;
            if before.ends_with("Start ") || before.ends_with("Start/End empty ") {
                let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
                if let Ok(region) = after[..digits].parse() {
                    self.regions.entry(region).or_insert(number);
                    starts = true;
                }
            }
        }
        self.shapes.push(Shape {
            labelled: bundle.label.is_some(),
            starts,
            depth: bundle.depth.min(255) as u8,
            holds: match bundle.statements {
                0 => Holds::Nothing,
                count if self.copies > 0 && count == self.moves => Holds::Moves,
                _ => Holds::Work,
            },
        });
        (self.moves, self.copies) = (0, 0);
        self.code.bundles += 1;
    }
}

fn space(name: &str) -> Space {
    match name {
        "hbm" => Space::Hbm,
        "smem" => Space::Smem,
        "vmem" | "cmem" => Space::OnChip,
        _ => Space::Unknown,
    }
}

fn binary(base: &str, unsigned: bool) -> Option<Binary> {
    Some(match base {
        "sadd" => Binary::Add,
        "ssub" => Binary::Subtract,
        "smul" => Binary::Multiply,
        "sshll" => Binary::ShiftLeft,
        "sshrl" => Binary::ShiftRight,
        "sshra" => Binary::ShiftRightSigned,
        "sshllo" => Binary::ShiftLeftOnes,
        "sand" => Binary::And,
        "sor" => Binary::Or,
        "sxor" | "pxor" => Binary::Xor,
        "smin" if unsigned => Binary::MinimumUnsigned,
        "smax" if unsigned => Binary::MaximumUnsigned,
        "smin" => Binary::Minimum,
        "smax" => Binary::Maximum,
        "por" => Binary::Either,
        "pand" => Binary::Both,
        "pnand" => Binary::EitherFalse,
        "pnor" => Binary::NeitherTrue,
        _ => return None,
    })
}

/// Bytes of one window of a pipelined transfer, from the comment behind it.
fn window_bytes(comment: &str) -> Option<f64> {
    let after = |word: &str| comment.find(word).map(|at| &comment[at + word.len()..]);
    let size = after("element_size_in_bytes: ")?;
    let end = size.find(|c: char| !c.is_ascii_digit()).unwrap_or(size.len());
    let mut bytes: f64 = size[..end].parse().ok()?;
    // The first one of the line, not `dynamic_window_bounds`.
    let bounds = after("\nwindow_bounds: (")?;
    for word in bounds
        .split(')')
        .next()?
        .split(',')
        .map(str::trim)
        .filter(|word| !word.is_empty())
    {
        bytes *= word.parse::<f64>().ok()?;
    }
    Some(bytes)
}
