#!/usr/bin/env python3
"""Runs the shipped models and writes the page that shows them beside published numbers, docs/models.md.

    tools/models.py

`TPUSIM` names a built program; without it one is built. Needs nothing but Python 3.9.
"""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Steps of training on one chip, in ms, as the SLA paper prints them.
TRAINING = [
    ("sla_0L1A", "0L:1A full attention", 2313.8),
    ("sla_4L1A_kda", "4L:1A KDA, f32 state", 2165.1),
    ("sla_4L1A_r2", "4L:1A SLA-R2, bf16 state", 1952.9),
    ("sla_4L1A_r4", "4L:1A SLA-R4, bf16 state", 1878.3),
]
# Rows of its prefill study, whose numbers did not survive.
PREFILL = [
    ("sla_0L1A", "0L:1A full attention"),
    ("sla_15L1A_kda", "15L:1A KDA, f32 state"),
    ("sla_7L1A_r4", "7L:1A SLA-R4, bf16 state"),
    ("sla_15L1A_r4", "15L:1A SLA-R4, FP8 state"),
]
DELTALOG = [("qwen3_6_35b_a3b", "Qwen-35B (GDN)"), ("kimi_linear_48b_a3b", "Kimi-48B (KDA)")]


def program():
    if "TPUSIM" in os.environ:
        return os.environ["TPUSIM"]
    subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=ROOT, check=True)
    return str(ROOT / "target/release/tpusim")


TPUSIM = program()


def run(model, *arguments):
    command = [TPUSIM, "--quiet", "--format", "json", "run", model, *arguments]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def table(header, rows):
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def interval(point):
    if point["low_us"] is None:
        return "none"
    return f"{point['low_us'] / 1e3:.2f} to {point['high_us'] / 1e3:.2f}"


def gib(size):
    return f"{size / 2**30:.1f}"


def memory(point):
    held = point["memory"]
    states = held["state_bytes"] + held["convolution_state_bytes"]
    fits = "fits" if held["fits"] else "out of memory"
    return [gib(held["weight_bytes"]), gib(states), gib(held["cache_bytes"]), gib(held["capacity_bytes"]), fits, str(held["largest_batch"])]


def models():
    rows = []
    for model in ["qwen3_next_80b_a3b", "qwen3_6_35b_a3b", "kimi_linear_48b_a3b"]:
        result = run(model, "--hw", "tpu-v7x", "--set", "prefill.tokens=512", "--set", "decode.batch=1")
        blocks = ", ".join(f"{block['count']} {block['name']}" for block in result["blocks"])
        state = sum(block["count"] * block["state_bytes"] for block in result["blocks"])
        cache = sum(block["count"] * block["cache_bytes_per_token"] for block in result["blocks"])
        rows.append(
            [
                f"`{model}`",
                blocks,
                f"{result['parameters'] / 1e9:.2f}",
                f"{result['active_parameters'] / 1e9:.2f}",
                f"{state / 2**20:.0f}",
                f"{cache}",
            ]
        )
    table(["model", "blocks", "parameters (10^9)", "used by a token (10^9)", "state of a sequence (MiB)", "cache (B per token)"], rows)


def deltalog():
    rows = []
    for model, name in DELTALOG:
        result = run(model, "--hw", "h200-nvl", "--set", "prefill.tokens=512")
        for point in result["chips"][0]["decode"]:
            for published in point["published"]:
                error = published["error_percent"]
                ours = f"{point['time_us'] / 1e3:.2f}" if error is not None else ""
                rows.append(
                    [
                        name,
                        str(point["batch"]),
                        published["method"],
                        f"{published['published_us'] / 1e3:.2f}",
                        ours,
                        interval(point) if error is not None else "",
                        f"{error:+.1f}" if error is not None else "",
                    ]
                )
    table(["model", "batch", "method", "published (ms)", "predicted (ms)", "80 % interval (ms)", "error (%)"], rows)


