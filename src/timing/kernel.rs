//! A kernel on a chip: how it is cut into programs, the schedule of a program, the pipeline of programs, and what binds.

use rustc_hash::FxHashMap;

use super::matrix;
use super::memory::{self, Moved};
use super::pipeline::{self, Pipeline};
use super::program::{self, Cut, Figures, Order, Schedule};
use super::unit::Occupancy;
use crate::hardware::{Architecture, Chip};
use crate::kernels::{Grid, Kernel, OpKind, Transfer};
use crate::report::result::Bound;

/// Units of a parallel kernel that one program interleaves at most (Tokamax batches up to 16 heads).
const MOST_UNITS_PER_PROGRAM: u64 = 16;
/// Programs per core that a kernel which streams rows may be cut into. A fixed set, so that more rows never meet a better fit.
const STREAMED_PROGRAMS: [u64; 7] = [1, 4, 16, 64, 256, 1024, 4096];
/// Blocks in flight of a multiprocessor: stages of the software pipeline of a program, or programs side by side.
const GPU_BUFFERS: usize = 4;
/// The same with their places, in the order in which they are tried: the middle first, which leaves least of the rest.
const SEARCHED_PROGRAMS: [(usize, u64); 7] =
    [(2, 16), (3, 64), (1, 4), (4, 256), (0, 1), (5, 1024), (6, 4096)];
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
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelFigures {
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
}

/// Time of a kernel with the schedule behind it. It reads as its figures.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTime {
    /// Times, rates and sizes.
    pub figures: KernelFigures,
    /// Schedule of one program, in cycles.
    pub program: program::Program,
    /// Pipeline of the programs of the busiest core, in cycles.
    pub pipeline: Pipeline,
    /// What its user should know.
    pub remarks: Vec<Remark>,
}

impl std::ops::Deref for KernelTime {
    type Target = KernelFigures;

    fn deref(&self) -> &KernelFigures {
        &self.figures
    }
}

/// What of a kernel does not depend on the chip, found once for many of them.
#[derive(Debug, Clone)]
pub struct Prepared {
    order: Order,
    read_bytes: u64,
    /// Bytes read where blocks of keys and values are fetched again for every pair of blocks.
    streaming_read_bytes: u64,
    write_bytes: u64,
    resident_bytes: u64,
    products: bool,
}

impl Prepared {
    /// Looks at a kernel.
    #[must_use]
    pub fn of(kernel: &Kernel) -> Self {
        Prepared {
            order: Order::of(kernel),
            read_bytes: kernel.read_bytes(),
            streaming_read_bytes: kernel.reads.iter().map(Transfer::streamed_bytes).sum(),
            write_bytes: kernel.write_bytes(),
            resident_bytes: kernel.resident_bytes(),
            products: kernel.has_products(),
        }
    }
}

/// A kernel in the form in which a chip runs it: what it reads, and for one that streams the programs it is cut into.
#[derive(Clone, Copy)]
struct Form<'a> {
    kernel: &'a Kernel,
    order: &'a Order,
    grid: Grid,
    live_bytes: u64,
    units_per_program: Option<u64>,
    read_bytes: u64,
    write_bytes: u64,
    /// Whether it has matrix products.
    products: bool,
    /// Whether blocks of keys and values are fetched again for every pair of blocks.
    again: bool,
    /// Bytes that stay on chip beside the programs.
    resident: u64,
}

impl<'a> Form<'a> {
    fn new(kernel: &'a Kernel, prepared: &'a Prepared) -> Self {
        Form {
            kernel,
            order: &prepared.order,
            grid: kernel.grid,
            live_bytes: kernel.live_bytes,
            units_per_program: kernel.units_per_program,
            read_bytes: prepared.read_bytes,
            write_bytes: prepared.write_bytes,
            products: prepared.products,
            again: false,
            resident: 0,
        }
    }

