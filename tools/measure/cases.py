"""The measured cases, and what the two measuring scripts share: arguments, row format, files.

A case is one operation at one size and format. Its name and parameters are those of the CSV files
in `measurements/`, so that a row measured here lies beside the rows that are there already.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import fnmatch
import io
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS = ["device", "cores", "op", "params", "dtype", "timing", "latency_us", "source"]

# Bytes of one element of each format of the dtype column.
ELEMENT_BYTES = {
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "tf32": 4,
    "f32-highest": 4,
    "s8": 1,
    "f8_e4m3fn": 1,
}

SEED = 20240


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    `term` is the part of a chip's description that the case is there to separate. `sizes` are the
    parameters of the row in order of appearance. `quick` marks the subset that `--quick` runs.
    """

    term: str
    op: str
    sizes: dict
    dtype: str
    quick: bool = False

    @property
    def params(self) -> str:
        """The `params` column."""
        return ";".join(f"{name}={value}" for name, value in self.sizes.items())

    @property
    def label(self) -> str:
        return f"{self.op} {self.params} {self.dtype}"

    def size(self, *names: str) -> tuple:
        return tuple(self.sizes[name] for name in names)


@dataclass
class Cases:
    """A list under construction; each method adds the cases of one kind of operation."""

    items: list = field(default_factory=list)

    def add(self, term, op, sizes, dtypes, quick=False):
        for dtype in [dtypes] if isinstance(dtypes, str) else dtypes:
            case = Case(term, op, dict(sizes), dtype, quick)
            if any(c.label == case.label for c in self.items):
                raise ValueError(f"case listed twice: {case.label}")
            self.items.append(case)

    def elementwise(self, term, op, shapes, dtypes, quick=()):
        """Elementwise operations; `shape` is a pair of rows and columns."""
        for shape in shapes:
            name = "x".join(str(extent) for extent in shape)
            self.add(term, op, {"shape": name}, dtypes, shape in quick)

    def matmul(self, shapes, dtypes, quick=()):
        """Products of an m by k and a k by n matrix."""
        for m, k, n in shapes:
            self.add("matrix unit", "matmul", {"m": m, "k": k, "n": n}, dtypes, (m, k, n) in quick)

    def bmm(self, shapes, dtypes, quick=()):
        """Batches of products, every operand its own."""
        for b, m, k, n in shapes:
            sizes = {"batch": b, "m": m, "k": k, "n": n}
            self.add("matrix unit, batched", "bmm", sizes, dtypes, (b, m, k, n) in quick)

    def rows(self, term, op, shapes, dtypes, columns, quick=()):
        """Operations along the rows of a matrix; `columns` is the name of the second parameter."""
        for rows, width in shapes:
            sizes = {"rows": rows, columns: width}
            self.add(term, op, sizes, dtypes, (rows, width) in quick)


