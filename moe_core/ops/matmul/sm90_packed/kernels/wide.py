"""A consumer's part of the tallest tiles of `sm90_packed.kernels.matmul`, of up to 256 rows of x. Written in Gluon.

Of 64 weight rows only, so that every code is decoded once for up to 256 rows of x. ptxas takes products one by one,
each waited for, where one is under way when the loop turns; so what the next stage's first product takes is decoded
before the wait that ends a stage, while the last product runs, and a stage begins with a product:

    product of columns 0 .. 63    decode columns 64 .. 127
    product of columns 64 .. 127  wait for the next stage, decode its columns 0 .. 63
    wait for both products, hand the stage back
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from moe_core.ops.matmul.sm90.kernels.pipeline import DEPTH, advance, await_stage, release_stage
from moe_core.ops.matmul.sm90_packed.kernels.consumer import finish, operand_of, read_block
from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import HEIGHT, LINES
from moe_core.ops.matmul.sm90_packed.kernels.epilogue import bias_of


@gluon.constexpr_function
def product_of(tokens):
    """Layout of sums [64, tokens]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.jit
def block_at(
    w_tiles, scale_tiles, zero_tiles, stage, place,
    DEEP: gl.constexpr, FIRST: gl.constexpr, PAIRS: gl.constexpr, ELEMENT: gl.constexpr, GROUPS: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    """This consumer's codes and scales of one of the DEEP blocks of a stage."""
    return read_block(
        w_tiles.index(stage * PAIRS + FIRST).slice(place * LINES, LINES, dim=0),
        scale_tiles.index(stage * DEEP + place).slice(FIRST, 1, dim=0),
        zero_tiles.index(stage * DEEP + place).slice(FIRST, 1, dim=0), ELEMENT, GROUPS, STORED,
    )  # fmt: skip


@gluon.jit
def multiply(left, x_tile, sums, TOKENS: gl.constexpr, REST: gl.constexpr):
    """Add the products of 64 columns, asynchronously."""
    first = warpgroup_mma(left, x_tile.slice(0, TOKENS, dim=0).permute([1, 0]), sums[0], is_async=True)
    if REST == 0:
        return (first,)
    else:
        left = gl.convert_layout(left, gl.DotOperandLayout(0, product_of(REST), 2), assert_trivial=True)
        columns = x_tile.slice(TOKENS, REST, dim=0).permute([1, 0])
        return first, warpgroup_mma(left, columns, sums[1], is_async=True)


@gluon.jit
def wait_for(sums, LEFT: gl.constexpr, REST: gl.constexpr):
    """Wait until all but the last LEFT calls of `multiply` are done."""
    if REST == 0:
        return (warpgroup_mma_wait(num_outstanding=LEFT, deps=[sums[0]]),)
    else:
        first, second = warpgroup_mma_wait(num_outstanding=2 * LEFT, deps=[sums[0], sums[1]])
        return first, second


@gluon.jit
def multiply_stage(
    sums, left, x_tiles, w_tiles, scale_tiles, zero_tiles, pipeline, stage, phase,
    FIRST: gl.constexpr, PAIRS: gl.constexpr, DEEP: gl.constexpr,
    ELEMENT: gl.constexpr, COLUMNS: gl.constexpr, GROUPS: gl.constexpr, STORED: gl.constexpr,
    GATHER: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, REST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """One stage, whose first 64 columns are decoded already: `left`. Returns the next stage's, and that it is next, but
    where the stage is the LAST of a tile."""
    HALVES: gl.constexpr = COLUMNS // DEPTH
    PARTS: gl.constexpr = HALVES * DEEP
    following, following_phase = advance(stage, phase, STAGES)
    for part in gl.static_range(PARTS):
        x_tile = x_tiles.index(PARTS * stage + part)
        sums = multiply(left, x_tile, sums, TOKENS, REST)
        if part < PARTS - 1:
            held = block_at(
                w_tiles, scale_tiles, zero_tiles, stage, (part + 1) // HALVES, DEEP, FIRST, PAIRS, ELEMENT, GROUPS,
                STORED,
            )  # fmt: skip
            if part > 0:
                sums = wait_for(sums, 1, REST)
            left = operand_of(held, (part + 1) % HALVES, ELEMENT, product_of(TOKENS))
        elif not LAST:
            await_stage(pipeline, following, following_phase)
            held = block_at(w_tiles, scale_tiles, zero_tiles, following, 0, DEEP, FIRST, PAIRS, ELEMENT, GROUPS, STORED)
            if part > 0:
                sums = wait_for(sums, 1, REST)
            left = operand_of(held, 0, ELEMENT, product_of(TOKENS))
    sums = wait_for(sums, 0, REST)
    release_stage(pipeline, stage)
    return sums, left, following, following_phase


@gluon.jit
def compute_wide(
    x_tiles, w_tiles, scale_tiles, zero_tiles, pipeline, stage, phase, weights, slots, buffer, bias, base,
    layer_exists, y, start, block,
    FIRST: gl.constexpr, N: gl.constexpr, STEPS: gl.constexpr, PAIRS: gl.constexpr, DEEP: gl.constexpr,
    ELEMENT: gl.constexpr, COLUMNS: gl.constexpr, GROUPS: gl.constexpr, STORED: gl.constexpr,
    GATHER: gl.constexpr, SCATTER: gl.constexpr, GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """A consumer's part of a tile of at most TOKENS + REST rows: block FIRST of a stage, `block` of the matrix.

    TOKENS and REST are multiplied by products of their own, since each must be a power of two; REST may be 0.
    """
    sums = (gl.zeros([HEIGHT, TOKENS], gl.float32, product_of(TOKENS)),)
    if REST > 0:
        sums += (gl.zeros([HEIGHT, REST], gl.float32, product_of(REST)),)
    await_stage(pipeline, stage, phase)
    held = block_at(w_tiles, scale_tiles, zero_tiles, stage, 0, DEEP, FIRST, PAIRS, ELEMENT, GROUPS, STORED)
    left = operand_of(held, 0, ELEMENT, product_of(TOKENS))
    for _ in range(DEEP, STEPS, DEEP):
        sums, left, stage, phase = multiply_stage(
            sums, left, x_tiles, w_tiles, scale_tiles, zero_tiles, pipeline, stage, phase, FIRST, PAIRS,
            DEEP, ELEMENT, COLUMNS, GROUPS, STORED, GATHER, STAGES, TOKENS, REST, False,
        )  # fmt: skip
    sums, left, stage, phase = multiply_stage(
        sums, left, x_tiles, w_tiles, scale_tiles, zero_tiles, pipeline, stage, phase, FIRST, PAIRS,
        DEEP, ELEMENT, COLUMNS, GROUPS, STORED, GATHER, STAGES, TOKENS, REST, True,
    )  # fmt: skip
    biases = None
    if bias is not None:
        biases = bias_of(bias, base, block, N, GATE_LAYOUT, gl.SliceLayout(1, product_of(TOKENS)))
    finish(
        sums[0], biases, layer_exists, buffer, y, weights, slots, start, block, 0, N, SCATTER, GATE_LAYOUT,
        ACTIVATION, ALPHA, LIMIT,
    )  # fmt: skip
    if REST > 0:
        if bias is not None:
            biases = gl.convert_layout(biases, gl.SliceLayout(1, product_of(REST)), assert_trivial=True)
        finish(
            sums[1], biases, layer_exists, buffer, y, weights, slots, start, block, TOKENS, N, SCATTER,
            GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT,
        )  # fmt: skip
    return stage, phase
