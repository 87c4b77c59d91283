"""Compiles launches of plans. Needs Triton, but no GPU and no framework."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
import sys
from typing import Any

from moe_core.base import Target, dtypes
from moe_core.errors import Unsupported
from moe_core.plan.steps import Constant, Kernel, KernelLaunch, LaunchPlan, Pointer, TensorMap

_SCALAR_TYPES = {"int32": "i32", "int64": "i64", "float32": "fp32"}
_POINTER_ATTRIBUTES = [["tt.divisibility", 16]]
_SWIZZLED = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={bits}, rank=2, transposed=False, fp4_padded=False, "
    "cga_layout=[])"
)
#: Element types of boxes unlike the pointers': only sm_90 has TMA, and it has fp8.
_BOX_TYPES = {"float8_e4m3fn": "fp8e4nv"}


#: Modules whose functions have keys.
_keyed: set[str] = set()


def load_kernel(name: str) -> Any:
    module, function = name.split(":")
    try:
        return getattr(importlib.import_module(f"moe_core.ops.{module}"), function)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("triton"):
            raise
        raise Unsupported(
            "kernels need Triton, which is not installed here (it exists for Linux); "
            "on a CPU the NumPy reference engine works without it: unset TRITON_INTERPRET"
        ) from error


def require_parameters(name: str, function: Any, given: list[str]) -> None:
    """Refuse a launch whose arguments are not the kernel's parameters in their order, on every engine of kernels."""
    expected = list(function.arg_names)
    if given != expected:
        raise RuntimeError(f"{name} takes {expected}, the plan gives {given}; give them in this order")


def launch_signature(plan: LaunchPlan, launch: KernelLaunch) -> tuple[tuple[str, str], ...]:
    """(parameter, Triton type): `("x", "*bf16")`, `("num_rows", "i32")`, `("D", "constexpr")`."""
    signature = []
    for name, value in launch.arguments:
        if isinstance(value, Pointer):
            kind = "*" + dtypes.triton_name(plan.spec(value.buffer).dtype)
        elif isinstance(value, TensorMap):
            dtype, box = plan.spec(value.buffer).dtype, ",".join(str(size) for size in value.box)
            element = _BOX_TYPES.get(dtype) or dtypes.triton_name(dtype)
            kind = f"tensordesc<{element}[{box}],{_SWIZZLED.format(bits=8 * dtypes.itemsize(dtype))}>"
        elif isinstance(value, Constant):
            kind = "constexpr"
        else:
            kind = _SCALAR_TYPES[value.dtype]
        signature.append((name, kind))
    return tuple(signature)


def compile_launch(plan: LaunchPlan, launch: KernelLaunch, target: Target) -> Any:
    """Triton's compiled kernel (`.asm["cubin"]` or `["hsaco"]`, `.metadata`) of a launch, cached in the process.

    Types come from specs, pointers are 16-byte aligned, and no run-time value is specialised, so both frameworks get
    the same kernel.
    """
    constants = tuple((name, value.value) for name, value in launch.arguments if isinstance(value, Constant))
    return _compile(
        launch.kernel, launch_signature(plan, launch), constants, launch.num_warps, launch.num_stages,
        dataclasses.replace(target, num_sms=1),
    )  # fmt: skip


def _make_keys(module_name: str) -> None:
    """Let Triton make the keys of a module's functions, those they call first.

    In Triton 3.6 a function's key depends on whether its callees have theirs, so that another process, with other
    kernels before this one, would not find it in the cache on disk.
    """
    if module_name in _keyed:
        return
    _keyed.add(module_name)
    module = sys.modules.get(module_name)
    functions = [one for one in getattr(module, "__dict__", {}).values() if hasattr(type(one), "cache_key")]
    for one in functions:
        _make_keys(one.__module__)
    for one in functions:
        _ = one.cache_key


@functools.cache
def _compile(
    kernel: Kernel,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    num_warps: int,
    num_stages: int,
    target: Target,
) -> Any:
    function = load_kernel(kernel.name)
    _make_keys(function.__module__)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not hasattr(function, "cache_key"):
        raise Unsupported(
            "kernels were imported under TRITON_INTERPRET=1 and cannot be compiled in this process; "
            "unset it and start a new process to use the GPU"
        )
    require_parameters(kernel.name, function, [name for name, _ in signature])
    attributes = {(index,): _POINTER_ATTRIBUTES for index, (_, kind) in enumerate(signature) if kind.startswith("*")}
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    source = ASTSource(function, dict(signature), dict(constants), attributes)
    # Triton's default for floating-point fusion changes between versions.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    registers = dict(constants).get("REGISTERS")
    if registers is not None:
        # So that several blocks share a multiprocessor.
        options["maxnreg"] = registers
    gpu = GPUTarget(target.kind, target.arch if target.kind == "cuda" else target.architecture, target.warp_threads)
    compiled = triton.compile(source, target=gpu, options=options)
    scratch = getattr(compiled.metadata, "global_scratch_size", 0)
    if scratch:
        raise RuntimeError(
            f"{kernel.name} needs {scratch} bytes of Triton's global scratch, which plans do not provide"
        )
    # Absent under TRITON_STORE_BINARY_ONLY.
    ttgir = compiled.asm.get("ttgir")
    if ttgir is None and kernel.counts_slots:
        raise RuntimeError(f"{kernel.name} counts slots, which is checked in its TTGIR; unset TRITON_STORE_BINARY_ONLY")
    require_counted_once(kernel, ttgir or "")
    return compiled


def require_counted_once(kernel: Kernel, ttgir: str) -> None:
    """Raise RuntimeError if one thread's registers repeat an element that a histogram counts, which Triton's lowering
    does not allow for, or if a kernel with histograms does not declare counts_slots."""
    layouts = dict(re.findall(r"^(#\w+) = (.+)$", ttgir, re.MULTILINE))
    histograms = ttgir.count("tt.histogram ")
    if histograms and not kernel.counts_slots:
        raise RuntimeError(f"{kernel.name} has histograms, and its Kernel does not say counts_slots=True")
    sources = re.findall(r"tt\.histogram .*?: tensor<(\d+)xi32, (#\S.*?)> ->", ttgir)
    if len(sources) != histograms:
        raise RuntimeError(
            f"{kernel.name}: {histograms} histograms, of which {len(sources)} have a layout that is known"
        )
    for size, name in sources:
        layout = layouts.get(name, name)
        if _repeats_registers(layout, int(size)):
            raise RuntimeError(
                f"{kernel.name} would count each of {size} elements several times: its histogram has {layout}"
            )


def _repeats_registers(layout: str, size: int) -> bool:
    if layout.startswith("#ttg.slice<"):
        return False  # By definition it drops only registers that differ along the sliced axis.
    if blocked := re.match(r"#ttg\.blocked<\{sizePerThread = \[(\d+)\]", layout):
        return int(blocked[1]) > size
    linear = re.match(r"#ttg\.linear<\{register = (\[.*?\]), lane", layout)
    return linear is None or [0] in json.loads(linear[1])
