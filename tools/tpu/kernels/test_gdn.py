"""The gated delta rule in interpret mode on the CPU against the token recurrence in float64. Interpret mode does not test the compiled code."""

import jax.numpy as jnp
import numpy as np
import pytest

import gdn
import reference

# Relative root mean square errors, as in test_sla.py: a step of bf16 for unrelated keys, more for alike ones.
STEP = 2.0**-8
ERROR = {0.0: 1.1 * STEP, 0.5: 1.3 * STEP, 0.85: 1.8 * STEP}


def case(tokens, key_heads, values, seed, alike=0.0, largest_decay=0.5):
    """Arrays of the kernel, and outputs and states of the recurrence with the keys repeated for every value head."""
    q, k, *_ = reference.inputs(tokens, key_heads, 128, 1, 1, seed, alike)
    _, _, v, log_decay, beta = reference.inputs(tokens, key_heads * values, 1, 128, 1, seed + 1000, 0.0, largest_decay)
    repeat = lambda x: np.repeat(x, values, axis=1)
    out, state = reference.delta_rule(repeat(q), repeat(k), v, log_decay, beta)
    plan = gdn.Plan(key_heads, 128, values, 128, heads_per_program=key_heads)
    flat = lambda x: jnp.asarray(x.reshape(tokens, -1), jnp.bfloat16)
    single = lambda x: jnp.asarray(x, jnp.float32)
    arrays = flat(q), flat(k), flat(v), gdn.pack_gates(plan, single(log_decay[..., 0]), single(beta))
    state = state.reshape(key_heads, values, 128, 128).swapaxes(1, 2).reshape(key_heads, 128, values * 128)
    return plan, arrays, out.reshape(tokens, -1), state


def check(plan, arrays, out, state, limit):
    got, last = gdn.attention(plan, *arrays, final=True, interpret=True)
    assert reference.relative_rms(got, out) < limit
    assert reference.relative_rms(last, state) < limit


@pytest.mark.parametrize("key_heads, values, seed", [(1, 1, 0), (1, 2, 1), (2, 2, 2), (1, 4, 3)])
def test_value_heads_of_a_key_head(key_heads, values, seed):
    check(*case(200, key_heads, values, seed), ERROR[0.0])  # 200: a ragged tail


@pytest.mark.parametrize("alike", [0.5, 0.85])
def test_alike_keys(alike):
    check(*case(256, 1, 1, 4, alike), ERROR[alike])


def test_any_decay():
    check(*case(256, 1, 2, 5, largest_decay=40.0), ERROR[0.0])


@pytest.mark.parametrize(
    "options",
    [dict(chunk=64, chunks_per_program=2), dict(inverse="block_doubling", inverse_passes=6), dict(state_format="bf16")],
    ids=str,
)
def test_options(options):
    plan, *rest = case(256, 1, 2, 6)
    check(gdn.Plan(1, 128, 2, 128, heads_per_program=1, **options), *rest, ERROR[0.0])


def test_two_calls_are_one():
    plan, arrays, *_ = case(256, 1, 2, 7)
    whole, last = gdn.attention(plan, *arrays, final=True, interpret=True)
    first, state = gdn.attention(plan, *[x[:128] for x in arrays[:3]], arrays[3][..., :128], final=True, interpret=True)
    second, end = gdn.attention(plan, *[x[128:] for x in arrays[:3]], arrays[3][..., 128:], state, True, True)
    assert jnp.array_equal(jnp.concatenate([first, second]), whole)
    assert jnp.array_equal(end, last)


def test_what_has_no_meaning_is_refused():
    for changes, message in (
        (dict(heads_per_program=3), "heads_per_program: a divisor of 16"),
        (dict(chunk=64), "a multiple of 128 tokens"),
        (dict(state_format="row_fp8"), "state_format: one of f32, bf16"),
    ):
        with pytest.raises(ValueError, match=message):
            gdn.program(**changes)
