//! Decode steps: one token of every sequence, states in HBM.

use ndarray::{Axis, Slice};
use std::collections::BTreeMap;
use tpusim::graph::work::stage_work;
use tpusim::graph::{Init, NodeId, Op, Role, Stage};
use tpusim::hardware;
use tpusim::kernels::{Kernel, Plan, lower};
use tpusim::layer::{Layer, Pass};
use tpusim::mechanisms::build;
use tpusim::numerics::{Arithmetic, Tensor, execute, relative_error, seeded_inputs};
use tpusim::report::result::{Bound, PlanResult};
use tpusim::study::decode::{run_steps, seeded_tokens};
use tpusim::study::run::plan_times;
use tpusim::study::state_formats::{StateFormatRequest, state_formats};
use tpusim::study::{Extent, check};
use tpusim::timing::time_kernel;
use tpusim::workload::{self, Workload};

/// Rounding of sums of a few thousand terms.
const ROUNDING: f64 = 1e-9;

/// Far above f64 rounding of a few hundred tokens, far below any error of the formulas.
const EXACT: f64 = 1e-10;
const SHIPPED: [&str; 3] = ["kda_decode", "gdn_decode", "sla_r4_decode"];
/// Mechanisms whose step is not that of the plain delta rule, with fields of theirs.
const OTHERS: [(&str, &[&str]); 24] = [
    ("retnet_decode", &[]),
    ("rwkv6_decode", &[]),
    ("rwkv7_decode", &[]),
    ("deltaproduct_decode", &["layer.householder_steps=3"]),
    ("preconditioned_delta_decode", &["layer.read=undecayed"]),
    ("mesanet_decode", &[]),
    ("mesanet_decode", &["layer.forgetting=none"]),
    ("softmax_gqa_decode", &["layer.context=200"]),
    (
        "softmax_gqa_decode",
        &["layer.window=60", "layer.ssmax=true", "layer.block_kv=32"],
    ),
    ("softmax_gqa_decode", &["layer.window=1", "layer.qk_norm=true"]),
    ("mla_decode", &["layer.context=100", "layer.rotary=1"]),
    ("mla_decode", &["layer.context=3", "layer.output_gate=full"]),
    ("linear_attention_decode", &[]),
    ("linear_attention_decode", &["layer.normaliser=true"]),
    ("mamba2_decode", &[]),
    ("gla_decode", &[]),
    ("deltanet_decode", &[]),
    ("gdn2_decode", &[]),
    ("comba_decode", &[]),
    ("kaczmarz_decode", &["layer.read=undecayed"]),
    ("q_delta_decode", &[]),
    ("gdn_grouped_decode", &[]),
    ("spd_sla_w_decode", &[]),
    ("spd_sla_w_decode", &["layer.whitening=none"]),
];

fn load(name: &str, fields: &[&str]) -> Workload {
    workload::load(name, fields)
        .unwrap_or_else(|e| panic!("{name} {fields:?}: {}", e.render()))
        .0
}

fn kernels(layer: &Layer, plan: &str) -> Vec<Kernel> {
    let built = build(layer).expect("builds");
    let plan = Plan::decode(plan).expect("a plan");
    lower(&built.graph, &plan, built.core.value, 0.0)
}

fn kernel(layer: &Layer, plan: &str, label: &str) -> Kernel {
    let found = kernels(layer, plan).into_iter().find(|k| k.label == label);
    found.expect("a kernel of that label")
}

#[test]
fn steps_follow_the_recurrence() {
    // 128 steps from a given state; every readout, unit, read convention and storage of the state.
    for name in SHIPPED {
        for state in ["f32", "bf16", "row_fp8"] {
            for readout in ["after_update", "before_update"] {
                for products in ["vector", "matrix"] {
                    for read in ["decayed", "undecayed"] {
                        let fields = [
                            format!("layer.state={state}"),
                            format!("layer.readout={readout}"),
                            format!("layer.state_products={products}"),
                            format!("layer.read={read}"),
                            "layer.model_width=64".to_owned(),
                            "layer.key_dim=32".to_owned(),
                            "layer.value_dim=16".to_owned(),
                        ];
                        let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
                        let result = check(&load(name, &fields), Extent::Sample).expect("runs");
                        assert!(
                            result.exact_rel_error <= EXACT,
                            "{name} {fields:?}: {:e}",
                            result.exact_rel_error
                        );
                        assert_eq!((result.tokens, result.non_finite), (128, None));
                    }
                }
            }
        }
    }
}

