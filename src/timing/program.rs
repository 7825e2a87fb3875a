//! The schedule of one program: the operations of a grid step on the lanes of a core.
//!
//! **Rules.** An operation holds each lane it needs for its occupancy, from when its operands are there and the lane is free. Operations are taken in one
//! fixed order, by nominal depth, whatever the chip: a change of the hardware moves times but never the order, so that a slower
//! part can never make a program faster.
//!
//! **Groups.** A program interleaves `units` independent copies of its step (heads, chunks of a head). The copies of one operation stand in one group,
//! one after the other, and a dependent group follows in a stream: its first copy waits for the first copy of its operand, its last copy for the last.
//! Operations of the loop that carries the state cannot be grouped over the chunks of a head; they appear once per chunk, in a row.

use super::unit::{Lane, Occupancy, occupancy};
use super::vector;
use crate::hardware::Chip;
use crate::kernels::Kernel;

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
        self.lanes
            .iter()
            .max_by(|a, b| a.end().total_cmp(&b.end()).then(a.cycles.total_cmp(&b.cycles)))
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
fn nominal_weight(op: &crate::kernels::KernelOp) -> u32 {
    use crate::kernels::OpKind;
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

/// Schedules one program of a kernel.
#[must_use]
pub fn schedule(kernel: &Kernel, chip: &Chip, cut: Cut) -> Program {
    let mut lanes = LaneTable::new(chip);
    // The last program of a unit may have fewer chunks: programs share what there is evenly.
    let sequential = kernel.grid.sequential.max(1).next_multiple_of(cut.chunks.max(1));
    let steps = (kernel.grid.parallel.max(1) * sequential) as f64;
    let order = order(kernel);
    // Groups behind every operation of the kernel, in chunk order.
    let mut placed_as: Vec<Vec<usize>> = vec![Vec::new(); kernel.ops.len()];
    let mut groups: Vec<Placed> = Vec::with_capacity(kernel.ops.len() * 2);
    let carried: Vec<usize> = order.iter().copied().filter(|&i| kernel.ops[i].carried).collect();
    let mut carried_done = false;
    for &index in &order {
        let op = &kernel.ops[index];
        if op.carried {
            if carried_done {
                continue;
            }
            carried_done = true;
            place_loop(
                kernel,
                chip,
                cut,
                steps,
                &carried,
                &mut placed_as,
                &mut groups,
                &mut lanes,
            );
            continue;
        }
        let cost = of_op(op, chip, cut);
        let copies = (cut.units * cut.chunks) as f64;
        let after: Vec<usize> = op.after.iter().flat_map(|&j| placed_as[j].clone()).collect();
        let placed = lanes.place(
            &groups,
            index,
            0,
            &after,
            &cost,
            copies,
            op.count as f64 / steps * copies,
        );
        placed_as[index].push(groups.len());
        groups.push(placed);
    }
    let makespan = groups.iter().map(Placed::last_result).fold(0.0, f64::max);
    Program {
        makespan,
        busy: lanes.busy(),
        groups,
    }
}

/// The loop that carries the state: once per chunk, each chunk's operations after those of the chunk before.
#[expect(
    clippy::too_many_arguments,
    reason = "the tables of the schedule under construction"
)]
fn place_loop(
    kernel: &Kernel,
    chip: &Chip,
    cut: Cut,
    steps: f64,
    carried: &[usize],
    placed_as: &mut [Vec<usize>],
    groups: &mut Vec<Placed>,
    lanes: &mut LaneTable,
) {
    let inside = |j: usize| kernel.ops[j].carried;
    // Results that the next chunk starts from: operations of the loop that nothing in the loop waits for.
    let mut last: Vec<usize> = Vec::new();
    for chunk in 0..cut.chunks {
        let mut here: Vec<Option<usize>> = vec![None; kernel.ops.len()];
        for &index in carried {
            let op = &kernel.ops[index];
            let cost = of_op(op, chip, cut);
            let mut after = Vec::new();
            let mut reads_carry = true;
            for &j in &op.after {
                if inside(j) {
                    after.extend(here[j]);
                    reads_carry = false;
                } else {
                    after.extend(placed_as[j].iter().copied());
                }
            }
            if reads_carry {
                after.extend(last.iter().copied());
            }
            let copies = cut.units as f64;
            let placed = lanes.place(
                groups,
                index,
                chunk,
                &after,
                &cost,
                copies,
                op.count as f64 / steps * copies,
            );
            here[index] = Some(groups.len());
            placed_as[index].push(groups.len());
            groups.push(placed);
        }
        let consumed: Vec<usize> = carried
            .iter()
            .flat_map(|&i| kernel.ops[i].after.iter().copied())
            .filter(|&j| inside(j))
            .collect();
        last = carried
            .iter()
            .filter(|i| !consumed.contains(i))
            .filter_map(|&i| here[i])
            .collect();
    }
}

