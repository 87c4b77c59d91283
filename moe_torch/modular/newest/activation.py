"""The newest generation's activations, their constants, and the function that applies them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.activations import UNGATED_SUFFIX, activation_of
from moe_core.modular.quant_config import CONSTANTS, FusedMoEQuantConfig
from moe_core.specs.matmul import Activation
from moe_torch.modular.into import write_into
from moe_torch.operators.stages import ACTIVATION


class MoEActivation(enum.Enum):
    """Names of activations, ungated ones with `_NO_MUL`."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SITU = "situ"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    @property
    def is_gated(self) -> bool:
        return not self.value.endswith(UNGATED_SUFFIX)

    def without_mul(self) -> MoEActivation:
        """The ungated activation, or the same one if there is none."""
        ungated = self.value + UNGATED_SUFFIX
        return MoEActivation(ungated) if ungated in _VALUES else self

    @classmethod
    def from_str(cls, s: str) -> MoEActivation:
        """Raises InvalidInput for other names."""
        name = {"gelu_pytorch_tanh": "gelu_tanh"}.get(s, s)
        if name not in _VALUES:
            raise InvalidInput(f"activation must be one of {', '.join(_VALUES)}, got {s!r}; name one of these")
        return cls(name)


_VALUES = tuple(member.value for member in MoEActivation)


def activation_without_mul(activation: str) -> str:
    return MoEActivation.from_str(activation).without_mul().value


@dataclass(frozen=True)
class ApplyMoEActivationConfig:
    """Constants of `apply_moe_activation`: of SITU the last two."""

    clamp_limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None

    @classmethod
    def from_configs(cls, moe_config: Any, quant_config: Any) -> ApplyMoEActivationConfig:
        """Constants of quant_config precede those of moe_config."""
        pairs = (("gemm1_clamp_limit", "swiglu_limit"), ("gemm1_alpha", "swiglu_alpha"), ("gemm1_beta", "swiglu_beta"))
        found = (getattr(quant_config, ours, None) for ours, _ in pairs)
        limit, alpha, beta = (
            getattr(moe_config, theirs, None) if value is None else value
            for value, (_, theirs) in zip(found, pairs, strict=True)
        )
        situ = (getattr(moe_config, f"activation_situ_{name}", None) for name in ("beta", "linear_beta"))
        return cls(limit, 1.0 if alpha is None else alpha, 0.0 if beta is None else beta, *situ)


def apply_moe_activation_supported(activation: MoEActivation) -> bool:
    """False for a gated RELU2, as published."""
    return activation is not MoEActivation.RELU2


def apply_moe_activation_masked_supported(activation: Any) -> bool:
    """False: `apply_moe_activation` computes every row."""
    return False


def apply_moe_activation(
    activation: MoEActivation,
    output: torch.Tensor,
    input: torch.Tensor,
    *,
    activation_config: ApplyMoEActivationConfig | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    valid_token_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the activation of input `[R, N]` to output `[R, F]`, which is returned, in fp32 with one cast.

    SWIGLUOAI and SWIGLUSTEP have their own constants. Raises Unsupported for topk_ids, expert_map and
    valid_token_counts, as all rows are computed.
    """
    rows = {"topk_ids": topk_ids, "expert_map": expert_map, "valid_token_counts": valid_token_counts}
    for name, value in rows.items():
        if value is not None:
            raise Unsupported(f"{name} must be None, as every row is computed, got a tensor; leave it out")
    chosen = _chosen(activation, activation_config or ApplyMoEActivationConfig())
    dtype = str(output.dtype).removeprefix("torch.")
    write_into(ACTIVATION, {"y": output}, ACTIVATION.arguments(x=input, up=None, activation=chosen, out_dtype=dtype))
    return output


def _chosen(activation: MoEActivation, config: ApplyMoEActivationConfig) -> Activation:
    if activation in (MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUSTEP):
        return activation_of(activation)
    alpha, beta = None if config.alpha == 1 else config.alpha, None if config.beta == 0 else config.beta
    constants = (alpha, beta, config.clamp_limit)
    if activation is MoEActivation.SITU:
        constants = (config.activation_situ_beta, config.activation_situ_linear_beta, None)
    return activation_of(activation, FusedMoEQuantConfig(**dict(zip(CONSTANTS, constants, strict=True))))
