import triton
import triton.language as tl

from moe_core.ops.routing.kernels.topk import topk_keys


@triton.jit
def rounded_rows(chosen, candidates, TILE: tl.constexpr, MODE: tl.constexpr):
    """Round rows of an expert, of `candidates`, `chosen` ones included, as the reference's `rounded_rows`."""
    whole = chosen // TILE
    rest = chosen - whole * TILE
    if MODE == "up":
        more = rest > 0
    elif MODE == "nearest":
        more = (2 * rest > TILE) | ((2 * rest == TILE) & (whole % 2 == 1))
    else:
        tl.static_assert(MODE == "down", "unknown mode")
        more = rest < 0
    rows = tl.where(more, whole + 1, whole) * TILE
    return tl.where(rows > candidates, whole * TILE, rows)


@triton.jit
def load_candidates(slot_of_row, candidate_weights, rows, inside, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """Return (slot, True if it is an extra one, weight, uint32 key in the order of weights) of rows."""
    slots = tl.load(slot_of_row + rows, mask=inside, other=0)
    values = tl.load(candidate_weights + slots, mask=inside, other=0.0)
    # Signed keys with the sign flipped ascend as unsigned numbers.
    keys = topk_keys(values).to(tl.uint32, bitcast=True) ^ 0x80000000
    return slots, slots % WIDTH >= TOP_K, values, keys


@triton.jit
def clear_absent(candidates, ids, weights, num_slots, program, num_programs, BLOCK: tl.constexpr):
    step = num_programs.to(tl.int64) * BLOCK
    for first in range(program.to(tl.int64) * BLOCK, num_slots, step):
        slots = tl.cast(first, tl.int64) + tl.arange(0, BLOCK)
        inside = slots < num_slots
        absent = inside & (tl.load(candidates + slots, mask=inside, other=0) < 0)
        tl.store(ids + slots, tl.full((BLOCK,), -1, tl.int32), mask=absent)
        tl.store(weights + slots, tl.zeros((BLOCK,), dtype=tl.float32), mask=absent)


@triton.jit
def keep_candidates(
    candidates, candidate_weights, group_start, slot_of_row, ids, weights, tokens_per_expert, num_slots,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the candidates of one expert per program. Further programs write the slots without a candidate.

        n = candidates with column < TOP_K,  rows = n rounded,  kept = the first `rows` candidates in the order:
        chosen ones by weight, then extra ones by score, of equals the lower token

    So one class is cut, at its `wanted`-th largest key, found 8 bits at a time from counts of digits.
    """
    expert = tl.program_id(0)
    if expert >= NUM_EXPERTS:
        others = tl.num_programs(0) - NUM_EXPERTS
        clear_absent(candidates, ids, weights, num_slots, expert - NUM_EXPERTS, others, BLOCK)
    else:
        start, last = tl.load(group_start + expert), tl.load(group_start + expert + 1)
        counts = tl.zeros((BLOCK,), dtype=tl.int32)
        for first in range(start, last, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            slots = tl.load(slot_of_row + rows, mask=rows < last, other=TOP_K)
            counts += (slots % WIDTH < TOP_K).to(tl.int32) * (rows < last).to(tl.int32)
        chosen = tl.sum(counts, axis=0)
        tl.store(tokens_per_expert + expert, chosen)
        target = rounded_rows(chosen, last - start, TILE, MODE)
        cut_extra = target > chosen
        wanted = tl.where(cut_extra, target - chosen, target)
        some = wanted > 0
        digits = tl.arange(0, 256)
        threshold = tl.zeros((1,), dtype=tl.uint32)
        for place in range(4):
            per_digit = tl.zeros((256,), dtype=tl.int32)
            for first in range(start, last, BLOCK):
                rows = first + tl.arange(0, BLOCK)
                inside = rows < last
                _, extra, _, keys = load_candidates(slot_of_row, candidate_weights, rows, inside, TOP_K, WIDTH)
                # Digits up to this one, and the earlier ones, none for the first.
                ahead = keys >> (24 - 8 * place)
                member = inside & (extra == cut_extra) & (ahead >> 8 == threshold)
                per_digit += tl.histogram((ahead & 255).to(tl.int32), 256, mask=member)
            above = tl.sum(per_digit, axis=0) - tl.cumsum(per_digit, axis=0)
            here = (above < wanted) & (wanted <= above + per_digit)
            threshold = threshold * 256 + tl.sum(tl.where(here, digits, 0), axis=0).to(tl.uint32)
            wanted -= tl.sum(tl.where(here, above, 0), axis=0)
        ties = tl.zeros((1,), dtype=tl.int32)
        for first in range(start, last, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            inside = rows < last
            slots, extra, values, keys = load_candidates(slot_of_row, candidate_weights, rows, inside, TOP_K, WIDTH)
            member = inside & (extra == cut_extra) & some
            tie = (member & (keys == threshold)).to(tl.int32)
            rank = ties + tl.cumsum(tie, axis=0) - tie
            ties += tl.sum(tie, axis=0)
            kept = (member & (keys > threshold)) | ((tie > 0) & (rank < wanted)) | (inside & cut_extra & (extra == 0))
            tl.store(ids + slots, tl.where(kept, expert, -1), mask=inside)
            tl.store(weights + slots, tl.where(kept, values, 0.0), mask=inside)


@triton.jit
def split_gradients(
    d_weights, ids, candidates, chosen, d_chosen, extra, d_extra, num_slots,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Split candidates `[T, WIDTH]` and gradients of their weights into chosen `[T, TOP_K]` and extra ones (None
    without any). The gradient of a slot that was not kept is 0."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, num_slots, step):
        slots = tl.cast(first, tl.int64) + tl.arange(0, BLOCK)
        inside = slots < num_slots
        candidate = tl.load(candidates + slots, mask=inside, other=-1)
        kept = inside & (tl.load(ids + slots, mask=inside, other=-1) >= 0)
        gradient = tl.load(d_weights + slots, mask=kept, other=0.0)
        token, column = slots // WIDTH, slots % WIDTH
        first_class = inside & (column < TOP_K)
        tl.store(chosen + token * TOP_K + column, candidate, mask=first_class)
        tl.store(d_chosen + token * TOP_K + column, gradient, mask=first_class)
        if extra is not None:
            place = token * (WIDTH - TOP_K) + column - TOP_K
            tl.store(extra + place, candidate, mask=inside & (column >= TOP_K))
            tl.store(d_extra + place, gradient, mask=inside & (column >= TOP_K))
