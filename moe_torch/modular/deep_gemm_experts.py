"""Experts with DeepGEMM's contract."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch

from moe_core.base.checks import require_flag
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedTensor
from moe_core.modular import deep_gemm as contract
from moe_core.modular.deep_gemm import ALIGNMENT
from moe_core.modular.quant_config import FusedMoEQuantConfig
from moe_core.modular.schemes import QuantKey, canonical_key, keys_of
from moe_core.modular.types import ProblemSize
from moe_core.specs.matmul import Activation
from moe_core.specs.operands import ExpertWeights
from moe_torch import ops
from moe_torch.modular.calls import ExpertsCall, require_written
from moe_torch.modular.experts import WorkspaceShapes
from moe_torch.modular.quant_config import FLAGS
from moe_torch.modular.stages import batched_layout, sum_by_token
from moe_torch.modular.triton_experts import BatchedExperts, GroupedExperts, view_as, weights_left

Self = TypeVar("Self", bound="DeepGemmContractExperts")
_CONFIG = FusedMoEQuantConfig.make(use_fp8_w8a8=True, block_shape=contract.deep_gemm_block_shape())


class DeepGemmContractExperts(GroupedExperts):
    """The base of both formats: checks of the contract, its rows and its weights.

    quant_config: fp8_w8a8 with block_shape [128, 128]. w1_scale fp32 `[E, N / 128, K / 128]` and w2_scale `[E, K / 128,
    F / 128]` may come with the call. Hidden states are bf16, fp16 or fp32, or e4m3 with a1q_scale fp32 `[.., K / 128]`.
    N, K and F are multiples of 128. e8m0: activations get power-of-two scales. Raises Unsupported for other
    configurations and layouts.
    """

    default_weight_layout = "out_in"
    calls = ("activation", "weights")
    scheme_of_flags: ClassVar[dict[str, bool]] = {"use_fp8_w8a8": True}

    def __init__(self, *configs: Any, e8m0: bool = False, **options: Any) -> None:
        if not configs and options.get("quant_config") is None and options.keys().isdisjoint(FLAGS):
            options["quant_config"] = _CONFIG
        super().__init__(*configs, **options)
        require_flag("e8m0", e8m0)
        if self.weight_layout != "out_in":
            raise Unsupported(
                f"weight_layout must be 'out_in', as DeepGEMM has it, got {self.weight_layout!r}; leave it out"
            )
        self.e8m0 = e8m0
        self._require_config(self.quant_config)

    @staticmethod
    def supports_lora() -> bool:
        return False

    def _require_config(self, quant_config: FusedMoEQuantConfig) -> None:
        reason = contract.why_not_deep_gemm(quant_config)
        if reason is not None:
            raise Unsupported(reason)

    def with_quant_config(self: Self, quant_config: FusedMoEQuantConfig) -> Self:
        self._require_config(quant_config)
        return super().with_quant_config(quant_config)

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        if weight_key is None or activation_key is None:
            return False
        return (canonical_key(weight_key), canonical_key(activation_key)) == keys_of(_CONFIG, static=False)

    def as_stored(self, w1, w2):
        return self, w1, w2

    @property
    def activations(self) -> Format:
        return contract.activation_format(self.e8m0)

    def workspace_dtype(self, activation_dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if activation_dtype == torch.float8_e4m3fn else activation_dtype

    def chunked_as_whole(
        self: Self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, size: ProblemSize, activation: str | Activation
    ) -> Self:
        if x.dtype == torch.float8_e4m3fn:
            raise InvalidInput(
                "hidden_states must not be quantised where they are taken in chunks, whose scales nobody splits, got "
                "e4m3; leave chunk_size out, or prepare them as they are"
            )
        return super().chunked_as_whole(x, w1, w2, size, activation)

    def operands_of(self, call: ExpertsCall) -> tuple[ExpertWeights, QuantizedTensor]:
        if call.a2_scale is not None:
            raise InvalidInput(
                "a2_scale must be None: activations have a scale per 128 columns, got a tensor; leave it out"
            )
        weights, scale = contract.check_experts(self.weights(call.w1, call.w2)), call.a1q_scale
        rows = call.hidden_states.reshape(-1, call.hidden_states.shape[-1])
        if not contract.has_scales(call.hidden_states, scale):
            return weights, ops.quantize_rows(rows, self.activations)
        assert scale is not None
        return weights, contract.matmul_side(self.activations, rows, scale.contiguous().view(-1, scale.shape[-1]))


class DeepGemmExperts(DeepGemmContractExperts):
    """Standard format, products in the contiguous layout: the rows of each expert are padded to 128.

    quantise -> product 1 -> `activation` -> quantise -> product 2, weighted -> sum by token. Stages round to the dtype
    of the hidden states (bf16 if these are quantised), once more than TritonExperts. An overridden `activation` sees
    exact zeros in rows of padding.
    """

    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        """For the most rows that padding can make of M * topk."""
        rows = -(-(size.M * size.topk + size.E * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT
        return (rows, max(size.N, size.K)), (rows, F), (size.M, size.K)

    def run(self, call: ExpertsCall) -> None:
        self.require_experts(call)
        E, M, N, K, topk = self.size_of(call)
        weights, rows = self.operands_of(call)
        left = weights_left(call)
        layout = ops.make_layout(call.topk_ids, E, expert_map=call.expert_map, alignment=ALIGNMENT)
        F, count = self.adjust_N_for_activation(N, call.activation), layout.slot_of_row.shape[0]
        workspace13, workspace2 = call.workspace13, call.workspace2
        stages = self.stages(weights)
        before = stages.product(1, {"y": view_as(workspace13, count, N)}, rows, layout, self.places[0])
        hidden = view_as(workspace2, count, F)
        require_written("activation", self.activation(call.activation, hidden, before), hidden)
        rows = ops.quantize_rows(hidden, self.activations)
        memory = {"y": view_as(workspace13, M * topk, K)}
        slots = stages.product(2, memory, rows, layout, self.places[1], row_weight=left.reshape(-1))
        sum_by_token(call.output, slots, layout.row_of_slot, topk, "slot")


class BatchedDeepGemmExperts(BatchedExperts, DeepGemmContractExperts):
    """Batched format, products in the masked layout. Rows past an expert's count come out as zeros."""

    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        rows = self.max_num_tokens * self.num_dispatchers
        return (size.E, rows, size.N), *super().shapes(size, F)[1:]

    def run(self, call: ExpertsCall) -> None:
        (E, R, N, K, _), meta = self.require_blocks(call)
        weights, rows = self.operands_of(call)
        layout = batched_layout(E, R, meta.expert_num_tokens.clamp(0, R))
        before, after = self.rows_in(call.workspace13, call, N), call.output.view(E * R, K)
        hidden = self.rows_in(call.workspace2, call, self.adjust_N_for_activation(N, call.activation))
        for number, weight_output in ((1, before), (2, after)):
            result = self.stages(weights).product(number, {"y": weight_output}, rows, layout, ("row", "row"))
            if number == 1:
                require_written("activation", self.activation(call.activation, hidden, result), hidden)
                rows = ops.quantize_rows(hidden, self.activations)
