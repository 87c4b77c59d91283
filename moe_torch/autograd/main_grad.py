"""fp32 sums of gradients next to the weights, as in Megatron's `weight.main_grad`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.errors import InvalidInput, Unsupported
from moe_torch.bridge import private

_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def main_grads(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return each weight's `main_grad`: fp32, of its shape, contiguous, on its device, else raise InvalidInput."""
    buffers = {}
    for name, weight in weights.items():
        wanted = f"torch.float32 {tuple(weight.shape)} on {weight.device}"
        fix = f"{name}.main_grad = torch.zeros_like({name}, dtype=torch.float32)"
        buffer = getattr(weight, "main_grad", None)
        if not isinstance(buffer, torch.Tensor):
            raise InvalidInput(
                f"{name} must have the attribute main_grad, {wanted}, where main_grad=True, got {buffer}; "
                f"set it on the tensor that moe is given: {fix}"
            )
        got = f"{buffer.dtype} {tuple(buffer.shape)} on {buffer.device}"
        if got != wanted:
            raise InvalidInput(f"{name}.main_grad must be {wanted}, got {got}; make it with {fix}")
        if not buffer.is_contiguous() or buffer.data_ptr() % ALIGNMENT or buffer.requires_grad:
            raise InvalidInput(
                f"{name}.main_grad must be contiguous, start at a multiple of {ALIGNMENT} bytes and require no "
                f"gradient, got strides {buffer.stride()}, address {buffer.data_ptr():#x}, requires_grad="
                f"{buffer.requires_grad}; make it with {fix}"
            )
        buffers[name] = buffer
    return buffers


def destination(node: Any) -> str:
    """The destination of a node's gradient: `weight` in `backward()`, `caller` in `autograd.grad`, or `nowhere`."""
    try:
        return "weight" if private.executes(node) else "nowhere"
    except RuntimeError:  # So it answers for a leaf that autograd.grad captures.
        return "caller"


def require_eager(tensors: Sequence[Any]) -> None:
    """Tensors of compiled programs and transforms have no attributes."""
    private.require_destinations()
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        wrapped = private.is_wrapped(tensor)
        if wrapped or type(tensor) not in _ORDINARY:
            raise Unsupported(
                "main_grad=True adds to buffers in place, which no compiled or transformed training step can, got a "
                f"{'tensor of torch.func' if wrapped else type(tensor).__name__}; train in eager code, or leave "
                "main_grad out"
            )
