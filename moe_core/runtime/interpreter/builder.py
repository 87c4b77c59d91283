"""The NumPy meaning of every Triton operation, with bfloat16 and fp8 as ml_dtypes arrays. Imports Triton."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from moe_core.errors import Unsupported

_FP8 = {
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
}
_NUMPY = {"int1": np.dtype(np.bool_), "bf16": np.dtype(ml_dtypes.bfloat16)}
_NUMPY |= {f"fp{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)} | _FP8
_NUMPY |= {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
_UNSIGNED = {size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)}
_ADDRESS = np.dtype(np.uint64)
_FP8_LIMITS = {dtype: np.float32(ml_dtypes.finfo(dtype).max) for dtype in _FP8.values()}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def numpy_dtype(kind: Any) -> np.dtype:
    kind = kind.scalar
    if isinstance(kind, tl.pointer_type):
        return _ADDRESS
    dtype = _NUMPY.get(kind.name)
    if dtype is None:
        raise Unsupported(f"Triton type {kind.name} has no NumPy counterpart; use {', '.join(_NUMPY)}")
    return dtype


def convert(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round to nearest even. fp8 saturates like `cvt.rn.satfinite`; NaN stays NaN."""
    limit = _FP8_LIMITS.get(dtype)
    if limit is not None and data.dtype != dtype:
        data = np.clip(data.astype(np.float32), -limit, limit)
    return data.astype(dtype)


def _round_to_tf32(data: np.ndarray) -> np.ndarray:
    """10 mantissa bits, to nearest, ties away (like `cvt.rna.tf32`)."""
    bits = data.view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(data), rounded, data)


