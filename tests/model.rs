//! Models: parameters and memory against published numbers and formulas, mixtures of experts against a dense reference, public configurations.

use std::collections::BTreeMap;
use std::path::Path;

use tpusim::config::Document;
use tpusim::dtype::Dtype;
use tpusim::graph::work::graph_work;
use tpusim::hardware;
use tpusim::model::graphs::{BlockFormats, Routing, mixture};
use tpusim::model::{self, Experts, Model, Scores, from_config};
use tpusim::numerics::{Arithmetic, Tensor, execute, seeded_inputs};
use tpusim::report::model::{ModelResult, write_csv, write_json, write_text};
use tpusim::study::{Chips, ModelRequest, run_model};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn chips(names: &[&str]) -> Result<Chips, Box<dyn std::error::Error>> {
    names
        .iter()
        .map(|name| Ok(hardware::load_with::<&str>(name, &[])?))
        .collect()
}

fn run(name: &str, overrides: &[&str], on: &[&str]) -> Result<ModelResult, Box<dyn std::error::Error>> {
    let loaded = model::load(name, overrides)?.ok_or_else(|| format!("`{name}` is no model"))?;
    Ok(run_model(ModelRequest {
        model: &loaded,
        chips: &chips(on)?,
        overrides: Vec::new(),
    })?)
}

fn config(name: &str) -> Result<Document, Box<dyn std::error::Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/huggingface");
    let text = std::fs::read_to_string(folder.join(format!("{name}.json")))?;
    Ok(Document::parse("config.json", &text)?)
}

fn run_config(name: &str, overrides: &[&str]) -> Result<ModelResult, Box<dyn std::error::Error>> {
    let loaded = from_config(&config(name)?, overrides)?;
    Ok(run_model(ModelRequest {
        model: &loaded,
        chips: &chips(&["tpu-v7x"])?,
        overrides: Vec::new(),
    })?)
}

const SMALL: [&str; 4] = [
    "prefill.tokens=512",
    "prefill.batch=1",
    "decode.batch=2",
    "decode.context=128",
];

#[test]
fn parameters_are_those_of_the_checkpoints() -> Outcome {
    // Tensors of the checkpoint of Qwen3-Coder-Next, which has the sizes of Qwen3-Next, as Hugging Face counts them; those of its experts that a token does not use taken off.
    let result = run("qwen3_next_80b_a3b", &SMALL, &["tpu-v7x"])?;
    assert_eq!(result.parameters, 79_674_391_296);
    assert_eq!(result.active_parameters, 3_874_929_408);
    // "35B in total and 3B activated" (model card), embedding and head among them.
    let result = run("qwen3_6_35b_a3b", &SMALL, &["tpu-v7x"])?;
    assert_eq!((result.parameters as f64 / 1e9).round() as u64, 35);
    assert_eq!((result.active_parameters as f64 / 1e9).round() as u64, 3);
    // "3B activated parameters and 48B total parameters" (report), embedding and head left out.
    let result = run("kimi_linear_48b_a3b", &SMALL, &["tpu-v7x"])?;
    let ends = 2.0 * 163_840.0 * 2304.0;
    assert_eq!(((result.parameters as f64 - ends) / 1e9).round() as u64, 48);
    assert_eq!(((result.active_parameters as f64 - ends) / 1e9).round() as u64, 3);
    Ok(())
}

#[test]
fn public_configurations_have_the_parameters_of_their_checkpoints() -> Outcome {
    // Tensors of Llama-3-8B, Qwen3-30B-A3B and Mamba-2 2.7B as Hugging Face counts them.
    for (name, parameters) in [
        ("llama", 8_030_261_248_u64),
        ("qwen3_moe", 30_532_122_624),
        ("mamba2", 2_702_599_680),
    ] {
        assert_eq!(run_config(name, &SMALL)?.parameters, parameters, "{name}");
    }
    // "671B total parameters with 37B activated for each token" (report, arXiv 2412.19437), the layer that predicts a further token left out.
    let deepseek = run_config("deepseek_v3", &SMALL)?;
    assert_eq!((deepseek.parameters as f64 / 1e9).round() as u64, 671);
    assert_eq!((deepseek.active_parameters as f64 / 1e9).floor() as u64, 37);
    assert_eq!(
        (deepseek.weights.as_str(), deepseek.activations.as_str()),
        ("fp8_e4m3", "bf16")
    );
    Ok(())
}

