"""Experts with low-rank factors in one operator, and with a norm ahead of the router's weights as stage ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from moe_core.errors import Unsupported
from moe_core.specs import MatmulSpec, MoESpec
from moe_core.specs.operands import ExpertWeights, LoRAFactors, MatmulOperands, TopK
from moe_torch import ops
from moe_torch.layers.casts import at_least_float32
from moe_torch.operators.routed import routed

_FACTORS = MatmulSpec("in_out")


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Factors of both products, None for a product without: `x W` becomes `x W + scale (x a) b`.

    a1: `[E, D, R]`. b1: `[E, R, N]`, with `up` the columns of gate_up, then of up. a2: `[E, F, R]`. b2: `[E, R, D]`.
    Any floating dtype, and any strides.
    """

    a1: torch.Tensor | None = None
    b1: torch.Tensor | None = None
    a2: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    scale: float = 1.0

    def factors(self, device: torch.device) -> LoRAFactors:
        """The only adapter of a batch, with ranks that are multiples of 16."""
        arrays = {name: getattr(self, name) for name in ("a1", "b1", "a2", "b2")}
        arrays = {name: one if one is None else one.contiguous().unsqueeze(0) for name, one in arrays.items()}
        shape = (1, next(one.shape[1] for one in arrays.values() if one is not None))
        rank = max(one.shape[-1] for name, one in arrays.items() if one is not None and name[0] == "a")
        scale = torch.full(shape, self.scale, dtype=torch.float32, device=device)
        ranks = torch.full(shape, rank, dtype=torch.int32, device=device)
        return LoRAFactors(**arrays, scale=scale, ranks=ranks)


def run_stages(
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: TopK,
    spec: MoESpec,
    *,
    low_rank: LowRank | None = None,
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """y `[T, D]` in the dtype of x. norm: applied to each expert's output ahead of the router's weight."""
    if low_rank is not None and (spec.activations is not None or spec.recompute or spec.main_grad):
        names = [name for name in ("activations", "recompute", "main_grad") if getattr(spec, name)]
        raise Unsupported(f"low-rank factors need experts without {' and '.join(names)}, got both; leave one out")
    low_rank = low_rank or LowRank()
    # float64 checks gradients.
    if norm is None and x.dtype != torch.float64:
        ids = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device)
        return ops.moe(x, weights, routing, spec, lora=low_rank.factors(x.device), adapter_ids=ids).output
    num_experts = weights.down.shape[0]
    ids, row_weights = routed(routing.ids, routing.weights, num_experts)
    layout = ops.make_layout(ids, num_experts)
    into = MatmulSpec(spec.weight_layout, "token", allow_tf32=spec.allow_tf32, tuning=spec.matmul_tuning(1))
    pre = ops.matmul_ogs(MatmulOperands(x, weights.gate_up, bias=weights.gate_up_bias), layout, into)
    up = None
    if weights.up is not None:
        up = ops.matmul_ogs(MatmulOperands(x, weights.up, bias=weights.up_bias), layout, into)
    if low_rank.a1 is not None:
        change = _product(
            x, low_rank.a1, low_rank.b1, layout, (dataclasses.replace(_FACTORS, gather="token"), _FACTORS)
        )
        changes = change.split(pre.shape[-1], -1)
        pre = torch.add(pre, changes[0], alpha=low_rank.scale)
        up = None if up is None else torch.add(up, changes[1], alpha=low_rank.scale)
    hidden = ops.activation(pre, spec.activation, up=up)
    slot = {"scatter": "slot", "allow_tf32": spec.allow_tf32}
    out = MatmulSpec(spec.weight_layout, **slot, tuning=spec.matmul_tuning(2))
    row_weight = None if norm is not None else at_least_float32(row_weights).flatten()
    down = MatmulOperands(hidden, weights.down, bias=weights.down_bias, row_weight=row_weight)
    slots = ops.matmul_ogs(down, layout, out)
    if low_rank.a2 is not None:
        to_slot = dataclasses.replace(_FACTORS, scatter="slot")
        change = _product(hidden, low_rank.a2, low_rank.b2, layout, (_FACTORS, to_slot), row_weight)
        slots = torch.add(slots, change, alpha=low_rank.scale)
    if norm is not None:
        # A slot without a row counts in no gradient.
        factors = row_weights.reshape(-1, 1).masked_fill(layout.row_of_slot[:, None] < 0, 0)
        slots = at_least_float32(norm(slots)) * factors
    return ops.reduce(slots, layout, out_dtype=x.dtype)


def _product(
    x: torch.Tensor, a: Any, b: Any, layout: Any, specs: tuple[MatmulSpec, MatmulSpec], row_weight: Any = None
) -> torch.Tensor:
    low = ops.matmul_ogs(MatmulOperands(x, a.to(x.dtype).contiguous()), layout, specs[0])
    return ops.matmul_ogs(MatmulOperands(low, b.to(x.dtype).contiguous(), row_weight=row_weight), layout, specs[1])
