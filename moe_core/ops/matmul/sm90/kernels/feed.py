from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.matmul.sm90.kernels.pipeline import RING, advance, announce
from moe_core.ops.matmul.sm90.kernels.producer import load_steps, take_tile
from moe_core.ops.matmul.sm90.kernels.tail import adapters_of, load_tail
from moe_core.ops.matmul.sm90.kernels.tall_producer import load_steps as load_tall_steps
from moe_core.ops.matmul.sm90.kernels.tall_producer import take_tile as take_tall_tile


@gluon.jit
def producer(product):
    """Take, announce and load tiles until none is left.

    The rows of x of a tall tile replace a list at its slot of the ring that nobody reads: all warps have announced a
    tile since. For tall tiles, the last bias tile holds the biases of the next tile.
    Consumers of swapped tiles read biases themselves, and `biases` holds row weights.
    """
    tiles, pipeline, weights = product.tiles, product.pipeline, product.weights
    TALL: gl.constexpr = tiles.row_lists is not None
    BIASED: gl.constexpr = (tiles.biases is not None) and ((weights.bias is not None) or (weights.up_bias is not None))
    # Constants of the kernel: Triton 3.6 passes no function through `warp_specialize`.
    TAKE: gl.constexpr = take_tall_tile if TALL else take_tile
    LOAD: gl.constexpr = load_tall_steps if TALL else load_steps
    # The next tile takes a chain of dependent reads: take it while the first stages of this one load.
    STAGED: gl.constexpr = pipeline.STAGES * tiles.left.shape[2]
    LEAD: gl.constexpr = STAGED if STAGED < weights.D else weights.D
    layer_number, _ = layer_in_stack(weights.layer_index, weights.NUM_LAYERS)
    last_biases = tiles.biases.index(RING) if TALL and tiles.biases is not None else None
    stage, phase, place, ring_phase = 0, 0, 0, 0
    tile, upper, lower, biases = TAKE(
        product, layer_number, tiles.row_lists.index(place) if TALL else None, last_biases
    )
    while tile.expert > -2:
        group = layer_number * weights.NUM_EXPERTS + tile.expert
        sources = tiles.row_lists.index(place) if TALL else (upper, lower)
        if tile.expert >= 0:
            mbarrier.wait(pipeline.ring_empty.index(place), ring_phase ^ 1)
            if BIASED:
                if TALL:
                    kept = last_biases.load(gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
                    tiles.biases.index(place).store(kept)
                else:
                    tiles.biases.index(place).store(biases)
            if tiles.row_scales is not None:
                tiles.row_scales.index(place).store(biases)
            announce(pipeline, place, tile.expert, tile.start, tile.rows, tile.column)
            place, ring_phase = advance(place, ring_phase, RING)
            stage, phase = LOAD(product, sources, tile, group, stage, phase, 0, LEAD)
        next_tile, next_upper, next_lower, next_biases = TAKE(
            product, layer_number, tiles.row_lists.index(place) if TALL else None, last_biases
        )
        if tile.expert >= 0:
            if product.tail is not None:
                adapters = adapters_of(product, tile)
            stage, phase = LOAD(product, sources, tile, group, stage, phase, LEAD, weights.D)
            if product.tail is not None:
                stage, phase = load_tail(product, tile, adapters, stage, phase)
        tile, upper, lower, biases = next_tile, next_upper, next_lower, next_biases
    mbarrier.wait(pipeline.ring_empty.index(place), ring_phase ^ 1)
    announce(pipeline, place, -1, 0, 0, 0)
