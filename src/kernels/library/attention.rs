//! Softmax attention: flash kernels of TPUs and GPUs, and forms that write the logits out.

use super::body::{Body, Cost, Product, copy};
use super::case::{Case, CaseError, size};
use super::gated_linear_unit::{cached, room, spilled_share};
use super::matmul::{SLICE_ROWS, Shape, Traffic, kernel};
use super::{Family, Launch, once};
use crate::coefficients::Coefficient;
use crate::dtype::Dtype;
use crate::kernels::Kernel;

pub(super) const FAMILY: Family = Family {
    ops: &[
        "flash_attention",
        "splash_attention",
        "flash_attention_triton",
        "attention_cudnn",
        "sdpa_causal",
        "sdpa_causal_bwd",
        "attention_xla",
        "chunked_attention",
    ],
    build,
};

/// Most query blocks whose key blocks are counted one by one.
const MOST_BLOCKS: u64 = 1 << 22;

/// Sizes of an attention call.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "the parameters of a measured call")]
struct Attention {
    batch: u64,
    queries: u64,
    keys: u64,
    heads: u64,
    key_heads: u64,
    key_dim: u64,
    value_dim: u64,
    causal: bool,
    window: Option<u64>,
    bias: bool,
    mask: bool,
    residuals: bool,
}

impl Attention {
    fn of(case: &Case<'_>) -> Result<Self, CaseError> {
        if case.op.starts_with("sdpa") {
            let tokens = case.size("T")?;
            let heads = case.size("H")?;
            let width = case.size("D")?;
            return Ok(Attention {
                batch: case.size("B")?,
                queries: tokens,
                keys: tokens,
                heads,
                key_heads: case.optional("HK")?.unwrap_or(heads),
                key_dim: width,
                value_dim: width,
                causal: true,
                window: None,
                bias: false,
                mask: false,
                residuals: false,
            });
        }
        let heads = case.size("Hq")?;
        let key_dim = case.size("D")?;
        Ok(Attention {
            batch: case.size("B")?,
            queries: case.size("Tq")?,
            keys: case.size("Tk")?,
            heads,
            key_heads: case.optional("Hkv")?.unwrap_or(heads),
            key_dim,
            value_dim: case.optional("Dv")?.unwrap_or(key_dim),
            causal: case.flag("causal")?,
            window: case.optional("window")?,
            bias: case.flag("bias")?,
            mask: case.flag("boolmask")?,
            residuals: case.flag("residuals")?,
        })
    }

    /// Scores of all heads, nothing skipped.
    fn scores(&self) -> Result<f64, CaseError> {
        Ok(size(&[self.batch, self.heads, self.queries, self.keys])? as f64)
    }

    /// Channels of a row in device memory: whole lanes on a TPU, unless the tokens lie along the lanes, which the compiler prefers for narrow heads.
    fn stored_channels(case: &Case<'_>, tokens: u64, channels: u64) -> u64 {
        let lanes = u64::from(case.chip.vector_unit.lanes);
        if case.tpu() && !(channels < lanes && tokens.is_multiple_of(lanes)) {
            channels.next_multiple_of(u64::from(case.chip.vector_unit.lanes))
        } else {
            channels
        }
    }

    /// Bytes of queries, keys, values and output in device memory.
    fn tensors(&self, case: &Case<'_>) -> Result<[f64; 4], CaseError> {
        let bytes = |tokens: u64, heads: u64, channels: u64| {
            size(&[
                self.batch,
                tokens,
                heads,
                Self::stored_channels(case, tokens, channels),
                case.bytes(),
            ])
            .map(|b| b as f64)
        };
        Ok([
            bytes(self.queries, self.heads, self.key_dim)?,
            bytes(self.keys, self.key_heads, self.key_dim)?,
            bytes(self.keys, self.key_heads, self.value_dim)?,
            bytes(self.queries, self.heads, self.value_dim)?,
        ])
    }
}

/// Pairs of a query block and a key block that a flash kernel visits in one head.
#[derive(Debug, Clone, Copy)]
struct Pairs {
    query_blocks: u64,
    key_blocks: u64,
    /// Pairs with at least one score that is kept.
    visited: u64,
    /// Visited pairs that also hold scores that are not.
    cut: u64,
}

