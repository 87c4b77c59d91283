"""Epilogues of sums of 64 prepacked weight rows (`moe_core.formats.tiling`): 8 rows of one side of the block and 8 of
the other alternate, so that a thread has gate and up of the same output column."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.ops.activation.kernels.formulas import activate, activate_gated, sigmoid_ptx
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.exchange.kernels.addresses import slots_at
from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import HEIGHT, UNIT


@gluon.jit
def matrix_rows(block, N: gl.constexpr, GATE_LAYOUT: gl.constexpr, LAYOUT: gl.constexpr):
    """Return (rows of the published matrix for a block's 64 accumulator rows, which of them exist)."""
    place = gl.arange(0, HEIGHT, LAYOUT)
    side = place // 8 % 2
    within = place // 16 * 8 + place % 8
    column = block * HEIGHT + side * UNIT + within if GATE_LAYOUT is None else block * UNIT + within
    row = column
    if GATE_LAYOUT == "interleaved":
        row = 2 * column + side
    elif GATE_LAYOUT == "halves":
        row = column + side * N
    return row, column < N


@gluon.jit
def bias_of(weights, base, block, LAYOUT: gl.constexpr):
    row, exists = matrix_rows(block, weights.N, weights.GATE_LAYOUT, LAYOUT)
    return gl.load(weights.bias + base + row, mask=exists, other=0.0).to(gl.float32)


@gluon.jit
def activated(accumulator, epilogue):
    TOKENS: gl.constexpr = accumulator.shape[1]
    values = gl.reshape(accumulator, [4, 2, 8, TOKENS])
    if epilogue.GATE_LAYOUT is not None:
        gate, up = gl.split(gl.permute(values, [0, 2, 3, 1]))
        gate, up = gl.reshape(gate, [UNIT, TOKENS]), gl.reshape(up, [UNIT, TOKENS])
        result = activate_gated(gate, up, epilogue.ACTIVATION, epilogue.ALPHA, epilogue.LIMIT, sigmoid_ptx)
    else:
        result = gl.reshape(gl.permute(values, [1, 0, 2, 3]), [HEIGHT, TOKENS])
        if epilogue.ACTIVATION is not None:
            result = activate(result, epilogue.ACTIVATION, sigmoid_ptx)
    return result


@gluon.jit
def store_tile(accumulator, tile, expert, first, start, size, weights, layout, epilogue, output):
    """Finish sums [64, tokens] of `mma_v2` of block `tile`. The expert has `size` rows from row `start` on. first: the
    number of the first token among them."""
    N: gl.constexpr = output.N
    SCATTER: gl.constexpr = output.SCATTER
    PRODUCT: gl.constexpr = accumulator.type.layout
    BLOCK_M: gl.constexpr = accumulator.shape[1]
    WIDTH: gl.constexpr = UNIT if epilogue.GATE_LAYOUT is not None else HEIGHT
    # Looked up again to free registers in the loop.
    layer_number, layer_exists = layer_in_stack(weights.layer_index, weights.NUM_LAYERS)
    if weights.bias is not None:
        base = layer_number.to(gl.int64) * weights.BIAS_LAYER_STRIDE + expert.to(gl.int64) * weights.WEIGHT_N
        accumulator += bias_of(weights, base, tile, gl.SliceLayout(1, PRODUCT))[:, None]
    result = activated(accumulator, epilogue)
    result = gl.where(layer_exists, result, float("nan"))
    stores: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [gl.num_warps(), 1], [1, 0])
    within = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, stores))
    row = start.to(gl.int64) + within
    slot = gl.load(layout.slot_of_row + row, mask=within < size, other=-1)
    exists = (slot >= 0) & (slot < layout.num_slots)
    result = gl.convert_layout(gl.permute(result, [1, 0]), stores)
    if epilogue.row_weight is not None:
        result *= gl.load(epilogue.row_weight + gl.maximum(slot, 0), mask=exists, other=0.0)[:, None]
    columns = tile * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, stores))
    if (SCATTER == "row") or (SCATTER == "slot"):
        target = row if SCATTER == "row" else slot.to(gl.int64)
        pointers = output.y + target[:, None] * N + columns[None, :]
    else:
        there, exists = slots_at(output.y, slot, exists, SCATTER)
        pointers = there[:, None] + columns[None, :]
    mask = exists[:, None] & (columns < N)[None, :]
    gl.store(pointers, result.to(pointers.dtype.element_ty), mask=mask)
