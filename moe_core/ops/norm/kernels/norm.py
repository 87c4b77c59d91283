import triton
import triton.language as tl


@triton.jit
def _factors(weight, columns, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    factors = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if CENTRED:
        factors += 1.0
    return factors


@triton.jit
def rms_norm(
    x, weight, y, num_rows,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, EPSILON: tl.constexpr, SCALE: tl.constexpr, CENTRED: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[r] = x[r] * (mean(x[r] ** 2) + EPSILON) ** -0.5 * factors * SCALE, of BLOCK_M rows, in fp32 with one cast.
    WEIGHT_FIRST: x * factors replaces x, and no factors follow."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < num_rows)[:, None]
    partial = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)[None, :]
        mask = inside & (columns < WIDTH)
        value = tl.load(x + rows[:, None] * X_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        if WEIGHT_FIRST:
            value *= _factors(weight, columns, WIDTH, CENTRED)
        partial += value * value
    factor = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(partial, axis=1), WIDTH * 1.0) + EPSILON))[:, None]
    for first in range(0, WIDTH, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)[None, :]
        mask = inside & (columns < WIDTH)
        value = tl.load(x + rows[:, None] * X_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        factors = _factors(weight, columns, WIDTH, CENTRED)
        if WEIGHT_FIRST:
            result = value * factors * factor * SCALE
        else:
            result = value * factor * factors * SCALE
        tl.store(y + rows[:, None] * WIDTH + columns, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward(
    d_y, x, weight, d_x, products, num_rows,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, EPSILON: tl.constexpr, SCALE: tl.constexpr, CENTRED: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """d_x, cast once, and fp32 products with the column sums d_weight (None: not wanted). Formulas: the reference."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < num_rows)[:, None]
    squares = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    along = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)[None, :]
        mask = inside & (columns < WIDTH)
        value = tl.load(x + rows[:, None] * X_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        factors = _factors(weight, columns, WIDTH, CENTRED)
        gradient = tl.load(d_y + rows[:, None] * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        if WEIGHT_FIRST:
            value *= factors
            along += gradient * SCALE * value
        else:
            along += gradient * factors * SCALE * value
        squares += value * value
    factor = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(squares, axis=1), WIDTH * 1.0) + EPSILON))[:, None]
    mean = tl.div_rn(tl.sum(along, axis=1), WIDTH * 1.0)[:, None]
    for first in range(0, WIDTH, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)[None, :]
        mask = inside & (columns < WIDTH)
        here = rows[:, None] * WIDTH + columns
        value = tl.load(x + rows[:, None] * X_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(d_y + here, mask=mask, other=0.0).to(tl.float32)
        if WEIGHT_FIRST:
            factors = _factors(weight, columns, WIDTH, CENTRED)
            d_z = factor * (gradient * SCALE - value * factors * (factor * factor * mean))
            if d_x is not None:
                tl.store(d_x + here, (d_z * factors).to(d_x.dtype.element_ty), mask=mask)
            if products is not None:
                tl.store(products + here, d_z * value, mask=mask)
        else:
            if d_x is not None:
                factors = _factors(weight, columns, WIDTH, CENTRED)
                result = factor * (gradient * factors * SCALE - value * (factor * factor * mean))
                tl.store(d_x + here, result.to(d_x.dtype.element_ty), mask=mask)
            if products is not None:
                tl.store(products + here, gradient * (value * factor) * SCALE, mask=mask)
