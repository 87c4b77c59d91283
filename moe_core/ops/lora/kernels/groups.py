"""Layouts of batches with adapters: virtual expert e * (SLOTS + 1) has expert e's rows without an adapter, the next
SLOTS each adapter's.

Few slots: one launch. Many: `count_blocks`, `sum_blocks`, `place_blocks`, of blocks of 256 slots.
"""

import triton
import triton.language as tl

from moe_core.ops.common.kernels.aggregates import aggregate_of
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.routing.kernels.layout import Groups, local_experts, place_slots, write_groups
from moe_core.ops.routing.kernels.layout import write_sizes as write_virtual_sizes
from moe_core.ops.routing.kernels.schedule import write_schedule

#: Ids and ranks of adapters, and the sizes of their loads.
Adapters = aggregate_of("Adapters", "ids ranks NUM_EXPERTS SLOTS TOP_K NUM_GLOBAL PRESENT BLOCK_E")
#: The experts' part of a layout. EXPERTS: padded, more than experts.
Merged = aggregate_of(
    "Merged",
    """group_sizes group_start schedule_0 schedule_1 max_blocks_0 max_blocks_1 NUM_EXPERTS SLOTS EXPERTS BLOCK_M_0
    BLOCK_M_1 BLOCK_FILL""",
)


