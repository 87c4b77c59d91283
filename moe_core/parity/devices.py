"""Choice of the CPU engine, and devices as text."""

from __future__ import annotations

import importlib.util
import os

from moe_core.base.target import interprets
from moe_core.runtime.cuda import cuda_available, cuda_target, driver

INTERPRETER = "triton interpreter (cpu)"
NUMPY = "numpy reference (cpu)"
_VARIABLE = "TRITON_INTERPRET"


def prefer_interpreter() -> None:
    """Without a GPU, use Triton's interpreter, unless the user chose. Call it before kernels are imported."""
    if not cuda_available() and has_triton():
        os.environ.setdefault(_VARIABLE, "1")


def has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ModuleNotFoundError:  # of a finder that refuses it
        return False


def use_gpu() -> bool:
    """Return True if there is a GPU and the interpreter was not requested."""
    return cuda_available() and not interprets()


def describe(device: tuple[str, int], explanation: str) -> tuple[str, bool]:
    """(what ran, True for the NumPy reference), from the device and the `explain_moe` text."""
    if "NumPy reference" in explanation:
        return NUMPY, True
    kind, index = device
    return (INTERPRETER if kind == "cpu" else f"cuda sm_{cuda_target(index).arch} {driver().name(index)}"), False