#[test]
fn steps_of_every_mechanism_follow_their_recurrence() {
    for (name, own) in OTHERS {
        let layer = load(name, &[]).layer;
        let attention = layer.is_attention();
        let small: &[&str] = match name {
            "mla_decode" => &[
                "layer.key_dim=24",
                "layer.latent_rank=20",
                "layer.decoupled_dim=8",
            ],
            _ => &["layer.key_dim=32"],
        };
        let mut variants: Vec<Vec<String>> = Vec::new();
        for state in ["f32", "bf16", "row_fp8"] {
            for readout in ["after_update", "before_update"] {
                for products in ["vector", "matrix"] {
                    let mut fields = Vec::new();
                    for (field, value) in [
                        ("state", state),
                        ("readout", readout),
                        ("state_products", products),
                    ] {
                        if layer.mechanism.uses(field) {
                            fields.push(format!("layer.{field}={value}"));
                        }
                    }
                    if !variants.contains(&fields) {
                        variants.push(fields);
                    }
                }
            }
        }
        for variant in variants {
            let mut fields: Vec<&str> = variant.iter().map(String::as_str).collect();
            fields.extend(["layer.model_width=48", "layer.value_dim=16", "numeric.tokens=100"]);
            fields.extend_from_slice(small);
            fields.extend_from_slice(own);
            let result = check(&load(name, &fields), Extent::Sample).expect("runs");
            assert!(
                result.exact_rel_error <= EXACT,
                "{name} {fields:?}: {:e}",
                result.exact_rel_error
            );
            assert_eq!(
                (result.tokens, result.non_finite),
                (100, None),
                "{name} {fields:?}"
            );
            assert_eq!(result.state_rel_error.is_some(), !attention);
        }
    }
}

/// Rows of blocks `[B, heads, 1, N, block, channels]` one after the other: `[B, heads, 1, N block, channels]`.
fn rows_of_blocks(blocks: &Tensor<f64>) -> Tensor<f64> {
    let mut dims = blocks.shape().to_vec();
    dims.splice(3..5, [dims[3] * dims[4]]);
    let rows = blocks.as_standard_layout().to_owned();
    rows.into_shape_with_order(dims)
        .expect("rows of blocks")
        .into_shared()
}

