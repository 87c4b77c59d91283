"""NumPy twins of an exchange's send and receive tables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moe_core.ops.exchange.operands import ReceiveOperands, SendOperands, record_of
from moe_core.specs.exchange import TableSpec


def send_tables(arrays: Mapping[str, np.ndarray], *, spec: TableSpec, rank: int) -> tuple[np.ndarray, ...]:
    """`plan_send_tables`. Unused rows of `table` are 0."""
    ids, weights, places_of_experts, start, header, token_mask, tokens, limits = record_of(SendOperands, arrays)
    num_tokens, top_k = ids.shape
    known = ids if token_mask is None else np.where(token_mask[:, None], ids, -1)
    invalid = (known < -1) | (known >= spec.num_experts)
    expert = np.where(invalid | (known < 0), 0, known)
    replica = np.zeros(ids.shape, np.int64)
    if tokens is not None:
        first = tokens[:rank].astype(np.int64).sum()
        number = first + np.arange(num_tokens)[:, None] + np.arange(top_k)
        replica = number % np.maximum(start[expert + 1] - start[expert], 1)
    places = np.where(invalid | (known < 0), -1, places_of_experts[start[expert] + replica]).astype(np.int32)
    per_expert = np.bincount(known[places >= 0], minlength=spec.num_experts).astype(np.int32)
    owner = np.where(places < 0, -1, places // spec.per_rank)
    groups = places if spec.by_slot else _first_owners(owner)
    number, sizes = _numbers(groups, owner, spec.num_ranks)
    result, by_owner = number, sizes
    if not spec.by_slot:
        result, by_owner = _numbers(owner, owner, spec.num_ranks)
        row_of = np.full((num_tokens, spec.num_ranks + 1), -1)
        token, k = np.nonzero(groups >= 0)
        row_of[token, owner[token, k]] = number[token, k]
        number = np.take_along_axis(row_of, owner, axis=1)
    kept = np.full(spec.num_ranks, np.iinfo(np.int32).max)
    if spec.mode == "padded":
        kept[:] = spec.block
    if limits is not None:
        kept = limits[0]
    arrives = (owner >= 0) & (number < kept[owner]) if spec.mode != "all_gather" else owner >= 0
    arrived = np.bincount(owner[arrives], minlength=spec.num_ranks)
    fits = arrives & (result < (np.iinfo(np.int32).max if spec.back is None else spec.back))
    went = np.minimum(sizes, kept)
    if spec.back is not None:
        begin = spec.back_rows * np.arange(spec.num_ranks)
    elif limits is not None and not spec.by_slot:
        begin = limits[1]
    else:
        begin = np.cumsum(arrived) - arrived
        if spec.own_first:
            begin = begin + np.where(np.arange(len(arrived)) < rank, arrived[rank], 0)
            begin[rank] = 0
    row_of_slot = np.where(fits, begin[owner] + result, -1).astype(np.int32).reshape(-1)
    lost = ((places >= 0) & ~fits).any(axis=1)
    counted = arrived
    if spec.back is not None:
        counted = np.maximum(arrived - spec.back, 0)
        if spec.mode == "padded":
            counted += sizes - went
    results = [places, np.array([invalid.sum()], np.int32), per_expert]
    results += [row_of_slot, lost, counted.astype(np.int32)]
    bits = weights.view(np.int32)
    if spec.mode == "all_gather":
        message = np.concatenate([header, np.concatenate([places, bits], axis=1).reshape(-1)])
        return (*results, message.astype(np.int32))
    payload = np.concatenate([places, bits], axis=1)
    if spec.by_slot:
        payload = np.stack([places.reshape(-1), bits.reshape(-1)], axis=1)
    slots = np.flatnonzero((groups >= 0) & arrives)
    of_slot, number = owner.reshape(-1)[slots], number.reshape(-1)[slots]
    read = slots if spec.by_slot else slots // top_k
    if spec.mode == "padded":
        message = np.full((spec.num_ranks, len(header) + spec.block_rows * payload.shape[1]), -1, np.int32)
        message[:, : len(header)] = header
        slot_of_row = np.full(spec.num_ranks * spec.block_rows, -1, np.int32)
        slot_of_row[of_slot * spec.block_rows + number] = slots
        blocks = message[:, len(header) :].reshape(spec.num_ranks, spec.block_rows, -1)
        blocks[of_slot, number] = payload[read]
        message[:, len(header) :] = blocks.reshape(spec.num_ranks, -1)
        return (*results, message, slot_of_row)
    rows = (np.cumsum(went) - went)[of_slot] + number
    counts = np.bincount(places[places >= 0], minlength=spec.num_places).reshape(spec.num_ranks, -1)
    if not spec.by_slot:
        counts = np.stack([sizes, by_owner], axis=1)
    heads = np.broadcast_to(header, (spec.num_ranks, len(header)))
    message = np.concatenate([heads, counts], axis=1).astype(np.int32)
    most = num_tokens * (top_k if spec.by_slot else min(top_k, spec.num_ranks))
    slot_of_row, table = np.full(most, -1, np.int32), np.zeros((most, spec.width(top_k)), np.int32)
    slot_of_row[rows], table[rows] = slots, payload[read][:, -table.shape[1] :]
    return (*results, message, slot_of_row, table)


def _first_owners(owner: np.ndarray) -> np.ndarray:
    """-1 where an earlier slot of the token has the same owner."""
    first = owner.copy()
    for k in range(1, owner.shape[1]):
        first[(owner[:, :k] == owner[:, k : k + 1]).any(axis=1), k] = -1
    return first


def _numbers(groups: np.ndarray, owner: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    slots = np.flatnonzero(groups >= 0)
    slots = slots[np.argsort(groups.reshape(-1)[slots], kind="stable")]
    of_slot = owner.reshape(-1)[slots]
    sizes = np.bincount(of_slot, minlength=num_ranks)
    number = np.full(groups.size, -1, np.int64)
    number[slots] = np.arange(len(slots)) - (np.cumsum(sizes) - sizes)[of_slot]
    return number.reshape(groups.shape), sizes


def receive_tables(
    arrays: Mapping[str, np.ndarray], *, spec: TableSpec, rank: int, top_k: int, num_rows: int, num_tokens: int
) -> tuple[np.ndarray, ...]:
    came, header, lost, counts, results_memory = record_of(ReceiveOperands, arrays)
    behind = 0 if header is None else len(header)
    width = spec.width(top_k) // 2
    table = came[:, behind:].reshape(-1, 2, width)
    ids = table[:, 0] - rank * spec.per_rank
    here = (table[:, 0] >= 0) & (ids >= 0) & (ids < spec.per_rank)
    if counts is not None:
        here[counts[:, -2].sum() :] = False
    ids = np.where(here, ids, -1).astype(np.int32)
    weights = np.where(ids < 0, np.float32(0), np.ascontiguousarray(table[:, 1]).view(np.float32))
    results: list[np.ndarray]
    if spec.by_slot:
        results = [ids, weights]
    else:
        sources = 1 if header is None else len(came)
        each = num_rows // sources
        most = each if spec.back is None else min(each, spec.back)
        slot_of_row = np.full((sources, each), -1, np.int32)
        by_source = ids.reshape(sources, -1)
        for source in range(sources):
            slots = np.flatnonzero(by_source[source] >= 0)[:most]
            slot_of_row[source, : len(slots)] = source * by_source.shape[1] + slots
        slot_of_row = slot_of_row.reshape(-1)
        placed = slot_of_row >= 0
        own_ids, own_weights = np.full((num_rows, 1), -1, np.int32), np.zeros((num_rows, 1), np.float32)
        own_ids[placed, 0] = ids.reshape(-1)[slot_of_row[placed]]
        own_weights[placed, 0] = weights.reshape(-1)[slot_of_row[placed]]
        results = [own_ids, own_weights, slot_of_row]
    if results_memory is not None:
        assert counts is not None, "rows of blocks are not counted"
        return _addressed(ids, weights, results[2], counts[:, -1], rank, results_memory)
    if header is not None:
        agree = bool((came[:, :behind] == header).all())
        spoilt = np.full(num_tokens, not agree)
        results.append(spoilt if lost is None else spoilt | lost)
    return tuple(results)


def _addressed(
    ids: np.ndarray, weights: np.ndarray, slots: np.ndarray, counts: np.ndarray, rank: int, memory: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Tables of rows as they came. slots: in order, -1 behind the last."""
    placed, first = slots[slots >= 0], counts[:rank].sum()
    own = placed[first : first + counts[rank]]
    ordered = np.concatenate([placed[:first], placed[first + counts[rank] :], own])
    results_at, slot_of_row = np.zeros(ids.size, np.int64), np.full_like(slots, -1)
    results_at[ordered] = memory.ctypes.data + np.arange(len(ordered)) * memory.strides[0]
    slot_of_row[: len(ordered)] = ordered
    return ids, weights, slot_of_row, results_at
