"""Shares of tokens and slots that ranks get: of uniform routing, of a law, and of routed ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moe_core.base.checks import as_integer, finite_float
from moe_core.errors import InvalidInput
from moe_core.layers.spec import MoELayerSpec
from moe_core.parallel.exchange import owners_of, physical_ids
from moe_core.parallel.placement import Placement

#: Tokens drawn from a law.
DRAWN = 8192


@dataclass(frozen=True)
class Zipf:
    """A law of routing: expert r has probability proportional to r^-exponent, in an order that the seed draws."""

    exponent: float
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "exponent", finite_float("exponent", self.exponent))
        object.__setattr__(self, "seed", as_integer("seed", self.seed, 0))
        if self.exponent < 0:
            raise InvalidInput(f"exponent must be at least 0, got {self.exponent}; 0 is uniform")

    def ids(self, tokens: int, top_k: int, num_experts: int, groups: tuple[int, int] = (1, 1)) -> np.ndarray:
        """Draw ids int32 `[T, K]`, the same for equal arguments. groups: their number, and how many a token may choose
        from, those with its best experts."""
        random = np.random.default_rng(self.seed)
        share = random.permutation(np.arange(1, num_experts + 1) ** -self.exponent)
        # Gumbel's trick: the largest noisy logarithms, without replacement.
        scores = np.log(share) + random.gumbel(size=(tokens, num_experts))
        number, chosen = groups
        if chosen < number:
            best = np.argpartition(-scores.reshape(tokens, number, -1).max(axis=2), chosen - 1, axis=1)[:, :chosen]
            allowed = np.zeros((tokens, number), bool)
            np.put_along_axis(allowed, best, True, axis=1)
            scores = np.where(np.repeat(allowed, num_experts // number, axis=1), scores, -np.inf)
        return np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k].astype(np.int32)

    def load(self, top_k: int, num_experts: int) -> np.ndarray:
        """Return counts int64 `[E]` of the ids of `simulate`, for `Placement.balanced`."""
        return np.bincount(self.ids(DRAWN, top_k, num_experts).reshape(-1), minlength=num_experts)


class Traffic(NamedTuple):
    """Shares, fp64: `[W]` of tokens that visit a rank, of slots that it computes, of tokens that visit a domain."""

    tokens: np.ndarray
    slots: np.ndarray
    hosts: np.ndarray


def even_traffic(layer: MoELayerSpec, ranks: int, share: float, domain: int) -> Traffic:
    """Uniform routing to experts in order; with group limits drawn. share: slots of rank 0 over the mean."""
    slots = np.full(ranks, (1 - share / ranks) / max(ranks - 1, 1))
    slots[0] = share / ranks
    first = np.arange(0, ranks, domain)
    members, E, K = np.diff(first, append=ranks), layer.num_experts, layer.top_k
    groups = layer.router.num_groups, layer.router.topk_group
    if groups[1] < groups[0]:
        drawn = traffic_of(Zipf(0.0).ids(DRAWN, K, E, groups), Placement.linear(E, ranks), domain)
        rank, hosts = drawn.tokens.mean(), np.full(len(first), drawn.hosts.mean())
    else:
        # One minus the probability that none of K distinct experts is there.
        held = E / ranks * np.array([1, *members])
        rank, *hosts = 1 - np.prod([np.maximum(0.0, E - held - i) / (E - i) for i in range(K)], axis=0)
    hosts = np.add.reduceat(slots, first) * ranks / members * np.array(hosts)
    return Traffic(np.minimum(1.0, slots * ranks * rank), slots, np.minimum(1.0, hosts))


def traffic_of(ids: np.ndarray, placement: Placement, domain: int = 1) -> Traffic:
    """Return the shares of a routing of ids int32 `[T, K]`. Replicas take equal parts."""
    ranks, (held, _, start) = placement.num_ranks, placement.tables
    load = np.bincount(ids[ids >= 0], minlength=placement.num_experts) / max(int((ids >= 0).sum()), 1)
    part = np.where(held < 0, 0.0, (load / np.diff(start))[np.maximum(held, 0)])
    slots = part.reshape(ranks, -1).sum(axis=1)
    owners = owners_of(physical_ids(ids, placement).places, placement.per_rank)
    tokens, k = np.nonzero(owners >= 0)
    visited = np.zeros((len(ids), ranks), bool)
    visited[tokens, owners[tokens, k]] = True
    visits, sent = visited.sum(axis=0), np.bincount(owners[tokens, k], minlength=ranks)
    once = np.where(sent > 0, visits / np.maximum(sent, 1), 1.0)
    hosts = np.logical_or.reduceat(visited, np.arange(0, ranks, domain), axis=1).mean(axis=0) if len(ids) else slots[:0]
    return Traffic(slots * len(tokens) / max(len(ids), 1) * once, slots, hosts)
