"""Planning of the tables of a rank with tokens."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, keep_plans, require_spec
from moe_core.base.checks import as_integer, require_kind
from moe_core.base.sizes import padded
from moe_core.errors import Unsupported
from moe_core.ops.exchange.kernels import send_tables as kernels
from moe_core.ops.exchange.operands import SendOperands
from moe_core.ops.routing.layout import require_experts
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import LayoutSpec
from moe_core.specs.exchange import TableSpec

COUNT_SENDS = declare_kernel(kernels.count_sends, writes_layout=True, counts_slots=True)
PLACE_SENDS = declare_kernel(kernels.place_sends, writes_layout=True, counts_slots=True)

#: Numbers that ranks compare.
HEADER = 8
#: Slots of a program at once, padding included; ranking compares every pair.
LANES = 128
_INTERPRETER_BLOCKS = 3
_COUNTS, _FILL = {"gpu": 4096, "interpreter": 256}, {"gpu": 512, "interpreter": 32}


def blocks_of(rows: int, step: int, target: Target) -> tuple[int, int]:
    """(rows per program, programs)."""
    most = _INTERPRETER_BLOCKS if target.interpreted else target.num_sms
    each = -(-max(rows, 1) // (most * step)) * step
    return each, -(-max(rows, 1) // each)


def columns_of(top_k: int) -> int:
    if top_k > LANES:
        raise Unsupported(
            f"the kernels hold the slots of a token at once and take at most {LANES}, got top_k = {top_k}; use the "
            "NumPy reference engine"
        )
    return padded(top_k, 1)


@keep_plans
def plan_send_tables(operands: SendOperands, spec: TableSpec, rank: int, target: Target) -> LaunchPlan:
    """Make the tables of a rank's slots before rows travel: what goes where, and what comes home.

    A row goes for each slot, by (place, slot), or once for each (owner, token), in that order. Results come back by
    slot, owner after owner. Inputs in the order of `SendOperands`. Outputs, int32 unless said:

    - places `[T, K]`: physical ids, -1: none. invalid_ids `[1]`: ids outside [-1, E). tokens_per_expert `[E]`.
    - row_of_slot `[T * K]`: among the rows that come home, -1: none. lost bool `[T]`: a slot has a place and no such
      row.
    - counted `[W]`, by owner: with `all_to_all` the slots that arrive there, else rows and results without room.
    - message: header, then with `all_to_all` `[8 + counts]` the counts of `TableSpec`; with `all_gather` `[8 + T * 2K]`
      the places and weights of each token; with `padded` `[W, 8 + block_rows * width]` those of each row, -1: none.
      Weights travel as their bits.
    - slot_of_row, except with `all_gather`: the slot of each row that goes, -1: none. `[W * block_rows]`, or with
      `all_to_all` one for each possible row, owner after owner without gaps.
    - table, with `all_to_all`: the places or weights of these rows. Rows behind the last one are undefined.
    """
    ids, weights, places_of_experts, start, header, token_mask, tokens, limits = operands
    require_kind("spec", spec, TableSpec)
    rank = as_integer("rank", rank, 0, spec.num_ranks)
    require_spec("ids", ids, ("num_tokens", "top_k"), "int32")
    num_tokens, top_k = ids.shape
    LayoutSpec(num_tokens, top_k, spec.num_places)  # Slots are numbered in int32.
    require_spec("weights", weights, ids.shape, "float32")
    require_spec("places_of_experts", places_of_experts, (spec.num_places,), "int32")
    require_spec("start", start, (spec.num_experts + 1,), "int32")
    require_spec("header", header, (HEADER,), "int32")
    optional = {"token_mask": token_mask, "tokens": tokens, "limits": limits}
    shapes = {"token_mask": (num_tokens,), "tokens": (spec.num_ranks,), "limits": (2, spec.num_ranks)}
    for name, array in optional.items():
        if array is not None:
            require_spec(name, array, shapes[name], "bool" if name == "token_mask" else "int32")
    if limits is not None and spec.mode != "all_to_all":
        raise Unsupported(f"limits are for mode 'all_to_all', got {spec.mode!r}, whose blocks are limits; leave it out")
    builder = PlanBuilder("send_tables", target)
    present = builder.inputs(operands._asdict())
    outputs = [
        builder.output(name, ArraySpec(shape, dtype)) for name, shape, dtype in send_shapes(num_tokens, top_k, spec)
    ]
    if not target.compiled:
        from moe_core.ops.exchange import reference_tables as twins

        return builder.reference(twins.send_tables, present, {"spec": spec, "rank": rank}, outputs)
    for size in (spec.num_experts, spec.num_places):
        require_experts(size)
    columns = columns_of(top_k)
    block_t = LANES // columns
    block_tokens, blocks = blocks_of(num_tokens, block_t, target)
    gathers = spec.mode == "all_gather"
    sent = 0 if gathers else spec.num_places if spec.by_slot else spec.num_ranks
    ranks, sends, experts = (padded(size, 32) for size in (spec.num_ranks, sent, spec.num_experts))
    counts = sent + spec.num_ranks + spec.num_experts
    builder.scratch("block_counts", ArraySpec((blocks, counts), "int32"))
    builder.scratch("block_invalid", ArraySpec((blocks,), "int32"))
    if not (gathers or spec.by_slot):
        builder.scratch("groups", ids)
    constants = passed(MODE=spec.mode, BY_SLOT=spec.by_slot, PER_RANK=spec.per_rank, NUM_EXPERTS=spec.num_experts)
    constants |= passed(TOP_K=top_k, SENT=sent)
    tiles = passed(RANKS=ranks, SENDS=sends, EXPERTS=experts, BLOCK_T=block_t, COLUMNS=columns)
    arguments = builder.pointers("ids", "token_mask", "places_of_experts", "start", "tokens", "places", "groups")
    arguments |= builder.pointers("block_counts", "block_invalid")
    arguments |= passed(num_tokens=num_tokens, block_tokens=block_tokens, rank=rank, num_ranks=spec.num_ranks)
    warps = 4 if max(sends, experts) <= 1024 else 8
    builder.launch(COUNT_SENDS, (blocks,), arguments | constants | tiles, warps)
    rows = 0 if gathers else builder.spec("slot_of_row").size
    fill = _FILL[target.engine]
    wanted = -(-rows * (spec.width(top_k) if spec.mode == "padded" else 1) // fill)
    programs = max(blocks, min(wanted, _INTERPRETER_BLOCKS + 1 if target.interpreted else target.num_sms))
    arguments = builder.pointers("weights", "header", "limits", "places", "groups", "block_counts", "block_invalid")
    arguments |= builder.pointers("invalid_ids", "tokens_per_expert", "row_of_slot", "lost", "counted", "message")
    arguments |= builder.pointers("slot_of_row", "table")
    arguments |= passed(num_tokens=num_tokens, block_tokens=block_tokens, num_blocks=blocks, num_ranks=spec.num_ranks)
    arguments |= passed(num_rows=rows, block=spec.block or 0, back=spec.back or 0)
    arguments |= passed(block_rows=spec.block_rows, back_rows=spec.back_rows)
    block_b = max(1, min(32, _COUNTS[target.engine] // max(sends, experts, ranks)))
    arguments |= constants | passed(HEADER=HEADER) | tiles | passed(BLOCK_B=block_b, BLOCK_FILL=fill)
    builder.launch(PLACE_SENDS, (programs,), arguments, warps)
    return builder.build()


def send_shapes(num_tokens: int, top_k: int, spec: TableSpec) -> list[tuple[str, tuple[int, ...], str]]:
    width, most = spec.width(top_k), num_tokens * (top_k if spec.by_slot else min(top_k, spec.num_ranks))
    message: tuple[int, ...] = (HEADER + spec.counts,)
    if spec.mode == "all_gather":
        message = (HEADER + num_tokens * width,)
    elif spec.mode == "padded":
        message, most = (spec.num_ranks, HEADER + spec.block_rows * width), spec.num_ranks * spec.block_rows
    shapes: list[tuple[str, tuple[int, ...], str]] = [
        ("places", (num_tokens, top_k), "int32"),
        ("invalid_ids", (1,), "int32"),
        ("tokens_per_expert", (spec.num_experts,), "int32"),
        ("row_of_slot", (num_tokens * top_k,), "int32"),
        ("lost", (num_tokens,), "bool"),
        ("counted", (spec.num_ranks,), "int32"),
        ("message", message, "int32"),
    ]
    if spec.mode != "all_gather":
        shapes.append(("slot_of_row", (most,), "int32"))
    if spec.mode == "all_to_all":
        shapes.append(("table", (most, width), "int32"))
    return shapes
