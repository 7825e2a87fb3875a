//! What holds for every layer, plan and chip: no rate above its roof, and no time that falls when there is more to do or less to do it with.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{RngSeed, TestCaseResult};
use tpusim::dtype::Dtype;
use tpusim::hardware::{self, Chip};
use tpusim::report::result::{ChipResult, RunResult};
use tpusim::study::{self, RunRequest};
use tpusim::workload;

/// Rounding of sums of a few thousand terms.
const ROUNDING: f64 = 1e-9;

/// Fields of a layer by name; the order of the names is that of the overrides.
type Fields = BTreeMap<&'static str, String>;

/// A small layer on a chip.
#[derive(Debug, Clone)]
struct Case {
    mechanism: &'static str,
    fields: Fields,
    chip: &'static str,
}

/// Variants that have a meaning for the mechanism, each with the further fields it needs.
fn grams(mechanism: &str) -> &'static [&'static str] {
    match mechanism {
        "gdn" => &["scalar_mask", "folded"],
        "kda" => &["pivot", "pivot_causal", "folded", "broadcast"],
        _ => &["folded", "tile_masks", "pivot", "pivot_causal", "broadcast"],
    }
}

const INVERSES: [&str; 7] = [
    "row_substitution",
    "blocked16",
    "product",
    "newton",
    "two_level",
    "block_doubling",
    "neumann",
];

fn case() -> impl Strategy<Value = Case> {
    let sizes = (
        1..=3_usize,
        1..=700_usize,
        select(vec![96_usize, 128, 256, 1024]),
        select(vec![1_usize, 2, 4, 6]),
        select(vec![1_usize, 2, 4]),
        select(vec![32_usize, 64, 96, 128, 256]),
        select(vec![32_usize, 64, 128, 160]),
        select(vec![16_usize, 32, 64, 128]),
    );
    let variants = (
        select(vec!["gdn", "kda", "sla"]),
        0..20_usize,
        select(INVERSES.to_vec()),
        select(vec!["f32", "bf16", "row_fp8"]),
        select(vec!["bf16", "f32"]),
        select(vec!["default", "high", "highest"]),
        select(vec![2_usize, 4, 8]),
        any::<bool>(),
        1..=4_usize,
    );
    (sizes, variants, select(hardware::shipped())).prop_map(|(sizes, variants, chip)| {
        let (batch, tokens, width, key_heads, shared, key_dim, value_dim, chunk) = sizes;
        let (mechanism, gram, inverse, state, activations, precision, tiles, first, chunks) = variants;
        let grams = grams(mechanism);
        let mut fields = Fields::from([
            ("layer.batch", batch.to_string()),
            ("layer.tokens", tokens.to_string()),
            ("layer.model_width", width.to_string()),
            ("layer.key_heads", key_heads.to_string()),
            ("layer.value_heads", (key_heads * shared).to_string()),
            ("layer.key_dim", key_dim.to_string()),
            ("layer.value_dim", value_dim.to_string()),
            ("layer.chunk", chunk.to_string()),
            ("layer.gram", grams[gram % grams.len()].to_owned()),
            ("layer.inverse", inverse.to_owned()),
            ("layer.state", state.to_owned()),
            ("layer.state_precision", precision.to_owned()),
            ("layer.activations", activations.to_owned()),
            (
                "layer.initial_state",
                if first { "zero" } else { "given" }.to_owned(),
            ),
            ("numeric.tokens", "1".to_owned()),
            ("program.tokens", (chunks * chunk).to_string()),
        ]);
        if inverse == "neumann" {
            fields.insert("layer.neumann_steps", "3".to_owned());
        }
        if mechanism == "sla" {
            fields.insert("layer.decay_tiles", tiles.to_string());
        }
        Case {
            mechanism,
            fields,
            chip,
        }
    })
}

impl Case {
    fn with(&self, field: &'static str, value: usize) -> Self {
        let mut changed = self.clone();
        changed.fields.insert(field, value.to_string());
        changed
    }

    fn size(&self, field: &str) -> usize {
        self.fields
            .get(field)
            .and_then(|text| text.parse().ok())
            .unwrap_or(0)
    }

    fn times(&self, chip_fields: &[String]) -> Result<RunResult, TestCaseError> {
        let name = if self.mechanism == "sla" {
            "sla_r4"
        } else {
            self.mechanism
        };
        let overrides: Vec<String> = self
            .fields
            .iter()
            .map(|(field, value)| format!("{field}={value}"))
            .collect();
        let fail = |message: String| TestCaseError::fail(format!("{overrides:?} {chip_fields:?}: {message}"));
        let loaded = workload::load(name, &overrides).map_err(|error| fail(error.render()))?;
        let chips = vec![hardware::load_with(self.chip, chip_fields).map_err(|error| fail(error.render()))?];
        study::run(RunRequest {
            workload: &loaded,
            baseline: None,
            chips: &chips,
            overrides: Vec::new(),
            numeric: None,
        })
        .map_err(|error| fail(error.to_string()))
    }

