"""Tensors of Triton 3.8's `triton_kernels`: `tensor`, and `tensor_details.dtype`, `.bitmatrix`, `.ragged_tensor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_torch import ops
from moe_torch.bridge.options import require_instance
from moe_torch.compat.triton_kernels.tensor import BIT, FP4, FloatType, IntegerType, Storage, Tensor, bits_of
from moe_torch.compat.triton_kernels_38.layout import Layout, StridedLayout
from moe_torch.modular.routing_data import BLOCK_MS, expert_data, most_tiles, starts

__all__ = [
    "BF16", "BIT", "FP4", "FP8_E4M3FN", "FP8_E4M3FNUZ", "FP8_E5M2", "FP16", "FP32", "FP64", "INT16", "INT32", "INT64",
    "UINT8", "BitmatrixMetadata", "DataType", "FloatType", "IntegerType", "RaggedTensorMetadata", "SparseMatrix",
    "Storage", "StridedLayout", "Tensor", "convert_layout", "dtype_to_torch_dtype", "make_bitmatrix_metadata",
    "make_bitmatrix_metadata_torch", "make_ragged_tensor_metadata", "make_ragged_tensor_metadata_torch",
    "torch_dtype_to_dtype", "wrap_torch_tensor",
]  # fmt: skip

UINT8 = IntegerType(8)
INT16, INT32, INT64 = (IntegerType(bits, is_signed=True) for bits in (16, 32, 64))
FP8_E4M3FN, FP8_E5M2, BF16, FP16, FP32, FP64 = (
    FloatType(*bits, True) for bits in ((4, 3), (5, 2), (8, 7), (5, 10), (8, 23), (11, 52))
)
FP8_E4M3FNUZ = FloatType(4, 3, True, unsigned_zero=True)
DataType: TypeAlias = IntegerType | FloatType


@dataclass(eq=False)
class BitmatrixMetadata:
    """col_sum int32 `[E]`: choices of each column. Slot `t * K + k` is choice k of row t, and -1 is none.

    col_sorted_indx int32 `[T * K]`: slots, sorted stably by column, then -1. row_sorted_indx: the place of each slot.
    ids [[2, 0], [0, -1]], E = 3: col_sum [2, 0, 1], col_sorted_indx [1, 2, 0, -1], row_sorted_indx [2, 0, 1, -1].
    """

    col_sum: torch.Tensor
    col_sorted_indx: torch.Tensor
    row_sorted_indx: torch.Tensor


def make_bitmatrix_metadata(nonzero_indx: torch.Tensor, bitmatrix: Tensor) -> BitmatrixMetadata:
    """The metadata of columns nonzero_indx `[T, K]`. Columns without their bit in bitmatrix `[T, E]` do not count."""
    words = bitmatrix.data
    if nonzero_indx.ndim != 2 or words.ndim != 2 or nonzero_indx.shape[0] != words.shape[0]:
        raise InvalidInput(
            f"nonzero_indx must be [T, K] for a bitmatrix [T, E], got {list(nonzero_indx.shape)} and memory "
            f"{list(words.shape)}; pass one row per token"
        )
    ids, num_columns = nonzero_indx.to(torch.int32), bitmatrix.shape[1]
    exists = (ids < num_columns) & bits_of(words, ids)
    exists &= (torch.arange(ids.shape[0], device=ids.device) < bitmatrix.shape[0])[:, None]
    layout = ops.make_layout(torch.where(exists, ids, -1), num_columns)
    return BitmatrixMetadata(layout.group_sizes, layout.slot_of_row, layout.row_of_slot)


make_bitmatrix_metadata_torch = make_bitmatrix_metadata


class _ByHeight:
    """A field that holds one row per height of tiles, stacked when it is read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, metadata: Any, owner: type) -> Any:
        if metadata is None:
            raise AttributeError(self._name)
        held = vars(metadata)[self._name]
        if isinstance(held, Mapping):
            held = vars(metadata)[self._name] = torch.stack([held[height] for height in BLOCK_MS])
        return held

    def __set__(self, metadata: Any, value: Any) -> None:
        vars(metadata)[self._name] = value


@dataclass(eq=False)
class RaggedTensorMetadata:
    """slice_sizes int32 `[E]` and slice_offs int32 `[E + 1]`, the first row of each slice.

    By tile height (16 to 128): block_offs_data `[4, E + 1]`, tiles before each slice, and block_schedule_data
    `[4, tiles]`, `slice + (tile of the slice << 16)`, -1 = idle. slice_sizes_divisibility None: slice_offs are the
    running sums of the sizes. Else slices may lie apart. expected_slice_size has no effect.
    """

    slice_sizes: torch.Tensor
    slice_offs: torch.Tensor
    block_offs_data: Any = _ByHeight()
    block_schedule_data: Any = _ByHeight()
    expected_slice_size: int | None = None
    slice_sizes_divisibility: int | None = None

    @property
    def n_slices(self) -> int:
        return self.slice_sizes.shape[0]

    def block_offs(self, block_size: int) -> torch.Tensor:
        return self.block_offs_data[BLOCK_MS.index(block_size)]

    def block_schedule(self, block_size: int) -> torch.Tensor:
        return self.block_schedule_data[BLOCK_MS.index(block_size)]

    @staticmethod
    def n_blocks(n_slices: int, n_total_rows: int, block_size: int) -> int:
        return most_tiles(n_slices, n_total_rows, block_size)

    @staticmethod
    def max_n_blocks(n_slices: int, n_total_rows: int) -> int:
        return most_tiles(n_slices, n_total_rows, min(BLOCK_MS))

    @staticmethod
    def block_sizes_log2() -> range:
        return range(4, 8)

    @staticmethod
    def block_sizes() -> list[int]:
        return list(BLOCK_MS)


