"""One decode step of GDN, KDA and RWKV6 in Triton: eager, and with a log of updates (DeltaLog).

The eager step reads a whole state and writes it back. DeltaLog keeps a dense base and a log of at most M
low-rank updates (k_j, u_j, L_j), L_j being the cumulative log-decay since the last merge. After n entries the
state they stand for is

    S = exp(L_n) B + sum_j (exp(L_n - L_j) k_j)^T u_j

A token reads base and log, gives its output and appends one entry; the base is written once in M tokens.
Exponents are differences of cumulative decays and never positive, so nothing overflows.

All tensors are contiguous. States [B, H, K, V] are f32, or f64 for tests; arithmetic is done in the format
of the state. K and V are powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Mechanism:
    """What tells the recurrences apart."""

    name: str
    # One decay per key channel; otherwise one per head.
    channel: bool
    # The update is beta (v - k S~) and the output is read after it; otherwise the update is v, and
    # the output is read before it, with the token's own part weighted by a bonus per channel.
    delta: bool


MECHANISMS = {
    "gdn": Mechanism("gdn", channel=False, delta=True),
    "kda": Mechanism("kda", channel=True, delta=True),
    "rwkv6": Mechanism("rwkv6", channel=True, delta=False),
}


@dataclass
class Token:
    """Inputs of one step for all sequences and heads. Queries are scaled, and keys normalised, already."""

    q: torch.Tensor  # [B, H, K]
    k: torch.Tensor  # [B, H, K]
    v: torch.Tensor  # [B, H, V]
    decay: torch.Tensor  # log-decay, [B, H] or [B, H, K]
    beta: torch.Tensor  # [B, H]; read by the delta rule only
    bonus: torch.Tensor  # [H, K]; read by RWKV6 only


@dataclass
class Log:
    """Room for `slots` updates of every state. `decay` is cumulative, [B, H, slots] or [B, H, slots, K]."""

    k: torch.Tensor  # [B, H, slots, K]
    u: torch.Tensor  # [B, H, slots, V]
    decay: torch.Tensor
    # Products of the log with key and query, [B, H, 2, slots] in the format of the state: split replay only.
    products: torch.Tensor

    @property
    def slots(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: value columns of one program, and its warps; `32/4` as text."""

    block_v: int = 32
    warps: int = 4

    def __str__(self) -> str:
        return f"{self.block_v}/{self.warps}"


def empty_log(mechanism: Mechanism, state: torch.Tensor, slots: int, key_type: torch.dtype, update_type: torch.dtype) -> Log:
    """A log for `state` [B, H, K, V]; cumulative decays are in the format of the state."""
    b, h, k, v = state.shape
    like = {"device": state.device}
    return Log(
        torch.zeros(b, h, slots, k, dtype=key_type, **like),
        torch.zeros(b, h, slots, v, dtype=update_type, **like),
        torch.zeros((b, h, slots, k) if mechanism.channel else (b, h, slots), dtype=state.dtype, **like),
        torch.zeros(b, h, 2, slots, dtype=state.dtype, **like),
    )


@triton.jit
def load_decays(log_decay, rows, inside, channels, K: tl.constexpr, CHANNEL: tl.constexpr):
    """Cumulative log-decays of some entries, 0 where there is none: [PADDED, K], or [PADDED]."""
    if CHANNEL:
        return tl.load(log_decay + rows[:, None] * K + channels[None, :], mask=inside[:, None], other=0.0)
    else:
        return tl.load(log_decay + rows, mask=inside, other=0.0)


@triton.jit
def load_decay(log_decay, row, channels, K: tl.constexpr, CHANNEL: tl.constexpr):
    """One row of log-decays: [K], or one number."""
    if CHANNEL:
        return tl.load(log_decay + row * K + channels)
    else:
        return tl.load(log_decay + row)


@triton.jit
def log_products(key, query, seen, keys, decays, CHANNEL: tl.constexpr):
    """Products of all logged keys, decayed up to `seen`, with the token's key and query: two [PADDED]."""
    keys = keys.to(key.dtype)
    if CHANNEL:
        keys *= tl.exp(seen[None, :] - decays)
        return tl.sum(keys * key[None, :], 1), tl.sum(keys * query[None, :], 1)
    else:
        decay = tl.exp(seen - decays)
        return tl.sum(keys * key[None, :], 1) * decay, tl.sum(keys * query[None, :], 1) * decay


