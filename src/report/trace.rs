//! Chrome trace JSON of schedules, for Perfetto.
//!
//! | trace | here |
//! |---|---|
//! | process (`pid`) | one plan on one chip |
//! | thread (`tid`) | 0: kernels; 1: programs; then one per lane of a core: MXU0.., VPU, EUP, XLU, VMEM, DMA-in, DMA-out |
//! | slice (`X`) | a kernel, a program, an operation on a lane (category `op`), or a gap of a lane with the reason of the wait (category `wait`) |
//! | counter (`C`) | bytes of on-chip memory in use, HBM bytes per second |
//! | `ts`, `dur` | microseconds from the start of the plan, on the busiest core |
//!
//! A compiled program ([`of_timeline`]) has its kernels, its core (at work, or waiting for a transfer) and the device memory as threads.
//!
//! Slices of a track never overlap. The first programs of a kernel are drawn in full; the rest repeats with the period that the slice `steady state` names.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::dump::schedule::{Activity, Timeline};
use crate::study::schedules::{ScheduledKernel, ScheduledPlan};
use crate::timing::program::{Held, Placed, Wait};
use crate::timing::unit::Lane;

/// Programs of a kernel that are drawn in full.
const DRAWN_PROGRAMS: usize = 3;
const KERNELS: usize = 0;
const PROGRAMS: usize = 1;
const FIRST_LANE: usize = 2;

/// One event of the trace-event format.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Event {
    name: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    cat: &'static str,
    ph: &'static str,
    pid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    args: Map<String, Value>,
}

/// The trace of the given plans.
#[must_use]
pub fn to_string(plans: &[ScheduledPlan]) -> String {
    let mut events = Vec::new();
    for (index, plan) in plans.iter().enumerate() {
        Track {
            pid: index + 1,
            events: &mut events,
        }
        .plan(plan);
    }
    let trace = json!({ "displayTimeUnit": "ns", "traceEvents": events });
    // Finite numbers and strings always serialise.
    let mut text = serde_json::to_string(&trace).unwrap_or_default();
    text.push('\n');
    text
}

/// The trace of a compiled program. `kernels` are the names of those of its schedule, `clock_hz` the clock that its
/// cycles are of.
#[must_use]
pub fn of_timeline(name: &str, kernels: &[&str], timeline: &Timeline, clock_hz: f64) -> String {
    const CORE: usize = 1;
    const MEMORY: usize = 2;
    const SPARSE_CORE: usize = 3;
    let mut events = Vec::new();
    let mut track = Track {
        pid: 1,
        events: &mut events,
    };
    track.meta("process_name", None, name);
    for (tid, thread) in [
        (KERNELS, "kernels"),
        (CORE, "core"),
        (MEMORY, "device memory"),
        (SPARSE_CORE, "SparseCore"),
    ] {
        track.meta("thread_name", Some(tid), thread);
    }
    let micros = |cycles: f64| cycles / clock_hz * 1e6;
    for run in &timeline.kernels {
        let name = kernels.get(run.kernel).copied().unwrap_or("kernel");
        let args = Map::from_iter([("clock_ghz".to_owned(), json!(clock_hz / 1e9))]);
        let length = micros(run.end - run.start);
        track.slice(name, "kernel", KERNELS, micros(run.start), length, args);
    }
    for span in &timeline.spans {
        let mut args = Map::new();
        let (title, category, tid) = match span.activity {
            Activity::Core => ("schedule".to_owned(), "op", CORE),
            Activity::Wait => ("wait: transfer".to_owned(), "wait", CORE),
            Activity::Memory => {
                args.insert("bytes".to_owned(), json!(span.bytes));
                ("transfer".to_owned(), "dma", MEMORY)
            }
            Activity::SparseCore => ("SparseCore".to_owned(), "op", SPARSE_CORE),
            Activity::Repeated(times) => {
                args.insert("times".to_owned(), json!(times));
                (format!("the same {times} times more"), "program", CORE)
            }
        };
        let (start, length) = (micros(span.start), micros(span.end - span.start));
        track.slice(&title, category, tid, start, length, args);
    }
    let trace = json!({
        "displayTimeUnit": "ns",
        "traceEvents": events,
        "otherData": { "spans_left_out": timeline.left_out() },
    });
    // Finite numbers and strings always serialise.
    let mut text = serde_json::to_string(&trace).unwrap_or_default();
    text.push('\n');
    text
}

struct Track<'a> {
    pid: usize,
    events: &'a mut Vec<Event>,
}

