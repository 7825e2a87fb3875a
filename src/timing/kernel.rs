//! A kernel on a chip.

use super::vector::{self, SlotCycles};
use super::{COMPUTE_OVERLAP, DMA_OVERLAP, GRID_STEP_CYCLES, matrix, memory, soft_maximum};
use crate::hardware::{Architecture, Chip};
use crate::kernels::{Kernel, KernelOp, OpKind};
use crate::report::result::Bound;

/// Units of a parallel kernel that one program interleaves at most (Tokamax batches up to 16 heads).
const MOST_UNITS_PER_PROGRAM: u64 = 16;
/// Narrowest slice of value columns a program works on when the state is split over programs.
const NARROWEST_VALUE_COLUMNS: u64 = 32;

/// Something about a kernel on a chip that its user should know.
#[derive(Debug, Clone, PartialEq)]
pub enum Remark {
    /// The working set of a step did not fit on chip; the value columns were split over this many programs.
    ValueColumnsSplit {
        /// Programs per head.
        parts: u64,
        /// Working set without the split, in bytes.
        needed: u64,
        /// Capacity, in bytes.
        capacity: u64,
    },
    /// The working set does not fit on chip however it is split.
    DoesNotFit {
        /// Working set, in bytes.
        needed: u64,
        /// Capacity, in bytes.
        capacity: u64,
    },
    /// Fewer independent programs than cores.
    CoresIdle {
        /// Cores used.
        used: u64,
        /// Cores of the device.
        cores: u64,
    },
}

/// Time of a kernel, taken apart. Cycles are those of one core at the chip's clock.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTime {
    /// Predicted time, in microseconds.
    pub total_us: f64,
    /// Time the matrix units are occupied.
    pub mxu_us: f64,
    /// Time every vector slot class is occupied, in cycles of the busiest core.
    pub slots: SlotCycles,
    /// Time the busiest vector slot class is occupied.
    pub vpu_us: f64,
    /// Time the transcendental slots are occupied.
    pub transcendental_us: f64,
    /// Time the cross-lane slots are occupied.
    pub cross_lane_us: f64,
    /// Time of the HBM traffic at the achievable bandwidth.
    pub hbm_us: f64,
    /// Time of the dependence chains of all grid steps, one after the other.
    pub latency_us: f64,
    /// Launch and grid-step overhead.
    pub launch_us: f64,
    /// What binds the kernel.
    pub bound: Bound,
    /// What would bind it next.
    pub next_bound: Bound,
    /// Cores that work.
    pub cores_used: u64,
    /// Units a program interleaves.
    pub units_per_program: u64,
    /// Programs that the value columns of a head are split over.
    pub value_parts: u64,
    /// Working set of a program, in bytes.
    pub working_set: u64,
    /// Useful part of the occupied matrix tiles.
    pub mxu_lane: f64,
    /// Matrix FLOP/s of the device over its peak, each format against its own.
    pub mxu_achieved: f64,
    /// What its user should know.
    pub remarks: Vec<Remark>,
}

/// Work of one unit (head, or chunk of a head) in one grid step.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    mxu: f64,
    slots: SlotCycles,
    /// Longest chain from the first operation of the step to the last.
    chain: f64,
    /// Longest chain inside the loop that carries the state.
    carried_chain: f64,
}

