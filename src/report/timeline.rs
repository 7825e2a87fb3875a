//! A program as a text timeline: one row per lane, one column per slice of time, one letter per operation.
//!
//! ```text
//! MXU0 |AAAA....BBBB....|   A: W S   B: X^T U   .: waits for latency
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::hardware::Chip;
use crate::kernels::Kernel;
use crate::timing::program::{Program, Wait};
use crate::timing::unit::Lane;

const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
/// What is left when there are more operations than letters.
const OTHER: char = '#';

/// The timeline of one program, `width` columns wide, with its legend. Cycles are those of the chip's clock, which the first line names.
#[must_use]
pub fn render(kernel: &Kernel, program: &Program, chip: &Chip, width: usize) -> String {
    let mut rows: BTreeMap<Lane, Vec<(f64, f64, usize, Wait)>> = BTreeMap::new();
    for group in &program.groups {
        for held in &group.lanes {
            rows.entry(held.lane)
                .or_default()
                .push((held.start, held.end(), group.op, held.wait));
        }
    }
    // Letters by share of time, so that what matters keeps one.
    let mut time_of: BTreeMap<usize, f64> = BTreeMap::new();
    for (start, end, op, _) in rows.values().flatten() {
        *time_of.entry(*op).or_default() += end - start;
    }
    let mut by_time: Vec<(usize, f64)> = time_of.into_iter().collect();
    by_time.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let letter: BTreeMap<usize, char> = by_time
        .iter()
        .zip(LETTERS)
        .map(|((op, _), &byte)| (*op, char::from(byte)))
        .collect();

    let column = program.makespan / width.max(1) as f64;
    let mut out = String::new();
    let _ = writeln!(
        out,
        "one program: {:.0} cycles at {:.2} GHz, {column:.1} cycles a column",
        program.makespan,
        chip.clock().get() / 1e9
    );
    for (lane, mut held) in rows {
        held.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut line: String = String::with_capacity(width);
        for c in 0..width {
            let (from, to) = (c as f64 * column, (c + 1) as f64 * column);
            // The operation that holds most of the column, or the reason the next one waits.
            let longest = held
                .iter()
                .map(|&(start, end, op, _)| (op, end.min(to) - start.max(from)))
                .filter(|(_, shared)| *shared > 0.0)
                .max_by(|a, b| a.1.total_cmp(&b.1));
            line.push(match longest {
                Some((op, shared)) if shared >= column / 2.0 => letter.get(&op).copied().unwrap_or(OTHER),
                _ => match held
                    .iter()
                    .find(|(start, ..)| *start >= from)
                    .map(|(.., wait)| *wait)
                {
                    Some(Wait::Latency) => '.',
                    Some(Wait::Unit) => ':',
                    Some(Wait::Data | Wait::Start) => '-',
                    Some(Wait::Dma) => '~',
                    None => ' ',
                },
            });
        }
        let _ = writeln!(out, "{:>5} |{line}|", lane.name());
    }
    let _ = writeln!(
        out,
        "      . waits for a result on its way  - for its producer  : for another unit  ~ for DMA"
    );
    let mut legend = String::from("     ");
    for (op, sign) in by_time
        .iter()
        .filter_map(|(op, _)| letter.get(op).map(|sign| (*op, *sign)))
        .take(24)
    {
        let entry = format!(" {sign} {}", kernel.ops[op].name);
        if legend.len() + entry.len() > width + 6 {
            let _ = writeln!(out, "{legend}");
            legend = String::from("     ");
        }
        legend.push_str(&entry);
    }
    let _ = writeln!(out, "{legend}");
    out
}
