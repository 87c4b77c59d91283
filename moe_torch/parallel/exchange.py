"""The index arithmetic of `moe_core.parallel.exchange` on tensors, with equal results and the same letters."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from moe_core.parallel.header import CALLS, Header
from moe_core.parallel.placement import Placement

#: Arrays that captured CUDA graphs read; replays do not call `constants`.
_captured: set[tuple[torch.Tensor, ...]] = set()


def constants(rows: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return int32 arrays on a device, copied once: copies wait for the device, and graphs cannot capture them."""
    return kept(_constants(rows, device), device)


def kept(arrays: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.add(arrays)
    return arrays


@functools.lru_cache(maxsize=1024)
def _constants(rows: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode(False):
        return tuple(torch.tensor(row, dtype=torch.int32, device=device) for row in rows)


def placement_tables(
    placement: Placement, device: torch.device, host: tuple[int, int] | None = None
) -> tuple[torch.Tensor, ...]:
    """places and start of `PlacementTables`, on a device. host: of `tables_of_host`."""
    return kept(_placed(placement, device, host), device)


@functools.lru_cache(maxsize=256)
def _placed(placement: Placement, device: torch.device, host: tuple[int, int] | None) -> tuple[torch.Tensor, ...]:
    tables = placement.tables if host is None else placement.tables_of_host(*host)
    return _constants(tuple(tuple(table.tolist()) for table in tables[1:]), device)


def header_on_device(header: Header, layer: int, number: int, device: torch.device) -> torch.Tensor:
    """`header.of_call(layer, number)` int32 `[8]`. All layers' are copied at once, so later calls copy nothing."""
    if device.type == "cpu":
        return constants((tuple(header.of_call(layer, number)),), device)[0]
    return kept(header_rows(header, layer, device), device)[layer * CALLS + number % CALLS]


def header_rows(header: Header, layer: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """int32 `[8]` of each call of layers up to this one or more, of one array."""
    return _header_rows(header, -(-layer // 64) * 64, device)


@functools.lru_cache(maxsize=1024)
def _header_rows(header: Header, layers: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    rows = [header.of_call(layer, number) for layer in range(layers + 1) for number in range(CALLS)]
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int32, device=device).unbind()


class Places(NamedTuple):
    places: torch.Tensor
    invalid_ids: torch.Tensor


def physical_ids(
    ids: torch.Tensor,
    placement: Placement,
    *,
    first_token: Any = 0,
    token_mask: torch.Tensor | None = None,
    tables: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Places:
    """See `moe_core.parallel.exchange.physical_ids`. tables: `placement_tables` that may change before a replay."""
    has_replicas, num_experts = tables is not None or placement.has_replicas, placement.num_experts
    places, start = placement_tables(placement, ids.device) if tables is None else tables
    known = ids if token_mask is None else torch.where(token_mask[:, None], ids, -1)
    invalid = (known < -1) | (known >= num_experts)
    valid = ~invalid & (known >= 0)
    expert = torch.where(valid, known, 0).long()
    first = start[expert]
    if has_replicas:
        token = first_token + torch.arange(len(ids), device=ids.device)[:, None]
        number = (token + torch.arange(ids.shape[1], device=ids.device)) % (start[expert + 1] - first)
        first = first + number
    chosen = torch.where(valid, places[first.long()], -1)
    return Places(chosen, invalid.sum().to(torch.int32).view(1))


def owners_of(places: torch.Tensor, per_rank: int) -> torch.Tensor:
    return torch.where(places < 0, -1, places // per_rank)


def rows_that_fit(counts: torch.Tensor, receive: int, by_slot: bool) -> torch.Tensor:
    """int32 `[W, 2]`, for each home: how many of its rows fit here, and all homes' rows that do not. counts: header and
    counts int32 `[W, ...]` from each home. An owner takes the first `receive` rows."""
    rows = counts[:, len(Header._fields) :].sum(1) if by_slot else counts[:, len(Header._fields)]
    fits = torch.minimum(rows, (receive - rows.cumsum(0) + rows).clamp_(min=0))
    return torch.stack([fits, (rows - fits).sum().expand_as(fits)], 1).int()
