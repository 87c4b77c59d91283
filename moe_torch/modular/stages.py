"""Stages of experts on a layout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_core.errors import InvalidInput
from moe_core.formats import Format, QuantizedTensor
from moe_core.ops.quantize.rows import chooses_one_scale
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands
from moe_core.specs.routing import LayoutSpec
from moe_core.specs.tuning import MatmulTuning
from moe_torch import ops
from moe_torch.modular.into import result_in, write_into
from moe_torch.operators.kinds import as_int32
from moe_torch.operators.requests import matmul_request
from moe_torch.operators.stages import REDUCE


def as_ids(topk_ids: torch.Tensor) -> torch.Tensor:
    """ids `[M, topk]` as contiguous int32. Ids beyond int32 stay out of range."""
    ids = as_int32(topk_ids)
    if ids.dim() != 2 or ids.dtype != torch.int32:
        raise InvalidInput(
            f"topk_ids must be integers [num_tokens, topk], got {topk_ids.dtype} {list(topk_ids.shape)}; pass the ids "
            "of a top-k"
        )
    return ids.contiguous()


def as_weights(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """weights `[M, topk]` as contiguous fp32, exact for bf16 and fp16."""
    if topk_weights.dtype == torch.float32 and topk_weights.shape == topk_ids.shape:
        return topk_weights.contiguous()
    if topk_weights.shape != topk_ids.shape or not topk_weights.is_floating_point():
        raise InvalidInput(
            f"topk_weights must be floats {list(topk_ids.shape)} like topk_ids, got {topk_weights.dtype} "
            f"{list(topk_weights.shape)}; pass the weights of the same top-k"
        )
    return topk_weights.to(torch.float32).contiguous()


def weighted_rows(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """rows `[R, D]` times weights fp32 `[R, 1]`, in fp32, cast once. Gradients get torch's product."""
    if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
        return (rows.float() * weights).to(rows.dtype)
    return ops.scale_rows(rows, weights)


def sum_by_token(output: torch.Tensor, rows: torch.Tensor, row_of_slot: torch.Tensor, top_k: int, order: str) -> None:
    """Write to output `[M, D]` each token's rows, by slot or layout `row`, added in fp32 in order, one cast."""
    dtype, sizes = str(output.dtype).removeprefix("torch."), (None, top_k, None, None, None)
    arguments = REDUCE.arguments(
        y=rows, row_of_slot=row_of_slot, shared=None, shared_gate=None, sizes=sizes, order=order, out_dtype=dtype,
    )  # fmt: skip
    write_into(REDUCE, {"out": output}, arguments)


