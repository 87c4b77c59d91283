"""A plan that is compiled and loaded, and the memory that torch's allocator gives its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

import torch

from moe_core.base import threads
from moe_core.runtime.prepared import Prepared
from moe_torch.bridge import private

_address_of = torch.Tensor.data_ptr

#: Shape, strides and dtype of memory to allocate.
Dense = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def dense(shape: tuple[int, ...], dtype: torch.dtype) -> Dense:
    """Row-major memory."""
    return shape, torch.empty(shape, device="meta").stride(), dtype


@dataclass(frozen=True, slots=True)
class Ready:
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
        outputs, _ = self._add_memory(pointers, places)
        self._launch(pointers)
        return outputs

    def begin(self, pointers: list[int], behind: int, kept: object = None) -> Begun:
        """Run all steps but the last `behind` on the current stream. kept: lives as long as what is returned."""
        outputs, scratch = self._add_memory(pointers, ())
        split = len(self.prepared.plan.steps) - behind
        self._launch(pointers, slice(split))
        return Begun(self, pointers, slice(split, None), outputs, (scratch, kept))

    def _add_memory(
        self, pointers: list[int], places: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The outputs, and scratch memory; their addresses go behind the others."""
        empty, scratch = private.allocator(self.device), None
        try:
            if places:
                given = zip(places, self.outputs, strict=True)
                outputs = [empty(*output) if place is None else place for place, output in given]
            else:
                outputs = list(starmap(empty, self.outputs))
            pointers += map(_address_of, outputs)
            if self.scratch:
                # Freed when a run returns: torch reuses it in stream order, behind the launches that read it.
                scratch = empty(*self.scratch)
                pointers.append(scratch.data_ptr())
        except (RuntimeError, MemoryError) as error:
            error.add_note(self.prepared.plan.memory_note)
            raise
        return outputs, scratch

    def _launch(self, pointers: list[int], steps: slice | None = None) -> None:
        index = self.device.index
        if index is not None:
            self.prepared(pointers, private.current_stream(index), steps)
        else:
            with threads.use(torch.get_num_threads()):
                self.prepared(pointers, 0, steps)


class Begun(NamedTuple):
    """A run of which the first steps are under way. What it holds has to live until the last ones have ended."""

    ready: Ready
    pointers: list[int]
    steps: slice
    outputs: list[torch.Tensor]
    kept: object

    def finish(self) -> list[torch.Tensor]:
        """Run the other steps on the current stream, which waits for the first ones. Returns the outputs."""
        self.ready._launch(self.pointers, self.steps)
        return self.outputs
