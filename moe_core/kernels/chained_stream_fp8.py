"""`chained` with the products of `stream_fp8`: fp8 weights of few tokens, in one launch. In Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.kernels.chained_stream import COUNTS, FINISHED, NEXT, reduce_slots
from moe_core.kernels.overlap import join
from moe_core.kernels.progress import announce, wait
from moe_core.kernels.stream_fp8 import stream_tile_fp8


@gluon.jit
def chained_stream_fp8(
    x, weight, scales, bias, second_weight, second_scales, second_bias, row_weight, layer,
    group_sizes, group_start, slot_of_row, row_of_slot, schedule, hidden, slots, out, progress,
    num_blocks, num_rows, num_slots,
    D: gl.constexpr, F: gl.constexpr, WEIGHT_N: gl.constexpr, BLOCKS: gl.constexpr, NUM_EXPERTS: gl.constexpr,
    NUM_LAYERS: gl.constexpr, X_STRIDE: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr, SECOND_BLOCKS: gl.constexpr,
    SECOND_BIAS_LAYER_STRIDE: gl.constexpr, TOP_K: gl.constexpr, GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, RULE: gl.constexpr, LARGEST: gl.constexpr, BLOCK_M: gl.constexpr,
    CHUNK: gl.constexpr, SECOND_CHUNK: gl.constexpr, BLOCK_D: gl.constexpr, REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """One block of one of the three; parameters as in `stream_fp8.matmul_stream_fp8` and `chained.chained`."""
    if OVERLAP is not None:
        join()
    first_programs = num_blocks * BLOCKS
    second_programs = num_blocks * SECOND_BLOCKS
    number = gl.atomic_add(progress + NEXT, 1, sem="relaxed")
    if number < first_programs:
        block, tile = number // BLOCKS, number % BLOCKS
        expert = gl.load(schedule + 2 * block + 1)
        if expert >= 0:
            stream_tile_fp8(
                block, tile, expert, x, weight, scales, bias, None, layer, group_sizes, group_start, slot_of_row,
                schedule, hidden, num_rows, num_slots, D, F, WEIGHT_N, NUM_EXPERTS, NUM_LAYERS, X_STRIDE,
                BIAS_LAYER_STRIDE, TOP_K, "token", "row", GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT, RULE, LARGEST,
                BLOCK_M, CHUNK, False, None, 0,
            )  # fmt: skip
            announce(progress + COUNTS + block)
    elif number < first_programs + second_programs:
        place = number - first_programs
        block, tile = place // SECOND_BLOCKS, place % SECOND_BLOCKS
        expert = gl.load(schedule + 2 * block + 1)
        if expert >= 0:
            stream_tile_fp8(
                block, tile, expert, hidden, second_weight, second_scales, second_bias, row_weight, layer, group_sizes,
                group_start, slot_of_row, schedule, slots, num_rows, num_slots, F, D, D, NUM_EXPERTS, NUM_LAYERS, F,
                SECOND_BIAS_LAYER_STRIDE, TOP_K, "row", "slot", None, None, None, None, RULE, LARGEST, BLOCK_M,
                SECOND_CHUNK, False, progress + COUNTS + block, BLOCKS,
            )  # fmt: skip
        announce(progress + FINISHED)
    else:
        COLUMNS: gl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
        tile = number - first_programs - second_programs
        wait(progress + FINISHED, second_programs)
        reduce_slots(tile // COLUMNS, tile % COLUMNS, slots, row_of_slot, out, num_slots, TOP_K, D, BLOCK_D)
