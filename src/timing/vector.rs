//! Vector unit: slot-cycles of an operation.
//!
//! Slot classes (ALU, transcendental, cross-lane, load and store) issue side by side, each a lane of its own. An operation works on whole registers
//! of `lanes x sublanes` elements, so small or oddly shaped tensors pay for the rest of the register.

use super::matrix;
use super::unit::{Instance, Occupancy, Unit};
use crate::coefficients::Coefficient;
use crate::hardware::{Architecture, Chip};
use crate::kernels::OpKind;

/// The vector unit of a core.
pub struct VectorUnit;

impl Unit for VectorUnit {
    fn occupy(&self, chip: &Chip, instance: &Instance<'_>, occupancy: &mut Occupancy) {
        let &Instance {
            op,
            registers,
            value_columns,
            value_parts,
        } = instance;
        let slots = &chip.vector_unit.slots;
        let latency = &chip.latency;
        let share = if value_columns {
            (value_parts as f64).recip()
        } else {
            1.0
        };
        let [alu, transcendental, cross, memory] = &mut occupancy.vector;
        match op {
            OpKind::Product {
                m,
                k,
                n,
                dtype,
                passes,
            } => {
                let columns = if value_columns {
                    n.div_ceil(value_parts)
                } else {
                    *n
                };
                let filled = |rows: u64, columns: u64| registers_in_place(chip, rows as f64, columns as f64);
                // Operands come from on-chip memory at their own width, results return as f32.
                let packing = dtype.bytes() as f64 / 4.0;
                let loaded = (filled(*m, *k) + filled(*k, columns)) * packing;
                let results = filled(*m, columns);
                // A GPU accumulates in registers, where the next operation finds the result.
                let stored = if chip.architecture == Architecture::Tpu {
                    results
                } else {
                    0.0
                };
                *memory += traffic(chip, loaded, stored);
                if chip.architecture == Architecture::Tpu {
                    // Beyond the depth of the array, and between the passes of an f32 product, the vector unit sums up.
                    let sums = (*k as f64 / f64::from(chip.matrix_unit.rows)).ceil()
                        * matrix::passes(chip, *dtype, *passes);
                    let ops = 2.0 * sums - 1.0;
                    *alu += results * ops * chip.coefficient(Coefficient::AccumulateOps) / slots.alu;
                }
            }
            OpKind::Vector {
                cost,
                cross_lane,
                cross_lane_ops,
                ..
            } => {
                let count = registers * share;
                *alu += count * cost.alu / slots.alu;
                *transcendental += count * cost.transcendental / slots.transcendental;
                if let Some([rows, columns]) = *cross_lane {
                    let spills = chip.architecture == Architecture::Tpu;
                    if spills && count > f64::from(chip.vector_unit.registers) {
                        // What a reduction or a broadcast across lanes belongs to is needed again after it, and does not stay in registers.
                        *memory += traffic(chip, count, count);
                    }
                    let moved = registers_in_place(chip, rows as f64, columns as f64) * share;
                    *cross += moved * cross_lane_ops / slots.cross_lane;
                    occupancy.latency += latency.cross_lane;
                }
                if cost.transcendental > 0.0 {
                    occupancy.latency += latency.transcendental;
                }
                occupancy.latency += latency.vector;
            }
            OpKind::Substitution {
                rows,
                columns,
                systems,
            } => {
                let columns = if value_columns {
                    columns.div_ceil(value_parts)
                } else {
                    *columns
                };
                substitution(chip, *rows, columns, *systems, occupancy);
            }
            OpKind::Cholesky { rows } => {
                // A column step is a substitution step with as many right-hand sides as rows, after the pivot went through the reciprocal root
                // and the cross-lane unit, both of which are on the chain.
                let pivots = *rows as f64;
                substitution(chip, *rows, *rows, 1, occupancy);
                occupancy.vector[1] += pivots / slots.transcendental;
                occupancy.vector[2] += pivots / slots.cross_lane;
                occupancy.latency += pivots * (latency.transcendental + latency.cross_lane);
            }
        }
    }
}

/// Adds what substitution of `rows` rows with `columns` right-hand sides asks of the slots, and its chain.
///
/// Each solved row is multiplied into the rows below it and subtracted. The coefficients of the system are known beforehand, so their way through
/// the cross-lane unit is off the chain: one spread over all lanes for a row, or, with several systems side by side, a gather for every register
/// that is updated, whose lanes take the coefficients of their own system.
fn substitution(chip: &Chip, rows: u64, columns: u64, systems: u64, occupancy: &mut Occupancy) {
    let slots = &chip.vector_unit.slots;
    let across = (columns as f64 / f64::from(chip.vector_unit.lanes)).ceil();
    let sublanes = u64::from(chip.vector_unit.sublanes);
    let below: u64 = (1..rows).map(|r| (rows - r).div_ceil(sublanes)).sum();
    let chain = rows.saturating_sub(1) as f64;
    occupancy.vector[0] += 2.0 * below as f64 * across / slots.alu;
    let spreads = if systems > 1 { below as f64 * across } else { chain };
    occupancy.vector[2] += spreads / slots.cross_lane;
    occupancy.latency += chain * chip.coefficient(Coefficient::SubstitutionStep) * chip.latency.vector;
}

/// Cycles of the load and store slots of a vector operation on matrices of which a single one fills more registers than a TPU has: each is loaded and stored.
/// 0 for every other operation. A GPU splits what its registers do not hold over programs. `registers` are those that all of them fill.
#[must_use]
pub fn through_memory(chip: &Chip, op: &OpKind, registers: f64) -> f64 {
    let OpKind::Vector { dims, .. } = op else {
        return 0.0;
    };
    let [.., rows, columns] = *dims.dims() else {
        return 0.0;
    };
    let held = registers_in_place(chip, rows as f64, columns as f64);
    if chip.architecture == Architecture::Gpu || held <= f64::from(chip.vector_unit.registers) {
        return 0.0;
    }
    traffic(chip, registers, registers)
}

/// Cycles of the load and store slots for `loaded` and `stored` registers; loads and stores issue side by side.
#[must_use]
pub fn traffic(chip: &Chip, loaded: f64, stored: f64) -> f64 {
    let slots = &chip.vector_unit.slots;
    (loaded / slots.load).max(stored / slots.store)
}

/// Registers a tensor fills, in the layout with the fewest. Threads of a GPU hold elements of any shape without padding.
#[must_use]
pub fn registers(chip: &Chip, dims: &[usize]) -> f64 {
    if chip.architecture == Architecture::Gpu {
        return (dims.iter().map(|&d| d as f64).product::<f64>() / chip.register_elements()).ceil();
    }
    crate::kernels::tiled_elements(chip, dims) / chip.register_elements()
}

/// Registers that the tensor of a vector operation fills; 0 for other operations.
#[must_use]
pub fn registers_of(chip: &Chip, op: &OpKind) -> f64 {
    match op {
        OpKind::Vector { dims, .. } => registers(chip, dims.dims()),
        _ => 0.0,
    }
}

/// Registers of a tensor whose rows and columns keep their place on sublanes and lanes.
#[must_use]
pub fn registers_in_place(chip: &Chip, rows: f64, columns: f64) -> f64 {
    if chip.architecture == Architecture::Gpu {
        return (rows * columns / chip.register_elements()).ceil();
    }
    (rows / f64::from(chip.vector_unit.sublanes)).ceil()
        * (columns / f64::from(chip.vector_unit.lanes)).ceil()
}
