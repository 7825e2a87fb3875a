//! Tensors whose values are known before the layer runs: rotary angles, powers of a constant decay.
//!
//! A kernel reads them from HBM like any parameter; nothing of them is computed inside the layer. They are described by their formula, so
//! that a graph of many tokens stays small.

use serde::Serialize;

/// A tensor given by a formula of the position.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub enum Table {
    /// `cos((first + t) base^(-c / n))` at row `t` (first dimension) and channel pair `c` of `n` (last dimension).
    RotaryCosine {
        /// Base of the wavelengths.
        base: f64,
        /// Position of the first row, counted from 0.
        first: usize,
    },
    /// The sine of the same angle.
    RotarySine {
        /// Base of the wavelengths.
        base: f64,
        /// Position of the first row, counted from 0.
        first: usize,
    },
    /// `first + t` at row `t` (first dimension).
    Position {
        /// Value of the first row.
        first: usize,
    },
    /// `gamma^(i - j)` for `j <= i`, 0 elsewhere: `[1, Hk, R, 1, C, C]`. Here and below `gamma` is [`retention_decay`] of the value head.
    RetentionMask,
    /// `gamma^(i + 1)`, the decay from the start of the chunk through row `i`: `[1, Hk, R, 1, C, 1]`.
    RetentionHead,
    /// `gamma` to the rows after row `j` of its chunk: `[1, Hk, R, N, C, 1]`, 1 on the padded rows of the last chunk.
    RetentionTail {
        /// Tokens of the sequence; `C` where all chunks are alike and `N` is 1.
        tokens: usize,
    },
    /// `gamma` to the rows of the chunk: `[1, Hk, R, N, 1, 1]`.
    RetentionChunk {
        /// Tokens of the sequence; `chunk` where all chunks are alike and `N` is 1.
        tokens: usize,
        /// Rows of a full chunk.
        chunk: usize,
    },
    /// [`Table::RetentionTail`] of a chunk that holds `n` tokens, `n` the index of the fourth dimension: `[1, Hk, R, C + 1, C, 1]`.
    RetentionTailByTokens,
    /// [`Table::RetentionChunk`] of a chunk that holds `n` tokens, `n` the index of the fourth dimension: `[1, Hk, R, C + 1, 1, 1]`.
    RetentionChunkByTokens,
    /// `ratio^|i - j|` at the last two dimensions: the covariance of a first-order autoregression, symmetric with eigenvalues between
    /// `(1 - ratio) / (1 + ratio)` and its reciprocal for `0 <= ratio < 1` (Grenander and Szego, Toeplitz Forms, 1958).
    Autoregression {
        /// Correlation of neighbours.
        ratio: f64,
    },
}

impl Table {
    /// The value at `index` of a tensor with extents `dims`.
    #[must_use]
    pub fn value(self, index: &[usize], dims: &[usize]) -> f64 {
        let at = |i: usize| index.get(i).copied().unwrap_or(0);
        let extent = |i: usize| dims.get(i).copied().unwrap_or(1);
        let angle = |base: f64, first: usize| {
            let pair = index.last().copied().unwrap_or(0) as f64;
            let pairs = dims.last().copied().unwrap_or(1).max(1) as f64;
            (first + at(0)) as f64 * base.powf(-pair / pairs)
        };
        let power = |rows: usize| {
            let gamma = retention_decay(at(1) * extent(2) + at(2));
            // Far below any count of rows that a chunk can have.
            gamma.powi(i32::try_from(rows).unwrap_or(i32::MAX))
        };
        match self {
            Table::RotaryCosine { base, first } => angle(base, first).cos(),
            Table::RotarySine { base, first } => angle(base, first).sin(),
            Table::Position { first } => (first + at(0)) as f64,
            Table::RetentionMask if at(5) > at(4) => 0.0,
            Table::RetentionMask => power(at(4) - at(5)),
            Table::RetentionHead => power(at(4) + 1),
            Table::RetentionTail { tokens } => {
                let chunk = extent(4);
                let end = tokens.min((at(3) + 1) * chunk);
                power(end.saturating_sub(at(3) * chunk + at(4) + 1))
            }
            Table::RetentionChunk { tokens, chunk } => power(tokens.saturating_sub(at(3) * chunk).min(chunk)),
            Table::RetentionTailByTokens => power(at(3).saturating_sub(at(4) + 1)),
            Table::RetentionChunkByTokens => power(at(3)),
            Table::Autoregression { ratio } => {
                let (row, column) = match index {
                    [.., row, column] => (*row, *column),
                    _ => (0, 0),
                };
                ratio.powi(i32::try_from(row.abs_diff(column)).unwrap_or(i32::MAX))
            }
        }
    }
}

