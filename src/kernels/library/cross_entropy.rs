//! Cross entropy over logits `x W` that are never kept whole: `[tokens, d] x [d, vocab]`.

use super::body::{Body, Cost, Product, copy};
use super::case::{Case, CaseError, size};
use super::gated_linear_unit::{cached, spilled_share};
use super::matmul::{self, Shape, Traffic};
use super::{Family, Launch, once};
use crate::coefficients::Coefficient;
use crate::dtype::Dtype;

pub(super) const FAMILY: Family = Family {
    ops: &["linear_cross_entropy", "linear_cross_entropy_xla"],
    build,
};

fn build(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    let (tokens, width, vocabulary) = (case.size("tokens")?, case.size("d")?, case.size("vocab")?);
    case.word("reduction", &["sum", "mean", "none"])?;
    // Maximum and sum per token: small beside the weights.
    let _ = case.flag("residuals")?;
    let rows = case.size("b_block_size")?.min(tokens);
    let columns = case.size("v_block_size")?.min(vocabulary);
    size(&[tokens, width])?;
    size(&[width, vocabulary])?;
    let dtype = case.formats.a;
    let element = case.bytes() as f64;
    let (row_blocks, column_blocks) = (tokens.div_ceil(rows), vocabulary.div_ceil(columns));
    if case.op == "linear_cross_entropy" {
        let depth = case.size("h_block_size")?.min(width);
        let depth_blocks = width.div_ceil(depth);
        let steps = size(&[row_blocks, column_blocks, depth_blocks])?;
        let product = Product {
            m: rows,
            k: depth,
            n: columns,
            dtype,
            passes: case.passes(),
        };
        let logit = Cost::new(case.coefficient(Coefficient::CrossEntropyOps), 1.0);
        // Rows slice by slice would overlap product and softmax; the kernel finishes one before the other. Only row blocks are independent, so that is what
        // a second core needs.
        let x_reads = if depth_blocks == 1 { 1 } else { column_blocks };
        let mut body = Body::new(
            case.op,
            "blocks of logits",
            row_blocks,
            column_blocks * depth_blocks,
        )
        .live(rows * columns * 4)
        .product("x W", product, steps)
        .row_reduction(
            "softmax",
            &[rows, columns],
            logit,
            rows,
            row_blocks * column_blocks,
        )
        .read("x", (tokens * width) as f64 * element * x_reads as f64, dtype)
        .read(
            "W",
            (width * vocabulary) as f64 * element * row_blocks as f64,
            dtype,
        )
        .write("loss", tokens as f64 * 8.0, Dtype::F32);
        body.implementation.program_cycles = case.coefficient(Coefficient::CrossEntropyStep);
        return Ok(once([body.finish()?]));
    }
    // XLA: a loop over blocks, each a product that writes its logits and a fusion per statistic that reads them.
    let blocks = size(&[row_blocks, column_blocks])?;
    let logits = (rows * columns) as f64 * 4.0;
    let moved = logits * spilled_share(case, logits);
    let in_cache = cached(case, logits, moved);
    let shape = Shape {
        batch: 1,
        m: rows,
        k: width,
        n: columns,
    };
    // Weights in f32 are rounded once, outside the loop.
    let rounded = case.tpu() && dtype == Dtype::F32;
    let traffic = Traffic {
        dtype,
        passes: case.passes(),
        a: (rows * width) as f64 * element,
        b: (width * columns) as f64 * if rounded { 2.0 } else { element },
        c: moved,
    };
    let product = matmul::kernel(case, "logits", "x W of a block", shape, traffic)?
        .cached(in_cache)
        .finish()?;
    let weights = (width * vocabulary) as f64;
    // A library call on a GPU takes no slice of a matrix, so the columns of a block are copied out of W first.
    let slice = copy("columns of W", (width * columns) as f64 * element, dtype)?;
    let rounding = Body::streaming("copy", "W in bf16")
        .read("W", weights * element, dtype)
        .write("W in bf16", weights * 2.0, Dtype::Bf16)
        .finish()?;
    let statistic = |title: &str, cost: Cost| {
        Body::streaming("statistics", title)
            .row_reduction("statistic", &[rows, columns], cost, rows, 1)
            .read("logits", moved, Dtype::F32)
            .cached(in_cache)
            .write("statistics", rows as f64 * 4.0, Dtype::F32)
            .finish()
    };
    let kernels = [
        product,
        statistic("maximum of every row", Cost::alu(1.0))?,
        statistic("sum of exponentials", Cost::new(4.0, 1.0))?,
        statistic("logit of the label", Cost::alu(4.0))?,
    ];
    let once = rounded.then(|| Launch::from(rounding));
    let sliced = (!case.tpu()).then_some(slice);
    let looped = sliced.into_iter().chain(kernels).map(|kernel| Launch {
        kernel,
        times: blocks,
    });
    Ok(once.into_iter().chain(looped).collect())
}
