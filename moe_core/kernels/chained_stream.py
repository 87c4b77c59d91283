"""`chained` with the products of `stream`: mxfp4 weights of few tokens, in one launch. In Gluon.

Weights of product 2 are under way before a block waits for its rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.kernels.overlap import join
from moe_core.kernels.progress import announce, wait
from moe_core.kernels.stream import stream_tile

#: As in `chained`.
NEXT = gl.constexpr(0)
FINISHED = gl.constexpr(1)
COUNTS = gl.constexpr(2)


@gluon.jit
def reduce_slots(
    token, column_block, slots, row_of_slot, out, num_slots, TOP_K: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """One token and BLOCK_D columns of `reduction.reduce` by slot: every row is asked for before the first is added."""
    SIZE: gl.constexpr = BLOCK_D // (32 * gl.num_warps())
    layout: gl.constexpr = gl.BlockedLayout([SIZE], [32], [gl.num_warps()], [0])
    columns = column_block * BLOCK_D + gl.arange(0, BLOCK_D, layout)
    total = gl.zeros([BLOCK_D], gl.float32, layout)
    rows = ()
    for k in gl.static_range(TOP_K):
        slot = token * TOP_K + k
        present = (gl.load(row_of_slot + slot) >= 0) & (slot < num_slots)
        place = slots + slot.to(gl.int64) * WIDTH + columns
        rows += (gl.load(place, mask=present & (columns < WIDTH), other=0.0),)
    for k in gl.static_range(TOP_K):
        total += rows[k].to(gl.float32)
    gl.store(out + token.to(gl.int64) * WIDTH + columns, total.to(out.dtype.element_ty), mask=columns < WIDTH)


@gluon.jit
def chained_stream(
    x, weight, scales, zero_points, bias, second_weight, second_scales, second_zero_points, second_bias, row_weight,
    layer, group_sizes, group_start, slot_of_row, row_of_slot, schedule, hidden, slots, out, progress, num_blocks,
    num_rows, num_slots, D: gl.constexpr, F: gl.constexpr, WEIGHT_N: gl.constexpr, STEPS: gl.constexpr,
    BLOCKS: gl.constexpr, NUM_EXPERTS: gl.constexpr, NUM_LAYERS: gl.constexpr, X_STRIDE: gl.constexpr,
    BIAS_LAYER_STRIDE: gl.constexpr, SECOND_STEPS: gl.constexpr, SECOND_BLOCKS: gl.constexpr,
    SECOND_BIAS_LAYER_STRIDE: gl.constexpr, TOP_K: gl.constexpr, GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, ELEMENT: gl.constexpr, COLUMNS: gl.constexpr, GROUPS: gl.constexpr,
    REPEAT: gl.constexpr, ALIKE: gl.constexpr, SECOND_ELEMENT: gl.constexpr, SECOND_COLUMNS: gl.constexpr,
    SECOND_GROUPS: gl.constexpr, SECOND_REPEAT: gl.constexpr, SECOND_ALIKE: gl.constexpr, BLOCK_M: gl.constexpr,
    CHUNK: gl.constexpr, SPAN: gl.constexpr, SECOND_CHUNK: gl.constexpr, SECOND_SPAN: gl.constexpr,
    BLOCK_D: gl.constexpr, REGISTERS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One block of one of the three; parameters as in `stream.matmul_stream` and `chained.chained`."""
    if OVERLAP is not None:
        join()
    first_programs = num_blocks * BLOCKS
    second_programs = num_blocks * SECOND_BLOCKS
    number = gl.atomic_add(progress + NEXT, 1, sem="relaxed")
    if number < first_programs:
        block, tile = number // BLOCKS, number % BLOCKS
        expert = gl.load(schedule + 2 * block + 1)
        if expert >= 0:
            stream_tile(
                block, tile, expert, x, weight, scales, zero_points, bias, None, layer, group_sizes, group_start,
                slot_of_row, schedule, hidden, num_rows, num_slots, D, F, WEIGHT_N, STEPS, BLOCKS, NUM_EXPERTS,
                NUM_LAYERS, X_STRIDE, BIAS_LAYER_STRIDE, TOP_K, "token", "row", GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT,
                ELEMENT, COLUMNS, GROUPS, REPEAT, ALIKE, BLOCK_M, CHUNK, SPAN, False, False, None, 0,
            )  # fmt: skip
            announce(progress + COUNTS + block)
    elif number < first_programs + second_programs:
        place = number - first_programs
        block, tile = place // SECOND_BLOCKS, place % SECOND_BLOCKS
        expert = gl.load(schedule + 2 * block + 1)
        if expert >= 0:
            stream_tile(
                block, tile, expert, hidden, second_weight, second_scales, second_zero_points, second_bias, row_weight,
                layer, group_sizes, group_start, slot_of_row, schedule, slots, num_rows, num_slots, F, D, D,
                SECOND_STEPS, SECOND_BLOCKS, NUM_EXPERTS, NUM_LAYERS, F, SECOND_BIAS_LAYER_STRIDE, TOP_K, "row",
                "slot", None, None, None, None, SECOND_ELEMENT, SECOND_COLUMNS, SECOND_GROUPS, SECOND_REPEAT,
                SECOND_ALIKE, BLOCK_M, SECOND_CHUNK, SECOND_SPAN, False, False, progress + COUNTS + block, BLOCKS,
            )  # fmt: skip
        announce(progress + FINISHED)
    else:
        PARTS: gl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
        tile = number - first_programs - second_programs
        wait(progress + FINISHED, second_programs)
        reduce_slots(tile // PARTS, tile % PARTS, slots, row_of_slot, out, num_slots, TOP_K, D, BLOCK_D)
