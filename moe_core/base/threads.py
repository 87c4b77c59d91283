"""Threads of the NumPy engine: as many as the caller's framework uses, and one BLAS thread in each.

BLAS libraries keep pools of threads that wait busily for each other. Beside the pools of torch and XLA, or on a busy
machine, such a product takes ten to thirty times as long. So a product runs in one thread, and `spread` hands out
independent pieces of work (experts, blocks of rows) to threads that take the next piece when they are done. Results are
the same bits for every number of threads: the pieces of a product depend on shapes only, and arithmetic on elements has
the same result in any pieces.
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
#: Rows and columns of a piece of a product, elements of a piece of other work.
BLOCK_ROWS, BLOCK_COLUMNS, _BLOCK_ELEMENTS = 256, 512, 32768
#: Half the nanoseconds that pass from the beginning of one thread to that of the next, because both wait for Python's
#: lock: so much longer all takes on average with one more.
_WAKE_NANOSECONDS = 20_000
#: OpenBLAS has memory for about so many threads that compute at a time.
_MOST = 64

_limit: contextvars.ContextVar[int | None] = contextvars.ContextVar("moebius_threads", default=None)
_lock = threading.Lock()
#: Threads that wait for work, the last to fall idle first, and the number of all.
_idle: list[_Helper] = []
_hired = 0
#: Names of the functions that read and set the number of threads: OpenBLAS in NumPy's wheels and elsewhere, MKL, BLIS.
_CONTROLS = (
    ("scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
    ("scipy_openblas_get_num_threads", "scipy_openblas_set_num_threads"),
    ("openblas_get_num_threads64_", "openblas_set_num_threads64_"),
    ("openblas_get_num_threads", "openblas_set_num_threads"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
    ("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
)
#: Stands for a BLAS that has none of them: it counts as one thread, and stays as it is.
_UNKNOWN: tuple[Callable[[], int], Callable[[int], Any]] = (lambda: 1), (lambda threads: None)
#: Runs inside `one_blas_thread`, and the number of threads that the last of them restores.
_runs, _before = 0, 1


def count() -> int:
    """Threads that `spread` uses: the framework's where one is running a plan, else one per core of this process, at
    most OMP_NUM_THREADS."""
    limit = _limit.get()
    return _default_count() if limit is None else limit


@functools.cache
def _default_count() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    stated = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(cores, int(stated) if stated.isdigit() and int(stated) else cores, _MOST)


@contextlib.contextmanager
def use(threads: int) -> Iterator[None]:
    """Let `spread` use so many threads inside the block."""
    token = _limit.set(max(1, min(threads, _MOST)))
    try:
        yield
    finally:
        _limit.reset(token)


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """NumPy's BLAS computes in one thread inside the block, for the whole process; blocks may overlap.

    A BLAS without a known way to tell it so is left alone: see `why_blas_is_free`.
    """
    global _runs, _before
    read, write = _blas()
    # An interrupt falls behind a call, so a run is counted before the first one, and what is counted ends.
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
    """Why `one_blas_thread` does not reach NumPy's BLAS; None where it does."""
    if _blas() is not _UNKNOWN:
        return None
    name = np.show_config(mode="dicts")["Build Dependencies"]["blas"].get("name", "unknown")  # type: ignore[index]
    return f"NumPy's BLAS ({name}) has none of the functions known to set its number of threads"


@functools.cache
def _blas() -> tuple[Callable[[], int], Callable[[int], Any]]:
    """What reads and what sets the number of threads of the BLAS that NumPy is linked to; where there is no such thing
    (Apple's Accelerate), _UNKNOWN.

    Found through NumPy's own library, whose dependencies the dynamic linker searches too. threadpoolctl finds the same
    functions, but from version 3.8 on lets only one thread of a process call them.
    """
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
    """The machine that OpenBLAS has chosen its kernels for, as `SkylakeX` or `Haswell`; of other libraries none, ""."""
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
    """Nanoseconds that a matrix product of these sizes takes in one thread, roughly."""
    return rows * depth * columns * 0.02


def elements(*shape: int) -> float:
    """What `products` means for an activation or a sum over an array of this shape: a third of the nanoseconds that it
    takes in one thread, because between any two operations of NumPy several threads wait for Python's lock."""
    return math.prod(shape) * 0.3


