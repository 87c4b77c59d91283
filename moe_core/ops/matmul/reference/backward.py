"""NumPy twins of the grouped matmul's backward: fp32 sums from inputs as stored, one cast to the stored dtype.

The gradient of a grouped matmul's input is a grouped matmul over the same layout with the weight read the other way, so
`input_gradient` stands on the forward's twin. The gradient of its weights is a product per expert over that expert's
rows (ragged along the reduction).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.base.arrays import TRANSPOSED
from moe_core.base.threads import Later, column_blocks, elements, products, spread, threads_for
from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.ops.common.product import inner_operands
from moe_core.ops.common.rounding import plain_name, result_dtype, round_to, to_float32, working_dtype
from moe_core.ops.matmul.reference.forward import Matrix, matmul_ogs, pick_layer, quantized_from
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.ops.quantize.reference import dequantize
from moe_core.ops.reduction.reference import reduce, scale_rows
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.routing import LayoutSpec


def input_gradient(
    d_y: np.ndarray,
    weight: Matrix,
    up: Matrix | None = None,
    layer_index: np.ndarray | None = None,
    *,
    spec: MatmulSpec,
    later: Later | None = None,
    **where: Any,
) -> np.ndarray:
    """d_x = cast(d_y . weight[expert]^T) for every row of the layout; where: the layout and its arrays.

    weight `[E, D, N]` (`in_out`) or `[E, N, D]`, as the forward had it. spec: weight_layout is the forward's; gather
    says where d_y `[*, N]` lies and scatter where d_x `[*, D]` goes; out_dtype None = the dtype of d_y. up: the second
    weight of gate_layout `separate`; d_y is then `[*, 2N]`, the gate's columns first, and both products share one fp32
    sum. Rows without an expert are exact zeros. layout None: dense, weight `[D, N]`. Quantised weights are dequantised
    to the dtype of d_y: a scale is of some addends of the sum, and cannot be multiplied with it. later: what d_x may be
    computed by. where may have places and then of `matmul_ogs` too, for one weight and the fp32 sums themselves.
    """
    matrices = [weight] if up is None else [weight, up]
    if isinstance(weight, QuantizedTensor):
        matrices = [dequantize(pick_layer(matrix, layer_index), dtypes.canonical(d_y.dtype)) for matrix in matrices]
        layer_index = None
    out_dtype = spec.out_dtype or plain_name(d_y)
    options = MatmulSpec(TRANSPOSED[spec.weight_layout], spec.gather, spec.scatter, None, "float32", spec.allow_tf32)
    sides = zip(np.split(d_y, len(matrices), axis=1), matrices, strict=True)
    if up is not None or result_dtype(out_dtype, d_y) != working_dtype(d_y):
        later = None
    products = [matmul_ogs(*side, layer_index=layer_index, spec=options, later=later, **where) for side in sides]
    with np.errstate(all="ignore"):
        return round_to(products[0] if up is None else products[0] + products[1], out_dtype)


def quantized_input_gradient(*, tensors: tuple[tuple[str, QuantizedSpec], ...], **arguments: Any) -> np.ndarray:
    """`input_gradient` by the names of `plan_matmul_quantized_transposed`'s inputs; tensors: see `quantized_from`."""
    operands = quantized_from(arguments, tensors)
    return input_gradient(operands.pop("x"), **operands)


def weight_gradient(
    left: np.ndarray,
    right: np.ndarray,
    into: np.ndarray | None = None,
    place: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    gather: tuple[str, str] = ("row", "row"),
    out_dtype: str,
    later: Later | None = None,
    **groups: Any,
) -> np.ndarray:
    """d_weight `[E, M, N]`: for every expert the fp32 product left_rows^T . right_rows over its rows, one cast.

    left `[*, M]` and right `[*, N]` are each indexed by layout `row`, `slot` or `token` (gather). For `in_out` weights
    left is the matmul's input and right the gradient of its output; for `out_in` the other way round. An expert without
    rows has exact zeros. into: an array of the result's shape and dtype to which the fp32 product is added before the
    cast (an accumulated main gradient). place: what is written to and returned, None = a new array. layout None: dense,
    `[M, N]` from left `[R, M]` and right `[R, N]`. groups: the layout's arrays, or its rows as `known`.
    later: what computes it, None = now.
    """
    num_experts, (num_columns, width) = 1 if layout is None else layout.num_experts, (left.shape[1], right.shape[1])
    added = None if into is None else into.reshape(num_experts, num_columns, width)
    result = place
    if result is None:
        shape = (num_columns, width) if layout is None else (num_experts, num_columns, width)
        result = np.empty(shape, result_dtype(out_dtype, left))
    d_weight = result.reshape(num_experts, num_columns, width)
    rows = rows_of(layout, len(left), **groups)
    left, right = (to_float32(side[rows.index[by]]) for side, by in zip((left, right), gather, strict=True))
    parts = dict(rows.parts)

    def ready(expert: int, columns: slice) -> Callable[[], Any]:
        to, part = d_weight[expert, columns], parts.get(expert)
        if part is None:
            return functools.partial(to.__setitem__, ..., 0 if added is None else added[expert, columns])
        own = left[part, columns], right[part]
        if added is None and to.dtype == left.dtype:
            return functools.partial(np.matmul, *inner_operands(*own, to))
        return functools.partial(add, *own, to, None if added is None else added[expert, columns])

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
    # Two threads that write to one huge page for the first time clear it twice.
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
    row_weight: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    gather: str = "row",
    out_dtype: str,
    **groups: Any,
) -> np.ndarray:
    """d_bias `[E, N]`: for every expert the fp32 sum of its rows of d_y `[*, N]` (gather: `row`, `slot`, `token`), each
    times row_weight fp32 `[T * K]` (by slot) where given, unrounded; one cast. An expert without rows: exact zeros.
    layout None: dense, `[N]`. groups: the layout's arrays."""
    d_bias = np.zeros((1 if layout is None else layout.num_experts, d_y.shape[1]), working_dtype(d_y))
    rows = rows_of(layout, len(d_y), **groups)
    with np.errstate(all="ignore"):
        values = to_float32(d_y[rows.index[gather]])
        if row_weight is not None:
            values = values * row_weight.reshape(-1)[rows.index["slot"], None]
        for expert, part in rows.parts:
            d_bias[expert] = values[part].sum(axis=0)
    return round_to(d_bias[0] if layout is None else d_bias, out_dtype)


