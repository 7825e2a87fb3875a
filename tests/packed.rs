//! Sequences of different lengths packed one after the other.

use std::collections::BTreeMap;

use ndarray::{Axis, Slice};
use tpusim::config::Document;
use tpusim::graph::{Init, NodeId, Op, Role, Value};
use tpusim::hardware;
use tpusim::kernels::{Plan, Program, lower};
use tpusim::layer::Layer;
use tpusim::mechanisms::{LayerGraph, build};
use tpusim::numerics::{Arithmetic, Tensor, execute, relative_error, seeded_inputs};
use tpusim::study::{Extent, RunRequest, check, run};
use tpusim::workload::{self, Workload};

/// Far above f64 rounding of a few hundred tokens, far below any error of the formulas.
const EXACT: f64 = 1e-10;
/// Shorter than the convolution, one token, whole chunks, one more and one less than a chunk.
const LENGTHS: &str = "[2, 1, 64, 65, 3, 128, 63, 40]";

fn load(name: &str, fields: &[&str]) -> (Workload, Document) {
    let all: Vec<String> = fields.iter().map(|f| (*f).to_owned()).collect();
    workload::load(name, &all).unwrap_or_else(|e| panic!("{name} {fields:?}: {}", e.render()))
}

/// A small layer of packed sequences.
fn packed(name: &str, lengths: &str, fields: &[&str]) -> Workload {
    let sum: usize = lengths
        .trim_matches(['[', ']'])
        .split(", ")
        .map(|n| n.parse::<usize>().expect("a length"))
        .sum();
    let sequences = format!("layer.sequences={lengths}");
    let tokens = format!("layer.tokens={sum}");
    let numeric = format!("numeric.tokens={sum}");
    let mut all = vec![
        "layer.model_width=64",
        "layer.key_heads=1",
        "numeric.key_heads=1",
        "program.heads=1",
        "layer.key_dim=32",
        "layer.value_dim=16",
        sequences.as_str(),
        tokens.as_str(),
        numeric.as_str(),
    ];
    all.push(if name == "sla_r4" {
        "layer.value_heads=4"
    } else {
        "layer.value_heads=2"
    });
    all.extend_from_slice(fields);
    load(name, &all).0
}

#[test]
fn every_sequence_follows_its_own_recurrence() {
    for name in ["gdn", "kda", "sla_r4"] {
        for fields in [
            &[][..],
            &["layer.initial_state=given"],
            &["layer.initial_state=given", "layer.state=row_fp8"],
            &["layer.read=undecayed", "layer.state=bf16", "layer.chunk=16"],
            &["layer.initial_state=given", "layer.padded_rows=832"],
        ] {
            let workload = packed(name, LENGTHS, fields);
            let result = check(&workload, Extent::Full).expect("runs");
            assert!(
                result.exact_rel_error <= EXACT,
                "{name} {fields:?}: {:e}",
                result.exact_rel_error
            );
            assert_eq!(result.non_finite, None);
        }
    }
}

/// Output `y` and final state of a layer in f64.
fn outputs(built: &LayerGraph, inputs: &BTreeMap<NodeId, Tensor<f64>>) -> (Tensor<f64>, Tensor<f64>) {
    let keep: Vec<Value> = ["y", "state"]
        .iter()
        .map(|name| built.graph.output(name).expect("an output"))
        .collect();
    let mut execution = execute(&built.graph, inputs, &keep, Arithmetic::Exact).expect("runs");
    let mut take = |value| execution.values.remove(value).expect("kept");
    (take(&keep[0]), take(&keep[1]))
}

#[test]
fn packed_sequences_are_the_sequences_alone() {
    // From the first projection to the last: the convolution does not reach into the sequence before either.
    for name in ["gdn", "kda", "sla_r4"] {
        for rows in ["layer.padded_rows=640", "layer.padded_rows=1024"] {
            let layer = packed(name, LENGTHS, &["layer.initial_state=given", rows]).layer;
            let built = build(&layer).expect("builds");
            let inputs = seeded_inputs(&built.graph, 5);
            let (y, state) = outputs(&built, &inputs);
            let mut start = 0;
            for (i, &tokens) in layer.sequences.iter().enumerate() {
                let alone = Layer {
                    tokens,
                    sequences: Vec::new(),
                    padded_rows: None,
                    ..layer.clone()
                };
                let alone = build(&alone).expect("builds");
                let whole = built.graph.inputs().zip(alone.graph.inputs());
                let part = |tensor: &Tensor<f64>, axis, range: std::ops::Range<usize>| {
                    tensor
                        .slice_axis(Axis(axis), Slice::from(range))
                        .to_owned()
                        .into_shared()
                };
                let mine = whole.map(|((from, node), (to, same))| {
                    assert_eq!(node.name, same.name);
                    let tensor = match node.name.as_str() {
                        "x" => part(&inputs[&from], 1, start..start + tokens),
                        "S_0" => part(&inputs[&from], 0, i..i + 1),
                        _ => inputs[&from].clone(),
                    };
                    (to, tensor)
                });
                let (y_alone, state_alone) = outputs(&alone, &mine.collect());
                let y_here = part(&y, 1, start..start + tokens);
                let state_here = part(&state, 0, i..i + 1);
                for (found, expected) in [(&y_here, &y_alone), (&state_here, &state_alone)] {
                    let error = relative_error(found, &expected.to_owned()).expect("same shape");
                    assert!(error.max <= EXACT, "{name} sequence {i}: {:e}", error.max);
                }
                start += tokens;
            }
        }
    }
}

