//! Empty cycles that the final listing no longer shows.
//!
//! The schedule is static: where a result is not ready, the compiler leaves bundles empty. Its last step folds
//! runs of empty bundles into the bundle before them and prints nothing in their place. The table of slots
//! of the stage before still has their rows, so that aligning the two tables row by row gives them back.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::utilization::Utilization;

/// Rows that the alignment looks ahead for the next match.
const WINDOW: usize = 40;
/// Rows in a row that must be equal, and unique, to anchor the alignment of tables that drift apart.
const ANCHOR: usize = 6;
/// Share of the rows that may stay without a partner before the row-by-row alignment is given up.
const UNMATCHED_SHARE: f64 = 0.02;

/// How the two tables of a kernel were aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Alignment {
    /// Every row of the final table found its partner.
    Exact,
    /// Some did not; their empty cycles are taken over from between their neighbours.
    Partial,
    /// A table is missing, so that the empty cycles are unknown and none are counted.
    Missing,
}

/// Empty cycles after each bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delays {
    /// Empty cycles after each bundle; bundles beyond the end have none.
    pub after: Vec<u32>,
    /// How much longer than the final table says the units are busy that stay busy for several cycles: for each
    /// bundle, its empty cycles included, a number for each column that is not
    /// [a bundle's own](Utilization::own_columns), in their order.
    pub busy: Vec<i64>,
    /// How well the tables fit.
    pub alignment: Alignment,
    /// Rows of the final table without a partner.
    pub unmatched: usize,
}

impl Delays {
    /// No delays, because a table is missing.
    #[must_use]
    pub fn missing() -> Self {
        Self {
            after: Vec::new(),
            busy: Vec::new(),
            alignment: Alignment::Missing,
            unmatched: 0,
        }
    }

    /// Aligns the table before delays are folded with the final one.
    #[must_use]
    pub fn recover(before: &Utilization, last: &Utilization) -> Self {
        let own = last.own_columns();
        let full = occupied(before, &own);
        let folded = occupied(last, &own);
        if folded.is_empty() {
            return Self {
                after: Vec::new(),
                busy: Vec::new(),
                alignment: Alignment::Exact,
                unmatched: 0,
            };
        }
        let mut pairs = in_order(&full, &folded);
        let unmatched = folded.len() - pairs.len();
        if unmatched as f64 > UNMATCHED_SHARE * folded.len() as f64 + 2.0 {
            let anchored = by_anchors(&full, &folded);
            if anchored.len() > pairs.len() {
                pairs = anchored;
            }
        }
        let unmatched = folded.len() - pairs.len();
        Self {
            after: between(&full, &folded, &pairs, last.len()),
            busy: busy(before, last, &full, &folded, &pairs),
            alignment: if unmatched == 0 {
                Alignment::Exact
            } else {
                Alignment::Partial
            },
            unmatched,
        }
    }
}

/// Rows that issue something: their place and a fingerprint of what they issue.
fn occupied(table: &Utilization, own: &[bool]) -> Vec<(usize, u64)> {
    let mut rows = Vec::new();
    for index in 0..table.len() {
        let mut print = 0xcbf2_9ce4_8422_2325_u64;
        let mut any = false;
        for (&value, _) in table.row(index).iter().zip(own).filter(|(_, own)| **own) {
            any |= value != 0;
            print = (print ^ u64::from(value)).wrapping_mul(0x0100_0000_01b3);
        }
        if any {
            rows.push((index, print));
        }
    }
    rows
}

/// Each folded row with the next full row that issues the same.
fn in_order(full: &[(usize, u64)], folded: &[(usize, u64)]) -> Vec<(usize, usize)> {
    let mut pairs = Vec::with_capacity(folded.len());
    let mut next = 0;
    for (index, row) in folded.iter().enumerate() {
        let mut ahead = full.iter().enumerate().skip(next).take(WINDOW);
        if let Some((found, _)) = ahead.find(|(_, candidate)| candidate.1 == row.1) {
            pairs.push((found, index));
            next = found + 1;
        }
    }
    pairs
}

