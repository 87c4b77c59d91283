"""Every operator of the namespace `moebius`: its tensors and options, its planner, the shapes of its outputs.

Options travel as one string: `options.encode` of the values named in the signature. No operator returns an alias. The
operators of quantised matrices are those of plain ones with the scales and zero points of each matrix beside it. They
are operators of their own, so that plain calls carry no empty arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.activation.backward import plan_activation_backward
from moe_core.ops.activation.forward import plan_activation
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.names import FLOWING, INPUT_SCALES, result_names, saved_names
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
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
from moe_core.specs import Activation, MoESpec
from moe_core.specs import operands as bundles
from moe_torch.bridge.operator import Operator, Outputs
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.bridge.signature import Signature, fields_of
from moe_torch.operators import layouts
from moe_torch.operators.kinds import MATRICES, BackwardOperator, TrainingOperator, accumulated

_WORD_BITS = 32


def _width(weight: Any, weight_layout: str) -> Any:
    return weight.shape[-1 if weight_layout == "in_out" else -2]


def _activated(width: Any, activation: Activation | None) -> Any:
    """Columns after the activation of a buffer of `width` columns."""
    one_buffer = activation is not None and activation.gate_layout in ("halves", "interleaved")
    return width // 2 if one_buffer else width


def _out_dtype(x: torch.Tensor, name: str | None) -> torch.dtype:
    return x.dtype if name is None else TORCH_DTYPES[name]


def _like(*tensors: Any) -> Outputs:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors if tensor is not None]


def _gradients(given: Any) -> Outputs:
    """Those that the options name and that are not added to a tensor of the caller."""
    added = accumulated(given.wanted, getattr(given, "into", None))
    return _like(*[attrgetter(name.removeprefix("d_"))(given) for name in given.wanted if name not in added])


def wide_gradients(given: Any) -> Outputs:
    """`_gradients`, of which d_wide is that of x in fp32."""
    given.wide = given.x.to(torch.float32) if "d_wide" in given.wanted else None
    return _gradients(given)


ROUTER = Operator(
    "router",
    Signature(("x", "weight", "bias?", "wide?"), ("spec",)),
    plan_router,
    lambda given: [((given.x.shape[0], _width(given.weight, given.spec.weight_layout)), torch.float32)],
)
ROUTER_BACKWARD = BackwardOperator(
    "router_backward",
    Signature(("d_logits", "x", "weight", "bias?"), ("spec", "wanted")),
    plan_router_backward,
    wide_gradients,
    None,
)
RMS_NORM = Operator("rms_norm", Signature(("x", "weight"), ("spec",)), plan_rms_norm, lambda given: _like(given.x))
RMS_NORM_BACKWARD = BackwardOperator(
    "rms_norm_backward",
    Signature(("d_y", "x", "weight"), ("spec", "wanted")),
    plan_rms_norm_backward,
    _gradients,
    None,
)


def _routed(given: Any, top_k: int) -> Outputs:
    shape = (given.shape[0], top_k)
    return [(shape, torch.int32), (shape, torch.float32)]


ROUTE = Operator(
    "route",
    Signature(("logits", "correction_bias?", "token_mask?", "given?"), ("spec",)),
    plan_routing,
    lambda given: _routed(given.logits, given.spec.top_k),
    2,
)
ROUTE_BACKWARD = BackwardOperator(
    "route_backward",
    Signature(
        ("gradients.weights", "logits", "ids", "token_mask?"), ("spec",), {"gradients": bundles.RoutingGradients}
    ),
    plan_routing_backward,
    lambda given: [(tuple(given.logits.shape), torch.float32)],
)


_LAYOUT_TENSORS, _LAYOUT_OPTIONS = ("ids", "expert_map?", "token_mask?"), ("num_experts", "alignment", "max_rows")
MAKE_LAYOUT = Operator(
    "make_layout", Signature(_LAYOUT_TENSORS, _LAYOUT_OPTIONS), layouts.make_layout_plan, layouts.layout_shapes, 5
)
#: Of `LayoutSpec.rows`; has one more result, the overflow.
MAKE_BOUNDED_LAYOUT = Operator(
    "make_bounded_layout",
    Signature(_LAYOUT_TENSORS, (*_LAYOUT_OPTIONS, "rows")),
    layouts.make_layout_plan,
    layouts.bounded_layout_shapes,
    6,
)
#: Returns bitmatrix, duplicates, invalid_ids.
PACK_BITMATRIX = Operator(
    "pack_bitmatrix",
    Signature(("ids",), ("num_experts",)),
    plan_pack_bitmatrix,
    lambda given: [
        ((given.ids.shape[0], -(-given.num_experts // _WORD_BITS)), torch.uint32),
        *[((1,), torch.int32)] * 2,
    ],
    3,
)
UNPACK_BITMATRIX = Operator(
    "unpack_bitmatrix",
    Signature(("bitmatrix",), ("num_experts", "top_k")),
    plan_unpack_bitmatrix,
    lambda given: [((given.bitmatrix.shape[0], given.top_k), torch.int32)],
)
ACTIVATION = Operator(
    "activation",
    Signature(("x", "up?"), ("activation", "out_dtype")),
    plan_activation,
    lambda given: [
        ((given.x.shape[0], _activated(given.x.shape[1], given.activation)), _out_dtype(given.x, given.out_dtype))
    ],
)
ACTIVATION_BACKWARD = BackwardOperator(
    "activation_backward",
    Signature(("d_y", "x", "up?"), ("activation",)),
    plan_activation_backward,
    lambda given: _like(given.x, given.up),
    None,
)


#: Returns ids, then the arrays of a layout but for invalid_ids.
LAYOUT_OF_RUNS = Operator(
    "layout_of_runs",
    Signature(("counts",), ("num_rows", "stride")),
    plan_layout_of_runs,
    layouts.runs_shapes,
    6,
)
REDUCE = Operator(
    "reduce",
    Signature(("y", "row_of_slot", "shared?", "shared_gate?"), ("sizes", "order", "out_dtype")),
    layouts.reduce_plan,
    lambda given: [
        ((given.row_of_slot.shape[0] // given.sizes[1], given.y.shape[1]), _out_dtype(given.y, given.out_dtype))
    ],
)


GATHER_ROWS = Operator(
    "gather_rows",
    Signature(("x", "slot_of_row", "row_of_slot", "wide?"), ("sizes",)),
    layouts.gather_rows_plan,
    lambda given: [((given.slot_of_row.shape[0], given.x.shape[1]), given.x.dtype)],
)
SCALE_ROWS = Operator(
    "scale_rows",
    Signature(("x", "weights")),
    plan_scale_rows,
    lambda given: [((given.x.shape[0], given.x.shape[1]), given.x.dtype)],
)


def _quantize_rows_shapes(given: Any) -> Outputs:
    shape, format = given.x.shape, given.format
    groups = (format.group_rows, format.group_columns)
    scales = tuple(1 if group is None else -(-size // group) for size, group in zip(shape, groups, strict=True))
    element = format.own_element
    values = ((shape[0], shape[1] // element.per_byte), TORCH_DTYPES[element.dtype])
    return [values, (scales, TORCH_DTYPES[format.scale_dtypes[0]])]


#: Returns values, scales.
QUANTIZE_ROWS = Operator(
    "quantize_rows",
    Signature(("x", "static_scale?", "used_by?"), ("format",)),
    lambda *, static_scale, **given: plan_quantize_rows(scales=static_scale, **given),
    _quantize_rows_shapes,
    2,
)

_OPERANDS = tuple(name for name, _ in bundles.array_fields(bundles.MatmulOperands))
#: The layout's arrays that a product reads.
LAYOUT = ("group_sizes", "group_start", "slot_of_row", "row_of_slot")


def _product(planner: Callable[..., LaunchPlan], **given: Any) -> LaunchPlan:
    """sizes: None without a layout, else its `layout_sizes`."""
    sizes = given.pop("sizes")
    arrays = {name: given.pop(name) for name in (*_OPERANDS, *LAYOUT)}
    layout = (
        None if sizes is None else layouts.layout_of(sizes, bundles.LayoutArrays(*[arrays[name] for name in LAYOUT]))
    )
    operands = bundles.MatmulOperands(*[arrays[name] for name in _OPERANDS])
    return planner(operands=operands, layout=layout, **given)


def _product_shapes(given: Any) -> Outputs:
    places = given.x
    if given.slot_of_row is not None:
        places = given.slot_of_row if given.spec.scatter == "row" else given.row_of_slot
    width = _activated(_width(given.weight, given.spec.weight_layout), given.spec.activation)
    return [((places.shape[0], width), _out_dtype(given.x, given.spec.out_dtype))]


def _products(suffix: str, *matrices: str) -> tuple[Operator, Operator]:
    """The product and its backward. matrices: those that may be quantised."""
    tensors = (*fields_of(bundles.MatmulOperands), *(f"{name}?" for name in LAYOUT))
    forward, backward = (functools.partial(_product, one) for one in (plan_matmul_ogs, plan_matmul_ogs_backward))
    signature = Signature(tensors, ("spec", "sizes"), matrices=matrices)
    with_gradient = Signature(("d_y", *tensors), ("spec", "sizes", "wanted"), matrices=matrices)
    return (
        Operator(f"matmul_ogs{suffix}", signature, forward, _product_shapes),
        BackwardOperator(f"matmul_ogs{suffix}_backward", with_gradient, backward, _gradients, None),
    )


MATMUL_OGS, MATMUL_OGS_BACKWARD = _products("")
MATMUL_OGS_QUANTIZED, MATMUL_OGS_QUANTIZED_BACKWARD = _products("_quantized", "x", "weight", "up")

#: One overload per kind of routing, because their outputs differ.
_OVERLOADS = {bundles.TopK: "top_k", bundles.RouterLogits: "router_logits", bundles.RouterWeights: "router_weights"}
EXPERT_MATRICES = ("experts.gate_up", "experts.down", "experts.up")


#: All that a forward may save, in the order in which backwards take it.
SAVED = ("saved.pre_activation?", "saved.group_start", "saved.slot_of_row", "saved.row_of_slot")
SAVED += ("saved.shared_pre_activation?", "saved.shared_gate?")


def moe_tensors(kind: type) -> tuple[str, ...]:
    experts = fields_of(bundles.ExpertWeights, "experts", without=INPUT_SCALES)
    shared = fields_of(bundles.SharedExpert, "shared", optional=True)
    return ("x", *experts, *fields_of(kind, "routing"), "token_mask?", "expert_map?", *shared)


def moe_bundles(kind: type) -> dict[str, type]:
    return {
        "gradients": bundles.OutputGradients,
        "experts": bundles.ExpertWeights,
        "routing": kind,
        "shared": bundles.SharedExpert,
    }


def _num_experts(experts: bundles.ExpertWeights) -> Any:
    return experts.gate_up.shape[0 if experts.layer_index is None else 1]


def moe_shapes(given: Any) -> Outputs:
    """Of `result_names`."""
    x, spec, routing = given.x, given.spec, given.routing
    outputs: Outputs = [
        ((x.shape[0], x.shape[1]), _out_dtype(x, spec.out_dtype)),
        ((_num_experts(given.experts),), torch.int32),
        ((1,), torch.int32),
    ]
    if not isinstance(routing, bundles.TopK):
        outputs += _routed(x, spec.router.top_k)
    if isinstance(routing, bundles.RouterWeights):
        outputs.append(((x.shape[0], _width(routing.weight, spec.router_weight_layout)), torch.float32))
    return outputs


def training_shapes(given: Any) -> Outputs:
    """Of `result_names`, with the ids and weights used where they were given, then of `saved_names`."""
    x, spec, routing, shared = given.x, given.spec, given.routing, given.shared
    outputs = moe_shapes(given) + (_routed(x, routing.ids.shape[1]) if isinstance(routing, bundles.TopK) else [])
    slots = x.shape[0] * (routing.ids.shape[1] if isinstance(routing, bundles.TopK) else spec.router.top_k)
    rows, limit = slots, spec.row_limit
    if limit is not None:
        rows = torch.sym_min(slots, x.shape[0] * limit.per_token + _num_experts(given.experts) * limit.per_expert)
    widths = {
        name: spec.activation.input_width(_activated(_width(bundle.gate_up, spec.weight_layout), spec.activation))
        for name, bundle in (("experts", given.experts), ("shared", shared))
        if bundle is not None
    }
    shapes = {
        "saved.pre_activation": ((rows, widths["experts"]), x.dtype),
        "saved.group_start": ((_num_experts(given.experts) + 1,), torch.int32),
        "saved.slot_of_row": ((rows,), torch.int32),
        "saved.row_of_slot": ((slots,), torch.int32),
        "saved.shared_pre_activation": ((x.shape[0], widths.get("shared")), x.dtype),
        "saved.shared_gate": ((x.shape[0], 1), torch.float32),
    }
    return outputs + [shapes[name] for name in saved_names(spec, shared)]


def plan_forward(
    x: ArraySpec, experts: bundles.ExpertWeights, routing: Any, spec: MoESpec, target: Target, **options: Any
) -> LaunchPlan:
    return plan_moe(x, experts, routing, spec, target, options=ForwardOptions(**options))


def plan_backward(
    gradients: bundles.OutputGradients,
    spec: MoESpec,
    wanted: tuple[str, ...],
    target: Target,
    *,
    overwrite: bool = False,
    **given: Any,
) -> LaunchPlan:
    operands = bundles.MoEOperands(**{name: given[name] for name, _ in bundles.array_fields(bundles.MoEOperands)})
    names = tuple("d_x" if name == "d_wide" else name for name in wanted)
    options = BackwardOptions(
        names,
        accumulated(wanted, given.get("into")),
        wide=names != wanted,
        overwrite=overwrite,
        results_at=given.get("results_at"),
    )
    return plan_moe_backward(gradients, operands, spec, target, options=options)


def _moe(kind: type, packet: str, *matrices: str) -> Operator:
    """Returns `result_names(kind)`."""
    tensors = (*moe_tensors(kind), *(f"{name}?" for name in INPUT_SCALES if matrices))
    signature = Signature(tensors, ("spec",), moe_bundles(kind), matrices)
    return Operator(f"{packet}.{_OVERLOADS[kind]}", signature, plan_forward, moe_shapes, len(result_names(kind)))


def _training(kind: type, packet: str, *matrices: str) -> Operator:
    signature = (MOE_QUANTIZED if matrices else MOE)[kind].signature
    planner = functools.partial(plan_forward, save=True)
    return TrainingOperator(f"{packet}.{_OVERLOADS[kind]}", signature, planner, training_shapes, None)


def backward_tensors(kind: type, more: tuple[str, ...] = (), *, into: bool) -> tuple[str, ...]:
    """The gradients of the forward's results, the forward's tensors, its results and what it saved, then `more`.

    into: the backward writes into memory that it is given: gradients of matrices are added to `into`, and the saved
    pre-activation is overwritten."""
    found = [name for name in result_names(kind) if name not in ("output", "invalid_ids")]
    gradients = [f"gradients.{name}" + "?" * (name != "output") for name in FLOWING if name in result_names(kind)]
    added = [f"into.{name}!" for name in MATRICES if into]
    saved = [name.replace("?", "!") if into and name == "saved.pre_activation?" else name for name in SAVED]
    return (*gradients, *moe_tensors(kind), *found, *saved, *more, *added)


def _backward(kind: type, packet: str, *matrices: str) -> Operator:
    """Reads `backward_tensors`; one whose name ends with `_into` writes into memory that it is given."""
    into = packet.endswith("_into")
    signature = Signature(backward_tensors(kind, into=into), ("spec", "wanted"), moe_bundles(kind), matrices)
    planner = functools.partial(plan_backward, overwrite=into)
    return BackwardOperator(f"{packet}.{_OVERLOADS[kind]}", signature, planner, wide_gradients, None)


def _by_kind(make: Callable[..., Operator], packet: str, *matrices: str) -> dict[type, Operator]:
    return {kind: make(kind, packet, *matrices) for kind in _OVERLOADS}


MOE = _by_kind(_moe, "moe")
MOE_QUANTIZED = _by_kind(_moe, "moe_quantized", *EXPERT_MATRICES)
#: A forward that also returns what its backward reads, and that backward; docs/user/training.md.
TRAINING = _by_kind(_training, "moe_training")
BACKWARD = _by_kind(_backward, "moe_backward")
#: With tensors that take the sum of what they hold and a gradient.
BACKWARD_INTO = _by_kind(_backward, "moe_backward_into")
QUANTIZED_TRAINING = _by_kind(_training, "moe_quantized_training", *EXPERT_MATRICES)
QUANTIZED_BACKWARD = _by_kind(_backward, "moe_quantized_backward", *EXPERT_MATRICES)
QUANTIZED_BACKWARD_INTO = _by_kind(_backward, "moe_quantized_backward_into", *EXPERT_MATRICES)
