//! A decode graph executed token after token.

use std::collections::{BTreeMap, BTreeSet};

use ndarray::{Axis, Slice, concatenate};

use super::check::CheckError;
use crate::graph::{Builder, Graph, Init, NodeId, Op, Role, Stage, Value};
use crate::layer::{Layer, Merge};
use crate::mechanisms::{self, Core, LayerGraph};
use crate::numerics::{Arithmetic, Execution, Real, Tensor, execute, seeded_inputs, tabulate};

/// Extents of a value in core layout.
const CORE_RANK: usize = 6;

/// Inputs `[B, steps, d]` of the layer, drawn as those of a forward pass over as many tokens with the same seed.
///
/// # Errors
/// Where the graph of this one input cannot be built.
pub fn seeded_tokens(layer: &Layer, steps: usize, seed: u64) -> Result<Tensor<f64>, CheckError> {
    let mut b = Builder::new(Stage::Projections);
    let dims = [layer.batch, steps, layer.model_width];
    let x = b.input(
        "x",
        dims,
        layer.activations,
        Role::Activation,
        Init::Normal { std: 1.0 },
    );
    let graph = b.finish()?;
    seeded_inputs(&graph, seed)
        .remove(&x.node)
        .ok_or_else(|| fault("x", "was not drawn"))
}

