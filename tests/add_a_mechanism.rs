//! The example of docs/add-a-mechanism.md: a mechanism from outside the crate, against its recurrence and its closed form.

#[path = "../docs/examples/scaled_delta.rs"]
mod scaled_delta;

use ndarray::{Array1, Array2, Axis, Ix2};
use tpusim::graph::{Value, work};
use tpusim::layer::Layer;
use tpusim::mechanisms::build;
use tpusim::numerics::{Arithmetic, Tensor, execute, relative_error, seeded_inputs, to_f32};
use tpusim::study::{Extent, check};
use tpusim::workload::{self, Workload};

fn workload(overrides: &[&str]) -> Workload {
    let mut all = vec![
        "layer.model_width=96",
        "layer.initial_state=given",
        "numeric.tokens=200",
        "numeric.key_heads=2",
    ];
    all.extend(overrides);
    let (workload, _) = workload::load("gdn", &all).expect("loads");
    let layer = Layer {
        mechanism: &scaled_delta::MECHANISM,
        ..workload.layer.clone()
    };
    Workload { layer, ..workload }
}

#[test]
fn the_document_prints_the_example_as_it_is() {
    let document = include_str!("../docs/add-a-mechanism.md");
    assert!(document.contains(include_str!("../docs/examples/scaled_delta.rs")));
}

#[test]
fn the_example_agrees_with_the_recurrence_of_its_family() {
    for overrides in [
        &["layer.gram=scalar_mask"],
        &["layer.gram=folded"],
        &["layer.read=undecayed"],
        &["layer.inverse=two_level"],
    ] {
        let result = check(&workload(overrides), Extent::Sample).expect("runs");
        assert!(
            result.exact_rel_error < 1e-10,
            "{overrides:?}: {:e}",
            result.exact_rel_error
        );
        assert_eq!(result.non_finite, None);
    }
}

/// `S <- D S + s k^T beta (v - k D S)`, `o = q S`, one token after the other.
#[test]
fn the_example_agrees_with_its_own_recurrence() {
    let layer = workload(&[]).numeric_layer();
    let built = build(&layer).expect("builds");
    let named = |name: &str| {
        let (node, _) = built
            .graph
            .nodes()
            .filter(|(_, node)| node.name == name)
            .last()
            .expect("a node of that name");
        Value { node, port: 0 }
    };
    let names = ["Q", "K", "V", "l_core", "beta_core", "scale", "S_0"];
    let mut keep: Vec<Value> = names.map(named).to_vec();
    keep.extend([built.core.output, built.core.final_state.expect("a state")]);
    let run = execute(
        &built.graph,
        &seeded_inputs(&built.graph, 7),
        &keep,
        Arithmetic::Exact,
    )
    .expect("runs");
    for head in 0..layer.key_heads {
        let rows = |value: Value| -> Array2<f64> {
            let tensor: &Tensor<f64> = &run.values[&value];
            let part = tensor.index_axis(Axis(0), 0).index_axis_move(Axis(0), head);
            let columns = *part.shape().last().expect("channels");
            let rows = part.len() / columns;
            part.to_owned()
                .into_shape_with_order((rows, columns))
                .expect("a matrix")
                .into_dimensionality::<Ix2>()
                .expect("a matrix")
        };
        let [q, k, v, l, beta] = [0, 1, 2, 3, 4].map(|i| rows(keep[i]));
        let scale = run.values[&named("scale")][[head, 0, 0, 0, 0]];
        let mut state = rows(named("S_0"));
        let mut outputs = Array2::zeros(v.dim());
        for t in 0..layer.tokens {
            state *= l[[t, 0]].exp();
            let error: Array1<f64> = &v.row(t) - &k.row(t).dot(&state);
            for (c, mut row) in state.rows_mut().into_iter().enumerate() {
                row.scaled_add(scale * k[[t, c]] * beta[[t, 0]], &error);
            }
            outputs.row_mut(t).assign(&q.row(t).dot(&state));
        }
        let got = rows(built.core.output);
        let tokens = |m: &Array2<f64>| m.slice_axis(Axis(0), (0..layer.tokens).into()).to_owned();
        let error = relative_error(&tokens(&got), &tokens(&outputs)).expect("same shape");
        assert!(error.within(1e-10), "{error:?}");
        let error =
            relative_error(&rows(built.core.final_state.expect("a state")), &state).expect("same shape");
        assert!(error.within(1e-10), "{error:?}");
    }
}

#[test]
fn the_example_costs_what_gated_deltanet_costs() {
    let workload = workload(&["layer.inverse=product"]);
    let layer = workload.numeric_layer();
    let (c, dk, dv) = (layer.chunk, layer.key_dim, layer.value_dim);
    let core = 6 * c * dk + 4 * c * dv + 6 * dk * dv + 4 * (c.ilog2() as usize - 1) * c * c;
    let projected = 2 * layer.model_width * (layer.qkv_width() + 2 * layer.value_heads * (dv + 1));
    let expected = core * layer.value_heads * layer.padded_tokens() + projected * layer.tokens;
    let built = build(&layer).expect("builds");
    assert_eq!(
        work::graph_work(&built.graph).matrix_flops.total(),
        expected as u64
    );
    let inputs = to_f32(&seeded_inputs(&built.graph, 7));
    let run = execute(&built.graph, &inputs, &[], Arithmetic::Declared).expect("runs");
    assert_eq!(run.work, work::stage_work(&built.graph));
}
