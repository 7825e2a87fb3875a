//! Trees of speculated tokens, verified at once.

use std::collections::BTreeMap;

use ndarray::Axis;
use tpusim::dtype::Dtype;
use tpusim::graph::{NodeId, Stage, Value};
use tpusim::hardware;
use tpusim::kernels::{Kernel, Plan, lower};
use tpusim::layer::{DecayGate, GramVariant, Layer, ReadConvention, StateFormat};
use tpusim::mechanisms::{Mechanism, build};
use tpusim::numerics::{Arithmetic, Tensor, execute, relative_error, seeded_inputs};
use tpusim::study::decode::run_steps;
use tpusim::study::run::plan_times;
use tpusim::study::{Extent, check};
use tpusim::tree::Tree;
use tpusim::workload::{self, Workload};

/// Far above f64 rounding of a few dozen tokens, far below any error of the formulas.
const EXACT: f64 = 1e-10;
const TREES: [&str; 5] = [
    "2x4",
    "1x7",
    "3x3",
    "1x1",
    // Two tokens follow the sequence; branches of different lengths.
    "[-1, 0, 1, 0, -1, 4, 2, 5, 7]",
];

fn load(name: &str, fields: &[&str]) -> Workload {
    workload::load(name, fields)
        .unwrap_or_else(|e| panic!("{name} {fields:?}: {}", e.render()))
        .0
}

fn small(name: &str, fields: &[&str]) -> Workload {
    let all = [
        &["layer.model_width=48", "layer.key_dim=32", "layer.value_dim=16"],
        fields,
    ];
    load(name, &all.concat())
}

#[test]
fn every_token_follows_the_recurrence_on_its_path() {
    // The state as committed along the accepted path among it; every stored format, Gram and read convention.
    for (name, grams) in [
        ("gdn_verify", &["scalar_mask"][..]),
        ("kda_verify", &["broadcast", "folded"]),
        ("sla_r4_verify", &["folded", "tile_masks", "broadcast"]),
    ] {
        for tree in TREES {
            for gram in grams {
                for (state, read) in [("f32", "decayed"), ("bf16", "undecayed"), ("row_fp8", "decayed")] {
                    let fields = [
                        format!("layer.tree={tree}"),
                        format!("layer.gram={gram}"),
                        format!("layer.state={state}"),
                        format!("layer.read={read}"),
                    ];
                    let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
                    let workload = small(name, &fields);
                    let result = check(&workload, Extent::Sample).expect("runs");
                    let place = format!("{name} {fields:?}: {:e}", result.exact_rel_error);
                    assert!(result.exact_rel_error <= EXACT, "{place}");
                    assert_eq!(result.non_finite, None, "{place}");
                    assert_eq!(result.tokens, workload.layer.tokens as u64);
                    assert!(result.state_rel_error.is_some());
                }
            }
        }
    }
}

#[test]
fn the_remainder_of_a_tree_can_be_solved() {
    for name in ["gdn_verify", "kda_verify", "sla_r4_verify"] {
        for tree in TREES {
            let tree = format!("layer.tree={tree}");
            let workload = small(name, &[&tree, "layer.solve=remainder"]);
            let result = check(&workload, Extent::Sample).expect("runs");
            let place = format!("{name} {tree}: {:e}", result.exact_rel_error);
            assert!(result.exact_rel_error <= EXACT, "{place}");
        }
    }
}

#[test]
fn any_token_can_be_the_last_accepted() {
    for accepted in 0..7 {
        let accepted = format!("layer.accepted={accepted}");
        let result = check(
            &small("gdn_verify", &["layer.tree=2x3", &accepted]),
            Extent::Sample,
        )
        .expect("runs");
        assert!(
            result.exact_rel_error <= EXACT,
            "{accepted}: {:e}",
            result.exact_rel_error
        );
    }
}

#[test]
fn the_whole_family_verifies_trees() {
    let gdn = small("gdn_verify", &["layer.tree=2x4"]);
    for name in ["deltanet", "gdn2", "q_delta", "kaczmarz", "comba"] {
        let mechanism = Mechanism::named(name).expect("a mechanism");
        assert!(mechanism.verifies(), "{name}");
        let layer = Layer {
            mechanism,
            gram: if name == "gdn2" {
                GramVariant::Broadcast
            } else {
                GramVariant::ScalarMask
            },
            output_gate: mechanism.defaults.output_gate,
            ..gdn.layer.clone()
        };
        let result = check(&Workload { layer, ..gdn.clone() }, Extent::Sample).expect("runs");
        assert!(
            result.exact_rel_error <= EXACT,
            "{name}: {:e}",
            result.exact_rel_error
        );
    }
}

