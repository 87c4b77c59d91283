"""The low-rank tail of a product: further steps of its reduction."""

import triton
import triton.language as tl

from moe_core.ops.common.kernels.aggregates import aggregate_of
from moe_core.ops.common.kernels.dot import drained
from moe_core.ops.lora.kernels.dropout import kept

#: low `[rows, RANK]` times factor `[SLOTS, experts, RANK, N]`: rows of a virtual expert take one matrix.
#: THRESHOLD > 0: what the product adds is masked by MASKED `token` or `slot` (see `shrink`).
Tail = aggregate_of(
    "Tail",
    """low factor start ranks seed RANK SLOTS NUM_EXPERTS SLOT_STRIDE EXPERT_STRIDE R_STRIDE N_STRIDE THRESHOLD MASKED
    SALT BLOCK_R""",
)


@triton.jit
def add_tail(
    total, rows, slots, exists, expert, columns, inside, tail, TOP_K: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    TURNED: tl.constexpr = False, DRAINED: tl.constexpr = False,
):  # fmt: skip
    """Return fp32 sums `[rows, columns]` of an expert, continued by its adapters' steps, ranks ascending.

    Rows of others multiply by zero, so infinite or NaN elements of a factor are left out, and their columns become NaN
    in the adapter's rows alone. TURNED: sums are `[columns, rows]`, without dropout. DRAINED: see `multiply`.
    """
    tl.static_assert(not TURNED or tail.THRESHOLD == 0)
    low_row = tl.min(tl.where(exists, rows, 2147483647), axis=0)
    high_row = tl.max(tl.where(exists, rows, -1), axis=0)
    begin, end_of_adapters = 0, tail.SLOTS
    if tail.SLOTS > 1 and rows.shape[0] <= 32:
        # Adapters of an expert ascend along its rows: only a few neighbours have rows of a block.
        begin = low_row * 0
        end_of_adapters = begin
        for chunk in range(0, tail.SLOTS, 16):
            which = chunk + tl.arange(0, 16)
            starts = tail.start + expert * (tail.SLOTS + 1) + 1 + which
            exist = which < tail.SLOTS
            ahead = tl.load(starts + 1, mask=exist, other=2147483647) <= low_row
            begun = tl.load(starts, mask=exist, other=2147483647) <= high_row
            begin += tl.sum(ahead.to(tl.int32), axis=0)
            end_of_adapters += tl.sum(begun.to(tl.int32), axis=0)
    for adapter in range(begin, end_of_adapters):
        group = expert * (tail.SLOTS + 1) + 1 + adapter
        first, end = tl.load(tail.start + group), tl.load(tail.start + group + 1)
        touched = (first <= high_row) & (end > low_row) & (end > first)
        rank = tl.minimum(tl.load(tail.ranks + adapter * tail.NUM_EXPERTS + expert), tail.RANK)
        steps = tl.where(touched, tl.cdiv(rank, tail.BLOCK_R), 0)
        mine = exists & (rows >= first) & (rows < end)
        matrix = tail.factor + tl.cast(adapter, tl.int64) * tail.SLOT_STRIDE
        matrix += tl.cast(expert, tl.int64) * tail.EXPERT_STRIDE
        part, wild = total, tl.zeros(columns.shape, dtype=tl.int32)
        if tail.THRESHOLD > 0:
            part = tl.zeros(total.shape, dtype=tl.float32)
        for step in range(steps):
            r = step * tail.BLOCK_R + tl.arange(0, tail.BLOCK_R)
            if TURNED:
                low = tl.load(tail.low + rows[None, :] * tail.RANK + r[:, None], mask=mine[None, :], other=0.0)
                pointers = matrix + r[None, :] * tail.R_STRIDE + columns[:, None] * tail.N_STRIDE
                factor = tl.load(pointers, mask=(r < rank)[None, :] & inside[:, None], other=0.0).to(low.dtype)
                factor, wild = tamed(factor, wild, 1)
                part = tl.dot(factor, low, part, input_precision=INPUT_PRECISION)
                if DRAINED:
                    part = drained(part)
            else:
                low = tl.load(tail.low + rows[:, None] * tail.RANK + r[None, :], mask=mine[:, None], other=0.0)
                pointers = matrix + r[:, None] * tail.R_STRIDE + columns[None, :] * tail.N_STRIDE
                factor = tl.load(pointers, mask=(r < rank)[:, None] & inside[None, :], other=0.0).to(low.dtype)
                factor, wild = tamed(factor, wild, 0)
                part = tl.dot(low, factor, part, input_precision=INPUT_PRECISION)
        spoiled = mine[None, :] & (wild > 0)[:, None] if TURNED else mine[:, None] & (wild > 0)[None, :]
        if tail.THRESHOLD > 0:
            index = slots // TOP_K if tail.MASKED == "token" else slots
            kept_here = kept(tail.seed, index, columns, tail.THRESHOLD, tail.SALT)
            part, spoiled = total + tl.where(kept_here, part, 0.0), spoiled & kept_here
        total = tl.where(spoiled, float("nan"), part)
    return total


@triton.jit
def tamed(factor, wild, RANKS: tl.constexpr):
    """Return (factor with zeros for what is no finite number, wild with their columns). RANKS: the axis of ranks."""
    finite = factor.to(tl.float32) * 0.0 == 0.0
    return tl.where(finite, factor, 0.0), tl.maximum(wild, tl.max((finite == 0).to(tl.int32), axis=RANKS))
