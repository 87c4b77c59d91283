"""Activations of modular experts, by name and with the constants of their configuration."""

from __future__ import annotations

import enum
from typing import Any

from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.quant_config import CONSTANTS, FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from moe_core.specs.matmul import Activation

UNGATED_SUFFIX = "_no_mul"
#: Gate first, but interleaved for gpt-oss.
_NAMES = {name: Activation(name) for name in ("silu", "gelu", "gelu_tanh", "relu2")}
_NAMES |= {
    "gelu_pytorch_tanh": Activation("gelu_tanh"),
    "swiglu_oai": Activation("swiglu_oai", gate_layout="interleaved"),
    "swigluoai": Activation("swiglu_oai", gate_layout="interleaved"),
    "swigluoai_uninterleave": Activation("swiglu_oai"),
    "swiglustep": Activation("clamped_silu"),
    "situ": Activation("softcapped_silu"),
}
_NAMES |= {name + UNGATED_SUFFIX: Activation(name, gated=False) for name in ("silu", "gelu", "gelu_tanh", "relu2")}


def activation_of(
    activation: str | enum.Enum | Activation, quant_config: FusedMoEQuantConfig = FUSED_MOE_UNQUANTIZED_CONFIG
) -> Activation:
    """The activation of the family with this name or enumeration value. An `Activation` is returned as it is.

    Gated names read a buffer of twice their width, gate columns first: `silu`, `gelu`, `gelu_tanh`, `relu2`,
    `swiglustep`, `situ`, `swigluoai_uninterleave`. `swiglu_oai` (or `swigluoai`) has gate and up interleaved. Names
    with `_no_mul` are not gated. Pass an `Activation` for other options (not `separate`).

    quant_config: its gemm1_alpha, gemm1_beta and gemm1_clamp_limit, with the meanings of vLLM 0.33:

    - silu: the limit, or none
    - swiglu_oai: alpha 1.702 and limit 7 by default, beta 1
    - swigluoai_uninterleave: `g * sigmoid(alpha * g) * (u + beta)` with a limit, alpha 1 and beta 0 by default
    - situ: `alpha * tanh(gate / alpha) * sigmoid(gate)` times up, or times `beta * tanh(up / beta)`
    - swiglustep: the limit 7

    Raises InvalidInput for other names, and constants that a name lacks or has no use for. Raises Unsupported for
    `swigluoai_uninterleave` with other pairs than beta 1, or beta 0 and alpha 1.
    """
    if isinstance(activation, Activation):
        if activation.gate_layout == "separate":
            raise InvalidInput(
                "activation must have its gate and up columns in one buffer, as w1 has, got gate_layout='separate'; "
                "choose halves or interleaved"
            )
        _refuse(quant_config, "an Activation, which states its constants")
        return activation
    # Ported code may have the names in an enumeration.
    name: Any = activation.value if isinstance(activation, enum.Enum) else activation
    known = _NAMES.get(name) if isinstance(name, str) else None
    if known is None:
        raise InvalidInput(
            f"activation must be one of {', '.join(_NAMES)} or an Activation, got {activation!r}; name one of these"
        )
    constants = alpha, beta, limit = quant_config.constants
    if name not in ("swigluoai_uninterleave", "situ") and constants == (None, None, None):
        return known
    if name == "silu":
        _refuse(quant_config, name, gemm1_alpha=1.0, gemm1_beta=0.0, gemm1_clamp_limit=limit)
        return Activation(name, limit=limit)
    if known.name == "swiglu_oai" and known.gate_layout == "interleaved":
        _refuse(quant_config, name, gemm1_alpha=alpha, gemm1_beta=1.0, gemm1_clamp_limit=limit)
        return _oai("interleaved", 1.702 if alpha is None else alpha, 7.0 if limit is None else limit)
    if name == "swigluoai_uninterleave":
        return _uninterleaved(1.0 if alpha is None else alpha, 0.0 if beta is None else beta, limit)
    if name == "situ":
        if alpha is None:
            raise InvalidInput("gemm1_alpha must be given for situ, the cap of its gate, got None; pass it")
        _refuse(quant_config, name, gemm1_alpha=alpha, gemm1_beta=beta)
        return Activation("softcapped_silu", alpha=alpha, limit=beta)
    _refuse(quant_config, name, gemm1_clamp_limit=7.0 if name == "swiglustep" else None)
    return known


def _oai(gate_layout: str, alpha: float, limit: float) -> Activation:
    return Activation("swiglu_oai", gate_layout=gate_layout, alpha=alpha, limit=limit)


def _uninterleaved(alpha: float, beta: float, limit: float | None) -> Activation:
    if limit is None:
        raise InvalidInput("gemm1_clamp_limit must be given for swigluoai_uninterleave, got None; pass it")
    if beta == 1:
        return _oai("halves", alpha, limit)
    if (alpha, beta) == (1, 0):
        return Activation("silu", limit=limit)
    raise Unsupported(
        f"swigluoai_uninterleave has kernels for gemm1_beta 1, and for gemm1_beta 0 with gemm1_alpha 1, got {beta} "
        f"with {alpha}; pass one of these pairs"
    )


def _refuse(quant_config: FusedMoEQuantConfig, what: str, **allowed: float | None) -> None:
    for name, value in zip(CONSTANTS, quant_config.constants, strict=True):
        wanted = allowed.get(name)
        if value not in (None, wanted):
            raise InvalidInput(f"{name} must be {wanted} or left out for {what}, got {value}; leave it out")


def width_after(width: int, activation: str | enum.Enum | Activation) -> int:
    """Half the columns if it is gated."""
    name = activation.value if isinstance(activation, enum.Enum) else activation
    known = _NAMES.get(name) if isinstance(name, str) else None
    return width // 2 if (activation_of(activation) if known is None else known).gated else width
