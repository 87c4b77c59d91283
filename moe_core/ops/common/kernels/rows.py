import triton
import triton.language as tl


@triton.jit
def source_rows(rows, slots, GATHER: tl.constexpr, TOP_K: tl.constexpr):
    """Return int64 rows of an array indexed by layout `row`, `slot` or `token`."""
    if GATHER == "row":
        return rows
    elif GATHER == "slot":
        return slots.to(tl.int64)
    else:
        return (slots // TOP_K).to(tl.int64)