@triton.jit
def replayed(
    tile, now, log_k, log_u, log_decay, first, columns, length,
    K: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """Columns of the base, decayed up to `now`, with the logged updates of rows from `first` on added."""
    channels = tl.arange(0, K)
    if CHANNEL:
        tile *= tl.exp(now)[:, None]
    else:
        tile *= tl.exp(now)
    # Unrolled, so that the loads of all entries are under way together.
    for entry in tl.static_range(PADDED):
        inside = entry < length
        row = first + entry
        some = channels < tl.where(inside, K, 0)
        key = tl.load(log_k + row * K + channels, mask=some, other=0.0)
        update = tl.load(log_u + row * V + columns, mask=columns < tl.where(inside, V, 0), other=0.0)
        if CHANNEL:
            then = tl.load(log_decay + row * K + channels, mask=some, other=0.0)
        else:
            then = tl.load(log_decay + row, mask=inside, other=0.0)
        key = key.to(tile.dtype) * tl.exp(now - then)
        tile += key[:, None] * update.to(tile.dtype)[None, :]
    return tile


@triton.jit
def append_shared(log_k, log_decay, row, key, now, channels, K: tl.constexpr, CHANNEL: tl.constexpr):
    """What all value columns of an entry share: its key and the cumulative decay."""
    tl.store(log_k + row * K + channels, key.to(log_k.dtype.element_ty))
    if CHANNEL:
        tl.store(log_decay + row * K + channels, now)
    else:
        tl.store(log_decay + row, now)


@triton.jit(do_not_specialize=["length", "slots"])
def step_kernel(
    q, k, v, decay, beta, bonus, out, base, log_k, log_u, log_decay, products, heads, slots, length,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PADDED: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, SPLIT: tl.constexpr, APPEND: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """One token on some value columns of one state, after `length` entries, for which `PADDED` rows are worked on.

    Without entries and with MERGE it is the eager step.
    """
    program = tl.program_id(0)
    state = (program // (V // BLOCK_V)).to(tl.int64)
    block = program % (V // BLOCK_V)
    channels = tl.arange(0, K)
    columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
    number = base.dtype.element_ty

    # All loads come first: a sum ends in a barrier, over which no load is moved.
    cells = base + state * K * V + channels[:, None] * V + columns[None, :]
    tile = tl.load(cells)
    first = state * slots
    if PADDED > 0:
        entries = tl.arange(0, PADDED)
        inside = entries < length
        rows = first + entries
        updates = tl.load(log_u + rows[:, None] * V + columns[None, :], mask=inside[:, None], other=0.0)
        past = load_decay(log_decay, first + length - 1, channels, K, CHANNEL)
        if SPLIT:
            key_products = tl.load(products + 2 * first + entries, mask=inside, other=0.0)
            query_products = tl.load(products + 2 * first + slots + entries, mask=inside, other=0.0)
        else:
            keys = tl.load(log_k + rows[:, None] * K + channels[None, :], mask=inside[:, None], other=0.0)
            decays = load_decays(log_decay, rows, inside, channels, K, CHANNEL)
    key = tl.load(k + state * K + channels).to(number)
    query = tl.load(q + state * K + channels).to(number)
    value = tl.load(v + state * V + columns).to(number)
    now = load_decay(decay, state, channels, K, CHANNEL).to(number)
    if DELTA:
        rate = tl.load(beta + state).to(number)
    else:
        weights = tl.load(bonus + (state % heads) * K + channels).to(number)

    # What the token reads: the state decayed by its own decay too, but in RWKV6 the state before it.
    seen = now if DELTA else now - now
    if PADDED > 0:
        now += past
        seen += past
        if not SPLIT:
            key_products, query_products = log_products(key, query, seen, keys, decays, CHANNEL)
    read = tl.sum(tile * (query * tl.exp(seen))[:, None], 0)
    if DELTA:
        predicted = tl.sum(tile * (key * tl.exp(seen))[:, None], 0)
    if PADDED > 0:
        read += tl.sum(updates.to(number) * query_products[:, None], 0)
        if DELTA:
            predicted += tl.sum(updates.to(number) * key_products[:, None], 0)
    if DELTA:
        update = rate * (value - predicted)
        own = tl.sum(query * key, 0)
    else:
        update = value
        own = tl.sum(query * key * weights, 0)
    tl.store(out + state * V + columns, (read + own * update).to(out.dtype.element_ty))

    if APPEND:
        tl.store(log_u + (first + length) * V + columns, update.to(log_u.dtype.element_ty))
        # One program of a state writes what all share; in split replay the first kernel did.
        if not SPLIT:
            if block == 0:
                append_shared(log_k, log_decay, first + length, key, now, channels, K, CHANNEL)
    if MERGE:
        tile = replayed(tile, now, log_k, log_u, log_decay, first, columns, length, K, V, PADDED, CHANNEL)
        tl.store(cells, tile + key[:, None] * update[None, :])


@triton.jit(do_not_specialize=["length", "slots"])
def products_kernel(
    q, k, decay, log_k, log_decay, products, slots, length,
    K: tl.constexpr, PADDED: tl.constexpr, CHANNEL: tl.constexpr, DELTA: tl.constexpr, APPEND: tl.constexpr,
):  # fmt: skip
    """First kernel of split replay: what all value columns of one state share, computed once."""
    state = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, K)
    number = products.dtype.element_ty
    first = state * slots
    key = tl.load(k + state * K + channels).to(number)
    now = load_decay(decay, state, channels, K, CHANNEL).to(number)
    seen = now if DELTA else now - now
    if PADDED > 0:
        query = tl.load(q + state * K + channels).to(number)
        past = load_decay(log_decay, first + length - 1, channels, K, CHANNEL)
        now += past
        seen += past
        entries = tl.arange(0, PADDED)
        inside = entries < length
        rows = first + entries
        keys = tl.load(log_k + rows[:, None] * K + channels[None, :], mask=inside[:, None], other=0.0)
        decays = load_decays(log_decay, rows, inside, channels, K, CHANNEL)
        key_products, query_products = log_products(key, query, seen, keys, decays, CHANNEL)
        tl.store(products + 2 * first + entries, key_products, mask=inside)
        tl.store(products + 2 * first + slots + entries, query_products, mask=inside)
    if APPEND:
        append_shared(log_k, log_decay, first + length, key, now, channels, K, CHANNEL)


@triton.jit(do_not_specialize=["length", "slots"])
def merge_kernel(
    base, log_k, log_u, log_decay, slots, length,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PADDED: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """Replays the log into some value columns of one base."""
    program = tl.program_id(0)
    state = (program // (V // BLOCK_V)).to(tl.int64)
    channels = tl.arange(0, K)
    columns = program % (V // BLOCK_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    cells = base + state * K * V + channels[:, None] * V + columns[None, :]
    tile = tl.load(cells)
    first = state * slots
    now = load_decay(log_decay, first + length - 1, channels, K, CHANNEL)
    tl.store(cells, replayed(tile, now, log_k, log_u, log_decay, first, columns, length, K, V, PADDED, CHANNEL))


def padded(length: int) -> int:
    """Rows that a kernel works on for a log of this length; every such number is a kernel of its own."""
    return triton.next_power_of_2(length) if length else 0


def check_length(length: int, slots: int, least: int = 0) -> None:
    if not least <= length <= slots:
        raise ValueError(f"length {length} of a log with {slots} slots: has to lie between {least} and {slots}")


def eager(mechanism: Mechanism, token: Token, state: torch.Tensor, out: torch.Tensor, launch: Launch) -> None:
    """Reads and writes the whole state [B, H, K, V]; the output [B, H, V] goes to `out`."""
    b, h, k, v = state.shape
    step_kernel[(b * h * (v // launch.block_v),)](
        token.q, token.k, token.v, token.decay, token.beta, token.bonus, out, state, state, state, state, state, h, 0, 0,
        K=k, V=v, BLOCK_V=launch.block_v, PADDED=0, CHANNEL=mechanism.channel, DELTA=mechanism.delta,
        SPLIT=False, APPEND=False, MERGE=True, num_warps=launch.warps,
    )  # fmt: skip


def logged(
    mechanism: Mechanism, token: Token, base: torch.Tensor, log: Log, length: int, out: torch.Tensor, launch: Launch,
    merge: bool = False, split: bool = False,
) -> None:  # fmt: skip
    """One token after `length` entries: appends an entry or, with `merge`, writes the base with all entries and its own
    update in it, after which the log counts as empty. With `split` a kernel of its own computes the products first."""
    b, h, k, v = base.shape
    check_length(length, log.slots - 1)
    if split:
        products_kernel[(b * h,)](
            token.q, token.k, token.decay, log.k, log.decay, log.products, log.slots, length,
            K=k, PADDED=padded(length), CHANNEL=mechanism.channel, DELTA=mechanism.delta, APPEND=not merge, num_warps=2,
        )  # fmt: skip
    step_kernel[(b * h * (v // launch.block_v),)](
        token.q, token.k, token.v, token.decay, token.beta, token.bonus, out, base, log.k, log.u, log.decay, log.products, h, log.slots, length,
        K=k, V=v, BLOCK_V=launch.block_v, PADDED=padded(length), CHANNEL=mechanism.channel, DELTA=mechanism.delta,
        SPLIT=split, APPEND=not merge, MERGE=merge, num_warps=launch.warps,
    )  # fmt: skip


def merge(mechanism: Mechanism, base: torch.Tensor, log: Log, length: int, launch: Launch) -> None:
    """Replays `length` entries into the base, without a token; after it the log counts as empty."""
    b, h, k, v = base.shape
    check_length(length, log.slots, 1)
    merge_kernel[(b * h * (v // launch.block_v),)](
        base, log.k, log.u, log.decay, log.slots, length,
        K=k, V=v, BLOCK_V=launch.block_v, PADDED=padded(length), CHANNEL=mechanism.channel,
        num_warps=launch.warps,
    )  # fmt: skip


def cycle_step(
    mechanism: Mechanism, token: Token, base: torch.Tensor, log: Log, step: int, out: torch.Tensor, append: Launch, merging: Launch,
    fused: bool = True, split: bool = False,
) -> None:  # fmt: skip
    """Step `step`, counted from 0, of decoding with a merge every `log.slots` tokens.

    Fused, the last token of an interval merges: it writes the base itself and no entry. Otherwise it
    appends as the others do, and a merge of the full log follows.
    """
    length = step % log.slots
    last = length == log.slots - 1
    logged(mechanism, token, base, log, length, out, merging if last and fused else append, merge=last and fused, split=split)
    if last and not fused:
        merge(mechanism, base, log, log.slots, merging)
