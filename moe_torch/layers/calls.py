"""The operator of a layer's forward, for x of any rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_core.errors import InvalidInput
from moe_torch.bridge import eager
from moe_torch.bridge.operator import Operator, call_first
from moe_torch.bridge.ready import dense
from moe_torch.bridge.seen import SeenCalls

#: Calls of all layers, by x as a layer takes it.
_seen = SeenCalls()


def seen_output(x: Any, arrays: list[Any], options: str) -> torch.Tensor | None:
    """The output, in the shape of x, of a plain call like one that `output_of` saw; None for another call.

    arrays: the operator's; that in the place of x is not read.
    """
    if torch.compiler.is_compiling() or not eager.plain_thread():
        return None
    arrays[0] = x
    outputs = _seen.run((*arrays, options))
    return None if outputs is None else outputs[0]


def output_of(
    operator: Operator, x: torch.Tensor, arrays: list[Any], options: str, finish: Callable[..., Any] | None
) -> torch.Tensor:
    """The operator's first output, in the shape of x, after `finish`. arrays: the operator's, `rows_of` x first."""
    output = call_first(operator, *arrays, options)
    if finish is None and not torch.compiler.is_compiling() and not output.requires_grad:
        ready = operator.known((*arrays, options))
        # Rows that are a copy have an address of their own.
        if ready is not None and (x.is_contiguous() or arrays[0] is x):
            arrays[0] = x
            _seen.remember((*arrays, options), ready._replace(outputs=(dense(tuple(x.shape), output.dtype),)))
    output = output if finish is None else finish(output)
    return output if x.dim() == 2 else output.view_as(x)


def rows_of(x: torch.Tensor, d_model: int, weight: Any) -> torch.Tensor:
    """x as `[T, D]`, with dense rows; `weight` has the dtype it must have."""
    if not isinstance(x, torch.Tensor):
        raise InvalidInput(f"x must be a torch.Tensor, got {type(x).__name__}; use moe_torch.from_dlpack")
    shape = x.shape
    if not shape or shape[-1] != d_model:
        raise InvalidInput(f"x must be [..., d_model] with d_model = {d_model}, got {tuple(shape)}; pass such an array")
    if x.dtype != weight.dtype:
        raise InvalidInput(f"x must be {weight.dtype} like the layer's parameters, got {x.dtype}; cast x or the layer")
    if not x.is_contiguous():
        # Rows may lie apart (a slice of wider rows), but neither be strided inside nor overlap.
        apart = x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= d_model
        x = x if apart else x.contiguous()
    return x if x.dim() == 2 else x.view(-1, d_model)
