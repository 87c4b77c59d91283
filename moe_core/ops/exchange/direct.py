"""Planning of the exchange without counts: all stores of a home in one launch, and its sums.

Every home has rows of its own at every owner, row `home * most + t` for token t, so nobody needs counts.
"""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec, row_stride
from moe_core.base.checks import as_integer, require_at_least, require_choice, require_flag
from moe_core.base.sizes import INT32_LIMIT, first_holding, padded
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.exchange.checks import copy_tile, require_programs, require_table, require_width
from moe_core.ops.exchange.kernels import direct as kernels
from moe_core.ops.exchange.operands import Checks, HomeTokens, TokenSizes, TokenTables
from moe_core.ops.exchange.tables import HEADER, columns_of
from moe_core.ops.reduction.reduce import reduce_tile, require_beside, unrolled
from moe_core.ops.routing.layout import require_experts
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed

PUSH_TOKENS_ONCE = declare_kernel(kernels.push_tokens_once, counts_slots=True)
SUM_RESULTS = declare_kernel(kernels.sum_results)

#: A rank's header, its tokens, and zeros up to 16 bytes.
TOLD = HEADER + 4
_WARPS = 4
_COUNTED = {"gpu": (256, 1024), "interpreter": (16, 64)}
_TOKENS = {"gpu": 32, "interpreter": 4}
#: Ids of no token per step of a program, and in all.
_FILL, _FILLED = {"gpu": 512, "interpreter": 16}, 8192
_NO_CHECKS = Checks()


