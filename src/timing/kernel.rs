//! A kernel on a chip: how it is cut into programs, the schedule of a program, the pipeline of programs, and what binds.

use super::pipeline::{self, Pipeline};
use super::program::{self, Cut, Program};
use super::unit::Lane;
use super::{matrix, memory};
use crate::hardware::{Architecture, Chip};
use crate::kernels::{Kernel, OpKind};
use crate::report::result::Bound;

/// Units of a parallel kernel that one program interleaves at most (Tokamax batches up to 16 heads).
const MOST_UNITS_PER_PROGRAM: u64 = 16;
/// Programs per core that a kernel which streams rows may be cut into. A fixed set, so that more rows never meet a better fit.
const STREAMED_PROGRAMS: [u64; 7] = [1, 4, 16, 64, 256, 1024, 4096];
/// Blocks in flight of a multiprocessor: stages of the software pipeline of a program, or programs side by side.
const GPU_BUFFERS: usize = 4;
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

/// Time of a kernel, taken apart.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTime {
    /// Predicted time, in microseconds.
    pub total_us: f64,
    /// Time the matrix units are occupied, on the busiest core.
    pub mxu_us: f64,
    /// Time the busiest vector slot class is occupied.
    pub vpu_us: f64,
    /// Time the ALU slots are occupied.
    pub alu_us: f64,
    /// Time the transcendental slots are occupied.
    pub transcendental_us: f64,
    /// Time the cross-lane slots are occupied.
    pub cross_lane_us: f64,
    /// Time the load and store slots are occupied.
    pub vmem_us: f64,
    /// Time of the HBM traffic at the achievable bandwidth.
    pub hbm_us: f64,
    /// Time in which the critical path of the programs waits for results on their way: dependent latency, and what the issue loses.
    pub latency_us: f64,
    /// Launch, grid steps, and the latency of transfers that nothing covers.
    pub launch_us: f64,
    /// Cycles of the schedule of a program over the cycles it takes.
    pub issue_efficiency: f64,
    /// What binds the kernel.
    pub bound: Bound,
    /// What would bind it next.
    pub next_bound: Bound,
    /// Cores that work.
    pub cores_used: u64,
    /// Independent units of the grid.
    pub grid_parallel: u64,
    /// Programs of the busiest core, one after the other.
    pub programs_per_core: u64,
    /// How the work is cut into programs.
    pub cut: Cut,
    /// Working set of a program, in bytes.
    pub working_set: u64,
    /// Bytes read from and written to HBM on this chip.
    pub hbm_bytes: u64,
    /// Useful part of the occupied matrix tiles.
    pub mxu_lane: f64,
    /// Matrix FLOP/s of the device over its peak, each format against its own.
    pub mxu_achieved: f64,
    /// Schedule of one program, in cycles.
    pub program: Program,
    /// Pipeline of the programs of the busiest core, in cycles.
    pub pipeline: Pipeline,
    /// What its user should know.
    pub remarks: Vec<Remark>,
}

/// Times a kernel on a chip.
///
/// Keys and values of attention are read once where those of a key head fit on chip beside two more of them being fetched (programs of a key head
/// follow each other), else once for every pair of blocks of every query head. Caches of a GPU are not modelled.
#[must_use]
pub fn time_kernel(kernel: &Kernel, chip: &Chip) -> KernelTime {
    let capacity = chip.on_chip.capacity.get() as u64;
    if kernel.streams {
        // Few programs leave the fetch of the first uncovered, many pay for their grid steps; too few do not fit.
        let cores = u64::from(chip.cores_per_device);
        let cuts = STREAMED_PROGRAMS.map(|of_a_core| kernel.in_programs(of_a_core * cores));
        let finest = &cuts[cuts.len() - 1];
        return cuts[..cuts.len() - 1]
            .iter()
            .filter(|cut| working_set(cut, 1, 1) <= capacity)
            .map(|cut| time(cut, chip, 0))
            .fold(time(finest, chip, 0), |best, next| {
                if next.total_us < best.total_us { next } else { best }
            });
    }
    let resident = 2 * kernel.resident_bytes();
    if resident == 0 || working_set(kernel, 1, 1) + resident <= capacity {
        time(kernel, chip, resident)
    } else {
        time(&kernel.streaming(), chip, 0)
    }
}