    /// The same kernel cut into this many equal programs, for one that streams.
    fn in_programs(self, programs: u64) -> Self {
        Form {
            grid: Grid {
                parallel: programs,
                sequential: 1,
            },
            live_bytes: self.live_bytes.div_ceil(programs.max(1)),
            units_per_program: Some(1),
            ..self
        }
    }

    fn hbm_bytes(&self) -> u64 {
        self.read_bytes + self.write_bytes
    }
}

/// Buffers and findings of the timing of one kernel, kept from one chip to the next.
///
/// The schedule of a program depends on the core alone: `core` names a set of matrix unit, vector unit, latencies and coefficients, and a schedule is
/// made once for each. Clocks, bandwidths, sizes of memories and counts of cores may differ between chips of one `core`.
#[derive(Debug, Default)]
pub struct Timer {
    schedule: Schedule,
    /// Core, value parts and costs of the operations found last.
    costs: Vec<Occupancy>,
    costs_of: Option<(u64, u64)>,
    /// Cycles that the busiest lane of one core would take for the whole kernel.
    busiest: f64,
    /// Shape of a register and architecture, and the registers of the operations found last.
    registers: Vec<f64>,
    registers_of: Option<(u32, u32, Architecture)>,
    found: FxHashMap<ProgramKey, Figures>,
}

/// Schedules that a timer keeps.
const MOST_FOUND: usize = 1 << 11;

/// What a schedule of a given kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ProgramKey {
    core: u64,
    parallel: u64,
    units: u64,
    value_parts: u64,
}

impl ProgramKey {
    fn of(form: &Form<'_>, cutting: &Cutting, core: u64) -> Self {
        ProgramKey {
            core,
            parallel: form.grid.parallel,
            units: cutting.cut.units,
            value_parts: cutting.cut.value_parts,
        }
    }
}

impl Timer {
    /// The same buffers for another kernel.
    #[must_use]
    pub fn for_another_kernel(mut self) -> Self {
        self.costs_of = None;
        self.registers_of = None;
        self.found.clear();
        self
    }

    /// Times `kernel` on `chip`. A timer belongs to one kernel; chips with the same `core` have to agree in all that a core is.
    pub fn time(&mut self, kernel: &Kernel, prepared: &Prepared, chip: &Chip, core: u64) -> KernelFigures {
        let (form, cutting) = self.best(kernel, prepared, chip, core, &mut Vec::new());
        let figures = self.figures(&form, chip, &cutting, core);
        let pace = pace(&form, chip, &cutting, figures.makespan);
        finish(&form, chip, &cutting, &figures, &pace)
    }

