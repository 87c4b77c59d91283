"""NumPy twins of adapters: groups, products with factors, tails and gradients. fp32 sums, one cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from moe_core.base import ArraySpec
from moe_core.ops.common.product import multiply
from moe_core.ops.common.rounding import result_dtype, round_to, to_float32, working_dtype
from moe_core.ops.lora.adapters import Adapters, Dropout
from moe_core.ops.lora.beyond import dropout_mask
from moe_core.ops.lora.tail import INPUTS


def kept(seed: np.ndarray, rows: np.ndarray, columns: int, dropout: Dropout) -> np.ndarray:
    """The elements of rows (tokens or slots) that remain, bool `[rows, columns]`."""
    with np.errstate(over="ignore"):
        words = np.asarray(rows).astype(np.uint32), np.arange(columns, dtype=np.uint32)
        return dropout_mask(*words, seed.view(np.uint32)[0], dropout, np.uint32)


def virtual_ids(arrays: Mapping[str, np.ndarray], *, adapters: Adapters) -> tuple[np.ndarray, ...]:
    """(virtual experts of slots, number of tokens with an adapter that does not exist): `kernels.groups`."""
    ids, ranks, adapter = arrays["ids"].astype(np.int64), arrays["ranks"], arrays["adapter_ids"]
    expert_map, token_mask = arrays.get("expert_map"), arrays.get("token_mask")
    experts = adapters.layout.num_experts
    named = (adapter >= 0) & (adapter < adapters.slots)
    row = np.where(named, adapter, 0)
    counted = np.ones(len(adapter), bool) if token_mask is None else token_mask.astype(bool)
    invalid = counted & (adapter != -1) & ((ranks[row].max(axis=1, initial=0) <= 0) | ~named)
    valid = (ids >= 0) & (ids < (experts if expert_map is None else len(expert_map)))
    result, local = np.where(valid | (ids == -1), -1, -2), np.where(valid, ids, 0)
    local = local if expert_map is None else expert_map[local]
    valid &= (local >= 0) & (local < experts)
    local = np.where(valid, local, 0)
    number = np.where(named[:, None] & (ranks[row[:, None], local] > 0), adapter[:, None] + 1, 0)
    result = np.where(valid, local * (adapters.slots + 1) + number, result)
    return result.astype(np.int32), np.array([invalid.sum()], np.int32)


def merge_groups(arrays: Mapping[str, np.ndarray], *, slots: int) -> tuple[np.ndarray, ...]:
    """(group_sizes, group_start, invalid_ids) of experts."""
    start = arrays["virtual_start"][:: slots + 1]
    return np.diff(start), start, arrays["virtual_invalid"] + arrays["block_invalid"].sum(dtype=np.int32)


def groups(virtual_start: np.ndarray, slots: int) -> Iterator[tuple[int, int, slice]]:
    """(adapter, expert, rows) of every virtual expert with an adapter and rows."""
    ends = virtual_start.tolist()
    for group in np.flatnonzero(np.diff(virtual_start) > 0).tolist():
        expert, number = divmod(group, slots + 1)
        if number:
            yield number - 1, expert, slice(ends[group], ends[group + 1])


def matrix_of(factor: np.ndarray, adapter: int, expert: int, adapters: Adapters, dtype: np.dtype) -> np.ndarray:
    """A factor as the product reads it: rounded to dtype, fp32."""
    matrix = factor[adapter, 0 if factor.shape[1] == 1 else expert]
    return to_float32(round_to(to_float32(matrix.T if adapters.transposed else matrix), dtype))


def _index(gather: str | None, rows: slice, slot_of_row: np.ndarray, top_k: int) -> np.ndarray | slice:
    if gather == "row":
        return rows
    return slot_of_row[rows] if gather == "slot" else slot_of_row[rows] // top_k


def _masked(
    values: np.ndarray, seed: np.ndarray | None, rows: slice, slots: np.ndarray, adapters: Adapters
) -> np.ndarray:
    dropout = adapters.dropout
    if not dropout.probability or dropout.masked is None:
        return values
    assert seed is not None
    index = slots[rows] // (adapters.layout.top_k if dropout.masked == "token" else 1)
    return np.where(kept(seed, index, values.shape[1], dropout), values, 0).astype(values.dtype)


def shrink(arrays: Mapping[str, np.ndarray], *, adapters: Adapters, gather: str) -> np.ndarray:
    """`plan_shrink` with its inputs by name."""
    x, factor, scale, ranks = (arrays[name] for name in ("x", "factor", "scale", "ranks"))
    start, slots = arrays["virtual_start"], arrays["slot_of_row"]
    columns = factor.shape[2 if adapters.transposed else 3]
    low = np.zeros((adapters.layout.capacity, columns), x.dtype)
    with np.errstate(all="ignore"):
        for adapter, expert, rows in groups(start, adapters.slots):
            rank = min(int(ranks[adapter, expert]), columns)
            left = to_float32(x[_index(gather, rows, slots, adapters.layout.top_k)])
            left = _masked(left, arrays.get("seed"), rows, slots, adapters)
            matrix = matrix_of(factor, adapter, expert, adapters, x.dtype)[:, :rank]
            total = multiply(left, matrix, "in_out", adapters.batch_invariant)
            factor_of = np.asarray(scale[adapter, expert]) * np.float32(adapters.dropout.kept)
            low[rows, :rank] = round_to(total * factor_of, x.dtype)
    return low


class TailArrays(NamedTuple):
    """A product's tail: its inputs, without the prefix."""

    arrays: dict[str, np.ndarray]
    adapters: Adapters

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], adapters: Adapters) -> TailArrays:
        return cls({name: arrays[f"tail.{name}"] for name in INPUTS if f"tail.{name}" in arrays}, adapters)


