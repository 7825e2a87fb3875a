//! The accelerator as the timing model sees it: validated, in SI units, with every derived rate one call
//! away.
//!
//! A [`Chip`] is made from a `hw/*.yaml` file by [`crate::hardware::load`]; nothing else constructs one, so a
//! `Chip` in hand has passed every check.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::coefficients::{Coefficient, Coefficients};
use crate::config::{ConfigError, suggestion};
use crate::dtype::Dtype;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Hertz, Seconds};

/// How far a number can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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

impl Kind {
    /// The word used in files and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Measured => "measured",
            Kind::Fitted => "fitted",
            Kind::Published => "published",
            Kind::Derived => "derived",
            Kind::Assumed => "assumed",
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Where a number comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Provenance {
    /// How far it can be trusted.
    pub kind: Kind,
    /// The document, file or computation it was taken from.
    pub source: String,
    /// Disagreeing sources and why this one was taken; empty where there is nothing to say.
    pub note: String,
    /// Fields of the block that come from elsewhere, by name (`rows_per_cycle`, `slots.transcendental`).
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub except: BTreeMap<String, Provenance>,
}

impl Provenance {
    /// Where one field of the block comes from: its own entry, that of the group it is in, or the block's.
    #[must_use]
    pub fn of(&self, field: &str) -> &Provenance {
        let group = field.split('.').next().unwrap_or(field);
        self.except
            .get(field)
            .or_else(|| self.except.get(group))
            .unwrap_or(self)
    }
}

/// Whether the chip schedules very long instruction words (TPU) or many threads (GPU).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// In-order VLIW core with systolic arrays, software-managed VMEM and DMA engines.
    Tpu,
    /// Streaming multiprocessors with tensor cores, shared memory and an L2 cache.
    Gpu,
}

impl Architecture {
    /// The name that stands for all families of kernels of an architecture in tables and calibration files.
    #[must_use]
    pub const fn all_families(self) -> &'static str {
        match self {
            Architecture::Tpu => "all TPU",
            Architecture::Gpu => "all GPU",
        }
    }
}

/// The matrix units of one core.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MatrixUnit {
    /// Arrays per core (TPU: MXUs of a `TensorCore`; GPU: tensor cores of an SM).
    pub count: u32,
    /// Stationary rows of one array: the contraction depth of one pass.
    pub rows: u32,
    /// Columns of one array: the outputs of one pass.
    pub columns: u32,
    /// Rows streamed through one array per cycle, by operand format. A missing format has no native rate.
    pub rows_per_cycle: BTreeMap<Dtype, f64>,
    /// Whether an array works on while the warps that gave it a product go on: from the H100 on among GPUs, always on a TPU.
    pub asynchronous: bool,
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
    /// Vector registers of `lanes x sublanes` 32-bit words (GPU: the 32-bit register file divided by
    /// `lanes`).
    pub registers: u32,
    /// Slots per cycle.
    pub slots: VectorSlots,
    /// Operations per lane and cycle of one ALU slot that a datasheet counts: 2 where a fused multiply-add
    /// counts as two.
    pub flops_per_alu_op: f64,
    /// Source of the block.
    pub provenance: Provenance,
}

/// Cycles from the issue of an operation to its result, when nothing else is in flight.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Latency {
    /// A matrix product of at most one tile, operands and result in registers.
    pub matrix_result: f64,
    /// A vector ALU operation.
    pub vector: f64,
    /// A transcendental operation.
    pub transcendental: f64,
    /// A cross-lane operation.
    pub cross_lane: f64,
    /// Source of the block.
    pub provenance: Provenance,
}

/// Software-managed memory of one core: VMEM on a TPU, shared memory on a GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OnChipMemory {
    /// Capacity per core.
    pub capacity: Bytes,
    /// What the compiler gives one kernel that does not ask for more, where it is known.
    pub scoped_limit: Option<Bytes>,
    /// Source.
    pub provenance: Provenance,
}

impl OnChipMemory {
    /// What a kernel can take that does not ask for more: the limit of the compiler where it is known, and never more than there is.
    #[must_use]
    pub fn scoped(&self) -> Bytes {
        match self.scoped_limit {
            Some(limit) if limit < self.capacity => limit,
            _ => self.capacity,
        }
    }
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
    /// Cores of the whole chip (`TensorCore`s or SMs).
    pub cores_per_chip: u32,
    /// Cores of one device as JAX or CUDA shows it.
    pub cores_per_device: u32,
    /// Source of the two core counts.
    pub cores_provenance: Provenance,
    /// The clock state the derived rates hold in.
    pub clock: ClockState,
    /// All clock states, the file's default first.
    pub clock_states: Vec<ClockState>,
    /// Matrix units of one core.
    pub matrix_unit: MatrixUnit,
    /// Vector unit of one core.
    pub vector_unit: VectorUnit,
    /// Latencies of the units of one core.
    pub latency: Latency,
    /// VMEM or shared memory of one core.
    pub on_chip: OnChipMemory,
    /// Last-level cache of the chip (GPU L2; v4 CMEM), where there is one.
    pub cache: Option<OnChipMemory>,
    /// Device memory.
    pub hbm: Hbm,
    /// Links between chips.
    pub interconnect: Option<Interconnect>,
    /// Time from the start of a kernel to its first instruction and back, per kernel.
    pub launch: Seconds,
    /// Source of `launch`.
    pub launch_provenance: Provenance,
    /// Share of its clock that the chip sustains under load in the state it runs in by default: it throttles. Rates and cycles are those of the full clock.
    pub sustained_clock: f64,
    /// Host time around a call that is timed by the wall clock; zero where nobody measured it.
    pub dispatch: Seconds,
    /// Figures to compare with.
    pub published: Vec<PublishedFigure>,
    /// Quantities that nobody publishes and the model would like to have, in words.
    pub unknown: Vec<String>,
    /// Coefficients of the timing model that kernels on it are timed with.
    #[serde(skip)]
    pub coefficients: Coefficients,
}

