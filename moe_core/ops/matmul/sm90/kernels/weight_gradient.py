"""Gradients of weights for Hopper, ragged along the reduction, warps specialised as in `sm90.kernels.matmul`. Gluon.

A block takes tiles of 128 x 256 of the experts' gradients from a counter until none is left.

producer (4 warps): for each 64 rows of the expert: wait for a free stage, load 128 columns of left and 256 of right, by
    TMA (in layout order) or cp.async (gathered, or the last rows of an expert, fewer than 64: what follows is zeros);
    what the next tile needs from the layout is asked for meanwhile
consumer 0, 1 (4 warps each): 64 of the 128 rows of the result; for each stage: one wgmma 64 x 256 x 64, left read
    transposed; then cast and two TMA stores, while the producer loads the next tile
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

from moe_core.ops.matmul.portable.kernel import source_rows, tile_of_program
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
    await_stage,
    await_tile,
    barrier,
    hand_back,
    hand_back_before,
    row_load,
    tma_load,
    tma_store,
)


@gluon.jit
def copy_rows(
    values, buffer, rows, slots, exists, first, end, COLUMNS: gl.constexpr, STRIDE: gl.constexpr,
    GATHER: gl.constexpr, TOP_K: gl.constexpr,
):  # fmt: skip
    """cp.async of 64 rows x COLUMNS of `values` from column `first`; zeros from column `end` and in rows not there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    columns = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    pointers = values + source_rows(rows, slots, GATHER, TOP_K).to(gl.int64)[:, None] * STRIDE + columns[None, :]
    row_load(buffer, pointers, mask=exists[:, None] & (columns < end)[None, :])


@gluon.jit
def bounds(start, size, num_rows):
    """(first row, rows) of a group. Layouts come from anywhere: no value in them may lead outside the buffers."""
    start = gl.minimum(gl.maximum(start, 0), num_rows)
    return start, gl.minimum(gl.maximum(size, 0), num_rows - start)


@gluon.jit
def first_slots(slot_of_row, start, size, num_rows, within):
    """Of a group's first rows."""
    start, size = bounds(start, size, num_rows)
    return gl.load(slot_of_row + start + within, mask=within < size, other=-1)


@gluon.jit
def load_tile(
    left, left_map, right, right_map, slot_of_row, a_tiles, b_tiles, full, empty, stage, phase, start, size, m, n,
    next_start, next_size, next_slots, num_rows, num_slots, M: gl.constexpr, N: gl.constexpr,
    LEFT_STRIDE: gl.constexpr, RIGHT_STRIDE: gl.constexpr, LEFT_START: gl.constexpr, RIGHT_START: gl.constexpr,
    LEFT_GATHER: gl.constexpr, RIGHT_GATHER: gl.constexpr, TOP_K: gl.constexpr, STAGES: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """Load an expert's rows for the tile at (m, n), 64 at a time, as stages become free; no row: one stage of zeros.

    next_slots: of the first rows; next_start, next_size: where the next tile's rows lie, as the layout says. Returns
    those of the next tile's first rows beside stage and phase. SUMS: where no rows of the result are left for consumer
    1, it gets ones for left: its product is the sum of right's rows.
    """
    ones: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    LEFT_BYTES: gl.constexpr = 4 * ROWS * DEPTH if LEFT_GATHER == "row" else 0
    RIGHT_BYTES: gl.constexpr = 2 * WIDE * DEPTH if RIGHT_GATHER == "row" else 0
    BY_SLOT: gl.constexpr = (LEFT_GATHER != "row") or (RIGHT_GATHER != "row")
    within = gl.arange(0, DEPTH, gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])))
    for first in range(0, gl.maximum(size, 1), DEPTH):
        rows, slots = start + first + within, next_slots
        exists = first + within < size
        if BY_SLOT:
            # Rows' addresses come from memory: those of a step are asked for while the step before is being loaded.
            if first + DEPTH < size:
                following = first + DEPTH + within
                next_slots = gl.load(slot_of_row + start + following, mask=following < size, other=-1)
            else:
                next_slots = first_slots(slot_of_row, next_start, next_size, num_rows, within)
            exists = exists & (slots >= 0) & (slots < num_slots)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        ready, upper, lower = full.index(stage), a_tiles.index(2 * stage), a_tiles.index(2 * stage + 1)
        whole = first + DEPTH <= size
        if SUMS and m + ROWS >= M:
            lower.store(gl.full([DEPTH, ROWS], 1.0, lower.dtype, ones))
            fence_async_shared()
            barrier()
        if whole and LEFT_BYTES + RIGHT_BYTES > 0:
            mbarrier.expect(ready, LEFT_BYTES + RIGHT_BYTES)
            if LEFT_GATHER == "row":
                tma_load(left_map, [start + first, LEFT_START + m], ready, upper)
                tma_load(left_map, [start + first, LEFT_START + m + ROWS], ready, lower)
            if RIGHT_GATHER == "row":
                tma_load(right_map, [start + first, RIGHT_START + n], ready, b_tiles.index(stage))
        else:
            mbarrier.arrive(ready, count=1)
        if (LEFT_GATHER != "row") or not whole:
            copy_rows(left + LEFT_START, upper, rows, slots, exists, m, M, ROWS, LEFT_STRIDE, LEFT_GATHER, TOP_K)
            if not SUMS or m + ROWS < M:
                copy_rows(
                    left + LEFT_START, lower, rows, slots, exists, m + ROWS, M, ROWS, LEFT_STRIDE, LEFT_GATHER, TOP_K
                )
        if (RIGHT_GATHER != "row") or not whole:
            copy_rows(
                right + RIGHT_START, b_tiles.index(stage), rows, slots, exists, n, N, WIDE, RIGHT_STRIDE,
                RIGHT_GATHER, TOP_K,
            )  # fmt: skip
        async_copy.mbarrier_arrive(ready, increment_count=False)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase, next_slots