    /// The form of the kernel that the chip runs, and how it is cut.
    fn best<'a>(
        &mut self,
        kernel: &'a Kernel,
        prepared: &'a Prepared,
        chip: &Chip,
        core: u64,
        remarks: &mut Vec<Remark>,
    ) -> (Form<'a>, Cutting) {
        let form = Form::new(kernel, prepared);
        let capacity = chip.on_chip.capacity.get() as u64;
        if !kernel.streams {
            let resident = 2 * prepared.resident_bytes;
            let form = if resident == 0 || working_set(&form, 1, 1) + resident <= capacity {
                Form { resident, ..form }
            } else {
                Form {
                    read_bytes: prepared.streaming_read_bytes,
                    again: true,
                    ..form
                }
            };
            return (form, cutting(&form, chip, remarks));
        }
        // Few programs leave the fetch of the first uncovered, many pay for their grid steps; too few do not fit.
        let cores = u64::from(chip.cores_per_device);
        let finest = STREAMED_PROGRAMS.len() - 1;
        let mut best: Option<(f64, usize, Form<'a>, Cutting)> = None;
        for (rank, of_a_core) in SEARCHED_PROGRAMS {
            let form = form.in_programs(of_a_core * cores);
            if rank < finest && working_set(&form, 1, 1) > capacity {
                continue;
            }
            let cutting = cutting(&form, chip, &mut Vec::new());
            let program = ProgramKey::of(&form, &cutting, core);
            if let Some((least, ..)) = best
                && !self.found.contains_key(&program)
            {
                self.find_costs(&form, chip, cutting.cut.value_parts, core);
                let busy = self.busiest / form.grid.parallel.max(1) as f64;
                // The margin is for the rounding of the sums behind both.
                if shortest(&form, chip, &cutting, busy) > least * (1.0 + 1e-9) {
                    continue;
                }
            }
            let makespan = self.figures(&form, chip, &cutting, core).makespan;
            let us = pace(&form, chip, &cutting, makespan).total_us(chip);
            // Of equals the finest is taken, then the coarsest.
            let order = (rank + 1) % STREAMED_PROGRAMS.len();
            if best
                .as_ref()
                .is_none_or(|(least, before, ..)| us < *least || (us <= *least && order < *before))
            {
                best = Some((us, order, form, cutting));
            }
        }
        let (form, cut) = best.map_or_else(
            || {
                let form = form.in_programs(STREAMED_PROGRAMS[finest] * cores);
                (form, cutting(&form, chip, &mut Vec::new()))
            },
            |(_, _, form, cut)| (form, cut),
        );
        // Said of the form that is taken.
        cutting(&form, chip, remarks);
        (form, cut)
    }

    /// The schedule of a program, made once for every core.
    fn figures(&mut self, form: &Form<'_>, chip: &Chip, cutting: &Cutting, core: u64) -> Figures {
        let program = ProgramKey::of(form, cutting, core);
        if let Some(found) = self.found.get(&program) {
            return *found;
        }
        self.run(form, chip, cutting.cut, core);
        let figures = self.schedule.figures();
        if self.found.len() >= MOST_FOUND {
            self.found.clear();
        }
        self.found.insert(program, figures);
        figures
    }

    /// Makes `costs`, and the cycles of the busiest vector lane for the whole kernel.
    fn find_costs(&mut self, form: &Form<'_>, chip: &Chip, value_parts: u64, core: u64) {
        let unit = &chip.vector_unit;
        let shape = (unit.lanes, unit.sublanes, chip.architecture);
        if self.registers_of != Some(shape) {
            program::registers(form.kernel, chip, &mut self.registers);
            self.registers_of = Some(shape);
        }
        if self.costs_of != Some((core, value_parts)) {
            program::costs(
                (form.kernel, form.order),
                chip,
                &self.registers,
                value_parts,
                &mut self.costs,
            );
            self.costs_of = Some((core, value_parts));
            // Matrix arrays first: what one of them has to do at least.
            let mut lanes = [0.0; 5];
            for (op, cost) in form.kernel.ops.iter().zip(&self.costs) {
                lanes[0] += cost.matrix * op.count as f64 / f64::from(chip.matrix_unit.count);
                for (lane, cycles) in lanes[1..].iter_mut().zip(cost.vector) {
                    *lane += cycles * op.count as f64;
                }
            }
            self.busiest = lanes.into_iter().fold(0.0, f64::max);
        }
    }

    /// Schedules a program.
    fn run(&mut self, form: &Form<'_>, chip: &Chip, cut: Cut, core: u64) {
        self.find_costs(form, chip, cut.value_parts, core);
        self.schedule.run(
            (form.kernel, form.order),
            &self.costs,
            chip.matrix_unit.count as usize,
            form.grid,
            cut,
        );
    }
}

/// Times a kernel on a chip.
///
/// Keys and values of attention are read once where those of a key head fit on chip beside two more of them being fetched (programs of a key head
/// follow each other), else once for every pair of blocks of every query head. Caches of a GPU are not modelled.
#[must_use]
pub fn time_kernel(kernel: &Kernel, chip: &Chip) -> KernelTime {
    let prepared = Prepared::of(kernel);
    let mut timer = Timer::default();
    let mut remarks = Vec::new();
    let (form, cutting) = timer.best(kernel, &prepared, chip, 0, &mut remarks);
    timer.run(&form, chip, cutting.cut, 0);
    let figures = timer.schedule.figures();
    let pace = pace(&form, chip, &cutting, figures.makespan);
    KernelTime {
        figures: finish(&form, chip, &cutting, &figures, &pace),
        program: timer.schedule.program(),
        pipeline: Pipeline {
            total: pace.total,
            ..pipeline::run(pace.simulated, cutting.programs_per_core)
        },
        remarks,
    }
}

