"""Low-rank tails of Hopper products: stages of adapters' ranks behind those of the reduction.

for each adapter with rows in the tile, for each 32 of its ranks, at least once:
    the producer writes low (zeros in other rows) and the factor into a free stage
    the consumers multiply it in steps of 16, into the same sums
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_core.ops.matmul.sm90.kernels.pipeline import (
    PIECE,
    ROWS,
    WIDE,
    advance,
    await_stage,
    barrier,
    halves,
    read_number,
    release_stage,
    seen_as,
    write_number,
)

#: Ranks of a product, and products of a stage. The other half of its rows' memory holds flags and facts.
RANKS = gl.constexpr(16)
STEPS = gl.constexpr(2)
#: Where flags and facts begin, in int32: an adapter's first row and end, steps, any flag, stages that follow.
FLAGS = gl.constexpr(1024)
TAIL_FACTS = gl.constexpr(1280)


@gluon.jit
def stage_of_low(tiles, number):
    """Return both steps' low `[64, 16]`, of a consumer's part of a stage."""
    layout: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    return seen_as(tiles.left.index(number), tiles.left.dtype, [2 * STEPS, ROWS, RANKS], layout)


@gluon.jit
def stage_of_factor(tiles, stage):
    """Return both steps' factor `[16, 256]`."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return seen_as(tiles.right.index(stage), tiles.right.dtype, [2 * STEPS, RANKS, WIDE], layout)


@gluon.jit
def flags_of(tiles, stage):
    """Return int32 `[256]`: which columns have inf or NaN."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return seen_as(tiles.left.index(2 * stage), gl.int32, [2 * FLAGS // WIDE, WIDE], plain).index(FLAGS // WIDE)


@gluon.jit
def facts_of(tiles, stage):
    """Return int32 `[2048, 1]`, with the facts from TAIL_FACTS on."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return seen_as(tiles.left.index(2 * stage), gl.int32, [2 * FLAGS, 1], plain)


@gluon.jit
def low_tile(tail, tile, step, first, end, FIRST: gl.constexpr):
    """Return 16 ranks of 64 rows, zeros in rows of others."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [gl.num_warps(), 1], [1, 0])
    rows = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    ranks = step * RANKS + gl.arange(0, RANKS, gl.SliceLayout(0, layout))
    mine = (rows >= first) & (rows < end) & (rows < tile.rows)
    pointers = tail.low + (tile.start.to(gl.int64) + rows)[:, None] * tail.RANK + ranks[None, :]
    return gl.load(pointers, mask=mine[:, None] & (ranks < tail.RANK)[None, :], other=0.0)


@gluon.jit
def factor_tile(weights, tail, tile, adapter, step, rank):
    """Return 16 ranks of a tile's columns."""
    ALONG: gl.constexpr = tail.R_STRIDE == 1
    layout: gl.constexpr = (
        gl.BlockedLayout([8, 1], [2, 16], [1, gl.num_warps()], [0, 1])
        if ALONG
        else gl.BlockedLayout([1, 8], [4, 8], [1, gl.num_warps()], [1, 0])
    )
    within = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    if (weights.GATE_LAYOUT == "halves") or (weights.GATE_LAYOUT == "separate"):
        columns = gl.max_contiguous(gl.multiple_of(tile.column * PIECE + within % PIECE, 8), 8)
        inside = columns < weights.N
        columns += gl.where(within >= PIECE, weights.N, 0)
    else:
        columns = tile.column * WIDE + within
        inside = columns < weights.WEIGHT_N
    # Groups of 8 neighbours, so that reads stay whole.
    columns = gl.max_contiguous(gl.multiple_of(columns, 8), 8)
    ranks = step * RANKS + gl.arange(0, RANKS, gl.SliceLayout(1, layout))
    matrix = tail.factor + adapter.to(gl.int64) * tail.SLOT_STRIDE + tile.expert.to(gl.int64) * tail.EXPERT_STRIDE
    pointers = matrix + ranks[:, None] * tail.R_STRIDE + columns[None, :] * tail.N_STRIDE
    # The used ranks of reads along ranks are no constant, which would split them.
    inside = (ranks < (tail.RANK if ALONG else rank))[:, None] & inside[None, :]
    return gl.load(pointers, mask=inside, other=0.0)


