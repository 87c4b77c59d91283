"""Planning of the places of slots' rows."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, keep_plans, require_spec, row_stride
from moe_core.base.checks import as_integer, require_at_least
from moe_core.base.sizes import INT32_LIMIT, padded
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.exchange.checks import require_places, slots_block
from moe_core.ops.exchange.kernels import places as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed

RUN_STARTS = declare_kernel(kernels.run_starts)
SLOT_PLACES = declare_kernel(kernels.slot_places)

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
        from moe_core.ops.exchange import reference as twins

        constants = {"rank": rank, "receive": receive}
        return builder.reference(twins.peer_places, present, constants, outputs)
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
