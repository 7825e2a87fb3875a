//! Diagonal plus low rank (RWKV7): agreement with the token recurrence, work, errors of formats.

use tpusim::graph::work::{graph_work, stage_work};
use tpusim::graph::{Graph, Op, Stage, Work};
use tpusim::layer::Layer;
use tpusim::mechanisms::{GramExponent, build};
use tpusim::numerics::{Arithmetic, execute, relative_error, seeded_inputs, to_f32};
use tpusim::study::{Extent, check};
use tpusim::workload;

const EXACT: f64 = 1e-10;

fn layer(overrides: &[&str]) -> Layer {
    workload::load("rwkv7", overrides)
        .unwrap_or_else(|e| panic!("{overrides:?}: {}", e.render()))
        .0
        .layer
}

fn assert_exact(fields: &[&str]) {
    let mut all: Vec<String> = [
        "layer.model_width=48",
        "layer.initial_state=given",
        "numeric.tokens=200",
        "numeric.key_heads=2",
    ]
    .map(str::to_owned)
    .to_vec();
    all.extend(fields.iter().map(|f| format!("layer.{f}")));
    let (workload, _) =
        workload::load("rwkv7", &all).unwrap_or_else(|e| panic!("{fields:?}: {}", e.render()));
    let result = check(&workload, Extent::Sample).unwrap_or_else(|e| panic!("{fields:?}: {e}"));
    let error = result.exact_rel_error;
    assert!(error <= EXACT, "{fields:?}: {error:e}");
}

fn stages(graph: &Graph) -> impl Fn(Stage) -> Work {
    let work = stage_work(graph);
    move |stage| {
        work.iter()
            .find(|(s, _)| *s == stage)
            .expect("every stage is listed")
            .1
    }
}

#[test]
fn chunks_agree_with_the_recurrence() {
    for chunk in [16, 64, 128] {
        assert_exact(&[&format!("chunk={chunk}")]);
    }
    assert_exact(&["initial_state=zero"]);
    assert_exact(&["chunk=8"]);
    assert_exact(&["key_dim=24", "value_dim=40", "chunk=32"]);
    assert_exact(&["key_heads=2", "value_heads=6", "key_dim=32", "value_dim=16"]);
    for state in ["bf16", "row_fp8"] {
        assert_exact(&[&format!("state={state}"), "key_dim=16", "value_dim=16"]);
    }
}

#[test]
fn every_gram_variant_agrees() {
    for gram in ["pivot", "pivot_causal", "broadcast", "folded", "halving"] {
        for chunk in [16, 64] {
            let (gram, chunk) = (format!("gram={gram}"), format!("chunk={chunk}"));
            assert_exact(&[&gram, &chunk, "key_dim=32", "value_dim=16"]);
        }
    }
    assert_exact(&["gram=pivot", "pivot=first", "key_dim=32"]);
}

#[test]
fn every_exact_inverse_agrees() {
    for inverse in [
        "row_substitution",
        "blocked16",
        "product",
        "newton",
        "two_level",
        "block_doubling",
        "packed_doubling",
    ] {
        assert_exact(&[&format!("inverse={inverse}"), "key_dim=32", "value_dim=16"]);
    }
}

#[test]
fn matrix_flops_follow_the_closed_form() {
    // 8C dk + 8C dv + 8 dk dv per token and head, and 2 (log2 C - 1) products of C x C x C per chunk.
    for overrides in [
        vec![],
        vec!["layer.key_dim=128", "layer.value_dim=128"],
        vec!["layer.key_dim=32", "layer.value_dim=48", "layer.chunk=128"],
        vec!["layer.tokens=1000"],
    ] {
        let mut overrides = overrides;
        overrides.extend(["layer.inverse=block_doubling", "numeric.tokens=64"]);
        let layer = layer(&overrides);
        let (c, dk, dv) = (layer.chunk as u64, layer.key_dim as u64, layer.value_dim as u64);
        let inverse = 4 * (u64::from(c.ilog2()) - 1) * c * c;
        let per_token = 8 * c * dk + 8 * c * dv + 8 * dk * dv + inverse;
        let rows = (layer.batch * layer.padded_tokens() * layer.key_heads) as u64;
        let graph = build(&layer).expect("builds").graph;
        let work = stages(&graph);
        let found: u64 = [
            Stage::Gates,
            Stage::Gram,
            Stage::Inverse,
            Stage::WyFactors,
            Stage::StateScan,
            Stage::Output,
        ]
        .map(|stage| work(stage).matrix_flops.total())
        .iter()
        .sum();
        assert_eq!(found, per_token * rows, "{overrides:?}");
        // Four Gram matrices.
        assert_eq!(work(Stage::Gram).matrix_flops.total(), 8 * c * dk * rows);
    }
}

