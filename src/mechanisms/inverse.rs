//! Stage op5a: `T = (I + L)^-1` of a strictly lower-triangular chunk matrix `L [.., C, C]`.
//!
//! Every variant but the Neumann series is exact in exact arithmetic, because `L^C = 0`. They differ in what they do to
//! rounding: powers of `L` grow binomially for correlated keys and must cancel, block doubling never forms them.
//! Matrix products of size `C`: product, Newton, two-level and block doubling `2 (log2 C - 1)`; Neumann with `K` terms `K - 1`,
//! the first term being `-L` itself. Packed doubling: `2 log2(C / 16)` products of `s x C` by `C x C` with `s = 16, 32, .. C / 2`.

use crate::dtype::Dtype;
use crate::graph::{Builder, Mask, Precision, Value};
use crate::layer::InverseVariant;

/// Rows of a block of the blocked substitution (flash-linear-attention, Tokamax, vLLM tpu-inference), and of those that packed doubling starts from.
pub(crate) const SUBSTITUTION_BLOCK: usize = 16;
/// Rows of an inner block of the two-level product (Tokamax KDA).
const TWO_LEVEL_BLOCK: usize = 8;

/// Appends the inverse of `I + l` for `l [.., C, C]`, strictly lower, f32. Returns `[.., C, C]`.
pub fn append_inverse(
    b: &mut Builder,
    variant: InverseVariant,
    precision: Precision,
    neumann_steps: usize,
    l: Value,
) -> Value {
    let n = b.shape(l).from_end(0);
    let identity = b.identity("I", n, Dtype::F32);
    match variant {
        InverseVariant::RowSubstitution => b.forward_substitution("T", l, identity),
        InverseVariant::Blocked16 => blocked_substitution(b, precision, l, identity, n),
        InverseVariant::Product => product(b, precision, l, identity, n),
        InverseVariant::Newton => newton(b, precision, l, identity, n),
        InverseVariant::TwoLevel => two_level(b, precision, l, identity, n),
        InverseVariant::BlockDoubling => block_doubling(b, precision, l, identity, n),
        InverseVariant::PackedDoubling => packed_doubling(b, precision, l, n),
        InverseVariant::Neumann => {
            let mut t = b.subtract("T_1", identity, l);
            for step in 2..=neumann_steps {
                let lt = b.matmul(&format!("L_T_{}", step - 1), l, t, precision);
                t = b.subtract(&format!("T_{step}"), identity, lt);
            }
            t
        }
    }
}

/// `(I - L)(I + L^2)(I + L^4)...`: a squaring and an accumulation per factor.
fn product(b: &mut Builder, precision: Precision, l: Value, identity: Value, n: usize) -> Value {
    let mut x = b.subtract("X_1", identity, l);
    let mut power = l;
    let mut reached = 1;
    while 2 * reached < n {
        reached *= 2;
        power = b.matmul(&format!("L^{reached}"), power, power, precision);
        let xp = b.matmul(&format!("X L^{reached}"), x, power, precision);
        x = b.add(&format!("X_{reached}"), x, xp);
    }
    x
}

/// `X <- X (2I - (I + L) X)` from `X = I - L`.
fn newton(b: &mut Builder, precision: Precision, l: Value, identity: Value, n: usize) -> Value {
    let a = b.add("I + L", identity, l);
    let twice = b.scale("2I", identity, 2.0);
    let mut x = b.subtract("X_2", identity, l);
    let mut reached = 2;
    while reached < n {
        reached *= 2;
        let ax = b.matmul(&format!("A X_{}", reached / 2), a, x, precision);
        let correction = b.subtract(&format!("2I - A X_{}", reached / 2), twice, ax);
        x = b.matmul(&format!("X_{reached}"), x, correction, precision);
    }
    x
}

/// Products inside 8-row diagonal blocks, `P = (I + L_d)^-1`, then `(I + P F)^-1 P` by products across them.
fn two_level(b: &mut Builder, precision: Precision, l: Value, identity: Value, n: usize) -> Value {
    let block = TWO_LEVEL_BLOCK.min(n);
    let diagonal = b.select("L_d", Mask::BlockDiagonal { block }, l, 0.0);
    let mut p = b.subtract("P_1", identity, diagonal);
    let mut power = diagonal;
    let mut reached = 1;
    while 2 * reached < block {
        reached *= 2;
        power = b.matmul(&format!("L_d^{reached}"), power, power, precision);
        let factor = b.add(&format!("I + L_d^{reached}"), identity, power);
        p = b.matmul(&format!("P_{reached}"), p, factor, precision);
    }
    if block == n {
        return p;
    }
    let off = b.subtract("F", l, diagonal);
    let j = b.matmul("P F", p, off, precision);
    let mut x = b.subtract("X_1", identity, j);
    let mut power = j;
    let mut reached = 1;
    while 2 * reached < n / block {
        reached *= 2;
        power = b.matmul(&format!("J^{reached}"), power, power, precision);
        let xp = b.matmul(&format!("X J^{reached}"), x, power, precision);
        x = b.add(&format!("X_{reached}"), x, xp);
    }
    b.matmul("T", x, p, precision)
}