impl Track<'_> {
    fn plan(&mut self, plan: &ScheduledPlan) {
        let clock_mhz = plan.chip.clock().get() / 1e6;
        self.meta("process_name", None, &format!("{} {}", plan.chip.name, plan.plan));
        self.meta("thread_name", Some(KERNELS), "kernels");
        self.meta("thread_name", Some(PROGRAMS), "programs");
        let lanes = lanes(u8::try_from(plan.chip.matrix_unit.count).unwrap_or(u8::MAX));
        for (i, lane) in lanes.iter().enumerate() {
            self.meta("thread_name", Some(FIRST_LANE + i), &lane.name());
        }
        let mut origin = 0.0;
        for scheduled in &plan.kernels {
            self.kernel(scheduled, origin, clock_mhz, &lanes);
            origin += scheduled.time.total_us;
        }
        self.counter("on-chip memory (bytes)", origin, 0.0);
        self.counter("HBM (bytes per second)", origin, 0.0);
    }

    fn kernel(&mut self, scheduled: &ScheduledKernel, origin: f64, clock_mhz: f64, lanes: &[Lane]) {
        let (kernel, time) = (&scheduled.kernel, &scheduled.time);
        let mut args = Map::new();
        args.insert("bound".to_owned(), json!(time.bound.name()));
        args.insert("programs_per_core".to_owned(), json!(time.programs_per_core));
        args.insert("clock_ghz".to_owned(), json!(clock_mhz / 1e3));
        args.insert("hbm_bytes".to_owned(), json!(kernel.hbm_bytes()));
        self.slice(&kernel.label, "kernel", KERNELS, origin, time.total_us, args);
        self.counter("on-chip memory (bytes)", origin, time.working_set as f64);
        self.counter(
            "HBM (bytes per second)",
            origin,
            kernel.hbm_bytes() as f64 / (time.total_us * 1e-6),
        );

        let micros = |cycles: f64| cycles / clock_mhz;
        let steps = &time.pipeline.head;
        let drawn = steps.len().min(DRAWN_PROGRAMS);
        let tid = |lane: Lane| FIRST_LANE + lanes.iter().position(|l| *l == lane).unwrap_or(0);
        for (s, step) in steps.iter().take(drawn).enumerate() {
            self.slice(
                &format!("program {s}"),
                "program",
                PROGRAMS,
                origin + micros(step.start),
                micros(step.end - step.start),
                Map::new(),
            );
            for (lane, start, end) in [
                (Lane::DmaIn, step.read_start, step.read_end),
                (Lane::DmaOut, step.write_start, step.write_end),
            ] {
                if end > start {
                    let name = format!(
                        "{} program {s}",
                        if lane == Lane::DmaIn { "read" } else { "write" }
                    );
                    self.slice(
                        &name,
                        "dma",
                        tid(lane),
                        origin + micros(start),
                        micros(end - start),
                        Map::new(),
                    );
                }
            }
            for &lane in lanes {
                self.lane(scheduled, lane, tid(lane), origin + micros(step.start), clock_mhz);
            }
        }
        if let (Some(last), true) = (
            steps.get(drawn.wrapping_sub(1)),
            time.programs_per_core > drawn as u64,
        ) {
            let start = origin + micros(last.end);
            let rest = origin + time.total_us - start;
            let mut args = Map::new();
            args.insert(
                "programs".to_owned(),
                json!(time.programs_per_core - drawn as u64),
            );
            args.insert("period_us".to_owned(), json!(micros(time.pipeline.period)));
            self.slice("steady state", "program", PROGRAMS, start, rest, args);
        }
    }

    /// Operations of one program on one lane, with the gaps between them.
    fn lane(&mut self, scheduled: &ScheduledKernel, lane: Lane, tid: usize, origin: f64, clock_mhz: f64) {
        let mut held: Vec<(&Placed, &Held)> = Vec::new();
        for group in &scheduled.time.program.groups {
            held.extend(
                group
                    .lanes
                    .iter()
                    .filter(|held| held.lane == lane)
                    .map(|held| (group, held)),
            );
        }
        held.sort_by(|a, b| a.1.start.total_cmp(&b.1.start));
        let mut free = 0.0;
        for (group, held) in held {
            if held.start > free + 1e-9 {
                let reason = match held.wait {
                    Wait::Start => Wait::Data,
                    other => other,
                };
                self.slice(
                    &format!("wait: {}", reason.name()),
                    "wait",
                    tid,
                    origin + free / clock_mhz,
                    (held.start - free) / clock_mhz,
                    Map::new(),
                );
            }
            let op = &scheduled.kernel.ops[group.op];
            let mut args = Map::new();
            args.insert("stage".to_owned(), json!(op.stage.name()));
            args.insert("cycles".to_owned(), json!(held.cycles));
            args.insert("copies".to_owned(), json!(group.copies));
            if op.carried {
                args.insert("chunk".to_owned(), json!(group.chunk));
            }
            self.slice(
                &op.name,
                "op",
                tid,
                origin + held.start / clock_mhz,
                held.cycles / clock_mhz,
                args,
            );
            free = held.end();
        }
    }

    fn slice(
        &mut self,
        name: &str,
        cat: &'static str,
        tid: usize,
        ts: f64,
        dur: f64,
        args: Map<String, Value>,
    ) {
        let pid = self.pid;
        self.events.push(Event {
            name: name.to_owned(),
            cat,
            ph: "X",
            pid,
            tid: Some(tid),
            ts: Some(ts),
            dur: Some(dur),
            args,
        });
    }

    fn counter(&mut self, name: &str, ts: f64, value: f64) {
        let args = Map::from_iter([("value".to_owned(), json!(value))]);
        let pid = self.pid;
        self.events.push(Event {
            name: name.to_owned(),
            cat: "",
            ph: "C",
            pid,
            tid: None,
            ts: Some(ts),
            dur: None,
            args,
        });
    }

    fn meta(&mut self, what: &str, tid: Option<usize>, name: &str) {
        let args = Map::from_iter([("name".to_owned(), json!(name))]);
        let pid = self.pid;
        self.events.push(Event {
            name: what.to_owned(),
            cat: "",
            ph: "M",
            pid,
            tid,
            ts: None,
            dur: None,
            args,
        });
    }
}

/// Lanes of a core in the order of their tracks.
fn lanes(arrays: u8) -> Vec<Lane> {
    let arrays = (0..arrays).map(Lane::Mxu);
    arrays
        .chain(Lane::VECTOR)
        .chain([Lane::DmaIn, Lane::DmaOut])
        .collect()
}
