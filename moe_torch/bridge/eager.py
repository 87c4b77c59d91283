"""When an eager call may go straight to its kernels, past torch's dispatcher, and what such calls allocate with.

The dispatcher takes a third of the host's time for an operator, and with ordinary tensors of ordinary code it does
nothing but hand them on. A call is *plain* when that is certain: no mode, functional transform, tracer, forward-mode
level or profiler is active on this thread, every tensor is an ordinary strided CPU or CUDA tensor and none asks for a
gradient. Any other call takes the dispatcher, which knows what to do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from moe_core.base.target import Target, cpu_target

_C: Any = torch._C
_keys_of, _active_keys = _C._dispatch_keys, _C._dispatch_tls_local_include_set
_profiling, _function_modes = _C._autograd._profiler_enabled, _C._len_torch_function_stack
_deterministic = _C._get_deterministic_algorithms
_grad_enabled = torch.is_grad_enabled

#: Makes an output of a shape, strides and dtype; its memory is not initialised.
Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def _key_sets(*choices: str) -> frozenset[int]:
    """The number of each set of dispatch keys; `"CPU AutocastCPU"` names one."""
    found = []
    for names in choices:
        first, *rest = [_C.DispatchKeySet(getattr(_C.DispatchKey, name)) for name in names.split()]
        for key in rest:
            first = first | key
        found.append(first.raw_repr())
    return frozenset(found)


#: Dispatch keys that are active outside and inside of `torch.inference_mode()`; modes and transforms add theirs.
_PLAIN_THREADS = _key_sets("BackendSelect ADInplaceOrView", "BackendSelect")
#: Keys of an ordinary tensor, and of one made in inference mode. Not among them: lazily negated, functional, batched,
#: sparse, nested, quantised and meta tensors, and subclasses with a `__torch_dispatch__`.
_PLAIN_TENSORS = _key_sets(
    *(f"{kind} ADInplaceOrView Autograd{kind} Autocast{kind}" for kind in ("CPU", "CUDA")),
    *(f"{kind} Autocast{kind}" for kind in ("CPU", "CUDA")),
)
#: Other classes may have a `__torch_function__`.
PLAIN_CLASSES = frozenset((torch.Tensor, torch.nn.Parameter))


def plain_thread() -> bool:
    """Whether nothing on this thread watches or transforms calls of operators."""
    return (
        _active_keys().raw_repr() in _PLAIN_THREADS
        and not _function_modes()
        and not _profiling()
        and forward_ad._current_level < 0
    )


def plain_tensor(tensor: Any) -> bool:
    """Whether this is an ordinary tensor; whether it asks for a gradient is another question."""
    return type(tensor) in PLAIN_CLASSES and _keys_of(tensor).raw_repr() in _PLAIN_TENSORS


def key_of(arguments: Sequence[Any], target: Target | None) -> tuple[Any, ...]:
    """What a plan depends on: equal keys mean equal plans.

    arguments: of an operator, tensors (None where absent) and then the options. target: of tensors on a CPU.
    """
    *tensors, options = arguments
    return (
        options,
        target,
        *[
            None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            for tensor in tensors
        ],
    )


def plain_key(arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """`key_of` the arguments of a plain call; None for a call that is not plain."""
    if not plain_thread():
        return None
    grad = _grad_enabled()
    for tensor in arguments[:-1]:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN_CLASSES or _keys_of(tensor).raw_repr() not in _PLAIN_TENSORS:
            return None
        if grad and tensor.requires_grad:
            return None
    first = arguments[0]
    if first is None:
        return None
    return key_of(arguments, None if first.is_cuda else cpu_target())


def _getter(name: str, public: Callable[..., int]) -> Callable[..., int]:
    """torch's unwrapped function where the build has one, else the public one."""
    return getattr(_C, name, None) or public


#: `current_stream(device index)`: the address of the current stream.
current_stream = _getter("_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
_current_device = _getter("_cuda_getDevice", torch.cuda.current_device)

_empty_cpu, _empty_cuda = _C._dynamo.guards._empty_strided_cpu, _C._dynamo.guards._empty_strided_cuda


def allocator(device: torch.device) -> Allocator:
    """What makes outputs on a device: inductor's allocation functions, in a third of the time of `torch.empty`.

    They take the current device, and leave memory as it is where deterministic mode wants it filled.
    """
    if not _deterministic():
        index = device.index
        if index is None:
            return _empty_cpu
        if index == _current_device():
            return _empty_cuda
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