fn pairs(attention: &Attention, rows: u64, columns: u64) -> Result<Pairs, CaseError> {
    let Attention {
        queries,
        keys,
        causal,
        window,
        ..
    } = *attention;
    let (query_blocks, key_blocks) = (queries.div_ceil(rows), keys.div_ceil(columns));
    if !causal && window.is_none() {
        return Ok(Pairs {
            query_blocks,
            key_blocks,
            visited: size(&[query_blocks, key_blocks])?,
            cut: 0,
        });
    }
    if query_blocks > MOST_BLOCKS {
        return Err(CaseError::TooLarge(format!("{query_blocks} query blocks")));
    }
    // The last query stands at the last key.
    let offset = keys.saturating_sub(queries);
    let (mut visited, mut cut) = (0, 0);
    for block in 0..query_blocks {
        let first = block * rows + offset;
        let last = ((block + 1) * rows).min(queries) - 1 + offset;
        let end = if causal {
            (last / columns + 1).min(key_blocks)
        } else {
            key_blocks
        };
        let whole_end = if causal {
            ((first + 1) / columns).min(end)
        } else {
            end
        };
        let (start, whole_start) = match window {
            Some(window) => (
                (first + 1).saturating_sub(window) / columns,
                (last + 1).saturating_sub(window).div_ceil(columns),
            ),
            None => (0, 0),
        };
        let here = end.saturating_sub(start);
        visited += here;
        cut += here - whole_end.saturating_sub(whole_start).min(here);
    }
    Ok(Pairs {
        query_blocks,
        key_blocks,
        visited,
        cut,
    })
}

fn build(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    let attention = Attention::of(case)?;
    match case.op {
        "attention_xla" => materialised(case, &attention),
        "chunked_attention" if case.tpu() => chunked_on_tpu(case, &attention),
        "chunked_attention" => chunked(case, &attention),
        "flash_attention" | "splash_attention" if case.tpu() => on_tpu(case, &attention),
        _ => on_gpu(case, &attention),
    }
}

