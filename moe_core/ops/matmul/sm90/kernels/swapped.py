"""The Hopper matmul with swapped operands, in Gluon. Results equal `matmul` bit for bit.

wgmma multiplies 64 weight columns by 8 to 160 rows, so 130 rows cost 136 and not 192. A row block has up to 160 rows,
cut evenly in eights. For each 64 of the reduction a full block reads 52 KB, and blocks of 128 read 60 KB for the same
rows.

producer (4 warps)
    as for tall row blocks, with chunks of 32 rows
consumer 0 and 1 (4 warps each), two times 64 weight columns each
    for each stage: two wgmma 64 x rows x 64, by a loop of the tile's height
    for each 32 rows: bias, activation, row weight, cast, transposed store to one of two buffers, TMA or store by row
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from moe_core.ops.activation.kernels.formulas import activate, activate_gated, sigmoid_ptx
from moe_core.ops.common.kernels.aggregates import Epilogue, Layout, Output, Product, Rows, Schedule, Tiles, Weights
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.exchange.kernels.addresses import SECTIONS
from moe_core.ops.matmul.sm90.kernels.feed import producer
from moe_core.ops.matmul.sm90.kernels.matmul import pre_target, result_target, store_rows
from moe_core.ops.matmul.sm90.kernels.pipeline import (
    DEPTH,
    PIECE,
    PRODUCER_WARPS,
    RING,
    ROOM,
    WIDE,
    advance,
    allocate_pipeline,
    await_tile,
    barrier,
    release_tile,
    skip_tile,
    tma_store,
)
from moe_core.ops.matmul.sm90.kernels.swapped_products import LEFT, PART, PIECES, multiply_tile


@gluon.jit
def biases_of(weights, layer_number, expert, column, UP: gl.constexpr, layout: gl.constexpr):
    """Return biases fp32 `[64]` from a column on. UP: up columns, which follow gate columns or have an array."""
    APART: gl.constexpr = (weights.GATE_LAYOUT == "halves") or (weights.GATE_LAYOUT == "separate")
    within = column + gl.arange(0, LEFT, gl.SliceLayout(1, layout))
    inside = within < (weights.N if APART else weights.WEIGHT_N)
    values = gl.zeros([LEFT], gl.float32, gl.SliceLayout(1, layout))
    if UP and weights.GATE_LAYOUT == "separate":
        if weights.up_bias is not None:
            base = weights.up_bias + layer_number * weights.UP_BIAS_LAYER_STRIDE + expert.to(gl.int64) * weights.N
            values += gl.load(base + within, mask=inside, other=0.0).to(gl.float32)
    elif weights.bias is not None:
        base = weights.bias + layer_number * weights.BIAS_LAYER_STRIDE + expert.to(gl.int64) * weights.WEIGHT_N
        if UP:
            within += weights.N
        values += gl.load(base + within, mask=inside, other=0.0).to(gl.float32)
    return values


@gluon.jit
def exchange_pairs(values):
    """Return gate and up `[32, 32]` of 64 interleaved columns: lanes four apart exchange half of what they hold."""
    exchanged: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [4, 0, 0], [0, 8, 0], [0, 16, 0]], [[0, 2, 0], [0, 4, 0], [0, 1, 0], [1, 0, 0], [2, 0, 0]],
        [[8, 0, 0], [16, 0, 0]], [], [LEFT // 2, PART, 2],
    )  # fmt: skip
    apart = gl.permute(gl.reshape(values, [LEFT // 2, 2, PART]), [0, 2, 1])
    gate, up = gl.split(gl.convert_layout(apart, exchanged))
    return gate, up


@gluon.jit
def weigh(product, result, place, FIRST: gl.constexpr, layer_exists):
    """Multiply with row weights. Return NaN for a layer outside the stack."""
    if product.tiles.row_scales is not None:
        scales = product.tiles.row_scales.index(place).slice(FIRST, PART)
        result *= scales.load(gl.SliceLayout(0, result.type.layout))[None, :]
    if layer_exists is not None:
        result = gl.where(layer_exists, result, float("nan"))
    return result


@gluon.jit
def result_of_pairs(product, values, place, FIRST: gl.constexpr, layer_exists):
    """Return 32 results x 32 rows of interleaved columns, in the layout of wgmma's sums, which a transposed store of
    matrices takes."""
    epilogue = product.epilogue
    gate, up = exchange_pairs(values)
    result = activate_gated(gate, up, epilogue.ACTIVATION, epilogue.ALPHA, epilogue.LIMIT, sigmoid_ptx)
    result = weigh(product, result, place, FIRST, layer_exists).to(product.tiles.results.dtype)
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [LEFT // 2, PART]
    )
    return gl.convert_layout(result, layout)


@gluon.jit
def free_buffer(product, turn, WHICH: gl.constexpr):
    """Return the buffer of `turn`. The last bulk store was from the other one, which may be pending."""
    tma.store_wait(1)
    barrier()
    return product.tiles.results.index(2 * WHICH + turn)


@gluon.jit
def send(product, target, tile, buffer, column, turn, FIRST: gl.constexpr):
    """Write a buffer of 32 rows. Return the next turn: it flips with every bulk store and no other."""
    BULK: gl.constexpr = (
        target.TRUSTED and target.SCATTER == "row" and target.map is not None and buffer.shape[1] == LEFT
    )
    whole = False
    if BULK:
        whole = tile.rows >= FIRST + PART
    if whole:
        fence_async_shared()
        barrier()
        if BULK:
            tma_store(target.map, [tile.start + FIRST, column], buffer)
        turn ^= 1
    else:
        barrier()
        store_rows(buffer, target, product.layout, tile, column, FIRST)
    return turn


@gluon.jit
def store_part(product, target, tile, values, column, turn, WHICH: gl.constexpr, FIRST: gl.constexpr):
    buffer = free_buffer(product, turn, WHICH)
    buffer.permute([1, 0]).store(values.to(buffer.dtype))
    return send(product, target, tile, buffer, column, turn, FIRST)


@gluon.jit
def finish_part(
    product, tile, place, left, right, turn, layer_exists, WHICH: gl.constexpr, KIND: gl.constexpr, FIRST: gl.constexpr
):
    """Finish 32 rows of both of a consumer's left operands, biases added. Return the next turn."""
    epilogue, output = product.epilogue, product.output
    GATE_LAYOUT: gl.constexpr = epilogue.GATE_LAYOUT
    if GATE_LAYOUT == "interleaved":
        # A column of the pre-activation: the result has half as many.
        column = tile.column * WIDE + (WHICH if KIND == "one" else 2 * WHICH) * LEFT
        if output.pre is not None:
            turn = store_part(product, pre_target(product, 0), tile, left, column, turn, WHICH, FIRST)
            if KIND != "one":
                turn = store_part(product, pre_target(product, 0), tile, right, column + LEFT, turn, WHICH, FIRST)
        if output.y is not None:
            first = result_of_pairs(product, left, place, FIRST, layer_exists)
            if KIND == "one":
                buffer = free_buffer(product, turn, WHICH).slice(0, PART, dim=1)
                buffer.permute([1, 0]).store(first)
            else:
                second = result_of_pairs(product, right, place, FIRST, layer_exists)
                buffer = free_buffer(product, turn, WHICH)
                buffer.slice(0, PART, dim=1).permute([1, 0]).store(first)
                buffer.slice(PART, PART, dim=1).permute([1, 0]).store(second)
            turn = send(product, result_target(product), tile, buffer, column // 2, turn, FIRST)
    elif GATE_LAYOUT is not None:
        column = tile.column * PIECE + WHICH * LEFT
        if output.pre is not None:
            turn = store_part(product, pre_target(product, 0), tile, left, column, turn, WHICH, FIRST)
            up_column = column + output.N
            turn = store_part(product, pre_target(product, 1), tile, right, up_column, turn, WHICH, FIRST)
        if output.y is not None:
            result = activate_gated(left, right, epilogue.ACTIVATION, epilogue.ALPHA, epilogue.LIMIT, sigmoid_ptx)
            result = weigh(product, result, place, FIRST, layer_exists)
            turn = store_part(product, result_target(product), tile, result, column, turn, WHICH, FIRST)
    else:
        for number in gl.static_range(1 if KIND == "one" else 2):
            column = tile.column * WIDE + WHICH * LEFT + number * PIECE
            result = left if number == 0 else right
            if output.pre is not None:
                turn = store_part(product, pre_target(product, 0), tile, result, column, turn, WHICH, FIRST)
            if output.y is not None:
                if epilogue.ACTIVATION is not None:
                    result = activate(result, epilogue.ACTIVATION, sigmoid_ptx)
                result = weigh(product, result, place, FIRST, layer_exists)
                turn = store_part(product, result_target(product), tile, result, column, turn, WHICH, FIRST)
    return turn


@gluon.jit
def multiply_and_finish(
    product, tile, place, stage, phase, turn, layer_number, layer_exists, WHICH: gl.constexpr, KIND: gl.constexpr
):
    """Compute a consumer's part of a tile. Return the next stage, phase and turn."""
    weights = product.weights
    BIASED: gl.constexpr = (weights.bias is not None) or (weights.up_bias is not None)
    APART: gl.constexpr = (weights.GATE_LAYOUT == "halves") or (weights.GATE_LAYOUT == "separate")
    LEFTS: gl.constexpr = 1 if KIND == "one" else 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    if BIASED:
        # Ask early.
        if APART:
            column = tile.column * PIECE + WHICH * LEFT
            second = column
        else:
            column = tile.column * WIDE + (2 * WHICH if KIND == "adjacent" else WHICH) * LEFT
            second = column + (LEFT if KIND == "adjacent" else PIECE)
        left_biases = biases_of(weights, layer_number, tile.expert, column, False, layout)
        right_biases = left_biases
        if LEFTS == 2:
            right_biases = biases_of(weights, layer_number, tile.expert, second, APART, layout)
    zeros = (gl.zeros([LEFT, PART], gl.float32, layout),) * PIECES
    stage, phase, sums = multiply_tile(product, tile, stage, phase, zeros * LEFTS, WHICH, KIND)
    for piece in gl.static_range(PIECES):
        if tile.rows > PART * piece:
            left, right = sums[piece], sums[(LEFTS - 1) * PIECES + piece]
            if BIASED:
                left += left_biases[:, None]
                right += right_biases[:, None]
            turn = finish_part(product, tile, place, left, right, turn, layer_exists, WHICH, KIND, PART * piece)
    return stage, phase, turn


@gluon.jit
def consumer(WHICH: gl.constexpr, product):
    pipeline, weights = product.pipeline, product.weights
    APART: gl.constexpr = (weights.GATE_LAYOUT == "halves") or (weights.GATE_LAYOUT == "separate")
    KIND: gl.constexpr = "adjacent" if weights.GATE_LAYOUT == "interleaved" else "apart"
    # Blocks of 64 columns in the last column tile: of a pair if gate and up are apart.
    COLUMNS: gl.constexpr = weights.N if weights.GATE_LAYOUT != "interleaved" else 2 * weights.N
    ACROSS: gl.constexpr = PIECE if APART else WIDE
    LAST: gl.constexpr = (COLUMNS - 1) // ACROSS
    BLOCKS: gl.constexpr = (COLUMNS - ACROSS * LAST + LEFT - 1) // LEFT
    NARROW: gl.constexpr = (BLOCKS <= 2) and not APART
    IDLE: gl.constexpr = BLOCKS <= WHICH
    stage, phase, place, ring_phase, expert, turn = 0, 0, 0, 0, 0, 0
    layer_number, layer_exists = layer_in_stack(weights.layer_index, weights.NUM_LAYERS)
    layer_number = layer_number.to(gl.int64)
    layer_exists = layer_exists if weights.layer_index is not None else None
    while expert >= 0:
        tile = await_tile(pipeline, place, ring_phase)
        expert = tile.expert
        if expert >= 0:
            if (NARROW or IDLE) and tile.column == LAST:
                if IDLE:
                    stage, phase = skip_tile(pipeline, stage, phase, weights.D, DEPTH)
                else:
                    stage, phase, turn = multiply_and_finish(
                        product, tile, place, stage, phase, turn, layer_number, layer_exists, WHICH, "one"
                    )
            else:
                stage, phase, turn = multiply_and_finish(
                    product, tile, place, stage, phase, turn, layer_number, layer_exists, WHICH, KIND
                )
        release_tile(pipeline, place)
        place, ring_phase = advance(place, ring_phase, RING)
    tma.store_wait(0)


@gluon.jit
def matmul_ogs(
    x, x_map, weight_map, up_map, bias, up_bias, row_weight, layer_index, group_sizes, group_start, slot_of_row,
    schedule, counters, y, y_map, pre, pre_map, gate_map, num_blocks, num_rows, num_slots,
    D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr, NUM_EXPERTS: gl.constexpr, NUM_LAYERS: gl.constexpr,
    X_STRIDE: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr, UP_BIAS_LAYER_STRIDE: gl.constexpr,
    TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    IN_OUT: gl.constexpr, TRUSTED: gl.constexpr, COUNTER: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """As `sm90.kernels.matmul`. schedule: row blocks of 160, cut by `even_block` in eights. Boxes of x_map, y_map,
    pre_map and gate_map are 32 rows of 64 columns."""
    # 384 threads start with 168 registers each, 504 over three groups. Gathering takes addresses.
    PRODUCER_REGISTERS: gl.constexpr = 24 if GATHER == "row" and row_weight is None else 40
    CONSUMER_REGISTERS: gl.constexpr = (504 - PRODUCER_REGISTERS) // 2
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = weight_map.dtype
    # `product_text` expects weights first and rows of x behind them: larger buffers come first.
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, DEPTH, WIDE] if IN_OUT else [STAGES, WIDE, DEPTH], swizzled)
    a_tiles = gl.allocate_shared_memory(dtype, [PIECES * STAGES, PART, DEPTH], swizzled)
    out_tiles = gl.allocate_shared_memory(dtype, [4, PART, LEFT], swizzled)
    row_lists = gl.allocate_shared_memory(gl.int32, [RING, ROOM if GATHER != "row" else 32], plain)
    row_scales = None
    if row_weight is not None:
        row_scales = gl.allocate_shared_memory(gl.float32, [RING, ROOM], plain)
    pipeline = allocate_pipeline(STAGES, 0 if GATHER == "row" else PRODUCER_WARPS, GATHER != "row")
    join(PDL)
    tiles = Tiles(a_tiles, w_tiles, None, out_tiles, row_lists, row_scales)
    output = Output(y, y_map, pre, pre_map, gate_map, N, SCATTER, TRUSTED)
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
