//! Stage op3: log decays and step sizes from their projections.

use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Role, Stage, Value};
use crate::layer::{DecayGate, Layer};

/// How the parameters of a decay gate start out.
#[derive(Debug, Clone, Copy)]
pub struct GateInit {
    /// `A`, one per group, as its logarithm.
    pub rate: Init,
    /// Bias, one per channel.
    pub bias: Init,
}

impl GateInit {
    /// KDA and GDN layers: `A` uniform in [1, 16], time steps log-uniform in [1e-3, 1e-1] (flash-linear-attention).
    pub const TIME_STEP: GateInit = GateInit {
        rate: Init::LogUniform { low: 1.0, high: 16.0 },
        bias: Init::TimeStepBias {
            low: 1e-3,
            high: 1e-1,
        },
    };
    /// SLA: nothing is published. Slopes around 1 and biases in [-4, 0] spread the gate over its range.
    pub const SIGMOID: GateInit = GateInit {
        rate: Init::LogUniform { low: 0.5, high: 2.0 },
        bias: Init::Uniform { low: -4.0, high: 0.0 },
    };
}

/// Log decay `[B, T, groups * per_group]` (f32, at most 0) from its projection `raw` of the same shape.
///
/// `softplus`: `-exp(A) softplus(raw + bias)`; `bounded`: `bound sigmoid(exp(A) (raw + bias))`. `A` has one entry per group, `bias` one per
/// channel.
pub fn log_decay(
    b: &mut Builder,
    layer: &Layer,
    raw: Value,
    groups: usize,
    per_group: usize,
    init: GateInit,
) -> Value {
    named_log_decay(b, layer, "decay", raw, [groups, per_group], init)
}

/// [`log_decay`] of a mechanism with a second one, which gives its parameters their `name`.
pub(super) fn named_log_decay(
    b: &mut Builder,
    layer: &Layer,
    name: &str,
    raw: Value,
    [groups, per_group]: [usize; 2],
    init: GateInit,
) -> Value {
    let rate_name = match name {
        "decay" => "A_log".to_owned(),
        other => format!("A_log_{other}"),
    };
    b.stage(Stage::Gates);
    let shape = [layer.batch, layer.tokens, groups, per_group];
    let raw = b.reshape("decay_raw", raw, shape);
    let bias = b.input(
        &format!("{name}_bias"),
        [groups, per_group],
        Dtype::F32,
        Role::Weight,
        init.bias,
    );
    let shifted = b.add("decay_shifted", raw, bias);
    let a_log = b.input(&rate_name, [groups, 1], Dtype::F32, Role::Weight, init.rate);
    let rate = b.exp("decay_rate", a_log);
    let decay = match layer.decay_gate {
        DecayGate::Softplus => {
            let step = b.map("decay_softplus", Function::Softplus, shifted);
            let rate = b.scale("-decay_rate", rate, -1.0);
            b.multiply("l", step, rate)
        }
        DecayGate::Bounded => {
            let scaled = b.multiply("decay_scaled", shifted, rate);
            let gate = b.map("decay_sigmoid", Function::Sigmoid, scaled);
            b.scale("l", gate, layer.decay_bound)
        }
    };
    b.reshape("l_tokens", decay, [layer.batch, layer.tokens, groups * per_group])
}

/// Step sizes `[B, T, heads]` (f32) from their projection: `sigmoid`, doubled where negative eigenvalues are allowed.
pub fn step_size(b: &mut Builder, layer: &Layer, raw: Value) -> Value {
    b.stage(Stage::Gates);
    let step = b.map("beta", Function::Sigmoid, raw);
    if layer.negative_eigenvalues {
        b.scale("2 beta", step, 2.0)
    } else {
        step
    }
}
