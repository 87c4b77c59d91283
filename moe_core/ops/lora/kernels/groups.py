"""Virtual experts: group e * (SLOTS + 1) has expert e's rows without an adapter, the next SLOTS each adapter's."""

import triton
import triton.language as tl


@triton.jit
def virtual_ids(
    ids, expert_map, token_mask, adapter_ids, ranks, virtual, block_invalid, num_tokens,
    NUM_GLOBAL: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write the virtual expert of each slot (-1: none, -2: an invalid id), and each program's number of tokens with an
    adapter that does not exist."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = tokens < num_tokens
    adapters = tl.load(adapter_ids + tokens, mask=exists, other=-1)
    named = (adapters >= 0) & (adapters < SLOTS)
    row = tl.where(named, adapters, 0).to(tl.int64) * NUM_EXPERTS
    experts = tl.arange(0, EXPERTS)
    inside = exists[:, None] & (experts < NUM_EXPERTS)[None, :]
    largest = tl.max(tl.load(ranks + row[:, None] + experts[None, :], mask=inside, other=0), axis=1)
    counted = exists
    if token_mask is not None:
        counted = exists & (tl.load(token_mask + tokens, mask=exists, other=0) != 0)
    invalid = counted & (adapters != -1) & ((largest <= 0) | (named == 0))
    tl.store(block_invalid + tl.program_id(0), tl.sum(invalid.to(tl.int32), axis=0))

    choices = tl.arange(0, CHOICES)
    places = tokens.to(tl.int64)[:, None] * TOP_K + choices[None, :]
    inside = exists[:, None] & (choices < TOP_K)[None, :]
    expert = tl.load(ids + places, mask=inside, other=-1).to(tl.int64)
    valid = (expert >= 0) & (expert < NUM_GLOBAL)
    result = tl.where(valid | (expert == -1), -1, -2)
    local = tl.where(valid, expert, 0)
    if expert_map is not None:
        local = tl.load(expert_map + local, mask=inside, other=-1).to(tl.int64)
    valid = valid & (local >= 0) & (local < NUM_EXPERTS)
    local = tl.where(valid, local, 0)
    rank = tl.load(ranks + row[:, None] + local, mask=inside, other=0)
    adapter = tl.where(named[:, None] & (rank > 0), adapters[:, None] + 1, 0)
    result = tl.where(valid, local * (SLOTS + 1) + adapter, result)
    tl.store(virtual + places, result.to(tl.int32), mask=inside)


@triton.jit
def merge_groups(
    virtual_start, virtual_invalid, block_invalid, group_sizes, group_start, invalid_ids, num_blocks,
    NUM_EXPERTS: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the groups of experts, each the neighbouring virtual experts of one, and the invalid ids of both kinds."""
    experts = tl.arange(0, EXPERTS)
    start = tl.load(virtual_start + experts * (SLOTS + 1), mask=experts <= NUM_EXPERTS, other=0)
    end = tl.load(virtual_start + (experts + 1) * (SLOTS + 1), mask=experts < NUM_EXPERTS, other=0)
    tl.store(group_start + experts, start, mask=experts <= NUM_EXPERTS)
    tl.store(group_sizes + experts, end - start, mask=experts < NUM_EXPERTS)
    total = tl.load(virtual_invalid)
    for first in range(0, num_blocks, BLOCK):
        blocks = first + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(block_invalid + blocks, mask=blocks < num_blocks, other=0), axis=0)
    tl.store(invalid_ids, total)
