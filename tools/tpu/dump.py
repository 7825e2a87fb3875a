#!/usr/bin/env python3
"""Compile a JAX function or a StableHLO file for a TPU that need not be there, and keep what `tpusim dump` reads.

    python dump.py --chip tpu-v6e --out my_kernel kernels:attention bf16[8,4096,128] bf16[8,4096,128] bf16[8,4096,128]
    python dump.py --chip tpu-v5p --out program program.mlir

A function is named by its module (`package.module` or a `.py` file) and its name; arguments are shapes as
`dtype[sizes]`, and may be left out where the module has a function or tuple `<name>_args` that gives arrays,
`jax.ShapeDtypeStruct`s or numbers. Integer arrays that a Pallas kernel needs while it runs (scalar prefetch)
are given to `tpusim dump --scalars`, see docs/formats.md.

Needs `pip install -r requirements.txt` (JAX and libtpu; no TPU, no accelerator). The compiler writes up to a
gigabyte of stages, into a temporary folder that is deleted; a few megabytes are kept: listings of kernels,
their tables of slots, the optimised HLO, and meta.json with the versions and the command.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

# What a chip is called by tpusim, and the topology whose devices the compiler builds for.
TOPOLOGIES = {
    "tpu-v4": "v4:2x2x1",
    "tpu-v5e": "v5e:2x2",
    "tpu-v5p": "v5p:2x2x1",
    "tpu-v6e": "v6e:2x2",
    "tpu-v7x": "tpu7x:2x2x1",
}
# Files of a kernel that are kept, by their ends.
KEPT = (
    "-final_bundles.txt",
    "-final_hlo-static-per-bundle-utilization.txt",
    "-pre-delay_hlo-static-per-bundle-utilization.txt",
)


def fail(message):
    """Bad input: nothing has been written."""
    print(f"dump.py: {message}", file=sys.stderr)
    sys.exit(2)


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="module:function, file.py:function, or a StableHLO file (.mlir, .stablehlo)")
    parser.add_argument("shapes", nargs="*", help="shapes of the arguments, such as bf16[8,1024] or f32[]")
    parser.add_argument("--chip", required=True, choices=sorted(TOPOLOGIES), help="chip to compile for")
    parser.add_argument("--out", required=True, type=Path, help="folder to write; must not exist, or be empty")
    parser.add_argument("--measured-us", type=float, help="measured time in microseconds, for `tpusim fit --dumps`")
    parser.add_argument("--family", help="family of kernels, for `tpusim fit --dumps`")
    parser.add_argument("--source", help="where the measured time comes from")
    parser.add_argument("--xla-flags", default="", help="further flags for LIBTPU_INIT_ARGS")
    parser.add_argument("--keep-all", type=Path, help="leave everything the compiler wrote in this folder")
    return parser.parse_args()


def prepare(folder, chip, flags):
    """Environment of the compiler; it is read when JAX first loads libtpu."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Ask no metadata server which TPU this machine has.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {flags}".strip()
    try:
        from jax.experimental import topologies

        return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    except Exception as error:  # Whatever JAX and libtpu throw, the cause is one of two.
        fail(f"cannot set up {chip}: {error}\n`pip install -r requirements.txt` installs the versions that were tested")


def shape(text):
    """`bf16[8,1024]` as a shape and a type."""
    import jax
    import jax.numpy as jnp

    names = {"bf16": jnp.bfloat16, "pred": jnp.bool_, "f8e4m3fn": jnp.float8_e4m3fn, "f8e5m2": jnp.float8_e5m2}
    for width in (16, 32, 64):
        names[f"f{width}"] = jnp.dtype(f"float{width}")
    for width in (8, 16, 32, 64):
        names[f"s{width}"] = jnp.dtype(f"int{width}")
        names[f"u{width}"] = jnp.dtype(f"uint{width}")
    found = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    if not found or found[1] not in names:
        fail(f"expected a shape such as bf16[8,1024], found `{text}`; types are {', '.join(sorted(names))}")
    sizes = tuple(int(word) for word in found[2].split(",") if word)
    return jax.ShapeDtypeStruct(sizes, names[found[1]])


