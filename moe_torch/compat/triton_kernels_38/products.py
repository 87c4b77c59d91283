"""The products of `matmul`, in a plain type: by rows of a, and with a ragged K."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.specs.matmul import Activation
from moe_torch import ops
from moe_torch.bridge.options import dtype_name, layout_spec
from moe_torch.compat.triton_kernels.matmul_ogs_details import operands as inputs
from moe_torch.compat.triton_kernels.matmul_ogs_details.operands import Operand, Weight, memory_of
from moe_torch.compat.triton_kernels.matmul_ogs_details.product import (
    Rows,
    batched,
    bias_of,
    factors_of,
    matmul_spec,
    rows_at,
    scattered_product,
)
from moe_torch.compat.triton_kernels_38.mxfp import per_matrix, upcast_from_mxfp
from moe_torch.compat.triton_kernels_38.options import PrecisionConfig
from moe_torch.compat.triton_kernels_38.tensor import RaggedTensorMetadata
from moe_torch.modular.routing_data import ScatterIndx, starts
from moe_torch.operators.grouped import GROUPED_CONTRACTION

Pair = tuple[RaggedTensorMetadata, RaggedTensorMetadata]


class RaggedRows(NamedTuple):
    """source int64: rows to take from a first, or None. place int64: rows of betas and gammas, or None."""

    rows: Rows
    source: torch.Tensor | None
    scatter: ScatterIndx | None
    place: torch.Tensor | None


def ragged_rows(
    metadata: RaggedTensorMetadata,
    num_rows: int,
    gather: torch.Tensor | None,
    scatter: torch.Tensor | None,
    *,
    fused: bool,
) -> RaggedRows:
    """num_rows: of a. fused: the product may gather. A row with a negative index has no source, or no destination."""
    count = num_rows if gather is None else gather.shape[0]
    adjacent = metadata.slice_sizes_divisibility is None
    first, place = (metadata.slice_offs, None) if adjacent else (starts(metadata.slice_sizes), _place(metadata, count))
    rows = torch.arange(count, dtype=torch.int32, device=first.device)
    at = torch.where(rows < first[-1], rows, -1) if place is None else place
    source = at if gather is None else _at(gather, at)
    target = at if scatter is None else _at(scatter, at)
    if gather is not None:
        target = torch.where(source >= 0, target, -1)
    if fused and gather is not None and adjacent and num_rows:
        # Slot // top_k is a row of a. Nothing reads the way back.
        top_k = -(-count // num_rows)
        slots = torch.where(source >= 0, source * top_k, -1)
        spec = layout_spec(num_rows, top_k, metadata.n_slices, 1, None, None if num_rows * top_k == count else count)
        back = slots if slots.shape[0] == spec.num_slots else slots.new_zeros(spec.num_slots)
        layout = ops.RaggedLayout(spec, metadata.slice_sizes, first, slots, back, None)
        way = None if scatter is None else ScatterIndx(_inverse(target, rows), target)
        return RaggedRows(Rows(layout, "token", count), None, way, None)
    back = target if scatter is None and adjacent else _inverse(target, rows)
    spec = layout_spec(count, 1, metadata.n_slices, 1, None)
    layout = ops.RaggedLayout(spec, metadata.slice_sizes, first, target, back, None)
    way = None if scatter is None and adjacent else ScatterIndx(back, target)
    taken = None if gather is None and adjacent else source.clamp(min=0).long()
    return RaggedRows(Rows(layout, "row", count), taken, way, None if place is None else place.clamp(min=0).long())


def ragged_product(a: torch.Tensor, b: torch.Tensor, metadata: Pair, out_dtype: torch.dtype) -> torch.Tensor:
    """`a[:, slice e of a] @ b[slice e of b]` for every slice: `[E, M, N]` of a `[M, K]`, b `[K, N]`."""
    sides, count, dtype = [], min(a.shape[1], b.shape[0]), torch.promote_types(a.dtype, b.dtype)
    for side, slices in zip((a.T, b), metadata, strict=True):
        if slices.slice_sizes_divisibility is not None:
            side = side[_place(slices, count).clamp(min=0).long()]
        side = side[:count].to(dtype)
        sides.append(side if side.stride(1) == 1 else side.contiguous())
    ends = starts(metadata[0].slice_sizes)[1:]
    return GROUPED_CONTRACTION.call(
        left=sides[0], right=sides[1], offs=ends, out_dtype=dtype_name("out_dtype", out_dtype)
    )


def _place(metadata: RaggedTensorMetadata, count: int) -> torch.Tensor:
    """int32 `[count]`: the places of all slices' rows, one slice after the other, then -1."""
    first = starts(metadata.slice_sizes)
    rows = torch.arange(count, dtype=torch.int32, device=first.device)
    slice_of_row = torch.searchsorted(first[1:], rows, right=True).clamp(max=metadata.n_slices - 1)
    return torch.where(rows < first[-1], rows + (metadata.slice_offs[:-1] - first[:-1])[slice_of_row], -1)


