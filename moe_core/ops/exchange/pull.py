"""Planning of loads from peers: results, and gradients of weights."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec, row_stride
from moe_core.base.checks import as_integer, require_choice
from moe_core.base.sizes import INT32_LIMIT
from moe_core.errors import InvalidInput
from moe_core.ops.exchange.checks import (
    at_once,
    copy_grid,
    copy_tile,
    require_places,
    require_programs,
    require_table,
    require_width,
    slots_block,
)
from moe_core.ops.exchange.kernels import pull as kernels
from moe_core.ops.exchange.operands import Places, RowsAt
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed

PULL_ROWS = declare_kernel(kernels.pull_rows)
PULL_WEIGHTS = declare_kernel(kernels.pull_weights)


@keep_plans
def plan_combine_pull(
    places: Places,
    results_at: RowsAt,
    target: Target,
    *,
    shared: ArraySpec | None = None,
    shared_gate: ArraySpec | None = None,
    out_dtype: str | None = None,
    programs: int | None = None,
) -> LaunchPlan:
    """out `[T, D]` = sum over k of row rows[t, k] of the array `[num_rows, D]` of peer owners[t, k].

    In fp32, in the order k = 0..K-1 and with one cast: the bits of `plan_reduce` of order `row`. shared, shared_gate,
    out_dtype: as there. programs: the most of the launch; no bit depends on it.

    Inputs: owners, rows, results_at, [shared], [shared_gate].
    """
    tokens, top_k = require_places(*places)
    addresses, num_rows, width, dtype = results_at
    num_ranks = require_table("results_at", addresses)
    dtype = dtypes.canonical(dtype)
    require_choice("dtype", dtype, dtypes.MATMUL_DTYPES)
    as_integer("width", width, 1, INT32_LIMIT)
    require_width("results", width, dtype)
    as_integer("num_rows", num_rows, 0, INT32_LIMIT)
    require_programs(programs)
    if shared is not None:
        row_stride("shared", require_spec("shared", shared, (tokens, width), dtypes.MATMUL_DTYPES, contiguous=False))
    if shared_gate is not None:
        if shared is None:
            raise InvalidInput("shared_gate must be None without shared, got an array; pass shared or leave it out")
        require_spec("shared_gate", shared_gate, (tokens, 1), "float32")
    out_dtype = dtypes.canonical(out_dtype or dtype)
    require_choice("out_dtype", out_dtype, dtypes.MATMUL_DTYPES)
    builder = PlanBuilder("combine_pull", target)
    arrays = {**places._asdict(), "results_at": addresses, "shared": shared, "shared_gate": shared_gate}
    present = builder.inputs(arrays)
    builder.output("out", ArraySpec((tokens, width), out_dtype))
    builder.sums("slots k = 0..K-1 in order, fp32" + (", then the shared expert" if shared is not None else ""))
    if not target.compiled:
        from moe_core.ops.exchange import reference as twins

        constants = {"num_rows": num_rows, "width": width, "dtype": dtype, "out_dtype": out_dtype}
        return builder.reference(twins.pull_rows, present, constants, ("out",))
    together = at_once(top_k)
    tile = copy_tile(tokens, width, dtypes.itemsize(dtype), programs, target, each=together)
    block_t, block_n, warps = tile
    arguments = builder.pointers("owners", "rows", "results_at", "shared", "shared_gate", "out")
    arguments |= passed(num_tokens=tokens, num_ranks=num_ranks, num_rows=num_rows, TOP_K=top_k, AT_ONCE=together)
    arguments |= passed(WIDTH=width, DTYPE=dtype, SHARED_STRIDE=0 if shared is None else row_stride("shared", shared))
    arguments |= passed(BLOCK_T=block_t, BLOCK_N=block_n)
    builder.launch(PULL_ROWS, copy_grid(tokens, -(-width // block_n), block_t, programs), arguments, warps, 1)
    return builder.build()


@keep_plans
def plan_combine_pull_weights(places: Places, weights_at: ArraySpec, target: Target, *, num_rows: int) -> LaunchPlan:
    """out fp32 `[T, K]` = entry rows[t, k] of the fp32 `[num_rows]` of peer owners[t, k]; 0 where rows is -1.

    Inputs: owners, rows, weights_at int64 `[W]`.
    """
    require_places(*places)
    rows = places.rows
    num_ranks = require_table("weights_at", weights_at)
    as_integer("num_rows", num_rows, 0, INT32_LIMIT)
    builder = PlanBuilder("combine_pull_weights", target)
    present = builder.inputs({**places._asdict(), "weights_at": weights_at})
    builder.output("out", ArraySpec(rows.shape, "float32"))
    if not target.compiled:
        from moe_core.ops.exchange import reference as twins

        return builder.reference(twins.pull_weights, present, {"num_rows": num_rows}, ("out",))
    block = slots_block(target)
    arguments = builder.pointers("owners", "rows", "weights_at", "out")
    arguments |= passed(num_slots=rows.size, num_ranks=num_ranks, num_rows=num_rows, BLOCK=block)
    builder.launch(PULL_WEIGHTS, (-(-rows.size // block),), arguments)
    return builder.build()
