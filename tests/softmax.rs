//! Softmax attention and latent attention: the block graph against attention row by row in f64, and its work against closed forms.

use std::collections::BTreeMap;

use tpusim::graph::work::{graph_work, stage_work};
use tpusim::graph::{Graph, Op, Stage, Value, Work};
use tpusim::kernels::{Kernel, Plan, Program, lower};
use tpusim::layer::Layer;
use tpusim::mechanisms::{Recurrence, build};
use tpusim::numerics::{Arithmetic, execute, seeded_inputs};
use tpusim::study::{Extent, check};
use tpusim::workload;

/// Far above f64 rounding, far below any error of the formulas.
const EXACT: f64 = 1e-10;

/// A layer small enough to execute in a test, with blocks small enough that 200 tokens hold many.
const SMALL: [&str; 6] = [
    "layer.model_width=48",
    "layer.value_dim=24",
    "layer.block_q=32",
    "layer.block_kv=32",
    "numeric.tokens=200",
    "numeric.key_heads=1",
];

fn load(name: &str, overrides: &[&str]) -> workload::Workload {
    workload::load(name, overrides)
        .unwrap_or_else(|e| panic!("{name} {overrides:?}: {}", e.render()))
        .0
}

fn assert_exact(name: &str, fields: &[&str]) {
    let mut overrides = SMALL.to_vec();
    overrides.push(if name == "mla" {
        "layer.key_dim=48"
    } else {
        "layer.key_dim=32"
    });
    if name == "mla" {
        overrides.extend([
            "layer.latent_rank=40",
            "layer.decoupled_dim=16",
            "numeric.key_heads=3",
        ]);
    }
    overrides.extend(fields);
    let workload = load(name, &overrides);
    let result = check(&workload, Extent::Sample).unwrap_or_else(|e| panic!("{name} {fields:?}: {e}"));
    assert!(
        result.exact_rel_error <= EXACT,
        "{name} {fields:?}: {:e}",
        result.exact_rel_error
    );
    assert_eq!(result.non_finite, None, "{name} {fields:?}");
    assert_eq!(result.state_rel_error, None);
}

#[test]
fn every_grouping_agrees() {
    for (queries, keys) in [(32, 8), (8, 8), (8, 1), (6, 2)] {
        assert_exact(
            "softmax_gqa",
            &[
                &format!("layer.query_heads={queries}"),
                &format!("layer.key_heads={keys}"),
                &format!("numeric.key_heads={}", keys.min(2)),
            ],
        );
    }
}

#[test]
fn every_block_shape_and_partial_block_agrees() {
    for (block_q, block_kv) in [
        (32, 32),
        (64, 16),
        (16, 64),
        (48, 32),
        (200, 200),
        (512, 512),
        (7, 11),
    ] {
        for tokens in [200, 192, 1, 33] {
            let fields = [
                format!("layer.block_q={block_q}"),
                format!("layer.block_kv={block_kv}"),
                format!("numeric.tokens={tokens}"),
            ];
            let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
            assert_exact("softmax_gqa", &fields);
            assert_exact("softmax_gqa", &[&fields[..], &["layer.causal=false"]].concat());
        }
    }
}

#[test]
fn every_window_agrees() {
    for window in [1, 5, 31, 32, 33, 64, 100, 1000] {
        let window = format!("layer.window={window}");
        assert_exact("softmax_window", &[&window]);
        assert_exact(
            "softmax_window",
            &[&window, "layer.block_q=48", "layer.block_kv=20"],
        );
        assert_exact("softmax_window", &[&window, "layer.ssmax=true"]);
    }
}

#[test]
fn every_preparation_of_queries_and_keys_agrees() {
    for rotary in ["0", "0.25", "0.5", "1"] {
        let rotary = format!("layer.rotary={rotary}");
        assert_exact("softmax_gqa", &[&rotary]);
        assert_exact(
            "softmax_gqa",
            &[&rotary, "layer.ssmax=true", "layer.qk_norm=true"],
        );
    }
    assert_exact("softmax_gqa", &["layer.scale=3.5"]);
    assert_exact("softmax_gqa", &["layer.output_gate=full"]);
    assert_exact("softmax_gqa", &["layer.output_gate=low_rank"]);
}

