"""Activations in fp32, fused into the matmul or as an op of their own."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, NAME: tl.constexpr):
    """act(x) of the ungated form, fp32. NaN propagates: comparisons with NaN are false, so `where` keeps it."""
    if NAME == "silu":
        return x * sigmoid(x)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        # 0.5 * x * (1 + tanh(u)) = x * sigmoid(2 * u)
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(NAME == "relu2", "unknown activation")
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive


@triton.jit
def activate_gated(gate, up, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """act(gate) * up, or swiglu_oai's `g * sigmoid(alpha * g) * (u + 1)` with its clamps, fp32."""
    if NAME == "swiglu_oai":
        if LIMIT is not None:
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate * sigmoid(ALPHA * gate) * (up + 1.0)
    else:
        return activate(gate, NAME) * up


@triton.jit
def activation(
    x, up, y, num_rows,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr, GATE_LAYOUT: tl.constexpr, NAME: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[r, n] = act(x[r, ...]) for a tile of rows and columns; GATE_LAYOUT None = ungated."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    base = rows[:, None] * X_STRIDE
    if GATE_LAYOUT == "interleaved":
        gate = tl.load(x + base + 2 * columns[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x + base + 2 * columns[None, :] + 1, mask=mask, other=0.0).to(tl.float32)
        result = activate_gated(gate, second, NAME, ALPHA, LIMIT)
    elif GATE_LAYOUT == "halves":
        gate = tl.load(x + base + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x + base + WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        result = activate_gated(gate, second, NAME, ALPHA, LIMIT)
    elif GATE_LAYOUT == "separate":
        gate = tl.load(x + base + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(up + rows[:, None] * UP_STRIDE + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        result = activate_gated(gate, second, NAME, ALPHA, LIMIT)
    else:
        result = activate(tl.load(x + base + columns[None, :], mask=mask, other=0.0).to(tl.float32), NAME)
    tl.store(y + rows[:, None] * WIDTH + columns[None, :], result.to(y.dtype.element_ty), mask=mask)
