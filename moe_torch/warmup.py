"""Compiling ahead of the first call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_core.ops.moe.names import BY_TOKEN
from moe_core.runtime import warmup as core
from moe_core.runtime.warmup import WarmupReport
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK
from moe_torch.bridge.arrays import target_of_device
from moe_torch.operators.requests import moe_request, training_plans


def warmup(
    x: torch.Tensor,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    tokens: Sequence[int],
    token_mask: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    shared: SharedExpert | None = None,
    training: bool = False,
) -> WarmupReport:
    """Compile and load, on the tensors' device, every kernel that `moe` runs for these arguments; runs nothing.

    training: also those of training steps in which every array has a gradient, forward and backward.

    tokens: numbers of tokens, each in the place of the first axis of x and of every other array by token. The number is
    no constant of a kernel: a few counts from small to large find every kernel. Afterwards a call of `moe` compiles
    nothing, so that it can be captured in a CUDA graph at once.
    Returns the kernels with the seconds each took, and which existed before; on a CPU there are none. Raises
    InvalidInput, Unsupported.
    """
    operator, arguments = moe_request(
        x, experts, routing, spec, token_mask=token_mask, expert_map=expert_map, shared=shared
    )
    device, plans, resized = operator.device_of(arguments[:-1]), [], list(arguments)
    target = target_of_device(device)
    for count in core.token_counts(tokens):
        for place, (name, array) in enumerate(zip(operator.names, arguments, strict=False)):
            if name in BY_TOKEN and isinstance(array, torch.Tensor):
                # Rows as far apart as those given, without memory.
                shape, like = (count, *array.shape[1:]), {"dtype": array.dtype, "device": "meta"}
                resized[place] = torch.empty_strided(shape, array.stride(), **like)
        plans.append(operator.plan(resized, target))
        if training:
            plans += training_plans(operator, tuple(resized), target)
    return core.warmup(plans, (device.index or 0,))