#[test]
fn latent_attention_agrees() {
    for fields in [
        vec!["layer.rotary=0"],
        vec!["layer.rotary=1"],
        vec!["layer.rotary=0.5", "layer.block_q=48", "layer.block_kv=20"],
        vec!["layer.ssmax=true", "layer.window=50"],
        vec!["layer.output_gate=full"],
    ] {
        assert_exact("mla", &fields);
    }
}

#[test]
fn bf16_errs_as_its_mantissa_says() {
    for name in ["softmax_gqa", "mla"] {
        let overrides = [
            "layer.model_width=96",
            "numeric.tokens=300",
            "layer.block_q=64",
            "layer.block_kv=64",
        ];
        let result = check(&load(name, &overrides), Extent::Sample).expect("runs");
        assert!(
            (5e-4..2e-2).contains(&result.output_rms_error),
            "{name} {:e}",
            result.output_rms_error
        );
        assert_eq!(result.non_finite, None);
    }
}

/// The layer executed in f64 with the values called `names`, row-major.
fn values(layer: &Layer, names: &[&str]) -> Vec<Vec<f64>> {
    let graph = build(layer).expect("builds").graph;
    let keep: Vec<Value> = names
        .iter()
        .map(|name| {
            let found = graph.nodes().find(|(_, node)| node.name == *name);
            Value {
                node: found.unwrap_or_else(|| panic!("no node `{name}`")).0,
                port: 0,
            }
        })
        .collect();
    let run = execute(&graph, &seeded_inputs(&graph, 5), &keep, Arithmetic::Exact).expect("runs");
    keep.iter()
        .map(|value| run.values[value].iter().copied().collect())
        .collect()
}

#[test]
fn rotation_turns_pairs_by_their_angle() {
    // 12 of 48 channels: pairs (c, c + 6) turn by t 10000^(-c / 6). The tables are f32.
    let layer = load(
        "softmax_gqa",
        &[
            "layer.model_width=16",
            "layer.key_dim=48",
            "layer.rotary=0.25",
            "layer.tokens=40",
            "layer.key_heads=1",
            "layer.query_heads=2",
            "numeric.tokens=40",
        ],
    )
    .layer;
    let got = values(&layer, &["q_f32", "q_turned"]);
    for t in 0..40 {
        for h in 0..2 {
            let at = (t * 2 + h) * 48;
            let (x, y) = (&got[0][at..at + 48], &got[1][at..at + 48]);
            for c in 0..6 {
                let angle = t as f64 * 10_000_f64.powf(-(c as f64) / 6.0);
                let (sine, cosine) = angle.sin_cos();
                assert!((y[c] - (x[c] * cosine - x[c + 6] * sine)).abs() < 1e-6);
                assert!((y[c + 6] - (x[c + 6] * cosine + x[c] * sine)).abs() < 1e-6);
            }
            assert_eq!(x[12..], y[12..]);
        }
    }
}

#[test]
fn ssmax_scales_by_the_logarithm_of_the_visible_keys() {
    let fields = [
        "layer.model_width=16",
        "layer.key_dim=32",
        "layer.ssmax=true",
        "layer.window=9",
        "layer.tokens=40",
        "layer.key_heads=1",
        "layer.query_heads=2",
        "numeric.tokens=40",
    ];
    let layer = load("softmax_window", &fields).layer;
    let got = values(&layer, &["q_turned", "q_scaled", "ssmax_s"]);
    for t in 0..40_usize {
        for h in 0..2 {
            for c in 0..32 {
                let at = (t * 2 + h) * 32 + c;
                let n = (t + 1).min(9) as f64;
                let expected = got[0][at] * got[2][h] * n.ln() / 32_f64.sqrt();
                assert!((got[1][at] - expected).abs() < 1e-12);
            }
        }
    }
}

fn stage(graph: &Graph, stage: Stage) -> Work {
    stage_work(graph)[stage as usize].1
}

fn layer(name: &str, overrides: &[&str]) -> Layer {
    load(name, overrides).layer
}