/// Flash kernel of a TPU (Pallas). Keys and values of a head stay on chip where one block holds them all, else every query block fetches them again.
fn on_tpu(case: &Case<'_>, a: &Attention) -> Result<Vec<Launch>, CaseError> {
    let rows = case.size("block_q")?.min(a.queries);
    let columns = case.size("block_kv")?.min(a.keys);
    let inner = case.optional("block_kv_compute")?.unwrap_or(columns).min(columns);
    let pairs = pairs(a, rows, columns)?;
    let inner_blocks = columns.div_ceil(inner);
    let heads = size(&[a.batch, a.heads])?;
    let slices = rows.div_ceil(SLICE_ROWS);
    let slice = rows.div_ceil(slices);
    let steps = size(&[heads, pairs.visited, inner_blocks])?;
    let instances = size(&[steps, slices])?;
    let cut_share = pairs.cut as f64 / pairs.visited.max(1) as f64;
    let dtype = case.formats.a;
    let [q, k, v, o] = a.tensors(case)?;
    let reads_of_keys = if pairs.key_blocks == 1 {
        1.0
    } else {
        (a.heads / a.key_heads.max(1)) as f64 * pairs.visited as f64 / pairs.key_blocks as f64
    };
    let masks = cut_share + f64::from(u8::from(a.mask));
    let product = |k: u64, n: u64| Product {
        m: slice,
        k,
        n,
        dtype,
        passes: case.passes(),
    };
    let mask_ops = case.coefficient(Coefficient::FlashMaskOps);
    let softmax_ops = case.coefficient(Coefficient::FlashSoftmaxOps);
    let lane_rows = f64::from(case.chip.vector_unit.lanes);
    let mut body = Body::new(
        case.op,
        "flash attention",
        size(&[heads, pairs.query_blocks, slices])?,
        (pairs.visited * inner_blocks).div_ceil(pairs.query_blocks.max(1)),
    )
    .units(slices)
    // The loop over the parts of a key block is unrolled.
    .unrolled(inner_blocks)
    .live(slice * inner * 8)
    .product("q k^T", product(a.key_dim, inner), instances)
    .vector(
        "scores",
        &[slice, inner],
        Cost::alu(masks * mask_ops + f64::from(u8::from(a.bias))),
        instances,
    )
    .row_reduction("maximum", &[slice, inner], Cost::alu(1.0), slice, instances)
    .row_reduction(
        "exponentials",
        &[slice, inner],
        Cost::new((softmax_ops - 1.0).max(0.0), 1.0),
        slice,
        instances,
    )
    .product("p v", product(inner, a.value_dim), instances)
    .vector(
        "accumulate",
        &[slice, a.value_dim],
        Cost::alu(case.coefficient(Coefficient::FlashRescaleOps)),
        instances,
    )
    .carried()
    .read("queries", q, dtype)
    .read("keys", k * reads_of_keys, dtype)
    .read("values", v * reads_of_keys, dtype)
    .write("output", o, dtype);
    let bias = if a.bias { a.scores()? * 2.0 } else { 0.0 } + if a.mask { a.scores()? } else { 0.0 };
    if bias > 0.0 {
        body = body.read("bias and mask", bias, dtype);
    }
    // Maximum and sum of every row, spread over the lanes, in f32.
    let statistics = if a.residuals {
        2.0 * size(&[heads, a.queries])? as f64 * lane_rows * 4.0
    } else {
        0.0
    };
    if statistics > 0.0 {
        body = body.write("row statistics", statistics, Dtype::F32);
    }
    let mut kernels: Vec<Kernel> = Vec::new();
    let wrapped = case.op == "flash_attention";
    if wrapped {
        // Tokamax takes [B, T, H, D] and its kernel [B, H, T, D].
        for (title, bytes) in [("queries by head", q), ("keys by head", k), ("values by head", v)] {
            kernels.push(copy(title, bytes, dtype)?);
        }
    }
    kernels.push(body.finish()?);
    if wrapped {
        kernels.push(copy("output by token", o, dtype)?);
    }
    if statistics > 0.0 {
        kernels.push(
            Body::streaming("copy", "one lane of the row statistics")
                .read("row statistics", statistics, Dtype::F32)
                .write("residuals", statistics / lane_rows, Dtype::F32)
                .finish()?,
        );
    }
    Ok(once(kernels))
}

/// Groups of warps of a kernel with asynchronous products, each with rows of its own, that take turns: the softmax of one beside the products of the other.
const GPU_GROUPS: u64 = 2;
/// Waits of a program of a GPU for device memory before its first product and after its last: start, descriptors, queries, first keys, the way of the output out.
const GPU_EXPOSED_LOADS: f64 = 5.0;
/// Stages of key and value blocks in the shared memory of the other kernels.
const GPU_STAGES: u64 = 2;
/// Most query blocks side by side on a multiprocessor that still help each other.
const MOST_SIDE_BY_SIDE: u64 = 2;
/// Most programs of four warps on a multiprocessor. Source: 64 warps (CUDA C++ programming guide, compute capability 8.0 and 9.0).
const MOST_RESIDENT: f64 = 16.0;

/// Rows of a query block, columns of a key block.
#[derive(Debug, Clone, Copy)]
struct Block {
    rows: u64,
    columns: u64,
}

/// Query blocks on a multiprocessor at a time: as many as registers (accumulator, scores, and the weights at half their width, in f32) and shared memory
/// (queries, and stages of keys and values) hold; less than one where they do not hold that much.
fn residents(case: &Case<'_>, a: &Attention, block: Block) -> f64 {
    let Block { rows, columns } = block;
    let chip = case.chip;
    let registers = chip.register_elements() * f64::from(chip.vector_unit.registers);
    let live = rows as f64 * (a.value_dim as f64 + 1.5 * columns as f64);
    let blocks = rows * a.key_dim + GPU_STAGES * columns * (a.key_dim + a.value_dim);
    let shared = (blocks * case.bytes()) as f64;
    (registers / live).min(chip.on_chip.capacity.get() / shared)
}

