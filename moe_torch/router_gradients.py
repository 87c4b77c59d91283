"""The gradients of the stage operators `router` and `route`, for routing that runs apart from a whole MoE.

Way of a step: as of `moe_torch.gradients`, with the operators `moebius::router_backward` and `moebius::route_backward`.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch

from moe_core.arrays import ArraySpec
from moe_core.errors import Unsupported
from moe_core.operands import RoutingGradients
from moe_core.plan import LaunchPlan
from moe_core.router_backward import ROUTER_GRADIENTS, plan_router_backward
from moe_core.routing_backward import plan_routing_backward
from moe_core.specs import LogitsSpec, RouterSpec
from moe_core.target import Target
from moe_torch.backward_operator import BackwardOperator
from moe_torch.dispatch import Operator, call
from moe_torch.operators import ROUTE, ROUTER, Outputs
from moe_torch.options import decode, encode

_NO_VMAP = "router and route have no gradient inside of torch.func.vmap; take the gradient of the whole batch"


# router_backward: options (LogitsSpec, wanted)
def _plan_router_backward(
    d_logits: ArraySpec,
    x: ArraySpec,
    weight: ArraySpec,
    bias: ArraySpec | None,
    spec: LogitsSpec,
    wanted: tuple[str, ...],
    target: Target,
) -> LaunchPlan:
    return plan_router_backward(d_logits, x, weight, bias, spec, target, wanted=wanted)


def _router_backward_shapes(
    d_logits: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, spec: LogitsSpec, wanted: tuple[str, ...]
) -> Outputs:
    of: dict[str, Any] = dict(zip(ROUTER_GRADIENTS, (x, weight, bias), strict=True))
    return [(tuple(of[name].shape), of[name].dtype) for name in wanted]


ROUTER_BACKWARD = BackwardOperator(
    "router_backward(Tensor d_logits, Tensor x, Tensor weight, Tensor? bias, str options) -> Tensor[]",
    _plan_router_backward,
    _router_backward_shapes,
)


# route_backward: options (RouterSpec,)
def _plan_route_backward(
    d_weights: ArraySpec,
    logits: ArraySpec,
    ids: ArraySpec,
    token_mask: ArraySpec | None,
    spec: RouterSpec,
    target: Target,
) -> LaunchPlan:
    return plan_routing_backward(RoutingGradients(d_weights), logits, ids, spec, target, token_mask=token_mask)


def _route_backward_shapes(
    d_weights: torch.Tensor, logits: torch.Tensor, ids: Any, token_mask: Any, spec: RouterSpec
) -> Outputs:
    return [(tuple(logits.shape), torch.float32)]


ROUTE_BACKWARD = BackwardOperator(
    "route_backward(Tensor gradients_weights, Tensor logits, Tensor ids, Tensor? token_mask, str options) -> Tensor",
    _plan_route_backward,
    _route_backward_shapes,
    bundles=("gradients",),
)


class _Router(torch.autograd.Function):
    """`router`."""

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        return call(ROUTER, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, d_logits: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (spec,) = decode(ctx.options)
        wanted = tuple(name for name, needed in zip(ROUTER_GRADIENTS, ctx.needs_input_grad, strict=False) if needed)
        found = call(ROUTER_BACKWARD, d_logits.contiguous(), *ctx.saved_tensors, encode(spec, wanted))
        named = dict(zip(wanted, found, strict=True))
        return (*[named.get(name) for name in ROUTER_GRADIENTS], None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise Unsupported(_NO_VMAP)


class _Route(torch.autograd.Function):
    """`route`."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(call(ROUTE, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        logits, _, token_mask, ctx.options = inputs
        ids, _ = output
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(logits, ids, token_mask)

    @staticmethod
    def backward(ctx: Any, _: Any, d_weights: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return call(ROUTE_BACKWARD, d_weights.contiguous(), *ctx.saved_tensors, ctx.options), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise Unsupported(_NO_VMAP)


class _SecondGradient(torch.autograd.Function):
    """A backward operator where the gradients may be differentiated again: that is refused."""

    @staticmethod
    def forward(operator: Operator, *arguments: Any) -> tuple[torch.Tensor, ...]:
        found = call(operator, *arguments)
        return (found,) if isinstance(found, torch.Tensor) else tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise Unsupported(
            "router and route have a gradient, and no gradient of that one; leave second derivatives out, or detach() "
            "the gradients"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise Unsupported(_NO_VMAP)


def _second_gradient(operator: Operator, is_list: bool, *arguments: Any) -> Any:
    found = _SecondGradient.apply(operator, *arguments)
    return list(found) if is_list else found[0]


def define_router_gradients() -> None:
    """Give `router` and `route` their gradients."""
    ROUTER.define_gradient(frozenset(("x", "weight", "bias")), _Router.apply)
    ROUTE.define_gradient(frozenset(("logits",)), _Route.apply)
    for backward, is_list in ((ROUTER_BACKWARD, True), (ROUTE_BACKWARD, False)):
        second = functools.partial(_second_gradient, backward, is_list)
        backward.define_gradient(frozenset(backward.names), second)
