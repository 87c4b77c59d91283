"""What producer and consumers of the Hopper matmul share: sizes, circular buffers, the ring that announces tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

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
def before(stage, STAGES: gl.constexpr):
    """The place before one in a circular buffer."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


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
