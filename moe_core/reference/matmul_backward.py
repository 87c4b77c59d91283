"""NumPy twin of the grouped matmul's backward, as an op of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from moe_core import dtypes
from moe_core.formats import QuantizedSpec
from moe_core.reference.backward_matmul import bias_gradient, input_gradient, weight_gradient
from moe_core.reference.matmul import Matrix, matmul_ogs, pick_layer, quantized_from
from moe_core.reference.reduction import reduce, scale_rows
from moe_core.reference.rounding import round_to, to_float32
from moe_core.specs import LayoutSpec, MatmulSpec


def matmul_ogs_backward(
    *, tensors: tuple[tuple[str, QuantizedSpec], ...] = (), **arguments: Any
) -> tuple[np.ndarray, ...]:
    """`gradients_of` of a plan's inputs by name; tensors: quantised ones, see `quantized_from`."""
    return gradients_of(**quantized_from(arguments, tensors))


def gradients_of(
    d_y: np.ndarray,
    x: np.ndarray,
    weight: Matrix,
    bias: np.ndarray | None = None,
    row_weight: np.ndarray | None = None,
    layer: np.ndarray | None = None,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
    row_of_slot: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    wanted: tuple[str, ...],
) -> tuple[np.ndarray, ...]:
    """The gradients wanted of d_x, d_weight, d_bias, d_row_weight; formulas, roundings: `moe_core.matmul_backward`."""
    found = {}
    g = round_to(to_float32(d_y), x.dtype)
    groups = {"group_sizes": group_sizes, "group_start": group_start, "slot_of_row": slot_of_row}
    if "d_row_weight" in wanted:
        assert row_weight is not None and row_of_slot is not None
        unrounded = dataclasses.replace(spec, scatter="row", out_dtype="float32", tuning=None)
        rows = matmul_ogs(x, weight, **groups, bias=bias, layer=layer, layout=layout, spec=unrounded)
        found["d_row_weight"] = _rows_product(rows, g, row_of_slot).reshape(row_weight.shape)
    if row_weight is not None:
        g = scale_rows(g, row_weight.reshape(-1, 1))
    if "d_x" in wanted:
        scatter = "row" if spec.gather == "token" else spec.gather
        options = MatmulSpec(spec.weight_layout, spec.scatter, scatter, allow_tf32=spec.allow_tf32)
        found["d_x"] = input_gradient(g, weight, **groups, layer=layer, layout=layout, spec=options)
        if spec.gather == "token":
            assert layout is not None and row_of_slot is not None
            dtype = dtypes.canonical(x.dtype)
            found["d_x"] = reduce(found["d_x"], row_of_slot, top_k=layout.top_k, order="row", out_dtype=dtype)
    if "d_weight" in wanted:
        assert isinstance(weight, np.ndarray)
        (left, of_left), (right, of_right) = (x, spec.gather), (g, spec.scatter)
        if spec.weight_layout == "out_in":
            (left, of_left), (right, of_right) = (right, of_right), (left, of_left)
        dtype = dtypes.canonical(weight.dtype)
        d_weight = weight_gradient(left, right, **groups, layout=layout, gather=(of_left, of_right), out_dtype=dtype)
        found["d_weight"] = _in_stack(d_weight, weight, layer)
    if "d_bias" in wanted:
        assert bias is not None
        found["d_bias"] = _in_stack(_bias(g, bias, groups, layout, spec), bias, layer)
    return tuple(found[name] for name in wanted)


def _bias(
    g: np.ndarray, bias: np.ndarray, groups: dict[str, np.ndarray | None], layout: LayoutSpec | None, spec: MatmulSpec
) -> np.ndarray:
    if layout is None:
        with np.errstate(all="ignore"):
            return round_to(to_float32(g).sum(axis=0, dtype=np.float32), bias.dtype)
    given = {name: array for name, array in groups.items() if array is not None}
    return bias_gradient(g, **given, layout=layout, gather=spec.scatter, out_dtype=dtypes.canonical(bias.dtype))


def _rows_product(rows: np.ndarray, g: np.ndarray, row_of_slot: np.ndarray) -> np.ndarray:
    """fp32 by slot: the slot's row of `rows` times its row of g; 0 without a row."""
    products = np.zeros(len(row_of_slot), np.float32)
    slots = np.flatnonzero(row_of_slot >= 0)
    with np.errstate(all="ignore"):
        products[slots] = (rows[row_of_slot[slots]] * to_float32(g[slots])).sum(axis=1, dtype=np.float32)
    return products


def _in_stack(gradient: np.ndarray, array: np.ndarray, layer: np.ndarray | None) -> np.ndarray:
    """Zeros for the layers of a stack that were not used; a layer outside the stack raises InvalidInput."""
    if layer is None:
        return gradient
    pick_layer(array, layer)
    whole = np.zeros(array.shape, gradient.dtype)
    whole[int(layer[0])] = gradient
    return whole
