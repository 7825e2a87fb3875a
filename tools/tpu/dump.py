#!/usr/bin/env python3
"""Compile a JAX function or a StableHLO file for a TPU that need not be there, and keep what `tpusim dump` reads.

    python dump.py --chip tpu-v6e --out my_kernel kernels:attention bf16[8,4096,128] bf16[8,4096,128] bf16[8,4096,128]
    python dump.py --chip tpu-v5p --out program program.mlir
    python dump.py --chip tpu-v7x --out sla kernels/sla.py:core --option chunk=64 --option heads_per_program=4

A function is named by its module (`package.module` or a `.py` file) and its name; arguments are shapes as
`dtype[sizes]`, and may be left out where the module has a function or tuple `<name>_args` that gives arrays,
`jax.ShapeDtypeStruct`s or numbers. A function that needs no argument, or only one called `chip`, makes a
program: it is called with the options, and returns the function to compile and its arguments. Integer arrays
that a Pallas kernel needs while it runs (scalar prefetch) are given to `tpusim dump --scalars`, see docs/formats.md.

Needs `pip install -r requirements.txt` (JAX and libtpu; no TPU, no accelerator). The compiler writes into a
temporary folder that is deleted; a few megabytes are kept: listings of kernels, their tables of slots, the
optimised HLO, and meta.json with the versions, the options and the command.

Exit codes: 0 done, 1 the compiler wrote no listing, 2 bad input, 3 the program does not compile for the chip;
of 2 and 3 the last line on stderr is the reason.
"""

import argparse
import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import traceback
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


# Stages whose texts the compiler writes: the others are up to a gigabyte.
KEPT_STAGES = ".*(final_bundles|static-per-bundle).*"
# The parameter of a function that makes a program by which it learns the chip.
CHIP = "chip"
# Longest reason of a failure, in characters.
LONGEST_REASON = 300


def fail(message, code=2):
    """Bad input, or with code 3 a program that does not compile: nothing has been written."""
    print(f"dump.py: {message}", file=sys.stderr)
    sys.exit(code)


def reason(error):
    """What an exception says, in one line: its first paragraph without the addresses and dumps that follow."""
    paragraph = str(error).strip().split("\n\n")[0]
    words = f"{type(error).__name__}: {' '.join(paragraph.split())}"
    return words if len(words) <= LONGEST_REASON else words[: LONGEST_REASON - 3] + "..."


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="module:function, file.py:function, or a StableHLO file (.mlir, .stablehlo)")
    parser.add_argument("shapes", nargs="*", help="shapes of the arguments, such as bf16[8,1024] or f32[]")
    parser.add_argument("--chip", required=True, choices=sorted(TOPOLOGIES), help="chip to compile for")
    parser.add_argument("--out", required=True, type=Path, help="folder to write; must not exist, or be empty")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of a function that makes a program; repeated",
    )
    parser.add_argument(
        "--case",
        nargs=3,
        metavar=("OP", "PARAMS", "DTYPE"),
        help="the same call as a case of `tpusim predict`, such as matmul 'm=512;k=512;n=512' bf16",
    )
    parser.add_argument("--measured-us", type=float, help="measured time in microseconds, for `tpusim fit --dumps`")
    parser.add_argument("--family", help="family of kernels, for `tpusim fit --dumps`")
    parser.add_argument("--source", help="where the measured time comes from")
    parser.add_argument("--xla-flags", default="", help="further flags for LIBTPU_INIT_ARGS")
    parser.add_argument("--keep-all", type=Path, help="leave everything the compiler wrote in this folder")
    return parser.parse_args()


def prepare(folder, chip, flags, everything=False):
    """Environment of the compiler; it is read when JAX first loads libtpu. With `everything` it writes every stage, else those that are kept."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Ask no metadata server which TPU this machine has.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # No chip is taken, so that several compilers may run at a time.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    dump = [f"--xla_jf_dump_to={folder}", "--xla_jf_dump_llo_text=true"]
    if not everything:
        dump.append(f"--xla_jf_dump_llo_pass_label_regex={KEPT_STAGES}")
    os.environ["LIBTPU_INIT_ARGS"] = " ".join([*dump, flags]).strip()
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


def value(text):
    """An option's value: a number, true or false, else the text itself."""
    words = {"true": True, "false": False}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def options(given):
    """`name=value` of the command line, by name."""
    found = {}
    for text in given:
        name, equals, setting = text.partition("=")
        if not (equals and name.isidentifier()):
            fail(f"--option: expected name=value, found `{text}`")
        if name in found:
            fail(f"--option: `{name}` is given twice")
        found[name] = value(setting)
    return found


