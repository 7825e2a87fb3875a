//! The fusions that XLA makes of a group of elementwise operations, reductions and products on a TPU.

use std::collections::BTreeSet;

use super::lower::{Index, Members, Part};
use crate::graph::{Graph, NodeId, Op, Value};

/// Cuts `group` into the kernels that XLA makes of it, in order of execution.
///
/// A fusion ends at a reduction, because what reads its result needs all of it; a product starts one, with operands that are written before, and takes along what is done to
/// its result element by element. A convolution, a transcendental, a reduction or a product is done once, and where several others read it, it is written out in its own
/// format, while sums, products, selections and roundings of elements are done again in every fusion that reads them. Fusions that do not wait for each other
/// count as one kernel. `elsewhere` are nodes whose result, where it leaves the layer, is somebody else's to write.
pub(super) fn split(index: &Index<'_>, group: &Members, elsewhere: &Members) -> Vec<Part> {
    let graph = index.graph;
    let (free, nodes): (Vec<NodeId>, Vec<NodeId>) = group.list.iter().partition(|&&id| index.is_free(id));
    // Nodes of the group that read a result of a node, each once.
    let readers = |id: NodeId| readers_in(index, group, id);
    let is_product = |id: NodeId| matches!(graph.node(id).op, Op::MatMul { .. });
    // The fusion of every node: one more than that of what has to be complete before it.
    let mut level: Vec<Option<usize>> = vec![None; graph.len()];
    for &id in &nodes {
        let product = is_product(id);
        let at = index
            .sources(id)
            .filter_map(|source| {
                let before = level[source.node.index()]?;
                let ends = matches!(graph.node(source.node).op, Op::Reduce { .. });
                let shared = !is_cheap(graph, source.node) && readers(source.node).nth(1).is_some();
                Some(before + usize::from(ends || shared || product))
            })
            .max();
        level[id.index()] = Some(at.unwrap_or(0));
    }
    // What is cheap, and what only one fusion needs, is done where it is first read; the operands of a product are there before it.
    for &id in nodes.iter().rev() {
        let once = || readers(id).take(2).count() == 1;
        let moves = is_cheap(graph, id) || (is_elementwise(graph, id) && once());
        if moves && !readers(id).any(is_product) {
            let first = readers(id).filter_map(|r| level[r.index()]).min();
            level[id.index()] = first.or(level[id.index()]);
        }
    }
    let levels = level.iter().flatten().max().map_or(0, |last| last + 1);
    let mut parts: Vec<Part> = (0..levels)
        .map(|at| {
            let mut own = vec![false; graph.len()];
            for &id in &nodes {
                own[id.index()] = level[id.index()] == Some(at);
            }
            let mut members = own.clone();
            // Operands come before what reads them, so one pass backwards finds all that is done again.
            for &id in nodes.iter().rev() {
                if is_cheap(graph, id) && readers(id).any(|r| members[r.index()] && !is_product(r)) {
                    members[id.index()] = true;
                }
            }
            for &id in &free {
                members[id.index()] = true;
                // Views count once.
                own[id.index()] = at == 0;
            }
            Part {
                members: Members::held(members),
                own: Some(Members::held(own)),
                exports: None,
                recomputed: BTreeSet::new(),
            }
        })
        .collect();
    // No other value is written by the group.
    let in_group = |value: &Value| group.contains(value.node);
    let mut exported: Vec<Value> = Vec::new();
    for part in &parts {
        for &id in part.members.list.iter().filter(|&&id| !index.is_free(id)) {
            exported.extend(
                index
                    .sources(id)
                    .filter(in_group)
                    .filter(|s| !part.members.contains(s.node)),
            );
        }
    }
    for (id, _) in graph.nodes() {
        if !group.contains(id) && !index.is_free(id) {
            exported.extend(index.sources(id).filter(in_group));
        }
    }
    for (_, bases) in index.outputs() {
        exported.extend(bases.iter().filter(|s| !elsewhere.contains(s.node)));
    }
    exported.sort_unstable();
    exported.dedup();
    for part in &mut parts {
        let on_chip = |id: NodeId| matches!(graph.node(id).op, Op::Fill(_) | Op::Identity);
        let written = exported
            .iter()
            .copied()
            .filter(|value| part.own().contains(value.node) && !on_chip(value.node));
        part.exports = Some(written.collect());
    }
    parts
}

/// Nodes of a group that compute something from a result of a node, each once.
fn readers_in<'i>(index: &'i Index<'_>, group: &'i Members, id: NodeId) -> impl Iterator<Item = NodeId> {
    let all = index.readers(id).chunk_by(|(_, a), (_, b)| a == b);
    all.map(|by_reader| by_reader[0].1)
        .filter(|&reader| group.contains(reader))
}

/// Whether a node works element by element.
fn is_elementwise(graph: &Graph, id: NodeId) -> bool {
    is_cheap(graph, id) || matches!(graph.node(id).op, Op::Elementwise(_))
}

/// Whether doing a node again costs less than writing its result and reading it back.
fn is_cheap(graph: &Graph, id: NodeId) -> bool {
    match &graph.node(id).op {
        Op::Elementwise(function) => function.transcendentals() == 0,
        Op::Cast | Op::Select { .. } | Op::Choose { .. } | Op::RepeatMinor { .. } => true,
        _ => false,
    }
}