    fn chip(&self) -> Result<Chip, TestCaseError> {
        hardware::load(self.chip)
            .map(|(chip, _)| chip)
            .map_err(|error| TestCaseError::fail(error.render()))
    }
}

/// Time of every plan, by name.
fn totals(result: &RunResult) -> BTreeMap<String, f64> {
    let plans = result.chips.iter().flat_map(|chip| &chip.plans);
    plans.map(|plan| (plan.name.clone(), plan.total_us)).collect()
}

/// HBM time of the stages that leave cores idle. Larger work may put these cores to use, and what does not grow with it, parameters,
/// is then fetched over more of them: no more than this can be saved.
fn hbm_of_few_cores(result: &RunResult, cores: u64) -> BTreeMap<String, f64> {
    let plans = result.chips.iter().flat_map(|chip| &chip.plans);
    plans
        .map(|plan| {
            let few = plan.stages.iter().filter(|stage| stage.grid_parallel < cores);
            (plan.name.clone(), few.map(|stage| stage.hbm_us).sum())
        })
        .collect()
}

fn never_falls(what: &str, before: &RunResult, after: &RunResult) -> TestCaseResult {
    falls_by_no_more(what, before, after, &BTreeMap::new())
}

fn falls_by_no_more(
    what: &str,
    before: &RunResult,
    after: &RunResult,
    saved: &BTreeMap<String, f64>,
) -> TestCaseResult {
    let after = totals(after);
    for (plan, before) in totals(before) {
        let after = after.get(&plan).copied().unwrap_or(0.0);
        let saved = saved.get(&plan).copied().unwrap_or(0.0);
        prop_assert!(
            after >= before * (1.0 - ROUNDING) - saved,
            "{what}: {plan} falls from {before} to {after} us, by {:.2} %",
            100.0 * (1.0 - after / before)
        );
    }
    Ok(())
}

fn one_chip(result: &RunResult) -> Result<&ChipResult, TestCaseError> {
    result
        .chips
        .first()
        .ok_or_else(|| TestCaseError::fail("no chip in the result"))
}

