"""Compiling ahead of the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_core import warmup as core
from moe_core.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK
from moe_core.specs import MoESpec
from moe_core.warmup import WarmupReport
from moe_torch.dispatch import require_one_device, target_of_device
from moe_torch.ops import moe_request, training_plans

#: Arrays of each kind of routing whose first axis is the tokens.
_BY_TOKEN = {
    RouterWeights: ("x", "token_mask"),
    RouterLogits: ("x", "token_mask", "routing.logits"),
    TopK: ("x", "token_mask", "routing.ids", "routing.weights"),
}


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
    by_token, target = _BY_TOKEN[type(routing)], target_of_device(device)
    plans = []
    for count in core.token_counts(tokens):
        resized = [
            _with_tokens(array, count) if name in by_token and isinstance(array, torch.Tensor) else array
            for name, array in zip(operator.names, arrays, strict=True)
        ]
        plans.append(operator.plan(resized, options, target))
        if training:
            plans += training_plans(operator, type(routing), resized, options, target)
    return core.warmup(plans, (device.index or 0,))


def _with_tokens(tensor: torch.Tensor, count: int) -> Any:
    """A tensor without memory that has `count` rows as far apart as those of the given one."""
    return torch.empty_strided((count, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device="meta")
