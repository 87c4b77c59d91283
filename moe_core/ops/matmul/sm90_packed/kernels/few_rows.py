"""Ragged grouped matmul for few rows per expert on Hopper: weights stream from memory into registers. In Gluon.

Every thread loads the 16 bytes of a weight row that it multiplies (mma.sync, weights on the left), a few steps ahead,
without shared memory. Warps share rows of x through shared memory, a chunk of several steps ahead, with one barrier per
chunk. A block of the grid has 64 weight rows (gated: 32 of gate and 32 of up) and up to 8 rows of one expert.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from moe_core.ops.common.kernels.aggregates import Epilogue, Layout, Output, Weights
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.lora.kernels.tail import Tail
from moe_core.ops.matmul.portable.kernel import rows_of_group
from moe_core.ops.matmul.sm90.kernels.pipeline import DEPTH, barrier, row_load
from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import HEIGHT, LINES, UNIT, decode_rows, left_half, of_words
from moe_core.ops.matmul.sm90_packed.kernels.decode_integers import integer_operand, load_factors
from moe_core.ops.matmul.sm90_packed.kernels.epilogue import store_tile
from moe_core.ops.matmul.sm90_packed.kernels.low_rank import prefetch_factor, present_adapters
from moe_core.ops.matmul.sm90_packed.kernels.tail import add_tail


@gluon.jit
def load_codes(words, step, STEPS: gl.constexpr):
    """Load a step's codes of a block, [lines, 32] words, zeros behind the last step."""
    lines: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    line = gl.arange(0, LINES, gl.SliceLayout(1, lines))[:, None]
    word = gl.arange(0, 32, gl.SliceLayout(0, lines))[None, :]
    inside = gl.full([LINES, 32], step, gl.int32, lines) < STEPS
    # Named, to tell loads of weights from others: they may come before the launch ahead has ended.
    return gl.load(words + step * (LINES * 32) + line * 32 + word, mask=inside, other=0, cache_modifier=".ca")


@gluon.jit
def load_words(scales, step, STEPS: gl.constexpr):
    """Load a step's scale words, [lines, 2], of four e8m0 bytes each, zeros behind the last step."""
    parts: gl.constexpr = gl.SliceLayout(2, gl.BlockedLayout([1, 1, 4], [4, 2, 4], [gl.num_warps(), 1, 1], [2, 1, 0]))
    row = (
        gl.arange(0, LINES, gl.SliceLayout(1, parts))[:, None] * 2 + gl.arange(0, 2, gl.SliceLayout(0, parts))[None, :]
    )
    inside = gl.full([LINES, 2], step, gl.int32, parts) < STEPS
    return gl.load(scales + step * HEIGHT + row, mask=inside, other=0, cache_modifier=".ca")


@gluon.jit
def fence():
    """Keep earlier loads ahead: ptxas delays loads to spare registers. The decoder of mxfp4 has a branch with
    this effect."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1)


@gluon.jit
def program_again():
    """Return `gl.program_id(0)` without a register that holds it until then."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], gl.int32, False, 1)


@gluon.jit
def load_rows(x_tile, x_rows, exists, columns, start, D: gl.constexpr):
    row_load(x_tile, x_rows + start, mask=exists[:, None] & (start + columns < D)[None, :])
    async_copy.commit_group()


@gluon.jit
def right_operand(rows, PLACE: gl.constexpr, LAYOUT: gl.constexpr):
    return rows.slice(PLACE * DEPTH, DEPTH, dim=1).permute([1, 0]).load(LAYOUT)