/// How a form of a kernel is cut into programs on a chip.
#[derive(Clone, Copy)]
struct Cutting {
    cut: Cut,
    /// Programs along the parallel dimension of the grid.
    programs: u64,
    cores_used: u64,
    /// Programs of the busiest core, one after the other.
    programs_per_core: u64,
}

fn cutting(form: &Form<'_>, chip: &Chip, remarks: &mut Vec<Remark>) -> Cutting {
    let kernel = form.kernel;
    let capacity = (chip.on_chip.capacity.get() as u64).saturating_sub(form.resident);
    let value_parts = value_parts(form, chip, capacity, remarks);
    let parallel = form.grid.parallel * value_parts;
    let device_cores = u64::from(chip.cores_per_device);
    let cores = kernel
        .implementation
        .cores_limit
        .map_or(device_cores, |limit| limit.clamp(1, device_cores));
    let units = units_per_program(form, parallel, value_parts, cores, capacity);
    let chunks = kernel.steps_per_program.clamp(1, form.grid.sequential.max(1));
    let programs = parallel.div_ceil(units);
    let cores_used = programs.min(cores);
    if form.grid.sequential > 1 && cores_used < device_cores {
        remarks.push(Remark::CoresIdle {
            used: cores_used,
            cores: device_cores,
        });
    }
    Cutting {
        cut: Cut {
            units,
            chunks,
            value_parts,
        },
        programs,
        cores_used,
        programs_per_core: programs.div_ceil(cores) * form.grid.sequential.div_ceil(chunks),
    }
}

/// How the programs of the busiest core follow each other, in cycles.
struct Pace {
    /// A program and its transfers.
    step: pipeline::Step,
    /// The same as the pipeline sees it: transfers that overlap nothing are part of the compute.
    simulated: pipeline::Step,
    /// Cycles of the pipeline without what waits for a resident block.
    overlapped: f64,
    /// Cycles of all programs.
    total: f64,
}

impl Pace {
    fn total_us(&self, chip: &Chip) -> f64 {
        micros(self.total, chip) + chip.launch.micros()
    }
}

fn micros(cycles: f64, chip: &Chip) -> f64 {
    cycles / chip.clock().get() * 1e6
}

/// Cycles of a schedule over those its program takes, on this chip and in this implementation.
fn issue(form: &Form<'_>, chip: &Chip) -> f64 {
    chip.issue_efficiency(form.products) * form.kernel.implementation.issue_share.unwrap_or(1.0)
}

/// From the start of a transfer to its first byte, in cycles.
fn latency_cycles(chip: &Chip) -> f64 {
    chip.dma_latency().get() * chip.clock().get()
}

/// Cycles of a program in which it waits for loads that nothing fetches ahead.
fn exposed_cycles(form: &Form<'_>, chip: &Chip) -> f64 {
    match chip.architecture {
        Architecture::Tpu => 0.0,
        Architecture::Gpu => form.kernel.implementation.exposed_loads * latency_cycles(chip),
    }
}

