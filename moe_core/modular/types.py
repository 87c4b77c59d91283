"""Records of the modular kernels of both front-ends."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_core.base.arrays import WEIGHT_LAYOUTS
from moe_core.base.checks import require_at_least, require_choice, require_flag
from moe_core.errors import InvalidInput
from moe_core.specs.operands import RaggedLayout

#: `zero_experts`: pass tokens through, or add zero.
ZERO_EXPERT_TYPES = ("identity", "zero")


class FusedMoEActivationFormat(enum.Enum):
    """Standard: `[M, K]`. BatchedExperts: `[E, max_num_tokens, K]`, with `expert_num_tokens[e]` used rows first."""

    Standard = "standard"
    BatchedExperts = "batched_experts"


@dataclass(frozen=True, eq=False)
class ExpertTokensMetadata:
    """expert_num_tokens: int32 `[E]` on the device, rows of each local expert. expert_num_tokens_cpu: on the host."""

    expert_num_tokens: Any
    expert_num_tokens_cpu: Any = None


@dataclass(frozen=True)
class FusedMoEParallelConfig:
    """use_ep: split whole experts over ranks. Raises InvalidInput for contradictions."""

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    ep_rank: int = 0
    use_ep: bool = False

    def __post_init__(self) -> None:
        for kind in ("tp", "dp", "ep"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            require_at_least(f"{kind}_size", size, 1)
            require_at_least(f"{kind}_rank", rank, 0)
            if rank >= size:
                raise InvalidInput(f"{kind}_rank must be below {kind}_size = {size}, got {rank}; number ranks from 0")
        require_flag("use_ep", self.use_ep)
        if self.ep_size > 1 and not self.use_ep:
            raise InvalidInput(f"ep_size must be 1 without use_ep, got {self.ep_size}; pass use_ep=True")


class ZeroExperts(NamedTuple):
    """output `[M, K]`, to be added to the experts' output, and the routing that is left for them, with -1 and 0."""

    output: Any
    topk_weights: Any
    topk_ids: Any


class FinalizedNorm(NamedTuple):
    """hidden `[M, K]`, the next residual, and its norm."""

    hidden: Any
    normalized: Any


class ProblemSize(NamedTuple):
    """E local experts, M tokens (or max_num_tokens), N columns of product 1 (2F if gated), K of hidden states, topk."""

    E: int
    M: int
    N: int
    K: int
    topk: int


def moe_problem_size(
    a1: Sequence[int], w1: Sequence[int], w2: Sequence[int], topk_ids: Sequence[int], weight_layout: str
) -> ProblemSize:
    """Read sizes from shapes, N and K from output axes because sub-byte formats pack the input axes.

    a1 `[M, K]` or batched `[E, max_num_tokens, K]`, w1 `[E, N, K]`, w2 `[E, K, F]` (swapped for `in_out`), topk_ids
    `[tokens, topk]`. Raises InvalidInput for other ranks and for different numbers of experts.
    """
    if not (len(w1) == len(w2) == 3 and len(topk_ids) == 2 and len(a1) in (2, 3)):
        shapes = {"w1": (w1, (3,)), "w2": (w2, (3,)), "topk_ids": (topk_ids, (2,)), "a1": (a1, (2, 3))}
        name = next(name for name, (shape, ranks) in shapes.items() if len(shape) not in ranks)
        shape, ranks = shapes[name]
        wanted = " or ".join(map(str, ranks))
        raise InvalidInput(f"{name} must have {wanted} axes, got {tuple(shape)}; reshape it")
    require_choice("weight_layout", weight_layout, WEIGHT_LAYOUTS)
    if w2[0] != w1[0]:
        raise InvalidInput(f"w2 must have the {w1[0]} experts of w1, got {tuple(w2)}; pass the same experts")
    out_axis = 1 if weight_layout == "out_in" else 2
    if len(a1) == 3 and a1[0] != w1[0]:
        raise InvalidInput(
            f"a1 must have a block of rows for each of the {w1[0]} experts of w1, got {tuple(a1)}; pass [E, "
            "max_num_tokens, K], or [M, K] for tokens"
        )
    return ProblemSize(w1[0], a1[-2], w1[out_axis], w2[out_axis], topk_ids[1])


def number_of_ids(global_num_experts: int, num_local: int, expert_map: Any) -> int:
    """global_num_experts, or for -1 the number. Raises InvalidInput unless expert_map has as many entries."""
    known = num_local if expert_map is None else expert_map.shape[0]
    if expert_map is not None and global_num_experts not in (-1, known):
        raise InvalidInput(
            f"expert_map must have an entry for each of global_num_experts = {global_num_experts}, got {known}; pass "
            "a map of these experts alone, without a sentinel or padding"
        )
    return known if global_num_experts == -1 else global_num_experts


@dataclass(frozen=True, eq=False)
class SlotContext:
    """The tokens of the rows at an injection point: one row for each slot `s = m * topk + k`.

    hidden_states: `[M, K]`, input of the first product. layout: the slots by expert, for further grouped matmuls.
    row_weight: fp32 `[M * topk]`, factors in the second product (ones if the hidden states are weighted). activated:
    `[M * topk, F]`, input of the second product, or None.
    """

    hidden_states: Any
    layout: RaggedLayout
    row_weight: Any
    activated: Any = None
