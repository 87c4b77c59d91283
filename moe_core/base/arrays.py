"""Array specs (shape, dtype, strides) and borrowed views of other libraries' arrays."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_core.base import dlpack, dtypes
from moe_core.base.codec import plan_type
from moe_core.errors import InvalidInput, Unsupported

#: Of every buffer handed to a kernel, in bytes.
ALIGNMENT = 16
#: The last two axes of a weight: `[inputs, outputs]` or `[outputs, inputs]`.
WEIGHT_LAYOUTS = ("in_out", "out_in")
TRANSPOSED = {"in_out": "out_in", "out_in": "in_out"}


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements: (2, 3, 4) -> (12, 4, 1)."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def _integers(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple([operator.index(value) for value in values])
    except (TypeError, RuntimeError) as error:
        kind = type(values).__name__
        raise InvalidInput(f"{name} must be a tuple of integers, got {kind}; pass the array's {name}") from error


@plan_type
@dataclass(frozen=True)
class ArraySpec:
    """Shape, canonical dtype name and strides (in elements; None: row-major) of an array.

    Strides of axes of size 1 are normalised to row-major, because libraries disagree about them.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _integers("shape", self.shape))
        object.__setattr__(self, "dtype", dtypes.canonical(self.dtype))
        if any(size < 0 for size in self.shape):
            raise InvalidInput(f"shape must have no negative size, got {self.shape}; pass the array's shape")
        if self.strides is not None:
            object.__setattr__(self, "strides", _integers("strides", self.strides))
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise InvalidInput(
                f"strides must have one entry per axis of shape {self.shape}, got {self.strides}; pass both as they are"
            )
        strides = packed = contiguous_strides(self.shape)
        if self.strides is not None and 0 not in self.shape:
            axes = zip(self.shape, self.strides, packed, strict=True)
            strides = tuple(dense if size == 1 else step for size, step, dense in axes)
        object.__setattr__(self, "strides", strides)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * dtypes.itemsize(self.dtype)

    @property
    def is_contiguous(self) -> bool:
        return self.strides == contiguous_strides(self.shape)

    @property
    def stride(self) -> tuple[int, ...]:
        assert self.strides is not None
        return self.strides

    def __str__(self) -> str:
        layout = "" if self.is_contiguous else f" strides {self.strides}"
        return f"{self.dtype}{list(self.shape)}{layout}"


def require_spec(
    name: str, spec: ArraySpec | None, shape: Sequence[int | str], dtype: str | Sequence[str], contiguous: bool = True
) -> ArraySpec:
    """Check one argument and return it. Raises InvalidInput.

    shape: an int must match, a string names a free dimension (`("num_tokens", 64)`). dtype: one name or several.
    """
    wanted = "[" + ", ".join(str(size) for size in shape) + "]"
    allowed = (dtype,) if isinstance(dtype, str) else tuple(dict.fromkeys(dtype))
    if not isinstance(spec, ArraySpec):
        fix = "pass the array" if spec is None else "pass a plain array"
        raise InvalidInput(f"{name} must be {wanted} of {' or '.join(allowed)}, got {spec}; {fix}")
    if spec.rank != len(shape):
        fix = "reshape it" if spec.rank < len(shape) else "flatten the leading axes first"
        raise InvalidInput(f"{name} must be {wanted}, got {spec.shape}; {fix}")
    if any(want != got and not isinstance(want, str) for want, got in zip(shape, spec.shape, strict=True)):
        raise InvalidInput(f"{name} must be {wanted}, got {spec.shape}; pass an array of that shape")
    if spec.dtype not in allowed:
        raise InvalidInput(f"{name} must be {' or '.join(allowed)}, got {spec.dtype}; cast it to {allowed[0]}")
    if contiguous and not spec.is_contiguous:
        raise InvalidInput(f"{name} must be row-major contiguous, got strides {spec.strides}; make it contiguous first")
    return spec


class _Borrowed:
    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def host_array(pointer: int, spec: ArraySpec, *, owner: Any = None, writable: bool = True) -> np.ndarray:
    """View host memory at `pointer` as a NumPy array of `spec`, which keeps `owner` alive."""
    dtype, layout = _interface(spec)
    if spec.size == 0:
        return np.empty(spec.shape, dtype)
    return np.asarray(_Borrowed({"data": (pointer, not writable), **layout}, owner)).view(dtype)


