"""Systolic Linear Attention, forward, as Pallas kernels for a TPU core: wide keys, several value heads side by side on each of them.

One sequence; `jax.vmap` adds a batch. Arrays as the projections leave them, with `value_width` = value heads of a key head x value_dim:

    q, k    [tokens, key_heads x key_dim]      bf16, rows of a head of length one, q scaled (`attention`); raw projections (`layer`)
    v       [tokens, key_heads x value_width]  bf16
    gates   [key_heads, gate_rows, tokens]     fp32, see `pack_gates`: a log decay per tile of key channels, then the step size beta
    state   [key_heads, key_dim, value_width]  fp32
    output  [tokens, key_heads x value_width]  bf16

Per key head and chunk, with g the running sums of the log decays inside the chunk and p those of its middle token:

    K = k e^(g - p), Q = q e^(g - p), X = beta k e^(p - g), S the state times e^p
    A = K X^T below the diagonal, P = Q X^T up to the diagonal
    U = (I + A)^-1 (V - K S), output = Q S + P U, next state = e^(g_last - p) (S + X^T U)

beta stands on the write side alone, so values reach the matrix unit as they are. The exponents are bounded by half a chunk of decay: with chunks
of 128 tokens a decay must stay above -1.38 nats per token (fp32 ends at e^88.7). Gram `per_tile_mask` has no such bound: one product per tile,
times a mask of differences that are never positive.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from products import INVERSES, NT, TN, dot, dot_pieces, inverse, rows_and_columns, same_block, split

GRAMS = ("folded", "per_tile_mask")
STATE_FORMATS = ("f32", "bf16", "row_fp8")
LARGEST_FP8 = 448.0  # of float8_e4m3fn
LANES = 128
SUBLANES = 8
TAPS = 4  # of the causal convolution
NORM_EPSILON = 1e-6  # under the root of the L2 norm
VMEM_LIMIT = 64 << 20  # bytes a kernel may take


# Heads per program by chip, chosen among compiled programs (1, 2, 4 and 8 heads; README.md has their times): eight fill the waits of dependent
# products best; a TPU v5p shares two groups of four between its cores, and the vector memory of a TPU v4 does not hold eight.
HEADS_PER_PROGRAM = {"tpu-v4": 4, "tpu-v5e": 8, "tpu-v5p": 4, "tpu-v6e": 8, "tpu-v7x": 8}


@dataclass(frozen=True)
class Plan:
    """Sizes of a layer and how the kernel goes about it. `checked` refuses what has no meaning."""

    key_heads: int
    key_dim: int
    value_width: int
    decay_tiles: int
    heads_per_program: int = 8
    chunk: int = 128
    chunks_per_program: int = 1
    gram: str = "folded"
    inverse: str = "packed_doubling"
    inverse_passes: int = 3
    inverse_start: int = 16  # rows of the blocks that packed doubling and hybrid start from
    neumann_steps: int = 4
    state_format: str = "f32"
    form_w: bool = False  # W = (I + A)^-1 K before the state is read, instead of (I + A)^-1 of the remainder afterwards
    decay_bound: float = -1.3  # nats per token, of `layer`

    @property
    def tokens(self):
        """Tokens of a program."""
        return self.chunk * self.chunks_per_program

    @property
    def gate_rows(self):
        """Rows of the gates of a head: log decays, beta, zeros up to whole registers."""
        return _gate_rows(self.decay_tiles)

    def checked(self):
        """The plan itself, or ValueError."""
        for name in ("key_heads", "key_dim", "value_width", "decay_tiles", "heads_per_program", "chunks_per_program", "neumann_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: 1 or more, not {getattr(self, name)}")
        if self.key_heads % self.heads_per_program:
            raise ValueError(f"heads_per_program: a divisor of {self.key_heads} key heads, not {self.heads_per_program}")
        if self.chunk not in (16, 32, 64, 128):
            raise ValueError(f"chunk: 16, 32, 64 or 128 tokens, not {self.chunk}")
        if self.tokens % LANES:
            raise ValueError(f"chunk x chunks_per_program: a multiple of {LANES} tokens, not {self.tokens}")
        if self.key_dim % LANES or self.value_width % LANES:
            raise ValueError(f"key_dim, value_width: multiples of {LANES}, not {self.key_dim}, {self.value_width}")
        if self.key_dim % self.decay_tiles:
            raise ValueError(f"decay_tiles: a divisor of {self.key_dim} key channels, not {self.decay_tiles}")
        for name, known in (("gram", GRAMS), ("inverse", INVERSES), ("state_format", STATE_FORMATS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: one of {', '.join(known)}, not {getattr(self, name)}")
        if self.inverse_passes not in (1, 3, 6):
            raise ValueError(f"inverse_passes: 1, 3 or 6, not {self.inverse_passes}")
        if self.inverse_start not in (16, 32, 64):
            raise ValueError(f"inverse_start: 16, 32 or 64 rows, not {self.inverse_start}")
        if self.gram == "per_tile_mask" and self.decay_tiles > 16:
            raise ValueError(f"gram per_tile_mask: up to 16 decay_tiles, not {self.decay_tiles}")
        return self


def _gate_rows(decay_tiles):
    return -(-(decay_tiles + 1) // SUBLANES) * SUBLANES


def pack_gates(log_decay, beta):
    """[tokens, key_heads, decay_tiles] and [tokens, key_heads] as the kernels take them: fp32 [key_heads, gate_rows, tokens]."""
    tokens, heads, tiles = log_decay.shape
    zeros = jnp.zeros((tokens, heads, _gate_rows(tiles) - tiles - 1), log_decay.dtype)
    return jnp.transpose(jnp.concatenate([log_decay, beta[..., None], zeros], -1), (1, 2, 0)).astype(jnp.float32)


# Inside the kernels: lists over the heads of a program, or over (chunk, head), so that independent products stand side by side.


def _per_chunk(plan, sums, token):
    """Column `token` of every chunk, over the lanes of that chunk: [rows, tokens]."""
    columns = [sums[:, c * plan.chunk + token : c * plan.chunk + token + 1] for c in range(plan.chunks_per_program)]
    return jnp.concatenate([jnp.broadcast_to(column, (sums.shape[0], plan.chunk)) for column in columns], 1)


def _running_sums(plan, gates):
    """Running sums of the log decays inside every chunk, tokens in lanes, rows of all heads: exact to fp32. Other rows come out zero."""
    row, column = rows_and_columns(plan.tokens)
    ones = jnp.where(same_block(row, column, plan.chunk) & (row <= column), 1.0, 0.0).astype(jnp.bfloat16)
    of_head = lax.rem(lax.broadcasted_iota(jnp.int32, gates.shape, 0), plan.gate_rows)
    return dot_pieces(split(jnp.where(of_head < plan.decay_tiles, gates, 0.0), 3), [ones])


def _factors(plan, gates, sums):
    """Factors of reads (of q and k) and of writes (of k, with beta), [heads x gate_rows, tokens]."""
    beta = jnp.concatenate(
        [
            jnp.broadcast_to(gates[row : row + 1], (plan.gate_rows, plan.tokens))
            for row in range(plan.decay_tiles, plan.heads_per_program * plan.gate_rows, plan.gate_rows)
        ],
        0,
    )
    if plan.gram == "folded":
        exponents = sums - _per_chunk(plan, sums, plan.chunk // 2)
        return jnp.exp(exponents), jnp.exp(-exponents) * beta
    return jnp.exp(sums), jnp.exp(_per_chunk(plan, sums, plan.chunk - 1) - sums) * beta


def spreads(plan):
    """Matrices of ones that spread factors of gate rows over key channels, bf16, for the heads that share one of them; constants of a kernel.

    [heads, depth, key_dim] and its transpose. The depth holds two bf16 pieces of the gate rows of all these heads, and fills the matrix unit.
    """
    rows, sharing = plan.gate_rows, _sharing(plan)
    depth = -(-2 * rows * sharing // LANES) * LANES
    ones = np.zeros((sharing, depth, plan.key_dim), np.float32)
    for head in range(sharing):
        for channel in range(plan.key_dim):
            row = head * rows + channel // (plan.key_dim // plan.decay_tiles)
            ones[head, [row, sharing * rows + row], channel] = 1
    return [jnp.asarray(x, jnp.bfloat16) for x in (ones, ones.swapaxes(1, 2))]


def _sharing(plan):
    """Heads whose gate rows share a depth of 128."""
    sharing = max(1, LANES // (2 * plan.gate_rows))
    return min(sharing, plan.heads_per_program)


def _pieces(plan, factors, depth):
    """Two bf16 pieces of the factors (16 bits of the mantissa, more than operands keep), of every set of heads: [depth, columns]."""
    rows, sets = plan.gate_rows * _sharing(plan), []
    for first in range(0, factors.shape[0], rows):
        pieces = split(factors[first : first + rows])
        missing = depth - sum(piece.shape[0] for piece in pieces)
        sets.append(jnp.concatenate(pieces + [jnp.zeros((missing, factors.shape[1]), jnp.bfloat16)] * (missing > 0), 0))
    return sets


def _over_channels(plan, spread, factors):
    """Factors [heads x gate_rows, tokens] over the key channels, by the matrix unit: for each head [tokens, key_dim]."""
    heads, sharing = range(plan.heads_per_program), _sharing(plan)
    if plan.decay_tiles == plan.key_dim:
        return [jnp.transpose(factors[head * plan.gate_rows :][: plan.key_dim]) for head in heads]
    turned = [jnp.transpose(x) for x in _pieces(plan, factors, spread[0].shape[1])]
    return [dot(turned[head // sharing], spread[0][head % sharing]) for head in heads]


def _over_state(plan, spread, factors):
    """Factors [heads x gate_rows, columns] over the rows of the state, each equal in 128 lanes: for each head, and each column, [key_dim, 128]."""
    heads, sharing, columns = range(plan.heads_per_program), _sharing(plan), range(factors.shape[1])
    over_lanes = jnp.concatenate([jnp.broadcast_to(factors[:, i : i + 1], (factors.shape[0], LANES)) for i in columns], 1)
    width = plan.key_dim // plan.decay_tiles
    if plan.decay_tiles == plan.key_dim:
        spread_out = [over_lanes[head * plan.gate_rows :][: plan.key_dim] for head in heads]
    elif width >= SUBLANES:
        row = lambda index: jnp.broadcast_to(over_lanes[index : index + 1], (width, over_lanes.shape[1]))
        spread_out = [jnp.concatenate([row(head * plan.gate_rows + t) for t in range(plan.decay_tiles)], 0) for head in heads]
    else:
        sets = _pieces(plan, over_lanes, spread[0].shape[1])
        spread_out = [dot(spread[1][head % sharing], sets[head // sharing]) for head in heads]
    return [[x[:, i * LANES : (i + 1) * LANES] for i in columns] for x in spread_out]


def _columns(ref, head, width):
    return ref[:, head * width : (head + 1) * width]


def _operands(plan, spread, q, k, gates, sums):
    """K, Q and X of the module's text, for each head bf16 [tokens, key_dim]. `q` and `k` are functions of the head."""
    read, write = _factors(plan, gates, sums)
    reads, writes = _over_channels(plan, spread, read), _over_channels(plan, spread, write)
    keys = [k(head).astype(jnp.float32) for head in range(plan.heads_per_program)]
    return (
        [(key * factor).astype(jnp.bfloat16) for key, factor in zip(keys, reads)],
        [(q(head).astype(jnp.float32) * factor).astype(jnp.bfloat16) for head, factor in enumerate(reads)],
        [(key * factor).astype(jnp.bfloat16) for key, factor in zip(keys, writes)],
    )