#[test]
fn attention_steps_are_the_forward_pass() {
    // Caches filled by the forward pass: the layer output of a step is that of its token there, and the appended row the token's own.
    let tokens = 90;
    let variants: [(&str, &str, &[&str]); 6] = [
        ("softmax_gqa_decode", "softmax_gqa", &[]),
        (
            "softmax_gqa_decode",
            "softmax_gqa",
            &["layer.rotary=0.5", "layer.qk_norm=true", "layer.ssmax=true"],
        ),
        (
            "softmax_gqa_decode",
            "softmax_gqa",
            &["layer.window=20", "layer.output_gate=full", "layer.ssmax=true"],
        ),
        ("mla_decode", "mla", &[]),
        ("mla_decode", "mla", &["layer.rotary=1", "layer.ssmax=true"]),
        (
            "mla_decode",
            "mla",
            &["layer.output_gate=full", "layer.window=33", "layer.rotary=0.5"],
        ),
    ];
    for (decode, forward, fields) in variants {
        let mut all = vec![
            "layer.model_width=48",
            "layer.value_dim=16",
            "layer.batch=2",
            "layer.block_kv=32",
        ];
        all.extend_from_slice(fields);
        all.extend(if forward == "mla" {
            [
                "layer.key_dim=24",
                "layer.latent_rank=20",
                "layer.decoupled_dim=8",
            ]
        } else {
            ["layer.key_dim=32", "layer.key_heads=2", "layer.query_heads=6"]
        });
        let step = load(decode, &all).layer;
        let whole = Layer {
            tokens,
            chunk: 32,
            ..load(forward, &[&all[..], &["numeric.key_heads=1"]].concat()).layer
        };
        let prefill = build(&whole).expect("builds").graph;
        let inputs = seeded_inputs(&prefill, 3);
        let node = |name: &str| {
            let found = prefill.nodes().find(|(_, node)| node.name == name);
            tpusim::graph::Value {
                node: found.unwrap_or_else(|| panic!("no `{name}`")).0,
                port: 0,
            }
        };
        let y = prefill.output("y").expect("an output");
        let names = if forward == "mla" {
            ["k_decoupled_turned", "latent_rounded"]
        } else {
            ["K", "V"]
        };
        let made = names.map(node);
        let run = execute(&prefill, &inputs, &[y, made[0], made[1]], Arithmetic::Exact).expect("runs");
        let caches: Vec<(&str, Tensor<f64>)> = if forward == "mla" {
            let rows = made.map(|value| {
                let rows = run.values[&value].clone();
                let channels = *rows.shape().last().expect("channels");
                let rows = rows.as_standard_layout().to_owned();
                rows.into_shape_with_order(vec![2, 1, 1, tokens, channels])
                    .expect("rows")
            });
            let both = ndarray::concatenate(Axis(4), &[rows[0].view(), rows[1].view()]).expect("a cache");
            vec![("latent_cache", both.into_shared())]
        } else {
            let rows = made.map(|value| rows_of_blocks(&run.values[&value]));
            ["k_cache", "v_cache"].into_iter().zip(rows).collect()
        };
        let x = prefill.inputs().find(|(_, node)| node.name == "x").expect("x").0;
        for context in [1, 31, 32, 50, 89] {
            let step = Layer {
                context,
                ..step.clone()
            };
            let graph = build(&step).expect("builds").graph;
            let own = seeded_inputs(&graph, 3);
            let at = |tensor: &Tensor<f64>, axis: usize, rows: std::ops::Range<usize>| {
                tensor
                    .slice_axis(Axis(axis), Slice::from(rows))
                    .to_owned()
                    .into_shared()
            };
            let mine: BTreeMap<NodeId, Tensor<f64>> = graph
                .inputs()
                .map(|(id, input)| {
                    let cache = caches.iter().find(|(name, _)| *name == input.name);
                    let tensor = match (&input.op, cache) {
                        (_, Some((_, rows))) => at(rows, 3, context - step.cached_tokens()..context),
                        (
                            Op::Input {
                                init: Init::Table(_), ..
                            },
                            None,
                        ) => own[&id].clone(),
                        _ if input.name == "x" => at(&inputs[&x], 1, context..context + 1),
                        _ => {
                            let from = prefill.inputs().find(|(_, node)| node.name == input.name);
                            inputs[&from.expect("the same weight").0].clone()
                        }
                    };
                    (id, tensor)
                })
                .collect();
            let mut keep = vec![graph.output("y").expect("an output")];
            keep.extend(caches.iter().map(|(name, _)| graph.output(name).expect("a row")));
            let found = execute(&graph, &mine, &keep, Arithmetic::Exact).expect("runs");
            let mut expected = vec![at(&run.values[&y], 1, context..context + 1)];
            expected.extend(caches.iter().map(|(_, rows)| at(rows, 3, context..context + 1)));
            for (value, expected) in keep.iter().zip(expected) {
                let error = relative_error(&found.values[value], &expected.to_owned()).expect("same shape");
                assert!(
                    error.max <= EXACT,
                    "{decode} {fields:?} after {context}: {:e}",
                    error.max
                );
            }
        }
    }
}

#[test]
fn a_cache_is_read_once_and_one_row_is_written() {
    // Keys and values: 2 nkv dh bf16 bytes per token; latent attention: rank + decoupled channels. FLOPs 2 (dk + dv) per key and query head.
    let batch = 64_u64;
    for (name, heads, channels, keys, values) in [
        ("softmax_gqa_decode", 32_u64, 2 * 8 * 128_u64, 128_u64, 128_u64),
        ("mla_decode", 32, 512 + 64, 576, 512),
    ] {
        for context in [511_u64, 8191, 262_143] {
            let layer = load(name, &[&format!("layer.context={context}")]).layer;
            assert_eq!(layer.cache_bytes_per_token(), 2 * channels);
            for plan in ["unfused", "fused"] {
                let kernels = kernels(&layer, plan);
                let attention = kernels.iter().find(|k| k.label == "attention").expect("a kernel");
                let caches: u64 = attention
                    .reads
                    .iter()
                    .filter(|t| t.name.ends_with("_cache"))
                    .map(|t| t.bytes)
                    .sum();
                assert_eq!(caches, 2 * batch * context * channels, "{name} {context} {plan}");
                assert_eq!(attention.streaming().read_bytes(), attention.read_bytes());
                let read = attention.read_bytes() - caches;
                // The rows of the token itself and its queries.
                assert_eq!(
                    read,
                    2 * batch * (channels + heads * keys),
                    "{name} {context} {plan}"
                );
                // Whole blocks, so nothing is padded.
                let flops = 2 * batch * heads * (context + 1) * (keys + values);
                assert_eq!(attention.work.matrix_flops.total(), flops);
                let rows = ["k_cache_own_rounded", "v_cache_row", "latent_cache_row"];
                let written = kernels.iter().flat_map(|k| &k.writes);
                let written = written.filter(|t| rows.contains(&t.name.as_str()));
                assert_eq!(written.map(|t| t.bytes).sum::<u64>(), 2 * batch * channels);
            }
        }
    }
}