/// A small packed layer of any mechanism, in blocks or chunks of 64 but for the key blocks.
fn packed_any(name: &str, fields: &[&str]) -> Layer {
    let (workload, _) = load(name, &[]);
    let own: &[&str] = match name {
        "softmax_gqa" => &[
            "layer.query_heads=4",
            "layer.key_heads=2",
            "layer.key_dim=32",
            "layer.block_q=64",
            "layer.block_kv=48",
        ],
        "mla" => &[
            "layer.key_heads=2",
            "layer.key_dim=24",
            "layer.latent_rank=20",
            "layer.decoupled_dim=8",
            "layer.block_q=64",
            "layer.block_kv=48",
        ],
        "sla_r4" | "spd_sla_w" => &["layer.key_heads=1", "layer.value_heads=4", "layer.key_dim=32"],
        _ => &["layer.key_heads=2", "layer.value_heads=2", "layer.key_dim=32"],
    };
    let heads = format!("numeric.key_heads={}", workload.numeric.key_heads.min(1));
    let sequences = format!("layer.sequences={LENGTHS}");
    let mut all = vec![
        "layer.model_width=48",
        "layer.value_dim=16",
        "layer.tokens=366",
        "numeric.tokens=366",
        heads.as_str(),
        sequences.as_str(),
    ];
    if !workload.layer.is_attention() {
        all.extend(["layer.chunk=64", "program.heads=1", "layer.initial_state=given"]);
    }
    all.extend_from_slice(own);
    all.extend_from_slice(fields);
    load(name, &all).0.layer
}

#[test]
fn every_mechanism_runs_its_sequences_as_if_alone() {
    let variants: [(&str, &[&str]); 17] = [
        ("linear_attention", &["layer.normaliser=true"]),
        ("retnet", &[]),
        ("gla", &[]),
        ("mamba2", &[]),
        ("rwkv6", &[]),
        ("rwkv7", &["layer.state=row_fp8"]),
        ("deltaproduct", &["layer.householder_steps=3", "layer.chunk=64"]),
        ("preconditioned_delta", &["layer.padded_rows=768"]),
        ("mesanet", &[]),
        ("spd_sla_w", &["layer.whitening_refresh=2"]),
        ("spd_sla_w", &["layer.padded_rows=768", "layer.whitening=cg30"]),
        ("softmax_gqa", &["layer.padded_rows=768"]),
        ("softmax_gqa", &["layer.causal=false", "layer.rotary=0.5"]),
        ("softmax_gqa", &["layer.window=50", "layer.ssmax=true"]),
        ("softmax_gqa", &["layer.qk_norm=true", "layer.output_gate=full"]),
        ("mla", &["layer.rotary=1"]),
        ("mla", &["layer.causal=false", "layer.block_kv=80"]),
    ];
    for (name, fields) in variants {
        let layer = packed_any(name, fields);
        let built = build(&layer).expect("builds");
        let inputs = seeded_inputs(&built.graph, 5);
        let names: Vec<&str> = ["y", "state"]
            .into_iter()
            .filter(|name| built.graph.output(name).is_some())
            .collect();
        let run = |graph: &tpusim::graph::Graph, inputs: &BTreeMap<NodeId, Tensor<f64>>| {
            let keep: Vec<Value> = names
                .iter()
                .map(|n| graph.output(n).expect("an output"))
                .collect();
            let run = execute(graph, inputs, &keep, Arithmetic::Exact).expect("runs");
            keep.iter().map(|v| run.values[v].clone()).collect::<Vec<_>>()
        };
        let whole = run(&built.graph, &inputs);
        let mut start = 0;
        for (i, &tokens) in layer.sequences.iter().enumerate() {
            let alone = Layer {
                tokens,
                sequences: Vec::new(),
                padded_rows: None,
                ..layer.clone()
            };
            let alone = build(&alone).expect("builds");
            let own = seeded_inputs(&alone.graph, 5);
            let part = |tensor: &Tensor<f64>, axis, range: std::ops::Range<usize>| {
                let part = tensor.slice_axis(Axis(axis), Slice::from(range));
                part.to_owned().into_shared()
            };
            let mine = alone.graph.inputs().map(|(id, node)| {
                let from = built.graph.inputs().find(|(_, other)| other.name == node.name);
                let tensor = match (&node.op, from) {
                    // Positions start anew and the end of a sequence is its own: tables are those of the sequence.
                    (
                        Op::Input {
                            init: Init::Table(_),
                            role: Role::Weight,
                        },
                        _,
                    ) => own[&id].clone(),
                    (
                        Op::Input {
                            role: Role::State, ..
                        },
                        Some((from, _)),
                    ) => part(&inputs[&from], 0, i..i + 1),
                    (_, Some((from, node))) if node.name == "x" => {
                        part(&inputs[&from], 1, start..start + tokens)
                    }
                    (_, Some((from, _))) => inputs[&from].clone(),
                    (_, None) => panic!("{name}: no input `{}` when packed", node.name),
                };
                (id, tensor)
            });
            let expected = run(&alone.graph, &mine.collect());
            let found = [part(&whole[0], 1, start..start + tokens)]
                .into_iter()
                .chain(whole.get(1).map(|state| part(state, 0, i..i + 1)));
            for (found, expected) in found.zip(&expected) {
                let error = relative_error(&found, &expected.to_owned()).expect("same shape");
                assert!(
                    error.max <= EXACT,
                    "{name} {fields:?} sequence {i}: {:e}",
                    error.max
                );
            }
            start += tokens;
        }
    }
}

