//! The op graph: one description of a layer, read by the numerics and by the timing.
//!
//! A [`Graph`] is a directed acyclic graph of typed operations on shaped, typed tensors. Shapes are concrete, but a
//! graph of a million tokens is as small as one of 64: the chunk index is one dimension of the tensors, and the
//! sequential part is a [`Scan`] node that holds its body once. [`Builder`] appends nodes and infers their types;
//! [`work`] says what a node costs in arithmetic, whatever machine it runs on.

mod build;
mod name;
mod op;
mod pairs;
mod shape;
mod stage;
mod table;
pub mod work;

pub use build::{BuildError, Builder};
pub use name::Name;
pub use op::{
    Function, Init, Mask, Op, PairLoop, Precision, ReduceFunction, Role, RowRun, Scan, matmul_dtype,
};
pub use pairs::{BlockPair, BlockPairs, PairKind, Visibility};
pub use shape::{Shape, TensorType};
pub use stage::Stage;
pub use table::{Table, retention_decay};
pub use work::Work;

use petgraph::Direction;
use petgraph::graph::DiGraph;

/// Index of a node in its [`Graph`].
pub type NodeId = petgraph::graph::NodeIndex<u32>;

/// One result of one node. Every operation has one result but [`Op::Scan`], whose results are its final carries
/// followed by its stacked outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value {
    /// The node that produces it.
    pub node: NodeId,
    /// Which of the node's results.
    pub port: usize,
}

/// An operation in its place: what it is called, which stage it belongs to, what it produces.
#[derive(Debug, Clone)]
pub struct Node {
    /// A short name in the notation of the mechanism, for instance `W`.
    pub name: Name,
    /// The stage of the layer it belongs to.
    pub stage: Stage,
    /// What it does.
    pub op: Op,
    /// Types of its results.
    pub results: Vec<TensorType>,
}

/// How an operand reaches a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand {
    /// Position among the operands of the consumer.
    pub position: usize,
    /// Which result of the producer.
    pub port: usize,
}

/// An op graph with named results.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    dag: DiGraph<Node, Operand, u32>,
    /// Operands of all nodes, one node after the other.
    operands: Vec<Value>,
    /// Where those of every node end.
    operand_ends: Vec<usize>,
    outputs: Vec<(String, Value)>,
}

impl Graph {
    /// Nodes in the order they were appended, which is a topological order.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.dag.node_indices().map(|id| (id, &self.dag[id]))
    }

    /// The node behind an index.
    ///
    /// # Panics
    /// If `id` belongs to another graph.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.dag[id]
    }

    /// Number of nodes, bodies of scans not counted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.dag.node_count()
    }

    /// Whether the graph has no node.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.dag.node_count() == 0
    }

    /// Type of a value.
    #[must_use]
    pub fn ty(&self, value: Value) -> &TensorType {
        &self.dag[value.node].results[value.port]
    }

    /// Operands of a node, in order.
    #[must_use]
    pub fn operands(&self, id: NodeId) -> &[Value] {
        let start = id
            .index()
            .checked_sub(1)
            .map_or(0, |before| self.operand_ends[before]);
        &self.operands[start..self.operand_ends[id.index()]]
    }

    /// Nodes that read any result of `id`, each once, in ascending order.
    #[must_use]
    pub fn consumers(&self, id: NodeId) -> Vec<NodeId> {
        let mut consumers: Vec<NodeId> = self.dag.neighbors_directed(id, Direction::Outgoing).collect();
        consumers.sort_unstable();
        consumers.dedup();
        consumers
    }

    /// Moves what stage `from` does before any node that `until` picks to stage `to`: all of `from` that does not depend on such a node.
    pub fn precede(&mut self, from: Stage, to: Stage, until: impl Fn(&Op) -> bool) {
        let mut after = vec![false; self.len()];
        let ids: Vec<NodeId> = self.dag.node_indices().collect();
        for id in ids {
            let later =
                until(&self.dag[id].op) || self.operands(id).iter().any(|value| after[value.node.index()]);
            after[id.index()] = later;
            if !later && self.dag[id].stage == from {
                self.dag[id].stage = to;
            }
        }
    }

    /// The inputs of the graph, in the order they were declared.
    pub fn inputs(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes()
            .filter(|(_, node)| matches!(node.op, Op::Input { .. }))
    }

    /// Named results, in the order they were declared.
    #[must_use]
    pub fn outputs(&self) -> &[(String, Value)] {
        &self.outputs
    }

    /// The result called `name`.
    #[must_use]
    pub fn output(&self, name: &str) -> Option<Value> {
        self.outputs
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| *value)
    }
}
