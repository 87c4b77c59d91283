"""Planning of the tables of a rank with experts."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, keep_plans, require_spec
from moe_core.base.checks import as_integer, require_kind
from moe_core.base.sizes import padded
from moe_core.errors import InvalidInput
from moe_core.ops.exchange.kernels import receive_tables as kernels
from moe_core.ops.exchange.operands import ReceiveOperands
from moe_core.ops.exchange.send_tables import HEADER, LANES, blocks_of, columns_of
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs.exchange import TableSpec

RECEIVE_SLOTS = declare_kernel(kernels.receive_slots)
COUNT_RECEIVED = declare_kernel(kernels.count_received, writes_layout=True)
PLACE_RECEIVED = declare_kernel(kernels.place_received, writes_layout=True)

_BLOCK = {"gpu": 512, "interpreter": 32}
_LANES = {"gpu": 8 * LANES, "interpreter": 2 * LANES}


@keep_plans
def plan_receive_tables(
    operands: ReceiveOperands,
    spec: TableSpec,
    rank: int,
    top_k: int,
    num_rows: int,
    num_tokens: int,
    target: Target,
) -> LaunchPlan:
    """Find the slots for this rank's experts among the rows that arrive.

    num_rows: M, the slots that there is memory for; with blocks W * back_rows. num_tokens: T. With rows of tokens every
    slot gets a row, by (source, token, k); with blocks at most `back` of a source, from a multiple of back_rows on.

    Inputs: came, [header], [lost]. Outputs: ids int32 `[M, 1]`, the expert here of each slot, -1: none; weights fp32
    `[M, 1]`, 0 without an expert; with rows of tokens slot_of_row int32 `[M]`, the slot among those that came, K for
    each row, -1: none; with header spoilt bool `[T]`: lost, or a rank sent another header.
    """
    came, header, lost = operands
    require_kind("spec", spec, TableSpec)
    rank = as_integer("rank", rank, 0, spec.num_ranks)
    for name, value, least in (("top_k", top_k, 1), ("num_rows", num_rows, 0), ("num_tokens", num_tokens, 0)):
        as_integer(name, value, least)
    width, counted = spec.width(top_k), spec.mode == "all_to_all"
    if counted and spec.by_slot:
        raise InvalidInput("rows must be 'tokens' with mode='all_to_all', got 'slots'; counts say their places")
    sources = 1 if counted else spec.num_ranks
    require_spec("came", came, ("rows", width) if counted else (sources, "numbers"), "int32")
    each, rest = (came.shape[0], 0) if counted else divmod(came.shape[1] - HEADER, width)
    if rest or each < 0:
        raise InvalidInput(f"came must have {HEADER} + n * {width} columns, got {came}; pass the messages that came")
    if (header is None) != counted:
        raise InvalidInput(
            f"header must be given unless mode='all_to_all', got {header} with {spec.mode!r}; correct it"
        )
    expected = sources * each if spec.by_slot else num_rows if counted else sources * spec.back_rows
    if num_rows != expected:
        raise InvalidInput(f"num_rows must be {expected} for {spec}, got {num_rows}; pass that")
    for name, array, shape, dtype in (
        ("header", header, (HEADER,), "int32"),
        ("lost", lost, (num_tokens,), "bool"),
    ):
        if array is not None:
            require_spec(name, array, shape, dtype)
    builder = PlanBuilder("receive_tables", target)
    present = builder.inputs(operands._asdict())
    outputs = [
        builder.output(name, ArraySpec(shape, dtype))
        for name, shape, dtype in receive_shapes(num_rows, num_tokens, spec)
    ]
    if not target.compiled:
        from moe_core.ops.exchange import reference_tables as twins

        constants = {"spec": spec, "rank": rank, "top_k": top_k, "num_rows": num_rows, "num_tokens": num_tokens}
        return builder.reference(twins.receive_tables, present, constants, outputs)
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
    builder.scratch("block_counts", ArraySpec((sources, blocks), "int32"))
    constants = passed(TOP_K=top_k, PER_RANK=spec.per_rank, HEADER=head)
    arguments = builder.pointers("came", "block_counts")
    arguments |= passed(each=each, block_rows=block_rows, num_blocks=blocks, rank=rank) | constants
    builder.launch(COUNT_RECEIVED, (blocks, sources), arguments | passed(COLUMNS=columns, BLOCK_R=block_r))
    arguments = builder.pointers("came", "header", "lost", "block_counts", "ids", "weights", "slot_of_row", "spoilt")
    arguments |= passed(num_sources=sources, each=each, block_rows=block_rows, num_blocks=blocks, num_tokens=num_tokens)
    stride = num_rows if counted else spec.back_rows
    arguments |= passed(rank=rank, most=num_rows if counted else spec.back, stride=stride)
    arguments |= constants | passed(SOURCES=padded_sources, COLUMNS=columns, BLOCK_R=block_r)
    arguments |= passed(BLOCK_B=64 if target.on_gpu else 2, BLOCK_FILL=block)
    builder.launch(PLACE_RECEIVED, (blocks, sources), arguments)
    return builder.build()


def receive_shapes(num_rows: int, num_tokens: int, spec: TableSpec) -> list[tuple[str, tuple[int, ...], str]]:
    shapes: list[tuple[str, tuple[int, ...], str]] = [
        ("ids", (num_rows, 1), "int32"),
        ("weights", (num_rows, 1), "float32"),
    ]
    if not spec.by_slot:
        shapes.append(("slot_of_row", (num_rows,), "int32"))
    if spec.mode != "all_to_all":
        shapes.append(("spoilt", (num_tokens,), "bool"))
    return shapes
