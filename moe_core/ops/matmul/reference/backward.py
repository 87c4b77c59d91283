"""NumPy twins of the grouped matmul's backward: fp32 sums, one cast."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from moe_core.base import TRANSPOSED, dtypes
from moe_core.base.threads import Later, column_blocks, elements, products, spread, threads_for
from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.ops.common.bundles import bundle_of, quantized_from
from moe_core.ops.common.product import inner_operands
from moe_core.ops.common.rounding import plain_name, result_dtype, round_to, to_float32, working_dtype
from moe_core.ops.matmul.reference.forward import matmul_ogs, pick_layer
from moe_core.ops.matmul.reference.rows import Rows, dense_rows, planned_rows
from moe_core.ops.quantize.reference import dequantize
from moe_core.ops.reduction.reference import reduce, scale_rows
from moe_core.specs import LayoutSpec, MatmulOperands, MatmulSpec

#: Elements of a block of an outer product, which stays in the cache until it is cast.
_OUTER_ELEMENTS = 65536


def input_gradient(
    operands: MatmulOperands,
    spec: MatmulSpec,
    rows: Rows | None = None,
    *,
    places: tuple[np.ndarray, ...] = (),
    later: Later | None = None,
    then: Callable[[slice], None] | None = None,
) -> np.ndarray:
    """d_x = cast(d_y . weight[expert]^T) for every row of the layout (rows None: a dense product).

    operands, spec: as in `add_input_gradient`. Rows without an expert are exact zeros. Quantised weights become
    plain ones in the dtype of d_y. places, later, then: see `matmul_ogs`, for one weight and the fp32 sums.
    """
    d_y, layer_index = operands.x, operands.layer_index
    matrices = [operands.weight] if operands.up is None else [operands.weight, operands.up]
    if isinstance(operands.weight, QuantizedTensor):
        matrices = [dequantize(pick_layer(matrix, layer_index), dtypes.canonical(d_y.dtype)) for matrix in matrices]
        layer_index = None
    out_dtype = spec.out_dtype or plain_name(d_y)
    options = MatmulSpec(TRANSPOSED[spec.weight_layout], spec.gather, spec.scatter, None, "float32", spec.allow_tf32)
    sides = zip(np.split(d_y, len(matrices), axis=1), matrices, strict=True)
    if len(matrices) > 1 or result_dtype(out_dtype, d_y) != working_dtype(d_y):
        later = None
    products = [
        matmul_ogs(MatmulOperands(*side, layer_index=layer_index), options, rows, places=places, later=later, then=then)
        for side in sides
    ]
    with np.errstate(all="ignore"):
        return round_to(products[0] if len(products) == 1 else products[0] + products[1], out_dtype)


def input_gradient_plan(
    arrays: Mapping[str, np.ndarray],
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    tensors: tuple[tuple[str, QuantizedSpec], ...],
) -> np.ndarray:
    """`input_gradient` with the inputs of `plan_matmul_quantized_transposed` by name."""
    operands = bundle_of(MatmulOperands, quantized_from(arrays, tensors))
    return input_gradient(operands, spec, planned_rows(layout, arrays, len(operands.x)))


def weight_gradient(
    left: np.ndarray,
    right: np.ndarray,
    rows: Rows | None = None,
    *,
    gather: tuple[str, str] = ("row", "row"),
    out_dtype: str,
    into: np.ndarray | None = None,
    place: np.ndarray | None = None,
    later: Later | None = None,
) -> np.ndarray:
    """d_weight `[E, M, N]`: the fp32 product left_rows^T . right_rows over each expert's rows, one cast.

    gather: how left `[*, M]` and right `[*, N]` are indexed (`row`, `slot` or `token`). For `in_out` weights left is
    the matmul's input and right its output's gradient, for `out_in` the reverse. Experts without rows are exact zeros.
    into: added before the cast. place: memory of the result. rows None: dense, `[M, N]`.
    """
    rows = dense_rows(len(left)) if rows is None else rows
    layout = rows.layout
    num_experts, (num_columns, width) = 1 if layout is None else layout.num_experts, (left.shape[1], right.shape[1])
    added = None if into is None else into.reshape(num_experts, num_columns, width)
    result = place
    if result is None:
        shape = (num_columns, width) if layout is None else (num_experts, num_columns, width)
        result = np.empty(shape, result_dtype(out_dtype, left))
    d_weight = result.reshape(num_experts, num_columns, width)
    left, right = (to_float32(side[rows.index[by]]) for side, by in zip((left, right), gather, strict=True))
    parts = dict(rows.parts)

    def ready(expert: int, columns: slice) -> Callable[[], Any]:
        to, part = d_weight[expert, columns], parts.get(expert)
        if part is None:
            # Zeros of bf16 or fp16 take fifteen times as long to write as zeros of integers.
            plain = to.view(f"i{to.itemsize}") if added is None else to
            return functools.partial(plain.__setitem__, ..., 0 if added is None else added[expert, columns])
        sides = left[part, columns], right[part]
        if part.stop - part.start == 1:
            return functools.partial(outer, *sides, to, None if added is None else added[expert, columns])
        if added is None and to.dtype == left.dtype:
            return functools.partial(np.matmul, *inner_operands(*sides, to))
        return functools.partial(add, *sides, to, None if added is None else added[expert, columns])

    def outer(left: np.ndarray, right: np.ndarray, to: np.ndarray, added: np.ndarray | None) -> None:
        # np.matmul takes four times as long. Its sums begin at 0, so that no product is -0.
        step = max(1, _OUTER_ELEMENTS // max(right.size, 1))
        for block in (slice(first, first + step) for first in range(0, len(to), step)):
            direct = added is None and to.dtype == left.dtype
            product = np.multiply(left.T[block], right, out=to[block] if direct else None)
            product += 0
            if not direct:
                to[block] = product if added is None else to_float32(added[block]) + product

    def add(left: np.ndarray, right: np.ndarray, to: np.ndarray, added: np.ndarray | None) -> None:
        product = left.T @ right
        to[...] = product if added is None else to_float32(added) + product

    def run(calls: list[Callable[[], Any]]) -> None:
        for call in calls:
            call()

    size_of = {expert: part.stop - part.start for expert, part in rows.parts}
    by_rows = sorted(range(num_experts), key=lambda expert: -size_of.get(expert, 0))
    work = products(rows.count, num_columns, width) + elements(*d_weight.shape)
    blocks = column_blocks(num_columns)
    # Two threads that first write to one huge page clear it twice.
    parts_of_expert = [blocks] if num_experts >= threads_for(work) else [[columns] for columns in blocks]
    pieces = [(expert, [ready(expert, block) for block in part]) for expert in by_rows for part in parts_of_expert]
    if later is not None:
        later.add(run, pieces, work)
        return result
    with np.errstate(all="ignore"):
        spread(run, [calls for _, calls in pieces], work)
    return result


def bias_gradient(
    d_y: np.ndarray,
    rows: Rows | None = None,
    *,
    gather: str = "row",
    out_dtype: str,
    row_weight: np.ndarray | None = None,
) -> np.ndarray:
    """d_bias `[E, N]`: per expert the fp32 sum of its rows of d_y `[*, N]`, times row_weight fp32 `[T * K]`
    (unrounded), one cast. rows None: dense, `[N]`."""
    rows = dense_rows(len(d_y)) if rows is None else rows
    d_bias = np.zeros((1 if rows.layout is None else rows.layout.num_experts, d_y.shape[1]), working_dtype(d_y))
    with np.errstate(all="ignore"):
        values = to_float32(d_y[rows.index[gather]])
        if row_weight is not None:
            values = values * row_weight.reshape(-1)[rows.index["slot"], None]
        for expert, part in rows.parts:
            d_bias[expert] = values[part].sum(axis=0)
    return round_to(d_bias[0] if rows.layout is None else d_bias, out_dtype)


def bias_product(d_y: np.ndarray, bias: np.ndarray, rows: Rows, *, gather: str = "row") -> np.ndarray:
    """The bias's share of d_row_weight, fp32 `[T * K]` by slot: <d_y `[*, N]` row, bias[expert]>, or 0."""
    assert rows.layout is not None
    products = np.zeros(rows.layout.num_slots, working_dtype(d_y))
    with np.errstate(all="ignore"):
        for expert, part in rows.parts:
            products[rows.index["slot"][part]] = to_float32(d_y[rows.index[gather]][part]) @ to_float32(bias[expert])
    return products


