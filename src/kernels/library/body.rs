//! A kernel written down operation by operation.

use super::case::{CaseError, LARGEST, size};
use crate::dtype::Dtype;
use crate::graph::work::PerDtype;
use crate::graph::{Role, Shape, Stage, Work};
use crate::kernels::{Grid, Implementation, Kernel, KernelOp, OpKind, Transfer, VectorCost};

/// Cost of a vector operation per element, cross-lane operations included.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cost {
    /// ALU operations.
    pub(super) alu: f64,
    /// Transcendental operations.
    pub(super) transcendental: f64,
}

impl Cost {
    pub(super) const fn alu(alu: f64) -> Self {
        Cost {
            alu,
            transcendental: 0.0,
        }
    }

    pub(super) const fn new(alu: f64, transcendental: f64) -> Self {
        Cost { alu, transcendental }
    }
}

/// A matrix product `[m, k] x [k, n]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub(super) m: u64,
    pub(super) k: u64,
    pub(super) n: u64,
    pub(super) dtype: Dtype,
    pub(super) passes: u32,
}

/// A kernel under construction. Every operation waits for the one before it.
pub(super) struct Body {
    label: String,
    title: String,
    ops: Vec<KernelOp>,
    reads: Vec<Transfer>,
    writes: Vec<Transfer>,
    grid: Grid,
    units: Option<u64>,
    streams: bool,
    steps_per_program: u64,
    live_bytes: u64,
    work: Work,
    fault: Option<CaseError>,
    /// What is particular to the implementation.
    pub(super) implementation: Implementation,
}

impl Body {
    /// A kernel of `parallel` independent units of `sequential` dependent steps each.
    pub(super) fn new(label: &str, title: &str, parallel: u64, sequential: u64) -> Self {
        Body {
            label: label.to_owned(),
            title: title.to_owned(),
            ops: Vec::new(),
            reads: Vec::new(),
            writes: Vec::new(),
            grid: Grid {
                parallel: parallel.max(1),
                sequential: sequential.max(1),
            },
            units: Some(1),
            streams: false,
            steps_per_program: 1,
            live_bytes: 0,
            work: Work::default(),
            fault: None,
            implementation: Implementation::default(),
        }
    }

    /// A streaming kernel: no grid of its own, cut into as many programs as suit the chip.
    pub(super) fn streaming(label: &str, title: &str) -> Self {
        Body {
            streams: true,
            ..Body::new(label, title, 1, 1)
        }
    }

    /// `units` independent units interleave in a program.
    pub(super) fn units(mut self, units: u64) -> Self {
        self.units = Some(units.max(1));
        self
    }

    /// A program works on `steps` sequential steps, written out one behind the other, so that only what is carried from one to the next keeps them in order.
    pub(super) fn unrolled(mut self, steps: u64) -> Self {
        self.steps_per_program = steps.max(1);
        self
    }

    /// The last operation belongs to what is carried from one sequential step to the next.
    pub(super) fn carried(mut self) -> Self {
        if let Some(op) = self.ops.last_mut() {
            op.carried = true;
        }
        self
    }

    /// Where `pipelined`, the last operation works on what the step before has left: of a software pipeline, it waits for nothing in its own step.
    pub(super) fn of_step_before(mut self, pipelined: bool) -> Self {
        if let Some(op) = self.ops.last_mut()
            && pipelined
        {
            op.after.clear();
        }
        self
    }

    /// As many independent units interleave in a program as fit on chip.
    pub(super) fn units_that_fit(mut self) -> Self {
        self.units = None;
        self
    }

    /// Intermediates of a unit that stay on chip.
    pub(super) fn live(mut self, bytes: u64) -> Self {
        self.live_bytes = bytes;
        self
    }

    fn op(&mut self, name: &str, kind: OpKind, count: u64) {
        let after = self.ops.len().checked_sub(1).into_iter().collect();
        self.ops.push(KernelOp {
            name: name.into(),
            // A kernel outside a layer has no stage; this one says that it stands on its own.
            stage: Stage::Projections,
            kind,
            count,
            serial: 1,
            after,
            value_columns: false,
            carried: false,
            share: 1.0,
        });
    }

    fn note(&mut self, counted: Result<u64, CaseError>) -> u64 {
        counted.unwrap_or_else(|error| {
            self.fault.get_or_insert(error);
            0
        })
    }

    /// `count` products.
    pub(super) fn product(mut self, name: &str, product: Product, count: u64) -> Self {
        let Product {
            m,
            k,
            n,
            dtype,
            passes,
        } = product;
        let flops = size(&[2, m, k, n, count]);
        let flops = self.note(flops);
        self.work += Work {
            matrix_flops: PerDtype::of(dtype, flops),
            ..Work::default()
        };
        let kind = OpKind::Product {
            m,
            k,
            n,
            dtype,
            passes,
        };
        self.op(name, kind, count);
        self
    }

