"""Ragged layouts and bitmatrices: the equations of docs/user/routing.md, one slot after the other."""

from __future__ import annotations

from typing import Any

import torch

from tools.fuzz.oracle.layer import Given


def layout_of(case: Any, given: Given) -> dict[str, Any]:
    """Every array of the layout of ids, of int32 ids also the bitmatrix and what it unpacks to, as lists."""
    ids = given["ids"].tolist()
    mask = given["token_mask"].tolist() if "token_mask" in given else [True] * len(ids)
    table = given["expert_map"].tolist() if "expert_map" in given else list(range(case.E))
    experts, invalid = [], 0
    for row, active in zip(ids, mask, strict=True):
        for one in row:
            known = 0 <= one < len(table)
            invalid += active and not known and one != -1
            experts.append(table[one] if active and known else -1)
    sizes = [experts.count(expert) for expert in range(case.E)]
    owned = [case.max_rows or -(-size // case.alignment) * case.alignment for size in sizes]
    start = [sum(owned[:expert]) for expert in range(case.E + 1)]
    slots = len(experts)
    capacity = case.E * case.max_rows if case.max_rows else slots + (case.E * (case.alignment - 1) if slots else 0)
    row_of_slot, slot_of_row, seen = [-1] * slots, [-1] * capacity, [0] * case.E
    for slot, expert in enumerate(experts):
        if expert < 0:
            continue
        if not case.max_rows or seen[expert] < case.max_rows:
            row_of_slot[slot] = start[expert] + seen[expert]
            slot_of_row[row_of_slot[slot]] = slot
        seen[expert] += 1
    kept = [min(size, case.max_rows) for size in sizes] if case.max_rows else sizes
    found: dict[str, Any] = {"group_sizes": kept, "group_start": start, "slot_of_row": slot_of_row}
    found |= {"row_of_slot": row_of_slot, "invalid_ids": [invalid]}
    return found | (_bitmatrix(case, ids) if case.ids_dtype == "int32" else {})


def _bitmatrix(case: Any, ids: list[list[int]]) -> dict[str, Any]:
    words = -(-case.num_ids // 32)
    packed, unpacked = [], []
    for row in ids:
        chosen = sorted({one for one in row if 0 <= one < case.num_ids})
        packed.append([sum(1 << (one % 32) for one in chosen if one // 32 == word) for word in range(words)])
        unpacked.append((chosen + [-1] * case.K)[: case.K])
    shapes = {"bitmatrix": (packed, words), "unpacked": (unpacked, case.K)}
    return {name: torch.tensor(rows).reshape(len(ids), width) for name, (rows, width) in shapes.items()}
