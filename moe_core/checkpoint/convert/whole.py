"""Experts in the storage of plain files, of all in one tensor or one by one, and in gpt-oss's mxfp4."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.checkpoint.convert.source import LayerSource, Matrix, cast
from moe_core.checkpoint.convert.stream import HEADERS, Job, Made, TensorPlan, Unit
from moe_core.checkpoint.convert.target import Target
from moe_core.checkpoint.resolve import module_of
from moe_core.checkpoint.stacks import LayerNames, layer_stacks
from moe_core.checkpoint.storage import Part, turn
from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.layers.convert import gate_place
from moe_core.ops.quantize.reference import dequantize
from moe_core.specs import named_arrays

_Counted = Callable[[str, Matrix], Callable[[], None]]
_Compared = Callable[[int, str, Matrix, Matrix], Callable[[], None]]


def whole_units(target: Target, layer: LayerSource, counted: _Counted, compared: _Compared) -> Iterator[Unit]:
    """The tensors of a layer's experts, a job for each. counted, compared: see matrices before, before and after."""
    stacks = layer_stacks(target.architecture, _names(target, layer))
    for field in ("gate_up", "down"):
        for part in stacks[f"experts.{field}"].parts:
            if target.interleaved:
                yield _blocks(target, layer, field, part.tensor, counted, compared)
            else:
                yield _plain(target, layer, field, part, counted, compared)
        bias = stacks.get(f"experts.{field}_bias")
        for part in bias.parts if bias is not None else ():
            yield _bias(target, layer, field, part, counted)


def _names(target: Target, layer: LayerSource) -> LayerNames:
    """The source's names. Families without plain experts one by one have fused ones."""
    names, naming = layer.names, target.architecture.naming
    if names.fused is not None:
        return names
    if naming.per_expert is not None:
        return dataclasses.replace(names, modules=naming.per_expert)
    return dataclasses.replace(names, fused=tuple(names.block + name for name in naming.fused[-1]))


def _plain(target: Target, layer: LayerSource, field: str, part: Part, counted: _Counted, compared: _Compared) -> Unit:
    spec, dtype = target.architecture.spec, dtypes.numpy_dtype(target.dtype)
    lead = part.place[:1] if part.place and isinstance(part.place[0], int) else ()
    experts = [int(lead[0])] if lead and isinstance(lead[0], int) else range(target.architecture.num_experts)
    halves = [one for one in part.place if isinstance(one, slice) and one != slice(None)]
    wanted = ("down",) if field == "down" else ("gate", "up") if spec.activation.gated else ("up",)
    wanted = (wanted[int(halves[0].start > 0)],) if halves else wanted

    def make(expert: int) -> Made:
        matrices, settle = layer.matrices(expert, wanted), []
        for name in wanted:
            matrix = matrices[name]
            settle.append(counted(part.tensor, matrix))
            is_plain = not isinstance(matrix, QuantizedTensor)
            plain = cast(matrix, target.dtype) if is_plain else dequantize(matrix, target.dtype)
            settle.append(compared(layer.layer, name, matrix, plain))
            matrices[name] = plain
        array = _joined([matrices[name] for name in wanted], spec.activation.gate_layout)
        array = turn(array) if spec.weight_layout == "in_out" else array
        return Made([array[None] if part.encode is None else part.encode(array[None])], settle)

    plan = TensorPlan(part.tensor, HEADERS[dtype.name], part.shape)
    return Unit((plan,), lambda: [partial(make, expert) for expert in experts], _work(target, layer, wanted))


def _work(target: Target, layer: LayerSource, wanted: tuple[str, ...]) -> int:
    shapes = target.shapes()
    return layer.work * sum(math.prod(shapes[name]) for name in wanted)


def _blocks(
    target: Target, layer: LayerSource, field: str, tensor: str, counted: _Counted, compared: _Compared
) -> Unit:
    """gpt-oss's mxfp4: scales are small, so they are kept while values are written."""
    packing, module = target.packing, module_of(tensor)[0]
    architecture, format = target.architecture, target.format
    assert packing is not None and format is not None
    wanted = ("down",) if field == "down" else ("gate", "up")
    count, shapes = architecture.num_experts, target.shapes()
    rows, columns = shapes[wanted[0]][0] * len(wanted), shapes[wanted[0]][1]
    plans = []
    for component in packing.components:
        assert component.file_shape is not None
        shape = (count, *component.file_shape(rows, columns))
        plans.append(TensorPlan(packing.tensor_name(module, component, True), "U8", shape))

    def jobs() -> list[Job]:
        scales = np.empty(plans[1].shape, np.uint8)

        def make(expert: int) -> Made:
            matrices, settle, parts = layer.matrices(expert, wanted), [], []
            for name in wanted:
                settle.append(counted(tensor, matrices[name]))
                result = target.quantized(matrices[name])
                settle.append(compared(layer.layer, name, matrices[name], result))
                parts.append(dict(named_arrays(result)))
            joined = {key: _joined([part[key] for part in parts], "interleaved") for key in parts[0]}
            whole = QuantizedTensor(QuantizedSpec(format), **joined)
            (_, values), (_, scales[expert]) = packing.tensors("", whole, True)
            return Made([values], settle)

        # They are written behind all others, when no job fills them any more.
        return [*(partial(make, expert) for expert in range(count)), lambda: Made([scales])]

    return Unit(tuple(plans), jobs, _work(target, layer, wanted))


def _bias(target: Target, layer: LayerSource, field: str, part: Part, counted: _Counted) -> Unit:
    names = ("down",) if field == "down" else ("gate", "up")
    dtype = layer.biases(None)["down"].dtype
    if target.packing is None and dtype.name == layer.dtype:
        dtype = dtypes.numpy_dtype(target.dtype)

    def make() -> Made:
        arrays, settle = [], []
        for expert in range(target.architecture.num_experts):
            biases = [layer.biases(expert)[name] for name in names]
            settle += [counted(part.tensor, bias) for bias in biases]
            arrays.append(_joined(biases, target.architecture.spec.activation.gate_layout).astype(dtype))
        return Made(arrays, settle)

    plan = TensorPlan(part.tensor, HEADERS[dtype.name], part.shape)
    return Unit((plan,), lambda: [make], layer.work * math.prod(part.shape))


def _joined(arrays: list[Any], gate_layout: str | None) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    if gate_layout != "interleaved":
        return np.concatenate(arrays)
    both = np.empty((2 * len(arrays[0]), *arrays[0].shape[1:]), arrays[0].dtype)
    for is_up, array in enumerate(arrays):
        both[gate_place("interleaved", bool(is_up), len(array))] = array
    return both
