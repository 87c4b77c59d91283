"""Stores and loads at the addresses of other ranks, the ops of mode `peer`.

A table `*_at` is int64 `[W]`: the address of one array at every rank, in the symmetric allocation (on a CPU shared
memory). The caller makes barriers between stores and reads, and between reads and later stores. No call waits for the
host or has a gradient.

Common arguments. places: of `peer_places`. rank: this one. num_rows: R. programs: the most blocks of a launch, so that
it runs beside others. memory: this rank's symmetric tensor; traced programs keep the order of calls with it.

Letters: W ranks, L places of a rank, P = W * L, T tokens of a rank, K top-k, D columns, slot `s = t * K + k`, R rows.
Rows have a multiple of 16 bytes. Ops raise InvalidInput for wrong shapes or dtypes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_core.base.checks import as_integer
from moe_core.errors import InvalidInput
from moe_core.formats import Format
from moe_core.ops.exchange.operands import Checks as Checks
from moe_core.ops.exchange.operands import HomeTokens as HomeTokens
from moe_core.parallel.placement import Placement
from moe_core.specs.operands import RaggedLayout
from moe_torch.bridge.options import dtype_name
from moe_torch.operators import exchange as operators
from moe_torch.operators.pushed import BegunExperts as BegunExperts
from moe_torch.operators.pushed import experts_begin as experts_begin
from moe_torch.operators.pushed import experts_push as experts_push

_NO_CHECKS = Checks()


class PeerPlaces(NamedTuple):
    """The row of every slot at its owner, int32.

    owners, rows `[T, K]`: the rank and the row there, -1: none. received `[1, L]`: rows for each expert here, also
    those that do not fit. overflow `[1]`: rows of all ranks that do not fit.
    """

    owners: torch.Tensor
    rows: torch.Tensor
    received: torch.Tensor
    overflow: torch.Tensor


def peer_places(
    ids: torch.Tensor, layout: RaggedLayout, counts: torch.Tensor, *, rank: int, receive: int
) -> PeerPlaces:
    """Find the owner of every slot, and the row there. Owners have rows by (expert, home, slot).

    Args:
        ids: int32 `[T, K]`, places, -1: none. Place p is of rank `p // L`.
        layout: `make_layout(ids, P)`.
        counts: int32 `[W, P]`, `layout.group_sizes` of every rank.
        receive: R. Rows beyond are only counted.

    Returns:
        the places. `layout_of_runs(places.received, R)` is the owner's layout of arriving rows.

    Raises Unsupported for more than 8192 counts of one rank on a GPU.
    """
    places = operators.PEER_PLACES.call(
        ids=ids, group_start=layout.group_start, row_of_slot=layout.row_of_slot, counts=counts,
        rank=as_integer("rank", rank, 0), receive=_rows(receive, "receive"),
    )  # fmt: skip
    return PeerPlaces(*places)


def push_counts(
    counts: torch.Tensor, counts_at: torch.Tensor, *, rank: int, memory: torch.Tensor | None = None
) -> None:
    """Store this rank's counts int32 `[N]` to row `rank` of the arrays int32 `[W, N]` at counts_at."""
    rank = as_integer("rank", rank, 0)
    operators.PUSH_COUNTS.call(counts=counts, counts_at=counts_at, memory=memory, rank=rank)


def dispatch_push(
    x: torch.Tensor,
    places: PeerPlaces,
    rows_at: torch.Tensor,
    *,
    num_rows: int,
    programs: int | None = None,
    format: Format | None = None,
    scales_at: torch.Tensor | None = None,
    memory: torch.Tensor | None = None,
) -> None:
    """Store the row of every token to the places of its slots.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`. Rows may be strided.
        rows_at: of arrays `[num_rows, D]`, of the dtype of x or the format's codes.
        format: e4m3 with groups of one row, such as `fp8_group`; else raises Unsupported. Codes and scales have the
            bits of `quantize_rows`.
        scales_at: with a format, of arrays fp32 `[num_rows, groups]`.
    """
    operators.DISPATCH_PUSH.call(
        x=x, owners=places.owners, rows=places.rows, rows_at=rows_at, scales_at=scales_at, memory=memory,
        num_rows=_rows(num_rows), format=format, programs=programs,
    )  # fmt: skip


