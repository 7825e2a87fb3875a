#!/usr/bin/env python3
"""Compile the programs of sweep.toml for their chips, and keep of each a compact schedule.

    python tools/tpu/kernels/sweep.py
    python tools/tpu/kernels/sweep.py --only 'tpu-v7x-sla*' --redo

Every program is compiled by dump.py in a process of its own, read by `tpusim dump --schedules`, and its dump deleted. Results are written after
every program, so that a run that was stopped goes on where it was: programs that are in one of the two files are left out. With `--stale` those
are compiled again whose sources have changed since.

    measurements/compiled/kernels.jsonl              one schedule a line, by name
    measurements/compiled/kernels_not_compiled.csv   programs that a compiler refused, with its reason

sweep.toml lists programs; each is compiled for its chips, and each of its variants, which changes some of the options, for the chips of variants:

    [[program]]
    name = "sla"                        # first part of the names of its schedules
    function = "sla.py:program"         # makes the program, see dump.py
    family = "SLA"
    options = { chunk = 128 }
    case = ["op", "params", "dtype"]    # of `tpusim predict`, without its variants; may be left out
    scalars = { kernel = { 0 = [64] } } # run-time data by kernel and operand, see docs/formats.md; may be left out
    needs = "module"                    # left out where this Python has no such module
    chip_options = { tpu-v4 = { heads_per_program = 4 } }  # where a chip differs; variants come after them
    chips = ["tpu-v7x"]                 # may be left out: those of the file
    variants = [{ chunk = 64 }]         # may be left out
    variant_chips = ["tpu-v7x"]         # may be left out: those of the file
"""

import argparse
import csv
import fnmatch
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import dump  # noqa: E402

ROOT = HERE.parents[2]
RESULTS = ROOT / "measurements" / "compiled"
COLUMNS = ("name", "chip", "function", "options", "reason", "source_digest", "command")
# What a compiler may write for one program.
SCRATCH_BYTES = 1 << 30
DOES_NOT_COMPILE = 3  # exit code of dump.py


@dataclass(frozen=True)
class Case:
    """A program for one chip."""

    name: str
    chip: str
    function: str
    family: str
    options: tuple
    predicted: tuple
    needs: str
    scalars: str

    def digest(self):
        """Digest of its sources as they are now."""
        return digest(self.function.partition(":")[0])

    def command(self, out):
        """Arguments of dump.py, run from the root of the repository."""
        words = ["--chip", self.chip, "--out", str(out), f"tools/tpu/kernels/{self.function}", "--family", self.family]
        for name, value in self.options:
            words += ["--option", f"{name}={text(value)}"]
        return words + (["--case", *self.predicted] if self.predicted else [])


@cache
def digest(file):
    """Digest of a file of this folder and of what it imports from it."""
    return dump.source_digest(HERE / file)


def text(value):
    """An option as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def fail(message):
    """Bad input: nothing has been compiled."""
    print(f"sweep.py: {message}", file=sys.stderr)
    sys.exit(2)


def table(place, given, required, optional):
    """Checks the keys of a table of the list."""
    for key in given:
        if key not in required + optional:
            fail(f"{place}: unknown key `{key}`; it may have {', '.join(required + optional)}")
    for key in required:
        if key not in given:
            fail(f"{place}: `{key}` is missing")


def cases(path):
    """The cases of a list, programs before their variants, so that what was stopped has the most telling ones."""
    try:
        declared = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        fail(f"{path}: {error}")
    table(path, declared, ("chips", "variant_chips", "program"), ())
    found = {}

    def add(program, chip, change):
        unchanged = {**program.get("options", {}), **program.get("chip_options", {}).get(chip, {})}
        options = {**unchanged, **change}
        if change and options == unchanged:
            return
        label = "".join(f"-{name}={text(value)}" for name, value in change.items())
        name = f"{chip}-{program['name']}{label}"
        if name in found:
            fail(f"{path}: `{name}` is declared twice")
        predicted = () if change else tuple(program.get("case", ()))
        kernel = (program["function"], program["family"])
        scalars = json.dumps(program["scalars"]) if "scalars" in program else ""
        found[name] = Case(name, chip, *kernel, tuple(options.items()), predicted, program.get("needs", ""), scalars)

    optional = ("options", "chip_options", "case", "needs", "scalars", "chips", "variants", "variant_chips")
    for number, program in enumerate(declared["program"], 1):
        table(f"{path}: program {number}", program, ("name", "function", "family"), optional)
    for program in declared["program"]:
        if "scalars" in program and program.get("variants"):
            fail(f"{path}: `{program['name']}` has scalars, which are those of one size, and variants")
        for chip in program.get("chips", declared["chips"]):
            add(program, chip, {})
    chips = dict.fromkeys(chip for program in declared["program"] for chip in program.get("variant_chips", declared["variant_chips"]))
    for chip in chips:
        for program in declared["program"]:
            if chip in program.get("variant_chips", declared["variant_chips"]):
                for change in program.get("variants", ()):
                    add(program, chip, change)
    return list(found.values())


class Results:
    """The two files: what compiled, by name, and what did not."""

    def __init__(self, folder):
        self.schedules_file = folder / "kernels.jsonl"
        self.refused_file = folder / "kernels_not_compiled.csv"
        self.schedules, self.refused = {}, {}
        if self.schedules_file.exists():
            for line in self.schedules_file.read_text().splitlines():
                self.schedules[json.loads(line)["name"]] = line
        if self.refused_file.exists():
            with self.refused_file.open(newline="") as file:
                self.refused = {row["name"]: row for row in csv.DictReader(file)}

    def has(self, name):
        """Whether a program is in one of the files."""
        return name in self.schedules or name in self.refused

    def is_stale(self, case):
        """Whether a program is in one of the files and its sources have changed since."""
        if case.name in self.refused:
            return self.refused[case.name]["source_digest"] != case.digest()
        return case.name in self.schedules and json.loads(self.schedules[case.name]).get("source_digest") != case.digest()

    def put(self, name, schedule=None, refused=None):
        """Notes one outcome, in place of an earlier one."""
        self.schedules.pop(name, None)
        self.refused.pop(name, None)
        if schedule is not None:
            self.schedules[name] = schedule
        else:
            self.refused[name] = refused
        self.write()

    def keep(self, names):
        """Drops programs that are no longer declared."""
        self.schedules = {name: line for name, line in self.schedules.items() if name in names}
        self.refused = {name: row for name, row in self.refused.items() if name in names}
        self.write()

    def write(self):
        """Writes both files, sorted by name."""
        replace(self.schedules_file, "".join(self.schedules[name] + "\n" for name in sorted(self.schedules)))
        rows = io.StringIO()
        writer = csv.DictWriter(rows, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.refused[name] for name in sorted(self.refused))
        replace(self.refused_file, rows.getvalue())


def replace(path, content):
    """Writes a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(content)
    os.replace(part, path)


