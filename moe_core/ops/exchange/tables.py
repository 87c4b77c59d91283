"""Planning of the tables of a rank with tokens and of a rank with experts, and of the rows at peers."""

from __future__ import annotations

from moe_core.base import INT32_LIMIT, ArraySpec, Target, dtypes, keep_plans, padded, require_spec, row_stride
from moe_core.base.checks import as_integer, require_at_least, require_kind
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.exchange.checks import require_places, slots_block
from moe_core.ops.exchange.kernels import places as place_kernels
from moe_core.ops.exchange.kernels import receive_tables as receive_kernels
from moe_core.ops.exchange.kernels import send_tables as send_kernels
from moe_core.ops.exchange.operands import ReceiveOperands, SendOperands
from moe_core.ops.routing.layout import require_experts
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import LayoutSpec
from moe_core.specs.exchange import TableSpec

COUNT_SENDS = declare_kernel(send_kernels.count_sends, writes_layout=True, counts_slots=True)
PLACE_SENDS = declare_kernel(send_kernels.place_sends, writes_layout=True, counts_slots=True)

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
    - row_of_slot `[T * K]`: among the rows that come home, -1: none; with own_first, this rank's experts' lie before
      the others. lost bool `[T]`: a slot has a place and no such row.
    - counted `[W]`, by owner: with `all_to_all` the slots that arrive there, else rows and results without room.
    - message: header, then with `all_to_all` `[W, 8 + counts]` each owner's counts of `TableSpec`; with `all_gather`
      `[8 + T * 2K]` the places and weights of each token; with `padded` `[W, 8 + block_rows * width]` those of each
      row, -1: none. Weights travel as their bits.
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
        constants = {"spec": spec, "rank": rank}
        from moe_core.ops.exchange import reference_tables as table_twins

        return builder.reference(table_twins.send_tables, present, constants, outputs)
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
    sizes = passed(num_tokens=num_tokens, block_tokens=block_tokens, rank=rank, num_ranks=spec.num_ranks)
    tiles = passed(RANKS=ranks, SENDS=sends, EXPERTS=experts, BLOCK_T=block_t, COLUMNS=columns)
    arguments = builder.pointers("ids", "token_mask", "places_of_experts", "start", "tokens", "places", "groups")
    arguments |= builder.pointers("block_counts", "block_invalid") | sizes
    warps = 4 if max(sends, experts) <= 1024 else 8
    builder.launch(COUNT_SENDS, (blocks,), arguments | constants | tiles, warps)
    rows = 0 if gathers else builder.spec("slot_of_row").size
    fill = _FILL[target.engine]
    wanted = -(-rows * (spec.width(top_k) if spec.mode == "padded" else 1) // fill)
    programs = max(blocks, min(wanted, _INTERPRETER_BLOCKS + 1 if target.interpreted else target.num_sms))
    arguments = builder.pointers("weights", "header", "limits", "places", "groups", "block_counts", "block_invalid")
    arguments |= builder.pointers("invalid_ids", "tokens_per_expert", "row_of_slot", "lost", "counted", "message")
    arguments |= builder.pointers("slot_of_row", "table") | sizes
    arguments |= passed(num_blocks=blocks, num_rows=rows, block=spec.block or 0, back=spec.back or 0)
    arguments |= passed(block_rows=spec.block_rows, back_rows=spec.back_rows, OWN_FIRST=spec.own_first)
    block_b = max(1, min(32, _COUNTS[target.engine] // max(sends, experts, ranks)))
    arguments |= constants | passed(HEADER=HEADER) | tiles | passed(BLOCK_B=block_b, BLOCK_FILL=fill)
    builder.launch(PLACE_SENDS, (programs,), arguments, warps)
    return builder.build()


def send_shapes(num_tokens: int, top_k: int, spec: TableSpec) -> list[tuple[str, tuple[int, ...], str]]:
    width, most = spec.width(top_k), num_tokens * (top_k if spec.by_slot else min(top_k, spec.num_ranks))
    message: tuple[int, ...] = (spec.num_ranks, HEADER + spec.counts)
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


RECEIVE_SLOTS = declare_kernel(receive_kernels.receive_slots)
COUNT_RECEIVED = declare_kernel(receive_kernels.count_received, writes_layout=True)
PLACE_RECEIVED = declare_kernel(receive_kernels.place_received, writes_layout=True)

_BLOCK = {"gpu": 512, "interpreter": 32}
_LANES = {"gpu": 8 * LANES, "interpreter": 2 * LANES}
#: Tiles of rows up to which one program needs no counts first.
_ALONE = 4


@keep_plans
def plan_receive_tables(
    operands: ReceiveOperands, spec: TableSpec, rank: int, top_k: int, num_rows: int, num_tokens: int, target: Target
) -> LaunchPlan:
    """Find the slots for this rank's experts among the rows that arrive.

    num_rows: M, the slots that there is memory for; with blocks W * back_rows. num_tokens: T. With rows of tokens every
    slot gets a row, by (source, token, k); with blocks at most `back` of a source, from a multiple of back_rows on.

    Inputs: came, [header], [lost], [counts], [results]. Outputs: ids int32 `[M, 1]`, the expert here of each slot, -1:
    none; weights fp32 `[M, 1]`, 0 without an expert; with rows of tokens slot_of_row int32 `[M]`, the slot among those
    that came, K for each row, -1: none; with header spoilt bool `[T]`: lost, or a rank sent another header.

    With results, ids and weights are of the R rows that came, `[R, K]`. Slots of this rank's own tokens are behind all
    others in slot_of_row, and results_at int64 `[R * K]` is the address of a slot's row there, 0: none.
    """
    came, header, lost, counts, results = operands
    require_kind("spec", spec, TableSpec)
    rank = as_integer("rank", rank, 0, spec.num_ranks)
    for name, value, least in (("top_k", top_k, 1), ("num_rows", num_rows, 0), ("num_tokens", num_tokens, 0)):
        as_integer(name, value, least)
    width, counted = spec.width(top_k), spec.mode == "all_to_all"
    if counted and spec.by_slot:
        raise InvalidInput("rows must be 'tokens' with mode='all_to_all', got 'slots'; counts say their places")
    sources = 1 if counted else spec.num_ranks
    require_spec("came", came, ("rows", width) if counted else (sources, "numbers"), "int32", contiguous=not counted)
    each, rest = (came.shape[0], 0) if counted else divmod(came.shape[1] - HEADER, width)
    if rest or each < 0:
        raise InvalidInput(f"came must have {HEADER} + n * {width} columns, got {came}; pass the messages that came")
    if results is not None and not counted:
        raise InvalidInput(
            f"results must be None unless mode='all_to_all', got {results} with {spec.mode!r}; leave it out"
        )
    for name, array, wanted in (("header", header, not counted), ("counts", counts, counted)):
        if (array is not None) != wanted:
            raise InvalidInput(
                f"{name} must be given {'with' if name == 'counts' else 'unless'} mode='all_to_all', got {array} with "
                f"{spec.mode!r}; correct it"
            )
    expected = sources * each if spec.by_slot else num_rows if counted else sources * spec.back_rows
    if num_rows != expected:
        raise InvalidInput(f"num_rows must be {expected} for {spec}, got {num_rows}; pass that")
    for name, array, shape, dtype in (
        ("header", header, (HEADER,), "int32"),
        ("lost", lost, (num_tokens,), "bool"),
        ("counts", counts, (spec.num_ranks, HEADER + 2), "int32"),
    ):
        if array is not None:
            require_spec(name, array, shape, dtype)
    if results is not None:
        require_spec("results", results, (1, "d_model"), dtypes.MATMUL_DTYPES)
    builder = PlanBuilder("receive_tables", target)
    present = builder.inputs(operands._asdict())
    outputs = [
        builder.output(name, ArraySpec(shape, dtype))
        for name, shape, dtype in receive_shapes(num_rows, num_tokens, spec, each, None if results is None else top_k)
    ]
    if not target.compiled:
        constants = {"spec": spec, "rank": rank, "top_k": top_k, "num_rows": num_rows, "num_tokens": num_tokens}
        from moe_core.ops.exchange import reference_tables as table_twins

        return builder.reference(table_twins.receive_tables, present, constants, outputs)
    head, padded_sources, block = HEADER if header is not None else 0, padded(sources, 1), _BLOCK[target.engine]
    if spec.by_slot:
        arguments = builder.pointers("came", "header", "lost", "ids", "weights", "spoilt")
        arguments |= passed(num_sources=sources, each=each, num_tokens=num_tokens, rank=rank)
        arguments |= passed(PER_RANK=spec.per_rank, HEADER=head, SOURCES=padded_sources, BLOCK=block)
        builder.launch(RECEIVE_SLOTS, (max(1, -(-each // block)), sources), arguments)
        return builder.build()
    columns = columns_of(top_k)
    block_r = _LANES[target.engine] // columns
    block_rows, blocks = blocks_of(each, block_r, target)
    if counted and each <= _ALONE * block_r:
        block_rows, blocks = each, 1
    constants = passed(TOP_K=top_k, ROW=row_stride("came", came) if counted else width, PER_RANK=spec.per_rank)
    constants |= passed(HEADER=head, COUNT=HEADER, RANKS=padded(spec.num_ranks, 1))
    if blocks * sources > 1:
        builder.scratch("block_counts", ArraySpec((sources, blocks), "int32"))
        arguments = builder.pointers("came", "counts", "block_counts")
        arguments |= passed(each=each, block_rows=block_rows, num_blocks=blocks, rank=rank, num_ranks=spec.num_ranks)
        arguments |= constants | passed(COLUMNS=columns, BLOCK_R=block_r)
        builder.launch(COUNT_RECEIVED, (blocks, sources), arguments)
    arguments = builder.pointers("came", "header", "lost", "counts", "results", "block_counts", "ids", "weights")
    arguments |= builder.pointers("slot_of_row", "results_at", "spoilt")
    row_bytes = 0 if results is None else results.shape[1] * dtypes.itemsize(results.dtype)
    arguments |= passed(num_sources=sources, each=each, block_rows=block_rows, num_blocks=blocks, num_tokens=num_tokens)
    stride = num_rows if counted else spec.back_rows
    arguments |= passed(rank=rank, num_ranks=spec.num_ranks, most=num_rows if counted else spec.back, stride=stride)
    arguments |= passed(row_bytes=row_bytes)
    arguments |= constants | passed(SOURCES=padded_sources, COLUMNS=columns, BLOCK_R=block_r)
    arguments |= passed(BLOCK_B=64 if target.on_gpu else 2, BLOCK_FILL=block)
    builder.launch(PLACE_RECEIVED, (blocks, sources), arguments)
    return builder.build()


def receive_shapes(
    num_rows: int, num_tokens: int, spec: TableSpec, came: int, top_k: int | None
) -> list[tuple[str, tuple[int, ...], str]]:
    """came: rows. top_k: with results, else None."""
    listed = (num_rows, 1) if top_k is None else (came, top_k)
    shapes: list[tuple[str, tuple[int, ...], str]] = [("ids", listed, "int32"), ("weights", listed, "float32")]
    if not spec.by_slot:
        shapes.append(("slot_of_row", (num_rows,), "int32"))
    if spec.mode != "all_to_all":
        shapes.append(("spoilt", (num_tokens,), "bool"))
    if top_k is not None:
        shapes.append(("results_at", (came * top_k,), "int64"))
    return shapes


RUN_STARTS = declare_kernel(place_kernels.run_starts)
SLOT_PLACES = declare_kernel(place_kernels.slot_places)

MAX_COUNTS = 8192


@keep_plans
def plan_peer_places(
    ids: ArraySpec,
    group_start: ArraySpec,
    row_of_slot: ArraySpec,
    counts: ArraySpec,
    target: Target,
    *,
    rank: int,
    receive: int,
) -> LaunchPlan:
    """Find the row of every slot at its owner, which has rows by (expert, home, slot), from the counts of all ranks.

    W ranks with L places each, P = W * L; place p is of rank p // L. ids int32 `[T, K]`: places, -1: none. group_start
    int32 `[P + 1]`, row_of_slot int32 `[T * K]`: of the layout of ids. counts int32 `[W, P]`: group sizes of every
    rank's layout, rows may be strided. receive: rows that an owner has memory for; rows beyond do not go.

    Outputs, int32: owners, rows `[T, K]`, -1: no row; received `[1, L]`, rows for every expert here, bound or not, for
    `plan_layout_of_runs`; overflow `[1]`, rows of all ranks that do not fit, equal on all.
    """
    require_spec("counts", counts, ("num_ranks", "num_places"), "int32", contiguous=False)
    stride, (num_ranks, num_places) = row_stride("counts", counts), counts.shape
    for name, size in (("num_ranks", num_ranks), ("num_places", num_places)):
        require_at_least(f"{name} of counts", size, 1)
    if num_places % num_ranks:
        raise InvalidInput(
            f"counts must have as many places for every one of the {num_ranks} ranks, got {counts.shape}; fill the "
            "placement up with empty places"
        )
    require_places(ids, ids)
    require_spec("layout.group_start", group_start, (num_places + 1,), "int32")
    require_spec("layout.row_of_slot", row_of_slot, (ids.size,), "int32")
    as_integer("rank", rank, 0, num_ranks)
    as_integer("receive", receive, 0, INT32_LIMIT)
    per_rank = num_places // num_ranks
    builder = PlanBuilder("peer_places", target)
    present = builder.inputs({"ids": ids, "group_start": group_start, "row_of_slot": row_of_slot, "counts": counts})
    outputs = [builder.output(name, ArraySpec(ids.shape, "int32")) for name in ("owners", "rows")]
    outputs.append(builder.output("received", ArraySpec((1, per_rank), "int32")))
    outputs.append(builder.output("overflow", ArraySpec((1,), "int32")))
    if not target.compiled:
        constants = {"rank": rank, "receive": receive}
        from moe_core.ops.exchange import reference as exchange_twins

        return builder.reference(exchange_twins.peer_places, present, constants, outputs)
    ranks, experts = padded(num_ranks, 1), padded(per_rank, 1)
    if ranks * experts > MAX_COUNTS:
        raise Unsupported(
            f"one program holds the counts for an owner and takes at most {MAX_COUNTS}, got {num_ranks} x {per_rank}; "
            "use fewer places on a rank"
        )
    builder.scratch("starts", ArraySpec((num_places,), "int64"))
    builder.scratch("excess", ArraySpec((num_ranks,), "int64"))
    arguments = builder.pointers("counts", "starts", "received", "excess")
    arguments |= passed(num_ranks=num_ranks, rank=rank, receive=receive)
    arguments |= passed(PER_RANK=per_rank, STRIDE=stride, RANKS=ranks, EXPERTS=experts)
    builder.launch(RUN_STARTS, (num_ranks,), arguments, 4 if ranks * experts <= 2048 else 8)
    block, slots = slots_block(target), ids.size
    arguments = builder.pointers("ids", "group_start", "row_of_slot", "starts", "excess", "owners", "rows", "overflow")
    arguments |= passed(num_slots=slots, num_ranks=num_ranks, receive=receive)
    arguments |= passed(PER_RANK=per_rank, RANKS=ranks, BLOCK=block)
    builder.launch(SLOT_PLACES, (max(1, -(-slots // block)),), arguments)
    return builder.build()