@gluon.jit
def matmul_few_rows(
    x, weight, scales, zero_points, bias, row_weight, layer_index, group_sizes, group_start, slot_of_row, schedule, y,
    num_rows, num_slots,
    D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr, STEPS: gl.constexpr, BLOCKS: gl.constexpr,
    NUM_EXPERTS: gl.constexpr, NUM_LAYERS: gl.constexpr, X_STRIDE: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr,
    TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr, GATE_LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, ELEMENT: gl.constexpr, COLUMNS: gl.constexpr,
    GROUPS: gl.constexpr, REPEAT: gl.constexpr, ALIKE: gl.constexpr, BLOCK_M: gl.constexpr, CHUNK: gl.constexpr,
    SPAN: gl.constexpr, REGISTERS: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
    tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed,
    TAIL_RANK: gl.constexpr, TAIL_SLOTS: gl.constexpr, TAIL_NUM_EXPERTS: gl.constexpr, TAIL_SLOT_STRIDE: gl.constexpr,
    TAIL_EXPERT_STRIDE: gl.constexpr, TAIL_R_STRIDE: gl.constexpr, TAIL_N_STRIDE: gl.constexpr,
    TAIL_THRESHOLD: gl.constexpr, TAIL_MASKED: gl.constexpr, TAIL_SALT: gl.constexpr, TAIL_BLOCK_R: gl.constexpr,
):  # fmt: skip
    """Compute one tile of y as `portable.kernel.matmul_ogs` does.

    weight, scales, zero_points: tiled (`moe_core.formats.tiling`), of codes of ELEMENT (`e2m1`, `uint4`, `uint8`).
    BLOCKS, STEPS: blocks of a matrix of 64 rows, and of COLUMNS columns. GROUPS: scales of a row in a block. REPEAT:
    steps that share them, ALIKE of those under way. WEIGHT_N: rows of a matrix before tiling. CHUNK: steps under way.
    SPAN: their columns, at least, a power of two. REGISTERS: of a thread, at most. EARLY: fetch the factor of a tail
    while the first codes are on their way.
    """
    if PDL == "start":
        join(PDL)
    LOOKS: gl.constexpr = (PDL == "layout") or (PDL == "tail")
    CACHE: gl.constexpr = ".cg" if LOOKS else ""
    block, tile = gl.program_id(0) // BLOCKS, gl.program_id(0) % BLOCKS
    expert = gl.load(schedule + 2 * block + 1, cache_modifier=CACHE)
    if expert < 0:
        if LOOKS:
            join(PDL)
        return
    HALVES: gl.constexpr = COLUMNS // DEPTH
    layer_number, _ = layer_in_stack(layer_index, NUM_LAYERS)
    matrix = (layer_number * NUM_EXPERTS + expert).to(gl.int64)
    words = weight.to(gl.pointer_type(gl.int32), bitcast=True) + (matrix * BLOCKS + tile) * (STEPS * LINES * 32)
    if ELEMENT == "e2m1":
        scales = scales.to(gl.pointer_type(gl.int32), bitcast=True) + (matrix * BLOCKS + tile) * (STEPS * HEIGHT)
    else:
        RECORDS: gl.constexpr = (STEPS + REPEAT - 1) // REPEAT * (HEIGHT * GROUPS)
        scales += (matrix * BLOCKS + tile) * RECORDS
        if zero_points is not None:
            zero_points += (matrix * BLOCKS + tile) * RECORDS
    codes, factors = (), ()
    for ahead in gl.static_range(CHUNK):
        codes += (load_codes(words, ahead, STEPS),)
        if ELEMENT == "e2m1":
            factors += (load_words(scales, ahead, STEPS),)
        else:
            if ahead % ALIKE == 0:
                factor = load_factors(scales, zero_points, ahead, STEPS, GROUPS, REPEAT)
            factors += (factor,)

    loads: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    first = gl.load(schedule + 2 * block, cache_modifier=CACHE) * BLOCK_M
    start, size = rows_of_group(group_sizes, group_start, expert, num_rows, CACHE)
    within = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, loads))
    exists = within < size
    x_row = start.to(gl.int64) + within
    if GATHER != "row":
        slots = gl.load(slot_of_row + x_row, mask=exists, other=0, cache_modifier=CACHE)
        slots = gl.minimum(gl.maximum(slots, 0), num_slots - 1)
        x_row = (slots // TOP_K if GATHER == "token" else slots).to(gl.int64)
    columns = gl.arange(0, SPAN, gl.SliceLayout(0, loads))
    x_rows = x + x_row[:, None] * X_STRIDE + columns[None, :]
    weights = Weights(
        None, None, bias, None, layer_index, D, N, WEIGHT_N, NUM_EXPERTS, NUM_LAYERS, BIAS_LAYER_STRIDE, 0,
        GATE_LAYOUT, False,
    )  # fmt: skip
    tail = None
    if tail_low is not None:
        tail = Tail(
            tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed, TAIL_RANK, TAIL_SLOTS, TAIL_NUM_EXPERTS,
            TAIL_SLOT_STRIDE, TAIL_EXPERT_STRIDE, TAIL_R_STRIDE, TAIL_N_STRIDE, TAIL_THRESHOLD, TAIL_MASKED, TAIL_SALT,
            TAIL_BLOCK_R,
        )  # fmt: skip
        if EARLY:
            present = present_adapters(tail, expert, start + first, gl.minimum(size - first, BLOCK_M), CACHE)
            WIDTH: gl.constexpr = UNIT if GATE_LAYOUT is not None else HEIGHT
            prefetch_factor(tail, weights, present, expert, tile * WIDTH, WIDTH, "L2")
    if PDL == "layout":
        join(PDL)

    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    x_tiles = gl.allocate_shared_memory(x.dtype.element_ty, [2, BLOCK_M, SPAN], swizzled)
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    # Two sums: a product that adds to the one before waits for it.
    low_sum = gl.zeros([HEIGHT, BLOCK_M], gl.float32, product)
    high_sum = low_sum
    load_rows(x_tiles.index(0), x_rows, exists, columns, 0, D)
    side = 0
    for step in range(0, STEPS, CHUNK):
        async_copy.wait_group(0)
        barrier()
        load_rows(x_tiles.index(1 - side), x_rows, exists, columns, (step + CHUNK) * COLUMNS, D)
        rows = x_tiles.index(side)
        following, following_factors = (), ()
        for part in gl.static_range(CHUNK):
            if ELEMENT == "e2m1":
                numbers = decode_rows(codes[part], of_words(factors[part], codes[part]))
                following += (load_codes(words, step + CHUNK + part, STEPS),)
                following_factors += (load_words(scales, step + CHUNK + part, STEPS),)
                low, high = left_half(numbers, 0, product), left_half(numbers, 1, product)
                low_sum = mma_v2(low, right_operand(rows, 2 * part, right), low_sum)
                high_sum = mma_v2(high, right_operand(rows, 2 * part + 1, right), high_sum)
            else:
                for half in gl.static_range(HALVES):
                    left = integer_operand(codes[part], factors[part], half, ELEMENT, product)
                    right_part = right_operand(rows, part * HALVES + half, right)
                    if (part * HALVES + half) % 2 == 0:
                        low_sum = mma_v2(left, right_part, low_sum)
                    else:
                        high_sum = mma_v2(left, right_part, high_sum)
                    fence()
                following += (load_codes(words, step + CHUNK + part, STEPS),)
                if part % ALIKE == 0:
                    factor = load_factors(scales, zero_points, step + CHUNK + part, STEPS, GROUPS, REPEAT)
                following_factors += (factor,)
                fence()
        codes, factors = following, following_factors
        side = 1 - side
    async_copy.wait_group(0)

    if ELEMENT != "e2m1":
        # Looked up again to free registers in the loop.
        program = program_again()
        block, tile = program // BLOCKS, program % BLOCKS
        expert = gl.load(schedule + 2 * block + 1, cache_modifier=CACHE)
        first = gl.load(schedule + 2 * block, cache_modifier=CACHE) * BLOCK_M
        start, size = rows_of_group(group_sizes, group_start, expert, num_rows, CACHE)
    layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
    epilogue = Epilogue(row_weight, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT)
    output = Output(y, N=N, SCATTER=SCATTER)
    sums = low_sum + high_sum
    if tail is not None:
        if PDL == "tail":
            join(PDL)
        rows = gl.minimum(size - first, BLOCK_M)
        if not EARLY:
            present = present_adapters(tail, expert, start + first, rows, "")
        sums = add_tail(sums, tile, expert, start + first, rows, present, weights, tail)
    store_tile(sums, tile, expert, first, start, size, weights, layout, epilogue, output)