#[test]
fn unbounded_gates_do_not_overflow() {
    // Sixty tokens on a path, each forgetting up to tens of nats: tokens of other branches differ by more than any format holds.
    let workload = small(
        "gdn_verify",
        &["layer.tree=[-1, 0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15]"],
    );
    let layer = Layer {
        decay_gate: DecayGate::Softplus,
        ..workload.layer.clone()
    };
    let graph = build(&layer).expect("builds");
    let mut inputs = seeded_inputs(&graph.graph, 3);
    for (id, node) in graph.graph.inputs() {
        if node.name.ends_with("_bias") {
            inputs.insert(id, Tensor::from_elem(node.results[0].shape.dims(), 30.0));
        }
    }
    let run = execute(&graph.graph, &inputs, &[graph.core.output], Arithmetic::Exact).expect("runs");
    assert!(run.non_finite.is_none(), "{:?}", run.non_finite);
    assert!(run.values[&graph.core.output].iter().all(|x| x.is_finite()));
}

/// Values of the graph by name.
fn node(layer: &tpusim::mechanisms::LayerGraph, name: &str) -> Value {
    let found = layer.graph.nodes().find(|(_, node)| node.name == name);
    Value {
        node: found.unwrap_or_else(|| panic!("no `{name}`")).0,
        port: 0,
    }
}

#[test]
fn a_path_is_a_run_of_decode_steps() {
    // Projections and convolution among it: the same weights and states, token after token.
    for (verify, decode) in [
        ("gdn_verify", "gdn_decode"),
        ("kda_verify", "kda_decode"),
        ("sla_r4_verify", "sla_r4_decode"),
    ] {
        let sizes = ["layer.batch=2", "layer.key_heads=2", "layer.state=f32"];
        let heads = if verify == "sla_r4_verify" {
            "layer.value_heads=8"
        } else {
            "layer.value_heads=2"
        };
        let fields = [&sizes[..], &[heads]].concat();
        let tree = small(verify, &[&fields[..], &["layer.tree=2x5"]].concat()).layer;
        let step = small(decode, &fields).layer;
        let (whole, one) = (build(&tree).expect("builds"), build(&step).expect("builds"));
        let inputs = seeded_inputs(&whole.graph, 5);
        let by_name: BTreeMap<&str, NodeId> = whole
            .graph
            .inputs()
            .map(|(id, n)| (n.name.as_str(), id))
            .collect();
        let mine: BTreeMap<NodeId, Tensor<f64>> = one
            .graph
            .inputs()
            .map(|(id, n)| match n.name.as_str() {
                "x" => (id, Tensor::zeros(n.results[0].shape.dims())),
                name => (id, inputs[&by_name[name]].clone()),
            })
            .collect();
        let conv_next = whole.graph.output("conv_state").expect("an output");
        let state = whole.core.final_state.expect("a state");
        let qkv = node(&whole, "qkv_rounded");
        let keep = [whole.core.output, state, conv_next, qkv];
        let found = execute(&whole.graph, &inputs, &keep, Arithmetic::Exact).expect("runs");
        let shape = tree.tree.as_ref().expect("a tree");
        for end in [0, 7, 22, shape.nodes() - 1, shape.accepted()] {
            let path = shape.path(end);
            let tokens = inputs[&by_name["x"]].select(Axis(1), &path).into_shared();
            let keep = [one.core.output, one.core.final_state.expect("a state")];
            let steps = run_steps(&step, &one, &mine, &tokens, &keep, Arithmetic::Exact).expect("runs");
            // `[B, Hk, R, N, 1, width]` by step, `[B, Hk, R, 1, C, width]` by token of the tree.
            let rows = found.values[&whole.core.output].select(Axis(4), &path);
            let by_step = steps.values[&keep[0]]
                .to_owned()
                .permuted_axes(vec![0, 1, 2, 4, 3, 5]);
            let error = relative_error(&rows.into_shared(), &by_step.as_standard_layout().to_owned())
                .expect("same shape");
            assert!(error.max <= EXACT, "{verify} to {end}: {:e}", error.max);
            if end == shape.accepted() {
                let error = relative_error(&found.values[&state], &steps.values[&keep[1]].to_owned())
                    .expect("same shape");
                assert!(error.max <= EXACT, "{verify} state: {:e}", error.max);
                // The last three rows of queries, keys and values on the path.
                let last: Vec<usize> = path[path.len() - 3..].to_vec();
                let expected = found.values[&qkv].select(Axis(1), &last);
                assert_eq!(found.values[&conv_next].to_owned(), expected, "{verify}");
            }
        }
    }
}

fn kernels(layer: &Layer, plan: &str) -> Vec<Kernel> {
    let built = build(layer).expect("builds");
    lower(
        &built.graph,
        &Plan::verify(plan).expect("a plan"),
        built.core.value,
        0.0,
    )
}

