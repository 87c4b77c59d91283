"""Schedules: the (row block, expert) of each program of a grouped matmul."""

import triton
import triton.language as tl


@triton.jit
def fill(array, first, last, step, BLOCK: tl.constexpr):
    empty = tl.full((BLOCK,), -1, tl.int32)
    for start in range(first, last, step):
        offsets = start + tl.arange(0, BLOCK)
        tl.store(array + offsets, empty, mask=offsets < last)


@triton.jit
def write_schedule(sizes, schedule, max_blocks, program, num_programs, BLOCK_M: tl.constexpr, BLOCK_FILL: tl.constexpr):
    """Write this program's share of the schedule int32 `[max_blocks, 2]` of group sizes `[EXPERTS]` (zero-padded).

        starts = exclusive cumsum of ceil(sizes / BLOCK_M),  row starts[expert] + block = (block, expert)

    Programs take turns with the first blocks of all experts, then the second ones. Example, sizes [3, 0, 2], BLOCK_M 2:
    starts [0, 2, 2], rows (0, 0), (1, 0), (0, 2), then idle (-1, -1).
    """
    experts = tl.arange(0, sizes.shape[0])
    # Sizes are not trusted: no row behind the schedule is written.
    blocks = tl.cdiv(tl.minimum(tl.maximum(sizes, 0), max_blocks * BLOCK_M), BLOCK_M)
    starts = tl.cumsum(blocks, axis=0) - blocks
    # In int64: a row a step past the end, or twice the number of rows, may not fit into int32.
    step = num_programs.to(tl.int64)
    for block in range(program.to(tl.int64), tl.max(blocks, axis=0), step):
        busy = (block < blocks) & (starts + block < max_blocks)
        row = schedule + 2 * (starts + block)
        tl.store(row, tl.where(busy, block, -1).to(tl.int32), mask=busy)
        tl.store(row + 1, experts, mask=busy)
    idle = 2 * tl.minimum(tl.sum(blocks, axis=0), max_blocks).to(tl.int64)
    first = idle + program.to(tl.int64) * BLOCK_FILL
    fill(schedule, first, 2 * max_blocks.to(tl.int64), step * BLOCK_FILL, BLOCK_FILL)


@triton.jit
def even_block(size, block, blocks, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return (first row, rows) of one of the ceil(size / (ROWS * CHUNKS)) row blocks of a group of `size` rows, cut
    evenly between chunks of ROWS rows. The first few blocks have CHUNKS - 1 chunks, so that none is a low rest.
    Example, ROWS 64, CHUNKS 3: 200 rows are 128 + 72, 300 are 128 + 172."""
    low = CHUNKS * blocks - tl.cdiv(size, ROWS)
    first = (CHUNKS * block - tl.minimum(block, low)) * ROWS
    height = tl.where(block < low, CHUNKS - 1, CHUNKS) * ROWS
    return first, tl.minimum(size - first, height)


@triton.jit
def spread_block(block, blocks, SECTIONS: tl.constexpr):
    """Return the row block that is visited as number `block` if a group's sections take turns. Groups order rows by
    source rank, so blocks in progress have results for different ranks. 10 blocks in 4 sections: 0, 3, 6, 8, 1, 4, 7,
    9, 2, 5."""
    each, longer = blocks // SECTIONS, blocks % SECTIONS
    whole = block < each * SECTIONS
    section = tl.where(whole, block % SECTIONS, block - each * SECTIONS)
    return section * each + tl.minimum(section, longer) + tl.where(whole, block // SECTIONS, each)


@triton.jit
def schedule(
    group_sizes, schedule, max_blocks,
    NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_FILL: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    sizes = tl.load(group_sizes + experts, mask=experts < NUM_EXPERTS, other=0)
    write_schedule(sizes, schedule, max_blocks, tl.program_id(0), tl.num_programs(0), BLOCK_M, BLOCK_FILL)


@triton.jit
def zero(counters, COUNT: tl.constexpr):
    tl.store(counters + tl.arange(0, COUNT), tl.zeros((COUNT,), dtype=tl.int32))
