"""Ragged grouped matmul for Hopper, its warps specialised: one producer feeds two consumers. Written in Gluon.

A block works on tiles of 128 rows x 256 accumulator columns until none is left. It takes each from a counter, so that a
multiprocessor with cheap tiles or near memory takes more of them; which block computes a tile does not change it.

producer (4 warps): take a tile, announce it; for each 64 of the reduction: wait for a free stage, load weights by TMA
    and rows by TMA (in layout order) or cp.async (gathered)
consumer 0, 1 (4 warps each): 64 rows each; for each stage: one wgmma 64 x 256 x 64; then bias, activation, row weight,
    cast, and a TMA store (or a masked one where fewer than 64 rows exist), while the other consumer multiplies; for
    training the pre-activation is stored before its result, through the same buffer

A gated tile holds 128 gate and 128 up columns, both halves of a pair in the registers of one thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from moe_core.ops.activation.kernels.formulas import activate, activate_gated
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.exchange.kernels.addresses import SECTIONS, slots_at
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
    hand_back,
    hand_back_before,
    skip_tile,
    tma_store,
)
from moe_core.ops.matmul.sm90.kernels.quantize_epilogue import quantize_by, quantize_tile, raise_maxima


@gluon.jit
def multiply(
    accumulator, a_tiles, w_tiles, full, empty, stage, phase, WHICH: gl.constexpr, GATHER: gl.constexpr,
    IN_OUT: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, CHUNKS: gl.constexpr = 2,
):  # fmt: skip
    """One stage; the one before it is free when this one's product has begun and its own is done.

    CHUNKS: of 64 rows, that a stage has room for.
    """
    await_stage(full, stage, phase, GATHER)
    weights = w_tiles.index(stage)
    if not IN_OUT:
        weights = weights.permute([1, 0])
    accumulator = warpgroup_mma(a_tiles.index(CHUNKS * stage + WHICH), weights, accumulator, is_async=True)
    accumulator = warpgroup_mma_wait(num_outstanding=1, deps=[accumulator])
    if not FIRST:
        hand_back_before(empty, stage, STAGES)
    stage, phase = advance(stage, phase, STAGES)
    return accumulator, stage, phase


@gluon.jit
def halves(accumulator, INTERLEAVED: gl.constexpr):
    """(even, odd) columns, or (first, last) halves: each pair is in one thread already."""
    if INTERLEAVED:
        first, last = gl.split(gl.reshape(accumulator, [ROWS, PIECE, 2]))
    else:
        first, last = gl.split(gl.permute(gl.reshape(accumulator, [ROWS, 2, PIECE]), [0, 2, 1]))
    return first, last


@gluon.jit
def activate_pairs(half, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    """The result of 128 interleaved columns: 64."""
    gate, up = gl.split(gl.reshape(half, [ROWS, PIECE // 2, 2]))
    return activate_gated(gate, up, ACTIVATION, ALPHA, LIMIT)


@gluon.jit
def beside(left, right):
    """[left, right], 64 columns each."""
    return gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [ROWS, PIECE])


@gluon.jit
def add_bias(values, bias_row, FIRST: gl.constexpr):
    """Biases, from column FIRST of the tile, are read when it is their turn: all at once would not fit into the
    registers."""
    if bias_row is not None:
        COLUMNS: gl.constexpr = values.shape[1]
        values += bias_row.slice(FIRST, COLUMNS).load(gl.SliceLayout(0, values.type.layout))[None, :]
    return values


@gluon.jit
def store_piece(
    values, buffer, array, array_map, slot_of_row, start, rows, num_slots, column,
    FIRST: gl.constexpr, WIDTH: gl.constexpr, END: gl.constexpr, SCATTER: gl.constexpr, TRUSTED: gl.constexpr, zero=0,
):  # fmt: skip
    """Write 64 x 128 or 64 x 64 values: as they lie by TMA, which clips columns, where all rows exist, else by row.

    WIDTH: columns of a row of the array; END: the column to stop at, which is where array_map ends. zero: 0, but where
    the compiler does not know it, it does not hold what is computed from it in registers from tile to tile.
    """
    COLUMNS: gl.constexpr = values.shape[1]
    tma.store_wait(0)
    barrier()
    buffer.store(values.to(buffer.dtype))
    whole = False
    if TRUSTED and SCATTER == "row":
        whole = rows >= FIRST + ROWS
    if whole:
        fence_async_shared()
        barrier()
        if array_map is not None:
            BOX: gl.constexpr = array_map.block_type.shape[1]
            if BOX == COLUMNS:
                tma_store(array_map, [start + FIRST, column], buffer)
            else:
                for part in gl.static_range(0, COLUMNS, BOX):
                    tma_store(array_map, [start + FIRST, column + part], buffer.slice(part, BOX, dim=1))
    else:
        barrier()
        # Where slots are read first, all at once; else in parts of one row per thread, which share their addresses.
        ACROSS: gl.constexpr = COLUMNS // 8
        HEIGHT: gl.constexpr = 32 // ACROSS * gl.num_warps() if TRUSTED and SCATTER == "row" else ROWS
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
        target = zero + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        for above in gl.static_range(0, ROWS, HEIGHT):
            cast = buffer.slice(above, HEIGHT, dim=0).load(layout)
            first_row = start.to(gl.int64) + FIRST + above
            exists = target < rows - FIRST - above
            if SCATTER != "row" or not TRUSTED:
                slots = gl.load(slot_of_row + first_row + target, mask=exists, other=-1)
                exists = exists & (slots >= 0) & (slots < num_slots)
            if (SCATTER == "row") or (SCATTER == "slot"):
                if SCATTER == "slot":
                    first_row = 0
                    target = slots.to(gl.int64)
                pointers = array + first_row * WIDTH + target[:, None] * WIDTH + columns[None, :]
            else:
                there, exists = slots_at(array, slots, exists, SCATTER)
                pointers = there[:, None] + columns[None, :]
            mask = exists[:, None] & (columns < END)[None, :]
            gl.store(pointers, cast, mask=mask)


@gluon.jit
def store_pre(
    values, buffer, pre, pre_map, gate_map, start, rows, tile,
    PART: gl.constexpr, FIRST: gl.constexpr, N: gl.constexpr, GATE_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write the first or the last 128 columns of a tile of the pre-activation by layout row.

    They are neighbours, or those of the gate and those of up, which lie N further: a narrow last tile's gate columns
    would run into them, so they have a map of their own that ends there.
    """
    WIDTH: gl.constexpr = N if GATE_LAYOUT is None else 2 * N
    if (GATE_LAYOUT == "halves") or (GATE_LAYOUT == "separate"):
        column = tile * PIECE + PART * N
        END: gl.constexpr = N + PART * N
        array_map = gate_map if PART == 0 else pre_map
    else:
        column = tile * WIDE + PART * PIECE
        END: gl.constexpr = WIDTH
        array_map = pre_map
    store_piece(values, buffer, pre, array_map, None, start, rows, 0, column, FIRST, WIDTH, END, "row", True)


