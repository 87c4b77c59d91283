"""Ragged grouped matmul for Hopper with weights as codes, decoded in registers. Written in Gluon, warps specialised.

The weight is the left operand, which tensor cores take from registers. Few rows make a narrow tile.

producer (1 or 4 warps)
    takes and announces a tile
    for each stage, one or two blocks along the reduction: waits until it is free, loads codes by TMA, scales and zero
        points by cp.async, rows by TMA (in layout order) or cp.async (gathered)
consumer 0 and 1 (4 warps each), 64 or 128 weight rows each
    for each stage, 64 rows and 64 columns: decodes, then one asynchronous product, while the next codes are decoded
    then the epilogue. Tall tiles: `wide`

The 32 bytes that a thread needs of a tiled block (`moe_core.formats.tiling`), 64 weight rows and 128 columns of four
bits or 64 of eight, are together, and so are the rows' scales.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from moe_core.ops.common.kernels.aggregates import Epilogue, Layout, Output, Product, Rows, Schedule, Weights
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.lora.kernels.tail import Tail
from moe_core.ops.matmul.sm90.kernels.pipeline import (
    DEPTH,
    RING,
    advance,
    allocate_pipeline,
    await_stage,
    await_tile,
    release_stage,
    release_tile,
)
from moe_core.ops.matmul.sm90_packed.kernels.consumer import Codes, Part, Stages, finish, operand_of, read_block
from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import HEIGHT, LINES, UNIT
from moe_core.ops.matmul.sm90_packed.kernels.epilogue import bias_of
from moe_core.ops.matmul.sm90_packed.kernels.producer import producer
from moe_core.ops.matmul.sm90_packed.kernels.wide import compute_wide

#: Tokens of the largest tile of `compute_tile`, and tokens that its tiles with few rows multiply.
LARGE = gl.constexpr(128)
NARROW = gl.constexpr(32)
#: Numbers of rows that tiles of up to 256 rows multiply, each a power of two or the sum of two. Experts with about as
#: many rows as a tile, or half as many, have a few above it half of the time.
WIDTHS = gl.constexpr(((32, 0), (64, 0), (64, 32), (128, 0), (128, 32), (256, 0)))


@gluon.jit
def multiply(left, right, accumulator, PLACE: gl.constexpr, OF: gl.constexpr):
    """Add product PLACE of the OF of a stage. At most two are under way, for lack of registers for operands."""
    accumulator = warpgroup_mma(left, right, accumulator, is_async=True)
    if (PLACE > 0) and (PLACE < OF - 1):
        accumulator = warpgroup_mma_wait(num_outstanding=1, deps=[accumulator])
    return accumulator


@gluon.jit
def compute_tile(product, part, stage, phase, TOKENS: gl.constexpr):
    pipeline, stages, codes, weights = product.pipeline, product.tiles, product.scales, product.weights
    MINE: gl.constexpr = stages.PAIRS // 2
    FIRST: gl.constexpr = part.WHICH * MINE
    DEEP: gl.constexpr = stages.DEEP
    HALVES: gl.constexpr = codes.COLUMNS // DEPTH
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    slots, buffer = stages.slots.index(part.place), stages.results.index(part.WHICH)
    first = gl.zeros([HEIGHT, TOKENS], gl.float32, sums)
    second = first
    for _ in range(0, codes.STEPS, DEEP):
        await_stage(pipeline, stage, phase)
        for mine in gl.static_range(MINE):
            for deep in gl.static_range(DEEP):
                held = read_block(product, stage, deep, FIRST + mine)
                columns = ()
                for half in gl.static_range(HALVES):
                    x_tile = stages.x.index(HALVES * (DEEP * stage + deep) + half)
                    columns += (x_tile.slice(0, TOKENS, dim=0).permute([1, 0]),)
                for half in gl.static_range(HALVES):
                    left = operand_of(held, half, codes.ELEMENT, sums)
                    if mine == 0:
                        first = multiply(left, columns[half], first, deep * HALVES + half, MINE * DEEP * HALVES)
                    else:
                        second = multiply(
                            left, columns[half], second, (DEEP + deep) * HALVES + half, MINE * DEEP * HALVES
                        )
        # ptxas serialises products, each waited for, if one is under way when the loop turns.
        if MINE == 2:
            first, second = warpgroup_mma_wait(num_outstanding=0, deps=[first, second])
        else:
            first = warpgroup_mma_wait(num_outstanding=0, deps=[first])
        release_stage(pipeline, stage)
        stage, phase = advance(stage, phase, pipeline.STAGES)
    for mine in gl.static_range(MINE):
        biases = None
        if weights.bias is not None:
            biases = bias_of(weights, part.base, part.block + mine, gl.SliceLayout(1, sums))
        finish(first if mine == 0 else second, biases, product, part, part.block + mine, slots, buffer, 0)
    return stage, phase


@gluon.jit
def consumer(WHICH: gl.constexpr, product):
    pipeline, stages, weights = product.pipeline, product.tiles, product.weights
    BLOCK_M: gl.constexpr = stages.x.shape[1]
    stage, phase, place, ring_phase, expert = 0, 0, 0, 0, 0
    layer_number, layer_exists = layer_in_stack(weights.layer_index, weights.NUM_LAYERS)
    while expert >= 0:
        tile = await_tile(pipeline, place, ring_phase)
        expert, rows = tile.expert, tile.rows
        if expert >= 0:
            block = tile.column * stages.PAIRS + WHICH * (stages.PAIRS // 2)
            base = layer_number.to(gl.int64) * weights.BIAS_LAYER_STRIDE + expert.to(gl.int64) * weights.WEIGHT_N
            row_weights = stages.row_weights.index(place) if product.epilogue.row_weight is not None else None
            part = Part(block, tile, base, layer_exists, place, row_weights, WHICH)
            if BLOCK_M > LARGE:
                below = 0
                for variant in gl.static_range(len(WIDTHS)):
                    if (rows > below) & (rows <= WIDTHS[variant][0] + WIDTHS[variant][1]):
                        stage, phase = compute_wide(product, part, stage, phase, WIDTHS[variant][0], WIDTHS[variant][1])
                    below = WIDTHS[variant][0] + WIDTHS[variant][1]
            # Half of the experts with about as many rows as a tile have a second tile with a few rows.
            elif (BLOCK_M >= 2 * NARROW) and (rows <= NARROW):
                stage, phase = compute_tile(product, part, stage, phase, NARROW)
            else:
                stage, phase = compute_tile(product, part, stage, phase, BLOCK_M)
        release_tile(pipeline, place)
        place, ring_phase = advance(place, ring_phase, RING)


@gluon.jit
def matmul_mixed_input(
    x, x_map, weight_map, scales, zero_points, bias, row_weight, layer_index, group_sizes, group_start, slot_of_row,
    schedule, counters, y, num_blocks, num_rows, num_slots,
    D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr, STEPS: gl.constexpr, BLOCKS: gl.constexpr,
    NUM_EXPERTS: gl.constexpr, NUM_LAYERS: gl.constexpr, X_STRIDE: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr,
    TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    ELEMENT: gl.constexpr, COLUMNS: gl.constexpr, GROUPS: gl.constexpr, REPEAT: gl.constexpr,
    COUNTER: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, PAIRS: gl.constexpr, DEEP: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr, REGISTERS: gl.constexpr, GROUP_M: gl.constexpr,
    PDL: gl.constexpr,
    tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed,
    TAIL_RANK: gl.constexpr, TAIL_SLOTS: gl.constexpr, TAIL_NUM_EXPERTS: gl.constexpr, TAIL_SLOT_STRIDE: gl.constexpr,
    TAIL_EXPERT_STRIDE: gl.constexpr, TAIL_R_STRIDE: gl.constexpr, TAIL_N_STRIDE: gl.constexpr,
    TAIL_THRESHOLD: gl.constexpr, TAIL_MASKED: gl.constexpr, TAIL_SALT: gl.constexpr, TAIL_BLOCK_R: gl.constexpr,
):  # fmt: skip
    """Compute tiles of y as `portable.kernel.matmul_ogs` does.

    weight_map: tiled codes of ELEMENT (`e2m1`, `uint4`, `uint8`) as lines of 128 bytes. scales, zero_points: tiled.
    STEPS, BLOCKS, COLUMNS, GROUPS, REPEAT: see `Codes`. WEIGHT_N: rows of a matrix before tiling. PAIRS, DEEP: see
    `Stages`. COUNTER: of tiles taken, None: programs take turns. REGISTERS: of a thread at launch, for two blocks on a
    multiprocessor, None: for one.
    """
    join(PDL)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    table: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    by_eight: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    WIDTH: gl.constexpr = UNIT if GATE_LAYOUT is not None else HEIGHT
    # Tokens of one part of the epilogue: fewer of the tallest tiles, which leave little memory.
    PART: gl.constexpr = 32 if BLOCK_M <= LARGE else 1024 // WIDTH
    TOKENS: gl.constexpr = PART if BLOCK_M > PART else BLOCK_M
    x_tiles = gl.allocate_shared_memory(
        x.dtype.element_ty, [COLUMNS // DEPTH * DEEP * STAGES, BLOCK_M, DEPTH], swizzled
    )
    w_tiles = gl.allocate_shared_memory(weight_map.dtype, [STAGES * PAIRS, DEEP * LINES, 128], lines)
    out_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, WIDTH], by_eight)
    # Scales of mxfp4 are words of four, others are numbers.
    SCALE: gl.constexpr = gl.int32 if ELEMENT == "e2m1" else scales.dtype.element_ty
    EACH: gl.constexpr = 1 if ELEMENT == "e2m1" else GROUPS
    scale_tiles = gl.allocate_shared_memory(SCALE, [STAGES * DEEP, PAIRS, HEIGHT * EACH], table)
    zero_tiles = None
    if zero_points is not None:
        zero_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES * DEEP, PAIRS, HEIGHT * EACH], table)
    weight_ring = gl.allocate_shared_memory(gl.float32, [RING, BLOCK_M], plain)
    slot_ring = gl.allocate_shared_memory(gl.int32, [RING, BLOCK_M], plain)
    pipeline = allocate_pipeline(STAGES, PRODUCER_WARPS, GATHER != "row")
    # Producers that gather rows hold, or for tall tiles look up, their addresses. The splits that compile without
    # spills were found by trying: values of all parts take registers of each.
    if REGISTERS is not None:
        CONSUMER_AND_PRODUCER: gl.constexpr = (104, 32) if GATHER == "row" else (96, 48)
    else:
        CONSUMER_AND_PRODUCER: gl.constexpr = (224, 56) if (GATHER == "row") == (BLOCK_M <= LARGE) else (208, 88)
    stages = Stages(x_tiles, w_tiles, scale_tiles, zero_tiles, weight_ring, slot_ring, out_tiles, PAIRS, DEEP)
    codes = Codes(scales, zero_points, STEPS, BLOCKS, ELEMENT, COLUMNS, GROUPS, REPEAT)
    weights = Weights(
        weight_map, None, bias, None, layer_index, D, N, WEIGHT_N, NUM_EXPERTS, NUM_LAYERS, BIAS_LAYER_STRIDE, 0,
        GATE_LAYOUT, False,
    )  # fmt: skip
    layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
    tiles = Schedule(schedule, counters, num_blocks, COUNTER, GROUP_M)
    rows, epilogue = Rows(x, x_map, X_STRIDE, GATHER), Epilogue(row_weight, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT)
    output = Output(y, N=N, SCATTER=SCATTER)
    tail = None
    if tail_low is not None:
        tail = Tail(
            tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed, TAIL_RANK, TAIL_SLOTS, TAIL_NUM_EXPERTS,
            TAIL_SLOT_STRIDE, TAIL_EXPERT_STRIDE, TAIL_R_STRIDE, TAIL_N_STRIDE, TAIL_THRESHOLD, TAIL_MASKED, TAIL_SALT,
            TAIL_BLOCK_R,
        )  # fmt: skip
    product = Product(rows, weights, layout, tiles, stages, pipeline, epilogue, output, codes, tail)
    gl.warp_specialize(
        [
            (consumer, (0, product)),
            (consumer, (1, product)),
            (producer, (product,)),
        ],
        [4, PRODUCER_WARPS],
        CONSUMER_AND_PRODUCER,
    )
