//! Executing a graph on real arrays.

use std::collections::{BTreeMap, VecDeque};

use ndarray::{ArrayD, Axis, IxDyn};
use rayon::prelude::*;

use super::plan::{Marks, NonFinite, Plan, Step};
use super::pool::Pool;
use super::real::{Real, Tensor};
use super::sweep::{Finish, Outcome, Tally, elements, elements_mut, standard, sweep};
use super::{elementwise, layout, matmul, reduce, sequential};
use crate::graph::{BlockPair, Graph, NodeId, Op, PairLoop, Scan, Shape, Stage, Value, Work};

/// How faithful the arithmetic of an execution is to the formats of the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Everything in the machine format, formats of the graph ignored: with f64, the mathematics of the graph.
    Exact,
    /// The result of every node is rounded to its format, to nearest even, and f32 operands of a matrix product are decomposed into
    /// bf16 as its precision says; sums and products accumulate in the machine format. With f32, what the chip computes, but for
    /// the order of its sums.
    Declared,
}

/// Executed work of every stage, in stage order.
pub type ExecutedWork = [(Stage, Work); Stage::ALL.len()];

/// What an execution yields.
#[derive(Debug, Clone)]
pub struct Execution<R> {
    /// The values that were asked for.
    pub values: BTreeMap<Value, Tensor<R>>,
    /// Arithmetic that was really executed, counted by the loops that did it, in the conventions of [`crate::graph::work`]. The body of a
    /// scan counts for the stage of the scan.
    pub work: ExecutedWork,
    /// The first node, in order of execution, with a NaN or an infinity that matters: one that a mask discards does not, and neither
    /// does the minus infinity a mask fills with.
    pub non_finite: Option<NonFinite>,
}

/// Why a graph could not be executed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecuteError {
    /// No array was given for an input.
    #[error("input `{name}` {expected} has no values")]
    MissingInput {
        /// Name of the input.
        name: String,
        /// Its shape.
        expected: Box<Shape>,
    },
    /// The array given for an input has another shape.
    #[error("input `{name}` is {expected}, its values are {found}")]
    InputShape {
        /// Name of the input.
        name: String,
        /// Shape in the graph.
        expected: Box<Shape>,
        /// Shape of the array.
        found: Box<Shape>,
    },
    /// A value to be kept is not one of the graph's.
    #[error("the graph has no result {port} of a node {node}")]
    UnknownValue {
        /// Index of the node.
        node: usize,
        /// Which of its results.
        port: usize,
    },
    /// An operation has no meaning as it stands.
    #[error("`{name}` ({stage}): {problem}")]
    Meaningless {
        /// Name of the node.
        name: String,
        /// Its stage.
        stage: Stage,
        /// What is wrong.
        problem: String,
    },
}

/// Executes `graph` on `inputs` and returns the values in `keep`.
///
/// The result does not depend on the number of threads. Between machines the last bits of products, exponentials and logarithms
/// may differ.
///
/// # Errors
/// If an input is missing or has another shape than the graph says, if a value to be kept does not exist, or if a mask has blocks of no rows.
pub fn execute<R: Real>(
    graph: &Graph,
    inputs: &BTreeMap<NodeId, Tensor<R>>,
    keep: &[Value],
    arithmetic: Arithmetic,
) -> Result<Execution<R>, ExecuteError> {
    for value in keep {
        let results = if value.node.index() < graph.len() {
            graph.node(value.node).results.len()
        } else {
            0
        };
        if value.port >= results {
            return Err(ExecuteError::UnknownValue {
                node: value.node.index(),
                port: value.port,
            });
        }
    }
    let plan = Plan::new(graph, keep.iter().copied().collect());
    let mut marks = Marks::new(&plan);
    let mut work = Stage::ALL.map(|stage| (stage, Work::default()));
    let mut pool = Pool::new();
    let mut run = Run {
        arithmetic,
        slots: empty_slots(&plan),
        within: None,
        work: &mut work,
        pool: &mut pool,
    };
    run.all(&plan, &mut marks, &mut |id| inputs.get(&id).cloned())?;
    let slots = run.slots;
    let values = keep
        .iter()
        .filter_map(|&value| {
            slots[value.node.index()][value.port]
                .clone()
                .map(|tensor| (value, tensor))
        })
        .collect();
    Ok(Execution {
        values,
        work,
        non_finite: plan.first_exposed(&marks),
    })
}

