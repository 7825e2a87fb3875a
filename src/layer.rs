//! The layer: mechanism, sizes, formats and variants, every choice made.

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::graph::Precision;
use crate::mechanisms::Mechanism;

/// How the two chunk Gram matrices are built (docs/model.md, "Gram variants").
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GramVariant {
    /// One product, one scalar decay mask.
    ScalarMask,
    /// Decay differences of every pair of rows and channel, summed on the vector unit.
    Broadcast,
    /// 16-row blocks, each with its own pivot, against all rows.
    Pivot,
    /// 16-row pivots below the diagonal blocks, diagonal blocks element by element.
    PivotCausal,
    /// Decays folded into the operands around one pivot per chunk.
    Folded,
    /// One product and one mask per decay tile.
    TileMasks,
}

impl GramVariant {
    /// The name used in YAML.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            GramVariant::ScalarMask => "scalar_mask",
            GramVariant::Broadcast => "broadcast",
            GramVariant::Pivot => "pivot",
            GramVariant::PivotCausal => "pivot_causal",
            GramVariant::Folded => "folded",
            GramVariant::TileMasks => "tile_masks",
        }
    }
}

/// How the unit lower-triangular chunk matrix is inverted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InverseVariant {
    /// Row by row on the vector unit.
    RowSubstitution,
    /// Row by row inside 16-row blocks, matrix products across them.
    Blocked16,
    /// `(I - L)(I + L^2)(I + L^4)...`.
    Product,
    /// `X <- X (2I - (I + L) X)`.
    Newton,
    /// Products inside 8-row blocks, then products across them.
    TwoLevel,
    /// `X <- X - X F_s X` for blocks of doubling size.
    BlockDoubling,
    /// Truncated Neumann series with `neumann_steps` terms: approximate.
    Neumann,
}

impl InverseVariant {
    /// The name used in YAML.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            InverseVariant::RowSubstitution => "row_substitution",
            InverseVariant::Blocked16 => "blocked16",
            InverseVariant::Product => "product",
            InverseVariant::Newton => "newton",
            InverseVariant::TwoLevel => "two_level",
            InverseVariant::BlockDoubling => "block_doubling",
            InverseVariant::Neumann => "neumann",
        }
    }
}

/// Format of the state between chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateFormat {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// FP8 E4M3 with one f32 scale per key channel (row).
    RowFp8,
}

impl StateFormat {
    /// Bytes of a `key_dim x value_dim` state of one head.
    #[must_use]
    pub const fn bytes(self, key_dim: u64, value_dim: u64) -> u64 {
        match self {
            StateFormat::F32 => 4 * key_dim * value_dim,
            StateFormat::Bf16 => 2 * key_dim * value_dim,
            StateFormat::RowFp8 => key_dim * value_dim + 4 * key_dim,
        }
    }

    /// The name used in YAML.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            StateFormat::F32 => "f32",
            StateFormat::Bf16 => "bf16",
            StateFormat::RowFp8 => "row_fp8",
        }
    }
}

/// Whether the delta rule predicts from the decayed state or from the state before the decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadConvention {
    /// Predicts from `D S`.
    Decayed,
    /// Predicts from `S`.
    Undecayed,
}

/// Formula of the log decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecayGate {
    /// `-exp(A) softplus(x + b)`: unbounded below.
    Softplus,
    /// `bound * sigmoid(exp(A) (x + b))`: in `[bound, 0)`.
    Bounded,
}

/// Row of a block whose cumulative decay is the pivot of a factored Gram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PivotRow {
    /// The middle row: both operands reach half the block's decay.
    Middle,
    /// The first row: row operands stay at most 1, column operands reach the whole block's decay.
    First,
}

/// How the output gate is projected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputGate {
    /// One full matrix.
    Full,
    /// Through `gate_rank` channels.
    LowRank,
    /// No output gate.
    None,
}

/// State the first chunk starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InitialState {
    /// Zeros, made on chip.
    Zero,
    /// Read from HBM: the prefill continues a sequence.
    Given,
}

/// How the keys that SPD-SLA-W writes with are whitened by the normalised covariance `Cn` of the keys of past chunks. The names are
/// the paper's; what each computes is our reading (docs/model.md, "Whitening").
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhiteningSolver {
    /// Keys as they are: SLA with a clamped step size.
    None,
    /// `k Cn^-1/2` by five steps of the coupled Newton-Schulz iteration.
    NewtonSchulz5,
    /// Two steps without scaling: indefinite where the covariance has an eigenvalue above 3.
    Polar2,
    /// Two steps on a covariance scaled by at least its largest eigenvalue: positive definite.
    Polar2Plus,
    /// `k Cn^-1` by a Cholesky factor in panels of 16 and two triangular solves.
    Cholesky16,
    /// `k Cn^-1` by 30 steps of conjugate gradients.
    Cg30,
}

impl WhiteningSolver {
    /// Every solver, in the order of the paper's table.
    pub const ALL: [WhiteningSolver; 6] = [
        WhiteningSolver::None,
        WhiteningSolver::Cg30,
        WhiteningSolver::Cholesky16,
        WhiteningSolver::NewtonSchulz5,
        WhiteningSolver::Polar2,
        WhiteningSolver::Polar2Plus,
    ];