def makes_program(run):
    """Whether a function can be called without arguments but for the chip."""
    try:
        parameters = inspect.signature(run).parameters.values()
    except (TypeError, ValueError):
        return False
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in packed or p.name == CHIP for p in parameters)


def made(make, name, chosen, chip):
    """The function and the arguments that a function makes with the chosen options, and all options, defaults too."""
    parameters = inspect.signature(make).parameters
    known = [p.name for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if CHIP in chosen:
        fail(f"--option: `{CHIP}` is that of --chip")
    if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        for option in chosen:
            if option not in known:
                fail(f"`{name}` has no option `{option}`; it has {', '.join(known)}")
    program = make(**chosen, **({CHIP: chip} if CHIP in known else {}))
    if not (isinstance(program, tuple) and len(program) == 2 and callable(program[0])):
        fail(f"`{name}` needs no argument: expected it to return a function and its arguments")
    defaults = {key: parameters[key].default for key in known if key not in (CHIP, *chosen)}
    plain = {key: v for key, v in defaults.items() if isinstance(v, (bool, int, float, str))}
    return program[0], list(program[1]), {**plain, **chosen}


def function(name, shapes, chosen, chip):
    """The function of a module, its arguments, and the options it was made with."""
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
    run, args = getattr(module, function_name), [shape(text) for text in shapes]
    given = getattr(module, f"{function_name}_args", None)
    if not args and given is None and makes_program(run):
        return made(run, name, chosen, chip)
    if chosen:
        fail(f"--option: `{name}` takes arguments; options are for a function that makes a program")
    if not args and given is not None:
        args = list(given() if callable(given) else given)
    return run, args, {}


def source_digest(path):
    """Digest of a Python file and of the files beside it that it imports, one through the other."""
    found, left = {}, [path.resolve()]
    while left:
        file = left.pop()
        if file in found or not file.is_file():
            continue
        found[file] = file.read_bytes()
        for node in ast.walk(ast.parse(found[file])):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            left += [file.parent / f"{name.partition('.')[0]}.py" for name in names]
    digest = hashlib.sha256()
    for file in sorted(found):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(found[file]).digest())
    return digest.hexdigest()[:16]


def compile_function(run, args, device):
    """Lowers a function for a device and compiles it."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

    where = SingleDeviceSharding(device)

    def placed(leaf):
        if not hasattr(leaf, "shape"):
            leaf = jax.ShapeDtypeStruct((), jax.numpy.result_type(leaf))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    args = jax.tree.map(placed, args)
    jitted = run if hasattr(run, "trace") else jax.jit(run)
    # Pallas asks the mesh which generation it lowers for; the default device here is the CPU.
    target = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform=device.platform)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=target)):
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


def command(out):
    """The command line; of the folder to write the name alone, so that it says the same wherever that lies."""
    words = [out.name if word == str(out) else word for word in sys.argv[1:]]
    return "dump.py " + shlex.join(words)


def main():
    """Compiles, keeps, and says what was kept."""
    args = arguments()
    chosen, source = options(args.option), Path(args.program.rpartition(":")[0])
    stablehlo = Path(args.program).suffix in (".mlir", ".stablehlo")
    if stablehlo and not Path(args.program).is_file():
        fail(f"no file `{args.program}`")
    if stablehlo and chosen:
        fail("--option: a StableHLO file takes none")
    if args.out.exists() and any(args.out.iterdir()):
        fail(f"`{args.out}` is not empty; choose another folder")
    scratch = Path(tempfile.mkdtemp(prefix="tpu-dump-"))
    start = time.time()
    try:
        topology = prepare(scratch, args.chip, args.xla_flags, args.keep_all is not None)
        device = topology.devices[0]
        try:
            if stablehlo:
                compiled = compile_stablehlo(Path(args.program), topology)
            else:
                run, given, chosen = function(args.program, args.shapes, chosen, args.chip)
                compiled = compile_function(run, given, device)
        except SystemExit:
            raise
        except ImportError as error:
            fail(f"`{args.program}`: {reason(error)}")
        except Exception as error:  # Whatever JAX and the compiler throw.
            traceback.print_exc()
            fail(f"`{args.program}` does not compile for {args.chip}: {reason(error)}", 3)
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
            "command": command(args.out),
            "source_digest": source_digest(source) if source.suffix == ".py" and source.is_file() else None,
            "options": chosen or None,
            "case": dict(zip(("op", "params", "dtype"), args.case)) if args.case else None,
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
