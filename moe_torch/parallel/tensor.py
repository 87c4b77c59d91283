"""The tensor axis around the exchange: each rank has a slice of every expert.

Tokens are gathered over the axis before the exchange, and parts of results are added behind it. Parts are fp32, added
in the order of ranks: bits are equal in every run and on every rank.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from moe_core.errors import InvalidInput
from moe_core.parallel import Placement, TensorSplit
from moe_core.parallel.header import FAILED
from moe_core.specs.operands import ExpertWeights, RaggedLayout
from moe_core.specs.routing import LayoutSpec
from moe_torch import ops
from moe_torch.parallel import exchange
from moe_torch.parallel.group import Ranks
from moe_torch.parallel.route import ExchangeCall


@dataclasses.dataclass(slots=True)
class Brought:
    """Inputs of an exchange: x `[T, D]`; wide `[T, D]`, which gets its gradient, or None; ids int32 and weights fp32
    `[T, K]`; token_mask bool `[T]` and adapter_ids int32 `[T]`, or None."""

    x: torch.Tensor
    wide: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    token_mask: torch.Tensor | None
    adapter_ids: torch.Tensor | None = None


@dataclasses.dataclass
class TensorRanks:
    """One call's messages over the axis. told: the first is sent. agree bool `[1]`, None: the host compared sizes."""

    ranks: Ranks
    split: TensorSplit
    told: bool = False
    agree: torch.Tensor | None = None

    def gather(self, call: ExchangeCall, brought: Brought) -> Brought:
        """The tokens of all ranks of the axis, in order; replicated ones as they are. Raises as `compare_headers`."""
        # A plan of mode `peer` is for max_tokens.
        plan, device = call.plan, brought.x.device
        header = plan.tensor_header(call.ranks.rank)._replace(tokens=len(brought.x))
        self.told, apart = True, self.split.tokens == "split"
        sent = call.header(device, header)
        # On a GPU the host waits only if the mode does; else headers travel with the routing.
        waits = plan.spec.mode == "all_to_all" or not brought.x.is_cuda
        if waits:
            told = self.ranks.all_gather(sent, "header").cpu().numpy()
            self.ranks.compare(told, equal_tokens=True)
        ids, gathered = brought.ids, None
        if apart:
            ids = ids if brought.token_mask is None else torch.where(brought.token_mask[:, None], ids, -1)
            table = torch.cat([ids, brought.weights.detach().contiguous().view(torch.int32)], dim=1)
            sent = torch.cat([sent, table.view(-1)])
        if apart or not waits:
            came = self.ranks.all_gather(sent, "header, ids and weights")
            self.agree = None if waits else (came[:, : len(header)] == sent[: len(header)]).all().view(1)
            if apart:
                ids, bits = came[:, len(header) :].reshape(-1, 2 * ids.shape[1]).chunk(2, dim=1)
                ids, gathered = ids.contiguous(), bits.contiguous().view(torch.float32)
        x = self.ranks.all_gather(brought.x.detach(), "rows").flatten(0, 1) if apart else brought.x
        wide, weights = None, brought.weights if gathered is None else gathered
        if torch.is_grad_enabled() and (brought.wide is not None or brought.weights.requires_grad):
            wide, weights = Around.apply(self, brought.wide, brought.weights, gathered)
        adapters = brought.adapter_ids
        if apart and adapters is not None:
            adapters = self.ranks.all_gather(adapters, "adapter ids").flatten()
        return Brought(x, wide, ids, weights, None if apart else brought.token_mask, adapters)

    def tell_failure(self, device: torch.device) -> None:
        self.told = True
        self.ranks.all_gather(torch.zeros(len(FAILED), dtype=torch.int32, device=device), "header")

    def push(self, values: torch.Tensor, what: str) -> torch.Tensor:
        return self.ranks.all_gather(values, what).flatten(0, 1) if self.split.tokens == "split" else values

    def pull(self, parts: torch.Tensor, what: str) -> torch.Tensor:
        """Parts `[size, T, N]` of this rank's tokens, from a part of all tokens."""
        if self.split.tokens == "split":
            values = self.ranks.all_to_all(parts, what)
            return values.view(self.split.size, len(values) // self.split.size, *values.shape[1:])
        return self.ranks.all_gather(parts, what)

    def add(self, parts: torch.Tensor, what: str, **options: Any) -> torch.Tensor:
        """The sum `[T, D]` of parts fp32, in the order of ranks. options: of `reduce`."""
        came = self.pull(parts.contiguous(), what)
        size, tokens = came.shape[:2]
        row = torch.arange(size * tokens, dtype=torch.int32, device=came.device)
        nothing, sizes = torch.empty(0, dtype=torch.int32), LayoutSpec(tokens, size, 1, rows=size * tokens)
        by_token = row.view(size, tokens).t().reshape(-1)
        layout = RaggedLayout(sizes, nothing, nothing, row, by_token, None)
        return ops.reduce(came.flatten(0, 1), layout, order="row", **options)

    def total(self, parts: torch.Tensor, like: torch.Tensor, dense: Any, out_dtype: torch.dtype) -> torch.Tensor:
        """y `[T, D]` of parts, and of a shared expert's rows and gate. like: has the travelling dtype."""
        shared, gate = dense
        if torch.is_grad_enabled() and (parts.requires_grad or (shared is not None and shared.requires_grad)):
            y: Any = Total.apply(self, parts, like.dtype, shared, gate, out_dtype)
        else:
            y = self.add(parts, "parts", shared=shared, shared_gate=gate, out_dtype=out_dtype)
        return y if self.agree is None else y.masked_fill(~self.agree[:, None], torch.nan)


def require_apart(ranks: Ranks, tensor: Ranks) -> None:
    members = [dist.get_process_group_ranks(one.group) for one in (ranks, tensor)]
    common = sorted(set(members[0]) & set(members[1]))
    if len(common) != 1:
        raise InvalidInput(
            f"tensor must be another axis than mesh, with one rank in common, got ranks {members[0]} of mesh and "
            f"{members[1]} of tensor; pass mesh['ep'] and mesh['tp'] of one DeviceMesh"
        )


class Around(torch.autograd.Function):
    """`(axis, wide [T, D], weights [T, K], gathered) -> (wide [S, D], weights [S, K])` of the tokens of all ranks.

    wide is not read. gathered: weights of all tokens. None: equal on all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, axis: TensorRanks, wide: torch.Tensor | None, weights: torch.Tensor, gathered: torch.Tensor | None
    ) -> Any:
        ctx.axis = axis
        chosen = weights.view_as(weights) if gathered is None else gathered
        if not ctx.needs_input_grad[2]:
            ctx.mark_non_differentiable(chosen)
        return None if wide is None else wide.new_zeros(1).expand(len(chosen), wide.shape[1]), chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_wide: torch.Tensor, d_weights: torch.Tensor) -> Any:
        axis, wide, weights = ctx.axis, None, None
        if ctx.needs_input_grad[1]:
            wide = axis.add(d_wide, "d_x")
        if ctx.needs_input_grad[2]:
            weights = functools.reduce(torch.add, axis.pull(d_weights.contiguous(), "d_weights").unbind())
        return None, wide, weights, None


class Total(torch.autograd.Function):
    """`(axis, parts fp32 [S, D], dtype, shared, gate, out_dtype) -> y [T, D]`.

    y is the sum of all ranks' parts, then of shared `[T, D]` times the sigmoid of gate fp32 `[T, 1]`, as in `Combine`.
    """

    @staticmethod
    def forward(ctx: Any, axis: TensorRanks, parts: torch.Tensor, dtype: torch.dtype, *others: Any) -> torch.Tensor:
        shared, gate, out_dtype = others
        ctx.axis, ctx.dtype, ctx.shared = axis, dtype, None if shared is None else shared.dtype
        return axis.add(parts, "parts", shared=shared, shared_gate=gate, out_dtype=out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> Any:
        parts = shared = None
        if ctx.needs_input_grad[1]:
            parts = ctx.axis.push(d_y.to(ctx.dtype).contiguous(), "d_output").float()
        if ctx.needs_input_grad[3]:
            shared = d_y.to(ctx.shared)
        return None, parts, None, shared, None, None


class OnFirst(torch.autograd.Function):
    """`(bias, adds) -> bias`, or zeros if another rank of the axis adds it. Every rank gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, adds: bool) -> torch.Tensor:
        return bias.view_as(bias) if adds else torch.zeros_like(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_bias: torch.Tensor) -> Any:
        return d_bias, None


def bias_once(experts: ExpertWeights, split: TensorSplit) -> ExpertWeights:
    if experts.down_bias is None:
        return experts
    bias: Any = OnFirst.apply(experts.down_bias, split.index == 0)
    return dataclasses.replace(experts, down_bias=bias)


def counts_of(
    ids: torch.Tensor, placement: Placement, token_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of this rank's tokens by expert, int32 `[E]`, and invalid ids, int32 `[1]`."""
    places, invalid_ids = exchange.physical_ids(ids, placement, token_mask=token_mask)
    chosen = torch.where(places < 0, placement.num_experts, ids).flatten().long()
    counts = torch.zeros(placement.num_experts + 1, dtype=torch.int32, device=ids.device)
    return counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))[:-1], invalid_ids


def total_of(ranks: Ranks, tensor: TensorRanks | None, values: torch.Tensor, what: str) -> torch.Tensor:
    """Add integers over all ranks with different tokens, in place."""
    total = ranks.total(values, what)
    return tensor.ranks.total(total, what) if tensor is not None and tensor.split.tokens == "split" else total