def bias_product(
    d_y: np.ndarray, bias: np.ndarray, *, layout: LayoutSpec, gather: str = "row", **groups: Any
) -> np.ndarray:
    """fp32 `[T * K]` by slot: <d_y row, bias[expert]>, the bias's share of the row weight's gradient; 0 without an
    expert. d_y `[*, N]` is indexed by gather, bias `[E, N]`. groups: the layout's arrays."""
    found, rows = np.zeros(layout.num_slots, working_dtype(d_y)), rows_of(layout, len(d_y), **groups)
    with np.errstate(all="ignore"):
        for expert, part in rows.parts:
            found[rows.index["slot"][part]] = to_float32(d_y[rows.index[gather]][part]) @ to_float32(bias[expert])
    return found


def in_stack(
    gradient: np.ndarray, array: np.ndarray, layer_index: np.ndarray | None, into: np.ndarray | None = None
) -> np.ndarray:
    """The gradient of a stack of layers of which one was used: zeros, or what is in `into`, for all others.

    A layer outside the stack raises InvalidInput.
    """
    if layer_index is None:
        return gradient
    pick_layer(array, layer_index)
    whole = np.zeros(array.shape, gradient.dtype) if into is None else into.copy()
    whole[int(layer_index[0])] = gradient
    return whole


def matrix_gradient(
    x: tuple[np.ndarray, str],
    d_y: tuple[np.ndarray, str],
    weight: np.ndarray,
    layer_index: np.ndarray | None = None,
    into: np.ndarray | None = None,
    place: np.ndarray | None = None,
    *,
    weight_layout: str,
    later: Later | None = None,
    **where: Any,
) -> np.ndarray:
    """d_weight of `y = x @ weight`, in the layout and dtype of weight; with into fp32, of its shape, added to that.

    x, d_y: each with how it is gathered; place: where it may be written, which a stack of layers does not use; where:
    the layout and its arrays, as `weight_gradient` takes them. later: what it may be computed by.
    """
    (left, of_left), (right, of_right) = (x, d_y) if weight_layout == "in_out" else (d_y, x)
    added, dtype = pick_layer(into, layer_index), plain_name(weight) if into is None else "float32"
    if layer_index is not None:
        place = later = None
    options = {"gather": (of_left, of_right), "out_dtype": dtype, "later": later}
    d_weight = weight_gradient(left, right, added, place, **options, **where)
    return in_stack(d_weight, weight, layer_index, into)


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
    layer_index: np.ndarray | None = None,
    row_of_slot: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    wanted: tuple[str, ...],
    **groups: Any,
) -> tuple[np.ndarray, ...]:
    """The gradients wanted of d_x, d_weight, d_bias, d_row_weight; formulas, roundings:
    `moe_core.ops.matmul.backward`."""
    found: dict[str, np.ndarray] = {}
    where: dict[str, Any] = {"layout": layout, **groups}
    g = round_to(to_float32(d_y), x.dtype)
    if "d_row_weight" in wanted:
        assert row_weight is not None and row_of_slot is not None
        unrounded = dataclasses.replace(spec, scatter="row", out_dtype="float32", tuning=None)
        rows = matmul_ogs(x, weight, bias=bias, layer_index=layer_index, spec=unrounded, **where)
        found["d_row_weight"] = _rows_product(rows, g, row_of_slot).reshape(row_weight.shape)
    if row_weight is not None:
        g = scale_rows(g, row_weight.reshape(-1, 1))
    if "d_x" in wanted:
        scatter = "row" if spec.gather == "token" else spec.gather
        options = MatmulSpec(spec.weight_layout, spec.scatter, scatter, allow_tf32=spec.allow_tf32)
        found["d_x"] = input_gradient(g, weight, layer_index=layer_index, spec=options, **where)
        if spec.gather == "token":
            assert layout is not None and row_of_slot is not None
            dtype = plain_name(x)
            found["d_x"] = reduce(found["d_x"], row_of_slot, top_k=layout.top_k, order="row", out_dtype=dtype)
    if "d_weight" in wanted:
        assert isinstance(weight, np.ndarray)
        sides = (x, spec.gather), (g, spec.scatter)
        found["d_weight"] = matrix_gradient(*sides, weight, layer_index, weight_layout=spec.weight_layout, **where)
    if "d_bias" in wanted:
        assert bias is not None
        d_bias = bias_gradient(g, gather=spec.scatter, out_dtype=plain_name(bias), **where)
        found["d_bias"] = in_stack(d_bias, bias, layer_index)
    return tuple(found[name] for name in wanted)


def _rows_product(rows: np.ndarray, g: np.ndarray, row_of_slot: np.ndarray) -> np.ndarray:
    """fp32 by slot: the slot's row of `rows` times its row of g; 0 without a row."""
    products = np.zeros(len(row_of_slot), working_dtype(g))
    slots = np.flatnonzero(row_of_slot >= 0)
    with np.errstate(all="ignore"):
        products[slots] = (rows[row_of_slot[slots]] * to_float32(g[slots])).sum(axis=1)
    return products
