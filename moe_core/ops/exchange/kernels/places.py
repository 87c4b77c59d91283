import triton
import triton.language as tl


@triton.jit
def run_starts(
    counts, starts, received, excess, num_ranks, rank, receive,
    PER_RANK: tl.constexpr, STRIDE: tl.constexpr, RANKS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Program o: find where this rank's runs begin at owner o, which orders rows by (expert, home).

        starts[o, e] = sum over e' < e of all homes' counts[., o, e'] + sum over homes < rank of counts[., o, e]
        excess[o] = rows of o beyond its bound
        received[e] = sum over homes of counts[., rank, e]

    Example, counts [[2, 1], [3, 0]] of 2 ranks with 1 expert each: on rank 1 starts [2, 1], received [1].
    """
    owner = tl.program_id(0)
    homes, experts = tl.arange(0, RANKS)[:, None], tl.arange(0, EXPERTS)
    mask = (homes < num_ranks) & (experts < PER_RANK)[None, :]
    # Counts come from other ranks: any sums stay inside 64 bits, and rows inside the arrays.
    counted = tl.load(counts + homes * STRIDE + owner * PER_RANK + experts[None, :], mask=mask, other=0).to(tl.int64)
    counted = tl.maximum(counted, 0)
    total = tl.sum(counted, axis=0)
    start = tl.cumsum(total, axis=0) - total + tl.sum(tl.where(homes < rank, counted, 0), axis=0)
    tl.store(starts + owner * PER_RANK + experts, start, mask=experts < PER_RANK)
    tl.store(excess + owner, tl.maximum(tl.sum(total, axis=0) - receive, 0))
    if owner == rank:
        tl.store(received + experts, tl.minimum(total, 2147483647).to(tl.int32), mask=experts < PER_RANK)


@triton.jit
def slot_places(
    ids, group_start, row_of_slot, starts, excess, owners, rows, overflow, num_slots, num_ranks, receive,
    PER_RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rows[s] = starts[ids[s]] + the number of s in its run, owners[s] = rank of ids[s], -1 without a row."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slots < num_slots
    place = tl.load(ids + slots, mask=inside, other=-1)
    number = tl.load(row_of_slot + slots, mask=inside, other=-1).to(tl.int64)
    exists = (place >= 0) & (place < num_ranks * PER_RANK) & (number >= 0)
    row = tl.load(starts + place, mask=exists, other=0) + number - tl.load(group_start + place, mask=exists, other=0)
    fits = exists & (row >= 0) & (row < receive)
    tl.store(owners + slots, tl.where(fits, place // PER_RANK, -1), mask=inside)
    tl.store(rows + slots, tl.where(fits, row, -1).to(tl.int32), mask=inside)
    if tl.program_id(0) == 0:
        ranks = tl.arange(0, RANKS)
        missing = tl.sum(tl.load(excess + ranks, mask=ranks < num_ranks, other=0), axis=0)
        tl.store(overflow, tl.minimum(missing, 2147483647).to(tl.int32))
