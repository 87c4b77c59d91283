"""Parts of the producer for tall and swapped row blocks. Rows of x and biases wait in shared memory, since consumers
need registers."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from moe_core.ops.common.kernels.aggregates import Tile
from moe_core.ops.matmul.sm90.kernels.pipeline import (
    DEPTH,
    PANEL,
    PIECE,
    ROOM,
    ROWS,
    WIDE,
    advance,
    row_load,
    tma_load,
)
from moe_core.ops.matmul.sm90.kernels.producer import bias_tile, load_weights, next_tile
from moe_core.ops.routing.kernels.schedule import even_block


@triton.constexpr_function
def chunk_sizes(tiles, stages):
    """Return (rows of a chunk, chunks of a block, rows that divide the height of a block)."""
    count, rows, _ = tiles.shape
    return rows, count // stages, 64 if rows == 64 else 8


@gluon.jit
def row_of_place(place, HEIGHT: gl.constexpr):
    """Return the row of a block at an index of its list, in chunks of HEIGHT rows. Rows 16 apart are neighbours,
    because one thread loads them."""
    EACH: gl.constexpr = HEIGHT // 16
    return place // HEIGHT * HEIGHT + place % EACH * 16 + place % HEIGHT // EACH


@gluon.jit
def read_rows(places, layout: gl.constexpr):
    """Return the rows of x of a chunk, in order. Each thread reads neighbours of the list."""
    EACH: gl.constexpr = places.shape[0] // 16
    read: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([EACH, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))
    numbers = gl.reshape(gl.permute(gl.reshape(places.load(read), [16, EACH]), [1, 0]), [16 * EACH])
    return gl.convert_layout(numbers, layout, assert_trivial=True)


@gluon.jit
def take_tile(product, layer_number, row_list, last_biases):
    """Return the tile as `producer.take_tile` does, zeros, and row weights `[ROOM]` if the tiles have room for them.
    row_list int32 `[ROOM]` gets the rows of x, -1 behind the last one. last_biases fp32 `[WIDE]` gets the biases."""
    x, weights, layout = product.x, product.weights, product.layout
    SIZES: gl.constexpr = chunk_sizes(product.tiles.left, product.pipeline.STAGES)
    HEIGHT: gl.constexpr = SIZES[0] * SIZES[1]
    BIASED: gl.constexpr = (last_biases is not None) and ((weights.bias is not None) or (weights.up_bias is not None))
    left, exists, expert, start, size, blocks, block, column = next_tile(product, HEIGHT)
    first, rows = even_block(size, block, blocks, SIZES[2], HEIGHT // SIZES[2])
    start += first
    rows = gl.where(exists, rows, 0)
    if BIASED:
        biases = bias_tile(weights, layer_number.to(gl.int64), gl.maximum(expert, 0), column)
    places = gl.arange(0, ROOM, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    scales = 0
    if product.tiles.row_scales is not None:
        slots = gl.load(layout.slot_of_row + start.to(gl.int64) + places, mask=places < rows, other=0)
        slots = gl.minimum(gl.maximum(slots, 0), layout.num_slots - 1)
        scales = gl.load(product.epilogue.row_weight + slots).to(gl.float32)
    if x.GATHER != "row":
        within = row_of_place(places, SIZES[0])
        slots = gl.load(layout.slot_of_row + start.to(gl.int64) + within, mask=within < rows, other=0)
        # Layouts are not trusted: no value in them may lead outside x.
        slots = gl.minimum(gl.maximum(slots, 0), layout.num_slots - 1)
        numbers = slots // layout.TOP_K if x.GATHER == "token" else slots
        row_list.store(gl.where(within < rows, numbers, -1))
    if BIASED:
        last_biases.store(biases)
    expert = gl.where(left, gl.where(rows > 0, expert, -1), -2)
    return Tile(expert, start, rows, column), 0, 0, scales


@gluon.jit
def load_steps(product, row_list, tile, group, stage, phase, FROM: gl.constexpr, TO: gl.constexpr):
    x, tiles, pipeline = product.x, product.tiles, product.pipeline
    # FROM, hidden from the compiler, which would hold addresses for it in registers that consumers need.
    first = FROM + 8 * gl.minimum(tile.rows, 0) if FROM > 0 else 0
    SIZES: gl.constexpr = chunk_sizes(tiles.left, pipeline.STAGES)
    HEIGHT: gl.constexpr = SIZES[0]
    CHUNKS: gl.constexpr = SIZES[1]
    BYTES: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, DEPTH, gl.SliceLayout(0, layout))
    for k in range(first, TO, DEPTH):
        mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)
        ready = pipeline.full.index(stage)
        if x.GATHER != "row":
            mbarrier.expect(ready, WIDE * BYTES)
        else:
            for chunk in gl.static_range(CHUNKS):
                last = (tile.rows > chunk * HEIGHT) & (tile.rows <= (chunk + 1) * HEIGHT)
                mbarrier.expect(ready, (WIDE + (chunk + 1) * HEIGHT) * BYTES, pred=last)
        load_weights(product, ready, stage, group, tile.column, k, PANEL if HEIGHT == ROWS else PIECE)
        for chunk in gl.static_range(CHUNKS):
            buffer = tiles.left.index(CHUNKS * stage + chunk)
            exists = tile.rows > chunk * HEIGHT
            if x.GATHER == "row":
                tma_load(x.map, [tile.start + chunk * HEIGHT, k], ready, buffer, pred=exists)
            elif exists:
                # Missing rows are zeros: they cost no reads, and products with zeros cost less energy.
                numbers = read_rows(row_list.slice(chunk * HEIGHT, HEIGHT), gl.SliceLayout(1, layout))
                pointers = x.values + k + gl.maximum(numbers, 0).to(gl.int64)[:, None] * x.STRIDE + columns[None, :]
                row_load(buffer, pointers, mask=(numbers >= 0)[:, None])
        if x.GATHER != "row":
            async_copy.mbarrier_arrive(ready, increment_count=False)
        stage, phase = advance(stage, phase, pipeline.STAGES)
    return stage, phase
