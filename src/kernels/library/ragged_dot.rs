//! Grouped matrix products (mixture of experts): rows `[m, k]` sorted by group, a matrix `[k, n]` per group. How many rows each group has is
//! the case's `sizes`.

use super::body::{Body, Cost, Product, copy};
use super::case::{Case, CaseError, size};
use super::group_sizes::GroupSizes;
use super::matmul::{self, Shape, Traffic};
use super::{Family, Launch, once};
use crate::coefficients::Coefficient;
use crate::dtype::Dtype;
use crate::kernels::ResidentBlock;

pub(super) const FAMILY: Family = Family {
    ops: &[
        "ragged_dot",
        "ragged_dot_v2",
        "ragged_dot_xla",
        "ragged_dot_triton",
    ],
    build,
};

/// Operation that masks, adds and stores the sums of a step.
const ACCUMULATE: &str = "accumulate";

#[derive(Debug, Clone)]
struct Grouped {
    m: u64,
    k: u64,
    n: u64,
    groups: u64,
    sizes: GroupSizes,
}

/// Whole number next to an expected count.
fn count(mean: f64) -> u64 {
    mean.round() as u64
}

/// Rows, depth and columns of a tile.
#[derive(Debug, Clone, Copy)]
struct Tile {
    m: u64,
    k: u64,
    n: u64,
}

/// Where row tiles begin.
#[derive(Debug, Clone, Copy)]
enum RowTiles {
    /// Side by side over all rows; a tile is visited once by every group with rows in it.
    Shared,
    /// Anew in every group, the last one of a group cut to a multiple of `rows`. Tiles of columns are shared out over the cores of a device.
    PerGroup {
        /// Rows that a tile is a multiple of.
        rows: u64,
    },
    /// Anew in every group, the last one of a group cut to its rows.
    Cut,
}

fn build(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    let (m, groups) = (case.size("m")?, case.size("groups")?);
    let shape = Grouped {
        m,
        k: case.size("k")?,
        n: case.size("n")?,
        groups,
        sizes: GroupSizes::of(case, m, groups)?,
    };
    let Grouped { k, n, .. } = shape;
    size(&[m, k])?;
    size(&[m, n])?;
    size(&[groups, k, n])?;
    let residuals = case.flag("residuals")?;
    let mut launches = if case.tpu() {
        match case.op {
            "ragged_dot_xla" if case.chip.cores_per_device > 1 => dense(case, &shape)?,
            "ragged_dot_xla" => one_by_one(case, &shape)?,
            "ragged_dot_triton" => {
                return Err(CaseError::Unsupported(
                    "`ragged_dot_triton` runs on GPUs only".to_owned(),
                ));
            }
            "ragged_dot_v2" => {
                let (tile, rows) = fitting_tile(case, &shape);
                on_tpu(case, &shape, tile, RowTiles::PerGroup { rows })?
            }
            _ => on_tpu(case, &shape, tile(case, &shape)?, RowTiles::Shared)?,
        }
    } else {
        match case.op {
            "ragged_dot_xla" => dense(case, &shape)?,
            "ragged_dot_v2" => {
                return Err(CaseError::Unsupported(
                    "`ragged_dot_v2` runs on TPUs only".to_owned(),
                ));
            }
            _ => on_gpu(case, &shape)?,
        }
    };
    if residuals && case.tpu() {
        // The output is returned twice, so it is copied. Source: 3.9 to 4.0 bytes per output element on v5p, v6e and v7x.
        launches.push(
            copy(
                "output for the backward pass",
                (m * n * case.bytes()) as f64,
                case.formats.a,
            )?
            .into(),
        );
    }
    Ok(launches)
}

/// The tile of the case. Transposed calls name depth and columns the other way round; divisibility tells.
fn tile(case: &Case<'_>, shape: &Grouped) -> Result<Tile, CaseError> {
    let tile = Tile {
        m: case.size("tile_m")?,
        k: case.size("tile_k")?,
        n: case.size("tile_n")?,
    };
    let fits = |k: u64, n: u64| shape.k.is_multiple_of(k) && shape.n.is_multiple_of(n);
    Ok(if !fits(tile.k, tile.n) && fits(tile.n, tile.k) {
        Tile {
            k: tile.n,
            n: tile.k,
            ..tile
        }
    } else {
        tile
    })
}

