"""Caches that keep what was used last, and locks that a forked process finds free."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moe_core.base.recent import Recent
from tests.support.paths import ROOT


def test_the_last_used_are_kept_and_no_more_than_twice_as_many() -> None:
    cache: Recent[int] = Recent(3)
    cache.put("always", 100)
    for number in range(1, 50):
        cache.put(number, number)
        assert (cache.get("always") or cache.find("always")) == 100
        assert all(cache.find(one) == one for one in range(max(1, number - 1), number + 1))
        assert len(cache) <= 6
    assert cache.find(1) is None and cache.get(1) is None
    assert set(cache.keys()) >= {48, 49, "always"} and len(cache.keys()) == len(cache)
    cache.clear()
    assert cache.find("always") is None and len(cache) == 0


def test_a_value_that_was_found_again_is_found_at_once() -> None:
    cache: Recent[int] = Recent(2)
    for number in range(1, 4):
        cache.put(number, number)
    assert cache.get(1) is None and cache.find(1) == 1 and cache.get(1) == 1


_FORK = """
import os, sys, threading
from moe_core.base.recent import process_lock
lock, taken, leave = process_lock(), threading.Event(), threading.Event()
def hold():
    with lock:
        taken.set()
        leave.wait()
threading.Thread(target=hold).start()
taken.wait()
child = os.fork()
if child == 0:
    os._exit(0 if lock.acquire(timeout=5) else 1)
leave.set()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_lock_is_free_in_a_forked_process() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORK], cwd=ROOT, timeout=60, check=True)
