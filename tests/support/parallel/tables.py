"""Draws of what a rank sends, and the tables that `moe_core.parallel.exchange` says for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moe_core.parallel import ExchangeSpec, Placement
from moe_core.parallel.bounds import bounds_of
from moe_core.parallel.header import Header
from moe_core.specs.exchange import TableSpec
from tests.support.parallel.twin import arithmetic

#: Modes and rows.
WAYS = (("all_to_all", "slots"), ("all_to_all", "tokens"), ("padded", "slots"), ("padded", "tokens"))
WAYS += (("all_gather", "tokens"),)

HEADER = np.arange(1, len(Header._fields) + 1, dtype=np.int32)


class Sends(NamedTuple):
    """The inputs of `plan_send_tables`, and its options."""

    arrays: dict[str, np.ndarray]
    placement: Placement
    spec: TableSpec
    rank: int


def table_spec(
    way: tuple[str, str], placement: Placement, num_tokens: int, top_k: int, receive: int | None = None
) -> TableSpec:
    bounds = bounds_of(ExchangeSpec(*way, receive=receive), num_tokens, top_k, placement)
    sizes = placement.num_ranks, placement.per_rank, placement.num_experts
    return TableSpec(*way, *sizes, bounds.block, bounds.back)


def draw_sends(
    seed: int, placement: Placement, spec: TableSpec, num_tokens: int, top_k: int, load: str, *, masked: bool = False
) -> Sends:
    """load: `random`, `hot` (one expert), `none` (no expert), `invalid` (ids that are none)."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, placement.num_experts, (num_tokens, top_k)).astype(np.int32)
    if load == "hot":
        ids[random.random(ids.shape) < 0.8] = placement.num_experts - 1
    elif load == "none":
        ids[:] = -1
    elif load == "invalid":
        wrong = random.choice(np.array([-1, -2, placement.num_experts, 2**31 - 1, -(2**31)], np.int32), ids.shape)
        ids = np.where(random.random(ids.shape) < 0.4, wrong, ids)
    weights = random.standard_normal(ids.shape).astype(np.float32)
    _, places, start = placement.tables
    arrays = {"ids": ids, "weights": weights, "places_of_experts": places, "start": start, "header": HEADER}
    rank = seed % placement.num_ranks
    if masked:
        arrays["token_mask"] = random.random(num_tokens) < 0.7
    if placement.has_replicas:
        arrays["tokens"] = random.integers(0, 99, placement.num_ranks).astype(np.int32)
    return Sends(arrays, placement, spec, rank)


def expected_tables(sends: Sends) -> dict[str, np.ndarray]:
    """The outputs of `plan_send_tables`, of `table` the rows that go."""
    arrays, placement, spec, rank = sends
    ids, weights = arrays["ids"], arrays["weights"]
    first = int(arrays["tokens"][:rank].sum()) if "tokens" in arrays else 0
    places, invalid = arithmetic.physical_ids(ids, placement, first_token=first, token_mask=arrays.get("token_mask"))
    owners = arithmetic.owners_of(places, placement.per_rank)
    groups = places if spec.by_slot else arithmetic.first_owners(places, placement.per_rank)
    sent = arithmetic.sends(groups, spec.num_places if spec.by_slot else spec.num_ranks)
    each = len(sent.group_sizes) // spec.num_ranks
    # Every slot's row among those of its owner: its own, or that of the token.
    begins = sent.group_start[:-1:each][np.maximum(owners, 0)].reshape(ids.shape)
    number = np.where(groups < 0, -1, sent.row_of_slot.reshape(ids.shape) - begins)
    if not spec.by_slot:
        table = arithmetic.token_rows(number, owners, spec.num_ranks)
        number = arithmetic.slot_rows(table, owners)
    kept = np.full(spec.num_ranks, 2**31 - 1)
    if spec.mode == "padded":
        kept[:] = spec.block
    elif "limits" in arrays:
        kept = arrays["limits"][0]
    arrives = owners >= 0
    if spec.mode != "all_gather":
        arrives &= number < kept[np.maximum(owners, 0)]
    arrived = np.where(arrives, places if spec.by_slot else owners, -1)
    back = arithmetic.sends(arrived, len(sent.group_sizes) if spec.by_slot else spec.num_ranks)
    home = arithmetic.returned_rows(back, arrived, spec.num_ranks, spec.back).row
    counts = np.bincount(owners[arrives], minlength=spec.num_ranks)
    if "limits" in arrays and not spec.by_slot:
        # Results begin where the limits say.
        shift = arrays["limits"][1] - (np.cumsum(counts) - counts)
        home = np.where(home < 0, -1, home + shift[np.maximum(owners, 0)])
    elif spec.own_first:
        moved = np.where(np.arange(spec.num_ranks) < rank, counts[rank], 0)
        moved[rank] = -counts[:rank].sum()
        home = np.where(home < 0, -1, home + moved[np.maximum(owners, 0)])
    elif spec.back is not None:
        owner = np.maximum(owners, 0)
        home = np.where(home < 0, -1, home + owner * (spec.back_rows - spec.back))
    sizes = sent.group_sizes.reshape(spec.num_ranks, -1).sum(axis=1)
    counted = counts
    if spec.back is not None:
        counted = np.maximum(counts - spec.back, 0)
        if spec.mode == "padded":
            counted = counted + sizes - np.minimum(sizes, kept)
    found: dict[str, Any] = {
        "places": places,
        "invalid_ids": invalid,
        "tokens_per_expert": np.bincount(ids[places >= 0], minlength=spec.num_experts),
        "row_of_slot": home.reshape(-1),
        "lost": ((places >= 0) & (home < 0)).any(axis=1),
        "counted": counted,
    }
    of_tokens = np.concatenate([places, weights.view(np.int32)], axis=1)
    if spec.mode == "all_gather":
        return found | {"message": np.concatenate([HEADER, of_tokens.reshape(-1)])}
    top_k = ids.shape[1]
    of_slots = np.stack([places.reshape(-1), weights.reshape(-1).view(np.int32)], axis=1)
    rows = [
        sent.slot_of_row[first : first + min(size, most)]
        for first, size, most in zip(sent.group_start[:-1:each], sizes, kept, strict=True)
    ]
    beside = [of_slots[slots] if spec.by_slot else of_tokens[slots // top_k] for slots in rows]
    if spec.mode == "padded":
        slot_of_row = np.full((spec.num_ranks, spec.block_rows), -1)
        message = np.full((spec.num_ranks, len(HEADER) + spec.block_rows * spec.width(top_k)), -1)
        message[:, : len(HEADER)] = HEADER
        for owner, (slots, numbers) in enumerate(zip(rows, beside, strict=True)):
            slot_of_row[owner, : len(slots)] = slots
            message[owner, len(HEADER) : len(HEADER) + numbers.size] = numbers.reshape(-1)
        return found | {"message": message, "slot_of_row": slot_of_row.reshape(-1)}
    went = np.concatenate(rows)
    most = ids.size if spec.by_slot else len(ids) * min(top_k, spec.num_ranks)
    counts = sent.group_sizes.reshape(spec.num_ranks, -1)
    if not spec.by_slot:
        counts = np.stack([sent.group_sizes, arithmetic.sends(owners, spec.num_ranks).group_sizes], axis=1)
    return found | {
        "message": np.concatenate([np.tile(HEADER, (spec.num_ranks, 1)), counts], axis=1),
        "slot_of_row": np.pad(went, (0, most - len(went)), constant_values=-1),
        "table": np.concatenate(beside)[:, -spec.width(top_k) :],
    }
