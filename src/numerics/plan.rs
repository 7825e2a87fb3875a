//! In which order a graph is executed, and when a tensor can be freed.

use std::collections::BTreeSet;

use crate::dtype::Dtype;
use crate::graph::{Graph, Node, NodeId, Op, Precision, Role, Stage, Value};

/// The steps of a graph, with the steps of the bodies of its scans.
#[derive(Debug)]
pub(super) struct Plan<'g> {
    pub(super) graph: &'g Graph,
    pub(super) steps: Vec<Step<'g>>,
    /// Values that stay until the end.
    pub(super) kept: BTreeSet<Value>,
}

/// One node.
#[derive(Debug)]
pub(super) struct Step<'g> {
    pub(super) id: NodeId,
    pub(super) node: &'g Node,
    pub(super) operands: Vec<Value>,
    /// Formats of the operands.
    pub(super) dtypes: Vec<Dtype>,
    /// Results nobody reads and operands nobody reads later.
    pub(super) releases: Vec<Value>,
    /// The body of a scan.
    pub(super) body: Option<Plan<'g>>,
}

impl<'g> Plan<'g> {
    /// A plan that keeps `kept` to the end. Nodes stand in the order they were appended, which is topological.
    pub(super) fn new(graph: &'g Graph, kept: BTreeSet<Value>) -> Self {
        let mut steps: Vec<Step> = graph
            .nodes()
            .map(|(id, node)| {
                let body = match &node.op {
                    Op::Scan(scan) => Some(Plan::new(&scan.body, outputs(&scan.body))),
                    _ => None,
                };
                let operands = graph.operands(id).to_vec();
                let dtypes = operands.iter().map(|&value| graph.ty(value).dtype).collect();
                Step {
                    id,
                    node,
                    operands,
                    dtypes,
                    releases: Vec::new(),
                    body,
                }
            })
            .collect();
        let mut seen = kept.clone();
        for step in steps.iter_mut().rev() {
            let results = (0..step.node.results.len()).map(|port| Value { node: step.id, port });
            let ends: Vec<Value> = results
                .chain(step.operands.iter().copied())
                .filter(|&v| seen.insert(v))
                .collect();
            step.releases = ends;
        }
        Plan { graph, steps, kept }
    }

    /// The first node whose values are not finite and matter: marked, and read by something other than a mask that
    /// discards what is wrong with them.
    pub(super) fn first_exposed(&self, marks: &Marks) -> Option<NonFinite> {
        let outputs: BTreeSet<NodeId> = self
            .kept
            .iter()
            .map(|v| v.node)
            .chain(self.graph.outputs().iter().map(|(_, v)| v.node))
            .collect();
        // Consumers stand behind their producers, so one pass from the end settles who leaks.
        let mut leaks = vec![false; self.steps.len()];
        for (i, step) in self.steps.iter().enumerate().rev() {
            leaks[i] = outputs.contains(&step.id)
                || self.graph.consumers(step.id).into_iter().any(|consumer| {
                    let c = consumer.index();
                    match self.steps[c].node.op {
                        Op::Select { .. } | Op::SelectVisible { .. } => marks.own[c],
                        Op::Slice { .. } | Op::Cast => marks.own[c] && leaks[c],
                        Op::Reshape
                        | Op::Transpose { .. }
                        | Op::Concatenate { .. }
                        | Op::Pad { .. }
                        | Op::GatherRows { .. } => leaks[c],
                        _ => true,
                    }
                });
        }
        let i = (0..self.steps.len()).find(|&i| marks.own[i] && leaks[i])?;
        let step = &self.steps[i];
        let inner = step
            .body
            .as_ref()
            .zip(marks.inner[i].as_ref())
            .and_then(|(body, m)| body.first_exposed(m));
        let scan = matches!(step.node.op, Op::Scan(_)).then(|| step.node.name.to_string());
        Some(match inner {
            Some(inner) => NonFinite {
                scan: inner.scan.or(scan),
                ..inner
            },
            None => NonFinite {
                node: step.node.name.to_string(),
                stage: step.node.stage,
                scan: None,
            },
        })
    }
}

/// Where a NaN or an unwanted infinity first appeared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NonFinite {
    /// Name of the node.
    pub node: String,
    /// Its stage.
    pub stage: Stage,
    /// The innermost scan it is the body of, if any.
    pub scan: Option<String>,
}

impl std::fmt::Display for NonFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` ({})", self.node, self.stage)?;
        match &self.scan {
            Some(scan) => write!(f, " in scan `{scan}`"),
            None => Ok(()),
        }
    }
}

/// Which nodes produced values that are not finite.
#[derive(Debug)]
pub(super) struct Marks {
    pub(super) own: Vec<bool>,
    pub(super) inner: Vec<Option<Marks>>,
}

impl Marks {
    pub(super) fn new(plan: &Plan) -> Self {
        Marks {
            own: vec![false; plan.steps.len()],
            inner: plan
                .steps
                .iter()
                .map(|step| step.body.as_ref().map(Marks::new))
                .collect(),
        }
    }
}

/// Bytes that tensors occupy at the worst moment of an execution that keeps the outputs of the graph, elements taking `bytes_per_element`; the
/// inputs, which the caller holds, included.
///
/// An upper estimate from the liveness of values alone: storage that is reused in place counts twice for that moment, reshapes
/// share the storage of their operand, a transposed view counts as a copy, and the bf16 pieces of f32 operands are counted with
/// their product.
#[must_use]
pub fn memory_estimate(graph: &Graph, bytes_per_element: u64) -> u64 {
    peak_elements(&Plan::new(graph, outputs(graph))).saturating_mul(bytes_per_element)
}

fn outputs(graph: &Graph) -> BTreeSet<Value> {
    graph.outputs().iter().map(|(_, value)| *value).collect()
}

fn peak_elements(plan: &Plan) -> u64 {
    let elements = |value: Value| plan.graph.ty(value).shape.elements();
    // Storage of every value by the value that owns it, and how many live values share it.
    let mut owner: Vec<Vec<Value>> = plan.steps.iter().map(|_| Vec::new()).collect();
    let mut shared: Vec<Vec<u32>> = plan
        .steps
        .iter()
        .map(|step| vec![0; step.node.results.len()])
        .collect();
    let (mut live, mut peak) = (0_u64, 0_u64);
    for (i, step) in plan.steps.iter().enumerate() {
        for port in 0..step.node.results.len() {
            let own = Value { node: step.id, port };
            let root = if let (Op::Reshape, Some(operand)) = (&step.node.op, step.operands.first()) {
                owner[operand.node.index()][operand.port]
            } else {
                live += elements(own);
                own
            };
            owner[i].push(root);
            shared[root.node.index()][root.port] += 1;
        }
        let inside = match &step.node.op {
            Op::MatMul { precision, .. } => {
                let copies = match precision {
                    Precision::Default => 1,
                    Precision::High => 2,
                    Precision::Highest => 3,
                };
                let wide = step
                    .operands
                    .iter()
                    .filter(|&&v| plan.graph.ty(v).dtype == Dtype::F32);
                wide.map(|&v| elements(v)).sum::<u64>() * copies
            }
            _ => step.body.as_ref().map_or(0, peak_elements),
        };
        peak = peak.max(live + inside);
        for value in &step.releases {
            let root = owner[value.node.index()][value.port];
            if matches!(plan.graph.node(root.node).op, Op::Input { role, .. } if role != Role::Body) {
                continue;
            }
            let count = &mut shared[root.node.index()][root.port];
            *count -= 1;
            if *count == 0 {
                live -= elements(root);
            }
        }
    }
    peak
}
