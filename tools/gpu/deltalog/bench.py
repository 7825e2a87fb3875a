#!/usr/bin/env python3
"""Times eager and DeltaLog decode steps on an NVIDIA GPU and writes a CSV of latencies.

    python3 bench.py --device h200-sxm --out h200_deltalog.csv

README.md beside this file says what is measured and how. Needs PyTorch with CUDA and Triton.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "measure"))

import torch
import triton

import cases as shared
import kernels
from cases import Case, Results, Timing
from kernels import MECHANISMS, Launch, Token
from measure_torch import CACHE_MULTIPLE, MAX_SETS, Gpu
from reference import recurrence

# A replay lasts at least this long, and holds at most about so many kernels.
REPLAY_US = 1500.0
MAX_CALLS = 8192
# Rest after each repetition, in units of the time it took.
PAUSE_BURSTS = 1
# Operand sets even where one is far larger than the L2 cache: what of it stayed there from the step before is displaced.
LEAST_SETS = 2
# Formats of logged keys and updates. Cumulative decays are f32 as the state is.
LOGS = {
    "f32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16xf32": (torch.bfloat16, torch.float32),
}
# Launches that are tried, the fastest of which is measured.
LAUNCHES = [Launch(16, 1), Launch(16, 2), Launch(32, 1), Launch(32, 2), Launch(32, 4), Launch(64, 2), Launch(64, 4), Launch(128, 4)]
ALL_LAUNCHES = [Launch(block, warps) for block in (8, 16, 32, 64, 128) for warps in (1, 2, 4, 8) if 4 <= block / warps <= 32]
# Slots of the log with which launches are tried.
PROBE_SLOTS = 17


def deltalog_cases() -> list:
    """Whole steps averaged over a merge interval, then the kernels they consist of."""
    c = shared.Cases()

    def add(mechanism, part, batch, heads, **more):
        sizes = {"B": batch, "T": 1, "H": heads, "K": 128, "V": 128, "state": "f32", **more}
        quick = (batch, heads) == (128, 32) and more.get("M", 8) == 8 and more.get("length", 7) >= 7
        c.add(part, f"{mechanism}_decode_{part}", sizes, "bf16", quick)

    # The intervals and logs of the DeltaLog paper; RWKV6 has the bf16 log of every mechanism.
    published = {"gdn": (8, "bf16xf32"), "kda": (4, "bf16xf32")}
    for mechanism in MECHANISMS:
        for batch in (1, 4, 16, 64, 128, 256, 512):
            add(mechanism, "eager", batch, 32)
            for slots in (1, 2, 4, 8, 16):
                add(mechanism, "deltalog", batch, 32, log="bf16", M=slots)
            for slots in (4, 8, 16) if batch == 128 else (8,):
                add(mechanism, "deltalog", batch, 32, log="f32", M=slots)
            if mechanism in published:
                slots, log = published[mechanism]
                add(mechanism, "deltalog", batch, 32, log=log, M=slots)
        for batch in (1, 256):
            add(mechanism, "eager", batch, 16)
            for slots in (4, 8, 16):
                add(mechanism, "deltalog", batch, 16, log="bf16", M=slots)
        for batch in (1, 128, 512):
            for length in (0, 1, 3, 7, 11, 15):
                add(mechanism, "deltalog_append", batch, 32, log="bf16", M=16, length=length)
            for slots in (4, 8, 16):
                add(mechanism, "deltalog_append_merge", batch, 32, log="bf16", M=slots, length=slots - 1)
                add(mechanism, "deltalog_merge", batch, 32, log="bf16", M=slots, length=slots)
                add(mechanism, "deltalog", batch, 32, log="bf16", M=slots, merge="separate")
            for slots in (4, 8):
                for split in (4, 8):
                    add(mechanism, "deltalog", batch, 32, log="bf16", M=slots, split=split)
    return c.items


def derived_bytes(case: Case) -> tuple:
    """Bytes that one call, or an average step, has to read and to write, each tensor once."""
    mechanism = MECHANISMS[case.op.split("_")[0]]
    b, h, k, v = case.size("B", "H", "K", "V")
    decay = 4 * (k if mechanism.channel else 1)
    base = 4 * k * v
    inputs = 2 * (2 * k + v) + decay + (2 if mechanism.delta else 0)
    if case.term == "eager":
        read, write = base + inputs, base + 2 * v
    else:
        key_type, update_type = LOGS[case.sizes["log"]]
        entry = k * key_type.itemsize + v * update_type.itemsize + decay
        slots, length = case.sizes["M"], case.sizes.get("length")
        # Products of split replay, written by one kernel and read by the other; that one reads keys and decays again.
        products = 8 if "split" in case.sizes else 0

        def append(n):
            return base + inputs + n * (entry + products), entry + 2 * v + n * products

        def append_merge(n):
            return base + inputs + n * (entry + products), base + 2 * v + n * products

        def merge(n):
            return base + n * entry, base

        if case.term == "deltalog":
            last = [append(slots - 1), merge(slots)] if "merge" in case.sizes else [append_merge(slots - 1)]
            steps = [append(n) for n in range(slots - 1)] + last
            read, write = (sum(step[i] for step in steps) / slots for i in (0, 1))
        else:
            parts = {"deltalog_append": append, "deltalog_append_merge": append_merge, "deltalog_merge": merge}
            read, write = parts[case.term](length)
    bonus = 0 if mechanism.delta or case.term == "deltalog_merge" else 2 * h * k
    return round(b * h * read + bonus), round(b * h * write)


class Operands:
    """Sets of tokens, states and outputs of one mechanism and size, seeded."""

    def __init__(self, mechanism, b: int, h: int, k: int, v: int, sets: int, dtype=torch.bfloat16, state=torch.float32):
        torch.manual_seed(shared.SEED)
        make = {"device": "cuda"}
        self.mechanism = mechanism
        self.bases = list(torch.randn(sets, b, h, k, v, dtype=state, **make))
        self.outs = list(torch.empty(sets, b, h, v, dtype=dtype, **make))
        q = (torch.randn(sets, b, h, k, **make) / math.sqrt(k)).to(dtype)
        keys = torch.nn.functional.normalize(torch.randn(sets, b, h, k, dtype=state, **make), dim=-1).to(dtype)
        values = torch.randn(sets, b, h, v, **make).to(dtype)
        decays = torch.nn.functional.logsigmoid(torch.randn((sets, b, h, k) if mechanism.channel else (sets, b, h), dtype=state, **make))
        betas = torch.randn(sets, b, h, **make).sigmoid().to(dtype)
        bonus = torch.randn(h, k, **make).to(dtype)
        self.tokens = [Token(q[i], keys[i], values[i], decays[i], betas[i], bonus) for i in range(sets)]

    def logs(self, slots: int, types: tuple) -> list:
        """One full log for each set, with cumulative decays that fall."""
        logs = [kernels.empty_log(self.mechanism, base, slots, *types) for base in self.bases]
        for log in logs:
            log.k.normal_(std=1.0 / math.sqrt(log.k.shape[-1]))
            log.u.normal_()
            log.decay.uniform_(-1.0, 0.0)
            log.decay.copy_(log.decay.cumsum(2))
        return logs


def set_count(case: Case, gpu: Gpu) -> int:
    """Sets that together are several times the L2 cache, by the states alone."""
    b, h, k, v = case.size("B", "H", "K", "V")
    return max(LEAST_SETS, min(MAX_SETS, math.ceil(CACHE_MULTIPLE * gpu.l2_bytes / (4 * b * h * k * v))))


def kernels_in(case: Case) -> list:
    """Kernels of a case, each with the length of the log it meets."""
    if case.term != "deltalog":
        return [(case.term.removeprefix("deltalog_"), case.sizes.get("length", 0))]
    slots = case.sizes["M"]
    last = [("append", slots - 1), ("merge", slots)] if "merge" in case.sizes else [("append_merge", slots - 1)]
    return [("append", length) for length in range(slots - 1)] + last


def calls_of(case: Case, operands: Operands, logs: list, choose) -> list:
    """One round over all sets, each entry one step or one call; `choose` gives the launch of a kernel and length."""
    m = operands.mechanism
    sets = list(zip(operands.tokens, operands.bases, operands.outs, logs or [None for _ in operands.bases]))
    split = "split" in case.sizes
    if case.term == "deltalog":
        fused, slots = "merge" not in case.sizes, case.sizes["M"]
        merging = choose(*kernels_in(case)[-1])
        appending = [choose("append", n) if n < slots - 1 or not fused else None for n in range(slots)]
        # All sets take a step before any takes the next one, so that a step finds nothing of its own in the cache.
        return [
            lambda s=s, n=n: kernels.cycle_step(m, s[0], s[1], s[3], n, s[2], appending[n], merging, fused, split)
            for n in range(slots)
            for s in sets
        ]
    kernel, length = kernels_in(case)[0]
    launch = choose(kernel, length)
    runs = {
        "eager": lambda s: kernels.eager(m, s[0], s[1], s[2], launch),
        "append": lambda s: kernels.logged(m, s[0], s[1], s[3], length, s[2], launch, split=split),
        "append_merge": lambda s: kernels.logged(m, s[0], s[1], s[3], length, s[2], launch, merge=True, split=split),
        "merge": lambda s: kernels.merge(m, s[1], s[3], length, launch),
    }
    return [lambda s=s: runs[kernel](s) for s in sets]


def replay(calls: list, gpu: Gpu, stream, repeats: int, least_us: float) -> tuple:
    """Microseconds per call of each timed replay of a graph of the calls, clocks, limits, calls in the graph."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    calls[0]()
    start.record(stream)
    for call in calls[:8]:
        call()
    stop.record(stream)
    stream.synchronize()
    estimate_us = max(start.elapsed_time(stop) * 1000.0 / min(8, len(calls)), 1.0)
    rounds = max(1, min(math.ceil(least_us / (estimate_us * len(calls))), MAX_CALLS // len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(2):
        graph.replay()
    stream.synchronize()
    samples, clocks, limits, burst_s = [], [], set(), 0.0
    for _ in range(repeats):
        time.sleep(PAUSE_BURSTS * burst_s)
        # The timed replay follows one that still runs when it is launched: no host time counts.
        graph.replay()
        start.record(stream)
        graph.replay()
        stop.record(stream)
        clocks.append(gpu.clock_mhz())
        limits |= gpu.clock_limits()
        stream.synchronize()
        burst_s = 2e-3 * start.elapsed_time(stop)
        samples.append(start.elapsed_time(stop) * 1000.0 / (rounds * len(calls)))
    return samples, [clock for clock in clocks if clock is not None], limits, rounds * len(calls)


@dataclass
class Bench:
    gpu: Gpu
    stream: object
    launches: list
    repeats: int

    def __post_init__(self):
        self.operands = (None, None)
        self.best = {}
        self.trials = {}
        self.probes = (None, None)

    def operands_of(self, case: Case) -> Operands:
        key = (case.op.split("_")[0], case.size("B", "H", "K", "V"))
        if self.operands[0] != key:
            self.operands = self.probes = (None, None)
            torch.cuda.empty_cache()
            self.operands = (key, Operands(MECHANISMS[key[0]], *key[1], set_count(case, self.gpu)))
        return self.operands[1]

    def tuned(self, case: Case, operands: Operands) -> dict:
        """The fastest launch of each kernel of a case, measured once for each size; up to four entries count as four."""
        fixed = case.sizes.get("split")
        found = {}
        for kernel, length in kernels_in(case):
            rows = max(4, kernels.padded(length)) if length else 0
            probe_length = min(rows, PROBE_SLOTS - 1)
            sizes = {name: case.sizes[name] for name in ("B", "T", "H", "K", "V", "state", "log", "split") if name in case.sizes}
            if kernel != "eager":
                sizes |= {"M": PROBE_SLOTS, "length": probe_length}
            probe = Case(f"deltalog_{kernel}" if kernel != "eager" else kernel, f"{operands.mechanism.name}_decode_{kernel}", sizes, case.dtype)
            if probe.label not in self.best:
                logs = self.probe_logs(operands, case.sizes["log"]) if kernel != "eager" else None
                times = []
                for launch in launches_of(fixed, case.sizes["V"], self.launches):
                    calls = calls_of(probe, operands, logs, lambda *_: launch)
                    times.append((min(replay(calls, self.gpu, self.stream, 3, REPLAY_US / 4)[0]), launch))
                self.trials[probe.label] = ", ".join(f"{launch} {us:.5g} us" for us, launch in times)
                self.best[probe.label] = min(times, key=lambda timed: timed[0])[1]
            found[kernel, length] = self.best[probe.label]
        return found

    def probe_logs(self, operands: Operands, log: str) -> list:
        if self.probes[0] != log:
            self.probes = (log, operands.logs(PROBE_SLOTS, LOGS[log]))
        return self.probes[1]

    def time_case(self, case: Case) -> Timing:
        operands = self.operands_of(case)
        launches = self.tuned(case, operands)
        logs = operands.logs(case.sizes["M"], LOGS[case.sizes["log"]]) if case.term != "eager" else None
        calls = calls_of(case, operands, logs, lambda kernel, length: launches[kernel, length])
        samples, clocks, limits, count = replay(calls, self.gpu, self.stream, self.repeats, REPLAY_US)
        if not all(bool(out.float().isfinite().all()) for out in operands.outs):
            raise ValueError("an output is not finite")
        read, written = derived_bytes(case)
        details = {
            "calls_per_replay": count,
            "input_sets": len(operands.bases),
            "launches": ", ".join(f"{kernel} at {length}: {launch}" for (kernel, length), launch in launches.items()),
            "derived_bytes_read": read,
            "derived_bytes_written": written,
            "derived_gb_per_s": round((read + written) / statistics.median(samples) / 1e3, 1),
            "clock_min_mhz": min(clocks, default=None),
        }
        note = f"operands cold in L2, triton {triton.__version__}"
        if limits:
            note += f", clock limited by {' and '.join(sorted(limits))}"
        return Timing(samples, "device", details, round(statistics.median(clocks)) if clocks else None, note)


def launches_of(split: int | None, v: int, launches: list) -> list:
    """Split replay over a number of programs fixes the value columns of each."""
    return launches if split is None else [Launch(v // split, 1), Launch(v // split, 2)]


def variants(chosen: list, launches: list) -> list:
    """The kernels that the cases need, as arguments of `compile_variant`."""
    wanted = set()
    for case in chosen:
        name, log, split = case.op.split("_")[0], case.sizes.get("log"), case.sizes.get("split")
        for kernel, length in kernels_in(case):
            rows = kernels.padded(length)
            for launch in launches_of(split, case.sizes["V"], launches):
                common = (launch, split is not None, case.sizes["K"], case.sizes["V"])
                wanted.add((name, kernel, log, rows, *common))
                if kernel != "eager":
                    wanted.add((name, kernel, log, max(4, rows) if rows else 0, *common))
    return sorted(wanted, key=repr)


def compile_variant(variant: tuple) -> None:
    """Compiles one kernel into Triton's cache by a small launch."""
    name, kernel, log, length, launch, split, k, v = variant
    sizes = {"B": 1, "T": 1, "H": 16, "K": k, "V": v, "length": length}
    if split:
        sizes["split"] = 1
    operands = Operands(MECHANISMS[name], 1, 16, k, v, 1)
    logs = operands.logs(PROBE_SLOTS, LOGS[log]) if log else None
    for call in calls_of(Case("eager" if kernel == "eager" else f"deltalog_{kernel}", "", sizes, "bf16"), operands, logs, lambda *_: launch):
        call()
    torch.cuda.synchronize()


def check(name: str, slots: int, state: torch.dtype, types: tuple, tokens: int, **how) -> dict:
    """Largest errors of outputs and last state on this device against the recurrence in f64, on the same inputs."""
    mechanism = MECHANISMS[name]
    b, h, k, v = 2, 16, 128, 128
    dtype = torch.float64 if state == torch.float64 else torch.bfloat16
    operands = Operands(mechanism, b, h, k, v, tokens, dtype, state)
    base = operands.bases[0].clone()
    expected, last = recurrence(mechanism, operands.tokens, base)
    outs = torch.empty(tokens, b, h, v, dtype=state, device="cuda")
    log = kernels.empty_log(mechanism, base, slots, *types) if slots else None
    for step, token in enumerate(operands.tokens):
        if slots:
            kernels.cycle_step(mechanism, token, base, log, step, outs[step], Launch(), Launch(), **how)
        else:
            kernels.eager(mechanism, token, base, outs[step], Launch())
    if slots and tokens % slots:
        kernels.merge(mechanism, base, log, tokens % slots, Launch())
    relative = lambda a, e: float((a.double() - e).norm() / e.norm())
    return {
        "mechanism": mechanism.name,
        "M": slots,
        "state": str(state).removeprefix("torch."),
        "log": "x".join(str(t).removeprefix("torch.") for t in types) if slots else None,
        **how,
        "tokens": tokens,
        "relative_error_outputs": relative(outs, expected),
        "relative_error_state": relative(base, last),
    }


def checks() -> list:
    """Arguments of `check`. States and logs in f64 have to agree to 1e-10; what f32 and logs in bf16 lose is recorded."""
    found = []
    f64 = (torch.float64, torch.float64)
    for name in MECHANISMS:
        for slots, how in [(0, {}), (3, {}), (8, {}), (8, {"split": True}), (8, {"fused": False}), (16, {})]:
            found.append(((name, slots, torch.float64, f64, 37), how))
        found.append(((name, 0, torch.float32, f64, 500), {}))
        for slots in (4, 8, 16):
            found += [((name, slots, torch.float32, types, 500), {}) for types in LOGS.values()]
    return found


def prepare(chosen: list, launches: list) -> list:
    """Compiles all kernels and checks the numerics, with several processes, before anything is timed; gives what the checks found."""
    wanted = variants(chosen, launches)
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    found = []
    with concurrent.futures.ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=context) as pool:
        checked = [pool.submit(check, *arguments, **how) for arguments, how in checks()]
        compiled = [(variant, pool.submit(compile_variant, variant)) for variant in wanted]
        for result in checked:
            found.append(result.result())
            worst = max(found[-1]["relative_error_outputs"], found[-1]["relative_error_state"])
            if found[-1]["state"] == "float64" and not worst < 1e-10:
                raise SystemExit(f"error: not the recurrence: {found[-1]}")
        for variant, result in compiled:
            try:
                result.result()
            except Exception as error:
                print(f"{variant}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"numerics checked and {len(wanted)} kernels compiled in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shared.add_arguments(parser)
    parser.add_argument("--all-launches", action="store_true", help="try every number of value columns and warps that makes sense, not the usual few")
    parser.set_defaults(repeats=15)
    arguments = parser.parse_args()
    chosen = shared.select(deltalog_cases(), arguments)
    if arguments.list:
        shared.print_cases(chosen)
        return 0
    shared.check_output(arguments)
    gpu = Gpu()
    launches = ALL_LAUNCHES if arguments.all_launches else LAUNCHES
    checked = prepare(chosen, launches)
    source = f"measured with tools/gpu/deltalog/bench.py, torch {torch.__version__}, driver {gpu.driver}"
    results = Results(arguments, gpu.properties.multi_processor_count, gpu.environment(), source)
    stream = torch.cuda.Stream()
    bench = Bench(gpu, stream, launches, arguments.repeats)
    # Cases of one size share their operands.
    chosen.sort(key=lambda case: (-case.sizes["H"], case.sizes["B"], case.op.split("_")[0]))
    with torch.cuda.stream(stream), torch.no_grad():
        results.environment["correctness"] = checked
        results.measure(chosen, lambda case: results.add(case, bench.time_case(case)))
    results.environment["launches_tried"] = bench.trials
    results.environment["nvidia_smi_after"] = gpu.query("clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active")
    return results.write()


if __name__ == "__main__":
    sys.exit(main())