#[test]
fn work_of_the_blocks_follows_the_closed_forms() {
    // dh = 128, 32 query heads, square blocks b that divide T, N = T / b. Full: N^2 pairs; causal: N (N + 1) / 2, that is half of them and half of
    // the diagonal. Per pair and head: two products of 2 b^2 dh FLOPs, b^2 exponentials and b rescales; one reciprocal per row at the end.
    let heads = 32_u64;
    for (tokens, block) in [(8192_u64, 512_u64), (4096, 256), (512, 512)] {
        let n = tokens / block;
        for (causal, pairs) in [(true, n * (n + 1) / 2), (false, n * n)] {
            let fields = [
                format!("layer.tokens={tokens}"),
                format!("layer.block_q={block}"),
                format!("layer.block_kv={block}"),
                format!("layer.causal={causal}"),
                "numeric.tokens=64".to_owned(),
            ];
            let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
            let work = stage(
                &build(&layer("softmax_gqa", &fields)).expect("builds").graph,
                Stage::Attention,
            );
            assert_eq!(work.matrix_flops.total(), 4 * 128 * block * block * pairs * heads);
            if causal {
                let half = 2 * tokens * tokens * 128 * heads;
                let diagonal = 2 * tokens * block * 128 * heads;
                assert_eq!(work.matrix_flops.total(), half + diagonal);
            } else {
                assert_eq!(work.matrix_flops.total(), 4 * tokens * tokens * 128 * heads);
            }
            let exponentials = (block * block + block) * pairs * heads;
            assert_eq!(work.transcendentals, exponentials + tokens * heads);
            // Per score: maximum, subtraction, sum, rounding of P (4), and the mask on the diagonal; per row and pair: maximum, difference, two for
            // the sum, two per value channel; at the end per row: one test for zero, two per channel.
            let masked = if causal { n * block * block } else { 0 };
            let rows = pairs * block * (4 + 2 * 128) + tokens * (1 + 2 * 128);
            let scores = 4 * pairs * block * block + masked;
            assert_eq!(work.vector_ops.total(), (scores + rows) * heads);
        }
    }
}

#[test]
fn a_window_costs_its_width() {
    // Blocks of 128 and a window of 1024 keys: a query block sees nine key blocks, the first eight query blocks 1 to 8; of the nine the first and the
    // last are partial.
    let fields = ["layer.block_q=128", "layer.block_kv=128"];
    let layer = layer("softmax_window", &fields);
    let graph = build(&layer).expect("builds").graph;
    let pairs = 36 + 9 * (64 - 8);
    let work = stage(&graph, Stage::Attention);
    assert_eq!(work.matrix_flops.total(), 4 * 128 * 128 * 128 * pairs * 32);
    let about = 4.0 * 8192.0 * 1024.0 * 128.0 * 32.0;
    assert!((work.matrix_flops.total() as f64 / about - 1.0).abs() < 0.07);
    let trips: Vec<usize> = graph
        .nodes()
        .filter_map(|(_, node)| match &node.op {
            Op::Scan(scan) => Some(scan.trips),
            _ => None,
        })
        .collect();
    // Partial pairs: 64 on the diagonal, 56 at the edge of the window.
    assert_eq!(trips, [pairs as usize - 120, 120]);
}

#[test]
fn latent_attention_has_192_channels_in_scores_and_128_in_values() {
    let graph = build(&layer("mla", &[])).expect("builds").graph;
    let pairs = 16 * 17 / 2;
    let work = stage(&graph, Stage::Attention);
    assert_eq!(
        work.matrix_flops.total(),
        2 * 512 * 512 * (192 + 128) * pairs * 32
    );
    // Projections per token: queries d 32 192, latent d 576, keys and values from it 512 32 256.
    let projected = stage(&graph, Stage::Projections).matrix_flops.total();
    assert_eq!(
        projected,
        2 * 8192 * (2304 * 32 * 192 + 2304 * 576 + 512 * 32 * 256)
    );
    let last = stage(&graph, Stage::OutputProjection).matrix_flops.total();
    assert_eq!(last, 2 * 8192 * 32 * 128 * 2304);
}

