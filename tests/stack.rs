//! Stacks of layers: sums over kinds, state and cache apart.

use tpusim::hardware;
use tpusim::report::stack::{StackResult, write_csv, write_json, write_text};
use tpusim::study::{Chips, StackRequest, run_stack};
use tpusim::workload::{load_stack, shipped_stacks};

fn chips(names: &[&str]) -> Chips {
    names
        .iter()
        .map(|name| hardware::load_with::<&str>(name, &[]).unwrap_or_else(|e| panic!("{}", e.render())))
        .collect()
}

fn run(name: &str, overrides: &[&str], on: &[&str]) -> StackResult {
    let stack = load_stack(name, overrides)
        .unwrap_or_else(|e| panic!("{name}: {}", e.render()))
        .unwrap_or_else(|| panic!("`{name}` is no stack"));
    let request = StackRequest {
        stack: &stack,
        chips: &chips(on),
        overrides: Vec::new(),
        numeric: Vec::new(),
    };
    run_stack(request).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn every_shipped_stack_runs_and_adds_up() {
    for name in shipped_stacks() {
        let result = run(name, &[], &["tpu-v7x", "tpu-v6e"]);
        assert_eq!(result.chips.len(), 2, "{name}");
        for chip in &result.chips {
            assert_eq!(chip.plans.len(), 2, "{name}");
            for plan in &chip.plans {
                let sum: f64 = plan
                    .kinds
                    .iter()
                    .map(|kind| kind.count as f64 * kind.time_us)
                    .sum();
                assert!((plan.total_us / sum - 1.0).abs() < 1e-12, "{name} {}", plan.name);
                let shares: f64 = plan.kinds.iter().map(|kind| kind.share).sum();
                assert!((shares - 1.0).abs() < 1e-12);
            }
        }
        assert!(result.headline.starts_with(&result.name), "{}", result.headline);
    }
}

#[test]
fn a_linear_layer_keeps_a_state_and_a_full_one_a_cache() {
    // Per KDA layer 32 x 128 x 128 in f32 = 2 MiB; per token of the full layer 2 x 8 x 128 x 2 B = 4096 B.
    for (tokens, cache) in [(1024_u64, 4_u64 << 20), (131_072, 512 << 20)] {
        let result = run("hybrid_7L1A_kda", &[&format!("tokens={tokens}")], &["tpu-v7x"]);
        let [linear, full] = &result.kinds[..] else {
            panic!("two kinds")
        };
        assert_eq!((linear.count, full.count, result.layers), (7, 1, 8));
        assert_eq!((linear.state_bytes, full.state_bytes), (2 << 20, 0));
        assert_eq!((linear.cache_bytes, full.cache_bytes), (0, cache));
        assert_eq!(result.cache_bytes, cache);
        assert_eq!(
            result.state_bytes,
            7 * ((2 << 20) + linear.convolution_state_bytes)
        );
    }
}

#[test]
fn states_of_the_formats_of_the_paper() {
    // SLA-R4 in bf16 2 MiB, in FP8 with row scales 1 MiB + 8 KiB.
    let state = |name: &str| run(name, &[], &["tpu-v7x"]).kinds[0].state_bytes;
    assert_eq!(state("hybrid_7L1A"), 2 << 20);
    assert_eq!(state("hybrid_15L1A"), (1 << 20) + (8 << 10));
}

#[test]
fn full_attention_overtakes_with_the_tokens() {
    // Its work grows with the square of the tokens, that of the linear layers does not.
    let share = |tokens: usize| {
        let result = run("hybrid_15L1A", &[&format!("tokens={tokens}")], &["tpu-v7x"]);
        result.chips[0].plans[1].kinds[1].share
    };
    let shares = [8192, 65_536, 524_288].map(share);
    assert!(shares[0] < shares[1] && shares[1] < shares[2], "{shares:?}");
    assert!(shares[2] > 0.5, "{shares:?}");
}

#[test]
fn no_rotation_in_hybrids() {
    let (hybrid, _) = load_stack::<&str>("hybrid_4L1A", &[])
        .expect("loads")
        .expect("a stack");
    let full = hybrid.layers.last().expect("layers");
    assert_eq!(full.workload.0.layer.rotary_channels(128), 0);
    let (plain, _) = load_stack::<&str>("hybrid_0L1A", &[])
        .expect("loads")
        .expect("a stack");
    assert_eq!(plain.layers[0].workload.0.layer.rotary_channels(128), 128);
}

#[test]
fn formats_hold_the_same_numbers() {
    let result = run("hybrid_4L1A_kda", &[], &["tpu-v7x"]);
    let mut json = Vec::new();
    write_json(&mut json, &result).expect("writes");
    assert_eq!(
        serde_json::from_slice::<StackResult>(&json).expect("reads"),
        result
    );
    let mut csv = Vec::new();
    write_csv(&mut csv, &result).expect("writes");
    assert_eq!(String::from_utf8_lossy(&csv).lines().count(), 1 + 2 * 2);
    let mut text = Vec::new();
    write_text(&mut text, &result).expect("writes");
    assert_eq!(
        String::from_utf8_lossy(&text).lines().next(),
        Some(result.headline.as_str())
    );
    let docs = include_str!("../docs/formats.md");
    let header = String::from_utf8_lossy(&csv)
        .lines()
        .next()
        .map(str::to_owned)
        .unwrap_or_default();
    for column in header.split(',') {
        assert!(
            docs.contains(&format!("`{column}`")),
            "docs/formats.md does not mention `{column}`"
        );
    }
}

#[test]
fn faults_are_reported_where_they_are() {
    for (set, expected) in [
        ("stack.0.count=0", "a whole number from 1"),
        (
            "stack.0.workload=nothing.yaml",
            "cannot find the workload `nothing.yaml`",
        ),
        ("stack.0.workload=hybrid_0L1A", "is a stack"),
        ("plans=[fused, other]", "unknown plan `other`"),
        ("stack=[]", "at least one kind of layer"),
        ("stack.1.set=[layer.rotary=2]", "even number"),
    ] {
        let error = load_stack("hybrid_4L1A", &[set]).expect_err(set).render();
        assert!(error.contains(expected), "{set}: {error}");
    }
    assert!(load_stack::<&str>("kda", &[]).expect("loads").is_none());
}
