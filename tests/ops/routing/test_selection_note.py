"""Plans say what experts are selected on."""

from __future__ import annotations

import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.routing.topk import plan_routing
from moe_core.specs.routing import RouterSpec

LOGITS, BIAS = ArraySpec((4, 8), "float32"), ArraySpec((8,), "float32")


@pytest.mark.parametrize(
    ("spec", "bias", "on"),
    [
        (RouterSpec(2), None, "the logits"),
        (RouterSpec(2, "sigmoid"), BIAS, "score + bias"),
        (RouterSpec(2, "sigmoid", bias_on="logits"), BIAS, "logit + bias"),
        (RouterSpec(2, "sigmoid", group_score="pair"), None, "the logits"),
        (RouterSpec(2, "sigmoid", num_groups=2, group_score="pair"), None, "the scores"),
        (RouterSpec(2, "sigmoid", num_groups=2, group_score="best"), None, "the logits"),
    ],
    ids=str,
)
def test_what_experts_are_selected_on(spec: RouterSpec, bias: ArraySpec | None, on: str) -> None:
    assert f"selection on {on}" in plan_routing(LOGITS, spec, Target("interpreter"), correction_bias=bias).notes
