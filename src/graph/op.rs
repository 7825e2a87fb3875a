//! The operations of the graph.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{BlockPairs, Graph, Table, Visibility};
use crate::dtype::Dtype;

/// Matrix products of f32 operands, decomposed into bf16 passes as the TPU compiler does
/// (JAX documentation, "Matmul precision": `DEFAULT`, `HIGH`, `HIGHEST`). Operands of at most 16 bits always take one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Operands rounded to bf16, one pass.
    Default,
    /// Operands split in two bf16 pieces, three passes.
    High,
    /// Operands split in three bf16 pieces, six passes.
    Highest,
}

impl Precision {
    /// bf16 passes over the matrix unit for f32 operands.
    #[must_use]
    pub const fn passes(self) -> u32 {
        match self {
            Precision::Default => 1,
            Precision::High => 3,
            Precision::Highest => 6,
        }
    }
}

/// A scalar function applied element by element.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub enum Function {
    /// `a + b`.
    Add,
    /// `a - b`.
    Subtract,
    /// `a * b`.
    Multiply,
    /// `max(a, b)`.
    Maximum,
    /// `min(a, b)`.
    Minimum,
    /// `|a|`.
    Abs,
    /// `a + constant`.
    AddConstant(f64),
    /// `a * constant`.
    MultiplyConstant(f64),
    /// `max(a, constant)`.
    MaximumConstant(f64),
    /// `min(a, constant)`.
    MinimumConstant(f64),
    /// `exp(a)`.
    Exp,
    /// `ln(a)`.
    Log,
    /// `1 / a`.
    Reciprocal,
    /// `1 / sqrt(a)`.
    ReciprocalSqrt,
    /// `tanh(a)`.
    Tanh,
    /// `1 / (1 + exp(-a))`.
    Sigmoid,
    /// `a * sigmoid(a)`.
    Silu,
    /// `ln(1 + exp(a))`, computed as `max(a, 0) + ln(1 + exp(-|a|))`.
    Softplus,
    /// `a` where it is not zero, else `1`: keeps a scale of an empty row from dividing by zero.
    NonZeroOr1,
}

impl Function {
    /// Operands it takes.
    #[must_use]
    pub const fn arity(self) -> usize {
        match self {
            Function::Add
            | Function::Subtract
            | Function::Multiply
            | Function::Maximum
            | Function::Minimum => 2,
            _ => 1,
        }
    }

    /// Vector operations (add, multiply, maximum, select) per element, transcendentals excluded.
    /// Expansions: `sigmoid` is an exponential, an add, a reciprocal and a negation; `silu` one multiply more; `softplus` an
    /// absolute value, an exponential, an add, a logarithm, a maximum and an add.
    #[must_use]
    pub const fn vector_ops(self) -> u64 {
        match self {
            Function::Exp
            | Function::Log
            | Function::Reciprocal
            | Function::ReciprocalSqrt
            | Function::Tanh => 0,
            Function::Sigmoid => 2,
            Function::Silu => 3,
            Function::Softplus => 4,
            _ => 1,
        }
    }

    /// Transcendental operations per element.
    #[must_use]
    pub const fn transcendentals(self) -> u64 {
        match self {
            Function::Exp
            | Function::Log
            | Function::Reciprocal
            | Function::ReciprocalSqrt
            | Function::Tanh => 1,
            Function::Sigmoid | Function::Silu | Function::Softplus => 2,
            _ => 0,
        }
    }
}

/// A reduction along one dimension, which is kept with extent 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ReduceFunction {
    /// Sum.
    Sum,
    /// Maximum.
    Maximum,
}

