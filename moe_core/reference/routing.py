"""NumPy twins of the routing ops: router product, selection, ragged layout, schedules and bitmatrices."""

from __future__ import annotations

import numpy as np

from moe_core.reference.activation import sigmoid
from moe_core.reference.product import product
from moe_core.reference.rounding import round_to, to_float32
from moe_core.specs import LayoutSpec, LogitsSpec, RouterSpec

#: Selection keys ascend from the best: numbers first, then NaN, then experts of groups that were not kept.
_NAN_KEY = np.uint32(0xFFFFFFFE)
_MASKED_KEY = np.uint32(0xFFFFFFFF)


def router(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, *, spec: LogitsSpec) -> np.ndarray:
    """Logits fp32 `[T, E]` = x `[T, D]` . weight (+ bias `[E]`), accumulated in fp32, rounded to spec.logits_dtype.

    Bitwise the same for either storage of the weight, as the kernel's are: BLAS adds in another order where it is told
    that a matrix is transposed.
    """
    with np.errstate(all="ignore"):
        matrix = np.ascontiguousarray(weight if spec.weight_layout == "in_out" else weight.T)
        logits = product(x, matrix, "in_out", spec.batch_invariant)
        if bias is not None:
            logits = logits + to_float32(bias)
    return to_float32(round_to(logits, spec.logits_dtype))


def _selection_keys(scores: np.ndarray) -> np.ndarray:
    """uint32 keys of fp32 scores: a smaller key ranks higher, equal scores (-0.0 and +0.0 too) have equal keys."""
    with np.errstate(all="ignore"):
        bits = (scores + np.float32(0)).view(np.uint32)
    descending = np.where(bits >> 31 != 0, bits, ~(bits | np.uint32(0x80000000)))
    return np.where(np.isnan(scores), _NAN_KEY, descending)


