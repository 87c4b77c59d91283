import triton
import triton.language as tl


@triton.jit
def result_addresses(
    sources, group_start, slots_at, results_at, num_ranks, num_rows, num_slots,
    NUM_EXPERTS: tl.constexpr, ROW_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """results_at[row] = slots_at[home] + slot * ROW_BYTES for (home, slot) = sources[row], 0 for a row without one."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Sources behind the last group are old.
    inside = row < tl.minimum(tl.load(group_start + NUM_EXPERTS), num_rows)
    home = tl.load(sources + 2 * row, mask=inside, other=-1)
    slot = tl.load(sources + 2 * row + 1, mask=inside, other=-1).to(tl.int64)
    present = inside & (home >= 0) & (home < num_ranks) & (slot >= 0) & (slot < num_slots)
    address = tl.load(slots_at + home, mask=present, other=0) + slot * ROW_BYTES
    tl.store(results_at + row, tl.where(present, address, 0), mask=row < num_rows)
