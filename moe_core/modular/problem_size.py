"""The sizes of one fused-MoE problem, read off axes that no format packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_core.checks import require_choice
from moe_core.errors import InvalidInput
from moe_core.specs import WEIGHT_LAYOUTS


class ProblemSize(NamedTuple):
    """E local experts, M tokens (batched: max_num_tokens), N columns of the first product (2F if gated), K columns of
    the hidden states, topk."""

    E: int
    M: int
    N: int
    K: int
    topk: int


def moe_problem_size(
    a1: Sequence[int], w1: Sequence[int], w2: Sequence[int], topk_ids: Sequence[int], weight_layout: str
) -> ProblemSize:
    """From shapes: a1 `[M, K]` or batched `[E, max_num_tokens, K]`; w1 `[E, N, K]`, w2 `[E, K, F]` (`out_in`) or
    `[E, K, N]`, `[E, F, K]` (`in_out`); topk_ids `[tokens, topk]`.

    N and K are the output axes of w1 and w2: sub-byte formats pack the input axes, of weights and of a1. Raises
    InvalidInput for other ranks and for numbers of experts that differ.
    """
    if not (len(w1) == len(w2) == 3 and len(topk_ids) == 2 and len(a1) in (2, 3)):
        _refuse_ranks({"w1": (w1, (3,)), "w2": (w2, (3,)), "topk_ids": (topk_ids, (2,)), "a1": (a1, (2, 3))})
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


def _refuse_ranks(shapes: Mapping[str, tuple[Sequence[int], tuple[int, ...]]]) -> None:
    for name, (shape, ranks) in shapes.items():
        if len(shape) not in ranks:
            wanted = " or ".join(map(str, ranks))
            raise InvalidInput(f"{name} must have {wanted} axes, got {tuple(shape)}; reshape it")
