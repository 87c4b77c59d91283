"""What ranks hold after they have exchanged rows through each other's memory, slot by slot, from docs/developer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tools.fuzz.oracle.formats import quantize
from tools.fuzz.oracle.real import Tensor

_NONE = 2**31 - 1


class Went(NamedTuple):
    """Where slots went. owners, rows: of every rank, `[T, K]`; by_owner: (home, slot) of each row of an owner."""

    owners: list[Tensor]
    rows: list[Tensor]
    by_owner: list[list[tuple[int, int]]]
    received: list[Tensor]
    overflow: int


def first_visits(places: Tensor, per_rank: int) -> Tensor:
    """The rank of each slot's place, -1 where an earlier slot of the token goes there, or where there is no place."""
    found = []
    for token in places.tolist():
        owners = [place // per_rank if place >= 0 else -1 for place in token]
        found.append([-1 if owner in owners[:k] else owner for k, owner in enumerate(owners)])
    return torch.tensor(found, dtype=torch.int32).reshape(places.shape)


def where_slots_go(ids: Sequence[Tensor], num_places: int, receive: int | None) -> Went:
    """Owners have rows by (place, home, slot), the first `receive` of them."""
    per_rank = num_places // len(ids)
    slots = [
        (place, home, slot)
        for home, own in enumerate(ids)
        for slot, place in enumerate(own.reshape(-1).tolist())
        if 0 <= place < num_places
    ]
    owners, rows = ([torch.full(own.shape, -1, dtype=torch.int32) for own in ids] for _ in range(2))
    by_owner: list[list[tuple[int, int]]] = [[] for _ in ids]
    overflow = 0
    for place, home, slot in sorted(slots):
        here = by_owner[place // per_rank]
        if receive is not None and len(here) >= receive:
            overflow += 1
            continue
        owners[home].view(-1)[slot], rows[home].view(-1)[slot] = place // per_rank, len(here)
        here.append((home, slot))
    counts = Counter(place for place, *_ in slots)
    received = [
        torch.tensor([[counts[rank * per_rank + local] for local in range(per_rank)]], dtype=torch.int32)
        for rank in range(len(ids))
    ]
    return Went(owners, rows, by_owner, received, overflow)


def most_rows(ids: Sequence[Tensor], num_places: int) -> int:
    """The rows that the busiest owner has."""
    return max(map(len, where_slots_go(ids, num_places, None).by_owner))


def _stored(like: Tensor, went: Went, values: Sequence[Tensor], each: int) -> list[Tensor]:
    """What owners' arrays, which held `like`, hold: values of every home, of which a row is that of `each` slots."""
    found = []
    for here in went.by_owner:
        array = like.clone()
        for row, (home, slot) in enumerate(here):
            array[row] = values[home][slot // each]
        found.append(array)
    return found


def peer_results(case: Any, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Arrays to be met bit by bit, by name and rank, of the mode `peer`.

    given, a list by rank: ids, x, weights, results, numbers, of what is stored; empty: a poisoned array
    of each name; receive, num_places, per_rank.
    """
    ids, empty, K = given["ids"], given["empty"], case.K
    went = where_slots_go(given["going"], given["num_places"], given["receive"])
    exact: dict[str, Any] = {
        "owners": went.owners,
        "rows": went.rows,
        "received": went.received,
        "overflow": [torch.tensor([went.overflow], dtype=torch.int32)] * len(ids),
    }
    if case.rows_format:
        stored = [quantize(x.float(), case.rows_format, "out_in")[0] for x in given["x"]]
        exact["x"] = _stored(empty["x"], went, [own.values.view(torch.uint8) for own in stored], K)
        exact["scales"] = _stored(empty["scales"], went, [own.scales for own in stored], K)
    else:
        exact["x"] = _stored(empty["x"], went, given["x"], K)
    if not case.by_token:
        weights = [own.reshape(-1, 1) for own in given["weights"]]
        exact["weights"] = _stored(empty["weights"], went, weights, 1)
        slots = [torch.arange(own.numel(), dtype=torch.int32) for own in ids]
        sources = [torch.stack([torch.full_like(one, home), one], 1) for home, one in enumerate(slots)]
        exact["sources"] = _stored(empty["sources"], went, sources, 1)
        exact["home"] = [empty["home"].clone() for _ in ids]
        for results, here in zip(given["results"], went.by_owner, strict=True):
            for row, (home, slot) in enumerate(here):
                exact["home"][home][slot] = results[row]
    exact["numbers"] = []
    for owners, rows in zip(went.owners, went.rows, strict=True):
        numbers = torch.zeros(owners.shape)
        for t in range(len(owners)):
            for k in range(K):
                owner, row = int(owners[t, k]), int(rows[t, k])
                if owner >= 0:
                    numbers[t, k] = given["numbers"][owner][row]
        exact["numbers"].append(numbers)
    return {f"{name} {rank}": own for name, arrays in exact.items() for rank, own in enumerate(arrays)}


def taken(case: Any, given: Mapping[str, Any]) -> Tensor:
    """What `take_rows` makes of arrays of rank 0: rows of x by number, those outside of it zeros; others are left."""
    found = given["empty"]["taken"].clone()
    x, rows, filled = given["held"], given["take"].reshape(-1).tolist(), given["filled"]
    if case.rows_format:
        factors = given["held_scales"].repeat_interleave(128, 1)[:, : case.D]
        x = (x.view(torch.float8_e4m3fn).float() * factors).to(found.dtype)
    for own, row in enumerate(rows[: max(0, filled)]):
        found[own] = x[row] if 0 <= row < len(x) else 0
    return found


class Sent(NamedTuple):
    """Of a rank's slots, what `send_tables` says, and what it sends: (place, weight's bits, slot) of each row, or of
    each token's slots, to each owner."""

    tables: dict[str, Tensor]
    rows: list[list[int]]


def _table(rows: Sequence[Any], *shape: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(shape)


def send_tables(case: Any, given: Mapping[str, Any], rank: int) -> Sent:
    """The tables of a rank, whose ids, weights and mask are those of `given`, which are lists by rank."""
    W, K, each = case.ranks, case.K, given["per_rank"]
    ids, mask = given["ids"][rank], given["masks"][rank]
    first = sum(len(own) for own in given["ids"][:rank])
    places, invalid, per_expert = [], 0, [0] * case.E
    for t, token in enumerate(ids.tolist()):
        for k, expert in enumerate(token):
            place = -1
            if mask is None or mask[t]:
                invalid += not -1 <= expert < case.E
                if 0 <= expert < case.E:
                    replicas = given["places_of"][expert]
                    place = replicas[(first + t + k) % len(replicas)]
                    per_expert[expert] += 1
            places.append(place)
    owners = [place // each if place >= 0 else -1 for place in places]
    slots = [slot for slot, place in enumerate(places) if place >= 0]
    by_slot = not case.by_token
    # The slots whose rows go, by owner and in their order; and all slots of an owner, in that of their results.
    going: list[list[int]] = [[] for _ in range(W)]
    back: list[list[int]] = [[] for _ in range(W)]
    for slot in sorted(slots, key=lambda slot: (places[slot], slot)) if by_slot else slots:
        owner, token = owners[slot], slot // K
        back[owner].append(slot)
        if by_slot or not any(other // K == token for other in going[owner]):
            going[owner].append(slot)
    gathers = case.mode == "all_gather"
    kept = [_NONE if gathers else given["block"]] * W if case.mode != "all_to_all" else given["kept"][rank]
    went = [own[:most] for own, most in zip(going, kept, strict=True)]
    arrived = [
        [slot for slot in own if gathers or any(_row(slot, row, K, by_slot) for row in there)]
        for own, there in zip(back, went, strict=True)
    ]
    most_back = _NONE if case.mode == "all_to_all" else given["back"]
    row_of_slot, begin = [-1] * len(places), 0
    for owner, own in enumerate(arrived):
        if case.mode != "all_to_all":
            begin = max(1, given["back"]) * owner
        for number, slot in enumerate(own[:most_back]):
            row_of_slot[slot] = begin + number
        begin += len(own)
    lost = [
        any(places[slot] >= 0 and row_of_slot[slot] < 0 for slot in range(t * K, (t + 1) * K)) for t in range(len(ids))
    ]
    counted = [len(own) for own in arrived]
    if case.mode != "all_to_all":
        counted = [max(0, count - given["back"]) for count in counted]
        if not gathers:
            counted = [count + len(all_) - len(some) for count, all_, some in zip(counted, going, went, strict=True)]
    bits = given["weights"][rank].view(torch.int32)
    by_token = torch.cat([_table(places, *ids.shape), bits], 1)
    of_slot = torch.stack([_table(places, len(places)), bits.reshape(-1)], 1)
    tables = {
        "places": _table(places, *ids.shape),
        "invalid_ids": _table([invalid], 1),
        "tokens_per_expert": _table(per_expert, case.E),
        "row_of_slot": _table(row_of_slot, len(places)),
        "lost": torch.tensor(lost, dtype=torch.bool).reshape(len(ids)),
        "counted": _table(counted, W),
    }
    header = given["header"]
    if gathers:
        tables["message"] = torch.cat([header, by_token.reshape(-1)])
        return Sent(tables, went)
    beside = of_slot if by_slot else by_token
    if case.mode == "padded":
        size = max(1, given["block"])
        blocks, slot_of_row = [], []
        for own in went:
            rows = torch.full((size, beside.shape[1]), -1, dtype=torch.int32)
            for number, slot in enumerate(own):
                rows[number] = beside[slot if by_slot else slot // K]
            blocks.append(torch.cat([header, rows.reshape(-1)]))
            slot_of_row += own + [-1] * (size - len(own))
        tables["message"], tables["slot_of_row"] = torch.stack(blocks), _table(slot_of_row, W * size)
        return Sent(tables, went)
    counts = Counter(places)
    told = [counts[place] for place in range(W * each)]
    if not by_slot:
        told = [number for own in zip(map(len, going), map(len, back), strict=True) for number in own]
    tables["message"] = torch.cat([header.expand(W, -1), _table(told, W, -1)], 1)
    flat = [slot for own in went for slot in own]
    most = len(places) if by_slot else len(ids) * min(K, W)
    tables["slot_of_row"] = _table(flat + [-1] * (most - len(flat)), most)
    rows = [beside[slot, 1:] if by_slot else beside[slot // K] for slot in flat]
    tables["table"] = torch.stack(rows) if rows else beside[:0, 1:] if by_slot else beside[:0]
    return Sent(tables, went)


def _row(slot: int, row: int, top_k: int, by_slot: bool) -> bool:
    """Whether this is the row of a slot, or of its token."""
    return slot == row if by_slot else slot // top_k == row // top_k


def receive_tables(case: Any, given: Mapping[str, Any], sent: Sequence[Sent], rank: int) -> dict[str, Tensor]:
    """The tables of an owner, from what all ranks have sent."""
    K, each, by_slot = case.K, given["per_rank"], not case.by_token
    ids, weights, slots, base = [], [], [], 0
    for own, bits in zip(sent, given["weights"], strict=True):
        places, bits = own.tables["places"].reshape(-1).tolist(), bits.reshape(-1)
        if case.mode == "all_gather":
            rows, size = list(range(0, len(places), K)), len(places) // K
        else:
            rows = own.rows[rank]
            size = len(rows) if case.mode == "all_to_all" else max(1, given["block"])
        found = []
        for number, row in enumerate(rows):
            for slot in [row] if by_slot else range(row // K * K, row // K * K + K):
                if places[slot] >= 0 and places[slot] // each == rank:
                    found.append((number if by_slot else base + number * K + slot % K, slot))
        if by_slot:
            block, weight = torch.full((size, 1), -1, dtype=torch.int32), torch.zeros(size, 1)
            for number, slot in found:
                block[number], weight[number] = places[slot] % each, bits[slot]
        else:
            most = len(found) if case.mode == "all_to_all" else max(1, given["back"])
            found = found if case.mode == "all_to_all" else found[: given["back"]]
            block, weight = torch.full((most, 1), -1, dtype=torch.int32), torch.zeros(most, 1)
            numbers = torch.full((most,), -1, dtype=torch.int32)
            for row, (number, slot) in enumerate(found):
                block[row], weight[row], numbers[row] = places[slot] % each, bits[slot], number
            slots.append(numbers)
            base += size * K
        ids.append(block)
        weights.append(weight)
    found = {"own ids": torch.cat(ids), "own weights": torch.cat(weights)}
    if not by_slot:
        found["own slots"] = torch.cat(slots)
    return found
