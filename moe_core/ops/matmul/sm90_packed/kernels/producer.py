"""The producer of `sm90_packed.kernels.matmul`: takes tiles, announces them, and loads codes, scales and rows ahead."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from moe_core.ops.common.kernels.aggregates import Layout, Schedule
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.matmul.sm90.kernels.pipeline import DEPTH, RING, advance, announce, locate_tile, row_load, tma_load
from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import HEIGHT, LINES, seen_as


@gluon.jit
def take_tile(
    group_sizes, group_start, schedule, counters, turn, num_blocks, num_rows, TILES: gl.constexpr,
    COUNTER: gl.constexpr, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """(expert, first row, rows, column tile); expert -1: idle, -2: none is left."""
    if COUNTER is None:
        number = gl.program_id(0) + turn * gl.num_programs(0)
    else:
        number = gl.atomic_add(counters + COUNTER, 1, sem="relaxed")
    left, exists, expert, start, size, _, block, tile = locate_tile(
        number,
        Layout(group_sizes, group_start, None, num_rows, None, 1),
        Schedule(schedule, counters, num_blocks, COUNTER, GROUP_M),
        TILES,
        BLOCK_M,
    )
    first = block * BLOCK_M
    rows = gl.where(exists, gl.minimum(size - first, BLOCK_M), 0)
    return gl.where(left, gl.where(rows > 0, expert, -1), -2), start + first, rows, tile


@gluon.jit
def word_pointers(
    array, matrix, tile, APART: gl.constexpr, BLOCKS: gl.constexpr, PAIRS: gl.constexpr, RECORDS: gl.constexpr,
    WORDS: gl.constexpr,
):  # fmt: skip
    """Pointers to the 32-bit words of the first of RECORDS records of a tile's blocks, of scales or zero points:
    [PAIRS, WORDS]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    words = array.to(gl.pointer_type(gl.int32), bitcast=True)
    # A tile may end behind the last block of a matrix, whose rows nobody stores.
    if not APART:
        block = matrix.to(gl.int64) * BLOCKS + gl.minimum(tile * PAIRS + pair, BLOCKS - 1)
        return words + block * (RECORDS * WORDS) + word
    else:
        # The part of all threads apart: integers, with more arrays to point to, lack registers for it, and so do
        # consumers of tall tiles, which hold what the producer has of the same for every tile.
        first = (matrix.to(gl.int64) * BLOCKS + tile * PAIRS) * (RECORDS * WORDS)
        pair = gl.minimum(pair, BLOCKS - 1 - tile * PAIRS)
        return words + first + (pair * (RECORDS * WORDS) + word)


@gluon.jit
def load_words(tiles, place, pointers, step, STEPS: gl.constexpr, REPEAT: gl.constexpr):
    """Ask for the words of a step's record, REPEAT steps each, zeros behind the last step: no code there may become an
    infinity. tiles, place: where they go."""
    PAIRS: gl.constexpr = pointers.shape[0]
    WORDS: gl.constexpr = pointers.shape[1]
    table: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    inside = gl.full([PAIRS, WORDS], step, gl.int32, pointers.type.layout) < STEPS
    row_load(
        seen_as(tiles.index(place), gl.int32, [PAIRS, WORDS], table), pointers + step // REPEAT * WORDS, mask=inside
    )


@gluon.constexpr_function
def chunk_of(block_m):
    """Rows of x that are loaded, or not, together: of tall tiles many may not exist."""
    return block_m if block_m <= 128 else 64


