"""Ragged grouped matmul of e4m3 with e4m3 for few rows per expert on Hopper, weights as published. In Gluon.

As in `stream` every thread loads what it multiplies itself, here 16 codes of a row at a time; columns of 64 go to the
tensor cores (mma.sync) in another order, the same for weights and rows. Rows of x come as numbers and are quantised
here, each 128 columns with a scale, to the bits of `quantize_rows`: few rows cost less than a launch of their own, and
their codes are shared by the warps of a block.

A block of the grid has 64 weight rows, of a gated product by turns 8 of gate and 8 of up, and up to 8 rows of one
expert. Scales of both sides are applied to the sum of every 128 columns, in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moe_core.kernels.decode_words import COLUMNS, DEPTH, HEIGHT
from moe_core.kernels.hopper_ring import barrier
from moe_core.kernels.overlap import join
from moe_core.kernels.progress import wait
from moe_core.kernels.quantize_rows import up_to_power_of_two
from moe_core.kernels.tiled_result import layer_of, matrix_rows, rows_of, store_tile

#: Where a thread has words of weight codes, [64, 16]: 4 neighbours of rows g and g + 8 of its warp's 16, g = lane / 4.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
#: And codes of rows of x, [8, 64], which all warps have.
ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [[0, 0], [0, 0]], [], [8, 64]
    )
)
#: Four words of a thread, each as four codes.
_AS_CODES = gl.constexpr("mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;")


@gluon.jit
def weight_operand(words, PRODUCT: gl.constexpr):
    """Codes [64, 64] as the tensor cores take them: of every thread's 16 columns four by turns."""
    w0, w1, w2, w3 = gl.inline_asm_elementwise(_AS_CODES, "=r,=r,=r,=r,r,r,r,r", [words], (gl.float8e4nv,) * 4, True, 4)
    # [64, thread of four, code of a word, word's bits].
    codes = gl.reshape(gl.join(gl.join(w0, w2), gl.join(w1, w3)), [HEIGHT, 4, 4, 4])
    codes = gl.reshape(gl.permute(codes, [0, 3, 1, 2]), [HEIGHT, DEPTH])
    return gl.convert_layout(codes, gl.DotOperandLayout(0, PRODUCT, 4), assert_trivial=True)


@gluon.jit
def row_operand(memory, PLACE: gl.constexpr, PRODUCT: gl.constexpr):
    """64 columns of the codes in shared memory, [columns, rows], in that order."""
    codes = memory.slice(PLACE * DEPTH, DEPTH, dim=1).load(ROWS)
    ROWS_OF: gl.constexpr = codes.shape[0]
    codes = gl.permute(gl.reshape(codes, [ROWS_OF, 4, 4, 4]), [0, 2, 1, 3])
    codes = gl.permute(gl.reshape(codes, [ROWS_OF, DEPTH]), [1, 0])
    return gl.convert_layout(codes, gl.DotOperandLayout(1, PRODUCT, 4), assert_trivial=True)


