import triton
import triton.language as tl

from moe_core.ops.activation.kernels.formulas import sigmoid
from moe_core.ops.common.kernels.aggregates import aggregate_of
from moe_core.ops.common.kernels.pdl import join

#: Parameters of `reduce` and its tiles. WAIT: for the launch ahead, once the rows are known.
Reduction = aggregate_of(
    "Reduction",
    """y row_of_slot out num_tokens num_rows TOP_K WIDTH BLOCK_T BLOCK_N shared shared_gate SHARED_STRIDE BY_ROW
    UNROLL WAIT""",
    shared=None, shared_gate=None, SHARED_STRIDE=0, BY_ROW=False, UNROLL=True, WAIT=False,
)  # fmt: skip


@triton.jit
def reduce(
    y, row_of_slot, shared, shared_gate, out, num_tokens, num_rows,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, SHARED_STRIDE: tl.constexpr, BY_ROW: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k = 0..K-1 of y[slot t*K + k] (+ shared[t] * sigmoid(gate[t])), fp32, in that order. A slot
    without a row (-1) is not read. The next launch belongs to another plan and may not begin early."""
    if PDL == "start":
        tl.extra.cuda.gdc_wait()
    sums = Reduction(
        y, row_of_slot, out, num_tokens, num_rows, TOP_K, WIDTH, BLOCK_T, BLOCK_N, shared, shared_gate, SHARED_STRIDE,
        BY_ROW, UNROLL, PDL == "layout",
    )  # fmt: skip
    reduce_tile(tl.program_id(0), tl.program_id(1), sums)


@triton.jit
def reduce_tile(token_block, column_block, sums):
    TOP_K: tl.constexpr = sums.TOP_K
    WIDTH: tl.constexpr = sums.WIDTH
    CACHE: tl.constexpr = ".cg" if sums.WAIT else ""
    tokens = token_block.to(tl.int64) * sums.BLOCK_T + tl.arange(0, sums.BLOCK_T)
    columns = column_block * sums.BLOCK_N + tl.arange(0, sums.BLOCK_N)
    inside = tokens < sums.num_tokens
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    total = tl.zeros((sums.BLOCK_T, sums.BLOCK_N), dtype=tl.float32)
    if sums.UNROLL:
        # Load all row numbers, then all rows, before the first sum waits.
        sources = ()
        for k in tl.static_range(TOP_K):
            sources += (_source(sums, tokens * TOP_K + k, inside, CACHE),)
        if sums.WAIT:
            tl.extra.cuda.gdc_wait()
        rows = ()
        for k in tl.static_range(TOP_K):
            rows += (_row(sums.y, sources[k], columns, mask, WIDTH),)
        for k in tl.static_range(TOP_K):
            total += rows[k].to(tl.float32)
    else:
        if sums.WAIT:
            tl.extra.cuda.gdc_wait()
        for k in range(TOP_K):
            source = _source(sums, tokens * TOP_K + k, inside, CACHE)
            total += _row(sums.y, source, columns, mask, WIDTH).to(tl.float32)
    if sums.shared is not None:
        extra = tl.load(sums.shared + tokens[:, None] * sums.SHARED_STRIDE + columns[None, :], mask=mask, other=0.0)
        extra = extra.to(tl.float32)
        if sums.shared_gate is not None:
            extra *= sigmoid(tl.load(sums.shared_gate + tokens, mask=inside, other=0.0))[:, None]
        total += extra
    tl.store(sums.out + tokens[:, None] * WIDTH + columns[None, :], total.to(sums.out.dtype.element_ty), mask=mask)


@triton.jit
def _source(sums, slots, inside, CACHE: tl.constexpr):
    row = tl.load(sums.row_of_slot + slots, mask=inside, other=-1, cache_modifier=CACHE)
    source = row.to(tl.int64) if sums.BY_ROW else slots
    return tl.where((row >= 0) & (source < sums.num_rows), source, -1)


@triton.jit
def _row(y, source, columns, mask, WIDTH: tl.constexpr):
    present = mask & (source >= 0)[:, None]
    pointers = y + source[:, None] * WIDTH + columns[None, :]
    return tl.load(pointers, mask=present, other=0.0, eviction_policy="evict_first")


@triton.jit
def scale_rows(
    x, weights, y, num_rows, WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y[r] = x[r] * weights[r], fp32, one cast."""
    join(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    weight = tl.load(weights + rows, mask=rows < num_rows, other=0.0)
    value = tl.load(x + rows[:, None] * X_STRIDE + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y + rows[:, None] * WIDTH + columns[None, :], (value * weight[:, None]).to(y.dtype.element_ty), mask=mask)