def slots_with_expert(topk_ids: torch.Tensor) -> torch.Tensor:
    """The slots int32 `[M * topk]`, -1 if the id is negative."""
    ids = topk_ids.reshape(-1)
    slots = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
    return torch.where(ids >= 0, slots, -1)


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Map global ids to local ones: -1 for ids of other ranks and outside the map."""
    if expert_map is None:
        return topk_ids
    if expert_map.dtype != torch.int32 or expert_map.dim() != 1 or not expert_map.shape[0]:
        raise InvalidInput(
            f"expert_map must be int32 [num_global_experts], at least one, got {expert_map.dtype} "
            f"{list(expert_map.shape)}; cast it, or pass None for no map"
        )
    known = (topk_ids >= 0) & (topk_ids < expert_map.shape[0])
    mapped = expert_map[topk_ids.clamp(0, expert_map.shape[0] - 1).long()]
    return torch.where(known, mapped, -1).to(torch.int32)


def batches_of(
    topk_ids: torch.Tensor, num_experts: int, max_rows: int, expert_map: torch.Tensor | None = None
) -> ops.RaggedLayout:
    """The layout of blocks `[E, max_rows, D]`, an expert's tokens in order. A token's slots of the same expert point to
    one row. At most max_rows tokens fit any routing."""
    ids = local_ids(topk_ids, expert_map)
    if ids.shape[1] == 1 or not ids.shape[0]:
        return ops.make_layout(ids, num_experts, max_rows=max_rows)
    first = (ids[:, :, None] == ids[:, None, :]).to(torch.uint8).argmax(-1)
    is_first = first == torch.arange(ids.shape[1], device=ids.device)
    layout = ops.make_layout(torch.where(is_first, ids, -1), num_experts, max_rows=max_rows)
    rows = layout.row_of_slot.view(ids.shape).gather(1, first)
    return dataclasses.replace(layout, row_of_slot=rows.reshape(-1))


def batched_layout(num_experts: int, max_rows: int, group_sizes: torch.Tensor) -> ops.RaggedLayout:
    """The layout of `[E, max_rows, D]` with group_sizes int32 `[E]` used rows. Every row is its own slot."""
    spec = LayoutSpec(num_experts * max_rows, 1, num_experts, max_rows=max_rows)
    rows = torch.arange(num_experts * max_rows, dtype=torch.int32, device=group_sizes.device)
    starts = torch.arange(num_experts + 1, dtype=torch.int32, device=group_sizes.device) * max_rows
    used = (rows % max_rows).view(num_experts, max_rows) < group_sizes[:, None]
    slots = torch.where(used.view(-1), rows, -1)
    none_invalid = torch.zeros(1, dtype=torch.int32, device=group_sizes.device)
    return ops.RaggedLayout(spec, group_sizes, starts, slots, slots, none_invalid)


def weight_of_row(weights: torch.Tensor, slot_of_row: torch.Tensor, absent: float = 0.0) -> torch.Tensor:
    """fp32 `[rows]`: the weight (fp32 `[M, topk]` or by slot) of each row's slot, `absent` for a row without one."""
    # Index -1 reads the last weight, which `where` drops.
    return torch.where(slot_of_row >= 0, weights.reshape(-1)[slot_of_row], absent)


_known_spec = functools.lru_cache(maxsize=1024)(MatmulSpec)


@dataclass(frozen=True)
class Stages:
    """activations: the format of both products' rows."""

    weights: ExpertWeights
    weight_layout: str
    tunings: tuple[MatmulTuning | None, MatmulTuning | None] = (None, None)
    activations: Format | None = None

    def product(
        self,
        number: int,
        memory: Mapping[str, torch.Tensor],
        x: Any,
        layout: ops.RaggedLayout,
        places: tuple[str, str],
        activation: Activation | None = None,
        row_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Product 1 or 2, in the dtype of `y` of memory (without: of x), and there if the call is plain. places: gather
        and scatter. x: rows. row_weight: fp32 `[M * topk]` by slot."""
        weight, bias, scale = self.weights.gate_up, self.weights.gate_up_bias, self.weights.gate_up_input_scale
        if number == 2:
            weight, bias, scale = self.weights.down, self.weights.down_bias, self.weights.down_input_scale
        dtype, plain = memory["y"].dtype if memory else x.dtype, None
        if not isinstance(x, QuantizedTensor) and self.activations is None:
            plain = x.dtype
        elif not isinstance(x, QuantizedTensor) and self.activations is not None:
            # Rows without a slot are unwritten and must not enter one common scale.
            used_by = layout.slot_of_row if places[0] == "row" else None
            if used_by is None and chooses_one_scale(self.activations, scale is not None):
                used_by = layout.row_of_slot
            x = ops.quantize_rows(x, self.activations, scales=scale, used_by=used_by)
        make = MatmulSpec if torch.compiler.is_compiling() else _known_spec
        out_dtype = None if dtype == plain else str(dtype).removeprefix("torch.")
        spec = make(self.weight_layout, *places, activation, out_dtype, tuning=self.tunings[number - 1])
        operands = MatmulOperands(x, weight, bias=bias, row_weight=row_weight)
        operator, arguments = matmul_request(operands, layout, spec)
        return result_in(operator, memory, arguments)

    def run(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        layout: ops.RaggedLayout,
        row_weight: torch.Tensor | None,
        activation: Activation,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """Write both products and the sum by token to output `[M, K]`. hidden: memory `[M * topk, F]` between."""
        rows = self.product(1, {} if hidden is None else {"y": hidden}, x, layout, ("token", "row"), activation)
        slots = self.product(2, {}, rows, layout, ("row", "slot"), row_weight=row_weight)
        sum_by_token(output, slots, layout.row_of_slot, layout.spec.top_k, "slot")
