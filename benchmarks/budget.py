"""Time a benchmark may take: device time is scarce, compilers are slow."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator


class Budget:
    """Shares the time of `cells` cells among them; a cell may borrow from later ones, half of theirs by default.

    The first cell of a shape compiles what the others reuse, so equal shares would refuse it what they leave over.
    """

    def __init__(self, seconds_per_cell: float, cells: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds_per_cell, self._cells, self._clock = seconds_per_cell, cells, clock
        self._start = clock()
        self._done = 0

    def finish_cell(self) -> None:
        """Count one cell as done."""
        self._done += 1

    def left(self, kept: float = 0.5) -> float:
        """Seconds the present cell may still take. kept: the part of its share that each later cell is left."""
        later = max(self._cells - self._done - 1, 0) * self._seconds_per_cell * kept
        return self._cells * self._seconds_per_cell - (self._clock() - self._start) - later


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`. Main thread only; a call into C is interrupted at its end.

    A timer that was running before goes on afterwards.
    """

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, stop)
    start = time.monotonic()
    before, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before:
            signal.setitimer(signal.ITIMER_REAL, max(before - (time.monotonic() - start), 1e-3), interval)
