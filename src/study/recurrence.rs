//! Running the token recurrence of a mechanism's family on the values of an execution, head by head.

use std::ops::Range;

use ndarray::{Array2, ArrayD, Axis, Ix2, Slice, concatenate};
use rayon::prelude::*;

use super::check::{CheckError, tensor};
use crate::graph::{Value, retention_decay};
use crate::layer::{Layer, Pass, ReadConvention, Sequence};
use crate::mechanisms::{
    CachedSoftmaxInputs, DeltaRuleInputs, DiagonalLowRankInputs, GatedOuterInputs, LayerGraph, MesaInputs,
    NORMALISER_EPSILON, OuterDecay, Readout, Recurrence, SoftmaxInputs,
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
        Some(initial) => head.state(entry).rows(initial, "initial state")?,
        None => Array2::zeros(dims),
    };
    let result = match &built.core.recurrence {
        Recurrence::DeltaRule(inputs) => delta_rule(inputs, layer, head, &initial)?,
        Recurrence::GatedOuterProduct(inputs) => gated_outer_product(inputs, layer, head, entry, &initial)?,
        Recurrence::DiagonalPlusLowRank(inputs) => diagonal_low_rank(inputs, head, &initial)?,
        Recurrence::Softmax(inputs) => return Ok((softmax(inputs, layer, head, entry)?, None)),
        Recurrence::CachedSoftmax(inputs) => return Ok((cached_softmax(inputs, layer, head)?, None)),
        Recurrence::Mesa(inputs) => mesa(inputs, head, &initial)?,
    };
    Ok((result.outputs, Some(result.state)))
}

