"""Ragged grouped matmul with quantised weights transposed, for gradients, decoded to x's dtype with one rounding."""

import triton
import triton.language as tl

from moe_core.ops.common.kernels.aggregates import Layout, aggregate_of
from moe_core.ops.common.kernels.layer import layer_in_stack
from moe_core.ops.common.kernels.rows import source_rows
from moe_core.ops.lora.kernels.tail import Tail, add_tail
from moe_core.ops.matmul.portable.kernel import filled_rows, rows_of_block, target_rows, tile_of_program
from moe_core.ops.quantize.kernels.decode import (
    codes_to_bfloat16,
    group_of_row,
    load_codes,
    number_of,
    per_group,
    plain_tile,
    scaled,
    spread,
    zero_point,
)

#: Matrices of D rows and N columns as codes. Fields as in `matmul_quantized_transposed`.
Codes = aggregate_of(
    "Codes",
    """values scales zero_points D N ELEMENT GROUP_ROWS GROUP VALUE_MATRIX VALUE_N VALUE_K SCALE_MATRIX SCALE_N
    SCALE_K POINT_MATRIX POINT_N POINT_K""",
)


@triton.jit
def add_product(
    total, x_rows, exists, codes, matrix, column, DOT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = codes.D
    N: tl.constexpr = codes.N
    ELEMENT: tl.constexpr = codes.ELEMENT
    GROUP: tl.constexpr = codes.GROUP
    # Bytes: sm_80 has no e4m3, and int8 codes are decoded from their bits.
    values = codes.values.to(tl.pointer_type(tl.uint8), bitcast=True) + matrix * codes.VALUE_MATRIX
    zero_points = None
    if codes.zero_points is not None:
        zero_points = codes.zero_points + matrix * codes.POINT_MATRIX
    scales = codes.scales + matrix * codes.SCALE_MATRIX
    PER_BYTE: tl.constexpr = 2 if (ELEMENT == "uint4") or (ELEMENT == "e2m1") else 1
    POINT_ROWS: tl.constexpr = 2 if ELEMENT == "uint4" else 1
    offsets = tl.arange(0, BLOCK_K)
    n = tl.minimum(offsets, D - 1)
    scale = per_group(
        scales + group_of_row(n, codes.GROUP_ROWS) * codes.SCALE_N, column, N, GROUP, codes.SCALE_K, BLOCK_N
    )
    zero = tl.full((1, 1), 128 if ELEMENT == "uint8" else 8, tl.uint8)
    if zero_points is not None:
        zero = per_group(zero_points + n // POINT_ROWS * codes.POINT_N, column, N, GROUP, codes.POINT_K, BLOCK_N)
    for start in range(0, D, BLOCK_K):
        # Read scales and zero points one step ahead: nothing else hides their latency.
        n = tl.minimum(start + BLOCK_K + offsets, D - 1)
        next_scale, next_zero = scale, zero
        if codes.GROUP_ROWS > 0:
            next_scale = per_group(
                scales + group_of_row(n, codes.GROUP_ROWS) * codes.SCALE_N, column, N, GROUP, codes.SCALE_K, BLOCK_N
            )
        if zero_points is not None:
            next_zero = per_group(
                zero_points + n // POINT_ROWS * codes.POINT_N, column, N, GROUP, codes.POINT_K, BLOCK_N
            )
        n = start + offsets
        if D % BLOCK_K != 0:
            n = tl.minimum(n, D - 1)
        loaded = load_codes(values + n * codes.VALUE_N, column, None, N, codes.VALUE_K, PER_BYTE, BLOCK_N)
        points = spread(zero_point(zero, n, ELEMENT), BLOCK_N)
        numbers = codes_to_bfloat16(loaded, ELEMENT)
        w_tile = scaled(numbers, spread(number_of(scale), BLOCK_N), points, DOT, ELEMENT, "into_weight")
        if D % BLOCK_K != 0:
            # Copies of the last row: their NaN or infinity would survive a product with zero.
            w_tile = tl.where((start + offsets < D)[:, None], w_tile, 0.0)
        x_tile = plain_tile(x_rows, start, exists, D, 1, BLOCK_K)
        total = tl.dot(x_tile, w_tile, total, input_precision=INPUT_PRECISION)
        scale, zero = next_scale, next_zero
    return total


@triton.jit
def matmul_quantized_transposed(
    x, weight, scales, zero_points, up, up_scales, up_zero_points, layer_index,
    group_sizes, group_start, slot_of_row, schedule, y, num_blocks, num_rows, num_slots,
    D: tl.constexpr, N: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_LAYERS: tl.constexpr, X_STRIDE: tl.constexpr,
    ELEMENT: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    VALUE_MATRIX: tl.constexpr, VALUE_N: tl.constexpr, VALUE_K: tl.constexpr,
    SCALE_MATRIX: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr,
    POINT_MATRIX: tl.constexpr, POINT_N: tl.constexpr, POINT_K: tl.constexpr,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, DOT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed,
    TAIL_RANK: tl.constexpr, TAIL_SLOTS: tl.constexpr, TAIL_NUM_EXPERTS: tl.constexpr, TAIL_SLOT_STRIDE: tl.constexpr,
    TAIL_EXPERT_STRIDE: tl.constexpr, TAIL_R_STRIDE: tl.constexpr, TAIL_N_STRIDE: tl.constexpr,
    TAIL_THRESHOLD: tl.constexpr, TAIL_MASKED: tl.constexpr, TAIL_SALT: tl.constexpr, TAIL_BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y. D: rows of one weight matrix, the addends. N: columns. Others: `matmul_quantized`."""
    block, tile = tile_of_program(tl.program_id(0), num_blocks, (N + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    expert = 0
    if schedule is not None:
        expert = tl.load(schedule + 2 * block + 1)
        if expert < 0:
            return
    layer_number, layer_exists = layer_in_stack(layer_index, NUM_LAYERS)
    matrix = layer_number.to(tl.int64) * NUM_EXPERTS + tl.cast(expert, tl.int64)

    layout = Layout(group_sizes, group_start, slot_of_row, num_rows, num_slots, TOP_K)
    rows, exists, slots = rows_of_block(block, expert, layout, schedule, BLOCK_M, SCATTER, "")
    x_rows = x + source_rows(rows, slots, GATHER, TOP_K) * X_STRIDE

    column = tile * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    codes = Codes(
        weight, scales, zero_points, D, N, ELEMENT, GROUP_ROWS, GROUP, VALUE_MATRIX, VALUE_N, VALUE_K, SCALE_MATRIX,
        SCALE_N, SCALE_K, POINT_MATRIX, POINT_N, POINT_K,
    )  # fmt: skip
    total = add_product(total, x_rows, exists, codes, matrix, column, DOT, INPUT_PRECISION, BLOCK_N, BLOCK_K)
    if up is not None:
        codes = Codes(
            up, up_scales, up_zero_points, D, N, ELEMENT, GROUP_ROWS, GROUP, VALUE_MATRIX, VALUE_N, VALUE_K,
            SCALE_MATRIX, SCALE_N, SCALE_K, POINT_MATRIX, POINT_N, POINT_K,
        )  # fmt: skip
        total = add_product(total, x_rows + D, exists, codes, matrix, column, DOT, INPUT_PRECISION, BLOCK_N, BLOCK_K)
    columns = column + tl.arange(0, BLOCK_N)
    if tail_low is not None:
        tail = Tail(
            tail_low, tail_factor, tail_virtual_start, tail_ranks, tail_seed, TAIL_RANK, TAIL_SLOTS, TAIL_NUM_EXPERTS,
            TAIL_SLOT_STRIDE, TAIL_EXPERT_STRIDE, TAIL_R_STRIDE, TAIL_N_STRIDE, TAIL_THRESHOLD, TAIL_MASKED, TAIL_SALT,
            TAIL_BLOCK_R,
        )  # fmt: skip
        total = add_tail(total, rows, slots, exists, expert, columns, columns < N, tail, TOP_K, INPUT_PRECISION)

    exists, slots = filled_rows(layout, schedule, rows, exists, slots)
    if layer_index is not None:
        total = tl.where(layer_exists, total, float("nan"))
    targets, exists = target_rows(y, rows, slots, exists, N, SCATTER)
    pointers = targets[:, None] + columns[None, :]
    mask = exists[:, None] & (columns < N)[None, :]
    tl.store(pointers, total.to(pointers.dtype.element_ty), mask=mask)
