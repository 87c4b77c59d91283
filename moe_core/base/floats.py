"""The floating-point environment of a thread (C11, 7.6)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from typing import Any

#: More than the fenv_t of any platform.
_ENVIRONMENT_BYTES = 64


@functools.cache
def _library() -> tuple[Any, Any]:
    library = ctypes.CDLL(None if sys.platform == "darwin" else "libm.so.6")
    if sys.platform == "darwin":
        return library, ctypes.byref(ctypes.c_byte.in_dll(library, "_FE_DFL_ENV"))
    return library, ctypes.c_void_p(-1)


def set_default_environment() -> None:
    """Give this thread the default environment, which keeps denormal numbers."""
    library, default = _library()
    library.fesetenv(default)


@contextlib.contextmanager
def exact_denormals() -> Iterator[None]:
    """Use the default environment inside the block, and restore the thread's afterwards.

    XLA's CPU threads flush denormal numbers to zero, and torch's may. NumPy and Triton's interpreter run in these
    threads and would lose codes: e2m1's 0.5 uses a denormal.
    """
    library, default = _library()
    saved = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    library.fegetenv(saved)
    try:
        library.fesetenv(default)
        yield
    finally:
        library.fesetenv(saved)
