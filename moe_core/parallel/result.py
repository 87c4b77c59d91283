from __future__ import annotations

from typing import Any, NamedTuple


class ParallelOutput(NamedTuple):
    """A `MoEOutput` of this rank's T tokens, and counts of its experts' rows.

    output `[T, D]`; ids and weights `[T, K]`, ids of all E experts; logits fp32 `[T, E]` or None. tokens_per_expert
    int32 `[E]`: slots of this rank's tokens. invalid_ids int32 `[1]`. received_per_expert int32 `[L]`: rows of all
    ranks at each place of this rank. overflow int32 `[1]`: rows of all ranks that did not fit, equal on all.
    """

    output: Any
    ids: Any
    weights: Any
    logits: Any
    tokens_per_expert: Any
    invalid_ids: Any
    received_per_expert: Any
    overflow: Any
