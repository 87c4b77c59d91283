import triton
import triton.language as tl

from moe_core.ops.exchange.kernels.addresses import peer_rows, place_of


@triton.jit
def pull_weights(owners, rows, weights_at, out, num_slots, num_ranks, num_rows, BLOCK: tl.constexpr):
    """out[s] = weights_at[owners[s]][rows[s]], or 0."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slots < num_slots
    owner, row, present = place_of(owners, rows, slots, inside, num_ranks, num_rows)
    pointers = peer_rows(weights_at, owner, row, present, 1, "float32")
    tl.store(out + slots, tl.load(pointers, mask=present, other=0.0, cache_modifier=".cg"), mask=inside)
