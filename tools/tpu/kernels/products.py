"""Products and triangular inverses the chunk kernels share, for use inside a Pallas TPU kernel.

Every product takes bf16 operands and adds in fp32, as the matrix unit does. A product of fp32 operands is made of several such passes over their
bf16 pieces. Functions that take lists interleave their steps over the list: the entries are independent, and the matrix unit answers late.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

# Contractions of two matrices: a b, a bᵀ, aᵀ b.
NN = (((1,), (0,)), ((), ()))
NT = (((1,), (1,)), ((), ()))
TN = (((0,), (0,)), ((), ()))

# How `inverse` may be asked for.
INVERSES = ("packed_doubling", "block_doubling", "hybrid", "product", "neumann", "none")


def dot(a, b, contraction=NN):
    """One pass: bf16 operands, fp32 result."""
    return lax.dot_general(a, b, contraction, preferred_element_type=jnp.float32)


def split(x, pieces=2):
    """`pieces` bf16 matrices that add up to the fp32 matrix `x`, largest first; two carry 16 bits of the mantissa, three all 24."""
    parts = []
    for _ in range(pieces):
        part = x.astype(jnp.bfloat16)
        parts.append(part)
        x = x - part.astype(jnp.float32)
    return parts


def dot_passes(a, b, passes, contraction=NN):
    """Product of fp32 matrices in `passes` bf16 passes: 1, 3 (relative error about 2^-16) or 6 (the compiler's own fp32 product)."""
    if passes == 6:
        return lax.dot_general(a, b, contraction, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if passes == 1:
        return dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), contraction)
    if passes != 3:
        raise ValueError(f"passes: 1, 3 or 6, not {passes}")
    a_high, a_low = split(a)
    b_high, b_low = split(b)
    return dot(a_high, b_high, contraction) + (dot(a_high, b_low, contraction) + dot(a_low, b_high, contraction))


def dot_pieces(a, b):
    """Product of two matrices given as bf16 pieces, as many of each as `split` made: 1, 3 or 6 passes. Pieces of `a` pass a piece of `b` together."""
    rows, total = a[0].shape[0], None
    for index in reversed(range(len(b))):
        used = len(a) - index
        product = dot(jnp.concatenate(a[:used], 0) if used > 1 else a[0], b[index])
        for piece in reversed(range(used)):
            part = product[piece * rows : (piece + 1) * rows]
            total = part if total is None else total + part
    return total


def rows_and_columns(n):
    """Row index and column index of every entry of an [n, n] matrix."""
    return lax.broadcasted_iota(jnp.int32, (n, n), 0), lax.broadcasted_iota(jnp.int32, (n, n), 1)


def same_block(row, column, size):
    """Whether two indices lie in the same block of `size`, a power of two. (Lowering `//` asks for the TPU that is not there.)"""
    return (row ^ column) < size


def prefix_matrix(tokens, chunk):
    """[tokens, tokens] bf16 of ones where the column is not after the row and lies in its chunk: times a column of numbers, their running sums."""
    row, column = rows_and_columns(tokens)
    return jnp.where(same_block(row, column, chunk) & (row >= column), 1.0, 0.0).astype(jnp.bfloat16)


def prefix_sums(ones, x, contraction=NN):
    """Running sums of fp32 `x` by the matrix unit, exact to fp32: the ones are exact in bf16, `x` is cut into three pieces."""
    high, middle, low = split(x, 3)
    return dot(ones, high, contraction) + (dot(ones, middle, contraction) + dot(ones, low, contraction))


# Bf16 pieces that carry the products of as many passes.
_PIECES = {1: 1, 3: 2, 6: 3}


