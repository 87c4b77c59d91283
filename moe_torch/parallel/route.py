"""The interface of every mode: rows go out to experts, results come home."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, TypedDict, Unpack

import torch

from moe_core.errors import InvalidInput
from moe_core.parallel import ExchangePlan, ExchangeSpec, Placement
from moe_core.parallel.header import Header
from moe_torch.parallel.calls.known import Steps
from moe_torch.parallel.exchange import header_on_device
from moe_torch.parallel.group import Arriving, Ranks
from moe_torch.parallel.moving import MovingPlacement


class ExchangeCall(NamedTuple):
    """Settings of a call for its steps. moving: the placement at the time of a replay, if it may change. layer, number:
    see `Header.of_call`. levels: ranks between hosts, and inside this one. None: one level. buffer: of another
    transport. steps: plans of a like call, None: it is the first, or they cannot be used."""

    ranks: Ranks
    plan: ExchangePlan
    moving: MovingPlacement | None = None
    layer: int = 0
    number: int = 0
    levels: tuple[Ranks, Ranks] | None = None
    buffer: Any = None
    steps: Steps | None = None

    def header(self, device: torch.device, plain: Header | None = None) -> torch.Tensor:
        """int32 `[8]` on the device, of the plan or a plain one with the call."""
        header = header_on_device(plain or self.plan.header, self.layer, self.number, device)
        return header if self.moving is None or plain is not None else self.moving.header(header)

    def check(self, device: torch.device, *, backward: bool = False) -> None:
        """Raise on all ranks if one failed or differs. The host waits."""
        told = self.plan.header.of_call(self.layer, self.number, backward)
        sent = torch.tensor(told, dtype=torch.int32, device=device)
        self.ranks.compare(self.ranks.all_gather(sent, "header").cpu().numpy())

    def begin_backward(self, device: torch.device) -> None:
        """Compare ranks on a CPU, where waiting costs little. On a GPU the forwards' order is that of backwards."""
        if device.type == "cpu":
            self.check(device, backward=True)


def check_headers(call: ExchangeCall, ids: torch.Tensor) -> None:
    if not ids.is_cuda:
        # Waiting costs nothing here. On a GPU headers travel with the first message. If they differ, the output is NaN.
        call.check(ids.device)


def tell_failure(ranks: Ranks, spec: ExchangeSpec, placement: Placement, device: torch.device) -> None:
    """Send a header of zeros, so that no peer waits for a failed rank."""
    numbers = functools.partial(torch.zeros, dtype=torch.int32, device=device)
    if device.type == "cpu" or spec.compares_first:
        ranks.all_gather(numbers(len(Header._fields)), "header")
        return
    # Others send these with it.
    if placement.has_replicas:
        ranks.all_gather(numbers(1), "tokens")
    ranks.all_to_all(numbers(ranks.size, len(Header._fields) + spec.counts(placement.per_rank)), "header")
    if spec.receive is not None:
        ranks.all_to_all(numbers(ranks.size, 2), "rows that fit")


def require_room(plan: ExchangePlan, overflow: int) -> None:
    """Raise if rows of any rank did not fit and `on_overflow="error"`: on all ranks, as all know the number."""
    if overflow and plan.spec.on_overflow == "error":
        bound = "as many rows as distinct ids need" if plan.spec.receive is None else plan.spec.receive
        raise InvalidInput(
            f"exchange.receive must be enough for every rank, got {bound} and {overflow} rows more; raise it, or pass "
            "on_overflow='nan' or 'drop'"
        )


class TotalOptions(TypedDict, total=False):
    """out: with mode `peer`, where the sum is written. None: a new tensor."""

    out: torch.Tensor | None
    shared: torch.Tensor | None
    shared_gate: torch.Tensor | None
    out_dtype: torch.dtype | None


class Total(Protocol):
    """Wait for slots' results and add them by token, `[T, D]`: NaN if one was lost, all if ranks disagree."""

    def __call__(self, **options: Unpack[TotalOptions]) -> torch.Tensor: ...


class Gradients(NamedTuple):
    """Gradients of rows, and of slots' weights. None: nobody asks for it."""

    rows: torch.Tensor | None
    weights: torch.Tensor | None


class Routes(Protocol):
    """The routes of one rank for one call.

    ids int32 and weights fp32 `[R, K']`: of arrived rows; K' is 1 for rows of slots. group_tokens: of all ranks.
    overflow int32 `[1]`: rows of all ranks that did not fit.
    """

    @property
    def ids(self) -> torch.Tensor: ...
    @property
    def weights(self) -> torch.Tensor: ...
    @property
    def group_tokens(self) -> int: ...
    @property
    def overflow(self) -> torch.Tensor: ...
    @property
    def call(self) -> ExchangeCall: ...
    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        """Send rows of tokens, `[T, D]`. The result waits and returns arrived rows, `[R, D]`."""
        ...

    def push_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Send a number below 2**24 for each token, int32 `[T]`. Returns the numbers of arrived rows, int32 `[R]`."""
        ...

    def start_total(self, rows: torch.Tensor | None, what: str) -> Total:
        """Send the results of slots home, `[R, D]`. None: experts have stored them."""
        ...

    def begin_gradients(self) -> None:
        """Called before a backward's first message."""
        ...

    def gradients(self, of: Gradients, *, dtype: torch.dtype | None, stored: bool) -> Gradients:
        """Bring gradients of slots home: d_x `[T, D]` of dtype, its rows stored or not, of weights fp32 `[T, K]`."""
        ...


class PlannedRoutes(Routes, Protocol):
    """Routes of a call. stores: experts store results where `results_at` says, int64, once rows have arrived. Once they
    have left: tokens_per_expert int32 `[E]` and invalid_ids int32 `[1]`, of this rank's slots."""

    stores: ClassVar[bool]

    @property
    def tokens_per_expert(self) -> torch.Tensor: ...
    @property
    def invalid_ids(self) -> torch.Tensor: ...


class Planner(Protocol):
    """A transport's plan of a call, from `(call, ids int32 [T, K], weights fp32 [T, K], token_mask bool [T])`.

    Making it sends nothing and raises what only this rank knows. arriving: rows that left with the routes, for
    `dispatch`. owner: the `Owner`, which may compute before routes are described.
    """

    arriving: Arriving | None = None
    owner: Any = None

    def schedule(self, brought: Any, owner: Any, shared: Any, dtype: torch.dtype) -> Any:
        """Run a whole call, with another order of its steps. None: the order is the usual one, and nothing has run."""
        return None

    def ended(self, routes: Any, dtype: torch.dtype) -> None:
        """Called when a call in the usual order has run."""

    def start(self, values: torch.Tensor | None = None) -> Callable[[], PlannedRoutes]:
        """Send the first message. The result waits and returns the routes; rows of values `[T, D]` may go along."""
        ...


class Overlap(Protocol):
    """Sends gradients while the backward computes."""

    def start(self, push: Callable[[], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        """Call push, which sends values, and return its result. Nothing may read it before `wait`."""
        ...

    def wait(self) -> Any:
        """Let the computing stream wait for the rows."""
        ...
