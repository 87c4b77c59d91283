"""Prepacking of quantised weights in NumPy, torch and JAX. Layout: `moe_core.formats.tiling`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, QuantizedTensor, Tiling
from moe_core.formats.tiling import BLOCK_ROWS, BLOCK_VALUES, ROW_BYTES, SIDE_ROWS, block_of, why_not_tileable
from moe_core.specs import ExpertWeights, MoESpec, map_arrays, named_fields

#: Converts a signed 8-bit code to one with zero point 128, and back.
_SIGN = -128
#: `[block, side, row]` in the axis of rows, slow to fast, by order.
_ROW_AXES = {"rows": (0, 1, 2), "interleaved": (0, 2, 1), "halves": (1, 0, 2)}


class ArrayFunctions(NamedTuple):
    """Functions that libraries call differently: permute(array, axes), stack(arrays, axis) along a new axis, pad(array,
    rows, columns) with zeros after the last two axes, finish(array) for results."""

    permute: Callable[[Any, tuple[int, ...]], Any]
    stack: Callable[[list[Any], int], Any]
    pad: Callable[[Any, int, int], Any]
    finish: Callable[[Any], Any] = lambda array: array


def pad_with(pad: Callable[..., Any]) -> Callable[[Any, int, int], Any]:
    return lambda array, rows, columns: pad(array, [(0, 0)] * (array.ndim - 2) + [(0, rows), (0, columns)])


NUMPY = ArrayFunctions(np.transpose, np.stack, pad_with(np.pad), np.ascontiguousarray)


def order_for(gate_layout: str | None, name: str) -> str:
    """The tiling order for a gate_layout (None: no gates). Raises InvalidInput."""
    if gate_layout not in (None, "interleaved", "halves"):
        raise InvalidInput(
            f"gate_layout must be None, 'interleaved' or 'halves' for prepacked weights, got {gate_layout!r} for "
            f"{name}; store gate and up in one buffer, or leave the weights as they are published"
        )
    return gate_layout or "rows"


def tile(tensor: QuantizedTensor, order: str, functions: ArrayFunctions = NUMPY) -> QuantizedTensor:
    """A quantised weight `[..., N, D]` with the arrays of `Tiling(N, D, order)`. An `in_out` one is transposed first, a
    tiled one unchanged. Raises InvalidInput for formats and sizes that cannot be tiled, and for another order."""
    if tensor.spec.tiling is not None:
        if tensor.spec.tiling.order != order:
            raise InvalidInput(f"weights to tile in order {order!r} must not be tiled yet, got {tensor}; restore them")
        return tensor
    if (reason := why_not_tileable(tensor.format)) is not None:
        raise InvalidInput(f"weights to tile must be in a format with a tiling, got {tensor}; {reason}")
    arrays, shape = [tensor.values, tensor.scales, tensor.zero_points], tensor.shape
    if tensor.layout == "in_out":
        axes = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
        arrays = [None if array is None else functions.permute(array, axes) for array in arrays]
        shape = tuple(shape[axis] for axis in axes)
    values, scales, points = arrays
    tiling, format = Tiling(shape[-2], shape[-1], order), tensor.format
    spec, block = QuantizedSpec(format, tiling=tiling), block_of(format)
    steps, records = block.steps(tiling.columns), block.records(tiling.columns)
    words = _to_words(_to_blocks(values, tiling, steps, ROW_BYTES, functions), format.element, functions)
    words = words.reshape(*shape[:-2], tiling.blocks, steps, BLOCK_VALUES)
    lead = (*shape[:-2], tiling.blocks, records, BLOCK_ROWS * block.groups)
    if points is not None:
        if format.own_element.per_byte == 2:
            points = _unpack_rows(points, tiling.rows, functions)
        points = _to_blocks(points, tiling, records, block.groups, functions).reshape(lead)
    scales = _to_blocks(scales, tiling, records, block.groups, functions).reshape(lead)
    return map_arrays(QuantizedTensor(spec, words, scales, points), functions.finish)


def untile(tensor: QuantizedTensor, functions: ArrayFunctions = NUMPY) -> QuantizedTensor:
    """The published `out_in` layout of a prepacked weight. Untiled weights are unchanged."""
    tiling, format = tensor.spec.tiling, tensor.format
    if tiling is None:
        return tensor
    block, spec = block_of(format), QuantizedSpec(format)
    columns = tiling.columns // format.own_element.per_byte
    groups = 1 if format.group_columns is None else tiling.columns // format.group_columns

    def in_rows(array: Any, steps: int, width: int) -> Any:
        array = array.reshape(*tensor.shape[:-2], tiling.blocks, steps, 2, SIDE_ROWS, width)
        return _from_blocks(array, tiling, steps, width, functions)

    steps, records = block.steps(tiling.columns), block.records(tiling.columns)
    words = tensor.values.reshape(*tensor.shape[:-2], tiling.blocks, steps, BLOCK_ROWS, ROW_BYTES)
    values = in_rows(_from_words(words, format.element, functions), steps, ROW_BYTES)[..., : tiling.rows, :columns]
    scales = in_rows(tensor.scales, records, block.groups)[..., : tiling.rows, :groups]
    points = tensor.zero_points
    if points is not None:
        points = in_rows(points, records, block.groups)[..., : tiling.rows, :groups]
        if format.own_element.per_byte == 2:
            lead, (rows, groups) = points.shape[:-2], points.shape[-2:]
            pairs = functions.pad(points, rows % 2, 0).reshape(*lead, (rows + 1) // 2, 2, groups)
            points = pairs[..., 0, :] | (pairs[..., 1, :] << 4)
    return map_arrays(QuantizedTensor(spec, values, scales, points), functions.finish)


def prepack_weights(
    weights: Any,
    spec: MoESpec | None = None,
    *,
    gate_layout: str | None = None,
    tile: Callable[[QuantizedTensor, str], QuantizedTensor] = tile,
) -> Any:
    """`moe_torch.prepack_weights` with a library's `tile`. Raises InvalidInput."""
    if isinstance(weights, QuantizedTensor):
        if spec is not None:
            raise InvalidInput(f"spec must be None with one tensor, got {spec}; pass its gate_layout instead")
        return tile(weights, order_for(gate_layout, str(weights)))
    if not isinstance(weights, ExpertWeights):
        raise InvalidInput(
            f"weights must be QuantizedTensor or ExpertWeights, got {type(weights).__name__}; quantise plain "
            "arrays first"
        )
    if not isinstance(spec, MoESpec) or gate_layout is not None:
        raise InvalidInput(
            f"spec must be the MoESpec of the experts, and gate_layout None, got {spec} and {gate_layout!r}; the "
            "activation of spec says how gate and up lie"
        )
    activation = spec.activation
    gate_up = order_for(activation.gate_layout if activation.gated else None, "experts")
    orders, quantized = {"gate_up": gate_up, "down": order_for(None, "experts")}, _quantized(weights)
    if not quantized or quantized.keys() - orders.keys():
        raise InvalidInput(
            f"weights must hold gate_up or down quantised, and nothing else, got {', '.join(quantized) or 'none'}; "
            "quantise them"
        )
    return dataclasses.replace(weights, **{name: tile(value, orders[name]) for name, value in quantized.items()})


