//! Stage op4: the two chunk Gram matrices
//!
//! ```text
//! A_ij = step_i sum_c read_ic write_jc exp(Gr_ic - G_jc)   for j < i
//! P_ij =        sum_c query_ic write_jc exp(G_ic - G_jc)   for j <= i
//! ```
//!
//! `G` is the inclusive cumulative log decay of the chunk, `Gr` is `G` (decayed reads) or the exclusive sum (undecayed). Exponentials of
//! differences never overflow; factored forms `exp(G_i - mu) exp(mu - G_j)` do when decay accumulates too far on one side of the pivot `mu`.
//! Without decay both are masked products. There may be fewer queries than keys: with `n` keys per query, query `i` sees `j < (i + 1) n`.

use crate::dtype::Dtype;
use crate::graph::{Builder, Mask, Precision, Value};
use crate::layer::{GramVariant, PivotRow};

/// Rows of a pivot block.
pub(super) const PIVOT_BLOCK: usize = 16;

/// Operands of the Gram matrices, in core layout.
#[derive(Debug, Clone, Copy)]
pub(super) struct GramOperands {
    /// Queries `[B, Hk, 1, N, Cq, dk]`, `Cq` a divisor of `C`.
    pub(super) query: Value,
    /// Read keys without step size `[B, Hk, 1, N, C, dk]`.
    pub(super) read: Value,
    /// Write keys `[B, Hk, 1, N, C, dk]`.
    pub(super) write: Value,
    /// Step sizes `[B, Hk, R, N, C, 1]`, f32, where the read keys lack them.
    pub(super) step: Option<Value>,
    /// Decays, where there are any.
    pub(super) decays: Option<Decays>,
}

/// Cumulative log decays of a chunk, f32.
#[derive(Debug, Clone, Copy)]
pub(super) struct Decays {
    /// `G [B, Hk, R, N, C, g]`.
    pub(super) cumulative: Value,
    /// `Gr`, of the read side, the same shape.
    pub(super) read_cumulative: Value,
    /// `G` at the queries `[B, Hk, R, N, Cq, g]`.
    pub(super) query_cumulative: Value,
}

/// `A [B, Hk, R, N, C, C]` and `P [B, Hk, R, N, Cq, C]` in f32. With fewer queries than keys only the variants for one decay per head are built.
pub(super) fn append(
    b: &mut Builder,
    variant: GramVariant,
    pivot: PivotRow,
    operand_dtype: Dtype,
    ops: GramOperands,
) -> (Value, Value) {
    let (a, p) = match ops.decays {
        None => products(b, operand_dtype, ops),
        Some(decays) => match variant {
            GramVariant::ScalarMask => scalar_mask(b, operand_dtype, ops, decays),
            GramVariant::Broadcast => broadcast(b, ops, decays),
            GramVariant::Pivot => pivots(b, pivot, operand_dtype, ops, decays),
            GramVariant::PivotCausal => causal_pivots(b, operand_dtype, ops, decays),
            GramVariant::Folded => folded(b, pivot, operand_dtype, ops, decays),
            GramVariant::TileMasks => tile_masks(b, operand_dtype, ops, decays),
        },
    };
    let a = b.select("A_lower", Mask::StrictlyLower, a, 0.0);
    let p = causal(b, "P_lower", p, 0.0);
    let a = match ops.step {
        Some(step) => b.multiply("A", a, step),
        None => a,
    };
    (a, p)
}

/// Keeps what a row may see of `value [.., r, c]`: columns `j < (i + 1) c / r` of row `i`.
fn causal(b: &mut Builder, name: &str, value: Value, fill: f64) -> Value {
    let dims = b.dims(value);
    let (rows, columns) = (b.shape(value).from_end(1), b.shape(value).from_end(0));
    if rows == columns {
        return b.select(name, Mask::Lower, value, fill);
    }
    let mut by_row = dims.clone();
    by_row.pop();
    by_row.extend([rows, columns / rows]);
    let by_row = b.reshape(&format!("{name}_by_row"), value, by_row);
    let kept = b.select(name, Mask::LowerPairs, by_row, fill);
    b.reshape(&format!("{name}_full"), kept, dims)
}

