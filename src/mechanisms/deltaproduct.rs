//! Gated `DeltaProduct` (arXiv 2502.10297): `n` delta writes per token, each with its own key, value and step size; the state decays before the first,
//! the query reads after the last. The transition of a token is a product of `n` generalised Householder matrices.
//!
//! That is Gated `DeltaNet` on a sequence `n` times as long, in chunks of `C' = n C` writes. Only one row in `n` is read, so the query side
//! of the Gram and the output have `C` rows. Matrix FLOPs of the core per token and head, with an inverse of `2 (log2 C' - 1)` products:
//! `2 (n + 1) C' dk + 2 n C' (dk + dv) + 2 C' dv + (4 n + 2) dk dv + 4 n (log2 C' - 1) C'^2`, which for `n = 1` is that of `DeltaNet`.

use super::delta_rule;
use super::gates::{self, GateInit};
use super::layer::{convolution, core_layout, output, project, projections};
use super::{Core, Defaults, DeltaRuleInputs, Granularity, Mechanism, fields};
use crate::graph::{Builder, Function, Value};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "deltaproduct",
    title: "Gated DeltaProduct",
    source: "arXiv 2502.10297",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[
        fields::COMMON,
        fields::PACKED,
        fields::DECODE,
        fields::GRAM,
        fields::DECAY,
        fields::DELTA,
        fields::HOUSEHOLDER,
    ],
    defaults: Defaults {
        inverse: InverseVariant::Blocked16,
        decay_gate: DecayGate::Softplus,
        decay_bound: -5.0,
        negative_eigenvalues: true,
        output_gate: OutputGate::Full,
    },
    append,
};

fn append(b: &mut Builder, layer: &Layer) -> Core {
    let writes = layer.micro_steps();
    let projected = projections(b, layer);
    let decay_raw = project(b, layer, projected.x, "decay", layer.value_heads);
    let per_token = layer.householder_steps * layer.value_heads;
    let step_raw = project(b, layer, projected.x, "step", per_token);

    let qkv = convolution(b, layer, projected.qkv, false);
    let log_decay = gates::log_decay(b, layer, decay_raw, layer.value_heads, 1, GateInit::TIME_STEP);
    let step = gates::step_size(b, layer, step_raw);
    let (heads, sharing) = (layer.key_heads, layer.sharing());
    let log_decay = core_layout(b, layer, "l_core", log_decay, heads, sharing, 1);
    let log_decay = on_first_write(b, log_decay, layer.householder_steps);
    let step = core_layout(b, &writes, "beta_core", step, heads, sharing, 1);

    let inputs = DeltaRuleInputs {
        step: Some(step),
        log_decay: Some(log_decay),
        ..DeltaRuleInputs::plain(layer, &qkv)
    };
    let core = delta_rule::append(b, &writes, inputs);
    output(b, layer, core.output, projected.output_gate, Function::Silu);
    core
}

/// From a decay per token `[.., C, 1]` one per write `[.., n C, 1]`: that of the token on its first write, none on the others.
fn on_first_write(b: &mut Builder, log_decay: Value, writes: usize) -> Value {
    let mut dims = b.dims(log_decay);
    dims.insert(5, 1);
    let by_write = b.reshape("l_by_write", log_decay, dims.clone());
    let padded = b.pad("l_first_write", by_write, 5, writes);
    dims.remove(5);
    dims[4] *= writes;
    b.reshape("l_writes", padded, dims)
}
