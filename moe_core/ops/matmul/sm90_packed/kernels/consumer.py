from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.ops.common.kernels.aggregates import aggregate_of
from moe_core.ops.exchange.kernels.addresses import slots_at
from moe_core.ops.matmul.sm90.kernels.pipeline import barrier
from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import (
    HEIGHT,
    LINES,
    UNIT,
    left_operand,
    load_lines,
    load_words,
)
from moe_core.ops.matmul.sm90_packed.kernels.decode_integers import integer_operand, read_factors
from moe_core.ops.matmul.sm90_packed.kernels.epilogue import activated
from moe_core.ops.matmul.sm90_packed.kernels.low_rank import present_adapters
from moe_core.ops.matmul.sm90_packed.kernels.tail import add_tail

#: Shared memory: for each stage rows of x, codes, scales, zero points, for each slot of the ring a tile's row weights
#: and slots, and results to store. PAIRS: row blocks of a tile, of both consumers. DEEP: column blocks of a stage.
Stages = aggregate_of("Stages", "x codes scales zeros row_weights slots results PAIRS DEEP")

#: Tiled codes in STEPS x BLOCKS blocks of COLUMNS columns and 64 rows. GROUPS: scales of a row in a block. REPEAT:
#: steps that share them.
Codes = aggregate_of("Codes", "scales zero_points STEPS BLOCKS ELEMENT COLUMNS GROUPS REPEAT")

#: The part of a tile of consumer WHICH: first block of weight rows, start of its biases, if the layer exists, its
#: slot of the ring, and weights of the rows.
Part = aggregate_of("Part", "block tile base layer_exists place row_weights WHICH")


@gluon.jit
def half_of(values, WHICH: gl.constexpr):
    first, last = gl.split(gl.permute(gl.reshape(values, [values.shape[0], 2, values.shape[1] // 2]), [0, 2, 1]))
    return first if WHICH == 0 else last


@gluon.jit
def part_of(values, WHICH: gl.constexpr, PARTS: gl.constexpr):
    if PARTS >= 16:
        values = half_of(values, WHICH // 8 % 2)
    if PARTS >= 8:
        values = half_of(values, WHICH // 4 % 2)
    if PARTS >= 4:
        values = half_of(values, WHICH // 2 % 2)
    if PARTS >= 2:
        values = half_of(values, WHICH % 2)
    return values


@gluon.jit
def finish(accumulator, biases, product, part, block, slots, buffer, FROM: gl.constexpr):
    """Bias, activation, row weight, cast and store of [64 accumulator rows, tokens FROM, ..]. The buffer has room for
    some of the tokens at a time."""
    epilogue, output = product.epilogue, product.output
    N: gl.constexpr = output.N
    WIDTH: gl.constexpr = UNIT if epilogue.GATE_LAYOUT is not None else HEIGHT
    TOKENS: gl.constexpr = buffer.shape[0]
    PIECES: gl.constexpr = accumulator.shape[1] // TOKENS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [gl.num_warps(), 1], [1, 0])
    if product.tail is not None:
        expert, start, rows = part.tile.expert, part.tile.start + FROM, part.tile.rows - FROM
        present = present_adapters(product.tail, expert, start, rows, "")
        accumulator = add_tail(accumulator, block, expert, start, rows, present, product.weights, product.tail)
    if biases is not None:
        accumulator += biases[:, None]
    for piece in gl.static_range(PIECES):
        values = part_of(accumulator, piece, PIECES)
        result = activated(values, epilogue)
        if epilogue.row_weight is not None:
            weights = part.row_weights.slice(FROM + piece * TOKENS, TOKENS)
            result *= weights.load(gl.SliceLayout(0, result.type.layout))[None, :]
        result = gl.where(part.layer_exists, result, float("nan"))
        barrier()
        buffer.store(gl.permute(result.to(buffer.dtype), [1, 0]))
        barrier()
        columns = block * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        slot = slots.slice(FROM + piece * TOKENS, TOKENS).load(gl.SliceLayout(1, layout))
        mask = (slot >= 0)[:, None] & (columns < N)[None, :]
        if output.SCATTER == "row":
            # Offsets from a scalar start: pointers of every part would be held over the whole tile.
            within = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))[:, None] * N + columns[None, :]
            pointers = output.y + (part.tile.start.to(gl.int64) + (FROM + piece * TOKENS)) * N + within
        elif output.SCATTER == "slot":
            pointers = output.y + slot.to(gl.int64)[:, None] * N + columns[None, :]
        else:
            there, goes = slots_at(output.y, slot, slot >= 0, output.SCATTER)
            pointers = there[:, None] + columns[None, :]
            mask = goes[:, None] & (columns < N)[None, :]
        gl.store(pointers, buffer.load(layout), mask=mask)


@gluon.jit
def read_block(product, stage, deep, block):
    stages, codes = product.tiles, product.scales
    lines = stages.codes.index(stage * stages.PAIRS + block).slice(deep * LINES, LINES, dim=0)
    scales = stages.scales.index(stage * stages.DEEP + deep).slice(block, 1, dim=0)
    if codes.ELEMENT == "e2m1":
        return load_words(lines, scales)
    else:
        zeros = None
        if codes.zero_points is not None:
            zeros = stages.zeros.index(stage * stages.DEEP + deep).slice(block, 1, dim=0)
        return load_lines(lines), read_factors(scales, zeros, codes.GROUPS)


@gluon.jit
def operand_of(held, HALF: gl.constexpr, ELEMENT: gl.constexpr, PRODUCT: gl.constexpr):
    if ELEMENT == "e2m1":
        return left_operand(held[HALF], held[2], HALF, PRODUCT)
    else:
        return integer_operand(held[0], held[1], HALF, ELEMENT, PRODUCT)
