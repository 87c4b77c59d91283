"""In which form activations reach experts and leave them."""

from __future__ import annotations

import enum


class FusedMoEActivationFormat(enum.Enum):
    """Standard: `[M, K]`, a row per token. BatchedExperts: `[E, max_num_tokens, K]`, a block of rows per expert, whose
    first `expert_num_tokens[e]` rows are used."""

    Standard = "standard"
    BatchedExperts = "batched_experts"
