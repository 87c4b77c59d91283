"""Plain calls that are like one seen before: recognised by one function of torch, without the key of a plan.

A key (`eager.plain_key`) reads metadata attribute by attribute, which takes the host as long as two launches. Torch's
`TensorGuards` compares the metadata of all tensors in C++: class, dispatch keys, dtype, device, whether they ask for a
gradient, shape and strides. A torch without it goes by keys alone.

It leaves out the keys of dispatch modes that compiled programs ignore, so what is active on the thread is asked first.
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
#: So many calls that are not like the one remembered make room for another.
_MISSES = 8


class _Seen:
    """The arguments of a call, and its plan. A call is like it if tensors with the same metadata are at the same
    places, the other places are empty, and the last addresses are the same ones if `fixed` has any."""

    __slots__ = ("absent", "asks", "fixed", "is_like", "misses", "pointers", "ready", "tail", "target", "tensors")

    def __init__(self, arguments: Sequence[Any], ready: Ready, fixed: Sequence[int]) -> None:
        present = [place for place, tensor in enumerate(arguments) if tensor is not None]
        absent = [place for place, tensor in enumerate(arguments) if tensor is None]
        self.tensors, self.absent = _items(present), _items(absent) if absent else None
        tensors = [arguments[place] for place in present]
        self.is_like = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.asks = any([tensor.requires_grad for tensor in tensors])
        self.target = None if tensors[0].is_cuda else cpu_target()
        self.fixed, self.tail = list(fixed), slice(len(present) - len(fixed), None)
        #: From the addresses of all tensors to those that the plan reads.
        self.pointers = _items([present.index(place) for place in ready.selection])
        self.ready, self.misses = ready, 0

    def run(self, arguments: Sequence[Any]) -> list[torch.Tensor] | None:
        """The outputs of such a call; None for another, of which nothing has run."""
        tensors = arguments
        try:
            if self.absent is not None:
                tensors = self.tensors(arguments)
                if not _are_absent(self.absent(arguments)):
                    return None
            # The comparison would end the process at a nested or sparse tensor, which has no strides.
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
    """Plain calls of one function, by their options and the shape of the first argument.

    Beside that, those of each options that were the last of them to run.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: Recent[_Seen] = Recent()

    def run(self, options: str, arguments: Sequence[Any]) -> list[torch.Tensor] | None:
        """The outputs of a call like one seen; None for another, of which nothing has run."""
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
        """Take a plain call as seen. The plan reads the places `ready.selection`. fixed: the addresses of the last
        arguments, if a call with others is another one."""
        key = options, arguments[0].shape
        seen = self._calls.get(key)
        if seen is not None:
            seen.misses += 1
        if _Guards is not None and (seen is None or seen.misses >= _MISSES):
            seen = _Seen(arguments, ready, fixed)
            self._calls.put(key, seen)
            self._calls.put(options, seen)


def _items(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the items at some places of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])
