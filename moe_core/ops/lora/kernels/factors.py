"""Products with the factors of adapters, ragged over virtual experts (`groups`).

shrink: low[row] = cast(scale[adapter, e] * (x[gather(row)] . factor[adapter, e]))       (fp32, k ascending)
factor_gradient: gradient[adapter, e] = cast(sum over its rows of left row^T . right row)
"""

import triton
import triton.language as tl

from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.common.kernels.rows import source_rows
from moe_core.ops.lora.kernels.dropout import kept


@triton.jit
def group_rows(virtual_start, slot_of_row, group, first, num_rows, num_slots, BLOCK: tl.constexpr):
    """Return (rows, slots, which exist) from row `first` of a group on. Layouts must not lead outside the buffers."""
    start = tl.minimum(tl.maximum(tl.load(virtual_start + group), 0), num_rows)
    end = tl.minimum(tl.load(virtual_start + group + 1), num_rows)
    rows = start.to(tl.int64) + first + tl.arange(0, BLOCK)
    exists = rows < end
    slots = tl.load(slot_of_row + rows, mask=exists, other=0)
    return rows, tl.minimum(tl.maximum(slots, 0), num_slots - 1), exists


@triton.jit
def shrink(
    x, factor, scale, ranks, seed, virtual_start, slot_of_row, schedule, low, num_rows, num_slots,
    D: tl.constexpr, RANK: tl.constexpr, NUM_EXPERTS: tl.constexpr, SLOTS: tl.constexpr, X_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, EXPERT_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, R_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, KEPT: tl.constexpr, THRESHOLD: tl.constexpr, MASKED: tl.constexpr,
    SALT: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of low `[rows, RANK]`. Columns behind an adapter's rank, and rows without one, become zeros.

    THRESHOLD: of dropout, 0: none. KEPT: 1 / (1 - probability). MASKED: x's elements are masked by `token` or `slot`,
    or (None) not.
    """
    join(PDL)
    group = tl.load(schedule + 2 * tl.program_id(0) + 1)
    if group < 0:
        return
    expert, adapter = group // (SLOTS + 1), group % (SLOTS + 1) - 1
    first = tl.load(schedule + 2 * tl.program_id(0)) * BLOCK_M
    rows, slots, exists = group_rows(virtual_start, slot_of_row, group, first, num_rows, num_slots, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if adapter >= 0:
        rank = tl.load(ranks + adapter * NUM_EXPERTS + expert)
        used = columns < tl.minimum(rank, RANK)
        matrix = factor + adapter.to(tl.int64) * SLOT_STRIDE + expert.to(tl.int64) * EXPERT_STRIDE
        x_rows = x + source_rows(rows, slots, GATHER, TOP_K)[:, None] * X_STRIDE
        for start in range(0, D, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            left = tl.load(x_rows + k[None, :], mask=exists[:, None] & (k < D)[None, :], other=0.0)
            if THRESHOLD > 0 and MASKED is not None:
                left = tl.where(kept(seed, source_rows(rows, slots, MASKED, TOP_K), k, THRESHOLD, SALT), left, 0.0)
            pointers = matrix + k[:, None] * K_STRIDE + columns[None, :] * R_STRIDE
            # A mask of unused columns (their sums become zeros) would split the reads into single elements.
            right = tl.load(pointers, mask=(k < D)[:, None] & (columns < RANK)[None, :], other=0.0).to(left.dtype)
            total = tl.dot(left, right, total, input_precision=INPUT_PRECISION)
        total = total * (tl.load(scale + adapter * NUM_EXPERTS + expert) * KEPT)
        # A row with inf or NaN would make NaN of the zeros.
        total = tl.where(used[None, :], total, 0.0)
    mask = exists[:, None] & (columns < RANK)[None, :]
    tl.store(low + rows[:, None] * RANK + columns[None, :], total.to(low.dtype.element_ty), mask=mask)


@triton.jit
def factor_gradient(
    left, right, row_weight, seed, virtual_start, slot_of_row, gradient, num_rows, num_slots,
    M: tl.constexpr, N: tl.constexpr, NUM_EXPERTS: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr,
    LEFT_STRIDE: tl.constexpr, RIGHT_STRIDE: tl.constexpr, TOP_K: tl.constexpr, LEFT_GATHER: tl.constexpr,
    RIGHT_GATHER: tl.constexpr, THRESHOLD: tl.constexpr, MASKED: tl.constexpr, SALT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of gradient `[SLOTS, experts, M, N]`. SHARED: one gradient of all experts, summed in order.

    row_weight fp32 by slot, if not None, multiplies left, which is rounded again. Others as in `shrink`.
    """
    plane = tl.program_id(2)
    adapter = plane if SHARED else plane // NUM_EXPERTS
    first_expert = plane * 0 if SHARED else plane % NUM_EXPERTS
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for expert in range(first_expert, first_expert + (NUM_EXPERTS if SHARED else 1)):
        group = expert * (SLOTS + 1) + 1 + adapter
        size = tl.load(virtual_start + group + 1) - tl.load(virtual_start + group)
        for first in range(0, size, BLOCK_K):
            rows, slots, exists = group_rows(virtual_start, slot_of_row, group, first, num_rows, num_slots, BLOCK_K)
            pointers = left + source_rows(rows, slots, LEFT_GATHER, TOP_K)[:, None] * LEFT_STRIDE + m[None, :]
            a = tl.load(pointers, mask=exists[:, None] & (m < M)[None, :], other=0.0)
            if row_weight is not None:
                weight = tl.load(row_weight + slots, mask=exists, other=0.0)
                a = (a.to(tl.float32) * weight[:, None]).to(a.dtype)
            if THRESHOLD > 0 and MASKED is not None:
                a = tl.where(kept(seed, source_rows(rows, slots, MASKED, TOP_K), m, THRESHOLD, SALT), a, 0.0)
            pointers = right + source_rows(rows, slots, RIGHT_GATHER, TOP_K)[:, None] * RIGHT_STRIDE + n[None, :]
            b = tl.load(pointers, mask=exists[:, None] & (n < N)[None, :], other=0.0)
            total = tl.dot(tl.trans(a), b, total, input_precision=INPUT_PRECISION)
    offsets = plane.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
    tl.store(gradient + offsets, total.to(gradient.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