#[test]
fn rotation_takes_three_operations_per_channel() {
    let with = |rotary: &str| {
        let layer = layer(
            "softmax_gqa",
            &[&format!("layer.rotary={rotary}"), "layer.qk_norm=true"],
        );
        stage(&build(&layer).expect("builds").graph, Stage::Convolution)
    };
    let channels = (32 + 8) * 128 * 8192_u64;
    let (none, half, all) = (with("0"), with("0.5"), with("1"));
    assert_eq!(
        half.vector_ops.total() - none.vector_ops.total(),
        3 * channels / 2
    );
    assert_eq!(all.vector_ops.total() - none.vector_ops.total(), 3 * channels);
    // One reciprocal root per head and token.
    assert_eq!(none.transcendentals, (32 + 8) * 8192);
}

#[test]
fn executed_and_accounted_work_are_equal() {
    let cases: [(&str, &[&str]); 5] = [
        ("softmax_gqa", &["layer.qk_norm=true"]),
        ("softmax_gqa", &["layer.causal=false", "layer.rotary=0.5"]),
        (
            "softmax_window",
            &["layer.window=50", "layer.ssmax=true", "layer.block_kv=48"],
        ),
        (
            "mla",
            &[
                "layer.key_dim=40",
                "layer.decoupled_dim=16",
                "layer.latent_rank=24",
            ],
        ),
        (
            "mla",
            &["layer.key_dim=40", "layer.decoupled_dim=16", "layer.rotary=1"],
        ),
    ];
    for (name, fields) in cases {
        let mut overrides = SMALL.to_vec();
        overrides.extend(fields);
        let layer = load(name, &overrides).numeric_layer();
        let graph = build(&layer).expect("builds").graph;
        let run = execute(&graph, &seeded_inputs(&graph, 3), &[], Arithmetic::Exact).expect("runs");
        assert_eq!(run.work, stage_work(&graph), "{name} {fields:?}");
    }
}

#[test]
fn the_graph_does_not_grow_with_the_tokens() {
    let sizes = |name: &str| {
        let nodes: Vec<usize> = [8192, 65_536, 1 << 20]
            .iter()
            .map(|tokens| {
                build(&layer(name, &[&format!("layer.tokens={tokens}")]))
                    .expect("builds")
                    .graph
                    .len()
            })
            .collect();
        nodes
    };
    for name in ["softmax_gqa", "softmax_window", "mla"] {
        let nodes = sizes(name);
        assert!(nodes.iter().all(|&n| n == nodes[0]), "{name} {nodes:?}");
    }
    // Four times the blocks, sixteen times the pairs, up to the diagonal.
    let flops = |tokens: u64| {
        let layer = layer("softmax_gqa", &[&format!("layer.tokens={tokens}")]);
        let graph = build(&layer).expect("builds").graph;
        (
            stage(&graph, Stage::Attention).matrix_flops.total(),
            graph_work(&graph).matrix_flops.total(),
        )
    };
    let ((core, all), (core4, all4)) = (flops(8192), flops(4 * 8192));
    let expected = 64.0 * 65.0 / (16.0 * 17.0);
    assert!((core4 as f64 / core as f64 - expected).abs() < 1e-9);
    assert_eq!(all4 - core4, 4 * (all - core));
}

/// Kernels of the fused plan by row.
fn kernels(layer: &Layer) -> BTreeMap<String, Kernel> {
    let built = build(layer).expect("builds");
    let plan = Plan::named("fused", Program { heads: 1, chunks: 1 }).expect("a plan");
    let kernels = lower(&built.graph, &plan, built.core.value, 0.0);
    kernels
        .into_iter()
        .map(|kernel| (kernel.label.clone(), kernel))
        .collect()
}

#[test]
fn bytes_of_the_attention_kernel() {
    let layer = layer("softmax_gqa", &[]);
    let kernel = &kernels(&layer)["attention"];
    // At least q and o, 2 T nq dh b, and k and v once, 2 T nkv dh b.
    assert_eq!(kernel.hbm_bytes(), 2 * 8192 * 128 * 2 * (32 + 8));
    // Streamed: every query head reads a block of keys and one of values for each of its 136 pairs.
    let streamed = 2 * 136 * 512 * 128 * 2 * 32;
    assert_eq!(kernel.streaming().hbm_bytes(), 2 * 8192 * 128 * 2 * 32 + streamed);
    // Keys and values of one key head.
    assert_eq!(kernel.resident_bytes(), 2 * 8192 * 128 * 2);
    // Query blocks of all heads side by side, each with 8.5 key blocks on average.
    assert_eq!((kernel.grid.parallel, kernel.grid.sequential), (32 * 16, 9));
    // m, l and the accumulator of a query block in f32.
    assert_eq!(kernel.carried_bytes, 4 * 512 * (128 + 2));
}

