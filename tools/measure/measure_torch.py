#!/usr/bin/env python3
"""Times small and large kernels on an NVIDIA GPU through PyTorch and writes a CSV of latencies.

    python3 measure_torch.py --device h200-sxm --out h200-sxm.csv

README.md beside this file says what is measured and how. Needs PyTorch with CUDA; Triton (comes with
PyTorch) for the chained operations; flash-linear-attention, where it is installed, for linear attention.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import cases as shared
from cases import Case, Results, Timing

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

try:
    import fla
except ImportError:
    fla = None

# A replay lasts at least this long: one call's share of the events and of the start of the graph is small.
REPLAY_US = 2000.0
# Rest after each repetition, in units of the time it took: an average load far below the power limit.
PAUSE_BURSTS = 3
# Input sets together are at least this many times the L2 cache: no call finds its operands there.
CACHE_MULTIPLE = 8
# At most so many input sets, and so many calls in one graph.
MAX_SETS = 512
MAX_CALLS = 1024


def torch_cases() -> list:
    """The common cases, then those that PyTorch alone has."""
    c = shared.common_cases()
    # Precision of f32 products: `f32` multiplies f32, `tf32` operands with 10 bits of mantissa.
    c.matmul(
        [(1024, 1024, 1024), (4096, 4096, 4096), (65536, 64, 64), (65536, 128, 128)],
        ["f32", "tf32"],
        quick=[(4096, 4096, 4096)],
    )
    c.bmm([(4096, 64, 64, 128), (1024, 256, 256, 256)], ["f32", "tf32"])
    for batch, heads, key_heads, tokens, width in [
        (1, 32, 8, 8192, 128),
        (1, 32, 32, 8192, 128),
        (1, 32, 8, 16384, 128),
        (4, 16, 16, 4096, 64),
        (8, 16, 4, 1024, 64),
        (2, 16, 16, 2048, 128),
        (1, 64, 8, 4096, 128),
        (1, 24, 24, 5000, 128),
        (1, 8, 8, 32768, 128),
        (1, 16, 16, 4096, 256),
    ]:
        sizes = {"B": batch, "H": heads, "HK": key_heads, "T": tokens, "D": width}
        c.add("attention", "sdpa_causal", sizes, "bf16", quick=(tokens, heads) in [(8192, 32), (4096, 16)])
        if tokens <= 8192 and width <= 128:
            c.add("attention", "sdpa_causal_bwd", sizes, "bf16")
    # One token against a state in HBM.
    decodes = [
        ("gdn", [1, 4, 16, 32, 64, 128, 512], 32, 128, 128),
        ("kda", [1, 4, 32, 64, 128, 512], 32, 128, 128),
        ("rwkv6", [4, 64, 128, 512], 32, 128, 128),
        ("gdn", [8, 96, 200], 16, 128, 128),
        ("kda", [8, 96, 200], 16, 128, 128),
        ("gdn", [64], 16, 64, 64),
        ("gdn", [64], 8, 256, 256),
        ("gla", [4, 64, 128, 512], 32, 128, 128),
        ("deltanet", [4, 64, 128, 512], 32, 128, 128),
        ("mamba2_ssd", [4, 64, 128, 512], 32, 128, 128),
    ]
    for mechanism, batches, heads, key, value in decodes:
        for batch in batches:
            sizes = {"B": batch, "T": 1, "H": heads, "K": key, "V": value, "state": "f32"}
            c.add("state in hbm", f"{mechanism}_decode", sizes, "bf16", quick=batch == 128 and mechanism == "gdn")
    # The short causal convolution in front of every gated delta layer.
    for tokens, channels in [
        (8192, 4096),
        (8192, 12288),
        (2048, 4096),
        (32768, 2048),
        (65536, 1024),
        (5000, 3000),
        (1024, 1024),
        (16384, 8192),
        (4096, 512),
        (131072, 256),
    ]:
        c.add("short convolution", "conv4_silu", {"T": tokens, "E": channels}, "bf16")
    # Chunked forward passes: two sizes of earlier tables, then others.
    shapes = [(1, 2048, 32, 128, 128), (1, 8192, 32, 128, 128), (1, 3000, 32, 128, 128), (2, 4096, 32, 128, 128)]
    shapes += [(2, 4096, 16, 128, 128), (1, 16384, 16, 128, 128), (4, 2048, 32, 64, 64)]
    for mechanism in LINEAR_ATTENTION:
        for batch, tokens, heads, key, value in shapes:
            sizes = {"B": batch, "T": tokens, "H": heads, "K": key, "V": value}
            if mechanism == "gdn_gva":
                sizes = {"B": batch, "T": tokens, "H": heads // 4, "Hv": heads, "K": key, "V": value}
            op = mechanism if "_chunk" in mechanism else f"{mechanism}_chunk"
            c.add("linear attention", op, sizes, "bf16")
    for mechanism in ("gla", "kda", "deltanet", "retnet", "gdn"):
        sizes = {"B": 1, "T": 4096, "H": 32, "K": 128, "V": 128}
        c.add("linear attention", f"{mechanism}_chunk_bwd", sizes, "bf16")
    return c.items


if triton is not None:

    @triton.jit
    def chain_kernel(x, out, count, a, b, OPERATION: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
        """`LENGTH` dependent operations in f32 on each element; a and b are arguments so that no
        compiler folds the chain."""
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        value = tl.load(x + index, mask=inside).to(tl.float32)
        for _ in tl.static_range(LENGTH):
            if OPERATION == "fma":
                value = value * a + b
            else:
                value = tl.exp(-value)
        tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


class Unsupported(Exception):
    """A case that this GPU or this installation cannot run, with the reason."""


def element_type(name: str):
    types = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "tf32": torch.float32}
    types |= {"s8": torch.int8, "f8_e4m3fn": torch.float8_e4m3fn}
    return types[name]


def normal(shape, dtype: str):
    """Seeded by the caller; values of order one, so that nothing overflows and nothing is zero."""
    if dtype == "s8":
        return torch.randint(-100, 100, shape, dtype=torch.int8, device="cuda")
    if dtype == "f8_e4m3fn":
        return torch.randn(shape, device="cuda").clamp(-4, 4).to(torch.float8_e4m3fn)
    return torch.randn(shape, dtype=element_type(dtype), device="cuda")


def matmul(case: Case):
    m, k, n = case.size("m", "k", "n")
    if case.dtype in ("s8", "f8_e4m3fn"):
        one = torch.ones((), device="cuda")
        functions = {
            "s8": lambda x: torch._int_mm(x[0], x[1].t()),
            "f8_e4m3fn": lambda x: torch._scaled_mm(x[0], x[1].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
        }
        # The matrix units take the second operand of these formats with its columns contiguous.
        return (lambda: (normal((m, k), case.dtype), normal((n, k), case.dtype))), functions[case.dtype]
    return (lambda: (normal((m, k), case.dtype), normal((k, n), case.dtype))), lambda x: torch.matmul(x[0], x[1])


def bmm(case: Case):
    b, m, k, n = case.size("batch", "m", "k", "n")
    return (lambda: (normal((b, m, k), case.dtype), normal((b, k, n), case.dtype))), lambda x: torch.bmm(x[0], x[1])


def elementwise(case: Case):
    shape = tuple(int(extent) for extent in case.sizes["shape"].split("x"))
    functions = {
        "add": lambda x: torch.add(x[0], x[1]),
        # A clone becomes a copy node of the graph, at two thirds of the rate of a kernel.
        "copy": lambda x: torch.mul(x[0], 1.0),
        "exp": lambda x: torch.exp(x[0]),
        "silu": lambda x: F.silu(x[0]),
        "tanh": lambda x: torch.tanh(x[0]),
        "sigmoid": lambda x: torch.sigmoid(x[0]),
    }
    operands = 2 if case.op == "add" else 1
    return (lambda: tuple(normal(shape, case.dtype) for _ in range(operands))), functions[case.op]


def chain(case: Case):
    if triton is None:
        raise Unsupported("Triton is not installed")
    shape = tuple(int(extent) for extent in case.sizes["shape"].split("x"))
    operation, length = case.op[:3], int(case.op[3:])

    def run(x):
        out = torch.empty_like(x[0])
        count = out.numel()
        chain_kernel[(triton.cdiv(count, 1024),)](x[0], out, count, 0.9, 0.1, OPERATION=operation, LENGTH=length, BLOCK=1024)
        return out

    return (lambda: (torch.rand(shape, dtype=element_type(case.dtype), device="cuda"),)), run


def read_sum(case: Case):
    count = case.sizes["bytes"] // shared.ELEMENT_BYTES[case.dtype]
    return (lambda: (normal((count,), case.dtype),)), lambda x: x[0].sum()


def along_rows(case: Case):
    rows, width = case.sizes.values()
    functions = {
        "row_sum": lambda x: x[0].sum(dim=1),
        "col_sum": lambda x: x[0].sum(dim=0),
        "softmax": lambda x: torch.softmax(x[0], dim=1),
        "rms_norm": lambda x: F.rms_norm(x[0], (width,), weight=x[1], eps=1e-6),
        "transpose": lambda x: x[0].t().contiguous(),
    }
    if case.op == "rms_norm":
        return (lambda: (normal((rows, width), case.dtype), normal((width,), case.dtype))), functions[case.op]
    return (lambda: (normal((rows, width), case.dtype),)), functions[case.op]


def short_convolution(case: Case):
    if fla is None:
        raise Unsupported("flash-linear-attention is not installed")
    convolve = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    tokens, channels = case.size("T", "E")

    def make():
        return normal((1, tokens, channels), case.dtype), 0.5 * normal((channels, 4), case.dtype)

    return make, lambda x: convolve(x[0], weight=x[1], activation="silu", backend="triton")[0]


def attention(case: Case):
    batch, heads, key_heads, tokens, width = case.size("B", "H", "HK", "T", "D")

    def make():
        q = normal((batch, heads, tokens, width), case.dtype)
        k = normal((batch, key_heads, tokens, width), case.dtype)
        return q, k, normal((batch, key_heads, tokens, width), case.dtype)

    grouped = heads != key_heads
    return make, lambda x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=grouped)


# Linear attention of flash-linear-attention: name here -> module, function, arguments beside q, k and v
# in order, and options. Arguments: `head` and `channel` are log-decays per head and per key channel,
# `beta` is a step size per head.
LINEAR_ATTENTION = {
    "linear_attn": ("linear_attn", "chunk_linear_attn", [], {"normalize": False}),
    "retnet": ("retention", "chunk_retention", [], {}),
    "mamba2_ssd": ("simple_gla", "chunk_simple_gla", ["head:g"], {}),
    "gla": ("gla", "chunk_gla", ["channel:g"], {}),
    "rwkv6": ("rwkv6", "chunk_rwkv6", ["channel:w", "bonus:u"], {}),
    "rwkv7": ("rwkv7", "chunk_rwkv7", ["channel_bounded:w", "small:a", "small:b"], {"safe_gate": True, "chunk_size": 64}),
    "deltanet": ("delta_rule", "chunk_delta_rule", ["beta:beta"], {"use_qk_l2norm_in_kernel": True}),
    "deltaproduct2": (
        "gated_delta_product",
        "chunk_gated_delta_product",
        ["head:g", "beta2:beta"],
        {"num_householder": 2, "use_qk_l2norm_in_kernel": True},
    ),
    "gdn": ("gated_delta_rule", "chunk_gated_delta_rule", ["head:g", "beta:beta"], {"use_qk_l2norm_in_kernel": True}),
    "gdn_gva": ("gated_delta_rule", "chunk_gated_delta_rule", ["head:g", "beta:beta"], {"use_qk_l2norm_in_kernel": True}),
    "kda": ("kda", "chunk_kda", ["channel:g", "beta:beta"], {"use_qk_l2norm_in_kernel": True}),
    "kda_chunk_safe": (
        "kda",
        "chunk_kda",
        ["channel_clamped:g", "beta:beta"],
        {"use_qk_l2norm_in_kernel": True, "safe_gate": True, "lower_bound": -5.0},
    ),
    "gdn2": ("gdn2", "chunk_gdn2", ["channel:g", "channel_beta:b", "value_beta:w"], {"use_qk_l2norm_in_kernel": True}),
    "comba": ("comba", "chunk_comba", ["key:p", "head:g", "beta:beta"], {"use_qk_l2norm_in_kernel": True}),
    "mesanet_cg30": (
        "mesa_net",
        "chunk_mesa_net",
        ["head_f32:g", "beta_f32:beta", "lambda:lamb"],
        {"max_CG_iteration": 30, "use_qk_l2norm_in_kernel": True},
    ),
}

DECODE = {
    "gdn": ("gated_delta_rule", "fused_recurrent_gated_delta_rule", ["head:g", "beta:beta"], {"use_qk_l2norm_in_kernel": True}),
    "kda": ("kda", "fused_recurrent_kda", ["channel:g", "beta:beta"], {"use_qk_l2norm_in_kernel": True}),
    "rwkv6": ("rwkv6", "fused_recurrent_rwkv6", ["channel:w", "bonus:u"], {}),
    "gla": ("gla", "fused_recurrent_gla", ["channel:gk"], {}),
    "deltanet": ("delta_rule", "fused_recurrent_delta_rule", ["beta:beta"], {"use_qk_l2norm_in_kernel": True}),
    "mamba2_ssd": ("simple_gla", "fused_recurrent_simple_gla", ["head:g"], {}),
}


def gate(kind: str, b: int, t: int, h: int, k: int, v: int):
    """One extra operand of a linear attention; log-decays and step sizes in their usual ranges."""
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    f32 = {"device": "cuda"}
    makers = {
        "head": lambda: F.logsigmoid(torch.randn(b, t, h, **bf16)),
        "head_f32": lambda: F.logsigmoid(torch.randn(b, t, h, **f32)),
        "channel": lambda: F.logsigmoid(torch.randn(b, t, h, k, **bf16)),
        "channel_clamped": lambda: F.logsigmoid(torch.randn(b, t, h, k, **bf16)).clamp_min(-5),
        "channel_bounded": lambda: -math.exp(-0.5) * torch.randn(b, t, h, k, **bf16).sigmoid(),
        "beta": lambda: torch.randn(b, t, h, **bf16).sigmoid(),
        "beta_f32": lambda: torch.randn(b, t, h, **f32).sigmoid(),
        "beta2": lambda: torch.randn(b, 2 * t, h, **bf16).sigmoid(),
        "channel_beta": lambda: torch.randn(b, t, h, k, **bf16).sigmoid(),
        "value_beta": lambda: torch.randn(b, t, h, v, **bf16).sigmoid(),
        "key": lambda: torch.randn(b, t, h, k, **bf16),
        "small": lambda: 0.1 * torch.randn(b, t, h, k, **bf16),
        "bonus": lambda: torch.randn(h, k, **bf16),
        "lambda": lambda: F.softplus(torch.rand(h, k, **f32)) + 0.25,
    }
    return makers[kind]()


def linear_attention(case: Case):
    if fla is None:
        raise Unsupported("flash-linear-attention is not installed")
    decode = case.op.endswith("_decode")
    name = case.op.removesuffix("_bwd").removesuffix("_decode")
    if not decode and name not in LINEAR_ATTENTION:
        name = name.removesuffix("_chunk")
    module, function, extra, options = (DECODE if decode else LINEAR_ATTENTION)[name]
    function = getattr(importlib.import_module(f"fla.ops.{module}"), function)
    b, t, h, k, v = case.size("B", "T", "H", "K", "V")
    value_heads = case.sizes.get("Hv", h)
    steps = options.get("num_householder", 1)
    first = "r" if name.startswith("rwkv") else "q"

    def make():
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        operands = {
            first: torch.randn(b, t, h, k, **bf16),
            "k": torch.randn(b, t * steps, h, k, **bf16),
            "v": torch.randn(b, t * steps, value_heads, v, **bf16),
        }
        if name.startswith("rwkv7"):
            operands["k"] = 0.1 * operands["k"]
        for entry in extra:
            kind, argument = entry.split(":")
            operands[argument] = gate(kind, b, t, value_heads, k, v)
        if decode:
            operands["initial_state"] = torch.randn(b, value_heads, k, v, device="cuda")
        return operands

    def run(operands):
        out, state = function(**operands, **options, output_final_state=decode)[:2]
        return (out, state) if decode else out

    return make, run


BUILDERS = {
    "matmul": matmul,
    "bmm": bmm,
    "read_sum": read_sum,
    "conv4_silu": short_convolution,
    **{op: elementwise for op in ("add", "copy", "exp", "silu", "tanh", "sigmoid")},
    **{op: chain for op in ("fma32", "fma256", "exp8", "exp32")},
    **{op: along_rows for op in ("row_sum", "col_sum", "softmax", "rms_norm", "transpose")},
    "sdpa_causal": attention,
}


def build(case: Case):
    """Gives a maker of input sets and the call to time on one of them."""
    forward = BUILDERS.get(case.op.removesuffix("_bwd"), linear_attention)
    make, run = forward(case)
    if not case.op.endswith("_bwd"):
        return make, run

    def make_backward():
        operands = make()
        tensors = list(operands.values() if isinstance(operands, dict) else operands)
        leaves = [x.requires_grad_(True) for x in tensors if x.is_floating_point()]
        with torch.enable_grad():
            out = run(operands)
        return leaves, out, torch.randn_like(out)

    # The forward pass ran when the inputs were made: only the backward pass is timed.
    return make_backward, lambda x: torch.autograd.grad(x[1], x[0], x[2], retain_graph=True, allow_unused=True)


def tensors_of(value):
    """All tensors of nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