def common_cases() -> Cases:
    """Cases of both scripts. Every term has small and large sizes; some sizes are odd on purpose."""
    c = Cases()
    # Launch floor: one register tile, and a few. Nothing but the launch is worth measuring here.
    c.elementwise("launch floor", "add", [(8, 128), (64, 1024)], "f32", quick=[(8, 128), (64, 1024)])
    # HBM: streams far beyond any cache, then sizes where cache and launch begin to show.
    c.elementwise("hbm", "copy", [(32768, 8192), (4096, 4096)], ["bf16", "f32"], quick=[(32768, 8192)])
    c.elementwise(
        "hbm",
        "add",
        [(4096, 1024), (8192, 8192), (32768, 8192), (1000, 1000), (4099, 4099)],
        ["bf16", "f32"],
        quick=[(8192, 8192)],
    )
    for size in (250_000_000, 1_000_000_000, 4_000_000_000):
        c.add("hbm", "read_sum", {"bytes": size}, "bf16", size == 1_000_000_000)
    c.rows("hbm", "transpose", [(8192, 2048), (8192, 8192), (5000, 3000)], "bf16", "cols")
    # Vector unit: 32 and 256 chained multiply-adds on each element. The longer chain is there for
    # chips whose memory hides the shorter one.
    c.elementwise("vector unit", "fma32", [(8192, 128), (8192, 4096)], "f32", quick=[(8192, 4096)])
    c.elementwise("vector unit", "fma256", [(8192, 128), (8192, 4096)], "f32", quick=[(8192, 4096)])
    # Transcendental unit: 1, 8 and 32 chained exponentials, and functions made of several.
    c.elementwise("transcendental unit", "exp", [(4096, 1024), (8192, 8192)], ["bf16", "f32"])
    c.elementwise("transcendental unit", "exp8", [(8192, 128), (8192, 4096)], "f32", quick=[(8192, 4096)])
    c.elementwise("transcendental unit", "exp32", [(8192, 128), (8192, 4096)], "f32", quick=[(8192, 4096)])
    c.elementwise("transcendental unit", "silu", [(8192, 8192), (3000, 7000)], ["bf16", "f32"])
    c.elementwise("transcendental unit", "tanh", [(8192, 8192)], ["bf16", "f32"])
    c.elementwise("transcendental unit", "sigmoid", [(8192, 4096)], "f32")
    # Matrix unit: squares, then shapes narrow in one or two directions, then odd ones.
    c.matmul(
        [(s, s, s) for s in (256, 512, 1024, 2048, 4096, 8192)],
        "bf16",
        quick=[(256, 256, 256), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192)],
    )
    c.matmul(
        [
            (65536, 64, 64),
            (65536, 64, 128),
            (65536, 128, 64),
            (65536, 128, 128),
            (65536, 256, 256),
            (65536, 64, 4096),
            (65536, 4096, 64),
            (8192, 4096, 128),
            (8192, 128, 4096),
            (8192, 2048, 512),
            (8192, 7168, 2048),
            (8192, 2304, 4096),
            (8192, 4096, 2304),
            (8192, 1024, 12288),
            (64, 4096, 4096),
            (128, 8192, 8192),
            (1, 8192, 8192),
            (16, 4096, 14336),
            (512, 14336, 4096),
            (4096, 4096, 16384),
        ],
        "bf16",
        quick=[(65536, 64, 64), (65536, 128, 128), (8192, 128, 4096), (64, 4096, 4096)],
    )
    c.matmul(
        [(1000, 1000, 1000), (1500, 1500, 1500), (3000, 2000, 1000), (4097, 4097, 4097), (4104, 4104, 4104)],
        "bf16",
    )
    c.matmul([(4096, 4096, 4096), (8192, 8192, 8192)], ["s8", "f8_e4m3fn"])
    c.bmm(
        [
            (4096, 64, 128, 64),
            (4096, 64, 64, 128),
            (4096, 64, 64, 64),
            (4096, 64, 128, 128),
            (4096, 128, 128, 128),
            (1024, 64, 256, 64),
            (1024, 64, 256, 512),
            (1024, 64, 64, 512),
            (2048, 128, 256, 512),
            (1024, 256, 256, 256),
            (512, 256, 256, 512),
            (4096, 16, 16, 16),
            (1000, 100, 100, 100),
        ],
        "bf16",
        quick=[(4096, 64, 128, 64), (4096, 64, 64, 128), (1024, 256, 256, 256)],
    )
    # Reductions along rows, alone and inside the two operations that every model has.
    c.rows("reduction", "row_sum", [(8192, 4096), (262144, 128), (5000, 3000)], "f32", "cols", quick=[(262144, 128)])
    c.rows("reduction", "col_sum", [(8192, 4096)], "f32", "cols")
    c.rows(
        "reduction",
        "softmax",
        [(8192, 2048), (8192, 4096), (32768, 4096), (262144, 128), (65536, 1024), (4096, 32768), (10000, 1000), (512, 131072)],
        "bf16",
        "d",
        quick=[(8192, 2048), (262144, 128)],
    )
    c.rows(
        "reduction",
        "rms_norm",
        [(8192, 4096), (32768, 4096), (262144, 128), (65536, 1024), (16384, 7168), (4096, 8192), (5000, 5120), (64, 4096)],
        "bf16",
        "d",
        quick=[(8192, 4096), (262144, 128)],
    )
    return c


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of both scripts."""
    parser.add_argument("--device", required=True, metavar="NAME", help="name for the device column: the name of the chip's hardware file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="CSV to write; a .json with the details goes beside it")
    parser.add_argument("--force", action="store_true", help="overwrite the output files")
    parser.add_argument("--quick", action="store_true", help="the subset that a first calibration needs")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="cases whose operation matches, such as 'sdpa*', or whose whole line does, such as 'matmul * s8'; may be repeated")
    parser.add_argument("--repeats", type=int, default=25, metavar="N", help="timed repetitions of each case, of which the median counts (default 25)")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no case after this long; those left out are listed in the .json")
    parser.add_argument("--list", action="store_true", help="print the cases and leave")


def refuse(message: str):
    """Leaves with a message and exit code 2: nothing was measured, nothing written."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def select(cases, arguments):
    """The cases that the arguments ask for; refuses where they ask for none."""
    chosen = [c for c in cases if c.quick or not arguments.quick]
    if arguments.only:
        chosen = [c for c in chosen if any(fnmatch.fnmatchcase(name, p) for p in arguments.only for name in (c.op, c.label))]
    if not chosen:
        refuse(f"no case matches {' '.join(arguments.only or [])}; operations: {' '.join(sorted({c.op for c in cases}))}")
    return chosen


def print_cases(cases) -> None:
    for case in cases:
        print(f"{case.term:28} {case.op:24} {case.params:44} {case.dtype:10} {'quick' if case.quick else ''}".rstrip())


