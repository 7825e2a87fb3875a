//! Running the token recurrence of a mechanism's family on the values of an execution, head by head.

use ndarray::{Array2, ArrayD, Axis, Ix2};

use super::check::{CheckError, tensor};
use crate::graph::Value;
use crate::layer::{Layer, ReadConvention};
use crate::mechanisms::{DeltaRuleInputs, LayerGraph, MesaInputs, Recurrence};
use crate::numerics::reference::{self, Read, mesa};
use crate::numerics::{Execution, Tensor};

/// Core output and final state by the recurrence, in the shapes of the graph.
///
/// # Errors
/// Where a value does not have the shape its family needs: a fault of the mechanism.
pub(super) fn by_token(
    built: &LayerGraph,
    layer: &Layer,
    exact: &Execution<f64>,
) -> Result<(ArrayD<f64>, ArrayD<f64>), CheckError> {
    let output_shape = built.graph.ty(built.core.output).shape.clone();
    let state_shape = built.graph.ty(built.core.final_state).shape.clone();
    let (o, s) = (output_shape.dims(), state_shape.dims());
    let (mut output, mut state) = (ArrayD::zeros(o), ArrayD::zeros(s));
    let (rows, key_rows, width) = (o[3] * o[4], s[3], s[4]);
    for batch in 0..o[0] {
        for key_head in 0..o[1] {
            for value_head in 0..o[2] {
                let head = Head {
                    exact,
                    at: [batch, key_head, value_head],
                    rows,
                };
                let initial = match built.core.initial_state {
                    Some(initial) => Head {
                        rows: key_rows,
                        ..head
                    }
                    .rows(initial, "initial state")?,
                    None => Array2::zeros((key_rows, width)),
                };
                let result = match &built.core.recurrence {
                    Recurrence::DeltaRule(inputs) => delta_rule(inputs, layer, &head, &initial)?,
                    Recurrence::Mesa(inputs) => mesa(inputs, &head)?,
                };
                put(&mut output, head.at, &result.outputs);
                put(&mut state, head.at, &result.state);
            }
        }
    }
    Ok((output, state))
}

fn delta_rule(
    inputs: &DeltaRuleInputs,
    layer: &Layer,
    head: &Head<'_>,
    initial: &Array2<f64>,
) -> Result<reference::Recurrence, CheckError> {
    let query = head.rows(inputs.query, "query")?;
    let write_key = head.rows(inputs.write_key, "write key")?;
    let step = head.rows(inputs.step, "step size")?;
    let read_key = head.rows(inputs.read_key, "read key")? * &step;
    let value = head.rows(inputs.value, "value")? * &step;
    let decay = channels(head.rows(inputs.log_decay, "log decay")?, query.ncols());
    let read = match layer.read {
        ReadConvention::Decayed => Read::Decayed,
        ReadConvention::Undecayed => Read::Undecayed,
    };
    reference::delta_rule(&query, &write_key, &read_key, &value, &decay, initial, read).map_err(|e| {
        CheckError::Shape {
            what: "recurrence",
            problem: e.to_string(),
        }
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
    let lambda = Head { rows: 1, ..*head }.rows(inputs.lambda, "lambda")?;
    mesa::mesa(&query, &key, &value, &step, &decay, &lambda).map_err(|e| CheckError::Shape {
        what: "recurrence",
        problem: e.to_string(),
    })
}

/// One head of core-layout tensors.
#[derive(Clone, Copy)]
struct Head<'a> {
    exact: &'a Execution<f64>,
    /// Batch, key head, value head of the key head.
    at: [usize; 3],
    rows: usize,
}

impl Head<'_> {
    /// The part of a tensor that belongs to this head, as `[rows, channels]`; extents of 1 are shared.
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
        let columns = part.len() / self.rows.max(1);
        let flat = part
            .to_owned()
            .into_shape_with_order((self.rows, columns))
            .map_err(fault)?;
        flat.into_dimensionality::<Ix2>().map_err(fault)
    }
}

/// Writes the rows of one head into a core-layout tensor.
fn put(tensor: &mut ArrayD<f64>, head: [usize; 3], rows: &Array2<f64>) {
    let mut part = tensor.view_mut();
    for index in head {
        part = part.index_axis_move(Axis(0), index);
    }
    part.iter_mut().zip(rows).for_each(|(to, from)| *to = *from);
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
