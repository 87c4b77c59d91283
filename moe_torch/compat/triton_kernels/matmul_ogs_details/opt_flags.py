"""Upstream's constraints on tiles, checked and ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.errors import InvalidInput

_NAMES = (
    "block_m", "block_n", "block_k", "split_k", "is_persistent", "fused_scatter", "epilogue_subtile", "num_stages",
    "idle_sms",
)  # fmt: skip


class InapplicableConstraint(Exception):
    """For callers that catch it. Nothing here raises it."""


def update_opt_flags_constraints(constraints: Mapping[str, Any]) -> None:
    if not isinstance(constraints, Mapping):
        raise InvalidInput(
            f"constraints must be a dict of names and values, got {type(constraints).__name__}; pass {{'split_k': 1}}"
        )
    unknown = [name for name in constraints if name not in _NAMES]
    if unknown:
        raise InvalidInput(
            f"constraints must have names among {', '.join(_NAMES)}, got {unknown[0]!r}; leave it out, as constraints "
            "have no effect here"
        )


def reset_opt_flags_constraints() -> None:
    """Do nothing: no constraint is kept."""
