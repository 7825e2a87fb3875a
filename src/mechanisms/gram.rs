//! Stage op4: decay-weighted Gram matrices of a chunk
//!
//! ```text
//! sum_c row_ic column_jc exp(Gr_ic - G_jc)   for j <= i (inclusive row decays) or j < i (exclusive ones)
//! ```
//!
//! of every row operand with every column operand. `G` is the inclusive cumulative log decay of the chunk, `Gr` that of the row operand: `G`
//! or the exclusive sum. Gated outer products take one Gram, the delta rule two, diagonal plus low rank four; all of a layer share
//! their exponentials. Exponentials of differences never overflow; factored forms `exp(G_i - mu) exp(mu - G_j)` do when decay
//! accumulates too far on one side of the pivot `mu`.

use super::GramExponent;
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Mask, Precision, ReduceFunction, Value};
use crate::layer::{GramVariant, Layer, PivotRow};

/// Rows of a pivot block.
pub(super) const PIVOT_BLOCK: usize = 16;

/// Operands of the two Gram matrices of the delta rule, in core layout.
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

/// Operands relative to the pivots of their 16-row blocks, f32 `[B, Hk, R, N, C, dk]`, and what a block needs besides to meet the state, f32
/// `[B, Hk, R, N, C / 16, 1, dk]`: no further exponential of a token and channel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pivoted {
    /// Queries.
    pub(super) query: Value,
    /// Read keys without step size.
    pub(super) read: Value,
    /// Write keys.
    pub(super) write: Value,
    /// `e^mu`, from the start of the chunk to the pivot: at most one.
    pub(super) from_start: Value,
    /// `e^(G_C - mu)`, from the pivot to the end of the chunk: at most one.
    pub(super) to_end: Value,
}

/// The operand of [`Pivoted`] times the factor of its block, f32 `[B, Hk, R, N, C, dk]`.
pub(super) fn beyond_pivot(b: &mut Builder, name: &str, operand: Value, factor: Value) -> Value {
    let dims = b.dims(operand);
    let blocks = b.dims(factor)[4];
    let mut by_block = dims.clone();
    by_block.splice(4..5, [blocks, dims[4] / blocks.max(1)]);
    let operand = b.reshape(&format!("{name}_blocks"), operand, by_block);
    let value = b.multiply(name, operand, factor);
    b.reshape(&format!("{name}_rows"), value, dims)
}

/// The Gram matrices of the delta rule, `A = step . tril-1(read, write) [B, Hk, R, N, C, C]` and `P = tril0(query, write) [B, Hk, R, N, Cq, C]`
/// in f32, and the operands relative to their pivots where the variant has them. With fewer queries than keys only the variants for one decay per
/// head are built.
pub(super) fn append(
    b: &mut Builder,
    variant: GramVariant,
    pivot: PivotRow,
    operand_dtype: Dtype,
    ops: GramOperands,
) -> (Value, Value, Option<Pivoted>) {
    let mut pivoted = None;
    let (p, a) = match ops.decays {
        None => {
            let read = b.cast("R_rounded", ops.read, operand_dtype);
            let p = b.matmul_bt("Q X^T", ops.query, ops.write, Precision::Default);
            (p, b.matmul_bt("R X^T", read, ops.write, Precision::Default))
        }
        Some(decays) => {
            let rows = [
                Rows {
                    name: "Q",
                    operand: ops.query,
                    cumulative: decays.query_cumulative,
                },
                Rows {
                    name: "R",
                    operand: ops.read,
                    cumulative: decays.read_cumulative,
                },
            ];
            let columns = [Columns {
                name: "X",
                operand: ops.write,
            }];
            let operands = Operands {
                rows: &rows,
                columns: &columns,
                cumulative: decays.cumulative,
                bound: None,
            };
            let grams = if variant == GramVariant::Halving {
                let halves = halving(b, pivot, operand_dtype, operands);
                let mu = halves.mu;
                let last = b.dims(decays.cumulative)[4] - 1;
                let dk = b.shape(ops.write).from_end(0);
                let last = b.slice("G_C", decays.cumulative, 4, last, 1);
                let mut dims = b.dims(last);
                dims.insert(4, 1);
                let last = b.reshape("G_C_blocks", last, dims);
                let to_end = b.subtract("G_C - mu", last, mu);
                let [from_start, to_end] =
                    [("e^mu", mu), ("e^(G_C - mu)", to_end)].map(|(name, exponent)| {
                        let factor = b.exp(name, exponent);
                        expand(b, name, factor, dk)
                    });
                pivoted = Some(Pivoted {
                    query: halves.rows[0],
                    read: halves.rows[1],
                    write: halves.columns[0],
                    from_start,
                    to_end,
                });
                halves.grams
            } else {
                all(b, variant, pivot, operand_dtype, operands)
            };
            (grams[0], grams[1])
        }
    };
    let a = b.select("A_lower", Mask::StrictlyLower, a, 0.0);
    let p = causal(b, "P_lower", p, 0.0);
    let a = match ops.step {
        Some(step) => b.multiply("A", a, step),
        None => a,
    };
    (a, p, pivoted)
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

/// A row operand `[B, Hk, 1, N, C, dk]` and its cumulative log decay `[B, Hk, R, N, C, g]`, f32.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    /// In the notation of the mechanism.
    pub(super) name: &'static str,
    /// Values.
    pub(super) operand: Value,
    /// Inclusive or exclusive sum.
    pub(super) cumulative: Value,
}

