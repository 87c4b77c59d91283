"""Routes of rows between all ranks, in every mode (part of the twin).

With hosts, a *gateway* is the rank of another host with the home's number on its own. A token crosses to a host's
gateway once, which passes it on to the owners there. Results of slots come home the same way, one row for each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moe_core.parallel.bounds import Bounds, bounds_of
from moe_core.parallel.exchange import levels_of
from moe_core.parallel.placement import Placement, PlacementTables
from moe_core.parallel.spec import ExchangeSpec, ranks_of_host
from tests.support.parallel.twin.arithmetic import (
    destinations,
    first_owners,
    owners_of,
    received_ids,
    require_equal_tokens,
    returned_rows,
    run_starts,
    sends,
    slot_rows,
    token_ids,
    token_rows,
)


class Arrivals(NamedTuple):
    """Rows that a home sends, int32: owner, token, slot (-1: the whole token), and the row there."""

    owner: np.ndarray
    token: np.ndarray
    slot: np.ndarray
    row: np.ndarray

    def to(self, owner: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mine = self.owner == owner
        return self.row[mine], self.token[mine], self.slot[mine]


class Home(NamedTuple):
    """Routes of a rank's rows by places `[T, K]`. back `[T, K]`: where a slot's result arrives, of back_rows. begins
    `[W]`: where each owner's begin. lost bool `[T, K]`: slots that did not fit. overflow: rows that did not fit.
    """

    places: np.ndarray
    arrivals: Arrivals
    back: np.ndarray
    back_rows: int
    begins: np.ndarray
    lost: np.ndarray
    overflow: int


def make_routes(places: Sequence[np.ndarray], placement: Placement, spec: ExchangeSpec) -> Routes:
    """Make the routes of all ranks from places int32 `[T, K]` of each. Raises InvalidInput."""
    num_ranks, per_rank = placement.num_ranks, placement.per_rank
    tokens = [len(rank_places) for rank_places in places]
    static = spec.mode in ("all_gather", "padded")
    bounds = bounds_of(spec, require_equal_tokens(tokens, spec.mode) if static else 0, places[0].shape[1], placement)
    by_slot = spec.rows == "slots"
    groups = [rank_places if by_slot else first_owners(rank_places, per_rank) for rank_places in places]
    sent = [sends(rank_places, placement.num_places if by_slot else num_ranks) for rank_places in groups]
    counts = np.stack([layout.group_sizes for layout in sent])
    order = "padded" if static else "expert" if spec.mode == "peer" else "source"
    starts = run_starts(counts, order, bounds.block or 0)
    homes = []
    for number, rank_places in enumerate(places):
        owners = owners_of(rank_places, per_rank)
        end = bounds.receive if bounds.block is None else bounds.block * (number + 1)
        targets = destinations(sent[number], groups[number], starts[number], end)
        token, k = np.nonzero(targets.row >= 0)
        slot = token * rank_places.shape[1] + k if by_slot else np.full(len(token), -1)
        arrivals = Arrivals(owners[token, k], token, slot, targets.row[token, k])
        kept = targets.row if by_slot else slot_rows(token_rows(targets.row, owners, num_ranks), owners)
        if spec.mode == "all_gather":
            owner, token = np.divmod(np.arange(num_ranks * tokens[number]), max(tokens[number], 1))
            arrivals = Arrivals(owner, token, np.full(len(owner), -1), number * tokens[number] + token)
            kept = owners
        homes.append(_coming_back(rank_places, arrivals, kept, int(targets.overflow[0]), bounds, spec, placement))
    sources = tuple(_sources(counts, owner, order, bounds) for owner in range(num_ranks))
    return Routes(spec, placement, bounds, tuple(homes), counts, sources)


def _sources(counts: np.ndarray, owner: int, order: str, bounds: Bounds) -> np.ndarray:
    if bounds.block is not None:
        return np.repeat(np.arange(len(counts)), bounds.block)
    each = counts.shape[1] // len(counts)
    runs = counts[:, owner * each : (owner + 1) * each]
    homes = np.broadcast_to(np.arange(len(counts))[:, None], runs.shape)
    if order == "expert":
        runs, homes = runs.T, homes.T
    return np.repeat(homes.reshape(-1), runs.reshape(-1))[: bounds.receive]


def _coming_back(
    places: np.ndarray,
    arrivals: Arrivals,
    kept: np.ndarray,
    overflow: int,
    bounds: Bounds,
    spec: ExchangeSpec,
    placement: Placement,
) -> Home:
    num_ranks, by_slot = placement.num_ranks, spec.rows == "slots"
    lost = (places >= 0) & (kept < 0)
    arrived = np.where(kept < 0, -1, places)
    owners = owners_of(arrived, placement.per_rank)
    groups = arrived if by_slot else owners
    sent = sends(groups, placement.num_places if by_slot else num_ranks)
    returned = returned_rows(sent, groups, num_ranks, bounds.back)
    begins, rows, back = sent.group_start[:-1].reshape(num_ranks, -1)[:, 0], int(sent.group_start[-1]), returned.row
    if bounds.back is not None:
        begins, rows = bounds.back * np.arange(num_ranks), bounds.back * num_ranks
    lost |= (arrived >= 0) & (back < 0)
    return Home(places, arrivals, back, rows, begins, lost, overflow + int(returned.overflow[0]))


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of all ranks. counts int32 `[W, G]`: rows that homes send. sources: homes of each owner's rows."""

    spec: ExchangeSpec
    placement: Placement
    bounds: Bounds
    homes: tuple[Home, ...]
    counts: np.ndarray
    sources: tuple[np.ndarray, ...]

    @property
    def lost(self) -> tuple[np.ndarray, ...]:
        return tuple(home.lost for home in self.homes)

    @property
    def overflow(self) -> np.ndarray:
        return np.array([sum(home.overflow for home in self.homes)], np.int32)

    def push(self, owner: int, values: Sequence[np.ndarray]) -> np.ndarray:
        """Rows that an owner receives, of every home's tokens `[T, D]`."""
        buffer = np.full((len(self.sources[owner]), values[0].shape[1]), np.nan, values[0].dtype)
        written = np.zeros(len(buffer), bool)
        for home, rows in zip(self.homes, values, strict=True):
            row, token, _ = home.arrivals.to(owner)
            assert not written[row].any(), "two rows go to one place"
            buffer[row], written[row] = rows[token], True
        return buffer

    @functools.cached_property
    def ids(self) -> tuple[np.ndarray, ...]:
        """Local ids int32 of each rank's rows: `[R, K]`, of slots `[R, 1]`."""
        return tuple(self._ids(owner) for owner in range(self.placement.num_ranks))

    def _ids(self, owner: int) -> np.ndarray:
        per_rank, by_slot = self.placement.per_rank, self.spec.rows == "slots"
        width = 1 if by_slot else self.homes[0].places.shape[1]
        ids = np.full((len(self.sources[owner]), width), -1, np.int32)
        for home in self.homes:
            row, token, slot = home.arrivals.to(owner)
            if by_slot:
                ids[row, 0] = home.places.reshape(-1)[slot] - owner * per_rank
            else:
                ids[row] = token_ids(home.places, token, owner, per_rank)
        if by_slot and self.bounds.block is None:
            order = "expert" if self.spec.mode == "peer" else "source"
            runs = self.counts[:, owner * per_rank : (owner + 1) * per_rank]
            assert (ids[:, 0] == received_ids(runs, order)[: len(ids)]).all(), "counts tell what comes"
        return ids

    def push_weights(self, owner: int, weights: Sequence[np.ndarray]) -> np.ndarray:
        received = np.full(self.ids[owner].shape, np.nan, np.float32)
        for home, of_home in zip(self.homes, weights, strict=True):
            row, token, slot = home.arrivals.to(owner)
            received[row] = of_home.reshape(-1, 1)[slot] if self.spec.rows == "slots" else of_home[token]
        return received

    def pull(self, home: int, results: Sequence[np.ndarray]) -> np.ndarray:
        """Rows `[*, N]` that come home, of every owner's results by slot."""
        receiver = self.homes[home]
        buffer = np.full((receiver.back_rows, results[0].shape[1]), np.nan, results[0].dtype)
        for owner, values in enumerate(results):
            mine = self.sources[owner] == home
            valid = (self.ids[owner] >= 0) & mine[:, None]
            rows = np.flatnonzero(valid.reshape(-1))[: self.bounds.back]
            buffer[receiver.begins[owner] : receiver.begins[owner] + len(rows)] = values[rows]
        return buffer

    def pull_weights(self, home: int, results: Sequence[np.ndarray]) -> np.ndarray:
        return weights_at_home(self, home, results)


