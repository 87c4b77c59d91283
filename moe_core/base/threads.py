"""Threads of the NumPy engine: the number of the caller's framework, with one BLAS thread in each.

BLAS threads busy-wait for each other: with the pools of torch or XLA a product takes ten to thirty times as long. So
`spread` gives independent pieces (experts, blocks of rows) to threads. Pieces depend on shapes only, so results have
the same bits for every number of threads.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from moe_core.base.floats import set_default_environment

T = TypeVar("T")
#: Rows and columns of a piece of a product, elements of other pieces.
BLOCK_ROWS, BLOCK_COLUMNS, _BLOCK_ELEMENTS = 256, 512, 32768
#: Average cost of one more thread: half the time between two starts, which wait for Python's lock.
_WAKE_NANOSECONDS = 20_000
#: OpenBLAS has memory for about this many threads.
_MOST = 64

_limit: contextvars.ContextVar[int | None] = contextvars.ContextVar("moebius_threads", default=None)
_lock = threading.Lock()
#: Idle threads, the last to fall idle first, and the number of all.
_idle: list[_Helper] = []
_hired = 0
_CONTROLS = (
    ("scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
    ("scipy_openblas_get_num_threads", "scipy_openblas_set_num_threads"),
    ("openblas_get_num_threads64_", "openblas_set_num_threads64_"),
    ("openblas_get_num_threads", "openblas_set_num_threads"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
    ("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
)
_UNKNOWN: tuple[Callable[[], int], Callable[[int], Any]] = (lambda: 1), (lambda threads: None)
#: Runs inside `one_blas_thread`, and the number of threads to restore.
_runs, _before = 0, 1


def count() -> int:
    """Threads that `spread` uses: the framework's during a plan, else one per core, at most OMP_NUM_THREADS."""
    limit = _limit.get()
    return _default_count() if limit is None else limit


@functools.cache
def _default_count() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    stated = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    limit = int(stated[:9]) if stated.isascii() and stated.isdecimal() else 0
    return min(cores, limit or cores, _MOST)


@contextlib.contextmanager
def use(threads: int) -> Iterator[None]:
    token = _limit.set(max(1, min(threads, _MOST)))
    try:
        yield
    finally:
        _limit.reset(token)


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit NumPy's BLAS to one thread inside the block, for the whole process. Blocks may overlap."""
    global _runs, _before
    read, write = _blas()
    # Count the run first, so that an interrupt cannot lose it.
    try:
        with _lock:
            _runs += 1
            if _runs == 1:
                _before = 1
                _before = read()
                if _before != 1:
                    write(1)
        yield
    finally:
        with _lock:
            _runs -= 1
            if _runs == 0 and _before != 1:
                write(_before)


def why_blas_is_free() -> str | None:
    """The reason `one_blas_thread` does not reach NumPy's BLAS, or None if it does."""
    if _blas() is not _UNKNOWN:
        return None
    name = np.show_config(mode="dicts")["Build Dependencies"]["blas"].get("name", "unknown")  # type: ignore[index]
    return f"NumPy's BLAS ({name}) has none of the functions known to set its number of threads"


@functools.cache
def _blas() -> tuple[Callable[[], int], Callable[[int], Any]]:
    """The functions that read and set the number of threads of NumPy's BLAS, or _UNKNOWN (Apple's Accelerate).
    threadpoolctl finds them too, but from version 3.8 on for one thread of a process only."""
    with contextlib.suppress(OSError, AttributeError):
        library = _blas_library()
        for read, write in _CONTROLS:
            if hasattr(library, read) and hasattr(library, write):
                return getattr(library, read), getattr(library, write)
    return _UNKNOWN


def _blas_library() -> ctypes.CDLL:
    return ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]


@functools.cache
def blas_kernels() -> str:
    """The machine of OpenBLAS's kernels, such as `SkylakeX`; "" for other libraries."""
    with contextlib.suppress(OSError, AttributeError):
        library = _blas_library()
        for read, _ in _CONTROLS:
            name = read.replace("num_threads", "corename")
            if name != read and hasattr(library, name):
                corename = getattr(library, name)
                corename.restype = ctypes.c_char_p
                return corename().decode()
    return ""


def products(rows: int, depth: int, columns: int) -> float:
    """Rough nanoseconds of a matrix product in one thread."""
    return rows * depth * columns * 0.02


def elements(*shape: int) -> float:
    """The cost of an activation or a sum over an array, as of `products`: a third of its time, as threads wait."""
    return math.prod(shape) * 0.3