/// A column operand `[B, Hk, 1, N, C, dk]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Columns {
    /// In the notation of the mechanism.
    pub(super) name: &'static str,
    /// Values.
    pub(super) operand: Value,
}

/// Operands of the Gram matrices of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands<'a> {
    /// Row operands.
    pub(super) rows: &'a [Rows],
    /// Column operands.
    pub(super) columns: &'a [Columns],
    /// Inclusive cumulative log decay `[B, Hk, R, N, C, g]`, f32: that of the columns.
    pub(super) cumulative: Value,
    /// Largest exponent of every pair of a row and a column `[C, C]`, f32, where a row sees others than the columns up to its own: 0 for those, far below zero elsewhere.
    pub(super) bound: Option<Value>,
}

/// The Gram of every row operand with every column operand, rows outermost, each `[B, Hk, R, N, C, C]` in f32.
///
/// What lies above the diagonal (on it too, for exclusive sums) may be anything, infinities included: the caller selects.
pub(super) fn all(
    b: &mut Builder,
    variant: GramVariant,
    pivot: PivotRow,
    operand_dtype: Dtype,
    ops: Operands,
) -> Vec<Value> {
    match variant {
        GramVariant::ScalarMask => scalar_mask(b, operand_dtype, ops),
        GramVariant::Broadcast => broadcast(b, ops),
        GramVariant::Pivot => pivots(b, pivot, operand_dtype, ops),
        GramVariant::PivotCausal => causal_pivots(b, operand_dtype, ops),
        GramVariant::Folded => folded(b, pivot, operand_dtype, ops),
        GramVariant::TileMasks => tile_masks(b, operand_dtype, ops),
        GramVariant::Halving => halving(b, pivot, operand_dtype, ops).grams,
    }
}

/// Rows over which decay accumulates on one side of the pivot, for the variants that factor the exponential.
pub(super) fn exponent(layer: &Layer, largest_decay: f64) -> Option<GramExponent> {
    let block = match layer.gram {
        // Of the micro-steps of a token only the first decays.
        GramVariant::Folded => layer.chunk / layer.householder_steps,
        GramVariant::Pivot | GramVariant::Halving => PIVOT_BLOCK.min(layer.chunk),
        GramVariant::ScalarMask
        | GramVariant::Broadcast
        | GramVariant::PivotCausal
        | GramVariant::TileMasks => return None,
    };
    let rows = match layer.pivot {
        PivotRow::Middle => block / 2,
        PivotRow::First => block - 1,
    };
    Some(GramExponent { rows, largest_decay })
}

/// What `make` appends for every row operand, once where several have the same cumulative decay.
fn per_decay<T: Clone>(
    b: &mut Builder,
    rows: &[Rows],
    mut make: impl FnMut(&mut Builder, &Rows) -> T,
) -> Vec<T> {
    let mut made: Vec<(Value, T)> = Vec::new();
    rows.iter()
        .map(|row| {
            if let Some((_, known)) = made.iter().find(|(cumulative, _)| *cumulative == row.cumulative) {
                return known.clone();
            }
            let new = make(b, row);
            made.push((row.cumulative, new.clone()));
            new
        })
        .collect()
}

/// Names of all row operands, for stacked products.
fn row_names(ops: Operands) -> String {
    ops.rows.iter().map(|row| row.name).collect()
}

/// Names of all column operands.
fn column_names(ops: Operands) -> String {
    ops.columns.iter().map(|column| column.name).collect()
}

/// `exp(rows_i - columns_j)` where row `i` may see column `j`, 0 elsewhere, from `[.., C, 1]` columns.
pub(super) fn decay_mask(b: &mut Builder, name: &str, rows: Value, columns: Value) -> Value {
    bounded_decay_mask(b, name, rows, columns, None)
}