def host_view(spec: ArraySpec) -> Callable[[int], np.ndarray]:
    """`host_array` for many addresses, in a quarter of the time."""
    if not spec.is_contiguous or spec.size == 0:
        return lambda pointer: host_array(pointer, spec)
    shape, dtype = spec.shape, dtypes.numpy_dtype(spec.dtype)
    memory: Any = ctypes.c_char * spec.nbytes
    return lambda pointer: np.ndarray(shape, dtype, memory.from_address(pointer))


@functools.lru_cache(maxsize=1024)
def _interface(spec: ArraySpec) -> tuple[np.dtype, dict[str, Any]]:
    dtype = dtypes.numpy_dtype(spec.dtype)
    return dtype, {
        "shape": spec.shape,
        "strides": tuple(step * dtype.itemsize for step in spec.stride),
        # NumPy's interface lacks the ml_dtypes: reinterpret bytes of that size.
        "typestr": dtype.str if dtype.isbuiltin == 1 else f"<u{dtype.itemsize}",
        "version": 3,
    }


@dataclass(frozen=True)
class TensorView:
    """A borrowed array: address, spec and device. `owner` keeps the memory alive while the view lives.

    device: `("cpu", 0)` or `("cuda", index)`. read_only: the exporter forbids writing.
    """

    pointer: int
    spec: ArraySpec
    device: tuple[str, int]
    owner: Any = field(default=None, compare=False, repr=False)
    read_only: bool = False

    def data_ptr(self) -> int:
        return self.pointer

    @classmethod
    def from_dlpack(cls, exporter: Any, *, stream: int | None = None) -> TensorView:
        """View an array of any library that speaks DLPack (NumPy, torch, JAX, ...), without a copy.

        Args:
            exporter: the array.
            stream: for CUDA arrays, the stream that will use the view. The exporter makes it wait for pending work.
                None or 0: the legacy default stream; -1: the caller orders the work.

        Raises:
            InvalidInput: an object without DLPack or that its library cannot export (a torch tensor that requires grad,
                a NumPy array of ml_dtypes: see `from_numpy`), or an unknown dtype.
            Unsupported: devices other than CPU and CUDA.
        """
        imported = dlpack.import_array(exporter, stream)
        spec = ArraySpec(imported.shape, imported.dtype, imported.strides)
        return cls(imported.pointer, spec, imported.device, imported.capsule, imported.read_only)

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorView:
        """View a NumPy array without a copy, also of ml_dtypes, which NumPy cannot export through DLPack.

        Raises InvalidInput for anything else, an unknown dtype, foreign byte order, or strides that are no multiple of
        the element size.
        """
        if not isinstance(array, np.ndarray):
            raise InvalidInput(f"array must be a NumPy array, got {type(array).__name__}; use from_dlpack for others")
        dtype = dtypes.canonical(array.dtype)
        if not array.dtype.isnative:
            raise InvalidInput(f"array must have native byte order, got {array.dtype!r}; call .astype({dtype!r}) first")
        if any(step % array.itemsize for step in array.strides):
            raise InvalidInput(
                f"array must have strides that are multiples of its {array.itemsize}-byte elements, "
                f"got {array.strides} bytes; copy it first"
            )
        spec = ArraySpec(array.shape, dtype, tuple(step // array.itemsize for step in array.strides))
        return cls(array.ctypes.data, spec, ("cpu", 0), array, not array.flags.writeable)

    def numpy(self) -> np.ndarray:
        """The same memory as a NumPy array. Raises Unsupported on a GPU."""
        if self.device[0] != "cpu":
            raise Unsupported(f"numpy() needs an array on the CPU, got device {self.device}; copy it to the CPU first")
        return host_array(self.pointer, self.spec, owner=self, writable=not self.read_only)


def row_stride(name: str, spec: ArraySpec) -> int:
    """The row stride of a matrix with dense rows. Raises InvalidInput for others."""
    if spec.shape[1] > 1 and spec.stride[1] != 1:
        raise InvalidInput(
            f"{name} must have dense rows (last stride 1), got strides {spec.strides}; make it contiguous"
        )
    if spec.shape[0] > 1 and spec.stride[0] < spec.shape[1]:
        raise InvalidInput(
            f"{name} must not have overlapping rows, got strides {spec.strides} for shape {spec.shape}; "
            "make it contiguous"
        )
    return spec.stride[0]
