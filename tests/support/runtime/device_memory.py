"""CUDA memory through the driver API: bytes to the device and back, without a framework."""

from __future__ import annotations

import ctypes

import numpy as np

from moe_core.runtime.cuda import driver


class DeviceBytes:
    """A copy of a byte array on a CUDA device. `address` is where it lies; `read()` copies it back."""

    def __init__(self, data: np.ndarray, device_index: int = 0) -> None:
        assert data.dtype == np.uint8 and data.flags.c_contiguous and data.size
        self._driver, self._device_index, self._size = driver(), device_index, data.size
        self._lib = self._driver.lib
        self._driver.within(device_index, self._upload, data)

    def write(self, data: np.ndarray) -> None:
        """Have other bytes, as many."""
        assert data.dtype == np.uint8 and data.flags.c_contiguous and data.size == self._size
        self._driver.within(self._device_index, self._copy_in, data)

    def read(self) -> np.ndarray:
        """The bytes as they are after all work on the device."""
        data = np.empty(self._size, np.uint8)
        self._driver.within(self._device_index, self._download, data)
        return data

    def free(self) -> None:
        """Return the memory; the object is of no use afterwards."""
        code = self._driver.within(self._device_index, self._lib.cuMemFree_v2, ctypes.c_uint64(self.address))
        self._driver.check(code, "freeing device memory")

    def _upload(self, data: np.ndarray) -> None:
        pointer = ctypes.c_uint64()
        code = self._lib.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(data.size))
        self._driver.check(code, f"allocating {data.size} bytes")
        self.address = pointer.value
        self._copy_in(data)

    def _copy_in(self, data: np.ndarray) -> None:
        source, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.size)
        code = self._lib.cuMemcpyHtoD_v2(ctypes.c_uint64(self.address), source, size)
        self._driver.check(code, f"copying {data.size} bytes to the device")

    def _download(self, data: np.ndarray) -> None:
        self._driver.check(self._lib.cuCtxSynchronize(), "waiting for the device")
        target, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(self._size)
        code = self._lib.cuMemcpyDtoH_v2(target, ctypes.c_uint64(self.address), size)
        self._driver.check(code, f"copying {self._size} bytes from the device")
