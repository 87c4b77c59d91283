"""A plan that is compiled and loaded, and the memory that torch's allocator gives its calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import NamedTuple

import torch

from moe_core.base import threads
from moe_core.runtime.prepared import Prepared
from moe_torch.bridge import eager

_address_of = torch.Tensor.data_ptr

#: Shape, strides and dtype of memory to allocate.
Dense = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def dense(shape: tuple[int, ...], dtype: torch.dtype) -> Dense:
    """Row-major memory."""
    return shape, torch.empty(shape, device="meta").stride(), dtype


class Ready(NamedTuple):
    """A prepared plan: which arguments it reads, what to allocate, and where."""

    prepared: Prepared
    selection: tuple[int, ...]
    outputs: tuple[Dense, ...]
    scratch: Dense | None
    device: torch.device

    def run(self, pointers: list[int], places: Sequence[torch.Tensor | None] = ()) -> list[torch.Tensor]:
        """The outputs of a run on the current stream. pointers: of the inputs; the others are added. places: empty, or
        for every output the tensor that it is written to, None = a new one.

        What torch raises without memory (`torch.OutOfMemoryError` on a GPU) has a note of what the op asked for."""
        empty = eager.allocator(self.device)
        try:
            if places:
                given = zip(places, self.outputs, strict=True)
                outputs = [empty(*output) if place is None else place for place, output in given]
            else:
                outputs = list(starmap(empty, self.outputs))
            pointers += map(_address_of, outputs)
            if self.scratch:
                # Freed when this returns: torch reuses it in stream order, behind the launches that read it.
                scratch = empty(*self.scratch)
                pointers.append(scratch.data_ptr())
        except (RuntimeError, MemoryError) as error:
            error.add_note(self.prepared.plan.memory_note)
            raise
        index = self.device.index
        if index is not None:
            self.prepared(pointers, eager.current_stream(index))
        else:
            with threads.use(torch.get_num_threads()):
                self.prepared(pointers, 0)
        return outputs