def make_ragged_tensor_metadata(slice_sizes: torch.Tensor, n_total_rows: int) -> RaggedTensorMetadata:
    """The metadata of adjacent slices. slice_sizes int32 `[E]`, with a sum of at most n_total_rows."""
    if slice_sizes.ndim != 1 or slice_sizes.dtype != torch.int32:
        raise InvalidInput(
            f"slice_sizes must be int32 [E], got {slice_sizes.dtype} {list(slice_sizes.shape)}; convert it"
        )
    offsets = starts(slice_sizes)
    data = expert_data(slice_sizes, offsets, n_total_rows)
    return RaggedTensorMetadata(slice_sizes, offsets, data.token_offs_pad, data.block_pid_map)


make_ragged_tensor_metadata_torch = make_ragged_tensor_metadata


_TYPES = {
    torch.uint8: UINT8, torch.float8_e4m3fn: FP8_E4M3FN, torch.float8_e4m3fnuz: FP8_E4M3FNUZ,
    torch.float8_e5m2: FP8_E5M2, torch.float16: FP16, torch.bfloat16: BF16, torch.float32: FP32, torch.float64: FP64,
    torch.int16: INT16, torch.int32: INT32, torch.int64: INT64,
}  # fmt: skip
_TORCH_TYPES = {FP4: torch.uint8, **{ours: theirs for theirs, ours in _TYPES.items()}}


@dataclass(eq=False)
class SparseMatrix:
    """Columns indx int32 and values vals, both `[T, K]`, and the bits mask `[T, E]` of the columns."""

    indx: torch.Tensor
    vals: torch.Tensor
    mask: Tensor
    mask_metadata: BitmatrixMetadata = field(init=False)

    def __post_init__(self) -> None:
        self.mask_metadata = make_bitmatrix_metadata(self.indx, self.mask)


def torch_dtype_to_dtype(dtype: torch.dtype | DataType) -> DataType:
    if isinstance(dtype, DataType):
        return dtype
    if dtype not in _TYPES:
        raise InvalidInput(f"dtype must be one of {', '.join(map(str, _TYPES))}, got {dtype}; convert the tensor")
    return _TYPES[dtype]


def dtype_to_torch_dtype(dtype: torch.dtype | DataType) -> torch.dtype:
    return _TORCH_TYPES[dtype] if isinstance(dtype, DataType) else dtype


def wrap_torch_tensor(
    torch_tensor: torch.Tensor,
    dtype: torch.dtype | DataType | None = None,
    shape: Any = None,
    shape_max: Any = None,
    layout: Layout | None = None,
) -> Tensor:
    """Read memory as elements of dtype. Two of FP4 share a byte, along the axis with stride 1.

    shape: integers, or integer tensors of one element. None: the memory's. shape_max: upper bounds. None: the shape.
    """
    kind = torch_dtype_to_dtype(torch_tensor.dtype if dtype is None else dtype)
    strides, rank = torch_tensor.stride(), torch_tensor.ndim
    if shape is None:
        shape = list(torch_tensor.shape)
        if kind == FP4:
            if 1 not in strides:
                raise InvalidInput(f"torch_tensor must have an axis of stride 1, got {strides}; make it contiguous")
            shape[strides.index(1)] *= 8 * torch_tensor.itemsize // kind.bitwidth
    if layout is None:
        layout = StridedLayout((strides.index(1) if 1 in strides else rank - 1) - rank)
    return Tensor(Storage(torch_tensor, layout), dtype=kind, shape=list(shape), shape_max=shape_max)


def convert_layout(tensor: Tensor, layout: Layout, **layout_transformation_kwargs: Any) -> Tensor:
    """Move the axis of stride 1. Raises Unsupported for layouts but StridedLayout, and for further options."""
    require_instance("tensor", tensor, Tensor)
    require_instance("layout", layout, StridedLayout)
    assert isinstance(layout, StridedLayout)
    if layout_transformation_kwargs:
        names = ", ".join(layout_transformation_kwargs)
        raise Unsupported(f"{names} are no options of StridedLayout, the one layout that our kernels read; drop them")
    data, order = tensor.data, layout.order(tensor.ndim)
    if data.ndim != tensor.ndim:
        raise InvalidInput(f"tensor must be in plain memory, got {tensor.shape} in {list(data.shape)}; unpack it")
    major = order[0]
    packed = _packed_axis(tensor) if tensor.dtype == FP4 else major
    if packed == major and data.stride(major) == 1 and (data.shape[major] > 1 or data.is_contiguous()):
        return tensor
    if packed != major:
        codes = torch.stack((data & 15, data >> 4), -1).movedim(-1, packed + 1).flatten(packed, packed + 1)
        if codes.shape[major] % 2:
            raise InvalidInput(
                f"tensor must have an even axis {major} for two codes to a byte, got {tensor.shape}; pad it"
            )
        low, high = codes.unflatten(major, (-1, 2)).unbind(major + 1)
        data = low | (high << 4)
    memory = data.permute(*reversed(order)).contiguous()
    back = [list(reversed(order)).index(axis) for axis in range(tensor.ndim)]
    return Tensor(Storage(memory.permute(*back), layout), tensor.dtype, list(tensor.shape), tensor.shape_max)


def _packed_axis(tensor: Tensor) -> int:
    """The axis along which two codes share a byte."""
    sizes = zip(tensor.shape, tensor.data.shape, strict=True)
    return next((axis for axis, (size, held) in enumerate(sizes) if size != held), tensor.ndim - 1)
