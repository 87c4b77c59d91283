"""Ragged grouped matmul of e4m3 codes with e4m3 codes for Hopper, in Gluon. Warps are specialised as in `matmul`.

Tiles have 128 rows x 256 accumulator columns. A stage holds 128 of the reduction. Tensor cores keep few bits of a sum,
so each stage is its own product, and these are added in fp32:

consumer 0 and 1 (4 warps each), 64 rows each
    for each stage, for the first and then for the last 128 columns:
        one wgmma 64 x 128 x 128
        total += product * (scale of the row * scale of the weights), while the other consumer multiplies
    consumers begin products by turns, or both would multiply and add at the same time
    scales are loaded one stage ahead

Scales that span the reduction multiply the sum instead. FAST then leaves the whole sum to the tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_core.ops.common.kernels.aggregates import (
    Epilogue,
    Layout,
    Output,
    Product,
    Rows,
    Schedule,
    Tile,
    Tiles,
    Weights,
    aggregate_of,
)
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.exchange.kernels.addresses import SECTIONS
from moe_core.ops.matmul.sm90.kernels.feed import producer
from moe_core.ops.matmul.sm90.kernels.matmul import finish, halves, multiply, multiply_rest
from moe_core.ops.matmul.sm90.kernels.pipeline import (
    PIECE,
    PRODUCER_WARPS,
    RING,
    ROWS,
    WIDE,
    advance,
    allocate_pipeline,
    await_stage,
    await_tile,
    barrier,
    read_facts,
    release_previous_stage,
    release_stage,
    release_tile,
    skip_tile,
)

FP8_DEPTH = gl.constexpr(128)


#: fp32 scales of rows and weights. See `matmul_fp8`.
#: turns: a barrier for each consumer, or None if FAST.
Scales = aggregate_of("Scales", "x weights up_weights turns X_STRIDE X_GROUP ROWS COLUMNS GROUP_ROWS GROUP FAST")


@gluon.jit
def source_of_row(slots, start, within, GATHER: gl.constexpr, TOP_K: gl.constexpr):
    if GATHER == "row":
        return start + within
    elif GATHER == "token":
        return slots // TOP_K
    else:
        return slots


@gluon.jit
def first_weight_row(tile, PART: gl.constexpr, N: gl.constexpr, GATE_LAYOUT: gl.constexpr):
    if GATE_LAYOUT == "halves":
        return tile * PIECE + PART * N
    elif GATE_LAYOUT == "separate":
        return tile * PIECE
    else:
        return tile * WIDE + PART * PIECE


@gluon.jit
def scales_of_part(product, matrix, column, PART: gl.constexpr):
    """Return a pointer to the scales of 128 columns of a tile, or to the first if every weight row has its own. Columns
    behind the matrix take its last scales, and their sums are not stored."""
    scales = product.scales
    GATE_LAYOUT: gl.constexpr = product.weights.GATE_LAYOUT
    pointer = scales.up_weights if (GATE_LAYOUT == "separate") and (PART == 1) else scales.weights
    pointer += matrix.to(gl.int64) * (scales.ROWS * scales.COLUMNS)
    row = first_weight_row(column, PART, product.weights.N, GATE_LAYOUT)
    if scales.GROUP_ROWS == 0:
        return pointer
    elif scales.GROUP_ROWS == 1:
        return pointer + gl.minimum(row, scales.ROWS - PIECE)
    else:
        return pointer + gl.minimum(row // scales.GROUP_ROWS, scales.ROWS - 1) * scales.COLUMNS


@gluon.jit
def take_turn(turns, WHICH: gl.constexpr, PART: gl.constexpr):
    """Wait until the other consumer has begun its part: two turns a stage, consumer 0 first."""
    mbarrier.wait(turns.index(WHICH), (PART + 1 + WHICH) % 2)


@gluon.jit
def pass_turn(turns, WHICH: gl.constexpr):
    barrier()
    mbarrier.arrive(turns.index(1 - WHICH), count=1)


@gluon.jit
def begin_part(rows, weights, turns, PART: gl.constexpr, WHICH: gl.constexpr, layout: gl.constexpr):
    part = weights.slice(PART * PIECE, PIECE, dim=0).permute([1, 0])
    take_turn(turns, WHICH, PART)
    begun = warpgroup_mma(rows, part, gl.zeros([ROWS, PIECE], gl.float32, layout), use_acc=False, is_async=True)
    pass_turn(turns, WHICH)
    return begun


@gluon.jit
def skip_stages(product, stage, phase, WHICH: gl.constexpr):
    """Release the stages of a tile without rows of this consumer, and let the other one have every turn."""
    pipeline, turns = product.pipeline, product.scales.turns
    for _ in range(0, product.weights.D, FP8_DEPTH):
        for part in gl.static_range(2):
            take_turn(turns, WHICH, part)
            pass_turn(turns, WHICH)
        stage, phase = skip_tile(pipeline, stage, phase, FP8_DEPTH, FP8_DEPTH)
    return stage, phase


@gluon.jit
def add_part(total, partial, factor):
    if factor is not None:
        total += partial * factor[:, None]
    else:
        total += partial
    return total


@gluon.jit
def add_stages(product, x_offsets, first_scales, last_scales, stage, phase, WHICH: gl.constexpr, layout: gl.constexpr):
    tiles, pipeline, scales = product.tiles, product.pipeline, product.scales
    BLOCKS: gl.constexpr = (product.weights.D + FP8_DEPTH - 1) // FP8_DEPTH
    first = gl.zeros([ROWS, PIECE], gl.float32, layout)
    last = gl.zeros([ROWS, PIECE], gl.float32, layout)
    if scales.GROUP > 0:
        x_scale, first_scale, last_scale = gl.load(scales.x + x_offsets), gl.load(first_scales), gl.load(last_scales)
    for block in range(BLOCKS):
        first_factor, last_factor = None, None
        await_stage(pipeline, stage, phase)
        rows, weights = tiles.left.index(2 * stage + WHICH), tiles.right.index(stage)
        partial = begin_part(rows, weights, scales.turns, 0, WHICH, layout)
        if scales.GROUP > 0:
            first_factor, last_factor = x_scale * first_scale, x_scale * last_scale
            following = gl.minimum(block + 1, BLOCKS - 1)
            first_scale, last_scale = gl.load(first_scales + following), gl.load(last_scales + following)
            if scales.X_GROUP > 0:
                x_scale = gl.load(scales.x + (x_offsets + following))
        partial = warpgroup_mma_wait(num_outstanding=0, deps=[partial])
        first = add_part(first, partial, first_factor)
        # No product is under way. This makes the compiler add before the next product needs the registers.
        first = warpgroup_mma_wait(num_outstanding=0, deps=[first])
        partial = begin_part(rows, weights, scales.turns, 1, WHICH, layout)
        partial = warpgroup_mma_wait(num_outstanding=0, deps=[partial])
        release_stage(pipeline, stage)
        last = add_part(last, partial, last_factor)
        stage, phase = advance(stage, phase, pipeline.STAGES)
    return first, last, stage, phase


@gluon.jit
def add_all(product, stage, phase, WHICH: gl.constexpr):
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    accumulator = gl.zeros([ROWS, WIDE], gl.float32, wide)
    stage, phase, accumulator = multiply(product, stage, phase, accumulator, WHICH, True)
    stage, phase, accumulator = multiply_rest(product, stage, phase, accumulator, WHICH)
    release_previous_stage(product.pipeline, stage)
    first, last = halves(accumulator)
    return first, last, stage, phase


@gluon.jit
def scale_sums(sums, x_scale, scales, GROUP_ROWS: gl.constexpr):
    x_scale = gl.convert_layout(x_scale, gl.SliceLayout(1, sums.type.layout))
    if GROUP_ROWS == 1:
        columns = gl.arange(0, PIECE, gl.SliceLayout(0, sums.type.layout))
        return sums * (x_scale[:, None] * gl.load(scales + columns)[None, :])
    else:
        return sums * (x_scale * gl.load(scales))[:, None]


@gluon.jit
def consumer(WHICH: gl.constexpr, product):
    tiles, pipeline, weights, layout = product.tiles, product.pipeline, product.weights, product.layout
    epilogue, scales = product.epilogue, product.scales
    FIRST: gl.constexpr = WHICH * ROWS
    BIASED: gl.constexpr = (weights.bias is not None) or (weights.up_bias is not None)
    GATHER: gl.constexpr = product.x.GATHER
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 32])
    within = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, sums))
    stage, phase, place, ring_phase, expert = 0, 0, 0, 0, 0
    layer_number, layer_exists = layer_in_stack(weights.layer_index, weights.NUM_LAYERS)
    layer_exists = layer_exists if weights.layer_index is not None else None
    while expert >= 0:
        tile = await_tile(pipeline, place, ring_phase)
        expert = tile.expert
        if tile.rows > FIRST:
            # Missing rows take the scale of the last existing row. Their sums are not stored.
            exists = gl.minimum(within, tile.rows - 1)
            slots = exists
            if (epilogue.row_weight is not None) or (GATHER != "row"):
                # Ask early: addresses of scales and row weights come from memory.
                slots = gl.load(layout.slot_of_row + tile.start.to(gl.int64) + exists)
                slots = gl.minimum(gl.maximum(slots, 0), layout.num_slots - 1)
            x_rows = source_of_row(slots, tile.start, exists, GATHER, layout.TOP_K)
            matrix = layer_number * weights.NUM_EXPERTS + expert
            first_scales = scales_of_part(product, matrix, tile.column, 0)
            last_scales = scales_of_part(product, matrix, tile.column, 1)
            x_offsets = x_rows * scales.X_STRIDE
            if scales.GROUP == 0:
                x_scale = gl.load(scales.x + x_offsets)
            scale = None
            if epilogue.row_weight is not None:
                scale = gl.load(epilogue.row_weight + slots)
            if scales.FAST:
                first, last, stage, phase = add_all(product, stage, phase, WHICH)
            else:
                first, last, stage, phase = add_stages(
                    product, x_offsets, first_scales, last_scales, stage, phase, WHICH, sums
                )
            if scales.GROUP == 0:
                first = scale_sums(first, x_scale, first_scales, scales.GROUP_ROWS)
                if scales.GROUP_ROWS == 1:
                    # Keeps the compiler from loading the scales of both halves at once: registers have no room.
                    barrier()
                last = scale_sums(last, x_scale, last_scales, scales.GROUP_ROWS)
            # Read again to free registers in the main loop.
            _, start, rows, column = read_facts(pipeline, place)
            tile = Tile(expert, start, rows, column)
            biases = tiles.biases.index(place) if BIASED else None
            buffer = tiles.results.index(WHICH)
            zero = tile.column >> 31 if epilogue.maxima is not None else 0
            finish(product, tile, first, last, biases, scale, layer_exists, buffer, FIRST, zero)
        elif expert >= 0:
            if scales.FAST:
                stage, phase = skip_tile(pipeline, stage, phase, weights.D, FP8_DEPTH)
            else:
                stage, phase = skip_stages(product, stage, phase, WHICH)
        release_tile(pipeline, place)
        place, ring_phase = advance(place, ring_phase, RING)
    tma.store_wait(0)


@gluon.jit
def matmul_fp8(
    x, x_map, x_scales, weight_map, up_map, scales, up_scales, bias, up_bias, row_weight, layer_index, group_sizes,
    group_start, slot_of_row, schedule, counters, y, y_scales, y_map, given, maxima, num_blocks, num_rows, num_slots,
    D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr, NUM_EXPERTS: gl.constexpr, NUM_LAYERS: gl.constexpr,
    X_STRIDE: gl.constexpr, X_SCALE_STRIDE: gl.constexpr, X_GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr, GROUP_ROWS: gl.constexpr, GROUP: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr,
    UP_BIAS_LAYER_STRIDE: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, FAST: gl.constexpr,
    TRUSTED: gl.constexpr, COUNTER: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    HIDDEN: gl.constexpr, RULE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`sm90.kernels.matmul` of dequantised(x) and dequantised(w[expert]). Further arguments:

    x: codes, as bytes. x_scales: fp32, X_SCALE_STRIDE between rows (0: one for all rows), one for X_GROUP columns (128,
    or 0: all). scales, up_scales: fp32 `[.., SCALE_ROWS, SCALE_COLUMNS]` of one matrix, one for GROUP_ROWS weight rows
    (0: all, 1, or 128) and GROUP columns (0: all, or 128). N is a multiple of 128 if GROUP_ROWS is 1, or 128 with
    gate_layout `halves`. X_GROUP needs GROUP, and GROUP needs more than one row. FAST: GROUP is 0. y_scales: None, or y
    is codes too, as bytes: the result in the 16-bit dtype HIDDEN, quantised by RULE. given: the scale fp32 `[1]` of all
    results, for RULE `given`. maxima: None, or int32 `[64]`, 0 or more. See `raise_maxima`.
    """
    x_codes = x.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    codes: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    a_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, ROWS, FP8_DEPTH], codes)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WIDE, FP8_DEPTH], codes)
    DTYPE: gl.constexpr = gl.float16 if HIDDEN == "float16" else gl.bfloat16
    if given is not None:
        gl.store(y_scales, gl.load(given))
    if y_scales is not None:
        y_out = y.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
        out_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2, ROWS, PIECE], codes)
    else:
        y_out = y
        out_tiles = gl.allocate_shared_memory(DTYPE, [2, ROWS, PIECE], gl.NVMMASharedLayout(128, 16, 2))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bias_tiles = gl.allocate_shared_memory(gl.float32, [RING, WIDE], plain)
    pipeline = allocate_pipeline(STAGES, 0 if GATHER == "row" else PRODUCER_WARPS, GATHER != "row")
    tiles = Tiles(a_tiles, w_tiles, bias_tiles, out_tiles)
    turns = None
    if not FAST:
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(turns.index(i), count=1)
        fence_async_shared()
        barrier()
    factors = Scales(
        x_scales, scales, up_scales, turns, X_SCALE_STRIDE, X_GROUP, SCALE_ROWS, SCALE_COLUMNS, GROUP_ROWS, GROUP, FAST
    )
    output = Output(y_out, y_map, None, None, None, N, SCATTER, TRUSTED)
    result_scales = y_scales if given is None else given
    epilogue = Epilogue(row_weight, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT, result_scales, maxima, DTYPE, RULE)
    weights = Weights(
        weight_map, up_map, bias, up_bias, layer_index, D, N, WEIGHT_N, NUM_EXPERTS, NUM_LAYERS, BIAS_LAYER_STRIDE,
        UP_BIAS_LAYER_STRIDE, GATE_LAYOUT, False,
    )  # fmt: skip
    layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
    SPREAD: gl.constexpr = 1 if (SCATTER == "row") or (SCATTER == "slot") else SECTIONS
    blocks = Schedule(schedule, counters, num_blocks, COUNTER, GROUP_M, SPREAD)
    rows = Rows(x_codes, x_map, X_STRIDE, GATHER)
    product = Product(rows, weights, layout, blocks, tiles, pipeline, epilogue, output, factors)
    gl.warp_specialize(
        [(consumer, (0, product)), (consumer, (1, product)), (producer, (product,))],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