@gluon.jit
def write_step(tiles, stage, part, upper, lower, factor, rank):
    """Write a step, with zeros from its rank on. Return flags of columns with inf or NaN, where zeros are written."""
    stage_of_low(tiles, 2 * stage).index(part).store(upper)
    stage_of_low(tiles, 2 * stage + 1).index(part).store(lower)
    target = stage_of_factor(tiles, stage).index(part)
    ranks = gl.arange(0, RANKS, gl.SliceLayout(1, factor.type.layout))
    values = gl.where((ranks < rank)[:, None], factor.to(target.dtype).to(gl.float32), 0.0)
    # Rows of others multiply by zero, which would make NaN of either.
    flags = values * 0.0 != 0.0
    target.store(gl.where(flags, 0.0, values).to(target.dtype))
    columns: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    return gl.convert_layout(gl.max(flags.to(gl.int32), axis=0), columns)


@gluon.jit
def adapters_of(product, tile):
    """Return (numbers, first rows, ends, ranks, steps) of adapters, without steps where none of the tile's rows are."""
    tail = product.tail
    COUNT: gl.constexpr = 32 if tail.SLOTS <= 32 else 128
    layout: gl.constexpr = gl.BlockedLayout([COUNT // 32], [32], [gl.num_warps()], [0])
    which = gl.arange(0, COUNT, layout)
    exists = which < tail.SLOTS
    groups = tail.start + tile.expert * (tail.SLOTS + 1) + 1 + which
    firsts = gl.load(groups, mask=exists, other=0) - tile.start
    ends = gl.load(groups + 1, mask=exists, other=0) - tile.start
    ranks = gl.load(tail.ranks + which * tail.NUM_EXPERTS + tile.expert, mask=exists, other=0)
    ranks = gl.minimum(gl.maximum(ranks, 0), tail.RANK)
    touched = (firsts < tile.rows) & (ends > 0) & (ends > firsts)
    return which, firsts, ends, ranks, gl.where(touched, (ranks + RANKS - 1) // RANKS, 0)


@gluon.jit
def load_tail(product, tile, adapters, stage, phase):
    """Write the stages of a tile's adapters, ascending."""
    tail, tiles, pipeline = product.tail, product.tiles, product.pipeline
    # Both steps of a stage are read at once where registers have room.
    NARROW: gl.constexpr = tail.factor.dtype.element_ty.primitive_bitwidth == 16
    TOGETHER: gl.constexpr = STEPS if NARROW and tail.R_STRIDE != 1 else 1
    which, firsts, ends, ranks, counts = adapters
    stages = gl.maximum(gl.sum((counts + STEPS - 1) // STEPS, axis=0), 1)
    adapter, done, count = stages * 0 - 1, stages * 0, stages * 0
    for number in range(stages):
        following = gl.min(gl.where((which > adapter) & (counts > 0), which, which.shape[0]), axis=0)
        adapter = gl.where(done < count, adapter, following)
        done = gl.where(done < count, done, 0)
        chosen = which == adapter
        count = gl.sum(gl.where(chosen, counts, 0), axis=0)
        first, end = gl.sum(gl.where(chosen, firsts, 0), axis=0), gl.sum(gl.where(chosen, ends, 0), axis=0)
        rank = gl.sum(gl.where(chosen, ranks, 0), axis=0)
        steps = gl.minimum(count - done, STEPS)
        flags = gl.zeros([WIDE], gl.int32, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
        for part in range(0, steps, TOGETHER):
            step = done + part
            # All reads before the first write: one latency.
            upper = low_tile(tail, tile, step, first, end, 0)
            lower = low_tile(tail, tile, step, first, end, ROWS)
            factor = factor_tile(product.weights, tail, tile, adapter, step, rank)
            if TOGETHER == 2:
                next_upper = low_tile(tail, tile, step + 1, first, end, 0)
                next_lower = low_tile(tail, tile, step + 1, first, end, ROWS)
                next_factor = factor_tile(product.weights, tail, tile, adapter, step + 1, rank)
            mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)
            flags = gl.maximum(flags, write_step(tiles, stage, part, upper, lower, factor, rank - step * RANKS))
            if TOGETHER == 2:
                used = rank - (step + 1) * RANKS
                more = write_step(tiles, stage, part + 1, next_upper, next_lower, next_factor, used)
                flags = gl.maximum(flags, more)
        mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)
        flags_of(tiles, stage).store(flags)
        facts = facts_of(tiles, stage)
        write_number(facts, TAIL_FACTS, first)
        write_number(facts, TAIL_FACTS + 1, end)
        write_number(facts, TAIL_FACTS + 2, steps)
        write_number(facts, TAIL_FACTS + 3, gl.max(flags, axis=0))
        write_number(facts, TAIL_FACTS + 4, stages - 1 - number)
        fence_async_shared()
        barrier()
        mbarrier.arrive(pipeline.full.index(stage), count=1 + 32 * gl.num_warps() if pipeline.COPIED else 1)
        done += steps
        stage, phase = advance(stage, phase, pipeline.STAGES)
    return stage, phase


@gluon.jit
def spoil(values, tiles, stage, FIRST: gl.constexpr, COLUMN: gl.constexpr):
    """Make NaN of an adapter's rows in flagged columns."""
    layout: gl.constexpr = values.type.layout
    rows = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    mine = (rows >= read_number(facts_of(tiles, stage), TAIL_FACTS)) & (
        rows < read_number(facts_of(tiles, stage), TAIL_FACTS + 1)
    )
    flags = flags_of(tiles, stage).slice(COLUMN, PIECE).load(gl.SliceLayout(0, layout))
    return gl.where(mine[:, None] & (flags > 0)[None, :], float("nan"), values)


@gluon.jit
def multiply_tail(product, stage, phase, accumulator, WHICH: gl.constexpr):
    """Multiply and release the stages of a tile's adapters."""
    tiles, pipeline = product.tiles, product.pipeline
    sums: gl.constexpr = accumulator.type.layout
    more = stage * 0 + 1
    while more > 0:
        await_stage(pipeline, stage, phase)
        low, factor = stage_of_low(tiles, 2 * stage + WHICH), stage_of_factor(tiles, stage)
        for step in range(read_number(facts_of(tiles, stage), TAIL_FACTS + 2)):
            accumulator = warpgroup_mma(low.index(step), factor.index(step), accumulator, is_async=True)
            accumulator = warpgroup_mma_wait(num_outstanding=0, deps=[accumulator])
        if read_number(facts_of(tiles, stage), TAIL_FACTS + 3) > 0:
            left, right = halves(accumulator)
            left = spoil(left, tiles, stage, WHICH * ROWS, 0)
            right = spoil(right, tiles, stage, WHICH * ROWS, PIECE)
            joined = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [ROWS, WIDE])
            accumulator = gl.convert_layout(joined, sums)
        more = read_number(facts_of(tiles, stage), TAIL_FACTS + 4)
        release_stage(pipeline, stage)
        stage, phase = advance(stage, phase, pipeline.STAGES)
    return stage, phase, accumulator


@gluon.jit
def skip_tail(product, stage, phase):
    tiles, pipeline = product.tiles, product.pipeline
    more = stage * 0 + 1
    while more > 0:
        await_stage(pipeline, stage, phase)
        more = read_number(facts_of(tiles, stage), TAIL_FACTS + 4)
        release_stage(pipeline, stage)
        stage, phase = advance(stage, phase, pipeline.STAGES)
    return stage, phase
