"""Cached checks and conversions of Triton's language, the main cost of small operations. Imports Triton."""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic

_ONE = tl.constexpr(1)
_NO_AXES = tl.tuple([])
_block_types: dict[tuple[Any, ...], Any] = {}
_pairs: dict[tuple[Any, ...], tuple[Any, Any]] = {}
# Taken on import, so that `install` can run again after an interrupt.
_build_block_type = tl.block_type.__init__
#: Every constant of a kernel adds kinds of operands.
_MOST = 4096


class _Text(str):
    @property
    def value(self) -> str:
        return str(self)


def _block_type(element_type: Any, sizes: tuple[int, ...]) -> Any:
    key = (element_type.name, *sizes)
    block_type = _block_types.get(key)
    if block_type is None:
        block_type: Any = tl.block_type.__new__(tl.block_type)
        _build_block_type(block_type, element_type, list(sizes))
        block_type.sizes = sizes
        block_type.tensor_shape = tl.tuple([tl.constexpr(size) for size in sizes])
        block_type.tensor_numel = tl.constexpr(block_type.numel)
        _block_types[key] = block_type
    return block_type


def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
    values = shape.values if isinstance(shape, tl.tuple) else shape
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in values])
    self.__dict__.update(_block_type(element_ty, sizes).__dict__)


def with_element_type(self: Any, scalar_ty: Any) -> Any:
    return _block_type(scalar_ty, self.sizes)


def tensor_init(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    block = type.is_block()
    self.shape = type.tensor_shape if block else _NO_AXES
    self.numel = type.tensor_numel if block else _ONE


def _sizes(value: Any) -> tuple[int, ...]:
    return value.type.sizes if value.type.is_block() else ()


@functools.lru_cache(_MOST)
def _common_sizes(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    if left and right and len(left) != len(right):
        return None
    pairs = list(zip(left or right, right or left, strict=True))
    fits = all(one == other or one == 1 or other == 1 for one, other in pairs)
    return tuple(max(pair) for pair in pairs) if fits else None


def _kind(operand: Any) -> Any:
    """The key of an operation's type: an element type or a Python number (-0.0 is not 0.0)."""
    kind = type(operand)
    return operand.dtype.name if kind is tl.tensor else (kind, operand if kind is int else repr(operand))


class Semantic(TritonSemantic):
    """Fast conversion and broadcasting of operands."""

    def binary_op_type_checking_impl(
        self,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        """Operands of one element type by Triton's rules, broadcast later. The first has the result's sizes."""
        rules = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        key = (_kind(lhs), _kind(rhs), rules)
        pair = _pairs.get(key)
        if pair is None:
            pair = super().binary_op_type_checking_impl(self._one(lhs), self._one(rhs), *rules)
            if len(_pairs) >= _MOST:
                _pairs.clear()
            _pairs[key] = pair
        left, right = pair
        if type(lhs) is tl.tensor:
            left = lhs if lhs.dtype is left.dtype else self.cast(lhs, left.dtype)
        if type(rhs) is tl.tensor:
            right = rhs if rhs.dtype is right.dtype else self.cast(rhs, right.dtype)
        wide, other = _sizes(left), _sizes(right)
        if right.dtype.is_ptr():
            return self.broadcast_impl_value(left, right)
        if wide == other or not other:
            return left, right
        sizes = _common_sizes(wide, other)
        if sizes is None:
            return self.broadcast_impl_value(left, right)
        return left if sizes == wide else tl.tensor(left.handle, _block_type(left.dtype, sizes)), right

    def _one(self, operand: Any) -> Any:
        if type(operand) is not tl.tensor:
            return operand
        return tl.tensor(self.builder.get_null_value(operand.dtype), operand.dtype)

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        if input.dtype.name == dst_ty.scalar.name:
            return input
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def dot_scaled(
        self, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any, *rest: Any
    ) -> Any:
        # Triton 3.6 needs constants, which a kernel run as Python cannot pass.
        formats = _Text(getattr(lhs_format, "value", lhs_format)), _Text(getattr(rhs_format, "value", rhs_format))
        return super().dot_scaled(lhs, lhs_scale, formats[0], rhs, rhs_scale, formats[1], *rest)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        left, right = _sizes(lhs), _sizes(rhs)
        if left == right:
            return lhs, rhs
        sizes = _common_sizes(left, right)
        if sizes is None:
            return super().broadcast_impl_value(lhs, rhs)
        return self._broadcast(lhs, left, sizes), self._broadcast(rhs, right, sizes)

    def _broadcast(self, value: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
        if old == new:
            return value
        kind, handle = _block_type(value.dtype, new), value.handle
        wide = self.builder.create_broadcast(handle, new) if old else self.builder.create_splat(kind, handle)
        return tl.tensor(wide, kind)
