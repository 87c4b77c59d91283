"""Experts in the storage of plain files, of all in one tensor or one by one, and in gpt-oss's mxfp4."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.checkpoint.convert.source import LayerSource, Matrix
from moe_core.checkpoint.convert.stream import HEADERS, TensorPlan, Unit
from moe_core.checkpoint.convert.target import Target
from moe_core.checkpoint.resolve import module_of
from moe_core.checkpoint.stacks import LayerNames, layer_stacks
from moe_core.checkpoint.storage import Part, turn
from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.layers.convert import gate_place
from moe_core.ops.quantize.reference import dequantize
from moe_core.specs import named_arrays

_Checked = Callable[[str, Matrix], Matrix]
_Made = Callable[[int, str, Matrix, Matrix], None]


def whole_units(target: Target, layer: LayerSource, checked: _Checked, made: _Made) -> Iterator[Unit]:
    """The tensors of a layer's experts. checked: a matrix before, made: a matrix before and after."""
    stacks = layer_stacks(target.architecture, _names(target, layer))
    for field in ("gate_up", "down"):
        for part in stacks[f"experts.{field}"].parts:
            if target.interleaved:
                yield _blocks(target, layer, field, part.tensor, checked, made)
            else:
                yield _plain(target, layer, field, part, checked, made)
        bias = stacks.get(f"experts.{field}_bias")
        for part in bias.parts if bias is not None else ():
            yield _bias(target, layer, field, part, checked)


def _names(target: Target, layer: LayerSource) -> LayerNames:
    """The source's names. Families without plain experts one by one have fused ones."""
    names, naming = layer.names, target.architecture.naming
    if names.fused is not None:
        return names
    if naming.per_expert is not None:
        return dataclasses.replace(names, modules=naming.per_expert)
    return dataclasses.replace(names, fused=tuple(names.block + name for name in naming.fused[-1]))


def _plain(target: Target, layer: LayerSource, field: str, part: Part, checked: _Checked, made: _Made) -> Unit:
    spec, dtype = target.architecture.spec, dtypes.numpy_dtype(target.dtype)
    lead = part.place[:1] if part.place and isinstance(part.place[0], int) else ()
    experts = [int(lead[0])] if lead and isinstance(lead[0], int) else range(target.architecture.num_experts)
    halves = [one for one in part.place if isinstance(one, slice) and one != slice(None)]
    wanted = ("down",) if field == "down" else ("gate", "up") if spec.activation.gated else ("up",)
    wanted = (wanted[int(halves[0].start > 0)],) if halves else wanted

    def pieces() -> Iterator[np.ndarray]:
        for expert in experts:
            matrices = layer.matrices(expert, wanted)
            arrays = []
            for name in wanted:
                matrix = checked(part.tensor, matrices[name])
                plain = (
                    dequantize(matrix, target.dtype) if isinstance(matrix, QuantizedTensor) else matrix.astype(dtype)
                )
                made(layer.layer, name, matrix, plain)
                arrays.append(plain)
            array = _joined(arrays, spec.activation.gate_layout)
            array = turn(array) if spec.weight_layout == "in_out" else array
            yield array[None] if part.encode is None else part.encode(array[None])

    return Unit((TensorPlan(part.tensor, HEADERS[dtype.name], part.shape),), pieces)


def _blocks(target: Target, layer: LayerSource, field: str, tensor: str, checked: _Checked, made: _Made) -> Unit:
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

    def pieces() -> Iterator[np.ndarray]:
        scales = []
        for expert in range(count):
            matrices = {name: checked(tensor, one) for name, one in layer.matrices(expert, wanted).items()}
            made_of = {name: target.quantized(matrix) for name, matrix in matrices.items()}
            for name, matrix in matrices.items():
                made(layer.layer, name, matrix, made_of[name])
            parts = [dict(named_arrays(made_of[name])) for name in wanted]
            joined = {key: _joined([part[key] for part in parts], "interleaved") for key in parts[0]}
            whole = QuantizedTensor(QuantizedSpec(format), **joined)
            arrays = [array for _, array in packing.tensors("", whole, True)]
            yield arrays[0]
            scales.append(arrays[1])
        yield np.stack(scales)

    return Unit(tuple(plans), pieces)


def _bias(target: Target, layer: LayerSource, field: str, part: Part, checked: _Checked) -> Unit:
    names = ("down",) if field == "down" else ("gate", "up")
    dtype = layer.biases(None)["down"].dtype
    if target.packing is None and dtype.name == layer.dtype:
        dtype = dtypes.numpy_dtype(target.dtype)

    def pieces() -> Iterator[np.ndarray]:
        for expert in range(target.architecture.num_experts):
            biases = layer.biases(expert)
            arrays = [checked(part.tensor, biases[name]) for name in names]
            yield _joined(arrays, target.architecture.spec.activation.gate_layout).astype(dtype)

    return Unit((TensorPlan(part.tensor, HEADERS[dtype.name], part.shape),), pieces)


def _joined(arrays: list[Any], gate_layout: str | None) -> Any:
    """gate and up in one array of twice as many rows."""
    if len(arrays) == 1:
        return arrays[0]
    if gate_layout != "interleaved":
        return np.concatenate(arrays)
    both = np.empty((2 * len(arrays[0]), *arrays[0].shape[1:]), arrays[0].dtype)
    for is_up, array in enumerate(arrays):
        both[gate_place("interleaved", bool(is_up), len(array))] = array
    return both
