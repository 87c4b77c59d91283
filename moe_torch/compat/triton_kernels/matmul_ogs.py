"""Grouped matmul with gather, scatter, fused activation and reduction over a token's experts.

    y[rows of e] = gammas * activation(out_alpha * (x[gather(rows of e)] @ w[e] + betas * bias[e]))
    with scatter: y[token] = sum of the rows of its slots, in fp32, in the order of the slots

A row is cast once. gammas never precede the activation, unlike the original with scatter.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_torch import ops
from moe_torch.bridge.options import require_instance
from moe_torch.compat.triton_kernels.matmul_ogs_details import operands as inputs
from moe_torch.compat.triton_kernels.matmul_ogs_details.operands import Operand, Weight, memory_of
from moe_torch.compat.triton_kernels.matmul_ogs_details.options import (
    Epilogue,
    EpilogueSpecs,
    FlexCtx,
    FnName,
    FnSpecs,
    FusedActivation,
    PrecisionConfig,
    activation_of,
    checked_precision,
    require_no_epilogue,
)
from moe_torch.compat.triton_kernels.matmul_ogs_details.product import (
    Rows,
    batched,
    bias_of,
    delivered,
    factors_of,
    matmul_spec,
    rows_at,
    scattered_product,
)
from moe_torch.compat.triton_kernels.numerics import InFlexData, OutFlexData
from moe_torch.compat.triton_kernels.routing import GatherIndx, RoutingData, ScatterIndx
from moe_torch.compat.triton_kernels.tensor import FP4, Tensor, wrap_torch_tensor
from moe_torch.modular.routing_data import group_starts, layout_of

__all__ = [
    "FP4", "Epilogue", "EpilogueSpecs", "FlexCtx", "FnName", "FnSpecs", "FusedActivation", "GatherIndx", "InFlexData",
    "OutFlexData", "PrecisionConfig", "RoutingData", "ScatterIndx", "Tensor", "matmul_ogs", "wrap_torch_tensor",
]  # fmt: skip


def matmul_ogs(
    x: Any,
    w: Any,
    bias: torch.Tensor | None,
    routing_data: RoutingData | None = None,
    gather_indx: GatherIndx | None = None,
    scatter_indx: ScatterIndx | None = None,
    precision_config: PrecisionConfig | None = None,
    betas: torch.Tensor | None = None,
    gammas: torch.Tensor | None = None,
    out_alpha: float | None = None,
    y: torch.Tensor | None = None,
    fused_activation: FusedActivation | None = None,
    epilogue: Epilogue | None = None,
) -> torch.Tensor:
    """Multiply the rows of x with the matrices of w.

    With routing_data: w `[E, K, N]`, bias `[E, N]`, x `[T, K]` with gather_indx, else one row for every row of the
    routing. The result is `[rows, N]`, or with scatter_indx `[rows / n_expts_act, N]`. Without: x `[M, K]`, w `[K, N]`,
    bias `[N]`, or a batch `[B, M, K]`, `[B, K, N]`, `[B, N]`. A fused `swiglu_fn` halves N. betas and gammas are
    `[rows]`, of a batch `[M]`. y is memory for the result, with a leading axis of 1 unless x is a batch.

    x is bf16, fp16 or fp32. w is the same, or mxfp4, mxfp8 or fp8 (then x may be fp8) with scales in precision_config.
    Rows without an expert are zeros. Gradients are as in `moe_torch.matmul_ogs`. Raises InvalidInput, and Unsupported
    for options and formats that we lack.
    """
    precision, activation = checked_precision(precision_config), activation_of(fused_activation)
    require_no_epilogue(epilogue)
    routing = _require_indices(routing_data, gather_indx, scatter_indx)
    flex = precision.flex_ctx
    weight = inputs.weight_of(
        Operand("w", w, "precision_config.weight_scale", precision.weight_scale, "flex_ctx.rhs_data", flex.rhs_data)
    )
    shape = memory_of("x", x).shape
    batch = shape[0] if len(shape) == 3 else None
    if len(weight.shape) == 2 and routing.expt_hist is not None and routing.n_expts_tot == 1:
        weight = Weight(inputs.indexed(weight.array, None), weight.weight_layout, (1, *weight.shape))
    source = Operand("x", x, "precision_config.act_scale", precision.act_scale, "flex_ctx.lhs_data", flex.lhs_data)
    indices = (gather_indx, scatter_indx)
    values, rows = _rows(source, weight, precision.out_dtype, routing, indices, routing_data is not None)
    if rows.layout is None and len(weight.shape) == 3:
        weight = Weight(inputs.indexed(weight.array, 0), weight.weight_layout, weight.shape[1:])
    spec = matmul_spec(precision, weight, rows, values, activation)
    operands = ops.MatmulOperands(values, weight.array, bias=bias_of(bias, weight, values, rows))
    operands = inputs.fitting(operands, weight, ("x", "w"), shape)
    factors = factors_of(betas, gammas, out_alpha, rows.count, batch)
    result = scattered_product(operands, rows, spec, factors, scatter_indx, routing.n_expts_act)
    if not weight.shape[-1]:
        result = result[:, :0]
    if batch is not None:
        result = result.reshape(batch, shape[1], result.shape[-1])
        return delivered("y", y, result, result.shape)
    return delivered("y", y, result, (1, *result.shape)).reshape(result.shape)


def _rows(
    x: Operand,
    weight: Weight,
    out_dtype: torch.dtype | None,
    routing: RoutingData,
    indices: tuple[GatherIndx | None, ScatterIndx | None],
    routed: bool,
) -> tuple[Any, Rows]:
    gather, scatter = indices
    shape = memory_of("x", x.array).shape
    if len(shape) == 3:
        if routed or gather is not None or scatter is not None:
            raise InvalidInput(
                f"routing_data, gather_indx and scatter_indx must be None for x [B, M, K], got x {list(shape)}; "
                "flatten x"
            )
        return batched(x._replace(array=memory_of("x", x.array)), weight, "w", out_dtype)
    if len(shape) != 2:
        raise InvalidInput(f"x must be [M, K] or [B, M, K], got {list(shape)}; reshape it")
    values = inputs.rows_of(x, out_dtype)
    if routing.expt_hist is None:
        if len(weight.shape) == 3 and weight.shape[0] != 1:
            raise InvalidInput(
                f"w must be [K, N] or [1, K, N] without routing_data, got {list(weight.shape)}; pass the routing, or x "
                "[B, M, K]"
            )
        if gather is not None:
            values = _gathered(values, gather.src_indx, routing.n_expts_act)
        return values, Rows(None, "row", values.shape[0])
    if weight.shape[:-2] != (routing.n_expts_tot,):
        raise InvalidInput(
            f"w must be [{routing.n_expts_tot}, K, N] for this routing, got {list(weight.shape)}; pass every expert's"
        )
    rows = _ragged_rows(routing, gather, scatter, shape[0])
    assert rows.layout is not None
    wanted = rows.layout.spec.num_tokens
    if shape[0] < wanted:
        raise InvalidInput(f"x must have {wanted} rows for this routing, got {shape[0]}; pass all tokens")
    return (rows_at(values, slice(wanted)) if shape[0] > wanted else values), rows


def _gathered(values: Any, src_indx: torch.Tensor, top_k: int) -> torch.Tensor:
    if isinstance(values, QuantizedTensor):
        raise InvalidInput(
            "gather_indx must be None for a quantised x without routing_data, got indices; index x and its scales"
        )
    rows = values[(src_indx.clamp(min=0) // top_k).long()]
    return torch.where(src_indx[:, None] >= 0, rows, 0)


def _ragged_rows(
    routing_data: RoutingData, gather: GatherIndx | None, scatter: ScatterIndx | None, num_rows: int
) -> Rows:
    """The rows of a routing. num_rows: of x, the last resort."""
    top_k = 1
    if gather is not None:
        slot_of_row, row_of_slot, top_k = gather.src_indx, gather.dst_indx, routing_data.n_expts_act
    elif scatter is not None:
        slot_of_row, row_of_slot = scatter.dst_indx, scatter.src_indx
    else:
        group_start = group_starts(routing_data)
        rows = torch.arange(num_rows, dtype=torch.int32, device=group_start.device)
        slot_of_row = row_of_slot = torch.where(rows < group_start[-1], rows, -1)
    layout = layout_of(routing_data, slot_of_row, row_of_slot, top_k)
    return Rows(layout, "row" if gather is None else "token", slot_of_row.shape[0])


def _require_indices(
    routing_data: RoutingData | None, gather: GatherIndx | None, scatter: ScatterIndx | None
) -> RoutingData:
    for name, value, kind in (
        ("routing_data", routing_data, RoutingData),
        ("gather_indx", gather, GatherIndx),
        ("scatter_indx", scatter, ScatterIndx),
    ):
        if value is not None and not isinstance(value, kind):
            require_instance(f"{name} (else convert it with from_upstream)", value, kind)
    return RoutingData(None, None, 1, 1) if routing_data is None else routing_data
