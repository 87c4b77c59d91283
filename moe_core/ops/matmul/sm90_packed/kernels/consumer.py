"""What the consumers of `sm90_packed.kernels.matmul` do with a block of weights and with sums, whatever their tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.ops.exchange.kernels.addresses import slots_at
from moe_core.ops.matmul.sm90.kernels.pipeline import barrier
from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import HEIGHT, UNIT, left_operand, load_lines, load_words
from moe_core.ops.matmul.sm90_packed.kernels.decode_integers import integer_operand, read_factors
from moe_core.ops.matmul.sm90_packed.kernels.epilogue import activated


@gluon.jit
def half_of(values, WHICH: gl.constexpr):
    """The first or the last half of the tokens (columns)."""
    first, last = gl.split(gl.permute(gl.reshape(values, [values.shape[0], 2, values.shape[1] // 2]), [0, 2, 1]))
    return first if WHICH == 0 else last


@gluon.jit
def part_of(values, WHICH: gl.constexpr, PARTS: gl.constexpr):
    """One of PARTS (1, 2, 4, 8 or 16) parts of the tokens."""
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
def finish(
    accumulator, biases, layer_exists, buffer, y, weights, slots, start, pair,
    FROM: gl.constexpr, N: gl.constexpr, SCATTER: gl.constexpr, GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Bias, activation, row weight, cast, and stores of [64 accumulator rows, tokens FROM, ..] of a tile, as many at a
    time as the buffer has room for."""
    WIDTH: gl.constexpr = UNIT if GATE_LAYOUT is not None else HEIGHT
    TOKENS: gl.constexpr = buffer.shape[0]
    PARTS: gl.constexpr = accumulator.shape[1] // TOKENS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [gl.num_warps(), 1], [1, 0])
    if biases is not None:
        accumulator += biases[:, None]
    for part in gl.static_range(PARTS):
        values = part_of(accumulator, part, PARTS)
        result = activated(values, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT)
        if weights is not None:
            scale = weights.slice(FROM + part * TOKENS, TOKENS).load(gl.SliceLayout(0, result.type.layout))
            result *= scale[None, :]
        result = gl.where(layer_exists, result, float("nan"))
        barrier()
        buffer.store(gl.permute(result.to(buffer.dtype), [1, 0]))
        barrier()
        columns = pair * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        # -1 where there is no row.
        slot = slots.slice(FROM + part * TOKENS, TOKENS).load(gl.SliceLayout(1, layout))
        mask = (slot >= 0)[:, None] & (columns < N)[None, :]
        if SCATTER == "row":
            # The part of all threads apart: places of every part would be held over the whole tile.
            within = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))[:, None] * N + columns[None, :]
            pointers = y + (start.to(gl.int64) + (FROM + part * TOKENS)) * N + within
        elif SCATTER == "slot":
            pointers = y + slot.to(gl.int64)[:, None] * N + columns[None, :]
        else:
            there, goes = slots_at(y, slot, slot >= 0, SCATTER)
            pointers = there[:, None] + columns[None, :]
            mask = goes[:, None] & (columns < N)[None, :]
        gl.store(pointers, buffer.load(layout), mask=mask)


@gluon.jit
def read_block(
    codes, scales, zero_points, ELEMENT: gl.constexpr, GROUPS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """What `operand_of` makes numbers of a block from."""
    if ELEMENT == "e2m1":
        return load_words(codes, scales)
    else:
        return load_lines(codes), read_factors(scales, zero_points, GROUPS, STORED)


@gluon.jit
def operand_of(held, HALF: gl.constexpr, ELEMENT: gl.constexpr, PRODUCT: gl.constexpr):
    """64 columns of a block as the left operand of a product."""
    if ELEMENT == "e2m1":
        return left_operand(held[HALF], held[2], HALF, PRODUCT)
    else:
        return integer_operand(held[0], held[1], HALF, ELEMENT, PRODUCT)