@gluon.jit
def load_weights(rows, scale_rows, step, D: gl.constexpr, STEPS: gl.constexpr):
    """Words of a step's 128 columns, two of [64, 16], and the scales of the rows; behind the last column zeros."""
    words = step * (COLUMNS // 4) + gl.arange(0, DEPTH // 4, gl.SliceLayout(0, WORDS))[None, :]
    # Named, so that loads of weights can be told from others: they may come before the launch ahead has ended.
    low = gl.load(rows + words, mask=words < D // 4, other=0, cache_modifier=".ca")
    high = gl.load(rows + words + DEPTH // 4, mask=words + DEPTH // 4 < D // 4, other=0, cache_modifier=".ca")
    inside = gl.full([HEIGHT], step, gl.int32, scale_rows.type.layout) < STEPS
    scale = gl.load(scale_rows + step, mask=inside, other=0.0, cache_modifier=".ca")
    return low, high, scale


@gluon.jit
def load_numbers(x_rows, exists, columns, start, D: gl.constexpr, CHUNK: gl.constexpr):
    """A chunk of the rows of x from column `start`, 128 columns at a time."""
    tiles = ()
    for part in gl.static_range(CHUNK):
        column = start + part * COLUMNS + columns
        tiles += (gl.load(x_rows + start + part * COLUMNS, mask=exists[:, None] & (column < D)[None, :], other=0.0),)
    return tiles


@gluon.jit
def reciprocal(values):
    """1 / x of fp32 far from the ends of the exponents, to an error of hardly more than half a place."""
    guess = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [values], gl.float32, True, 1)
    return gl.fma(gl.fma(-values, guess, 1.0), guess, guess)


@gluon.jit
def divided(values, divisor, inverse):
    """x / y rounded once, inverse being about 1 / y, where neither quotient nor remainder leaves the normal numbers.

    The steps that CUDA's own division takes there (P. Markstein, IA-64 and Elementary Functions, section 8.2); smaller
    quotients may be off, and are zeros as e4m3."""
    found = values * inverse
    found = gl.fma(gl.fma(-divisor, found, values), inverse, found)
    return gl.fma(gl.fma(-divisor, found, values), inverse, found)


@gluon.jit
def quantize(tiles, codes, scales, place, RULE: gl.constexpr, LARGEST: gl.constexpr):
    """Put codes of a chunk and, from `place` on, the scales into shared memory; see `quantize_rows.quantize_groups`."""
    for part in gl.static_range(len(tiles)):
        values = tiles[part].to(gl.float32)
        bits = gl.max(values.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        usable = bits < 0x7F800000
        amax = gl.where(usable, bits, 0x3F800000).to(gl.float32, bitcast=True)
        scale = divided(gl.maximum(amax, 1e-10), gl.full_like(amax, LARGEST), gl.full_like(amax, 1.0 / LARGEST))
        if RULE == "power_of_two":
            scale = up_to_power_of_two(scale).to(gl.float32, bitcast=True)
        quotients = divided(values, scale[:, None], reciprocal(scale)[:, None])
        quotients = gl.where(usable[:, None], quotients, 0.0)
        codes.slice(part * COLUMNS, COLUMNS, dim=1).store(quotients.to(gl.float8e4nv))
        scales.index(place + part).store(gl.where(usable, scale, float("nan")))


@gluon.jit
def stream_tile_fp8(
    block, tile, expert, x, weight, scales, bias, row_weight, layer, group_sizes, group_start, slot_of_row, schedule, y,
    num_rows, num_slots, D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr, NUM_EXPERTS: gl.constexpr,
    NUM_LAYERS: gl.constexpr, X_STRIDE: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr, TOP_K: gl.constexpr,
    GATHER: gl.constexpr, SCATTER: gl.constexpr, GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, RULE: gl.constexpr, LARGEST: gl.constexpr, BLOCK_M: gl.constexpr,
    CHUNK: gl.constexpr, JOIN: gl.constexpr, ready, count,
):  # fmt: skip
    """Weight rows `tile` and row block `block`, which is one of `expert`; parameters as in `matmul_stream_fp8`.

    JOIN, ready, count: as in `stream.stream_tile`.
    """
    CACHE: gl.constexpr = ".cg" if JOIN else ""
    STEPS: gl.constexpr = (D + COLUMNS - 1) // COLUMNS
    GROUPS: gl.constexpr = (WEIGHT_N + COLUMNS - 1) // COLUMNS
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    layer_index, _ = layer_of(layer, NUM_LAYERS)
    matrix = (layer_index * NUM_EXPERTS + expert).to(gl.int64)
    row, _ = matrix_rows(tile, N, GATE_LAYOUT, gl.SliceLayout(1, WORDS))
    # Behind the last row the last one is read again; its sums are not stored.
    row = gl.minimum(row, WEIGHT_N - 1)
    weight_rows = weight.to(gl.pointer_type(gl.int32), bitcast=True) + (matrix * WEIGHT_N + row[:, None]) * (D // 4)
    row, _ = matrix_rows(tile, N, GATE_LAYOUT, gl.SliceLayout(1, product))
    scale_rows = scales + (matrix * GROUPS + gl.minimum(row, WEIGHT_N - 1) // COLUMNS) * STEPS
    weights, factors = (), ()
    for ahead in gl.static_range(CHUNK):
        low, high, factor = load_weights(weight_rows, scale_rows, ahead, D, STEPS)
        weights += (low, high)
        factors += (factor,)

    loads: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    first = gl.load(schedule + 2 * block, cache_modifier=CACHE) * BLOCK_M
    start, size = rows_of(group_sizes, group_start, expert, num_rows, CACHE)
    within = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, loads))
    exists = within < size
    x_row = start.to(gl.int64) + within
    if GATHER != "row":
        slots = gl.load(slot_of_row + x_row, mask=exists, other=0, cache_modifier=CACHE)
        slots = gl.minimum(gl.maximum(slots, 0), num_slots - 1)
        x_row = (slots // TOP_K if GATHER == "token" else slots).to(gl.int64)
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, loads))
    x_rows = x + x_row[:, None] * X_STRIDE + columns[None, :]
    if JOIN:
        join()
    if ready is not None:
        wait(ready, count)

    swizzled: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    codes = gl.allocate_shared_memory(gl.float8e4nv, [2, BLOCK_M, CHUNK * COLUMNS], swizzled)
    row_scales = gl.allocate_shared_memory(gl.float32, [2 * CHUNK, BLOCK_M], plain)
    total = gl.zeros([HEIGHT, BLOCK_M], gl.float32, product)
    nothing = gl.zeros([HEIGHT, BLOCK_M], gl.float32, product)
    quantize(load_numbers(x_rows, exists, columns, 0, D, CHUNK), codes.index(0), row_scales, 0, RULE, LARGEST)
    numbers = load_numbers(x_rows, exists, columns, CHUNK * COLUMNS, D, CHUNK)
    side = 0
    for step in range(0, STEPS, CHUNK):
        barrier()
        mine = codes.index(side)
        following, following_factors = (), ()
        for part in gl.static_range(CHUNK):
            low, high, factor = load_weights(weight_rows, scale_rows, step + CHUNK + part, D, STEPS)
            following += (low, high)
            following_factors += (factor,)
            first_half = mma_v2(
                weight_operand(weights[2 * part], product), row_operand(mine, 2 * part, product), nothing
            )
            second_half = mma_v2(
                weight_operand(weights[2 * part + 1], product), row_operand(mine, 2 * part + 1, product), nothing
            )
            row_scale = row_scales.index(side * CHUNK + part).load(gl.SliceLayout(0, product))
            total += (first_half + second_half) * (factors[part][:, None] * row_scale[None, :])
        # Every warp has passed the barrier, and with it the last reads of this side.
        quantize(numbers, codes.index(1 - side), row_scales, (1 - side) * CHUNK, RULE, LARGEST)
        numbers = load_numbers(x_rows, exists, columns, (step + 2 * CHUNK) * COLUMNS, D, CHUNK)
        weights, factors = following, following_factors
        side = 1 - side

    store_tile(
        total, tile, expert, first, start, size, bias, row_weight, layer, slot_of_row, y, num_slots, N, WEIGHT_N,
        NUM_LAYERS, BIAS_LAYER_STRIDE, SCATTER, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT,
    )  # fmt: skip


@gluon.jit
def matmul_stream_fp8(
    x, weight, scales, bias, row_weight, layer, group_sizes, group_start, slot_of_row, schedule, y, num_rows, num_slots,
    D: gl.constexpr, N: gl.constexpr, WEIGHT_N: gl.constexpr, BLOCKS: gl.constexpr, NUM_EXPERTS: gl.constexpr,
    NUM_LAYERS: gl.constexpr, X_STRIDE: gl.constexpr, BIAS_LAYER_STRIDE: gl.constexpr, TOP_K: gl.constexpr,
    GATHER: gl.constexpr, SCATTER: gl.constexpr, GATE_LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, RULE: gl.constexpr, LARGEST: gl.constexpr, BLOCK_M: gl.constexpr,
    CHUNK: gl.constexpr, REGISTERS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """y[scatter(row)] = cast(act(quantised(x[gather(row)]) @ w[expert] + bias) * row_weight); see `matmul_ogs`.

    weight: e4m3 codes `[.., WEIGHT_N, D]`; scales: fp32, of 128 x 128 blocks of them. RULE, LARGEST: how rows of x are
    quantised. N: output columns; BLOCKS: of 64 weight rows. CHUNK: steps of 128 columns that are under way.
    REGISTERS: of a thread, at most. OVERLAP: see `overlap`.
    """
    if OVERLAP == "start":
        join()
    CACHE: gl.constexpr = ".cg" if OVERLAP == "layout" else ""
    block, tile = gl.program_id(0) // BLOCKS, gl.program_id(0) % BLOCKS
    expert = gl.load(schedule + 2 * block + 1, cache_modifier=CACHE)
    if expert < 0:
        if OVERLAP == "layout":
            join()
        return
    stream_tile_fp8(
        block, tile, expert, x, weight, scales, bias, row_weight, layer, group_sizes, group_start, slot_of_row,
        schedule, y, num_rows, num_slots, D, N, WEIGHT_N, NUM_EXPERTS, NUM_LAYERS, X_STRIDE, BIAS_LAYER_STRIDE, TOP_K,
        GATHER, SCATTER, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT, RULE, LARGEST, BLOCK_M, CHUNK, OVERLAP == "layout",
        None, 0,
    )  # fmt: skip
