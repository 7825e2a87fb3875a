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
# Model, name in the paper, block with a recurrent state, interval of its log.
DELTALOG = [
    ("qwen3_6_35b_a3b", "Qwen-35B (GDN)", [0], 8),
    ("kimi_linear_48b_a3b", "Kimi-48B (KDA)", [0, 1], 4),
]
SERVED = ["--hw", "h200-nvl", "--set", "prefill.tokens=512"]


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


def served(model, blocks, interval, weights):
    """Points without and with a log, by batch."""
    arguments = [*SERVED, "--set", f"model.weights={weights}"]
    log = []
    for block in blocks:
        for field in [f"log_interval={interval}", "log_keys=bf16", "log_updates=f32", "log_merge=fused"]:
            log += ["--set", f"blocks.{block}.mixer.{field}"]
    return [run(model, *arguments), run(model, *arguments, *log)]


def published(result):
    """Times per output token that a run stands for, by batch: published and predicted, in ms, and its interval."""
    rows = {}
    for point in result["chips"][0]["decode"]:
        for row in point["published"]:
            if row["error_percent"] is not None:
                rows[point["batch"]] = (row["method"], row["published_us"] / 1e3, point["time_us"] / 1e3, interval(point))
    return rows


def deltalog():
    runs = {
        (model, weights): [published(result) for result in served(model, blocks, log, weights)]
        for model, _, blocks, log in DELTALOG
        for weights in ["bf16", "fp8_e4m3"]
    }
    rows = []
    for model, name, _, _ in DELTALOG:
        for wide, narrow in zip(runs[model, "bf16"], runs[model, "fp8_e4m3"]):
            for batch, (method, reference, ours, bounds) in wide.items():
                theirs = narrow[batch][2]
                rows.append(
                    [
                        name,
                        str(batch),
                        method,
                        f"{reference:.2f}",
                        f"{ours:.2f}",
                        bounds,
                        f"{100 * (ours / reference - 1):+.0f}",
                        f"{theirs:.2f}",
                        f"{100 * (theirs / reference - 1):+.0f}",
                    ]
                )
    table(
        ["model", "batch", "method", "published (ms)", "bf16 weights (ms)", "80 % interval (ms)", "error (%)", "FP8 weights (ms)", "error (%)"],
        rows,
    )
    print(
        "Absolute times do not agree, and cannot: what follows is the least time in which an H200 NVL reads the weights of the touched experts alone at the bandwidth of its datasheet, "
        "4.8 TB/s, where tokens choose experts independently and uniformly. At 64 and 128 sequences the published times are shorter than that in bf16, and for Kimi in FP8 too. The runs of the paper "
        "either had narrower weights, several devices, or prompts that go to few experts; it says nothing of these.\n"
    )
    rows = []
    for model, name, _, _ in DELTALOG:
        result = run(model, *SERVED)
        layers, bytes_of_expert = experts(model, result)
        for point in result["chips"][0]["decode"]:
            least = layers * point["touched_experts"] * bytes_of_expert / 4.8e12 * 1e3
            baseline = runs[model, "bf16"][0][point["batch"]][1]
            rows.append([name, str(point["batch"]), f"{point['touched_experts']:.1f}", f"{least:.2f}", f"{least / 2:.2f}", f"{baseline:.2f}"])
    table(["model", "batch", "experts touched", "their weights, bf16 (ms)", "FP8 (ms)", "published, whole step (ms)"], rows)
    print(
        "What the weights cost cancels in differences: from 128 to 256 sequences nearly all experts are touched already, so that a step grows by states, caches and rows; and a log changes nothing but the state.\n"
    )
    rows = []
    for model, name, _, _ in DELTALOG:
        dense, log = runs[model, "bf16"]
        rows.append([name, "128 to 256 sequences, dense", f"{dense[256][1] - dense[128][1]:.2f}", f"{dense[256][2] - dense[128][2]:.2f}"])
        rows.append([name, "128 to 256 sequences, DeltaLog", f"{log[256][1] - log[128][1]:.2f}", f"{log[256][2] - log[128][2]:.2f}"])
        for batch in [64, 128, 256]:
            rows.append([name, f"saved by DeltaLog at {batch}", f"{dense[batch][1] - log[batch][1]:.2f}", f"{dense[batch][2] - log[batch][2]:.2f}"])
    table(["model", "difference", "published (ms)", "predicted (ms)"], rows)


def experts(model, result):
    """Layers with experts, and bytes of one expert in bf16."""
    layers, size = 0, 0
    for block in result["blocks"]:
        words = block["feed_forward"].split()
        if "experts" in words:
            layers += block["count"]
            width = int(next(word for word in block["mixer"].replace(",", " ").split() if word.startswith("d="))[2:])
            size = 3 * width * int(words[words.index("experts") + 2]) * 2
    return layers, size


def where():
    rows = []
    for model, name, _, _ in DELTALOG:
        result = run(model, *SERVED, "--set", "decode.batch=128")
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
    print("Time per output token on an H200 NVL. The paper prints neither context nor format of the weights: 1024 tokens are assumed, and both bf16 and FP8 are shown. DeltaLog is the log of `log_interval` 8 for GDN and 4 for KDA, keys in bf16 and updates in f32, as the paper has it.\n")
    deltalog()
    print("Where the time of the baseline goes at batch 128, weights in bf16:\n")
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
