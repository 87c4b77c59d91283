"""Experts that take the router's logits, and the kernel of the newest generation that runs them and all others."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from moe_core.base.checks import require_flag
from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.matmul import Activation
from moe_torch.bridge.options import require_instance
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute
from moe_torch.modular.generations.tokens import ExpertTokensMetadata
from moe_torch.modular.kernel import FusedMoEModularKernel
from moe_torch.modular.newest.experts import FusedMoEExperts
from moe_torch.modular.prepare_finalize import FusedMoEPrepareAndFinalize
from moe_torch.modular.quant_config import FusedMoEQuantConfig

#: a1q, its scale, counts by expert, and the ids and weights of the tokens in a1q (None: the caller's).
PrepareResultType = tuple[
    torch.Tensor, torch.Tensor | None, ExpertTokensMetadata | None, torch.Tensor | None, torch.Tensor | None
]
#: a1q, its scale, and the router's logits of the tokens in a1q.
PrepareMonolithicResultType = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
#: Returned by `prepare_async`.
ReceiverType = Callable[[], PrepareResultType]


class FusedMoEPrepareAndFinalizeMonolithic(FusedMoEPrepareAndFinalize):
    """The steps around experts that route by themselves."""

    @abc.abstractmethod
    def prepare(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a1: torch.Tensor,
        router_logits: torch.Tensor,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareMonolithicResultType:
        """Quantise a1 `[M, K]` unless defer_input_quant, and dispatch it with router_logits `[M, E_global]`."""

    @abc.abstractmethod
    def finalize(self, fused_expert_output: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the output `[M, K]` of the caller's tokens."""


class FusedMoEExpertsMonolithic(FusedMoEExperts, abc.ABC):
    """Experts that choose the experts of each token from the router's logits. `FusedMoEKernel` runs them."""

    @staticmethod
    def is_monolithic() -> bool:
        return True

    def supports_routing_replay_capture(self) -> bool:
        """True if `apply` writes the chosen ids to routing_replay_out."""
        return False

    @abc.abstractmethod
    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router_logits: torch.Tensor,
        activation: str | Activation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        num_expert_group: int | None = None,
        e_score_correction_bias: torch.Tensor | None = None,
        routed_scaling_factor: float | None = None,
        topk_group: int | None = None,
        routing_replay_out: torch.Tensor | None = None,
    ) -> Any:
        """Return the output `[M, K]`, or an unfinalised output."""


class FusedMoEKernelModularImpl:
    """`FusedMoEModularKernel` with the newest generation's arguments."""

    def __init__(
        self, prepare_finalize: FusedMoEPrepareAndFinalize, fused_experts: FusedMoEPermuteExpertsUnpermute
    ) -> None:
        self.kernel = FusedMoEModularKernel(prepare_finalize, fused_experts)
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        activation: str | Activation = "silu",
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> Any:
        """See `FusedMoEModularKernel.forward`."""
        for name, value in {"shared_experts": shared_experts, "shared_experts_input": shared_experts_input}.items():
            if value is not None:
                raise Unsupported(
                    f"{name} must be None, as no order of shared experts is known here, got {type(value).__name__}; "
                    "pass a function of hidden_states to FusedMoEModularKernel(shared_experts=...)"
                )
        return self.kernel(
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )


