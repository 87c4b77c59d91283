"""Threads of the NumPy engine: every piece once, exceptions, forks, and BLAS in one thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from moe_core.base import threads


@pytest.mark.parametrize("count", [1, 2, 8, 200])
@pytest.mark.parametrize("pieces", [0, 1, 2, 50])
def test_every_piece_is_worked_on_once(count, pieces):
    done = []
    with threads.use(count):
        threads.spread(done.append, range(pieces))
    assert sorted(done) == list(range(pieces))


@pytest.mark.parametrize("stated", ["", "²", "٣", "-3", "x", "1_0", "0", "1", " 1 ", "1,4", "9" * 5000])
def test_the_number_of_the_environment_counts_if_it_is_one(monkeypatch, stated):
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    cores = min(len(os.sched_getaffinity(0)), threads._MOST)
    assert threads._default_count.__wrapped__() == (1 if stated.strip() in ("1", "1,4") else cores)


def test_several_threads_take_part_and_keep_numpys_error_state():
    seen, barrier = set(), threading.Barrier(8, timeout=30)

    def piece(_: int) -> None:
        barrier.wait()
        seen.add((threading.get_ident(), np.geterr()["over"]))

    with threads.use(8), np.errstate(over="ignore"):
        threads.spread(piece, range(8))
    assert len(seen) == 8 and {state for _, state in seen} == {"ignore"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_exception_is_raised_when_no_piece_runs_any_more(error):
    running = []

    def piece(number: int) -> None:
        running.append(number)
        try:
            if number == 0:
                time.sleep(0.01)
                raise error("piece 0")
            time.sleep(0.05)
        finally:
            running.remove(number)

    with threads.use(4), pytest.raises(error, match="piece 0"):
        threads.spread(piece, range(1000))
    assert not running
    done = []
    with threads.use(4):
        threads.spread(done.append, range(10))
    assert len(done) == 10


def test_spread_inside_a_piece_and_in_many_threads_ends():
    totals = []

    def outer(_: int) -> None:
        inner = []
        threads.spread(inner.append, range(20))
        totals.append(len(inner))

    def caller() -> None:
        with threads.use(8):
            threads.spread(outer, range(20))

    callers = [threading.Thread(target=caller) for _ in range(8)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
    assert totals == [20] * 160


def test_threads_that_had_no_time_to_begin_are_hired_again(monkeypatch):
    monkeypatch.setattr(threads, "_idle", [])
    monkeypatch.setattr(threads, "_hired", 0)
    with threads.use(4):
        for _ in range(200):  # most of them end before a thread has begun
            threads.spread(lambda _: None, range(4))
    assert threads._hired == 3


def test_a_thread_that_begins_late_does_not_end_the_waiting_for_others(monkeypatch):
    class Late(threads._Helper):
        def run(self) -> None:
            time.sleep(0.05)
            super().run()

    late, both, done = Late(), threading.Barrier(2, timeout=30), []
    late.start()
    monkeypatch.setattr(threads, "_idle", [late])

    def piece(number: int) -> None:
        if number < 2:
            both.wait()
            time.sleep(0.2 if isinstance(threading.current_thread(), threads._Helper) else 0)
        done.append(number)

    with threads.use(3):
        threads.spread(piece, range(3))
    assert len(done) == 3


def test_a_thread_that_begins_early_wakes_others_all_the_same(monkeypatch):
    class Awake(threads._Helper):
        def run(self) -> None:
            while not self.box:
                time.sleep(0)
            context, help_out, number = self.box.pop()
            context.run(help_out, self, number)

    def hire_slowly():
        time.sleep(0.005)
        return hire()

    def piece(_: int) -> None:
        every.wait()

    awake, hire, every = Awake(), threads._hire, threading.Barrier(8, timeout=30)
    awake.start()
    monkeypatch.setattr(threads, "_idle", [awake])
    monkeypatch.setattr(threads, "_hire", hire_slowly)
    with threads.use(8):
        threads.spread(piece, range(8))
    assert awake in threads._idle


def test_threads_are_idle_again_after_an_interrupt_before_they_had_work(monkeypatch):
    monkeypatch.setattr(threads, "_idle", [])

    def interrupted():
        if len(hired) == 2:
            raise KeyboardInterrupt
        hired.append(hire())
        return hired[-1]

    hired, hire = [], threads._hire
    monkeypatch.setattr(threads, "_hire", interrupted)
    with threads.use(8), pytest.raises(KeyboardInterrupt):
        threads.spread(lambda _: None, range(8))
    assert threads._idle == hired and len(hired) == 2


@pytest.mark.parametrize("count", [1, 2, 8])
def test_what_follows_an_expert_begins_when_all_that_is_first_of_it_is_done(count):
    first, seen = [((0, 1), "a"), ((1,), "b"), ((1,), "c"), ((2,), "d")], []

    def begin(piece: str) -> None:
        time.sleep(0.002)
        seen.append(piece)

    later = threads.Later()
    later.add(seen.append, [(expert, f"after {expert}") for expert in range(4) for _ in range(2)], 1e9)
    later.first(begin, first, 1e9)
    with threads.use(count):
        later.run()
    assert sorted(seen) == sorted(["a", "b", "c", "d", *(f"after {expert}" for expert in range(4) for _ in range(2))])
    for experts, piece in first:
        for expert in experts:
            assert seen.index(piece) < seen.index(f"after {expert}")


def test_nothing_follows_what_ends_after_a_failure_elsewhere():
    both, seen = threading.Barrier(2, timeout=30), []

    def begin(piece: int) -> None:
        both.wait()
        if piece == 0:
            raise ValueError("piece 0")
        time.sleep(0.05)

    later = threads.Later()
    later.first(begin, [((0,), 0), ((1,), 1)], 1e9)
    later.add(seen.append, [(1, "after 1")], 1e9)
    with threads.use(2), pytest.raises(ValueError, match="piece 0"):
        later.run()
    assert not seen


def test_nothing_follows_a_failure():
    def fail(piece: int) -> None:
        raise ValueError(f"piece {piece}")

    later, seen = threads.Later(), []
    later.first(fail, [((0,), 0)], 1e9)
    later.add(seen.append, [(0, "after 0")], 1e9)
    with threads.use(4), pytest.raises(ValueError, match="piece 0"):
        later.run()
    assert not seen


def test_blas_has_one_thread_inside_and_its_own_number_behind():
    read, write = threads._blas()
    if read() == 1:
        write(2)
    before = read()
    first, second = threads.one_blas_thread(), threads.one_blas_thread()
    with first:
        assert read() == 1
        with second:
            assert read() == 1
        assert read() == 1
    assert read() == before


def test_an_interrupt_before_blas_said_its_number_sets_none(monkeypatch):
    def read() -> int:
        raise KeyboardInterrupt

    written = []
    monkeypatch.setattr(threads, "_blas", lambda: (read, written.append))
    with pytest.raises(KeyboardInterrupt), threads.one_blas_thread():
        raise AssertionError("the block must not run")
    assert written == []
    monkeypatch.setattr(threads, "_blas", lambda: (lambda: 1, written.append))
    with threads.one_blas_thread():
        assert written == [], "it has one thread already"


def test_the_default_follows_omp_num_threads():
    program = "from moe_core.base import threads; print(threads.count())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("stated", "cores", "expected"),
    [("", 4, 4), ("3", 8, 3), ("3,1", 8, 3), ("8", 2, 2), ("0", 4, 4), ("many", 4, 4), ("100", 200, 64), ("", 100, 64)],
)
def test_threads_without_a_limit(monkeypatch, stated, cores, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores) if process == 0 else (), raising=False)
    assert threads._default_count.__wrapped__() == expected


@pytest.mark.parametrize(("cores", "expected"), [(6, 6), (None, 1)])
def test_threads_where_a_process_has_no_affinity(monkeypatch, cores, expected):
    """As on macOS."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert threads._default_count.__wrapped__() == expected


