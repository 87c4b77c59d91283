"""Read quantised layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.checkpoint.families import Architecture
from moe_core.checkpoint.packing import Packing
from moe_core.checkpoint.resolve import Resolver, module_of, plain_part, scale_check
from moe_core.checkpoint.rules import Quantization
from moe_core.checkpoint.stacks import LayerNames, layer_stacks
from moe_core.checkpoint.storage import FLOATING, Part, Stack, StackReader, TensorIndex, turn
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, Scheme, quantized_shapes
from moe_core.ops.quantize.reference import dequantize
from moe_core.specs import named_fields

#: Stacks of a quantised weight.
ARRAYS = (".values", ".scales", ".zero_points")
_EXPERTS, _SHARED = ("experts.gate_up", "experts.down"), ("shared.gate_up", "shared.down")
#: Matrices around the experts, read as plain arrays however they are stored.
_AROUND = ("router.weight", "shared.gate", "before.weight", "after.weight")


@dataclass(frozen=True)
class Layout:
    """The arrays of one layer.

    Args:
        packings: of quantised weights, by field.
        scheme: of the experts, if they stay quantised.
        notes: differences between the files and what is read.
        matrices: field -> (part, packing) of every matrix, None for plain ones.
        input_scales: field -> tensors with static scales of activations.
    """

    architecture: Architecture
    stacks: Mapping[str, Stack]
    packings: Mapping[str, Packing] = field(default_factory=dict)
    scheme: Scheme | None = None
    notes: tuple[str, ...] = ()
    matrices: Mapping[str, tuple[tuple[Part, Packing | None], ...]] = field(default_factory=dict)
    input_scales: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def layer_layout(
    architecture: Architecture,
    names: LayerNames,
    quantization: Quantization | None,
    index: TensorIndex,
    reader: StackReader,
    dtype: str | None,
    allow_bad_scales: bool = False,
) -> Layout:
    """dtype: of weights that are dequantised, as config.json names it."""
    resolver = Resolver(names, quantization, index, reader)
    stacks = layer_stacks(architecture, names)
    wanted = [name for name in (*_EXPERTS, *_SHARED, *_AROUND) if name in stacks]
    turned = architecture.spec.weight_layout == "in_out"
    matrices = {
        name: tuple((part, resolver.packing(part)) for part in _in_file_order(stacks[name], turned)) for name in wanted
    }
    kept, notes = _kept(matrices)
    if any(stacks[name].parts[0].decode is not None and not _is_turned(stacks[name], names.gguf) for name in kept):
        strange = next(name for name in kept if stacks[name].parts[0].decode is not None)
        raise Unsupported(
            f"{stacks[strange].parts[0].tensor} holds quantised weights in an order of its own (transposed, or rows "
            "of gate and up in turn), which cannot be read; dequantise the checkpoint to bfloat16 first"
        )
    scheme, separate, input_scales = None, False, {}
    if kept:
        architecture, separate, shared_is_plain = _quantized_architecture(architecture, stacks, kept)
        kept = {name: packing for name, packing in kept.items() if name in _EXPERTS or not shared_is_plain}
        stacks = layer_stacks(architecture, names)
        scheme = kept["experts.gate_up"].scheme
        input_scales = _input_scales(stacks, kept, index)
    checks = {
        id(packing): None if allow_bad_scales else scale_check(packing, index)
        for pairs in matrices.values() for _, packing in pairs if packing is not None
    }  # fmt: skip
    dtype = _plain_dtype(matrices, reader, dtype)
    result: dict[str, Stack] = {}
    packings: dict[str, Packing] = {}
    for name, stack in stacks.items():
        for piece_name, piece in (
            _apart(name, stack) if separate and name.endswith(("gate_up", "gate_up_bias")) else {name: stack}
        ).items():
            pairs = [(part, resolver.packing(part)) for part in piece.parts] if name in matrices else []
            if name in kept:
                packings[piece_name] = kept[name]
                result |= _packed_stacks(piece_name, piece, pairs, resolver, checks)
            elif any(packing is not None for _, packing in pairs):
                parts = tuple(
                    part if packing is None else plain_part(stored, packing, resolver, checks[id(packing)])
                    for (part, packing), stored in zip(pairs, _in_file_order(piece, turned and not kept), strict=True)
                )
                result[piece_name] = dataclasses.replace(piece, parts=parts, dtype=dtype)
            else:
                result[piece_name] = piece
    read = {part.tensor for stack in result.values() for part in stack.parts}
    resolver.refuse_unread(read)
    return Layout(architecture, result, packings, scheme, notes, matrices, input_scales)


def _in_file_order(stack: Stack, in_out: bool) -> tuple[Part, ...]:
    """The parts with the axes [out, in]: the order of every producer's quantised matrices."""
    if not in_out:
        return stack.parts
    return tuple(
        part
        if part.is_turned
        else dataclasses.replace(part, shape=(*part.shape[:-2], part.shape[-1], part.shape[-2]), decode=turn)
        for part in stack.parts
    )