/// Flash kernel of a GPU. Where products are asynchronous, a program is one query block of a head whose groups of warps take turns on products and softmax, in a software
/// pipeline: the scores of a key block run beside the softmax of the one before and the sums of the one before that. Else products and softmax of a block follow each
/// other, and only blocks side by side overlap.
fn on_gpu(case: &Case<'_>, a: &Attention) -> Result<Vec<Launch>, CaseError> {
    if case.tpu() {
        return Err(CaseError::Unsupported(format!("`{}` runs on GPUs only", case.op)));
    }
    let backward = case.op == "sdpa_causal_bwd";
    let asynchronous = case.op != "flash_attention_triton" && case.chip.matrix_unit.asynchronous;
    let (rows, columns) = match case.op {
        // Blocks of the library are not known; these are usual for 64 to 256 channels.
        "attention_cudnn" | "sdpa_causal" => (128, 128),
        "sdpa_causal_bwd" => (128, 64),
        // Its rows are those of a group of warps.
        "flash_attention" => (
            size(&[GPU_GROUPS, case.size("block_q")?])?,
            case.size("block_kv")?,
        ),
        _ => (case.size("block_q")?, case.any(&["block_kv", "block_k"])?),
    };
    let (rows, columns) = (rows.min(a.queries), columns.min(a.keys));
    let pairs = pairs(a, rows, columns)?;
    let heads = size(&[a.batch, a.heads])?;
    let groups = if asynchronous || backward { GPU_GROUPS } else { 1 };
    let residents = residents(case, a, Block { rows, columns });
    let units = if groups > 1 {
        groups
    } else {
        (residents as u64).clamp(1, MOST_SIDE_BY_SIDE)
    };
    let half = rows.div_ceil(groups);
    let instances = size(&[heads, pairs.visited, groups])?;
    let dtype = case.formats.a;
    let [q, k, v, o] = a.tensors(case)?;
    let product = |k: u64, n: u64| Product {
        m: half,
        k,
        n,
        dtype,
        passes: case.passes(),
    };
    let cut_share = pairs.cut as f64 / pairs.visited.max(1) as f64;
    // Fused multiply-adds scale and subtract in one; rounding packs two values. A bias is widened and added, a mask compared and selected by.
    let extra = 2.0 * (cut_share + f64::from(u8::from(a.mask)) + f64::from(u8::from(a.bias)));
    let mut body = Body::new(
        case.op,
        "flash attention",
        size(&[heads, pairs.query_blocks, groups])?,
        pairs.visited.div_ceil(pairs.query_blocks.max(1)),
    )
    .units(units)
    .product("q k^T", product(a.key_dim, columns), instances)
    // Rows lie within four threads, so that reductions take next to no movement between lanes.
    .vector("maximum", &[half, columns], Cost::alu(1.0 + extra), instances)
    .of_step_before(asynchronous)
    .vector(
        "exponentials",
        &[half, columns],
        Cost::new(case.coefficient(Coefficient::GpuFlashOps), 1.0),
        instances,
    )
    .product("p v", product(columns, a.value_dim), instances)
    .of_step_before(asynchronous)
    .vector("rescale", &[half, a.value_dim], Cost::alu(1.0), instances)
    // Key blocks that neighbouring programs share come from the level-2 cache.
    .read("queries", q, dtype)
    .read("keys", k, dtype)
    .read("values", v, dtype)
    .write("output", o, dtype);
    body.implementation.issue_share = Some(case.coefficient(Coefficient::GpuFlashEfficiency));
    let steps = pairs.visited.div_ceil(pairs.query_blocks.max(1)).max(1);
    body.implementation.exposed_loads = GPU_EXPOSED_LOADS / steps as f64;
    if groups == 1 {
        // The others on the multiprocessor work while one begins or ends.
        let others = residents.floor().clamp(units as f64, MOST_RESIDENT);
        body.implementation.exposed_loads *= units as f64 / others;
        if residents < 1.0 {
            // No room for a second stage: nothing fetches the next keys and values ahead.
            body.implementation.exposed_loads += 1.0;
        }
    }
    if backward {
        // dV = P^T dO, dP = dO V^T, dS = P (dP - d), dQ = dS K, dK = dS^T Q; the forward pair above is P and, in size, dV.
        body = body
            .product("dO v^T", product(a.value_dim, columns), instances)
            .vector("dS", &[half, columns], Cost::alu(3.5), instances)
            .product("dS k", product(columns, a.key_dim), instances)
            .product("dS^T q", product(columns, a.key_dim), instances)
            .read("output and its gradient", 2.0 * o, dtype)
            .write("gradients", q + k + v, dtype);
    }
    let mut kernels = Vec::new();
    if (a.bias || a.mask) && case.op == "attention_cudnn" {
        // The library takes one bias of full shape, in f32: bias and mask are combined into it first.
        let combined = a.scores()? * 4.0;
        kernels.push(
            Body::streaming("copy", "bias with mask, full shape")
                .write("bias", combined, Dtype::F32)
                .finish()?,
        );
        body = body.read("bias", combined, Dtype::F32);
    } else {
        // Bias per head and mask, both shared by the batch: the cache serves all but the first.
        let shared = size(&[a.queries, a.keys])? as f64;
        let bytes = if a.bias {
            2.0 * a.heads as f64 * shared
        } else {
            0.0
        } + if a.mask { shared } else { 0.0 };
        let all = bias_bytes(a) * a.scores()?;
        body = body.read("bias and mask", bytes, dtype).cached(all - bytes);
    }
    if a.residuals {
        body = body.write(
            "row statistics",
            2.0 * size(&[heads, a.queries])? as f64 * 4.0,
            Dtype::F32,
        );
    }
    kernels.push(body.finish()?);
    Ok(once(kernels))
}

