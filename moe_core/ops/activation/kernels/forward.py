import triton
import triton.language as tl

from moe_core.ops.activation.kernels.formulas import activate, activate_gated


@triton.jit
def activation(
    x, up, y, num_rows,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr, GATE_LAYOUT: tl.constexpr, NAME: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = activation(x, up). GATE_LAYOUT None: ungated."""
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
