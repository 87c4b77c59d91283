"""What a call of the composed op is: its arrays, and what its planner takes."""

from __future__ import annotations

from typing import Any

from moe_core.errors import Unsupported
from moe_core.ops.moe.backward import plan_training
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, MoEOperands, RouterLogits, RouterWeights, SharedExpert, TopK
from moe_jax.bridge.calls import OpCall, require_type


def moe_request(
    x: Any, experts: Any, routing: Any, spec: Any, token_mask: Any = None, expert_map: Any = None, shared: Any = None
) -> tuple[OpCall, tuple[Any, ...], dict[str, Any]]:
    """The call of `moe` for arrays or ShapeDtypeStructs, and the arguments and keywords of its planner.

    Raises InvalidInput for arguments of another type, Unsupported for spec.main_grad.
    """
    require_type("experts", experts, ExpertWeights)
    require_type("routing", routing, RouterWeights, RouterLogits, TopK)
    require_type("spec", spec, MoESpec)
    if spec.main_grad:
        raise Unsupported(
            "spec.main_grad must be False in JAX, whose arrays nothing is added to in place, got True; leave it out, "
            "and add up the gradients of micro-batches in float32, as docs/user/training.md shows"
        )
    call = OpCall("moe")
    arguments = (
        call.array("x", x),
        call.bundle("experts", experts, "experts."),
        call.bundle("routing", routing, "routing."),
        spec,
    )
    keywords: dict[str, Any] = {
        "token_mask": call.optional("token_mask", token_mask),
        "expert_map": call.optional("expert_map", expert_map),
        "shared": None,
    }
    if shared is not None:
        require_type("shared", shared, SharedExpert)
        keywords["shared"] = call.bundle("shared", shared, "shared.")
    return call, arguments, keywords


def training_plans(call: OpCall, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[LaunchPlan, ...]:
    """The plans of a training step, of what `moe_request` returned."""
    x, experts, routing, spec = arguments
    return plan_training(MoEOperands(x, experts, routing, **keywords), spec, call.target(), one_layer=True)
