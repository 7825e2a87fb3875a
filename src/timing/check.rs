//! An independent proof that a schedule is legal.
//!
//! The checker knows nothing of how a schedule was made. It reads intervals and says which rule they break:
//!
//! 1. **Dependence.** The first copy of a group starts after the first copy of every operand is there, and the last copy ends no earlier than the last copy of every
//!    operand is there plus the time of one copy.
//! 2. **Exclusion.** No two groups hold a lane at the same time.
//! 3. **Occupancy.** A group holds each of its lanes inside its own interval.
//! 4. **Bounds.** The makespan is at least the busy time of every lane and at least the longest dependence chain.
//! 5. **Pipeline.** A program starts after the one before and after its block; a buffer is refilled only when it is free; the total is at
//!    least the sum of computes and at least the sum of transfers.

use std::collections::BTreeMap;

use super::kernel::KernelTime;
use super::program::{Placed, Program};
use super::unit::Lane;

/// Rounding of sums of cycles.
const TOLERANCE: f64 = 1e-6;

/// A rule that a schedule breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("illegal schedule: {0}")]
pub struct Illegal(String);

fn holds(condition: bool, message: impl FnOnce() -> String) -> Result<(), Illegal> {
    if condition {
        Ok(())
    } else {
        Err(Illegal(message()))
    }
}

/// Not before `b`, up to rounding.
fn not_before(a: f64, b: f64) -> bool {
    a >= b - TOLERANCE * (1.0 + b.abs())
}

/// Checks the schedule of one program.
///
/// # Errors
/// The first rule it breaks.
pub fn check_program(program: &Program) -> Result<(), Illegal> {
    let mut by_lane: BTreeMap<Lane, Vec<(f64, f64, usize)>> = BTreeMap::new();
    let mut chain = vec![0.0_f64; program.groups.len()];
    for (i, group) in program.groups.iter().enumerate() {
        holds(
            group.start >= 0.0 && group.end >= group.start && group.latency >= 0.0,
            || {
                format!(
                    "group {i} runs from {} to {} with latency {}",
                    group.start, group.end, group.latency
                )
            },
        )?;
        for &j in &group.after {
            holds(j < i, || {
                format!("group {i} waits for group {j}, which comes later")
            })?;
            let operand = &program.groups[j];
            dependence(i, group, j, operand)?;
            chain[i] = chain[i].max(chain[j]);
        }
        chain[i] += group.duration() / group.copies + group.latency;
        for held in &group.lanes {
            let (from, until) = (held.start, held.start + held.cycles);
            holds(
                held.cycles >= 0.0 && not_before(from, group.start) && not_before(group.end, until),
                || {
                    format!(
                        "group {i} holds {} from {from} to {until}, outside its own interval",
                        held.lane.name()
                    )
                },
            )?;
            by_lane.entry(held.lane).or_default().push((from, until, i));
        }
        holds(not_before(program.makespan, group.end + group.latency), || {
            format!("group {i} ends after the makespan {}", program.makespan)
        })?;
    }
    for (lane, intervals) in &mut by_lane {
        intervals.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)));
        for pair in intervals.windows(2) {
            holds(not_before(pair[1].0, pair[0].1), || {
                format!(
                    "groups {} and {} hold {} at the same time",
                    pair[0].2,
                    pair[1].2,
                    lane.name()
                )
            })?;
        }
        let busy: f64 = intervals.iter().map(|(start, end, _)| end - start).sum();
        holds(not_before(program.makespan, busy), || {
            format!(
                "{} is busy for {busy} cycles of a makespan of {}",
                lane.name(),
                program.makespan
            )
        })?;
    }
    let longest = chain.iter().copied().fold(0.0, f64::max);
    holds(not_before(program.makespan, longest), || {
        format!(
            "the longest chain takes {longest} cycles of a makespan of {}",
            program.makespan
        )
    })
}

fn dependence(i: usize, group: &Placed, j: usize, operand: &Placed) -> Result<(), Illegal> {
    let first_ready = operand.start + operand.duration() / operand.copies + operand.latency;
    holds(not_before(group.start, first_ready), || {
        format!(
            "group {i} starts at {} before group {j} is there at {first_ready}",
            group.start
        )
    })?;
    let last_ready = operand.end + operand.latency + group.duration() / group.copies;
    holds(not_before(group.end, last_ready), || {
        format!(
            "group {i} ends at {} before its last copy could, at {last_ready}",
            group.end
        )
    })
}

/// Checks a whole kernel: its program, its pipeline, and the capacity of on-chip memory.
///
/// # Errors
/// The first rule it breaks.
pub fn check_kernel(time: &KernelTime) -> Result<(), Illegal> {
    check_program(&time.program)?;
    let steps = &time.pipeline.head;
    // A chip that sustains more than its published clock is through in fewer cycles of that.
    let shortest = time.program.makespan / time.issue_efficiency.max(1.0);
    for (s, now) in steps.iter().enumerate() {
        holds(not_before(now.start, now.read_end), || {
            format!("program {s} starts before its block is there")
        })?;
        holds(not_before(now.end, now.start + shortest), || {
            format!("program {s} ends before its schedule does")
        })?;
        holds(not_before(now.write_start, now.end), || {
            format!("program {s} writes before it ends")
        })?;
        if s >= 1 {
            holds(not_before(now.start, steps[s - 1].end), || {
                format!("program {s} overlaps the one before")
            })?;
        }
        if let Some(before) = s.checked_sub(time.pipeline.buffers) {
            holds(not_before(now.read_start, steps[before].end), || {
                format!("program {s} fetches into a buffer that program {before} still reads")
            })?;
            holds(not_before(now.start, steps[before].write_end), || {
                format!("program {s} writes into a buffer that program {before} still sends")
            })?;
        }
    }
    holds(not_before(time.total_us, time.hbm_us), || {
        format!("{} us of transfers in {} us", time.hbm_us, time.total_us)
    })?;
    holds(not_before(time.total_us, time.mxu_us.max(time.vpu_us)), || {
        format!(
            "a unit is busy for longer than the {} us of the kernel",
            time.total_us
        )
    })
}
