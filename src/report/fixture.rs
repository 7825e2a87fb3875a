//! A made-up result for the tests of this folder.
//!
//! FIXTURE: the times of the last TPU are round numbers near a published stage table, every counter and every
//! other chip is invented to look plausible. Nothing here is a prediction.

use crate::hardware::Kind;

use super::result::{
    Bound, ChipResult, HardwareInputs, Inputs, NumberSource, NumericResult, PlanResult, Provenance,
    PublishedComparison, PublishedRow, Roof, Roofs, RunResult, SCHEMA, StageResult,
};

/// Name, title, cores, device, clock, matrix roofs (T/s), vector and transcendental roofs (T/s), HBM (TB/s),
/// slowdown.
struct Machine {
    name: &'static str,
    title: &'static str,
    cores: u32,
    device: &'static str,
    clock_ghz: f64,
    matrix: &'static [(&'static str, f64)],
    vector: f64,
    transcendental: f64,
    hbm: f64,
    slowdown: f64,
}

const MACHINES: [Machine; 5] = [
    Machine {
        name: "tpu-v4",
        title: "TPU v4",
        cores: 2,
        device: "a chip of 2 cores seen as one device",
        clock_ghz: 1.05,
        matrix: &[("mxu bf16", 275.0)],
        vector: 4.3,
        transcendental: 0.27,
        hbm: 1.2,
        slowdown: 4.4,
    },
    Machine {
        name: "tpu-v5p",
        title: "TPU v5p",
        cores: 2,
        device: "a chip of 2 cores seen as one device",
        clock_ghz: 1.75,
        matrix: &[("mxu int8", 918.0), ("mxu bf16", 459.0)],
        vector: 14.3,
        transcendental: 0.9,
        hbm: 2.765,
        slowdown: 2.1,
    },
    Machine {
        name: "tpu-v6e",
        title: "TPU v6e",
        cores: 1,
        device: "a chip of 1 core",
        clock_ghz: 1.75,
        matrix: &[("mxu fp8", 1836.0), ("mxu int8", 1836.0), ("mxu bf16", 918.0)],
        vector: 7.2,
        transcendental: 0.45,
        hbm: 1.6,
        slowdown: 1.9,
    },
    Machine {
        name: "tpu-v7x",
        title: "TPU v7x",
        cores: 1,
        device: "one of the 2 cores of a chip",
        clock_ghz: 1.9,
        matrix: &[("mxu fp8", 1992.0), ("mxu bf16", 996.0)],
        vector: 15.6,
        transcendental: 0.97,
        hbm: 3.686,
        slowdown: 1.0,
    },
    Machine {
        name: "h100-sxm",
        title: "H100 SXM",
        cores: 132,
        device: "a GPU of 132 streaming multiprocessors",
        clock_ghz: 1.755,
        matrix: &[("mxu fp8", 1979.0), ("mxu bf16", 989.0)],
        vector: 33.5,
        transcendental: 4.2,
        hbm: 3.35,
        slowdown: 1.15,
    },
];

/// Stage, title, time (us), bound, next bound, GFLOP, G vector operations, G transcendentals, HBM MB,
/// published (us).
type Line = (
    &'static str,
    &'static str,
    f64,
    Bound,
    Bound,
    f64,
    f64,
    f64,
    f64,
    Option<f64>,
);

const UNFUSED: [Line; 6] = [
    (
        "op1",
        "QKV and gate projections",
        163.0,
        Bound::Mxu,
        Bound::Hbm,
        137.4,
        0.02,
        0.0,
        167.8,
        Some(168.0),
    ),
    (
        "op2",
        "causal convolution and QK norm",
        322.0,
        Bound::Vpu,
        Bound::Hbm,
        0.0,
        1.9,
        0.067,
        268.4,
        Some(341.0),
    ),
    (
        "op3-5",
        "gates, chunk Gram, inverse and WY factors",
        447.0,
        Bound::Vpu,
        Bound::Mxu,
        21.5,
        4.6,
        0.034,
        402.7,
        Some(418.0),
    ),
    (
        "op6",
        "chunk state scan",
        571.0,
        Bound::Latency,
        Bound::Hbm,
        34.4,
        1.1,
        0.009,
        536.9,
        Some(614.0),
    ),
    (
        "op7a",
        "intra-chunk output and state readout",
        224.0,
        Bound::Hbm,
        Bound::Mxu,
        25.8,
        0.6,
        0.004,
        604.0,
        Some(219.0),
    ),
    (
        "op7b-c",
        "output norm, gate and output projection",
        251.0,
        Bound::Hbm,
        Bound::Vpu,
        68.7,
        0.4,
        0.034,
        234.9,
        Some(245.0),
    ),
];