/// Times a kernel on a chip.
#[must_use]
pub fn time_kernel(kernel: &Kernel, chip: &Chip) -> KernelTime {
    let mut remarks = Vec::new();
    let capacity = chip.on_chip.capacity.get() as u64;
    let parts = value_parts(kernel, chip, capacity, &mut remarks);
    let parallel = kernel.grid.parallel * parts;
    let cores = u64::from(chip.cores_per_device);
    let units = units_per_program(kernel, parallel, parts, cores, capacity);
    let programs = parallel.div_ceil(units);
    let cores_used = programs.min(cores);
    if kernel.grid.sequential > 1 && cores_used < cores {
        remarks.push(Remark::CoresIdle {
            used: cores_used,
            cores,
        });
    }
    let step = step_work(kernel, chip, parts);

    // Steps that the busiest core runs one after the other, and units in each.
    let chunks = kernel.steps_per_program.max(1);
    let rounds = programs.div_ceil(cores) * kernel.grid.sequential.div_ceil(chunks);
    let (rounds, units, chunks) = (rounds as f64, units as f64, chunks as f64);
    let mxu = step.mxu * units * chunks * rounds;
    let slots = step.slots * (units * chunks * rounds);
    // Chains of different heads and chunks of a program interleave; those of the state follow each other.
    let chain = (step.chain + (chunks - 1.0) * step.carried_chain) * rounds;
    let micros = |cycles: f64| cycles / chip.clock().get() * 1e6;

    let bytes = kernel.hbm_bytes() as f64;
    let hbm_us = memory::stream_time(chip, bytes, cores_used as f64).micros();
    let launch_us = chip.launch.micros() + micros(GRID_STEP_CYCLES * rounds);
    let throughput = soft_maximum(mxu, slots.busiest(), COMPUTE_OVERLAP);
    let compute_us = micros(throughput.max(chain));
    let total_us = soft_maximum(compute_us, hbm_us, DMA_OVERLAP) + launch_us;

    let mut bounds = [
        (Bound::Mxu, micros(mxu)),
        (Bound::Vpu, micros(slots.alu)),
        (Bound::Transcendental, micros(slots.transcendental)),
        (Bound::CrossLane, micros(slots.cross_lane)),
        (Bound::Vmem, micros(slots.load.max(slots.store))),
        (Bound::Hbm, hbm_us),
        (Bound::Latency, micros(chain)),
        (Bound::Launch, launch_us),
    ];
    bounds.sort_by(|a, b| b.1.total_cmp(&a.1));
    let ideal = matrix::ideal_cycles(chip, &kernel.work.matrix_flops) / cores_used as f64;
    KernelTime {
        total_us,
        mxu_us: micros(mxu),
        vpu_us: micros(slots.busiest()),
        transcendental_us: micros(slots.transcendental),
        cross_lane_us: micros(slots.cross_lane),
        slots,
        hbm_us,
        latency_us: micros(chain),
        launch_us,
        bound: bounds[0].0,
        next_bound: bounds[1].0,
        cores_used,
        units_per_program: units as u64,
        value_parts: parts,
        working_set: working_set(kernel, parts, units as u64 * kernel.steps_per_program),
        mxu_lane: if mxu > 0.0 { (ideal / mxu).min(1.0) } else { 0.0 },
        mxu_achieved: micros(ideal) / total_us * (cores_used as f64 / cores as f64),
        remarks,
    }
}

/// Bytes a program needs on chip: two buffers of every block that streams, the carried state, the intermediates of a step.
fn working_set(kernel: &Kernel, parts: u64, units: u64) -> u64 {
    let streamed = 2 * kernel.hbm_bytes() / kernel.grid.steps().max(1);
    units * (streamed + kernel.live_bytes + kernel.carried_bytes / parts)
}

/// Programs that the value columns of a head are split over so that the working set fits.
fn value_parts(kernel: &Kernel, chip: &Chip, capacity: u64, remarks: &mut Vec<Remark>) -> u64 {
    let fits = |parts| {
        // Registers of a multiprocessor hold the carried state besides its shared memory.
        let registers = match chip.architecture {
            Architecture::Tpu => 0,
            Architecture::Gpu => {
                4 * u64::from(chip.vector_unit.registers)
                    * u64::from(chip.vector_unit.lanes)
                    * u64::from(chip.vector_unit.sublanes)
            }
        };
        let streamed = 2 * kernel.hbm_bytes() / kernel.grid.steps().max(1);
        // Intermediates are produced and consumed tile by tile; the state has to stay.
        streamed.min(capacity / 2) / parts + kernel.carried_bytes / parts <= capacity + registers
    };
    if kernel.carried_bytes == 0 || fits(1) {
        return 1;
    }
    let columns = kernel
        .ops
        .iter()
        .filter(|op| op.value_columns)
        .filter_map(|op| match op.kind {
            OpKind::Product { n, .. } => Some(n),
            _ => None,
        })
        .max()
        .unwrap_or(1);
    let mut parts = 1;
    while !fits(parts) && columns / (2 * parts) >= NARROWEST_VALUE_COLUMNS {
        parts *= 2;
    }
    let needed = working_set(kernel, 1, 1);
    remarks.push(if fits(parts) {
        Remark::ValueColumnsSplit {
            parts,
            needed,
            capacity,
        }
    } else {
        Remark::DoesNotFit { needed, capacity }
    });
    parts
}

