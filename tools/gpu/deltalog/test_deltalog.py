"""Numerics of the kernels, on a CPU: Triton's interpreter runs the kernels themselves. Needs PyTorch (a build without
CUDA will do), Triton and NumPy.

    python3 -m unittest test_deltalog
"""

from __future__ import annotations

import os
import unittest

os.environ["TRITON_INTERPRET"] = "1"

import torch

import kernels
from kernels import MECHANISMS, Launch, Token
from reference import recurrence

# The interpreter takes a tenth of a second for each program of each launch: small shapes, of two value tiles.
K, V = 16, 8
PAIR = (1, 2, K, V)
SINGLE = (1, 1, K, V)
LAUNCH = Launch(block_v=4, warps=1)


def random_tokens(mechanism, count: int, shape=PAIR, dtype=torch.float64) -> list:
    """Tokens with unit keys, step sizes below 1, and decays from weak to strong."""
    b, h, k, v = shape
    generator = torch.Generator().manual_seed(1)
    normal = lambda *extents: torch.randn(*extents, generator=generator, dtype=torch.float64)
    bonus = normal(h, k).to(dtype)
    tokens = []
    for _ in range(count):
        key = torch.nn.functional.normalize(normal(b, h, k), dim=-1)
        decay = torch.nn.functional.logsigmoid(2.0 * normal(b, h, k) if mechanism.channel else 2.0 * normal(b, h))
        tokens.append(Token(normal(b, h, k).to(dtype), key.to(dtype), normal(b, h, v).to(dtype), decay, normal(b, h).sigmoid().to(dtype), bonus))
    return tokens


def random_state(shape=PAIR) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def run_eager(mechanism, tokens, state):
    state, outputs = state.clone(), []
    for token in tokens:
        out = torch.empty_like(token.v, dtype=torch.float64)
        kernels.eager(mechanism, token, state, out, LAUNCH)
        outputs.append(out)
    return torch.stack(outputs), state


def run_logged(mechanism, tokens, state, slots, types=(torch.float64, torch.float64), **how):
    """Outputs, and the state that base and log stand for after the last token."""
    base, outputs = state.clone(), []
    log = kernels.empty_log(mechanism, base, slots, *types)
    for step, token in enumerate(tokens):
        out = torch.empty_like(token.v, dtype=torch.float64)
        kernels.cycle_step(mechanism, token, base, log, step, out, LAUNCH, LAUNCH, **how)
        outputs.append(out)
    left = len(tokens) % slots
    if left:
        kernels.merge(mechanism, base, log, left, LAUNCH)
    return torch.stack(outputs), base


