"""The activations that the fused-MoE family names by strings, as the core's `Activation`s."""

from __future__ import annotations

from moe_core.errors import InvalidInput
from moe_core.specs import Activation

#: Appended to the name of an activation that multiplies by nothing: `silu_no_mul`.
UNGATED_SUFFIX = "_no_mul"
#: How the family stores gate and up columns: gate first, but for gpt-oss, which interleaves them.
_NAMES = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu2": Activation("relu2"),
    "swiglu_oai": Activation("swiglu_oai", gate_layout="interleaved"),
    "swigluoai": Activation("swiglu_oai", gate_layout="interleaved"),
}
_NAMES |= {name + UNGATED_SUFFIX: Activation(name, gated=False) for name in ("silu", "gelu", "gelu_tanh", "relu2")}


def activation_of(activation: str | Activation) -> Activation:
    """The activation of a name of the family; an `Activation` is returned as it is.

    Gated names read a buffer of twice their width: `silu`, `gelu`, `gelu_tanh`, `relu2` with the gate columns first,
    `swiglu_oai` (or `swigluoai`; alpha 1.702, limit 7) with gate and up interleaved. `silu_no_mul`, `gelu_no_mul`,
    `gelu_tanh_no_mul`, `relu2_no_mul` are not gated. Other alphas, limits and gate layouts: pass an `Activation`, whose
    gate_layout must not be `separate`. Raises InvalidInput (a ValueError) for other names.
    """
    if isinstance(activation, Activation):
        if activation.gate_layout == "separate":
            raise InvalidInput(
                "activation must have its gate and up columns in one buffer, as w1 has, got gate_layout='separate'; "
                "choose halves or interleaved"
            )
        return activation
    found = _NAMES.get(activation)
    if found is None:
        raise InvalidInput(
            f"activation must be one of {', '.join(_NAMES)} or an Activation, got {activation!r}; name one of these"
        )
    return found


def width_after(width: int, activation: str | Activation) -> int:
    """Columns that an activation makes of `width` columns: half of them if it is gated."""
    return width // 2 if activation_of(activation).gated else width
