//! The schedule of one program: the operations of a grid step on the lanes of a core.
//!
//! **Rules.** An operation holds each lane it needs for its occupancy, from when its operands are there and the lane is free. Operations are taken in one
//! fixed order, by nominal depth, whatever the chip: a change of the hardware moves times but never the order, so that a slower
//! part can never make a program faster.
//!
//! **Groups.** A program interleaves `units` independent copies of its step (heads, chunks of a head). The copies of one operation stand in one group,
//! one after the other, and a dependent group follows in a stream: its first copy waits for the first copy of its operand, its last copy for the last.
//! Operations of the loop that carries the state cannot be grouped over the chunks of a head; they appear once per chunk, in a row.

use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};

use super::unit::{Instance, Lane, Occupancy, occupancy_of};
use super::vector;
use crate::hardware::Chip;
use crate::kernels::{Grid, Kernel, KernelOp, OpKind};

/// What a group waited for at its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Nothing: it started with the program.
    Start,
    /// An operand whose producer still occupied its lane.
    Data,
    /// An operand that had left its lane but not arrived.
    Latency,
    /// A lane that was taken.
    Unit,
    /// A block that was still on its way from device memory.
    Dma,
}

impl Wait {
    /// The word of traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Wait::Start => "start",
            Wait::Data => "data",
            Wait::Latency => "latency",
            Wait::Unit => "unit",
            Wait::Dma => "dma",
        }
    }
}

/// A lane held by a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Held {
    /// The lane.
    pub lane: Lane,
    /// Cycle it is held from.
    pub start: f64,
    /// Cycles it is held for.
    pub cycles: f64,
    /// What the group waited for there.
    pub wait: Wait,
    /// The group, by dependence or by lane, that it was waiting for.
    pub waited_for: Option<usize>,
}

impl Held {
    /// Cycle the lane is free again.
    #[must_use]
    pub fn end(&self) -> f64 {
        self.start + self.cycles
    }
}

/// A group on the lanes of a core.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// Index of the operation in the kernel.
    pub op: usize,
    /// Chunk of the program it belongs to, for operations of the loop that carries the state.
    pub chunk: u64,
    /// Groups it waits for.
    pub after: Vec<usize>,
    /// Independent copies in the group.
    pub copies: f64,
    /// Cycle its first lane starts at, or its operands are there if it needs none.
    pub start: f64,
    /// The lanes it needs, each from when its operands are there and the lane is free: the results of a product leave the array when the vector unit
    /// comes to fetch them.
    pub lanes: Vec<Held>,
    /// Cycle its last lane is free again.
    pub end: f64,
    /// Cycles from `end` until its last result is there.
    pub latency: f64,
    /// The group whose result came last, where it waited for one.
    pub operand: Option<usize>,
}

impl Placed {
    /// From its first lane's start to its last lane's end, for all copies.
    #[must_use]
    pub fn duration(&self) -> f64 {
        self.end - self.start
    }

    /// The lane that ends last, the longest of those.
    #[must_use]
    pub fn last_lane(&self) -> Option<&Held> {
        last_lane(&self.lanes)
    }

    /// Cycle the first copy's result is there.
    #[must_use]
    pub fn first_result(&self) -> f64 {
        self.start + self.duration() / self.copies + self.latency
    }

    /// Cycle the last copy's result is there.
    #[must_use]
    pub fn last_result(&self) -> f64 {
        self.end + self.latency
    }
}

/// The schedule of one program.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Groups in the order they were placed.
    pub groups: Vec<Placed>,
    /// Cycles from the first operation to the last result.
    pub makespan: f64,
    /// Occupied cycles of every lane, in lane order.
    pub busy: Vec<(Lane, f64)>,
}

impl Program {
    /// Occupied cycles of the matrix arrays, averaged over them.
    #[must_use]
    pub fn matrix_busy(&self, chip: &Chip) -> f64 {
        let total: f64 = self
            .busy
            .iter()
            .filter(|(l, _)| matches!(l, Lane::Mxu(_)))
            .map(|(_, b)| b)
            .sum();
        total / f64::from(chip.matrix_unit.count)
    }

    /// Occupied cycles of a lane.
    #[must_use]
    pub fn lane_busy(&self, lane: Lane) -> f64 {
        self.busy
            .iter()
            .find(|(l, _)| *l == lane)
            .map_or(0.0, |(_, b)| *b)
    }
}