/// Elements that are kept, by their position in the minor dimensions; the others become the fill value by a select,
/// never by a product, so that an infinity in a discarded place cannot turn into a NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Mask {
    /// Row `i`, column `j` with `j <= i`.
    Lower,
    /// Row `i`, column `j` with `j < i`.
    StrictlyLower,
    /// `i / block == j / block`.
    BlockDiagonal {
        /// Rows of a block.
        block: usize,
    },
    /// The lower-left `half x half` corner of every diagonal block of `2 half` rows.
    BlockCorner {
        /// Rows of the corner.
        half: usize,
    },
    /// Block `b` (third dimension from the end) keeps rows `s < (b + 1) * block` of the second-minor dimension.
    RowsUpToBlock {
        /// Rows of a block.
        block: usize,
    },
    /// `j <= i` on the second and third dimension from the end; the minor dimension is a channel.
    LowerPairs,
    /// Columns `j < end`.
    ColumnsBelow {
        /// First column that is dropped.
        end: usize,
    },
    /// Columns of the first, third, .. block of `block` columns.
    EvenBlocks {
        /// Columns of a block.
        block: usize,
    },
    /// Block `b` (third dimension from the end) keeps the first `half` of its own `2 half` columns: what the later half of a pair of
    /// neighbours sees of the earlier one.
    EarlierHalf {
        /// Columns of the earlier half.
        half: usize,
    },
}

impl Mask {
    /// Whether the pattern depends on the third dimension from the end.
    #[must_use]
    pub const fn by_block(self) -> bool {
        matches!(
            self,
            Mask::RowsUpToBlock { .. } | Mask::LowerPairs | Mask::EarlierHalf { .. }
        )
    }

    /// Whether it has blocks of no rows or columns, which have no meaning.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        matches!(
            self,
            Mask::BlockDiagonal { block: 0 }
                | Mask::BlockCorner { half: 0 }
                | Mask::RowsUpToBlock { block: 0 }
                | Mask::EvenBlocks { block: 0 }
                | Mask::EarlierHalf { half: 0 }
        )
    }

    /// Whether the element at `third`, `row`, `column` (third, second and first dimension from the end) is kept.
    #[must_use]
    pub const fn keeps(self, third: usize, row: usize, column: usize) -> bool {
        match self {
            Mask::Lower => column <= row,
            Mask::StrictlyLower => column < row,
            Mask::BlockDiagonal { block } => row / block == column / block,
            Mask::BlockCorner { half } => {
                row / (2 * half) == column / (2 * half) && row / half > column / half
            }
            Mask::RowsUpToBlock { block } => row < (third + 1) * block,
            Mask::LowerPairs => row <= third,
            Mask::ColumnsBelow { end } => column < end,
            Mask::EvenBlocks { block } => (column / block).is_multiple_of(2),
            Mask::EarlierHalf { half } => column / half == 2 * third,
        }
    }
}

/// What an input is to the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Role {
    /// Activations that arrive from the layer before.
    Activation,
    /// Trained weights and parameters.
    Weight,
    /// State carried from earlier tokens.
    State,
    /// Rows of earlier tokens along dimension 3; the output of the same name is the row that a decode step appends to them.
    Cache,
    /// Slots for rows of earlier tokens along dimension 3, of which a decode step reads the filled ones; the output of the same name is the row that takes the next.
    Log,
    /// An operand of a scan body, fed by the scan.
    Body,
}

/// How an input is filled when the graph is executed on seeded data.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub enum Init {
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform.
    Uniform {
        /// Lower end.
        low: f64,
        /// Upper end.
        high: f64,
    },
    /// Natural logarithm of a uniform value: the `A_log` of gated delta layers.
    LogUniform {
        /// Lower end before the logarithm.
        low: f64,
        /// Upper end before the logarithm.
        high: f64,
    },
    /// Inverse softplus of a log-uniform time step: the `dt_bias` of gated delta layers.
    TimeStepBias {
        /// Smallest time step.
        low: f64,
        /// Largest time step.
        high: f64,
    },
    /// Known before the layer runs, whatever the seed.
    Table(Table),
}

/// Neighbouring rows that [`Op::GatherRows`] takes, or rows of zeros it inserts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RowRun {
    /// First row of the operand; `None` for rows of zeros.
    pub from: Option<usize>,
    /// Rows.
    pub rows: usize,
}

