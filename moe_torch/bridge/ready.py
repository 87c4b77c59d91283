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

    def begin(self, pointers: list[int], kept: object = None) -> Begun:
        """Allocate for a run, which the result launches. Until then, addresses of inputs may change there. kept: is
        kept alive by the result."""
        outputs, scratch = self._add_memory(pointers, ())
        return Begun(self, pointers, outputs, (scratch, kept))

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
    """A run with memory. Keep it until its steps have ended."""

    ready: Ready
    pointers: list[int]
    outputs: list[torch.Tensor]
    kept: object

    def run(self, steps: slice | None = None) -> list[torch.Tensor]:
        """Run these steps, None: all, on the current stream, which waits for the first ones. Returns the outputs."""
        self.ready._launch(self.pointers, steps)
        return self.outputs
