//! Packed sequences and decode steps of every mechanism that has them, against the recurrence in f64.

use std::io::Write;

use tpusim::study::{Extent, check};
use tpusim::workload;

/// Far above f64 rounding of a few hundred tokens, far below any error of the formulas.
const EXACT: f64 = 1e-10;

#[test]
fn decode_steps_follow_the_recurrence() {
    let mechanisms = [
        "gla",
        "linear_attention",
        "linear_attention, normaliser: true",
        "retnet",
        "mamba2",
        "deltanet",
        "gdn2",
        "q_delta",
        "kaczmarz",
        "comba",
        "gdn",
        "kda",
        "rwkv6",
        "rwkv7",
        "deltaproduct",
        "preconditioned_delta",
    ];
    for mechanism in mechanisms {
        let context = if mechanism == "retnet" {
            "context: 300, "
        } else {
            ""
        };
        for readout in ["after_update", "before_update"] {
            let text = format!(
                "name: decode\nlayer: {{ mechanism: {mechanism}, {context}batch: 4, model_width: 48, key_heads: 2, value_heads: 2, key_dim: 32, \
                 value_dim: 16, readout: {readout}, state_products: vector }}\nplans: [fused]\npass: decode\nhardware: [tpu-v7x]\n\
                 numeric: {{ tokens: 120, key_heads: 2, seed: 3 }}\n"
            );
            let mut file = tempfile::Builder::new()
                .suffix(".yaml")
                .tempfile()
                .expect("a file");
            file.write_all(text.as_bytes()).expect("written");
            let path = file.path().to_str().expect("a name").to_owned();
            let (workload, _) =
                workload::load::<&str>(&path, &[]).unwrap_or_else(|e| panic!("{}", e.render()));
            let error = check(&workload, Extent::Sample).expect("runs").exact_rel_error;
            assert!(error <= EXACT, "{mechanism} {readout}: {error:e}");
        }
    }
}

#[test]
fn packed_sequences_follow_the_recurrence_of_each() {
    // Shorter than the convolution, a single token, exact multiples of the chunk, and ragged ends.
    let lengths = "layer.sequences=[2, 64, 1, 130, 200]";
    let names = [
        "gla",
        "linear_attention",
        "mamba2",
        "deltanet",
        "gdn2",
        "q_delta",
        "kaczmarz",
        "comba",
        "gdn",
        "kda",
        "sla_r4",
        "retnet",
        "rwkv6",
        "rwkv7",
        "deltaproduct",
        "preconditioned_delta",
        "mesanet",
        "mesanet_ungated",
        "spd_sla_w",
    ];
    for name in names {
        let fields = [
            lengths,
            "layer.tokens=397",
            "layer.model_width=48",
            "layer.chunk=64",
            "layer.initial_state=given",
            "numeric.tokens=397",
        ];
        let (workload, _) =
            workload::load(name, &fields).unwrap_or_else(|e| panic!("{name}: {}", e.render()));
        let error = check(&workload, Extent::Sample).expect("runs").exact_rel_error;
        assert!(error <= EXACT, "{name}: {error:e}");
    }
}