/// `exp(rows_i - columns_j)` where row `i` may see column `j`, 0 elsewhere, from `[.., C, 1]` columns.
pub(super) fn decay_mask(b: &mut Builder, name: &str, rows: Value, columns: Value) -> Value {
    let columns = b.transpose_minor(&format!("{name}_columns"), columns);
    let difference = b.subtract(&format!("{name}_difference"), rows, columns);
    let causal = causal(b, &format!("{name}_causal"), difference, f64::NEG_INFINITY);
    b.exp(name, causal)
}

/// The products alone: `R X^T` and `Q X^T`.
fn products(b: &mut Builder, dtype: Dtype, ops: GramOperands) -> (Value, Value) {
    let read = b.cast("R_rounded", ops.read, dtype);
    (
        b.matmul_bt("R X^T", read, ops.write, Precision::Default),
        b.matmul_bt("Q X^T", ops.query, ops.write, Precision::Default),
    )
}

/// One product per Gram and one `C x C` mask; the raw products are shared by the value heads of a key head.
fn scalar_mask(b: &mut Builder, dtype: Dtype, ops: GramOperands, decays: Decays) -> (Value, Value) {
    let (raw_a, raw_p) = products(b, dtype, ops);
    let mask = decay_mask(b, "M", decays.query_cumulative, decays.cumulative);
    let read_mask = if decays.read_cumulative == decays.query_cumulative {
        mask
    } else {
        // Row 0 of the exclusive sum is zero, its diagonal exceeds one; A keeps only j < i.
        decay_mask(b, "M_read", decays.read_cumulative, decays.cumulative)
    };
    (
        b.multiply("A_masked", raw_a, read_mask),
        b.multiply("P_masked", raw_p, mask),
    )
}

/// Exponentials of every pair of rows and channel, summed over channels on the vector unit.
fn broadcast(b: &mut Builder, ops: GramOperands, decays: Decays) -> (Value, Value) {
    let dims = b.dims(ops.query);
    let (c, dk) = (dims[4], dims[5]);
    let g = expand(b, "G", decays.cumulative, dk);
    let pair = |b: &mut Builder, name: &str, value: Value, row: bool| {
        let mut d = b.dims(value);
        let at = if row { 5 } else { 4 };
        d.insert(at, 1);
        let value = b.cast(&format!("{name}_f32"), value, Dtype::F32);
        b.reshape(&format!("{name}_pairs"), value, d)
    };
    let columns = pair(b, "G_columns", g, false);
    let x = pair(b, "X", ops.write, false);
    let weights = |b: &mut Builder, name: &str, rows: Value| {
        let rows = pair(b, &format!("{name}_rows"), rows, true);
        let difference = b.subtract(&format!("{name}_difference"), rows, columns);
        let causal = b.select(
            &format!("{name}_causal"),
            Mask::LowerPairs,
            difference,
            f64::NEG_INFINITY,
        );
        let decay = b.exp(&format!("{name}_decay"), causal);
        b.multiply(&format!("{name}_weights"), x, decay)
    };
    let p_weights = weights(b, "P", g);
    let a_weights = if decays.read_cumulative == decays.cumulative {
        p_weights
    } else {
        let gr = expand(b, "Gr", decays.read_cumulative, dk);
        weights(b, "A", gr)
    };
    let sum = |b: &mut Builder, name: &str, rows: Value, weights: Value| {
        let rows = pair(b, &format!("{name}_operand"), rows, true);
        let terms = b.multiply(&format!("{name}_terms"), rows, weights);
        let summed = b.sum_minor(&format!("{name}_sum"), terms);
        let mut d = b.dims(summed);
        d.pop();
        debug_assert_eq!(d[4], c);
        b.reshape(&format!("{name}_full"), summed, d)
    };
    (
        sum(b, "A", ops.read, a_weights),
        sum(b, "P", ops.query, p_weights),
    )
}

