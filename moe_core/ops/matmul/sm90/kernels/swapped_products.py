"""Products of swapped operands: weight columns are wgmma's 64-high side, rows of x its N, in steps of 8.

Triton's tensors have powers of two, so `wgmma m64 n(8 i) k16` is written as PTX. Its sums are PIECES tensors of 64
weight columns x PART rows for each of two left operands. A height that is no multiple of PART uses the first registers
of its last tensor.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.ops.matmul.sm90.kernels.pipeline import advance, await_stage, release_previous_stage

#: Rows of one tensor of sums, and the most of them in a row block.
PART = gl.constexpr(32)
PIECES = gl.constexpr(5)
#: Weight columns of a left operand, and its bytes in a stage.
LEFT = gl.constexpr(64)
LEFT_BYTES = gl.constexpr(8192)
#: Registers of a thread for one tensor of sums.
REGISTERS = gl.constexpr(16)


@triton.constexpr_function
def heights(kind):
    """Heights with a loop of their own: exact from 96 rows on, below in steps of 32, where loads of weights bind, as in
    last tiles of at most two blocks."""
    return (32, 64, 96, 128, 160) if kind == "one" else (32, 64, 96, 104, 112, 120, 128, 136, 144, 152, 160)


@triton.constexpr_function
def float_types(count):
    return (gl.float32,) * count


@triton.constexpr_function
def left_operands(which, kind):
    """Return which of a tile's four blocks of 64 weight columns a consumer multiplies: `apart` has one of the first and
    one of the last half, `adjacent` has neighbours, `one` is for a last tile of at most two blocks."""
    return {"apart": (which, 2 + which), "adjacent": (2 * which, 2 * which + 1), "one": (which,)}[kind]


@triton.constexpr_function
def product_text(element, height, blocks, in_out, stages):
    """Return (PTX, constraints) of one stage: 4 steps of 16 for each of `blocks`, the left operands.

    Operands: sums in and out, then 2 * stage + (1 for the first stage of a tile: its products start from zero).
    Weights come first in shared memory and rows follow, both in 128-byte swizzles with 1024 bytes between groups of 8
    (PTX ISA, matrix descriptor). At most one group of products is under way at the end.
    """
    pieces, left_bytes = PIECES.value, LEFT_BYTES.value
    registers = REGISTERS.value * pieces * len(blocks)
    right_base, step = 4 * left_bytes * stages, 2048 if in_out else 32
    lines = [
        "{ .reg .b32 base, stage, flag, low; .reg .b64 left, right, here, there, high; .reg .pred more, always;",
        f"and.b32 flag, ${2 * registers}, 1; shr.u32 stage, ${2 * registers}, 1; mov.u32 base, global_smem;",
        "setp.eq.u32 more, flag, 0; setp.eq.u32 always, 0, 0; mov.b64 high, 0x4000004000000000;",
    ]
    for name, pitch, offset in (("left", 4 * left_bytes, 0), ("right", 128 * PART.value * pieces, right_base)):
        lines.append(f"mad.lo.u32 low, stage, {pitch}, base; add.u32 low, low, {offset}; shr.u32 low, low, 4;")
        lines.append(f"and.b32 low, low, 0x3FFF; cvt.u64.u32 {name}, low; or.b64 {name}, {name}, high;")
    lines.append("wgmma.fence.sync.aligned;")
    for k in range(4):
        lines.append(f"add.s64 there, right, {2 * k};")
        for number, block in enumerate(blocks):
            first = registers // len(blocks) * number
            sums = ",".join(f"${first + index}" for index in range(height // 2))
            lines.append(f"add.s64 here, left, {(left_bytes * block + step * k) // 16};")
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{height}k16.f32.{element}.{element} {{{sums}}}, here, there,"
            )
            lines.append(f"{'more' if k == 0 else 'always'}, 1, 1, {int(in_out)}, 0;")
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; }")
    constraints = ["=f"] * registers + [str(index) for index in range(registers)] + ["r"] * REGISTERS.value
    return " ".join(lines), ",".join(constraints)


@triton.constexpr_function
def wait_text(count):
    registers = REGISTERS.value * count
    return "wgmma.wait_group.sync.aligned 0;", ",".join(["=f"] * registers + [str(i) for i in range(registers)])


@triton.constexpr_function
def element_name(dtype):
    return {gl.bfloat16: "bf16", gl.float16: "f16"}[dtype]


@gluon.jit
def multiply_stage(
    tiles, stage, first, sums, WHICH: gl.constexpr, KIND: gl.constexpr, HEIGHT: gl.constexpr, IN_OUT: gl.constexpr
):
    """Start the products of a stage and wait for the previous stage's. first: this stage begins a tile."""
    STAGES: gl.constexpr = tiles.left.shape[0] // PIECES
    BLOCKS: gl.constexpr = left_operands(WHICH, KIND)
    TEXT: gl.constexpr = product_text(element_name(tiles.left.dtype), HEIGHT, BLOCKS, IN_OUT, STAGES)
    TYPES: gl.constexpr = float_types(len(sums))
    code = gl.full([LEFT, PART], 0, gl.int32, sums[0].type.layout) + (2 * stage + gl.where(first, 1, 0))
    operands = sums + (code,)  # noqa: RUF005, Triton's tuples have no unpacking
    return gl.inline_asm_elementwise(TEXT[0], TEXT[1], operands, TYPES, False, REGISTERS)


@gluon.jit
def await_products(sums):
    TEXT: gl.constexpr = wait_text(len(sums))
    TYPES: gl.constexpr = float_types(len(sums))
    return gl.inline_asm_elementwise(TEXT[0], TEXT[1], sums, TYPES, False, REGISTERS)


@gluon.jit
def multiply_height(product, stage, phase, sums, WHICH: gl.constexpr, KIND: gl.constexpr, HEIGHT: gl.constexpr):
    """Multiply all stages of a tile of at most HEIGHT rows."""
    weights, pipeline = product.weights, product.pipeline
    STEP: gl.constexpr = product.tiles.left.shape[2]
    for k in range(0, weights.D, STEP):
        await_stage(pipeline, stage, phase)
        sums = multiply_stage(product.tiles, stage, k == 0, sums, WHICH, KIND, HEIGHT, weights.IN_OUT)
        # No branch: the compiler would peel an iteration off every loop.
        release_previous_stage(pipeline, stage, k > 0)
        stage, phase = advance(stage, phase, pipeline.STAGES)
    sums = await_products(sums)
    release_previous_stage(pipeline, stage)
    return stage, phase, sums


@gluon.jit
def multiply_tile(product, tile, stage, phase, sums, WHICH: gl.constexpr, KIND: gl.constexpr):
    """Multiply a tile by the loop of the least height that has its rows."""
    HEIGHTS: gl.constexpr = heights(KIND)
    for index in gl.static_range(len(HEIGHTS)):
        if (tile.rows <= HEIGHTS[index]) & (tile.rows > (HEIGHTS[index - 1] if index > 0 else 0)):
            stage, phase, sums = multiply_height(product, stage, phase, sums, WHICH, KIND, HEIGHTS[index])
    return stage, phase, sums
