"""Compiling ahead of the first call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from moe_core.errors import InvalidInput
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.names import BY_TOKEN
from moe_core.ops.moe.options import ForwardOptions
from moe_core.plan.steps import LaunchPlan
from moe_core.runtime import warmup as core
from moe_core.runtime.warmup import WarmupReport
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK, array_fields
from moe_jax.bridge import ffi, platforms
from moe_jax.bridge.calls import moe_request, training_plans
from moe_jax.ops import Array

#: What may be given: arrays, or only what they would be.
Shaped = Array | jax.ShapeDtypeStruct


def warmup(
    x: Shaped,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    tokens: Sequence[int],
    token_mask: Shaped | None = None,
    expert_map: Shaped | None = None,
    shared: SharedExpert | None = None,
    training: bool = False,
) -> WarmupReport:
    """Compile and load, on every local device, every kernel that `moe` runs for these arguments; runs nothing.

    training: also those of training steps in which every array has a gradient, forward and backward.

    Arrays may be `jax.ShapeDtypeStruct`s: then the default device counts. tokens: numbers of tokens, each in the place
    of the first axis of x and of every other array by token. The number is no constant of a kernel: a few counts from
    small to large find every kernel, and tracing `moe` afterwards compiles none. XLA's own compilation of a program is
    not part of this. Inside `moe_jax.export_target(...)` kernels are compiled and not loaded.
    Returns the kernels with the seconds each took, and which existed before; on a CPU there are none. Raises
    InvalidInput, Unsupported.
    """
    plans = []
    for count in core.token_counts(tokens):
        sized = routing
        if isinstance(routing, (RouterLogits, TopK)):
            by_token = [name for name, _ in array_fields(type(routing)) if f"routing.{name}" in BY_TOKEN]
            given = {name: _with_tokens(getattr(routing, name), count) for name in by_token}
            sized = dataclasses.replace(routing, **given)
        mask = None if token_mask is None else _with_tokens(token_mask, count)
        call, arguments, keywords = moe_request(_with_tokens(x, count), experts, sized, spec, mask, expert_map, shared)
        plans.append(call.plan(plan_moe, *arguments, options=ForwardOptions(**keywords)))
        if training:
            plans += training_plans(call, arguments, keywords)
    return make_ready(plans)


def make_ready(plans: Iterable[LaunchPlan]) -> WarmupReport:
    """Compile the kernels of plans for one target, load them, and let the callback find them."""
    plans = tuple(plans)
    target = plans[0].target
    platform = target.device_kind
    devices = platforms.devices_to_prepare(platform, target)
    report = core.warmup(plans, devices)
    for plan in plans:
        ffi.publish(plan, platform, devices)
    return report


def _with_tokens(array: Any, count: int) -> jax.ShapeDtypeStruct:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise InvalidInput(
            f"x and every array by token must be a jax.Array or jax.ShapeDtypeStruct, got {type(array).__name__}; "
            "convert it with jax.numpy.asarray"
        )
    return jax.ShapeDtypeStruct((count, *array.shape[1:]), array.dtype)
