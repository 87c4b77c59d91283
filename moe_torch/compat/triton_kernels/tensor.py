"""Tensors with element types that torch lacks, and matrices of bits. Mutable, as ported code needs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from moe_core.base.checks import require_at_least
from moe_core.errors import InvalidInput
from moe_torch.bridge.options import require_instance
from moe_torch.compat.triton_kernels.tensor_details.layout import Layout, StridedLayout

_WORD_BITS = 32


@dataclass(eq=False)
class Storage:
    """Memory and its layout. None: torch's."""

    data: torch.Tensor
    layout: Layout | None = None

    def __post_init__(self) -> None:
        require_instance("data", self.data, torch.Tensor)
        if self.layout is None:
            self.layout = StridedLayout(self.data.shape)

    @property
    def device(self) -> torch.device:
        return self.data.device


@dataclass(frozen=True)
class IntegerType:
    bitwidth: int
    is_signed: bool = False


@dataclass(frozen=True)
class FloatType:
    bitwidth_exponent: int
    bitwidth_mantissa: int
    is_signed: bool
    unsigned_zero: bool = False

    @property
    def bitwidth(self) -> int:
        return int(self.is_signed) + self.bitwidth_exponent + self.bitwidth_mantissa


BIT = IntegerType(1)
FP4 = FloatType(bitwidth_exponent=2, bitwidth_mantissa=1, is_signed=True)

ElementType = IntegerType | FloatType | torch.dtype


def bitwidth(type: ElementType) -> int:
    return type.itemsize * 8 if isinstance(type, torch.dtype) else type.bitwidth


@dataclass(eq=False)
class Tensor:
    """A torch tensor, or a Storage, with its element type and its logical shape.

    shape: integers, or integer tensors of one element for sizes on the device. dtype and shape None: the memory's.
    shape_max: upper bounds. None: the shape.
    """

    storage: Any
    dtype: Any = None
    shape: Any = None
    shape_max: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.storage, torch.Tensor):
            self.storage = Storage(self.storage)
        require_instance("storage", self.storage, Storage)
        if self.dtype is None:
            self.dtype = self.storage.data.dtype
        if self.shape is None:
            if bitwidth(self.dtype) < 8:
                raise InvalidInput(
                    f"shape must be given for elements of {bitwidth(self.dtype)} bits, got None; several lie in a byte"
                )
            self.shape = list(self.storage.data.shape)
        for size in self.shape:
            if not isinstance(size, int) and not (isinstance(size, torch.Tensor) and size.numel() == 1):
                raise InvalidInput(f"shape must hold integers or tensors of one element, got {size!r}; pass such sizes")
        bounds = [None] * len(self.shape) if self.shape_max is None else self.shape_max
        self.shape_max = [size if bound is None else bound for size, bound in zip(self.shape, bounds, strict=True)]
        if not all(isinstance(bound, int) for bound in self.shape_max):
            raise InvalidInput(
                f"shape_max must bound every size of {self.shape}, got {bounds}; pass integers for tensors"
            )

    @property
    def data(self) -> torch.Tensor:
        return self.storage.data

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def stride(self, i: int | None = None) -> Any:
        return self.data.stride() if i is None else self.data.stride(i)

    def data_ptr(self) -> int:
        return self.data.data_ptr()

    def numel(self) -> int:
        return self.data.numel()

    def element_size(self) -> int:
        return bitwidth(self.dtype) // 8

    def dim(self) -> int:
        return self.ndim

    def size(self, i: int | None = None) -> Any:
        return self.shape if i is None else self.shape[i]


class Bitmatrix(Tensor):
    """Memory uint32 `[T, ceil(E / 32)]`: bit `e % 32` of word `e // 32` is set if the row chose e."""

    def __init__(self, storage: Any, shape: Any, shape_max: Any = None, scratchpad: torch.Tensor | None = None) -> None:
        super().__init__(storage, dtype=BIT, shape=shape, shape_max=shape_max)
        if self.data.ndim != 2 or self.data.dtype not in (torch.uint32, torch.int32):
            raise InvalidInput(
                f"storage must be uint32 [T, ceil(E / 32)], got {self.data.dtype} {list(self.data.shape)}; pack them"
            )
        self.scratchpad = scratchpad

    def sum(self, partials_block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the ones: int32 (of each column, of each column per block of rows `[blocks, columns]`)."""
        require_at_least("partials_block_size", partials_block_size, 1)
        rows, columns = self.data.shape[0], self.shape[1]
        bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=self.device)
        ones = ((self.data.view(torch.int32)[:, :, None] >> bits) & 1).reshape(rows, -1)[:, :columns]
        ones = ones * (torch.arange(rows, device=self.device) < self.shape[0])[:, None]
        ones = torch.nn.functional.pad(ones, (0, 0, 0, -rows % partials_block_size))
        partials = ones.reshape(-1, partials_block_size, columns).sum(1, dtype=torch.int32)
        return partials.sum(0, dtype=torch.int32), partials


def bits_of(words: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """bool `[T, K]`: the bits of columns `[T, K]` in words of 32 bits, integers `[T, W]`. False outside [0, 32 W)."""
    inside = (columns >= 0) & (columns < _WORD_BITS * words.shape[1])
    columns = torch.where(inside, columns, 0).int()
    if not words.shape[1]:
        return inside
    chosen = (words.view(torch.int32) if words.dtype == torch.uint32 else words).gather(
        1, (columns // _WORD_BITS).long()
    )
    # Shifts keep the sign, but only the lowest bit is read.
    return ((chosen >> (columns % _WORD_BITS)) & 1).bool() & inside


def get_layout(tensor: torch.Tensor | Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.storage.layout if isinstance(tensor, Tensor) else StridedLayout


def wrap_torch_tensor(torch_tensor: torch.Tensor, dtype: ElementType | None = None) -> Tensor:
    """Read memory as elements of dtype. Several may share one of torch's, along the axis with stride 1."""
    dtype = torch_tensor.dtype if dtype is None else dtype
    shape, strides = list(torch_tensor.shape), torch_tensor.stride()
    if 1 not in strides:
        raise InvalidInput(f"torch_tensor must have an axis of stride 1, got strides {strides}; make it contiguous")
    shape[strides.index(1)] *= bitwidth(torch_tensor.dtype) // bitwidth(dtype)
    return Tensor(Storage(torch_tensor), dtype=dtype, shape=shape)


def convert_layout(tensor: Tensor, layout_cls: type[Layout], **layout_kwargs: Any) -> Tensor:
    """Convert to another layout. Raises Unsupported for layouts that our kernels do not read."""
    require_instance("tensor", tensor, Tensor)
    data = tensor.storage.layout.unswizzle_data(tensor.data)
    layout = layout_cls(data.shape, **layout_kwargs)
    others = {field.name: getattr(tensor, field.name) for field in fields(tensor) if field.name != "storage"}
    return Tensor(Storage(layout.swizzle_data(data), layout), **others)
