//! Work of the shipped layers against closed forms.
//!
//! Per key head, chunk of `C` rows, key width `dk`, packed value width `P`, inverse by `2 (log2 C - 1)` dense products:
//! `6 C dk + 4 C P + 6 dk P + 4 (log2 C - 1) C^2` matrix FLOPs per token for everything between the projections.

use tpusim::graph::work::{graph_work, node_work, stage_work};
use tpusim::graph::{Graph, Op, Stage, Work};
use tpusim::kernels::{OpKind, Plan, Program, lower, lower_compiled};
use tpusim::layer::{GramVariant, InverseVariant, Layer};
use tpusim::mechanisms::build;
use tpusim::workload;

fn layer(name: &str, overrides: &[&str]) -> Layer {
    workload::load(name, overrides).expect("shipped workload").0.layer
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

fn core_flops(graph: &Graph) -> u64 {
    let work = stages(graph);
    [
        Stage::Gates,
        Stage::Gram,
        Stage::Inverse,
        Stage::WyFactors,
        Stage::StateScan,
        Stage::Output,
    ]
    .map(|stage| work(stage).matrix_flops.total())
    .iter()
    .sum()
}

fn closed_form(layer: &Layer) -> u64 {
    let packed = layer.mechanism.packed;
    let (heads, p) = if packed {
        (layer.key_heads, layer.sharing() * layer.value_dim)
    } else {
        (layer.value_heads, layer.value_dim)
    };
    let (c, dk) = (layer.chunk, layer.key_dim);
    let log = c.ilog2() as usize;
    let per_token = 6 * c * dk + 4 * c * p + 6 * dk * p + 4 * (log - 1) * c * c;
    (per_token * heads * layer.batch * layer.padded_tokens()) as u64
}

#[test]
fn matrix_flops_of_the_core_follow_the_closed_form() {
    for (name, chunk) in [
        ("kda", 64),
        ("kda", 128),
        ("sla_r4", 64),
        ("sla_r4", 128),
        ("sla_r2", 64),
        ("gdn", 64),
    ] {
        for inverse in ["block_doubling", "product", "newton", "two_level"] {
            let layer = layer(
                name,
                &[
                    &format!("layer.chunk={chunk}"),
                    &format!("layer.inverse={inverse}"),
                    &format!("program.tokens={chunk}"),
                ],
            );
            let graph = build(&layer).expect("builds").graph;
            assert_eq!(
                core_flops(&graph),
                closed_form(&layer),
                "{name} C={chunk} {inverse}"
            );
        }
    }
}

#[test]
fn matrix_megaflops_per_token_match_the_worked_table() {
    // At d = 2048, 32 value heads, C = 64: projections of q, k, v; core; output projection.
    let table = [
        ("kda", 50.33, 8.39, 16.78),
        ("sla_r2", 50.33, 10.22, 16.78),
        ("sla_r4", 33.55, 8.78, 16.78),
    ];
    for (name, qkv, core, out) in table {
        let layer = layer(name, &["layer.model_width=2048", "layer.inverse=block_doubling"]);
        let graph = build(&layer).expect("builds").graph;
        let per_token = |flops: u64| flops as f64 / layer.tokens as f64 / 1e6;
        let projection = graph
            .nodes()
            .find(|(_, node)| node.name == "qkv")
            .expect("a projection")
            .0;
        let projected = tpusim::graph::work::node_work(&graph, projection)
            .matrix_flops
            .total();
        assert!(
            (per_token(projected) - qkv).abs() < 0.005,
            "{name} qkv {}",
            per_token(projected)
        );
        assert!(
            (per_token(core_flops(&graph)) - core).abs() < 0.005,
            "{name} core"
        );
        let last = stages(&graph)(Stage::OutputProjection).matrix_flops.total();
        assert!((per_token(last) - out).abs() < 0.005, "{name} output projection");
    }
}

#[test]
fn transcendentals_per_token_match_the_worked_table() {
    // KDA: gates 8192, pivots 20480, tails 12288; SLA: 7 G per key head. Not in the table: two per step size, the decay of
    // the whole chunk once per chunk, and one per head for the decay rate.
    for (name, table) in [("kda", 40_960_u64), ("sla_r2", 448), ("sla_r4", 224)] {
        let layer = layer(name, &[]);
        let graph = build(&layer).expect("builds").graph;
        let work = stages(&graph);
        let counted: u64 = [
            Stage::Gates,
            Stage::Gram,
            Stage::WyFactors,
            Stage::StateScan,
            Stage::Output,
        ]
        .map(|stage| work(stage).transcendentals)
        .iter()
        .sum();
        let (decays, steps) = if layer.mechanism.packed {
            (layer.key_heads * layer.decay_tiles, layer.key_heads)
        } else {
            (layer.key_heads * layer.key_dim, layer.value_heads)
        };
        let beside = 2 * steps * layer.tokens + decays * layer.chunks() + layer.key_heads;
        assert_eq!(counted, table * layer.tokens as u64 + beside as u64, "{name}");
    }
}

#[test]
fn gram_variants_have_the_transcendentals_of_their_formulas() {
    // Per head and chunk: scalar mask C^2; broadcast C^2 dk; pivots C dk (1 + NB); folded 2 C G; tile masks G C^2; causal pivots
    // 136 NB dk on the diagonal plus 16 (NB - 1) dk + 8 NB (NB - 1) dk below it; halving 2 C dk, NB dk for each of
    // log2 NB sizes, and from pivots to either end of the chunk.
    let (c, dk, nb, g) = (64_u64, 128_u64, 4_u64, 4_u64);
    let kda = |gram| layer("kda", &[&format!("layer.gram={gram}")]);
    let sla = |gram| {
        layer(
            "sla_r4",
            &[
                "layer.key_dim=128",
                &format!("layer.gram={gram}"),
                &format!("layer.decay_tiles={g}"),
            ],
        )
    };
    let cases = [
        (layer("gdn", &["layer.gram=scalar_mask"]), c * c),
        (kda("broadcast"), c * c * dk),
        (kda("pivot"), c * dk * (1 + nb)),
        (
            kda("pivot_causal"),
            136 * nb * dk + 16 * (nb - 1) * dk + 8 * nb * (nb - 1) * dk,
        ),
        (kda("folded"), 2 * c * dk),
        (kda("halving"), 2 * c * dk + (2 + 2) * nb * dk),
        (sla("folded"), 2 * c * g),
        (sla("tile_masks"), g * c * c),
    ];
    for (layer, expected) in cases {
        let graph = build(&layer).expect("builds").graph;
        let heads = layer.key_heads as u64 * layer.chunks() as u64;
        assert_eq!(
            stages(&graph)(Stage::Gram).transcendentals,
            expected * heads,
            "{:?}",
            layer.gram
        );
    }
    // 88 064 is the figure printed for causal pivots at C = 64, dk = 128.
    assert_eq!(
        136 * nb * dk + 16 * (nb - 1) * dk + 8 * nb * (nb - 1) * dk,
        88_064
    );
}

#[test]
fn gram_products_below_the_diagonal_skip_the_upper_triangle() {
    let layer = layer("kda", &["layer.gram=pivot_causal"]);
    let graph = build(&layer).expect("builds").graph;
    let nb = 4;
    let per_chunk = 4 * 16 * 16 * 128 * nb * (nb - 1) / 2;
    let heads = (layer.key_heads * layer.chunks()) as u64;
    assert_eq!(
        stages(&graph)(Stage::Gram).matrix_flops.total(),
        per_chunk * heads
    );
}

#[test]
fn halving_takes_a_product_for_the_diagonal_and_one_for_each_size_of_neighbours() {
    // Of queries and read keys: 2 C rows against C columns once, C rows for each size from 16 to C / 2. Chosen are C / 2 rows of each
    // Gram for each size; the two triangles, the step size and the products with the factors come on top in every variant.
    for (chunk, sizes) in [(16_u64, 0), (32, 1), (64, 2), (128, 3)] {
        let (chunk_field, program) = (format!("layer.chunk={chunk}"), format!("program.tokens={chunk}"));
        let layer = layer("kda", &["layer.gram=halving", &chunk_field, &program]);
        let graph = build(&layer).expect("builds").graph;
        let heads = (layer.key_heads * layer.chunks()) as u64;
        assert_eq!(
            stages(&graph)(Stage::Gram).matrix_flops.total(),
            (4 + 2 * sizes) * chunk * chunk * 128 * heads
        );
        let chosen: u64 = graph
            .nodes()
            .filter(|(_, node)| matches!(node.op, Op::Choose { .. }) && node.stage == Stage::Gram)
            .map(|(id, _)| node_work(&graph, id).vector_ops.total())
            .sum();
        assert_eq!(chosen, sizes * chunk * chunk * heads);
        // Operands that meet the state take their factors from the pivots: no exponential of a token and channel but the decay of the chunk.
        let beyond = [Stage::WyFactors, Stage::StateScan, Stage::Output]
            .map(|stage| stages(&graph)(stage).transcendentals);
        assert_eq!(beyond, [0, 128 * heads, 0]);
    }
}

#[test]
fn packed_doubling_streams_the_rows_of_a_block() {
    // 240 vector operations per column for the 16 rows of all blocks, 16 C to put each further block beside the first. Then for s = 16, 32, ..
    // two products of s rows with C x C, two masks of C x C and three operations on s x C; the sizes add up to C - 16.
    for (chunk, sizes) in [(32_u64, 1), (64, 2), (128, 3)] {
        let (chunk_field, program) = (format!("layer.chunk={chunk}"), format!("program.tokens={chunk}"));
        let layer = layer(
            "sla_r4",
            &["layer.inverse=packed_doubling", &chunk_field, &program],
        );
        let built = build(&layer).expect("builds");
        let heads = (layer.key_heads * layer.chunks()) as u64;
        let work = stages(&built.graph)(Stage::Inverse);
        assert_eq!(
            work.matrix_flops.total(),
            4 * (chunk - 16) * chunk * chunk * heads
        );
        let doubling = 2 * sizes * chunk * chunk + 3 * (chunk - 16) * chunk;
        // T is rounded to the format of the activations where it is used.
        let expected = 240 * chunk + (chunk - 16) * chunk + doubling;
        assert_eq!(work.vector_ops.total(), expected * heads);

        // One instance a chunk of a head: a chain of 16 rows, then products of s rows.
        let plan = Plan::named("fused", Program { heads: 1, chunks: 1 }).expect("a plan");
        let kernels = lower(&built.graph, &plan, built.core.value, 0.0);
        let ops: Vec<_> = kernels
            .iter()
            .flat_map(|kernel| &kernel.ops)
            .filter(|op| op.stage == Stage::Inverse)
            .collect();
        let solved: Vec<_> = ops
            .iter()
            .filter(|op| matches!(op.kind, OpKind::Substitution { .. }))
            .collect();
        assert_eq!(solved.len(), 1);
        assert_eq!(solved[0].count, heads);
        assert_eq!(
            solved[0].kind,
            OpKind::Substitution {
                rows: 16,
                columns: chunk,
                systems: chunk / 16
            }
        );
        let streamed: Vec<u64> = ops
            .iter()
            .filter_map(|op| match op.kind {
                OpKind::Product { m, k, n, passes, .. } => {
                    assert_eq!((k, n, passes, op.count), (chunk, chunk, 3, heads));
                    Some(m)
                }
                _ => None,
            })
            .collect();
        let expected: Vec<u64> = (0..sizes).flat_map(|i| [16 << i, 16 << i]).collect();
        assert_eq!(streamed, expected);
    }
}

#[test]
fn a_remainder_needs_one_product_fewer() {
    for name in ["kda", "gdn", "sla_r2", "sla_r4"] {
        let layer = layer(name, &["layer.inverse=block_doubling", "layer.solve=remainder"]);
        let graph = build(&layer).expect("builds").graph;
        let heads = if layer.mechanism.packed {
            layer.key_heads
        } else {
            layer.value_heads
        };
        // W = T R is not formed: 2 C dk per token.
        let saved = 2 * layer.chunk * layer.key_dim * heads * layer.tokens;
        assert_eq!(core_flops(&graph), closed_form(&layer) - saved as u64, "{name}");
        let in_loop = stages(&graph)(Stage::WyFactors).matrix_flops.total();
        assert_eq!(in_loop, 0, "{name}");
    }
}

#[test]
fn inverse_by_substitution_counts_rows_and_block_products() {
    // 16-row substitution on a C x C system: 240 NB C vector operations inside the blocks, NB (NB - 1) / 2 products of 16 x 16 x C.
    let layer = layer("kda", &["layer.inverse=blocked16"]);
    let graph = build(&layer).expect("builds").graph;
    let (nb, c) = (4_u64, 64_u64);
    let heads = (layer.key_heads * layer.chunks()) as u64;
    let work = stages(&graph)(Stage::Inverse);
    assert_eq!(
        work.matrix_flops.total(),
        nb * (nb - 1) / 2 * 2 * 16 * 16 * c * heads
    );
    let inside = 240 * nb * c;
    let subtractions = (nb - 1) * 16 * c;
    assert_eq!(work.vector_ops.total(), (inside + subtractions) * heads);
}

#[test]
fn neumann_takes_a_product_per_term_after_the_first() {
    for steps in [1_u64, 2, 4, 8] {
        let layer = layer(
            "sla_r4",
            &["layer.inverse=neumann", &format!("layer.neumann_steps={steps}")],
        );
        let graph = build(&layer).expect("builds").graph;
        let heads = (layer.key_heads * layer.chunks()) as u64;
        let expected = (steps - 1) * 2 * 64 * 64 * 64 * heads;
        assert_eq!(stages(&graph)(Stage::Inverse).matrix_flops.total(), expected);
    }
}

#[test]
fn fused_kernel_moves_the_least_bytes() {
    // Bytes per token of one fused kernel at 32 value heads of 128, bf16 activations, f32 gates.
    for (name, per_token) in [("kda", 49_280_u64), ("sla_r2", 33_088), ("sla_r4", 24_736)] {
        let layer = layer(name, &[]);
        let built = build(&layer).expect("builds");
        let plan = Plan::named("fused", Program { heads: 1, chunks: 1 }).expect("a plan");
        let kernels = lower(&built.graph, &plan, built.core.value, 0.0);
        let fused = kernels
            .iter()
            .find(|k| k.label == "op2-7a")
            .expect("a fused kernel");
        let parameters = ["conv_taps", "decay_bias", "A_log"];
        let streamed: u64 = fused
            .reads
            .iter()
            .filter(|t| !parameters.contains(&t.name.as_str()))
            .map(|t| t.bytes)
            .sum();
        let states: u64 = fused
            .writes
            .iter()
            .filter(|t| t.name != "O_rounded")
            .map(|t| t.bytes)
            .sum();
        assert_eq!(
            streamed + fused.write_bytes() - states,
            per_token * layer.tokens as u64,
            "{name}"
        );
        // The final state leaves once, in f32.
        let width = if layer.mechanism.packed {
            layer.sharing() * layer.value_dim
        } else {
            layer.value_dim
        };
        assert!(states <= 4 * (layer.key_heads * layer.key_dim * width) as u64);
    }
}

#[test]
fn a_fusion_ends_where_its_result_is_needed_as_a_whole() {
    let layer = layer("kda", &[]);
    let built = build(&layer).expect("builds");
    let plan = Plan::named("unfused", Program { heads: 1, chunks: 1 }).expect("a plan");
    let kernels = lower_compiled(&built.graph, &plan, built.core.value, 0.0);
    let of = |label: &str| -> Vec<_> { kernels.iter().filter(|k| k.label == label).collect() };
    let tokens = (layer.batch * layer.tokens) as u64;
    let (keys, values) = (
        2 * (layer.key_heads * layer.key_dim) as u64,
        (layer.value_heads * layer.value_dim) as u64,
    );
    // Convolution and SiLU; squared lengths, and the values rounded; queries and keys over their lengths.
    let op2 = of("op2");
    assert_eq!(op2.len(), 3);
    // bf16 in, f32 between, bf16 out: 6 bytes a channel in the first, 4 of every key and 6 of every value channel in the second, 6 of every key channel in the third,
    // and a length in f32 that is written and read. The taps are read once.
    let lengths = 2 * 2 * 4 * layer.key_heads as u64;
    let taps: u64 = op2[0]
        .reads
        .iter()
        .filter(|t| t.name == "conv_taps")
        .map(|t| t.bytes)
        .sum();
    let moved: u64 = op2.iter().map(|kernel| kernel.hbm_bytes()).sum();
    let channels = 6 * (keys + values) + (4 * keys + 6 * values) + 6 * keys;
    assert_eq!(moved - taps, tokens * (channels + lengths));
    // Sum of squares; norm and gate; projection. The first two read the f32 output of the core.
    let op7 = of("op7b-c");
    assert_eq!(op7.len(), 3);
    let core: Vec<u64> = op7
        .iter()
        .map(|kernel| {
            kernel
                .reads
                .iter()
                .filter(|t| t.name == "O")
                .map(|t| t.bytes)
                .sum()
        })
        .collect();
    assert_eq!(core, [4 * tokens * values, 4 * tokens * values, 0]);
    // What is done twice is counted once.
    let once: Work = lower(&built.graph, &plan, built.core.value, 0.0)
        .iter()
        .map(|kernel| kernel.work)
        .sum();
    assert_eq!(kernels.iter().map(|kernel| kernel.work).sum::<Work>(), once);
}

#[test]
fn flops_are_linear_in_tokens_and_the_graph_is_not() {
    let at = |tokens: usize| {
        let layer = layer("sla_r4", &[&format!("layer.tokens={tokens}")]);
        let graph = build(&layer).expect("builds").graph;
        (graph_work(&graph).matrix_flops.total(), graph.len())
    };
    let (small, nodes) = at(512);
    for factor in [8, 16, 2048] {
        let (flops, same) = at(512 * factor);
        assert_eq!(flops, small * factor as u64);
        assert_eq!(same, nodes);
    }
}

#[test]
fn the_state_scan_is_one_node_with_a_trip_count() {
    for name in ["kda", "gdn", "sla_r4"] {
        let layer = layer(name, &[]);
        let graph = build(&layer).expect("builds").graph;
        let trips: Vec<usize> = graph
            .nodes()
            .filter_map(|(_, node)| match &node.op {
                Op::Scan(scan) => Some(scan.trips),
                _ => None,
            })
            .collect();
        assert_eq!(trips, [layer.tokens / layer.chunk]);
    }
}

#[test]
fn grouped_value_heads_share_the_raw_gram() {
    // Qwen3-Next: 16 key heads, 32 value heads. The raw products are per key head, 4 C dk / R per value head and token.
    let layer = layer("gdn", &["layer.key_heads=16"]);
    let graph = build(&layer).expect("builds").graph;
    let raw = stages(&graph)(Stage::Gram).matrix_flops.total();
    assert_eq!(raw, (4 * 64 * 128 * 16 * layer.tokens) as u64);
}

#[test]
fn variants_without_meaning_are_refused_by_name() {
    let error =
        workload::load("kda", &["layer.gram=scalar_mask"]).expect_err("no scalar mask for channel decay");
    let text = error.render();
    assert!(
        text.contains("`pivot`, `pivot_causal`, `folded`, `broadcast`"),
        "{text}"
    );
    assert_eq!(GramVariant::ScalarMask.name(), "scalar_mask");
    assert_eq!(InverseVariant::Blocked16.name(), "blocked16");
}
