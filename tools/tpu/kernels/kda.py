"""Forward kernels of Kimi delta attention (KDA), a gated delta rule whose decay is per key channel, for TPUs in Pallas.

    S <- exp(g) S + beta k (v - kᵀ (exp(g) S))ᵀ,  o = qᵀ S

in chunks of `chunk` tokens. In a chunk, with G the running sums of the log decays g:

    A = tril₋₁(beta K e^(G - G') Kᵀ),  P = tril(Q e^(G - G') Kᵀ),  W = (I + A)⁻¹ beta K e^G,  U = (I + A)⁻¹ beta V - W S
    O = (Q e^G) S + P U,  S <- e^(G_last) S + (K e^(G_last - G))ᵀ U

The factor e^(G_i - G_j) of a pair of tokens depends on the channel, so it cannot be applied after the product; and e^G e^-G overflows. Here each
block of `pivot_rows` tokens has a pivot, its middle token: within the block both factors are taken from there. Between blocks, of two neighbours
of s, 2 s, 4 s.. tokens the later one decays from the first pivot it has, and the earlier one up to there: factors only shrink. All of them come
from two exponentials a token and channel, times one number a block and channel; the sums of log decays inside the exponentials are one product
with a constant matrix of -1, 0 and 1. Decays of up to 88 / (pivot_rows / 2) = 11 nats a token stay finite.

The inverse of I + A: forward substitution in blocks of `pivot_rows` (the vector unit), then block doubling (the matrix unit).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from products import NT, TN, dot, double_blocks, interleave, solve_halves, split, spread_matrix, substitution

# Channels of a head, keys and values: the lanes of a vector register.
HEAD = 128
# Decays are kept as powers of two, which is what the transcendental unit computes.
LOG2_E = 1.0 / math.log(2.0)
# Added to the squared length of a query or key before the root, as the public kernels do.
NORM_EPSILON = 1e-6

# Width of the convolution, and rows kept of what came before a program: a whole tile of bf16.
TAPS, TAIL = 4, 16
# What a gate is given for a token that is not there: its decay is then 0.
NO_DECAY = -1e30

BF16, F32 = jnp.bfloat16, jnp.float32
# How states may be kept between chunks.
STATE_FORMATS = {"f32": F32, "bf16": BF16}
# Chunks of heads whose products are computed side by side, of those of a program.
UNITS_TOGETHER = 4
# Bytes of VMEM that the compiler may give a kernel, if the chip has them: more than it takes unasked.
VMEM_LIMIT = 100 << 20
# Heads of a program that suit a chip, the best of those compiled (README): the more chunks side by side, the less the latency of products shows.
# A v4 has 16 MiB of VMEM, and was tried with 4 and 8.
HEADS_PER_PROGRAM = {"tpu-v4": 8, "tpu-v5e": 16, "tpu-v5p": 16, "tpu-v6e": 16, "tpu-v7x": 16}
# Chips of which JAX shows two cores as one device, between which the groups of heads can be shared out.
TWO_CORES = ("tpu-v4", "tpu-v5p")


def _levels(chunk, rows):
    """Sizes s of neighbours: rows, 2 rows, .. chunk / 2."""
    return [rows << i for i in range((chunk // rows).bit_length() - 1)]


def sums_matrix(chunk, rows):
    """NumPy matrix of -1, 0 and 1 that, times the log decays [chunk, HEAD] of a chunk, gives every exponent that its factors need.

    Row t < chunk: from the pivot of t's block to t. Then, a row a block: for each size s of `_levels`, between the block's pivot and the first pivot
    of the later of its pair of neighbours; from the start of the chunk to the pivot; from the pivot to the end of the chunk. Last, the whole
    chunk. Padded to a multiple of 16 rows.
    """
    token = np.arange(chunk)
    between = lambda first, last: ((token > first) & (token <= last)).astype(np.float32)
    pivots = [start + rows // 2 for start in range(0, chunk, rows)]
    out = []
    for t in range(chunk):
        pivot = pivots[t // rows]
        out.append(between(pivot, t) - between(t, pivot))
    for size in _levels(chunk, rows):
        for b, pivot in enumerate(pivots):
            start = b * rows // (2 * size) * 2 * size
            border = start + size + rows // 2
            out.append(between(border, pivot) if pivot > border else between(pivot, border))
    out += [between(-1, pivot) for pivot in pivots]
    out += [between(pivot, chunk - 1) for pivot in pivots]
    out.append(between(-1, chunk - 1))
    out += [np.zeros(chunk, np.float32)] * (-len(out) % 16)
    return np.stack(out)


class _Masks:
    """Which entries of the products of a block of rows belong to it; the same for every chunk and head.

    `blocks`: for each block of rows, the entries of its diagonal block below the diagonal, those on or below it, and the columns from there on.
    `pairs`: for each size of neighbours, for each block, the columns from the start of its pair on, and those of the earlier of the pair.
    """

    def __init__(self, chunk, rows):
        row = lax.broadcasted_iota(jnp.int32, (rows, chunk), 0)
        lane = lax.broadcasted_iota(jnp.int32, (rows, chunk), 1)
        self.blocks, self.pairs = [], []
        for start in range(0, chunk, rows):
            self.blocks.append(((lane >= start) & (lane < start + row), (lane >= start) & (lane <= start + row), lane >= start))
        for size in _levels(chunk, rows):
            starts = [b // (2 * size) * 2 * size for b in range(0, chunk, rows)]
            self.pairs.append([(lane >= start, (lane >= start) & (lane < start + size)) for start in starts])


def _chunk_products(q, k, decay, beta, sums, factors, masks, chunk, rows):
    """What the chunk of one head needs, but for the inverse.

    q, k [chunk, HEAD] fp32, decay [chunk, HEAD] fp32 in powers of two, beta [chunk, 1]; `factors` is scratch [.., HEAD]. Returns the
    diagonal blocks of A side by side [rows, chunk], the blocks below them for `double_blocks`, P bf16 [chunk, chunk], Q e^G, beta K e^G and
    K e^(G_last - G) in bf16 [chunk, HEAD], and e^(G_last) [1, HEAD].
    """
    count = chunk // rows
    levels = _levels(chunk, rows)
    high, low = split(decay)
    exponents = dot(sums, jnp.concatenate([high, low], 1))
    yield
    exponents = exponents[:, :HEAD] + exponents[:, HEAD:]
    later, earlier = jnp.exp2(exponents[:chunk]), jnp.exp2(-exponents[:chunk])
    factors[...] = jnp.exp2(exponents[chunk:])
    q, r, k = q * later, k * beta * later, k * earlier

    def block(x, b):
        return x[b * rows : (b + 1) * rows]

    def scaled(x, b, first):
        """Block b of x, times its row of `factors` from `first` on."""
        return (block(x, b) * factors[first + b : first + b + 1]).astype(BF16)

    yield
    near_q, near_r, zeros = q.astype(BF16), r.astype(BF16), jnp.zeros((rows, HEAD), BF16)

    def columns(n):
        return jnp.concatenate([zeros if b * rows & levels[n] else scaled(k, b, n * count) for b in range(count)], 0)

    near = dot(jnp.concatenate([near_q, near_r], 0), k.astype(BF16), NT)
    far = []
    for n, size in enumerate(levels):
        changed = [b for b in range(count) if b * rows & size]
        rest = lambda b: b * rows & (size - 1)
        lines = [scaled(x, b, n * count) if rest(b) else block(y, b) for x, y in ((q, near_q), (r, near_r)) for b in changed]
        x = dot(jnp.concatenate(lines, 0), columns(n), NT)
        far.append((changed, x[: chunk // 2], x[chunk // 2 :]))

    yield
    diagonal, outputs = jnp.zeros((rows, chunk), F32), []
    lowers = [[] for _ in levels]
    for b in range(count):
        below, inside, from_here = masks.blocks[b]
        diagonal = diagonal + jnp.where(below, near[chunk + b * rows : chunk + (b + 1) * rows], 0.0)
        # Farthest neighbours first, which lie in the first columns; each next one overwrites all that follows its start.
        x = None
        for n in reversed(range(len(levels))):
            changed, q_far, r_far = far[n]
            if b in changed:
                at = changed.index(b)
                start, in_pair = masks.pairs[n][b]
                x = block(q_far, at) if x is None else jnp.where(start, block(q_far, at), x)
                lowers[n].append(block(r_far, at) if n == len(levels) - 1 else jnp.where(in_pair, block(r_far, at), 0.0))
        own = jnp.where(inside, block(near, b), 0.0)
        outputs.append((own if x is None else jnp.where(from_here, own, x)).astype(BF16))
    lowers = [jnp.concatenate(x, 0) for x in lowers]
    every, start = range(count), len(levels) * count
    q, r, k = (jnp.concatenate([scaled(x, b, first) for b in every], 0) for x, first in ((q, start), (r, start), (k, start + count)))
    return diagonal, lowers, jnp.concatenate(outputs, 0), q, r, k, factors[start + 2 * count : start + 2 * count + 1]


def _solve(units, sums, spread, scratch, form):
    """What the scan needs of a list of (q, k, v, decay, beta) of one chunk of one head each: W bf16 and U without the state fp32 [chunk, HEAD], then
    P, Q e^G, K e^(G_last - G) and e^(G_last) as `_chunk_products` gives them."""
    masks = _Masks(form.chunk, form.rows)
    parts = []
    # A few at a time: side by side, without more live values than it takes.
    for first in range(0, len(units), UNITS_TOGETHER):
        parts += interleave(
            _chunk_products(q, k, decay, beta, sums, scratch.at[n], masks, form.chunk, form.rows)
            for n, (q, k, v, decay, beta) in enumerate(units[first : first + UNITS_TOGETHER], first)
        )
    inverses = substitution([part[0] for part in parts], spread, form.rows)
    for level in range(len(parts[0][1]) - 1):
        inverses = double_blocks(inverses, [part[1][level] for part in parts], form.passes)
    inverses = [x.astype(BF16) for x in inverses]
    rights = [jnp.concatenate([part[4], (unit[2] * unit[4]).astype(BF16)], 1) for unit, part in zip(units, parts)]
    out = []
    for part, halves in zip(parts, solve_halves(inverses, [part[1][-1] for part in parts], rights)):
        w = jnp.concatenate([x[:, :HEAD].astype(BF16) for x in halves], 0)
        u = jnp.concatenate([x[:, HEAD:] for x in halves], 0)
        out.append((w, u, part[2], part[3], part[5], part[6]))
    return out


def _scan(state, w, u, p, q, k, total):
    """One chunk of one head. `state` [values, keys] fp32. Returns the outputs [chunk, HEAD] fp32 and the next state."""
    chunk = w.shape[0]
    read = dot(jnp.concatenate([w, q], 0), state.astype(BF16), NT)
    yield
    u = (u - read[:chunk]).astype(BF16)
    state = state * total + dot(u, k, TN)
    yield
    return read[chunk:] + dot(p, u), state


def _scan_chunks(parts, states, out, form):
    """Outputs and states of all chunks of a program; `parts`: a function that gives what `_scan` needs of a chunk, from its number and place."""
    cells = list(form.cells())
    for c in range(form.chunks):
        here = cells[c * form.heads : (c + 1) * form.heads]
        steps = interleave(_scan(states[cell[1]].astype(F32), *parts(c * form.heads + n, cell)) for n, cell in enumerate(here))
        for (_, h, rows, columns), (o, state) in zip(here, steps):
            states[h] = state.astype(states.dtype)
            out[rows, columns] = o.astype(out.dtype)


@dataclasses.dataclass(frozen=True)
class _Form:
    """What is fixed when a kernel is built: sizes in tokens, heads and chunks a program, and what is done inside."""

    chunk: int
    chunks: int
    heads: int
    rows: int
    passes: int
    convolution: bool
    gate: bool
    norm: bool
    lower_bound: float
    state_in: bool
    state_out: bool

    def cells(self):
        """(chunk, head, rows of a block, columns of a block) of every chunk of a program, a chunk's heads together."""
        for c in range(self.chunks):
            for h in range(self.heads):
                yield c, h, slice(c * self.chunk, (c + 1) * self.chunk), slice(h * HEAD, (h + 1) * HEAD)


