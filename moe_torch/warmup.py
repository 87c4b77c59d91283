"""Compiling ahead of the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch

from moe_core.ops.moe.names import BY_TOKEN
from moe_core.runtime import warmup as core
from moe_core.runtime.warmup import WarmupReport
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK
from moe_torch.bridge.arrays import target_of_device
from moe_torch.operators.requests import moe_request, training_plans


class OptionalArguments(TypedDict, total=False):
    token_mask: torch.Tensor | None
    expert_map: torch.Tensor | None
    shared: SharedExpert | None


def warmup(
    x: torch.Tensor,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    tokens: Sequence[int],
    training: bool = False,
    **optional: Unpack[OptionalArguments],
) -> WarmupReport:
    """Compile and load, on the tensors' device, every kernel that `moe` runs for these arguments. Nothing runs.

    Raises as `moe`. A later call of `moe` compiles nothing and can be captured in a CUDA graph at once.

    Args:
        x, experts, routing, spec: as for `moe`.
        tokens: numbers of tokens, which replace the first axis of x and of every other array by token. A few from small
            to large find every kernel.
        training: also compile training steps with a gradient for every array.
        optional: token_mask, expert_map and shared, as for `moe`.

    Returns:
        the kernels, the seconds for each, and which existed before. On a CPU there are none.
    """
    operator, arguments = moe_request(x, experts, routing, spec, **optional)
    device, plans, resized = operator.device_of(arguments[:-1]), [], list(arguments)
    target = target_of_device(device)
    for count in core.token_counts(tokens):
        for index, (name, array) in enumerate(zip(operator.names, arguments, strict=False)):
            if name in BY_TOKEN and isinstance(array, torch.Tensor):
                # The same distance between rows, without memory.
                shape = (count, *array.shape[1:])
                resized[index] = torch.empty_strided(shape, array.stride(), dtype=array.dtype, device="meta")
        plans.append(operator.plan(resized, target))
        if training:
            plans += training_plans(operator, tuple(resized), target)
    return core.warmup(plans, (device.index or 0,))
