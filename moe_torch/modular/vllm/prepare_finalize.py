"""The first base of adapted classes that prepare and finalise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_core.errors import Unsupported
from moe_torch.modular.calls import PreparedTokens
from moe_torch.modular.prepare_finalize import MoEPrepareAndFinalizeNoEP
from moe_torch.modular.vllm.experts import AdaptedExperts
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduceDelegate

_Base: Any = MoEPrepareAndFinalizeNoEP if TYPE_CHECKING else object


class AdaptedPrepareAndFinalize(_Base):
    """Our class `base`, which brings tokens as they are, for one call at a time. kernels: vLLM's module."""

    base: Any
    kernels: Any
    _prepared: PreparedTokens | None = None

    @property
    def activation_format(self) -> Any:
        return getattr(self.kernels.FusedMoEActivationFormat, super().activation_format.name)

    def post_init_setup(self, fused_experts: Any) -> None:
        adapted = isinstance(fused_experts, AdaptedExperts)
        if not adapted and fused_experts.quant_dtype is not None and not fused_experts.expects_unquantized_inputs:
            raise Unsupported(
                f"fused_experts must quantise tokens for {self.base.__name__}, which brings them as they are, got "
                f"{type(fused_experts).__name__}; take vLLM's class"
            )

    def prepare(
        self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
        defer_input_quant=False,
    ) -> Any:  # fmt: skip
        tokens = (a1, None, None, topk_weights, topk_ids, num_experts, expert_map)
        self._prepared = prepared = super().prepare(*tokens, apply_router_weight_on_input)
        counts = prepared.expert_num_tokens
        meta = None if counts is None else self.kernels.ExpertTokensMetadata(counts, None)
        return prepared.a1q, None, meta, prepared.topk_ids, prepared.topk_weights

    def finalize(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
    ) -> None:
        prepared, self._prepared = self._prepared, None
        if type(weight_and_reduce_impl).__name__ == "TopKWeightAndReduceDelegate":
            weight_and_reduce_impl = TopKWeightAndReduceDelegate()
        routing = (topk_weights, topk_ids, apply_router_weight_on_input)
        super().finalize(output, fused_expert_output, *routing, weight_and_reduce_impl, prepared)