/// Work of the softmax that two fusions share: statistics in one, exponentials in the other.
fn softmax_cost(case: &Case<'_>, a: &Attention) -> (Cost, Cost) {
    let mask = f64::from(u8::from(a.causal)) * case.coefficient(Coefficient::FlashMaskOps)
        + f64::from(u8::from(a.mask));
    (Cost::new(3.0 + mask, 1.0), Cost::new(2.0 + mask, 1.0))
}

/// Bytes of a full-shape bias and mask per score.
fn bias_bytes(a: &Attention) -> f64 {
    2.0 * f64::from(u8::from(a.bias)) + f64::from(u8::from(a.mask))
}

/// Attention as XLA runs it: logits of all scores written out in f32.
///
/// On a TPU three passes over them remain: the product writes, a fusion reads for maximum and sum, and the second product reads with the exponential fused into
/// its operand (12 bytes per score fit measured calls of v5p, v6e and v7x). On a GPU the softmax is a kernel of its own that writes what the second product reads, in
/// f32 for bf16 operands and in f16 for f16 operands; a causal mask and returned statistics are further passes (12 to 24 bytes per score fit A100 and H100).
fn materialised(case: &Case<'_>, a: &Attention) -> Result<Vec<Launch>, CaseError> {
    let dtype = case.formats.a;
    let scores = a.scores()?;
    let logits = 4.0 * scores;
    let batch = size(&[a.batch, a.heads])?;
    let [q, k, v, o] = a.tensors(case)?;
    let extra = bias_bytes(a) * scores;
    let passes = case.passes();
    let logits_shape = Shape {
        batch,
        m: a.queries,
        k: a.key_dim,
        n: a.keys,
    };
    let output_shape = Shape {
        batch,
        m: a.queries,
        k: a.keys,
        n: a.value_dim,
    };
    let traffic = |a: f64, b: f64, c: f64| Traffic {
        dtype,
        passes,
        a,
        b,
        c,
    };
    let (statistics, exponentials) = softmax_cost(case, a);
    let flat = [batch * a.queries, a.keys];
    let first = kernel(case, "logits", "q k^T", logits_shape, traffic(q, k, logits))?.read(
        "bias and mask",
        extra,
        dtype,
    );
    if case.tpu() {
        let reduce = Body::streaming("statistics", "maximum and sum of every row")
            .row_reduction("statistics", &flat, statistics, flat[0], 1)
            .read("logits", logits, Dtype::F32)
            .write("statistics", flat[0] as f64 * 8.0, Dtype::F32);
        let second = kernel(
            case,
            "output",
            "softmax and p v",
            output_shape,
            traffic(logits, v, o),
        )?
        .vector("exponentials", &flat, exponentials, 1);
        return Ok(once([first.finish()?, reduce.finish()?, second.finish()?]));
    }
    let weights = if dtype == Dtype::Bf16 { 4.0 } else { 2.0 } * scores;
    let softmax = Body::streaming("softmax", "softmax of every row")
        .row_reduction("statistics", &flat, statistics, flat[0], 1)
        .vector("exponentials", &flat, exponentials, 1)
        .read("logits", logits, Dtype::F32)
        .write("weights", weights, dtype);
    let mut kernels = vec![first.finish()?];
    if a.causal || a.mask {
        kernels.push(
            Body::streaming("mask", "logits under the mask")
                .vector("select", &flat, Cost::alu(2.0), 1)
                .read("logits", if a.causal { scores } else { logits }, Dtype::F32)
                .write("logits", logits, Dtype::F32)
                .finish()?,
        );
    }
    if a.residuals {
        kernels.push(
            Body::streaming("statistics", "maximum and sum of every row")
                .row_reduction("statistics", &flat, statistics, flat[0], 1)
                .read("logits", 2.0 * logits, Dtype::F32)
                .finish()?,
        );
    }
    kernels.push(softmax.finish()?);
    kernels.push(kernel(case, "output", "p v", output_shape, traffic(weights, v, o))?.finish()?);
    Ok(once(kernels))
}

