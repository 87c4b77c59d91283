"""The activations of transformers' experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import activations

from moe_core.errors import Unsupported
from moe_core.specs import Activation
from moe_torch.bridge.options import constant_result

NAME = "moebius"

_ACTIVATIONS = {
    activations.SiLUActivation: "silu",
    torch.nn.SiLU: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
    activations.AccurateGELUActivation: "gelu_tanh",
    activations.ReLUSquaredActivation: "relu2",
}
_FUNCTIONS = {torch.nn.functional.silu: "silu", torch.nn.functional.gelu: "gelu"}
#: The default gate of experts: act(gate) * up of two halves.
_PLAIN_GATE = ("transformers.integrations.moe", "_default_apply_gate")
_FP8_GATE = ("transformers.integrations.finegrained_fp8", "FP8Experts._apply_gate")


def _swiglu_oai(alpha: str, limit: str, layout: str = "halves") -> tuple[str, Callable[[Any], Activation]]:
    """(gate layout, the activation with the constants in these attributes)."""
    return layout, lambda experts: Activation(
        "swiglu_oai", gate_layout=layout, alpha=getattr(experts, alpha), limit=getattr(experts, limit)
    )


def _softcapped(experts: Any) -> Activation:
    caps = experts.act_fn
    return Activation("softcapped_silu", alpha=caps.gate_softcap.softcap, limit=caps.up_softcap.softcap)


_GATES: dict[str, tuple[str, Callable[[Any], Activation]]] = {
    "GptOssExperts._apply_gate": _swiglu_oai("alpha", "limit", "interleaved"),
    "OpenAIPrivacyFilterExperts._apply_gate": _swiglu_oai("alpha", "limit"),
    "MiniMaxM3VLExperts._apply_gate": _swiglu_oai("swiglu_alpha", "swiglu_limit"),
    # In fp32, as here.
    "BeamExperts._apply_gate": ("halves", lambda experts: Activation(_name(experts))),
    "DeepseekV4Experts._apply_gate": ("halves", lambda experts: Activation(_name(experts), limit=experts.limit)),
    "Glm5NextTextExperts._apply_gate": ("halves", lambda experts: Activation("silu", limit=experts.swiglu_limit)),
    "HYV4Experts._apply_gate": ("halves", lambda experts: Activation("silu", limit=experts.swiglu_limit)),
    "Inkling2Experts._apply_gate": ("halves", _softcapped),
}


def _of_fp8(experts: Any) -> Activation:
    if getattr(experts, "gate_softcap", None) is not None:
        return Activation("softcapped_silu", alpha=experts.gate_softcap, limit=experts.up_softcap)
    if experts.swiglu_alpha is not None:
        return Activation("swiglu_oai", alpha=experts.swiglu_alpha, limit=experts.swiglu_limit)
    return Activation(_name(experts), limit=experts.limit)


def activation_of(experts: Any) -> Activation:
    """The activation between the experts' products. Raises Unsupported."""
    if not experts.has_gate:
        return Activation(_name(experts), gated=False)
    module, gate = _gate(type(experts))
    layout = "halves" if experts.is_concatenated else "interleaved"
    if (module, gate) == _PLAIN_GATE and layout == "halves":
        return Activation(_name(experts))
    if module.startswith("transformers.models.") and gate in _GATES:
        known, activation = _GATES[gate]
        if layout == known:
            return activation(experts)
    if (module, gate) == _FP8_GATE:
        return _of_fp8(experts)
    raise unsupported(experts, f"gates {layout} of its weights by {gate}, which is no activation of Moebius")


@constant_result
def _gate(kind: type) -> tuple[str, str]:
    function: Any = kind._apply_gate  # type: ignore[attr-defined]
    return function.__module__, function.__qualname__


def _name(experts: Any) -> str:
    function = experts.act_fn
    if isinstance(function, torch.nn.Module):
        kind = type(function)
        if kind in _ACTIVATIONS:
            return _ACTIVATIONS[kind]
        raise unsupported(experts, f"activates by {kind.__name__}")
    if function in _FUNCTIONS:
        return _FUNCTIONS[function]
    raise unsupported(experts, f"activates by {function}")


def unsupported(experts: Any, reason: str) -> Unsupported:
    return Unsupported(
        f"experts_implementation {NAME!r} cannot run {type(experts).__name__}, which {reason}; run this model by "
        "model.set_experts_implementation('eager'), or 'grouped_mm'"
    )
