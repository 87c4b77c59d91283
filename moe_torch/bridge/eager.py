"""Plain calls: eager calls that may go straight to their kernels, past torch's dispatcher, a third of their host time.

A call is *plain* if no mode, functional transform, tracer, forward-mode level or profiler is active on this thread, and
every tensor is an ordinary strided CPU or CUDA tensor that requires no gradient. All others pass the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_core.base.target import Target, cpu_target
from moe_torch.bridge.private import PLAIN_CLASSES, PLAIN_TENSORS, keys_of, plain_tensor, plain_thread

__all__ = ["PLAIN_CLASSES", "key_of", "plain_key", "plain_tensor", "plain_thread"]

_grad_enabled = torch.is_grad_enabled


def key_of(arguments: Sequence[Any], target: Target | None) -> tuple[Any, ...]:
    """Return the key of a plan: equal keys mean equal plans. target: of tensors on a CPU."""
    *tensors, options = arguments
    keys = [None if one is None else (one.shape, one.stride(), one.dtype, one.device) for one in tensors]
    return (options, target, *keys)


def plain_key(arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return `key_of` a plain call's arguments, else None."""
    if not plain_thread():
        return None
    *tensors, options = arguments
    grad, target, keys = _grad_enabled(), None, []
    for tensor in tensors:  # one pass, because the host waits for it
        if tensor is None:
            keys.append(None)
            continue
        if type(tensor) not in PLAIN_CLASSES or keys_of(tensor).raw_repr() not in PLAIN_TENSORS:
            return None
        if grad and tensor.requires_grad:
            return None
        keys.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    first = arguments[0]
    if first is None:
        return None
    if not first.is_cuda:
        target = cpu_target()
    return (options, target, *keys)
