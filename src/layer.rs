//! The layer: mechanism, sizes, formats and variants, every choice made.

mod delta_log;

use std::sync::Arc;

pub use delta_log::{DeltaLog, Merge};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::graph::{Precision, RowRun, Visibility};
use crate::mechanisms::Mechanism;
use crate::tree::Tree;

/// How the two chunk Gram matrices are built (docs/model.md, "Gram variants").
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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
    /// 16-row pivots in the diagonal blocks; between neighbours of 16, 32, .. rows both operands decayed to their border.
    Halving,
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
            GramVariant::Halving => "halving",
        }
    }
}

/// How the unit lower-triangular chunk matrix is inverted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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
    /// Row by row inside 16-row blocks that stand side by side, then block doubling by products that stream the rows of a block.
    PackedDoubling,
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
            InverseVariant::PackedDoubling => "packed_doubling",
            InverseVariant::Neumann => "neumann",
        }
    }
}

/// What the chunk inverse `T` is applied to (docs/model.md, "Solve"). Values `Y` and read keys `R` have the step size in them here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Solve {
    /// Values and read keys, before the state is known: `U = T Y - (T R) S`.
    Wy,
    /// What the state leaves of the values: `U = T (Y - R S)`, one product fewer but on the loop that carries the state.
    Remainder,
}

impl Solve {
    /// The name used in YAML.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Solve::Wy => "wy",
            Solve::Remainder => "remainder",
        }
    }
}

/// Format of the state between chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReadConvention {
    /// Predicts from `D S`.
    Decayed,
    /// Predicts from `S`.
    Undecayed,
}

/// Formula of the log decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DecayGate {
    /// `-exp(A) softplus(x + b)`: unbounded below.
    Softplus,
    /// `bound * sigmoid(exp(A) (x + b))`: in `[bound, 0)`.
    Bounded,
}

/// Row of a block whose cumulative decay is the pivot of a factored Gram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PivotRow {
    /// The middle row: both operands reach half the block's decay.
    Middle,
    /// The first row: row operands stay at most 1, column operands reach the whole block's decay.
    First,
}

/// How the output gate is projected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputGate {
    /// One full matrix.
    Full,
    /// Through `gate_rank` channels.
    LowRank,
    /// No output gate.
    None,
}

/// Function applied to queries and keys of linear attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FeatureMap {
    /// `elu(x) + 1`: positive.
    Elu1,
    /// `max(x, 0)`.
    Relu,
    /// `x`.
    Identity,
}

/// State the first chunk starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InitialState {
    /// Zeros, made on chip.
    Zero,
    /// Read from HBM: the prefill continues a sequence.
    Given,
}

/// What the layer computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Whole sequences, chunk by chunk.
    Forward,
    /// One token of every sequence, state and convolution state in HBM.
    Decode,
    /// A tree of speculated tokens of every sequence, state and convolution state in HBM; they are moved on along the accepted path.
    Verify,
}

impl Pass {
    /// The name used in YAML.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Decode => "decode",
            Pass::Verify => "verify",
        }
    }
}

/// Which state the output of a decode step is read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Readout {
    /// `o = q S'`: waits for the update.
    AfterUpdate,
    /// `o = q (D S) + (q . x) u`: the same value, read together with the prediction.
    BeforeUpdate,
}

/// Which unit contracts a vector with the state in a decode step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StateProducts {
    /// Multiplications and a sum over rows on the vector unit.
    Vector,
    /// Products of one or two rows on the matrix unit.
    Matrix,
}

/// Rows of one sequence among the padded rows of the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// First token.
    pub token: usize,
    /// First padded row, a multiple of the chunk.
    pub row: usize,
    /// Tokens, padding excluded.
    pub tokens: usize,
}

/// Choices of softmax attention; of no meaning to other mechanisms.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Attention {
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_kv: usize,
    /// Whether a query sees only keys up to its own position.
    pub causal: bool,
    /// Keys a query sees at most, itself included.
    pub window: Option<usize>,
    /// Factor of the scores; `key_dim^-1/2` where absent.
    pub scale: Option<f64>,
    /// Share of the channels of a head (of the decoupled ones in latent attention) that are rotated by position; 0 is no position encoding.
    pub rotary: f64,
    /// Base of the rotary frequencies.
    pub rotary_base: f64,
    /// Scores times `s ln n`.
    pub ssmax: bool,
    /// RMS norm of queries and keys per head.
    pub qk_norm: bool,
    /// Channels of the latent.
    pub latent_rank: usize,
    /// Channels of a key that all heads share, beside the latent.
    pub decoupled_dim: usize,
    /// Channels of the latent that queries come from in latent attention; 0 where they are projected in one step.
    pub query_rank: usize,
}