#[test]
fn four_grams_share_their_exponentials() {
    // Per token and channel: rows of two decays, C/16 columns; tails e^Gx, e^G and e^(G_C - G); e^G_C once per chunk.
    let layer = layer(&[]);
    let graph = build(&layer).expect("builds").graph;
    let work = stages(&graph);
    let channels = (layer.key_heads * layer.key_dim) as u64;
    let (tokens, blocks, chunks) = (
        layer.tokens as u64,
        layer.chunk as u64 / 16,
        layer.chunks() as u64,
    );
    assert_eq!(
        work(Stage::Gram).transcendentals,
        channels * tokens * (2 + blocks)
    );
    let tails: u64 = [Stage::WyFactors, Stage::StateScan, Stage::Output]
        .map(|stage| work(stage).transcendentals)
        .iter()
        .sum();
    assert_eq!(tails, channels * (3 * tokens + chunks));
    // The sigmoid of the decay.
    assert_eq!(work(Stage::Gates).transcendentals, 2 * channels * tokens);
}

#[test]
fn a_whole_chunk_of_decay_stays_below_the_overflow_limit() {
    let folded = build(&layer(&["layer.gram=folded", "layer.chunk=128"])).expect("builds");
    let exponent: GramExponent = folded.core.gram_exponent.expect("a limit");
    assert_eq!(exponent.rows, 64);
    // 64 e^(-1/2) nats.
    assert!((exponent.worst() - 38.818).abs() < 1e-3, "{}", exponent.worst());
}

#[test]
fn executed_work_is_accounted_work() {
    let layer = Layer {
        key_heads: 1,
        value_heads: 1,
        ..layer(&[
            "layer.model_width=48",
            "layer.tokens=100",
            "numeric.tokens=100",
            "layer.initial_state=given",
        ])
    };
    let graph = build(&layer).expect("builds").graph;
    let keep: Vec<_> = graph.outputs().iter().map(|(_, value)| *value).collect();
    let wide = seeded_inputs(&graph, 5);
    let exact = execute(&graph, &wide, &keep, Arithmetic::Exact).expect("runs");
    assert_eq!(exact.work, stage_work(&graph));
    let declared = execute(&graph, &to_f32(&wide), &keep, Arithmetic::Declared).expect("runs");
    assert_eq!(declared.work, stage_work(&graph));
    assert_eq!(declared.non_finite, None);
}

#[test]
fn stages_only_read_from_stages_before_them() {
    let graph = build(&layer(&["layer.initial_state=given"]))
        .expect("builds")
        .graph;
    for (id, node) in graph.nodes() {
        for &operand in graph.operands(id) {
            let source = graph.node(operand.node);
            let outside = matches!(source.op, Op::Input { .. } | Op::Fill(_) | Op::Identity);
            assert!(
                outside || source.stage <= node.stage,
                "`{}` ({}) reads `{}` ({})",
                node.name,
                node.stage,
                source.name,
                source.stage
            );
        }
    }
}

#[test]
fn flops_are_linear_in_tokens_and_the_graph_is_not() {
    let at = |tokens: usize| {
        let graph = build(&layer(&[&format!("layer.tokens={tokens}")]))
            .expect("builds")
            .graph;
        (graph_work(&graph).matrix_flops.total(), graph.len())
    };
    let (small, nodes) = at(512);
    for factor in [8, 2048] {
        assert_eq!(at(512 * factor), (small * factor as u64, nodes));
    }
}

/// Largest relative error of one rounding to bf16 (8 significant bits) and to f32 (24).
const BF16: f64 = 1.0 / 512.0;
const F32: f64 = 1.0 / 16_777_216.0;

#[test]
fn formats_err_as_their_mantissas_say() {
    let sample = ["layer.model_width=96", "numeric.tokens=256", "layer.state=bf16"];
    let (workload, _) = workload::load("rwkv7", &sample).expect("loads");
    let result = check(&workload, Extent::Sample).expect("runs");
    assert_eq!(result.non_finite, None);
    for error in [result.output_rms_error, result.state_rms_error.expect("a state")] {
        assert!((0.4 * BF16..8.0 * BF16).contains(&error), "{error:e}");
    }
    let built = build(&workload.numeric_layer()).expect("builds");
    let keep = ["o", "state"].map(|name| built.graph.output(name).expect("declared"));
    let wide = seeded_inputs(&built.graph, 7);
    let exact = execute(&built.graph, &wide, &keep, Arithmetic::Exact).expect("runs");
    let single = execute(&built.graph, &to_f32(&wide), &keep, Arithmetic::Exact).expect("runs");
    for value in keep {
        let error = relative_error(&single.values[&value], &exact.values[&value]).expect("one shape");
        assert!((0.1 * F32..64.0 * F32).contains(&error.rms), "{error:?}");
    }
}
