"""Ragged grouped matmul with quantised weights, and quantised rows if asked. See `matmul_ogs` for the rest.

The weight is the left operand, [weight rows, BLOCK_K] @ [BLOCK_K, BLOCK_M]: decoded weights stay in registers and few
tokens cost a narrow tile. SCALING: scales are applied `into_weight` (number times scale, one cast), `per_block` (to
partial sums of BLOCK_K columns) or `at_end` (to the sums).
"""

import triton
import triton.language as tl

from moe_core.ops.activation.kernels.formulas import activate, activate_gated
from moe_core.ops.common.kernels.aggregates import Epilogue, Layout, Output
from moe_core.ops.common.kernels.dot import drained
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.common.kernels.rows import source_rows
from moe_core.ops.lora.kernels.tail import Tail, add_tail
from moe_core.ops.matmul.portable.kernel import filled_rows, rows_of_block, target_rows, tile_of_program
from moe_core.ops.quantize.kernels.decode import (
    activation_tile,
    group_of_row,
    number_of,
    ordered,
    per_group,
    plain_tile,
    weight_tile,
    zero_point,
)
from moe_core.ops.quantize.kernels.rows import magnitude_bits


@triton.jit
def matrix_rows(array, second, matrix, rows, side, MATRIX_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr):
    pointers = array + matrix * MATRIX_STRIDE + rows * ROW_STRIDE
    if second is not None:
        # Arrays are 16-byte aligned. Without the hint the compiler loads single bytes.
        distance = tl.multiple_of(second.to(tl.int64) - array.to(tl.int64), 16)
        bytes_each: tl.constexpr = array.dtype.element_ty.primitive_bitwidth // 8
        pointers += tl.cast(side, tl.int64) * tl.multiple_of(distance // bytes_each, 16 // bytes_each)
    return pointers


@triton.jit
def weight_row(column, side, N: tl.constexpr, GATE_LAYOUT: tl.constexpr):
    if GATE_LAYOUT == "interleaved":
        return 2 * column + side
    elif GATE_LAYOUT == "halves":
        return column + side * N
    else:
        return column


@triton.jit
def of_block(rows, start, D: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr):
    """Load scales of the group (0: all columns) with column `start`, at most the last."""
    if GROUP > 0:
        rows += tl.minimum(start, D - 1) // GROUP * STRIDE
    return tl.load(rows)


@triton.jit
def scales_at(
    rows, start, SCALING: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    if SCALING == "into_weight":
        return per_group(rows, start, D, GROUP, STRIDE, BLOCK_K)
    else:
        return of_block(rows, start, D, GROUP, STRIDE)


@triton.jit
def factor_of(
    scale, scale_1, x_scale, side, QUANTIZED_X: tl.constexpr, UNIFORM: tl.constexpr, TOKENS_FIRST: tl.constexpr
):
    """The fp32 factor of a partial sum. UNIFORM: one scale for side 0, scale_1 for side 1."""
    factor = number_of(scale).to(tl.float32)
    if UNIFORM:
        factor = tl.where(side == 0, factor, number_of(scale_1).to(tl.float32))
    factor = factor[None, :] if TOKENS_FIRST else factor[:, None]
    if QUANTIZED_X:
        tokens = number_of(x_scale).to(tl.float32)
        factor = factor * (tokens[:, None] if TOKENS_FIRST else tokens[None, :])
    return factor


@triton.jit
def values_of(array, ELEMENT: tl.constexpr, DOT: tl.constexpr):
    """Return a pointer to numbers, codes to multiply, or bytes to decode (e4m3, as sm_80 lacks it)."""
    if (DOT == "e4m3") and (ELEMENT == "e4m3"):
        return array.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    elif (ELEMENT is None) or (DOT == "int8"):
        return array
    else:
        return array.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def add_bias(tile, bias, up_bias, layer_number, expert, n, side, exists, WEIGHT_N: tl.constexpr,
             LAYER_STRIDE: tl.constexpr, UP_LAYER_STRIDE: tl.constexpr, SEPARATE: tl.constexpr):  # fmt: skip
    if bias is not None:
        mine = exists
        if SEPARATE:
            mine = exists & (side == 0)
        row = layer_number * LAYER_STRIDE + tl.cast(expert, tl.int64) * WEIGHT_N
        tile += tl.load(bias + row + n, mask=mine, other=0.0).to(tl.float32)[:, None]
    if up_bias is not None:
        row = layer_number * UP_LAYER_STRIDE + tl.cast(expert, tl.int64) * WEIGHT_N
        tile += tl.load(up_bias + row + n, mask=exists & (side == 1), other=0.0).to(tl.float32)[:, None]
    return tile


@triton.jit
def scale_pointers(
    scales, up_scales, matrix, n, side, first_column, SCALE_MATRIX: tl.constexpr, SCALE_N: tl.constexpr,
    N: tl.constexpr, GROUP_ROWS: tl.constexpr, GATE_LAYOUT: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """Return pointers to the scales of a tile's weight rows: of both sides if UNIFORM, else twice the same."""
    if UNIFORM:
        group_n = group_of_row(weight_row(first_column, 0, N, GATE_LAYOUT), GROUP_ROWS)
        first = matrix_rows(scales, up_scales, matrix, group_n, 0, SCALE_MATRIX, SCALE_N)
        group_n = group_of_row(weight_row(first_column, 1, N, GATE_LAYOUT), GROUP_ROWS)
        return first, matrix_rows(scales, up_scales, matrix, group_n, 1, SCALE_MATRIX, SCALE_N)
    else:
        both = matrix_rows(scales, up_scales, matrix, group_of_row(n, GROUP_ROWS), side, SCALE_MATRIX, SCALE_N)
        return both, both


@triton.jit
def store_result(
    total, rows, exists, slots, tile, layer_exists, layout, schedule, epilogue, output, STACKED: tl.constexpr,
    MAXIMA: tl.constexpr,
):  # fmt: skip
    """Apply activation and row weight to sums [weight rows, tokens], cast and scatter them. Gated: by 8 rows."""
    N: tl.constexpr = output.N
    BLOCK_M: tl.constexpr = total.shape[1]
    BLOCK_N: tl.constexpr = total.shape[0] // 2 if epilogue.GATE_LAYOUT is not None else total.shape[0]
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if epilogue.GATE_LAYOUT is not None:
        by_turns = tl.permute(tl.reshape(total, (BLOCK_N // 8, 2, 8, BLOCK_M)), (0, 2, 3, 1))
        gate, up = tl.split(by_turns)
        gate, up = tl.reshape(gate, (BLOCK_N, BLOCK_M)), tl.reshape(up, (BLOCK_N, BLOCK_M))
        result = activate_gated(gate, up, epilogue.ACTIVATION, epilogue.ALPHA, epilogue.LIMIT)
    elif epilogue.ACTIVATION is not None:
        result = activate(total, epilogue.ACTIVATION)
    else:
        result = total
    exists, slots = filled_rows(layout, schedule, rows, exists, slots)
    if epilogue.row_weight is not None:
        result *= tl.load(epilogue.row_weight + slots, mask=exists, other=0.0)[None, :]
    if STACKED:
        result = tl.where(layer_exists, result, float("nan"))
    targets, exists = target_rows(output.y, rows, slots, exists, N, output.SCATTER)
    pointers = targets[None, :] + columns[:, None]
    mask = exists[None, :] & (columns < N)[:, None]
    result = result.to(pointers.dtype.element_ty)
    tl.store(pointers, result, mask=mask)
    if epilogue.maxima is not None:
        bits = tl.where(mask, magnitude_bits(result.to(tl.float32)), 0)
        largest = tl.max(tl.reshape(bits, (BLOCK_M * BLOCK_N,)), axis=0)
        tl.atomic_max(epilogue.maxima + tl.program_id(0) % MAXIMA, largest, sem="relaxed")


@triton.jit
def matmul_quantized(
    x, x_scales, weight, scales, zero_points, up, up_scales, up_zero_points, bias, up_bias, row_weight, layer_index,
    group_sizes, group_start, slot_of_row, schedule, y, pre, maxima, num_blocks, num_rows, num_slots,
    D: tl.constexpr, N: tl.constexpr, WEIGHT_N: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_LAYERS: tl.constexpr,
    X_ELEMENT: tl.constexpr, X_COLUMNS: tl.constexpr, X_STRIDE: tl.constexpr, X_SCALE_STRIDE: tl.constexpr,
    X_GROUP: tl.constexpr, X_ORDER: tl.constexpr,
    ELEMENT: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    VALUE_MATRIX: tl.constexpr, VALUE_N: tl.constexpr, VALUE_K: tl.constexpr,
    SCALE_MATRIX: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr,
    POINT_MATRIX: tl.constexpr, POINT_N: tl.constexpr, POINT_K: tl.constexpr,
    BIAS_LAYER_STRIDE: tl.constexpr, UP_BIAS_LAYER_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    GATE_LAYOUT: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    DOT: tl.constexpr, SCALING: tl.constexpr, UNIFORM: tl.constexpr, ORDER: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, FAST_ACCUMULATE: tl.constexpr, TOKENS_FIRST: tl.constexpr, DRAINED: tl.constexpr,
    MAXIMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
    tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed,
    TAIL_RANK: tl.constexpr, TAIL_SLOTS: tl.constexpr, TAIL_NUM_EXPERTS: tl.constexpr, TAIL_SLOT_STRIDE: tl.constexpr,
    TAIL_EXPERT_STRIDE: tl.constexpr, TAIL_R_STRIDE: tl.constexpr, TAIL_N_STRIDE: tl.constexpr,
    TAIL_THRESHOLD: tl.constexpr, TAIL_MASKED: tl.constexpr, TAIL_SALT: tl.constexpr, TAIL_BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y. Parameters that are not named here are as in `matmul_ogs`.

    WEIGHT_N: rows of one weight matrix (2N for gate and up together). X_ELEMENT None: x is not quantised. X_COLUMNS: D,
    or more with the zeros of `order_columns`. ORDER, X_ORDER: of columns, see `weight_tile`. GROUP, X_GROUP: columns
    that share a scale, GROUP_ROWS: weight rows that do, 0: all. *_MATRIX, *_N, *_K: strides of one expert's matrix, of
    a weight row (scales: of a group of rows) and of a column (a byte, a group). DOT: operands, `e4m3` or `int8` codes,
    else numbers. UNIFORM: weight rows of one side of a tile share scales. TOKENS_FIRST: rows of x are the left operand.
    DRAINED: see `multiply`. maxima int32 `[MAXIMA]`, if not None: shared by programs and raised to the bits
    of the largest magnitudes of y.
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
    layer_number, layer_exists = layer_in_stack(layer_index, NUM_LAYERS)
    layer_number = layer_number.to(tl.int64)
    matrix = layer_number * NUM_EXPERTS + tl.cast(expert, tl.int64)

    # Weight rows of this tile. Gated: 8 of the gate, 8 of up, ..., so that a thread holds both of a pair.
    PAIRED: tl.constexpr = GATE_LAYOUT is not None
    place = tl.arange(0, 2 * BLOCK_N if PAIRED else BLOCK_N)
    if PAIRED:
        side = place // 8 % 2
        column = tile * BLOCK_N + place // 16 * 8 + place % 8
    else:
        side = place * 0
        column = tile * BLOCK_N + place
    column_exists = column < N
    # Columns behind the last one repeat it and are never stored.
    n = weight_row(tl.minimum(column, N - 1), side, N, GATE_LAYOUT)
    values = values_of(weight, ELEMENT, DOT)
    weight_rows = matrix_rows(values, up, matrix, n, side, VALUE_MATRIX, VALUE_N)
    scale_rows, scale_rows_1 = scale_pointers(
        scales, up_scales, matrix, n, side, tile * BLOCK_N, SCALE_MATRIX, SCALE_N, N, GROUP_ROWS, GATE_LAYOUT, UNIFORM
    )
    if zero_points is not None:
        point_n = n // 2 if ELEMENT == "uint4" else n
        point_rows = matrix_rows(zero_points, up_zero_points, matrix, point_n, side, POINT_MATRIX, POINT_N)

    layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
    rows, exists, slots = rows_of_block(block, expert, layout, schedule, BLOCK_M, SCATTER, CACHE)
    x_row = source_rows(rows, slots, GATHER, TOP_K)
    if JOIN == "layout":
        join(JOIN)
    x_rows = values_of(x, X_ELEMENT, DOT) + x_row * X_STRIDE
    x_scale_rows = None
    x_scale = 1.0
    if x_scales is not None:
        x_scale_rows = x_scales + tl.where(exists, x_row, 0) * X_SCALE_STRIDE
        x_scale = of_block(x_scale_rows, 0, D, X_GROUP, 1)

    # Read scales and zero points one step ahead: nothing else hides their latency.
    scale = scales_at(scale_rows, 0, SCALING, D, GROUP, SCALE_K, BLOCK_K)
    scale_1 = scale
    if UNIFORM and PAIRED:
        scale_1 = scales_at(scale_rows_1, 0, SCALING, D, GROUP, SCALE_K, BLOCK_K)
    zero = tl.full((1, 1), 128 if ELEMENT == "uint8" else 8, tl.uint8)
    if zero_points is not None:
        zero = per_group(point_rows, 0, D, GROUP, POINT_K, BLOCK_K)
    sums: tl.constexpr = tl.int32 if (DOT == "int8") and (SCALING == "at_end") else tl.float32
    if TOKENS_FIRST:
        total = tl.zeros((BLOCK_M, place.shape[0]), dtype=sums)
    else:
        total = tl.zeros((place.shape[0], BLOCK_M), dtype=sums)
    for start in range(0, D, BLOCK_K):
        next_scale, next_scale_1, next_zero, next_x_scale = scale, scale_1, zero, x_scale
        if GROUP > 0:
            next_scale = scales_at(scale_rows, start + BLOCK_K, SCALING, D, GROUP, SCALE_K, BLOCK_K)
            if UNIFORM and PAIRED:
                next_scale_1 = scales_at(scale_rows_1, start + BLOCK_K, SCALING, D, GROUP, SCALE_K, BLOCK_K)
            if zero_points is not None:
                next_zero = per_group(point_rows, start + BLOCK_K, D, GROUP, POINT_K, BLOCK_K)
        if (X_GROUP > 0) and (SCALING == "per_block"):
            next_x_scale = of_block(x_scale_rows, start + BLOCK_K, D, X_GROUP, 1)
        if (DOT == "e4m3") or (DOT == "int8"):
            w_tile = plain_tile(weight_rows, start, None, D, VALUE_K, BLOCK_K)
            x_tile = plain_tile(x_rows, start, exists, X_COLUMNS, 1, BLOCK_K)
        else:
            w_tile = weight_tile(
                weight_rows, scale, zero_point(zero, n, ELEMENT), start, DOT, ELEMENT, SCALING, ORDER, D, VALUE_K,
                BLOCK_K,
            )  # fmt: skip
            x_tile = activation_tile(
                x_rows, x_scale_rows, exists, start, X_ELEMENT, SCALING, X_COLUMNS, X_GROUP, BLOCK_K
            )
            x_tile = ordered(x_tile, X_ORDER)
        if TOKENS_FIRST:
            left, right = x_tile, tl.trans(w_tile)
        else:
            left, right = w_tile, tl.trans(x_tile)
        if SCALING == "per_block":
            partial = tl.dot(left, right, input_precision=INPUT_PRECISION)
            total += partial * factor_of(scale, scale_1, x_scale, side, x_scales is not None, UNIFORM, TOKENS_FIRST)
        elif (DOT == "e4m3") and not FAST_ACCUMULATE:
            total = tl.dot(left, right, total, max_num_imprecise_acc=BLOCK_K)
        elif DOT == "int8":
            total = tl.dot(left, right, total, out_dtype=tl.int32)
        else:
            total = tl.dot(left, right, total, input_precision=INPUT_PRECISION)
        if DRAINED:
            total = drained(total)
        scale, scale_1, zero, x_scale = next_scale, next_scale_1, next_zero, next_x_scale
    if SCALING == "at_end":
        factor = factor_of(scale, scale_1, x_scale, side, x_scales is not None, UNIFORM, TOKENS_FIRST)
        total = total.to(tl.float32) * factor
    if TOKENS_FIRST:
        total = tl.trans(total)
    if tail_low is not None:
        if JOIN == "tail":
            join(JOIN)
        tail = Tail(
            tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed, TAIL_RANK, TAIL_SLOTS, TAIL_NUM_EXPERTS,
            TAIL_SLOT_STRIDE, TAIL_EXPERT_STRIDE, TAIL_R_STRIDE, TAIL_N_STRIDE, TAIL_THRESHOLD, TAIL_MASKED, TAIL_SALT,
            TAIL_BLOCK_R,
        )  # fmt: skip
        tail_columns = n + side * N if GATE_LAYOUT == "separate" else n
        total = add_tail(
            total, rows, slots, exists, expert, tail_columns, column_exists, tail, TOP_K, INPUT_PRECISION, True, DRAINED
        )

    total = add_bias(
        total, bias, up_bias, layer_number, expert, n, side, column_exists, WEIGHT_N, BIAS_LAYER_STRIDE,
        UP_BIAS_LAYER_STRIDE, GATE_LAYOUT == "separate",
    )  # fmt: skip
    if pre is not None:
        pre_columns = n + side * N if GATE_LAYOUT == "separate" else n
        pre_width: tl.constexpr = 2 * N if PAIRED else N
        pre_mask = exists[None, :] & column_exists[:, None]
        tl.store(pre + rows[None, :] * pre_width + pre_columns[:, None], total.to(pre.dtype.element_ty), mask=pre_mask)
    if y is not None:
        epilogue = Epilogue(row_weight, GATE_LAYOUT, ACTIVATION, ALPHA, LIMIT, None, maxima)
        output = Output(y, N=N, SCATTER=SCATTER)
        store_result(
            total, rows, exists, slots, tile, layer_exists, layout, schedule, epilogue, output,
            layer_index is not None, MAXIMA,
        )  # fmt: skip


@triton.jit
def order_columns(
    x, x_scales, ordered_x, num_rows,
    D: tl.constexpr, ELEMENT: tl.constexpr, STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, GROUP: tl.constexpr,
    SCALING: tl.constexpr, ORDER: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write x as numbers, with columns in the order of decoded weights, padded with zeros to WIDTH."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < num_rows
    start = tl.program_id(1) * BLOCK_K
    scale_rows = None
    if SCALING == "into_weight" and ELEMENT is not None:
        scale_rows = x_scales + tl.where(exists, rows, 0) * SCALE_STRIDE
    x_rows = values_of(x, ELEMENT, None) + rows * STRIDE
    tile = activation_tile(x_rows, scale_rows, exists, start, ELEMENT, SCALING, D, GROUP, BLOCK_K)
    columns = start + tl.arange(0, BLOCK_K)
    tl.store(ordered_x + rows[:, None] * WIDTH + columns[None, :], ordered(tile, ORDER), mask=exists[:, None])