def _fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of float32 with one rounding. The product is exact in float64. The sum is rounded to odd there (Boldo
    and Melquiond, "Emulation of FMA and correctly rounded sums", 2008), so that only the rounding to float32 counts."""
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = np.ascontiguousarray(total).view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + step, bits).view(np.float64).astype(np.float32)


class _Memory:
    def __init__(self, lowest: int, highest: int, dtype: np.dtype) -> None:
        self.__array_interface__ = {
            "data": (lowest, False),
            "shape": ((highest - lowest) // dtype.itemsize + 1,),
            "typestr": dtype.str,
            "version": 3,
        }


class Builder(InterpreterBuilder):
    """Corrects the operations that Triton 3.6 to 3.9 get wrong."""

    def __init__(self) -> None:
        super().__init__()
        # They only feed device asserts, which are off, and triple the cost of integers.
        self.options = dataclasses.replace(self.options, sanitize_overflow=False)

    def get_bf16(self, value: float) -> TensorHandle:
        """Triton 3.6 has none."""
        return TensorHandle(np.array([value], dtype=ml_dtypes.bfloat16), tl.bfloat16)

    def get_all_ones_value(self, type: Any) -> TensorHandle:
        return TensorHandle(np.array([-1]).astype(numpy_dtype(type)), type.scalar)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        return TensorHandle(convert(src.data, numpy_dtype(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        if rounding_mode == ir.ROUNDING_MODE.RTZ:
            if dst_type.scalar != tl.bfloat16:
                raise Unsupported(f"rounding towards zero to {dst_type.scalar} is not interpreted; round to nearest")
            bits = src.data.astype(np.float32).view(np.uint32) >> np.uint32(16)
            return TensorHandle(bits.astype(np.uint16).view(ml_dtypes.bfloat16), tl.bfloat16)
        return self.cast_impl(src, dst_type)

    # Arithmetic.

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., np.ndarray]) -> TensorHandle:
        left, right, kind = lhs.data, rhs.data, lhs.dtype.scalar
        if left.dtype == np.bool_ and right.dtype == np.bool_:
            # int1 wraps around; NumPy's booleans saturate.
            return TensorHandle(op(left.astype(np.int8), right.astype(np.int8)) & 1 == 1, kind)
        output = op(left, right)
        wanted = numpy_dtype(kind)
        return TensorHandle(output if output.dtype == wanted else output.astype(wanted), kind)

    def compare_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., np.ndarray]) -> TensorHandle:
        return TensorHandle(op(lhs.data, rhs.data), tl.int1)

    def create_ashr(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        left = lhs.data.view(np.dtype(f"int{8 * lhs.data.itemsize}"))
        return TensorHandle(np.right_shift(left, rhs.data.astype(left.dtype)), lhs.dtype.scalar)

    def create_umulhi(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        unsigned, bits = _UNSIGNED[lhs.data.itemsize], 8 * lhs.data.itemsize
        product = lhs.data.view(unsigned).astype(object) * rhs.data.view(unsigned).astype(object) >> bits
        return TensorHandle(product.astype(unsigned).view(lhs.data.dtype), lhs.dtype.scalar)

    def create_clampf(self, arg: TensorHandle, lo: TensorHandle, hi: TensorHandle, propagate_nans: Any) -> TensorHandle:
        if propagate_nans == ir.PROPAGATE_NAN.NONE:
            return self.binary_op(self.binary_op(arg, lo, np.fmax), hi, np.fmin)
        return self.binary_op(self.binary_op(arg, lo, np.maximum), hi, np.minimum)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        kind, dtype = z.dtype.scalar, z.data.dtype
        if dtype == np.float32:
            return TensorHandle(_fused_multiply_add(x.data, y.data, z.data), kind)
        wide = np.float64 if dtype == np.float16 else np.float32
        if dtype not in (np.float16, ml_dtypes.bfloat16):
            raise Unsupported(f"fma of {kind} is not interpreted; use float32")
        total = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
        return TensorHandle(total.astype(dtype), kind)

    def create_dot(
        self, a: TensorHandle, b: TensorHandle, d: TensorHandle, input_precision: Any, max_num_imprecise_acc: Any
    ) -> TensorHandle:
        left, right = a.data, b.data
        if a.dtype.scalar.is_floating() and a.dtype.scalar != tl.float64:
            if left.dtype == right.dtype == np.float32 and input_precision == ir.INPUT_PRECISION.TF32:
                left, right = _round_to_tf32(left), _round_to_tf32(right)
            left, right = left.astype(np.float32), right.astype(np.float32)
            product = np.matmul(left, right) + d.data.astype(np.float32)
        else:
            product = np.matmul(left, right, dtype=d.data.dtype) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    def create_dot_scaled(self, *arguments: Any) -> TensorHandle:
        lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, _, lhs_k_pack, rhs_k_pack, acc = arguments
        left = self._scaled(lhs, lhs_scale, lhs_format, -1 if lhs_k_pack else -2, -1)
        right = self._scaled(rhs, rhs_scale, rhs_format, -2 if rhs_k_pack else -1, -2)
        return TensorHandle(np.matmul(left, right) + acc.data, tl.float32)

    def _scaled(
        self, value: TensorHandle, scale: TensorHandle | None, format: Any, packed_axis: int, axis: int
    ) -> np.ndarray:
        """A microscaled operand in float32. scale: e8m0 `[rows, K / group]` for either side."""
        data = value.data
        if format == ir.ScaleDotElemTypeTY.E2M1:
            nibbles = np.stack([data & 15, data >> 4], axis=packed_axis % data.ndim + 1)
            shape = list(data.shape)
            shape[packed_axis] *= 2
            data = _E2M1[nibbles.reshape(shape)]
        data = data.astype(np.float32)
        if scale is None:
            return data
        exponent = scale.data.view(np.uint8).astype(np.int32)
        factor = np.where(exponent == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponent - 127))
        factor = np.repeat(factor, data.shape[axis] // factor.shape[-1], axis=-1)
        return data * (factor if axis == -1 else np.swapaxes(factor, -1, -2))

    def create_histogram(self, data: TensorHandle, bins: int, mask: TensorHandle | None) -> TensorHandle:
        # A GPU drops these; np.histogram counts values equal to `bins`.
        kept = (data.data >= 0) & (data.data < bins)
        if mask is not None:
            kept &= mask.data
        return TensorHandle(np.bincount(data.data[kept], minlength=bins).astype(np.int32), tl.int32)

    def create_splat(self, ret_ty: Any, arg: TensorHandle) -> TensorHandle:
        return TensorHandle(np.full(tuple(ret_ty.shape), arg.data, arg.data.dtype), arg.dtype.scalar)

    def create_expand_dims(self, arg: TensorHandle, axis: int) -> TensorHandle:
        return TensorHandle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    # Memory.

    def create_load(self, ptr: TensorHandle, *policy: Any) -> TensorHandle:
        return self.create_masked_load(ptr, None, None)

    def create_store(self, ptr: TensorHandle, value: TensorHandle, *policy: Any) -> None:
        self.create_masked_store(ptr, value, None)

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle | None, other: TensorHandle | None, *policy: Any, **options: Any
    ) -> TensorHandle:
        kind = ptrs.get_element_ty()
        dtype = numpy_dtype(kind)
        if mask is None:
            return TensorHandle(self._read(ptrs.data, dtype), kind)
        if other is None:
            # A masked lane without `other` is undefined: 0xFF bytes (NaN, -1) expose its use.
            output = np.full(ptrs.data.shape, -1, np.dtype(f"int{8 * dtype.itemsize}")).view(dtype)
        else:
            output = np.array(other.data, dtype)
        active = np.asarray(mask.data)
        addresses = ptrs.data[active]
        if addresses.size:
            output[active] = self._read(addresses, dtype)
        return TensorHandle(output, kind)

    def create_masked_store(
        self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle | None, *policy: Any, **options: Any
    ) -> None:
        dtype = numpy_dtype(ptrs.get_element_ty())
        addresses, data = ptrs.data, np.broadcast_to(value.data.astype(dtype, copy=False), ptrs.data.shape)
        if mask is not None:
            active = np.asarray(mask.data)
            addresses, data = addresses[active], data[active]
        if addresses.size:
            memory, index = _elements(addresses, dtype)
            memory[index] = data.view(memory.dtype)

    def _read(self, addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
        memory, index = _elements(addresses, dtype)
        return memory[index].view(dtype)

    # Triton's atomics lack types. Here lanes take turns.

    def create_atomic_rmw(
        self, operation: Any, ptr: TensorHandle, value: TensorHandle, mask: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        if value.data.dtype.kind in "iu":
            return super().create_atomic_rmw(operation, ptr, value, mask, sem, scope)
        if operation not in (ir.ATOMIC_OP.FADD, ir.ATOMIC_OP.XCHG):
            raise Unsupported(f"atomic {operation} of {value.dtype} is not interpreted; use add or xchg")
        before = np.zeros_like(value.data)
        for lane, cell in _cells(ptr.data, value.data.dtype):
            if mask.data[lane]:
                before[lane] = cell[0]
                cell[0] = value.data[lane] if operation == ir.ATOMIC_OP.XCHG else cell[0] + value.data[lane]
        return TensorHandle(before, value.dtype.scalar)

    def create_atomic_cas(
        self, ptr: TensorHandle, compare: TensorHandle, value: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        # Compare bits: -0.0 is not 0.0, and NaN may equal NaN.
        unsigned = _UNSIGNED[compare.data.itemsize]
        old, new = compare.data.view(unsigned), value.data.view(unsigned)
        before = np.zeros_like(old)
        for lane, cell in _cells(ptr.data, unsigned):
            before[lane] = cell[0]
            if cell[0] == old[lane]:
                cell[0] = new[lane]
        return TensorHandle(before.view(compare.data.dtype), compare.dtype.scalar)

    # GPU-only operations.

    def create_extern_elementwise(self, *arguments: Any) -> TensorHandle:
        raise Unsupported("external device functions are not interpreted; write the operation with triton.language")

    def create_inline_asm(self, *arguments: Any) -> TensorHandle:
        raise Unsupported("inline assembly is not interpreted; give the kernel a triton.language path")


def _cells(addresses: np.ndarray, dtype: np.dtype) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    for lane in np.ndindex(addresses.shape):
        address = int(addresses[lane])
        yield lane, np.asarray(_Memory(address, address, _UNSIGNED[dtype.itemsize])).view(dtype)


def _elements(addresses: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The memory between the addresses as unsigned integers, and each address's index."""
    lowest, highest = int(addresses.min()), int(addresses.max())
    memory = np.asarray(_Memory(lowest, highest, _UNSIGNED[dtype.itemsize]))
    return memory, (addresses - np.uint64(lowest)) // np.uint64(dtype.itemsize)


