"""Kernels of tests/runtime/test_interpreter.py and tests/ops/matmul/sm90/test_tall.py; a kernel's source must be in a
file."""

# Triton's language is not typed: a number of a kernel is a tensor, and a constant may be a plain value.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from moe_core.ops.routing.kernels.schedule import even_block


@triton.jit
def cut_kernel(sizes, before, firsts, rows, MOST: tl.constexpr):
    """firsts and rows `[., MOST]` of the row blocks of 3 chunks of 64 rows of each group, from block `before` on."""
    group = tl.program_id(0)
    size = tl.load(sizes + group)
    places = tl.arange(0, MOST)
    blocks = tl.maximum(tl.cdiv(size, 192), 1)
    first, height = even_block(size, tl.load(before + group) + places, blocks, 64, 3)
    tl.store(firsts + group * MOST + places, first)
    tl.store(rows + group * MOST + places, height)


@triton.jit
def libdevice_kernel(output):
    tl.store(output + tl.arange(0, 4), libdevice.tanh(tl.load(output + tl.arange(0, 4))))


@triton.jit
def assembly_kernel(output):
    value = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [tl.load(output + tl.arange(0, 4))], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(output + tl.arange(0, 4), value)


@triton.jit
def grid_kernel(output, offset, scale):
    x = tl.program_id(0)
    y = tl.program_id(1)
    z = tl.program_id(2)
    value = (x * 100 + y * 10 + z).to(tl.float32) * scale
    index = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(output + index, offset + value.to(tl.int64))


@triton.jit
def optional_kernel(output, mask, bias):
    offsets = tl.arange(0, 4)
    value = tl.where(tl.load(mask + offsets) != 0, 1, 0)
    if bias is not None:
        value += tl.load(bias + offsets)
    tl.store(output + offsets, value)


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def silu_plus_sum(x):
    return silu(x) + tl.sum(x)


@triton.jit
def nested_kernel(output):
    offsets = tl.arange(0, 8)
    tl.store(output + offsets, silu_plus_sum(offsets.to(tl.float32)))


@triton.jit
def later_of_the_largest(left, left_position, right, right_position):
    keep = left > right
    return tl.where(keep, left, right), tl.where(keep, left_position, right_position)


@triton.jit
def larger(left, right):
    return tl.where(left > right, left, right)


@triton.jit
def combine_kernel(v, b, p, s, AXIS: tl.constexpr):
    rows = tl.arange(0, 8)[:, None]
    columns = tl.arange(0, 16)[None, :]
    offsets = rows * 16 + columns
    values = tl.load(v + offsets)
    positions = tl.broadcast_to(rows if AXIS == 0 else columns, (8, 16))
    best, last = tl.reduce((values, positions), AXIS, later_of_the_largest)
    results = tl.arange(0, 16 if AXIS == 0 else 8)
    tl.store(b + results, best)
    tl.store(p + results, last)
    tl.store(s + offsets, tl.associative_scan(values, AXIS, larger, reverse=True))


@triton.jit
def failing_kernel(BAD: tl.constexpr):
    if tl.program_id(0) == BAD:
        tl.static_print(1 // (BAD - 2))


@triton.jit
def slow_kernel(output, number):
    program = tl.program_id(0)
    value = tl.load(output + program)
    tl.store(output + tl.program_id(0), value + program * 10 + number)


@triton.jit
def descriptor_kernel(output, source, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    read = tl.make_tensor_descriptor(source, [ROWS, COLUMNS], [COLUMNS, 1], [4, 16])
    write = tl.make_tensor_descriptor(output, [ROWS, COLUMNS], [COLUMNS, 1], [4, 16])
    write.store([4, 16], read.load([0, 16]) * 2.0)


@triton.jit
def exchange_kernel(output, expected, replacement, EXCHANGE: tl.constexpr):
    offsets = tl.arange(0, 4)
    before = tl.atomic_cas(output + offsets, tl.load(expected + offsets), tl.load(replacement + offsets))
    if EXCHANGE:
        tl.atomic_xchg(output + 4 + offsets, before)
    else:
        tl.store(output + 4 + offsets, before)
    count = 0
    while count < 3:
        count += 1
    tl.atomic_add(output + 8, count.to(output.dtype.element_ty))


@triton.jit
def sort_kernel(output, source):
    offsets = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    values = tl.load(source + offsets)
    tl.store(output + offsets, tl.sort(values, descending=True))
    tl.store(output + 32 + offsets, tl.flip(tl.cumsum(values, axis=1), 1))


@triton.jit
def add_one_kernel(output):
    """Every program adds one to four elements of its own."""
    places = output + tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(places, tl.load(places) + 1)


@triton.jit
def operands_kernel(output, zeros, a, flag):
    """Every pair of a scalar, a row, a column, and a number; what comes first is now the narrower, now the wider."""
    rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    offsets = rows * 8 + columns
    small = tl.load(tl.arange(0, 8) + a)[None, :]
    chosen = tl.where(tl.load(flag) != 0, small, rows.to(tl.uint8))
    tl.store(output + offsets, 300 - (columns - rows) * 2 + small + chosen.to(tl.int64))
    one = tl.load(flag).to(tl.float32)
    tl.store(zeros + tl.arange(0, 2), tl.where(tl.arange(0, 2) == 0, one * 0.0, one * -0.0))


@triton.jit
def misfit_kernel():
    tl.static_print(tl.arange(0, 4) + tl.arange(0, 8))
