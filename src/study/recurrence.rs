//! Running the token recurrence of a mechanism's family on the values of an execution, head by head.

use std::ops::Range;

use ndarray::{Array2, ArrayD, Axis, Ix2, Slice};
use rayon::prelude::*;

use super::check::{CheckError, tensor};
use crate::graph::{Value, retention_decay};
use crate::layer::{Layer, Pass, ReadConvention};
use crate::mechanisms::{
    DeltaRuleInputs, DiagonalLowRankInputs, GatedOuterInputs, LayerGraph, MesaInputs, NORMALISER_EPSILON,
    OuterDecay, Readout, Recurrence, SoftmaxInputs,
};
use crate::numerics::reference::{self, Read};
use crate::numerics::{Execution, Tensor};

/// Core output and final state by the recurrence, in the shapes of the graph.
///
/// # Errors
/// Where a value does not have the shape its family needs: a fault of the mechanism.
pub(super) fn by_token(
    built: &LayerGraph,
    layer: &Layer,
    exact: &Execution<f64>,
) -> Result<(ArrayD<f64>, Option<ArrayD<f64>>), CheckError> {
    // The executed values say how many tokens there are: the steps of a decode lie along the chunks.
    let o = tensor(exact, built.core.output, "core output")?.shape();
    let mut output = ArrayD::zeros(o);
    let mut state = match built.core.final_state {
        Some(value) => Some(ArrayD::zeros(tensor(exact, value, "final state")?.shape())),
        None => None,
    };
    let (key_rows, width) = state.as_ref().map_or((0, 0), |s| (s.shape()[3], s.shape()[4]));
    // Every sequence with the entry of the batch it belongs to, its rows, and its entry of the states.
    let sequences: Vec<(usize, Option<Range<usize>>, usize)> = if layer.sequences.is_empty() {
        (0..o[0]).map(|batch| (batch, None, batch)).collect()
    } else {
        let packed = layer.packed_sequences().into_iter().enumerate();
        packed
            .map(|(i, s)| (0, Some(s.row..s.row + s.tokens), i))
            .collect()
    };
    let mut heads = Vec::with_capacity(sequences.len() * o[1] * o[2]);
    for (batch, part, entry) in &sequences {
        for key_head in 0..o[1] {
            for value_head in 0..o[2] {
                let head = Head {
                    exact,
                    at: [*batch, key_head, value_head],
                    part: part.clone(),
                };
                heads.push((head, *entry));
            }
        }
    }
    // As many heads at a time as there are threads: the operands and results of a head are copies.
    for group in heads.chunks(rayon::current_num_threads().max(1)) {
        let results: Vec<_> = group
            .par_iter()
            .map(|(head, entry)| one_head(built, layer, head, *entry, (key_rows, width)))
            .collect();
        for ((head, entry), result) in group.iter().zip(results) {
            let (outputs, last) = result?;
            let start = head.part.as_ref().map_or(0, |p| p.start);
            put(&mut output, head.at, start, &outputs);
            if let (Some(state), Some(last)) = (&mut state, last) {
                put(state, [*entry, head.at[1], head.at[2]], 0, &last);
            }
        }
    }
    Ok((output, state))
}

/// Outputs of one head and, where the mechanism has one, its final state of shape `dims`; `entry` is its sequence among the states.
fn one_head(
    built: &LayerGraph,
    layer: &Layer,
    head: &Head<'_>,
    entry: usize,
    dims: (usize, usize),
) -> Result<(Array2<f64>, Option<Array2<f64>>), CheckError> {
    let initial = match built.core.initial_state {
        Some(initial) => Head {
            exact: head.exact,
            at: [entry, head.at[1], head.at[2]],
            part: None,
        }
        .rows(initial, "initial state")?,
        None => Array2::zeros(dims),
    };
    let result = match &built.core.recurrence {
        Recurrence::DeltaRule(inputs) => delta_rule(inputs, head, &initial)?,
        Recurrence::GatedOuterProduct(inputs) => gated_outer_product(inputs, layer, head, &initial)?,
        Recurrence::DiagonalPlusLowRank(inputs) => diagonal_low_rank(inputs, head, &initial)?,
        Recurrence::Softmax(inputs) => return Ok((softmax(inputs, layer, head)?, None)),
        Recurrence::Mesa(inputs) => mesa(inputs, head)?,
    };
    Ok((result.outputs, Some(result.state)))
}

