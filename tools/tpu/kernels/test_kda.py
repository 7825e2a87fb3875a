"""The KDA kernels in interpret mode on the CPU, against the token by token recurrence in float64.

Tolerances. An operand of a product is rounded to bf16, a relative error of 2^-9 / sqrt(3) = 1.1e-3 root mean square. On the way of an output lie about
ten such roundings that add independently (q, k, beta k with their decays, beta v, P, inverse, W, U twice, state): sqrt(10) x 1.1e-3 = 3.6e-3.
Keys of expected cosine c leave differences of relative size (1 - c)^1/2 for the inverse to work with, and errors grow by its reciprocal.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Interpreted kernels are run once: compiling them without optimisation is what is fast.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from kda import HEAD, kda

TOLERANCE = 4.0e-3


def run(values, **options):
    """Kernel on (q, k, v, log decay, beta) of `reference.inputs`: outputs [tokens, heads, HEAD] and, where asked for, states."""
    tokens, heads = values[4].shape
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32)
    args = [jnp.asarray(x.reshape(tokens, -1), dtype) for x, dtype in zip(values, dtypes)]
    options = {"heads_per_program": heads, "chunk": 64, "out_dtype": jnp.float32, "interpret": True, **options}
    out = kda(*args, **options)
    if options.get("final_state"):
        return np.asarray(out[0]).reshape(tokens, heads, HEAD), np.asarray(out[1])
    return np.asarray(out).reshape(tokens, heads, HEAD)


def inputs(tokens, heads=1, seed=1, **options):
    return reference.inputs(tokens, heads, HEAD, HEAD, HEAD, seed, **options)


@pytest.mark.parametrize("chunk, seed, largest_decay", [(64, 1, 0.5), (64, 2, 5.0), (128, 3, 5.0)])
def test_outputs_and_states_follow_the_recurrence(chunk, seed, largest_decay):
    values = inputs(256, seed=seed, largest_decay=largest_decay)
    expected, state = reference.delta_rule(*values)
    out, last = run(values, chunk=chunk, final_state=True)
    assert reference.relative_rms(out, expected) < TOLERANCE
    assert reference.relative_rms(last, state) < TOLERANCE


def test_every_token_at_the_largest_decay_is_finite():
    values = list(inputs(128, seed=4))
    values[3] = np.full_like(values[3], -5.0)
    expected, _ = reference.delta_rule(*values)
    assert reference.relative_rms(run(values, chunk=128), expected) < TOLERANCE


def test_alike_keys():
    values = inputs(128, seed=5, alike=0.5)
    expected, _ = reference.delta_rule(*values)
    assert reference.relative_rms(run(values), expected) < 2**0.5 * TOLERANCE


def test_a_ragged_tail_leaves_outputs_and_state_alone():
    values = inputs(100, seed=6)
    expected, state = reference.delta_rule(*values)
    out, last = run(values, final_state=True)
    assert out.shape == expected.shape
    assert reference.relative_rms(out, expected) < TOLERANCE
    assert reference.relative_rms(last, state) < TOLERANCE


def test_a_state_continues_a_sequence():
    values = inputs(128, seed=7)
    expected, _ = reference.delta_rule(*values)
    first, state = run([x[:64] for x in values], final_state=True)
    second = run([x[64:] for x in values], initial_state=jnp.asarray(state))
    assert reference.relative_rms(np.concatenate([first, second]), expected) < TOLERANCE


def test_heads_and_chunks_of_a_program_are_independent_of_each_other():
    values = inputs(256, heads=2, seed=8)
    expected, _ = reference.delta_rule(*values)
    assert reference.relative_rms(run(values, chunks_per_program=2), expected) < TOLERANCE
    assert reference.relative_rms(run(values, heads_per_program=1), expected) < TOLERANCE


def test_two_kernels_differ_from_one_by_the_rounding_between_them():
    values = inputs(128, seed=9)
    expected, _ = reference.delta_rule(*values)
    two = run(values, kernels=2)
    # U is rounded to bf16 on its way, and larger than what W S leaves of it: up to two roundings more.
    rounding = 2 * 2**-9 / 3**0.5
    assert reference.relative_rms(two, expected) < (TOLERANCE**2 + rounding**2) ** 0.5
    assert reference.relative_rms(two, run(values)) < rounding


def test_fewer_passes_and_a_bf16_state_cost_accuracy_but_not_the_result():
    values = inputs(256, seed=10)
    expected, _ = reference.delta_rule(*values)
    out = run(values, inverse_passes=1, state_format="bf16")
    # One more operand rounded on the path of the state, and the inverse as accurate as any bf16 operand.
    assert reference.relative_rms(out, expected) < 1.5 * TOLERANCE


def gated(tokens, heads, seed):
    """Inputs with a gate and a norm inside, the gate, and what the recurrence is to be given instead."""
    random = np.random.default_rng(seed)
    q, k, v, _, beta = inputs(tokens, heads, seed=seed)
    q, k = (reference.to_bf16(x * random.uniform(0.5, 20, size=(tokens, heads, 1))) for x in (q, k))
    before = reference.to_bf16(random.normal(size=(tokens, heads, HEAD)) * 2 - 2)
    a_log, bias = (x.astype(np.float32) for x in (random.uniform(0, 1, heads), random.normal(size=heads * HEAD)))
    log_decay = -5.0 / (1 + np.exp(-np.exp(a_log.astype(np.float64))[:, None] * (before + bias.reshape(heads, HEAD))))
    return (q, k, v, before, beta), (jnp.asarray(a_log), jnp.asarray(bias)), log_decay


def normed(q, k):
    return reference.unit(q) * HEAD**-0.5, reference.unit(k)


def test_gate_and_norm_inside():
    values, gate, log_decay = gated(100, 1, seed=11)
    expected, state = reference.delta_rule(*normed(*values[:2]), values[2], log_decay, values[4])
    out, last = run(values, gate=gate, qk_norm=True, final_state=True)
    assert reference.relative_rms(out, expected) < TOLERANCE
    assert reference.relative_rms(last, state) < TOLERANCE


@pytest.mark.parametrize("options", [{"chunks_per_program": 2}, {"kernels": 2}])
def test_convolution_gate_and_norm_inside(options):
    values, gate, log_decay = gated(256 if "chunks_per_program" in options else 128, 1, seed=12)
    weights = [np.random.default_rng(seed).normal(size=(4, HEAD)).astype(np.float32) for seed in (13, 14, 15)]

    def convolved(x, w):
        y = sum(w[3 - back] * np.concatenate([np.zeros((back, *x.shape[1:])), x[: len(x) - back]]) for back in range(4))
        return y / (1 + np.exp(-y))

    q, k, v = (convolved(x, w.astype(np.float64).reshape(4, 1, HEAD)) for x, w in zip(values, weights))
    expected, _ = reference.delta_rule(*normed(q, k), v, log_decay, values[4])
    out = run(values, gate=gate, qk_norm=True, convolution=[jnp.asarray(w) for w in weights], **options)
    rounding = 2 * 2**-9 / 3**0.5 if "kernels" in options else 0
    assert reference.relative_rms(out, expected) < (TOLERANCE**2 + rounding**2) ** 0.5


@pytest.mark.parametrize("options, said", [({"chunk": 48}, "chunk"), ({"inverse_passes": 2}, "inverse_passes"), ({"heads_per_program": 3}, "columns")])
def test_bad_options_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        run(inputs(64, heads=2), **options)