/// Times a kernel beside `resident` bytes that stay on chip.
fn time(kernel: &Kernel, chip: &Chip, resident: u64) -> KernelTime {
    let mut remarks = Vec::new();
    let capacity = (chip.on_chip.capacity.get() as u64).saturating_sub(resident);
    let value_parts = value_parts(kernel, chip, capacity, &mut remarks);
    let parallel = kernel.grid.parallel * value_parts;
    let implementation = &kernel.implementation;
    let device_cores = u64::from(chip.cores_per_device);
    let cores = implementation
        .cores_limit
        .map_or(device_cores, |limit| limit.clamp(1, device_cores));
    let units = units_per_program(kernel, parallel, value_parts, cores, capacity);
    let chunks = kernel.steps_per_program.clamp(1, kernel.grid.sequential.max(1));
    let cut = Cut {
        units,
        chunks,
        value_parts,
    };
    let programs = parallel.div_ceil(units);
    let cores_used = programs.min(cores);
    if kernel.grid.sequential > 1 && cores_used < device_cores {
        remarks.push(Remark::CoresIdle {
            used: cores_used,
            cores: device_cores,
        });
    }
    let programs_per_core = programs.div_ceil(cores) * kernel.grid.sequential.div_ceil(chunks);

    let program = program::schedule(kernel, chip, cut);
    let rounds = programs_per_core as f64;
    let grid_step = chip.grid_step_cycles();
    let issue = chip.issue_efficiency(kernel.has_products()) * implementation.issue_share.unwrap_or(1.0);
    let micros = |cycles: f64| cycles / chip.clock().get() * 1e6;
    // Blocks of the busiest core: what crosses HBM, spread over all programs.
    let all_programs = (programs * kernel.grid.sequential.div_ceil(chunks)).max(1) as f64;
    let bandwidth = memory::bytes_per_cycle(chip, cores_used);
    let fetched_whole = implementation.resident_block.map_or(0.0, |block| {
        (block.bytes as f64 * block.fetches as f64).min(kernel.read_bytes() as f64)
    });
    let dma_latency = chip.dma_latency().get() * chip.clock().get();
    let [read, write] = memory::streamed_bytes(kernel, chip);
    let exposed = match chip.architecture {
        Architecture::Tpu => 0.0,
        Architecture::Gpu => implementation.exposed_loads * dma_latency,
    };
    let mut step = pipeline::Step {
        compute: program.makespan / issue + grid_step + implementation.program_cycles + exposed,
        read: (read - fetched_whole) / all_programs / bandwidth,
        write: write / all_programs / bandwidth,
        dma_latency,
        buffers: match chip.architecture {
            Architecture::Tpu => 2,
            Architecture::Gpu => GPU_BUFFERS,
        },
    };
    let mut pipeline = if implementation.serial_transfers {
        let transfers = [step.read, step.write];
        let latency = transfers.iter().filter(|cycles| **cycles > 0.0).count() as f64 * step.dma_latency;
        let compute = step.compute + step.read + step.write + latency;
        pipeline::run(
            pipeline::Step {
                compute,
                read: 0.0,
                write: 0.0,
                ..step
            },
            programs_per_core,
        )
    } else {
        pipeline::run(step, programs_per_core)
    };
    // What the pipeline would save if transfers began at once: their latency where nothing covers it.
    let dma = pipeline.total
        - pipeline::run(
            pipeline::Step {
                dma_latency: 0.0,
                ..step
            },
            programs_per_core,
        )
        .total;
    if let Some(block) = implementation.resident_block {
        // The block of the next program is fetched while this one computes; what is left of the fetch is waited for.
        let fetches = block.fetches as f64 / cores_used as f64;
        let fetch = fetched_whole / block.fetches.max(1) as f64 / bandwidth;
        pipeline.total += fetches * (fetch - (pipeline.period - step.read - step.write).max(0.0)).max(0.0);
        step.read += fetch * fetches / rounds;
        pipeline.total = pipeline.total.max((step.read + step.write) * rounds);
    }
    let launch = chip.launch.micros();
    let total_us = micros(pipeline.total) + launch;

    let hbm = (step.read + step.write) * rounds;
    let mxu = program.matrix_busy(chip) * rounds;
    let [alu, transcendental, cross_lane, vmem] = Lane::VECTOR.map(|lane| program.lane_busy(lane) * rounds);
    let (path, latency) = critical_path(&program);
    let mut bounds: Vec<(Bound, f64)> = vec![
        (Bound::Hbm, hbm),
        (
            Bound::Launch,
            launch * chip.clock().get() / 1e6 + grid_step * rounds + dma,
        ),
    ];
    // A unit binds as far as it stands on the critical path; one that is busy all the time does so wherever it stands.
    for (bound, on_path, busy) in [
        (Bound::Mxu, path[0], mxu / rounds),
        (Bound::Vpu, path[1], alu / rounds),
        (Bound::Transcendental, path[2], transcendental / rounds),
        (Bound::CrossLane, path[3], cross_lane / rounds),
        (Bound::Vmem, path[4], vmem / rounds),
        (Bound::Latency, latency + exposed, 0.0),
    ] {
        bounds.push((bound, on_path.max(busy) * rounds));
    }
    bounds.sort_by(|a, b| b.1.total_cmp(&a.1));
    let ideal = matrix::ideal_cycles(chip, &kernel.work.matrix_flops) / cores_used as f64;
    KernelTime {
        total_us,
        mxu_us: micros(mxu),
        vpu_us: micros(alu.max(transcendental).max(cross_lane).max(vmem)),
        alu_us: micros(alu),
        transcendental_us: micros(transcendental),
        cross_lane_us: micros(cross_lane),
        vmem_us: micros(vmem),
        hbm_us: micros(hbm),
        latency_us: micros((latency + exposed + program.makespan * (issue.recip() - 1.0)) * rounds),
        launch_us: launch + micros(grid_step * rounds + dma),
        issue_efficiency: issue,
        bound: bounds[0].0,
        next_bound: bounds[1].0,
        cores_used,
        grid_parallel: kernel.grid.parallel,
        programs_per_core,
        cut,
        working_set: resident + working_set(kernel, value_parts, units * chunks),
        hbm_bytes: kernel.hbm_bytes(),
        mxu_lane: if mxu > 0.0 { (ideal / mxu).min(1.0) } else { 0.0 },
        mxu_achieved: micros(ideal) / total_us * (cores_used as f64 / device_cores as f64),
        program,
        pipeline,
        remarks,
    }
}

