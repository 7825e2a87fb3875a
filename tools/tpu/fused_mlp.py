"""A Pallas kernel to look at with `tpusim dump`: one dense layer with its activation, blocked over rows and columns.

    python dump.py --chip tpu-v6e --out mlp fused_mlp.py:mlp

Rows of `x` times a weight matrix, with the sigmoid-weighted activation applied while a block of the result is
still on the chip. The block sizes are what to play with.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS, DEPTH, COLUMNS = 4096, 2048, 4096


def kernel(x, w, out, sums):
    """Adds one block of products; applies the activation after the last one."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    sums[...] += jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        y = sums[...]
        out[...] = (y * jax.nn.sigmoid(y)).astype(out.dtype)


def layer(x, w, rows, depth, columns):
    """`silu(x w)` in blocks of `rows` by `columns`, `depth` at a time."""
    grid = (ROWS // rows, COLUMNS // columns, DEPTH // depth)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, k: (i, k)),
            pl.BlockSpec((depth, columns), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="fused_mlp",
    )(x, w)


def mlp_args():
    """Shapes of the arguments of every variant here."""
    return (
        jax.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((DEPTH, COLUMNS), jnp.bfloat16),
    )


mlp = functools.partial(layer, rows=128, depth=512, columns=256)
mlp_large = functools.partial(layer, rows=512, depth=1024, columns=1024)
mlp_large_args = mlp_args