def add_tail(
    sums: np.ndarray, rows: np.ndarray | slice, slots: np.ndarray, tail: Mapping[str, np.ndarray], adapters: Adapters
) -> None:
    """Add low . factor to fp32 sums of layout rows, in place. tail: a product's inputs of it. slots: theirs."""
    low, factor, ranks = tail["low"], tail["factor"], tail["ranks"]
    numbers = np.arange(len(low))[rows]
    group = np.searchsorted(tail["virtual_start"], numbers, side="right") - 1
    with np.errstate(all="ignore"):
        for each in np.unique(group).tolist():
            expert, number = divmod(each, adapters.slots + 1)
            if not number or expert >= ranks.shape[1]:
                continue
            mine = np.flatnonzero(group == each)
            part = slice(mine[0], mine[-1] + 1) if mine[-1] - mine[0] == len(mine) - 1 else mine
            rank = min(int(ranks[number - 1, expert]), low.shape[1])
            matrix = matrix_of(factor, number - 1, expert, adapters, low.dtype)[:rank]
            product = multiply(to_float32(low[numbers[part], :rank]), matrix, "in_out", adapters.batch_invariant)
            if adapters.dropout.probability and adapters.dropout.masked is not None:
                index = slots[part] // (adapters.layout.top_k if adapters.dropout.masked == "token" else 1)
                product = np.where(kept(tail["seed"], index, product.shape[1], adapters.dropout), product, 0)
            sums[part] += product


def factor_gradient(
    arrays: Mapping[str, np.ndarray], *, adapters: Adapters, gathers: tuple[str, str], spec: ArraySpec
) -> np.ndarray:
    """`plan_factor_gradient` with its inputs by name."""
    left, right, slots, weight = (arrays.get(name) for name in ("left", "right", "slot_of_row", "row_weight"))
    assert left is not None and right is not None and slots is not None
    gradient = np.zeros(spec.shape, working_dtype(left))
    with np.errstate(all="ignore"):
        for adapter, expert, rows in groups(arrays["virtual_start"], adapters.slots):
            a, b = (
                to_float32(side[_index(gather, rows, slots, adapters.layout.top_k)])
                for side, gather in zip((left, right), gathers, strict=True)
            )
            if weight is not None:
                a = to_float32(round_to(a * weight.reshape(-1)[slots[rows], None], left.dtype))
            a = _masked(a, arrays.get("seed"), rows, slots, adapters)
            gradient[adapter, 0 if spec.shape[1] == 1 else expert] += a.T @ b
    return gradient.astype(result_dtype(spec.dtype, left), copy=False)
