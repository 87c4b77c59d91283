"""Names of a MoE's arrays and results."""

from __future__ import annotations

from moe_core.base import ArraySpec
from moe_core.specs import ExpertWeights, LoRAFactors, MoESpec, RouterWeights, SharedExpert, TopK

#: Arrays without a gradient.
CONSTANTS = ("experts.layer_index", "routing.ids", "routing.correction_bias", "token_mask", "expert_map")
CONSTANTS += ("adapter_ids", "lora.scale", "lora.ranks", "lora.seed")
#: Only of quantised experts. A forward that reads them has no gradient.
INPUT_SCALES = ("experts.gate_up_input_scale", "experts.down_input_scale")
#: Results with a gradient: fields of OutputGradients.
FLOWING = ("output", "weights", "logits")

BY_TOKEN = ("x", "token_mask", "adapter_ids", "routing.logits", "routing.ids", "routing.weights")


def result_names(routing: type) -> tuple[str, ...]:
    """Results of a forward, in order. routing: its class."""
    names = ("output", "tokens_per_expert", "invalid_ids")
    names += () if routing is TopK else ("ids", "weights")
    return (*names, "logits") if routing is RouterWeights else names


def saved_names(spec: MoESpec, shared: SharedExpert | None, lora: LoRAFactors | None = None) -> tuple[str, ...]:
    """Outputs that a forward adds for the backward, in order."""
    lows = () if lora is None else tuple(f"saved.low{n}" for n in (1, 2) if getattr(lora, f"a{n}") is not None)
    adapters = () if lora is None else ("saved.virtual_sizes", "saved.virtual_start", *lows)
    names = ("saved.group_start", "saved.slot_of_row", "saved.row_of_slot", *adapters)
    if not spec.recompute:
        names = ("saved.pre_activation", *names, *(() if shared is None else ("saved.shared_pre_activation",)))
    return names if shared is None or shared.gate is None else (*names, "saved.shared_gate")


def saved_pre_activation(bundle: ExpertWeights | SharedExpert, x: ArraySpec, spec: MoESpec, rows: int) -> ArraySpec:
    """The result of matmul 1 for `rows` rows, in the dtype of x."""
    width = bundle.down.shape[-2 if spec.weight_layout == "in_out" else -1]
    return ArraySpec((rows, spec.activation.input_width(width)), x.dtype)