@gluon.jit
def weigh(result, scale, layer_exists, STACKED: gl.constexpr):
    """Row weights, and NaN for a layer outside the stack."""
    if scale is not None:
        result *= gl.convert_layout(scale, gl.SliceLayout(1, result.type.layout))[:, None]
    if STACKED:
        result = gl.where(layer_exists, result, float("nan"))
    return result


@gluon.jit
def finish(
    first, last, bias_row, scale, layer_exists, buffer, y, y_map, pre, pre_map, gate_map, slot_of_row, start, rows,
    num_slots, tile, FIRST: gl.constexpr, N: gl.constexpr, SCATTER: gl.constexpr, GATE_LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, TRUSTED: gl.constexpr, STACKED: gl.constexpr,
    y_scales=None, DTYPE: gl.constexpr = None, RULE: gl.constexpr = None, zero=0, maxima=None,
):  # fmt: skip
    """Bias, [pre-activation cast and stored], activation, row weight, cast, store.

    y_scales, if not None: of gated activations' results, which are cast to DTYPE and quantised by RULE (`given`: to the
    scale in y_scales); y: their codes. maxima, if not None: see `raise_maxima`; of results cast to DTYPE.
    """
    if GATE_LAYOUT is not None:
        first = add_bias(first, bias_row, 0)
        if pre is not None:
            store_pre(first, buffer, pre, pre_map, gate_map, start, rows, tile, 0, FIRST, N, GATE_LAYOUT)
        # The activation is between two stores, so that it runs while the buffer of the first is read.
        if y is not None and GATE_LAYOUT == "interleaved":
            left = activate_pairs(first, ACTIVATION, ALPHA, LIMIT)
            last = add_bias(last, bias_row, PIECE)
            result = beside(left, activate_pairs(last, ACTIVATION, ALPHA, LIMIT))
        else:
            last = add_bias(last, bias_row, PIECE)
            if y is not None:
                result = activate_gated(first, last, ACTIVATION, ALPHA, LIMIT)
        if y is not None:
            result = weigh(result, scale, layer_exists, STACKED)
            if RULE == "given":
                result = quantize_by(result.to(DTYPE).to(gl.float32), y_scales)
            elif y_scales is not None:
                result = quantize_tile(result.to(DTYPE).to(gl.float32), y_scales, start, rows, tile, FIRST, N, RULE)
            elif maxima is not None:
                result = result.to(DTYPE)
                raise_maxima(result, maxima, rows, tile * PIECE, FIRST, N, zero)
        if pre is not None:
            store_pre(last, buffer, pre, pre_map, gate_map, start, rows, tile, 1, FIRST, N, GATE_LAYOUT)
        if y is not None:
            column = tile * PIECE
            store_piece(
                result, buffer, y, y_map, slot_of_row, start, rows, num_slots, column, FIRST, N, N, SCATTER, TRUSTED,
                zero,
            )  # fmt: skip
    else:
        column = tile * WIDE
        for part in gl.static_range(2):
            result = add_bias(first if part == 0 else last, bias_row, part * PIECE)
            if pre is not None:
                store_pre(result, buffer, pre, pre_map, gate_map, start, rows, tile, part, FIRST, N, GATE_LAYOUT)
            if y is not None:
                if ACTIVATION is not None:
                    result = activate(result, ACTIVATION)
                result = weigh(result, scale, layer_exists, STACKED)
                if maxima is not None:
                    result = result.to(DTYPE)
                    raise_maxima(result, maxima, rows, column, FIRST, N, zero)
                store_piece(
                    result, buffer, y, y_map, slot_of_row, start, rows, num_slots, column, FIRST, N, N, SCATTER,
                    TRUSTED, zero,
                )  # fmt: skip
            column += PIECE


