//! Compiled kernels of KDA and SLA: what is shipped agrees with the paper's printed figures, with the sizes of the arrays and with the peaks of the chips.

use std::collections::BTreeMap;
use std::error::Error;

use tpusim::calibration::kernels::{self, Row};
use tpusim::dtype::Dtype;
use tpusim::hardware;
use tpusim::kernels::{Lowerer, Plan, Program};
use tpusim::mechanisms;
use tpusim::timing::time_kernel;
use tpusim::workload;

type Tested = Result<(), Box<dyn Error>>;

fn number(row: &Row, name: &str) -> Option<f64> {
    row.parameter(name)?.parse().ok()
}

/// Sizes of a core: tokens, key heads, value columns of a key head, channels of a key.
fn sizes(row: &Row) -> Option<[f64; 4]> {
    let [tokens, heads, values, dk, dv] = ["T", "H", "Hv", "K", "V"].map(|name| number(row, name));
    let heads = heads?;
    Some([tokens?, heads, values? * dv? / heads, dk?])
}

/// The tables of the Systolic Linear Attention paper print these for one TPU v7x.
#[test]
fn published_figures_are_those_of_the_paper() -> Tested {
    let rows = kernels::rows(&BTreeMap::new())?;
    let lines = kernels::published(&rows)?;
    let printed = [
        ("core, SLA-R4", 1371.0),
        ("core, SLA-R2", 1960.0),
        ("core, Tokamax KDA", 1951.0),
        ("ops 2 to 7a, SLA-R4", 1112.0),
        ("ops 2 to 7a, KDA", 3104.0),
    ];
    for (what, microseconds) in printed {
        let line = lines
            .iter()
            .find(|line| line.what == what)
            .ok_or_else(|| format!("no line `{what}`"))?;
        assert!((line.published - microseconds).abs() < 1e-9, "{what}");
    }
    let ratio = lines
        .iter()
        .find(|line| line.what == "core, Tokamax KDA over SLA-R4")
        .ok_or("no ratio")?;
    // The paper says 1.42.
    assert!((ratio.published - 1.42).abs() < 0.005);
    Ok(())
}

/// A fused core reads queries, keys and values, gates in f32, and writes its output: beside constants nothing else passes the device memory.
#[test]
fn a_fused_core_moves_its_arrays_and_no_more() -> Tested {
    let mut seen = 0;
    for row in kernels::rows(&BTreeMap::new())? {
        let fused = row.op() == "sla_pallas"
            && row.parameter("launches") == Some("1")
            && row.parameter("front") == Some("none");
        let Some([tokens, heads, values, dk]) = sizes(&row).filter(|_| fused) else {
            continue;
        };
        let tiles = number(&row, "tiles").ok_or("no tiles")?;
        // Gates stand in whole registers of 8 rows, the step size being one of them.
        let gates = ((tiles + 1.0) / 8.0).ceil() * 8.0 * 4.0;
        let expected = tokens * heads * (2.0 * 2.0 * dk + 2.0 * 2.0 * values + gates);
        // Beside them a constant of the program, whatever the number of tokens: ones that spread the factors of decays over channels and rows, at most 16 matrices
        // of 256 x 256 in bf16 for channels and as many for rows.
        let constants = 2.0 * 16.0 * 256.0 * 256.0 * 2.0;
        let moved = row.time.hbm_bytes;
        assert!(
            moved >= expected && moved <= expected + constants,
            "{} on {}: {moved} bytes, expected {expected}",
            row.time.name,
            row.time.chip
        );
        seen += 1;
    }
    assert!(seen >= 20, "{seen} fused cores");
    Ok(())
}

/// Reading the state with keys and queries and writing it are three products whatever the kernel does: no schedule is faster than they are at the published peak.
#[test]
fn no_schedule_is_faster_than_its_products() -> Tested {
    let mut seen = 0;
    for row in kernels::rows(&BTreeMap::new())? {
        let chunked = row.op().ends_with("_pallas");
        let Some([tokens, heads, values, dk]) = sizes(&row).filter(|_| chunked) else {
            continue;
        };
        let chip = hardware::load_uncalibrated(row.time.chip)?;
        let cores = f64::from(row.time.cores_used.unwrap_or(1)) / f64::from(chip.cores_per_device);
        let peak = chip
            .matrix_flops_per_second(Dtype::Bf16)
            .ok_or("no bf16 peak")?
            .get()
            * cores;
        let floor_us = 3.0 * 2.0 * tokens * heads * dk * values / peak * 1e6;
        assert!(
            row.time.time_us > floor_us,
            "{} on {}: {} us, products alone take {floor_us}",
            row.time.name,
            row.time.chip,
            row.time.time_us
        );
        assert!(row.time.low_us < row.time.time_us && row.time.time_us < row.time.high_us);
        seen += 1;
    }
    assert!(seen >= 60, "{seen} chunked kernels");
    Ok(())
}

/// Every generation of the paper's table has its line, and times say what they are.
#[test]
fn four_generations_are_compared() -> Tested {
    let rows = kernels::rows(&BTreeMap::new())?;
    let lines = kernels::lines(&rows)?;
    for chip in ["tpu-v4", "tpu-v5p", "tpu-v6e", "tpu-v7x"] {
        let of_chip: Vec<_> = lines.iter().filter(|line| line.chip == chip).collect();
        assert!(of_chip.len() >= 2, "{chip}: {} lines", of_chip.len());
        for line in of_chip {
            let ratio = line.kda.schedule_us / line.sla_r4.schedule_us;
            assert!((line.speedup / ratio - 1.0).abs() < 1e-12);
        }
    }
    for row in &rows {
        let label = row.time.label.as_deref().unwrap_or_default();
        assert!(
            label.contains("simulated") && !label.contains("measured"),
            "{}: `{label}`",
            row.time.name
        );
    }
    Ok(())
}

/// Units that go through every step side by side wait for less than copies of an operation that stay together, and no lane works more than one cycle a cycle.
#[test]
fn interleaving_is_never_slower_and_never_faster_than_the_busiest_lane() -> Tested {
    for name in ["sla_r4", "kda", "gdn"] {
        let (workload, _) = workload::load::<&str>(name, &[])?;
        let graph = mechanisms::build(&workload.layer)?;
        for heads in [1, 2, 8] {
            let plan = Plan::named("fused", Program { heads, chunks: 2 }).ok_or("no plan")?;
            let kernels = Lowerer::new(&graph.graph, graph.core.value, 0.0).lower(&plan);
            for kernel in kernels {
                for chip in ["tpu-v4", "tpu-v5p", "tpu-v6e", "tpu-v7x"] {
                    let chip = hardware::load_uncalibrated(chip)?;
                    let together = time_kernel(&kernel, &chip);
                    let mut other = kernel.clone();
                    other.implementation.interleaved = true;
                    let interleaved = time_kernel(&other, &chip);
                    assert!(
                        interleaved.program.makespan <= together.program.makespan * (1.0 + 1e-9),
                        "{name}, {heads} heads, {}: {} against {}",
                        kernel.label,
                        interleaved.program.makespan,
                        together.program.makespan
                    );
                    for (lane, busy) in &interleaved.program.busy {
                        assert!(
                            *busy <= interleaved.program.makespan * (1.0 + 1e-9),
                            "{name}, {heads} heads, {}: {lane:?}",
                            kernel.label
                        );
                    }
                }
            }
        }
    }
    Ok(())
}
