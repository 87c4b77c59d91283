"""Turn x, w and scales into operands of our ops. fp8 has scales per tensor or expert, or as mxfp8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_TENSOR, MXFP4, MXFP8, QuantizedSpec, QuantizedTensor
from moe_core.formats.mx import GROUP
from moe_torch.compat.triton_kernels.numerics import InFlexData
from moe_torch.compat.triton_kernels.tensor import FP4, Tensor, bitwidth
from moe_torch.ops import MatmulOperands

_FP8 = torch.float8_e4m3fn


class Operand(NamedTuple):
    """An argument with its scales, and the names of all three."""

    name: str
    array: Any
    scale_name: str
    scale: Any
    flex_name: str
    flex: InFlexData


class Weight(NamedTuple):
    """w, perhaps quantised, stored as weight_layout. shape: logical, `[(E,) K, N]`."""

    array: Any
    weight_layout: str
    shape: tuple[int, ...]


def memory_of(name: str, array: Any) -> torch.Tensor:
    """The tensor behind a Tensor. Refuses foreign layouts."""
    if isinstance(array, Tensor):
        layout = array.storage.layout
        if layout is None or layout.name not in (None, "STRIDED"):
            raise Unsupported(
                f"{name} must be in plain memory, got {type(layout).__name__}: our kernels read no other; convert it "
                "with convert_layout(..., StridedLayout) or from_upstream"
            )
        if array.dtype == FP4:
            if array.data.dtype != torch.uint8:
                raise InvalidInput(
                    f"{name} must be bytes where its elements are FP4, got {array.data.dtype}; pack them"
                )
            if not _is_pairs(array):
                raise Unsupported(
                    f"{name} must have two FP4 elements in each byte of its memory, got {array.shape} in "
                    f"{[*array.data.shape]}: no kernel reads a part; slice the memory"
                )
        elif bitwidth(array.dtype) != 8 * array.data.itemsize:
            raise Unsupported(
                f"{name} must have elements of torch or FP4, got {array.dtype}: no kernel reads others; convert it"
            )
        elif any(isinstance(size, torch.Tensor) for size in array.shape) or list(array.shape) != [*array.data.shape]:
            raise Unsupported(
                f"{name} must have the sizes of its memory, got {array.shape} in {[*array.data.shape]}: no kernel "
                "reads a part; slice the memory"
            )
        array = array.data
    if not isinstance(array, torch.Tensor):
        raise InvalidInput(
            f"{name} must be a torch.Tensor or a Tensor, got {type(array).__name__}; wrap_torch_tensor it"
        )
    return array


def _is_pairs(array: Tensor) -> bool:
    """True if only one axis has twice the size of its memory."""
    if any(isinstance(size, torch.Tensor) for size in array.shape) or len(array.shape) != array.data.ndim:
        return False
    ratios = [(size, held) for size, held in zip(array.shape, array.data.shape, strict=True) if size != held]
    return not array.data.numel() or (len(ratios) == 1 and ratios[0][0] == 2 * ratios[0][1])


def weight_of(weight: Operand) -> Weight:
    """A matrix `[(E,) K, N]` with its scales, `out_in` if it is column-major."""
    name, flex = weight.name, weight.flex
    data = flex.reinterpret(memory_of(name, weight.array))
    if data.ndim not in (2, 3):
        raise InvalidInput(f"{name} must be [K, N] or [E, K, N], got {list(data.shape)}; reshape it")
    # A row of codes (K = 2) may have both strides 1.
    columns_first = data.stride(-2) == 1 and (data.stride(-1) != 1 or data.shape[-2] == 1)
    layout = "out_in" if columns_first else "in_out"
    held = data.mT if columns_first else data
    if weight.scale is not None:
        _require_one_scale(weight)
        quantized = _microscaled(weight, data, held, layout)
        *stack, rows, columns = data.shape
        return Weight(quantized, layout, (*stack, rows * (2 if quantized.format is MXFP4 else 1), columns))
    if data.dtype == _FP8:
        scales = _per_tensor(weight, data, (*data.shape[:-2], 1, 1))
        _require_dense(name, held)
        return Weight(QuantizedTensor(QuantizedSpec(FP8_TENSOR, layout), held, scales), layout, tuple(data.shape))
    _require_unscaled(weight, data)
    return Weight(held, layout, tuple(data.shape))


def rows_of(x: Operand, out_dtype: torch.dtype | None) -> torch.Tensor | QuantizedTensor:
    name, flex, scale = x.name, x.flex, x.scale
    data = flex.reinterpret(memory_of(name, x.array))
    if scale is None and data.dtype != _FP8:
        _require_unscaled(x, data)
        return data
    if data.ndim != 2:
        raise Unsupported(f"{name} must be [M, K] where it is quantised, got {list(data.shape)}; call it per matrix")
    if scale is not None:
        _require_one_scale(x)
    if out_dtype is None:
        raise Unsupported(
            f"precision_config.out_dtype must be bf16, fp16 or fp32 where {name} is quantised, got None, which means "
            f"its dtype, {data.dtype}: there are no such results"
            "; name one"
        )
    if scale is not None:
        return _microscaled(x, data.mT, data, "out_in", of_rows=True)
    _require_dense(name, data)
    return QuantizedTensor(QuantizedSpec(FP8_TENSOR), data, _per_tensor(x, data, (1, 1)))


def _require_one_scale(operand: Operand) -> None:
    if operand.flex.scale is not None:
        raise InvalidInput(
            f"{operand.flex_name}.scale must be None beside {operand.scale_name}, got both; keep one of them"
        )


def _microscaled(
    operand: Operand, data: torch.Tensor, held: torch.Tensor, layout: str, *, of_rows: bool = False
) -> QuantizedTensor:
    """Scales for 32 elements along the reduction. data: K before the last axis."""
    name = operand.name
    format = {torch.uint8: MXFP4, _FP8: MXFP8}.get(data.dtype)
    if format is None:
        raise Unsupported(
            f"{name} must be mxfp4 (bytes) or fp8 e4m3 where it has microscales, got {data.dtype}"
            "; quantise it to one of them"
        )
    if format is MXFP4 and layout != "out_in":
        raise Unsupported(
            f"{name} must have two mxfp4 codes of neighbours along K in a byte and K contiguous (stride(-2) == 1), got "
            f"strides {data.stride()}: codes packed along N have no kernel; pack along K"
        )
    scales = memory_of(operand.scale_name, operand.scale).view(torch.uint8)
    scales = scales.mT if not of_rows and layout == "out_in" else scales
    _require_dense(name, held)
    _require_dense(operand.scale_name, scales)
    missing = -held.shape[-1 if layout == "out_in" else -2] % (GROUP // (2 if format is MXFP4 else 1))
    return QuantizedTensor(QuantizedSpec(format, layout), _padded(held, layout, missing), scales)


def fitting(operands: MatmulOperands, weight: Weight, names: tuple[str, str], shape: Sequence[int]) -> MatmulOperands:
    """Pad w and x to the same K with zeros, and N = 0 to 2, as our ops refuse empty axes. shape: of x, columns last."""
    x, w, layout = operands.x, operands.weight, weight.weight_layout
    *_, k, n = weight.shape
    held = (x.shape[-1], w.shape[-1 if layout == "out_in" else -2])
    wanted = max(*held, 1)
    if n and held == (wanted, wanted):
        return operands
    columns = shape[-1] * (2 if isinstance(x, QuantizedTensor) and x.format.own_element.per_byte == 2 else 1)
    if columns != k:
        raise InvalidInput(
            f"{names[1]} must be [..., {columns}, N] for {names[0]} {list(shape)}, got {list(weight.shape)}; pass a "
            f"matrix with a row for every column of {names[0]}"
        )
    if not (k and n):
        # Quantised values have no meaning before a product.
        dtype = next((array.dtype for array in (x, w) if isinstance(array, torch.Tensor)), torch.bfloat16)
        x, w = (
            array if isinstance(array, torch.Tensor) else array.values.new_zeros(array.shape, dtype=dtype)
            for array in (x, w)
        )
    bias = None if operands.bias is None else _padded(operands.bias, "out_in", 0 if n else 2)
    x, w = _padded(x, "out_in", wanted - held[0]), _padded(w, layout, wanted - held[1], 0 if n else 2)
    return MatmulOperands(x, w, bias=bias)


def _padded(array: Any, layout: str, columns: int, rows: int = 0) -> Any:
    if not (columns or rows):
        return array
    if isinstance(array, QuantizedTensor):
        return replace(array, values=_padded(array.values, layout, columns, rows))
    sizes = (0, columns, 0, rows) if layout == "out_in" else (0, rows, 0, columns)
    sizes = sizes[: 2 * array.ndim]
    return pad(array.view(torch.uint8), sizes).view(_FP8) if array.dtype == _FP8 else pad(array, sizes)


def indexed(array: Any, index: int | None) -> Any:
    if isinstance(array, QuantizedTensor):
        return replace(array, values=array.values[index], scales=array.scales[index])
    return array[index]


def with_scales_of_rows(x: Operand) -> Operand:
    """Reshape x `[B, M, K]` and its scales to `[B * M, ...]`."""
    array = memory_of(x.name, x.array)
    batch, rows, columns = array.shape
    x = x._replace(array=array.reshape(batch * rows, columns))
    if x.scale is None:
        return x
    scales = memory_of(x.scale_name, x.scale)
    columns *= 2 if array.dtype == torch.uint8 else 1
    wanted = (batch, rows, -(-columns // GROUP))
    if tuple(scales.shape) != wanted:
        raise InvalidInput(
            f"{x.scale_name} must be {list(wanted)}, one for {GROUP} columns of {x.name} {list(array.shape)}, got "
            f"{list(scales.shape)}; pass that of downcast_to_mxfp"
        )
    return x._replace(scale=scales.reshape(batch * rows, wanted[-1]))


def _per_tensor(operand: Operand, data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    scale = operand.flex.scale
    if scale is None:
        return torch.ones(shape, device=data.device)
    if scale.numel() not in (1, shape[0]):
        raise InvalidInput(
            f"{operand.flex_name}.scale must have 1 or {shape[0]} elements, got {list(scale.shape)}; pass one each"
        )
    return scale.to(torch.float32).reshape(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()


def _require_unscaled(operand: Operand, data: torch.Tensor) -> None:
    name, flex = operand.name, operand.flex
    if data.dtype == torch.uint8:
        raise InvalidInput(
            f"{name} must have its scales in {operand.scale_name} where it is bytes, got None; pass them"
        )
    if data.dtype == torch.float8_e5m2:
        raise Unsupported(f"{name} must be e4m3 where it is fp8, got e5m2, which has no kernel; convert it")
    if flex.scale is not None or flex.dtype not in (None, data.dtype):
        raise Unsupported(f"{name} must have no flex data where it is {data.dtype}; multiply it, or use out_alpha")


def _require_dense(name: str, held: torch.Tensor) -> None:
    if not held.is_contiguous():
        raise InvalidInput(
            f"{name} must be dense, values and scales of one tensor in the same order of axes, got strides "
            f"{held.stride()}; write x.mT.contiguous().mT for memory with K contiguous"
        )
