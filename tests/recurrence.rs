//! The chunk graphs against the token-by-token recurrence.
//!
//! In f64 every variant agrees to rounding; 200 tokens leave a partial last chunk, and the state starts from a given one.

use tpusim::study::{Extent, check};
use tpusim::workload;

/// Far above f64 rounding of a few hundred tokens, far below any error of the formulas.
const EXACT: f64 = 1e-10;

fn exact_error(name: &str, overrides: &[String]) -> f64 {
    let mut all: Vec<String> = [
        "layer.model_width=96",
        "layer.initial_state=given",
        "numeric.tokens=200",
    ]
    .map(str::to_owned)
    .to_vec();
    all.extend_from_slice(overrides);
    let (workload, _) =
        workload::load(name, &all).unwrap_or_else(|e| panic!("{name} {overrides:?}: {}", e.render()));
    check(&workload, Extent::Sample)
        .unwrap_or_else(|e| panic!("{name} {overrides:?}: {e}"))
        .exact_rel_error
}

fn assert_exact(name: &str, fields: &[&str]) {
    let overrides: Vec<String> = fields.iter().map(|f| format!("layer.{f}")).collect();
    let error = exact_error(name, &overrides);
    assert!(error <= EXACT, "{name} {fields:?}: {error:e}");
}

#[test]
fn every_gram_variant_agrees_in_both_read_conventions() {
    let cases: [(&str, &[&str]); 4] = [
        ("gdn", &["scalar_mask", "folded"]),
        ("kda", &["pivot", "pivot_causal", "broadcast", "halving"]),
        (
            "sla_r4",
            &[
                "folded",
                "tile_masks",
                "pivot",
                "pivot_causal",
                "broadcast",
                "halving",
            ],
        ),
        ("sla_r2", &["folded"]),
    ];
    for (name, grams) in cases {
        for gram in grams {
            for read in ["decayed", "undecayed"] {
                assert_exact(
                    name,
                    &[
                        &format!("gram={gram}"),
                        &format!("read={read}"),
                        "decay_gate=bounded",
                        "decay_bound=-1.3",
                    ],
                );
            }
        }
    }
}

#[test]
fn every_pivot_row_agrees() {
    for pivot in ["middle", "first"] {
        assert_exact("kda", &["gram=pivot", &format!("pivot={pivot}")]);
        for chunk in [8, 16, 32, 64, 128] {
            let (pivot, chunk) = (format!("pivot={pivot}"), format!("chunk={chunk}"));
            assert_exact("kda", &["gram=halving", &pivot, &chunk, "decay_bound=-5"]);
        }
        assert_exact("sla_r4", &["gram=folded", &format!("pivot={pivot}")]);
    }
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
    ] {
        for chunk in [16, 64] {
            assert_exact(
                "sla_r4",
                &[&format!("inverse={inverse}"), &format!("chunk={chunk}")],
            );
        }
    }
    for chunk in [32, 64, 128] {
        assert_exact("sla_r4", &["inverse=packed_doubling", &format!("chunk={chunk}")]);
    }
    assert_exact(
        "kda",
        &["inverse=packed_doubling", "gram=halving", "key_heads=16"],
    );
    // A Neumann series with as many terms as the chunk has rows is exact too: the matrix is nilpotent.
    assert_exact("kda", &["inverse=neumann", "neumann_steps=15", "chunk=16"]);
}

#[test]
fn a_remainder_solved_in_the_loop_agrees() {
    for (name, inverse) in [
        ("gdn", "blocked16"),
        ("kda", "blocked16"),
        ("sla_r4", "block_doubling"),
        ("sla_r2", "packed_doubling"),
    ] {
        for (read, state) in [("decayed", "f32"), ("undecayed", "row_fp8")] {
            let (inverse, read) = (format!("inverse={inverse}"), format!("read={read}"));
            assert_exact(
                name,
                &["solve=remainder", &inverse, &read, &format!("state={state}")],
            );
        }
    }
    // Value heads with step sizes of their own on a shared key head, and a chunk that is no power of two.
    assert_exact("gdn", &["solve=remainder", "key_heads=16", "chunk=48"]);
    assert_exact("kda", &["solve=remainder", "key_heads=16", "chunk=48"]);
}