/// How the work of a kernel is cut into programs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cut {
    /// Independent units (heads, or chunks of heads) of a program.
    pub units: u64,
    /// Chunks of a head of a program, for kernels that carry a state.
    pub chunks: u64,
    /// Programs that the value columns of a head are split over.
    pub value_parts: u64,
}

/// Weight of an operation in the fixed order: nominal latencies, the same for every chip.
fn nominal_weight(op: &KernelOp) -> u32 {
    match &op.kind {
        OpKind::Product { .. } => 40,
        OpKind::Vector {
            cross_lane: Some(_), ..
        } => 20,
        OpKind::Vector { .. } => 1,
        OpKind::Substitution { rows, .. } => 5 * *rows as u32,
        OpKind::Cholesky { rows } => 30 * *rows as u32,
    }
}

/// The fixed order of a kernel's operations, the same on every chip.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// Operations by nominal depth.
    sequence: Vec<usize>,
    /// Those of the loop that carries the state.
    carried: Vec<usize>,
    /// Of those, the ones that nothing in the loop waits for: the next chunk starts from their results.
    last: Vec<usize>,
    /// Of every operation, whether a large tensor it works on comes from memory, and goes there.
    through_memory: Vec<ThroughMemory>,
}

/// Whether a vector operation on a tensor that registers do not hold loads it, and stores its result. A chain of such operations runs register by register:
/// it loads at its start and stores at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThroughMemory {
    /// An operand comes from memory.
    pub loads: bool,
    /// The result goes to memory.
    pub stores: bool,
}

/// What of the loop that carries the state passes through memory.
fn through_memory(ops: &[KernelOp], carried: &[usize]) -> Vec<ThroughMemory> {
    let both = ThroughMemory {
        loads: true,
        stores: true,
    };
    let mut found = vec![both; ops.len()];
    // Operations of the loop that each of them depends on, itself included.
    let mut on: FxHashMap<usize, FxHashSet<usize>> = FxHashMap::default();
    for &i in carried {
        let mut of = FxHashSet::from_iter([i]);
        for j in &ops[i].after {
            of.extend(on.get(j).into_iter().flatten().copied());
        }
        on.insert(i, of);
    }
    let dims = |i: usize| match &ops[i].kind {
        OpKind::Vector { dims, .. } if ops[i].carried => Some(dims),
        _ => None,
    };
    // A register of `i` can go on to `j` where nothing else that `j` waits for has to see all of `i` first.
    let goes_on = |i: usize, j: usize| {
        dims(i).is_some()
            && dims(i) == dims(j)
            && ops[j]
                .after
                .iter()
                .all(|&other| other == i || on.get(&other).is_none_or(|of| !of.contains(&i)))
    };
    for &j in carried {
        if dims(j).is_none() {
            continue;
        }
        let large = |i: &&usize| matches!(ops[**i].kind, OpKind::Product { .. }) || dims(**i) == dims(j);
        let mut operands = ops[j].after.iter().filter(large).peekable();
        let from_registers = operands.peek().is_some() && operands.all(|&i| goes_on(i, j));
        found[j].loads = !from_registers;
    }
    for &i in carried {
        let mut readers = carried.iter().filter(|&&j| ops[j].after.contains(&i)).peekable();
        let to_registers = readers.peek().is_some() && readers.all(|&j| goes_on(i, j));
        found[i].stores = !to_registers;
    }
    found
}

impl Order {
    /// Operations by nominal depth, ties by their place in the graph; a dependence always comes first.
    #[must_use]
    pub fn of(kernel: &Kernel) -> Self {
        let ops = &kernel.ops;
        let mut depth = vec![0_u32; ops.len()];
        for (i, op) in ops.iter().enumerate() {
            let start = op.after.iter().map(|&j| depth[j] + nominal_weight(&ops[j])).max();
            depth[i] = start.unwrap_or(0);
        }
        let mut sequence: Vec<usize> = (0..ops.len()).collect();
        sequence.sort_unstable_by_key(|&i| (depth[i], i));
        let carried: Vec<usize> = sequence.iter().copied().filter(|&i| ops[i].carried).collect();
        let mut consumed = vec![false; ops.len()];
        for &i in &carried {
            for &j in &ops[i].after {
                consumed[j] = true;
            }
        }
        let last = carried.iter().copied().filter(|&i| !consumed[i]).collect();
        let through_memory = through_memory(ops, &carried);
        Order {
            sequence,
            carried,
            last,
            through_memory,
        }
    }
}

