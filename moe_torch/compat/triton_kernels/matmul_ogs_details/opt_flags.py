"""Upstream's constraints on tiles, checked and ignored. It is `matmul_details.opt_flags` in Triton 3.8."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from moe_core.base.checks import require_at_least
from moe_core.errors import InvalidInput

_NAMES = (
    "block_m", "block_n", "block_k", "split_k", "is_persistent", "fused_scatter", "epilogue_subtile", "num_stages",
    "idle_sms", "num_warps", "group_m", "xcd_swizzle", "w_cache_modifier", "max_allowable_mn", "occupancy_target",
    "disable_mx4_block_swap", "swap_xw", "use_output_tma", "clc",
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


@contextlib.contextmanager
def scoped_opt_flags_constraints(constraints: Mapping[str, Any]) -> Iterator[None]:
    update_opt_flags_constraints(constraints)
    yield


def reset_opt_flags_constraints() -> None:
    """Do nothing: no constraint is kept."""


def set_idle_sms(num_idle_sms: int) -> None:
    """Do nothing: our kernels leave scheduling to the GPU."""
    require_at_least("num_idle_sms", num_idle_sms, 0)