/// Runs a decode graph over `tokens [B, steps, d]`, the states of every step fed into the next.
///
/// `inputs` holds the weights, states and caches of the first step; an output is the next value of the state input of the same name, the row that is
/// appended to a cache, which is cut to what a window leaves, or that takes the next slot of a log. Where positions matter, or the place in an interval of a log, the graph
/// is built again for every step, tables included. A log starts empty; a merge of its own follows an interval, and what the log holds after the last step is merged into the final state, whose work does not count. Values in
/// core layout come back with all steps along the chunk dimension, initial states and caches as the first step sees them, the final state as the last
/// leaves it, FP8 codes multiplied by their scales. Work is the sum of all steps.
///
/// # Errors
/// Where a step cannot be built or executed, the graph has no input `x`, or `keep` asks for a value that is not part of its core.
pub fn run_steps<R: Real>(
    layer: &Layer,
    built: &LayerGraph,
    inputs: &BTreeMap<NodeId, Tensor<R>>,
    tokens: &Tensor<R>,
    keep: &[Value],
    arithmetic: Arithmetic,
) -> Result<Execution<R>, CheckError> {
    // Graphs of different positions may number their nodes differently: inputs go by their order, values by their part in the core.
    let mut current = Vec::new();
    let mut token_input = None;
    for (i, (id, node)) in built.graph.inputs().enumerate() {
        if node.name == "x" {
            token_input = Some(i);
        }
        let given = inputs.get(&id).cloned();
        current.push(given.ok_or_else(|| fault("input", &format!("`{}` is not given", node.name)))?);
    }
    let x = token_input.ok_or_else(|| fault("x", "is no input of the graph"))?;
    let parts = core_values(&built.core);
    let kept: BTreeSet<Value> = keep.iter().copied().collect();
    if !kept.iter().all(|value| parts.contains(value)) {
        return Err(fault("value of a step", "is no part of the core"));
    }

    let mut steps: BTreeMap<Value, Vec<Tensor<R>>> = BTreeMap::new();
    let mut total: Option<Execution<R>> = None;
    for step in 0..tokens.shape().get(1).copied().unwrap_or(0) {
        let log = layer.log.map(|log| log.at(step % log.interval.max(1)));
        let now = Layer {
            context: layer.context + step,
            log,
            ..layer.clone()
        };
        let moves = step > 0 && (layer.mechanism.uses("context") || log != layer.log);
        let moved = moves.then(|| mechanisms::build(&now));
        let moved = moved.transpose()?;
        let LayerGraph { graph, core } = moved.as_ref().unwrap_or(built);
        let token = tokens.slice_axis(Axis(1), Slice::from(step..=step));
        current[x] = token.to_owned().into_shared();
        if graph.inputs().count() != current.len() {
            return Err(fault("input", "comes or goes with the position"));
        }
        let mut fed = BTreeMap::new();
        for ((id, node), tensor) in graph.inputs().zip(&current) {
            let tensor = match node.op {
                Op::Input {
                    init: Init::Table(table),
                    role: Role::Weight,
                } if moved.is_some() => tabulate(&node.results[0], table).mapv(R::from_f64).into_shared(),
                _ => tensor.clone(),
            };
            fed.insert(id, tensor);
        }

        let same: BTreeMap<Value, Value> = parts.iter().copied().zip(core_values(core)).collect();
        let mut wanted: Vec<Value> = kept.iter().filter_map(|value| same.get(value)).copied().collect();
        wanted.extend(graph.outputs().iter().map(|(_, value)| *value));
        let mut execution = execute(graph, &fed, &wanted, arithmetic)?;

        let longest = Layer {
            context: now.context + 1,
            ..now.clone()
        }
        .cached_tokens();
        for ((_, node), before) in graph.inputs().zip(&mut current) {
            let next = graph
                .output(&node.name)
                .and_then(|value| execution.values.get(&value));
            let (Some(next), Op::Input { role, .. }) = (next, &node.op) else {
                continue;
            };
            *before = match role {
                Role::Cache => appended(before, next, longest)?,
                Role::State => next.clone(),
                Role::Log => logged(before, next, log.map_or(0, |log| log.position))?,
                Role::Activation | Role::Weight | Role::Body => continue,
            };
        }
        if let Some(log) = log
            && log.merge == Merge::Separate
            && log.position + 1 == log.interval
        {
            let merged = merged(&now, graph, &current, log.interval, arithmetic)?;
            for ((_, node), before) in graph.inputs().zip(&mut current) {
                if let Some(next) = merged.get(node.name.as_str()) {
                    before.clone_from(next);
                }
            }
        }
        let of_step = |value: Value| execution.values.get(same.get(&value)?).cloned();
        for &value in &kept {
            if let Some(tensor) = of_step(value) {
                let parts = steps.entry(value).or_default();
                // Of states and caches only the first is returned.
                if parts.is_empty() || tensor.ndim() == CORE_RANK {
                    parts.push(tensor);
                }
            }
        }
        let mut final_state = built.core.final_state.and_then(of_step);
        if let (Some(scale), Some(codes)) = (graph.output("state_scale"), &final_state) {
            let scale = execution
                .values
                .get(&scale)
                .ok_or_else(|| fault("state scale", "was not kept"))?;
            final_state = Some((codes * scale).into_shared());
        }
        execution.values = built.core.final_state.into_iter().zip(final_state).collect();
        total = Some(match total {
            None => execution,
            Some(before) => Execution {
                work: std::array::from_fn(|i| {
                    let (stage, work) = before.work[i];
                    (stage, work + execution.work[i].1)
                }),
                non_finite: before.non_finite.or(execution.non_finite),
                values: execution.values,
            },
        });
    }
    let mut total = total.ok_or_else(|| fault("x", "has no tokens"))?;
    if let (Some(log), Some(value)) = (layer.log, built.core.final_state) {
        let steps = tokens.shape().get(1).copied().unwrap_or(0);
        let left = steps % log.interval.max(1);
        let merged = merged(layer, &built.graph, &current, left, arithmetic)?;
        let part = |name: &str| {
            merged.get(name).cloned().or_else(|| {
                let mut inputs = built.graph.inputs().zip(&current);
                let input = inputs.find(|((_, node), _)| node.name == name);
                input.map(|(_, tensor)| tensor.clone())
            })
        };
        let mut state = part("state").ok_or_else(|| fault("state", "is no input of the graph"))?;
        if let Some(scale) = part("state_scale") {
            state = (&state * &scale).into_shared();
        }
        total.values.insert(value, state);
    }
    for (value, parts) in steps {
        if Some(value) == built.core.final_state {
            continue;
        }
        let Some(first) = parts.first() else { continue };
        let whole = if first.ndim() == CORE_RANK {
            joined(Axis(3), &parts)?
        } else {
            first.clone()
        };
        total.values.insert(value, whole);
    }
    Ok(total)
}