/// 16-row blocks against all rows of the chunk: block `i` uses pivot `mu_i`, a row of the block.
fn pivots(
    b: &mut Builder,
    pivot: PivotRow,
    dtype: Dtype,
    ops: GramOperands,
    decays: Decays,
) -> (Value, Value) {
    let dims = b.dims(ops.query);
    let (c, dk) = (dims[4], dims[5]);
    let block = PIVOT_BLOCK.min(c);
    let blocks = c / block;
    let g = expand(b, "G", decays.cumulative, dk);
    let gr = if decays.read_cumulative == decays.cumulative {
        g
    } else {
        expand(b, "Gr", decays.read_cumulative, dk)
    };
    let split = |b: &mut Builder, name: &str, value: Value| {
        let mut d = b.dims(value);
        d.splice(4..5, [blocks, block]);
        b.reshape(&format!("{name}_blocks"), value, d)
    };
    let all_rows = |b: &mut Builder, name: &str, value: Value| {
        let mut d = b.dims(value);
        d.insert(4, 1);
        b.reshape(&format!("{name}_all"), value, d)
    };
    let g_blocks = split(b, "G", g);
    let at = match pivot {
        PivotRow::Middle => block / 2,
        PivotRow::First => 0,
    };
    let mu = b.slice("mu", g_blocks, 5, at, 1);
    let rows = b.subtract("G - mu", g_blocks, mu);
    let row_factor = b.exp("e^(G - mu)", rows);
    let read_factor = if gr == g {
        row_factor
    } else {
        let gr_blocks = split(b, "Gr", gr);
        let rows = b.subtract("Gr - mu", gr_blocks, mu);
        b.exp("e^(Gr - mu)", rows)
    };
    let g_all = all_rows(b, "G", g);
    let columns = b.subtract("mu - G", mu, g_all);
    // Rows after the block are masked before the exponential: their exponent is positive without limit.
    let columns = b.select("mu - G_kept", Mask::RowsUpToBlock { block }, columns, 0.0);
    let column_factor = b.exp("e^(mu - G)", columns);
    let x = b.cast("X_f32", ops.write, Dtype::F32);
    let x = all_rows(b, "X", x);
    let x = b.multiply("X_scaled", x, column_factor);
    let x = b.select("X_kept", Mask::RowsUpToBlock { block }, x, 0.0);
    let x = b.cast("X_operand", x, dtype);
    let scaled = |b: &mut Builder, name: &str, value: Value, factor: Value| {
        let value = b.cast(&format!("{name}_f32"), value, Dtype::F32);
        let value = split(b, name, value);
        let value = b.multiply(&format!("{name}_scaled"), value, factor);
        b.cast(&format!("{name}_operand"), value, dtype)
    };
    let q = scaled(b, "Q", ops.query, row_factor);
    let r = scaled(b, "R", ops.read, read_factor);
    let stacked = b.concatenate("QR", &[q, r], 5);
    let products = b.matmul_bt("QR X^T", stacked, x, Precision::Default);
    let join = |b: &mut Builder, name: &str, start: usize| {
        let part = b.slice(&format!("{name}_blocks"), products, 5, start, block);
        let mut d = b.dims(part);
        d.splice(4..6, [c]);
        b.reshape(&format!("{name}_full"), part, d)
    };
    (join(b, "A", block), join(b, "P", 0))
}

