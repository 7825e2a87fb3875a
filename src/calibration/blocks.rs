//! Blocks that won an autotuning on a chip, beside those that the model would choose.
//!
//! A measured row of a grouped product or of flash attention holds the blocks of the fastest of many configurations of its kernel. Here the model times all blocks
//! that such a search goes through and finds its own best, so that its choice can be compared with the one that was measured.
//!
//! Source of the searches: the autotuning configurations of Tokamax, whose winners the rows are. A search also covers numbers of stages, warps, layouts and
//! orders of the grid, which the model does not tell apart. Configurations whose blocks do not fit on chip do not compile and are no candidates.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;
use serde::Serialize;

use super::data;
use super::validate::quantile;
use crate::hardware::{Architecture, Chip};
use crate::kernels::library::Formats;
use crate::measurements::{MeasurementError, Row};
use crate::study::predict::{self, ChipFiles};

/// How much longer than the best a choice may take and still be as good as it.
pub const CLOSE: f64 = 1.1;
/// Part of a time that is rounding.
const ROUNDING: f64 = 1e-9;

/// A measured winner and what the model says of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// Device.
    pub device: String,
    /// Operation.
    pub op: String,
    /// Parameters, blocks of the winner included.
    pub params: String,
    /// Measured time of the winner, in microseconds.
    pub measured_us: f64,
    /// Predicted time of the winner, in microseconds.
    pub winner_us: f64,
    /// Blocks with the least predicted time, of equals the first in the order of the search.
    pub best: String,
    /// Their predicted time, in microseconds.
    pub best_us: f64,
    /// Blocks that were compared, the winner among them.
    pub candidates: usize,
    /// Of those, how many the model takes for as good as its best, in percent: what chance would hit.
    pub close_candidates_pct: f64,
}

impl Choice {
    /// Whether nothing is predicted to be faster than the measured winner.
    #[must_use]
    pub fn agrees(&self) -> bool {
        self.winner_us <= self.best_us * (1.0 + ROUNDING)
    }

    /// Predicted time of the winner over that of the model's choice.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.winner_us / self.best_us
    }

    /// Whether the model agrees, or takes the winner for as good as its own choice.
    #[must_use]
    pub fn close(&self) -> bool {
        self.ratio() <= CLOSE
    }
}

/// The choices of an operation on a device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    /// Operation.
    pub op: String,
    /// Device; `all` for every device.
    pub device: String,
    /// Rows.
    pub rows: usize,
    /// Rows on which nothing is predicted to be faster than the winner, in percent.
    pub agree_pct: f64,
    /// Rows on which the winner is predicted within [`CLOSE`] of the model's choice, in percent.
    pub close_pct: f64,
    /// The same of a choice by chance, in percent: mean over the rows.
    pub chance_pct: f64,
    /// Median of the predicted time of the winner over that of the model's choice.
    pub median_ratio: f64,
    /// Ninetieth percentile of it.
    pub p90_ratio: f64,
    /// Median number of candidates.
    pub candidates: f64,
}

/// Every measured winner, in the order of the files.
///
/// # Errors
/// Where a shipped file is malformed.
pub fn choices() -> Result<Vec<Choice>, MeasurementError> {
    let files = ChipFiles::default();
    let tables = data::shipped()?;
    let rows: Vec<Row> = data::screen(&tables, &files)
        .used
        .into_iter()
        .map(|observation| observation.row)
        .filter(|row| Kernel::of(row).is_some())
        .collect();
    let chips = predict::chips(&rows, &files);
    Ok(rows
        .par_iter()
        .filter_map(|row| {
            let chip = chips.get(&(row.device.clone(), row.cores))?.as_ref().ok()?;
            choice(row, chip)
        })
        .collect())
}

/// The choices by operation and device, then by operation, then all.
#[must_use]
pub fn groups(choices: &[Choice]) -> Vec<Group> {
    let mut by: BTreeMap<(&str, &str), Vec<&Choice>> = BTreeMap::new();
    for choice in choices {
        for device in [choice.device.as_str(), "all"] {
            by.entry((&choice.op, device)).or_default().push(choice);
        }
    }
    let mut groups: Vec<Group> = by
        .iter()
        .map(|((op, device), of)| group(op, device, of))
        .collect();
    groups.sort_by(|a, b| (a.device == "all", &a.op, &a.device).cmp(&(b.device == "all", &b.op, &b.device)));
    if !choices.is_empty() {
        groups.push(group("all", "all", &choices.iter().collect::<Vec<_>>()));
    }
    groups
}

