import triton
import triton.language as tl

from moe_core.ops.activation.kernels.formulas import sigmoid
from moe_core.ops.exchange.kernels.addresses import peer_rows, place_of


@triton.jit
def pull_rows(
    owners, rows, results_at, shared, shared_gate, out, num_tokens, num_ranks, num_rows,
    TOP_K: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, SHARED_STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k of results_at[owners[t, k]][rows[t, k]] (+ shared[t] * sigmoid(gate[t])), fp32, k in order as
    in `reduce`. Slots without a row are not read."""
    blocks: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T) * blocks, tl.num_programs(0)):
        tokens = (tile // blocks) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        columns = (tile % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside, exists = tokens < num_tokens, (columns < WIDTH)[None, :]
        mask = inside[:, None] & exists
        total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        for first in range(0, TOP_K, AT_ONCE):
            # Start all loads before the first sum waits for one.
            loaded = ()
            for k in tl.static_range(AT_ONCE):
                some = inside & (first + k < TOP_K)
                owner, row, present = place_of(owners, rows, tokens * TOP_K + first + k, some, num_ranks, num_rows)
                pointers = peer_rows(results_at, owner, row, present, WIDTH, DTYPE)[:, None] + columns[None, :]
                # Past the L1, which does not see peers' stores.
                loaded += (tl.load(pointers, mask=present[:, None] & exists, other=0.0, cache_modifier=".cg"),)
            for k in tl.static_range(AT_ONCE):
                total += loaded[k].to(tl.float32)
        if shared is not None:
            extra = tl.load(shared + tokens[:, None] * SHARED_STRIDE + columns[None, :], mask=mask, other=0.0)
            extra = extra.to(tl.float32)
            if shared_gate is not None:
                extra *= sigmoid(tl.load(shared_gate + tokens, mask=inside, other=0.0))[:, None]
            total += extra
        tl.store(out + tokens[:, None] * WIDTH + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def pull_weights(owners, rows, weights_at, out, num_slots, num_ranks, num_rows, BLOCK: tl.constexpr):
    """out[s] = weights_at[owners[s]][rows[s]], or 0."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slots < num_slots
    owner, row, present = place_of(owners, rows, slots, inside, num_ranks, num_rows)
    pointers = peer_rows(weights_at, owner, row, present, 1, "float32")
    tl.store(out + slots, tl.load(pointers, mask=present, other=0.0, cache_modifier=".cg"), mask=inside)
