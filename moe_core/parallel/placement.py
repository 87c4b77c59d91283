"""The ranks of experts, and replicas: E experts, W ranks, L places of each. Id of a place: rank * L + local."""

from __future__ import annotations

import ast
import dataclasses
import functools
import heapq
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moe_core.base import INT32_LIMIT, as_integer, plan_type, set_integer
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.parallel.sharing import HOLE as HOLE
from moe_core.parallel.sharing import NodeShares, share_out
from moe_core.specs import ExpertWeights, map_arrays, named_fields


class Move(NamedTuple):
    """A copy of an expert between physical ids: `source` of the old placement, `target` of the new."""

    expert: int
    source: int
    target: int


class PlacementTables(NamedTuple):
    """A placement as int32 arrays, of sizes that moves between places do not change.

    expert_of_place `[W * L]`, -1: empty. Expert e has the physical ids places[start[e] : start[e + 1]], ascending;
    empty places come last. places `[W * L]`, start `[E + 1]`.
    """

    expert_of_place: np.ndarray
    places: np.ndarray
    start: np.ndarray


@plan_type
@dataclass(frozen=True)
class Placement:
    """The experts of each rank. The constructor and all methods raise InvalidInput for wrong arguments.

    Ranks have equally many places. An expert is on at least one rank, at most once on each (replicas).

    owners: logical ids of each rank in local order, -1: empty. version: number of changes, which ranks compare.
    """

    num_experts: int
    owners: tuple[tuple[int, ...], ...]
    version: int = 0
    #: In compiled programs, see `of_text`.
    text: str = dataclasses.field(default="", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        set_integer(self, "num_experts", 1, INT32_LIMIT)
        set_integer(self, "version", 0, INT32_LIMIT)
        owners = tuple(tuple(int(expert) for expert in rank) for rank in self.owners)
        object.__setattr__(self, "owners", owners)
        object.__setattr__(self, "text", f"{self.num_experts} {self.version} {owners}")
        lengths = sorted({len(rank) for rank in owners})
        if len(lengths) != 1 or lengths[0] == 0:
            raise InvalidInput(
                f"owners must give every rank equally many places, at least one, got {len(owners)} ranks with "
                f"{lengths} places; fill up with -1"
            )
        wrong = [expert for rank in owners for expert in rank if not HOLE <= expert < self.num_experts]
        if wrong:
            raise InvalidInput(
                f"owners must hold ids in [-1, {self.num_experts}), -1 for an empty place, got {wrong[0]}; correct it"
            )
        for number, rank in enumerate(owners):
            held = [expert for expert in rank if expert != HOLE]
            if len(set(held)) != len(held):
                raise InvalidInput(
                    f"owners must hold an expert once on a rank at most, got {list(rank)} on rank {number}; put its "
                    "replicas on other ranks"
                )
        missing = sorted(set(range(self.num_experts)) - {expert for rank in owners for expert in rank})
        if missing:
            raise InvalidInput(
                f"owners must hold each of the {self.num_experts} experts, got none of {missing[:8]}; add the missing"
            )

    @staticmethod
    def of_text(text: str) -> Placement:
        num_experts, version, owners = text.split(" ", 2)
        return Placement(int(num_experts), ast.literal_eval(owners), int(version))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Each call looks several times for what is kept by placement.
        return hash((self.num_experts, self.owners, self.version))

    @property
    def num_ranks(self) -> int:
        """W."""
        return len(self.owners)

    @property
    def per_rank(self) -> int:
        """L, the places of a rank, also empty ones."""
        return len(self.owners[0])

    @property
    def num_places(self) -> int:
        """W * L."""
        return self.num_ranks * self.per_rank

    @functools.cached_property
    def has_replicas(self) -> bool:
        return sum(expert != HOLE for rank in self.owners for expert in rank) > self.num_experts

    @functools.cached_property
    def digest(self) -> int:
        """31 bits of the owners, which ranks compare."""
        return zlib.crc32(np.array(self.owners, np.int32).tobytes()) & 0x7FFFFFFF

    @functools.cached_property
    def tables(self) -> PlacementTables:
        """The placement as arrays; do not write to them."""
        held = np.array(self.owners, np.int32).reshape(-1)
        key = np.where(held == HOLE, self.num_experts, held)
        counts = np.bincount(key, minlength=self.num_experts + 1)[: self.num_experts]
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tables = PlacementTables(held, np.argsort(key, kind="stable").astype(np.int32), start)
        for table in tables:
            table.setflags(write=False)
        return tables

    def tables_of_host(self, host: int, hosts: int) -> PlacementTables:
        """The tables of ranks on one of equal hosts of consecutive ranks: replicas elsewhere only for experts that it
        lacks. places is still `[W * L]`, with -1 behind its last."""
        held, places, _ = self.tables
        on_host = places // (self.num_places // hosts) == host
        expert = np.where(held[places] == HOLE, self.num_experts, held[places])
        here = np.bincount(expert[on_host], minlength=self.num_experts + 1) > 0
        kept = (on_host | ~here[expert]) & (expert < self.num_experts)
        counts = np.bincount(expert[kept], minlength=self.num_experts)
        chosen = np.full_like(places, HOLE)
        chosen[: kept.sum()] = places[kept]
        return PlacementTables(held, chosen, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))

    def _common(self, other: Placement) -> np.ndarray:
        """`[W, W]`: the number of experts that a rank here and a rank of `other` both have."""
        held, (_, places, start) = other.tables.expert_of_place, self.tables
        source = np.flatnonzero(held != HOLE)
        expert = held[source]
        count = np.diff(start)[expert]
        # Each place there, beside all places of its expert here.
        first = np.repeat(start[expert] - np.cumsum(count) + count, count)
        here = places[first + np.arange(count.sum())] // self.per_rank
        pairs = here * self.num_ranks + np.repeat(source // other.per_rank, count)
        return np.bincount(pairs, minlength=self.num_ranks**2).reshape(self.num_ranks, self.num_ranks)

    def places_of(self, expert: int) -> tuple[int, ...]:
        """Return the physical ids of an expert, ascending."""
        expert = as_integer("expert", expert, 0, self.num_experts)
        _, places, start = self.tables
        return tuple(places[start[expert] : start[expert + 1]].tolist())

    @functools.cached_property
    def occupied(self) -> tuple[int, ...]:
        """Places of each rank up to its last expert."""
        places = [[place + 1 for place, expert in enumerate(rank) if expert != HOLE] for rank in self.owners]
        return tuple(max(taken, default=0) for taken in places)

    def __str__(self) -> str:
        spare = self.num_places - self.num_experts
        replicas = sum(expert != HOLE for rank in self.owners for expert in rank) - self.num_experts
        extra = f", {replicas} replicas, {spare - replicas} empty" if spare else ""
        return f"{self.num_experts} experts on {self.num_ranks} ranks of {self.per_rank}{extra}, version {self.version}"

    @staticmethod
    def linear(num_experts: int, num_ranks: int) -> Placement:
        """Put consecutive experts on a rank, ceil(E / W) each, empty places last."""
        experts, ranks = _sizes(num_experts, num_ranks)
        each = -(-experts // ranks)
        ids = [expert if expert < experts else HOLE for expert in range(each * ranks)]
        return Placement(experts, tuple(tuple(ids[rank * each : (rank + 1) * each]) for rank in range(ranks)))

    @staticmethod
    def round_robin(num_experts: int, num_ranks: int) -> Placement:
        """Put expert e on rank e mod W. Last ranks may have an empty place."""
        experts, ranks = _sizes(num_experts, num_ranks)
        ids = [expert if expert < experts else HOLE for expert in range(-(-experts // ranks) * ranks)]
        return Placement(experts, tuple(tuple(ids[rank::ranks]) for rank in range(ranks)))

    @staticmethod
    def balanced(
        load: Sequence[float] | np.ndarray,
        num_ranks: int,
        per_rank: int,
        *,
        nodes: int = 1,
        max_replicas: int | None = None,
    ) -> Placement:
        """Share a load out equally. Spare places hold replicas of the hottest experts. Deterministic.

        Args:
            load: `[E]`, work of each expert, such as tokens_per_expert of past calls. Replicas take equal parts.
            num_ranks: W.
            per_rank: L.
            nodes: of consecutive ranks. An expert's replicas stay on one node.
            max_replicas: the most places of an expert. None: one on each rank of a node. Training needs 1.
        """
        loads = _loads(load)
        experts, ranks = _sizes(loads.size, num_ranks)
        per_rank, nodes = as_integer("per_rank", per_rank, 1, INT32_LIMIT), _nodes(nodes, ranks)
        if ranks * per_rank < experts:
            raise InvalidInput(
                f"per_rank must be at least {-(-experts // ranks)} for {experts} experts on {ranks} ranks, got "
                f"{per_rank}; raise it"
            )
        in_node = ranks // nodes
        most = in_node if max_replicas is None else min(in_node, as_integer("max_replicas", max_replicas, 1))
        if not loads.any():
            loads = np.ones(experts)
        owners: list[tuple[int, ...]] = []
        for group in share_out(loads, nodes):
            places = in_node * per_rank
            copies = dict.fromkeys(group, 1)
            hottest = [(-loads[expert], expert) for expert in group] if most > 1 else []
            heapq.heapify(hottest)
            for _ in range(places - len(group)):
                if not hottest:
                    break
                expert = heapq.heappop(hottest)[1]
                copies[expert] += 1
                if copies[expert] < most:
                    heapq.heappush(hottest, (-loads[expert] / copies[expert], expert))
            owners += NodeShares(loads, copies, in_node, per_rank).owners()
        return Placement(experts, tuple(owners))

    def balancedness(self, load: Sequence[float] | np.ndarray) -> float:
        """Return the mean over the maximum of the ranks' work, in (0, 1], 1 without work. load: as for `balanced`."""
        loads = _loads(load)
        if len(loads) != self.num_experts:
            raise InvalidInput(f"load must be of the {self.num_experts} experts, got {len(loads)} numbers; pass all")
        held, _, start = self.tables
        part = np.where(held == HOLE, 0.0, (loads / np.diff(start))[held])
        ranks = part.reshape(self.num_ranks, -1).sum(axis=1)
        return float(ranks.mean() / ranks.max()) if ranks.any() else 1.0

    def near(self, previous: Placement, *, nodes: int = 1) -> Placement:
        """Return the next version: these groups of experts, on ranks and places that need few moves from `previous`.

        Ranks of a node take, in turn, the group they already have most of. Experts that stay keep their place.
        previous: equally many experts and ranks, at most as many places; returned if nothing moves.
        """
        sizes = [(one.num_experts, one.num_ranks) for one in (self, previous)]
        if sizes[0] != sizes[1] or previous.per_rank > self.per_rank:
            raise InvalidInput(
                f"previous must have {self.num_experts} experts, {self.num_ranks} ranks and at most {self.per_rank} "
                f"places on each, got {previous}; make both for the same ranks"
            )
        each = self.num_ranks // _nodes(nodes, self.num_ranks)
        held = [set(rank) - {HOLE} for rank in previous.owners]
        taken = [set(rank) - {HOLE} for rank in self.owners]
        common = previous._common(self)
        ranks = np.arange(self.num_ranks)
        pairs = np.argwhere((common > 0) & (ranks[:, None] // each == ranks // each))
        order = np.argsort(-common[tuple(pairs.T)], kind="stable")
        chosen: dict[int, int] = {}
        granted: set[int] = set()
        for rank, other in pairs[order].tolist():
            if rank not in chosen and other not in granted:
                chosen[rank] = other
                granted.add(other)
        # Ranks with nothing in common with groups that are left.
        for node in range(0, self.num_ranks, each):
            left = iter([other for other in range(node, node + each) if other not in granted])
            chosen |= {rank: next(left) for rank in range(node, node + each) if rank not in chosen}
        # In turn may be worse than no swap.
        same = {rank: rank for rank in chosen}
        kept = [sum(common[rank, way[rank]] for rank in way) for way in (chosen, same)]
        chosen = chosen if kept[0] > kept[1] else same
        owners = []
        for rank in range(self.num_ranks):
            new = taken[chosen[rank]]
            places = [expert if expert in new else HOLE for expert in previous.owners[rank]]
            places += [HOLE] * (self.per_rank - len(places))
            coming = iter(sorted(new - held[rank]))
            owners.append(tuple(next(coming, HOLE) if expert == HOLE else expert for expert in places))
        if tuple(owners) == previous.owners:
            return previous
        return Placement(self.num_experts, tuple(owners), previous.version + 1)

    def moved(self, other: Placement) -> tuple[Move, ...]:
        """Return the copies that turn this placement into `other`, of equal sizes, by target.

        The source is on the target's rank if possible, else one of the expert's places, in turn.
        """
        sizes = [(placement.num_experts, placement.num_ranks, placement.per_rank) for placement in (self, other)]
        if sizes[0] != sizes[1]:
            raise InvalidInput(
                f"other must have {sizes[0]} experts, ranks and places per rank, got {sizes[1]}; weights that move to "
                "other numbers of ranks are saved and loaded"
            )
        moves: list[Move] = []
        used = np.zeros(self.num_experts, np.int64)
        before, after = self.tables.expert_of_place, other.tables.expert_of_place
        # A rank has an expert once at most.
        at = {(expert, place // self.per_rank): place for place, expert in enumerate(before.tolist())}
        for target in np.flatnonzero((before != after) & (after != HOLE)).tolist():
            expert = int(after[target])
            source = at.get((expert, target // self.per_rank))
            if source is None:
                _, places, start = self.tables
                first, count = int(start[expert]), int(start[expert + 1] - start[expert])
                source = int(places[first + used[expert] % count])
                used[expert] += 1
            moves.append(Move(expert, source, target))
        return tuple(moves)


def _sizes(num_experts: int, num_ranks: int) -> tuple[int, int]:
    return as_integer("num_experts", num_experts, 1, INT32_LIMIT), as_integer("num_ranks", num_ranks, 1, INT32_LIMIT)


def _loads(load: Sequence[float] | np.ndarray) -> np.ndarray:
    loads = np.asarray(load, np.float64)
    if loads.ndim != 1 or not loads.size or not np.isfinite(loads).all() or (loads < 0).any():
        raise InvalidInput(
            f"load must be [num_experts] of finite numbers of at least 0, got {load!r}; pass counts per expert"
        )
    return loads


def _nodes(nodes: int, num_ranks: int) -> int:
    nodes = as_integer("nodes", nodes, 1)
    if num_ranks % nodes:
        raise InvalidInput(f"nodes must divide num_ranks = {num_ranks}, got {nodes}; choose a divisor")
    return nodes


_WHOLE = ("layer_index", "gate_up_input_scale", "down_input_scale")


def shard_experts(experts: ExpertWeights, placement: Placement) -> tuple[ExpertWeights, ...]:
    """Return the experts of each rank, `[L, ...]`, from all, `[E, ...]`. Empty places hold NaN, if the dtype has it."""
    axis = 0 if experts.layer_index is None else 1
    shards = []
    for owners in placement.owners:
        holes = np.array(owners) == HOLE

        def take(array: np.ndarray, owners: tuple[int, ...] = owners, holes: np.ndarray = holes) -> np.ndarray:
            if array.shape[axis] != placement.num_experts:
                raise InvalidInput(
                    f"experts must hold the placement's {placement.num_experts} experts, got {array.shape}; pass all"
                )
            part = np.take(array, np.maximum(owners, 0), axis)
            if np.issubdtype(part.dtype, np.inexact) or part.dtype.name == "bfloat16":
                part[(slice(None),) * axis + (holes,)] = np.nan
            return part

        parts = {
            name: map_arrays(array, take) if isinstance(array, QuantizedTensor) else take(array)
            for name, array in named_fields(experts)
            if name not in _WHOLE
        }
        shards.append(dataclasses.replace(experts, **parts))
    return tuple(shards)


def gather_experts(parts: Sequence[Any], placement: Placement, axis: int = 0) -> np.ndarray:
    """Join each rank's experts `[L, ...]`, with the first place of replicas."""
    by_place = np.concatenate(parts, axis)
    _, places, start = placement.tables
    return np.take(by_place, places[start[:-1]], axis)