@gluon.jit
def producer(
    left, left_map, right, right_map, group_sizes, group_start, slot_of_row, counters, a_tiles, b_tiles, ring, full,
    empty, ring_full, ring_empty, num_rows, num_slots, NUM_GROUPS: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    LEFT_STRIDE: gl.constexpr, RIGHT_STRIDE: gl.constexpr, LEFT_START: gl.constexpr, RIGHT_START: gl.constexpr,
    LEFT_GATHER: gl.constexpr, RIGHT_GATHER: gl.constexpr, TOP_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Take tiles, expert by expert, announce them and load them. Facts: stages, row of d_weight, row of M, column."""
    TILES_M: gl.constexpr = (M + 2 * ROWS - 1) // (2 * ROWS)
    TILES_N: gl.constexpr = (N + WIDE - 1) // WIDE
    TILES: gl.constexpr = TILES_M * TILES_N
    within = gl.arange(0, DEPTH, gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])))
    stage, phase, place, ring_phase, slots = 0, 0, 0, 0, within
    number = gl.atomic_add(counters, 1, sem="relaxed")
    following = gl.atomic_add(counters, 1, sem="relaxed")
    last_group: gl.constexpr = NUM_GROUPS - 1
    next_start = gl.load(group_start + gl.minimum(number // TILES, last_group))
    next_size = gl.load(group_sizes + gl.minimum(number // TILES, last_group))
    if (LEFT_GATHER != "row") or (RIGHT_GATHER != "row"):
        slots = first_slots(slot_of_row, next_start, next_size, num_rows, within)
    while number < NUM_GROUPS * TILES:
        # What a tile needs is asked for while the tile before is being loaded, its number another tile earlier.
        later = gl.atomic_add(counters, 1, sem="relaxed")
        group = number // TILES
        tile_m, tile_n = tile_of_program(number % TILES, TILES_M, TILES_N, GROUP_M)
        start, size = bounds(next_start, next_size, num_rows)
        next_start = gl.load(group_start + gl.minimum(following // TILES, last_group))
        next_size = gl.load(group_sizes + gl.minimum(following // TILES, last_group))
        m, n = tile_m * (2 * ROWS), tile_n * WIDE
        mbarrier.wait(ring_empty.index(place), ring_phase ^ 1)
        announce(ring, ring_full, place, gl.maximum((size + DEPTH - 1) // DEPTH, 1), group * M + m, m, n)
        place, ring_phase = advance(place, ring_phase, RING)
        stage, phase, slots = load_tile(
            left, left_map, right, right_map, slot_of_row, a_tiles, b_tiles, full, empty, stage, phase, start, size,
            m, n, next_start, next_size, slots, num_rows, num_slots, M, N, LEFT_STRIDE, RIGHT_STRIDE, LEFT_START,
            RIGHT_START, LEFT_GATHER, RIGHT_GATHER, TOP_K, STAGES, SUMS,
        )  # fmt: skip
        number, following = following, later
    mbarrier.wait(ring_empty.index(place), ring_phase ^ 1)
    announce(ring, ring_full, place, 0, 0, 0, 0)


@gluon.jit
def multiply(
    accumulator, a_tiles, b_tiles, full, empty, stage, phase, WHICH: gl.constexpr, STAGES: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    """One stage; the one before it is free when this one's product has begun and its own is done."""
    await_stage(full, stage, phase, "slot")
    rows = a_tiles.index(2 * stage + WHICH).permute([1, 0])
    accumulator = warpgroup_mma(rows, b_tiles.index(stage), accumulator, use_acc=not FIRST, is_async=True)
    accumulator = warpgroup_mma_wait(num_outstanding=1, deps=[accumulator])
    if not FIRST:
        hand_back_before(empty, stage, STAGES)
    stage, phase = advance(stage, phase, STAGES)
    return accumulator, stage, phase


@gluon.jit
def store_sums(accumulator, d_bias, column, N: gl.constexpr):
    """Store the sums that are every row of a product with ones."""
    first, last = halves(accumulator, False)
    layout: gl.constexpr = first.type.layout
    one = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) == 0
    for part in gl.static_range(2):
        piece = first if part == 0 else last
        columns = column + part * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
        places = d_bias + (gl.zeros_like(piece).to(gl.int32) + columns[None, :])
        gl.store(places, piece.to(d_bias.dtype.element_ty), mask=one[:, None] & (columns < N)[None, :])


