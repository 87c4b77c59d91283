"""NumPy twins of the matmuls' backward: fp32 sums from inputs as stored, one cast to the stored dtype.

The gradient of a grouped matmul's input is a grouped matmul over the same layout with the weight read the other way, so
`input_gradient` stands on the forward's twin. The gradient of its weights is a product per expert over that expert's
rows (ragged along the reduction).
"""

from __future__ import annotations

import numpy as np

from moe_core import dtypes
from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.reference.matmul import Matrix, matmul_ogs, pick_layer, quantized_from
from moe_core.reference.quantize import dequantize
from moe_core.reference.rounding import round_to, to_float32
from moe_core.specs import LayoutSpec, MatmulSpec

TRANSPOSED = {"in_out": "out_in", "out_in": "in_out"}


def input_gradient(
    d_y: np.ndarray,
    weight: Matrix,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
    up: Matrix | None = None,
    layer: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
) -> np.ndarray:
    """d_x = cast(d_y . weight[expert]^T) for every row of the layout.

    weight `[E, D, N]` (`in_out`) or `[E, N, D]`, as the forward had it. spec: weight_layout is the forward's; gather
    says where d_y `[*, N]` lies and scatter where d_x `[*, D]` goes; out_dtype None = the dtype of d_y. up: the second
    weight of gate_layout `separate`; d_y is then `[*, 2N]`, the gate's columns first, and both products share one fp32
    sum. Rows without an expert are exact zeros. layout None: dense, weight `[D, N]`. Quantised weights are dequantised
    to the dtype of d_y: a scale is of some addends of the sum, and cannot be multiplied with it.
    """
    matrices = [weight] if up is None else [weight, up]
    if isinstance(weight, QuantizedTensor):
        matrices = [dequantize(pick_layer(matrix, layer), dtypes.canonical(d_y.dtype)) for matrix in matrices]
        layer = None
    out_dtype = spec.out_dtype or dtypes.canonical(d_y.dtype)
    options = MatmulSpec(TRANSPOSED[spec.weight_layout], spec.gather, spec.scatter, None, "float32", spec.allow_tf32)

    def product(values: np.ndarray, matrix: Matrix) -> np.ndarray:
        return matmul_ogs(
            values, matrix, group_sizes, group_start, slot_of_row, layer=layer, layout=layout, spec=options
        )

    if up is None:
        return round_to(product(d_y, matrices[0]), out_dtype)
    width = d_y.shape[1] // 2
    with np.errstate(all="ignore"):
        return round_to(product(d_y[:, :width], matrices[0]) + product(d_y[:, width:], matrices[1]), out_dtype)


def quantized_input_gradient(
    *, layout: LayoutSpec | None, spec: MatmulSpec, tensors: tuple[tuple[str, QuantizedSpec], ...], **arrays: np.ndarray
) -> np.ndarray:
    """`input_gradient` by the names of `plan_matmul_quantized_transposed`'s inputs; tensors: see `quantized_from`."""
    operands = quantized_from(arrays, tensors)
    return input_gradient(operands.pop("x"), **operands, layout=layout, spec=spec)


def _sources(
    group_sizes: np.ndarray, group_start: np.ndarray, slot_of_row: np.ndarray, expert: np.intp, layout: LayoutSpec
) -> dict[str, np.ndarray]:
    """Indices of one expert's rows, in layout order, by how an array is indexed (`row`, `slot` or `token`)."""
    rows = np.arange(group_start[expert], group_start[expert] + group_sizes[expert])
    slots = slot_of_row[rows]
    rows, slots = rows[slots >= 0], slots[slots >= 0]
    return {"row": rows, "slot": slots, "token": slots // layout.top_k}


def weight_gradient(
    left: np.ndarray,
    right: np.ndarray,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
    into: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    gather: tuple[str, str] = ("row", "row"),
    out_dtype: str,
) -> np.ndarray:
    """d_weight `[E, M, N]`: for every expert the fp32 product left_rows^T . right_rows over its rows, one cast.

    left `[*, M]` and right `[*, N]` are each indexed by layout `row`, `slot` or `token` (gather). For `in_out` weights
    left is the matmul's input and right the gradient of its output; for `out_in` the other way round. An expert without
    rows has exact zeros. into: an array of the result's shape and dtype to which the fp32 product is added before the
    cast (an accumulated main gradient). layout None: dense, `[M, N]` from left `[R, M]` and right `[R, N]`.
    """
    groups = 1 if layout is None else layout.num_experts
    d_weight = np.zeros((groups, left.shape[1], right.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        if layout is None:
            d_weight[0] = to_float32(left).T @ to_float32(right)
        else:
            assert group_sizes is not None and group_start is not None and slot_of_row is not None
            for expert in np.flatnonzero(group_sizes):
                index = _sources(group_sizes, group_start, slot_of_row, expert, layout)
                d_weight[expert] = to_float32(left[index[gather[0]]]).T @ to_float32(right[index[gather[1]]])
        d_weight = d_weight[0] if layout is None else d_weight
        return round_to(d_weight if into is None else to_float32(into) + d_weight, out_dtype)


def bias_gradient(
    d_y: np.ndarray,
    group_sizes: np.ndarray,
    group_start: np.ndarray,
    slot_of_row: np.ndarray,
    row_weight: np.ndarray | None = None,
    *,
    layout: LayoutSpec,
    gather: str = "row",
    out_dtype: str,
) -> np.ndarray:
    """d_bias `[E, N]`: for every expert the fp32 sum of its rows of d_y `[*, N]` (gather: `row`, `slot`, `token`), each
    times row_weight fp32 `[T * K]` (by slot) where given, unrounded; one cast. An expert without rows: exact zeros."""
    d_bias = np.zeros((layout.num_experts, d_y.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for expert in np.flatnonzero(group_sizes):
            index = _sources(group_sizes, group_start, slot_of_row, expert, layout)
            rows = to_float32(d_y[index[gather]])
            if row_weight is not None:
                rows = rows * row_weight.reshape(-1)[index["slot"], None]
            d_bias[expert] = rows.sum(axis=0, dtype=np.float32)
    return round_to(d_bias, out_dtype)


def bias_product(
    d_y: np.ndarray,
    bias: np.ndarray,
    group_sizes: np.ndarray,
    group_start: np.ndarray,
    slot_of_row: np.ndarray,
    *,
    layout: LayoutSpec,
    gather: str = "row",
) -> np.ndarray:
    """fp32 `[T * K]` by slot: <d_y row, bias[expert]>, the bias's share of the row weight's gradient; 0 without an
    expert. d_y `[*, N]` is indexed by gather, bias `[E, N]`."""
    products = np.zeros(layout.num_slots, np.float32)
    with np.errstate(all="ignore"):
        for expert in np.flatnonzero(group_sizes):
            index = _sources(group_sizes, group_start, slot_of_row, expert, layout)
            products[index["slot"]] = to_float32(d_y[index[gather]]) @ to_float32(bias[expert])
    return products
