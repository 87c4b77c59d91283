"""Plans of exchanges through peers' addresses for the compile gate, and how wide their loads and stores are."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.shapes import SHAPES
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import format_named
from moe_core.ops.exchange.direct import PUSH_TOKENS_ONCE, TOLD, plan_push_tokens_once, plan_sum_results
from moe_core.ops.exchange.operands import Checks, HomeTokens, Places, TokenSizes, TokenTables
from moe_core.ops.exchange.pull import plan_combine_pull_weights, plan_take_rows
from moe_core.ops.exchange.push import plan_combine_push, plan_dispatch_push, plan_push_counts, plan_push_slots
from moe_core.ops.exchange.tables import plan_peer_places
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from tests.support.compile_gate import exchange_tables, pushed_plans

#: Kernels whose loads and stores at peers' addresses are of rows, and what beside 16 bytes they may be: scales.
_MOVES_ROWS = {
    "exchange.kernels.push:push_rows": (),
    "exchange.kernels.push:push_results": (),
    "exchange.kernels.push:push_quantized_rows": ("st.global.b32", "st.global.v2.b32"),
    "exchange.kernels.direct:push_tokens_once": ("st.global.b32", "st.global.v2.b32"),
}
#: Ranks, rows that an owner takes, and programs of a launch that runs beside others.
RANKS, ROWS, PROGRAMS = 4, 20000, 24


def plans(target: Target) -> Iterator[LaunchPlan]:
    """Every model's rows, few and many, beside others and alone; other dtypes, odd K and width, and formats."""
    table = ArraySpec((RANKS,), "int64")
    cases = [(shape.d_model, shape.top_k, tokens, "bfloat16") for shape in SHAPES.values() for tokens in (1, 4096)]
    cases += [(2048, 8, 4096, "float32"), (1032, 9, 4096, "float16"), (72, 3, 64, "bfloat16")]
    for width, top_k, tokens, dtype in cases:
        ids = ArraySpec((tokens, top_k), "int32")
        places = Places(ids, ids)
        x = ArraySpec((tokens, width), dtype)
        for programs in (None, PROGRAMS):
            yield plan_dispatch_push(x, places, table, target, num_rows=ROWS, programs=programs)
            sources, start = ArraySpec((tokens, 2), "int32"), ArraySpec((33,), "int32")
            yield plan_combine_push(x, sources, start, table, target, num_slots=tokens, programs=programs)
            rows, source = ArraySpec((tokens, 1), "int32"), ArraySpec((99, width), dtype)
            yield plan_take_rows(source, rows, start, target, programs=programs)
            if width % 16 == 0:
                codes, scales = (
                    ArraySpec((99, size), kind)
                    for size, kind in ((width, "float8_e4m3fn"), (-(-width // 128), "float32"))
                )
                yield plan_take_rows(codes, rows, start, target, scales=scales, dtype=dtype, programs=programs)
            for name in ("fp8_group", "fp8_group_pow2") if width % 16 == 0 else ():
                quantised = {"format": format_named(name), "scales_at": table}
                yield plan_dispatch_push(x, places, table, target, num_rows=ROWS, programs=programs, **quantised)
        yield from _direct(x, ids, table, target)
    ids, weights = ArraySpec((4096, 8), "int32"), ArraySpec((4096, 8), "float32")
    places = Places(ids, ids)
    for tables in ({"weights_at": table}, {"sources_at": table}, {"weights_at": table, "sources_at": table}):
        yield plan_push_slots(weights, places, target, rank=1, num_rows=ROWS, **tables)
    yield plan_combine_pull_weights(places, table, target, num_rows=ROWS)
    yield plan_push_counts(ArraySpec((264,), "int32"), table, target, rank=1)
    for num_places in (256, 4096):
        layout = ArraySpec((num_places + 1,), "int32"), ArraySpec((ids.size,), "int32")
        counts = ArraySpec((RANKS, num_places), "int32")
        yield plan_peer_places(ids, *layout, counts, target, rank=1, receive=ROWS)


def _direct(x: ArraySpec, ids: ArraySpec, table: ArraySpec, target: Target) -> Iterator[LaunchPlan]:
    """Rows of tokens that have their places, of experts in order and in others, masked and given; and the sums."""
    (tokens, width), experts = x.shape, 128
    weights, header, mask = ArraySpec(ids.shape, "float32"), ArraySpec((8,), "int32"), ArraySpec((tokens,), "bool")
    tables, sizes = TokenTables(table, table, table, table), TokenSizes(1, experts // RANKS, experts, tokens + 5)
    plain, others = HomeTokens(x, ids, weights), (header, tables, sizes, target)
    yield plan_push_tokens_once(plain, *others)
    by_table = plain._replace(places_of_experts=ArraySpec((experts,), "int32"), token_mask=mask)
    yield plan_push_tokens_once(by_table, *others, programs=PROGRAMS)
    yield plan_push_tokens_once(plain._replace(given=ids), *others, visits=True)
    if tokens > 1:
        apart = header, tables._replace(rows_at=None), sizes, target
        yield plan_push_tokens_once(plain._replace(x=None), *apart, visits=True)
    results, told = ArraySpec((ids.size, width), x.dtype), ArraySpec((2 * RANKS + 1, TOLD), "int32")
    gate, checks = ArraySpec((tokens, 1), "float32"), Checks(told)
    yield plan_sum_results(results, ids, target, checks=checks)
    yield plan_sum_results(results, ids, target, checks=checks, shared=x, shared_gate=gate, out_dtype="float32")
    yield plan_sum_results(results, ids, target, checks=Checks(agree=ArraySpec((1,), "bool"), wanted=ids))


def narrow_moves(launch: KernelLaunch, ptx: str) -> str:
    """What says which instructions move rows between ranks in pieces of fewer than 16 bytes; "" where none do."""
    kernel = launch.kernel.name
    if kernel == PUSH_TOKENS_ONCE.name and dict(launch.arguments)["x"] == Constant(None):
        return ""
    if kernel not in _MOVES_ROWS and not pushed_plans.pushes_rows(launch):
        return ""
    # Products store rows at peers alone; with .cg they load the layout.
    patterns = r"st\.global|ld\.global\.cg" if kernel in _MOVES_ROWS else r"st\.global"
    moves = set(re.findall(rf"\b(?:{patterns})[.\w]*", ptx))
    wide = {move for move in moves if move.endswith((".v4.b32", ".v2.b64"))}
    narrow = ", ".join(sorted(moves - wide - set(_MOVES_ROWS.get(kernel, ())))) or ("" if wide else "nothing")
    return narrow and f"rows move by {narrow}, not 16 bytes at once"


#: For `gate.GROUPS`.
GROUPS = {"exchange": plans, "exchange_tables": exchange_tables.plans, **pushed_plans.GROUPS}
