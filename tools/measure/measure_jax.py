#!/usr/bin/env python3
"""Times small and large kernels on a TPU or GPU through JAX and writes a CSV of latencies.

    python3 measure_jax.py --device tpu-v6e --out tpu-v6e.csv

README.md beside this file says what is measured and how. Needs JAX for the chip. On a CPU it runs the
small cases, so that the script can be tried; their device name has to begin with cpu-.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import cases as shared
from cases import Case, Results, Timing

# Kernels inside a captured graph carry no name of their program: without graphs every kernel does.
if "tpu" not in os.environ.get("JAX_PLATFORMS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()

try:
    import jax
    import jax.numpy as jnp
    from jax import lax
except ImportError:
    jax = None

# On a GPU the input sets together are at least this many bytes, so that no call finds its operands in
# a cache, and at most so many. On a TPU operands of a program are in HBM whatever ran before.
GPU_SETS_BYTES = 512 * 1024 * 1024
MAX_SETS = 64
# On a CPU, cases with more elements, or more multiply-adds, than these are left out.
CPU_ELEMENTS = 1 << 21
CPU_MULTIPLY_ADDS = 1 << 28

# TensorCores behind one JAX device, by the name that JAX gives it.
TPU_CORES = {
    "TPU v2": 1,
    "TPU v3": 1,
    "TPU v4": 2,
    "TPU v5 lite": 1,
    "TPU v5e": 1,
    "TPU v5": 2,
    "TPU v5p": 2,
    "TPU v6 lite": 1,
    "TPU v6e": 1,
    "TPU7x": 1,
    "TPU v7x": 1,
}


def jax_cases(platform: str) -> list:
    """The common cases, then those that JAX alone has on this platform."""
    c = shared.common_cases()
    c.elementwise("vector unit", "fma32", [(8192, 128), (8192, 4096)], "bf16")
    c.elementwise("transcendental unit", "exp8", [(8192, 128), (8192, 4096)], "bf16")
    # On a TPU `f32` is the default of one bf16 pass and `f32-highest` takes six; on a GPU `f32`
    # multiplies f32 and `tf32` operands with 10 bits of mantissa.
    formats = {"tpu": ["f32", "f32-highest"], "gpu": ["f32", "tf32"]}.get(platform, ["f32"])
    c.matmul(
        [(256, 256, 256), (1024, 1024, 1024), (4096, 4096, 4096), (65536, 64, 64), (65536, 128, 128)],
        formats,
        quick=[(256, 256, 256), (4096, 4096, 4096)],
    )
    c.bmm([(4096, 64, 64, 128), (1024, 256, 256, 256)], formats)
    # XLA on a TPU, with the logits in HBM; cuDNN on a GPU.
    op = "attention_cudnn" if platform == "gpu" else "attention_xla"
    shapes = [(1, 2, 1, 512, 64), (8, 16, 4, 1024, 64), (4, 16, 16, 2048, 128), (1, 8, 8, 4096, 128), (1, 32, 8, 8192, 128)]
    for batch, heads, key_heads, tokens, width in shapes:
        sizes = {"B": batch, "Tq": tokens, "Tk": tokens, "Hq": heads, "Hkv": key_heads, "D": width, "Dv": width}
        c.add("attention", op, {**sizes, "causal": 1, "bias": 0, "boolmask": 0}, "bf16", quick=tokens in (512, 2048))
    if platform == "tpu":
        for batch, heads, tokens, width in [(1, 32, 8192, 128), (4, 16, 4096, 128), (1, 8, 16384, 128), (4, 16, 4096, 64)]:
            sizes = {"B": batch, "Tq": tokens, "Tk": tokens, "Hq": heads, "Hkv": heads, "D": width, "Dv": width}
            blocks = {"block_q": 512, "block_kv": 1024, "block_kv_compute": 512}
            c.add("attention", "flash_attention", {**sizes, "causal": 1, "bias": 0, "boolmask": 0, **blocks}, "bf16")
    for batch, heads, key, value in [(1, 32, 128, 128), (16, 32, 128, 128), (128, 32, 128, 128), (64, 16, 64, 64)]:
        sizes = {"B": batch, "T": 1, "H": heads, "K": key, "V": value, "state": "f32"}
        c.add("state in hbm", "gdn_decode_xla", sizes, "bf16", quick=batch in (1, 128))
    return c.items


class Unsupported(Exception):
    """A case that this device cannot run, with the reason."""


def element_type(name: str):
    types = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32, "tf32": jnp.float32}
    types |= {"f32-highest": jnp.float32, "s8": jnp.int8, "f8_e4m3fn": jnp.float8_e4m3fn}
    return types[name]


def normal(key, shape, dtype: str):
    """Values of order one, so that nothing overflows and nothing is zero."""
    if dtype == "s8":
        return jax.random.randint(key, shape, -100, 100, dtype=jnp.int8)
    if dtype == "f8_e4m3fn":
        return jnp.clip(jax.random.normal(key, shape, jnp.bfloat16), -4, 4).astype(jnp.float8_e4m3fn)
    return jax.random.normal(key, shape, element_type(dtype))


def product(case: Case, platform: str):
    """Product with the precision that the format names."""
    if case.dtype == "s8":
        return lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.int32)
    if case.dtype == "f8_e4m3fn":
        return lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.bfloat16)
    precision = None
    if platform == "gpu" and case.dtype == "f32":
        precision = lax.DotAlgorithmPreset.F32_F32_F32
    elif platform == "gpu" and case.dtype == "tf32":
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32
    elif case.dtype == "f32-highest":
        precision = lax.Precision.HIGHEST
    elif case.dtype == "f32":
        precision = lax.Precision.DEFAULT
    return lambda a, b: jnp.matmul(a, b, precision=precision)


def chain(operation: str, length: int):
    """`length` dependent operations on each element; a and b are arguments, so that nothing folds."""

    def run(x, a, b):
        for _ in range(length):
            x = x * a + b if operation == "fma" else jnp.exp(-x)
        return x

    return run


def rms_norm(x, weight):
    """Root mean square over a row in f32, result in the format of the input."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype) * weight


