"""A CUDA driver whose device memory is the host's, so that host code around a GPU runs without one."""

from __future__ import annotations

import ctypes
from typing import Any

from moe_core.runtime.cuda import Driver

#: Milliseconds that pass between two events.
TICK = 0.5


class FakeLibrary:
    """The functions of libcuda that `moe_core.tools.tune` calls. Arguments must be what the real ones take: 64-bit
    numbers and pointers as ctypes objects, since ctypes passes plain integers as 32 bits."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.events: dict[int, float] = {}
        self.now = 0.0
        self.live_events = 0

    def _region(self, address: int, size: int) -> int:
        """The address, checked to lie with all its bytes in live memory."""
        for start, (_, length) in self.memory.items():
            if start <= address and address + size <= start + length:
                return address
        raise AssertionError(f"{size} bytes at {address:#x} are not in device memory")

    def cuMemAlloc_v2(self, pointer: Any, size: ctypes.c_size_t) -> int:  # noqa: N802
        assert isinstance(size, ctypes.c_size_t) and size.value > 0
        block = (ctypes.c_uint8 * (size.value + 256))()
        address = -(-ctypes.addressof(block) // 256) * 256
        self.memory[address] = (block, size.value)
        pointer._obj.value = address
        return 0

    def cuMemFree_v2(self, pointer: ctypes.c_uint64) -> int:  # noqa: N802
        assert isinstance(pointer, ctypes.c_uint64)
        del self.memory[pointer.value]
        return 0

    def cuMemcpyHtoD_v2(self, target: Any, source: Any, size: Any) -> int:  # noqa: N802
        assert isinstance(target, ctypes.c_uint64) and isinstance(source, ctypes.c_void_p)
        ctypes.memmove(self._region(target.value, size.value), source.value, size.value)
        return 0

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, size: Any) -> int:  # noqa: N802
        assert isinstance(target, ctypes.c_void_p) and isinstance(source, ctypes.c_uint64)
        ctypes.memmove(target.value, self._region(source.value, size.value), size.value)
        return 0

    def cuMemcpyDtoD_v2(self, target: Any, source: Any, size: Any) -> int:  # noqa: N802
        assert isinstance(target, ctypes.c_uint64) and isinstance(source, ctypes.c_uint64)
        ctypes.memmove(self._region(target.value, size.value), self._region(source.value, size.value), size.value)
        return 0

    def cuMemsetD8Async(self, target: Any, byte: Any, size: Any, stream: Any) -> int:  # noqa: N802
        assert isinstance(target, ctypes.c_uint64) and isinstance(byte, ctypes.c_ubyte)
        assert isinstance(size, ctypes.c_size_t) and isinstance(stream, ctypes.c_void_p)
        ctypes.memset(self._region(target.value, size.value), byte.value, size.value)
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        return 0

    def cuEventCreate(self, event: Any, flags: Any) -> int:  # noqa: N802
        assert isinstance(flags, ctypes.c_uint)
        self.live_events += 1
        event._obj.value = self.live_events
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:  # noqa: N802
        assert isinstance(event, ctypes.c_void_p)
        self.live_events -= 1
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        assert isinstance(event, ctypes.c_void_p) and isinstance(stream, ctypes.c_void_p)
        self.now += TICK
        self.events[event.value] = self.now
        return 0

    def cuEventElapsedTime(self, milliseconds: Any, start: Any, end: Any) -> int:  # noqa: N802
        milliseconds._obj.value = self.events[end.value] - self.events[start.value]
        return 0


class FakeDriver:
    """`moe_core.runtime.cuda.Driver` on a FakeLibrary."""

    fill = Driver.fill

    def __init__(self) -> None:
        self.lib = FakeLibrary()
        self.active = 0

    def check(self, code: int, what: str) -> None:
        if code:
            raise RuntimeError(f"{what} failed with CUDA error {code}")

    def name(self, device_index: int) -> str:
        return f"Fake GPU {device_index}"

    def context(self, device_index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(1)

    def current_context(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.active)

    def make_current(self, context: ctypes.c_void_p) -> None:
        self.active = context.value or 0
