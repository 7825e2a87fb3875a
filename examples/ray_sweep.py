#!/usr/bin/env python3
"""A sweep on the machines of a Ray cluster, or as processes of this machine.

    python examples/ray_sweep.py --parts 64 --out DIR -- sla_r4 --vary chunk=32..256:*2 --vary "hw.hbm.bandwidth=1000..8000:+10 GB/s"

Run it in a folder that all machines share. Every part is a task that times its points there; a part that fails is tried again and
goes on behind the rows it has. In the end the parts are joined. `--local N` uses N processes here instead of Ray.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

TRIES = 3
# Exit code of the program where its input is at fault.
BAD_INPUT = 2


def time_part(command, part, parts, folder):
    """Runs one part in `folder`. Returns an exit code and the message of the program; 0 where all points of the part have rows, some
    of which may say why they have no time."""
    message = ""
    for _ in range(TRIES):
        # One thread: the scheduler fills the processors with parts.
        environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--shard", f"{part}/{parts}"],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        message = done.stderr
        # No further try makes that good.
        if done.returncode == BAD_INPUT:
            return BAD_INPUT, message
        if done.returncode in (0, 1) and "stopped after" not in message:
            return 0, ""
    return 1, message


def on_ray(command, parts):
    import ray

    ray.init(ignore_reinit_error=True)
    task = ray.remote(num_cpus=1)(time_part)
    # Workers on other machines begin in folders of their own.
    folder = os.getcwd()
    return ray.get([task.remote(command, part, parts, folder) for part in range(parts)])


def on_this_machine(command, parts, processes):
    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(lambda part: time_part(command, part, parts, os.getcwd()), range(parts)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=16, help="parts of the sweep")
    parser.add_argument("--out", required=True, help="folder of the rows, seen by all machines")
    parser.add_argument("--local", type=int, metavar="N", help="N processes of this machine instead of Ray")
    parser.add_argument("--program", default="tpusim", help="the program, where it is not in PATH")
    parser.add_argument("sweep", nargs="+", help="workload and options of `tpusim whatif`, after `--`")
    options = parser.parse_args()

    command = [options.program, "whatif", *options.sweep, "--out", options.out]
    if options.local:
        done = on_this_machine(command, options.parts, options.local)
    else:
        done = on_ray(command, options.parts)
    for part, (code, message) in enumerate(done):
        if code == BAD_INPUT:
            # The same for all parts.
            print(message, end="", file=sys.stderr)
            return BAD_INPUT
        if code != 0:
            print(f"part {part} of {options.parts} has failed {TRIES} times: {message.strip()}", file=sys.stderr)
    return subprocess.run([options.program, "whatif", "merge", options.out]).returncode


if __name__ == "__main__":
    sys.exit(main())