def function(name, shapes):
    """The function of a module, and its arguments."""
    module_name, _, function_name = name.rpartition(":")
    if not module_name:
        fail(f"expected module:function or a StableHLO file, found `{name}`")
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            fail(f"no file `{path}`")
        sys.path.insert(0, str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            fail(f"`{module_name}`: {error}")
    if not hasattr(module, function_name):
        known = ", ".join(sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_"))
        fail(f"`{module_name}` has no `{function_name}`; it has {known}")
    args = [shape(text) for text in shapes]
    if not args:
        given = getattr(module, f"{function_name}_args", ())
        args = list(given() if callable(given) else given)
    return getattr(module, function_name), args


def compile_function(name, shapes, device):
    """Lowers a function for a device and compiles it."""
    import jax
    from jax.sharding import SingleDeviceSharding

    run, args = function(name, shapes)
    where = SingleDeviceSharding(device)

    def placed(leaf):
        if not hasattr(leaf, "shape"):
            leaf = jax.ShapeDtypeStruct((), jax.numpy.result_type(leaf))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    args = jax.tree.map(placed, args)
    jitted = run if hasattr(run, "trace") else jax.jit(run)
    lowered = jitted.trace(*args).lower(lowering_platforms=("tpu",))
    return lowered.compile()


def compile_stablehlo(path, topology):
    """Compiles a StableHLO module for the first device of a topology."""
    import numpy as np
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context():
        module = ir.Module.parse(path.read_text())
        options = xla_client.CompileOptions()
        options.num_replicas = 1
        options.num_partitions = 1
        assignment = np.array([[0]], dtype=np.int32)
        options.device_assignment = xla_client.DeviceAssignment.create(assignment)
        backend = topology.devices[0].client
        return backend.compile(module, xla_client.DeviceList(tuple(topology.devices[:1])), options)


def hlo_text(compiled):
    """The optimised HLO."""
    if hasattr(compiled, "as_text"):
        return compiled.as_text()
    return "\n\n".join(module.to_string() for module in compiled.hlo_modules())


def cost_analysis(compiled):
    """XLA's own FLOPs and bytes of the program; loop bodies count once there."""
    try:
        cost = compiled.cost_analysis() or {}
    except Exception:  # Not every version and program has one.
        return {}
    cost = cost[0] if isinstance(cost, (list, tuple)) and cost else cost
    return {name: cost.get(key) for name, key in (("xla_flops", "flops"), ("xla_bytes", "bytes accessed"))}


def main():
    """Compiles, keeps, and says what was kept."""
    args = arguments()
    stablehlo = Path(args.program).suffix in (".mlir", ".stablehlo")
    if stablehlo and not Path(args.program).is_file():
        fail(f"no file `{args.program}`")
    if args.out.exists() and any(args.out.iterdir()):
        fail(f"`{args.out}` is not empty; choose another folder")
    scratch = Path(tempfile.mkdtemp(prefix="tpu-dump-"))
    start = time.time()
    try:
        topology = prepare(scratch, args.chip, args.xla_flags)
        device = topology.devices[0]
        try:
            if stablehlo:
                compiled = compile_stablehlo(Path(args.program), topology)
            else:
                compiled = compile_function(args.program, args.shapes, device)
        except SystemExit:
            raise
        except Exception as error:
            fail(f"`{args.program}` does not compile for {args.chip}: {type(error).__name__}: {error}")
        seconds = time.time() - start
        written = [path for path in scratch.iterdir() if path.is_file()]
        total = sum(path.stat().st_size for path in written)
        args.out.mkdir(parents=True, exist_ok=True)
        kept = [path for path in written if path.name.endswith(KEPT) and "<late" not in path.name]
        for path in kept:
            shutil.copy(path, args.out)
        (args.out / "hlo.txt").write_text(hlo_text(compiled))
        versions = {}
        for package in ("jax", "jaxlib", "libtpu"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                pass
        meta = {
            "device": args.chip,
            **versions,
            "command": "dump.py " + " ".join(sys.argv[1:]),
            "compile_s": round(seconds, 2),
            "measured_us": args.measured_us,
            "family": args.family,
            "source": args.source,
            **cost_analysis(compiled),
        }
        meta = {key: value for key, value in meta.items() if value is not None}
        (args.out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        if args.keep_all:
            shutil.copytree(scratch, args.keep_all, dirs_exist_ok=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    kernels = sum(path.name.endswith(KEPT[0]) for path in kept)
    print(
        f"{args.out}: {kernels} listings, {size / 1e6:.1f} of {total / 1e6:.0f} MB kept, {seconds:.1f} s; "
        f"libtpu {versions.get('libtpu', 'of unknown version')}"
    )
    if kernels == 0:
        print("dump.py: no listing of a kernel was written: does this libtpu know --xla_jf_dump_llo_text?", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