    fn vector_op(
        mut self,
        name: &str,
        dims: &[u64],
        cost: Cost,
        lanes: Option<([u64; 2], f64)>,
        count: u64,
    ) -> Self {
        let elements = dims.iter().copied().chain([count]).collect::<Vec<u64>>();
        let elements = size(&elements);
        let elements = self.note(elements) as f64;
        self.work += Work {
            vector_ops: PerDtype::of(Dtype::F32, (elements * cost.alu) as u64),
            transcendentals: (elements * cost.transcendental) as u64,
            ..Work::default()
        };
        let kind = OpKind::Vector {
            dims: Shape::new(dims.iter().map(|&d| d as usize).collect::<Vec<usize>>()),
            cost: VectorCost {
                alu: cost.alu,
                transcendental: cost.transcendental,
            },
            cross_lane: lanes.map(|([rows, columns], _)| [rows as usize, columns as usize]),
            cross_lane_ops: lanes.map_or(0.0, |(_, ops)| ops),
        };
        self.op(name, kind, count);
        self
    }

    /// `count` elementwise operations on a tensor of extents `dims`.
    pub(super) fn vector(self, name: &str, dims: &[u64], cost: Cost, count: u64) -> Self {
        self.vector_op(name, dims, cost, None, count)
    }

    /// As [`Body::vector`] with a reduction or broadcast over the lanes of `rows` rows.
    pub(super) fn row_reduction(self, name: &str, dims: &[u64], cost: Cost, rows: u64, count: u64) -> Self {
        self.vector_op(name, dims, cost, Some(([rows, 1], 1.0)), count)
    }

    /// `ops` cross-lane operations on every register of a `rows x columns` tensor.
    pub(super) fn lane_movement(self, name: &str, rows: u64, columns: u64, ops: f64, count: u64) -> Self {
        self.vector_op(
            name,
            &[rows, columns],
            Cost::default(),
            Some(([rows, columns], ops)),
            count,
        )
    }

    /// Forward substitution.
    pub(super) fn substitution(mut self, name: &str, rows: u64, columns: u64, count: u64) -> Self {
        let ops = size(&[rows, rows, columns, count]);
        let ops = self.note(ops);
        self.work += Work {
            vector_ops: PerDtype::of(Dtype::F32, ops / 2),
            ..Work::default()
        };
        let kind = OpKind::Substitution {
            rows,
            columns,
            systems: 1,
        };
        self.op(name, kind, count);
        self
    }

    fn transfer(&mut self, name: &str, bytes: f64, dtype: Dtype) -> Transfer {
        if !(0.0..=LARGEST as f64).contains(&bytes) {
            self.fault
                .get_or_insert(CaseError::TooLarge(format!("{bytes:.3e} bytes of {name}")));
        }
        Transfer {
            name: name.into(),
            bytes: bytes.clamp(0.0, LARGEST as f64) as u64,
            dtype,
            role: Role::Activation,
            columns: None,
        }
    }

    /// A tensor that comes from device memory.
    pub(super) fn read(mut self, name: &str, bytes: f64, dtype: Dtype) -> Self {
        let transfer = self.transfer(name, bytes, dtype);
        self.reads.push(transfer);
        self
    }

    /// Parameters that come from device memory.
    pub(super) fn weights(mut self, name: &str, bytes: f64, dtype: Dtype) -> Self {
        let transfer = Transfer {
            role: Role::Weight,
            ..self.transfer(name, bytes, dtype)
        };
        self.reads.push(transfer);
        self
    }

    /// A tensor that goes to device memory.
    pub(super) fn write(mut self, name: &str, bytes: f64, dtype: Dtype) -> Self {
        let transfer = self.transfer(name, bytes, dtype);
        self.writes.push(transfer);
        self
    }

    /// Bytes that the last-level cache of a GPU serves or takes.
    pub(super) fn cached(mut self, bytes: f64) -> Self {
        self.implementation.cache_bytes += bytes.max(0.0);
        self
    }

    /// Steps of the whole grid.
    pub(super) fn steps(&self) -> u64 {
        self.grid.steps().max(1)
    }

    /// The kernel.
    ///
    /// # Errors
    /// Where its counts are too large.
    pub(super) fn finish(mut self) -> Result<Kernel, CaseError> {
        let steps = size(&[self.grid.parallel, self.grid.sequential]);
        self.note(steps);
        match self.fault {
            Some(fault) => Err(fault),
            None => Ok(Kernel {
                label: self.label,
                title: self.title,
                ops: self.ops,
                reads: self.reads,
                writes: self.writes,
                grid: self.grid,
                streams: self.streams,
                carried_bytes: 0,
                live_bytes: self.live_bytes,
                units_per_program: self.units,
                steps_per_program: self.steps_per_program,
                share: 1.0,
                work: self.work,
                padding: 0.0,
                implementation: self.implementation,
            }),
        }
    }
}

/// A kernel that reads `bytes` and writes as many: a layout change or another copy.
///
/// # Errors
/// Where the counts are too large.
pub(super) fn copy(title: &str, bytes: f64, dtype: Dtype) -> Result<Kernel, CaseError> {
    Body::streaming("copy", title)
        .read("source", bytes, dtype)
        .write("copy", bytes, dtype)
        .finish()
}