#[test]
fn the_commit_reads_the_path_and_moves_the_state_once_each_way() {
    let state = 64 * 32 * 128 * 128 * 4_u64;
    for (tree, depth) in [("1x4", 4_u64), ("2x4", 4), ("4x3", 3)] {
        let layer = load("gdn_verify", &[&format!("layer.tree={tree}")]).layer;
        let all = kernels(&layer, "fused");
        let commit = all.iter().find(|k| k.label == "commit").expect("a launch");
        let bytes = |transfers: &[tpusim::kernels::Transfer], name: &str| -> u64 {
            transfers.iter().filter(|t| t.name == name).map(|t| t.bytes).sum()
        };
        assert_eq!(bytes(&commit.reads, "state"), state, "{tree}");
        assert_eq!(bytes(&commit.writes, "S'"), state, "{tree}");
        // Values written along the path in bf16, however wide the tree is.
        assert_eq!(
            bytes(&commit.reads, "U_rounded"),
            64 * 32 * depth * 128 * 2,
            "{tree}"
        );
        let verify = all.iter().find(|k| k.label == "op2-7a").expect("a launch");
        assert_eq!(bytes(&verify.reads, "state"), state, "{tree}");
        assert_eq!(bytes(&verify.writes, "S'"), 0, "{tree}");
        assert!(verify.ops.iter().all(|op| op.stage != Stage::Commit));
    }
}

#[test]
fn a_tree_costs_less_than_its_tokens_one_by_one() {
    for chip in ["tpu-v7x", "h200-sxm"] {
        let (chip, _) = hardware::load_with::<&str>(chip, &[]).expect("a chip");
        let total = |workload: &Workload| {
            let plans = plan_times(workload, &chip, hardware::shipped_calibration()).expect("times");
            let fused = plans
                .into_iter()
                .find(|plan| plan.name == "fused")
                .expect("a plan");
            (fused.total_us, fused.token.expect("tokens"))
        };
        let (step_us, _) = total(&load("gdn_decode", &[]));
        let mut before = 0.0;
        for (tree, nodes) in [("1x4", 4.0), ("2x4", 15.0), ("2x5", 31.0)] {
            let (us, token) = total(&load("gdn_verify", &[&format!("layer.tree={tree}")]));
            assert!(
                us > before && us < nodes * step_us,
                "{} {tree}: {us} {step_us}",
                chip.name
            );
            assert!((token.tokens as f64 - 64.0 * nodes).abs() < 0.5);
            before = us;
        }
    }
}

#[test]
fn trees_that_are_none_are_refused_in_their_place() {
    for (name, fields, message) in [
        ("gdn_verify", &["layer.tree=0x3"][..], "layer.tree"),
        ("gdn_verify", &["layer.tree=64x64"], "at most 1024 tokens"),
        ("gdn_verify", &["layer.tree=[-1, 1]"], "parent of token 1"),
        (
            "gdn_verify",
            &["layer.tree=wide"],
            "branching and depth such as `2x4`",
        ),
        (
            "gdn_verify",
            &["layer.accepted=15"],
            "expected one of the 15 tokens",
        ),
        (
            "gdn_verify",
            &["layer.tokens=15"],
            "the tree is one chunk of its tokens",
        ),
        (
            "gdn_verify",
            &["numeric.tokens=4"],
            "`pass: verify` executes its whole tree",
        ),
        (
            "gdn_verify",
            &["layer.readout=after_update"],
            "`pass: verify` does not read `readout`",
        ),
        (
            "gdn_verify",
            &["layer.initial_state=zero"],
            "reads the state of the token before",
        ),
        (
            "gdn_verify",
            &["layer.inverse=block_doubling"],
            "a tree of `15` tokens",
        ),
        ("kda_verify", &["layer.gram=pivot"], "`pivot` has no meaning"),
        (
            "gdn_decode",
            &["layer.tree=2x4"],
            "`pass: decode` does not read `tree`",
        ),
        ("gdn", &["layer.tree=2x4"], "`pass: forward` does not read `tree`"),
        ("gla", &["layer.tree=2x4"], "`gla` does not read `tree`"),
    ] {
        let text = match workload::load(name, fields) {
            Ok(_) => panic!("{name} {fields:?} loads"),
            Err(error) => error.render(),
        };
        // A message of a key shows its line.
        let shown = message == "layer.tree" && text.contains("tree");
        assert!(shown || text.contains(message), "{name} {fields:?}: {text}");
    }
    let layer = load("gdn_verify", &[]).layer;
    assert_eq!(layer.tree, Tree::regular(2, 4).ok());
    assert_eq!(
        (layer.read, layer.state),
        (ReadConvention::Decayed, StateFormat::F32)
    );
    assert_eq!(layer.activations, Dtype::Bf16);
}
