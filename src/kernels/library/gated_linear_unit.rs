//! Gated linear unit: `activation(x W1) * (x W2)`, as XLA runs it.
//!
//! One product makes both halves, an intermediate `[m, 2, n]`; a fusion reads it back and gates. Source of what the intermediate costs: measured calls
//! on three TPUs, which it explains to 2 % where its layout is known.

use super::body::{Body, Cost};
use super::case::{Case, CaseError, size};
use super::matmul::{self, Shape, Traffic};
use super::{Family, Launch, once};
use crate::dtype::Dtype;

pub(super) const FAMILY: Family = Family {
    ops: &["gated_linear_unit"],
    build,
};

/// Share of on-chip memory that an intermediate may take to stay there between two kernels. Source: measured calls change from one regime to the other
/// at 0.48.
pub(super) const RESIDENT_SHARE: f64 = 0.48;
/// Rows of a memory tile in which the two halves of the intermediate stand, where the compiler gives them the place next to the minor one. Of such a tile
/// two rows are used. Source: measured calls, 4.0 times the dense traffic on one-core chips, 1.6 to 2.1 times on v5p.
const GATE_TILE_ROWS: [u64; 2] = [8, 4];

/// Whether an intermediate of `bytes` stays on chip between two kernels: in VMEM of a chip with one core per device (two cores would have to exchange it), or
/// in half of the last-level cache of a GPU.
pub(super) fn stays_on_chip(case: &Case<'_>, bytes: f64) -> bool {
    if case.tpu() {
        bytes < RESIDENT_SHARE * case.chip.on_chip_per_device().get()
    } else {
        case.chip.cache.as_ref().is_some_and(|cache| bytes < 0.5 * cache.capacity.get())
    }
}

fn build(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    let (m, k, n) = (case.size("m")?, case.size("k")?, case.size("n")?);
    let rank = case.dims("x")?.map_or(2, |dims| dims.len());
    let activation = case.word("act", &["silu", "sigmoid", "swish", "gelu", "relu", "none"])?;
    let gate = match activation {
        "sigmoid" => Cost::new(3.0, 2.0),
        "gelu" => Cost::new(9.0, 1.0),
        "relu" => Cost::alu(2.0),
        "none" => Cost::alu(1.0),
        _ => Cost::new(4.0, 2.0),
    };
    let dtype = case.formats.a;
    let element = case.bytes() as f64;
    // A TPU keeps the sums in f32; the libraries of a GPU round them to the format of the operands.
    let intermediate_dtype = if case.tpu() { Dtype::F32 } else { dtype };
    let dense = (size(&[m, 2, n])? * intermediate_dtype.bytes()) as f64;
    let padded = if case.tpu() && !(rank >= 4 && dtype != Dtype::F32) {
        let megacore = case.chip.cores_per_device > 1;
        let rows = GATE_TILE_ROWS[usize::from(megacore)];
        dense * rows as f64 / 2.0
    } else {
        dense
    };
    let on_chip = stays_on_chip(case, dense);
    let intermediate = if on_chip { 0.0 } else { padded };
    let shape = Shape {
        batch: 1,
        m,
        k,
        n: size(&[2, n])?,
    };
    let traffic = Traffic {
        dtype,
        passes: case.passes(),
        a: size(&[m, k])? as f64 * element,
        b: size(&[k, 2, n])? as f64 * element,
        c: intermediate,
    };
    let product = matmul::kernel(case, "product", "both halves", shape, traffic)?.finish()?;
    let output = size(&[m, n])? as f64 * element;
    let gating = Body::streaming("gate", "activation and gate")
        .vector("gate", &[m, n], gate, 1)
        .read("intermediate", intermediate, intermediate_dtype)
        .write("result", output, dtype)
        .finish()?;
    Ok(once([product, gating]))
}