def restore_weights(weights: Any, untile: Callable[[QuantizedTensor], QuantizedTensor] = untile) -> Any:
    """`moe_torch.restore_weights` with a library's `untile`. Raises InvalidInput."""
    if isinstance(weights, QuantizedTensor):
        return untile(weights)
    if not isinstance(weights, ExpertWeights):
        raise InvalidInput(
            f"weights must be QuantizedTensor or ExpertWeights, got {type(weights).__name__}; pass what "
            "prepack_weights gave"
        )
    return dataclasses.replace(weights, **{name: untile(value) for name, value in _quantized(weights).items()})


def _quantized(weights: ExpertWeights) -> dict[str, QuantizedTensor]:
    return {name: value for name, value in named_fields(weights) if isinstance(value, QuantizedTensor)}


def _to_blocks(array: Any, tiling: Tiling, steps: int, width: int, functions: ArrayFunctions) -> Any:
    """`[..., blocks, steps, 2, 32, width]` of `[..., rows, columns]`. width: columns per step."""
    lead = array.shape[:-2]
    missing = tiling.blocks * BLOCK_ROWS - array.shape[-2], steps * width - array.shape[-1]
    sizes = dict(zip(_ROW_AXES[tiling.order], (tiling.blocks, 2, SIDE_ROWS), strict=True))
    array = functions.pad(array, *missing).reshape(*lead, *(sizes[axis] for axis in range(3)), steps, width)
    block, side, row = (len(lead) + axis for axis in _ROW_AXES[tiling.order])
    step = len(lead) + 3
    return functions.permute(array, (*range(len(lead)), block, step, side, row, step + 1))