class Trained(NamedTuple):
    """An array that gets a gradient. layer_index: of a stack. into: fp32, added. place: memory, unused for a stack."""

    array: np.ndarray
    layer_index: np.ndarray | None = None
    into: np.ndarray | None = None
    place: np.ndarray | None = None

    def in_stack(self, gradient: np.ndarray) -> np.ndarray:
        """The stack's gradient: zeros or `into` in other layers. Raises InvalidInput outside the stack."""
        if self.layer_index is None:
            return gradient
        pick_layer(self.array, self.layer_index)
        whole = np.zeros(self.array.shape, gradient.dtype) if self.into is None else self.into.copy()
        whole[int(self.layer_index[0])] = gradient
        return whole


def matrix_gradient(
    x: tuple[np.ndarray, str],
    d_y: tuple[np.ndarray, str],
    weight: Trained,
    rows: Rows | None = None,
    *,
    weight_layout: str,
    later: Later | None = None,
) -> np.ndarray:
    """d_weight of `y = x @ weight` in weight's layout and dtype (fp32 with into). x and d_y: (array, gather)."""
    (left, of_left), (right, of_right) = (x, d_y) if weight_layout == "in_out" else (d_y, x)
    stacked, into = weight.layer_index is not None, pick_layer(weight.into, weight.layer_index)
    d_weight = weight_gradient(
        left,
        right,
        rows,
        gather=(of_left, of_right),
        out_dtype=plain_name(weight.array) if into is None else "float32",
        into=into,
        place=None if stacked else weight.place,
        later=None if stacked else later,
    )
    return weight.in_stack(d_weight)


