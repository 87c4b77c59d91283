"""Prepared weights in any array library: quantised weights put into the order of a kernel once, when they are loaded.

What lies where: `moe_core.formats.tiling`. This is the one description of the permutation; NumPy, torch and JAX bring
the functions that they call differently (`ArrayFunctions`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, QuantizedTensor, Tiling
from moe_core.formats.tiling import BLOCK_COLUMNS, BLOCK_ROWS, BLOCK_SCALES, BLOCK_VALUES, GROUP_COLUMNS, SIDE_ROWS
from moe_core.operands import ExpertWeights, named_fields
from moe_core.specs import MoESpec

#: Bytes of codes, and scales, of one row of a block.
_ROW_BYTES, _ROW_SCALES = BLOCK_COLUMNS // 2, BLOCK_COLUMNS // GROUP_COLUMNS
#: Where `[block, side, row]` of a block are found in the matrix's axis of rows, split from slow to fast; by order.
_ROW_AXES = {"rows": (0, 1, 2), "interleaved": (0, 2, 1), "halves": (1, 0, 2)}


class ArrayFunctions(NamedTuple):
    """What libraries call differently. permute(array, axes); stack(arrays, axis): along a new axis; pad(array, rows,
    columns): zeros behind the last two axes."""

    permute: Callable[[Any, tuple[int, ...]], Any]
    stack: Callable[[list[Any], int], Any]
    pad: Callable[[Any, int, int], Any]


def order_for(gate_layout: str | None, name: str) -> str:
    """The order in which weights are tiled whose gate and up rows lie so; None = no gates. Raises InvalidInput."""
    if gate_layout not in (None, "interleaved", "halves"):
        raise InvalidInput(
            f"gate_layout must be None, 'interleaved' or 'halves' for prepared weights, got {gate_layout!r} for "
            f"{name}; store gate and up in one buffer, or leave the weights as they are published"
        )
    return gate_layout or "rows"


def tile(tensor: QuantizedTensor, order: str, functions: ArrayFunctions) -> QuantizedTensor:
    """A quantised weight `[..., N, D]` with the arrays of `Tiling(N, D, order)`; an `in_out` one is transposed first.

    One that is tiled so comes back as it is. Raises InvalidInput for formats and sizes that cannot be tiled, and for a
    tensor tiled in another order.
    """
    if tensor.spec.tiling is not None:
        if tensor.spec.tiling.order != order:
            raise InvalidInput(f"weights to tile in order {order!r} must not be tiled yet, got {tensor}; restore them")
        return tensor
    arrays, shape = (tensor.values, tensor.scales), tensor.shape
    if tensor.layout == "in_out":
        axes = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
        arrays, shape = tuple(functions.permute(array, axes) for array in arrays), tuple(shape[axis] for axis in axes)
    tiling = Tiling(shape[-2], shape[-1], order)
    spec = QuantizedSpec(tensor.format, tiling=tiling)
    values = _to_words(_to_blocks(arrays[0], tiling, _ROW_BYTES, functions), functions)
    scales = _to_blocks(arrays[1], tiling, _ROW_SCALES, functions)
    lead = (*shape[:-2], tiling.blocks, tiling.steps)
    return QuantizedTensor(spec, values.reshape(*lead, BLOCK_VALUES), scales.reshape(*lead, BLOCK_SCALES))


def untile(tensor: QuantizedTensor, functions: ArrayFunctions) -> QuantizedTensor:
    """The published layout of a tiled weight, `out_in`: the inverse of `tile`. One that is not tiled comes back as it
    is."""
    tiling = tensor.spec.tiling
    if tiling is None:
        return tensor
    lead = (*tensor.shape[:-2], tiling.blocks, tiling.steps, 2, SIDE_ROWS)
    words = _from_words(tensor.values.reshape(*lead, _ROW_BYTES), functions)
    values = _from_blocks(words, tiling, _ROW_BYTES, functions)
    scales = _from_blocks(tensor.scales.reshape(*lead, _ROW_SCALES), tiling, _ROW_SCALES, functions)
    values = values[..., : tiling.rows, : tiling.columns // 2]
    scales = scales[..., : tiling.rows, : tiling.columns // GROUP_COLUMNS]
    return QuantizedTensor(QuantizedSpec(tensor.format), values, scales)


def prepare(
    weights: Any, spec: MoESpec | None, gate_layout: str | None, tile: Callable[[QuantizedTensor, str], QuantizedTensor]
) -> Any:
    """`prepare_weights` of a front-end. tile(tensor, order): that of its library. Raises InvalidInput."""
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
    orders = {
        "gate_up": order_for(activation.gate_layout if activation.gated else None, "experts"),
        "down": order_for(None, "experts"),
    }
    quantized = {name: value for name, value in named_fields(weights) if isinstance(value, QuantizedTensor)}
    unknown = [name for name in quantized if name not in orders]
    if unknown or not quantized:
        raise InvalidInput(
            f"weights must hold gate_up or down quantised, and nothing else, got {', '.join(quantized) or 'none'}; "
            "quantise them"
        )
    return dataclasses.replace(weights, **{name: tile(value, orders[name]) for name, value in quantized.items()})


def restore(weights: Any, untile: Callable[[QuantizedTensor], QuantizedTensor]) -> Any:
    """`restore_weights` of a front-end. untile: that of its library. Raises InvalidInput."""
    if isinstance(weights, QuantizedTensor):
        return untile(weights)
    if not isinstance(weights, ExpertWeights):
        raise InvalidInput(
            f"weights must be QuantizedTensor or ExpertWeights, got {type(weights).__name__}; pass what "
            "prepare_weights gave"
        )
    quantized = {name: value for name, value in named_fields(weights) if isinstance(value, QuantizedTensor)}
    return dataclasses.replace(weights, **{name: untile(value) for name, value in quantized.items()})


def _split_rows(tiling: Tiling) -> tuple[int, ...]:
    """The axis of rows, as the order splits it."""
    sizes = (tiling.blocks, 2, SIDE_ROWS)
    split = [0, 0, 0]
    for size, axis in zip(sizes, _ROW_AXES[tiling.order], strict=True):
        split[axis] = size
    return tuple(split)


def _to_blocks(array: Any, tiling: Tiling, width: int, functions: ArrayFunctions) -> Any:
    """`[..., blocks, steps, 2, 32, width]` of `[..., rows, columns]`; width: columns of a step."""
    lead = array.shape[:-2]
    missing = tiling.blocks * BLOCK_ROWS - array.shape[-2], tiling.steps * width - array.shape[-1]
    array = functions.pad(array, *missing).reshape(*lead, *_split_rows(tiling), tiling.steps, width)
    block, side, row = (len(lead) + axis for axis in _ROW_AXES[tiling.order])
    step = len(lead) + 3
    return functions.permute(array, (*range(len(lead)), block, step, side, row, step + 1))


def _from_blocks(array: Any, tiling: Tiling, width: int, functions: ArrayFunctions) -> Any:
    """The inverse of `_to_blocks`, with the padding: `[..., blocks * 64, steps * width]`."""
    lead = array.shape[:-5]
    # Of block, side and row in the array.
    places = len(lead), len(lead) + 2, len(lead) + 3
    rows = [0, 0, 0]
    for place, axis in zip(places, _ROW_AXES[tiling.order], strict=True):
        rows[axis] = place
    array = functions.permute(array, (*range(len(lead)), *rows, len(lead) + 1, len(lead) + 4))
    return array.reshape(*lead, tiling.blocks * BLOCK_ROWS, tiling.steps * width)


def _to_words(array: Any, functions: ArrayFunctions) -> Any:
    """The 64 bytes of each row, from the order of columns (q, i, t; nibble b) to that of words (t, q; half b), whose
    halves hold the bits of four codes in the order that `moe_core.formats.tiling` gives."""
    lead = array.shape[:-1]
    array = array.reshape(*lead, _ROW_SCALES, 4, 4)
    halves = []
    for codes in (array & 15, array >> 4):
        c0, c1, c2, c3 = (codes[..., i, :] for i in range(4))
        low = ((c0 & 3) << 6) | ((c1 & 7) << 3) | (c2 & 7)
        signs = ((c0 & 8) << 4) | ((c1 & 8) << 1) | ((c2 & 8) >> 2)
        halves += [low, signs | ((c0 & 4) >> 2) | (c3 & 12) | ((c3 & 3) << 5)]
    words = functions.stack(halves, -1)
    q, t, byte = range(len(lead), len(lead) + 3)
    return functions.permute(words, (*range(len(lead)), t, q, byte)).reshape(*lead, _ROW_BYTES)


def _from_words(array: Any, functions: ArrayFunctions) -> Any:
    """The inverse of `_to_words`."""
    lead = array.shape[:-1]
    array = array.reshape(*lead, 4, _ROW_SCALES, 2, 2)
    low, high = array[..., 0], array[..., 1]
    codes = (
        (low >> 6) | ((high & 1) << 2) | ((high & 0x80) >> 4),
        ((low >> 3) & 7) | ((high & 0x10) >> 1),
        (low & 7) | ((high & 2) << 2),
        (high & 12) | ((high >> 5) & 3),
    )
    # [..., t, q, i] of [..., t, q, b], then [..., q, i, t].
    found = functions.stack([code[..., 0] | (code[..., 1] << 4) for code in codes], -1)
    t, q, i = range(len(lead), len(lead) + 3)
    return functions.permute(found, (*range(len(lead)), q, i, t)).reshape(*lead, _ROW_BYTES)