@gluon.jit
def consumer(
    WHICH: gl.constexpr, a_tiles, b_tiles, out_tiles, ring, full, empty, ring_full, ring_empty, d_weight_map,
    d_bias, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    buffer = out_tiles.index(WHICH)
    stage, phase, place, ring_phase, steps = 0, 0, 0, 0, 1
    while steps > 0:
        steps, row, m, column = await_tile(ring, ring_full, place, ring_phase)
        hand_back(ring_empty, place)
        place, ring_phase = advance(place, ring_phase, RING)
        if steps > 0:
            accumulator = gl.zeros([ROWS, WIDE], gl.float32, layout)
            accumulator, stage, phase = multiply(
                accumulator, a_tiles, b_tiles, full, empty, stage, phase, WHICH, STAGES, True
            )
            for _ in range(1, steps):
                accumulator, stage, phase = multiply(
                    accumulator, a_tiles, b_tiles, full, empty, stage, phase, WHICH, STAGES, False
                )
            accumulator = warpgroup_mma_wait(num_outstanding=0, deps=[accumulator])
            hand_back_before(empty, stage, STAGES)
            # M is a multiple of 64: this consumer's rows exist or do not; columns are clipped by TMA.
            if m + WHICH * ROWS < M:
                first, last = halves(accumulator, False)
                for part in gl.static_range(2):
                    tma.store_wait(0)
                    barrier()
                    piece = first if part == 0 else last
                    buffer.store(piece.to(d_weight_map.dtype))
                    fence_async_shared()
                    barrier()
                    tma_store(d_weight_map, [row + WHICH * ROWS, column + part * PIECE], buffer)
            elif d_bias is not None:
                store_sums(accumulator, d_bias + (row // M) * N, column, N)
    tma.store_wait(0)


@gluon.jit
def weight_gradient(
    left, left_map, right, right_map, group_sizes, group_start, slot_of_row, counters, d_weight_map, d_bias,
    num_rows, num_slots, NUM_GROUPS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, LEFT_STRIDE: gl.constexpr,
    RIGHT_STRIDE: gl.constexpr, LEFT_START: gl.constexpr, RIGHT_START: gl.constexpr, LEFT_GATHER: gl.constexpr,
    RIGHT_GATHER: gl.constexpr, TOP_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """d_weight[g] `[M, N]` = cast(sum over g's rows of left row^T . right row); see `portable.weight_gradient_kernel`.

    *_map: TMA descriptors of left and right (only of a side in layout order), and of d_weight as one matrix
    `[groups * M, N]`. counters[0]: tiles taken, 0 when the kernel starts. d_bias `[groups, N]`, or None: the sums of
    right's rows; only where left is gathered and M no multiple of 128, so that consumer 1 has no rows in a last tile.
    """
    SUMS: gl.constexpr = d_bias is not None
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = d_weight_map.dtype
    a_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, DEPTH, ROWS], swizzled)
    b_tiles = gl.allocate_shared_memory(dtype, [STAGES, DEPTH, WIDE], swizzled)
    out_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, PIECE], swizzled)
    ring, full, empty, ring_full, ring_empty = allocate_pipeline(STAGES, PRODUCER_WARPS)
    gl.warp_specialize(
        [
            (consumer, (
                0, a_tiles, b_tiles, out_tiles, ring, full, empty, ring_full, ring_empty, d_weight_map, None, M, N,
                STAGES,
            )),
            (consumer, (
                1, a_tiles, b_tiles, out_tiles, ring, full, empty, ring_full, ring_empty, d_weight_map, d_bias, M, N,
                STAGES,
            )),
            (producer, (
                left, left_map, right, right_map, group_sizes, group_start, slot_of_row, counters, a_tiles, b_tiles,
                ring, full, empty, ring_full, ring_empty, num_rows, num_slots, NUM_GROUPS, M, N, LEFT_STRIDE,
                RIGHT_STRIDE, LEFT_START, RIGHT_START, LEFT_GATHER, RIGHT_GATHER, TOP_K, STAGES, GROUP_M, SUMS,
            )),
        ],
        [4, PRODUCER_WARPS],
        [208, 88],
    )  # fmt: skip
