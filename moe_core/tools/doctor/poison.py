"""Poisoned memory: forgotten values show as NaN or -1."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moe_core.runtime.cuda import CudaPrepared, driver
from moe_core.runtime.prepared import Prepared

#: Every byte: NaN in floats, -1 in signed integers.
POISON = 0xFF


@dataclass
class Poisoned:
    outputs: int = 0
    workspaces: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, outputs: int, workspaces: int) -> None:
        with self.lock:
            self.outputs, self.workspaces = self.outputs + outputs, self.workspaces + workspaces


@contextlib.contextmanager
def poisoned() -> Iterator[Poisoned]:
    """Fill outputs and workspaces of every plan with 0xFF bytes before it runs, in this whole process."""
    record = Poisoned()
    runs = {kind: kind.__dict__["__call__"] for kind in (Prepared, CudaPrepared)}

    def poisoning(run: Callable[..., None]) -> Callable[..., None]:
        def poison_and_run(
            prepared: Prepared, pointers: Sequence[int], stream: int = 0, steps: slice | None = None
        ) -> None:
            # Plans in two parts are poisoned before the first.
            if steps is None or not steps.start:
                plan = prepared.plan
                sizes = [buffer.spec.nbytes for buffer in plan.outputs]
                for pointer, size in zip(pointers[len(plan.inputs) :], [*sizes, plan.scratch_bytes], strict=False):
                    if size and not plan.target.on_gpu:
                        ctypes.memset(pointer, POISON, size)
                    elif size:
                        driver().within(prepared.device_index, driver().fill, pointer, size, POISON, stream)
                record.count(len(sizes), int(plan.scratch_bytes > 0))
            run(prepared, pointers, stream, steps)

        return poison_and_run

    for kind, run in runs.items():
        kind.__call__ = poisoning(run)  # type: ignore[method-assign]
    try:
        yield record
    finally:
        for kind, run in runs.items():
            kind.__call__ = run  # type: ignore[method-assign]