const FUSED: [Line; 3] = [
    (
        "op1",
        "QKV and gate projections",
        163.0,
        Bound::Mxu,
        Bound::Hbm,
        137.4,
        0.02,
        0.0,
        167.8,
        Some(168.0),
    ),
    (
        "op2-7a",
        "convolution to state readout in one kernel, state in VMEM",
        1078.0,
        Bound::Vpu,
        Bound::Mxu,
        81.7,
        8.1,
        0.114,
        201.3,
        Some(1112.0),
    ),
    (
        "op7b-c",
        "output norm, gate and output projection",
        251.0,
        Bound::Hbm,
        Bound::Vpu,
        68.7,
        0.4,
        0.034,
        234.9,
        Some(245.0),
    ),
];

fn giga(count: f64) -> u64 {
    (count * 1e9) as u64
}

fn stage(machine: &Machine, line: &Line, intervals: bool) -> StageResult {
    let (stage, title, base_us, bound, next_bound, gflop, gvector, gtranscendental, hbm_mb, published_us) =
        *line;
    let time_us = base_us * machine.slowdown;
    let peak = machine.matrix.last().map_or(1.0, |(_, tera)| *tera);
    let mxu_lane = if gflop > 0.0 { 0.81 } else { 0.0 };
    let mxu_us = (gflop / peak * 1e3 / 0.81).min(0.97 * time_us);
    let vpu_us = (gvector / machine.vector * 1e3 * 0.9).min(0.95 * time_us);
    let hbm_us = (hbm_mb / (0.9 * machine.hbm)).min(0.94 * time_us);
    let launch_us = 4.0;
    StageResult {
        stage: stage.to_owned(),
        title: title.to_owned(),
        time_us,
        low_us: intervals.then_some(0.9 * time_us),
        interval_from: intervals.then_some(crate::hardware::Evidence::SameChip),
        high_us: intervals.then_some(1.12 * time_us),
        family: intervals.then(|| "matmul".to_owned()),
        speedup_error_ratio: intervals.then_some(1.15),
        bound,
        next_bound,
        mxu_us,
        vpu_us,
        transcendental_us: 0.2 * vpu_us,
        cross_lane_us: 0.35 * vpu_us,
        vmem_us: 0.5 * vpu_us,
        hbm_us,
        latency_us: if bound == Bound::Latency {
            0.96 * time_us
        } else {
            0.3 * time_us
        },
        launch_us,
        flops: giga(gflop),
        vector_ops: giga(gvector),
        transcendentals: giga(gtranscendental),
        hbm_bytes: giga(hbm_mb / 1e3),
        mxu_busy: mxu_us / time_us,
        vpu_busy: vpu_us / time_us,
        hbm_busy: hbm_us / time_us,
        mxu_lane,
        mxu_achieved: gflop / time_us * 1e3 / peak,
        padding: 0.0,
        vmem_bytes: 11_534_336,
        grid_parallel: 8,
        grid_sequential: 128,
        published_us: published_us.filter(|_| machine.name == "tpu-v7x"),
    }
}

fn plan(machine: &Machine, name: &str, lines: &[Line], baseline_us: f64, intervals: bool) -> PlanResult {
    let stages: Vec<_> = lines.iter().map(|line| stage(machine, line, intervals)).collect();
    let total_us: f64 = stages.iter().map(|row| row.time_us).sum();
    PlanResult {
        name: name.to_owned(),
        total_us,
        low_us: intervals.then_some(0.92 * total_us),
        high_us: intervals.then_some(1.09 * total_us),
        speedup_over_baseline: Some(baseline_us * machine.slowdown / total_us),
        baseline_us: Some(baseline_us * machine.slowdown),
        published_us: stages.iter().map(|row| row.published_us).sum(),
        token: None,
        stages,
    }
}

fn chip(machine: &Machine, intervals: bool) -> ChipResult {
    let roof = |name: &str, tera: f64| Roof {
        name: name.to_owned(),
        per_second: tera * 1e12,
    };
    ChipResult {
        name: machine.name.to_owned(),
        title: machine.title.to_owned(),
        cores: machine.cores,
        device: machine.device.to_owned(),
        clock_ghz: machine.clock_ghz,
        clock_state: "default".to_owned(),
        roofs: Roofs {
            hbm_datasheet: machine.hbm * 1e12,
            hbm_achievable: 0.9 * machine.hbm * 1e12,
            matrix: machine
                .matrix
                .iter()
                .map(|(name, tera)| roof(name, *tera))
                .collect(),
            vector: roof("vpu", machine.vector),
            transcendental: roof("transcendental", machine.transcendental),
            on_chip: roof("VMEM", machine.hbm * 7.0),
            issue_efficiency: 0.9,
        },
        plans: vec![
            plan(machine, "unfused", &UNFUSED, 3719.0, intervals),
            plan(machine, "fused", &FUSED, 3610.0, intervals),
        ],
        coverage: "no coefficient is fitted yet; 3 of 41 hardware numbers are assumed, the others are \
                   published or derived"
            .to_owned(),
        sources: vec![
            source("HBM bandwidth", Kind::Published, vec![Bound::Hbm]),
            source("ALU slots", Kind::Assumed, vec![Bound::Vpu]),
        ],
    }
}

