"""Grouped matmul with gather, scatter, fused activation and reduction over a token's experts.

    y[rows of e] = gammas * activation(out_alpha * (x[gather(rows of e)] @ w[e] + betas * bias[e]))
    with scatter: y[token] = sum of the rows of its slots, in fp32, in the order of the slots

A row is cast once. gammas never precede the activation, unlike the original with scatter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_core.base.checks import finite_float
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.tuning import MatmulTuning
from moe_torch import ops
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.compat.triton_kernels.matmul_ogs_details import operands as inputs
from moe_torch.compat.triton_kernels.matmul_ogs_details.operands import Rows, Weight, memory_of
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
from moe_torch.compat.triton_kernels.numerics import InFlexData, OutFlexData
from moe_torch.compat.triton_kernels.routing import GatherIndx, RoutingData, ScatterIndx
from moe_torch.compat.triton_kernels.tensor import FP4, Tensor, wrap_torch_tensor

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
    routing = inputs.require_indices(routing_data, gather_indx, scatter_indx)
    weight, shape = inputs.weight_of(w, precision), memory_of("x", x).shape
    alpha = None if out_alpha is None else finite_float("out_alpha", out_alpha)
    batch = shape[0] if len(shape) == 3 else None
    if len(weight.shape) == 2 and routing.expt_hist is not None and routing.n_expts_tot == 1:
        weight = Weight(inputs.indexed(weight.array, None), weight.weight_layout, (1, *weight.shape))
    values, rows = _rows(x, weight, precision, routing, (gather_indx, scatter_indx), routing_data is not None)
    if rows.layout is None and len(weight.shape) == 3:
        weight = Weight(inputs.indexed(weight.array, 0), weight.weight_layout, weight.shape[1:])
    out_dtype = str(values.dtype if precision.out_dtype is None else precision.out_dtype).removeprefix("torch.")
    tuning = MatmulTuning(batch_invariant=True) if precision.enforce_bitwise_invariance else None
    choices = (rows.gather, "row", activation, out_dtype, precision.allow_tf32, tuning)
    spec = MatmulSpec(weight.weight_layout, *choices)
    bias = _bias(bias, weight, values, rows)
    operands = inputs.fitting(ops.MatmulOperands(values, weight.array, bias=bias), weight, shape)
    factors = (_factors("betas", betas, rows.count, batch), _factors("gammas", gammas, rows.count, batch), alpha)
    result, order = _product(operands, rows, spec, factors, scatter_indx)
    if scatter_indx is not None:
        result = ops.reduce(result, inputs.scattered(scatter_indx, routing.n_expts_act), order=order)
    if not weight.shape[-1]:
        result = result[:, :0]
    result = result[None] if batch is None else result.reshape(batch, shape[1], result.shape[-1])
    if y is not None:
        if y.shape != result.shape or y.dtype != result.dtype:
            raise InvalidInput(
                f"y must be {result.dtype} {list(result.shape)}, got {y.dtype} {list(y.shape)}; allocate it so"
            )
        result = y.copy_(result)
    return result.squeeze(0) if batch is None else result


def _rows(
    x: Any,
    weight: Weight,
    precision: PrecisionConfig,
    routing: RoutingData,
    indices: tuple[GatherIndx | None, ScatterIndx | None],
    routed: bool,
) -> tuple[Any, Rows]:
    gather, scatter = indices
    shape = memory_of("x", x).shape
    if len(shape) == 3:
        if routed or gather is not None or scatter is not None:
            raise InvalidInput(
                f"routing_data, gather_indx and scatter_indx must be None for x [B, M, K], got x {list(shape)}; "
                "flatten x"
            )
        if weight.shape[:-2] != shape[:1]:
            raise InvalidInput(f"w must be [{shape[0]}, K, N] like x, got {list(weight.shape)}; pass a matrix for each")
        values = memory_of("x", x).reshape(shape[0] * shape[1], shape[2])
        values = inputs.rows_of(values, inputs.with_scales_of_rows(precision, shape))
        return values, inputs.batched_rows(shape[0], shape[1], memory_of("x", x).device)
    if len(shape) != 2:
        raise InvalidInput(f"x must be [M, K] or [B, M, K], got {list(shape)}; reshape it")
    values = inputs.rows_of(x, precision)
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
    rows = inputs.ragged_rows(routing, gather, scatter, shape[0])
    assert rows.layout is not None
    wanted = rows.layout.spec.num_tokens
    if shape[0] < wanted:
        raise InvalidInput(f"x must have {wanted} rows for this routing, got {shape[0]}; pass all tokens")
    if shape[0] > wanted:
        values = _first(values, wanted)
    return values, rows


def _gathered(values: Any, src_indx: torch.Tensor, top_k: int) -> torch.Tensor:
    if isinstance(values, QuantizedTensor):
        raise InvalidInput(
            "gather_indx must be None for a quantised x without routing_data, got indices; index x and its scales"
        )
    rows = values[(src_indx.clamp(min=0) // top_k).long()]
    return torch.where(src_indx[:, None] >= 0, rows, 0)


def _first(values: Any, count: int) -> Any:
    if isinstance(values, QuantizedTensor):
        scales = values.scales if values.format.group_rows is None else values.scales[:count]
        return replace(values, values=values.values[:count], scales=scales)
    return values[:count]


def _factors(name: str, given: torch.Tensor | None, count: int, batch: int | None) -> torch.Tensor | None:
    if given is None:
        return None
    wanted = count if batch is None else count // max(batch, 1)
    if tuple(given.shape) != (wanted,):
        raise InvalidInput(f"{name} must be [{wanted}], one for each row, got {list(given.shape)}; pass such a tensor")
    given = given.to(torch.float32)
    return given if batch is None else given.repeat(batch)


def _bias(bias: torch.Tensor | None, weight: Weight, values: Any, rows: Rows) -> torch.Tensor | None:
    """`[E, N]` or `[N]`, in fp32 unless it has the dtype of x."""
    if bias is None:
        return None
    plain = None if isinstance(values, QuantizedTensor) else values.dtype
    bias = bias if bias.dtype == plain else bias.to(torch.float32)
    wanted = (*weight.shape[:-2], weight.shape[-1])
    if rows.layout is None and bias.ndim == 2 and bias.shape[0] == 1:
        bias = bias[0]
    elif len(wanted) == 2 and wanted[0] == 1 and bias.ndim == 1:
        bias = bias[None]
    if tuple(bias.shape) != wanted:
        raise InvalidInput(f"bias must be {list(wanted)}, got {list(bias.shape)}; pass one row per matrix")
    return bias.contiguous()


def _product(
    operands: ops.MatmulOperands,
    rows: Rows,
    spec: MatmulSpec,
    factors: tuple[torch.Tensor | None, torch.Tensor | None, float | None],
    scatter: ScatterIndx | None,
) -> tuple[torch.Tensor, str]:
    """(`[rows, N]`, their order), in several ops if betas or alpha precede the activation, or gammas need a gradient
    that one op lacks."""
    (betas, gammas, alpha), bias = factors, operands.bias
    one_op = (betas is None or bias is None) and alpha in (None, 1.0)
    # Weights have gradients only for rows by slot of this layout.
    order = "slot" if scatter is not None and rows.leads_back(scatter) else "row"
    differentiated = gammas is not None and gammas.requires_grad and torch.is_grad_enabled()
    if one_op and not (differentiated and (order == "row" or spec.activation is not None)):
        operands = replace(operands, row_weight=None if gammas is None else rows.by_slot(gammas))
        return ops.matmul_ogs(operands, rows.layout, replace(spec, scatter=order)), order
    plain = replace(spec, activation=None, out_dtype="float32")
    result = ops.matmul_ogs(replace(operands, bias=None), rows.layout, plain)
    if bias is not None:
        expert = rows.expert_of_row()
        added = bias.float() if expert is None else bias.float()[expert]
        result = result + (added if betas is None else added * betas[:, None])
    if alpha is not None:
        result = result * alpha
    if spec.activation is not None:
        result = ops.activation(result, spec.activation)
    if gammas is not None:
        result = result * gammas[:, None]
    assert spec.out_dtype is not None
    return rows.without_absent(result).to(TORCH_DTYPES[spec.out_dtype]), "row"
