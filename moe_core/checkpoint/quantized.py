"""Read quantised layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.checkpoint.families import Architecture
from moe_core.checkpoint.packing import Component, Packing
from moe_core.checkpoint.storage import Part, Stack, TensorIndex
from moe_core.errors import Unsupported
from moe_core.formats import Format, QuantizedShapes, QuantizedSpec, QuantizedTensor, quantized_shapes
from moe_core.ops.quantize.reference import dequantize
from moe_core.specs import named_fields

#: Stacks of a quantised weight.
ARRAYS = (".values", ".scales", ".zero_points")
_WEIGHTS = ("experts.gate_up", "experts.down", "shared.gate_up", "shared.down")
#: Tensors in any quantised storage.
_COMPANIONS = ("_blocks", "_scales", "_scale", "_scale_inv", "_packed", "_zero_point", "_g_idx", "qweight", "qzeros")


def module_of(tensor: str) -> tuple[str, bool]:
    """(module, True for a fused parameter of all experts) of a plain weight's name."""
    module = tensor.removesuffix(".weight")
    return module, module == tensor


def is_quantized(weight: str, packing: Packing, index: TensorIndex) -> bool:
    """True if the files hold the weight of that plain name quantised."""
    module, fused = module_of(weight)
    names = [packing.tensor_name(module, component, fused) for component in packing.components]
    return any(name in index.files for name in names if name != weight)


def quantized_architecture(
    architecture: Architecture, stacks: Mapping[str, Stack], packing: Packing, index: TensorIndex
) -> Architecture:
    """The architecture with the layouts of its quantised weights.

    All are `out_in`. gate_layout is `separate` if a group of the format would hold rows of gate and up.
    """
    spec = dataclasses.replace(architecture.spec, weight_layout="out_in")
    divided = [stack for name, stack in stacks.items() if name.endswith(".gate_up") and _is_divided(stack)]
    halves = [stack for stack in divided if is_quantized(stack.parts[0].tensor, packing, index)]
    if all(packing.format.splits_rows(stack.parts[0].shape[-2]) for stack in halves):
        return dataclasses.replace(architecture, spec=spec)
    if not _is_divided(stacks["experts.gate_up"]):
        raise Unsupported(
            f"the shared experts' width must be a multiple of {packing.format.group_rows} beside fused experts, got "
            f"{halves[0].parts[0].shape[-2]}; dequantise the checkpoint to bfloat16 first"
        )
    if any(name.endswith(".gate_up") and not _is_divided(stack) for name, stack in stacks.items()):
        raise Unsupported(
            f"the experts' width must be a multiple of {packing.format.group_rows} beside shared experts whose gate "
            f"and up are one tensor, got {architecture.d_ff}; dequantise the checkpoint to bfloat16 first"
        )
    return dataclasses.replace(architecture, spec=spec.with_gate_layout("separate"))


def quantized_stacks(
    stacks: Mapping[str, Stack], packing: Packing, index: TensorIndex, separate: bool
) -> dict[str, Stack]:
    """The stacks of a layer, one per array of a quantised weight: `experts.down.values`. separate: as gate_layout."""
    result: dict[str, Stack] = {}
    for name, stack in stacks.items():
        if name not in _WEIGHTS:
            result[name] = stack
            continue
        for field, piece in (_apart(name, stack) if separate and name.endswith("gate_up") else {name: stack}).items():
            if is_quantized(piece.parts[0].tensor, packing, index):
                if piece.parts[0].decode is not None:
                    raise Unsupported(
                        f"{piece.parts[0].tensor} holds quantised weights in an order of its own (transposed, or rows "
                        "of gate and up in turn), which cannot be read; dequantise the checkpoint to bfloat16 first"
                    )
                shapes = quantized_shapes(QuantizedSpec(packing.format), piece.shape)
                for component in packing.components:
                    result[f"{field}.{component.field}"] = _component_stack(piece, shapes, packing, component)
            else:
                result[field] = piece
    return result


def _is_divided(stack: Stack) -> bool:
    return any(isinstance(index, slice) for index in stack.parts[0].place)


def _apart(name: str, stack: Stack) -> dict[str, Stack]:
    halves: dict[str, list[Part]] = {name: [], name.replace("gate_up", "up"): []}
    for part in stack.parts:
        *lead, rows = part.place
        assert isinstance(rows, slice)
        field = name if rows.start == 0 else name.replace("gate_up", "up")
        halves[field].append(dataclasses.replace(part, place=tuple(lead)))
    return {
        field: dataclasses.replace(stack, shape=(*stack.shape[:-2], *parts[0].shape[-2:]), parts=tuple(parts))
        for field, parts in halves.items()
    }


def _component_stack(stack: Stack, shapes: QuantizedShapes, packing: Packing, component: Component) -> Stack:
    format = packing.format
    dtypes_of = format.scale_dtypes if component.field == "scales" else (format.own_element.dtype,)
    parts = []
    for part in stack.parts:
        module, fused = module_of(part.tensor)
        name = packing.tensor_name(module, component, fused)
        shape = (*part.shape[:-2], *component.file_shape(part.shape[-2], part.shape[-1]))
        place = tuple(_scaled(index, format, component.field) for index in part.place)
        parts.append(Part(name, shape, place, component.decode))
    dtype = dtypes_of[0] if len(dtypes_of) == 1 else None
    return Stack(getattr(shapes, component.field), tuple(parts), dtype, component.accepts)


def _scaled(place: int | slice, format: Format, field: str) -> int | slice:
    if isinstance(place, int) or place == slice(None):
        return place
    per_row = {"values": 1, "scales": format.group_rows or 1, "zero_points": format.own_element.per_byte}[field]
    return slice(place.start // per_row, place.stop // per_row)


def refuse_unread(index: TensorIndex, block: str, stacks: Mapping[str, Stack]) -> None:
    """Raise Unsupported for tensors that are not read, such as static scales."""
    read = {part.tensor for stack in stacks.values() for part in stack.parts}
    for name in index.below(block):
        if name.endswith(_COMPANIONS) and name not in read:
            raise Unsupported(
                f"{name} in {index.files[name]} belongs to a quantised tensor in a way that the quantization_config "
                "does not describe, so it cannot be honoured; dequantise the checkpoint to bfloat16 first"
            )


def assemble(arrays: Mapping[str, np.ndarray], packing: Packing) -> dict[str, Any]:
    """The arrays of a layer, each quantised weight as one QuantizedTensor."""
    fields: dict[str, Any] = {name: array for name, array in arrays.items() if not name.endswith(ARRAYS)}
    for field in [name.removesuffix(".values") for name in arrays if name.endswith(".values")]:
        parts = (arrays.get(field + ending) for ending in ARRAYS)
        fields[field] = QuantizedTensor(QuantizedSpec(packing.format), *parts)
    return fields


def plain_bundle(bundle: Any, dtype: str, which: Callable[[str, Any], bool] = lambda name, array: True) -> Any:
    """A bundle with the fields that `which` selects as plain arrays in `dtype`."""

    def plain(array: Any) -> np.ndarray:
        if isinstance(array, QuantizedTensor):
            return dequantize(array, dtype)
        return array.astype(dtypes.numpy_dtype(dtype), copy=False)

    fields = {name: plain(array) for name, array in named_fields(bundle) if which(name, array)}
    return dataclasses.replace(bundle, **fields)
