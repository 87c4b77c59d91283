from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from moe_core.ops.common.kernels.aggregates import Tile
from moe_core.ops.matmul.sm90.kernels.pipeline import DEPTH, PIECE, ROWS, WIDE, advance, locate_tile, row_load, tma_load


@gluon.jit
def bias_tile(weights, layer_number, expert, column):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    columns = gl.arange(0, WIDE, layout)
    split_tile: gl.constexpr = (weights.GATE_LAYOUT == "halves") or (weights.GATE_LAYOUT == "separate")
    if split_tile:
        within = column * PIECE + columns % PIECE
        inside = within < weights.N
        second = columns >= PIECE
    else:
        within = column * WIDE + columns
        inside = within < weights.WEIGHT_N
    values = gl.zeros([WIDE], gl.float32, layout)
    if weights.bias is not None:
        base = weights.bias + layer_number * weights.BIAS_LAYER_STRIDE + expert.to(gl.int64) * weights.WEIGHT_N
        if weights.GATE_LAYOUT == "halves":
            values += gl.load(base + within + gl.where(second, weights.N, 0), mask=inside, other=0.0).to(gl.float32)
        elif weights.GATE_LAYOUT == "separate":
            values += gl.load(base + within, mask=inside & (columns < PIECE), other=0.0).to(gl.float32)
        else:
            values += gl.load(base + within, mask=inside, other=0.0).to(gl.float32)
    if weights.up_bias is not None:
        up_base = weights.up_bias + layer_number * weights.UP_BIAS_LAYER_STRIDE + expert.to(gl.int64) * weights.N
        values += gl.load(up_base + within, mask=inside & second, other=0.0).to(gl.float32)
    return values


@gluon.jit
def load_weights(product, full, stage, group, column, k, PANEL: gl.constexpr = PIECE):
    """Start loading one stage of weights, in alternating panels of gate and up. group: number of the matrix over layers
    and experts."""
    weights, tiles = product.weights, product.tiles.right
    if (weights.GATE_LAYOUT == "halves") or (weights.GATE_LAYOUT == "separate"):
        second_map = weights.map if weights.GATE_LAYOUT == "halves" else weights.up_map
        AXIS: gl.constexpr = 1 if weights.IN_OUT else 0
        for part in gl.static_range(PIECE // PANEL):
            first = column * PIECE + part * PANEL
            second = first + (weights.N if weights.GATE_LAYOUT == "halves" else 0)
            gate = tiles.index(stage).slice(2 * part * PANEL, PANEL, dim=AXIS)
            up = tiles.index(stage).slice((2 * part + 1) * PANEL, PANEL, dim=AXIS)
            if weights.IN_OUT:
                tma_load(weights.map, [group * weights.D + k, first], full, gate)
                tma_load(second_map, [group * weights.D + k, second], full, up)
            else:
                tma_load(weights.map, [group * weights.WEIGHT_N + first, k], full, gate)
                tma_load(second_map, [group * weights.WEIGHT_N + second, k], full, up)
    elif weights.IN_OUT:
        tma_load(weights.map, [group * weights.D + k, column * WIDE], full, tiles.index(stage))
    else:
        tma_load(weights.map, [group * weights.WEIGHT_N + column * WIDE, k], full, tiles.index(stage))


@gluon.jit
def gathered_rows(product, start, rows, FIRST: gl.constexpr):
    """Return the rows of x of a consumer. Missing rows repeat the last one. Layouts are not trusted: no value in them
    may lead outside x."""
    x, layout = product.x, product.layout
    numbers: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))
    within = gl.maximum(gl.minimum(FIRST + gl.arange(0, ROWS, numbers), rows - 1), 0)
    if x.GATHER == "row":
        return within
    slots = gl.load(layout.slot_of_row + start.to(gl.int64) + within, mask=rows > 0, other=0)
    slots = gl.minimum(gl.maximum(slots, 0), layout.num_slots - 1)
    return slots // layout.TOP_K if x.GATHER == "token" else slots