/// Queries and keys of a chunk of chunked attention on a TPU; what is left of either is a loop of its own. Source: the code of Tokamax.
const TPU_CHUNK: [u64; 2] = [512, 1024];
/// Chunked attention as XLA runs it on a TPU: an online softmax over chunks of keys. Like materialised attention a step writes its logits in f32, reads them for maximum and
/// sum, and reads them in the second product; in the loop the accumulator is rescaled, and the product added to it, in passes of their own (24 bytes an element and step),
/// while a step outside it becomes one fusion with what follows. One core per device keeps all of it on chip where it fits; two would have to exchange it. Bias and mask
/// are shared by the batch.
fn chunked_on_tpu(case: &Case<'_>, a: &Attention) -> Result<Vec<Launch>, CaseError> {
    let dtype = case.formats.a;
    let [q_chunk, k_chunk] = TPU_CHUNK;
    let mut launches: Vec<Launch> = Vec::new();
    if a.heads != a.key_heads {
        let repeat = |title: &str, width: u64| -> Result<Launch, CaseError> {
            let one = Attention::stored_channels(case, a.keys, width) * case.bytes();
            let bytes = |heads: u64| size(&[a.batch, heads, a.keys, one]).map(|bytes| bytes as f64);
            Ok(Body::streaming("copy", title)
                .read("heads", bytes(a.key_heads)?, dtype)
                .write("repeated", bytes(a.heads)?, dtype)
                .finish()?
                .into())
        };
        launches.push(repeat("keys for every query head", a.key_dim)?);
        launches.push(repeat("values for every query head", a.value_dim)?);
    }
    for (queries, q_times) in [(q_chunk, a.queries / q_chunk), (a.queries % q_chunk, 1)] {
        if queries == 0 || q_times == 0 {
            continue;
        }
        let steps = a.keys / k_chunk;
        let rest = a.keys % k_chunk;
        let sums = sums_bytes(case, a, queries)?;
        let update = |title: &str| {
            Body::streaming("accumulate", title).vector(
                title,
                &[a.batch * a.heads * queries, a.value_dim],
                Cost::alu(1.0),
                1,
            )
        };
        if steps > 0 {
            let (step, resident) = chunk_on_tpu(case, a, queries, k_chunk)?;
            let moved = if resident { 0.0 } else { sums };
            let rescale = update("rescale")
                .read("accumulator", moved, Dtype::F32)
                .write("accumulator", moved, Dtype::F32)
                .finish()?;
            let add = update("add")
                .read("accumulator", moved, Dtype::F32)
                .read("product", moved, Dtype::F32)
                .write("accumulator", moved, Dtype::F32)
                .finish()?;
            let times = size(&[q_times, steps])?;
            launches.extend(
                step.into_iter()
                    .chain([rescale, add])
                    .map(|kernel| Launch { kernel, times }),
            );
        }
        let mut last = update("divide by the sum of every row");
        if rest > 0 {
            let (step, resident) = chunk_on_tpu(case, a, queries, rest)?;
            last = last.read("product", if resident { 0.0 } else { sums }, Dtype::F32);
            launches.extend(step.into_iter().map(|kernel| Launch {
                kernel,
                times: q_times,
            }));
        }
        let accumulator = if steps > 0 { sums } else { 0.0 };
        launches.push(Launch {
            kernel: last
                .read("accumulator", accumulator, Dtype::F32)
                .write("output", sums / 4.0 * case.bytes() as f64, dtype)
                .finish()?,
            times: q_times,
        });
    }
    Ok(launches)
}

