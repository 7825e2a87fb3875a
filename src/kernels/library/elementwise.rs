//! Elementwise functions, and operations that mostly move or reduce.

use super::body::{Body, Cost};
use super::case::{Case, CaseError, size};
use super::{Family, Launch, once};
use crate::dtype::Dtype;
use crate::kernels::tiled_elements;

pub(super) const FAMILY: Family = Family {
    ops: &[
        "add",
        "mul",
        "mul_add",
        "relu",
        "leaky",
        "linear",
        "binary",
        "parametric",
        "elu",
        "selu",
        "sigmoid",
        "tanh",
        "exp",
        "log",
        "rsqrt",
        "reciprocal",
        "silu",
        "softplus",
        "gelu",
        "exp8",
        "exp32",
        "fma32",
        "fma256",
        "copy",
    ],
    build,
};

pub(super) const MOVEMENT: Family = Family {
    ops: &[
        "read_sum",
        "row_sum",
        "col_sum",
        "cumsum_rows",
        "transpose",
        "conv4_silu",
        "tri_solve",
    ],
    build: movement,
};

/// Tensors read, and operations per element. Expansions as in [`crate::graph::Function`].
fn function(op: &str) -> (u64, Cost) {
    match op {
        "add" | "mul" => (2, Cost::alu(1.0)),
        "relu" => (1, Cost::alu(1.0)),
        // A compare with its select, and a multiply where there is a slope.
        "binary" | "linear" | "mul_add" => (1, Cost::alu(2.0)),
        "leaky" | "parametric" => (1, Cost::alu(3.0)),
        "elu" => (1, Cost::new(3.0, 1.0)),
        "selu" => (1, Cost::new(5.0, 1.0)),
        "sigmoid" => (1, Cost::new(2.0, 2.0)),
        "silu" => (1, Cost::new(3.0, 2.0)),
        "softplus" => (1, Cost::new(4.0, 2.0)),
        // tanh form: the cube, two multiply-adds, and the product with half of the argument.
        "gelu" => (1, Cost::new(8.0, 1.0)),
        "tanh" | "exp" | "log" | "rsqrt" | "reciprocal" => (1, Cost::new(0.0, 1.0)),
        // Chains of exponentials and of multiply-adds.
        "exp8" => (1, Cost::new(0.0, 8.0)),
        "exp32" => (1, Cost::new(0.0, 32.0)),
        "fma32" => (1, Cost::alu(64.0)),
        "fma256" => (1, Cost::alu(512.0)),
        _ => (1, Cost::default()),
    }
}

/// Elements of a tensor in device memory, padding of its tiles included.
pub(super) fn stored(case: &Case<'_>, dims: &[usize]) -> f64 {
    if case.tpu() {
        tiled_elements(case.chip, dims)
    } else {
        dims.iter().map(|&d| d as f64).product()
    }
}

/// Extents of the tensor: `shape=AxB`, `n=N` or `rows=A;cols=B`.
pub(super) fn extents(case: &Case<'_>) -> Result<Vec<usize>, CaseError> {
    if let Some(dims) = case.dims("shape")? {
        return Ok(dims);
    }
    if let Some(n) = case.optional("n")? {
        return Ok(vec![n as usize]);
    }
    let (rows, columns) = (case.size("rows")?, case.any(&["cols", "d"])?);
    size(&[rows, columns])?;
    Ok(vec![rows as usize, columns as usize])
}

/// A dense vector keeps its elements side by side in registers.
pub(super) fn register_dims(case: &Case<'_>, dims: &[usize]) -> Vec<u64> {
    let lanes = case.chip.vector_unit.lanes as usize;
    match dims {
        [length] => vec![length.div_ceil(lanes) as u64, lanes.min(*length) as u64],
        _ => dims.iter().map(|&d| d as u64).collect(),
    }
}

fn build(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    let dims = extents(case)?;
    let (inputs, mut cost) = function(case.op);
    if !case.tpu() && case.op.starts_with("fma") {
        // Fused multiply-adds are one operation there.
        cost.alu /= 2.0;
    }
    let dtype = case.formats.a;
    let bytes = stored(case, &dims) * dtype.bytes() as f64;
    let mut body = Body::streaming(case.op, "elementwise");
    if cost.alu + cost.transcendental > 0.0 {
        body = body.vector(case.op, &register_dims(case, &dims), cost, 1);
    }
    for _ in 0..inputs {
        body = body.read("operand", bytes, dtype);
    }
    Ok(once([body.write("result", bytes, dtype).finish()?]))
}

fn movement(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    let dtype = case.formats.a;
    let element = dtype.bytes() as f64;
    let kernel = match case.op {
        "read_sum" => {
            let bytes = case.size("bytes")?;
            let dims = register_dims(case, &[(bytes / dtype.bytes()).max(1) as usize]);
            Body::streaming(case.op, "sum of everything")
                .vector("sum", &dims, Cost::alu(1.0), 1)
                .read("operand", bytes as f64, dtype)
        }
        "conv4_silu" => {
            let (tokens, channels) = (case.size("T")?, case.size("E")?);
            let bytes = stored(case, &[tokens as usize, channels as usize]) * element;
            Body::streaming(case.op, "causal convolution of 4 taps and SiLU")
                .lane_movement("shift rows", tokens, channels, 3.0, 1)
                .vector("taps", &[tokens, channels], Cost::alu(7.0), 1)
                .vector("silu", &[tokens, channels], Cost::new(3.0, 2.0), 1)
                .read("operand", bytes, dtype)
                .write("result", bytes, dtype)
        }
        "tri_solve" => {
            let (batch, side) = (case.size("batch")?, case.any(&["C", "n"])?);
            let bytes = batch as f64 * stored(case, &[side as usize, side as usize]) * element;
            Body::new(case.op, "triangular solve", batch, 1)
                .units_that_fit()
                .substitution("rows", side, side, batch)
                .read("operand", 2.0 * bytes, dtype)
                .write("result", bytes, dtype)
        }
        "cumsum_rows" => return cumulative_sum(case, dtype),
        _ => matrix_movement(case, dtype)?,
    };
    Ok(once([kernel.finish()?]))
}

/// Rows of a block that XLA sums up in one pass of a cumulative sum.
const CUMULATIVE_BLOCK: f64 = 128.0;

/// Cumulative sum over the rows. XLA sums inside blocks, then over the last rows of the blocks, then adds: three round trips of the matrix, as the bytes its compiler
/// counts say. A GPU library takes one.
fn cumulative_sum(case: &Case<'_>, dtype: Dtype) -> Result<Vec<Launch>, CaseError> {
    let dims = extents(case)?;
    let bytes = stored(case, &dims) * dtype.bytes() as f64;
    let extents: Vec<u64> = dims.iter().map(|&d| d as u64).collect();
    let rows = dims.first().copied().unwrap_or(1) as f64;
    // Doubling shifts along the rows.
    let inside = rows.min(CUMULATIVE_BLOCK).log2().ceil().max(1.0);
    let pass = |title: &str, ops: f64| {
        Body::streaming(case.op, title)
            .vector("sums", &extents, Cost::alu(ops), 1)
            .read("operand", bytes, dtype)
            .write("result", bytes, dtype)
            .finish()
    };
    if !case.tpu() {
        return Ok(once([pass("cumulative sum", inside)?]));
    }
    Ok(once([
        pass("layout of the blocks", 0.0)?,
        pass("sums inside blocks", inside)?,
        pass("sums of the blocks before", 1.0)?,
    ]))
}

/// Bytes that the cache of a GPU moves at least. Source: NVIDIA CUDA C++ Best Practices Guide, coalesced access.
const SECTOR_BYTES: f64 = 32.0;

/// Sums and transposes of one matrix.
fn matrix_movement(case: &Case<'_>, dtype: Dtype) -> Result<Body, CaseError> {
    let dims = extents(case)?;
    let [rows, columns] = dims[..] else {
        return Err(CaseError::Unsupported(format!(
            "`{}` takes a matrix: `rows` and `cols`",
            case.op
        )));
    };
    let bytes = stored(case, &dims) * dtype.bytes() as f64;
    let (rows, columns) = (rows as u64, columns as u64);
    let extents = [rows, columns];
    let read = Body::streaming(case.op, "matrix").read("operand", bytes, dtype);
    Ok(match case.op {
        "row_sum" => read
            .row_reduction("sum", &extents, Cost::alu(1.0), rows, 1)
            .write("sums", (rows * dtype.bytes()) as f64, dtype),
        "col_sum" => read.vector("sum", &extents, Cost::alu(1.0), 1).write(
            "sums",
            (columns * dtype.bytes()) as f64,
            dtype,
        ),
        _ => {
            // The copy of a GPU library has no tiles: of every sector that it reads it takes one element.
            let sectors = if case.tpu() {
                0.0
            } else {
                (rows * columns) as f64 * SECTOR_BYTES
            };
            read.lane_movement("transpose", rows, columns, 1.0, 1)
                .write("result", bytes, dtype)
                .cached(sectors)
        }
    })
}
