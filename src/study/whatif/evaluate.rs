//! The times of the points of a sweep.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::axis::Axis;
use super::chips::{Reason, SweptChip, reason, swept};
use super::space::{Grid, Space, digits};
use crate::config::{ConfigError, Document};
use crate::hardware::{self, Architecture, Chip, Evidences, Interval};
use crate::kernels::Kernel;
use crate::layer::{Layer, Pass};
use crate::report::result::Bound;
use crate::study::interval::lower_plans;
use crate::study::predict;
use crate::study::run::{PeakRates, check_formats, operation};
use crate::timing::{KernelFigures, Prepared, Timer};
use crate::workload::{self, Workload};

/// What a sweep is asked for.
#[derive(Debug)]
pub struct SweepRequest<'a> {
    /// The workload and its file, overrides applied.
    pub workload: &'a (Workload, Document),
    /// Chips by name or path, with their files, overrides applied.
    pub chips: &'a [(String, Document)],
    /// The varied fields.
    pub axes: Vec<Axis>,
}

/// The time of one point on one chip in one plan: sums over the kernels of the plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Predicted time, in microseconds.
    pub time_us: f64,
    /// Ends of the 80 % interval, in microseconds; none where nothing comparable was measured.
    pub interval_us: Option<(f64, f64)>,
    /// What binds most of the time.
    pub bound: Bound,
    /// Time the matrix units are occupied, in microseconds.
    pub mxu_us: f64,
    /// Time the busiest class of vector slots of each kernel is occupied, in microseconds.
    pub vpu_us: f64,
    /// Time of the HBM traffic at the achievable bandwidth, in microseconds.
    pub hbm_us: f64,
    /// Bytes moved between HBM and the chip.
    pub hbm_bytes: u64,
    /// Recurrent state of the layer, all sequences, in bytes.
    pub state_bytes: u64,
    /// Matrix FLOPs, padding of partial chunks included.
    pub flops: u64,
}

/// One row of a sweep.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Point, numbered as in [`Space`].
    pub point: u64,
    /// Which of the chips.
    pub chip: usize,
    /// Which of the plans.
    pub plan: usize,
    /// Its time, or why there is none.
    pub outcome: Result<Timing, Reason>,
}

/// A kernel with what is the same on all chips.
#[derive(Debug)]
struct BuiltKernel {
    kernel: Kernel,
    prepared: Prepared,
}

/// Kernels of every plan.
type BuiltPlans = Vec<Vec<BuiltKernel>>;

/// A layer as kernels.
#[derive(Debug)]
pub(super) struct Built {
    layer: Layer,
    /// The file of the sweep, for the name of a field that a chip cannot take.
    document: Arc<Document>,
    state_bytes: u64,
    /// By architecture; of those that no chip of the sweep has there is none.
    plans: Vec<(Architecture, BuiltPlans)>,
}

impl Built {
    /// The layer that `changed` describes, a change of `document`.
    fn new(
        changed: &Document,
        document: &Arc<Document>,
        architectures: &[Architecture],
    ) -> Result<Self, Reason> {
        let workload = workload::without_defaults(changed).map_err(|error| reason(&error))?;
        let prepare = |kernel: Kernel| BuiltKernel {
            prepared: Prepared::of(&kernel),
            kernel,
        };
        let kernels = lower_plans(&workload.layer, architectures, &workload.plans)
            .map_err(|error| format!("cannot build the graph: {error}"))?;
        let plans = architectures
            .iter()
            .zip(kernels)
            .map(|(&architecture, plans)| {
                let prepared = |kernels: Vec<Kernel>| kernels.into_iter().map(prepare).collect();
                (architecture, plans.into_iter().map(prepared).collect())
            })
            .collect();
        let layer = workload.layer;
        Ok(Built {
            state_bytes: layer.batch as u64 * layer.state_bytes(),
            layer,
            document: Arc::clone(document),
            plans,
        })
    }

    /// The kernels of every plan as chips of an architecture run them.
    fn on(&self, architecture: Architecture) -> Result<&BuiltPlans, Reason> {
        let found = self.plans.iter().find(|(of, _)| *of == architecture);
        found
            .map(|(_, plans)| plans)
            .ok_or_else(|| format!("no kernels for {architecture:?}").into())
    }