#[test]
fn steps_are_the_forward_pass_token_by_token() {
    // The same weights, from the first projection to the last, and the convolution state with it.
    let steps = 130;
    for (decode, forward) in [
        ("kda_decode", "kda"),
        ("gdn_decode", "gdn"),
        ("sla_r4_decode", "sla_r4"),
        ("retnet_decode", "retnet"),
        ("rwkv6_decode", "rwkv6"),
        ("rwkv7_decode", "rwkv7"),
        ("deltaproduct_decode", "deltaproduct"),
        ("preconditioned_delta_decode", "preconditioned_delta"),
        ("mesanet_decode", "mesanet"),
        ("linear_attention_decode", "linear_attention"),
        ("mamba2_decode", "mamba2"),
        ("gla_decode", "gla"),
        ("deltanet_decode", "deltanet"),
        ("gdn2_decode", "gdn2"),
        ("comba_decode", "comba"),
        ("kaczmarz_decode", "kaczmarz"),
        ("q_delta_decode", "q_delta"),
        ("gdn_grouped_decode", "gdn_grouped"),
        ("sla_r2_decode", "sla_r2"),
    ] {
        let small = [
            "layer.model_width=64",
            "layer.key_dim=32",
            "layer.value_dim=16",
            "layer.batch=2",
        ];
        let one = Layer {
            context: 0,
            ..load(decode, &small).layer
        };
        let whole = load(forward, &small).layer;
        let whole = Layer {
            tokens: steps,
            ..whole
        };
        let (built, prefill) = (build(&one).expect("builds"), build(&whole).expect("builds"));
        let inputs = seeded_inputs(&prefill.graph, 3);
        let own = seeded_inputs(&built.graph, 3);
        let by_name: BTreeMap<&str, NodeId> = prefill
            .graph
            .inputs()
            .map(|(id, n)| (n.name.as_str(), id))
            .collect();
        let mine: BTreeMap<NodeId, Tensor<f64>> = built
            .graph
            .inputs()
            .map(|(id, node)| {
                let tensor = match by_name.get(node.name.as_str()) {
                    _ if matches!(
                        node.op,
                        Op::Input {
                            init: Init::Table(_),
                            role: Role::Weight
                        }
                    ) =>
                    {
                        own[&id].clone()
                    }
                    Some(from) if node.name != "x" => inputs[from].clone(),
                    // A sequence starts with an empty state and nothing before its first token.
                    _ => ndarray::ArrayD::zeros(node.results[0].shape.dims()).into_shared(),
                };
                (id, tensor)
            })
            .collect();
        let tokens = &inputs[&by_name["x"]];
        assert_eq!(*tokens, seeded_tokens(&one, steps, 3).expect("drawn"));
        let keep = [built.core.output, built.core.final_state.expect("a state")];
        let stepped = run_steps(&one, &built, &mine, tokens, &keep, Arithmetic::Exact).expect("runs");
        let names = [prefill.core.output, prefill.core.final_state.expect("a state")];
        let reference = execute(&prefill.graph, &inputs, &names, Arithmetic::Exact).expect("runs");
        let chunks = &reference.values[&names[0]];
        let mut dims = chunks.shape().to_vec();
        dims.splice(3..5, [dims[3] * dims[4], 1]);
        let rows = chunks
            .as_standard_layout()
            .to_owned()
            .into_shape_with_order(dims)
            .expect("rows of chunks");
        let rows = rows.slice_axis(Axis(3), Slice::from(..steps)).to_owned();
        for (found, expected) in [
            (&stepped.values[&keep[0]], &rows.into_shared()),
            (&stepped.values[&keep[1]], &reference.values[&names[1]]),
        ] {
            let error = relative_error(found, &expected.to_owned()).expect("same shape");
            assert!(error.max <= EXACT, "{decode}: {:e}", error.max);
        }
    }
}

