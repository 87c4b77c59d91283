"""What becomes of the sums of a block of 64 tiled weight rows (`moe_core.formats.tiling`), whichever kernel made them.

The sums of a warp are by turns of 8 weight rows from the one side of the block and 8 from the other, so that a thread
has gate and up of the same output column.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.kernels.activation import activate, activate_gated
from moe_core.kernels.decode_words import HEIGHT, UNIT


@gluon.jit
def bias_of(bias, base, block, N: gl.constexpr, GATE_LAYOUT: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 biases of 64 accumulator rows: by turns 8 of the one half of the block and 8 of the other."""
    place = gl.arange(0, HEIGHT, LAYOUT)
    side = place // 8 % 2
    within = place // 16 * 8 + place % 8
    column = block * HEIGHT + side * UNIT + within if GATE_LAYOUT is None else block * UNIT + within
    row = column
    if GATE_LAYOUT == "interleaved":
        row = 2 * column + side
    elif GATE_LAYOUT == "halves":
        row = column + side * N
    return gl.load(bias + base + row, mask=column < N, other=0.0).to(gl.float32)


@gluon.jit
def activated(
    accumulator, GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr
):  # fmt: skip
    """Output columns in order, after the activation, of [64 accumulator rows, tokens]: 32 of a gated product."""
    TOKENS: gl.constexpr = accumulator.shape[1]
    values = gl.reshape(accumulator, [4, 2, 8, TOKENS])
    if GATE_LAYOUT is not None:
        gate, up = gl.split(gl.permute(values, [0, 2, 3, 1]))
        gate, up = gl.reshape(gate, [UNIT, TOKENS]), gl.reshape(up, [UNIT, TOKENS])
        result = activate_gated(gate, up, ACTIVATION, ALPHA, LIMIT)
    else:
        result = gl.reshape(gl.permute(values, [1, 0, 2, 3]), [HEIGHT, TOKENS])
        if ACTIVATION is not None:
            result = activate(result, ACTIVATION)
    return result
