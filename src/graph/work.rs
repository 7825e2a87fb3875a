//! Arithmetic of a node, whatever machine it runs on.
//!
//! Conventions (one table for the whole project): a matrix product `[m, k] x [k, n]` is `2 m n k` FLOPs, masked triangles included,
//! because a systolic array does not skip them; an add, multiply, maximum, select or rounding is one vector
//! operation per element of the result; a reduction is one per element of its operand; an exponential, logarithm, reciprocal,
//! reciprocal square root or tanh is one transcendental. Views cost nothing.

use std::ops::{Add, AddAssign};

use serde::Serialize;

use super::op::{Op, matmul_dtype};
use super::{Graph, NodeId, Stage, TensorType};
use crate::dtype::Dtype;

/// A count for every number format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PerDtype([u64; Dtype::ALL.len()]);

impl PerDtype {
    /// `count` of `dtype`, nothing of the others.
    #[must_use]
    pub fn of(dtype: Dtype, count: u64) -> Self {
        let mut counts = Self::default();
        counts.0[dtype as usize] = count;
        counts
    }

    /// The count of one format.
    #[must_use]
    pub fn get(&self, dtype: Dtype) -> u64 {
        self.0[dtype as usize]
    }

    /// Sum over all formats.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Formats with a count above zero.
    pub fn iter(&self) -> impl Iterator<Item = (Dtype, u64)> + '_ {
        Dtype::ALL
            .into_iter()
            .map(|d| (d, self.get(d)))
            .filter(|(_, count)| *count > 0)
    }

    /// Every count times `factor`.
    #[must_use]
    pub fn times(mut self, factor: u64) -> Self {
        self.0.iter_mut().for_each(|c| *c *= factor);
        self
    }
}

impl AddAssign for PerDtype {
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a += b);
    }
}

impl Serialize for PerDtype {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter().map(|(d, count)| (d.name(), count)))
    }
}

/// Arithmetic done by a node, a stage or a graph.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Work {
    /// Matrix FLOPs, by the format the operands are multiplied in.
    pub matrix_flops: PerDtype,
    /// Vector operations, by the format of the result.
    pub vector_ops: PerDtype,
    /// Transcendental operations.
    pub transcendentals: u64,
    /// Elements moved or combined between lanes: transposes of the minor dimension, lane repeats, lane reductions.
    pub cross_lane: u64,
}

impl Work {
    /// The same work `factor` times.
    #[must_use]
    pub fn times(self, factor: u64) -> Self {
        Work {
            matrix_flops: self.matrix_flops.times(factor),
            vector_ops: self.vector_ops.times(factor),
            transcendentals: self.transcendentals * factor,
            cross_lane: self.cross_lane * factor,
        }
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.matrix_flops += other.matrix_flops;
        self.vector_ops += other.vector_ops;
        self.transcendentals += other.transcendentals;
        self.cross_lane += other.cross_lane;
    }
}

impl Add for Work {
    type Output = Work;
    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl std::iter::Sum for Work {
    fn sum<I: Iterator<Item = Work>>(iter: I) -> Work {
        iter.fold(Work::default(), Add::add)
    }
}

/// Arithmetic of one node of a graph; a scan counts its body once per trip.
#[must_use]
pub fn node_work(graph: &Graph, id: NodeId) -> Work {
    let node = graph.node(id);
    let operand = |i: usize| -> &TensorType { graph.ty(graph.operands(id)[i]) };
    let result = &node.results[0];
    let elements = result.shape.elements();
    let vector = |count: u64| Work {
        vector_ops: PerDtype::of(result.dtype, count),
        ..Work::default()
    };
    match &node.op {
        Op::Input { .. }
        | Op::Fill(_)
        | Op::Identity
        | Op::Reshape
        | Op::Slice { .. }
        | Op::Concatenate { .. }
        | Op::Pad { .. }
        | Op::GatherRows { .. } => Work::default(),
        Op::Transpose { permutation } => {
            let moves_lanes = permutation.last().is_some_and(|&p| p + 1 != permutation.len());
            Work {
                cross_lane: if moves_lanes { elements } else { 0 },
                ..Work::default()
            }
        }
        Op::MatMul { transpose_a, .. } => {
            let a = operand(0);
            let k = a.shape.from_end(usize::from(*transpose_a)) as u64;
            let dtype = matmul_dtype(a.dtype, operand(1).dtype);
            Work {
                matrix_flops: PerDtype::of(dtype, 2 * elements * k),
                ..Work::default()
            }
        }
        Op::Elementwise(function) => Work {
            transcendentals: elements * function.transcendentals(),
            ..vector(elements * function.vector_ops())
        },
        Op::Reduce { axis, .. } => {
            let input = operand(0).shape.elements();
            let minor = axis + 1 == operand(0).shape.rank();
            Work {
                cross_lane: if minor { input } else { 0 },
                ..vector(input)
            }
        }
        Op::CumulativeSum { axis } => {
            let extent = result.shape.dims()[*axis] as u64;
            vector(elements / extent.max(1) * extent.saturating_sub(1))
        }
        Op::Select { .. } | Op::Choose { .. } | Op::Cast => vector(elements),
        Op::SelectVisible { visibility, .. } => vector(elements * visibility.conditions()),
        Op::RepeatMinor { .. } => Work {
            cross_lane: elements,
            ..Work::default()
        },
        Op::CausalConvolution { width, .. } => vector(elements * (2 * *width as u64 - 1)),
        Op::ForwardSubstitution | Op::BackwardSubstitution => {
            let n = result.shape.from_end(1) as u64;
            vector(result.shape.batch() * n * n.saturating_sub(1) * result.shape.from_end(0) as u64)
        }
        Op::Cholesky => {
            // n pivots; n (n + 1) / 2 scaled entries; a multiply and a subtract per entry of every trailing lower triangle.
            let (batch, n) = (result.shape.batch(), result.shape.from_end(0) as u64);
            let trailing = n.saturating_sub(1) * n * (n + 1) / 3;
            Work {
                transcendentals: batch * n,
                ..vector(batch * (n * (n + 1) / 2 + trailing))
            }
        }
        Op::Scan(scan) => graph_work(&scan.body).times(scan.trips as u64),
    }
}

/// Arithmetic of all nodes of a graph.
#[must_use]
pub fn graph_work(graph: &Graph) -> Work {
    graph.nodes().map(|(id, _)| node_work(graph, id)).sum()
}

/// Arithmetic of the nodes of every stage, in stage order; stages without nodes are zero.
#[must_use]
pub fn stage_work(graph: &Graph) -> [(Stage, Work); Stage::ALL.len()] {
    let mut stages = Stage::ALL.map(|stage| (stage, Work::default()));
    for (id, node) in graph.nodes() {
        stages[node.stage as usize].1 += node_work(graph, id);
    }
    stages
}
