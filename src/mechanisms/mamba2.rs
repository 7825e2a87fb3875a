//! Mamba-2, state-space duality (arXiv 2405.21060): `h = e^(dt A) h + dt B^T x`, `y = C h + D x`.
//!
//! In the notation of gated outer products: queries `C` and keys `B`, neither scaled nor normalised, values `dt x`, and `l = dt A` per value
//! head. `B` and `C` belong to a group (a key head here) and are shared by its heads, so the Gram `C B^T` is built once per group and only the
//! scalar mask is per head. The convolution has a bias; the gate comes before the RMS norm, which runs over the channels of a group.

use super::gated_outer;
use super::layer::{
    chunked, convolve, core_layout, output_projection, project, projections, rms_norm, split, token_layout,
};
use super::{Core, Defaults, GatedOuterInputs, Granularity, Mechanism, OuterDecay, Readout, fields};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Role, Stage, Value};
use crate::layer::{DecayGate, InverseVariant, Layer, OutputGate};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "mamba2",
    title: "Mamba-2, state-space duality",
    source: "arXiv 2405.21060",
    packed: false,
    granularity: |_| Granularity::Scalar,
    fields: &[
        fields::COMMON,
        fields::PACKED,
        fields::DECODE,
        fields::DELTA_LOG,
        fields::GRAM,
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
    let dt_raw = project(b, layer, projected.x, "dt", layer.value_heads);
    let (groups, sharing) = (layer.key_heads, layer.sharing());

    let convolved = convolve(b, layer, projected.qkv);
    let bias = Init::Uniform { low: -0.5, high: 0.5 };
    let bias = b.input("conv_bias", [layer.qkv_width()], Dtype::F32, Role::Weight, bias);
    let convolved = b.add("conv_biased", convolved, bias);
    let activated = b.map("conv_silu", Function::Silu, convolved);
    let cbx = split(b, layer, activated);
    let cbx = chunked(b, layer, cbx, false);

    b.stage(Stage::Gates);
    let heads = |b: &mut Builder, name: &str, init: Init| {
        b.input(name, [layer.value_heads], Dtype::F32, Role::Weight, init)
    };
    let bias = heads(
        b,
        "dt_bias",
        Init::TimeStepBias {
            low: 1e-3,
            high: 1e-1,
        },
    );
    let dt = b.add("dt_shifted", dt_raw, bias);
    let dt = b.map("dt_softplus", Function::Softplus, dt);
    let a_log = heads(b, "A_log", Init::LogUniform { low: 1.0, high: 16.0 });
    let a = b.exp("e^A_log", a_log);
    let a = b.scale("A", a, -1.0);
    let log_decay = b.multiply("l", dt, a);
    let log_decay = core_layout(b, layer, "l_core", log_decay, groups, sharing, 1);
    let dt = core_layout(b, layer, "dt_core", dt, groups, sharing, 1);
    let x = b.cast("x_f32", cbx.value, Dtype::F32);
    let stepped = b.multiply("dt x", x, dt);
    let stepped = b.cast("dt x_rounded", stepped, layer.activations);

    let skip = b.input(
        "D",
        [1, groups, sharing, 1, 1, 1],
        Dtype::F32,
        Role::Weight,
        Init::Ones,
    );
    let inputs = GatedOuterInputs {
        query: cbx.query,
        key: cbx.key,
        value: stepped,
        decay: OuterDecay::Given(log_decay),
        bonus: None,
        readout: Readout::Skip {
            weight: skip,
            input: cbx.value,
        },
    };
    let core = gated_outer::append(b, layer, inputs, cbx.value, f64::INFINITY);
    gated_norm(b, layer, core.output, projected.output_gate);
    core
}

/// Stages op7b and op7c: `rms_norm(y silu(z))` over the channels of a group, output projection.
fn gated_norm(b: &mut Builder, layer: &Layer, core_output: Value, gate: Option<Value>) {
    b.stage(Stage::OutputNorm);
    let o = token_layout(b, layer, core_output);
    let width = layer.sharing() * layer.value_dim;
    let by_group = [layer.batch, layer.tokens, layer.key_heads, width];
    let o = b.reshape("o_groups", o, by_group);
    let mut o = b.cast("o_f32", o, Dtype::F32);
    if let Some(gate) = gate {
        let gate = b.reshape("z_groups", gate, by_group);
        let gate = b.cast("z_f32", gate, Dtype::F32);
        let gate = b.map("z_silu", Function::Silu, gate);
        o = b.multiply("o_gated", o, gate);
    }
    let normalised = rms_norm(b, o);
    let weight = [layer.key_heads, width];
    let weight = b.input("norm_weight", weight, Dtype::F32, Role::Weight, Init::Ones);
    let out = b.multiply("o_weighted", normalised, weight);
    output_projection(b, layer, out);
}