#[test]
fn quantised_states_err_as_their_formats_say() {
    // A state rounded at every step: bf16 keeps 8 bits, FP8 E4M3 4; f32 leaves the rounding of the activations.
    let error = |state: &str| {
        let fields = [format!("layer.state={state}"), "layer.model_width=96".to_owned()];
        let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
        check(&load("sla_r4_decode", &fields), Extent::Sample)
            .expect("runs")
            .state_rms_error
            .expect("a state")
    };
    let [full, half, quarter] = ["f32", "bf16", "row_fp8"].map(error);
    assert!(
        full < half && 3.0 * half < quarter,
        "{full:e} {half:e} {quarter:e}"
    );
    assert!(quarter < 0.2, "{quarter:e}");
}

#[test]
fn the_fused_step_moves_the_state_twice_and_little_else() {
    // Per head and token: 2 * 4 dk dv bytes of state, (2 dk + 2 dv) * 2 of queries, keys, values and outputs, gates in f32.
    for (name, decays, state) in [
        ("kda_decode", 128, 2 * 4 * 128 * 128),
        ("gdn_decode", 1, 2 * 4 * 128 * 128),
    ] {
        for batch in [1_u64, 64, 256] {
            let layer = load(name, &[&format!("layer.batch={batch}")]).layer;
            let fused = kernel(&layer, "fused", "op2-7a");
            let sum = |wanted: &dyn Fn(&str) -> bool| -> u64 {
                let all = fused.reads.iter().chain(&fused.writes);
                all.filter(|t| wanted(&t.name)).map(|t| t.bytes).sum()
            };
            let heads = 32 * batch;
            assert_eq!(sum(&|n| n == "state" || n == "S'"), state * heads, "{name}");
            assert_eq!(state, 131_072);
            let gates = 4 * (decays + 1);
            let streams = ["qkv_rounded", "decay", "step", "O_rounded"];
            assert_eq!(
                sum(&|n| streams.contains(&n)),
                ((2 * 128 + 2 * 128) * 2 + gates) * heads
            );
            // Three rows of the convolution, both ways.
            let conv = sum(&|n| n.starts_with("conv_state"));
            assert_eq!(conv, 2 * 3 * 2 * layer.qkv_width() as u64 * batch);
            // What is left are parameters, the same for every batch.
            let rest = fused.hbm_bytes() - conv - (state + (2 * 128 + 2 * 128) * 2 + gates) * heads;
            assert!(
                rest <= 2 * 4 * layer.qkv_width() as u64 + 4 * 32 * 129,
                "{name} {rest}"
            );
        }
    }
}

#[test]
fn stored_formats_set_the_bytes_of_the_state() {
    let elements = 8 * 256 * 512 * 64_u64;
    for (state, bytes) in [
        ("f32", 4 * elements),
        ("bf16", 2 * elements),
        ("row_fp8", elements + 4 * 8 * 256 * 64),
    ] {
        let layer = load("sla_r4_decode", &[&format!("layer.state={state}")]).layer;
        assert_eq!(layer.state_bytes() * 64, bytes);
        let fused = kernel(&layer, "fused", "op2-7a");
        let read: u64 = fused
            .reads
            .iter()
            .filter(|t| t.name.starts_with("state"))
            .map(|t| t.bytes)
            .sum();
        let others = ["O_rounded", "conv_state_next"];
        let written: u64 = fused
            .writes
            .iter()
            .filter(|t| !others.contains(&t.name.as_str()))
            .map(|t| t.bytes)
            .sum();
        assert_eq!((read, written), (bytes, bytes), "{state}");
    }
}

#[test]
fn work_of_the_state_follows_the_closed_form() {
    // Reads 4 dk dv, decay dk dv, rank-one update 2 dk dv; beside it roundings and the correction of the value.
    for batch in [1_u64, 16] {
        let step = |fields: &[&str]| {
            let mut all = vec![format!("layer.batch={batch}")];
            all.extend(fields.iter().map(|f| (*f).to_owned()));
            let layer = load("kda_decode", &all.iter().map(String::as_str).collect::<Vec<_>>()).layer;
            let work = stage_work(&build(&layer).expect("builds").graph);
            let of = |stage| work.iter().find(|(s, _)| *s == stage).expect("a stage").1;
            of(Stage::StateScan) + of(Stage::Output)
        };
        let (heads, dk, dv) = (32 * batch, 128, 128);
        let after = step(&[]);
        assert_eq!(after.matrix_flops.total(), 0);
        assert_eq!(after.vector_ops.total(), heads * (7 * dk * dv + 2 * dk + 4 * dv));
        let before = step(&["layer.readout=before_update"]);
        assert_eq!(
            before.vector_ops.total() - after.vector_ops.total(),
            heads * (2 * dk + 2 * dv)
        );
        for readout in ["after_update", "before_update"] {
            let matrix = step(&["layer.state_products=matrix", &format!("layer.readout={readout}")]);
            assert_eq!(matrix.matrix_flops.total(), heads * 4 * dk * dv);
        }
    }
}

