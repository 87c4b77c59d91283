"""Every operator of the namespace `moebius`: schema, plan and output shapes.

Options travel as one string: `options.encode` of the values named beside each plan. No operator returns an alias.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_true

from moe_core.activation import plan_activation
from moe_core.arrays import ArraySpec, require_spec
from moe_core.matmul_ogs import plan_matmul_ogs
from moe_core.moe import plan_moe
from moe_core.operands import (
    ExpertWeights,
    MatmulOperands,
    MoEOperands,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
)
from moe_core.plan import LaunchPlan
from moe_core.reduction import plan_reduce, plan_scale_rows
from moe_core.routing import (
    plan_layout,
    plan_pack_bitmatrix,
    plan_router,
    plan_routing,
    plan_unpack_bitmatrix,
)
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MoESpec, RouterSpec
from moe_core.target import Target
from moe_torch.dispatch import Operator
from moe_torch.options import TORCH_DTYPES

#: Shape and dtype of every output.
Outputs = list[tuple[tuple[Any, ...], torch.dtype]]
Specs = ArraySpec | None

_WORD_BITS = 32


def _width(weight: torch.Tensor, weight_layout: str) -> Any:
    return weight.shape[-1] if weight_layout == "in_out" else weight.shape[-2]


def _activated(width: Any, activation: Activation | None) -> Any:
    """Columns after the activation of a buffer of `width` columns."""
    one_buffer = activation is not None and activation.gate_layout in ("halves", "interleaved")
    return width // 2 if one_buffer else width


def hidden_width(gate_up: torch.Tensor, spec: MoESpec) -> Any:
    """F of the experts or the shared expert with this gate_up. No format packs the axis that it is read from."""
    return _activated(_width(gate_up, spec.weight_layout), spec.activation)


def _out_dtype(x: torch.Tensor, name: str | None) -> torch.dtype:
    return x.dtype if name is None else TORCH_DTYPES[name]


# router: options (LogitsSpec,)
def _plan_router(x: ArraySpec, weight: ArraySpec, bias: Specs, spec: LogitsSpec, target: Target) -> LaunchPlan:
    return plan_router(x, weight, bias, spec, target)


def _router_shapes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: LogitsSpec) -> Outputs:
    return [((x.shape[0], _width(weight, spec.weight_layout)), torch.float32)]


ROUTER = Operator("router(Tensor x, Tensor weight, Tensor? bias, str options) -> Tensor", _plan_router, _router_shapes)


# route: options (RouterSpec,)
def _plan_route(
    logits: ArraySpec, correction_bias: Specs, token_mask: Specs, spec: RouterSpec, target: Target
) -> LaunchPlan:
    return plan_routing(logits, spec, target, correction_bias=correction_bias, token_mask=token_mask)


def _route_shapes(logits: torch.Tensor, correction_bias: Any, token_mask: Any, spec: RouterSpec) -> Outputs:
    shape = (logits.shape[0], spec.top_k)
    return [(shape, torch.int32), (shape, torch.float32)]


ROUTE = Operator(
    "route(Tensor logits, Tensor? correction_bias, Tensor? token_mask, str options) -> (Tensor, Tensor)",
    _plan_route,
    _route_shapes,
)


# make_layout: options (num_experts, alignment, max_rows)
def _plan_make_layout(
    ids: ArraySpec,
    expert_map: Specs,
    token_mask: Specs,
    num_experts: int,
    alignment: int,
    max_rows: int | None,
    target: Target,
) -> LaunchPlan:
    require_spec("ids", ids, ("num_tokens", "top_k"), "int32")
    layout = LayoutSpec(ids.shape[0], ids.shape[1], num_experts, alignment, max_rows)
    return plan_layout(ids, layout, target, expert_map=expert_map, token_mask=token_mask)


def _make_layout_shapes(
    ids: torch.Tensor, expert_map: Any, token_mask: Any, num_experts: int, alignment: int, max_rows: int | None
) -> Outputs:
    slots = ids.shape[0] * ids.shape[1]
    capacity = slots
    if max_rows is not None:
        capacity = num_experts * max_rows
    elif alignment > 1 and guard_or_true(slots > 0):
        capacity = slots + num_experts * (alignment - 1)
    return [((size,), torch.int32) for size in (num_experts, num_experts + 1, capacity, slots, 1)]


MAKE_LAYOUT = Operator(
    "make_layout(Tensor ids, Tensor? expert_map, Tensor? token_mask, str options) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _plan_make_layout,
    _make_layout_shapes,
)


# pack_bitmatrix: options (num_experts,); returns bitmatrix, duplicates, invalid_ids
def _plan_pack_bitmatrix(ids: ArraySpec, num_experts: int, target: Target) -> LaunchPlan:
    return plan_pack_bitmatrix(ids, num_experts, target)


def _pack_bitmatrix_shapes(ids: torch.Tensor, num_experts: int) -> Outputs:
    words = -(-num_experts // _WORD_BITS)
    return [((ids.shape[0], words), torch.uint32), ((1,), torch.int32), ((1,), torch.int32)]


PACK_BITMATRIX = Operator(
    "pack_bitmatrix(Tensor ids, str options) -> (Tensor, Tensor, Tensor)", _plan_pack_bitmatrix, _pack_bitmatrix_shapes
)


# unpack_bitmatrix: options (num_experts, top_k)
def _plan_unpack_bitmatrix(bitmatrix: ArraySpec, num_experts: int, top_k: int, target: Target) -> LaunchPlan:
    return plan_unpack_bitmatrix(bitmatrix, num_experts, top_k, target)


def _unpack_bitmatrix_shapes(bitmatrix: torch.Tensor, num_experts: int, top_k: int) -> Outputs:
    return [((bitmatrix.shape[0], top_k), torch.int32)]


UNPACK_BITMATRIX = Operator(
    "unpack_bitmatrix(Tensor bitmatrix, str options) -> Tensor", _plan_unpack_bitmatrix, _unpack_bitmatrix_shapes
)


# matmul_ogs: options (MatmulSpec, None) without a layout, else (MatmulSpec, (top_k, num_experts, alignment, max_rows)).
# The number of tokens comes from row_of_slot, so that the options do not change with it.
_OPERANDS = len(dataclasses.fields(MatmulOperands))


def plan_matmul_ogs_arrays(*request: Any) -> LaunchPlan:
    *arrays, spec, sizes, target = request
    layout = None
    if sizes is not None:
        row_of_slot = require_spec("row_of_slot", arrays[-1], ("num_tokens * top_k",), "int32")
        layout = LayoutSpec(row_of_slot.shape[0] // sizes[0], *sizes)
    return plan_matmul_ogs(MatmulOperands(*arrays[:_OPERANDS]), layout, spec, target)


def matmul_ogs_shapes(*request: Any) -> Outputs:
    *arrays, slot_of_row, row_of_slot, spec, _ = request
    x, weight = arrays[:2]
    if slot_of_row is None:
        rows = x.shape[0]
    else:
        rows = (slot_of_row if spec.scatter == "row" else row_of_slot).shape[0]
    width = _activated(_width(weight, spec.weight_layout), spec.activation)
    return [((rows, width), _out_dtype(x, spec.out_dtype))]


MATMUL_TENSORS = (
    "Tensor x, Tensor weight, Tensor? up, Tensor? bias, Tensor? up_bias, Tensor? row_weight, Tensor? layer, "
    "Tensor? group_sizes, Tensor? group_start, Tensor? slot_of_row, Tensor? row_of_slot"
)
MATMUL_OGS = Operator(f"matmul_ogs({MATMUL_TENSORS}, str options) -> Tensor", plan_matmul_ogs_arrays, matmul_ogs_shapes)


# activation: options (Activation, out_dtype)
def _plan_activation(
    x: ArraySpec, up: Specs, activation: Activation, out_dtype: str | None, target: Target
) -> LaunchPlan:
    return plan_activation(x, activation, target, up=up, out_dtype=out_dtype)


def _activation_shapes(x: torch.Tensor, up: Any, activation: Activation, out_dtype: str | None) -> Outputs:
    return [((x.shape[0], _activated(x.shape[1], activation)), _out_dtype(x, out_dtype))]


ACTIVATION = Operator("activation(Tensor x, Tensor? up, str options) -> Tensor", _plan_activation, _activation_shapes)


# reduce: options (top_k, order, out_dtype)
def _plan_reduce(
    y: ArraySpec,
    row_of_slot: ArraySpec,
    shared: Specs,
    shared_gate: Specs,
    top_k: int,
    order: str,
    out_dtype: str | None,
    target: Target,
) -> LaunchPlan:
    return plan_reduce(
        y, row_of_slot, top_k, target, order=order, shared=shared, shared_gate=shared_gate, out_dtype=out_dtype
    )


def _reduce_shapes(
    y: torch.Tensor,
    row_of_slot: torch.Tensor,
    shared: Any,
    shared_gate: Any,
    top_k: int,
    order: str,
    out_dtype: str | None,
) -> Outputs:
    return [((row_of_slot.shape[0] // top_k, y.shape[1]), _out_dtype(y, out_dtype))]


REDUCE = Operator(
    "reduce(Tensor y, Tensor row_of_slot, Tensor? shared, Tensor? shared_gate, str options) -> Tensor",
    _plan_reduce,
    _reduce_shapes,
)


# scale_rows: no options
def _scale_rows_shapes(x: torch.Tensor, weights: torch.Tensor) -> Outputs:
    return [((x.shape[0], x.shape[1]), x.dtype)]


SCALE_ROWS = Operator(
    "scale_rows(Tensor x, Tensor weights, str options) -> Tensor", plan_scale_rows, _scale_rows_shapes
)


# moe: options (MoESpec,). One overload per kind of routing, because their outputs differ.
_EXPERTS = (
    "Tensor experts_gate_up, Tensor experts_down, Tensor? experts_up, Tensor? experts_gate_up_bias, "
    "Tensor? experts_up_bias, Tensor? experts_down_bias, Tensor? experts_layer"
)
_ROUTINGS = {
    RouterWeights: "Tensor routing_weight, Tensor? routing_bias, Tensor? routing_correction_bias",
    RouterLogits: "Tensor routing_logits, Tensor? routing_correction_bias",
    TopK: "Tensor routing_ids, Tensor routing_weights",
}
_REST = (
    "Tensor? token_mask, Tensor? expert_map, Tensor? shared_gate_up, Tensor? shared_down, Tensor? shared_up, "
    "Tensor? shared_gate"
)
_NUM_EXPERT_ARRAYS = _EXPERTS.count("Tensor")
#: The tensors of a moe operator in its schema, by kind of routing; the prefixes of their bundles.
MOE_TENSORS = {kind: f"Tensor x, {_EXPERTS}, {routing}, {_REST}" for kind, routing in _ROUTINGS.items()}
MOE_BUNDLES = ("experts", "routing", "shared")


def moe_operands(routing_type: type, arrays: Sequence[Any], input_scales: Sequence[Any] = ()) -> MoEOperands:
    """The arrays of a moe operator as bundles. input_scales: those of gate_up and down, where there are any."""
    x, *others = arrays
    end = _NUM_EXPERT_ARRAYS + len(dataclasses.fields(routing_type))
    token_mask, expert_map, *rest = others[end:]
    shared = SharedExpert(*rest) if any(array is not None for array in rest) else None
    routing = routing_type(*others[_NUM_EXPERT_ARRAYS:end])
    experts = ExpertWeights(*others[:_NUM_EXPERT_ARRAYS], *input_scales)
    return MoEOperands(x, experts, routing, token_mask, expert_map, shared)


def plan_moe_of(given: MoEOperands, spec: MoESpec, target: Target, *, keep: bool = False) -> LaunchPlan:
    """`plan_moe` of bundles."""
    options = {"token_mask": given.token_mask, "expert_map": given.expert_map, "shared": given.shared}
    return plan_moe(given.x, given.experts, given.routing, spec, target, keep=keep, **options)


def _plan_moe(routing_type: type, *request: Any) -> LaunchPlan:
    *arrays, spec, target = request
    return plan_moe_of(moe_operands(routing_type, arrays), spec, target)


def moe_shapes(routing_type: type, x: torch.Tensor, *request: Any) -> Outputs:
    *arrays, spec = request
    given = moe_operands(routing_type, (x, *arrays))
    experts, routing = given.experts, given.routing
    num_experts = experts.gate_up.shape[0 if experts.layer is None else 1]
    outputs: Outputs = [
        ((x.shape[0], x.shape[1]), _out_dtype(x, spec.out_dtype)),
        ((num_experts,), torch.int32),
        ((1,), torch.int32),
    ]
    if routing_type is not TopK:
        shape = (x.shape[0], spec.router.top_k)
        outputs += [(shape, torch.int32), (shape, torch.float32)]
    if routing_type is RouterWeights:
        outputs.append(((x.shape[0], _width(routing.weight, spec.router_weight_layout)), torch.float32))
    return outputs


def _moe_operator(overload: str, routing_type: type, num_outputs: int) -> Operator:
    returns = ", ".join(["Tensor"] * num_outputs)
    return Operator(
        f"moe.{overload}({MOE_TENSORS[routing_type]}, str options) -> ({returns})",
        functools.partial(_plan_moe, routing_type),
        functools.partial(moe_shapes, routing_type),
        bundles=MOE_BUNDLES,
    )


#: output, tokens_per_expert, invalid_ids; then ids, weights; then logits.
MOE: dict[type, Operator] = {
    TopK: _moe_operator("top_k", TopK, 3),
    RouterLogits: _moe_operator("router_logits", RouterLogits, 5),
    RouterWeights: _moe_operator("router_weights", RouterWeights, 6),
}
