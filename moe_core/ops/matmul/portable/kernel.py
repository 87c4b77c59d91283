"""Ragged grouped matmul with fused gather, bias, activation, row weight and scatter.

for each (row block b, expert e) of the schedule, for each column tile:
    rows = group_start[e] + b * BLOCK_M + 0 .. BLOCK_M - 1, cut at group_size[e]
    y[scatter(rows)] = cast(act(x[gather(rows)] @ w[e] + bias[e]) * row_weight)
"""

import triton
import triton.language as tl

from moe_core.ops.activation.kernels.formulas import activate, activate_gated
from moe_core.ops.common.kernels.aggregates import Epilogue, Layout, Output, Rows, aggregate_of
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.common.kernels.rows import source_rows
from moe_core.ops.exchange.kernels.addresses import SECTIONS, slots_at
from moe_core.ops.lora.kernels.tail import Tail, add_tail
from moe_core.ops.routing.kernels.schedule import spread_block

#: Stacked weights of D x N (interleaved: D x 2 N) elements with their biases, and the sizes of a tile.
Matrices = aggregate_of(
    "Matrices",
    """weight up bias up_bias layer_index D N WEIGHT_N NUM_LAYERS LAYER_STRIDE EXPERT_STRIDE K_STRIDE N_STRIDE
    BIAS_LAYER_STRIDE UP_BIAS_LAYER_STRIDE INPUT_PRECISION BLOCK_M BLOCK_N BLOCK_K""",
)