class Numerics(unittest.TestCase):
    def assert_equal(self, found, expected, within=1e-10):
        for name, a, b in zip(("outputs", "state"), found, expected):
            self.assertLess(float((a - b).abs().max() / b.abs().max()), within, name)

    def test_eager_is_the_recurrence(self):
        shape = (2, 2, K, V)
        for mechanism in MECHANISMS.values():
            with self.subTest(mechanism.name):
                tokens = random_tokens(mechanism, 3, shape)
                self.assert_equal(run_eager(mechanism, tokens, random_state(shape)), recurrence(mechanism, tokens, random_state(shape)))

    def test_log_is_the_recurrence(self):
        """All ways to replay and merge, over two intervals and a part of one; 3 is no power of two."""
        for mechanism in MECHANISMS.values():
            tokens = random_tokens(mechanism, 7)
            expected = recurrence(mechanism, tokens, random_state())
            for how in [{}, {"split": True}, {"fused": False}, {"fused": False, "split": True}]:
                with self.subTest(mechanism=mechanism.name, **how):
                    self.assert_equal(run_logged(mechanism, tokens, random_state(), 3, **how), expected)

    def test_intervals_of_all_lengths(self):
        for mechanism in MECHANISMS.values():
            for slots, count in [(1, 2), (2, 5), (4, 9), (8, 18), (16, 18)]:
                with self.subTest(mechanism=mechanism.name, slots=slots):
                    tokens = random_tokens(mechanism, count, SINGLE)
                    expected = recurrence(mechanism, tokens, random_state(SINGLE))
                    self.assert_equal(run_logged(mechanism, tokens, random_state(SINGLE), slots), expected)

    def test_decay_far_below_the_smallest_number(self):
        """A cumulative decay of -8000 nats within one interval: its exponential is 0, and nothing overflows."""
        for mechanism in MECHANISMS.values():
            with self.subTest(mechanism.name):
                tokens = random_tokens(mechanism, 5, SINGLE)
                for token in tokens:
                    token.decay = token.decay - 2000.0
                expected = recurrence(mechanism, tokens, random_state(SINGLE))
                self.assert_equal(run_logged(mechanism, tokens, random_state(SINGLE), 4), expected)

    def test_narrow_log_holds_narrow_operands_exactly(self):
        """Keys of 16 bits lose nothing in a log of that format; updates of RWKV6, its values, neither. The format is f16,
        because the interpreter converts bf16 to f32 alone."""
        for mechanism in MECHANISMS.values():
            with self.subTest(mechanism.name):
                tokens = random_tokens(mechanism, 6, SINGLE, torch.float16)
                types = (torch.float16, torch.float64 if mechanism.delta else torch.float16)
                expected = recurrence(mechanism, tokens, random_state(SINGLE))
                self.assert_equal(run_logged(mechanism, tokens, random_state(SINGLE), 4, types), expected)

    def test_narrow_log_rounds_an_update_for_later_tokens_alone(self):
        """The first output has its own update unrounded; the second token reads it rounded, its query being orthogonal to all else."""
        mechanism = MECHANISMS["gdn"]
        first, second = random_tokens(mechanism, 2)
        for token, channel in ((first, 0), (second, 1)):
            token.k = torch.zeros_like(token.k)
            token.k[..., channel] = 1.0
        first.q = second.q = first.k.clone()
        outputs, _ = run_logged(mechanism, [first, second], torch.zeros(PAIR, dtype=torch.float64), 4, (torch.float16, torch.float16))
        update = first.beta[..., None] * first.v
        rounded = update.to(torch.float16).to(torch.float64)
        self.assertGreater(float((rounded - update).abs().max()), 1e-5)
        self.assertLess(float((outputs[0] - update).abs().max()), 1e-12)
        self.assertLess(float((outputs[1] - second.decay.exp()[..., None] * rounded).abs().max()), 1e-12)

    def test_delta_rule_recalls_what_it_stored(self):
        """Orthonormal keys, step size 1 and no decay: a query with a stored key gives its value."""
        for name in ("gdn", "kda"):
            with self.subTest(name):
                mechanism = MECHANISMS[name]
                tokens = random_tokens(mechanism, 6, SINGLE)
                basis = torch.linalg.qr(torch.randn(K, K, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]
                for i, token in enumerate(tokens):
                    token.k = basis[i].expand_as(token.k).contiguous()
                    token.q = basis[i // 2].expand_as(token.q).contiguous()
                    token.decay, token.beta = torch.zeros_like(token.decay), torch.ones_like(token.beta)
                outputs, _ = run_logged(mechanism, tokens, random_state(SINGLE), 4)
                for i, out in enumerate(outputs):
                    self.assertLess(float((out - tokens[i // 2].v).abs().max()), 1e-10)

    def test_lengths_outside_the_log_are_refused(self):
        mechanism = MECHANISMS["gdn"]
        token, base = random_tokens(mechanism, 1)[0], random_state()
        log = kernels.empty_log(mechanism, base, 2, torch.float64, torch.float64)
        out = torch.empty_like(token.v, dtype=torch.float64)
        for length in (-1, 2):
            with self.assertRaises(ValueError):
                kernels.logged(mechanism, token, base, log, length, out, LAUNCH)
        for length in (0, 3):
            with self.assertRaises(ValueError):
                kernels.merge(mechanism, base, log, length, LAUNCH)


if __name__ == "__main__":
    unittest.main()
