"""Parts that producer and consumers of Hopper products share: sizes, circular buffers, the ring of tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from moe_core.ops.common.kernels.aggregates import Pipeline, Tile
from moe_core.ops.matmul.portable.kernel import rows_of_group, tile_of_program
from moe_core.ops.routing.kernels.schedule import spread_block

# Triton 3.9 renamed these.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
row_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

#: Rows of one consumer, and columns of one store.
ROWS = gl.constexpr(64)
PIECE = gl.constexpr(128)
#: Accumulator columns of a tile, and the part of the reduction in one stage.
WIDE = gl.constexpr(256)
DEPTH = gl.constexpr(64)
#: Tiles that may be announced ahead, and facts of each: expert, first row, rows, column tile.
RING = gl.constexpr(2)
FACTS = gl.constexpr(4)
PRODUCER_WARPS = gl.constexpr(4)
#: For tall row blocks: chunks of ROWS rows, columns of a panel of gate or up, room for rows of x.
CHUNKS = gl.constexpr(3)
PANEL = gl.constexpr(64)
ROOM = gl.constexpr(256)


# Triton 3.9 renamed it.
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def seen_as(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)

else:

    @gluon.jit
    def seen_as(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """Return the next index of a circular buffer and its parity."""
    following = stage + 1
    wrapped = following == STAGES
    return gl.where(wrapped, 0, following), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def halves(accumulator):
    """Return the first and the last 128 columns, without moves between threads."""
    first, last = gl.split(gl.permute(gl.reshape(accumulator, [ROWS, 2, PIECE]), [0, 2, 1]))
    return first, last


@gluon.jit
def write_number(memory, place, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    memory.index(place).store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def read_number(memory, place):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(memory.index(place).load(layout), axis=0)


@gluon.jit
def write_fact(pipeline, place, FACT: gl.constexpr, value):
    write_number(pipeline.ring, place * FACTS + FACT, value)


@gluon.jit
def read_fact(pipeline, place, FACT: gl.constexpr):
    return read_number(pipeline.ring, place * FACTS + FACT)


@gluon.jit
def announce(pipeline, place, expert, start, rows, column):
    write_fact(pipeline, place, 0, expert)
    write_fact(pipeline, place, 1, start)
    write_fact(pipeline, place, 2, rows)
    write_fact(pipeline, place, 3, column)
    barrier()
    mbarrier.arrive(pipeline.ring_full.index(place), count=1)


@gluon.jit
def read_facts(pipeline, place):
    expert, start = read_fact(pipeline, place, 0), read_fact(pipeline, place, 1)
    return expert, start, read_fact(pipeline, place, 2), read_fact(pipeline, place, 3)


@gluon.jit
def await_facts(pipeline, place, ring_phase):
    mbarrier.wait(pipeline.ring_full.index(place), ring_phase)
    return read_facts(pipeline, place)


@gluon.jit
def await_tile(pipeline, place, ring_phase):
    expert, start, rows, column = await_facts(pipeline, place, ring_phase)
    return Tile(expert, start, rows, column)


@gluon.jit
def release_tile(pipeline, place):
    barrier()
    mbarrier.arrive(pipeline.ring_empty.index(place), count=1)


@gluon.jit
def locate_tile(number, layout, schedule, TILES: gl.constexpr, HEIGHT: gl.constexpr):
    """Return (left, exists, expert, first row, rows and row blocks of the expert, row block, column tile) of a tile.

    left: there is a tile of this number. exists: it has rows, otherwise addresses are an expert's first. HEIGHT: rows
    of a row block. TILES: column tiles of a row block.
    """
    # Neighbouring tiles are the same columns of one expert, so blocks that start together read the same weights from
    # L2.
    within = number < schedule.num_blocks * TILES
    row = gl.where(within, number, 0) // TILES
    expert = gl.load(schedule.schedule + 2 * row.to(gl.int64) + 1)
    expert_block = gl.load(schedule.schedule + 2 * row.to(gl.int64))
    # Idle rows end a schedule: no tile follows the first one.
    left = within & (expert >= 0)
    start, size = rows_of_group(layout.group_sizes, layout.group_start, gl.maximum(expert, 0), layout.num_rows, "")
    blocks = gl.maximum((size + HEIGHT - 1) // HEIGHT, 1)
    # A group that starts too late has fewer rows than the schedule says.
    exists = left & (expert_block < blocks)
    place = number - (row - expert_block) * TILES
    block, column = tile_of_program(gl.where(exists, place, 0), blocks, TILES, schedule.GROUP_M)
    if schedule.SPREAD > 1:
        block = spread_block(block, blocks, schedule.SPREAD)
    return left, exists, expert, start, size, blocks, block, column


@gluon.jit
def await_stage(pipeline, stage, phase):
    mbarrier.wait(pipeline.full.index(stage), phase)
    if pipeline.COPIED:
        # cp.async writes through the generic proxy, and products read through the asynchronous one.
        fence_async_shared()


@gluon.jit
def release_stage(pipeline, stage):
    barrier()
    mbarrier.arrive(pipeline.empty.index(stage), count=1)


@gluon.jit
def release_previous_stage(pipeline, stage, exists=True):
    barrier()
    mbarrier.arrive(pipeline.empty.index(gl.where(stage == 0, pipeline.STAGES - 1, stage - 1)), count=1, pred=exists)


@gluon.jit
def skip_tile(pipeline, stage, phase, D: gl.constexpr, STEP: gl.constexpr):
    for _ in range(0, D, STEP):
        mbarrier.wait(pipeline.full.index(stage), phase)
        release_stage(pipeline, stage)
        stage, phase = advance(stage, phase, pipeline.STAGES)
    return stage, phase


@gluon.jit
def allocate_pipeline(STAGES: gl.constexpr, COPYING_WARPS: gl.constexpr, COPIED: gl.constexpr):
    """A stage is full when the announced bytes are there and every thread of COPYING_WARPS has copied its part."""
    ring = gl.allocate_shared_memory(gl.int32, [RING * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * COPYING_WARPS)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(RING):
        mbarrier.init(ring_full.index(i), count=1)
        mbarrier.init(ring_empty.index(i), count=2)
    fence_async_shared()
    barrier()
    return Pipeline(ring, full, empty, ring_full, ring_empty, STAGES, COPIED)
