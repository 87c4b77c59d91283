"""The stage ops `router` and `route` with their gradients: one custom call forward, one backward each."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from moe_core.arrays import ArraySpec
from moe_core.operands import RoutingGradients
from moe_core.router_backward import ROUTER_GRADIENTS, plan_router_backward
from moe_core.routing import plan_router, plan_routing
from moe_core.routing_backward import plan_routing_backward
from moe_core.specs import LogitsSpec, RouterSpec
from moe_core.target import Target
from moe_jax import platforms
from moe_jax.calls import OpCall, Request, undifferentiable
from moe_jax.differentiation import Kept, varying_alike


@dataclass(frozen=True)
class _Router:
    """What is static of one call of `router`. names: of its arrays, in order."""

    x: ArraySpec
    weight: ArraySpec
    bias: ArraySpec | None
    spec: LogitsSpec
    names: tuple[str, ...]
    targets: tuple[tuple[str, Target], ...]

    op = "router"
    #: The place of the result into which gradients flow.
    flowing = 0
    differentiable = ("x", "weight", "bias")

    def forward(self) -> Request:
        return Request("router", plan_router, (self.x, self.weight, self.bias, self.spec), (), self.names, self.targets)

    def backward(self, d_logits: Any, kept: Kept, wanted: tuple[str, ...]) -> dict[str, Any]:
        gradients = tuple(name for name in ROUTER_GRADIENTS if name.removeprefix("d_") in wanted)
        upstream = ArraySpec(d_logits.shape, "float32")
        arguments = (upstream, self.x, self.weight, self.bias, self.spec)
        arrays = {"d_logits": d_logits, "x": kept.arrays["x"], "weight": kept.arrays["weight"]}
        request = Request(
            "router_backward", plan_router_backward, arguments, (("wanted", gradients),), tuple(arrays), self.targets
        )
        found = undifferentiable(request, *arrays.values())
        return {name.removeprefix("d_"): gradient for name, gradient in zip(gradients, found, strict=True)}


@dataclass(frozen=True)
class _Route:
    """What is static of one call of `route`. names: of its arrays, in order."""

    logits: ArraySpec
    correction_bias: ArraySpec | None
    token_mask: ArraySpec | None
    spec: RouterSpec
    names: tuple[str, ...]
    targets: tuple[tuple[str, Target], ...]

    op = "route"
    flowing = 1
    differentiable = ("logits",)

    def forward(self) -> Request:
        options = (("correction_bias", self.correction_bias), ("token_mask", self.token_mask))
        return Request("route", plan_routing, (self.logits, self.spec), options, self.names, self.targets)

    def backward(self, d_weights: Any, kept: Kept, wanted: tuple[str, ...]) -> dict[str, Any]:
        weights = ArraySpec(d_weights.shape, "float32")
        arguments = (RoutingGradients(weights), self.logits, ArraySpec(weights.shape, "int32"), self.spec)
        arrays = {"gradients.weights": d_weights, "logits": kept.arrays["logits"], "ids": kept.outputs["ids"]}
        if self.token_mask is not None:
            arrays["token_mask"] = kept.arrays["token_mask"]
        options = (("token_mask", self.token_mask),)
        request = Request("route_backward", plan_routing_backward, arguments, options, tuple(arrays), self.targets)
        return {"logits": undifferentiable(request, *arrays.values())[0]}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stage(call: _Router | _Route, *arrays: Any) -> tuple[Any, ...]:
    return undifferentiable(call.forward(), *arrays)


def _forward_rule(call: _Router | _Route, *primals: Any) -> tuple[tuple[Any, ...], Kept]:
    arrays = {name: primal.value for name, primal in zip(call.names, primals, strict=True)}
    perturbed = {name: primal.perturbed for name, primal in zip(call.names, primals, strict=True)}
    results = undifferentiable(call.forward(), *arrays.values())
    outputs = {"ids": results[0]} if call.op == "route" else {}
    return results, Kept.make(arrays, outputs, [perturbed.get(name, False) for name in call.differentiable])


def _backward_rule(call: _Router | _Route, kept: Kept, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    wanted, flowing = kept.wanted(call.differentiable), cotangents[call.flowing]
    found = {} if not wanted or isinstance(flowing, SymbolicZero) else call.backward(flowing, kept, wanted)
    return tuple(found.get(name) for name in call.names)


_stage.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Inlined into an outer trace, so that programs hold nothing but the custom calls.
_run = jax.jit(_stage, static_argnums=0, inline=True)


def run_router(call: OpCall, x: ArraySpec, weight: ArraySpec, bias: ArraySpec | None, spec: LogitsSpec) -> Any:
    """logits, of the arrays that `call` holds."""
    arrays = call.placed()
    static = _Router(x, weight, bias, spec, tuple(arrays), platforms.targets())
    return _run(static, *varying_alike(arrays.values()))[0]


def run_route(
    call: OpCall, logits: ArraySpec, correction_bias: ArraySpec | None, token_mask: ArraySpec | None, spec: RouterSpec
) -> tuple[Any, Any]:
    """(ids, weights), of the arrays that `call` holds."""
    arrays = call.placed()
    static = _Route(logits, correction_bias, token_mask, spec, tuple(arrays), platforms.targets())
    return _run(static, *varying_alike(arrays.values()))
