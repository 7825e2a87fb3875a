//! Kernels: how the nodes of a graph are grouped into launches, and what each launch moves and computes.
//!
//! A [`Plan`] groups stages into kernels. [`lower`] turns a graph and a plan into [`Kernel`]s: the operations in order with their
//! dependences, the tensors that cross HBM, and the grid. Nothing here knows a chip; sizes of arrays and registers come in with
//! [`crate::timing`].

mod fusions;
mod layout;
pub mod library;
mod lower;
mod plan;

pub use layout::tiled_elements;
pub use lower::{Lowerer, lower, lower_compiled};
pub use plan::{Group, Plan, Program};

use crate::dtype::Dtype;
use crate::graph::{Name, Role, Shape, Stage, Work};

/// A tensor that a kernel reads from or writes to HBM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// Name of the value in the graph.
    pub name: Name,
    /// Bytes moved.
    pub bytes: u64,
    /// Format of an element.
    pub dtype: Dtype,
    /// What it is to the layer: a parameter, a state, a cache, or an activation. What a kernel writes has the role of the input that it is the next value of.
    pub role: Role,
    /// Where a loop over pairs of blocks reads it by column block: what that takes.
    pub columns: Option<ColumnReads>,
}

impl Transfer {
    /// Bytes moved where blocks are fetched again for every pair of blocks.
    #[must_use]
    pub fn streamed_bytes(&self) -> u64 {
        self.columns.map_or(self.bytes, |columns| columns.streamed)
    }
}

/// How the keys or values of attention reach a kernel. Which of the two ways is taken depends on the chip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnReads {
    /// Bytes moved where every program fetches a block for every pair it visits: `2 T nkv dh b` times about `T / block_q` times the query
    /// heads of a key head.
    pub streamed: u64,
    /// Bytes of one key head that stay on chip where the tensor is fetched once for all query blocks and query heads.
    pub resident: u64,
}

/// Cost of a vector operation per register (`lanes x sublanes` elements) of its tensor.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct VectorCost {
    /// ALU operations.
    pub alu: f64,
    /// Transcendental operations.
    pub transcendental: f64,
}

/// What an operation asks of the units. Extents are of one instance; a kernel executes `count` of them.
#[derive(Debug, Clone, PartialEq)]
pub enum OpKind {
    /// A matrix product `[m, k] x [k, n]`.
    Product {
        /// Streamed rows.
        m: u64,
        /// Contraction.
        k: u64,
        /// Columns.
        n: u64,
        /// Format of the operands.
        dtype: Dtype,
        /// bf16 passes of an f32 product; 1 otherwise.
        passes: u32,
    },
    /// An elementwise operation, reduction or selection on a tensor.
    Vector {
        /// Extents of the tensor the operation runs over.
        dims: Shape,
        /// Cost per register.
        cost: VectorCost,
        /// Rows and columns that pass the cross-lane unit, if any.
        cross_lane: Option<[usize; 2]>,
        /// Cross-lane operations per register of `cross_lane`.
        cross_lane_ops: f64,
    },
    /// Cholesky factor of `rows` rows and columns, column by column.
    Cholesky {
        /// Rows.
        rows: u64,
    },
    /// Forward or backward substitution of a unit lower-triangular system of `rows` rows with `columns` right-hand sides.
    Substitution {
        /// Rows.
        rows: u64,
        /// Right-hand sides of all systems.
        columns: u64,
        /// Systems side by side, each with its share of the columns.
        systems: u64,
    },
}

/// One operation of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelOp {
    /// Name of the node.
    pub name: Name,
    /// Stage of the node.
    pub stage: Stage,
    /// What it asks of the units.
    pub kind: OpKind,
    /// Instances in the whole kernel.
    pub count: u64,
    /// Dependent repetitions inside one grid step: iterations of a solver, each waiting for the one before.
    pub serial: u64,
    /// Earlier operations of the kernel it waits for.
    pub after: Vec<usize>,
    /// Whether its columns are value columns, so that a split of the values over programs divides it.
    pub value_columns: bool,
    /// Whether it belongs to the loop that carries the state, so that its chain repeats for every chunk of a program.
    pub carried: bool,
    /// Share of the grid steps that execute it: below 1 where a kernel holds several loops, of whose trips each step is one.
    pub share: f64,
}

/// Programs of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Independent units: batch, heads, and chunks where no state is carried.
    pub parallel: u64,
    /// Dependent steps of each unit: chunks where a state is carried in on-chip memory.
    pub sequential: u64,
}

impl Grid {
    /// Steps of the whole grid.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.parallel * self.sequential
    }
}

/// A block that stays on chip while many programs use it, and is replaced as a whole: the weights of a group, the keys of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResidentBlock {
    /// Bytes of the block, part of the bytes the kernel reads.
    pub bytes: u64,
    /// Times it is fetched in the whole kernel. Two buffers hide a fetch behind one program at most; the rest is waited for.
    pub fetches: u64,
}