@gluon.jit
def next_tile(product, HEIGHT: gl.constexpr):
    COLUMNS: gl.constexpr = PIECE if product.weights.GATE_LAYOUT is not None else WIDE
    TILES: gl.constexpr = (product.weights.N + COLUMNS - 1) // COLUMNS
    number = gl.atomic_add(product.schedule.counters + product.schedule.COUNTER, 1, sem="relaxed")
    return locate_tile(number, product.layout, product.schedule, TILES, HEIGHT)


@gluon.jit
def take_tile(product, layer_number, row_list, last_biases):
    """Return (tile, both consumers' rows of x, biases). row_list, last_biases: of tall tiles only."""
    weights = product.weights
    left, exists, expert, start, size, _, block, column = next_tile(product, 2 * ROWS)
    first = block * (2 * ROWS)
    rows = gl.where(exists, size - first, 0)
    start += first
    upper = gathered_rows(product, start, rows, 0)
    lower = gathered_rows(product, start, rows, ROWS)
    biases = 0
    if (weights.bias is not None) or (weights.up_bias is not None):
        biases = bias_tile(weights, layer_number.to(gl.int64), gl.maximum(expert, 0), column)
    expert = gl.where(left, gl.where(rows > 0, expert, -1), -2)
    return Tile(expert, start, rows, column), upper, lower, biases


@gluon.jit
def load_steps(product, sources, tile, group, stage, phase, FROM: gl.constexpr, TO: gl.constexpr):
    upper, lower = sources
    x, tiles, pipeline = product.x, product.tiles, product.pipeline
    STEP: gl.constexpr = tiles.left.shape[2]
    BYTES: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1, STEP // 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    if STEP != DEPTH:
        upper = gl.convert_layout(upper, gl.SliceLayout(1, layout), assert_trivial=True)
        lower = gl.convert_layout(lower, gl.SliceLayout(1, layout), assert_trivial=True)
    columns = gl.arange(0, STEP, gl.SliceLayout(0, layout))
    upper_rows = x.values + upper.to(gl.int64)[:, None] * x.STRIDE + columns[None, :]
    lower_rows = x.values + lower.to(gl.int64)[:, None] * x.STRIDE + columns[None, :]
    # Missing rows are zeros: they cost no reads, and products with zeros cost less energy.
    within = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    for k in range(FROM, TO, STEP):
        mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)
        ready = pipeline.full.index(stage)
        if x.GATHER != "row":
            mbarrier.expect(ready, WIDE * BYTES)
            load_weights(product, ready, stage, group, tile.column, k)
            if product.weights.D % STEP == 0:
                row_load(tiles.left.index(2 * stage), upper_rows + k, mask=within < tile.rows)
                if tile.rows > ROWS:
                    row_load(tiles.left.index(2 * stage + 1), lower_rows + k, mask=ROWS + within < tile.rows)
            else:
                # Zeros behind the end of a row, as TMA reads.
                inside = (columns < product.weights.D - k)[None, :]
                row_load(tiles.left.index(2 * stage), upper_rows + k, mask=(within < tile.rows) & inside)
                if tile.rows > ROWS:
                    row_load(tiles.left.index(2 * stage + 1), lower_rows + k, mask=(ROWS + within < tile.rows) & inside)
            async_copy.mbarrier_arrive(ready, increment_count=False)
        elif tile.rows > ROWS:
            mbarrier.expect(ready, (WIDE + 2 * ROWS) * BYTES)
            load_weights(product, ready, stage, group, tile.column, k)
            tma_load(x.map, [tile.start, k], ready, tiles.left.index(2 * stage))
            tma_load(x.map, [tile.start + ROWS, k], ready, tiles.left.index(2 * stage + 1))
        else:
            mbarrier.expect(ready, (WIDE + ROWS) * BYTES)
            load_weights(product, ready, stage, group, tile.column, k)
            tma_load(x.map, [tile.start, k], ready, tiles.left.index(2 * stage))
        stage, phase = advance(stage, phase, pipeline.STAGES)
    return stage, phase
