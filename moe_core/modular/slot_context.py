"""What functions between the stages of experts can read beside the rows they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_core.operands import RaggedLayout


@dataclass(frozen=True, eq=False)
class SlotContext:
    """What the rows at an injection point belong to: one row for each slot, slot `s = m * topk + k`.

    hidden_states `[M, K]`: what the first product reads. layout: the slots by expert; a grouped matmul on it finds each
    slot's expert. row_weight fp32 `[M * topk]`: what the second product multiplies each slot by (ones where the
    router's weight is on the hidden states). activated `[M * topk, F]`: what the second product reads, None before the
    activation.
    """

    hidden_states: Any
    layout: RaggedLayout
    row_weight: Any
    activated: Any = None
