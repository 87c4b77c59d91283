"""Ragged layouts: a stable counting sort of slots by expert, without atomics and without the host.

Few slots: `layout_at_once`. Many: `count_blocks`, or `topk.route` while routing, then `place_blocks`.
"""

import triton
import triton.language as tl

from moe_core.ops.common.kernels.aggregates import aggregate_of
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.routing.kernels.schedule import fill, write_schedule

#: Arrays of a layout to write, and their sizes. max_rows None: groups have no bound.
Groups = aggregate_of(
    "Groups",
    """group_sizes group_start slot_of_row row_of_slot invalid_ids schedule_0 schedule_1 tile_counters overflow
    capacity max_blocks_0 max_blocks_1 max_rows NUM_EXPERTS ALIGNMENT COUNTERS BLOCK_M_0 BLOCK_M_1 EXPERTS BLOCK_PAD
    BLOCK_FILL COUNT_LOST""",
    COUNT_LOST=False,
)


@triton.jit
def to_local(ids, expert_map, NUM_GLOBAL: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Return (local expert of each id or -1, True if the id is outside [-1, NUM_GLOBAL))."""
    known = (ids >= 0) & (ids < NUM_GLOBAL)
    invalid = (ids < -1) | (ids >= NUM_GLOBAL)
    if expert_map is not None:
        ids = tl.load(expert_map + ids, mask=known, other=-1)
        known = (ids >= 0) & (ids < NUM_EXPERTS)
    return tl.where(known, ids, -1), invalid


@triton.jit
def local_experts(
    ids, expert_map, token_mask, slots, num_slots,
    NUM_GLOBAL: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """`to_local` of the ids of slots, of any integer type. -1 past num_slots and for masked tokens."""
    inside = slots < num_slots
    if ids.dtype.element_ty == tl.int32:
        experts = tl.load(ids + slots, mask=inside, other=-1)
    else:
        experts = tl.load(ids + slots, mask=inside, other=0)
        # Ids beyond int32 stay invalid.
        if ids.dtype.element_ty == tl.int64:
            experts = tl.minimum(tl.maximum(experts, -2), NUM_GLOBAL)
        elif ids.dtype.element_ty == tl.uint64:
            experts = tl.minimum(experts, tl.full((), NUM_GLOBAL, tl.uint64))
        elif ids.dtype.element_ty == tl.uint32:
            experts = tl.minimum(experts.to(tl.int64), NUM_GLOBAL)
        experts = tl.where(inside, experts.to(tl.int32), -1)
    if token_mask is not None:
        kept = tl.load(token_mask + slots // TOP_K, mask=inside, other=0)
        experts = tl.where(kept != 0, experts, -1)
    return to_local(experts, expert_map, NUM_GLOBAL, NUM_EXPERTS)


@triton.jit
def count_experts(local, EXPERTS: tl.constexpr):
    """Count how many of local (-1: none) are each expert, int32 `[EXPERTS]`. Triton 3.6 counts an element once per
    register that holds it, and layouts of a choice along an axis may repeat registers, so elements are gathered first.
    `compiler.require_counted_once` checks this."""
    local = tl.gather(local, tl.arange(0, local.shape[0]), 0)
    return tl.histogram(local, EXPERTS, mask=local >= 0)


@triton.jit
def rank_slots(local, before):
    """Return (rank of each slot in its expert, before with these slots added).

    local: experts of consecutive slots, -1: none (with any rank). before `[EXPERTS]`: earlier slots of each expert.
    Blocks of 128 take turns, because all pairs of a block are compared.

    Example, local [4, 2, 4, 4], before 0 but for before[4] = 5: ranks [5, 0, 6, 7].
    """
    SLOTS: tl.constexpr = local.shape[0]
    BLOCK: tl.constexpr = SLOTS if SLOTS < 128 else 128
    slots = tl.arange(0, SLOTS)
    position = tl.arange(0, BLOCK)
    earlier = position[:, None] < position[None, :]
    ranks = tl.zeros((SLOTS,), dtype=tl.int32)
    # Gathers of blocks leave the compiler free to spread the pairs over all threads.
    for block in range(SLOTS // BLOCK):
        experts = tl.gather(local, block * BLOCK + position, 0)
        # Threads run along the last axis, so that sums along the first need no exchange between lanes.
        rank = tl.sum((earlier & (experts[:, None] == experts[None, :])).to(tl.int32), axis=0)
        rank += tl.gather(before, tl.where(experts >= 0, experts, 0), 0)
        ranks = tl.where(slots // BLOCK == block, tl.gather(rank, slots % BLOCK, 0), ranks)
        before += tl.histogram(experts, before.shape[0], mask=experts >= 0)
    return ranks, before


@triton.jit
def group_rows(sizes, groups):
    """Return the rows of each group with padding. Sizes [3, 0, 2], ALIGNMENT 4: [4, 0, 4]; max_rows 3: [3, 3, 3]."""
    if groups.max_rows is not None:
        experts = tl.arange(0, sizes.shape[0])
        return tl.where(experts < groups.NUM_EXPERTS, groups.max_rows, 0)
    else:
        return (sizes + (groups.ALIGNMENT - 1)) // groups.ALIGNMENT * groups.ALIGNMENT


@triton.jit
def first_rows(sizes, groups):
    owned = group_rows(sizes, groups)
    return tl.cumsum(owned, axis=0) - owned


@triton.jit
def within(sizes, capacity):
    """Cut groups to the first `capacity` rows: sizes [3, 4, 2], capacity 5: [3, 2, 0]."""
    starts = tl.cumsum(sizes, axis=0) - sizes
    return tl.minimum(sizes, tl.maximum(capacity - starts, 0))


@triton.jit
def write_groups(sizes, groups, program, num_programs):
    """Write what follows from the group sizes `[EXPERTS]`, shared by num_programs, and return the starts, [0] +
    cumsum(rows owned). Rows that no slot fills get -1 in slot_of_row. COUNTERS tile counters start at 0."""
    BLOCK_PAD: tl.constexpr = groups.BLOCK_PAD
    BLOCK_FILL: tl.constexpr = groups.BLOCK_FILL
    experts = tl.arange(0, sizes.shape[0])
    owned = group_rows(sizes, groups)
    starts = first_rows(sizes, groups)
    total = tl.sum(owned, axis=0)
    if program == 0:
        tl.store(groups.group_start + experts, starts, mask=experts < groups.NUM_EXPERTS)
        tl.store(groups.group_start + groups.NUM_EXPERTS, total)
        if groups.tile_counters is not None:
            counters = groups.tile_counters + tl.arange(0, groups.COUNTERS)
            tl.store(counters, tl.zeros((groups.COUNTERS,), dtype=tl.int32))
    # In int64: the first row of a program past the end may not fit into int32.
    step = num_programs.to(tl.int64) * BLOCK_FILL
    fill(groups.slot_of_row, total + program.to(tl.int64) * BLOCK_FILL, groups.capacity, step, BLOCK_FILL)
    if groups.ALIGNMENT > 1 or groups.max_rows is not None:
        padding = owned - sizes
        step = num_programs.to(tl.int64) * BLOCK_PAD
        for first in range(program.to(tl.int64) * BLOCK_PAD, tl.max(padding, axis=0), step):
            offsets = first + tl.arange(0, BLOCK_PAD)[None, :]
            rows = (starts + sizes)[:, None] + offsets
            tl.store(groups.slot_of_row + rows, tl.full(rows.shape, -1, tl.int32), mask=offsets < padding[:, None])
    if groups.schedule_0 is not None:
        write_schedule(
            sizes, groups.schedule_0, groups.max_blocks_0, program, num_programs, groups.BLOCK_M_0, BLOCK_FILL
        )
    if groups.schedule_1 is not None:
        write_schedule(
            sizes, groups.schedule_1, groups.max_blocks_1, program, num_programs, groups.BLOCK_M_1, BLOCK_FILL
        )
    return starts


@triton.jit
def place_slots(slots, inside, local, rank, starts, groups):
    """Write both directions of slot <-> row = start of the expert + rank. A rank past max_rows has no row (-1), nor
    with an overflow a row past capacity. Slots that are not inside have no local expert."""
    placed = local >= 0
    row = tl.gather(starts, tl.where(placed, local, 0), 0) + rank
    if groups.max_rows is not None:
        placed = placed & (rank < groups.max_rows)
    if groups.overflow is not None:
        placed = placed & (row < groups.capacity)
    tl.store(groups.row_of_slot + slots, tl.where(placed, row, -1), mask=inside)
    tl.store(groups.slot_of_row + row, slots.to(tl.int32), mask=placed)


@triton.jit
def kept_sizes(counted, groups):
    sizes = counted
    if groups.max_rows is not None:
        sizes = tl.minimum(counted, groups.max_rows)
    if groups.overflow is not None:
        sizes = within(counted, groups.capacity)
    return sizes


@triton.jit
def write_sizes(sizes, groups):
    experts = tl.arange(0, groups.EXPERTS)
    tl.store(groups.group_sizes + experts, sizes, mask=experts < groups.NUM_EXPERTS)


@triton.jit
def write_counts(counted, sizes, invalid, groups):
    if groups.COUNT_LOST:
        invalid += tl.sum(counted - sizes, axis=0)
    tl.store(groups.invalid_ids, invalid)
    if groups.overflow is not None:
        tl.store(groups.overflow, tl.sum(counted - sizes, axis=0))


@triton.jit
def layout_at_once(
    ids, expert_map, token_mask, group_sizes, group_start, slot_of_row, row_of_slot, invalid_ids, schedule_0,
    schedule_1, tile_counters, overflow, given_weights, row_weight, num_slots, capacity, max_blocks_0, max_blocks_1,
    max_rows,
    COUNT_LOST: tl.constexpr, NUM_GLOBAL: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    ALIGNMENT: tl.constexpr, COUNTERS: tl.constexpr, BLOCK_M_0: tl.constexpr, BLOCK_M_1: tl.constexpr,
    BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_PAD: tl.constexpr,
    BLOCK_FILL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Make the whole layout in one launch. Each program counts all slots and places a block of BLOCK_S.

        counted[e], before[e] = slots of expert e: all of them, and those ahead of this program's block
        row of slot = start[e] + before[e] + rank of the slot within the block

    Example, local experts [2, 0, 0, -1], BLOCK_S 2: counted [2, 0, 1], before [1, 0, 1] in the second block,
    row_of_slot [2, 0, 1, -1], slot_of_row [1, 2, 0, -1].

    overflow: slots beyond `capacity` rows, None: all have room. COUNT_LOST: they also count as invalid ids. row_weight:
    gets given_weights, by slot, in fp32.
    """
    join(PDL)
    groups = Groups(
        group_sizes, group_start, slot_of_row, row_of_slot, invalid_ids, schedule_0, schedule_1, tile_counters,
        overflow, capacity, max_blocks_0, max_blocks_1, max_rows, NUM_EXPERTS, ALIGNMENT, COUNTERS, BLOCK_M_0,
        BLOCK_M_1, EXPERTS, BLOCK_PAD, BLOCK_FILL, COUNT_LOST,
    )  # fmt: skip
    block = tl.program_id(0) * BLOCK_S
    if given_weights is not None:
        weighted = block + tl.arange(0, BLOCK_S)
        weights = tl.load(given_weights + weighted, mask=weighted < num_slots, other=0.0)
    counted = tl.zeros((EXPERTS,), dtype=tl.int32)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    wrong = tl.zeros((CHUNK,), dtype=tl.int32)
    for chunk in range(0, num_slots, CHUNK):
        slots = chunk + tl.arange(0, CHUNK)
        local, invalid = local_experts(ids, expert_map, token_mask, slots, num_slots, NUM_GLOBAL, NUM_EXPERTS, TOP_K)
        wrong += invalid.to(tl.int32)
        counted += tl.histogram(local, EXPERTS, mask=local >= 0)
        if chunk < block:
            before += tl.histogram(local, EXPERTS, mask=(local >= 0) & (slots < block))
    sizes = kept_sizes(counted, groups)
    if tl.program_id(0) == 0:
        write_sizes(sizes, groups)
        write_counts(counted, sizes, tl.sum(wrong, axis=0), groups)
    starts = write_groups(sizes, groups, tl.program_id(0), tl.num_programs(0))
    slots = block + tl.arange(0, BLOCK_S)
    local, _ = local_experts(ids, expert_map, token_mask, slots, num_slots, NUM_GLOBAL, NUM_EXPERTS, TOP_K)
    rank, _ = rank_slots(local, before)
    inside = slots < num_slots
    place_slots(slots, inside, local, rank, starts, groups)
    if given_weights is not None:
        tl.store(row_weight + slots, weights.to(tl.float32), mask=inside)


@triton.jit
def count_blocks(
    ids, expert_map, token_mask, block_counts, block_invalid, num_slots, block_slots,
    NUM_GLOBAL: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """block_counts[b, e] = slots of expert e in block b (block_slots of them), block_invalid[b] = its invalid ids."""
    block = tl.program_id(0).to(tl.int64)
    last = tl.minimum((block + 1) * block_slots, num_slots)
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    wrong = tl.zeros((CHUNK,), dtype=tl.int32)
    for first in range(block * block_slots, last, CHUNK):
        slots = first + tl.arange(0, CHUNK)
        local, invalid = local_experts(ids, expert_map, token_mask, slots, last, NUM_GLOBAL, NUM_EXPERTS, TOP_K)
        wrong += invalid.to(tl.int32)
        counts += tl.histogram(local, EXPERTS, mask=local >= 0)
    experts = tl.arange(0, EXPERTS)
    tl.store(block_counts + block * NUM_EXPERTS + experts, counts, mask=experts < NUM_EXPERTS)
    tl.store(block_invalid + block, tl.sum(wrong, axis=0))


@triton.jit
def sum_blocks(
    block_counts, block, num_blocks, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Return counts added up over all blocks, and over the blocks ahead, int32 `[EXPERTS]` each."""
    experts = tl.arange(0, EXPERTS)[None, :]
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        blocks = first + tl.arange(0, BLOCK_B)[:, None]
        mask = (blocks < num_blocks) & (experts < NUM_EXPERTS)
        counts = tl.load(block_counts + blocks.to(tl.int64) * NUM_EXPERTS + experts, mask=mask, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(blocks < block, counts, 0), axis=0)
    return total, before


@triton.jit
def place_blocks(
    ids, expert_map, token_mask, block_counts, block_invalid, group_sizes, group_start, slot_of_row, row_of_slot,
    invalid_ids, schedule_0, schedule_1, tile_counters, overflow, given_weights, row_weight, num_slots, block_slots,
    num_blocks, capacity, max_blocks_0, max_blocks_1, max_rows,
    COUNT_LOST: tl.constexpr, NUM_GLOBAL: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    ALIGNMENT: tl.constexpr, COUNTERS: tl.constexpr, BLOCK_M_0: tl.constexpr, BLOCK_M_1: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_B: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_PAD: tl.constexpr,
    BLOCK_FILL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `layout_at_once` with counts of blocks: row of slot = start[e] + slots of e in blocks ahead + rank within its
    block. The first num_blocks programs place a block each, BLOCK_S slots at a time, the others share `write_groups`
    and totals. block_invalid None: `topk.route` made the ids, all valid."""
    join(PDL)
    groups = Groups(
        group_sizes, group_start, slot_of_row, row_of_slot, invalid_ids, schedule_0, schedule_1, tile_counters,
        overflow, capacity, max_blocks_0, max_blocks_1, max_rows, NUM_EXPERTS, ALIGNMENT, COUNTERS, BLOCK_M_0,
        BLOCK_M_1, EXPERTS, BLOCK_PAD, BLOCK_FILL, COUNT_LOST,
    )  # fmt: skip
    block = tl.program_id(0)
    start = block.to(tl.int64) * block_slots
    last = tl.minimum(start + block_slots, num_slots)
    slots = start + tl.arange(0, BLOCK_S)
    local, _ = local_experts(ids, expert_map, token_mask, slots, last, NUM_GLOBAL, NUM_EXPERTS, TOP_K)
    counted, before = sum_blocks(block_counts, block, num_blocks, NUM_EXPERTS, EXPERTS, BLOCK_B)
    sizes = kept_sizes(counted, groups)
    if block >= num_blocks:
        if block == num_blocks:
            write_sizes(sizes, groups)
            wrong = tl.zeros((BLOCK_FILL,), dtype=tl.int32)
            if block_invalid is not None:
                for first in range(0, num_blocks, BLOCK_FILL):
                    blocks = first + tl.arange(0, BLOCK_FILL)
                    wrong += tl.load(block_invalid + blocks, mask=blocks < num_blocks, other=0)
            write_counts(counted, sizes, tl.sum(wrong, axis=0), groups)
        write_groups(sizes, groups, block - num_blocks, tl.num_programs(0) - num_blocks)
    else:
        starts = first_rows(sizes, groups)
        for first in range(start, last, BLOCK_S):
            slots = first + tl.arange(0, BLOCK_S)
            # Load the next ids while these are ranked.
            ahead, _ = local_experts(ids, expert_map, token_mask, slots + BLOCK_S, last, NUM_GLOBAL, NUM_EXPERTS, TOP_K)
            if given_weights is not None:
                weights = tl.load(given_weights + slots, mask=slots < last, other=0.0)
            rank, before = rank_slots(local, before)
            inside = slots < last
            place_slots(slots, inside, local, rank, starts, groups)
            if given_weights is not None:
                tl.store(row_weight + slots, weights.to(tl.float32), mask=inside)
            local = ahead