fn group(op: &str, device: &str, of: &[&Choice]) -> Group {
    let share = |holds: fn(&Choice) -> bool| {
        100.0 * of.iter().filter(|choice| holds(choice)).count() as f64 / of.len() as f64
    };
    let sorted = |value: fn(&Choice) -> f64| {
        let mut values: Vec<f64> = of.iter().map(|choice| value(choice)).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let ratios = sorted(Choice::ratio);
    Group {
        op: op.to_owned(),
        device: device.to_owned(),
        rows: of.len(),
        agree_pct: share(Choice::agrees),
        close_pct: share(Choice::close),
        chance_pct: of.iter().map(|choice| choice.close_candidates_pct).sum::<f64>() / of.len() as f64,
        median_ratio: quantile(&ratios, 0.5),
        p90_ratio: quantile(&ratios, 0.9),
        candidates: quantile(&sorted(|choice| choice.candidates as f64), 0.5),
    }
}

/// The model's choice for the case of a row; none where the case has no blocks or cannot be timed.
fn choice(row: &Row, chip: &Chip) -> Option<Choice> {
    let kernel = Kernel::of(row)?;
    let case = Sizes::of(row)?;
    let names = kernel.names(chip);
    let winner: Vec<u64> = names.iter().map(|name| case.get(name)).collect::<Option<_>>()?;
    let mut candidates = kernel.search(&case, &winner, chip);
    let room = chip.on_chip.scoped().get();
    candidates.retain(|blocks| kernel.bytes(&case, blocks, chip) as f64 <= room);
    let us = |blocks: &[u64]| {
        let row = Row {
            params: with_blocks(&row.params, names, blocks),
            ..row.clone()
        };
        Some(predict::case(&row, chip).ok()?.predicted_us)
    };
    let winner_us = us(&winner)?;
    let mut timed: Vec<(Vec<u64>, f64)> = candidates
        .into_iter()
        .filter(|blocks| *blocks != winner)
        .filter_map(|blocks| us(&blocks).map(|us| (blocks, us)))
        .collect();
    timed.push((winner, winner_us));
    let (best, best_us) = timed.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
    let close = timed.iter().filter(|(_, us)| *us <= best_us * CLOSE).count();
    Some(Choice {
        device: row.device.clone(),
        op: row.op.clone(),
        params: row.params.clone(),
        measured_us: row.latency_us?,
        winner_us,
        best: with_blocks("", names, best),
        best_us: *best_us,
        candidates: timed.len(),
        close_candidates_pct: 100.0 * close as f64 / timed.len() as f64,
    })
}

/// Parameters with other blocks.
fn with_blocks(params: &str, names: &[&str], blocks: &[u64]) -> String {
    let kept = params
        .split(';')
        .filter(|part| !part.is_empty() && !names.contains(&part.split('=').next().unwrap_or_default()))
        .map(str::to_owned);
    let blocks = names
        .iter()
        .zip(blocks)
        .map(|(name, block)| format!("{name}={block}"));
    kept.chain(blocks).collect::<Vec<_>>().join(";")
}

/// Whole numbers among the parameters of a case, and bytes of an element of its operands.
struct Sizes<'a> {
    numbers: BTreeMap<&'a str, u64>,
    element: u64,
    weight: u64,
}

impl<'a> Sizes<'a> {
    fn of(row: &'a Row) -> Option<Self> {
        let pairs = row.params.split(';').filter_map(|part| part.split_once('='));
        let numbers = pairs.filter_map(|(name, value)| Some((name, value.parse().ok()?)));
        let formats = Formats::parse(&row.dtype).ok()?;
        Some(Sizes {
            numbers: numbers.collect(),
            element: formats.a.bytes(),
            weight: formats.b.bytes(),
        })
    }

    fn get(&self, name: &str) -> Option<u64> {
        self.numbers.get(name).copied()
    }

    /// Of a size that every row of the kernel has.
    fn size(&self, name: &str) -> u64 {
        self.get(name).unwrap_or(1)
    }
}

/// Kernels whose winners were measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    RaggedDot,
    RaggedDotTriton,
    Flash,
    FlashTriton,
}

impl Kernel {
    /// The kernel of a row that holds blocks.
    fn of(row: &Row) -> Option<Self> {
        let kernel = match row.op.as_str() {
            "ragged_dot" => Kernel::RaggedDot,
            "ragged_dot_triton" => Kernel::RaggedDotTriton,
            "flash_attention" => Kernel::Flash,
            "flash_attention_triton" => Kernel::FlashTriton,
            _ => return None,
        };
        let blocks = row.params.contains("block_") || row.params.contains("tile_");
        blocks.then_some(kernel)
    }

