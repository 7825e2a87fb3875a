//! Comparisons of runs of shipped workloads: what has to hold whatever the times are.

use approx::assert_relative_eq;
use tpusim::hardware;
use tpusim::report::comparison::{Comparison, PlanPair, RowPair, Speedup, SpeedupEvidence};
use tpusim::report::result::RunResult;
use tpusim::study::compare::compare;
use tpusim::study::{RunRequest, StackRequest, StackRun, run, run_layers, run_stack};
use tpusim::workload;

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn timed(name: &str, chips: &[&str], set: &[&str]) -> Result<RunResult, Box<dyn std::error::Error>> {
    let chips = chips
        .iter()
        .map(|chip| hardware::load(chip))
        .collect::<Result<_, _>>()?;
    Ok(run(RunRequest {
        workload: &workload::load(name, set)?,
        baseline: None,
        chips: &chips,
        overrides: Vec::new(),
        numeric: None,
    })?)
}

fn plans(comparison: &Comparison) -> impl Iterator<Item = &PlanPair> {
    comparison.chips.iter().flat_map(|chip| &chip.plans)
}

fn speedups(plan: &PlanPair) -> impl Iterator<Item = Speedup> {
    plan.rows
        .iter()
        .filter_map(|row| row.speedup)
        .chain([plan.speedup])
}

/// Chips with rows of their own, without any, and GPUs.
const CHIPS: [&str; 4] = ["tpu-v7x", "tpu-v5e", "h200-sxm", "h100-sxm"];

#[test]
fn a_speedup_turned_around_is_its_reciprocal() -> Outcome {
    for (a, b) in [
        ("kda", "sla_r4"),
        ("gdn", "softmax_gqa"),
        ("kda_decode", "rwkv7_decode"),
    ] {
        let (a, b) = (timed(a, &CHIPS, &[])?, timed(b, &CHIPS, &[])?);
        let (there, back) = (compare(&a, &b, ("a", "b"))?, compare(&b, &a, ("b", "a"))?);
        assert_eq!(there.chips.len(), CHIPS.len());
        for (there, back) in plans(&there).zip(plans(&back)) {
            let of_back: Vec<_> = back.rows.iter().filter(|row| row.speedup.is_some()).collect();
            let of_there = there.rows.iter().filter(|row| row.speedup.is_some());
            for (there, back) in of_there.zip(of_back) {
                assert_eq!(there.stage, back.stage);
                assert_eq!((there.a, there.b), (back.b, back.a));
            }
            for (there, back) in speedups(there).zip(speedups(back)) {
                let (low, high) = there.low.zip(there.high).ok_or("no interval")?;
                assert!(low <= high);
                assert_relative_eq!(there.ratio * back.ratio, 1.0, max_relative = 1e-12);
                assert_relative_eq!(low * back.high.ok_or("no end")?, 1.0, max_relative = 1e-12);
                assert_relative_eq!(high * back.low.ok_or("no end")?, 1.0, max_relative = 1e-12);
                assert_eq!(there.interval_from, back.interval_from);
            }
        }
    }
    Ok(())
}

#[test]
fn totals_are_those_of_the_runs_and_the_sums_of_their_rows() -> Outcome {
    let (a, b) = (
        timed("gdn", &CHIPS, &[])?,
        timed("linear_attention", &CHIPS, &[])?,
    );
    let comparison = compare(&a, &b, ("a", "b"))?;
    for (chip, (of_a, of_b)) in comparison.chips.iter().zip(a.chips.iter().zip(&b.chips)) {
        for (plan, (of_a, of_b)) in chip.plans.iter().zip(of_a.plans.iter().zip(&of_b.plans)) {
            assert_relative_eq!(plan.a_us, of_a.total_us, max_relative = 1e-15);
            assert_relative_eq!(plan.b_us, of_b.total_us, max_relative = 1e-15);
            let sum = |side: fn(&tpusim::report::comparison::RowPair) -> Option<f64>| -> f64 {
                plan.rows.iter().filter_map(side).sum()
            };
            assert_relative_eq!(
                sum(|row| row.a.map(|a| a.time_us)),
                of_a.total_us,
                max_relative = 1e-12
            );
            assert_relative_eq!(
                sum(|row| row.b.map(|b| b.time_us)),
                of_b.total_us,
                max_relative = 1e-12
            );
            let rows = of_a.stages.len().max(of_b.stages.len());
            assert!(plan.rows.len() >= rows);
        }
    }
    Ok(())
}

