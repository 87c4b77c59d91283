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
from moe_core.ops.routing.layout import plan_layout_of_runs
from moe_core.ops.routing.rounding import plan_route_rounded, plan_route_rounded_backward
from moe_core.ops.routing.topk import plan_routing
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, LogitsSpec, NormSpec, RouterSpec, TokenRounding
from moe_core.specs import operands as bundles
from moe_torch.bridge.operator import Operator, Outputs
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.bridge.signature import MaybeTensor, Signature, Tensor, fields_of
from moe_torch.operators import layouts, shapes
from moe_torch.operators.kinds import BackwardOperator
from moe_torch.operators.shapes import Names, activated, like, out_dtype_of, routed, width_of

_WORD_BITS = 32
_WeightGradients = Annotated[bundles.RoutingGradients, ("weights",)]


def _router(*, x: Tensor, weight: Tensor, bias: MaybeTensor, wide: MaybeTensor, spec: LogitsSpec) -> Tensor: ...
def _router_backward(
    *, d_logits: Tensor, x: Tensor, weight: Tensor, bias: MaybeTensor, spec: LogitsSpec, wanted: Names
) -> list[Tensor]: ...
def _rms_norm(*, x: Tensor, weight: Tensor, spec: NormSpec) -> Tensor: ...
def _rms_norm_backward(*, d_y: Tensor, x: Tensor, weight: Tensor, spec: NormSpec, wanted: Names) -> list[Tensor]: ...
def _route(
    *, logits: Tensor, correction_bias: MaybeTensor, token_mask: MaybeTensor, given: MaybeTensor, spec: RouterSpec
) -> tuple[Tensor, Tensor]: ...
def _route_backward(
    *, gradients: _WeightGradients, logits: Tensor, ids: Tensor, token_mask: MaybeTensor, spec: RouterSpec
) -> Tensor: ...
def _route_rounded(
    *, logits: Tensor, correction_bias: MaybeTensor, token_mask: MaybeTensor, spec: RouterSpec, rounding: TokenRounding
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def _route_rounded_backward(
    *, d_weights: Tensor, logits: Tensor, ids: Tensor, candidates: Tensor, spec: RouterSpec, rounding: TokenRounding
) -> Tensor: ...
def _make_layout(
    *, ids: Tensor, expert_map: MaybeTensor, token_mask: MaybeTensor, num_experts: int, alignment: int,
    max_rows: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip
def _make_bounded_layout(
    *, ids: Tensor, expert_map: MaybeTensor, token_mask: MaybeTensor, num_experts: int, alignment: int,
    max_rows: int | None, rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip
def _pack_bitmatrix(*, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]: ...
def _unpack_bitmatrix(*, bitmatrix: Tensor, num_experts: int, top_k: int) -> Tensor: ...
def _activation(*, x: Tensor, up: MaybeTensor, activation: Activation, out_dtype: str | None) -> Tensor: ...
def _activation_backward(*, d_y: Tensor, x: Tensor, up: MaybeTensor, activation: Activation) -> list[Tensor]: ...
def _layout_of_runs(
    *, counts: Tensor, num_rows: int, stride: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def _reduce(
    *, y: Tensor, row_of_slot: Tensor, shared: MaybeTensor, shared_gate: MaybeTensor, sizes: layouts.Sizes, order: str,
    out_dtype: str | None,
) -> Tensor: ...  # fmt: skip
def _gather_rows(
    *, x: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, wide: MaybeTensor, sizes: layouts.Sizes
) -> Tensor: ...
def _scale_rows(*, x: Tensor, weights: Tensor) -> Tensor: ...
def _quantize_rows(
    *, x: Tensor, static_scale: MaybeTensor, used_by: MaybeTensor, format: Format
) -> tuple[Tensor, Tensor]: ...


def _router_shapes(call: Any) -> Outputs:
    return [((call.x.shape[0], width_of(call.weight, call.spec.weight_layout)), torch.float32)]


def _rounded_shapes(call: Any) -> Outputs:
    tokens, num_experts = call.logits.shape[0], call.logits.shape[1]
    table = (tokens, call.rounding.width(call.spec.require_top_k(), num_experts))
    return [(table, torch.int32), (table, torch.float32), ((num_experts,), torch.int32), (table, torch.int32)]


def _bitmatrix_shapes(call: Any) -> Outputs:
    words = call.ids.shape[0], -(-call.num_experts // _WORD_BITS)
    return [(words, torch.uint32), *[((1,), torch.int32)] * 2]


def _activation_shapes(call: Any) -> Outputs:
    width = activated(call.x.shape[1], call.activation)
    return [((call.x.shape[0], width), out_dtype_of(call.x, call.out_dtype))]


def _reduce_shapes(call: Any) -> Outputs:
    tokens = call.row_of_slot.shape[0] // call.sizes[1]
    return [((tokens, call.y.shape[1]), out_dtype_of(call.y, call.out_dtype))]


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


ROUTER = Operator(_router, plan_router, _router_shapes)
ROUTER_BACKWARD = BackwardOperator(_router_backward, plan_router_backward, shapes.wide_gradients)
RMS_NORM = Operator(_rms_norm, plan_rms_norm, lambda call: like(call.x))
RMS_NORM_BACKWARD = BackwardOperator(_rms_norm_backward, plan_rms_norm_backward, shapes.gradients_of)
ROUTE = Operator(_route, plan_routing, lambda call: routed(call.logits, call.spec.top_k))
ROUTE_BACKWARD = BackwardOperator(_route_backward, plan_routing_backward, shapes.like_logits)
#: Returns ids, weights, tokens_per_expert, candidates.
ROUTE_ROUNDED = Operator(_route_rounded, plan_route_rounded, _rounded_shapes)
ROUTE_ROUNDED_BACKWARD = BackwardOperator(_route_rounded_backward, plan_route_rounded_backward, shapes.like_logits)
MAKE_LAYOUT = Operator(_make_layout, layouts.make_layout_plan, layouts.layout_shapes)
#: For `LayoutSpec.rows`, with the overflow as a result.
MAKE_BOUNDED_LAYOUT = Operator(_make_bounded_layout, layouts.make_layout_plan, layouts.bounded_layout_shapes)
#: Returns bitmatrix, duplicates, invalid_ids.
PACK_BITMATRIX = Operator(_pack_bitmatrix, plan_pack_bitmatrix, _bitmatrix_shapes)
UNPACK_BITMATRIX = Operator(
    _unpack_bitmatrix, plan_unpack_bitmatrix, lambda call: [((call.bitmatrix.shape[0], call.top_k), torch.int32)]
)
ACTIVATION = Operator(_activation, plan_activation, _activation_shapes)
ACTIVATION_BACKWARD = BackwardOperator(
    _activation_backward, plan_activation_backward, lambda call: like(call.x, call.up)
)
#: Returns ids, then the arrays of a layout except invalid_ids.
LAYOUT_OF_RUNS = Operator(_layout_of_runs, plan_layout_of_runs, layouts.runs_shapes)
REDUCE = Operator(_reduce, layouts.reduce_plan, _reduce_shapes)
GATHER_ROWS = Operator(_gather_rows, layouts.gather_rows_plan, layouts.taken_shapes)
SCALE_ROWS = Operator(_scale_rows, plan_scale_rows, lambda call: like(call.x))
#: Returns values, scales.
QUANTIZE_ROWS = Operator(_quantize_rows, _plan_quantize_rows, _quantize_rows_shapes)

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
    name, options = f"matmul_ogs{suffix}", ("spec", "sizes")
    signature = Signature(name, tensors, options, matrices=matrices)
    with_gradient = Signature(
        f"{name}_backward", ("d_y", *tensors), (*options, "wanted"), matrices=matrices, returns=None
    )
    return (
        Operator(signature, forward, _product_shapes),
        BackwardOperator(with_gradient, backward, shapes.gradients_of),
    )


MATMUL_OGS, MATMUL_OGS_BACKWARD = _products("")
MATMUL_OGS_QUANTIZED, MATMUL_OGS_QUANTIZED_BACKWARD = _products("_quantized", "x", "weight", "up")
