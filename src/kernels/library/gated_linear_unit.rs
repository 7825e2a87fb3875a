//! Gated linear unit: `activation(x W1) * (x W2)`, as XLA runs it.
//!
//! One product makes both halves, an intermediate `[m, 2, n]`; a fusion reads it back and gates. Source of what the intermediate costs: measured calls
//! on three TPUs, which it explains to 2 % where its layout is known.

use super::body::{Body, Cost};
use super::case::{Case, CaseError, size};
use super::matmul::{self, Shape, Traffic};
use super::{Family, Launch, once};
use crate::coefficients::Coefficient;
use crate::dtype::Dtype;

pub(super) const FAMILY: Family = Family {
    ops: &["gated_linear_unit"],
    build,
};

/// Rows of a memory tile in which the two halves of the intermediate stand, where the compiler gives them the place next to the minor one. Of such a tile
/// two rows are used. For operands of 16 bits and of 32 bits, on devices of one core and of two. Source: measured calls, 4.0 and 3.5 times the dense traffic on one core, 1.6
/// and 2.1 times on two.
const GATE_TILE_ROWS: [[f64; 2]; 2] = [[8.0, 3.2], [7.0, 4.2]];

/// Share of the last-level cache of a GPU that an intermediate may take to stay there between two kernels.
const CACHE_SHARE: f64 = 0.5;
/// What XLA leaves to operations for buffers of their own; the rest of VMEM holds whole results between kernels. Source: of chunked attention 84 MB stay on chip in the 128 MiB of
/// v6e, and 38 MB do not in the 64 MiB of v7x.
const OPERATION_BYTES: f64 = 33_554_432.0;

/// Bytes of VMEM in which results stay between kernels. Two cores would have to exchange them, so only a device of one core has any.
pub(super) fn room(case: &Case<'_>) -> f64 {
    if case.chip.cores_per_device > 1 {
        return 0.0;
    }
    (case.chip.on_chip_per_device().get() - OPERATION_BYTES).max(0.0)
}

/// Share of an intermediate of `bytes` that goes through device memory between two kernels.
///
/// A TPU keeps what takes a share of the room, beside the operands and results of the kernel that reads it, nothing of what takes all of it, and a part in between (measured
/// gated linear units of v6e and v7x). A GPU keeps what fits into half of its last-level cache.
pub(super) fn spilled_share(case: &Case<'_>, bytes: f64) -> f64 {
    if case.tpu() {
        let room = room(case);
        return if room > 0.0 {
            let whole = case.coefficient(Coefficient::ResidentShare) * room;
            ((bytes - whole) / (room - whole)).clamp(0.0, 1.0)
        } else {
            1.0
        };
    }
    let kept = case
        .chip
        .cache
        .as_ref()
        .is_some_and(|cache| bytes < CACHE_SHARE * cache.capacity.get());
    f64::from(u8::from(!kept))
}

/// Bytes of an intermediate that stay in the last-level cache of a GPU between two kernels, where `spilled` of them go through device memory.
pub(super) fn cached(case: &Case<'_>, bytes: f64, spilled: f64) -> f64 {
    if case.tpu() { 0.0 } else { bytes - spilled }
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
    let padding = if case.tpu() && !(rank >= 4 && dtype != Dtype::F32) {
        let megacore = case.chip.cores_per_device > 1;
        GATE_TILE_ROWS[usize::from(dtype == Dtype::F32)][usize::from(megacore)] / 2.0
    } else {
        1.0
    };
    let spilled = spilled_share(case, dense);
    let intermediate = dense * padding * spilled;
    let in_cache = cached(case, dense * padding, intermediate);
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
    let product = matmul::kernel(case, "product", "both halves", shape, traffic)?
        .cached(in_cache)
        .finish()?;
    let output = size(&[m, n])? as f64 * element;
    let mut gating = Body::streaming("gate", "activation and gate").vector("gate", &[m, n], gate, 1);
    if case.tpu() && spilled < 1.0 {
        // What stays on chip stands there in the same tiles: the product stores them, this kernel loads them.
        let rows = 2.0 * m as f64 * padding * (1.0 - spilled);
        let rows = rows.ceil() as u64;
        for title in ["product to on-chip memory", "and back"] {
            gating = gating.lane_movement(title, rows, n, 0.0, 1);
        }
    }
    let gating = gating
        .read("intermediate", intermediate, intermediate_dtype)
        .cached(in_cache)
        .write("result", output, dtype)
        .finish()?;
    Ok(once([product, gating]))
}
