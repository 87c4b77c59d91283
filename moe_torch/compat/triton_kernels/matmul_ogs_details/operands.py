"""Turn x, w, their scales and a routing into operands of our ops.

Bytes of w are mxfp4 codes, two along the reduction. fp8 has scales per tensor or expert, or of mxfp8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_TENSOR, MXFP4, MXFP8, QuantizedSpec, QuantizedTensor
from moe_core.formats.mx import GROUP
from moe_torch.bridge.options import layout_spec, require_instance
from moe_torch.compat.triton_kernels.matmul_ogs_details.options import PrecisionConfig
from moe_torch.compat.triton_kernels.numerics import InFlexData
from moe_torch.compat.triton_kernels.tensor import FP4, Tensor
from moe_torch.modular.routing_data import GatherIndx, RoutingData, ScatterIndx, group_starts, layout_of
from moe_torch.ops import MatmulOperands, RaggedLayout

_FP8 = torch.float8_e4m3fn


class Weight(NamedTuple):
    """w, perhaps quantised, stored as weight_layout. shape: logical, `[(E,) K, N]`."""

    array: Any
    weight_layout: str
    shape: tuple[int, ...]


def memory_of(name: str, array: Any) -> torch.Tensor:
    """The tensor behind a Tensor. Refuses foreign layouts."""
    if isinstance(array, Tensor):
        layout = array.storage.layout
        if layout is None or layout.name is not None:
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
        elif not isinstance(array.dtype, torch.dtype):
            raise Unsupported(f"{name} must have elements of torch or FP4, got {array.dtype}: no kernel reads others")
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


def weight_of(w: Any, precision: PrecisionConfig) -> Weight:
    """w `[(E,) K, N]` with its scales, `out_in` if it is column-major."""
    flex = precision.flex_ctx.rhs_data
    data = flex.reinterpret(memory_of("w", w))
    if data.ndim not in (2, 3):
        raise InvalidInput(f"w must be [K, N] or [E, K, N], got {list(data.shape)}; reshape it")
    # A row of codes (K = 2) may have both strides 1.
    columns_first = data.stride(-2) == 1 and (data.stride(-1) != 1 or data.shape[-2] == 1)
    layout = "out_in" if columns_first else "in_out"
    held = data.mT if columns_first else data
    if precision.weight_scale is not None:
        if flex.scale is not None:
            raise InvalidInput("flex_ctx.rhs_data.scale must be None beside weight_scale, got both; keep one of them")
        quantized = _microscaled("w", data, held, precision.weight_scale, layout)
        *stack, rows, columns = data.shape
        return Weight(quantized, layout, (*stack, rows * (2 if quantized.format is MXFP4 else 1), columns))
    if data.dtype == _FP8:
        scales = _per_tensor("flex_ctx.rhs_data.scale", flex, data, (*data.shape[:-2], 1, 1))
        _require_dense("w", held)
        return Weight(QuantizedTensor(QuantizedSpec(FP8_TENSOR, layout), held, scales), layout, tuple(data.shape))
    _require_unscaled("w", data, flex, "weight_scale")
    return Weight(held, layout, tuple(data.shape))


def rows_of(x: Any, precision: PrecisionConfig) -> torch.Tensor | QuantizedTensor:
    flex, scale = precision.flex_ctx.lhs_data, precision.act_scale
    data = flex.reinterpret(memory_of("x", x))
    if scale is None and data.dtype != _FP8:
        _require_unscaled("x", data, flex, "act_scale")
        return data
    if data.ndim != 2:
        raise Unsupported(f"x must be [M, K] where it is quantised, got {list(data.shape)}; call matmul_ogs per matrix")
    if scale is not None and flex.scale is not None:
        raise InvalidInput("flex_ctx.lhs_data.scale must be None beside act_scale, got both; keep one of them")
    if precision.out_dtype is None:
        raise Unsupported(
            "precision_config.out_dtype must be bf16, fp16 or fp32 where x is quantised, got None, which means the "
            f"dtype of x, {data.dtype}: there are no such results"
        )
    if scale is not None:
        return _microscaled("x", data.mT, data, scale, "out_in")
    _require_dense("x", data)
    return QuantizedTensor(QuantizedSpec(FP8_TENSOR), data, _per_tensor("flex_ctx.lhs_data.scale", flex, data, (1, 1)))


def _microscaled(name: str, data: torch.Tensor, held: torch.Tensor, scale: Any, layout: str) -> QuantizedTensor:
    """Scales for 32 elements along the reduction. data: K before the last axis."""
    format = {torch.uint8: MXFP4, _FP8: MXFP8}.get(data.dtype)
    if format is None:
        raise Unsupported(f"{name} must be mxfp4 (bytes) or fp8 e4m3 where it has microscales, got {data.dtype}")
    if format is MXFP4 and name == "x":
        raise Unsupported("x must be fp8 e4m3 with act_scale, got bytes: activations in mxfp4 come from quantize_rows")
    if format is MXFP4 and layout != "out_in":
        raise Unsupported(
            f"{name} must have two mxfp4 codes of neighbours along K in a byte and K contiguous (stride(-2) == 1), got "
            f"strides {data.stride()}: codes packed along N have no kernel; pack along K"
        )
    option = "weight_scale" if name == "w" else "act_scale"
    scales = memory_of(option, scale).view(torch.uint8)
    scales = scales.mT if name == "w" and layout == "out_in" else scales
    _require_dense(name, held)
    _require_dense(option, scales)
    missing = -held.shape[-1 if layout == "out_in" else -2] % (GROUP // (2 if format is MXFP4 else 1))
    return QuantizedTensor(QuantizedSpec(format, layout), _padded(held, layout, missing), scales)


def fitting(operands: MatmulOperands, weight: Weight, shape: Sequence[int]) -> MatmulOperands:
    """Pad w and x to the same K with zeros, and N = 0 to 2, because our ops refuse empty axes."""
    x, w, layout = operands.x, operands.weight, weight.weight_layout
    *_, k, n = weight.shape
    held = (x.shape[-1], w.shape[-1 if layout == "out_in" else -2])
    wanted = max(*held, 1)
    if n and held == (wanted, wanted):
        return operands
    if shape[-1] != k:
        raise InvalidInput(
            f"w must be [..., {shape[-1]}, N] for x {list(shape)}, got {list(weight.shape)}; pass a matrix with a row "
            "for every column of x"
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


def with_scales_of_rows(precision: PrecisionConfig, shape: Sequence[int]) -> PrecisionConfig:
    """Reshape scales of x `[B, M, K]` to `[B * M, K / 32]`."""
    if precision.act_scale is None:
        return precision
    scales, (batch, rows, columns) = memory_of("act_scale", precision.act_scale), shape
    wanted = (batch, rows, -(-columns // GROUP))
    if tuple(scales.shape) != wanted:
        raise InvalidInput(
            f"act_scale must be {list(wanted)}, one for {GROUP} columns of x {list(shape)}, got {list(scales.shape)}; "
            "pass that of downcast_to_mxfp"
        )
    return replace(precision, act_scale=scales.reshape(batch * rows, wanted[-1]))


def _per_tensor(name: str, flex: InFlexData, data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    scale = flex.scale
    if scale is None:
        return torch.ones(shape, device=data.device)
    if scale.numel() not in (1, shape[0]):
        raise InvalidInput(f"{name} must have 1 or {shape[0]} elements, got {list(scale.shape)}; pass one per tensor")
    return scale.to(torch.float32).reshape(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()


def _require_unscaled(name: str, data: torch.Tensor, flex: InFlexData, option: str) -> None:
    if data.dtype == torch.uint8:
        raise InvalidInput(f"{name} must have its scales in precision_config.{option} where it is bytes, got None")
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


@dataclass(frozen=True, eq=False)
class Rows:
    """layout: None: of one matrix. gather: `token` or `row`. count: number of rows."""

    layout: RaggedLayout | None
    gather: str
    count: int

    def leads_back(self, scatter: ScatterIndx) -> bool:
        """True if the scatter's rows of slots are the layout's."""
        return self.layout is not None and scatter.src_indx is self.layout.row_of_slot

    def by_slot(self, factors: torch.Tensor) -> torch.Tensor:
        """fp32 factors of rows `[count]` by slot. A slot without a row gets any factor."""
        if self.layout is None or self.layout.slot_of_row is self.layout.row_of_slot:
            return factors
        return factors[self.layout.row_of_slot]

    def expert_of_row(self) -> torch.Tensor | None:
        """int32 `[count]`, the last expert for rows without one."""
        if self.layout is None:
            return None
        ends = self.layout.group_start[1:]
        rows = torch.arange(self.count, dtype=torch.int32, device=ends.device)
        return torch.searchsorted(ends, rows, right=True, out_int32=True).clamp(max=ends.shape[0] - 1)

    def without_absent(self, y: torch.Tensor) -> torch.Tensor:
        """y `[count, N]` with exact zeros in rows without an expert."""
        if self.layout is None:
            return y
        exists = torch.arange(self.count, device=y.device) < self.layout.group_start[-1]
        return torch.where(exists[:, None], y, 0)


def batched_rows(batch: int, rows: int, device: torch.device) -> Rows:
    integers = {"dtype": torch.int32, "device": device}
    slots = torch.arange(batch * rows, **integers)
    layout = RaggedLayout(
        layout_spec(batch * rows, 1, batch, 1, None),
        torch.full((batch,), rows, **integers),
        torch.arange(batch + 1, **integers) * rows,
        slots,
        slots,
        torch.zeros(1, **integers),
    )
    return Rows(layout, "row", batch * rows)


def ragged_rows(
    routing_data: RoutingData, gather: GatherIndx | None, scatter: ScatterIndx | None, num_rows: int
) -> Rows:
    """The rows of a routing. num_rows: of x, the last resort."""
    top_k = 1
    if gather is not None:
        slot_of_row, row_of_slot, top_k = gather.src_indx, gather.dst_indx, routing_data.n_expts_act
    elif scatter is not None:
        slot_of_row, row_of_slot = scatter.dst_indx, scatter.src_indx
    else:
        group_start = group_starts(routing_data)
        rows = torch.arange(num_rows, dtype=torch.int32, device=group_start.device)
        slot_of_row = row_of_slot = torch.where(rows < group_start[-1], rows, -1)
    layout = layout_of(routing_data, slot_of_row, row_of_slot, top_k)
    return Rows(layout, "row" if gather is None else "token", slot_of_row.shape[0])


def scattered(scatter: ScatterIndx, top_k: int) -> RaggedLayout:
    """The part of a layout that `ops.reduce` reads: the row of each slot."""
    row_of_slot = scatter.src_indx
    if row_of_slot.shape[0] % top_k:
        raise InvalidInput(
            f"scatter_indx.src_indx must have a multiple of n_expts_act = {top_k} elements, got "
            f"{row_of_slot.shape[0]}; pass that of routing"
        )
    spec = layout_spec(row_of_slot.shape[0] // top_k, top_k, 1, 1, None)
    return RaggedLayout(spec, None, None, scatter.dst_indx, row_of_slot, None)


def require_indices(
    routing_data: RoutingData | None, gather: GatherIndx | None, scatter: ScatterIndx | None
) -> RoutingData:
    for name, value, kind in (
        ("routing_data", routing_data, RoutingData),
        ("gather_indx", gather, GatherIndx),
        ("scatter_indx", scatter, ScatterIndx),
    ):
        if value is not None and not isinstance(value, kind):
            require_instance(f"{name} (else convert it with from_upstream)", value, kind)
    return RoutingData(None, None, 1, 1) if routing_data is None else routing_data
