"""Public kernels of the field as programs for dump.py: Tokamax's KDA, and its causal convolution fused with gated delta net (GDN) or with KDA.

They are not part of this project. `pip install tokamax==0.0.17 libtpu==0.0.50.1` brings them (Apache-2.0, Python 3.12), with JAX 0.11.1 or newer and
not the version that requirements.txt pins; libtpu, which makes the schedule, is the same. Tokamax offers them on TPU v6e and newer; here they are
handed to the compiler for the older chips too.

Each function returns (function, shapes of the arguments). Tokamax asks JAX which TPU it runs on; here there is none, so `chip` says what the program
is going to be compiled for.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

BF16, F32 = jnp.bfloat16, jnp.float32
# JAX's name of a chip, and how many cores it shows as one device.
CHIPS = {"tpu-v4": ("v4", 2), "tpu-v5e": ("v5e", 1), "tpu-v5p": ("v5p", 2), "tpu-v6e": ("v6e", 1), "tpu-v7x": ("7x", 1)}


def _pretend(chip):
    """Answers for the device that JAX would look for: its properties are those of `chip`, and Tokamax's kernels may run on it."""
    if chip not in CHIPS:
        raise ValueError(f"chip: one of {', '.join(CHIPS)}, not {chip}")
    from jax._src import tpu_info
    from jax.experimental.pallas import tpu as pltpu

    name, cores = CHIPS[chip]
    info = tpu_info._get_tpu_info_impl(tpu_info.ChipVersion(name), cores)
    for module in [pltpu, *sys.modules.values()]:
        if "get_tpu_info" in getattr(module, "__dict__", {}):
            module.get_tpu_info = lambda: info


def kda(chip, tokens=8192, heads=32, gated=True):
    """Tokamax's KDA, two kernels: queries, keys, values and gates [heads, 1, tokens, 128]. `gated`: norm of queries and keys and the bounded gate
    (lower bound -5) inside, as in `kda.program`; else outside, with decays in fp32."""
    from tokamax._src.ops.kda import pallas_mosaic_tpu as tokamax_kda

    _pretend(chip)
    tokamax_kda.PallasMosaicTpuKimiDeltaAttention.supported_on = lambda self, device: True
    op = tokamax_kda.PallasMosaicTpuKimiDeltaAttention()
    wide = lambda dtype: jax.ShapeDtypeStruct((heads, 1, tokens, 128), dtype)
    args = [wide(BF16)] * 3 + [wide(BF16 if gated else F32), jax.ShapeDtypeStruct((heads, 1, tokens), BF16)]
    if not gated:
        return lambda q, k, v, decay, beta: op(q, k, v, decay, beta, output_final_state=False), args

    def run(q, k, v, gate, beta, a_log, bias):
        options = {"use_qk_l2norm": True, "use_gate_in_kernel": True, "lower_bound": -5.0, "output_final_state": False}
        return op(q, k, v, gate, beta, a_log=a_log, delta_time_bias=bias, **options)

    return run, args + [jax.ShapeDtypeStruct((heads,), F32), jax.ShapeDtypeStruct((heads * 128,), F32)]


def _convolution_and_delta_rule(chip, attention, tokens, key_heads, value_heads, state_format):
    """One sequence from its start through Tokamax's fused kernel: convolution of width 4 and SiLU, norm, gate, delta rule.

    The kernel reads the number of its tiles while it runs: without `scalars.json` (`tpusim dump --scalars`) `tpusim dump` times one tile.
    """
    from tokamax._src.ops.causal_conv1d_gated_delta_rule import config, wrapper

    _pretend(chip)
    mode = config.AttentionMode(attention)
    width = 2 * key_heads * 128 + value_heads * 128
    per_channel = mode == config.AttentionMode.KDA
    shape = jax.ShapeDtypeStruct
    args = [
        shape((tokens, width), BF16),
        shape((tokens, value_heads), BF16),
        shape((tokens, value_heads * 128 if per_channel else value_heads), BF16),
        shape((2, 3, width), BF16),
        shape((2, value_heads, 128, 128), {"f32": F32, "bf16": BF16}[state_format]),
        shape((width, 1, 4), BF16),
        shape((value_heads,), F32),
        shape((value_heads, 128) if per_channel else (value_heads,), F32),
    ]

    def run(qkv, b, a, conv_state, state, conv_weight, a_log, bias):
        # One sequence that is not a decode step; its states are in slot 1, slot 0 is for padding.
        numbers = lambda *x: jnp.asarray(np.array(x, np.int32))
        return wrapper.fused_conv1d_gdn(
            *(qkv, b, a, conv_state, state, conv_weight, None, a_log, bias),
            *(numbers(0, tokens), numbers(1), numbers(0, 1, 1), numbers(tokens)),
            n_kq=key_heads,
            n_v=value_heads,
            d_k=128,
            d_v=128,
            kernel_size=4,
            attention_mode=mode,
            gate_lower_bound=-5.0 if per_channel else None,
        )

    return run, args


def conv_gdn(chip, tokens=8192, key_heads=16, value_heads=32, state_format="f32"):
    """Tokamax's fused convolution and GDN."""
    return _convolution_and_delta_rule(chip, "gdn", tokens, key_heads, value_heads, state_format)


def conv_kda(chip, tokens=8192, heads=32, state_format="f32"):
    """Tokamax's fused convolution and KDA, written for serving."""
    return _convolution_and_delta_rule(chip, "kda", tokens, heads, heads, state_format)
