"""Checks of a front-end on counters of invalid and repeated ids."""

from __future__ import annotations

from moe_core.errors import InvalidInput


def require_known_ids(invalid_ids: int, num_ids: int, *, adapters: bool = False) -> None:
    if invalid_ids and adapters:
        raise InvalidInput(
            f"ids must be in [-1, {num_ids}), and adapter_ids -1 or slots in use, got {invalid_ids} others; correct "
            "them, or leave checked out to treat them as -1"
        )
    if invalid_ids:
        raise InvalidInput(
            f"ids must be in [-1, {num_ids}), got {invalid_ids} outside; correct them, or leave checked out to treat "
            "them as -1"
        )


def require_distinct_ids(repeated: int) -> None:
    if repeated:
        raise InvalidInput(
            f"ids must not repeat within a token, which a bitmatrix cannot hold, got {repeated} repeated ids; "
            "use make_layout, where each slot counts"
        )