    /// The name used in YAML.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            WhiteningSolver::None => "none",
            WhiteningSolver::NewtonSchulz5 => "newton_schulz5",
            WhiteningSolver::Polar2 => "polar2",
            WhiteningSolver::Polar2Plus => "polar2_plus",
            WhiteningSolver::Cholesky16 => "cholesky16",
            WhiteningSolver::Cg30 => "cg30",
        }
    }
}

/// How fast `MesaNet` forgets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Forgetting {
    /// Not at all: every token weighs the same.
    None,
    /// `sigmoid` gates whose bias starts around 3: a memory of about 20 tokens at the start of training.
    Gated,
    /// The same gates with a bias around 0: a memory of about two tokens. The paper names the variant without a formula; this is our
    /// reading.
    Aggressive,
}

/// One layer, every variant decided.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Layer {
    /// Mechanism.
    pub mechanism: &'static Mechanism,
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Width of the residual stream.
    pub model_width: usize,
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads; a multiple of the key heads.
    pub value_heads: usize,
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value of one value head.
    pub value_dim: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Decay tiles of a key head (SLA); a divisor of `key_dim`.
    pub decay_tiles: usize,
    /// Format of activations in HBM and of matrix operands.
    pub activations: Dtype,
    /// Format of the state between chunks.
    pub state: StateFormat,
    /// Decomposition of products with an f32 state.
    pub state_precision: Precision,
    /// Gram variant.
    pub gram: GramVariant,
    /// Pivot of the factored Gram variants.
    pub pivot: PivotRow,
    /// Inverse variant.
    pub inverse: InverseVariant,
    /// Decomposition of the products of the inverse.
    pub inverse_precision: Precision,
    /// Terms of the Neumann series.
    pub neumann_steps: usize,
    /// Read convention.
    pub read: ReadConvention,
    /// Formula of the decay.
    pub decay_gate: DecayGate,
    /// Lower bound of the log decay of the bounded gate, in nats per token.
    pub decay_bound: f64,
    /// Step sizes `2 sigmoid` instead of `sigmoid`, which allows negative eigenvalues of the transition.
    pub negative_eigenvalues: bool,
    /// Taps of the causal convolution.
    pub conv_width: usize,
    /// Output gate.
    pub output_gate: OutputGate,
    /// Rank of low-rank gates.
    pub gate_rank: usize,
    /// State the first chunk starts from.
    pub initial_state: InitialState,
    /// Forgetting of `MesaNet`.
    pub forgetting: Forgetting,
    /// Steps of the conjugate gradients of `MesaNet`.
    pub cg_steps: usize,
    /// Whitening of the write keys of SPD-SLA-W.
    pub whitening: WhiteningSolver,
    /// Chunks that share a whitening.
    pub whitening_refresh: usize,
    /// Decomposition of the products of the whitening.
    pub whitening_precision: Precision,
}

impl Layer {
    /// Value heads that share a key head.
    #[must_use]
    pub fn sharing(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Chunks of a sequence, the last one padded.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.tokens.div_ceil(self.chunk)
    }

    /// Tokens of a sequence with the padding of the last chunk.
    #[must_use]
    pub fn padded_tokens(&self) -> usize {
        self.chunks() * self.chunk
    }

    /// Channels of queries, keys and values together.
    #[must_use]
    pub fn qkv_width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Bytes of the recurrent state of the whole layer, one sequence.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        let (heads, width) = if self.mechanism.packed {
            (self.key_heads, self.sharing() * self.value_dim)
        } else {
            (self.value_heads, self.value_dim)
        };
        // The second-order mechanisms carry a `key_dim x key_dim` matrix in f32 beside it.
        let covariance = if self.mechanism.uses("cg_steps") || self.mechanism.uses("whitening") {
            self.key_heads as u64 * StateFormat::F32.bytes(self.key_dim as u64, self.key_dim as u64)
        } else {
            0
        };
        covariance + heads as u64 * self.state.bytes(self.key_dim as u64, width as u64)
    }

    /// The layer in one line, for headlines.
    #[must_use]
    pub fn describe(&self) -> String {
        let tiles = if self.mechanism.uses("decay_tiles") {
            format!(", {} decay tiles", self.decay_tiles)
        } else {
            String::new()
        };
        let core = if self.mechanism.uses("cg_steps") {
            format!("{} steps of conjugate gradients", self.cg_steps)
        } else {
            format!("{} Gram, {} inverse", self.gram.name(), self.inverse.name())
        };
        let whitening = if self.mechanism.uses("whitening") {
            format!(", {} whitening", self.whitening.name())
        } else {
            String::new()
        };
        format!(
            "{} B={} T={} d={} key heads {}x{} value heads {}x{} chunk {}{tiles}, {} activations, {} state, {core}{whitening}",
            self.mechanism.name,
            self.batch,
            self.tokens,
            self.model_width,
            self.key_heads,
            self.key_dim,
            self.value_heads,
            self.value_dim,
            self.chunk,
            self.activations,
            self.state.name(),
        )
    }
}