    /// The rows of the stage table of a plan on a chip: label and time in microseconds.
    ///
    /// # Errors
    /// Where the chip lacks a format of the layer.
    pub(super) fn stages(&self, plan: usize, chip: &Chip) -> Result<Vec<(String, f64)>, Reason> {
        check_formats(&self.layer, chip, &self.document).map_err(|error| reason(&error))?;
        let mut stages: Vec<(String, f64)> = Vec::new();
        for BuiltKernel { kernel, prepared } in &self.on(chip.architecture)?[plan] {
            let us = kernel.share * Timer::default().time(kernel, prepared, chip, 0).total_us;
            // Kernels of a row stand together.
            match stages.last_mut() {
                Some((label, sum)) if *label == kernel.label => *sum += us,
                _ => stages.push((kernel.label.clone(), us)),
            }
        }
        Ok(stages)
    }
}

type Build = Result<Arc<Built>, Reason>;

/// Fewest combinations of the hardware for which the kernels of a layer are shared between threads; below, it is as fast to make them again.
const SHARED_FROM: u64 = 256;
/// Most points of a piece of work of one thread.
const LARGEST_PIECE: u64 = 1024;
/// Points of the first step, and most points of any.
const STEPS: Range<u64> = 64..32_768;
/// How long a step should take: often enough for progress and an interruption, rarely enough for full use of all threads.
const STEP_TIME: Duration = Duration::from_millis(200);

/// A workload with varied fields on chips with varied fields.
#[derive(Debug)]
pub struct Sweep {
    grid: Grid,
    document: Arc<Document>,
    /// Whether the values of the fields can take each other's place in one file: no field lies in another one.
    in_place: bool,
    /// The file of the workload with its sizes of the numeric check.
    executed: Document,
    chips: Vec<SweptChip>,
    architectures: Vec<Architecture>,
}

impl Sweep {
    /// Checks the fields and their values.
    ///
    /// # Errors
    /// For a field that does not exist, and for a value that cannot be one of its field, whatever the others are. A value that does not fit the others is
    /// no error: its points say so.
    pub fn new(request: SweepRequest<'_>) -> Result<Self, ConfigError> {
        let (workload, document) = request.workload;
        let space = Space::new(request.axes)?;
        let mut document = document.clone();
        document.set("published=")?;
        let executed = document.clone();
        // The times of a sweep come without numerics and are compared with nothing, so neither limits the sizes.
        // A verification executes its whole tree and has no such key.
        if document.node("numeric.tokens").is_some() {
            // A tree has no such size: its check executes all of it.
            if workload.layer.pass != Pass::Verify {
                document.set("numeric.tokens=1")?;
            }
        }
        document.set("numeric.key_heads=1")?;
        document.set("inferred=[]")?;
        for axis in space.workload_axes() {
            let refused = axis.changes().par_iter().find_map_first(|changes| {
                let changed = document.with(changes);
                changed.and_then(|changed| workload::check_schema(&changed)).err()
            });
            if let Some(error) = refused {
                return Err(error);
            }
        }
        let chips = swept(request.chips, space.hardware_axes())?;
        let axes = space.workload_axes();
        let within = |a: &Axis, b: &Axis| {
            let rest = a.field().strip_prefix(b.field());
            rest.is_some_and(|rest| rest.starts_with('.'))
        };
        let in_place = !axes
            .iter()
            .any(|a| a.is_steps() || axes.iter().any(|b| within(a, b)));
        Ok(Sweep {
            in_place,
            grid: Grid {
                name: workload.name.clone(),
                layer: workload.layer.describe(),
                space,
                chips: chips.iter().map(|chip| chip.name.clone()).collect(),
                plans: workload.plans.iter().map(|plan| plan.name.clone()).collect(),
            },
            architectures: [Architecture::Tpu, Architecture::Gpu]
                .into_iter()
                .filter(|&architecture| chips.iter().any(|chip| chip.has(architecture)))
                .collect(),
            chips,
            document: Arc::new(document),
            executed,
        })
    }

    /// The rows there are.
    #[must_use]
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// The chips as their files have them.
    pub(super) fn base_chips(&self) -> impl Iterator<Item = &Chip> {
        self.chips.iter().map(|chip| &chip.base)
    }

