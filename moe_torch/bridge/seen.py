"""Plain calls that are like one seen before: recognised by one function of torch, without the key of a plan.

A key (`eager.plain_key`) reads metadata attribute by attribute, which takes the host as long as two launches. Torch's
`TensorGuards` compares the metadata of all tensors in C++: class, dispatch keys, dtype, device, whether they ask for a
gradient, shape and strides. A torch without it goes by keys alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch

from moe_core.base.recent import Recent
from moe_core.base.target import cpu_target
from moe_core.errors import InvalidInput
from moe_torch.bridge import eager
from moe_torch.bridge.ready import Ready

_C: Any = torch._C
_Guards: Any = getattr(_C._dynamo.guards, "TensorGuards", None)
_address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_is_nested = attrgetter("is_nested")
_are_plain, _are_absent = eager.PLAIN_CLASSES.issuperset, frozenset((None,)).issuperset
_grad_enabled = torch.is_grad_enabled
#: So many calls that are not like the one remembered make room for another.
_MISSES = 8


class _Seen:
    """The tensors of a call, and its plan. A call is like it if tensors with the same metadata are at the same places,
    and the other places are empty."""

    __slots__ = ("absent", "asks", "count", "is_like", "misses", "ready", "target", "tensors")

    def __init__(self, arguments: Sequence[Any], ready: Ready) -> None:
        places = range(len(arguments) - 1)
        others = [place for place in places if arguments[place] is not None and place not in ready.selection]
        self.tensors = _items(*ready.selection, *others)
        self.absent = _items(*[place for place in places if arguments[place] is None])
        tensors = self.tensors(arguments)
        self.is_like = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.asks = any([tensor.requires_grad for tensor in tensors])
        self.target = None if tensors[0].is_cuda else cpu_target()
        self.ready, self.count, self.misses = ready, len(ready.selection), 0


class SeenCalls:
    """Plain calls of one function, by the options, which are its last argument, and the shape of the first."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: Recent[_Seen] = Recent()

    def run(self, arguments: Sequence[Any]) -> list[torch.Tensor] | None:
        """The outputs of a call like one seen; None for another, of which nothing has run.

        On a thread that `eager.plain_thread` holds for.
        """
        if type(arguments[0]) not in eager.PLAIN_CLASSES or arguments[0].is_nested:
            return None
        seen = self._calls.get((arguments[-1], arguments[0].shape))
        if seen is None:
            return None
        tensors = seen.tensors(arguments)
        # The comparison would end the process at a nested or sparse tensor, which has no strides.
        if not _are_plain(map(type, tensors)) or True in map(_is_nested, tensors):
            return None
        try:
            addresses = list(map(_address_of, tensors))
            absent = _are_absent(seen.absent(arguments))
        except (RuntimeError, TypeError):
            return None  # No address, or what has no hash and so is not None.
        if not absent or not seen.is_like(*tensors):
            return None
        if (seen.asks and _grad_enabled()) or (seen.target is not None and seen.target is not cpu_target()):
            return None
        try:
            return seen.ready.run(addresses[: seen.count])
        except InvalidInput:
            return None  # Whoever knows the names says what is wrong, or copies what is misaligned.

    def remember(self, arguments: Sequence[Any], ready: Ready) -> None:
        """Take a plain call as seen. The plan reads the places `ready.selection`."""
        key = arguments[-1], arguments[0].shape
        seen = self._calls.get(key)
        if seen is not None:
            seen.misses += 1
        if _Guards is not None and (seen is None or seen.misses >= _MISSES):
            self._calls.put(key, _Seen(arguments, ready))


def _items(*places: int) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the items at some places of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])
