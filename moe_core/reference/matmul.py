"""NumPy twin of the ragged grouped matmul: a loop over experts, one fp32 BLAS product each."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_core import dtypes
from moe_core.errors import InvalidInput
from moe_core.reference.activation import apply, split
from moe_core.reference.rounding import round_to, to_float32
from moe_core.specs import LayoutSpec, MatmulSpec


def pick_layer(array: np.ndarray | None, layer: np.ndarray | None) -> np.ndarray | None:
    """`array[layer[0]]`, or `array` where there is no layer axis; a layer outside the array raises InvalidInput."""
    if array is None or layer is None:
        return array
    index = int(layer[0])
    if not 0 <= index < len(array):
        raise InvalidInput(f"layer must be in [0, {len(array)}), got {index}; pass the index of a stacked layer")
    return array[index]


def product(x: np.ndarray, weight: np.ndarray, weight_layout: str, batch_invariant: bool) -> np.ndarray:
    """fp32 `[R, N]` = x `[R, D]` . weight. batch_invariant: row by row, because the order of BLAS depends on R."""
    matrix, rows = to_float32(weight), to_float32(x)
    matrix = matrix if weight_layout == "in_out" else matrix.T
    return np.matmul(rows[:, None, :], matrix)[:, 0, :] if batch_invariant else rows @ matrix


def _with_bias(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, spec: MatmulSpec) -> np.ndarray:
    invariant = spec.tuning is not None and spec.tuning.batch_invariant
    result = product(x, weight, spec.weight_layout, invariant)
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
        result = _with_bias(x, weight, bias, spec)
        if spec.activation is not None:
            if up is None:
                gate_values, up_values = split(result, spec.activation)
            else:
                gate_values, up_values = result, _with_bias(x, up, up_bias, spec)
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
    weights = tuple(pick_layer(array, layer) for array in (weight, up, bias, up_bias))
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


def matmul_ogs_keeping(
    x: np.ndarray,
    weight: np.ndarray,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
    up: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    layer: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    outputs: tuple[str, ...],
) -> tuple[np.ndarray, ...]:
    """What outputs names of y, as `matmul_ogs` has it, and pre: what the activation is applied to, cast to the dtype of
    x, `[*, 2N]` (ungated N); gate_layout `separate`: gate columns, then up."""
    assert spec.activation is not None
    wide = dataclasses.replace(spec, activation=None, out_dtype="float32")
    groups = (group_sizes, group_start, slot_of_row)
    pre = matmul_ogs(x, weight, *groups, bias=bias, layer=layer, layout=layout, spec=wide)
    if up is not None:
        second = matmul_ogs(x, up, *groups, bias=up_bias, layer=layer, layout=layout, spec=wide)
    gate_values, up_values = split(pre, spec.activation) if up is None else (pre, second)
    with np.errstate(all="ignore"):
        y = apply(gate_values, up_values, spec.activation)
    out_dtype = x.dtype if spec.out_dtype is None else dtypes.numpy_dtype(spec.out_dtype)
    whole = pre if up is None else np.concatenate([pre, second], axis=1)
    found = {"y": round_to(y, out_dtype), "pre": round_to(whole, x.dtype)}
    return tuple(found[name] for name in outputs)
