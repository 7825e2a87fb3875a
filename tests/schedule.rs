//! Schedules: legal by the independent checker, written as a trace that keeps the rules of the format.

use std::collections::BTreeMap;

use tpusim::hardware;
use tpusim::report::trace;
use tpusim::study::schedules::schedules;
use tpusim::timing::check::{check_kernel, check_program};
use tpusim::workload;

fn chips() -> Vec<hardware::Chip> {
    hardware::shipped()
        .iter()
        .map(|name| hardware::load(name).expect("shipped").0)
        .collect()
}

#[test]
fn every_shipped_workload_has_legal_schedules_on_every_chip() {
    for name in workload::shipped() {
        let (workload, _) = workload::load::<&str>(name, &[]).expect("shipped");
        for plan in schedules(&workload, &chips()).expect("builds") {
            for row in &plan.kernels {
                check_kernel(&row.time).unwrap_or_else(|e| {
                    panic!(
                        "{name} {} {} {}: {e}",
                        plan.chip.name, plan.plan, row.kernel.label
                    )
                });
            }
        }
    }
}

#[test]
fn the_checker_refuses_a_schedule_that_was_tampered_with() {
    let (workload, _) = workload::load::<&str>("sla_r4", &[]).expect("shipped");
    let (chip, _) = hardware::load("tpu-v7x").expect("shipped");
    let plans = schedules(&workload, &[chip]).expect("builds");
    let fused = plans
        .iter()
        .flat_map(|p| &p.kernels)
        .find(|row| row.kernel.label == "op2-7a")
        .expect("a row");
    let good = &fused.time.program;
    check_program(good).expect("legal as made");

    let dependent = (0..good.groups.len())
        .rev()
        .find(|&i| !good.groups[i].after.is_empty())
        .expect("a group");
    let mut early = good.clone();
    let duration = early.groups[dependent].duration();
    early.groups[dependent].start = 0.0;
    early.groups[dependent].end = duration;
    assert!(check_program(&early).is_err(), "a dependence was broken");

    let mut short = good.clone();
    short.makespan *= 0.5;
    assert!(check_program(&short).is_err(), "the makespan was halved");

    let mut swapped = good.clone();
    let first = swapped.groups[dependent].after[0];
    swapped.groups[first].latency += good.makespan;
    assert!(check_program(&swapped).is_err(), "a result came late");
}

#[test]
fn traces_keep_the_rules_of_the_format() {
    let (workload, _) = workload::load::<&str>("kda", &[]).expect("shipped");
    let (chip, _) = hardware::load("tpu-v6e").expect("shipped");
    let plans = schedules(&workload, &[chip]).expect("builds");
    let text = trace::to_string(&plans);
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let events = json["traceEvents"].as_array().expect("events");
    let mut tracks: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    let mut names = std::collections::BTreeSet::new();
    for event in events {
        match event["ph"].as_str().expect("a phase") {
            "X" => {
                let (ts, dur) = (
                    event["ts"].as_f64().expect("ts"),
                    event["dur"].as_f64().expect("dur"),
                );
                assert!(ts >= 0.0 && dur >= 0.0, "{event}");
                let key = (
                    event["pid"].as_u64().expect("pid"),
                    event["tid"].as_u64().expect("tid"),
                );
                tracks.entry(key).or_default().push((ts, ts + dur));
            }
            "M" if event["name"] == "thread_name" => {
                names.insert(event["args"]["name"].as_str().expect("a name").to_owned());
            }
            "M" | "C" => {}
            other => panic!("unexpected phase {other}"),
        }
    }
    // Slices of a track must not overlap; a nanosecond covers the rounding of printed microseconds.
    for (track, slices) in &mut tracks {
        slices.sort_by(|a, b| a.0.total_cmp(&b.0));
        for pair in slices.windows(2) {
            assert!(pair[1].0 >= pair[0].1 - 1e-3, "track {track:?}: {pair:?}");
        }
    }
    for lane in [
        "kernels", "programs", "MXU0", "MXU1", "VPU", "EUP", "XLU", "VMEM", "DMA-in", "DMA-out",
    ] {
        assert!(names.contains(lane), "{lane} has a track");
    }
    assert_eq!(text, trace::to_string(&plans), "same bytes");
}
