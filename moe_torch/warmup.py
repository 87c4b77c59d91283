"""Compiling ahead of the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_core.ops.moe.names import BY_TOKEN
from moe_core.runtime import warmup as core
from moe_core.runtime.warmup import WarmupReport
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK
from moe_torch.bridge.operator import require_one_device, target_of_device
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
    operator, arrays, options = moe_request(x, experts, routing, spec, token_mask, expert_map, shared)
    present = [(name, array) for name, array in zip(operator.names, arrays, strict=True) if array is not None]
    device = require_one_device(present)
    plans, target = [], target_of_device(device)
    for count in core.token_counts(tokens):
        resized = [
            _with_tokens(array, count) if name in BY_TOKEN and isinstance(array, torch.Tensor) else array
            for name, array in zip(operator.names, arrays, strict=True)
        ]
        plans.append(operator.plan(resized, options, target))
        if training:
            plans += training_plans(operator, resized, options, target)
    return core.warmup(plans, (device.index or 0,))


def _with_tokens(tensor: torch.Tensor, count: int) -> Any:
    """A tensor without memory that has `count` rows as far apart as those of the given one."""
    return torch.empty_strided((count, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device="meta")
