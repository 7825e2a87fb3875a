//! A decode graph executed token after token.

use std::collections::{BTreeMap, BTreeSet};

use ndarray::{Axis, Slice, concatenate};

use super::check::CheckError;
use crate::graph::{Builder, Init, NodeId, Op, Role, Stage, Value};
use crate::layer::Layer;
use crate::mechanisms::LayerGraph;
use crate::numerics::{Arithmetic, Execution, Real, Tensor, execute, seeded_inputs};

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
/// `inputs` holds the weights and the states of the first step; an output is the next value of the state input of the same name. Values in core
/// layout come back with all steps along the chunk dimension, the initial state as the first step sees it, the final state as the last
/// leaves it, FP8 codes multiplied by their scales. Work is the sum of all steps.
///
/// # Errors
/// Where a step cannot be executed, or the graph has no input `x`.
pub fn run_steps<R: Real>(
    built: &LayerGraph,
    inputs: &BTreeMap<NodeId, Tensor<R>>,
    tokens: &Tensor<R>,
    keep: &[Value],
    arithmetic: Arithmetic,
) -> Result<Execution<R>, CheckError> {
    let LayerGraph { graph, core } = built;
    let (x, _) = graph
        .inputs()
        .find(|(_, node)| node.name == "x")
        .ok_or_else(|| fault("x", "is no input of the graph"))?;
    let states: Vec<(NodeId, Value)> = graph
        .inputs()
        .filter(|(_, node)| {
            matches!(
                node.op,
                Op::Input {
                    role: Role::State,
                    ..
                }
            )
        })
        .filter_map(|(id, node)| Some((id, graph.output(&node.name)?)))
        .collect();
    let scale = graph.output("state_scale");
    // A value asked for twice is one value.
    let kept: BTreeSet<Value> = keep.iter().copied().collect();
    let mut wanted = keep.to_vec();
    wanted.extend(states.iter().map(|(_, next)| *next));
    wanted.extend(scale);
    wanted.extend(core.final_state);

    let mut inputs = inputs.clone();
    let mut steps: BTreeMap<Value, Vec<Tensor<R>>> = BTreeMap::new();
    let mut total: Option<Execution<R>> = None;
    for step in 0..tokens.shape().get(1).copied().unwrap_or(0) {
        let token = tokens.slice_axis(Axis(1), Slice::from(step..=step));
        inputs.insert(x, token.to_owned().into_shared());
        let mut execution = execute(graph, &inputs, &wanted, arithmetic)?;
        for (input, next) in &states {
            if let Some(state) = execution.values.get(next) {
                inputs.insert(*input, state.clone());
            }
        }
        for &value in &kept {
            let Some(tensor) = execution.values.get(&value) else {
                continue;
            };
            steps.entry(value).or_default().push(tensor.clone());
        }
        let codes = core
            .final_state
            .and_then(|state| Some((state, execution.values.get(&state)?)));
        if let (Some(scale), Some((final_state, codes))) = (scale, codes) {
            let scale = execution
                .values
                .get(&scale)
                .ok_or_else(|| fault("state scale", "was not kept"))?;
            let state = (codes * scale).into_shared();
            execution.values.insert(final_state, state);
        }
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
    for (value, parts) in steps {
        if Some(value) == core.final_state {
            continue;
        }
        let Some(first) = parts.first() else { continue };
        let whole = if first.ndim() == 6 {
            let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
            concatenate(Axis(3), &views)
                .map_err(|e| fault("value of a step", &e.to_string()))?
                .into_shared()
        } else {
            first.clone()
        };
        total.values.insert(value, whole);
    }
    Ok(total)
}

fn fault(what: &'static str, problem: &str) -> CheckError {
    CheckError::Shape {
        what,
        problem: problem.to_owned(),
    }
}
