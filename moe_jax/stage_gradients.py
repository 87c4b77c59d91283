"""The ops `matmul_ogs`, `activation` and `reduce` with their gradients, for layers that are built of stages.

Undifferentiated each is its custom call and nothing else. Its backward reads the op's own arguments, and computes the
gradients of those that JAX says are differentiated: by one more custom call, for `reduce` by copying rows. What has no
gradient, and why: `moe_core.matmul_backward.why_no_gradient`, and `_refuse` below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from moe_core.activation_backward import plan_activation_backward
from moe_core.arrays import ArraySpec
from moe_core.errors import Unsupported
from moe_core.matmul_backward import DIFFERENTIABLE, plan_matmul_ogs_backward, why_no_gradient
from moe_jax.calls import Request, undifferentiable
from moe_jax.differentiation import Kept, varying_alike

Arrays = dict[str, Any]


class _Rule(NamedTuple):
    """How one op is differentiated.

    names: the arguments that have a gradient. backward: from the request, its arrays, the gradient of its result and
    the names asked for to their gradients.
    """

    names: tuple[str, ...]
    backward: Callable[[Request, Arrays, jax.Array, tuple[str, ...]], Arrays]


def _gradient_request(op: str, planner: Any, gradient: jax.Array, request: Request, **changes: Any) -> Request:
    """The backward's plan takes the specs of d_y and of the forward's arguments, and the arrays in that order."""
    d_y = ArraySpec(gradient.shape, gradient.dtype.name)
    keywords = tuple((dict(request.keywords) | changes).items())
    return Request(op, planner, (d_y, *request.arguments), keywords, ("d_y", *request.names), request.targets)


def _matmul_backward(request: Request, arrays: Arrays, gradient: jax.Array, asked: tuple[str, ...]) -> Arrays:
    wanted = tuple(f"d_{name}" for name in asked)
    call = _gradient_request("matmul_ogs_backward", plan_matmul_ogs_backward, gradient, request, wanted=wanted)
    return dict(zip(asked, undifferentiable(call, gradient, *arrays.values()), strict=True))


def _activation_backward(request: Request, arrays: Arrays, gradient: jax.Array, asked: tuple[str, ...]) -> Arrays:
    up = dict(request.keywords)["up"]
    plain = Request(request.op, request.planner, request.arguments, (("up", up),), request.names, request.targets)
    call = _gradient_request("activation_backward", plan_activation_backward, gradient, plain)
    found = undifferentiable(call, gradient, *arrays.values())
    return dict(zip(("x", "up"), found, strict=False))


def _reduce_backward(request: Request, arrays: Arrays, gradient: jax.Array, asked: tuple[str, ...]) -> Arrays:
    """A slot's row is that of its token; slots and rows without each other get zeros."""
    found = {}
    if "shared" in asked:
        found["shared"] = gradient.astype(arrays["shared"].dtype)
    if "y" in asked:
        y, row_of_slot, top_k = arrays["y"], arrays["row_of_slot"], request.arguments[2]
        rows = jnp.repeat(gradient.astype(y.dtype), top_k, axis=0)
        if dict(request.keywords)["order"] == "slot":
            found["y"] = jnp.where(row_of_slot[:, None] >= 0, rows, 0)
        else:
            # Slots without a row write past the end, which is dropped.
            places = jnp.where(row_of_slot >= 0, row_of_slot, y.shape[0])
            zeros, places, rows = varying_alike((jnp.zeros_like(y), places, rows))
            found["y"] = zeros.at[places].set(rows, mode="drop")
    return found


_RULES = {
    "matmul_ogs": _Rule(DIFFERENTIABLE, _matmul_backward),
    "activation": _Rule(("x", "up"), _activation_backward),
    "reduce": _Rule(("y", "shared"), _reduce_backward),
}


def _refuse(request: Request, asked: set[str]) -> None:
    """Raise Unsupported where this call of an op has no gradient."""
    if request.op == "matmul_ogs":
        operands, layout, spec = request.arguments
        reason = why_no_gradient(operands, layout, spec, asked)
        if reason is not None:
            raise Unsupported(reason)
    if request.op == "reduce" and asked & {"shared", "shared_gate"} and "shared_gate" in request.names:
        raise Unsupported(
            "reduce with a shared_gate has no derivative by shared or shared_gate; add sigmoid(shared_gate) * shared "
            "in JAX, or apply jax.lax.stop_gradient to them"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stage(request: Request, *arrays: Any) -> tuple[jax.Array, ...]:
    return undifferentiable(request, *arrays)


def _forward_rule(request: Request, *primals: Any) -> tuple[tuple[jax.Array, ...], Kept]:
    arrays = {name: primal.value for name, primal in zip(request.names, primals, strict=True)}
    asked = {name for name, primal in zip(request.names, primals, strict=True) if primal.perturbed}
    _refuse(request, asked)
    kept = Kept.make(arrays, {}, [name in asked for name in _RULES[request.op].names])
    return undifferentiable(request, *arrays.values()), kept


def _backward_rule(request: Request, kept: Kept, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    rule, (gradient,) = _RULES[request.op], cotangents
    asked = kept.wanted(rule.names)
    if not asked or isinstance(gradient, SymbolicZero):
        return (None,) * len(request.names)
    # What JAX hands back has the names sorted.
    arrays = {name: kept.arrays[name] for name in request.names}
    found = rule.backward(request, arrays, gradient, asked)
    return tuple(found[name] if name in asked else None for name in request.names)


_stage.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Inlined into an outer trace, so that programs hold nothing but the custom calls.
_run = jax.jit(_stage, static_argnums=0, inline=True)


def run_stage(request: Request, arrays: Iterable[Any]) -> jax.Array:
    """The result of one of the three ops, differentiable."""
    (result,) = _run(request, *varying_alike(arrays))
    return result
