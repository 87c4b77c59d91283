import triton
import triton.language as tl

from moe_core.ops.common.kernels.dot import multiply
from moe_core.ops.common.kernels.pdl import join


@triton.jit
def router(
    x, weight, bias, logits, num_tokens,
    D: tl.constexpr, NUM_EXPERTS: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHT_LAYOUT: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr, PRODUCT: tl.constexpr, DRAINED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits[t, e] = sum over d of x[t, d] * weight[d, e] + bias[e], fp32, rounded to LOGITS_DTYPE and stored as fp32.

    PRODUCT, DRAINED: see `multiply`. Rows past the last token repeat it, so that loads of x need no mask.
    """
    join(PDL)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    source = x + tl.minimum(rows, num_tokens - 1).to(tl.int64)[:, None] * X_STRIDE
    if WEIGHT_LAYOUT == "in_out":
        matrix = weight + depth[:, None] * NUM_EXPERTS + columns[None, :]
        STEP: tl.constexpr = BLOCK_K * NUM_EXPERTS
    else:
        matrix = weight + depth[:, None] + columns[None, :] * D
        STEP: tl.constexpr = BLOCK_K
    EVEN_K: tl.constexpr = D % BLOCK_K == 0
    EVEN_N: tl.constexpr = NUM_EXPERTS % BLOCK_N == 0

    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, D, BLOCK_K):
        if EVEN_K:
            a = tl.load(source + start + depth[None, :])
        else:
            a = tl.load(source + start + depth[None, :], mask=(depth < D - start)[None, :], other=0.0)
        if EVEN_K and EVEN_N:
            b = tl.load(matrix)
        else:
            b = tl.load(matrix, mask=(depth < D - start)[:, None] & (columns < NUM_EXPERTS)[None, :], other=0.0)
        accumulator = multiply(a, b, accumulator, PRODUCT, DRAINED)
        matrix += STEP

    if bias is not None:
        accumulator += tl.load(bias + columns, mask=columns < NUM_EXPERTS, other=0.0).to(tl.float32)[None, :]
    if LOGITS_DTYPE == "bfloat16":
        accumulator = accumulator.to(tl.bfloat16).to(tl.float32)
    elif LOGITS_DTYPE == "float16":
        accumulator = accumulator.to(tl.float16).to(tl.float32)
    mask = (rows < num_tokens)[:, None] & (columns < NUM_EXPERTS)[None, :]
    tl.store(logits + rows.to(tl.int64)[:, None] * NUM_EXPERTS + columns[None, :], accumulator, mask=mask)
