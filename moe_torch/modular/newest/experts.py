"""The base of all experts: their configurations and what a kernel asks of them."""

from __future__ import annotations

import enum
import types
from typing import Any

import torch

from moe_core.base.checks import require_kind
from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular import quant_config as core_config
from moe_core.modular import weights as core
from moe_core.modular.activations import activation_of, width_after
from moe_core.modular.schemes import QuantKey, has_scheme, keys_of
from moe_core.modular.types import FusedMoEActivationFormat, FusedMoEParallelConfig
from moe_core.specs.matmul import Activation
from moe_torch.bridge.arrays import target_of_device
from moe_torch.modular.newest.hooks import Hooks
from moe_torch.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig, with_constants

_NO_MOE_CONFIG = types.SimpleNamespace(moe_parallel_config=None)


class FusedMoEExperts(Hooks):
    """The base of experts that take routed tokens and of those that route by themselves.

    configs: see `FusedMoEPermuteExpertsUnpermute`. Raises Unsupported if `why_unsupported` gives a reason.
    """

    #: As all of OF_QUANT_CONFIG.
    a2_scale: Any

    def __init__(
        self,
        *configs: Any,
        quant_config: FusedMoEQuantConfig | None = None,
        moe_config: Any = None,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        named = (moe_config, quant_config, max_num_tokens, num_dispatchers)
        first = 1 if len(configs) == 1 else 0
        last = first + len(configs)
        if last > len(named) or any(value is not None for value in named[first:last]):
            raise InvalidInput(
                f"configs must be quant_config, or moe_config, quant_config, max_num_tokens and num_dispatchers, each "
                f"once, got {len(configs)} by place and some of them by name; name them all"
            )
        settings: tuple[Any, ...] = (*named[:first], *configs, *named[last:])
        config: FusedMoEQuantConfig = FUSED_MOE_UNQUANTIZED_CONFIG if settings[1] is None else settings[1]
        require_kind("quant_config", config, core_config.FusedMoEQuantConfig)
        config = with_constants(FusedMoEQuantConfig.of(config), settings[0])
        reason = core.why_unsupported(config)
        if reason is not None:
            raise Unsupported(reason)
        self.quant_config = config
        self.moe_config = _NO_MOE_CONFIG if settings[0] is None else settings[0]
        self.max_num_tokens, self.num_dispatchers = settings[2:]

    @property
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        """Formats of the input and output of `apply`. A subclass defines this or `activation_format`."""
        base = FusedMoEExperts
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
        return False

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
        """True for the keys of a configuration, also with another library's dtypes. None: not quantised."""
        return has_scheme(weight_key, activation_key)

    @staticmethod
    def _supports_activation(activation: str | enum.Enum | Activation) -> bool:
        """True for known names, whatever constants they need."""
        try:
            width_after(2, activation)
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
        """The reason why this class cannot run a configuration on a device, or None. None is not checked."""
        try:
            require_kind("config", config, core_config.FusedMoEQuantConfig)
            target_of_device(torch.device(device))
            reason = core.why_unsupported(config)
            keys = keys_of(config, static=config.a1_scale is not None)
            if activation is not None:
                activation_of(activation, config)
        except (InvalidInput, Unsupported, RuntimeError) as error:  # torch has a RuntimeError for unknown devices
            return str(error)
        if reason is not None:
            return reason
        if not cls._supports_quant_scheme(*keys):
            return f"{cls.__name__} does not run weights and activations of {keys}"
        if activation is not None and not cls._supports_activation(activation):
            return f"{cls.__name__} has no activation {activation!r}"
        if parallel_config is not None and not cls._supports_parallel_config(parallel_config):
            return f"{cls.__name__} does not run under {parallel_config}"
        return None


class _OfQuantConfig:
    """A field of quant_config. A class with its own `apply` may set its own value, as older generations do."""

    def __init__(self, name: str) -> None:
        self.name, self.__doc__ = name, f"{name} of quant_config."

    def __get__(self, experts: Any, owner: type) -> Any:
        if experts is None:
            return self
        own = experts.__dict__
        return own[self.name] if self.name in own else getattr(experts.quant_config, self.name)

    def __set__(self, experts: Any, value: Any) -> None:
        experts.__dict__[self.name] = value


OF_QUANT_CONFIG = (
    *("quant_dtype", "weight_quant_dtype", "block_shape", "per_act_token_quant", "per_out_ch_quant", "a1_gscale"),
    *("a2_gscale", "g1_alphas", "g2_alphas", "w1_bias", "w2_bias", *core_config.QUANTIZATION_ARRAYS),
)
for _name in OF_QUANT_CONFIG:
    setattr(FusedMoEExperts, _name, _OfQuantConfig(_name))