/// Pivots only below the diagonal blocks (pivot: first row of the block, so no exponent is positive); diagonal blocks
/// element by element, row after row, with the `j <= i` pairs only.
fn causal_pivots(b: &mut Builder, dtype: Dtype, ops: GramOperands, decays: Decays) -> (Value, Value) {
    let dims = b.dims(ops.query);
    let (c, dk) = (dims[4], dims[5]);
    let block = PIVOT_BLOCK.min(c);
    let blocks = c / block;
    let g = expand(b, "G", decays.cumulative, dk);
    let gr = if decays.read_cumulative == decays.cumulative {
        g
    } else {
        expand(b, "Gr", decays.read_cumulative, dk)
    };
    let q = b.cast("Q_f32", ops.query, Dtype::F32);
    let r = b.cast("R_f32", ops.read, Dtype::F32);
    let x = b.cast("X_f32", ops.write, Dtype::F32);

    // Diagonal blocks, all of them at once: [.., blocks, 16, dk].
    let split = |b: &mut Builder, name: &str, value: Value| {
        let mut d = b.dims(value);
        d.splice(4..5, [blocks, block]);
        b.reshape(&format!("{name}_blocks"), value, d)
    };
    let (gb, grb) = (split(b, "G", g), split(b, "Gr", gr));
    let (qb, rb, xb) = (split(b, "Q", q), split(b, "R", r), split(b, "X", x));
    let (mut a_rows, mut p_rows) = (Vec::new(), Vec::new());
    for row in 0..block {
        let before = b.slice("G_before", gb, 5, 0, row + 1);
        let x_before = b.slice("X_before", xb, 5, 0, row + 1);
        let weights_of = |b: &mut Builder, name: &str, rows: Value| {
            let g_row = b.slice(&format!("{name}_G_row"), rows, 5, row, 1);
            let difference = b.subtract(&format!("{name}_difference"), g_row, before);
            let decay = b.exp(&format!("{name}_decay"), difference);
            b.multiply(&format!("{name}_weights"), x_before, decay)
        };
        let p_weights = weights_of(b, "P", gb);
        let a_weights = if gr == g {
            p_weights
        } else {
            weights_of(b, "A", grb)
        };
        let finish = |b: &mut Builder, name: &str, operand: Value, weights: Value| {
            let operand = b.slice(&format!("{name}_row"), operand, 5, row, 1);
            let products = b.multiply(&format!("{name}_terms"), weights, operand);
            let summed = b.sum_minor(&format!("{name}_sum"), products);
            let summed = b.transpose_minor(&format!("{name}_as_row"), summed);
            b.pad(&format!("{name}_row_padded"), summed, 6, block)
        };
        p_rows.push(finish(b, "P", qb, p_weights));
        a_rows.push(finish(b, "A", rb, a_weights));
    }
    let a_diagonal = b.concatenate("A_diagonal", &a_rows, 5);
    let p_diagonal = b.concatenate("P_diagonal", &p_rows, 5);

    let (mut a_full, mut p_full) = (Vec::new(), Vec::new());
    for i in 0..blocks {
        let start = i * block;
        let diagonal_block = |b: &mut Builder, name: &str, diagonal: Value| {
            let part = b.slice(&format!("{name}_{i}{i}"), diagonal, 4, i, 1);
            let mut d = b.dims(part);
            d.remove(4);
            b.reshape(&format!("{name}_{i}{i}_flat"), part, d)
        };
        let (mut a_block, mut p_block) = (
            diagonal_block(b, "A", a_diagonal),
            diagonal_block(b, "P", p_diagonal),
        );
        if i > 0 {
            let mu = b.slice("mu", g, 4, start, 1);
            let g_rows = b.slice("G_rows", g, 4, start, block);
            let rows = b.subtract("G - mu", g_rows, mu);
            let factor = b.exp("e^(G - mu)", rows);
            let read_factor = if gr == g {
                factor
            } else {
                let gr_rows = b.slice("Gr_rows", gr, 4, start, block);
                let rows = b.subtract("Gr - mu", gr_rows, mu);
                b.exp("e^(Gr - mu)", rows)
            };
            let g_before = b.slice("G_columns", g, 4, 0, start);
            let columns = b.subtract("mu - G", mu, g_before);
            let column_factor = b.exp("e^(mu - G)", columns);
            let x_before = b.slice("X_columns", x, 4, 0, start);
            let x_scaled = b.multiply("X_scaled", x_before, column_factor);
            let x_operand = b.cast("X_operand", x_scaled, dtype);
            let scaled = |b: &mut Builder, name: &str, value: Value, factor: Value| {
                let rows = b.slice(&format!("{name}_rows"), value, 4, start, block);
                let rows = b.multiply(&format!("{name}_scaled"), rows, factor);
                b.cast(&format!("{name}_operand"), rows, dtype)
            };
            let stacked_parts = [scaled(b, "Q", q, factor), scaled(b, "R", r, read_factor)];
            let stacked = b.concatenate("QR", &stacked_parts, 4);
            let products = b.matmul_bt("QR X^T", stacked, x_operand, Precision::Default);
            let p_off = b.slice("P_off", products, 4, 0, block);
            let a_off = b.slice("A_off", products, 4, block, block);
            a_block = b.concatenate("A_block", &[a_off, a_block], 5);
            p_block = b.concatenate("P_block", &[p_off, p_block], 5);
        }
        a_full.push(b.pad("A_block_wide", a_block, 5, c));
        p_full.push(b.pad("P_block_wide", p_block, 5, c));
    }
    (
        b.concatenate("A_full", &a_full, 4),
        b.concatenate("P_full", &p_full, 4),
    )
}