#[test]
fn kernels_of_attention_are_called_by_what_they_do() {
    let names = |layer: &Layer| kernels(layer).into_keys().collect::<Vec<_>>();
    assert_eq!(
        names(&layer("softmax_gqa", &[])),
        ["attention", "op1", "op2", "op7c"]
    );
    assert_eq!(
        names(&layer("softmax_gqa", &["layer.rotary=0"])),
        ["attention", "op1", "op7c"]
    );
    assert_eq!(
        names(&layer("softmax_gqa", &["layer.output_gate=full"])),
        ["attention", "op1", "op2", "op7b-c"]
    );
    assert_eq!(names(&layer("kda", &[])), ["op1", "op2-7a", "op7b-c"]);
}

#[test]
fn a_cache_grows_and_a_state_does_not() {
    // 2 nkv dh b per token; latent: rank plus decoupled channels.
    let gqa = layer("softmax_gqa", &[]);
    assert_eq!(gqa.cache_bytes_per_token(), 2 * 8 * 128 * 2);
    assert_eq!(gqa.cache_bytes(131_072), 131_072 * 4096);
    let window = layer("softmax_window", &[]);
    assert_eq!(window.cache_bytes(131_072), 1024 * 4096);
    assert_eq!(layer("mla", &[]).cache_bytes_per_token(), (512 + 64) * 2);
    assert_eq!((gqa.state_bytes(), gqa.convolution_state_bytes()), (0, 0));
    for tokens in [1024, 131_072] {
        let tokens = format!("layer.tokens={tokens}");
        let kda = layer("kda", &[&tokens]);
        assert_eq!(kda.state_bytes(), 2 << 20);
        assert_eq!(kda.convolution_state_bytes(), 3 * 3 * 32 * 128 * 2);
        assert_eq!(kda.cache_bytes(131_072), 0);
        assert_eq!(
            layer("sla_r4", &[&tokens, "layer.state=bf16"]).state_bytes(),
            2 << 20
        );
        let fp8 = layer("sla_r4", &[&tokens, "layer.state=row_fp8"]).state_bytes();
        assert_eq!(fp8, (1 << 20) + (8 << 10));
    }
}

#[test]
fn fields_without_meaning_are_refused() {
    for (name, field, expected) in [
        ("softmax_gqa", "layer.chunk=64", "`softmax` does not read `chunk`"),
        (
            "softmax_gqa",
            "layer.value_heads=8",
            "`softmax` does not read `value_heads`",
        ),
        ("kda", "layer.window=64", "`kda` does not read `window`"),
        (
            "softmax_gqa",
            "layer.query_heads=30",
            "expected a multiple of the 8 key heads",
        ),
        ("softmax_window", "layer.causal=false", "expected `causal: true`"),
        (
            "softmax_gqa",
            "layer.rotary=0.01",
            "an even number of the 128 channels",
        ),
        (
            "softmax_gqa",
            "layer.rotary=1.5",
            "an even number of the 128 channels",
        ),
        ("mla", "layer.decoupled_dim=192", "less than the 192 channels"),
        ("mla", "layer.qk_norm=true", "`mla` does not read `qk_norm`"),
        ("softmax_gqa", "layer.scale=-1", "above zero"),
        ("softmax_gqa", "layer.block_q=0", "a whole number from 1"),
    ] {
        let error = workload::load(name, &[field]).expect_err(field).render();
        assert!(error.contains(expected), "{field}: {error}");
    }
}

#[test]
fn the_recurrence_of_attention_starts_from_its_operands() {
    let built = build(&layer("softmax_gqa", &[])).expect("builds");
    let Recurrence::Softmax(inputs) = built.core.recurrence else {
        panic!("not attention");
    };
    assert_eq!(built.graph.ty(inputs.query).shape.dims(), [1, 8, 4, 16, 512, 128]);
    assert_eq!(built.graph.ty(inputs.key).shape.dims(), [1, 8, 1, 16, 512, 128]);
    assert_eq!(built.core.final_state, None);
}