/// Facts about one implementation of a kernel that neither its arithmetic nor the chip imply.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Implementation {
    /// Most cores the kernel can use, where that is fewer than the device has: kernels written for one core of a two-core chip.
    pub cores_limit: Option<u64>,
    /// Widest slice of the value columns that one program works on, where the kernel splits the columns over programs.
    pub value_tile: Option<u64>,
    /// Cycles of scalar work of a program beyond the usual grid step, such as finding its place in a table.
    pub program_cycles: f64,
    /// Whether a program fetches, computes and stores one after the other instead of overlapping its transfers with its neighbours.
    pub serial_transfers: bool,
    /// What is left of the issue efficiency of the chip, where a program loses more than others.
    pub issue_share: Option<f64>,
    /// A block that stays on chip over many programs.
    pub resident_block: Option<ResidentBlock>,
    /// Columns of the tiles in which a program of a GPU moves its tensors, where those are narrower than the rows in device memory: every row of a
    /// tile is a run of its own.
    pub tile_columns: Option<u64>,
    /// Bytes that the last-level cache of a GPU serves or takes, beside those that cross HBM.
    pub cache_bytes: f64,
    /// Loads of a step of a GPU kernel that wait for device memory one after the other because nothing fetches them ahead; a share where only some steps do.
    pub exposed_loads: f64,
    /// Most units that interleave in a program, where the kernel takes as many as fit: the heads of a chunk, whose chunks are programs of their own.
    pub most_units: Option<u64>,
    /// Whether the kernel is written so that the units of a program go through every step side by side: a unit goes on as soon as its own operand is there, where
    /// otherwise the copies of an operation stay together.
    pub interleaved: bool,
}

/// One launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// Stage or span of stages, for instance `op2-7a`.
    pub label: String,
    /// What it does, in a few words.
    pub title: String,
    /// Operations in topological order.
    pub ops: Vec<KernelOp>,
    /// Tensors read from HBM.
    pub reads: Vec<Transfer>,
    /// Tensors written to HBM.
    pub writes: Vec<Transfer>,
    /// Grid.
    pub grid: Grid,
    /// Whether it only streams rows, so that it can be cut into any number of programs; `grid` then is a single one.
    pub streams: bool,
    /// Bytes of the carried state of one parallel unit.
    pub carried_bytes: u64,
    /// Largest sum of live intermediates of one grid step, in bytes.
    pub live_bytes: u64,
    /// Units one program works on at once; `None` lets the timing take as many as fit on chip.
    pub units_per_program: Option<u64>,
    /// Sequential steps one program works on; only their carried chains follow each other.
    pub steps_per_program: u64,
    /// Launches in a pass of the layer: 1, or the share of the decode steps of an interval that launch it.
    pub share: f64,
    /// Arithmetic, padding of partial chunks included.
    pub work: Work,
    /// Share of the rows that only pad the last chunk.
    pub padding: f64,
    /// What is particular to the implementation.
    pub implementation: Implementation,
}

impl Kernel {
    /// Whether it has matrix products.
    #[must_use]
    pub fn has_products(&self) -> bool {
        self.ops
            .iter()
            .any(|op| matches!(op.kind, OpKind::Product { .. }))
    }

    /// Bytes read from HBM.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.reads.iter().map(|t| t.bytes).sum()
    }

    /// Bytes written to HBM.
    #[must_use]
    pub fn write_bytes(&self) -> u64 {
        self.writes.iter().map(|t| t.bytes).sum()
    }

    /// Bytes of one key head that have to stay on chip for keys and values to be read once; 0 for kernels without such operands.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.reads
            .iter()
            .filter_map(|t| t.columns)
            .map(|c| c.resident)
            .sum()
    }

    /// The same kernel with the blocks of keys and values fetched again for every pair of blocks.
    #[must_use]
    pub fn streaming(&self) -> Kernel {
        let mut kernel = self.clone();
        for transfer in &mut kernel.reads {
            transfer.bytes = transfer.streamed_bytes();
            transfer.columns = None;
        }
        kernel
    }

    /// Takes out the operations before the loop that carries the state, for another kernel to do: they stand in its order and wait for each other only.
    #[must_use]
    pub fn split_preparation(&mut self) -> Vec<KernelOp> {
        let (carried, prepared): (Vec<usize>, Vec<usize>) =
            (0..self.ops.len()).partition(|&i| self.ops[i].carried);
        let chosen = |indices: &[usize]| {
            let renumbered = |old: &usize| indices.iter().position(|i| i == old);
            indices
                .iter()
                .map(|&i| KernelOp {
                    after: self.ops[i].after.iter().filter_map(renumbered).collect(),
                    ..self.ops[i].clone()
                })
                .collect::<Vec<KernelOp>>()
        };
        let (carried, prepared) = (chosen(&carried), chosen(&prepared));
        self.ops = carried;
        prepared
    }

    /// Appends operations that wait for each other only, numbered among themselves.
    pub fn append(&mut self, ops: Vec<KernelOp>) {
        let offset = self.ops.len();
        self.ops.extend(ops.into_iter().map(|op| KernelOp {
            after: op.after.iter().map(|i| i + offset).collect(),
            ..op
        }));
    }

    /// Bytes that cross HBM in both directions.
    #[must_use]
    pub fn hbm_bytes(&self) -> u64 {
        self.read_bytes() + self.write_bytes()
    }
}