def _best(keys: np.ndarray, count: int) -> np.ndarray:
    """Indices `[..., count]` of the smallest keys along the last axis, in order, ties to the lower index."""
    width = keys.shape[-1]
    packed = keys.astype(np.uint64) << np.uint64(32) | np.arange(width, dtype=np.uint64)
    if count < width:
        packed = np.partition(packed, count - 1, axis=-1)[..., :count]
    return (np.sort(packed, axis=-1) & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _mask_groups(scores: np.ndarray, keys: np.ndarray, spec: RouterSpec, has_bias: bool) -> np.ndarray:
    """The keys with every expert outside the spec.topk_group best groups set to the masked key."""
    num_tokens, num_experts = keys.shape
    grouped = keys.reshape(num_tokens, spec.num_groups, num_experts // spec.num_groups)
    if has_bias:
        pair = np.take_along_axis(scores.reshape(grouped.shape), _best(grouped, 2), axis=-1)
        with np.errstate(all="ignore"):
            group_keys = _selection_keys(pair[..., 0] + pair[..., 1])
    else:
        group_keys = grouped.min(axis=-1)
    kept = np.zeros((num_tokens, spec.num_groups), bool)
    np.put_along_axis(kept, _best(group_keys, spec.topk_group), True, axis=-1)
    return np.where(kept[..., None], grouped, _MASKED_KEY).reshape(keys.shape)


def _softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax along the last axis in fp32; a NaN or +inf makes its whole row NaN."""
    with np.errstate(all="ignore"):
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return exponentials / exponentials.sum(axis=-1, keepdims=True, dtype=np.float32)


def scores_of(logits: np.ndarray, scoring: str) -> np.ndarray:
    """fp32 scores `[T, E]`: softmax over experts, sigmoid, or sqrt(log(1 + exp(x))) without overflow."""
    if scoring == "softmax":
        return _softmax(logits)
    if scoring == "sigmoid":
        return sigmoid(logits)
    with np.errstate(all="ignore"):
        return np.sqrt(np.maximum(logits, np.float32(0)) + np.log1p(np.exp(-np.abs(logits))))


def route(
    logits: np.ndarray,
    correction_bias: np.ndarray | None = None,
    token_mask: np.ndarray | None = None,
    *,
    spec: RouterSpec,
    with_bitmatrix: bool = False,
) -> tuple[np.ndarray, ...]:
    """ids int32 `[T, K]`, weights fp32 `[T, K]` (and the bitmatrix) from logits fp32 `[T, E]`.

    correction_bias fp32 `[E]` moves the selection, never the weights. token_mask bool `[T]`: False = masked, ids -1 and
    weights 0. Without a bias the order of the scores is decided on the logits (every scoring is monotone), so that
    fp32 rounding of the scores makes no ties; with one, on fp32 score + bias (topk_then_softmax: logit + bias).
    """
    softmax_last = spec.order == "topk_then_softmax"
    scores = logits if softmax_last else scores_of(logits, spec.scoring)
    with np.errstate(all="ignore"):
        ranked = logits if correction_bias is None else scores + correction_bias
    keys = _selection_keys(ranked)
    if spec.num_groups > 1:
        keys = _mask_groups(ranked, keys, spec, correction_bias is not None)
    ids = _best(keys, spec.require_top_k())
    weights = np.take_along_axis(scores, ids, axis=-1)
    if softmax_last:
        weights = _softmax(weights)
    with np.errstate(all="ignore"):
        if spec.renormalize:
            total = weights.sum(axis=-1, keepdims=True, dtype=np.float32)
            weights = np.where(total == 0, np.float32(0), weights / total)
        weights = weights * np.float32(spec.scale)
    if spec.slot_order == "expert":
        ascending = np.argsort(ids, axis=-1)
        ids, weights = (np.take_along_axis(array, ascending, axis=-1) for array in (ids, weights))
    if token_mask is not None:
        ids = np.where(token_mask[:, None], ids, -1)
        weights = np.where(token_mask[:, None], weights, np.float32(0))
    ids, weights = ids.astype(np.int32), weights.astype(np.float32)
    if with_bitmatrix:
        return ids, weights, pack_bitmatrix(ids, num_experts=logits.shape[1])[0]
    return ids, weights


def _local_ids(
    ids: np.ndarray, expert_map: np.ndarray | None, token_mask: np.ndarray | None, num_experts: int
) -> tuple[np.ndarray, int]:
    """Local expert of every slot (int64 `[T * K]`, -1 = none) and the number of ids outside [-1, E_global)."""
    flat = np.asarray(ids, np.int64)
    if token_mask is not None:
        flat = np.where(token_mask[:, None], flat, -1)
    flat = flat.reshape(-1)
    num_global = num_experts if expert_map is None else len(expert_map)
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
    *,
    layout: LayoutSpec,
    block_ms: tuple[int, ...] = (),
) -> tuple[np.ndarray, ...]:
    """Group the slots of ids int32 `[T, K]` by expert; within an expert the rows are in slot order.

    expert_map int32 `[E_global]`: global to local id; entries outside [0, E) mean "not here". token_mask bool `[T]`:
    False = the token's ids act as -1 and count nowhere. Returns int32 group_sizes `[E]`, group_start `[E + 1]` (every
    start a multiple of layout.alignment, group_start[E] the end of the last group with its padding), slot_of_row
    `[capacity]`, row_of_slot `[T * K]`, invalid_ids `[1]`, then a schedule per block_ms.
    """
    local, invalid = _local_ids(ids, expert_map, token_mask, layout.num_experts)
    found = np.bincount(local[local >= 0], minlength=layout.num_experts)
    if layout.max_rows is None:
        sizes = found
        owned = -(-found // layout.alignment) * layout.alignment
    else:
        sizes = np.minimum(found, layout.max_rows)
        owned = np.full_like(found, layout.max_rows)
    start = np.concatenate([[0], np.cumsum(owned)])
    slots = np.argsort(np.where(local < 0, layout.num_experts, local), kind="stable")[: found.sum()]
    experts = local[slots]
    rank = np.arange(len(slots)) - (np.cumsum(found) - found)[experts]
    kept = rank < sizes[experts]
    slots, rows = slots[kept], (start[experts] + rank)[kept]
    slot_of_row = np.full(layout.capacity, -1, np.int32)
    row_of_slot = np.full(layout.num_slots, -1, np.int32)
    slot_of_row[rows], row_of_slot[slots] = slots, rows
    schedules = (schedule(sizes, layout=layout, block_m=block_m) for block_m in block_ms)
    counts = np.array([invalid], np.int32)
    return sizes.astype(np.int32), start.astype(np.int32), slot_of_row, row_of_slot, counts, *schedules


def schedule(group_sizes: np.ndarray, *, layout: LayoutSpec, block_m: int) -> np.ndarray:
    """int32 `[max_blocks, 2]`: (row block within the expert, expert) by expert, then block; (-1, -1) = idle.

    Example, group_sizes [3, 0, 2], block_m 2: (0, 0), (1, 0), (0, 2).
    """
    blocks = -(-np.asarray(group_sizes, np.int64) // block_m)
    experts = np.repeat(np.arange(layout.num_experts), blocks)
    first = np.repeat(np.cumsum(blocks) - blocks, blocks)
    table = np.full((layout.max_blocks(block_m), 2), -1, np.int32)
    table[: len(experts), 0] = np.arange(len(experts)) - first
    table[: len(experts), 1] = experts
    return table


def pack_bitmatrix(ids: np.ndarray, *, num_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bitmatrix uint32 `[T, ceil(E / 32)]` of ids int32 `[T, K]`: bit e % 32 of word e // 32 says that e was chosen.

    Also duplicates int32 `[1]`, the slots whose expert an earlier slot of the token has (the matrix cannot hold them),
    and invalid_ids int32 `[1]`, the ids outside [-1, E); both leave the matrix as it would be without those slots.
    """
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
    """ids int32 `[T, K]`, ascending, -1 behind the last; of more than K set bits the lowest K."""
    little = np.ascontiguousarray(bitmatrix).astype(np.dtype("<u4"))
    chosen = np.unpackbits(little.view(np.uint8), axis=-1, bitorder="little")[:, :num_experts].astype(bool)
    position = np.cumsum(chosen, axis=-1) - 1
    tokens, experts = np.nonzero(chosen & (position < top_k))
    ids = np.full((len(bitmatrix), top_k), -1, np.int32)
    ids[tokens, position[tokens, experts]] = experts
    return ids
