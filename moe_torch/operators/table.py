"""The operators of whole forwards, training steps and backwards, for every kind of routing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.names import FLOWING, INPUT_SCALES, result_names, saved_names
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import MoESpec
from moe_core.specs import operands as bundles
from moe_torch.bridge.operator import Operator, Outputs
from moe_torch.bridge.signature import Signature, fields_of
from moe_torch.operators.kinds import MATRICES, BackwardOperator, TrainingOperator, accumulated
from moe_torch.operators.shapes import activated, out_dtype_of, routed, wide_gradients, width_of

_OVERLOADS = {bundles.TopK: "top_k", bundles.RouterLogits: "router_logits", bundles.RouterWeights: "router_weights"}
EXPERT_MATRICES = ("experts.gate_up", "experts.down", "experts.up")


#: Everything that a forward may save, in the order of backwards' arguments.
_SAVED = ("saved.pre_activation?", "saved.group_start", "saved.slot_of_row", "saved.row_of_slot")
_SAVED += ("saved.shared_pre_activation?", "saved.shared_gate?")
_SAVED_LOWS = ("saved.virtual_sizes", "saved.virtual_start", "saved.low1?", "saved.low2?")


_BEYOND = tuple(f"lora.{name}" for name in bundles.BEYOND_EXPERTS)


def moe_tensors(kind: type, matrices: Sequence[str] = (), lora: bool = False) -> tuple[str, ...]:
    """matrices: arrays that may be quantised, with static scales of their inputs. lora: adapters of experts too."""
    experts = fields_of(bundles.ExpertWeights, "experts", without=INPUT_SCALES)
    shared = fields_of(bundles.SharedExpert, "shared", optional=True)
    scales = [f"{name}?" for name in INPUT_SCALES if matrices]
    adapters = (*fields_of(bundles.LoRAFactors, "lora", without=_BEYOND), "adapter_ids") if lora else ()
    return ("x", *experts, *fields_of(kind, "routing"), "token_mask?", "expert_map?", *shared, *scales, *adapters)


_BUNDLES = {"gradients": bundles.OutputGradients, "experts": bundles.ExpertWeights, "shared": bundles.SharedExpert}
_BUNDLES |= {"lora": bundles.LoRAFactors}


def moe_bundles(kind: type) -> dict[str, type]:
    return {**_BUNDLES, "routing": kind}


def _num_experts(experts: bundles.ExpertWeights) -> Any:
    return experts.gate_up.shape[0 if experts.layer_index is None else 1]


def moe_shapes(call: Any) -> Outputs:
    x, spec, routing = call.x, call.spec, call.routing
    outputs: Outputs = [((x.shape[0], x.shape[1]), out_dtype_of(x, spec.out_dtype))]
    outputs += [((count,), torch.int32) for count in (_num_experts(call.experts), 1)]
    if not isinstance(routing, bundles.TopK):
        outputs += routed(x, spec.router.top_k)
    if isinstance(routing, bundles.RouterWeights):
        outputs.append(((x.shape[0], width_of(routing.weight, spec.router_weight_layout)), torch.float32))
    return outputs


def training_shapes(call: Any) -> Outputs:
    """The shapes of `result_names`, of the used ids and weights, and of `saved_names`."""
    x, spec, routing, shared = call.x, call.spec, call.routing, call.shared
    outputs = moe_shapes(call) + (routed(x, routing.ids.shape[1]) if isinstance(routing, bundles.TopK) else [])
    slots = x.shape[0] * (routing.ids.shape[1] if isinstance(routing, bundles.TopK) else spec.router.top_k)
    rows, limit = slots, spec.row_limit
    if limit is not None:
        rows = torch.sym_min(slots, x.shape[0] * limit.per_token + _num_experts(call.experts) * limit.per_expert)
    widths = {
        name: spec.activation.input_width(activated(width_of(bundle.gate_up, spec.weight_layout), spec.activation))
        for name, bundle in (("experts", call.experts), ("shared", shared))
        if bundle is not None
    }
    shapes = {
        "saved.pre_activation": ((rows, widths["experts"]), x.dtype),
        "saved.group_start": ((_num_experts(call.experts) + 1,), torch.int32),
        "saved.slot_of_row": ((rows,), torch.int32),
        "saved.row_of_slot": ((slots,), torch.int32),
        "saved.shared_pre_activation": ((x.shape[0], widths.get("shared")), x.dtype),
        "saved.shared_gate": ((x.shape[0], 1), torch.float32),
    }
    if (lora := getattr(call, "lora", None)) is not None:
        groups = _num_experts(call.experts) * (lora.scale.shape[0] + 1)
        shapes |= {"saved.virtual_sizes": ((groups,), torch.int32), "saved.virtual_start": ((groups + 1,), torch.int32)}
        factors = {"saved.low1": lora.a1, "saved.low2": lora.a2}
        shapes |= {name: ((rows, one.shape[-1]), x.dtype) for name, one in factors.items() if one is not None}
    return outputs + [shapes[name] for name in saved_names(spec, shared, lora)]


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
    into: Mapping[str, ArraySpec | None] | None = None,
    results_at: ArraySpec | None = None,
    **arrays: Any,
) -> LaunchPlan:
    """arrays: of the forward, its results, and its saved ones."""
    names = [name for name, _ in bundles.array_fields(bundles.MoEOperands) if name in arrays]
    operands = bundles.MoEOperands(**{name: arrays[name] for name in names})
    names = tuple("d_x" if name == "d_wide" else name for name in wanted)
    added, wide = accumulated(wanted, into), names != wanted
    options = BackwardOptions(names, added, wide=wide, overwrite=overwrite, results_at=results_at)
    return plan_moe_backward(gradients, operands, spec, target, options=options)


def _declare(name: str, kind: type, tensors: tuple[str, ...], *options: str, **more: Any) -> Signature:
    return Signature(name, tensors, options, moe_bundles(kind), **more)


def _moe(kind: type, name: str, *matrices: str, lora: bool = False) -> Operator:
    """Returns `result_names(kind)`."""
    tensors, returns = moe_tensors(kind, matrices, lora), len(result_names(kind))
    return Operator(_declare(name, kind, tensors, "spec", matrices=matrices, returns=returns), plan_forward, moe_shapes)


def _training(kind: type, name: str, *matrices: str, lora: bool = False) -> Operator:
    declaration = _declare(name, kind, moe_tensors(kind, matrices, lora), "spec", matrices=matrices, returns=None)
    return TrainingOperator(declaration, functools.partial(plan_forward, save=True), training_shapes)


def backward(
    kind: type,
    name: str,
    *matrices: str,
    more: tuple[str, ...] = (),
    shapes: Callable[[Any], Outputs] = wide_gradients,
    lora: bool = False,
) -> Operator:
    """Takes gradients, the forward's tensors, results and saved ones, then `more`. With a name in `_into` it adds to
    `into` and overwrites the saved pre-activation.
    """
    into = name.partition(".")[0].endswith("_into")
    results = [result for result in result_names(kind) if result not in ("output", "invalid_ids")]
    gradients = [f"gradients.{one}" + "?" * (one != "output") for one in FLOWING if one in result_names(kind)]
    added = [f"into.{matrix}!" for matrix in MATRICES if into]
    saved = [one.replace("?", "!") if into and one == "saved.pre_activation?" else one for one in _SAVED]
    saved += list(_SAVED_LOWS) if lora else []
    tensors = (*gradients, *moe_tensors(kind, lora=lora), *results, *saved, *more, *added)
    rest: dict[str, Any] = {"matrices": matrices, "returns": None, "unplanned": ("memory",)}
    planner = functools.partial(plan_backward, overwrite=into)
    return BackwardOperator(_declare(name, kind, tensors, "spec", "wanted", **rest), planner, shapes)


def _by_kind(make: Callable[..., Operator], packet: str, *matrices: str, **options: bool) -> dict[type, Operator]:
    return {kind: make(kind, f"{packet}.{overload}", *matrices, **options) for kind, overload in _OVERLOADS.items()}


MOE = _by_kind(_moe, "moe")
MOE_QUANTIZED = _by_kind(_moe, "moe_quantized", *EXPERT_MATRICES)
#: See docs/user/training.md.
TRAINING = _by_kind(_training, "moe_training")
BACKWARD = _by_kind(backward, "moe_backward")
BACKWARD_INTO = _by_kind(backward, "moe_backward_into")
QUANTIZED_TRAINING = _by_kind(_training, "moe_quantized_training", *EXPERT_MATRICES)
QUANTIZED_BACKWARD = _by_kind(backward, "moe_quantized_backward", *EXPERT_MATRICES)
QUANTIZED_BACKWARD_INTO = _by_kind(backward, "moe_quantized_backward_into", *EXPERT_MATRICES)
#: With adapters, on plain or quantised experts.
LORA = _by_kind(_moe, "moe_lora", *EXPERT_MATRICES, lora=True)
LORA_TRAINING = _by_kind(_training, "moe_lora_training", *EXPERT_MATRICES, lora=True)
LORA_BACKWARD = _by_kind(backward, "moe_lora_backward", *EXPERT_MATRICES, lora=True)
LORA_BACKWARD_INTO = _by_kind(backward, "moe_lora_backward_into", *EXPERT_MATRICES, lora=True)