/// One stacked product: decays relative to one pivot per chunk are folded into the operands.
fn folded(
    b: &mut Builder,
    pivot: PivotRow,
    dtype: Dtype,
    ops: GramOperands,
    decays: Decays,
) -> (Value, Value) {
    let dims = b.dims(ops.write);
    let (c, dk) = (dims[4], dims[5]);
    let queries = b.dims(ops.query)[4];
    let at = match pivot {
        PivotRow::Middle => c / 2,
        PivotRow::First => 0,
    };
    let mu = b.slice("mu", decays.cumulative, 4, at, 1);
    let rows = b.subtract("G - mu", decays.query_cumulative, mu);
    let row_factor = b.exp("e^(G - mu)", rows);
    let row_factor = expand(b, "e^(G - mu)", row_factor, dk);
    let read_factor = if decays.read_cumulative == decays.query_cumulative {
        row_factor
    } else {
        let rows = b.subtract("Gr - mu", decays.read_cumulative, mu);
        let factor = b.exp("e^(Gr - mu)", rows);
        expand(b, "e^(Gr - mu)", factor, dk)
    };
    let columns = b.subtract("mu - G", mu, decays.cumulative);
    let column_factor = b.exp("e^(mu - G)", columns);
    let column_factor = expand(b, "e^(mu - G)", column_factor, dk);
    let scaled = |b: &mut Builder, name: &str, value: Value, factor: Value| {
        let value = b.cast(&format!("{name}_f32"), value, Dtype::F32);
        let value = b.multiply(&format!("{name}_scaled"), value, factor);
        b.cast(&format!("{name}_operand"), value, dtype)
    };
    let q = scaled(b, "Q", ops.query, row_factor);
    let r = scaled(b, "R", ops.read, read_factor);
    let x = scaled(b, "X", ops.write, column_factor);
    let stacked = b.concatenate("QR", &[q, r], 4);
    let products = b.matmul_bt("QR X^T", stacked, x, Precision::Default);
    (
        b.slice("A_full", products, 4, queries, c),
        b.slice("P_full", products, 4, 0, queries),
    )
}

/// One product of depth `dk / G` and one mask per tile, summed.
fn tile_masks(b: &mut Builder, dtype: Dtype, ops: GramOperands, decays: Decays) -> (Value, Value) {
    let dims = b.dims(ops.query);
    let (c, dk) = (dims[4], dims[5]);
    let tiles = b.shape(decays.cumulative).from_end(0);
    let width = dk / tiles;
    let by_tile = |b: &mut Builder, name: &str, value: Value, width: usize| {
        let mut d = b.dims(value);
        d.splice(5..6, [tiles, width]);
        let value = b.reshape(&format!("{name}_split"), value, d);
        b.transpose(&format!("{name}_tiles"), value, [0, 1, 2, 3, 5, 4, 6])
    };
    let g = by_tile(b, "G", decays.cumulative, 1);
    let q = by_tile(b, "Q", ops.query, width);
    let read = b.cast("R_rounded", ops.read, dtype);
    let r = by_tile(b, "R", read, width);
    let x = by_tile(b, "X", ops.write, width);
    let mask = decay_mask(b, "M", g, g);
    let read_mask = if decays.read_cumulative == decays.cumulative {
        mask
    } else {
        let gr = by_tile(b, "Gr", decays.read_cumulative, 1);
        decay_mask(b, "M_read", gr, g)
    };
    let gram = |b: &mut Builder, name: &str, rows: Value, mask: Value| {
        let raw = b.matmul_bt(&format!("{name}_raw"), rows, x, Precision::Default);
        let masked = b.multiply(&format!("{name}_masked"), raw, mask);
        let summed = b.reduce(
            &format!("{name}_sum"),
            crate::graph::ReduceFunction::Sum,
            masked,
            4,
        );
        let mut d = b.dims(summed);
        d.remove(4);
        debug_assert_eq!(d[4], c);
        b.reshape(&format!("{name}_full"), summed, d)
    };
    (gram(b, "A", r, read_mask), gram(b, "P", q, mask))
}

/// A decay `[.., g]` on all `dk` channels: repeated per tile, or left to broadcast where `g` is 1.
pub(super) fn expand(b: &mut Builder, name: &str, decay: Value, dk: usize) -> Value {
    let g = b.shape(decay).from_end(0);
    if g == 1 || g == dk {
        decay
    } else {
        b.repeat_minor(&format!("{name}_lanes"), decay, dk / g)
    }
}