#[test]
fn anything_is_as_fast_as_itself() -> Outcome {
    for name in ["kda", "mla", "mesanet", "retnet_decode"] {
        let result = timed(name, &CHIPS, &[])?;
        let comparison = compare(&result, &result, ("a", "b"))?;
        assert!(comparison.identical && comparison.differences.is_empty());
        for plan in plans(&comparison) {
            for speedup in speedups(plan) {
                assert_eq!(
                    (speedup.ratio, speedup.low, speedup.high),
                    (1.0, Some(1.0), Some(1.0))
                );
            }
            assert!(plan.rows.iter().all(|row| !row.bound_changes()));
        }
    }
    Ok(())
}

#[test]
fn the_interval_of_a_ratio_is_narrower_than_the_quotient_of_both() -> Outcome {
    let (a, b) = (
        timed("kda", &["tpu-v7x"], &[])?,
        timed("sla_r4", &["tpu-v7x"], &[])?,
    );
    let comparison = compare(&a, &b, ("a", "b"))?;
    for (plan, (of_a, of_b)) in plans(&comparison).zip(a.chips[0].plans.iter().zip(&b.chips[0].plans)) {
        let ends = |low: Option<f64>, high: Option<f64>| low.zip(high).ok_or("no interval");
        let (low, high) = ends(plan.speedup.low, plan.speedup.high)?;
        let (a_low, a_high) = ends(of_a.low_us, of_a.high_us)?;
        let (b_low, b_high) = ends(of_b.low_us, of_b.high_us)?;
        assert!(low > a_low / b_high && high < a_high / b_low, "{}", plan.a);
    }
    Ok(())
}

/// The stage tables of the Systolic Linear Attention paper, which no fit has seen, give KDA over SLA-R4 on a core of a v7x.
#[test]
fn published_speedups_lie_within_their_intervals() -> Outcome {
    let (a, b) = (
        timed("kda", &["tpu-v7x"], &[])?,
        timed("sla_r4", &["tpu-v7x"], &[])?,
    );
    let comparison = compare(&a, &b, ("a", "b"))?;
    for (plan, published) in [("unfused", 3719.0 / 2005.0), ("fused", 3610.0 / 1525.0)] {
        let pair = plans(&comparison).find(|pair| pair.a == plan).ok_or("no plan")?;
        let (low, high) = pair.speedup.low.zip(pair.speedup.high).ok_or("no interval")?;
        assert!(
            (low..=high).contains(&published),
            "{plan}: {published} is not in {low} to {high}"
        );
    }
    Ok(())
}

type Loaded = (tpusim::workload::Stack, tpusim::config::Document);

fn stack(name: &str) -> Result<Loaded, Box<dyn std::error::Error>> {
    Ok(workload::load_stack::<&str>(name, &[])?.ok_or("no stack")?)
}

fn layers_of(stack: &Loaded, chips: &[&str]) -> Result<StackRun, Box<dyn std::error::Error>> {
    let chips = chips
        .iter()
        .map(|chip| hardware::load(chip))
        .collect::<Result<_, _>>()?;
    Ok(run_layers(stack, &chips, Vec::new())?)
}