class Broken(Exception):
    """Something other than a compiler's refusal: it is not a result."""


def last_line(stream):
    """The last line that is not empty."""
    lines = [line for line in stream.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def compile_one(case, scratch, tpusim, limit):
    """The compact schedule of a case as a line, or None and the compiler's reason."""
    folder = scratch / case.name
    command = [sys.executable, str(ROOT / "tools" / "tpu" / "dump.py"), *case.command(folder)]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            raise Broken(f"compiling took longer than {limit} s") from None
        if done.returncode == DOES_NOT_COMPILE:
            return None, last_line(done.stderr).partition(f"does not compile for {case.chip}: ")[2]
        if done.returncode != 0:
            raise Broken(last_line(done.stderr))
        if case.scalars:
            (folder / "scalars.json").write_text(case.scalars)
        line = scratch / f"{case.name}.jsonl"
        done = subprocess.run(
            [tpusim, "dump", str(folder), "--schedules", str(line), "--force", "--quiet", "--format", "json"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise Broken(last_line(done.stderr))
        return line.read_text().strip(), None
    finally:
        for path in scratch.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def scratch_parent(chosen):
    """A folder for what the compiler writes, which is read once: memory where there is enough of it."""
    if chosen:
        return chosen
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > SCRATCH_BYTES:
        return memory
    return Path(tempfile.gettempdir())


def main():
    """Compiles what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", type=Path, default=HERE / "sweep.toml", help="list of programs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the two files")
    parser.add_argument("--tpusim", default="tpusim", help="the program, where it is not on the path")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names such as 'tpu-v7x-sla*'")
    parser.add_argument("--redo", action="store_true", help="also those that are done")
    parser.add_argument("--stale", action="store_true", help="also those that are done and whose sources have changed since")
    parser.add_argument("--dry-run", action="store_true", help="print the names and compile nothing")
    parser.add_argument("--scratch", type=Path, help="folder for dumps, each deleted once it is read")
    parser.add_argument("--limit", type=int, default=3600, metavar="SECONDS", help="longest time that one program may take")
    args = parser.parse_args()
    declared = cases(args.list)
    results = Results(args.results)
    asked = [case for case in declared if fnmatch.fnmatchcase(case.name, args.only)]
    if not asked:
        fail(f"--only {args.only}: no such program; names look like `{declared[0].name}`" if declared else f"{args.list} declares nothing")
    stale = [case for case in asked if results.is_stale(case)]
    left = [case for case in asked if args.redo or not results.has(case.name) or (args.stale and case in stale)]
    if stale and not (args.stale or args.redo):
        print(f"sweep.py: the sources of {len(stale)} programs have changed since; --stale compiles them again", file=sys.stderr)
    for module in sorted({case.needs for case in left if case.needs}):
        if importlib.util.find_spec(module) is None:
            without = [case for case in left if case.needs == module]
            print(f"sweep.py: no module `{module}`: {len(without)} programs are left out", file=sys.stderr)
            left = [case for case in left if case.needs != module]
    if args.dry_run:
        print("\n".join(case.name for case in left))
        return
    if shutil.which(args.tpusim) is None:
        fail(f"no program `{args.tpusim}`; `cargo install --path .` installs it, --tpusim names it")
    args.results.mkdir(parents=True, exist_ok=True)
    results.keep({case.name for case in declared})
    broken = []
    with tempfile.TemporaryDirectory(prefix="tpu-sweep-", dir=scratch_parent(args.scratch)) as scratch:
        for number, case in enumerate(left, 1):
            start = time.monotonic()
            try:
                line, why = compile_one(case, Path(scratch), args.tpusim, args.limit)
            except Broken as error:
                broken.append(f"{case.name}: {error}")
                outcome = f"broken: {error}"
            else:
                refused = {
                    "name": case.name,
                    "chip": case.chip,
                    "function": case.function,
                    "options": ";".join(f"{name}={text(value)}" for name, value in case.options),
                    "reason": why,
                    "source_digest": case.digest(),
                    "command": "dump.py " + " ".join(case.command(case.name)),
                }
                results.put(case.name, schedule=line, refused=refused)
                outcome = "compiled" if line else f"not compiled: {why}"
            print(f"{number}/{len(left)} {case.name}: {outcome}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    print(f"{len(results.schedules)} compiled, {len(results.refused)} not, {len(broken)} broken", file=sys.stderr)
    for line in broken:
        print(f"  {line}", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
