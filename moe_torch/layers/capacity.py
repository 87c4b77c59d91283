"""A limit on the slots an expert keeps, in front of the composed operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_core.layers import MoELayerSpec
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import MoEOutput, RaggedLayout, RouterWeights, TopK
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
        kept = self._within(ids, layout)
        output, _, invalid_ids = call(moe.operator, *moe.arguments(arrays, kept, weights), self._options)
        return MoEOutput(output, kept, weights, logits, layout.group_sizes, invalid_ids)

    def _within(self, ids: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
        """ids with -1 for every slot behind the first C of its expert."""
        numerator, denominator = self._ratio
        capacity = -(-ids.shape[0] * numerator // denominator)
        flat = ids.view(-1)
        place = layout.row_of_slot - layout.group_start[flat.clamp(min=0)]
        return torch.where(place < capacity, flat, -1).view(ids.shape)
