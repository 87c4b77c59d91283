"""How many tokens each expert has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class ExpertTokensMetadata:
    """expert_num_tokens: int32 `[E]` on the device, the rows of each local expert. expert_num_tokens_cpu: the same on
    the host, where somebody had it anyway; None else. Nothing here waits for the device to make it."""

    expert_num_tokens: Any
    expert_num_tokens_cpu: Any = None