/// Decay of a head of `RetNet`, `1 - 2^(-5 - head)` (arXiv 2307.08621, eq. 8).
#[must_use]
pub fn retention_decay(head: usize) -> f64 {
    1.0 - (-5.0 - head as f64).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} against {b}");
    }

    #[test]
    fn retention_counts_the_rows_between_two_tokens() {
        // Printed in the paper for eight heads: 1 - 1/32, 1 - 1/64, ...
        close(retention_decay(0), 0.968_75);
        close(retention_decay(2), 0.992_187_5);
        let mask = |i, j| Table::RetentionMask.value(&[0, 1, 0, 0, i, j], &[1, 8, 1, 1, 64, 64]);
        close(mask(3, 3), 1.0);
        close(mask(5, 3), 0.984_375 * 0.984_375);
        close(mask(3, 5), 0.0);
    }

    #[test]
    fn the_last_chunk_ends_with_the_sequence() {
        // 70 tokens in chunks of 64: the second chunk has six rows.
        let dims = [1, 8, 1, 2, 64, 1];
        let tail = |n, j| Table::RetentionTail { tokens: 70 }.value(&[0, 0, 0, n, j, 0], &dims);
        close(tail(0, 63), 1.0);
        close(tail(0, 0), 0.968_75_f64.powi(63));
        close(tail(1, 0), 0.968_75_f64.powi(5));
        close(tail(1, 5), 1.0);
        close(tail(1, 40), 1.0);
        let whole = |n| {
            let table = Table::RetentionChunk {
                tokens: 70,
                chunk: 64,
            };
            table.value(&[0, 0, 0, n, 0, 0], &[1, 8, 1, 2, 1, 1])
        };
        close(whole(0), 0.968_75_f64.powi(64));
        close(whole(1), 0.968_75_f64.powi(6));
    }

    #[test]
    fn a_packed_chunk_ends_with_its_tokens() {
        // The second chunk of 70 tokens holds six.
        let (of_tokens, of_chunks) = ([1, 8, 1, 65, 64, 1], [1, 8, 1, 2, 64, 1]);
        for row in [0, 5, 40] {
            let packed = Table::RetentionTailByTokens.value(&[0, 1, 0, 6, row, 0], &of_tokens);
            let alone = Table::RetentionTail { tokens: 70 }.value(&[0, 1, 0, 1, row, 0], &of_chunks);
            close(packed, alone);
        }
        let whole =
            |tokens| Table::RetentionChunkByTokens.value(&[0, 0, 0, tokens, 0, 0], &[1, 8, 1, 65, 1, 1]);
        close(whole(6), 0.968_75_f64.powi(6));
        // A chunk of padding leaves the state as it is.
        close(whole(0), 1.0);
    }

    #[test]
    fn neighbours_of_an_autoregression_correlate_by_the_ratio() {
        // The inverse of a covariance ratio^|i - j| is tridiagonal: (1 + ratio^2) inside, -ratio beside it, over 1 - ratio^2.
        let a = |i: usize, j: usize| Table::Autoregression { ratio: 0.5 }.value(&[0, i, j], &[1, 9, 9]);
        for j in 0..9 {
            let product = (1.25 * a(4, j) - 0.5 * a(3, j) - 0.5 * a(5, j)) / 0.75;
            close(product, if j == 4 { 1.0 } else { 0.0 });
        }
    }

    #[test]
    fn rotary_wavelengths_span_the_base() {
        let cosine = |t, c| Table::RotaryCosine { base: 1e4, first: 0 }.value(&[t, 0, c], &[10, 1, 2]);
        close(cosine(3, 0), 3.0_f64.cos());
        close(cosine(3, 1), 0.03_f64.cos());
        let sine = Table::RotarySine { base: 1e4, first: 0 }.value(&[3, 0, 1], &[10, 1, 2]);
        close(sine, 0.03_f64.sin());
        let later = Table::RotaryCosine { base: 1e4, first: 7 }.value(&[3, 0, 0], &[10, 1, 2]);
        close(later, 10.0_f64.cos());
    }
}