#[test]
fn a_readout_that_does_not_wait_is_never_slower() {
    // 64 sequences of 128 x 128 states: `q S'` against `q S~ + (q . k) u`.
    for chip in hardware::shipped() {
        let (chip, _) = hardware::load_with::<&str>(chip, &[]).expect("a chip");
        for products in ["vector", "matrix"] {
            let layer = |readout: &str| {
                let fields = [
                    format!("layer.readout={readout}"),
                    format!("layer.state_products={products}"),
                ];
                let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
                load("kda_decode", &fields).layer
            };
            let (after, before) = (layer("after_update"), layer("before_update"));
            // Kernel by kernel the state is read once less.
            let unfused = |layer: &Layer| -> f64 {
                let times = kernels(layer, "unfused");
                times.iter().map(|k| time_kernel(k, &chip).total_us).sum()
            };
            assert!(unfused(&before) < unfused(&after), "{} {products}", chip.name);
            let fused = |layer: &Layer| time_kernel(&kernel(layer, "fused", "op2-7a"), &chip);
            let (after, before) = (fused(&after), fused(&before));
            let place = format!("{} {products}: {before:?} {after:?}", chip.name);
            // `q . k` and its product with `u` are more vector work; where throughput binds, no more than that is lost.
            let added = (before.vpu_us - after.vpu_us).max(0.0);
            assert!(
                before.total_us <= (after.total_us + added) * (1.0 + ROUNDING),
                "{place}"
            );
            assert!(added <= 0.01 * after.total_us, "{place}");
        }
    }
}

#[test]
fn memory_binds_the_fused_step() {
    for name in SHIPPED {
        let layer = load(name, &[]).layer;
        for chip in ["tpu-v5p", "tpu-v6e", "tpu-v7x", "h100-sxm"] {
            let (chip, _) = hardware::load_with::<&str>(chip, &[]).expect("a chip");
            let time = time_kernel(&kernel(&layer, "fused", "op2-7a"), &chip);
            assert_eq!(time.bound, Bound::Hbm, "{name} {}: {time:?}", chip.name);
        }
    }
}

#[test]
fn fields_of_the_other_pass_are_refused_in_their_place() {
    for (field, message) in [
        ("layer.gram=pivot", "`pass: decode` does not read `gram`"),
        (
            "layer.inverse=blocked16",
            "`pass: decode` does not read `inverse`",
        ),
        ("layer.tokens=8", "expected `1` or no key, found `8`"),
        ("layer.chunk=64", "expected `1` or no key, found `64`"),
        (
            "layer.sequences=[64, 32]",
            "`pass: decode` does not read `sequences`",
        ),
        ("layer.initial_state=zero", "reads the state of the token before"),
    ] {
        let text = workload::load("kda_decode", &[field])
            .expect_err("does not fit")
            .render();
        assert!(text.contains(message), "{field}: {text}");
    }
    for (name, field, message) in [
        (
            "softmax_gqa_decode",
            "layer.block_q=64",
            "`pass: decode` does not read `block_q`",
        ),
        (
            "mla_decode",
            "layer.causal=false",
            "`pass: decode` does not read `causal`",
        ),
        ("mla_decode", "layer.context=0", "expected a whole number from 1"),
        (
            "softmax_gqa",
            "layer.context=64",
            "`pass: forward` does not read `context`",
        ),
        ("kda_decode", "layer.context=64", "`kda` does not read `context`"),
    ] {
        let text = workload::load(name, &[field]).expect_err("does not fit").render();
        assert!(text.contains(message), "{name} {field}: {text}");
    }
    let layer = load("kda_decode", &["layer.tokens=1", "layer.chunk=1"]).layer;
    assert_eq!((layer.pass, layer.chunks()), (Pass::Decode, 1));
}

/// Every plan of a workload on a chip.
fn plans(workload: &Workload, chip: &str) -> Vec<PlanResult> {
    let (chip, _) = hardware::load_with::<&str>(chip, &[]).expect("a chip");
    plan_times(workload, &chip, hardware::shipped_calibration()).expect("times")
}