def _from_blocks(array: Any, tiling: Tiling, steps: int, width: int, functions: ArrayFunctions) -> Any:
    """The inverse, with padding: `[..., blocks * 64, steps * width]`."""
    lead = array.shape[:-5]
    places = dict(zip(_ROW_AXES[tiling.order], (len(lead), len(lead) + 2, len(lead) + 3), strict=True))
    rows = (places[axis] for axis in range(3))
    array = functions.permute(array, (*range(len(lead)), *rows, len(lead) + 1, len(lead) + 4))
    return array.reshape(*lead, tiling.blocks * BLOCK_ROWS, steps * width)


def _to_words(array: Any, element: str, functions: ArrayFunctions) -> Any:
    """Bytes of block rows from column order to word order (t, q)."""
    lead = array.shape[:-1]
    t, q = len(lead) + 2, len(lead)
    if element not in _PACK:
        # Columns (q, p, t, b) to bytes (t, q, p, b).
        words = functions.permute(array.reshape(*lead, 4, 2, 4, 2), (*range(len(lead)), t, q, q + 1, q + 3))
        return words ^ _SIGN if element == "int8" else words
    # Columns (q, i, t; nibble b) to halves b of words.
    array = array.reshape(*lead, 4, 4, 4)
    halves = []
    for codes in (array & 15, array >> 4):
        halves += _PACK[element](*(codes[..., i, :] for i in range(4)))
    return functions.permute(functions.stack(halves, -1), (*range(len(lead)), q + 1, q, q + 2))


def _from_words(array: Any, element: str, functions: ArrayFunctions) -> Any:
    lead = array.shape[:-1]
    t, q = len(lead), len(lead) + 1
    if element not in _UNPACK:
        array = array ^ _SIGN if element == "int8" else array
        columns = functions.permute(array.reshape(*lead, 4, 4, 2, 2), (*range(len(lead)), q, q + 1, t, q + 2))
        return columns.reshape(*lead, ROW_BYTES)
    array = array.reshape(*lead, 4, 4, 2, 2)
    codes = _UNPACK[element](array[..., 0], array[..., 1])
    # [..., t, q, i] of [..., t, q, b], then [..., q, i, t].
    bytes_of_words = functions.stack([code[..., 0] | (code[..., 1] << 4) for code in codes], -1)
    return functions.permute(bytes_of_words, (*range(len(lead)), q, q + 1, t)).reshape(*lead, ROW_BYTES)


def _pack_e2m1(c0: Any, c1: Any, c2: Any, c3: Any) -> list[Any]:
    """The two bytes of a half with four codes, see `moe_core.formats.tiling`."""
    low = ((c0 & 3) << 6) | ((c1 & 7) << 3) | (c2 & 7)
    signs = ((c0 & 8) << 4) | ((c1 & 8) << 1) | ((c2 & 8) >> 2)
    return [low, signs | ((c0 & 4) >> 2) | (c3 & 12) | ((c3 & 3) << 5)]


def _unpack_e2m1(low: Any, high: Any) -> tuple[Any, Any, Any, Any]:
    return (
        (low >> 6) | ((high & 1) << 2) | ((high & 0x80) >> 4),
        ((low >> 3) & 7) | ((high & 0x10) >> 1),
        (low & 7) | ((high & 2) << 2),
        (high & 12) | ((high >> 5) & 3),
    )


_PACK = {"e2m1": _pack_e2m1, "uint4": lambda c0, c1, c2, c3: [c0 | (c1 << 4), c2 | (c3 << 4)]}
_UNPACK = {"e2m1": _unpack_e2m1, "uint4": lambda low, high: (low & 15, low >> 4, high & 15, high >> 4)}


def _unpack_rows(points: Any, rows: int, functions: ArrayFunctions) -> Any:
    """`[..., rows, groups]` of 4-bit `[..., ceil(rows / 2), groups]`, low nibble first."""
    lead, groups = points.shape[:-2], points.shape[-1]
    pairs = functions.stack([points & 15, points >> 4], -2)
    return pairs.reshape(*lead, 2 * points.shape[-2], groups)[..., :rows, :]