def push_routing(
    weights: torch.Tensor,
    places: PeerPlaces,
    weights_at: torch.Tensor | None,
    sources_at: torch.Tensor | None,
    *,
    rank: int,
    num_rows: int,
    memory: torch.Tensor | None = None,
) -> None:
    """Store the weights of slots at their rows, and where their results go.

    Args:
        weights: fp32 `[T, K]`.
        weights_at: of arrays fp32 `[num_rows]`. None: no weights.
        sources_at: of arrays int32 `[num_rows, 2]`, for (rank, slot). None: none.
    """
    operators.PUSH_SLOTS.call(
        weights=weights, owners=places.owners, rows=places.rows, weights_at=weights_at, sources_at=sources_at,
        memory=memory, rank=as_integer("rank", rank, 0), num_rows=_rows(num_rows),
    )  # fmt: skip


def take_rows(
    x: torch.Tensor,
    rows: torch.Tensor,
    group_start: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """Copy tokens' rows that arrived once to their slots' rows.

    Args:
        x: bf16, fp16 or fp32 `[N, D]`, or codes of e4m3.
        rows: int32 `[R, 1]`, rows of x, outside [0, N): zeros.
        group_start: int32 `[L + 1]`. Its last entry is the number of rows to write.
        scales: fp32 `[N, ceil(D / 128)]`, of codes.
        dtype: of the result, for codes. None: that of x.

    Returns:
        y `[R, D]`. Rows from `group_start[-1]` on are not written. Codes become numbers as by `dequantize`.
    """
    options = {"dtype": dtype_name("dtype", dtype), "programs": programs}
    return operators.TAKE_ROWS.call(x=x, scales=scales, rows=rows, group_start=group_start, **options)


def combine_pull_weights(
    places: PeerPlaces, weights_at: torch.Tensor, *, num_rows: int, memory: torch.Tensor | None = None
) -> torch.Tensor:
    """Load a number of every slot from its owner's array fp32 `[num_rows]`: fp32 `[T, K]`, 0 without a row."""
    return operators.COMBINE_PULL_WEIGHTS.call(
        owners=places.owners, rows=places.rows, weights_at=weights_at, memory=memory, num_rows=_rows(num_rows)
    )


def combine_push(
    y: torch.Tensor,
    sources: torch.Tensor,
    group_start: torch.Tensor,
    slots_at: torch.Tensor,
    *,
    num_slots: int,
    programs: int | None = None,
    memory: torch.Tensor | None = None,
) -> None:
    """Store an owner's results to their slots at home, where `reduce(order="slot")` adds them.

    Args:
        y: bf16, fp16 or fp32 `[R, D]`.
        sources: int32 `[R, 2]`, of `push_routing`: (home, slot).
        group_start: int32 `[L + 1]`. Its last entry is the number of rows with a source.
        slots_at: of arrays `[num_slots, D]`.
        num_slots: of every home.
    """
    operators.COMBINE_PUSH.call(
        y=y, sources=sources, group_start=group_start, slots_at=slots_at, memory=memory,
        num_slots=_rows(num_slots, "num_slots"), programs=programs,
    )  # fmt: skip


class PushedTokens(NamedTuple):
    """Results of `push_tokens_once`, int32.

    places `[T, K]`: of slots, -1: none. tokens_per_expert `[E]`. invalid_ids `[1]`: ids outside [-1, E). overflow
    `[1]`: 0. With visits, owners and rows `[T, W]`: the ranks that a token visits and its rows there, -1: none.
    """

    places: torch.Tensor
    tokens_per_expert: torch.Tensor
    invalid_ids: torch.Tensor
    overflow: torch.Tensor
    owners: torch.Tensor | None = None
    rows: torch.Tensor | None = None


class TokensAt(NamedTuple):
    """Tables of arrays for M = most tokens of every rank.

    rows `[W * M, D]`. None: sent apart. ids int32 and weights fp32 `[W * M, K]`. headers int32 `[2 * W + 1, 12]`: the
    last row begins with the rank's turns, equal at all ranks at first.
    """

    rows: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    headers: torch.Tensor
    most: int


def push_tokens_once(
    tokens: HomeTokens,
    header: torch.Tensor,
    at: TokensAt,
    *,
    rank: int,
    placement: Placement,
    programs: int | None = None,
    visits: bool = False,
    memory: torch.Tensor | None = None,
) -> PushedTokens:
    """Store a rank's tokens, ids and weights in row `rank * most + t` of every array.

    Args:
        tokens: rows go where a token has an expert, and only with `at.rows`. Ids and weights go to all.
        header: int32 `[8]`. It goes to all ranks with T behind it, to one of two rows in turn.
        at: the tables.
        placement: gives the numbers of experts and places.
        visits: return owners and rows, too.

    Raises Unsupported for 2**31 slots or more, and on a GPU for more experts or top_k than kernels take.
    """
    values = tokens if at.rows is not None else tokens._replace(x=None)
    pushed = operators.PUSH_TOKENS_ONCE.call(
        **values._asdict(), header=header, rows_at=at.rows, ids_at=at.ids, weights_at=at.weights,
        headers_at=at.headers, memory=memory, rank=as_integer("rank", rank, 0), per_rank=placement.per_rank,
        num_experts=placement.num_experts, most=_rows(at.most, "most"), programs=programs, visits=visits,
    )  # fmt: skip
    return PushedTokens(*pushed)


def sum_results(
    y: torch.Tensor,
    places: torch.Tensor,
    *,
    checks: Checks = _NO_CHECKS,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    memory: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the results of each token's slots as `reduce(order="slot")` does. NaN where a check fails.

    Args:
        y: `[N, D]`, results by slot, N at least T * K.
        places: int32 `[T, K]`, of `push_tokens_once`, or the rows of `peer_places`. -1 adds nothing.
        checks: see `Checks`.
        shared, shared_gate, out_dtype: as for `combine_pull`.
        out: `[T, D]` of the dtype of the sum, at a multiple of 16 bytes. None: a new tensor.

    Returns:
        out.

    Raises InvalidInput for an out_dtype other than out's.
    """
    optional = {**checks._asdict(), "shared": shared, "shared_gate": shared_gate}
    if out is None:
        out_name = dtype_name("out_dtype", out_dtype)
        return operators.SUM_RESULTS.call(y=y, row_of_slot=places, **optional, memory=memory, out_dtype=out_name)
    if out_dtype not in (None, out.dtype):
        raise InvalidInput(f"out_dtype must be that of out, {out.dtype}, got {out_dtype}; leave it out")
    operators.SUM_RESULTS_INTO.call(y=y, row_of_slot=places, **optional, out=out, memory=memory)
    return out


def result_addresses(
    sources: torch.Tensor, group_start: torch.Tensor, slots_at: torch.Tensor, *, num_slots: int, width: int, dtype: Any
) -> torch.Tensor:
    """Return where an owner's results go, for `experts_push`: int64 `[R]`, each row's slot at its home, 0: none.

    Arguments as for `combine_push`. width, dtype: D and the arrays' dtype.
    """
    return operators.RESULT_ADDRESSES.call(
        sources=sources, group_start=group_start, slots_at=slots_at, num_slots=_rows(num_slots, "num_slots"),
        width=as_integer("width", width, 1), dtype=dtype_name("dtype", dtype),
    )  # fmt: skip


def _rows(number: int, name: str = "num_rows") -> int:
    return as_integer(name, number, 0)