/// Bytes of the accumulator of `queries` queries, in f32.
fn sums_bytes(case: &Case<'_>, a: &Attention, queries: u64) -> Result<f64, CaseError> {
    let channels = Attention::stored_channels(case, queries, a.value_dim);
    Ok(size(&[a.batch, a.heads, queries, channels, 4])? as f64)
}

/// The products and statistics of one step, `queries` against `keys`, and whether its results stay on chip.
fn chunk_on_tpu(
    case: &Case<'_>,
    a: &Attention,
    queries: u64,
    keys: u64,
) -> Result<([Kernel; 3], bool), CaseError> {
    let dtype = case.formats.a;
    let batch = size(&[a.batch, a.heads])?;
    let logits = size(&[batch, queries, keys, 4])? as f64;
    let accumulator = sums_bytes(case, a, queries)?;
    let resident = logits + accumulator <= room(case);
    let through_memory = |bytes: f64| if resident { 0.0 } else { bytes };
    let (logits, accumulator) = (through_memory(logits), through_memory(accumulator));
    let tokens = |tokens: u64, d: u64| {
        size(&[
            batch,
            tokens,
            Attention::stored_channels(case, tokens, d),
            case.bytes(),
        ])
        .map(|bytes| bytes as f64)
    };
    let traffic = |a: f64, b: f64, c: f64| Traffic {
        dtype,
        passes: case.passes(),
        a,
        b,
        c,
    };
    let shape = |m: u64, k: u64, n: u64| Shape { batch, m, k, n };
    let (statistics, exponentials) = softmax_cost(case, a);
    let flat = [batch * queries, keys];
    // One bias and mask for all of the batch.
    let bias = bias_bytes(a) * size(&[a.heads, queries, keys])? as f64;
    let kernels = [
        kernel(
            case,
            "logits",
            "q k^T of a chunk",
            shape(queries, a.key_dim, keys),
            traffic(tokens(queries, a.key_dim)?, tokens(keys, a.key_dim)?, logits),
        )?
        .read("bias and mask", bias, dtype)
        .finish()?,
        Body::streaming("statistics", "maximum and sum of every row")
            .row_reduction("statistics", &flat, statistics, flat[0], 1)
            .read("logits", logits, Dtype::F32)
            .write("statistics", flat[0] as f64 * 8.0, Dtype::F32)
            .finish()?,
        kernel(
            case,
            "output",
            "softmax and p v of a chunk",
            shape(queries, keys, a.value_dim),
            traffic(logits, tokens(keys, a.value_dim)?, accumulator),
        )?
        .vector("exponentials", &flat, exponentials, 1)
        .finish()?,
    ];
    Ok((kernels, resident))
}

/// Queries of a chunk of chunked attention.
const CHUNK_QUERIES: u64 = 1024;
/// Keys of a chunk. Source: the traffic of the f32 accumulator, `8 D / keys` bytes per score, fits measured calls of v5p at 64, 128 and 256 channels with
/// about 256 keys.
const CHUNK_KEYS: u64 = 256;

