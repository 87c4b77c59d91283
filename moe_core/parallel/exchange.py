"""Places of experts and their ranks, in NumPy. Letters: T tokens of a rank, K top-k, W ranks, L places per rank."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from moe_core.parallel.placement import Placement, PlacementTables


class Places(NamedTuple):
    """places int32 `[T, K]`: physical ids, -1: no expert. invalid_ids int32 `[1]`: ids outside [-1, E)."""

    places: np.ndarray
    invalid_ids: np.ndarray


def physical_ids(
    ids: np.ndarray,
    placement: Placement,
    *,
    first_token: int = 0,
    token_mask: np.ndarray | None = None,
    tables: PlacementTables | None = None,
) -> Places:
    """Return the place of every slot, from ids int32 `[T, K]`. tables: None: of the placement.

    A slot of an expert with n places goes to number (t + k) mod n. t counts all ranks' tokens from first_token on, so
    the split into ranks does not matter. token_mask bool `[T]`: slots of False tokens have no place.
    """
    _, places, start = placement.tables if tables is None else tables
    known = ids if token_mask is None else np.where(token_mask[:, None], ids, -1)
    invalid = (known < -1) | (known >= placement.num_experts)
    valid = ~invalid & (known >= 0)
    expert = np.where(valid, known, 0).astype(np.int64)
    token = np.arange(first_token, first_token + len(ids))[:, None]
    replica = (token + np.arange(ids.shape[1])) % (start[expert + 1] - start[expert])
    chosen = np.where(valid, places[start[expert] + replica], -1).astype(np.int32)
    return Places(chosen, np.array([invalid.sum()], np.int32))


def owners_of(places: np.ndarray, per_rank: int) -> np.ndarray:
    return np.where(places < 0, -1, places // per_rank).astype(np.int32)


@functools.lru_cache(maxsize=256)
def levels_of(placement: Placement, hosts: int) -> tuple[Placement, Placement]:
    """Places of all ranks on hosts, and places of a host on its ranks."""
    places, each = placement.num_places, placement.num_places // hosts
    return Placement.linear(places, hosts), Placement.linear(each, placement.num_ranks // hosts)


def first_rows(runs: np.ndarray, most: int) -> np.ndarray:
    """Return runs int32 `[W, L]` cut behind the first `most` rows."""
    flat = runs.reshape(-1).astype(np.int64)
    start = np.cumsum(flat) - flat
    return np.clip(most - start, 0, flat).reshape(runs.shape).astype(np.int32)
