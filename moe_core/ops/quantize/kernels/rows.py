"""Quantise rows of activations with the bits of `moe_core.ops.quantize.reference`: fp32, each step rounded once."""

import triton
import triton.language as tl

from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.quantize.kernels.decode import e8m0_to_bfloat16


@triton.jit
def magnitude_bits(values):
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def up_to_power_of_two(values):
    return (values.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000


@triton.jit
def choose_scale(bits, RULE: tl.constexpr, LARGEST: tl.constexpr, TOP_EXPONENT: tl.constexpr):
    """Return scales of groups from the bits of amax: fp32, or uint8 for the rules `floor` and `ceil`."""
    usable = bits < 0x7F800000
    amax = tl.where(usable, bits, 0x3F800000).to(tl.float32, bitcast=True)
    if (RULE == "amax") or (RULE == "power_of_two"):
        scale = tl.div_rn(tl.maximum(amax, 1e-10), tl.full(amax.shape, LARGEST, tl.float32))
        if RULE == "power_of_two":
            scale = up_to_power_of_two(scale).to(tl.float32, bitcast=True)
        return tl.where(usable, scale, float("nan"))
    else:
        if RULE == "floor":
            exponent = (amax.to(tl.int32, bitcast=True) >> 23) - TOP_EXPONENT
        else:
            tl.static_assert(RULE == "ceil", "unknown rule")
            quotient = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
            exponent = up_to_power_of_two(quotient) >> 23
        exponent = tl.where(amax == 0.0, 127, tl.maximum(exponent, 0))
        return tl.where(usable, exponent, 255).to(tl.uint8)


@triton.jit
def number_of_scale(scale):
    if scale.dtype == tl.uint8:
        return e8m0_to_bfloat16(scale).to(tl.float32)
    else:
        return scale


@triton.jit
def rounded(values):
    """Round fp32 within 2^22 to integers, half to even, by shifting the fraction out."""
    return (values + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def encode(quotients, ELEMENT: tl.constexpr):
    """Return int32 codes of fp32 numbers, saturating: e4m3 (NaN stays NaN), e2m1 or int8 (NaN is 0)."""
    bits = magnitude_bits(quotients)
    negative = (quotients.to(tl.int32, bitcast=True) >> 31) & 1
    if ELEMENT == "e4m3":
        size = tl.minimum(bits, 0x43E00000)
        # Below 2^-6 codes are 2^-9 apart, as fp32 numbers behind 2^14. Above, 3 mantissa bits stay.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xFF
        large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        codes = tl.where(size < 0x3C800000, small, large)
        return tl.where(bits > 0x7F800000, 0x7F, codes | (negative << 7))
    elif ELEMENT == "e2m1":
        usable = bits <= 0x7F800000
        size = tl.minimum(tl.where(usable, bits, 0), 0x40C00000).to(tl.float32, bitcast=True)
        # Codes are 1/2 apart up to 2 (code 4), 1 apart up to 4 (code 6), then 2.
        large = tl.where(size < 4.0, rounded(size) + 2, rounded(size * 0.5) + 4)
        codes = tl.where(size < 2.0, rounded(size * 2.0), large)
        return codes | tl.where(usable, negative << 3, 0)
    else:
        tl.static_assert(ELEMENT == "int8", "unknown element")
        size = tl.minimum(tl.where(bits <= 0x7F800000, bits, 0), 0x42FE0000).to(tl.float32, bitcast=True)
        return tl.where(negative == 1, -rounded(size), rounded(size))


@triton.jit
def quotient(values, scale, usable):
    divisor = number_of_scale(scale)
    return tl.where(usable & (divisor > 0.0), tl.div_rn(values, divisor), 0.0)


@triton.jit
def refined_quotient(values, divisor, reciprocal):
    """values / divisor, correctly rounded (Markstein 1990), for positive divisors and rounded reciprocals. The second
    remainder is exact, so the last step rounds right, except for values so small that their code is 0."""
    near = values * reciprocal
    near = tl.fma(tl.fma(-near, divisor, values), reciprocal, near)
    near = tl.fma(tl.fma(-near, divisor, values), reciprocal, near)
    # A sum of both zeros is positive, so -0 has lost its sign.
    sign = values.to(tl.int32, bitcast=True) & -0x80000000
    return (near.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def comfortable_divisor(scale):
    """Return (factor, divisor) with values / scale = values * factor / divisor for positive scales. The reciprocal of
    the divisor is a normal number. Factors are powers of two, 0 for an infinite scale."""
    factor = tl.where(scale < 2.0**-62, 2.0**64, tl.where(scale > 2.0**62, 2.0**-64, 1.0))
    infinite = scale == float("inf")
    return tl.where(infinite, 0.0, factor), tl.where(infinite, 1.0, scale * factor)


@triton.jit
def e4m3_quotient(values, factor, divisor, reciprocal):
    """Return e4m3 numbers of values * factor / divisor. Saturating values are cut before fp32 overflows. NaN stays."""
    bound = divisor * 1024.0
    values = tl.minimum(values * factor, bound, propagate_nan=tl.PropagateNan.ALL)
    values = tl.maximum(values, -bound, propagate_nan=tl.PropagateNan.ALL)
    return refined_quotient(values, divisor, reciprocal).to(tl.float8e4nv)


@triton.jit
def codes_of(values, scale, usable, ELEMENT: tl.constexpr, CONVERTS: tl.constexpr):
    if CONVERTS:
        positive = usable & (scale > 0.0)
        factor, divisor = comfortable_divisor(tl.where(positive, scale, 1.0))
        reciprocal = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        codes = e4m3_quotient(values, factor, divisor, reciprocal).to(tl.uint8, bitcast=True)
        return tl.where(positive, codes, 0)
    else:
        return encode(quotient(values, scale, usable), ELEMENT)


@triton.jit
def even_and_odd(tile):
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    return tl.split(tl.reshape(tile, (rows, columns // 2, 2)))


@triton.jit
def store_codes(values, codes, rows, columns, inside, WIDTH: tl.constexpr, ELEMENT: tl.constexpr):
    """Store codes [rows, columns] to rows with WIDTH columns, from an even column on."""
    if ELEMENT == "e2m1":
        low, high = even_and_odd(codes)
        exists, _ = even_and_odd(inside.to(tl.int32))
        first, _ = even_and_odd(columns[None, :])
        pointers = values + rows[:, None] * (WIDTH // 2) + first // 2
        tl.store(pointers, (low | (high << 4)).to(tl.uint8), mask=exists != 0)
    else:
        pointers = values.to(tl.pointer_type(tl.uint8), bitcast=True) + rows[:, None] * WIDTH + columns[None, :]
        tl.store(pointers, codes.to(tl.uint8), mask=inside)


@triton.jit
def load_rows(x, rows, columns, inside, STRIDE: tl.constexpr):
    return tl.load(x + rows[:, None] * STRIDE + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def used_rows(used_by, rows, num_rows, USERS: tl.constexpr):
    exists = rows < num_rows
    if used_by is None:
        return exists
    else:
        last = tl.full(rows.shape, -1, tl.int32)
        for user in range(USERS):
            last = tl.maximum(last, tl.load(used_by + rows * USERS + user, mask=exists, other=-1))
        return last >= 0


@triton.jit
def quantize_groups(
    x, used_by, values, scales, num_rows,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, USERS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ELEMENT: tl.constexpr, CONVERTS: tl.constexpr, RULE: tl.constexpr, LARGEST: tl.constexpr,
    TOP_EXPONENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantise GROUPS groups of GROUP columns, one group of BLOCK_M rows per program. Unused rows are not read and
    count as zeros. BLOCK_K: GROUP rounded up to a power of two."""
    join(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < num_rows
    group = tl.program_id(1)
    within = tl.arange(0, BLOCK_K)
    columns = group * GROUP + within
    inside = exists[:, None] & ((within < GROUP) & (columns < WIDTH))[None, :]
    used = used_rows(used_by, rows, num_rows, USERS)
    tile = load_rows(x, rows, columns, inside & used[:, None], STRIDE)
    bits = tl.max(magnitude_bits(tile), axis=1)
    scale = choose_scale(bits, RULE, LARGEST, TOP_EXPONENT)
    tl.store(scales + rows * GROUPS + group, scale, mask=exists)
    codes = codes_of(tile, scale[:, None], (bits < 0x7F800000)[:, None], ELEMENT, CONVERTS)
    store_codes(values, codes, rows, columns, inside, WIDTH, ELEMENT)


@triton.jit
def row_maxima(x, rows, exists, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK_K: tl.constexpr):
    bits = tl.zeros(rows.shape, dtype=tl.int32)
    for start in range(0, WIDTH, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        inside = exists[:, None] & (columns < WIDTH)[None, :]
        bits = tl.maximum(bits, tl.max(magnitude_bits(load_rows(x, rows, columns, inside, STRIDE)), axis=1))
    return bits


@triton.jit
def partial_maxima(
    x, used_by, partials, num_rows, WIDTH: tl.constexpr, STRIDE: tl.constexpr, USERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partials[program] = bits of the largest magnitude of its used rows."""
    join(PDL)
    bits = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK_M
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_M, num_rows, step):
        rows = first + tl.arange(0, BLOCK_M)
        used = used_rows(used_by, rows, num_rows, USERS)
        for start in range(0, WIDTH, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            inside = used[:, None] & (columns < WIDTH)[None, :]
            bits = tl.maximum(bits, magnitude_bits(load_rows(x, rows, columns, inside, STRIDE)))
    tl.store(partials + tl.program_id(0), tl.max(tl.reshape(bits, (BLOCK_M * BLOCK_K,)), axis=0))


@triton.jit
def quantize_whole_rows(
    x, used_by, partials, given, values, scales, zeros, num_rows,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, USERS: tl.constexpr, PARTIALS: tl.constexpr, ZEROS: tl.constexpr,
    ELEMENT: tl.constexpr, CONVERTS: tl.constexpr, RULE: tl.constexpr, LARGEST: tl.constexpr,
    TOP_EXPONENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantise rows with one scale each, or all with the scale from PARTIALS maxima (a power of two) or `given`. Unused
    rows are not read and count as zeros. zeros int32 `[ZEROS]`, if not None: set to 0."""
    join(PDL)
    if zeros is not None:
        if tl.program_id(0) == 0:
            tl.store(zeros + tl.arange(0, ZEROS), tl.zeros((ZEROS,), dtype=tl.int32))
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < num_rows
    used = used_rows(used_by, rows, num_rows, USERS)
    if given is not None:
        scale = tl.load(given)
        usable = True
        tl.store(scales, scale)
    elif partials is not None:
        bits = tl.max(tl.load(partials + tl.arange(0, PARTIALS)), axis=0)
        scale = choose_scale(bits, RULE, LARGEST, TOP_EXPONENT)
        usable = bits < 0x7F800000
        tl.store(scales, scale)
    else:
        bits = row_maxima(x, rows, used, WIDTH, STRIDE, BLOCK_K)
        scale = choose_scale(bits, RULE, LARGEST, TOP_EXPONENT)
        tl.store(scales + rows, scale, mask=exists)
        scale = scale[:, None]
        usable = (bits < 0x7F800000)[:, None]
    for start in range(0, WIDTH, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        inside = exists[:, None] & (columns < WIDTH)[None, :]
        tile = load_rows(x, rows, columns, inside & used[:, None], STRIDE)
        codes = codes_of(tile, scale, usable, ELEMENT, CONVERTS)
        store_codes(values, codes, rows, columns, inside, WIDTH, ELEMENT)
