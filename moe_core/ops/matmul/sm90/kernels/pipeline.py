"""What producer and consumers of the Hopper matmul share: sizes, circular buffers, the ring that announces tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from moe_core.ops.matmul.portable.kernel import rows_of_group, tile_of_program
from moe_core.ops.routing.kernels.schedule import spread_block

# Triton 3.9 renamed these.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
row_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

#: Rows of one consumer, and columns that one store takes.
ROWS = gl.constexpr(64)
PIECE = gl.constexpr(128)
#: Accumulator columns of a tile, and the part of the reduction that one stage holds.
WIDE = gl.constexpr(256)
DEPTH = gl.constexpr(64)
#: Tiles the producer may announce ahead of the consumers, and the facts of each: expert, first row, rows, column tile.
RING = gl.constexpr(2)
FACTS = gl.constexpr(4)
PRODUCER_WARPS = gl.constexpr(4)
#: Of tall row blocks: chunks of ROWS rows, columns of gate and of up that take turns, places for rows of x.
CHUNKS = gl.constexpr(3)
PANEL = gl.constexpr(64)
ROOM = gl.constexpr(256)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next place of a circular buffer and its parity."""
    following = stage + 1
    wrapped = following == STAGES
    return gl.where(wrapped, 0, following), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def write_fact(ring, place, FACT: gl.constexpr, value):
    """Put one of FACTS facts of a tile into its place of the ring."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ring.index(place * FACTS + FACT).store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def read_fact(ring, place, FACT: gl.constexpr):
    """What `write_fact` put there, as a scalar."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(ring.index(place * FACTS + FACT).load(layout), axis=0)


@gluon.jit
def announce(ring, ring_full, place, expert, start, rows, tile):
    """Give the consumers a tile; expert -1: none is left."""
    write_fact(ring, place, 0, expert)
    write_fact(ring, place, 1, start)
    write_fact(ring, place, 2, rows)
    write_fact(ring, place, 3, tile)
    barrier()
    mbarrier.arrive(ring_full.index(place), count=1)


@gluon.jit
def locate_tile(
    number, group_sizes, group_start, schedule, num_blocks, num_rows, TILES: gl.constexpr, HEIGHT: gl.constexpr,
    GROUP_M: gl.constexpr, SPREAD: gl.constexpr = 1,
):  # fmt: skip
    """(whether there is a tile with that number, whether it is in use, expert, its first row, its rows, its blocks of
    HEIGHT rows, row block, column tile).

    What is not in use is the first tile of an expert, whose addresses exist. SPREAD: sections of an expert whose blocks
    take turns.
    """
    # An expert's blocks follow each other in the schedule. Neighbouring tiles are the same columns of one expert, so
    # that blocks which start together read the same weights while those are in the L2 cache.
    within = number < num_blocks * TILES
    row = gl.where(within, number, 0) // TILES
    expert = gl.load(schedule + 2 * row.to(gl.int64) + 1)
    expert_block = gl.load(schedule + 2 * row.to(gl.int64))
    # Idle rows are a schedule's last ones: behind the first of them there is no tile.
    left = within & (expert >= 0)
    start, size = rows_of_group(group_sizes, group_start, gl.maximum(expert, 0), num_rows, "")
    blocks = gl.maximum((size + HEIGHT - 1) // HEIGHT, 1)
    # What a group that starts too late lacks rows for has no tile.
    exists = left & (expert_block < blocks)
    place = number - (row - expert_block) * TILES
    block, tile = tile_of_program(gl.where(exists, place, 0), blocks, TILES, GROUP_M)
    if SPREAD > 1:
        block = spread_block(block, blocks, SPREAD)
    return left, exists, expert, start, size, blocks, block, tile


@gluon.jit
def await_tile(ring, ring_full, place, ring_phase):
    """The facts of the next tile, once it is announced: expert, first row, rows, column tile."""
    mbarrier.wait(ring_full.index(place), ring_phase)
    return read_fact(ring, place, 0), read_fact(ring, place, 1), read_fact(ring, place, 2), read_fact(ring, place, 3)


@gluon.jit
def await_stage(full, stage, phase, GATHER: gl.constexpr):
    """Wait until a stage is loaded."""
    mbarrier.wait(full.index(stage), phase)
    if GATHER != "row":
        # Rows came through the generic proxy (cp.async), the product reads through the asynchronous one.
        fence_async_shared()


@gluon.jit
def hand_back(empty, place):
    """Give the producer a stage, or a place of the ring, that this consumer has read."""
    barrier()
    mbarrier.arrive(empty.index(place), count=1)


@gluon.jit
def hand_back_before(empty, stage, STAGES: gl.constexpr):
    """`hand_back` of the stage before one."""
    barrier()
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)


@gluon.jit
def skip_tile(full, empty, stage, phase, D: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    """Of a tile without rows for this consumer: only hand the stages back."""
    for _ in range(0, D, STEP):
        mbarrier.wait(full.index(stage), phase)
        hand_back(empty, stage)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def allocate_pipeline(STAGES: gl.constexpr, COPYING_WARPS: gl.constexpr):
    """(ring, full, empty, ring_full, ring_empty) of a producer and two consumers.

    A stage is full when the announced bytes are there and every thread of COPYING_WARPS has copied its own.
    """
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
    return ring, full, empty, ring_full, ring_empty
