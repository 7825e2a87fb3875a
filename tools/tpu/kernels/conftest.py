"""The kernels are tested on the CPU, in interpret mode; most of that time is compiling, so the compiler is told not to optimise."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