impl Chip {
    /// A coefficient of the timing model.
    #[must_use]
    pub fn coefficient(&self, coefficient: Coefficient) -> f64 {
        self.coefficients.get(coefficient)
    }

    /// Cycles of a schedule over the cycles its program takes, those that throttling loses included. `products` says whether the program has matrix products.
    #[must_use]
    pub fn issue_efficiency(&self, products: bool) -> f64 {
        self.sustained_clock
            * self.coefficient(match (self.architecture, products) {
                (Architecture::Tpu, _) => Coefficient::IssueEfficiency,
                (Architecture::Gpu, true) => Coefficient::GpuIssueEfficiency,
                (Architecture::Gpu, false) => Coefficient::GpuVectorEfficiency,
            })
    }

    /// Cycles of a program that do not depend on what it does.
    #[must_use]
    pub fn grid_step_cycles(&self) -> f64 {
        self.coefficient(match self.architecture {
            Architecture::Tpu => Coefficient::GridStep,
            Architecture::Gpu => Coefficient::GpuGridStep,
        })
    }

    /// Time from the start of a transfer from device memory to its first byte.
    #[must_use]
    pub fn dma_latency(&self) -> Seconds {
        let micros = self.coefficient(match self.architecture {
            Architecture::Tpu => Coefficient::DmaLatency,
            Architecture::Gpu => Coefficient::GpuDmaLatency,
        });
        Seconds(micros * 1e-6)
    }

    /// Clock of the state in use.
    #[must_use]
    pub fn clock(&self) -> Hertz {
        self.clock.frequency
    }

    /// The same chip in another of its clock states.
    ///
    /// # Errors
    /// [`ConfigError`] naming the states the chip has.
    pub fn with_clock(&self, state: &str) -> Result<Chip, ConfigError> {
        if let Some(found) = self.clock_states.iter().find(|candidate| candidate.name == state) {
            // How far the chip throttles is known for the state it runs in by default.
            let sustained_clock = if found.name == self.clock.name {
                self.sustained_clock
            } else {
                1.0
            };
            return Ok(Chip {
                clock: found.clone(),
                sustained_clock,
                ..self.clone()
            });
        }
        let names: Vec<&str> = self
            .clock_states
            .iter()
            .map(|state| state.name.as_str())
            .collect();
        let tail = suggestion(state, &names, "it has");
        Err(ConfigError::argument(format!(
            "`{}` has no clock state `{state}`; {tail}",
            self.name
        )))
    }

    /// The same chip where one device has `cores` of its cores; memory bandwidth per device follows.
    ///
    /// # Errors
    /// [`ConfigError`] where `cores` is zero or more than the chip has.
    pub fn with_cores(&self, cores: u32) -> Result<Chip, ConfigError> {
        if cores == 0 || cores > self.cores_per_chip {
            return Err(ConfigError::argument(format!(
                "`{}` cannot use {cores} cores; expected 1 to {}",
                self.name, self.cores_per_chip
            )));
        }
        Ok(Chip {
            cores_per_device: cores,
            ..self.clone()
        })
    }

    /// Rows streamed through one array per cycle. `f16` runs at the rate of `bf16` and `fp8_e5m2` at that of
    /// `fp8_e4m3` where the file gives none of their own; `None` where the matrix unit has no native rate.
    #[must_use]
    pub fn rows_per_cycle(&self, dtype: Dtype) -> Option<f64> {
        let rates = &self.matrix_unit.rows_per_cycle;
        let stand_in = match dtype {
            Dtype::F16 => Some(Dtype::Bf16),
            Dtype::Fp8E5m2 => Some(Dtype::Fp8E4m3),
            _ => None,
        };
        rates.get(&dtype).or_else(|| rates.get(&stand_in?)).copied()
    }

    /// Multiply-adds, counted as two operations, of one core per cycle.
    fn matrix_flops_per_core_and_cycle(&self, dtype: Dtype) -> Option<f64> {
        let unit = &self.matrix_unit;
        let cells = f64::from(unit.count) * f64::from(unit.rows) * f64::from(unit.columns);
        Some(cells * self.rows_per_cycle(dtype)? * 2.0)
    }

