"""Huge pages for large host memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable

#: NumPy's limit for its own huge pages.
LEAST_BYTES = 1 << 22
_MADV_HUGEPAGE = 14


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Ask Linux to back fresh memory with huge pages, unless NUMPY_MADVISE_HUGEPAGE=0."""
    if num_bytes >= LEAST_BYTES and (advise := _advise()) is not None:
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(first, end - first, _MADV_HUGEPAGE)


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux" or os.environ.get("NUMPY_MADVISE_HUGEPAGE", "1") == "0":
        return None
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        return advise
    return None