/// Tile of XLA's own kernel: the whole depth, as many columns as leave two buffers of the weights in half of VMEM.
fn usual_tile(case: &Case<'_>, shape: &Grouped) -> Tile {
    let half = case.chip.on_chip.capacity.get() / 2.0;
    let columns = half / (2.0 * (shape.k * case.formats.b.bytes()) as f64);
    let lanes = u64::from(case.chip.vector_unit.lanes);
    let rows = shape.m.div_ceil(shape.groups).clamp(lanes, 512);
    Tile {
        m: rows.min(shape.m.next_multiple_of(8)),
        k: shape.k,
        n: ((columns as u64) / lanes * lanes).clamp(lanes, shape.n.max(lanes)),
    }
}

/// Part of VMEM that the second version of the kernel plans with.
const PLANNED_VMEM: f64 = 0.9;
/// Buffers of the weights in it, and of rows and of the output.
const WEIGHT_BUFFERS: u64 = 3;
const ROW_BUFFERS: u64 = 2;
/// Most multiples of the smallest row tile.
const MOST_ROW_TILES: u64 = 4;

/// Tile that the second version of the kernel chooses, and the rows that its row tiles are a multiple of: 128 rows, all columns and the whole depth, then fewer
/// columns, not below twice those of the matrix unit, then less depth until the buffers fit; rows grow with what is left.
///
/// Source: Tokamax 0.0.17, `gmm_v2`.
fn fitting_tile(case: &Case<'_>, shape: &Grouped) -> (Tile, u64) {
    let lanes = u64::from(case.chip.vector_unit.lanes);
    let (a, b) = (case.formats.a.bytes(), case.formats.b.bytes());
    let limit = case.chip.on_chip.capacity.get() * PLANNED_VMEM;
    let fits = |tile: Tile| {
        let rows = ROW_BUFFERS * tile.m * tile.k * a;
        let weights = WEIGHT_BUFFERS * tile.k * tile.n * b;
        let output = tile.m * tile.n * (4 + ROW_BUFFERS * a);
        (rows + weights + output) as f64 <= limit
    };
    // An extent in `parts` equal parts of whole registers.
    let part = |extent: u64, parts: u64| extent.div_ceil(parts).next_multiple_of(lanes);
    let rows = matmul::SLICE_ROWS.min(shape.m);
    let fewest_columns = (2 * u64::from(case.chip.matrix_unit.columns)).min(shape.n);
    let mut tile = Tile {
        m: rows,
        k: part(shape.k, 1),
        n: part(shape.n, 1),
    };
    for parts in 2..=shape.n.div_ceil(lanes) {
        if fits(tile) || part(shape.n, parts) < fewest_columns {
            break;
        }
        tile.n = part(shape.n, parts);
    }
    for parts in 2..=shape.k.div_ceil(lanes) {
        if fits(tile) {
            break;
        }
        tile.k = part(shape.k, parts);
    }
    for multiple in 2..=MOST_ROW_TILES {
        let taller = Tile {
            m: multiple * rows,
            ..tile
        };
        if taller.m > shape.m || !fits(taller) {
            break;
        }
        tile = taller;
    }
    (tile, rows)
}

