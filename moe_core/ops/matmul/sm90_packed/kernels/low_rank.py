"""Low-rank tails of Hopper products with weights on the left: further steps, of mma.sync, read from memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moe_core.ops.common.kernels.aggregates import aggregate_of

#: mma.sync of 64 weight columns: its sums lie as wgmma's. How threads hold its left operand, and numbers of columns.
SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
FACTOR = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
COLUMNS = gl.constexpr(gl.SliceLayout(1, gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2)))

#: Adapters of an expert with rows in a tile: the next one's number, first row, end of rows and rank, and the last + 1.
Present = aggregate_of("Present", "adapter first end rank last")


@gluon.jit
def facts_of(tail, expert, adapter, last, CACHE: gl.constexpr):
    adapter_read = gl.minimum(adapter, tail.SLOTS - 1)
    group = tail.start + expert * (tail.SLOTS + 1) + 1 + adapter_read
    first, end = gl.load(group, cache_modifier=CACHE), gl.load(group + 1, cache_modifier=CACHE)
    rank = gl.load(tail.ranks + adapter_read * tail.NUM_EXPERTS + expert, cache_modifier=CACHE)
    return Present(adapter, first, end, gl.minimum(rank, tail.RANK), last)


@gluon.jit
def present_adapters(tail, expert, start, rows, CACHE: gl.constexpr):
    """Return what adapters have some of an expert's `rows` rows from row `start` on."""
    begin, last = expert * 0, expert * 0 + 1
    if tail.SLOTS > 1:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        last = begin
        for chunk in range(0, tail.SLOTS, 32):
            which = chunk + gl.arange(0, 32, layout)
            starts = tail.start + expert * (tail.SLOTS + 1) + 1 + which
            exist = which < tail.SLOTS
            ahead = gl.load(starts + 1, mask=exist, other=2147483647, cache_modifier=CACHE) <= start
            begun = gl.load(starts, mask=exist, other=2147483647, cache_modifier=CACHE) < start + rows
            begin += gl.sum(ahead.to(gl.int32), axis=0)
            last += gl.sum(begun.to(gl.int32), axis=0)
    return facts_of(tail, expert, begin, last, CACHE)


@gluon.jit
def prefetch(pointers, exist, LEVEL: gl.constexpr):
    text: gl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global." + LEVEL + " [$1]; mov.b32 $0, 0; }"
    gl.inline_asm_elementwise(text, "=r,l,r", [pointers.to(gl.int64), exist.to(gl.int32)], gl.int32, False, 1)


@gluon.jit
def prefetch_factor(tail, weights, present, expert, column, NUMBER: gl.constexpr, LEVEL: gl.constexpr):
    """Fetch an adapter's factor of NUMBER columns from `column` on (up to 256; of gate and up, if they are apart, up to
    128), if columns are neighbours."""
    if tail.N_STRIDE == 1:
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [gl.num_warps(), 1], [1, 0])
        piece = gl.arange(0, 8, gl.SliceLayout(0, layout))
        if (weights.GATE_LAYOUT == "halves") or (weights.GATE_LAYOUT == "separate"):
            within, column = piece % 4 * 32, column + piece % 4 * 32
            exist, column = (within < NUMBER) & (column < weights.N), column + piece // 4 * weights.N
        else:
            within, column = piece * 32, column + piece * 32
            exist = (within < NUMBER) & (column < weights.WEIGHT_N)
        matrix = tail.factor + present.adapter.to(gl.int64) * tail.SLOT_STRIDE
        matrix += expert.to(gl.int64) * tail.EXPERT_STRIDE
        for step in range(0, gl.where(present.adapter < present.last, present.rank, 0), 16):
            ranks = step + gl.arange(0, 16, gl.SliceLayout(1, layout))
            mask = (ranks < present.rank)[:, None] & exist[None, :]
            prefetch(matrix + ranks[:, None] * tail.R_STRIDE + column[None, :], mask, LEVEL)


@gluon.jit
def prefetch_tail(product, tile, column, NUMBER: gl.constexpr):
    """Fetch into the L1 cache what the tail of a tile reads."""
    tail = product.tail
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    elements = tile.rows * tail.RANK
    low = tail.low + tile.start.to(gl.int64) * tail.RANK
    for first in range(0, elements, 4096):
        place = first + gl.arange(0, 64, layout) * 64
        prefetch(low + place, place < elements, "L1")
    present = present_adapters(tail, tile.expert, tile.start, tile.rows, "")
    last = present.last
    for adapter in range(present.adapter, last):
        present = facts_of(tail, tile.expert, adapter, last, "")
        prefetch_factor(tail, product.weights, present, tile.expert, column, NUMBER, "L1")


@gluon.jit
def factor_step(tail, present, expert, columns, exist, step):
    """Return BLOCK_R ranks of 64 weight columns (`COLUMNS`), zeros from the adapter's rank on and for what is no finite
    number, and which columns have such."""
    ranks = step + gl.arange(0, tail.BLOCK_R, gl.SliceLayout(0, FACTOR))
    matrix = tail.factor + present.adapter.to(gl.int64) * tail.SLOT_STRIDE + expert.to(gl.int64) * tail.EXPERT_STRIDE
    pointers = matrix + (columns[:, None] * tail.N_STRIDE + ranks[None, :] * tail.R_STRIDE)
    factor = gl.load(pointers, mask=exist[:, None] & (ranks < present.rank)[None, :], other=0.0)
    factor = factor.to(tail.low.dtype.element_ty)
    wild = factor.to(gl.float32) * 0.0 != 0.0
    return gl.where(wild, 0.0, factor), gl.convert_layout(gl.max(wild.to(gl.int32), axis=1), gl.SliceLayout(1, SUMS))


@gluon.jit
def add_step(sums, factor, wild, tail, start, present, step):
    """Add a step to sums [64, rows from `start` on] of an adapter's rows, where columns in `wild` of its factor
    become NaN. Others multiply by zero."""
    TOKENS: gl.constexpr = sums.shape[1]
    layout: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    # Offsets from a scalar start: pointers would take two registers each.
    low, first, end = tail.low + start.to(gl.int64) * tail.RANK + step, present.first - start, present.end - start
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    places = token[None, :] * tail.RANK + gl.arange(0, tail.BLOCK_R, gl.SliceLayout(1, layout))[:, None]
    low = gl.load(low + places, mask=((token >= first) & (token < end))[None, :], other=0.0)
    sums = mma_v2(factor, low, sums)
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, SUMS))
    return gl.where(((token >= first) & (token < end))[None, :] & (wild > 0)[:, None], float("nan"), sums)


@gluon.jit
def add_where(sums, factor, wild, tail, start, present, step):
    """`add_step`, of several adapters in parts of a tile only where there are rows of this one."""
    # A tile of 8 rows is one part, where `steps_of` says it.
    if (tail.SLOTS == 1) or (sums.shape[1] <= 8):
        return add_step(sums, factor, wild, tail, start, present, step)
    else:
        if (start < present.end) & (start + sums.shape[1] > present.first):
            sums = add_step(sums, factor, wild, tail, start, present, step)
        return sums


@gluon.jit
def steps_of(tail, present, start, rows):
    """Return the ranks of an adapter's steps, 0 if a tile has none of its rows."""
    return gl.where((present.first < present.end) & (present.first < start + rows), present.rank, 0)
