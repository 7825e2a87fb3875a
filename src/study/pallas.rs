//! Calls of the Pallas kernels of tools/tpu/kernels: the core of a mechanism from its graph, in the launches and programs of those kernels.

use super::calls::Sizes;
use crate::graph::{Op, Precision, Stage};
use crate::kernels::library::{Case, CaseError, Launch};
use crate::kernels::{Group, Lowerer, Plan, Program};
use crate::layer::{GramVariant, InverseVariant, Layer, Solve, StateFormat};
use crate::mechanisms::{self, Granularity, LayerGraph};

/// Name that the graphs of the mechanisms give the result of the convolution.
const CONVOLVED: &str = "conv_silu";

/// What a kernel does before the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Front {
    /// Nothing: normalised queries and keys, log decays and step sizes come from device memory.
    None,
    /// Norm of queries and keys, and the gates.
    Gates,
    /// Convolution, norm and gates.
    Convolution,
}

/// The launches of one call of a kernel: `MECHANISM_pallas`.
///
/// `T`, `H`, `Hv`, `K`, `V`, `B` (1) and `chunk` are sizes; `tiles` the decay tiles of a key head, `gram`, `inverse`, `passes` (of the inverse: 1, 3, 6), `steps`
/// (of a Neumann series), `solve` and `state` are the variants of the layer; `heads` and `chunks` are what a program works on; `front` (`none`, `gates`, `convolution`) is what the
/// kernel does before the core; `launches` is 1 (all in one), 2 (gates to WY factors, scan with output) or 3 (scan and output apart).
///
/// # Errors
/// A parameter that is missing, unknown or does not fit.
pub(super) fn launches(case: &Case<'_>, usual: &Layer) -> Result<Vec<Launch>, CaseError> {
    let sizes = Sizes::of(case)?;
    let tiles = case.optional("tiles")?.unwrap_or(usual.decay_tiles as u64) as usize;
    let state = match case.word("state", &["f32", "bf16", "row_fp8"])? {
        "bf16" => StateFormat::Bf16,
        "row_fp8" => StateFormat::RowFp8,
        _ => StateFormat::F32,
    };
    let front = match case.word("front", &["none", "gates", "convolution"])? {
        "gates" => Front::Gates,
        "convolution" => Front::Convolution,
        _ => Front::None,
    };
    let mut layer = Layer {
        state,
        inverse: variant(case)?,
        inverse_precision: match case.word("passes", &["3", "1", "6"])? {
            "1" => Precision::Default,
            "6" => Precision::Highest,
            _ => Precision::High,
        },
        solve: match case.word("solve", &["wy", "remainder"])? {
            "remainder" => Solve::Remainder,
            _ => Solve::Wy,
        },
        neumann_steps: case.optional("steps")?.unwrap_or(usual.neumann_steps as u64) as usize,
        ..sizes.layer(
            &Layer {
                decay_tiles: tiles,
                ..usual.clone()
            },
            case.formats.a,
        )?
    };
    if let Some(gram) = gram(case, &layer)? {
        layer.gram = gram;
    }
    let program = Program {
        heads: case.optional("heads")?.unwrap_or(1),
        chunks: case.optional("chunks")?.unwrap_or(1),
    };
    let first = if front == Front::None {
        Stage::Gates
    } else {
        Stage::Convolution
    };
    let carried = |first, last| Group {
        program: Some(program),
        ..Group::of(first, last, None)
    };
    let groups = match case.word("launches", &["1", "2", "3"])? {
        "2" => vec![
            Group::of(first, Stage::WyFactors, None),
            carried(Stage::StateScan, Stage::Output),
        ],
        "3" => vec![
            Group::of(first, Stage::WyFactors, None),
            carried(Stage::StateScan, Stage::StateScan),
            Group::of(Stage::Output, Stage::Output, None),
        ],
        _ => vec![carried(first, Stage::Output)],
    };
    let plan = Plan {
        name: "pallas".to_owned(),
        groups,
    };
    let LayerGraph { mut graph, core } = mechanisms::build(&layer)
        .map_err(|error| CaseError::Unsupported(format!("cannot build the graph: {error}")))?;
    match front {
        // Decays come as inputs; the kernel sums them up.
        Front::None => graph.precede(Stage::Gates, Stage::Convolution, |op| {
            matches!(op, Op::CumulativeSum { .. })
        }),
        // What comes after the convolution starts with the parts of its result.
        Front::Gates => graph.precede(Stage::Convolution, Stage::Projections, |op| {
            matches!(op, Op::Slice { .. })
        }),
        Front::Convolution => {}
    }
    let padding = 1.0 - layer.tokens as f64 / layer.padded_tokens() as f64;
    let mut kernels = Lowerer::new(&graph, core.value, padding).lower(&plan);
    for kernel in &mut kernels {
        kernel.implementation.interleaved = true;
        if front == Front::Gates {
            // Without the convolution queries, keys and values come as the layer before rounded them.
            for read in kernel
                .reads
                .iter_mut()
                .filter(|read| read.name.as_str() == CONVOLVED)
            {
                read.bytes = read.bytes / read.dtype.bytes() * layer.activations.bytes();
                read.dtype = layer.activations;
            }
        }
    }
    Ok(kernels.into_iter().map(Launch::from).collect())
}

/// The inverse of a case.
fn variant(case: &Case<'_>) -> Result<InverseVariant, CaseError> {
    let known = [
        InverseVariant::PackedDoubling,
        InverseVariant::BlockDoubling,
        InverseVariant::Neumann,
        InverseVariant::Product,
        InverseVariant::TwoLevel,
        InverseVariant::Blocked16,
    ];
    let word = case.word("inverse", &known.map(InverseVariant::name))?;
    Ok(known
        .into_iter()
        .find(|variant| variant.name() == word)
        .unwrap_or(known[0]))
}

/// The Gram of a case, and the folded one where the decays allow it.
fn gram(case: &Case<'_>, layer: &Layer) -> Result<Option<GramVariant>, CaseError> {
    let usual = match (layer.mechanism.granularity)(layer) {
        Granularity::Channel => GramVariant::Halving,
        Granularity::Scalar => GramVariant::ScalarMask,
        _ => GramVariant::Folded,
    };
    let known = mechanisms::gram_variants((layer.mechanism.granularity)(layer));
    match case.text("gram") {
        None => Ok(known.contains(&usual).then_some(usual)),
        Some(word) => known
            .iter()
            .copied()
            .find(|variant| variant.name() == word)
            .map(Some)
            .ok_or_else(|| CaseError::Value {
                parameter: "gram".to_owned(),
                expected: crate::config::listed(known.iter().map(|variant| variant.name())),
                found: word.to_owned(),
            }),
    }
}
