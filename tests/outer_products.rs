//! Gated outer products (linear attention, `RetNet`, GLA, Mamba-2, RWKV6): agreement with the token recurrence, work, errors of formats.

use tpusim::graph::work::{graph_work, stage_work};
use tpusim::graph::{Graph, Op, Stage, Work};
use tpusim::layer::Layer;
use tpusim::mechanisms::build;
use tpusim::numerics::{Arithmetic, execute, relative_error, seeded_inputs, to_f32};
use tpusim::study::{Extent, check};
use tpusim::workload;

const NAMES: [&str; 5] = ["linear_attention", "retnet", "gla", "mamba2", "rwkv6"];

/// Far above f64 rounding of a few hundred tokens, far below any error of the formulas.
const EXACT: f64 = 1e-10;

fn layer(name: &str, overrides: &[&str]) -> Layer {
    workload::load(name, overrides)
        .unwrap_or_else(|e| panic!("{name} {overrides:?}: {}", e.render()))
        .0
        .layer
}

/// The layer the numeric check runs: few tokens, one key head.
fn small(name: &str, fields: &[&str]) -> Layer {
    let mut all = vec![
        "layer.model_width=48".to_owned(),
        "layer.tokens=200".to_owned(),
        "numeric.tokens=16".to_owned(),
    ];
    all.extend(fields.iter().map(|f| format!("layer.{f}")));
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    Layer {
        key_heads: 1,
        value_heads: layer(name, &all).sharing(),
        ..layer(name, &all)
    }
}

/// 200 tokens and a given state: at every chunk below 200 that does not divide it, the last chunk is partial.
fn assert_exact(name: &str, fields: &[&str]) {
    let mut all: Vec<String> = [
        "layer.model_width=48",
        "layer.initial_state=given",
        "numeric.tokens=200",
        "numeric.key_heads=2",
    ]
    .map(str::to_owned)
    .to_vec();
    if name == "mamba2" {
        // Two groups, so that heads of different groups differ.
        all.extend(["layer.key_heads=2", "layer.value_heads=6"].map(str::to_owned));
    }
    all.extend(fields.iter().map(|f| format!("layer.{f}")));
    let (workload, _) =
        workload::load(name, &all).unwrap_or_else(|e| panic!("{name} {fields:?}: {}", e.render()));
    let result = check(&workload, Extent::Sample).unwrap_or_else(|e| panic!("{name} {fields:?}: {e}"));
    let error = result.exact_rel_error;
    assert!(error <= EXACT, "{name} {fields:?}: {error:e}");
}

fn per_stage(graph: &Graph) -> impl Fn(Stage) -> Work {
    let work = stage_work(graph);
    move |stage| {
        work.iter()
            .find(|(s, _)| *s == stage)
            .expect("every stage is listed")
            .1
    }
}

const CORE: [Stage; 6] = [
    Stage::Gates,
    Stage::Gram,
    Stage::Inverse,
    Stage::WyFactors,
    Stage::StateScan,
    Stage::Output,
];

fn core(graph: &Graph) -> Work {
    let work = per_stage(graph);
    CORE.map(work).into_iter().sum()
}

/// Rows of all chunks, padding included.
fn rows(layer: &Layer) -> u64 {
    (layer.batch * layer.padded_tokens()) as u64
}

#[test]
fn chunks_agree_with_the_recurrence() {
    for name in NAMES {
        for chunk in [16, 64, 256] {
            assert_exact(name, &[&format!("chunk={chunk}")]);
        }
        assert_exact(name, &["chunk=64", "initial_state=zero"]);
        // No partial chunk.
        assert_exact(name, &["chunk=8"]);
    }
}

#[test]
fn value_heads_that_share_keys_agree() {
    for name in ["linear_attention", "retnet", "gla", "rwkv6"] {
        assert_exact(
            name,
            &[
                "key_heads=2",
                "value_heads=6",
                "key_dim=32",
                "value_dim=24",
                "chunk=32",
            ],
        );
    }
    for (groups, heads) in [(2, 2), (4, 8)] {
        let (groups, heads) = (format!("key_heads={groups}"), format!("value_heads={heads}"));
        assert_exact(
            "mamba2",
            &[&groups, &heads, "key_dim=20", "value_dim=12", "chunk=48"],
        );
    }
}

