"""Where engines run, in words, and the choice of the CPU engine of a parity run."""

from __future__ import annotations

import importlib.util
import os

from moe_core.runtime.cuda import cuda_available, cuda_target, driver

INTERPRETER = "triton interpreter (cpu)"
NUMPY = "numpy reference (cpu)"
_VARIABLE = "TRITON_INTERPRET"


def prefer_interpreter() -> None:
    """Without a GPU, make the CPU engine of this process Triton's interpreter, unless the user chose one.

    Call it before kernels are imported: Triton reads the variable when a kernel is defined. Where there is no
    Triton, as on macOS, the NumPy reference stays the engine.
    """
    if not cuda_available() and has_triton():
        os.environ.setdefault(_VARIABLE, "1")


def has_triton() -> bool:
    """Whether Triton is installed, in any version."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ModuleNotFoundError:  # of a finder that refuses it
        return False


def use_gpu() -> bool:
    """Whether engines should place arrays on a GPU: there is one, and the interpreter was not asked for."""
    return cuda_available() and os.environ.get(_VARIABLE, "0") != "1"


def describe(device: tuple[str, int], explanation: str) -> tuple[str, bool]:
    """(what ran, whether that was the NumPy reference), from the device and the `explain_moe` text of what was run."""
    if "NumPy reference" in explanation:
        return NUMPY, True
    kind, index = device
    return (INTERPRETER if kind == "cpu" else f"cuda sm_{cuda_target(index).arch} {driver().name(index)}"), False
