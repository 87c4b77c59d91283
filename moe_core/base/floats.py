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
    library, default = _library()
    library.fesetenv(default)


@contextlib.contextmanager
def exact_denormals() -> Iterator[None]:
    """Do not flush denormals inside the block, as threads of XLA and torch may: e2m1's 0.5 uses one."""
    library, default = _library()
    saved = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    library.fegetenv(saved)
    try:
        library.fesetenv(default)
        yield
    finally:
        library.fesetenv(saved)
