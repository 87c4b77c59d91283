"""NVIDIA GPUs through the CUDA driver API and ctypes, in each device's primary context, as frameworks use it."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from moe_core.base import ALIGNMENT, Target, dtypes
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan import Constant, KernelLaunch, LaunchPlan, Pointer, TensorMap
from moe_core.runtime.compiler import compile_launch
from moe_core.runtime.prepared import Prepared

_ATTRIBUTE_MULTIPROCESSORS = 16
_ATTRIBUTE_CAPABILITY_MAJOR = 75
_ATTRIBUTE_CAPABILITY_MINOR = 76
_FUNCTION_MAX_DYNAMIC_SHARED = 8
_STATIC_SHARED_LIMIT = 48 * 1024
_SCALARS = {"int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float}
_POINTER_BYTES = 8
#: CUDA_ERROR_INVALID_IMAGE, _INVALID_PTX and _INVALID_SOURCE.
_DAMAGED = (200, 218, 300)
Result = TypeVar("Result")


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((f"{kind}_{axis}", ctypes.c_uint) for kind in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` with an int value. The union has 64 bytes at a multiple of 8."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
DEPENDENT_LAUNCH = LaunchAttribute(id=6, value=1)

TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64
_TENSOR_MAP_TYPES = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0, "int8": 0, "uint8": 0}
_SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES = 3, 3
_PANEL_BYTES = 128


class Driver:
    def __init__(self) -> None:
        try:
            self.lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unsupported(f"no CUDA driver on this machine (libcuda.so.1: {error}); use CPU arrays") from error
        self.check(self.lib.cuInit(0), "cuInit")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        # No argtypes: their conversions take half a call's time. Pass ctypes objects only.
        self.launch = self.lib.cuLaunchKernelEx
        # It never waits, so it keeps the interpreter's lock.
        self.get_context = ctypes.PyDLL("libcuda.so.1").cuCtxGetCurrent

    def check(self, code: int, action: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else "unknown error"
            raise RuntimeError(f"{action} failed with CUDA error {code}: {reason}")

    @functools.cached_property
    def device_count(self) -> int:
        return self.number(self.lib.cuDeviceGetCount, "cuDeviceGetCount")

    def attribute(self, device_index: int, attribute: int) -> int:
        action = f"cuDeviceGetAttribute({attribute}) of device {device_index}"
        return self.number(self.lib.cuDeviceGetAttribute, action, attribute, device_index)

    def number(self, function: Any, action: str, *arguments: int) -> int:
        value = ctypes.c_int()
        self.check(function(ctypes.byref(value), *arguments), action)
        return value.value

    def name(self, device_index: int) -> str:
        text = ctypes.create_string_buffer(128)
        self.check(self.lib.cuDeviceGetName(text, 128, device_index), "cuDeviceGetName")
        return text.value.decode()

    def context(self, device_index: int) -> ctypes.c_void_p:
        """A device's primary context, retained forever."""
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

    def current_context(self) -> ctypes.c_void_p:
        """This thread's context; its value may be None."""
        current = ctypes.c_void_p()
        self.check(self.lib.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
        return current

    def make_current(self, context: ctypes.c_void_p) -> None:
        self.check(self.lib.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def within(self, device_index: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function with a device's primary context current, then restore the thread's, also after Ctrl-C."""
        context, before = self.context(device_index), self.current_context()
        if before.value == context.value:
            return function(*arguments)
        try:
            try:
                self.make_current(context)
                return function(*arguments)
            finally:
                self.make_current(before)
        finally:
            # Again, since Ctrl-C may have come before the first.
            self.make_current(before)

    def encode_tensor_map(
        self, into: int, address: int, dtype: str, shape: tuple[int, int], pitch: int, panel: tuple[int, int]
    ) -> None:
        """Write the `CUtensorMap` of a matrix of 8- or 16-bit elements to `into`. See `TensorMap`."""
        sizes = (ctypes.c_uint64 * 2)(shape[1], shape[0])
        pitches = (ctypes.c_uint64 * 1)(dtypes.itemsize(dtype) * pitch)
        box, steps = (ctypes.c_uint32 * 2)(panel[1], panel[0]), (ctypes.c_uint32 * 2)(1, 1)
        code = self.lib.cuTensorMapEncodeTiled(
            ctypes.c_void_p(into), _TENSOR_MAP_TYPES[dtype], 2, ctypes.c_void_p(address), sizes, pitches, box, steps,
            0, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, 0,
        )  # fmt: skip
        self.check(code, f"describing a matrix {shape} with {pitch} elements per row for TMA")

    def fill(self, address: int, size: int, byte: int, stream: int = 0) -> None:
        """Set bytes of device memory of the current context, in stream order."""
        code = self.lib.cuMemsetD8Async(
            ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        )
        self.check(code, "cuMemsetD8Async")

    def load(self, cubin: bytes, function_name: str, shared_bytes: int, device_index: int) -> ctypes.c_void_p:
        return self.within(device_index, self._load, cubin, function_name, shared_bytes)

    def _load(self, cubin: bytes, function_name: str, shared_bytes: int) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        action, code = f"loading {function_name}", self.lib.cuModuleLoadData(ctypes.byref(module), cubin)
        if code in _DAMAGED:
            action += ", perhaps from a damaged file (delete Triton's cache, $TRITON_CACHE_DIR or ~/.triton/cache),"
        self.check(code, action)
        try:
            code = self.lib.cuModuleGetFunction(ctypes.byref(function), module, function_name.encode())
            self.check(code, f"finding {function_name}")
            if shared_bytes > _STATIC_SHARED_LIMIT:
                code = self.lib.cuFuncSetAttribute(function, _FUNCTION_MAX_DYNAMIC_SHARED, shared_bytes)
                self.check(code, f"giving {function_name} {shared_bytes} bytes of shared memory")
        except BaseException:
            self.lib.cuModuleUnload(module)
            raise
        return function


@functools.cache
def driver() -> Driver:
    """The process's driver. Raises Unsupported without one."""
    return Driver()


@functools.cache
def why_no_gpu() -> str:
    try:
        count = driver().device_count
    except (Unsupported, RuntimeError) as error:
        return str(error).partition("; ")[0]
    return "" if count > 0 else f"the CUDA driver shows {count} devices"


def cuda_available() -> bool:
    return not why_no_gpu()


@functools.cache
def cuda_target(device_index: int) -> Target:
    """The target of a CUDA device. Raises Unsupported below sm_80."""
    cuda = driver()
    cuda.context(device_index)
    major = cuda.attribute(device_index, _ATTRIBUTE_CAPABILITY_MAJOR)
    minor = cuda.attribute(device_index, _ATTRIBUTE_CAPABILITY_MINOR)
    if major < 8:
        raise Unsupported(f"{cuda.name(device_index)} is sm_{major}{minor}; kernels need sm_80 or newer")
    return Target("cuda", major * 10 + minor, cuda.attribute(device_index, _ATTRIBUTE_MULTIPROCESSORS))


class HostTensorMap:
    """One descriptor, encoded again only if its buffer moves. index: of the buffer among a plan's addresses. entries:
    of the kernel parameters that Triton makes of it: the descriptor by value, shape (int32) and strides (int64) of both
    axes.
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
        self.address = None
        request = self.request
        panel = (request.box[0], _PANEL_BYTES // dtypes.itemsize(self.dtype))
        driver().encode_tensor_map(self._map, address, self.dtype, request.shape, request.pitch, panel)
        self.address = address


class _ParameterBlocks:
    """One thread's launch data: an address array and, per step, the arguments of its driver call. addresses: of inputs,
    outputs and scratch buffers, where parameter lists point. Scratch addresses and the stream stay written between
    calls, since they mostly repeat."""

    def __init__(
        self, plan: LaunchPlan, steps: Sequence[KernelLaunch], kernels: Sequence[Any], index: Mapping[str, int]
    ) -> None:
        self.addresses = (ctypes.c_uint64 * (1 + max(index.values(), default=0)))()
        count = len(plan.inputs) + len(plan.outputs)
        content = memoryview(self.addresses).cast("B")
        self.address_bytes = content[: _POINTER_BYTES * (count + bool(plan.scratch_bytes))]
        self.scratch = content[_POINTER_BYTES * (count + 1) :]
        self.current = ctypes.c_void_p()
        self.current_reference = ctypes.byref(self.current)
        self.homes: int | tuple[int, ...] | None = None
        self.stream: int | None = None
        self.configs: list[LaunchConfig] = []
        self.launches: list[tuple[Any, ...]] = []
        self.maps: list[HostTensorMap] = []
        self._keep: list[Any] = []
        base = ctypes.addressof(self.addresses)
        for step, (function, shared, num_warps) in zip(steps, kernels, strict=True):
            entries: list[int] = []
            for _, value in step.arguments:
                if isinstance(value, Pointer):
                    entries.append(base + _POINTER_BYTES * index[value.buffer])
                elif isinstance(value, TensorMap):
                    tensor_map = HostTensorMap(value, plan.spec(value.buffer).dtype, index[value.buffer])
                    self.maps.append(tensor_map)
                    entries += tensor_map.entries
                elif not isinstance(value, Constant):
                    holder = _SCALARS[value.dtype](value.value)
                    self._keep.append(holder)
                    entries.append(ctypes.addressof(holder))
            # Two scratch pointers of Triton, which our kernels do not use.
            null = ctypes.c_void_p()
            entries += [ctypes.addressof(null)] * 2
            parameters = (ctypes.c_void_p * len(entries))(*entries)
            config = LaunchConfig(*step.grid, plan.target.warp_threads * num_warps, 1, 1, shared, None, None, 0)
            if step.dependent:
                config.attributes, config.num_attributes = ctypes.addressof(DEPENDENT_LAUNCH), 1
            self._keep += [null, parameters]
            self.configs.append(config)
            self.launches.append((ctypes.byref(config), function, ctypes.byref(parameters), None))

    def use_stream(self, stream: int) -> None:
        """Launch on this stream. After an interrupt the next call writes it again."""
        self.stream = None
        for config in self.configs:
            config.stream = stream
        self.stream = stream


class CudaPrepared(Prepared):
    def __init__(self, plan: LaunchPlan, device_index: int) -> None:
        super().__init__(plan, device_index)
        self._driver = driver()
        device = cuda_target(device_index)
        if device.architecture != plan.target.architecture:
            raise InvalidInput(
                f"plan must be made for {device} to run on cuda device {device_index}, got one for {plan.target}; "
                "plan for runtime.target_of(('cuda', index))"
            )
        self._context = self._driver.context(device_index).value
        self._steps = [step for step in plan.steps if isinstance(step, KernelLaunch)]
        self._kernels = [_load(compile_launch(plan, step, plan.target), device_index) for step in self._steps]
        self._local = threading.local()
        # Faster than assignments to a ctypes array, which convert item by item.
        num_addresses = self._count + bool(self._scratch_bytes)
        self._pack = struct.Struct(f"{num_addresses}Q").pack_into
        self._low_bits = _in_lanes([ALIGNMENT - 1] * num_addresses)
        # One address that holds scratch, or a tuple.
        homes = sorted({home for home, _ in self._places if home < num_addresses})
        self._homes = operator.itemgetter(*homes) if homes else None
        # As one number: the offsets plus each home's address times ones at its buffers.
        self._offsets = _in_lanes([offset for _, offset in self._places])
        self._ones = [(home, _in_lanes([int(home == other) for other, _ in self._places])) for home in homes]

    def __call__(self, pointers: Sequence[int], stream: int = 0, steps: slice | None = None) -> None:
        try:
            blocks = self._local.blocks
        except AttributeError:
            blocks = self._local.blocks = _ParameterBlocks(self.plan, self._steps, self._kernels, self._index)
        code = self._driver.get_context(blocks.current_reference)
        if code:
            self._driver.check(code, "cuCtxGetCurrent")
        if blocks.current.value != self._context:
            return self._driver.within(self.device_index, self, pointers, stream, steps)
        addresses = blocks.addresses
        self._pack(addresses, 0, *pointers)
        if int.from_bytes(blocks.address_bytes, "little") & self._low_bits:
            self._refuse_misaligned(pointers)
        if 0 in pointers:
            self._refuse_missing(pointers)
        if self._homes is not None and (homes := self._homes(pointers)) != blocks.homes:
            # Reset first: after an interrupt the next call writes the addresses.
            blocks.homes = None
            scratch = self._offsets
            for home, ones in self._ones:
                scratch += pointers[home] * ones
            blocks.scratch[:] = scratch.to_bytes(len(blocks.scratch), "little")
            blocks.homes = homes
        for tensor_map in blocks.maps:
            address = addresses[tensor_map.index]
            if address != tensor_map.address:
                tensor_map.point_at(address)
        if stream != blocks.stream:
            blocks.use_stream(stream)
        launch = self._driver.launch
        for arguments in blocks.launches if steps is None else blocks.launches[steps]:
            code = launch(*arguments)
            if code:
                step = self._steps[blocks.launches.index(arguments)]
                self._driver.check(code, f"launching {step.kernel.name}")


def _in_lanes(values: Sequence[int]) -> int:
    return int.from_bytes(struct.pack(f"{len(values)}Q", *values), "little")


@functools.cache
def _load(compiled: Any, device_index: int) -> Any:
    metadata = compiled.metadata
    function = driver().load(compiled.asm["cubin"], metadata.name, metadata.shared, device_index)
    # Specialised kernels run more warps.
    return function, metadata.shared, metadata.num_warps
