from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from moe_core.ops.common.kernels.aggregates import Tile
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.matmul.sm90.kernels.pipeline import (
    DEPTH,
    RING,
    advance,
    announce,
    locate_tile,
    row_load,
    seen_as,
    tma_load,
)
from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import HEIGHT, LINES, UNIT
from moe_core.ops.matmul.sm90_packed.kernels.low_rank import prefetch_tail


@gluon.jit
def take_tile(layout, schedule, turn, TILES: gl.constexpr, BLOCK_M: gl.constexpr):
    if schedule.COUNTER is None:
        number = gl.program_id(0) + turn * gl.num_programs(0)
    else:
        number = gl.atomic_add(schedule.counters + schedule.COUNTER, 1, sem="relaxed")
    left, exists, expert, start, size, _, block, column = locate_tile(number, layout, schedule, TILES, BLOCK_M)
    first = block * BLOCK_M
    rows = gl.where(exists, gl.minimum(size - first, BLOCK_M), 0)
    return Tile(gl.where(left, gl.where(rows > 0, expert, -1), -2), start + first, rows, column)


@gluon.jit
def word_pointers(
    array, matrix, tile, APART: gl.constexpr, BLOCKS: gl.constexpr, PAIRS: gl.constexpr, RECORDS: gl.constexpr,
    WORDS: gl.constexpr,
):  # fmt: skip
    """Return pointers to the 32-bit words [PAIRS, WORDS] of the first record of a tile's scales or zero points."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    words = array.to(gl.pointer_type(gl.int32), bitcast=True)
    # A tile may end behind the last block of a matrix. Nobody stores those rows.
    if not APART:
        block = matrix.to(gl.int64) * BLOCKS + gl.minimum(tile * PAIRS + pair, BLOCKS - 1)
        return words + block * (RECORDS * WORDS) + word
    else:
        # Offsets from a scalar start: integers and consumers of tall tiles have no registers for more pointers.
        first = (matrix.to(gl.int64) * BLOCKS + tile * PAIRS) * (RECORDS * WORDS)
        pair = gl.minimum(pair, BLOCKS - 1 - tile * PAIRS)
        return words + first + (pair * (RECORDS * WORDS) + word)


@gluon.jit
def load_words(tiles, place, pointers, step, codes):
    """Load the words of a step's record, zeros behind the last step: no code there may become an infinity."""
    PAIRS: gl.constexpr = pointers.shape[0]
    WORDS: gl.constexpr = pointers.shape[1]
    table: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    inside = gl.full([PAIRS, WORDS], step, gl.int32, pointers.type.layout) < codes.STEPS
    row_load(
        seen_as(tiles.index(place), gl.int32, [PAIRS, WORDS], table),
        pointers + step // codes.REPEAT * WORDS,
        mask=inside,
    )


@gluon.constexpr_function
def chunk_of(block_m):
    """Return how many rows of x are loaded, or not, together."""
    return block_m if block_m <= 128 else 64