/// Grouped product of a TPU (Pallas): columns outermost, then the visits of row tiles, then the depth. The weights of a group stay on chip while its rows
/// pass, where one step takes the whole depth.
///
/// Implementation: one core of a two-core chip, but for the second version, whose calls on v5p are as fast as two cores where there are several tiles of columns and as one
/// where there is one; operands with a depth or width that is no multiple of the lanes are padded by a copy.
fn on_tpu(
    case: &Case<'_>,
    shape: &Grouped,
    tile: Tile,
    row_tiles: RowTiles,
) -> Result<Vec<Launch>, CaseError> {
    let &Grouped {
        m,
        k,
        n,
        groups,
        ref sizes,
    } = shape;
    let lanes = u64::from(case.chip.vector_unit.lanes);
    let tile = Tile {
        m: tile.m.min(m.next_multiple_of(8)),
        k: tile.k.min(k.next_multiple_of(lanes)),
        n: tile.n.min(n.next_multiple_of(lanes)),
    };
    let (columns, depth) = (n.div_ceil(tile.n), k.div_ceil(tile.k));
    // Rows of a slice, slices of all visits, and visits.
    let (rows, row_slices, visits) = match row_tiles {
        RowTiles::Shared => {
            let visits = count(sizes.shared_tiles(tile.m));
            let slices = tile.m.div_ceil(matmul::SLICE_ROWS);
            (tile.m.div_ceil(slices), size(&[visits, slices])?, visits)
        }
        RowTiles::PerGroup { rows } => (rows, count(sizes.own_tiles(rows)), count(sizes.own_tiles(tile.m))),
        RowTiles::Cut => {
            let visits = count(sizes.own_tiles(tile.m));
            let slices = m.div_ceil(visits).div_ceil(matmul::SLICE_ROWS);
            let row_slices = size(&[visits, slices])?;
            (m.div_ceil(row_slices), row_slices, visits)
        }
    };
    let slices = row_slices.div_ceil(visits.max(1));
    let (a, b) = (case.formats.a, case.formats.b);
    let outputs = size(&[columns, row_slices])?;
    let steps = size(&[outputs, depth])?;
    let product = Product {
        m: rows,
        k: tile.k,
        n: tile.n,
        dtype: case.formats.product(),
        passes: case.passes(),
    };
    let fetches = size(&[columns, count(sizes.occupied())])?;
    let weights = if depth == 1 {
        fetches
    } else {
        size(&[columns, visits, depth])?
    };
    let block = tile.k * tile.n * b.bytes();
    let mut body = Body::new(case.op, "grouped product", outputs, depth)
        .units(slices)
        .live(rows * tile.n * 4)
        .product("product", product, steps)
        .vector(
            ACCUMULATE,
            &[rows, tile.n],
            Cost::alu(case.coefficient(Coefficient::GroupedStoreOps)),
            steps,
        )
        .read("rows", (m * k * a.bytes()) as f64 * columns as f64, a)
        .weights("weights", weights as f64 * block as f64, b)
        .write("output", (m * n * a.bytes()) as f64, a);
    body.implementation.cores_limit = Some(match row_tiles {
        RowTiles::PerGroup { .. } => columns,
        RowTiles::Shared | RowTiles::Cut => 1,
    });
    // The slices of a row tile are one step of the kernel.
    body.implementation.program_cycles = case.coefficient(Coefficient::GroupedVisit);
    if depth == 1 {
        body.implementation.resident_block = Some(ResidentBlock {
            bytes: block,
            fetches,
        });
    }
    let mut kernels = Vec::new();
    let padded = [k, n].map(|extent| extent.next_multiple_of(lanes));
    if padded != [k, n] {
        for (title, bytes, dtype) in [
            ("rows padded", m * padded[0] * a.bytes(), a),
            ("weights padded", groups * padded[0] * padded[1] * b.bytes(), b),
        ] {
            kernels.push(copy(title, bytes as f64, dtype)?);
        }
    }
    kernels.push(body.finish()?);
    if padded[1] != n {
        kernels.push(copy("output cut", (m * padded[1] * a.bytes()) as f64, a)?);
    }
    Ok(once(kernels))
}

/// Elements that a cycle of a multiprocessor issues instructions for: four warps of 32 threads.
const ELEMENTS_ISSUED: f64 = 128.0;
/// Waits of a program of a GPU for device memory: its place among the groups, then its first panels. Source: calls of H100 with a depth of 256 and 512.
const GPU_EXPOSED_LOADS: f64 = 2.0;

/// Grouped product of a GPU. The Triton kernel launches a program for every group, row block and column block, most of which find no row of their group.
fn on_gpu(case: &Case<'_>, shape: &Grouped) -> Result<Vec<Launch>, CaseError> {
    let &Grouped {
        m,
        k,
        n,
        groups,
        ref sizes,
    } = shape;
    let tile = Tile {
        m: case.size("block_m")?,
        k: case.size("block_k")?,
        n: case.size("block_n")?,
    };
    let (a, b) = (case.formats.a, case.formats.b);
    let columns = n.div_ceil(tile.n);
    let visits = count(sizes.shared_tiles(tile.m));
    let programs = size(&[visits, columns])?;
    let product = Product {
        m: tile.m,
        k,
        n: tile.n,
        dtype: case.formats.product(),
        passes: case.passes(),
    };
    let used_groups = count(sizes.occupied());
    let moved = (m * k * a.bytes()) as f64 + (used_groups * k * n * b.bytes()) as f64;
    // Every program fetches its panels of rows and weights; the cache serves what another has fetched.
    let panels = size(&[programs, k, tile.m * a.bytes() + tile.n * b.bytes()])? as f64;
    let mut body = Body::new(case.op, "grouped product", programs, 1)
        .product("product", product, programs)
        .read("rows", (m * k * a.bytes()) as f64, a)
        .weights("weights", (used_groups * k * n * b.bytes()) as f64, b)
        .write("output", (m * n * a.bytes()) as f64, a)
        .cached(panels - moved);
    body.implementation.exposed_loads = GPU_EXPOSED_LOADS;
    let mut kernels = vec![body.finish()?];
    if case.op == "ragged_dot_triton" {
        let all = size(&[groups, m.div_ceil(tile.m), columns])?;
        let mut empty = Body::new(
            "empty programs",
            "programs without a row of their group",
            all - programs.min(all),
            1,
        );
        empty.implementation.program_cycles =
            case.coefficient(Coefficient::EmptyProgram) * (tile.m * tile.n) as f64 / ELEMENTS_ISSUED;
        let mut empty = empty.finish()?;
        // They are part of the same launch; what stands here is their time on the multiprocessors.
        empty.title.push_str(", same launch");
        kernels.push(empty);
    }
    Ok(once(kernels))
}