#[test]
fn stacks_stand_beside_each_other_layer_by_layer() -> Outcome {
    let (of_a, of_b) = (stack("hybrid_7L1A_kda")?, stack("hybrid_7L1A")?);
    let (a, b) = (layers_of(&of_a, &CHIPS)?, layers_of(&of_b, &CHIPS)?);
    let comparison = compare(&a, &b, ("a", "b"))?;
    let chips = CHIPS
        .iter()
        .map(|chip| hardware::load(chip))
        .collect::<Result<_, _>>()?;
    for (stack, side) in [(&of_a, false), (&of_b, true)] {
        let whole = run_stack(StackRequest {
            stack,
            chips: &chips,
            overrides: Vec::new(),
            numeric: Vec::new(),
        })?;
        let totals = whole.chips.iter().flat_map(|chip| &chip.plans);
        for (plan, of_run) in plans(&comparison).zip(totals) {
            let (total, kinds): (f64, Vec<_>) = if side {
                (plan.b_us, plan.layers.iter().map(|layers| layers.b).collect())
            } else {
                (plan.a_us, plan.layers.iter().map(|layers| layers.a).collect())
            };
            assert_relative_eq!(total, of_run.total_us, max_relative = 1e-12);
            for (kind, of_run) in kinds.into_iter().zip(&of_run.kinds) {
                let kind = kind.ok_or("a kind of one side alone")?;
                assert_eq!(kind.count, of_run.count);
                assert_relative_eq!(kind.time_us, of_run.total_us, max_relative = 1e-12);
            }
        }
    }
    for plan in plans(&comparison) {
        let names: Vec<&str> = plan.layers.iter().map(|layers| layers.name.as_str()).collect();
        assert_eq!(names, ["KDA | SLA-R4", "full attention"]);
        for layers in &plan.layers {
            let own = |row: &&RowPair| row.layers.as_ref() == Some(&layers.name);
            let of_rows: f64 = plan
                .rows
                .iter()
                .filter(own)
                .filter_map(|row| row.a)
                .map(|a| a.time_us)
                .sum();
            assert_relative_eq!(of_rows, layers.a.ok_or("no A")?.time_us, max_relative = 1e-12);
        }
        // Full attention is the very same on both sides.
        let full = plan.layers[1].speedup.ok_or("no speedup")?;
        assert_eq!((full.ratio, full.low, full.high), (1.0, Some(1.0), Some(1.0)));
        assert_eq!(full.interval_from, Some(SpeedupEvidence::SameKernels));
    }
    assert!(
        comparison
            .differences
            .iter()
            .all(|difference| difference.field.starts_with("KDA | SLA-R4: "))
    );
    Ok(())
}

#[test]
fn more_layers_of_one_kind_take_as_many_times_as_long() -> Outcome {
    let a = layers_of(&stack("hybrid_4L1A_kda")?, &CHIPS)?;
    let b = layers_of(&stack("hybrid_7L1A_kda")?, &CHIPS)?;
    let comparison = compare(&a, &b, ("a", "b"))?;
    let [difference] = &comparison.differences[..] else {
        return Err("one difference".into());
    };
    let values = (difference.a.as_deref(), difference.b.as_deref());
    assert_eq!(
        (difference.field.as_str(), values),
        ("KDA: layers", (Some("4"), Some("7")))
    );
    for plan in plans(&comparison) {
        let linear = plan.layers[0].speedup.ok_or("no speedup")?;
        // Whatever the error of a layer is, four take 4/7 of seven.
        for ratio in [Some(linear.ratio), linear.low, linear.high] {
            assert_relative_eq!(ratio.ok_or("no interval")?, 4.0 / 7.0, max_relative = 1e-12);
        }
        // How much of a stack those layers are is not known exactly.
        let (low, high) = plan.speedup.low.zip(plan.speedup.high).ok_or("no interval")?;
        assert!(
            low < plan.speedup.ratio && plan.speedup.ratio < high,
            "{low} {high}"
        );
        assert!(4.0 / 7.0 < plan.speedup.ratio && plan.speedup.ratio < 1.0);
    }
    Ok(())
}

#[test]
fn a_stack_of_one_layer_is_that_layer() -> Outcome {
    let layer = timed("softmax_gqa", &CHIPS, &[])?;
    let of_stack = layers_of(&stack("hybrid_0L1A")?, &CHIPS)?;
    let comparison = compare(&layer, &of_stack, ("a", "b"))?;
    for plan in plans(&comparison) {
        assert_eq!((plan.speedup.ratio, plan.speedup.low), (1.0, Some(1.0)));
        assert_eq!(plan.layers.len(), 1);
    }
    Ok(())
}
