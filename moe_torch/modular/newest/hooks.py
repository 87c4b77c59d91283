"""Members of the newest generation's experts that this library's leave as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from moe_core.modular.schemes import QuantKey
from moe_core.modular.types import FusedMoEActivationFormat
from moe_torch.modular.calls import require_written


def is_ours(method: Any) -> bool:
    """The method, or the object's class, is this library's."""
    return method is None or str(getattr(method, "__module__", "")).startswith("moe_torch.modular")


class Hooks:
    #: Published options that classes of other systems set.
    consumes_expert_mask = False
    post_gemm2_hook: Callable[[Any, torch.Tensor], None] | None = None

    def supports_packed_ue8m0_act_scales(self) -> bool:
        return False

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Called by the owner of a layer, not by the kernel."""

    def output_hidden_dim(self, hidden_dim: int) -> int:
        """Columns of the kernel's output."""
        return hidden_dim

    def _uses_post_gemm2_hook(self, num_tokens: int) -> bool:
        return self.post_gemm2_hook is not None and num_tokens > 0

    def _run_post_gemm2_hook(self, unfinalized: Any, output: torch.Tensor | None = None) -> torch.Tensor:
        """Let `post_gemm2_hook` weight and reduce an UnfinalizedMoEOutput into output, or a new tensor."""
        assert self.post_gemm2_hook is not None, "ask _uses_post_gemm2_hook first"
        rows, tokens = unfinalized.gemm2_permuted, unfinalized.expanded_idx_to_permuted_idx.shape[0]
        reduced: torch.Tensor = rows.new_empty((tokens, rows.shape[1])) if output is None else output
        require_written("post_gemm2_hook", self.post_gemm2_hook(unfinalized, reduced), reduced)
        return reduced

    @staticmethod
    def _supports_hash_routing() -> bool:
        return False

    @staticmethod
    def is_supported_config(
        cls: Any,  # pyright: ignore[reportSelfClsParameterName]
        moe_config: Any,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """(True, None), or (False, the reason why cls cannot run the layer), as published."""
        answers = _answers(cls, moe_config, (weight_key, activation_key), activation_format)
        reason = next((reason for reason, supported in answers if not supported), None)
        return reason is None, None if reason is None else f"kernel does not support {reason}"


def _answers(cls: Any, config: Any, keys: tuple[Any, Any], tensor_format: Any) -> Iterator[tuple[str, bool]]:
    """(what, supported), in the published order."""
    routing, dtype = config.routing_method, getattr(config, "router_logits_dtype", None)
    monolithic, hashed = cls.is_monolithic(), getattr(config, "has_hash_routing", False)
    yield "current device", cls._supports_current_device()
    yield "no act_and_mul MLP layer", config.is_act_and_mul or cls._supports_no_act_and_mul()
    yield f"{config.activation} activation", cls._supports_activation(config.activation)
    yield f"quantization scheme {keys[0]}x{keys[1]}", cls._supports_quant_scheme(*keys)
    yield f"parallel config {config.moe_parallel_config}", cls._supports_parallel_config(config.moe_parallel_config)
    yield "hash routing", not (hashed and monolithic) or cls._supports_hash_routing()
    yield "routes adjusted after routing", not (monolithic and getattr(config, "require_decomposed_backend", False))
    yield f"routing method {routing}", cls._supports_routing_method(routing, *keys)
    yield f"router logits dtype {dtype}", cls._supports_router_logits_dtype(dtype, routing)
    yield f"{config.hidden_dim} hidden dim", cls._supports_shape(config.hidden_dim)
    yield f"{tensor_format.value} activation format", cls.activation_format() == tensor_format
    yield "LoRA", not getattr(config, "is_lora_enabled", False) or cls.supports_lora()