    /// The file of the workload with its sizes of the numeric check.
    pub(super) fn executed(&self) -> &Document {
        &self.executed
    }

    /// The file of the workload.
    pub(super) fn document(&self) -> &Document {
        &self.document
    }

    /// The layer after `changes` to its file, as kernels.
    pub(super) fn build_with(&self, changes: &[String]) -> Result<Built, Reason> {
        let mut document = Document::clone(&self.document);
        for change in changes {
            document.set(change).map_err(|error| reason(&error))?;
        }
        Built::new(&document, &self.document, &self.architectures)
    }

    /// The rows of `points`, by point, chip and plan.
    #[must_use]
    pub fn rows(&self, points: Range<u64>) -> Vec<Row> {
        self.step(points, &mut None)
    }

    /// Times `points` step by step and hands over the rows of each step, by point, chip and plan, until `each` breaks off. Rows and their order do
    /// not depend on the number of threads.
    ///
    /// # Errors
    /// What `each` returns.
    pub fn run<E>(
        &self,
        points: Range<u64>,
        mut each: impl FnMut(&[Row]) -> Result<ControlFlow<()>, E>,
    ) -> Result<(), E> {
        let mut step = STEPS.start;
        let mut last = None;
        let mut from = points.start;
        while from < points.end {
            let until = points.end.min(from + step);
            let begun = Instant::now();
            let rows = self.step(from..until, &mut last);
            let took = begun.elapsed();
            if took < STEP_TIME / 2 {
                step = (2 * step).min(STEPS.end);
            } else if took > 2 * STEP_TIME {
                step = (step / 2).max(1);
            }
            if each(&rows)?.is_break() {
                return Ok(());
            }
            from = until;
        }
        Ok(())
    }

    /// The rows of some points. `last` is the layer that was built last, which may be needed again.
    fn step(&self, points: Range<u64>, last: &mut Option<(u64, Build)>) -> Vec<Row> {
        let per_layer = self.grid.space.hardware_points();
        let share = (points.end - points.start).div_ceil(4 * rayon::current_num_threads() as u64);
        let piece = share.clamp(1, LARGEST_PIECE);
        let mut pieces: Vec<(u64, Range<u64>)> = Vec::new();
        let mut from = points.start;
        while from < points.end {
            let layer = from / per_layer;
            let until = points.end.min((layer + 1) * per_layer).min(from + piece);
            pieces.push((layer, from - layer * per_layer..until - layer * per_layer));
            from = until;
        }
        if per_layer < SHARED_FROM {
            return pieces
                .into_par_iter()
                .map_init(Workspace::default, |space, (layer, hardware)| {
                    let built = self.build(layer, space);
                    self.piece(layer, &built, hardware, space)
                })
                .flatten_iter()
                .collect();
        }
        let builds: BTreeMap<u64, OnceLock<Build>> = pieces
            .iter()
            .map(|&(layer, _)| match last {
                Some((at, built)) if *at == layer => (layer, OnceLock::from(built.clone())),
                _ => (layer, OnceLock::new()),
            })
            .collect();
        let rows = pieces
            .into_par_iter()
            .map_init(Workspace::default, |space, (layer, hardware)| {
                match builds.get(&layer) {
                    Some(lock) => {
                        let built = lock.get_or_init(|| self.build(layer, &mut Workspace::default()));
                        self.piece(layer, built, hardware, space)
                    }
                    None => Vec::new(),
                }
            })
            .flatten_iter()
            .collect();
        *last = builds
            .into_iter()
            .next_back()
            .and_then(|(layer, lock)| Some((layer, lock.into_inner()?)));
        rows
    }

    /// The layer of a combination of the fields of the workload.
    fn build(&self, layer: u64, space: &mut Workspace) -> Build {
        let axes = self.grid.space.workload_axes();
        let document = match &mut space.document {
            Some(document) if self.in_place => document,
            other => other.insert(Document::clone(&self.document)),
        };
        for (axis, i) in axes.iter().zip(digits(axes, layer)) {
            for change in &axis.changes()[i] {
                document.put(change).map_err(|error| reason(&error))?;
            }
        }
        Built::new(document, &self.document, &self.architectures).map(Arc::new)
    }