@triton.jit
def virtual_experts(ids, expert_map, token_mask, adapters, slots, num_slots):
    """Return (virtual expert of each slot or -1, True if the id is invalid)."""
    TOP_K: tl.constexpr = adapters.TOP_K
    local, invalid = local_experts(
        ids, expert_map, token_mask, slots, num_slots, adapters.NUM_GLOBAL, adapters.NUM_EXPERTS, TOP_K
    )
    adapter = tl.load(adapters.ids + slots // TOP_K, mask=local >= 0, other=-1)
    named = (adapter >= 0) & (adapter < adapters.SLOTS)
    place = tl.where(named, adapter, 0).to(tl.int64) * adapters.NUM_EXPERTS + local
    rank = tl.load(adapters.ranks + place, mask=named & (local >= 0), other=0)
    group = local * (adapters.SLOTS + 1) + tl.where(rank > 0, adapter + 1, 0)
    return tl.where(local >= 0, group, -1), invalid


@triton.jit
def present_adapters(adapters):
    """Return which adapters have a rank above 0, int32 `[PRESENT]`."""
    which = tl.arange(0, adapters.PRESENT)
    largest = tl.zeros((adapters.PRESENT,), dtype=tl.int32)
    for first in range(0, adapters.NUM_EXPERTS, adapters.BLOCK_E):
        experts = first + tl.arange(0, adapters.BLOCK_E)
        inside = (which < adapters.SLOTS)[:, None] & (experts < adapters.NUM_EXPERTS)[None, :]
        places = which[:, None] * adapters.NUM_EXPERTS + experts[None, :]
        largest = tl.maximum(largest, tl.max(tl.load(adapters.ranks + places, mask=inside, other=0), axis=1))
    return (largest > 0).to(tl.int32)


@triton.jit
def missing_adapters(token_mask, adapters, present, slots, num_slots):
    """Return 1 where a slot begins a token with an adapter that does not exist."""
    tokens = slots // adapters.TOP_K
    first = (slots < num_slots) & (slots % adapters.TOP_K == 0)
    counted = first
    if token_mask is not None:
        counted = first & (tl.load(token_mask + tokens, mask=first, other=0) != 0)
    adapter = tl.load(adapters.ids + tokens, mask=first, other=-1)
    named = (adapter >= 0) & (adapter < adapters.SLOTS)
    known = named & (tl.gather(present, tl.where(named, adapter, 0), 0) > 0)
    return (counted & (adapter != -1) & (known == 0)).to(tl.int32)


@triton.jit
def write_merged(sizes, starts, merged, program, num_programs):
    """Write the groups of experts, each the neighbouring virtual experts of one, and their schedules."""
    GROUPS: tl.constexpr = sizes.shape[0]
    experts = tl.arange(0, merged.EXPERTS)
    total = tl.sum(sizes, axis=0)
    place = experts * (merged.SLOTS + 1)
    start = tl.where(place < GROUPS, tl.gather(starts, tl.minimum(place, GROUPS - 1), 0), total)
    place = place + (merged.SLOTS + 1)
    end = tl.where(place < GROUPS, tl.gather(starts, tl.minimum(place, GROUPS - 1), 0), total)
    own_sizes = tl.where(experts < merged.NUM_EXPERTS, end - start, 0)
    if program == 0:
        tl.store(merged.group_start + experts, start, mask=experts <= merged.NUM_EXPERTS)
        tl.store(merged.group_sizes + experts, own_sizes, mask=experts < merged.NUM_EXPERTS)
    if merged.schedule_0 is not None:
        write_schedule(
            own_sizes, merged.schedule_0, merged.max_blocks_0, program, num_programs, merged.BLOCK_M_0,
            merged.BLOCK_FILL,
        )  # fmt: skip
    if merged.schedule_1 is not None:
        write_schedule(
            own_sizes, merged.schedule_1, merged.max_blocks_1, program, num_programs, merged.BLOCK_M_1,
            merged.BLOCK_FILL,
        )  # fmt: skip


@triton.jit
def layout_at_once(
    ids, expert_map, token_mask, adapter_ids, ranks, block_counts, virtual_sizes, virtual_start, slot_of_row,
    row_of_slot, invalid_ids, virtual_schedule, tile_counters, group_sizes, group_start, schedule_0, schedule_1,
    given_weights, row_weight, num_slots, virtual_blocks, max_blocks_0, max_blocks_1,
    NUM_GLOBAL: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    COUNTERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_M_0: tl.constexpr, BLOCK_M_1: tl.constexpr,
    GROUPS: tl.constexpr, EXPERTS: tl.constexpr, PRESENT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_FILL: tl.constexpr,
    BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Make the whole layout. Each program counts all slots. The last three write the virtual schedule, the experts'
    groups, and invalid ids, the others place a block of BLOCK_S each, as the layout of experts. block_counts int32
    `[2 programs, groups]`: each program's counts of all slots and of those ahead of its block. A histogram of 2048
    groups takes 20 us, atomics take 2."""
    join(PDL)
    adapters = Adapters(adapter_ids, ranks, NUM_EXPERTS, SLOTS, TOP_K, NUM_GLOBAL, PRESENT, BLOCK_E)
    groups = Groups(
        virtual_sizes, virtual_start, slot_of_row, row_of_slot, invalid_ids, None, None, tile_counters, None, num_slots,
        virtual_blocks, 0, None, NUM_EXPERTS * (SLOTS + 1), 1, COUNTERS, BLOCK_M, 1, GROUPS, 1, BLOCK_FILL,
    )  # fmt: skip
    program, block = tl.program_id(0), tl.program_id(0) * BLOCK_S
    placing = tl.num_programs(0) - 3
    NUM_GROUPS: tl.constexpr = NUM_EXPERTS * (SLOTS + 1)
    which = tl.arange(0, GROUPS)
    exists = which < NUM_GROUPS
    totals = block_counts + 2 * program * NUM_GROUPS
    before = totals + NUM_GROUPS
    tl.store(totals + which, tl.zeros((GROUPS,), dtype=tl.int32), mask=exists)
    tl.store(before + which, tl.zeros((GROUPS,), dtype=tl.int32), mask=exists)
    tl.debug_barrier()
    wrong = tl.zeros((CHUNK,), dtype=tl.int32)
    for chunk in range(0, num_slots, CHUNK):
        slots = chunk + tl.arange(0, CHUNK)
        local, invalid = virtual_experts(ids, expert_map, token_mask, adapters, slots, num_slots)
        wrong += invalid.to(tl.int32)
        place = tl.where(local >= 0, local, 0)
        tl.atomic_add(totals + place, 1, mask=local >= 0, sem="relaxed")
        tl.atomic_add(before + place, 1, mask=(local >= 0) & (slots < block), sem="relaxed")
    tl.debug_barrier()
    # Atomics pass by the L1 cache.
    counted = tl.load(totals + which, mask=exists, other=0, cache_modifier=".cg")
    if program == placing + 2:
        present = present_adapters(adapters)
        for chunk in range(0, num_slots, CHUNK):
            wrong += missing_adapters(token_mask, adapters, present, chunk + tl.arange(0, CHUNK), num_slots)
        tl.store(invalid_ids, tl.sum(wrong, axis=0))
    elif program == placing + 1:
        merged = Merged(
            group_sizes, group_start, schedule_0, schedule_1, max_blocks_0, max_blocks_1, NUM_EXPERTS, SLOTS, EXPERTS,
            BLOCK_M_0, BLOCK_M_1, BLOCK_FILL,
        )  # fmt: skip
        write_merged(counted, tl.cumsum(counted, axis=0) - counted, merged, program * 0, program * 0 + 1)
    elif program == placing:
        write_schedule(counted, virtual_schedule, virtual_blocks, program * 0, program * 0 + 1, BLOCK_M, BLOCK_FILL)
    else:
        if program == 0:
            write_virtual_sizes(counted, groups)
        starts = write_groups(counted, groups, program, placing)
        slots = block + tl.arange(0, BLOCK_S)
        local, _ = virtual_experts(ids, expert_map, token_mask, adapters, slots, num_slots)
        ahead = tl.load(before + tl.where(local >= 0, local, 0), mask=local >= 0, other=0, cache_modifier=".cg")
        inside = slots < num_slots
        place_slots(slots, inside, local, ahead + earlier_alike(local), starts, groups)
        if given_weights is not None:
            weights = tl.load(given_weights + slots, mask=inside, other=0.0)
            tl.store(row_weight + slots, weights.to(tl.float32), mask=inside)


@triton.jit
def count_blocks(
    ids, expert_map, token_mask, adapter_ids, ranks, block_counts, block_invalid, num_slots,
    NUM_GLOBAL: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    GROUPS: tl.constexpr, PRESENT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """block_counts[b, g] = slots of virtual expert g in block b, block_invalid[b] = its invalid ids of both kinds."""
    join(PDL)
    adapters = Adapters(adapter_ids, ranks, NUM_EXPERTS, SLOTS, TOP_K, NUM_GLOBAL, PRESENT, BLOCK_E)
    counts = block_counts + tl.program_id(0).to(tl.int64) * (NUM_EXPERTS * (SLOTS + 1))
    groups = tl.arange(0, GROUPS)
    tl.store(counts + groups, tl.zeros((GROUPS,), dtype=tl.int32), mask=groups < NUM_EXPERTS * (SLOTS + 1))
    slots = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    local, invalid = virtual_experts(ids, expert_map, token_mask, adapters, slots, num_slots)
    wrong = missing_adapters(token_mask, adapters, present_adapters(adapters), slots, num_slots)
    tl.store(block_invalid + tl.program_id(0), tl.sum(invalid.to(tl.int32) + wrong, axis=0))
    # Behind the zeros. Faster than a histogram of thousands.
    tl.debug_barrier()
    tl.atomic_add(counts + tl.where(local >= 0, local, 0), 1, mask=local >= 0, sem="relaxed")


@triton.jit
def sum_blocks(
    block_counts, virtual_sizes, num_blocks, NUM_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Replace a block's counts by the sums of the blocks ahead, and write the totals."""
    join(PDL)
    groups = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    total = tl.zeros((BLOCK_G,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        blocks = first + tl.arange(0, BLOCK_B)
        mask = (blocks < num_blocks)[:, None] & (groups < NUM_GROUPS)[None, :]
        places = block_counts + blocks.to(tl.int64)[:, None] * NUM_GROUPS + groups[None, :]
        counts = tl.load(places, mask=mask, other=0)
        tl.store(places, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(virtual_sizes + groups, total, mask=groups < NUM_GROUPS)


@triton.jit
def place_blocks(
    ids, expert_map, token_mask, adapter_ids, ranks, block_counts, block_invalid, virtual_sizes, virtual_start,
    slot_of_row, row_of_slot, invalid_ids, virtual_schedule, tile_counters, group_sizes, group_start, schedule_0,
    schedule_1, given_weights, row_weight, num_slots, num_blocks, virtual_blocks, max_blocks_0, max_blocks_1,
    NUM_GLOBAL: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    COUNTERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_M_0: tl.constexpr, BLOCK_M_1: tl.constexpr,
    GROUPS: tl.constexpr, EXPERTS: tl.constexpr, PRESENT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_FILL: tl.constexpr,
    BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first num_blocks programs place a block of slots each, the others write what follows from the sizes."""
    join(PDL)
    adapters = Adapters(adapter_ids, ranks, NUM_EXPERTS, SLOTS, TOP_K, NUM_GLOBAL, PRESENT, BLOCK_E)
    groups = Groups(
        virtual_sizes, virtual_start, slot_of_row, row_of_slot, invalid_ids, virtual_schedule, None, tile_counters,
        None, num_slots, virtual_blocks, 0, None, NUM_EXPERTS * (SLOTS + 1), 1, COUNTERS, BLOCK_M, 1, GROUPS, 1,
        BLOCK_FILL,
    )  # fmt: skip
    which = tl.arange(0, GROUPS)
    exists = which < NUM_EXPERTS * (SLOTS + 1)
    sizes = tl.load(virtual_sizes + which, mask=exists, other=0)
    block, program = tl.program_id(0), tl.program_id(0) - num_blocks
    if block >= num_blocks:
        merged = Merged(
            group_sizes, group_start, schedule_0, schedule_1, max_blocks_0, max_blocks_1, NUM_EXPERTS, SLOTS, EXPERTS,
            BLOCK_M_0, BLOCK_M_1, BLOCK_FILL,
        )  # fmt: skip
        num_programs = tl.num_programs(0) - num_blocks
        starts = write_groups(sizes, groups, program, num_programs)
        write_merged(sizes, starts, merged, program, num_programs)
        if program == 0:
            wrong = tl.zeros((BLOCK_FILL,), dtype=tl.int32)
            for first in range(0, num_blocks, BLOCK_FILL):
                blocks = first + tl.arange(0, BLOCK_FILL)
                wrong += tl.load(block_invalid + blocks, mask=blocks < num_blocks, other=0)
            tl.store(invalid_ids, tl.sum(wrong, axis=0))
    else:
        slots = block * BLOCK_S + tl.arange(0, BLOCK_S)
        local, _ = virtual_experts(ids, expert_map, token_mask, adapters, slots, num_slots)
        places = block_counts + block.to(tl.int64) * (NUM_EXPERTS * (SLOTS + 1)) + tl.where(local >= 0, local, 0)
        rank = tl.load(places, mask=local >= 0, other=0) + earlier_alike(local)
        inside = slots < num_slots
        place_slots(slots, inside, local, rank, tl.cumsum(sizes, axis=0) - sizes, groups)
        if given_weights is not None:
            weights = tl.load(given_weights + slots, mask=inside, other=0.0)
            tl.store(row_weight + slots, weights.to(tl.float32), mask=inside)


@triton.jit
def earlier_alike(local):
    """Return how many slots ahead have the same group. Threads run along the last axis, as in `rank_slots`."""
    position = tl.arange(0, local.shape[0])
    alike = (position[:, None] < position[None, :]) & (local[:, None] == local[None, :])
    return tl.sum(alike.to(tl.int32), axis=0)