@triton.jit
def tile_of_program(pid, num_blocks, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return (row block, column tile). GROUP_M row blocks share a column tile before the next, so weights stay
    in L2."""
    per_group = GROUP_M * TILES_N
    first = (pid // per_group) * GROUP_M
    height = tl.minimum(num_blocks - first, GROUP_M)
    return first + (pid % per_group) % height, (pid % per_group) // height


@triton.jit
def rows_of_group(group_sizes, group_start, group, num_rows, CACHE: tl.constexpr):
    """Return (first row, rows) of a group. Layouts are not trusted: values must not lead outside the buffers."""
    start = tl.minimum(tl.maximum(tl.load(group_start + group, cache_modifier=CACHE), 0), num_rows)
    return start, tl.minimum(tl.load(group_sizes + group, cache_modifier=CACHE), num_rows - start)


@triton.jit
def slot_inside(slots, num_slots):
    return tl.minimum(tl.maximum(slots, 0), num_slots - 1).to(tl.int64)


@triton.jit
def rows_of_block(block, expert, layout, schedule, BLOCK_M: tl.constexpr, SCATTER: tl.constexpr, CACHE: tl.constexpr):
    if schedule is None:
        rows = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        return rows, rows < layout.num_rows, rows
    else:
        within = tl.load(schedule + 2 * block, cache_modifier=CACHE) * BLOCK_M + tl.arange(0, BLOCK_M)
        start, size = rows_of_group(layout.group_sizes, layout.group_start, expert, layout.num_rows, CACHE)
        if (SCATTER != "row") and (SCATTER != "slot"):
            place = tl.load(schedule + 2 * block, cache_modifier=CACHE)
            place = spread_block(place, tl.cdiv(size, BLOCK_M), SECTIONS)
            within = place * BLOCK_M + tl.arange(0, BLOCK_M)
        exists = within < size
        rows = start.to(tl.int64) + within
        slots = tl.load(layout.slot_of_row + rows, mask=exists, other=0, cache_modifier=CACHE)
        return rows, exists, slot_inside(slots, layout.num_slots)


@triton.jit
def filled_rows(layout, schedule, rows, exists, slots):
    """Return (which rows have slots, the slots), loaded again to free registers in the main loop, where all rows
    count."""
    if schedule is None:
        return exists, slots
    else:
        slots = tl.load(layout.slot_of_row + rows, mask=exists, other=-1)
        return exists & (slots >= 0) & (slots < layout.num_slots), slot_inside(slots, layout.num_slots)


@triton.jit
def target_rows(y, rows, slots, exists, N: tl.constexpr, SCATTER: tl.constexpr):
    """Return (pointers to rows of y, which rows are written)."""
    if SCATTER == "row":
        return y + rows * N, exists
    elif SCATTER == "slot":
        return y + slots * N, exists
    else:
        return slots_at(y, slots, exists, SCATTER)


@triton.jit
def load_weight(
    base, k, columns, D: tl.constexpr, N: tl.constexpr, K_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    pointers = base + k[:, None] * K_STRIDE + columns[None, :] * N_STRIDE
    if EVEN_K and EVEN_N:
        return tl.load(pointers)
    elif EVEN_K:
        return tl.load(pointers, mask=(columns < N)[None, :], other=0.0)
    elif EVEN_N:
        return tl.load(pointers, mask=(k < D)[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=(k < D)[:, None] & (columns < N)[None, :], other=0.0)


@triton.jit
def store_pre(pre, tile, rows, columns, exists, inside, WIDTH: tl.constexpr):
    pointers = pre + rows[:, None] * WIDTH + columns[None, :]
    tl.store(pointers, tile.to(pre.dtype.element_ty), mask=exists[:, None] & inside[None, :])


@triton.jit
def weight_bases(weights, expert, GATE_LAYOUT: tl.constexpr):
    """Return (pointers to an expert's weights and up weights, layer index, True if the layer exists)."""
    layer_number, layer_exists = layer_in_stack(weights.layer_index, weights.NUM_LAYERS)
    layer_number = layer_number.to(tl.int64)
    weight_offset = layer_number * weights.LAYER_STRIDE + tl.cast(expert, tl.int64) * weights.EXPERT_STRIDE
    first = weights.weight + weight_offset
    second = first
    if (GATE_LAYOUT == "separate") or (GATE_LAYOUT == "joined"):
        second = weights.up + weight_offset
    elif GATE_LAYOUT == "halves":
        second = first + weights.N * weights.N_STRIDE
    return first, second, layer_number, layer_exists


@triton.jit
def tile_sums(x_pointers, exists, first, second, tile, weights, GATE_LAYOUT: tl.constexpr, STAGES: tl.constexpr):
    """Return fp32 sums `[BLOCK_M, BLOCK_N]` (interleaved: twice as wide), and the sums of up."""
    D: tl.constexpr = weights.D
    N: tl.constexpr = weights.N
    BLOCK_M: tl.constexpr = weights.BLOCK_M
    BLOCK_N: tl.constexpr = weights.BLOCK_N
    BLOCK_K: tl.constexpr = weights.BLOCK_K
    K_STRIDE: tl.constexpr = weights.K_STRIDE
    N_STRIDE: tl.constexpr = weights.N_STRIDE
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    even_k: tl.constexpr = D % BLOCK_K == 0
    even_n: tl.constexpr = N % BLOCK_N == 0
    wide = tile * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
    if GATE_LAYOUT == "interleaved":
        accumulator = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
    else:
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        if even_k:
            x_tile = tl.load(x_pointers + start, mask=exists[:, None], other=0.0)
        else:
            x_tile = tl.load(x_pointers + start, mask=exists[:, None] & (start + k < D)[None, :], other=0.0)
        if GATE_LAYOUT == "interleaved":
            w_tile = load_weight(first, start + k, wide, D, 2 * N, K_STRIDE, N_STRIDE, even_k, even_n)
        else:
            w_tile = load_weight(first, start + k, columns, D, N, K_STRIDE, N_STRIDE, even_k, even_n)
        accumulator = tl.dot(x_tile, w_tile, accumulator, input_precision=weights.INPUT_PRECISION)
        if (GATE_LAYOUT == "halves") or (GATE_LAYOUT == "separate"):
            up_tile = load_weight(second, start + k, columns, D, N, K_STRIDE, N_STRIDE, even_k, even_n)
            up_accumulator = tl.dot(x_tile, up_tile, up_accumulator, input_precision=weights.INPUT_PRECISION)
    if GATE_LAYOUT == "joined":
        for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            mask = exists[:, None] if even_k else exists[:, None] & (start + k < D)[None, :]
            x_tile = tl.load(x_pointers + D + start, mask=mask, other=0.0)
            up_tile = load_weight(second, start + k, columns, D, N, K_STRIDE, N_STRIDE, even_k, even_n)
            accumulator = tl.dot(x_tile, up_tile, accumulator, input_precision=weights.INPUT_PRECISION)
    return accumulator, up_accumulator


@triton.jit
def tail_sums(sums, tile, rows, slots, exists, expert, layout, weights, tail, GATE_LAYOUT: tl.constexpr):
    """Return `tile_sums` with the tail's products added. Its factor has the columns of gate, then those of up."""
    N: tl.constexpr = weights.N
    accumulator, up_accumulator = sums
    columns = tile * weights.BLOCK_N + tl.arange(0, weights.BLOCK_N)
    if GATE_LAYOUT == "interleaved":
        wide = tile * 2 * weights.BLOCK_N + tl.arange(0, 2 * weights.BLOCK_N)
        accumulator = add_tail(
            accumulator, rows, slots, exists, expert, wide, wide < 2 * N, tail, layout.TOP_K, weights.INPUT_PRECISION
        )
    else:
        inside = columns < N
        accumulator = add_tail(
            accumulator, rows, slots, exists, expert, columns, inside, tail, layout.TOP_K, weights.INPUT_PRECISION
        )
        if (GATE_LAYOUT == "halves") or (GATE_LAYOUT == "separate"):
            up_accumulator = add_tail(
                up_accumulator, rows, slots, exists, expert, N + columns, inside, tail, layout.TOP_K,
                weights.INPUT_PRECISION,
            )  # fmt: skip
    return accumulator, up_accumulator


@triton.jit
def activated_sums(sums, tile, rows, exists, expert, layer_number, weights, epilogue, pre):
    N: tl.constexpr = weights.N
    BLOCK_N: tl.constexpr = weights.BLOCK_N
    GATE_LAYOUT: tl.constexpr = epilogue.GATE_LAYOUT
    accumulator, up_accumulator = sums
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = tile * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
    bias, up_bias = weights.bias, weights.up_bias
    bias_row = (layer_number * weights.BIAS_LAYER_STRIDE) + tl.cast(expert, tl.int64) * weights.WEIGHT_N
    if GATE_LAYOUT == "interleaved":
        if bias is not None:
            accumulator += tl.load(bias + bias_row + wide, mask=wide < 2 * N, other=0.0).to(tl.float32)[None, :]
        if pre is not None:
            store_pre(pre, accumulator, rows, wide, exists, wide < 2 * N, 2 * N)
        gate, second_half = tl.split(tl.reshape(accumulator, (weights.BLOCK_M, BLOCK_N, 2)))
        result = activate_gated(gate, second_half, epilogue.ACTIVATION, epilogue.ALPHA, epilogue.LIMIT)
    else:
        if bias is not None:
            accumulator += tl.load(bias + bias_row + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if GATE_LAYOUT == "halves":
            if bias is not None:
                extra = tl.load(bias + bias_row + N + columns, mask=columns < N, other=0.0)
                up_accumulator += extra.to(tl.float32)[None, :]
        elif GATE_LAYOUT == "separate":
            if up_bias is not None:
                up_row = (layer_number * weights.UP_BIAS_LAYER_STRIDE) + tl.cast(expert, tl.int64) * N
                extra = tl.load(up_bias + up_row + columns, mask=columns < N, other=0.0)
                up_accumulator += extra.to(tl.float32)[None, :]
        if (GATE_LAYOUT == "halves") or (GATE_LAYOUT == "separate"):
            if pre is not None:
                store_pre(pre, accumulator, rows, columns, exists, columns < N, 2 * N)
            result = activate_gated(accumulator, up_accumulator, epilogue.ACTIVATION, epilogue.ALPHA, epilogue.LIMIT)
            if pre is not None:
                # Only now: the registers have no room for both stores at once.
                store_pre(pre + N, up_accumulator, rows, columns, exists, columns < N, 2 * N)
        elif epilogue.ACTIVATION is not None:
            if pre is not None:
                store_pre(pre, accumulator, rows, columns, exists, columns < N, N)
            result = activate(accumulator, epilogue.ACTIVATION)
        else:
            result = accumulator
    return result


@triton.jit
def multiply_tile(
    block, tile, expert, layout, schedule, x, weights, epilogue, output, JOIN: tl.constexpr, STAGES: tl.constexpr, tail
):
    """Compute a column tile of a row block. JOIN: wait for the launch ahead once the rows are known (`layout`), or
    ahead of the tail (`tail`). STAGES: of the pipeline, None: the launch's. tail: low-rank steps that follow, or
    None."""
    N: tl.constexpr = weights.N
    CACHE: tl.constexpr = ".cg" if JOIN is not None else ""
    first, second, layer_number, layer_exists = weight_bases(weights, expert, epilogue.GATE_LAYOUT)
    rows, exists, slots = rows_of_block(block, expert, layout, schedule, weights.BLOCK_M, output.SCATTER, CACHE)
    x_rows = source_rows(rows, slots, x.GATHER, layout.TOP_K)
    if JOIN == "layout":
        join(JOIN)

    x_pointers = x.values + x_rows[:, None] * x.STRIDE + tl.arange(0, weights.BLOCK_K)[None, :]
    sums = tile_sums(x_pointers, exists, first, second, tile, weights, epilogue.GATE_LAYOUT, STAGES)
    if tail is not None:
        if JOIN == "tail":
            join(JOIN)
        sums = tail_sums(sums, tile, rows, slots, exists, expert, layout, weights, tail, epilogue.GATE_LAYOUT)
    result = activated_sums(sums, tile, rows, exists, expert, layer_number, weights, epilogue, output.pre)
    columns = tile * weights.BLOCK_N + tl.arange(0, weights.BLOCK_N)
    if output.y is not None:
        exists, slots = filled_rows(layout, schedule, rows, exists, slots)
        if epilogue.row_weight is not None:
            result *= tl.load(epilogue.row_weight + slots, mask=exists, other=0.0)[:, None]
        if weights.layer_index is not None:
            result = tl.where(layer_exists, result, float("nan"))
        targets, exists = target_rows(output.y, rows, slots, exists, N, output.SCATTER)
        pointers = targets[:, None] + columns[None, :]
        mask = exists[:, None] & (columns < N)[None, :]
        tl.store(pointers, result.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def matmul_ogs(
    x, weight, up, bias, up_bias, row_weight, layer_index, group_sizes, group_start, slot_of_row, schedule, y, pre,
    num_blocks, num_rows, num_slots,
    D: tl.constexpr, N: tl.constexpr, WEIGHT_N: tl.constexpr, NUM_LAYERS: tl.constexpr,
    X_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr, EXPERT_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr, BIAS_LAYER_STRIDE: tl.constexpr, UP_BIAS_LAYER_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    GATE_LAYOUT: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
    tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed,
    TAIL_RANK: tl.constexpr, TAIL_SLOTS: tl.constexpr, TAIL_NUM_EXPERTS: tl.constexpr, TAIL_SLOT_STRIDE: tl.constexpr,
    TAIL_EXPERT_STRIDE: tl.constexpr, TAIL_R_STRIDE: tl.constexpr, TAIL_N_STRIDE: tl.constexpr,
    TAIL_THRESHOLD: tl.constexpr, TAIL_MASKED: tl.constexpr, TAIL_SALT: tl.constexpr, TAIL_BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y. N: output columns. WEIGHT_N: columns of one weight buffer (2N for gate and up together).

    num_rows: rows of the layout. num_slots: slots, TOP_K neighbours for each token. A row with slot -1 is padding:
    values read in its place are never written. schedule None: dense, one expert. GATE_LAYOUT joined: the reduction
    continues over `up` and the next D columns of x. pre, if not None: gets the input of the activation in layout order,
    `separate` as `halves`. y None: only pre is written. SCATTER: rows go to `row` or `slot` of y. Otherwise y int64 has
    an address for each slot, 0: none, and SCATTER is the dtype there.
    """
    if PDL == "start":
        join(PDL)
    JOIN: tl.constexpr = None if PDL == "start" else PDL
    CACHE: tl.constexpr = ".cg" if JOIN is not None else ""
    block, tile = tile_of_program(tl.program_id(0), num_blocks, (N + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    expert = 0
    if schedule is not None:
        expert = tl.load(schedule + 2 * block + 1, cache_modifier=CACHE)
        if expert < 0:
            join(JOIN)
            return
    layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
    matrices = Matrices(
        weight, up, bias, up_bias, layer_index, D, N, WEIGHT_N, NUM_LAYERS, LAYER_STRIDE, EXPERT_STRIDE, K_STRIDE,
        N_STRIDE, BIAS_LAYER_STRIDE, UP_BIAS_LAYER_STRIDE, INPUT_PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    rows, epilogue = Rows(x, None, X_STRIDE, GATHER), Epilogue(row_weight, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT)
    output = Output(y, pre=pre, N=N, SCATTER=SCATTER)
    tail = None
    if tail_low is not None:
        tail = Tail(
            tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed, TAIL_RANK, TAIL_SLOTS, TAIL_NUM_EXPERTS,
            TAIL_SLOT_STRIDE, TAIL_EXPERT_STRIDE, TAIL_R_STRIDE, TAIL_N_STRIDE, TAIL_THRESHOLD, TAIL_MASKED, TAIL_SALT,
            TAIL_BLOCK_R,
        )  # fmt: skip
    multiply_tile(block, tile, expert, layout, schedule, rows, matrices, epilogue, output, JOIN, None, tail)
