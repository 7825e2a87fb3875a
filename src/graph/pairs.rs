//! The pairs of a query block and a key block that attention visits.

use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;

/// Which keys `j` a query `i` sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Visibility {
    /// Only keys with `j <= i`.
    pub causal: bool,
    /// Only keys with `i - j < window`.
    pub window: Option<usize>,
    /// Only keys with `j < keys`: the rest is padding.
    pub keys: Option<usize>,
}

impl Visibility {
    /// Whether query `i` sees key `j`.
    #[must_use]
    pub fn sees(self, i: usize, j: usize) -> bool {
        (!self.causal || j <= i)
            && self.window.is_none_or(|window| i < j + window)
            && self.keys.is_none_or(|keys| j < keys)
    }

    /// Conditions an element is compared with: vector operations of its mask.
    #[must_use]
    pub fn conditions(self) -> u64 {
        u64::from(self.causal) + u64::from(self.window.is_some()) + u64::from(self.keys.is_some())
    }
}

/// Which of the visible pairs a loop visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum PairKind {
    /// Every query of the block sees every key of the block: no mask.
    Whole,
    /// Some do and some do not: pairs on the diagonal, on the edge of the window, at the end of the keys.
    Partial,
}

/// The visible pairs of one kind, as a rule rather than a list, so that a million tokens take no more space than a hundred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPairs {
    /// Query blocks.
    pub rows: usize,
    /// Key blocks.
    pub columns: usize,
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_kv: usize,
    /// Which keys a query sees.
    pub visibility: Visibility,
    /// Which of the visible pairs.
    pub kind: PairKind,
    /// Tokens of sequences that stand one after the other, each in query blocks and key blocks of its own and seeing itself only. Empty where all blocks
    /// belong to one sequence; blocks behind the last sequence are in no pair. The longest has `visibility.keys` keys, where those are bounded.
    pub sequences: Arc<[usize]>,
}

/// A pair that is visited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockPair {
    /// Query block.
    pub row: usize,
    /// Key block.
    pub column: usize,
    /// Position of its first query and its first key, counted so that [`BlockPairs::visibility`] holds for them: from the start of their
    /// sequence, or, where keys are bounded, so that every sequence ends at the bound.
    pub origin: [usize; 2],
}

/// The blocks of one sequence.
struct Part {
    /// First query block and first key block.
    first: [usize; 2],
    /// Key blocks.
    columns: usize,
    /// Query blocks.
    rows: usize,
    block_q: usize,
    block_kv: usize,
    visibility: Visibility,
    kind: PairKind,
    /// What is added to positions.
    shift: usize,
}

impl Part {
    /// Key blocks visited for query block `row`, as two runs (either may be empty).
    fn runs(&self, row: usize) -> [Range<usize>; 2] {
        let (bk, seen) = (self.block_kv, self.visibility);
        let (first, end) = (row * self.block_q, (row + 1) * self.block_q);
        // Visible: the differences i - j of a pair are a run of integers, so bounds can be met one by one.
        let (mut low, mut high) = (0, self.columns);
        // Whole: the worst element of the pair meets every bound.
        let (mut whole_low, mut whole_high) = (0, self.columns);
        if seen.causal {
            high = high.min((end - 1) / bk + 1);
            whole_high = whole_high.min((first + 1) / bk);
        }
        if let Some(keys) = seen.keys {
            high = high.min(keys.div_ceil(bk));
            whole_high = whole_high.min(keys / bk);
        }
        if let Some(window) = seen.window {
            low = (first + 2).saturating_sub(window).div_ceil(bk).saturating_sub(1);
            // The first query sees the furthest back: beyond that, no key is left.
            if seen.keys.is_some_and(|keys| keys + window < first + 2) {
                high = 0;
            }
            if end > window {
                whole_low = (end - 1 - window) / bk + 1;
            }
        }
        let low = low.min(high);
        let (from, to) = (whole_low.max(low), whole_high.min(high));
        let whole = if from < to { from..to } else { low..low };
        match self.kind {
            PairKind::Partial => [low..whole.start, whole.end..high],
            PairKind::Whole => [whole, high..high],
        }
    }