#[test]
fn every_gram_variant_agrees() {
    for name in ["gla", "rwkv6"] {
        for gram in ["pivot", "pivot_causal", "broadcast", "halving"] {
            for chunk in [16, 64] {
                let chunk = format!("chunk={chunk}");
                assert_exact(
                    name,
                    &[&format!("gram={gram}"), &chunk, "key_dim=32", "value_dim=16"],
                );
            }
        }
        assert_exact(name, &["gram=pivot", "pivot=first", "key_dim=32"]);
    }
    // A sixteenth of a logsigmoid: 32 rows on one side of the pivot stay far below the overflow limit.
    assert_exact("gla", &["gram=folded", "key_dim=32"]);
    assert_exact("mamba2", &["gram=folded", "chunk=64"]);
}

#[test]
fn every_feature_map_and_the_normaliser_agree() {
    for map in ["elu1", "relu", "identity"] {
        assert_exact("linear_attention", &[&format!("feature_map={map}")]);
    }
    for map in ["elu1", "relu"] {
        for start in ["given", "zero"] {
            let (map, start) = (format!("feature_map={map}"), format!("initial_state={start}"));
            assert_exact("linear_attention", &[&map, &start, "normaliser=true"]);
        }
    }
    assert_exact(
        "linear_attention",
        &["normaliser=true", "key_heads=2", "value_heads=4", "chunk=32"],
    );
    let error = workload::load(
        "linear_attention",
        &["layer.feature_map=identity", "layer.normaliser=true"],
    )
    .expect_err("sums of any sign cannot normalise");
    assert!(
        error.render().contains("use `elu1` or `relu`"),
        "{}",
        error.render()
    );
}

#[test]
fn odd_sizes_and_state_formats_agree() {
    // An odd key width leaves one channel without rotation.
    assert_exact("retnet", &["key_dim=33", "value_dim=7", "chunk=20"]);
    assert_exact("retnet", &["key_dim=1", "value_dim=1", "chunk=20"]);
    assert_exact(
        "mamba2",
        &["key_dim=9", "value_dim=5", "chunk=30", "conv_width=2"],
    );
    assert_exact(
        "gla",
        &["key_dim=40", "value_dim=24", "chunk=32", "output_gate=none"],
    );
    for name in NAMES {
        for state in ["bf16", "row_fp8"] {
            // Scales of row FP8 divide and multiply by the same number; in f64 nothing is rounded.
            assert_exact(
                name,
                &[
                    "chunk=64",
                    &format!("state={state}"),
                    "key_dim=16",
                    "value_dim=16",
                ],
            );
        }
    }
}

#[test]
fn a_constant_decay_does_not_run_over_the_padding() {
    // 65 and 128 tokens in chunks of 64: the state after 65 tokens has decayed 65 times, not 128 times.
    let run = |tokens: usize| {
        let layer = small("retnet", &[&format!("tokens={tokens}"), "chunk=64"]);
        let built = build(&layer).expect("builds");
        let inputs = seeded_inputs(&built.graph, 3);
        let state = built.graph.output("state").expect("a state");
        let execution = execute(&built.graph, &inputs, &[state], Arithmetic::Exact).expect("runs");
        execution.values[&state].clone()
    };
    let all: f64 = run(65).iter().map(|x| x * x).sum();
    assert!(all > 0.0);
    for chunk in [16, 65, 128] {
        let other = small("retnet", &["tokens=65", &format!("chunk={chunk}")]);
        let built = build(&other).expect("builds");
        let inputs = seeded_inputs(&built.graph, 3);
        let state = built.graph.output("state").expect("a state");
        let execution = execute(&built.graph, &inputs, &[state], Arithmetic::Exact).expect("runs");
        let error = relative_error(&execution.values[&state], &run(65)).expect("one shape");
        assert!(error.within(EXACT), "chunk {chunk}: {error:?}");
    }
}

