"""Triangular inverses in interpret mode against NumPy's in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import products
import reference


def lower(n, chunk, alike):
    """A Gram matrix of `n` unit keys below the diagonal, in blocks of `chunk`; keys have the cosine `alike` in the mean."""
    _, k, *_ = reference.inputs(n, 1, 64, 1, 1, 0, alike)
    block = np.arange(n) // chunk
    return np.float32(np.tril(1.5 * k[:, 0] @ k[:, 0].T, -1) * (block[:, None] == block))


def inverse(a, *options, **more):
    """`products.inverse` of one matrix."""

    def kernel(a_ref, out):
        out[...] = products.inverse([a_ref[...]], *options, **more)[0]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(a.shape, jnp.float32), interpret=True)(a)


# Errors relative to the largest entry. fp32 rounds by 2^-24, three passes by 2^-16, one by 2^-9, and 2 log2(128) = 14 products
# carry them on, alike keys with a larger factor than random ones.
@pytest.mark.parametrize("method", ["packed_doubling", "block_doubling", "hybrid"])
@pytest.mark.parametrize("passes, rounding", [(1, 2.0**-9), (3, 2.0**-16), (6, 2.0**-24)])
def test_exact_inverses(method, passes, rounding):
    for n, chunk in ((128, 128), (128, 64), (32, 16)):
        a = lower(n, chunk, 0.0)
        expected = np.linalg.inv(np.eye(n) + a)
        error = np.abs(inverse(a, chunk, method, passes) - expected).max() / np.abs(expected).max()
        assert error < 14 * rounding


def test_doubling_bears_alike_keys_and_repeated_squares_do_not():
    a = lower(128, 128, 0.85)
    expected = np.linalg.inv(np.eye(128) + a)
    error = lambda method: np.abs(inverse(a, 128, method, 3) - expected).max() / np.abs(expected).max()
    assert error("packed_doubling") < 14 * 2.0**-16
    assert not error("product") < 1


def test_as_many_terms_of_the_series_as_rows_are_exact():
    a = lower(32, 16, 0.0)
    expected = np.linalg.inv(np.eye(32) + a)
    assert np.abs(inverse(a, 16, "neumann", 6, 16) - expected).max() < 16 * 2.0**-24 * np.abs(expected).max()