def _rows(plan, chunk):
    return slice(chunk * plan.chunk, (chunk + 1) * plan.chunk)


def _units(plan):
    """(head, rows of the chunk) of every chunk of a program, chunk after chunk."""
    return [(head, _rows(plan, c)) for c in range(plan.chunks_per_program) for head in range(plan.heads_per_program)]


def _products_of_keys(plan, q, k, gates, sums, reads, queries, writes):
    """K X^T and Q X^T of every unit, not yet masked: lists of fp32 [chunk, chunk]."""
    if plan.gram == "folded":
        stacked = [dot(jnp.concatenate([reads[h][rows], queries[h][rows]], 0), writes[h][rows], NT) for h, rows in _units(plan)]
        return [x[: plan.chunk] for x in stacked], [x[plan.chunk :] for x in stacked]
    row, column = rows_and_columns(plan.chunk)
    width, grams, products = plan.key_dim // plan.decay_tiles, [], []
    turned = jnp.transpose(sums)
    for head, rows in _units(plan):
        both, first = None, head * plan.gate_rows
        keys, pairs = k(head)[rows], jnp.concatenate([k(head)[rows], q(head)[rows]], 0)
        for tile in range(plan.decay_tiles):
            channels = slice(tile * width, (tile + 1) * width)
            difference = turned[rows, first + tile : first + tile + 1] - sums[first + tile : first + tile + 1, rows]
            mask = jnp.exp(jnp.where(row >= column, difference, 0.0))
            part = dot(pairs[:, channels], keys[:, channels], NT) * jnp.concatenate([mask, mask], 0)
            both = part if both is None else both + part
        both = both * gates[first + plan.decay_tiles : first + plan.decay_tiles + 1, rows]
        grams.append(both[: plan.chunk])
        products.append(both[plan.chunk :])
    return grams, products