/// What of a model does not come from how it is written down.
fn essence(model: &Model) -> impl PartialEq + std::fmt::Debug {
    let blocks = model.blocks.iter().map(|block| {
        (
            block.name.clone(),
            block.count,
            block.feed_forward.clone(),
            block.mixer.clone(),
            block.decode_mixer.clone(),
        )
    });
    (
        [model.width, model.vocabulary],
        model.tied_embeddings,
        model.formats,
        blocks.collect::<Vec<_>>(),
    )
}

#[test]
fn a_configuration_is_the_shipped_model_of_it() -> Outcome {
    for (name, shipped) in [
        ("qwen3_next", "qwen3_next_80b_a3b"),
        ("qwen3_5_moe", "qwen3_6_35b_a3b"),
        ("kimi_linear", "kimi_linear_48b_a3b"),
    ] {
        // The sizes of prefill and decode are no part of a configuration.
        let (of_config, _) = from_config(&config(name)?, &SMALL)?;
        let (of_file, _) = model::load(shipped, &SMALL)?.ok_or("no model")?;
        assert_eq!(essence(&of_config), essence(&of_file), "{name}");
    }
    Ok(())
}

#[test]
fn states_and_caches_follow_from_the_configurations() -> Outcome {
    let of = |result: &ModelResult, name: &str| {
        let block = result.blocks.iter().find(|block| block.name == name);
        block.map(|block| {
            [
                block.state_bytes,
                block.convolution_state_bytes,
                block.cache_bytes_per_token,
            ]
        })
    };
    let qwen = run("qwen3_next_80b_a3b", &SMALL, &["tpu-v7x"])?;
    // 32 states of 128 x 128 in f32; three rows of 2 x 16 x 128 + 32 x 128 channels in bf16; keys and values of 2 heads of 256 in bf16.
    assert_eq!(
        of(&qwen, "GDN"),
        Some([32 * 128 * 128 * 4, 3 * (2 * 16 * 128 + 32 * 128) * 2, 0])
    );
    assert_eq!(of(&qwen, "gated attention"), Some([0, 0, 2 * 2 * 256 * 2]));
    let kimi = run("kimi_linear_48b_a3b", &SMALL, &["tpu-v7x"])?;
    // A latent of 512 and 64 decoupled channels in bf16.
    assert_eq!(of(&kimi, "KDA"), Some([2 << 20, 3 * 3 * 4096 * 2, 0]));
    assert_eq!(of(&kimi, "MLA"), Some([0, 0, (512 + 64) * 2]));
    // FP8 with an f32 scale per row: 1 MiB of R4 and 8 heads x 256 scales, 8 KiB.
    let sla = run("sla_15L1A_r4", &SMALL, &["tpu-v7x"])?;
    assert_eq!(
        of(&sla, "SLA-R4").map(|bytes| bytes[0]),
        Some((1 << 20) + 8 * 1024)
    );
    // All sequences of a decode step: 36 layers of states, and 12 of caches of the context and the new token.
    let point = &qwen.chips[0].decode[0];
    assert_eq!(point.memory.state_bytes, 2 * 36 * (2 << 20));
    assert_eq!(point.memory.cache_bytes, 2 * 12 * 129 * 2048);
    Ok(())
}

