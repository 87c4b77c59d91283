"""The stages of experts, one after another, on a layout that is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moe_core.formats import Format
from moe_core.ops.quantize.rows import chooses_one_scale
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands
from moe_core.specs.tuning import MatmulTuning
from moe_torch.modular.into import result_in
from moe_torch.modular.rows import sum_by_token
from moe_torch.operators.requests import matmul_request
from moe_torch.ops import RaggedLayout, quantize_rows


def product(
    memory: Mapping[str, torch.Tensor],
    operands: MatmulOperands,
    layout: RaggedLayout,
    spec: MatmulSpec,
    activations: Format | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`matmul_ogs`, in memory's `y` where the call is plain and memory has one.

    activations: x is quantised to this format first, with input_scale fp32 `[1]` or one that is found.
    """
    if activations is not None:
        dtype = str(operands.x.dtype).removeprefix("torch.")
        # One scale is found from rows that a slot reads: what else lies in memory must not have a say.
        slots = layout.slot_of_row if spec.gather == "row" else layout.row_of_slot
        used_by = slots if chooses_one_scale(activations, input_scale is not None) else None
        rows = quantize_rows(operands.x, activations, scales=input_scale, used_by=used_by)
        operands, spec = dataclasses.replace(operands, x=rows), dataclasses.replace(spec, out_dtype=dtype)
    operator, arrays, text = matmul_request(operands, layout, spec)
    return result_in(operator, memory, *arrays, text)


@dataclass(frozen=True)
class Stages:
    """What both products of some experts have in common. tunings, input_scales: of the first and of the second."""

    weights: ExpertWeights
    weight_layout: str
    tunings: tuple[MatmulTuning | None, MatmulTuning | None] = (None, None)
    activations: Format | None = None

    def first(
        self,
        memory: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        layout: RaggedLayout,
        activation: Activation | None,
        gather: str = "token",
        scatter: str = "row",
    ) -> torch.Tensor:
        """The first product, with its activation or without."""
        spec = MatmulSpec(self.weight_layout, gather, scatter, activation, tuning=self.tunings[0])
        operands = MatmulOperands(x, self.weights.gate_up, bias=self.weights.gate_up_bias)
        return product(memory, operands, layout, spec, self.activations, self.weights.gate_up_input_scale)

    def second(
        self,
        memory: Mapping[str, torch.Tensor],
        rows: torch.Tensor,
        layout: RaggedLayout,
        row_weight: torch.Tensor | None,
        gather: str = "row",
        scatter: str = "slot",
    ) -> torch.Tensor:
        """The second product, times row_weight fp32 `[M * topk]` by slot (None: not weighted)."""
        spec = MatmulSpec(self.weight_layout, gather, scatter, tuning=self.tunings[1])
        operands = MatmulOperands(rows, self.weights.down, bias=self.weights.down_bias, row_weight=row_weight)
        return product(memory, operands, layout, spec, self.activations, self.weights.down_input_scale)

    def run(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        layout: RaggedLayout,
        row_weight: torch.Tensor | None,
        activation: Activation,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """Both products, the activation fused into the first, and the sum by token, written to output `[M, K]`.

        hidden: memory `[M * topk, F]` for the rows between.
        """
        rows = self.first({} if hidden is None else {"y": hidden}, x, layout, activation)
        slots = self.second({}, rows, layout, row_weight)
        sum_by_token(output, slots, layout.row_of_slot, layout.spec.top_k, "slot")
