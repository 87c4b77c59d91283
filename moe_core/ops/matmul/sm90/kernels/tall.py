"""The Hopper matmul with row blocks of up to 192 rows, in Gluon. Results equal `matmul` bit for bit.

For each 64 of the reduction, a full block reads 56 KB, and blocks of 128 read 72 KB for the same rows.

producer (4 warps)
    as in `matmul`, but a stage has room for three chunks of 64 rows, and existing chunks are loaded
consumer 0 and 1 (4 warps each)
    64 rows x 256 columns, as in `matmul`
    if there is a third chunk, 128 of its columns, by a wgmma of 128 columns, stored after the first result

Three consumers are impossible: 512 threads start with 128 registers each, and ptxas then does not compile a wgmma of
256 columns. If gate and up are apart, panels of 64 gate and of 64 up columns alternate, so that each half of the third
chunk has whole pairs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from moe_core.ops.activation.kernels.formulas import activate, activate_gated, sigmoid_ptx
from moe_core.ops.common.kernels.aggregates import Epilogue, Layout, Output, Product, Rows, Schedule, Tiles, Weights
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.exchange.kernels.addresses import SECTIONS
from moe_core.ops.matmul.sm90.kernels.feed import producer
from moe_core.ops.matmul.sm90.kernels.matmul import (
    activate_pairs,
    add_bias,
    finish,
    halves,
    load_scale,
    multiply,
    multiply_rest,
    store_result,
    weigh,
)
from moe_core.ops.matmul.sm90.kernels.pipeline import (
    CHUNKS,
    DEPTH,
    PANEL,
    PIECE,
    PRODUCER_WARPS,
    RING,
    ROOM,
    ROWS,
    WIDE,
    advance,
    allocate_pipeline,
    await_stage,
    await_tile,
    release_previous_stage,
    release_tile,
    skip_tile,
)


@gluon.jit
def multiply_tall(product, stage, phase, accumulator, third, WHICH: gl.constexpr, FIRST: gl.constexpr):
    tiles, pipeline = product.tiles, product.pipeline
    await_stage(pipeline, stage, phase)
    weights = tiles.right.index(stage)
    if product.weights.IN_OUT:
        half = weights.slice(WHICH * PIECE, PIECE, dim=1)
    else:
        half = weights.slice(WHICH * PIECE, PIECE, dim=0).permute([1, 0])
        weights = weights.permute([1, 0])
    accumulator = warpgroup_mma(tiles.left.index(CHUNKS * stage + WHICH), weights, accumulator, is_async=True)
    third = warpgroup_mma(tiles.left.index(CHUNKS * stage + 2), half, third, is_async=True)
    # Two products of this stage may be under way, none of the one before.
    accumulator, third = warpgroup_mma_wait(num_outstanding=2, deps=[accumulator, third])
    if not FIRST:
        release_previous_stage(pipeline, stage)
    stage, phase = advance(stage, phase, pipeline.STAGES)
    return stage, phase, accumulator, third


@gluon.jit
def panel_halves(values):
    """Return gate and up columns of alternating panels of 64, without moves between threads."""
    COLUMNS: gl.constexpr = values.shape[1]
    panels = gl.reshape(values, [ROWS, COLUMNS // (2 * PANEL), 2, PANEL])
    gate, up = gl.split(gl.reshape(gl.permute(panels, [0, 1, 3, 2]), [ROWS, COLUMNS // 2, 2]))
    return gate, up


@gluon.jit
def finish_third(product, tile, third, biases, scale, layer_exists, buffer, WHICH: gl.constexpr):
    epilogue = product.epilogue
    if epilogue.GATE_LAYOUT is None:
        column = tile.column * WIDE + WHICH * PIECE
        result = add_bias(third, biases, WHICH * PIECE)
        if epilogue.ACTIVATION is not None:
            result = activate(result, epilogue.ACTIVATION, sigmoid_ptx)
    else:
        # The other consumer stores the other panel.
        buffer = buffer.slice(0, PANEL, dim=1)
        column = tile.column * PIECE + WHICH * PANEL
        if epilogue.GATE_LAYOUT == "interleaved":
            result = activate_pairs(add_bias(third, biases, WHICH * PIECE), epilogue)
        else:
            gate, up = panel_halves(third)
            gate = add_bias(gate, biases, WHICH * PANEL)
            up = add_bias(up, biases, PIECE + WHICH * PANEL)
            result = activate_gated(gate, up, epilogue.ACTIVATION, epilogue.ALPHA, epilogue.LIMIT, sigmoid_ptx)
    result = weigh(result, scale, layer_exists)
    store_result(product, tile, result, buffer, column, 2 * ROWS, tile.column >> 31)


@gluon.jit
def consumer(WHICH: gl.constexpr, product):
    tiles, pipeline, weights = product.tiles, product.pipeline, product.weights
    FIRST: gl.constexpr = WHICH * ROWS
    WEIGHTED: gl.constexpr = product.epilogue.row_weight is not None
    BIASED: gl.constexpr = (weights.bias is not None) or (weights.up_bias is not None)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    third_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    within = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, sums))
    third_within = 2 * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, third_sums))
    stage, phase, place, ring_phase, expert = 0, 0, 0, 0, 0
    _, layer_exists = layer_in_stack(weights.layer_index, weights.NUM_LAYERS)
    layer_exists = layer_exists if weights.layer_index is not None else None
    while expert >= 0:
        tile = await_tile(pipeline, place, ring_phase)
        expert = tile.expert
        if tile.rows > FIRST:
            scale, third_scale = None, None
            if WEIGHTED:
                # Ask early: addresses of row weights come from memory.
                slots = product.layout.slot_of_row + tile.start.to(gl.int64)
                third_slots = gl.load(slots + third_within, mask=third_within < tile.rows, other=0)
                slots = gl.load(slots + within, mask=within < tile.rows, other=0)
                scale, third_scale = slots.to(gl.float32), third_slots.to(gl.float32)
            accumulator = gl.zeros([ROWS, WIDE], gl.float32, sums)
            third = gl.zeros([ROWS, PIECE], gl.float32, third_sums)
            if tile.rows > 2 * ROWS:
                stage, phase, accumulator, third = multiply_tall(product, stage, phase, accumulator, third, WHICH, True)
                if WEIGHTED:
                    scale, third_scale = load_scale(product, slots), load_scale(product, third_slots)
                for _ in range(DEPTH, weights.D, DEPTH):
                    stage, phase, accumulator, third = multiply_tall(
                        product, stage, phase, accumulator, third, WHICH, False
                    )
                accumulator, third = warpgroup_mma_wait(num_outstanding=0, deps=[accumulator, third])
            else:
                stage, phase, accumulator = multiply(product, stage, phase, accumulator, WHICH, True)
                if WEIGHTED:
                    scale, third_scale = load_scale(product, slots), load_scale(product, third_slots)
                stage, phase, accumulator = multiply_rest(product, stage, phase, accumulator, WHICH)
            release_previous_stage(pipeline, stage)
            biases = tiles.biases.index(place) if BIASED else None
            if (weights.GATE_LAYOUT == "halves") or (weights.GATE_LAYOUT == "separate"):
                first, last = panel_halves(accumulator)
            else:
                first, last = halves(accumulator)
            buffer = tiles.results.index(WHICH)
            finish(product, tile, first, last, biases, scale, layer_exists, buffer, FIRST, tile.column >> 31)
            if tile.rows > 2 * ROWS:
                finish_third(product, tile, third, biases, third_scale, layer_exists, buffer, WHICH)
        elif expert >= 0:
            stage, phase = skip_tile(pipeline, stage, phase, weights.D, DEPTH)
        release_tile(pipeline, place)
        place, ring_phase = advance(place, ring_phase, RING)
    tma.store_wait(0)


@gluon.jit
def matmul_ogs(
    x, x_map, weight_map, up_map, bias, up_bias, row_weight, layer_index, group_sizes, group_start, slot_of_row,
    schedule, counters, y, y_map, num_blocks, num_rows, num_slots,
    D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr, NUM_EXPERTS: gl.constexpr, NUM_LAYERS: gl.constexpr,
    X_STRIDE: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr, UP_BIAS_LAYER_STRIDE: gl.constexpr,
    TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    IN_OUT: gl.constexpr, TRUSTED: gl.constexpr, COUNTER: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """As `sm90.kernels.matmul`, without pre. schedule: row blocks of 192, cut by `even_block`.

    Boxes of weight_map and up_map have PANEL columns if gate and up are apart. Boxes of y_map do if y is gated.
    """
    # 384 threads start with 168 registers each, 504 over three groups. Gathering takes addresses.
    PRODUCER_REGISTERS: gl.constexpr = 24 if GATHER == "row" else 40
    CONSUMER_REGISTERS: gl.constexpr = (504 - PRODUCER_REGISTERS) // 2
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = weight_map.dtype
    a_tiles = gl.allocate_shared_memory(dtype, [CHUNKS * STAGES, ROWS, DEPTH], swizzled)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, DEPTH, WIDE] if IN_OUT else [STAGES, WIDE, DEPTH], swizzled)
    out_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, PIECE], swizzled)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bias_tiles = gl.allocate_shared_memory(gl.float32, [RING + 1, WIDE], plain)
    row_lists = gl.allocate_shared_memory(gl.int32, [RING, ROOM], plain)
    pipeline = allocate_pipeline(STAGES, 0 if GATHER == "row" else PRODUCER_WARPS, GATHER != "row")
    join(PDL)
    tiles = Tiles(a_tiles, w_tiles, bias_tiles, out_tiles, row_lists)
    output = Output(y, y_map, None, None, None, N, SCATTER, TRUSTED)
    epilogue = Epilogue(row_weight, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT)
    weights = Weights(
        weight_map, up_map, bias, up_bias, layer_index, D, N, WEIGHT_N, NUM_EXPERTS, NUM_LAYERS, BIAS_LAYER_STRIDE,
        UP_BIAS_LAYER_STRIDE, GATE_LAYOUT, IN_OUT,
    )  # fmt: skip
    layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
    SPREAD: gl.constexpr = 1 if (SCATTER == "row") or (SCATTER == "slot") else SECTIONS
    blocks = Schedule(schedule, counters, num_blocks, COUNTER, GROUP_M, SPREAD)
    rows = Rows(x, x_map, X_STRIDE, GATHER)
    product = Product(rows, weights, layout, blocks, tiles, pipeline, epilogue, output)
    gl.warp_specialize(
        [(consumer, (0, product)), (consumer, (1, product)), (producer, (product,))],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