    fn pairs(&self) -> impl Iterator<Item = BlockPair> + '_ {
        let pair = |(row, column): (usize, usize)| BlockPair {
            row: self.first[0] + row,
            column: self.first[1] + column,
            origin: [
                row * self.block_q + self.shift,
                column * self.block_kv + self.shift,
            ],
        };
        let columns = |row| {
            self.runs(row)
                .into_iter()
                .flatten()
                .map(move |column| (row, column))
        };
        (0..self.rows).flat_map(columns).map(pair)
    }
}

impl BlockPairs {
    fn parts(&self) -> impl Iterator<Item = Part> + '_ {
        let part = |first, rows, columns, visibility, shift| Part {
            first,
            columns,
            rows,
            block_q: self.block_q,
            block_kv: self.block_kv,
            visibility,
            kind: self.kind,
            shift,
        };
        let whole = self
            .sequences
            .is_empty()
            .then(|| part([0, 0], self.rows, self.columns, self.visibility, 0));
        let mut first = [0, 0];
        let packed = self.sequences.iter().map(move |&tokens| {
            let blocks = [tokens.div_ceil(self.block_q), tokens.div_ceil(self.block_kv)];
            let seen = Visibility {
                keys: self.visibility.keys.map(|_| tokens),
                ..self.visibility
            };
            let shift = self.visibility.keys.map_or(0, |keys| keys.saturating_sub(tokens));
            let of_sequence = part(first, blocks[0], blocks[1], seen, shift);
            first = [first[0] + blocks[0], first[1] + blocks[1]];
            of_sequence
        });
        whole.into_iter().chain(packed)
    }

    /// Number of pairs.
    #[must_use]
    pub fn count(&self) -> usize {
        self.parts()
            .map(|part| -> usize {
                let runs = (0..part.rows).flat_map(|row| part.runs(row));
                runs.map(|run| run.len()).sum()
            })
            .sum()
    }

    /// The pairs, sequence by sequence and query block by query block.
    pub fn iter(&self) -> impl Iterator<Item = BlockPair> + '_ {
        self.parts().flat_map(|part| part.pairs().collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every rule against the definition, element by element.
    #[test]
    fn runs_are_what_the_elements_say() {
        for (block_q, block_kv) in [(1, 1), (4, 4), (4, 6), (6, 4), (3, 8), (8, 3)] {
            for causal in [false, true] {
                for window in [None, Some(1), Some(3), Some(7), Some(100)] {
                    for keys in [None, Some(17), Some(24)] {
                        let visibility = Visibility { causal, window, keys };
                        let (rows, columns) = (24_usize.div_ceil(block_q), 24_usize.div_ceil(block_kv));
                        let of = |kind| -> Vec<(usize, usize)> {
                            let pairs = BlockPairs {
                                rows,
                                columns,
                                block_q,
                                block_kv,
                                visibility,
                                kind,
                                sequences: Arc::from([]),
                            };
                            assert_eq!(pairs.count(), pairs.iter().count());
                            pairs.iter().map(|pair| (pair.row, pair.column)).collect()
                        };
                        let (whole, partial) = (of(PairKind::Whole), of(PairKind::Partial));
                        for r in 0..rows {
                            for c in 0..columns {
                                let seen = (r * block_q..(r + 1) * block_q)
                                    .flat_map(|i| (c * block_kv..(c + 1) * block_kv).map(move |j| (i, j)))
                                    .filter(|&(i, j)| visibility.sees(i, j))
                                    .count();
                                let all = block_q * block_kv;
                                let at = format!("{visibility:?} {block_q}x{block_kv} at {r},{c}");
                                assert_eq!(whole.contains(&(r, c)), seen == all, "whole {at}");
                                assert_eq!(partial.contains(&(r, c)), seen > 0 && seen < all, "partial {at}");
                            }
                        }
                    }
                }
            }
        }
    }
}
