//! The execution of graphs: against `NumPy`, against the token-by-token recurrences, and against the accounted work.

mod chunk_form;
mod golden;
mod work;

use std::collections::BTreeMap;

use ndarray::{ArrayD, IxDyn};
use tpusim::graph::{Graph, NodeId, Value};
use tpusim::numerics::{Arithmetic, Execution, Real, Tensor, execute};

/// A tensor from its elements in row-major order.
fn tensor<R: Real>(dims: &[usize], elements: &[f64]) -> Tensor<R> {
    let elements = elements.iter().map(|&x| R::from_f64(x)).collect();
    ArrayD::from_shape_vec(IxDyn(dims), elements)
        .unwrap()
        .into_shared()
}

/// Executes a graph whose inputs are given in the order they were declared, and keeps its outputs.
fn run<R: Real>(graph: &Graph, inputs: &[Tensor<R>], arithmetic: Arithmetic) -> Execution<R> {
    let inputs: BTreeMap<NodeId, Tensor<R>> = graph
        .inputs()
        .map(|(id, _)| id)
        .zip(inputs.iter().cloned())
        .collect();
    let keep: Vec<Value> = graph.outputs().iter().map(|(_, value)| *value).collect();
    execute(graph, &inputs, &keep, arithmetic).unwrap()
}

/// The named output of an execution.
fn output<'e, R>(graph: &Graph, execution: &'e Execution<R>, name: &str) -> &'e Tensor<R> {
    &execution.values[&graph.output(name).unwrap()]
}