/// Matches runs of rows that occur once in either table, in an order common to both, and what continues them.
fn by_anchors(full: &[(usize, u64)], folded: &[(usize, u64)]) -> Vec<(usize, usize)> {
    let unique = |rows: &[(usize, u64)]| -> BTreeMap<u64, Option<usize>> {
        let mut places: BTreeMap<u64, Option<usize>> = BTreeMap::new();
        for (start, run) in rows.windows(ANCHOR).enumerate() {
            let print = run.iter().fold(17_u64, |hash, row| {
                hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ row.1.rotate_left(7)
            });
            places
                .entry(print)
                .and_modify(|place| *place = None)
                .or_insert(Some(start));
        }
        places
    };
    let in_full = unique(full);
    let mut anchors: Vec<(usize, usize)> = Vec::new();
    for (print, place) in unique(folded) {
        if let (Some(there), Some(Some(here))) = (place, in_full.get(&print)) {
            anchors.push((*here, there));
        }
    }
    anchors.sort_unstable();
    let chain = rising(&anchors);
    let mut pairs = Vec::new();
    let (mut from_full, mut from_folded) = (0, 0);
    for (here, there) in chain.into_iter().chain([(full.len(), folded.len())]) {
        if here < from_full || there < from_folded {
            continue;
        }
        let gap = in_order(&full[from_full..here], &folded[from_folded..there]);
        pairs.extend(gap.into_iter().map(|(a, b)| (a + from_full, b + from_folded)));
        (from_full, from_folded) = (here, there);
    }
    pairs
}

/// The longest chain of pairs that rises in both members; the pairs come sorted by the first.
fn rising(pairs: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let mut tails: Vec<usize> = Vec::new();
    let mut before: Vec<Option<usize>> = vec![None; pairs.len()];
    for (index, pair) in pairs.iter().enumerate() {
        let length = tails.partition_point(|&tail| pairs[tail].1 < pair.1);
        before[index] = length.checked_sub(1).map(|shorter| tails[shorter]);
        if length == tails.len() {
            tails.push(index);
        } else {
            tails[length] = index;
        }
    }
    let mut chain = Vec::new();
    let mut at = tails.last().copied();
    while let Some(index) = at {
        chain.push(pairs[index]);
        at = before[index];
    }
    chain.reverse();
    chain
}

/// Rows that lie between matched rows before, and no longer after.
fn between(
    full: &[(usize, u64)],
    folded: &[(usize, u64)],
    pairs: &[(usize, usize)],
    bundles: usize,
) -> Vec<u32> {
    let mut after = vec![0_u32; bundles];
    let (mut last_full, mut last_folded) = (None, None);
    for &(here, there) in pairs {
        let (full_row, folded_row) = (full[here].0, folded[there].0);
        let before = full_row - last_full.map_or(0, |row: usize| row + 1);
        let remaining = folded_row - last_folded.map_or(0, |row: usize| row + 1);
        let lost = u32::try_from(before.saturating_sub(remaining)).unwrap_or(u32::MAX);
        if let Some(place) = after.get_mut(folded_row.saturating_sub(1)) {
            *place += lost;
        }
        (last_full, last_folded) = (Some(full_row), Some(folded_row));
    }
    after
}

/// What the table before says of units that stay busy, less what the final one says, at each bundle: the final
/// table spreads their use over bundles, not over cycles, and loses what lies in folded rows.
fn busy(
    before: &Utilization,
    last: &Utilization,
    full: &[(usize, u64)],
    folded: &[(usize, u64)],
    pairs: &[(usize, usize)],
) -> Vec<i64> {
    let own = last.own_columns();
    let units: Vec<usize> = (0..own.len()).filter(|&column| !own[column]).collect();
    let mut extra = vec![0_i64; last.len() * units.len()];
    if before.names != last.names || last.is_empty() {
        return extra;
    }
    let mut add = |table: &Utilization, rows: Range<usize>, bundle: usize, sign: i64| {
        for row in rows {
            for (place, &unit) in units.iter().enumerate() {
                let cell = table.row(row).get(unit).copied().unwrap_or(0);
                extra[bundle * units.len() + place] += sign * i64::from(cell);
            }
        }
    };
    let (mut next_full, mut next_folded) = (0, 0);
    for &(here, there) in pairs {
        let (full_row, folded_row) = (full[here].0, folded[there].0);
        // As the empty cycles, what lies between two rows belongs to the bundle before.
        let between = folded_row.saturating_sub(1);
        add(before, next_full..full_row, between, 1);
        add(last, next_folded..folded_row, between, -1);
        add(before, full_row..full_row + 1, folded_row, 1);
        add(last, folded_row..folded_row + 1, folded_row, -1);
        (next_full, next_folded) = (full_row + 1, folded_row + 1);
    }
    let end = last.len() - 1;
    add(before, next_full..before.len(), end, 1);
    add(last, next_folded..last.len(), end, -1);
    extra
}