/// XLA's own kernel on a TPU of one core per device: fetch, product and store of a tile follow each other. Where the chip has a second core it returns f32, which a kernel of its
/// own rounds.
///
/// Source: measured calls of v5e, v6e and v7x are the sum of the product at its peak, rows and weights read once and 2 bytes per output element, on v7x 10.
fn one_by_one(case: &Case<'_>, shape: &Grouped) -> Result<Vec<Launch>, CaseError> {
    let mut launches = on_tpu(case, shape, usual_tile(case, shape), RowTiles::Cut)?;
    let wide = case.chip.cores_per_chip > 1;
    let output = size(&[shape.m, shape.n])? as f64;
    let a = case.formats.a;
    for launch in launches
        .iter_mut()
        .filter(|launch| launch.kernel.label == case.op)
    {
        launch.kernel.implementation.serial_transfers = true;
        launch.kernel.implementation.resident_block = None;
        // A tile has the whole depth, so its product is the result.
        launch.kernel.ops.retain(|op| op.name != ACCUMULATE);
        for write in launch.kernel.writes.iter_mut().filter(|_| wide) {
            write.dtype = Dtype::F32;
            write.bytes = (output * 4.0) as u64;
        }
    }
    if wide {
        let rounding = Body::streaming("round", "output in the format of the operands")
            .read("output", output * 4.0, Dtype::F32)
            .write("output", output * a.bytes() as f64, a);
        launches.push(rounding.finish()?.into());
    }
    Ok(launches)
}

/// The form XLA falls back to on GPUs and on two-core TPUs: for every group a dense product over all rows, those of other groups masked.
///
/// On the TPU the mask is a pass of its own: operand read, masked operand written in f32, brought into the layout of the product, read by it; the output is
/// accumulated in device memory. Source: a linear fit of v5p calls gives 17.8 bytes per element of the rows and 4.4 per element of the output and group.
fn dense(case: &Case<'_>, shape: &Grouped) -> Result<Vec<Launch>, CaseError> {
    let &Grouped { m, k, n, groups, .. } = shape;
    let a = case.formats.a;
    let rows = (m * k) as f64;
    let tpu = case.tpu();
    let operand = if tpu { 4.0 } else { a.bytes() as f64 };
    let output = (m * n * a.bytes()) as f64;
    let dense = Shape { batch: 1, m, k, n };
    let traffic = Traffic {
        dtype: case.formats.product(),
        passes: case.passes(),
        a: rows * operand,
        b: (k * n * case.formats.b.bytes()) as f64,
        c: output,
    };
    let product = matmul::kernel(
        case,
        "product",
        "all rows with the weights of a group",
        dense,
        traffic,
    )?
    .read("output so far", output, a);
    let mut launches = Vec::new();
    if tpu {
        let mask = Body::streaming("mask", "rows of the group")
            .vector("select", &[m, k], Cost::alu(3.0), 1)
            .read("rows", rows * a.bytes() as f64, a)
            .write("masked rows", rows * 4.0, Dtype::F32);
        launches.push(mask.finish()?);
        launches.push(copy(
            "masked rows in the layout of the product",
            rows * 4.0,
            Dtype::F32,
        )?);
    }
    launches.push(product.finish()?);
    Ok(launches
        .into_iter()
        .map(|kernel| Launch {
            kernel,
            times: groups,
        })
        .collect())
}