#[test]
fn every_recurrent_mechanism_has_a_decode_workload_on_every_kind_of_chip() {
    let shipped: Vec<Workload> = workload::shipped().iter().map(|name| load(name, &[])).collect();
    let decoding = |w: &&Workload| w.layer.pass == Pass::Decode;
    for forward in shipped.iter().filter(|w| w.layer.mechanism.decodes()) {
        assert!(
            shipped
                .iter()
                .filter(decoding)
                .any(|step| step.layer.mechanism == forward.layer.mechanism),
            "{}",
            forward.name
        );
    }
    for step in shipped.iter().filter(decoding) {
        for chip in [
            "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x", "h100-sxm", "h200-sxm", "rtx-4090",
        ] {
            assert!(
                step.hardware.iter().any(|named| named == chip),
                "{} {chip}",
                step.name
            );
        }
    }
}

#[test]
fn parts_of_a_token_are_all_that_crosses_hbm() {
    for name in workload::shipped() {
        let workload = load(name, &[]);
        if workload.layer.pass == Pass::Forward {
            assert!(
                plans(&workload, "tpu-v7x")
                    .iter()
                    .all(|plan| plan.token.is_none()),
                "{name}"
            );
            continue;
        }
        for chip in ["tpu-v7x", "rtx-4090"] {
            for plan in plans(&workload, chip) {
                let token = plan.token.expect("a decode step");
                let step = plan.stages.iter().map(|stage| stage.hbm_bytes).sum::<u64>() as f64;
                let parts = token.tokens as f64 * (token.read_bytes.total() + token.written_bytes.total());
                assert!(
                    (parts - step).abs() <= ROUNDING * step,
                    "{name} {chip} {}: {parts} {step}",
                    plan.name
                );
                assert!(
                    (token.time_us * token.tokens as f64 - plan.total_us).abs() <= ROUNDING * plan.total_us
                );
                assert_eq!(
                    token.tokens,
                    (workload.layer.batch * workload.layer.tokens) as u64
                );
                assert!(token.written_bytes.weights <= 0.0, "{name} writes weights");
            }
        }
    }
}

#[test]
fn parts_of_a_token_follow_closed_forms() {
    // KDA, 32 heads of 128: f32 states and three bf16 rows of queries, keys and values, both ways; every weight once per step.
    let (heads, d, width, rank) = (32.0, 1024.0, 3.0 * 32.0 * 128.0, 128.0);
    let state = heads * 4.0 * 128.0 * 128.0 + 3.0 * 2.0 * width;
    for batch in [1_usize, 64] {
        let workload = load("kda_decode", &[format!("layer.batch={batch}").as_str()]);
        for plan in plans(&workload, "h200-sxm")
            .iter()
            .filter(|plan| plan.name == "fused")
        {
            let token = plan.token.expect("a decode step");
            for bytes in [token.read_bytes, token.written_bytes] {
                assert!((bytes.state - state).abs() <= ROUNDING * state, "{bytes:?}");
                assert!(bytes.cache <= 0.0);
            }
            let projections = d * (width + heads) + 2.0 * rank * (d + heads * 128.0) + heads * 128.0 * d;
            // Taps in bf16; norm weight, rates and biases of the gate in f32.
            let small = 2.0 * 4.0 * width + 4.0 * (128.0 + heads + heads * 128.0);
            let weights = (2.0 * projections + small) / batch as f64;
            let found = token.read_bytes.weights;
            assert!((found - weights).abs() <= ROUNDING * weights, "{found} {weights}");
        }
    }
}

#[test]
fn only_caches_grow_with_the_context() {
    // A stack of 69 KDA layers and 24 of softmax attention, 64 sequences, 8 key heads of 128 in bf16.
    let (linear, full) = (69.0, 24.0);
    for chip in ["tpu-v7x", "h100-sxm"] {
        let fused = |workload: &Workload| {
            let plans = plans(workload, chip);
            plans
                .into_iter()
                .find(|plan| plan.name == "fused")
                .expect("a plan")
        };
        let at = |context: usize| {
            let context = format!("layer.context={context}");
            ["retnet_decode", "softmax_gqa_decode"].map(|name| fused(&load(name, &[context.as_str()])))
        };
        let kda = fused(&load("kda_decode", &[]));
        let [short, long] = [1024, 131_072].map(at);
        // RetNet turns its queries by their position and reads nothing more for it.
        assert_eq!(short[0].total_us.to_bits(), long[0].total_us.to_bits());
        assert_eq!(short[0].token, long[0].token);
        let stack = |[_, attention]: &[PlanResult; 2]| linear * kda.total_us + full * attention.total_us;
        let grown = full * (long[1].total_us - short[1].total_us);
        assert!((stack(&long) - stack(&short) - grown).abs() <= ROUNDING * stack(&long));
        assert!(long[1].total_us > 50.0 * short[1].total_us, "{chip}");
        let bytes = |plan: &PlanResult| plan.token.expect("a decode step").read_bytes;
        for (context, attention) in [(1024.0, &short[1]), (131_072.0, &long[1])] {
            let found = bytes(attention).cache;
            // Keys and values of the tokens before, and the key that the token itself has just appended.
            let cache = 2.0 * 8.0 * 128.0 * 2.0 * context + 8.0 * 128.0 * 2.0;
            assert!((found - cache).abs() <= ROUNDING * cache, "{found} {cache}");
            assert!(bytes(attention).state <= 0.0);
        }
        assert!(bytes(&kda).cache <= 0.0 && bytes(&kda).state >= 32.0 * 4.0 * 128.0 * 128.0);
    }
}