#[test]
fn matrix_flops_follow_the_closed_forms() {
    // Per token and value head: 2C (dk + dv) + 4 dk dv; a Mamba-2 Gram is shared by the heads of a group.
    for name in NAMES {
        for sizes in [
            vec![],
            vec!["layer.key_dim=128", "layer.value_dim=128"],
            vec!["layer.tokens=1000"],
        ] {
            for chunk in ["layer.chunk=64", "layer.chunk=128"] {
                let mut overrides = sizes.clone();
                overrides.push(chunk);
                overrides.push("numeric.tokens=64");
                let layer = layer(name, &overrides);
                let (c, dk, dv) = (layer.chunk as u64, layer.key_dim as u64, layer.value_dim as u64);
                let heads = layer.value_heads as u64;
                let expected = heads * (2 * c * dv + 4 * dk * dv) + layer.key_heads as u64 * 2 * c * dk;
                let graph = build(&layer).expect("builds").graph;
                let found = core(&graph).matrix_flops.total();
                assert_eq!(found, expected * rows(&layer), "{name} {overrides:?}");
            }
        }
    }
}

#[test]
fn exponentials_of_the_core_follow_the_closed_forms() {
    let count = |name: &str, fields: &[&str]| {
        let layer = layer(name, fields);
        let graph = build(&layer).expect("builds").graph;
        (core(&graph).transcendentals, layer)
    };
    // No decay, or powers of it in tables: none.
    for name in ["linear_attention", "retnet"] {
        assert_eq!(count(name, &[]).0, 0, "{name}");
    }
    // One reciprocal per row and key head normalises.
    let (found, l) = count("linear_attention", &["layer.normaliser=true"]);
    assert_eq!(found, rows(&l) * l.key_heads as u64);
    // Per token and head: pivots dk (1 + C/16), tails 2 dk, softplus 2 dk; e^G_C once per chunk.
    let (found, l) = count("gla", &[]);
    let (heads, dk, nb, n) = (
        l.key_heads as u64,
        l.key_dim as u64,
        l.chunk as u64 / 16,
        l.chunks() as u64,
    );
    assert_eq!(found, heads * dk * (rows(&l) * (1 + nb + 2 + 2) + n));
    // The same with one exponential in the gate.
    let (found, l) = count("rwkv6", &[]);
    let (heads, dk, nb, n) = (
        l.key_heads as u64,
        l.key_dim as u64,
        l.chunk as u64 / 16,
        l.chunks() as u64,
    );
    assert_eq!(found, heads * dk * (rows(&l) * (1 + nb + 2 + 1) + n));
    // Per token and value head: mask C, tails 2, softplus 2; e^G_C once per chunk, e^A_log once.
    let (found, l) = count("mamba2", &[]);
    let (heads, c, n) = (l.value_heads as u64, l.chunk as u64, l.chunks() as u64);
    assert_eq!(found, heads * (rows(&l) * (c + 4) + n + 1));
}

#[test]
fn executed_work_is_accounted_work() {
    for name in NAMES {
        let fields: &[&str] = match name {
            "mamba2" => &["chunk=64", "initial_state=given", "value_heads=4"],
            "linear_attention" => &["normaliser=true", "initial_state=given", "key_dim=32"],
            _ => &["initial_state=given", "key_dim=32", "value_dim=40"],
        };
        let graph = build(&small(name, fields)).expect("builds").graph;
        let keep: Vec<_> = graph.outputs().iter().map(|(_, value)| *value).collect();
        let wide = seeded_inputs(&graph, 5);
        let exact = execute(&graph, &wide, &keep, Arithmetic::Exact).expect("runs");
        assert_eq!(exact.work, stage_work(&graph), "{name}");
        let declared = execute(&graph, &to_f32(&wide), &keep, Arithmetic::Declared).expect("runs");
        assert_eq!(declared.work, stage_work(&graph), "{name}");
        assert_eq!(declared.non_finite, None, "{name}");
    }
}

