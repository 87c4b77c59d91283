"""The producer of the Hopper matmul with tall row blocks; see `producer`.

It has few registers, since consumers need the rest: rows of x and biases wait in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from moe_core.ops.matmul.sm90.kernels.pipeline import (
    CHUNKS,
    DEPTH,
    PANEL,
    ROOM,
    ROWS,
    WIDE,
    advance,
    row_load,
    tma_load,
)
from moe_core.ops.matmul.sm90.kernels.producer import bias_tile, load_weights, next_tile
from moe_core.ops.routing.kernels.schedule import even_block


@gluon.jit
def row_of_place(place):
    """The row of a block at a place of its list: rows 16 apart, which one thread loads, are neighbours."""
    return place // ROWS * ROWS + place % 4 * 16 + place % ROWS // 4


@gluon.jit
def read_rows(places, layout: gl.constexpr):
    """Rows of x of a chunk, in order, by one read of four per thread."""
    four: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([4, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))
    numbers = gl.reshape(gl.permute(gl.reshape(places.load(four), [16, 4]), [1, 0]), [ROWS])
    return gl.convert_layout(numbers, layout, assert_trivial=True)


@gluon.jit
def take_tile(
    row_list, next_biases, bias, up_bias, layer_number, group_sizes, group_start, slot_of_row, schedule, counters,
    num_blocks, num_rows, num_slots, N: gl.constexpr, WEIGHT_N: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr,
    UP_BIAS_LAYER_STRIDE: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, GATE_LAYOUT: gl.constexpr,
    COUNTER: gl.constexpr, GROUP_M: gl.constexpr, SPREAD: gl.constexpr,
):  # fmt: skip
    """What `producer.take_tile` returns, without rows of x and biases, which wait in shared memory.

    row_list int32 `[ROOM]` gets the rows of x, -1 behind the last one; next_biases fp32 `[WIDE]` those of the tile.
    """
    left, exists, expert, start, size, blocks, block, tile = next_tile(
        group_sizes, group_start, schedule, counters, num_blocks, num_rows, N, GATE_LAYOUT, COUNTER, GROUP_M,
        CHUNKS * ROWS, SPREAD,
    )  # fmt: skip
    first, rows = even_block(size, block, blocks, ROWS, CHUNKS)
    start += first
    rows = gl.where(exists, rows, 0)
    if (bias is not None) or (up_bias is not None):
        biases = bias_tile(
            bias, up_bias, layer_number.to(gl.int64), gl.maximum(expert, 0), tile, N, WEIGHT_N, BIAS_LAYER_STRIDE,
            UP_BIAS_LAYER_STRIDE, GATE_LAYOUT,
        )  # fmt: skip
    if GATHER != "row":
        places = gl.arange(0, ROOM, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        within = row_of_place(places)
        slots = gl.load(slot_of_row + start.to(gl.int64) + within, mask=within < rows, other=0)
        # The arrays of a layout may come from anywhere: no value in them may lead outside x.
        slots = gl.minimum(gl.maximum(slots, 0), num_slots - 1)
        numbers = slots // TOP_K if GATHER == "token" else slots
        row_list.store(gl.where(within < rows, numbers, -1))
    if (bias is not None) or (up_bias is not None):
        next_biases.store(biases)
    return gl.where(left, gl.where(rows > 0, expert, -1), -2), start, rows, tile, 0, 0, 0


@gluon.jit
def load_steps(
    x, x_map, weight_map, up_map, a_tiles, w_tiles, row_list, full, empty, stage, phase, group, start, rows, tile,
    FROM: gl.constexpr, TO: gl.constexpr, D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr,
    X_STRIDE: gl.constexpr, GATHER: gl.constexpr, GATE_LAYOUT: gl.constexpr, IN_OUT: gl.constexpr,
    STAGES: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Load the part FROM .. TO of a tile's reduction as stages become free."""
    # FROM, which the compiler does not know: it would hold addresses for it, in registers of the consumers.
    first = FROM + 8 * gl.minimum(rows, 0) if FROM > 0 else 0
    BYTES: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, DEPTH, gl.SliceLayout(0, layout))
    for k in range(first, TO, STEP):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        ready = full.index(stage)
        if GATHER != "row":
            mbarrier.expect(ready, WIDE * BYTES)
        elif rows > 2 * ROWS:
            mbarrier.expect(ready, (WIDE + 3 * ROWS) * BYTES)
        elif rows > ROWS:
            mbarrier.expect(ready, (WIDE + 2 * ROWS) * BYTES)
        else:
            mbarrier.expect(ready, (WIDE + ROWS) * BYTES)
        load_weights(
            weight_map, up_map, w_tiles, ready, stage, group, tile, k, D, N, WEIGHT_N, GATE_LAYOUT, IN_OUT, PANEL
        )
        for chunk in gl.static_range(CHUNKS):
            a_tile = a_tiles.index(CHUNKS * stage + chunk)
            exists = rows > chunk * ROWS
            if GATHER == "row":
                tma_load(x_map, [start + chunk * ROWS, k], ready, a_tile, pred=exists)
            elif exists:
                # Rows that do not exist are zeros: they cost no reads, and products with zeros cost less energy.
                numbers = read_rows(row_list.slice(chunk * ROWS, ROWS), gl.SliceLayout(1, layout))
                pointers = x + k + gl.maximum(numbers, 0).to(gl.int64)[:, None] * X_STRIDE + columns[None, :]
                row_load(a_tile, pointers, mask=(numbers >= 0)[:, None])
        if GATHER != "row":
            async_copy.mbarrier_arrive(ready, increment_count=False)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase
