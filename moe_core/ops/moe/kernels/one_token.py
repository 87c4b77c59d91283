"""A forward of one token in two launches, without a launch that routes. See `moe_core.ops.moe.fuse`."""

import triton
import triton.language as tl

from moe_core.ops.common.kernels.aggregates import Epilogue, Layout, Output, Rows
from moe_core.ops.matmul.portable.kernel import Matrices, multiply_tile, tile_of_program
from moe_core.ops.reduction.kernels.reduce import Reduction, reduce_tile
from moe_core.ops.routing.kernels.layout import Groups
from moe_core.ops.routing.kernels.route_and_layout import route_tokens
from moe_core.ops.routing.kernels.topk import Router, choose_experts


@triton.jit
def nth_expert(chosen, place):
    """Return one of the chosen experts in ascending order, -1 behind the last. Example, [5, -1, 2, 9]: 2, 5, 9, -1."""
    others = tl.expand_dims(chosen, 0)
    lower = (others >= 0) & (others < tl.expand_dims(chosen, 1))
    places = tl.sum(lower.to(tl.int32), axis=1)
    return tl.max(tl.where((chosen >= 0) & (places == place), chosen, -1), axis=0)


@triton.jit
def route_and_multiply(
    logits, correction_bias, token_mask, ids, weights, group_sizes, group_start, slot_of_row, row_of_slot, invalid_ids,
    schedule_0, schedule_1, tile_counters, x, weight, up, bias, up_bias, layer_index, y, capacity, max_blocks_0,
    max_blocks_1, num_blocks,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr, SOFTMAX_LAST: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr,
    BY_EXPERT: tl.constexpr, BY_PAIR: tl.constexpr, BIAS_ON_LOGITS: tl.constexpr, BIAS_STRIDE: tl.constexpr,
    EPSILON: tl.constexpr,
    LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, SLOTS: tl.constexpr,
    SPAN: tl.constexpr, COUNTERS: tl.constexpr, BLOCK_M_0: tl.constexpr, BLOCK_M_1: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_PAD: tl.constexpr, BLOCK_FILL: tl.constexpr, D: tl.constexpr, N: tl.constexpr, WEIGHT_N: tl.constexpr,
    NUM_LAYERS: tl.constexpr, X_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr, EXPERT_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr, BIAS_LAYER_STRIDE: tl.constexpr, UP_BIAS_LAYER_STRIDE: tl.constexpr,
    GATE_LAYOUT: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """Program 0 is `route_tokens`, the others compute a tile of product 1 each. num_blocks: one per expert."""
    router = Router(
        logits, correction_bias, token_mask, None, NUM_EXPERTS, TOP_K, SCORING, SOFTMAX_LAST, RENORMALIZE, SCALE,
        NUM_GROUPS, TOPK_GROUP, BY_EXPERT, BY_PAIR, BIAS_ON_LOGITS, BIAS_STRIDE, EPSILON, LOGIT_SCALE, SOFTCAP, GROUPS,
        MEMBERS, SLOTS, SPAN, TOP_K,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        groups = Groups(
            group_sizes, group_start, slot_of_row, row_of_slot, invalid_ids, schedule_0, schedule_1, tile_counters,
            None, capacity, max_blocks_0, max_blocks_1, None, NUM_EXPERTS, 1, COUNTERS, BLOCK_M_0, BLOCK_M_1, EXPERTS,
            BLOCK_PAD, BLOCK_FILL,
        )  # fmt: skip
        route_tokens(router, groups, None, ids, weights, 1, tl.program_id(0), tl.full((), 1, tl.int32), 1, 1)
    else:
        TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
        block, tile = tile_of_program(tl.program_id(0) - 1, num_blocks, TILES, GROUP_M)
        token = tl.arange(0, 1)
        chosen, _ = choose_experts(router, token.to(tl.int64), token < 1)
        expert = nth_expert(tl.reshape(chosen, (SLOTS,)), block)
        if expert >= 0:
            # x has one row, the only one of its expert: a dense product.
            matrices = Matrices(
                weight, up, bias, up_bias, layer_index, D, N, WEIGHT_N, NUM_LAYERS, LAYER_STRIDE, EXPERT_STRIDE,
                K_STRIDE, N_STRIDE, BIAS_LAYER_STRIDE, UP_BIAS_LAYER_STRIDE, INPUT_PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            layout, rows = Layout(None, None, None, 1, 1, TOP_K), Rows(x, None, X_STRIDE, "row")
            epilogue = Epilogue(None, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT)
            output = Output(y + block.to(tl.int64) * N, N=N, SCATTER="row")
            multiply_tile(block * 0, tile, expert, layout, None, rows, matrices, epilogue, output, None, None, None)


@triton.jit
def multiply_and_reduce(
    x, weight, bias, row_weight, layer_index, group_sizes, group_start, slot_of_row, row_of_slot, schedule, slots, out,
    tile_counters, num_blocks, num_rows, num_slots,
    D: tl.constexpr, N: tl.constexpr, WEIGHT_N: tl.constexpr, NUM_LAYERS: tl.constexpr, X_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr, EXPERT_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr,
    BIAS_LAYER_STRIDE: tl.constexpr, TOP_K: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A tile of product 2, then the sum. tile_counters: int32 zeros, one for each tile of columns."""
    block, tile = tile_of_program(tl.program_id(0), num_blocks, (N + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    expert = tl.load(schedule + 2 * block + 1)
    if expert >= 0:
        matrices = Matrices(
            weight, None, bias, None, layer_index, D, N, WEIGHT_N, NUM_LAYERS, LAYER_STRIDE, EXPERT_STRIDE, K_STRIDE,
            N_STRIDE, BIAS_LAYER_STRIDE, 0, INPUT_PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
        rows, epilogue = Rows(x, None, X_STRIDE, "row"), Epilogue(row_weight, None, None, None, None)
        output = Output(slots, N=N, SCATTER="slot")
        multiply_tile(block, tile, expert, layout, schedule, rows, matrices, epilogue, output, None, None, None)
    # Counting this program makes the writes of all warps visible, and the last one sees all writes.
    tl.debug_barrier()
    finished = tl.atomic_add(tile_counters + tile, 1, sem="acq_rel")
    if finished == num_blocks - 1:
        tl.debug_barrier()
        sums = Reduction(slots, row_of_slot, out, 1, num_slots, TOP_K, N, 1, BLOCK_N)
        reduce_tile(tl.full((), 0, tl.int32), tile, sums)
