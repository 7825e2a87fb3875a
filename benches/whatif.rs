//! Speed of a sweep on one thread: points a second, where a point is one workload on one chip in one plan.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use tpusim::hardware;
use tpusim::report::whatif::rows::Columns;
use tpusim::study::whatif::{Axis, Sweep, SweepRequest};
use tpusim::workload;

fn main() {
    // Speed per core: the machine may have any number of them.
    rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build_global()
        .expect("the first pool");
    divan::main();
}

fn sweep(name: &str, plan: &str, vary: &[&str]) -> Sweep {
    let workload = workload::load(name, &[format!("plans=[{plan}]")]).expect("a shipped workload");
    let chips = [(
        "tpu-v7x".to_owned(),
        hardware::read("tpu-v7x").expect("a shipped chip"),
    )];
    Sweep::new(SweepRequest {
        workload: &workload,
        chips: &chips,
        axes: vary
            .iter()
            .map(|text| Axis::parse(text).expect("an axis"))
            .collect(),
    })
    .expect("a sweep")
}

fn bench(bencher: Bencher, sweep: &Sweep) {
    let points = sweep.grid().space.points();
    bencher
        .counter(ItemsCount::new(points))
        .bench_local(|| black_box(sweep.rows(0..points)));
}

/// What a core computes stays as it is: its schedules are made once.
#[divan::bench(args = ["fused", "unfused"])]
fn bandwidth_and_launch(bencher: Bencher, plan: &str) {
    let vary = [
        "hw.launch.time=0.5..2.4:+0.1 us",
        "hw.hbm.bandwidth=1000..8900:+100 GB/s",
    ];
    bench(bencher, &sweep("sla_r4", plan, &vary));
}

/// Every point has another core, so every program is scheduled again.
#[divan::bench(args = ["fused", "unfused"])]
fn slots(bencher: Bencher, plan: &str) {
    let vary = [
        "hw.vector_unit.slots.alu=1..8.9:+0.1",
        "hw.latency.matrix_result_cycles=100..290:+10",
    ];
    bench(bencher, &sweep("sla_r4", plan, &vary));
}

/// Two fields of the core beside two of the memory.
#[divan::bench(args = ["fused", "unfused"])]
fn slots_and_bandwidth(bencher: Bencher, plan: &str) {
    let vary = [
        "hw.vector_unit.slots.alu=1..4:*2",
        "hw.matrix_unit.rows=64..256:*2",
        "hw.launch.time=0.5..1.4:+0.1 us",
        "hw.hbm.bandwidth=1000..8900:+100 GB/s",
    ];
    bench(bencher, &sweep("sla_r4", plan, &vary));
}

/// Every point has another graph.
#[divan::bench(args = ["sla_r4", "kda", "gdn", "softmax_gqa"])]
fn tokens(bencher: Bencher, name: &str) {
    bench(bencher, &sweep(name, "fused", &["tokens=1024..32704:+64"]));
}

/// Formatting of rows as CSV and JSON lines.
#[divan::bench]
fn write(bencher: Bencher) {
    let sweep = sweep("sla_r4", "fused", &["hw.hbm.bandwidth=1000..8999:+1 GB/s"]);
    let rows = sweep.rows(0..8000);
    let columns = Columns::new(sweep.grid());
    bencher
        .counter(ItemsCount::new(rows.len()))
        .bench_local(|| (columns.csv(&rows, None), columns.json(&rows, None)));
}
