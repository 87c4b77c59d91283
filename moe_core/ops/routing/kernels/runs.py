import triton
import triton.language as tl

from moe_core.ops.routing.kernels.schedule import fill


@triton.jit
def layout_of_runs(
    counts, ids, group_sizes, group_start, slot_of_row, row_of_slot, overflow, num_rows, num_sources, stride,
    NUM_EXPERTS: tl.constexpr, SOURCES: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (source, expert) places one run of rows that arrived by source, then local expert. All share unfilled
    rows.

    first[w, e] = its place among the rows that arrived,  row[w, e] = its place in the layout
    ids[first + i] = e, row_of_slot[first + i] = row + i, slot_of_row[row + i] = first + i

    Stride, cuts and outputs: see `plan_layout_of_runs`.
    """
    source, expert = tl.program_id(0), tl.program_id(1)
    sources, experts = tl.arange(0, SOURCES)[:, None], tl.arange(0, EXPERTS)[None, :]
    mask = (sources < num_sources) & (experts < NUM_EXPERTS)
    # Counts come from other ranks: any sums stay inside 64 bits, and rows inside the arrays.
    counted = tl.load(counts + sources * NUM_EXPERTS + experts, mask=mask, other=0).to(tl.int64)
    counted = tl.maximum(counted, 0)
    within = tl.cumsum(counted, axis=1) - counted
    if stride is not None:
        begin = sources.to(tl.int64) * stride
        limit = tl.minimum(begin + stride, num_rows)
    else:
        total = tl.sum(counted, axis=1)
        begin = (tl.cumsum(total, axis=0) - total)[:, None]
        limit = num_rows
    first = begin + within
    kept = tl.minimum(counted, tl.maximum(limit - first, 0))
    sizes = tl.sum(kept, axis=0)
    starts = tl.cumsum(sizes, axis=0) - sizes
    row = starts[None, :] + tl.cumsum(kept, axis=0) - kept
    filled = tl.sum(sizes, axis=0)
    this_run = (sources == source) & (experts == expert)
    if (source == 0) & (expert == 0):
        places = tl.arange(0, EXPERTS)
        tl.store(group_sizes + places, sizes.to(tl.int32), mask=places < NUM_EXPERTS)
        tl.store(group_start + places, starts.to(tl.int32), mask=places < NUM_EXPERTS)
        tl.store(group_start + NUM_EXPERTS, filled.to(tl.int32))
        missing = tl.sum(tl.sum(counted - kept, axis=1), axis=0)
        tl.store(overflow, tl.minimum(missing, 2147483647).to(tl.int32))
    run_first = _pick(first, this_run)
    run_row, length = _pick(row, this_run), _pick(kept, this_run)
    for done in range(0, length, BLOCK):
        offsets = done + tl.arange(0, BLOCK)
        inside = offsets < length
        tl.store(ids + run_first + offsets, tl.full((BLOCK,), 0, tl.int32) + expert, mask=inside)
        tl.store(row_of_slot + run_first + offsets, (run_row + offsets).to(tl.int32), mask=inside)
        tl.store(slot_of_row + run_row + offsets, (run_first + offsets).to(tl.int32), mask=inside)
    program = source.to(tl.int64) * NUM_EXPERTS + expert
    step = tl.num_programs(0).to(tl.int64) * NUM_EXPERTS * BLOCK
    fill(slot_of_row, filled + program * BLOCK, num_rows, step, BLOCK)
    # A source's programs take turns from its end to the next source.
    of_source = tl.sum(tl.where(sources == source, kept, 0), axis=1)
    end = _pick(begin + tl.zeros((SOURCES, EXPERTS), tl.int64), this_run) + tl.sum(of_source, axis=0)
    last = num_rows.to(tl.int64)
    if stride is not None:
        if source < num_sources - 1:
            last = tl.minimum((source + 1).to(tl.int64) * stride, last)
    if (stride is not None) | (source == num_sources - 1):
        step = tl.full((), NUM_EXPERTS, tl.int64) * BLOCK
        fill(ids, end + expert.to(tl.int64) * BLOCK, last, step, BLOCK)
        fill(row_of_slot, end + expert.to(tl.int64) * BLOCK, last, step, BLOCK)


@triton.jit
def _pick(table, this_run):
    return tl.sum(tl.sum(tl.where(this_run, table, 0), axis=1), axis=0)