fn delta_rule(
    inputs: &DeltaRuleInputs,
    head: &Head<'_>,
    initial: &Array2<f64>,
) -> Result<reference::Recurrence, CheckError> {
    let write_key = head.rows(inputs.write_key, "write key")?;
    let mut read_key = head.rows(inputs.read_key, "read key")?;
    let mut value = head.rows(inputs.value, "value")?;
    if let Some(step) = inputs.step {
        let step = head.rows(step, "step size")?;
        read_key *= &step;
        value *= &step;
    }
    let decay = match inputs.log_decay {
        Some(decay) => channels(head.rows(decay, "log decay")?, write_key.ncols()),
        None => Array2::zeros(write_key.dim()),
    };
    let read = match inputs.read {
        ReadConvention::Decayed => Read::Decayed,
        ReadConvention::Undecayed => Read::Undecayed,
    };
    // A query reads after the last write of its token.
    let queries = head.rows(inputs.query, "query")?;
    let writes = (write_key.nrows() / queries.nrows().max(1)).max(1);
    if queries.nrows() * writes != write_key.nrows() || queries.ncols() != write_key.ncols() {
        return Err(CheckError::Shape {
            what: "query",
            problem: format!("{:?} against write keys {:?}", queries.dim(), write_key.dim()),
        });
    }
    let mut query = Array2::zeros(write_key.dim());
    let last = Slice::new(writes.cast_signed() - 1, None, writes.cast_signed());
    query.slice_axis_mut(Axis(0), last).assign(&queries);
    let mut result = reference::delta_rule(&query, &write_key, &read_key, &value, &decay, initial, read)
        .map_err(misfit)?;
    if writes > 1 {
        result.outputs = result.outputs.slice_axis(Axis(0), last).to_owned();
    }
    Ok(result)
}

#[allow(clippy::needless_pass_by_value)] // the signature `map_err` asks for
fn misfit(error: reference::ShapeError) -> CheckError {
    CheckError::Shape {
        what: "recurrence",
        problem: error.to_string(),
    }
}

fn gated_outer_product(
    inputs: &GatedOuterInputs,
    layer: &Layer,
    head: &Head<'_>,
    initial: &Array2<f64>,
) -> Result<reference::Recurrence, CheckError> {
    let query = head.rows(inputs.query, "query")?;
    let key = head.rows(inputs.key, "key")?;
    let value = head.rows(inputs.value, "value")?;
    let (rows, dk) = query.dim();
    let decay = match inputs.decay {
        OuterDecay::None => Array2::zeros((rows, dk)),
        OuterDecay::Retention => {
            let [_, key_head, value_head] = head.at;
            let decay = retention_decay(key_head * layer.sharing() + value_head).ln();
            // Rows that pad the last chunk are no tokens: the state stays as it is. Decode has a row per step and none to pad.
            let tokens = match layer.pass {
                Pass::Forward => layer.tokens,
                Pass::Decode => rows,
            };
            Array2::from_shape_fn((rows, dk), |(t, _)| if t < tokens { decay } else { 0.0 })
        }
        OuterDecay::Given(log_decay) => channels(head.rows(log_decay, "log decay")?, dk),
    };
    let bonus = match inputs.bonus {
        Some(bonus) => Some(head.rows(bonus, "bonus")?),
        None => None,
    };
    let bonus = bonus.as_ref().map(|bonus| bonus.row(0));
    let mut result = reference::gated_outer_product(&query, &key, &value, &decay, bonus.as_deref(), initial)
        .map_err(misfit)?;
    match inputs.readout {
        Readout::Plain => {}
        Readout::Skip { weight, input } => {
            let skip = head.rows(input, "skipped input")? * &head.rows(weight, "skip weight")?;
            result.outputs += &skip;
        }
        Readout::Normalised { initial } => {
            let start = match initial {
                Some(initial) => head.rows(initial, "initial normaliser")?.reversed_axes(),
                None => Array2::zeros((dk, 1)),
            };
            // The sum of keys is the state of a head whose values are all one.
            let ones = Array2::ones((rows, 1));
            let sums =
                reference::gated_outer_product(&query, &key, &ones, &decay, None, &start).map_err(misfit)?;
            result.outputs /= &(sums.outputs + NORMALISER_EPSILON);
        }
    }
    Ok(result)
}