def where():
    rows = []
    for model, name in DELTALOG:
        result = run(model, "--hw", "h200-nvl", "--set", "prefill.tokens=512", "--set", "decode.batch=128")
        point = result["chips"][0]["decode"][0]
        for part in point["parts"]:
            rows.append(
                [
                    name,
                    part["block"],
                    part["part"],
                    str(part["count"]),
                    str(len(part["launches"])),
                    f"{part['time_us']:.1f}",
                    f"{100 * part['share']:.1f}",
                    part["longest"],
                    part["bound"],
                ]
            )
    table(["model", "block", "part", "count", "launches", "one (us)", "share (%)", "longest launch", "bound"], rows)


def training():
    results = {model: run(model, "--hw", "tpu-v7x", "--set", "prefill.tokens=32768") for model, _, _ in TRAINING}
    times = {model: result["chips"][0]["prefill"][0]["time_us"] for model, result in results.items()}
    reference = times["sla_4L1A_kda"]
    published = {model: step for model, _, step in TRAINING}
    rows = [
        [
            name,
            f"{step:.1f}",
            f"{published['sla_4L1A_kda'] / step:.3f}",
            f"{times[model] / 1e3:.1f}",
            f"{reference / times[model]:.3f}",
        ]
        for model, name, step in TRAINING
    ]
    table(["model", "published training step (ms)", "over 4L:1A KDA", "predicted prefill (ms)", "over 4L:1A KDA"], rows)


def prefill():
    rows = []
    for model, name in PREFILL:
        result = run(model, "--hw", "tpu-v7x")
        per_token = max(block["cache_bytes_per_token"] for block in result["blocks"])
        state = max(block["state_bytes"] for block in result["blocks"])
        for point in result["chips"][0]["prefill"]:
            rows.append(
                [
                    name,
                    str(point["tokens"]),
                    f"{point['time_us'] / 1e3:.1f}",
                    interval(point),
                    f"{state / 2**20:.2f}",
                    f"{per_token * point['tokens'] / 2**20:.0f}",
                ]
            )
    header = ["model", "tokens", "first token (ms)", "80 % interval (ms)", "state of a linear layer (MiB)", "cache of a full layer (MiB)"]
    table(header, rows)


def serving():
    rows = []
    for model, name in PREFILL:
        result = run(model, "--hw", "tpu-v7x", "--set", "prefill.tokens=512")
        for point in result["chips"][0]["decode"]:
            rows.append([name, str(point["batch"]), f"{point['time_us'] / 1e3:.2f}", f"{point['tokens_per_second']:.0f}", *memory(point)])
    header = ["model", "batch", "per token (ms)", "tokens/s of the device", "weights (GiB)", "states (GiB)", "caches (GiB)", "of (GiB)", "", "largest batch"]
    table(header, rows)


def page():
    print("# Models\n")
    print("Written by `tools/models.py`. Sizes, sources and what is assumed stand in `models/*.yaml`; how a model is timed, in [model.md](model.md).\n")
    models()
    print("## Serving of the DeltaLog paper\n")
    print("Time per output token on an H200 NVL. The paper prints neither context nor format of the weights: 1024 tokens and bf16 are assumed. The baseline keeps a dense state, which the plan `fused` stands for.\n")
    deltalog()
    print("Where the time goes at batch 128:\n")
    where()
    print("## Hybrids of the SLA paper\n")
    print("The paper prints no sizes of its hybrids; those of the files are assumed, so absolute times do not compare. A training step runs forward, backward and collectives over many chips, a prefill only the first of these: the columns to compare are the ratios.\n")
    training()
    print("Prefill and cache, rows of its study whose numbers did not survive:\n")
    prefill()
    print("Serving after 32768 tokens:\n")
    serving()


if __name__ == "__main__":
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        page()
    (ROOT / "docs/models.md").write_text(text.getvalue().rstrip() + "\n")