    /// Parameters that say how a case is cut into blocks.
    fn names(self, chip: &Chip) -> &'static [&'static str] {
        match (self, chip.architecture) {
            (Kernel::RaggedDot, Architecture::Tpu) => &["tile_m", "tile_k", "tile_n"],
            (Kernel::RaggedDot | Kernel::RaggedDotTriton, _) => &["block_m", "block_k", "block_n"],
            (Kernel::Flash, Architecture::Tpu) => &["block_q", "block_kv", "block_kv_compute"],
            (Kernel::Flash, Architecture::Gpu) => &["block_q", "block_kv"],
            (Kernel::FlashTriton, _) => &["block_q", "block_k"],
        }
    }

    /// All blocks that a search for a case goes through, in order.
    fn search(self, case: &Sizes<'_>, winner: &[u64], chip: &Chip) -> Vec<Vec<u64>> {
        let triton = |least: u64, values: &[u64], extent: u64| -> BTreeSet<u64> {
            let most = extent.next_power_of_two().max(least);
            values.iter().map(|&value| value.clamp(least, most)).collect()
        };
        let [m, k, n] = ["m", "k", "n"].map(|name| case.size(name));
        let [queries, keys] = ["Tq", "Tk"].map(|name| case.size(name));
        match (self, chip.architecture) {
            (Kernel::RaggedDot, Architecture::Tpu) => {
                let rows = doublings(128, 1024).filter(|&rows| rows <= m).collect();
                product(&[rows, sides(k), sides(n)])
            }
            // The kernels for Hopper and for Blackwell go through parts of this; the width of a block is given by the format.
            (Kernel::RaggedDot, Architecture::Gpu) => product(&[
                BTreeSet::from([8, 16, 24, 32, 64, 128]),
                BTreeSet::from([128, 256]),
                winner.last().copied().into_iter().collect(),
            ]),
            (Kernel::RaggedDotTriton, _) => product(&[
                triton(32, &[64, 128, 256], m),
                triton(32, &[32, 64, 128], k),
                triton(32, &[64, 128, 256], n),
            ]),
            (Kernel::Flash, Architecture::Tpu) => {
                let tiles = |extent: u64| -> BTreeSet<u64> {
                    let least = if extent >= 1024 { 1024 } else { 128 };
                    doublings(least, 4096).filter(|&tile| tile <= extent).collect()
                };
                let mut blocks = product(&[tiles(queries), tiles(keys), doublings(128, 1024).collect()]);
                blocks.retain(|blocks| blocks[1].is_multiple_of(blocks[2]));
                blocks
            }
            (Kernel::Flash, Architecture::Gpu) => {
                let rows = doublings(
                    64,
                    if queries.next_power_of_two() > 128 {
                        128
                    } else {
                        64
                    },
                );
                let columns =
                    doublings(64, 256).filter(|&tile| tile == 64 || tile <= keys.next_power_of_two());
                product(&[rows.collect(), columns.collect()])
            }
            (Kernel::FlashTriton, _) => {
                let values = [16, 32, 64, 128];
                product(&[triton(16, &values, queries), triton(16, &values, keys)])
            }
        }
    }

    /// Bytes on chip without which blocks do not compile: two buffers of what moves on a TPU and of keys and values of a Mosaic kernel on a GPU, one for others; f32
    /// sums and scores on a TPU, where registers do not hold them.
    fn bytes(self, case: &Sizes<'_>, blocks: &[u64], chip: &Chip) -> u64 {
        let (a, b) = (case.element, case.weight);
        let [key_dim, value_dim] = ["D", "Dv"].map(|name| case.size(name));
        let saturating = |factors: &[u64]| factors.iter().fold(1_u64, |all, &f| all.saturating_mul(f));
        let sum = |parts: &[u64]| parts.iter().fold(0_u64, |all, &part| all.saturating_add(part));
        let columns = |rows: u64| saturating(&[rows, key_dim + value_dim, a]);
        match (self, chip.architecture, blocks) {
            (Kernel::RaggedDot | Kernel::RaggedDotTriton, architecture, &[m, k, n]) => {
                let moved = sum(&[saturating(&[m, k, a]), saturating(&[k, n, b])]);
                match architecture {
                    Architecture::Tpu => sum(&[
                        saturating(&[2, moved]),
                        saturating(&[2, m, n, a]),
                        // Sums of a depth that is not cut are the output.
                        if k < case.size("k") {
                            saturating(&[4, m, n])
                        } else {
                            0
                        },
                    ]),
                    Architecture::Gpu => moved,
                }
            }
            (Kernel::Flash, Architecture::Tpu, &[rows, keys, inner]) => sum(&[
                saturating(&[2, columns(rows)]),
                saturating(&[2, columns(keys)]),
                saturating(&[4, rows, value_dim]),
                saturating(&[4, rows, inner]),
            ]),
            // Two groups of warps, each with a block of queries.
            (Kernel::Flash, Architecture::Gpu, &[rows, keys]) => sum(&[
                saturating(&[2, rows, key_dim, a]),
                saturating(&[2, columns(keys)]),
            ]),
            (Kernel::FlashTriton, _, &[rows, keys]) => sum(&[saturating(&[rows, key_dim, a]), columns(keys)]),
            _ => 0,
        }
    }
}