def _is_turned(stack: Stack, gguf: bool) -> bool:
    return all(part.is_turned and (gguf or len(part.shape) == 2) for part in stack.parts)


def _kept(
    matrices: Mapping[str, tuple[tuple[Part, Packing | None], ...]],
) -> tuple[dict[str, Packing], tuple[str, ...]]:
    """(the weights that stay quantised, notes): all experts in one format or none."""
    kept: dict[str, Packing] = {}
    notes: dict[str, None] = {}
    for fields in (_EXPERTS, _SHARED):
        pairs = [pair for name in fields for pair in matrices.get(name, ())]
        quantized = [(part, packing) for part, packing in pairs if packing is not None]
        if not quantized or (fields is _SHARED and not kept):
            continue
        part, packing = quantized[0]
        foreign = next((one for one in quantized if one[1].plain is not None), None)
        other = next((one for one in pairs if _differs(one[1], packing)), None)
        what = "experts" if fields is _EXPERTS else "shared experts"
        if other is not None:
            notes[
                f"{what} are dequantised, because kernels take all matrices in one format: {_module(part)} is stored "
                f"as {packing}, {_module(other[0])} as {other[1] or 'plain numbers'}"
            ] = None
        elif foreign is not None:
            notes[f"{what} are dequantised: no kernel takes {foreign[1]}, as {_module(foreign[0])} is stored"] = None
        else:
            kept |= {name: matrices[name][0][1] for name in fields if name in matrices}  # type: ignore[misc]
        notes |= {f"{what}: {note}": None for one in quantized for note in one[1].notes}
    return kept, tuple(notes)


def _differs(one: Packing | None, other: Packing) -> bool:
    if one is None or (one.plain is None) != (other.plain is None):
        return True
    return one.plain is None and (one.scheme, one.static) != (other.scheme, other.static)


def _module(part: Part) -> str:
    return module_of(part.tensor)[0]


def _plain_dtype(
    matrices: Mapping[str, tuple[tuple[Part, Packing | None], ...]], reader: StackReader, dtype: str | None
) -> str:
    """The dtype of plain experts or shared experts, else config.json's, else bfloat16."""
    plain = [part for name in (*_EXPERTS, *_SHARED) for part, packing in matrices.get(name, ()) if packing is None]
    stored = FLOATING.get(reader.stored_dtype(plain[0].tensor)) if plain else None
    return stored or (dtype if dtype is not None and dtype in FLOATING.values() else "bfloat16")


def _input_scales(
    stacks: Mapping[str, Stack], kept: Mapping[str, Packing], index: TensorIndex
) -> dict[str, tuple[str, ...]]:
    if not kept["experts.gate_up"].static:
        return {}
    return {
        f"{name}_input_scale": tuple(f"{_module(part)}.input_scale" for part in stacks[name].parts)
        for name in _EXPERTS
    }  # fmt: skip


def read_input_scales(layout: Layout, reader: StackReader, index: TensorIndex, allow: bool) -> dict[str, np.ndarray]:
    """field -> fp32 `[1]`: the largest of all experts, as vLLM and SGLang take it."""
    result = {}
    for name, tensors in layout.input_scales.items():
        numbers = []
        for tensor in tensors:
            stored = reader.tensor(tensor)
            if stored.get_dtype() not in FLOATING or any(size != 1 for size in stored.get_shape()):
                raise InvalidInput(
                    f"{tensor} in {index.files[tensor]} must be one number, got {stored.get_dtype()} "
                    f"{stored.get_shape()}; download the checkpoint again"
                )
            numbers.append(stored[:].astype(np.float32).reshape(-1)[0])
        scales = np.array(numbers, np.float32)
        if not allow and not (np.isfinite(scales).all() and (scales > 0).all()):
            bad = int(np.flatnonzero(~(np.isfinite(scales) & (scales > 0)))[0])
            raise InvalidInput(
                f"{tensors[bad]} in {index.files[tensors[bad]]} must be a finite scale above 0, got {scales[bad]}; "
                "quantise the checkpoint again, or pass allow_bad_scales=True"
            )
        result[name] = scales.max(keepdims=True)
    return result


