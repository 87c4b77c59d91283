"""The interface of experts."""

from __future__ import annotations

import abc
import copy
import dataclasses
import enum
from typing import Any, TypeVar

import torch

from moe_core.base.arrays import WEIGHT_LAYOUTS
from moe_core.base.checks import require_choice, require_kind
from moe_core.errors import Unsupported
from moe_core.modular import quant_config as core_config
from moe_core.modular import weights as core
from moe_core.modular.activations import activation_of, width_after
from moe_core.modular.types import ProblemSize, moe_problem_size
from moe_core.specs.matmul import Activation
from moe_core.specs.operands import ExpertWeights
from moe_core.specs.tuning import Tuning
from moe_torch.modular.generations.tokens import ExpertTokensMetadata
from moe_torch.modular.into import write_into
from moe_torch.modular.newest.experts import OF_QUANT_CONFIG, FusedMoEExperts
from moe_torch.modular.newest.hooks import is_ours
from moe_torch.modular.quant_config import FusedMoEQuantConfig
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceDelegate
from moe_torch.operators.stages import ACTIVATION

Self = TypeVar("Self", bound="FusedMoEPermuteExpertsUnpermute")
_OVERRIDES = ("activation", "moe_sum", "weights", "post_gemm2_hook", "_lora_context", *OF_QUANT_CONFIG)
#: (workspace13, workspace2, output)
WorkspaceShapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class FusedMoEPermuteExpertsUnpermute(FusedMoEExperts, abc.ABC):
    """Experts that `FusedMoEModularKernel` runs between `prepare` and `finalize`.

    Letters: M tokens, E local experts, K hidden, N columns of the first product (2F if gated), F after the activation.
    quant_config: scheme, scales, zero points and biases of the weights. weight_layout: `out_in` (w1 `[E, N, K]`, w2
    `[E, K, F]`) or `in_out` (last axes swapped). None: the class's default. configs: quant_config, or the newest
    generation's moe_config, quant_config, max_num_tokens and num_dispatchers. Raises Unsupported if `why_unsupported`
    gives a reason.
    """

    default_weight_layout = "out_in"
    #: Methods of `_OVERRIDES` that our `apply` calls.
    calls: tuple[str, ...] = ("weights",)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _OVERRIDES:
            if not is_ours(getattr(cls, name, None)):
                cls._require_called(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OVERRIDES and not is_ours(value):
            self._require_called(name)
        super().__setattr__(name, value)

    @classmethod
    def _require_called(cls, name: str) -> None:
        """Refuse an override that `apply` would never call."""
        running = (cls.apply, getattr(cls, "run", None))
        if any(getattr(method, "__isabstractmethod__", False) for method in running):
            return
        called = name in cls.calls or (name == "_lora_context" and cls.supports_lora())
        if not called and all(map(is_ours, running)):
            raise Unsupported(
                f"{cls.__name__} must not override {name} alone: the apply it inherits never calls it, as it does that "
                "step inside another; derive from UnfusedOAITritonExperts, or override apply too"
            )

    def __init__(
        self,
        *configs: Any,
        quant_config: FusedMoEQuantConfig | None = None,
        moe_config: Any = None,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
        weight_layout: str | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        super().__init__(
            *configs,
            quant_config=quant_config,
            moe_config=moe_config,
            max_num_tokens=max_num_tokens,
            num_dispatchers=num_dispatchers,
        )
        self.weight_layout = self.default_weight_layout if weight_layout is None else weight_layout
        require_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        require_kind("tuning", tuning, Tuning, optional=True)
        self.tuning = tuning

    def supports_chunking(self) -> bool:
        """`apply` may run on a part of the tokens."""
        return False

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """The weighting and reduction that remain to be done after `apply`. Classes with topk_weights in `apply` must
        say it. The first generation leaves both to `finalize`."""
        return TopKWeightAndReduceDelegate()

    @abc.abstractmethod
    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: str | Activation,
    ) -> WorkspaceShapes:
        """Return (workspace13, workspace2, output). 13 serves both products, 2 the activation."""

    def workspace_dtype(self, activation_dtype: torch.dtype) -> torch.dtype:
        return activation_dtype

    @abc.abstractmethod
    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str | Activation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write output from hidden_states as `prepare` returned them.

        topk_weights fp32 and topk_ids int32 `[M, topk]`, -1 = no expert. `workspace_shapes` gives the shapes of
        workspaces and output. apply_router_weight_on_input: hidden_states are weighted already.
        """

    def activation(
        self,
        activation: str | Activation,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        topk_ids: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
        valid_token_counts: torch.Tensor | None = None,
    ) -> None:
        """Write the activation of input `[R, N]` to output `[R, F]`, in fp32 with one cast.

        topk_ids, expert_map, valid_token_counts: published to leave out rows of no expert. All rows are written.
        Classes without `activation` in `calls` fuse it into the first product and refuse a subclass that overrides it.
        """
        chosen = self.activation_of(activation)
        dtype = str(output.dtype).removeprefix("torch.")
        arguments = ACTIVATION.arguments(x=input, up=None, activation=chosen, out_dtype=dtype)
        write_into(ACTIVATION, {"y": output}, arguments)

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> ProblemSize:
        """Return (E, M, N, K, topk), read from axes that no format packs."""
        return moe_problem_size(a1.shape, w1.shape, w2.shape, topk_ids.shape, self.weight_layout)

    def adjust_N_for_activation(self, N: int, activation: str | Activation) -> int:  # noqa: N802
        return width_after(N, activation)

    def activation_of(self, activation: str | enum.Enum | Activation) -> Activation:
        """With the constants of quant_config."""
        return activation_of(activation, self.quant_config)

    def weights(self, w1: torch.Tensor, w2: torch.Tensor) -> ExpertWeights:
        """Join w1 and w2 with the scales, zero points and biases of the configuration."""
        return core.expert_weights(w1, w2, self.quant_config, self.weight_layout)

    def with_quant_config(self: Self, quant_config: core_config.FusedMoEQuantConfig) -> Self:
        if quant_config is self.quant_config:
            return self
        reason = core.why_unsupported(quant_config)
        if reason is not None:
            raise Unsupported(reason)
        changed = copy.copy(self)
        changed.quant_config = FusedMoEQuantConfig.of(quant_config)
        return changed

    def as_stored(self, w1: Any, w2: Any) -> tuple[FusedMoEPermuteExpertsUnpermute, Any, Any]:
        """For the rest of the call. Ported classes keep their weights."""
        return self, w1, w2

    def chunked_as_whole(
        self: Self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, size: ProblemSize, activation: str | Activation
    ) -> Self:
        """Experts that add up every chunk of x `[M, K]` in the order of the whole."""
        return self

    def with_common_scales(
        self: Self,
        x: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        options: tuple[Any, ...],
        chunk_size: int,
    ) -> Self:
        """Experts that quantise chunks of x `[M, K]` with the scales of the whole. options: of `apply`."""
        return self

    def adding_as(self: Self, num_tokens: int, num_experts: int) -> Self:
        """A shallow copy with the summation order of a batch of this size."""
        tuning = Tuning() if self.tuning is None else self.tuning
        changed = copy.copy(self)
        changed.tuning = dataclasses.replace(tuning, expected_tokens=max(1, num_tokens), expected_experts=num_experts)
        return changed
