//! The programs of a core one after the other, with blocks moved by DMA in a few buffers.
//!
//! Of two buffers, the block of program `s` is fetched into the one that program `s - 2` has left, while program `s - 1` computes; results leave while the next
//! program computes. More buffers fetch further ahead. Fetches and results share device memory, so their streams take turns. After a few programs the pattern repeats: the period is found once and
//! multiplied, so the cost does not depend on the number of programs.

/// Cycles of one program and its transfers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Compute, from the first operation to the last result, grid-step overhead included.
    pub compute: f64,
    /// Stream of the block that is read.
    pub read: f64,
    /// Stream of the block that is written.
    pub write: f64,
    /// From the start of a transfer to its first byte.
    pub dma_latency: f64,
    /// Buffers of a block, at least two and at most [`MOST_BUFFERS`].
    pub buffers: usize,
}

/// Most buffers of a block.
pub const MOST_BUFFERS: usize = 4;

/// Times of one program of the pipeline, in cycles from the start of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepTimes {
    /// Its block starts to stream in.
    pub read_start: f64,
    /// Its block is there.
    pub read_end: f64,
    /// It computes.
    pub start: f64,
    /// Its results are there.
    pub end: f64,
    /// Its results start to stream out.
    pub write_start: f64,
    /// Its results are in device memory.
    pub write_end: f64,
}

/// The pipeline of `programs` programs.
#[derive(Debug, Clone, PartialEq)]
pub struct Pipeline {
    /// The first programs, up to where the pattern repeats.
    pub head: Vec<StepTimes>,
    /// Buffers of a block.
    pub buffers: usize,
    /// Cycles per program once it repeats.
    pub period: f64,
    /// Cycles of the whole kernel.
    pub total: f64,
}

/// Rounds of the buffers that are simulated before the pattern is taken to repeat.
const ROUNDS: usize = 4;
/// Most programs that are simulated.
const MOST_HEAD: usize = ROUNDS * MOST_BUFFERS;

/// Runs the pipeline.
///
/// Device memory serves one stream at a time in a fixed order: the block that takes the buffer of the program that has just ended, then the results of the program that has just ended. The
/// latency of a transfer overlaps the stream before it.
#[must_use]
pub fn run(step: Step, programs: u64) -> Pipeline {
    let mut head = [StepTimes::default(); MOST_HEAD];
    let (count, period, total) = simulate(step, programs, &mut head);
    Pipeline {
        head: head[..count].to_vec(),
        buffers: buffers(step),
        period,
        total,
    }
}

/// Period and total cycles of [`run`], without the times of its programs.
#[must_use]
pub fn pace(step: Step, programs: u64) -> (f64, f64) {
    let (_, period, total) = simulate(step, programs, &mut [StepTimes::default(); MOST_HEAD]);
    (period, total)
}

fn buffers(step: Step) -> usize {
    step.buffers.clamp(2, MOST_BUFFERS)
}

/// Runs the first programs; returns how many those are, the period, and the cycles of all programs.
fn simulate(step: Step, programs: u64, head: &mut [StepTimes; MOST_HEAD]) -> (usize, f64, f64) {
    let buffers = buffers(step);
    let settled = ROUNDS * buffers;
    let count = usize::try_from(programs).unwrap_or(usize::MAX).min(settled);
    let head = &mut head[..count];
    let mut memory_free = 0.0_f64;
    let mut stream = |ready: f64, cycles: f64| {
        if cycles <= 0.0 {
            return (ready, ready);
        }
        let start = (ready + step.dma_latency).max(memory_free);
        memory_free = start + cycles;
        (start, memory_free)
    };
    for times in head.iter_mut().take(buffers) {
        (times.read_start, times.read_end) = stream(0.0, step.read);
    }
    for s in 0..count {
        let before = s.checked_sub(1).map_or(0.0, |p| head[p].end);
        let results_gone = s.checked_sub(buffers).map_or(0.0, |p| head[p].write_end);
        head[s].start = before.max(head[s].read_end).max(results_gone);
        head[s].end = head[s].start + step.compute;
        let end = head[s].end;
        if s + buffers < count {
            (head[s + buffers].read_start, head[s + buffers].read_end) = stream(end, step.read);
        }
        (head[s].write_start, head[s].write_end) = stream(end, step.write);
    }
    let period = if count == settled {
        (head[count - 1].end - head[count - 1 - buffers].end) / buffers as f64
    } else {
        step.compute
    };
    // What repeats in a period cannot be longer than it.
    let period = period.max(step.compute).max(step.read + step.write);
    let tail = head.last().map_or(0.0, |last| last.write_end.max(last.end));
    let rest = programs.saturating_sub(count as u64) as f64;
    (count, period, tail + rest * period)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(compute: f64, read: f64, write: f64, dma_latency: f64, programs: u64) -> f64 {
        run(
            Step {
                compute,
                read,
                write,
                dma_latency,
                buffers: 2,
            },
            programs,
        )
        .total
    }

    #[test]
    fn four_buffers_share_the_latency_of_a_transfer_among_four_steps() {
        let step = Step {
            compute: 100.0,
            read: 10.0,
            write: 0.0,
            dma_latency: 500.0,
            buffers: 4,
        };
        // (latency + read + compute) / 4 per step.
        let n = 10_000.0;
        let time = run(step, 10_000).total;
        assert!((time / n - 152.5).abs() < 1.0, "{}", time / n);
    }

    #[test]
    fn compute_bound_pipelines_hide_their_transfers() {
        // First block in, n computes, last block out.
        assert!((total(100.0, 10.0, 10.0, 0.0, 1000) - (10.0 + 1000.0 * 100.0 + 10.0)).abs() < 1e-6);
    }

    #[test]
    fn memory_bound_pipelines_stream_without_a_gap() {
        let n = 1000.0;
        let time = total(5.0, 40.0, 20.0, 0.0, 1000);
        assert!(time >= n * 60.0 && time <= n * 60.0 + 200.0, "{time}");
    }

    #[test]
    fn short_steps_pay_the_latency_of_a_transfer_every_other_step() {
        // Two buffers: fetch and compute of every second step follow each other, (latency + read + compute) / 2 per step.
        let n = 10_000.0;
        let time = total(100.0, 10.0, 0.0, 500.0, 10_000);
        assert!((time / n - 305.0).abs() < 1.0, "{}", time / n);
    }

    #[test]
    fn one_program_is_read_computed_and_written() {
        assert!((total(7.0, 3.0, 2.0, 1.0, 1) - (1.0 + 3.0 + 7.0 + 1.0 + 2.0)).abs() < 1e-12);
    }
}