def _packed_doubling(grams, chunk, passes, start):
    """Inverses whose diagonal blocks of s rows are kept side by side, [s, n]: row r of a block lies in row r, in the columns of the block."""
    if passes not in _PIECES:
        raise ValueError(f"passes: 1, 3 or 6, not {passes}")
    n = grams[0].shape[0]
    column = lax.broadcasted_iota(jnp.int32, (1, n), 1)
    packed = [_substitute(_side_by_side(a, start)) for a in grams]
    words = [[pltpu.bitcast(piece, jnp.int32) for piece in split(a, _PIECES[passes])] for a in grams]
    size = start
    while size < chunk:
        lower, near = _word_masks(n, size)
        lowers = [[_select_words(lower, word) for word in of] for of in words]
        pieces = [split(x, _PIECES[passes]) for x in packed]
        halves = [split(dot_pieces(x, a), _PIECES[passes]) for x, a in zip(pieces, lowers)]
        diagonals = [[_select_words(near, pltpu.bitcast(jnp.concatenate([p] * (n // size), 0), jnp.int32)) for p in x] for x in pieces]
        products = [dot_pieces(half, x) for half, x in zip(halves, diagonals)]
        first = (column & size) == 0
        packed = [
            jnp.concatenate([jnp.where(first, x, 0.0), jnp.where(first, -product, x)], 0) for x, product in zip(packed, products)
        ]
        size *= 2
    if size == n:
        return packed
    row, column = rows_and_columns(n)
    return [jnp.where(same_block(row, column, size), jnp.concatenate([x] * (n // size), 0), 0.0) for x in packed]


def _side_by_side(a, size):
    """The diagonal blocks of `a`, side by side: [size, n]."""
    column = lax.broadcasted_iota(jnp.int32, (size, a.shape[1]), 1)
    packed = a[:size]
    for block in range(1, a.shape[0] // size):
        packed = jnp.where(column >= block * size, a[block * size : (block + 1) * size], packed)
    return packed


def _substitute(lower):
    """Inverses of I + L for the strictly lower blocks L of `lower`, side by side, row after row and exact in fp32."""
    size, n = lower.shape
    row, column = lax.broadcasted_iota(jnp.int32, (size, n), 0), lax.broadcasted_iota(jnp.int32, (size, n), 1)
    x = jnp.where(row == (column & (size - 1)), 1.0, 0.0)
    for solved in range(size - 1):
        top = (solved + 1) // 8 * 8  # whole registers above the next row are done
        below = lower[top:]
        factor = jnp.take_along_axis(below, (column[top:] & -size) + solved, axis=1, mode="promise_in_bounds")
        updated = x[top:] - factor * x[solved : solved + 1]
        x = jnp.concatenate([x[:top], updated], 0) if top else updated
    return x


def _word_masks(n, size):
    """Masks over words of two rows, [n / 2, n]: lower left blocks of the diagonal blocks of 2 `size` rows, and diagonal blocks of `size` rows."""
    row = lax.broadcasted_iota(jnp.int32, (n // 2, n), 0) * 2
    column = lax.broadcasted_iota(jnp.int32, (n // 2, n), 1)
    return same_block(row, column, 2 * size) & ((row & size) != 0) & ((column & size) == 0), same_block(row, column, size)


def _select_words(mask, words):
    return pltpu.bitcast(jnp.where(mask, words, 0), jnp.bfloat16)


def _identity(n):
    row, column = rows_and_columns(n)
    return jnp.where(row == column, 1.0, 0.0)


def _lower_blocks(n, size):
    """Where the lower left block of each diagonal block of 2 `size` rows lies."""
    row, column = rows_and_columns(n)
    shift = size.bit_length()
    return ((row >> shift) == (column >> shift)) & ((row & size) != 0) & ((column & size) == 0)


def inverse(grams, chunk, method="packed_doubling", passes=3, steps=4, start=16):
    """(I + A)⁻¹ of each strictly lower triangular A of `grams`, fp32 [n, n] with blocks of `chunk` rows on the diagonal.

    `packed_doubling`: exact; blocks of `start` rows (16 or more) by substitution on the vector unit, then doubling as below, with the blocks
    side by side so that a product streams as many rows as one block has. `block_doubling`: exact, 2 (log2 chunk - 1) dependent products; the
    inverse of a block of 2 s rows follows from those of its halves, X - (X F) X with F the lower left block. `hybrid`: blocks of `start` rows
    by repeated squares, then doubling. `product`: (I - A)(I + A²)(I + A⁴).., exact in exact arithmetic, useless where keys are alike.
    `neumann`: `steps` terms of the series, not exact. `none`: I - A, to measure what the inverse costs.
    """
    n = grams[0].shape[0]
    identity = _identity(n)
    if method == "packed_doubling":
        return _packed_doubling(grams, chunk, passes, start)
    if method == "none":
        return [identity - a for a in grams]
    if method == "neumann":
        inverses = [identity - a for a in grams]
        for _ in range(steps - 1):
            inverses = [identity - dot_passes(a, x, passes) for a, x in zip(grams, inverses)]
        return inverses
    if method == "product":
        return _repeated_squares(grams, identity, chunk, passes)
    if method == "hybrid":
        row, column = rows_and_columns(n)
        near = same_block(row, column, start)
        inverses = _repeated_squares([jnp.where(near, a, 0.0) for a in grams], identity, start, passes)
        size = start
    elif method == "block_doubling":
        pairs = _lower_blocks(n, 1)
        inverses = [identity - jnp.where(pairs, a, 0.0) for a in grams]
        size = 2
    else:
        raise ValueError(f"inverse: one of {', '.join(INVERSES)}, not {method}")
    while size < chunk:
        lower = _lower_blocks(n, size)
        # (X F) X: the new value is the streamed operand of both products, whose stationary operands are known a step earlier.
        halves = [dot_passes(x, jnp.where(lower, a, 0.0), passes) for a, x in zip(grams, inverses)]
        inverses = [x - dot_passes(half, x, passes) for x, half in zip(inverses, halves)]
        size *= 2
    return inverses


def _repeated_squares(grams, identity, rows, passes):
    powers, inverses, covered = grams, [identity - a for a in grams], 2
    while covered < rows:
        powers = [dot_passes(a, a, passes) for a in powers]
        inverses = [x + dot_passes(x, a, passes) for x, a in zip(inverses, powers)]
        covered *= 2
    return inverses


def spread_matrix(columns, rows=16):
    """[columns, rows columns] NumPy of zeros and ones, for `substitution`: times a [.., columns] matrix, `rows` matrices side by side, of which
    the j-th repeats column j of every group of `rows` columns over that group."""
    source = np.arange(columns)[:, None]
    lane = np.arange(rows * columns)[None, :]
    return ((lane % columns) // rows * rows + lane // columns == source).astype(np.float32)


def substitution(blocks, spread, rows=16):
    """(I + A)⁻¹ of strictly lower triangular A of `rows` rows, by forward substitution in fp32 on the vector unit.

    `blocks`: fp32 matrices [rows, columns], each with columns / rows such A side by side; the results have the same layout. One column of every A
    at a time must be repeated over the columns of its A: the matrix unit does this, ahead of the substitution and for all `blocks` at once,
    by `spread` (`spread_matrix` in bf16) and with A in two bf16 pieces.
    """
    columns = blocks[0].shape[1]
    stacked = jnp.concatenate(split(jnp.concatenate(blocks, 0)), 0)
    below = len(blocks) * rows
    row = lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    column = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    identity = jnp.where(column & (rows - 1) == row, 1.0, 0.0)
    # Halves of eight rows, one vector register high: rows up to the current one do not change.
    halves = [[identity[i : i + 8] for i in range(0, rows, 8)] for _ in blocks]
    for j in range(rows - 1):
        if j % 2 == 0:
            # Two columns at a time: the matrix unit of the newer chips is 256 wide.
            both = dot(stacked, spread[:, j * columns : (j + 2) * columns])
            both = both[:below] + both[below:]
        repeated = both[:, j % 2 * columns : (j % 2 + 1) * columns]
        for n, x in enumerate(halves):
            done = x[j // 8][j % 8 : j % 8 + 1]
            for i in range((j + 1) // 8, rows // 8):
                x[i] = x[i] - repeated[n * rows + 8 * i : n * rows + 8 * i + 8] * done
    return [jnp.concatenate(x, 0) for x in halves]


def _piecewise(streamed, stationary):
    """Product of matrices given as one or two bf16 pieces each. Two pieces lie below each other on one side and side by side on the other, as
    loading a stationary operand takes as long as streaming 128 rows, and its second half of 256 columns nothing."""
    if len(streamed) == 1:
        return dot(streamed[0], stationary[0])
    rows, columns = streamed[0].shape[0], stationary[0].shape[1]
    x = dot(jnp.concatenate(streamed, 0), jnp.concatenate(stationary, 1))
    return x[:rows, :columns] + (x[:rows, columns:] + x[rows:, :columns])


def _spread_blocks(x, size, kept):
    """[columns, columns] with the `kept` blocks of the [size, columns] matrix x, which has blocks side by side, on the diagonal."""
    columns = x.shape[1]
    block = lax.div(lax.broadcasted_iota(jnp.int32, x.shape, 1), size)
    zeros = jnp.zeros_like(x)
    return jnp.concatenate([jnp.where(block == b, x, zeros) if b in kept else zeros for b in range(columns // size)], 0)


def double_blocks(inverses, lowers, passes=3):
    """Inverses of unit lower triangular blocks twice as high, from those of blocks of s rows: block doubling, X - (X F) X.

    `inverses`: for each matrix of n rows, the inverses of its blocks of s rows side by side, fp32 [s, n]. `lowers`: for each matrix the blocks F
    below them, of every second s rows, fp32 [n / 2, n], zero outside the s columns before the diagonal block. Returns fp32 [2 s, n]. As
    the blocks lie side by side, what is streamed through the matrix unit is s rows and not n.
    """
    size, n = inverses[0].shape
    block = lax.div(lax.broadcasted_iota(jnp.int32, (size, n), 1), size)
    first = block & 1 == 0
    pieces = 2 if passes == 3 else 1
    firsts, seconds = range(0, n // size, 2), range(1, n // size, 2)
    zeros = jnp.zeros((size, n), jnp.bfloat16)
    halves = []
    for x, lower in zip(inverses, lowers):
        below = [split(rows, pieces) for rows in jnp.split(lower, len(seconds), 0)]
        below = [jnp.concatenate([y for rows in below for y in (zeros, rows[piece])], 0) for piece in range(pieces)]
        halves.append(split(_piecewise(split(jnp.where(first, 0.0, x), pieces), below), pieces))
    out = []
    for x, half in zip(inverses, halves):
        change = _piecewise(half, [_spread_blocks(piece, size, firsts) for piece in split(x, pieces)])
        out.append(jnp.concatenate([jnp.where(first, x, 0.0), jnp.where(first, -change, x)], 0))
    return out


def solve_halves(inverses, lowers, rights):
    """(I + A)⁻¹ B of unit lower triangular matrices of n rows from the inverses of their two halves, by forward substitution of the halves.

    `inverses`: those of the halves side by side, bf16 [n / 2, n]; `lowers`: the blocks between the halves, fp32 [n / 2, n], zero in the later
    columns; `rights`: B in bf16 [n, m]. Returns pairs of fp32 [n / 2, m].
    """
    half = inverses[0].shape[0]
    firsts = [dot(x[:, :half], b[:half]) for x, b in zip(inverses, rights)]
    rests = [
        (b[half:].astype(jnp.float32) - dot(a[:, :half].astype(jnp.bfloat16), y.astype(jnp.bfloat16))).astype(jnp.bfloat16)
        for a, y, b in zip(lowers, firsts, rights)
    ]
    # The second inverse stays in its columns; those of the first one meet rows of zeros.
    return [(y, dot(x, jnp.concatenate([jnp.zeros_like(z), z], 0))) for x, y, z in zip(inverses, firsts, rests)]


def interleave(generators):
    """Runs generators in lockstep, from one `yield` to the next, and returns what they return. Written for one unit of work and run so for many,
    the same steps of all units lie together, and one's latency is another's work."""
    generators = list(generators)
    results, running = [None] * len(generators), list(range(len(generators)))
    while running:
        for n in list(running):
            try:
                next(generators[n])
            except StopIteration as end:
                results[n] = end.value
                running.remove(n)
    return results
