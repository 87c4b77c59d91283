"""NumPy twin of the ragged grouped matmul: a loop over experts, one fp32 BLAS product each."""

from __future__ import annotations

import numpy as np

from moe_core import dtypes
from moe_core.errors import InvalidInput
from moe_core.reference.activation import apply, split
from moe_core.reference.rounding import round_to, to_float32
from moe_core.specs import LayoutSpec, MatmulSpec


def _pick_layer(array: np.ndarray | None, layer: np.ndarray | None) -> np.ndarray | None:
    """`array[layer[0]]`, or `array` where there is no layer axis; a layer outside the array raises InvalidInput."""
    if array is None or layer is None:
        return array
    index = int(layer[0])
    if not 0 <= index < len(array):
        raise InvalidInput(f"layer must be in [0, {len(array)}), got {index}; pass the index of a stacked layer")
    return array[index]


def _product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, weight_layout: str) -> np.ndarray:
    """fp32 `[R, N]` = x `[R, D]` . weight (+ bias `[N]`)."""
    matrix = to_float32(weight)
    result = to_float32(x) @ (matrix if weight_layout == "in_out" else matrix.T)
    return result if bias is None else result + to_float32(bias)


def _epilogue(
    x: np.ndarray,
    weights: tuple[np.ndarray | None, ...],
    row_weight: np.ndarray | None,
    spec: MatmulSpec,
) -> np.ndarray:
    """fp32 rows of one expert: product -> + bias -> activation -> x row weight. weights: weight, up, bias, up_bias."""
    weight, up, bias, up_bias = weights
    assert weight is not None
    with np.errstate(all="ignore"):
        result = _product(x, weight, bias, spec.weight_layout)
        if spec.activation is not None:
            if up is None:
                gate_values, up_values = split(result, spec.activation)
            else:
                gate_values, up_values = result, _product(x, up, up_bias, spec.weight_layout)
            result = apply(gate_values, up_values, spec.activation)
        return result if row_weight is None else result * row_weight[:, None]


def matmul_ogs(
    x: np.ndarray,
    weight: np.ndarray,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
    up: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    row_weight: np.ndarray | None = None,
    layer: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
) -> np.ndarray:
    """y[row] = cast(row_weight[slot] * activation(x[source] @ weight[expert] + bias[expert])).

    Shapes as in `moe_core.operands.MatmulOperands`; y is `[capacity, N]` (scatter `row`) or `[T * K, N]` (`slot`), rows
    without an expert exact zeros. layout None: dense, x `[T, D]`, weight `[D, N]`, bias `[N]`, row_weight `[T]`.
    allow_tf32 permits less, so nothing changes here: products are always IEEE fp32.
    """
    weights = tuple(_pick_layer(array, layer) for array in (weight, up, bias, up_bias))
    out_dtype = x.dtype if spec.out_dtype is None else dtypes.numpy_dtype(spec.out_dtype)
    if layout is None:
        return round_to(_epilogue(x, weights, row_weight, spec), out_dtype)
    assert group_sizes is not None and group_start is not None and slot_of_row is not None and weights[0] is not None
    width = weights[0].shape[-1 if spec.weight_layout == "in_out" else -2]
    if spec.activation is not None and spec.activation.gated and up is None:
        width //= 2
    num_rows = layout.capacity if spec.scatter == "row" else layout.num_slots
    row_weight = None if row_weight is None else row_weight.reshape(-1)
    y = np.zeros((num_rows, width), out_dtype)
    for expert in np.flatnonzero(group_sizes):
        rows = np.arange(group_start[expert], group_start[expert] + group_sizes[expert])
        slots = slot_of_row[rows]
        rows, slots = rows[slots >= 0], slots[slots >= 0]
        source = {"row": rows, "slot": slots, "token": slots // layout.top_k}[spec.gather]
        own = tuple(None if array is None else array[expert] for array in weights)
        values = _epilogue(x[source], own, None if row_weight is None else row_weight[slots], spec)
        y[rows if spec.scatter == "row" else slots] = round_to(values, out_dtype)
    return y
