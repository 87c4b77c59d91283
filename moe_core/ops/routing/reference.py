"""NumPy twins of the routing ops."""

from __future__ import annotations

import numpy as np

from moe_core.base.sizes import INT32_LIMIT
from moe_core.ops.activation.reference import sigmoid, softcap, softcap_derivative
from moe_core.ops.common.rounding import to_float32
from moe_core.specs import LayoutSpec, RouterSpec

#: Smaller keys are better: numbers first, then NaN, then experts of discarded groups.
_NAN_KEY = np.uint32(0xFFFFFFFE)
_MASKED_KEY = np.uint32(0xFFFFFFFF)
_FEW_EXPERTS = 16


def topk_keys(scores: np.ndarray) -> np.ndarray:
    """uint32 keys of scores: smaller ranks higher. Equal scores (-0.0 and +0.0 too) have equal keys."""
    if scores.dtype == np.float64:
        ranks = np.unique(-scores, return_inverse=True)[1].reshape(scores.shape)
        return np.where(np.isnan(scores), _NAN_KEY, ranks.astype(np.uint32))
    with np.errstate(all="ignore"):
        bits = (scores + np.float32(0)).view(np.uint32)
    descending = np.where(bits >> 31 != 0, bits, ~(bits | np.uint32(0x80000000)))
    return np.where(np.isnan(scores), _NAN_KEY, descending)


