"""What a layer computes around the composed operator: a limit on the slots an expert keeps, and router losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_core.layers import MoELayerSpec
from moe_core.specs import MoESpec, RouterSpec
from moe_core.specs.operands import MoEOutput, RouterWeights, TopK
from moe_torch import ops
from moe_torch.bridge.operator import Operator, call
from moe_torch.bridge.options import encode
from moe_torch.operators import table as operators
from moe_torch.operators.table import MOE_QUANTIZED


class _Operators:
    """Two operators and where they take their arrays: `given` routes from x, `wanted` takes ids and weights."""

    def __init__(self, moe: Mapping[type, Operator]) -> None:
        self.operator = moe[TopK]
        given, self.wanted = moe[RouterWeights].names, self.operator.names
        self.routing = [given.index(f"routing.{name}") for name in ("weight", "bias", "correction_bias")]
        self.mask = given.index("token_mask")
        #: (position among the arguments wanted, among those given). Ids know the token mask already.
        self.copied = [
            (self.wanted.index(name), place)
            for place, name in enumerate(given)
            if name in self.wanted and place != self.mask
        ]
        self.ids, self.weights = self.wanted.index("routing.ids"), self.wanted.index("routing.weights")

    def arguments(
        self, arrays: Sequence[torch.Tensor | None], ids: torch.Tensor, weights: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """The operator's arrays with the routing decided."""
        found: list[torch.Tensor | None] = [None] * len(self.wanted)
        for wanted, given in self.copied:
            found[wanted] = arrays[given]
        found[self.ids], found[self.weights] = ids, weights
        return found


#: By whether experts are quantised.
_OPERATORS = {False: _Operators(operators.MOE), True: _Operators(MOE_QUANTIZED)}


class CapacityLimit:
    """Routes, then hands the operator ids that are -1 where an expert was full.

    An expert keeps the first C = `spec.capacity(T)` slots in slot order, those that `make_layout(max_rows=C)` keeps. C
    is compared with each slot's place in a layout of all slots instead of being the layout's max_rows: that is a
    constant of its kernels, and a changing number of tokens would compile them again.
    """

    def __init__(self, spec: MoELayerSpec, moe_spec: MoESpec, *formats: Any) -> None:
        ratio = spec.capacity_ratio()
        assert ratio is not None and spec.router == moe_spec.router
        self._spec, self._ratio = spec, ratio
        self._logits = moe_spec.logits_spec()
        # Behind the spec, the formats of quantised experts are options of their operator.
        self._options = encode(dataclasses.replace(moe_spec, router=None), *formats)
        self._is_quantized = bool(formats)

    def __call__(self, arrays: Sequence[torch.Tensor | None]) -> MoEOutput:
        """One forward; arrays: those of the operator that routes from x. ids are -1 where a slot was dropped,
        tokens_per_expert counts the slots before."""
        moe = _OPERATORS[self._is_quantized]
        weight, bias, correction_bias = (arrays[place] for place in moe.routing)
        x = arrays[0]
        assert x is not None and weight is not None
        mask = arrays[moe.mask]
        rows = x
        if mask is not None and torch.is_grad_enabled() and weight.requires_grad:
            # The router's backward multiplies every row by its gradient, which is zero for masked tokens.
            rows = x.masked_fill(~mask[:, None], 0)
        logits = ops.router(rows, weight, bias=bias, spec=self._logits)
        ids, weights = ops.route(logits, self._spec.router, correction_bias=correction_bias, token_mask=mask)
        layout = ops.make_layout(ids, self._spec.num_experts)
        numerator, denominator = self._ratio
        capacity, flat = -(-ids.shape[0] * numerator // denominator), ids.view(-1)
        # -1 for every slot behind the first of its expert.
        place = layout.row_of_slot - layout.group_start[flat.clamp(min=0)]
        kept = torch.where(place < capacity, flat, -1).view(ids.shape)
        output, _, invalid_ids = call(moe.operator, *moe.arguments(arrays, kept, weights), self._options)
        return MoEOutput(output, kept, weights, logits, layout.group_sizes, invalid_ids)


def router_losses(
    logits: torch.Tensor, tokens_per_expert: torch.Tensor, token_mask: torch.Tensor | None, router: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(load-balancing loss, z-loss), fp32 scalars; formulas: `moe_core.ops.routing.reference.router_losses`.

    logits fp32 `[T, E]`; tokens_per_expert int32 `[E]`; token_mask bool `[T]` or None.
    """
    num_tokens, num_experts = logits.shape
    count = logits.new_full((), num_tokens)
    if token_mask is not None:
        # What a masked token holds, even NaN, must not reach the sums.
        logits = torch.where(token_mask[:, None], logits, 0.0)
        count = token_mask.sum().to(torch.float32)
    log_scores = _log_scores(logits, router.scoring)
    empty = torch.isneginf(log_scores).all(dim=-1, keepdim=True)
    shares = torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, log_scores), dim=-1))
    squares = torch.logsumexp(logits, dim=-1).square()
    if token_mask is not None:
        shares, squares = torch.where(token_mask[:, None], shares, 0.0), torch.where(token_mask, squares, 0.0)
    count = count.clamp(min=1.0)
    slot_share = tokens_per_expert.to(torch.float32) / (count * router.require_top_k())
    balance = num_experts * (slot_share * (shares.sum(dim=0) / count)).sum()
    return balance, squares.sum() / count


def _log_scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Logarithms of the scores, up to a constant of the token: scores themselves underflow, and their sum then has no
    gradient."""
    if scoring == "softmax":
        return logits
    if scoring == "sigmoid":
        return torch.nn.functional.logsigmoid(logits)
    # softplus(x) is exp(x) in fp32 below -17.
    softplus = torch.nn.functional.softplus(logits.clamp(min=-17.0))
    return 0.5 * torch.where(logits < -17.0, logits, softplus.log())
