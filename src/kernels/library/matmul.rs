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
/// Sides and depths of a tile that XLA's products on a TPU are offered.
const TPU_TILES: [u64; 6] = [128, 256, 512, 1024, 2048, 4096];
/// Time a step costs beyond its work, as far as the choice of the tile is concerned, in seconds.
const STEP_SECONDS: f64 = 0.35e-6;

/// Output tiles of matrix kernels on a GPU, rows by columns; the one that leaves the fewest multiprocessors idle is taken, as libraries do.
const GPU_TILES: [[u64; 2]; 4] = [[128, 256], [128, 128], [64, 128], [64, 64]];

/// Bytes per cycle between the last-level cache of a GPU and a multiprocessor.
const GPU_PORT_BYTES: f64 = 64.0;

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
pub(super) fn kernel(
    case: &Case<'_>,
    label: &str,
    title: &str,
    shape: Shape,
    traffic: Traffic,
) -> Result<Body, CaseError> {
    let Shape { batch, m, k, n } = shape;
    size(&[batch, m, n])?;
    let Traffic {
        dtype,
        passes,
        a,
        b,
        c,
    } = traffic;
    if !case.tpu() {
        let cores = u64::from(case.chip.cores_per_device);
        // Per unit of depth: products at the peak, panels through the port of the multiprocessor.
        let flops = case
            .chip
            .matrix_flops_per_second(dtype)
            .map_or(f64::INFINITY, |peak| {
                peak.get() / cores as f64 / case.chip.clock().get()
            });
        let waves = |[rows, columns]: [u64; 2]| {
            let tiles = batch * m.div_ceil(rows) * n.div_ceil(columns);
            let products = 2.0 * (rows * columns) as f64 * f64::from(passes) / flops;
            let panels = ((rows + columns) * dtype.bytes()) as f64 / GPU_PORT_BYTES;
            tiles.div_ceil(cores) as f64 * products.max(panels)
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
    let tiles = tpu_tiles(case, shape, traffic);
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
    let body = if whole {
        body.units_that_fit()
    } else {
        body.units(slices)
    };
    let mut body = body.live(rows * bn * 4).product("product", product, steps);
    // On TPU v4 XLA takes every operand through the memory shared by the cores: in whole, once, in and out of it, before and after the work. Source: 1101 measured products are the sum
    // of their bytes at 380 GB/s and their FLOPs at 211 TFLOP/s, where elementwise kernels stream at 680 GB/s.
    let staged = case.chip.cache.is_some();
    body.implementation.serial_transfers = staged;
    let [a, b, c] = if staged {
        [2.0 * a, 2.0 * b, 2.0 * c]
    } else {
        [a * a_reads as f64, b * tiles[0] as f64, c]
    };
    Ok(body.read("a", a, dtype).read("b", b, dtype).write("c", c, dtype))
}

/// Tiles along rows, depth and columns: those with the least time by a roofline of the device whose two buffers of operands and f32 output fit into what XLA gives an
/// operation, as its search over tiles would find.
fn tpu_tiles(case: &Case<'_>, shape: Shape, traffic: Traffic) -> [u64; 3] {
    let Shape { batch, m, k, n } = shape;
    let chip = case.chip;
    let scoped = chip.on_chip.scoped().get();
    let cores = u64::from(chip.cores_per_device);
    let flops = 2.0 * batch as f64 * m as f64 * k as f64 * n as f64 * f64::from(traffic.passes);
    let peak = chip
        .matrix_flops_per_second(traffic.dtype)
        .map_or(f64::INFINITY, crate::units::FlopsPerSecond::get);
    let bandwidth = chip.achievable_hbm_bandwidth_per_device().get();
    let per = |bytes: f64, elements: u64| bytes / (batch * elements) as f64;
    let (a, b) = (per(traffic.a, m * k), per(traffic.b, k * n));
    let mut best = (
        f64::INFINITY,
        [m, k, n].map(|extent| extent.div_ceil(TPU_TILES[0])),
    );
    for bm in TPU_TILES {
        for bn in TPU_TILES {
            for bk in TPU_TILES.into_iter().chain([k]) {
                let tiles = [m.div_ceil(bm), k.div_ceil(bk), n.div_ceil(bn)];
                let [rows, depth, columns] =
                    [m.div_ceil(tiles[0]), k.div_ceil(tiles[1]), n.div_ceil(tiles[2])];
                let blocks = (rows * depth) as f64 * a + (depth * columns) as f64 * b;
                if 2.0 * blocks + (rows * columns * 4) as f64 > scoped {
                    continue;
                }
                let outputs = batch * tiles[0] * tiles[2];
                let busy = outputs as f64 / (outputs.div_ceil(cores) * cores) as f64;
                let a_reads = if tiles[1] == 1 { 1 } else { tiles[2] };
                let bytes = traffic.a * a_reads as f64 + traffic.b * tiles[0] as f64 + traffic.c;
                let steps = outputs * tiles[1];
                // A core that idles leaves its share of the bandwidth unused.
                let time = (flops / peak).max(bytes / bandwidth) / busy
                    + blocks / bandwidth
                    + steps.div_ceil(cores) as f64 * STEP_SECONDS;
                if time < best.0 {
                    best = (time, tiles);
                }
            }
        }
    }
    best.1
}

/// bf16 passes that take as long as an f32 product on the vector unit, a multiply-add counting as one operation of a slot.
fn vector_passes(case: &Case<'_>) -> u32 {
    let chip = case.chip;
    let matrix = chip
        .matrix_flops_per_second(Dtype::Bf16)
        .map_or(0.0, crate::units::FlopsPerSecond::get);
    let vector = chip.vector_flops_per_second().get();
    if vector > 0.0 {
        (matrix / vector).round().max(1.0) as u32
    } else {
        1
    }
}

fn build(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    let shape = Shape {
        batch: if case.op == "bmm" {
            case.any(&["batch", "b"])?
        } else {
            1
        },
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
    // In full precision the libraries of a GPU multiply on the vector unit; these passes take as long.
    let full = !case.tpu() && !case.formats.tf32 && case.formats.product() == Dtype::F32;
    let traffic = Traffic {
        dtype: case.formats.product(),
        passes: if full { vector_passes(case) } else { case.passes() },
        a: (size(&[batch, m, k])? * case.formats.a.bytes()) as f64,
        b: (size(&[batch, k, n])? * case.formats.b.bytes()) as f64,
        c: (size(&[batch, m, n])? * result.bytes()) as f64,
    };
    Ok(once([
        kernel(case, case.op, "matrix product", shape, traffic)?.finish()?
    ]))
}