def _best(keys: np.ndarray, count: int) -> np.ndarray:
    width = keys.shape[-1]
    packed = keys.astype(np.uint64) << np.uint64(32) | np.arange(width, dtype=np.uint64)
    if count < width:
        packed = np.partition(packed, count - 1, axis=-1)[..., :count]
    return (np.sort(packed, axis=-1) & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _mask_groups(scores: np.ndarray, keys: np.ndarray, spec: RouterSpec, pairs: bool) -> np.ndarray:
    num_tokens, num_experts = keys.shape
    grouped = keys.reshape(num_tokens, spec.num_groups, num_experts // spec.num_groups)
    if pairs:
        pair = np.take_along_axis(scores.reshape(grouped.shape), _best(grouped, 2), axis=-1)
        with np.errstate(all="ignore"):
            group_keys = topk_keys(pair[..., 0] + pair[..., 1])
    else:
        group_keys = grouped.min(axis=-1)
    kept = np.zeros((num_tokens, spec.num_groups), bool)
    np.put_along_axis(kept, _best(group_keys, spec.topk_group), True, axis=-1)
    return np.where(kept[..., None], grouped, _MASKED_KEY).reshape(keys.shape)


def softmax_and_log_sum(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fp32 softmax and logsumexp `[.., 1]` along the last axis. A NaN or +inf makes its row NaN."""
    shares, highest, total = _softmax_parts(logits)
    return shares, highest + np.log(total)


def _softmax_parts(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        highest = logits.max(axis=-1, keepdims=True)
        exponentials = logits - highest
        np.exp(exponentials, out=exponentials)
        total = exponentials.sum(axis=-1, keepdims=True)
        return exponentials / total, highest, total


def scores_of(logits: np.ndarray, scoring: str) -> np.ndarray:
    """fp32 scores `[T, E]`; sqrt(log(1 + exp(x))) without overflow."""
    if scoring == "softmax":
        return _softmax_parts(logits)[0]
    if scoring == "sigmoid":
        return sigmoid(logits)
    with np.errstate(all="ignore"):
        return np.sqrt(np.maximum(logits, 0) + np.log1p(np.exp(-np.abs(logits))))


def shares_of(values: np.ndarray, epsilon: float = 0.0) -> np.ndarray:
    """fp32 values / (their sum + epsilon) along the last axis. A zero divisor gives zeros."""
    total = values.sum(axis=-1, keepdims=True)
    if epsilon:
        total += values.dtype.type(epsilon)
    return np.where(total == 0, 0.0, values / total)


def _selected(
    logits: np.ndarray, scored: np.ndarray, scores: np.ndarray, correction_bias: np.ndarray | None, spec: RouterSpec
) -> np.ndarray:
    """ids int64 `[T, K]`, best first. scored: `bounded` logits; a cap may make different logits equal."""
    pairs = correction_bias is not None if spec.group_score is None else spec.group_score == "pair"
    with np.errstate(all="ignore"):
        if correction_bias is not None:
            ranked = (scored if spec.bias_on == "logits" else scores) + correction_bias
        else:
            ranked = scores if pairs and spec.num_groups > 1 else logits
    if spec.num_groups == 1 and ranked.shape[-1] <= _FEW_EXPERTS:
        return np.argsort(-ranked, axis=-1, kind="stable")[:, : spec.require_top_k()]
    keys = topk_keys(ranked)
    if spec.num_groups > 1:
        keys = _mask_groups(ranked, keys, spec, pairs)
    return _best(keys, spec.require_top_k())


def route(
    logits: np.ndarray,
    correction_bias: np.ndarray | None = None,
    token_mask: np.ndarray | None = None,
    given: np.ndarray | None = None,
    *,
    spec: RouterSpec,
    with_bitmatrix: bool = False,
) -> tuple[np.ndarray, ...]:
    softmax_last = spec.order == "topk_then_softmax"
    scored = bounded(logits, spec)
    scores = scored if softmax_last else scores_of(scored, spec.scoring)
    if given is None:
        ids = _selected(logits, scored, scores, correction_bias, spec)
    else:
        valid = ((given >= 0) & (given < logits.shape[1])).all(axis=-1)
        token_mask = valid if token_mask is None else valid & token_mask
        ids = np.where(valid[:, None], given, 0).astype(np.int64)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if softmax_last:
        weights, _ = softmax_and_log_sum(weights)
    with np.errstate(all="ignore"):
        if spec.renormalize:
            weights = shares_of(weights, spec.epsilon)
        if spec.scale != 1:
            weights = weights * spec.scale
    if spec.slot_order == "expert" and given is None:
        ascending = np.argsort(ids, axis=-1)
        ids, weights = (np.take_along_axis(array, ascending, axis=-1) for array in (ids, weights))
    if token_mask is not None:
        ids = np.where(token_mask[:, None], ids, -1)
        weights = np.where(token_mask[:, None], weights, 0.0)
    ids, weights = ids.astype(np.int32), weights.astype(logits.dtype)
    if with_bitmatrix:
        return ids, weights, pack_bitmatrix(ids, num_experts=logits.shape[1])[0]
    return ids, weights


def _local_ids(
    ids: np.ndarray, expert_map: np.ndarray | None, token_mask: np.ndarray | None, num_experts: int
) -> tuple[np.ndarray, int]:
    """The local expert of every slot (int64 `[T * K]`, -1 = none) and the number of invalid ids."""
    flat = np.asarray(ids)
    if flat.dtype == np.uint64:
        flat = np.minimum(flat, np.uint64(INT32_LIMIT))
    flat = flat.astype(np.int64)
    if token_mask is not None:
        flat = np.where(token_mask[:, None], flat, -1)
    flat = flat.reshape(-1)
    num_global = num_experts if expert_map is None else len(expert_map)
    if expert_map is None and flat.min(initial=0) >= 0 and flat.max(initial=0) < num_global:
        return flat, 0
    invalid = (flat < -1) | (flat >= num_global)
    local = np.where(invalid, -1, flat)
    if expert_map is not None:
        mapped = np.where(local < 0, -1, np.asarray(expert_map, np.int64)[np.maximum(local, 0)])
        local = np.where((mapped < 0) | (mapped >= num_experts), -1, mapped)
    return local, int(invalid.sum())


def layout(
    ids: np.ndarray,
    expert_map: np.ndarray | None = None,
    token_mask: np.ndarray | None = None,
    given_weights: np.ndarray | None = None,
    *,
    layout: LayoutSpec,
    block_ms: tuple[int, ...] = (),
) -> tuple[np.ndarray, ...]:
    """The results of `plan_layout`: group_sizes, group_start, slot_of_row, row_of_slot, invalid_ids, with layout.rows
    overflow, then schedules, with given_weights row_weight.

    Starts are multiples of layout.alignment, group_start[E] the end of the last padded group.
    """
    local, invalid = _local_ids(ids, expert_map, token_mask, layout.num_experts)
    # Without an expert: last.
    placed = local if local.min(initial=0) >= 0 else np.where(local < 0, layout.num_experts, local)
    chosen = np.bincount(placed, minlength=layout.num_experts)[: layout.num_experts]
    if layout.max_rows is None:
        sizes = owned = chosen
        if layout.alignment > 1:
            owned = -(-chosen // layout.alignment) * layout.alignment
    else:
        sizes = np.minimum(chosen, layout.max_rows)
        owned = np.full_like(chosen, layout.max_rows)
    if layout.rows is not None:
        sizes = owned = np.minimum(chosen, np.maximum(layout.capacity - (np.cumsum(chosen) - chosen), 0))
    start = np.concatenate([[0], np.cumsum(owned)])
    # NumPy radix-sorts small integers.
    placed = placed.astype(np.uint16) if layout.num_experts < 1 << 16 else placed
    slots = np.argsort(placed, kind="stable")[: chosen.sum()]
    if owned is chosen:
        rows = np.arange(len(slots))
    else:
        experts = local[slots]
        rank = np.arange(len(slots)) - (np.cumsum(chosen) - chosen)[experts]
        kept = rank < sizes[experts]
        slots, rows = slots[kept], (start[experts] + rank)[kept]
    slot_of_row = np.full(layout.capacity, -1, np.int32)
    row_of_slot = np.full(layout.num_slots, -1, np.int32)
    slot_of_row[rows], row_of_slot[slots] = slots, rows
    schedules = (schedule(sizes, layout=layout, block_m=block_m) for block_m in block_ms)
    lost = int((chosen - sizes).sum())
    invalid += lost if layout.limit is not None else 0
    counts = (invalid,) if layout.rows is None else (invalid, lost)
    counters = (np.array([count], np.int32) for count in counts)
    weights = () if given_weights is None else (to_float32(given_weights),)
    return sizes.astype(np.int32), start.astype(np.int32), slot_of_row, row_of_slot, *counters, *schedules, *weights


def schedule(group_sizes: np.ndarray, *, layout: LayoutSpec, block_m: int) -> np.ndarray:
    blocks = -(-np.asarray(group_sizes, np.int64) // block_m)
    experts = np.repeat(np.arange(layout.num_experts), blocks)
    first = np.repeat(np.cumsum(blocks) - blocks, blocks)
    table = np.full((layout.max_blocks(block_m), 2), -1, np.int32)
    table[: len(experts), 0] = np.arange(len(experts)) - first
    table[: len(experts), 1] = experts
    return table


def pack_bitmatrix(ids: np.ndarray, *, num_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num_tokens, top_k = ids.shape
    valid = (ids >= 0) & (ids < num_experts)
    tokens = np.repeat(np.arange(num_tokens), top_k).reshape(ids.shape)
    chosen = np.zeros((num_tokens, -(-num_experts // 32) * 32), bool)
    chosen[tokens[valid], ids[valid]] = True
    packed = np.packbits(chosen, axis=-1, bitorder="little").view(np.dtype("<u4")).astype(np.uint32)
    duplicates = np.array([valid.sum() - chosen.sum()], np.int32)
    invalid = np.array([(~valid & (ids != -1)).sum()], np.int32)
    return packed, duplicates, invalid


def unpack_bitmatrix(bitmatrix: np.ndarray, *, num_experts: int, top_k: int) -> np.ndarray:
    little = np.ascontiguousarray(bitmatrix).astype(np.dtype("<u4"))
    chosen = np.unpackbits(little.view(np.uint8), axis=-1, bitorder="little")[:, :num_experts].astype(bool)
    position = np.cumsum(chosen, axis=-1) - 1
    tokens, experts = np.nonzero(chosen & (position < top_k))
    ids = np.full((len(bitmatrix), top_k), -1, np.int32)
    ids[tokens, position[tokens, experts]] = experts
    return ids


def bounded(logits: np.ndarray, spec: RouterSpec) -> np.ndarray:
    """The logits that are scored: softcap * tanh(logits * logit_scale / softcap), or logits * logit_scale."""
    with np.errstate(all="ignore"):
        scaled = logits if spec.logit_scale == 1 else logits * logits.dtype.type(spec.logit_scale)
        return scaled if spec.softcap is None else softcap(scaled, spec.softcap)


def through_bounds(d_bounded: np.ndarray, logits: np.ndarray, spec: RouterSpec) -> np.ndarray:
    if spec.softcap is None and spec.logit_scale == 1:
        return d_bounded
    # Logits of a token without a gradient are undefined.
    untouched = d_bounded == 0
    with np.errstate(all="ignore"):
        if spec.softcap is not None:
            d_bounded = d_bounded * softcap_derivative(logits * logits.dtype.type(spec.logit_scale), spec.softcap)
        if spec.logit_scale != 1:
            d_bounded = d_bounded * logits.dtype.type(spec.logit_scale)
    return np.where(untouched, 0.0, d_bounded)


def layout_of_runs(counts: np.ndarray, *, num_rows: int, stride: int | None = None) -> tuple[np.ndarray, ...]:
    num_sources, num_experts = counts.shape
    requested = np.maximum(counts.astype(np.int64), 0)
    total = requested.sum(axis=1)
    begin = np.cumsum(total) - total if stride is None else np.arange(num_sources) * stride
    limit = np.full(num_sources, num_rows) if stride is None else begin + stride
    first = begin[:, None] + np.cumsum(requested, axis=1) - requested
    kept = np.minimum(requested, np.maximum(limit[:, None] - first, 0))
    ids = np.full((num_rows, 1), -1, np.int32)
    arrived = [np.zeros(0, np.int64)]
    for expert in range(num_experts):
        for source in range(num_sources):
            rows = first[source, expert] + np.arange(kept[source, expert])
            ids[rows] = expert
            arrived.append(rows)
    slots = np.concatenate(arrived)
    slot_of_row, row_of_slot = np.full(num_rows, -1, np.int32), np.full(num_rows, -1, np.int32)
    slot_of_row[: len(slots)], row_of_slot[slots] = slots, np.arange(len(slots))
    sizes = kept.sum(axis=0)
    start = np.concatenate([[0], np.cumsum(sizes)])
    missing = min(int((requested - kept).sum()), 2**31 - 1)
    return ids, sizes.astype(np.int32), start.astype(np.int32), slot_of_row, row_of_slot, np.array([missing], np.int32)