fn units_per_program(kernel: &Kernel, parallel: u64, parts: u64, cores: u64, capacity: u64) -> u64 {
    let wanted = kernel.units_per_program.unwrap_or_else(|| {
        let per_unit = working_set(kernel, parts, 1).max(1);
        // Never so many that cores run dry.
        (capacity / per_unit)
            .min(MOST_UNITS_PER_PROGRAM)
            .min(parallel / cores.max(1))
    });
    wanted.clamp(1, parallel.max(1))
}

/// Work of one unit in one step: the kernel's totals over the grid, the chain over the operations of the step.
fn step_work(kernel: &Kernel, chip: &Chip, parts: u64) -> Step {
    let steps = kernel.grid.steps().max(1) as f64;
    let mut step = Step::default();
    let mut finish = vec![0.0_f64; kernel.ops.len()];
    let mut carried_finish = vec![0.0_f64; kernel.ops.len()];
    for (i, op) in kernel.ops.iter().enumerate() {
        let cost = operation(op, chip, parts);
        let per_step = op.count as f64 / steps;
        step.mxu += cost.mxu * per_step;
        step.slots += cost.slots * per_step;
        let start = op.after.iter().map(|&j| finish[j]).fold(0.0, f64::max);
        let occupied = cost.mxu.max(cost.slots.busiest()) * per_step;
        let latency = cost.latency * op.serial as f64;
        finish[i] = start + latency + occupied;
        if op.carried {
            let start = op.after.iter().map(|&j| carried_finish[j]).fold(0.0, f64::max);
            carried_finish[i] = start + latency + occupied;
        }
    }
    step.chain = finish.iter().copied().fold(0.0, f64::max);
    step.carried_chain = carried_finish.iter().copied().fold(0.0, f64::max);
    // The boundary of a kernel is loaded and stored once.
    let register_bytes = 4.0 * chip.register_elements();
    step.slots += vector::traffic(
        chip,
        kernel.read_bytes() as f64 / steps / register_bytes,
        kernel.write_bytes() as f64 / steps / register_bytes,
    );
    step
}

struct OpCost {
    mxu: f64,
    slots: SlotCycles,
    latency: f64,
}

fn operation(op: &KernelOp, chip: &Chip, parts: u64) -> OpCost {
    let latency = &chip.latency;
    match &op.kind {
        OpKind::Product {
            m,
            k,
            n,
            dtype,
            passes,
        } => {
            let columns = if op.value_columns { n.div_ceil(parts) } else { *n };
            let registers =
                |rows: u64, columns: u64| vector::registers_in_place(chip, rows as f64, columns as f64);
            // Operands come from on-chip memory at their own width, results return as f32.
            let packing = dtype.bytes() as f64 / 4.0;
            let loaded = (registers(*m, *k) + registers(*k, columns)) * packing;
            let stored = registers(*m, columns);
            OpCost {
                mxu: matrix::product_cycles(chip, *m, *k, columns, *dtype, *passes),
                slots: vector::traffic(chip, loaded, stored),
                latency: matrix::result_latency_cycles(chip),
            }
        }
        OpKind::Vector {
            dims,
            cost,
            cross_lane,
            cross_lane_ops,
        } => {
            let mut slots = vector::operation(chip, dims, *cost, *cross_lane, *cross_lane_ops);
            if op.value_columns {
                slots = slots * (parts as f64).recip();
            }
            let lanes = if cross_lane.is_some() {
                latency.cross_lane
            } else {
                0.0
            };
            let function = if cost.transcendental > 0.0 {
                latency.transcendental
            } else {
                0.0
            };
            OpCost {
                mxu: 0.0,
                slots,
                latency: latency.vector + lanes + function,
            }
        }
        OpKind::Cholesky { rows } => {
            let (slots, latency) = vector::cholesky(chip, *rows);
            OpCost {
                mxu: 0.0,
                slots,
                latency,
            }
        }
        OpKind::Substitution { rows, columns } => {
            let columns = if op.value_columns {
                columns.div_ceil(parts)
            } else {
                *columns
            };
            let (slots, latency) = vector::substitution(chip, *rows, columns);
            OpCost {
                mxu: 0.0,
                slots,
                latency,
            }
        }
    }
}