def _inputs(refs, tails, form):
    """q, k, v, log2 decays and beta of every chunk of a program in fp32, convolution, gate and norm applied. `refs`: q, k, v, decay, beta and, where
    they are asked for, gate and convolution. `tails`: the last rows of q, k and v before this program."""
    wide, beta_ref, rest = refs[:4], refs[4], list(refs[5:])
    gate_ref = rest.pop(0) if form.gate else None
    weights_ref = rest.pop(0) if form.convolution else None
    units = []
    for c, h, rows, columns in form.cells():
        q, k, v, decay = (ref[rows, columns].astype(F32) for ref in wide)
        if form.convolution:
            start = c * form.chunk
            before = [ref[start - TAIL : start, columns] if c else tails[n, :, columns] for n, ref in enumerate(wide[:3])]
            taps = [weights_ref[n * TAPS : (n + 1) * TAPS, columns] for n in range(3)]
            q, k, v = (_convolution(*x) for x in zip((q, k, v), before, taps))
        decay = _gate(decay, gate_ref[:, columns], form.lower_bound) if form.gate else decay * LOG2_E
        if form.norm:
            q, k = _unit(q, HEAD**-0.5), _unit(k, 1.0)
        units.append((q, k, v, decay, beta_ref[0, rows, h : h + 1].astype(F32)))
    return units


