"""The SLA kernels in interpret mode on the CPU against the token recurrence in float64. Interpret mode does not test the compiled code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
import sla

# Relative root mean square errors. Operands are rounded to bf16, a step of 2^-8: with unrelated keys errors come out at 0.9 of that step, and
# alike keys, whose inverse is worse conditioned, multiply them (a first study with another kernel of ours: 3.7e-3, 4.4e-3, 6.5e-3).
STEP = 2.0**-8
ERROR = {0.0: 1.1 * STEP, 0.5: 1.3 * STEP, 0.85: 1.8 * STEP}
# e4m3 keeps three bits after the leading one: a relative rounding error of 2^-4 at most, 2^-4 / sqrt(3) in the mean of squares.
FP8_STATE = 2.0**-4 / 3**0.5
# Of an output read from such a state, after thousands of tokens: 8e-3 by a plain emulation of the format.
FP8_OUTPUT = 8e-3


def bf16(x):
    """[tokens, heads, width] as the kernels take it."""
    return jnp.asarray(x.reshape(len(x), -1), jnp.bfloat16)


def packed(q, k, v, log_decay, beta):
    """Arrays of the kernel from those of the recurrence."""
    return bf16(q), bf16(k), bf16(v), sla.pack_gates(jnp.asarray(log_decay, jnp.float32), jnp.asarray(beta, jnp.float32))


def errors(inputs, run=sla.attention, heads=2, key_dim=128, value_width=256, **options):
    """Relative errors of output and last state."""
    log_decay = inputs[3]
    expected, state = reference.delta_rule(*inputs)
    plan = sla.Plan(heads, key_dim, value_width, log_decay.shape[-1], **{"heads_per_program": heads, **options})
    got, last = run(plan, *packed(*inputs), final=True, interpret=True)
    return reference.relative_rms(got, expected.reshape(got.shape)), reference.relative_rms(last, state)


@pytest.mark.parametrize(
    "seed, options",
    [
        (0, dict()),
        (1, dict(heads_per_program=1, inverse="hybrid")),
        (2, dict(chunk=64, chunks_per_program=2, form_w=True, inverse_passes=6)),
        (3, dict(inverse_start=32, state_format="bf16")),
        (4, dict(gram="per_tile_mask", inverse="block_doubling")),
    ],
    ids=str,
)
def test_unrelated_keys(seed, options):
    output, state = errors(reference.inputs(200, 2, 128, 256, 4, seed), **options)  # 200: a ragged tail
    assert output < ERROR[0.0] and state < ERROR[0.0]


@pytest.mark.parametrize("tiles, key_dim, values", [(1, 128, 1), (16, 256, 2), (64, 128, 1), (128, 128, 4)])
def test_decay_tiles_and_value_heads_of_a_key_head(tiles, key_dim, values):
    inputs = reference.inputs(128, 1, key_dim, 128 * values, tiles, 2)
    output, state = errors(inputs, heads=1, key_dim=key_dim, value_width=128 * values, inverse="block_doubling")
    assert output < ERROR[0.0] and state < ERROR[0.0]


@pytest.mark.parametrize("alike, passes", [(0.5, 1), (0.85, 3)])
def test_alike_keys(alike, passes):
    output, state = errors(reference.inputs(256, 1, 128, 256, 4, 4, alike), heads=1, inverse_passes=passes)
    assert output < ERROR[alike] and state < ERROR[alike]


def test_masks_take_any_decay():
    inputs = reference.inputs(256, 1, 128, 256, 4, 5, largest_decay=40.0)
    output, state = errors(inputs, heads=1, gram="per_tile_mask")
    assert output < ERROR[0.0] and state < ERROR[0.0]


def test_folded_gram_close_to_its_bound():
    # 64 tokens of -1.2 nats: factors down to e^-77, and e^-154 over a chunk, less than fp32 can hold.
    q, k, v, log_decay, beta = reference.inputs(256, 1, 128, 256, 4, 6)
    steady = np.full_like(log_decay, np.float32(-1.2))
    output, state = errors((q, k, v, steady, beta), heads=1)
    assert output < ERROR[0.0] and state < ERROR[0.0]


def test_row_fp8_state():
    output, state = errors(reference.inputs(384, 1, 128, 256, 4, 7), heads=1, state_format="row_fp8")
    assert ERROR[0.0] < output < FP8_OUTPUT
    assert ERROR[0.0] < state < FP8_STATE


@pytest.mark.parametrize("gram, state_format", [("folded", "f32"), ("per_tile_mask", "row_fp8")])
def test_two_calls_are_one(gram, state_format):
    arrays = packed(*reference.inputs(256, 1, 128, 256, 4, 9))
    plan = sla.Plan(1, 128, 256, 4, heads_per_program=1, gram=gram, inverse="block_doubling", state_format=state_format)
    whole, last = sla.attention(plan, *arrays, final=True, interpret=True)
    first, state = sla.attention(plan, *[x[:128] for x in arrays[:3]], arrays[3][..., :128], final=True, interpret=True)
    second, end = sla.attention(plan, *[x[128:] for x in arrays[:3]], arrays[3][..., 128:], state, True, True)
    # Where the state is cut it is rescaled once more, in fp32 or not at all; outputs are rounded to bf16 afterwards.
    assert reference.relative_rms(jnp.concatenate([first, second]), whole) < 0.1 * STEP
    assert reference.relative_rms(end, last) < 0.1 * STEP


def test_a_batch_by_vmap():
    batch = [packed(*reference.inputs(130, 1, 128, 256, 4, seed)) for seed in (10, 11)]
    plan = sla.Plan(1, 128, 256, 4, heads_per_program=1, inverse="block_doubling")
    together = jax.vmap(lambda *x: sla.attention(plan, *x, interpret=True))(*[jnp.stack(x) for x in zip(*batch)])
    assert jnp.array_equal(together[1], sla.attention(plan, *batch[1], interpret=True))


@pytest.mark.parametrize("gram", sla.GRAMS)
def test_stages(gram):
    options = dict(gram=gram, inverse="block_doubling", chunk=64, chunks_per_program=2)
    output, state = errors(reference.inputs(200, 1, 128, 256, 4, 12), sla.attention_in_stages, heads=1, **options)
    assert output < ERROR[0.0] and state < ERROR[0.0]


def test_from_raw_projections():
    tokens, heads, widths, tiles = 200, 2, (128, 128, 256), 4
    random = np.random.default_rng(13)
    raw = [reference.to_bf16(random.normal(size=(tokens, heads * width))) for width in widths]
    weights = [np.float32(0.5 * random.normal(size=(4, heads * width))) for width in widths]
    decay, step = np.float32(random.normal(size=(tokens, heads, tiles))), np.float32(random.normal(size=(tokens, heads)))
    log_scale, bias = np.float32(0.3 * random.normal(size=heads)), np.float32(random.normal(size=(heads, tiles)) - 2)
    plan = sla.Plan(heads, 128, 256, tiles, heads_per_program=2)
    got, last = sla.layer(
        plan,
        *[jnp.asarray(x, jnp.bfloat16) for x in raw],
        sla.pack_gates(decay, step),
        [jnp.asarray(x) for x in weights],
        sla.gate_parameters(plan, log_scale, bias),
        final=True,
        interpret=True,
    )
    q, k, v = (reference.convolved(x, w.astype(np.float64)).reshape(tokens, heads, -1) for x, w in zip(raw, weights))
    unit = lambda x: x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)
    log_decay = -1.3 * reference.sigmoid(np.exp(log_scale.astype(np.float64))[:, None] * (decay + bias.astype(np.float64)))
    expected, state = reference.delta_rule(unit(q) * 128**-0.5, unit(k), v, log_decay, 2 * reference.sigmoid(step.astype(np.float64)))
    assert reference.relative_rms(got, expected.reshape(got.shape)) < ERROR[0.0]
    assert reference.relative_rms(last, state) < ERROR[0.0]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(heads_per_program=3), "heads_per_program: a divisor of 8"),
        (dict(chunk=96), "chunk: 16, 32, 64 or 128"),
        (dict(chunk=64), "a multiple of 128 tokens"),
        (dict(decay_tiles=3), "decay_tiles: a divisor of 256"),
        (dict(gram="fold"), "gram: one of folded, per_tile_mask"),
        (dict(gram="per_tile_mask", decay_tiles=64), "up to 16 decay_tiles"),
        (dict(inverse_passes=2), "inverse_passes: 1, 3 or 6"),
        (dict(state_format="fp8"), "state_format: one of f32, bf16, row_fp8"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        sla.program(**changes)
