"""The warps that feed consumers with low or tall row blocks: tile by tile, announced, then loaded step by step."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.matmul.sm90.kernels.pipeline import DEPTH, RING, advance, announce
from moe_core.ops.matmul.sm90.kernels.producer import load_steps, take_tile
from moe_core.ops.matmul.sm90.kernels.tall_producer import load_steps as load_tall_steps
from moe_core.ops.matmul.sm90.kernels.tall_producer import take_tile as take_tall_tile


@gluon.jit
def producer(
    x, x_map, weight_map, up_map, bias, up_bias, layer_index, group_sizes,
    group_start, slot_of_row, schedule, counters, a_tiles, w_tiles, bias_tiles, row_lists, ring, full, empty, ring_full,
    ring_empty, num_blocks, num_rows, num_slots,
    D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr, NUM_EXPERTS: gl.constexpr, NUM_LAYERS: gl.constexpr,
    X_STRIDE: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr, UP_BIAS_LAYER_STRIDE: gl.constexpr, TOP_K: gl.constexpr,
    GATHER: gl.constexpr, GATE_LAYOUT: gl.constexpr, IN_OUT: gl.constexpr, COUNTER: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, STEP: gl.constexpr = DEPTH, SPREAD: gl.constexpr = 1,
):  # fmt: skip
    """STEP: elements of a row in a stage, of 128 bytes. SPREAD: sections of an expert whose row blocks take turns.

    row_lists, None but of tall row blocks: a tile's is that of its place in the ring. The list it replaces is read no
    more: all warps have since announced the tile between. The last of their bias tiles holds the next tile's.
    """
    # Constants of the kernel: Triton 3.6 passes no function through `warp_specialize`.
    TAKE: gl.constexpr = take_tall_tile if row_lists is not None else take_tile
    LOAD: gl.constexpr = load_tall_steps if row_lists is not None else load_steps
    # The next tile is asked for, through a chain of dependent reads, while the first stages of this one are under way.
    LEAD: gl.constexpr = STAGES * STEP if STAGES * STEP < D else D
    next_biases = bias_tiles.index(RING) if row_lists is not None else None
    layer_number, _ = layer_in_stack(layer_index, NUM_LAYERS)
    stage, phase, place, ring_phase = 0, 0, 0, 0
    expert, start, rows, tile, upper, lower, biases = TAKE(
        row_lists.index(place) if row_lists is not None else None, next_biases, bias, up_bias, layer_number,
        group_sizes, group_start, slot_of_row, schedule, counters, num_blocks, num_rows, num_slots, N, WEIGHT_N,
        BIAS_LAYER_STRIDE, UP_BIAS_LAYER_STRIDE, TOP_K, GATHER, GATE_LAYOUT, COUNTER, GROUP_M, SPREAD,
    )  # fmt: skip
    while expert > -2:
        group = layer_number * NUM_EXPERTS + expert
        sources = row_lists.index(place) if row_lists is not None else (upper, lower)
        if expert >= 0:
            mbarrier.wait(ring_empty.index(place), ring_phase ^ 1)
            if (bias is not None) or (up_bias is not None):
                if next_biases is not None:
                    kept = next_biases.load(gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
                    bias_tiles.index(place).store(kept)
                else:
                    bias_tiles.index(place).store(biases)
            announce(ring, ring_full, place, expert, start, rows, tile)
            place, ring_phase = advance(place, ring_phase, RING)
            stage, phase = LOAD(
                x, x_map, weight_map, up_map, a_tiles, w_tiles, sources, full, empty, stage, phase, group, start, rows,
                tile, 0, LEAD, D, N, WEIGHT_N, X_STRIDE, GATHER, GATE_LAYOUT, IN_OUT, STAGES, STEP,
            )  # fmt: skip
        next_expert, next_start, next_rows, next_tile, next_upper, next_lower, following_biases = TAKE(
            row_lists.index(place) if row_lists is not None else None, next_biases, bias, up_bias, layer_number,
            group_sizes, group_start, slot_of_row, schedule, counters, num_blocks, num_rows, num_slots, N, WEIGHT_N,
            BIAS_LAYER_STRIDE, UP_BIAS_LAYER_STRIDE, TOP_K, GATHER, GATE_LAYOUT, COUNTER, GROUP_M, SPREAD,
        )  # fmt: skip
        if expert >= 0:
            stage, phase = LOAD(
                x, x_map, weight_map, up_map, a_tiles, w_tiles, sources, full, empty, stage, phase, group, start, rows,
                tile, LEAD, D, D, N, WEIGHT_N, X_STRIDE, GATHER, GATE_LAYOUT, IN_OUT, STAGES, STEP,
            )  # fmt: skip
        expert, start, rows, tile = next_expert, next_start, next_rows, next_tile
        upper, lower, biases = next_upper, next_lower, following_biases
    mbarrier.wait(ring_empty.index(place), ring_phase ^ 1)
    announce(ring, ring_full, place, -1, 0, 0, 0)