/// [`decay_mask`] where `bound [C, C]`, if given, says which columns a row may see.
fn bounded_decay_mask(
    b: &mut Builder,
    name: &str,
    rows: Value,
    columns: Value,
    bound: Option<Value>,
) -> Value {
    let columns = b.transpose_minor(&format!("{name}_columns"), columns);
    let difference = b.subtract(&format!("{name}_difference"), rows, columns);
    let kept = match bound {
        Some(bound) => b.zip(&format!("{name}_bounded"), Function::Minimum, difference, bound),
        None => causal(b, &format!("{name}_causal"), difference, f64::NEG_INFINITY),
    };
    b.exp(name, kept)
}

/// One product per Gram and one `C x C` mask; the raw products are shared by the value heads of a key head.
fn scalar_mask(b: &mut Builder, dtype: Dtype, ops: Operands) -> Vec<Value> {
    // Row 0 of an exclusive sum is zero, its diagonal exceeds one; such Grams keep only j < i.
    let masks = per_decay(b, ops.rows, |b, row| {
        let name = format!("M_{}", row.name);
        bounded_decay_mask(b, &name, row.cumulative, ops.cumulative, ops.bound)
    });
    let mut grams = Vec::new();
    for (row, mask) in ops.rows.iter().zip(masks) {
        let rows = b.cast(&format!("{}_rounded", row.name), row.operand, dtype);
        for column in ops.columns {
            let name = format!("{} {}^T", row.name, column.name);
            let raw = b.matmul_bt(&name, rows, column.operand, Precision::Default);
            grams.push(b.multiply(&format!("{name}_masked"), raw, mask));
        }
    }
    grams
}

/// Exponentials of every pair of rows and channel, summed over channels on the vector unit.
fn broadcast(b: &mut Builder, ops: Operands) -> Vec<Value> {
    let dk = b.shape(ops.columns[0].operand).from_end(0);
    let g = expand(b, "G", ops.cumulative, dk);
    let pair = |b: &mut Builder, name: &str, value: Value, row: bool| {
        let mut d = b.dims(value);
        let at = if row { 5 } else { 4 };
        d.insert(at, 1);
        let value = b.cast(&format!("{name}_f32"), value, Dtype::F32);
        b.reshape(&format!("{name}_pairs"), value, d)
    };
    let g_columns = pair(b, "G_columns", g, false);
    let columns: Vec<Value> = ops
        .columns
        .iter()
        .map(|column| pair(b, column.name, column.operand, false))
        .collect();
    let bound = ops.bound.map(|bound| {
        let mut dims = b.dims(bound);
        dims.push(1);
        b.reshape("bound_pairs", bound, dims)
    });
    let weights = per_decay(b, ops.rows, |b, row| {
        let name = row.name;
        let rows = if row.cumulative == ops.cumulative {
            g
        } else {
            expand(b, &format!("G_{name}"), row.cumulative, dk)
        };
        let rows = pair(b, &format!("G_{name}_rows"), rows, true);
        let difference = b.subtract(&format!("{name}_difference"), rows, g_columns);
        let kept = match bound {
            Some(bound) => b.zip(&format!("{name}_bounded"), Function::Minimum, difference, bound),
            None => b.select(
                &format!("{name}_causal"),
                Mask::LowerPairs,
                difference,
                f64::NEG_INFINITY,
            ),
        };
        let decay = b.exp(&format!("{name}_decay"), kept);
        let weigh = |x: &Value| b.multiply(&format!("{name}_weights"), *x, decay);
        columns.iter().map(weigh).collect::<Vec<Value>>()
    });
    let mut grams = Vec::new();
    for (row, weights) in ops.rows.iter().zip(weights) {
        let name = row.name;
        let rows = pair(b, &format!("{name}_operand"), row.operand, true);
        for weights in weights {
            let terms = b.multiply(&format!("{name}_terms"), rows, weights);
            let summed = b.sum_minor(&format!("{name}_sum"), terms);
            let mut d = b.dims(summed);
            d.pop();
            grams.push(b.reshape(&format!("{name}_full"), summed, d));
        }
    }
    grams
}

