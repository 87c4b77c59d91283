"""Layouts in memory."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import WEIGHT_LAYOUTS, plan_type, require_choice
from moe_core.specs import MoESpec
from moe_core.specs.matmul import GATE_LAYOUTS


@plan_type
@dataclass(frozen=True)
class Storage:
    """Layouts of a layer's weights in memory.

    weight_layout: experts and shared experts, `in_out` `[E, D, F]` or `out_in` `[E, F, D]`. gate_layout: of gated
    activations, `halves` `[E, D, 2F]` gate first, `interleaved` gate even columns, or `separate`, two buffers.
    router_weight_layout: `in_out` `[D, E]` or `out_in` `[E, D]`.
    """

    weight_layout: str
    gate_layout: str
    router_weight_layout: str

    def __post_init__(self) -> None:
        require_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        require_choice("gate_layout", self.gate_layout, GATE_LAYOUTS)
        require_choice("router_weight_layout", self.router_weight_layout, WEIGHT_LAYOUTS)


def storage_of(spec: MoESpec) -> Storage:
    """The layouts in an op's spec. The gate_layout of ungated activations is nominal."""
    return Storage(spec.weight_layout, spec.activation.gate_layout or "halves", spec.router_weight_layout)


#: Hugging Face's fused storage, the default of torch layers.
HUGGING_FACE = Storage("out_in", "halves", "out_in")
#: MaxText's, the default of Flax layers: gate (wi_0) and up (wi_1) are two parameters.
MAXTEXT = Storage("in_out", "separate", "in_out")