#[test]
fn packed_attention_follows_the_rows_of_each_sequence() {
    for (name, fields) in [
        ("softmax_gqa", &["layer.window=50"][..]),
        ("softmax_gqa", &["layer.causal=false", "layer.padded_rows=768"]),
        ("mla", &["layer.block_q=48", "layer.block_kv=64"]),
    ] {
        let layer = packed_any(name, fields);
        let (workload, _) = load(name, &[]);
        let result = check(&Workload { layer, ..workload }, Extent::Full).expect("runs");
        assert!(
            result.exact_rel_error <= EXACT,
            "{name} {fields:?}: {:e}",
            result.exact_rel_error
        );
        assert_eq!(result.non_finite, None);
    }
}

#[test]
fn packed_attention_costs_the_pairs_of_its_sequences() {
    // Blocks of 512: a sequence of n blocks has n (n + 1) / 2 causal pairs, and none with another sequence.
    let pairs = |fields: &[&str]| {
        let layer = load("softmax_gqa", fields).0.layer;
        let graph = build(&layer).expect("builds").graph;
        let work = tpusim::graph::work::stage_work(&graph)[tpusim::graph::Stage::Attention as usize].1;
        (
            work.matrix_flops.total() / (4 * 128 * 512 * 512 * 32),
            layer.padded_tokens(),
        )
    };
    assert_eq!(pairs(&[]), (16 * 17 / 2, 8192));
    let four = "layer.sequences=[2048, 2048, 2048, 2048]";
    assert_eq!(pairs(&[four]), (4 * 4 * 5 / 2, 8192));
    // One token more takes a block more.
    let ragged = [
        "layer.sequences=[1025, 511, 512]",
        "layer.tokens=2048",
        "numeric.tokens=64",
    ];
    assert_eq!(pairs(&ragged), (6 + 1 + 1, 1536 + 512 + 512));
}

#[test]
fn an_overflow_stays_in_its_sequence() {
    // Decays of 200 nats overflow the folded Gram of a sequence with more than a few tokens; lone tokens before and after it stay finite.
    let fields = [
        "layer.gram=folded",
        "layer.decay_bound=-200",
        "layer.activations=f32",
    ];
    let layer = packed("kda", "[1, 64, 1, 1]", &fields).layer;
    let built = build(&layer).expect("builds");
    let inputs = tpusim::numerics::to_f32(&seeded_inputs(&built.graph, 5));
    let keep = [built.core.final_state.expect("a state")];
    let execution = execute(&built.graph, &inputs, &keep, Arithmetic::Declared).expect("runs");
    let finite = |i| {
        let state = &execution.values[&keep[0]];
        state.index_axis(Axis(0), i).iter().all(|x| x.is_finite())
    };
    assert_eq!([0, 1, 2, 3].map(finite), [true, false, true, true]);
}

