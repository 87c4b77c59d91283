"""A compiled and loaded plan, and the memory of its calls from torch's allocator."""

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
    return shape, torch.empty(shape, device="meta").stride(), dtype


@dataclass(frozen=True, slots=True)
class Ready:
    """A prepared plan, the indices of its arguments, and its memory."""

    prepared: Prepared
    selection: tuple[int, ...]
    outputs: tuple[Dense, ...]
    scratch: Dense | None
    device: torch.device

    def run(self, pointers: list[int], destinations: Sequence[torch.Tensor | None] = ()) -> list[torch.Tensor]:
        """Run on the current stream and return the outputs. An allocator's error gets a note on the op's memory.

        pointers: addresses of the inputs. Those of outputs and scratch are appended. destinations: tensors for the
        outputs, None: a new one. Empty: all new.
        """
        outputs, _ = self._add_memory(pointers, destinations)
        self._launch(pointers)
        return outputs

    def later(self, pointers: list[int]) -> Begun:
        """Allocate for a run, which `finish` launches. Until then, addresses of inputs may change in the result."""
        outputs, scratch = self._add_memory(pointers, ())
        return Begun(self, pointers, None, outputs, scratch)

    def begin(self, pointers: list[int], behind: int, kept: object = None) -> Begun:
        """Run all steps except the last `behind`. kept: is kept alive by the result."""
        outputs, scratch = self._add_memory(pointers, ())
        split = len(self.prepared.plan.steps) - behind
        self._launch(pointers, slice(split))
        return Begun(self, pointers, slice(split, None), outputs, (scratch, kept))

    def _add_memory(
        self, pointers: list[int], destinations: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        empty, scratch = private.allocator(self.device), None
        try:
            if destinations:
                pairs = zip(destinations, self.outputs, strict=True)
                outputs = [empty(*output) if destination is None else destination for destination, output in pairs]
            else:
                outputs = list(starmap(empty, self.outputs))
            pointers += map(_address_of, outputs)
            if self.scratch:
                # Freed when a run returns: torch reuses it in stream order.
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
    """A run without its last steps. Keep it until they have ended. steps: the last ones, None: all."""

    ready: Ready
    pointers: list[int]
    steps: slice | None
    outputs: list[torch.Tensor]
    kept: object

    def finish(self) -> list[torch.Tensor]:
        """Run the last steps on the current stream, which waits for the first ones."""
        self.run(self.steps)
        return self.outputs

    def run(self, steps: slice | None) -> None:
        """Run these steps, None: all."""
        self.ready._launch(self.pointers, steps)