/// 16-row blocks against all rows of the chunk: block `i` uses pivot `mu_i`, a row of the block.
fn pivots(b: &mut Builder, pivot: PivotRow, dtype: Dtype, ops: Operands) -> Vec<Value> {
    let dims = b.dims(ops.columns[0].operand);
    let (c, dk) = (dims[4], dims[5]);
    let block = PIVOT_BLOCK.min(c);
    let blocks = c / block;
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
    let g = expand(b, "G", ops.cumulative, dk);
    let g_blocks = split(b, "G", g);
    let at = match pivot {
        PivotRow::Middle => block / 2,
        PivotRow::First => 0,
    };
    let mu = b.slice("mu", g_blocks, 5, at, 1);
    let row_factors = per_decay(b, ops.rows, |b, row| {
        let rows = if row.cumulative == ops.cumulative {
            g_blocks
        } else {
            let rows = expand(b, &format!("G_{}", row.name), row.cumulative, dk);
            split(b, &format!("G_{}", row.name), rows)
        };
        let rows = b.subtract(&format!("G_{} - mu", row.name), rows, mu);
        b.exp(&format!("e^(G_{} - mu)", row.name), rows)
    });
    let g_all = all_rows(b, "G", g);
    let columns = b.subtract("mu - G", mu, g_all);
    // Rows after the block are masked before the exponential: their exponent is positive without limit.
    let columns = b.select("mu - G_kept", Mask::RowsUpToBlock { block }, columns, 0.0);
    let column_factor = b.exp("e^(mu - G)", columns);
    let columns: Vec<Value> = ops
        .columns
        .iter()
        .map(|Columns { name, operand }| {
            let x = b.cast(&format!("{name}_f32"), *operand, Dtype::F32);
            let x = all_rows(b, name, x);
            let x = b.multiply(&format!("{name}_scaled"), x, column_factor);
            let x = b.select(&format!("{name}_kept"), Mask::RowsUpToBlock { block }, x, 0.0);
            b.cast(&format!("{name}_operand"), x, dtype)
        })
        .collect();
    let rows: Vec<Value> = ops
        .rows
        .iter()
        .zip(row_factors)
        .map(|(Rows { name, operand, .. }, factor)| {
            let value = b.cast(&format!("{name}_f32"), *operand, Dtype::F32);
            let value = split(b, name, value);
            let value = b.multiply(&format!("{name}_scaled"), value, factor);
            b.cast(&format!("{name}_operand"), value, dtype)
        })
        .collect();
    let (row_names, column_names) = (row_names(ops), column_names(ops));
    let stacked_rows = b.concatenate(&row_names, &rows, 5);
    let stacked_columns = b.concatenate(&column_names, &columns, 5);
    let name = format!("{row_names} {column_names}^T");
    let products = b.matmul_bt(&name, stacked_rows, stacked_columns, Precision::Default);
    let mut grams = Vec::new();
    for (i, row) in ops.rows.iter().enumerate() {
        let rows = b.slice(&format!("{}_rows", row.name), products, 5, i * block, block);
        for (j, column) in ops.columns.iter().enumerate() {
            let name = format!("{} {}^T", row.name, column.name);
            let part = b.slice(&format!("{name}_blocks"), rows, 6, j * c, c);
            let mut d = b.dims(part);
            d.splice(4..6, [c]);
            grams.push(b.reshape(&name, part, d));
        }
    }
    grams
}

/// What [`halving`] appends.
struct Halves {
    /// The Gram of every row operand with every column operand, rows outermost.
    grams: Vec<Value>,
    /// Row operands relative to the pivots of their blocks, f32 `[B, Hk, R, N, C, dk]`.
    rows: Vec<Value>,
    /// Column operands, likewise.
    columns: Vec<Value>,
    /// Pivots `[B, Hk, R, N, C / 16, 1, g]`, f32.
    mu: Value,
}