#[test]
fn bits_are_worth_most_where_memory_is_long() {
    let chips: Vec<_> = ["tpu-v6e", "h200-sxm"]
        .iter()
        .map(|name| hardware::load_with::<&str>(name, &[]).expect("a chip"))
        .collect();
    let overrides = ["layer.key_dim=32", "layer.value_dim=16"].map(str::to_owned);
    let table = state_formats(&StateFormatRequest {
        workload: "gdn_decode",
        overrides: &overrides,
        chips: &chips,
        plan: "fused",
        tokens: 64,
        heads: 4,
        seed: 7,
    })
    .expect("runs");
    assert_eq!(table.spans, [16, 64]);
    let row = |long: &str, short: &str| {
        let found = table
            .rows
            .iter()
            .find(|row| (row.long_memory, row.short_memory) == (long, short));
        found.unwrap_or_else(|| panic!("no row {long} {short}"))
    };
    let last = |long: &str, short: &str| *row(long, short).errors.last().expect("a span");
    // Of 32 heads of 32 x 16; FP8 has a scale of four bytes per row.
    let (f32, bf16, fp8) = (4 * 32 * 16, 2 * 32 * 16, 32 * 16 + 4 * 32);
    for (long, short, bytes) in [
        ("f32", "f32", 32 * f32),
        ("bf16", "bf16", 32 * bf16),
        ("row_fp8", "row_fp8", 32 * fp8),
        ("f32", "row_fp8", 16 * (f32 + fp8)),
        ("bf16", "row_fp8", 16 * (bf16 + fp8)),
    ] {
        assert_eq!(row(long, short).state_bytes, bytes, "{long} {short}");
        assert_eq!(row(long, short).times.len(), 2);
    }
    // The state alone is rounded: f32 leaves rounding of 24 bits, bf16 of 8, FP8 E4M3 of 4, each of them a few times over.
    let digits = |bits: i32| 2_f64.powi(-bits);
    for (format, bits) in [("f32", 24), ("bf16", 8), ("row_fp8", 4)] {
        let error = last(format, format);
        assert!(
            error > 0.1 * digits(bits) && error < 10.0 * digits(bits),
            "{format}: {error:e}"
        );
    }
    for (fine, coarse) in [("f32", "bf16"), ("f32", "row_fp8"), ("bf16", "row_fp8")] {
        assert!(last(fine, fine) < last(fine, coarse), "{fine} {coarse}");
        assert!(last(fine, coarse) < last(coarse, fine), "{fine} {coarse}");
        assert!(last(coarse, fine) < last(coarse, coarse), "{fine} {coarse}");
    }
    let heads = &table.head_errors;
    assert!(
        heads
            .windows(2)
            .all(|pair| pair[0].memory_tokens <= pair[1].memory_tokens)
    );
    let (short, long) = (&heads[0], &heads[heads.len() - 1]);
    assert!(
        short.bf16 < long.bf16 && short.row_fp8 < long.row_fp8,
        "{heads:?}"
    );
    for (name, fields, message) in [
        ("gdn", &[][..], "is no decode step"),
        ("softmax_gqa_decode", &[], "is no decode step"),
        ("mesanet_decode", &[], "is no decode step"),
    ] {
        let request = StateFormatRequest {
            workload: name,
            overrides: fields,
            chips: &chips,
            plan: "fused",
            tokens: 4,
            heads: 1,
            seed: 7,
        };
        let text = state_formats(&request).expect_err("does not fit").to_string();
        assert!(text.contains(message), "{name}: {text}");
    }
}
