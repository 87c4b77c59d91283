"""Schedules: which (row block, expert) each program of a grouped matmul works on."""

import triton
import triton.language as tl


@triton.jit
def write_schedule(sizes, schedule, max_blocks, program, num_programs, BLOCK_M: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """This program's share of the schedule int32 `[max_blocks, 2]` of group sizes `[EXPERTS]` (zero-padded).

    ends = cumsum(ceil(sizes / BLOCK_M));  row i belongs to the first expert with i < ends[expert]

    Example, sizes [3, 0, 2], BLOCK_M 2: ends [2, 2, 3], rows (0, 0), (1, 0), (0, 2), then idle (-1, -1).
    """
    blocks = (sizes + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, axis=0)
    starts = ends - blocks
    total = tl.sum(blocks, axis=0)
    # In int64: the first row of a program past the end may not fit into int32.
    for first in range(program.to(tl.int64) * BLOCK_ROWS, max_blocks, num_programs.to(tl.int64) * BLOCK_ROWS):
        rows = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int32)
        # Threads lie along the last axis (rows), so that reducing along the first one needs no exchange between lanes.
        expert = tl.sum((ends[:, None] <= rows[None, :]).to(tl.int32), axis=0)
        busy = rows < total
        start = tl.gather(starts, tl.where(busy, expert, 0), 0)
        inside = rows < max_blocks
        target = schedule + 2 * rows.to(tl.int64)
        tl.store(target, tl.where(busy, rows - start, -1), mask=inside)
        tl.store(target + 1, tl.where(busy, expert, -1), mask=inside)


@triton.jit
def schedule(
    group_sizes,
    schedule,
    max_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The schedule of given group sizes `[E]`; see `write_schedule`."""
    experts = tl.arange(0, EXPERTS)
    sizes = tl.load(group_sizes + experts, mask=experts < NUM_EXPERTS, other=0)
    write_schedule(sizes, schedule, max_blocks, tl.program_id(0), tl.num_programs(0), BLOCK_M, BLOCK_ROWS)