/// Rows relative to the pivot of their own 16-row block, for the diagonal blocks; for neighbours of `s = 16, 32, ..` rows both operands go on from
/// their pivots to the border, the last row of the earlier neighbour, by one factor a block, which is at most one:
/// `e^(G_i - G_j) = e^(Gr_i - mu_i) e^(mu_i - G_border) . e^(G_border - mu_j) e^(mu_j - G_j)`.
///
/// A product has all later rows and all earlier columns of a size; what belongs to no pair of neighbours is dropped. Columns that are in no earlier
/// neighbour are zeros, so that the others keep their place.
fn halving(b: &mut Builder, pivot: PivotRow, dtype: Dtype, ops: Operands) -> Halves {
    let dims = b.dims(ops.columns[0].operand);
    let (c, dk) = (dims[4], dims[5]);
    let block = PIVOT_BLOCK.min(c);
    let blocks = c / block;
    // The rows of a value `[.., rows, channels]` under other extents.
    let split = |b: &mut Builder, name: &str, value: Value, extents: &[usize]| {
        let mut d = b.dims(value);
        d.splice(4..5, extents.iter().copied());
        b.reshape(&format!("{name}_split"), value, d)
    };
    let flat = |b: &mut Builder, name: &str, value: Value, axes: usize| {
        let mut d = b.dims(value);
        let rows = d[4..4 + axes].iter().product();
        d.splice(4..4 + axes, [rows]);
        b.reshape(name, value, d)
    };
    let at = match pivot {
        PivotRow::Middle => block / 2,
        PivotRow::First => 0,
    };
    let g_blocks = split(b, "G", ops.cumulative, &[blocks, block]);
    let mu = b.slice("mu", g_blocks, 5, at, 1);
    let to_pivot = |b: &mut Builder, names: [&str; 3], operand: Value, factor: Value| {
        let [name, scaled, exponential] = names;
        let factor = expand(b, exponential, factor, dk);
        let value = b.cast(&format!("{name}_f32"), operand, Dtype::F32);
        let value = split(b, name, value, &[blocks, block]);
        let value = b.multiply(scaled, value, factor);
        flat(b, &format!("{scaled}_rows"), value, 2)
    };
    let row_factors = per_decay(b, ops.rows, |b, row| {
        let name = format!("e^(G_{} - mu)", row.name);
        let rows = split(b, &format!("G_{}", row.name), row.cumulative, &[blocks, block]);
        let rows = b.subtract(&format!("G_{} - mu", row.name), rows, mu);
        b.exp(&name, rows)
    });
    let columns = b.subtract("mu - G", mu, g_blocks);
    let column_factor = b.exp("e^(mu - G)", columns);
    let rows: Vec<Value> = ops
        .rows
        .iter()
        .zip(row_factors)
        .map(|(row, factor)| {
            let names = [row.name, &format!("{}_scaled", row.name), "e^(Gr - mu)"];
            to_pivot(b, names, row.operand, factor)
        })
        .collect();
    let columns: Vec<Value> = ops
        .columns
        .iter()
        .map(|column| {
            let names = [column.name, &format!("{}_scaled", column.name), "e^(mu - G)"];
            to_pivot(b, names, column.operand, column_factor)
        })
        .collect();
    let (row_names, column_names) = (row_names(ops), column_names(ops));
    let product = |b: &mut Builder, name: &str, rows: &[Value], columns: &[Value]| {
        let [rows, columns] = [(&row_names, rows), (&column_names, columns)].map(|(names, values)| {
            let operands: Vec<Value> = values
                .iter()
                .map(|&value| b.cast(&format!("{names}_operand"), value, dtype))
                .collect();
            b.concatenate(names, &operands, 4)
        });
        b.matmul_bt(name, rows, columns, Precision::Default)
    };
    let name = format!("{row_names} {column_names}^T");
    let near = product(b, &name, &rows, &columns);
    let mut grams = Vec::new();
    for (i, row) in ops.rows.iter().enumerate() {
        let of_row = b.slice(&format!("{}_rows", row.name), near, 4, i * c, c);
        for (j, column) in ops.columns.iter().enumerate() {
            grams.push(b.slice(&format!("{} {}^T", row.name, column.name), of_row, 5, j * c, c));
        }
    }
    let mut size = block;
    while size < c {
        let pairs = c / (2 * size);
        let neighbours = [pairs, 2, size / block];
        let pivots = split(b, "mu", mu, &neighbours);
        // mu of the blocks still has the row it was taken from as an extent of one, behind those of the blocks.
        let half =
            |b: &mut Builder, name: &str, value: Value, which: usize| b.slice(name, value, 5, which, 1);
        let by_pair = split(b, "G", ops.cumulative, &[pairs, 1, 1, 2 * size]);
        let border = b.slice(&format!("G_border_{size}"), by_pair, 7, size - 1, 1);
        let later = half(b, "mu_later", pivots, 1);
        let later = b.subtract("mu - G_border", later, border);
        let later = b.exp("e^(mu - G_border)", later);
        let later = expand(b, "e^(mu - G_border)", later, dk);
        let earlier = half(b, "mu_earlier", pivots, 0);
        let earlier = b.subtract("G_border - mu", border, earlier);
        let earlier = b.exp("e^(G_border - mu)", earlier);
        let earlier = expand(b, "e^(G_border - mu)", earlier, dk);
        let decayed = |b: &mut Builder, name: &str, value: Value, which: usize, factor: Value| {
            let value = split(b, name, value, &[pairs, 2, size / block, block]);
            let value = half(b, &format!("{name}_half"), value, which);
            b.multiply(&format!("{name}_to_border"), value, factor)
        };
        let later_rows: Vec<Value> = rows
            .iter()
            .zip(ops.rows)
            .map(|(&value, row)| {
                let value = decayed(b, row.name, value, 1, later);
                flat(b, &format!("{}_later", row.name), value, 4)
            })
            .collect();
        let earlier_columns: Vec<Value> = columns
            .iter()
            .zip(ops.columns)
            .map(|(&value, column)| {
                let value = decayed(b, column.name, value, 0, earlier);
                let value = b.pad(&format!("{}_and_zeros", column.name), value, 5, 2);
                flat(b, &format!("{}_earlier", column.name), value, 4)
            })
            .collect();
        let name = format!("{row_names} {column_names}^T_{size}");
        let far = product(b, &name, &later_rows, &earlier_columns);
        for (k, gram) in grams.iter_mut().enumerate() {
            let (i, j) = (k / ops.columns.len(), k % ops.columns.len());
            let part = b.slice("P_far_rows", far, 4, i * c / 2, c / 2);
            let part = b.slice("P_far", part, 5, j * c, c);
            let part = split(b, "P_far", part, &[pairs, size]);
            let whole = split(b, "P", *gram, &[pairs, 2, size]);
            let kept = b.slice("P_kept", whole, 5, 0, 1);
            let below = half(b, "P_below", whole, 1);
            let mut d = b.dims(below);
            d.remove(5);
            let below = b.reshape("P_below_rows", below, d.clone());
            let kept = b.reshape("P_kept_rows", kept, d);
            let below = b.choose(
                &format!("P_below_{size}"),
                Mask::EarlierHalf { half: size },
                part,
                below,
            );
            let whole = b.concatenate("P_halves", &[kept, below], 5);
            *gram = flat(b, &format!("P_{}", 2 * size), whole, 2);
        }
        size *= 2;
    }
    Halves {
        grams,
        rows,
        columns,
        mu,
    }
}