@gluon.jit
def consumer(
    WHICH: gl.constexpr, a_tiles, w_tiles, bias_tiles, out_tiles, ring, full, empty, ring_full, ring_empty,
    y, y_map, pre, pre_map, gate_map, row_weight, layer_index, slot_of_row, num_slots,
    D: gl.constexpr, N: gl.constexpr, NUM_LAYERS: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    BIASED: gl.constexpr, IN_OUT: gl.constexpr, TRUSTED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    FIRST: gl.constexpr = WHICH * ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    within = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    stage, phase, place, ring_phase, expert = 0, 0, 0, 0, 0
    _, layer_exists = layer_in_stack(layer_index, NUM_LAYERS)
    while expert >= 0:
        expert, start, rows, tile = await_tile(ring, ring_full, place, ring_phase)
        if rows > FIRST:
            if row_weight is not None:
                # The weights' addresses come from memory: asked for here, used after the first stage and at the end.
                slots = gl.load(slot_of_row + start.to(gl.int64) + within, mask=within < rows, other=0)
            accumulator = gl.zeros([ROWS, WIDE], gl.float32, layout)
            accumulator, stage, phase = multiply(
                accumulator, a_tiles, w_tiles, full, empty, stage, phase, WHICH, GATHER, IN_OUT, STAGES, True
            )
            scale = None
            if row_weight is not None:
                scale = gl.load(row_weight + gl.minimum(gl.maximum(slots, 0), num_slots - 1))
            for _ in range(DEPTH, D, DEPTH):
                accumulator, stage, phase = multiply(
                    accumulator, a_tiles, w_tiles, full, empty, stage, phase, WHICH, GATHER, IN_OUT, STAGES, False
                )
            accumulator = warpgroup_mma_wait(num_outstanding=0, deps=[accumulator])
            hand_back_before(empty, stage, STAGES)
            bias_row = bias_tiles.index(place) if BIASED else None
            buffer = out_tiles.index(WHICH)
            first, last = halves(accumulator, False)
            finish(
                first, last, bias_row, scale, layer_exists, buffer, y, y_map, pre, pre_map, gate_map, slot_of_row,
                start, rows, num_slots, tile, FIRST, N, SCATTER, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT, TRUSTED,
                layer_index is not None,
            )  # fmt: skip
        elif expert >= 0:
            stage, phase = skip_tile(full, empty, stage, phase, D, DEPTH, STAGES)
        hand_back(ring_empty, place)
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
    """y[scatter(row)] = cast(act(x[gather(row)] @ w[expert] + bias) * row_weight); see `portable.kernel`.

    schedule: row blocks of 128. counters[COUNTER]: tiles taken, 0 when the kernel starts.
    *_map: TMA descriptors of x (only if rows are not gathered), the weights as one matrix, y, pre, and the gate columns
    of pre where they lie before those of up. pre, if not None: what the activation is applied to, in layout order,
    `separate` as `halves`; y None: only that. TRUSTED: the layout is our own, all of whose rows have slots, as pre
    demands. N: output columns; WEIGHT_N: columns of one weight buffer. PDL: see `kernels.pdl`.
    """
    BIASED: gl.constexpr = (bias is not None) or (up_bias is not None)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = weight_map.dtype
    a_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, DEPTH], swizzled)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, DEPTH, WIDE] if IN_OUT else [STAGES, WIDE, DEPTH], swizzled)
    out_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, PIECE], swizzled)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bias_tiles = gl.allocate_shared_memory(gl.float32, [RING, WIDE], plain)
    ring, full, empty, ring_full, ring_empty = allocate_pipeline(STAGES, 0 if GATHER == "row" else PRODUCER_WARPS)
    if PDL is not None:
        join()
    gl.warp_specialize(
        [
            (consumer, (
                0, a_tiles, w_tiles, bias_tiles, out_tiles, ring, full, empty, ring_full, ring_empty, y, y_map, pre,
                pre_map, gate_map, row_weight, layer_index, slot_of_row, num_slots, D, N, NUM_LAYERS, GATHER, SCATTER,
                GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT, BIASED, IN_OUT, TRUSTED, STAGES,
            )),
            (consumer, (
                1, a_tiles, w_tiles, bias_tiles, out_tiles, ring, full, empty, ring_full, ring_empty, y, y_map, pre,
                pre_map, gate_map, row_weight, layer_index, slot_of_row, num_slots, D, N, NUM_LAYERS, GATHER, SCATTER,
                GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT, BIASED, IN_OUT, TRUSTED, STAGES,
            )),
            (producer, (
                x, x_map, weight_map, up_map, bias, up_bias, layer_index, group_sizes,
                group_start, slot_of_row, schedule, counters, a_tiles, w_tiles, bias_tiles, None, ring, full, empty,
                ring_full, ring_empty, num_blocks, num_rows, num_slots, D, N, WEIGHT_N, NUM_EXPERTS, NUM_LAYERS,
                X_STRIDE, BIAS_LAYER_STRIDE, UP_BIAS_LAYER_STRIDE, TOP_K, GATHER, GATE_LAYOUT, IN_OUT, COUNTER, STAGES,
                GROUP_M, DEPTH, 1 if (SCATTER == "row") or (SCATTER == "slot") else SECTIONS,
            )),
        ],
        [4, PRODUCER_WARPS],
        [208, 88],
    )  # fmt: skip
