"""When a step of a product must end before the next one begins."""

from __future__ import annotations

from moe_core.base.target import Target

#: Of `multiply` those whose left factor is computed: three parts of an fp32 number, or 16-bit numbers made fp32.
_COMPUTED_LEFT = ("split_a", "widen_tf32")


def must_drain(product: str, target: Target) -> bool:
    """Whether kernels with that PRODUCT of `multiply` are DRAINED: see `kernels.dot.drained`."""
    return target.is_sm90 and product in _COMPUTED_LEFT
