"""Planning of stores to peers."""

from __future__ import annotations

from moe_core.base import INT32_LIMIT, ArraySpec, Target, dtypes, keep_plans, require_spec, row_stride
from moe_core.base.checks import as_integer, require_at_least, require_choice, require_kind
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, quantized_shapes
from moe_core.ops.exchange import checks
from moe_core.ops.exchange.kernels import push as kernels
from moe_core.ops.exchange.kernels import results as result_kernels
from moe_core.ops.exchange.operands import Places
from moe_core.ops.quantize.rows import rule_of
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed

PUSH_ROWS = declare_kernel(kernels.push_rows)
PUSH_QUANTIZED_ROWS = declare_kernel(kernels.push_quantized_rows)
PUSH_SLOTS = declare_kernel(kernels.push_slots)
PUSH_COUNTS = declare_kernel(kernels.push_counts)
PUSH_RESULTS = declare_kernel(kernels.push_results)

#: Parts of the rows that results leave from in turn: a prime, so that parts rarely begin at equal homes.
_SECTIONS = 13


@keep_plans
def plan_dispatch_push(
    x: ArraySpec,
    places: Places,
    rows_at: ArraySpec,
    target: Target,
    *,
    num_rows: int,
    scales_at: ArraySpec | None = None,
    format: Format | None = None,
    programs: int | None = None,
) -> LaunchPlan:
    """Store row t of x `[T, D]` to row rows[t, k] of an array `[num_rows, D]` of peer owners[t, k], for all k.

    x: bf16, fp16 or fp32, rows may be strided. rows_at int64 `[W]`: addresses of the arrays, multiples of 16. format:
    of e4m3 with groups of one row; codes go to rows_at, fp32 scales to the arrays `[num_rows, groups]` at scales_at,
    with the bits of `plan_quantize_rows`. programs: the most of the launch, None: one for each tile. No bit depends on
    it.

    Inputs: x, owners, rows, rows_at, [scales_at]. No outputs. Raises InvalidInput, and Unsupported for other formats.
    """
    require_spec("x", x, ("num_tokens", "d_model"), dtypes.MATMUL_DTYPES, contiguous=False)
    stride, (tokens, width) = row_stride("x", x), x.shape
    _, top_k = checks.require_places(*places, tokens)
    num_ranks = checks.require_table("rows_at", rows_at)
    as_integer("num_rows", num_rows, 0, INT32_LIMIT)
    checks.require_programs(programs)
    if format is None:
        checks.require_width("x", width, x.dtype)
        if scales_at is not None:
            raise InvalidInput("scales_at must be None without a format, got an array; pass a format or leave it out")
    else:
        require_kind("format", format, Format)
        group = format.group_columns or 0
        if (
            format.element != "e4m3"
            or format.has_e8m0_scales
            or format.group_rows != 1
            or group < 16
            or group & (group - 1)
        ):
            raise Unsupported(
                f"format must be of e4m3 with fp32 scales of groups of one row, 16, 32, 64, ... columns wide, got "
                f"{format.name}; take fp8_group, or push rows as they are"
            )
        checks.require_width("codes", quantized_shapes(QuantizedSpec(format), (1, width)).values[1], "uint8")
        if scales_at is None:
            raise InvalidInput(f"scales_at must be the addresses of scales with {format.name}, got None; pass them")
        checks.require_table("scales_at", scales_at, num_ranks)
    builder = PlanBuilder("dispatch_push", target)
    arrays = {"x": x, **places._asdict(), "rows_at": rows_at, "scales_at": scales_at}
    present = builder.inputs(arrays)
    if not target.compiled:
        constants = {"num_rows": num_rows, "format": format}
        from moe_core.ops.exchange import reference as twins

        return builder.reference(twins.push_rows, present, constants, ())
    sizes = passed(num_tokens=tokens, num_ranks=num_ranks, num_rows=num_rows)
    sizes |= passed(TOP_K=top_k, AT_ONCE=checks.at_once(top_k), WIDTH=width, X_STRIDE=stride)
    if format is None:
        block_t, block_n, warps = checks.copy_tile(tokens, width, dtypes.itemsize(x.dtype), programs, target)
        arguments = builder.pointers("x", "owners", "rows", "rows_at") | sizes
        arguments |= passed(DTYPE=x.dtype, BLOCK_T=block_t, BLOCK_N=block_n)
        kernel, blocks = PUSH_ROWS, -(-width // block_n)
    else:
        assert format.group_columns is not None
        group, groups = format.group_columns, -(-width // format.group_columns)
        block_t, block_n, warps = checks.copy_tile(tokens, width, 1, programs, target, each=2)
        block_g = max(1, block_n // group)
        arguments = builder.pointers("x", "owners", "rows", "rows_at", "scales_at") | sizes
        arguments |= passed(GROUP=group, GROUPS=groups) | rule_of(format, target)
        arguments |= passed(BLOCK_T=block_t, BLOCK_G=block_g)
        kernel, blocks = PUSH_QUANTIZED_ROWS, -(-groups // block_g)
    builder.launch(kernel, checks.copy_grid(tokens, blocks, block_t, programs), arguments, warps, 1)
    return builder.build()


@keep_plans
def plan_push_slots(
    weights: ArraySpec,
    places: Places,
    target: Target,
    *,
    rank: int,
    num_rows: int,
    weights_at: ArraySpec | None = None,
    sources_at: ArraySpec | None = None,
) -> LaunchPlan:
    """Store the weights of slots at their rows, and where their results go.

    weights fp32 `[T, K]`. weights_at int64 `[W]`: addresses of fp32 `[num_rows]`. sources_at int64 `[W]`: addresses of
    int32 `[num_rows, 2]`, (rank, slot t * K + k) of the home.

    Inputs: weights, owners, rows, [weights_at], [sources_at]. No outputs.
    """
    checks.require_places(*places)
    rows = places.rows
    require_spec("weights", weights, rows.shape, "float32")
    tables = {"weights_at": weights_at, "sources_at": sources_at}
    supplied = {name: table for name, table in tables.items() if table is not None}
    if not supplied:
        raise InvalidInput("weights_at or sources_at must be given, got neither; leave out the call")
    num_ranks = {checks.require_table(name, table) for name, table in supplied.items()}
    if len(num_ranks) > 1:
        raise InvalidInput(
            f"weights_at and sources_at must have as many ranks, got {sorted(num_ranks)}; pass all peers'"
        )
    as_integer("rank", rank, 0, min(num_ranks))
    as_integer("num_rows", num_rows, 0, INT32_LIMIT)
    builder = PlanBuilder("push_slots", target)
    present = builder.inputs({"weights": weights, **places._asdict(), **tables})
    if not target.compiled:
        constants = {"rank": rank, "num_rows": num_rows}
        from moe_core.ops.exchange import reference as twins

        return builder.reference(twins.push_slots, present, constants, ())
    block = checks.slots_block(target)
    arguments = builder.pointers("weights", "owners", "rows", "weights_at", "sources_at")
    arguments |= passed(num_slots=rows.size, num_ranks=min(num_ranks), num_rows=num_rows, rank=rank, BLOCK=block)
    builder.launch(PUSH_SLOTS, (-(-rows.size // block),), arguments)
    return builder.build()


@keep_plans
def plan_push_counts(counts: ArraySpec, counts_at: ArraySpec, target: Target, *, rank: int) -> LaunchPlan:
    """Store counts int32 `[N]` to row `rank` of the int32 `[W, N]` of every peer, at addresses counts_at `[W]`.

    No outputs.
    """
    require_spec("counts", counts, ("size",), "int32")
    num_ranks = checks.require_table("counts_at", counts_at)
    as_integer("rank", rank, 0, num_ranks)
    builder = PlanBuilder("push_counts", target)
    present = builder.inputs({"counts": counts, "counts_at": counts_at})
    if not target.compiled:
        from moe_core.ops.exchange import reference as twins

        return builder.reference(twins.push_counts, present, {"rank": rank}, ())
    block, size = checks.slots_block(target), counts.shape[0]
    arguments = builder.pointers("counts", "counts_at") | passed(size=size, rank=rank, BLOCK=block)
    builder.launch(PUSH_COUNTS, (num_ranks, -(-size // block)), arguments)
    return builder.build()


@keep_plans
def plan_combine_push(
    y: ArraySpec,
    sources: ArraySpec,
    group_start: ArraySpec,
    slots_at: ArraySpec,
    target: Target,
    *,
    num_slots: int,
    programs: int | None = None,
) -> LaunchPlan:
    """Store row r of y `[R, D]` to row slot of an array `[num_slots, D]` of peer home, (home, slot) = sources[r].

    sources, group_start, slots_at: as for `plan_result_addresses`. programs: as for `plan_dispatch_push`.

    No outputs.
    """
    require_spec("y", y, ("num_rows", "d_model"), dtypes.MATMUL_DTYPES)
    checks.require_width("y", y.shape[1], y.dtype)
    require_spec("sources", sources, (y.shape[0], 2), "int32")
    require_spec("group_start", group_start, ("num_experts + 1",), "int32")
    require_at_least("length of group_start", group_start.shape[0], 2)
    num_ranks = checks.require_table("slots_at", slots_at)
    as_integer("num_slots", num_slots, 0, INT32_LIMIT)
    checks.require_programs(programs)
    builder = PlanBuilder("combine_push", target)
    present = builder.inputs({"y": y, "sources": sources, "group_start": group_start, "slots_at": slots_at})
    if not target.compiled:
        from moe_core.ops.exchange import reference as twins

        return builder.reference(twins.push_results, present, {"num_slots": num_slots}, ())
    rows, width = y.shape
    block_m, block_n, warps = checks.copy_tile(rows, width, dtypes.itemsize(y.dtype), programs, target)
    arguments = builder.pointers("y", "sources", "group_start", "slots_at")
    arguments |= passed(num_ranks=num_ranks, num_rows=rows, num_slots=num_slots)
    arguments |= passed(NUM_EXPERTS=group_start.shape[0] - 1, WIDTH=width, DTYPE=y.dtype)
    arguments |= passed(SECTIONS=_SECTIONS, BLOCK_M=block_m, BLOCK_N=block_n)
    grid = checks.copy_grid(rows, -(-width // block_n), block_m, checks.most_programs(programs, target))
    builder.launch(PUSH_RESULTS, grid, arguments, warps, 1)
    return builder.build()


RESULT_ADDRESSES = declare_kernel(result_kernels.result_addresses)


@keep_plans
def plan_result_addresses(
    sources: ArraySpec,
    group_start: ArraySpec,
    slots_at: ArraySpec,
    target: Target,
    *,
    num_slots: int,
    width: int,
    dtype: str,
) -> LaunchPlan:
    """results_at int64 `[R]`: the address of row slot of an array `[num_slots, width]` of dtype of peer home.

    (home, slot) = sources[r], int32 `[R, 2]`, of `plan_push_slots`; 0 if row r has none. group_start int32 `[L + 1]`:
    its last entry is the number of rows with a source. slots_at int64 `[W]`: addresses of the peers' arrays.
    """
    require_spec("sources", sources, ("num_rows", 2), "int32")
    require_spec("group_start", group_start, ("num_experts + 1",), "int32")
    require_at_least("length of group_start", group_start.shape[0], 2)
    num_ranks = checks.require_table("slots_at", slots_at)
    as_integer("num_slots", num_slots, 0, INT32_LIMIT)
    as_integer("width", width, 1, INT32_LIMIT)
    require_choice("dtype", dtype, dtypes.MATMUL_DTYPES)
    checks.require_width("results", width, dtype)
    builder = PlanBuilder("result_addresses", target)
    present = builder.inputs({"sources": sources, "group_start": group_start, "slots_at": slots_at})
    rows, row_bytes = sources.shape[0], width * dtypes.itemsize(dtype)
    builder.output("results_at", ArraySpec((rows,), "int64"))
    if not target.compiled:
        constants = {"num_slots": num_slots, "row_bytes": row_bytes}
        from moe_core.ops.exchange import reference as twins

        return builder.reference(twins.result_addresses, present, constants, ("results_at",))
    block = checks.slots_block(target)
    arguments = builder.pointers("sources", "group_start", "slots_at", "results_at")
    arguments |= passed(num_ranks=num_ranks, num_rows=rows, num_slots=num_slots)
    arguments |= passed(NUM_EXPERTS=group_start.shape[0] - 1, ROW_BYTES=row_bytes, BLOCK=block)
    builder.launch(RESULT_ADDRESSES, (-(-rows // block),), arguments)
    return builder.build()
