"""Arrays too large to fill, and single programs of interpreted kernels on them."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from moe_core.base import dtypes
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan, Pointer
from moe_core.runtime import interpreter
from moe_core.runtime.compiler import load_kernel


def sparse(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Zeros of which only the pages that are written take memory, however large the array is."""
    kind = dtypes.numpy_dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = np.frombuffer(mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=flags), np.uint8)
    return memory[:size].view(kind).reshape(shape)


@contextlib.contextmanager
def _only_inside(arrays: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Raise AssertionError where an interpreted kernel reads or writes what lies in none of these arrays: an offset
    that wrapped around leads gigabytes away, where a write would end the process."""
    from moe_core.runtime.interpreter import builder

    spans = [np.lib.array_utils.byte_bounds(array) for array in arrays.values()]
    elements: Callable[[np.ndarray, np.dtype], Any] = builder._elements

    def checked(addresses: np.ndarray, dtype: np.dtype) -> Any:
        inside = np.zeros(addresses.shape, bool)
        for start, end in spans:
            inside |= (addresses >= np.uint64(start)) & (addresses + np.uint64(dtype.itemsize) <= np.uint64(end))
        assert inside.all(), f"{np.count_nonzero(~inside)} addresses lie outside of {', '.join(arrays)}"
        return elements(addresses, dtype)

    with mock.patch.object(builder, "_elements", checked):
        yield


def run_last_programs(
    plan: LaunchPlan,
    arrays: Mapping[str, np.ndarray],
    *,
    along: int = 1,
    without: Collection[str] = (),
    others: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """The outputs of a plan on the interpreter of which every launch runs one program alone: the last along its first
    `along` axes. What that one does not write is zero.

    arrays: inputs by name, row-major or with strides, and scratch buffers that hold something before. without:
    functions of kernels that do not run. others: what kernels reach by addresses in their inputs.
    """
    interpreter.install()
    from moe_core.runtime.interpreter import patches

    memory = {buffer.name: arrays[buffer.name] for buffer in plan.inputs}
    for buffer in plan.inputs:
        assert memory[buffer.name].shape == buffer.spec.shape, buffer
    for buffer in (*plan.outputs, *plan.scratch):
        memory[buffer.name] = arrays.get(buffer.name, sparse(buffer.spec.shape, buffer.spec.dtype))
    begin = patches.begin
    for step in plan.steps:
        assert isinstance(step, KernelLaunch)
        if step.kernel.function in without:
            continue
        values: dict[str, Any] = {
            name: value.value if isinstance(value, Constant) else value for name, value in step.arguments
        }
        for name, value in step.arguments:
            if isinstance(value, Pointer):
                spec = plan.spec(value.buffer)
                values[name] = interpreter.HostPointer(memory[value.buffer].ctypes.data, spec.dtype)
        full = (*step.grid, 1, 1)[:3]

        def only_last(kernel: Any, _: Any, full: Any = full) -> tuple[Callable[..., Any], Callable[..., None]]:
            function, set_program = begin(kernel, full)
            set_program(*(size - 1 if axis < along else 0 for axis, size in enumerate(full)))
            return function, lambda *program: None

        with _only_inside({**memory, **(others or {})}), mock.patch.object(patches, "begin", only_last):
            interpreter.launch(load_kernel(step.kernel.name), (1,), list(values.items()))
    return {buffer.name: memory[buffer.name] for buffer in plan.outputs}
