"""What an expert-parallel forward returns to one rank."""

from __future__ import annotations

from typing import Any, NamedTuple


class ParallelOutput(NamedTuple):
    """A `MoEOutput` of this rank's T tokens, and what happened to it as an owner of experts.

    output `[T, D]`; ids and weights `[T, K]`, ids of all E experts; logits fp32 `[T, E]` or None; tokens_per_expert
    int32 `[E]`: slots that this rank's tokens have with each expert, wherever it is. invalid_ids int32 `[1]`, of this
    rank. received_per_expert int32 `[L]`: rows of all ranks that came to each of this rank's places. overflow int32
    `[1]`: rows of all ranks that did not fit, the same on each of them.
    """

    output: Any
    ids: Any
    weights: Any
    logits: Any
    tokens_per_expert: Any
    invalid_ids: Any
    received_per_expert: Any
    overflow: Any
