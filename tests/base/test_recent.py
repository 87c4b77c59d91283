"""Small parts: recent values, codecs, errors, views."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from moe_core.base import codec
from moe_core.base.arrays import ArraySpec, host_array, host_view
from moe_core.base.recent import Recent
from moe_core.errors import InvalidInput, Unsupported
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
    of_plans: Recent[int] = Recent()
    for number in range(1, 1025):
        of_plans.put(number, number)
    assert len(of_plans) == 1024, "twice the 512 of docs/developer/architecture.md"


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


def test_fields_are_in_order_of_their_names_without_blanks() -> None:
    text = '{"dtype":"int32","shape":[2,3],"strides":[3,1],"type":"ArraySpec"}'
    assert codec.dumps(ArraySpec((2, 3), "int32")) == text
    assert codec.dumps((1, None, True, 0.5, "a")) == '[1,null,true,{"float":"0x1.0000000000000p-1"},"a"]'


@pytest.mark.parametrize("kind", [InvalidInput, Unsupported])
def test_long_messages_are_shortened(kind: type[Exception]) -> None:
    assert str(kind("x" * 4000)) == "x" * 4000
    assert str(kind("a" * 3000 + "b" * 201 + "c" * 800)) == f"{'a' * 3000}{'b' * 195} ... {'c' * 800}"


@pytest.mark.parametrize(
    "spec", [ArraySpec((3, 2), "float32"), ArraySpec((2, 2), "bfloat16", (1, 2)), ArraySpec((0, 5), "int32")], ids=str
)
def test_a_view_of_later_addresses_is_the_array_at_each(spec: ArraySpec) -> None:
    view, memory = host_view(spec), np.arange(64, dtype=np.uint8).reshape(2, 32)
    for row in memory:
        found, wanted = view(row.ctypes.data), host_array(row.ctypes.data, spec)
        assert (found.dtype, found.shape, found.strides) == (wanted.dtype, wanted.shape, wanted.strides)
        assert found.size == 0 or np.shares_memory(found, row)
        np.testing.assert_array_equal(found, wanted)
        assert found.flags.writeable
