//! The units of a core behind one interface: how long an operation occupies them, and when its result is there.

use super::{matrix, vector};
use crate::hardware::Chip;
use crate::kernels::OpKind;

/// An exclusive resource of a core. One lane does one thing at a time; lanes work side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// One matrix array.
    Mxu(u8),
    /// Vector ALU slots.
    Vpu,
    /// Transcendental slots.
    Transcendental,
    /// Cross-lane slots.
    CrossLane,
    /// Load and store slots of on-chip memory.
    Vmem,
    /// DMA from device memory.
    DmaIn,
    /// DMA to device memory.
    DmaOut,
}

impl Lane {
    /// The lanes of the vector unit, in the order of [`Occupancy::vector`].
    pub const VECTOR: [Lane; 4] = [Lane::Vpu, Lane::Transcendental, Lane::CrossLane, Lane::Vmem];

    /// Name on a track of a trace.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Lane::Mxu(index) => format!("MXU{index}"),
            Lane::Vpu => "VPU".to_owned(),
            Lane::Transcendental => "EUP".to_owned(),
            Lane::CrossLane => "XLU".to_owned(),
            Lane::Vmem => "VMEM".to_owned(),
            Lane::DmaIn => "DMA-in".to_owned(),
            Lane::DmaOut => "DMA-out".to_owned(),
        }
    }
}

/// What one instance of an operation asks of a core, in cycles of that core.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Occupancy {
    /// Cycles of one matrix array, if one array did all of it.
    pub matrix: f64,
    /// Stationary tiles that arrays can share among them.
    pub matrix_tiles: f64,
    /// Cycles of the vector lanes.
    pub vector: [f64; 4],
    /// Cycles from the last cycle of occupancy to the result.
    pub latency: f64,
}

impl Occupancy {
    /// Longest occupancy of a vector lane.
    #[must_use]
    pub fn longest_vector(&self) -> f64 {
        self.vector.iter().copied().fold(0.0, f64::max)
    }
}

/// One instance of an operation, as the units see it.
#[derive(Debug, Clone, Copy)]
pub struct Instance<'a> {
    /// The operation.
    pub op: &'a OpKind,
    /// Registers that the tensor of a vector operation fills; of no meaning to others.
    pub registers: f64,
    /// Whether its columns are value columns.
    pub value_columns: bool,
    /// Programs that share its value columns.
    pub value_parts: u64,
}

/// A unit of a core.
pub trait Unit {
    /// Adds what an instance asks of this unit.
    fn occupy(&self, chip: &Chip, instance: &Instance<'_>, occupancy: &mut Occupancy);
}

/// All units of a core.
#[must_use]
pub fn units() -> [&'static dyn Unit; 2] {
    [&matrix::MatrixUnit, &vector::VectorUnit]
}

/// What one instance of an operation asks of a core. `value_parts` is the number of programs that share its value columns, `value_columns`
/// whether the operation has any.
#[must_use]
pub fn occupancy(chip: &Chip, op: &OpKind, value_columns: bool, value_parts: u64) -> Occupancy {
    let registers = vector::registers_of(chip, op);
    occupancy_of(
        chip,
        &Instance {
            op,
            registers,
            value_columns,
            value_parts,
        },
    )
}

/// As [`occupancy`], where the registers of the tensor are known.
#[must_use]
pub fn occupancy_of(chip: &Chip, instance: &Instance<'_>) -> Occupancy {
    let mut occupancy = Occupancy::default();
    for unit in units() {
        unit.occupy(chip, instance, &mut occupancy);
    }
    occupancy
}