    /// The rows of one layer on some combinations of the hardware.
    fn piece(&self, layer: u64, built: &Build, hardware: Range<u64>, space: &mut Workspace) -> Vec<Row> {
        let first = layer * self.grid.space.hardware_points();
        let (chips, plans) = (self.chips.len(), self.grid.plans.len());
        let count = (hardware.end - hardware.start) as usize;
        let row = |(index, outcome): (usize, Result<Timing, Reason>)| Row {
            point: first + hardware.start + (index / (chips * plans)) as u64,
            chip: index / plans % chips,
            plan: index % plans,
            outcome,
        };
        let built = match built {
            Ok(built) => built,
            Err(reason) => {
                let outcomes = (0..count * chips * plans).map(|_| Err(reason.clone()));
                return outcomes.enumerate().map(row).collect();
            }
        };
        // Chip by chip, so that what is known of one is at hand for its next point.
        let per_chip: Vec<Vec<Result<Timing, Reason>>> = self
            .chips
            .iter()
            .enumerate()
            .map(|(number, chip)| {
                let mut cursor = chip.cursor();
                let mut timers = PlanTimers {
                    chip: number,
                    of: None,
                    space: &mut *space,
                };
                let mut outcomes = Vec::with_capacity(count * plans);
                for index in hardware.clone() {
                    match cursor.at(index) {
                        Ok((chip, core)) => timers.time(built, chip, core, &mut outcomes),
                        Err(reason) => outcomes.extend((0..plans).map(|_| Err(reason.clone()))),
                    }
                }
                timers.give_back();
                outcomes
            })
            .collect();
        let mut per_chip: Vec<_> = per_chip.into_iter().map(Vec::into_iter).collect();
        let mut outcomes = Vec::with_capacity(count * chips * plans);
        for _ in 0..count {
            for of_chip in &mut per_chip {
                outcomes.extend(of_chip.take(plans));
            }
        }
        outcomes.into_iter().enumerate().map(row).collect()
    }
}

/// A timer of a kernel on a chip, with the residuals of its interval.
type KernelTimer = (Timer, Evidences<'static>);

/// What a thread uses again from one point to the next.
#[derive(Default)]
struct Workspace {
    /// The file of the workload at the last point.
    document: Option<Document>,
    /// Timers whose kernels are done.
    timers: Vec<Timer>,
    /// Residuals by chip, architecture and operation.
    evidences: Vec<((usize, Architecture, &'static str), Evidences<'static>)>,
}

impl Workspace {
    /// The residuals of the interval of a kernel on the chip of that number.
    fn evidences(
        &mut self,
        kernel: &Kernel,
        layer: &Layer,
        number: usize,
        chip: &Chip,
    ) -> Evidences<'static> {
        let key = (number, chip.architecture, operation(kernel, layer));
        if let Some((_, found)) = self.evidences.iter().find(|(of, _)| *of == key) {
            return *found;
        }
        let family = predict::family(key.2, chip.architecture);
        let found = hardware::shipped_calibration().evidences(&family, chip);
        self.evidences.push((key, found));
        found
    }
}

/// A timer for every kernel of every plan on one chip.
struct PlanTimers<'s> {
    /// Number of the chip.
    chip: usize,
    /// Those of an architecture, which a sweep may vary.
    of: Option<(Architecture, Vec<Vec<KernelTimer>>)>,
    space: &'s mut Workspace,
}

