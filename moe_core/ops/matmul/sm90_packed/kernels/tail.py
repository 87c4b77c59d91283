"""Low-rank tails of products with prepacked weights."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import HEIGHT
from moe_core.ops.matmul.sm90_packed.kernels.epilogue import matrix_rows
from moe_core.ops.matmul.sm90_packed.kernels.low_rank import COLUMNS, SUMS, add_where, factor_step, facts_of, steps_of


@gluon.jit
def add_parts(sums, factor, wild, tail, start, present, step):
    """`add_where`, in parts of 32 tokens."""
    HALF: gl.constexpr = sums.shape[1] // 2
    if sums.shape[1] > 32:
        left, right = gl.split(gl.permute(gl.reshape(sums, [HEIGHT, 2, HALF]), [0, 2, 1]))
        left = gl.convert_layout(left, SUMS, assert_trivial=True)
        right = gl.convert_layout(right, SUMS, assert_trivial=True)
        left = add_parts(left, factor, wild, tail, start, present, step)
        right = add_parts(right, factor, wild, tail, start + HALF, present, step)
        both = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [HEIGHT, 2 * HALF])
        return gl.convert_layout(both, SUMS, assert_trivial=True)
    else:
        return add_where(sums, factor, wild, tail, start, present, step)


@gluon.jit
def add_tail(sums, block, expert, start, rows, present, weights, tail):
    """Return sums [64, tokens] of weight rows of `block`, continued by the adapters of its `rows` rows from row `start`
    on, adapters and ranks ascending. present: of these rows."""
    LAYOUT: gl.constexpr = sums.type.layout
    columns, exist = matrix_rows(block, weights.N, weights.GATE_LAYOUT, COLUMNS)
    # Halves of a wide wgmma's sums have no layout of their own.
    sums = gl.convert_layout(sums, SUMS, assert_trivial=True)
    last = present.last
    for adapter in range(present.adapter, last):
        following = facts_of(tail, expert, adapter + 1, last, "")
        for step in range(0, steps_of(tail, present, start, rows), tail.BLOCK_R):
            factor, wild = factor_step(tail, present, expert, columns, exist, step)
            sums = add_parts(sums, factor, wild, tail, start, present, step)
        present = following
    return gl.convert_layout(sums, LAYOUT, assert_trivial=True)