@gluon.jit
def load_tile(
    x, x_map, weight_map, scales, zero_points, slot_of_row, x_tiles, w_tiles, scale_tiles, zero_tiles, row_slots,
    pipeline, stage, phase, matrix, start, rows, tile, num_slots,
    D: gl.constexpr, STEPS: gl.constexpr, BLOCKS: gl.constexpr, PAIRS: gl.constexpr, DEEP: gl.constexpr,
    ELEMENT: gl.constexpr, COLUMNS: gl.constexpr, GROUPS: gl.constexpr, REPEAT: gl.constexpr,
    X_STRIDE: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Load a tile as stages become free."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    CHUNK: gl.constexpr = chunk_of(BLOCK_M)
    CHUNKS: gl.constexpr = BLOCK_M // CHUNK
    within = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    columns = gl.arange(0, DEPTH, gl.SliceLayout(0, layout))
    if (GATHER != "row") and (CHUNKS == 1):
        # The arrays of a layout may come from anywhere: no value in them may lead outside x.
        slots = gl.load(slot_of_row + start.to(gl.int64) + within, mask=within < rows, other=0)
        slots = gl.minimum(gl.maximum(slots, 0), num_slots - 1)
        x_row = slots // TOP_K if GATHER == "token" else slots
        x_rows = x + x_row.to(gl.int64)[:, None] * X_STRIDE + columns[None, :]
    HALVES: gl.constexpr = COLUMNS // DEPTH
    RECORDS: gl.constexpr = (STEPS + REPEAT - 1) // REPEAT
    WORDS: gl.constexpr = HEIGHT * GROUPS * scales.dtype.element_ty.primitive_bitwidth // 32
    APART: gl.constexpr = (ELEMENT != "e2m1") or (CHUNKS > 1)
    scale_words = word_pointers(scales, matrix, tile, APART, BLOCKS, PAIRS, RECORDS, WORDS)
    if zero_points is not None:
        zero_words = word_pointers(zero_points, matrix, tile, APART, BLOCKS, PAIRS, RECORDS, HEIGHT * GROUPS // 4)
    block = matrix * BLOCKS + tile * PAIRS
    for step in range(0, STEPS, DEEP):
        mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)
        ready = pipeline.full.index(stage)
        CODES: gl.constexpr = PAIRS * DEEP * LINES * 128
        if GATHER == "row":
            for chunk in gl.static_range(CHUNKS):
                exists = (rows > chunk * CHUNK) | (chunk == 0)
                last = exists & ((rows <= (chunk + 1) * CHUNK) | (chunk == CHUNKS - 1))
                mbarrier.expect(ready, CODES + (chunk + 1) * CHUNK * COLUMNS * DEEP * 2, pred=last)
            for chunk in gl.static_range(CHUNKS):
                for part in gl.static_range(HALVES * DEEP):
                    tma_load(
                        x_map, [start + chunk * CHUNK, step * COLUMNS + part * DEPTH], ready,
                        x_tiles.index(HALVES * DEEP * stage + part).slice(chunk * CHUNK, CHUNK, dim=0),
                        pred=(rows > chunk * CHUNK) | (chunk == 0),
                    )  # fmt: skip
        else:
            mbarrier.expect(ready, CODES)
        for pair in gl.static_range(PAIRS):
            # Behind the last step of a block lies the next block: its codes meet rows of x that are zeros there.
            line = ((block + pair) * STEPS + step) * LINES
            tma_load(weight_map, [line, 0], ready, w_tiles.index(stage * PAIRS + pair))
        for deep in gl.static_range(DEEP):
            load_words(scale_tiles, stage * DEEP + deep, scale_words, step + deep, STEPS, REPEAT)
            if zero_points is not None:
                load_words(zero_tiles, stage * DEEP + deep, zero_words, step + deep, STEPS, REPEAT)
        if (GATHER != "row") and (CHUNKS == 1):
            for part in gl.static_range(HALVES * DEEP):
                first = step * COLUMNS + part * DEPTH
                mask = (within < rows)[:, None] & (first + columns < D)[None, :]
                row_load(x_tiles.index(HALVES * DEEP * stage + part), x_rows + first, mask=mask)
        elif GATHER != "row":
            for chunk in gl.static_range(CHUNKS):
                if rows > chunk * CHUNK:
                    # Looked up again for every stage: there are no registers for so many addresses.
                    slots = row_slots.slice(chunk * CHUNK, CHUNK).load(gl.SliceLayout(1, layout))
                    known = gl.maximum(slots, 0)
                    x_row = known // TOP_K if GATHER == "token" else known
                    pointers = x + step * COLUMNS + x_row.to(gl.int64)[:, None] * X_STRIDE + columns[None, :]
                    for part in gl.static_range(HALVES * DEEP):
                        mask = (slots >= 0)[:, None] & (step * COLUMNS + part * DEPTH + columns < D)[None, :]
                        x_tile = x_tiles.index(HALVES * DEEP * stage + part).slice(chunk * CHUNK, CHUNK, dim=0)
                        row_load(x_tile, pointers + part * DEPTH, mask=mask)
        async_copy.mbarrier_arrive(ready, increment_count=False)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def write_row_facts(
    row_weight, slot_of_row, weight_ring, slot_ring, place, start, rows, num_slots, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Slots of a tile's rows, -1 where there is none, and their weights, for the consumers' stores."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    within = gl.arange(0, BLOCK_M, layout)
    slots = gl.load(slot_of_row + start.to(gl.int64) + within, mask=within < rows, other=-1)
    slots = gl.where((slots >= 0) & (slots < num_slots), slots, -1)
    slot_ring.index(place).store(slots)
    if row_weight is not None:
        weight_ring.index(place).store(gl.load(row_weight + gl.maximum(slots, 0), mask=slots >= 0, other=0.0))


@gluon.jit
def producer(
    x, x_map, weight_map, scales, zero_points, row_weight, layer_index, group_sizes, group_start, slot_of_row, schedule,
    counters, x_tiles, w_tiles, scale_tiles, zero_tiles, weight_ring, slot_ring, pipeline,
    num_blocks, num_rows, num_slots,
    D: gl.constexpr, STEPS: gl.constexpr, BLOCKS: gl.constexpr, PAIRS: gl.constexpr, DEEP: gl.constexpr,
    ELEMENT: gl.constexpr, COLUMNS: gl.constexpr, GROUPS: gl.constexpr, REPEAT: gl.constexpr,
    TILES: gl.constexpr, NUM_EXPERTS: gl.constexpr, NUM_LAYERS: gl.constexpr, X_STRIDE: gl.constexpr,
    TOP_K: gl.constexpr, GATHER: gl.constexpr, COUNTER: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    layer_number, _ = layer_in_stack(layer_index, NUM_LAYERS)
    stage, phase, place, ring_phase, turn, expert = 0, 0, 0, 0, 0, 0
    while expert > -2:
        expert, start, rows, tile = take_tile(
            group_sizes, group_start, schedule, counters, turn, num_blocks, num_rows, TILES, COUNTER, BLOCK_M, GROUP_M
        )
        turn += 1
        if expert >= 0:
            mbarrier.wait(pipeline.ring_empty.index(place), ring_phase ^ 1)
            write_row_facts(row_weight, slot_of_row, weight_ring, slot_ring, place, start, rows, num_slots, BLOCK_M)
            announce(pipeline, place, expert, start, rows, tile)
            row_slots = slot_ring.index(place)
            place, ring_phase = advance(place, ring_phase, RING)
            stage, phase = load_tile(
                x, x_map, weight_map, scales, zero_points, slot_of_row, x_tiles, w_tiles, scale_tiles, zero_tiles,
                row_slots, pipeline, stage, phase, layer_number * NUM_EXPERTS + expert, start, rows, tile, num_slots,
                D, STEPS, BLOCKS, PAIRS, DEEP, ELEMENT, COLUMNS, GROUPS, REPEAT, X_STRIDE, TOP_K, GATHER, STAGES,
                BLOCK_M,
            )  # fmt: skip
    mbarrier.wait(pipeline.ring_empty.index(place), ring_phase ^ 1)
    announce(pipeline, place, -1, 0, 0, 0)