/// A loop with a carried state, a body and a trip count.
///
/// Operands of the node and inputs of the body stand in the same order: initial carries, scanned operands, invariants. A
/// scanned operand loses dimension `axis` inside the body. Outputs of the body are the next carries, then the values
/// that the node stacks along `axis`. Results of the node are the final carries, then the stacks.
///
/// A loop over several sequences one after the other is cut into segments, each of which starts from initial carries of its own: carries
/// have the number of segments as extent of dimension 0 outside and extent 1 inside the body. Replacing the carry costs no arithmetic and, unlike a
/// product with a flag, cannot turn an infinity of one sequence into a NaN of the next.
/// A loop with scanned operands runs over a dimension of the layer (chunks); one without repeats its body (an iterative solver).
#[derive(Debug, Clone)]
pub struct Scan {
    /// Iterations.
    pub trips: usize,
    /// Dimension of the scanned operands and stacked results that the loop runs over.
    pub axis: usize,
    /// Number of carried values.
    pub carries: usize,
    /// Number of scanned operands.
    pub scanned: usize,
    /// First trip of every segment, ascending from 0; one segment is the ordinary loop.
    pub segments: Arc<[usize]>,
    /// Where the loop runs over pairs of blocks: which ones.
    pub pairs: Option<PairLoop>,
    /// One iteration.
    pub body: Graph,
}

/// A loop over pairs of a row block and a column block instead of over one index.
///
/// Carries hold every row block along `axis`; a trip reads and replaces the one of its row. Of the scanned operands the first `rows` are
/// sliced by the row block, the others by the column block. The last input of the body is the origin `[2]` of the pair,
/// [`super::BlockPair::origin`], exact below 2^24. Nothing is stacked.
#[derive(Debug, Clone)]
pub struct PairLoop {
    /// The pairs.
    pub blocks: BlockPairs,
    /// Scanned operands that are sliced by the row block.
    pub rows: usize,
}

