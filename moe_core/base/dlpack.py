"""Read DLPack capsules with ctypes, without a copy. Layouts and codes: dlpack.h, versions 0.x and 1.x."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from moe_core.errors import InvalidInput, Unsupported

_CODE_NAMES = ("int", "uint", "float", "opaque", "bfloat", "complex", "bool")
# Codes from 7 on name one dtype each.
_SMALL_FLOATS = (
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
)
_DTYPES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    **{(4, 16): "bfloat16", (6, 8): "bool", (10, 8): "float8_e4m3fn"},
}
# Page-locked host memory (3) is ordinary memory to a CPU.
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu"}
_DEVICE_NAMES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 11: "ROCm host", 13: "CUDA managed", 14: "oneAPI"}
_LEGACY_DEFAULT_STREAM = 1
_NEWEST_VERSION = (1, 0)
_READ_ONLY = 1


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("rank", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned`; the unversioned one begins with its tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Imported(NamedTuple):
    """The facts in a capsule. strides in elements, None: row-major. `capsule` keeps the memory alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    device: tuple[str, int]
    read_only: bool
    capsule: Any


def import_array(exporter: Any, stream: int | None) -> Imported:
    if not hasattr(exporter, "__dlpack__") or not hasattr(exporter, "__dlpack_device__"):
        raise InvalidInput(
            f"exporter must have __dlpack__ and __dlpack_device__, got {type(exporter).__name__}; pass an array of "
            "NumPy, torch, JAX or another library with DLPack"
        )
    kind, _ = _guarded(exporter, exporter.__dlpack_device__)
    consumer = None if _device(int(kind)) == "cpu" else stream or _LEGACY_DEFAULT_STREAM
    return _read(_guarded(exporter, lambda: _capsule(exporter, consumer)))


def _guarded(exporter: Any, call: Any) -> Any:
    try:
        return call()
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        dtype = getattr(exporter, "dtype", "unknown dtype")
        raise InvalidInput(
            f"exporter must be an array that its library can export through DLPack, got {type(exporter).__name__} of "
            f"{dtype}: {error}; detach or cast it first, or use TensorView.from_numpy for NumPy arrays of ml_dtypes"
        ) from error


def _capsule(exporter: Any, stream: int | None) -> Any:
    try:
        return exporter.__dlpack__(stream=stream, max_version=_NEWEST_VERSION, copy=False)
    except TypeError:
        # Exporters of the first protocol take neither max_version nor copy (they never copy).
        return exporter.__dlpack__(stream=stream)


def _read(capsule: Any) -> Imported:
    read_only = False
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if versioned.major > _NEWEST_VERSION[0]:
            raise Unsupported(
                f"DLPack version must be at most 1.x, got {versioned.major}.{versioned.minor}; "
                "ask the exporter for max_version=(1, 0)"
            )
        tensor, read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    elif _is_valid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_get_pointer(capsule, b"dltensor"))
    else:
        raise InvalidInput(
            f"__dlpack__ must return a capsule that nobody has consumed, got {capsule!r}; export it again"
        )
    kind, pointer = _device(tensor.device.kind), (tensor.data or 0) + tensor.byte_offset
    shape = tuple(tensor.shape[: tensor.rank])
    strides = tuple(tensor.strides[: tensor.rank]) if tensor.strides else None
    device = (kind, tensor.device.index if kind == "cuda" else 0)
    return Imported(pointer, shape, strides, _dtype(tensor.dtype), device, read_only, capsule)


def _dtype(dtype: _DataType) -> str:
    if dtype.lanes != 1:
        raise InvalidInput(f"exporter must have elements of 1 lane, got {dtype.lanes}; view it as a scalar dtype first")
    if (dtype.code, dtype.bits) not in _DTYPES:
        got = _describe(dtype.code, dtype.bits)
        raise InvalidInput(
            f"exporter must have one of the dtypes {', '.join(_DTYPES.values())}, got {got}; cast it first "
            "(sub-byte data travels packed as uint8)"
        )
    return _DTYPES[dtype.code, dtype.bits]


def _describe(code: int, bits: int) -> str:
    if code < len(_CODE_NAMES):
        return f"{_CODE_NAMES[code]}{bits}"
    small = code - len(_CODE_NAMES)
    return _SMALL_FLOATS[small] if small < len(_SMALL_FLOATS) else f"DLPack code {code} of {bits} bits"


def _device(kind: int) -> str:
    if kind not in _DEVICES:
        name = _DEVICE_NAMES.get(kind, "unknown")
        raise Unsupported(
            f"arrays must be on a CPU or a CUDA device, got {name} (DLPack device {kind}); move them there"
        )
    return _DEVICES[kind]
