"""Plans of a whole MoE backward."""

from __future__ import annotations

import dataclasses
import math

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec
from moe_core.base.checks import require_wanted
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.ops.exchange.checks import require_width
from moe_core.ops.moe.backward_stages import BackwardPlanner
from moe_core.ops.moe.checks import quantized_experts
from moe_core.ops.moe.forward import SAVED, plan_moe
from moe_core.ops.moe.names import CONSTANTS, INPUT_SCALES
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.routing.backward import gradient_shapes
from moe_core.plan import Explanation, LaunchPlan, PlanBuilder, Role
from moe_core.plan.float64 import any_precision
from moe_core.specs import MoEOperands, OutputGradients, RouterLogits, RouterWeights, TopK, named_arrays, named_fields
from moe_core.specs.moe import MoESpec

#: Matrices whose gradients may be accumulated.
_MATRICES = ("gate_up", "up", "down", "weight")
#: Outputs that the backward does not read.
_UNREAD = ("output", "invalid_ids")


def gradient_names(operands: MoEOperands) -> tuple[str, ...]:
    """`d_x`, then `d_` and each differentiated array of the bundles. Quantised matrices have none."""
    arrays = (
        *named_fields(operands.experts, "experts."),
        *named_fields(operands.routing, "routing."),
        *(named_fields(operands.shared, "shared.") if operands.shared is not None else ()),
        *(named_fields(operands.lora, "lora.") if operands.lora is not None else ()),
    )
    differentiable = (name for name, value in arrays if not isinstance(value, QuantizedTensor))
    return ("d_x", *(f"d_{name}" for name in differentiable if name not in (*CONSTANTS, *INPUT_SCALES)))


def _array_of(name: str, operands: MoEOperands) -> ArraySpec:
    bundle, _, field = name.removeprefix("d_").partition(".")
    array = getattr(operands, bundle)
    return getattr(array, field) if field else array


def _gradient_shape(name: str, operands: MoEOperands, one_layer: bool) -> tuple[int, ...]:
    array, stacked = _array_of(name, operands), operands.experts.layer_index is not None
    if name.startswith("d_shared."):
        stacked = stacked and name != "d_shared.gate" and array.rank == 3
    elif not name.startswith("d_experts."):
        stacked = False
    return array.shape[1:] if one_layer and stacked else array.shape


def _validate(gradients: OutputGradients, operands: MoEOperands, forward: LaunchPlan, options: BackwardOptions) -> None:
    wanted, accumulate = options.wanted, options.accumulate
    require_wanted(wanted, gradient_names(operands))
    if options.one_layer and accumulate:
        raise InvalidInput(f"accumulate must be () with one_layer, got {accumulate}; accumulate into the whole stack")
    summable = {name for name in wanted if name.rpartition(".")[2] in _MATRICES}
    if not set(accumulate) <= summable or len(set(accumulate)) != len(accumulate):
        raise InvalidInput(
            f"accumulate must name matrices among the gradients wanted ({', '.join(sorted(summable))}), each once, got "
            f"{accumulate}; leave the others out"
        )
    tokens, d_model = operands.x.shape
    require_spec("gradients.output", gradients.output, (tokens, d_model), dtypes.MATMUL_DTYPES)
    extra = [name for name, _ in named_arrays(gradients) if name != "output"]
    if isinstance(operands.routing, TopK):
        if extra:
            raise InvalidInput(
                f"gradients.{extra[0]} must be None where ids and weights are given, which are no outputs then; got an "
                "array, leave it out"
            )
        return
    logits = operands.routing.logits if isinstance(operands.routing, RouterLogits) else forward.spec("logits")
    shapes = gradient_shapes(tokens, logits.shape[1], forward.spec("ids").shape[1])
    for name in extra:
        require_spec(f"gradients.{name}", getattr(gradients, name), shapes[name], "float32")


def _require_addresses(results_at: ArraySpec, operands: MoEOperands, otherwise: bool) -> None:
    """otherwise: the last product does not make the rows of d_x."""
    routing = operands.routing
    if not isinstance(routing, TopK) or operands.shared is not None or otherwise:
        raise InvalidInput(
            "results_at must be None but with a TopK, and without shared, wide and apply_router_weight_on_input, got "
            f"{routing}; leave it out"
        )
    require_spec("results_at", results_at, (math.prod(routing.ids.shape),), "int64")
    require_width("d_x", operands.x.shape[1], operands.x.dtype)


def _forward(operands: MoEOperands, spec: MoESpec, target: Target) -> LaunchPlan:
    adapters = {"lora": operands.lora, "adapter_ids": operands.adapter_ids}
    options = ForwardOptions(operands.token_mask, operands.expert_map, operands.shared, save=True, **adapters)
    return plan_moe(operands.x, operands.experts, operands.routing, spec, target, options=options)