    /// Peak rate of the matrix units of one device: cores x count x rows x columns x rows per cycle x 2 x
    /// clock.
    #[must_use]
    pub fn matrix_flops_per_second(&self, dtype: Dtype) -> Option<FlopsPerSecond> {
        let per_cycle = self.matrix_flops_per_core_and_cycle(dtype)? * f64::from(self.cores_per_device);
        Some(FlopsPerSecond(per_cycle * self.clock().get()))
    }

    /// As [`Chip::matrix_flops_per_second`], for the whole chip.
    #[must_use]
    pub fn matrix_flops_per_second_chip(&self, dtype: Dtype) -> Option<FlopsPerSecond> {
        let per_cycle = self.matrix_flops_per_core_and_cycle(dtype)? * f64::from(self.cores_per_chip);
        Some(FlopsPerSecond(per_cycle * self.clock().get()))
    }

    /// Elements of one vector register: lanes x sublanes.
    #[must_use]
    pub fn register_elements(&self) -> f64 {
        f64::from(self.vector_unit.lanes) * f64::from(self.vector_unit.sublanes)
    }

    fn slot_rate(&self, slots: f64) -> FlopsPerSecond {
        let cores = f64::from(self.cores_per_device);
        FlopsPerSecond(cores * self.register_elements() * slots * self.clock().get())
    }

    /// Vector operations of one device per second, a multiply-add counted once:
    /// cores x lanes x sublanes x ALU slots x clock.
    #[must_use]
    pub fn vector_ops_per_second(&self) -> FlopsPerSecond {
        self.slot_rate(self.vector_unit.slots.alu)
    }

    /// Vector rate of one device as a datasheet counts it, a fused multiply-add as two where there is one.
    #[must_use]
    pub fn vector_flops_per_second(&self) -> FlopsPerSecond {
        self.vector_ops_per_second() * self.vector_unit.flops_per_alu_op
    }

    /// Exponentials, reciprocals and their like of one device per second.
    #[must_use]
    pub fn transcendentals_per_second(&self) -> FlopsPerSecond {
        self.slot_rate(self.vector_unit.slots.transcendental)
    }

    /// Bytes that the cores of one device load from VMEM or shared memory per second: cores x lanes x sublanes x 4 bytes x
    /// load slots x clock. On TPU v5e that is 18.4 TB/s, 22 times its HBM, as the scaling book has it.
    #[must_use]
    pub fn on_chip_bandwidth_per_device(&self) -> BytesPerSecond {
        BytesPerSecond(4.0 * self.slot_rate(self.vector_unit.slots.load).get())
    }

    /// The share of the chip that one device is.
    #[must_use]
    pub fn device_share(&self) -> f64 {
        f64::from(self.cores_per_device) / f64::from(self.cores_per_chip)
    }

    /// Datasheet bandwidth of device memory for one device: that of the chip times the share of its cores.
    #[must_use]
    pub fn hbm_bandwidth_per_device(&self) -> BytesPerSecond {
        self.hbm.bandwidth * self.device_share()
    }

    /// Bandwidth that a long stream of one device reaches.
    #[must_use]
    pub fn achievable_hbm_bandwidth_per_device(&self) -> BytesPerSecond {
        self.hbm_bandwidth_per_device() * self.hbm.achievable
    }

    /// Device memory of one device.
    #[must_use]
    pub fn hbm_capacity_per_device(&self) -> Bytes {
        self.hbm.capacity * self.device_share()
    }

    /// VMEM, or shared memory, of all cores of one device.
    #[must_use]
    pub fn on_chip_per_device(&self) -> Bytes {
        self.on_chip.capacity * f64::from(self.cores_per_device)
    }

    /// Operations per byte of device memory above which the matrix units bind rather than the memory, at the
    /// datasheet bandwidth.
    #[must_use]
    pub fn ridge_point(&self, dtype: Dtype) -> Option<f64> {
        Some(self.matrix_flops_per_second(dtype)? / self.hbm_bandwidth_per_device())
    }

    /// How many matrix operations (bf16, a multiply-add counted as two) the device does in the time of one
    /// vector operation: the price of work that cannot use the matrix units.
    #[must_use]
    pub fn matrix_to_vector_ratio(&self) -> Option<f64> {
        Some(self.matrix_flops_per_second(Dtype::Bf16)? / self.vector_ops_per_second())
    }

    /// What the description derives for a published figure: for the whole chip, in the figure's clock state.
    /// `None` for a quantity that the description has no rate for.
    #[must_use]
    pub fn derived(&self, figure: &PublishedFigure) -> Option<FlopsPerSecond> {
        let state = self.with_clock(&figure.clock).ok()?;
        match figure.quantity.split_once('.')? {
            ("matrix", name) => state.matrix_flops_per_second_chip(dtype_named(name)?),
            ("vector", _) => Some(state.vector_flops_per_second() / self.device_share()),
            _ => None,
        }
    }
}

/// The format called `name` in files.
pub(super) fn dtype_named(name: &str) -> Option<Dtype> {
    Dtype::ALL.into_iter().find(|dtype| dtype.name() == name)
}