/// Chunked attention as XLA runs it on a GPU: an online softmax over chunks of keys, every step of which writes logits, weights and accumulator out unless
/// they fit on chip.
fn chunked(case: &Case<'_>, a: &Attention) -> Result<Vec<Launch>, CaseError> {
    let dtype = case.formats.a;
    let batch = size(&[a.batch, a.heads])?;
    let (rows, columns) = (a.queries.div_ceil(CHUNK_QUERIES), a.keys.div_ceil(CHUNK_KEYS));
    let (queries, keys) = (a.queries.div_ceil(rows), a.keys.div_ceil(columns));
    let chunks = rows * columns;
    let scores = size(&[batch, queries, keys])? as f64;
    let accumulator = size(&[
        batch,
        queries,
        Attention::stored_channels(case, queries, a.value_dim),
        4,
    ])? as f64;
    let share = spilled_share(case, 4.0 * scores);
    let kept = |bytes: f64| share * bytes;
    let in_cache = |bytes: f64| cached(case, bytes, share * bytes);
    let (logits, weights) = (kept(4.0 * scores), kept(4.0 * scores));
    let [scores_in_cache, accumulator_in_cache] = [4.0 * scores, accumulator].map(in_cache);
    let element = case.bytes();
    let tokens = |tokens: u64, heads: u64, d: u64| {
        size(&[
            a.batch,
            heads,
            tokens,
            Attention::stored_channels(case, tokens, d),
            element,
        ])
        .map(|b| b as f64)
    };
    let accumulator = kept(accumulator);
    let passes = case.passes();
    let traffic = |a: f64, b: f64, c: f64| Traffic {
        dtype,
        passes,
        a,
        b,
        c,
    };
    let (statistics, exponentials) = softmax_cost(case, a);
    let flat = [batch * queries, keys];
    let first = kernel(
        case,
        "logits",
        "q k^T of a chunk",
        Shape {
            batch,
            m: queries,
            k: a.key_dim,
            n: keys,
        },
        traffic(
            tokens(queries, a.heads, a.key_dim)?,
            tokens(keys, a.key_heads, a.key_dim)?,
            logits,
        ),
    )?
    .cached(scores_in_cache)
    .read("bias and mask", bias_bytes(a) * scores, dtype);
    let softmax = Body::streaming("softmax", "softmax of a chunk")
        .cached(2.0 * scores_in_cache)
        .row_reduction("statistics", &flat, statistics, flat[0], 1)
        .vector("exponentials", &flat, exponentials, 1)
        .read("logits", logits, Dtype::F32)
        .write("weights", weights, dtype);
    let output_shape = Shape {
        batch,
        m: queries,
        k: keys,
        n: a.value_dim,
    };
    let values = tokens(keys, a.key_heads, a.value_dim)?;
    let second = kernel(
        case,
        "output",
        "p v of a chunk",
        output_shape,
        traffic(weights, values, accumulator),
    )?
    .cached(scores_in_cache + accumulator_in_cache);
    let rescaled = [batch * queries, a.value_dim];
    let rescale = Cost::alu(case.coefficient(Coefficient::FlashRescaleOps));
    let mut bodies = vec![first, softmax];
    if case.tpu() {
        bodies.push(second.vector("rescale", &rescaled, rescale, 1).read(
            "accumulator",
            accumulator,
            Dtype::F32,
        ));
    } else {
        // A library call on a GPU takes no slice of keys and values, and adds to no accumulator that has to be rescaled.
        let slice = |title: &str, bytes: f64| {
            Body::streaming("copy", title)
                .read("source", bytes, dtype)
                .write("copy", bytes, dtype)
        };
        bodies.push(slice("keys of a chunk", tokens(keys, a.key_heads, a.key_dim)?));
        bodies.push(slice("values of a chunk", values));
        bodies.push(second);
        bodies.push(
            Body::streaming("accumulate", "sums of the chunks before, rescaled")
                .vector("rescale", &rescaled, rescale, 1)
                .read("output of the chunk", accumulator, Dtype::F32)
                .read("accumulator", accumulator, Dtype::F32)
                .write("accumulator", accumulator, Dtype::F32)
                .cached(3.0 * accumulator_in_cache),
        );
    }
    bodies
        .into_iter()
        .map(|body| {
            Ok(Launch {
                kernel: body.finish()?,
                times: chunks,
            })
        })
        .collect()
}
