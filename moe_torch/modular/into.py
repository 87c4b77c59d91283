"""Operators whose results lie in memory that the caller owns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_core.arrays import ALIGNMENT
from moe_core.errors import InvalidInput
from moe_torch import eager
from moe_torch.dispatch import Operator, Ready, call, call_first
from moe_torch.operators import MOE, PACK_BITMATRIX
from moe_torch.quantized_operators import MOE_QUANTIZED

#: Plans remembered, over all operators; the oldest is forgotten first.
_READY_LIMIT = 4096
_ready: dict[Any, Ready] = {}
#: Operators with more than one result.
_SEVERAL = frozenset((PACK_BITMATRIX.name, *(found.name for found in (*MOE.values(), *MOE_QUANTIZED.values()))))


def run_into(operator: Operator, memory: Mapping[str, torch.Tensor], *arguments: Any) -> bool:
    """Run an operator with the buffers of these names, outputs or scratch of its plan, in the given tensors.

    False where the call is not plain (`moe_torch.eager`): it is traced, transformed or asked for gradients, and nothing
    has run. Buffers that are not named lie in the scratch memory that the run allocates. Raises InvalidInput for memory
    that does not fit.
    """
    if torch.compiler.is_compiling():
        return False
    key = eager.plain_key(arguments)
    if key is None or not all(eager.plain_tensor(place) for place in memory.values()):
        return False
    if torch.is_grad_enabled() and any(place.requires_grad for place in memory.values()):
        return False
    forms = [(name, place.shape, place.stride(), place.dtype, place.device) for name, place in memory.items()]
    whole = (operator.name, key, *forms)
    ready = _ready.get(whole) or _remember(whole, operator, memory, arguments)
    try:
        ready.run([arguments[index].data_ptr() for index in ready.selection], tuple(memory.values()))
    except InvalidInput:
        operator.require_alignment(arguments)
        for name, place in memory.items():
            if place.data_ptr() % ALIGNMENT:
                raise InvalidInput(
                    f"the memory of {name} must start at a multiple of {ALIGNMENT} bytes, got address "
                    f"{place.data_ptr():#x}; allocate it by itself"
                ) from None
        raise
    return True


def _remember(key: Any, operator: Operator, memory: Mapping[str, torch.Tensor], arguments: tuple[Any, ...]) -> Ready:
    ready = operator.ready_placing(arguments, tuple(memory))
    for (name, place), (shape, strides, dtype) in zip(memory.items(), ready.outputs, strict=True):
        if (tuple(place.shape), place.stride(), place.dtype, place.device) != (shape, strides, dtype, ready.device):
            raise InvalidInput(
                f"the memory of {name} must be {dtype} {list(shape)} on {ready.device} with dense rows, got "
                f"{place.dtype} {list(place.shape)} with strides {place.stride()} on {place.device}; allocate it so"
            )
    while len(_ready) >= _READY_LIMIT:
        _ready.pop(next(iter(_ready)), None)
    _ready[key] = ready
    return ready


def write_into(operator: Operator, memory: Mapping[str, torch.Tensor], *arguments: Any) -> None:
    """Write the first result of an operator into the first tensor of memory; the others are where more buffers may lie.

    memory: by the names of the plan's buffers. A call that is not plain copies the result, and autograd sees the copy.
    """
    if not run_into(operator, memory, *arguments):
        next(iter(memory.values())).copy_(_result(operator, arguments))


def result_in(operator: Operator, memory: Mapping[str, torch.Tensor], *arguments: Any) -> torch.Tensor:
    """The first result of an operator: the first tensor of memory, or where there is none or the call is not plain, a
    tensor of its own, which autograd may keep."""
    if memory and run_into(operator, memory, *arguments):
        return next(iter(memory.values()))
    return _result(operator, arguments)


def _result(operator: Operator, arguments: tuple[Any, ...]) -> torch.Tensor:
    return (call_first if operator.name in _SEVERAL else call)(operator, *arguments)
