"""The Hopper matmul's producer: takes tiles, announces them, and loads weights and rows ahead of the consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from moe_core.ops.matmul.sm90.kernels.pipeline import DEPTH, PIECE, ROWS, WIDE, advance, locate_tile, row_load, tma_load


@gluon.jit
def bias_tile(
    bias, up_bias, layer_number, expert, tile, N: gl.constexpr, WEIGHT_N: gl.constexpr,
    BIAS_LAYER_STRIDE: gl.constexpr, UP_BIAS_LAYER_STRIDE: gl.constexpr, GATE_LAYOUT: gl.constexpr,
):  # fmt: skip
    """fp32 biases of a tile's accumulator columns; zeros outside the matrix."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    columns = gl.arange(0, WIDE, layout)
    split_tile: gl.constexpr = (GATE_LAYOUT == "halves") or (GATE_LAYOUT == "separate")
    if split_tile:
        within = tile * PIECE + columns % PIECE
        inside = within < N
        second = columns >= PIECE
    else:
        within = tile * WIDE + columns
        inside = within < WEIGHT_N
    values = gl.zeros([WIDE], gl.float32, layout)
    if bias is not None:
        base = bias + layer_number * BIAS_LAYER_STRIDE + expert.to(gl.int64) * WEIGHT_N
        if GATE_LAYOUT == "halves":
            values += gl.load(base + within + gl.where(second, N, 0), mask=inside, other=0.0).to(gl.float32)
        elif GATE_LAYOUT == "separate":
            values += gl.load(base + within, mask=inside & (columns < PIECE), other=0.0).to(gl.float32)
        else:
            values += gl.load(base + within, mask=inside, other=0.0).to(gl.float32)
    if up_bias is not None:
        up_base = up_bias + layer_number * UP_BIAS_LAYER_STRIDE + expert.to(gl.int64) * N
        values += gl.load(up_base + within, mask=inside & second, other=0.0).to(gl.float32)
    return values


@gluon.jit
def load_weights(
    weight_map, up_map, w_tiles, full, stage, group, tile, k, D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr,
    GATE_LAYOUT: gl.constexpr, IN_OUT: gl.constexpr, PANEL: gl.constexpr = PIECE,
):  # fmt: skip
    """Start loading one stage of weights: those of gate and of up take turns, PANEL columns of each.

    group: the matrix, counted over layers and experts.
    """
    if (GATE_LAYOUT == "halves") or (GATE_LAYOUT == "separate"):
        second_map = weight_map if GATE_LAYOUT == "halves" else up_map
        AXIS: gl.constexpr = 1 if IN_OUT else 0
        for part in gl.static_range(PIECE // PANEL):
            column = tile * PIECE + part * PANEL
            second = column + (N if GATE_LAYOUT == "halves" else 0)
            gate = w_tiles.index(stage).slice(2 * part * PANEL, PANEL, dim=AXIS)
            up = w_tiles.index(stage).slice((2 * part + 1) * PANEL, PANEL, dim=AXIS)
            if IN_OUT:
                tma_load(weight_map, [group * D + k, column], full, gate)
                tma_load(second_map, [group * D + k, second], full, up)
            else:
                tma_load(weight_map, [group * WEIGHT_N + column, k], full, gate)
                tma_load(second_map, [group * WEIGHT_N + second, k], full, up)
    elif IN_OUT:
        tma_load(weight_map, [group * D + k, tile * WIDE], full, w_tiles.index(stage))
    else:
        tma_load(weight_map, [group * WEIGHT_N + tile * WIDE, k], full, w_tiles.index(stage))


@gluon.jit
def gathered_rows(slot_of_row, start, rows, num_slots, FIRST: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr):
    """Rows of x of a consumer; a row that does not exist repeats the last one that does.

    The arrays of a layout may come from anywhere: no value in them may lead outside x.
    """
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))
    within = gl.maximum(gl.minimum(FIRST + gl.arange(0, ROWS, layout), rows - 1), 0)
    if GATHER == "row":
        return within
    slots = gl.load(slot_of_row + start.to(gl.int64) + within, mask=rows > 0, other=0)
    slots = gl.minimum(gl.maximum(slots, 0), num_slots - 1)
    return slots // TOP_K if GATHER == "token" else slots


@gluon.jit
def next_tile(
    group_sizes, group_start, schedule, counters, num_blocks, num_rows, N: gl.constexpr, GATE_LAYOUT: gl.constexpr,
    COUNTER: gl.constexpr, GROUP_M: gl.constexpr, HEIGHT: gl.constexpr, SPREAD: gl.constexpr,
):  # fmt: skip
    """What `locate_tile` says of the next number of the counter."""
    TILES_N: gl.constexpr = (N + PIECE - 1) // PIECE if GATE_LAYOUT is not None else (N + WIDE - 1) // WIDE
    number = gl.atomic_add(counters + COUNTER, 1, sem="relaxed")
    return locate_tile(
        number, group_sizes, group_start, schedule, num_blocks, num_rows, TILES_N, HEIGHT, GROUP_M, SPREAD
    )


