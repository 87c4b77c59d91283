"""NumPy twin of token rounding."""

from __future__ import annotations

import numpy as np

from moe_core.ops.routing.reference import route, topk_keys
from moe_core.specs import RouterSpec, TokenRounding


def rounded_rows(chosen: np.ndarray, candidates: np.ndarray, rounding: TokenRounding) -> np.ndarray:
    """Rows `[E]` per expert, from the tokens that chose it and its candidates, including the chosen.

    Tile 128: 192 -> nearest 256 (a half goes to the even multiple: 320 -> 256), up 256, down 128; 10 -> 0.
    """
    tile = rounding.tile
    whole, rest = np.divmod(chosen, tile)
    if rounding.mode == "up":
        more = rest > 0
    elif rounding.mode == "nearest":
        more = (2 * rest > tile) | ((2 * rest == tile) & (whole % 2 == 1))
    else:
        more = np.zeros_like(rest, bool)
    rows = (whole + more) * tile
    return np.where(rows > candidates, whole * tile, rows)


def route_candidates(
    logits: np.ndarray,
    correction_bias: np.ndarray | None = None,
    token_mask: np.ndarray | None = None,
    *,
    spec: RouterSpec,
    wide: RouterSpec,
) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = route(logits, correction_bias, token_mask, spec=wide)
    top_k = spec.require_top_k()
    weights[:, :top_k] = route(logits, None, token_mask, ids[:, :top_k], spec=spec)[1]
    return ids, weights


def keep_candidates(
    candidates: np.ndarray, candidate_weights: np.ndarray, *, top_k: int, rounding: TokenRounding, num_experts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape, values = candidates.shape, candidate_weights.reshape(-1)
    expert, slots = candidates.reshape(-1), np.arange(candidates.size)
    present = expert >= 0
    extra = slots % shape[1] >= top_k
    chosen = np.bincount(expert[present & ~extra], minlength=num_experts)
    available = np.bincount(expert[present], minlength=num_experts)
    rows = rounded_rows(chosen, available, rounding)
    # By expert, then chosen first, then by weight, then by token: each slot's rank within its expert.
    order = np.lexsort((slots, topk_keys(values), extra, np.where(present, expert, num_experts)))[: present.sum()]
    rank = np.arange(len(order)) - (np.cumsum(available) - available)[expert[order]]
    kept = np.zeros(candidates.size, bool)
    kept[order[rank < rows[expert[order]]]] = True
    ids, weights = np.where(kept, expert, -1), np.where(kept, values, values.dtype.type(0))
    return ids.astype(np.int32).reshape(shape), weights.reshape(shape), chosen.astype(np.int32)


def split_gradients(
    d_weights: np.ndarray, ids: np.ndarray, candidates: np.ndarray, *, top_k: int
) -> tuple[np.ndarray, ...]:
    """Candidates and their weights' gradients, 0 for slots not kept: of the chosen, then of any extra ones."""
    gradient = np.where(ids >= 0, d_weights, 0.0).astype(d_weights.dtype)
    parts = [candidates[:, :top_k], gradient[:, :top_k]]
    if candidates.shape[1] > top_k:
        parts += [candidates[:, top_k:], gradient[:, top_k:]]
    return tuple(np.ascontiguousarray(part) for part in parts)
