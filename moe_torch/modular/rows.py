"""Small steps on rows that several stages share: ids and weights as the ops take them, weighting, sums by token."""

from __future__ import annotations

import torch

from moe_core.errors import InvalidInput
from moe_core.specs.routing import LayoutSpec
from moe_torch import ops
from moe_torch.bridge.options import encode
from moe_torch.modular.into import write_into
from moe_torch.operators.table import REDUCE

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_INT32_MAX = 2**31 - 1


def as_ids(topk_ids: torch.Tensor) -> torch.Tensor:
    """ids `[M, topk]` as contiguous int32. An int64 id that int32 cannot hold stays one that is out of range."""
    if topk_ids.dtype == torch.int32 and topk_ids.dim() == 2:
        return topk_ids.contiguous()
    if topk_ids.dim() != 2 or topk_ids.dtype not in _INTEGERS:
        raise InvalidInput(
            f"topk_ids must be integers [num_tokens, topk], got {topk_ids.dtype} {list(topk_ids.shape)}; pass the ids "
            "of a top-k"
        )
    if topk_ids.dtype == torch.int64:
        topk_ids = topk_ids.clamp(-2, _INT32_MAX)
    return topk_ids.to(torch.int32).contiguous()


def as_weights(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """weights `[M, topk]` as contiguous fp32, in which every bf16 and fp16 number is exact."""
    if topk_weights.dtype == torch.float32 and topk_weights.shape == topk_ids.shape:
        return topk_weights.contiguous()
    if topk_weights.shape != topk_ids.shape or not topk_weights.is_floating_point():
        raise InvalidInput(
            f"topk_weights must be floats {list(topk_ids.shape)} like topk_ids, got {topk_weights.dtype} "
            f"{list(topk_weights.shape)}; pass the weights of the same top-k"
        )
    return topk_weights.to(torch.float32).contiguous()


def weighted_rows(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """rows `[R, D]` times weights fp32 `[R, 1]`, in fp32, cast to the dtype of rows; a new tensor.

    The op `scale_rows`, or where a gradient is asked for torch's own product: one IEEE product and one rounding, the
    same bits.
    """
    if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
        return (rows.float() * weights).to(rows.dtype)
    return ops.scale_rows(rows, weights)


def sum_by_token(output: torch.Tensor, rows: torch.Tensor, row_of_slot: torch.Tensor, top_k: int, order: str) -> None:
    """Write to output `[M, D]` each token's rows added in fp32 in the order k = 0..topk-1, one cast.

    rows `[M * topk, D]` by slot (order `slot`) or `[capacity, D]` by layout row (`row`); row_of_slot int32
    `[M * topk]`, -1 = adds nothing and is not read.
    """
    dtype = str(output.dtype).removeprefix("torch.")
    write_into(REDUCE, {"out": output}, rows, row_of_slot, None, None, encode(top_k, order, dtype))


def slots_with_expert(topk_ids: torch.Tensor) -> torch.Tensor:
    """row_of_slot int32 `[M * topk]` of rows that lie by slot: the slot, -1 where the id is negative."""
    ids = topk_ids.reshape(-1)
    slots = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
    return torch.where(ids >= 0, slots, -1)


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Global ids as local ones: -1 for those of other ranks, for -1, and for ids that the map does not have."""
    if expert_map is None:
        return topk_ids
    known = (topk_ids >= 0) & (topk_ids < expert_map.shape[0])
    mapped = expert_map[topk_ids.clamp(0, expert_map.shape[0] - 1).long()]
    return torch.where(known, mapped, -1).to(torch.int32)


def batched_layout(num_experts: int, max_rows: int, group_sizes: torch.Tensor) -> ops.RaggedLayout:
    """The layout of `[E, max_rows, D]` whose first group_sizes int32 `[E]` rows of each expert are used; every row is
    its own slot."""
    spec = LayoutSpec(num_experts * max_rows, 1, num_experts, max_rows=max_rows)
    rows = torch.arange(num_experts * max_rows, dtype=torch.int32, device=group_sizes.device)
    starts = torch.arange(num_experts + 1, dtype=torch.int32, device=group_sizes.device) * max_rows
    used = (rows % max_rows).view(num_experts, max_rows) < group_sizes[:, None]
    slots = torch.where(used.view(-1), rows, -1)
    none_invalid = torch.zeros(1, dtype=torch.int32, device=group_sizes.device)
    return ops.RaggedLayout(spec, group_sizes, starts, slots, slots, none_invalid)


def weight_of_row(weights: torch.Tensor, slot_of_row: torch.Tensor, absent: float = 0.0) -> torch.Tensor:
    """fp32 `[rows]` of weights fp32 `[M, topk]` or by slot: that of each row's slot, `absent` of a row without one."""
    # -1 is an index too: of the last weight, which is not taken.
    return torch.where(slot_of_row >= 0, weights.reshape(-1)[slot_of_row], absent)
