"""The framework-agnostic core of Moebius: plans, Triton kernels and their NumPy reference."""

from moe_core.errors import InvalidInput, Unsupported

__all__ = ["InvalidInput", "Unsupported"]
__version__ = "0.1.0"
