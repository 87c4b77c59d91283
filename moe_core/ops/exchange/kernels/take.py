import triton
import triton.language as tl

from moe_core.ops.quantize.kernels.decode import e4m3_to_bfloat16


@triton.jit
def take_rows(
    x, scales, rows, group_start, y, num_rows, num_sources,
    NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[r] = x[rows[r]] (* its scales, if x are codes of e4m3) for rows below the end of group_start. A missing row of
    x counts as zeros. Programs take turns."""
    blocks: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    filled = tl.minimum(tl.load(group_start + NUM_EXPERTS), num_rows)
    for tile in range(tl.program_id(0), tl.cdiv(filled, BLOCK_M) * blocks, tl.num_programs(0)):
        target = (tile // blocks) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        columns = (tile % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside, exists = target < filled, (columns < WIDTH)[None, :]
        source = tl.load(rows + target, mask=inside, other=-1).to(tl.int64)
        present = (inside & (source >= 0) & (source < num_sources))[:, None] & exists
        if scales is None:
            value = tl.load(x + source[:, None] * WIDTH + columns[None, :], mask=present, other=0.0)
        else:
            pointers = x.to(tl.pointer_type(tl.uint8), bitcast=True)
            codes = tl.load(pointers + source[:, None] * WIDTH + columns[None, :], mask=present, other=0)
            scale = tl.load(scales + source[:, None] * GROUPS + (columns // GROUP)[None, :], mask=present, other=0.0)
            value = (e4m3_to_bfloat16(codes).to(tl.float32) * scale).to(y.dtype.element_ty)
        tl.store(y + target[:, None] * WIDTH + columns[None, :], value, mask=inside[:, None] & exists)
