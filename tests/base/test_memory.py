"""Huge pages under large results."""

from __future__ import annotations

import ctypes
import mmap
import pathlib
import subprocess
import sys

import pytest

from moe_core.base.memory import LEAST_BYTES, prefer_huge_pages

_MAPS = pathlib.Path("/proc/self/smaps")
_HUGE = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(not (_MAPS.exists() and _HUGE.exists()), reason="this system has no huge pages")


def flags_of(address: int) -> list[str]:
    """Linux's flags of the mapping that an address lies in."""
    inside = False
    for line in _MAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.parametrize(("num_bytes", "huge"), [(LEAST_BYTES - 1, False), (LEAST_BYTES, True)])
def test_large_memory_gets_huge_pages(num_bytes, huge):
    memory = mmap.mmap(-1, 2 * LEAST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    prefer_huge_pages(start + 16, num_bytes)
    assert ("hg" in flags_of(start + mmap.PAGESIZE)) == huge
    # What lies beside it stays as it was, on pages that are shared too.
    assert "hg" not in flags_of(start) and "hg" not in flags_of(start + num_bytes + mmap.PAGESIZE)


def test_numpys_switch_turns_them_off(monkeypatch):
    program = "from moe_core.base import memory; print(memory._advise())"
    monkeypatch.setenv("NUMPY_MADVISE_HUGEPAGE", "0")
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "None"