/// Results by node and port; `None` before they exist and after their last use.
type Slots<R> = Vec<Vec<Option<Tensor<R>>>>;

fn empty_slots<R: Real>(plan: &Plan) -> Slots<R> {
    plan.steps
        .iter()
        .map(|step| vec![None; step.node.results.len()])
        .collect()
}

struct Run<'w, R> {
    arithmetic: Arithmetic,
    slots: Slots<R>,
    /// The stage of the outermost scan this is the body of.
    within: Option<Stage>,
    work: &'w mut ExecutedWork,
    pool: &'w mut Pool<R>,
}

impl<R: Real> Run<'_, R> {
    /// Executes every step; `feed` gives the inputs.
    fn all(
        &mut self,
        plan: &Plan,
        marks: &mut Marks,
        feed: &mut dyn FnMut(NodeId) -> Option<Tensor<R>>,
    ) -> Result<(), ExecuteError> {
        for (i, step) in plan.steps.iter().enumerate() {
            match (&step.node.op, &step.body) {
                (Op::Scan(scan), Some(body)) => {
                    if let Some(inner) = &mut marks.inner[i] {
                        self.scan(step, scan, body, inner)?;
                        marks.own[i] |= body.first_exposed(inner).is_some();
                    }
                }
                (Op::Input { .. }, _) => {
                    let outcome = self.input(step, feed(step.id))?;
                    marks.own[i] |= outcome.non_finite;
                    self.slots[i][0] = Some(outcome.value);
                }
                _ => {
                    let outcome = self.node(step)?;
                    marks.own[i] |= outcome.non_finite;
                    let stage = self.within.unwrap_or(step.node.stage);
                    self.work[stage as usize].1 += outcome.work;
                    self.slots[i][0] = Some(outcome.value);
                }
            }
            for value in &step.releases {
                if let Some(tensor) = self.slots[value.node.index()][value.port].take() {
                    self.pool.give(tensor);
                }
            }
        }
        Ok(())
    }

    /// An input, rounded to its format where it is not of that format already.
    fn input(&mut self, step: &Step, given: Option<Tensor<R>>) -> Result<Outcome<R>, ExecuteError> {
        let ty = &step.node.results[0];
        let name = || step.node.name.to_string();
        let Some(tensor) = given else {
            return Err(ExecuteError::MissingInput {
                name: name(),
                expected: Box::new(ty.shape.clone()),
            });
        };
        if tensor.shape() != ty.shape.dims() {
            let found = Box::new(Shape::new(tensor.shape()));
            return Err(ExecuteError::InputShape {
                name: name(),
                expected: Box::new(ty.shape.clone()),
                found,
            });
        }
        if self.within.is_some() {
            return Ok(Outcome::moved(tensor));
        }
        let tensor = standard(self.pool, tensor);
        let finish = self.finish(step);
        let fits = !finish.round
            || every_block(elements(&tensor), |block| {
                let mut rounded = block.to_vec();
                R::round_slice(finish.dtype, &mut rounded);
                rounded
                    .iter()
                    .zip(block)
                    .all(|(r, x)| r == x || (r.is_nan() && x.is_nan()))
            });
        let value = if fits {
            tensor
        } else {
            elementwise::cast(self.pool, tensor, finish).value
        };
        let non_finite = !every_block(elements(&value), R::all_finite);
        Ok(Outcome {
            value,
            work: Work::default(),
            non_finite,
        })
    }

    /// Any operation but an input and a scan.
    fn node(&mut self, step: &Step) -> Result<Outcome<R>, ExecuteError> {
        let strided = matches!(
            step.node.op,
            Op::MatMul { .. } | Op::Transpose { .. } | Op::Reshape | Op::Slice { .. }
        );
        let mut operands = self.take(step, !strided);
        let finish = self.finish(step);
        let dims = step.node.results[0].shape.dims();
        let meaningless = |problem: &str| ExecuteError::Meaningless {
            name: step.node.name.to_string(),
            stage: step.node.stage,
            problem: problem.to_owned(),
        };
        let mut next = || {
            operands
                .pop_front()
                .ok_or_else(|| meaningless("an operand is missing"))
        };
        Ok(match &step.node.op {
            Op::Input { .. } | Op::Scan(_) => return Err(meaningless("is no plain operation")),
            Op::Fill(value) => constant(self.pool, dims, finish, |_| R::from_f64(*value)),
            Op::Identity => {
                let n = dims[dims.len() - 1];
                constant(self.pool, dims, finish, |i| {
                    if (i / n) % n == i % n { R::one() } else { R::zero() }
                })
            }
            Op::MatMul {
                transpose_a,
                transpose_b,
                precision,
            } => {
                let product = matmul::Product {
                    dtypes: (step.dtypes[0], step.dtypes[1]),
                    transposed: (*transpose_a, *transpose_b),
                    precision: (self.arithmetic == Arithmetic::Declared).then_some(*precision),
                };
                matmul::matmul(self.pool, product, next()?, next()?, dims, finish)
            }
            Op::Elementwise(function) if function.arity() == 2 => {
                elementwise::zip(self.pool, *function, next()?, next()?, dims, finish)
                    .ok_or_else(|| meaningless("takes one operand"))?
            }
            Op::Elementwise(function) => elementwise::map(self.pool, *function, next()?, finish)
                .ok_or_else(|| meaningless("takes two operands"))?,
            Op::Reduce { function, axis } => reduce::reduce(self.pool, *function, *axis, next()?, finish),
            Op::CumulativeSum { axis } => reduce::cumulative_sum(self.pool, *axis, next()?, finish),
            Op::Select { mask, fill } => elementwise::select(self.pool, *mask, *fill, next()?, finish)
                .ok_or_else(|| meaningless("the mask has blocks of no rows"))?,
            Op::Choose { mask } => elementwise::choose(self.pool, *mask, next()?, next()?, finish)
                .ok_or_else(|| meaningless("the mask has blocks of no rows"))?,
            Op::SelectVisible { visibility, fill } => {
                elementwise::select_visible(self.pool, *visibility, *fill, next()?, next()?, finish)
            }
            Op::Cast => elementwise::cast(self.pool, next()?, finish),
            Op::Reshape => layout::reshape(self.pool, next()?, dims),
            Op::Transpose { permutation } => layout::transpose(next()?, permutation),
            Op::Slice { axis, start } => {
                layout::slice(self.pool, next()?, *axis, *start, dims[*axis], finish)
            }
            Op::Concatenate { axis } => layout::concatenate(self.pool, operands.into(), *axis, dims),
            Op::Pad { axis } => layout::pad(self.pool, next()?, *axis, dims),
            Op::RepeatMinor { times } => layout::repeat_minor(self.pool, next()?, *times, dims, finish),
            Op::GatherRows { axis, runs } => layout::gather_rows(self.pool, next()?, *axis, runs, dims),
            Op::CausalConvolution { starts, .. } => {
                let (x, taps) = (next()?, next()?);
                sequential::causal_convolution(self.pool, (x, taps, next().ok()), starts, finish)
            }
            Op::ForwardSubstitution => {
                sequential::substitution(self.pool, next()?, next()?, dims, false, finish)
            }
            Op::BackwardSubstitution => {
                sequential::substitution(self.pool, next()?, next()?, dims, true, finish)
            }
            Op::Cholesky => sequential::cholesky(self.pool, next()?, finish),
        })
    }

    /// The loop over pairs of blocks: the body once per pair, on the carries of its row block.
    fn pair_scan(
        &mut self,
        step: &Step,
        (scan, pairs): (&Scan, &PairLoop),
        body: &Plan,
        marks: &mut Marks,
    ) -> Result<(), ExecuteError> {
        let mut operands: Vec<Tensor<R>> = self.take(step, false).into();
        let scanned = operands.split_off(scan.carries.min(operands.len()));
        let mut carries: Vec<ArrayD<R>> = operands
            .into_iter()
            .map(|t| standard(self.pool, t).into_owned())
            .collect();
        let positions: BTreeMap<NodeId, usize> = scan
            .body
            .inputs()
            .enumerate()
            .map(|(position, (id, _))| (id, position))
            .collect();
        let outputs: Vec<Value> = scan.body.outputs().iter().map(|(_, value)| *value).collect();
        let within = self.within.or(Some(step.node.stage));
        let axis = Axis(scan.axis);
        let blocks = &pairs.blocks;
        for BlockPair { row, column, origin } in blocks.iter() {
            let mut run = Run {
                arithmetic: self.arithmetic,
                slots: empty_slots(body),
                within,
                work: &mut *self.work,
                pool: &mut *self.pool,
            };
            run.all(body, marks, &mut |id| {
                let position = *positions.get(&id)?;
                if let Some(carry) = carries.get(position) {
                    return Some(carry.index_axis(axis, row).to_owned().into_shared());
                }
                let position = position - carries.len();
                let at = if position < pairs.rows { row } else { column };
                if let Some(whole) = scanned.get(position) {
                    Some(whole.clone().index_axis_move(axis, at))
                } else {
                    let mut tensor = ArrayD::zeros(IxDyn(&[2]));
                    elements_mut(&mut tensor)
                        .iter_mut()
                        .zip(origin)
                        .for_each(|(x, at)| *x = R::from_f64(at as f64));
                    Some(tensor.into_shared())
                }
            })?;
            for (carry, value) in carries.iter_mut().zip(&outputs) {
                if let Some(next) = &run.slots[value.node.index()][value.port] {
                    carry.index_axis_mut(axis, row).assign(next);
                }
            }
            for tensor in run.slots.into_iter().flatten().flatten() {
                self.pool.give(tensor);
            }
        }
        for (slot, carry) in self.slots[step.id.index()].iter_mut().zip(carries) {
            *slot = Some(carry.into_shared());
        }
        Ok(())
    }

    /// The loop: the body once per trip, on slices of the scanned operands.
    fn scan(&mut self, step: &Step, scan: &Scan, body: &Plan, marks: &mut Marks) -> Result<(), ExecuteError> {
        if let Some(pairs) = &scan.pairs {
            return self.pair_scan(step, (scan, pairs), body, marks);
        }
        let mut operands: Vec<Tensor<R>> = self.take(step, false).into();
        let invariants = operands.split_off((scan.carries + scan.scanned).min(operands.len()));
        let scanned = operands.split_off(scan.carries.min(operands.len()));
        // Several segments start from their own slices of the initial carries and leave theirs in the final ones.
        let segments = (scan.segments.len() > 1).then_some(&scan.segments);
        let mut finals: Vec<Tensor<R>> = match segments {
            Some(_) => operands.clone(),
            None => Vec::new(),
        };
        let mut carries: Vec<Option<Tensor<R>>> = operands.into_iter().map(Some).collect();
        let positions: BTreeMap<NodeId, usize> = scan
            .body
            .inputs()
            .enumerate()
            .map(|(position, (id, _))| (id, position))
            .collect();
        let outputs: Vec<Value> = scan.body.outputs().iter().map(|(_, value)| *value).collect();
        let mut stacks: Vec<_> = step.node.results[scan.carries..]
            .iter()
            .map(|ty| self.pool.scratch(ty.shape.dims()))
            .collect();
        let within = self.within.or(Some(step.node.stage));
        let mut segment = 0;
        for trip in 0..scan.trips {
            if let Some(segments) = segments {
                if segments.get(segment + 1) == Some(&trip) {
                    segment += 1;
                }
                if segments[segment] == trip {
                    carries = finals.iter().map(|all| Some(entry(all, segment))).collect();
                }
            }
            let mut run = Run {
                arithmetic: self.arithmetic,
                slots: empty_slots(body),
                within,
                work: &mut *self.work,
                pool: &mut *self.pool,
            };
            run.all(body, marks, &mut |id| {
                let position = *positions.get(&id)?;
                if position < carries.len() {
                    return carries[position].take();
                }
                let position = position - carries.len();
                match scanned.get(position) {
                    Some(whole) => Some(whole.clone().index_axis_move(Axis(scan.axis), trip)),
                    None => invariants.get(position - scanned.len()).cloned(),
                }
            })?;
            let result = |value: Value| run.slots[value.node.index()][value.port].clone();
            for (stack, value) in stacks.iter_mut().zip(&outputs[scan.carries..]) {
                if let Some(part) = result(*value) {
                    stack
                        .index_axis_mut(Axis(scan.axis.min(part.ndim())), trip)
                        .assign(&part);
                }
            }
            carries = outputs[..scan.carries]
                .iter()
                .map(|value| result(*value))
                .collect();
            for tensor in run.slots.into_iter().flatten().flatten() {
                self.pool.give(tensor);
            }
            if let Some(segments) = segments
                && (segments.get(segment + 1) == Some(&(trip + 1)) || trip + 1 == scan.trips)
            {
                for (all, last) in finals.iter_mut().zip(&carries) {
                    if let Some(last) = last {
                        all.index_axis_mut(Axis(0), segment)
                            .assign(&last.index_axis(Axis(0), 0));
                    }
                }
            }
        }
        if segments.is_some() {
            carries = finals.into_iter().map(Some).collect();
        }
        let results = carries
            .into_iter()
            .chain(stacks.into_iter().map(|stack| Some(stack.into_shared())));
        for (slot, value) in self.slots[step.id.index()].iter_mut().zip(results) {
            *slot = value;
        }
        Ok(())
    }

    /// The operands of a step: handed over where this is their last use, so that their storage can be reused.
    fn take(&mut self, step: &Step, in_standard_layout: bool) -> VecDeque<Tensor<R>> {
        let operands = step.operands.iter().enumerate();
        let taken = operands.filter_map(|(position, value)| {
            let slot = &mut self.slots[value.node.index()][value.port];
            if in_standard_layout {
                // Kept in the slot, so that the next reader does not copy it again.
                *slot = slot.take().map(|tensor| standard(self.pool, tensor));
            }
            let last = step.releases.contains(value) && !step.operands[position + 1..].contains(value);
            if last { slot.take() } else { slot.clone() }
        });
        taken.collect()
    }

    fn finish(&self, step: &Step) -> Finish {
        let dtype = step.node.results[0].dtype;
        Finish {
            dtype,
            round: self.arithmetic == Arithmetic::Declared && R::rounds(dtype),
            minus_infinity_fails: matches!(
                step.node.op,
                Op::MatMul { .. } | Op::ForwardSubstitution | Op::BackwardSubstitution
            ),
        }
    }
}

/// The initial carry of one segment, which keeps dimension 0 with extent 1.
fn entry<R: Real>(all: &Tensor<R>, segment: usize) -> Tensor<R> {
    all.slice_axis(Axis(0), (segment..=segment).into())
        .to_owned()
        .into_shared()
}

/// A tensor made on chip from the position of every element. It holds what it was asked to hold and is not checked.
fn constant<R: Real>(
    pool: &mut Pool<R>,
    dims: &[usize],
    finish: Finish,
    value: impl Fn(usize) -> R + Sync,
) -> Outcome<R> {
    let mut out = pool.scratch(dims);
    sweep(elements_mut(&mut out), 1, |offset, block| {
        block
            .iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x = value(offset + i));
        finish.apply(block);
        Tally::default()
    });
    Outcome::moved(out.into_shared())
}

/// Whether `f` holds for every block of the elements.
fn every_block<R: Real>(elements: &[R], f: impl Fn(&[R]) -> bool + Send + Sync) -> bool {
    elements.par_chunks(1 << 14).all(f)
}