impl Default for Attention {
    /// Causal, no window, full rotation at base 10 000, blocks of 512.
    fn default() -> Self {
        Attention {
            block_q: 512,
            block_kv: 512,
            causal: true,
            window: None,
            scale: None,
            rotary: 1.0,
            rotary_base: 10_000.0,
            ssmax: false,
            qk_norm: false,
            latent_rank: 0,
            decoupled_dim: 0,
            query_rank: 0,
        }
    }
}

/// How the keys that SPD-SLA-W writes with are whitened by the normalised covariance `Cn` of the keys of past chunks. The names are
/// the paper's; what each computes is our reading (docs/model.md, "Whitening").
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
    /// Tokens of a sequence; of all sequences together where they are packed.
    pub tokens: usize,
    /// Lengths of the sequences packed one after the other into `tokens`; empty where every entry of the batch is one sequence.
    pub sequences: Vec<usize>,
    /// Rows that packed sequences are padded to, where more than their whole chunks are allocated.
    pub padded_rows: Option<usize>,
    /// Tokens of a sequence before the decoded one, in mechanisms to which positions matter; 0 elsewhere.
    pub context: usize,
    /// Tokens that a verification speculates on, the same tree for every sequence; absent in other passes.
    pub tree: Option<Tree>,
    /// Width of the residual stream.
    pub model_width: usize,
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads; a multiple of the key heads. The query heads of softmax attention.
    pub value_heads: usize,
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value of one value head.
    pub value_dim: usize,
    /// Tokens of a chunk; of a query block in softmax attention.
    pub chunk: usize,
    /// Decay tiles of a key head (SLA); a divisor of `key_dim`.
    pub decay_tiles: usize,
    /// Format of activations in HBM and of matrix operands.
    pub activations: Dtype,
    /// Format of the projection weights in HBM; products run in the wider one of both formats.
    pub weights: Dtype,
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
    /// What the chunk inverse is applied to.
    pub solve: Solve,
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
    /// Rank of low-rank projections of decays and step sizes (GLA, RWKV).
    pub decay_rank: usize,
    /// Rank of the data-dependent token-shift mixes (RWKV6).
    pub mix_rank: usize,
    /// Feature map of queries and keys (linear attention).
    pub feature_map: FeatureMap,
    /// Whether outputs are divided by `q_t . sum k` (linear attention).
    pub normaliser: bool,
    /// State the first chunk starts from.
    pub initial_state: InitialState,
    /// Writes (Householder factors of the transition) per token; 1 but for `DeltaProduct`.
    pub householder_steps: usize,
    /// What is computed.
    pub pass: Pass,
    /// Where a decode step reads its output from.
    pub readout: Readout,
    /// Unit of the state products of a decode step.
    pub state_products: StateProducts,
    /// The log of a decode step that has one beside its state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<DeltaLog>,
    /// Choices of softmax attention.
    pub attention: Attention,
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

    /// Chunks of a sequence, the last one padded; of all packed sequences together, each padded to whole chunks.
    #[must_use]
    pub fn chunks(&self) -> usize {
        if self.sequences.is_empty() {
            return self.tokens.div_ceil(self.chunk);
        }
        let whole: usize = self.sequences.iter().map(|n| n.div_ceil(self.chunk)).sum();
        whole.max(self.padded_rows.unwrap_or(0) / self.chunk)
    }

    /// Sequences of an entry of the batch: the packed ones, or one.
    #[must_use]
    pub fn packed_sequences(&self) -> Vec<Sequence> {
        if self.sequences.is_empty() {
            return vec![Sequence {
                token: 0,
                row: 0,
                tokens: self.tokens,
            }];
        }
        let (mut token, mut row) = (0, 0);
        let place = |&tokens: &usize| {
            let sequence = Sequence { token, row, tokens };
            token += tokens;
            row += tokens.next_multiple_of(self.chunk);
            sequence
        };
        self.sequences.iter().map(place).collect()
    }

    /// First tokens of the sequences of an entry of the batch.
    #[must_use]
    pub fn sequence_starts(&self) -> Vec<usize> {
        self.packed_sequences().iter().map(|s| s.token).collect()
    }

    /// First chunks of the sequences of an entry of the batch. Chunks behind the last sequence hold nothing but padding and leave its state as it is.
    #[must_use]
    pub fn first_chunks(&self) -> Vec<usize> {
        self.packed_sequences()
            .iter()
            .map(|s| s.row / self.chunk)
            .collect()
    }

    /// Padded rows by token: every sequence followed by the zeros that fill its last chunk.
    #[must_use]
    pub fn padding_runs(&self) -> Arc<[RowRun]> {
        let mut runs = Vec::new();
        let mut filled = 0;
        let zeros = |runs: &mut Vec<RowRun>, filled: usize, until: usize| {
            if until > filled {
                let rows = until - filled;
                runs.push(RowRun { from: None, rows });
            }
        };
        for Sequence { token, row, tokens } in self.packed_sequences() {
            zeros(&mut runs, filled, row);
            runs.push(RowRun {
                from: Some(token),
                rows: tokens,
            });
            filled = row + tokens;
        }
        zeros(&mut runs, filled, self.padded_tokens());
        runs.into()
    }

    /// Tokens by padded row: what [`Layer::padding_runs`] put in, taken out again.
    #[must_use]
    pub fn token_runs(&self) -> Arc<[RowRun]> {
        self.packed_sequences()
            .iter()
            .map(|s| RowRun {
                from: Some(s.row),
                rows: s.tokens,
            })
            .collect()
    }

    /// Tokens of a sequence with the padding of the last chunk.
    #[must_use]
    pub fn padded_tokens(&self) -> usize {
        self.chunks() * self.chunk
    }

    /// Channels of queries, keys and values together: a query per token, a key and a value per write.
    #[must_use]
    pub fn qkv_width(&self) -> usize {
        let (keys, values) = (self.key_heads * self.key_dim, self.value_heads * self.value_dim);
        keys + self.householder_steps * (keys + values)
    }

    /// The layer over writes in place of tokens: sequences and chunks `householder_steps` times as long.
    #[must_use]
    pub fn micro_steps(&self) -> Layer {
        let writes = self.householder_steps;
        Layer {
            tokens: writes * self.tokens,
            chunk: writes * self.chunk,
            sequences: self.sequences.iter().map(|n| writes * n).collect(),
            padded_rows: self.padded_rows.map(|rows| writes * rows),
            ..self.clone()
        }
    }

    /// Recurrent states of a head: one per entry of the batch, or one per packed sequence.
    #[must_use]
    pub fn states(&self) -> usize {
        self.batch * self.sequences.len().max(1)
    }

    /// Tokens of every chunk of an entry of the batch, padding excluded.
    #[must_use]
    pub fn tokens_of_chunks(&self) -> Vec<usize> {
        let mut tokens = vec![0; self.chunks()];
        for sequence in self.packed_sequences() {
            let first = sequence.row / self.chunk;
            let chunks = sequence.tokens.div_ceil(self.chunk);
            for (i, chunk) in tokens.iter_mut().skip(first).take(chunks).enumerate() {
                *chunk = (sequence.tokens - i * self.chunk).min(self.chunk);
            }
        }
        tokens
    }

    /// Rows of a table with one row per position: those of the longest sequence.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.sequences.iter().copied().max().unwrap_or(self.tokens)
    }

    /// Whether the layer is softmax attention: it keeps keys and values instead of a state.
    #[must_use]
    pub fn is_attention(&self) -> bool {
        self.mechanism.uses("block_kv")
    }

    /// Which keys a query sees, padding excluded.
    #[must_use]
    pub fn visibility(&self) -> Visibility {
        let attention = &self.attention;
        Visibility {
            causal: attention.causal,
            window: attention.window,
            // A causal mask hides the padding of the keys from every real query.
            keys: (!attention.causal).then_some(self.positions()),
        }
    }

    /// The layer in blocks of keys in place of blocks of queries: attention pads both for themselves.
    #[must_use]
    pub fn key_blocks(&self) -> Layer {
        Layer {
            chunk: self.attention.block_kv,
            padded_rows: None,
            ..self.clone()
        }
    }

    /// Earlier tokens of which a decode step of attention reads keys and values: all of them, or those that a window leaves.
    #[must_use]
    pub fn cached_tokens(&self) -> usize {
        let window = self.attention.window;
        window.map_or(self.context, |window| self.context.min(window - 1))
    }

    /// How many of `channels` are rotated by position.
    #[must_use]
    pub fn rotary_channels(&self, channels: usize) -> usize {
        (self.attention.rotary * channels as f64).round() as usize
    }

    /// Bytes a token adds to the cache of the layer: keys and values of all key heads, or the latent with the decoupled channels; 0 where
    /// the layer has a state of constant size.
    #[must_use]
    pub fn cache_bytes_per_token(&self) -> u64 {
        if !self.is_attention() {
            return 0;
        }
        let channels = match self.attention.latent_rank {
            0 => self.key_heads * (self.key_dim + self.value_dim),
            rank => rank + self.attention.decoupled_dim,
        };
        channels as u64 * self.activations.bytes()
    }

    /// Bytes of the cache after `tokens` tokens of one sequence; a window keeps no more than its keys.
    #[must_use]
    pub fn cache_bytes(&self, tokens: usize) -> u64 {
        let kept = self.attention.window.map_or(tokens, |window| window.min(tokens));
        self.cache_bytes_per_token() * kept as u64
    }

    /// Bytes of the last rows that the causal convolution needs of the tokens before, one sequence.
    #[must_use]
    pub fn convolution_state_bytes(&self) -> u64 {
        if self.mechanism.uses("conv_width") {
            (self.conv_width - 1) as u64 * self.qkv_width() as u64 * self.activations.bytes()
        } else {
            0
        }
    }

    /// Bytes of the recurrent state of the whole layer, one sequence; it does not depend on the tokens.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        if self.is_attention() {
            return 0;
        }
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
        if self.is_attention() {
            return self.describe_attention();
        }
        let tiles = if self.mechanism.uses("decay_tiles") {
            format!(", {} decay tiles", self.decay_tiles)
        } else {
            String::new()
        };
        if self.pass == Pass::Decode {
            let log = self.log.map_or_else(String::new, |log| {
                format!(
                    ", log of {} keys and {} updates, {} merge every {} tokens",
                    log.keys,
                    log.updates,
                    log.merge.name(),
                    log.interval
                )
            });
            return format!(
                "{} decode of {} sequences, d={} key heads {}x{} value heads {}x{}{tiles}, {} activations, {} state{log}",
                self.mechanism.name,
                self.batch,
                self.model_width,
                self.key_heads,
                self.key_dim,
                self.value_heads,
                self.value_dim,
                self.activations,
                self.state.name(),
            );
        }
        if let Some(tree) = &self.tree {
            return format!(
                "{} verification of {} tokens, up to {} deep, for {} sequences, d={} key heads {}x{} value heads {}x{}{tiles}, {} activations, {} state, {} Gram, {} inverse",
                self.mechanism.name,
                tree.nodes(),
                tree.depth(),
                self.batch,
                self.model_width,
                self.key_heads,
                self.key_dim,
                self.value_heads,
                self.value_dim,
                self.activations,
                self.state.name(),
                self.gram.name(),
                self.inverse.name(),
            );
        }
        let packed = match self.sequences.len() {
            0 => String::new(),
            n => format!(" in {n} packed sequences of {} rows,", self.padded_tokens()),
        };
        let mut line = format!(
            "{} B={} T={}{packed} d={} key heads {}x{} value heads {}x{} chunk {}{tiles}, {} activations, {} state",
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
        );
        if self.mechanism.uses("gram") {
            line.extend([", ", self.gram.name(), " Gram"]);
        }
        if self.mechanism.uses("inverse") {
            line.extend([", ", self.inverse.name(), " inverse"]);
        }
        if self.mechanism.uses("solve") && self.solve != Solve::Wy {
            line.extend([" of the ", self.solve.name()]);
        }
        if self.mechanism.uses("cg_steps") {
            line.push_str(", ");
            line.push_str(&self.cg_steps.to_string());
            line.push_str(" steps of conjugate gradients");
        }
        if self.mechanism.uses("whitening") {
            line.extend([", ", self.whitening.name(), " whitening"]);
        }
        line
    }

    fn describe_attention(&self) -> String {
        let attention = &self.attention;
        let shape = format!(
            "d={} {} query heads, {} key heads, keys of {}, values of {}",
            self.model_width, self.value_heads, self.key_heads, self.key_dim, self.value_dim,
        );
        let mut parts = match self.pass {
            Pass::Forward | Pass::Verify => {
                let packed = match self.sequences.len() {
                    0 => String::new(),
                    n => format!(" in {n} packed sequences of {} rows,", self.padded_tokens()),
                };
                let (name, batch, tokens) = (self.mechanism.name, self.batch, self.tokens);
                let (block_q, block_kv) = (attention.block_q, attention.block_kv);
                vec![format!(
                    "{name} B={batch} T={tokens}{packed} {shape}, blocks {block_q}x{block_kv}"
                )]
            }
            Pass::Decode => vec![format!(
                "{} decode of {} sequences after {} tokens, {shape}, blocks of {} keys",
                self.mechanism.name, self.batch, self.context, attention.block_kv,
            )],
        };
        parts.push(if attention.causal { "causal" } else { "not causal" }.to_owned());
        if let Some(window) = attention.window {
            parts.push(format!("window {window}"));
        }
        if attention.latent_rank > 0 {
            parts.push(format!(
                "latent {} + {}",
                attention.latent_rank, attention.decoupled_dim
            ));
        }
        parts.push(match attention.rotary {
            0.0 => "no position encoding".to_owned(),
            share => format!("{:.0} % rotary", 100.0 * share),
        });
        if attention.ssmax {
            parts.push("SSMax".to_owned());
        }
        if attention.qk_norm {
            parts.push("query/key norm".to_owned());
        }
        parts.push(format!("{} activations", self.activations));
        parts.join(", ")
    }
}
