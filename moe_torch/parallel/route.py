"""The interface of every mode: rows go out to experts, results come home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import torch

from moe_core.parallel import ExchangePlan
from moe_torch.parallel.exchange import constants
from moe_torch.parallel.group import Arriving, Ranks
from moe_torch.parallel.moving import MovingPlacement


class ExchangeCall(NamedTuple):
    """What every step of a call needs. moving: the placement at the time of a replay, if it may change."""

    ranks: Ranks
    plan: ExchangePlan
    moving: MovingPlacement | None = None

    def header(self, device: torch.device) -> torch.Tensor:
        """int32 `[8]` on the device."""
        if self.moving is not None:
            return self.moving.header(self.plan.header)
        (header,) = constants((tuple(self.plan.header),), device)
        return header


class TotalOptions(TypedDict, total=False):
    shared: torch.Tensor | None
    shared_gate: torch.Tensor | None
    out_dtype: torch.dtype | None


class Total(Protocol):
    """Wait for the results of slots and add them by token, `[T, D]`, with options of `ops.reduce`.

    Tokens that lost a slot are NaN, and all tokens if ranks disagree.
    """

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

    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        """Send rows of tokens, `[T, D]`. The result waits and returns arrived rows, `[R, D]`."""
        ...

    def start_total(self, rows: torch.Tensor | None, what: str) -> Total:
        """Send the results of slots home, `[R, D]`. None: experts have stored them."""
        ...

    def gradients(self, of: Gradients, *, dtype: torch.dtype | None, stored: bool = False) -> Gradients:
        """Send gradients of slots home. Return d_x `[T, D]` of dtype and the gradients of weights, fp32 `[T, K]`.

        stored: experts have stored the rows at home.
        """
        ...


class Overlap(Protocol):
    """Sends gradients while the backward computes."""

    def start(self, push: Callable[[], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        """Call push, which sends values, and return its result. Nothing may read it before `wait`."""
        ...

    def wait(self) -> Any:
        """Let the computing stream wait for the rows."""
        ...