class Gpu:
    """The GPU under test, its clocks where they can be read, and what was installed."""

    def __init__(self):
        if torch is None:
            shared.refuse("PyTorch is not installed")
        if not torch.cuda.is_available():
            shared.refuse("PyTorch sees no CUDA device")
        self.properties = torch.cuda.get_device_properties(0)
        self.l2_bytes = self.properties.L2_cache_size
        self.handle = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml = pynvml
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self.properties.uuid}")
            self.driver = pynvml.nvmlSystemGetDriverVersion()
        except Exception:
            self.driver = self.query("driver_version")

    @staticmethod
    def query(what: str) -> str:
        try:
            command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            return "unknown"

    def clock_mhz(self):
        """Clock of the multiprocessors now, in MHz, or None."""
        if self.handle is None:
            return None
        try:
            return self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)
        except self.nvml.NVMLError:
            return None

    def clock_limits(self) -> set:
        """What keeps the clock below its maximum now, power and heat only, in words."""
        if self.handle is None:
            return set()
        reasons = {0x4: "power", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
        try:
            active = self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
        except (self.nvml.NVMLError, AttributeError):
            return set()
        return {word for bit, word in reasons.items() if active & bit}

    def environment(self) -> dict:
        names = "name,driver_version,clocks.max.sm,clocks.max.mem,clocks.sm,clocks.mem,power.limit,power.draw,temperature.gpu,ecc.mode.current,mig.mode.current"
        return {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "triton": None if triton is None else triton.__version__,
            "flash_linear_attention": None if fla is None else getattr(fla, "__version__", "unknown"),
            "driver": self.driver,
            "gpu": self.properties.name,
            "multiprocessors": self.properties.multi_processor_count,
            "l2_bytes": self.l2_bytes,
            "memory_bytes": self.properties.total_memory,
            "nvidia_smi": dict(zip(names.split(","), self.query(names).split(", "))),
            "reduced_precision_sum_of_bf16_products": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        }


def time_case(case: Case, gpu: Gpu, stream, arguments) -> Timing:
    """Captures many calls in one CUDA graph and times its replays with device events.

    Every timed replay follows an untimed one that is still running when it is launched, so that no
    host time counts. Then the device rests, so that the power limit does not lower its clock.
    """
    torch.manual_seed(shared.SEED)
    torch.set_float32_matmul_precision("high" if case.dtype == "tf32" else "highest")
    make, run = build(case)
    sets = [make()]
    for _ in range(3):
        out = run(sets[0])
    for tensor in tensors_of(out):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float().sum())):
            raise Unsupported("the output is not finite")
    seen = {}
    for tensor in [*tensors_of(sets[0]), *tensors_of(out)]:
        seen[tensor.data_ptr()] = tensor.nbytes
    set_bytes = sum(seen.values())
    out = tensor = None

    if not arguments.warm:
        wanted = min(MAX_SETS, math.ceil(CACHE_MULTIPLE * gpu.l2_bytes / set_bytes))
        free, _ = torch.cuda.mem_get_info()
        wanted = max(1, min(wanted, int(0.6 * free / set_bytes)))
        while len(sets) < wanted:
            sets.append(make())

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    for i in range(3):
        run(sets[i % len(sets)])
    stop.record(stream)
    stream.synchronize()
    estimate_us = max(start.elapsed_time(stop) * 1000.0 / 3.0, 1.0)
    rounds = math.ceil(REPLAY_US / (estimate_us * len(sets)))
    calls = max(1, min(rounds * len(sets), MAX_CALLS // len(sets) * len(sets)))

    graph = torch.cuda.CUDAGraph()
    # Outputs stay alive for one round, so that they are written to as many places as inputs are read from.
    alive = [None] * len(sets)
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            alive[i % len(sets)] = run(sets[i % len(sets)])
    burst_us = 2 * estimate_us * calls
    for _ in range(2):
        graph.replay()
    stream.synchronize()
    samples, clocks, limits = [], [], set()
    for _ in range(arguments.repeats):
        if not arguments.sustained:
            time.sleep(PAUSE_BURSTS * burst_us / 1e6)
        graph.replay()
        start.record(stream)
        graph.replay()
        stop.record(stream)
        clocks.append(gpu.clock_mhz())
        limits |= gpu.clock_limits()
        stream.synchronize()
        samples.append(start.elapsed_time(stop) * 1000.0 / calls)
    del graph, alive
    details = {
        "calls_per_replay": calls,
        "input_sets": len(sets),
        "set_bytes": set_bytes,
        "cache": "warm" if len(sets) * set_bytes <= 2 * gpu.l2_bytes else "cold",
    }
    note = "operands warm in L2" if details["cache"] == "warm" else "operands cold in L2"
    if case.op in ("fma32", "fma256", "exp8", "exp32"):
        note += f", triton {triton.__version__}"
    if is_linear_attention(case):
        note += f", flash-linear-attention {fla.__version__}, triton {triton.__version__}"
    if limits:
        note += f", clock limited by {' and '.join(sorted(limits))}"
    clocks = [clock for clock in clocks if clock is not None]
    details["clock_min_mhz"] = min(clocks, default=None)
    clock = round(statistics.median(clocks)) if clocks else None
    return Timing(samples, "device", details, clock, note)


def flat_params(case: Case) -> str:
    """Parameters of the row: a contiguous tensor has no shape here, only a number of elements."""
    if "shape" not in case.sizes:
        return case.params
    return f"n={math.prod(int(extent) for extent in case.sizes['shape'].split('x'))}"


def is_linear_attention(case: Case) -> bool:
    """Whether flash-linear-attention does the work."""
    return case.op.removesuffix("_bwd") not in BUILDERS


def kernels_of(case: Case) -> list:
    """The kernels of one call: short name, times called, us in all, from PyTorch's profiler."""
    torch.manual_seed(shared.SEED)
    torch.set_float32_matmul_precision("high" if case.dtype == "tf32" else "highest")
    make, run = build(case)
    operands = make()
    run(operands)
    torch.cuda.synchronize()
    calls = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            run(operands)
        torch.cuda.synchronize()
    kernels = []
    for event in profile.key_averages():
        total = event.self_device_time_total
        if total > 0.0 and event.count >= calls:
            name = event.key.replace(";", " ").replace(",", " ").replace("=", " ")
            kernels.append((" ".join(name.split())[:80], event.count / calls, total / calls))
    return kernels


def write_kernels(path: Path, results: Results, measured: list) -> None:
    """Writes the kernels of all measured cases with more than one, as rows of timing `profiler`."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(shared.COLUMNS)
    with torch.no_grad():
        for case in measured:
            try:
                kernels = kernels_of(case)
            except Exception as error:
                print(f"{case.label}: no profile: {error}", file=sys.stderr)
                continue
            for name, count, us in kernels if len(kernels) > 1 else []:
                params = f"{case.params};kernel={name};calls={count:g}"
                source = f"{results.source}, {results.date}"
                writer.writerow([results.arguments.device, results.cores, case.op, params, case.dtype, "profiler", f"{us:.5g}", source])
            torch.cuda.empty_cache()
    shared.replace_file(path, table.getvalue())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shared.add_arguments(parser)
    parser.add_argument("--warm", action="store_true", help="one set of operands for all calls: small ones stay in the L2 cache")
    parser.add_argument("--sustained", action="store_true", help="no pauses between repetitions: large matrix products then run at the clock that the power limit leaves")
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="also write the kernels inside each call of linear attention and attention")
    arguments = parser.parse_args()
    chosen = shared.select(torch_cases(), arguments)
    if arguments.list:
        shared.print_cases(chosen)
        return 0
    shared.check_output(arguments)
    if arguments.kernels and arguments.kernels.exists() and not arguments.force:
        shared.refuse(f"{arguments.kernels} exists; --force overwrites it")
    gpu = Gpu()
    source = f"measured with tools/measure/measure_torch.py, torch {torch.__version__}, driver {gpu.driver}"
    results = Results(arguments, gpu.properties.multi_processor_count, gpu.environment(), source)
    stream = torch.cuda.Stream()

    def measure_case(case: Case) -> None:
        try:
            results.add(case, time_case(case, gpu, stream, arguments), params=flat_params(case))
        finally:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    with torch.cuda.stream(stream), torch.no_grad():
        measured = results.measure(chosen, measure_case)
    results.environment["nvidia_smi_after"] = gpu.query("clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active")
    status = results.write()
    if arguments.kernels:
        multi = [case for case in measured if is_linear_attention(case) or case.op.startswith("sdpa")]
        write_kernels(arguments.kernels, results, multi)
    return status


if __name__ == "__main__":
    sys.exit(main())