def spread(function: Callable[[T], None], pieces: Iterable[T], nanoseconds: float = math.inf) -> None:
    """`function(piece)` for every piece, on up to `count()` threads, this one among them; the order is not defined.

    pieces: a deque is emptied; function may put more pieces into it.
    nanoseconds: what all pieces take in one thread, by `products` and `elements`; little work wakes few threads.
    Returns when no piece is running any more, also where one raised or this thread is interrupted: the first exception
    is raised then, and pieces not begun are left out.
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

    given: list[tuple[_Helper, _Task]] = []
    handed = 0

    def wake(first: int) -> None:
        for helper, _ in given[first : first + 2]:
            helper.wake()

    def help_out(helper: _Helper, number: int) -> None:
        # Counted before it looks for a piece: whoever clears `waiting` and then sees nobody running is alone. No
        # interrupt comes to these threads.
        running.append(None)
        if waiting:
            wake(2 * number + 2)
        work()
        _idle.append(helper)
        running.pop()
        ends.put(None)

    try:
        while len(given) < wanted and (helper := _hire()) is not None:
            # NumPy's error state is the context's.
            given.append((helper, (contextvars.copy_context(), help_out, len(given))))
        # Only now: a thread that is still awake begins at once, and wakes two of those that are given.
        for helper, task in given:
            handed += 1
            helper.box.append(task)
        # Each wakes two others: one thread that wakes all keeps Python's lock from those that are awake.
        wake(0)
        work()
    finally:
        # Whatever interrupts the waiting: pieces write to memory that is not ours. A queue of C code has no lock that
        # an interrupt can leave taken.
        alone = False
        while not alone:
            try:
                waiting.clear()
                while running:
                    ends.get()
                alone = True
            except BaseException as error:  # KeyboardInterrupt in this thread
                failures.append(error)
        for helper, task in given[:handed]:
            helper.take_back(task)
        _idle.extend(helper for helper, _ in given[handed:])
    if failures:
        raise failures[0]


_Work = tuple[Callable[[Any], None], tuple[int, ...], Any]


class Later:
    """Work of several products, done at once by `run`: what is `first` of an expert, and what follows from that."""

    def __init__(self) -> None:
        self._first: list[_Work] = []
        self._after: dict[int, list[_Work]] = {}
        self._nanoseconds = 0.0

    def first(
        self, function: Callable[[T], None], pieces: Iterable[tuple[tuple[int, ...], T]], nanoseconds: float
    ) -> None:
        """`function(piece)` for every (experts, piece)."""
        self._first += [(function, experts, piece) for experts, piece in pieces]
        self._nanoseconds += nanoseconds

    def add(self, function: Callable[[T], None], pieces: Iterable[tuple[int, T]], nanoseconds: float) -> None:
        """`function(piece)` for every (expert, piece), when all that is first of the expert is done."""
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
                # Whoever takes the last number is the last to end.
                if left[expert].pop() == 0:
                    pieces.extend(self._after.get(expert, ()))

        spread(work, pieces, self._nanoseconds)


_Task = tuple[contextvars.Context, Callable[["_Helper", int], None], int]


class _Helper(threading.Thread):
    """A thread that sleeps until `wake`. A task lies in its box, from which it, or who put it there, takes it.

    A lock of its own wakes it in a third of the time that an executor's queue and futures take.
    """

    def __init__(self) -> None:
        super().__init__(name="moebius", daemon=True)
        self.box: list[_Task] = []
        self._wake = threading.Lock()
        self._wake.acquire()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is waking from an earlier task, taken back since
            self._wake.release()

    def take_back(self, task: _Task) -> None:
        """If it has not begun, it never will, and is idle."""
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
    """An idle thread, or a new one; None where there are too many."""
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
    """Pieces of the columns of a product."""
    return [slice(first, min(first + BLOCK_COLUMNS, width)) for first in range(0, width, BLOCK_COLUMNS)]


def threads_for(nanoseconds: float) -> int:
    """Threads for so much work: as many as make `nanoseconds / threads + _WAKE_NANOSECONDS * threads` smallest."""
    return int(min(count(), max(1, math.sqrt(nanoseconds / _WAKE_NANOSECONDS))))


def row_blocks(num_rows: int, width: int | None = None) -> list[slice]:
    """Pieces of an array of so many rows: for products, or, of rows of this width, for arithmetic on elements.

    One thread does the latter in pieces whose temporaries stay in its cache. Several get one piece each: between any
    two operations of NumPy they wait for Python's lock, so they should be few.
    """
    step = BLOCK_ROWS
    if width is not None:
        threads = threads_for(elements(num_rows, width))
        step = -(-num_rows // threads) if threads > 1 else max(1, _BLOCK_ELEMENTS // max(width, 1))
    return [slice(first, first + step) for first in range(0, num_rows, max(step, 1))]


def _forget_threads() -> None:
    """A child process has none of its parent's threads."""
    global _lock, _runs, _hired
    _lock, _runs, _hired = threading.Lock(), 0, 0
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
