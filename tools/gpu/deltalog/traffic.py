#!/usr/bin/env python3
"""Counts the bytes that decode steps move in device memory, with Nsight Compute (`ncu`).

    python3 traffic.py --out h200_deltalog_traffic.json

Each kernel is run once under the profiler, with the caches as the kernel before left them. Steps alternate
between two sets of operands that are each larger than the L2 cache, so a step finds little of its own set
there. A DeltaLog row is the average over whole merge intervals, of which the first is not counted.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import bench
from bench import LOGS, MECHANISMS, Operands, shared
from cases import Case
from kernels import Launch

# What is counted, by name in the result.
METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
}
SETS = 2


def traffic_cases() -> list:
    """The cases of the published table: 128 sequences, with the interval and log of each mechanism, and others beside it."""
    found = []
    for mechanism in MECHANISMS:
        sizes = {"B": 128, "T": 1, "H": 32, "K": 128, "V": 128, "state": "f32"}
        found.append(Case("eager", f"{mechanism}_decode_eager", sizes, "bf16"))
        for log, slots in [("bf16", 4), ("bf16", 8), ("bf16", 16), ("bf16xf32", 8), ("f32", 8)]:
            found.append(Case("deltalog", f"{mechanism}_decode_deltalog", {**sizes, "log": log, "M": slots}, "bf16"))
    return found


def work(cases: list, launch: Launch) -> list:
    """Runs the kernels, those that count between start and stop of the profiler; gives their number for each case."""
    counts = []
    for case in cases:
        operands = Operands(MECHANISMS[case.op.split("_")[0]], *case.size("B", "H", "K", "V"), SETS)
        slots = case.sizes.get("M")
        logs = operands.logs(slots, LOGS[case.sizes["log"]]) if slots else None
        calls = bench.calls_of(case, operands, logs, lambda *_: launch)
        for call in calls:
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for call in calls:
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        counts.append(len(calls))
    return counts


def count(cases: list, launch: Launch) -> list:
    """Metrics of every kernel that counts, in order, from a run of this script under the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counts.csv"
        command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
        command += ["--metrics", ",".join(METRICS.values()), "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += [sys.executable, __file__, "--worker", f"{launch.block_v},{launch.warps}"]
        done = subprocess.run(command, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
        if done.returncode != 0:
            raise SystemExit(f"error: ncu failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}{text[-2000:]}")
    start = text.find('"ID"')
    if start < 0:
        raise SystemExit(f"error: ncu counted nothing\n{text[-2000:]}")
    rows = list(csv.DictReader(io.StringIO(text[start:])))
    # The first row holds the units.
    return [{name: float(row[metric].replace(",", "")) for name, metric in METRICS.items()} for row in rows if row["ID"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON to write")
    parser.add_argument("--worker", metavar="COLUMNS,WARPS", help=argparse.SUPPRESS)
    parser.add_argument("--launch", default="32,4", metavar="COLUMNS,WARPS", help="value columns of one program and its warps (default 32,4)")
    arguments = parser.parse_args()
    launch = Launch(*(int(number) for number in (arguments.worker or arguments.launch).split(",")))
    cases = traffic_cases()
    if arguments.worker:
        work(cases, launch)
        return 0
    if arguments.out is None:
        shared.refuse("--out FILE is missing")
    if shutil.which("ncu") is None:
        shared.refuse("ncu is not on the path")
    counted = count(cases, launch)
    expected = [SETS * case.sizes.get("M", 1) for case in cases]
    if len(counted) != sum(expected):
        raise SystemExit(f"error: ncu counted {len(counted)} kernels of {sum(expected)}")
    rows, first = [], 0
    for case, kernels in zip(cases, expected):
        part = counted[first : first + kernels]
        first += kernels
        mean = {name: sum(kernel[name] for kernel in part) / kernels for name in METRICS}
        read, written = bench.derived_bytes(case)
        rows.append(
            {
                "op": case.op,
                "params": case.params,
                "derived_bytes_read": read,
                "derived_bytes_written": written,
                "dram_bytes_read": round(mean["dram_read"]),
                "dram_bytes_written": round(mean["dram_written"]),
            }
        )
        print(f"{case.op:24} {case.params:56} read {mean['dram_read'] / 1e6:7.1f} of {read / 1e6:7.1f} MB, written {mean['dram_written'] / 1e6:7.1f} of {written / 1e6:7.1f} MB")
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    result = {"profiler": f"ncu {version}", "launch": {"block_v": launch.block_v, "warps": launch.warps}, "metrics": METRICS, "cases": rows}
    shared.replace_file(arguments.out, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