def _solve(plan, grams, products):
    """(I + A)^-1 and P of every unit, bf16 [chunk, chunk]. Entries above the diagonal may be infinite: they are selected away, not multiplied."""
    row, column = rows_and_columns(plan.chunk)
    grams = [jnp.where(row > column, gram, 0.0) for gram in grams]
    inverses = inverse(grams, plan.chunk, plan.inverse, plan.inverse_passes, plan.neumann_steps, plan.inverse_start)
    return (
        [x.astype(jnp.bfloat16) for x in inverses],
        [jnp.where(row >= column, product, 0.0).astype(jnp.bfloat16) for product in products],
    )


class _State:
    """States of the heads of a program in VMEM, in their stored format."""

    def __init__(self, plan, values, scales):
        self.plan, self.values, self.scales = plan, values, scales

    @staticmethod
    def scratch(plan):
        """Shapes in VMEM."""
        dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16, "row_fp8": jnp.float8_e4m3fn}[plan.state_format]
        scales = (plan.heads_per_program, plan.key_dim, LANES) if plan.state_format == "row_fp8" else (1, SUBLANES, LANES)
        return [pltpu.VMEM((plan.heads_per_program, plan.key_dim, plan.value_width), dtype), pltpu.VMEM(scales, jnp.float32)]

    def over_values(self, column):
        """[key_dim, 128] beside itself over all values."""
        return jnp.concatenate([column] * (self.plan.value_width // LANES), 1)

    def start(self, initial):
        """Before the first chunk: the initial states, or zeros where there are none."""
        for head in range(self.plan.heads_per_program):
            shape = (self.plan.key_dim, self.plan.value_width)
            self.store(head, jnp.zeros(shape, jnp.float32) if initial is None else initial[head])

    def load(self, head):
        """The state of a head, fp32."""
        values = self.values[head].astype(jnp.float32)
        return values * self.over_values(self.scales[head]) if self.plan.state_format == "row_fp8" else values

    def store(self, head, value):
        """Rounds to the stored format; row-FP8 has the scale of each row in all lanes."""
        if self.plan.state_format == "row_fp8":
            largest = jnp.maximum(jnp.max(jnp.abs(value), axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny * LARGEST_FP8)
            largest = jnp.broadcast_to(largest, (self.plan.key_dim, LANES))
            self.scales[head] = largest / LARGEST_FP8
            value = value * self.over_values(LARGEST_FP8 / largest)
        self.values[head] = value.astype(self.values.dtype)

    def finish(self, out):
        """After the last chunk: the states, fp32."""
        for head in range(self.plan.heads_per_program):
            out[head] = self.load(head)


class _Decays:
    """Decay of the states over a chunk: in two steps around the pivot with the folded Gram (the whole may be less than fp32 can hold), else in one."""

    def __init__(self, plan, spread, state, sums, chunk):
        at = lambda token: sums[:, chunk * plan.chunk + token : chunk * plan.chunk + token + 1]
        self.state, self.folded, last = state, plan.gram == "folded", at(plan.chunk - 1)
        pivot = at(plan.chunk // 2)
        exponents = jnp.concatenate([pivot, last - pivot], 1) if self.folded else last
        self.factors = _over_state(plan, spread, jnp.exp(exponents))

    def read(self, head):
        """The state as the products of the chunk read it, fp32."""
        state = self.state.load(head)
        return state * self.state.over_values(self.factors[head][0]) if self.folded else state

    def write(self, head, read, added):
        """Stores the state after the chunk: what was read and what the chunk adds."""
        factor = self.state.over_values(self.factors[head][-1])
        self.state.store(head, (read + added) * factor if self.folded else read * factor + added)


def _kernel(*refs, plan, front, initial, final, valid):
    """Ops 3 to 7a, with `front` from op 2 on."""
    refs = list(refs)
    q_ref, k_ref, v_ref, gates_ref, *spread = refs[:6]
    del refs[:6]
    front_refs = [refs.pop(0) for _ in range(4)] if front else None
    initial_ref = refs.pop(0) if initial else None
    out = refs.pop(0)
    final_ref = refs.pop(0) if final else None
    state = _State(plan, *refs[:2])
    tails = refs[2:]
    step, heads, chunk = pl.program_id(1), range(plan.heads_per_program), plan.chunk

    @pl.when(step == 0)
    def _():
        state.start(initial_ref)
        for tail in tails:
            tail[...] = jnp.zeros_like(tail)

    gates = gates_ref[...].reshape(plan.heads_per_program * plan.gate_rows, plan.tokens)
    if front:
        q, k, v, gates = _front(plan, q_ref, k_ref, v_ref, gates, front_refs, tails, valid)
    else:
        q, k = (functools.partial(_columns, ref, width=plan.key_dim) for ref in (q_ref, k_ref))
        v = functools.partial(_columns, v_ref, width=plan.value_width)
    sums = _running_sums(plan, gates)
    operands = _operands(plan, spread, q, k, gates, sums)
    reads, queries, writes = operands
    grams = _products_of_keys(plan, q, k, gates, sums, *operands)
    decays = [_Decays(plan, spread, state, sums, c) for c in range(plan.chunks_per_program)]

    def read_states(c, left):
        """States of a chunk, and the products of `left` and of the queries with them."""
        rows, states = _rows(plan, c), [decays[c].read(h) for h in heads]
        pairs = [jnp.concatenate([left[h], queries[h][rows]], 0) for h in heads]
        return states, [dot(pair, x.astype(jnp.bfloat16)) for pair, x in zip(pairs, states)]

    # The first chunk reads the state before its inverse is there: the compiler keeps close to the order in which a kernel is written, and
    # the matrix unit has little else to do meanwhile.
    early = None if plan.form_w else read_states(0, [reads[h][:chunk] for h in heads])
    inverses, products = _solve(plan, *grams)
    if plan.form_w:
        updates = [dot(x, v(h)[rows]) for x, (h, rows) in zip(inverses, _units(plan))]
        factors = [dot(x, reads[h][rows]).astype(jnp.bfloat16) for x, (h, rows) in zip(inverses, _units(plan))]
    for c in range(plan.chunks_per_program):
        first, rows = c * plan.heads_per_program, _rows(plan, c)
        if plan.form_w:
            states, read = read_states(c, factors[first:])
            update = [(updates[first + h] - read[h][:chunk]).astype(jnp.bfloat16) for h in heads]
        else:
            states, read = early if c == 0 else read_states(c, [reads[h][rows] for h in heads])
            rest = [(v(h)[rows].astype(jnp.float32) - read[h][:chunk]).astype(jnp.bfloat16) for h in heads]
            update = [dot(inverses[first + h], rest[h]).astype(jnp.bfloat16) for h in heads]
        for h in heads:
            # One product of the updates with keys and with P: the updates enter the matrix unit once.
            added = dot(jnp.concatenate([jnp.transpose(writes[h][rows]), products[first + h]], 0), update[h])
            decays[c].write(h, states[h], added[: plan.key_dim])
            columns = slice(h * plan.value_width, (h + 1) * plan.value_width)
            out[rows, columns] = (read[h][chunk:] + added[plan.key_dim :]).astype(out.dtype)
    if final:

        @pl.when(step == pl.num_programs(1) - 1)
        def _():
            state.finish(final_ref)


def _convolved(ref, weights, tail, head, width, tokens):
    """Causal convolution of the channels of a head and SiLU, fp32 [tokens, width]. `tail` keeps the last rows of the block before."""
    columns = slice(head * width, (head + 1) * width)
    block = ref[:, columns].astype(jnp.float32)
    padded = jnp.concatenate([tail[:, columns], block], 0)
    tail[:, columns] = block[tokens - SUBLANES :]
    half = None  # of the convolution: SiLU(x) is h + h tanh(h) with h = x / 2, one transcendental
    for tap in range(TAPS):
        first = SUBLANES - TAPS + 1 + tap
        part = padded[first : first + tokens] * (0.5 * weights[tap : tap + 1, columns])
        half = part if half is None else half + part
    return half + half * jnp.tanh(half)


def _front(plan, q_ref, k_ref, v_ref, gates, refs, tails, valid):
    """Op 2 and the gates: queries and keys of length one (queries by key_dim^-1/2), values, log decays and step sizes."""
    q_weights, k_weights, v_weights, parameters = refs
    heads = range(plan.heads_per_program)

    def unit(ref, weights, tail, scale):
        rows = [_convolved(ref, weights, tail, head, plan.key_dim, plan.tokens) for head in heads]
        return [x * (scale * lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + NORM_EPSILON)) for x in rows]

    q = unit(q_ref, q_weights, tails[0], plan.key_dim**-0.5)
    k = unit(k_ref, k_weights, tails[1], 1.0)
    v = [_convolved(v_ref, v_weights, tails[2], head, plan.value_width, plan.tokens).astype(jnp.bfloat16) for head in heads]
    scale, bias, amplitude = (parameters[...].reshape(gates.shape[0], -1)[:, i : i + 1] for i in range(3))
    gates = amplitude * (0.5 + 0.5 * jnp.tanh(0.5 * scale * (gates + bias)))
    if valid is not None:
        token = pl.program_id(1) * plan.tokens + lax.broadcasted_iota(jnp.int32, gates.shape, 1)
        gates = jnp.where(token < valid, gates, 0.0)
    return q.__getitem__, k.__getitem__, v.__getitem__, gates


def gate_parameters(plan, log_scale, bias):
    """Scale, bias and amplitude of every gate row, fp32 [key_heads, gate_rows, 3].

    `log_scale` [key_heads] and `bias` [key_heads, decay_tiles]: log decay = decay_bound sigmoid(e^log_scale (x + bias)), and
    beta = 2 sigmoid(x), the sum of two equal sigmoids, in (0, 2).
    """
    heads, tiles = bias.shape
    rest = plan.gate_rows - tiles - 1
    ones = jnp.ones((heads, 1), jnp.float32)
    scale = jnp.concatenate([jnp.broadcast_to(jnp.exp(log_scale)[:, None], bias.shape), ones, jnp.zeros((heads, rest))], 1)
    shift = jnp.concatenate([bias, jnp.zeros((heads, rest + 1))], 1)
    amplitude = jnp.concatenate([jnp.full(bias.shape, plan.decay_bound), 2 * ones, jnp.zeros((heads, rest))], 1)
    return jnp.stack([scale, shift, amplitude], -1).astype(jnp.float32)


def _blocks(plan):
    """Blocks of the arrays of a program: [tokens, heads x width] and [heads, gate_rows, tokens], of per-head arrays, and constants with theirs."""
    heads = plan.heads_per_program
    wide = lambda width: pl.BlockSpec((plan.tokens, heads * width), lambda h, c: (c, h))
    gates = pl.BlockSpec((heads, plan.gate_rows, plan.tokens), lambda h, c: (h, 0, c))
    states = pl.BlockSpec((heads, plan.key_dim, plan.value_width), lambda h, c: (h, 0, 0))
    constants = spreads(plan)
    return wide, gates, states, constants, [pl.BlockSpec(x.shape, lambda h, c: (0, 0, 0)) for x in constants]


def _padded(plan, arrays, gates):
    """Whole programs of tokens: added tokens have no key, no value, beta 0 and log decay 0, so that nothing changes."""
    missing = -gates.shape[2] % plan.tokens
    if not missing:
        return arrays, gates
    return [jnp.pad(x, ((0, missing), (0, 0))) for x in arrays], jnp.pad(gates, ((0, 0), (0, 0), (0, missing)))


def _checked_arrays(plan, q, k, v, gates, initial):
    tokens = q.shape[0]
    expected = {
        "q": (q, (tokens, plan.key_heads * plan.key_dim)),
        "k": (k, (tokens, plan.key_heads * plan.key_dim)),
        "v": (v, (tokens, plan.key_heads * plan.value_width)),
        "gates": (gates, (plan.key_heads, plan.gate_rows, tokens)),
    }
    if initial is not None:
        expected["initial"] = (initial, (plan.key_heads, plan.key_dim, plan.value_width))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name}: shape {shape}, not {array.shape}")


def _parameters(interpret):
    return dict(
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
    )


def _call(plan, q, k, v, gates, front, initial, final, interpret):
    _checked_arrays(plan.checked(), q, k, v, gates, initial)
    total = q.shape[0]
    (q, k, v), gates = _padded(plan, [q, k, v], gates)
    wide, gate_block, states, constants, constant_blocks = _blocks(plan)
    heads, width, values = plan.heads_per_program, plan.key_dim, plan.value_width
    inputs = [q, k, v, gates, *constants]
    in_specs = [wide(width), wide(width), wide(values), gate_block, *constant_blocks]
    scratch = _State.scratch(plan)
    if front:
        taps = lambda columns: pl.BlockSpec((TAPS, heads * columns), lambda h, c: (0, h))
        inputs += front
        in_specs += [taps(width), taps(width), taps(values), pl.BlockSpec((heads, plan.gate_rows, 3), lambda h, c: (h, 0, 0))]
        scratch += [pltpu.VMEM((SUBLANES, heads * columns), jnp.float32) for columns in (width, width, values)]
    if initial is not None:
        inputs.append(initial)
        in_specs.append(states)
    out_shape, out_specs = [jax.ShapeDtypeStruct(v.shape, v.dtype)], [wide(values)]
    if final:
        out_shape.append(jax.ShapeDtypeStruct((plan.key_heads, width, values), jnp.float32))
        out_specs.append(states)
    valid = total if front and q.shape[0] != total else None
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan, front=bool(front), initial=initial is not None, final=final, valid=valid),
        grid=(plan.key_heads // heads, q.shape[0] // plan.tokens),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch,
        name="sla_layer" if front else "sla",
        **_parameters(interpret),
    )(*inputs)
    return (out[0][:total], *out[1:]) if final else out[0][:total]


def attention(plan, q, k, v, gates, initial=None, final=False, interpret=False):
    """Ops 3 to 7a in one kernel. Returns the output, with `final` also the states after the last token."""
    return _call(plan, q, k, v, gates, None, initial, final, interpret)


def layer(plan, q, k, v, gates, weights, parameters, initial=None, final=False, interpret=False):
    """Ops 2 to 7a in one kernel, from raw projections: causal convolution of four taps, SiLU, L2 norm, gates, and `attention`.

    `weights`: of the convolution, fp32 [4, columns] for q, k and v, the last row for the token itself; tokens before the first count as zero.
    `gates`: raw projections in the layout of `pack_gates`. `parameters`: see `gate_parameters`.
    """
    return _call(plan, q, k, v, gates, [*weights, parameters], initial, final, interpret)


# The same stages as kernels of their own, with what passes between them in HBM: what fusing gains can be compiled and compared.


def _solve_kernel(q_ref, k_ref, v_ref, gates_ref, *refs, plan):
    """Ops 3 to 5."""
    spread, (sums_ref, queries_ref, writes_ref, w_ref, updates_ref, products_ref) = refs[:2], refs[2:]
    gates = gates_ref[...].reshape(plan.heads_per_program * plan.gate_rows, plan.tokens)
    q, k = (functools.partial(_columns, ref, width=plan.key_dim) for ref in (q_ref, k_ref))
    sums = _running_sums(plan, gates)
    sums_ref[...] = sums.reshape(sums_ref.shape)
    reads, queries, writes = _operands(plan, spread, q, k, gates, sums)
    inverses, products = _solve(plan, *_products_of_keys(plan, q, k, gates, sums, reads, queries, writes))
    for x, product, (head, rows) in zip(inverses, products, _units(plan)):
        keys = slice(head * plan.key_dim, (head + 1) * plan.key_dim)
        values = slice(head * plan.value_width, (head + 1) * plan.value_width)
        queries_ref[rows, keys], writes_ref[rows, keys] = queries[head][rows], writes[head][rows]
        w_ref[rows, keys] = dot(x, reads[head][rows]).astype(jnp.bfloat16)
        updates_ref[rows, values] = dot(x, v_ref[rows, values]).astype(jnp.bfloat16)
        products_ref[rows, head * plan.chunk : (head + 1) * plan.chunk] = product


def _scan_kernel(sums_ref, writes_ref, w_ref, updates_ref, over_channels, over_rows, *refs, plan, initial, final):
    """Op 6: updates U and the state that every chunk reads."""
    spread, refs = (over_channels, over_rows), list(refs)
    initial_ref = refs.pop(0) if initial else None
    out, states_ref = refs.pop(0), refs.pop(0)
    final_ref = refs.pop(0) if final else None
    state, heads = _State(plan, *refs), range(plan.heads_per_program)

    @pl.when(pl.program_id(1) == 0)
    def _():
        state.start(initial_ref)

    sums = sums_ref[...].reshape(plan.heads_per_program * plan.gate_rows, plan.tokens)
    for c in range(plan.chunks_per_program):
        rows = _rows(plan, c)
        decays = _Decays(plan, spread, state, sums, c)
        states = [decays.read(h) for h in heads]
        rounded = [x.astype(jnp.bfloat16) for x in states]
        reads = [dot(_columns(w_ref, h, plan.key_dim)[rows], rounded[h]) for h in heads]
        for h in heads:
            values = slice(h * plan.value_width, (h + 1) * plan.value_width)
            update = (updates_ref[rows, values].astype(jnp.float32) - reads[h]).astype(jnp.bfloat16)
            decays.write(h, states[h], dot(_columns(writes_ref, h, plan.key_dim)[rows], update, TN))
            out[rows, values] = update
            states_ref[c, h] = rounded[h]
    if final:

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            state.finish(final_ref)


def _output_kernel(queries_ref, products_ref, updates_ref, states_ref, out, *, plan):
    """Op 7a."""
    for c in range(plan.chunks_per_program):
        rows = _rows(plan, c)
        for h in range(plan.heads_per_program):
            values = slice(h * plan.value_width, (h + 1) * plan.value_width)
            inside = dot(_columns(products_ref, h, plan.chunk)[rows], updates_ref[rows, values])
            out[rows, values] = (dot(_columns(queries_ref, h, plan.key_dim)[rows], states_ref[c, h]) + inside).astype(out.dtype)


def attention_in_stages(plan, q, k, v, gates, initial=None, final=False, interpret=False):
    """`attention` as three kernels: ops 3 to 5 with the factors W and U of the chunk solve, op 6, op 7a."""
    _checked_arrays(plan.checked(), q, k, v, gates, initial)
    total = q.shape[0]
    (q, k, v), gates = _padded(plan, [q, k, v], gates)
    wide, gate_block, states, constants, constant_blocks = _blocks(plan)
    heads, tokens = plan.heads_per_program, q.shape[0]
    grid = (plan.key_heads // heads, tokens // plan.tokens)
    keys, values, products = wide(plan.key_dim), wide(plan.value_width), wide(plan.chunk)
    array = lambda width: jax.ShapeDtypeStruct((tokens, plan.key_heads * width), jnp.bfloat16)
    every = pl.BlockSpec((plan.chunks_per_program, heads, plan.key_dim, plan.value_width), lambda h, c: (c, h, 0, 0))
    sums, queries, writes, w, updates, inside = pl.pallas_call(
        functools.partial(_solve_kernel, plan=plan),
        grid=grid,
        in_specs=[keys, keys, values, gate_block, *constant_blocks],
        out_specs=[gate_block, keys, keys, keys, values, products],
        out_shape=[jax.ShapeDtypeStruct(gates.shape, jnp.float32), *[array(plan.key_dim)] * 3, array(plan.value_width), array(plan.chunk)],
        name="sla_solve",
        **_parameters(interpret),
    )(q, k, v, gates, *constants)
    shape = jax.ShapeDtypeStruct
    out_shape = [array(plan.value_width), shape((tokens // plan.chunk, plan.key_heads, plan.key_dim, plan.value_width), jnp.bfloat16)]
    scan = pl.pallas_call(
        functools.partial(_scan_kernel, plan=plan, initial=initial is not None, final=final),
        grid=grid,
        in_specs=[gate_block, keys, keys, values, *constant_blocks, *[states] * (initial is not None)],
        out_specs=[values, every, *[states] * final],
        out_shape=out_shape + [shape((plan.key_heads, plan.key_dim, plan.value_width), jnp.float32)] * final,
        scratch_shapes=_State.scratch(plan),
        name="sla_scan",
        **_parameters(interpret),
    )(sums, writes, w, updates, *constants, *[initial] * (initial is not None))
    out = pl.pallas_call(
        functools.partial(_output_kernel, plan=plan),
        grid=grid,
        in_specs=[keys, products, values, every],
        out_specs=values,
        out_shape=array(plan.value_width),
        name="sla_output",
        **_parameters(interpret),
    )(queries, inside, scan[0], scan[1])
    return (out[:total], scan[2]) if final else out[:total]


def program(
    tokens=8192,
    key_heads=8,
    key_dim=256,
    values_per_key=4,
    value_dim=128,
    decay_tiles=4,
    front=False,
    stages=False,
    initial=False,
    final=False,
    chip="tpu-v7x",
    heads_per_program=None,
    **options,
):
    """A function to compile and the shapes of its arguments, by default at the size of the SLA paper's tables; `options` are those of `Plan`.

    Heads per program are those of `chip` unless given. `front`: `layer`; `stages`: `attention_in_stages`; else `attention`.
    `initial`, `final`: with states before and after.
    """
    if heads_per_program is None:
        if chip not in HEADS_PER_PROGRAM:
            raise ValueError(f"chip: one of {', '.join(HEADS_PER_PROGRAM)}, not {chip}")
        heads_per_program = HEADS_PER_PROGRAM[chip]
    plan = Plan(key_heads, key_dim, values_per_key * value_dim, decay_tiles, heads_per_program, **options).checked()
    if front and stages:
        raise ValueError("front and stages: one of the two")
    shape, columns = jax.ShapeDtypeStruct, (key_heads * key_dim, key_heads * key_dim, key_heads * plan.value_width)
    arguments = [shape((tokens, width), jnp.bfloat16) for width in columns] + [shape((key_heads, plan.gate_rows, tokens), jnp.float32)]
    if front:
        arguments.append(tuple(shape((TAPS, width), jnp.float32) for width in columns))
        arguments.append(shape((key_heads, plan.gate_rows, 3), jnp.float32))
    if initial:
        arguments.append(shape((key_heads, key_dim, plan.value_width), jnp.float32))

    def run(*arrays):
        state = arrays[-1] if initial else None
        arrays = arrays[:-1] if initial else arrays
        return (layer if front else attention_in_stages if stages else attention)(plan, *arrays, initial=state, final=final)

    return run, tuple(arguments)
