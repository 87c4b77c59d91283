"""Floating point as IEEE 754 has it, in threads where XLA flushes denormal numbers to zero.

XLA's CPU threads treat denormals as zeros. NumPy and Triton's interpreter, which run in them when a program calls the
bridge, would then differ from what they compute elsewhere; and kernels that read small floats through the bits of
larger ones would lose codes: e2m1's 0.5 lies in a denormal.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from typing import Any

#: More than the fenv_t of any platform.
_ENVIRONMENT_BYTES = 64


@contextlib.contextmanager
def exact_denormals() -> Iterator[None]:
    """The thread's default floating-point environment (C11, 7.6) inside the block, and behind it what was there."""
    library, default = _library()
    saved = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    library.fegetenv(saved)
    library.fesetenv(default)
    try:
        yield
    finally:
        library.fesetenv(saved)


@functools.cache
def _library() -> tuple[Any, Any]:
    """(the C library with fesetenv, its FE_DFL_ENV)."""
    library = ctypes.CDLL(None if sys.platform == "darwin" else "libm.so.6")
    if sys.platform == "darwin":
        return library, ctypes.byref(ctypes.c_byte.in_dll(library, "_FE_DFL_ENV"))
    return library, ctypes.c_void_p(-1)
