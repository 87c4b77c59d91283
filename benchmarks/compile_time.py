"""What compiling costs: each kernel alone, what a first call waits for, and all of them at once; needs no GPU.

    python -m benchmarks.compile_time [--shapes qwen3,dsv3] [--tokens 1,64,4096] [--output record.json]

Every kernel of the bf16 forward from logits is compiled once, in an empty cache (`--keep`: in Triton's own, which later
processes find), by processes that compile one kernel at a time. A cell's `first_call_seconds` is the sum over its
kernels: what a call waits for that finds none of them. `seconds` is what all kernels of all cells took together, from
the first process's start to the last one's end, as `warmup` would take with as many processes. Without a GPU kernels
are compiled for sm_90. Nothing else should run on the machine.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.record import command, write_record
from benchmarks.shapes import SHAPES, TOKENS, Shape
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.moe.forward import plan_moe
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from moe_core.runtime.cuda import cuda_available, cuda_target
from moe_core.runtime.warmup import KernelReport, compile_kernels, distinct_kernels, kernel_identity
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterLogits

Kernel = tuple[LaunchPlan, KernelLaunch]
_DEFAULT_TARGET = Target("cuda", 90, 132)


def plan_of(shape: Shape, tokens: int, target: Target) -> LaunchPlan:
    """The bf16 forward of a shape from logits."""
    experts, d, f, matrices = shape.num_experts, shape.d_model, shape.d_ff, shape.matrices()
    biases = (ArraySpec((experts, 2 * f), "float32"), ArraySpec((experts, d), "float32"))
    gate_up_bias, down_bias = biases if shape.biased else (None, None)
    weights = ExpertWeights(
        *(ArraySpec(size, "bfloat16") for size in matrices), gate_up_bias=gate_up_bias, down_bias=down_bias
    )
    logits = RouterLogits(ArraySpec((tokens, experts), "float32"))
    spec = MoESpec(shape.activation, shape.router, shape.weight_layout)
    return plan_moe(ArraySpec((tokens, d), "bfloat16"), weights, logits, spec, target)


def load_compiler() -> None:
    """Import the compiler, whose second belongs to no kernel."""
    importlib.import_module("triton.backends.nvidia.compiler")


def compile_one(kernel: Kernel) -> KernelReport:
    """Compile one kernel in this process."""
    return compile_kernels([kernel], workers=1)[0]


def compile_apart(kernels: Sequence[Kernel], processes: int) -> list[KernelReport]:
    """Compile each kernel in one of some processes, which compile one at a time."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), load_compiler) as pool:
        return list(pool.map(compile_one, kernels))


def measure(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    target: Target,
    compile_all: Callable[[Sequence[Kernel]], Sequence[KernelReport]],
) -> dict[str, Any]:
    """{"seconds", "kernels", "cells"} of the forwards of some shapes and numbers of tokens."""
    plans = {(shape.name, count): plan_of(shape, count, target) for shape in shapes for count in tokens}
    kernels = distinct_kernels(plans.values())
    start = time.perf_counter()
    reports = compile_all(kernels)
    seconds = time.perf_counter() - start
    by_kernel = {kernel_identity(*kernel): report for kernel, report in zip(kernels, reports, strict=True)}
    cells = []
    for (shape, count), plan in plans.items():
        mine = [by_kernel[kernel_identity(*kernel)].seconds for kernel in distinct_kernels([plan])]
        cells.append(
            {
                "shape": shape,
                "tokens": count,
                "kernels": len(mine),
                "first_call_seconds": sum(mine),
                "slowest_kernel_seconds": max(mine),
            }
        )
    listed = [
        {"kernel": report.kernel, "tile": report.tile, "seconds": report.seconds, "cached": report.cached}
        for report in reports
    ]
    return {"seconds": seconds, "kernels": listed, "cells": cells}


def show(found: dict[str, Any], processes: int) -> str:
    """A line per cell and one for all."""
    cells = [
        f"{cell['shape']} {cell['tokens']}: {cell['kernels']} kernels, first call {cell['first_call_seconds']:.2f} s, "
        f"slowest kernel {cell['slowest_kernel_seconds']:.2f} s"
        for cell in found["cells"]
    ]
    existed = sum(kernel["cached"] for kernel in found["kernels"])
    number = len(found["kernels"])
    total = f"{number} kernels ({existed} existed) by {processes} processes: {found['seconds']:.1f} s"
    return "\n".join([*cells, total])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__, shapes=SHAPES, tokens=TOKENS, processes=min(8, os.cpu_count() or 1))
    parser.add_argument("--keep", action="store_true", help="compile into Triton's own cache, not into an empty one")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.shapes.split(",") if name not in SHAPES]
    if unknown:
        parser.error(f"--shapes must be of {', '.join(SHAPES)}, got {', '.join(unknown)}")
    shapes = [SHAPES[name] for name in options.shapes.split(",")]
    tokens = [int(count) for count in options.tokens.split(",")]
    target = cuda_target(0) if cuda_available() else _DEFAULT_TARGET
    with tempfile.TemporaryDirectory() as empty:
        if not options.keep:
            os.environ["TRITON_CACHE_DIR"] = empty
        found = measure(shapes, tokens, target, lambda kernels: compile_apart(kernels, options.processes))
    record = {"provenance": provenance("benchmarks.compile_time"), "arch": target.arch, "processes": options.processes}
    write_record(options.output, record | found)
    print(show(found, options.processes))


if __name__ == "__main__":
    main()
