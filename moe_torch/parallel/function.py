"""Dispatch and combine, each with the other's way as its backward, and the sum of gradients in a fixed order.

Forward: rows of tokens go out, rows of slots come home and are added up in the order k = 0..K-1. Backward: the gradient
of the output goes out, the gradients of slots come home and are added up in the same order, in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moe_torch.parallel.direct import DirectRoutes
from moe_torch.parallel.group import Arriving
from moe_torch.parallel.peer import PeerRoutes
from moe_torch.parallel.routes import Routes
from moe_torch.parallel.streams import Beside

AnyRoutes = Routes | PeerRoutes | DirectRoutes


class Dispatch(torch.autograd.Function):
    """`(routes, x, wide, weights, stored) -> (rows [R, D] of slots at their owners, their weights fp32 [R, 1])`.

    x `[T, D]` travels and has no gradient; one that is under way already is called for it. wide `[T, D]`, which is not
    read, gets the gradient in its dtype: fp32, or that of x where nothing else flows into x. weights fp32 `[T, K]` are
    those that `routes` has sent. stored: rows of their gradient are stored at `routes.results_at`, and what autograd
    passes on stands for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        routes: AnyRoutes,
        x: torch.Tensor | Arriving,
        wide: torch.Tensor | None,
        weights: torch.Tensor,
        stored: bool = False,
    ) -> Any:
        ctx.routes, ctx.stored, ctx.dtype = routes, stored, None if wide is None else wide.dtype
        arriving = routes.start_push(x, "rows") if isinstance(x, torch.Tensor) else x
        return arriving(), routes.weights.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor, d_weights: torch.Tensor) -> Any:
        wanted = ctx.needs_input_grad[2:4]
        rows = d_rows if ctx.stored else d_rows.contiguous()
        given = [one if asked else None for one, asked in zip((rows, d_weights.contiguous()), wanted, strict=True)]
        options = {"dtype": ctx.dtype} | ({"stored": True} if ctx.stored else {})
        return None, None, *ctx.routes.gradients(*given, **options), None


class Combine(torch.autograd.Function):
    """`(routes, rows, shared, gate, out_dtype, total, beside) -> y [T, D]`: the sum of each token's slots, then shared
    `[T, D]`, if there is one, times the sigmoid of gate fp32 `[T, 1]`; see `dense.py` for their gradients.

    total: `routes.start_total` of the same rows, None = they have not left. beside: what the gradient of rows, which
    were `awaited`, travels with; None = the stream waits for it.
    """

    @staticmethod
    def forward(ctx: Any, routes: AnyRoutes, rows: torch.Tensor, *others: Any) -> torch.Tensor:
        shared, gate, out_dtype, total, ctx.beside = others
        ctx.routes, ctx.dtype, ctx.shared = routes, rows.dtype, None if shared is None else shared.dtype
        ctx.save_for_backward(routes.overflow)
        total = routes.start_total(rows.contiguous(), "results") if total is None else total
        return _spoilt(routes, total(shared=shared, shared_gate=gate, out_dtype=out_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> Any:
        rows = shared = None
        # Where activations are checkpointed, this computes the forward again, before anything is sent: its rows go
        # where the gradient's would lie.
        _ = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            values = d_y.to(ctx.dtype).contiguous()

            def push() -> torch.Tensor:
                return ctx.routes.start_push(values, "d_output")()

            # A search for NaN reads what this returns at once.
            searched = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
            rows = push() if ctx.beside is None or searched else ctx.beside.start(push, values)
        if ctx.needs_input_grad[2]:
            shared = d_y.to(ctx.shared)
        return None, rows, shared, None, None, None, None


class _Awaited(torch.autograd.Function):
    """`(rows, beside) -> rows`, whose gradient is read when it has arrived."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, beside: Beside) -> torch.Tensor:
        ctx.beside = beside
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor) -> Any:
        ctx.beside.wait()
        return d_rows, None


def awaited(rows: torch.Tensor, beside: Beside) -> torch.Tensor:
    """The same rows, between the experts and `combine`."""
    if torch.is_grad_enabled() and rows.requires_grad:
        found: Any = _Awaited.apply(rows, beside)
        return found
    return rows


def _spoilt(routes: Any, y: torch.Tensor) -> torch.Tensor:
    return y if routes.spoilt is None else y.masked_fill_(routes.spoilt[:, None], torch.nan)


def dispatch(
    routes: Any, x: torch.Tensor | Arriving, wide: torch.Tensor | None, weights: torch.Tensor, *, stored: bool = False
) -> tuple[Any, Any]:
    """`Dispatch` where a gradient is asked for, else what it returns."""
    if torch.is_grad_enabled() and (wide is not None or weights.requires_grad):
        found: Any = Dispatch.apply(routes, x.detach() if isinstance(x, torch.Tensor) else x, wide, weights, stored)
        return found
    arriving = routes.start_push(x, "rows") if isinstance(x, torch.Tensor) else x
    return arriving(), routes.weights


def combine(
    routes: Any,
    rows: torch.Tensor,
    dense: tuple[Any, Any],
    out_dtype: torch.dtype,
    *,
    stored: bool = False,
    beside: Beside | None = None,
) -> torch.Tensor:
    """`Combine` where a gradient is asked for, else what it returns; dense: shared and gate. stored: rows, which stand
    for what has been stored at `routes.results_at`, are not read."""
    shared, gate = dense
    total = routes.start_total(None, "results") if stored else None
    if torch.is_grad_enabled() and (rows.requires_grad or (shared is not None and shared.requires_grad)):
        found: Any = Combine.apply(routes, rows, shared, gate, out_dtype, total, beside)
        return found
    total = routes.start_total(rows, "results") if total is None else total
    return _spoilt(routes, total(shared=shared, shared_gate=gate, out_dtype=out_dtype))


class Uses(torch.autograd.Function):
    """`(x, count, dtype) -> count` stand-ins of the shape of x, without memory of their own, one for each use of x: by
    the experts, then a shared expert's and the router's.

    Their gradients are added as on one device, and cast once: they come in fp32 but from a sum that is the only one.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        return tuple(x.new_zeros(1, dtype=dtype).expand(x.shape) for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, experts: torch.Tensor | None, *others: torch.Tensor | None) -> Any:
        found = [one for one in others if one is not None]
        total = functools.reduce(torch.add, found) if found else None
        if experts is not None:
            total = experts if total is None else experts + total
        return None if total is None else total.to(ctx.dtype), None, None


def uses_of(x: torch.Tensor, count: int, *, summed: bool = False) -> tuple[torch.Tensor | None, ...]:
    """See `Uses`; None where x asks for no gradient. summed: parts of the gradient are added on the way."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return (None,) * count
    found: Any = Uses.apply(x, count, x.dtype if count == 1 and not summed else torch.float32)
    return found
