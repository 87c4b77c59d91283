"""Names of older generations' kernels that classes of theirs import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_core.modular import types as core
from moe_core.modular.types import ProblemSize


@dataclass(frozen=True, eq=False)
class ExpertTokensMetadata(core.ExpertTokensMetadata):
    """expert_num_tokens: int32 `[E]` on the device, rows of each local expert. expert_num_tokens_cpu: the same on the
    host, if a caller has it. psum_recv_per_rank, rank_expert_offset: for the caller's experts. Ours refuse them."""

    psum_recv_per_rank: Any = None
    rank_expert_offset: int | None = None

    @staticmethod
    def make_from_list(expert_num_tokens_list: Sequence[int], device: torch.device | str) -> ExpertTokensMetadata:
        counts = torch.tensor(expert_num_tokens_list, dtype=torch.int32)
        return ExpertTokensMetadata(counts.to(device, non_blocking=True), counts)


def _moe_problem_size(a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor) -> ProblemSize:
    """(E, M, N, K, topk) of weights `[E, N, K]` and `[E, K, F]`."""
    return core.moe_problem_size(a1.shape, w1.shape, w2.shape, topk_ids.shape, "out_in")