#[test]
fn stages_only_read_from_stages_before_them() {
    // A kernel of a later row of the stage table cannot feed an earlier one.
    for name in NAMES {
        for fields in [&[][..], &["layer.initial_state=given"][..]] {
            let graph = build(&layer(name, fields)).expect("builds").graph;
            for (id, node) in graph.nodes() {
                for &operand in graph.operands(id) {
                    let source = graph.node(operand.node);
                    let outside = matches!(source.op, Op::Input { .. } | Op::Fill(_) | Op::Identity);
                    assert!(
                        outside || source.stage <= node.stage,
                        "{name}: `{}` ({}) reads `{}` ({})",
                        node.name,
                        node.stage,
                        source.name,
                        source.stage
                    );
                }
            }
        }
    }
}

#[test]
fn flops_are_linear_in_tokens_and_the_graph_is_not() {
    for name in NAMES {
        let at = |tokens: usize| {
            let graph = build(&layer(name, &[&format!("layer.tokens={tokens}")]))
                .expect("builds")
                .graph;
            (graph_work(&graph).matrix_flops.total(), graph.len())
        };
        let (small, nodes) = at(512);
        for factor in [8, 2048] {
            assert_eq!(at(512 * factor), (small * factor as u64, nodes), "{name}");
        }
    }
}

#[test]
fn the_size_of_the_kda_layer_builds() {
    for name in NAMES {
        let heads = if name == "mamba2" {
            "layer.key_heads=1"
        } else {
            "layer.key_heads=32"
        };
        let sizes = [
            heads,
            "layer.value_heads=32",
            "layer.key_dim=128",
            "layer.value_dim=128",
        ];
        let layer = layer(name, &sizes);
        assert_eq!((layer.tokens, layer.model_width), (8192, 1024));
        let graph = build(&layer).expect("builds").graph;
        // Far less than the delta rule at this size: 8.39 MFLOP per token.
        let per_token = core(&graph).matrix_flops.total() as f64 / 8192e6;
        assert!((2.0..5.5).contains(&per_token), "{name}: {per_token}");
    }
}

/// Largest relative error of one rounding to bf16 (8 significant bits) and to f32 (24).
const BF16: f64 = 1.0 / 512.0;
const F32: f64 = 1.0 / 16_777_216.0;

#[test]
fn bf16_errs_as_its_mantissa_says() {
    for name in NAMES {
        let sample = [
            "layer.model_width=96",
            "numeric.tokens=256",
            "layer.chunk=64",
            "layer.state=bf16",
        ];
        let (workload, _) = workload::load(name, &sample).expect("loads");
        let result = check(&workload, Extent::Sample).expect("runs");
        assert_eq!(result.non_finite, None, "{name}");
        for error in [result.output_rms_error, result.state_rms_error.expect("a state")] {
            // An output sees about ten roundings, of which each errs by 0.4 of its largest error in the mean square, and more where a decay is
            // the exponential of a rounded projection.
            assert!((0.4 * BF16..8.0 * BF16).contains(&error), "{name}: {error:e}");
        }
    }
}

#[test]
fn f32_errs_as_its_mantissa_says() {
    for name in NAMES {
        let built = build(&small(name, &["chunk=64", "key_dim=32", "value_dim=32"])).expect("builds");
        let keep = ["o", "state"].map(|name| built.graph.output(name).expect("declared"));
        let wide = seeded_inputs(&built.graph, 7);
        let exact = execute(&built.graph, &wide, &keep, Arithmetic::Exact).expect("runs");
        // Arithmetic in f32 without any rounding to narrower formats.
        let single = execute(&built.graph, &to_f32(&wide), &keep, Arithmetic::Exact).expect("runs");
        for value in keep {
            let error = relative_error(&single.values[&value], &exact.values[&value]).expect("one shape");
            // Sums of up to 64 terms on top of each other.
            assert!((0.1 * F32..64.0 * F32).contains(&error.rms), "{name}: {error:?}");
        }
    }
}
