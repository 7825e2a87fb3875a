//! Single kernels and library calls, from the parameters a measurement names to the kernels that run.
//!
//! A call is a list of [`Launch`]es: the kernel that gives the call its name and what its wrapper puts around it (layout copies, padding,
//! intermediates in f32, residuals). Such facts are written where the call is built, with their source; none is a coefficient. One file
//! per family.

mod attention;
mod body;
mod case;
mod cross_entropy;
mod elementwise;
mod gated_linear_unit;
mod group_sizes;
mod matmul;
mod normalization;
mod ragged_dot;
mod recurrent;

pub use case::{Case, CaseError, Formats, Params};
pub use recurrent::{Recurrent, decode};

use super::Kernel;
use crate::config::suggestion;
use crate::dtype::Dtype;
use crate::hardware::Chip;

/// A kernel and how often it runs, one run after the other.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// What one launch does.
    pub kernel: Kernel,
    /// Identical launches.
    pub times: u64,
}

impl From<Kernel> for Launch {
    fn from(kernel: Kernel) -> Self {
        Launch { kernel, times: 1 }
    }
}

/// A kernel that only streams: `[read, written]` bytes.
///
/// # Errors
/// Where the counts are too large.
pub fn stream(
    label: &str,
    title: &str,
    [read, written]: [f64; 2],
    dtype: Dtype,
) -> Result<Kernel, CaseError> {
    let mut body = body::Body::streaming(label, title);
    if read > 0.0 {
        body = body.read("source", read, dtype);
    }
    body.write("result", written, dtype).finish()
}

/// Kernels that one launch after the other make up a call.
fn once(kernels: impl IntoIterator<Item = Kernel>) -> Vec<Launch> {
    kernels.into_iter().map(Launch::from).collect()
}

/// A family of operations.
struct Family {
    /// Operations it knows.
    ops: &'static [&'static str],
    /// Builds the launches of one.
    build: fn(&Case<'_>) -> Result<Vec<Launch>, CaseError>,
}

const FAMILIES: &[Family] = &[
    matmul::FAMILY,
    elementwise::FAMILY,
    elementwise::MOVEMENT,
    normalization::FAMILY,
    attention::FAMILY,
    ragged_dot::FAMILY,
    gated_linear_unit::FAMILY,
    cross_entropy::FAMILY,
    recurrent::FAMILY,
];

/// Every operation of the library.
pub fn ops() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|family| family.ops.iter().copied())
}

/// Whether the library has an operation called `op`.
#[must_use]
pub fn knows(op: &str) -> bool {
    ops().any(|known| known == op)
}

/// The launches of one call of `op` on `chip`.
///
/// # Errors
/// [`CaseError`]: an operation, parameter, value or format it does not know, or counts too large to add up.
pub fn launches(op: &str, params: &Params, formats: Formats, chip: &Chip) -> Result<Vec<Launch>, CaseError> {
    let Some(family) = FAMILIES.iter().find(|family| family.ops.contains(&op)) else {
        let names: Vec<&str> = ops().collect();
        return Err(CaseError::Op {
            op: op.to_owned(),
            hint: suggestion(op, &names, "the library has"),
        });
    };
    let case = Case::new(op, params, formats, chip);
    let launches = (family.build)(&case)?;
    case.finish()?;
    Ok(launches)
}