def _operation(method: str, op: Callable[..., np.ndarray]) -> Callable[..., TensorHandle]:
    return lambda self, lhs, rhs: getattr(self, method)(lhs, rhs, op)


def _constant(kind: Any) -> Callable[[Builder, float], TensorHandle]:
    dtype = numpy_dtype(kind)
    return lambda self, value: TensorHandle(convert(np.array([value], np.float32), dtype), kind)


for _suffix, _op in (("LE", np.less_equal), ("LT", np.less), ("GE", np.greater_equal), ("GT", np.greater)):
    for _prefix in ("icmpS", "icmpU", "fcmpO", "fcmpU"):
        setattr(Builder, f"create_{_prefix}{_suffix}", _operation("compare_op", _op))
for _suffix, _op in (("EQ", np.equal), ("NE", np.not_equal)):
    for _prefix in ("icmp", "fcmpO", "fcmpU"):
        setattr(Builder, f"create_{_prefix}{_suffix}", _operation("compare_op", _op))
for _name, _op in (("minnumf", np.fmin), ("maxnumf", np.fmax)):
    setattr(Builder, f"create_{_name}", _operation("binary_op", _op))
for _kind in (tl.bfloat16, tl.float8e5, tl.float8e5b16, tl.float8e4nv, tl.float8e4b8):
    setattr(Builder, f"get_{_kind.name}", _constant(_kind))
