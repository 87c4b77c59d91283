"""Write results to the caller's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.errors import InvalidInput
from moe_torch.bridge import eager
from moe_torch.bridge.operator import Operator, call, call_first
from moe_torch.bridge.ready import Ready
from moe_torch.operators.stages import PACK_BITMATRIX
from moe_torch.operators.table import LORA, MOE, MOE_QUANTIZED

_SEVERAL = frozenset(
    (PACK_BITMATRIX.name, *(operator.name for kinds in (MOE, MOE_QUANTIZED, LORA) for operator in kinds.values()))
)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Launchable(Generic[_Parameters, _Result]):
    """A function in the place of a kernel: ported code may launch it, `function[grid](...)`, on any grid."""

    def __init__(self, function: Callable[_Parameters, _Result]) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return self._function(*args, **kwargs)

    def __getitem__(self, grid: Any) -> Callable[_Parameters, _Result]:
        return self._function


def run_into(operator: Operator, memory: Mapping[str, torch.Tensor], arguments: tuple[Any, ...]) -> bool:
    """Run an operator with the named buffers of its plan in the caller's tensors. Returns False and runs nothing unless
    the call is plain (`moe_torch.bridge.eager`).
    """
    if torch.compiler.is_compiling():
        return False
    ready = _find(operator, memory, arguments)
    if ready is None:
        return False
    try:
        operator.run_ready(ready, arguments, tuple(memory.values()))
    except InvalidInput:
        for name, tensor in memory.items():
            if tensor.data_ptr() % ALIGNMENT:
                raise InvalidInput(
                    f"the memory of {name} must start at a multiple of {ALIGNMENT} bytes, got address "
                    f"{tensor.data_ptr():#x}; allocate it by itself"
                ) from None
        raise
    return True


def _find(operator: Operator, memory: Mapping[str, torch.Tensor], arguments: tuple[Any, ...]) -> Ready | None:
    key = eager.plain_key((*memory.values(), *arguments))
    if key is None:
        return None
    key = (*memory, key)
    known = operator.plans.get(key) or operator.plans.find(key)
    if known is not None:
        return known
    ready = operator.ready(arguments, tuple(memory))
    for (name, tensor), (shape, strides, dtype) in zip(memory.items(), ready.outputs, strict=True):
        if (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device) != (shape, strides, dtype, ready.device):
            raise InvalidInput(
                f"the memory of {name} must be {dtype} {list(shape)} on {ready.device} with dense rows, got "
                f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; allocate it so"
            )
    operator.plans.put(key, ready)
    return ready


class KnownRun(NamedTuple):
    """Made by `known_run`."""

    ready: Ready
    selection: tuple[int, ...]

    def run(self, tensors: Sequence[Any], places: tuple[torch.Tensor, ...]) -> bool:
        """Returns False and runs nothing for a misaligned address."""
        try:
            self.ready.run([tensors[index].data_ptr() for index in self.selection], places)
        except InvalidInput:
            return False
        return True


def known_run(
    operator: Operator, memory: Mapping[str, torch.Tensor], arguments: tuple[Any, ...], tensors: Sequence[Any]
) -> KnownRun | None:
    """None if an argument is no tensor of the caller, or occurs twice: such calls cannot be told apart."""
    ready, positions = _find(operator, memory, arguments), {id(tensor): order for order, tensor in enumerate(tensors)}
    present = [tensor for tensor in tensors if tensor is not None]
    if ready is None or len({id(tensor) for tensor in present}) < len(present):
        return None
    selection = [positions.get(id(arguments[index])) for index in ready.selection]
    return None if None in selection else KnownRun(ready, tuple(selection))  # pyright: ignore[reportArgumentType]


def write_into(operator: Operator, memory: Mapping[str, torch.Tensor], arguments: tuple[Any, ...]) -> None:
    """Write an operator's first result to memory: as a copy, seen by autograd, if the call is not plain."""
    if run_into(operator, memory, arguments):
        return
    (name, tensor), result = next(iter(memory.items())), _result(operator, arguments)
    if (tensor.shape, tensor.dtype) != (result.shape, result.dtype):
        raise InvalidInput(
            f"the memory of {name} must be {result.dtype} {list(result.shape)}, got {tensor.dtype} "
            f"{list(tensor.shape)}; allocate it so"
        )
    tensor.copy_(result)


def result_in(operator: Operator, memory: Mapping[str, torch.Tensor], arguments: tuple[Any, ...]) -> torch.Tensor:
    """An operator's first result, in memory if the call is plain, else new."""
    if memory and run_into(operator, memory, arguments):
        return next(iter(memory.values()))
    return _result(operator, arguments)


def _result(operator: Operator, arguments: tuple[Any, ...]) -> torch.Tensor:
    return (call_first if operator.name in _SEVERAL else call)(operator, arguments)
