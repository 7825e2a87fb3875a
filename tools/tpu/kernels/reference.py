"""The token by token recurrence in float64 and random inputs, to hold the kernels against. NumPy only."""

import numpy as np


def delta_rule(q, k, v, log_decay, beta, state=None):
    """Gated delta rule, one token after the other.

    q, k [T, H, dk]; v [T, H, dv]; log_decay [T, H, g] with g dividing dk (1: per head, dk: per channel, between: per tile of key channels);
    beta [T, H]. Returns the outputs [T, H, dv] and the last state [H, dk, dv], all float64:
    S <- exp(log_decay) S + beta k (v - kᵀ (exp(log_decay) S))ᵀ, o = qᵀ S.
    """
    tokens, heads, key_dim = q.shape
    state = np.zeros((heads, key_dim, v.shape[-1])) if state is None else np.array(state, np.float64)
    decay = np.exp(np.repeat(log_decay, key_dim // log_decay.shape[-1], axis=-1))
    out = np.zeros((tokens, heads, v.shape[-1]))
    for t in range(tokens):
        state *= decay[t][:, :, None]
        update = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        state += k[t][:, :, None] * update[:, None, :]
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
    return out, state


def relative_rms(got, expected):
    """Root mean square of the difference over that of the expected values."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


def to_bf16(x):
    """The nearest bf16 numbers, ties to even, as float64."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def unit(x):
    """Rows of length one."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))


def inputs(tokens, heads, key_dim, value_dim, tiles, seed, alike=0.0, largest_decay=0.5):
    """Random q, k, v (rounded to bf16, q and k of length one, q scaled by key_dim^-1/2), log decays and betas (rounded to fp32), as float64.

    `alike`: expected cosine of any two keys of a head. `largest_decay`: nats per token. beta lies in (0, 2): eigenvalues down to -1.
    """
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.normal(size=shape)
    common = unit(normal(1, heads, key_dim))
    q = unit(normal(tokens, heads, key_dim)) * key_dim**-0.5
    k = unit(unit(normal(tokens, heads, key_dim)) * np.sqrt(1 - alike) + common * np.sqrt(alike))
    v = normal(tokens, heads, value_dim)
    log_decay = -largest_decay * random.uniform(size=(tokens, heads, tiles)) ** 3
    beta = 2 / (1 + np.exp(-normal(tokens, heads)))
    single = lambda x: np.asarray(x, np.float32).astype(np.float64)
    return to_bf16(q), to_bf16(k), to_bf16(v), single(log_decay), single(beta)


def convolved(x, weights):
    """Causal depthwise convolution of x [T, channels] with weights [taps, channels], the last row for the token itself, then SiLU."""
    taps = len(weights)
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    y = sum(weights[tap] * padded[tap : tap + len(x)] for tap in range(taps))
    return y * sigmoid(y)


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1 / (1 + np.exp(-x))
