"""Plain calls like an earlier one, recognised by one function of torch instead of the key of a plan.

A key (`eager.plain_key`) reads metadata attribute by attribute, which takes as long as two launches. Torch's
`TensorGuards` compares class, dispatch keys, dtype, device, requires_grad, shape and strides of all tensors in C++. It
ignores the keys of some dispatch modes, so `plain_thread` is checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch

from moe_core.base.recent import Recent
from moe_core.base.target import cpu_target
from moe_core.errors import InvalidInput
from moe_torch.bridge import eager, private
from moe_torch.bridge.ready import Ready

_Guards: Any = private.TensorGuards
_address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_is_nested = attrgetter("is_nested")
_are_plain, _are_absent = eager.PLAIN_CLASSES.issuperset, frozenset((None,)).issuperset
_grad_enabled = torch.is_grad_enabled
#: After this number of other calls, a remembered call is replaced.
_MISSES = 8


class _Seen:
    """A plan, and the metadata by which a like call's tensors are known, and last addresses equal to `fixed`."""

    __slots__ = ("absent", "asks", "fixed", "is_like", "misses", "pointers", "ready", "tail", "target", "tensors")

    def __init__(self, arguments: Sequence[Any], ready: Ready, fixed: Sequence[int]) -> None:
        present = [index for index, tensor in enumerate(arguments) if tensor is not None]
        absent = [index for index, tensor in enumerate(arguments) if tensor is None]
        self.tensors, self.absent = _items(present), _items(absent) if absent else None
        tensors = [arguments[index] for index in present]
        self.is_like = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.asks = any([tensor.requires_grad for tensor in tensors])
        self.target = None if tensors[0].is_cuda else cpu_target()
        self.fixed, self.tail = list(fixed), slice(len(present) - len(fixed), None)
        self.pointers = _items([present.index(index) for index in ready.selection])
        self.ready, self.misses = ready, 0

    def run(self, arguments: Sequence[Any]) -> list[torch.Tensor] | None:
        """None: it is another call and nothing has run."""
        tensors = arguments
        try:
            if self.absent is not None:
                tensors = self.tensors(arguments)
                if not _are_absent(self.absent(arguments)):
                    return None
            # The comparison would end the process at a tensor without strides.
            if not _are_plain(map(type, tensors)) or True in map(_is_nested, tensors):
                return None
            addresses = list(map(_address_of, tensors))
        except (RuntimeError, TypeError):
            return None  # No address, or what has no hash and so is not None.
        if not self.is_like(*tensors) or (self.fixed and addresses[self.tail] != self.fixed):
            return None
        if (self.asks and _grad_enabled()) or (self.target is not None and self.target is not cpu_target()):
            return None
        try:
            return self.ready.run([*self.pointers(addresses)])
        except InvalidInput:
            return None  # Whoever knows the names says what is wrong, or copies what is misaligned.


class SeenCalls:
    """Calls of one function, by options and shape of the first argument."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: Recent[_Seen] = Recent()

    def run(self, options: str, arguments: Sequence[Any]) -> list[torch.Tensor] | None:
        """The outputs of a call like an earlier one. None: nothing has run."""
        if not eager.plain_thread():
            return None
        last = self._calls.get(options)
        outputs = None if last is None else last.run(arguments)
        if outputs is not None:
            return outputs
        if not eager.plain_tensor(arguments[0]):
            return None
        seen = self._calls.get((options, arguments[0].shape))
        if seen is None or seen is last:
            return None
        outputs = seen.run(arguments)
        if outputs is not None:
            self._calls.put(options, seen)
        return outputs

    def remember(self, options: str, arguments: Sequence[Any], ready: Ready, fixed: Sequence[int] = ()) -> None:
        """Remember a plain call. ready: its plan. fixed: addresses that the last arguments of a like call have."""
        key = options, arguments[0].shape
        seen = self._calls.get(key)
        if seen is not None:
            seen.misses += 1
        if _Guards is not None and (seen is None or seen.misses >= _MISSES):
            seen = _Seen(arguments, ready, fixed)
            self._calls.put(key, seen)
            self._calls.put(options, seen)


def _items(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda items: tuple([items[index] for index in indices])