/// What the rest of a kernel needs to know of the schedule of its program.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// Cycles from the first operation to the last result.
    pub makespan: f64,
    /// Occupied cycles of the matrix arrays, averaged over them.
    pub matrix_busy: f64,
    /// Occupied cycles of the vector lanes, in the order of [`Lane::VECTOR`].
    pub vector_busy: [f64; 4],
    /// Cycles of the critical path spent on matrix, ALU, transcendental, cross-lane, load and store.
    pub path: [f64; 5],
    /// Cycles of the critical path in which a result is on its way.
    pub path_latency: f64,
}

/// Groups that an operation of the kernel was placed as: `first`, `first + stride`, ...
#[derive(Debug, Clone, Copy, Default)]
struct PlacedAs {
    first: usize,
    stride: usize,
    count: usize,
}

/// A [`Placed`] whose lists stand in the buffers of the [`Schedule`].
#[derive(Debug, Clone)]
struct Group {
    op: usize,
    chunk: u64,
    after: Range<usize>,
    lanes: Range<usize>,
    copies: f64,
    start: f64,
    end: f64,
    latency: f64,
    first_result: f64,
    last_result: f64,
    operand: Option<usize>,
}

/// When a lane is free again, by whom it was taken last, and for how many cycles in all.
type Slot = (f64, Option<usize>, f64);

/// Schedules programs one after the other in the same buffers.
#[derive(Debug, Default)]
pub struct Schedule {
    groups: Vec<Group>,
    after: Vec<usize>,
    held: Vec<Held>,
    wanted: Vec<(Lane, f64)>,
    placed_as: Vec<PlacedAs>,
    by_time: Vec<usize>,
    mxu: Vec<Slot>,
    vector: [Slot; 4],
    interleaved: bool,
}

impl Schedule {
    /// Schedules one program of a kernel on a core with `arrays` matrix arrays; `costs` are those of [`costs`] and `grid` is that of the kernel, cut into
    /// programs where it streams.
    pub fn run(
        &mut self,
        (kernel, order): (&Kernel, &Order),
        costs: &[Occupancy],
        arrays: usize,
        grid: Grid,
        cut: Cut,
    ) {
        self.interleaved = kernel.implementation.interleaved;
        self.groups.clear();
        self.after.clear();
        self.held.clear();
        self.placed_as.clear();
        self.placed_as.resize(kernel.ops.len(), PlacedAs::default());
        self.mxu.clear();
        self.mxu.resize(arrays, (0.0, None, 0.0));
        self.vector = [(0.0, None, 0.0); 4];
        // The last program of a unit may have fewer chunks: programs share what there is evenly.
        let sequential = grid.sequential.max(1).next_multiple_of(cut.chunks.max(1));
        let steps = (grid.parallel.max(1) * sequential) as f64;
        let copies = (cut.units * cut.chunks) as f64;
        let mut carried_done = false;
        for &index in &order.sequence {
            let op = &kernel.ops[index];
            if op.carried {
                if !carried_done {
                    carried_done = true;
                    self.place_loop((kernel, order), costs, steps, cut);
                }
                continue;
            }
            let from = self.after.len();
            for &j in &op.after {
                self.wait_for(j);
            }
            self.placed_as[index] = PlacedAs {
                first: self.groups.len(),
                stride: 1,
                count: 1,
            };
            self.place(
                (index, 0),
                from,
                &costs[index],
                copies,
                op.count as f64 / steps * copies,
            );
        }
    }

    /// The loop that carries the state: once per chunk, each chunk's operations after those of the chunk before.
    fn place_loop(&mut self, (kernel, order): (&Kernel, &Order), costs: &[Occupancy], steps: f64, cut: Cut) {
        let copies = cut.units as f64;
        let stride = order.carried.len();
        let base = self.groups.len();
        for (position, &index) in order.carried.iter().enumerate() {
            self.placed_as[index] = PlacedAs {
                first: base + position,
                stride,
                count: 0,
            };
        }
        for chunk in 0..cut.chunks {
            for &index in &order.carried {
                let op = &kernel.ops[index];
                let from = self.after.len();
                let mut reads_carry = true;
                for &j in &op.after {
                    if kernel.ops[j].carried {
                        let PlacedAs { first, count, .. } = self.placed_as[j];
                        self.after.push(first + (count - 1) * stride);
                        reads_carry = false;
                    } else {
                        self.wait_for(j);
                    }
                }
                if reads_carry && chunk > 0 {
                    let before = chunk as usize - 1;
                    let placed_as = &self.placed_as;
                    self.after
                        .extend(order.last.iter().map(|&j| placed_as[j].first + before * stride));
                }
                self.placed_as[index].count += 1;
                self.place(
                    (index, chunk),
                    from,
                    &costs[index],
                    copies,
                    op.count as f64 / steps * copies,
                );
            }
        }
    }

