"""The CUDA driver API through ctypes: devices, contexts, modules. No framework, no C compiler, no process-wide state.

Both frameworks use each device's primary context, and so do we: handles made here are valid in theirs and the reverse.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator

from moe_core import dtypes
from moe_core.errors import InvalidInput, Unsupported
from moe_core.target import Target

_ATTRIBUTE_MULTIPROCESSORS = 16
_ATTRIBUTE_CAPABILITY_MAJOR = 75
_ATTRIBUTE_CAPABILITY_MINOR = 76
_FUNCTION_MAX_DYNAMIC_SHARED = 8
_STATIC_SHARED_LIMIT = 48 * 1024


class LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` of cuda.h."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` of cuda.h, of those whose value is an int: its union has 64 bytes at a multiple of 8."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the launch may begin before the one ahead of it has ended.
DEPENDENT_LAUNCH = LaunchAttribute(id=6, value=1)

#: Bytes of a `CUtensorMap` of cuda.h, and what its address must be a multiple of.
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64
_TENSOR_MAP_TYPES = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0, "int8": 0, "uint8": 0}
_SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES = 3, 3


class Driver:
    """libcuda, initialised. `lib` is the ctypes library; `check(code, what)` raises on an error code."""

    def __init__(self) -> None:
        try:
            self.lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unsupported(f"no CUDA driver on this machine (libcuda.so.1: {error}); use CPU arrays") from error
        self.check(self.lib.cuInit(0), "cuInit")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        # Without argtypes, whose conversions take half the time of a call: every argument must be a ctypes object.
        self.launch = self.lib.cuLaunchKernelEx

    def check(self, code: int, what: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else "unknown error"
            raise RuntimeError(f"{what} failed with CUDA error {code}: {reason}")

    @functools.cached_property
    def device_count(self) -> int:
        count = ctypes.c_int()
        self.check(self.lib.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        return count.value

    def attribute(self, device_index: int, attribute: int) -> int:
        value = ctypes.c_int()
        code = self.lib.cuDeviceGetAttribute(ctypes.byref(value), attribute, device_index)
        self.check(code, f"cuDeviceGetAttribute({attribute}) of device {device_index}")
        return value.value

    def name(self, device_index: int) -> str:
        """The device's name, as `NVIDIA H200`."""
        text = ctypes.create_string_buffer(128)
        self.check(self.lib.cuDeviceGetName(text, 128, device_index), "cuDeviceGetName")
        return text.value.decode()

    def context(self, device_index: int) -> ctypes.c_void_p:
        """The primary context of a device, retained for the life of the process."""
        with self._lock:
            if device_index not in self._contexts:
                if not 0 <= device_index < self.device_count:
                    raise InvalidInput(
                        f"device_index must be below the number of CUDA devices, {self.device_count}, "
                        f"got {device_index}; choose another device"
                    )
                context = ctypes.c_void_p()
                code = self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device_index)
                self.check(code, "cuDevicePrimaryCtxRetain")
                self._contexts[device_index] = context
            return self._contexts[device_index]

    @contextlib.contextmanager
    def activate(self, device_index: int) -> Iterator[None]:
        """Make a device's primary context current on this thread inside a `with` block."""
        context, current = self.context(device_index), ctypes.c_void_p()
        self.check(self.lib.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
        if current.value == context.value:
            yield
            return
        self.check(self.lib.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self.check(self.lib.cuCtxPopCurrent_v2(ctypes.byref(current)), "cuCtxPopCurrent")

    def encode_tensor_map(
        self, into: int, address: int, dtype: str, shape: tuple[int, int], pitch: int, panel: tuple[int, int]
    ) -> None:
        """Write the `CUtensorMap` of a matrix of 8- or 16-bit elements to the address `into` (TENSOR_MAP_ALIGNMENT,
        TENSOR_MAP_BYTES).

        shape: (rows, columns); pitch: elements between rows; panel: (rows, columns) of one copy, 128 bytes wide.
        Elements outside the matrix are read as zeros and not written.
        """
        sizes = (ctypes.c_uint64 * 2)(shape[1], shape[0])
        pitches = (ctypes.c_uint64 * 1)(dtypes.itemsize(dtype) * pitch)
        box, steps = (ctypes.c_uint32 * 2)(panel[1], panel[0]), (ctypes.c_uint32 * 2)(1, 1)
        code = self.lib.cuTensorMapEncodeTiled(
            ctypes.c_void_p(into), _TENSOR_MAP_TYPES[dtype], 2, ctypes.c_void_p(address), sizes, pitches, box, steps,
            0, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, 0,
        )  # fmt: skip
        self.check(code, f"describing a matrix {shape} with {pitch} elements per row for TMA")

    def load(self, cubin: bytes, function_name: str, shared_bytes: int, device_index: int) -> ctypes.c_void_p:
        """Load a cubin on a device and return the function, allowed its dynamic shared memory."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self.activate(device_index):
            self.check(self.lib.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {function_name}")
            code = self.lib.cuModuleGetFunction(ctypes.byref(function), module, function_name.encode())
            self.check(code, f"finding {function_name}")
            if shared_bytes > _STATIC_SHARED_LIMIT:
                code = self.lib.cuFuncSetAttribute(function, _FUNCTION_MAX_DYNAMIC_SHARED, shared_bytes)
                self.check(code, f"giving {function_name} {shared_bytes} bytes of shared memory")
        return function


@functools.cache
def driver() -> Driver:
    """The process's CUDA driver; raises Unsupported where there is none."""
    return Driver()


@functools.cache
def cuda_available() -> bool:
    """Whether a CUDA driver with at least one device is present."""
    try:
        return driver().device_count > 0
    except (Unsupported, RuntimeError):
        return False


@functools.cache
def cuda_target(device_index: int) -> Target:
    """The plan target of a CUDA device. Raises Unsupported below sm_80."""
    cuda = driver()
    cuda.context(device_index)
    major = cuda.attribute(device_index, _ATTRIBUTE_CAPABILITY_MAJOR)
    minor = cuda.attribute(device_index, _ATTRIBUTE_CAPABILITY_MINOR)
    if major < 8:
        raise Unsupported(f"{cuda.name(device_index)} is sm_{major}{minor}; kernels need sm_80 or newer")
    return Target("cuda", major * 10 + minor, cuda.attribute(device_index, _ATTRIBUTE_MULTIPROCESSORS))
