"""Poisoned memory: what a kernel forgot to write, or took for zero, shows as NaN or -1."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moe_core.runtime.cuda import driver
from moe_core.runtime.prepared import Prepared

#: Every byte: NaN in floats, -1 in signed integers.
POISON = 0xFF


@dataclass
class Poisoned:
    """How much was poisoned: arrays that plans write, and workspaces."""

    outputs: int = 0
    workspaces: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, outputs: int, workspaces: int) -> None:
        with self.lock:
            self.outputs, self.workspaces = self.outputs + outputs, self.workspaces + workspaces


@contextlib.contextmanager
def poisoned() -> Iterator[Poisoned]:
    """Inside, every plan that any front-end runs finds its outputs and workspace full of 0xFF bytes.

    It changes how plans run in the whole process, on every thread (XLA calls from its own): for a process of one's own.
    """
    run, found = Prepared.__call__, Poisoned()

    def poison_and_run(prepared: Prepared, pointers: Sequence[int], stream: int = 0) -> None:
        plan = prepared.plan
        sizes = [buffer.spec.nbytes for buffer in plan.outputs]
        for pointer, size in zip(pointers[len(plan.inputs) :], [*sizes, plan.scratch_bytes], strict=False):
            if size:
                _fill(prepared, pointer, size, stream)
        found.count(len(sizes), int(plan.scratch_bytes > 0))
        run(prepared, pointers, stream)

    Prepared.__call__ = poison_and_run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Prepared.__call__ = run  # type: ignore[method-assign]


def _fill(prepared: Prepared, pointer: int, size: int, stream: int) -> None:
    if not prepared.plan.target.on_gpu:
        ctypes.memset(pointer, POISON, size)
        return
    driver().within(prepared.device_index, driver().fill, pointer, size, POISON, stream)