def weights_at_home(routes: Any, home: int, results: Sequence[np.ndarray]) -> np.ndarray:
    """Owners' gradients of weights at home, fp32 `[T, K]`, 0 without a row."""
    rows = routes.homes[home].back
    came = routes.pull(home, [values.reshape(-1, 1) for values in results])
    returned = np.zeros(rows.shape, came.dtype)
    returned[rows >= 0] = came[rows[rows >= 0], 0]
    return returned


def host_tables(placement: Placement, spec: ExchangeSpec, rank: int) -> PlacementTables:
    """Tables of a rank's slots, which prefer replicas on its host."""
    return placement.tables_of_host(rank // ranks_of_host(spec, placement.num_ranks), spec.hosts)


def make_host_routes(places: Sequence[np.ndarray], placement: Placement, spec: ExchangeSpec) -> HostRoutes:
    """Make the routes of all ranks from places int32 `[T, K]` of each. Raises InvalidInput."""
    each, (between, inside) = ranks_of_host(spec, placement.num_ranks), levels_of(placement, spec.hosts)
    rails = [make_routes(places[local::each], between, ExchangeSpec()) for local in range(each)]
    hosts = [make_routes([rail.ids[host] for rail in rails], inside, ExchangeSpec()) for host in range(spec.hosts)]
    return HostRoutes(tuple(rails), tuple(hosts))


@dataclass(frozen=True, eq=False)
class HostRoutes:
    """rails: between hosts, of ranks with one number on theirs. hosts: inside each."""

    rails: tuple[Routes, ...]
    hosts: tuple[Routes, ...]

    @functools.cached_property
    def homes(self) -> tuple[Home, ...]:
        return tuple(rail.homes[host] for host in range(len(self.hosts)) for rail in self.rails)

    @functools.cached_property
    def order(self) -> tuple[np.ndarray, ...]:
        """The arrived rows of each owner in the order of homes, as in one exchange."""
        each, orders = len(self.rails), []
        for owner in range(len(self.homes)):
            host, local = divmod(owner, each)
            homes = [rail.sources[host][:, None] * float(each) + number for number, rail in enumerate(self.rails)]
            orders.append(np.argsort(self.hosts[host].push(local, homes)[:, 0], kind="stable"))
        return tuple(orders)

    @functools.cached_property
    def ids(self) -> tuple[np.ndarray, ...]:
        of_hosts = [ids for routes in self.hosts for ids in routes.ids]
        return tuple(ids[order] for ids, order in zip(of_hosts, self.order, strict=True))

    @property
    def lost(self) -> tuple[np.ndarray, ...]:
        return tuple(home.lost for home in self.homes)

    @property
    def overflow(self) -> np.ndarray:
        return np.zeros(1, np.int32)

    def push(self, owner: int, values: Sequence[np.ndarray]) -> np.ndarray:
        host, local = divmod(owner, len(self.rails))
        passed = [rail.push(host, values[number :: len(self.rails)]) for number, rail in enumerate(self.rails)]
        return self.hosts[host].push(local, passed)[self.order[owner]]

    def push_weights(self, owner: int, weights: Sequence[np.ndarray]) -> np.ndarray:
        return self.push(owner, weights)

    def pull(self, home: int, results: Sequence[np.ndarray]) -> np.ndarray:
        host, local = divmod(home, len(self.rails))
        rail, arrived = self.rails[local], [self._as_arrived(owner, values) for owner, values in enumerate(results)]
        passed = []
        for gateway, routes in enumerate(self.hosts):
            first, back = gateway * len(self.rails), routes.homes[local].back.reshape(-1)
            came = routes.pull(local, arrived[first : first + len(self.rails)])
            rows = np.full((back.size, came.shape[1]), np.nan, came.dtype)
            rows[back >= 0] = came[back[back >= 0]]
            passed.append(rows)
        return rail.pull(host, passed)

    def _as_arrived(self, owner: int, values: np.ndarray) -> np.ndarray:
        """Rows of slots `[R * K, N]` in the order in which tokens arrived."""
        rows = np.empty_like(values)
        grouped, order = values.reshape(*self.ids[owner].shape, values.shape[1]), self.order[owner]
        rows.reshape(grouped.shape)[order] = grouped
        return rows

    def pull_weights(self, home: int, results: Sequence[np.ndarray]) -> np.ndarray:
        return weights_at_home(self, home, results)
