"""Gated delta rule, forward, as a Pallas kernel for a TPU core: one decay and one step size per value head, several value heads to a key head.

One sequence; `jax.vmap` adds a batch. Arrays, with `value_width` = value heads of a key head x value_dim:

    q, k    [tokens, key_heads x key_dim]      bf16, rows of a head of length one, q scaled
    v       [tokens, key_heads x value_width]  bf16
    gates   [key_heads, gate_rows, tokens]     fp32, see `pack_gates`: log decays of the value heads, then their step sizes beta
    state   [key_heads, key_dim, value_width]  fp32
    output  [tokens, key_heads x value_width]  bf16

Per key head k k^T, q k^T and the products with the states of all its value heads are made once. Per value head and chunk, with g the running
sums of its log decays inside the chunk and M_ij = beta_j e^(g_i - g_j), whose exponents are never positive where they count:

    A = k k^T . M below the diagonal, P = q k^T . M up to the diagonal
    U = (I + A)^-1 (V - e^g k S), output = e^g q S + P U, next state = e^g_last S + (beta e^(g_last - g) k)^T U
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from products import INVERSES, NT, dot, dot_pieces, inverse, rows_and_columns, same_block, split

LANES = 128
SUBLANES = 8
STATE_FORMATS = {"f32": jnp.float32, "bf16": jnp.bfloat16}
VMEM_LIMIT = 64 << 20  # bytes a kernel may take


@dataclass(frozen=True)
class Plan:
    """Sizes of a layer and how the kernel goes about it. `checked` refuses what has no meaning."""

    key_heads: int
    key_dim: int
    values_per_key: int
    value_dim: int
    heads_per_program: int = 4  # key heads
    chunk: int = 128
    chunks_per_program: int = 1
    inverse: str = "packed_doubling"
    inverse_passes: int = 3
    inverse_start: int = 16  # rows of the blocks that packed doubling and hybrid start from
    neumann_steps: int = 4
    state_format: str = "f32"

    @property
    def tokens(self):
        """Tokens of a program."""
        return self.chunk * self.chunks_per_program

    @property
    def value_width(self):
        """Values of a key head."""
        return self.values_per_key * self.value_dim

    @property
    def gate_rows(self):
        """Rows of the gates of a key head: log decays, step sizes, zeros up to whole registers."""
        return -(-2 * self.values_per_key // SUBLANES) * SUBLANES

    def checked(self):
        """The plan itself, or ValueError."""
        for name in ("key_heads", "values_per_key", "heads_per_program", "chunks_per_program", "neumann_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: 1 or more, not {getattr(self, name)}")
        if self.key_heads % self.heads_per_program:
            raise ValueError(f"heads_per_program: a divisor of {self.key_heads} key heads, not {self.heads_per_program}")
        if self.chunk not in (16, 32, 64, 128):
            raise ValueError(f"chunk: 16, 32, 64 or 128 tokens, not {self.chunk}")
        if self.tokens % LANES:
            raise ValueError(f"chunk x chunks_per_program: a multiple of {LANES} tokens, not {self.tokens}")
        if self.key_dim % LANES or self.value_dim % LANES or not self.key_dim or not self.value_dim:
            raise ValueError(f"key_dim, value_dim: multiples of {LANES}, not {self.key_dim}, {self.value_dim}")
        if self.inverse not in INVERSES:
            raise ValueError(f"inverse: one of {', '.join(INVERSES)}, not {self.inverse}")
        if self.inverse_passes not in (1, 3, 6):
            raise ValueError(f"inverse_passes: 1, 3 or 6, not {self.inverse_passes}")
        if self.inverse_start not in (16, 32, 64):
            raise ValueError(f"inverse_start: 16, 32 or 64 rows, not {self.inverse_start}")
        if self.state_format not in STATE_FORMATS:
            raise ValueError(f"state_format: one of {', '.join(STATE_FORMATS)}, not {self.state_format}")
        return self


def pack_gates(plan, log_decay, beta):
    """[tokens, value heads] both, the value heads of a key head side by side, as the kernel takes them: fp32 [key_heads, gate_rows, tokens]."""
    tokens = log_decay.shape[0]
    parts = [x.reshape(tokens, plan.key_heads, plan.values_per_key) for x in (log_decay, beta)]
    parts.append(jnp.zeros((tokens, plan.key_heads, plan.gate_rows - 2 * plan.values_per_key)))
    return jnp.transpose(jnp.concatenate(parts, -1), (1, 2, 0)).astype(jnp.float32)


def _kernel(q_ref, k_ref, v_ref, gates_ref, *refs, plan, initial, final):
    """Lists run over (chunk, key head, value head) of the program, so that independent products stand side by side."""
    refs = list(refs)
    initial_ref = refs.pop(0) if initial else None
    out = refs.pop(0)
    final_ref = refs.pop(0) if final else None
    (states,) = refs
    heads, values, chunk = range(plan.heads_per_program), range(plan.values_per_key), plan.chunk

    @pl.when(pl.program_id(1) == 0)
    def _():
        states[...] = jnp.zeros_like(states) if initial_ref is None else initial_ref[...].astype(states.dtype)

    gates = gates_ref[...].reshape(plan.heads_per_program * plan.gate_rows, plan.tokens)
    row, column = rows_and_columns(plan.tokens)
    ones = jnp.where(same_block(row, column, chunk) & (row <= column), 1.0, 0.0).astype(jnp.bfloat16)
    sums = dot_pieces(split(gates, 3), [ones])
    turned = jnp.transpose(sums)
    rows = [slice(c * chunk, (c + 1) * chunk) for c in range(plan.chunks_per_program)]
    columns = lambda ref, h, width, of: ref[of, h * width : (h + 1) * width]
    state_columns = lambda r: slice(r * plan.value_dim, (r + 1) * plan.value_dim)
    row, column = rows_and_columns(chunk)
    below, upto = row > column, row >= column

    pairs = {}  # keys above queries, and their products with the keys, of a chunk and key head
    for c, of in enumerate(rows):
        for h in heads:
            keys = columns(k_ref, h, plan.key_dim, of)
            both = jnp.concatenate([keys, columns(q_ref, h, plan.key_dim, of)], 0)
            pairs[c, h] = both, dot(both, keys, NT), jnp.transpose(keys.astype(jnp.float32))

    def read(c, h):
        """Products of keys and queries with the states of all value heads of a key head."""
        return dot(pairs[c, h][0], states[h].astype(jnp.bfloat16))

    # The first chunk reads the states before the inverses are there, while the matrix unit waits for them.
    reads = {h: read(0, h) for h in heads}
    units = [(c, h, r) for c in range(plan.chunks_per_program) for h in heads for r in values]
    grams, products, decays, writes = [], [], [], []
    for c, h, r in units:
        gate, of = h * plan.gate_rows + r, rows[c]
        over_lanes = jnp.broadcast_to(turned[of, gate : gate + 1], (chunk, LANES))
        along, beta = sums[gate : gate + 1, of], gates[gate + plan.values_per_key : gate + plan.values_per_key + 1, of]
        mask = jnp.exp(jnp.where(upto, over_lanes[:, :chunk] - along, 0.0)) * beta
        grams.append(jnp.where(below, pairs[c, h][1][:chunk] * mask, 0.0))
        products.append(jnp.where(upto, pairs[c, h][1][chunk:] * mask, 0.0).astype(jnp.bfloat16))
        decays.append(jnp.concatenate([jnp.exp(over_lanes)] * (plan.value_dim // LANES), 1))
        writes.append((pairs[c, h][2] * (jnp.exp(along[:, chunk - 1 :] - along) * beta)).astype(jnp.bfloat16))
    inverses = inverse(grams, chunk, plan.inverse, plan.inverse_passes, plan.neumann_steps, plan.inverse_start)
    inverses = [x.astype(jnp.bfloat16) for x in inverses]
    for c, of in enumerate(rows):
        if c:
            reads = {h: read(c, h) for h in heads}
        of_chunk = [(i, h, r) for i, (unit_chunk, h, r) in enumerate(units) if unit_chunk == c]
        values_of = lambda h, r: slice(h * plan.value_width + r * plan.value_dim, h * plan.value_width + (r + 1) * plan.value_dim)
        rest = [v_ref[of, values_of(h, r)].astype(jnp.float32) - decays[i] * reads[h][:chunk, state_columns(r)] for i, h, r in of_chunk]
        updates = [dot(inverses[i], x.astype(jnp.bfloat16)).astype(jnp.bfloat16) for (i, _, _), x in zip(of_chunk, rest)]
        for (i, h, r), update in zip(of_chunk, updates):
            # One product of the updates with keys and with P: the updates enter the matrix unit once.
            added = dot(jnp.concatenate([writes[i], products[i]], 0), update)
            kept = states[h, :, state_columns(r)].astype(jnp.float32) * decays[i][chunk - 1 :]
            states[h, :, state_columns(r)] = (kept + added[: plan.key_dim]).astype(states.dtype)
            out[of, values_of(h, r)] = (decays[i] * reads[h][chunk:, state_columns(r)] + added[plan.key_dim :]).astype(out.dtype)
    if final:

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            final_ref[...] = states[...].astype(jnp.float32)


def attention(plan, q, k, v, gates, initial=None, final=False, interpret=False):
    """Ops 3 to 7a in one kernel. Returns the output, with `final` also the states after the last token. ValueError for a wrong plan or shape."""
    total, key_width, value_width = q.shape[0], plan.checked().key_heads * plan.key_dim, plan.key_heads * plan.value_width
    shapes = [(total, key_width), (total, key_width), (total, value_width), (plan.key_heads, plan.gate_rows, total)]
    state_shape = (plan.key_heads, plan.key_dim, plan.value_width)
    for name, array, shape in zip(("q", "k", "v", "gates", "initial"), (q, k, v, gates, initial), [*shapes, state_shape]):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: shape {shape}, not {array.shape}")
    missing = -total % plan.tokens
    if missing:  # added tokens have no key, no value, beta 0 and log decay 0: nothing changes
        q, k, v = (jnp.pad(x, ((0, missing), (0, 0))) for x in (q, k, v))
        gates = jnp.pad(gates, ((0, 0), (0, 0), (0, missing)))
    heads = plan.heads_per_program
    wide = lambda width: pl.BlockSpec((plan.tokens, heads * width), lambda h, c: (c, h))
    states = pl.BlockSpec((heads, plan.key_dim, plan.value_width), lambda h, c: (h, 0, 0))
    gate_block = pl.BlockSpec((heads, plan.gate_rows, plan.tokens), lambda h, c: (h, 0, c))
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan, initial=initial is not None, final=final),
        grid=(plan.key_heads // heads, v.shape[0] // plan.tokens),
        in_specs=[wide(plan.key_dim), wide(plan.key_dim), wide(plan.value_width), gate_block, *[states] * (initial is not None)],
        out_specs=[wide(plan.value_width), *[states] * final],
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), *[jax.ShapeDtypeStruct(state_shape, jnp.float32)] * final],
        scratch_shapes=[pltpu.VMEM((heads, plan.key_dim, plan.value_width), STATE_FORMATS[plan.state_format])],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
        name="gdn",
    )(q, k, v, gates, *[initial] * (initial is not None))
    return (out[0][:total], out[1]) if final else out[0][:total]


def program(tokens=8192, key_heads=16, key_dim=128, values_per_key=2, value_dim=128, initial=False, final=False, **options):
    """A function to compile and the shapes of its arguments, by default with the heads of Qwen3-Next; `options` are those of `Plan`."""
    plan = Plan(key_heads, key_dim, values_per_key, value_dim, **options).checked()
    shape, columns = jax.ShapeDtypeStruct, (key_heads * key_dim, key_heads * key_dim, key_heads * plan.value_width)
    arguments = [shape((tokens, width), jnp.bfloat16) for width in columns] + [shape((key_heads, plan.gate_rows, tokens), jnp.float32)]
    if initial:
        arguments.append(shape((key_heads, key_dim, plan.value_width), jnp.float32))
    return (lambda *arrays: attention(plan, *arrays[:4], *arrays[4:], final=final)), tuple(arguments)