def spread(function: Callable[[T], None], pieces: Iterable[T], nanoseconds: float = math.inf) -> None:
    """Call `function(piece)` for every piece, in any order, on up to `count()` threads, including this one.

    Args:
        pieces: a deque is emptied, and function may add to it.
        nanoseconds: the cost of all pieces in one thread, by `products` and `elements`. Little work wakes few threads.

    Returns when no piece is running, also after an exception or interrupt. Then it drops pieces that have not begun and
    raises the first exception.
    """
    waiting = pieces if isinstance(pieces, deque) else deque(pieces)
    wanted = min(threads_for(nanoseconds), len(waiting)) - 1
    if wanted < 1:
        while waiting:
            function(waiting.popleft())
        return

    running: list[None] = []
    failures: list[BaseException] = []
    ends: SimpleQueue[None] = SimpleQueue()

    def work() -> None:
        try:
            while not failures:
                try:
                    piece = waiting.popleft()
                except IndexError:
                    return
                function(piece)
        except BaseException as error:
            waiting.clear()
            failures.append(error)

    hired: list[tuple[_Helper, _Task]] = []
    handed = 0

    def wake(first: int) -> None:
        for helper, _ in hired[first : first + 2]:
            helper.wake()

    def help_out(helper: _Helper, number: int) -> None:
        # Count this thread before it looks for a piece: a thread that clears `waiting` and sees nobody running is then
        # the last.
        running.append(None)
        if waiting:
            wake(2 * number + 2)
        work()
        _idle.append(helper)
        running.pop()
        ends.put(None)

    try:
        while len(hired) < wanted and (helper := _hire()) is not None:
            # NumPy's error state belongs to the context.
            hired.append((helper, (contextvars.copy_context(), help_out, len(hired))))
        # Send tasks only now: a thread still awake begins at once.
        for helper, task in hired:
            handed += 1
            helper.box.append(task)
        # Each wakes two others: one that wakes all would keep Python's lock from them.
        wake(0)
        work()
    finally:
        # Wait through interrupts, because pieces write to borrowed memory. An interrupt cannot leave a C queue locked.
        alone = False
        while not alone:
            try:
                waiting.clear()
                while running:
                    ends.get()
                alone = True
            except BaseException as error:  # KeyboardInterrupt in this thread
                failures.append(error)
        for helper, task in hired[:handed]:
            helper.take_back(task)
        _idle.extend(helper for helper, _ in hired[handed:])
    if failures:
        raise failures[0]


_Work = tuple[Callable[[Any], None], tuple[int, ...], Any]


class Later:
    """Work of several products for one `run`: each expert's first pieces, then the pieces that follow."""

    def __init__(self) -> None:
        self._first: list[_Work] = []
        self._after: dict[int, list[_Work]] = {}
        self._nanoseconds = 0.0

    def first(
        self, function: Callable[[T], None], pieces: Iterable[tuple[tuple[int, ...], T]], nanoseconds: float
    ) -> None:
        self._first += [(function, experts, piece) for experts, piece in pieces]
        self._nanoseconds += nanoseconds

    def add(self, function: Callable[[T], None], pieces: Iterable[tuple[int, T]], nanoseconds: float) -> None:
        """Add `function(piece)` for every (expert, piece), after the expert's first pieces."""
        for expert, piece in pieces:
            self._after.setdefault(expert, []).append((function, (), piece))
        self._nanoseconds += nanoseconds

    def run(self) -> None:
        left: dict[int, list[int]] = {}
        for _, experts, _ in self._first:
            for expert in experts:
                numbers = left.setdefault(expert, [])
                numbers.append(len(numbers))
        pieces = deque(self._first)
        for expert, after in self._after.items():
            if expert not in left:
                pieces += after

        def work(piece: _Work) -> None:
            function, experts, part = piece
            function(part)
            for expert in experts:
                # The thread that takes the last number ends last.
                if left[expert].pop() == 0:
                    pieces.extend(self._after.get(expert, ()))

        spread(work, pieces, self._nanoseconds)


_Task = tuple[contextvars.Context, Callable[["_Helper", int], None], int]


class _Helper(threading.Thread):
    """A thread that sleeps until `wake`. Its box holds a task, which it or the sender takes out."""

    def __init__(self) -> None:
        super().__init__(name="moebius", daemon=True)
        self.box: list[_Task] = []
        self._wake = threading.Lock()
        self._wake.acquire()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is waking from an earlier task, taken back since
            self._wake.release()

    def take_back(self, task: _Task) -> None:
        with contextlib.suppress(ValueError):
            self.box.remove(task)
            _idle.append(self)

    def run(self) -> None:
        set_default_environment()
        while True:
            self._wake.acquire()
            try:
                context, help_out, number = self.box.pop()
            except IndexError:
                continue
            context.run(help_out, self, number)
            del context, help_out  # the arrays of the work may go


def _hire() -> _Helper | None:
    global _hired
    with contextlib.suppress(IndexError):
        return _idle.pop()
    with _lock:
        if _hired >= _MOST:
            return None
        helper = _Helper()
        helper.start()
        _hired += 1
    return helper


def column_blocks(width: int) -> list[slice]:
    return [slice(first, min(first + BLOCK_COLUMNS, width)) for first in range(0, width, BLOCK_COLUMNS)]


def threads_for(nanoseconds: float) -> int:
    """Minimises `nanoseconds / threads + _WAKE_NANOSECONDS * threads`."""
    return int(min(count(), max(1, math.sqrt(nanoseconds / _WAKE_NANOSECONDS))))


def row_blocks(num_rows: int, width: int | None = None) -> list[slice]:
    """Pieces of the rows of an array that fit one thread's cache, or one piece for each of several threads."""
    step = BLOCK_ROWS
    if width is not None:
        threads = threads_for(elements(num_rows, width))
        step = -(-num_rows // threads) if threads > 1 else max(1, _BLOCK_ELEMENTS // max(width, 1))
    return [slice(first, first + step) for first in range(0, num_rows, max(step, 1))]


def _forget_threads() -> None:
    global _lock, _runs, _hired
    _lock, _runs, _hired = threading.Lock(), 0, 0
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
