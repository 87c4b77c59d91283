"""The interface of experts."""

from __future__ import annotations

import abc
import copy
import dataclasses
import types
from typing import Any, TypeVar

import torch

from moe_core.base.arrays import WEIGHT_LAYOUTS
from moe_core.base.checks import require_choice, require_kind
from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular import quant_config as core_config
from moe_core.modular import weights as core
from moe_core.modular.types import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEParallelConfig,
    ProblemSize,
    QuantKey,
    moe_problem_size,
    quant_key,
)
from moe_core.specs.matmul import Activation
from moe_core.specs.operands import ExpertWeights
from moe_core.specs.tuning import Tuning
from moe_torch.bridge.arrays import target_of_device
from moe_torch.modular.into import write_into
from moe_torch.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce
from moe_torch.operators.stages import ACTIVATION

Self = TypeVar("Self", bound="FusedMoEPermuteExpertsUnpermute")
_ACTIVATION_ELEMENTS = ("e4m3", "e2m1", "int8")
_OVERRIDES = ("activation", "moe_sum", "weights")
_NO_MOE_CONFIG = types.SimpleNamespace(moe_parallel_config=None)
#: (workspace13, workspace2, output)
WorkspaceShapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _is_ours(method: Any) -> bool:
    return method is None or getattr(method, "__module__", "").startswith(__name__.rpartition(".")[0])