def check_output(arguments) -> None:
    """Refuses, before anything is measured, what would be refused when the files are written."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", arguments.device):
        refuse(f"--device {arguments.device!r}: letters, digits, '.', '_' and '-' only, as in tpu-v6e")
    if arguments.repeats < 3:
        refuse("--repeats: at least 3, or the median says nothing")
    if arguments.out is None:
        refuse("--out FILE is missing")
    if arguments.out.suffix != ".csv":
        refuse(f"--out {arguments.out}: the name has to end in .csv")
    if not arguments.out.parent.is_dir():
        refuse(f"--out {arguments.out}: there is no folder {arguments.out.parent}")
    for path in (arguments.out, arguments.out.with_suffix(".json")):
        if path.exists() and not arguments.force:
            refuse(f"{path} exists; --force overwrites it")


@dataclass
class Timing:
    """What the timing of one case gave.

    `samples_us` are the repetitions, each already per call; `timing` is the word of the CSV column;
    `details` goes into the .json as it is; `clock_mhz` was read while the case ran, if it could be.
    """

    samples_us: list
    timing: str
    details: dict
    clock_mhz: int | None = None
    note: str = ""

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


class Results:
    """Collects rows and details, says on stderr what happens, and writes both files at the end."""

    def __init__(self, arguments, cores: int, environment: dict, source: str):
        self.arguments = arguments
        self.cores = cores
        self.environment = environment
        self.source = source
        self.date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        self.started = time.monotonic()
        self.rows = []
        self.details = []
        self.left_out = []

    def measure(self, chosen: list, measure_case) -> list:
        """Measures the cases one after another and gives those that gave a row.

        `measure_case` adds the row itself. An error leaves out its case alone. An interrupt, or a
        request to terminate, ends the measuring; what was measured until then is kept.
        """
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        measured = []
        limit = self.arguments.time_limit
        reason = None
        for case in chosen:
            if limit is not None and time.monotonic() - self.started > limit:
                reason = reason or f"not begun within {limit:g} s"
            if reason is not None:
                self.leave_out(case, reason)
                continue
            try:
                rows = len(self.rows)
                measure_case(case)
                if len(self.rows) > rows:
                    measured.append(case)
            except KeyboardInterrupt:
                reason = "interrupted"
                self.leave_out(case, reason)
            except Exception as error:
                self.leave_out(case, f"{type(error).__name__}: {error}")
        return measured

    def add(self, case: Case, timing: Timing, op: str | None = None, params: str | None = None) -> None:
        """Adds a measured case; `op` and `params` replace the case's own where the library that
        does the work has its own name in the tables."""
        samples = sorted(timing.samples_us)
        median = timing.median_us
        if not median > 0.0:
            self.leave_out(case, f"the timer gave {median} us")
            return
        op, params = op or case.op, params or case.params
        clock = "" if timing.clock_mhz is None else f", {timing.clock_mhz} MHz"
        note = f", {timing.note}" if timing.note else ""
        source = f"{self.source}{clock}{note}, {self.date}"
        latency = float(f"{median:.5g}") if median < 10000 else round(median, 1)
        row = [self.arguments.device, self.cores, op, params, case.dtype, timing.timing, latency, source]
        self.rows.append(row)
        self.details.append(
            {
                "op": op,
                "params": params,
                "dtype": case.dtype,
                "term": case.term,
                "timing": timing.timing,
                "median_us": median,
                "min_us": samples[0],
                "max_us": samples[-1],
                "p10_us": samples[len(samples) // 10],
                "p90_us": samples[-1 - len(samples) // 10],
                "samples": len(samples),
                "clock_mhz": timing.clock_mhz,
                **timing.details,
            }
        )
        spread = 100.0 * (samples[-1 - len(samples) // 10] - samples[len(samples) // 10]) / median
        seconds = time.monotonic() - self.started
        print(f"{seconds:6.1f} s  {op:22} {params:44} {case.dtype:10} {median:12.3f} us  spread {spread:4.1f} %{clock}", file=sys.stderr, flush=True)

    def leave_out(self, case: Case, reason: str) -> None:
        """Lists a case that has no row, with the reason."""
        reason = " ".join(reason.split())[:400]
        self.left_out.append({"op": case.op, "params": case.params, "dtype": case.dtype, "reason": reason})
        print(f"{case.op:22} {case.params:44} {case.dtype:10} left out: {reason}", file=sys.stderr, flush=True)

    def write(self) -> int:
        """Writes both files whole; gives the exit status: 1 where a case was left out."""
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(self.rows)
        details = {
            "device": self.arguments.device,
            "cores": self.cores,
            "date": self.date,
            "repeats": self.arguments.repeats,
            "seed": SEED,
            "environment": self.environment,
            "cases": self.details,
            "left_out": self.left_out,
        }
        replace_file(self.arguments.out, table.getvalue())
        replace_file(self.arguments.out.with_suffix(".json"), json.dumps(details, indent=1) + "\n")
        print(f"{len(self.rows)} rows in {self.arguments.out}, {len(self.left_out)} cases left out", file=sys.stderr)
        return 1 if self.left_out else 0


def replace_file(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
