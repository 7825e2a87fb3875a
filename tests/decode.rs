//! Decode steps: one token of every sequence, states in HBM.

use ndarray::{Axis, Slice};
use std::collections::BTreeMap;
use tpusim::graph::work::stage_work;
use tpusim::graph::{NodeId, Stage};
use tpusim::hardware;
use tpusim::kernels::{Kernel, Plan, lower};
use tpusim::layer::{Layer, Pass};
use tpusim::mechanisms::build;
use tpusim::numerics::{Arithmetic, Tensor, execute, relative_error, seeded_inputs};
use tpusim::report::result::Bound;
use tpusim::study::decode::{run_steps, seeded_tokens};
use tpusim::study::{Extent, check};
use tpusim::timing::time_kernel;
use tpusim::workload::{self, Workload};

/// Far above f64 rounding of a few hundred tokens, far below any error of the formulas.
const EXACT: f64 = 1e-10;
const SHIPPED: [&str; 3] = ["kda_decode", "gdn_decode", "sla_r4_decode"];

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
fn steps_are_the_forward_pass_token_by_token() {
    // The same weights, from the first projection to the last, and the convolution state with it.
    let steps = 130;
    for (decode, forward) in [
        ("kda_decode", "kda"),
        ("gdn_decode", "gdn"),
        ("sla_r4_decode", "sla_r4"),
    ] {
        let small = [
            "layer.model_width=64",
            "layer.key_dim=32",
            "layer.value_dim=16",
            "layer.batch=2",
        ];
        let one = load(decode, &small).layer;
        let whole = load(forward, &small).layer;
        let whole = Layer {
            tokens: steps,
            ..whole
        };
        let (built, prefill) = (build(&one).expect("builds"), build(&whole).expect("builds"));
        let inputs = seeded_inputs(&prefill.graph, 3);
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
        let stepped = run_steps(&built, &mine, tokens, &keep, Arithmetic::Exact).expect("runs");
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
            assert!(before.total_us <= after.total_us + added, "{place}");
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
    let layer = load("kda_decode", &["layer.tokens=1", "layer.chunk=1"]).layer;
    assert_eq!((layer.pass, layer.chunks()), (Pass::Decode, 1));
}
