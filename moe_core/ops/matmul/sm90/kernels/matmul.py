"""Ragged grouped matmul for Hopper in Gluon. Warps are specialised: one producer feeds two consumers.

A block takes tiles of 128 rows x 256 accumulator columns from a counter until none is left, so that a multiprocessor
with cheap tiles or near memory takes more. Results do not depend on it.

producer (4 warps)
    takes and announces a tile
    for each 64 of the reduction: waits for a free stage, loads weights by TMA, rows by TMA or, if gathered, by cp.async
consumer 0 and 1 (4 warps each), 64 rows each
    for each stage: one wgmma 64 x 256 x 64
    bias, activation, row weight, cast and store, while the other consumer multiplies
        by TMA, or masked if fewer than 64 rows exist
        for training, the pre-activation first, through the same buffer

A gated tile holds 128 gate and 128 up columns. One thread has both numbers of a pair in its registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from moe_core.ops.activation.kernels.formulas import activate, activate_gated, sigmoid_ptx
from moe_core.ops.common.kernels.aggregates import (
    Epilogue,
    Layout,
    Output,
    Product,
    Rows,
    Schedule,
    Target,
    Tiles,
    Weights,
)
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.exchange.kernels.addresses import SECTIONS, slots_at
from moe_core.ops.lora.kernels.tail import Tail
from moe_core.ops.matmul.sm90.kernels.feed import producer
from moe_core.ops.matmul.sm90.kernels.pipeline import (
    DEPTH,
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
    halves,
    release_previous_stage,
    release_tile,
    skip_tile,
    tma_store,
)
from moe_core.ops.matmul.sm90.kernels.quantize_epilogue import quantize_by, quantize_tile, raise_maxima
from moe_core.ops.matmul.sm90.kernels.tail import multiply_tail, skip_tail


@gluon.jit
def multiply(product, stage, phase, accumulator, WHICH: gl.constexpr, FIRST: gl.constexpr):
    """Multiply one stage. Release the previous one once this product has begun and its product is done."""
    tiles, pipeline = product.tiles, product.pipeline
    CHUNKS: gl.constexpr = tiles.left.shape[0] // pipeline.STAGES
    await_stage(pipeline, stage, phase)
    weights = tiles.right.index(stage)
    if not product.weights.IN_OUT:
        weights = weights.permute([1, 0])
    accumulator = warpgroup_mma(tiles.left.index(CHUNKS * stage + WHICH), weights, accumulator, is_async=True)
    accumulator = warpgroup_mma_wait(num_outstanding=1, deps=[accumulator])
    if not FIRST:
        release_previous_stage(pipeline, stage)
    stage, phase = advance(stage, phase, pipeline.STAGES)
    return stage, phase, accumulator


@gluon.jit
def multiply_rest(product, stage, phase, accumulator, WHICH: gl.constexpr):
    """Multiply all other stages of a tile. The caller releases the last one."""
    STEP: gl.constexpr = product.tiles.left.shape[2]
    for _ in range(STEP, product.weights.D, STEP):
        stage, phase, accumulator = multiply(product, stage, phase, accumulator, WHICH, False)
    return stage, phase, warpgroup_mma_wait(num_outstanding=0, deps=[accumulator])


@gluon.jit
def gated(gate, up, epilogue, SHORT: gl.constexpr = True):
    """SHORT: use the sigmoid of fewer instructions. Other activations leave no registers for it."""
    if SHORT and ((epilogue.ACTIVATION == "silu") or (epilogue.ACTIVATION == "swiglu_oai")):
        result = activate_gated(gate, up, epilogue.ACTIVATION, epilogue.ALPHA, epilogue.LIMIT, sigmoid_ptx)
    else:
        result = activate_gated(gate, up, epilogue.ACTIVATION, epilogue.ALPHA, epilogue.LIMIT)
    return result


@gluon.jit
def activate_pairs(half, epilogue, SHORT: gl.constexpr = True):
    gate, up = gl.split(gl.reshape(half, [ROWS, PIECE // 2, 2]))
    return gated(gate, up, epilogue, SHORT)


@gluon.jit
def join_halves(left, right):
    return gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [ROWS, PIECE])


@gluon.jit
def add_bias(values, bias_row, FIRST: gl.constexpr):
    """Add biases from column FIRST of the tile on, read in parts for lack of registers."""
    if bias_row is not None:
        COLUMNS: gl.constexpr = values.shape[1]
        values += bias_row.slice(FIRST, COLUMNS).load(gl.SliceLayout(0, values.type.layout))[None, :]
    return values


@gluon.jit
def store_piece(values, buffer, target, layout, tile, column, FIRST: gl.constexpr, zero=0):
    """Write 64 x 128 or 64 x 64 values: by TMA, which clips columns, if all rows exist, else by row.

    zero: a 0 that the compiler cannot see keeps it from holding addresses in registers from tile to tile.
    """
    COLUMNS: gl.constexpr = values.shape[1]
    IN_ORDER: gl.constexpr = target.TRUSTED and target.SCATTER == "row"
    tma.store_wait(0)
    barrier()
    buffer.store(values.to(buffer.dtype))
    whole = False
    if IN_ORDER:
        whole = tile.rows >= FIRST + ROWS
    if whole:
        fence_async_shared()
        barrier()
        if target.map is not None:
            BOX: gl.constexpr = target.map.block_type.shape[1]
            if BOX == COLUMNS:
                tma_store(target.map, [tile.start + FIRST, column], buffer)
            else:
                for part in gl.static_range(0, COLUMNS, BOX):
                    tma_store(target.map, [tile.start + FIRST, column + part], buffer.slice(part, BOX, dim=1))
    else:
        barrier()
        store_rows(buffer, target, layout, tile, column, FIRST, zero)


@gluon.jit
def store_rows(buffer, target, layout, tile, column, FIRST: gl.constexpr, zero=0):
    """Write a buffer by row, for blocks without all of its rows and for slots."""
    ROOM: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    IN_ORDER: gl.constexpr = target.TRUSTED and target.SCATTER == "row"
    # If slots are read: all rows at once. Else in parts of one row per thread, which share addresses.
    ACROSS: gl.constexpr = COLUMNS // 8
    ONCE: gl.constexpr = 32 // ACROSS * gl.num_warps()
    HEIGHT: gl.constexpr = ONCE if IN_ORDER and ONCE < ROOM else ROOM
    places: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    row = zero + gl.arange(0, HEIGHT, gl.SliceLayout(1, places))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, places))
    for above in gl.static_range(0, ROOM, HEIGHT):
        cast = buffer.slice(above, HEIGHT, dim=0).load(places)
        first_row = tile.start.to(gl.int64) + FIRST + above
        exists = row < tile.rows - FIRST - above
        if not IN_ORDER:
            slots = gl.load(layout.slot_of_row + first_row + row, mask=exists, other=-1)
            exists = exists & (slots >= 0) & (slots < layout.num_slots)
        if (target.SCATTER == "row") or (target.SCATTER == "slot"):
            if target.SCATTER == "slot":
                first_row = 0
                row = slots.to(gl.int64)
            pointers = target.array + first_row * target.WIDTH + row[:, None] * target.WIDTH + columns[None, :]
        else:
            there, exists = slots_at(target.array, slots, exists, target.SCATTER)
            pointers = there[:, None] + columns[None, :]
        mask = exists[:, None] & (columns < target.END)[None, :]
        gl.store(pointers, cast, mask=mask)


@gluon.jit
def store_pre(product, tile, values, buffer, PART: gl.constexpr, FIRST: gl.constexpr):
    """Write the first or the last 128 columns of a tile of the pre-activation by layout row. If up columns follow, gate
    columns have their own descriptor, because a narrow last tile would overwrite up columns."""
    GATE_LAYOUT: gl.constexpr = product.epilogue.GATE_LAYOUT
    if (GATE_LAYOUT == "halves") or (GATE_LAYOUT == "separate"):
        column = tile.column * PIECE + PART * product.output.N
    else:
        column = tile.column * WIDE + PART * PIECE
    store_piece(values, buffer, pre_target(product, PART), product.layout, tile, column, FIRST)


@gluon.jit
def pre_target(product, PART: gl.constexpr):
    output = product.output
    GATE_LAYOUT: gl.constexpr = product.epilogue.GATE_LAYOUT
    N: gl.constexpr = output.N
    if (GATE_LAYOUT == "halves") or (GATE_LAYOUT == "separate"):
        target = Target(output.pre, output.gate_map if PART == 0 else output.pre_map, 2 * N, N + PART * N, "row", True)
    else:
        WIDTH: gl.constexpr = N if GATE_LAYOUT is None else 2 * N
        target = Target(output.pre, output.pre_map, WIDTH, WIDTH, "row", True)
    return target


@gluon.jit
def result_target(product):
    output = product.output
    return Target(output.y, output.y_map, output.N, output.N, output.SCATTER, output.TRUSTED)


@gluon.jit
def store_result(product, tile, result, buffer, column, FIRST: gl.constexpr, zero=0):
    store_piece(result, buffer, result_target(product), product.layout, tile, column, FIRST, zero)


@gluon.jit
def weigh(result, scale, layer_exists):
    """Multiply with row weights. Return NaN for a layer outside the stack."""
    if scale is not None:
        result *= gl.convert_layout(scale, gl.SliceLayout(1, result.type.layout))[:, None]
    if layer_exists is not None:
        result = gl.where(layer_exists, result, float("nan"))
    return result


@gluon.jit
def finish(product, tile, first, last, biases, scale, layer_exists, buffer, FIRST: gl.constexpr, zero=0):
    epilogue, output = product.epilogue, product.output
    N: gl.constexpr = output.N
    # fp8 products hold their scales.
    SHORT: gl.constexpr = product.scales is None
    if epilogue.GATE_LAYOUT is not None:
        first = add_bias(first, biases, 0)
        if output.pre is not None:
            store_pre(product, tile, first, buffer, 0, FIRST)
        # Activate between two stores, while the first one's buffer is being read.
        if output.y is not None and epilogue.GATE_LAYOUT == "interleaved":
            left = activate_pairs(first, epilogue, SHORT)
            last = add_bias(last, biases, PIECE)
            result = join_halves(left, activate_pairs(last, epilogue, SHORT))
        else:
            last = add_bias(last, biases, PIECE)
            if output.y is not None:
                result = gated(first, last, epilogue, SHORT)
        if output.y is not None:
            result = weigh(result, scale, layer_exists)
            if epilogue.RULE == "given":
                result = quantize_by(result.to(epilogue.DTYPE).to(gl.float32), epilogue.scales)
            elif epilogue.scales is not None:
                result = result.to(epilogue.DTYPE).to(gl.float32)
                result = quantize_tile(result, epilogue.scales, tile, FIRST, N, epilogue.RULE)
            elif epilogue.maxima is not None:
                result = result.to(epilogue.DTYPE)
                raise_maxima(result, epilogue.maxima, tile.rows, tile.column * PIECE, FIRST, N, zero)
        if output.pre is not None:
            store_pre(product, tile, last, buffer, 1, FIRST)
        if output.y is not None:
            store_result(product, tile, result, buffer, tile.column * PIECE, FIRST, zero)
    else:
        column = tile.column * WIDE
        for part in gl.static_range(2):
            result = add_bias(first if part == 0 else last, biases, part * PIECE)
            if output.pre is not None:
                store_pre(product, tile, result, buffer, part, FIRST)
            if output.y is not None:
                if epilogue.ACTIVATION is not None:
                    result = activate(result, epilogue.ACTIVATION)
                result = weigh(result, scale, layer_exists)
                if epilogue.maxima is not None:
                    result = result.to(epilogue.DTYPE)
                    raise_maxima(result, epilogue.maxima, tile.rows, column, FIRST, N, zero)
                store_result(product, tile, result, buffer, column, FIRST, zero)
            column += PIECE


@gluon.jit
def load_scale(product, slots):
    """Return the row weights of slots, moved into the array because slots are not trusted."""
    return gl.load(product.epilogue.row_weight + gl.minimum(gl.maximum(slots, 0), product.layout.num_slots - 1))


@gluon.jit
def consumer(WHICH: gl.constexpr, product):
    tiles, pipeline, weights = product.tiles, product.pipeline, product.weights
    FIRST: gl.constexpr = WHICH * ROWS
    WEIGHTED: gl.constexpr = product.epilogue.row_weight is not None
    BIASED: gl.constexpr = (weights.bias is not None) or (weights.up_bias is not None)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    within = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, sums))
    stage, phase, place, ring_phase, expert = 0, 0, 0, 0, 0
    _, layer_exists = layer_in_stack(weights.layer_index, weights.NUM_LAYERS)
    layer_exists = layer_exists if weights.layer_index is not None else None
    while expert >= 0:
        tile = await_tile(pipeline, place, ring_phase)
        expert = tile.expert
        if tile.rows > FIRST:
            if WEIGHTED:
                # Ask early: addresses of row weights come from memory.
                rows = product.layout.slot_of_row
                slots = gl.load(rows + tile.start.to(gl.int64) + within, mask=within < tile.rows, other=0)
            accumulator = gl.zeros([ROWS, WIDE], gl.float32, sums)
            stage, phase, accumulator = multiply(product, stage, phase, accumulator, WHICH, True)
            scale = load_scale(product, slots) if WEIGHTED else None
            stage, phase, accumulator = multiply_rest(product, stage, phase, accumulator, WHICH)
            release_previous_stage(pipeline, stage)
            if product.tail is not None:
                stage, phase, accumulator = multiply_tail(product, stage, phase, accumulator, WHICH)
            biases = tiles.biases.index(place) if BIASED else None
            buffer = tiles.results.index(WHICH)
            first, last = halves(accumulator)
            finish(product, tile, first, last, biases, scale, layer_exists, buffer, FIRST)
        elif expert >= 0:
            stage, phase = skip_tile(pipeline, stage, phase, weights.D, DEPTH)
            if product.tail is not None:
                stage, phase = skip_tail(product, stage, phase)
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
    tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed,
    TAIL_RANK: gl.constexpr, TAIL_SLOTS: gl.constexpr, TAIL_NUM_EXPERTS: gl.constexpr, TAIL_SLOT_STRIDE: gl.constexpr,
    TAIL_EXPERT_STRIDE: gl.constexpr, TAIL_R_STRIDE: gl.constexpr, TAIL_N_STRIDE: gl.constexpr,
    TAIL_THRESHOLD: gl.constexpr, TAIL_MASKED: gl.constexpr, TAIL_SALT: gl.constexpr, TAIL_BLOCK_R: gl.constexpr,
):  # fmt: skip
    """Compute tiles of y as `portable.kernel.matmul_ogs` does.

    schedule: row blocks of 128. counters[COUNTER]: tiles taken, 0 at the start. *_map: TMA descriptors. x_map only if
    rows are not gathered. The weights are one matrix. gate_map: the gate columns of pre if up columns follow them. pre
    needs TRUSTED: every row of the layout has a slot.
    """
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = weight_map.dtype
    a_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, DEPTH], swizzled)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, DEPTH, WIDE] if IN_OUT else [STAGES, WIDE, DEPTH], swizzled)
    out_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, PIECE], swizzled)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bias_tiles = gl.allocate_shared_memory(gl.float32, [RING, WIDE], plain)
    pipeline = allocate_pipeline(STAGES, 0 if GATHER == "row" else PRODUCER_WARPS, GATHER != "row")
    join(PDL)
    tiles = Tiles(a_tiles, w_tiles, bias_tiles, out_tiles)
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
    tail = None
    if tail_low is not None:
        tail = Tail(
            tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed, TAIL_RANK, TAIL_SLOTS, TAIL_NUM_EXPERTS,
            TAIL_SLOT_STRIDE, TAIL_EXPERT_STRIDE, TAIL_R_STRIDE, TAIL_N_STRIDE, TAIL_THRESHOLD, TAIL_MASKED, TAIL_SALT,
            TAIL_BLOCK_R,
        )  # fmt: skip
    product = Product(rows, weights, layout, blocks, tiles, pipeline, epilogue, output, tail=tail)
    gl.warp_specialize(
        [(consumer, (0, product)), (consumer, (1, product)), (producer, (product,))],
        [4, PRODUCER_WARPS],
        [208, 88] if tail_low is None else [200, 104],
    )
