import triton
import triton.language as tl


@triton.jit
def zero_rows(markers, y, num_rows, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[r] = 0 where markers[r] is -1: no expert writes the row."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    absent = tl.load(markers + rows, mask=rows < num_rows, other=0) < 0
    if tl.sum(absent.to(tl.int32), axis=0) > 0:
        zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=y.dtype.element_ty)
        for start in range(0, WIDTH, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            mask = absent[:, None] & (columns < WIDTH)[None, :]
            tl.store(y + rows[:, None] * WIDTH + columns[None, :], zeros, mask=mask)
