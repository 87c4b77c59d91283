"""Gradients of weights: products per group, ragged along the reduction, with the column sums of the bias.

d_weight[g] = cast(into[g] + sum over g's rows of left row^T . right row)       (fp32, rows in order)
"""

import triton
import triton.language as tl

from moe_core.ops.common.kernels.aggregates import Layout, Rows
from moe_core.ops.common.kernels.dot import multiply
from moe_core.ops.common.kernels.rows import source_rows
from moe_core.ops.matmul.portable.kernel import rows_of_group


@triton.jit
def rows_of_step(start, first, size, layout, row_mask, BY_SLOT: tl.constexpr, BLOCK_K: tl.constexpr):
    within = first + tl.arange(0, BLOCK_K)
    exists = within < size
    rows = start.to(tl.int64) + within
    slots = rows
    if BY_SLOT:
        slots = tl.load(layout.slot_of_row + rows, mask=exists, other=-1)
        exists = exists & (slots >= 0) & (slots < layout.num_slots)
    if row_mask is not None:
        exists = exists & (tl.load(row_mask + rows, mask=exists, other=0) != 0)
    return rows, slots, exists


@triton.jit
def weight_gradient(
    left, right, row_weight, row_mask, layer_index, group_sizes, group_start, slot_of_row, into, d_weight, d_bias,
    num_rows, num_slots, part_rows,
    M: tl.constexpr, N: tl.constexpr, LEFT_STRIDE: tl.constexpr, RIGHT_STRIDE: tl.constexpr,
    LEFT_START: tl.constexpr, RIGHT_START: tl.constexpr, LEFT_GATHER: tl.constexpr, RIGHT_GATHER: tl.constexpr,
    TOP_K: tl.constexpr, BY_SLOT: tl.constexpr, BIAS_SIDE: tl.constexpr, PRODUCT: tl.constexpr, DRAINED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one group (program axis 1) of one layer (axis 2): d_weight `[layers, groups, M, N]`.

    left `[*, M]` from column LEFT_START, right `[*, N]` from RIGHT_START. group_sizes None: dense, group p has
    part_rows rows from p * part_rows on. d_bias `[layers, groups, M or N]`: column sums of the side BIAS_SIDE, times
    row_weight by slot. d_weight None: only the bias. Rows with row_mask 0 are not read. A group without rows, or of
    another layer than layer_index[0], sums nothing.
    """
    # Without d_weight the grid has the tiles of one side only.
    tiles_n: tl.constexpr = 1 if d_weight is None and BIAS_SIDE == "left" else (N + BLOCK_N - 1) // BLOCK_N
    group = tl.program_id(1)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    if group_sizes is None:
        start = group * part_rows
        size = tl.minimum(part_rows, num_rows - start)
    else:
        start, size = rows_of_group(group_sizes, group_start, group, num_rows, "")
    if layer_index is not None:
        size = tl.where(tl.load(layer_index) == tl.program_id(2), size, 0)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    plane = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + group

    layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
    if d_weight is not None:
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, size, BLOCK_K):
            rows, slots, exists = rows_of_step(start, first, size, layout, row_mask, BY_SLOT, BLOCK_K)
            left_rows = left + source_rows(rows, slots, LEFT_GATHER, TOP_K)[:, None] * LEFT_STRIDE + LEFT_START
            right_rows = right + source_rows(rows, slots, RIGHT_GATHER, TOP_K)[:, None] * RIGHT_STRIDE + RIGHT_START
            if M % BLOCK_M == 0:
                a = tl.load(left_rows + m[None, :], mask=exists[:, None], other=0.0)
            else:
                a = tl.load(left_rows + m[None, :], mask=exists[:, None] & (m < M)[None, :], other=0.0)
            if N % BLOCK_N == 0:
                b = tl.load(right_rows + n[None, :], mask=exists[:, None], other=0.0)
            else:
                b = tl.load(right_rows + n[None, :], mask=exists[:, None] & (n < N)[None, :], other=0.0)
            accumulator = multiply(tl.trans(a), b, accumulator, PRODUCT, DRAINED)
        offsets = plane * M * N + m[:, None] * N + n[None, :]
        inside = (m < M)[:, None] & (n < N)[None, :]
        if into is not None:
            accumulator = tl.load(into + offsets, mask=inside, other=0.0) + accumulator
        tl.store(d_weight + offsets, accumulator.to(d_weight.dtype.element_ty), mask=inside)

    # Read the rows again, for the first tile of every column: sums in the loop above would cost registers.
    if BIAS_SIDE == "left":
        if tile_n == 0:
            values = Rows(left, None, LEFT_STRIDE, LEFT_GATHER, LEFT_START)
            sums = column_sums(values, row_weight, layout, row_mask, start, size, m, m < M, BY_SLOT, BLOCK_K)
            tl.store(d_bias + plane * M + m, sums.to(d_bias.dtype.element_ty), mask=m < M)
    elif BIAS_SIDE == "right":
        if tile_m == 0:
            values = Rows(right, None, RIGHT_STRIDE, RIGHT_GATHER, RIGHT_START)
            sums = column_sums(values, row_weight, layout, row_mask, start, size, n, n < N, BY_SLOT, BLOCK_K)
            tl.store(d_bias + plane * N + n, sums.to(d_bias.dtype.element_ty), mask=n < N)


@triton.jit
def column_sums(
    values, row_weight, layout, row_mask, start, size, columns, inside, BY_SLOT: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return fp32 sums of a group's rows, times row_weight by slot: BLOCK_K partial sums, then a tree, written out
    because the order of a layout differs without a product."""
    partial = tl.zeros((BLOCK_K, columns.shape[0]), dtype=tl.float32)
    for first in range(0, size, BLOCK_K):
        rows, slots, exists = rows_of_step(start, first, size, layout, row_mask, BY_SLOT, BLOCK_K)
        x_rows = source_rows(rows, slots, values.GATHER, layout.TOP_K)
        pointers = values.values + values.START + x_rows[:, None] * values.STRIDE + columns[None, :]
        tile = tl.load(pointers, mask=exists[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if row_weight is not None:
            tile *= tl.load(row_weight + slots, mask=exists, other=0.0)[:, None]
        partial += tile
    for _ in tl.static_range(16):
        if partial.shape[0] > 1:
            partial = tl.sum(tl.reshape(partial, (2, partial.shape[0] // 2, partial.shape[1])), axis=0)
    return tl.reshape(partial, (columns.shape[0],))


@triton.jit
def sum_parts(parts, layer_index, into, result, num_parts, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """result[l] = cast(into[l] + sum over p = 0, 1, ... of parts[p]) of SIZE elements each, fp32, in that order. With
    layer_index only that layer (program axis 1) has a sum."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < SIZE
    count = num_parts
    if layer_index is not None:
        count = tl.where(tl.load(layer_index) == tl.program_id(1), num_parts, 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(0, count):
        total += tl.load(parts + tl.cast(part, tl.int64) * SIZE + elements, mask=mask, other=0.0)
    target = tl.program_id(1).to(tl.int64) * SIZE + elements
    if into is not None:
        total = tl.load(into + target, mask=mask, other=0.0) + total
    tl.store(result + target, total.to(result.dtype.element_ty), mask=mask)
