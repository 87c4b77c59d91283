"""NumPy twin of the ragged grouped matmul: a loop over experts, one fp32 BLAS product each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.ops.activation.reference import apply, split
from moe_core.ops.common.product import product
from moe_core.ops.common.rounding import round_to, to_float32
from moe_core.ops.matmul.reference.quantized import quantized_product
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import map_arrays
from moe_core.specs.routing import LayoutSpec

Matrix = np.ndarray | QuantizedTensor


def pick(array: Any, index: int) -> Any:
    """`array[index]` of an array, or of every array of a quantised tensor."""
    return map_arrays(array, lambda part: part[index]) if isinstance(array, QuantizedTensor) else array[index]


def pick_layer(array: Any, layer_index: np.ndarray | None) -> Any:
    """`array[layer_index[0]]`, or `array` where there is no layer axis; a layer outside the array raises InvalidInput.

    array: None, an array or a quantised tensor.
    """
    if array is None or layer_index is None:
        return array
    index, count = int(layer_index[0]), array.shape[0]
    if not 0 <= index < count:
        raise InvalidInput(f"layer_index must be in [0, {count}), got {index}; pass the index of a stacked layer")
    return pick(array, index)


def rows_of_experts(
    layout: LayoutSpec | None,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every expert that has rows, and their indices in layout order, by how an array is indexed (`row`, `slot` or
    `token`). layout None: one, with all rows."""
    if layout is None:
        yield 0, dict.fromkeys(("row", "slot", "token"), slice(None))
        return
    assert group_sizes is not None and group_start is not None and slot_of_row is not None
    for expert in np.flatnonzero(group_sizes).tolist():
        rows = np.arange(group_start[expert], group_start[expert] + group_sizes[expert])
        slots = slot_of_row[rows]
        rows, slots = rows[slots >= 0], slots[slots >= 0]
        yield expert, {"row": rows, "slot": slots, "token": slots // layout.top_k}


def _rows(x: Matrix, rows: np.ndarray) -> Matrix:
    """Rows of x; a scale of all rows stays what it is."""
    if isinstance(x, QuantizedTensor):
        scales = x.scales if x.format.group_rows is None else x.scales[rows]
        return QuantizedTensor(x.spec, x.values[rows], scales)
    return x[rows]


def _with_bias(x: Matrix, weight: Matrix, bias: np.ndarray | None, spec: MatmulSpec) -> np.ndarray:
    invariant = spec.tuning is not None and spec.tuning.batch_invariant
    if isinstance(weight, QuantizedTensor):
        result = quantized_product(x, weight, invariant)
    elif isinstance(x, QuantizedTensor):
        raise InvalidInput(f"weight must be quantised where x is, got a plain one beside {x}; quantise it")
    else:
        result = product(x, weight, spec.weight_layout, invariant)
    return result if bias is None else result + to_float32(bias)


def _out_dtype(x: Matrix, spec: MatmulSpec) -> np.dtype:
    if spec.out_dtype is not None:
        return dtypes.numpy_dtype(spec.out_dtype)
    if isinstance(x, QuantizedTensor):
        raise InvalidInput(
            "spec.out_dtype must be given where x is quantised, got None; pass MatmulSpec(out_dtype=...)"
        )
    return x.dtype


def _epilogue(x: Matrix, weights: tuple[Any, ...], row_weight: np.ndarray | None, spec: MatmulSpec) -> np.ndarray:
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
    x: Matrix,
    weight: Matrix,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
    up: Matrix | None = None,
    bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    row_weight: np.ndarray | None = None,
    layer_index: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
) -> np.ndarray:
    """y of `moe_core.ops.matmul.forward.plan_matmul_ogs`; rows without an expert are exact zeros.

    allow_tf32 and fast_accumulate permit less, so nothing changes here: sums are always IEEE fp32. A quantised x needs
    spec.out_dtype.
    """
    weights = tuple(pick_layer(array, layer_index) for array in (weight, up, bias, up_bias))
    out_dtype = _out_dtype(x, spec)
    if layout is None:
        return round_to(_epilogue(x, weights, row_weight, spec), out_dtype)
    assert weights[0] is not None
    width = weights[0].shape[-1 if spec.weight_layout == "in_out" else -2]
    if spec.activation is not None and spec.activation.gated and up is None:
        width //= 2
    num_rows = layout.capacity if spec.scatter == "row" else layout.num_slots
    row_weight = None if row_weight is None else row_weight.reshape(-1)
    y = np.zeros((num_rows, width), out_dtype)
    for expert, index in rows_of_experts(layout, group_sizes, group_start, slot_of_row):
        own = tuple(None if array is None else pick(array, expert) for array in weights)
        weighting = None if row_weight is None else row_weight[index["slot"]]
        y[index[spec.scatter]] = round_to(_epilogue(_rows(x, index[spec.gather]), own, weighting, spec), out_dtype)
    return y


def quantized_from(arrays: dict[str, np.ndarray], tensors: tuple[tuple[str, QuantizedSpec], ...]) -> dict[str, Any]:
    """Arrays by the names of a plan's inputs, those of quantised tensors (`weight.values`, `weight.scales`, ...) put
    together. tensors: (name, what its arrays mean) of each."""
    parts, rest = ("values", "scales", "zero_points"), dict(arrays)
    built = {
        name: QuantizedTensor(meaning, *(rest.pop(f"{name}.{part}", None) for part in parts))
        for name, meaning in tensors
    }
    return rest | built


def matmul_ogs_quantized(
    *, tensors: tuple[tuple[str, QuantizedSpec], ...], outputs: tuple[str, ...] = ("y",), **arguments: Any
) -> np.ndarray | tuple[np.ndarray, ...]:
    """`matmul_ogs`, or with other outputs `matmul_ogs_keeping`, whose quantised operands come as their arrays: see
    `quantized_from`."""
    arguments = quantized_from(arguments, tensors)
    return matmul_ogs(**arguments) if outputs == ("y",) else matmul_ogs_keeping(**arguments, outputs=outputs)


def matmul_ogs_keeping(
    x: np.ndarray,
    weight: Matrix,
    up: Matrix | None = None,
    bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    *,
    spec: MatmulSpec,
    outputs: tuple[str, ...],
    **where: Any,
) -> tuple[np.ndarray, ...]:
    """What outputs names of y, as `matmul_ogs` has it, and pre: what the activation is applied to, cast to the dtype of
    x, `[*, 2N]` (ungated N); gate_layout `separate`: gate columns, then up. where: its layout, with arrays, and
    layer_index."""
    assert spec.activation is not None
    wide = dataclasses.replace(spec, activation=None, out_dtype="float32")
    pre = matmul_ogs(x, weight, bias=bias, spec=wide, **where)
    if up is not None:
        second = matmul_ogs(x, up, bias=up_bias, spec=wide, **where)
    gate_values, up_values = split(pre, spec.activation) if up is None else (pre, second)
    with np.errstate(all="ignore"):
        y = apply(gate_values, up_values, spec.activation)
    out_dtype = x.dtype if spec.out_dtype is None else dtypes.numpy_dtype(spec.out_dtype)
    whole = pre if up is None else np.concatenate([pre, second], axis=1)
    found = {"y": round_to(y, out_dtype), "pre": round_to(whole, x.dtype)}
    return tuple(found[name] for name in outputs)