/// Pivots only below the diagonal blocks (pivot: first row of the block, so no exponent is positive); diagonal blocks
/// element by element, row after row, with the `j <= i` pairs only.
fn causal_pivots(b: &mut Builder, dtype: Dtype, ops: Operands) -> Vec<Value> {
    let dims = b.dims(ops.columns[0].operand);
    let (c, dk) = (dims[4], dims[5]);
    let block = PIVOT_BLOCK.min(c);
    let blocks = c / block;
    let g = expand(b, "G", ops.cumulative, dk);
    // Cumulative decays of the row operands on all channels.
    let row_decays = per_decay(b, ops.rows, |b, row| {
        if row.cumulative == ops.cumulative {
            g
        } else {
            expand(b, &format!("G_{}", row.name), row.cumulative, dk)
        }
    });
    let expanded: Vec<Rows> = ops
        .rows
        .iter()
        .zip(row_decays)
        .map(|(row, cumulative)| Rows {
            operand: b.cast(&format!("{}_f32", row.name), row.operand, Dtype::F32),
            cumulative,
            ..*row
        })
        .collect();
    let columns: Vec<Columns> = ops
        .columns
        .iter()
        .map(|column| Columns {
            operand: b.cast(&format!("{}_f32", column.name), column.operand, Dtype::F32),
            ..*column
        })
        .collect();

    let diagonal = diagonal_blocks(b, &expanded, &columns, g, (blocks, block));
    let (row_names, column_names) = (row_names(ops), column_names(ops));
    let mut full: Vec<Vec<Value>> = vec![Vec::new(); diagonal.len()];
    for i in 0..blocks {
        let start = i * block;
        let mut parts: Vec<Value> = diagonal
            .iter()
            .map(|&diagonal| {
                let part = b.slice(&format!("P_{i}{i}"), diagonal, 4, i, 1);
                let mut d = b.dims(part);
                d.remove(4);
                b.reshape(&format!("P_{i}{i}_flat"), part, d)
            })
            .collect();
        if i > 0 {
            let mu = b.slice("mu", g, 4, start, 1);
            let factors = per_decay(b, &expanded, |b, row| {
                let rows = b.slice(&format!("G_{}_rows", row.name), row.cumulative, 4, start, block);
                let rows = b.subtract(&format!("G_{} - mu", row.name), rows, mu);
                b.exp(&format!("e^(G_{} - mu)", row.name), rows)
            });
            let before = b.slice("G_columns", g, 4, 0, start);
            let before = b.subtract("mu - G", mu, before);
            let column_factor = b.exp("e^(mu - G)", before);
            let column_operands: Vec<Value> = columns
                .iter()
                .map(|Columns { name, operand }| {
                    let before = b.slice(&format!("{name}_columns"), *operand, 4, 0, start);
                    let scaled = b.multiply(&format!("{name}_scaled"), before, column_factor);
                    b.cast(&format!("{name}_operand"), scaled, dtype)
                })
                .collect();
            let row_operands: Vec<Value> = expanded
                .iter()
                .zip(factors)
                .map(|(Rows { name, operand, .. }, factor)| {
                    let rows = b.slice(&format!("{name}_rows"), *operand, 4, start, block);
                    let rows = b.multiply(&format!("{name}_scaled"), rows, factor);
                    b.cast(&format!("{name}_operand"), rows, dtype)
                })
                .collect();
            let stacked_rows = b.concatenate(&row_names, &row_operands, 4);
            let stacked_columns = b.concatenate(&column_names, &column_operands, 4);
            let name = format!("{row_names} {column_names}^T");
            let products = b.matmul_bt(&name, stacked_rows, stacked_columns, Precision::Default);
            for (k, part) in parts.iter_mut().enumerate() {
                let (r, x) = (k / columns.len(), k % columns.len());
                let off = b.slice("P_off_rows", products, 4, r * block, block);
                let off = b.slice("P_off", off, 5, x * start, start);
                *part = b.concatenate("P_block", &[off, *part], 5);
            }
        }
        for (full, part) in full.iter_mut().zip(parts) {
            full.push(b.pad("P_block_wide", part, 5, c));
        }
    }
    full.iter()
        .map(|blocks| b.concatenate("P_full", blocks, 4))
        .collect()
}

