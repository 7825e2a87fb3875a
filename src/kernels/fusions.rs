//! The fusions that XLA makes of a group of elementwise operations, reductions and products on a TPU.

use std::collections::{BTreeMap, BTreeSet};

use super::lower::{Part, base, is_free};
use crate::graph::{Graph, NodeId, Op, Value};

/// Cuts `group` into the kernels that XLA makes of it, in order of execution.
///
/// A fusion ends at a reduction, because what reads its result needs all of it; a product starts one, with operands that are written before, and takes along what is done to
/// its result element by element. A convolution, a transcendental, a reduction or a product is done once, and where several others read it, it is written out in its own
/// format, while sums, products, selections and roundings of elements are done again in every fusion that reads them. Fusions that do not wait for each other
/// count as one kernel. `elsewhere` are nodes whose result, where it leaves the layer, is somebody else's to write.
pub(super) fn split(graph: &Graph, group: &BTreeSet<NodeId>, elsewhere: &BTreeSet<NodeId>) -> Vec<Part> {
    let nodes: Vec<NodeId> = group
        .iter()
        .copied()
        .filter(|&id| !is_free(graph.node(id)))
        .collect();
    let sources = |id: NodeId| -> Vec<Value> {
        graph
            .operands(id)
            .into_iter()
            .flat_map(|operand| base(graph, operand))
            .collect()
    };
    let mut readers: BTreeMap<NodeId, BTreeSet<NodeId>> = BTreeMap::new();
    for &id in &nodes {
        for source in sources(id) {
            readers.entry(source.node).or_default().insert(id);
        }
    }
    let readers_of = |id: NodeId| readers.get(&id).map_or(0, BTreeSet::len);
    let is_product = |id: NodeId| matches!(graph.node(id).op, Op::MatMul { .. });
    // The fusion of every node: one more than that of what has to be complete before it.
    let mut level: BTreeMap<NodeId, usize> = BTreeMap::new();
    for &id in &nodes {
        let product = is_product(id);
        let at = sources(id)
            .into_iter()
            .filter_map(|source| {
                let before = *level.get(&source.node)?;
                let ends = matches!(graph.node(source.node).op, Op::Reduce { .. });
                let shared = !is_cheap(graph, source.node) && readers_of(source.node) > 1;
                Some(before + usize::from(ends || shared || product))
            })
            .max();
        level.insert(id, at.unwrap_or(0));
    }
    // What is cheap, and what only one fusion needs, is done where it is first read; the operands of a product are there before it.
    for &id in nodes.iter().rev() {
        let moves = is_cheap(graph, id) || (readers_of(id) == 1 && is_elementwise(graph, id));
        let mut reading = readers.get(&id).into_iter().flatten();
        if moves
            && !reading.clone().any(|&r| is_product(r))
            && let Some(first) = reading.by_ref().map(|r| level[r]).min()
        {
            level.insert(id, first);
        }
    }
    let levels = level.values().max().map_or(0, |last| last + 1);
    let free: BTreeSet<NodeId> = group
        .iter()
        .copied()
        .filter(|&id| is_free(graph.node(id)))
        .collect();
    let mut parts: Vec<Part> = (0..levels)
        .map(|at| {
            let own: BTreeSet<NodeId> = nodes.iter().copied().filter(|id| level[id] == at).collect();
            let mut members = own.clone();
            // Operands come before what reads them, so one pass backwards finds all that is done again.
            for &id in nodes.iter().rev() {
                let read = || {
                    readers
                        .get(&id)
                        .into_iter()
                        .flatten()
                        .any(|&r| members.contains(&r) && !is_product(r))
                };
                if is_cheap(graph, id) && read() {
                    members.insert(id);
                }
            }
            members.extend(&free);
            Part {
                members,
                own,
                exports: Some(BTreeSet::new()),
                recomputed: BTreeSet::new(),
            }
        })
        .collect();
    if let Some(first) = parts.first_mut() {
        first.own.extend(&free);
    }
    let mut exported: BTreeSet<Value> = BTreeSet::new();
    for part in &parts {
        for &id in part.members.iter().filter(|id| !free.contains(*id)) {
            exported.extend(
                sources(id)
                    .into_iter()
                    .filter(|s| !part.members.contains(&s.node)),
            );
        }
    }
    for (id, node) in graph.nodes() {
        if !group.contains(&id) && !is_free(node) {
            exported.extend(sources(id));
        }
    }
    for (_, output) in graph.outputs() {
        exported.extend(
            base(graph, *output)
                .into_iter()
                .filter(|s| !elsewhere.contains(&s.node)),
        );
    }
    for part in &mut parts {
        let own = &part.own;
        let on_chip = |id: NodeId| matches!(graph.node(id).op, Op::Fill(_) | Op::Identity);
        let written = exported
            .iter()
            .copied()
            .filter(|value| own.contains(&value.node) && !on_chip(value.node));
        part.exports = Some(written.collect());
    }
    parts
}

/// Whether a node works element by element.
fn is_elementwise(graph: &Graph, id: NodeId) -> bool {
    is_cheap(graph, id) || matches!(graph.node(id).op, Op::Elementwise(_))
}

/// Whether doing a node again costs less than writing its result and reading it back.
fn is_cheap(graph: &Graph, id: NodeId) -> bool {
    match &graph.node(id).op {
        Op::Elementwise(function) => function.transcendentals() == 0,
        Op::Cast | Op::Select { .. } | Op::RepeatMinor { .. } => true,
        _ => false,
    }
}
