import triton
import triton.language as tl

from moe_core.ops.activation.kernels.formulas import sigmoid
from moe_core.ops.common.kernels.pdl import join


@triton.jit
def bias_product(
    d_y, bias, layer_index, group_start, slot_of_row, products, num_rows, num_slots,
    WIDTH: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_LAYERS: tl.constexpr, D_Y_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """products[slot] = <d_y[token], bias[expert]> for slots of BLOCK_M rows of the layout. A row's expert is the number
    of groups that end at or before it, found by comparing EXPERTS ends at a time."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows behind the last group would have expert NUM_EXPERTS.
    end = tl.minimum(tl.load(group_start + NUM_EXPERTS), num_rows)
    if tl.program_id(0) * BLOCK_M >= end:
        return
    exists = rows < end
    slots = tl.load(slot_of_row + rows, mask=exists, other=-1)
    exists = exists & (slots >= 0) & (slots < num_slots)
    experts = tl.zeros((BLOCK_M,), dtype=tl.int32)
    for first in range(0, NUM_EXPERTS, EXPERTS):
        group = first + tl.arange(0, EXPERTS)
        ends = tl.load(group_start + 1 + group, mask=group < NUM_EXPERTS, other=2147483647)
        experts += tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), axis=1)
    plane = tl.minimum(experts, NUM_EXPERTS - 1).to(tl.int64)
    if layer_index is not None:
        plane += tl.minimum(tl.maximum(tl.load(layer_index), 0), NUM_LAYERS - 1).to(tl.int64) * NUM_EXPERTS
    tokens = (slots // TOP_K).to(tl.int64)
    partial = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        mask = exists[:, None] & (columns < WIDTH)[None, :]
        gradient = tl.load(d_y + tokens[:, None] * D_Y_STRIDE + columns[None, :], mask=mask, other=0.0)
        values = tl.load(bias + plane[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
        partial += gradient.to(tl.float32) * values.to(tl.float32)
    tl.store(products + slots, tl.sum(partial, axis=1), mask=exists)


@triton.jit
def gate_weight(gate, weight, size, BLOCK: tl.constexpr):
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < size
    tl.store(weight + elements, sigmoid(tl.load(gate + elements, mask=mask, other=0.0)), mask=mask)


@triton.jit
def gate_gradient(d_weight, gate, d_gate, size, BLOCK: tl.constexpr):
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < size
    value = tl.load(gate + elements, mask=mask, other=0.0)
    upstream = tl.load(d_weight + elements, mask=mask, other=0.0)
    tl.store(d_gate + elements, upstream * (sigmoid(value) * sigmoid(-value)), mask=mask)


@triton.jit
def add(first, second, total, size, BLOCK: tl.constexpr):
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < size
    a = tl.load(first + elements, mask=mask, other=0.0)
    tl.store(total + elements, a + tl.load(second + elements, mask=mask, other=0.0), mask=mask)


@triton.jit
def gather_rows(
    x, slot_of_row, table, y, num_rows, num_tokens,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, NUMBERS: tl.constexpr,
    Y_WORDS: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[row] = x[slot_of_row[row] // TOP_K], 0 without a slot. table int32 `[rows, NUMBERS]`: copied behind rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slots = tl.load(slot_of_row + rows, mask=rows < num_rows, other=-1)
    tokens = (slots // TOP_K).to(tl.int64)
    inside = (columns < WIDTH)[None, :]
    mask = ((slots >= 0) & (tokens < num_tokens))[:, None] & inside
    value = tl.load(x + tokens[:, None] * X_STRIDE + columns[None, :], mask=mask, other=0.0)
    tl.store(y + rows[:, None] * Y_STRIDE + columns[None, :], value, mask=(rows < num_rows)[:, None] & inside)
    if table is not None:
        if tl.program_id(1) == 0:
            words = tl.arange(0, COLUMNS)[None, :]
            told = (rows < num_rows)[:, None] & (words < NUMBERS)
            numbers = tl.load(table + rows[:, None] * NUMBERS + words, mask=told, other=0)
            pointers = y.to(tl.pointer_type(tl.int32), bitcast=True) + rows[:, None] * Y_WORDS + FIRST + words
            tl.store(pointers, numbers, mask=told)


@triton.jit
def order_rows(
    x, row_of_slot, y, num_rows,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[row_of_slot[token * TOP_K + k]] = x[token]. A row of x is read once for all of its copies."""
    join(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < WIDTH
    value = tl.load(x + token * X_STRIDE + columns, mask=inside, other=0.0)
    for k in range(TOP_K):
        row = tl.load(row_of_slot + token * TOP_K + k).to(tl.int64)
        tl.store(y + row * WIDTH + columns, value, mask=inside & (row >= 0) & (row < num_rows))


@triton.jit
def cast_rows(x, y, num_rows, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    offsets = rows[:, None] * WIDTH + columns[None, :]
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + offsets, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def weighted_input(
    d_rows, x, row_of_slot, weights, extra, d_x, d_weight, num_tokens, num_rows,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of x[t] * w[t], K = 1: d_x[t] = cast(w[t] d_row + extra[t]), d_weight[t] = <d_row, x[t]>. d_row: the
    token's row of d_rows. A token without one reads no row, x or w, and contributes zeros."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = tokens < num_tokens
    rows = tl.load(row_of_slot + tokens, mask=inside, other=-1).to(tl.int64)
    present = inside & (rows >= 0) & (rows < num_rows)
    weight = tl.load(weights + tokens, mask=present, other=0.0)
    partial = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)[None, :]
        mask = present[:, None] & (columns < WIDTH)
        gradient = tl.load(d_rows + rows[:, None] * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        if d_weight is not None:
            partial += gradient * tl.load(x + tokens[:, None] * X_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        if d_x is not None:
            here = tokens[:, None] * WIDTH + columns
            written = inside[:, None] & (columns < WIDTH)
            total = weight[:, None] * gradient
            if extra is not None:
                total += tl.load(extra + here, mask=written, other=0.0)
            tl.store(d_x + here, total.to(d_x.dtype.element_ty), mask=written)
    if d_weight is not None:
        tl.store(d_weight + tokens, tl.sum(partial, axis=1), mask=inside)
