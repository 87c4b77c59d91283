import triton
import triton.language as tl

from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.routing.kernels.layout import (
    Groups,
    kept_sizes,
    place_slots,
    rank_slots,
    to_local,
    write_groups,
    write_sizes,
)
from moe_core.ops.routing.kernels.topk import Router, choose_experts


@triton.jit
def route_tokens(
    router, groups, expert_map, ids, weights, num_tokens, program, num_programs, BLOCK_T: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """ids and weights as in `topk.route`, and their layout, of at most STEPS * BLOCK_T tokens in one program, which
    holds every choice in registers and places slots once the sizes of all groups are known."""
    TOP_K: tl.constexpr = router.TOP_K
    SLOTS: tl.constexpr = router.SLOTS
    step_numbers = tl.arange(0, STEPS)[:, None]
    slots = tl.arange(0, SLOTS)[None, :]
    before = tl.zeros((groups.EXPERTS,), dtype=tl.int32)
    all_slots = tl.full((STEPS, BLOCK_T * SLOTS), -1, tl.int32)
    all_local = tl.full((STEPS, BLOCK_T * SLOTS), -1, tl.int32)
    all_ranks = tl.zeros((STEPS, BLOCK_T * SLOTS), dtype=tl.int32)
    for first in range(0, num_tokens, BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)
        inside = tokens < num_tokens
        chosen, values = choose_experts(router, tokens.to(tl.int64), inside)
        target = tokens[:, None] * TOP_K + slots
        stored = inside[:, None] & (slots < TOP_K)
        tl.store(ids + target, chosen, mask=stored)
        tl.store(weights + target, values, mask=stored)
        chosen = tl.reshape(chosen, (BLOCK_T * SLOTS,))
        local, _ = to_local(chosen, expert_map, router.NUM_EXPERTS, groups.NUM_EXPERTS)
        rank, before = rank_slots(local, before)
        here = step_numbers == first // BLOCK_T
        all_slots = tl.where(here, tl.reshape(tl.where(stored, target, -1), (1, BLOCK_T * SLOTS)), all_slots)
        all_local = tl.where(here, local[None, :], all_local)
        all_ranks = tl.where(here, rank[None, :], all_ranks)

    sizes = kept_sizes(before, groups)
    write_sizes(sizes, groups)
    tl.store(groups.invalid_ids, 0)
    starts = write_groups(sizes, groups, program, num_programs)
    flat_slots = tl.reshape(all_slots, (STEPS * BLOCK_T * SLOTS,))
    flat_local = tl.reshape(all_local, (STEPS * BLOCK_T * SLOTS,))
    flat_ranks = tl.reshape(all_ranks, (STEPS * BLOCK_T * SLOTS,))
    place_slots(flat_slots, flat_slots >= 0, flat_local, flat_ranks, starts, groups)


@triton.jit
def route_and_layout(
    logits, correction_bias, token_mask, expert_map, ids, weights, group_sizes, group_start, slot_of_row, row_of_slot,
    invalid_ids, schedule_0, schedule_1, tile_counters, num_tokens, capacity, max_blocks_0, max_blocks_1, max_rows,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr, SOFTMAX_LAST: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr,
    BY_EXPERT: tl.constexpr, BY_PAIR: tl.constexpr, BIAS_ON_LOGITS: tl.constexpr, BIAS_STRIDE: tl.constexpr,
    EPSILON: tl.constexpr,
    LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, SLOTS: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_T: tl.constexpr, STEPS: tl.constexpr, NUM_LOCAL: tl.constexpr, ALIGNMENT: tl.constexpr,
    COUNTERS: tl.constexpr, BLOCK_M_0: tl.constexpr, BLOCK_M_1: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_PAD: tl.constexpr, BLOCK_FILL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join(PDL)
    router = Router(
        logits, correction_bias, token_mask, None, NUM_EXPERTS, TOP_K, SCORING, SOFTMAX_LAST, RENORMALIZE, SCALE,
        NUM_GROUPS, TOPK_GROUP, BY_EXPERT, BY_PAIR, BIAS_ON_LOGITS, BIAS_STRIDE, EPSILON, LOGIT_SCALE, SOFTCAP, GROUPS,
        MEMBERS, SLOTS, SPAN, TOP_K,
    )  # fmt: skip
    groups = Groups(
        group_sizes, group_start, slot_of_row, row_of_slot, invalid_ids, schedule_0, schedule_1, tile_counters, None,
        capacity, max_blocks_0, max_blocks_1, max_rows, NUM_LOCAL, ALIGNMENT, COUNTERS, BLOCK_M_0, BLOCK_M_1, EXPERTS,
        BLOCK_PAD, BLOCK_FILL,
    )  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    route_tokens(router, groups, expert_map, ids, weights, num_tokens, program, num_programs, BLOCK_T, STEPS)