/// `first`, twice that, and so on up to `last`.
fn doublings(first: u64, last: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(first), |value| value.checked_mul(2)).take_while(move |value| *value <= last)
}

/// Tiles of a side of a grouped product on a TPU: powers of two, halves of the side padded to whole lanes, and the side itself.
fn sides(extent: u64) -> BTreeSet<u64> {
    let padded = extent.next_multiple_of(128);
    let halves = (0..6).map(|i| padded >> i).filter(|&side| side >= 128);
    doublings(128, 128 << 7)
        .filter(|&side| side <= padded)
        .chain(halves)
        .chain([extent])
        .collect()
}

/// Every combination, the last value varying fastest.
fn product(values: &[BTreeSet<u64>]) -> Vec<Vec<u64>> {
    values.iter().fold(vec![Vec::new()], |all, next| {
        all.iter()
            .flat_map(|head| {
                next.iter()
                    .map(move |&value| [head.as_slice(), &[value]].concat())
            })
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_a_side_are_those_of_the_search() {
        // Depth 1536: powers of two up to it, 1536 / 2^i down to 192, which is no tile of whole lanes but is searched.
        let expected = [128, 192, 256, 384, 512, 768, 1024, 1536];
        assert_eq!(sides(1536).into_iter().collect::<Vec<_>>(), expected);
        // 2880 is padded to 2944; the side itself is tried as well.
        assert!(sides(2880).is_superset(&BTreeSet::from([2944, 2880, 1472, 2048])));
    }

    #[test]
    fn the_winner_has_the_time_that_predict_gives_it_and_the_choice_is_no_slower() {
        let row = Row {
            line: 2,
            device: "h100-sxm".to_owned(),
            cores: None,
            op: "flash_attention".to_owned(),
            params: "B=1;Tq=2048;Tk=2048;Hq=4;Hkv=4;D=64;Dv=64;causal=1;block_q=64;block_kv=128".to_owned(),
            dtype: "bf16".to_owned(),
            timing: "device".to_owned(),
            latency_us: Some(1.0),
            source: String::new(),
            cells: Vec::new(),
        };
        let chips = predict::chips([&row], &ChipFiles::default());
        let found = chips.values().flatten().find_map(|chip| {
            let predicted = predict::case(&row, chip).ok()?.predicted_us;
            Some((choice(&row, chip)?, predicted))
        });
        let (winner_us, best_us, candidates, predicted) = found
            .map(|(choice, us)| (choice.winner_us, choice.best_us, choice.candidates, us))
            .unwrap_or_default();
        assert_eq!(winner_us.to_bits(), predicted.to_bits());
        assert!(best_us > 0.0 && best_us <= winner_us);
        // Two heights of a block of queries, three widths of one of keys.
        assert_eq!(candidates, 6);
    }

    #[test]
    fn a_choice_by_chance_is_as_often_close_as_there_are_close_candidates() {
        let choice = |winner_us: f64, pct: f64| Choice {
            device: "d".to_owned(),
            op: "o".to_owned(),
            params: String::new(),
            measured_us: 1.0,
            winner_us,
            best: String::new(),
            best_us: 100.0,
            candidates: 4,
            close_candidates_pct: pct,
        };
        let groups = groups(&[choice(100.0, 25.0), choice(110.0, 75.0), choice(120.0, 50.0)]);
        let all = &groups[groups.len() - 1];
        assert_eq!((all.rows, all.chance_pct, all.median_ratio), (3, 50.0, 1.1));
        assert!((all.agree_pct - 100.0 / 3.0).abs() < 1e-9 && (all.close_pct - 200.0 / 3.0).abs() < 1e-9);
    }
}