impl PlanTimers<'_> {
    /// Hands the timers over to other kernels.
    fn give_back(&mut self) {
        let timers = self
            .of
            .take()
            .into_iter()
            .flat_map(|(_, timers)| timers)
            .flatten();
        self.space.timers.extend(timers.map(|(timer, _)| timer));
    }

    /// A timer for every kernel.
    fn fill(&mut self, built: &Built, plans: &BuiltPlans, chip: &Chip) {
        self.give_back();
        let space = &mut *self.space;
        let number = self.chip;
        let mut timer = |of: &BuiltKernel| {
            let timer = space.timers.pop().map(Timer::for_another_kernel);
            let evidences = space.evidences(&of.kernel, &built.layer, number, chip);
            (timer.unwrap_or_default(), evidences)
        };
        let timers = plans
            .iter()
            .map(|kernels| kernels.iter().map(&mut timer).collect());
        self.of = Some((chip.architecture, timers.collect()));
    }

    /// Appends the outcome of every plan on `chip`.
    fn time(&mut self, built: &Built, chip: &Chip, core: u64, outcomes: &mut Vec<Result<Timing, Reason>>) {
        let plans = check_formats(&built.layer, chip, &built.document)
            .map_err(|error| reason(&error))
            .and_then(|()| built.on(chip.architecture));
        let plans = match plans {
            Ok(plans) => plans,
            Err(reason) => {
                let names = built.plans.first().map_or(0, |(_, plans)| plans.len());
                outcomes.extend((0..names).map(|_| Err(reason.clone())));
                return;
            }
        };
        let known = self.of.as_ref().map(|(architecture, _)| *architecture);
        if known != Some(chip.architecture) {
            self.fill(built, plans, chip);
        }
        let timers = self.of.as_mut().map(|(_, timers)| timers);
        let peaks = PeakRates::of(chip);
        for (kernels, timers) in plans.iter().zip(timers.into_iter().flatten()) {
            let mut sum = Sum::default();
            let mut outcome = Ok(());
            let mut label = "";
            for (of, (timer, evidences)) in kernels.iter().zip(timers) {
                if of.kernel.label != label {
                    sum.end_row();
                    label = &of.kernel.label;
                }
                let time = timer.time(&of.kernel, &of.prepared, chip, core);
                if let Err(what) = peaks.check(&of.kernel, time.total_us, time.hbm_bytes) {
                    outcome = Err(format!("invariant violated in `{}`: {what}", of.kernel.label).into());
                }
                sum.add(&of.kernel, &time, evidences.interval(time.total_us));
            }
            sum.end_row();
            outcomes.push(outcome.map(|()| sum.timing(built.state_bytes)));
        }
    }
}

/// Sums over the kernels of a plan.
#[derive(Default)]
struct Sum {
    /// Time and ends of the interval, in microseconds: of the rows of the stage table that are whole, and of the one at hand. A run adds in the same order, so
    /// that no digit differs.
    rows: [f64; 3],
    row: [f64; 3],
    /// A kernel without an interval.
    unknown: bool,
    by_bound: [f64; Bound::ALL.len()],
    mxu_us: f64,
    vpu_us: f64,
    hbm_us: f64,
    hbm_bytes: u64,
    flops: u64,
}

impl Sum {
    fn add(&mut self, kernel: &Kernel, time: &KernelFigures, interval: Option<Interval>) {
        let ends = interval.map_or([0.0; 2], |interval| [interval.low_us, interval.high_us]);
        let share = kernel.share;
        self.unknown |= interval.is_none();
        for (sum, us) in self.row.iter_mut().zip([time.total_us, ends[0], ends[1]]) {
            *sum += share * us;
        }
        self.by_bound[time.bound as usize] += share * time.total_us;
        self.mxu_us += share * time.mxu_us;
        self.vpu_us += share * time.vpu_us;
        self.hbm_us += share * time.hbm_us;
        self.hbm_bytes += (share * time.hbm_bytes as f64).round() as u64;
        self.flops += (share * kernel.work.matrix_flops.total() as f64).round() as u64;
    }

    fn end_row(&mut self) {
        for (sum, us) in self.rows.iter_mut().zip(std::mem::take(&mut self.row)) {
            *sum += us;
        }
    }

    fn timing(&self, state_bytes: u64) -> Timing {
        let [time_us, low_us, high_us] = self.rows;
        // Of equal shares the first in the order of the bounds.
        let most = (1..Bound::ALL.len()).fold(0, |most, bound| {
            if self.by_bound[bound] > self.by_bound[most] {
                bound
            } else {
                most
            }
        });
        Timing {
            time_us,
            interval_us: (!self.unknown).then_some((low_us, high_us)),
            bound: Bound::ALL[most],
            mxu_us: self.mxu_us,
            vpu_us: self.vpu_us,
            hbm_us: self.hbm_us,
            hbm_bytes: self.hbm_bytes,
            state_bytes,
            flops: self.flops,
        }
    }
}
