"""Layouts of rows that are already in the order of their groups."""

import triton
import triton.language as tl

from moe_core.ops.routing.kernels.schedule import write_schedule


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def group_ends(groups, index, exists, base, num_rows, ENDS: tl.constexpr):
    """Return the end of each group of `index` `[GROUPS]`, int32, from `base` on. Values are not trusted: negative sizes
    and falling ends make empty groups, and rows past num_rows belong to none."""
    values = tl.load(groups + index, mask=exists, other=0).to(tl.int64)
    values = tl.minimum(tl.maximum(values, 0), num_rows)
    if ENDS:
        ends = tl.maximum(tl.associative_scan(values, 0, _larger), base)
    else:
        ends = tl.cumsum(values, axis=0) + base
    return tl.minimum(ends, num_rows).to(tl.int32)


@triton.jit
def fill_zeros(y, first, last, step, BLOCK: tl.constexpr):
    zeros = tl.zeros((BLOCK,), dtype=y.dtype.element_ty)
    for start in range(first, last, step):
        offsets = start + tl.arange(0, BLOCK)
        tl.store(y + offsets, zeros, mask=offsets < last)


@triton.jit
def row_groups(
    groups, first_group, group_sizes, group_start, slot_of_row, schedule, tile_counters, y, num_rows, max_blocks,
    TOTAL: tl.constexpr, NUM_GROUPS: tl.constexpr, ENDS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the layout of rows in the order of their groups: slot r is row r, and rows outside of groups have none.

    groups, integers `[TOTAL]`: sizes, or with ENDS the row after each group. The layout has NUM_GROUPS of them
    from first_group on. With schedule: write it too, zero tile_counters and the rows of y `[num_rows, WIDTH]` outside
    of groups. Programs share the rows. Example, sizes [2, 0, 1], 4 rows: group_start [0, 2, 2, 3], slot_of_row [0, 1,
    2, -1].
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    places = tl.arange(0, GROUPS)
    skipped = tl.full((), 0, tl.int64)
    base = tl.full((), 0, tl.int32)
    if first_group is not None:
        skipped = tl.minimum(tl.maximum(tl.load(first_group).to(tl.int64), 0), TOTAL)
        base = tl.max(group_ends(groups, places, places < skipped, base, num_rows, ENDS), axis=0)
    index = skipped + places
    local = (places < NUM_GROUPS) & (index < TOTAL)
    ends = group_ends(groups, index, local, base, num_rows, ENDS)
    starts = group_ends(groups, index - 1, local & (places > 0), base, num_rows, ENDS)
    sizes = tl.where(local, ends - starts, 0)
    last = tl.maximum(tl.max(tl.where(local, ends, 0), axis=0), base)
    if program == 0:
        tl.store(group_sizes + places, sizes, mask=places < NUM_GROUPS)
        tl.store(group_start + places, tl.where(local, starts, last), mask=places < NUM_GROUPS)
        tl.store(group_start + NUM_GROUPS, last)
        if tile_counters is not None:
            tl.store(tile_counters + tl.arange(0, 2), tl.zeros((2,), dtype=tl.int32))
    # In int64: a row a step past the end may not fit into int32.
    begin, end = program.to(tl.int64) * BLOCK, num_rows.to(tl.int64)
    step = programs.to(tl.int64) * BLOCK
    for row in range(begin, end, step):
        rows = row + tl.arange(0, BLOCK)
        inside = (rows >= base) & (rows < last)
        tl.store(slot_of_row + rows, tl.where(inside, rows, -1).to(tl.int32), mask=rows < end)
    if schedule is not None:
        write_schedule(sizes, schedule, max_blocks, program, programs, BLOCK_M, BLOCK)
        fill_zeros(y, begin, base.to(tl.int64) * WIDTH, step, BLOCK)
        fill_zeros(y, begin + last.to(tl.int64) * WIDTH, end * WIDTH, step, BLOCK)
