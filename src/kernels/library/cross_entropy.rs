//! Cross entropy over logits `x W` that are never kept whole: `[tokens, d] x [d, vocab]`.

use super::body::{Body, Cost, Product};
use super::case::{Case, CaseError, size};
use super::gated_linear_unit::stays_on_chip;
use super::matmul::{self, ACCUMULATE, Shape, Traffic, depth_slices};
use super::{Family, Launch, once};
use crate::dtype::Dtype;

pub(super) const FAMILY: Family = Family {
    ops: &["linear_cross_entropy", "linear_cross_entropy_xla"],
    build,
};

/// Operations per logit: maximum, difference, exponential, sum, the position of the label against every column, and what the padding of the vocabulary
/// masks. Source: 14 ALU operations per logit in measured Pallas kernels.
const LOGIT: Cost = Cost::new(14.0, 1.0);

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
        let sums = ACCUMULATE * depth_slices(case, depth) as f64;
        // Rows slice by slice would overlap product and softmax; the kernel finishes one before the other. Only row blocks are independent, so that is what
        // a second core needs.
        let x_reads = if depth_blocks == 1 { 1 } else { column_blocks };
        let body = Body::new(case.op, "blocks of logits", row_blocks, column_blocks * depth_blocks)
            .live(rows * columns * 4)
            .product("x W", product, steps)
            .vector("accumulate", &[rows, columns], Cost::alu(sums), steps)
            .row_reduction("softmax", &[rows, columns], LOGIT, rows, row_blocks * column_blocks)
            .read("x", (tokens * width) as f64 * element * x_reads as f64, dtype)
            .read("W", (width * vocabulary) as f64 * element * row_blocks as f64, dtype)
            .write("loss", tokens as f64 * 8.0, Dtype::F32);
        return Ok(once([body.finish()?]));
    }
    // XLA: a loop over blocks, each a product that writes its logits and a fusion per statistic that reads them.
    let blocks = size(&[row_blocks, column_blocks])?;
    let logits = (rows * columns) as f64 * 4.0;
    let kept = if stays_on_chip(case, logits) { 0.0 } else { logits };
    let shape = Shape {
        batch: 1,
        m: rows,
        k: width,
        n: columns,
    };
    let traffic = Traffic {
        dtype,
        passes: case.passes(),
        a: (rows * width) as f64 * element,
        b: (width * columns) as f64 * element,
        c: kept,
    };
    let product = matmul::kernel(case, "logits", "x W of a block", shape, traffic)?.finish()?;
    let slice = (width * columns) as f64 * element;
    let columns_of_weights = Body::streaming("copy", "columns of W")
        .read("W", slice, dtype)
        .write("columns", slice, dtype)
        .finish()?;
    let statistic = |title: &str, cost: Cost| {
        Body::streaming("statistics", title)
            .row_reduction("statistic", &[rows, columns], cost, rows, 1)
            .read("logits", kept, Dtype::F32)
            .write("statistics", rows as f64 * 4.0, Dtype::F32)
            .finish()
    };
    let kernels = [
        columns_of_weights,
        product,
        statistic("maximum of every row", Cost::alu(1.0))?,
        statistic("sum of exponentials", Cost::new(4.0, 1.0))?,
        statistic("logit of the label", Cost::alu(4.0))?,
    ];
    Ok(kernels.into_iter().map(|kernel| Launch { kernel, times: blocks }).collect())
}
