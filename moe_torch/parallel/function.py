"""Dispatch and combine as autograd functions, each the other's backward, with sums in the order k = 0..K-1."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from moe_torch.parallel.group import Arriving
from moe_torch.parallel.route import Gradients, Overlap, Routes, Total


class Dispatch(torch.autograd.Function):
    """`(routes, x, wide, weights, stored) -> (rows [R, D] at their owners, their weights fp32)`.

    x `[T, D]` has no gradient and may be rows under way. wide `[T, D]`, not read, gets the gradient in its dtype: fp32,
    or x's if nothing else flows into x. weights fp32 `[T, K]`: already sent by routes. stored: experts store the
    gradient of rows, and autograd passes a stand-in.
    """

    @staticmethod
    def forward(
        ctx: Any,
        routes: Routes,
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
        gradients = [one if asked else None for one, asked in zip((rows, d_weights.contiguous()), wanted, strict=True)]
        return None, None, *ctx.routes.gradients(Gradients(*gradients), dtype=ctx.dtype, stored=ctx.stored), None


class Combine(torch.autograd.Function):
    """`(routes, rows, shared, gate, out_dtype, total, overlap) -> y [T, D]`.

    y is the sum of each token's slots, then of shared `[T, D]`, if any, times the sigmoid of gate fp32 `[T, 1]`.
    `dense.py` has their gradients. total: `routes.start_total` of these rows. None: they have not left. overlap: sends
    the gradient of `awaited` rows. None: the stream waits for it.
    """

    @staticmethod
    def forward(ctx: Any, routes: Routes, rows: torch.Tensor, *others: Any) -> torch.Tensor:
        shared, gate, out_dtype, total, ctx.overlap = others
        ctx.routes, ctx.dtype, ctx.shared = routes, rows.dtype, None if shared is None else shared.dtype
        total = routes.start_total(rows.contiguous(), "results") if total is None else total
        y = total(shared=shared, shared_gate=gate, out_dtype=out_dtype)
        # overflow may be a message. It follows the results, as without gradients.
        ctx.save_for_backward(routes.overflow)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> Any:
        rows = shared = None
        # Activation checkpointing runs the forward again here, before anything is sent: the forward's rows go where the
        # gradient's would arrive.
        _ = ctx.saved_tensors
        ctx.routes.begin_gradients()
        if ctx.needs_input_grad[1]:
            values = d_y.to(ctx.dtype).contiguous()
            ctx.routes.call.begin_backward(values.device)

            def push() -> torch.Tensor:
                return ctx.routes.start_push(values, "d_output")()

            # A NaN search reads the returned rows at once.
            searched = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
            rows = push() if ctx.overlap is None or searched else ctx.overlap.start(push, values)
        if ctx.needs_input_grad[2]:
            shared = d_y.to(ctx.shared)
        return None, rows, shared, None, None, None, None


class _Awaited(torch.autograd.Function):
    """`(rows, overlap) -> rows`. The backward waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, overlap: Overlap) -> torch.Tensor:
        ctx.overlap = overlap
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor) -> Any:
        ctx.overlap.wait()
        return d_rows, None


def awaited(rows: torch.Tensor, overlap: Overlap) -> torch.Tensor:
    if torch.is_grad_enabled() and rows.requires_grad:
        return cast(Any, _Awaited.apply(rows, overlap))
    return rows


def dispatch(
    routes: Routes,
    x: torch.Tensor | Arriving,
    wide: torch.Tensor | None,
    weights: torch.Tensor,
    *,
    stored: bool = False,
) -> tuple[Any, Any]:
    if torch.is_grad_enabled() and (wide is not None or weights.requires_grad):
        return cast(
            Any, Dispatch.apply(routes, x.detach() if isinstance(x, torch.Tensor) else x, wide, weights, stored)
        )
    arriving = routes.start_push(x, "rows") if isinstance(x, torch.Tensor) else x
    return arriving(), routes.weights


def combine(
    routes: Routes,
    rows: torch.Tensor,
    dense: tuple[Any, Any],
    out_dtype: torch.dtype,
    *,
    stored: bool = False,
    overlap: Overlap | None = None,
    total: Total | None = None,
) -> torch.Tensor:
    """`Combine` if a gradient is needed, else only its result. stored: rows stand in for `routes.results_at`."""
    shared, gate = dense
    total = routes.start_total(None, "results") if stored else total
    if torch.is_grad_enabled() and (rows.requires_grad or (shared is not None and shared.requires_grad)):
        return cast(Any, Combine.apply(routes, rows, shared, gate, out_dtype, total, overlap))
    total = routes.start_total(rows, "results") if total is None else total
    return total(shared=shared, shared_gate=gate, out_dtype=out_dtype)


class Uses(torch.autograd.Function):
    """`(x, count, dtype) -> count` stand-ins of the shape of x, without memory, one for each use of x.

    The first use is the experts', the others a shared expert's and the router's. Gradients are added as on one device
    and cast once: they come in fp32, except the only one of a sum.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        return tuple(x.new_zeros(1, dtype=dtype).expand(x.shape) for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, experts: torch.Tensor | None, *others: torch.Tensor | None) -> Any:
        present = [one for one in others if one is not None]
        total = functools.reduce(torch.add, present) if present else None
        if experts is not None:
            total = experts if total is None else experts + total
        return None if total is None else total.to(ctx.dtype), None, None


def uses_of(x: torch.Tensor, count: int, *, summed: bool = False) -> tuple[torch.Tensor | None, ...]:
    """See `Uses`; None where x needs no gradient. summed: parts of the gradient are added on the way."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return (None,) * count
    return cast(Any, Uses.apply(x, count, x.dtype if count == 1 and not summed else torch.float32))


class Divided(torch.autograd.Function):
    """`(array, divisor) -> array`, with its gradient divided."""

    @staticmethod
    def forward(ctx: Any, array: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return array.view_as(array)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / ctx.divisor, None


def divided(array: Any, divisor: int) -> Any:
    needed = divisor > 1 and isinstance(array, torch.Tensor) and array.requires_grad
    return Divided.apply(array, divisor) if needed else array