#[test]
fn what_does_not_fit_is_out_of_memory_and_the_largest_batch_fits() -> Outcome {
    // 79.7e9 parameters in bf16 are 159 GB, an H200 has 141 GB.
    let wide = run("qwen3_next_80b_a3b", &SMALL, &["h200-sxm"])?;
    let memory = &wide.chips[0].decode[0].memory;
    assert!(!memory.fits && memory.largest_batch == 0, "{memory:?}");
    assert!(wide.headline.contains("OUT OF MEMORY"), "{}", wide.headline);
    assert_eq!(wide.warnings.len(), 1);
    // A byte each: they fit, and the router, embedding and norms stay wider.
    let narrow = run(
        "qwen3_next_80b_a3b",
        &[&SMALL[..], &["model.weights=fp8_e4m3"]].concat(),
        &["h200-sxm"],
    )?;
    let memory = &narrow.chips[0].decode[0].memory;
    assert!(memory.fits && narrow.warnings.is_empty(), "{memory:?}");
    assert!(memory.weight_bytes > narrow.parameters && memory.weight_bytes < narrow.parameters * 21 / 20);

    let at = |batch: u64| -> Result<bool, Box<dyn std::error::Error>> {
        let overrides = [
            "decode.context=131072".to_owned(),
            format!("decode.batch={batch}"),
            "prefill.tokens=512".to_owned(),
        ];
        let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
        let result = run("qwen3_6_35b_a3b", &overrides, &["h200-nvl"])?;
        Ok(result.chips[0].decode[0].memory.fits)
    };
    let overrides = ["decode.context=131072", "decode.batch=8", "prefill.tokens=512"];
    let largest = run("qwen3_6_35b_a3b", &overrides, &["h200-nvl"])?.chips[0].decode[0]
        .memory
        .largest_batch;
    // 71.7 GB are left; a sequence has 10 x 131073 x 2048 B of keys and values and 30 x 2.05 MiB of states: 2.75 GB.
    assert!((24..=26).contains(&largest), "{largest}");
    assert!(at(largest)? && !at(largest + 1)?);
    Ok(())
}

#[test]
fn touched_experts_are_those_of_independent_uniform_choices() {
    let experts = |count: usize, active: usize| small_experts(count, active, Scores::Softmax, false);
    let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-12;
    assert!(near(experts(512, 10).touched(1.0), 10.0));
    // One of two: 2 (1 - 2^-n).
    assert!(near(experts(2, 1).touched(10.0), 2.0 * (1.0 - 1.0 / 1024.0)));
    assert!(near(experts(8, 8).touched(3.0), 8.0));
    assert!(near(experts(256, 8).touched(1e6), 256.0));
}

fn small_experts(count: usize, active: usize, scores: Scores, bias: bool) -> Experts {
    Experts {
        count,
        active,
        hidden: 12,
        shared_hidden: None,
        shared_gate: false,
        scores,
        bias,
        normalised: true,
        scale: 2.5,
    }
}

const FORMATS: BlockFormats = BlockFormats {
    activations: Dtype::Bf16,
    weights: Dtype::Bf16,
};

type Inputs = BTreeMap<String, Tensor<f64>>;

/// Token by token: scores, the best of them, and the sum of what the chosen experts return. Result `[rows][width]`, and the choices.
fn token_by_token(
    experts: &Experts,
    inputs: &Inputs,
    rows: usize,
    width: usize,
) -> (Vec<Vec<f64>>, Vec<Vec<usize>>) {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let (x, router) = (&inputs["x"], &inputs["W_router"]);
    let (up, down) = (&inputs["W_gate_up"], &inputs["W_down"]);
    let (mut out, mut all_choices) = (Vec::new(), Vec::new());
    for t in 0..rows {
        let logits: Vec<f64> = (0..experts.count)
            .map(|e| (0..width).map(|c| x[[t, c]] * router[[c, e]]).sum())
            .collect();
        let total: f64 = logits.iter().map(|l| l.exp()).sum();
        let scores: Vec<f64> = logits
            .iter()
            .map(|l| match experts.scores {
                Scores::Softmax => l.exp() / total,
                Scores::Sigmoid => sigmoid(*l),
            })
            .collect();
        let ranked = |e: usize| {
            scores[e]
                + if experts.bias {
                    inputs["router_bias"][[e]]
                } else {
                    0.0
                }
        };
        let mut order: Vec<usize> = (0..experts.count).collect();
        order.sort_by(|&a, &b| ranked(b).total_cmp(&ranked(a)));
        order.truncate(experts.active);
        let sum: f64 = order.iter().map(|&e| scores[e]).sum();
        let mut y = vec![0.0; width];
        for &e in &order {
            let product = |column: usize| -> f64 { (0..width).map(|c| x[[t, c]] * up[[e, c, column]]).sum() };
            for h in 0..experts.hidden {
                let gate = product(h);
                let hidden = gate * sigmoid(gate) * product(experts.hidden + h);
                for (c, y) in y.iter_mut().enumerate() {
                    *y += experts.scale * scores[e] / sum * hidden * down[[e, h, c]];
                }
            }
        }
        out.push(y);
        all_choices.push(order);
    }
    (out, all_choices)
}