/// Diagonal blocks of every Gram, all of a chunk at once: `[.., blocks, block, block]`. `rows`, `columns` and `g` are f32 on all channels.
fn diagonal_blocks(
    b: &mut Builder,
    rows: &[Rows],
    columns: &[Columns],
    g: Value,
    (blocks, block): (usize, usize),
) -> Vec<Value> {
    let split = |b: &mut Builder, name: &str, value: Value| {
        let mut d = b.dims(value);
        d.splice(4..5, [blocks, block]);
        b.reshape(&format!("{name}_blocks"), value, d)
    };
    let g_blocks = split(b, "G", g);
    let rows: Vec<Rows> = rows
        .iter()
        .map(|row| Rows {
            operand: split(b, row.name, row.operand),
            cumulative: if row.cumulative == g {
                g_blocks
            } else {
                split(b, &format!("G_{}", row.name), row.cumulative)
            },
            ..*row
        })
        .collect();
    let columns: Vec<Value> = columns
        .iter()
        .map(|column| split(b, column.name, column.operand))
        .collect();
    let mut grams: Vec<Vec<Value>> = vec![Vec::new(); rows.len() * columns.len()];
    for at in 0..block {
        let g_before = b.slice("G_before", g_blocks, 5, 0, at + 1);
        let before: Vec<Value> = columns
            .iter()
            .map(|&x| b.slice("X_before", x, 5, 0, at + 1))
            .collect();
        let weights = per_decay(b, &rows, |b, row| {
            let name = row.name;
            let g_row = b.slice(&format!("{name}_G_row"), row.cumulative, 5, at, 1);
            let difference = b.subtract(&format!("{name}_difference"), g_row, g_before);
            let decay = b.exp(&format!("{name}_decay"), difference);
            let weigh = |x: &Value| b.multiply(&format!("{name}_weights"), *x, decay);
            before.iter().map(weigh).collect::<Vec<Value>>()
        });
        for (i, (row, weights)) in rows.iter().zip(weights).enumerate() {
            let name = row.name;
            let operand = b.slice(&format!("{name}_row"), row.operand, 5, at, 1);
            for (j, weights) in weights.into_iter().enumerate() {
                let terms = b.multiply(&format!("{name}_terms"), weights, operand);
                let summed = b.sum_minor(&format!("{name}_sum"), terms);
                let summed = b.transpose_minor(&format!("{name}_as_row"), summed);
                let padded = b.pad(&format!("{name}_row_padded"), summed, 6, block);
                grams[i * columns.len() + j].push(padded);
            }
        }
    }
    grams
        .iter()
        .map(|rows| b.concatenate("P_diagonal", rows, 5))
        .collect()
}

