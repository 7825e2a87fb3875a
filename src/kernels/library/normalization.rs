//! Layer norm, RMS norm, softmax.

use super::body::{Body, Cost};
use super::case::{Case, CaseError};
use super::elementwise::{extents, stored};
use super::{Family, Launch, once};
use crate::kernels::Kernel;

pub(super) const FAMILY: Family = Family {
    ops: &["layer_norm", "rms_norm", "softmax", "normalization"],
    build,
};

/// Longest row that the softmax and norms of a GPU library keep in registers. Source: the persistent softmax of `PyTorch`.
const GPU_ROW_IN_REGISTERS: u64 = 1024;

/// What a norm does to a matrix of `rows x columns`, statistics along the columns.
struct Norm {
    /// Passes that only read, before the one that reads and writes.
    statistics: u64,
    /// Cost of a statistics pass.
    gather: Cost,
    /// Cost of the last pass.
    apply: Cost,
}

fn build(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    let mut dims = extents(case)?;
    let mut along_lanes = true;
    let mut centre = case.op == "layer_norm";
    if case.op == "normalization" {
        dims = case.dims("x")?.unwrap_or(dims);
        along_lanes = case.flag("axis_is_minor")?;
        centre = case.flag("center")?;
        // The statistics are small beside the operand.
        let _ = case.flag("residuals")?;
    }
    let gather = if centre { Cost::alu(4.0) } else { Cost::alu(2.0) };
    let mut norm = match case.op {
        "softmax" => Norm {
            statistics: 2,
            gather: Cost::new(1.5, 0.5),
            apply: Cost::new(2.0, 1.0),
        },
        _ => Norm {
            // A variance about the mean needs the mean first; layer norms of frameworks take the second moment in the same pass.
            statistics: if centre && case.op == "normalization" {
                2
            } else {
                1
            },
            gather,
            apply: Cost::alu(if centre { 4.0 } else { 2.0 }),
        },
    };
    let row = dims.last().map_or(0, |&d| d as u64);
    if !case.tpu() && case.op != "normalization" && row <= GPU_ROW_IN_REGISTERS {
        // Library kernels of a GPU keep a short row in registers: one pass.
        norm.apply.alu += norm.statistics as f64 * norm.gather.alu;
        norm.apply.transcendental += norm.statistics as f64 * norm.gather.transcendental;
        norm.statistics = 0;
    }
    Ok(once(kernels(case, &dims, along_lanes, &norm)?))
}

/// XLA reads the operand once for every statistic and once more to apply them: fusions end at a reduction.
fn kernels(
    case: &Case<'_>,
    dims: &[usize],
    along_lanes: bool,
    norm: &Norm,
) -> Result<Vec<Kernel>, CaseError> {
    let dtype = case.formats.a;
    let bytes = stored(case, dims) * dtype.bytes() as f64;
    let extents: Vec<u64> = dims.iter().map(|&d| d as u64).collect();
    let columns = extents.last().copied().unwrap_or(1);
    let rows = (extents.iter().map(|&d| d as f64).product::<f64>() / columns as f64) as u64;
    let vector = |body: Body, name: &str, cost: Cost| {
        if along_lanes {
            body.row_reduction(name, &extents, cost, rows, 1)
        } else {
            body.vector(name, &extents, cost, 1)
        }
    };
    let mut kernels = Vec::new();
    for _ in 0..norm.statistics {
        let body = Body::streaming(case.op, "statistics").read("operand", bytes, dtype);
        kernels.push(
            vector(body, "statistics", norm.gather)
                .write("statistics", rows as f64 * 8.0, dtype)
                .finish()?,
        );
    }
    let body = Body::streaming(case.op, "normalisation")
        .read("operand", bytes, dtype)
        .write("result", bytes, dtype);
    kernels.push(vector(body, "apply", norm.apply).finish()?);
    Ok(kernels)
}
