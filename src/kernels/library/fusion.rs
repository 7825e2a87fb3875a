//! What a compiler has fused: products, elementwise work and reductions over tensors that are read and written once.

use super::body::{Body, Cost};
use super::case::{Case, CaseError, Formats, Params, size};
use super::matmul::{self, Shape, Traffic};
use crate::dtype::Dtype;
use crate::hardware::Chip;
use crate::kernels::Kernel;

/// A product `[m, k] x [k, n]` of each of `batch` pairs of matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedProduct {
    /// Pairs of matrices.
    pub batch: u64,
    /// Rows of the first.
    pub m: u64,
    /// Contraction.
    pub k: u64,
    /// Columns of the second.
    pub n: u64,
    /// Format the operands are multiplied in.
    pub dtype: Dtype,
    /// Passes of an f32 product on the matrix unit; 1 otherwise.
    pub passes: u32,
}

/// One kernel as a compiler describes it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fused {
    /// Label of the kernel.
    pub label: String,
    /// What it does.
    pub title: String,
    /// Its largest product; smaller ones of the same fusion are in `more_products`.
    pub product: Option<FusedProduct>,
    /// Further products.
    pub more_products: Vec<FusedProduct>,
    /// Vector operations in total.
    pub vector_ops: f64,
    /// Transcendental operations in total.
    pub transcendentals: f64,
    /// Elements that the vector operations run over: the largest of its tensors.
    pub elements: f64,
    /// Rows whose lanes are summed up.
    pub reduced_rows: f64,
    /// Bytes read and written.
    pub bytes: [f64; 2],
}

/// The kernel of a fusion on a chip.
///
/// # Errors
/// Counts that are too large.
pub fn fusion(fused: &Fused, chip: &Chip) -> Result<Kernel, CaseError> {
    let params = Params::default();
    let dtype = fused.product.map_or(Dtype::F32, |product| product.dtype);
    let formats = Formats {
        a: dtype,
        b: dtype,
        highest: false,
        tf32: true,
    };
    let case = Case::new("fusion", &params, formats, chip);
    let [read, written] = fused.bytes;
    let mut body = if let Some(product) = fused.product {
        let FusedProduct { batch, m, k, n, .. } = product;
        size(&[2, batch, m, k, n])?;
        // What is read besides the two operands belongs to the epilogue; the split only decides which panel is
        // fetched again.
        let element = dtype.bytes() as f64;
        let a = batch as f64 * m as f64 * k as f64 * element;
        let b = batch as f64 * k as f64 * n as f64 * element;
        let scale = (read / (a + b).max(1.0)).min(1.0);
        let traffic = Traffic {
            dtype,
            passes: product.passes,
            a: a * scale,
            b: b * scale,
            c: written,
        };
        let shape = Shape { batch, m, k, n };
        let body = matmul::kernel(&case, &fused.label, &fused.title, shape, traffic)?;
        let rest = read - (a + b) * scale;
        if rest >= 1.0 {
            body.read("epilogue", rest, dtype)
        } else {
            body
        }
    } else {
        let mut body = Body::streaming(&fused.label, &fused.title);
        if read >= 1.0 {
            body = body.read("operands", read, Dtype::F32);
        }
        if written >= 1.0 {
            body = body.write("results", written, Dtype::F32);
        }
        body
    };
    for product in &fused.more_products {
        let shape = super::body::Product {
            m: product.m,
            k: product.k,
            n: product.n,
            dtype: product.dtype,
            passes: product.passes,
        };
        body = body.product("product", shape, product.batch);
    }
    let elements = fused.elements.max(1.0);
    if fused.vector_ops + fused.transcendentals > 0.0 {
        let lanes = u64::from(chip.vector_unit.lanes);
        let rows = (elements / lanes as f64).ceil().max(1.0) as u64;
        let cost = Cost::new(fused.vector_ops / elements, fused.transcendentals / elements);
        // A product is cut into programs, each of which does its share of the rest.
        let programs = body.steps();
        let dims = [rows.div_ceil(programs), lanes.min(elements.ceil() as u64)];
        body = if fused.reduced_rows > 0.0 {
            let reduced = (fused.reduced_rows.ceil() as u64).div_ceil(programs);
            body.row_reduction("elementwise and sums", &dims, cost, reduced, programs)
        } else {
            body.vector("elementwise", &dims, cost, programs)
        };
    }
    body.finish()
}