proptest! {
    // The same cases on every run.
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, rng_seed: RngSeed::Fixed(7), ..ProptestConfig::default() })]

    #[test]
    fn times_are_sums_of_positive_stages(case in case()) {
        let arrays = f64::from(case.chip()?.matrix_unit.count - 1);
        let result = case.times(&[])?;
        for plan in &one_chip(&result)?.plans {
            let sum: f64 = plan.stages.iter().map(|stage| stage.time_us).sum();
            prop_assert!((sum / plan.total_us - 1.0).abs() < ROUNDING, "{} is not {sum}", plan.total_us);
            for stage in &plan.stages {
                prop_assert!(stage.time_us.is_finite() && stage.time_us > 0.0, "{}: {}", stage.stage, stage.time_us);
                // Overlap hides time, it makes none: between the longest part and the sum of all. `mxu_us` is the mean of the arrays,
                // `vpu_us` the busiest of four slot classes.
                let parts = [stage.mxu_us, stage.vpu_us, stage.hbm_us, stage.latency_us, stage.launch_us];
                let longest = parts.iter().copied().fold(0.0, f64::max);
                let all = parts.iter().sum::<f64>() + 3.0 * stage.vpu_us + arrays * stage.mxu_us;
                prop_assert!(
                    stage.time_us >= longest * (1.0 - ROUNDING) && stage.time_us <= all * (1.0 + ROUNDING),
                    "{}: {} is not between {longest} and {all}", stage.stage, stage.time_us
                );
            }
        }
    }

    #[test]
    fn no_rate_is_above_its_roof(case in case()) {
        let chip = case.chip()?;
        let result = case.times(&[])?;
        // From the file, not from the result: cores x arrays x rows x columns x 2 x clock x rate.
        let cores = f64::from(chip.cores_per_device);
        let clock = chip.clock().get();
        let unit = &chip.matrix_unit;
        let cells = f64::from(unit.count) * f64::from(unit.rows) * f64::from(unit.columns);
        let rate = [Dtype::Bf16, Dtype::F32].map(|dtype| chip.rows_per_cycle(dtype).unwrap_or(0.0));
        let matrix = cores * cells * 2.0 * clock * rate[0].max(rate[1]);
        let lanes = cores * f64::from(chip.vector_unit.lanes) * f64::from(chip.vector_unit.sublanes) * clock;
        let vector = lanes * chip.vector_unit.slots.alu;
        let transcendental = lanes * chip.vector_unit.slots.transcendental;
        let hbm = chip.hbm_bandwidth_per_device().get();
        for plan in &one_chip(&result)?.plans {
            for stage in &plan.stages {
                let seconds = stage.time_us * 1e-6 * (1.0 + ROUNDING);
                for (name, done, roof) in [
                    ("FLOPs", stage.flops, matrix),
                    ("vector operations", stage.vector_ops, vector),
                    ("transcendentals", stage.transcendentals, transcendental),
                    ("bytes", stage.hbm_bytes, hbm),
                ] {
                    prop_assert!(
                        done as f64 <= roof * seconds,
                        "{}: {done} {name} in {} us, roof {roof:e} per second", stage.stage, stage.time_us
                    );
                }
                for share in [stage.mxu_busy, stage.vpu_busy, stage.hbm_busy, stage.mxu_lane, stage.mxu_achieved] {
                    prop_assert!((0.0..=1.0 + ROUNDING).contains(&share), "{}: a share of {share}", stage.stage);
                }
            }
        }
    }

    #[test]
    fn fusing_moves_no_more_bytes(case in case()) {
        let result = case.times(&[])?;
        let bytes: BTreeMap<&str, u64> = one_chip(&result)?
            .plans
            .iter()
            .map(|plan| (plan.name.as_str(), plan.stages.iter().map(|stage| stage.hbm_bytes).sum()))
            .collect();
        prop_assert!(bytes["fused"] <= bytes["unfused"], "{bytes:?}");
    }

    #[test]
    fn more_work_never_takes_less_time(case in case(), more in 1..300_usize) {
        let before = case.times(&[])?;
        let few = hbm_of_few_cores(&before, u64::from(case.chip()?.cores_per_device));
        let tokens = case.with("layer.tokens", case.size("layer.tokens") + more);
        never_falls("tokens", &before, &tokens.times(&[])?)?;
        let batch = case.with("layer.batch", case.size("layer.batch") + 1 + more % 3);
        falls_by_no_more("batch", &before, &batch.times(&[])?, &few)?;
        let width = case.with("layer.model_width", case.size("layer.model_width") + more);
        never_falls("model_width", &before, &width.times(&[])?)?;
        let factor = 2 + more % 2;
        let heads = case
            .with("layer.key_heads", case.size("layer.key_heads") * factor)
            .with("layer.value_heads", case.size("layer.value_heads") * factor);
        falls_by_no_more("heads", &before, &heads.times(&[])?, &few)?;
    }

    #[test]
    fn a_weaker_chip_is_never_faster(case in case(), share in 0.3..0.95_f64) {
        let chip = case.chip()?;
        let before = case.times(&[])?;
        let slots = &chip.vector_unit.slots;
        let mut weaker = vec![
            format!("clock.states.{}.frequency={} Hz", chip.clock.name, chip.clock().get() * share),
            format!("hbm.bandwidth={} B/s", chip.hbm.bandwidth.get() * share),
            format!("hbm.achievable={}", chip.hbm.achievable * share),
            format!("launch.time={} s", chip.launch.get() / share),
        ];
        for (name, count) in [
            ("alu", slots.alu),
            ("transcendental", slots.transcendental),
            ("cross_lane", slots.cross_lane),
            ("load", slots.load),
            ("store", slots.store),
        ] {
            weaker.push(format!("vector_unit.slots.{name}={}", count * share));
        }
        if chip.matrix_unit.count > 1 {
            weaker.push(format!("matrix_unit.count={}", chip.matrix_unit.count - 1));
        }
        for field in weaker {
            let after = case.times(std::slice::from_ref(&field))?;
            never_falls(&field, &before, &after)?;
        }
    }
}

#[test]
fn flops_of_a_scan_count_its_trips() -> Result<(), Box<dyn std::error::Error>> {
    // Public reports show a gated-delta scan with the same FLOPs at any length: the body counted once.
    let (chip, document) = hardware::load("tpu-v6e")?;
    let chips = vec![(chip, document)];
    for name in ["gdn", "kda", "sla_r4"] {
        let mut flops = Vec::new();
        for tokens in [256, 2048, 4096] {
            let loaded = workload::load(
                name,
                &[format!("layer.tokens={tokens}"), "numeric.tokens=64".to_owned()],
            )?;
            let result = study::run(RunRequest {
                workload: &loaded,
                baseline: None,
                chips: &chips,
                overrides: Vec::new(),
                numeric: None,
            })?;
            let plans = &result.chips[0].plans;
            flops.push(
                plans
                    .iter()
                    .map(|plan| plan.stages.iter().map(|s| s.flops).sum::<u64>())
                    .collect::<Vec<_>>(),
            );
        }
        for (plan, &once) in flops[0].iter().enumerate() {
            assert_eq!(flops[1][plan], 8 * once, "{name}");
            assert_eq!(flops[2][plan], 16 * once, "{name}");
        }
        // Fusing moves data, not arithmetic.
        assert_eq!(flops[0][0], flops[0][1], "{name}");
    }
    Ok(())
}
