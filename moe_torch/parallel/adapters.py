"""Adapters of experts on several ranks: factors lie with their experts, and adapter ids travel with rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from moe_core.errors import Unsupported
from moe_core.parallel.operands import held_columns
from moe_core.parallel.placement import Placement
from moe_core.specs.operands import LoRAFactors, named_fields
from moe_torch.parallel.axes import ExpertParallel
from moe_torch.parallel.exchange import constants
from moe_torch.parallel.function import divided
from moe_torch.parallel.tensor import TensorRanks


class RankAdapters(NamedTuple):
    """lora: of this rank's experts. ids int32 `[T]` and invalid int32 `[1]`: of its tokens."""

    lora: LoRAFactors
    ids: torch.Tensor
    invalid: torch.Tensor

    @classmethod
    def of(
        cls,
        lora: LoRAFactors,
        adapter_ids: torch.Tensor,
        mask: torch.Tensor | None,
        parallel: ExpertParallel,
        where: tuple[Placement, int, int],
    ) -> RankAdapters:
        """lora: scale and ranks of all experts. where: the placement, this rank, its number of experts."""
        (placement, rank, count), exchange = where, parallel.exchange
        if exchange.chunks != 1:
            raise Unsupported(f"exchange.chunks must be 1 with lora, got {exchange.chunks}; leave it out")
        slot = adapter_ids.clamp(0, len(lora.scale) - 1)
        known = (lora.ranks.amax(1).index_select(0, slot) > 0) & (slot == adapter_ids)
        ids = torch.where(known, adapter_ids, -1)
        invalid = ids != adapter_ids
        invalid = invalid if mask is None else invalid & mask
        (columns,) = constants((held_columns(placement, rank, count),), ids.device)
        scale, ranks = (one.index_select(1, columns) for one in (lora.scale, lora.ranks))
        lora = dataclasses.replace(lora, scale=scale, ranks=ranks)
        return cls(lora, ids, invalid.sum(0, keepdim=True, dtype=torch.int32))

    def trained(self, parallel: ExpertParallel, tensor: TensorRanks | None, shared: bool) -> LoRAFactors:
        """Factors with the gradients that `parallel` asks for. shared: by all experts, as a router is."""
        factors: dict[str, Any] = {name: one for name, one in named_fields(self.lora) if name[0] in "ab"}
        if parallel.gradients == "mean" and not shared:
            factors = {name: divided(one, parallel.token_ranks) for name, one in factors.items()}
        whole = [name for name in ("a1", "b2") if name in factors and factors[name].requires_grad]
        if tensor is not None and whole and torch.is_grad_enabled():
            summed: Any = _Whole.apply(tensor, *[factors[name] for name in whole])
            factors |= dict(zip(whole, summed, strict=True))
        return dataclasses.replace(self.lora, **factors)


class _Whole(torch.autograd.Function):
    """`(axis, *arrays) -> arrays` that are whole on every rank of a tensor axis. Their gradients are the sums of all
    ranks', in fp32, in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, axis: TensorRanks, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axis = axis
        return tuple(array.view_as(array) for array in arrays)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *[
            functools.reduce(torch.add, ctx.axis.ranks.all_gather(one.float(), "d_lora").unbind()).to(one.dtype)
            for one in gradients
        ]