/// Cycles of a program and its transfers before anything waits for a resident block.
fn step(form: &Form<'_>, chip: &Chip, cutting: &Cutting, makespan: f64) -> (pipeline::Step, f64, f64) {
    let implementation = &form.kernel.implementation;
    // Blocks of the busiest core: what crosses HBM, spread over all programs.
    let all_programs = (cutting.programs * form.grid.sequential.div_ceil(cutting.cut.chunks)).max(1) as f64;
    let bandwidth = memory::bytes_per_cycle(chip, cutting.cores_used);
    let fetched_whole = implementation.resident_block.map_or(0.0, |block| {
        (block.bytes as f64 * block.fetches as f64).min(form.read_bytes as f64)
    });
    let [read, write] = memory::streamed_bytes(
        form.kernel,
        chip,
        Moved {
            read: form.read_bytes,
            written: form.write_bytes,
            again: form.again,
        },
    );
    let step = pipeline::Step {
        compute: makespan / issue(form, chip)
            + chip.grid_step_cycles()
            + implementation.program_cycles
            + exposed_cycles(form, chip),
        read: (read - fetched_whole) / all_programs / bandwidth,
        write: write / all_programs / bandwidth,
        dma_latency: latency_cycles(chip),
        buffers: match chip.architecture {
            Architecture::Tpu => 2,
            Architecture::Gpu => GPU_BUFFERS,
        },
    };
    (step, fetched_whole, bandwidth)
}

/// A time that no pipeline of programs undercuts whose makespan is at least `makespan` cycles: the first block comes in, the programs follow each other, the
/// last block goes out.
fn shortest(form: &Form<'_>, chip: &Chip, cutting: &Cutting, makespan: f64) -> f64 {
    let (step, ..) = step(form, chip, cutting, makespan);
    let rounds = cutting.programs_per_core as f64;
    let cycles = step.compute * rounds + step.read + step.write;
    micros(cycles.max((step.read + step.write) * rounds), chip) + chip.launch.micros()
}

fn pace(form: &Form<'_>, chip: &Chip, cutting: &Cutting, makespan: f64) -> Pace {
    let implementation = &form.kernel.implementation;
    let (mut step, fetched_whole, bandwidth) = step(form, chip, cutting, makespan);
    let rounds = cutting.programs_per_core as f64;
    let simulated = if implementation.serial_transfers {
        let transfers = [step.read, step.write];
        let latency = transfers.iter().filter(|cycles| **cycles > 0.0).count() as f64 * step.dma_latency;
        pipeline::Step {
            compute: step.compute + step.read + step.write + latency,
            read: 0.0,
            write: 0.0,
            ..step
        }
    } else {
        step
    };
    let (period, overlapped) = pipeline::pace(simulated, cutting.programs_per_core);
    let mut total = overlapped;
    if let Some(block) = implementation.resident_block {
        // The block of the next program is fetched while this one computes; what is left of the fetch is waited for.
        let fetches = block.fetches as f64 / cutting.cores_used as f64;
        let fetch = fetched_whole / block.fetches.max(1) as f64 / bandwidth;
        total += fetches * (fetch - (period - step.read - step.write).max(0.0)).max(0.0);
        step.read += fetch * fetches / rounds;
        total = total.max((step.read + step.write) * rounds);
    }
    Pace {
        step,
        simulated,
        overlapped,
        total,
    }
}