/// `X <- X - (X F_s) X` for `s = 1, 2, 4, ..`, `F_s` the lower-left `s x s` corner of every diagonal block of `2s` rows of `L`.
fn block_doubling(b: &mut Builder, precision: Precision, l: Value, identity: Value, n: usize) -> Value {
    let mut half = 1;
    let mut x = identity;
    while half < n {
        let corner = b.select(&format!("F_{half}"), Mask::BlockCorner { half }, l, 0.0);
        x = if half == 1 {
            b.subtract("X_1", x, corner)
        } else {
            let xf = b.matmul(&format!("X F_{half}"), x, corner, precision);
            let xfx = b.matmul(&format!("X F_{half} X"), xf, x, precision);
            b.subtract(&format!("X_{half}"), x, xfx)
        };
        half *= 2;
    }
    x
}

/// The inverses of the diagonal blocks of `s` rows stand side by side, `X [s, n]`: row `r` of a block in row `r`, in the columns of the block. Those of
/// 16 rows come from one substitution, those of `2s` from two products that stream `s` rows, `(X F_s) D` with `D [n, n]` the blocks of `X` on
/// their places: in the columns of the earlier block of each pair it is what block doubling subtracts.
fn packed_doubling(b: &mut Builder, precision: Precision, l: Value, n: usize) -> Value {
    let rank = b.shape(l).rank();
    let rows = rank - 2;
    let mut size = SUBSTITUTION_BLOCK.min(n);
    let mut diagonal = b.slice("L_0", l, rows, 0, size);
    for start in (size..n).step_by(size) {
        let block = b.slice(&format!("L_{start}"), l, rows, start, size);
        let earlier = Mask::ColumnsBelow { end: start };
        diagonal = b.choose(&format!("L_to_{start}"), earlier, diagonal, block);
    }
    let identity = b.identity("I_s", size, Dtype::F32);
    let identities = b.concatenate("I_s I_s ..", &vec![identity; n / size], 1);
    let mut x = b.forward_substitution(&format!("X_{size}"), diagonal, identities);
    while size < n {
        let corner = b.select(&format!("F_{size}"), Mask::BlockCorner { half: size }, l, 0.0);
        let xf = b.matmul(&format!("X F_{size}"), x, corner, precision);
        let stacked = b.concatenate(&format!("X_{size}_stacked"), &vec![x; n / size], rows);
        let places = b.select(
            &format!("D_{size}"),
            Mask::BlockDiagonal { block: size },
            stacked,
            0.0,
        );
        let below = b.matmul(&format!("X F_{size} D"), xf, places, precision);
        let above = b.select(
            &format!("X_{size}_earlier"),
            Mask::EvenBlocks { block: size },
            x,
            0.0,
        );
        let later = b.subtract(&format!("X_{size}_later"), x, above);
        let below = b.subtract(&format!("X_{size}_below"), later, below);
        size *= 2;
        x = b.concatenate(&format!("X_{size}"), &[above, below], rows);
    }
    x
}

/// Substitution inside 16-row blocks; what earlier blocks contribute comes by matrix products:
/// `X_i = (I + L_ii)^-1 (I_i - L_i,<i X_<i)`, all `n` columns wide.
fn blocked_substitution(b: &mut Builder, precision: Precision, l: Value, identity: Value, n: usize) -> Value {
    let rank = b.shape(l).rank();
    let (rows, columns) = (rank - 2, rank - 1);
    let mut solved: Vec<Value> = Vec::new();
    let mut start = 0;
    while start < n {
        let size = SUBSTITUTION_BLOCK.min(n - start);
        let block_row = b.slice(&format!("L_{start}"), l, rows, start, size);
        let diagonal = b.slice(&format!("L_{start},{start}"), block_row, columns, start, size);
        let mut rhs = b.slice(&format!("I_{start}"), identity, 0, start, size);
        if start > 0 {
            let before = b.slice(&format!("L_{start},<"), block_row, columns, 0, start);
            let above = b.concatenate(&format!("X_<{start}"), &solved, rows);
            let contribution = b.matmul(&format!("L X_<{start}"), before, above, precision);
            rhs = b.subtract(&format!("I - L X_<{start}"), rhs, contribution);
        }
        solved.push(b.forward_substitution(&format!("X_{start}"), diagonal, rhs));
        start += size;
    }
    b.concatenate("T", &solved, rows)
}