@gluon.jit
def take_tile(
    row_list, next_biases, bias, up_bias, layer_number, group_sizes, group_start, slot_of_row, schedule, counters,
    num_blocks, num_rows, num_slots, N: gl.constexpr, WEIGHT_N: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr,
    UP_BIAS_LAYER_STRIDE: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, GATE_LAYOUT: gl.constexpr,
    COUNTER: gl.constexpr, GROUP_M: gl.constexpr, SPREAD: gl.constexpr,
):  # fmt: skip
    """(expert, first row, rows, column tile, both consumers' rows of x, biases); expert -1: idle, -2: none is left.

    row_list, next_biases: None, where tall row blocks keep theirs.
    """
    left, exists, expert, start, size, _, block, tile = next_tile(
        group_sizes, group_start, schedule, counters, num_blocks, num_rows, N, GATE_LAYOUT, COUNTER, GROUP_M, 2 * ROWS,
        SPREAD,
    )  # fmt: skip
    first = block * (2 * ROWS)
    rows = gl.where(exists, size - first, 0)
    start += first
    upper = gathered_rows(slot_of_row, start, rows, num_slots, 0, TOP_K, GATHER)
    lower = gathered_rows(slot_of_row, start, rows, num_slots, ROWS, TOP_K, GATHER)
    biases = 0
    if (bias is not None) or (up_bias is not None):
        biases = bias_tile(
            bias, up_bias, layer_number.to(gl.int64), gl.maximum(expert, 0), tile, N, WEIGHT_N, BIAS_LAYER_STRIDE,
            UP_BIAS_LAYER_STRIDE, GATE_LAYOUT,
        )  # fmt: skip
    return gl.where(left, gl.where(rows > 0, expert, -1), -2), start, rows, tile, upper, lower, biases


@gluon.jit
def load_steps(
    x, x_map, weight_map, up_map, a_tiles, w_tiles, sources, full, empty, stage, phase, group, start, rows, tile,
    FROM: gl.constexpr, TO: gl.constexpr, D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr,
    X_STRIDE: gl.constexpr, GATHER: gl.constexpr, GATE_LAYOUT: gl.constexpr, IN_OUT: gl.constexpr,
    STAGES: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Load the part FROM .. TO of a tile's reduction as stages become free. sources: both consumers' rows of x."""
    upper, lower = sources
    BYTES: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1, STEP // 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    if STEP != DEPTH:
        upper = gl.convert_layout(upper, gl.SliceLayout(1, layout), assert_trivial=True)
        lower = gl.convert_layout(lower, gl.SliceLayout(1, layout), assert_trivial=True)
    columns = gl.arange(0, STEP, gl.SliceLayout(0, layout))
    upper_rows = x + upper.to(gl.int64)[:, None] * X_STRIDE + columns[None, :]
    lower_rows = x + lower.to(gl.int64)[:, None] * X_STRIDE + columns[None, :]
    # Rows that do not exist are zeros: they cost no reads, and products with zeros cost less energy.
    within = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    for k in range(FROM, TO, STEP):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        ready = full.index(stage)
        if GATHER != "row":
            mbarrier.expect(ready, WIDE * BYTES)
            load_weights(weight_map, up_map, w_tiles, ready, stage, group, tile, k, D, N, WEIGHT_N, GATE_LAYOUT, IN_OUT)
            if D % STEP == 0:
                row_load(a_tiles.index(2 * stage), upper_rows + k, mask=within < rows)
                if rows > ROWS:
                    row_load(a_tiles.index(2 * stage + 1), lower_rows + k, mask=ROWS + within < rows)
            else:
                # What lies behind a row is another one: zeros, which TMA reads there too.
                inside = (columns < D - k)[None, :]
                row_load(a_tiles.index(2 * stage), upper_rows + k, mask=(within < rows) & inside)
                if rows > ROWS:
                    row_load(a_tiles.index(2 * stage + 1), lower_rows + k, mask=(ROWS + within < rows) & inside)
            async_copy.mbarrier_arrive(ready, increment_count=False)
        elif rows > ROWS:
            mbarrier.expect(ready, (WIDE + 2 * ROWS) * BYTES)
            load_weights(weight_map, up_map, w_tiles, ready, stage, group, tile, k, D, N, WEIGHT_N, GATE_LAYOUT, IN_OUT)
            tma_load(x_map, [start, k], ready, a_tiles.index(2 * stage))
            tma_load(x_map, [start + ROWS, k], ready, a_tiles.index(2 * stage + 1))
        else:
            mbarrier.expect(ready, (WIDE + ROWS) * BYTES)
            load_weights(weight_map, up_map, w_tiles, ready, stage, group, tile, k, D, N, WEIGHT_N, GATE_LAYOUT, IN_OUT)
            tma_load(x_map, [start, k], ready, a_tiles.index(2 * stage))
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase
