//! Matrix products, batched or not.

use super::body::{Body, Product};
use super::case::{Case, CaseError, size};
use super::{Family, Launch, once};
use crate::dtype::Dtype;

pub(super) const FAMILY: Family = Family {
    ops: &["matmul", "bmm"],
    build,
};

/// Rows of a program that stream through the arrays together: short enough that the accumulation of one slice runs beside the product of the next.
pub(super) const SLICE_ROWS: u64 = 128;
/// Largest side of an output tile and depth of a step of XLA's products on a TPU. With operands of 16 bits two buffers of such blocks and the f32 output take
/// 12 MiB, below the 16 MiB that XLA gives an operation by default.
const TPU_TILE: u64 = 1024;
/// Output tiles of matrix kernels on a GPU, rows by columns; the one that leaves the fewest multiprocessors idle is taken, as libraries do.
const GPU_TILES: [[u64; 2]; 4] = [[128, 256], [128, 128], [64, 128], [64, 64]];

/// Depth that a program of a GPU fetches at a time, several of which are in flight.
const GPU_DEPTH: u64 = 256;

/// A product of `batch` pairs of matrices.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) batch: u64,
    pub(super) m: u64,
    pub(super) k: u64,
    pub(super) n: u64,
}

/// Formats and traffic of a product.
#[derive(Debug, Clone, Copy)]
pub(super) struct Traffic {
    /// Format the operands are multiplied in.
    pub(super) dtype: Dtype,
    /// Passes of an f32 product.
    pub(super) passes: u32,
    /// Bytes of the first operand where it is read once.
    pub(super) a: f64,
    /// Likewise of the second.
    pub(super) b: f64,
    /// Bytes of the result.
    pub(super) c: f64,
}

/// The product as a kernel, before `finish`; what a fusion adds can be appended.
pub(super) fn kernel(case: &Case<'_>, label: &str, title: &str, shape: Shape, traffic: Traffic) -> Result<Body, CaseError> {
    let Shape { batch, m, k, n } = shape;
    size(&[batch, m, n])?;
    let Traffic { dtype, passes, a, b, c } = traffic;
    if !case.tpu() {
        let cores = u64::from(case.chip.cores_per_device);
        let waves = |[rows, columns]: [u64; 2]| {
            let tiles = batch * m.div_ceil(rows) * n.div_ceil(columns);
            tiles.div_ceil(cores) as f64 * (rows * columns) as f64
        };
        let tile = GPU_TILES
            .into_iter()
            .min_by(|x, y| waves(*x).total_cmp(&waves(*y)))
            .unwrap_or(GPU_TILES[0]);
        let tiles = batch * m.div_ceil(tile[0]) * n.div_ceil(tile[1]);
        let product = Product {
            m: tile[0].min(m),
            k,
            n: tile[1].min(n),
            dtype,
            passes,
        };
        let steps = k.div_ceil(GPU_DEPTH);
        let product = Product {
            k: k.div_ceil(steps),
            ..product
        };
        return Ok(Body::new(label, title, tiles, steps)
            .product("product", product, tiles * steps)
            // The level-2 cache serves the tiles that share a panel.
            .read("a", a, dtype)
            .read("b", b, dtype)
            .write("c", c, dtype));
    }
    let tiles = [m, k, n].map(|extent| extent.div_ceil(TPU_TILE));
    let [bm, bk, bn] = [m.div_ceil(tiles[0]), k.div_ceil(tiles[1]), n.div_ceil(tiles[2])];
    let slices = bm.div_ceil(SLICE_ROWS);
    let rows = bm.div_ceil(slices);
    let outputs = batch * tiles[0] * tiles[2] * slices;
    let steps = outputs * tiles[1];
    let product = Product {
        m: rows,
        k: bk,
        n: bn,
        dtype,
        passes,
    };
    // Small products of a batch share a program.
    let whole = tiles == [1, 1, 1] && batch > 1;
    // The panel of `a` stays while the columns advance, unless the depth is cut as well.
    let a_reads = if tiles[1] == 1 { 1 } else { tiles[2] };
    let body = Body::new(label, title, outputs, tiles[1]);
    let body = if whole { body.units_that_fit() } else { body.units(slices) };
    Ok(body
        .live(rows * bn * 4)
        .product("product", product, steps)
        .read("a", a * a_reads as f64, dtype)
        .read("b", b * tiles[0] as f64, dtype)
        .write("c", c, dtype))
}

fn build(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    let shape = Shape {
        batch: if case.op == "bmm" { case.any(&["batch", "b"])? } else { 1 },
        m: case.size("m")?,
        k: case.size("k")?,
        n: case.size("n")?,
    };
    let Shape { batch, m, k, n } = shape;
    // Integer products return their 32-bit sums, others the format of the operands.
    let result = match case.formats.product() {
        Dtype::Int8 => Dtype::F32,
        dtype => dtype,
    };
    let traffic = Traffic {
        dtype: case.formats.product(),
        passes: case.passes(),
        a: (size(&[batch, m, k])? * case.formats.a.bytes()) as f64,
        b: (size(&[batch, k, n])? * case.formats.b.bytes()) as f64,
        c: (size(&[batch, m, n])? * result.bytes()) as f64,
    };
    Ok(once([kernel(case, case.op, "matrix product", shape, traffic)?.finish()?]))
}
