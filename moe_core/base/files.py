"""Opening and writing safetensors files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_core.errors import InvalidInput, Unsupported


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """A safetensors file, memory-mapped for NumPy; a missing package, file or header is explained."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise _missing("reading .safetensors files") from error
    try:
        handle = safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path} must be a readable safetensors file, got: {error}; download it again") from error
    with handle as file:
        yield file


def file_writer(what: str) -> Callable[..., None]:
    """safetensors' `save_file` for NumPy; a missing package is explained. what: is to be written."""
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise _missing(f"writing {what}") from error
    return save_file


def _missing(what: str) -> Unsupported:
    return Unsupported(
        f"{what} needs the package safetensors, which is not installed; pip install 'moebius[checkpoint]'"
    )
