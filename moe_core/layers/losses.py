"""Checks of the router's losses."""

from __future__ import annotations

from typing import Any

from moe_core.base.checks import finite_float, require_choice
from moe_core.errors import InvalidInput
from moe_core.specs.routing import SCORINGS


def check_balance(logits: Any, ids: Any, token_mask: Any, scoring: str, scale: float) -> None:
    """Check the arguments of `load_balance_loss`. Raises InvalidInput."""
    require_choice("scoring", scoring, SCORINGS)
    finite_float("scale", scale)
    shape = tuple(logits.shape)
    if len(shape) < 2 or not str(logits.dtype).endswith(("float32", "float64")):
        raise InvalidInput(
            f"logits must be float32 or float64 [..., S, E], got {logits.dtype} {list(shape)}; pass MoEAux.logits, or "
            "those of each sequence: aux.logits.reshape(batch, sequence, num_experts)"
        )
    if tuple(ids.shape[:-1]) != shape[:-1] or "int32" not in str(ids.dtype):
        raise InvalidInput(
            f"ids must be int32 {[*shape[:-1], 'K']}, one row for each of logits, got {ids.dtype} {list(ids.shape)}; "
            "pass MoEAux.ids in the shape of logits"
        )
    if tuple(token_mask.shape) != shape[:-1] or "bool" not in str(token_mask.dtype):
        raise InvalidInput(
            f"token_mask must be bool {list(shape[:-1])}, one for each token of logits, got {token_mask.dtype} "
            f"{list(token_mask.shape)}; compare it with 0 and give it that shape"
        )
