"""The first base of adapted experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.activations import activation_of
from moe_core.modular.quant_config import CONSTANTS, FLAGGED_SCHEMES
from moe_core.modular.schemes import has_scheme
from moe_core.modular.types import FusedMoEActivationFormat
from moe_torch.modular.calls import NEWEST, ExpertsCall, taking
from moe_torch.modular.deep_gemm_dispatch import TritonOrDeepGemmExperts
from moe_torch.modular.deep_gemm_experts import BatchedDeepGemmExperts
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute, WorkspaceShapes
from moe_torch.modular.generations.tokens import ExpertTokensMetadata
from moe_torch.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig, with_constants
from moe_torch.modular.stages import as_ids, as_weights
from moe_torch.modular.vllm.quant_config import READ, quant_config_of

#: Elements. Each part of a workspace starts at a multiple.
_ALIGNMENT = 256
#: Of vLLM's parallel configuration: tokens come quantised, or placed, as no experts here take them.
_OTHER_TOKENS = (
    *("use_fi_nvl_two_sided_kernels", "use_fi_nvl_one_sided_kernels", "use_mori_kernels", "use_moonep_kernels"),
    "use_passthrough_all2all",
)
_ARRAYS = ("w1_bias", "w2_bias", "w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale")
_Base: Any = FusedMoEPermuteExpertsUnpermute if TYPE_CHECKING else object


class AdaptedExperts(_Base):
    """Our experts `base`, called with vLLM's arguments, enumerations and reductions. kernels: vLLM's module."""

    base: Any
    options: Any
    kernels: Any

    def __init__(
        self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None
    ) -> None:
        self.require(moe_config, quant_config)
        batch = {"max_num_tokens": max_num_tokens, "num_dispatchers": num_dispatchers}
        if any((value is None) == self._is_batched() for value in batch.values()):
            raise InvalidInput(
                f"max_num_tokens and num_dispatchers must be {'numbers' if self._is_batched() else 'None'} for "
                f"{self.base.__name__}, got {max_num_tokens} and {num_dispatchers}; pass what its format needs"
            )
        self.base.__init__(self, **self._arguments(_read(quant_config, moe_config), batch))
        self.moe_config = moe_config
        self.finalize_weight_and_reduce_impl()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "post_gemm2_hook" and value is not None:
            raise Unsupported(
                f"post_gemm2_hook must be None for {self.base.__name__}, which never calls it, got one; leave it out"
            )
        super().__setattr__(name, value)

    @classmethod
    def require(cls, *configs: Any) -> None:
        """Raise Unsupported for what these experts cannot run. configs: vLLM's, of layers and of quantisations."""
        layers = [config for config in configs if hasattr(config, "moe_parallel_config")]
        quantisations = [config for config in configs if config not in layers]
        batch = {"max_num_tokens": 1, "num_dispatchers": 1}
        for quantisation in quantisations:
            for layer in layers or [None]:
                made = cls.base(**cls._arguments(_read(quantisation, layer), batch))
                if layer is not None and layer.is_lora_enabled and getattr(made, "activations", None) is not None:
                    raise Unsupported(
                        f"is_lora_enabled must be False for {cls.base.__name__} that quantises activations, got True"
                        "; let vLLM's experts run"
                    )
        for layer in layers:
            if not quantisations:
                _require_activation(FUSED_MOE_UNQUANTIZED_CONFIG, layer)
            parallel = layer.moe_parallel_config
            present = [f"moe_parallel_config.{name}" for name in _OTHER_TOKENS if getattr(parallel, name)]
            present += ["is_lora_enabled"] if layer.is_lora_enabled and not cls.supports_lora() else []
            # vLLM moves the experts of the biases that it has.
            copied = any(
                config.w1_bias is not None and config.w1_bias.dtype != torch.float32 for config in quantisations
            )
            present += (
                ["moe_parallel_config.enable_eplb with biases of less than fp32"]
                if copied and parallel.enable_eplb
                else []
            )
            if present:
                raise Unsupported(
                    f"{present[0]} must be False for {cls.base.__name__}, got True; let vLLM's experts run"
                )

    @classmethod
    def _arguments(cls, config: FusedMoEQuantConfig, batch: dict[str, Any]) -> dict[str, Any]:
        """Of the constructor of base."""
        arguments = {**cls.options, **(batch if cls._is_batched() else {})}
        if not issubclass(cls.base, TritonOrDeepGemmExperts):
            return {**arguments, "quant_config": config}
        if config.scheme not in (None, *FLAGGED_SCHEMES):
            raise Unsupported(f"quant_config must not be {config.scheme} for {cls.base.__name__}; adapt TritonExperts")
        flags = {f"use_{config.scheme}": True} if config.scheme else {}
        flags |= {"per_act_token_quant": config.per_act_token_quant, "block_shape": config.block_shape}
        return {
            "allow_deep_gemm": True,
            **arguments,
            **flags,
            **{name: getattr(config, name) for name in (*_ARRAYS, *CONSTANTS)},
        }

    @classmethod
    def _is_batched(cls) -> bool:
        return cls.base.activation_format() is FusedMoEActivationFormat.BatchedExperts

    @classmethod
    def supports_lora(cls) -> bool:
        """vLLM's batched prepare brings no adapters."""
        return cls.base.supports_lora() and not cls._is_batched()

    @classmethod
    def activation_format(cls) -> Any:
        return getattr(cls.kernels.FusedMoEActivationFormat, cls.base.activation_format().name)

    @property
    def expects_unquantized_inputs(self) -> bool:
        # These take either, and vLLM's batched prepare must quantise.
        return not issubclass(self.base, BatchedDeepGemmExperts) and super().expects_unquantized_inputs

    def finalize_weight_and_reduce_impl(self) -> Any:
        from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce  # pyright: ignore[reportMissingImports]

        impl = super().finalize_weight_and_reduce_impl()
        name = type(impl).__name__
        if name not in ("TopKWeightAndReduceNoOP", "TopKWeightAndReduceDelegate", "TopKWeightAndReduceContiguous"):
            raise Unsupported(
                f"{self.base.__name__} must leave a reduction that vLLM has, got {name}; weight and reduce in apply"
            )
        return getattr(topk_weight_and_reduce, name)()

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ) -> WorkspaceShapes:
        """vLLM puts the output over its first workspace, which stays empty."""
        sizes = (M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta)
        first, second, output = super().workspace_shapes(*sizes, activation)
        return (0,), (_padded(first) + math.prod(second),), output

    @taking(ExpertsCall)
    def apply(self, call: ExpertsCall) -> Any:
        ids, num_experts, meta = as_ids(call.topk_ids), call.w1.shape[0], call.expert_tokens_meta
        call = call._replace(topk_ids=ids, topk_weights=as_weights(call.topk_weights, ids))
        if getattr(meta, "rank_expert_offset", None) is not None:
            raise Unsupported(
                "expert_tokens_meta.rank_expert_offset must be None, as ids must be global, got a number"
                "; pass global ids"
            )
        if self._is_batched():
            # The tokens are placed already, and vLLM may count the experts of all ranks.
            assert meta is not None, "batched tokens have counts"
            meta = ExpertTokensMetadata(meta.expert_num_tokens[:num_experts])
            call = call._replace(expert_map=None, global_num_experts=num_experts)
        else:
            meta = None
        _, *sizes = self.moe_problem_size(call.hidden_states, call.w1, call.w2, ids)
        sizes += [call.global_num_experts, num_experts, meta, call.activation]
        first, second, _ = super().workspace_shapes(*sizes)
        start, memory = _padded(first), call.workspace2
        call = call._replace(
            workspace13=memory[: math.prod(first)].view(first),
            workspace2=memory[start : start + math.prod(second)].view(second),
            expert_tokens_meta=meta,
        )
        arguments: Any = call[:NEWEST]
        return super().apply(*arguments)

    @staticmethod
    def is_supported_config(cls: Any, *arguments: Any) -> Any:  # pyright: ignore[reportSelfClsParameterName]
        moe_config, _, activation_key = arguments[:3]
        if moe_config.is_lora_enabled and activation_key is not None:
            return False, "kernel does not support LoRA with quantised activations"
        return cls.kernels.FusedMoEExperts.is_supported_config(cls, *arguments)

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        known = weight_key is activation_key is None or has_scheme(weight_key, activation_key, READ)
        # vLLM's batched prepare quantises.
        fits = activation_key is None or not cls._is_batched() or issubclass(cls.base, BatchedDeepGemmExperts)
        return known and fits and cls.base._supports_quant_scheme(weight_key, activation_key)

    @classmethod
    def _supports_parallel_config(cls, moe_parallel_config: Any) -> bool:
        return not any(getattr(moe_parallel_config, name) for name in _OTHER_TOKENS)

    @classmethod
    def _supports_batch_invariance(cls) -> bool:
        tuning = cls.options.get("tuning")
        return tuning is not None and tuning.batch_invariant


def _read(quant_config: Any, moe_config: Any) -> FusedMoEQuantConfig:
    """Ours, with the constants of the layer's activation, which it must have."""
    return _require_activation(quant_config_of(quant_config), moe_config)


def _require_activation(config: FusedMoEQuantConfig, moe_config: Any) -> FusedMoEQuantConfig:
    config = with_constants(config, moe_config)
    if moe_config is not None:
        activation_of(moe_config.activation, config)
    return config


def _padded(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
