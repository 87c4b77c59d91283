"""Placements of experts on ranks, for tests of expert parallelism."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moe_core.parallel import Placement

#: Names of `placement_of`.
PLACEMENTS = ("linear", "round_robin", "balanced", "replicas")


def placement_of(kind: str, num_experts: int, num_ranks: int, seed: int = 0) -> Placement:
    """A placement by name; `balanced` has no replicas, `replicas` has a spare place on each rank, or two."""
    if kind in ("linear", "round_robin"):
        return getattr(Placement, kind)(num_experts, num_ranks)
    load = np.random.default_rng(seed).integers(0, 50, num_experts)
    each = -(-num_experts // num_ranks)
    if kind == "balanced":
        return Placement.balanced(load, num_ranks, each, max_replicas=1)
    return Placement.balanced(load, num_ranks, each + 1 + seed % 2)


@st.composite
def placements(draw: st.DrawFn, kinds: tuple[str, ...] = PLACEMENTS, most_ranks: int = 4) -> Placement:
    """W from 1 on, E smaller than W, a multiple of it or not."""
    ranks, experts = draw(st.integers(1, most_ranks)), draw(st.integers(1, 9))
    return placement_of(draw(st.sampled_from(kinds)), experts, ranks, draw(st.integers(0, 99)))
