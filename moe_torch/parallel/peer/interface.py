"""Shared by both kinds of routes of mode `peer`."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.errors import Unsupported
from moe_core.formats import Format, QuantizedSpec, quantized_shapes
from moe_core.parallel.plan import ExchangePlan
from moe_torch.parallel import peer_ops
from moe_torch.parallel.group import Ranks
from moe_torch.parallel.route import ExchangeCall, Routes, Total


class PeerCall(NamedTuple):
    """One call. tokens: of this rank, in all chunks. header int32 `[8]`, on the device."""

    call: ExchangeCall
    tokens: int
    header: torch.Tensor

    @classmethod
    def of(cls, call: ExchangeCall, tokens: torch.Tensor) -> PeerCall:
        return cls(call, len(tokens), call.header(tokens.device))


class PeerRoutes(Routes, Protocol):
    """Routes with steps that a caller may put on other streams."""

    def send(self, values: torch.Tensor) -> None:
        """Store rows of tokens, `[T, D]`, at their owners."""
        ...

    def arrive(self, what: str) -> None:
        """Let the stream wait until all ranks have stored."""
        ...

    def rows(self) -> torch.Tensor:
        """Arrived rows to compute."""
        ...

    def results_at(self) -> torch.Tensor:
        """int64, once rows have arrived: where experts store the results of slots."""
        ...


class Stored:
    """Routes with one allocation, into which others store."""

    stores: ClassVar[bool] = True
    call: ExchangeCall
    memory: Any

    def gradients_at(self, results_at: torch.Tensor) -> torch.Tensor:
        return results_at

    def begin_gradients(self) -> None:
        """Gradients go where results went."""

    @property
    def ranks(self) -> Ranks:
        return self.call.ranks

    @property
    def plan(self) -> ExchangePlan:
        return self.call.plan

    def arrive(self, what: str) -> None:
        self.memory.memory.barrier(self.ranks, what)

    def total_of(self, places: torch.Tensor, checks: peer_ops.Checks, what: str) -> Total:
        """Wait and run `peer_ops.sum_results`, also to an output that begins anywhere."""

        def total(*, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
            self.arrive(what)
            returned = self.memory.returned.own
            if out is None or out.data_ptr() % ALIGNMENT == 0:
                return peer_ops.sum_results(returned, places, checks=checks, out=out, **options)
            # Rows of fewer than 16 bytes, such as of fp32 tokens.
            options["out_dtype"] = out.dtype
            return out.copy_(peer_ops.sum_results(returned, places, checks=checks, **options))

        return total


def scales_of(format: Format | None, d_model: int) -> int:
    return 0 if format is None else quantized_shapes(QuantizedSpec(format), (1, d_model)).scales[1]


def require_peer_format(format: Format | None) -> None:
    """Raise Unsupported unless rows are e4m3 with a scale for each 128 columns."""
    if format is None:
        return
    if (format.element, format.group_rows, format.group_columns, format.has_e8m0_scales) != ("e4m3", 1, 128, False):
        raise Unsupported(
            f"exchange.format must be e4m3 with fp32 scales of 1 x 128 with mode 'peer', got {format}; pass "
            "format_named('fp8_group')"
        )
