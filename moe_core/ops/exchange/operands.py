"""Records of the arrays of an exchange's ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

Record = TypeVar("Record", bound=tuple)


def record_of(kind: type[Record], arrays: Mapping[str, Any]) -> Record:
    fields: Any = kind
    return kind(**{name: arrays[name] for name in fields._fields if name in arrays})


def in_records(planner: Callable[..., Any], **records: type[Any]) -> Callable[..., Any]:
    """Return a planner that takes the arrays of its records (classes by parameter) by name."""
    fields = {field for kind in records.values() for field in kind._fields}

    def plan(**arguments: Any) -> Any:
        built = {name: record_of(kind, arguments) for name, kind in records.items()}
        return planner(**built, **{name: value for name, value in arguments.items() if name not in fields})

    return plan


class Places(NamedTuple):
    """The destination of every slot's row, int32 `[T, K]`: the rank and the row there, -1: none."""

    owners: Any
    rows: Any


class HomeTokens(NamedTuple):
    """The tokens of a rank.

    x `[T, D]`: bf16, fp16 or fp32, rows may be strided. None: rows are sent apart. ids int32, weights fp32 `[T, K]`: of
    experts, -1: none. token_mask bool `[T]`: False tokens have no experts. places_of_experts int32 `[E]`; None: an
    expert's place has its number. given int32 `[T, K]`: places of slots, if an expert has several.
    """

    x: Any
    ids: Any
    weights: Any
    token_mask: Any = None
    places_of_experts: Any = None
    given: Any = None


class TokenTables(NamedTuple):
    """Addresses int64 `[W]` of arrays for M tokens of every rank.

    ids_at, weights_at: of int32 and fp32 `[W * M, K]`. headers_at: of int32 `[2 * W + 1, 12]`. rows_at: of the dtype of
    x `[W * M, D]`; None: rows are sent apart.
    """

    ids_at: Any
    weights_at: Any
    headers_at: Any
    rows_at: Any = None


class TokenSizes(NamedTuple):
    """This rank, places of each rank, experts, and the most tokens of a rank."""

    rank: int
    per_rank: int
    num_experts: int
    most: int


class Checks(NamedTuple):
    """Arrays that make sums NaN. None: no such check.

    headers int32 `[2 * W + 1, 12]`: all tokens, if ranks' first eight numbers of the last turn differ. agree bool
    `[1]`: all tokens, if False. wanted int32 `[T, K]`: tokens with a slot that is not -1 here and has no row.
    """

    headers: Any = None
    agree: Any = None
    wanted: Any = None


class SendOperands(NamedTuple):
    """Arrays of a rank that has tokens.

    ids int32, weights fp32 `[T, K]`. places_of_experts int32 `[W * L]`, start int32 `[E + 1]`: a placement's tables.
    header int32 `[8]`. token_mask bool `[T]`: False tokens have no slots. tokens int32 `[W]`: of all ranks, if experts
    have replicas. Slot (t, k) of an expert with n places goes to number (t + k) mod n, t counting the tokens of all
    ranks. limits int32 `[2, W]`, with `all_to_all` only: the rows that each owner takes of this rank, and for rows of
    tokens where its results begin at home.
    """

    ids: Any
    weights: Any
    places_of_experts: Any
    start: Any
    header: Any
    token_mask: Any = None
    tokens: Any = None
    limits: Any = None


class ReceiveOperands(NamedTuple):
    """Arrays of a rank that has experts.

    came int32: with `all_to_all` `[R, width]`, for each row of tokens, possibly strided; else `[W, 8 + rows * width]`,
    each rank's message. header int32 `[8]`: this rank's, except with `all_to_all`. lost bool `[T]`: tokens of this rank
    already spoilt. counts int32 `[W, 10]`, with `all_to_all` alone: of each rank, header, rows and slots that arrive.
    results `[1, D]`, with counts alone: the first row of the memory of slots' results, which is not read.
    """

    came: Any
    header: Any = None
    lost: Any = None
    counts: Any = None
    results: Any = None
