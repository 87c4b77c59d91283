"""Shapes and dtypes of outputs of operators. Sizes may be symbolic."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from moe_core.specs import Activation
from moe_torch.bridge.operator import Outputs
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.operators.kinds import accumulated

Names = tuple[str, ...]


def width_of(weight: Any, weight_layout: str) -> Any:
    return weight.shape[-1 if weight_layout == "in_out" else -2]


def activated(width: Any, activation: Activation | None) -> Any:
    one_buffer = activation is not None and activation.gate_layout in ("halves", "interleaved")
    return width // 2 if one_buffer else width


def out_dtype_of(x: torch.Tensor, name: str | None) -> torch.dtype:
    return x.dtype if name is None else TORCH_DTYPES[name]


def like(*tensors: Any) -> Outputs:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors if tensor is not None]


def like_logits(call: Any) -> Outputs:
    return [(tuple(call.logits.shape), torch.float32)]


def gradients_of(call: Any) -> Outputs:
    """The named gradients, except those added to tensors."""
    added = accumulated(call.wanted, getattr(call, "into", None))
    return like(*[attrgetter(name.removeprefix("d_"))(call) for name in call.wanted if name not in added])


def wide_gradients(call: Any) -> Outputs:
    """`gradients_of`, with d_wide as the gradient of x in fp32."""
    call.wide = call.x.to(torch.float32) if "d_wide" in call.wanted else None
    return gradients_of(call)


def routed(call: Any, top_k: int) -> Outputs:
    shape = (call.shape[0], top_k)
    return [(shape, torch.int32), (shape, torch.float32)]