def _at(index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """int32: the index of each row, or -1."""
    if index.ndim != 1 or index.shape[0] != rows.shape[0]:
        raise InvalidInput(
            f"gather_indx and scatter_indx must be [{rows.shape[0]}], one per row, got {list(index.shape)}; pass all"
        )
    return torch.where(rows >= 0, index.to(torch.int32)[rows.clamp(min=0).long()], -1)


def _inverse(target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """int32: the row that becomes each row of the result, or -1."""
    count = rows.shape[0]
    found = rows.new_full((count + 1,), -1)
    return found.scatter_(0, torch.where(target >= 0, target, count).long(), rows)[:count]


Ways = tuple[RaggedTensorMetadata | None, torch.Tensor | None, torch.Tensor | None]


class Fused(NamedTuple):
    """The operations on the sums of a product."""

    bias: torch.Tensor | None
    betas: torch.Tensor | None
    gammas: torch.Tensor | None
    alpha: float | None
    activation: Activation | None


def by_rows(x: Operand, w: Operand, ways: Ways, precision: PrecisionConfig, fused: Fused) -> torch.Tensor:
    """ways: slices, gather, scatter. The result has precision.out_dtype, and a batch's leading axis."""
    weight, data = inputs.weight_of(w), memory_of("a", x.array)
    shape, ragged = data.shape, None
    batch = shape[0] if len(shape) == 3 else None
    if batch is not None:
        if ways != (None, None, None):
            raise InvalidInput(
                f"metadata, gather_indx and scatter_indx must be None for a [B, M, K], got a {list(shape)}; flatten a"
            )
        values, rows = (None, None) if not batch else batched(x._replace(array=data), weight, "b", precision.out_dtype)
    elif len(shape) == 2:
        values = inputs.rows_of(x, precision.out_dtype)
        metadata, weight = _slices(ways, weight, shape[0], data.device)
        ragged = None if metadata is None else _ragged(values, metadata, ways, fused)
        rows = Rows(None, "row", shape[0]) if ragged is None else ragged.rows
    else:
        raise InvalidInput(f"a must be [M, K] or [B, M, K], got {list(shape)}; reshape it")
    width = weight.shape[-1] // (1 if fused.activation is None else 2)
    if values is None or rows is None or 0 in weight.shape[:-2]:
        count = shape[-2] if batch is not None or rows is None else rows.count
        return data.new_zeros((*shape[:-2], count, width), dtype=precision.out_dtype)
    if ragged is not None and ragged.source is not None:
        values = rows_at(values, ragged.source)
    values = _like(values, weight)
    bias = bias_of(fused.bias, weight, values, rows)
    operands = inputs.fitting(ops.MatmulOperands(values, weight.array, bias=bias), weight, ("a", "b"), shape)
    betas, gammas = fused.betas, fused.gammas
    if ragged is not None and ragged.place is not None:
        betas, gammas = (None if factor is None else factor[ragged.place] for factor in (betas, gammas))
    factors = factors_of(betas, gammas, fused.alpha, rows.count, batch)
    spec = matmul_spec(precision, weight, rows, values, fused.activation)
    result = scattered_product(operands, rows, spec, factors, None if ragged is None else ragged.scatter, 1)
    result = result if width else result[:, :0]
    return result if batch is None else result.reshape(batch, shape[1], width)


def _slices(ways: Ways, weight: Weight, count: int, device: torch.device) -> tuple[RaggedTensorMetadata | None, Weight]:
    """The slices, if there are or a row moves, and the weight with or without its leading axis."""
    metadata, gather, scatter = ways
    stack = len(weight.shape) == 3
    if metadata is None:
        if stack and weight.shape[0] != 1:
            raise InvalidInput(
                f"b must be [K, N] or [1, K, N] without a_ragged_metadata, got {list(weight.shape)}; pass the slices"
            )
        if gather is None and scatter is None:
            array = inputs.indexed(weight.array, 0) if stack else weight.array
            return None, Weight(array, weight.weight_layout, weight.shape[-2:])
        rows = count if gather is None else gather.shape[0]
        sizes = torch.full((1,), rows, dtype=torch.int32, device=device)
        metadata = RaggedTensorMetadata(sizes, starts(sizes), None, None)
    if not stack:
        weight = Weight(inputs.indexed(weight.array, None), weight.weight_layout, (1, *weight.shape))
    if weight.shape[0] != metadata.n_slices:
        raise InvalidInput(
            f"b must be [{metadata.n_slices}, K, N] for these slices, got {list(weight.shape)}; pass a matrix for each"
        )
    return metadata, weight


def _ragged(values: Any, metadata: RaggedTensorMetadata, ways: Ways, fused: Fused) -> RaggedRows:
    # Weights of rows and gradients of a gather need rows that are copied, as a gather by index has no way back.
    trained = isinstance(values, torch.Tensor) and values.requires_grad and torch.is_grad_enabled()
    copied = trained or fused.gammas is not None or torch.compiler.is_compiling()
    return ragged_rows(metadata, values.shape[0], *ways[1:], fused=not copied)


def _like(values: Any, weight: Weight) -> Any:
    """Dequantise microscaled rows where the weight is plain."""
    if not isinstance(values, QuantizedTensor) or isinstance(weight.array, QuantizedTensor):
        return values
    if not values.format.has_e8m0_scales or weight.array.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(
            f"b must be quantised, or bf16 or fp32 beside a microscaled a, got {weight.array.dtype} beside "
            f"{values.format.name}: their product has no kernel; convert b"
        )
    return ops.dequantize(values, weight.array.dtype)


def ragged_k(x: Operand, w: Operand, metadata: Pair, precision: PrecisionConfig, fused: Fused) -> torch.Tensor:
    """`[E, M, N]` in precision.out_dtype."""
    if fused.bias is not None:
        raise InvalidInput("bias must be None where K is ragged, as slices are summed; add it to the result")
    a, b = _plain(x, -1), _plain(w, -2)
    if a.ndim != 2 or b.ndim != 2 or metadata[0].n_slices != metadata[1].n_slices:
        raise InvalidInput(
            f"a must be [M, K], b [K, N] and both have as many slices where K is ragged, got {list(a.shape)}, "
            f"{list(b.shape)}, and {metadata[0].n_slices} and {metadata[1].n_slices} slices; pass those of one K"
        )
    gammas = factors_of(fused.betas, fused.gammas, fused.alpha, a.shape[0], None).gammas
    shape = torch.Size((metadata[0].n_slices, a.shape[0], b.shape[1]))
    scales = [per_matrix(one.flex_name, one.flex.scale, shape) for one in (x, w) if one.flex.scale is not None]
    factors = [*scales, *([] if gammas is None else [gammas[:, None]]), *([] if fused.alpha is None else [fused.alpha])]
    if 0 in (*shape, a.shape[1], b.shape[0]):
        width = shape[2] // (1 if fused.activation is None else 2)
        return a.new_zeros((*shape[:2], width), dtype=precision.out_dtype)
    is_exact = not factors and fused.activation is None
    result = ragged_product(a, b, metadata, precision.out_dtype if is_exact else torch.float32)
    for factor in factors:
        result = result * factor
    if fused.activation is not None:
        result = ops.activation(result.flatten(0, 1), fused.activation).unflatten(0, shape[:2])
    return result.to(precision.out_dtype)


def _plain(operand: Operand, axis: int) -> torch.Tensor:
    """An operand without its scale for the whole tensor. 8 bits become bf16."""
    data = operand.flex.reinterpret(memory_of(operand.name, operand.array))
    if operand.scale is not None:
        return upcast_from_mxfp(data, memory_of(operand.scale_name, operand.scale), torch.bfloat16, axis)
    if data.dtype == torch.uint8:
        raise InvalidInput(
            f"{operand.name} must have its scales in {operand.scale_name} where it is bytes, got None; pass them"
        )
    return data.to(torch.bfloat16) if data.itemsize == 1 else data