@keep_plans
def plan_push_tokens_once(
    operands: HomeTokens,
    header: ArraySpec,
    tables: TokenTables,
    sizes: TokenSizes,
    target: Target,
    *,
    programs: int | None = None,
    visits: bool = False,
) -> LaunchPlan:
    """Store this rank's tokens, with their ids and weights, at every owner of one of their experts.

    Token t of rank h has row h * M + t, M = sizes.most. Rows go to the ranks that a token visits. Ids and weights go to
    all ranks: an id is a place's number at the owner, -1: none there, also behind a rank's last token. Row h of the
    headers, and in every other turn row W + h, is header int32 `[8]` of rank h, its tokens, and zeros. The last row
    begins with the rank's turns, at first equal on all ranks. programs: the most of the launch.

    Inputs: [x], ids, weights, header, [places_of_experts], [given], [token_mask], [rows_at], ids_at, weights_at,
    headers_at. Outputs, int32: places `[T, K]`, -1: none; tokens_per_expert `[E]`; invalid_ids `[1]`, ids outside [-1,
    E); overflow `[1]`, 0; with visits owners and rows `[T, W]`: the ranks that a token visits and its rows there.
    """
    x, ids, weights, token_mask, places_of_experts, given = operands
    rank, per_rank, num_experts, most = sizes
    require_spec("ids", ids, ("num_tokens", "top_k"), "int32")
    (tokens, top_k), width, stride, dtype = ids.shape, 1, 1, "float32"
    require_at_least("top_k of ids", top_k, 1)
    require_spec("weights", weights, ids.shape, "float32")
    require_spec("header", header, (HEADER,), "int32")
    num_ranks = require_table("ids_at", tables.ids_at)
    addresses = {name: getattr(tables, name) for name in ("rows_at", "ids_at", "weights_at", "headers_at")}
    for name, table in addresses.items():
        if table is not None:
            require_table(name, table, num_ranks)
    if (x is None) != (tables.rows_at is None):
        raise InvalidInput(f"rows_at must be given with x alone, got {tables.rows_at} with x {x}; pass both or neither")
    if x is not None:
        require_spec("x", x, (tokens, "d_model"), dtypes.MATMUL_DTYPES, contiguous=False)
        stride, width, dtype = row_stride("x", x), x.shape[1], x.dtype
        require_width("x", width, dtype)
    as_integer("rank", rank, 0, num_ranks)
    for name, value, least in (("per_rank", per_rank, 1), ("num_experts", num_experts, 1), ("most", most, tokens)):
        as_integer(name, value, least, INT32_LIMIT)
    if num_ranks * most * max(top_k, num_ranks) >= INT32_LIMIT:
        raise Unsupported(f"slots of all ranks must stay below 2**31, got {num_ranks} x {most} x {top_k}; split them")
    optional = {"places_of_experts": places_of_experts, "given": given, "token_mask": token_mask}
    shapes = {"places_of_experts": (num_experts,), "given": ids.shape, "token_mask": (tokens,)}
    for name, array in optional.items():
        if array is not None:
            require_spec(name, array, shapes[name], "bool" if name == "token_mask" else "int32")
    if places_of_experts is not None and given is not None:
        raise InvalidInput("places_of_experts must be None where places are given, got both; leave one out")
    require_programs(programs)
    require_flag("visits", visits)
    builder = PlanBuilder("push_tokens_once", target)
    arrays = {"x": x, "ids": ids, "weights": weights, "header": header, **optional}
    present = builder.inputs(arrays | addresses)
    outputs = [builder.output("places", ids), builder.output("tokens_per_expert", ArraySpec((num_experts,), "int32"))]
    outputs += [builder.output(name, ArraySpec((1,), "int32")) for name in ("invalid_ids", "overflow")]
    if visits:
        outputs += [builder.output(name, ArraySpec((tokens, num_ranks), "int32")) for name in ("owners", "rows")]
    if not target.compiled:
        constants = sizes._asdict() | {"visits": visits}
        from moe_core.ops.exchange import reference as twins

        return builder.reference(twins.push_tokens_once, present, constants, outputs)
    require_experts(num_experts)
    if x is None:
        block_t, block_n, warps = _TOKENS[target.engine], 1, _WARPS
    else:
        block_t, block_n, warps = copy_tile(tokens, width, dtypes.itemsize(dtype), programs, target)
    if warps < _WARPS:
        block_n, warps = block_n * _WARPS // warps, _WARPS
    arguments = builder.pointers(*arrays, *addresses, "places", "tokens_per_expert", "invalid_ids", "overflow")
    arguments |= builder.pointers("owners", "rows") | passed(
        num_tokens=tokens, num_ranks=num_ranks, rank=rank, most=most
    )
    arguments |= passed(PER_RANK=per_rank, NUM_EXPERTS=num_experts, TOP_K=top_k, COLUMNS=columns_of(top_k), WIDTH=width)
    arguments |= passed(X_STRIDE=stride, DTYPE=dtype, HEADER=HEADER, EXPERTS=padded(num_experts, 32))
    arguments |= passed(CHUNK=first_holding(_COUNTED[target.engine], ids.size))
    arguments |= passed(BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_FILL=_FILL[target.engine])
    tiles = max(-(-tokens // block_t) * -(-width // block_n), -(-(most - tokens) * top_k // _FILLED), 1)
    builder.launch(PUSH_TOKENS_ONCE, (1 + (tiles if programs is None else min(tiles, programs)),), arguments, warps, 1)
    return builder.build()


@keep_plans
def plan_sum_results(
    y: ArraySpec,
    row_of_slot: ArraySpec,
    target: Target,
    *,
    checks: Checks = _NO_CHECKS,
    shared: ArraySpec | None = None,
    shared_gate: ArraySpec | None = None,
    out_dtype: str | None = None,
) -> LaunchPlan:
    """out `[T, D]`: the sums of `plan_reduce` of order `slot`, or NaN where a check fails.

    y `[N, D]`, N >= T * K: results by slot. row_of_slot int32 `[T, K]`: -1 adds nothing. Others: as for `plan_reduce`.

    Inputs: y, row_of_slot, [headers], [agree], [wanted], [shared], [shared_gate].
    """
    require_spec("row_of_slot", row_of_slot, ("num_tokens", "top_k"), "int32")
    tokens, top_k = row_of_slot.shape
    require_spec("y", y, ("num_slots", "d_model"), dtypes.MATMUL_DTYPES)
    rows, width = y.shape
    if rows < row_of_slot.size:
        raise InvalidInput(f"y must have a row for each of the {row_of_slot.size} slots, got {rows}; pass all results")
    num_ranks, (headers, agree, wanted) = 0, checks
    if headers is not None:
        require_spec("headers", headers, ("2 * num_ranks + 1", TOLD), "int32")
        num_ranks = headers.shape[0] // 2
        if headers.shape[0] != 2 * num_ranks + 1 or num_ranks < 1:
            raise InvalidInput(
                f"headers must have two rows for each rank and one more, got {headers}; pass the whole array"
            )
    if agree is not None:
        require_spec("agree", agree, (1,), "bool")
    if wanted is not None:
        require_spec("wanted", wanted, row_of_slot.shape, "int32")
    require_beside(shared, shared_gate, (tokens, width))
    out_dtype = dtypes.canonical(out_dtype or y.dtype)
    require_choice("out_dtype", out_dtype, dtypes.MATMUL_DTYPES)
    builder = PlanBuilder("sum_results", target)
    arrays = {"y": y, "row_of_slot": row_of_slot, **checks._asdict(), "shared": shared, "shared_gate": shared_gate}
    present = builder.inputs(arrays)
    builder.output("out", ArraySpec((tokens, width), out_dtype))
    builder.sums("slots k = 0..K-1 in order, fp32" + (", then the shared expert" if shared is not None else ""))
    if not target.compiled:
        from moe_core.ops.exchange import reference as twins

        return builder.reference(twins.sum_results, present, {"out_dtype": out_dtype}, ("out",))
    block_t, block_n, warps = reduce_tile(tokens, width, target)
    arguments = builder.pointers(*arrays, "out")
    arguments |= passed(num_tokens=tokens, num_rows=rows, num_ranks=num_ranks, TOP_K=top_k, COLUMNS=columns_of(top_k))
    arguments |= passed(WIDTH=width, SHARED_STRIDE=0 if shared is None else row_stride("shared", shared))
    arguments |= passed(UNROLL=unrolled(top_k), HEADER=HEADER, RANKS=padded(num_ranks, 1))
    arguments |= passed(BLOCK_T=block_t, BLOCK_N=block_n)
    builder.launch(SUM_RESULTS, (-(-tokens // block_t), -(-width // block_n)), arguments, warps)
    return builder.build()
