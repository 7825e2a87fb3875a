//! The numeric probes against what theory says of them.

use tpusim::report::probe::ProbeTable;
use tpusim::study::probe::probe;

fn value(table: &ProbeTable, probe: &str, mechanism: &str, condition: &str, state: &str) -> f64 {
    let found = table.rows.iter().find(|r| {
        (r.probe, r.mechanism, r.condition.as_str(), r.state) == (probe, mechanism, condition, state)
    });
    found
        .unwrap_or_else(|| panic!("{probe} {mechanism} {condition} {state}"))
        .value
}

#[test]
fn write_once_has_the_crosstalk_of_random_keys() {
    // n - 1 other keys, each with a squared inner product of 1/64: error sqrt((n - 1) / 64), to the scatter of a finite draw.
    let table = probe(7);
    for (condition, n) in [("16 keys", 16.0), ("64 keys", 64.0), ("128 keys", 128.0)] {
        let expected = f64::sqrt((n - 1.0) / 64.0);
        let found = value(&table, "write_once", "mamba2", condition, "f32");
        assert!(
            (found / expected - 1.0).abs() < 0.2,
            "{condition}: {found} against {expected}"
        );
    }
    // A bf16 state errs by some 2^-9 times the square root of the tokens, which crosstalk of that size hides.
    let solved = |state| value(&table, "write_once", "mesanet, no forgetting", "16 keys", state);
    assert!((solved("bf16") / solved("f32") - 1.0).abs() < 4.0 / 512.0);
}

#[test]
fn overwriting_is_what_the_delta_rule_is_for() {
    let table = probe(7);
    let of = |mechanism, state| value(&table, "overwrite", mechanism, "16 keys x 32", state);
    // Orthogonal keys: the delta rule returns the last value to rounding, a sum holds 31 older values of the same size.
    assert!(of("kda", "f32") < 1e-5);
    assert!((1e-4..2e-2).contains(&of("kda", "bf16")));
    assert!((of("mamba2", "f32") / f64::sqrt(31.0) - 1.0).abs() < 0.2);
    // Averages of everything are far from the last value; forgetting brings it nearer. Where the second moments are forgotten too
    // fast, the ridge outweighs them and the answer shrinks.
    assert!(of("mesanet, no forgetting", "f32") > 0.8);
    assert!(of("mesanet, gated", "f32") < of("mesanet, no forgetting", "f32"));
    assert!(of("mesanet, gated", "f32") < of("mesanet, aggressive", "f32"));
}

#[test]
fn a_diagonal_preconditioner_sees_no_structure_in_rotated_keys() {
    let table = probe(7);
    let of = |mechanism, condition| value(&table, "keys", mechanism, condition, "f32");
    assert!(of("preconditioned_delta", "axis-aligned") < of("preconditioned_delta", "rotated"));
    for mechanism in ["mamba2", "kda", "mesanet, no forgetting"] {
        let (axis, rotated) = (of(mechanism, "axis-aligned"), of(mechanism, "rotated"));
        assert!(
            (axis / rotated - 1.0).abs() < 1e-2,
            "{mechanism}: {axis} against {rotated}"
        );
    }
}

#[test]
fn counting_needs_reflections_and_rotations() {
    let table = probe(7);
    let of = |mechanism, condition| value(&table, "modulus", mechanism, condition, "f32");
    assert!(of("kda, step up to 1", "mod 2") < 0.7);
    assert!((of("sla, step up to 2", "mod 2") - 1.0).abs() < 1e-12);
    assert!(of("sla, step up to 2", "mod 3") < 0.7);
    for condition in ["mod 2", "mod 3", "mod 5"] {
        assert!(
            (of("deltaproduct, two writes", condition) - 1.0).abs() < 1e-12,
            "{condition}"
        );
    }
}

#[test]
fn tiles_of_one_channel_lose_nothing_and_sorting_helps() {
    let table = probe(7);
    let of = |mechanism, condition| value(&table, "tiles", mechanism, condition, "f32");
    assert!(of("channels as drawn", "256 tiles") < 1e-12);
    for condition in ["4 tiles", "16 tiles", "64 tiles"] {
        assert!(of("channels sorted", condition) < of("channels as drawn", condition));
    }
    assert_eq!(probe(7), probe(7));
}

#[test]
fn state_errors_level_off_and_order_by_format() {
    let table = probe(7);
    let of = |condition, state| value(&table, "growth", "kda", condition, state);
    for condition in ["256 tokens", "4096 tokens"] {
        assert!(of(condition, "f32") < 1e-5);
        assert!((5e-4..3e-2).contains(&of(condition, "bf16")));
        assert!(of(condition, "row_fp8") > 4.0 * of(condition, "bf16"));
    }
    // What is added is forgotten: four times the tokens do not double the error.
    assert!(of("4096 tokens", "bf16") < 2.0 * of("1024 tokens", "bf16"));
}

#[test]
fn inverses_fail_where_powers_grow() {
    let table = probe(7);
    let of = |name, condition| value(&table, "inverses", name, condition, "f32");
    for name in ["row_substitution", "blocked16", "block_doubling"] {
        assert!(
            of(name, "random keys") < 1e-3 && of(name, "correlated keys") < 1e-2,
            "{name}"
        );
    }
    for name in ["product", "newton"] {
        assert!(of(name, "correlated keys") > 1e3, "{name}");
    }
    // Powers of random keys first grow: four terms err by more than two. Eight are better; correlated keys never converge within 8.
    let random: Vec<f64> = ["neumann, 2 terms", "neumann, 4 terms", "neumann, 8 terms"]
        .iter()
        .map(|n| of(n, "random keys"))
        .collect();
    assert!(random[1] > random[2] && random[0] > random[2], "{random:?}");
    assert!(of("neumann, 8 terms", "correlated keys") > 1.0);
}
