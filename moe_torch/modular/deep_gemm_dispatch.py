"""Choose Triton or DeepGEMM in each call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from moe_core.errors import InvalidInput
from moe_core.modular import deep_gemm as contract
from moe_core.modular.quant_config import FLAGGED_SCHEMES, FusedMoEQuantConfig
from moe_core.modular.schemes import QuantKey, has_scheme
from moe_core.modular.types import FusedMoEActivationFormat, ProblemSize
from moe_core.specs.matmul import Activation
from moe_core.specs.tuning import Tuning
from moe_torch.modular.calls import NEWEST, ExpertsCall
from moe_torch.modular.deep_gemm import is_blackwell_deep_gemm_e8m0_used
from moe_torch.modular.deep_gemm_experts import DeepGemmExperts
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute, WorkspaceShapes
from moe_torch.modular.quant_config import FLAGS
from moe_torch.modular.standard_experts import StandardExperts
from moe_torch.modular.triton_experts import TritonExperts
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce

Self = TypeVar("Self", bound="TritonOrDeepGemmExperts")


class TritonOrDeepGemmExperts(StandardExperts):
    """Run `deep_gemm_expert` if it is allowed and the call is valid for it, else `triton_expert`.

    Allowed: allow_deep_gemm, use_fp8_w8a8 and block_shape [128, 128]. Otherwise `deep_gemm_expert` is None. Valid, with
    w2 `[E, K, N]`: at least 128 tokens, N and K multiples of 128, N > 512, w1 and w2 e4m3, everything contiguous. Also
    valid: tokens that `prepare` has quantised, with a1q_scale, and e8m0 if `is_blackwell_deep_gemm_e8m0_used`. All
    chunks of a batch run on one member. Parameters are as in `FusedMoEQuantConfig.make`, or quant_config and
    allow_deep_gemm, or the newest moe_config and quant_config, which allow it. Raises Unsupported for what a member
    does not support.
    """

    default_weight_layout = "out_in"
    # The members have their own.
    calls = ()

    def __init__(
        self,
        use_fp8_w8a8: Any = False,
        use_int8_w8a8: Any = False,
        use_int8_w8a16: bool = False,
        use_int4_w4a16: bool = False,
        use_mxfp4_w4a4: bool = False,
        per_act_token_quant: bool = False,
        block_shape: Sequence[int] | None = None,
        allow_deep_gemm: bool = False,
        *,
        quant_config: FusedMoEQuantConfig | None = None,
        moe_config: Any = None,
        tuning: Tuning | None = None,
        e8m0: bool = False,
        **arrays: Any,
    ) -> None:
        if not isinstance(use_fp8_w8a8, bool):  # other generations' order
            if isinstance(use_int8_w8a8, bool):
                quant_config, allow_deep_gemm = use_fp8_w8a8, allow_deep_gemm or use_int8_w8a8
            else:
                moe_config, quant_config = use_fp8_w8a8, use_int8_w8a8
            use_fp8_w8a8 = use_int8_w8a8 = False
        schemes = (use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16, use_mxfp4_w4a4)
        flags = dict(zip(FLAGS, (*schemes, per_act_token_quant, block_shape), strict=False))
        if quant_config is None:
            quant_config = FusedMoEQuantConfig.make(**flags, **arrays)
        elif present := [name for name, value in (flags | arrays).items() if value not in (False, None)]:
            raise InvalidInput(
                f"{' and '.join(present)} must be left out beside a quant_config, which has them, got both; keep one"
            )
        super().__init__(quant_config, moe_config=moe_config, tuning=tuning)
        config, allow_deep_gemm = self.quant_config, allow_deep_gemm or moe_config is not None
        self._not_allowed = contract.why_not_allowed(allow_deep_gemm, config.use_fp8_w8a8, config.block_shape)
        self.triton_expert = TritonExperts(config, tuning=tuning)
        self.deep_gemm_expert: DeepGemmExperts | None = None
        if self.allow_deep_gemm:
            self.deep_gemm_expert = DeepGemmExperts(config, tuning=tuning, e8m0=e8m0)
        elif e8m0:
            raise InvalidInput(
                f"e8m0 must be False where DeepGEMM is not allowed, got True, and {self._not_allowed}; leave it out, "
                "or allow DeepGEMM"
            )

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return has_scheme(weight_key, activation_key, FLAGGED_SCHEMES)

    @property
    def allow_deep_gemm(self) -> bool:
        return self._not_allowed is None

    @property
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        return self._agreed("activation_formats", lambda member: member.activation_formats)

    def supports_chunking(self) -> bool:
        return all(member.supports_chunking() for member in self._members())

    def supports_expert_map(self) -> bool:
        return all(member.supports_expert_map() for member in self._members())

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return self._agreed("finalize_weight_and_reduce_impl", lambda member: member.finalize_weight_and_reduce_impl())

    def workspace_dtype(self, activation_dtype: torch.dtype) -> torch.dtype:
        return self._members()[-1].workspace_dtype(activation_dtype)

    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        """DeepGEMM's larger shapes, if it may be chosen for these sizes."""
        deep_gemm = self.deep_gemm_expert
        if deep_gemm is not None and (deep_gemm.e8m0 or contract.why_not_valid_shape(size.M, size.N, size.K) is None):
            return deep_gemm.shapes(size, F)
        return self.triton_expert.shapes(size, F)

    def as_stored(self, w1, w2):
        # The members ask for themselves.
        return self, w1, w2

    def run(self, call: ExpertsCall) -> Any:
        member = self.chosen(call.hidden_states, call.w1, call.w2)
        size = self.moe_problem_size(call.hidden_states, call.w1, call.w2, call.topk_ids)
        F = self.adjust_N_for_activation(size.N, call.activation)
        deep_gemm = self.deep_gemm_expert
        if deep_gemm is member and deep_gemm is not None and deep_gemm.shapes(size, F) != self.shapes(size, F):
            # `shapes` does not see quantised hidden states and returned Triton's memory.
            workspace13, workspace2, _ = (call.workspace2.new_empty(shape) for shape in deep_gemm.shapes(size, F))
            call = call._replace(workspace13=workspace13, workspace2=workspace2)
        arguments: Any = call[:NEWEST]
        return member.apply(*arguments)

    def chosen(
        self, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
    ) -> FusedMoEPermuteExpertsUnpermute:
        choice = contract.choose_experts(self._not_allowed, self._case(hidden_states, w1, w2))
        if choice.member != contract.DEEP_GEMM:
            return self.triton_expert
        assert self.deep_gemm_expert is not None, "it is made where it is allowed"
        return self.deep_gemm_expert

    def explain(self, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> str:
        """Name the member that runs this call, and the reason. Runs nothing."""
        return contract.explain_choice(self._not_allowed, self._case(hidden_states, w1, w2))

    def with_quant_config(self: Self, quant_config: FusedMoEQuantConfig) -> Self:
        if quant_config is self.quant_config:
            return self
        changed = copy.copy(self)
        changed.quant_config = quant_config
        changed.triton_expert = self.triton_expert.with_quant_config(quant_config)
        if self.deep_gemm_expert is not None:
            changed.deep_gemm_expert = self.deep_gemm_expert.with_quant_config(quant_config)
        return changed

    def chunked_as_whole(
        self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, size: ProblemSize, activation: str | Activation
    ) -> FusedMoEPermuteExpertsUnpermute:
        """A chunk may be too small for the batch's member, and the other has other bits."""
        return self.chosen(x, w1, w2).chunked_as_whole(x, w1, w2, size, activation)

    def adding_as(self: Self, num_tokens: int, num_experts: int) -> Self:
        changed = super().adding_as(num_tokens, num_experts)
        changed.triton_expert = self.triton_expert.adding_as(num_tokens, num_experts)
        if self.deep_gemm_expert is not None:
            changed.deep_gemm_expert = self.deep_gemm_expert.adding_as(num_tokens, num_experts)
        return changed

    def _members(self) -> list[FusedMoEPermuteExpertsUnpermute]:
        deep_gemm = self.deep_gemm_expert
        return [self.triton_expert] if deep_gemm is None else [self.triton_expert, deep_gemm]

    def _agreed(self, name: str, question: Any) -> Any:
        first, *others = [(type(member).__name__, question(member)) for member in self._members()]
        for other in others:
            if other[1] != first[1]:
                raise InvalidInput(
                    f"{name} of triton_expert and deep_gemm_expert must agree, got {first[1]} of {first[0]} and "
                    f"{other[1]} of {other[0]}; choose two members that fit"
                )
        return first[1]

    def _case(self, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> contract.DispatchCase:
        arrays = {"hidden_states": hidden_states, "w1": w1, "w2": w2}
        deep_gemm = self.deep_gemm_expert
        return contract.DispatchCase(
            hidden_states.shape[0],
            w2.shape,
            (str(w1.dtype).removeprefix("torch."), str(w2.dtype).removeprefix("torch.")),
            tuple(name for name, array in arrays.items() if not array.is_contiguous()),
            deep_gemm is not None and deep_gemm.e8m0 and is_blackwell_deep_gemm_e8m0_used(hidden_states.device),
            hidden_states.dtype == torch.float8_e4m3fn,
        )