/// Cycles of the critical path of a program spent on each unit (matrix, ALU, transcendental, cross-lane, load and store) and on latency.
fn critical_path(program: &Program) -> ([f64; 5], f64) {
    let mut on = [0.0; 5];
    let mut latency = 0.0;
    let last = (0..program.groups.len()).max_by(|&a, &b| {
        program.groups[a]
            .last_result()
            .total_cmp(&program.groups[b].last_result())
            .then(b.cmp(&a))
    });
    let Some(mut at) = last else { return (on, latency) };
    let mut until = program.makespan;
    loop {
        let group = &program.groups[at];
        // From the moment its lane is free to the moment the path goes on, the result is on its way.
        latency += (until - group.end).max(0.0);
        let last = group.last_lane();
        let (start, before) = last.map_or((group.start, group.operand), |held| (held.start, held.waited_for));
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
                let elements = chip.register_elements() * f64::from(chip.vector_unit.registers);
                (4.0 * elements) as u64
            }
        };
        let streamed = 2 * kernel.hbm_bytes() / kernel.grid.steps().max(1);
        // Intermediates are produced and consumed tile by tile; the state has to stay.
        streamed.min(capacity / 2) / parts + kernel.carried_bytes / parts
            <= capacity.saturating_add(registers)
    };
    let tile = kernel.implementation.value_tile;
    if tile.is_none() && (kernel.carried_bytes == 0 || fits(1)) {
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
    let mut parts = tile.map_or(1, |tile| columns.div_ceil(tile.max(1)).max(1));
    if fits(parts) {
        return parts;
    }
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
        let most = kernel
            .implementation
            .most_units
            .map_or(MOST_UNITS_PER_PROGRAM, |most| {
                most.clamp(1, MOST_UNITS_PER_PROGRAM)
            });
        let most = (capacity / per_unit).clamp(1, most);
        // Programs of equal size: 11 units on two cores are 6 and 5, not three programs of 5.
        let of_a_core = parallel.div_ceil(cores.max(1));
        of_a_core.div_ceil(of_a_core.div_ceil(most).max(1))
    });
    wanted.clamp(1, parallel.max(1))
}
