"""Products that drain a step before the next."""

from __future__ import annotations

from moe_core.base import Target

#: Products that compute their left factor: three parts of an fp32 number, or 16-bit numbers made fp32.
_COMPUTED_LEFT = ("split_a", "widen_tf32")


def must_drain(product: str, target: Target) -> bool:
    """True for this PRODUCT of `multiply`, see `kernels.dot.drained`."""
    return target.is_sm90 and product in _COMPUTED_LEFT