    /// Appends the groups of operation `j` to those that the next group waits for.
    fn wait_for(&mut self, j: usize) {
        let PlacedAs { first, stride, count } = self.placed_as[j];
        self.after.extend((0..count).map(|i| first + i * stride));
    }

    /// Places `instances` instances of an operation in `copies` independent copies after the groups from `from` on.
    fn place(
        &mut self,
        (op, chunk): (usize, u64),
        from: usize,
        cost: &Occupancy,
        copies: f64,
        instances: f64,
    ) {
        self.wanted.clear();
        if cost.matrix > 0.0 {
            // As many arrays as there are tiles, the ones that are free first.
            let wanted = (cost.matrix_tiles * instances).ceil().max(1.0) as usize;
            let arrays = wanted.min(self.mxu.len());
            let per_array = cost.matrix * instances / arrays.max(1) as f64;
            self.by_time.clear();
            self.by_time.extend(0..self.mxu.len());
            let mxu = &self.mxu;
            self.by_time
                .sort_unstable_by(|&a, &b| mxu[a].0.total_cmp(&mxu[b].0).then(a.cmp(&b)));
            let free_first = self.by_time.iter().take(arrays);
            self.wanted
                .extend(free_first.map(|&i| (Lane::Mxu(i as u8), per_array)));
        }
        for (lane, cycles) in Lane::VECTOR.into_iter().zip(cost.vector) {
            if cycles > 0.0 {
                self.wanted.push((lane, cycles * instances));
            }
        }
        let longest = self.wanted.iter().map(|(_, cycles)| *cycles).fold(0.0, f64::max);

        let (mut ready, mut wait, mut operand) = (0.0_f64, Wait::Start, None);
        let tail = longest * (1.0 - copies.recip());
        let mut last_there = 0.0_f64;
        for &j in &self.after[from..] {
            let producer = &self.groups[j];
            // First copy after the first, last copy after the last. Copies that stay together wait for each other.
            let together = producer.last_result - tail;
            let there = if self.interleaved {
                last_there = last_there.max(producer.last_result);
                producer.first_result
            } else {
                producer.first_result.max(together)
            };
            if there > ready {
                ready = there;
                wait = if producer.latency > 0.0 {
                    Wait::Latency
                } else {
                    Wait::Data
                };
                operand = Some(j);
            }
        }
        let index = self.groups.len();
        let first_held = self.held.len();
        let (mut start, mut end) = (f64::INFINITY, f64::NEG_INFINITY);
        for &(lane, cycles) in &self.wanted {
            let slot = match lane {
                Lane::Mxu(i) => &mut self.mxu[i as usize],
                Lane::Vpu | Lane::DmaIn | Lane::DmaOut => &mut self.vector[0],
                Lane::Transcendental => &mut self.vector[1],
                Lane::CrossLane => &mut self.vector[2],
                Lane::Vmem => &mut self.vector[3],
            };
            let (free, by, busy) = *slot;
            let late = free > ready;
            let held_from = ready.max(free);
            *slot = (held_from + cycles, Some(index), busy + cycles);
            start = start.min(held_from);
            end = end.max(held_from + cycles);
            self.held.push(Held {
                lane,
                start: held_from,
                cycles,
                wait: if late { Wait::Unit } else { wait },
                waited_for: if late { by } else { operand },
            });
        }
        let start = if start.is_finite() { start } else { ready };
        let mut end = end.max(start);
        let mut of_first = end - start;
        if self.interleaved {
            // A lane is charged from the first copy on, and the last copy comes when its own operand does.
            of_first = longest;
            end = end.max(last_there + longest - tail);
        }
        self.groups.push(Group {
            op,
            chunk,
            after: from..self.after.len(),
            lanes: first_held..self.held.len(),
            copies,
            start,
            end,
            latency: cost.latency,
            first_result: start + of_first / copies + cost.latency,
            last_result: end + cost.latency,
            operand,
        });
    }

    /// Cycles from the first operation to the last result.
    fn makespan(&self) -> f64 {
        self.groups
            .iter()
            .map(|group| group.last_result)
            .fold(0.0, f64::max)
    }