@keep_plans
def plan_moe_backward(
    gradients: OutputGradients, operands: MoEOperands, spec: MoESpec, target: Target, *, options: BackwardOptions
) -> LaunchPlan:
    """One plan for the whole backward of `plan_moe`. Equations and rounding points: docs/user/training.md.

    gradients, operands: ArraySpecs; gradients.output `[T, D]` in any matmul dtype, others only if the forward routes.
    An experts.layer_index outside the stack makes d_x and the gradients of weights and logits NaN and the stack's zeros
    (or what was accumulated); with one_layer they mean nothing. The reference raises. Experts may be quantised, but not
    x (spec.activations): weights are dequantised to the dtype of x, tile by tile.

    Inputs: `gradients.*`, the forward's (without correction_bias; given ids as int32, given weights as fp32), its
    outputs tokens_per_expert, [ids], [weights], [logits] and `saved.*`, then `into.*`. With spec.recompute matmul 1
    runs again. Outputs: wanted, in order, each like its array. Unless accumulated they serve as scratch first, so
    nothing may share their memory. Raises InvalidInput, Unsupported.
    """
    if isinstance(operands.routing, TopK):
        ids, weights = operands.routing.ids.shape, operands.routing.weights.shape
        routing = TopK(ArraySpec(ids, "int32"), ArraySpec(weights, "float32"))
        operands = dataclasses.replace(operands, routing=routing)
    forward = _forward(operands, spec, target)
    wanted, accumulate, one_layer, wide = options.wanted, options.accumulate, options.one_layer, options.wide
    _validate(gradients, operands, forward, options)
    results_at = options.results_at
    if wide and spec.apply_router_weight_on_input:
        raise InvalidInput("wide must be False with apply_router_weight_on_input, whose d_x is a product; leave it out")
    if results_at is not None:
        if operands.lora is not None:
            raise Unsupported("results_at must be None with lora, got addresses of other ranks; leave one out")
        _require_addresses(results_at, operands, wide or spec.apply_router_weight_on_input)
    inputs = dict(named_arrays(gradients, "gradients.")) | ({} if results_at is None else {"results_at": results_at})
    inputs |= {buffer.name: buffer.spec for buffer in forward.inputs if buffer.name != "routing.correction_bias"}
    inputs |= {buffer.name: buffer.spec for buffer in forward.outputs if buffer.name not in _UNREAD}
    for name in accumulate:
        inputs[f"into.{name.removeprefix('d_')}"] = ArraySpec(_gradient_shape(name, operands, one_layer), "float32")
    builder = PlanBuilder("moe_backward", target)
    present = builder.inputs(inputs)
    for name in wanted:
        shape, dtype = _gradient_shape(name, operands, one_layer), _array_of(name, operands).dtype
        shape = (0, *shape[1:]) if name == "d_x" and results_at is not None else shape
        is_wide = name in accumulate or (wide and name == "d_x")
        builder.output(name, ArraySpec(shape, "float32" if is_wide else dtype))
    if not target.compiled:
        tensors = tuple((name, matrix.spec) for name, matrix in quantized_experts(operands.experts).items())
        constants = {"spec": spec, "options": dataclasses.replace(options, results_at=None), "tensors": tensors}
        builder.sums("products and sums: the order of NumPy, fp32")
        present.pop("results_at", None)
        pushes = results_at is not None and "d_x" in wanted
        if results_at is not None and pushes:
            rows = ArraySpec((results_at.size, operands.x.shape[1]), operands.x.dtype)
            builder.scratch("rows of d_x", rows, Role.D_ROWS)
            constants |= {"by_slot": True}
        made = tuple("rows of d_x" if pushes and name == "d_x" else name for name in wanted)

        from moe_core.ops.moe.reference import backward as twins

        plan = builder.reference(twins.moe_backward_plan, present, constants, made)
        if not pushes:
            return plan
        names = {"y": "rows of d_x", "row_of_slot": f"{SAVED}row_of_slot", "results_at": "results_at"}
        from moe_core.ops.exchange import reference as exchange_twins

        return builder.reference(exchange_twins.push_to_addresses, names, {}, ())
    builder.lend(*(name for name in wanted if name not in accumulate))
    overwrites = options.overwrite and builder.has(f"{SAVED}pre_activation")
    BackwardPlanner(builder, operands, gradients, spec, overwrites).plan()
    return builder.build()


@any_precision
def plan_training(
    operands: MoEOperands, spec: MoESpec, target: Target, *, one_layer: bool = False
) -> tuple[LaunchPlan, ...]:
    """The plans of a training step of every array: the forward that saves, then backwards.

    The first backward has a gradient of the output only. If x is routed, a second one also has a gradient of the
    logits. one_layer: as in `BackwardOptions`. spec.main_grad accumulates the gradients of the experts' and the shared
    expert's matrices. Raises InvalidInput, Unsupported.
    """
    forward = _forward(operands, spec, target)
    upstream = [OutputGradients(forward.spec("output"))]
    if isinstance(operands.routing, RouterWeights):
        upstream.append(OutputGradients(forward.spec("output"), logits=forward.spec("logits")))
    wanted, accumulate = gradient_names(operands), ()
    if spec.main_grad:
        kept_apart = [name for name in wanted if name.startswith(("d_experts.", "d_shared."))]
        accumulate = tuple(name for name in kept_apart if name.rpartition(".")[2] in _MATRICES)
    options = BackwardOptions(wanted, accumulate, one_layer and operands.experts.layer_index is not None)
    return forward, *(plan_moe_backward(gradients, operands, spec, target, options=options) for gradients in upstream)


def explain_training(plans: tuple[LaunchPlan, ...]) -> Explanation:
    return Explanation.of(plans[0], plans[-1])