def _convolution(x, before, weights):
    """SiLU of the causal convolution of each column of x [chunk, HEAD], with the rows before it, [TAIL, HEAD]. `weights`: [TAPS, HEAD], halved, the
    last one for the token itself."""
    x = jnp.concatenate([before.astype(F32)[TAIL // 2 :], x], 0)
    half = x * weights[TAPS - 1 :]
    for back in range(1, TAPS):
        half = half + pltpu.roll(x, back, 0) * weights[TAPS - 1 - back : TAPS - back]
    half = half[TAIL // 2 :]
    # y sigmoid(y) with sigmoid(y) = (1 + tanh(y / 2)) / 2.
    return half + half * jnp.tanh(half)


def _gate(x, scale_and_bias, lower_bound):
    """The bounded gate lower_bound sigmoid(exp(a_log) (x + bias)) as log2 decays; `scale_and_bias`: exp(a_log) / 2 and bias, [2, HEAD]."""
    # sigmoid(x) = (1 + tanh(x / 2)) / 2: one transcendental instead of two.
    half = lower_bound * LOG2_E / 2
    return half + half * jnp.tanh((x + scale_and_bias[1:2]) * scale_and_bias[0:1])


def _unit(x, length):
    """Rows scaled to `length`."""
    return x * (lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + NORM_EPSILON) * length)


def _with_states(states, first_ref, last_ref, run):
    """Runs one step of the sequence (the grid's second dimension) between loading the first states and storing the last."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        states[...] = jnp.zeros_like(states) if first_ref is None else first_ref[...].astype(states.dtype)

    run()
    if last_ref is not None:

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            last_ref[...] = states[...].astype(last_ref.dtype)


def _with_tails(tails, refs, form, run):
    """Runs one step of the sequence on the inputs of all its chunks, and keeps the last rows of q, k and v for the next step."""
    if form.convolution:

        @pl.when(pl.program_id(1) == 0)
        def _():
            tails[...] = jnp.zeros_like(tails)

    run(_inputs(refs, tails, form))
    if form.convolution:
        for n, ref in enumerate(refs[:3]):
            tails[n] = ref[form.chunks * form.chunk - TAIL :, :]


def _fused(*refs, form):
    """One program of the fused kernel; the states stay in VMEM over the sequence."""
    refs = list(refs)
    take = lambda count: [refs.pop(0) for _ in range(count)]
    units = take(5 + form.gate + form.convolution)
    sums, spread = take(2)
    (first,) = take(1) if form.state_in else (None,)
    (out,) = take(1)
    (last,) = take(1) if form.state_out else (None,)
    scratch, tails, states = refs

    def run(inputs):
        parts = _solve(inputs, sums[...], spread[...], scratch, form)
        _scan_chunks(lambda n, _: parts[n], states, out, form)

    _with_states(states, first, last, lambda: _with_tails(tails, units, form, run))


def _solve_kernel(*refs, form):
    """One program of the first of two kernels: everything that does not need the state, for the second one to read."""
    count = 5 + form.gate + form.convolution
    sums, spread, w_ref, u_ref, p_ref, q_ref, k_ref, total_ref, scratch, tails = refs[count:]

    def run(inputs):
        for (c, h, rows, columns), (w, u, p, q, k, total) in zip(form.cells(), _solve(inputs, sums[...], spread[...], scratch, form)):
            w_ref[rows, columns], u_ref[rows, columns], q_ref[rows, columns], k_ref[rows, columns] = w, u.astype(BF16), q, k
            p_ref[rows, h * form.chunk : (h + 1) * form.chunk] = p
            total_ref[c, :, columns] = total

    _with_tails(tails, refs[:count], form, run)


def _scan_kernel(*refs, form):
    """One program of the second kernel: states and outputs."""
    refs = list(refs)
    w_ref, u_ref, p_ref, q_ref, k_ref, total_ref = refs[:6]
    del refs[:6]
    first = refs.pop(0) if form.state_in else None
    out = refs.pop(0)
    last = refs.pop(0) if form.state_out else None
    (states,) = refs

    def parts(_, cell):
        c, h, rows, columns = cell
        p = p_ref[rows, h * form.chunk : (h + 1) * form.chunk]
        return w_ref[rows, columns], u_ref[rows, columns].astype(F32), p, q_ref[rows, columns], k_ref[rows, columns], total_ref[c, :, columns]

    _with_states(states, first, last, lambda: _scan_chunks(parts, states, out, form))


def kda(
    q,
    k,
    v,
    decay,
    beta,
    *,
    convolution=None,
    gate=None,
    lower_bound=-5.0,
    qk_norm=False,
    initial_state=None,
    final_state=False,
    kernels=1,
    chunk=128,
    heads_per_program=8,
    chunks_per_program=1,
    pivot_rows=16,
    inverse_passes=3,
    state_format="f32",
    parallel_heads=False,
    out_dtype=BF16,
    interpret=False,
):
    """KDA of one sequence, from its start or from `initial_state`.

    q, k, v [tokens, heads HEAD], decay [tokens, heads HEAD] in nats (at most 0), beta [tokens, heads]. Returns the outputs [tokens, heads HEAD] in
    `out_dtype`, with `final_state` also the states [heads, HEAD keys, HEAD values] fp32, the layout of `initial_state`.

    convolution: three weights [TAPS, heads HEAD], for q, k and v; they then are what goes into causal convolutions, each followed by SiLU. The last
    weight is that of the token itself; before the first token are zeros.
    gate: (a_log [heads], bias [heads HEAD]); `decay` is then what goes into the gate, lower_bound sigmoid(exp(a_log) (decay + bias)).
    qk_norm: q and k are brought to length one and q is scaled by HEAD^-1/2, inside.
    kernels: 1, or 2, of which the first does all that does not need the state and leaves it in HBM.
    chunk: tokens, a power of two from 2 `pivot_rows` to 128. heads_per_program, chunks_per_program: work of a grid step; it is done side by side.
    inverse_passes: bf16 passes of the products of the inverse, 1 or 3. state_format: "f32" or "bf16", as the states are kept between chunks.
    parallel_heads: groups of heads may run on both cores of a chip that JAX shows as one device (v4, v5p).
    """
    tokens, width = q.shape
    heads, group = width // HEAD, heads_per_program
    if width % HEAD or heads % group:
        raise ValueError(f"columns of q: a multiple of {HEAD} heads_per_program = {HEAD * group}, not {width}")
    if chunk not in (32, 64, 128) or pivot_rows not in (16, 32) or chunk < 2 * pivot_rows:
        raise ValueError(f"chunk: 32, 64 or 128, with pivot_rows 16 or 32 at most half of it, not {chunk} and {pivot_rows}")
    if inverse_passes not in (1, 3):
        raise ValueError(f"inverse_passes: 1 or 3, not {inverse_passes}")
    if state_format not in STATE_FORMATS:
        raise ValueError(f"state_format: one of {', '.join(STATE_FORMATS)}, not {state_format}")
    if kernels not in (1, 2):
        raise ValueError(f"kernels: 1 or 2, not {kernels}")
    form = _Form(
        chunk=chunk,
        chunks=chunks_per_program,
        heads=group,
        rows=pivot_rows,
        passes=inverse_passes,
        convolution=convolution is not None,
        gate=gate is not None,
        norm=qk_norm,
        lower_bound=lower_bound,
        state_in=initial_state is not None,
        state_out=final_state,
    )
    block = chunk * chunks_per_program
    padded = -(-tokens // block) * block
    # Tokens after the last: with beta 0 and no decay they leave the state alone.
    pad = lambda x, value=0.0: jnp.pad(x, ((0, padded - tokens), (0, 0)), constant_values=value)
    q, k, v, decay, beta = pad(q), pad(k), pad(v), pad(decay, 0.0 if gate is None else NO_DECAY), pad(beta)
    beta = jnp.transpose(beta.reshape(padded, heads // group, group), (1, 0, 2))
    wide = pl.BlockSpec((block, group * HEAD), lambda h, c: (c, h))
    wide_shape = lambda dtype: jax.ShapeDtypeStruct((padded, width), dtype)
    whole = lambda x: pl.BlockSpec(x.shape, lambda h, c: (0, 0))
    args = [q, k, v, decay, beta]
    specs = [wide] * 4 + [pl.BlockSpec((1, block, group), lambda h, c: (h, c, 0))]
    if gate is not None:
        a_log, bias = gate
        args.append(jnp.stack([jnp.repeat(jnp.exp(a_log.astype(F32)) / 2, HEAD), bias.astype(F32)]))
        specs.append(pl.BlockSpec((2, group * HEAD), lambda h, c: (0, h)))
    if convolution is not None:
        if initial_state is not None:
            raise ValueError("initial_state: a convolution inside starts at the first token of a sequence, it cannot continue one")
        args.append(jnp.concatenate([x.astype(F32) / 2 for x in convolution], 0))
        specs.append(pl.BlockSpec((3 * TAPS, group * HEAD), lambda h, c: (0, h)))
    constants = [jnp.asarray(sums_matrix(chunk, pivot_rows), BF16), jnp.asarray(spread_matrix(chunk, pivot_rows), BF16)]
    args += constants
    specs += [whole(x) for x in constants]
    scratch = pltpu.VMEM((group * chunks_per_program, constants[0].shape[0] - chunk, HEAD), F32)
    tails = pltpu.VMEM((3, TAIL, group * HEAD), BF16)
    states = pltpu.VMEM((group, HEAD, HEAD), STATE_FORMATS[state_format])
    state_spec = pl.BlockSpec((group, HEAD, HEAD), lambda h, c: (h, 0, 0))
    first = [] if initial_state is None else [jnp.swapaxes(initial_state, 1, 2)]
    out_specs = [wide] + [state_spec] * final_state
    out_shape = [wide_shape(out_dtype)] + [jax.ShapeDtypeStruct((heads, HEAD, HEAD), F32)] * final_state
    over_heads = "parallel" if parallel_heads else "arbitrary"

    def call(body, name, args, in_specs, out_specs, out_shape, scratch, over_tokens):
        return pl.pallas_call(
            functools.partial(body, form=form),
            grid=(heads // group, padded // block),
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            scratch_shapes=scratch,
            compiler_params=pltpu.CompilerParams(dimension_semantics=(over_heads, over_tokens), vmem_limit_bytes=VMEM_LIMIT),
            interpret=interpret,
            name=name,
        )(*args)

    if kernels == 1:
        out = call(_fused, "kda", args + first, specs + [state_spec] * len(first), out_specs, out_shape, [scratch, tails, states], "arbitrary")
    else:
        over_tokens = over_heads if convolution is None else "arbitrary"
        p_spec = pl.BlockSpec((block, group * chunk), lambda h, c: (c, h))
        total_spec = pl.BlockSpec((chunks_per_program, 1, group * HEAD), lambda h, c: (c, 0, h))
        between_specs = [wide, wide, p_spec, wide, wide, total_spec]
        between = [wide_shape(BF16)] * 2 + [jax.ShapeDtypeStruct((padded, heads * chunk), BF16)] + [wide_shape(BF16)] * 2
        between.append(jax.ShapeDtypeStruct((padded // chunk, 1, width), F32))
        parts = list(call(_solve_kernel, "kda_solve", args, specs, between_specs, between, [scratch, tails], over_tokens))
        out = call(_scan_kernel, "kda_scan", parts + first, between_specs + [state_spec] * len(first), out_specs, out_shape, [states], "arbitrary")
    if final_state:
        return out[0][:tokens], jnp.swapaxes(out[1], 1, 2)
    return out[0][:tokens]


def program(chip="tpu-v7x", tokens=8192, heads=32, gated=True, convolution=False, **options):
    """`kda` at the size of the paper, for dump.py: the function and the shapes of its arguments. `gated`: gate and norm inside; `convolution`: that
    too. Heads of a program and cores are those that suit `chip`, unless `options` of `kda` say otherwise."""
    if chip not in HEADS_PER_PROGRAM:
        raise ValueError(f"chip: one of {', '.join(HEADS_PER_PROGRAM)}, not {chip}")
    options = {"heads_per_program": HEADS_PER_PROGRAM[chip], "parallel_heads": chip in TWO_CORES, **options}
    shape = jax.ShapeDtypeStruct
    wide = lambda dtype: shape((tokens, heads * HEAD), dtype)
    args = [wide(BF16), wide(BF16), wide(BF16), wide(BF16 if gated else F32), shape((tokens, heads), F32)]
    gate_args = [shape((heads,), F32), shape((heads * HEAD,), F32)] if gated else []
    taps = [shape((TAPS, heads * HEAD), F32)] * 3 if convolution else []

    def run(*args):
        rest = list(args[5:])
        gate = (rest.pop(0), rest.pop(0)) if gated else None
        return kda(*args[:5], gate=gate, qk_norm=gated, convolution=rest or None, **options)

    return run, args + gate_args + taps
