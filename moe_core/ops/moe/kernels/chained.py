"""Both products of few tokens and their reduction in one launch. Programs draw numbers: see `moe_core.ops.moe.fuse`."""

import triton
import triton.language as tl

from moe_core.ops.common.kernels.aggregates import Epilogue, Layout, Output, Rows
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.matmul.portable.kernel import Matrices, multiply_tile, tile_of_program
from moe_core.ops.reduction.kernels.reduce import Reduction, reduce_tile

#: Indices in `progress`: next number, finished programs of product 2, then finished tiles of product 1 per row block.
NEXT = tl.constexpr(0)
FINISHED = tl.constexpr(1)
BLOCKS = tl.constexpr(2)


@triton.jit
def announce(place):
    tl.debug_barrier()
    tl.atomic_add(place, 1, sem="release")


@triton.jit
def wait(place, count):
    while tl.atomic_add(place, 0, sem="acquire") < count:
        pass


@triton.jit
def chained(
    x, weight, up, bias, up_bias, second_weight, second_bias, row_weight, layer_index,
    group_sizes, group_start, slot_of_row, row_of_slot, schedule, hidden, slots, out, progress,
    num_blocks, num_rows, num_slots, num_tokens,
    D: tl.constexpr, F: tl.constexpr, WEIGHT_N: tl.constexpr, NUM_LAYERS: tl.constexpr, X_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr, EXPERT_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr,
    BIAS_LAYER_STRIDE: tl.constexpr, UP_BIAS_LAYER_STRIDE: tl.constexpr,
    SECOND_LAYER_STRIDE: tl.constexpr, SECOND_EXPERT_STRIDE: tl.constexpr, SECOND_K_STRIDE: tl.constexpr,
    SECOND_N_STRIDE: tl.constexpr, SECOND_BIAS_LAYER_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr, GATE_LAYOUT: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    SECOND_BLOCK_N: tl.constexpr, SECOND_BLOCK_K: tl.constexpr, SECOND_GROUP_M: tl.constexpr,
    SECOND_STAGES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile. Parameters as in `matmul_ogs` and `reduce`. hidden: results of product 1, F columns, in layout
    order. slots: results of product 2, by slot. progress: int32 zeros, BLOCKS plus one per row block."""
    join(PDL)
    TILES: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    SECOND_TILES: tl.constexpr = (D + SECOND_BLOCK_N - 1) // SECOND_BLOCK_N
    first_programs = num_blocks * TILES
    second_programs = num_blocks * SECOND_TILES
    layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
    number = tl.atomic_add(progress + NEXT, 1, sem="relaxed")
    if number < first_programs:
        block, tile = tile_of_program(number, num_blocks, TILES, GROUP_M)
        expert = tl.load(schedule + 2 * block + 1)
        if expert >= 0:
            matrices = Matrices(
                weight, up, bias, up_bias, layer_index, D, F, WEIGHT_N, NUM_LAYERS, LAYER_STRIDE, EXPERT_STRIDE,
                K_STRIDE, N_STRIDE, BIAS_LAYER_STRIDE, UP_BIAS_LAYER_STRIDE, INPUT_PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            rows, epilogue = Rows(x, None, X_STRIDE, "token"), Epilogue(None, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT)
            output = Output(hidden, N=F, SCATTER="row")
            multiply_tile(block, tile, expert, layout, schedule, rows, matrices, epilogue, output, None, STAGES, None)
            announce(progress + BLOCKS + block)
    elif number < first_programs + second_programs:
        block, tile = tile_of_program(number - first_programs, num_blocks, SECOND_TILES, SECOND_GROUP_M)
        expert = tl.load(schedule + 2 * block + 1)
        if expert >= 0:
            wait(progress + BLOCKS + block, TILES)
            matrices = Matrices(
                second_weight, None, second_bias, None, layer_index, F, D, D, NUM_LAYERS, SECOND_LAYER_STRIDE,
                SECOND_EXPERT_STRIDE, SECOND_K_STRIDE, SECOND_N_STRIDE, SECOND_BIAS_LAYER_STRIDE, 0, INPUT_PRECISION,
                BLOCK_M, SECOND_BLOCK_N, SECOND_BLOCK_K,
            )  # fmt: skip
            rows, epilogue = Rows(hidden, None, F, "row"), Epilogue(row_weight, None, None, None, None)
            output = Output(slots, N=D, SCATTER="slot")
            multiply_tile(
                block, tile, expert, layout, schedule, rows, matrices, epilogue, output, None, SECOND_STAGES, None
            )
        announce(progress + FINISHED)
    else:
        COLUMNS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
        tile = number - first_programs - second_programs
        wait(progress + FINISHED, second_programs)
        sums = Reduction(slots, row_of_slot, out, num_tokens, num_slots, TOP_K, D, BLOCK_T, BLOCK_D)
        reduce_tile(tile // COLUMNS, tile % COLUMNS, sums)
