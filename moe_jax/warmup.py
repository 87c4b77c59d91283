"""Compile ahead of the first call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack

import jax

from moe_core.errors import InvalidInput
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.names import BY_TOKEN
from moe_core.ops.moe.options import ForwardOptions
from moe_core.plan.steps import LaunchPlan
from moe_core.runtime import warmup as core
from moe_core.runtime.warmup import WarmupReport
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import (
    ExpertWeights,
    LoRAFactors,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    array_fields,
)
from moe_jax.bridge import ffi, platforms
from moe_jax.bridge.calls import moe_request, training_plans
from moe_jax.ops import Array

Shaped = Array | jax.ShapeDtypeStruct


class OptionalArguments(TypedDict, total=False):
    token_mask: Shaped | None
    expert_map: Shaped | None
    shared: SharedExpert | None
    lora: LoRAFactors | None
    adapter_ids: Shaped | None


def warmup(
    x: Shaped,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    tokens: Sequence[int],
    training: bool = False,
    **optional: Unpack[OptionalArguments],
) -> WarmupReport:
    """Compile and load, on every local device, every kernel that `moe` runs for these arguments, as `moe_torch.warmup`.

    XLA still compiles the program. Inside `moe_jax.export_target(...)` kernels are only compiled. Arrays may be
    `jax.ShapeDtypeStruct`s for the default device.
    """
    plans = []
    for count in core.token_counts(tokens):
        sized = routing
        if isinstance(routing, (RouterLogits, TopK)):
            by_token = [name for name, _ in array_fields(type(routing)) if f"routing.{name}" in BY_TOKEN]
            sized = dataclasses.replace(
                routing, **{name: _with_tokens(getattr(routing, name), count) for name in by_token}
            )
        others: dict[str, Any] = dict(optional)
        for name in ("token_mask", "adapter_ids"):
            if others.get(name) is not None:
                others[name] = _with_tokens(others[name], count)
        call, arguments, keywords = moe_request(_with_tokens(x, count), experts, sized, spec, **others)
        plans.append(call.plan(plan_moe, *arguments, options=ForwardOptions(**keywords)))
        if training:
            plans += training_plans(call, arguments, keywords)
    return make_ready(plans)


def make_ready(plans: Iterable[LaunchPlan]) -> WarmupReport:
    """Compile and load the kernels of plans for one target, and let the callback find them."""
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
