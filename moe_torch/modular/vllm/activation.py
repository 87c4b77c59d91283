"""vLLM's activations and their constants, as ours."""

from __future__ import annotations

from typing import Any

from moe_core.errors import Unsupported
from moe_core.modular.activations import activation_of
from moe_core.specs.matmul import Activation

#: With a limit, alpha and beta.
_OAI = ("swigluoai", "swigluoai_uninterleave")
NAMES = (
    *("silu", "gelu", "gelu_tanh", "relu2", *_OAI),
    *("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"),
)


def name_of(activation: Any) -> Any:
    return getattr(activation, "value", activation)


def constants_of(moe_config: Any, quant_config: Any) -> tuple[float | None, float | None, float | None]:
    """Limit, alpha and beta. The quantisation's precede the layer's."""
    pairs = (("clamp_limit", "limit"), ("alpha", "alpha"), ("beta", "beta"))
    found = (
        (getattr(quant_config, f"gemm1_{ours}", None), getattr(moe_config, f"swiglu_{theirs}", None))
        for ours, theirs in pairs
    )
    limit, alpha, beta = (layer if first is None else first for first, layer in found)
    return limit, alpha, beta


def with_constants(activation: Any, constants: tuple[float | None, float | None, float | None]) -> Any:
    """The activation that vLLM computes with these constants, or the same object if they change nothing.

    `swigluoai` and `swigluoai_uninterleave`: `g * sigmoid(alpha * g) * (u + beta)`, g and u clamped. `silu`: alpha 1
    and beta 0. Raises Unsupported for other names, and for constants that the activation does not have.
    """
    name, (limit, alpha, beta) = name_of(activation), constants
    if name not in NAMES:
        raise Unsupported(f"activation must be one of {', '.join(NAMES)}, got {name!r}; let vLLM's experts run it")
    if name == "swigluoai":
        defaults, layout = (7.0, 1.702, 1.0), "interleaved"
    else:
        defaults, layout = (None, 1.0, 0.0), "halves"
    limit, alpha, beta = (
        default if value is None else value for value, default in zip((limit, alpha, beta), defaults, strict=True)
    )
    if name == "swigluoai_uninterleave" and limit is None:
        raise Unsupported(f"swiglu_limit must be set for {name}, got None; pass it in vLLM's FusedMoEConfig")
    if name in _OAI and beta == 1.0:
        chosen = Activation("swiglu_oai", gate_layout=layout, alpha=alpha, limit=limit)
    elif name in ("silu", "swigluoai_uninterleave") and (alpha, beta) == (1.0, 0.0):
        chosen = Activation("silu", limit=limit)
    elif (limit, alpha, beta) != defaults:
        raise Unsupported(
            f"{name} must have no limit, alpha and beta but those it has (alpha 1 and beta 0, or beta 1 for swigluoai),"
            f" got limit {limit}, alpha {alpha} and beta {beta}; let vLLM's experts run it"
        )
    else:
        return activation
    return activation if name != "swigluoai_uninterleave" and chosen == activation_of(name) else chosen
