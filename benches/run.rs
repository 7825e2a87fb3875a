//! Speed of a run without numerics: from the text of a workload to its JSON, and the parts of it.

use divan::{Bencher, black_box};
use tpusim::hardware;
use tpusim::kernels::{Kernel, Plan, Program, lower};
use tpusim::mechanisms;
use tpusim::report::json;
use tpusim::study::{self, RunRequest};
use tpusim::timing::time_kernel;
use tpusim::workload;

fn main() {
    divan::main();
}

fn overrides(tokens: usize) -> [String; 1] {
    [format!("layer.tokens={tokens}")]
}

/// Bytes of the JSON of a run with baseline on the five chips of the file.
fn run_to_json(tokens: usize) -> usize {
    let loaded = workload::load("sla_r4", &overrides(tokens)).expect("a shipped workload");
    let baseline = workload::load_baseline("kda.yaml", "sla_r4", &loaded.1).expect("a shipped baseline");
    let chips = loaded
        .0
        .hardware
        .iter()
        .map(|name| hardware::load(name).expect("a shipped chip"))
        .collect();
    let result = study::run(RunRequest {
        workload: &loaded,
        baseline: Some(&baseline),
        chips: &chips,
        overrides: overrides(tokens).to_vec(),
        numeric: None,
    })
    .expect("the workload runs");
    json::to_string(&result).expect("finite numbers").len()
}

/// Both lengths have to take the same time: the scan is one node however often it turns.
#[divan::bench(args = [8192, 1_048_576])]
fn run(bencher: Bencher, tokens: usize) {
    bencher.bench_local(|| run_to_json(black_box(tokens)));
}

fn kernels() -> Vec<Kernel> {
    let (workload, _) = workload::load::<&str>("sla_r4", &[]).expect("a shipped workload");
    let built = mechanisms::build(&workload.layer).expect("a graph");
    let plan = Plan::named("fused", Program { heads: 1, chunks: 4 }).expect("a plan");
    lower(&built.graph, &plan, built.core.value, 0.0)
}

#[divan::bench]
fn time_the_fused_kernel(bencher: Bencher) {
    let kernels = kernels();
    let fused = kernels
        .iter()
        .find(|kernel| kernel.label == "op2-7a")
        .expect("a fused kernel");
    let (chip, _) = hardware::load("tpu-v7x").expect("a shipped chip");
    bencher.bench_local(|| time_kernel(black_box(fused), black_box(&chip)));
}

/// Graph of a layer and its kernels: what a change of a layer's sizes costs.
#[divan::bench]
fn build_and_lower(bencher: Bencher) {
    bencher.bench_local(kernels);
}

#[divan::bench]
fn load_workload(bencher: Bencher) {
    bencher.bench_local(|| workload::load::<&str>(black_box("sla_r4"), &[]));
}

#[divan::bench]
fn load_chip(bencher: Bencher) {
    bencher.bench_local(|| hardware::load(black_box("tpu-v7x")));
}
