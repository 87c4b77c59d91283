"""Dispatch and combine, each with the other's way as its backward, and the sum of gradients in a fixed order.

Forward: rows of tokens go out, rows of slots come home and are added up in the order k = 0..K-1. Backward: the gradient
of the output goes out, the gradients of slots come home and are added up in the same order, in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moe_torch.parallel.group import Arriving
from moe_torch.parallel.peer import PeerRoutes
from moe_torch.parallel.routes import Routes

AnyRoutes = Routes | PeerRoutes


class Dispatch(torch.autograd.Function):
    """`(routes, x, wide, weights, stored) -> (rows [R, D] of slots at their owners, their weights fp32 [R, 1])`.

    x `[T, D]` travels and has no gradient; one that is under way already is called for it. wide fp32 `[T, D]`, which is
    not read, gets the gradient unrounded. weights fp32 `[T, K]` are those that `routes` has sent. stored: rows of
    their gradient are stored at `routes.results_at`, and what autograd passes on stands for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        routes: AnyRoutes,
        x: torch.Tensor | Arriving,
        wide: torch.Tensor,
        weights: torch.Tensor,
        stored: bool = False,
    ) -> Any:
        ctx.routes, ctx.stored = routes, stored
        rows = routes.push(x, "rows") if isinstance(x, torch.Tensor) else x()
        return rows, routes.weights.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor, d_weights: torch.Tensor) -> Any:
        wanted = ctx.needs_input_grad[2:4]
        rows = d_rows if ctx.stored else d_rows.contiguous()
        given = [one if asked else None for one, asked in zip((rows, d_weights.contiguous()), wanted, strict=True)]
        return None, None, *ctx.routes.gradients(*given, **({"stored": True} if ctx.stored else {})), None


class Combine(torch.autograd.Function):
    """`(routes, rows, shared, gate, out_dtype, total) -> y [T, D]`: the sum of each token's slots, then shared
    `[T, D]`, if there is one, times the sigmoid of gate fp32 `[T, 1]`; see `dense.py` for their gradients.

    total: `routes.start_total` of the same rows, None = they have not left.
    """

    @staticmethod
    def forward(ctx: Any, routes: AnyRoutes, rows: torch.Tensor, *others: Any) -> torch.Tensor:
        shared, gate, out_dtype, total = others
        ctx.routes, ctx.dtype, ctx.shared = routes, rows.dtype, None if shared is None else shared.dtype
        total = routes.start_total(rows.contiguous(), "results") if total is None else total
        return _spoilt(routes, total(shared=shared, shared_gate=gate, out_dtype=out_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> Any:
        rows = shared = None
        if ctx.needs_input_grad[1]:
            rows = ctx.routes.push(d_y.to(ctx.dtype).contiguous(), "d_output")
        if ctx.needs_input_grad[2]:
            shared = d_y.to(ctx.shared)
        return None, rows, shared, None, None, None


def _spoilt(routes: Any, y: torch.Tensor) -> torch.Tensor:
    return y if routes.spoilt is None else y.masked_fill_(routes.spoilt[:, None], torch.nan)


def dispatch(
    routes: Any, x: torch.Tensor, wide: torch.Tensor | None, weights: torch.Tensor, *, stored: bool = False
) -> tuple[Any, Any]:
    """`Dispatch` where a gradient is asked for, else what it returns."""
    if torch.is_grad_enabled() and (wide is not None or weights.requires_grad):
        found: Any = Dispatch.apply(routes, x.detach(), wide, weights, stored)
        return found
    return routes.push(x, "rows"), routes.weights


def combine(
    routes: Any, rows: torch.Tensor, dense: tuple[Any, Any], out_dtype: torch.dtype, *, stored: bool = False
) -> torch.Tensor:
    """`Combine` where a gradient is asked for, else what it returns; dense: shared and gate. stored: rows, which stand
    for what has been stored at `routes.results_at`, are not read."""
    shared, gate = dense
    total = routes.start_total(None, "results") if stored else None
    if torch.is_grad_enabled() and (rows.requires_grad or (shared is not None and shared.requires_grad)):
        found: Any = Combine.apply(routes, rows, shared, gate, out_dtype, total)
        return found
    total = routes.start_total(rows, "results") if total is None else total
    return _spoilt(routes, total(shared=shared, shared_gate=gate, out_dtype=out_dtype))


class Uses(torch.autograd.Function):
    """`(x, count) -> count` stand-ins fp32 of the shape of x, without memory of their own, one for each use of x: by
    the experts, then a shared expert's and the router's.

    Their gradients come unrounded. They are added as on one device, in fp32, and cast once.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        return tuple(x.new_zeros(1, dtype=torch.float32).expand(x.shape) for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, experts: torch.Tensor | None, *others: torch.Tensor | None) -> Any:
        found = [one for one in others if one is not None]
        total = functools.reduce(torch.add, found) if found else None
        if experts is not None:
            total = experts if total is None else experts + total
        return None if total is None else total.to(ctx.dtype), None


def uses_of(x: torch.Tensor, count: int) -> tuple[torch.Tensor | None, ...]:
    """See `Uses`; None where x asks for no gradient."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return (None,) * count
    found: Any = Uses.apply(x, count)
    return found