/// One stacked product: decays relative to one pivot per chunk are folded into the operands.
fn folded(b: &mut Builder, pivot: PivotRow, dtype: Dtype, ops: Operands) -> Vec<Value> {
    let dims = b.dims(ops.columns[0].operand);
    let (c, dk) = (dims[4], dims[5]);
    let at = match pivot {
        PivotRow::Middle => c / 2,
        PivotRow::First => 0,
    };
    let mu = b.slice("mu", ops.cumulative, 4, at, 1);
    let row_factors = per_decay(b, ops.rows, |b, row| {
        let name = format!("e^(G_{} - mu)", row.name);
        let rows = b.subtract(&format!("G_{} - mu", row.name), row.cumulative, mu);
        let factor = b.exp(&name, rows);
        expand(b, &name, factor, dk)
    });
    let columns = b.subtract("mu - G", mu, ops.cumulative);
    let column_factor = b.exp("e^(mu - G)", columns);
    let column_factor = expand(b, "e^(mu - G)", column_factor, dk);
    let scaled = |b: &mut Builder, name: &str, value: Value, factor: Value| {
        let value = b.cast(&format!("{name}_f32"), value, Dtype::F32);
        let value = b.multiply(&format!("{name}_scaled"), value, factor);
        b.cast(&format!("{name}_operand"), value, dtype)
    };
    let rows: Vec<Value> = ops
        .rows
        .iter()
        .zip(row_factors)
        .map(|(row, factor)| scaled(b, row.name, row.operand, factor))
        .collect();
    let columns: Vec<Value> = ops
        .columns
        .iter()
        .map(|column| scaled(b, column.name, column.operand, column_factor))
        .collect();
    let (row_names, column_names) = (row_names(ops), column_names(ops));
    let stacked_rows = b.concatenate(&row_names, &rows, 4);
    let stacked_columns = b.concatenate(&column_names, &columns, 4);
    let name = format!("{row_names} {column_names}^T");
    let products = b.matmul_bt(&name, stacked_rows, stacked_columns, Precision::Default);
    let mut grams = Vec::new();
    let mut start = 0;
    for row in ops.rows {
        let count = b.dims(row.operand)[4];
        let rows = b.slice(&format!("{}_rows", row.name), products, 4, start, count);
        start += count;
        for (j, column) in ops.columns.iter().enumerate() {
            grams.push(b.slice(&format!("{} {}^T", row.name, column.name), rows, 5, j * c, c));
        }
    }
    grams
}

/// One product of depth `dk / G` and one mask per tile, summed.
fn tile_masks(b: &mut Builder, dtype: Dtype, ops: Operands) -> Vec<Value> {
    let dk = b.shape(ops.columns[0].operand).from_end(0);
    let tiles = b.shape(ops.cumulative).from_end(0);
    let by_tile = |b: &mut Builder, name: &str, value: Value, width: usize| {
        let mut d = b.dims(value);
        d.splice(5..6, [tiles, width]);
        let value = b.reshape(&format!("{name}_split"), value, d);
        b.transpose(&format!("{name}_tiles"), value, [0, 1, 2, 3, 5, 4, 6])
    };
    let g = by_tile(b, "G", ops.cumulative, 1);
    let masks = per_decay(b, ops.rows, |b, row| {
        let rows = if row.cumulative == ops.cumulative {
            g
        } else {
            by_tile(b, &format!("G_{}", row.name), row.cumulative, 1)
        };
        bounded_decay_mask(b, &format!("M_{}", row.name), rows, g, ops.bound)
    });
    let columns: Vec<Value> = ops
        .columns
        .iter()
        .map(|column| by_tile(b, column.name, column.operand, dk / tiles))
        .collect();
    let mut grams = Vec::new();
    for (row, mask) in ops.rows.iter().zip(masks) {
        let rows = b.cast(&format!("{}_rounded", row.name), row.operand, dtype);
        let rows = by_tile(b, row.name, rows, dk / tiles);
        for (column, &columns) in ops.columns.iter().zip(&columns) {
            let name = format!("{} {}^T", row.name, column.name);
            let raw = b.matmul_bt(&name, rows, columns, Precision::Default);
            let masked = b.multiply(&format!("{name}_masked"), raw, mask);
            let summed = b.reduce(&format!("{name}_sum"), ReduceFunction::Sum, masked, 4);
            let mut d = b.dims(summed);
            d.remove(4);
            grams.push(b.reshape(&format!("{name}_full"), summed, d));
        }
    }
    grams
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

/// `value . factor` as a matrix operand, the factor `[.., g]` spread over the channels.
pub(super) fn weighted(b: &mut Builder, layer: &Layer, name: &str, value: Value, factor: Value) -> Value {
    let factor = expand(b, name, factor, layer.key_dim);
    let value = b.cast(&format!("{name}_f32"), value, Dtype::F32);
    let value = b.multiply(name, value, factor);
    b.cast(&format!("{name}_operand"), value, layer.activations)
}
