"""The operators of single stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import torch

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import Format
from moe_core.ops.activation.backward import plan_activation_backward
from moe_core.ops.activation.forward import plan_activation
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.norm.backward import plan_rms_norm_backward
from moe_core.ops.norm.forward import plan_rms_norm
from moe_core.ops.quantize.rows import plan_quantize_rows
from moe_core.ops.reduction.reduce import plan_scale_rows
from moe_core.ops.router.backward import plan_router_backward
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.bitmatrix import plan_pack_bitmatrix, plan_unpack_bitmatrix
from moe_core.ops.routing.runs import plan_layout_of_runs
from moe_core.ops.routing.topk import plan_routing
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, LogitsSpec, NormSpec, RouterSpec
from moe_core.specs import operands as bundles
from moe_torch.bridge.operator import Operator, Outputs
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.bridge.signature import Declaration, MaybeTensor, Signature, Tensor, fields_of
from moe_torch.operators import layouts
from moe_torch.operators.kinds import BackwardOperator
from moe_torch.operators.shapes import (
    Names,
    activated,
    gradients_of,
    like,
    out_dtype_of,
    routed,
    wide_gradients,
    width_of,
)

_WORD_BITS = 32


class _Router(Declaration[Tensor]):
    x: Tensor
    weight: Tensor
    bias: MaybeTensor
    wide: MaybeTensor
    spec: LogitsSpec


class _RouterBackward(Declaration[list[Tensor]]):
    d_logits: Tensor
    x: Tensor
    weight: Tensor
    bias: MaybeTensor
    spec: LogitsSpec
    wanted: Names


class _RmsNorm(Declaration[Tensor]):
    x: Tensor
    weight: Tensor
    spec: NormSpec


class _RmsNormBackward(Declaration[list[Tensor]]):
    d_y: Tensor
    x: Tensor
    weight: Tensor
    spec: NormSpec
    wanted: Names


ROUTER = Operator(
    "router",
    _Router,
    plan_router,
    lambda call: [((call.x.shape[0], width_of(call.weight, call.spec.weight_layout)), torch.float32)],
)
ROUTER_BACKWARD = BackwardOperator("router_backward", _RouterBackward, plan_router_backward, wide_gradients)
RMS_NORM = Operator("rms_norm", _RmsNorm, plan_rms_norm, lambda call: like(call.x))
RMS_NORM_BACKWARD = BackwardOperator("rms_norm_backward", _RmsNormBackward, plan_rms_norm_backward, gradients_of)


class _Route(Declaration[tuple[Tensor, Tensor]]):
    logits: Tensor
    correction_bias: MaybeTensor
    token_mask: MaybeTensor
    given: MaybeTensor
    spec: RouterSpec


class _RouteBackward(Declaration[Tensor]):
    gradients: Annotated[bundles.RoutingGradients, ("weights",)]
    logits: Tensor
    ids: Tensor
    token_mask: MaybeTensor
    spec: RouterSpec


ROUTE = Operator("route", _Route, plan_routing, lambda call: routed(call.logits, call.spec.top_k))
ROUTE_BACKWARD = BackwardOperator(
    "route_backward",
    _RouteBackward,
    plan_routing_backward,
    lambda call: [(tuple(call.logits.shape), torch.float32)],
)


class _MakeLayout(Declaration[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]):
    ids: Tensor
    expert_map: MaybeTensor
    token_mask: MaybeTensor
    num_experts: int
    alignment: int
    max_rows: int | None


class _MakeBoundedLayout(Declaration[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]):
    ids: Tensor
    expert_map: MaybeTensor
    token_mask: MaybeTensor
    num_experts: int
    alignment: int
    max_rows: int | None
    rows: int


MAKE_LAYOUT = Operator("make_layout", _MakeLayout, layouts.make_layout_plan, layouts.layout_shapes)
#: For `LayoutSpec.rows`, with the overflow as a result.
MAKE_BOUNDED_LAYOUT = Operator(
    "make_bounded_layout", _MakeBoundedLayout, layouts.make_layout_plan, layouts.bounded_layout_shapes
)


class _PackBitmatrix(Declaration[tuple[Tensor, Tensor, Tensor]]):
    ids: Tensor
    num_experts: int


class _UnpackBitmatrix(Declaration[Tensor]):
    bitmatrix: Tensor
    num_experts: int
    top_k: int


#: Returns bitmatrix, duplicates, invalid_ids.
PACK_BITMATRIX = Operator(
    "pack_bitmatrix",
    _PackBitmatrix,
    plan_pack_bitmatrix,
    lambda call: [
        ((call.ids.shape[0], -(-call.num_experts // _WORD_BITS)), torch.uint32),
        *[((1,), torch.int32)] * 2,
    ],
)
UNPACK_BITMATRIX = Operator(
    "unpack_bitmatrix",
    _UnpackBitmatrix,
    plan_unpack_bitmatrix,
    lambda call: [((call.bitmatrix.shape[0], call.top_k), torch.int32)],
)


class _Activation(Declaration[Tensor]):
    x: Tensor
    up: MaybeTensor
    activation: Activation
    out_dtype: str | None


class _ActivationBackward(Declaration[list[Tensor]]):
    d_y: Tensor
    x: Tensor
    up: MaybeTensor
    activation: Activation


ACTIVATION = Operator(
    "activation",
    _Activation,
    plan_activation,
    lambda call: [
        ((call.x.shape[0], activated(call.x.shape[1], call.activation)), out_dtype_of(call.x, call.out_dtype))
    ],
)
ACTIVATION_BACKWARD = BackwardOperator(
    "activation_backward",
    _ActivationBackward,
    plan_activation_backward,
    lambda call: like(call.x, call.up),
)


class _LayoutOfRuns(Declaration[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]):
    counts: Tensor
    num_rows: int
    stride: int | None


class _Reduce(Declaration[Tensor]):
    y: Tensor
    row_of_slot: Tensor
    shared: MaybeTensor
    shared_gate: MaybeTensor
    sizes: layouts.Sizes
    order: str
    out_dtype: str | None


class _GatherRows(Declaration[Tensor]):
    x: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    wide: MaybeTensor
    sizes: layouts.Sizes


class _ScaleRows(Declaration[Tensor]):
    x: Tensor
    weights: Tensor


#: Returns ids, then the arrays of a layout except invalid_ids.
LAYOUT_OF_RUNS = Operator("layout_of_runs", _LayoutOfRuns, plan_layout_of_runs, layouts.runs_shapes)
REDUCE = Operator(
    "reduce",
    _Reduce,
    layouts.reduce_plan,
    lambda call: [
        ((call.row_of_slot.shape[0] // call.sizes[1], call.y.shape[1]), out_dtype_of(call.y, call.out_dtype))
    ],
)
GATHER_ROWS = Operator(
    "gather_rows",
    _GatherRows,
    layouts.gather_rows_plan,
    lambda call: [((call.slot_of_row.shape[0], call.x.shape[1]), call.x.dtype)],
)
SCALE_ROWS = Operator(
    "scale_rows",
    _ScaleRows,
    plan_scale_rows,
    lambda call: [((call.x.shape[0], call.x.shape[1]), call.x.dtype)],
)


def _quantize_rows_shapes(call: Any) -> Outputs:
    shape, format = call.x.shape, call.format
    groups = (format.group_rows, format.group_columns)
    scales = tuple(1 if group is None else -(-size // group) for size, group in zip(shape, groups, strict=True))
    element = format.own_element
    values = ((shape[0], shape[1] // element.per_byte), TORCH_DTYPES[element.dtype])
    return [values, (scales, TORCH_DTYPES[format.scale_dtypes[0]])]


def _plan_quantize_rows(
    x: ArraySpec, static_scale: ArraySpec | None, used_by: ArraySpec | None, format: Format, target: Target
) -> LaunchPlan:
    return plan_quantize_rows(x, format, target, scales=static_scale, used_by=used_by)


class _QuantizeRows(Declaration[tuple[Tensor, Tensor]]):
    x: Tensor
    static_scale: MaybeTensor
    used_by: MaybeTensor
    format: Format


#: Returns values, scales.
QUANTIZE_ROWS = Operator("quantize_rows", _QuantizeRows, _plan_quantize_rows, _quantize_rows_shapes)

_OPERANDS = tuple(name for name, _ in bundles.array_fields(bundles.MatmulOperands))
#: The layout's arrays that a product reads.
LAYOUT = ("group_sizes", "group_start", "slot_of_row", "row_of_slot")


def _product(planner: Callable[..., LaunchPlan], *, sizes: layouts.Sizes | None, **arguments: Any) -> LaunchPlan:
    """sizes: `layout_sizes`, or None without a layout."""
    operands = bundles.MatmulOperands(**{name: arguments.pop(name) for name in _OPERANDS})
    arrays = bundles.LayoutArrays(**{name: arguments.pop(name) for name in LAYOUT})
    layout = None if sizes is None else layouts.layout_of(sizes, arrays)
    return planner(operands=operands, layout=layout, **arguments)


def _product_shapes(call: Any) -> Outputs:
    slots = call.x
    if call.slot_of_row is not None:
        slots = call.slot_of_row if call.spec.scatter == "row" else call.row_of_slot
    width = activated(width_of(call.weight, call.spec.weight_layout), call.spec.activation)
    return [((slots.shape[0], width), out_dtype_of(call.x, call.spec.out_dtype))]


def _products(suffix: str, *matrices: str) -> tuple[Operator, Operator]:
    """The product and its backward. matrices: may be quantised."""
    tensors = (*fields_of(bundles.MatmulOperands), *(f"{name}?" for name in LAYOUT))
    forward, backward = (functools.partial(_product, one) for one in (plan_matmul_ogs, plan_matmul_ogs_backward))
    signature = Signature(tensors, ("spec", "sizes"), matrices=matrices)
    with_gradient = Signature(("d_y", *tensors), ("spec", "sizes", "wanted"), matrices=matrices, returns=None)
    return (
        Operator(f"matmul_ogs{suffix}", signature, forward, _product_shapes),
        BackwardOperator(f"matmul_ogs{suffix}_backward", with_gradient, backward, gradients_of),
    )


MATMUL_OGS, MATMUL_OGS_BACKWARD = _products("")
MATMUL_OGS_QUANTIZED, MATMUL_OGS_QUANTIZED_BACKWARD = _products("_quantized", "x", "weight", "up")