def gated_delta_step(state, q, k, v, log_decay, beta):
    """One token of the gated delta rule, everything in f32 on the vector unit; gives state and output."""
    state = state * jnp.exp(log_decay)[..., None, None]
    kept = jnp.sum(state * k[..., :, None], axis=-2)
    update = beta[..., None] * (v - kept)
    state = state + k[..., :, None] * update[..., None, :]
    return state, jnp.sum(state * q[..., :, None], axis=-2)


def build(case: Case, platform: str):
    """Gives a maker of inputs, which takes keys of the random generator, and the function to time."""
    op, dtype = case.op, case.dtype
    if op in ("matmul", "bmm"):
        m, k, n = case.size("m", "k", "n")
        batch = (case.sizes["batch"],) if op == "bmm" else ()
        return (lambda key: (normal(key[0], (*batch, m, k), dtype), normal(key[1], (*batch, k, n), dtype))), product(case, platform)
    if "shape" in case.sizes:
        shape = tuple(int(extent) for extent in case.sizes["shape"].split("x"))
        if op[:3] in ("fma", "exp") and op[3:]:
            kind = element_type(dtype)
            scalars = (jnp.asarray(0.9, kind), jnp.asarray(0.1, kind))
            return (lambda key: (jax.random.uniform(key[0], shape, kind), *scalars)), chain(op[:3], int(op[3:]))
        functions = {
            "add": lambda x, y: x + y,
            # The result of a program is never its argument, unless donated: this moves the bytes.
            "copy": jnp.copy,
            "exp": jnp.exp,
            "silu": jax.nn.silu,
            "tanh": jnp.tanh,
            "sigmoid": jax.nn.sigmoid,
        }
        operands = 2 if op == "add" else 1
        return (lambda key: tuple(normal(key[i], shape, dtype) for i in range(operands))), functions[op]
    if op == "read_sum":
        count = case.sizes["bytes"] // shared.ELEMENT_BYTES[dtype]
        # Rows of whole tiles of 128 lanes, where the size allows: padding would add bytes.
        columns = 3200 if count % 3200 == 0 else 1000
        return (lambda key: (normal(key[0], (count // columns, columns), dtype),)), lambda x: jnp.sum(x, dtype=jnp.float32)
    if "rows" in case.sizes:
        rows, width = case.sizes.values()
        functions = {
            "row_sum": lambda x: jnp.sum(x, axis=1),
            "col_sum": lambda x: jnp.sum(x, axis=0),
            "softmax": lambda x: jax.nn.softmax(x, axis=1),
            "rms_norm": rms_norm,
            "transpose": jnp.transpose,
        }
        if op == "rms_norm":
            return (lambda key: (normal(key[0], (rows, width), dtype), normal(key[1], (width,), dtype))), rms_norm
        return (lambda key: (normal(key[0], (rows, width), dtype),)), functions[op]
    if op in ("attention_xla", "attention_cudnn", "flash_attention"):
        b, t, h, hk, d = case.size("B", "Tq", "Hq", "Hkv", "D")
        if op == "flash_attention":
            return (lambda key: tuple(normal(key[i], (b, h, t, d), dtype) for i in range(3))), pallas_flash(case)
        library = op.removeprefix("attention_")

        def attend(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=library)

        heads = (h, hk, hk)
        return (lambda key: tuple(normal(key[i], (b, t, heads[i], d), dtype) for i in range(3))), attend
    if op == "gdn_decode_xla":
        b, h, k, v = case.size("B", "H", "K", "V")

        def make(key):
            q, r = (normal(key[i], (b, h, k), "f32") for i in (1, 2))
            r = r / jnp.linalg.norm(r, axis=-1, keepdims=True)
            decay = jax.nn.log_sigmoid(normal(key[4], (b, h), "f32"))
            beta = jax.nn.sigmoid(normal(key[5], (b, h), "f32"))
            narrow = [x.astype(element_type(dtype)) for x in (q, r, normal(key[3], (b, h, v), "f32"))]
            return (normal(key[0], (b, h, k, v), "f32"), *narrow, decay, beta)

        return make, gated_delta_step
    raise Unsupported(f"no way to run {op}")


def pallas_flash(case: Case):
    """The flash attention of JAX's Pallas kernels for TPU, with the blocks of the case."""
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    block_q, block_kv, compute = case.size("block_q", "block_kv", "block_kv_compute")
    blocks = pallas.BlockSizes(block_q=block_q, block_k_major=block_kv, block_k=compute, block_b=1)
    scale = case.sizes["D"] ** -0.5
    return lambda q, k, v: pallas.flash_attention(q, k, v, causal=True, sm_scale=scale, block_sizes=blocks)


def too_large_for_cpu(case: Case) -> bool:
    sizes = case.sizes
    if "m" in sizes:
        return sizes["m"] * sizes["k"] * sizes["n"] * sizes.get("batch", 1) > CPU_MULTIPLY_ADDS
    if "Tq" in sizes:
        return sizes["B"] * sizes["Tq"] * sizes["Tk"] * sizes["Hq"] * sizes["D"] > CPU_MULTIPLY_ADDS
    if "state" in sizes:
        return sizes["B"] * sizes["H"] * sizes["K"] * sizes["V"] > CPU_ELEMENTS
    if "shape" in sizes:
        return math.prod(int(extent) for extent in sizes["shape"].split("x")) > CPU_ELEMENTS
    return sizes.get("bytes", 0) > CPU_ELEMENTS or sizes.get("rows", 1) * sizes.get("cols", sizes.get("d", 1)) > CPU_ELEMENTS


def profile_calls(function, sets, calls: int):
    """Runs the calls under JAX's profiler and gives what it recorded."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(calls):
                out = function(*sets[i % len(sets)])
            jax.block_until_ready(out)
        found = sorted(Path(folder).rglob("*.xplane.pb"))
        if not found:
            raise Unsupported("the profiler wrote no trace")
        return jax.profiler.ProfileData.from_file(str(found[-1]))


def device_times(data, platform: str, program: str, calls: int) -> list:
    """Device time of each call in us.

    A TPU records one event for each run of a program. A GPU records kernels: they are told apart by
    the program that they belong to, and a call lasts from the start of its first to the end of its last.
    """
    name = f"jit_{program}"
    planes = [plane for plane in data.planes if plane.name == f"/device:{platform.upper()}:0"]
    if not planes:
        raise Unsupported(f"the trace has no device; planes: {', '.join(plane.name for plane in data.planes)}")
    if platform == "tpu":
        events = [e for line in planes[0].lines if line.name == "XLA Modules" for e in line.events if e.name.startswith(name)]
        if len(events) != calls:
            raise Unsupported(f"the trace holds {len(events)} runs of {name}, not {calls}")
        return [e.duration_ns / 1000.0 for e in events]
    kernels = []
    for line in planes[0].lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            if str(dict(event.stats).get("hlo_module", "")).startswith(name):
                kernels.append((event.start_ns, event.start_ns + event.duration_ns))
    kernels.sort()
    if not kernels or len(kernels) % calls:
        raise Unsupported(f"the trace holds {len(kernels)} kernels of {name}, not a multiple of {calls}")
    each = len(kernels) // calls
    groups = [kernels[i : i + each] for i in range(0, len(kernels), each)]
    return [(max(stop for _, stop in group) - group[0][0]) / 1000.0 for group in groups]


def wall_times(function, sets, repeats: int) -> list:
    """Host time of each call in us, dispatch included."""
    samples = []
    for i in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*sets[i % len(sets)]))
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


def time_case(case: Case, platform: str, repeats: int, method: str) -> Timing:
    make, function = build(case, platform)
    program = f"measured_{case.op}"
    function.__name__ = function.__qualname__ = program
    root = jax.random.key(shared.SEED)
    make = jax.jit(make)
    sets = [make(jax.random.split(root, 6))]
    function = jax.jit(function)
    for _ in range(3):
        out = jax.block_until_ready(function(*sets[0]))
    for leaf in jax.tree.leaves(out):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.isfinite(jnp.sum(leaf.astype(jnp.float32)))):
            raise Unsupported("the output is not finite")
    set_bytes = sum(leaf.nbytes for leaf in [*jax.tree.leaves(sets[0]), *jax.tree.leaves(out)])
    del out
    if platform == "gpu":
        for i in range(1, min(MAX_SETS, math.ceil(GPU_SETS_BYTES / set_bytes))):
            sets.append(make(jax.random.split(jax.random.fold_in(root, i), 6)))
    jax.block_until_ready(sets)
    calls = max(repeats, 2 * len(sets)) if len(sets) > 1 else repeats
    details = {"input_sets": len(sets), "set_bytes": set_bytes, "calls": calls}
    note = "" if platform != "gpu" else "operands cold in L2" if len(sets) * set_bytes >= GPU_SETS_BYTES else "operands warm in L2"
    if method == "profiler":
        try:
            times = device_times(profile_calls(function, sets, calls), platform, program, calls)
            # The first round finds instruction caches cold.
            return Timing(times[1:], "device", details, note=note)
        except (Unsupported, AttributeError) as error:
            details["no_device_time"] = str(error)
    return Timing(wall_times(function, sets, repeats), "wall", details, note="; ".join(filter(None, [note, "host clock, dispatch included"])))


def version(package: str):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores_of(device, arguments) -> int:
    """Cores behind one device, for the cores column."""
    if arguments.cores is not None:
        return arguments.cores
    if device.platform == "tpu" and device.device_kind in TPU_CORES:
        return TPU_CORES[device.device_kind]
    if device.platform == "gpu" and hasattr(device, "core_count"):
        return device.core_count
    if device.platform == "cpu":
        return os.cpu_count() or 1
    shared.refuse(f"--cores N is missing: the cores of {device.device_kind} are not known here")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shared.add_arguments(parser)
    parser.add_argument("--cores", type=int, metavar="N", help="TensorCores or multiprocessors of one device, where JAX does not say")
    parser.add_argument("--wall", action="store_true", help="host clock even where the profiler could time the device")
    arguments = parser.parse_args()
    if jax is None:
        shared.refuse("JAX is not installed")
    device = jax.devices()[0]
    platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
    chosen = shared.select(jax_cases(platform), arguments)
    if arguments.list:
        shared.print_cases(chosen)
        return 0
    shared.check_output(arguments)
    if (platform == "cpu") != arguments.device.startswith("cpu-"):
        shared.refuse(f"--device {arguments.device}: JAX runs on a {platform} here; a device name begins with cpu- where that is the CPU, and only there")
    environment = {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "libtpu": version("libtpu"),
        "platform": platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "platform_version": device.client.platform_version,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_init_args": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }
    runtime = f", libtpu {environment['libtpu']}" if platform == "tpu" and environment["libtpu"] else ""
    source = f"measured with tools/measure/measure_jax.py, jax {jax.__version__}{runtime}, {device.device_kind}"
    results = Results(arguments, cores_of(device, arguments), environment, source)
    method = "wall" if arguments.wall or platform == "cpu" else "profiler"

    def measure_case(case: Case) -> None:
        if platform == "cpu" and too_large_for_cpu(case):
            raise Unsupported("too large for a trial on the CPU")
        results.add(case, time_case(case, platform, arguments.repeats, method))

    results.measure(chosen, measure_case)
    return results.write()


if __name__ == "__main__":
    sys.exit(main())