fn diagonal_low_rank(
    inputs: &DiagonalLowRankInputs,
    head: &Head<'_>,
    initial: &Array2<f64>,
) -> Result<reference::Recurrence, CheckError> {
    let operands = reference::DiagonalPlusLowRank {
        q: &head.rows(inputs.query, "query")?,
        k: &head.rows(inputs.key, "key")?,
        v: &head.rows(inputs.value, "value")?,
        a: &head.rows(inputs.write, "transition write")?,
        b: &head.rows(inputs.read, "transition read")?,
        l: &head.rows(inputs.log_decay, "log decay")?,
    };
    reference::diagonal_plus_low_rank(&operands, initial).map_err(misfit)
}

/// Softmax attention of one head; keys have their own number of padded rows.
fn softmax(inputs: &SoftmaxInputs, layer: &Layer, head: &Head<'_>) -> Result<Array2<f64>, CheckError> {
    let query = head.rows(inputs.query, "query")?;
    let (key, value) = (head.rows(inputs.key, "key")?, head.rows(inputs.value, "value")?);
    let valid = if layer.attention.causal {
        key.nrows()
    } else {
        layer.tokens
    };
    let mask = reference::AttentionMask {
        causal: layer.attention.causal,
        window: layer.attention.window,
        keys: valid,
    };
    reference::softmax_attention(&query, &key, &value, mask).map_err(|e| CheckError::Shape {
        what: "attention",
        problem: e.to_string(),
    })
}

fn mesa(inputs: &MesaInputs, head: &Head<'_>) -> Result<reference::Recurrence, CheckError> {
    let query = head.rows(inputs.query, "query")?;
    let key = head.rows(inputs.key, "key")?;
    let value = head.rows(inputs.value, "value")?;
    let step = head.rows(inputs.step, "step size")?;
    let decay = match inputs.log_decay {
        Some(decay) => head.rows(decay, "log decay")?,
        None => Array2::zeros(step.raw_dim()),
    };
    let lambda = head.rows(inputs.lambda, "lambda")?;
    reference::mesa::mesa(&query, &key, &value, &step, &decay, &lambda).map_err(|e| CheckError::Shape {
        what: "recurrence",
        problem: e.to_string(),
    })
}

/// One head of core-layout tensors.
struct Head<'a> {
    exact: &'a Execution<f64>,
    /// Batch, key head, value head of the key head.
    at: [usize; 3],
    /// Rows that are taken; all of them where absent.
    part: Option<Range<usize>>,
}

impl Head<'_> {
    /// The part of a tensor that belongs to this head, as `[rows, channels]`, rows of all chunks together; leading extents of 1 are shared.
    fn rows(&self, value: Value, what: &'static str) -> Result<Array2<f64>, CheckError> {
        let whole: &Tensor<f64> = tensor(self.exact, value, what)?;
        let fault = |e: ndarray::ShapeError| CheckError::Shape {
            what,
            problem: e.to_string(),
        };
        let mut part = whole.view();
        for index in self.at {
            let at = if part.shape()[0] == 1 { 0 } else { index };
            part = part.index_axis_move(Axis(0), at);
        }
        let columns = part.shape().last().map_or(1, |&c| c.max(1));
        let rows = part.len() / columns;
        let flat = part
            .to_owned()
            .into_shape_with_order((rows, columns))
            .map_err(fault)?;
        let all = flat.into_dimensionality::<Ix2>().map_err(fault)?;
        // A parameter has one row, whichever rows are taken of the tensors it works on.
        Ok(match &self.part {
            Some(part) if rows > 1 => all.slice_axis(Axis(0), part.clone().into()).to_owned(),
            _ => all,
        })
    }
}

/// Writes rows of one head into a core-layout tensor, from row `start` on.
fn put(tensor: &mut ArrayD<f64>, head: [usize; 3], start: usize, rows: &Array2<f64>) {
    let mut part = tensor.view_mut();
    for index in head {
        part = part.index_axis_move(Axis(0), index);
    }
    let skipped = start * rows.ncols();
    part.iter_mut()
        .skip(skipped)
        .zip(rows)
        .for_each(|(to, from)| *to = *from);
}

/// A decay per channel from one per tile.
fn channels(decay: Array2<f64>, dk: usize) -> Array2<f64> {
    let (rows, groups) = decay.dim();
    if groups == dk {
        return decay;
    }
    let width = dk / groups;
    Array2::from_shape_fn((rows, dk), |(t, c)| decay[[t, c / width]])
}
