"""Corrections of Triton's interpreter on a CPU, and launches on borrowed host memory.

Triton 3.6 to 3.9 have faults there (bfloat16 computes on raw bits, conversions truncate, ...). `install` replaces the
interpreter's builder, reductions and language scope. Its state is global to the process, so launches take turns.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.base.recent import process_lock
from moe_core.base.target import interprets
from moe_core.errors import Unsupported
from moe_core.plan.steps import Scalar

VERSIONS = ((3, 6), (3, 10))
_lock = process_lock()
_language: Any = None


@dataclass(frozen=True)
class HostPointer:
    """Address and canonical dtype. Booleans are uint8 in kernels."""

    address: int
    dtype: str

    def data_ptr(self) -> int:
        return self.address


def require_interpreter() -> None:
    """Raise Unsupported unless Triton 3.6 to 3.9 is installed and TRITON_INTERPRET=1 is set."""
    if importlib.util.find_spec("triton") is None:
        raise Unsupported(
            "the interpreter engine needs Triton, which is not installed here (it exists for Linux); "
            "use the NumPy reference engine: unset TRITON_INTERPRET"
        )
    import triton

    version = re.match(r"(\d+)\.(\d+)", triton.__version__)
    if version is None or not VERSIONS[0] <= tuple(map(int, version.groups())) < VERSIONS[1]:
        raise Unsupported(
            f"the interpreter engine supports Triton 3.6 to 3.9, got {triton.__version__}; install one of these or use "
            "the NumPy reference engine: unset TRITON_INTERPRET"
        )
    if not interprets():
        raise Unsupported(
            "the interpreter engine needs TRITON_INTERPRET=1 in the environment before any kernel is imported, got "
            f"{os.environ.get('TRITON_INTERPRET', 'nothing')!r}; set it and start a new process"
        )


def install() -> None:
    """Correct this process's interpreter, once."""
    global _language
    if _language is not None:
        return
    require_interpreter()
    with _lock:
        if _language is None:
            from moe_core.runtime.interpreter import patches

            _language = patches.install()


def launch(kernel: Any, grid: Sequence[int], arguments: Sequence[tuple[str, Any]]) -> None:
    """Run every program of one launch, in order, on host memory in place.

    kernel: imported under TRITON_INTERPRET=1. arguments: (parameter, value): a HostPointer, a plan's `Scalar`, or a
    constant. A note on the kernel's exception names the program.
    """
    install()
    from moe_core.runtime.interpreter import patches

    if not patches.is_interpreted(kernel):
        raise Unsupported(
            f"kernel {getattr(kernel, '__name__', kernel)!r} was imported before TRITON_INTERPRET=1 was set and cannot "
            "be interpreted; set it in the environment and start a new process"
        )

    def argument(value: Any) -> Any:
        if isinstance(value, HostPointer):
            return patches.pointer(value.address, value.dtype)
        return patches.scalar(value.value, value.dtype) if isinstance(value, Scalar) else value

    values = {name: argument(value) for name, value in arguments}
    x, y, z = (*grid, 1, 1)[:3]
    full = (x, y, z)
    # These are ordinary numbers on a GPU.
    turn = _language.turn()
    try:
        next(turn)
        with np.errstate(all="ignore"):
            function, set_program = patches.begin(kernel, full)
            for program in itertools.product(*map(range, full)):
                set_program(*program)
                try:
                    function(**values)
                except Exception as error:
                    error.add_note(f"in program {program} of kernel {kernel.__name__}, grid {full}")
                    raise
    finally:
        turn.close()
