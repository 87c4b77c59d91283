"""A consumer's part of the tallest tiles of `sm90_packed.kernels.matmul`, of up to 256 rows of x.

It has 64 weight rows, so that every code is decoded once. ptxas serialises products if one is under way when the loop
turns. So the operand of the next stage's first product is decoded while the last product runs:

    product of columns 0 .. 63    decode columns 64 .. 127
    product of columns 64 .. 127  wait for the next stage, decode its columns 0 .. 63
    wait for both products, release the stage
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from moe_core.ops.matmul.sm90.kernels.pipeline import DEPTH, advance, await_stage, release_stage
from moe_core.ops.matmul.sm90_packed.kernels.consumer import finish, operand_of, read_block
from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import HEIGHT
from moe_core.ops.matmul.sm90_packed.kernels.epilogue import bias_of


@gluon.constexpr_function
def product_of(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.jit
def multiply(left, x_tile, sums, TOKENS: gl.constexpr, REST: gl.constexpr):
    first = warpgroup_mma(left, x_tile.slice(0, TOKENS, dim=0).permute([1, 0]), sums[0], is_async=True)
    if REST == 0:
        return (first,)
    else:
        left = gl.convert_layout(left, gl.DotOperandLayout(0, product_of(REST), 2), assert_trivial=True)
        columns = x_tile.slice(TOKENS, REST, dim=0).permute([1, 0])
        return first, warpgroup_mma(left, columns, sums[1], is_async=True)


@gluon.jit
def wait_for(sums, LEFT: gl.constexpr, REST: gl.constexpr):
    if REST == 0:
        return (warpgroup_mma_wait(num_outstanding=LEFT, deps=[sums[0]]),)
    else:
        first, second = warpgroup_mma_wait(num_outstanding=2 * LEFT, deps=[sums[0], sums[1]])
        return first, second


@gluon.jit
def multiply_stage(
    sums, left, product, stage, phase, FIRST: gl.constexpr, TOKENS: gl.constexpr, REST: gl.constexpr, LAST: gl.constexpr
):
    """Multiply one stage. left: its first 64 columns, decoded. Return the next stage's, unless LAST."""
    ELEMENT: gl.constexpr = product.scales.ELEMENT
    HALVES: gl.constexpr = product.scales.COLUMNS // DEPTH
    PARTS: gl.constexpr = HALVES * product.tiles.DEEP
    following, following_phase = advance(stage, phase, product.pipeline.STAGES)
    for part in gl.static_range(PARTS):
        x_tile = product.tiles.x.index(PARTS * stage + part)
        sums = multiply(left, x_tile, sums, TOKENS, REST)
        if part < PARTS - 1:
            held = read_block(product, stage, (part + 1) // HALVES, FIRST)
            if part > 0:
                sums = wait_for(sums, 1, REST)
            left = operand_of(held, (part + 1) % HALVES, ELEMENT, product_of(TOKENS))
        elif not LAST:
            await_stage(product.pipeline, following, following_phase)
            held = read_block(product, following, 0, FIRST)
            if part > 0:
                sums = wait_for(sums, 1, REST)
            left = operand_of(held, 0, ELEMENT, product_of(TOKENS))
    sums = wait_for(sums, 0, REST)
    release_stage(product.pipeline, stage)
    return sums, left, following, following_phase


@gluon.jit
def compute_wide(product, part, stage, phase, TOKENS: gl.constexpr, REST: gl.constexpr):
    """Compute a consumer's part of a tile of at most TOKENS + REST rows, powers of two with separate products. REST may
    be 0."""
    stages, weights = product.tiles, product.weights
    FIRST: gl.constexpr = part.WHICH * (stages.PAIRS // 2)
    slots, buffer = stages.slots.index(part.place), stages.results.index(part.WHICH)
    sums = (gl.zeros([HEIGHT, TOKENS], gl.float32, product_of(TOKENS)),)
    if REST > 0:
        sums += (gl.zeros([HEIGHT, REST], gl.float32, product_of(REST)),)
    await_stage(product.pipeline, stage, phase)
    left = operand_of(read_block(product, stage, 0, FIRST), 0, product.scales.ELEMENT, product_of(TOKENS))
    for _ in range(stages.DEEP, product.scales.STEPS, stages.DEEP):
        sums, left, stage, phase = multiply_stage(sums, left, product, stage, phase, FIRST, TOKENS, REST, False)
    sums, left, stage, phase = multiply_stage(sums, left, product, stage, phase, FIRST, TOKENS, REST, True)
    biases = None
    if weights.bias is not None:
        biases = bias_of(weights, part.base, part.block, gl.SliceLayout(1, product_of(TOKENS)))
    finish(sums[0], biases, product, part, part.block, slots, buffer, 0)
    if REST > 0:
        if weights.bias is not None:
            biases = gl.convert_layout(biases, gl.SliceLayout(1, product_of(REST)), assert_trivial=True)
        finish(sums[1], biases, product, part, part.block, slots, buffer, TOKENS)
    return stage, phase