/// The figures of a kernel from those of its program.
fn finish(form: &Form<'_>, chip: &Chip, cutting: &Cutting, program: &Figures, pace: &Pace) -> KernelFigures {
    let &Cutting {
        cut,
        cores_used,
        programs_per_core,
        ..
    } = cutting;
    let total_us = pace.total_us(chip);
    // What the pipeline would save if transfers began at once: their latency where nothing covers it.
    let (without_latency, ..) = step(form, chip, cutting, program.makespan);
    let dma = pace.overlapped
        - pipeline::pace(
            pipeline::Step {
                dma_latency: 0.0,
                ..without_latency
            },
            programs_per_core,
        )
        .1;
    let rounds = programs_per_core as f64;
    let grid_step = chip.grid_step_cycles();
    let issue = issue(form, chip);
    let micros = |cycles: f64| micros(cycles, chip);
    let launch = chip.launch.micros();
    let hbm = (pace.step.read + pace.step.write) * rounds;
    let mxu = program.matrix_busy * rounds;
    let [alu, transcendental, cross_lane, vmem] = program.vector_busy.map(|cycles| cycles * rounds);
    let (path, latency) = (program.path, program.path_latency);
    let exposed = exposed_cycles(form, chip);
    // A unit binds as far as it stands on the critical path; one that is busy all the time does so wherever it stands.
    let on_path = |path: f64, busy: f64| path.max(busy / rounds) * rounds;
    let mut bounds = [
        (Bound::Hbm, hbm),
        (
            Bound::Launch,
            launch * chip.clock().get() / 1e6 + grid_step * rounds + dma,
        ),
        (Bound::Mxu, on_path(path[0], mxu)),
        (Bound::Vpu, on_path(path[1], alu)),
        (Bound::Transcendental, on_path(path[2], transcendental)),
        (Bound::CrossLane, on_path(path[3], cross_lane)),
        (Bound::Vmem, on_path(path[4], vmem)),
        (Bound::Latency, on_path(latency + exposed, 0.0)),
    ];
    bounds.sort_by(|a, b| b.1.total_cmp(&a.1));
    let ideal = matrix::ideal_cycles(chip, &form.kernel.work.matrix_flops) / cores_used as f64;
    let device_cores = u64::from(chip.cores_per_device);
    KernelFigures {
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
        grid_parallel: form.grid.parallel,
        programs_per_core,
        cut,
        working_set: form.resident + working_set(form, cut.value_parts, cut.units * cut.chunks),
        hbm_bytes: form.hbm_bytes(),
        mxu_lane: if mxu > 0.0 { (ideal / mxu).min(1.0) } else { 0.0 },
        mxu_achieved: micros(ideal) / total_us * (cores_used as f64 / device_cores as f64),
    }
}

/// Bytes a program needs on chip: two buffers of every block that streams, the carried state, the intermediates of a step.
fn working_set(form: &Form<'_>, parts: u64, units: u64) -> u64 {
    let streamed = 2 * form.hbm_bytes() / form.grid.steps().max(1);
    units * (streamed + form.live_bytes + form.kernel.carried_bytes / parts)
}

/// Programs that the value columns of a head are split over so that the working set fits.
fn value_parts(form: &Form<'_>, chip: &Chip, capacity: u64, remarks: &mut Vec<Remark>) -> u64 {
    let kernel = form.kernel;
    let fits = |parts| {
        // Registers of a multiprocessor hold the carried state besides its shared memory.
        let registers = match chip.architecture {
            Architecture::Tpu => 0,
            Architecture::Gpu => {
                let elements = chip.register_elements() * f64::from(chip.vector_unit.registers);
                (4.0 * elements) as u64
            }
        };
        let streamed = 2 * form.hbm_bytes() / form.grid.steps().max(1);
        // Intermediates are produced and consumed tile by tile; the state has to stay.
        streamed.min(capacity / 2) / parts + kernel.carried_bytes / parts
            <= capacity.saturating_add(registers)
    };
    let tile = kernel.implementation.value_tile;
    if tile.is_none() && (kernel.carried_bytes == 0 || fits(1)) {
        return 1;
    }
    let by_value = || kernel.ops.iter().filter(|op| op.value_columns);
    let of_products = by_value().filter_map(|op| match op.kind {
        OpKind::Product { n, .. } => Some(n),
        _ => None,
    });
    // A decode step on the vector unit has no products.
    let of_tensors = || {
        by_value().filter_map(|op| match &op.kind {
            OpKind::Vector { dims, .. } => dims.dims().last().map(|&columns| columns as u64),
            _ => None,
        })
    };
    let columns = of_products.max().or_else(|| of_tensors().max()).unwrap_or(1);
    let mut parts = tile.map_or(1, |tile| columns.div_ceil(tile.max(1)).max(1));
    if fits(parts) {
        return parts;
    }
    while !fits(parts) && columns / (2 * parts) >= NARROWEST_VALUE_COLUMNS {
        parts *= 2;
    }
    let needed = working_set(form, 1, 1);
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

fn units_per_program(form: &Form<'_>, parallel: u64, parts: u64, cores: u64, capacity: u64) -> u64 {
    let wanted = form.units_per_program.unwrap_or_else(|| {
        let per_unit = working_set(form, parts, 1).max(1);
        let most = form
            .kernel
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
