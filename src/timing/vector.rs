//! Vector unit: slot-cycles of an operation.

use crate::hardware::Chip;
use crate::kernels::VectorCost;

/// Cycles the slot classes of one core's vector unit are occupied.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SlotCycles {
    /// ALU slots.
    pub alu: f64,
    /// Transcendental slots.
    pub transcendental: f64,
    /// Cross-lane slots.
    pub cross_lane: f64,
    /// Load slots.
    pub load: f64,
    /// Store slots.
    pub store: f64,
}

impl SlotCycles {
    /// The busiest slot class: slots issue side by side.
    #[must_use]
    pub fn busiest(&self) -> f64 {
        self.alu
            .max(self.transcendental)
            .max(self.cross_lane)
            .max(self.load)
            .max(self.store)
    }
}

impl std::ops::AddAssign for SlotCycles {
    fn add_assign(&mut self, other: Self) {
        self.alu += other.alu;
        self.transcendental += other.transcendental;
        self.cross_lane += other.cross_lane;
        self.load += other.load;
        self.store += other.store;
    }
}

impl std::ops::Mul<f64> for SlotCycles {
    type Output = SlotCycles;
    fn mul(self, factor: f64) -> SlotCycles {
        SlotCycles {
            alu: self.alu * factor,
            transcendental: self.transcendental * factor,
            cross_lane: self.cross_lane * factor,
            load: self.load * factor,
            store: self.store * factor,
        }
    }
}

/// Registers a tensor fills: the fewest over all choices of two dimensions for sublanes and lanes, because the compiler chooses the layout.
///
/// Source: padding to `(8, 128)` tiles as the minimum over dimension pairs took the 90th percentile error of measured elementwise kernels from
/// 40 % to 6 %.
#[must_use]
pub fn registers(chip: &Chip, dims: &[usize]) -> f64 {
    let (lanes, sublanes) = (
        chip.vector_unit.lanes as usize,
        chip.vector_unit.sublanes as usize,
    );
    let total: f64 = dims.iter().map(|&d| d as f64).product();
    let tiled = |rows: usize, columns: usize| {
        let padded = (rows.div_ceil(sublanes) * sublanes) as f64 * (columns.div_ceil(lanes) * lanes) as f64;
        total / (rows as f64 * columns as f64) * padded
    };
    let mut fewest = f64::INFINITY;
    for (i, &columns) in dims.iter().enumerate() {
        for (j, &rows) in dims.iter().enumerate() {
            if i != j {
                fewest = fewest.min(tiled(rows, columns));
            }
        }
    }
    if fewest.is_infinite() {
        fewest = tiled(1, dims.first().copied().unwrap_or(1));
    }
    fewest / chip.register_elements()
}

/// Registers of a tensor whose rows and columns keep their place on sublanes and lanes.
#[must_use]
pub fn registers_in_place(chip: &Chip, rows: f64, columns: f64) -> f64 {
    (rows / f64::from(chip.vector_unit.sublanes)).ceil()
        * (columns / f64::from(chip.vector_unit.lanes)).ceil()
}

/// Slot-cycles of an operation over `dims` at `cost` per register, plus cross-lane work over `[rows, columns]`.
#[must_use]
pub fn operation(
    chip: &Chip,
    dims: &[usize],
    cost: VectorCost,
    cross_lane: Option<[usize; 2]>,
    cross_lane_ops: f64,
) -> SlotCycles {
    let slots = &chip.vector_unit.slots;
    let count = registers(chip, dims);
    let lanes = cross_lane.map_or(0.0, |[rows, columns]| {
        registers_in_place(chip, rows as f64, columns as f64)
    });
    SlotCycles {
        alu: count * cost.alu / slots.alu,
        transcendental: count * cost.transcendental / slots.transcendental,
        cross_lane: lanes * cross_lane_ops / slots.cross_lane,
        ..SlotCycles::default()
    }
}

/// Slot-cycles of loading `loaded` and storing `stored` registers.
#[must_use]
pub fn traffic(chip: &Chip, loaded: f64, stored: f64) -> SlotCycles {
    let slots = &chip.vector_unit.slots;
    SlotCycles {
        load: loaded / slots.load,
        store: stored / slots.store,
        ..SlotCycles::default()
    }
}

/// Slot-cycles and dependent latency of forward substitution of `rows` rows with `columns` right-hand sides.
///
/// Each solved row is multiplied into the rows below it and subtracted. The coefficients are known beforehand, so their way through the cross-lane
/// unit is off the chain; on it are, per row, a multiply, a subtract and the row's way through on-chip memory to be read back on all sublanes, taken
/// as four vector latencies.
#[must_use]
pub fn substitution(chip: &Chip, rows: u64, columns: u64) -> (SlotCycles, f64) {
    let slots = &chip.vector_unit.slots;
    let sublanes = u64::from(chip.vector_unit.sublanes);
    let across = (columns as f64 / f64::from(chip.vector_unit.lanes)).ceil();
    let below: u64 = (1..rows).map(|r| (rows - r).div_ceil(sublanes)).sum();
    let cycles = SlotCycles {
        alu: 2.0 * below as f64 * across / slots.alu,
        cross_lane: rows.saturating_sub(1) as f64 / slots.cross_lane,
        ..SlotCycles::default()
    };
    let step = 6.0 * chip.latency.vector;
    (cycles, rows.saturating_sub(1) as f64 * step)
}

/// Slot-cycles and dependent latency of a Cholesky factor of `rows` rows.
///
/// A column step is a substitution step with as many right-hand sides as rows, after the pivot went through the reciprocal root and the
/// cross-lane unit, both of which are on the chain.
#[must_use]
pub fn cholesky(chip: &Chip, rows: u64) -> (SlotCycles, f64) {
    let (mut cycles, chain) = substitution(chip, rows, rows);
    let pivots = rows as f64;
    cycles.transcendental += pivots / chip.vector_unit.slots.transcendental;
    cycles.cross_lane += pivots / chip.vector_unit.slots.cross_lane;
    let latency = &chip.latency;
    (cycles, chain + pivots * (latency.transcendental + latency.cross_lane))
}