#[test]
fn grouped_experts_agree_with_every_token_on_its_own() -> Outcome {
    let (rows, width) = (37, 16);
    for (scores, bias) in [(Scores::Softmax, false), (Scores::Sigmoid, true)] {
        let experts = small_experts(11, 3, scores, bias);
        // Inputs do not depend on the routing, so any one with all experts draws them.
        let any = mixture(
            &experts,
            [rows, width],
            FORMATS,
            &Routing::of(&vec![vec![0, 1, 2]; rows], 11),
        )?;
        let named: Inputs = seeded_inputs(&any, 5)
            .into_iter()
            .map(|(id, tensor)| (any.node(id).name.to_string(), tensor))
            .collect();
        let (expected, choices) = token_by_token(&experts, &named, rows, width);

        let graph = mixture(&experts, [rows, width], FORMATS, &Routing::of(&choices, 11))?;
        let [y, all_scores, threshold] =
            ["y", "scores", "threshold"].map(|name| graph.output(name).ok_or_else(|| name.to_owned()));
        let (y, all_scores, threshold) = (y?, all_scores?, threshold?);
        let executed = execute(
            &graph,
            &seeded_inputs(&graph, 5),
            &[y, all_scores, threshold],
            Arithmetic::Exact,
        )?;
        let (values, scores, threshold) = (
            &executed.values[&y],
            &executed.values[&all_scores],
            &executed.values[&threshold],
        );
        let largest = expected
            .iter()
            .flatten()
            .fold(0.0_f64, |most, y| most.max(y.abs()));
        for (t, row) in expected.iter().enumerate() {
            for (c, y) in row.iter().enumerate() {
                assert!((values[[t, c]] - y).abs() < 1e-12 * largest, "{t} {c}");
            }
            // The passes of the graph find the same choices.
            let ranked = |e: usize| scores[[t, e]] + if bias { named["router_bias"][[e]] } else { 0.0 };
            let mut found: Vec<usize> = (0..11).filter(|&e| ranked(e) >= threshold[[t, 0]]).collect();
            let mut chosen = choices[t].clone();
            found.sort_unstable();
            chosen.sort_unstable();
            assert_eq!(found, chosen, "{t}");
        }
    }
    Ok(())
}

#[test]
fn work_of_a_mixture_is_that_of_its_choices() -> Outcome {
    // Router 2 T d E, experts 6 T k d f.
    let experts = small_experts(8, 2, Scores::Softmax, false);
    let (rows, width) = (64, 32);
    let graph = mixture(&experts, [rows, width], FORMATS, &Routing::even(rows, 2, 8))?;
    let flops = graph_work(&graph).matrix_flops.total();
    assert_eq!(flops, (2 * 64 * 32 * 8 + 6 * 64 * 2 * 32 * 12) as u64);
    Ok(())
}

#[test]
fn a_decode_step_reads_the_weights_of_touched_experts() -> Outcome {
    for (batch, chip) in [
        (1, "tpu-v7x"),
        (64, "tpu-v7x"),
        (64, "h200-nvl"),
        (256, "h200-nvl"),
    ] {
        let overrides = [
            format!("decode.batch={batch}"),
            "prefill.tokens=512".to_owned(),
            "decode.context=1024".to_owned(),
        ];
        let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
        let result = run("qwen3_6_35b_a3b", &overrides, &[chip])?;
        let point = &result.chips[0].decode[0];
        let touched = 256.0 * (1.0 - (1.0 - 8.0_f64 / 256.0).powi(batch));
        assert_eq!(point.touched_experts, Some(touched));
        let expert = 3.0 * 2048.0 * 512.0 * 2.0;
        for part in point.parts.iter().filter(|part| part.part == "feed-forward") {
            // The shared expert and the router are read as well; rows are small beside them.
            let least = (touched.round() + 1.0) * expert;
            let bytes = part.hbm_bytes as f64;
            assert!(
                bytes > least && bytes < 1.1 * least + 2e7,
                "{chip} {batch}: {bytes} against {least}"
            );
        }
    }
    Ok(())
}

