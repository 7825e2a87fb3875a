//! The accelerator as the timing model sees it: validated, in SI units, with every derived rate one call away.
//!
//! A [`Chip`] is made from a `hw/*.yaml` file by [`crate::hardware::load`]; nothing else constructs one, so a
//! `Chip` in hand has passed every check.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Hertz};

/// How far a number can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Measured on silicon.
    Measured,
    /// Fitted to measurements.
    Fitted,
    /// Printed by the vendor, a paper or a public source file.
    Published,
    /// Computed from published numbers.
    Derived,
    /// Nobody has published it; our reading, stated as such.
    Assumed,
}

/// Where a number comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// How far it can be trusted.
    pub kind: Kind,
    /// The document, file or computation it was taken from.
    pub source: String,
    /// Disagreeing sources and why this one was taken; empty where there is nothing to say.
    pub note: String,
}

/// Whether the chip schedules very long instruction words (TPU) or many threads (GPU).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// In-order VLIW core with systolic arrays, software-managed VMEM and DMA engines.
    Tpu,
    /// Streaming multiprocessors with tensor cores, shared memory and an L2 cache.
    Gpu,
}

/// The matrix units of one core.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MatrixUnit {
    /// Arrays per core (TPU: MXUs of a TensorCore; GPU: tensor cores of an SM).
    pub count: u32,
    /// Stationary rows of one array: the contraction depth of one pass.
    pub rows: u32,
    /// Columns of one array: the outputs of one pass.
    pub columns: u32,
    /// Rows streamed through one array per cycle, by operand format. A missing format has no native rate.
    pub rows_per_cycle: BTreeMap<Dtype, f64>,
    /// Source of the block.
    pub provenance: Provenance,
}

/// Operations the vector unit of one core issues per cycle. A slot works on one whole register
/// (`lanes x sublanes` elements); a fraction means the slot is narrower than a register or shared.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct VectorSlots {
    /// Add, multiply, maximum, compare, select, convert.
    pub alu: f64,
    /// Exponential, logarithm, reciprocal, square root, tanh.
    pub transcendental: f64,
    /// Movement between lanes: transposes, lane broadcasts, lane reductions.
    pub cross_lane: f64,
    /// Vector loads from on-chip memory.
    pub load: f64,
    /// Vector stores to on-chip memory.
    pub store: f64,
}

/// The vector unit of one core.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VectorUnit {
    /// Elements along the minor dimension of a register.
    pub lanes: u32,
    /// Elements along the second-minor dimension of a register (f32).
    pub sublanes: u32,
    /// Vector registers of `lanes x sublanes` 32-bit words (GPU: the 32-bit register file divided by `lanes`).
    pub registers: u32,
    /// Slots per cycle.
    pub slots: VectorSlots,
    /// Operations per lane and cycle of one ALU slot that a datasheet counts: 2 where a fused multiply-add counts as two.
    pub flops_per_alu_op: f64,
    /// Source of the block.
    pub provenance: Provenance,
}

/// Software-managed memory of one core: VMEM on a TPU, shared memory on a GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OnChipMemory {
    /// Capacity per core.
    pub capacity: Bytes,
    /// Source.
    pub provenance: Provenance,
}

/// Device memory. Capacity and bandwidth are those of the whole chip.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Hbm {
    /// Capacity of the chip.
    pub capacity: Bytes,
    /// Datasheet bandwidth of the chip.
    pub bandwidth: BytesPerSecond,
    /// Share of the datasheet bandwidth that a long stream reaches, in `(0, 1]`.
    pub achievable: f64,
    /// Source of `achievable`.
    pub achievable_provenance: Provenance,
    /// Source of capacity and bandwidth.
    pub provenance: Provenance,
}

/// Links to other chips; absent where nothing is published.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Interconnect {
    /// Sum over all links of a chip, both directions.
    pub bidirectional: BytesPerSecond,
    /// Source.
    pub provenance: Provenance,
}

/// A clock state the chip can run in.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClockState {
    /// Its name, for instance `default` or `boost`.
    pub name: String,
    /// Core clock.
    pub frequency: Hertz,
    /// Source.
    pub provenance: Provenance,
}

/// A rate or size somebody printed, kept to be compared with what the description derives.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PublishedFigure {
    /// What it is: `matrix.bf16`, `matrix.fp8_e4m3`, `matrix.int8` or `vector.f32`.
    pub quantity: String,
    /// The figure for the whole chip.
    pub value: FlopsPerSecond,
    /// The clock state it holds in.
    pub clock: String,
    /// Source.
    pub provenance: Provenance,
}

/// One accelerator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Chip {
    /// File name without extension, for instance `tpu-v7x`.
    pub name: String,
    /// What a person calls it.
    pub title: String,
    /// TPU or GPU.
    pub architecture: Architecture,
    /// Cores of the whole chip (TensorCores or SMs).
    pub cores_per_chip: u32,
    /// Cores of one device as JAX or CUDA shows it.
    pub cores_per_device: u32,
    /// Source of the two core counts.
    pub cores_provenance: Provenance,
    /// All clock states, the default first.
    pub clock_states: Vec<ClockState>,
    /// Matrix units of one core.
    pub matrix_unit: MatrixUnit,
    /// Vector unit of one core.
    pub vector_unit: VectorUnit,
    /// VMEM or shared memory of one core.
    pub on_chip: OnChipMemory,
    /// Last-level cache of the chip (GPU L2; v4 CMEM), where there is one.
    pub cache: Option<OnChipMemory>,
    /// Device memory.
    pub hbm: Hbm,
    /// Links between chips.
    pub interconnect: Option<Interconnect>,
    /// Time from the start of a kernel to its first instruction and back, per kernel.
    pub launch: crate::units::Seconds,
    /// Source of `launch`.
    pub launch_provenance: Provenance,
    /// Figures to compare with.
    pub published: Vec<PublishedFigure>,
    /// Quantities that nobody publishes and the model would like to have, in words.
    pub unknown: Vec<String>,
}