@gluon.jit
def load_tile(product, row_slots, tile, matrix, stage, phase):
    pipeline, stages, codes, weights = product.pipeline, product.tiles, product.scales, product.weights
    x, layout = product.x, product.layout
    BLOCK_M: gl.constexpr = stages.x.shape[1]
    GATHER: gl.constexpr = x.GATHER
    PAIRS: gl.constexpr = stages.PAIRS
    DEEP: gl.constexpr = stages.DEEP
    STEPS: gl.constexpr = codes.STEPS
    BLOCKS: gl.constexpr = codes.BLOCKS
    COLUMNS: gl.constexpr = codes.COLUMNS
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    CHUNK: gl.constexpr = chunk_of(BLOCK_M)
    CHUNKS: gl.constexpr = BLOCK_M // CHUNK
    within = gl.arange(0, CHUNK, gl.SliceLayout(1, loads))
    columns = gl.arange(0, DEPTH, gl.SliceLayout(0, loads))
    if (GATHER != "row") and (CHUNKS == 1):
        # Layouts are not trusted: no value in them may lead outside x.
        slots = gl.load(layout.slot_of_row + tile.start.to(gl.int64) + within, mask=within < tile.rows, other=0)
        slots = gl.minimum(gl.maximum(slots, 0), layout.num_slots - 1)
        x_row = slots // layout.TOP_K if GATHER == "token" else slots
        x_rows = x.values + x_row.to(gl.int64)[:, None] * x.STRIDE + columns[None, :]
    HALVES: gl.constexpr = COLUMNS // DEPTH
    RECORDS: gl.constexpr = (STEPS + codes.REPEAT - 1) // codes.REPEAT
    WORDS: gl.constexpr = HEIGHT * codes.GROUPS * codes.scales.dtype.element_ty.primitive_bitwidth // 32
    APART: gl.constexpr = (codes.ELEMENT != "e2m1") or (CHUNKS > 1)
    scale_words = word_pointers(codes.scales, matrix, tile.column, APART, BLOCKS, PAIRS, RECORDS, WORDS)
    if codes.zero_points is not None:
        BYTES: gl.constexpr = HEIGHT * codes.GROUPS // 4
        zero_words = word_pointers(codes.zero_points, matrix, tile.column, APART, BLOCKS, PAIRS, RECORDS, BYTES)
    block = matrix * BLOCKS + tile.column * PAIRS
    for step in range(0, STEPS, DEEP):
        mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)
        ready = pipeline.full.index(stage)
        CODES: gl.constexpr = PAIRS * DEEP * LINES * 128
        if GATHER == "row":
            for chunk in gl.static_range(CHUNKS):
                exists = (tile.rows > chunk * CHUNK) | (chunk == 0)
                last = exists & ((tile.rows <= (chunk + 1) * CHUNK) | (chunk == CHUNKS - 1))
                mbarrier.expect(ready, CODES + (chunk + 1) * CHUNK * COLUMNS * DEEP * 2, pred=last)
            for chunk in gl.static_range(CHUNKS):
                for part in gl.static_range(HALVES * DEEP):
                    tma_load(
                        x.map, [tile.start + chunk * CHUNK, step * COLUMNS + part * DEPTH], ready,
                        stages.x.index(HALVES * DEEP * stage + part).slice(chunk * CHUNK, CHUNK, dim=0),
                        pred=(tile.rows > chunk * CHUNK) | (chunk == 0),
                    )  # fmt: skip
        else:
            mbarrier.expect(ready, CODES)
        for pair in gl.static_range(PAIRS):
            # The next block follows a block's last step. Its codes meet zeros of x.
            line = ((block + pair) * STEPS + step) * LINES
            tma_load(weights.map, [line, 0], ready, stages.codes.index(stage * PAIRS + pair))
        for deep in gl.static_range(DEEP):
            load_words(stages.scales, stage * DEEP + deep, scale_words, step + deep, codes)
            if codes.zero_points is not None:
                load_words(stages.zeros, stage * DEEP + deep, zero_words, step + deep, codes)
        if (GATHER != "row") and (CHUNKS == 1):
            for part in gl.static_range(HALVES * DEEP):
                first = step * COLUMNS + part * DEPTH
                mask = (within < tile.rows)[:, None] & (first + columns < weights.D)[None, :]
                row_load(stages.x.index(HALVES * DEEP * stage + part), x_rows + first, mask=mask)
        elif GATHER != "row":
            for chunk in gl.static_range(CHUNKS):
                if tile.rows > chunk * CHUNK:
                    # Looked up for every stage, because addresses would not fit into registers.
                    slots = row_slots.slice(chunk * CHUNK, CHUNK).load(gl.SliceLayout(1, loads))
                    known = gl.maximum(slots, 0)
                    x_row = known // layout.TOP_K if GATHER == "token" else known
                    pointers = x.values + step * COLUMNS + x_row.to(gl.int64)[:, None] * x.STRIDE + columns[None, :]
                    for part in gl.static_range(HALVES * DEEP):
                        mask = (slots >= 0)[:, None] & (step * COLUMNS + part * DEPTH + columns < weights.D)[None, :]
                        x_tile = stages.x.index(HALVES * DEEP * stage + part).slice(chunk * CHUNK, CHUNK, dim=0)
                        row_load(x_tile, pointers + part * DEPTH, mask=mask)
        async_copy.mbarrier_arrive(ready, increment_count=False)
        stage, phase = advance(stage, phase, pipeline.STAGES)
    return stage, phase


@gluon.jit
def write_row_facts(stages, place, layout, tile, row_weight):
    rows: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    within = gl.arange(0, stages.slots.shape[1], rows)
    slots = gl.load(layout.slot_of_row + tile.start.to(gl.int64) + within, mask=within < tile.rows, other=-1)
    slots = gl.where((slots >= 0) & (slots < layout.num_slots), slots, -1)
    stages.slots.index(place).store(slots)
    if row_weight is not None:
        stages.row_weights.index(place).store(gl.load(row_weight + gl.maximum(slots, 0), mask=slots >= 0, other=0.0))


@gluon.jit
def producer(product):
    pipeline, stages, weights = product.pipeline, product.tiles, product.weights
    BLOCK_M: gl.constexpr = stages.x.shape[1]
    WIDTH: gl.constexpr = stages.PAIRS * (UNIT if weights.GATE_LAYOUT is not None else HEIGHT)
    TILES: gl.constexpr = (weights.N + WIDTH - 1) // WIDTH
    layer_number, _ = layer_in_stack(weights.layer_index, weights.NUM_LAYERS)
    stage, phase, place, ring_phase, turn, expert = 0, 0, 0, 0, 0, 0
    while expert > -2:
        tile = take_tile(product.layout, product.schedule, turn, TILES, BLOCK_M)
        expert = tile.expert
        turn += 1
        if expert >= 0:
            mbarrier.wait(pipeline.ring_empty.index(place), ring_phase ^ 1)
            write_row_facts(stages, place, product.layout, tile, product.epilogue.row_weight)
            announce(pipeline, place, expert, tile.start, tile.rows, tile.column)
            row_slots = stages.slots.index(place)
            place, ring_phase = advance(place, ring_phase, RING)
            matrix = layer_number * weights.NUM_EXPERTS + expert
            stage, phase = load_tile(product, row_slots, tile, matrix, stage, phase)
            if product.tail is not None:
                prefetch_tail(product, tile, tile.column * WIDTH, WIDTH)
    mbarrier.wait(pipeline.ring_empty.index(place), ring_phase ^ 1)
    announce(pipeline, place, -1, 0, 0, 0)
