"""Ragged layouts: a stable counting sort of slots by expert, without atomics and without the host.

Every array of the layout is a sum over counts of slots per expert. Few slots: one kernel whose programs all count every
slot (`layout_at_once`). Many: `count_blocks`, `scan_blocks`, `place_blocks`, each program counting one block of slots.
"""

import triton
import triton.language as tl

from moe_core.kernels.schedule import write_schedule


@triton.jit
def local_experts(
    ids,
    expert_map,
    token_mask,
    slots,
    num_slots,
    NUM_GLOBAL: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """(local expert of each slot or -1, whether its id is outside [-1, NUM_GLOBAL)); none past num_slots."""
    inside = slots < num_slots
    found = tl.load(ids + slots, mask=inside, other=-1)
    if token_mask is not None:
        kept = tl.load(token_mask + slots // TOP_K, mask=inside, other=0)
        found = tl.where(kept != 0, found, -1)
    known = (found >= 0) & (found < NUM_GLOBAL)
    invalid = (found < -1) | (found >= NUM_GLOBAL)
    if expert_map is not None:
        found = tl.load(expert_map + found, mask=known, other=-1)
        known = (found >= 0) & (found < NUM_EXPERTS)
    return tl.where(known, found, -1), invalid


@triton.jit
def rank_in_block(experts, BLOCK: tl.constexpr):
    """How many earlier slots of the block have the same expert: [4, 2, 4, 4] -> [0, 0, 1, 2]."""
    position = tl.arange(0, BLOCK)
    earlier = position[:, None] < position[None, :]
    # Threads lie along the last axis, so that summing along the first one needs no exchange between lanes.
    return tl.sum((earlier & (experts[:, None] == experts[None, :])).to(tl.int32), axis=0)


@triton.jit
def fill_rows(slot_of_row, first, last, step, BLOCK: tl.constexpr):
    """slot_of_row = -1 for the rows of [first, last) in pieces of BLOCK, every `step` rows."""
    empty = tl.full((BLOCK,), -1, tl.int32)
    for start in range(first, last, step):
        rows = start + tl.arange(0, BLOCK)
        tl.store(slot_of_row + rows, empty, mask=rows < last)


@triton.jit
def group_rows(sizes, NUM_EXPERTS: tl.constexpr, ALIGNMENT: tl.constexpr, MAX_ROWS: tl.constexpr):
    """Rows that each group owns, padding included, `[EXPERTS]`, 0 for padding experts.

    Example, sizes [3, 0, 2]: themselves; ALIGNMENT 4: [4, 0, 4]; MAX_ROWS 3: [3, 3, 3].
    """
    if MAX_ROWS is not None:
        experts = tl.arange(0, sizes.shape[0])
        return tl.where(experts < NUM_EXPERTS, MAX_ROWS, 0)
    else:
        return (sizes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


@triton.jit
def write_groups(
    sizes,
    group_start,
    slot_of_row,
    schedule_0,
    schedule_1,
    capacity,
    max_blocks_0,
    max_blocks_1,
    NUM_EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK_M_0: tl.constexpr,
    BLOCK_M_1: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
):
    """Everything that follows from the group sizes `[EXPERTS]`, shared out over the programs; returns the starts.

    group_start = [0] + cumsum(rows owned); rows that no slot fills (behind a group, behind the last one) get -1 in
    slot_of_row; schedules as in `write_schedule`.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, sizes.shape[0])
    owned = group_rows(sizes, NUM_EXPERTS, ALIGNMENT, MAX_ROWS)
    ends = tl.cumsum(owned, axis=0)
    starts = ends - owned
    total = tl.sum(owned, axis=0)
    if program == 0:
        tl.store(group_start + experts, starts, mask=experts < NUM_EXPERTS)
        tl.store(group_start + NUM_EXPERTS, total)
    # In int64: the first row of a program past the end may not fit into int32.
    step = num_programs.to(tl.int64) * BLOCK_FILL
    fill_rows(slot_of_row, total + program.to(tl.int64) * BLOCK_FILL, capacity, step, BLOCK_FILL)
    if ALIGNMENT > 1 or MAX_ROWS is not None:
        for expert in range(program, NUM_EXPERTS, num_programs):
            first = tl.sum(tl.where(experts == expert, starts + sizes, 0), axis=0)
            last = tl.sum(tl.where(experts == expert, ends, 0), axis=0)
            fill_rows(slot_of_row, first, last, BLOCK_FILL, BLOCK_FILL)
    if schedule_0 is not None:
        write_schedule(sizes, schedule_0, max_blocks_0, program, num_programs, BLOCK_M_0, BLOCK_ROWS)
    if schedule_1 is not None:
        write_schedule(sizes, schedule_1, max_blocks_1, program, num_programs, BLOCK_M_1, BLOCK_ROWS)
    return starts


@triton.jit
def place_slots(slots, local, rank, starts, slot_of_row, row_of_slot, num_slots, MAX_ROWS: tl.constexpr):
    """Write both directions of slot <-> row = start of the expert + rank; a rank past MAX_ROWS is dropped (row -1)."""
    placed = local >= 0
    row = tl.gather(starts, tl.where(placed, local, 0), 0) + rank
    if MAX_ROWS is not None:
        placed = placed & (rank < MAX_ROWS)
    tl.store(row_of_slot + slots, tl.where(placed, row, -1), mask=slots < num_slots)
    tl.store(slot_of_row + row, slots.to(tl.int32), mask=placed)


@triton.jit
def layout_at_once(
    ids,
    expert_map,
    token_mask,
    group_sizes,
    group_start,
    slot_of_row,
    row_of_slot,
    invalid_ids,
    schedule_0,
    schedule_1,
    num_slots,
    capacity,
    max_blocks_0,
    max_blocks_1,
    NUM_GLOBAL: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK_M_0: tl.constexpr,
    BLOCK_M_1: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
):
    """The whole layout in one launch; each program counts all slots and places a block of BLOCK_S of them.

    found[e], before[e] = slots of expert e: all of them, and those ahead of this program's block
    row of slot = start[e] + before[e] + rank of the slot within the block

    Example, local experts [2, 0, 0, -1], BLOCK_S 2: found [2, 0, 1]; second block: before [1, 0, 1], so slot 2 (e = 0,
    rank 0) goes to row 0 + 1 + 0 = 1; row_of_slot [2, 0, 1, -1], slot_of_row [1, 2, 0, -1].
    """
    block = tl.program_id(0) * BLOCK_S
    found = tl.zeros((EXPERTS,), dtype=tl.int32)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    wrong = tl.zeros((CHUNK,), dtype=tl.int32)
    for chunk in range(0, num_slots, CHUNK):
        slots = chunk + tl.arange(0, CHUNK)
        local, invalid = local_experts(ids, expert_map, token_mask, slots, num_slots, NUM_GLOBAL, NUM_EXPERTS, TOP_K)
        wrong += invalid.to(tl.int32)
        found += tl.histogram(local, EXPERTS, mask=local >= 0)
        if chunk < block:
            before += tl.histogram(local, EXPERTS, mask=(local >= 0) & (slots < block))
    sizes = found
    if MAX_ROWS is not None:
        sizes = tl.minimum(found, MAX_ROWS)
    if tl.program_id(0) == 0:
        experts = tl.arange(0, EXPERTS)
        tl.store(group_sizes + experts, sizes, mask=experts < NUM_EXPERTS)
        tl.store(invalid_ids, tl.sum(wrong, axis=0))
    starts = write_groups(
        sizes, group_start, slot_of_row, schedule_0, schedule_1, capacity, max_blocks_0, max_blocks_1,
        NUM_EXPERTS, ALIGNMENT, MAX_ROWS, BLOCK_M_0, BLOCK_M_1, BLOCK_ROWS, BLOCK_FILL,
    )  # fmt: skip
    slots = block + tl.arange(0, BLOCK_S)
    local, _ = local_experts(ids, expert_map, token_mask, slots, num_slots, NUM_GLOBAL, NUM_EXPERTS, TOP_K)
    rank = tl.gather(before, tl.where(local >= 0, local, 0), 0) + rank_in_block(local, BLOCK_S)
    place_slots(slots, local, rank, starts, slot_of_row, row_of_slot, num_slots, MAX_ROWS)


@triton.jit
def count_blocks(
    ids,
    expert_map,
    token_mask,
    block_counts,
    block_invalid,
    num_slots,
    NUM_GLOBAL: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """block_counts[b, e] = slots of block b with expert e; block_invalid[b] = its invalid ids."""
    block = tl.program_id(0)
    slots = block.to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    local, invalid = local_experts(ids, expert_map, token_mask, slots, num_slots, NUM_GLOBAL, NUM_EXPERTS, TOP_K)
    counts = tl.histogram(local, EXPERTS, mask=local >= 0)
    experts = tl.arange(0, EXPERTS)
    tl.store(block_counts + block.to(tl.int64) * NUM_EXPERTS + experts, counts, mask=experts < NUM_EXPERTS)
    tl.store(block_invalid + block, tl.sum(invalid.to(tl.int32), axis=0))


@triton.jit
def scan_blocks(
    block_counts,
    block_invalid,
    block_offsets,
    group_sizes,
    invalid_ids,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """block_offsets[b, e] = sum of block_counts[:b, e]; group_sizes[e] = sum of all, at most MAX_ROWS; invalid_ids.

    Example, counts of one expert [2, 0, 3]: offsets [0, 2, 2], size 5.
    """
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    carry = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        blocks = first + tl.arange(0, BLOCK_B)
        cells = blocks.to(tl.int64)[:, None] * NUM_EXPERTS + experts[None, :]
        mask = (blocks < num_blocks)[:, None] & (experts < NUM_EXPERTS)[None, :]
        counts = tl.load(block_counts + cells, mask=mask, other=0)
        tl.store(block_offsets + cells, carry[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        carry += tl.sum(counts, axis=0)
    if MAX_ROWS is not None:
        carry = tl.minimum(carry, MAX_ROWS)
    tl.store(group_sizes + experts, carry, mask=experts < NUM_EXPERTS)
    if tl.program_id(0) == 0:
        wrong = tl.zeros((BLOCK_B,), dtype=tl.int32)
        for first in range(0, num_blocks, BLOCK_B):
            blocks = first + tl.arange(0, BLOCK_B)
            wrong += tl.load(block_invalid + blocks, mask=blocks < num_blocks, other=0)
        tl.store(invalid_ids, tl.sum(wrong, axis=0))


@triton.jit
def place_blocks(
    ids,
    expert_map,
    token_mask,
    block_offsets,
    group_sizes,
    group_start,
    slot_of_row,
    row_of_slot,
    schedule_0,
    schedule_1,
    num_slots,
    capacity,
    max_blocks_0,
    max_blocks_1,
    NUM_GLOBAL: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK_M_0: tl.constexpr,
    BLOCK_M_1: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
):
    """row of slot = start[e] + block_offsets[block of the slot, e] + rank of the slot within its block."""
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    sizes = tl.load(group_sizes + experts, mask=experts < NUM_EXPERTS, other=0)
    slots = block.to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    local, _ = local_experts(ids, expert_map, token_mask, slots, num_slots, NUM_GLOBAL, NUM_EXPERTS, TOP_K)
    before = tl.load(block_offsets + block.to(tl.int64) * NUM_EXPERTS + local, mask=local >= 0, other=0)
    starts = write_groups(
        sizes, group_start, slot_of_row, schedule_0, schedule_1, capacity, max_blocks_0, max_blocks_1,
        NUM_EXPERTS, ALIGNMENT, MAX_ROWS, BLOCK_M_0, BLOCK_M_1, BLOCK_ROWS, BLOCK_FILL,
    )  # fmt: skip
    rank = before + rank_in_block(local, BLOCK_S)
    place_slots(slots, local, rank, starts, slot_of_row, row_of_slot, num_slots, MAX_ROWS)