class FusedMoEKernelMonolithicImpl:
    """prepare -> experts -> finalize, on the router's logits."""

    def __init__(
        self, prepare_finalize: FusedMoEPrepareAndFinalizeMonolithic, fused_experts: FusedMoEExpertsMonolithic
    ) -> None:
        require_instance("prepare_finalize", prepare_finalize, FusedMoEPrepareAndFinalizeMonolithic)
        require_instance("fused_experts", fused_experts, FusedMoEExpertsMonolithic)
        ours, theirs = prepare_finalize.activation_format, fused_experts.activation_formats[0]
        if ours != theirs:
            raise InvalidInput(
                f"prepare_finalize and fused_experts must have one activation format, got {ours and ours.name} "
                f"and {theirs.name}; choose two that fit"
            )
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts
        parameters = inspect.signature(fused_experts.apply).parameters
        every = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
        self._taken = None if every else frozenset(parameters)

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router_logits: torch.Tensor,
        activation: str | Activation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        num_expert_group: int | None = None,
        e_score_correction_bias: torch.Tensor | None = None,
        routed_scaling_factor: float | None = None,
        topk_group: int | None = None,
        *,
        routing_sink: Any = None,
        input_ids: torch.Tensor | None = None,
        hash_indices_table: torch.Tensor | None = None,
    ) -> Any:
        """Return the output `[M, K]`. routing_sink: the rows of its `buffer` get the chosen ids, and then go to its
        `capture_fn`. input_ids is read with hash_indices_table only. Raises InvalidInput for options that the experts
        do not take.
        """
        require_flag("apply_router_weight_on_input", apply_router_weight_on_input)
        experts, part = self.fused_experts, self.prepare_finalize
        if routing_sink is not None and not experts.supports_routing_replay_capture():
            raise InvalidInput(
                f"routing_sink must be None for {type(experts).__name__}, which does not capture ids, got "
                f"{type(routing_sink).__name__}; leave it out"
            )
        prepared: Any = part.prepare(
            hidden_states,
            router_logits=router_logits,
            quant_config=experts.quant_config,
            defer_input_quant=experts.expects_unquantized_inputs,
        )
        if not isinstance(prepared, tuple | list) or len(prepared) != 3:
            raise InvalidInput(
                f"prepare of {type(part).__name__} must return tokens, their scale and router_logits, got "
                f"{type(prepared).__name__}; return a tuple of 3"
            )
        a1q, a1q_scale, router_logits = prepared
        captured = None if routing_sink is None else routing_sink.buffer[: a1q.shape[0]]
        options = {
            "a1q_scale": a1q_scale,
            "num_expert_group": num_expert_group,
            "e_score_correction_bias": e_score_correction_bias,
            "routed_scaling_factor": routed_scaling_factor,
            "topk_group": topk_group,
            "routing_replay_out": captured,
        }
        if hash_indices_table is not None:
            options |= {"input_ids": input_ids, "hash_indices_table": hash_indices_table}
        result = experts.apply(
            hidden_states=a1q,
            w1=w1,
            w2=w2,
            router_logits=router_logits,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
            **self._accepted(options),
        )
        if routing_sink is not None:
            routing_sink.capture_fn(captured)
        if isinstance(result, torch.Tensor):
            return part.finalize(result)
        if not part.supports_deferred_moe_finalize():
            raise Unsupported(
                f"{type(part).__name__} must finalise {type(result).__name__}, as its supports_deferred_moe_finalize "
                "is False; let the experts return a tensor"
            )
        return result

    def _accepted(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options that `apply` names. Raises InvalidInput for others that are set."""
        if self._taken is None:
            return options
        for name, value in options.items():
            if value is not None and name not in self._taken:
                raise InvalidInput(
                    f"{name} must be None for {type(self.fused_experts).__name__}, whose apply has no such parameter, "
                    f"got {type(value).__name__}; leave it out"
                )
        return {name: value for name, value in options.items() if name in self._taken}


class FusedMoEKernel:
    """The newest generation's kernel: experts that take routed tokens (`apply`), or logits (`apply_monolithic`).

    Raises InvalidInput if one part is monolithic and the other is not.
    """

    def __init__(self, prepare_finalize: FusedMoEPrepareAndFinalize, fused_experts: FusedMoEExperts) -> None:
        kinds = (
            isinstance(prepare_finalize, FusedMoEPrepareAndFinalizeMonolithic),
            isinstance(fused_experts, FusedMoEExpertsMonolithic),
        )
        if kinds[0] != kinds[1]:
            raise InvalidInput(
                "prepare_finalize and fused_experts must both be monolithic, or both not, got "
                f"{type(prepare_finalize).__name__} and {type(fused_experts).__name__}; choose two that fit"
            )
        kind: Any = FusedMoEKernelMonolithicImpl if kinds[0] else FusedMoEKernelModularImpl
        self.impl = kind(prepare_finalize, fused_experts)
        self.is_monolithic = kinds[0]
        if self.is_monolithic:
            prepare_finalize.post_init_setup(fused_experts)

    @property
    def prepare_finalize(self) -> FusedMoEPrepareAndFinalize:
        return self.impl.prepare_finalize

    @property
    def fused_experts(self) -> FusedMoEExperts:
        return self.impl.fused_experts

    @property
    def moe_config(self) -> Any:
        return self.fused_experts.moe_config

    @property
    def can_overlap_shared_experts(self) -> bool:
        return not self.is_monolithic and self.prepare_finalize.supports_async()

    def supports_lora(self) -> bool:
        return self.fused_experts.supports_lora()

    def output_is_reduced(self) -> bool:
        return self.prepare_finalize.output_is_reduced()

    def supports_deferred_moe_finalize(self) -> bool:
        return self.prepare_finalize.supports_deferred_moe_finalize()

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str | Activation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> Any:
        """See `FusedMoEModularKernel.forward`. shared_experts and shared_experts_input raise Unsupported."""
        self._require("apply", monolithic=False)
        options = (activation, global_num_experts, expert_map, apply_router_weight_on_input)
        shared = (shared_experts, shared_experts_input)
        return self.impl.apply(hidden_states, w1, w2, topk_ids, topk_weights, *options, *shared)

    def apply_monolithic(self, *arguments: Any, **named: Any) -> Any:
        self._require("apply_monolithic", monolithic=True)
        return self.impl.apply(*arguments, **named)

    def _require(self, name: str, monolithic: bool) -> None:
        if self.is_monolithic != monolithic:
            other = "apply" if monolithic else "apply_monolithic"
            raise InvalidInput(
                f"{name} must not be called for {type(self.fused_experts).__name__}; call {other} with "
                f"{'ids and weights' if monolithic else 'router_logits'}"
            )
