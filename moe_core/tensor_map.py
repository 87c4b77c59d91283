"""TMA descriptors on the host: what a launch passes for a plan's `TensorMap`."""

from __future__ import annotations

import ctypes

from moe_core import dtypes
from moe_core.cuda import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, driver
from moe_core.plan import TensorMap

#: Bytes of a panel's row, the most that the swizzle takes.
_PANEL_BYTES = 128


class HostTensorMap:
    """One descriptor, encoded again only when its buffer moves.

    entries: addresses of the kernel parameters Triton makes of a descriptor: itself by value, then shape (int32) and
    strides (int64) of both axes. index: the buffer's place among a plan's addresses.
    """

    def __init__(self, request: TensorMap, dtype: str, index: int) -> None:
        self.request, self.dtype, self.index = request, dtype, index
        self.address: int | None = None
        self._storage = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
        start = ctypes.addressof(self._storage)
        self._map = start + -start % TENSOR_MAP_ALIGNMENT
        self._sizes = [ctypes.c_int32(size) for size in request.shape]
        self._strides = [ctypes.c_int64(request.pitch), ctypes.c_int64(1)]
        self.entries = [self._map, *(ctypes.addressof(value) for value in (*self._sizes, *self._strides))]

    def point_at(self, address: int) -> None:
        """Describe the buffer at an address."""
        self.address = None
        request = self.request
        panel = (request.box[0], _PANEL_BYTES // dtypes.itemsize(self.dtype))
        driver().encode_tensor_map(self._map, address, self.dtype, request.shape, request.pitch, panel)
        self.address = address
