"""Runs plans on arrays of its own, between guard zones: what the tests of every op stand on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec, host_array
from moe_core.base.target import Target
from moe_core.plan.arena import SCRATCH_ALIGNMENT
from moe_core.plan.steps import LaunchPlan
from moe_core.runtime.cuda import cuda_available, cuda_target
from moe_core.runtime.prepare import prepare
from moe_core.specs.operands import map_arrays
from tests.support.runtime.device_memory import DeviceBytes

#: An H200, whether this machine has one or not: plans need no device.
H200 = Target("cuda", 90, 132)
#: Every byte of an output and of scratch before a run: NaN in floats, -1 in integers.
POISON = 0xFF
#: Guard bytes before and after every buffer; nothing may write to them.
GUARD_BYTES = 256
#: What guard zones hold: NaN around inputs, so that a stray read shows, and other bytes where poison may be written.
INPUT_GUARD, OUTPUT_GUARD, SCRATCH_GUARD = 0xFF, 0xFD, 0xFB


def engine_target() -> Target:
    """The target of real kernels: the first CUDA device, else the interpreter."""
    if cuda_available() and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return cuda_target(0)
    return Target("interpreter")


def spec_of(value: Any) -> Any:
    """ArraySpecs in the place of arrays, also of bundles; None stays None."""
    if value is None:
        return None
    return ArraySpec(value.shape, value.dtype.name) if isinstance(value, np.ndarray) else map_arrays(value, spec_of)


def span_bytes(spec: ArraySpec) -> int:
    """Bytes from the first element to the end of the last one, strides included."""
    if spec.size == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    return (last + 1) * dtypes.itemsize(spec.dtype)


class GuardedBuffer:
    """Poisoned memory for one array between two guard zones, 256-byte aligned."""

    def __init__(self, name: str, spec: ArraySpec, guard: int) -> None:
        self.name, self.spec, self.span = name, spec, span_bytes(spec)
        # The upper guard begins right after the last element, so that a write one element too far is seen.
        storage = np.full(self.span + 2 * GUARD_BYTES + SCRATCH_ALIGNMENT, guard, np.uint8)
        skip = -storage.ctypes.data % SCRATCH_ALIGNMENT
        self.image = storage[skip : skip + self.span + 2 * GUARD_BYTES]
        self.image[self._inside] = POISON
        self._before, self._filled = self.image.copy(), False

    @property
    def address(self) -> int:
        return self.image.ctypes.data + GUARD_BYTES

    @property
    def _inside(self) -> slice:
        return slice(GUARD_BYTES, GUARD_BYTES + self.span)

    def fill(self, array: np.ndarray, *, kept: bool = True) -> None:
        """Write an input; kept: `check` then also requires that it is unchanged."""
        spec = ArraySpec(array.shape, array.dtype.name, None)
        wanted = (self.spec.shape, self.spec.dtype)
        assert (spec.shape, spec.dtype) == wanted, f"{self.name} must be {self.spec}, got {spec}"
        self.view(self.image)[...] = array
        self._before, self._filled = self.image.copy(), kept

    def view(self, image: np.ndarray) -> np.ndarray:
        """The array inside an image of the memory."""
        return host_array(image.ctypes.data + GUARD_BYTES, self.spec, owner=image)

    def check(self, image: np.ndarray) -> None:
        """Raise AssertionError where a guard byte, or a byte of an input, is not what it was before the run."""
        changed = image != self._before
        if not self._filled:
            changed[self._inside] = False
        where = np.flatnonzero(changed)
        if where.size:
            offset = int(where[0]) - GUARD_BYTES
            what = "input" if 0 <= offset < self.span else "out-of-bounds"
            raise AssertionError(
                f"{self.name} {self.spec}: {where.size} {what} bytes were overwritten, the first at byte {offset} "
                f"of {self.span}"
            )


def run_plan(
    plan: LaunchPlan, arrays: Mapping[str, np.ndarray], device_index: int = 0, others: Sequence[GuardedBuffer] = ()
) -> dict[str, np.ndarray]:
    """Run a plan on NumPy (or ml_dtypes) arrays by input name and return its outputs by name.

    Inputs, outputs and scratch lie in fresh memory (the device's for a cuda plan) between guard zones. Outputs and
    scratch start as 0xFF bytes. Raises AssertionError for a wrong input, a write out of bounds or into an input, and in
    the interpreter for a read out of bounds; an input that the plan overwrites may change. others: host memory that the
    plan reaches through addresses in its inputs.
    """
    names = [buffer.name for buffer in plan.inputs]
    assert set(arrays) == set(names), f"{plan.name} takes {sorted(names)}, got {sorted(arrays)}"
    buffers = [GuardedBuffer(buffer.name, buffer.spec, INPUT_GUARD) for buffer in plan.inputs]
    for buffer in buffers:
        buffer.fill(np.asarray(arrays[buffer.name]), kept=buffer.name not in dict(plan.over).values())
    buffers += [GuardedBuffer(buffer.name, buffer.spec, OUTPUT_GUARD) for buffer in plan.outputs]
    if plan.scratch_bytes:
        buffers.append(GuardedBuffer("scratch", ArraySpec((plan.scratch_bytes,), "uint8"), SCRATCH_GUARD))
    if plan.target.kind == "cuda":
        assert not others, "a device does not reach host memory"
        images = _run_on_device(plan, buffers, device_index)
    else:
        images = _run_on_host(plan, buffers, others)
    for buffer, image in zip(buffers, images, strict=True):
        buffer.check(image)
    outputs = zip(buffers[len(names) :], images[len(names) :], strict=True)
    return {buffer.name: buffer.view(image) for buffer, image in outputs if buffer.name != "scratch"}


@contextlib.contextmanager
def _reads_stay_inside(buffers: list[GuardedBuffer]) -> Iterator[None]:
    """Inside the block the interpreter raises AssertionError where a kernel reads what no buffer holds.

    What such a read finds mostly meets a mask later and changes no result, but on a GPU the address may not exist.
    """
    from moe_core.runtime.interpreter.builder import Builder

    spans = sorted((buffer.address, buffer.address + buffer.span, buffer.name) for buffer in buffers)
    starts, ends = (np.array([span[end] for span in spans], np.uint64) for end in (0, 1))
    read = Builder._read

    def checked(builder: Builder, addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
        place = np.searchsorted(starts, addresses, side="right") - 1
        outside = (place < 0) | (addresses + np.uint64(dtype.itemsize) > ends[place])
        if np.any(outside):
            address = int(np.asarray(addresses)[outside].ravel()[0])
            near = min(spans, key=lambda span: max(span[0] - address, address - span[1], 0))
            raise AssertionError(f"read out of bounds at byte {address - near[0]} of {near[1] - near[0]} of {near[2]}")
        return read(builder, addresses, dtype)

    with mock.patch.object(Builder, "_read", checked):
        yield


def _run_on_host(plan: LaunchPlan, buffers: list[GuardedBuffer], others: Sequence[GuardedBuffer]) -> list[np.ndarray]:
    inside = _reads_stay_inside([*buffers, *others]) if plan.target.kind == "interpreter" else contextlib.nullcontext()
    with inside:
        prepare(plan)([buffer.address for buffer in buffers])
    return [buffer.image for buffer in buffers]


def _run_on_device(plan: LaunchPlan, buffers: list[GuardedBuffer], device_index: int) -> list[np.ndarray]:
    memory = [DeviceBytes(buffer.image, device_index) for buffer in buffers]
    try:
        prepare(plan, device_index)([block.address + GUARD_BYTES for block in memory])
        return [block.read() for block in memory]
    finally:
        for block in memory:
            block.free()
