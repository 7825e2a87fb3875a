//! Q-Delta (arXiv 2606.08804): `S = D S + k^T beta (v - (k + lambda q^) D S)`, `q^` the query at unit length, `lambda = sigmoid(x - 0.9)`.
//!
//! The prediction is read with `k + lambda q^` and written along `k`, so in the chunk the read side of the Gram is `r_i = beta_i (k_i + lambda_i q^_i)` against
//! write keys `k_j`: `A_ij = r_i . k_j`. The released GPU kernel has it the other way round, `beta_i k_i . (k_j + lambda_j q^_j)`, which is not the chunk form of
//! this recurrence (test); which of the two its authors mean is not known to us. `lambda` per key head is our reading.
//!
//! Matrix FLOPs of the core as for Gated `DeltaNet`, per token and head `6 C dk + 4 C dv + 6 dk dv + 4 (log2 C - 1) C^2`; the read key takes `2 dk` vector operations.

use super::delta_rule;
use super::gates::{self, GateInit};
use super::layer::{convolution, core_layout, output, project, projections};
use super::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

/// Shift of the gate on the query.
const QUERY_GATE_SHIFT: f64 = -0.9;

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "q_delta",
    title: "Q-Delta",
    source: "arXiv 2606.08804",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[
        fields::COMMON,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::VERIFY,
        fields::GRAM,
        fields::DECAY,
        fields::DELTA,
    ],
    defaults: Defaults {
        inverse: InverseVariant::Blocked16,
        decay_gate: DecayGate::Softplus,
        decay_bound: -5.0,
        negative_eigenvalues: false,
        output_gate: OutputGate::Full,
    },
    append,
};

fn append(b: &mut Builder, layer: &Layer) -> Core {
    let projected = projections(b, layer);
    let decay_raw = project(b, layer, projected.x, "decay", layer.value_heads);
    let step_raw = project(b, layer, projected.x, "step", layer.value_heads);
    let lambda_raw = project(b, layer, projected.x, "lambda", layer.key_heads);

    let qkv = convolution(b, layer, projected.qkv, false);
    let log_decay = gates::log_decay(b, layer, decay_raw, layer.value_heads, 1, GateInit::TIME_STEP);
    let step = gates::step_size(b, layer, step_raw);
    let lambda = b.map(
        "lambda_shifted",
        Function::AddConstant(QUERY_GATE_SHIFT),
        lambda_raw,
    );
    let lambda = b.map("lambda", Function::Sigmoid, lambda);
    let (heads, sharing) = (layer.key_heads, layer.sharing());
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, sharing, 1);
    let step = core_layout(b, layer, "beta_core", step, heads, sharing, 1);
    let lambda = core_layout(b, layer, "lambda_core", lambda, heads, 1, 1);

    // Queries carry dk^-1/2; the read key takes them at unit length.
    let lambda = b.scale("lambda sqrt(dk)", lambda, (layer.key_dim as f64).sqrt());
    let query = b.cast("Q_f32", qkv.query, Dtype::F32);
    let query = b.multiply("lambda Q^", query, lambda);
    let key = b.cast("K_f32", qkv.key, Dtype::F32);
    let inputs = DeltaRuleInputs {
        read_key: b.add("K + lambda Q^", key, query),
        step: Some(step),
        log_decay: Some(log_decay),
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, layer, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Silu);
    core
}
