"""Backward of activations, and between matmuls also of the row weight, in fp32."""

import triton
import triton.language as tl

from moe_core.ops.activation.kernels.formulas import gated_backward, value_and_slope


@triton.jit
def load_gate_up(
    x, up, base, up_base, first, inside, WIDTH: tl.constexpr, GATE_LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return (gate, up) in fp32 of BLOCK_N columns from `first`."""
    columns = first + tl.arange(0, BLOCK_N)[None, :]
    mask = inside[:, None] & (columns < WIDTH)
    if GATE_LAYOUT == "interleaved":
        # Load both columns of a pair at once: separate loads would waste half of each access.
        pairs = 2 * first + tl.arange(0, 2 * BLOCK_N)[None, :]
        both = tl.load(x + base + pairs, mask=inside[:, None] & (pairs < 2 * WIDTH), other=0.0).to(tl.float32)
        gate, second = tl.split(tl.reshape(both, (both.shape[0], BLOCK_N, 2)))
    else:
        gate = tl.load(x + base + columns, mask=mask, other=0.0).to(tl.float32)
        if GATE_LAYOUT == "separate":
            second = tl.load(up + up_base + columns, mask=mask, other=0.0).to(tl.float32)
        else:
            second = tl.load(x + base + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    return gate, second


@triton.jit
def store_gate_up(d_gate, d_up, d_x, d_second, base, first, inside, WIDTH: tl.constexpr, GATE_LAYOUT: tl.constexpr):
    BLOCK_N: tl.constexpr = d_gate.shape[1]
    columns = first + tl.arange(0, BLOCK_N)[None, :]
    mask = inside[:, None] & (columns < WIDTH)
    if GATE_LAYOUT == "interleaved":
        pairs = 2 * first + tl.arange(0, 2 * BLOCK_N)[None, :]
        both = tl.reshape(tl.join(d_gate, d_up), (d_gate.shape[0], 2 * BLOCK_N))
        tl.store(d_x + base + pairs, both.to(d_x.dtype.element_ty), mask=inside[:, None] & (pairs < 2 * WIDTH))
    else:
        tl.store(d_x + base + columns, d_gate.to(d_x.dtype.element_ty), mask=mask)
        if GATE_LAYOUT == "separate":
            tl.store(d_second + base + columns, d_up.to(d_second.dtype.element_ty), mask=mask)
        else:
            tl.store(d_x + base + WIDTH + columns, d_up.to(d_x.dtype.element_ty), mask=mask)


@triton.jit
def activation_backward(
    d_y, x, up, d_x, d_up, num_rows,
    WIDTH: tl.constexpr, D_Y_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr,
    GATE_LAYOUT: tl.constexpr, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """d_x and d_up of y = activation(x, up). GATE_LAYOUT None: ungated."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)[None, :]
    inside = rows < num_rows
    mask = inside[:, None] & (columns < WIDTH)
    gradient = tl.load(d_y + rows[:, None] * D_Y_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
    base = rows[:, None] * X_STRIDE
    if GATE_LAYOUT is None:
        _, slope = value_and_slope(tl.load(x + base + columns, mask=mask, other=0.0).to(tl.float32), NAME)
        result = (gradient * slope).to(d_x.dtype.element_ty)
        tl.store(d_x + rows[:, None] * WIDTH + columns, result, mask=mask)
    else:
        gate, second = load_gate_up(x, up, base, rows[:, None] * UP_STRIDE, first, inside, WIDTH, GATE_LAYOUT, BLOCK_N)
        _, d_gate, d_second = gated_backward(gradient, gate, second, NAME, ALPHA, LIMIT)
        OUT_WIDTH: tl.constexpr = WIDTH if GATE_LAYOUT == "separate" else 2 * WIDTH
        store_gate_up(d_gate, d_second, d_x, d_up, rows[:, None] * OUT_WIDTH, first, inside, WIDTH, GATE_LAYOUT)


@triton.jit
def expert_activation_backward(
    d_hidden, pre, row_of_slot, row_weight, bias_product, slot_of_row, d_pre, weighted_hidden, d_weight, num_slots,
    num_rows,
    WIDTH: tl.constexpr, GATE_LAYOUT: tl.constexpr, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_M slots (rows, with slot_of_row), all columns in order. Without a row: nothing read, d_weight 0."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, present = slots, slots < num_slots
    if slot_of_row is not None:
        if d_weight is not None:
            places = tl.load(row_of_slot + slots, mask=present, other=0)
            tl.store(d_weight + slots, 0.0, mask=present & ((places < 0) | (places >= num_rows)))
        slots = tl.load(slot_of_row + rows, mask=rows < num_rows, other=-1).to(tl.int64)
        present = (slots >= 0) & (slots < num_slots)
        if tl.max(present.to(tl.int32), axis=0) == 0:
            return
    weight = tl.full((BLOCK_M,), 1.0, tl.float32)
    if row_weight is not None:
        weight = tl.load(row_weight + slots, mask=present, other=0.0)
    products = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    IN_WIDTH: tl.constexpr = WIDTH if GATE_LAYOUT is None else 2 * WIDTH
    base = rows[:, None] * IN_WIDTH
    for first in range(0, WIDTH, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)[None, :]
        if GATE_LAYOUT == "interleaved":
            # A thread's 16 bytes hold the pairs of 4 columns. With 4 columns of other arrays threads exchange nothing.
            columns = tl.max_contiguous(columns, [1, 4])
        here = rows[:, None] * WIDTH + columns
        mask = present[:, None] & (columns < WIDTH)
        z = tl.load(d_hidden + here, mask=mask, other=0.0).to(tl.float32)
        upstream = weight[:, None] * z
        if GATE_LAYOUT is None:
            hidden, slope = value_and_slope(tl.load(pre + base + columns, mask=mask, other=0.0).to(tl.float32), NAME)
            tl.store(d_pre + here, (upstream * slope).to(d_pre.dtype.element_ty), mask=mask)
        else:
            gate, up = load_gate_up(pre, pre, base, base, first, present, WIDTH, GATE_LAYOUT, BLOCK_N)
            hidden, d_gate, d_up = gated_backward(upstream, gate, up, NAME, ALPHA, LIMIT)
            store_gate_up(d_gate, d_up, d_pre, d_pre, base, first, present, WIDTH, GATE_LAYOUT)
        if d_weight is not None:
            products += z * hidden
        if weighted_hidden is not None:
            result = (weight[:, None] * hidden).to(weighted_hidden.dtype.element_ty)
            tl.store(weighted_hidden + here, result, mask=mask)
    if d_weight is not None:
        total = tl.sum(products, axis=1)
        if bias_product is not None:
            total += tl.load(bias_product + slots, mask=present, other=0.0)
        tl.store(d_weight + slots, total, mask=present)