def _quantized_architecture(
    architecture: Architecture, stacks: Mapping[str, Stack], kept: Mapping[str, Packing]
) -> tuple[Architecture, bool, bool]:
    """(the architecture with the layouts of its quantised weights, gate and up apart?, shared experts plain?). All are
    `out_in`. gate_layout is `separate` if a group of the format would hold rows of gate and up."""
    spec = dataclasses.replace(architecture.spec, weight_layout="out_in")
    gate_ups = {name: stack for name, stack in stacks.items() if name.endswith(".gate_up")}
    divided = {n: one for n, one in gate_ups.items() if any(isinstance(at, slice) for at in one.parts[0].place)}

    def splits(name: str) -> bool:
        return kept[name].format.splits_rows(stacks[name].parts[0].shape[-2])

    if all(splits(name) for name in divided if name in kept):
        return dataclasses.replace(architecture, spec=spec), False, False
    if "experts.gate_up" in divided and len(divided) == len(gate_ups):
        return dataclasses.replace(architecture, spec=spec.with_gate_layout("separate")), True, False
    if "experts.gate_up" not in divided or splits("experts.gate_up"):
        # Only the shared experts would need gate and up apart.
        return dataclasses.replace(architecture, spec=spec), False, True
    raise Unsupported(
        f"the experts' width must be a multiple of {kept['experts.gate_up'].format.group_rows} beside shared experts "
        f"whose gate and up are one tensor, got {architecture.d_ff}; dequantise the checkpoint to bfloat16 first"
    )


def _apart(name: str, stack: Stack) -> dict[str, Stack]:
    halves: dict[str, list[Part]] = {name: [], name.replace("gate_up", "up"): []}
    for part in stack.parts:
        *lead, rows = part.place
        assert isinstance(rows, slice)
        field = name if rows.start == 0 else name.replace("gate_up", "up")
        halves[field].append(dataclasses.replace(part, place=tuple(lead)))
    return {
        field: dataclasses.replace(
            stack, shape=(*stack.shape[: -len(parts[0].shape)], *parts[0].shape), parts=tuple(parts)
        )
        for field, parts in halves.items()
    }


def _packed_stacks(
    name: str, stack: Stack, pairs: Iterable[tuple[Part, Packing | None]], resolver: Resolver, checks: Mapping[int, Any]
) -> dict[str, Stack]:
    """The stacks of a quantised weight's arrays: `experts.down.values`."""
    parts: dict[str, list[Part]] = {}
    format, described = None, dict[str, str | None]()
    for part, packing in pairs:
        assert packing is not None
        format = packing.format
        for component in packing.components:
            tensor = resolver.component(part, packing, component, checks[id(packing)])
            assert tensor is not None
            described[component.field] = component.dtype
            place = tuple(_scaled(index, format, component.field) for index in part.place)
            parts.setdefault(component.field, []).append(dataclasses.replace(tensor, place=place))
    assert format is not None
    shapes = quantized_shapes(QuantizedSpec(format), stack.shape)
    stacks = {}
    for field_name, made in parts.items():
        dtypes_of = format.scale_dtypes if field_name == "scales" else (format.own_element.dtype,)
        dtype = described.get(field_name) or (dtypes_of[0] if len(dtypes_of) == 1 else None)
        stacks[f"{name}.{field_name}"] = Stack(getattr(shapes, field_name), tuple(made), dtype)
    return stacks


def _scaled(place: int | slice, format: Format, field: str) -> int | slice:
    if isinstance(place, int) or place == slice(None):
        return place
    per_row = {"values": 1, "scales": format.group_rows or 1, "zero_points": format.own_element.per_byte}[field]
    return slice(place.start // per_row, place.stop // per_row)


def assemble(arrays: Mapping[str, np.ndarray], packings: Mapping[str, Packing]) -> dict[str, Any]:
    """The arrays of a layer, each quantised weight as one QuantizedTensor."""
    fields: dict[str, Any] = {name: array for name, array in arrays.items() if not name.endswith(ARRAYS)}
    for name, packing in packings.items():
        parts = (arrays.get(name + ending) for ending in ARRAYS)
        fields[name] = QuantizedTensor(QuantizedSpec(packing.format), *parts)
    return fields


def plain_bundle(bundle: Any, dtype: str, which: Callable[[str, Any], bool] = lambda name, array: True) -> Any:
    """A bundle with the fields that `which` selects as plain arrays in `dtype`."""

    def plain(array: Any) -> np.ndarray:
        if isinstance(array, QuantizedTensor):
            return dequantize(array, dtype)
        return array.astype(dtypes.numpy_dtype(dtype), copy=False)

    fields = {name: plain(array) for name, array in named_fields(bundle) if which(name, array)}
    return dataclasses.replace(bundle, **fields)