fn source(number: &str, kind: Kind, sets: Vec<Bound>) -> NumberSource {
    NumberSource {
        number: number.to_owned(),
        kind,
        source: "a datasheet (fixture)".to_owned(),
        sets,
    }
}

/// Five chips, two plans, published values, a numeric check and two warnings.
pub(crate) fn five_chips() -> RunResult {
    run(&MACHINES, false)
}

/// One chip with intervals.
pub(crate) fn one_chip() -> RunResult {
    run(&MACHINES[3..4], true)
}

/// One chip whose stages stand in a heap under the ridge.
pub(crate) fn crowded() -> RunResult {
    let mut result = one_chip();
    for (chip, plan) in result
        .chips
        .iter_mut()
        .flat_map(|chip| chip.plans.iter_mut())
        .enumerate()
    {
        for (index, row) in plan.stages.iter_mut().enumerate() {
            row.flops = 80_000_000_000 + 4_000_000_000 * (index as u64);
            row.hbm_bytes = 240_000_000 + 9_000_000 * (chip as u64);
            row.time_us = 120.0 + 3.0 * (index as f64);
        }
    }
    result
}

fn run(machines: &[Machine], intervals: bool) -> RunResult {
    let chips: Vec<_> = machines.iter().map(|machine| chip(machine, intervals)).collect();
    let mut rows = Vec::new();
    if let Some(timed) = chips.iter().find(|chip| chip.name == "tpu-v7x") {
        let row = |plan: &str, stage: &str, published_us: f64, predicted_us: f64| PublishedRow {
            plan: plan.to_owned(),
            stage: stage.to_owned(),
            published_us,
            predicted_us,
            error_percent: 100.0 * (predicted_us / published_us - 1.0),
        };
        for plan in &timed.plans {
            for stage in &plan.stages {
                rows.extend(
                    stage
                        .published_us
                        .map(|us| row(&plan.name, &stage.stage, us, stage.time_us)),
                );
            }
            rows.extend(
                plan.published_us
                    .map(|us| row(&plan.name, "total", us, plan.total_us)),
            );
        }
    }
    RunResult {
        schema: SCHEMA.to_owned(),
        name: "fixture-sla-r4".to_owned(),
        headline: "fixture-sla-r4 on tpu-v7x, fused: 1.49 ms, bound vpu, next mxu, 2.42x over kda fused"
            .to_owned(),
        layer: "FIXTURE, invented counters: sla, batch 1, 8192 tokens, width 1024, 8 key heads of 256, \
                32 value heads of 128, \
                chunk 64, 4 decay tiles, bf16 state"
            .to_owned(),
        baseline: Some("kda".to_owned()),
        chips,
        numeric: Some(NumericResult {
            output_rel_error: 0.003_14,
            state_rel_error: Some(0.002_72),
            output_rms_error: 0.001_41,
            state_rms_error: Some(0.001_62),
            exact_rel_error: 2.1e-15,
            tokens: 512,
            heads: 1,
            seed: 7,
            sampled: true,
            non_finite: None,
            overflow:
                "The folded Gram stays finite while the decay of a chunk is under the limit; this workload \
                       keeps a margin of 52 %."
                    .to_owned(),
            overflow_exponent: Some(42.3),
            overflow_limit: Some(88.722_839),
        }),
        published: Some(PublishedComparison {
            source: "a published stage table (fixture)".to_owned(),
            chip: "tpu-v7x".to_owned(),
            rows,
        }),
        warnings: vec![
            "op6 on tpu-v4 fills 11.0 of 16 MiB VMEM with <2 buffers> & spills with 3; set `buffers: 2` or \
             use a smaller chunk"
                .to_owned(),
            "h100-sxm has no measured row for this mechanism, so its times are the least certain; read \
             them as orders of magnitude"
                .to_owned(),
        ],
        provenance: Provenance {
            version: "0.1.0".to_owned(),
            hardware_digest: "sha256:5a1f".to_owned(),
            workload_digest: "sha256:c27e".to_owned(),
            calibration_digest: "none".to_owned(),
            overrides: vec!["hw.hbm.bandwidth=3686 GB/s".to_owned()],
            inferred: vec![
                "model width 1024 and one core: the published table does not print its sizes".to_owned(),
            ],
        },
        sensitivity: Vec::new(),
        inputs: Some(Inputs {
            workload: vec!["layer.chunk=64".to_owned(), "layer.mechanism=sla".to_owned()],
            hardware: machines
                .iter()
                .map(|machine| HardwareInputs {
                    chip: machine.name.to_owned(),
                    fields: vec![format!("matrix_unit.count={}", machine.cores)],
                })
                .collect(),
            calibration: Vec::new(),
        }),
    }
}