class FusedMoEPermuteExpertsUnpermute(abc.ABC):
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
            if not _is_ours(getattr(cls, name, None)):
                cls._require_called(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OVERRIDES and not _is_ours(value):
            self._require_called(name)
        super().__setattr__(name, value)

    @classmethod
    def _require_called(cls, name: str) -> None:
        """Refuse an override that `apply` would never call."""
        running = (cls.apply, getattr(cls, "run", None))
        if any(getattr(method, "__isabstractmethod__", False) for method in running):
            return
        if name not in cls.calls and all(map(_is_ours, running)):
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
        if len(configs) == 1:
            configs = (moe_config, *configs)
        named = (moe_config, quant_config, max_num_tokens, num_dispatchers)
        if len(configs) > len(named) or any(value is not None for value in named[1 : len(configs)]):
            raise InvalidInput(
                f"configs must be quant_config, or moe_config, quant_config, max_num_tokens and num_dispatchers, each "
                f"once, got {len(configs)} by place and some of them by name; name them all"
            )
        settings: tuple[Any, ...] = (*configs, *named[len(configs) :])
        config: FusedMoEQuantConfig = FUSED_MOE_UNQUANTIZED_CONFIG if settings[1] is None else settings[1]
        require_kind("quant_config", config, core_config.FusedMoEQuantConfig)
        config = FusedMoEQuantConfig.of(config)
        reason = core.why_unsupported(config)
        if reason is not None:
            raise Unsupported(reason)
        self.weight_layout = self.default_weight_layout if weight_layout is None else weight_layout
        require_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        require_kind("tuning", tuning, Tuning, optional=True)
        self.quant_config, self.tuning = config, tuning
        self.moe_config = _NO_MOE_CONFIG if settings[0] is None else settings[0]
        self.max_num_tokens, self.num_dispatchers = settings[2:]

    @property
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        """Formats of the input and output of `apply`. A subclass defines this or `activation_format`."""
        base = FusedMoEPermuteExpertsUnpermute
        if type(self).activation_format is base.activation_format:
            raise InvalidInput(
                f"{type(self).__name__} must say what tokens it takes, got neither activation_format nor "
                "activation_formats; define one, FusedMoEActivationFormat.Standard for example"
            )
        tensor_format = self.activation_format()
        return tensor_format, tensor_format

    def activation_format(self) -> FusedMoEActivationFormat:
        """Format of the input. Subclasses may define the newest generation's static method."""
        return self.activation_formats[0]

    def supports_chunking(self) -> bool:
        """`apply` may run on a part of the tokens."""
        return False

    def supports_expert_map(self) -> bool:
        return True

    # Questions of other systems' kernels.

    @staticmethod
    def is_monolithic() -> bool:
        return False

    @staticmethod
    def supports_lora() -> bool:
        """False: override methods to inject adapters."""
        return False

    @staticmethod
    def _supports_routing_method(routing_method: Any, weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_router_logits_dtype(router_logits_dtype: Any, routing_method: Any) -> bool:
        return True

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return True

    @staticmethod
    def _supports_batch_invariance() -> bool:
        """False by default: it is an option of `tuning`."""
        return False

    @property
    def expects_unquantized_inputs(self) -> bool:
        """`prepare` must not quantise."""
        return self.quant_config.quantizes_activations

    def output_hidden_dim(self, hidden_dim: int) -> int:
        return hidden_dim

    @abc.abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """The weighting and reduction that remain to be done after `apply`."""

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

    def activation(self, activation: str | Activation, output: torch.Tensor, input: torch.Tensor) -> None:
        """Write the activation of input `[R, N]` to output `[R, F]`, in fp32 with one cast.

        Classes without `activation` in `calls` fuse it into the first product and refuse a subclass that overrides it.
        """
        chosen = core.activation_of(activation)
        dtype = str(output.dtype).removeprefix("torch.")
        arguments = ACTIVATION.arguments(x=input, up=None, activation=chosen, out_dtype=dtype)
        write_into(ACTIVATION, {"y": output}, arguments)

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> ProblemSize:
        """Return (E, M, N, K, topk), read from axes that no format packs."""
        return moe_problem_size(a1.shape, w1.shape, w2.shape, topk_ids.shape, self.weight_layout)

    def adjust_N_for_activation(self, N: int, activation: str | Activation) -> int:  # noqa: N802
        return core.width_after(N, activation)

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

    def adding_as(self: Self, num_tokens: int, num_experts: int) -> Self:
        """A shallow copy with the summation order of a batch of this size."""
        tuning = Tuning() if self.tuning is None else self.tuning
        changed = copy.copy(self)
        changed.tuning = dataclasses.replace(tuning, expected_tokens=max(1, num_tokens), expected_experts=num_experts)
        return changed

    @staticmethod
    def _supports_current_device() -> bool:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        try:
            target_of_device(device)
        except (InvalidInput, Unsupported):
            return False
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        """None: not quantised. Activations run only with quantised weights."""
        if activation_key is None:
            return True
        return weight_key is not None and activation_key.symmetric and activation_key.dtype in _ACTIVATION_ELEMENTS

    @staticmethod
    def _supports_activation(activation: str | Activation) -> bool:
        try:
            core.activation_of(activation)
        except InvalidInput:
            return False
        return True

    @staticmethod
    def _supports_parallel_config(parallel_config: FusedMoEParallelConfig) -> bool:
        """True: experts only see narrower or fewer weights."""
        return True

    @classmethod
    def supports(
        cls,
        config: FusedMoEQuantConfig,
        device: torch.device,
        *,
        activation: str | Activation | None = None,
        parallel_config: FusedMoEParallelConfig | None = None,
    ) -> str | None:
        """Return the reason why this class cannot run a configuration on a device, or None. activation,
        parallel_config: None: not checked."""
        try:
            require_kind("config", config, core_config.FusedMoEQuantConfig)
            target_of_device(torch.device(device))
            reason = core.why_unsupported(config)
            weights, activations = core.weight_quantization(config), core.activation_quantization(config)
        except (InvalidInput, Unsupported, RuntimeError) as error:  # torch has a RuntimeError for unknown devices
            return str(error)
        if reason is not None:
            return reason
        keys = (
            None if weights is None else quant_key(weights, static=True),
            None if activations is None else quant_key(activations, static=config.a1_scale is not None),
        )
        if not cls._supports_quant_scheme(*keys):
            return f"{cls.__name__} does not run weights and activations of {keys}"
        if activation is not None and not cls._supports_activation(activation):
            return f"{cls.__name__} has no activation {activation!r}"
        if parallel_config is not None and not cls._supports_parallel_config(parallel_config):
            return f"{cls.__name__} does not run under {parallel_config}"
        return None


def _of_quant_config(name: str) -> property:
    return property(lambda self: getattr(self.quant_config, name), doc=f"{name} of quant_config.")


for _name in (
    "quant_dtype",
    "block_shape",
    "per_act_token_quant",
    "w1_bias",
    "w2_bias",
    *core_config.QUANTIZATION_ARRAYS,
):
    setattr(FusedMoEPermuteExpertsUnpermute, _name, _of_quant_config(_name))
