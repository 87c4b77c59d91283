"""The experts of Hugging Face models on Moebius.

    import moe_torch.transformers
    moe_torch.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moebius")

Router, attention and everything else stay as transformers has them; the experts' two products, activation and weighted
sum run as one operator, on the model's own weights, where they lie and as they lie: nothing is copied or converted.
A model made before: `model.set_experts_implementation("moebius")`. Works in `generate` and under `torch.compile`.

Rounding: products, biases, activation and router weights are computed in float32, and cast to the weights' dtype after
each product; eager experts round in more places. Float32 models agree closely, others within their dtype.

Differentiable: training works, of the model's router too, which gets the gradient of the weights it gave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.base.dtypes import MATMUL_DTYPES
from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs import Activation, MatmulSpec, MoESpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands, TopK
from moe_torch import ops
from moe_torch.bridge.options import DTYPE_NAMES, constant_result

try:
    from transformers import activations
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise Unsupported(
        f"moe_torch.transformers needs transformers 5.17 or later, got: {error}; pip install 'transformers>=5.17'"
    ) from error

__all__ = ["NAME", "align_weights", "experts_forward", "register"]

#: What `experts_implementation` is to be.
NAME = "moebius"

#: Modules and functions that models use as `act_fn` -> the activation they compute.
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
#: The gate of experts that have none of their own: act(gate) * up of two halves.
_PLAIN_GATE = ("transformers.integrations.moe", "_default_apply_gate")


def _swiglu_oai(alpha: str, limit: str, layout: str = "halves") -> tuple[str, Callable[[Any], Activation]]:
    """(gate layout, the activation of experts that hold its constants as attributes of these names)."""
    return layout, lambda experts: Activation(
        "swiglu_oai", gate_layout=layout, alpha=getattr(experts, alpha), limit=getattr(experts, limit)
    )


def _softcapped(experts: Any) -> Activation:
    caps = experts.act_fn
    return Activation("softcapped_silu", alpha=caps.gate_softcap.softcap, limit=caps.up_softcap.softcap)


#: Gates of models' own -> (gate layout, the activation).
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


def register() -> None:
    """Make `experts_implementation="moebius"` known to transformers, in this process. Calling it again changes nothing.

    Experts that cannot run on Moebius raise Unsupported, with the reason, when they are called.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, _refuse_quantised_experts)


def align_weights(model: torch.nn.Module) -> int:
    """Copy every expert weight that starts at no multiple of 16 bytes to memory that does; how many there were.

    Needed once after `from_pretrained` on a CPU where it leaves stacked weights in the mapped file (gpt-oss), as the
    error for them says. Weights on a GPU are aligned.
    """
    weights = [
        weight
        for module in model.modules()
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed")
        for weight in module.parameters(recurse=False)
        if weight.data_ptr() % ALIGNMENT
    ]
    for weight in weights:
        weight.data = weight.data.clone()
    return len(weights)


def experts_forward(
    experts: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The forward of an experts module of transformers: output `[T, D]` in the dtype of hidden_states.

    experts: a class decorated with transformers' `use_experts_implementation`, whose flags say how its weights lie.
    hidden_states `[T, D]`, cast to the weights' dtype where it has another, as autocast leaves it; top_k_index `[T, K]`
    integers, one outside [0, E) is no expert (transformers' mark of another process's experts); top_k_weights `[T, K]`.
    Experts whose results are normalised one by one (`has_post_expert_norm`) run as several operators around the norm,
    and the traces of `moe_torch.trace` do not see them. Raises InvalidInput for weights that start at no multiple of 16
    bytes: see align_weights. Raises Unsupported for experts that are quantised, or activated in a way Moebius does not
    have.
    """
    module: Any = experts
    weight = module.gate_up_proj if module.has_gate else module.up_proj
    if weight.dtype not in DTYPE_NAMES or DTYPE_NAMES[weight.dtype] not in MATMUL_DTYPES:
        raise _unsupported(module, f"has weights of {weight.dtype}, not of {', '.join(MATMUL_DTYPES)} (quantised)")
    biases: dict[str, torch.Tensor] = {}
    if module.has_bias:
        biases["gate_up_bias"] = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        biases["down_bias"] = module.down_proj_bias
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():
        _require_alignment(module)
    spec = MoESpec(_activation(module), weight_layout="in_out" if module.is_transposed else "out_in")
    x = hidden_states.to(weight.dtype).contiguous()
    routing = TopK(top_k_index.to(torch.int32).contiguous(), top_k_weights.to(torch.float32).contiguous())
    weights = ExpertWeights(weight, module.down_proj, **biases)
    run = _around_norm if getattr(module, "has_post_expert_norm", False) else _whole
    return run(module, x, weights, routing, spec).to(hidden_states.dtype)


def _whole(experts: Any, x: torch.Tensor, weights: ExpertWeights, routing: TopK, spec: MoESpec) -> torch.Tensor:
    return ops.moe(x, weights, routing, spec).output


def _around_norm(experts: Any, x: torch.Tensor, weights: ExpertWeights, routing: TopK, spec: MoESpec) -> torch.Tensor:
    """Experts with a norm between the second product and the router weight: stage by stage, with the model's norm."""
    layout = ops.make_layout(routing.ids, weights.down.shape[0])
    first = MatmulOperands(x, weights.gate_up, bias=weights.gate_up_bias)
    hidden = ops.activation(ops.matmul_ogs(first, layout, MatmulSpec(spec.weight_layout, "token")), spec.activation)
    second = MatmulOperands(hidden, weights.down, bias=weights.down_bias)
    slots = ops.matmul_ogs(second, layout, MatmulSpec(spec.weight_layout, scatter="slot"))
    weighted = experts.post_expert_norm(slots).float() * routing.weights.reshape(-1, 1)
    return ops.reduce(weighted, layout, out_dtype=x.dtype)


def _require_alignment(experts: Any) -> None:
    for name, weight in experts.named_parameters(recurse=False):
        if weight.data_ptr() % ALIGNMENT:
            raise InvalidInput(
                f"{name} of {type(experts).__name__} must start at a multiple of {ALIGNMENT} bytes, got address "
                f"{weight.data_ptr():#x}, in a mapped file; call moe_torch.transformers.align_weights(model) once"
            )


def _activation(experts: Any) -> Activation:
    """What the experts compute between their products; Unsupported where Moebius has no such activation."""
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
    raise _unsupported(experts, f"gates {layout} of its weights by {gate}, which is no activation of Moebius")


@constant_result
def _gate(kind: type) -> tuple[str, str]:
    """(module, qualified name) of the function with which a class of experts gates."""
    function: Any = kind._apply_gate  # type: ignore[attr-defined]
    return function.__module__, function.__qualname__


def _name(experts: Any) -> str:
    function = experts.act_fn
    if isinstance(function, torch.nn.Module):
        kind = type(function)
        if kind in _ACTIVATIONS:
            return _ACTIVATIONS[kind]
        raise _unsupported(experts, f"activates by {kind.__name__}")
    if function in _FUNCTIONS:
        return _FUNCTIONS[function]
    raise _unsupported(experts, f"activates by {function}")


def _refuse_quantised_experts(experts: torch.nn.Module, *arguments: Any, **keywords: Any) -> torch.Tensor:
    raise _unsupported(experts, "has weights in fp8 (quantised)")


def _unsupported(experts: Any, reason: str) -> Unsupported:
    return Unsupported(
        f"experts_implementation {NAME!r} cannot run {type(experts).__name__}, which {reason}; run this model by "
        "model.set_experts_implementation('eager'), or 'grouped_mm'"
    )