    /// The figures of the program scheduled last.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let makespan = self.makespan();
        let (path, path_latency) = self.critical_path(makespan);
        let matrix: f64 = self.mxu.iter().map(|slot| slot.2).sum();
        Figures {
            makespan,
            matrix_busy: matrix / self.mxu.len() as f64,
            vector_busy: self.vector.map(|slot| slot.2),
            path,
            path_latency,
        }
    }

    /// Cycles of the critical path spent on each unit (matrix, ALU, transcendental, cross-lane, load and store) and on latency.
    fn critical_path(&self, makespan: f64) -> ([f64; 5], f64) {
        let mut on = [0.0; 5];
        let mut latency = 0.0;
        let last = (0..self.groups.len()).max_by(|&a, &b| {
            self.groups[a]
                .last_result
                .total_cmp(&self.groups[b].last_result)
                .then(b.cmp(&a))
        });
        let Some(mut at) = last else { return (on, latency) };
        let mut until = makespan;
        loop {
            let group = &self.groups[at];
            // From the moment its lane is free to the moment the path goes on, the result is on its way.
            latency += (until - group.end).max(0.0);
            let last = last_lane(&self.held[group.lanes.clone()]);
            let (start, before) =
                last.map_or((group.start, group.operand), |held| (held.start, held.waited_for));
            let occupied = (until.min(group.end) - start).max(0.0);
            match last.map(|held| held.lane) {
                Some(Lane::Mxu(_)) => on[0] += occupied,
                Some(Lane::Vpu) => on[1] += occupied,
                Some(Lane::Transcendental) => on[2] += occupied,
                Some(Lane::CrossLane) => on[3] += occupied,
                Some(Lane::Vmem | Lane::DmaIn | Lane::DmaOut) => on[4] += occupied,
                None => latency += occupied,
            }
            until = start;
            match before {
                None => return (on, latency),
                Some(before) => at = before,
            }
        }
    }

    /// The program scheduled last.
    #[must_use]
    pub fn program(&self) -> Program {
        let arrays = self.mxu.iter().enumerate();
        let arrays = arrays.map(|(i, slot)| (Lane::Mxu(i as u8), slot.2));
        let vector = Lane::VECTOR.into_iter().zip(self.vector.map(|slot| slot.2));
        Program {
            groups: self
                .groups
                .iter()
                .map(|group| Placed {
                    op: group.op,
                    chunk: group.chunk,
                    after: self.after[group.after.clone()].to_vec(),
                    copies: group.copies,
                    start: group.start,
                    lanes: self.held[group.lanes.clone()].to_vec(),
                    end: group.end,
                    latency: group.latency,
                    operand: group.operand,
                })
                .collect(),
            makespan: self.makespan(),
            busy: arrays.chain(vector).collect(),
        }
    }
}

/// The lane that ends last, the longest of those.
fn last_lane(lanes: &[Held]) -> Option<&Held> {
    lanes
        .iter()
        .max_by(|a, b| a.end().total_cmp(&b.end()).then(a.cycles.total_cmp(&b.cycles)))
}

/// Registers that the tensor of every vector operation fills, 0 for others: what depends on nothing but the shape of a register.
pub fn registers(kernel: &Kernel, chip: &Chip, registers: &mut Vec<f64>) {
    registers.clear();
    registers.extend(kernel.ops.iter().map(|op| vector::registers_of(chip, &op.kind)));
}

/// What one instance of every operation of a kernel asks of a core. `registers` are those of [`registers`] on this chip.
pub fn costs(
    (kernel, order): (&Kernel, &Order),
    chip: &Chip,
    registers: &[f64],
    value_parts: u64,
    costs: &mut Vec<Occupancy>,
) {
    costs.clear();
    let ops = kernel.ops.iter().zip(&order.through_memory).zip(registers);
    costs.extend(ops.map(|((op, &through), &registers)| of_op(op, through, chip, registers, value_parts)));
}

/// What one instance of an operation asks of a core; a carried state that the registers do not hold is loaded at the start of a chain of operations and stored at its end; one of a loop inside the step delays it by the
/// latency of every trip, one that only some steps execute by its share of the latency.
fn of_op(op: &KernelOp, through: ThroughMemory, chip: &Chip, registers: f64, value_parts: u64) -> Occupancy {
    let instance = Instance {
        op: &op.kind,
        registers,
        value_columns: op.value_columns,
        value_parts,
    };
    let mut cost = occupancy_of(chip, &instance);
    if op.carried {
        cost.vector[3] = cost.vector[3].max(vector::through_memory(chip, &op.kind, registers, through));
    }
    Occupancy {
        latency: cost.latency * op.serial as f64 * op.share,
        ..cost
    }
}