#[test]
fn the_documented_packing_is_9792_rows() {
    let (workload, document) = load("kda_packed", &[]);
    let layer = &workload.layer;
    assert_eq!(
        (layer.sequences.len(), layer.tokens, layer.padded_tokens()),
        (25, 8192, 9792)
    );
    // tokens + sequences x chunk: what has to be allocated for lengths that are not known. Whole chunks of 25 sequences never need it.
    assert_eq!(8192 + 25 * 64, 9792);
    assert_eq!((8192 + 25 * 63) / 64 * 64, 9728);
    let chips = vec![hardware::load_with::<&str>("tpu-v7x", &[]).expect("a chip")];
    let loaded = (workload.clone(), document);
    let result = run(RunRequest {
        workload: &loaded,
        baseline: None,
        chips: &chips,
        overrides: Vec::new(),
        numeric: None,
    })
    .expect("runs");
    let fused = &result.chips[0].plans[1].stages[1];
    assert_eq!(fused.stage, "op2-7a");
    assert!((fused.padding - (1.0 - 8192.0 / 9792.0)).abs() < 1e-12);
    assert_eq!(fused.grid_sequential, 153);
    assert!(
        result.warnings.iter().any(|w| w.contains("16.3 % are padding")),
        "{:?}",
        result.warnings
    );
}

#[test]
fn padding_is_computed_but_not_read() {
    let bytes = |layer: &Layer| {
        let built = build(layer).expect("builds");
        let plan = Plan::named("fused", Program { heads: 1, chunks: 1 }).expect("a plan");
        let kernels = lower(&built.graph, &plan, built.core.value, 0.0);
        let fused = kernels
            .into_iter()
            .find(|k| k.label == "op2-7a")
            .expect("a kernel");
        (
            fused.read_bytes(),
            fused.work.matrix_flops.total(),
            built.graph.len(),
        )
    };
    let (packed, _) = load("kda_packed", &["layer.padded_rows=8512"]);
    let (more, _) = load("kda_packed", &[]);
    let one = Layer {
        sequences: Vec::new(),
        padded_rows: None,
        ..more.layer.clone()
    };
    let ((read, flops, nodes), (read_more, flops_more, nodes_more)) =
        (bytes(&packed.layer), bytes(&more.layer));
    let (read_one, flops_one, _) = bytes(&one);
    assert_eq!((read, read_more), (read_one, read_one));
    assert_eq!(flops * 128, flops_one * 133);
    assert_eq!(flops_more * 128, flops_one * 153);
    // The graph does not grow with the number of sequences.
    let two = Layer {
        sequences: vec![8191, 1],
        padded_rows: None,
        ..more.layer.clone()
    };
    assert_eq!((nodes, nodes_more), (bytes(&two).2, nodes));
    // One state per sequence leaves, in f32.
    let state = build(&more.layer).expect("builds");
    assert_eq!(
        state
            .graph
            .ty(state.core.final_state.expect("a state"))
            .shape
            .dims(),
        [25, 32, 1, 128, 128]
    );
}

#[test]
fn packing_that_does_not_fit_is_refused_in_its_place() {
    let refused = |fields: &[&str]| {
        let all: Vec<&str> = fields.to_vec();
        workload::load("kda_packed", &all)
            .expect_err("does not fit")
            .render()
    };
    for (fields, place, message) in [
        (
            &["layer.tokens=8000"][..],
            "layer.tokens",
            "expected the sum 8192 of the 25 sequences, found `8000`",
        ),
        (
            &["layer.batch=2"],
            "layer.batch",
            "expected `1` beside `sequences`",
        ),
        (
            &["layer.padded_rows=8448"],
            "layer.padded_rows",
            "expected a multiple of chunk 64 from 8512",
        ),
        (
            &["layer.padded_rows=9800"],
            "layer.padded_rows",
            "multiple of chunk 64",
        ),
        (
            &["layer.sequences=[]"],
            "layer.sequences",
            "at least one sequence",
        ),
        (
            &["layer.sequences=[64, 0]"],
            "layer.sequences.1",
            "a whole number from 1",
        ),
        (
            &["layer.readout=before_update"],
            "layer.readout",
            "`pass: forward` does not read `readout`",
        ),
    ] {
        let text = refused(fields);
        assert!(
            text.contains(place) && text.contains(message),
            "{fields:?}: {text}"
        );
    }
    let text = workload::load("kda", &["layer.padded_rows=9792"])
        .expect_err("no sequences")
        .render();
    assert!(text.contains("list `sequences`"), "{text}");
}