def test_limits_hold_inside_their_block(monkeypatch):
    before = threads.count()
    with threads.use(200):
        assert threads.count() == 64
        with threads.use(0):
            assert threads.count() == 1
        assert threads.count() == 64
    assert threads.count() == before
    monkeypatch.setattr(threads, "_idle", [])
    monkeypatch.setattr(threads, "_hired", 64)
    assert threads._hire() is None
    monkeypatch.setattr(threads, "_hired", 63)
    assert threads._hire() is not None and threads._hired == 64


def test_pieces_of_columns_and_rows():
    def ends(pieces):
        return [(piece.start, piece.stop) for piece in pieces]

    assert ends(threads.column_blocks(1025)) == [(0, 512), (512, 1024), (1024, 1025)]
    assert ends(threads.row_blocks(300)) == [(0, 256), (256, 512)]
    with threads.use(1):
        assert ends(threads.row_blocks(9, 8192)) == [(0, 4), (4, 8), (8, 12)]
        assert ends(threads.row_blocks(2, 10**6)) == [(0, 1), (1, 2)]
        assert threads.row_blocks(0, 8) == []
    with threads.use(3):
        # 0.3 ns an element: 0.6 million make a third thread worth while, 0.2 million none.
        assert ends(threads.row_blocks(100, 6_000)) == [(0, 34), (34, 68), (68, 102)]
        assert ends(threads.row_blocks(5, 40_000)) == [(row, row + 1) for row in range(5)]
        assert [threads.threads_for(work) for work in (0, 79_999, 80_000, 179_999, 180_000)] == [1, 1, 2, 2, 3]


def test_blas_is_reached():
    assert threads.why_blas_is_free() is None or threads._blas() is threads._UNKNOWN
    config = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    assert config != "scipy-openblas" or (threads._blas() is not threads._UNKNOWN and threads.blas_kernels())


_FORK = """
import os, sys
from moe_core.base import threads

with threads.use(2):
    threads.spread(lambda _: None, range(4))
    child = os.fork()
    done = []
    threads.spread(done.append, range(4))
    if child == 0:
        os._exit(len(done))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_threads_of_its_own():
    # In a process of its own: frameworks warn of any fork.
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", _FORK], timeout=60)
    assert found.returncode == 4
