from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.ops.quantize.kernels.rows import (
    comfortable_divisor,
    e4m3_quotient,
    magnitude_bits,
    refined_quotient,
    up_to_power_of_two,
)


@gluon.jit
def quantize_tile(values, scales, tile, FIRST: gl.constexpr, N: gl.constexpr, RULE: gl.constexpr):
    """Return rows times 128 columns of fp32 numbers that fit 16 bits as e4m3 numbers, and write a scale for each row.

    scales fp32 `[rows, ceil(N / 128)]`, by layout row. RULE: see `quantize_rows.choose_scale`, which gives equal bits.
    """
    ROWS: gl.constexpr = values.shape[0]
    WIDTH: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, values.type.layout)
    bits = magnitude_bits(values)
    if N % WIDTH != 0:
        columns = tile.column * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, values.type.layout))
        bits = gl.where((columns < N)[None, :], bits, 0)
    bits = gl.max(bits, axis=1)
    usable = bits < 0x7F800000
    amax = gl.where(usable, bits, 0x3F800000).to(gl.float32, bitcast=True)
    scale = gl.div_rn(gl.maximum(amax, 1e-10), gl.full([ROWS], 448.0, gl.float32, layout))
    if RULE == "power_of_two":
        scale = up_to_power_of_two(scale).to(gl.float32, bitcast=True)
    within = FIRST + gl.arange(0, ROWS, layout)
    places = scales + (tile.start.to(gl.int64) + within) * ((N + WIDTH - 1) // WIDTH) + tile.column
    gl.store(places, gl.where(usable, scale, float("nan")), mask=within < tile.rows)
    reciprocal = gl.div_rn(gl.full([ROWS], 1.0, gl.float32, layout), scale)
    codes = gl.where(usable[:, None], refined_quotient(values, scale[:, None], reciprocal[:, None]), 0.0)
    return codes.to(gl.float8e4nv)


@gluon.jit
def quantize_by(values, given):
    """Return fp32 numbers that fit 16 bits as e4m3 numbers of one scale fp32 `[1]`, zeros if it is not positive."""
    scale = gl.load(given)
    positive = scale > 0.0
    factor, divisor = comfortable_divisor(gl.where(positive, scale, 1.0))
    reciprocal = gl.div_rn(gl.to_tensor(1.0), divisor)
    return e4m3_quotient(gl.where(positive, values, 0.0), factor, divisor, reciprocal)


@gluon.jit
def raise_maxima(values, maxima, rows, column, FIRST: gl.constexpr, N: gl.constexpr, zero=0):
    """Raise maxima int32 `[64]`, one per row of a consumer, to the bits of the largest magnitude of 128 columns from
    `column` on, of 16 bits. zero: see `store_piece`."""
    ROWS: gl.constexpr = values.shape[0]
    WIDTH: gl.constexpr = values.shape[1]
    bits = magnitude_bits(values.to(gl.float32))
    if N % WIDTH != 0:
        # The compiler sees that columns of most registers exist, and compares nothing for them.
        always = gl.arange(0, WIDTH, gl.SliceLayout(0, values.type.layout)) < N % WIDTH
        bits = gl.where((always | (column + WIDTH <= N))[None, :], bits, 0)
    bits = gl.max(bits, axis=1)
    within = zero + gl.arange(0, ROWS, gl.SliceLayout(1, values.type.layout))
    gl.atomic_max(maxima + within, bits, mask=within < rows - FIRST, sem="relaxed")