fn delta_rule(
    inputs: &DeltaRuleInputs,
    layer: &Layer,
    head: &Head<'_>,
    initial: &Array2<f64>,
) -> Result<reference::Recurrence, CheckError> {
    // Everything but the query has a row per write.
    let by_write = head.times(layer.householder_steps);
    let write_key = by_write.rows(inputs.write_key, "write key")?;
    let mut read_key = by_write.rows(inputs.read_key, "read key")?;
    let mut value = by_write.rows(inputs.value, "value")?;
    if let Some(step) = inputs.step {
        let step = by_write.rows(step, "step size")?;
        read_key *= &step;
        value *= &step;
    }
    let decay = match inputs.log_decay {
        Some(decay) => channels(by_write.rows(decay, "log decay")?, write_key.ncols()),
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
    if let Some(tree) = &layer.tree {
        // Every token after those of its own path.
        let after = |node: usize| {
            let path = tree.path(node);
            let rows = |of: &Array2<f64>| of.select(Axis(0), &path);
            let [query, write_key, read_key, value, decay] =
                [&query, &write_key, &read_key, &value, &decay].map(rows);
            reference::delta_rule(&query, &write_key, &read_key, &value, &decay, initial, read)
                .map_err(misfit)
        };
        let mut outputs = Array2::zeros(value.dim());
        for (node, mut row) in outputs.rows_mut().into_iter().enumerate() {
            let run = after(node)?;
            row.assign(&run.outputs.row(run.outputs.nrows() - 1));
        }
        let state = after(tree.accepted())?.state;
        return Ok(reference::Recurrence { outputs, state });
    }
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
    entry: usize,
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
                Pass::Forward | Pass::Verify => layer.tokens,
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
                Some(initial) => {
                    // Decoded tokens have one each; the recurrence starts from that of the first.
                    let sums = head.state(entry).rows(initial, "initial normaliser")?;
                    sums.slice_axis(Axis(0), Slice::from(..1))
                        .to_owned()
                        .reversed_axes()
                }
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

/// Softmax attention of one head of the sequence `entry`; queries and keys have their own numbers of padded rows, which are computed like any other.
fn softmax(
    inputs: &SoftmaxInputs,
    layer: &Layer,
    head: &Head<'_>,
    entry: usize,
) -> Result<Array2<f64>, CheckError> {
    let by_key = layer.key_blocks();
    let (queries, keys, tokens) = if layer.sequences.is_empty() {
        (head.clone(), head.clone(), layer.tokens)
    } else {
        let blocks = |layer: &Layer| {
            let sequence = layer.packed_sequences().get(entry).copied();
            let rows = |s: Sequence| s.row..s.row + s.tokens.next_multiple_of(layer.chunk);
            Head {
                part: sequence.map(rows),
                ..head.clone()
            }
        };
        let tokens = layer.sequences.get(entry).copied().unwrap_or_default();
        (blocks(layer), blocks(&by_key), tokens)
    };
    let query = queries.rows(inputs.query, "query")?;
    let (key, value) = (keys.rows(inputs.key, "key")?, keys.rows(inputs.value, "value")?);
    let valid = if layer.attention.causal {
        key.nrows()
    } else {
        tokens
    };
    let mask = reference::AttentionMask {
        causal: layer.attention.causal,
        window: layer.attention.window,
        keys: valid,
        first: 0,
    };
    reference::softmax_attention(&query, &key, &value, mask).map_err(misfit)
}

/// Softmax attention of decoded tokens, one row each, to the cache of the first of them and to each other.
fn cached_softmax(
    inputs: &CachedSoftmaxInputs,
    layer: &Layer,
    head: &Head<'_>,
) -> Result<Array2<f64>, CheckError> {
    let query = head.rows(inputs.query, "query")?;
    let (mut key, mut value) = (head.rows(inputs.key, "key")?, head.rows(inputs.value, "value")?);
    let mut first = 0;
    if let Some((keys, values)) = inputs.earlier {
        let earlier = head.rows(keys, "cached keys")?;
        first = earlier.nrows();
        let after = |cached: Array2<f64>, own: Array2<f64>, what: &'static str| {
            concatenate(Axis(0), &[cached.view(), own.view()]).map_err(|e| CheckError::Shape {
                what,
                problem: e.to_string(),
            })
        };
        key = after(earlier, key, "cached keys")?;
        value = after(head.rows(values, "cached values")?, value, "cached values")?;
    }
    let mask = reference::AttentionMask {
        causal: true,
        window: layer.attention.window,
        keys: key.nrows(),
        first,
    };
    reference::softmax_attention(&query, &key, &value, mask).map_err(misfit)
}

fn mesa(
    inputs: &MesaInputs,
    head: &Head<'_>,
    initial: &Array2<f64>,
) -> Result<reference::Recurrence, CheckError> {
    let query = head.rows(inputs.query, "query")?;
    let key = head.rows(inputs.key, "key")?;
    let value = head.rows(inputs.value, "value")?;
    let step = head.rows(inputs.step, "step size")?;
    let decay = match inputs.log_decay {
        Some(decay) => head.rows(decay, "log decay")?,
        None => Array2::zeros(step.raw_dim()),
    };
    // A parameter: the same at every step of a decode.
    let lambda = head.rows(inputs.lambda, "lambda")?;
    let lambda = lambda.slice_axis(Axis(0), Slice::from(..1)).to_owned();
    reference::mesa::mesa(&query, &key, &value, &step, &decay, &lambda, initial).map_err(misfit)
}

/// One head of core-layout tensors.
#[derive(Clone)]
struct Head<'a> {
    exact: &'a Execution<f64>,
    /// Batch, key head, value head of the key head.
    at: [usize; 3],
    /// Rows that are taken; all of them where absent.
    part: Option<Range<usize>>,
}

impl Head<'_> {
    /// The same head of tensors with `times` rows for each of these.
    fn times(&self, times: usize) -> Self {
        Head {
            part: self.part.as_ref().map(|p| times * p.start..times * p.end),
            ..self.clone()
        }
    }

    /// The same head of the states, of which every sequence has an entry.
    fn state(&self, entry: usize) -> Self {
        let [_, key_head, value_head] = self.at;
        Head {
            at: [entry, key_head, value_head],
            part: None,
            ..self.clone()
        }
    }

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