/// An operation.
#[derive(Debug, Clone)]
pub enum Op {
    /// A tensor from outside.
    Input {
        /// What it is to the layer.
        role: Role,
        /// How it is filled on seeded data.
        init: Init,
    },
    /// A tensor with the same value everywhere, made on chip.
    Fill(f64),
    /// The identity matrix on the last two dimensions.
    Identity,
    /// Batched matrix product `[.., m, k] x [.., k, n]` with f32 accumulation; leading dimensions broadcast.
    MatMul {
        /// The first operand is stored `[.., k, m]`.
        transpose_a: bool,
        /// The second operand is stored `[.., n, k]`.
        transpose_b: bool,
        /// Decomposition of f32 operands.
        precision: Precision,
    },
    /// A scalar function with broadcasting.
    Elementwise(Function),
    /// A reduction that keeps the dimension with extent 1.
    Reduce {
        /// Sum or maximum.
        function: ReduceFunction,
        /// Dimension.
        axis: usize,
    },
    /// Inclusive cumulative sum along a dimension.
    CumulativeSum {
        /// Dimension.
        axis: usize,
    },
    /// Selection by position.
    Select {
        /// What is kept.
        mask: Mask,
        /// What the rest becomes.
        fill: f64,
    },
    /// Of two tensors of one shape, elements of the first where the mask keeps, of the second elsewhere.
    Choose {
        /// Where the first is taken.
        mask: Mask,
    },
    /// Selection by position in the whole sequence; operands: scores `[.., m, n]` and the origin `[2]` of their block.
    SelectVisible {
        /// What is kept.
        visibility: Visibility,
        /// What the rest becomes.
        fill: f64,
    },
    /// Rounding to another format, to nearest even.
    Cast,
    /// The same elements under another shape, in row-major order.
    Reshape,
    /// A permutation of dimensions.
    Transpose {
        /// `permutation[i]` is the old position of new dimension `i`.
        permutation: Vec<usize>,
    },
    /// A contiguous part of one dimension.
    Slice {
        /// Dimension.
        axis: usize,
        /// First index.
        start: usize,
    },
    /// Operands one after the other along one dimension.
    Concatenate {
        /// Dimension.
        axis: usize,
    },
    /// Zeros after the end of one dimension.
    Pad {
        /// Dimension.
        axis: usize,
    },
    /// Runs of rows of one dimension one after the other, zeros where a run says so: an address computation per run, so that the table is as
    /// long as there are sequences, not rows.
    GatherRows {
        /// Dimension.
        axis: usize,
        /// What the result holds, in order.
        runs: Arc<[RowRun]>,
    },
    /// Every element of the minor dimension repeated in place: a tile's decay onto its lanes.
    RepeatMinor {
        /// Repetitions.
        times: usize,
    },
    /// Depthwise causal convolution along dimension `rank - 2`; operands: `x [.., T, E]`, taps `[width, E]`, the last tap on the current
    /// token, and optionally the rows `[.., width - 1, E]` before the first one, which are zero otherwise.
    CausalConvolution {
        /// Taps.
        width: usize,
        /// First rows of the sequences that stand one after the other, ascending from 0: a tap never reaches before its own sequence.
        starts: Arc<[usize]>,
    },
    /// Forward substitution `X = (I + L)^-1 B`, row by row; operands: `L [.., n, n]` (its strictly lower part is used) and
    /// `B [.., n, w]`. A chain of `n - 1` dependent row updates. Several systems may stand side by side, `L [.., n, s n]` and
    /// `B [.., n, s w]`: one chain serves them all.
    ForwardSubstitution,
    /// Backward substitution with the transpose, `X = (I + L)^-T B`, last row first; operands as for
    /// [`Op::ForwardSubstitution`].
    BackwardSubstitution,
    /// The lower Cholesky factor of `[.., n, n]`, column by column: a chain of `n` pivots. Reads the lower triangle.
    Cholesky,
    /// A loop.
    Scan(Box<Scan>),
}

impl Op {
    /// What the operation is called in messages and traces.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Input { .. } => "input",
            Op::Fill(_) => "fill",
            Op::Identity => "identity",
            Op::MatMul { .. } => "matmul",
            Op::Elementwise(_) => "elementwise",
            Op::Reduce { .. } => "reduce",
            Op::CumulativeSum { .. } => "cumulative sum",
            Op::Select { .. } => "select",
            Op::Choose { .. } => "choose",
            Op::SelectVisible { .. } => "select visible",
            Op::Cast => "cast",
            Op::Reshape => "reshape",
            Op::Transpose { .. } => "transpose",
            Op::Slice { .. } => "slice",
            Op::Concatenate { .. } => "concatenate",
            Op::Pad { .. } => "pad",
            Op::GatherRows { .. } => "gather rows",
            Op::RepeatMinor { .. } => "repeat",
            Op::CausalConvolution { .. } => "causal convolution",
            Op::ForwardSubstitution => "forward substitution",
            Op::BackwardSubstitution => "backward substitution",
            Op::Cholesky => "Cholesky factor",
            Op::Scan(_) => "scan",
        }
    }

    /// Whether the operation only renames or addresses elements: no arithmetic on any unit.
    #[must_use]
    pub const fn is_view(&self) -> bool {
        matches!(
            self,
            Op::Input { .. }
                | Op::Fill(_)
                | Op::Identity
                | Op::Reshape
                | Op::Transpose { .. }
                | Op::Slice { .. }
                | Op::Concatenate { .. }
                | Op::Pad { .. }
                | Op::GatherRows { .. }
        )
    }
}

/// Format the operands of a matrix product are multiplied in: the narrower of two 16-bit or wider formats never wins over
/// the wider one, so a mixed product runs as the wider format.
#[must_use]
pub fn matmul_dtype(a: Dtype, b: Dtype) -> Dtype {
    if a.bytes() >= b.bytes() { a } else { b }
}
