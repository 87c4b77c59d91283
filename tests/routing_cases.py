"""Layouts of drawn routings, made by the reference, for tests of the ops that stand on one."""

from __future__ import annotations

import numpy as np

from moe_core.reference import routing as reference
from moe_core.specs import LayoutSpec

#: How ids are drawn, hard cases on purpose.
KINDS = ("uniform", "one_expert", "some_absent", "all_absent", "first_half")


def draw_ids(kind: str, num_tokens: int, top_k: int, num_experts: int, seed: int) -> np.ndarray:
    """ids int32 `[T, K]` of one of KINDS; duplicates within a token are legal."""
    random = np.random.default_rng(seed)
    shape = (num_tokens, top_k)
    if kind == "one_expert":
        return np.full(shape, num_experts - 1, np.int32)
    if kind == "all_absent":
        return np.full(shape, -1, np.int32)
    ids = random.integers(0, max(1, num_experts // 2) if kind == "first_half" else num_experts, shape)
    if kind == "some_absent":
        ids = np.where(random.random(shape) < 0.3, -1, ids)
    return ids.astype(np.int32)


def layout_arrays(ids: np.ndarray, spec: LayoutSpec) -> dict[str, np.ndarray]:
    """group_sizes, group_start, slot_of_row and row_of_slot of ids."""
    sizes, start, slot_of_row, row_of_slot, _ = reference.layout(ids, layout=spec)
    return {"group_sizes": sizes, "group_start": start, "slot_of_row": slot_of_row, "row_of_slot": row_of_slot}
