"""The results of a forward other than y."""

from __future__ import annotations

from typing import Any, NamedTuple


class MoEAux(NamedTuple):
    """Losses and statistics of one forward; formulas: `moe_core.ops.routing.reference_backward.router_losses`.

    T counts the tokens of all leading axes.

    Attributes:
        load_balance_loss, z_loss: fp32 scalars without masked tokens.
        tokens_per_expert: int32 `[E]`, slots routed to each expert, before any capacity limit.
        ids: int32 `[T, K]`, -1 where a token is masked or a capacity limit dropped the slot.
        weights: fp32 `[T, K]`, of the router, 0 where masked.
        invalid_ids: int32 `[1]`, ids outside [-1, E), zero if the layer's own router chose.
        logits: fp32 `[T, E]`, differentiable, for other losses; anything where masked.
        overflow: int32 `[1]` or None. For expert-parallel layers: rows of all ranks that did not fit.
    """

    load_balance_loss: Any
    z_loss: Any
    tokens_per_expert: Any
    ids: Any
    weights: Any
    invalid_ids: Any
    logits: Any
    overflow: Any = None
