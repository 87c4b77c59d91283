"""Gradients of weights for Hopper, ragged along the reduction, in Gluon. Warps are specialised as in `matmul`.

A block takes tiles of 128 x 256 of the experts' gradients from a counter until none is left.

producer (4 warps)
    for each 64 rows of the expert: waits for a free stage, loads 128 columns of left and 256 of right
        by TMA, or by cp.async if they are gathered or fewer than 64, and then zeros follow
    meanwhile reads the layout for the next tile
consumer 0 and 1 (4 warps each), 64 of the 128 rows of the result each
    for each stage: one wgmma 64 x 256 x 64 that reads left transposed
    cast and two TMA stores, while the producer loads the next tile
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_core.ops.common.kernels.aggregates import Layout, Rows, Tiles, aggregate_of
from moe_core.ops.common.kernels.rows import source_rows
from moe_core.ops.matmul.sm90.kernels.matmul import halves
from moe_core.ops.matmul.sm90.kernels.pipeline import (
    DEPTH,
    PIECE,
    PRODUCER_WARPS,
    RING,
    ROWS,
    WIDE,
    advance,
    allocate_pipeline,
    announce,
    await_facts,
    await_stage,
    barrier,
    release_previous_stage,
    release_tile,
    row_load,
    tma_load,
    tma_store,
)

#: Gradients `[M, N]` of the groups' weights: their TMA descriptor as one matrix, and the sums of right's rows.
Gradients = aggregate_of("Gradients", "map bias NUM_GROUPS M N")
Part = aggregate_of("Part", "start size m n")


@gluon.jit
def copy_rows(side, buffer, rows, slots, exists, first, end, TOP_K: gl.constexpr):
    """Copy 64 rows of a side from column `first` on by cp.async. Columns from `end` on and missing rows are zeros."""
    COLUMNS: gl.constexpr = buffer.shape[1]
    places: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    columns = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, places))
    source = source_rows(rows, slots, side.GATHER, TOP_K).to(gl.int64)
    pointers = side.values + side.START + source[:, None] * side.STRIDE + columns[None, :]
    row_load(buffer, pointers, mask=exists[:, None] & (columns < end)[None, :])


@gluon.jit
def bounds(start, size, num_rows):
    """Return (first row, rows) of a group. Layouts are not trusted: no value in them may lead outside buffers."""
    start = gl.minimum(gl.maximum(start, 0), num_rows)
    return start, gl.minimum(gl.maximum(size, 0), num_rows - start)


@gluon.jit
def first_slots(layout, start, size, within):
    start, size = bounds(start, size, layout.num_rows)
    return gl.load(layout.slot_of_row + start + within, mask=within < size, other=-1)


@gluon.jit
def load_tile(tiles, pipeline, left, right, layout, gradients, part, stage, phase, next_start, next_size, next_slots):
    """Load the rows of a part, 64 at a time, as stages become free. A part without rows gets one stage of zeros. Return
    stage, phase and the slots of the next part's first rows.

    next_slots: slots of this part's first rows. next_start, next_size: the next part's, as in the layout. If consumer 1
    has no rows of the result and a bias is wanted, it gets ones for left: its product is the sum of right's rows.
    """
    ones: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    start, size, m, n = part.start, part.size, part.m, part.n
    M: gl.constexpr = gradients.M
    SUMS: gl.constexpr = gradients.bias is not None
    LEFT_BYTES: gl.constexpr = 4 * ROWS * DEPTH if left.GATHER == "row" else 0
    RIGHT_BYTES: gl.constexpr = 2 * WIDE * DEPTH if right.GATHER == "row" else 0
    BY_SLOT: gl.constexpr = (left.GATHER != "row") or (right.GATHER != "row")
    within = gl.arange(0, DEPTH, gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])))
    for first in range(0, gl.maximum(size, 1), DEPTH):
        rows, slots = start + first + within, next_slots
        exists = first + within < size
        if BY_SLOT:
            # Addresses of rows come from memory: read them one step ahead.
            if first + DEPTH < size:
                following = first + DEPTH + within
                next_slots = gl.load(layout.slot_of_row + start + following, mask=following < size, other=-1)
            else:
                next_slots = first_slots(layout, next_start, next_size, within)
            exists = exists & (slots >= 0) & (slots < layout.num_slots)
        mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)
        ready, upper, lower = pipeline.full.index(stage), tiles.left.index(2 * stage), tiles.left.index(2 * stage + 1)
        whole = first + DEPTH <= size
        if SUMS and m + ROWS >= M:
            lower.store(gl.full([DEPTH, ROWS], 1.0, lower.dtype, ones))
            fence_async_shared()
            barrier()
        if whole and LEFT_BYTES + RIGHT_BYTES > 0:
            mbarrier.expect(ready, LEFT_BYTES + RIGHT_BYTES)
            if left.GATHER == "row":
                tma_load(left.map, [start + first, left.START + m], ready, upper)
                tma_load(left.map, [start + first, left.START + m + ROWS], ready, lower)
            if right.GATHER == "row":
                tma_load(right.map, [start + first, right.START + n], ready, tiles.right.index(stage))
        else:
            mbarrier.arrive(ready, count=1)
        if (left.GATHER != "row") or not whole:
            copy_rows(left, upper, rows, slots, exists, m, M, layout.TOP_K)
            if not SUMS or m + ROWS < M:
                copy_rows(left, lower, rows, slots, exists, m + ROWS, M, layout.TOP_K)
        if (right.GATHER != "row") or not whole:
            copy_rows(right, tiles.right.index(stage), rows, slots, exists, n, gradients.N, layout.TOP_K)
        async_copy.mbarrier_arrive(ready, increment_count=False)
        stage, phase = advance(stage, phase, pipeline.STAGES)
    return stage, phase, next_slots


@gluon.jit
def producer(tiles, pipeline, left, right, layout, counters, gradients):
    """Take, announce and load tiles, expert by expert, all columns of the same rows after each other. Facts: stages,
    row of d_weight, row of M, column."""
    TILES_M: gl.constexpr = (gradients.M + 2 * ROWS - 1) // (2 * ROWS)
    TILES_N: gl.constexpr = (gradients.N + WIDE - 1) // WIDE
    TILES: gl.constexpr = TILES_M * TILES_N
    LAST: gl.constexpr = gradients.NUM_GROUPS - 1
    within = gl.arange(0, DEPTH, gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])))
    stage, phase, place, ring_phase, slots = 0, 0, 0, 0, within
    number = gl.atomic_add(counters, 1, sem="relaxed")
    following = gl.atomic_add(counters, 1, sem="relaxed")
    next_start = gl.load(layout.group_start + gl.minimum(number // TILES, LAST))
    next_size = gl.load(layout.group_sizes + gl.minimum(number // TILES, LAST))
    if (left.GATHER != "row") or (right.GATHER != "row"):
        slots = first_slots(layout, next_start, next_size, within)
    while number < gradients.NUM_GROUPS * TILES:
        # The layout is read one tile ahead, and the counter two tiles ahead.
        later = gl.atomic_add(counters, 1, sem="relaxed")
        group = number // TILES
        start, size = bounds(next_start, next_size, layout.num_rows)
        next_start = gl.load(layout.group_start + gl.minimum(following // TILES, LAST))
        next_size = gl.load(layout.group_sizes + gl.minimum(following // TILES, LAST))
        m, n = number % TILES // TILES_N * (2 * ROWS), number % TILES_N * WIDE
        mbarrier.wait(pipeline.ring_empty.index(place), ring_phase ^ 1)
        announce(pipeline, place, gl.maximum((size + DEPTH - 1) // DEPTH, 1), group * gradients.M + m, m, n)
        place, ring_phase = advance(place, ring_phase, RING)
        part = Part(start, size, m, n)
        stage, phase, slots = load_tile(
            tiles, pipeline, left, right, layout, gradients, part, stage, phase, next_start, next_size, slots
        )
        number, following = following, later
    mbarrier.wait(pipeline.ring_empty.index(place), ring_phase ^ 1)
    announce(pipeline, place, 0, 0, 0, 0)


@gluon.jit
def multiply(accumulator, tiles, pipeline, stage, phase, WHICH: gl.constexpr, FIRST: gl.constexpr):
    """See `matmul.multiply`."""
    await_stage(pipeline, stage, phase)
    rows = tiles.left.index(2 * stage + WHICH).permute([1, 0])
    accumulator = warpgroup_mma(rows, tiles.right.index(stage), accumulator, use_acc=not FIRST, is_async=True)
    accumulator = warpgroup_mma_wait(num_outstanding=1, deps=[accumulator])
    if not FIRST:
        release_previous_stage(pipeline, stage)
    stage, phase = advance(stage, phase, pipeline.STAGES)
    return accumulator, stage, phase


@gluon.jit
def store_sums(accumulator, d_bias, column, N: gl.constexpr):
    first, last = halves(accumulator)
    layout: gl.constexpr = first.type.layout
    one = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) == 0
    for part in gl.static_range(2):
        piece = first if part == 0 else last
        columns = column + part * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
        places = d_bias + (gl.zeros_like(piece).to(gl.int32) + columns[None, :])
        gl.store(places, piece.to(d_bias.dtype.element_ty), mask=one[:, None] & (columns < N)[None, :])


@gluon.jit
def consumer(WHICH: gl.constexpr, tiles, pipeline, gradients):
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    buffer = tiles.results.index(WHICH)
    stage, phase, place, ring_phase, steps = 0, 0, 0, 0, 1
    while steps > 0:
        steps, row, m, column = await_facts(pipeline, place, ring_phase)
        release_tile(pipeline, place)
        place, ring_phase = advance(place, ring_phase, RING)
        if steps > 0:
            accumulator = gl.zeros([ROWS, WIDE], gl.float32, sums)
            accumulator, stage, phase = multiply(accumulator, tiles, pipeline, stage, phase, WHICH, True)
            for _ in range(1, steps):
                accumulator, stage, phase = multiply(accumulator, tiles, pipeline, stage, phase, WHICH, False)
            accumulator = warpgroup_mma_wait(num_outstanding=0, deps=[accumulator])
            release_previous_stage(pipeline, stage)
            # M is a multiple of 64: all rows of this consumer exist or none. TMA clips columns.
            if m + WHICH * ROWS < gradients.M:
                first, last = halves(accumulator)
                for part in gl.static_range(2):
                    tma.store_wait(0)
                    barrier()
                    piece = first if part == 0 else last
                    buffer.store(piece.to(gradients.map.dtype))
                    fence_async_shared()
                    barrier()
                    tma_store(gradients.map, [row + WHICH * ROWS, column + part * PIECE], buffer)
            elif gradients.bias is not None:
                store_sums(accumulator, gradients.bias + (row // gradients.M) * gradients.N, column, gradients.N)
    tma.store_wait(0)


@gluon.jit
def weight_gradient(
    left, left_map, right, right_map, group_sizes, group_start, slot_of_row, counters, d_weight_map, d_bias,
    num_rows, num_slots, NUM_GROUPS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, LEFT_STRIDE: gl.constexpr,
    RIGHT_STRIDE: gl.constexpr, LEFT_START: gl.constexpr, RIGHT_START: gl.constexpr, LEFT_GATHER: gl.constexpr,
    RIGHT_GATHER: gl.constexpr, TOP_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """See `portable.weight_gradient_kernel`.

    *_map: TMA descriptors of left and right, if in layout order, and of d_weight as one matrix `[groups * M, N]`.
    counters[0]: tiles taken, 0 at the start. d_bias: the sums of right's rows `[groups, N]`, or None. Needs a gathered
    left side, and an M that is no multiple of 128, so that consumer 1 has no rows in a last tile.
    """
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = d_weight_map.dtype
    a_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, DEPTH, ROWS], swizzled)
    b_tiles = gl.allocate_shared_memory(dtype, [STAGES, DEPTH, WIDE], swizzled)
    out_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, PIECE], swizzled)
    pipeline = allocate_pipeline(STAGES, PRODUCER_WARPS, True)
    tiles = Tiles(a_tiles, b_tiles, None, out_tiles)
    gradients = Gradients(d_weight_map, d_bias, NUM_GROUPS, M, N)
    left_rows = Rows(left, left_map, LEFT_STRIDE, LEFT_GATHER, LEFT_START)
    right_rows = Rows(right, right_map, RIGHT_STRIDE, RIGHT_GATHER, RIGHT_START)
    layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
    gl.warp_specialize(
        [
            (consumer, (0, tiles, pipeline, Gradients(d_weight_map, None, NUM_GROUPS, M, N))),
            (consumer, (1, tiles, pipeline, gradients)),
            (producer, (tiles, pipeline, left_rows, right_rows, layout, counters, gradients)),
        ],
        [4, PRODUCER_WARPS],
        [208, 88],
    )
