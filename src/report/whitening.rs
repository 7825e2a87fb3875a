//! Data of `tpusim whitening`, described in `docs/formats.md`.

use serde::Serialize;

use super::result::Bound;

/// Version of the data.
pub const SCHEMA: &str = "tpusim.whitening/1";

/// The table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WhiteningTable {
    /// [`SCHEMA`].
    pub schema: String,
    /// The base layer in one line.
    pub layer: String,
    /// Fusion plan of the times.
    pub plan: String,
    /// Key width and order of the matrices.
    pub key_dim: u64,
    /// Rows of a chunk.
    pub chunk: u64,
    /// Seed of the spectra's bases: that of the workload's numeric check.
    pub seed: u64,
    /// One row per solver.
    pub rows: Vec<WhiteningRow>,
    /// What the reader should know.
    pub notes: Vec<String>,
}

/// A solver.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WhiteningRow {
    /// Name in workload files, or `mesanet`.
    pub name: String,
    /// What a person calls it.
    pub title: String,
    /// Operation class: the units its work falls on.
    pub operations: String,
    /// What it approximates.
    pub target: String,
    /// Products of `key_dim x key_dim` matrices.
    pub products: u64,
    /// Matrix FLOPs of the solver per head and chunk; Gram update of the covariance and product of the keys with the result excluded.
    pub solver_flops: u64,
    /// Vector operations of the solver per head and chunk.
    pub solver_vector_ops: u64,
    /// Transcendentals of the solver per head and chunk.
    pub solver_transcendentals: u64,
    /// Whether the operator is positive definite on both spectra; absent without a solver, as are the next five.
    pub definite: Option<bool>,
    /// Smallest eigenvalue of the operator on a covariance with eigenvalues up to 1.
    pub smallest_eigenvalue: Option<f64>,
    /// The same with eigenvalues up to 8.
    pub smallest_eigenvalue_wide: Option<f64>,
    /// Largest element of `P Cn P - I`, or of `P A - I` for an inverse, in f64, eigenvalues up to 1: the error of the method alone.
    pub residual_f64: Option<f64>,
    /// The same with f32 elements and six-pass products.
    pub residual_f32: Option<f64>,
    /// The same with f32 elements and one-pass bf16 products.
    pub residual_bf16: Option<f64>,
    /// Forward time of the layer on every chip.
    pub times: Vec<ChipTime>,
}

/// Time of a layer on a chip.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChipTime {
    /// Chip.
    pub chip: String,
    /// Time of the plan, in microseconds.
    pub total_us: f64,
    /// Lower end of its 80 % interval, in microseconds; absent where nothing comparable was measured.
    pub low_us: Option<f64>,
    /// Upper end, in microseconds.
    pub high_us: Option<f64>,
    /// What binds its longest launch.
    pub bound: Bound,
}
