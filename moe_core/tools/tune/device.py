"""Device memory and timing through the CUDA driver."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_core.base import ArraySpec
from moe_core.base.dtypes import numpy_dtype
from moe_core.runtime.cuda import driver

#: Written before each timed run: several times the largest L2 cache, and long enough to launch the run behind it.
_FLUSH_BYTES = 256 * 2**20
#: Larger arrays repeat random numbers.
_PATTERN_BYTES = 16 * 2**20


class Device:
    """Leaving a `with` block frees all allocations."""

    def __init__(self, index: int) -> None:
        self.index, self._driver = index, driver()
        self._lib, self.check, self.fill = self._driver.lib, self._driver.check, self._driver.fill
        self._addresses: list[int] = []
        self._events: list[ctypes.c_void_p] = []
        self._before = ctypes.c_void_p()
        self._flush = 0

    def __enter__(self) -> Device:
        self._before = self._driver.current_context()
        self._driver.make_current(self._driver.context(self.index))
        self._flush = self.allocate(_FLUSH_BYTES)
        return self

    def __exit__(self, *error: Any) -> None:
        for event in self._events:
            self._lib.cuEventDestroy_v2(event)
        self.free(0)
        self._driver.make_current(self._before)

    def mark(self) -> int:
        return len(self._addresses)

    def free(self, mark: int) -> None:
        """Wait for the device, then free allocations since `mark`."""
        self._lib.cuCtxSynchronize()
        while len(self._addresses) > mark:
            self._lib.cuMemFree_v2(ctypes.c_uint64(self._addresses.pop()))

    def allocate(self, size: int) -> int:
        """A multiple of 256. Raises RuntimeError without memory."""
        pointer = ctypes.c_uint64()
        code = self._lib.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(max(1, size)))
        self.check(code, f"allocating {size} bytes")
        self._addresses.append(pointer.value)
        return pointer.value

    def upload(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.allocate(array.nbytes)
        if array.nbytes:
            self._write(address, array.view(np.uint8).reshape(-1))
        return address

    def random(self, spec: ArraySpec, scale: float, seed: int) -> int:
        """Contiguous normal numbers times `scale`, which repeat after some megabytes."""
        dtype = numpy_dtype(spec.dtype)
        count = min(spec.size, _PATTERN_BYTES // dtype.itemsize)
        numbers = np.random.default_rng(seed).standard_normal(count, dtype=np.float32) * np.float32(scale)
        pattern = numbers.astype(dtype).view(np.uint8)
        address, filled = self.allocate(spec.nbytes), pattern.nbytes
        if filled:
            self._write(address, pattern)
        while filled < spec.nbytes:
            size = min(filled, spec.nbytes - filled)
            target, source = ctypes.c_uint64(address + filled), ctypes.c_uint64(address)
            self.check(self._lib.cuMemcpyDtoD_v2(target, source, ctypes.c_size_t(size)), "copying on the device")
            filled += size
        return address

    def download(self, address: int, spec: ArraySpec) -> np.ndarray:
        """A contiguous array after all work on the device."""
        array = np.empty(spec.shape, numpy_dtype(spec.dtype))
        self.synchronize()
        if array.nbytes:
            target, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
            self.check(self._lib.cuMemcpyDtoH_v2(target, ctypes.c_uint64(address), size), "copying from the device")
        return array

    def synchronize(self) -> None:
        """Raises RuntimeError if any work failed."""
        self.check(self._lib.cuCtxSynchronize(), "waiting for the device")

    def time(self, runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
        """Median microseconds of each run, L2 flushed before it. Runs alternate against drifts of the clock."""
        while len(self._events) < 2 * rounds * len(runs):
            event = ctypes.c_void_p()
            self.check(self._lib.cuEventCreate(ctypes.byref(event), ctypes.c_uint(0)), "cuEventCreate")
            self._events.append(event)
        spare = iter(self._events)
        pairs = [[(next(spare), next(spare)) for _ in runs] for _ in range(rounds)]
        for round_pairs in pairs:
            for run, (start, end) in zip(runs, round_pairs, strict=True):
                self.fill(self._flush, _FLUSH_BYTES, 0)
                self.check(self._lib.cuEventRecord(start, ctypes.c_void_p()), "cuEventRecord")
                run()
                self.check(self._lib.cuEventRecord(end, ctypes.c_void_p()), "cuEventRecord")
        self.synchronize()
        times = [[self._elapsed(*pair) for pair in round_pairs] for round_pairs in pairs]
        return [statistics.median(column) for column in zip(*times, strict=True)]

    def _write(self, address: int, data: np.ndarray) -> None:
        source, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)
        self.check(self._lib.cuMemcpyHtoD_v2(ctypes.c_uint64(address), source, size), "copying to the device")

    def _elapsed(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        milliseconds = ctypes.c_float()
        code = self._lib.cuEventElapsedTime(ctypes.byref(milliseconds), start, end)
        self.check(code, "cuEventElapsedTime")
        return 1000 * milliseconds.value