#[test]
fn times_add_up_and_grow_with_batch_and_context() -> Outcome {
    let overrides = [
        "prefill.tokens=[1024, 4096]",
        "prefill.batch=1",
        "decode.batch=[1, 64]",
        "decode.context=[1024, 32768]",
    ];
    let result = run("kimi_linear_48b_a3b", &overrides, &["tpu-v7x", "h200-sxm"])?;
    for chip in &result.chips {
        assert_eq!((chip.prefill.len(), chip.decode.len()), (2, 4));
        for point in chip.prefill.iter().chain(&chip.decode) {
            let sum: f64 = point
                .parts
                .iter()
                .map(|part| part.count as f64 * part.time_us)
                .sum();
            assert!((point.time_us / sum - 1.0).abs() < 1e-12);
            let shares: f64 = point.parts.iter().map(|part| part.share).sum();
            assert!((shares - 1.0).abs() < 1e-12);
        }
        assert!(chip.prefill[1].time_us > chip.prefill[0].time_us);
        let [short_one, long_one, short, long] = &chip.decode[..] else {
            return Err("four points".into());
        };
        assert!(
            long_one.time_us > short_one.time_us
                && long.time_us > short.time_us
                && short.time_us > short_one.time_us
        );
        // A linear layer does not see the context.
        let kda = |point: &tpusim::report::model::PointResult| {
            let part = point
                .parts
                .iter()
                .find(|part| part.block == "KDA" && part.part == "mixer");
            part.map(|part| part.time_us)
        };
        assert_eq!(kda(short), kda(long));
    }
    Ok(())
}

#[test]
fn every_shipped_model_runs_and_is_written() -> Outcome {
    for name in model::shipped() {
        let result = run(name, &SMALL, &["tpu-v7x", "h100-sxm"])?;
        assert!(result.headline.starts_with(&result.name), "{}", result.headline);
        let (mut text, mut csv, mut json) = (Vec::new(), Vec::new(), Vec::new());
        write_text(&mut text, &result)?;
        write_csv(&mut csv, &result)?;
        write_json(&mut json, &result)?;
        let read: ModelResult = serde_json::from_slice(&json)?;
        assert_eq!(read, result, "{name}");
        let rows = String::from_utf8(csv)?.lines().count() - 1;
        let parts: usize = result
            .chips
            .iter()
            .flat_map(|chip| chip.prefill.iter().chain(&chip.decode))
            .map(|point| point.parts.len())
            .sum();
        assert_eq!(rows, parts, "{name}");
    }
    Ok(())
}

#[test]
fn wrong_configurations_are_refused_at_their_place() -> Outcome {
    let refused = |text: &str, parts: &[&str]| -> Outcome {
        let document = Document::parse("config.json", text)?;
        let Err(error) = from_config::<&str>(&document, &[]) else {
            return Err(format!("accepted: {text}").into());
        };
        let message = error.to_string();
        for part in parts {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
        Ok(())
    };
    refused(
        "{\n  \"model_type\": \"qwen3next\"\n}",
        &[
            "config.json:2:",
            "unknown architecture `qwen3next`; did you mean `qwen3_next`?",
            "`kimi_linear`",
        ],
    )?;
    refused(
        "{ \"hidden_size\": 8 }",
        &["config.json:1:", "missing key `model_type`", "`mamba2`"],
    )?;
    refused(
        "{\n  \"model_type\": \"llama\",\n  \"num_hidden_layers\": 2\n}",
        &["config.json:", "missing key `num_attention_heads`"],
    )?;
    refused(
        "{\n  \"model_type\": \"llama\",\n  \"num_hidden_layers\": \"two\"\n}",
        &["config.json:3:24", "num_hidden_layers", "whole number"],
    )?;
    refused(
        "{\n  \"model_type\": \"kimi_linear\",\n  \"num_hidden_layers\": 2,\n  \"linear_attn_config\": {\n    \"num_heads\": 2\n  }\n}",
        &["config.json:4:3", "missing key `head_dim`"],
    )?;
    refused(
        "{\n  \"model_type\": \"qwen3_5_moe\",\n  \"text_config\": {\n    \"hidden_size\": 8\n  }\n}",
        &["config.json:3:3", "missing key `num_hidden_layers`"],
    )
}