def matmul_ogs_backward_plan(
    arrays: Mapping[str, np.ndarray],
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    wanted: tuple[str, ...],
    tensors: tuple[tuple[str, QuantizedSpec], ...] = (),
) -> tuple[np.ndarray, ...]:
    """The wanted gradients of `plan_matmul_ogs_backward`, with its inputs by name."""
    operands, row_of_slot = bundle_of(MatmulOperands, quantized_from(arrays, tensors)), arrays.get("row_of_slot")
    x, weight, bias, row_weight = operands.x, operands.weight, operands.bias, operands.row_weight
    made, rows = {}, planned_rows(layout, arrays, len(x))
    g = round_to(to_float32(arrays["d_y"]), x.dtype)
    if "d_row_weight" in wanted:
        assert row_weight is not None and row_of_slot is not None
        unrounded = dataclasses.replace(spec, scatter="row", out_dtype="float32", tuning=None)
        y = matmul_ogs(dataclasses.replace(operands, row_weight=None), unrounded, rows)
        products = np.zeros(len(row_of_slot), working_dtype(g))
        slots = np.flatnonzero(row_of_slot >= 0)
        with np.errstate(all="ignore"):
            products[slots] = (y[row_of_slot[slots]] * to_float32(g[slots])).sum(axis=1)
        made["d_row_weight"] = products.reshape(row_weight.shape)
    if row_weight is not None:
        g = scale_rows(g, row_weight.reshape(-1, 1))
    if "d_x" in wanted:
        scatter = "row" if spec.gather == "token" else spec.gather
        options = MatmulSpec(spec.weight_layout, spec.scatter, scatter, allow_tf32=spec.allow_tf32)
        made["d_x"] = input_gradient(MatmulOperands(g, weight, layer_index=operands.layer_index), options, rows)
        if spec.gather == "token":
            assert layout is not None and row_of_slot is not None
            slots, dtype = made["d_x"], plain_name(x)
            made["d_x"] = reduce(slots, row_of_slot, top_k=layout.top_k, order="row", out_dtype=dtype)
    if "d_weight" in wanted:
        sides, matrix = ((x, spec.gather), (g, spec.scatter)), Trained(weight, operands.layer_index)
        made["d_weight"] = matrix_gradient(*sides, matrix, rows, weight_layout=spec.weight_layout)
    if "d_bias" in wanted:
        assert bias is not None
        d_bias = bias_gradient(g, rows, gather=spec.scatter, out_dtype=plain_name(bias))
        made["d_bias"] = Trained(bias, operands.layer_index).in_stack(d_bias)
    return tuple(made[name] for name in wanted)