/// What a merge of the first `entries` entries of the log writes, by name; nothing without entries.
fn merged<R: Real>(
    layer: &Layer,
    graph: &Graph,
    current: &[Tensor<R>],
    entries: usize,
    arithmetic: Arithmetic,
) -> Result<BTreeMap<String, Tensor<R>>, CheckError> {
    let Some(merge) = mechanisms::build_merge(layer, entries)? else {
        return Ok(BTreeMap::new());
    };
    let mut fed = BTreeMap::new();
    for (id, node) in merge.graph.inputs() {
        let tensor = match node.op {
            Op::Input {
                init: Init::Table(table),
                ..
            } => Some(tabulate(&node.results[0], table).mapv(R::from_f64).into_shared()),
            _ => graph
                .inputs()
                .zip(current)
                .find(|((_, given), _)| given.name == node.name)
                .map(|(_, tensor)| tensor.clone()),
        };
        fed.insert(id, tensor.ok_or_else(|| fault("log", "is no input of the step"))?);
    }
    let wanted: Vec<Value> = merge.graph.outputs().iter().map(|(_, value)| *value).collect();
    let mut execution = execute(&merge.graph, &fed, &wanted, arithmetic)?;
    let outputs = merge.graph.outputs().iter();
    Ok(outputs
        .filter_map(|(name, value)| Some((name.clone(), execution.values.remove(value)?)))
        .collect())
}

/// A log with `row` in the slot at `position`.
fn logged<R: Real>(log: &Tensor<R>, row: &Tensor<R>, position: usize) -> Result<Tensor<R>, CheckError> {
    let slots = log.shape().get(3).copied().unwrap_or(0);
    let fits = position < slots && row.ndim() == log.ndim() && row.shape().get(3) == Some(&1);
    if !fits {
        return Err(fault("entry of a log", "has no slot"));
    }
    let mut parts = Vec::new();
    for (part, range) in [(log, 0..position), (row, 0..1), (log, position + 1..slots)] {
        if !range.is_empty() {
            parts.push(
                part.slice_axis(Axis(3), Slice::from(range))
                    .to_owned()
                    .into_shared(),
            );
        }
    }
    joined(Axis(3), &parts)
}

/// Everything a core names, in one order.
fn core_values(core: &Core) -> Vec<Value> {
    let mut values = core.recurrence.values();
    values.push(core.output);
    values.extend(core.final_state);
    values.extend(core.initial_state);
    values.extend(core.log_decay);
    values
}

/// A cache `[B, heads, 1, rows, channels]` with one more row, of which the last `longest` are left.
fn appended<R: Real>(cache: &Tensor<R>, row: &Tensor<R>, longest: usize) -> Result<Tensor<R>, CheckError> {
    let all = joined(Axis(3), &[cache.clone(), row.clone()])?;
    let rows = all.shape()[3];
    let last = Slice::from(rows.saturating_sub(longest)..rows);
    Ok(all.slice_axis(Axis(3), last).to_owned().into_shared())
}

fn joined<R: Real>(axis: Axis, parts: &[Tensor<R>]) -> Result<Tensor<R>, CheckError> {
    let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
    let whole = concatenate(axis, &views).map_err(|e| fault("value of a step", &e.to_string()))?;
    Ok(whole.into_shared())
}

fn fault(what: &'static str, problem: &str) -> CheckError {
    CheckError::Shape {
        what,
        problem: problem.to_owned(),
    }
}