#[test]
fn every_tile_count_and_sharing_agrees() {
    for tiles in [1, 4, 16, 64, 256] {
        assert_exact("sla_r4", &[&format!("decay_tiles={tiles}"), "gram=folded"]);
    }
    for (key_heads, value_heads) in [(8, 8), (8, 16), (8, 32), (4, 32)] {
        assert_exact(
            "sla_r4",
            &[
                &format!("key_heads={key_heads}"),
                &format!("value_heads={value_heads}"),
            ],
        );
    }
    assert_exact("gdn", &["key_heads=16", "gram=scalar_mask"]);
    assert_exact("kda", &["key_heads=16", "gram=pivot"]);
}

#[test]
fn odd_sizes_agree() {
    assert_exact("kda", &["key_dim=48", "value_dim=40", "chunk=32"]);
    assert_exact(
        "gdn",
        &[
            "key_dim=33",
            "value_dim=7",
            "chunk=20",
            "inverse=row_substitution",
        ],
    );
    assert_exact(
        "sla_r4",
        &["key_dim=96", "value_dim=24", "decay_tiles=3", "chunk=128"],
    );
    assert_exact("gdn", &["chunk=256", "conv_width=2", "output_gate=none"]);
}

#[test]
fn declared_formats_err_as_their_mantissas_say() {
    // bf16 keeps 8 bits: errors near 2^-8 = 4e-3; f32 activations with three-pass products near 2^-16.
    let rms = |fields: &[&str]| {
        let mut all = vec!["layer.model_width=96".to_owned()];
        all.extend(fields.iter().map(|f| format!("layer.{f}")));
        let (workload, _) = workload::load("sla_r4", &all).expect("loads");
        let result = check(&workload, Extent::Sample).expect("runs");
        assert_eq!(result.non_finite, None);
        (result.output_rms_error, result.state_rms_error.expect("a state"))
    };
    let (bf16, _) = rms(&["activations=bf16", "state=bf16"]);
    assert!((1e-3..3e-2).contains(&bf16), "{bf16:e}");
    let (_, fp8_state) = rms(&["activations=bf16", "state=row_fp8"]);
    let (_, f32_state) = rms(&["activations=bf16", "state=f32"]);
    assert!(fp8_state > 2.0 * f32_state, "{fp8_state:e} against {f32_state:e}");
}

#[test]
fn the_folded_gram_overflows_where_its_limit_says() {
    // Finite iff (C/2) |l| < 88.7: at C = 64 constant decays of 2.7 hold and 2.8 do not. A gate with a steep slope and a large bias sits at its bound;
    // here the bound itself is moved.
    let run = |bound: &str, gram: &str| {
        let overrides = [
            "layer.model_width=96".to_owned(),
            format!("layer.decay_bound={bound}"),
            format!("layer.gram={gram}"),
            "layer.activations=f32".to_owned(),
            "layer.mechanism=kda".to_owned(),
        ];
        let (workload, _) = workload::load("kda", &overrides).expect("loads");
        check(&workload, Extent::Sample).expect("runs")
    };
    let safe = run("-2.7", "folded");
    assert_eq!(safe.non_finite, None);
    assert!(safe.overflow_exponent.expect("a limit") < safe.overflow_limit.expect("a limit"));
    // Half a block of 16 rows on one side of a pivot, whatever the chunk.
    let halved = run("-5", "halving");
    assert_eq!(halved.non_finite, None);
    assert_eq!(halved.overflow_exponent, Some(40.0));
    let beyond = run("-200", "folded");
    assert!(beyond.non_finite.is_some(), "{beyond:?}");
    let differences = run("-200", "pivot_causal");
    assert_eq!(differences.non_finite, None);
}