/// What one instance of an operation asks of a core; a carried state that the registers do not hold is loaded and stored by each; one of a loop inside the step delays it by the
/// latency of every trip, one that only some steps execute by its share of the latency.
fn of_op(op: &crate::kernels::KernelOp, chip: &Chip, cut: Cut) -> Occupancy {
    let mut cost = occupancy(chip, &op.kind, op.value_columns, cut.value_parts);
    if op.carried {
        cost.vector[3] = cost.vector[3].max(vector::through_memory(chip, &op.kind));
    }
    Occupancy {
        latency: cost.latency * op.serial as f64 * op.share,
        ..cost
    }
}

/// Operations by nominal depth, ties by their place in the graph; a dependence always comes first.
fn order(kernel: &Kernel) -> Vec<usize> {
    let mut depth = vec![0_u32; kernel.ops.len()];
    for (i, op) in kernel.ops.iter().enumerate() {
        let start = op
            .after
            .iter()
            .map(|&j| depth[j] + nominal_weight(&kernel.ops[j]))
            .max()
            .unwrap_or(0);
        depth[i] = start;
    }
    let mut order: Vec<usize> = (0..kernel.ops.len()).collect();
    order.sort_by_key(|&i| (depth[i], i));
    order
}

/// When every lane of a core is free again, and by whom it was taken last.
struct LaneTable {
    mxu: Vec<(f64, Option<usize>, f64)>,
    vector: [(f64, Option<usize>, f64); 4],
}

impl LaneTable {
    fn new(chip: &Chip) -> Self {
        LaneTable {
            mxu: vec![(0.0, None, 0.0); chip.matrix_unit.count as usize],
            vector: [(0.0, None, 0.0); 4],
        }
    }

    fn busy(&self) -> Vec<(Lane, f64)> {
        let arrays = self
            .mxu
            .iter()
            .enumerate()
            .map(|(i, slot)| (Lane::Mxu(i as u8), slot.2));
        arrays
            .chain(
                Lane::VECTOR
                    .into_iter()
                    .zip(self.vector.iter().map(|slot| slot.2)),
            )
            .collect()
    }

    /// Places `instances` instances in `copies` independent copies.
    #[expect(clippy::too_many_arguments, reason = "what a placement depends on")]
    fn place(
        &mut self,
        groups: &[Placed],
        op: usize,
        chunk: u64,
        after: &[usize],
        cost: &Occupancy,
        copies: f64,
        instances: f64,
    ) -> Placed {
        // As many arrays as there are tiles, the ones that are free first.
        let wanted = (cost.matrix_tiles * instances).ceil().max(1.0) as usize;
        let arrays = if cost.matrix > 0.0 {
            wanted.min(self.mxu.len())
        } else {
            0
        };
        let mut by_time: Vec<usize> = (0..self.mxu.len()).collect();
        by_time.sort_by(|&a, &b| self.mxu[a].0.total_cmp(&self.mxu[b].0).then(a.cmp(&b)));
        by_time.truncate(arrays);
        let mut wanted_lanes: Vec<(Lane, f64)> = Vec::with_capacity(arrays + 2);
        let per_array = cost.matrix * instances / arrays.max(1) as f64;
        wanted_lanes.extend(by_time.iter().map(|&i| (Lane::Mxu(i as u8), per_array)));
        for (lane, cycles) in Lane::VECTOR.into_iter().zip(cost.vector) {
            if cycles > 0.0 {
                wanted_lanes.push((lane, cycles * instances));
            }
        }
        let longest = wanted_lanes.iter().map(|(_, cycles)| *cycles).fold(0.0, f64::max);

        let (mut ready, mut wait, mut operand) = (0.0_f64, Wait::Start, None);
        for &j in after {
            let producer = &groups[j];
            // First copy after the first, last copy after the last.
            let first = producer.first_result();
            let last = producer.last_result() - longest * (1.0 - copies.recip());
            let there = first.max(last);
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
        let index = groups.len();
        let mut lanes: Vec<Held> = Vec::with_capacity(wanted_lanes.len());
        for (lane, cycles) in wanted_lanes {
            let slot = self.slot(lane);
            let (free, by, busy) = *slot;
            let late = free > ready;
            let start = ready.max(free);
            *slot = (start + cycles, Some(index), busy + cycles);
            lanes.push(Held {
                lane,
                start,
                cycles,
                wait: if late { Wait::Unit } else { wait },
                waited_for: if late { by } else { operand },
            });
        }
        let start = lanes.iter().map(|held| held.start).fold(f64::INFINITY, f64::min);
        let start = if start.is_finite() { start } else { ready };
        Placed {
            op,
            chunk,
            after: after.to_vec(),
            copies,
            start,
            end: lanes.iter().map(Held::end).fold(start, f64::max),
            lanes,
            latency: cost.latency,
            operand,
        }
    }

    fn slot(&mut self, lane: Lane) -> &mut (f64, Option<usize>, f64) {
        match lane {
            Lane::Mxu(i) => &mut self.mxu[i as usize],
            Lane::Vpu | Lane::DmaIn | Lane::DmaOut => &mut self.vector[0],
            Lane::Transcendental => &mut self.vector[1],
            Lane::CrossLane => &mut self.vector[2],
            Lane::Vmem => &mut self.vector[3],
        }
    }
}
